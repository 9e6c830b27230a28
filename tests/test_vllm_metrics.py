"""kvmask's counters in vLLM's statistics, with vLLM's real classes and a real master."""

import copy
import importlib
import itertools
import json
import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import vllm_pair as stand_in
import vllm_world as world
from prometheus_client import REGISTRY, generate_latest
from test_vllm_path import (  # noqa: F401
    MODES,
    connection_folder,
    digests_of,
    fill,
    own,
    until,
    usable,
)
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorLogging,
    KVConnectorProm,
)
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm_cases import random_case
from vllm_oracle import digest

import kvmask.vllm
from kvmask.vllm import lookup, metrics
from kvmask.vllm.acting import ACTING
from kvmask.vllm.releases import StockConnector, StockMetrics, StockStats, fitting

pytestmark = [pytest.mark.vllm]

ROOT = Path(__file__).parent.parent
TOKENS = 768
LABELS = ["model_name", "engine"]


def config(name="KVMaskStoreConnector", **more):
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector=name,
            kv_connector_module_path="kvmask.vllm" if name.startswith("KVMask") else None,
            kv_role="kv_both",
            **more,
        )
    )


@pytest.fixture
def prometheus():
    """Makes vLLM's Prometheus logger of a connector; what it registers goes again."""
    unregister_vllm_metrics()
    values = {0: ["org/model", "0"], 1: ["org/model", "1"]}
    yield lambda of: KVConnectorProm(of, list(LABELS), values)
    unregister_vllm_metrics()


def series():
    """kvmask's series in the text that `/metrics` gives: (counter, engine) to value."""
    text = generate_latest(REGISTRY).decode()
    pattern = r'^vllm:kvmask_(\w+)_total\{engine="(\d)",model_name="org/model"\} (\S+)$'
    return {(n, int(e)): float(v) for n, e, v in re.findall(pattern, text, re.MULTILINE)}


def collected(pair):
    """What vLLM's scheduler collects after a step: the workers' statistics, then its own."""
    stats = pickle.loads(pickle.dumps(pair.worker_side.get_kv_connector_stats()))
    more = pair.scheduler_side.get_kv_connector_stats()
    if more is not None and not more.is_empty():
        stats = more if stats is None else stats.aggregate(more)
    # To the process with the loggers.
    return None if stats is None else json.loads(json.dumps(stats.to_dict()))


@pytest.mark.store
@pytest.mark.parametrize("mode", MODES)
def test_counters_go_up_by_what_lookups_did(own, prometheus, mode):  # noqa: F811
    extra, options = MODES[mode]
    pair = own.pair({"renew": False, **extra}, **options)
    digests = digests_of(TOKENS)
    fill(pair.worker, TOKENS, digests)
    shown = prometheus(config())
    assert series() == {(name, e): 0 for name in metrics.SHOWN for e in (0, 1)}
    assert collected(pair) is None
    hits = [pair.hit(world.request(TOKENS + 1, digests)) for _ in range(2)]
    assert hits == [TOKENS, TOKENS]
    places = (pair.asking.place, pair.worker)
    until(lambda: any(c.get("lookups") == 2 for c in map(kept, places)))
    counted = next(filter(None, map(kept, places)))
    data = collected(pair)
    shown.observe(data, engine_idx=1)
    now = series()
    calls = data["lookup_exists"]
    assert now["lookups", 1] == 2
    assert now["hit_tokens", 1] == 2 * TOKENS
    assert now["probes", 1] == len(calls)
    assert now["asked_keys", 1] == sum(record["num_keys"] for record in calls)
    # Stock asks for all 12 full-attention blocks, and for a window before each of 12 boundaries.
    assert now["exact_keys", 1] == 2 * (TOKENS // 64 + 2 * (TOKENS // 64))
    assert now["asked_keys", 1] < now["exact_keys", 1]
    assert all(now[name, 1] == counted[name] for name in metrics.SHOWN if name in counted)
    assert all(now[name, 0] == 0 for name in metrics.SHOWN)
    # vLLM's own metrics of the same calls are there, too.
    text = generate_latest(REGISTRY).decode()
    assert f'operation="lookup_exists",status="ok"}} {len(calls)}.0' in text
    # Everything is told once.
    assert collected(pair) is None
    shown.observe(None, engine_idx=1)
    assert series() == now


def kept(thing):
    """The counters of a place of lookups or a worker, where it makes any."""
    lookups = getattr(thing, "lookups", None) or thing.__dict__.get("_kvmask_state", {}).get(
        "lookups"
    )
    return {} if lookups is None else lookups.stats.snapshot()


@pytest.mark.store
def test_renewals_failures_and_late_lookups_are_counted(own, prometheus):  # noqa: F811
    pair = own.pair({"lookup_deadline_ms": 50}, apart=True)
    digests = digests_of(TOKENS)
    fill(pair.worker, TOKENS, digests)
    shown = prometheus(config())
    for _ in range(2):
        pair.hit(world.request(TOKENS + 1, digests))
    lookups = pair.asking.place.lookups
    until(lambda: lookups.stats.renewed_keys and not lookups.renewer.renewals.pending)
    shown.observe(collected(pair))
    asked = series()["exact_keys", 0]
    assert 0 < series()["renewed_keys", 0] <= asked / 4
    assert series()["failed_lookups", 0] == series()["late_lookups", 0] == 0

    def dead(keys):
        raise RuntimeError("no master")

    real = lookups.store
    lookups.store = SimpleNamespace(batch_is_exist=dead, close=real.close)
    assert pair.hit(world.request(TOKENS + 1, digests)) == 0
    until(lambda: lookups.stats.failed_lookups == 1)
    pair.asking.late += 3
    shown.observe(collected(pair))
    assert series()["failed_lookups", 0] == 1
    assert series()["late_lookups", 0] == 3
    assert series()["hit_tokens", 0] == 2 * TOKENS
    lookups.store = real


def record(**counted):
    stats = StockStats()
    stats.record_operation("lookup_exists", 0.5, 3, num_failed_keys=1)
    return metrics.with_counters(stats, counted)


def test_statistics_of_several_processes_are_added_up():
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput

    outputs = []
    for counted in ({"asked_keys": 2, "lookups": 1}, {"asked_keys": 5}, {}):
        output = copy.copy(EMPTY_MODEL_RUNNER_OUTPUT)
        output.kv_connector_output = KVConnectorOutput(kv_connector_stats=record(**counted))
        outputs.append(pickle.loads(pickle.dumps(output)))
    total = KVOutputAggregator(3).aggregate(outputs).kv_connector_output.kv_connector_stats
    assert metrics.summed(total.data[metrics.ENTRY]) == {"asked_keys": 7, "lookups": 1}
    assert len(total.data["lookup_exists"]) == 3
    # What the loggers sum up stays one record.
    kept = kvmask.vllm.KVMaskStoreConnector.build_kv_connector_stats()
    for _ in range(3):
        kept.aggregate(record(asked_keys=4))
    assert [len(kept.data[name]) for name in (metrics.ENTRY, "lookup_exists")] == [1, 3]
    assert kept.reduce()["kvmask_asked_keys"] == 12


@pytest.fixture
def installed(monkeypatch):
    """kvmask under vLLM's own connector."""
    monkeypatch.setenv("KVMASK_RENEW", "0")
    strategy = lookup._default["lookup"]
    kvmask.vllm.install()
    yield
    kvmask.vllm.uninstall()
    lookup.set_default(strategy)


@pytest.mark.store
def test_install_shows_them_under_vllms_own_connector(own, prometheus, installed):  # noqa: F811
    pair = own.pair(name="MooncakeStoreConnector")
    assert type(pair.worker_side) is StockConnector
    digests = digests_of(TOKENS)
    fill(pair.worker, TOKENS, digests)
    shown = prometheus(config("MooncakeStoreConnector"))
    assert series() == {(name, e): 0 for name in metrics.SHOWN for e in (0, 1)}
    assert collected(pair) is None
    assert [pair.hit(world.request(TOKENS + 1, digests)) for _ in range(2)] == [TOKENS] * 2
    until(lambda: kept(pair.worker).get("lookups") == 2)
    counted = kept(pair.worker)
    data = collected(pair)
    shown.observe(data)
    now = series()
    assert now["lookups", 0] == 2
    assert now["hit_tokens", 0] == 2 * TOKENS
    assert now["asked_keys", 0] == sum(record["num_keys"] for record in data["lookup_exists"])
    assert now["asked_keys", 0] < now["exact_keys", 0]
    assert all(now[name, 0] == counted[name] for name in metrics.SHOWN if name in counted)
    log = KVConnectorLogging(config("MooncakeStoreConnector").kv_transfer_config)
    log.observe(data)
    assert log.transfer_stats_accumulator.reduce()["kvmask_hit_tokens"] == 2 * TOKENS
    assert collected(pair) is None


@pytest.mark.store
def test_both_ways_at_once_count_once(own, prometheus, installed):  # noqa: F811
    pair = own.pair({"lookup_in": "worker", "renew": False})
    digests = digests_of(TOKENS)
    fill(pair.worker, TOKENS, digests)
    shown = prometheus(config())
    assert pair.hit(world.request(TOKENS + 1, digests)) == TOKENS
    until(lambda: kept(pair.worker).get("lookups") == 1)
    shown.observe(collected(pair))
    assert series()["lookups", 0] == 1
    assert series()["hit_tokens", 0] == TOKENS


def test_loggers_without_kvmask_take_them(prometheus):
    """The workers have kvmask's plugin, and the process with the loggers has it not."""
    data = json.loads(json.dumps(record(asked_keys=2, hit_tokens=5).to_dict()))
    shown = prometheus(config("MooncakeStoreConnector"))
    assert type(shown.prom_metrics) is StockMetrics
    shown.observe(data)
    text = generate_latest(REGISTRY).decode()
    assert 'operation="lookup_exists",status="ok"} 1.0' in text
    assert series() == {}
    log = KVConnectorLogging(config("MooncakeStoreConnector").kv_transfer_config)
    for _ in range(2):
        log.observe(copy.deepcopy(data))
    assert type(log.transfer_stats_accumulator) is StockStats
    assert log.transfer_stats_accumulator.reduce()["lookup_exists_count"] == 2
    # A worker's statistics name no class of kvmask's, which such a process might not have.
    assert b"kvmask.vllm" not in pickle.dumps(record(asked_keys=2))


def test_lookups_of_old_releases_are_counted():
    """To 0.26 kvmask makes the keys alone; here it does so for the installed release's worker."""
    counted = hits = 0
    for seed in range(200):
        case = random_case(4, seed)
        if case.num_tokens < case.effective_alignment or len(set(case.ranks)) > 1:
            continue  # no lookup, or ranks as those releases do not have them
        if not usable(case) or case.partial:
            continue
        store = stand_in.Script(0, stand_in.present_keys(case))
        worker = stand_in.lookup_worker(case, "stock", store)
        tokens = case.num_tokens // case.effective_alignment * case.effective_alignment
        hit = lookup.lookup_by_length(worker, tokens, [digest(i) for i in range(case.hash_blocks)])
        found = metrics.worker_counters(worker)
        calls = [len(keys) for _, keys in store.calls]
        assert found.get("lookups", 0) == found.get("probes", 0) == len(calls), case
        assert found.get("asked_keys", 0) == found.get("exact_keys", 0) == sum(calls), case
        assert found.get("hit_tokens", 0) == hit, case
        counted, hits = counted + len(calls), hits + hit
    assert counted > 10
    assert hits > 0
    assert ACTING.on


def test_the_log_line_has_the_counters():
    log = KVConnectorLogging(config().kv_transfer_config)
    log.observe(record(asked_keys=2).to_dict())
    log.observe(record(asked_keys=5, late_lookups=1).to_dict())
    lines = []
    log.log(lambda text, *args: lines.append(text % args))
    (line,) = lines
    assert "lookup_exists_count=2" in line
    assert "kvmask_asked_keys=7" in line
    assert "kvmask_late_lookups=1" in line
    log.log(lambda *args: lines.append(args))
    assert len(lines) == 1


def test_an_empty_record_is_nothing():
    assert metrics.with_counters(None, {"asked_keys": 0}) is None
    theirs = StockStats()
    assert metrics.with_counters(theirs, {"asked_keys": 0}) is theirs
    assert theirs.is_empty()
    stats = metrics.KVMaskStats(data=metrics.with_counters(None, {"asked_keys": 1}).data)
    assert not stats.is_empty()
    assert stats.reduce() == {"kvmask_asked_keys": 1}
    stats.reset()
    assert stats.is_empty()
    assert stats.reduce() == {}


def test_as_a_part_of_multi_connector():
    """Two parts, kvmask's and another: the loggers find each by the name of its class."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    parts = [
        {
            "kv_connector": "KVMaskStoreConnector",
            "kv_connector_module_path": "kvmask.vllm",
            "kv_role": "kv_both",
        },
        {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"},
    ]
    of = config("MultiConnector", kv_connector_extra_config={"connectors": parts})

    def step(**counted):
        """What vLLM collects of a step, or of one worker."""
        theirs = StockStats()
        theirs.record_operation("save_put", 0.1, 2)
        multi = object.__new__(MultiConnector)
        multi._connectors = []
        for cls, stats in (
            (kvmask.vllm.KVMaskStoreConnector, record(**counted)),
            (StockConnector, theirs),
        ):
            part = object.__new__(cls)
            part.get_kv_connector_stats = lambda stats=stats: stats
            multi._connectors.append(part)
        return multi.get_kv_connector_stats()

    # vLLM refuses to add up statistics of different classes.
    stats = step(hit_tokens=9).aggregate(step()).aggregate(step(hit_tokens=9))
    data = json.loads(json.dumps(stats.to_dict()))
    log = KVConnectorLogging(of.kv_transfer_config)
    log.observe(data)
    found = log.transfer_stats_accumulator.reduce()
    assert found["KVMaskStoreConnector"]["kvmask_hit_tokens"] == 18
    assert found["MooncakeStoreConnector"]["save_put_count"] == 3


def test_a_part_of_multi_connector_in_prometheus(prometheus, monkeypatch):
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    of = config("MultiConnector")
    monkeypatch.setattr(
        MultiConnector,
        "_get_connector_classes_and_configs",
        classmethod(lambda cls, _: [(kvmask.vllm.KVMaskStoreConnector, config())]),
    )
    shown = prometheus(of)
    shown.observe({"KVMaskStoreConnector": record(hit_tokens=9).data})
    assert series()["hit_tokens", 0] == 9


def test_another_engine_of_the_process_can_register_them_again(prometheus):
    prometheus(config())
    unregister_vllm_metrics()  # as vLLM does before it makes its logger
    prometheus(config()).observe(record(asked_keys=1).data)
    assert series()["asked_keys", 0] == 1


def test_a_counter_of_another_version_is_passed_over(prometheus):
    prometheus(config()).observe({metrics.ENTRY: [{"asked_keys": 2, "of_later": 3}]})
    assert series()["asked_keys", 0] == 2


def test_where_statistics_are_unknown_they_stay_vllms(monkeypatch):
    connector = importlib.import_module("kvmask.vllm.connector")
    without = [f for f in fitting().features if f.name != "metrics"]
    placed = connector.Placed(fitting().release, tuple(without), {}, ())
    monkeypatch.setattr(connector, "fitting", lambda: placed)
    assert type(kvmask.vllm.KVMaskStoreConnector.build_kv_connector_stats()) is StockStats


def test_the_panel_shows_series_that_exist():
    """Every series that the panel asks for is one that vLLM has."""
    page = ROOT / "docs" / "grafana.json"
    if not page.is_file():
        pytest.skip("no documents beside the package")
    board = json.loads(page.read_text(encoding="utf-8"))
    asked = set(itertools.chain.from_iterable(map(names, board["panels"])))
    text = Path(importlib.import_module(StockStats.__module__).__file__).read_text()
    for name in asked:
        counter = name.removeprefix("vllm:kvmask_").removesuffix("_total")
        assert counter in metrics.SHOWN or name.removesuffix("_bucket") in text, name
    assert {f"vllm:kvmask_{name}_total" for name in metrics.SHOWN} - asked == set()


def names(panel):
    """The series in a panel's expressions."""
    return re.findall(r"vllm:\w+", " ".join(target["expr"] for target in panel["targets"]))
