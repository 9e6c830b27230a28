"""LoadPlan: which blocks of a hit come from the store, and where they go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvmask._core import (
    Bitset,
    BlockHashes,
    all_as_planned,
    check_integer,
    plan_load,
)
from kvmask.coordinator import Hit
from kvmask.errors import AlignmentError, ArgumentError
from kvmask.plans.blocks import BlockPlan
from kvmask.plans.calls import EXISTS, GET, WAIT, Call, new_call
from kvmask.plans.held import Held, held_of
from kvmask.plans.policy import CALL_FAILED, NO_BOUNCE
from kvmask.plans.results import BlockFailure, LoadResult, quarantine
from kvmask.plans.scheme import GroupScheme, Scheme
from kvmask.plans.tables import block_tables
from kvmask.plans.tools import PlanTools


class LoadPlan(BlockPlan):
    """Which blocks of a hit come from the store, where they go, and what became of them.

    The plan keeps the layouts, and with them the tensors, alive for as long as it lives. Drive it
    as `kvmask.plans.calls` says. A get that fails does not hide the ones after it, unless the
    store did not answer at all or the policy says so. A plan belongs to one thread at a time.

    Args:
        source: A bound contract, or a Scheme with memory.
        hashes: One digest for every full hash block of the hit.
        hit: The hit to load.
        tables: Per group, by name or in order, the block table that is filled.
        held: What the engine holds now and need not be loaded; by default what it held at the
            lookup. It may hold more since, never less.
        event: CUDA event or stream to wait for before memory is written.
        tools: Policy, memos and counters; neutral ones by default.
        owner: Anything; it stands in the result as `LoadResult.owner`.

    Raises:
        ArgumentError: The hit is not one of these groups, or rests on blocks that are not held any
            more.
        BlockIdError: A block to be loaded has no entry, the null block, or one outside its layout.
        PlanStateError: The contract is not bound to memory.
    """

    __slots__ = ("_held", "_hit", "_owner", "_renewing", "_retried")

    def __init__(
        self,
        source: Any,
        hashes: BlockHashes | Sequence[bytes],
        hit: Hit,
        tables: Any,
        *,
        held: Any = None,
        event: Any = None,
        tools: PlanTools | None = None,
        owner: object = None,
    ) -> None:
        super().__init__(source, hashes, event, tools)
        scheme, coord = self._scheme, self._scheme.coord
        self._owner = owner
        self._hit = _checked_hit(hit, len(scheme.groups), coord.hit_alignment)
        rows = block_tables(scheme, tables)
        if scheme.check_hashes is not None:
            # An engine's own scheme comes with masks of the engine's.
            _check_needs(hit, scheme)
        asked: Held | None = hit.held
        self._held = asked if held is None else held_of(scheme, held)
        needs = max((hit.length, *hit.tail_tokens))
        if -(-needs // self._unit) > len(self._hashes):
            raise ArgumentError(
                "`hashes` must cover the hit, "
                f"got {len(self._hashes)} digests of {self._unit} for {needs} tokens"
            )
        if held is not None and asked is not None:
            for group in scheme.groups:
                if group.cacheable and len(hit.masks[group.index]):
                    self._check_held(group, asked)
        masks, starts = (hit.masks, None) if self._held is None else self._not_held(self._held)
        self.keys, self._parts = plan_load(
            scheme.loaded,
            self._hashes,
            masks,
            hit.tail_tokens,
            hit.length,
            starts,
            rows,
            self._tools.null_block,
            coord.partial_hits,
        )
        self._retried: set[int] = set()
        self._renewing = False
        self._describe()

    def _check_held(self, group: GroupScheme, asked: Held) -> None:
        """Refuse to load a hit that rests on blocks which the engine does not hold any more."""
        mask = self._hit.masks[group.index]
        then = mask & asked.blocks(group, len(mask))
        now = Bitset.zeros(len(mask)) if self._held is None else self._held.blocks(group, len(mask))
        lost = then & ~now
        if lost.count():
            raise ArgumentError(
                "`held` must cover what the hit rests on, "
                f"got block {lost.indices()[0]} of group {group.name!r} held at the lookup only"
            )

    def _not_held(self, held: Held) -> tuple[list[Any], list[int]]:
        """Per group which blocks of the hit the engine lacks, and the first block to look at."""
        masks = list(self._hit.masks)
        starts = [0] * len(masks)
        for item in self._scheme.loaded:
            group = item.group
            g, blocks, own = group.index, len(masks[group.index]), held.groups[group.index]
            if group.kind == "full" and isinstance(own, int):
                starts[g] = min(own // group.block_size, blocks)
            else:
                masks[g] = Bitset.from_bools(masks[g]) & ~held.blocks(group, blocks)
        return masks, starts

    def _describe(self) -> None:
        addresses, sizes = self._all_descriptors()
        keys = self.keys
        # Ranks begin at different keys, so that they read from different places.
        k = self._scheme.rank % len(keys) if keys else 0
        if k:
            self._positions = [*range(k, len(keys)), *range(k)]
            keys = keys[k:] + keys[:k]
            addresses = addresses[k:] + addresses[:k]
            sizes = sizes[k:] + sizes[:k]
            each = self._bytes()
            self._each_bytes = each[k:] + each[:k]
        self._cut(keys, addresses, sizes, put=False)

    def _next(self) -> Call | None:
        if not self._calls:
            return None
        if self._event is not None:
            return self._wait()
        if self._retried:
            start, stop = self._calls[-1]
            if start in self._retried and not self._renewing:
                # The existence call renews the lease; its answers say nothing that the get does
                # not.
                self._renewing = True
                return new_call(EXISTS, (self._batch[0][start:stop],))
            self._renewing = False
        return new_call(GET, self._slice(), self._call_bytes, self._guard)

    def feed(self, answer: Any) -> tuple[BlockFailure, ...]:
        """Take the answer to the last call; of a get only the planned number of bytes is good.

        When every key of a get has lost its lease and the policy renews leases, the next calls
        are an existence call, which renews them, and the get once more. When the policy says that
        the store did not answer, no further call is made.

        Args:
            answer: One integer per key of the call: bytes, or a code. Anything, after a wait.

        Returns:
            The failures that came with this answer.

        Raises:
            PlanStateError: There was no call.
        """
        if self._call == WAIT:
            self._take()
            return ()
        start, stop = self._range
        if self._call == EXISTS:
            return self._feed_renewal(self._read(answer))
        planned = self._bytes()
        if stop - start < len(planned):
            planned = planned[start:stop]
        if self._call is not None and all_as_planned(answer, planned):
            self._call = None
            if self._breaker is not None:
                self._heard()
            self._moved += len(planned)
            self._num_bytes += self._call_bytes
            return ()
        given = self._read(answer)
        self._heard(given)
        renew = self._policy.renew_codes
        again = renew and start not in self._retried and not self._stopped
        if again and all(code in renew for code in given):
            self._retried.add(start)
            self._calls.append((start, stop))
            return ()
        refused = False
        for i, (result, size) in enumerate(zip(given, planned, strict=True), start):
            if self._policy.loaded(result, size):
                self._moved += 1
                self._num_bytes += size
            else:
                refused = refused or result < 0
                # A number of bytes is that of a transfer that is over.
                unsettled = result < 0 and not self._policy.settled(result)
                self._fail_key(self.position(i), result, None, unsettled)
        news = self._news()
        if self._outage is not None:
            self._give_up()
        elif refused and self._policy.stops_after_failure:
            self.stop()
        return news

    def _feed_renewal(self, given: list[int]) -> tuple[BlockFailure, ...]:
        """Take the answer to a renewal. What it says of the keys does not matter here, only whether
        the store answered."""
        self._heard(given)
        if self._outage is not None:
            self._fail_call(EXISTS, self._outage)
            news = self._news()
            self._give_up()
            return news
        return ()

    def _fail_call(self, name: str, error: BaseException) -> None:
        if name == EXISTS:
            # The renewal failed: so have the keys that it was for.
            self._renewing = False
            if not self._calls:
                return  # `stop` has failed them
            self._range = self._calls.pop()
            for i in range(*self._range):
                self._fail_key(self.position(i), CALL_FAILED, error)
            return
        super()._fail_call(name, error)

    def _finish(self) -> None:
        super()._finish()
        tools = self._tools
        if tools.stats is not None:
            tools.stats.add(
                loads=1,
                loaded_keys=self._moved,
                loaded_bytes=self._num_bytes,
                load_failed_keys=len(self._failures),
            )
        if self._failures:
            blocks = sum(map(len, quarantine(self._failures).values()))
            if blocks and tools.stats is not None:
                tools.stats.add(load_quarantined_blocks=blocks)
            failed = [f.key for f in self._failures]
            if tools.memo is not None:
                tools.memo.forget(failed)
            if tools.failed_loads is not None:
                # When the store does not answer, or there is no memory, no key is to blame.
                told = self._failures[: self._told]
                tools.failed_loads.add(f.key for f in told if f.code != NO_BOUNCE)

    @property
    def result(self) -> LoadResult:
        """What became of the load.

        Raises:
            PlanStateError: `next_call` has not returned None yet.
        """
        self._check_finished()
        invalid: dict[str, set[int]] = {}
        for f in self._failures:
            invalid.setdefault(f.name, set()).add(f.block_id)
        return LoadResult(
            self._moved,
            tuple(self._failures),
            self._num_bytes,
            {name: sorted(ids) for name, ids in invalid.items()},
            self._usable() if self._failures else self._hit.length,
            quarantine(self._failures) if self._failures else {},
            held=self._hit.held,
            owner=self._owner,
        )

    def _usable(self) -> int:
        """The longest prefix that the blocks of the hit without the failed ones still give."""
        coord, hit = self._scheme.coord, self._hit
        failed: dict[int, list[int]] = {}
        for f in self._failures:
            failed.setdefault(f.group, []).append(f.block)
        good = [Bitset.zeros(0)] * len(self._scheme.groups)
        present = list(good)
        for group in self._scheme.groups:
            if not group.cacheable:
                continue
            g, n = group.index, len(hit.masks[group.index])
            blocks = Bitset.from_bools(hit.masks[g])
            if self._held is not None:
                blocks = blocks | self._held.blocks(group, n)
            bad = sorted(set(failed.get(g, [])))
            good[g] = present[g] = blocks & ~Bitset.from_indices(n, bad)
            scale = group.block_size // coord.hash_block_size if coord.partial_hits else 1
            if scale > 1:
                ends = hit.length // coord.hash_block_size
                if group.kind == "state":
                    tail = (hit.tail_tokens[g] or hit.length) // coord.hash_block_size
                    present[g] = _state_bits(good[g], scale, ends, tail)
                else:
                    present[g] = _spread(good[g], scale, ends)
        length = hit.length
        while length:
            length = coord.find_hit(present, length, False).length
            if not length or _within(coord.load_mask(length), good):
                break
            # An attention chunk that begins inside a block: the search, like vLLM's, takes what
            # lies before the chunk of the longer length for present.
            length -= coord.hit_alignment
        return length


def _within(masks: Sequence[Bitset], good: Sequence[Bitset]) -> bool:
    """Whether every block of the masks is a good one."""
    return all(
        len(mask) <= len(there) and not (mask & ~there[: len(mask)]).count()
        for mask, there in zip(masks, good, strict=True)
        if mask.count()
    )


def _spread(blocks: Bitset, scale: int, n: int) -> Bitset:
    """Bits of hash blocks: those that end inside or with a good block."""
    return Bitset.from_indices(
        n, [j for i in blocks.indices() for j in range(i * scale, min((i + 1) * scale, n))]
    )


def _state_bits(blocks: Bitset, scale: int, n: int, tail: int) -> Bitset:
    """Bits of hash blocks: a good block holds the state at its end, and the last one that at the
    hit's tail (counted in hash blocks)."""
    ends = [min((i + 1) * scale, tail) - 1 for i in blocks.indices()]
    return Bitset.from_indices(n, [end for end in ends if end < n])


def _check_needs(hit: Hit, scheme: Scheme) -> None:
    """Refuse a hit that lacks blocks which one of its length needs: it is of other groups."""
    needed = scheme.coord.load_mask(hit.length)
    if needed == hit.masks:
        return
    for group, need in zip(scheme.groups, needed, strict=True):
        if not group.cacheable:
            continue
        mask, blocks = hit.masks[group.index], -(-hit.length // group.block_size)
        if len(mask) != blocks:
            raise ArgumentError(
                "`hit.masks` must be of as many blocks as the hit, "
                f"got {len(mask)} and {blocks} for group {group.name!r}"
            )
        # A window of one token needs none but the one that is computed.
        lost = None if group.span == 1 else need & ~Bitset.from_bools(mask)
        if lost is not None and lost.count():
            raise ArgumentError(
                "`hit.masks` must hold the blocks that a hit of this length needs, "
                f"got {hit.length} tokens without block {lost.indices()[0]} of group {group.name!r}"
            )


def _checked_hit(hit: Any, groups: int, alignment: int) -> Hit:
    if not isinstance(hit, Hit):
        raise TypeError(
            f"`hit` must be a Hit, and stand before the tables, got {type(hit).__name__}"
        )
    check_integer(hit.length, "hit.length", 0)
    for name, items in (("tail_tokens", hit.tail_tokens), ("masks", hit.masks)):
        if not isinstance(items, tuple | list):
            raise TypeError(f"`hit.{name}` must be a tuple, got {type(items).__name__}")
        if len(items) != groups:
            raise ArgumentError(
                f"`hit.{name}` must have one entry per group, got {len(items)} and {groups}"
            )
    for tail in hit.tail_tokens:
        check_integer(tail, "hit.tail_tokens", 0)
    for mask in hit.masks:
        if not hasattr(mask, "__len__"):
            raise TypeError(f"`hit.masks` must hold bitsets, got {type(mask).__name__}")
    held = hit.held
    if held is not None and (not isinstance(held, Held) or len(held.groups) != groups):
        raise TypeError(
            f"`hit.held` must be what a lookup of these groups was told, got {held!r:.200}"
        )
    if hit.length % alignment:
        raise AlignmentError(
            f"`hit.length` must be a multiple of the alignment, got {hit.length} and {alignment}"
        )
    return hit
