"""A stock worker or transfer thread and kvmask's, made from one random case, over one script.

Everything a side does is written down: calls of the store with their arguments, operations that are
counted, what the threads keep and report. Two sides that behave alike have equal records.
"""

from __future__ import annotations

import copy
import functools
import inspect
import random
import threading
from collections.abc import Callable
from typing import Any

from vllm_cases import Case
from vllm_oracle import digest, engine, engine_spec, key_prefix

import kvmask.vllm
from kvmask.vllm import binding, connector, layouts

SIDES = ("stock", "kvmask")


class Script:
    """A store whose answer to a call depends only on the call's number and its keys.

    Args:
        seed: Of the answers.
        present: Keys that are there.
        trouble: How often a call or a key misbehaves.
        short: Whether answers may also end early or gets return too little (where kvmask is
            stricter than stock).
    """

    # -900 is not among them: it says that the store did not answer, which stock does not ask.
    CODES = (-200, -500, -704, -707, -1010)

    def __init__(self, seed: Any, present: set[str], trouble: float = 0.0, short: bool = False):
        self.seed = seed
        self.present = set(present)
        self.trouble = trouble
        self.short = short
        self.calls: list[Any] = []

    def _rng(self) -> random.Random:
        return random.Random(f"{self.seed}/{len(self.calls)}")

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        rng = self._rng()
        self.calls.append(("exist", list(keys)))
        if rng.random() < self.trouble:
            raise ConnectionError("the master is gone")
        answers = [int(k in self.present) for k in keys]
        if rng.random() < self.trouble:
            answers = [rng.choice((*self.CODES, 2, a, a)) for a in answers]
        if self.short and rng.random() < 0.5:
            del answers[rng.randrange(len(answers)) :]
        return answers

    def batch_put_from_multi_buffers(self, keys: Any, addresses: Any, sizes: Any, config: Any):
        rng = self._rng()
        groups = getattr(config, "group_ids", None)
        self.calls.append(
            (
                "put",
                list(keys),
                [list(r) for r in addresses],
                [*map(list, sizes)],
                list(groups) if groups is not None else None,
            )
        )
        if rng.random() < self.trouble:
            raise ConnectionError("the master is gone")
        results = [0] * len(keys)
        if rng.random() < self.trouble * 2:
            results = [rng.choice((0, 0, *self.CODES)) for _ in keys]
        if self.short and rng.random() < 0.5:
            del results[rng.randrange(len(results)) :]
        self.present.update(k for k, r in zip(keys, results, strict=False) if r == 0)
        return results

    def batch_get_into_multi_buffers(self, keys: Any, addresses: Any, sizes: Any) -> list[int]:
        rng = self._rng()
        self.calls.append(("get", list(keys), [list(r) for r in addresses], [*map(list, sizes)]))
        if rng.random() < self.trouble:
            raise ConnectionError("the master is gone")
        results = [sum(row) for row in sizes]
        if rng.random() < self.trouble * 2:
            results = [rng.choice((n, n, n, *self.CODES)) for n in results]
        if self.short:
            results = [rng.choice((n, n, n, 0, n - 1)) if n > 0 else n for n in results]
        return results


class Config:
    """Stands for Mooncake's ReplicateConfig."""

    group_ids: list[str] | None = None


def made(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """An object of the engine's, without the arguments that its release does not have."""
    known = inspect.signature(cls).parameters
    return cls(*args, **{name: value for name, value in kwargs.items() if name in known})


def request(*args: Any, **fields: Any) -> Any:
    """The engine's request of a transfer thread."""
    puts = fields.get("boundary_puts")
    older = {} if puts is None else {"boundary_state_offloads": [tuple(put) for put in puts]}
    return made(engine().data.ReqMeta, *args, **fields, **older)


def hand_over(group: int, block_id: int, num_tokens: int) -> Any:
    """A block that the scheduler hands over under a digest of its own choice."""
    kind = getattr(engine().data, "BoundaryPut", None)
    put = (group, block_id, num_tokens)
    return put if kind is None else kind(*put)


def key_names(db: Any) -> list[str]:
    """What stands before the digest in the keys of a database's blocks."""
    layout = getattr(db, "store_layout", None)
    if layout is None:
        return [db.key_for(b"")]
    return [layout.key_for(shard, b"") for shard in layout.local_shard_ids]


def group_specs(case: Case) -> list[Any]:
    return [
        engine().specs.KVCacheGroupSpec([f"l{i}"], engine_spec(g), is_eagle_group=g.eagle)
        for i, g in enumerate(case.groups)
    ]


def coordinator(case: Case, side: str, cls: Any = None) -> Any:
    if cls is None:
        stock = engine().coordinator.MooncakeStoreCoordinator
        cls = stock if side == "stock" else kvmask.vllm.MooncakeStoreCoordinator
    coord = made(
        cls,
        group_specs(case),
        scheduler_block_size=case.effective_alignment,
        hash_block_size=case.hash_block_size,
        retention_interval=case.retention,
        enable_partial_hash_hits=case.partial,
    )
    coord.enable_partial_hash_hits = case.partial  # to 0.31 it is told by the groups
    return coord


def databases(case: Case, regions: int) -> list[Any]:
    """Rank-local databases, a group's blocks in `regions` places."""
    made = []
    for i, g in enumerate(case.groups):
        db = engine().data.ChunkedTokenDatabase(
            engine().data.KeyMetadata("model", i % 2, 0, 0, 0, i),
            g.block_size,
            case.hash_block_size if g.prefix_cacheable else g.block_size,
        )
        db.set_kv_caches_base_addr([(i + 1) << 40 | r << 32 for r in range(regions)])
        db.set_block_len([4096 + 512 * (r % 3) for r in range(max(1, regions // 2))])
        made.append(db)
    return made


def shared_databases(block_size: int, token_major: bool, held: int) -> list[Any]:
    """One database of a layout that is shared between tensor-parallel sizes, `held` shards."""
    e, heads = engine(), 8
    cls = e.data.LBNHCStoreLayout if token_major else e.data.LBHNCStoreLayout
    local = heads // held
    layout = cls(
        e.data.KeyMetadata("model", 1, 0, 0, 0),
        block_size,
        block_size,
        local_tp_size=local,
        store_tp_size=heads,
        tp_rank=local - 1,
        num_kv_heads=heads,
    )
    shape = (64, held, block_size, 2)
    order = (held * block_size * 2, 2, held * 2, 1) if token_major else None
    tensor = shared_tensor(shape, order)
    layout.register_kv_caches([tensor], 64)
    metadata = e.data.KeyMetadata("model", 1, 0, 0, 0)
    return [e.data.ChunkedTokenDatabase(metadata, block_size, store_layout=layout)]


@functools.cache
def shared_tensor(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> Any:
    """One tensor for both sides, so that addresses can be compared."""
    torch = engine().torch
    if strides is None:
        return torch.empty(shape, dtype=torch.float16)
    return torch.empty_strided(shape, strides, dtype=torch.float16)


def own(thing: Any) -> Any:
    """Give stock objects kvmask's methods, as the connector does."""
    thing.__class__ = connector.classes()[type(thing).__name__]
    return thing


class Recorder(list[Any]):
    """Counted operations without their durations."""

    def __call__(self, operation: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("duration_seconds", None)
        if args:
            kwargs["num_keys"] = args[1]
        self.append((operation, kwargs))


def lookup_worker(case: Case, side: str, store: Any, strategy: str = "exact") -> Any:
    worker = object.__new__(engine().worker.MooncakeStoreWorker)
    worker._capacity_only = False
    worker.coord = coordinator(case, side)
    worker.hash_block_size = case.hash_block_size
    worker._kv_cache_groups = worker.coord.kv_cache_groups
    worker.record = Recorder()
    worker._record_kv_connector_operation = worker.record
    worker._lookup_key_prefixes = tuple(
        tuple(key_prefix(g, r) for r in range(n)) for g, n in enumerate(case.ranks)
    )
    worker.token_dbs = databases(case, 1)
    worker.store = store
    if side == "kvmask":
        own(worker)
        binding.state(worker)["strategy"] = strategy
    return worker


def present_keys(case: Case) -> set[str]:
    """Keys of all ranks of what is present, and of the first rank of some more."""
    keys = set()
    for g, units in enumerate(case.present):
        if not case.groups[g].prefix_cacheable:
            continue
        for i, there in enumerate(units):
            h = digest((i + 1) * case.per_block(g) - 1).hex()
            ranks = case.ranks[g] if there else i % 2
            keys.update(f"{key_prefix(g, r)}@{h}" for r in range(ranks))
    return keys


def sending(case: Case, side: str, dbs: list[Any], store: Any, coord: Any, **options: Any) -> Any:
    thread = made(
        engine().worker.KVCacheStoreSendingThread,
        store=store,
        coord=coord,
        token_databases=dbs,
        block_size=case.effective_alignment,
        kv_role="kv_both",
        ready_event=threading.Event(),
        replicate_config=Config(),
        record_operation=Recorder(),
        group_participates=[g.prefix_cacheable for g in case.groups],
        **options,
    )
    return adopt(thread, side)


def receiving(case: Case, side: str, dbs: list[Any], store: Any, coord: Any, **options: Any) -> Any:
    thread = made(
        engine().worker.KVCacheStoreRecvingThread,
        store=store,
        coord=coord,
        token_databases=dbs,
        block_size=case.effective_alignment,
        ready_event=threading.Event(),
        record_operation=Recorder(),
        group_participates=[g.prefix_cacheable for g in case.groups],
        **options,
    )
    return adopt(thread, side)


def adopt(thread: Any, side: str) -> Any:
    if side == "kvmask":
        own(thread)
        for db in thread.token_databases:
            layouts.adopt_addresses(db)
    return thread


def run_job(thread: Any, meta: Any) -> str | None:
    """Hand a store job over as the worker does; the type of what it raised."""
    thread.add_request(meta)
    return outcome(lambda: thread._handle_request(thread.request_queue.get()))


def outcome(action: Callable[[], Any]) -> str | None:
    try:
        action()
    except Exception as e:
        return "AssertionError" if isinstance(e, AssertionError) else type(e).__name__
    return None


def save_state(thread: Any) -> Any:
    """All that a sending thread keeps and reports."""
    return copy.deepcopy(
        (
            thread._saved_offset,
            thread._retry_token_ids,
            thread.stored_requests,
            thread._skip_store_requests,
            thread._store_pressure_active,
            thread.take_completed_saves(),
            [vars_of(e) for e in thread.get_kv_events()],
            list(thread._record_operation_cb),
            thread.request_queue.unfinished_tasks,
        )
    )


def vars_of(event: Any) -> Any:
    return {name: getattr(event, name) for name in event.__struct_fields__}
