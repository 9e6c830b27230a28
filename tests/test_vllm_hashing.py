"""The drop-in for vLLM's request hasher, against vLLM's own over real requests."""

import random

import pytest

pytest.importorskip("vllm")

import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils import hashing
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from kvmask.hashing.chain import ALGORITHMS
from kvmask.vllm import hashing as ours

pytestmark = pytest.mark.vllm


@pytest.fixture(params=ALGORITHMS)
def hash_fn(request, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "3")
    function = getattr(hashing, request.param)
    kv_cache_utils.init_none_hash(function)
    return function


def make(tokens, hasher, **kwargs):
    return Request(
        request_id="r",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=64),
        pooling_params=None,
        block_hasher=hasher,
        **kwargs,
    )


def media(*spans):
    return [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=name,
            mm_position=PlaceholderRange(offset=offset, length=length),
        )
        for name, offset, length in spans
    ]


def kinds():
    """Keyword arguments of requests of every kind."""
    lora = LoRARequest("adapter", 1, "/path/to/adapter")
    yield {}
    yield {"cache_salt": "salt"}
    yield {"lora_request": lora}
    yield {"lora_request": lora, "cache_salt": "salt"}
    # One object twice: the name is also the path, the salt also the name.
    name = "".join(["on", "ce"])
    yield {"lora_request": LoRARequest(name, 1, name), "cache_salt": name}
    yield {"mm_features": media(("cat", 3, 20), ("cat", 30, 4), ("dog", 34, 9))}
    yield {
        "mm_features": media(("cat", 3, 20)),
        "lora_request": lora,
        "cache_salt": "salt",
    }


class Counting:
    """vLLM's hasher, and how often it was asked."""

    def __init__(self, monkeypatch):
        self.calls = 0
        make_own = kv_cache_utils.get_request_block_hasher

        def counted(*args, **kwargs):
            own = make_own(*args, **kwargs)

            def hasher(request):
                self.calls += 1
                return own(request)

            return hasher

        monkeypatch.setattr(ours, "_own_hasher", counted)


@pytest.mark.parametrize("size", [1, 2, 4, 16, 64])
def test_equal_while_requests_grow(hash_fn, size, monkeypatch):
    counting = Counting(monkeypatch)
    rng = random.Random(size)
    for number, kwargs in enumerate(kinds()):
        prompt = [rng.choice((rng.randrange(300), rng.randrange(150_000))) for _ in range(150)]
        theirs = make(prompt, kv_cache_utils.get_request_block_hasher(size, hash_fn), **kwargs)
        mine = make(prompt, ours.request_block_hasher(size, hash_fn), **kwargs)
        assert mine.block_hashes == theirs.block_hashes
        assert len(mine.block_hashes) == 150 // size
        for step in (1, 1, 7, 1, 70, 2):
            more = [rng.randrange(150_000) for _ in range(step)]
            theirs.append_output_token_ids(list(more))
            mine.append_output_token_ids(list(more))
            assert mine.block_hashes == theirs.block_hashes
        # Requests with media are left to vLLM, and a few blocks with an adapter.
        if not {"mm_features", "lora_request"} & set(kwargs) and (size < 64 or not kwargs):
            assert counting.calls == 0, number
        if "mm_features" in kwargs:
            assert counting.calls > 1
        counting.calls = 0


def test_long_blocks(hash_fn):
    prompt = [2**31 + i for i in range(3 * 9357)]
    prompt *= 2
    for kwargs in ({}, {"lora_request": LoRARequest("adapter", 1, "/path")}):
        theirs = make(prompt, kv_cache_utils.get_request_block_hasher(9357, hash_fn), **kwargs)
        mine = make(prompt, ours.request_block_hasher(9357, hash_fn), **kwargs)
        assert mine.block_hashes == theirs.block_hashes
        assert len(mine.block_hashes) == 6


def test_prompt_embeddings_go_to_vllm(hash_fn, monkeypatch):
    counting = Counting(monkeypatch)
    embeds = torch.arange(40, dtype=torch.float32).reshape(10, 4)
    theirs = make(
        None, kv_cache_utils.get_request_block_hasher(4, hash_fn), prompt_embeds=embeds.clone()
    )
    mine = make(None, ours.request_block_hasher(4, hash_fn), prompt_embeds=embeds.clone())
    assert mine.block_hashes == theirs.block_hashes
    assert len(mine.block_hashes) == 2
    assert counting.calls == 1


@pytest.mark.parametrize("odd", [True, -1])
def test_odd_token_ids_go_to_vllm(hash_fn, odd, monkeypatch):
    counting = Counting(monkeypatch)
    prompt = [5, 6, 7, odd, 8, 9, 10, 11]
    theirs = make(prompt, kv_cache_utils.get_request_block_hasher(4, hash_fn))
    mine = make(prompt, ours.request_block_hasher(4, hash_fn))
    assert mine.block_hashes == theirs.block_hashes
    assert counting.calls == 1
    plain = make([int(t) for t in prompt], kv_cache_utils.get_request_block_hasher(4, hash_fn))
    # CBOR too tells true from 1.
    assert (plain.block_hashes == theirs.block_hashes) is (type(odd) is int)


def test_what_stays_with_vllm(hash_fn, monkeypatch):
    counting = Counting(monkeypatch)

    def other(value):
        return hash_fn(value)

    assert ours.algorithm_of(other) is None
    mine = make(list(range(8)), ours.request_block_hasher(4, other))
    theirs = make(list(range(8)), kv_cache_utils.get_request_block_hasher(4, other))
    assert mine.block_hashes == theirs.block_hashes
    assert counting.calls == 1


def test_hashes_that_look_ahead_stay_with_vllm(monkeypatch):
    made = []

    def own(*args, **kwargs):
        made.append((args, kwargs))
        return "own"

    monkeypatch.setattr(ours, "_own_hasher", own)
    assert ours.request_block_hasher(4, hashing.sha256, 1) == "own"
    assert ours.request_block_hasher(4, hashing.sha256, num_hash_lookahead_tokens=2) == "own"
    assert ours.request_block_hasher(4, hashing.sha256, num_hash_lookahead_tokens=0) != "own"
    assert made[1] == ((4, hashing.sha256), {"num_hash_lookahead_tokens": 2})


def test_a_new_start_hash_is_seen(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "3")
    kv_cache_utils.init_none_hash(hashing.sha256)
    hasher = ours.request_block_hasher(4, hashing.sha256)
    one = make(list(range(8)), hasher).block_hashes
    monkeypatch.setenv("PYTHONHASHSEED", "4")
    kv_cache_utils.init_none_hash(hashing.sha256)
    two = make(list(range(8)), hasher).block_hashes
    assert one != two
