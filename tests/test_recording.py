"""Every plan against a store that records what it answers and fails at random, over real bytes.

One round is an engine's life: ranks save a prompt in pieces, another engine looks it up and loads
it, over and over. What the plans report is compared with a ledger made from the record alone: each
planned key is in exactly one place, bytes of all that counts as loaded are those that were saved,
and a hit rests on nothing that the store did not say it has. A round is named by its seed.
"""

from __future__ import annotations

import numbers
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from fake_store import RPC_FAIL, FakeStore
from fuzz_lookup import random_group
from reference import ReferenceCoordinator
from rig import digests, scheme_of

from kvmask import (
    AbsenceMemo,
    Bitset,
    Coordinator,
    CostModel,
    FullAttention,
    HitHints,
    KVLayout,
    LoadPlan,
    LookupPlan,
    Mamba,
    PlanTools,
    PresenceMemo,
    SavePlan,
    StorePolicy,
    VllmKeys,
)
from kvmask._core import build_keys
from kvmask.mooncake import MooncakePolicy
from kvmask.plans import (
    CALL_FAILED,
    EXISTS,
    GET,
    MALFORMED_ANSWER,
    NOT_TRIED,
    OVERSIZE,
    PUT,
    WAIT,
    Handoff,
)

ROUNDS = 150


def believed(answer: Any, n: int) -> list[int]:
    """What may be taken from an answer to n keys: all of it, key by key, or nothing."""
    try:
        given = list(answer)
    except TypeError:
        return [MALFORMED_ANSWER] * n
    if len(given) != n:
        return [MALFORMED_ANSWER] * n
    return [int(a) if isinstance(a, numbers.Integral) else MALFORMED_ANSWER for a in given]


class RecordingStore(FakeStore):
    """Answers as the fake store does, but for faults; records per call what the caller saw.

    Attributes:
        record: (name, keys, what may be believed) per call; an exception where it raised.
        rate: Share of calls and of keys that go wrong.
    """

    def __init__(self, rng: random.Random, rate: float, pool: dict[str, bytes]) -> None:
        super().__init__(pool)
        self.rng, self.rate = rng, rate
        self.record: list[tuple[str, list[str], list[int] | Exception]] = []

    def hits(self, share: float = 1.0) -> bool:
        return self.rng.random() < self.rate * share

    def shaped(self, right: list[int]) -> Any:
        """The answer in some type that is one, or in one that is none."""
        rng = self.rng
        if self.hits():
            odd = list(right)
            odd[rng.randrange(len(odd))] = rng.choice((None, 1.0, "1", b"1", [1]))
            return rng.choice((odd, right[:-1], [*right, 1], None, 7, "1" * len(right)))
        kind = rng.choice((list, list, tuple, np.array, iter))
        return kind(right)

    def answer(self, name: str, keys: list[str], work: Any, codes: dict[str, int]) -> Any:
        """Do the work on the keys without a code, and answer; raise before or after it."""
        error = OSError(f"{name} failed") if self.hits(0.5) else None
        late = self.rng.random() < 0.5
        if error is not None and not late:
            self.record.append((name, keys, error))
            raise error
        good = [i for i, key in enumerate(keys) if key not in codes]
        done = iter(work(good))
        right = [codes[key] if key in codes else next(done) for key in keys]
        if error is not None:
            self.record.append((name, keys, error))
            raise error
        shown = self.shaped(right)
        seen = list(shown) if isinstance(shown, list | tuple | np.ndarray) else shown
        if not isinstance(shown, list | tuple | np.ndarray | str | int | None):
            seen = right  # an iterator, which can be read once
        self.record.append((name, keys, believed(seen, len(keys))))
        return shown

    def batch_is_exist(self, keys: Any) -> Any:
        codes = {key: self.rng.choice((0, 1, -900, 2)) for key in keys if self.hits()}
        # Between any two calls an object can go.
        self.evict([key for key in sorted(self.pool) if self.hits(0.1)])
        every = super().batch_is_exist
        return self.answer(EXISTS, keys, lambda good: every([keys[i] for i in good]), codes)

    def batch_put_from_multi_buffers(self, keys: Any, rows: Any, sizes: Any, *config: Any) -> Any:
        codes = {key: self.rng.choice((-200, -800, -705, 1)) for key in keys if self.hits()}
        put = super().batch_put_from_multi_buffers

        def work(good: list[int]) -> list[int]:
            return put([keys[i] for i in good], [rows[i] for i in good], [sizes[i] for i in good])

        return self.answer(PUT, keys, work, codes)

    def batch_get_into_multi_buffers(self, keys: Any, rows: Any, sizes: Any) -> Any:
        rng = self.rng
        codes = {key: rng.choice((-704, -707, -800, 0, 1)) for key in keys if self.hits()}
        if self.hits():
            codes = dict.fromkeys(keys, -707)
        get = super().batch_get_into_multi_buffers

        def work(good: list[int]) -> list[int]:
            return get([keys[i] for i in good], [rows[i] for i in good], [sizes[i] for i in good])

        return self.answer(GET, keys, work, codes)


class Event:
    """Done at once, or broken."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def synchronize(self) -> None:
        if self.error is not None:
            raise self.error


class Memory:
    """Tensors of every group and shard, and block tables over them."""

    def __init__(self, rng: random.Random, groups: Any, shards: Any, tokens: int, full: bool):
        self.arrays: list[list[list[np.ndarray]]] = []
        self.layouts: list[list[KVLayout]] = []
        self.tables: list[list[int]] = []
        seed = np.random.default_rng(rng.randrange(1 << 30))
        for group, count in zip(groups, shards, strict=True):
            wanted = -(-tokens // group.block_size) + 1
            blocks = wanted + 3
            arrays, layouts = [], []
            for shard in range(count):
                tensors = [np.zeros((blocks, 5 + shard + n), np.uint8) for n in range(2)]
                if full:
                    for tensor in tensors:
                        tensor[:] = seed.integers(1, 256, tensor.shape, dtype=np.uint8)
                arrays.append(tensors)
                layouts.append(KVLayout.from_tensors(tensors, num_blocks=blocks))
            self.arrays.append(arrays)
            self.layouts.append(layouts)
            self.tables.append(rng.sample(range(1, blocks), wanted))

    def block(self, group: int, shard: int, index: int) -> bytes:
        block = self.tables[group][index]
        return b"".join(t[block].tobytes() for t in self.arrays[group][shard])

    def register(self, store: FakeStore) -> None:
        for row in self.layouts:
            for layout in row:
                for address, size in layout.storages:
                    assert store.register_buffer(address, size) == 0


class Round:
    """One random setting: groups, shards, ranks, policies, a prompt."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(f"recording {seed}")
        self.unit = unit = rng.choice((2, 4))
        groups = [random_group(rng, unit) for _ in range(rng.randint(1, 4))]
        if not any(g.prefix_cacheable for g in groups):
            groups[0] = FullAttention(unit)
        self.groups = groups
        partial = rng.random() < 0.3
        retention = rng.choice((None, None, 0))
        self.args = groups, unit, None, retention, partial
        self.coord = Coordinator(*self.args)
        self.num_hashes = rng.randint(1, 40)
        self.tokens = self.num_hashes * unit + rng.randint(0, unit - 1)
        self.hashes = [d[::-1] for d in digests(self.num_hashes)]
        self.shards = [rng.choice((1, 1, 2, 3)) for _ in groups]
        self.writers = [rng.choice((1, 1, 2, 3)) for _ in groups]
        self.schemas = [
            [VllmKeys("m", tp_rank=s, group_id=g) for s in range(n)]
            for g, n in enumerate(self.shards)
        ]
        self.states = rng.random() < 0.8
        self.rate = rng.choice((0.0, 0.02, 0.1, 0.3))
        self.pool: dict[str, bytes] = {}

    def scheme(self, layouts: Any, writer: int = 0) -> Any:
        return scheme_of(
            self.coord,
            layouts,
            schemas=self.schemas,
            writers=self.writers,
            writer=writer,
            states=self.states,
            rank=self.rng.randrange(5),
        )

    def policy(self) -> StorePolicy:
        rng = self.rng
        kind = rng.randrange(4)
        if kind == 0:
            return StorePolicy()
        return MooncakePolicy(
            max_pieces=rng.choice((None, 1, 5, 512)),
            staging=rng.choice((None, None, 12288, 12287, 100_000)),
        )

    def tools(self) -> PlanTools:
        rng = self.rng
        return PlanTools(
            self.policy(),
            costs=CostModel(call=rng.choice((1.0, 4.0, 430.0)), missing=1.0),
            hints=HitHints(64) if rng.random() < 0.5 else None,
            memo=PresenceMemo() if rng.random() < 0.3 else None,
            failed_loads=AbsenceMemo() if rng.random() < 0.3 else None,
            log=None,
        )

    def event(self) -> Event | None:
        if self.rng.random() < 0.5:
            return None
        return Event(OSError("event failed") if self.rng.random() < self.rate else None)

    def store(self) -> RecordingStore:
        return RecordingStore(self.rng, self.rate, self.pool)


STOP = -4711


def drive(plan: Any, store: RecordingStore, rng: random.Random, stop_rate: float) -> list[Any]:
    """Run a plan; the calls it made. At times it is stopped between two calls."""
    calls = []
    while (call := plan.next_call()) is not None:
        calls.append(call)
        assert len(calls) < 2000
        try:
            answer = call.run(store)
        except Exception as error:
            plan.fail(error)
        else:
            plan.feed(answer)
        if hasattr(plan, "stop") and rng.random() < stop_rate:
            plan.stop(STOP)
    return calls


def counted(record: Any, name: str) -> Counter[str]:
    return Counter(key for call, keys, _ in record if call == name for key in keys)


# The ledger of a save


def check_save(
    case: Round, plan: SavePlan, record: Any, calls: Any, tools: PlanTools, memory: Memory
) -> None:
    """Each planned key is stored, present or failed, as the record says."""
    result, keys = plan.result, plan.keys
    assert all(call.name in (EXISTS, PUT, WAIT) for call in calls)
    assert [call.name for call in calls].count(EXISTS) == (1 if keys else 0)
    assert [call.name for call in calls].count(WAIT) <= 1
    known: dict[str, int] = {}
    asked: Exception | None = None
    outcome: dict[str, tuple[str, int]] = {}
    for name, names, answer in record:
        if name == EXISTS:
            assert names == keys
            if isinstance(answer, Exception):
                asked = answer
            else:
                known = dict(zip(names, answer, strict=True))
            continue
        assert name == PUT
        for i, key in enumerate(names):
            assert key not in outcome, "a key was put twice"
            assert known[key] != 1, "a key was put that the store has"
            if isinstance(answer, Exception):
                outcome[key] = "failed", CALL_FAILED
            elif answer[i] == 0:
                outcome[key] = "stored", 0
            elif answer[i] in tools.policy.present_codes:
                outcome[key] = "present", answer[i]
            else:
                outcome[key] = "failed", answer[i]
    failed = {f.key: f for f in result.failures}
    assert len(failed) == len(result.failures), "a key failed twice"
    assert len(set(keys)) == len(keys)
    stored = present = 0
    for key in keys:
        kind, code = outcome.get(key, ("", 0))
        if asked is not None:
            assert failed[key].code == CALL_FAILED
            assert failed[key].cause is asked
        elif known[key] == 1:
            present += 1
            assert key not in failed
        elif not kind:  # never put, and never by oversight
            assert failed[key].code in (STOP, OVERSIZE, CALL_FAILED, NOT_TRIED)
        elif kind == "failed":
            assert failed[key].code == code
            assert (failed[key].cause is not None) == (code == CALL_FAILED)
        else:
            assert key not in failed
            stored += kind == "stored"
            present += kind == "present"
            if kind == "stored" and key in case.pool:
                assert case.pool[key] == expected_bytes(case, memory, key)
    assert (result.stored, result.present) == (stored, present)
    assert stored + present + len(failed) == len(keys)
    # The mark: nothing that this rank was to write is missing below.
    blocks = [f.block * case.groups[f.group].block_size for f in result.failures]
    mark = min([plan.num_tokens, *blocks])
    if mark < plan.num_tokens:
        mark -= mark % case.coord.alignment
    assert result.mark == max(mark, plan._start_token)
    assert result.pressure == any(
        f.code in tools.policy.full_codes for f in result.failures if f.cause is None
    )


def expected_bytes(case: Round, memory: Memory, key: str) -> bytes:
    """The bytes that belong under a key: those of the block that its digest ends."""
    g, shard, n = parse(key)
    # A tail inside a block is stored as the whole block.
    block = -(-n * case.unit // case.groups[g].block_size) - 1
    return memory.block(g, shard, block)


def parse(key: str) -> tuple[int, int, int]:
    """Group, shard and number of the digest (from 1) of a key."""
    group = int(key.split("@group:")[1].split("@", maxsplit=1)[0])
    shard = int(key.split("@tp_rank:")[1].split("@", maxsplit=1)[0])
    return group, shard, int.from_bytes(bytes.fromhex(key.rsplit("@", 1)[1]), "little")


# The ledger of a lookup


def check_lookup(
    case: Round, plan: LookupPlan, record: Any, held: list[set[int]], local: int, vouched: set[str]
) -> None:
    """The hit rests on what the store said it has, and the counters on what it was asked."""
    hit = plan.result
    asked = counted(record, EXISTS)
    assert set(asked.values()) <= {1}, "a key was asked twice"
    yes: set[str] = set()
    unknown = 0
    cause: Any = None
    for name, names, answer in record:
        assert name == EXISTS
        assert cause in (None, MALFORMED_ANSWER), "a store that does not answer was asked again"
        if isinstance(answer, Exception):
            cause = answer
            unknown += len(names)
            continue
        yes.update(key for key, a in zip(names, answer, strict=True) if a == 1)
        unknown += sum(a < 0 for a in answer)
        if MALFORMED_ANSWER in answer and cause is None:
            cause = MALFORMED_ANSWER
        if plan._tools.policy.outage(answer):
            cause = RPC_FAIL
    assert (hit.asked, hit.probes) == (len(asked), len(record))
    assert (hit.present, hit.unknown) == (len(yes), unknown)
    assert hit.answered == (unknown == 0 and cause is None)
    if isinstance(cause, Exception):
        assert (hit.length, hit.cause) == (0, cause)
    elif cause is not None:
        assert hit.cause.code == cause
        assert hit.length == 0 or cause == MALFORMED_ANSWER
    else:
        assert hit.cause is None
    assert hit.length < max(case.tokens + 1, 1)
    assert not local or hit.length == 0 or hit.length > local
    for g, mask in enumerate(hit.masks):
        group = case.groups[g]
        for i in mask.indices():
            if i in held[g]:
                continue
            n = min((i + 1) * group.block_size, hit.tail_tokens[g]) // case.unit
            for schema in case.schemas[g]:
                key = build_keys([schema.builder], [case.hashes[n - 1]])[0]
                assert key in yes or key in vouched, (g, i, n)


# The ledger of a load


def check_load(
    case: Round,
    plan: LoadPlan,
    hit: Any,
    record: Any,
    held: list[set[int]],
    source: Memory,
    target: Memory,
) -> None:
    """Each planned key is loaded or failed as the record says; loaded bytes are the saved ones."""
    result, keys = plan.result, plan.keys
    wanted = [
        (g, s, i)
        for g, mask in enumerate(hit.masks)
        for i in mask.indices()
        if i not in held[g]
        for s in range(case.shards[g])
    ]
    assert len(set(keys)) == len(keys) == len(wanted)
    places = {}
    for (g, s, i), key in zip(wanted, keys, strict=True):
        group, shard, n = parse(key)
        assert (group, shard, -(-n * case.unit // case.groups[g].block_size) - 1) == (g, s, i)
        places[key] = g, s, i
    outcome: dict[str, tuple[str, int]] = {}
    tried: Counter[str] = Counter()
    renewed: set[str] = set()
    for name, names, answer in record:
        if name == EXISTS:
            assert set(names) <= tried.keys()
            assert not renewed & set(names), "a lease was renewed twice"
            renewed.update(names)
            if isinstance(answer, Exception):
                outcome.update(dict.fromkeys(names, ("failed", CALL_FAILED)))
            continue
        assert name == GET
        tried.update(names)
        for j, key in enumerate(names):
            g, s, _ = places[key]
            size = target.layouts[g][s].block_bytes
            if isinstance(answer, Exception):
                outcome[key] = "failed", CALL_FAILED
            elif answer[j] == size:
                outcome[key] = "loaded", size
            else:
                outcome[key] = "failed", answer[j]
    assert all(n == 1 + (key in renewed) or key in renewed for key, n in tried.items())
    assert max(tried.values(), default=0) <= 2
    failed = {f.key: f for f in result.failures}
    assert len(failed) == len(result.failures), "a key failed twice"
    loaded = 0
    bad: set[tuple[int, int]] = set()
    for key in keys:
        g, s, i = places[key]
        kind, code = outcome.get(key, ("", 0))
        if kind == "loaded":
            loaded += 1
            assert key not in failed
            assert target.block(g, s, i) == source.block(g, s, i)
            continue
        bad.add((g, i))
        failure = failed[key]
        assert (failure.group, failure.block) == (g, i)
        assert failure.block_id == target.tables[g][i]
        if not kind:
            assert failure.code in (STOP, OVERSIZE, CALL_FAILED, NOT_TRIED)
        elif failure.code == STOP:
            assert code == -707  # its lease was to be renewed
        else:
            assert failure.code == code
    assert result.loaded == loaded
    assert loaded + len(failed) == len(keys)
    sizes = [target.layouts[g][s].block_bytes for g, s, _ in places.values()]
    moved = [n for n, key in zip(sizes, places, strict=True) if key not in failed]
    assert result.num_bytes == sum(moved)
    invalid = {}
    for g, i in bad:
        invalid.setdefault(f"group{g}", set()).add(target.tables[g][i])
    assert result.invalid == {name: sorted(ids) for name, ids in invalid.items()}
    # Memory outside the plan is as it was.
    for g, arrays in enumerate(target.arrays):
        mine = {target.tables[g][i] for group, _, i in wanted if group == g}
        mine |= {target.tables[g][i] for i in held[g] if i < len(target.tables[g])}
        for tensors in arrays:
            for tensor in tensors:
                rest = [b for b in range(len(tensor)) if b not in mine]
                assert not tensor[rest].any()
    ends = {(g, i): parse(key)[2] * case.unit for key, (g, _, i) in places.items()}
    check_usable(case, result, hit, held, bad, ends)


def check_usable(
    case: Round,
    result: Any,
    hit: Any,
    held: list[set[int]],
    bad: set[tuple[int, int]],
    ends: dict[tuple[int, int], int],
) -> None:
    """What is left of the hit: the longest prefix of which nothing is missing."""
    if not bad:
        assert result.usable_tokens == hit.length
        return
    good = [
        (set(mask.indices()) | held[g]) - {i for group, i in bad if group == g}
        for g, mask in enumerate(hit.masks)
    ]
    reference = ReferenceCoordinator(*case.args)

    def whole(length: int) -> bool:
        units = [[True] * (length // case.unit + 1)] * len(case.groups)
        found, masks = reference._search(units, length, eagle=False)
        if found != length:  # no hit of this length: some group ends at whole blocks
            return False
        for g, mask in enumerate(masks):
            group = case.groups[g]
            needed = {i for i, there in enumerate(mask) if there}
            if not group.prefix_cacheable:
                continue
            if not needed <= good[g]:
                return False
            # A state is that of one boundary: the key's, or the end of a block that is held.
            if isinstance(group, Mamba) and any(
                ends.get((g, i), (i + 1) * group.block_size) != length for i in needed
            ):
                return False
        return True

    usable = result.usable_tokens
    assert usable < hit.length
    assert usable % case.coord.hit_alignment == 0
    assert whole(usable)
    unit = case.coord.hit_alignment
    assert not any(whole(n) for n in range(usable + unit, hit.length + 1, unit))


# Rounds


def hold(case: Round, source: Memory, target: Memory) -> tuple[Any, list[set[int]], int]:
    """What the reading engine holds: the statement, the blocks, and its own hit in tokens."""
    rng = case.rng
    held: list[set[int]] = [set() for _ in case.groups]
    kind = rng.randrange(4)
    if kind < 2:
        return 0, held, 0
    if kind == 2:  # a prefix of full attention alone, as an engine that frees the rest
        tokens = rng.randint(0, case.tokens // 2)
        said: list[Any] = []
        for g, group in enumerate(case.groups):
            full = isinstance(group, FullAttention) and group.prefix_cacheable
            said.append(tokens if full else 0)
            if full:
                held[g] = set(range(tokens // group.block_size))
    else:
        said = []
        for g, group in enumerate(case.groups):
            n = case.tokens // group.block_size if group.prefix_cacheable else 0
            held[g] = {i for i in range(n) if rng.random() < 0.4}
            said.append(Bitset.from_indices(n, sorted(held[g])))
    for g, blocks in enumerate(held):
        for shard in range(case.shards[g]):
            for mine, theirs in zip(target.arrays[g][shard], source.arrays[g][shard], strict=True):
                for i in blocks:
                    mine[target.tables[g][i]] = theirs[source.tables[g][i]]
    return said, held, 0


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_a_round(seed: int) -> None:
    case = Round(seed)
    rng = case.rng
    source = Memory(rng, case.groups, case.shards, case.tokens, full=True)
    ranks = max(w for w, g in zip(case.writers, case.groups, strict=True) if g.prefix_cacheable)
    tools = case.tools()
    stop = case.rate / 4
    # Every rank saves the prompt as it grows, from its own mark.
    ends = sorted({case.tokens, *(rng.randint(0, case.tokens) for _ in range(2))})
    for rank in range(ranks):
        store, mark = case.store(), 0
        source.register(store)
        scheme = case.scheme(source.layouts, rank)
        for end in ends:
            start, mine = len(store.record), case.tools() if rng.random() < 0.5 else tools
            handoffs = []
            states = [g for g in range(len(case.groups)) if isinstance(case.groups[g], Mamba)]
            if not case.states and end >= case.unit and not case.coord.partial_hits:
                for g in states:
                    size = case.groups[g].block_size
                    if end >= size:
                        block = end // size - 1
                        handoffs.append(Handoff(g, (block + 1) * size, source.tables[g][block]))
            plan = SavePlan(
                scheme,
                case.hashes,
                source.tables,
                end,
                start_token=mark,
                num_prompt_tokens=max(1, case.tokens),
                handoffs=handoffs,
                event=case.event(),
                tools=mine,
            )
            calls = drive(plan, store, rng, stop)
            check_save(case, plan, store.record[start:], calls, mine, source)
            mark = plan.result.mark
    for _ in range(3):
        store = case.store()
        target = Memory(rng, case.groups, case.shards, case.tokens, full=False)
        target.register(store)
        said, held, local = hold(case, source, target)
        mine = case.tools() if rng.random() < 0.3 else tools
        scheme = case.scheme(target.layouts)
        known = mine.memo
        vouched = set(known._until) if known is not None else set()
        look = LookupPlan(
            scheme,
            case.hashes,
            case.tokens,
            held=said,
            strategy=rng.choice(("staged", "staged", "exact")),
            tools=mine,
        )
        drive(look, store, rng, 0.0)
        hit = look.result
        check_lookup(case, look, store.record, held, local, vouched)
        start = len(store.record)
        load = LoadPlan(scheme, case.hashes, hit, target.tables, event=case.event(), tools=mine)
        drive(load, store, rng, stop)
        check_load(case, load, hit, store.record[start:], held, source, target)


def test_rounds_reach_what_they_are_for() -> None:
    """Enough hits, failures of every kind and partly usable loads among the rounds."""
    seen: Counter[str] = Counter()
    usable = LoadPlan._usable

    def counting(plan: LoadPlan) -> int:
        found = usable(plan)
        seen["partly usable"] += 0 < found < plan._hit.length
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoadPlan, "_usable", counting)
        for kind in (SavePlan, LoadPlan):
            finish = kind._finish

            def noting(plan: Any, finish: Any = finish, kind: Any = kind) -> None:
                finish(plan)
                seen.update((kind.__name__, f.code) for f in plan.result.failures)
                seen[kind.__name__] += plan.result.ok and bool(plan.keys)

            patch.setattr(kind, "_finish", noting)
        for seed in range(ROUNDS):
            test_a_round(seed)
    assert seen["SavePlan"] > 50
    assert seen["LoadPlan"] > 10
    assert seen["partly usable"] > 2
    for kind, codes in (
        ("SavePlan", (CALL_FAILED, MALFORMED_ANSWER, STOP, -200, -800)),
        ("LoadPlan", (CALL_FAILED, MALFORMED_ANSWER, STOP, -704, -707, OVERSIZE)),
    ):
        for code in codes:
            assert seen[kind, code], (kind, code)
