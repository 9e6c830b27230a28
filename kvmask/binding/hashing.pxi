# Token ids of any container as flat integers, and the chain of block digests over them.

from cpython.buffer cimport (
    PyBUF_RECORDS_RO,
    PyBuffer_Release,
    PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_New, PyList_SET_ITEM
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF

from itertools import islice as _islice
from operator import index as _index


cdef extern from *:
    """
    /* Copy exact ints that are not negative, borrowed from items[0..n): no reference is taken,
       which alone would double the time. Returns how many were copied before one that does not
       fit. */
    static Py_ssize_t
    km_take_ints(PyObject *const *items, Py_ssize_t n, int64_t *out)
    {
        for (Py_ssize_t i = 0; i < n; i++) {
            PyObject *o = items[i];
            long long v;
            int overflow;

            if (!PyLong_CheckExact(o))
                return i;
    #if PY_VERSION_HEX >= 0x030C0000
            if (PyUnstable_Long_IsCompact((PyLongObject *)o))
                v = PyUnstable_Long_CompactValue((PyLongObject *)o);
    #else
            if (Py_SIZE(o) == 1)
                v = ((PyLongObject *)o)->ob_digit[0];
    #endif
            else {
                v = PyLong_AsLongLongAndOverflow(o, &overflow);
                if (overflow)
                    return i;
            }
            if (v < 0)
                return i;
            out[i] = v;
        }
        return n;
    }
    """
    Py_ssize_t km_take_ints(PyObject *const *items, Py_ssize_t n, int64_t *out)


cdef extern from "Python.h":
    PyObject **PySequence_Fast_ITEMS(object o)


cdef extern from "digest.h" nogil:
    const int KM_PICKLE
    const int KM_CBOR
    const int KM_PAGES
    const int KM_NO_DIGEST
    const int KM_SHA256
    const int KM_SHA256_EVP
    const int KM_XXH3_128
    const int64_t KM_DIGEST_FAILED

    ctypedef struct km_tokens:
        const char *base
        int64_t stride
        int width

    ctypedef struct km_digest:
        int kind
        int size
        void *(*ctx_new)() noexcept
        void (*ctx_free)(void *) noexcept

    ctypedef struct km_extra:
        const uint8_t *data
        size_t size

    ctypedef struct km_chain:
        const km_digest *digest
        int encoding
        int64_t block_size
        const km_extra *extras
        int64_t *scratch
        uint8_t *buffer

    uint64_t km_serial_bound(int64_t n_tokens, uint64_t parent, uint64_t extra)
    bint km_may_split(int64_t n, size_t parent_size, size_t extra_size)
    int64_t km_take(const km_tokens *t, int64_t first, int64_t n, int64_t *out)
    size_t km_serialise(int encoding, uint8_t *out, const uint8_t *parent, size_t parent_size,
                        const int64_t *tokens, int64_t n, const uint8_t *extra, size_t extra_size)
    int km_load_sha256(const char *path, bint no_low_level, km_digest *d)
    int km_load_xxh3(const char *path, km_digest *d)
    bint km_digest_once(const km_digest *d, void *ctx, const uint8_t *data, size_t n, uint8_t *out)
    int64_t km_hash_chain(const km_chain *c, const km_tokens *tokens, int64_t first, int64_t n,
                          const uint8_t *parent, size_t parent_size, uint8_t *out)


# Tokens from which a call releases the GIL. Below, hashing takes less than about 0.3 ms (blocks of
# 4) or 0.1 ms (blocks of 16), while taking the GIL back from a busy thread can cost the switch
# interval, 5 ms.
HASH_GIL_MIN_TOKENS = 8192
cdef int64_t c_hash_gil_min_tokens = HASH_GIL_MIN_TOKENS
# Where the GIL is needed throughout (lists, digests that are Python calls) it is offered to other
# threads after this many steps, at most about a millisecond.
cdef Py_ssize_t c_list_step = 1 << 18
cdef int64_t c_call_step = 1 << 11
# Keeps the sizes of scratch memory far from overflow.
MAX_BLOCK_TOKENS = (1 << 31) - 1
cdef int64_t c_max_block_tokens = MAX_BLOCK_TOKENS

ENCODING_PICKLE = KM_PICKLE
ENCODING_CBOR = KM_CBOR
ENCODING_PAGES = KM_PAGES


cdef int token_error(object value, int64_t i) except -1:
    if type(value) is int:
        raise HashInputError(f"token ids must be from 0 to 2**63 - 1, got {value} at index {i}")
    raise HashInputError(
        f"token ids must be plain ints, got {type(value).__name__} at index {i}"
    )


cdef tuple listed(object ids):
    """As many items of a sequence as its length says: iteration alone may never end."""
    cdef tuple out
    try:
        n = len(ids)
        out = tuple(_islice(ids, n))
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise HashInputError(
            f"`token_ids` must be a sequence with a length, got {type(ids).__name__}: {error}"
        ) from error
    if len(out) != n:
        raise HashInputError(
            f"`token_ids` must hold as many tokens as its length says, got {len(out)} and {n}"
        )
    return out


cdef int64_t said_of_itself(object value, str what, object low, object high) except? -1:
    """An integer that an array or tensor says of itself: of another type, it is no array."""
    try:
        return check_integer(value, f"{what} of `token_ids`", low, high, error=HashInputError)
    except TypeError as error:
        raise HashInputError(str(error)) from None


cdef class TokenIds:
    """Token ids as flat 32- or 64-bit integers.

    Arrays and tensors are read in place, and must not change while they are hashed; other sequences
    are copied. Only plain ints are taken from a sequence: bools and NumPy scalars have another
    pickle, hence another digest in the engine.

    Args:
        ids: list, tuple or other sequence of int; or a one-dimensional buffer, array interface or
            CPU tensor of int32 or int64.
        start: First token to take, from a list or tuple only.

    Raises:
        HashInputError: Anything else, or a value out of range in a sequence.
    """

    cdef km_tokens view
    cdef int64_t n
    cdef Py_buffer buffer
    cdef bint has_buffer
    cdef int64_t *copied
    cdef object owner

    def __cinit__(self, ids, Py_ssize_t start=0):
        self.copied = NULL
        if type(ids) is list or type(ids) is tuple:
            self.copy(ids, start)
        elif start:
            raise ArgumentError(f"`start` must be 0 for a {type(ids).__name__}, got {start}")
        elif isinstance(ids, (str, bytes, bytearray)):
            raise HashInputError(f"`token_ids` must hold integers, got {type(ids).__name__}")
        elif PyObject_CheckBuffer(ids):
            self.from_buffer(ids)
        elif hasattr(ids, "__array_interface__"):
            self.from_interface(ids.__array_interface__)
            self.owner = ids
        elif hasattr(ids, "data_ptr") and hasattr(ids, "stride"):
            self.from_tensor(ids)
            self.owner = ids
        elif hasattr(ids, "__len__") and hasattr(ids, "__getitem__") and type(ids) is not dict:
            self.copy(listed(ids), 0)
        else:
            raise HashInputError(
                f"`token_ids` must be a sequence, an array or a tensor, got {type(ids).__name__}"
            )

    def __dealloc__(self):
        if self.has_buffer:
            PyBuffer_Release(&self.buffer)
        free(self.copied)

    def __len__(self):
        return self.n

    cdef int copy(self, object ids, Py_ssize_t start) except -1:
        cdef Py_ssize_t n = len(ids) - start, i = 0, step, done
        if start < 0 or n < 0:
            raise ArgumentError(f"`start` must be from 0 to {len(ids)}, got {start}")
        self.copied = <int64_t *>malloc((n or 1) * sizeof(int64_t))
        if not self.copied:
            raise MemoryError
        while i < n:
            if i:
                with nogil:
                    pass
                if len(ids) != start + n:
                    raise HashInputError(
                        "`token_ids` must not change while it is hashed, "
                        f"got {len(ids)} tokens after {start + n}"
                    )
            step = min(n - i, c_list_step)
            done = km_take_ints(PySequence_Fast_ITEMS(ids) + start + i, step, self.copied + i)
            if done < step:
                token_error(ids[start + i + done], start + i + done)
            i += step
        self.n = n
        self.view = km_tokens(<const char *>self.copied, sizeof(int64_t), sizeof(int64_t))
        return 0

    cdef int from_buffer(self, object ids) except -1:
        cdef Py_ssize_t stride
        cdef bytes kind
        try:
            PyObject_GetBuffer(ids, &self.buffer, PyBUF_RECORDS_RO)
        except (BufferError, ValueError) as error:  # a released or indirect view
            raise HashInputError(f"`token_ids` must have a plain buffer: {error}") from error
        self.has_buffer = True
        if self.buffer.ndim != 1:
            raise HashInputError(
                f"`token_ids` must have one dimension, got {self.buffer.ndim}"
            )
        kind = self.buffer.format if self.buffer.format else b"B"
        stride = self.buffer.itemsize
        if kind.lstrip(b"@=<") not in (b"i", b"l", b"q") or stride not in (4, 8):
            raise HashInputError(
                f"`token_ids` must be int32 or int64, got format {kind.decode()!r}"
            )
        if self.buffer.strides:
            stride = self.buffer.strides[0]
        self.view = km_tokens(<const char *>self.buffer.buf, stride, self.buffer.itemsize)
        self.n = self.buffer.shape[0]
        return 0

    cdef int from_interface(self, object interface) except -1:
        cdef int width
        if not isinstance(interface, dict):
            raise HashInputError(
                "`__array_interface__` of `token_ids` must be a dict, "
                f"got {type(interface).__name__}"
            )
        shape, strides = interface.get("shape"), interface.get("strides")
        kind, data = interface.get("typestr"), interface.get("data")
        if not isinstance(shape, tuple) or len(shape) != 1:
            raise HashInputError(f"`token_ids` must have one dimension, got shape {shape!r}")
        if kind not in ("<i4", "<i8"):
            raise HashInputError(f"`token_ids` must be int32 or int64, got {kind!r}")
        if not isinstance(data, tuple) or not data:
            raise HashInputError(
                f"`token_ids` must name its data by address, got {type(data).__name__}"
            )
        width = int(kind[2])
        if strides is not None and (not isinstance(strides, tuple) or len(strides) != 1):
            raise HashInputError(f"`token_ids` must have one stride or none, got {strides!r}")
        self.set_memory(data[0], width if strides is None else strides[0], width, shape[0])
        return 0

    cdef int from_tensor(self, object ids) except -1:
        cdef str kind = str(ids.dtype)
        cdef int width
        if ids.dim() != 1:
            raise HashInputError(f"`token_ids` must have one dimension, got {ids.dim()}")
        if kind not in ("torch.int32", "torch.int64"):
            raise HashInputError(f"`token_ids` must be int32 or int64, got {kind}")
        if ids.device.type != "cpu":
            raise HashInputError(f"`token_ids` must be on the CPU, got {ids.device}")
        width = 4 if kind == "torch.int32" else 8
        # Strides come in elements.
        self.set_memory(ids.data_ptr(), ids.stride()[0] * width, width, ids.shape[0])
        return 0

    cdef int set_memory(self, object address, object stride, int width, object n) except -1:
        cdef int64_t most = <int64_t>1 << 62, end = 0x7FFFFFFFFFFFFFFF
        cdef int64_t count = said_of_itself(n, "the length", 0, most)
        cdef int64_t step = said_of_itself(stride, "the stride", -most, most)
        cdef int64_t base = said_of_itself(address, "the address", 0, end)
        cdef object last = base + (count - 1) * <object>step if count else base
        if count and not (base and 0 < last <= end - width):
            raise HashInputError(
                "`token_ids` must lie in memory, "
                f"got {count} tokens at address {base} with stride {step}"
            )
        self.view = km_tokens(<const char *><size_t>base, step, width)
        self.n = count
        return 0

    def part(self, int64_t start, int64_t stop):
        """Tokens [start, stop) as a view of the same memory."""
        cdef TokenIds out
        self.check_range(start, stop)
        out = TokenIds(())
        out.view = self.view
        out.view.base += start * self.view.stride
        out.n = stop - start
        out.owner = self
        return out

    cdef int check_range(self, int64_t start, int64_t stop) except -1:
        if not 0 <= start <= stop <= self.n:
            raise HashInputError(
                f"`start` and `stop` must be within {self.n} tokens, got {start} and {stop}"
            )
        return 0

    def take(self, int64_t start, int64_t stop):
        """Tokens [start, stop) as a new tuple of ints.

        Raises:
            HashInputError: One of them is negative.
        """
        cdef int64_t i, value
        self.check_range(start, stop)
        out = []
        for i in range(start, stop):
            if km_take(&self.view, i, 1, &value) < 0:
                token_error(value, i)
            out.append(value)
        return tuple(out)


cdef class Digest:
    """A digest function of a library that is loaded already, called without the interpreter.

    Attributes:
        kind: "sha256", "sha256-evp" or "xxh3_128".
    """

    cdef km_digest d
    cdef readonly str kind

    @staticmethod
    def sha256(path, bint low_level=True):
        """SHA-256 out of the library at ``path`` (None: this program), or None.

        Args:
            path: A shared object whose dependencies include libcrypto, or libcrypto itself.
            low_level: Whether ``SHA256_Init`` and its kind may be used rather than EVP.
        """
        cdef Digest self = Digest.__new__(Digest)
        cdef bytes name = None if path is None else path.encode()
        cdef int kind = km_load_sha256(<char *>NULL if name is None else <char *>name,
                                       not low_level, &self.d)
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
        cdef const uint8_t[::1] view = data
        cdef uint8_t out[32]
        cdef void *ctx = NULL
        cdef bint ok
        if self.d.kind == KM_SHA256_EVP:
            ctx = self.d.ctx_new()
            if not ctx:
                raise MemoryError
        ok = km_digest_once(&self.d, ctx, &view[0] if view.shape[0] else out, view.shape[0], out)
        if ctx:
            self.d.ctx_free(ctx)
        if not ok:
            raise RuntimeError(f"{self.kind} failed")
        return out[:self.d.size]


cdef int check_parent(bytes parent, int encoding) except -1:
    cdef Py_ssize_t least = 0 if encoding == KM_PAGES else 1
    if encoding not in (KM_PICKLE, KM_CBOR, KM_PAGES):
        raise ArgumentError(f"`encoding` must be one of the ENCODING constants, got {encoding}")
    if not least <= len(parent) <= 255:
        raise ArgumentError(f"`parent` must have from {least} to 255 bytes, got {len(parent)}")
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
    return km_may_split(block_size, 32, extra_size)


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

    cdef TokenIds ids
    cdef Digest digest
    cdef km_chain c
    cdef int64_t n
    cdef object extras

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
        self.extras = None if extras is None else tuple(extras)  # keeps the bytes alive
        self.n = ids.n // block_size
        self.c.digest = &digest.d if digest is not None else NULL
        self.c.encoding = encoding
        self.c.block_size = block_size
        if extras is not None:
            if encoding == KM_PAGES and any(e is not None for e in self.extras):
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
            if encoding == KM_PICKLE and largest and km_may_split(block_size, 255, largest):
                raise HashInputError(
                    "extra keys must fit the first frame of a pickle, "
                    f"got {block_size} tokens and {largest} bytes of them"
                )
        self.c.scratch = <int64_t *>malloc(block_size * sizeof(int64_t))
        self.c.buffer = <uint8_t *>malloc(km_serial_bound(block_size, 255, largest))
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
            # The next block starts with it, in room for 255 bytes.
            if not 1 <= len(parent) <= 255:
                raise HashInputError(
                    f"`digest` must return from 1 to 255 bytes, got {len(parent)}"
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
