"""A fuzzer of kvmask's public names: calls with plausible and impossible arguments, in any order.

    python tests/fuzz/public_names.py --seconds 60 [--seed 1] [--corpus FOLDER] [FILE ...]
    python tests/fuzz/public_names.py --runs 1000

With Atheris the coverage of kvmask's Python modules guides it; without, inputs are random bytes.
Those of `--runs` are random bytes everywhere, and the same in every run. Files are inputs to run
once, such as a crash. The exit status is 0 if nothing was found.

Each call must return, or raise an exception that the name promises: one of `kvmask.errors`,
TypeError, or what a sequence raises. Its message has a bound. Whatever returns has a repr, is equal
to itself, and survives pickling where it pickles at all. What is written can be read back:
contracts, keys, digests, hashes in parts.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import inspect
import pickle
import random
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
atheris: Any = None
if __name__ == "__main__":  # a test that imports this shall not be traced
    sys.path.insert(0, str(ROOT))
    with contextlib.suppress(ImportError):
        import atheris

# Inputs that are checked in: each reaches something that no other does.
CORPUS = ROOT / "tests" / "fuzz" / "corpus" / "python"
# Not a bound of memory in use: of what one call may ask for.
MOST_MEMORY = 6 << 30
# A message is cut at some 4,000 characters; a name and a rule stand before the values.
MOST_TEXT = 6000

with atheris.instrument_imports(include=["kvmask"]) if atheris else contextlib.nullcontext():
    import kvmask
    import kvmask.hashing
    import kvmask.keys
    import kvmask.mooncake
    import kvmask.plans
    from kvmask import _core
    from kvmask.errors import KVMaskError
    from kvmask.groups import KINDS

counts: Counter[str] = Counter()


class Source:
    """Choices out of bytes. Where they have ended, the first choice is taken."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def below(self, n: int) -> int:
        """A number in range(n)."""
        size = (max(n - 1, 0).bit_length() + 7) // 8
        part = self.data[self.at : self.at + size]
        self.at += size
        return int.from_bytes(part, "big") % n

    def pick(self, items: Sequence[Any]) -> Any:
        """One of some items."""
        return items[self.below(len(items))]

    def chance(self, percent: int) -> bool:
        """True about so many times in a hundred, and not at the end of the bytes."""
        return self.below(100) >= 100 - percent


def nested(levels: int) -> list[Any]:
    """A list in a list, and so on: too deep to be written out."""
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


class Hostile:
    """Raises whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def __len__(self) -> int:
        raise ZeroDivisionError("len")

    def __iter__(self) -> Any:
        raise ZeroDivisionError("iter")

    def __index__(self) -> int:
        raise ZeroDivisionError("index")


LOOP: list[Any] = []
LOOP.append(LOOP)
DEEP = nested(50_000)
INTEGERS = (0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 128, 129, 256, 1000)
EDGES = (-1, -(1 << 63), 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 62, 1 << 63, 1 << 64, 10**5000)
TEXTS = ("", "m", "org/model", "a@b", "full", "swa", "none", "sha256", "xxhash", "0.32", "é", "\n")
ODD_TEXTS = ("\x00", "\ud800", "x" * 100_000, "[" * 3000, "%s{0}", "\x1b[31m", "1e999", "-1")
ODD: tuple[Any, ...] = (
    *(None, True, False, 1.5, float("nan"), float("inf"), 1j, b"", b"abc", bytearray(8), object()),
    *(int, len, LOOP, DEEP, [], (), {}, set(), [None], [[]], ["x" * 100_000], {"a": DEEP}, {1: 2}),
    *([0] * 50_000, range(1 << 40), memoryview(b"abcdef")[::2], Hostile(), [Hostile()], slice(3)),
)
GROUPS = {"full": kvmask.FullAttention(16), "swa": kvmask.SlidingWindow(16, window=33)}
CONTRACT = kvmask.Contract(GROUPS, 16, kvmask.StrictKeys("m"), kvmask.Hashing(seed="s"))
LAYOUT = kvmask.KVLayout.from_regions([(4096, 64, 64)], 8, [(4096, 512)])
PLAIN = kvmask.Contract(GROUPS, 16, kvmask.VllmKeys("m"), hashing=None)
HASHES = kvmask.hash_tokens(range(256), block_size=16, seed="s")
BOUND = PLAIN.bind([LAYOUT] * 2)
HIT = PLAIN.coordinator.find_hit([[True] * 9] * 2, 96)
# What calls may take beside what they return: one example of each kind that does not change.
EXAMPLES: tuple[Any, ...] = (
    *(CONTRACT, PLAIN, BOUND, CONTRACT.coordinator, LAYOUT, HASHES),
    *(kvmask.Bitset([True, False] * 40), kvmask.StrictKeys("m"), kvmask.VllmKeys("m"), HIT),
    kvmask.Hashing(seed="s"),
    *(kvmask.StorePolicy(), kvmask.mooncake.MooncakePolicy(), kvmask.RankGrid(tp_size=2)),
    *(_core.KeyBuilder("a@"), kvmask.CostModel(), GROUPS, list(GROUPS.values()), range(65)),
    *([[1, 2, 3, 4]] * 2, {"full": [1, 2], "swa": [3, 4]}, [(4096, 64, 64)], ["ab" * 16] * 4),
    *(*GROUPS.values(), kvmask.Mamba(16), kvmask.ChunkedLocal(16, chunk_size=32)),
)


def fresh() -> list[Any]:
    """One example of each kind that changes: an input must not depend on those before it."""
    return [
        PLAIN.request(hashes=HASHES),
        CONTRACT.request(range(65)),
        kvmask.LookupPlan(PLAIN, HASHES, 128),
        kvmask.PlanTools(),
        kvmask.HitHints(64),
        kvmask.AbsenceMemo(10.0),
        kvmask.Breaker(),
    ]


@functools.lru_cache(4096)
def signature(function: Any) -> tuple[inspect.Parameter, ...]:
    """Parameters, as far as they can be known."""
    try:
        return tuple(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return ()


def names_of(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """The same of a bound method, and of a call that has its arguments."""
    if isinstance(function, functools.partial):
        return ()
    bound = getattr(function, "__self__", None)
    plain = getattr(function, "__func__", None)
    if bound is None or plain is None:
        try:
            return signature(function)
        except TypeError:  # a method of an object that has no hash
            return signature.__wrapped__(function)
    return signature(plain)[1:]


def takes_path(function: Callable[..., Any]) -> bool:
    """Whether it reads or writes a file."""
    return any(parameter.name == "path" for parameter in names_of(function))


# Made by kvmask alone, out of what it has checked.
INNER = {"BlockFailure", "Call", "Hit", "KeySchema", "LoadResult", "SaveResult", "Scheme"}
INNER |= {"GroupScheme", "Held", "CacheRequest", "BoundContract", "DigestOrigin", "Addresses"}
INNER |= {"Handoff", "KVTransfer", "drive", "Store", "Plan", "measure"}


def public() -> list[Callable[..., Any]]:
    """Everything that can be called: classes, class methods, functions."""
    found: list[Callable[..., Any]] = []
    for room in (kvmask, kvmask.hashing, kvmask.keys, kvmask.plans):
        for name in room.__all__:
            thing = getattr(room, name)
            if not callable(thing) or thing in found or name in INNER:
                continue
            found.append(thing)
            if inspect.isclass(thing):
                for inner, kind in vars(thing).items():
                    if inner.startswith("_"):
                        continue
                    if isinstance(kind, classmethod | staticmethod) and inner not in INNER:
                        found.append(getattr(thing, inner))
    # These are given what a user gives, too.
    found += [_core.KeyBuilder, _core.build_keys, _core.Regions, _core.TokenIds, _core.BlockRows]
    return [f for f in found if not getattr(f, "_is_protocol", False) and not takes_path(f)]


PUBLIC = public()
# Would call a store, or are kvmask's own.
SKIPPED = {"measure", "wait", "synchronize", "close", "fill", "groups", "note", "run"}
# What sequences promise beside.
ALLOWED = (KVMaskError, TypeError, IndexError, StopIteration, MemoryError)
# What `index` and `remove` of a sequence raise.
NOT_IN = ("is not in the bitset", "x not in tuple", "is not in list", "not in sequence")


def value(source: Source, made: list[Any], depth: int = 0) -> Any:
    """Any argument."""
    kind = source.below(20)
    if kind < 6:
        return source.pick(INTEGERS)
    if kind < 8:
        return source.pick(TEXTS)
    if kind < 13:
        return source.pick(EXAMPLES)
    if kind < 16 and made:
        return source.pick(made)
    if kind == 16:
        return source.pick(EDGES)
    if kind == 17:
        return source.pick(ODD)
    if kind == 18:
        return source.pick(ODD_TEXTS)
    if depth > 2:
        return None
    items = [value(source, made, depth + 1) for _ in range(source.below(6))]
    shape = source.below(4)
    if shape == 0:
        return items
    if shape == 1:
        return tuple(items)
    if shape == 2:
        return {f"{source.pick(TEXTS)}": item for item in items}
    return [source.pick(INTEGERS) for _ in range(source.below(70))]


# A likely argument by the name of its parameter.
LIKELY: dict[str, tuple[Any, ...]] = {
    "groups": (GROUPS, list(GROUPS.values())),
    "keys": (kvmask.StrictKeys("m"), kvmask.VllmKeys("m"), HASHES),
    "hashing": (None, kvmask.Hashing(seed="s")),
    "hashes": (HASHES, [b"ab" * 8] * 9),
    "source": (PLAIN, CONTRACT, BOUND),
    "tables": ([[1, 2, 3, 4]] * 2, {"full": [1, 2, 3], "swa": [4, 5, 6]}),
    "block_ids": ([1, 2, 3],),
    "token_ids": (range(65), [1, 1 << 40, 3], list(range(200))),
    "ids": (range(65), [1, 2, 3]),
    "layouts": ([LAYOUT] * 2, LAYOUT),
    "layout": (LAYOUT,),
    "regions": ([(4096, 64, 64)], _core.Regions([(4096, 64, 64)], 8)),
    "hit": (HIT,),
    "model": ("org/model",),
    "tools": (None,),
    "present": ([[True] * 9] * 2, lambda key: True),
    "builders": ((_core.KeyBuilder("a@"),),),
    "kind": ("full", "window", "state", "chunked"),
}


def argument(source: Source, parameter: inspect.Parameter, made: list[Any]) -> Any:
    """An argument for a parameter, most often one that fits its name."""
    likely = LIKELY.get(parameter.name)
    if likely is None and isinstance(parameter.default, int):
        likely = (parameter.default, *INTEGERS)
    if likely and not source.chance(25):
        return source.pick(likely)
    return value(source, made)


def call(source: Source, function: Callable[..., Any], made: list[Any]) -> Any:
    """Call something, and check what comes of it."""
    plain = getattr(function, "func", function)
    name = getattr(plain, "__qualname__", type(plain).__name__)
    args: list[Any] = []
    options: dict[str, Any] = {}
    for parameter in names_of(function):
        if parameter.kind is parameter.VAR_POSITIONAL:
            args += [value(source, made) for _ in range(source.below(3))]
        elif parameter.kind is parameter.VAR_KEYWORD:
            continue
        elif parameter.default is parameter.empty and parameter.kind is not parameter.KEYWORD_ONLY:
            args.append(argument(source, parameter, made))
        elif parameter.default is parameter.empty or source.chance(30):
            if parameter.kind is parameter.POSITIONAL_ONLY:
                continue
            options[parameter.name] = argument(source, parameter, made)
    if source.chance(3):
        args.append(value(source, made))
    try:
        result = function(*args, **options)
    except ALLOWED as error:
        counts[type(error).__name__] += 1
        text = str(error)
        if len(text) > MOST_TEXT:
            raise AssertionError(f"{name}: a message of {len(text)} characters") from None
        return None
    except ValueError as error:
        if any(text in str(error) for text in NOT_IN):
            return None
        raise
    except ZeroDivisionError as error:
        if str(error) in ("len", "iter", "index"):  # a hostile argument's own
            return None
        raise
    counts["returned"] += 1
    check(name, result)
    return result


def check(name: str, result: Any) -> None:
    """What holds for every result."""
    if isinstance(result, kvmask.Bitset | kvmask.BlockHashes | list | tuple | dict | int | str):
        return
    if isinstance(result, tuple(KINDS.values())):  # its `spec` is a user's own, as deep as may be
        return
    text = repr(result)
    if not isinstance(text, str):
        raise AssertionError(f"{name}: no repr")
    if type(result).__module__.startswith("kvmask"):
        if type(result).__eq__ is not object.__eq__ and result != result:  # noqa: PLR0124
            raise AssertionError(f"{name}: not equal to itself: {text[:200]}")
        try:
            again = pickle.loads(pickle.dumps(result))
            copy.copy(result)
        except (TypeError, KVMaskError, pickle.PicklingError, AttributeError, RecursionError):
            return
        if type(again) is not type(result):
            raise AssertionError(f"{name}: pickled as {type(again).__name__}")


@functools.cache
def method_names(kind: type) -> tuple[str, ...]:
    """The public methods of a class of kvmask, its operators and its length."""
    names = [n for n in dir(kind) if not n.startswith("_") and n not in SKIPPED]
    own = {name for base in kind.__mro__ for name in vars(base)}
    names += [n for n in ("__getitem__", "__len__", "__iter__", "__or__") if n in own]
    found = [(name, getattr(kind, name)) for name in names]
    return tuple(n for n, f in found if callable(f) and not takes_path(f))


def methods(thing: Any) -> list[Callable[..., Any]]:
    """What can be called of an object of kvmask."""
    if not type(thing).__module__.startswith("kvmask") or inspect.isclass(thing):
        return []
    return [getattr(thing, name) for name in method_names(type(thing))]


def calls(source: Source) -> None:
    """Some calls, each with what the ones before it made."""
    made = fresh()
    for _ in range(1 + source.below(6)):
        owner = source.pick(made) if source.chance(60) else source.pick(EXAMPLES)
        own = methods(owner)
        function = source.pick(own) if own and source.chance(50) else source.pick(PUBLIC)
        result = call(source, function, made)
        if result is not None:
            made.append(result)


# Impossible values, by what a report calls them.
NASTY: dict[str, Any] = {
    "deep": DEEP,
    "loop": LOOP,
    "huge": 10**5000,
    "huge and negative": -(10**5000),
    "huge inside": [10**5000],
    "deep inside": {"a": DEEP},
    "long": "x" * 100_000,
    "bytes": b"\xff" * 9,
    "hostile": Hostile(),
    "float": 1.5,
    "none": None,
    "object": object(),
    "type": int,
}


def sweep(function: Callable[..., Any]) -> list[str]:
    """Replace each argument of a call by each impossible value.

    Returns:
        What was raised and is not promised.
    """
    parameters = [p for p in names_of(function) if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    plain = {p.name: argument(Source(b""), p, []) for p in parameters if p.default is p.empty}
    found = []
    for changed in parameters:
        for title, nasty in NASTY.items():
            given = plain | {changed.name: nasty}
            first = [given.pop(p.name) for p in parameters if p.kind is p.POSITIONAL_ONLY]
            try:
                call(Source(b""), functools.partial(function, *first, **given), [])
            except Exception as error:
                what = f"{type(error).__name__}: {str(error)[:200]}"
                found.append(f"{changed.name}={title}: {what}")
    return found


def targets() -> dict[str, Callable[..., Any]]:
    """Everything that is called, by its name."""
    found = {getattr(f, "__qualname__", str(f)): f for f in PUBLIC}
    for example in (*EXAMPLES, *fresh()):
        for method in methods(example):
            found[getattr(method, "__qualname__", str(method))] = method
    return found


def texts(source: Source) -> None:
    """A contract's JSON with some letters changed is refused, or is a contract again."""
    text = CONTRACT.to_json()
    if kvmask.Contract.from_json(text) != CONTRACT:
        raise AssertionError("a contract is not read as it was written")
    letters = list(text)
    for _ in range(1 + source.below(4)):
        at = source.below(len(letters))
        new = source.pick(('"', "{", "}", "[", "]", ",", "9", "-", "e", "\\", "null", "1e400", ""))
        letters[at : at + source.below(3)] = [new]
    if source.chance(5):
        letters = ["[" * 20_000]
    read = call(source, lambda: kvmask.Contract.from_json("".join(letters)), [])
    if read is not None and kvmask.Contract.from_json(read.to_json()) != read:
        raise AssertionError("a contract is not read as it was written")


def digests(source: Source) -> None:
    """Hashes in parts are those of the whole; keys are taken apart into what they were made of."""
    size = 1 + source.below(40)
    tokens = [source.below(1 << source.pick((4, 17, 33, 62))) for _ in range(source.below(120))]
    algorithm = source.pick(("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"))
    whole = kvmask.hash_tokens(tokens, block_size=size, algorithm=algorithm, seed="s")
    cut = source.below(len(whole) + 1)
    first = kvmask.hash_tokens(tokens[: cut * size], block_size=size, algorithm=algorithm, seed="s")
    if list(first) != list(whole)[:cut]:
        raise AssertionError(f"the first {cut} digests differ")
    texts = [digest.hex() for digest in whole]
    if list(kvmask.BlockHashes.from_hex(texts)) != list(whole):
        raise AssertionError("digests are not read as they were written")
    schema = source.pick((kvmask.StrictKeys("m"), kvmask.VllmKeys("org/m", tp_rank=1)))
    for digest, key in zip(whole, schema.keys(whole), strict=True):
        if digest.hex() not in key:
            raise AssertionError(f"{key} does not hold its digest")


def run(data: bytes) -> None:
    """One input."""
    source = Source(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source.pick((calls, calls, calls, calls, calls, texts, digests))(source)
    counts["inputs"] += 1


def summary() -> None:
    print(", ".join(f"{name} {n}" for name, n in sorted(counts.items())), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--runs", type=int, help="so many inputs that a seed makes, no time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--memory", type=int, default=MOST_MEMORY >> 30, help="GiB of addresses, 0 for no limit"
    )
    parser.add_argument(
        "--corpus", type=Path, default=ROOT / "build" / "fuzz" / "corpus" / "python"
    )
    parser.add_argument("files", type=Path, nargs="*")
    args = parser.parse_args()
    if args.memory:
        resource.setrlimit(resource.RLIMIT_AS, (args.memory << 30, resource.RLIM_INFINITY))
    for file in args.files:
        run(file.read_bytes())
    if args.files:
        summary()
        return 0
    if atheris is not None and args.runs is None:
        args.corpus.mkdir(parents=True, exist_ok=True)
        options = [f"-max_total_time={args.seconds}", "-max_len=256", "-len_control=0"]
        options += [f"-seed={args.seed}", f"-artifact_prefix={ROOT}/build/fuzz/python-"]
        options += ["-timeout=60", "-rss_limit_mb=0", str(args.corpus), str(CORPUS)]

        def one(data: bytes) -> None:
            run(data)
            if counts["inputs"] % 20_000 == 0:
                summary()

        atheris.Setup([sys.argv[0], *options], one)
        atheris.Fuzz()  # ends the process
        return 0
    print("without Atheris: random inputs, no coverage")
    rng = random.Random(args.seed)
    stop = time.monotonic() + args.seconds
    while counts["inputs"] < args.runs if args.runs is not None else time.monotonic() < stop:
        data = rng.randbytes(rng.choice((16, 64, 256)))
        try:
            run(data)
        except Exception:
            path = ROOT / "build" / "fuzz" / "python-crash"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            print(f"the input is in {path.relative_to(ROOT)}")
            raise
    summary()
    return 0


if __name__ == "__main__":
    sys.exit(main())
