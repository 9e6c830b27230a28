"""Renewals: what a hit makes worth keeping in the store, asked again later.

A store such as Mooncake renews the lease of each key that an existence call finds, and evicts the
keys whose lease ends first. A lookup that asks for every key of a prompt keeps them all alive.
`staged` asks for fewer, and leaves out what the engine holds. The difference is made up here, off
the hot path: `Renewals.note` takes the hit of a lookup and returns at once, and
`Renewals.next_keys` says later which keys to ask for.

Three things are worth keeping, in this order:

1. What the engine holds: the lookup did not ask for it, and other engines may need it.
2. At each length below the hit where an earlier hit or request ended, the blocks that a hit there
   rests on: a request that branches off there can then use them.
3. When a whole prompt is hit again, all other blocks below the hit that the lookup left out. Such a
   prompt is in use, and no one knows yet where another request leaves it. Of a prompt that goes on
   past its hit they are not renewed: they would take the place of blocks that are used.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from kvmask._core import Bitset, BlockHashes, HitEnds, build_keys, check_integer, shown
from kvmask.checks import check_function, check_number
from kvmask.coordinator import Hit
from kvmask.errors import ArgumentError
from kvmask.plans.held import Held
from kvmask.plans.lookup import LookupPlan
from kvmask.plans.scheme import GroupScheme, Scheme

# With this many keys a batch takes some 40 us of Python.
BATCH_KEYS = 128
# Prefixes looked at in one go; each takes about 10 ns, or two cache misses.
_SCAN = 256
# What lookups may save up for renewals, in keys: about what ten long prompts need.
_MOST_CREDIT = 1 << 16
# Keys remembered as renewed, per interval. Beyond it nothing is renewed.
_MOST_RENEWED = 1 << 18

# Sets that hold them. One large set would take milliseconds to grow, and as long to be freed.
_SETS = 256
# Keys freed in one go, or a few more.
_FREED = 512

_Job = tuple[Scheme, BlockHashes, int, Hit]
_IDLE: Iterator[list[str]] = iter(())


class Renewals:
    """Which keys to ask for again, and when. Safe to share by threads.

    Args:
        interval: Seconds above 0. A key is renewed at most once in this time. One that stays worth
            keeping is renewed at least once in twice this time, which should be less than the
            store's lease.
        share: Keys renewed are at most this share of those that ``exact`` would have asked, from 0
            to 1.
        pending: Hits that wait, at least 1. With more, the oldest are dropped.
        clock: Monotonic seconds, for tests.

    Attributes:
        renewed: Keys returned so far.
        dropped: Hits that were dropped because too many waited, or cut off because the share was
            used up.

    Raises:
        ArgumentError: A number is out of range.
        TypeError: An argument is of another kind.
    """

    def __init__(
        self,
        *,
        interval: float = 4.0,
        share: float = 0.25,
        pending: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_number(interval, "interval")
        check_number(share, "share")
        check_function(clock, "clock")
        if not 0 < interval <= sys.float_info.max:
            raise ArgumentError(f"`interval` must be more than 0 and finite, got {shown(interval)}")
        if not 0 <= share <= 1:
            raise ArgumentError(f"`share` must be from 0 to 1, got {shown(share)}")
        self.interval = float(interval)
        self.share = float(share)
        self.renewed = 0
        self.dropped = 0
        self._clock = clock
        self._ends = HitEnds()
        self._jobs: deque[_Job] = deque()
        self._most_jobs = check_integer(pending, "pending", 1, 1 << 20)
        self._work = _IDLE
        self._left: list[str] = []  # of the last piece of work, not yet looked at
        self._credit = 0.0
        # Keys renewed in this interval and in the one before, by their hash, and those to be freed.
        self._new = _sets()
        self._old = _sets()
        self._gone: list[set[str]] = []
        self._count = 0  # in this interval
        self._turned = clock()
        self._lock = threading.Lock()

    def note(self, plan: LookupPlan) -> bool:
        """Take a lookup that is over. Takes less than a microsecond, and never waits for the store.

        Args:
            plan: The lookup. Its digests are kept for a short time, and must not change.

        Returns:
            Whether there is something to renew of it.

        Raises:
            PlanStateError: It is not over.
        """
        hit = plan.result
        if hit.cause is not None or (hit.held is None and hit.asked >= hit.exact_keys):
            return False  # nobody answered, or the lookup asked for all that stock asks for
        # No lock: the hot path must not wait for a batch that is being made.
        self._jobs.append((plan.scheme, plan.hashes, plan.num_tokens, hit))
        if len(self._jobs) > self._most_jobs:
            try:
                self._jobs.popleft()
            except IndexError:
                return True
            self.dropped += 1
        return True

    @property
    def pending(self) -> bool:
        """Whether `next_keys` has something to do."""
        return bool(self._jobs) or bool(self._left) or self._work is not _IDLE

    def next_keys(self) -> list[str]:
        """The next keys to ask the store for; empty when this step found none.

        One step looks at `BATCH_KEYS` keys at most. Its answers are not needed.
        """
        with self._lock:
            self._turn()
            keys = self._left
            if not keys:
                found = next(self._work, None)
                if found is None:
                    try:
                        job = self._jobs.popleft()
                    except IndexError:
                        self._work = _IDLE
                        return []
                    self._work = self._pieces(*job)
                    return []
                keys = found
            piece, self._left = keys[:BATCH_KEYS], keys[BATCH_KEYS:]
            new, old = self._new, self._old
            due = []
            for key in piece:
                i = hash(key) % _SETS
                if key not in new[i] and key not in old[i]:
                    due.append(key)
            room = min(int(self._credit), _MOST_RENEWED - self._count)
            if len(due) > room:
                due = due[: max(0, room)]
                self._left, self._work = [], _IDLE
                self.dropped += 1
            for key in due:
                new[hash(key) % _SETS].add(key)
            self._count += len(due)
            self._credit -= len(due)
            self.renewed += len(due)
            return due

    def drop(self) -> None:
        """Drop the hits that wait, as when the store does not answer."""
        with self._lock:
            self.dropped += len(self._jobs)
            self._jobs.clear()
            self._work, self._left = _IDLE, []

    def clear(self) -> None:
        """Forget all that was noted and renewed, as when the weights have changed."""
        with self._lock:
            self._jobs.clear()
            self._work, self._left = _IDLE, []
            self._new, self._old, self._gone, self._count = _sets(), _sets(), [], 0
            self._ends.clear()
            self._credit = 0.0

    def _turn(self) -> None:
        """Forget the keys whose interval is over."""
        freed = 0
        while self._gone and freed < _FREED:
            freed += len(self._gone.pop())
        now = self._clock()
        if now - self._turned < self.interval:
            return
        late = now - self._turned >= 2 * self.interval
        self._gone += filter(None, self._old)
        if late:
            self._gone += filter(None, self._new)
        self._old = _sets() if late else self._new
        self._new, self._count = _sets(), 0
        self._turned = now

    def _pieces(
        self, scheme: Scheme, hashes: BlockHashes, num_tokens: int, hit: Hit
    ) -> Iterator[list[str]]:
        """The work of one hit, in steps of bounded size."""
        coord = scheme.coord
        asked = hit.exact_keys or _stock_keys(scheme, hashes, num_tokens)
        self._credit = min(self._credit + self.share * asked, _MOST_CREDIT)
        unit = coord.hit_alignment
        step = unit // coord.hash_block_size
        whole = min(num_tokens // unit, len(hashes) // step)
        held = hit.held
        own = min(0 if held is None else held.tokens // unit, whole)
        end = max(min(hit.length // unit, whole), own)
        if held is not None:
            yield from self._held(scheme, hashes, held, end * unit)
        if end:
            visits = self._ends.visit(hashes, end * step - 1)
            if end == own:
                yield from self._tails(scheme, hashes, end * unit)
            for stop in range(end, 1, -_SCAN):
                found = self._ends.within(hashes, step, max(1, stop - _SCAN), stop)
                yield []
                for steps in reversed(found):
                    yield from self._tails(scheme, hashes, steps * unit)
            if visits and end == min((num_tokens - 1) // unit, whole):
                yield from self._rest(scheme, hashes, end * unit)
        if whole > end:
            self._ends.visit(hashes, whole * step - 1, False)

    def _held(
        self, scheme: Scheme, hashes: BlockHashes, held: Held, length: int
    ) -> Iterator[list[str]]:
        """What the engine holds, below a length."""
        for group in scheme.groups:
            if group.cacheable and held.groups[group.index]:
                scale = group.block_size // scheme.coord.hash_block_size
                blocks = held.blocks(group, length // group.block_size)
                yield from _keys(group, hashes, blocks, 0, scale)

    def _tails(self, scheme: Scheme, hashes: BlockHashes, length: int) -> Iterator[list[str]]:
        """What a hit of this length rests on, beside full attention."""
        for group, run in zip(scheme.groups, scheme.core.tail_blocks(length), strict=True):
            if run is not None:
                scale = _scale(scheme, group)
                first, bits = run
                bits = bits[: max(0, len(hashes) // scale - first)]
                yield from _keys(group, hashes, bits, first, scale)

    def _rest(self, scheme: Scheme, hashes: BlockHashes, length: int) -> Iterator[list[str]]:
        """All blocks that stock's lookup asks for below a length, beside full attention."""
        whole = scheme.coord.partial_hits
        masks = None if whole else scheme.core.reach_masks(length, 0, None, dense=True, states=True)
        for group in scheme.groups:
            if not group.cacheable or group.kind == "full":
                continue
            scale = _scale(scheme, group)
            mask = None if masks is None else masks[group.index]
            if mask is None:
                mask = Bitset.ones(length // (scale * scheme.coord.hash_block_size))
            yield from _keys(group, hashes, mask, 0, scale)


def _sets() -> list[set[str]]:
    return list(map(set, [()] * _SETS))


def _scale(scheme: Scheme, group: GroupScheme) -> int:
    """Digests per block, as lookups count blocks."""
    coord = scheme.coord
    return 1 if coord.partial_hits else group.block_size // coord.hash_block_size


def _stock_keys(scheme: Scheme, hashes: BlockHashes, num_tokens: int) -> int:
    """How many keys stock asks for. A lookup that could not gain anything has not counted them."""
    coord = scheme.coord
    length = num_tokens // coord.hit_alignment * coord.hit_alignment
    masks: Any = [None] * len(scheme.groups)
    if not coord.partial_hits:
        masks = scheme.core.reach_masks(length, 0, None, dense=True, states=True)
    count = 0
    for group, mask in zip(scheme.groups, masks, strict=True):
        if group.cacheable:
            scale = _scale(scheme, group)
            n = min(len(hashes) // scale, length // (scale * coord.hash_block_size))
            count += (n if mask is None else mask[:n].count()) * len(group.namespaces)
    return count


def _keys(
    group: GroupScheme, hashes: BlockHashes, blocks: Bitset, start: int, scale: int
) -> Iterator[list[str]]:
    """Keys of a group's blocks from ``start`` on, some at a time."""
    for first in range(0, len(blocks), BATCH_KEYS):
        bits = blocks[first : first + BATCH_KEYS]
        if bits.count():
            yield build_keys(group.namespaces, hashes, bits, start + first, scale)
