"""How long kvmask's calls block when the master does not answer, beside the client's own calls.

    python tests/faults/outage.py [killed|stopped]

A lookup, a save and a load that would take many calls each, with a master that was killed, and with
one that was stopped (SIGSTOP). Then the same once more: the breaker knows. Last, a process ends
while its threads are in such calls, of a transfer and of `kvmask.exits.StoreCalls`. The exit status
is 1 if a request made more than one call of the client, blocked for 0.1 s more than it, or if that
process did not end with status 0.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from world import MIB, ROOT, Engine, Master, client, in_threads, quiet

from kvmask import Contract, CostModel, SlidingWindow, StrictKeys
from kvmask.mooncake import MooncakePolicy

BLOCKS = 256

_ENDS = """
import sys, threading, time
sys.path[:0] = [{root!r}, {here!r}]
from outage import new_engine, look_up, names_of
from world import client
from kvmask.exits import StoreCalls
engine = new_engine(client({address!r}), "ends")
calls = StoreCalls()

def ask():
    with calls:
        engine.kv.store.batch_is_exist(["other"])

threads = [
    threading.Thread(target=look_up, args=(engine, names_of(1)), daemon=True),
    threading.Thread(target=ask, daemon=True),
]
print("made", flush=True)
if sys.stdin.readline() == "killed\\n":
    for thread in range(2):  # it finds the connections broken, at once
        engine.kv.store.batch_is_exist(["any"])
for thread in threads:
    thread.start()
time.sleep(0.5)
assert all(thread.is_alive() for thread in threads), "a call was over"
print("in a call", flush=True)
"""


class Timed:
    """A store's client whose calls are timed, per thread."""

    def __init__(self, store: Any) -> None:
        self._store = store
        # Not by their ids, which are used again.
        self.calls: dict[threading.Thread, list[float]] = {}

    def __getattr__(self, name: str) -> Any:
        made = getattr(self._store, name)

        def call(*args: Any) -> Any:
            begun = time.monotonic()
            try:
                return made(*args)
            finally:
                took = time.monotonic() - begun
                self.calls.setdefault(threading.current_thread(), []).append(took)

        return call


def names_of(salt: int) -> list[bytes]:
    """Digests of a request."""
    return [bytes([salt]) + i.to_bytes(31, "little") for i in range(BLOCKS)]


def new_engine(store: Any, model: str) -> Engine:
    """An engine whose lookups, saves and loads take many calls."""
    contract = Contract(
        [SlidingWindow(16, window=BLOCKS * 16)],
        16,
        StrictKeys(model),
        hashing=None,
        facts={"dtype": "uint8"},
    )
    return Engine(
        store,
        contract,
        BLOCKS + 1,
        [4096],
        policy=MooncakePolicy(max_pieces=8),
        costs=CostModel(call=1e-6, missing=1e-3),
        hints=None,
    )


TABLE = [list(range(1, BLOCKS + 1))]


def look_up(engine: Engine, names: list[bytes]) -> Any:
    """A lookup of a request."""
    return engine.kv.lookup(engine.contract.request(hashes=names, num_tokens=BLOCKS * 16 + 1))


def measure(how: str) -> bool:
    """Print the table of one kind of outage; whether it is as it must be."""
    master = Master()
    store = client(master.address, 64 * MIB)
    good = True
    try:
        timed = Timed(store)
        engines = {name: new_engine(timed, how) for name in ("lookup", "save", "load")}
        names = names_of(1)
        engines["save"].compute(names, TABLE)
        done = engines["save"].kv.save(
            engines["save"].contract.request(hashes=names), TABLE, BLOCKS * 16
        )
        assert done.ok, done
        request = engines["load"].contract.request(hashes=names, num_tokens=BLOCKS * 16 + 1)
        hit = engines["load"].kv.lookup(request)
        assert hit.length == BLOCKS * 16, hit
        fresh = engines["save"].contract.request(hashes=names_of(2))
        work = {
            "lookup": lambda: look_up(engines["lookup"], names),
            "save": lambda: engines["save"].kv.save(fresh, TABLE, BLOCKS * 16),
            "load": lambda: engines["load"].kv.load(request, hit, TABLE),
        }
        ends = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _ENDS.format(
                    root=str(ROOT), here=str(Path(__file__).parent), address=master.address
                ),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert ends.stdin is not None
        assert ends.stdout is not None
        assert ends.stdout.readline() == "made\n"
        if how == "killed":
            master.kill()
            store.batch_is_exist(["any"])  # it finds the connection broken, at once
        else:
            master.signal(signal.SIGSTOP)
            time.sleep(0.5)
        ends.stdin.write(f"{how}\n")
        ends.stdin.flush()
        for again in ("first", "again"):
            timed.calls.clear()

            def one(name: str) -> tuple[float, list[float]]:
                begun = time.monotonic()
                result = work[name]()
                took = time.monotonic() - begun
                assert not (result.answered if name == "lookup" else result.ok), result
                return took, timed.calls.get(threading.current_thread(), [])

            for name, (took, calls) in zip(
                work, in_threads(*(lambda n=n: one(n) for n in work)), strict=True
            ):
                own = max(calls, default=0.0)
                right = len(calls) == (again == "first") and took - own < 0.1
                good = good and right
                print(
                    f"{how:8} {again:6} {name:7} {took:7.2f} s, of these {own:6.2f} s in "
                    f"{len(calls)} calls of the client{'' if right else '  <- WRONG'}"
                )
        said, _ = ends.communicate(timeout=150)
        good = good and ends.returncode == 0 and said == "in a call\n"
        print(f"{how:8} a process that ends within a call: status {ends.returncode}")
    finally:
        master.close()
        store.close()
    return good


def main(names: list[str]) -> int:
    """The exit status."""
    good = [measure(how) for how in names or ("killed", "stopped")]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    quiet()
    sys.exit(main(sys.argv[1:]))
