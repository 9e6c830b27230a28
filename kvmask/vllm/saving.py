"""The sending thread's job: a save plan of kvmask, driven as vLLM drives its own saves.

The steps are vLLM's, in its order and with the same calls to the store and to the thread's own
ledger. What to save, its keys, addresses and what became of it are the plan's (`SavePlan`). Two
answers that vLLM reads as "nothing to do" are read as failures: an existence answer that ends
early, and put results that do.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from kvmask.errors import KVMaskError
from kvmask.plans import EXISTS, WAIT, BlockFailure, Call, SavePlan
from kvmask.vllm.acting import ACTING
from kvmask.vllm.ending import JOBS
from kvmask.vllm.policy import SendingPolicy
from kvmask.vllm.releases import (
    NO_HANDLE,
    NULL_BLOCK,
    BlockStored,
    current,
    event_hash,
    logger,
)
from kvmask.vllm.rules import digests_of
from kvmask.vllm.schemes import ThreadPlans, check_digests, participates, thread_plans
from kvmask.vllm.seams import stock


class _Save:
    """One store job."""

    def __init__(self, thread: Any, meta: Any, token_len: int) -> None:
        self.thread = thread
        self.meta = meta
        self.token_len = token_len
        self.completed = False
        self.answered = False  # the store has answered a put
        self.tokens = meta.token_ids
        self.tokens_start = meta.token_ids_start

    def run(self, plans: ThreadPlans) -> None:
        thread, meta = self.thread, self.meta
        if not thread.is_live_store_job(meta):
            return
        if thread.enable_kv_event:
            self.recall_tokens()
        if thread._should_skip_request(meta.req_id):
            logger.debug("Mooncake store under pressure: request %s is not saved", meta.req_id)
            return
        if not thread._maybe_offload_boundary_states(meta) or self.token_len == 0:
            return
        try:
            plan = self.plan(plans)
        except KVMaskError:
            raise
        except Exception as e:  # the job has begun: it ends, and the next ones are vLLM's
            ACTING.trip("sending.handle_request", e)
            raise
        if plan is None or self.drive(plan):
            thread._record_saved(meta, self.token_len)
            self.completed = True
        if plan is not None and self.answered and thread.enable_kv_event:
            events = self.events(plan)
            if events:
                thread.update_kv_event(events)

    def recall_tokens(self) -> None:
        """Puts the tokens of a save that failed before the ones of this save."""
        earlier = self.thread._get_retry_token_ids(self.meta)
        if earlier is None or self.tokens is None:
            return
        start, tokens = earlier
        if start + len(tokens) == self.tokens_start:
            self.tokens = tokens + self.tokens
            self.tokens_start = start

    def plan(self, plans: ThreadPlans) -> SavePlan | None:
        """The plan for what is new since the last save; None without digests to name it."""
        thread, meta = self.thread, self.meta
        done = thread._saved_offset.get(meta.req_id, 0)
        masks = thread.coord.store_mask(
            self.token_len, done, num_prompt_tokens=getattr(meta, current().mask_length)
        )
        if not meta.block_hashes:
            return None
        hashes = digests_of(meta.block_hashes)
        check_digests(plans.scheme, self.token_len, hashes)
        return SavePlan(
            plans.scheme,
            hashes,
            meta.block_ids,
            self.token_len,
            start_token=done,
            event=meta.current_event,
            tools=plans.tools,
            masks=masks,
        )

    def drive(self, plan: SavePlan) -> bool:
        """Makes the plan's calls; whether all that was planned is in the store now."""
        while (call := plan.next_call()) is not None:
            if call.name == WAIT:
                plan.feed(call.run(None))
            elif call.name == EXISTS:
                plan.feed(self.exists(plan, call))
            elif not self.put(plan, call):
                return False
        return not plan.failures  # some, where the store did not answer

    def exists(self, plan: SavePlan, call: Call) -> Any:
        """What the store has of the planned keys."""
        record, n = self.thread._record_operation, len(call.args[0])
        start = time.perf_counter()
        try:
            answers = call.run(self.thread.store)
        except Exception as e:
            record("save_exists", start, n, status="error", num_failed_keys=n)
            plan.fail(e)
            raise
        record("save_exists", start, n)
        return answers

    def put(self, plan: SavePlan, call: Call) -> bool:
        """Writes the keys that the store lacks; whether it has them now."""
        thread, keys = self.thread, call.args[0]
        record, n = thread._record_operation, len(keys)
        logger.debug("Storing %d keys of request %s", n, self.meta.req_id)
        start = time.perf_counter()
        try:
            results = call.run(thread.store)
        except Exception as e:
            record(
                "save_put", start, n, num_bytes=call.num_bytes, status="error", num_failed_keys=n
            )
            logger.error(
                "The Mooncake store failed to put %d keys of request %s (first %r): %s",
                n,
                self.meta.req_id,
                keys[0],
                e,
            )
            with contextlib.suppress(type(e)):  # it raises what says that the call was wrong
                plan.fail(e.with_traceback(None))
            return False
        failures = plan.feed(results)
        self.answered = True
        record(
            "save_put",
            start,
            n,
            num_bytes=call.num_bytes,
            status="partial_failure" if failures else "ok",
            num_failed_keys=len(failures),
        )
        if failures:
            self.report(failures, n)
        elif thread._clear_store_pressure():
            logger.info("Mooncake store pressure is over: a batch was stored")
        return not failures

    def report(self, failures: Sequence[BlockFailure], n: int) -> None:
        codes = {f.code for f in failures}
        logger.warning(
            "Mooncake put failed for %d of %d keys of request %s (codes %s, first %s)",
            len(failures),
            n,
            self.meta.req_id,
            sorted(codes),
            [f.key for f in failures[:3]],
        )
        if NO_HANDLE in codes and not self.thread._mark_request_skipped_for_pressure(self.meta):
            logger.warning(
                "The Mooncake store has no room: request %s is not saved until a batch succeeds",
                self.meta.req_id,
            )

    def events(self, plan: SavePlan) -> list[Any]:
        """One event per block whose missing shards were all stored."""
        events = []
        hashes = self.meta.block_hashes
        tokens, low = self.tokens, self.tokens_start
        high = low + len(tokens or ())
        for group, blocks in plan.written:
            db = self.thread.token_databases[group]
            size, unit = db.block_size, db.hash_block_size
            for block in blocks:
                start, end = block * size, (block + 1) * size
                known = tokens is not None and low <= start and end <= high
                parent = event_hash(hashes[start // unit - 1]) if start else None
                events.append(
                    BlockStored(
                        block_hashes=[event_hash(hashes[end // unit - 1])],
                        parent_block_hash=parent,
                        token_ids=tokens[start - low : end - low] if known else [],
                        block_size=size,
                        lora_id=None,
                        medium="cpu",
                        lora_name=None,
                        group_idx=group,
                    )
                )
        return events


def handle_request(self: Any, req_meta: Any) -> None:
    """Store one request's new blocks; the job is reported however it ends."""
    with JOBS:
        _save(self, req_meta)


def _save(self: Any, req_meta: Any) -> None:
    if not ACTING.on:
        stock("sending.handle_request")(self, req_meta)
        return
    try:
        token_len = _token_len(self, req_meta)
        plans = None
        if token_len is not None:
            plans = thread_plans(
                self, SendingPolicy, self.coord.lcm_block_size, self.group_put_steps, NULL_BLOCK
            )
    except Exception as e:  # before the job is kvmask's to report
        stock("sending.handle_request")(self, req_meta)  # raises where the job is to blame
        ACTING.trip("sending.handle_request", e)
        return
    if token_len is None or plans is None:
        stock("sending.handle_request")(self, req_meta)
        return
    save = _Save(self, req_meta, token_len)
    try:
        save.run(plans)
    finally:
        try:
            if self.enable_kv_event and token_len:
                self._update_retry_token_ids(
                    req_meta, save.completed, save.tokens_start, save.tokens
                )
        finally:
            self.finish_store_job(req_meta)
            self.request_queue.task_done()


def _token_len(thread: Any, meta: Any) -> int | None:
    """Tokens of a save, in whole blocks of every group; None when stock must see to the job."""
    lcm = thread.coord.lcm_block_size
    token_len: int = meta.token_len_chunk // lcm * lcm
    for db, takes_part in zip(thread.token_databases, participates(thread), strict=True):
        if takes_part and token_len % db.block_size:
            return None
    return token_len
