"""Memory that runs out inside the core: MemoryError or a right result, never anything else.

The n-th allocation of a call fails, and with it either all later ones or none, for n from 1 to
what the call needs. A child process makes the calls, because what goes wrong here is a crash.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytest.importorskip("_testcapi", reason="this interpreter has no _testcapi")
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    # Its PyList_New gives up a list whose `ob_item` was never set (seen with CPython 3.13.5).
    reason = "a free-threaded CPython crashes by itself when a list gets no memory"
    pytest.skip(reason, allow_module_level=True)

TESTS = Path(__file__).parent
# No call here allocates more often.
MOST = 3000

CHILD = r"""
import ctypes
import pickle
import sys
from functools import partial
from types import SimpleNamespace

import _testcapi
from kvmask import Bitset, BlockHashes, _core
from kvmask._core import (
    BlockRows, CoordinatorCore, HitHints, KeyBuilder, LookupCore, Regions, TokenIds,
)
from kvmask.hashing import BlockHasher, hash_tokens
from kvmask.hashing.digests import sha256

REFUSED = set()
MALFORMED = _core.MALFORMED_ANSWER
sparse = Bitset.from_indices(200, range(0, 200, 3))
bools = [i % 3 == 0 for i in range(200)]
listed = [i.to_bytes(2, "big") * 16 for i in range(1, 25)]
flat = BlockHashes(b"".join(listed), 32)
others = BlockHashes.from_list(listed)
views = [memoryview(d) for d in listed]
builders = [KeyBuilder("p@"), KeyBuilder("q@", "@t", as_number=True), KeyBuilder("\u00e9@")]
rows = [("full", 32, 0, False, True, 0), ("window", 16, 40, False, True, 1),
        ("state", 16, 0, False, True, 2), ("full", 16, 0, False, False, -1)]


def make_core(partial=False):
    return CoordinatorCore(rows, 16, 32, None, partial=partial)


core = make_core()
present = [[True] * 12, [True] * 24, [True] * 24, []]
regions = Regions([(4096, 64, 128), (1 << 20, 32, 32)], 1 << 30)
place = SimpleNamespace(block_bytes=96, addresses=regions.addresses)
plan_groups = tuple(
    _core.PlanGroup(
        SimpleNamespace(index=i, name=str(i), kind="full", block_size=size, writers=2 - i,
                        turn=1 - i, own=builders[: i + 1], layouts=[place] * (i + 1)), 8)
    for i, size in enumerate((8, 16))
)
unit = {"block_size": 4, "seed": "s"}
tokens = list(range(300, 340))
extras = [("s",), None] * 5
digest = sha256()


def new_lookup(staged=True, held=None):
    names = [builders[:1], builders[:2], builders[:1], ()]
    return LookupCore(core, names, flat, 385, 0, held, staged=staged, first_batch=2)


def drive(plan):
    while keys := plan.next_keys():
        plan.feed([1] * len(keys) if plan.probes < 3 else [i % 5 != 3 for i in range(len(keys))])
    return plan.result()


def step(plan, keys):
    # Answers by key alone: asked again, a key is answered alike.
    return [0 if key.endswith(listed[21].hex()) else 1 for key in keys]


def hinted():
    hints = HitHints(64)
    hints.learn(flat, 16, 32, 384)
    return hints.predict(others, 16, 32, 384)


_MEMORY = bytearray(range(64))
_ADDRESS = ctypes.addressof(ctypes.c_char.from_buffer(_MEMORY))


def copied(copy):
    copy([[_ADDRESS, _ADDRESS + 9]], [[4, 5]], [_ADDRESS + 32])
    return bytes(_MEMORY)


def grown():
    hasher = BlockHasher(**unit)
    for part in (tokens[:3], tokens[3:17], tokens[17:]):
        hasher.extend(part)
    return hasher.hashes


def planned(plan, *args):
    keys, parts, *mark = plan(plan_groups, flat, *args)
    told = [(p.planned, p.start, p.tail, p.block_ids, p.first_key, p.blocks) for p in parts]
    return keys, told, _core.describe_parts(parts), mark


def kept_rows():
    kept = BlockRows(regions, 1000)
    return kept.addresses([3, 4, 3]), kept.addresses([4, 9]), kept.block_bytes


def refused(call, *args, **kwargs):
    '''A call that raises ValueError. The interpreter's own frames lose it without memory.'''
    made = partial(call, *args, **kwargs)
    REFUSED.add(made)
    return made


CASES = {
    "bitset of bools": lambda: Bitset(bools),
    "bitset of indices": lambda: Bitset.from_indices(200, range(0, 200, 3)),
    "bitset of words": lambda: Bitset.from_words(200, bytes(sparse)),
    "ones and zeros": lambda: (Bitset.ones(70), Bitset.zeros(70)),
    "repr of a bitset": lambda: repr(sparse),
    "list of a bitset": lambda: (sparse.tolist(), list(sparse), sparse.indices(), sparse.runs()),
    "slices of a bitset": lambda: (sparse[3:99], sparse[::-2], sparse[5], sparse[-1]),
    "bits combined": lambda: (sparse & ~sparse, sparse | ~sparse, list(reversed(sparse))),
    "bits compared": lambda: (sparse == bools, sparse != bools[1:], sparse == tuple(bools)),
    "bits counted": lambda: (sparse.count(), sparse.count(False), sparse.index(True, 4)),
    "bits pickled": lambda: sparse.__reduce__()[0](*sparse.__reduce__()[1]),
    "buffer of a bitset": lambda: bytes(memoryview(sparse)),
    "bits refused": refused(Bitset, [2]),
    "digests of a buffer": lambda: BlockHashes(b"".join(listed), 32).tobytes(),
    "digests of a list": lambda: BlockHashes.from_list(views).tobytes(),
    "slices of digests": lambda: (flat[2:20], flat[::-3], others[1:9], flat[-1]),
    "digests compared": lambda: (flat == listed, others == flat, flat == listed[1:], flat == views),
    "digests iterated": lambda: (list(flat), list(others), repr(flat), others.tobytes()),
    "digests pickled": lambda: (flat.__reduce__()[1], others.__reduce__()[1]),
    "digests refused": refused(BlockHashes.from_list, [5]),
    "builders": lambda: (KeyBuilder("a", "b"), hash(builders[1]) == 0, builders[0].__reduce__()[1]),
    "keys": lambda: _core.build_keys(builders, flat, None, 1, 2),
    "keys of a mask": lambda: _core.build_keys(builders, others, bools[:20]),
    "keys refused": refused(_core.build_keys, builders, flat, [True] * 99),
    "a coordinator": lambda: (make_core().load_masks(384), make_core(partial=True).load_masks(48)),
    "masks": lambda: core.reach_masks(384, 32, 300, dense=False, states=True),
    "a hit": lambda: core.find_hit(present, 384),
    "a coordinator refused": refused(
        CoordinatorCore, [], 16, 16, None, partial=False),
    "lookup, staged": lambda: drive(new_lookup()),
    "lookup, exact": lambda: drive(new_lookup(staged=False)),
    "lookup, held": lambda: drive(new_lookup(held=[32, 32, Bitset.ones(2), 0])),
    "lookup of nothing": lambda: LookupCore(core, [builders] * 4, flat, 0).result(),
    "held blocks": lambda: _core.held_blocks("window", 16, 33, 64, 6),
    "plan of a save": lambda: planned(
        _core.plan_save, [sparse[:19], None], None,
        [list(range(900, 921)), [907, *range(1000, 1010)]], 168, 16, 907, True, True,
        [(plan_groups[1], 3, 1000, 32)]),
    "plan of a load": lambda: planned(
        _core.plan_load, [sparse[:20], [True] * 5], [0, 72], 160, [1, 0],
        [list(range(900, 920)), list(range(1300, 1305))], 907, True),
    "plan refused": refused(
        _core.plan_load, plan_groups, flat, [sparse[:20], [True]], [0, 0], 160, None, [[], []],
        None, True),
    "missing keys": lambda: _core.pick_missing(["a", "b", "c", "d"], [1, 0, 1, -1], 0, 4),
    "answers": lambda: (_core.all_answered([1] * 9, 9, 1), _core.all_as_planned([999], [999])),
    "answers read": lambda: _core.read_answers([1, 0, 999], 3),
    "answers of a tuple": lambda: _core.read_answers((1, 0, 999), 3),
    "repeated ids": refused(
        _core.plan_load, plan_groups, flat, [[True] * 3, []], [0, 0], 24, None,
        [[1000, 2000, 1000], []], None, True),
    "attributes": lambda: _core.same_attributes([(sparse, "count", sparse.count)]),
    "repeated digests": lambda: _core.digests_differ(
        _core.BlockHashes.from_list([b"a" * 32, b"b" * 32]), _core.Bitset.ones(2), 0, 1
    ),
    "pieces and calls": lambda: (
        _core.row_pieces([[999, 2000]] * 3, 500),
        _core.cut_calls([1.0, 2.0, 90.0, 1.5], 3.0, 80.0, [1] * 4, 2)),
    "regions": lambda: Regions([(1 << 40, 64, 64), (1 << 41, 64, 64)], 9).find_overlap(),
    "addresses": lambda: regions.addresses([1, 2, 70000], 0),
    "addresses refused": refused(regions.addresses, [1, -1]),
    "copies": lambda: copied(_core.gather),
    "copies back": lambda: copied(_core.scatter),
    "copies refused": refused(_core.gather, [[4096]], [[1]], []),
    "copies seen": lambda: bytes(_core.memory_at(_ADDRESS, 8)),
    "rows": kept_rows,
    "hints": hinted,
    "present bits": lambda: _core.present_bits(flat, {(0, listed[1]), (0, listed[3])}, 0, 2, 12),
    "token ids": lambda: (len(TokenIds(tokens)), TokenIds(tokens).take(1, 9),
                          TokenIds(tokens).part(2, 9).take(0, 3)),
    "tokens refused": refused(TokenIds, [1, -1]),
    "one digest": lambda: digest(b"abc"),
    "one block": lambda: _core.serialise_block(_core.ENCODING_PICKLE, b"p" * 32, tokens),
    "split digests": lambda: _core.split_digests(b"ab" * 32, 16),
    "chain": lambda: _core.hash_chain(tokens, 4, _core.ENCODING_CBOR, digest, b"p" * 32),
    "chain of calls": lambda: _core.hash_chain(
        tokens, 4, _core.ENCODING_CBOR, lambda data: data[-16:], b"p" * 32),
    "hash_tokens": lambda: hash_tokens(tokens, **unit),
    "hash_tokens, extra keys": lambda: hash_tokens(tokens, extra_keys=extras, **unit),
    "tokens that grow": grown,
}


def shown(value):
    if isinstance(value, (KeyBuilder, BlockHashes)):
        return pickle.dumps(value)
    if isinstance(value, (tuple, list)):
        return type(value), [shown(v) for v in value]
    return value


def same(name, got, wanted):
    if name == "answers of a tuple" and got == [MALFORMED] * 3:
        return True  # nothing is believed
    return shown(got) == shown(wanted)


def attempt(call, start, stop):
    '''(what came back, what was raised).'''
    set_nomemory, restore = _testcapi.set_nomemory, _testcapi.remove_mem_hooks
    got = error = None
    set_nomemory(start, stop)
    try:
        got = call()
    except BaseException as caught:
        # Without its traceback it is in no cycle: the interpreter has only some 16 to spare.
        error = caught.with_traceback(None)
    finally:
        restore()
    return got, error


def test_case(name, call):
    wanted = None if call in REFUSED else call()
    for once in (False, True):
        for n in range(1, MOST):
            got, error = attempt(call, n, n + 1 if once else 0)
            if call in REFUSED and isinstance(error, ValueError):
                got = error = None
            if error is None:
                assert same(name, got, wanted), (name, n, once, got, wanted)
                if not once:
                    total = n
                    break
            elif type(error) is not MemoryError:
                raise AssertionError((name, n, once, error)) from error
            if once and n > total:
                break
        else:
            raise AssertionError((name, "never completes"))


def on_and_on(staged):
    '''A lookup whose calls fail once each and are made again ends with the same hit.'''
    def run(n):
        plan = new_lookup(staged)
        for _ in range(100):
            keys = error = None
            if n:
                keys, error = attempt(plan.next_keys, n, n + 1)
            if error is not None or keys is None:
                assert error is None or type(error) is MemoryError, repr(error)
                keys = plan.next_keys()
            if not keys:
                break
            answers = step(plan, keys)
            if n:
                _, error = attempt(partial(plan.feed, answers), n, n + 1)
                assert error is None or type(error) is MemoryError, repr(error)
            if not n or error is not None:
                try:
                    plan.feed(answers)
                except _core.PlanStateError:
                    assert n  # it was taken, but for what followed
        if n:
            got, error = attempt(plan.result, n, n + 1)
            if error is None:
                return got
            assert type(error) is MemoryError, repr(error)
        return plan.result()

    wanted = run(0)
    assert wanted[0] > 0
    for n in range(1, 200):
        assert run(n) == wanted, (n, staged)


for name, call in CASES.items():
    if name.split()[0].rstrip(",") not in sys.argv[2].split("|"):
        continue
    print(name, flush=True)
    MOST = int(sys.argv[1])
    test_case(name, call)
if "on" in sys.argv[2].split("|"):
    for staged in (True, False):
        print("lookup that goes on", staged, flush=True)
        on_and_on(staged)
"""


def run_child(words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", CHILD, str(MOST), words],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=TESTS,
        check=False,
    )


@pytest.mark.parametrize(
    "words",
    [
        "bitset|ones|repr|list|slices|bits|buffer",
        "digests|builders|keys",
        "a|masks",
        "lookup|held",
        "on",
        "plan|attributes|missing|answers|repeated|pieces|regions|addresses|rows|hints|present|copies",
        "token|tokens|one|split|chain|hash_tokens",
    ],
)
def test_calls_without_memory(words):
    done = run_child(words)
    assert done.stdout, done.stderr
    assert done.returncode == 0, f"{done.stdout.splitlines()[-1]}: {done.stderr[-3000:]}"


def test_every_case_is_run():
    names = {line.split('"')[1] for line in CHILD.splitlines() if line.startswith('    "')}
    words = set(test_calls_without_memory.pytestmark[0].args[1])
    first = {name.split()[0].rstrip(",") for name in names}
    assert first <= {word for row in words for word in row.split("|")}
