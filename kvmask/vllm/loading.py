"""The receiving thread's job: a load plan of kvmask, driven as vLLM drives its own loads.

Keys, order, rotation, staging batches and calls are vLLM's. What to read, where to, and what became
of it are the plan's (`LoadPlan`). Stricter than vLLM, without changing what its engine keeps of a
good load:

* A get that returns another number of bytes than planned has failed, zero included.
* vLLM stops at the first failing batch and forgets the ones after it. Rotation can put blocks into
  those that lie before the failed one, and the engine keeps everything before the first reported
  block: they are reported too. What lies after a reported block is computed again anyway.
* A request that cannot be planned is reported as failed instead of never finishing, and one that
  has nothing to read is finished.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from vllm import envs

from kvmask._core import Bitset
from kvmask.coordinator import Hit
from kvmask.errors import KVMaskError
from kvmask.plans import NOT_TRIED, OVERSIZE, BlockFailure, Call, Held, LoadPlan
from kvmask.vllm import releases
from kvmask.vllm.acting import ACTING
from kvmask.vllm.ending import JOBS
from kvmask.vllm.policy import ReceivingPolicy
from kvmask.vllm.releases import NULL_BLOCK, current, logger
from kvmask.vllm.rules import digests_of
from kvmask.vllm.schemes import ThreadPlans, check_digests, thread_plans
from kvmask.vllm.seams import stock


def _plan(thread: Any, meta: Any, plans: ThreadPlans, tails: list[int]) -> LoadPlan:
    """The plan for a request's hit.

    Raises:
        AlignmentError: Its blocks have too few digests to name them, or none.
    """
    spec = meta.load_spec
    hit = _hit(thread, meta, plans, tails)
    hashes = digests_of(meta.block_hashes)
    check_digests(plans.scheme, spec.token_len, hashes)
    skip = _skip(thread, meta)
    held = None
    if skip:
        sizes = [db.block_size for db in thread.token_databases]
        held = Held(tuple(-(-skip // size) * size for size in sizes), skip)
    return LoadPlan(plans.scheme, hashes, hit, meta.block_ids, held=held, tools=plans.tools)


def _skip(thread: Any, meta: Any) -> int:
    """Tokens whose blocks are not read: what the GPU holds, in whole scheduler blocks."""
    block: int = thread.block_size
    return int(meta.load_spec.vllm_cached_tokens) // block * block


def _tails(thread: Any, spec: Any) -> list[int] | None:
    """Per group the boundary that names its last block, 0 where that is the hit's own end.

    None when one lies outside the last block, as none of a lookup's does.
    """
    token_len = spec.token_len
    tails = [0] * len(thread.token_databases)
    for boundary in getattr(spec, "tail_key_boundaries", ()):  # none before 0.29
        if boundary.num_tokens != token_len:
            size = thread.token_databases[boundary.group_id].block_size
            if -(-boundary.num_tokens // size) != -(-token_len // size):
                return None
            tails[boundary.group_id] = boundary.num_tokens
    return tails


def _hit(thread: Any, meta: Any, plans: ThreadPlans, tails: list[int]) -> Hit:
    """The hit that the scheduler found, with the coordinator's masks for it."""
    token_len: int = meta.load_spec.token_len
    masks = thread.coord.load_mask(meta.block_hashes, token_len)
    coord = thread.coord
    if type(masks[0]) is not Bitset or token_len % coord.lcm_block_size:
        masks, tails = _fitted(plans, masks, tails, token_len)
    return Hit._bare(token_len, masks, tuple(tails))


def _fitted(
    plans: ThreadPlans, given: Sequence[Sequence[bool]], tails: list[int], token_len: int
) -> tuple[tuple[Bitset, ...], list[int]]:
    """Masks as Bitsets of as many blocks as the hit has, where they do not end early."""
    masks = []
    for group, mask in zip(plans.scheme.groups, given, strict=True):
        end = -(-token_len // group.block_size)
        masks.append(Bitset.from_bools(mask[:end]))
        if len(mask) < end and group.cacheable:
            # No block is left that the hit could cut.
            tails[group.index] = len(mask) * group.block_size
    return tuple(masks), tails


def _drive(thread: Any, meta: Any, plan: LoadPlan) -> None:
    """Makes the plan's calls, then reports what may not be used."""
    while (call := plan.next_call()) is not None:
        _get(thread, meta.req_id, plan, call)
    failures = plan.failures
    if not failures:
        return
    if any(f.code == OVERSIZE for f in failures):
        logger.warning(
            "Request %s is not loaded: one of its keys needs more than the %s bytes of staging",
            meta.req_id,
            thread.disk_offload_buffer_budget_bytes,
        )
    _report(thread, meta.req_id, [f.block_id for f in _unusable(failures)])


def _report(thread: Any, req_id: str, block_ids: list[int]) -> None:
    """Tell the engine which blocks it may not use; from 0.31 on, or which request."""
    if current().reports_requests:
        thread._report_load_error(req_id, block_ids)
    else:
        thread._add_load_error_block_ids(block_ids)


def _unusable(failures: Sequence[BlockFailure]) -> Sequence[BlockFailure]:
    """What the store refused, and whatever else was not read before the first of it."""
    refused = [f for f in failures if f.code < 0 and f.code != NOT_TRIED]
    if not refused:
        return failures
    first = min((f.group, f.block) for f in refused)
    return [f for f in failures if (f.group, f.block) < first] + refused


def _get(thread: Any, req_id: str, plan: LoadPlan, call: Call) -> None:
    """Reads one batch."""
    keys = call.args[0]
    record, n = thread._record_operation, len(keys)
    start = time.perf_counter()
    try:
        tiers = None
        if envs.VLLM_MOONCAKE_STORE_TIER_LOG:
            tiers = releases.replica_tiers(thread.store, keys)
            start = time.perf_counter()
        results = call.run(thread.store)
        if tiers is not None:
            releases.log_tiers(req_id, keys, results, tiers)
    except Exception as e:
        record("load_get", start, n, num_bytes=call.num_bytes, status="error", num_failed_keys=n)
        logger.warning("Mooncake get of %d keys (first %s) failed: %s", n, keys[:3], e)
        plan.fail(e.with_traceback(None))
        return
    failures = plan.feed(results)
    record(
        "load_get",
        start,
        n,
        num_bytes=call.num_bytes,
        status="partial_failure" if failures else "ok",
        num_failed_keys=len(failures),
    )
    if failures:
        logger.warning(
            "Mooncake get failed for %d of %d keys of request %s (first %s)",
            len(failures),
            n,
            req_id,
            [(f.key, f.code) for f in failures[:3]],
        )


def _every_block(thread: Any, meta: Any) -> list[int]:
    """All blocks that a load may have been meant to fill.

    The null block is not among them: it stands for what is out of a window's reach.
    """
    skip = _skip(thread, meta)
    return [
        block
        for db, table in zip(thread.token_databases, meta.block_ids, strict=False)
        for block in table[-(-skip // db.block_size) :]
        if block != NULL_BLOCK
    ]


def handle_request(self: Any, req_meta: Any) -> None:
    """Load one request's hit; it is finished however the load ends."""
    with JOBS:
        _load(self, req_meta)


def _load(self: Any, req_meta: Any) -> None:
    if not ACTING.on:
        stock("receiving.handle_request")(self, req_meta)
        return
    req_id = req_meta.req_id
    try:
        plans = thread_plans(self, ReceivingPolicy)
        tails = None if plans is None else _tails(self, req_meta.load_spec)
    except Exception as e:
        stock("receiving.handle_request")(self, req_meta)  # raises where the job is to blame
        ACTING.trip("receiving.handle_request", e)
        return
    if plans is None or tails is None:
        stock("receiving.handle_request")(self, req_meta)
        return
    try:
        _drive(self, req_meta, _plan(self, req_meta, plans, tails))
    except Exception as e:
        logger.exception("Load of request %s failed: %s", req_id, e)
        if not isinstance(e, KVMaskError):
            ACTING.trip("receiving.handle_request", e)
        _report(self, req_id, _every_block(self, req_meta))
    self.set_finished_request(req_id)
    self.request_queue.task_done()
