# TokenIds: token ids of any container as flat integers.

# A list needs the GIL throughout. It is offered to other threads after this many tokens, at most
# about a millisecond.
cdef Py_ssize_t c_list_step = 1 << 18


cdef int token_error(object value, int64_t i) except -1:
    if type(value) is int:
        raise HashInputError(
            f"`token_ids` must be from 0 to 2**63 - 1, got {shown_integer(value)} at index {i}"
        )
    hint = ": give the array, or its `tolist()`" if hasattr(value, "dtype") else ""
    raise HashInputError(
        f"`token_ids` must hold plain ints, got {type(value).__name__} at index {i}{hint}"
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
            done = take_ints(PySequence_Fast_ITEMS(ids) + start + i, step, self.copied + i)
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
