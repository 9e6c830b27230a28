"""CacheRequest: one request's digests, its save mark, and the plans for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvmask._core import MAX_TOKENS, BlockHashes, check_integer
from kvmask.coordinator import Hit
from kvmask.errors import ArgumentError
from kvmask.hashing.chain import BlockHasher
from kvmask.hashing.tokens import Tokens
from kvmask.plans.handoffs import Handoff, check_handoff, note_handoff
from kvmask.plans.held import Held
from kvmask.plans.load import LoadPlan
from kvmask.plans.lookup import LookupPlan, Strategy
from kvmask.plans.results import LoadResult, SaveResult
from kvmask.plans.save import SavePlan
from kvmask.plans.scheme import block_hashes, scheme_of
from kvmask.plans.tools import PlanTools

# Per block from the first one on that is asked for: (first block, number of blocks) to extra keys.
ExtraKeys = Sequence[tuple[Any, ...] | None] | Callable[[int, int], Sequence[Any]]

_NUMBERS = itertools.count(1)


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
            them, for requests that grow. `kvmask.hashing.extra_keys.block_extra_keys` makes them.

    Raises:
        ArgumentError: Neither tokens nor digests are given, or both; digests are known to be of
            another hash block size, algorithm or start; or a number is out of range.
        HashInputError: Tokens or extra keys that have no exact digest.
    """

    # Slots: a misspelt attribute must not be taken silently.
    __slots__ = (
        "__weakref__",
        "_contract",
        "_extra_keys",
        "_handoffs",
        "_hasher",
        "_hashes",
        "_held",
        "_hit",
        "_mark",
        "_num_prompt_tokens",
        "_num_tokens",
        "_owner",
        "_reused",
    )

    def __init__(
        self,
        contract: Agreement,
        token_ids: Tokens | None = None,
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
        if extra_keys is not None and not callable(extra_keys):
            _check_sequence(extra_keys)
        self._contract = contract
        self._mark = 0
        self._hit: Hit | None = None
        self._reused = 0
        self._held: Held | None = None  # by the engine, at the lookup before the last load
        # What the results of this request's plans are known by, also after a pickle.
        self._owner = next(_NUMBERS)
        self._handoffs: dict[tuple[int, int], int] = {}  # (group, boundary): block
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
            num_prompt_tokens = check_integer(num_prompt_tokens, "num_prompt_tokens", 1, MAX_TOKENS)
        self._num_prompt_tokens: int | None = num_prompt_tokens

    def _take_digests(self, hashes: BlockHashes | Sequence[bytes], num_tokens: int | None) -> None:
        digests = block_hashes(hashes)
        self._contract.check_hashes(digests)
        unit = self._contract.hash_block_size
        covered = len(digests) * unit
        if num_tokens is None:
            num_tokens = covered
        num_tokens = check_integer(num_tokens, "num_tokens", 0, MAX_TOKENS)
        if num_tokens // unit > len(digests):
            raise ArgumentError(
                "`hashes` must have one digest for every full hash block, "
                f"got {len(digests)} digests of {unit} tokens for {num_tokens} tokens"
            )
        if digests.origin is None:
            _check_chained(digests, 0 if self._hashes is None else len(self._hashes))
        self._hashes = digests
        self._num_tokens = num_tokens

    @property
    def contract(self) -> Agreement:
        """What it belongs to."""
        return self._contract

    @property
    def num_tokens(self) -> int:
        """Tokens of the request so far."""
        return self._num_tokens

    @property
    def num_prompt_tokens(self) -> int | None:
        """Length of the prompt; None for a request that began without a token."""
        return self._num_prompt_tokens

    @property
    def mark(self) -> int:
        """Tokens; where the next save begins. What lies below is known to be in the store: saved
        before (`SaveResult.mark`), or filled by a load of a request that held nothing itself. Set
        it when you know more than the request does."""
        return self._mark

    @mark.setter
    def mark(self, mark: int) -> None:
        self._mark = check_integer(mark, "mark", 0, MAX_TOKENS)

    @property
    def hit(self) -> Hit | None:
        """The hit of the last lookup, or None. Set it after a lookup that you drove yourself."""
        return self._hit

    @hit.setter
    def hit(self, hit: Hit | None) -> None:
        if hit is not None and not isinstance(hit, Hit):
            raise TypeError(f"`hit` must be a Hit or None, got {type(hit).__name__}")
        self._hit = hit

    @property
    def hashes(self) -> BlockHashes:
        """One digest for every full hash block of the tokens so far."""
        if self._hashes is None:
            assert self._hasher is not None
            self._hashes = self._hasher.block_hashes()
        return self._hashes

    def extend(
        self,
        token_ids: Tokens | None = None,
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
            self._grow(hashes, num_tokens)
            return
        if hashes is not None or num_tokens is not None or token_ids is None:
            raise ArgumentError("`token_ids` must be given to a request that was made from tokens")
        try:
            count = len(token_ids)  # type: ignore[arg-type]  # a buffer may have none
        except TypeError:
            raise TypeError(
                f"`token_ids` must be a sequence or array, got {type(token_ids).__name__}"
            ) from None
        first = len(self._hasher.hashes)
        new = (self._num_tokens + count) // self._contract.hash_block_size - first
        given = self._extra_keys
        extras: Sequence[Any] | None = None
        if given is not None and new:
            extras = given(first, new) if callable(given) else given[first : first + new]
            _check_sequence(extras)
            if len(extras) != new:
                raise ArgumentError(
                    "`extra_keys` must have one entry for every full hash block, "
                    f"got {first + len(extras)} and {first + new}"
                )
        self._hasher.extend(token_ids, extras)
        self._num_tokens = self._hasher.num_tokens
        self._hashes = None

    def _grow(self, hashes: BlockHashes | Sequence[bytes], num_tokens: int | None) -> None:
        """Take all digests of a request that has grown, if they go on from those that it has."""
        digests = block_hashes(hashes)
        old, before = self.hashes, self._num_tokens
        if num_tokens is None:
            num_tokens = max(before, len(digests) * self._contract.hash_block_size)
        num_tokens = check_integer(num_tokens, "num_tokens", 0, MAX_TOKENS)
        if len(digests) < len(old) or num_tokens < before:
            raise ArgumentError(
                "`hashes` must hold all digests of the request, "
                f"got {len(digests)} for {num_tokens} tokens after {len(old)} for {before}"
            )
        # Digests are chained: the last one stands for those before it.
        last = len(old) - 1
        if last >= 0 and digests[last] != old[last]:
            raise ArgumentError(
                "`hashes` must go on from the digests of the request, "
                f"got {digests[last].hex()} for {old[last].hex()} at {last}"
            )
        self._take_digests(digests, num_tokens)

    def hand_over(self, group: int | str, num_tokens: int, block_id: int) -> None:
        """Have a block saved under the digest of its own boundary, with the next save.

        Engines whose state blocks do not stay in the block table save recurrent states so. The
        block must keep what it holds until that save is done. A save that fails forgets it: the
        failures name it, and the engine hands it over again while it still holds the same. A
        boundary has one block: the same one may be handed over again, and another is refused.

        Args:
            group: Index or name of the group.
            num_tokens: The boundary, a multiple of the hash block size.
            block_id: The block that holds the state there.

        Raises:
            ArgumentError: The contract has no such cacheable group, a number is out of range, or
                another block was handed over for this boundary since the last save.
        """
        scheme = scheme_of(self._contract)
        note_handoff(self._handoffs, *check_handoff(scheme, group, num_tokens, block_id))

    def lookup_plan(
        self, held: Any = 0, strategy: Strategy = "staged", tools: PlanTools | None = None
    ) -> LookupPlan:
        """The plan of this request's lookup.

        Args:
            held: What the engine holds itself (see `kvmask.plans.held`).
            strategy: ``"staged"`` or ``"exact"``.
            tools: Policy, hints, memos and counters.

        Returns:
            LookupPlan. Its result is the `Hit`.

        Raises:
            ArgumentError: A number is out of range.
        """
        return LookupPlan(
            self._contract,
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
        held: Any = None,
    ) -> LoadPlan:
        """The plan that fills the blocks of a hit; see `LoadPlan`. Give its result to `loaded`.

        Args:
            bound: The contract, bound to this rank's memory.
            hit: The hit.
            tables: Per group the block table to fill.
            event: CUDA event or stream to wait for before memory is written.
            tools: Policy, memos and counters.
            held: What the engine holds now, when that is more than at the lookup.

        Returns:
            LoadPlan, to be driven as `kvmask.plans.calls` says.

        Raises:
            ArgumentError: The hit rests on blocks that are not held any more.
            BlockIdError: A block to be loaded has no usable entry in its table.
            PlanStateError: ``bound`` is not bound to memory.
        """
        return LoadPlan(
            bound,
            self.hashes,
            hit,
            tables,
            held=held,
            event=event,
            tools=tools,
            owner=self._owner,
        )

    def loaded(self, result: LoadResult) -> LoadResult:
        """Remember how much of the request came from the store.

        What the load filled need not be saved. Of a window it fills the last blocks alone, and the
        entries before them may name blocks that hold anything: they are not saved either. Blocks
        that the engine held at the lookup were not asked for. The next save asks the store for
        them, and puts those that it lacks.

        Args:
            result: What the load gave. Its `LoadResult.usable_tokens` are filled and may be used;
                the engine computes from there on.

        Returns:
            The result.

        Raises:
            ArgumentError: It is the result of another request's plan.
        """
        self._check_owner(result, LoadResult)
        self._reused = max(self._reused, result.usable_tokens)
        self._held = result.held
        if result.held is None:
            self._mark = max(self._mark, self._reused)
        return result

    def _check_owner(self, result: Any, kind: type[LoadResult] | type[SaveResult]) -> None:
        if not isinstance(result, kind):
            raise TypeError(f"`result` must be a {kind.__name__}, got {type(result).__name__}")
        if result.owner not in (None, self._owner):
            raise ArgumentError(
                "`result` must be that of a plan of this request, got one of another request: "
                f"{result}"
            )

    def save_plan(
        self,
        bound: Any,
        tables: Any,
        num_tokens: int,
        event: Any = None,
        tools: PlanTools | None = None,
    ) -> SavePlan:
        """The plan that saves what is new since the mark; see `SavePlan`.

        It also takes what `hand_over` was told since the last plan. Give its result to `saved`.

        Args:
            bound: The contract, bound to this rank's memory.
            tables: Per group the block table.
            num_tokens: Tokens whose blocks are computed.
            event: CUDA event or stream to wait for before memory is read.
            tools: Policy, memos and counters.

        Returns:
            SavePlan, to be driven as `kvmask.plans.calls` says.

        Raises:
            ArgumentError: ``num_tokens`` is more than the request has.
            BlockIdError: A block id is no integer.
            PlanStateError: ``bound`` is not bound to memory.
        """
        unit = self._contract.hash_block_size
        num_tokens = check_integer(num_tokens, "num_tokens", 0, MAX_TOKENS)
        if num_tokens // unit > len(self.hashes):
            raise ArgumentError(
                "`num_tokens` must be no more than the request has (`extend` adds what it has "
                f"grown by), got {num_tokens} and {self._num_tokens}"
            )
        plan = SavePlan(
            bound,
            self.hashes,
            tables,
            num_tokens,
            start_token=self._mark,
            num_prompt_tokens=self._num_prompt_tokens,
            handoffs=[Handoff(*place, block) for place, block in self._handoffs.items()],
            event=event,
            tools=tools,
            reused_tokens=self._reused,
            held=self._held,
            owner=self._owner,
        )
        # A later save must not read a block that may be in use again by then.
        self._handoffs = {}
        return plan

    def saved(self, result: SaveResult) -> SaveResult:
        """Remember how far the request is saved.

        Args:
            result: What the save gave.

        Returns:
            The result.

        Raises:
            ArgumentError: It is the result of another request's plan.
        """
        self._check_owner(result, SaveResult)
        self._mark = max(self._mark, result.mark)
        if self._mark >= self._reused:
            self._held = None  # the store has been asked for it
        return result

    def __repr__(self) -> str:
        return (
            f"<CacheRequest: {self._num_tokens} tokens, {len(self.hashes)} digests, "
            f"saved up to {self._mark}>"
        )


_LOOKED_AT = 64  # digests; some 3 us


def _check_chained(digests: BlockHashes, first: int) -> None:
    """Refuse digests that stand twice, from a block on: each covers all tokens before it.

    Only the first ones are looked at. All of them would cost a long request more than its lookup,
    and what hashes each block by itself, or all alike, shows there.
    """
    start = max(first - 1, 0)
    items = digests[start : start + _LOOKED_AT]
    if len(set(items)) == len(items):
        return
    seen: dict[bytes, int] = {}
    for block, item in enumerate(items, start):
        if item in seen:
            raise ArgumentError(
                "`hashes` must be chained, so that each covers all tokens before it and none "
                f"stands twice, got block {seen[item]} and block {block} alike"
            )
        seen[item] = block


def _check_sequence(extra_keys: Any) -> None:
    if not isinstance(extra_keys, Sequence) or isinstance(extra_keys, str | bytes):
        raise TypeError(
            "`extra_keys` must be a sequence, or a function that gives one, "
            f"got {type(extra_keys).__name__}"
        )
