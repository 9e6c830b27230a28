"""The sending thread's job: which blocks of a request go to the store, and what became of them.

The steps are vLLM's, in its order and with the same calls to the store and to the thread's own
ledger; what is different is how keys, block ids and addresses are made. Two answers that vLLM reads
as "nothing to do" are read as failures here: an existence answer that ends early, and put results
that do.
"""

from __future__ import annotations

import time
from typing import Any

from kvmask._core import failed_positions, missing_positions, plan_blocks
from kvmask.vllm.blocks import KeyNames, Part, check_digests, keys_of, thread_names
from kvmask.vllm.layouts import Rows
from kvmask.vllm.releases import NO_HANDLE, NULL_BLOCK, BlockStored, event_hash, logger
from kvmask.vllm.rules import digests_of
from kvmask.vllm.seams import stock


class _Save:
    """One store job."""

    def __init__(self, thread: Any, meta: Any, token_len: int) -> None:
        self.thread = thread
        self.meta = meta
        self.token_len = token_len
        self.completed = False
        self.tokens = meta.token_ids
        self.tokens_start = meta.token_ids_start
        self.keys: list[str] = []
        self.lifecycles: list[str] | None = None
        self.parts: list[Part] = []

    def run(self, names: list[KeyNames | None]) -> None:
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
        self.plan(names)
        if self.keys:
            self.drop_present()
        if not self.keys:
            self.mark_saved()
            return
        results = self.put()
        if thread.enable_kv_event and results is not None:
            events = self.events(results)
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

    def plan(self, names: list[KeyNames | None]) -> None:
        """Keys of the blocks that are worth storing, have a table entry and are this rank's."""
        thread, meta = self.thread, self.meta
        done = thread._saved_offset.get(meta.req_id, 0)
        masks = thread.coord.store_mask(
            self.token_len, done, num_prompt_tokens=meta.prefill_end_tokens
        )
        if not meta.block_hashes:
            return
        hashes = digests_of(meta.block_hashes)
        wants_groups = thread.enable_group_semantics and thread.supports_group_ids
        lifecycles: list[str] = []
        for g, db in enumerate(thread.token_databases):
            builders = names[g]
            if builders is None:
                continue
            check_digests(self.token_len, db.hash_block_size, hashes)
            step = thread.group_put_steps[g]
            start = -(-done // db.block_size)
            planned, ids = plan_blocks(
                masks[g],
                self.token_len // db.block_size,
                start,
                meta.block_ids[g],
                step,
                (thread.tp_rank + g) % step,
                NULL_BLOCK,
            )
            if not ids:
                continue
            width = len(builders.shards)
            part = Part(g, db, meta.block_ids[g], start, planned, ids, width)
            keys = keys_of(builders.shards, hashes, part)
            self.keys = self.keys + keys if self.keys else keys
            self.parts.append(part)
            if wants_groups:
                lifecycles += keys_of((builders.lifecycle,) * width, hashes, part)
        if wants_groups:
            self.lifecycles = lifecycles

    def drop_present(self) -> None:
        """Asks the store which keys it has and keeps the others."""
        start = time.perf_counter()
        record = self.thread._record_operation
        n = len(self.keys)
        try:
            answers = self.thread.store.batch_is_exist(self.keys)
        except Exception:
            record("save_exists", start, n, status="error", num_failed_keys=n)
            raise
        record("save_exists", start, n)
        missing = missing_positions(answers, n)
        if missing is None:
            return
        self.keys = [self.keys[i] for i in missing]
        if self.lifecycles is not None:
            self.lifecycles = [self.lifecycles[i] for i in missing]
        left, first, at = [], 0, 0
        for part in self.parts:
            stop, begin = first + len(part), at
            while at < len(missing) and missing[at] < stop:
                at += 1
            if at - begin == len(part):
                left.append(part)
            elif at > begin:
                left.append(part.only([i - first for i in missing[begin:at]]))
            first = stop
        self.parts = left

    def put(self) -> list[int] | None:
        """Writes the keys; returns the results, None when the store raised."""
        thread, meta = self.thread, self.meta
        addresses: Rows = []
        sizes: Rows = []
        num_bytes = 0
        for part in self.parts:
            rows, spans, size = part.descriptors(self.token_len)
            addresses = addresses + rows if addresses else rows
            sizes = sizes + spans if sizes else spans
            num_bytes += size
        logger.debug("Storing %d keys of request %s", len(self.keys), meta.req_id)
        if meta.current_event is not None:
            meta.current_event.synchronize()
        if self.lifecycles is not None:
            thread.replicate_config.group_ids = self.lifecycles
        record, n = thread._record_operation, len(self.keys)
        start = time.perf_counter()
        try:
            results = thread.store.batch_put_from_multi_buffers(
                self.keys, addresses, sizes, thread.replicate_config
            )
        except Exception as e:
            record("save_put", start, n, num_bytes=num_bytes, status="error", num_failed_keys=n)
            logger.error(
                "The Mooncake store failed to put %d keys of request %s (first %s): %s",
                n,
                meta.req_id,
                self.keys[0],
                e,
            )
            return None
        # Keys without a result are not known to be stored.
        results = list(results)
        failed = failed_positions(results, n)
        record(
            "save_put",
            start,
            n,
            num_bytes=num_bytes,
            status="partial_failure" if failed else "ok",
            num_failed_keys=len(failed),
        )
        if failed:
            self.report(results, failed)
        else:
            self.mark_saved()
            if thread._clear_store_pressure():
                logger.info("Mooncake store pressure is over: a batch was stored")
        return results

    def report(self, results: list[int], failed: list[int]) -> None:
        codes = {results[i] for i in failed if i < len(results)}
        logger.warning(
            "Mooncake put failed for %d of %d keys of request %s (codes %s, first %s)",
            len(failed),
            len(self.keys),
            self.meta.req_id,
            sorted(codes),
            [self.keys[i] for i in failed[:3]],
        )
        if NO_HANDLE in codes and not self.thread._mark_request_skipped_for_pressure(self.meta):
            logger.warning(
                "The Mooncake store has no room: request %s is not saved until a batch succeeds",
                self.meta.req_id,
            )

    def mark_saved(self) -> None:
        self.thread._record_saved(self.meta, self.token_len)
        self.completed = True

    def events(self, results: list[int]) -> list[Any]:
        """One event per block whose missing shards were all stored."""
        events, first = [], 0
        hashes = self.meta.block_hashes
        tokens, low = self.tokens, self.tokens_start
        high = low + len(tokens or ())
        for part in self.parts:
            db = part.db
            size, unit = db.block_size, db.hash_block_size
            stored: dict[int, bool] = {}
            for i, block in enumerate(part.blocks(), first):
                good = i < len(results) and results[i] >= 0
                stored[block] = stored.get(block, True) and good
            first += len(part)
            for block, good in stored.items():
                if not good:
                    continue
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
                        group_idx=part.group,
                    )
                )
        return events


def handle_request(self: Any, req_meta: Any) -> None:
    """Store one request's new blocks; the job is reported however it ends."""
    token_len = _token_len(self, req_meta)
    names = None if token_len is None else thread_names(self)
    if token_len is None or names is None:
        stock("sending.handle_request")(self, req_meta)
        return
    save = _Save(self, req_meta, token_len)
    try:
        save.run(names)
    finally:
        if self.enable_kv_event and token_len:
            self._update_retry_token_ids(req_meta, save.completed, save.tokens_start, save.tokens)
        self.finish_store_job(req_meta)
        self.request_queue.task_done()


def _token_len(thread: Any, meta: Any) -> int | None:
    """Tokens of a save, in whole blocks of every group; None when stock must see to the job."""
    try:
        lcm = thread.coord.lcm_block_size
        token_len: int = meta.token_len_chunk // lcm * lcm
    except (AttributeError, TypeError):
        return None  # stock's job fails on it and reports itself
    for db, takes_part in zip(thread.token_databases, thread.group_participates, strict=True):
        if takes_part and token_len % db.block_size:
            return None
    return token_len
