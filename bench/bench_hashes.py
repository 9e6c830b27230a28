"""ns per block hash and per key. Compares hashing with vLLM and SGLang in one run.

    python bench/bench_hashes.py [--tokens 131072] [--repeat 5] [--sglang hicache_hash_cpp.so]

For vLLM this times its own request hasher on a real Request. "drop-in" is kvmask's replacement for
that hasher, on the same Request. Every figure is the best of the repetitions. Before the timing,
the digests of both are compared. Without vLLM, only figures of kvmask are printed.

For SGLang this times its compiled hash, `mem_cache/cpp_utils/hash_binding.cpp` of its package,
built with pybind11:

    g++ -O3 -mavx2 -std=c++17 -DNDEBUG -shared -fPIC -DTORCH_EXTENSION_NAME=hicache_hash_cpp \
        -I<pybind11> -I<python> hash_binding.cpp -o hicache_hash_cpp.so -lcrypto
"""

import argparse
import array
import importlib.util
import os
import platform
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from kvmask import _core
from kvmask.hashing.chain import ALGORITHMS, BlockHasher, hash_tokens
from kvmask.hashing.digests import sha256, xxh3_128
from kvmask.keys import (
    AscendKeys,
    LMCacheKeys,
    LMCacheObjectKeys,
    SglangKeys,
    StrictKeys,
    VllmKeys,
    sglang_page_hashes,
)

SEED = "0"
TARGETS = {"sha256": 10, "sha256_cbor": 15, "xxhash": 6, "xxhash_cbor": 6}


def best(call: Callable[[], Any], repeat: int) -> float:
    """Return the ns of the shortest of `repeat` calls."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
    return min(times)


def vllm_hashers(
    algorithm: str, block_size: int, tokens: list[int]
) -> tuple[Callable[[], list[bytes]], Callable[[], list[bytes]]]:
    """Return vLLM's own hasher and kvmask's replacement, for the same request."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request

    from kvmask.vllm.hashing import request_block_hasher

    hash_fn = get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(hash_fn)
    request = Request(
        request_id="bench",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
    )
    own = kv_cache_utils.get_request_block_hasher(block_size, hash_fn)
    ours = request_block_hasher(block_size, hash_fn)
    return lambda: own(request), lambda: ours(request)


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
    print(
        f"{'algorithm':12} {'block':>5} {'vLLM':>8} {'drop-in':>8} {'list':>7} {'int64':>7}"
        "  ns per block"
    )
    for algorithm in ALGORITHMS:
        for block_size in (4, 16):
            blocks = len(tokens) // block_size

            def own(ids: Any = tokens, a: str = algorithm, b: int = block_size) -> Any:
                return hash_tokens(ids, b, a, seed=SEED)

            theirs = drop_in = float("nan")
            if reference:
                call, ours = vllm_hashers(algorithm, block_size, tokens)
                if not call() == ours() == list(own()):
                    raise SystemExit(f"{algorithm}, blocks of {block_size}: digests differ")
                theirs = best(call, repeat) / blocks
                drop_in = best(ours, repeat) / blocks
            from_list = best(own, repeat) / blocks
            from_flat = best(lambda: own(flat), repeat) / blocks
            print(
                f"{algorithm:12} {block_size:5} {theirs:8.0f} {drop_in:8.0f} {from_list:7.0f}"
                f" {from_flat:7.0f}  {theirs / from_list:5.1f}x from a list, target "
                f"{TARGETS[algorithm]}x"
            )


def sglang_pages(path: str, tokens: list[int], repeat: int) -> None:
    spec = importlib.util.spec_from_file_location("hicache_hash_cpp", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"--sglang must name a compiled module, got {path!r}")
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    flat = array.array("q", tokens)
    for page_size in (1, 16, 64):
        pages = len(tokens) // page_size

        def call(n: int = page_size) -> Any:
            return theirs.get_hash(flat, len(flat), 1, False, None, n)

        def own(n: int = page_size) -> Any:
            return sglang_page_hashes(flat, n)

        if call()[:pages] != [digest.hex() for digest in own()]:
            raise SystemExit(f"SGLang, pages of {page_size}: digests differ")
        a, b = best(call, repeat) / pages, best(own, repeat) / pages
        print(f"SGLang pages of {page_size:3} from int64: {a:.0f} against {b:.0f} ns per page")


def key_building(repeat: int) -> None:
    hashes = hash_tokens(array.array("q", range(4096)), 1, seed=SEED)
    numbers = hash_tokens(array.array("q", range(4096)), 1, "xxhash", seed=SEED)
    model = "DeepSeek-V4"
    for schema in (
        VllmKeys(model),
        AscendKeys(model),
        SglangKeys(model),
        LMCacheKeys(model),
        LMCacheObjectKeys(model),
        StrictKeys(model),
    ):
        digests = numbers if isinstance(schema, LMCacheKeys) else hashes
        took = best(lambda s=schema, d=digests: s.keys(d), 20 * repeat) / len(digests)
        print(f"{type(schema).__name__:18} {took:5.1f} ns per key, 4,096 keys, target 40")


def others_run(tokens: int, repeat: int) -> None:
    """Print how long another Python thread has to wait during one long call."""
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
    parser.add_argument("--sglang", metavar="FILE", help="SGLang's compiled page hash")
    options = parser.parse_args()
    os.environ["PYTHONHASHSEED"] = SEED
    random.seed(0)
    tokens = [random.randrange(150_000) for _ in range(options.tokens)]
    kinds = [getattr(find(), "kind", "Python call") for find in (sha256, xxh3_128)]
    print(f"Python {platform.python_version()}, {platform.machine()}, digests: {', '.join(kinds)}")
    print(f"GIL released from {_core.HASH_GIL_MIN_TOKENS} tokens on")
    table(tokens, options.repeat)
    if options.sglang:
        sglang_pages(options.sglang, tokens, options.repeat)
    decode_step(options.repeat)
    key_building(options.repeat)
    others_run(1 << 20, options.repeat)


if __name__ == "__main__":
    main()
