# What the vLLM adapter asks of Python containers: digests in a set, answers that are not 1.

from cpython.set cimport PySet_Contains


def present_bits(hashes, exists, group, scale, n):
    """Which blocks of a group a set of (group, digest) holds.

    Equivalent to: [(group, hashes[(i + 1) * scale - 1]) in exists for i in range(n)]

    Args:
        hashes: BlockHashes or sequence of bytes.
        exists: Set of (group id, digest as bytes); None holds everything.
        group: Group id.
        scale: Hash blocks per block.
        n: Blocks; those without a digest are absent.

    Returns:
        Bitset of n bits.
    """
    cdef BlockHashes digests = as_hashes(hashes)
    cdef int64_t per_block = as_int64(scale, "scale", 1, c_max_bits)
    cdef int64_t blocks = as_int64(n, "n", 0, c_max_bits)
    cdef Bitset bits = new_bitset(blocks)
    cdef Py_ssize_t size
    cdef const unsigned char *data
    cdef int64_t i
    if blocks > digests.n // per_block:
        blocks = digests.n // per_block
    if exists is None:
        km_fill(bits.words, 0, blocks, True)
        return bits
    for i in range(blocks):
        data = digests.at((i + 1) * per_block - 1, &size)
        if PySet_Contains(exists, (group, PyBytes_FromStringAndSize(<const char *>data, size))):
            km_set(bits.words, i)
    return bits


def missing_positions(answers, n):
    """Positions below n whose answer is not 1, or None when that is all of them.

    A list of answers that ends early leaves the rest unknown, which is not present.
    """
    cdef list given = answers if type(answers) is list else list(answers)
    cdef Py_ssize_t total = as_int64(n, "n", 0, c_max_bits)
    cdef Py_ssize_t known = min(total, PyList_GET_SIZE(given)), i
    cdef list missing = []
    cdef PyObject *answer
    for i in range(known):
        answer = PyList_GET_ITEM(given, i)
        if answer is not <PyObject *>_ONE and <object>answer != 1:
            missing.append(i)
    missing.extend(range(known, total))
    return None if len(missing) == total else missing
