"""The worker's prefix lookup: a lookup plan of kvmask, driven with the worker's store.

`exact` asks the store once, for the keys stock asks and in its order. `staged` asks for the keys
that decide, in a few calls. Both count every call under stock's operation name.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvmask._core import Bitset, HitHints, KeyBuilder, build_keys, same_attributes
from kvmask.coordinator import Hit
from kvmask.mooncake import MooncakePolicy
from kvmask.plans import (
    MALFORMED_ANSWER,
    GroupScheme,
    Held,
    LookupPlan,
    PlanTools,
    Scheme,
    StorePolicy,
)
from kvmask.plans import lookup as plans_lookup
from kvmask.plans.breaker import no_answer
from kvmask.plans.metrics import TransferStats
from kvmask.vllm.acting import ACTING, guarded
from kvmask.vllm.binding import seen, state
from kvmask.vllm.ending import CALLS, CLOSE_SECONDS
from kvmask.vllm.local import FORGET, unpack
from kvmask.vllm.outages import breaker_of
from kvmask.vllm.releases import (
    ExternalCachedBlockPool,
    PoolKey,
    current,
    is_stock_coordinator,
    logger,
)
from kvmask.vllm.renewing import check_option, renewer_for
from kvmask.vllm.rules import Rules, digests_of, is_plain, rules_of
from kvmask.vllm.seams import stock
from kvmask.vllm.wire import SEND_ALL, Received, is_thrifty

Over = Callable[[], None]
_default: dict[str, plans_lookup.Strategy] = {"lookup": "staged"}


def check_strategy(lookup: Any) -> plans_lookup.Strategy:
    """Refuse what is no lookup strategy."""
    return plans_lookup.check_strategy(lookup, "lookup")


def set_default(lookup: str) -> None:
    """The strategy of workers that were not given one."""
    _default["lookup"] = check_strategy(lookup)


@dataclass(frozen=True, slots=True)
class Groups:
    """The cache groups that lookups speak of, as the engine has them.

    Attributes:
        coord: vLLM's coordinator.
        specs: vLLM's groups, one per group of the store.
        block_sizes: Tokens per block of every group.
        prefixes: Per group the key prefix of every rank namespace that must hold a block.
        hash_block_size: Tokens per digest.
    """

    coord: Any
    specs: Sequence[Any]
    block_sizes: Sequence[int]
    prefixes: Sequence[Sequence[str]]
    hash_block_size: int

    def scheme(self, rules: Rules) -> Scheme | None:
        """Scheme of lookups, or None when these groups are not the core's to answer."""
        prefixes = self.prefixes
        if not len(self.specs) == len(self.block_sizes) == len(rules.cacheable) == len(prefixes):
            return None
        if self.hash_block_size != rules.hash_block_size:
            return None
        if rules.eagle and not current().eagle_peeks:
            return None
        made = []
        for i, group in enumerate(self.specs):
            takes_part = current().prefix_cacheable(group.kv_cache_spec)
            if takes_part != rules.cacheable[i]:
                return None
            if takes_part and (self.block_sizes[i] != rules.block_sizes[i] or not prefixes[i]):
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


def scheme_of_worker(worker: Any) -> Scheme | None:
    """Scheme of a worker's lookups, or None when its groups are not the core's to answer."""
    kept = state(worker).get("scheme")
    if kept is not None and same_attributes(kept[0]):
        scheme: Scheme | None = kept[1]
        return scheme
    attributes = seen(worker, "coord", "_lookup_key_prefixes")
    coord, prefixes = worker.coord, worker._lookup_key_prefixes
    rules = rules_of(coord) if is_stock_coordinator(coord) else None
    if rules is None:
        return None
    sizes = [db.block_size for db in worker.token_dbs]
    groups = Groups(coord, worker._kv_cache_groups, sizes, prefixes, worker.hash_block_size)
    scheme = groups.scheme(rules)
    state(worker)["scheme"] = ([*attributes, *seen(coord, "__class__"), *rules.seen], scheme)
    return scheme


class LookupPolicy(StorePolicy):
    """Of lookups: what says that the store did not answer at all."""

    outage_codes = MooncakePolicy.outage_codes


class Lookups:
    """The lookups of one place: what they share, and how a call of the store is made and counted.

    Most lookups take one call, because they remember where earlier hits ended. All that use one
    store, saves and loads too, share its `kvmask.plans.Breaker`.

    Args:
        store: The store that is asked.
        record: Counts a call, as vLLM's workers count theirs.
        strategy: ``"staged"`` or ``"exact"``.
        renew: What a hit makes worth keeping is asked for again later.
        closed: Whether the store is closed, or about to be.
        stats: Counters to add to; new ones by default.

    Attributes:
        stats: Counters of lookups and renewals. A lookup is counted when its answer is out.
        tools: Hints and breaker.
        renewer: Asks again, in a thread of its own; None where nothing is renewed.
        ended: Called with a lookup's plan and hit when the lookup is over, on the thread that made
            it. Where another thread waits for the answer, that thread has it by then.
    """

    def __init__(
        self,
        store: Any,
        record: Callable[..., None],
        strategy: plans_lookup.Strategy,
        *,
        renew: bool = False,
        closed: Callable[[], bool] = lambda: False,
        stats: TransferStats | None = None,
    ) -> None:
        self.store = store
        self.closed = closed
        self.strategy = strategy
        self.tools = PlanTools(
            LookupPolicy(),
            hints=strategy == "staged",
            breaker=breaker_of(store),
            stats=False,
            log=logger,
        )
        self.ended: list[Callable[[LookupPlan, Hit], None]] = []
        self.record = record
        self.stats = TransferStats() if stats is None else stats
        self.renewer = renewer_for(self) if renew else None
        self._running: list[None] = [] if self.renewer is None else self.renewer.running

    def run(
        self, scheme: Scheme, block_hashes: Any, num_tokens: int, local_tokens: int
    ) -> tuple[LookupPlan, Over]:
        """Make a lookup.

        Args:
            scheme: The groups.
            block_hashes: A list of digests, BlockHashes or vLLM's view over a buffer.
            num_tokens: Tokens of the request.
            local_tokens: Tokens that the engine holds itself, in whole scheduler blocks; 0 asks
                for the whole prefix.

        Returns:
            (the plan, at its end; what is to be done once the answer is out).
        """
        plan = LookupPlan(
            scheme,
            digests_of(block_hashes),
            num_tokens,
            held=_held(scheme, local_tokens) if local_tokens else None,
            strategy=self.strategy,
            tools=self.tools,
        )
        spent: list[list[str]] = []
        self._running.append(None)
        try:
            self._drive(plan, spent)
        finally:
            self._running.pop()
        cause = plan.result.cause
        if cause is not None and getattr(cause, "code", None) == MALFORMED_ANSWER:
            logger.error("The Mooncake store's answer to a lookup is unusable: %s", cause)
        return plan, functools.partial(self._over, plan, spent)

    def _drive(self, plan: LookupPlan, spent: list[list[str]]) -> None:
        while (call := plan.next_call()) is not None:
            keys = call.args[0]
            spent.append(keys)  # freed when the answer is out: a long request has thousands
            try:
                answers = self._exists(keys)
            except Exception as e:
                # Its traceback holds this frame, and the plan would hold it in a cycle.
                plan.fail(e.with_traceback(None))
            else:
                plan.feed(answers)

    def _exists(self, keys: list[str]) -> Any:
        """The store's answers, counted as vLLM counts them."""
        start, n = time.perf_counter(), len(keys)
        try:
            with CALLS:
                answers = self.store.batch_is_exist(keys)
        except Exception:
            seconds = time.perf_counter() - start
            self.record("lookup_exists", seconds, n, status="error", num_failed_keys=n)
            raise
        self.record("lookup_exists", time.perf_counter() - start, n)
        return answers

    def ask(self, keys: list[str]) -> list[int] | None:
        """One call without a plan: the answers, or None when there are none for every key."""
        tools, breaker = self.tools, self.tools.breaker
        if breaker is None or breaker.refusal() is not None:
            return None
        begun = breaker.outages
        try:
            answers: list[int] = self._exists(keys)
        except Exception as e:
            tools.unanswered(e, begun)
            return None
        if len(answers) != len(keys):
            logger.error("The Mooncake store answered %d of %d keys", len(answers), len(keys))
            return None
        if tools.policy.outage(answers):
            tools.unanswered(no_answer(answers), begun)
            return None
        tools.answered(begun)
        return answers

    def _over(self, plan: LookupPlan, spent: list[list[str]]) -> None:
        """Drop a lookup's keys, and tell those who want to know that it is over."""
        spent.clear()
        hit = plan.result
        # Here and not in the plan: the scheduler has its answer by now, unless the worker gives it.
        self.stats.add_lookup(hit, hit.cause is not None)
        if self.renewer is not None:
            self.renewer.note(plan)
        for listener in self.ended:
            listener(plan, hit)

    def forget(self) -> None:
        """Drop what is remembered of the store's content."""
        if self.tools.hints is not None:
            self.tools.hints = HitHints(self.tools.hints.capacity)
        if self.renewer is not None:
            self.renewer.clear()

    def close(self) -> None:
        """Before the store is closed: renew nothing any more."""
        if self.renewer is not None:
            self.renewer.close(CLOSE_SECONDS)


def lookups_of(worker: Any) -> Lookups:
    """The lookups of a worker; new ones when its store or its strategy is another."""
    known = state(worker)
    strategy = known.get("strategy") or _default["lookup"]
    kept: Lookups | None = known.get("lookups")
    if kept is None or kept.strategy != strategy or kept.store is not worker.store:
        store, there = worker.store, weakref.ref(worker)
        made = Lookups(
            store,
            worker._record_kv_connector_operation,
            strategy,
            renew=known.get("renew", check_option(None)),
            closed=lambda: getattr(there(), "store", None) is not store,
            stats=None if kept is None else kept.stats,
        )
        if kept is not None:
            made.ended = kept.ended
        kept = known["lookups"] = made
    return kept


def close(worker: Any) -> None:
    """Before a worker closes its store."""
    kept: Lookups | None = state(worker).get("lookups")
    if kept is not None:
        kept.close()


def _held(scheme: Scheme, local_tokens: int) -> Held:
    """What lookups need not ask for: full-attention blocks of the GPU's own hit.

    That hit is rounded down here, so windows and states that end there need not be held.
    """
    full = [g.cacheable and g.kind == "full" for g in scheme.groups]
    return Held(tuple(local_tokens if f else 0 for f in full), local_tokens)


def result_of(scheme: Scheme, plan: LookupPlan) -> Any:
    """What vLLM's worker answers for a hit.

    A store that raises, or whose answer does not fit, gives no hit.
    """
    hit = plan.result
    if hit.cause is not None or hit.length <= 0:
        return current().lookup_result(0)
    return current().lookup_result(hit.length, hit.tail_tokens, scheme.cacheable)


def answer(
    worker: Any, num_tokens: int, local_tokens: int, block_hashes: Sequence[bytes]
) -> tuple[Any, Over | None]:
    """A worker's lookup.

    Returns:
        (what vLLM's worker answers, what is to be done once the answer is out).
    """
    if worker._capacity_only or num_tokens <= 0 or not block_hashes:
        return current().lookup_result(0), None
    if not ACTING.on:
        return _stocks(worker, num_tokens, block_hashes), None
    scheme = scheme_of_worker(worker) if is_plain(block_hashes) else None
    if scheme is None:
        with CALLS:
            return stock("worker.lookup")(worker, num_tokens, block_hashes), None
    try:
        plan, over = lookups_of(worker).run(scheme, block_hashes, num_tokens, local_tokens)
    except Exception as e:
        ACTING.trip("worker.lookup", e)
        return _stocks(worker, num_tokens, block_hashes), None
    return result_of(scheme, plan), over


def _stocks(worker: Any, num_tokens: int, block_hashes: Sequence[bytes]) -> Any:
    """What vLLM's own lookup answers; no hit when it raises: the thread that serves lookups must
    not end."""
    try:
        with CALLS:
            return stock("worker.lookup")(worker, num_tokens, block_hashes)
    except Exception as e:
        logger.exception("A lookup in the Mooncake store failed: %s", e)
        return current().lookup_result(0)


def lookup(self: Any, num_tokens: int, block_hashes: Sequence[bytes]) -> Any:
    """How long a prefix of the request the store can give, and what names its tail blocks.

    A hit never covers the whole request: the last token is computed for its logits. A store that
    raises, or does not answer every key, gives no hit.
    """
    if num_tokens == FORGET:
        lookups_of(self).forget()
        _received(self).clear()
        return current().lookup_result(0)
    if is_thrifty(num_tokens):
        num_tokens, block_hashes = _received(self).whole(num_tokens, block_hashes)
        if block_hashes is None:
            return current().lookup_result(SEND_ALL)
    result, over = answer(self, *unpack(num_tokens), block_hashes)
    if over is not None:
        try:
            over()
        except Exception as e:  # the thread that serves lookups must not end
            logger.exception("What follows a lookup failed: %s", e)
    return result


def _received(worker: Any) -> Received:
    """What the scheduler has sent to a worker."""
    received: Received = state(worker).setdefault("received", Received())
    return received


@guarded("worker.lookup")
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
    lookups = lookups_of(self)
    answers = lookups.ask(keys)
    if answers is None:
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
    lookups.stats.add(
        lookups=1, asked_keys=len(keys), exact_keys=len(keys), probes=1, hit_tokens=int(hit)
    )
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
