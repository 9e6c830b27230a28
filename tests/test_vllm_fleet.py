"""Engines with stock, this and later kvmasks share one store: their keys never change.

`tests/data/vllm_keys.json` has the keys of some prompts as vLLM 0.32 makes them by itself. A
version that makes other keys would lose the store's content in a rolling change. That must not come
about by accident: neither here nor, unnoticed, in vLLM.

Whole engines that share a store are in scripts/vllm_modes.py.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from test_vllm_agreement import GRIDS, plain_case, worker_of
from test_vllm_hashing import make
from vllm.utils import hashing
from vllm.v1.core import kv_cache_utils

import kvmask.vllm
from kvmask.vllm import lookup, seams
from kvmask.vllm.binding import state

pytestmark = pytest.mark.vllm

FILE = Path(__file__).parent / "data" / "vllm_keys.json"
TOKENS = [(i * 7919) % 1000 for i in range(97)]
HASHERS = {
    "vllm": kv_cache_utils.get_request_block_hasher,
    "kvmask": kvmask.vllm.request_block_hasher,
}
ALGORITHMS = ("sha256", "sha256_cbor")
SALTS = (None, "a salt")
PROMPTS = list(itertools.product(range(len(GRIDS)), ALGORITHMS, SALTS))


class Asked:
    """A store that has nothing, or everything, and keeps the keys that it was asked for."""

    def __init__(self, answer: int = 0) -> None:
        self.keys: list[str] = []
        self.answer = answer

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        self.keys += keys
        return [self.answer] * len(keys)


def name_of(grid: int, algorithm: str, salt: str | None) -> str:
    sizes = " ".join(f"{k}={v}" for k, v in GRIDS[grid].items())
    return f"{sizes or 'alone'}, {algorithm}, {'salted' if salt else 'plain'}"


def frozen() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(FILE.read_text(encoding="ascii"))
    return found


def asked(
    who: str,
    grid: int,
    algorithm: str,
    salt: str | None,
    monkeypatch: pytest.MonkeyPatch,
    answer: int = 0,
) -> tuple[list[str], Any]:
    """The keys of one engine's lookup, and its answer: `vllm`, or kvmask's strategy."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    function = getattr(hashing, algorithm)
    kv_cache_utils.init_none_hash(function)
    hasher = HASHERS["vllm" if who == "vllm" else "kvmask"](16, function)
    digests = list(make(TOKENS, hasher, cache_salt=salt).block_hashes)
    worker = worker_of(plain_case(), **GRIDS[grid])
    worker.store = Asked(answer)
    if who == "vllm":
        found = seams.stock("worker.lookup")(worker, len(TOKENS), digests)
    else:
        state(worker)["strategy"] = who
        state(worker)["renew"] = False
        found = lookup.lookup(worker, len(TOKENS), digests)
    return worker.store.keys, found


@pytest.mark.parametrize("who", ["vllm", "exact"])
@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda p: name_of(*p))
def test_keys_are_the_frozen_ones(who: str, prompt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, _ = asked(who, *prompt, monkeypatch)
    assert keys == frozen()[name_of(*prompt)]


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda p: name_of(*p))
def test_staged_asks_for_frozen_keys_alone(prompt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = frozen()[name_of(*prompt)]
    for answer in (0, 1):
        keys, found = asked("staged", *prompt, monkeypatch, answer)
        assert keys
        assert set(keys) < set(whole)
        assert found == asked("vllm", *prompt, monkeypatch, answer)[1]


def test_another_salt_or_algorithm_never_hits() -> None:
    found = frozen()
    assert list(found) == [name_of(*prompt) for prompt in PROMPTS]
    for one, other in itertools.combinations(PROMPTS, 2):
        mine, theirs = found[name_of(*one)], found[name_of(*other)]
        assert len(set(mine)) == len(mine) > 0
        assert one[1:] == other[1:] or not set(mine) & set(theirs)
