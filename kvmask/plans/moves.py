"""Plans: which keys to ask, put or get, and what became of them. No plan does any I/O.

A caller with its own threads or event loop drives a plan: it takes the arguments of the next call
from the plan, makes the call, and feeds the answer back. KVTransfer does that for a Mooncake store.

Every plan keeps the layouts, and with them the tensors, alive for as long as it lives.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvmask._core import Bitset, checked_answers, pick_missing, plan_blocks
from kvmask.coordinator import Coordinator, Hit
from kvmask.errors import AlignmentError, ArgumentError, BlockIdError, PlanStateError
from kvmask.groups import FullAttention, Mamba, check_count
from kvmask.plans.blocks import (
    ALREADY_EXISTS,
    LEASE_EXPIRED,
    PIECES_PER_CALL,
    BlockPlan,
    Hashes,
    Layouts,
    LoadResult,
    SaveResult,
    Schemas,
    TransferBatch,
    block_tables,
    check_tokens,
)
from kvmask.plans.lookup import DEFAULT_COSTS, STRATEGIES, CostModel, LookupPlan

__all__ = ["DEFAULT_COSTS", "STRATEGIES", "CostModel", "LoadPlan", "LookupPlan", "SavePlan"]


class SavePlan(BlockPlan):
    """Which blocks of a computed prefix go to the store.

    Drive it as: ask the store for ``keys`` and ``feed_exists``; while ``next_batch()`` is not
    None, put the batch and ``feed`` the codes; then read ``result``.

    Args:
        coord: The groups.
        schemas: Per group the key schema, or one per shard that this rank stores.
        layouts: Per group the layout, or one per shard, in the order of the schemas.
        hashes: One digest per hash block.
        block_ids: Per group the block table from the request's first block on. It may be shorter
            than the prefix: what it lacks is not saved and the mark stops there.
        num_tokens: Tokens whose blocks are computed; rounded down to what can be stored.
        start_token: Everything below is stored already (``SaveResult.saved_tokens`` of the last).
        num_prompt_tokens: Length of the prompt, for the replay boundaries.
        states: Save state groups by their position in the block table too.
        null_block: Id of the table's empty entry, never transferred; None when there is none.
        put_steps: Per group, how many ranks hold the same bytes: rank ``r`` stores the blocks
            ``i`` with ``i % step == (r + group) % step``.
        rank: This rank.
        max_pieces: Transport pieces per put; None makes one put of everything.

    Raises:
        ArgumentError: The digests do not cover the tokens, or a count is out of range.
        BlockIdError: A block id lies outside its layout (when descriptors are made).
    """

    def __init__(
        self,
        coord: Coordinator,
        schemas: Schemas,
        layouts: Layouts,
        hashes: Hashes,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int,
        start_token: int = 0,
        num_prompt_tokens: int | None = None,
        *,
        states: bool = False,
        null_block: int | None = 0,
        put_steps: Sequence[int] | None = None,
        rank: int = 0,
        max_pieces: int | None = PIECES_PER_CALL,
    ) -> None:
        super().__init__(coord, schemas, layouts, hashes, null_block, max_pieces)
        n = len(coord.groups)
        check_count(num_tokens, "num_tokens", 0)
        check_tokens(start_token, "start_token")
        check_count(rank, "rank", 0)
        tables = block_tables(block_ids, n)
        steps = [1] * n if put_steps is None else list(put_steps)
        if len(steps) != n:
            raise ArgumentError(
                f"`put_steps` must hold one step per group, got {len(steps)} and {n}"
            )
        for step in steps:
            check_count(step, "put_steps")
        self._start_token = start_token
        # A mark inside a block says that its first part is stored, under its own key: the block
        # as a whole is still to come.
        self._resume = start_token // coord.alignment * coord.alignment
        self.num_tokens = coord.align(num_tokens)
        self._digests_for(self.num_tokens)
        self._mark = self.num_tokens
        self._asked = False
        self._twins: dict[int, list[int]] = {}
        self._present = 0
        self._stored = 0
        if self.num_tokens > start_token:
            masks = coord.store_mask(self.num_tokens, self._resume, num_prompt_tokens, states)
            tails = coord.load_mask(self.num_tokens) if coord.partial_hits else None
            for g in range(n):
                if not coord.groups[g].prefix_cacheable:
                    continue
                table = tables[g]
                self._plan_group(
                    g,
                    masks[g],
                    tails[g] if tails else None,
                    table,
                    states,
                    steps[g],
                    (rank + g) % steps[g],
                )

    def _plan_group(
        self,
        g: int,
        mask: Bitset | None,
        needed: Bitset | None,
        table: Sequence[int],
        states: bool,
        step: int,
        phase: int,
    ) -> None:
        group = self._coord.groups[g]
        size = group.block_size
        if isinstance(group, Mamba) and not states:
            return
        start = min(-(-self._resume // size), self.num_tokens // size)
        whole = self.num_tokens // size
        if needed is not None and mask is not None:
            # With hits at every hash block, what a hit at this very end needs is stored too.
            # Another group can end it earlier, so it can be shorter than the mask.
            ends = [i - start for i in needed.indices() if start <= i < whole]
            mask = mask | Bitset.from_indices(len(mask), ends)
        planned, ids = plan_blocks(mask, whole, start, table, step, phase, self._null_block)
        if len(table) < whole:
            self._mark = min(self._mark, len(table) * size)
        if isinstance(group, FullAttention) and self._null_block in table[start:whole]:
            # Windows and chunks let go of blocks that no hit needs; here it is a hole.
            self._mark = min(self._mark, table.index(self._null_block, start) * size)
        tail = None
        if (
            self.num_tokens % size
            and needed is not None
            and isinstance(group, FullAttention | Mamba)
            and whole % step == phase
        ):
            if len(table) <= whole:
                self._mark = min(self._mark, whole * size)
            elif table[whole] != self._null_block:
                tail = (whole, table[whole], self.num_tokens)
        self._add(g, planned, start, ids, tail)

    def feed_exists(self, answers: Sequence[int]) -> None:
        """Take the answers to ``keys``; anything but ``1`` will be put, no key twice.

        Raises:
            PlanStateError: The answers were given before.
            StoreError: There is not one integer per key.
            BlockIdError: A block id lies outside its layout.
        """
        if self._asked:
            raise PlanStateError("`feed_exists` must be called once")
        given = checked_answers(answers, len(self.keys))
        batch = TransferBatch([], [], [])
        positions: list[int] = []
        for k, entries in enumerate(self._entries):
            first = entries.first_key
            stop = self._entries[k + 1].first_key if k + 1 < len(self._entries) else len(self.keys)
            keys, ordinals = pick_missing(self.keys, given, first, stop)
            if not keys:
                continue
            whole = len(keys) == stop - first
            rows, spans = self._descriptors(entries, None if whole else ordinals)
            batch.keys.extend(keys)
            batch.addresses.extend(rows)
            batch.sizes.extend(spans)
            positions += [first + i for i in ordinals]
        if self._asked:
            raise PlanStateError("`feed_exists` must be called once")
        self._asked = True
        self._present = len(self.keys) - len(batch.keys)
        if len(set(batch.keys)) < len(batch.keys):
            batch, positions = self._once(batch, positions)
        self._cut(batch, positions, None)

    def _once(self, batch: TransferBatch, positions: list[int]) -> tuple[TransferBatch, list[int]]:
        """Every key once; what becomes of it is what becomes of its twins."""
        kept: dict[str, int] = {}
        for i, key in enumerate(batch.keys):
            first = kept.setdefault(key, i)
            if first != i:
                self._twins.setdefault(positions[first], []).append(positions[i])
        keep = list(kept.values())
        return batch.pick(keep), [positions[i] for i in keep]

    def feed(self, codes: Sequence[int]) -> None:
        """Take the codes of the last put: 0 is stored, -705 was there, all else failed.

        Raises:
            PlanStateError: No put was asked for.
            StoreError: There is not one code per key.
        """
        start, given = self._answers(codes)
        if not any(given) and not self._twins:
            self._stored += len(given)
            self._num_bytes += sum(self._bytes[start : start + len(given)])
            return
        for i, code in enumerate(given, start):
            twins = self._twins.get(self._positions[i], [])
            if code == 0:
                self._stored += 1
                self._num_bytes += self._bytes[i]
                self._present += len(twins)
            elif code == ALREADY_EXISTS:
                self._present += 1 + len(twins)
            else:
                self._fail_key(self._positions[i], code)

    def _fail_key(self, position: int, code: int) -> None:
        for p in (position, *self._twins.get(position, [])):
            self._failed.append(self._failure(p, code))

    @property
    def result(self) -> SaveResult:
        """What became of the plan.

        Raises:
            PlanStateError: Answers are missing.
        """
        if (self.keys and not self._asked) or self._calls or self._current is not None:
            raise PlanStateError("`result` needs the answers of every call first")
        mark = self._mark
        for failure in self._failed:
            mark = min(mark, failure.block * self._coord.groups[failure.group].block_size)
        if mark < self.num_tokens:
            mark -= mark % self._coord.alignment
        return SaveResult(
            self._stored,
            self._present,
            tuple(self._failed),
            max(mark, self._start_token),
            self._num_bytes,
        )


class LoadPlan(BlockPlan):
    """Which blocks of a hit come from the store, and where they go.

    Drive it as: while ``next_batch()`` is not None, ask ``renew`` when it is not empty, get the
    batch and ``feed`` the answer; then read ``result``. A batch that fails does not hide the ones
    after it.

    Args:
        coord: The groups.
        schemas: Per group the key schema, or one per shard that this rank loads.
        layouts: Per group the layout, or one per shard.
        hashes: One digest per hash block.
        block_ids: Per group the block table that is filled.
        hit: The hit to load.
        start_token: Blocks that end at or below are held already.
        null_block: Id of the table's empty entry; None when there is none.
        rotation: Begin at this key (modulo their number), so that ranks read from different places.
        staging: Bytes of the owner's staging buffer when it has a disk tier, else None.
        max_pieces: Transport pieces per get; None sets no limit.

    Raises:
        BlockIdError: A block to be loaded has no entry, the null block, or one outside its layout.
    """

    def __init__(
        self,
        coord: Coordinator,
        schemas: Schemas,
        layouts: Layouts,
        hashes: Hashes,
        block_ids: Sequence[Sequence[int]],
        hit: Hit,
        start_token: int = 0,
        *,
        null_block: int | None = 0,
        rotation: int = 0,
        staging: int | None = None,
        max_pieces: int | None = PIECES_PER_CALL,
    ) -> None:
        super().__init__(coord, schemas, layouts, hashes, null_block, max_pieces)
        n = len(coord.groups)
        check_tokens(start_token, "start_token")
        check_count(rotation, "rotation", 0)
        tables = block_tables(block_ids, n)
        if not isinstance(hit, Hit):
            raise TypeError(f"`hit` must be a Hit, got {type(hit).__name__}")
        check_count(hit.length, "hit.length", 0)
        if len(hit.tail_tokens) != n:
            raise ArgumentError(
                f"`hit` must have one tail per group, got {len(hit.tail_tokens)} and {n}"
            )
        if len(hit.masks) != n:
            raise ArgumentError(f"`hit` must have one mask per group, got {len(hit.masks)} and {n}")
        if hit.length % coord.hit_alignment:
            raise AlignmentError(
                f"`hit.length` must be a multiple of the alignment, "
                f"got {hit.length} and {coord.hit_alignment}"
            )
        self._digests_for(max([hit.length, *hit.tail_tokens]))
        for g in range(n):
            if coord.groups[g].prefix_cacheable and len(hit.masks[g]):
                self._plan_group(g, hit, tables[g], start_token)
        self._loaded = 0
        self._retried: set[int] = set()
        self.renew: list[str] = []
        self._describe(rotation, staging)

    def _plan_group(self, g: int, hit: Hit, table: list[int], start_token: int) -> None:
        size = self._coord.groups[g].block_size
        mask = hit.masks[g]
        start = min(start_token // size, len(mask))
        wanted = mask[start:]
        planned, ids = plan_blocks(wanted, len(mask), start, table, 1, 0, self._null_block)
        if planned != wanted:
            lost = next(start + i for i in wanted.indices() if i >= len(planned) or not planned[i])
            got = table[lost] if lost < len(table) else f"{len(table)} entries"
            raise BlockIdError(
                "`block_ids` must name a block for every block of the hit, "
                f"got {got} for block {lost} of group {g}"
            )
        if len(set(ids)) < len(ids):
            raise BlockIdError(
                f"`block_ids` must name every block once, got a block of group {g} twice"
            )
        tail = None
        last = len(mask) - 1
        boundary = hit.tail_tokens[g]
        if ids and mask[last] and boundary != len(mask) * size:
            unit = self._coord.hash_block_size
            inside = last * size < boundary < len(mask) * size
            if not self._coord.partial_hits or not inside or boundary % unit:
                raise ArgumentError(
                    "`hit.tail_tokens` must be a boundary of the last block, "
                    f"got {boundary} for block {last} of group {g}"
                )
            planned = planned[: len(planned) - 1]
            tail = (last, ids[-1], boundary)
            ids = ids[:-1]
        self._add(g, planned, start, ids, tail)

    def _describe(self, rotation: int, staging: int | None) -> None:
        batch = TransferBatch(self.keys, [], [])
        for entries in self._entries:
            rows, spans = self._descriptors(entries, None)
            batch.addresses.extend(rows)
            batch.sizes.extend(spans)
        positions = list(range(len(self.keys)))
        k = rotation % len(self.keys) if self.keys else 0
        if k:
            positions = positions[k:] + positions[:k]
            batch = batch.pick(positions)
        self._cut(batch, positions, staging)

    def feed(self, results: Sequence[int]) -> None:
        """Take the results of the last get: only the planned number of bytes is good.

        When every key of a call has lost its lease, the call is tried once more: ``renew`` then
        holds the keys to ask the store for first.

        Raises:
            PlanStateError: No batch was asked for.
            StoreError: There is not one result per key.
        """
        start, given = self._answers(results)
        stop = start + len(given)
        self.renew = []
        if start not in self._retried and all(r == LEASE_EXPIRED for r in given):
            self._retried.add(start)
            self.renew = self._all.keys[start:stop]
            self._calls.append((start, stop))
            return
        if given == self._bytes[start:stop]:
            self._loaded += len(given)
            self._num_bytes += sum(given)
            return
        for i, result in enumerate(given, start):
            if result == self._bytes[i]:
                self._loaded += 1
                self._num_bytes += self._bytes[i]
            else:
                self._failed.append(self._failure(self._positions[i], result))

    def fail(self, code: int) -> None:
        """Record that the last call as a whole failed (it raised): every key has this code.

        Raises:
            PlanStateError: No batch was asked for.
        """
        super().fail(code)
        self.renew = []

    @property
    def result(self) -> LoadResult:
        """What became of the plan.

        Raises:
            PlanStateError: Batches or answers are missing.
        """
        if self._calls or self._current is not None:
            raise PlanStateError("`result` needs every batch to be fed first")
        return LoadResult(self._loaded, tuple(self._failed), self._num_bytes)
