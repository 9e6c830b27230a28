# The store's answers about blocks, digests and ids that stand twice, and the cutting of calls.


def pick_missing(list keys not None, list answers not None, start, stop):
    """Keys in ``[start, stop)`` that the store does not answer with 1.

    Args:
        keys: All keys that were asked.
        answers: What `read_answers` made of the store's answers to all keys.
        start: First key.
        stop: End.

    Returns:
        (keys, positions counted from start); None for the positions when all keys are missing.
    """
    cdef Py_ssize_t i
    cdef Py_ssize_t first = as_int64(start, "start", 0, len(keys))
    cdef Py_ssize_t end = as_int64(stop, "stop", first, len(keys))
    cdef list given = answers
    cdef list missing = [], positions = []
    if len(keys) != len(given):
        raise ArgumentError(
            f"`answers` must hold one answer per key, got {len(given)} and {len(keys)}"
        )
    for i in range(first, end):
        if given[i] is _ONE:
            break
    else:
        return keys[first:end], None
    for i in range(first, end):
        if given[i] is not _ONE:
            missing.append(keys[i])
            positions.append(i - first)
    return missing, positions


def all_answered(answers, n, value):
    """Whether a list holds ``n`` answers and all of them are 0, or all are 1.

    False only says that somebody must look at them one by one.

    Args:
        answers: The store's answers.
        n: How many there must be.
        value: 0 or 1.
    """
    cdef PyObject *wanted = <PyObject *>(_ONE if value else _ZERO)
    cdef Py_ssize_t i, total = as_int64(n, "n", 0, c_max_bits)
    cdef list given
    if type(answers) is not list:
        return False
    given = answers
    if PyList_GET_SIZE(given) != total:
        return False
    for i in range(total):
        if PyList_GET_ITEM(given, i) is not wanted:  # plain ints: there is one of each
            return False
    return True


def all_as_planned(answers, list planned not None):
    """Whether a list holds the planned numbers of bytes, in their order; see all_answered.

    Numbers of one group are one object, so each is read once where it changes.
    """
    cdef Py_ssize_t i, n = PyList_GET_SIZE(planned)
    cdef PyObject *answer
    cdef PyObject *num_bytes
    cdef PyObject *last = NULL
    cdef int overflow = 0
    cdef long long wanted = 0
    cdef list given
    if type(answers) is not list:
        return False
    given = answers
    if PyList_GET_SIZE(given) != n:
        return False
    for i in range(n):
        answer = PyList_GET_ITEM(given, i)
        num_bytes = PyList_GET_ITEM(planned, i)
        if answer is num_bytes:
            continue
        if num_bytes is not last:
            last = num_bytes
            wanted = PyLong_AsLongLongAndOverflow(<object>num_bytes, &overflow)
        if overflow or not PyLong_CheckExact(<object>answer):
            return False
        if PyLong_AsLongLongAndOverflow(<object>answer, &overflow) != wanted or overflow:
            return False
    return True


def digests_differ(BlockHashes hashes not None, Bitset planned not None, start, scale):
    """Whether the digests of some blocks all differ, as far as their first eight bytes tell.

    False says that two may be equal.

    Args:
        hashes: Digests.
        planned: The blocks, from ``start`` on.
        start: First block.
        scale: Hash blocks per block.
    """
    cdef int64_t first = as_int64(start, "start", 0, c_max_bits)
    cdef int64_t per_block = as_int64(scale, "scale", 1, c_max_bits)
    cdef int64_t n = min(planned.n, hashes.n // per_block - first), i = -1
    cdef uint64_t count = km_count(planned.words, planned.n), mask = 15, slot, tag = 0
    cdef Py_ssize_t size = hashes.size
    cdef const unsigned char *data
    cdef uint64_t *slots
    cdef bint differ = True
    while mask < 2 * count:
        mask = 2 * mask + 1
    slots = <uint64_t *>calloc(mask + 1, sizeof(uint64_t))
    if slots == NULL:
        raise MemoryError
    try:
        while differ:
            i = km_next(planned.words, i + 1, n, True)
            if i >= n:
                break
            data = hashes.at((first + i + 1) * per_block - 1, &size)
            if size < 8:
                return False
            memcpy(&tag, data, 8)
            # Spread, as digests that count up are not by themselves.
            slot = (tag * <uint64_t>0x9E3779B97F4A7C15) >> 20 & mask
            while slots[slot] and slots[slot] != tag:
                slot = slot + 1 & mask
            differ = tag != 0 and slots[slot] != tag
            slots[slot] = tag
        return differ
    finally:
        free(slots)


cdef Py_ssize_t first_repeated(list ids) except -2:
    """Position of the first block id that stands at an earlier position too, or -1.

    Args:
        ids: Plain ints; those that do not fit 64 bits are left to the layout to refuse.
    """
    cdef Py_ssize_t n = PyList_GET_SIZE(ids), i = 0
    cdef uint64_t slot, mask = 15
    cdef long long value = -1, before
    cdef int overflow = 0
    cdef int64_t *slots
    # Ids that ascend, as those of a young pool do, cannot repeat.
    while i < n:
        before = value
        value = PyLong_AsLongLongAndOverflow(<object>PyList_GET_ITEM(ids, i), &overflow)
        if overflow or value <= before:
            break
        i += 1
    else:
        return -1
    while mask < 2 * <uint64_t>n:
        mask = 2 * mask + 1
    # Position of the id plus one, by a hash of the id; 0 is empty.
    slots = <int64_t *>calloc(mask + 1, sizeof(int64_t))
    if slots == NULL:
        raise MemoryError
    try:
        for i in range(n):
            value = PyLong_AsLongLongAndOverflow(<object>PyList_GET_ITEM(ids, i), &overflow)
            if overflow:
                continue
            slot = (<uint64_t>value * 0x9E3779B97F4A7C15ULL) >> 32 & mask
            while slots[slot]:
                if PyLong_AsLongLongAndOverflow(
                    <object>PyList_GET_ITEM(ids, slots[slot] - 1), &overflow
                ) == value:
                    return i
                slot = (slot + 1) & mask
            slots[slot] = i + 1
    finally:
        free(slots)
    return -1


def row_pieces(list rows not None, slice_bytes):
    """Transport pieces of every row of sizes; rows may be one shared list.

    Args:
        rows: Per key a list of sizes in bytes.
        slice_bytes: Largest piece.
    """
    cdef int64_t piece = as_int64(slice_bytes, "slice_bytes", 1, c_max_bits)
    cdef list pieces = []
    cdef int64_t size, count = 0
    last = None
    for row in rows:
        if row is not last:
            last = row
            count = 0
            for item in <list?>row:
                size = item
                count += km_ceil_div(size, piece)
        pieces.append(count)
    return pieces


@cython.boundscheck(True)
def cut_calls(list needs not None, usable, whole, list pieces not None, max_pieces):
    """Cuts keys into calls; see kvmask.mooncake.policy.split_calls.

    Args:
        needs: Per key what it takes of the budget.
        usable: Budget of one call with several keys.
        whole: Budget of one call.
        pieces: Per key its pieces.
        max_pieces: Pieces per call.

    Returns:
        (calls as (start, stop), keys above the whole budget).
    """
    cdef double low = usable, high = whole, used = 0, need
    cdef double most = max_pieces, count = 0, parts
    cdef Py_ssize_t i, start = 0, n = len(needs)
    cdef list calls = [], oversize = []
    if len(pieces) != n:
        raise ArgumentError(f"`pieces` must hold one number per key, got {len(pieces)} and {n}")
    for i in range(n):
        need = needs[i]
        parts = pieces[i]
        if used + need > low or count + parts > most:
            if i > start:
                calls.append((start, i))
            start = i
            used = count = 0
        if need > high:
            oversize.append(i)
            start = i + 1
            used = count = 0
            continue
        used += need
        count += parts
    if n > start:
        calls.append((start, n))
    return calls, oversize
