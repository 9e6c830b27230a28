# Plans of saves and loads: which blocks of the block tables they move, and the keys of these.


cdef class PlanGroup:
    """A group of which a rank saves and loads something, as plans use it.

    Args:
        group: Its GroupScheme.
        hash_block_size: Tokens per digest.

    Attributes:
        group: As it was given.

    Raises:
        ArgumentError: A number is out of range, or the group has memory and its layouts are not one
            per shard.
    """

    def __cinit__(self, group, hash_block_size):
        self.group = group
        self.index = group.index
        self.size = as_int64(group.block_size, "block_size", 1, c_max_tokens)
        self.unit = as_int64(hash_block_size, "hash_block_size", 1, c_max_tokens)
        self.writers = as_int64(group.writers, "writers", 1, c_max_bits)
        self.turn = as_int64(group.turn, "turn", 0, self.writers - 1)
        self.full = group.kind == "full"
        self.state = group.kind == "state"
        self.own = as_builders(group.own)
        self.layouts = tuple(group.layouts)
        if self.layouts and len(self.layouts) != len(self.own):
            raise ArgumentError(
                "`layouts` of a group must hold one layout per shard, "
                f"got {len(self.layouts)} and {len(self.own)} shards of group {group.name!r}"
            )
        self.num_bytes = []
        for layout in self.layouts:
            self.num_bytes.append(layout.block_bytes)
        self.all_bytes = sum(self.num_bytes)


cdef class PlanPart:
    """Some keys of one group: block by block, the shards of a block together.

    Args:
        of: The PlanGroup.

    Attributes:
        group: The GroupScheme.
        planned: Which blocks from ``start`` on, as a Bitset; None when there is the tail alone.
        start: First block that was looked at.
        tail: Index of a last block that is named by the digest of its own token boundary, or None.
        block_ids: Ids of all these blocks, the tail's last.
        shards: Keys per block.
        num_bytes: Bytes of a block, one number per shard.
        first_key: Where the keys stand among all keys of the plan.
    """

    def __cinit__(self, PlanGroup of not None):
        self.of = of
        self.ids = []

    @property
    def group(self):
        return self.of.group

    @property
    def tail(self):
        return None if self.boundary == 0 else self.last

    @property
    def block_ids(self):
        return self.ids

    @property
    def shards(self):
        return len(self.of.own)

    @property
    def num_bytes(self):
        return self.of.num_bytes

    @property
    def blocks(self):
        """Index of every block. Only failures and events ask for it."""
        cdef list indices = self.indices
        cdef int64_t i = -1
        if indices is None:
            indices = []
            while self.planned is not None:
                i = km_next(self.planned.words, i + 1, self.planned.n, True)
                if i >= self.planned.n:
                    break
                indices.append(self.start + i)
            if self.boundary:
                indices.append(self.last)
            self.indices = indices
        return indices


cdef bint is_null(object entry, int64_t null) noexcept:
    """Whether an id is that of the null block; one that does not fit is left to the layout."""
    cdef int overflow = 0
    if null < 0:
        return False
    return PyLong_AsLongLongAndOverflow(entry, &overflow) == null and not overflow


cdef int64_t as_null(object null_block) except -2:
    return -1 if null_block is None else as_int64(null_block, "null_block", 0, c_max_bits)


cdef list as_tables(object tables):
    """The block tables, in a list that the own code of an entry or a mask cannot change."""
    cdef list rows = list(tables)
    for row in rows:
        if type(row) is not list:
            raise TypeError(f"`tables` must hold lists, got {type(row).__name__}")
    return rows


cdef object entry_at(list table, int64_t block):
    """An entry of a block table as a plain int."""
    if block >= PyList_GET_SIZE(table):  # the own code of an entry before it has shortened it
        raise BlockIdError(f"`block_ids` must not shrink while it is read, got {len(table)}")
    entry = <object>PyList_GET_ITEM(table, block)  # kept: its own code can take it out
    return entry if PyLong_CheckExact(entry) else _id_int(entry, block)


cdef Bitset as_bitset(object mask):
    return <Bitset>mask if type(mask) is Bitset else Bitset.from_bools(mask)


cdef PlanPart select_blocks(PlanGroup group, Bitset bits, int64_t origin, int64_t start,
                            int64_t end, list table, int64_t null, bint all_turns,
                            int64_t *missed):
    """The blocks in [start, end) that have a bit, an entry of the block table and a turn.

    Bit ``i`` is that of block ``origin + i``; without bits all blocks have one. ``missed`` is the
    first block that has a bit and no entry, or the null block's, or -1.
    """
    cdef PlanPart part = PlanPart.__new__(PlanPart, group)
    cdef list ids = part.ids
    cdef int64_t writers = 1 if all_turns else group.writers
    cdef int64_t block = start - 1, stop = end
    part.start = start
    missed[0] = -1
    if bits is not None and bits.n < end - origin:
        stop = origin + bits.n
    end = min(stop, PyList_GET_SIZE(table))
    part.planned = new_bitset(max(end - start, 0))
    while True:
        block += 1
        if bits is not None:
            block = origin + km_next(bits.words, block - origin, stop - origin, True)
        if block >= stop:
            break
        if writers > 1 and block % writers != group.turn:
            continue
        if block >= end:
            if missed[0] < 0:
                missed[0] = block
            break
        entry = entry_at(table, block)
        if is_null(entry, null):
            if missed[0] < 0:
                missed[0] = block
            continue
        km_set(part.planned.words, block - start)
        ids.append(entry)
    return part


cdef list plan_keys(list parts, BlockHashes hashes):
    """The keys of all parts, which learn where theirs begin."""
    cdef PlanPart part
    cdef PlanGroup group
    cdef int64_t total = 0, at = 0, scale, blocks
    cdef list keys
    for item in parts:
        part = item
        group = part.of
        scale = as_int64(group.size // group.unit, "block_size // hash_block_size", 1, c_max_tokens)
        if part.planned is not None and part.planned.n > hashes.n // scale - part.start:
            raise ArgumentError(
                "`hashes` must cover the blocks, got "
                f"{hashes.n} digests and {scale} for each of {part.start + part.planned.n} blocks"
            )
        if part.boundary and not group.unit <= part.boundary <= hashes.n * group.unit:
            raise ArgumentError(
                "`hashes` must cover the boundary of a last block, "
                f"got {hashes.n} digests of {group.unit} for {part.boundary} tokens"
            )
        blocks = part.boundary != 0
        if part.planned is not None:
            blocks += km_count(part.planned.words, part.planned.n)
        if blocks != PyList_GET_SIZE(part.ids):
            raise ArgumentError(
                "a part must name every block by a digest, "
                f"got {len(part.ids)} blocks and {blocks} digests"
            )
        part.first_key = total
        total += blocks * len(group.own)
    keys = PyList_New(total)
    for item in parts:
        part = item
        group = part.of
        if part.planned is not None:
            at = put_keys(keys, at, group.own, hashes, part.planned, part.planned.n, part.start,
                          group.size // group.unit)
        if part.boundary:
            at = put_keys(keys, at, group.own, hashes, None, 1, part.boundary // group.unit - 1, 1)
    pin_keys(keys)
    return keys


@cython.boundscheck(True)
def plan_load(tuple groups not None, BlockHashes hashes not None, masks, tail_tokens, length,
              starts, tables, null_block, bint partial_hits):
    """Keys of the blocks that a load reads, and where they go.

    Args:
        groups: A PlanGroup per group of which this rank loads something.
        hashes: One digest per hash block.
        masks: Per group which blocks are to be loaded, a Bitset or a sequence of bool.
        tail_tokens: Per group the boundary that names its last block; 0 where that is ``length``.
        length: Tokens of the hit.
        starts: Per group the first block that is looked at; None looks at all.
        tables: Per group its block table, a list of int.
        null_block: Table entries with this id hold no data; None when there are none.
        partial_hits: Whether a boundary may lie inside a block.

    Returns:
        (Keys, a PlanPart per group that has some.)

    Raises:
        ArgumentError: A boundary does not name its block, or the digests do not reach it.
        BlockIdError: A block has no entry, the null block's, one that is no integer, or one that
            stands twice.
    """
    cdef int64_t null = as_null(null_block)
    cdef int64_t tokens = as_int64(length, "length", 0, (1 << 63) - 1)
    cdef int64_t start, missed, boundary, end
    cdef list rows = as_tables(tables), table, parts = []
    cdef PlanGroup group
    cdef PlanPart part
    cdef Bitset bits
    for item in groups:
        group = <PlanGroup?>item
        bits = as_bitset(masks[group.index])
        if bits.n == 0:
            continue
        table = rows[group.index]
        start = 0 if starts is None else as_int64(starts[group.index], "starts", 0, bits.n)
        part = select_blocks(group, bits, 0, start, bits.n, table, null, True, &missed)
        if missed >= 0:
            raise no_block(group, table, missed, null)
        if not part.ids:
            continue
        if first_repeated(part.ids) >= 0:
            raise BlockIdError(
                "`tables` must name every block once, "
                f"got a block of group {group.group.name!r} twice"
            )
        boundary = as_int64(tail_tokens[group.index], "tail_tokens", 0, (1 << 63) - 1) or tokens
        end = bits.n * group.size
        if boundary != end and km_get(bits.words, bits.n - 1):
            part.last = bits.n - 1
            if (not partial_hits or not end - group.size < boundary < end
                    or boundary % group.unit):
                raise ArgumentError(
                    "`hit.tail_tokens` must be a boundary of the last block, "
                    f"got {boundary} for block {part.last} of group {group.group.name!r}"
                )
            part.boundary = boundary
            part.planned = part.planned[: part.planned.n - 1]
        parts.append(part)
    return plan_keys(parts, hashes), parts


cdef object no_block(PlanGroup group, list table, int64_t block, int64_t null):
    """The error of a load that has nowhere to put a block."""
    hint = ""
    got = f"{len(table)} entries"
    if block < len(table):
        got = table[block]
        hint = f": {null} is the null block, unless `null_block` is another"
    return BlockIdError(
        "`tables` must name a block for every block of the hit, "
        f"got {got} for block {block} of group {group.group.name!r}{hint}"
    )


@cython.boundscheck(True)
def plan_save(tuple groups not None, BlockHashes hashes not None, masks, starts, tables,
              num_tokens, start_token, null_block, bint tails, bint exact, handed):
    """Keys of the blocks that a save may write, and how far it can get.

    Args:
        groups: A PlanGroup per group of which this rank saves something.
        hashes: One digest per hash block.
        masks: Per group which blocks from its first on are worth storing, a Bitset, a sequence of
            bool, or None for all.
        starts: Per group its first block; None for the one at or behind ``start_token``.
        tables: Per group its block table, a list of int.
        num_tokens: Tokens that are computed.
        start_token: Everything below is stored.
        null_block: Table entries with this id hold no data; None when there are none.
        tails: Whether a last block that is not full is saved too.
        exact: Whether ``num_tokens`` are all that is computed, so that a state is the one there.
        handed: (PlanGroup, block, block id, boundary in tokens) of blocks that were handed over.

    Returns:
        (Keys, a PlanPart per group that has some and per block handed over, tokens up to which
        everything is stored when all keys are.)

    Raises:
        ArgumentError: The digests do not reach the blocks.
        BlockIdError: An entry that is looked at is no integer.
    """
    cdef int64_t null = as_null(null_block)
    cdef int64_t tokens = as_int64(num_tokens, "num_tokens", 0, c_max_tokens)
    cdef int64_t resume = as_int64(start_token, "start_token", 0, c_max_tokens)
    cdef int64_t mark = tokens, start, end, have, missed, hole
    cdef list rows = as_tables(tables), table, parts = []
    cdef PlanGroup group
    cdef PlanPart part
    for item in groups:
        group = <PlanGroup?>item
        end = tokens // group.size
        if starts is None:
            start = min(km_ceil_div(resume, group.size), end)
        else:
            start = as_int64(starts[group.index], "starts", 0, end)
        mask = masks[group.index]
        table = rows[group.index]
        part = select_blocks(group, None if mask is None else as_bitset(mask), start, start, end,
                             table, null, False, &missed)
        have = len(table)
        if have < end:
            mark = min(mark, have * group.size)
        if group.full and null >= 0 and len(part.ids) < min(end, have) - start:
            # Windows and chunks let go of blocks that no hit needs; here it is a hole.
            hole = first_null(table, null, start, end)
            if hole >= 0:
                mark = min(mark, hole * group.size)
        if (tails and tokens % group.size and (group.full or (group.state and exact))
                and end % group.writers == group.turn):
            entry = entry_at(table, end) if have > end else None
            if entry is not None and not is_null(entry, null):
                part.ids.append(entry)
                part.last = end
                part.boundary = tokens
            elif have <= end or group.full:
                mark = min(mark, end * group.size)
        if part.ids:
            parts.append(part)
    for group, block, block_id, boundary in handed:
        part = PlanPart.__new__(PlanPart, group)
        part.ids.append(block_id)
        part.last = block
        part.boundary = boundary
        parts.append(part)
    return plan_keys(parts, hashes), parts, mark


cdef int64_t first_null(list table, int64_t null, int64_t start, int64_t stop) except -2:
    """The first entry in [start, stop) that is the null block's, or -1."""
    cdef int64_t i = start
    while i < stop and i < PyList_GET_SIZE(table):
        entry = table[i]
        # Those of other ranks' turns are nobody's to refuse.
        if is_null(entry, null) if PyLong_CheckExact(entry) else entry == null:
            return i
        i += 1
    return -1


@cython.boundscheck(True)
def describe_parts(list parts not None):
    """Addresses and sizes of all keys of some parts, in their order.

    Args:
        parts: PlanPart objects.

    Returns:
        (Addresses, sizes, bytes of all, bytes of a block's shards and how often per part.)

    Raises:
        BlockIdError: A layout has no such block.
    """
    cdef PlanPart part
    cdef list addresses = [], sizes = [], runs = []
    cdef Py_ssize_t shards, shard
    cdef tuple layouts
    total = 0
    for item in parts:
        part = <PlanPart?>item
        layouts = part.of.layouts
        shards = len(part.of.own)
        if shards == 1:
            rows, pieces = layouts[0].addresses(part.ids)
        else:
            rows, pieces = [[]] * (len(part.ids) * shards), [[]] * (len(part.ids) * shards)
            for shard in range(shards):
                rows[shard::shards], pieces[shard::shards] = layouts[shard].addresses(part.ids)
        total += part.of.all_bytes * len(part.ids)
        runs.append((part.of.num_bytes, len(part.ids)))
        if len(parts) == 1:
            return rows, pieces, total, runs
        addresses += rows
        sizes += pieces
    return addresses, sizes, total, runs
