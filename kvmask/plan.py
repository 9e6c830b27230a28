"""Plans: which keys to ask, put or get, and what became of them. No plan does any I/O.

A caller with its own threads or event loop drives a plan: it takes the arguments of the next call
from the plan, makes the call, and feeds the answer back. KVTransfer does that for a Mooncake store.

Every plan keeps the layouts, and with them the tensors, alive for as long as it lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from kvmask._core import Bitset, BlockHashes, LookupCore, build_keys, pick_missing, plan_blocks
from kvmask.coordinator import Coordinator, Hit
from kvmask.errors import AlignmentError, ArgumentError, BlockIdError, PlanStateError, StoreError
from kvmask.groups import FullAttention, Mamba, check_count
from kvmask.keys import KeySchema
from kvmask.layout import KVLayout

Schemas = Sequence[KeySchema | Sequence[KeySchema]]
Layouts = Sequence[KVLayout | Sequence[KVLayout]]
Hashes = BlockHashes | Sequence[bytes]
T = TypeVar("T")

STRATEGIES = ("staged", "exact")

# Mooncake's return codes that plans act on; kvmask.mooncake names all of them.
INVALID_PARAMS = -600
ALREADY_EXISTS = -705
NO_SPACE = -200
LEASE_EXPIRED = -707

# An owner with a disk tier stages a get through a buffer for direct I/O: every object is rounded
# up to pages and needs two more; vLLM fills nine tenths of the buffer with one batch.
STAGING_PAGE = 4096
STAGING_PADDING = 2 * STAGING_PAGE
STAGING_USABLE = 0.9


def per_group(items: Sequence[Any], kind: type[T], name: str, groups: int) -> list[tuple[T, ...]]:
    """One tuple per group out of one item, or one sequence of items, per group."""
    rows: list[tuple[T, ...]] = []
    for item in items:
        row = (item,) if isinstance(item, kind) else tuple(item)
        for entry in row:
            if not isinstance(entry, kind):
                raise TypeError(f"`{name}` must hold {kind.__name__}, got {type(entry).__name__}")
        rows.append(row)
    if len(rows) != groups:
        raise ArgumentError(f"`{name}` must hold one entry per group, got {len(rows)} and {groups}")
    return rows


class LookupPlan:
    """The keys that decide how long a reusable prefix is, batch by batch.

    ``exact`` asks once for the keys vLLM would ask, in its order. ``staged`` asks the
    full-attention groups first, in growing batches, until a miss bounds the hit, then only the
    blocks that the other groups need at the longest length still possible, moving left in growing
    batches. Both run the same hit search, so when the store does not change in between they give
    the same hit; ``staged`` never asks a key twice nor any that ``exact`` would not ask.

    Args:
        coord: The groups.
        schemas: Per group a key schema, or one per rank namespace that must hold a block for it to
            be present.
        hashes: One digest per hash block of the request.
        num_tokens: Tokens of the request. The last one is always left to compute.
        local_tokens: Tokens the engine holds itself: whole full-attention blocks below are not
            asked.
        strategy: ``"staged"`` or ``"exact"``.

    Raises:
        ArgumentError: A number is out of range, or there is not one schema entry per group.

    >>> from kvmask import Coordinator, FullAttention, VllmKeys
    >>> coord = Coordinator([FullAttention(16)], hash_block_size=16)
    >>> plan = LookupPlan(coord, [VllmKeys("m")], [b"a" * 32, b"b" * 32], num_tokens=33)
    >>> while keys := plan.next_keys():
    ...     plan.feed([1] * len(keys))
    >>> plan.hit.length
    32
    """

    def __init__(
        self,
        coord: Coordinator,
        schemas: Schemas,
        hashes: Hashes,
        num_tokens: int,
        local_tokens: int = 0,
        strategy: str = "staged",
    ) -> None:
        if strategy not in STRATEGIES:
            raise ArgumentError(f"`strategy` must be one of {STRATEGIES}, got {strategy!r}")
        rows = per_group(schemas, KeySchema, "schemas", len(coord.groups))  # type: ignore[type-abstract]
        self._core = LookupCore(
            coord._core,
            [tuple(s.builder for s in row) for row in rows],
            hashes,
            num_tokens,
            local_tokens,
            strategy == "staged",
        )
        self._hit: Hit | None = None

    def next_keys(self) -> list[str]:
        """The next keys to ask, or an empty list when the hit is decided.

        Raises:
            PlanStateError: The answers to the last batch are missing.
        """
        return self._core.next_keys()

    def feed(self, answers: Sequence[int]) -> None:
        """Take the answers to the last batch, in its order. Only ``1`` means present.

        Raises:
            PlanStateError: Nothing was asked.
            StoreError: There is not one integer per key.
        """
        self._core.feed(answers)

    @property
    def asked(self) -> int:
        """Keys asked so far."""
        return self._core.asked

    @property
    def probes(self) -> int:
        """Calls asked for so far."""
        return self._core.probes

    @property
    def candidates(self) -> int:
        """Keys that ``exact`` asks for this request."""
        return self._core.candidates

    @property
    def hit(self) -> Hit:
        """The decided hit.

        Raises:
            PlanStateError: Answers are missing.
        """
        if self._hit is None:
            found = self._core.result()
            if found is None:
                raise PlanStateError("`hit` is decided when `next_keys` returns an empty list")
            self._hit = Hit(*found, asked=self._core.asked, probes=self._core.probes)
        return self._hit


class BlockFailure(NamedTuple):
    """One key that was not moved.

    Attributes:
        group: Group id.
        block: Index of the block in its group.
        block_id: Its entry in the block table.
        key: The key.
        code: The store's return code; for a get also the number of bytes when it was short.
    """

    group: int
    block: int
    block_id: int
    key: str
    code: int


@dataclass(frozen=True, slots=True)
class SaveResult:
    """What became of a save: every planned key is stored, was present, or failed.

    Attributes:
        stored: Keys written.
        present: Keys that the store had already.
        failed: The others.
        saved_tokens: High-water mark: everything below it is stored; resume there.
        num_bytes: Bytes written.
    """

    stored: int
    present: int
    failed: tuple[BlockFailure, ...]
    saved_tokens: int
    num_bytes: int

    @property
    def ok(self) -> bool:
        """Nothing failed."""
        return not self.failed

    @property
    def pressure(self) -> bool:
        """The store had no room for some of it: worth another try later."""
        return any(f.code == NO_SPACE for f in self.failed)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What became of a load: every planned key is loaded or failed.

    Attributes:
        loaded: Keys read whole.
        failed: The others; their blocks hold nothing that may be used.
        num_bytes: Bytes read.
    """

    loaded: int
    failed: tuple[BlockFailure, ...]
    num_bytes: int

    @property
    def ok(self) -> bool:
        """Nothing failed."""
        return not self.failed

    def invalid_block_ids(self, group: int) -> list[int]:
        """Block ids of a group that must not be used, ascending."""
        return sorted({f.block_id for f in self.failed if f.group == group})


class TransferBatch(NamedTuple):
    """Arguments of one put or get: per key its addresses and sizes."""

    keys: list[str]
    addresses: list[list[int]]
    sizes: list[list[int]]


@dataclass(slots=True)
class _Entries:
    """The keys of one group: block-major, the shards of one block together."""

    group: int
    blocks: list[int]
    block_ids: list[int]
    shards: int
    first_key: int


class _BlockPlan:
    """What saves and loads share: keys and descriptors of selected blocks of every group."""

    def __init__(
        self, coord: Coordinator, schemas: Schemas, layouts: Layouts, hashes: Hashes, null: int | None
    ) -> None:
        n = len(coord.groups)
        self._coord = coord
        self._schemas = per_group(schemas, KeySchema, "schemas", n)  # type: ignore[type-abstract]
        self._layouts = per_group(layouts, KVLayout, "layouts", n)
        self._hashes = hashes if isinstance(hashes, BlockHashes) else BlockHashes.from_list(hashes)
        self._null_block = null
        self.keys: list[str] = []
        self._entries: list[_Entries] = []
        for g, (names, places) in enumerate(zip(self._schemas, self._layouts, strict=True)):
            if len(names) != len(places) and coord.groups[g].prefix_cacheable:
                raise ArgumentError(
                    f"`schemas` and `layouts` must have equally many shards in group {g}, "
                    f"got {len(names)} and {len(places)}"
                )

    def _digests_for(self, num_tokens: int) -> None:
        held = len(self._hashes) * self._coord.hash_block_size
        if num_tokens > held:
            raise ArgumentError(
                f"`hashes` must cover the tokens, got {held} tokens of digests and {num_tokens}"
            )

    def _add(
        self,
        group: int,
        planned: Bitset,
        start: int,
        block_ids: list[int],
        tail: tuple[int, int, int] | None,
    ) -> None:
        """Adds the planned blocks (from block ``start`` on) and, keyed by its own token boundary,
        a last block: (block, id, boundary)."""
        size = self._coord.groups[group].block_size
        unit = self._coord.hash_block_size
        builders = tuple(s.builder for s in self._schemas[group])
        blocks = [start + i for i in planned.indices()]
        first_key = len(self.keys)
        keys = build_keys(builders, self._hashes, planned, start, size // unit)
        if tail is not None:
            block, block_id, boundary = tail
            keys += build_keys(builders, [self._hashes[boundary // unit - 1]])
            blocks.append(block)
            block_ids = [*block_ids, block_id]
        self.keys = self.keys + keys if self.keys else keys
        self._entries.append(_Entries(group, blocks, block_ids, len(builders), first_key))

    def _descriptors(
        self, entries: _Entries, ordinals: list[int] | None
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Addresses and sizes of the keys at these positions of a group (None: of all)."""
        layouts = self._layouts[entries.group]
        if entries.shards == 1:
            ids = entries.block_ids
            if ordinals is not None:
                ids = [ids[i] for i in ordinals]
            return layouts[0].addresses(ids)
        if ordinals is None:
            ordinals = list(range(len(entries.block_ids) * entries.shards))
        addresses: list[list[int]] = [[]] * len(ordinals)
        sizes: list[list[int]] = [[]] * len(ordinals)
        for shard, layout in enumerate(layouts):
            mine = [p for p, i in enumerate(ordinals) if i % entries.shards == shard]
            rows, spans = layout.addresses(
                [entries.block_ids[ordinals[p] // entries.shards] for p in mine]
            )
            for p, row, span in zip(mine, rows, spans, strict=True):
                addresses[p] = row
                sizes[p] = span
        return addresses, sizes

    def _failure(self, position: int, code: int) -> BlockFailure:
        """The failure of the key at this position of all keys."""
        for entries in reversed(self._entries):
            if position >= entries.first_key:
                i = (position - entries.first_key) // entries.shards
                return BlockFailure(
                    entries.group,
                    entries.blocks[i],
                    entries.block_ids[i],
                    self.keys[position],
                    int(code),
                )
        raise PlanStateError(f"no key at position {position} of {len(self.keys)}")

    def _check_answers(self, answers: Sequence[int], expected: int) -> list[int]:
        given = list(answers)
        if len(given) != expected:
            raise StoreError(
                f"the store must answer every key, got {len(given)} answers to {expected} keys"
            )
        return given


class SavePlan(_BlockPlan):
    """Which blocks of a computed prefix go to the store.

    Drive it as: ask ``keys``, ``feed_exists``; put ``put_batch()`` unless it is None,
    ``feed_puts``; then read ``result``.

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
    ) -> None:
        super().__init__(coord, schemas, layouts, hashes, null_block)
        n = len(coord.groups)
        check_count(num_tokens, "num_tokens", 0)
        check_count(start_token, "start_token", 0)
        check_count(rank, "rank", 0)
        if len(block_ids) != n:
            raise ArgumentError(
                f"`block_ids` must hold one table per group, got {len(block_ids)} and {n}"
            )
        steps = [1] * n if put_steps is None else list(put_steps)
        if len(steps) != n:
            raise ArgumentError(
                f"`put_steps` must hold one step per group, got {len(steps)} and {n}"
            )
        for step in steps:
            check_count(step, "put_steps")
        self._start_token = start_token
        self.num_tokens = coord.align(num_tokens)
        self._digests_for(self.num_tokens)
        self._mark = self.num_tokens
        self._missing: list[tuple[_Entries, list[int] | None]] | None = None
        self._put_positions: list[int] = []
        self._put_bytes: list[int] = []
        self._present = 0
        self._stored = 0
        self._num_bytes = 0
        self._failed: list[BlockFailure] = []
        self._fed = False
        if self.num_tokens > start_token:
            masks = coord.store_mask(self.num_tokens, start_token, num_prompt_tokens, states)
            tails = coord.load_mask(self.num_tokens) if coord.partial_hits else None
            for g in range(n):
                if not coord.groups[g].prefix_cacheable:
                    continue
                table = list(block_ids[g])
                self._plan_group(
                    g, masks[g], tails[g] if tails else None, table, states,
                    steps[g], (rank + g) % steps[g],
                )

    def _plan_group(
        self,
        g: int,
        mask: Bitset | None,
        needed: Bitset | None,
        table: list[int],
        states: bool,
        step: int,
        phase: int,
    ) -> None:
        group = self._coord.groups[g]
        size = group.block_size
        if isinstance(group, Mamba) and not states:
            return
        start = min(-(-self._start_token // size), self.num_tokens // size)
        whole = self.num_tokens // size
        if needed is not None and mask is not None:
            # With hits at every hash block, what a hit at this very end needs is stored too.
            mask = mask | needed[start:whole]
        planned, ids = plan_blocks(mask, whole, start, table, step, phase, self._null_block)
        if len(table) < whole:
            self._mark = min(self._mark, len(table) * size)
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
        """Take the answers to ``keys``; anything but ``1`` is put.

        Raises:
            StoreError: There is not one integer per key.
        """
        if self._missing is not None:
            raise PlanStateError("`feed_exists` must be called once, before `put_batch`")
        missing: list[tuple[_Entries, list[int] | None]] = []
        for k, entries in enumerate(self._entries):
            stop = (
                self._entries[k + 1].first_key if k + 1 < len(self._entries) else len(self.keys)
            )
            _, ordinals = pick_missing(self.keys, answers, entries.first_key, stop)
            self._present += stop - entries.first_key - len(ordinals)
            if ordinals:
                whole = len(ordinals) == stop - entries.first_key
                missing.append((entries, None if whole else ordinals))
        self._missing = missing

    def put_batch(self) -> TransferBatch | None:
        """The put that is left to do, without keys twice, or None.

        Raises:
            PlanStateError: The answers to ``keys`` are missing.
            BlockIdError: A block id lies outside its layout.
        """
        if self._missing is None:
            if self.keys:
                raise PlanStateError("`put_batch` needs the answers to `keys` first")
            return None
        if self._fed or not self._missing:
            return None
        keys: list[str] = []
        addresses: list[list[int]] = []
        sizes: list[list[int]] = []
        positions: list[int] = []
        for entries, ordinals in self._missing:
            rows, spans = self._descriptors(entries, ordinals)
            if ordinals is None:
                ordinals = range(len(rows))  # type: ignore[assignment]
            places = [entries.first_key + i for i in ordinals]  # type: ignore[union-attr]
            positions += places
            keys += [self.keys[p] for p in places]
            addresses += rows
            sizes += spans
        if len(set(keys)) < len(keys):
            keep = list({key: i for i, key in reversed(list(enumerate(keys)))}.values())
            keep.sort()
            self._present += len(keys) - len(keep)
            keys = [keys[i] for i in keep]
            addresses = [addresses[i] for i in keep]
            sizes = [sizes[i] for i in keep]
            positions = [positions[i] for i in keep]
        self._put_positions = positions
        self._put_bytes = row_bytes(sizes)
        return TransferBatch(keys, addresses, sizes)

    def feed_puts(self, codes: Sequence[int]) -> None:
        """Take the codes of the put: 0 is stored, -705 was there, all else failed.

        Raises:
            PlanStateError: No put was asked for.
            StoreError: There is not one code per key.
        """
        if not self._put_positions or self._fed:
            raise PlanStateError("`feed_puts` must follow `put_batch` once")
        for code, position, size in zip(
            self._check_answers(codes, len(self._put_positions)),
            self._put_positions,
            self._put_bytes,
            strict=True,
        ):
            if code == 0:
                self._stored += 1
                self._num_bytes += size
            elif code == ALREADY_EXISTS:
                self._present += 1
            else:
                self._failed.append(self._failure(position, code))
        self._fed = True

    def fail(self, code: int) -> None:
        """Record that the put as a whole failed (the call raised): every key has this code."""
        self.feed_puts([code] * len(self._put_positions))

    @property
    def result(self) -> SaveResult:
        """What became of the plan.

        Raises:
            PlanStateError: Answers are missing.
        """
        if self.keys and (self._missing is None or (self._missing and not self._fed)):
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


def row_bytes(sizes: Sequence[Sequence[int]]) -> list[int]:
    """Bytes per key. Rows are mostly one shared list, so its sum is taken once."""
    out = []
    last: Sequence[int] | None = None
    total = 0
    for row in sizes:
        if row is not last:
            last = row
            total = sum(row)
        out.append(total)
    return out


def staging_bytes(num_bytes: int) -> int:
    """What one object takes of an owner's staging buffer.

    >>> staging_bytes(4097)
    16384
    """
    return -(-num_bytes // STAGING_PAGE) * STAGING_PAGE + STAGING_PADDING


def split_staging(sizes: Sequence[int], budget: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Cuts a get into batches that fit an owner's staging buffer.

    Args:
        sizes: Bytes per key.
        budget: Bytes of the buffer. One batch fills at most nine tenths of it; a key between that
            and the whole goes alone.

    Returns:
        (batches as (start, stop), keys that cannot be staged at all).
    """
    check_count(budget, "budget")
    usable = max(1, int(budget * STAGING_USABLE))
    batches: list[tuple[int, int]] = []
    oversize: list[int] = []
    start, used = 0, 0

    def close(stop: int) -> None:
        if stop > start:
            batches.append((start, stop))

    for i, size in enumerate(sizes):
        need = staging_bytes(size)
        if need > budget:
            close(i)
            oversize.append(i)
            start, used = i + 1, 0
        elif need > usable:
            close(i)
            batches.append((i, i + 1))
            start, used = i + 1, 0
        elif used + need > usable:
            close(i)
            start, used = i, need
        else:
            used += need
    close(len(sizes))
    return batches, oversize


class LoadPlan(_BlockPlan):
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
    ) -> None:
        super().__init__(coord, schemas, layouts, hashes, null_block)
        n = len(coord.groups)
        check_count(start_token, "start_token", 0)
        check_count(rotation, "rotation", 0)
        if len(block_ids) != n:
            raise ArgumentError(
                f"`block_ids` must hold one table per group, got {len(block_ids)} and {n}"
            )
        if len(hit.masks) != n:
            raise ArgumentError(
                f"`hit` must have one mask per group, got {len(hit.masks)} and {n}"
            )
        if hit.length % coord.hit_alignment:
            raise AlignmentError(
                f"`hit.length` must be a multiple of the alignment, "
                f"got {hit.length} and {coord.hit_alignment}"
            )
        self._digests_for(max([hit.length, *hit.tail_tokens]))
        for g in range(n):
            if coord.groups[g].prefix_cacheable and len(hit.masks[g]):
                self._plan_group(g, hit, list(block_ids[g]), start_token)
        self._failed: list[BlockFailure] = []
        self._loaded = 0
        self._num_bytes = 0
        self._current: tuple[int, int] | None = None
        self._retried = False
        self.renew: list[str] = []
        self._cut(rotation, staging)

    def _plan_group(self, g: int, hit: Hit, table: list[int], start_token: int) -> None:
        size = self._coord.groups[g].block_size
        mask = hit.masks[g]
        start = min(start_token // size, len(mask))
        wanted = mask[start:]
        planned, ids = plan_blocks(wanted, len(mask), start, table, 1, 0, self._null_block)
        if planned != wanted:
            lost = next(
                start + i for i in wanted.indices() if i >= len(planned) or not planned[i]
            )
            got = table[lost] if lost < len(table) else f"{len(table)} entries"
            raise BlockIdError(
                "`block_ids` must name a block for every block of the hit, "
                f"got {got} for block {lost} of group {g}"
            )
        tail = None
        last = len(mask) - 1
        boundary = hit.tail_tokens[g]
        if ids and mask[last] and boundary != len(mask) * size:
            planned = planned[: len(planned) - 1]
            tail = (last, ids[-1], boundary)
            ids = ids[:-1]
        self._add(g, planned, start, ids, tail)

    def _cut(self, rotation: int, staging: int | None) -> None:
        addresses: list[list[int]] = []
        sizes: list[list[int]] = []
        for entries in self._entries:
            rows, spans = self._descriptors(entries, None)
            addresses += rows
            sizes += spans
        order = list(range(len(self.keys)))
        keys = self.keys
        if keys and rotation % len(keys):
            k = rotation % len(keys)
            order, keys = order[k:] + order[:k], keys[k:] + keys[:k]
            addresses, sizes = addresses[k:] + addresses[:k], sizes[k:] + sizes[:k]
        self._order = order
        self._all = TransferBatch(keys, addresses, sizes)
        self._bytes = row_bytes(sizes)
        self._batches = [(0, len(keys))] if keys else []
        if staging is not None and sum(map(staging_bytes, self._bytes)) > staging * STAGING_USABLE:
            self._batches, oversize = split_staging(self._bytes, staging)
            self._failed += [self._failure(order[i], INVALID_PARAMS) for i in oversize]
        self._batches.reverse()

    def next_batch(self) -> TransferBatch | None:
        """The next get, or None when all is done.

        Raises:
            PlanStateError: The answers to the last batch are missing.
        """
        if self._current is not None:
            raise PlanStateError("`feed` must be given the answers before the next batch")
        if not self._batches:
            return None
        start, stop = self._current = self._batches.pop()
        if start == 0 and stop == len(self.keys):
            return self._all
        return TransferBatch(
            self._all.keys[start:stop],
            self._all.addresses[start:stop],
            self._all.sizes[start:stop],
        )

    def feed(self, results: Sequence[int]) -> None:
        """Take the results of the last batch: only the planned number of bytes is good.

        When every key of a batch has lost its lease, the batch is tried once more: ``renew`` then
        holds the keys to ask the store for first.

        Raises:
            PlanStateError: No batch was asked for.
            StoreError: There is not one result per key.
        """
        if self._current is None:
            raise PlanStateError("`feed` must follow `next_batch`")
        start, stop = self._current
        given = self._check_answers(results, stop - start)
        self._current = None
        self.renew = []
        if not self._retried and all(r == LEASE_EXPIRED for r in given):
            self._retried = True
            self.renew = self._all.keys[start:stop]
            self._batches.append((start, stop))
            return
        for i, result in enumerate(given, start):
            if result == self._bytes[i]:
                self._loaded += 1
                self._num_bytes += self._bytes[i]
            else:
                self._failed.append(self._failure(self._order[i], result))

    def fail(self, code: int) -> None:
        """Record that the last get as a whole failed (the call raised)."""
        if self._current is None:
            raise PlanStateError("`fail` must follow `next_batch`")
        self._retried = True
        self.feed([code] * (self._current[1] - self._current[0]))

    @property
    def result(self) -> LoadResult:
        """What became of the plan.

        Raises:
            PlanStateError: Batches or answers are missing.
        """
        if self._batches or self._current is not None:
            raise PlanStateError("`result` needs every batch to be fed first")
        return LoadResult(self._loaded, tuple(self._failed), self._num_bytes)
