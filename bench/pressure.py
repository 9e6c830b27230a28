"""A store under pressure: what lookups keep alive in it, and what that does to later hits.

Mooncake's master renews the lease of every key that an existence call or a get finds, and evicts
the keys whose lease ends first. A put gives none. `LeaseStore` does the same with a fixed number of
keys, on the clock of the trace, so a trace is replayed in seconds.
"""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import traces
from shapes import Shape, block_hashes

from kvmask import Bitset, FullAttention, LookupPlan, PlanTools
from kvmask.plans import Held, Renewals, drive

LEASE = 10.0  # seconds; the default of Mooncake 0.3.13, by its master's own help
CAPACITIES = (0.05, 0.1, 0.3, 0.6)
# What must be reached: tokens hit, and keys renewed, both divided by stock's.
LEAST_RATIO = 0.995
MOST_RENEWED = 0.25


class LeaseStore:
    """Keys and when their leases end. The lease that ends first leaves first.

    Args:
        capacity: Keys that it holds; None for no limit.
    """

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.now = 0.0
        self._batch: dict[str, int] = {}  # the last batch of each key
        # Batches in the order in which their leases end: asked, and put.
        self._asked: deque[tuple[float, int, list[str]]] = deque()
        self._put: deque[tuple[float, int, list[str]]] = deque()
        self._batches = 0
        self._oldest: tuple[int, Iterator[str]] = 0, iter(())

    def __len__(self) -> int:
        return len(self._batch)

    def _note(
        self, batches: deque[tuple[float, int, list[str]]], end: float, keys: list[str]
    ) -> None:
        self._batches += 1
        self._batch.update(dict.fromkeys(keys, self._batches))
        batches.append((end, self._batches, keys))

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        found = list(map(self._batch.__contains__, keys))
        present = list(itertools.compress(keys, found))
        if present:
            self._note(self._asked, self.now + LEASE, present)
        return list(map(int, found))

    def save(self, keys: Sequence[str]) -> None:
        """Ask, as a save does, and put what is missing."""
        answers = self.batch_is_exist(keys)
        missing = [key for key, answer in zip(keys, answers, strict=True) if not answer]
        if missing:
            self._note(self._put, self.now, missing)
        if self.capacity is not None:
            self._evict(len(self._batch) - self.capacity)

    def _evict(self, count: int) -> None:
        asked, put, known = self._asked, self._put, self._batch
        number, keys = self._oldest
        while count > 0:
            for key in keys:
                if known.get(key) == number:  # it was not asked or put again
                    del known[key]
                    count -= 1
                    if not count:
                        break
            else:
                first = asked if asked and (not put or asked[0][0] <= put[0][0]) else put
                _, number, rows = first.popleft()
                keys = iter(rows)
        self._oldest = number, keys


class LocalCaches:
    """The prefix caches of a few engines, and a router that prefers the engine of last time.

    Requests with equal beginnings go to one engine; one of ten goes to any. A cache keeps the ids
    that were used last.

    Args:
        engines: How many.
        tokens: What one holds.
    """

    def __init__(self, engines: int = 4, tokens: int = 500_000, seed: int = 1) -> None:
        self._pick = random.Random(seed)
        self._caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(engines)]
        self._room = tokens // traces.TOKENS_PER_ID

    def use(self, request: traces.Request) -> int:
        """Tokens that the request's engine holds of it; it then holds them all."""
        ids = request.hash_ids
        at = ids[min(1, len(ids) - 1)] if self._pick.random() < 0.9 else self._pick.randrange(1000)
        cache = self._caches[at % len(self._caches)]
        whole = ids[: request.input_length // traces.TOKENS_PER_ID]
        held = len(list(itertools.takewhile(cache.__contains__, whole)))
        for i in reversed(whole):  # the end of a prefix leaves first
            cache[i] = None
            cache.move_to_end(i)
        while len(cache) > self._room:
            cache.popitem(last=False)
        return min(held * traces.TOKENS_PER_ID, request.input_length - 1)


@dataclass
class Kept:
    """What one way of looking up found.

    Attributes:
        hit_tokens: Tokens that the store gave, past those that the engine held.
        local_tokens: Tokens that engines held.
        asked_keys: Keys that lookups asked.
        renewed_keys: Keys that were asked again only to keep them.
        stored: Keys in the store at the end.
    """

    hit_tokens: int = 0
    local_tokens: int = 0
    asked_keys: int = 0
    renewed_keys: int = 0
    stored: int = 0


def renew(store: LeaseStore, renewals: Renewals) -> int:
    """Ask for all that is to be renewed now; return how many keys that was."""
    count = 0
    while renewals.pending:
        keys = renewals.next_keys()
        store.batch_is_exist(keys)
        count += len(keys)
    return count


@dataclass(frozen=True)
class Way:
    """A way to look up.

    Attributes:
        name: Its name in tables.
        strategy: Of lookups.
        aware: Lookups are told what the engine holds.
        renew: What hits make worth keeping is renewed.
        beside: Name of the way that it is compared with.
    """

    name: str
    strategy: str
    aware: bool = False
    renew: bool = False
    beside: str | None = None


# `exact` asks for the keys that stock asks for, in the same order, so it stands for both.
WAYS = (
    Way("stock, exact", "exact"),
    Way("staged", "staged", beside="stock, exact"),
    Way("staged, renewed", "staged", renew=True, beside="stock, exact"),
)
LOCAL_WAYS = (
    Way("stock, exact", "exact"),
    Way("local_aware", "staged", aware=True, beside="stock, exact"),
    Way("local_aware, renewed", "staged", aware=True, renew=True, beside="stock, exact"),
)


def run(
    shape: Shape,
    requests: Sequence[traces.Request],
    capacity: int | None,
    way: Way,
    engines: LocalCaches | None = None,
) -> Kept:
    """Replay a trace against a store of so many keys.

    Each request is looked up, and what the hit makes worth keeping is renewed. Then what neither
    the engine nor the store had is saved. (vLLM's own saves also ask for what is in the store, so
    there even more is kept alive than here.)
    """
    store = LeaseStore(capacity)
    contract = shape.contract()
    coord = contract.coordinator
    schemas = shape.schemas()
    tools = PlanTools(hints=way.strategy == "staged", stats=False)
    renewals = Renewals(clock=lambda: store.now) if way.renew else None
    kept = Kept()
    for request in requests:
        store.now = request.timestamp / 1000
        digests = block_hashes(traces.digests(request, shape.hash_block))
        n = request.input_length
        local = 0 if engines is None else coord.align(engines.use(request))
        held: Any = 0
        if way.aware and local:  # as the adapter says it: of full attention alone
            full = [isinstance(g, FullAttention) for g in shape.groups]
            held = Held(tuple(local if f else 0 for f in full), local)
        plan = LookupPlan(contract, digests, n, held=held, strategy=way.strategy, tools=tools)
        hit = drive(plan, store)
        if renewals is not None:
            renewals.note(plan)
            kept.renewed_keys += renew(store, renewals)
        kept.asked_keys += hit.asked
        kept.local_tokens += local
        kept.hit_tokens += max(0, hit.length - local)
        mark, saved = max(hit.length, local), coord.align(n)
        masks = coord.store_mask(saved, mark)
        for group, schema, mask in zip(shape.groups, schemas, masks, strict=True):
            first = -(-mark // group.block_size)
            if mask is None:
                mask = Bitset.ones(saved // group.block_size - first)
            scale = group.block_size // shape.hash_block
            store.save(schema.keys(digests, mask, start=first, scale=scale))
    kept.stored = len(store)
    return kept


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        capacity: Share of all keys that the store holds.
        local: Engines have caches of their own.
        name: The way.
        hit_tokens: Tokens that the store gave.
        ratio: The same, divided by stock's.
        asked: Keys asked, divided by stock's.
        renewed: Keys renewed, divided by the keys that stock asks.
    """

    capacity: float
    local: bool
    name: str
    hit_tokens: int
    ratio: float
    asked: float
    renewed: float


def measure(
    shape: Shape, requests: Sequence[traces.Request], capacities: Sequence[float] = CAPACITIES
) -> Iterator[Row]:
    """Compare all ways, with and without caches of the engines' own.

    The caches of four engines together hold half as many tokens as the store.
    """
    everything = run(shape, requests, None, WAYS[1])
    tokens = traces.TOKENS_PER_ID * len({i for request in requests for i in request.hash_ids})
    for capacity in capacities:
        room = int(everything.stored * capacity)
        for local, ways in ((False, WAYS), (True, LOCAL_WAYS)):
            found: dict[str, Kept] = {}
            for way in ways:
                engines = LocalCaches(4, int(tokens * capacity / 8)) if local else None
                found[way.name] = kept = run(shape, requests, room, way, engines)
                base = found[way.beside or way.name]
                yield Row(
                    capacity,
                    local,
                    way.name,
                    kept.hit_tokens,
                    kept.hit_tokens / base.hit_tokens if base.hit_tokens else 1.0,
                    kept.asked_keys / base.asked_keys,
                    kept.renewed_keys / base.asked_keys,
                )


HEAD = f"store  engine  {'way':<21}{'tokens hit':>11}  of stock   asked  renewed"


def line(row: Row) -> str:
    """Format a row for the table under `HEAD`."""
    cache = "cache" if row.local else ""
    return (
        f"{row.capacity:>5.0%}  {cache:<6}  {row.name:<21}{row.hit_tokens:>11}  "
        f"{row.ratio:>8.4f}  {row.asked:>6.3f}  {row.renewed:>7.3f}"
    )


def good(row: Row) -> bool:
    """Whether a way that renews reaches what it must."""
    return "renewed" not in row.name or (row.ratio >= LEAST_RATIO and row.renewed <= MOST_RENEWED)
