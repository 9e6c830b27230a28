"""The contract that a vLLM worker writes: `kvmask why` on it gives the worker's own hit."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm_pair as pair
from fake_store import FakeStore
from vllm.sampling_params import SamplingParams
from vllm.utils import hashing
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request
from vllm_cases import Case, random_case
from vllm_oracle import engine

from kvmask import Contract
from kvmask.cli import main
from kvmask.errors import ArgumentError
from kvmask.groups import FullAttention, SlidingWindow
from kvmask.vllm import agreement
from kvmask.why import diagnose

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "a secret seed")
    kv_cache_utils.init_none_hash(hashing.sha256)


def worker_of(
    case: Case,
    *,
    tp: int = 1,
    pp: int = 1,
    pcp: int = 1,
    dcp: int = 1,
    heads: int = 8,
    prefix: str = "",
    namespace: str = "",
) -> Any:
    """A worker of rank 0 whose keys vLLM itself has made."""
    cls = engine().worker.MooncakeStoreWorker
    worker = object.__new__(cls)
    worker._capacity_only = False
    worker.coord = pair.coordinator(case, "stock")
    worker.hash_block_size = case.hash_block_size
    worker._kv_cache_groups = worker.coord.kv_cache_groups
    worker.tp_size, worker.pp_size, worker.pcp_size, worker.dcp_size = tp, pp, pcp, dcp
    worker.tp_rank = worker.pp_rank = worker.pcp_rank = worker.dcp_rank = 0
    worker.num_kv_head = heads
    worker.store_tp_size = None
    worker._record_kv_connector_operation = lambda *args, **kwargs: None
    metadata = engine().data.KeyMetadata(
        "model", 0, 0, 0, 0, cache_prefix=prefix, store_namespace=namespace
    )
    worker._group_tp_replication_factors = worker._compute_group_tp_replication_factors()
    worker.token_dbs = worker._build_token_databases(metadata, None)
    worker._init_lookup_key_prefixes()
    return worker


def config_of(algorithm: str = "sha256", rank: int = 0) -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm),
        parallel_config=SimpleNamespace(rank=rank),
    )


def plain_case(*groups: Any, tokens: int = 129) -> Case:
    return replace(
        random_case(1, 0),
        groups=groups or (FullAttention(32), SlidingWindow(16, window=32)),
        hash_block_size=16,
        alignment=None,
        retention=None,
        partial=False,
        num_tokens=tokens,
    )


def vllm_hashes(tokens: list[int], unit: int, function: Any = hashing.sha256) -> list[bytes]:
    request = Request(
        request_id="r",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=kv_cache_utils.get_request_block_hasher(unit, function),
    )
    return list(request.block_hashes)


GRIDS: list[dict[str, Any]] = [
    {},
    {"tp": 4, "heads": 2},
    {"tp": 2, "pp": 2, "heads": 8, "prefix": "blue"},
    {"tp": 4, "dcp": 2, "heads": 4},
    {"pcp": 2, "namespace": "@store_pp:1@store_format:rank_local_tp1_layout_LBNHC"},
]


def test_why_on_the_file_gives_the_hit_that_the_worker_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Random groups, ranks and stores: vLLM's own lookup against `kvmask why` in a command line."""
    store = FakeStore()
    monkeypatch.setattr("kvmask.cli.quiet.quiet_connect", lambda *args, **kwargs: store)
    monkeypatch.setattr(store, "close", lambda: 0)
    path, prompt = str(tmp_path / "contract.json"), str(tmp_path / "prompt.json")
    hits = compared = 0
    for index in range(160):
        rng = random.Random(index)
        case = random_case(97, index)
        # vLLM gives the coordinator no groups but those that take part.
        case = replace(case, groups=tuple(g for g in case.groups if g.prefix_cacheable))
        if case.num_tokens < 2:
            continue
        worker = worker_of(case, **rng.choice(GRIDS))
        if any(g.span % g.block_size for g in case.groups if g.kind == "chunked"):
            continue  # a contract refuses chunks that begin inside a block
        contract = agreement.contract_of(worker, config_of())
        agreement.write(worker, config_of(), path)
        assert Contract.read(path) == contract
        tokens = [rng.randrange(1000) for _ in range(case.num_tokens)]
        hashes = vllm_hashes(tokens, case.hash_block_size)
        everything = rng.random() < 0.3
        store.pool = {
            f"{prefix}@{digest.hex()}": b"x"
            for row in worker._lookup_key_prefixes
            for prefix in row
            for digest in hashes
            if everything or rng.random() < 0.93
        }
        worker.store = store
        try:
            right = worker.lookup(len(tokens), hashes).hit_length if hashes else 0
        except AssertionError:  # vLLM's own, at the edge of a chunk and for windows of one token
            continue
        Path(prompt).write_text(json.dumps(tokens))
        assert (
            main(["why", "--contract", path, "--tokens", prompt, "--master", "h:1", "--json"]) == 0
        )
        found = json.loads(capsys.readouterr().out)
        assert found["length"] == right
        compared += 1
        hits += right > 0
    assert compared > 100
    assert hits > 30


def test_the_file_says_what_the_worker_knows(tmp_path: Path) -> None:
    path = tmp_path / "contract.json"
    agreement.write(worker_of(plain_case(), tp=4, heads=2), config_of(), str(path))
    contract = Contract.read(path)
    assert [group.kind for group in contract.groups] == ["full", "window"]
    assert contract.groups[1].window == 32
    assert (contract.hash_block_size, contract.coordinator.alignment) == (16, 32)
    assert contract.ranks.tp_size == 4
    assert contract.hashing.algorithm == "sha256"
    assert contract.keys[0][0].model == "model"
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["contract.json"]  # nothing else is left


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_every_algorithm(tmp_path: Path, algorithm: str) -> None:
    function = getattr(hashing, algorithm)
    kv_cache_utils.init_none_hash(function)
    path = tmp_path / "contract.json"
    worker = worker_of(plain_case())
    agreement.write(worker, config_of(algorithm), str(path))
    contract = Contract.read(path)
    tokens = list(range(129))
    hashes = vllm_hashes(tokens, 16, function)
    assert list(contract.request(tokens).hashes) == hashes
    store = FakeStore()
    for row in worker._lookup_key_prefixes:
        store.pool.update({f"{p}@{h.hex()}": b"x" for p in row for h in hashes})
    assert diagnose(contract.request(tokens), store).length == 128


def test_without_a_seed_the_file_holds_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED")
    path = tmp_path / "contract.json"
    agreement.write(worker_of(plain_case()), config_of(), str(path))
    kv_cache_utils.init_none_hash(hashing.sha256)
    found = Contract.read(path)
    assert "seed" not in json.loads(path.read_text())["hash"]
    assert list(found.request(range(129)).hashes) == vllm_hashes(list(range(129)), 16)
    # This algorithm starts from random bytes, which only the engine knows.
    with heard(caplog):
        agreement.write(worker_of(plain_case()), config_of("xxhash"), str(path))
    assert "the contract takes digests alone: xxhash starts from random bytes" in caplog.text
    assert Contract.read(path).hashing is None


def heard(caplog: pytest.LogCaptureFixture) -> Any:
    """What vLLM's logger says reaches the fixture."""

    @contextlib.contextmanager
    def attached() -> Iterator[None]:
        agreement.logger.addHandler(caplog.handler)
        try:
            yield
        finally:
            agreement.logger.removeHandler(caplog.handler)

    return attached()


def test_only_rank_0_writes(tmp_path: Path) -> None:
    path = tmp_path / "contract.json"
    for worker, rank, name in (
        (worker_of(plain_case()), 1, str(path)),
        (None, 0, str(path)),
        (worker_of(plain_case()), 0, None),
    ):
        agreement.write(worker, config_of(rank=rank), name)
        assert list(tmp_path.iterdir()) == []


def test_a_worker_that_only_gives_memory_writes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = SimpleNamespace(_capacity_only=True)
    with heard(caplog):
        agreement.write(worker, config_of(), str(tmp_path / "contract.json"))
    assert "this worker only gives memory" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_keys_that_are_not_kvmask_s_are_never_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = worker_of(plain_case())
    worker._lookup_key_prefixes = (("another",), ("another",))
    with heard(caplog):
        agreement.write(worker, config_of(), str(tmp_path / "contract.json"))
    assert "`keys` of group 0 must be those of the worker" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_groups_that_kvmask_has_no_rule_for_are_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agreement, "kind_of", lambda spec, manager: None)
    with heard(caplog):
        agreement.write(worker_of(plain_case()), config_of(), str(tmp_path / "contract.json"))
    assert "`groups` must be of kinds that kvmask knows" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with heard(caplog):
        agreement.write(worker_of(plain_case()), config_of(), str(tmp_path / "gone" / "c.json"))
    assert "no contract is written to" in caplog.text


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "`contract` must be the path of a file, got 3"),
        ("", "`contract` must be the path of a file, got ''"),
        ("/nowhere/at/all/c.json", "`contract` must be in a folder that exists"),
    ],
)
def test_wrong_options(value: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        agreement.check_option(value)


def test_the_option_is_a_path(tmp_path: Path) -> None:
    assert agreement.check_option(None) is None
    path = str(tmp_path / "c.json")
    assert agreement.check_option(path) == path


def test_equal_rules_of_other_tensors_stay_apart() -> None:
    case = plain_case(FullAttention(16), FullAttention(16, spec=1), FullAttention(16))
    contract = agreement.contract_of(worker_of(case), config_of())
    specs = [group.spec for group in contract.groups]
    assert specs[0] == specs[2] != specs[1]
