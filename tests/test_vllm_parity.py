"""The core and the reference against the real engine; skipped where vLLM is not installed.

A few thousand random cases here; `python tests/vllm_oracle.py --cases 100000 --seed 1` runs more.
"""

import importlib.util
import random
import warnings

import pytest
import vllm_cases
import vllm_oracle

from kvmask import BlockHashes, Coordinator, FullAttention, SlidingWindow, VllmKeys

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

CASES = 3000


@pytest.fixture(scope="module")
def engine():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the engine's own, while it is imported
        yield vllm_oracle.engine()


@pytest.mark.parametrize("subject", sorted(vllm_oracle.SUBJECTS))
@pytest.mark.parametrize("seed", [11, 12])
def test_random_cases(engine, subject, seed):
    bad = vllm_oracle.run(CASES, seed, subject)
    assert not bad, f"{len(bad)} of {CASES} differ; the first is case {bad[0][0]}: {bad[0][1]}"


def test_the_cases_reach_every_rule(engine):
    """A generator that drifts to trivial cases would make the comparison worthless."""
    seen = dict.fromkeys(
        ("hit", "cut hit", "sub-block", "redirect", "merged", "sparse", "ring", "eagle"), 0
    )
    for i in range(1500):
        case = vllm_cases.random_case(11, i)
        theirs = vllm_oracle.EngineCoordinator(case)
        hit, boundaries, _ = theirs.lookup()
        sizes = [g.block_size for g in case.groups if g.prefix_cacheable]
        seen["hit"] += hit > 0
        seen["cut hit"] += 0 < hit < case.num_tokens // case.unit * case.unit
        seen["sub-block"] += any(hit % size for size in sizes)
        seen["redirect"] += any(tail != hit for tail in (boundaries or {}).values())
        seen["merged"] += any(len(s.group_ids) > 1 for s in theirs.coord.attention_groups)
        masks = [m for m in theirs.store_mask(states=True) if m]
        seen["sparse"] += any(any(m) and not all(m) for m in masks)
        seen["ring"] += len(sizes) < len(case.groups)
        seen["eagle"] += bool(theirs.coord.eagle_group_ids)
    assert min(seen.values()) >= 10, seen


# The shape that the figures of this project speak of.
DEEPSEEK = (
    FullAttention(256),
    SlidingWindow(64, window=128),
    SlidingWindow(64, window=512),
    SlidingWindow(4, window=16),
    SlidingWindow(8, window=64),
)


@pytest.mark.parametrize("num_tokens", [8192, 8193, 8191, 32768])
@pytest.mark.parametrize("density", [1.0, 0.999, 0.0])
def test_a_real_shape(engine, num_tokens, density):
    rng = random.Random(num_tokens)
    hash_blocks = num_tokens // 4
    present = tuple(
        tuple(rng.random() < density for _ in range(num_tokens // g.block_size)) for g in DEEPSEEK
    )
    aligned = num_tokens // 256 * 256
    case = vllm_cases.Case(
        groups=DEEPSEEK,
        hash_block_size=4,
        alignment=None,
        retention=None,
        partial=False,
        hash_blocks=hash_blocks,
        present=present,
        num_tokens=num_tokens,
        max_length=aligned,
        load_tokens=aligned,
        store_tokens=aligned,
        start_token=1000,
        num_prompt_tokens=num_tokens,
        ranks=(1, 1, 2, 1, 1),
    )
    for subject in vllm_oracle.SUBJECTS:
        assert not list(vllm_oracle.differences(case, subject))


TEXTS = ("", "a", "m-7B", "模型", "a b", "x@y", "pre.fix", "q" * 300)


def test_key_prefixes_and_keys_are_byte_equal(engine):
    rng = random.Random(5)
    data = engine.data
    for _ in range(500):
        model = rng.choice(TEXTS[1:])
        prefix, namespace = rng.choice(TEXTS), rng.choice(("", "@store_tp:4@store_pp:1", "n"))
        ranks = {
            "tp_rank": rng.randrange(20),
            "pcp_rank": rng.randrange(3),
            "dcp_rank": rng.randrange(9),
            "pp_rank": rng.randrange(12),
            "group_id": rng.randrange(11),
        }
        metadata = data.KeyMetadata(model, **ranks, cache_prefix=prefix, store_namespace=namespace)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the format is ambiguous for some of these
            schema = VllmKeys(model=model, cache_prefix=prefix, namespace=namespace, **ranks)
        assert schema.prefix == data.PoolKey.build_prefix(metadata)
        size = rng.choice((8, 16, 32))
        digests = [rng.randbytes(size) for _ in range(rng.randrange(1, 9))]
        keys = [data.PoolKey(metadata, d.hex()).to_string() for d in digests]
        assert schema.keys(BlockHashes(b"".join(digests), size)) == keys


@pytest.mark.parametrize(("block_size", "hash_block"), [(16, 16), (64, 16), (256, 4), (12, 4)])
def test_chunk_keys_are_those_of_the_token_database(engine, block_size, hash_block):
    data = engine.data
    digests = [i.to_bytes(32, "big") for i in range(1, 130)]
    num_tokens = len(digests) * hash_block // block_size * block_size
    database = data.ChunkedTokenDatabase(
        data.KeyMetadata("m", 3, 0, 0, 1, 2), block_size, hash_block_size=hash_block
    )
    schema = VllmKeys(model="m", tp_rank=3, pp_rank=1, group_id=2)
    mask = [i % 3 != 1 for i in range(num_tokens // block_size)]
    expected = [
        database.key_for(h)
        for _, _, h in database.process_tokens(num_tokens, digests, 0, chunk_mask=mask)
    ]
    scale = block_size // hash_block
    assert schema.keys(BlockHashes.from_list(digests), mask, scale=scale) == expected
    start = min(2, len(mask))
    suffix = [
        database.key_for(h)
        for _, _, h in database.process_tokens(num_tokens, digests, start * block_size)
    ]
    blocks = num_tokens // block_size - start
    keys = schema.keys(BlockHashes.from_list(digests), [True] * blocks, start=start, scale=scale)
    assert keys == suffix


@pytest.mark.parametrize("window", range(1, 70))
def test_every_window_near_a_block(engine, window):
    """All windows of up to four blocks, at each small length, with and without EAGLE."""
    for eagle in (False, True):
        groups = (FullAttention(64), SlidingWindow(16, window=window, eagle=eagle))
        ours = Coordinator(groups, 16)
        for num_tokens in (0, 64, 128, 320):
            case = vllm_cases.Case(
                groups,
                16,
                None,
                None,
                False,
                num_tokens // 16,
                ((), ()),
                num_tokens,
                num_tokens,
                num_tokens,
                num_tokens,
                0,
                None,
                (1, 1),
            )
            theirs = vllm_oracle.EngineCoordinator(case)
            assert vllm_oracle.plain(ours.load_mask(num_tokens)) == theirs.load_mask()
            assert vllm_oracle.plain(ours.store_mask(num_tokens)) == theirs.store_mask(False)
