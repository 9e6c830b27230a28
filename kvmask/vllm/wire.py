"""How a request's digests travel to a worker in another process: only those that it lacks.

vLLM's protocol sends all digests of a request with every lookup, some 8 MiB for a million tokens.
But a waiting request is looked up again and again, and a conversation begins as it did before. So
both sides remember the last lists that travelled, in the same order. `Sent` finds how much of a
request the worker has, and `Received` puts the list together again.

What is said besides the digests stands above the bits of `kvmask.vllm.local` in the number of
tokens. The last digest that both sides have travels along: a digest stands for all tokens before
it, so a worker that has another one there, or that has forgotten the list, asks for everything.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from kvmask.vllm.releases import BlobBlockHashes

# Lists that both sides remember. The oldest goes first.
KEPT = 8
# Digests from one that the scheduler remembers of a list to the next.
STEP = 64
# The hit of a worker that must be sent all digests. No request has so many tokens.
SEND_ALL = (1 << 32) - 1

_FIELD = 32
_MASK = (1 << _FIELD) - 1
_ABOVE = 64  # what is said of the digests begins at this bit
# A lookup of no tokens with digests that no worker has. One that knows this protocol asks for all;
# vLLM's own finds no hit.
PROBE = _MASK << _ABOVE


class Sent:
    """What the worker has been sent. One thread may use it."""

    def __init__(self) -> None:
        self._lists: dict[int, tuple[int, bytes, list[bytes]]] = {}
        self._last = 0

    def message(self, number: int, digests: Sequence[bytes]) -> tuple[int, Sequence[bytes]]:
        """What is to be sent for a lookup.

        Args:
            number: Tokens of the request, and what `kvmask.vllm.local` adds.
            digests: All digests of the request, at least one.

        Returns:
            (the number to send, the digests to send).
        """
        base, shared = self._longest(digests)
        n, new = len(digests), 0
        if shared < n:
            if base and shared == self._lists[base][0]:
                del self._lists[base]
            new = self._last = self._last % (_MASK - 1) + 1
            self._lists[new] = (n, digests[n - 1], list(digests[STEP - 1 : n : STEP]))
            if len(self._lists) > KEPT:
                del self._lists[next(iter(self._lists))]
        said = base | shared << _FIELD | new << 2 * _FIELD
        return number | said << _ABOVE, digests[shared - 1 if base else 0 : n]

    def _longest(self, digests: Sequence[bytes]) -> tuple[int, int]:
        """(the list that has most of these digests in front, how many); zeros for none."""
        base = most = 0
        n = len(digests)
        for name, (count, last, samples) in self._lists.items():
            if count <= n and digests[count - 1] == last:
                shared = count
            else:
                fit = range(min(len(samples), n // STEP))
                # From the first digest that differs on, all do.
                steps = bisect_left(
                    fit, True, key=lambda i: samples[i] != digests[(i + 1) * STEP - 1]
                )
                shared = steps * STEP
            if shared > most:
                base, most = name, shared
        return base, most

    def clear(self) -> None:
        """The worker has nothing any more."""
        self._lists.clear()


class Received:
    """What a scheduler has sent. One thread may use it."""

    def __init__(self) -> None:
        self._lists: dict[int, memoryview] = {}

    def whole(self, number: int, digests: Any) -> tuple[int, Any]:
        """All digests of a lookup.

        Args:
            number: As `Sent.message` made it.
            digests: vLLM's view of the digests that came with it.

        Returns:
            (number of tokens as `kvmask.vllm.local` packs it, vLLM's view of all digests). The
            view is None when they must all be sent.
        """
        said, number = number >> _ABOVE, number & (1 << _ABOVE) - 1
        base, shared, new = said & _MASK, said >> _FIELD & _MASK, said >> 2 * _FIELD
        size, came = digests._hash_len, memoryview(digests._blob)
        known = memoryview(b"")
        if base:
            kept = self._lists.get(base)
            end = shared * size
            if kept is None or len(kept) < end or kept[end - size : end] != came[:size]:
                self._lists.clear()
                return number, None
            known, came = kept[:end], came[size:]
            if new and len(kept) == end:
                del self._lists[base]
        whole = memoryview(b"".join((known, came))) if known and came else known or came
        if new:
            self._lists.pop(new, None)  # of a scheduler that was there before
            self._lists[new] = whole
            if len(self._lists) > KEPT:
                del self._lists[next(iter(self._lists))]
        return number, BlobBlockHashes(whole, size)

    def clear(self) -> None:
        """Forget all lists."""
        self._lists.clear()


def is_thrifty(number: int) -> bool:
    """Whether a lookup says which digests it left out."""
    return number >> _ABOVE != 0
