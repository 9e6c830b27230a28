"""Return codes of the store."""

import enum


class Code(enum.IntEnum):
    """Return codes of the store's calls. A `get` that succeeds returns a number of bytes, not `OK`.

    Names and numbers are those of Mooncake's public header. They were checked with 0.3.13.post1.
    """

    OK = 0
    INTERNAL_ERROR = -1
    NO_AVAILABLE_HANDLE = -200
    INVALID_KEY = -400
    WRITE_FAIL = -500
    INVALID_PARAMS = -600
    REPLICA_IS_NOT_READY = -703
    OBJECT_NOT_FOUND = -704
    OBJECT_ALREADY_EXISTS = -705
    OBJECT_HAS_LEASE = -706
    LEASE_EXPIRED = -707
    TRANSFER_FAIL = -800
    RPC_FAIL = -900
    RPC_TIMEOUT = -901
    UNAVAILABLE_IN_CURRENT_STATUS = -1010
    UNAVAILABLE_IN_CURRENT_MODE = -1011


def code_name(code: int) -> str:
    """Return the name of a return code.

    Args:
        code: A return code.

    >>> code_name(-200), code_name(-12345)
    ('NO_AVAILABLE_HANDLE', 'UNKNOWN_CODE')
    """
    try:
        return Code(code).name
    except ValueError:
        return "UNKNOWN_CODE"


def is_pressure(code: int) -> bool:
    """True when the pool is full. The same put may succeed after the store evicts something.

    Args:
        code: A return code.

    >>> is_pressure(-200), is_pressure(-600)
    (True, False)
    """
    return code == Code.NO_AVAILABLE_HANDLE


def is_final(code: int) -> bool:
    """True when the same call always fails, because the key or the sizes are wrong.

    Args:
        code: A return code.

    >>> is_final(-600), is_final(-900)
    (True, False)
    """
    return code in (Code.INVALID_KEY, Code.INVALID_PARAMS, Code.UNAVAILABLE_IN_CURRENT_MODE)


def is_success(code: int) -> bool:
    """True when the key is in the store after a put: just written, or already present.

    Args:
        code: A return code.

    >>> is_success(0), is_success(-705), is_success(-200)
    (True, True, False)
    """
    return code in (Code.OK, Code.OBJECT_ALREADY_EXISTS)
