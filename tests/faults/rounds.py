"""Random rounds of faults against a real store, with every byte compared.

    python tests/faults/rounds.py [--rounds 200] [--seed N] [--minutes M]

Each round gives a few engines some saves, lookups and loads, in threads, while something happens to
the store: the master is killed and started again, owners of memory are killed or paused for a
while, objects are removed under a load, the pool is full, leases run out, engines race for the
same keys. What a load reports as loaded must be right, and every key must have an outcome.

With ``--minutes`` the rounds go on until the time is over, and the resident memory is noted: a
soak. The exit status is 1 after a wrong byte, a key without an outcome, or memory that grows.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections import Counter
from typing import Any

from world import MIB, Engine, Master, Owner, client, failed_blocks, in_threads, quiet, rss_mib

from kvmask import BounceMemory, Contract, FullAttention, Mamba, SlidingWindow, StrictKeys

GROUPS = [FullAttention(64), SlidingWindow(16, window=32), Mamba(64)]
BLOCK_BYTES = [48 << 10, 4 << 10, 16 << 10]
UNIT = 16
TOKENS = 512
SEGMENT = 16 * MIB
FAULTS = ("none", "master", "owner", "pause", "remove", "full", "lease", "race")
# Short leases, and a master that takes an owner for dead after some seconds.
FLAGS = ("--default_kv_lease_ttl=500", "--client_ttl=5", "--eviction_high_watermark_ratio=0.9")


class World:
    """A master, owners, and engines of all kinds over some clients of this process."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.counts: Counter[str] = Counter()
        self.compared = 0
        self.wrong: list[str] = []
        self.master = Master(*FLAGS)
        self.owners = [Owner(self.master.address, SEGMENT).wait() for _ in range(2)]
        self.stores = [client(self.master.address) for _ in range(2)]
        self.blocks = TOKENS // UNIT + 1
        self.engines: list[Engine] = []
        for n, store in enumerate(self.stores):
            # Two engines of each kind, so that one loads what another saved.
            for sealed, bounce in ((False, None), (True, None), (True, True)):
                contract = Contract(
                    GROUPS,
                    UNIT,
                    StrictKeys(f"rounds-{sealed}"),
                    hashing=None,
                    facts={"dtype": "uint8"},
                    sealed=sealed,
                )
                memory = BounceMemory(4 * MIB, 2, 64) if bounce else None
                self.engines.append(
                    Engine(
                        store,
                        contract,
                        self.blocks,
                        BLOCK_BYTES,
                        bounce=memory,
                        breaker=(n == 0) or None,
                        hints=None,
                    )
                )

    def close(self) -> None:
        """End all processes of this world."""
        for owner in self.owners:
            owner.go_on()
        for engine in self.engines:
            try:
                engine.kv.close()
            except Exception as error:
                self.counts[f"close: {type(error).__name__}"] += 1
        for store in self.stores:
            store.close()
        for engine in self.engines:
            engine.kv.release_retired()
        for owner in self.owners:
            owner.close()
        self.master.close()

    def note(self, what: str) -> None:
        """A mistake."""
        self.wrong.append(what)
        print(f"WRONG: {what}", flush=True)

    def save_some(self, engine: Engine, names: list[bytes], tokens: int) -> None:
        """Compute and save a request."""
        tables = self.tables(engine)
        engine.compute(names, tables)
        request = engine.contract.request(hashes=names)
        plan = request.save_plan(engine.kv.contract, tables, tokens, tools=engine.kv.tools)
        keys = len(plan.keys)
        result = request.saved(engine.kv._run(plan))
        if result.stored + result.present + len(result.failures) != keys:
            self.note(f"a save of {keys} keys: {result}")
        self.counts["saves"] += 1
        self.counts["keys stored"] += result.stored
        self.tell(result)

    def load_some(self, engine: Engine, names: list[bytes]) -> None:
        """Look a request up, load it and compare."""
        request = engine.contract.request(hashes=names, num_tokens=TOKENS + 1)
        hit = engine.kv.lookup(request)
        self.counts["lookups"] += 1
        self.counts["hits"] += hit.length > 0
        if not hit.length:
            return
        if self.rng.random() < 0.2:
            time.sleep(self.rng.random())  # the lease runs out
        for memory in engine.memory:
            memory[:] = 0
        tables = self.tables(engine)
        result = engine.kv.load(request, hit, tables)
        planned = sum(mask.count() for mask in hit.masks)
        if result.loaded + len(result.failures) != planned:
            self.note(f"a load of {planned} keys: {result}")
        bad = failed_blocks(result)
        wrong, seen = engine.wrong_bytes(names, tables, hit.masks, bad)
        self.compared += seen
        self.counts["loads"] += 1
        self.counts["keys loaded"] += result.loaded
        self.tell(result)
        if wrong:
            # No peer is paused for as long as the client waits, so plain engines are right, too.
            self.note(f"{wrong} of {seen} bytes, {engine.kv.tools.guard!r}: {result}")

    def tell(self, result: Any) -> None:
        """Count what failed."""
        for failure in result.failures:
            self.counts[f"code {failure.code}"] += 1

    def tables(self, engine: Engine) -> list[list[int]]:
        """Block tables over all of a request; groups have memory of their own."""
        return [list(range(1, TOKENS // g.block_size + 1)) for g in engine.contract.groups]

    def disturb(self, fault: str) -> None:
        """Do something to the store, while engines use it."""
        rng = self.rng
        time.sleep(rng.random() * 0.3)
        if fault == "master":
            self.master.kill()
            time.sleep(rng.random())
            self.master.begin()
        elif fault == "owner":
            i = rng.randrange(len(self.owners))
            self.owners[i].close()
        elif fault == "pause":
            owner = rng.choice(self.owners)
            owner.pause()
            time.sleep(0.5 + 2 * rng.random())
            owner.go_on()
        elif fault == "remove":
            for _ in range(3):
                self.stores[0].remove_all(True)
                time.sleep(0.1)

    def round(self, number: int, fault: str) -> None:
        """A few engines at work during one fault."""
        rng = self.rng
        many = fault == "full"
        requests = [
            [rng.randbytes(32) for _ in range(TOKENS // UNIT)] for _ in range(6 if many else 2)
        ]
        pairs = [(self.engines[i], self.engines[i + 3]) for i in range(3)]
        for source, _ in pairs:
            for names in requests:
                self.save_some(source, names, TOKENS)
        if fault == "lease":
            time.sleep(0.6)
        work = [lambda: self.disturb(fault)]
        for source, target in pairs:
            # An engine's memory belongs to one thread at a time.
            def both(source: Engine = source, target: Engine = target) -> None:
                for names in requests[:2]:
                    self.load_some(target, names)
                fresh = [rng.randbytes(32) for _ in range(TOKENS // UNIT)]
                self.save_some(source, fresh, TOKENS)
                self.load_some(target, fresh)

            work.append(both)
        if fault == "race":
            # The same keys by two engines at once.
            same = [rng.randbytes(32) for _ in range(TOKENS // UNIT)]
            in_threads(*(lambda e=e: self.save_some(e, same, TOKENS) for e in self.engines))
            for engine in self.engines:
                self.load_some(engine, same)
        in_threads(*work)
        # Whoever died comes back.
        for i, owner in enumerate(self.owners):
            if not owner.alive:
                self.owners[i] = Owner(self.master.address, SEGMENT).wait()
        for engine in self.engines:
            breaker = engine.kv.tools.breaker
            if breaker is not None and breaker.open:
                breaker._until = 0.0  # the next round begins without waiting


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=None, help="a soak: rounds until then")
    given = parser.parse_args()
    seed = random.randrange(1 << 32) if given.seed is None else given.seed
    rng = random.Random(seed)
    print(f"seed {seed}", flush=True)
    begun = time.monotonic()
    world = World(rng)
    samples: list[tuple[float, float]] = []
    done = 0
    try:
        while True:
            passed = time.monotonic() - begun
            if done >= given.rounds if given.seconds is None else passed > given.seconds:
                break
            # Each fault in turn, so that few rounds have them all.
            fault = FAULTS[done % len(FAULTS)]
            before = time.monotonic()
            world.round(done, fault)
            done += 1
            took = time.monotonic() - before
            if given.seconds is not None:
                gc.collect()
                samples.append((passed, rss_mib()))
            print(
                f"{done} {fault} {took:.1f} s, {world.compared / MIB:.0f} MiB compared", flush=True
            )
    finally:
        world.close()
    print(
        f"{done} rounds in {time.monotonic() - begun:.0f} s, {world.compared} bytes compared, "
        f"{len(world.wrong)} mistakes, seed {seed}"
    )
    for name, count in sorted(world.counts.items()):
        print(f"  {name}: {count}")
    grown = False
    if samples:
        third = len(samples) // 3
        early = sorted(m for _, m in samples[third : 2 * third])[third // 2]
        late = sorted(m for _, m in samples[2 * third :])[third // 2]
        grown = late > early * 1.05 + 8
        print(f"resident memory: {early:.0f} MiB in the second third, {late:.0f} MiB in the last")
    return 1 if world.wrong or grown or not world.compared else 0


if __name__ == "__main__":
    quiet()
    sys.exit(main())
