"""Where digests come from: the libcrypto behind `hashlib`, and the xxHash inside `xxhash`.

A call through Python costs about 240 ns for SHA-256, twice the digest itself, so the functions are
looked up in the libraries and called from C (`csrc/digest.h`). When that fails (OpenSSL linked
statically and hidden, another xxHash binding) the Python call is used: slower, equal.
"""

import functools
import hashlib
from collections.abc import Callable

from kvmask import _core
from kvmask.errors import MissingDependencyError

# Names of a system libcrypto, for interpreters that carry their own in a form that exports nothing.
_SYSTEM_LIBCRYPTO = ("libcrypto.so.3", "libcrypto.so.1.1")

_PROBES = tuple(bytes(range(n % 256)) * (1 + n // 256) for n in (0, 1, 55, 56, 64, 90, 128, 1000))


def _python_sha256(data: bytes) -> bytes:
    return hashlib.sha256(data, usedforsecurity=False).digest()


def _agree(native: Callable[[bytes], bytes], python: Callable[[bytes], bytes]) -> bool:
    return all(native(probe) == python(probe) for probe in _PROBES)


@functools.cache
def sha256() -> "_core.Digest | Callable[[bytes], bytes]":
    """SHA-256, called from C where it can be found and agrees with `hashlib` on a few messages."""
    paths: list[str | None] = []
    try:
        import _hashlib

        # None, the program itself, when the module is built into it.
        paths.append(getattr(_hashlib, "__file__", None))
    except ImportError:
        pass
    for path in (*paths, *_SYSTEM_LIBCRYPTO):
        native = _core.Digest.sha256(path)
        if native is not None and _agree(native, _python_sha256):
            return native
    return _python_sha256


@functools.cache
def xxh3_128() -> "_core.Digest | Callable[[bytes], bytes]":
    """XXH3-128 of the `xxhash` package.

    Raises:
        MissingDependencyError: The package is missing or too old.
    """
    try:
        import xxhash

        python: Callable[[bytes], bytes] = xxhash.xxh3_128_digest
    except (ImportError, AttributeError) as error:
        raise MissingDependencyError(
            "the xxhash algorithms need the package `xxhash` 2.0 or later (pip install xxhash)"
        ) from error
    path = getattr(getattr(xxhash, "_xxhash", None), "__file__", None)
    native = _core.Digest.xxh3_128(path) if path else None
    if native is not None and _agree(native, python):
        return native
    return python
