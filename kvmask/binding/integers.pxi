# The one check of an integer argument, and of what is a sequence.

# A longer integer is not written out in a message: Python refuses past some thousands of digits.
cdef int c_shown_bits = 256
# What an integer without a limit of its own stays below.
cdef object c_most = _operator.lshift(1, c_shown_bits)


cdef object shown_integer(object number):
    if number.bit_length() <= c_shown_bits:
        return number
    return f"{'a negative' if number < 0 else 'an'} integer of {number.bit_length()} bits"


cpdef object shown(object value):
    """A value in a message: written out, and cut where it is long.

    >>> shown([1, 2])
    '[1, 2]'
    """
    cdef object text
    if isinstance(value, int):
        return str(shown_integer(value))
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested deeply, or with an integer of many digits
        return f"a value of {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."


def check_integer(value, str name not None, low=1, high=None, *, error=ArgumentError):
    """An integer argument as a plain int.

    Args:
        value: Whatever Python takes as an index: int, NumPy integers, but no bool.
        name: What messages call it, put between backticks unless it holds some.
        low: Least value.
        high: Largest value; None for any that can be written out.
        error: Exception class of a value out of range.

    Returns:
        int.

    Raises:
        TypeError: It is no integer, whatever ``error`` is.
        ArgumentError: It is out of range, or what ``error`` names.

    >>> check_integer(3, "rank", 0, 7)
    3
    """
    cdef object number = None
    if PyLong_CheckExact(value) and value >= low and value < (c_most if high is None else high + 1):
        return value
    if not isinstance(value, bool):
        try:
            number = _operator.index(value)
        except TypeError:
            pass
    if "`" not in name:
        name = f"`{name}`"
    if number is None:
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    # A subclass of int may compare as it likes: what counts is its value.
    number = int.__index__(number)
    if high is None:
        if number < low:
            raise error(f"{name} must be at least {low}, got {shown_integer(number)}")
        if number >= c_most:
            raise error(f"{name} must be below 2**{c_shown_bits}, got {shown_integer(number)}")
    elif not low <= number <= high:
        raise error(f"{name} must be from {low} to {high}, got {shown_integer(number)}")
    return number


cdef int64_t as_int64(object value, str name, int64_t low, int64_t high) except? -1:
    """The same for a range within 64 bits, as a C integer."""
    cdef int overflow = 0
    cdef int64_t result
    if PyLong_CheckExact(value):
        result = PyLong_AsLongLongAndOverflow(value, &overflow)
        if not overflow and low <= result <= high:
            return result
    return check_integer(value, name, low, high)


cdef bint is_sequence(object value) except -1:
    """Whether it is a sequence, text and bytes left aside.

    Abstract classes lose an error where memory runs out, so they are asked last.
    """
    if type(value) is list or type(value) is tuple:
        return True
    return not isinstance(value, (str, bytes, bytearray)) and isinstance(value, _Sequence)
