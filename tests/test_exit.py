"""The interpreter ends while a daemon thread is in a call of the store: it waits for the call."""

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent

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
        text = f"import kvmask.transfer\nkvmask.transfer.EXIT_SECONDS = {limit}\n{text}"
    return subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=TESTS.parent,
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
import kvmask.transfer
from fake_store import FakeStore
from kvmask import KVTransfer
from kvmask.plans import Renewals
from test_renew import PROMPT, contract_of, digests, save

kvmask.transfer.EXIT_SECONDS = 0.2
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
        cwd=TESTS.parent,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr
