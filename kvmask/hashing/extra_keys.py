"""What besides its tokens goes into a block's hash: adapter, media, salt, prompt embeddings.

One tuple per block, in this order, or None when there is nothing to put in:

================  =================================  ==========================  ==================
part              vLLM 0.32 and later                vLLM 0.24 to 0.28           blocks
================  =================================  ==========================  ==================
adapter (LoRA)    ``("lora", name, path)``           ``name``                    all
each medium       ``("mm", identifier, offset)``     ``(identifier, offset)``    those it touches
cache salt        ``("cache_salt", salt)``           ``salt``                    the first
embeddings        ``("prompt_embeds", digest)``      ``digest``                  all
================  =================================  ==========================  ==================

`offset` is where the medium starts relative to the block, negative when it started earlier;
`digest` is SHA-256 of the block's rows of the embedding tensor. The older form cannot tell an
adapter "S" from a salt "S", so the two forms differ and must not share a namespace.

Sources: `generate_block_hash_extra_keys` and the functions it calls, `v1/core/kv_cache_utils.py` of
vLLM 0.24.0, 0.28.0, 0.32.0.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kvmask._core import MAX_BLOCK_TOKENS, MAX_TOKENS, check_integer
from kvmask.errors import ArgumentError, HashInputError

__all__ = ["Medium", "block_extra_keys"]


class Medium(NamedTuple):
    """One image, audio or video among the tokens.

    Attributes:
        identifier: The engine's hash of its content.
        offset: First placeholder token.
        length: Number of placeholder tokens.
    """

    identifier: str
    offset: int
    length: int


def _is_tagged(release: str) -> bool:
    try:
        major, minor = (int(part) for part in release.split(".")[:2])
    except (ValueError, AttributeError):
        raise ArgumentError(
            f"`release` must be a vLLM release such as '0.32', got {release!r}"
        ) from None
    if (major, minor) >= (0, 32):
        return True
    if (0, 24) <= (major, minor) <= (0, 28):
        return False
    raise ArgumentError(f"`release` must be 0.24 to 0.28, or 0.32 or later, got {release!r}")


def _sorted_media(media: Iterable[Medium | tuple[str, int, int]]) -> list[Medium]:
    out = [Medium(*item) for item in media]
    for before, after in itertools.pairwise(out):
        # Where media overlap, what the engine puts in depends on where it resumed.
        if after.offset < before.offset + before.length:
            raise HashInputError(
                "`media` must be sorted by offset and must not overlap, "
                f"got {before.offset} + {before.length} before {after.offset}"
            )
    return out


def block_extra_keys(
    num_blocks: int,
    block_size: int = 16,
    *,
    adapter: tuple[str, str] | None = None,
    media: Iterable[Medium | tuple[str, int, int]] = (),
    cache_salt: str | None = None,
    prompt_embeds: Sequence[bytes] | None = None,
    release: str = "0.32",
    first_block: int = 0,
) -> list[tuple[Any, ...] | None]:
    """Extra keys per block, as vLLM generates them for a request.

    Strings are put in as the objects they are, because pickle tells one object twice from two
    equal ones: pass the same object exactly where the engine would.

    Args:
        num_blocks: Blocks to make keys for.
        block_size: Tokens per hash block.
        adapter: Name and path of the LoRA adapter. The path is left out before 0.32.
        media: Media in the order of their offsets, not overlapping.
        cache_salt: The request's salt; empty is none.
        prompt_embeds: SHA-256 digests of the embeddings of the blocks from ``first_block`` on.
        release: vLLM release whose form to use.
        first_block: Index of the first of the blocks in the request.

    Returns:
        One tuple or None per block, as `kvmask.hash_tokens` takes them.

    Raises:
        ArgumentError: An unknown release, a number out of range, or too few digests of embeddings.
        HashInputError: Media that overlap or are out of order.

    >>> block_extra_keys(2, 4, media=[("cat", 2, 4)], cache_salt="s")
    [(('mm', 'cat', 2), ('cache_salt', 's')), (('mm', 'cat', -2),)]
    """
    num_blocks = check_integer(num_blocks, "num_blocks", 0, MAX_TOKENS)
    block_size = check_integer(block_size, "block_size", 1, MAX_BLOCK_TOKENS)
    first_block = check_integer(first_block, "first_block", 0, MAX_TOKENS)
    tagged = _is_tagged(release)
    items = _sorted_media(media)
    if prompt_embeds is not None and len(prompt_embeds) != num_blocks:
        raise ArgumentError(
            "`prompt_embeds` must have one digest per block, "
            f"got {len(prompt_embeds)} and {num_blocks}"
        )
    common: list[Any] = []
    if adapter is not None:
        name, path = adapter
        common.append(("lora", name, path) if tagged else name)
    shared = tuple(common) or None
    out: list[tuple[Any, ...] | None] = []
    next_medium = 0
    for i in range(num_blocks):
        start = (first_block + i) * block_size
        stop = start + block_size
        keys = list(common)
        while next_medium < len(items):
            medium = items[next_medium]
            end = medium.offset + medium.length
            if start >= end:
                next_medium += 1
                continue
            if stop <= medium.offset:
                break
            at = medium.offset - start
            keys.append(("mm", medium.identifier, at) if tagged else (medium.identifier, at))
            if stop < end:
                break
            next_medium += 1
        if start == 0 and cache_salt:
            keys.append(("cache_salt", cache_salt) if tagged else cache_salt)
        if prompt_embeds is not None:
            digest = prompt_embeds[i]
            keys.append(("prompt_embeds", digest) if tagged else digest)
        # Blocks with nothing of their own share one tuple, which is then serialised once.
        out.append(tuple(keys) if len(keys) > len(common) else shared)
    return out
