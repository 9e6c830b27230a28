"""Block hashes of a request, in place of vLLM's own hasher.

`request_block_hasher` takes what vLLM's `get_request_block_hasher` takes and returns what it
returns: a function from a request to the hashes of its new full blocks. Digests are equal to vLLM's
(`kvmask.hashing.chain`); whatever cannot be hashed exactly goes to vLLM's function, per request:

- requests with media or prompt embeddings, whose extra keys depend on where hashing resumed;
- token ids that are no plain ints, whose pickle is another one;
- a few blocks with extra keys, for which it is the faster one.

A hash function other than vLLM's four, and hashes that look ahead (vLLM 0.33 with a drafter), stay
with vLLM altogether.

Extra keys come from vLLM's `generate_block_hash_extra_keys`, so their form is that of the release.
Mirrors `get_request_block_hasher` of vLLM 0.24.0, 0.28.0, 0.32.0 and 0.33.0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from vllm.utils import hashing
from vllm.v1.core import kv_cache_utils

from kvmask import _core
from kvmask.errors import HashInputError, MissingDependencyError, UnsupportedReleaseError
from kvmask.hashing.chain import ALGORITHMS, chain_hashes, digest_size
from kvmask.vllm import seams
from kvmask.vllm.acting import ACTING
from kvmask.vllm.releases import logger

Hasher = Callable[[Any], list[Any]]

# vLLM's own, also where `install` has put this module in place of it.
_own_hasher = kv_cache_utils.get_request_block_hasher


def algorithm_of(hash_fn: Callable[[Any], bytes]) -> str | None:
    """The name of one of vLLM's hash functions; None for any other."""
    for name in ALGORITHMS:
        if getattr(hashing, name, None) is hash_fn:
            return name
    return None


# The seam, and the module that has it. An engine has imported that long before its connector.
_SEAM = "engine.block_hasher"
_ENGINE = "vllm.v1.engine.core"

# With fewer new blocks, vLLM's own function takes less time when there are extra keys: serialising
# them apart costs about four blocks.
FEW_BLOCKS = 4


def _extra_keys(request: Any, start: int, blocks: int, size: int) -> list[Any]:
    """Extra keys of at least two blocks of a request without media and prompt embeddings.

    The adapter is in every block alike, the salt in the first: two calls tell them all. All blocks
    share the second one's tuple, which has the same objects in it as one made for each.
    """
    generate = kv_cache_utils.generate_block_hash_extra_keys
    first, _ = generate(request, start, start + size, 0)
    other, _ = generate(request, start + size, start + 2 * size, 0)
    return [first] + [other] * (blocks - 1)


def request_block_hasher(
    hash_block_size: int, caching_hash_fn: Callable[[Any], bytes], *args: Any, **kwargs: Any
) -> Hasher:
    """Make a function that hashes the new full blocks of a request.

    Args:
        hash_block_size: Tokens per hash block.
        caching_hash_fn: vLLM's hash function; `init_none_hash` must have been called for it before
            the first request comes.
        args: Further arguments of the release's own function.
        kwargs: The same by name.

    Returns:
        A function from a request to a list of digests.
    """
    own = _own_hasher(hash_block_size, caching_hash_fn, *args, **kwargs)
    algorithm = algorithm_of(caching_hash_fn)
    if algorithm is None or any(args) or any(kwargs.values()):
        return own
    name, size, width = algorithm, hash_block_size, digest_size(algorithm)

    def hasher(request: Any) -> list[Any]:
        if not ACTING.on:
            return own(request)
        try:
            return hashed(request)
        except Exception as e:
            digests = own(request)
            ACTING.trip("engine.block_hasher", e)
            return digests

    def hashed(request: Any) -> list[Any]:
        known = request.block_hashes
        start = len(known) * size
        blocks = (request.num_tokens - start) // size
        if blocks <= 0:
            return []
        if request.mm_features or request.prompt_embeds is not None:
            return own(request)
        has_extras = request.lora_request or (start == 0 and request.cache_salt)
        if has_extras and blocks < FEW_BLOCKS:
            return own(request)
        # NONE_HASH is set anew by each init_none_hash.
        parent = known[-1] if known else kv_cache_utils.NONE_HASH
        if type(parent) is not bytes:
            return own(request)
        extras = _extra_keys(request, start, blocks, size) if has_extras else None
        try:
            # The list behind `all_token_ids`, read from where hashing stopped.
            tokens = _core.TokenIds(request._all_token_ids, start)
            flat = chain_hashes(tokens, size, name, parent, extras)
        except (HashInputError, MissingDependencyError):
            return own(request)
        return _core.split_digests(flat, width)

    return hasher


def place_for_next_engine() -> None:
    """Let the engine that is being built hash with `request_block_hasher`.

    A connector is made before its engine makes its hasher. The function that stands in the engine's
    module for that while puts vLLM's own back as soon as it is called: other engines of the process
    keep theirs.
    """
    if _ENGINE not in sys.modules or _SEAM in seams.placed():
        return
    try:
        seams.place({_SEAM: _for_this_engine})
    except UnsupportedReleaseError as e:
        logger.warning("The block hasher stays vLLM's: %s", e)


def withdraw() -> None:
    """Take back what was placed for an engine that then made no hasher."""
    engine = sys.modules.get(_ENGINE)
    if getattr(engine, "get_request_block_hasher", None) is _for_this_engine:
        seams.restore([_SEAM])


def _for_this_engine(*args: Any, **kwargs: Any) -> Hasher:
    seams.restore([_SEAM])
    return request_block_hasher(*args, **kwargs)
