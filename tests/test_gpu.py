"""Caches in the memory of a CUDA device: registered, saved and loaded in the order of its streams.

    make test ARGS="-m gpu"

runs the half that needs a device. The same tests run on CPU tensors everywhere.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from device_memory import (
    NO_DEVICE,
    DeviceStore,
    Raw,
    Work,
    both,
    random_bytes,
    same,
    why_no_cuda_client,
)
from fake_store import UnregisteredMemory
from rig import digests

from kvmask import Contract, FullAttention, KVLayout, KVTransfer, SlidingWindow, VllmKeys, mooncake
from kvmask.errors import ArgumentError, LayoutError

torch = pytest.importorskip("torch")

needs_device = [pytest.mark.gpu, pytest.mark.skipif(bool(NO_DEVICE), reason=NO_DEVICE)]
GROUPS = {"full": FullAttention(64), "swa": SlidingWindow(16, window=32)}
CONTRACT = Contract(GROUPS, 16, VllmKeys("m"), hashing=None)
TOKENS = 256
HASHES = digests(TOKENS // 16)
BLOCKS = {"full": 6, "swa": 20}
TABLES = {"full": [1, 2, 3, 4], "swa": list(range(1, 17))}
# Where a load puts them, so that no block is right by chance.
OTHERS = {"full": [5, 4, 3, 2], "swa": list(range(19, 3, -1))}


def caches(device: str, seed: int | None) -> dict[str, list[Any]]:
    """Two layers per group; without a seed all zeros."""
    made: dict[str, list[Any]] = {}
    for g, (name, blocks) in enumerate(BLOCKS.items()):
        shape = (blocks, GROUPS[name].block_size, 8)
        made[name] = [
            torch.zeros(shape, dtype=torch.uint8, device=device)
            if seed is None
            else random_bytes(device, shape, seed * 100 + 10 * g + layer)
            for layer in range(2)
        ]
    return made


def transfer(store: Any, tensors: dict[str, list[Any]]) -> KVTransfer:
    layouts = {
        name: KVLayout.from_tensors(layers, num_blocks=BLOCKS[name])
        for name, layers in tensors.items()
    }
    return KVTransfer(store, CONTRACT.bind(layouts))


def saved(kv: KVTransfer, **options: Any) -> Any:
    result = kv.save(CONTRACT.request(hashes=HASHES), TABLES, TOKENS, **options)
    assert result.ok, str(result)
    return result


def loaded(kv: KVTransfer, **options: Any) -> Any:
    request = CONTRACT.request(hashes=HASHES)
    hit = kv.lookup(request)
    assert hit.length == TOKENS - 64  # one token is left to compute, and hits are whole blocks
    tables = {
        "full": OTHERS["full"][:3],
        "swa": OTHERS["swa"][:12],
    }
    result = kv.load(request, hit, tables, **options)
    assert result.ok, str(result)
    assert result.loaded == 3 + 2
    return result


def compare(source: dict[str, list[Any]], target: dict[str, list[Any]]) -> None:
    """Every loaded block is the saved one, and no other block was touched."""
    for name, blocks in (("full", range(3)), ("swa", range(10, 12))):
        for mine, theirs in zip(source[name], target[name], strict=True):
            for i in blocks:
                assert same(mine[TABLES[name][i]], theirs[OTHERS[name][i]]), (name, i)
            touched = {OTHERS[name][i] for i in blocks}
            for block in set(range(BLOCKS[name])) - touched:
                assert not theirs[block].any(), (name, block)


@both
def test_a_pool_is_registered_whole_and_given_back(device: str) -> None:
    """vLLM cuts its caches out of one pool: the pool is registered, once."""
    pool = torch.zeros(1 << 16, dtype=torch.uint8, device=device)
    layers = [pool[i * 6 * 512 :][: 6 * 512].view(6, 64, 8) for i in range(2)]
    rest = torch.zeros((20, 16, 8), dtype=torch.uint8, device=device)
    layout = KVLayout.from_tensors(layers, num_blocks=6)
    assert layout.device == device
    assert layout.addresses([1])[0][0] == [layer[1].data_ptr() for layer in layers]
    store = DeviceStore(device)
    other = KVLayout.from_tensors([rest], num_blocks=20)
    with KVTransfer(store, CONTRACT.bind({"full": layout, "swa": other})):
        calls = store.calls("register_buffer")
        made = [(call.addresses[0][0], call.sizes[0][0]) for call in calls]
        assert sorted(made) == sorted(
            (t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in (pool, rest)
        )
    given_back = {call.addresses[0][0] for call in store.calls("unregister_buffer")}
    assert given_back == {address for address, _ in made}
    with pytest.raises(UnregisteredMemory):
        store.batch_put_from_multi_buffers(["key"], [[pool.data_ptr()]], [[8]])


@both
def test_a_round_trip_between_two_caches(device: str) -> None:
    store = DeviceStore(device)
    source, target = caches(device, 1), caches(device, None)
    with transfer(store, source) as first, transfer(store.client(), target) as second:
        assert second.lookup(CONTRACT.request(hashes=HASHES)).length == 0
        saved(first)
        loaded(second)
    compare(source, target)


@both
@pytest.mark.parametrize("what", ["event", "stream"])
def test_a_save_reads_what_the_stream_has_written(device: str, what: str) -> None:
    """The engine's kernels write the blocks; a save that is asked for at once waits for them."""
    store = DeviceStore(device)
    source, target, computed = caches(device, None), caches(device, None), caches(device, 2)
    with transfer(store, source) as first, transfer(store.client(), target) as second:
        work = Work(device)

        def compute() -> None:
            for name, layers in source.items():
                for layer, result in zip(layers, computed[name], strict=True):
                    layer.copy_(result)

        work.put(compute)
        saved(first, event=getattr(work, what)())
        loaded(second)
    compare(computed, target)


@both
@pytest.mark.parametrize("what", ["event", "stream"])
def test_a_load_writes_after_the_stream_has_read(device: str, what: str) -> None:
    """The blocks' old bytes are still read by a kernel when they are given to another request."""
    store = DeviceStore(device)
    source, target = caches(device, 3), caches(device, 4)
    before = {name: [layer.clone() for layer in layers] for name, layers in target.items()}
    kept: dict[str, list[Any]] = {}
    with transfer(store, source) as first, transfer(store.client(), target) as second:
        saved(first)
        work = Work(device)

        def read() -> None:
            for name, layers in target.items():
                kept[name] = [layer.clone() for layer in layers]

        work.put(read)
        loaded(second, event=getattr(work, what)())
        work.synchronize()
    for name, layers in before.items():
        for old, mine in zip(layers, kept[name], strict=True):
            assert same(old, mine), name
    for name, blocks in (("full", range(3)), ("swa", range(10, 12))):
        for mine, theirs in zip(source[name], target[name], strict=True):
            for i in blocks:
                assert same(mine[TABLES[name][i]], theirs[OTHERS[name][i]]), (name, i)


def test_without_an_event_the_order_is_the_callers() -> None:
    """What the tests above rest on: a save that waits for nothing reads the old bytes.

    Not on a device, where it would be a race.
    """
    device = "cpu"
    store = DeviceStore(device)
    source, target, computed = caches(device, 5), caches(device, None), caches(device, 6)
    before = {name: [layer.clone() for layer in layers] for name, layers in source.items()}
    with transfer(store, source) as first, transfer(store.client(), target) as second:
        work = Work(device)
        work.put(
            lambda: [
                layer.copy_(result)
                for name, layers in source.items()
                for layer, result in zip(layers, computed[name], strict=True)
            ]
        )
        saved(first)
        work.synchronize()
        loaded(second)
    compare(before, target)


class Posed:
    """Memory of this machine that says that it is a device's: nothing here reads it."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor  # owns the memory
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def on_a_device(shape: tuple[int, ...]) -> Any:
    """A device's tensor, or one that poses as such where there is no device."""
    if NO_DEVICE:
        return Posed(torch.zeros(shape, dtype=torch.uint8))
    return torch.zeros(shape, dtype=torch.uint8, device="cuda:0")


def test_layers_on_a_device_and_beside_it_are_refused() -> None:
    shape = (6, 64, 8)
    here = torch.zeros(shape, dtype=torch.uint8)
    with pytest.raises(LayoutError, match=r"`tensors` must lie on one device, got cpu .* cuda"):
        KVLayout.from_tensors([here, on_a_device(shape)], num_blocks=6)


def test_groups_on_a_device_and_beside_it_are_refused() -> None:
    layouts = {
        "full": KVLayout.from_tensors([on_a_device((6, 64, 8))], num_blocks=6),
        "swa": KVLayout.from_tensors([torch.zeros((20, 16, 8), dtype=torch.uint8)], num_blocks=20),
    }
    with pytest.raises(ArgumentError, match=r"`layouts` must be on one device, got \['cpu', 'cuda"):
        CONTRACT.bind(layouts)


@pytest.mark.parametrize("device", [pytest.param("cuda:1", marks=needs_device)])
def test_layers_on_two_devices_are_refused(device: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    layers = [torch.zeros((6, 64, 8), device=where) for where in ("cuda:0", device)]
    with pytest.raises(LayoutError, match=r"must lie on one device, got cuda:0 .* cuda:1"):
        KVLayout.from_tensors(layers, num_blocks=6)


@pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=needs_device)])
def test_an_address_of_a_device_is_its_memory(device: str) -> None:
    """What `DeviceStore` rests on: torch takes an address without a copy."""
    tensor = random_bytes(device, (64,), 1)
    seen = torch.as_tensor(Raw(tensor.data_ptr() + 16, 8), device=device)
    assert seen.data_ptr() == tensor.data_ptr() + 16
    tensor[16:24] = 7
    torch.cuda.synchronize()
    assert seen.eq(7).all()


@pytest.mark.store
@pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=needs_device)])
def test_a_real_store_moves_a_devices_blocks(device: str, master: Any) -> None:
    reason = why_no_cuda_client()
    if reason:
        pytest.skip(reason)
    with (
        contextlib.closing(mooncake.connect(master)) as one,
        contextlib.closing(mooncake.connect(master, segment_bytes=0)) as two,
    ):
        source, target, computed = caches(device, None), caches(device, None), caches(device, 7)
        with transfer(one, source) as first, transfer(two, target) as second:
            work = Work(device)
            work.put(
                lambda: [
                    layer.copy_(result)
                    for name, layers in source.items()
                    for layer, result in zip(layers, computed[name], strict=True)
                ]
            )
            saved(first, event=work.event())
            loaded(second, event=work.stream())
        compare(computed, target)
        one.remove_all(True)
