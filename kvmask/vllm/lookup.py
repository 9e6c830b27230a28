"""The worker's prefix lookup: keys, answers and hit in the core.

`exact` asks the store once, for the keys stock asks and in its order. `staged` asks for the keys
that decide, in a few calls. Both count every call under stock's operation name.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvmask._core import Bitset, HitHints, KeyBuilder, LookupCore, build_keys
from kvmask.errors import ArgumentError, KVMaskError
from kvmask.plans.moves import STRATEGIES
from kvmask.vllm.local import unpack
from kvmask.vllm.releases import (
    ExternalCachedBlockPool,
    PoolKey,
    current,
    is_stock_coordinator,
    logger,
)
from kvmask.vllm.rules import Rules, digests_of, is_plain, rules_of
from kvmask.vllm.seams import stock

_default = {"lookup": "staged"}


def check_strategy(lookup: Any) -> str:
    """Refuse what is no lookup strategy."""
    if lookup not in STRATEGIES:
        raise ArgumentError(f"`lookup` must be one of {STRATEGIES}, got {lookup!r}")
    return str(lookup)


def set_default(lookup: str) -> None:
    """The strategy of workers that were not given one."""
    _default["lookup"] = check_strategy(lookup)


def _names(worker: Any) -> tuple[Rules, list[tuple[KeyBuilder, ...]]] | None:
    """Rules and key builders of a worker, or None when its groups are not the core's to answer."""
    coord = worker.coord
    if not is_stock_coordinator(coord):
        return None
    rules = rules_of(coord)
    if rules is None:
        return None
    prefixes = worker._lookup_key_prefixes
    kept = worker.__dict__.get("_kvmask_names")
    if kept is not None and kept[0] is rules and kept[1] is prefixes:
        return kept[2]
    names = None
    groups = list(zip(worker._kv_cache_groups, worker.token_dbs, strict=True))
    agree = len(groups) == len(rules.cacheable) == len(prefixes) and (
        worker.hash_block_size == rules.hash_block
    )
    for i, (group, db) in enumerate(groups):
        if not agree:
            break
        takes_part = current().prefix_cacheable(group.kv_cache_spec)
        agree = takes_part == rules.cacheable[i] and (
            not takes_part or (db.block_size == rules.block_sizes[i] and len(prefixes[i]) > 0)
        )
    if agree:
        names = (rules, [tuple(KeyBuilder(p + "@") for p in row) for row in prefixes])
    worker.__dict__["_kvmask_names"] = (rules, prefixes, names)
    return names


def _hints(worker: Any) -> HitHints:
    """Where this worker's earlier hits ended: most lookups then take one call."""
    hints: HitHints | None = worker.__dict__.get("_kvmask_hints")
    if hints is None:
        hints = worker.__dict__["_kvmask_hints"] = HitHints()
    return hints


def _ask(worker: Any, keys: list[str]) -> Any:
    """The store's answers, counted as stock counts them; None, and logged, when it raised."""
    start = time.perf_counter()
    try:
        answers = worker.store.batch_is_exist(keys)
    except Exception as e:
        worker._record_kv_connector_operation(
            "lookup_exists",
            time.perf_counter() - start,
            len(keys),
            status="error",
            num_failed_keys=len(keys),
        )
        logger.error("Lookup of %d keys in the Mooncake store failed: %s", len(keys), e)
        return None
    worker._record_kv_connector_operation("lookup_exists", time.perf_counter() - start, len(keys))
    return answers


def lookup(self: Any, num_tokens: int, block_hashes: Sequence[bytes]) -> Any:
    """How long a prefix of the request the store can give, and what names its tail blocks.

    A hit never covers the whole request: the last token is computed for its logits. A store that
    raises, or does not answer every key, gives no hit.
    """
    release = current()
    num_tokens, local_tokens = unpack(num_tokens)
    if self._capacity_only or num_tokens <= 0 or not block_hashes:
        return release.lookup_result(0, ())
    names = _names(self) if is_plain(block_hashes) else None
    if names is None or (names[0].eagle and not release.eagle_peeks):
        return stock("worker.lookup")(self, num_tokens, block_hashes)
    rules, builders = names
    staged = (self.__dict__.get("_kvmask_lookup") or _default["lookup"]) == "staged"
    hashes = digests_of(block_hashes)
    hints = _hints(self) if staged else None
    units = rules.hash_block, rules.unit
    hint = 0 if hints is None else hints.predict(hashes, *units, num_tokens - 1)
    search = LookupCore(
        rules.core, builders, hashes, num_tokens, local_tokens, staged=staged, hint=hint
    )
    while keys := search.next_keys():
        answers = _ask(self, keys)
        if answers is None:
            return release.lookup_result(0, ())
        try:
            search.feed(answers)
        except KVMaskError as e:
            logger.error("The Mooncake store's answer to a lookup is unusable: %s", e)
            return release.lookup_result(0, ())
    found = search.result()
    if found is None or found[0] <= 0:
        return release.lookup_result(0, ())
    hit, _, tails = found
    if hints is not None:
        hints.learn(hashes, *units, hit)
    return release.lookup_result(
        hit, [(g, t or hit) for g, t in enumerate(tails) if rules.cacheable[g]]
    )


def lookup_by_length(self: Any, token_len: int, block_hashes: Sequence[bytes]) -> int:
    """The lookup of 0.24, which aligns nothing itself: keys from the core, the rest stock's."""
    if not is_plain(block_hashes) or not block_hashes or token_len <= 0:
        return int(stock("worker.lookup")(self, token_len, block_hashes))
    hashes = digests_of(block_hashes)
    masks = self.coord.lookup_mask(token_len)
    ranks = [
        {"tp_rank": tp, "pp_rank": pp}
        for tp in range(min(self.tp_size, self.num_kv_head))
        for pp in range(self.pp_size)
    ]
    unit = self.coord.hash_block_size
    keys: list[str] = []
    blocks: list[tuple[int, bytes]] = []
    for g, db in enumerate(self.token_dbs):
        scale = db.block_size // unit
        n = min(len(hashes) // scale, -(-token_len // db.block_size))
        mask = masks[g]
        bits = Bitset.ones(n) if mask is None else Bitset.from_bools(mask)[:n]
        names = [PoolKey(replace(db.metadata, **r), "").to_string() for r in ranks]
        keys += build_keys(tuple(map(KeyBuilder, names)), hashes, bits, 0, scale)
        blocks += [(g, bytes(hashes[(i + 1) * scale - 1])) for i in bits.indices()]
    if not keys:
        return 0
    answers = _ask(self, keys)
    if answers is None:
        return 0
    if len(answers) != len(keys):
        logger.error("The Mooncake store answered %d of %d keys", len(answers), len(keys))
        return 0
    width = len(ranks)
    exists = {
        block
        for i, block in enumerate(blocks)
        if all(a == 1 for a in answers[i * width : (i + 1) * width])
    }
    _, hit = self.coord.find_longest_cache_hit(
        block_hashes, token_len, ExternalCachedBlockPool(exists)
    )
    return int(hit)
