"""Bounce memory and seals over CUDA tensors. The store is one in host memory: it sees no device.

Run on a machine with a device: ``python -m pytest -m gpu tests/test_bounce_gpu.py``.
"""

import pytest
from fake_store import GET, PUT, FakeStore
from rig import contract_of, digests

from kvmask import BounceMemory, FullAttention, KVLayout, KVTransfer, StrictKeys
from kvmask.errors import ArgumentError

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]

HASHES = digests(8)
TABLES = [[3, 1, 4, 8, 5, 9, 2, 6]]
BOUNCE = BounceMemory(chunk_bytes=1 << 16, chunks=2, max_retired=1)


def new_engine(store, seed=None, sealed=True, bounce=BOUNCE, regions=False):
    """(transfer, contract, tensors): two tensors, one of them a view with gaps."""
    generator = torch.Generator("cuda").manual_seed(seed or 0)
    tensors = [
        torch.randint(0, 256, (10, 700), dtype=torch.uint8, device="cuda", generator=generator),
        torch.randn((10, 64), dtype=torch.float16, device="cuda", generator=generator)[:, 8:40],
    ]
    if seed is None:
        for tensor in tensors:
            tensor.zero_()
    layout = KVLayout.from_tensors(tensors, num_blocks=10)
    if regions:
        layout = KVLayout.from_regions(
            layout.regions, 10, layout.storages, device=str(tensors[0].device)
        )
    contract = contract_of(
        [FullAttention(16)], 16, StrictKeys("m"), facts={"dtype": "mixed"}, sealed=sealed
    )
    return KVTransfer(store, contract.bind([layout]), bounce=bounce), contract, tensors


def save(kv, contract, **options):
    return kv.save(contract.request(hashes=HASHES), TABLES, 128, **options)


def load(kv, contract, **options):
    request = contract.request(hashes=HASHES, num_tokens=129)
    return kv.load(request, kv.lookup(request), TABLES, **options)


@pytest.mark.parametrize("regions", [False, True], ids=["tensors", "addresses"])
@pytest.mark.parametrize("sealed", [False, True])
def test_a_round_trip_between_two_caches(sealed, regions):
    store = FakeStore()
    source, contract, ours = new_engine(store, 1, sealed, regions=regions)
    target, _, theirs = new_engine(store.client(), None, sealed, regions=regions)
    saved = save(source, contract)
    assert saved.ok, str(saved)
    loaded = load(target, contract)
    assert loaded.ok, str(loaded)
    for one, two in zip(ours, theirs, strict=True):
        assert torch.equal(one[TABLES[0]], two[TABLES[0]])
        assert not two[[0, 7]].any()
    source.close()
    target.close()


def test_a_save_reads_what_its_event_waited_for():
    """The tensors are computed on a stream that is far behind the host."""
    store = FakeStore()
    source, contract, ours = new_engine(store, 1)
    target, _, theirs = new_engine(store.client())
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        ours[0].add_(1)
        event = torch.cuda.Event()
        event.record(stream)
    assert save(source, contract, event=event).ok
    assert load(target, contract, event=torch.cuda.current_stream()).ok
    assert torch.equal(ours[0][TABLES[0]], theirs[0][TABLES[0]])


def test_late_bytes_reach_no_tensor():
    import ctypes

    store = FakeStore()
    source, contract, _ = new_engine(store, 1)
    client = store.client()
    target, _, theirs = new_engine(client)
    assert save(source, contract).ok
    client.fail(GET, -800, times=1)
    failed = load(target, contract)
    assert (failed.loaded, failed.quarantined) == (0, {})
    assert load(target, contract).ok
    before = [tensor.clone() for tensor in theirs]
    call = client.calls(GET)[0]
    for row, sizes in zip(call.addresses, call.sizes, strict=True):
        ctypes.memset(row[0], 0xEE, sizes[0])
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(before, theirs, strict=True))


def test_a_changed_object_is_found_before_a_tensor_is_touched():
    store = FakeStore()
    source, contract, _ = new_engine(store, 1)
    target, _, theirs = new_engine(store.client())
    assert save(source, contract).ok
    for name, value in store.pool.items():
        store.pool[name] = bytes([value[0] ^ 1]) + value[1:]
    result = load(target, contract)
    assert (result.loaded, {f.code for f in result.failures}) == (0, {-10_003})
    assert not any(tensor.any() for tensor in theirs)
    assert store.counts[PUT] == 1


def test_seals_without_bounce_memory_are_refused():
    with pytest.raises(ArgumentError, match=r"got layouts on \['cuda:0'\]"):
        new_engine(FakeStore(), bounce=None)
