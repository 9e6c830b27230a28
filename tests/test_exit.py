"""The interpreter ends while a daemon thread is in a call of the store: it waits for the call."""

import os
import subprocess
import sys
from pathlib import Path

import kvmask

TESTS = Path(__file__).parent
# The kvmask that is tested: the sources beside the tests may be others, and not be built.
ENV = os.environ | {"PYTHONPATH": str(Path(kvmask.__file__).parent.parent)}

PROGRAM = r"""
import os, sys, threading, time
sys.path.insert(0, {tests!r})
from fake_store import EXIST
from rig import digests, pair
from kvmask import FullAttention

source, _ = pair([FullAttention(16)], 16, 64)
begun = threading.Event()

def slow(store, name, keys):
    if name == EXIST:
        begun.set()
        time.sleep({seconds})

def work():
    while True:
        source.lookup(digests(4), 65)
        os.write(1, b"answered\n")

source.store.hooks.append(slow)
threading.Thread(target=work, daemon=True).start()
begun.wait()
print("the end", flush=True)
{last}
"""


def run(last="", seconds=0.5, limit=None):
    text = PROGRAM.format(tests=str(TESTS), last=last, seconds=seconds)
    if limit is not None:
        text = f"import kvmask.exits\nkvmask.exits.EXIT_SECONDS = {limit}\n{text}"
    return child(text)


def child(text):
    return subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=TESTS,
        env=ENV,
        check=False,
    )


def test_exit_waits_for_the_call_and_lets_no_other_begin():
    done = run()
    assert (done.returncode, done.stdout) == (0, "the end\nanswered\n"), done.stderr


def test_the_status_stays():
    done = run("sys.exit(3)")
    assert (done.returncode, done.stdout) == (3, "the end\nanswered\n")


def test_a_call_that_never_ends_is_left_alone():
    done = run(seconds=1000, limit=0.2)
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr


def test_what_was_closed_needs_no_wait():
    done = run("source.kv.close()")
    assert (done.returncode, done.stdout) == (0, "the end\nanswered\n"), done.stderr


RENEWING = r"""
import sys, threading, time
sys.path.insert(0, {tests!r})
import kvmask.exits
from fake_store import FakeStore
from kvmask import KVTransfer
from kvmask.plans import Renewals
from test_renew import PROMPT, contract_of, digests, save

kvmask.exits.EXIT_SECONDS = 0.2
store, contract, hashes = FakeStore(), contract_of(), digests("a", PROMPT)
save(store, contract, hashes, PROMPT)
kv = KVTransfer(store, contract, renew=Renewals(share=1.0))
request = contract.request(hashes=hashes, num_tokens=PROMPT)
kv.lookup(request)
begun = threading.Event()

def stuck(store, name, keys):
    if threading.current_thread().name == "kvmask-renewals":
        begun.set()
        time.sleep(1000)

store.hooks.append(stuck)
kv.lookup(request)
assert begun.wait(20)
print("the end", flush=True)
"""


def test_a_renewal_that_never_ends_is_left_alone():
    done = subprocess.run(
        [sys.executable, "-c", RENEWING.format(tests=str(TESTS))],
        capture_output=True,
        text=True,
        timeout=20,
        cwd=TESTS,
        env=ENV,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr


CALLS = r"""
import os, sys, threading, time
import kvmask.exits
from kvmask.exits import StoreCalls

kvmask.exits.EXIT_SECONDS = {limit}
calls, other = StoreCalls(grace={grace}), StoreCalls()
begun = threading.Event()

def work():
    for i in range({times}):
        try:
            with calls:
                with other if i else calls:
                    begun.set()
                    time.sleep({seconds})
                    os.write(1, b"answered\n")
        except SystemExit:
            os.write(1, b"ended\n")
            raise

threading.Thread(target=work, daemon=True).start()
begun.wait()
{last}
print("the end", flush=True)
"""


def run_calls(grace=0.0, limit=60, times=1000, seconds=0.2, last=""):
    return child(CALLS.format(grace=grace, limit=limit, times=times, seconds=seconds, last=last))


def test_exit_waits_for_a_call_and_the_thread_ends_with_the_next():
    done = run_calls()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == ["the end", "answered"]
    assert "answered" not in done.stdout.splitlines()[2:]


def test_what_waits_in_a_queue_may_still_begin():
    done = run_calls(grace=30, times=4, seconds=0.1)
    assert (done.returncode, done.stdout.split().count("answered")) == (0, 4), done.stderr


def test_a_queue_that_does_not_empty_is_left():
    """More than fits: the grace ends it, and what runs then is waited for."""
    done = run_calls(grace=1, seconds=0.05)
    assert done.returncode == 0, done.stderr
    assert 1 < done.stdout.split().count("answered") < 100


def test_a_call_that_never_ends_holds_no_exit():
    done = run_calls(limit=0.2, seconds=1000)
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr


def test_a_forked_child_waits_for_no_call_of_its_parent():
    fork = """
child = os.fork()
if not child:
    with calls:
        os.write(1, b"child\\n")
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
os.write(1, b"child ended\\n")
"""
    done = run_calls(times=1, seconds=3, last=fork)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["child", "child ended", "the end", "answered"]


def test_a_child_waits_for_its_own_calls():
    fork = """
child = os.fork()
if not child:
    begun.clear()
    threading.Thread(target=work, daemon=True).start()
    begun.wait()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
time.sleep(1)
os._exit(0)
"""
    done = run_calls(times=1, seconds=0.5, last=fork)
    assert (done.returncode, done.stdout.count("answered")) == (0, 2), done.stderr
