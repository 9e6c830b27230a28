"""The replay of request traces: a small slice of `bench/replay.py`, and the traces themselves."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import pytest
from fake_store import FakeStore

BENCH = Path(__file__).parent.parent / "bench"
if not BENCH.is_dir():  # an installed copy of the tests without the benches
    pytest.skip("needs bench/ of the repository", allow_module_level=True)
sys.path.append(str(BENCH))

import pressure  # noqa: E402
import replay  # noqa: E402
import traces  # noqa: E402
from shapes import SHAPES  # noqa: E402

REQUESTS = 40
HAS_VLLM = importlib.util.find_spec("vllm") is not None


def small(requests=REQUESTS, seed=5, longest=6000):
    """A generated trace without its long tail."""
    short = (r for r in traces.generate(10 * requests, seed) if r.input_length <= longest)
    return [r for r, _ in zip(short, range(requests), strict=False)]


def check(outcome, requests):
    assert outcome.requests == len(requests)
    assert outcome.ok, outcome
    assert outcome.hit_tokens > 0
    runs = outcome.runs
    assert runs["staged"]["keys"] < runs["exact"]["keys"]
    assert runs["hinted"]["keys"] <= runs["staged"]["keys"] * 1.1
    assert runs["exact"]["calls_max"] == 1
    assert max(outcome.cold_calls.values()) <= 2
    if "vLLM" in runs:
        assert runs["vLLM"]["keys"] == runs["exact"]["keys"]


@pytest.mark.parametrize("name", SHAPES)
def test_replay_finds_the_same_every_way(name):
    requests = small()
    outcome = replay.replay(SHAPES[name], requests, FakeStore(), with_vllm=False)
    check(outcome, requests)
    shown = replay.report(outcome)
    assert f"{name}: {REQUESTS} requests" in shown
    assert "exact / hinted" in shown


@pytest.mark.vllm
@pytest.mark.skipif(not HAS_VLLM, reason="needs vLLM")
@pytest.mark.parametrize("name", SHAPES)
def test_replay_beside_vllm(name):
    requests = small(20)
    check(replay.replay(SHAPES[name], requests, FakeStore(), with_vllm=True), requests)


@pytest.mark.store
def test_replay_on_a_real_store(live_store):
    requests = small(longest=3000)
    check(replay.replay(SHAPES["dsv4"], requests, live_store, with_vllm=False), requests)


def test_replay_notices_a_store_that_loses_objects():
    class Lossy(FakeStore):
        def batch_put_from_multi_buffers(self, keys, *rest):
            codes = super().batch_put_from_multi_buffers(keys, *rest)
            if len(self.pool) > 300:
                self.evict(list(self.pool)[:150])
            return codes

    outcome = replay.replay(SHAPES["full16"], small(), Lossy(), with_vllm=False)
    assert outcome.lost
    assert not outcome.differing
    assert not outcome.ok


def test_replay_notices_lookups_that_differ():
    """A store that forgets between the lookups of one request."""
    store = FakeStore()

    def forget(store, call, keys):
        if call == "batch_is_exist" and store.counts[call] % 7 == 0:
            store.evict(list(store.pool)[:50])

    store.hooks.append(forget)
    outcome = replay.replay(SHAPES["full16"], small(), store, with_vllm=False, cold=0)
    assert outcome.differing
    assert not outcome.ok


def test_quantiles_of_a_run():
    run = replay.Run("any", lambda num_tokens, buffer: 0)
    run.seconds = [n / 1e3 for n in range(1000, 0, -1)]
    found = dict(zip(replay.SHARES, run.quantiles(), strict=True))
    assert found[0.5] == 500  # milliseconds: half of the lookups take no longer
    assert (found[0.005], found[0.99], found[0.999], found[1.0]) == (5, 990, 999, 1000)
    assert list(replay.SHARES) == sorted(set(replay.SHARES))
    run.seconds = [0.002]
    assert set(run.quantiles()) == {2}


def test_replay_refuses_a_store_that_is_not_empty():
    store = FakeStore()
    requests = small(10)
    replay.replay(SHAPES["full16"], requests, store, with_vllm=False)
    with pytest.raises(RuntimeError, match="must be empty"):
        replay.replay(SHAPES["full16"], requests, store, with_vllm=False)


def test_replay_command(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    rows = [vars(r) for r in small(12)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    figures = tmp_path / "figures.json"
    args = ["--trace", str(trace), "--store", "memory", "--no-vllm", "--shape", "gemma"]
    assert replay.main([*args, "--json", str(figures)]) == 0
    assert "12 requests" in capsys.readouterr().out
    assert json.loads(figures.read_text())["runs"]["exact"]["calls_mean"] == 1
    assert replay.main([*args, "--requests", "3"]) == 0
    assert "3 requests" in capsys.readouterr().out


def test_generated_trace_has_the_shape_of_the_public_one():
    requests = list(traces.generate(4000, seed=2))
    assert requests == list(traces.generate(4000, seed=2))
    assert requests != list(traces.generate(4000, seed=3))
    lengths = sorted(r.input_length for r in requests)
    assert 9_000 < sum(lengths) / len(lengths) < 15_000
    assert 60_000 < lengths[len(lengths) * 99 // 100] <= 126_000
    seen: set[int] = set()
    reused = total = 0
    for r in requests:
        assert r.hash_ids[0] == 0
        assert len(r.hash_ids) == -(-r.input_length // traces.TOKENS_PER_ID)
        known = [i in seen for i in r.hash_ids]
        assert known == sorted(known, reverse=True)  # an id stands for its whole prefix
        reused += sum(known)
        total += len(known)
        seen.update(r.hash_ids)
    assert 0.25 < reused / total < 0.5


def test_digests_stand_for_the_prefix():
    a = traces.Request(0, 1300, 1, (0, 1, 2))
    b = traces.Request(0, 1300, 1, (0, 3, 4))
    for hash_block in (4, 16):
        first, second = traces.digests(a, hash_block), traces.digests(b, hash_block)
        size = traces.DIGEST_BYTES
        assert len(first) == 1300 // hash_block * size
        same = traces.TOKENS_PER_ID // hash_block * size
        assert first[:same] == second[:same]
        pieces = [s[i : i + size] for s in (first, second[same:]) for i in range(0, len(s), size)]
        assert len(set(pieces)) == len(pieces)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"timestamp": 0, "input_length": 600, "output_length": 1}',
        '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}',
        '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": 7}',
    ],
)
def test_a_line_that_is_no_request(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"\n{line}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 2 of .*trace\.jsonl"):
        list(traces.load(path))


@pytest.mark.parametrize("make", [traces.generate, traces.agents])
def test_renewals_keep_what_stock_keeps(make):
    requests = [r for r in make(600, 3) if r.input_length <= 20_000][:250]
    rows = list(pressure.measure(SHAPES["dsv4"], requests, (0.1, 0.4)))
    assert len(rows) == 2 * 2 * 3
    assert all(map(pressure.good, rows))
    for row in rows:
        if row.name == "stock, exact":
            assert (row.ratio, row.asked, row.renewed) == (1.0, 1.0, 0.0)
        else:
            assert row.asked < 0.5
            assert (row.renewed > 0) == ("renewed" in row.name)
    assert not pressure.good(dataclasses.replace(rows[2], ratio=0.99))
    assert not pressure.good(dataclasses.replace(rows[2], renewed=0.26))
    assert pressure.good(dataclasses.replace(rows[1], ratio=0.99))


def test_a_lease_store_evicts_by_lease():
    store = pressure.LeaseStore(4)
    store.save(["a", "b", "c", "d"])
    assert store.batch_is_exist(["b", "x"]) == [1, 0]
    store.now = 1.0
    store.save(["e"])  # the first put without a lease leaves
    assert store.batch_is_exist(["a"]) == [0]
    store.save(["f", "g"])  # then the others
    assert store.batch_is_exist(["c", "d", "b"]) == [0, 0, 1]
    store.now = 20.0
    store.save(["h", "i"])  # the leases are over: what was put last is the newest
    assert len(store) == 4
    assert store.batch_is_exist(["h", "i", "b"]) == [1, 1, 1]


def test_pressure_command(tmp_path, capsys):
    figures = tmp_path / "figures.json"
    args = ["--pressure", "--agents", "--requests", "120", "--capacity", "0.3"]
    status = replay.main([*args, "--shape", "full16", "--json", str(figures)])
    rows = json.loads(figures.read_text())
    assert [row["name"] for row in rows if row["local"]][-1] == "local_aware, renewed"
    assert status == int(not all(pressure.good(pressure.Row(**row)) for row in rows))
    assert "agents, seed 1: 120 requests" in capsys.readouterr().out


def test_agents_share_prefixes_branch_and_come_back_soon():
    requests = list(traces.agents(3000, seed=2))
    assert requests == list(traces.agents(3000, seed=2))
    seen: dict[int, int] = {}
    last: dict[int, tuple[int, ...]] = {}
    branches = soon = 0
    for r in requests:
        assert len(r.hash_ids) == -(-r.input_length // traces.TOKENS_PER_ID)
        known = [i in seen for i in r.hash_ids]
        assert known == sorted(known, reverse=True)
        kept = sum(known)
        if kept:
            soon += r.timestamp - seen[r.hash_ids[kept - 1]] < 10_000
            branches += r.hash_ids[: kept + 1] != last[r.hash_ids[kept - 1]][: kept + 1]
        for i in r.hash_ids:
            seen[i], last[i] = r.timestamp, r.hash_ids
    assert soon > 1000
    assert branches > 1000
