"""CacheRequest: one request's digests, its save mark, and the plans for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvmask._core import MAX_TOKENS, BlockHashes
from kvmask.coordinator import Hit
from kvmask.errors import ArgumentError
from kvmask.groups import check_count
from kvmask.hashing.chain import BlockHasher
from kvmask.plans.load import LoadPlan
from kvmask.plans.lookup import LookupPlan
from kvmask.plans.results import Handoff, SaveResult
from kvmask.plans.save import SavePlan
from kvmask.plans.tools import PlanTools

# Per block from the first one on that is asked for: (first block, number of blocks) to extra keys.
ExtraKeys = Sequence[tuple[Any, ...] | None] | Callable[[int, int], Sequence[Any]]


class Agreement(Protocol):
    """What a request needs of its contract."""

    fingerprint: str

    @property
    def hash_block_size(self) -> int: ...
    def check_hashes(self, hashes: BlockHashes, /) -> None: ...
    def hasher(self) -> BlockHasher: ...


class CacheRequest:
    """One request of an engine. Made by `Contract.request`.

    It knows the request's digests, how far it is saved, and what the engine held at its lookup, and
    makes the plans. It holds no memory. A request belongs to one thread at a time: threads that
    share none make their own from the digests, which costs nothing.

    Args:
        contract: What it belongs to.
        token_ids: The request's tokens, in a form that `kvmask.hash_tokens` takes.
        hashes: The digests that the engine has made, instead of tokens: one per full hash block.
        num_tokens: Tokens of the request, when it is made from digests; by default those that the
            digests name.
        num_prompt_tokens: Length of the prompt, for the replay boundaries of sparse retention; by
            default all tokens that the request begins with.
        extra_keys: What goes into the hashes besides tokens (salt, adapter, media): one tuple or
            None per full hash block, or a function of (first block, number of blocks) that gives
            them, for requests that grow. `kvmask.hashing.block_extra_keys` makes them.

    Attributes:
        contract: The contract.
        num_prompt_tokens: Length of the prompt.
        mark: Tokens; `SaveResult.mark` of the last save, where the next one begins.
        hit: The hit of the last lookup, or None.

    Raises:
        ArgumentError: Neither tokens nor digests are given, or both; digests are known to be of
            another hash block size, algorithm or start; or a number is out of range.
        HashInputError: Tokens or extra keys that have no exact digest.
    """

    def __init__(
        self,
        contract: Agreement,
        token_ids: Any = None,
        *,
        hashes: BlockHashes | Sequence[bytes] | None = None,
        num_tokens: int | None = None,
        num_prompt_tokens: int | None = None,
        extra_keys: ExtraKeys | None = None,
    ) -> None:
        if (token_ids is None) == (hashes is None):
            raise ArgumentError(
                "exactly one of `token_ids` and `hashes` must be given, "
                f"got {'both' if hashes is not None else 'none'}"
            )
        self.contract = contract
        self.mark = 0
        self.hit: Hit | None = None
        self._handoffs: list[Handoff] = []
        self._hasher: BlockHasher | None = None
        self._extra_keys: ExtraKeys | None = extra_keys
        self._hashes: BlockHashes | None = None
        if hashes is not None:
            if extra_keys is not None:
                raise ArgumentError(
                    "`extra_keys` must be None for digests, which hold them already"
                )
            self._take_digests(hashes, num_tokens)
        else:
            if num_tokens is not None:
                raise ArgumentError(
                    f"`num_tokens` must be None beside `token_ids`, got {num_tokens}"
                )
            self._hasher = contract.hasher()
            self._num_tokens = 0
            self.extend(token_ids)
        if num_prompt_tokens is None:
            num_prompt_tokens = self._num_tokens or None
        else:
            num_prompt_tokens = check_count(num_prompt_tokens, "num_prompt_tokens", 1, MAX_TOKENS)
        self.num_prompt_tokens = num_prompt_tokens

    def _take_digests(self, hashes: BlockHashes | Sequence[bytes], num_tokens: int | None) -> None:
        digests = hashes if isinstance(hashes, BlockHashes) else BlockHashes.from_list(hashes)
        self.contract.check_hashes(digests)
        unit = self.contract.hash_block_size
        covered = len(digests) * unit
        if num_tokens is None:
            num_tokens = covered
        num_tokens = check_count(num_tokens, "num_tokens", 0, MAX_TOKENS)
        if num_tokens // unit > len(digests):
            raise ArgumentError(
                "`hashes` must have one digest for every full hash block, "
                f"got {len(digests)} digests of {unit} tokens for {num_tokens} tokens"
            )
        self._hashes = digests
        self._num_tokens = num_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of the request so far."""
        return self._num_tokens

    @property
    def hashes(self) -> BlockHashes:
        """One digest for every full hash block of the tokens so far."""
        if self._hashes is None:
            assert self._hasher is not None
            self._hashes = self._hasher.block_hashes()
        return self._hashes

    def extend(
        self,
        token_ids: Any = None,
        *,
        hashes: BlockHashes | Sequence[bytes] | None = None,
        num_tokens: int | None = None,
    ) -> None:
        """Append what the request has grown by.

        Args:
            token_ids: New tokens, when the request was made from tokens.
            hashes: All digests so far, when it was made from digests.
            num_tokens: All tokens so far, beside ``hashes``.

        Raises:
            ArgumentError: The request was made from the other kind, or has shrunk.
            HashInputError: Tokens or extra keys that have no exact digest.
        """
        if self._hasher is None:
            if hashes is None or token_ids is not None:
                raise ArgumentError(
                    "`hashes` must be given to a request that was made from digests"
                )
            before = self._num_tokens
            if len(hashes) < len(self.hashes) or (num_tokens is not None and num_tokens < before):
                raise ArgumentError(
                    "`hashes` must hold all digests of the request, "
                    f"got {len(hashes)} after {len(self.hashes)}"
                )
            self._take_digests(hashes, num_tokens)
            return
        if hashes is not None or num_tokens is not None or token_ids is None:
            raise ArgumentError("`token_ids` must be given to a request that was made from tokens")
        count = len(token_ids)
        first = len(self._hasher.hashes)
        new = (self._num_tokens + count) // self.contract.hash_block_size - first
        given = self._extra_keys
        extras: Sequence[Any] | None = None
        if given is not None and new:
            extras = given(first, new) if callable(given) else list(given)[first : first + new]
            if len(extras) != new:
                raise ArgumentError(
                    "`extra_keys` must have one entry for every full hash block, "
                    f"got {first + len(extras)} and {first + new}"
                )
        self._hasher.extend(token_ids, extras)
        self._num_tokens += count
        self._hashes = None

    def hand_over(self, group: int | str, num_tokens: int, block_id: int) -> None:
        """Have a block saved under the digest of its own boundary, with the next save.

        Engines whose state blocks do not stay in the block table save recurrent states so.

        Args:
            group: Index or name of the group.
            num_tokens: The boundary, a multiple of the hash block size.
            block_id: The block that holds the state there.
        """
        self._handoffs.append(Handoff(group, num_tokens, block_id))

    def lookup_plan(
        self, held: Any = 0, strategy: str = "staged", tools: PlanTools | None = None
    ) -> LookupPlan:
        """The plan of this request's lookup.

        Args:
            held: What the engine holds itself (see `kvmask.plans.held`).
            strategy: ``"staged"`` or ``"exact"``.
            tools: Policy, hints, memos and counters.
        """
        return LookupPlan(
            self.contract,
            self.hashes,
            self._num_tokens,
            held=held,
            strategy=strategy,
            tools=tools,
        )

    def load_plan(
        self,
        bound: Any,
        hit: Hit,
        tables: Any,
        event: Any = None,
        tools: PlanTools | None = None,
    ) -> LoadPlan:
        """The plan that fills the blocks of a hit; see `LoadPlan`.

        Args:
            bound: The contract, bound to this rank's memory.
            hit: The hit.
            tables: Per group the block table to fill.
            event: CUDA event or stream to wait for before memory is written.
            tools: Policy, memos and counters.
        """
        return LoadPlan(bound, self.hashes, tables, hit, event=event, tools=tools)

    def save_plan(
        self,
        bound: Any,
        tables: Any,
        num_tokens: int,
        event: Any = None,
        tools: PlanTools | None = None,
    ) -> SavePlan:
        """The plan that saves what is new since the mark; see `SavePlan`.

        It also saves what `hand_over` was told. Give its result to `saved`.

        Args:
            bound: The contract, bound to this rank's memory.
            tables: Per group the block table.
            num_tokens: Tokens whose blocks are computed.
            event: CUDA event or stream to wait for before memory is read.
            tools: Policy, memos and counters.
        """
        return SavePlan(
            bound,
            self.hashes,
            tables,
            num_tokens,
            start_token=self.mark,
            num_prompt_tokens=self.num_prompt_tokens,
            handoffs=self._handoffs,
            event=event,
            tools=tools,
        )

    def saved(self, result: SaveResult) -> SaveResult:
        """Remember how far the request is saved. Blocks that were handed over are forgotten once
        all that was planned is in the store."""
        self.mark = max(self.mark, result.mark)
        if result.ok:
            self._handoffs.clear()
        return result

    def __repr__(self) -> str:
        return (
            f"<CacheRequest: {self._num_tokens} tokens, {len(self.hashes)} digests, "
            f"saved up to {self.mark}>"
        )
