"""Canonical CBOR of the few types that extra keys are made of.

RFC 8949, core deterministic encoding (4.2.1), as ``cbor2.dumps(x, canonical=True)`` writes it:

====================  ==========================================================
``n >= 0``            major type 0, the shortest of 1, 2, 3, 5 or 9 bytes
``n < 0``             major type 1, the same for ``-1 - n``
bytes, bytearray      major type 2: head with the length, then the bytes
str                   major type 3: head with the length in UTF-8, then the bytes
list, tuple           major type 4: head with the number of items, then the items
False, True, None     ``f4``, ``f5``, ``f6``
====================  ==========================================================

Other types (floats, maps, sets, big numbers, subclasses) are refused: engines do not put them into
extra keys, and a guess would be a digest nobody else computes.
"""

from typing import Any

from kvmask.errors import HashInputError

MAX_DEPTH = 64


def _head(major: int, value: int) -> bytes:
    if value < 24:
        return bytes([major << 5 | value])
    for size, code in ((1, 24), (2, 25), (4, 26), (8, 27)):
        if value < 1 << 8 * size:
            return bytes([major << 5 | code]) + value.to_bytes(size, "big")
    raise HashInputError(f"integers in extra keys must fit 64 bits, got {value}")


def canonical_cbor(value: Any, depth: int = 0) -> bytes:
    """Encode a value.

    Args:
        value: None, bool, int, str, bytes, bytearray, or lists and tuples of those.
        depth: Nesting so far.

    Returns:
        The only canonical encoding.

    Raises:
        HashInputError: Another type, a number past 64 bits, text that is no Unicode, or nesting
            deeper than ``MAX_DEPTH``.

    >>> canonical_cbor(("lora", -1, None)).hex()
    '83646c6f726120f6'
    """
    kind = type(value)
    if value is None:
        return b"\xf6"
    if kind is bool:
        return b"\xf5" if value else b"\xf4"
    if kind is int:
        return _head(0, value) if value >= 0 else _head(1, -1 - value)
    if kind is str:
        try:
            text: bytes = value.encode()
        except UnicodeEncodeError:
            raise HashInputError(f"text must be valid Unicode, got {value!r}") from None
        return b"".join((_head(3, len(text)), text))
    if kind in (bytes, bytearray):
        data = bytes(value)
        return _head(2, len(data)) + data
    if kind in (tuple, list):
        if depth >= MAX_DEPTH:
            raise HashInputError(f"extra keys must not be nested deeper than {MAX_DEPTH}")
        return _head(4, len(value)) + b"".join(canonical_cbor(v, depth + 1) for v in value)
    raise HashInputError(
        "extra keys for a CBOR algorithm must be made of None, bool, int, str, bytes, lists and "
        f"tuples, got {kind.__name__}"
    )
