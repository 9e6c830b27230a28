"""SavePlan: which blocks of a computed prefix go to the store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvmask._core import (
    MAX_TOKENS,
    Bitset,
    BlockHashes,
    PlanGroup,
    PlanPart,
    all_answered,
    build_keys,
    check_integer,
    digests_differ,
    pick_missing,
    plan_save,
    read_answers,
)
from kvmask.errors import ArgumentError, PlanStateError
from kvmask.plans.blocks import BlockPlan, Rows
from kvmask.plans.calls import EXISTS, PUT, WAIT, Call, new_call
from kvmask.plans.handoffs import Handoff, check_handoff, listed, note_handoff
from kvmask.plans.held import Held, held_of
from kvmask.plans.lookup import check_digests
from kvmask.plans.policy import CALL_FAILED, NOT_TRIED
from kvmask.plans.results import BlockFailure, SaveResult, quarantine
from kvmask.plans.tables import block_tables, check_masks
from kvmask.plans.tools import PlanTools


class SavePlan(BlockPlan):
    """Which blocks of a computed prefix go to the store, and what became of them.

    The plan first asks the store which of its keys exist, then puts the others. It keeps the
    layouts, and with them the tensors, alive for as long as it lives. Drive it as
    `kvmask.plans.calls` says. A plan belongs to one thread at a time.

    Args:
        source: A bound contract, or a Scheme with memory.
        hashes: One digest for every full hash block of the tokens.
        tables: Per group, by name or in order, the block table from the request's first block on.
            An entry whose block holds nothing names the null block. The table may be shorter than
            the prefix: what it lacks is not saved and the mark stops there.
        num_tokens: Tokens whose blocks are computed; rounded down to what can be stored.
        start_token: Everything below is stored already (`SaveResult.mark` of the last save).
        num_prompt_tokens: Length of the prompt, for the replay boundaries of sparse retention.
        handoffs: Blocks that are saved under the digest of their own boundary.
        event: CUDA event or stream to wait for before memory is read.
        tools: Policy, memos and counters; neutral ones by default.
        masks: Per group which blocks from ``start_token`` on are worth storing; by default the
            contract's rule.
        reused_tokens: Tokens that a load has filled. Blocks wholly below are not saved: of a window
            a load fills the last blocks alone.
        held: What the engine held itself at the lookup before that load (`LoadResult.held`). Those
            blocks are saved all the same: nobody asked whether the store has them.
        owner: Anything; it stands in the result as `SaveResult.owner`.

    Raises:
        ArgumentError: The digests do not cover the tokens, or a count is out of range.
        BlockIdError: A block id is no integer. `feed` raises it for one outside its layout, when
            the store lacks the block.
        PlanStateError: The contract is not bound to memory.
    """

    __slots__ = (
        "_held",
        "_ids",
        "_last_word",
        "_mark",
        "_owner",
        "_pressure",
        "_resume",
        "_reused",
        "_stage",
        "_start_token",
        "_twins",
        "num_tokens",
    )

    def __init__(
        self,
        source: Any,
        hashes: BlockHashes | Sequence[bytes],
        tables: Any,
        num_tokens: int,
        *,
        start_token: int = 0,
        num_prompt_tokens: int | None = None,
        handoffs: Iterable[Handoff] = (),
        event: Any = None,
        tools: PlanTools | None = None,
        masks: Sequence[Bitset | Sequence[bool] | None] | None = None,
        reused_tokens: int = 0,
        held: Any = None,
        owner: object = None,
    ) -> None:
        super().__init__(source, hashes, event, tools)
        scheme, coord = self._scheme, self._scheme.coord
        num_tokens = check_integer(num_tokens, "num_tokens", 0, MAX_TOKENS)
        start_token = check_integer(start_token, "start_token", 0, MAX_TOKENS)
        rows = block_tables(scheme, tables)
        self._start_token = start_token
        self._reused = check_integer(reused_tokens, "reused_tokens", 0, MAX_TOKENS)
        self._held: Held | None = held_of(scheme, held)
        self._owner = owner
        # A mark inside a block says that its first part is stored, under its own key. The block as
        # a whole is still to come.
        self._resume = start_token // coord.alignment * coord.alignment
        self.num_tokens = coord.align(num_tokens)
        # An unfinished state block holds the state of the last token computed, no earlier one.
        exact = self.num_tokens == num_tokens
        check_digests(scheme, self._hashes, self.num_tokens)
        if masks is not None:
            check_masks(masks, len(rows))
        self._stage = EXISTS
        self._twins: dict[int, list[int]] = {}
        self._ids: list[str] = []  # per key, of what is evicted with it
        self._pressure = False
        self._last_word: tuple[int, BaseException | None] | None = None  # of `stop`
        handed = () if type(handoffs) is tuple and not handoffs else self._listed(handoffs)
        groups: tuple[PlanGroup, ...] = ()
        starts = None
        if self.num_tokens > start_token:
            groups = scheme.saved
            if masks is None:
                masks = coord.store_mask(
                    self.num_tokens, self._resume, num_prompt_tokens, scheme.states
                )
            if self._reused or coord.partial_hits:
                masks, starts = self._worth(masks)
        self.keys, self._parts, self._mark = plan_save(
            groups,
            self._hashes,
            masks,
            starts,
            rows,
            self.num_tokens,
            self._resume,
            self._tools.null_block,
            coord.partial_hits,
            exact,
            handed,
        )

    def _worth(self, masks: Sequence[Any]) -> tuple[list[Bitset | None], list[int]]:
        """Per group which blocks are saved, from its first block on, and that block."""
        coord, tokens = self._scheme.coord, self.num_tokens
        ends = coord.load_mask(tokens) if coord.partial_hits else None
        worth: list[Bitset | None] = [None] * len(masks)
        starts = [0] * len(masks)
        for item in self._scheme.saved:
            group = item.group
            g, end, mask = group.index, tokens // group.block_size, masks[group.index]
            first = start = fresh = min(-(-self._resume // group.block_size), end)
            if mask is not None:
                mask = Bitset.from_bools(mask)
                if len(mask) != end - first:  # a caller's own; what it does not name is not saved
                    named = [i for i in mask.indices() if i < end - first]
                    mask = Bitset.from_indices(end - first, named)
            if self._reused:  # what lies below came from the store
                fresh = min(max(first, self._reused // group.block_size), end)
                if self._held is None:
                    start = fresh
                    if mask is not None and start > first:
                        mask = mask[start - first :]
            if ends is not None and mask is not None:
                # With hits at every hash block, what a hit at this very end needs is stored too.
                # Another group can end it earlier: then it is shorter than the mask.
                needed = [i - start for i in ends[g].indices() if start <= i < end]
                mask = mask | Bitset.from_indices(len(mask), needed)
            if self._held is not None and fresh > start:
                own = self._held.blocks(group, end)[start:]
                own = own | Bitset.from_indices(len(own), range(fresh - start, len(own)))
                mask = own if mask is None else mask & own
            worth[g], starts[g] = mask, start
        return worth, starts

    def _listed(self, handoffs: Iterable[Handoff]) -> list[tuple[PlanGroup, int, int, int]]:
        """The blocks that an engine hands over and this rank writes: group, block, id, boundary."""
        known: dict[tuple[int, int], int] = {}
        found = (self._handed(handoff, known) for handoff in listed(handoffs))
        return [item for item in found if item is not None]

    def _handed(
        self, handoff: Handoff, known: dict[tuple[int, int], int]
    ) -> tuple[PlanGroup, int, int, int] | None:
        """A block that is handed over, checked; None when it is another rank's to write."""
        group, boundary, block_id = check_handoff(
            self._scheme,
            handoff.group,
            handoff.num_tokens,
            handoff.block_id,
            " of `handoffs`",
        )
        note_handoff(known, group, boundary, block_id)
        unit = self._scheme.coord.hash_block_size
        if boundary // unit > len(self._hashes):
            raise ArgumentError(
                "`num_tokens` of `handoffs` must be covered by the digests, "
                f"got {boundary} tokens and {len(self._hashes)} digests of {unit}"
            )
        if block_id == self._tools.null_block:
            raise ArgumentError(
                f"`block_id` of `handoffs` must not be the null block, got {block_id}"
            )
        block = -(-boundary // group.block_size) - 1
        if not group.own or block % group.writers != group.turn:
            return None
        item = next(item for item in self._scheme.loaded if item.group is group)
        return item, block, block_id, boundary

    def _find_twins(self) -> None:
        """Find keys that stand twice in the plan, as a block of the table that is handed over too.

        Only puts need to know: a store must not be given a key twice.
        """
        if self._policy.unique_keys or self._all_differ():
            return
        first: dict[str, int] = {}
        twins: dict[int, list[int]] = {}
        for i, key in enumerate(self.keys):
            at = first.setdefault(key, i)
            if at != i:
                twins.setdefault(at, []).append(i)
        self._twins = twins

    def _all_differ(self) -> bool:
        """Whether no key can stand twice, as far as that is quickly seen."""
        parts = self._parts
        if self._hashes.origin is not None:  # digests of one chain differ
            return all(part.planned is not None for part in parts)
        builders = [builder for part in parts for builder in part.group.own]
        return len(set(builders)) == len(builders) and all(
            part.planned is not None
            and part.tail is None
            and digests_differ(
                self._hashes, part.planned, part.start, part.group.block_size // self._unit
            )
            for part in parts
        )

    def _left(self) -> int:
        asks = self._stage == EXISTS and bool(self.keys)
        return len(self._calls) + asks

    def _next(self) -> Call | None:
        if self._stage == EXISTS:
            self._stage = WAIT
            if self.keys:
                return new_call(EXISTS, (self.keys,))
        if not self._calls:
            return None
        if self._stage == WAIT:
            self._stage = PUT
            if self._event is not None:
                return self._wait()
        keys, addresses, sizes = self._slice()
        policy = self._policy
        ids = self._group_ids(*self._range) if policy.names_groups else None
        args = (keys, addresses, sizes, *policy.put_arguments(ids))
        return new_call(PUT, args, self._call_bytes, self._guard)

    def _group_ids(self, start: int, stop: int) -> list[str]:
        """Per key of a put, the id of what the store evicts together."""
        if not self._ids:
            self._ids = [text for part in self._parts for text in self._ids_of(part)]
        if self._positions is None:
            return self._ids[start:stop]
        return [self._ids[position] for position in self._positions[start:stop]]

    def _ids_of(self, part: PlanPart) -> list[str]:
        """The ids of a group's keys: the digest of each under the group's name for evictions."""
        eviction, own, shards = part.group.eviction, part.group.own, part.shards
        first = part.first_key
        keys = self.keys[first : first + len(part.block_ids) * shards]
        if eviction is None:
            return keys
        ids: list[str] = []
        if part.planned is not None and all(b.as_number == eviction.as_number for b in own):
            scale = part.group.block_size // self._scheme.coord.hash_block_size
            names = (eviction,) * shards
            ids = build_keys(names, self._hashes, part.planned, part.start, scale)
        for i in range(len(ids), len(keys)):
            key, name = keys[i], own[i % shards]
            digest = key[len(name.prefix) : len(key) - len(name.suffix)]
            ids.append(eviction.prefix + digest + eviction.suffix)
        return ids

    def feed(self, answer: Any) -> tuple[BlockFailure, ...]:
        """Take the answer to the last call.

        To the existence call: every key that is not answered with ``1`` will be put, no key twice.
        To a put: the policy says which codes are success; all else has failed. When the policy says
        that the store did not answer, no further call is made.

        Args:
            answer: One integer per key of the call; anything, after a wait.

        Returns:
            The failures that came with this answer.

        Raises:
            PlanStateError: There was no call.
        """
        if self._call == WAIT:
            self._take()
        elif self._call == EXISTS:
            self._feed_exists(answer)
        else:
            self._feed_put(answer)
        news = self._news() if self._failures else ()
        if self._outage is not None:
            self._give_up()
        return news

    def _feed_exists(self, answer: Any) -> None:
        if all_answered(answer, len(self.keys), 1):
            self._call = None
            if self._breaker is not None:
                self._heard()
            self._present = len(self.keys)
            return
        self._find_twins()
        if not self._twins and all_answered(answer, len(self.keys), 0):
            descriptors = self._all_descriptors()  # it may refuse a block id
            self._call = None
            if self._breaker is not None:
                self._heard()
            self._put(self.keys, *descriptors)
            return
        given = read_answers(answer, len(self.keys))
        if self._call != EXISTS:
            raise PlanStateError("`feed` must be given an answer once, got it while it was read")
        self._heard(given)
        if self._outage is not None:
            self._take()
            for position, code in enumerate(given):
                super()._fail_key(position, code, self._outage)
            return
        self._forget_bytes()
        skip = {i for twins in self._twins.values() for i in twins}
        keys: list[str] = []
        addresses: Rows = []
        sizes: Rows = []
        chosen: list[tuple[int, int, list[int] | None]] = []
        every = True
        for k, part in enumerate(self._parts):
            first = part.first_key
            stop = self._parts[k + 1].first_key if k + 1 < len(self._parts) else len(self.keys)
            missing, ordinals = pick_missing(self.keys, given, first, stop)
            if skip:
                kept = range(stop - first) if ordinals is None else ordinals
                ordinals = [i for i in kept if first + i not in skip]
                missing = [self.keys[first + i] for i in ordinals]
            every = every and ordinals is None
            chosen.append((first, stop, ordinals))
            if not missing:
                continue
            rows, pieces = self._some_descriptors(
                part, list(range(stop - first)) if ordinals is None else ordinals
            )
            keys += missing
            addresses += rows
            sizes += pieces
        twins = 0
        if not every:
            positions: list[int] = []
            for first, stop, ordinals in chosen:
                positions += (
                    range(first, stop) if ordinals is None else [first + i for i in ordinals]
                )
            self._positions = positions
            put = set(positions) if skip else set()
            twins = sum(len(t) for first, t in self._twins.items() if first in put)
        self._take()  # only now: a block id that is refused leaves the call unanswered
        self._present = len(self.keys) - len(keys) - twins
        self._put(keys, addresses, sizes)

    def _put(self, keys: list[str], addresses: Rows, sizes: Rows) -> None:
        """Plan the puts of these keys."""
        self._cut(keys, addresses, sizes, put=True)
        if self._last_word is not None:
            super().stop(*self._last_word)

    def _feed_put(self, answer: Any) -> None:
        start, stop = self._range
        fits = self._call is not None and not self._twins
        if fits and all_answered(answer, stop - start, 0):
            self._call = None
            if self._breaker is not None:
                self._heard()
            self._moved += stop - start
            self._num_bytes += self._call_bytes
            return
        given = self._read(answer)
        self._heard(given)
        for i, code in enumerate(given, start):
            twins = self._twins.get(self.position(i), [])
            if self._policy.stored(code):
                self._moved += 1
                self._num_bytes += self._bytes()[i]
                self._present += len(twins)
            elif code in self._policy.present_codes:
                self._present += 1 + len(twins)
            else:
                self._pressure = self._pressure or code in self._policy.full_codes
                self._fail_key(self.position(i), code, None, not self._policy.settled(code))

    def stop(self, code: int = NOT_TRIED, cause: BaseException | None = None) -> None:
        """Make no further call; see `BlockPlan.stop`.

        While the existence call is on its way, its answer still says which keys are present.

        Args:
            code: The code of these failures.
            cause: Why; None when nothing raised.
        """
        if self._stage == EXISTS:
            self._stage = WAIT
            for position in range(len(self.keys)):
                super()._fail_key(position, code, cause)
        elif self._call == EXISTS:
            self._last_word = code, cause
        super().stop(code, cause)

    def _fail_key(
        self, position: int, code: int, cause: BaseException | None, unsettled: bool = False
    ) -> None:
        super()._fail_key(position, code, cause, unsettled)
        # Of equal keys the first alone is put.
        for twin in self._twins.get(position, ()):
            super()._fail_key(twin, code, cause)

    def _fail_call(self, name: str, error: BaseException) -> None:
        if name == EXISTS:
            for position in range(len(self.keys)):
                super()._fail_key(position, CALL_FAILED, error)
        else:
            super()._fail_call(name, error)

    @property
    def written(self) -> list[tuple[int, list[int]]]:
        """Per group, the blocks of which something was put and nothing that was put has failed.

        Groups are named by index, blocks ascend.
        """
        put = range(len(self.keys)) if self._positions is None else self._positions
        blocks: dict[int, dict[int, bool]] = {}
        for position in put if self._stage == PUT else ():
            part, i = self.part_of(position)
            found = blocks.setdefault(part.group.index, {})
            block = part.blocks[i]
            found[block] = found.get(block, True) and position not in self._failed
        return [
            (group, sorted(block for block, good in found.items() if good))
            for group, found in sorted(blocks.items())
        ]

    def _finish(self) -> None:
        super()._finish()
        tools = self._tools
        if not tools.remembers_saves:
            return
        result = self.result
        if tools.stats is not None:
            tools.stats.add(
                saves=1,
                stored_keys=result.stored,
                stored_bytes=result.num_bytes,
                save_present_keys=result.present,
                save_failed_keys=len(result.failures),
            )
            if result.quarantined:
                blocks = sum(map(len, result.quarantined.values()))
                tools.stats.add(save_quarantined_blocks=blocks)
        if tools.memo is not None or tools.failed_loads is not None:
            failed = {f.key for f in result.failures}
            if tools.memo is not None:
                tools.memo.add(key for key in self.keys if key not in failed)
            if tools.failed_loads is not None:
                tools.failed_loads.forget(key for key in self._batch[0] if key not in failed)
        coord = self._scheme.coord
        if tools.hints is not None and result.mark:
            tools.hints.learn(self._hashes, coord.hash_block_size, coord.alignment, result.mark)

    @property
    def result(self) -> SaveResult:
        """What became of the save.

        Raises:
            PlanStateError: `next_call` has not returned None yet.
        """
        self._check_finished()
        mark = self._mark
        for failure in self._failures:
            mark = min(mark, failure.block * self._scheme.groups[failure.group].block_size)
        if mark < self.num_tokens:
            mark -= mark % self._scheme.coord.alignment
        return SaveResult(
            self._moved,
            self._present,
            tuple(self._failures),
            max(mark, self._start_token),
            self._scheme.writers,
            self._num_bytes,
            self._pressure,
            quarantine(self._failures) if self._failures else {},
            owner=self._owner,
        )
