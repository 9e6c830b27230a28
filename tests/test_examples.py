"""The engines of examples/: alone, over a real store, and over one that fails."""

import asyncio
import importlib
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_store import EXIST, GET, PUT, FakeStore

from kvmask import mooncake

pytest.importorskip("numpy")
ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
if not EXAMPLES.is_dir():
    pytest.skip("the examples are not beside the tests", allow_module_level=True)

ALIKE = [*range(150), 7, 8, 9]


@pytest.fixture(scope="module", autouse=True)
def on_path():
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(params=["engine", "engine_asyncio"])
def make(request):
    """Makes an engine whose `serve` returns its tokens."""
    module = importlib.import_module(request.param)
    if request.param == "engine":
        return module.Engine

    class Engine(module.AsyncEngine):
        def serve(self, *args):
            return asyncio.run(super().serve(*args))

    return Engine


def alone(*prompts, num_new=40):
    engine = importlib.import_module("engine").Engine()
    return [engine.serve(prompt, num_new) for prompt in prompts], engine.model.computed


def accounted(engine):
    """Every block is free, left behind, or withheld; none is twice."""
    for pool in engine.pools.values():
        kept = [block for block, users in enumerate(pool.users) if users]
        left = [block for block in pool.cached.values() if block not in kept]
        assert sorted(pool.free + left + kept) == list(range(1, len(pool.users)))
        assert len(set(pool.cached.values())) == len(pool.cached)
    return kept


def withheld(engine):
    return sum(users > 0 for pool in engine.pools.values() for users in pool.users)


@pytest.mark.store
@pytest.mark.parametrize("name", ["engine", "engine_asyncio"])
def test_over_a_real_store(name):
    if mooncake.find_master() is None:
        pytest.skip("no mooncake_master program on this machine")
    try:
        mooncake.import_store()
    except ImportError as error:
        pytest.skip(str(error))
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        cwd=EXAMPLES,
        env={**os.environ, "PYTHONPATH": str(Path(mooncake.__file__).parent.parent.parent)},
    )
    assert done.returncode == 0, done.stderr
    first, second = [
        tuple(map(int, re.fullmatch(rf"{who} engine: (\d+) tokens .*, (\d+) .*", line).groups()))
        for who, line in zip(("first", "second"), done.stdout.splitlines(), strict=True)
    ]
    # The first has its own cache alone. The second one finds the first one's blocks.
    assert first[0] > second[0]
    assert (first[1], second[1] > 10) == (0, True)


def test_they_are_short():
    lines = (EXAMPLES / "engine.py").read_text(encoding="utf-8").splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 125


def test_the_page_quotes_what_runs():
    page = (ROOT / "docs" / "connector.md").read_text(encoding="utf-8")
    fences = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    quotes = [fence for fence in fences if not fence.startswith(">>>")]  # those are run as they are
    assert len(quotes) > 6
    sources = "\n".join(p.read_text(encoding="utf-8") for p in EXAMPLES.glob("*.py"))
    assert [quote for quote in quotes if quote not in sources] == []


def test_a_second_engine_says_the_same_and_computes_less(make):
    expected, all_tokens = alone(range(200), ALIKE)
    store = FakeStore()
    first, second = make(store), make(store.client())
    assert [first.serve(range(200), 40), first.serve(ALIKE, 40)] == expected
    assert first.model.computed == all_tokens  # its own cache is as good as that of one alone
    assert [second.serve(range(200), 40), second.serve(ALIKE, 40)] == expected
    assert second.model.computed < all_tokens // 2
    assert second.kv.stats.loaded_keys > 0
    for engine in (first, second):
        assert accounted(engine) == []


def test_what_grew_is_saved(make):
    """The answer is in the store as the prompt is: the next turn of a conversation finds it."""
    store = FakeStore()
    first = make(store)
    (answer,), _ = alone(range(40), num_new=90)
    assert first.serve(range(40), 90) == answer
    second = make(store.client())
    turn = [*range(40), *answer, 1, 2, 3]
    assert [second.serve(turn, 5)] == alone(turn, num_new=5)[0]
    assert second.kv.stats.hit_tokens == 128
    assert second.model.computed == 133 + 4 - 128


@pytest.mark.parametrize("code", [-704, -800, OSError("gone")])
def test_failed_loads_are_computed(make, code):
    """Whichever block of the load fails, the engine says the same."""
    (expected,), _ = alone(range(200))
    store = FakeStore()
    make(store).serve(range(200), 40)
    computed = set()
    for chosen in range(8):
        client = store.client()
        engine = make(client)
        if isinstance(code, Exception):
            client.fail(GET, code, whole=True)
        else:
            keys = sorted(store.pool)
            client.fail(GET, code, keys=keys[chosen::8])
        assert engine.serve(range(200), 40) == expected
        computed.add(engine.model.computed)
        accounted(engine)
        # Blocks that late bytes may reach are never used again.
        assert (withheld(engine) > 0) == (engine.kv.stats.load_failed_keys > 0 and code != -704)
        assert engine.kv.stats.load_failed_keys > 0 or engine.model.computed < 100
    if isinstance(code, int):
        assert len(computed) > 2  # of some loads a part could be used


@pytest.mark.parametrize("call", [EXIST, PUT])
def test_a_store_that_does_not_answer(make, call):
    (expected,), all_tokens = alone(range(200))
    store = FakeStore()
    store.fail(call, -900)
    engine = make(store)
    assert engine.serve(range(200), 40) == expected
    assert engine.model.computed == all_tokens
    assert engine.kv.stats.outages == 1


def test_a_small_pool_of_blocks(make):
    """What is cached makes room, in the engine and in its own prefix hits."""
    rng = random.Random(4)
    store = FakeStore()
    engine, other = make(store, 24), make(store.client(), 20)
    for _ in range(30):
        prompt = [*range(rng.randrange(120)), *(rng.randrange(9) for _ in range(rng.randrange(60)))]
        (expected,), _ = alone(prompt or [1], num_new=20)
        for one in (engine, other):
            assert one.serve(prompt or [1], 20) == expected
            assert accounted(one) == []
    assert other.kv.stats.loaded_keys > 50


def test_requests_beside_each_other():
    """Tasks that take turns between any two calls of the store."""
    module = importlib.import_module("engine_asyncio")
    prompts = [range(200), ALIKE, range(60), range(120), [*range(60), 3]]
    expected, _ = alone(*prompts)
    store = FakeStore()
    for _ in range(2):
        engine = module.AsyncEngine(store.client())

        async def many(engine=engine):
            return await asyncio.gather(*(engine.serve(prompt, 40) for prompt in prompts))

        assert asyncio.run(many()) == expected
        assert accounted(engine) == []
    assert engine.kv.stats.loaded_keys > 0
