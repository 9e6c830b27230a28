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

Where media overlap (audio within the range of a video), vLLM puts in only the first of them until
it ends, and none once the one that starts last has ended. Blocks that differ in another medium then
share a digest. `block_extra_keys` gives vLLM's tuples with a warning, or with ``strict`` every
medium that a block touches, which no vLLM does.

Sources: `generate_block_hash_extra_keys` and the functions it calls, `v1/core/kv_cache_utils.py` of
vLLM 0.24.0, 0.28.0, 0.32.0.
"""

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from kvmask._core import MAX_BLOCK_TOKENS, MAX_TOKENS, check_integer
from kvmask.errors import ArgumentError, HashInputError, KeyFormatWarning

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


def _sorted_media(media: Iterable[Medium | tuple[str, int, int]]) -> tuple[list[Medium], bool]:
    """The media, and whether some of them overlap."""
    out = []
    for item in media:
        if not isinstance(item, tuple | list) or len(item) != 3:
            raise TypeError(
                "`media` must hold (identifier, offset, length) tuples, "
                f"got {type(item).__name__} at index {len(out)}"
            )
        identifier, offset, length = item
        offset = check_integer(offset, "media offset", 0, MAX_TOKENS)
        out.append(Medium(identifier, offset, check_integer(length, "media length", 0, MAX_TOKENS)))
    overlap = False
    for before, after in itertools.pairwise(out):
        if after.offset < before.offset:
            raise HashInputError(
                f"`media` must be sorted by offset, got {before.offset} before {after.offset}"
            )
    end = 0
    for medium in out:
        overlap = overlap or medium.offset < end
        end = max(end, medium.offset + medium.length)
    return out, overlap


def _media_of_blocks(
    media: list[Medium], first: int, count: int, size: int, *, strict: bool
) -> Iterator[list[Medium]]:
    """Per block of ``size`` tokens the media that are put into its tuple.

    Args:
        media: In the order of their offsets.
        first: First block.
        count: Blocks.
        size: Tokens per block.
        strict: All that a block touches; False is vLLM's choice.
    """
    last_end = media[-1].offset + media[-1].length if media else 0
    upcoming = 0
    touched: list[Medium] = []
    for block in range(first, first + count):
        start = block * size
        stop = start + size
        if not strict and last_end <= start:
            yield []
            continue
        touched = [m for m in touched if start < m.offset + m.length]
        while upcoming < len(media) and media[upcoming].offset < stop:
            if start < media[upcoming].offset + media[upcoming].length:
                touched.append(media[upcoming])
            upcoming += 1
        if strict:
            yield touched
            continue
        # The engine stops at the first one that goes on in the next block.
        goes_on = (i for i, m in enumerate(touched) if stop < m.offset + m.length)
        yield touched[: next(goes_on, len(touched)) + 1]


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
    strict: bool = False,
) -> list[tuple[Any, ...] | None]:
    """Extra keys per block, as vLLM generates them for a request.

    Strings are put in as the objects they are, because pickle tells one object twice from two
    equal ones: pass the same object exactly where the engine would.

    Args:
        num_blocks: Blocks to make keys for.
        block_size: Tokens per hash block.
        adapter: Name and path of the LoRA adapter. The path is left out before 0.32.
        media: Media in the order of their offsets.
        cache_salt: The request's salt; an empty one counts as no salt.
        prompt_embeds: SHA-256 digests of the embeddings of the blocks from ``first_block`` on.
        release: vLLM release whose form to use.
        first_block: Index of the first of the blocks in the request.
        strict: Put in all media where some overlap, which makes digests that no engine has. All
            that share keys must then agree on it, by the contract's facts for example.

    Returns:
        One tuple or None per block, as `kvmask.hash_tokens` takes them.

    Raises:
        ArgumentError: An unknown release, a number out of range, or too few digests of embeddings.
        HashInputError: Media that are out of order.

    Warns:
        KeyFormatWarning: Media overlap, so that vLLM's tuples do not tell all of them apart.

    >>> block_extra_keys(2, 4, media=[("cat", 2, 4)], cache_salt="s")
    [(('mm', 'cat', 2), ('cache_salt', 's')), (('mm', 'cat', -2),)]
    """
    num_blocks = check_integer(num_blocks, "num_blocks", 0, MAX_TOKENS)
    block_size = check_integer(block_size, "block_size", 1, MAX_BLOCK_TOKENS)
    first_block = check_integer(first_block, "first_block", 0, MAX_TOKENS)
    tagged = _is_tagged(release)
    # Requests do not come near it, and the list below has an entry per block.
    if first_block + num_blocks > MAX_TOKENS // block_size:
        raise ArgumentError(
            f"`num_blocks` must be blocks of at most {MAX_TOKENS} tokens, "
            f"got {first_block} + {num_blocks} blocks of {block_size}"
        )
    items, overlap = _sorted_media(media)
    if overlap and not strict:
        warnings.warn(
            "`media` overlap: blocks that differ in one of them can share a digest in vLLM; "
            "`strict` tells them apart, with digests that no vLLM has",
            KeyFormatWarning,
            stacklevel=2,
        )
    if prompt_embeds is not None and len(prompt_embeds) != num_blocks:
        raise ArgumentError(
            "`prompt_embeds` must have one digest per block, "
            f"got {len(prompt_embeds)} and {num_blocks}"
        )
    common: list[Any] = []
    if adapter is not None:
        if not isinstance(adapter, tuple | list) or len(adapter) != 2:
            raise TypeError(f"`adapter` must be (name, path), got {type(adapter).__name__}")
        name, path = adapter
        common.append(("lora", name, path) if tagged else name)
    shared = tuple(common) or None
    out: list[tuple[Any, ...] | None] = []
    blocks = _media_of_blocks(items, first_block, num_blocks, block_size, strict=strict)
    for i, touched in enumerate(blocks):
        start = (first_block + i) * block_size
        keys = list(common)
        for medium in touched:
            at = medium.offset - start
            keys.append(("mm", medium.identifier, at) if tagged else (medium.identifier, at))
        if start == 0 and cache_salt:
            keys.append(("cache_salt", cache_salt) if tagged else cache_salt)
        if prompt_embeds is not None:
            digest = prompt_embeds[i]
            keys.append(("prompt_embeds", digest) if tagged else digest)
        # Blocks with nothing of their own share one tuple, which is then serialised once.
        out.append(tuple(keys) if len(keys) > len(common) else shared)
    return out
