"""Sealed objects: a checksum of the bytes and the key, put with every object, checked on load."""

import json
import sys

import pytest
from fake_store import GET, PUT, FakeStore
from rig import Engine, assert_loaded, contract_of, digests, key

import kvmask
from kvmask import (
    AbsenceMemo,
    BounceMemory,
    Contract,
    FullAttention,
    KVLayout,
    KVTransfer,
    Mamba,
    PlanTools,
    SavePlan,
    SlidingWindow,
    StrictKeys,
    VllmKeys,
    drive,
)
from kvmask.errors import ArgumentError, MissingDependencyError, PlanStateError
from kvmask.guard import SEAL_BYTES, seal_of
from kvmask.mooncake import MooncakePolicy
from kvmask.plans import BROKEN_SEAL, NO_BOUNCE

pytest.importorskip("xxhash")

HASHES = digests(4)
FACTS = {"dtype": "uint8"}
GROUPS = [FullAttention(64), SlidingWindow(16, window=32), Mamba(64)]
MEMORY = [None, BounceMemory(chunk_bytes=1 << 16, chunks=2, max_retired=1)]


def sealed_contract(groups=None, hash_block=16, **options):
    options.setdefault("sealed", True)
    groups = [FullAttention(16)] if groups is None else groups
    return contract_of(groups, hash_block, StrictKeys("m"), facts=FACTS, **options)


def engines(contract=None, tokens=64, **options):
    contract = sealed_contract() if contract is None else contract
    options.setdefault("breaker", None)
    store = FakeStore()
    return (
        Engine(store, contract, tokens, seed=5, **options),
        Engine(store.client(), contract, tokens, **options),
    )


# The seal


def test_golden_seals():
    """Literals of the `xxhash` package 4.1.0 (XXH3 0.8.4)."""
    assert seal_of("key", [b"bytes of a block"]).hex() == "4f5b2aa1182b7fcc969c0c8eea2a1698"
    assert seal_of("", [b""]).hex() == "7a3edd697cf3f9535310e30cce3262d6"
    assert (
        seal_of("schlüssel@1", [bytes(range(256)) * 5]).hex() == "53086bef704347dacf925b1ae9d3157d"
    )


def test_a_seal_is_of_the_bytes_and_the_key():
    seal = seal_of("a", [b"12345678"])
    assert len(seal) == SEAL_BYTES
    assert seal == seal_of("a", [b"123", b"", b"45678"])
    others = [("b", [b"12345678"]), ("a", [b"12345679"]), ("a", [b"1234567"]), ("a1", [b"2345678"])]
    assert seal not in [seal_of(*other) for other in others]


def test_an_object_is_its_bytes_and_its_seal():
    source, _ = engines()
    assert source.save(HASHES, 64).ok
    for i, digest in enumerate(HASHES):
        name = key(source, 0, digest)
        value = source.store.pool[name]
        assert value == source.block(0, i) + seal_of(name, [source.block(0, i)])


# Round trips


@pytest.mark.parametrize("bounce", MEMORY, ids=["", "bounce"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("max_pieces", [1, 3, None])
def test_round_trips(bounce, kind, max_pieces):
    if kind == "torch":
        pytest.importorskip("torch")
    contract = sealed_contract(GROUPS)
    hashes = digests(16)
    source, target = engines(contract, 256, kind=kind, bounce=bounce, max_pieces=max_pieces)
    saved = source.save(hashes, 256)
    assert saved.ok, str(saved)
    hit = target.lookup(hashes, 257)
    assert hit.length == 256
    result = target.load(hashes, hit)
    assert (result.ok, result.usable_tokens) == (True, 256)
    assert assert_loaded(source, target, hit) == result.loaded
    payload = sum(len(target.block(g, i)) for g, m in enumerate(hit.masks) for i in m.indices())
    assert result.num_bytes == target.kv.stats.loaded_bytes == payload
    for engine in (source, target):
        engine.kv.close()
        assert engine.store.registered == {}


@pytest.mark.parametrize("bounce", MEMORY, ids=["", "bounce"])
def test_bytes_that_changed_in_the_store(bounce):
    memo = AbsenceMemo(60.0)
    source, target = engines(bounce=bounce, failed_loads=memo)
    source.save(HASHES, 64)
    names = [key(source, 0, digest) for digest in HASHES]
    pool = source.store.pool
    for name, place in ((names[1], 0), (names[2], len(pool[names[2]]) - 1)):
        value = bytearray(pool[name])
        value[place] ^= 1
        pool[name] = bytes(value)
    before = [target.block(0, i) for i in range(4)]
    hit = target.lookup(HASHES, 65)
    result = target.load(HASHES, hit)
    assert [(f.key, f.code) for f in result.failures] == [
        (names[1], BROKEN_SEAL),
        (names[2], BROKEN_SEAL),
    ]
    assert (result.loaded, result.usable_tokens, result.quarantined) == (2, 16, {})
    assert result.invalid == {"0": sorted(target.tables[0][i] for i in (1, 2))}
    assert target.kv.stats.broken_seals == 2
    if bounce:
        assert [target.block(0, i) for i in (1, 2)] == before[1:3]  # never copied
    assert target.block(0, 0) == source.block(0, 0)
    assert target.lookup(HASHES, 65).length == 16  # the memo knows


@pytest.mark.parametrize("bounce", MEMORY, ids=["", "bounce"])
def test_another_object_under_the_key(bounce):
    """F15: late bytes of one save land where the store keeps another object, whole and in place."""
    source, target = engines(bounce=bounce)
    source.save(HASHES, 64)
    first, second = (key(source, 0, HASHES[i]) for i in (0, 1))
    source.store.pool[first] = source.store.pool[second]
    result = target.load(HASHES, target.lookup(HASHES, 65))
    assert [(f.key, f.code) for f in result.failures] == [(first, BROKEN_SEAL)]


@pytest.mark.parametrize("bounce", MEMORY, ids=["", "bounce"])
def test_an_object_without_a_seal(bounce):
    """A store that answers with the bytes there are: never as many as a block without its seal."""
    source, target = engines(bounce=bounce)
    source.save(HASHES, 64)
    size = len(source.block(0, 0))
    hit = target.lookup(HASHES, 65)
    target.store.fail(GET, size, keys=[key(source, 0, HASHES[3])])
    result = target.load(HASHES, hit)
    assert [f.code for f in result.failures] == [BROKEN_SEAL]
    assert result.loaded == 3


@pytest.mark.parametrize("bounce", MEMORY, ids=["", "bounce"])
def test_a_call_that_may_go_on_keeps_its_seals(bounce):
    source, target = engines(bounce=bounce)
    source.store.fail(PUT, -800, times=1)
    result = source.save(HASHES, 64)
    assert result.stored == 0
    assert result.quarantined == ({} if bounce else {"0": sorted(source.tables[0])})
    retired = source.kv.stats.retired_bytes
    assert retired == (1 << 16)
    assert source.save(HASHES, 64).ok
    registered = dict(source.store.registered)
    source.kv.close()
    left = source.store.registered
    assert sum(left.values()) == retired
    assert left.items() <= registered.items()
    assert source.kv.release_retired() == retired
    assert source.kv.release_retired() == 0
    target.kv.close()


def test_seals_run_out():
    source, _ = engines(bounce=BounceMemory(chunk_bytes=4096, chunks=1, max_retired=1))
    source.store.fail(PUT, -800)
    for _ in range(2):
        assert {f.code for f in source.save(HASHES, 64).failures} == {-800}
    before = source.store.counts[PUT]
    result = source.save(HASHES, 64)
    assert {f.code for f in result.failures} == {NO_BOUNCE}
    assert (source.store.counts[PUT], result.quarantined) == (before, {})


def test_policy_and_seal_cut_calls_together():
    """The seal is a piece of its own, unless it lies behind its block."""
    contract = sealed_contract()
    for bounce, pieces, calls in ((None, 4, 4), (None, 8, 2), (MEMORY[1], 2, 2), (None, 6, 2)):
        source, _ = engines(contract, bounce=bounce, max_pieces=pieces)  # two layers
        assert source.save(HASHES, 64).ok
        made = source.store.calls(PUT)
        assert len(made) == calls
        assert all(len(row) == (1 if bounce else 3) for call in made for row in call.addresses)


# The contract


def test_sealed_is_part_of_the_fingerprint():
    plain, sealed = sealed_contract(sealed=False), sealed_contract()
    assert plain.fingerprint != sealed.fingerprint
    assert (plain.sealed, sealed.sealed) == (False, True)
    assert plain != sealed
    # What was written before there were seals stays as it is.
    assert plain.fingerprint == "0062231a3d33a19b"
    assert sealed.fingerprint == "1fb42c7f1f735d0b"


def test_sealed_and_plain_engines_miss_each_other():
    source, _ = engines()
    source.save(HASHES, 64)
    other = Engine(source.store.client(), sealed_contract(sealed=False), 64)
    assert other.lookup(HASHES, 65).length == 0


def test_json():
    plain, sealed = sealed_contract(sealed=False), sealed_contract()
    assert "sealed" not in json.loads(plain.to_json())
    text = sealed.to_json()
    assert json.loads(text)["sealed"] is True
    again = Contract.from_json(text)
    assert again == sealed
    assert again.sealed
    assert again.scheme.sealed
    for wrong in ("1", '"true"', "null"):
        with pytest.raises(ArgumentError, match=r"`sealed` must be true or false"):
            Contract.from_json(text.replace('"sealed": true', f'"sealed": {wrong}'))
    with pytest.raises(ArgumentError, match="`fingerprint` must be that of the contract"):
        Contract.from_json(text.replace('"sealed": true', '"sealed": false'))


def test_only_strict_keys_can_say_so():
    with pytest.raises(ArgumentError, match=r"`sealed` needs StrictKeys.*got VllmKeys"):
        contract_of([FullAttention(16)], 16, VllmKeys("m"), sealed=True)
    with pytest.raises(TypeError, match="`sealed` must be bool, got int"):
        sealed_contract(sealed=1)


@pytest.mark.parametrize("device", ["cuda:0", None])
def test_device_memory_needs_bounce_memory(device):
    layout = KVLayout.from_regions([(1 << 20, 64, 64)], 16, [(1 << 20, 1024)], device=device)
    bound = sealed_contract().bind([layout])
    store = FakeStore()
    with pytest.raises(ArgumentError, match=r"sealed objects must lie in host memory.*`bounce`"):
        KVTransfer(store, bound)
    assert store.registered == {}


def test_a_contract_without_memory_looks_up():
    source, _ = engines()
    source.save(HASHES, 64)
    with KVTransfer(source.store.client(), source.contract) as kv:
        assert kv.lookup(source.request(HASHES, 65)).length == 64


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(MissingDependencyError, match="kvmask\\[sealed\\]"):
        engines()


# By hand


def test_plans_by_hand_seal_with_the_tools_of_a_transfer():
    source, target = engines()
    save = SavePlan(source.bound, HASHES, source.tables, 64, tools=source.kv.tools)
    assert drive(save, source.store).ok
    load = kvmask.LoadPlan(
        target.bound, HASHES, target.lookup(HASHES, 65), target.tables, tools=target.kv.tools
    )
    assert drive(load, target.store).ok
    assert [target.block(0, i) for i in range(4)] == [source.block(0, i) for i in range(4)]


def test_plans_by_hand_cannot_forget_the_seal():
    source, target = engines()
    source.save(HASHES, 64)
    hit = target.lookup(HASHES, 65)
    for tools in (None, PlanTools(MooncakePolicy())):
        with pytest.raises(PlanStateError, match=r"`KVTransfer.tools`.*sealed=True"):
            SavePlan(source.bound, HASHES, source.tables, 64, tools=tools)
        with pytest.raises(PlanStateError, match=r"`KVTransfer.tools`.*sealed=True"):
            kvmask.LoadPlan(target.bound, HASHES, hit, target.tables, tools=tools)
    plain = Engine(FakeStore(), sealed_contract(sealed=False), 64)
    with pytest.raises(PlanStateError, match=r"`KVTransfer.tools`.*sealed=False"):
        SavePlan(plain.bound, HASHES, plain.tables, 64, tools=source.kv.tools)


def test_memory_that_changes_while_it_is_put_is_found():
    """Without bounce memory the store reads the block itself, after the seal was made."""
    source, target = engines()
    block = source.tables[0][2]

    def scribble(store, name, keys):
        if name == PUT:
            source.tensors[0][0][block] ^= 0xFF

    source.store.hooks.append(scribble)
    assert source.save(HASHES, 64).ok
    result = target.load(HASHES, target.lookup(HASHES, 65))
    assert [(f.block, f.code) for f in result.failures] == [(2, BROKEN_SEAL)]
