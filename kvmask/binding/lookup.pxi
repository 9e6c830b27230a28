# LookupCore: the state machine of a lookup. It knows which blocks are present, absent or not asked,
# says which keys to ask next, and stops as soon as the one hit search needs no further answer.

cdef class LookupCore:
    """What kvmask.LookupPlan drives; see there for the meaning of the arguments.

    Args:
        coord: CoordinatorCore.
        builders: Per group a sequence of KeyBuilder, one per rank namespace that must hold a block.
        hashes: BlockHashes or sequence of bytes, one digest per hash block.
        num_tokens: Tokens of the request.
        local_tokens: A hit that does not reach past this many tokens is of no use to the engine.
        held: None, or what the engine holds: per group a number of tokens or a Bitset over its
            blocks (see held_blocks). Those blocks are not asked for.
        staged: False asks everything that could matter in one call.
        first_batch: Blocks of a full-attention group to ask for in the first call.
        growth: Factor between one batch and the next.
        hint: Tokens that are likely to be the hit, or 0: the first call then asks for the blocks of
            a hit there as well, and for `slack` full-attention blocks past it.
        slack: See hint.
    """

    def __cinit__(self, CoordinatorCore coord not None, builders, hashes, num_tokens,
                  local_tokens=0, held=None, *, staged=True, first_batch=512, growth=4, hint=0,
                  slack=32):
        cdef int64_t n_hashes
        cdef list names = []
        for group in builders:
            names.append(as_builders(group))
        self.coord = coord
        self.hashes = as_hashes(hashes)
        self.num_tokens = as_int64(num_tokens, "num_tokens", 0, c_max_tokens)
        self.local_tokens = as_int64(local_tokens, "local_tokens", 0, c_max_tokens)
        self.staged = bool(staged)
        self.batch = as_int64(first_batch, "first_batch", 1, c_max_bits)
        self.growth = as_int64(growth, "growth", 1, c_max_bits)
        self.hint = as_int64(hint, "hint", 0, c_max_tokens)
        self.slack = as_int64(slack, "slack", 0, c_max_bits)
        self.width = 1
        if len(names) != coord.n_groups:
            raise ArgumentError(
                f"`schemas` must hold one entry per group, got {len(names)} and {coord.n_groups}"
            )
        for i in range(coord.n_groups):
            if coord.set_of[i] >= 0 and not names[i]:
                raise ArgumentError(f"`schemas` must name a namespace for every group, got none "
                                    f"for group {i}")
        self.builders = names
        self.pending_groups = []
        self.token_len = km_align_down(self.num_tokens, coord.unit())
        self.hit = -1
        self.tails = [0] * coord.n_groups
        if self.token_len <= 0 or self.hashes.n == 0:
            self.finish_empty()
            return
        # Without EAGLE, partial hits and chunks every finder returns the longest length that is
        # valid for its group alone, so a full hit searched again equals a search capped at once.
        self.limit = self.token_len
        if not coord.partial and not coord.any_eagle and not coord.any_chunked and (
            self.token_len == self.num_tokens
        ):
            self.limit = km_align_down(self.num_tokens - 1, coord.unit())
            if self.limit <= 0 and self.staged:
                self.finish_empty()
                return
        if self.local_tokens and self.limit <= self.local_tokens:
            self.finish_empty()
            return
        self.start_presence(held)

    cdef void finish_empty(self) noexcept:
        self.hit = 0
        self.no_masks = True

    cdef start_presence(self, held):
        """Blocks outside the lookup mask are absent, all others unknown."""
        cdef CoordinatorCore coord = self.coord
        cdef int64_t n, s
        cdef int i
        cdef Bitset maybe, known
        cdef tuple masks = None
        cdef list items = None
        if held is not None:
            items = list(held)
            if len(items) != coord.n_groups:
                raise ArgumentError(
                    f"`held` must hold one entry per group, got {len(items)} and {coord.n_groups}"
                )
        if not coord.partial:
            masks = coord.dense_masks(self.token_len)
        self.uneven = held is not None
        self.maybe = []
        self.known = []
        for i in range(coord.n_groups):
            if coord.set_of[i] < 0:
                self.maybe.append(None)
                self.known.append(None)
                continue
            s = coord.groups[i].block_size // coord.hash_block
            if coord.partial:
                n = min(self.hashes.n, self.token_len // coord.hash_block)
            else:
                n = min(self.hashes.n // s, self.token_len // coord.groups[i].block_size)
            if masks is None or masks[i] is None:
                maybe = ones_bitset(n)
                known = new_bitset(n)
                self.exact_keys += n * len(self.builders[i])
            else:
                maybe = masks[i]
                if maybe.n > n:
                    maybe = maybe[:n]
                known = ~maybe
                self.exact_keys += km_count(maybe.words, maybe.n) * len(self.builders[i])
            if items is not None:
                self.mark_held(&coord.groups[i], coord.stride(i), items[i], maybe, known)
            self.maybe.append(maybe)
            self.known.append(known)
        # A set of several groups is searched on the and of their bits.
        self.set_maybe = coord.joint_presence(tuple(self.maybe))
        self.set_known = coord.joint_presence(tuple(self.known))
        for known in self.set_known:
            if km_count(known.words, known.n) < known.n:
                return
        self.staged = True  # nothing is left to ask: the search alone decides

    cdef mark_held(self, km_group *group, int64_t stride, item, Bitset maybe, Bitset known):
        """Whole blocks that the engine holds itself count as present."""
        cdef Bitset bits
        cdef int64_t tokens, i, bit
        if isinstance(item, Bitset):
            bits = <Bitset>item
            i = km_next(bits.words, 0, bits.n, True)
            while i < bits.n:
                bit = (i + 1) * stride - 1
                if bit >= maybe.n:
                    return
                km_set(maybe.words, bit)
                km_set(known.words, bit)
                i = km_next(bits.words, i + 1, bits.n, True)
            return
        tokens = as_int64(item, "held", 0, c_max_tokens)
        km_fill_held(group, tokens, stride, maybe.words, maybe.n)
        km_fill_held(group, tokens, stride, known.words, known.n)

    cdef bint cannot_gain(self, km_search *search, km_set_state *sets):
        """Not even the longest length still possible reaches past what the engine holds.

        With a drafter, partial hits or chunks one more present block can shorten a hit (vLLM
        drops once per group, and keeps the first of several tails): then nothing is given up.
        """
        if self.coord.partial or self.coord.any_eagle or self.coord.any_chunked:
            return False
        self.prepare(search, sets, True)
        return km_find_hit(search, self.limit, True) <= self.local_tokens

    cdef void prepare(self, km_search *search, km_set_state *sets, bint collect) noexcept:
        cdef int i
        cdef Bitset maybe, known
        self.coord.prepare(search, sets, collect)
        for i in range(self.coord.n_sets):
            maybe = <Bitset>self.set_maybe[i]
            known = <Bitset>self.set_known[i]
            sets[i].presence.maybe = maybe.words
            sets[i].presence.known = known.words
            sets[i].presence.nbits = maybe.n

    cdef int first_need(self, km_set_state *sets) noexcept:
        cdef int i
        for i in range(self.coord.n_sets):
            if sets[i].has_need:
                return i
        return -1

    cdef bint decide(self, km_search *search, km_set_state *sets, int *set_index,
                     km_need *need) except -1:
        """Runs the search as far as the answers allow. False: `need` of a set is open."""
        cdef CoordinatorCore coord = self.coord
        cdef int64_t hit, boundary, usable
        cdef km_presence own
        cdef Bitset maybe, known
        cdef int i, k
        cdef bint found
        self.prepare(search, sets, False)
        hit = km_find_hit(search, self.limit, True)
        if hit >= self.num_tokens:
            # The last token must be computed. A hit cut to size would not be vLLM's: search again.
            usable = km_align_down(self.num_tokens - 1, coord.unit())
            if usable <= 0:
                self.finish_empty()
                return True
            hit = km_find_hit(search, usable, True)
        if hit < 0:
            set_index[0] = self.first_need(sets)
            need[0] = sets[set_index[0]].need
            self.tail_need = False
            if self.cannot_gain(search, sets):
                self.finish_empty()
                return True
            return False
        if self.local_tokens and hit <= self.local_tokens:
            self.finish_empty()
            return True
        for i in range(coord.n_groups):
            k = coord.set_of[i]
            boundary = 0
            if k >= 0:
                maybe = <Bitset>self.maybe[i]
                known = <Bitset>self.known[i]
                own = sets[k].presence
                own.maybe = maybe.words
                own.known = known.words
                own.nbits = maybe.n
                found = km_tail_boundary(search, &sets[k], &own, hit, &boundary)
                if not found:
                    # Any boundary from here to the block's end will do: all in one call.
                    set_index[0] = k
                    need[0] = sets[k].need
                    self.tail_need = True
                    need.stop = min((need.first // own.stride + 1) * own.stride, own.nbits)
                    return False
            self.tails[i] = boundary
        # The masks first: without memory for them nothing is decided.
        self.masks = coord.group_masks(sets)
        self.hit = hit
        return True

    cdef int64_t ask(self, int set_index, int64_t first, int64_t stop, int64_t stride,
                     int64_t most, list asked) except -1:
        """Adds unknown bits of a set to the batch; returns how many."""
        cdef Bitset known = <Bitset>self.set_known[set_index]
        cdef Bitset taken = <Bitset>asked[set_index]
        cdef int64_t bit = first, added = 0
        if taken is None:
            taken = new_bitset(known.n)
            asked[set_index] = taken
        while bit < stop and added < most:
            if stride == 1:
                bit = km_next(known.words, bit, stop, False)
                if bit >= stop:
                    break
            if not km_get(known.words, bit) and not km_get(taken.words, bit):
                km_set(taken.words, bit)
                added += 1
            bit += stride
        return added

    cdef list choose(self, km_search *search, km_set_state *sets, int set_index, km_need need):
        """The next batch: what decides, and what is likely to be asked next."""
        cdef CoordinatorCore coord = self.coord
        cdef list asked = [None] * coord.n_sets
        cdef int64_t batch = self.batch
        cdef km_set_state *set_state = &sets[set_index]
        if self.tail_need:
            self.ask(set_index, need.first, need.stop, need.stride, c_max_bits, asked)
            return asked
        if set_state.group.kind == KM_FULL:
            if need.stride != set_state.presence.stride:
                # Boundaries inside one block: all that are left of them in one call.
                need.first -= need.first % set_state.presence.stride
                batch = c_max_bits
            elif self.hint:
                batch = self.hint // set_state.group.block_size + self.slack
                self.ask_boundaries(search, sets, min(self.hint, self.limit), 1, asked)
                self.hint = 0
            else:
                self.batch = min(self.batch * self.growth, c_max_bits)
            self.ask(set_index, need.first, need.stop, need.stride, batch, asked)
            return asked
        self.ask(set_index, need.first, need.stop, need.stride, c_max_bits, asked)
        if set_state.group.kind == KM_WINDOW or set_state.group.kind == KM_STATE:
            self.ask_left(search, set_state, set_index, need, asked)
        self.ask_boundaries(search, sets, self.limit, self.width, asked)
        self.width = min(self.width * 2, 1 << 20)
        return asked

    cdef ask_left(self, km_search *search, km_set_state *set_state, int set_index, km_need need,
                  list asked):
        """Adds the set's own next runs to the left, at the same distance from the alignment:
        where the search goes when this need fails."""
        cdef Bitset maybe = <Bitset>self.set_maybe[set_index]
        cdef int64_t stride = need.stride, period = 1, run = 1, i, found = 1
        cdef int64_t block = (need.stop - 1) // stride
        cdef int64_t b = set_state.group.block_size
        cdef bint live
        if stride == set_state.presence.stride and not search.partial:
            period = search.alignment // b
        if set_state.group.kind == KM_WINDOW:
            run = max(km_window_need(&set_state.group, set_state.group.eagle), <int64_t>1)
        block -= period
        while block >= 0 and found < self.width:
            live = True
            for i in range(max(block - run + 1, <int64_t>0), block + 1):
                if not km_get(maybe.words, (i + 1) * stride - 1):
                    live = False
                    break
            if live:
                found += 1
                i = max(block - run + 1, <int64_t>0)
                self.ask(set_index, (i + 1) * stride - 1, (block + 1) * stride, stride,
                         c_max_bits, asked)
            block -= period

    cdef ask_boundaries(self, km_search *search, km_set_state *sets, int64_t length, int64_t count,
                        list asked):
        """Adds the other groups' blocks at the longest length still possible, and at the next
        ones below it."""
        cdef int64_t step
        cdef int i
        for step in range(count):
            if length <= 0:
                break
            self.prepare(search, sets, True)
            length = km_find_hit(search, length, True) - self.coord.unit()
            for i in range(self.coord.n_sets):
                if sets[i].has_need and sets[i].group.kind != KM_FULL:
                    self.ask(i, sets[i].need.first, sets[i].need.stop, sets[i].need.stride,
                             c_max_bits, asked)

    def next_keys(self):
        """Keys to ask the store for, or an empty list when the hit is decided."""
        cdef km_set_state sets[64]
        cdef km_search search
        cdef km_need need
        cdef int set_index, i
        cdef list asked, keys, pending = []
        cdef Bitset bits
        cdef int64_t count, position = 0
        if self.pending_groups:
            raise PlanStateError("`feed` must be given the answers before the next keys are asked")
        if self.hit >= 0:
            return []
        # `exact` asks whatever vLLM asks, even where the hit is decided without an answer.
        if not self.staged and self.probes == 0 and self.exact_keys:
            asked = list(self.set_known)
            for i in range(len(asked)):
                asked[i] = ~<Bitset>asked[i]
        elif self.decide(&search, sets, &set_index, &need):
            return []
        else:
            asked = self.choose(&search, sets, set_index, need)
        for i in range(self.coord.n_groups):
            if self.coord.set_of[i] < 0:
                continue
            bits = <Bitset>asked[self.coord.set_of[i]]
            if bits is None:
                continue
            if self.uneven and self.coord.members[self.coord.set_of[i]] > 1:
                # What this group holds itself is not asked, though another one of its set lacks it.
                bits = bits & ~(<Bitset>self.known[i])[:bits.n]
            count = km_count(bits.words, bits.n)
            if count:
                position += count * len(<tuple>self.builders[i])
                pending.append((i, bits))
        keys = PyList_New(position)
        position = 0
        for i, bits in pending:
            count = 1
            if not self.coord.partial:
                count = self.coord.groups[i].block_size // self.coord.hash_block
            position = put_keys(keys, position, <tuple>self.builders[i], self.hashes, bits, bits.n,
                                0, count)
        pin_keys(keys)
        self.pending_groups = pending
        self.expected = position
        self.asked += position
        self.probes += 1
        return keys

    def feed(self, answers):
        """Takes the store's answers to the last batch, in its order; only 1 is present.

        An answer that is negative or no integer leaves its key unknown, and so does every answer
        of a list that has not one per key; `unknown` counts them.

        Raises:
            PlanStateError: Nothing was asked.
        """
        cdef list given
        cdef int64_t position = 0, bit, unusual = 0
        cdef Py_ssize_t namespaces, j
        cdef int group
        cdef bint present
        cdef Bitset bits, maybe, known
        cdef PyObject *answer
        cdef list pending
        pending = self.pending_groups
        if not pending:
            raise PlanStateError("`feed` must follow a batch of keys, got answers to none")
        given = read_answers(answers, self.expected)
        if self.pending_groups is not pending:  # an iterator's own code, or another thread
            raise PlanStateError("`feed` must be given the answers once, got them while it read")
        self.pending_groups = []
        for group, bits in pending:
            namespaces = len(<tuple>self.builders[group])
            maybe = <Bitset>self.maybe[group]
            known = <Bitset>self.known[group]
            bit = km_next(bits.words, 0, bits.n, True)
            while bit < bits.n:
                present = True
                for j in range(namespaces):
                    answer = PyList_GET_ITEM(given, position)
                    position += 1
                    if answer is not <PyObject *>_ONE:  # plain ints: there is one 1
                        present = False
                        unusual += answer is not <PyObject *>_ZERO
                    else:
                        self.present += 1
                km_set(known.words, bit)
                if not present:
                    km_clear(maybe.words, bit)
                bit = km_next(bits.words, bit + 1, bits.n, True)
        if unusual:
            self.count_unknown(given)
        self.join_sets()

    cdef count_unknown(self, list given):
        """Counts the answers that say neither present nor absent."""
        for answer in given:
            if answer < 0:
                self.unknown += 1
                self.malformed += answer == MALFORMED_ANSWER

    cdef join_sets(self):
        # Sets of one group share its bitsets (joint_presence returns them as they are).
        cdef CoordinatorCore coord = self.coord
        cdef int i
        for i in range(coord.n_sets):
            if coord.members[i] > 1:
                self.set_maybe = coord.joint_presence(tuple(self.maybe))
                self.set_known = coord.joint_presence(tuple(self.known))
                return

    def result(self):
        """(length, masks, tail_tokens), or None while answers are missing."""
        cdef km_set_state sets[64]
        cdef km_search search
        cdef km_need need
        cdef int set_index, i
        cdef list masks
        if self.pending_groups:
            return None
        if self.hit < 0 and (
            (not self.staged and self.probes == 0 and self.exact_keys)
            or not self.decide(&search, sets, &set_index, &need)
        ):
            return None
        if self.no_masks:
            masks = []
            for i in range(self.coord.n_groups):
                masks.append(new_bitset(0))
            return 0, tuple(masks), (0,) * self.coord.n_groups
        return self.hit, self.masks, tuple(self.tails)

    def fields(self):
        """What there is to say of the lookup, as fields of a Hit."""
        return {
            "asked": self.asked,
            "probes": self.probes,
            "present": self.present,
            "exact_keys": self.exact_keys,
            "unknown": self.unknown,
        }


@cython.auto_pickle(False)
cdef class LookupSums:
    """Sums over lookups, named as in kvmask.plans.metrics.COUNTERS.

    No lock is needed: no other thread runs between the first and the last sum of `add` or `totals`.
    """

    def add(self, hit, bint failed):
        """Count a lookup.

        Args:
            hit: What it found.
            failed: Whether it ended because the store did not answer.
        """
        cdef int64_t asked = hit.asked, present = hit.present, exact = hit.exact_keys
        cdef int64_t probes = hit.probes, length = hit.length, unknown = hit.unknown
        cdef double inside = hit.store_seconds, outside = hit.other_seconds
        self.lookups += 1
        self.asked_keys += asked
        self.present_keys += present
        self.exact_keys += exact
        self.probes += probes
        self.hit_tokens += length
        self.unknown_keys += unknown
        self.failed_lookups += failed
        self.lookup_store_seconds += inside
        self.lookup_other_seconds += outside

    def totals(self):
        """All sums at one moment, by name."""
        # Read before anything is allocated: a collection lets other threads run.
        cdef int64_t lookups = self.lookups, asked = self.asked_keys, present = self.present_keys
        cdef int64_t exact = self.exact_keys, probes = self.probes, tokens = self.hit_tokens
        cdef int64_t unknown = self.unknown_keys, failed = self.failed_lookups
        cdef double inside = self.lookup_store_seconds, outside = self.lookup_other_seconds
        return {
            "lookups": lookups,
            "asked_keys": asked,
            "present_keys": present,
            "exact_keys": exact,
            "probes": probes,
            "hit_tokens": tokens,
            "unknown_keys": unknown,
            "failed_lookups": failed,
            "lookup_store_seconds": inside,
            "lookup_other_seconds": outside,
        }
