"""The interpreter ends while threads of an engine are in calls of a real store."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from kvmask import mooncake

pytestmark = [pytest.mark.vllm, pytest.mark.store]

TESTS = Path(__file__).parent

PROGRAM = r"""
import os, sys, threading, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import vllm_pair, vllm_world as world
from test_vllm_jobs import HASHES
from test_vllm_outages import Engine
from vllm_oracle import engine
from kvmask import FullAttention, mooncake
from kvmask.vllm.lookup import lookups_of

running = mooncake.local_master()
master = running.__enter__()
os.environ["MOONCAKE_CONFIG_PATH"] = str(world.store_settings(master.address, Path(sys.argv[2])))
groups, extra = [FullAttention(4)], {"lookup_deadline_ms": 20}
pair = world.Pair(world.vllm_config(groups, 4, extra), world.cache_config(groups))
store, asked = pair.worker.store, [world.request(25, HASHES) for _ in range(2)]
assert pair.hit(asked[0]) == 0
master.process.kill()
master.process.wait()
own, begun = type(store).batch_is_exist, threading.Semaphore(0)

def told(self, keys):
    begun.release()
    took = 0.0
    while took < 1:  # a connection that is found broken answers at once; then a call takes seconds
        start = time.monotonic()
        answers = own(self, keys)
        took = time.monotonic() - start
    os.write(1, b"%s: %d\n" % (threading.current_thread().name.encode(), answers[0]))
    return answers

type(store).batch_is_exist = told
renewer = lookups_of(pair.worker).renewer
renewer.renewals.next_keys = lambda: ["renewed"]
type(renewer.renewals).pending = property(lambda renewals: 1)
renewer._start()
renewer._wake.set()
assert begun.acquire(timeout=20)  # it does not begin while a lookup runs
meta = engine().data.ReqMeta(
    "r", 24, ([1, 2, 3, 4, 5, 6],), HASHES, can_save=True, store_job_id=1, prefill_end_tokens=24
)
for name, work, args in (
    ("worker's lookup", pair.worker.lookup, (25, HASHES)),
    ("save", vllm_pair.run_job, (Engine(store).sender, meta)),
):
    threading.Thread(target=work, args=args, name=name, daemon=True).start()
for _ in range(2):
    assert begun.acquire(timeout=20)
assert pair.hit(asked[1]) == 0  # past the deadline
assert begun.acquire(timeout=20)
time.sleep(0.5)
print("the end", flush=True)
"""


def test_exit_waits_for_calls_of_lookups_saves_and_renewals(tmp_path):
    if mooncake.find_master() is None:
        pytest.skip("no mooncake_master program on this machine")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(TESTS), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=TESTS.parent,
        check=False,
    )
    threads = ["KVMaskLookup", "kvmask-renewals", "save", "worker's lookup"]
    first, *others = done.stdout.splitlines() or [""]
    assert first == "the end", done.stdout + done.stderr[-3000:]
    assert sorted(others) == [f"{name}: -900" for name in threads], done.stderr[-3000:]
    assert done.returncode == 0, done.stderr[-3000:]
