"""What bounce memory and seals cost per gigabyte, in a save and in a load.

    python bench/guard.py [--mib 256] [--block-kib 256] [--pieces 8] [--live] [--torch]

The store copies to and from memory of its own, which is the least that a store does. With `--live`
it is a real one on this machine, over TCP. Each kind is measured five times in turn; the figures
are the best of each, in CPU seconds of all threads and in seconds of the wall clock.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent)]

import numpy as np

from kvmask import BounceMemory, Contract, FullAttention, KVLayout, KVTransfer, StrictKeys, mooncake
from kvmask._core import gather, scatter

KINDS = {"without": (None, False), "bounce": (True, False), "sealed": (None, True),
         "both": (True, True)}  # fmt: skip


class MemoryStore:
    """Keeps objects in memory and copies them, as a store must."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [int(key in self.objects) for key in keys]

    def batch_put_from_multi_buffers(self, keys: Any, addresses: Any, sizes: Any) -> list[int]:
        for key, row in zip(keys, sizes, strict=True):
            if key not in self.objects:
                self.objects[key] = np.empty(sum(row), np.uint8)
        gather(addresses, sizes, [self.objects[key].ctypes.data for key in keys])
        return [0] * len(keys)

    def batch_get_into_multi_buffers(self, keys: Any, addresses: Any, sizes: Any) -> list[int]:
        scatter(addresses, sizes, [self.objects[key].ctypes.data for key in keys])
        return [sum(row) for row in sizes]

    def register_buffer(self, address: int, size: int) -> int:
        return 0

    def unregister_buffer(self, address: int) -> int:
        return 0

    def remove_all(self, force: bool) -> int:
        return 0  # the next save writes over them


@contextlib.contextmanager
def live(size: int) -> Iterator[Any]:
    """A client whose objects lie in another client's memory."""
    with mooncake.local_master(lease_ms=100) as master:
        owner = mooncake.connect(master, segment_bytes=2 * size, buffer_bytes=16 << 20)
        store = mooncake.connect(master, segment_bytes=0, buffer_bytes=16 << 20)
        yield store
        store.close()
        owner.close()


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--block-kib", type=int, default=256)
    parser.add_argument("--pieces", type=int, default=8, help="tensors of a block")
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--torch", action="store_true", help="copy as to a device, by torch")
    given = parser.parse_args()
    blocks = given.mib * 1024 // given.block_kib
    piece = given.block_kib * 1024 // given.pieces
    rng = np.random.default_rng(1)
    tensors = [
        rng.integers(0, 256, (blocks + 1, piece), dtype=np.uint8) for _ in range(given.pieces)
    ]
    kept = tensors
    if given.torch:
        import torch

        from kvmask.guard import store as guard_store
        from kvmask.guard.copies import TorchCopies

        kept = [torch.from_numpy(t) for t in tensors]
        guard_store.copies_for = lambda rows: TorchCopies(rows, "cpu")  # type: ignore[assignment]
    layout = KVLayout.from_tensors(kept, num_blocks=blocks + 1)
    size = blocks * layout.block_bytes
    digests = [i.to_bytes(32, "little") for i in range(1, blocks + 1)]
    tables = [list(range(1, blocks + 1))]
    best: dict[tuple[str, str], list[float]] = {}
    with live(size) if given.live else contextlib.nullcontext(MemoryStore()) as store:
        for _ in range(5):
            for kind, (bounce, sealed) in KINDS.items():
                contract = Contract(
                    [FullAttention(16)],
                    16,
                    StrictKeys(kind),
                    hashing=None,
                    facts={"dtype": "uint8"},
                    sealed=sealed,
                )
                memory = BounceMemory() if bounce else None
                with KVTransfer(store, contract.bind([layout]), bounce=memory, hints=None) as kv:
                    request = contract.request(hashes=digests, num_tokens=blocks * 16 + 1)
                    tables_now = tables
                    if given.live:
                        time.sleep(0.2)  # leases end
                    store.remove_all(True)
                    if isinstance(store, MemoryStore):
                        known, store.objects = store.objects, {}
                    begun = time.process_time(), time.perf_counter()
                    plan = request.save_plan(kv.contract, tables_now, blocks * 16, tools=kv.tools)
                    call = plan.next_call()
                    assert call is not None
                    plan.feed(call.run(store))
                    if isinstance(store, MemoryStore):
                        store.objects = known
                    while (call := plan.next_call()) is not None:
                        plan.feed(call.run(store))
                    note(best, kind, "save", begun, size)
                    assert plan.result.stored == blocks, plan.result
                    hit = kv.lookup(request)
                    begun = time.process_time(), time.perf_counter()
                    result = kv.load(request, hit, tables_now)
                    note(best, kind, "load", begun, size)
                    assert result.loaded == blocks, result
    print(f"{given.mib} MiB in blocks of {given.block_kib} KiB and {given.pieces} pieces")
    print(
        "| | save, CPU s/GB | wall s/GB | load, CPU s/GB | wall s/GB |\n|---|---:|---:|---:|---:|"
    )
    for kind in KINDS:
        row = [f"{x:.3f}" for what in ("save", "load") for x in best[kind, what]]
        print(f"| {kind} | {' | '.join(row)} |")


def note(
    best: dict[tuple[str, str], list[float]],
    kind: str,
    what: str,
    begun: tuple[float, float],
    size: int,
) -> None:
    """Keep the best times of a kind, per gigabyte."""
    now = time.process_time(), time.perf_counter()
    times = [(b - a) / size * 1e9 for a, b in zip(begun, now, strict=True)]
    known = best.setdefault((kind, what), times)
    best[kind, what] = [min(pair) for pair in zip(known, times, strict=True)]


if __name__ == "__main__":
    main()
