"""What all key schemas share: text checks, keys built in the core, and their inverse."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvmask._core import Bitset, BlockHashes, KeyBuilder, build_keys, check_integer, shown
from kvmask.errors import ArgumentError, KeyFormatError, KeyFormatWarning

Hashes = BlockHashes | Sequence[bytes]
Mask = Bitset | Sequence[bool]
S = TypeVar("S", bound="KeySchema")

#: Largest rank, size or index that a key names.
MAX_COUNT = (1 << 32) - 1


def check_text(value: str, name: str) -> None:
    """Refuse what is no text or cannot be stored as UTF-8."""
    if not isinstance(value, str):
        raise TypeError(f"`{name}` must be a str, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as e:
        raise KeyFormatError(f"`{name}` must be valid Unicode, got {value!r}") from e


def check_tags(schema: object) -> None:
    """Refuse tags that are no mapping from text to text, and keep a copy of them."""
    tags = schema.tags  # type: ignore[attr-defined]
    if not isinstance(tags, Mapping):
        raise TypeError(f"`tags` must be a mapping, got {type(tags).__name__}")
    for name, value in tags.items():
        check_text(name, "tags")
        check_text(value, "tags")
    object.__setattr__(schema, "tags", dict(tags))


def check_counts(schema: object, names: Sequence[str], low: int = 0, high: int = MAX_COUNT) -> None:
    """Refuse a field that is no integer from low to high, and keep it as a plain int."""
    for name in names:
        value = check_integer(getattr(schema, name), name, low, high)
        object.__setattr__(schema, name, value)  # the dataclasses are frozen


def check_flags(schema: object, names: Sequence[str]) -> None:
    """Refuse a field that is neither True nor False."""
    for name in names:
        if not isinstance(getattr(schema, name), bool):
            raise TypeError(
                f"`{name}` must be True or False, got {type(getattr(schema, name)).__name__}"
            )


def warn(message: str) -> None:
    """Warn at the caller of a schema's constructor."""
    # warn, __post_init__, __init__, caller
    warnings.warn(message, KeyFormatWarning, stacklevel=4)


def last_part(model: str) -> str:
    """The last part of a model's path, which is all that vLLM and its forks put into a key."""
    short = model.rstrip("/").split("/")[-1]
    if not short:
        raise KeyFormatError(f"`model` must name a model, got {model!r}")
    return short


def release_number(release: str, name: str = "release") -> tuple[int, int]:
    """(major, minor) of a release such as "0.32.0"."""
    found = re.match(r"(\d+)\.(\d+)", release) if isinstance(release, str) else None
    if not found:
        raise ArgumentError(f"`{name}` must be a release such as '0.32', got {shown(release)}")
    return int(found[1]), int(found[2])


def read_digest(text: str, key: str) -> bytes:
    """The digest written in a key."""
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if not digest:
        raise KeyFormatError(f"a key must hold the hexadecimal digits of a digest, got {key!r}")
    return digest


@dataclass(frozen=True, slots=True)
class KeyRanks:
    """Whose keys a template is filled in for: one rank namespace of one group.

    Attributes:
        tensor: Number of the tensor-parallel shard.
        context: Decode-context-parallel rank.
        prefill: Prefill-context-parallel rank.
        stage: Pipeline-parallel rank.
        group: Number of the KV cache group.
        shards: Tensor-parallel shards of the group.
        tensor_size: Tensor-parallel size of the engine.
        context_size: Decode-context-parallel size.
        prefill_size: Prefill-context-parallel size.
        stage_size: Pipeline-parallel size.
    """

    tensor: int = 0
    context: int = 0
    prefill: int = 0
    stage: int = 0
    group: int = 0
    shards: int = 1
    tensor_size: int = 1
    context_size: int = 1
    prefill_size: int = 1
    stage_size: int = 1

    @property
    def world_size(self) -> int:
        """Workers with objects of their own: tensor shards times pipeline stages."""
        return self.shards * self.stage_size

    @property
    def world_rank(self) -> int:
        """Number of the worker among them, stage by stage."""
        return self.stage * self.shards + self.tensor


class KeySchema:
    """A namespace of keys: text, the digest of a block, text.

    Schemas are equal when they give equal keys. A schema whose ranks and group have their defaults
    is also a template: `kvmask.Contract` fills those in with `fill`.
    """

    _builder: KeyBuilder

    @property
    def prefix(self) -> str:
        """Everything before the separator in front of the digest."""
        return self._builder.prefix[:-1]

    @property
    def suffix(self) -> str:
        """Everything after the digest."""
        return self._builder.suffix

    @property
    def builder(self) -> KeyBuilder:
        """The core's key builder of this namespace."""
        return self._builder

    @property
    def rank_fields(self) -> Mapping[str, str]:
        """Field to the attribute of a `KeyRanks` that it holds, for all fields to be filled in."""
        return {}

    @property
    def rank_rule(self) -> str:
        """Which tensor ranks share keys: one of ``kvmask.ranks.RULES``."""
        return "equal bytes"

    @property
    def numbers_all_groups(self) -> bool:
        """Whether a group's number is its index among all groups, not the cacheable ones alone."""
        return False

    @property
    def eviction(self) -> KeyBuilder | None:
        """Builds the store's group ids, which name what is evicted together; None: it has none."""
        return None

    def fill(self: S, ranks: KeyRanks) -> S:
        """This template for one rank namespace of one group.

        Nothing is checked or warned about again: the template was when it was made.

        Args:
            ranks: Ranks, group and sizes.
        """
        return self._with(**self._filled(ranks))

    def _filled(self, ranks: KeyRanks) -> dict[str, Any]:
        """The fields that hold ranks, with their values."""
        if not isinstance(ranks, KeyRanks):
            raise TypeError(f"`ranks` must be KeyRanks, got {type(ranks).__name__}")
        return {name: getattr(ranks, source) for name, source in self.rank_fields.items()}

    def _with(self: S, **fields: Any) -> S:
        made = copy.copy(self)
        for name, value in fields.items():
            object.__setattr__(made, name, value)
        made._assemble()
        return made

    def _assemble(self) -> None:
        """Make the builder from fields that are known to be good."""
        raise NotImplementedError

    def _build(self, prefix: str, suffix: str = "", *, as_number: bool = False) -> None:
        # The dataclasses are frozen.
        object.__setattr__(self, "_builder", KeyBuilder(prefix, suffix, as_number=as_number))

    def keys(
        self, hashes: Hashes, mask: Mask | None = None, start: int = 0, scale: int = 1
    ) -> list[str]:
        """Keys of the blocks from ``start`` on.

        Args:
            hashes: One digest per hash block.
            mask: Which blocks from ``start`` on; None means all.
            start: First block.
            scale: Hash blocks per block; block ``i`` is named by digest ``(i + 1) * scale - 1``.

        Returns:
            One key per selected block, ascending.

        Raises:
            ArgumentError: The mask is longer than the blocks from ``start`` on.
        """
        return build_keys((self._builder,), hashes, mask, start, scale)

    def key(self, digest: bytes) -> str:
        """The key of one digest.

        Args:
            digest: The digest of a block, as bytes.

        Raises:
            HashInputError: It is no digest.
        """
        return self.keys([digest])[0]

    @classmethod
    def _candidates(cls: type[S], key: str) -> Iterator[tuple[S, bytes]]:
        """Schemas and digests that might give a key, the likeliest first."""
        raise NotImplementedError

    @classmethod
    def parse(cls: type[S], key: str) -> tuple[S, bytes]:
        """Take a key apart: the inverse of `key`.

        Args:
            key: A key of this schema.

        Returns:
            A schema and a digest with ``schema.key(digest) == key``.

        Raises:
            KeyFormatError: No schema of this class gives that key, or its text fits several.
        """
        if not isinstance(key, str):
            raise TypeError(f"`key` must be a str, got {type(key).__name__}")
        for schema, digest in cls._candidates(key):
            if schema.key(digest) == key:
                return schema, digest
        raise KeyFormatError(f"not a key of {cls.__name__}: {key!r}")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._builder == other._builder

    def __hash__(self) -> int:
        return hash(self._builder)
