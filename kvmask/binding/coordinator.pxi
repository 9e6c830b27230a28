# CoordinatorCore: masks and hit search over all KV cache groups of an engine.

# Token counts above this are refused: no context is that long, and sizes stay far from overflow.
MAX_TOKENS = 1 << 32
MAX_SETS = 64
cdef int64_t c_max_tokens = MAX_TOKENS

# The names of kvmask.groups.KINDS; a test compares them.
cdef dict _KINDS = {"full": KM_FULL, "window": KM_WINDOW, "chunked": KM_CHUNKED, "state": KM_STATE}


cdef int as_kind(object kind) except -1:
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ArgumentError(f"`kind` must be one of {', '.join(_KINDS)}, got {shown(kind)}")
    return _KINDS[kind]


cdef class CoordinatorCore:
    """Arithmetic of kvmask.Coordinator; the facade checks the configuration.

    Args:
        groups: One (kind, block_size, span, eagle, cacheable, set_index) per group. The span is the
            tokens of the window or of an attention chunk. Groups of one set have equal specs. Sets
            are numbered in search order, full attention first. Groups that are not cacheable have
            set_index -1.
        hash_block: Tokens per hash block.
        alignment: Common multiple of the cacheable groups' block sizes.
        retention: Tokens, or None.
        partial: Hits may end at any hash block.
    """

    def __cinit__(self, groups, hash_block, alignment, retention, *, partial):
        cdef Py_ssize_t i
        cdef int64_t index
        cdef list rows = list(groups)
        self.groups = <km_group *>calloc(len(rows) or 1, sizeof(km_group))
        self.set_of = <int *>calloc(len(rows) or 1, sizeof(int))
        self.leaders = <int *>calloc(MAX_SETS, sizeof(int))
        self.members = <int *>calloc(MAX_SETS, sizeof(int))
        if not (self.groups and self.set_of and self.leaders and self.members):
            raise MemoryError("no memory for the groups")
        self.n_groups = len(rows)
        self.hash_block = as_int64(hash_block, "hash_block", 1, c_max_tokens)
        self.alignment = as_int64(alignment, "alignment", 1, c_max_tokens)
        self.retention = KM_DENSE
        if retention is not None:
            self.retention = as_int64(retention, "retention", 0, c_max_tokens)
        self.partial = bool(partial)
        for i in range(self.n_groups):
            if not isinstance(rows[i], (tuple, list)) or len(rows[i]) != 6:
                raise TypeError(f"`groups` must hold rows of 6 values, got {shown(rows[i])}")
            kind, block_size, span, eagle, cacheable, set_index = rows[i]
            self.groups[i].kind = <km_kind>as_kind(kind)
            self.groups[i].block_size = as_int64(block_size, "block_size", 1, c_max_tokens)
            self.groups[i].span = as_int64(span, "span", 0, c_max_tokens)
            self.groups[i].eagle = bool(eagle)
            self.groups[i].cacheable = bool(cacheable)
            index = as_int64(set_index, "set_index", 0 if cacheable else -1, MAX_SETS - 1)
            if cacheable and self.groups[i].block_size % self.hash_block:
                raise AlignmentError(
                    "`block_size` must be a multiple of `hash_block_size`, "
                    f"got {block_size} and {hash_block}"
                )
            self.set_of[i] = index
            if not cacheable:
                continue
            if self.members[index] == 0:
                self.leaders[index] = i
            self.members[index] += 1
            if index >= self.n_sets:
                self.n_sets = index + 1
            if eagle:
                self.any_eagle = True
            if self.groups[i].kind == KM_CHUNKED:
                self.any_chunked = True
        for i in range(max(self.n_sets, 1)):
            if self.members[i] == 0:
                raise ArgumentError("`groups` must fill the sets from 0 on, at least one of them")

    def __dealloc__(self):
        free(self.groups)
        free(self.set_of)
        free(self.leaders)
        free(self.members)

    cdef int64_t unit(self) noexcept:
        """What hits are multiples of."""
        return self.hash_block if self.partial else self.alignment

    cdef int64_t stride(self, int group) noexcept:
        """Bits per block in a presence bitset."""
        return self.groups[group].block_size // self.hash_block if self.partial else 1

    cdef void prepare(self, km_search *s, km_set_state *sets, bint collect) noexcept:
        cdef int i
        memset(sets, 0, self.n_sets * sizeof(km_set_state))
        s.sets = sets
        s.n_sets = self.n_sets
        s.hash_block = self.hash_block
        s.alignment = self.alignment
        s.partial = self.partial
        s.collect = collect
        for i in range(self.n_sets):
            sets[i].group = self.groups[self.leaders[i]]
            sets[i].presence.stride = self.stride(self.leaders[i])

    cdef tuple group_masks(self, km_set_state *sets):
        cdef list masks = []
        cdef int i
        for i in range(self.n_groups):
            if self.set_of[i] < 0:
                masks.append(new_bitset(0))
            else:
                masks.append(run_bitset(sets[self.set_of[i]].len, sets[self.set_of[i]].first))
        return tuple(masks)

    def reach_masks(self, num_tokens, start_token, num_prompt_tokens, *, dense, states):
        """Masks of every group over the blocks from start_token on; None means all true."""
        cdef int64_t length = as_int64(num_tokens, "num_tokens", 0, c_max_tokens)
        cdef int64_t skip = as_int64(start_token, "start_token", 0, c_max_tokens)
        cdef km_reach reach
        cdef int64_t boundaries[2]
        cdef int i
        if length % self.unit():
            raise AlignmentError(
                f"`num_tokens` must be a multiple of the alignment, got {length} and {self.unit()}"
            )
        reach.alignment = self.alignment
        reach.retention = KM_DENSE if dense else self.retention
        reach.n_boundaries = 0
        if num_prompt_tokens is not None:
            reach.n_boundaries = km_replay_boundaries(
                as_int64(num_prompt_tokens, "num_prompt_tokens", 1, c_max_tokens),
                self.alignment, self.any_eagle, boundaries,
            )
            for i in range(reach.n_boundaries):
                reach.boundaries[i] = boundaries[i]
        return self.masks_of(&reach, length, skip, bool(states))

    cdef tuple dense_masks(self, int64_t length):
        """What can decide a hit of at most this length, a multiple of the alignment."""
        cdef km_reach reach
        reach.alignment = self.alignment
        reach.retention = KM_DENSE
        reach.n_boundaries = 0
        return self.masks_of(&reach, length, 0, True)

    cdef tuple masks_of(self, km_reach *reach, int64_t length, int64_t skip, bint states):
        cdef int64_t end, start
        cdef int i
        cdef bint sparse
        cdef km_group *group
        cdef list masks = [None] * self.n_groups
        cdef Bitset mask
        for i in range(self.n_groups):
            group = &self.groups[i]
            end = length // group.block_size
            start = km_ceil_div(skip, group.block_size)
            if start > end:
                start = end
            if not group.cacheable or (not states and group.kind == KM_STATE):
                masks[i] = new_bitset(end - start)
                continue
            if not km_has_mask(group.kind):
                continue
            mask = new_bitset(end - start)
            if mask.n >= c_gil_min_bits:
                with nogil:
                    sparse = km_reach_mask(group, reach, start, end, mask.words)
            else:
                sparse = km_reach_mask(group, reach, start, end, mask.words)
            if sparse:
                masks[i] = mask
        return tuple(masks)

    def load_masks(self, num_tokens):
        """What each group would fill at a hit of num_tokens, everything being present."""
        cdef int64_t length = as_int64(num_tokens, "num_tokens", 0, c_max_tokens)
        cdef km_set_state sets[64]
        cdef km_search search
        cdef int i
        self.prepare(&search, sets, False)
        for i in range(self.n_sets):
            sets[i].presence.nbits = length // (
                self.hash_block if self.partial else sets[i].group.block_size
            )
        km_find_hit(&search, length, False)
        return self.group_masks(sets)

    def tail_blocks(self, num_tokens):
        """What a hit of num_tokens rests on, but for the groups of full attention.

        The numbers are those of lookups: blocks, or with partial hits hash blocks. A block that
        EAGLE drops is among them.

        Returns:
            Per group the first such block and a Bitset from there on; None where no block is.
        """
        cdef int64_t length = as_int64(num_tokens, "num_tokens", 0, c_max_tokens), bit
        cdef km_set_state sets[64]
        cdef km_search search
        cdef km_need need
        cdef km_set_state *alone
        cdef Bitset nothing, bits
        cdef list found = [None] * self.n_groups, runs = [None] * self.n_sets
        cdef int64_t end
        cdef int i
        nothing = new_bitset(0)
        self.prepare(&search, sets, True)
        for i in range(self.n_sets):
            alone = &sets[i]
            if alone.group.kind == KM_FULL:
                continue
            end = length
            if alone.group.eagle and alone.group.kind != KM_STATE:
                end += km_eagle_margin(&search, &alone.group)
            alone.presence.nbits = end // (
                self.hash_block if self.partial else alone.group.block_size
            )
            if alone.presence.nbits > nothing.n:
                nothing = new_bitset(alone.presence.nbits)
            alone.presence.known = nothing.words
            km_find_set(&search, alone, end, alone.group.eagle)
            if alone.has_need:
                need = alone.need
                bits = new_bitset(need.stop - need.first)
                bit = need.first
                while bit < need.stop:
                    km_set(bits.words, bit - need.first)
                    bit += need.stride
                runs[i] = (need.first, bits)
        for i in range(self.n_groups):
            if self.set_of[i] >= 0:
                found[i] = runs[self.set_of[i]]
        return tuple(found)

    cdef list joint_presence(self, tuple present):
        """One bitset per set: the and of its groups, as long as the shortest."""
        cdef list joint = [None] * self.n_sets
        cdef Bitset bits, other
        cdef int i, k
        cdef int64_t n
        for i in range(self.n_groups):
            k = self.set_of[i]
            if k < 0:
                continue
            bits = <Bitset>present[i]
            if joint[k] is not None:
                other = <Bitset>joint[k]
                n = min(bits.n, other.n)
                bits = bits[:n] & other[:n]
            joint[k] = bits
        return joint

    def find_hit(self, present, max_length, *, eagle=True):
        """Length, masks and tail boundaries of the longest hit; see Coordinator.find_hit."""
        cdef int64_t limit = as_int64(max_length, "max_length", 0, c_max_tokens)
        cdef int64_t hit, boundary, bits = 0
        cdef bint drop = bool(eagle)
        cdef km_set_state sets[64]
        cdef km_search search
        cdef km_presence own
        cdef int i
        cdef list given = list(present), joint, tails = []
        cdef Bitset words
        if len(given) != self.n_groups:
            raise ArgumentError(
                f"`present` must hold one bitset per group, got {len(given)} and {self.n_groups}"
            )
        for i in range(self.n_groups):
            given[i] = Bitset.from_bools(given[i]) if self.set_of[i] >= 0 else None
        joint = self.joint_presence(tuple(given))
        self.prepare(&search, sets, False)
        for i in range(self.n_sets):
            words = <Bitset>joint[i]
            sets[i].presence.maybe = words.words
            sets[i].presence.nbits = words.n
            bits += words.n
        if bits >= c_gil_min_bits:
            with nogil:
                hit = km_find_hit(&search, limit, drop)
        else:
            hit = km_find_hit(&search, limit, drop)
        for i in range(self.n_groups):
            boundary = 0
            if self.set_of[i] >= 0:
                words = <Bitset>given[i]
                own = sets[self.set_of[i]].presence
                own.maybe = words.words
                own.nbits = words.n
                km_tail_boundary(&search, &sets[self.set_of[i]], &own, hit, &boundary)
            tails.append(boundary)
        return hit, self.group_masks(sets), tuple(tails)
