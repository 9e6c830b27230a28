"""Late bytes on the real client of Mooncake: with and without bounce memory and seals.

    python tests/faults/late.py [load|save]

load: the owner of some objects is stopped during a load, which fails after a minute. Its blocks are
loaded for another request. Then the owner goes on, and the blocks are compared again.

save: the owner is stopped during a save, which fails after a minute. The saver uses its memory for
something else. Another engine saves, the owner goes on, and a third engine loads what the second
one saved.

The exit status is 1 if an engine with both options has a wrong byte in a block that was reported as
loaded, then or some seconds later. Each case takes about 75 s.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from world import MIB, Engine, Master, Owner, client, failed_blocks, in_threads, quiet

from kvmask import BounceMemory, Contract, FullAttention, StrictKeys
from kvmask.mooncake import MooncakePolicy, import_store

BLOCK = 256 << 10
COUNT = 32  # blocks of a request
KINDS = ("without", "bounce", "sealed", "both")
BOUNCE = BounceMemory(chunk_bytes=32 * MIB, chunks=2, max_retired=4)


def contract(kind: str) -> Contract:
    """Contracts differ by their model, so that no engine meets another's objects."""
    return Contract(
        [FullAttention(16)],
        16,
        StrictKeys(f"late-{kind}"),
        hashing=None,
        facts={"dtype": "uint8"},
        sealed=kind in ("sealed", "both"),
    )


def engine(store: Any, kind: str, place: str = "") -> Engine:
    """An engine with these options; with a place it saves into that owner's memory."""
    bounce = BOUNCE if kind in ("bounce", "both") else None
    config = None
    if place:
        config = import_store().ReplicateConfig()
        config.preferred_segment = place
    policy = MooncakePolicy(replicate_config=config)
    return Engine(
        store, contract(kind), COUNT + 1, [BLOCK], bounce=bounce, breaker=None, policy=policy
    )


def digests(salt: int) -> list[bytes]:
    return [bytes([salt, i]) * 16 for i in range(COUNT)]


FLAGS = (
    "--client_ttl=600",
    "--default_kv_lease_ttl=600000",
    "--eviction_high_watermark_ratio=1.0",
)
TABLE = [list(range(1, COUNT + 1))]


def save(e: Engine, names: list[bytes]) -> Any:
    e.compute(names, TABLE)
    return e.kv.save(e.contract.request(hashes=names), TABLE, COUNT * 16)


def load(e: Engine, names: list[bytes]) -> Any:
    """Look up and load a request; returns (hit, result)."""
    request = e.contract.request(hashes=names, num_tokens=COUNT * 16 + 1)
    hit = e.kv.lookup(request)
    return hit, e.kv.load(request, hit, TABLE)


def pause_when(owner: Owner, begun: Any) -> threading.Thread:
    """Stop the owner as soon as bytes flow."""

    def watch() -> None:
        deadline = time.monotonic() + 20
        while not begun() and time.monotonic() < deadline:
            time.sleep(0.0002)
        owner.pause()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def told(kind: str, result: Any, moved: int) -> None:
    """What became of a call whose peer was stopped."""
    quarantined = sum(map(len, result.quarantined.values()))
    codes = sorted({f.code for f in result.failures})
    print(f"  {kind:8} {moved} keys moved, codes {codes}, {quarantined} blocks in quarantine")


def case_load(kinds: tuple[str, ...]) -> dict[str, int]:
    """The owner is stopped during a load."""
    first, second = digests(1), digests(2)
    segment = 4 * len(kinds) * COUNT * BLOCK
    master = Master(*FLAGS)
    owner = Owner(master.address, segment).wait()
    source = client(master.address)
    wrong: dict[str, int] = {}
    processes = [owner]
    try:
        for kind in kinds:
            e = engine(source, kind)
            assert save(e, first).ok, kind
            e.kv.close()
        # The second request lies in another owner's memory.
        processes.append(Owner(master.address, segment).wait())
        engines = {kind: engine(source, kind, processes[1].name) for kind in kinds}
        requests = {}
        for kind, e in engines.items():
            assert save(e, second).ok, kind
            requests[kind] = e.contract.request(hashes=first, num_tokens=COUNT * 16 + 1)
            e.memory[0][:] = 0
        hits = {kind: engines[kind].kv.lookup(request) for kind, request in requests.items()}
        print("load:", {kind: hit.length // 16 for kind, hit in hits.items()}, "blocks")
        sample = engines["without"].memory[0]
        watch = pause_when(owner, lambda: any(sample[b, 0] for b in range(1, COUNT, 7)))
        begun = time.monotonic()
        failed = in_threads(
            *(lambda k=k, e=e: e.kv.load(requests[k], hits[k], TABLE) for k, e in engines.items())
        )
        watch.join()
        print(f"  {time.monotonic() - begun:.1f} s with the owner stopped, then:")
        for kind, result in zip(engines, failed, strict=True):
            told(kind, result, result.loaded)
        loaded = {}
        for kind, e in engines.items():
            e.memory[0][:] = 0
            hit, result = load(e, second)
            bad = failed_blocks(result)
            loaded[kind] = hit, bad
            found, seen = e.wrong_bytes(second, TABLE, hit.masks, bad)
            print(
                f"  {kind:8} the same blocks for another request: {result.loaded} keys loaded, "
                f"{found} of {seen} bytes wrong"
            )
        owner.go_on()
        time.sleep(5)
        print("  5 s after the owner went on:")
        for kind, e in engines.items():
            hit, bad = loaded[kind]
            wrong[kind], seen = e.wrong_bytes(second, TABLE, hit.masks, bad)
            print(f"  {kind:8} {wrong[kind]} of {seen} bytes wrong in blocks reported as loaded")
    finally:
        for process in processes:
            process.close()
        source.close()
        master.close()
    return wrong


def case_save(kinds: tuple[str, ...]) -> dict[str, int]:
    """The owner is stopped during a save."""
    first, second, probe = digests(3), digests(4), digests(5)
    master = Master(*FLAGS)
    # Room for one request of each kind: what the second engine saves takes that place.
    owner = Owner(master.address, len(kinds) * COUNT * BLOCK * 3 // 2).wait()
    saver, other, third = (client(master.address) for _ in range(3))
    wrong: dict[str, int] = {}
    try:
        savers = {kind: engine(saver, kind) for kind in kinds}
        others = {kind: engine(other, kind) for kind in kinds}
        for kind in kinds:
            # Open the connections, and see that all is well.
            for e in (savers[kind], others[kind]):
                e.compute(first, TABLE)
                done = e.kv.save(e.contract.request(hashes=probe), [[1]], 16)
                assert done.ok, kind
        before = owner.rss_mib()
        watch = pause_when(owner, lambda: owner.rss_mib() > before + 1)
        begun = time.monotonic()
        failed = in_threads(
            *(
                lambda e=e: e.kv.save(e.contract.request(hashes=first), TABLE, COUNT * 16)
                for e in savers.values()
            )
        )
        watch.join()
        print(f"save: {time.monotonic() - begun:.1f} s with the owner stopped, then:")
        for kind, result in zip(kinds, failed, strict=True):
            told(kind, result, result.stored)
        for e in savers.values():
            e.memory[0][:] = 0xEE
        go_on = threading.Timer(2.0, owner.go_on)
        go_on.start()
        stored = in_threads(*(lambda e=e: save(e, second) for e in others.values()))
        go_on.join()
        time.sleep(5)
        print("  another engine's save, then, 5 s after the owner went on, a third one's load:")
        for kind, result in zip(kinds, stored, strict=True):
            e = engine(third, kind)
            hit, got = load(e, second)
            wrong[kind], seen = e.wrong_bytes(second, TABLE, hit.masks, failed_blocks(got))
            e.kv.close()
            codes = sorted({f.code for f in got.failures})
            print(
                f"  {kind:8} {result.stored} keys stored, {got.loaded} loaded, "
                f"{len(got.failures)} failed with codes {codes}, {wrong[kind]} of {seen} bytes "
                "wrong in blocks reported as loaded"
            )
    finally:
        owner.close()
        for store in (saver, other, third):
            store.close()
        master.close()
    return wrong


CASES = {"load": case_load, "save": case_save}


def main(names: list[str]) -> int:
    status = 0
    for name in names or list(CASES):
        wrong = CASES[name](KINDS)
        if wrong["both"]:
            print(f"{name}: {wrong['both']} wrong bytes with bounce memory and seals")
            status = 1
        # Late bytes of a load need no seal, and those of a save no bounce memory.
        alone = "bounce" if name == "load" else "sealed"
        if wrong[alone]:
            print(f"{name}: {wrong[alone]} wrong bytes with {alone}")
            status = 1
    return status


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    quiet()
    code = main(sys.argv[1:])
    sys.exit(code)
