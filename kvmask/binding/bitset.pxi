# Bitset: a read-only sequence of bool over uint64 words. See csrc/bits.h for the invariants.

# 2**32 tokens with one-token blocks; one mask is then 512 MiB.
MAX_BITS = 1 << 32
# Below this many bits a fill takes less time than giving the GIL away and back (about 0.1 us).
GIL_MIN_BITS = 1 << 16
cdef int64_t c_max_bits = MAX_BITS
cdef int64_t c_gil_min_bits = GIL_MIN_BITS

cdef Py_ssize_t word_stride = sizeof(uint64_t)
cdef char *word_format = "Q"
# What a bitset of no bits points to until it is given words of its own.
cdef uint64_t no_words[1]
no_words[0] = 0


cdef Bitset new_bitset(int64_t n, bint zeros=True):
    """A bitset that the caller fills before anyone else sees it: n zeros, or without `zeros` any
    bits but for the last word, which is zero."""
    cdef Bitset self
    if n < 0 or n > c_max_bits:
        raise ArgumentError(f"`n` must be from 0 to {MAX_BITS}, got {n}")
    cdef size_t count = km_words(n) or 1
    cdef uint64_t *words
    self = Bitset.__new__(Bitset)
    if zeros:
        words = <uint64_t *>calloc(count, sizeof(uint64_t))
    else:
        words = <uint64_t *>malloc(count * sizeof(uint64_t))
    if words == NULL:
        raise MemoryError(f"no memory for a bitset of {n} bits")
    words[count - 1] = 0
    self.words = words
    self.n = n
    self.shape[0] = km_words(n)
    return self


cdef Bitset ones_bitset(int64_t n):
    cdef Bitset self = new_bitset(n, False)
    km_fill(self.words, 0, n, True)
    return self


cdef Bitset run_bitset(int64_t n, int64_t first):
    """n bits, those from `first` on set."""
    cdef Bitset self = new_bitset(n)
    km_fill(self.words, first, n, True)
    return self


cdef bint as_bool(object item, Py_ssize_t i) except -1:
    if item is True:
        return 1
    if item is False:
        return 0
    if PyLong_CheckExact(item):
        if item == 0 or item == 1:
            return item == 1
    # numpy.bool_ is no number and has no __index__.
    elif type(item).__name__ in ("bool", "bool_") and hasattr(item, "dtype"):
        return 1 if item else 0
    elif isinstance(item, _numbers.Integral) and (item == 0 or item == 1):
        return 1 if item else 0
    raise ArgumentError(f"`bools` must hold only True and False, got {shown(item)} at index {i}")


cdef class Bitset:
    """A read-only sequence of bool, kept as bits.

    Compares equal to any sequence of the same bools. The buffer protocol gives its uint64 words
    (bit ``i`` is bit ``i % 64`` of word ``i // 64``; bits past the end are zero).

    Args:
        bools: The bits, as an iterable of bool.

    Raises:
        ArgumentError: An item is no bool, or there are more than ``MAX_BITS``.

    >>> Bitset([False, False, True, True])
    Bitset(4, '2-3')
    """

    def __cinit__(self):
        self.words = no_words
        self.n = 0

    def __init__(self, bools=()):
        cdef Bitset made = Bitset.from_bools(bools)
        cdef size_t size = (km_words(made.n) or 1) * sizeof(uint64_t)
        cdef uint64_t *words
        if self.words != no_words:
            raise TypeError("a bitset is read-only and cannot be made anew")
        words = <uint64_t *>malloc(size)
        if words == NULL:
            raise MemoryError(f"no memory for a bitset of {made.n} bits")
        memcpy(words, made.words, size)
        self.words = words
        self.n = made.n
        self.shape[0] = km_words(made.n)

    def __dealloc__(self):
        if self.words != no_words:
            free(self.words)

    @classmethod
    def from_bools(cls, bools):
        """Pack an iterable of bool.

        Args:
            bools: True and False (also 0 and 1, and NumPy bools).

        Returns:
            Bitset of the same length.

        >>> Bitset.from_bools([True, False]).tolist()
        [True, False]
        """
        cdef list items
        cdef Bitset self
        cdef Py_ssize_t i
        if isinstance(bools, Bitset):
            return bools
        items = list(bools)
        self = new_bitset(len(items))
        for i in range(len(items)):
            if as_bool(items[i], i):
                km_set(self.words, i)
        return self

    @classmethod
    def from_indices(cls, n, indices):
        """A bitset of n bits with the given ones set.

        Args:
            n: Length in bits.
            indices: Positions to set, each from 0 to n - 1.

        Raises:
            ArgumentError: A position lies outside.

        >>> Bitset.from_indices(8, [0, 5])
        Bitset(8, '0,5')
        """
        cdef Bitset self = new_bitset(as_int64(n, "n", 0, c_max_bits))
        if self.n == 0:
            for i in indices:
                raise ArgumentError(f"`indices` must be empty for `n` 0, got {shown(i)}")
            return self
        for i in indices:
            km_set(self.words, as_int64(i, "indices", 0, self.n - 1))
        return self

    @classmethod
    def ones(cls, n):
        """A bitset of n ones.

        Args:
            n: Length in bits.

        >>> Bitset.ones(3)
        Bitset(3, '0-2')
        """
        return ones_bitset(as_int64(n, "n", 0, c_max_bits))

    @classmethod
    def zeros(cls, n):
        """A bitset of n zeros.

        Args:
            n: Length in bits.

        >>> Bitset.zeros(3)
        Bitset(3, '')
        """
        return new_bitset(as_int64(n, "n", 0, c_max_bits))

    @classmethod
    def from_words(cls, n, words):
        """A bitset of n bits from the bytes of its uint64 words (native order).

        Args:
            n: Length in bits.
            words: Buffer of exactly ``ceil(n / 64)`` words.

        Raises:
            ArgumentError: The buffer has another length, or a bit past the end is set.
        """
        cdef Bitset self = new_bitset(as_int64(n, "n", 0, c_max_bits))
        cdef bytes raw = bytes(memoryview(words).cast("B"))
        cdef Py_ssize_t size = km_words(self.n) * sizeof(uint64_t)
        if len(raw) != size:
            raise ArgumentError(f"`words` must hold {size} bytes for `n` {n}, got {len(raw)}")
        memcpy(self.words, <const char *>raw, size)
        if not km_clean(self.words, self.n):
            raise ArgumentError(f"`words` must have no bit set past `n`, got {n} bits")
        return self

    def __reduce__(self):
        return Bitset.from_words, (self.n, bytes(self))

    def __len__(self):
        return self.n

    def __bool__(self):
        return self.n > 0

    def __getitem__(self, key):
        cdef Py_ssize_t start, stop, step, length, i
        cdef Bitset out
        if isinstance(key, slice):
            start, stop, step = key.indices(self.n)
            length = len(range(start, stop, step))
            out = new_bitset(length)
            if step == 1:
                self.copy_range(out, start)
            else:
                for i in range(length):
                    if km_get(self.words, start + i * step):
                        km_set(out.words, i)
            return out
        try:
            i = key.__index__()
        except AttributeError:
            raise TypeError(
                f"a bitset index must be an integer or a slice, got {type(key).__name__}"
            ) from None
        except OverflowError:
            i = self.n
        if i < 0:
            i += self.n
        if not 0 <= i < self.n:
            raise IndexError(f"bitset index {shown(key)} out of range for {self.n} bits")
        return bool(km_get(self.words, i))

    cdef void copy_range(self, Bitset out, int64_t start) noexcept:
        # Equivalent to: out[:] = self[start : start + out.n]; out is zero.
        cdef int64_t i, shift = start & 63, base = start >> 6, last = km_words(self.n) - 1
        cdef uint64_t word
        for i in range(km_words(out.n)):
            word = self.words[base + i] >> shift
            if shift and base + i < last:
                word |= self.words[base + i + 1] << (64 - shift)
            out.words[i] = word
        if out.n & 63:
            out.words[out.n >> 6] &= km_low_mask(out.n & 63)

    def __iter__(self):
        cdef int64_t i
        for i in range(self.n):
            yield bool(km_get(self.words, i))

    def __richcmp__(self, other, int op):
        cdef Bitset b
        cdef int64_t i
        cdef bint same
        if op != Py_EQ and op != Py_NE:
            return NotImplemented
        if isinstance(other, Bitset):
            b = <Bitset>other
            same = self.n == b.n and memcmp(self.words, b.words, self.shape[0] * 8) == 0
            return same == (op == Py_EQ)
        if not is_sequence(other) and not hasattr(other, "__array_interface__"):
            return NotImplemented
        try:
            same = len(other) == self.n
            if same:
                for i in range(self.n):
                    if bool(km_get(self.words, i)) != other[i]:
                        same = False
                        break
        except (TypeError, ValueError):  # no dimension, or rows that have no truth value
            return NotImplemented
        return same == (op == Py_EQ)

    __hash__ = None

    def __contains__(self, value):
        return self.count(value) > 0

    def __reversed__(self):
        return iter(self[::-1])

    def count(self, value=True):
        """How many bits are set (or, with ``value=False``, clear).

        Args:
            value: True, False, or what equals one of them; anything else is counted 0 times.

        >>> Bitset.from_indices(70, [0, 64, 69]).count()
        3
        """
        cdef int64_t ones = km_count(self.words, self.n)
        if value == True:  # noqa: E712 (1 counts as True, as in a list of bools)
            return ones
        if value == False:  # noqa: E712
            return self.n - ones
        return 0

    def index(self, value, start=0, stop=None):
        """Position of the first bit equal to value, as ``list.index``.

        Args:
            value: True or False.
            start: The first position that counts.
            stop: The position after the last one; None: to the end.

        Raises:
            ValueError: No bit is equal to it.
        """
        cdef Py_ssize_t low, high, step
        cdef int64_t found
        low, high, step = slice(start, stop).indices(self.n)
        if value == True or value == False:  # noqa: E712
            found = km_next(self.words, low, high, bool(value))
            if found < high:
                return found
        raise ValueError(f"{shown(value)} is not in the bitset")

    def indices(self):
        """Positions of the set bits, ascending, as a list of int.

        >>> Bitset.from_indices(8, [5, 0]).indices()
        [0, 5]
        """
        cdef list out = []
        cdef int64_t i = km_next(self.words, 0, self.n, True)
        while i < self.n:
            out.append(i)
            i = km_next(self.words, i + 1, self.n, True)
        return out

    def runs(self):
        """Maximal runs of ones as a list of (start, stop).

        >>> Bitset([True, True, False, True]).runs()
        [(0, 2), (3, 4)]
        """
        cdef list out = []
        cdef int64_t start = km_next(self.words, 0, self.n, True), stop
        while start < self.n:
            stop = km_next(self.words, start, self.n, False)
            out.append((start, stop))
            start = km_next(self.words, stop, self.n, True)
        return out

    def tolist(self):
        """The bits as a list of bool."""
        cdef list out = [False] * self.n
        cdef int64_t i = km_next(self.words, 0, self.n, True)
        while i < self.n:
            out[i] = True
            i = km_next(self.words, i + 1, self.n, True)
        return out

    cdef Bitset combined(self, other, bint both):
        cdef Bitset b, out
        cdef int64_t i
        b = <Bitset>other
        if self.n != b.n:
            raise ArgumentError(f"bitsets must have equal lengths, got {self.n} and {b.n}")
        out = new_bitset(self.n)
        for i in range(self.shape[0]):
            out.words[i] = self.words[i] & b.words[i] if both else self.words[i] | b.words[i]
        return out

    def __and__(self, other):
        if not isinstance(self, Bitset) or not isinstance(other, Bitset):
            return NotImplemented
        return (<Bitset>self).combined(other, True)

    def __or__(self, other):
        if not isinstance(self, Bitset) or not isinstance(other, Bitset):
            return NotImplemented
        return (<Bitset>self).combined(other, False)

    def __invert__(self):
        cdef Bitset out = new_bitset(self.n, False)
        cdef int64_t i
        for i in range(self.shape[0]):
            out.words[i] = ~self.words[i]
        if self.n & 63:
            out.words[self.n >> 6] &= km_low_mask(self.n & 63)
        return out

    def __repr__(self):
        cdef list runs = self.runs(), parts = []
        for start, stop in runs[:16]:
            parts.append(f"{start}" if stop == start + 1 else f"{start}-{stop - 1}")
        if len(runs) > 16:
            parts.append(f"... {len(runs) - 16} more")
        return f"Bitset({self.n}, '{','.join(parts)}')"

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        if flags & PyBUF_WRITABLE:
            raise BufferError("a bitset is read-only")
        self.exports += 1
        buffer.buf = self.words
        buffer.obj = self
        buffer.len = self.shape[0] * sizeof(uint64_t)
        buffer.readonly = 1
        buffer.itemsize = sizeof(uint64_t)
        buffer.format = NULL
        if flags & PyBUF_FORMAT:
            buffer.format = word_format
        buffer.ndim = 1
        buffer.shape = NULL
        if flags & PyBUF_ND:
            buffer.shape = self.shape
        buffer.strides = NULL
        if flags & PyBUF_STRIDES == PyBUF_STRIDES:
            buffer.strides = &word_stride
        buffer.suboffsets = NULL
        buffer.internal = NULL

    def __releasebuffer__(self, Py_buffer *buffer):
        self.exports -= 1


_Sequence.register(Bitset)
