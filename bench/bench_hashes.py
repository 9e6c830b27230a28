"""Block hashing: ns per block against vLLM, in one run.

    python bench/bench_hashes.py [--tokens 131072] [--repeat 5]

vLLM's side is its own request hasher over a real Request. Every figure is the best of the
repetitions; before timing, both sides' digests are compared, so an unequal result cannot be faster.
Needs vLLM 0.32; without it only kvmask's own figures are printed.
"""

import argparse
import array
import os
import platform
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from kvmask import _core
from kvmask._digests import sha256, xxh3_128
from kvmask.hashes import ALGORITHMS, BlockHasher, hash_tokens

SEED = "0"
TARGETS = {"sha256": 10, "sha256_cbor": 15, "xxhash": 6, "xxhash_cbor": 6}


def best(call: Callable[[], Any], repeat: int) -> float:
    """Shortest of `repeat` calls, in ns."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
    return min(times)


def vllm_hasher(algorithm: str, block_size: int, tokens: list[int]) -> Callable[[], list[bytes]]:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request

    hash_fn = get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(hash_fn)
    request = Request(
        request_id="bench",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
    )
    hasher = kv_cache_utils.get_request_block_hasher(block_size, hash_fn)
    return lambda: hasher(request)


def table(tokens: list[int], repeat: int) -> None:
    try:
        import vllm
    except ImportError:
        print("vLLM is not installed: own figures only")
        reference = False
    else:
        print(f"vLLM {vllm.__version__}")
        reference = True
    flat = array.array("q", tokens)
    print(f"{'algorithm':12} {'block':>5} {'vLLM':>8} {'list':>7} {'int64':>7}  ns per block")
    for algorithm in ALGORITHMS:
        for block_size in (4, 16):
            blocks = len(tokens) // block_size

            def own(ids: Any = tokens, a: str = algorithm, b: int = block_size) -> Any:
                return hash_tokens(ids, b, a, seed=SEED)

            theirs = float("nan")
            if reference:
                call = vllm_hasher(algorithm, block_size, tokens)
                if call() != list(own()):
                    raise SystemExit(f"{algorithm}, blocks of {block_size}: digests differ")
                theirs = best(call, repeat) / blocks
            from_list = best(own, repeat) / blocks
            from_flat = best(lambda: own(flat), repeat) / blocks
            print(
                f"{algorithm:12} {block_size:5} {theirs:8.0f} {from_list:7.0f} {from_flat:7.0f}"
                f"  {theirs / from_list:5.1f}x from a list, target {TARGETS[algorithm]}x"
            )


def others_run(tokens: int, repeat: int) -> None:
    """How long another Python thread stands still during one long call."""
    ids = array.array("q", (i % 150_000 for i in range(tokens)))
    for name, value in (("int64 array", ids), ("list", ids.tolist())):
        worst = 0
        stop = threading.Event()

        def watch(done: threading.Event = stop) -> None:
            nonlocal worst
            last = time.perf_counter_ns()
            while not done.is_set():
                now = time.perf_counter_ns()
                worst = max(worst, now - last)
                last = now

        thread = threading.Thread(target=watch)
        thread.start()
        took = best(lambda v=value: hash_tokens(v, 16, seed=SEED), repeat)
        stop.set()
        thread.join()
        print(
            f"{tokens:,} tokens from a {name}, blocks of 16: {took / 1e6:.1f} ms per call beside a "
            f"busy thread, which stood still for at most {worst / 1e6:.1f} ms"
        )


def decode_step(repeat: int) -> None:
    hasher = BlockHasher(16, seed=SEED)
    steps = 4096

    def grow() -> None:
        for i in range(steps):
            hasher.extend([i])

    print(f"BlockHasher.extend by one token: {best(grow, repeat) / steps:.0f} ns")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    os.environ["PYTHONHASHSEED"] = SEED
    random.seed(0)
    tokens = [random.randrange(150_000) for _ in range(options.tokens)]
    kinds = [getattr(find(), "kind", "Python call") for find in (sha256, xxh3_128)]
    print(f"Python {platform.python_version()}, {platform.machine()}, digests: {', '.join(kinds)}")
    print(f"GIL released from {_core.HASH_GIL_MIN_TOKENS} tokens on")
    table(tokens, options.repeat)
    decode_step(options.repeat)
    others_run(1 << 20, options.repeat)


if __name__ == "__main__":
    main()
