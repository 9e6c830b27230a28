"""Seals: a checksum behind the bytes of an object, of these bytes and of the key.

A sealed object, byte for byte::

    bytes of the block | XXH3-128 of these bytes, 16 bytes, most significant first

The seed of the XXH3-128 is the XXH3-64 of the key's UTF-8, so bytes of another key do not fit. A
checksum finds accidents. It is no signature: whoever can write to the store can seal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvmask.errors import MissingDependencyError

SEAL_BYTES = 16

Seal = Callable[[str, Iterable[Any]], bytes]


def seal_of(key: str, pieces: Iterable[Any]) -> bytes:
    """The seal of an object.

    Args:
        key: Its key.
        pieces: Its bytes, as bytes-like objects one after another.

    Returns:
        `SEAL_BYTES` bytes.

    Raises:
        MissingDependencyError: The package `xxhash` is not installed.

    >>> seal_of("a key", [b"by", b"tes"]) == seal_of("a key", [b"bytes"])
    True
    """
    return load_seal()(key, pieces)


def load_seal() -> Seal:
    """`seal_of`, with the package that it needs imported.

    Raises:
        MissingDependencyError: The package is not installed, or has no XXH3.
    """
    try:
        from xxhash import xxh3_64_intdigest, xxh3_128
    except ImportError as error:
        raise MissingDependencyError(
            "sealed objects need the package `xxhash` 2.0 or later "
            f"(pip install 'kvmask[sealed]'): {error}"
        ) from error

    def seal(key: str, pieces: Iterable[Any]) -> bytes:
        state = xxh3_128(seed=xxh3_64_intdigest(key.encode()))
        for piece in pieces:
            state.update(piece)
        return bytes(state.digest())

    return seal
