"""The receiving thread's job: which blocks of a hit are read, and which of them may not be used.

Keys, order, rotation, staging batches and calls are vLLM's. Stricter than vLLM, without changing
what its engine keeps of a good load:

* A get that returns fewer bytes than planned has failed, zero included.
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

from kvmask._core import (
    Bitset,
    BlockHashes,
    build_keys,
    plan_blocks,
    short_positions,
    total_bytes,
)
from kvmask.errors import BlockIdError
from kvmask.vllm import releases
from kvmask.vllm.blocks import KeyNames, Part, check_digests, keys_of, thread_names
from kvmask.vllm.layouts import Rows
from kvmask.vllm.releases import logger
from kvmask.vllm.rules import digests_of
from kvmask.vllm.seams import stock


class _Load:
    """The keys of one load, in the order they are asked for."""

    def __init__(self, thread: Any, meta: Any) -> None:
        self.thread = thread
        self.meta = meta
        self.keys: list[str] = []
        self.addresses: Rows = []
        self.sizes: Rows = []
        self.ids: list[int] = []
        self.rotation = 0

    def plan(self, names: list[KeyNames | None]) -> None:
        thread, spec = self.thread, self.meta.load_spec
        token_len = spec.token_len
        skip = spec.vllm_cached_tokens // thread.block_size * thread.block_size
        masks = thread.coord.load_mask(self.meta.block_hashes, token_len)
        boundaries = {b.group_id: b.num_tokens for b in spec.tail_key_boundaries}
        hashes = digests_of(self.meta.block_hashes)
        if not len(hashes):
            return
        for g, builders in enumerate(names):
            if builders is not None:
                self.plan_group(g, builders, masks[g], token_len, skip, boundaries.get(g), hashes)

    def plan_group(
        self,
        g: int,
        builders: KeyNames,
        mask: Sequence[bool],
        token_len: int,
        skip: int,
        boundary: int | None,
        hashes: BlockHashes,
    ) -> None:
        db, table = self.thread.token_databases[g], self.meta.block_ids[g]
        size, unit = db.block_size, db.hash_block_size
        check_digests(token_len, unit, hashes)
        start, stop = -(-skip // size), -(-token_len // size)
        wanted = Bitset.from_bools(mask)[start:stop]
        planned, ids = plan_blocks(wanted, stop, start, table)
        if len(ids) != wanted.count():
            raise BlockIdError(
                f"`block_ids` must reach block {stop - 1} of group {g}, got {len(table)} entries"
            )
        if not ids:
            return
        part = Part(g, db, table, start, planned, ids, len(builders.shards))
        own_tail = token_len if boundary is None else boundary
        if own_tail == stop * size or start + len(planned) < stop or not planned[-1]:
            keys = keys_of(builders.shards, hashes, part)
        else:
            # The last block is cut by the hit, or stored under a later boundary's digest.
            scale, body = size // unit, planned[:-1]
            keys = build_keys(builders.shards, hashes, body, start, scale)
            keys += build_keys(builders.shards, [hashes[own_tail // unit - 1]])
        rows, spans, _ = part.descriptors(token_len)
        self.keys = self.keys + keys if self.keys else keys
        self.addresses = self.addresses + rows if self.addresses else rows
        self.sizes = self.sizes + spans if self.sizes else spans
        self.ids = self.ids + part.block_ids() if self.ids else part.block_ids()

    def rotate(self) -> None:
        """Ranks begin at different keys, to spread the load over the store."""
        at = self.rotation = self.thread.tp_rank % len(self.keys)
        if at:
            self.keys = self.keys[at:] + self.keys[:at]
            self.addresses = self.addresses[at:] + self.addresses[:at]
            self.sizes = self.sizes[at:] + self.sizes[:at]
            self.ids = self.ids[at:] + self.ids[:at]

    def rank(self, position: int) -> int:
        """Where a key stood before the rotation."""
        return (position + self.rotation) % len(self.keys)

    def batches(self) -> list[int] | None:
        """Ends of the batches of gets; None when one key alone is too much for the staging."""
        thread = self.thread
        usable = thread.usable_disk_offload_buffer_budget_bytes
        if usable is None:
            return [len(self.keys)]
        needs: dict[int, int] = {}
        total = 0
        for row in self.sizes:
            need = needs.get(id(row))
            if need is None:
                need = needs[id(row)] = releases.staging_bytes(row)
            total += need
        if total <= usable:
            return [len(self.keys)]
        raw = thread.disk_offload_buffer_budget_bytes
        split, oversized = releases.split_batches(
            self.keys, self.addresses, self.sizes, usable, raw
        )
        if oversized is not None:
            need = needs[id(self.sizes[self.keys.index(oversized)])]
            logger.warning(
                "Request %s is not loaded: key %s needs %d bytes of staging, the budget is %d",
                self.meta.req_id,
                oversized,
                need,
                raw,
            )
            return None
        ends, at = [], 0
        for keys, _, _ in split:
            at += len(keys)
            ends.append(at)
        return ends

    def run(self, ends: list[int]) -> None:
        """Reads batch after batch until one is refused, then reports what may not be used."""
        begin = 0
        refused: list[int] = []
        lacking: list[int] = []
        for end in ends:
            self.get(begin, end, refused, lacking)
            begin = end
            if refused:
                break
        lacking += range(begin, len(self.keys))
        if not refused and not lacking:
            return
        n = len(self.keys)
        first = min((self.rank(p) for p in refused), default=n)
        bad = refused + [p for p in lacking if self.rank(p) < first]
        self.thread._report_load_error(self.meta.req_id, [self.ids[p] for p in bad])

    def get(self, begin: int, end: int, refused: list[int], lacking: list[int]) -> None:
        """Reads one batch; adds the positions the store refused, and those it cut short."""
        thread, req_id = self.thread, self.meta.req_id
        whole = begin == 0 and end == len(self.keys)
        keys = self.keys if whole else self.keys[begin:end]
        addresses = self.addresses if whole else self.addresses[begin:end]
        sizes = self.sizes if whole else self.sizes[begin:end]
        num_bytes, n = total_bytes(sizes), len(keys)
        record = thread._record_operation
        start = time.perf_counter()
        try:
            tiers = None
            if envs.VLLM_MOONCAKE_STORE_TIER_LOG:
                tiers = releases.replica_tiers(thread.store, keys)
                start = time.perf_counter()
            results = thread.store.batch_get_into_multi_buffers(keys, addresses, sizes)
            if tiers is not None:
                releases.log_tiers(req_id, keys, results, tiers)
            failed = short_positions(results, sizes)
        except Exception as e:
            record("load_get", start, n, num_bytes=num_bytes, status="error", num_failed_keys=n)
            logger.warning("Mooncake get of %d keys (first %s) failed: %s", n, keys[:3], e)
            refused += range(begin, end)
            return
        record(
            "load_get",
            start,
            n,
            num_bytes=num_bytes,
            status="partial_failure" if failed else "ok",
            num_failed_keys=len(failed),
        )
        if failed:
            logger.warning(
                "Mooncake get failed for %d of %d keys of request %s (first %s)",
                len(failed),
                n,
                req_id,
                [(keys[i], results[i]) for i in failed[:3]],
            )
        for i in failed:
            (refused if results[i] < 0 else lacking).append(begin + i)


def _every_block(thread: Any, meta: Any) -> list[int]:
    """All blocks that a load may have been meant to fill."""
    skip = meta.load_spec.vllm_cached_tokens // thread.block_size * thread.block_size
    return [
        block
        for db, table in zip(thread.token_databases, meta.block_ids, strict=False)
        for block in table[-(-skip // db.block_size) :]
    ]


def handle_request(self: Any, req_meta: Any) -> None:
    """Load one request's hit; it is finished however the load ends."""
    names = thread_names(self)
    if names is None:
        stock("receiving.handle_request")(self, req_meta)
        return
    req_id = req_meta.req_id
    try:
        load = _Load(self, req_meta)
        load.plan(names)
        if load.keys:
            load.rotate()
            ends = load.batches()
            if ends is None:
                self._report_load_error(req_id, load.ids)
            else:
                load.run(ends)
    except Exception as e:
        logger.exception("Load of request %s failed: %s", req_id, e)
        self._report_load_error(req_id, _every_block(self, req_meta))
    self.set_finished_request(req_id)
    self.request_queue.task_done()
