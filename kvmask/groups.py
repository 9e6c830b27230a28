"""What a KV cache group is: layers that share one block table and one attention kind.

All sizes are in tokens. Groups are plain values: equal ones (the ``eagle`` flag aside) are searched
as one set, and when one of a set is flagged for EAGLE all are, as in vLLM. ``spec`` keeps apart
groups whose rules agree but whose tensors differ (head size, dtype): any hashable value will do.

`KINDS` is the one list of all kinds. Everything that differs between them and is no rule stands in
their classes; the rules are the core's.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from kvmask._core import MAX_TOKENS, check_integer
from kvmask.errors import ArgumentError

__all__ = ["KINDS", "ChunkedLocal", "FullAttention", "Group", "Mamba", "SlidingWindow"]


class Group:
    """Base class of all kinds of groups.

    Attributes:
        kind: Name of the kind, in schemes, in the JSON of contracts and in the core.
        drops_for_eagle: Whether EAGLE makes its hits shorter.
        block_size: Tokens per block-table entry.
        prefix_cacheable: False for a group that takes no part in masks, keys and hits.
        eagle: Whether it serves an EAGLE drafter.
        spec: Keeps groups with equal rules and different tensors apart.
    """

    kind: ClassVar[str]
    drops_for_eagle: ClassVar[bool] = True
    block_size: int
    prefix_cacheable: bool
    eagle: bool
    spec: Hashable

    @property
    def span(self) -> int:
        """Tokens that the rules of the kind need beside the block size; 0 when they need none."""
        return 0

    @property
    def title(self) -> str:
        """The kind and its sizes in tokens, for people."""
        raise NotImplementedError

    def _set_tokens(self, name: str, low: int = 1) -> None:
        """Check a number of tokens and keep it as a plain int: the dataclasses are frozen."""
        value = check_integer(getattr(self, name), name, low, MAX_TOKENS)
        object.__setattr__(self, name, value)


@dataclass(frozen=True)
class FullAttention(Group):
    """Every token attends to the whole prefix: a hit needs every block from the start.

    Args:
        block_size: Tokens per block-table entry (under decode context parallelism, the effective
            number).
        prefix_cacheable: False for per-request scratch: the group keeps its index and takes no
            part in masks, keys and hits.
        eagle: The last matched block is dropped and recomputed for the drafter.
        spec: Keeps groups with equal rules and different tensors apart.

    >>> FullAttention(block_size=256).block_size
    256
    """

    kind: ClassVar[str] = "full"
    block_size: int
    prefix_cacheable: bool = True
    eagle: bool = False
    spec: Hashable = None

    def __post_init__(self) -> None:
        self._set_tokens("block_size")

    @property
    def title(self) -> str:
        """The kind."""
        return "full attention"


@dataclass(frozen=True)
class SlidingWindow(Group):
    """A token attends to the last ``window`` tokens: a hit needs the blocks below its end.

    Args:
        block_size: Tokens per block.
        window: Tokens a token attends to, itself included. With a window of 1 a hit needs no block
            at all, as in vLLM: the token that is computed attends to itself alone.
        prefix_cacheable: See FullAttention.
        eagle: See FullAttention.
        extra_retained_tokens: Further tokens below the window that a hit must restore (vLLM 0.33:
            the tail that multi-module drafters compute again).
        spec: See FullAttention.
    """

    kind: ClassVar[str] = "window"
    block_size: int
    _: KW_ONLY
    window: int
    prefix_cacheable: bool = True
    eagle: bool = False
    extra_retained_tokens: int = 0
    spec: Hashable = None

    def __post_init__(self) -> None:
        self._set_tokens("block_size")
        self._set_tokens("window")
        self._set_tokens("extra_retained_tokens", 0)

    @property
    def span(self) -> int:
        """The window with the extra tokens."""
        return self.window + self.extra_retained_tokens

    @property
    def title(self) -> str:
        """The kind with the window and the extra tokens."""
        extra = f" + {self.extra_retained_tokens} retained" if self.extra_retained_tokens else ""
        return f"sliding window {self.window}{extra}"


@dataclass(frozen=True)
class ChunkedLocal(Group):
    """Tokens attend within their chunk: blocks before the current chunk count as present.

    Args:
        block_size: Tokens per block.
        chunk_size: Tokens per attention chunk.
        prefix_cacheable: See FullAttention.
        eagle: Not supported (nor is it in vLLM): refused when True.
        spec: See FullAttention.
    """

    kind: ClassVar[str] = "chunked"
    drops_for_eagle: ClassVar[bool] = False
    block_size: int
    chunk_size: int
    prefix_cacheable: bool = True
    eagle: bool = False
    spec: Hashable = None

    def __post_init__(self) -> None:
        self._set_tokens("block_size")
        self._set_tokens("chunk_size")
        if self.eagle:
            raise ArgumentError("`eagle` must be False for ChunkedLocal, got True")

    @property
    def span(self) -> int:
        """The chunk."""
        return self.chunk_size

    @property
    def title(self) -> str:
        """The kind with the chunk."""
        return f"chunked local {self.chunk_size}"


@dataclass(frozen=True)
class Mamba(Group):
    """State layers (align mode): a hit needs the one state that ends at its boundary.

    Args:
        block_size: Tokens between two states.
        prefix_cacheable: See FullAttention.
        eagle: Accepted and without effect on hits: a state is never dropped for a drafter.
        spec: See FullAttention.
    """

    kind: ClassVar[str] = "state"
    drops_for_eagle: ClassVar[bool] = False
    block_size: int
    prefix_cacheable: bool = True
    eagle: bool = False
    spec: Hashable = None

    def __post_init__(self) -> None:
        self._set_tokens("block_size")

    @property
    def title(self) -> str:
        """The kind."""
        return "state"


#: Name to class of every kind. The core has the same names.
KINDS: dict[str, type[Group]] = {
    cls.kind: cls for cls in (FullAttention, SlidingWindow, ChunkedLocal, Mamba)
}
