"""What a request pays in vLLM, from its tokens to the plan of its load, with stock and with kvmask.

    python bench/bench_vllm_path.py [--tokens 8192 131072 1048576] [--shape dsv4 gemma full16]
    python bench/bench_vllm_path.py --row 150 [...]    lookups alone, each side's in a row

Scheduler and worker are vLLM's real classes, made as an engine makes them. They talk over vLLM's
own ZMQ connection, and the store has a real master on loopback. Four steps are timed:

    hash    the block hasher, over all tokens of the request
    lookup  `get_num_new_matched_tokens` of the connector's scheduler; everything is in the store,
            and hints are warm
    save    the sending thread's job without its store calls: masks, keys, addresses
    load    the receiving thread's job without its store calls

Times are wall time. "store" is the time that a lookup spends in the store's own call, "beyond" the
rest of the lookup. Warm figures are medians of repeated calls. Cold figures are first calls after
other work: the caches of the processor hold something else, and the lookup is one of a request that
was hashed before that. All sides run in turn, so that a busy machine slows all of them. Each call
begins when the renewals of the calls before it are over. Before the timing, the hits are compared.

Sides: `stock` is vLLM's connector. `kvmask` asks with the worker's client in the scheduler's
process, `own client` with a store client of the scheduler's own. In the last two the worker answers
over ZMQ: `wire` sends the digests that the worker lacks, `worker` all of them, as vLLM's protocol.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":  # a script must also run if the package is not installed
    sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "tests")]

from shapes import SHAPES

SIDES: dict[str, tuple[str, dict[str, Any], bool, bool]] = {
    # connector, options, whether the scheduler does not see the worker, nor its handshake
    "stock": ("MooncakeStoreConnector", {}, False, False),
    "kvmask": ("KVMaskStoreConnector", {}, False, False),
    "own client": ("KVMaskStoreConnector", {}, True, False),
    "wire": ("KVMaskStoreConnector", {}, True, True),
    "worker": ("KVMaskStoreConnector", {"lookup_in": "worker"}, False, False),
}
TOKENS = (8_192, 131_072, 1_048_576)
CACHE = 64 << 20  # bytes that are touched before a cold call: more than the caches hold


class Timed:
    """The run's store client. Its lookups are real and timed; transfers do nothing."""

    real: Any = None
    seconds = 0.0
    hold = False  # existence calls of saves answer at once: nothing is there
    answers: dict[Any, list[int]] = {}  # noqa: RUF012 one for all

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return exists(lambda k: [0] * len(k) if Timed.hold else Timed.real.batch_is_exist(k), keys)

    def batch_put_from_multi_buffers(self, keys: list[str], *_: Any) -> list[int]:
        start = time.perf_counter()
        answer = Timed.answers.setdefault(("put", len(keys)), [0] * len(keys))
        Timed.seconds += time.perf_counter() - start
        return answer

    def batch_get_into_multi_buffers(
        self, keys: list[str], addresses: Any, sizes: list[list[int]]
    ) -> list[int]:
        start = time.perf_counter()
        answer = [sum(row) for row in sizes]
        Timed.seconds += time.perf_counter() - start
        return answer

    def close(self) -> None:
        """The run closes the client."""


def exists(ask: Callable[[list[str]], list[int]], keys: list[str]) -> list[int]:
    """An existence call, timed unless kvmask's thread makes it to renew what lookups left out."""
    start = time.perf_counter()
    answer = ask(keys)
    if threading.current_thread().name != "kvmask-renewals":
        Timed.seconds += time.perf_counter() - start
    return answer


def connect(handshake: Any) -> Any:
    """The scheduler's own client: one that moves no bytes, timed like the other."""
    from kvmask.vllm import places

    store, real = Timed(), places_connect(handshake)

    store.batch_is_exist = functools.partial(  # type: ignore[method-assign]
        exists, real.batch_is_exist
    )
    store.close = real.close  # type: ignore[method-assign]
    assert places.connect is connect
    return store


places_connect: Any = None


class Side:
    """One connector with both its sides, for one shape."""

    def __init__(self, name: str, shape: Any) -> None:
        import vllm_world as world

        connector, extra, apart, mute = SIDES[name]
        self.shape = shape
        # A lookup may take as long as it takes: here its time is measured.
        options = {"lookup_deadline_ms": 600_000, **extra} if name != "stock" else {}
        config = world.vllm_config(shape.groups, shape.hash_block, options, connector)
        self.pair = world.Pair(
            config, world.cache_config(shape.groups), apart=apart, handshake=not mute
        )
        worker = self.pair.worker
        for db in worker.token_dbs:
            db.set_kv_caches_base_addr([0x7F00_0000_0000])
            db.set_block_len([64 * db.block_size])
        self.hasher = self._hasher(name)
        self.threads = self._threads()

    def _hasher(self, name: str) -> Callable[[Any], list[bytes]]:
        from vllm.utils.hashing import sha256
        from vllm.v1.core import kv_cache_utils

        import kvmask.vllm

        kv_cache_utils.init_none_hash(sha256)
        make = kv_cache_utils.get_request_block_hasher
        if name != "stock":
            make = kvmask.vllm.request_block_hasher
        made: Callable[[Any], list[bytes]] = make(self.shape.hash_block, sha256)
        return made

    def _threads(self) -> tuple[Any, Any]:
        """The transfer threads, not started: their jobs are run here, one by one."""
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import worker as stock

        from kvmask.vllm import connector

        w = self.pair.worker
        sending: Any = stock.KVCacheStoreSendingThread
        receiving: Any = stock.KVCacheStoreRecvingThread
        if type(w) is not stock.MooncakeStoreWorker:
            own = connector.classes()
            sending, receiving = own[sending.__name__], own[receiving.__name__]
        shared = (w.store, w.coord, w.token_dbs, w.block_size, 0)
        send = sending(
            *shared,
            w._group_tp_replication_factors,
            "kv_both",
            threading.Event(),
            False,
            w.store_replicate_config,
        )
        return send, receiving(*shared, threading.Event())

    def hash(self, tokens: list[int]) -> list[bytes]:
        request = SimpleNamespace(
            block_hashes=[],
            num_tokens=len(tokens),
            _all_token_ids=tokens,
            all_token_ids=tokens,
            mm_features=[],
            prompt_embeds=None,
            lora_request=None,
            cache_salt=None,
        )
        return self.hasher(request)

    def lookup(self, tokens: int, digests: list[bytes]) -> int:
        request = SimpleNamespace(request_id="r", num_tokens=tokens, block_hashes=digests)
        found, _ = self.pair.scheduler_side.get_num_new_matched_tokens(request, 0)
        assert found is not None
        self.pair.scheduler.load_specs.clear()
        return int(found)

    def save(self, tokens: int, digests: list[bytes], tables: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import data

        thread = self.threads[0]
        meta = data.ReqMeta(
            "r", tokens, tables, digests, can_save=True, store_job_id=1, prefill_end_tokens=tokens
        )
        thread.add_request(meta)
        thread._handle_request(thread.request_queue.get())
        thread.delete_finished_stored_request("r")

    def load(self, tokens: int, digests: list[bytes], tables: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import data

        thread = self.threads[1]
        tails = tuple(data.TailKeyBoundary(g, tokens) for g in range(len(tables)))
        thread.request_queue.put(None)
        thread.request_queue.get()
        spec = data.LoadSpec(0, tokens, True, tokens, tails)
        thread._handle_request(data.ReqMeta("r", tokens, tables, digests, load_spec=spec))


def evict() -> None:
    """Fill the processor's caches with something else."""
    junk = bytearray(CACHE)
    for i in range(0, CACHE, 4096):
        junk[i : i + 4096] = bytes(4096)


def settle() -> None:
    """Wait until nothing is left to be renewed."""
    from kvmask import renewer

    time.sleep(0.003)  # what follows a lookup is done a millisecond after it
    stop = time.monotonic() + 10
    while any(r.renewals.pending for r in list(renewer._all)) and time.monotonic() < stop:
        time.sleep(0.001)


def once(step: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of one call, and those of them that the store took."""
    Timed.seconds = 0.0
    start = time.perf_counter()
    step()
    return time.perf_counter() - start, Timed.seconds


def rounds(tokens: int) -> int:
    return 31 if tokens < 100_000 else 15 if tokens < 1_000_000 else 7


def fill(shape: Any, tokens: int, digests: Sequence[bytes], side: Side) -> None:
    """Store one byte under every key that stock asks for."""
    asked: list[str] = []
    real, Timed.real = (
        Timed.real,
        SimpleNamespace(batch_is_exist=lambda keys: asked.extend(keys) or [1] * len(keys)),
    )
    side.lookup(tokens, list(digests))
    Timed.real = real
    for start in range(0, len(asked), 4096):
        part = asked[start : start + 4096]
        assert real.put_batch(part, [b"x"] * len(part)) == 0


def measure(shape: Any, tokens: int) -> Iterator[tuple[str, str, dict[str, list[float]]]]:
    """(step, what, per side the seconds of every round)."""
    from kvmask.vllm.acting import ACTING

    rng = random.Random(tokens)
    ids = [rng.randrange(1 << 17) for _ in range(tokens)]
    sides = {name: Side(name, shape) for name in SIDES}
    digests = sides["stock"].hash(ids)
    for side in sides.values():
        assert side.hash(ids) == digests
    fill(shape, tokens, digests, sides["stock"])
    hits = {name: side.lookup(tokens, digests) for name, side in sides.items()}
    assert len(set(hits.values())) == 1, hits
    assert hits["stock"] > 0
    assert ACTING.on, "kvmask failed, and vLLM's own functions ran on its side"
    tables = tuple(list(range(1, tokens // g.block_size + 1)) for g in shape.groups)
    steps: dict[str, tuple[Callable[[Side, list[bytes]], Any], Sequence[str]]] = {
        "hash": (lambda side, _: side.hash(ids), ("stock", "kvmask")),
        "lookup": (lambda side, known: side.lookup(tokens, known), tuple(SIDES)),
        "save": (lambda side, known: side.save(tokens, known, tables), ("stock", "kvmask")),
        "load": (lambda side, known: side.load(tokens, known, tables), ("stock", "kvmask")),
    }
    for step, (call, names) in steps.items():
        Timed.hold = step == "save"
        for cold in (False, True):
            took: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
            for _ in range(rounds(tokens) if not cold else max(5, rounds(tokens) // 2)):
                for name in names:
                    known = digests if not cold or step == "hash" else sides[name].hash(ids)
                    settle()
                    if cold:
                        evict()
                    took[name].append(once(functools.partial(call, sides[name], known)))
            gc.collect()
            label = "cold" if cold else "warm"
            yield step, label, {n: [all_ - store for all_, store in t] for n, t in took.items()}
            if step == "lookup":
                yield "store", label, {n: [store for _, store in t] for n, t in took.items()}
    for side in sides.values():
        side.pair.close()


def row(shape: Any, tokens: int, calls: int) -> dict[str, list[float]]:
    """Per side the seconds beyond the store's call, of lookups in a row."""
    rng = random.Random(tokens)
    stock = Side("stock", shape)
    digests = stock.hash([rng.randrange(1 << 17) for _ in range(tokens)])
    fill(shape, tokens, digests, stock)
    stock.pair.close()
    took = {}
    for name in SIDES:
        if name != "stock":
            side = Side(name, shape)
            for _ in range(calls // 4):
                side.lookup(tokens, digests)
            settle()
            pairs = [once(functools.partial(side.lookup, tokens, digests)) for _ in range(calls)]
            took[name] = [all_ - store for all_, store in pairs]
            side.pair.close()
    return took


def text(seconds: float) -> str:
    return f"{seconds * 1e3:10.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="*", default=list(TOKENS))
    parser.add_argument("--shape", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--row", type=int, help="only lookups, so many of each side in a row")
    args = parser.parse_args()
    from unittest import mock

    import vllm_world as world

    from kvmask import mooncake
    from kvmask.vllm import places

    global places_connect
    places_connect = places.connect
    with tempfile.TemporaryDirectory() as folder, mooncake.local_master() as master:
        os.environ["VLLM_RPC_BASE_PATH"] = folder
        path = world.store_settings(master.address, Path(folder))
        os.environ["MOONCAKE_CONFIG_PATH"] = str(path)
        Timed.real = mooncake.connect(master, segment_bytes=2 << 30)
        print(
            f"{'shape':7} {'tokens':>8} {'step':8} {'ms':4} "
            + " ".join(f"{name:>10}" for name in SIDES)
            + f" {'ratio':>7}"
        )
        with (
            contextlib.closing(Timed.real),
            world.stores_of(Timed),
            mock.patch.object(places, "connect", connect),
        ):
            for shape in args.shape:
                for tokens in args.tokens:
                    if args.row:
                        for name, took in row(SHAPES[shape], tokens, args.row).items():
                            print(
                                f"{shape:7} {tokens:8} {name:10} median "
                                f"{text(statistics.median(took))} least {text(min(took))}",
                                flush=True,
                            )
                    else:
                        show(shape, tokens)
                    Timed.real.remove_all(True)
    return 0


def show(shape: str, tokens: int) -> None:
    total: dict[str, dict[str, float]] = {"warm": {}, "cold": {}}
    for step, label, took in measure(SHAPES[shape], tokens):
        medians = {name: statistics.median(values) for name, values in took.items()}
        for name in ("stock", "kvmask"):
            total[label][name] = total[label].get(name, 0.0) + medians[name]
        line(shape, tokens, "beyond" if step == "lookup" else step, label, medians)
    for label, medians in total.items():
        line(shape, tokens, "total", label, medians)


def line(shape: str, tokens: int, step: str, label: str, medians: dict[str, float]) -> None:
    cells = " ".join(text(medians[n]) if n in medians else " " * 10 for n in SIDES)
    ratio = medians["stock"] / medians["kvmask"]
    print(f"{shape:7} {tokens:8} {step:8} {label:4} {cells} {ratio:7.1f}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.exit(main())
