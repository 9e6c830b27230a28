# What lookups rest on: the store's answers, and what an engine holds itself.

cdef object _ONE = 1
cdef object _ZERO = 0
# Stands for an answer that does not fit the call.
MALFORMED_ANSWER = -10_001


cpdef list read_answers(answers, Py_ssize_t expected):
    """The store's answers as a new list of plain ints, one per key.

    Nothing about a malformed answer is believed: when there are more or fewer than keys, or they
    cannot be read to the end, every key is answered with ``MALFORMED_ANSWER``; one that is no
    integer is answered so by itself.

    Args:
        answers: Iterable of integers (NumPy's and bools too).
        expected: How many there must be.
    """
    cdef list given
    cdef Py_ssize_t i
    if type(answers) is list:
        given = list(answers)  # without memory for it nothing is answered yet
    else:
        try:
            given = list(answers)
        except Exception:
            return [MALFORMED_ANSWER] * expected
    if len(given) != expected:
        return [MALFORMED_ANSWER] * expected
    for i in range(len(given)):
        item = given[i]
        if PyLong_CheckExact(item):
            continue
        if isinstance(item, _numbers.Integral):
            try:
                given[i] = int.__add__(_operator.index(item), 0)
                continue
            except Exception:
                pass
        given[i] = MALFORMED_ANSWER
    return given


def held_blocks(kind, block_size, span, item, n):
    """The blocks that an engine holds of a group, as n bits.

    Args:
        kind: Name of the kind of the group.
        block_size: Tokens per block.
        span: Tokens of the window or of an attention chunk.
        item: The length in tokens of the engine's own prefix hit, or a Bitset over the blocks.
        n: Blocks.

    >>> held_blocks("window", 16, 33, 64, 6)
    Bitset(6, '2-3')
    """
    cdef km_group group
    cdef int64_t blocks = as_int64(n, "n", 0, c_max_bits)
    cdef Bitset bits = new_bitset(blocks), given
    if isinstance(item, Bitset):
        given = <Bitset>item
        memcpy(bits.words, given.words, km_words(min(given.n, blocks)) * sizeof(uint64_t))
        if given.n > blocks:
            km_fill(bits.words, blocks, km_words(blocks) * 64, False)
        return bits
    memset(&group, 0, sizeof(group))
    group.kind = <km_kind>as_kind(kind)
    group.block_size = as_int64(block_size, "block_size", 1, c_max_tokens)
    group.span = as_int64(span, "span", 0 if kind in ("full", "state") else 1, c_max_tokens)
    km_fill_held(&group, as_int64(item, "held", 0, c_max_tokens), 1, bits.words, blocks)
    return bits
