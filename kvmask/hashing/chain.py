"""Token ids to chained block hashes, bit-equal to vLLM's.

A block of ``block_size`` tokens is named by ``H((parent, tokens, extra))``: `parent` is the digest
of the block before (bytes), `tokens` the tuple of its token ids, `extra` a tuple of extra keys or
None. The first block's parent is the *start hash*, ``H(seed)`` of a text. ``H`` serialises and then
digests:

===============  ==================  =============  =====
algorithm        serialisation       digest         bytes
===============  ==================  =============  =====
``sha256``       pickle protocol 5   SHA-256        32
``sha256_cbor``  canonical CBOR      SHA-256        32
``xxhash``       pickle protocol 5   XXH3, 128 bit  16
``xxhash_cbor``  canonical CBOR      XXH3, 128 bit  16
===============  ==================  =============  =====

The bytes of both serialisations are stated in `csrc/serial.h`. Sources: vLLM 0.32.0,
`vllm/utils/hashing.py` and `hash_block_tokens`, `init_none_hash` in `v1/core/kv_cache_utils.py`.

Pickle remembers objects by identity: a string that occurs twice in the extra keys of one block has
another digest when it is one object than when it is two equal ones. Extra keys are therefore
serialised as the very objects that were passed, like the engine does with its own.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, Self

from kvmask import _core
from kvmask._core import MAX_BLOCK_TOKENS, BlockHashes, check_integer, shown
from kvmask.errors import ArgumentError, HashInputError
from kvmask.hashing.cbor import canonical_cbor
from kvmask.hashing.digests import sha256, xxh3_128
from kvmask.hashing.origin import DigestOrigin
from kvmask.hashing.tokens import Tokens

__all__ = ["ALGORITHMS", "BlockHasher", "digest_size", "hash_tokens", "start_hash"]

DEFAULT_SEED = "vllm-none-hash"
_PROTOCOL = 5

#: Algorithm name to (serialisation, digest, bytes per digest).
_KINDS: dict[str, tuple[int, Callable[[], Any], int]] = {
    "sha256": (_core.ENCODING_PICKLE, sha256, 32),
    "sha256_cbor": (_core.ENCODING_CBOR, sha256, 32),
    "xxhash": (_core.ENCODING_PICKLE, xxh3_128, 16),
    "xxhash_cbor": (_core.ENCODING_CBOR, xxh3_128, 16),
}
ALGORITHMS = tuple(_KINDS)
# Not collision resistant, so the engine keeps their start secret unless told otherwise.
_UNSAFE = frozenset({"xxhash", "xxhash_cbor"})

ExtraKeys = Sequence[tuple[Any, ...] | None]


def _kind(algorithm: str) -> tuple[int, Callable[[], Any], int]:
    try:
        return _KINDS[algorithm]
    except (KeyError, TypeError):
        raise ArgumentError(
            f"`algorithm` must be one of {', '.join(ALGORITHMS)}, got {shown(algorithm)}"
        ) from None


def digest_size(algorithm: str) -> int:
    """Bytes per digest of an algorithm.

    Args:
        algorithm: One of ``ALGORITHMS``.

    Raises:
        ArgumentError: There is no such algorithm.

    >>> digest_size("sha256_cbor")
    32
    """
    return _kind(algorithm)[2]


def _release(release: str) -> tuple[int, int]:
    try:
        major, minor = release.split(".")[:2]
        return int(major), int(minor)
    except (ValueError, AttributeError):
        raise ArgumentError(
            f"`release` must be a vLLM release such as '0.32', got {shown(release)}"
        ) from None


def start_hash(algorithm: str = "sha256", seed: str | None = None, release: str = "0.32") -> bytes:
    """Digest that stands in for the parent of a first block (vLLM's ``NONE_HASH``).

    Args:
        algorithm: One of ``ALGORITHMS``.
        seed: Text to derive it from. None takes what the engine takes: the environment variable
            ``PYTHONHASHSEED`` when it is set, else, from release 0.32 on and for SHA-256, a fixed
            text.
        release: vLLM release. Before 0.32 an engine without ``PYTHONHASHSEED`` starts from random
            bytes whatever the algorithm.

    Raises:
        HashInputError: The engine would start from random bytes, so that no digest of this process
            could ever equal one of its own.

    >>> start_hash("sha256", seed="0").hex()[:16]
    '1973e23848344dc4'
    """
    encoding, digest, _ = _kind(algorithm)
    fixed = _release(release) >= (0, 32)
    if seed is None:
        seed = os.environ.get("PYTHONHASHSEED")
    if seed is None:
        if not fixed or algorithm in _UNSAFE:
            raise HashInputError(
                f"the start hash of {algorithm!r} in vLLM {release} is random unless "
                "PYTHONHASHSEED is set: set it alike for every process, or pass `seed` or `parent`"
            )
        seed = DEFAULT_SEED
    if not isinstance(seed, str):
        raise HashInputError(f"`seed` must be text, got {type(seed).__name__}")
    if encoding == _core.ENCODING_CBOR:
        data = canonical_cbor(seed)
    else:
        import pickle  # here and below: `import kvmask` does not need it

        data = pickle.dumps(seed, protocol=_PROTOCOL)
    return bytes(digest()(data))


def _pickle_block(parent: bytes, tokens: tuple[int, ...], extra: tuple[Any, ...] | None) -> bytes:
    import pickle

    try:
        return pickle.dumps((parent, tokens, extra), protocol=_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise HashInputError(f"extra keys must be picklable: {error}") from error


@functools.cache
def _pickler_is_known() -> bool:
    """Whether this interpreter's pickler still writes what csrc/serial.h writes.

    The format of a pickle is fixed, the choice of opcodes and frames is not. Also false for a newer
    protocol, which vLLM would take up by itself.
    """
    import pickle

    if pickle.HIGHEST_PROTOCOL != _PROTOCOL:
        return False
    parent = bytes(range(32))
    edges = (0, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**63 - 1)
    probes = [edges[:n] for n in range(1, 9)] + [(2**31,) * 9357, (7,) * 40000]
    return all(
        _core.serialise_block(_core.ENCODING_PICKLE, parent, p) == _pickle_block(parent, p, None)
        for p in probes
    )


def _pickled_extra(extra: tuple[Any, ...]) -> bytes:
    """The opcodes of `extra` inside a block's pickle.

    They do not depend on the tokens: those put nothing into the memo, whose numbers are all that
    could differ. The objects around `extra` are made here, so that none of them can also be inside.
    """
    parent, tokens = bytes(bytearray(32)), tuple(range(1))
    pickled = _pickle_block(parent, tokens, extra)
    head = 2 + 9 + 2 + 32 + 1 + 2 + 2  # PROTO, FRAME, parent, its MEMOIZE, token, TUPLE1, MEMOIZE
    tail = 3  # TUPLE3, MEMOIZE, STOP
    return pickled[head:-tail]


def _check_extras(extra_keys: ExtraKeys, blocks: int) -> list[tuple[Any, ...] | None]:
    extras = list(extra_keys)
    if len(extras) != blocks:
        raise ArgumentError(
            f"`extra_keys` must have one entry per full block, got {len(extras)} and {blocks}"
        )
    for i, extra in enumerate(extras):
        if extra is not None and type(extra) is not tuple:
            raise HashInputError(
                "`extra_keys` must hold a tuple or None per block, "
                f"got {type(extra).__name__} for block {i}"
            )
    return extras


def _serialise_extras(
    extras: list[tuple[Any, ...] | None], encode: Callable[[tuple[Any, ...]], bytes]
) -> list[bytes | None]:
    out: list[bytes | None] = []
    last: tuple[Any, ...] | None = None
    data: bytes | None = None
    for extra in extras:
        if extra is not last:
            # Blocks of one request often share the tuple, of an adapter for example.
            last, data = extra, None if extra is None else encode(extra)
        out.append(data)
    return out


def _exact_chain(
    ids: "_core.TokenIds",
    block_size: int,
    digest: Callable[[bytes], bytes],
    parent: bytes,
    extras: list[tuple[Any, ...] | None],
) -> bytes:
    """One real pickle per block, for what cannot be put together from parts."""
    out = []
    for i, extra in enumerate(extras):
        tokens = ids.take(i * block_size, (i + 1) * block_size)
        parent = digest(_pickle_block(parent, tokens, extra))
        out.append(parent)
    return b"".join(out)


def chain_hashes(
    ids: "_core.TokenIds",
    block_size: int,
    algorithm: str,
    parent: bytes,
    extra_keys: ExtraKeys | None = None,
    *,
    own_parent: bool = True,
) -> bytes:
    """Digests of all full blocks, one after the other; `hash_tokens` without its checks.

    Args:
        ids: Token ids.
        block_size: Tokens per hash block.
        algorithm: One of ``ALGORITHMS``.
        parent: Digest before the first block, or the start hash.
        extra_keys: One tuple or None per full block.
        own_parent: Whether no extra key can be the same object as ``parent``.
    """
    encoding, find_digest, _ = _kind(algorithm)
    digest = find_digest()
    blocks = len(ids) // block_size
    extras = None if extra_keys is None else _check_extras(extra_keys, blocks)
    # No generators here: CPython 3.12 crashes when memory runs out as it makes one.
    if extras is not None and extras.count(None) == len(extras):
        extras = None
    if encoding == _core.ENCODING_CBOR:
        parts = None if extras is None else _serialise_extras(extras, canonical_cbor)
        return _core.hash_chain(ids, block_size, encoding, digest, parent, parts)
    if not _pickler_is_known():
        return _exact_chain(ids, block_size, digest, parent, extras or [None] * blocks)
    if extras is None:
        return _core.hash_chain(ids, block_size, encoding, digest, parent)
    if not own_parent and extras[0] is not None:
        # The caller's parent may itself be among the caller's extra keys.
        first: bytes = digest(_pickle_block(parent, ids.take(0, block_size), extras[0]))
        rest = ids.part(block_size, blocks * block_size)
        return first + chain_hashes(rest, block_size, algorithm, first, extras[1:])
    parts = _serialise_extras(extras, _pickled_extra)
    if _core.splits_frames(block_size, max([len(part) for part in parts if part is not None])):
        return _exact_chain(ids, block_size, digest, parent, extras)
    return _core.hash_chain(ids, block_size, encoding, digest, parent, parts)


def _check_parent(given: Any) -> bytes:
    try:
        parent = given if type(given) is bytes else bytes(memoryview(given))
    except TypeError:
        raise HashInputError(f"`parent` must be bytes-like, got {type(given).__name__}") from None
    if len(parent) not in (16, 32):
        raise HashInputError(f"`parent` must be a digest of 16 or 32 bytes, got {len(parent)}")
    return parent


def hash_tokens(
    token_ids: Tokens | _core.TokenIds,
    block_size: int = 16,
    algorithm: str = "sha256",
    seed: str | None = None,
    parent: Any = None,
    extra_keys: ExtraKeys | None = None,
) -> BlockHashes:
    """Chained hashes of the full blocks of a token sequence, as vLLM computes them.

    Tokens past the last full block are left out. Arrays and tensors of int32 or int64 are read in
    place and must not change meanwhile. The GIL is released from
    ``kvmask._core.HASH_GIL_MIN_TOKENS`` tokens on.

    Args:
        token_ids: list or tuple of int; or array, NumPy array or CPU tensor of int32 or int64, in
            one dimension. Values from 0 to 2**63 - 1.
        block_size: Tokens per hash block.
        algorithm: One of ``ALGORITHMS``.
        seed: Text the start hash derives from, see `start_hash`. Excludes ``parent``.
        parent: Digest to continue from (bytes-like).
        extra_keys: One tuple or None per full block; None for none at all. Tuples are hashed as the
            objects they are: see the module's note on identity, and `kvmask.hashing.extra_keys`.

    Returns:
        BlockHashes: one digest per full block. Its ``origin`` holds ``block_size``, ``algorithm``
        and the start hash, or ``parent``.

    Raises:
        HashInputError: Token ids, parent or extra keys that have no exact digest, or a start hash
            that is random in the engine.
        ArgumentError: A number is out of range, or both ``seed`` and ``parent`` are given.
        MissingDependencyError: An xxHash algorithm without the package ``xxhash``.

    >>> hash_tokens(range(16), seed="vllm-none-hash")[0].hex()[:16]
    'fe8fa5dda3210d0c'
    """
    size = check_integer(block_size, "block_size", 1, MAX_BLOCK_TOKENS)
    width = digest_size(algorithm)
    own_parent = type(parent) is not bytes
    if parent is None:
        start = start_hash(algorithm, seed)
    elif seed is not None:
        raise ArgumentError("`seed` and `parent` exclude each other")
    else:
        start = _check_parent(parent)
    ids = token_ids if type(token_ids) is _core.TokenIds else _core.TokenIds(token_ids)
    chain = chain_hashes(ids, size, algorithm, start, extra_keys, own_parent=own_parent)
    return BlockHashes(chain, width, origin=DigestOrigin(size, algorithm, start))


class BlockHasher:
    """Block hashes of a request that grows.

    For one thread at a time. A copy goes on by itself, from the tokens seen so far.

    Args:
        block_size: Tokens per hash block.
        algorithm: One of ``ALGORITHMS``.
        seed: As for `hash_tokens`. Excludes ``parent``.
        parent: Digest to continue from.

    Attributes:
        hashes: list of bytes, one digest per full block so far.
        num_tokens: Tokens seen so far.
        origin: DigestOrigin of the digests.

    Raises:
        ArgumentError: A number is out of range, or both ``seed`` and ``parent`` are given.
        HashInputError: As for `hash_tokens`.

    >>> hasher = BlockHasher(4, seed="vllm-none-hash")
    >>> len(hasher.extend([1, 2, 3])), len(hasher.extend([4, 5])), hasher.num_tokens
    (0, 1, 5)
    """

    def __init__(
        self,
        block_size: int = 16,
        algorithm: str = "sha256",
        seed: str | None = None,
        parent: Any = None,
    ) -> None:
        self.block_size = check_integer(block_size, "block_size", 1, MAX_BLOCK_TOKENS)
        self.algorithm = algorithm
        self.digest_size = digest_size(algorithm)
        if parent is not None and seed is not None:
            raise ArgumentError("`seed` and `parent` exclude each other")
        # A copy is an object of our own, which no extra key can be.
        own = bytes(bytearray(_check_parent(parent))) if parent is not None else None
        self._last = own if own is not None else start_hash(algorithm, seed)
        self.origin = DigestOrigin(self.block_size, algorithm, self._last)
        self._tail: list[int] = []
        self.hashes: list[bytes] = []

    def __copy__(self) -> Self:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        made._tail, made.hashes = list(self._tail), list(self.hashes)
        return made

    @property
    def num_tokens(self) -> int:
        """Tokens seen so far."""
        return len(self.hashes) * self.block_size + len(self._tail)

    def block_hashes(self) -> BlockHashes:
        """The digests so far, with their origin.

        A view, not a copy: digests of later blocks are not in it, and ``hashes`` must not lose any
        while it is in use.

        >>> hasher = BlockHasher(4, seed="vllm-none-hash")
        >>> _ = hasher.extend(range(9))
        >>> len(hasher.block_hashes()), hasher.block_hashes().origin.block_size
        (2, 4)
        """
        return BlockHashes.from_list(self.hashes, origin=self.origin)

    def extend(self, token_ids: Tokens, extra_keys: ExtraKeys | None = None) -> list[bytes]:
        """Append tokens; hash the blocks they complete.

        Nothing is appended when this raises.

        Args:
            token_ids: As for `hash_tokens`; may be empty.
            extra_keys: One entry per block completed by this call.

        Returns:
            list of bytes: the digests of those blocks.

        Raises:
            HashInputError: As for `hash_tokens`.
        """
        ids = _core.TokenIds(token_ids)
        size, parent, new = self.block_size, self._last, b""
        need = size - len(self._tail) if self._tail else 0
        blocks = (len(self._tail) + len(ids)) // size
        extras = _check_extras(extra_keys, blocks) if extra_keys is not None else None
        if len(ids) < need:
            self._tail += ids.take(0, len(ids))
            return []
        if need:
            # Only this block is copied; those after it are read where they lie.
            block = _core.TokenIds((*self._tail, *ids.take(0, need)))
            new = parent = chain_hashes(block, size, self.algorithm, parent, extras and extras[:1])
            ids = ids.part(need, len(ids))
            extras = extras and extras[1:]
        tail = ids.take(len(ids) // size * size, len(ids))
        new += chain_hashes(ids, size, self.algorithm, parent, extras)
        digests = _core.split_digests(new, self.digest_size)
        left = list(tail)
        # The one step that may need memory comes first: then all of it is done.
        self.hashes += digests
        self._tail = left
        if digests:
            self._last = digests[-1]
        return digests
