# BlockHashes: one chained digest per hash block, over a flat buffer, a list of bytes or a list of
# hexadecimal text.

MAX_DIGEST_BYTES = 4096
cdef Py_ssize_t c_max_digest_bytes = MAX_DIGEST_BYTES


cdef object as_origin(object origin):
    """None or a DigestOrigin, known by its fields: its module is above this one."""
    if origin is None:
        return None
    fields = getattr(origin, "_fields", None) if isinstance(origin, tuple) else None
    if fields != ("block_size", "algorithm", "start"):
        raise TypeError(f"`origin` must be a DigestOrigin, got {type(origin).__name__}")
    return origin


cdef bint is_digest(object item) noexcept:
    return type(item) is bytes and 0 < PyBytes_GET_SIZE(item) <= c_max_digest_bytes


cdef bytes as_digest(object item, Py_ssize_t i):
    try:
        digest = bytes(memoryview(item))
    except TypeError:
        raise HashInputError(
            f"`digests` must hold bytes-like objects, got {type(item).__name__} at index {i}"
        ) from None
    if not is_digest(digest):
        raise HashInputError(
            f"a digest must have from 1 to {MAX_DIGEST_BYTES} bytes, got {len(digest)} at index {i}"
        )
    return digest


cdef class BlockHashes:
    """Read-only sequence of block digests, without copying them.

    Digest ``i`` names the prefix that ends with hash block ``i``.

    Args:
        buffer: Any contiguous buffer of ``n * digest_size`` bytes. It is kept, not copied: the
            owner must not change it while the hashes are in use.
        digest_size: Bytes per digest, from 1 to ``MAX_DIGEST_BYTES``.
        origin: A `kvmask.hashing.DigestOrigin` that says how the digests were made; None when that
            is not known.

    Attributes:
        n: Number of digests.
        origin: As it was given. `kvmask.hash_tokens` sets it; copies and pickles keep it.

    Raises:
        ArgumentError: The buffer's length is no multiple of ``digest_size``.

    >>> h = BlockHashes(bytes(range(8)), 4)
    >>> len(h), h[1].hex()
    (2, '04050607')
    """

    def __cinit__(self, buffer=None, digest_size=0, *, origin=None):
        cdef Py_ssize_t size
        self.data = NULL
        self.origin = as_origin(origin)
        if buffer is None:
            return
        size = as_int64(digest_size, "digest_size", 1, MAX_DIGEST_BYTES)
        PyObject_GetBuffer(buffer, &self.view, PyBUF_SIMPLE)
        self.has_view = True
        if self.view.len % size:
            raise AlignmentError(
                "the length of `buffer` must be a multiple of `digest_size`, "
                f"got {self.view.len} and {size}"
            )
        self.data = <const unsigned char *>self.view.buf
        self.size = size
        self.n = self.view.len // size

    def __init__(self, buffer, digest_size, *, origin=None):
        if buffer is None:
            raise TypeError("`buffer` must support the buffer protocol, got None")

    def __dealloc__(self):
        free(self.decoded)
        if self.has_view:
            PyBuffer_Release(&self.view)

    @classmethod
    def from_list(cls, digests, *, origin=None):
        """A view over a list of digests, which may have unequal lengths.

        A list of bytes is kept, not copied: digests appended later are not seen, and none may be
        removed or replaced while the view is in use. Its items are checked when they are used.

        Args:
            digests: Sequence of bytes; when the first or last item is another buffer, all are
                copied. BlockHashes are taken as they are.
            origin: As for the class.

        Raises:
            ArgumentError: The digests are BlockHashes of another origin.
            HashInputError: An item is no buffer or is empty.

        >>> BlockHashes.from_list([b"ab", b"c"])[1]
        b'c'
        """
        cdef BlockHashes self
        cdef list items
        cdef Py_ssize_t i
        if isinstance(digests, BlockHashes):
            return (<BlockHashes>digests).with_origin(as_origin(origin))
        items = digests if type(digests) is list else list(digests)
        # A list of bytes is taken as it is, and every item checked when it is used: a long prompt
        # has tens of thousands, of which a lookup uses a few hundred.
        if items and not (is_digest(items[0]) and is_digest(items[len(items) - 1])):
            given, items = items, []
            for item in given:
                items.append(as_digest(item, len(items)))
        self = BlockHashes.__new__(BlockHashes, origin=origin)
        self.items = items
        self.n = len(items)
        return self

    @classmethod
    def from_hex(cls, texts, *, origin=None):
        """A view over a list of digests written in lower-case hexadecimal.

        The list is kept as `from_list` keeps one of bytes: a digest is decoded when it is used.

        Args:
            texts: List of str.
            origin: As for the class.

        Raises:
            TypeError: It is no list.

        >>> BlockHashes.from_hex(["6162", "63"])[1]
        b'c'
        """
        cdef BlockHashes self
        if type(texts) is not list:
            raise TypeError(f"`texts` must be a list, got {type(texts).__name__}")
        self = BlockHashes.__new__(BlockHashes, origin=origin)
        self.decoded = <unsigned char *>malloc(c_max_digest_bytes)
        if self.decoded == NULL:
            raise MemoryError("no memory for a digest")
        self.items = texts
        self.n = len(texts)
        return self

    cdef const unsigned char *decode(self, object text, Py_ssize_t i, Py_ssize_t most,
                                     Py_ssize_t *size) except NULL:
        """At most so many bytes of a digest from its text. They stand until the next call."""
        cdef Py_ssize_t length
        if type(text) is not str:
            raise HashInputError(
                "`texts` must hold str and not change while it is in use, "
                f"got {type(text).__name__} at index {i}"
            )
        length = len(<str>text)
        if not 0 < length <= 2 * c_max_digest_bytes or length % 2:
            raise HashInputError(
                f"a digest must have from 2 to {2 * MAX_DIGEST_BYTES} hexadecimal digits, two for "
                f"each byte, got {length} at index {i}"
            )
        if not (<str>text).isascii() or not km_unhex(
            <const unsigned char *>PyUnicode_1BYTE_DATA(text), min(length // 2, most), self.decoded
        ):
            raise HashInputError(
                f"a digest must be lower-case hexadecimal, got {text[:80]!r} at index {i}"
            )
        size[0] = min(length // 2, most)
        return self.decoded

    cdef BlockHashes with_origin(self, object origin):
        cdef BlockHashes out
        if origin is None or origin == self.origin:
            return self
        if self.origin is not None:
            raise ArgumentError(
                f"`origin` must be that of the digests, got {origin!r} and {self.origin!r}"
            )
        if self.items is None:
            return BlockHashes(<object>self.view.obj, self.size, origin=origin)
        if self.decoded != NULL:
            return BlockHashes.from_hex(self.items, origin=origin)
        out = BlockHashes.__new__(BlockHashes, origin=origin)
        out.items = self.items
        out.n = self.n
        return out

    cdef const unsigned char *at(self, Py_ssize_t i, Py_ssize_t *size) except NULL:
        return self.start_of(i, c_max_digest_bytes, size)

    cdef const unsigned char *start_of(self, Py_ssize_t i, Py_ssize_t most,
                                       Py_ssize_t *size) except NULL:
        """A digest, of which text need only be decoded so far."""
        cdef PyObject *item
        if self.items is None:
            size[0] = self.size
            return self.data + i * self.size
        if i >= PyList_GET_SIZE(self.items):
            raise HashInputError(
                f"the list of digests must not shrink while it is in use, "
                f"got {len(self.items)} of {self.n}"
            )
        item = PyList_GET_ITEM(self.items, i)
        if self.decoded != NULL:
            return self.decode(<object>item, i, most, size)
        if not PyBytes_Check(<object>item):
            raise HashInputError(
                "`digests` must hold bytes and not change while it is in use, "
                f"got {type(<object>item).__name__} at index {i}"
            )
        size[0] = PyBytes_GET_SIZE(<object>item)
        if not 0 < size[0] <= c_max_digest_bytes:
            raise HashInputError(
                f"a digest must have from 1 to {MAX_DIGEST_BYTES} bytes, got {size[0]} at index {i}"
            )
        return <const unsigned char *>PyBytes_AS_STRING(<object>item)

    cdef bytes digest(self, Py_ssize_t i):
        cdef Py_ssize_t size
        cdef const unsigned char *data = self.at(i, &size)
        return PyBytes_FromStringAndSize(<const char *>data, size)

    @property
    def digest_size(self):
        """Bytes per digest; None when the digests came as a list."""
        return self.size or None

    def __len__(self):
        return self.n

    def __getitem__(self, key):
        cdef Py_ssize_t i, start, stop, step
        cdef list out
        if isinstance(key, slice):
            start, stop, step = key.indices(self.n)
            out = []
            for i in range(len(range(start, stop, step))):
                out.append(self.digest(start + i * step))
            return out
        try:
            i = key.__index__()
        except AttributeError:
            raise TypeError(
                f"an index must be an integer or a slice, got {type(key).__name__}"
            ) from None
        except OverflowError:
            i = self.n
        if i < 0:
            i += self.n
        if not 0 <= i < self.n:
            raise IndexError(f"index {shown(key)} out of range for {self.n} digests")
        return self.digest(i)

    def __iter__(self):
        cdef Py_ssize_t i
        for i in range(self.n):
            yield self.digest(i)

    def __eq__(self, other):
        cdef Py_ssize_t i = 0
        if not isinstance(other, BlockHashes) and not is_sequence(other):
            return NotImplemented
        if len(other) != self.n:
            return False
        for item in other:
            if i >= self.n or self.digest(i) != item:
                return False
            i += 1
        return True

    __hash__ = None

    def tobytes(self):
        """All digests, one after the other."""
        if self.items is not None:
            return b"".join(self)
        return PyBytes_FromStringAndSize(<const char *>self.data, self.n * self.size)

    def __reduce__(self):
        flat = self.items is None
        make = BlockHashes if flat else BlockHashes.from_list
        if self.origin is not None:
            make = _partial(make, origin=self.origin)
        return make, ((self.tobytes(), self.size) if flat else (list(self),))

    def __repr__(self):
        kind = f"{self.size} bytes each" if self.size else "from a list"
        return f"<BlockHashes: {self.n} digests, {kind}>"


_Sequence.register(BlockHashes)


cdef BlockHashes as_hashes(object hashes):
    """BlockHashes as they are, any sequence of bytes through from_list."""
    if isinstance(hashes, BlockHashes):
        return <BlockHashes>hashes
    return BlockHashes.from_list(hashes)
