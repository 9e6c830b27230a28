"""What the bytes of a group's blocks mean: the facts that engines must share to share objects.

Facts come from layouts by themselves and hold no address and no number of blocks. Where a cache is
more than its element type says (fp8 kept in uint8), the user adds a fact of his own.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from kvmask._core import check_integer, shown
from kvmask.arrays import ArrayView
from kvmask.errors import ArgumentError

__all__ = ["Fact", "PayloadFacts", "TensorFacts", "check_facts", "tensor_facts"]

Fact = str | int | bool | None
#: Bits of an integer among the facts. Python does not write out arbitrarily long ones.
MAX_FACT_BITS = 256

_BITS = {"f": "float", "i": "int", "u": "uint", "c": "complex"}


class TensorFacts(NamedTuple):
    """What the bytes of one tensor mean, wherever it lies.

    Attributes:
        dtype: Element type, such as "float16"; None when nobody said.
        order: The dimensions in memory, outermost first, as "number:size". They are numbered
            without the dimension that counts blocks. "b4" stands where a block is four entries of
            that one.
        block_bytes: Bytes of one block.
    """

    dtype: str | None
    order: str
    block_bytes: int


class _Layout(Protocol):
    block_bytes: int
    tensors: tuple[TensorFacts, ...]


def element_type(dtype: str) -> str:
    """One name for an element type, from torch's name or the array interface's.

    >>> element_type("torch.float16"), element_type("<f2"), element_type("|u1")
    ('float16', 'float16', 'uint8')
    """
    found = re.fullmatch(r"([<>=|])([a-zA-Z])([0-9]+)", dtype)
    if not found:
        return dtype.removeprefix("torch.")
    order, kind, size = found[1], found[2], int(found[3])
    name = f"{_BITS[kind]}{8 * size}" if kind in _BITS else "bool" if kind == "b" else f"raw{size}"
    foreign = ">" if sys.byteorder == "little" else "<"
    return f"{name} {order}" if order == foreign and size > 1 else name


def tensor_facts(view: ArrayView, num_blocks: int, block_dim: int, order: str) -> TensorFacts:
    """The facts of one tensor.

    Args:
        view: The tensor.
        num_blocks: Blocks of its group.
        block_dim: The dimension that counts them.
        order: The text that `kvmask.layout` has of its dimensions, after the element type.

    Where the dimension of the blocks stands is left out as long as a block is one entry of it: the
    bytes of a block are the same.
    """
    words = []
    for word in order.split()[1:]:
        number, _, size = word.partition(":")
        if size:
            words.append(f"{int(number) - (int(number) > block_dim)}:{size}")
        elif word != "b1":
            words.append(word)
    block_bytes = math.prod(view.shape) // num_blocks * view.itemsize
    return TensorFacts(element_type(view.dtype), " ".join(words), block_bytes)


def check_facts(facts: Any, name: str) -> dict[str, Fact]:
    """A copy of facts that a user stated: names to text, integers, booleans or None."""
    if not isinstance(facts, Mapping):
        raise TypeError(f"`{name}` must be a mapping, got {type(facts).__name__}")
    for key, value in facts.items():
        if isinstance(value, int) and value.bit_length() > MAX_FACT_BITS:
            raise ArgumentError(
                f"`{name}` must hold integers of at most {MAX_FACT_BITS} bits, "
                f"got {shown(key)} with {value.bit_length()}"
            )
        if not isinstance(key, str) or not isinstance(value, str | int | type(None)):
            raise ArgumentError(
                f"`{name}` must map text to text, integers, booleans or None, "
                f"got {shown(key)}: {shown(value)}"
            )
        for text in (key, value):
            if isinstance(text, str) and not text.isascii():
                try:
                    text.encode()
                except UnicodeEncodeError:
                    raise ArgumentError(f"`{name}` must hold valid Unicode, got {text!r}") from None
    return dict(facts)


def _texts(values: Any, name: str) -> tuple[str, ...]:
    items = (values,) if isinstance(values, str) else values
    if not isinstance(items, Sequence) or not all(isinstance(item, str) for item in items):
        raise TypeError(f"`{name}` must be text or a sequence of text, got {shown(values)}")
    return tuple(items)


def _counts(values: Any, name: str, low: int) -> tuple[int, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        values = (values,)
    for value in values:
        check_integer(value, name, low)
    return tuple(int(value) for value in values)


@dataclass(frozen=True)
class PayloadFacts:
    """Facts of the bytes of one group's blocks, without their memory.

    None stands for a fact that nobody stated; it is not compared.

    Args:
        dtype: Element types, sorted and joined by commas.
        layout: The different layouts of the tensors, sorted: element type, then the dimensions in
            memory order (see `TensorFacts`).
        token_bytes: Per entry of ``layout`` the bytes of one token in one tensor (of one state, in
            a state group).
        layers: Per tensor of a block, in order, its entry of ``layout``.
        block_bytes: Bytes of one block.
        extra: Further names and values, such as what fp8 in uint8 means.

    Raises:
        ArgumentError: A number is out of range, or the lengths do not fit.

    >>> PayloadFacts(dtype="float16", token_bytes=256).token_bytes
    (256,)
    """

    dtype: str | None = None
    layout: tuple[str, ...] | None = None
    token_bytes: tuple[int, ...] | None = None
    layers: tuple[int, ...] | None = None
    block_bytes: int | None = None
    extra: Mapping[str, Fact] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.dtype is not None and not isinstance(self.dtype, str):
            raise TypeError(f"`dtype` must be text, got {type(self.dtype).__name__}")
        values: dict[str, Any] = {"extra": MappingProxyType(check_facts(self.extra, "extra"))}
        if self.layout is not None:
            values["layout"] = _texts(self.layout, "layout")
        if self.token_bytes is not None:
            values["token_bytes"] = _counts(self.token_bytes, "token_bytes", 0)
        if self.layers is not None:
            values["layers"] = _counts(self.layers, "layers", 0)
        if self.block_bytes is not None:
            check_integer(self.block_bytes, "block_bytes")
            values["block_bytes"] = int(self.block_bytes)
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if self.layout is not None:
            count = len(self.layout)
            if self.token_bytes is not None and len(self.token_bytes) != count:
                raise ArgumentError(
                    "`token_bytes` must have one entry per entry of `layout`, "
                    f"got {len(self.token_bytes)} and {count}"
                )
            if self.layers is not None and any(i >= count for i in self.layers):
                raise ArgumentError(
                    f"`layers` must name entries of `layout`, got {max(self.layers)} of {count}"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        values = (getattr(self, item.name) for item in fields(self))
        return PayloadFacts, tuple(dict(v) if isinstance(v, Mapping) else v for v in values)

    def __hash__(self) -> int:
        return hash((self.dtype, self.layout, self.token_bytes, self.layers, self.block_bytes))

    @classmethod
    def of(cls, layout: _Layout, block_size: int, *, state: bool = False) -> PayloadFacts:
        """The facts of a layout.

        Args:
            layout: A KVLayout.
            block_size: Tokens per block.
            state: A block is one state rather than so many tokens.
        """
        if not hasattr(layout, "tensors") or not hasattr(layout, "block_bytes"):
            raise TypeError(f"`layout` must be a KVLayout, got {type(layout).__name__}")
        check_integer(block_size, "block_size")
        if not layout.tensors:
            return cls(block_bytes=layout.block_bytes)
        kinds = {
            f"{tensor.dtype or 'unknown'} {tensor.order}".strip(): tensor
            for tensor in layout.tensors
        }
        names = sorted(kinds)
        sizes = [kinds[name].block_bytes for name in names]
        whole = state or any(size % block_size for size in sizes)
        dtypes = sorted({tensor.dtype for tensor in layout.tensors if tensor.dtype})
        position = {name: i for i, name in enumerate(names)}
        return cls(
            dtype=",".join(dtypes) or None,
            layout=tuple(names),
            token_bytes=None
            if whole and not state
            else tuple(size if state else size // block_size for size in sizes),
            layers=tuple(
                position[f"{tensor.dtype or 'unknown'} {tensor.order}".strip()]
                for tensor in layout.tensors
            ),
            block_bytes=layout.block_bytes,
        )

    @property
    def states_bytes(self) -> bool:
        """Whether any fact is stated that tells unlike caches apart."""
        said = (self.dtype, self.layout, self.token_bytes, self.block_bytes, self.extra)
        return any(said)

    def shared(self, *, layers: bool, sizes: bool) -> PayloadFacts:
        """Those facts that all ranks have.

        Args:
            layers: All ranks have the same layers.
            sizes: All ranks have tensors of the same sizes.
        """
        made = self
        if not sizes:
            made = replace(made, layout=None, token_bytes=None)
        if not (layers and sizes):
            made = replace(made, layers=None, block_bytes=None)
        return made

    def plain(self) -> dict[str, Any]:
        """All facts as JSON has them; ``layers`` as runs of (count, entry of ``layout``)."""
        layers = self.layers
        return {
            "dtype": self.dtype,
            "layout": None if self.layout is None else list(self.layout),
            "token_bytes": None if self.token_bytes is None else list(self.token_bytes),
            "layers": layers
            and [[len(list(run)), entry] for entry, run in itertools.groupby(layers)],
            "block_bytes": self.block_bytes,
            "extra": dict(sorted(self.extra.items())),
        }

    def differences(self, other: PayloadFacts, *, subset: bool = False) -> list[str]:
        """Where both state a fact and disagree, as "name THEIRS for MINE".

        Args:
            other: The other's facts.
            subset: The other may have fewer kinds of tensors, as a pipeline stage can.

        Raises:
            TypeError: It is no PayloadFacts.
        """
        if not isinstance(other, PayloadFacts):
            raise TypeError(f"`other` must be PayloadFacts, got {type(other).__name__}")
        found = []
        for name in ("dtype", "layout", "token_bytes", "layers", "block_bytes"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is None or theirs is None or mine == theirs:
                continue
            if subset and name in ("layout", "dtype") and set(_words(theirs)) <= set(_words(mine)):
                continue
            if subset and name == "token_bytes" and _kinds(other) <= _kinds(self):
                continue
            found.append(f"{name} {_show(theirs)} for {_show(mine)}")
        for name in self.extra.keys() & other.extra.keys():
            mine, theirs = self.extra[name], other.extra[name]
            if (mine, type(mine)) != (theirs, type(theirs)):
                found.append(f"{name} {theirs!r} for {mine!r}")
        return found


def _words(value: Any) -> Sequence[str]:
    return value.split(",") if isinstance(value, str) else value


def _kinds(facts: PayloadFacts) -> set[tuple[str, int]]:
    return set(zip(facts.layout or (), facts.token_bytes or (), strict=False))


def _show(value: Any) -> str:
    """A value short enough for a message."""
    if isinstance(value, tuple):
        shown = ", ".join(repr(item) for item in value[:4])
        return f"({shown}, ... {len(value)} in all)" if len(value) > 4 else f"({shown})"
    return repr(value)
