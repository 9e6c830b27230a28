"""The worker's prefix lookup: a lookup plan of kvmask, driven with the worker's store.

`exact` asks the store once, for the keys stock asks and in its order. `staged` asks for the keys
that decide, in a few calls. Both count every call under stock's operation name.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvmask._core import Bitset, KeyBuilder, build_keys
from kvmask.errors import ArgumentError
from kvmask.plans import STRATEGIES, GroupScheme, Held, LookupPlan, PlanTools, Scheme
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


def _scheme(worker: Any) -> Scheme | None:
    """Scheme of a worker's lookups, or None when its groups are not the core's to answer."""
    coord = worker.coord
    if not is_stock_coordinator(coord):
        return None
    rules = rules_of(coord)
    if rules is None:
        return None
    prefixes = worker._lookup_key_prefixes
    kept = worker.__dict__.get("_kvmask_scheme")
    if kept is not None and kept[0] is rules and kept[1] is prefixes:
        scheme: Scheme | None = kept[2]
        return scheme
    scheme = _make_scheme(worker, rules, prefixes)
    worker.__dict__["_kvmask_scheme"] = (rules, prefixes, scheme)
    return scheme


def _make_scheme(worker: Any, rules: Rules, prefixes: Sequence[Sequence[str]]) -> Scheme | None:
    groups = list(zip(worker._kv_cache_groups, worker.token_dbs, strict=True))
    if not len(groups) == len(rules.cacheable) == len(prefixes):
        return None
    if worker.hash_block_size != rules.hash_block_size:
        return None
    if rules.eagle and not current().eagle_peeks:
        return None
    made = []
    for i, (group, db) in enumerate(groups):
        takes_part = current().prefix_cacheable(group.kv_cache_spec)
        if takes_part != rules.cacheable[i]:
            return None
        if takes_part and (db.block_size != rules.block_sizes[i] or not prefixes[i]):
            return None
        names = tuple(KeyBuilder(p + "@") for p in prefixes[i])
        made.append(
            GroupScheme(
                i,
                str(i),
                rules.kinds[i],
                rules.block_sizes[i],
                cacheable=takes_part,
                namespaces=names,
            )
        )
    coord: Any = rules
    # As stock, lookups take what digests there are.
    return Scheme(coord, tuple(made), covers=False)


def _tools(worker: Any, strategy: str) -> PlanTools:
    """What the lookups of a worker share: where its earlier hits ended.

    Most lookups then take one call.
    """
    name = "_kvmask_tools_" + strategy
    tools: PlanTools | None = worker.__dict__.get(name)
    if tools is None:
        tools = PlanTools(hints=strategy == "staged", stats=False, log=None)
        worker.__dict__[name] = tools
    return tools


def _held(scheme: Scheme, local_tokens: int) -> Held | None:
    """What lookups need not ask for: full-attention blocks of the GPU's own hit.

    That hit is rounded down here, so windows and states that end there need not be held.
    """
    if not local_tokens:
        return None
    full = [g.cacheable and g.kind == "full" for g in scheme.groups]
    return Held(tuple(local_tokens if f else 0 for f in full), local_tokens)


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
    scheme = _scheme(self) if is_plain(block_hashes) else None
    if scheme is None:
        return stock("worker.lookup")(self, num_tokens, block_hashes)
    strategy = self.__dict__.get("_kvmask_lookup") or _default["lookup"]
    plan = LookupPlan(
        scheme,
        digests_of(block_hashes),
        num_tokens,
        held=_held(scheme, local_tokens),
        strategy=strategy,
        tools=_tools(self, strategy),
    )
    while (call := plan.next_call()) is not None:
        answers = _ask(self, call.args[0])
        if answers is None:
            return release.lookup_result(0, ())
        plan.feed(answers)
    hit = plan.result
    if hit.cause is not None:
        logger.error("The Mooncake store's answer to a lookup is unusable: %s", hit.cause)
        return release.lookup_result(0, ())
    if hit.length <= 0:
        return release.lookup_result(0, ())
    groups = scheme.groups
    return release.lookup_result(
        hit.length,
        [(g, tail or hit.length) for g, tail in enumerate(hit.tail_tokens) if groups[g].cacheable],
    )


def lookup_by_length(self: Any, token_len: int, block_hashes: Sequence[bytes]) -> int:
    """The lookup to 0.26, which aligns nothing itself: keys from the core, the rest stock's."""
    if not is_plain(block_hashes) or not block_hashes or token_len <= 0:
        return int(stock("worker.lookup")(self, token_len, block_hashes))
    hashes = digests_of(block_hashes)
    masks = self.coord.lookup_mask(token_len)
    prefixes = _prefixes_by_length(self)
    unit = self.coord.hash_block_size
    keys: list[str] = []
    blocks: list[tuple[int, bytes]] = []
    for g, db in enumerate(self.token_dbs):
        scale = db.block_size // unit
        n = min(len(hashes) // scale, -(-token_len // db.block_size))
        mask = masks[g]
        bits = Bitset.ones(n) if mask is None else Bitset.from_bools(mask)[:n]
        keys += build_keys(tuple(map(KeyBuilder, prefixes[g])), hashes, bits, 0, scale)
        blocks += [(g, bytes(hashes[(i + 1) * scale - 1])) for i in bits.indices()]
    if not keys:
        return 0
    answers = _ask(self, keys)
    if answers is None:
        return 0
    if len(answers) != len(keys):
        logger.error("The Mooncake store answered %d of %d keys", len(answers), len(keys))
        return 0
    width = len(prefixes[0])
    exists = {
        block
        for i, block in enumerate(blocks)
        if all(a == 1 for a in answers[i * width : (i + 1) * width])
    }
    size = (unit,) if current().sized_pools else ()
    pool = ExternalCachedBlockPool(*size, exists)
    _, hit = self.coord.find_longest_cache_hit(block_hashes, token_len, pool)
    return int(hit)


def _prefixes_by_length(worker: Any) -> list[list[str]]:
    """Per group what stands before the digest in the keys of every rank; 0.24 keeps no list."""
    known = getattr(worker, "_lookup_key_prefixes", None)
    if known is not None:
        return [[prefix + "@" for prefix in prefixes] for prefixes in known]
    ranks = [
        {"tp_rank": tp, "pp_rank": pp}
        for tp in range(min(worker.tp_size, worker.num_kv_head))
        for pp in range(worker.pp_size)
    ]
    return [
        [PoolKey(replace(db.metadata, **r), "").to_string() for r in ranks]
        for db in worker.token_dbs
    ]
