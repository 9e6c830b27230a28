"""SGLang's own hash: the pages of its HiCache.

The hash of a page is SHA-256 over two parts:

- the hash of the page before, 32 bytes; absent for the first page;
- the page's token ids, four bytes each, little endian. When an id of the page needs more, the byte
  ``ff`` and then eight bytes each.

With EAGLE a page is made of pairs: each token and its successor.

A request with an extra key or a cache salt has a seed in place of the page before the first. It is
the SHA-256 of ``"sglang-cache-namespace-v1"`` and two parts, for the extra key and for the salt:
``00`` when it is absent, else ``01``, its length in UTF-8 (eight bytes, little
endian) and the text.

Sources: `mem_cache/utils.py` and `mem_cache/cpp_utils/hash_binding.cpp` of SGLang 0.5.23.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

from kvmask import _core
from kvmask._core import MAX_BLOCK_TOKENS, BlockHashes, check_integer
from kvmask.errors import ArgumentError, HashInputError
from kvmask.hashing.digests import sha256
from kvmask.hashing.tokens import Tokens

__all__ = ["sglang_page_hashes", "sglang_seed"]


def _utf8(value: str, name: str) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"`{name}` must be a str, got {type(value).__name__}")
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise HashInputError(f"`{name}` must be valid Unicode, got {value!r}") from None


def sglang_seed(extra_key: str | None = None, cache_salt: str | None = None) -> bytes | None:
    """What stands in for the page before the first; None when a request has neither.

    Args:
        extra_key: The request's extra key.
        cache_salt: The request's salt.

    Raises:
        HashInputError: One of them is no valid Unicode.

    >>> sglang_seed() is None
    True
    """
    if extra_key is None and cache_salt is None:
        return None
    seed = hashlib.sha256(b"sglang-cache-namespace-v1")
    for name, part in (("extra_key", extra_key), ("cache_salt", cache_salt)):
        if part is None:
            seed.update(b"\x00")
            continue
        text = _utf8(part, name)
        seed.update(b"\x01" + len(text).to_bytes(8, "little") + text)
    return seed.digest()


def sglang_page_hashes(
    token_ids: Tokens,
    page_size: int,
    parent: Any = None,
    extra_key: str | None = None,
    cache_salt: str | None = None,
    *,
    eagle: bool = False,
) -> BlockHashes:
    """Chained hashes of the full pages of a token sequence, as SGLang's HiCache computes them.

    Args:
        token_ids: As `kvmask.hash_tokens` takes them.
        page_size: Tokens per page.
        parent: Hash of the page before (bytes-like), to continue. Excludes the next two.
        extra_key: The request's extra key.
        cache_salt: The request's salt.
        eagle: Whether a page is made of pairs of neighbours, as with EAGLE. Slower.

    Returns:
        BlockHashes: one digest of 32 bytes per full page.

    Raises:
        HashInputError: Token ids, a parent or text that cannot be hashed.
        ArgumentError: ``parent`` beside one of those that it excludes.

    >>> sglang_page_hashes(range(16), 4)[0].hex()[:16]
    'baed642339816aff'
    """
    size = check_integer(page_size, "page_size", 1, MAX_BLOCK_TOKENS // 2)
    start = sglang_seed(extra_key, cache_salt)
    if parent is not None:
        if start is not None:
            raise ArgumentError("`parent` excludes `extra_key` and `cache_salt`")
        start = bytes(memoryview(parent))
        if len(start) != 32:
            raise HashInputError(f"`parent` must be a digest of 32 bytes, got {len(start)}")
    ids = _core.TokenIds(token_ids)
    if eagle:
        tokens = ids.take(0, len(ids))
        pairs = [token for pair in itertools.pairwise(tokens) for token in pair]
        ids, size = _core.TokenIds(pairs), 2 * size
    chain = _core.hash_chain(ids, size, _core.ENCODING_PAGES, sha256(), start or b"")
    return BlockHashes(chain, 32)
