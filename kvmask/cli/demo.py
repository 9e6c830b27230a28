"""`kvmask demo`: save a request's KV cache, find it from another client, and load it.

The demo starts a Mooncake master on loopback and two clients. The request has the groups of
DeepSeek-V4, in real tensors with random bytes. At the end every byte is compared. Masks and keys
are those of the real model. Blocks are small (16 bytes per token and layer), so that the demo takes
only seconds.
"""

from __future__ import annotations

import importlib.util
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from kvmask import mooncake
from kvmask.cli.explain import describe
from kvmask.cli.usage import UsageError
from kvmask.contract import Contract
from kvmask.coordinator import Coordinator, Hit
from kvmask.errors import ArgumentError, MissingDependencyError
from kvmask.groups import FullAttention, Group, SlidingWindow
from kvmask.keys.vllm import VllmKeys
from kvmask.layout import KVLayout
from kvmask.plans.results import BlockFailure
from kvmask.transfer import KVTransfer

GROUPS: tuple[Group, ...] = (
    FullAttention(block_size=256),
    SlidingWindow(block_size=64, window=128),
    SlidingWindow(block_size=64, window=512),
    SlidingWindow(block_size=4, window=16),
    SlidingWindow(block_size=8, window=64),
)
HASH_BLOCK = 4
LAYERS = 2  # per group
BYTES_PER_TOKEN = 16  # per layer
MODEL = "DeepSeek-V4"
MAX_TOKENS = 1 << 20  # the stored blocks of this many tokens fit into the pool of 256 MiB

_GROUP_OF_KEY = re.compile(r"@group:(\d+)@")
T = TypeVar("T")


class CountingStore:
    """Forwards calls to a store. Counts the keys per group and the time in the store's calls."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.asked: Counter[int] = Counter()
        self.put: Counter[int] = Counter()
        self.got: Counter[int] = Counter()
        self.seconds = 0.0
        self.calls = 0

    def reset(self) -> None:
        """Set all counters to zero."""
        for counter in (self.asked, self.put, self.got):
            counter.clear()
        self.seconds, self.calls = 0.0, 0

    def _timed(self, counter: Counter[int] | None, call: Callable[..., T], *args: Any) -> T:
        start = time.perf_counter()
        try:
            return call(*args)
        finally:
            self.seconds += time.perf_counter() - start
            self.calls += 1
            if counter is not None:
                for key in args[0]:
                    found = _GROUP_OF_KEY.search(key)
                    counter[int(found[1]) if found else -1] += 1

    def batch_is_exist(self, keys: list[str], /) -> Sequence[int]:
        answers: Sequence[int] = self._timed(self.asked, self._store.batch_is_exist, keys)
        return answers

    def batch_put_from_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]], *config: Any
    ) -> Sequence[int]:
        call = self._store.batch_put_from_multi_buffers
        codes: Sequence[int] = self._timed(self.put, call, keys, addresses, sizes, *config)
        return codes

    def batch_get_into_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]], /
    ) -> Sequence[int]:
        call = self._store.batch_get_into_multi_buffers
        results: Sequence[int] = self._timed(self.got, call, keys, addresses, sizes)
        return results

    def register_buffer(self, address: int, size: int, /) -> int:
        return int(self._timed(None, self._store.register_buffer, address, size))

    def unregister_buffer(self, address: int, /) -> int:
        return int(self._timed(None, self._store.unregister_buffer, address))


def mooncake_has_cuda() -> bool:
    """True when the installed Mooncake can read GPU memory, which means it is linked with CUDA."""
    spec = importlib.util.find_spec("mooncake")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for name in ("engine.so", "store.so"):
            path = Path(folder) / name
            if path.exists() and b"libcudart.so" in path.read_bytes():
                return True
    return False


class Memory:
    """KV tensors of one engine, of torch (on CUDA if possible) or NumPy.

    Args:
        prefer: "auto", "torch" or "numpy".
    """

    def __init__(self, prefer: str = "auto") -> None:
        self.torch: Any = None
        self.numpy: Any = None
        self.device = "cpu"
        if prefer not in ("auto", "torch", "numpy"):
            raise ArgumentError(f"`memory` must be auto, torch or numpy, got {prefer!r}")
        if prefer in ("auto", "torch") and importlib.util.find_spec("torch"):
            import torch

            self.torch = torch
            if torch.cuda.is_available() and mooncake_has_cuda():
                self.device = "cuda:0"
        elif prefer in ("auto", "numpy") and importlib.util.find_spec("numpy"):
            import numpy

            self.numpy = numpy
        else:
            wanted = {"auto": "NumPy or torch", "numpy": "NumPy"}.get(prefer, prefer)
            extra = "torch" if prefer == "torch" else "numpy"
            raise MissingDependencyError(f"the demo needs {wanted}: pip install 'kvmask[{extra}]'")

    @property
    def name(self) -> str:
        """A text that describes the tensors."""
        if self.torch is not None:
            return f"torch {self.torch.__version__} tensors on {self.device}"
        return f"NumPy {self.numpy.__version__} arrays"

    def tensor(self, shape: tuple[int, ...], seed: int | None) -> Any:
        """Return a tensor of random bytes, or of zeros if `seed` is None."""
        if self.torch is not None:
            if seed is None:
                return self.torch.zeros(shape, dtype=self.torch.uint8, device=self.device)
            make = self.torch.Generator(device=self.device).manual_seed(seed)
            return self.torch.randint(
                0, 256, shape, dtype=self.torch.uint8, device=self.device, generator=make
            )
        if seed is None:
            return self.numpy.zeros(shape, dtype=self.numpy.uint8)
        return self.numpy.random.default_rng(seed).integers(0, 256, shape, dtype=self.numpy.uint8)

    def differing(self, a: Any, b: Any) -> int:
        """Return the number of bytes that differ."""
        return int((a != b).sum())

    def ready(self) -> Any:
        """Return what a transfer must wait for before it uses the tensors (None on the CPU)."""
        return self.torch.cuda.current_stream() if self.device != "cpu" else None


class Engine:
    """One engine's KV cache, its block tables, and the layouts of its tensors."""

    def __init__(self, memory: Memory, blocks: Sequence[int], seed: int) -> None:
        self.memory = memory
        shuffle = random.Random(seed)
        self.tensors: list[list[Any]] = []
        self.tables: list[list[int]] = []
        self.layouts: list[KVLayout] = []
        for g, (group, count) in enumerate(zip(GROUPS, blocks, strict=True)):
            num_blocks = count + count // 4 + 1  # block 0 means "no block" in block tables
            shape = (num_blocks, group.block_size, BYTES_PER_TOKEN)
            start = None if seed == 0 else seed + 100 * g
            layers = [
                memory.tensor(shape, None if start is None else start + n) for n in range(LAYERS)
            ]
            self.tensors.append(layers)
            self.tables.append(shuffle.sample(range(1, num_blocks), count))
            self.layouts.append(KVLayout.from_tensors(layers, num_blocks=num_blocks))


class Clock:
    """Measures the time of steps, in total and inside the store's calls.

    Args:
        begin: Called with the name of each step before it.
    """

    def __init__(self, begin: Callable[[str], None] = lambda name: None) -> None:
        self._begin = begin
        self.rows: list[tuple[str, float, float, int]] = []

    def run(self, name: str, store: CountingStore, step: Callable[[], T]) -> T:
        """Set the counters to zero, run one step and note its times."""
        self._begin(name)
        store.reset()
        start = time.perf_counter()
        result = step()
        self.rows.append((name, time.perf_counter() - start, store.seconds, store.calls))
        return result


def compare(source: Engine, target: Engine, hit: Hit) -> tuple[int, int]:
    """Return the number of loaded bytes, and the number of bytes that are wrong.

    The target's other blocks must still be zero. Bytes of them that are not zero count as wrong.
    """
    total = wrong = 0
    memory = source.memory
    for g, mask in enumerate(hit.masks):
        loaded = mask.indices()
        theirs = [source.tables[g][i] for i in loaded]
        mine = [target.tables[g][i] for i in loaded]
        for a, b in zip(source.tensors[g], target.tensors[g], strict=True):
            expected = memory.tensor(tuple(b.shape), None)
            expected[mine] = a[theirs]
            wrong += memory.differing(expected, b)
            total += len(loaded) * b[0].size if memory.numpy else len(loaded) * b[0].numel()
    return total, wrong


def table(rows: list[list[str]]) -> str:
    """Align the columns of some rows: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def report(say: Callable[[str], None], what: str, failures: Sequence[BlockFailure]) -> None:
    """Name the first failures of a save or load."""
    for failure in failures[:3]:
        say(f"not {what}: {failure.key} code {mooncake.code_name(failure.code)}")


def run(
    num_tokens: int = 32_768,
    memory: str = "auto",
    connect: Callable[..., Any] = mooncake.connect,
    say: Callable[[str], None] = print,
    begin: Callable[[str], None] = lambda name: None,
) -> int:
    """Run the demo and return an exit status, which is 1 if a byte differs or a key failed.

    Args:
        num_tokens: Tokens of the saved request, a multiple of 256.
        memory: "auto", "torch" or "numpy".
        connect: Called instead of `mooncake.connect`, with the same arguments.
        say: Called with each line to print.
        begin: Called with the name of each step before it.
    """
    coord = Coordinator(GROUPS, hash_block_size=HASH_BLOCK)
    if num_tokens < coord.alignment or num_tokens % coord.alignment:
        raise UsageError(
            f"`--tokens` must be a positive multiple of {coord.alignment}, got {num_tokens}"
        )
    if num_tokens > MAX_TOKENS:
        raise UsageError(f"`--tokens` must be at most {MAX_TOKENS}, got {num_tokens}")
    begin("make tensors")
    tensors = Memory(memory)
    blocks = [num_tokens // g.block_size for g in GROUPS]
    source, target = Engine(tensors, blocks, seed=1), Engine(tensors, blocks, seed=0)
    contract = Contract(GROUPS, HASH_BLOCK, VllmKeys(model=MODEL), payload=source.layouts)
    # The saved prompt, and one more token: the last token of a request is always computed.
    tokens = random.Random(7).choices(range(129_280), k=num_tokens + 1)
    clock = Clock(begin)
    # Before the master ends both clients close: without it that is slow.
    with (
        mooncake.local_master() as master,
        closing(connect(master)) as one,
        closing(connect(master, segment_bytes=0)) as other,
    ):
        first, second = CountingStore(one), CountingStore(other)
        say(f"{num_tokens} tokens, {MODEL} shape, {tensors.name}; master at {master.address}")
        with (
            KVTransfer(first, contract.bind(source.layouts)) as saving,
            KVTransfer(second, contract.bind(target.layouts)) as loading,
        ):
            request = clock.run("hash tokens", first, lambda: contract.request(tokens))
            saved = clock.run(
                "save",
                first,
                lambda: saving.save(request, source.tables, num_tokens, event=tensors.ready()),
            )
            stored = Counter(first.put)
            report(say, "saved", saved.failures)
            exact = clock.run(
                "lookup, exact", second, lambda: loading.lookup(request, strategy="exact")
            )
            exact_asked = Counter(second.asked)
            hit = clock.run("lookup, staged", second, lambda: loading.lookup(request))
            asked = Counter(second.asked)
            loaded = clock.run(
                "load",
                second,
                lambda: loading.load(request, hit, target.tables, event=tensors.ready()),
            )
            report(say, "loaded", loaded.failures)
            got = Counter(second.got)
            begin("compare bytes")
            total, wrong = compare(source, target, hit)
    head = ["group", "blocks", "stored", "asked exact", "asked staged", "loaded", "without masks"]
    rows = [head]
    for g, group in enumerate(GROUPS):
        counts = (blocks[g], stored[g], exact_asked[g], asked[g], got[g], blocks[g])
        rows.append([f"{g} {describe(group)}", *(str(n) for n in counts)])
    sums = (sum(blocks), *(c.total() for c in (stored, exact_asked, asked, got)), sum(blocks))
    rows.append(["all", *(str(n) for n in sums)])
    say("")
    say(table(rows))
    say("keys; `without masks` is what a save, and again a lookup, would have used")
    say("")
    steps = [["step", "total ms", "in the store ms", "calls"]]
    for name, seconds, inside, calls in clock.rows:
        steps.append([name, f"{seconds * 1e3:.2f}", f"{inside * 1e3:.2f}", str(calls)])
    say(table(steps))
    say("")
    good = (
        wrong == 0
        and total > 0
        and saved.ok
        and loaded.ok
        and hit.length == exact.length == num_tokens
        and exact.asked == exact.exact_keys
    )
    say(
        f"hit {hit.length} of {num_tokens} tokens; {total} bytes compared, {wrong} differ: "
        + ("the same" if good else "NOT THE SAME")
    )
    return 0 if good else 1
