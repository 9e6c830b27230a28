# The digest of a block, and the chain of block digests over token ids.

# Tokens from which a call releases the GIL. Below, hashing takes less than about 0.3 ms (blocks of
# 4) or 0.1 ms (blocks of 16), while taking the GIL back from a busy thread can cost the switch
# interval, 5 ms.
HASH_GIL_MIN_TOKENS = 8192
cdef int64_t c_hash_gil_min_tokens = HASH_GIL_MIN_TOKENS
# Digests that are Python calls need the GIL throughout. It is offered to other threads after this
# many blocks, at most about a millisecond.
cdef int64_t c_call_step = 1 << 11
# Keeps the sizes of scratch memory far from overflow.
MAX_BLOCK_TOKENS = (1 << 31) - 1
cdef int64_t c_max_block_tokens = MAX_BLOCK_TOKENS

ENCODING_PICKLE = KM_PICKLE
ENCODING_CBOR = KM_CBOR
ENCODING_PAGES = KM_PAGES


cdef class Digest:
    """A digest function of a library that is loaded already, called without the interpreter.

    Attributes:
        kind: "sha256", "sha256-evp" or "xxh3_128".
    """

    @staticmethod
    def sha256(path, *, bint low_level=True):
        """SHA-256 out of the library at ``path`` (None: this program), or None.

        Args:
            path: A shared object whose dependencies include libcrypto, or libcrypto itself.
            low_level: Whether ``SHA256_Init`` and its kind may be used rather than EVP.
        """
        cdef Digest self = Digest.__new__(Digest)
        cdef bytes name = None if path is None else path.encode()
        cdef const char *library = NULL
        cdef km_digest_kind kind
        if name is not None:
            library = name
        kind = km_load_sha256(library, not low_level, &self.d)
        if kind == KM_NO_DIGEST:
            return None
        self.kind = "sha256" if kind == KM_SHA256 else "sha256-evp"
        return self

    @staticmethod
    def xxh3_128(str path not None):
        """XXH3-128 out of the library at ``path``, or None when it does not export it."""
        cdef Digest self = Digest.__new__(Digest)
        cdef bytes name = path.encode()
        if km_load_xxh3(name, &self.d) == KM_NO_DIGEST:
            return None
        self.kind = "xxh3_128"
        return self

    def __init__(self):
        raise TypeError("a Digest comes from Digest.sha256 or Digest.xxh3_128")

    @property
    def size(self):
        """Bytes per digest."""
        return self.d.size

    def __call__(self, data):
        """Digest of the bytes-like ``data``."""
        cdef Py_buffer view
        cdef uint8_t out[KM_MAX_DIGEST]
        cdef void *ctx = NULL
        cdef bint ok
        if self.d.kind == KM_SHA256_EVP:
            ctx = self.d.ctx_new()
            if not ctx:
                raise MemoryError
        try:
            PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
            ok = km_digest_once(
                &self.d, ctx, <const uint8_t *>view.buf if view.len else out, view.len, out
            )
            PyBuffer_Release(&view)
        finally:
            if ctx:
                self.d.ctx_free(ctx)
        if not ok:
            raise RuntimeError(f"{self.kind} failed")
        return out[:self.d.size]


cdef int check_parent(bytes parent, int encoding) except -1:
    cdef Py_ssize_t least = 0 if encoding == KM_PAGES else 1
    if encoding not in (KM_PICKLE, KM_CBOR, KM_PAGES):
        raise ArgumentError(f"`encoding` must be one of the ENCODING constants, got {encoding}")
    if not least <= len(parent) <= KM_MAX_PARENT:
        raise ArgumentError(
            f"`parent` must have from {least} to {KM_MAX_PARENT} bytes, got {len(parent)}"
        )
    return 0


def serialise_block(int encoding, bytes parent not None, token_ids, bytes extra=None):
    """The bytes that are hashed for one block.

    Args:
        encoding: ENCODING_PICKLE, ENCODING_CBOR or ENCODING_PAGES.
        parent: Digest of the block before, 1 to 255 bytes; for pages it may be empty.
        token_ids: At least one token id, as TokenIds takes them.
        extra: The serialised extra keys; None stands for None.

    Raises:
        HashInputError: Bad token ids; or extra keys in a pickle of more than one frame.
    """
    cdef TokenIds ids = token_ids if isinstance(token_ids, TokenIds) else TokenIds(token_ids)
    cdef Chain chain = Chain(ids, ids.n, encoding, None, [extra])
    check_parent(parent, encoding)
    return chain.serialise(0, parent)


def splits_frames(int64_t block_size, int64_t extra_size):
    """Whether a pickled block may take more than one frame, so that its extra keys cannot be
    serialised apart from it.

    Args:
        block_size: Tokens in the block.
        extra_size: Bytes of its serialised extra keys.
    """
    return km_may_split(block_size, KM_MAX_DIGEST, extra_size)


def split_digests(bytes flat not None, Py_ssize_t size):
    """Digests that lie one after the other, as a list of bytes."""
    cdef Py_ssize_t i, n = PyBytes_GET_SIZE(flat) // size if size > 0 else 0
    cdef const char *data = PyBytes_AS_STRING(flat)
    cdef list out = PyList_New(n)
    for i in range(n):
        digest = PyBytes_FromStringAndSize(data + i * size, size)
        Py_INCREF(digest)
        PyList_SET_ITEM(out, i, digest)
    return out


cdef class Chain:
    """One run over token ids: what does not change from block to block, and its scratch memory."""

    def __cinit__(self, TokenIds ids not None, int64_t block_size, int encoding, Digest digest,
                  list extras):
        cdef uint64_t largest = 0
        cdef int64_t i
        cdef bytes extra
        if not 1 <= block_size <= c_max_block_tokens:
            raise ArgumentError(
                f"a block must have from 1 to {MAX_BLOCK_TOKENS} tokens, got {block_size}"
            )
        self.ids = ids
        self.digest = digest
        self.extras = None if extras is None else tuple(extras)
        self.n = ids.n // block_size
        self.c.digest = &digest.d if digest is not None else NULL
        self.c.encoding = <km_encoding>encoding
        self.c.block_size = block_size
        if extras is not None:
            if encoding == KM_PAGES:
                for given in self.extras:
                    if given is not None:
                        raise ArgumentError("pages have no extra keys")
            if len(self.extras) != self.n:
                raise ArgumentError(
                    "`extra_keys` must have one entry per full block, "
                    f"got {len(self.extras)} and {self.n}"
                )
            self.c.extras = <km_extra *>calloc(self.n or 1, sizeof(km_extra))
            if not self.c.extras:
                raise MemoryError
            for i in range(self.n):
                extra = self.extras[i]
                if extra is None:
                    continue
                (<km_extra *>self.c.extras)[i] = km_extra(
                    <const uint8_t *>PyBytes_AS_STRING(extra), PyBytes_GET_SIZE(extra)
                )
                largest = max(largest, <uint64_t>PyBytes_GET_SIZE(extra))
            if encoding == KM_PICKLE and largest and (
                km_may_split(block_size, KM_MAX_PARENT, largest)
            ):
                raise HashInputError(
                    "extra keys must fit the first frame of a pickle, "
                    f"got {block_size} tokens and {largest} bytes of them"
                )
        self.c.scratch = <int64_t *>malloc(block_size * sizeof(int64_t))
        self.c.buffer = <uint8_t *>malloc(km_serial_bound(block_size, KM_MAX_PARENT, largest))
        if not self.c.scratch or not self.c.buffer:
            raise MemoryError

    def __dealloc__(self):
        free(<void *>self.c.extras)
        free(self.c.scratch)
        free(self.c.buffer)

    cdef int refuse(self, int64_t block) except -1:
        """Raise for the negative token of a block."""
        cdef int64_t i = block * self.c.block_size
        self.ids.take(i, i + self.c.block_size)
        raise HashInputError(
            f"`token_ids` must not change while it is hashed, got a change in block {block}"
        )

    cdef bytes serialise(self, int64_t block, bytes parent):
        cdef size_t size
        cdef const km_extra *e = &self.c.extras[block] if self.c.extras else NULL
        if km_take(&self.ids.view, block * self.c.block_size, self.c.block_size,
                   self.c.scratch) < 0:
            self.refuse(block)
        size = km_serialise(self.c.encoding, self.c.buffer,
                            <const uint8_t *>PyBytes_AS_STRING(parent), PyBytes_GET_SIZE(parent),
                            self.c.scratch, self.c.block_size,
                            e.data if e else NULL, e.size if e else 0)
        return PyBytes_FromStringAndSize(<char *>self.c.buffer, size)

    cdef bytes run(self, bytes parent):
        cdef bytes out = PyBytes_FromStringAndSize(NULL, self.n * self.digest.d.size)
        cdef uint8_t *to = <uint8_t *>PyBytes_AS_STRING(out)
        cdef const uint8_t *seed = <const uint8_t *>PyBytes_AS_STRING(parent)
        cdef size_t seed_size = PyBytes_GET_SIZE(parent)
        cdef int64_t done
        if self.n * self.c.block_size >= c_hash_gil_min_tokens:
            with nogil:
                done = km_hash_chain(&self.c, &self.ids.view, 0, self.n, seed, seed_size, to)
        else:
            done = km_hash_chain(&self.c, &self.ids.view, 0, self.n, seed, seed_size, to)
        if done == KM_DIGEST_FAILED:
            raise RuntimeError(f"{self.digest.kind} failed")
        if done < self.n:
            self.refuse(done)
        return out

    cdef bytes run_calls(self, object digest, bytes parent):
        cdef list out = []
        cdef Py_ssize_t size = 0
        cdef int64_t i
        for i in range(self.n):
            if i % c_call_step == c_call_step - 1:
                with nogil:
                    pass
            made = digest(self.serialise(i, parent))
            if type(made) is not bytes:
                raise HashInputError(f"`digest` must return bytes, got {type(made).__name__}")
            parent = made
            # The next block starts with it, in room for as much.
            if not 1 <= len(parent) <= KM_MAX_PARENT:
                raise HashInputError(
                    f"`digest` must return from 1 to {KM_MAX_PARENT} bytes, got {len(parent)}"
                )
            size = size or len(parent)
            if len(parent) != size:
                raise HashInputError(
                    f"`digest` must return equally many bytes each time, got {size} and "
                    f"{len(parent)}"
                )
            out.append(parent)
        return b"".join(out)


def hash_chain(token_ids, int64_t block_size, int encoding, digest, bytes parent not None,
               list extras=None):
    """Chained digests of all full blocks, one after the other.

    Args:
        token_ids: As TokenIds takes them.
        block_size: Tokens per block.
        encoding: ENCODING_PICKLE, ENCODING_CBOR or ENCODING_PAGES.
        digest: Digest, or a callable from bytes to bytes (slower; needs the GIL throughout).
        parent: Digest to continue from, 1 to 255 bytes; for pages it may be empty.
        extras: Serialised extra keys, one bytes or None per full block.

    Returns:
        bytes.

    Raises:
        HashInputError: Bad token ids; extra keys that cannot be placed; digests that are no bytes,
            of changing size, or not of 1 to 255 bytes.
    """
    cdef TokenIds ids = token_ids if isinstance(token_ids, TokenIds) else TokenIds(token_ids)
    cdef bint native = isinstance(digest, Digest)
    cdef Chain chain = Chain(ids, block_size, encoding, digest if native else None, extras)
    check_parent(parent, encoding)
    return chain.run(parent) if native else chain.run_calls(digest, parent)
