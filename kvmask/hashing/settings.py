"""Hashing: which digests a contract speaks of, without ever showing the seed they start from."""

from __future__ import annotations

import functools
import hashlib
import hmac
from dataclasses import dataclass, field

from kvmask._core import BlockHashes, shown
from kvmask.errors import ArgumentError, HashInputError
from kvmask.hashing.chain import digest_size, start_hash

__all__ = ["Hashing", "check_digests", "start_digest"]

# A start of these algorithms must stay secret, and many engines seed it with 32 bits: this makes
# one guess cost about 50 ms. The number is part of fingerprints and files.
_SECRET = frozenset({"xxhash", "xxhash_cbor"})
_ROUNDS = 200_000
_SALT = b"kvmask start hash "


@functools.lru_cache(maxsize=64)
def start_digest(algorithm: str, start: bytes) -> str:
    """16 hex digits that tell start hashes apart without giving them away.

    Args:
        algorithm: One of ``ALGORITHMS``.
        start: The digest that stands in for the parent of a first block.

    >>> start_digest("sha256", bytes(32))
    '22f6e763f48998a6'
    """
    salt = _SALT + algorithm.encode()
    if algorithm in _SECRET:
        return hashlib.pbkdf2_hmac("sha256", start, salt, _ROUNDS)[:8].hex()
    return hmac.new(salt, start, "sha256").hexdigest()[:16]


@dataclass(frozen=True)
class Hashing:
    """The hash algorithm of an engine's blocks and where its chains start.

    Give the seed, or the start itself, or neither: then the start is what `start_hash` takes. What
    is only known by its ``check`` can be compared with others, and cannot hash token ids.

    Args:
        algorithm: One of ``kvmask.hashing.ALGORITHMS``.
        seed: Text the start derives from. Never shown.
        start: The start as an engine has it (vLLM's ``NONE_HASH``), 16 or 32 bytes. Never shown.
        release: vLLM release whose start and extra keys these are.
        check: 16 hex digits of the start, as a contract's JSON has them. Alone it stands for an
            unknown start; with another start it must agree.

    Raises:
        ArgumentError: An unknown algorithm, both ``seed`` and ``start``, or a start that does not
            agree with ``check``.
        HashInputError: Nothing is given and the engine would start from random bytes.

    >>> Hashing("sha256", seed="hidden")
    Hashing(algorithm='sha256', release='0.32', check='c774ef0b575ebe1f')
    """

    algorithm: str = "sha256"
    seed: str | None = field(default=None, repr=False, compare=False)
    start: bytes | None = field(default=None, repr=False, compare=False)
    release: str = "0.32"
    check: str | None = None

    def __post_init__(self) -> None:
        digest_size(self.algorithm)
        if not isinstance(self.release, str):
            raise TypeError(f"`release` must be text, got {type(self.release).__name__}")
        if self.seed is not None and self.start is not None:
            raise ArgumentError("`seed` and `start` exclude each other, got both")
        if isinstance(self.seed, str) and not _is_unicode(self.seed):
            raise HashInputError("`seed` must be valid Unicode, got a lone surrogate")
        if self.check is not None and (
            not isinstance(self.check, str)
            or len(self.check) != 16
            or set(self.check) - set("0123456789abcdef")
        ):
            raise ArgumentError(f"`check` must be 16 hex digits, got {shown(self.check)}")
        start: bytes | None
        if self.start is not None:
            start = _start(self.start)
        elif self.seed is None and self.check is not None:
            start = None
            start_hash("sha256", "", self.release)  # refuses what is no release
        else:
            start = start_hash(self.algorithm, self.seed, self.release)
        if start is not None:
            found = start_digest(self.algorithm, start)
            if self.check not in (None, found):
                raise ArgumentError(
                    "`seed` must be the one that the contract was made with: digests of the start "
                    f"must be equal, got {found} and {self.check}"
                )
            object.__setattr__(self, "check", found)
        object.__setattr__(self, "start", start)

    @property
    def digest_size(self) -> int:
        """Bytes per digest."""
        return digest_size(self.algorithm)

    @property
    def start_hash(self) -> bytes:
        """The digest that stands in for the parent of a first block.

        Raises:
            HashInputError: Only its check is known.
        """
        if self.start is None:
            raise HashInputError(
                "`seed` must be given to hash token ids: this contract was loaded without one, so "
                f"load it with `seed`, or pass digests, got a start known as {self.check} alone"
            )
        return self.start

    @property
    def known(self) -> bool:
        """Whether token ids can be hashed."""
        return self.start is not None

    @property
    def tags_extra_keys(self) -> bool:
        """Whether extra keys have the tagged form, which vLLM has from 0.32 on."""
        major, minor = self.release.split(".")[:2]
        return (int(major), int(minor)) >= (0, 32)


def check_digests(hashes: BlockHashes, block_size: int, hashing: Hashing | None) -> None:
    """Refuse digests that cannot be of a hash block size and a hashing.

    Of digests whose origin is not known the width is checked.

    Args:
        hashes: One digest per hash block.
        block_size: Tokens per hash block.
        hashing: Algorithm and start; None: any.

    Raises:
        ArgumentError: They are known to be others. A start is named by its `start_digest` alone.
    """
    if not isinstance(hashes, BlockHashes):
        raise TypeError(f"`hashes` must be BlockHashes, got {type(hashes).__name__}")
    origin = hashes.origin
    if origin is not None and origin.block_size != block_size:
        raise ArgumentError(
            "`hashes` must be of the contract's `hash_block_size`, "
            f"got {origin.block_size} and {block_size}"
        )
    if hashing is None:
        return
    if origin is not None and origin.algorithm != hashing.algorithm:
        raise ArgumentError(
            "`hashes` must be of the contract's hash algorithm, "
            f"got {origin.algorithm} and {hashing.algorithm}"
        )
    if origin is not None and origin.start != hashing.start:
        found = start_digest(origin.algorithm, origin.start)
        if found != hashing.check:
            raise ArgumentError(
                "`hashes` must start from the contract's seed, "
                f"got starts known as {found} and {hashing.check}"
            )
    if origin is not None or not len(hashes):
        return
    # A list has tens of thousands of digests: the first and the last stand for all.
    widths = {hashes.digest_size or len(hashes[i]) for i in (0, -1)}
    if widths != {hashing.digest_size}:
        raise ArgumentError(
            f"`hashes` must be digests of {hashing.digest_size} bytes, as {hashing.algorithm} "
            f"gives them, got {' and '.join(map(str, sorted(widths)))}"
        )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _start(value: object) -> bytes:
    try:
        start = bytes(memoryview(value))  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"`start` must be bytes-like, got {type(value).__name__}") from None
    if len(start) not in (16, 32):
        raise ArgumentError(f"`start` must be a digest of 16 or 32 bytes, got {len(start)}")
    return start
