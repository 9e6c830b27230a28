"""The worker's prefix lookup: a lookup plan of kvmask, driven with the worker's backend.

`staged` asks for the keys that decide, all groups and ranks in a few calls. `exact` asks once for
every key that can matter, in stock's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvmask._core import Bitset, HitHints, KeyBuilder
from kvmask.ascend.digests import digests_of
from kvmask.ascend.releases import current, logger, seams
from kvmask.ascend.rules import Rules, rules_of, why_stock
from kvmask.ascend.said import stays
from kvmask.errors import ArgumentError
from kvmask.exits import StoreCalls
from kvmask.plans import GroupScheme, Held, LookupPlan, PlanTools, Scheme, drive
from kvmask.plans import lookup as plans_lookup

# Prefixes that hints keep, 8 bytes each. A prompt of 131,072 tokens has at most 512. A lookup of a
# new one writes all of them: the table is to stay in the processor's cache.
HINTS = 1 << 17

LAYERWISE = "layerwise transfer"

_default: dict[str, plans_lookup.Strategy] = {"lookup": "staged"}
# Lookups are made in threads of vllm-ascend's that nobody joins.
CALLS = StoreCalls()


def check_strategy(lookup: Any) -> plans_lookup.Strategy:
    """Refuse what is no lookup strategy."""
    return plans_lookup.check_strategy(lookup, "lookup")


def set_default(lookup: str) -> None:
    """The strategy of all workers."""
    _default["lookup"] = check_strategy(lookup)


class Backend:
    """A backend of AscendStore as plans call a store: any that has `exists`.

    Args:
        worker: Whose backend it is. A worker may connect late, so it is looked at on every call.
    """

    __slots__ = ("_worker",)

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def batch_is_exist(self, keys: list[str]) -> Sequence[int]:
        """1 for every key that the store has."""
        with CALLS:
            answers: Sequence[int] = self._worker.m_store.exists(keys)
        return answers


def _with_coordinator(worker: Any, ids: list[int]) -> Rules | None:
    """Rules of a lookup over all groups."""
    coord, db = worker.cache_coordinator, worker.token_database
    if sorted(ids) != list(range(worker.num_kv_cache_groups)):
        stays("lookups", "it is asked for some of the cache groups")
        return None
    rules = rules_of(coord)
    if rules is None:
        stays("lookups", why_stock(coord))
        return None
    release = current()
    families = db.group_cache_families.get("kv", {})
    for i, (_, size, _, _, cacheable, _) in enumerate(rules.rows):
        ratio = release.ratio(families.get(i, "default"))
        if cacheable and db.get_block_size(i) * ratio != size:
            stays("lookups", "keys and masks have blocks of different sizes")
            return None
    unit = rules.hash_block_size
    if release.digests_digests and any(row[4] and row[1] != unit for row in rules.rows):
        stays("lookups", "blocks of several hash blocks have digests of their own")
        return None
    if db.hash_block_size != unit or db.cache_coordinator is not coord:
        stays("lookups", "keys and masks have different hash blocks")
        return None
    return rules


def _without_coordinator(worker: Any, ids: list[int]) -> Rules | None:
    """Rules of a lookup that takes each group's longest prefix."""
    db = worker.token_database
    states = worker.group_uses_align_state
    families = db.group_cache_families.get("kv", {})
    unit, alignment = db.hash_block_size, worker.cache_transfer_granularity
    sizes = [db.get_block_size(i) for i in ids]
    if len(set(ids)) < len(ids):
        stays("lookups", "a cache group that is named twice")
        return None
    if any(i < len(states) and states[i] for i in ids):
        stays("lookups", "recurrent states without a coordinator")
        return None
    if any(current().ratio(families.get(i, "default")) != 1 for i in ids):
        stays("lookups", "a compressed cache family without a coordinator")
        return None
    if current().digests_digests and any(size != unit for size in sizes):
        stays("lookups", "blocks of several hash blocks have digests of their own")
        return None
    if alignment < 2 or any(size % unit or alignment % size for size in sizes):
        stays("lookups", "block sizes that do not divide each other")
        return None
    rows = [("full", size, 0, False, True, k) for k, size in enumerate(sizes)]
    return Rules(rows, unit, alignment)


def _names(worker: Any, group: int, prefix: str, *, merged: bool) -> list[str]:
    """The prefix in every rank namespace that must hold a block, in stock's order."""
    if merged:
        return list(worker._expand_lookup_key_variants(prefix, group, True))
    if current().names_contexts:
        return list(worker._expand_lookup_keys_by_rank([prefix], group))
    heads = [prefix] + [
        prefix.replace("@head_or_tp_rank:0", f"@head_or_tp_rank:{rank}", 1)
        for rank in range(1, worker.get_group_tp_size(group))
    ]
    return heads + [
        head.replace("@pp_rank:0", f"@pp_rank:{rank}", 1)
        for rank in range(1, worker.pp_size)
        for head in heads
    ]


class Lookups:
    """What lookups of one worker over some groups are made with."""

    __slots__ = ("rules", "scheme", "tools")

    def __init__(self, worker: Any, ids: list[int], rules: Rules, *, merged: bool) -> None:
        self.rules = rules
        groups = []
        for k, (kind, size, span, _, cacheable, _) in enumerate(rules.rows):
            names: list[str] = []
            if cacheable:
                group = k if merged else ids[k]
                prefix = worker.token_database._get_key_prefix(group)
                names = _names(worker, group, prefix, merged=merged)
            groups.append(
                GroupScheme(
                    k,
                    str(k),
                    kind,
                    size,
                    span=span,
                    cacheable=cacheable,
                    namespaces=tuple(map(KeyBuilder, names)),
                )
            )
        coord: Any = rules
        self.scheme = Scheme(coord, tuple(groups), covers=False)
        self.tools = {
            "staged": PlanTools(hints=HitHints(HINTS), stats=False, log=None),
            "exact": PlanTools(stats=False, log=None),
        }


def _lookups_of(worker: Any, ids: list[int]) -> Lookups | None:
    """What lookups over these groups are made with; None leaves them to stock."""
    db, coord = worker.token_database, worker.cache_coordinator
    stamp = (
        tuple(ids),
        worker.tp_size,
        worker.pp_size,
        getattr(worker, "dcp_size", 1),
        worker.cache_transfer_granularity,
        tuple(worker.get_group_tp_size(i) for i in ids),
        tuple(db._get_key_prefix(i) for i in ids),
        tuple(db.get_block_size(i) for i in ids),
        None if coord is None else rules_of(coord),
    )
    kept = worker.__dict__.setdefault("_kvmask_lookups", {})
    if stamp in kept:
        found: Lookups | None = kept[stamp]
        return found
    merged = coord is not None
    rules = _with_coordinator(worker, ids) if merged else _without_coordinator(worker, ids)
    lookups = None
    try:
        lookups = None if rules is None else Lookups(worker, ids, rules, merged=merged)
    except (ArgumentError, TypeError) as error:
        stays("lookups", str(error))
    if len(kept) > 16:
        kept.clear()
    kept[stamp] = lookups
    return lookups


def _held(lookups: Lookups, tokens: int, num_tokens: int) -> Held | None:
    """What the accelerator holds: every group's blocks below its hit, as stock counts them."""
    if tokens <= 0:
        return None
    tokens = min(tokens, num_tokens)
    return Held(tuple(Bitset.ones(tokens // g.block_size) for g in lookups.scheme.groups), 0)


def _plan(
    worker: Any, token_len: int, block_hashes: Any, ids: list[int], hbm_hit_tokens: int
) -> LookupPlan | None:
    """The plan of a lookup; None leaves it to stock."""
    lookups = _lookups_of(worker, ids)
    if lookups is None:
        return None
    digests = digests_of(block_hashes)
    if digests is None:
        stays("lookups", "block hashes that are no list of bytes or text")
        return None
    # Stock fails where it looks past the last digest, which depends on the groups.
    if len(digests) < token_len // lookups.rules.hash_block_size:
        stays("lookups", "a length that its digests do not cover")
        return None
    merged = worker.cache_coordinator is not None
    most = token_len if merged else min(token_len, worker.max_model_len)
    strategy = _default["lookup"]
    return LookupPlan(
        lookups.scheme,
        digests,
        # A plan leaves one token to compute; stock's scheduler takes care of that itself.
        lookups.rules.align(max(0, most)) + 1,
        held=_held(lookups, hbm_hit_tokens, token_len) if merged else None,
        strategy=strategy,
        tools=lookups.tools[strategy],
    )


def lookup_scheduler(
    self: Any,
    token_len: int,
    block_hashes: Any,
    kv_cache_group_ids: list[int] | None = None,
    use_layerwise: bool = False,
    hbm_hit_tokens: int = 0,
) -> int:
    """How many tokens of a prefix the store can give, over every rank that holds a part of it.

    A store that raises, or whose answer does not fit the call, gives no hit. It raises nothing: the
    thread that answers the scheduler would end.
    """
    plan = hit = None
    try:
        if use_layerwise:
            stays("lookups", LAYERWISE)
        else:
            ids = list(kv_cache_group_ids or [0])
            plan = _plan(self, token_len, block_hashes, ids, hbm_hit_tokens)
    except Exception as error:  # stock says what is wrong with the arguments
        stays("lookups", f"arguments that raise {type(error).__name__}")
    try:
        hit = None if plan is None else drive(plan, Backend(self))
    except ArgumentError as error:  # a digest is looked at when it is used
        stays("lookups", f"block hashes that raise {type(error).__name__}")
    except Exception as error:
        logger.error(
            "AscendStore's backend failed in a lookup: %s: %s", type(error).__name__, error
        )
        return 0
    if hit is None:
        stock = seams.stock("worker.lookup_scheduler")
        return stock(
            self, token_len, block_hashes, kv_cache_group_ids, use_layerwise, hbm_hit_tokens
        )
    if hit.cause is not None:
        logger.error("AscendStore's backend gave no usable answer to a lookup: %s", hit.cause)
        return 0
    return int(hit.length)


def register_kv_caches(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Stock's own. It is the first call that a worker gets in every mode of transfer: layerwise
    transfer calls no other function that kvmask replaces, and the log shall say why."""
    result = seams.stock("worker.register")(self, *args, **kwargs)
    if getattr(self, "use_layerwise", False):
        stays("lookups, keys and descriptors", LAYERWISE)
    return result
