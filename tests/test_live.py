"""The same round trips against a real master on this machine: two clients, bytes compared."""

import pytest
from rig import Engine, assert_loaded, contract_of, digests

from kvmask import FullAttention, Mamba, SlidingWindow, mooncake

pytestmark = pytest.mark.store

DSV4 = [
    FullAttention(256),
    SlidingWindow(64, window=128),
    SlidingWindow(64, window=512),
    SlidingWindow(4, window=16),
    SlidingWindow(8, window=64),
]


@pytest.fixture
def two(master):
    """Two clients; the second gives no memory, so all it reads comes over the wire."""
    first = mooncake.connect(master)
    second = mooncake.connect(master, segment_bytes=0)
    yield first, second
    first.remove_all(True)
    second.close()
    first.close()


def test_round_trips_of_all_groups(two):
    shapes = [
        ("dsv4", DSV4, 4, 4096, {}),
        ("partial", [FullAttention(64), Mamba(64)], 16, 208, {"partial_hits": True}),
        ("eagle", [FullAttention(64, eagle=True), SlidingWindow(16, window=33)], 16, 640, {}),
    ]
    for kind in ("numpy", "torch"):
        if kind == "torch":
            pytest.importorskip("torch")
        for name, groups, hash_block, tokens, options in shapes:
            contract = contract_of(groups, hash_block, model=f"{name}-{kind}", **options)
            source = Engine(two[0], contract, tokens, seed=4, kind=kind, layers=3)
            target = Engine(two[1], contract, tokens, kind=kind, layers=3)
            with source.kv, target.kv:
                hashes = digests(tokens // hash_block)
                assert target.lookup(hashes, tokens + 1).length == 0
                saved = source.save(hashes, tokens)
                assert saved.ok, str(saved)
                again = source.save(hashes, tokens)
                assert (again.stored, again.present) == (0, saved.stored)
                hit = target.lookup(hashes, tokens + 1)
                assert hit == target.lookup(hashes, tokens + 1, strategy="exact")
                assert hit.length >= tokens - 64
                result = target.load(hashes, hit)
                assert result.ok, str(result)
                assert assert_loaded(source, target, hit) == result.loaded > 0


def test_an_object_that_is_gone_is_reported(two):
    contract = contract_of([FullAttention(16)], 16, model="gone")
    source = Engine(two[0], contract, 64, seed=4)
    target = Engine(two[1], contract, 64)
    with source.kv, target.kv:
        hashes = digests(4, salt=1)
        assert source.save(hashes, 64).ok
        hit = target.lookup(hashes, 65)
        assert hit.length == 64
        two[0].remove_all(True)
        result = target.load(hashes, hit)
        assert (result.loaded, {f.code for f in result.failures}) == (0, {-704})
        assert result.invalid == {"0": sorted(target.tables[0])}


def test_a_pool_that_is_full():
    """A pool of 16 MiB and 30 blocks of 768 KiB: what has no room is named and stops the mark."""
    if mooncake.find_master() is None:
        pytest.skip("no mooncake_master program on this machine")
    with mooncake.local_master(args=("--eviction_high_watermark_ratio=1.0",)) as own:
        store = mooncake.connect(own, segment_bytes=16 << 20)
        contract = contract_of([FullAttention(1 << 18)], 1 << 18)
        tokens = 30 << 18
        engine = Engine(store, contract, tokens, seed=1, layers=1)
        try:
            result = engine.save(digests(30), tokens)
            assert result.pressure
            assert result.stored + len(result.failures) == 30
            assert {f.code for f in result.failures} == {-200}
            first = min(f.block for f in result.failures)
            assert result.mark == first << 18
        finally:
            engine.kv.close()
            store.close()
