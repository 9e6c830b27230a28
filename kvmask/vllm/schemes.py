"""Schemes of a worker and of its transfer threads, made of vLLM's objects.

A scheme is kept as long as what it was made of is what it was, and is made anew otherwise. Masks
are not part of it: they come with each request from the coordinator, be it vLLM's or kvmask's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvmask._core import BlockHashes, KeyBuilder, same_attributes
from kvmask.coordinator import Hit
from kvmask.errors import AlignmentError
from kvmask.plans import GroupScheme, PlanTools, Scheme, StorePolicy
from kvmask.vllm.binding import seen, state
from kvmask.vllm.layouts import Tables, tables_of
from kvmask.vllm.outages import ThreadTools, breaker_of
from kvmask.vllm.releases import StockDatabase, group_id_of


@dataclass(frozen=True, slots=True)
class Lengths:
    """What plans ask of a coordinator when the masks come with each request.

    A save ends with whole blocks of every group: vLLM hands over by itself what lies past them. A
    load may end at any hash block.

    Attributes:
        hash_block_size: Tokens per digest.
        alignment: What saves are multiples of.
        partial_hits: Whether this is for loads.
    """

    hash_block_size: int
    alignment: int
    partial_hits: bool

    @property
    def hit_alignment(self) -> int:
        """What loads are multiples of."""
        return self.hash_block_size

    def align(self, num_tokens: int) -> int:
        """Round a token count down."""
        return num_tokens // self.alignment * self.alignment

    def find_hit(self, present: Any, max_length: int, eagle: bool) -> Hit:
        """No hit: vLLM itself decides what it uses of a load that failed in part."""
        return Hit(0, (), ())


class GroupIO(NamedTuple):
    """Keys and addresses of one token database's blocks.

    Attributes:
        tables: Region tables of its store layout.
        own: One key builder per shard that this rank moves.
        eviction: Builds the group id that all shards of a block share.
    """

    tables: Tables
    own: tuple[KeyBuilder, ...]
    eviction: KeyBuilder


def group_io(db: Any) -> GroupIO | None:
    """Keys and addresses of a database; None when it names or places blocks in its own way."""
    layout = getattr(db, "store_layout", db)
    plain = getattr(type(db), "process_tokens", None) is StockDatabase.process_tokens
    if not plain or "process_tokens" in db.__dict__ or "key_for" in layout.__dict__:
        return None
    tables, prefixes = tables_of(layout), _prefixes(db, layout)
    named = all(p.endswith("@") for p in prefixes)
    if tables is None or not named or len(tables.regions) != len(prefixes):
        return None
    return GroupIO(tables, tuple(KeyBuilder(p) for p in prefixes), _eviction(db, prefixes))


# What a scheme is made of, as far as it can change. Releases differ in what they have of it.
_OF_THREAD = ("token_databases", "tp_rank", "group_participates")
_OF_DATABASE = ("store_layout", "process_tokens")
_OF_LAYOUT = (
    "prepare_values",
    "key_for",
    "kv_caches_base_addr",
    "block_len",
    "_shard_addr_bases",
    "_shard_block_strides",
    "_shard_sizes",
)


def _seen(thread: Any) -> list[tuple[Any, str, Any]]:
    """All that a thread's scheme is made of."""
    found = seen(thread, *_OF_THREAD)
    for db in thread.token_databases:
        found += seen(db, *_OF_DATABASE) + seen(getattr(db, "store_layout", db), *_OF_LAYOUT)
    return found


def _prefixes(db: Any, layout: Any) -> list[str]:
    """What stands before the digest in the keys of the shards that a rank moves."""
    if layout is db:
        return [db.key_for(b"")]
    return [layout.key_for(shard, b"") for shard in layout.local_shard_ids]


def _eviction(db: Any, prefixes: Sequence[str]) -> KeyBuilder:
    """Builds group ids. 0.27 has none, and never asks for one."""
    return KeyBuilder(prefixes[0] if group_id_of is None else group_id_of(db.metadata, ""))


class ThreadPlans(NamedTuple):
    """What every plan of a transfer thread is made with."""

    scheme: Scheme
    tools: PlanTools


def thread_plans(
    thread: Any,
    policy: type[StorePolicy],
    alignment: int | None = None,
    steps: Sequence[int] | None = None,
    null_block: int | None = None,
) -> ThreadPlans | None:
    """Scheme and tools of a transfer thread; None leaves its requests to stock.

    Args:
        thread: The thread.
        policy: Its policy, made from the thread.
        alignment: Tokens that a save is a multiple of; None: loads, which end at hash blocks.
        steps: Per group, how many ranks share the writing.
        null_block: The block that is never transferred.
    """
    stamp = alignment, steps
    kept = state(thread).get("plans")
    if kept is not None and kept[0] == stamp and same_attributes(kept[1]):
        plans: ThreadPlans | None = kept[2]
        return plans
    attributes = _seen(thread)
    scheme = _thread_scheme(thread, alignment, steps)
    plans = None
    if scheme is not None:
        tools = ThreadTools(
            policy(thread),  # type: ignore[call-arg]
            null_block=null_block,
            breaker=breaker_of(thread.store),
            stats=False,
            log=None,
        )
        plans = ThreadPlans(scheme, tools)
    steps = None if steps is None else list(steps)
    state(thread)["plans"] = ((alignment, steps), attributes, plans)
    return plans


def participates(thread: Any) -> Sequence[bool]:
    """Which groups a transfer thread moves; to 0.29 all of them."""
    told: Sequence[bool] | None = getattr(thread, "group_participates", None)
    return [True] * len(thread.token_databases) if told is None else told


def _thread_scheme(
    thread: Any, alignment: int | None, steps: Sequence[int] | None
) -> Scheme | None:
    databases, rank = thread.token_databases, thread.tp_rank
    per_group: list[GroupIO | None] = []
    for db, takes_part in zip(databases, participates(thread), strict=True):
        io = group_io(db) if takes_part else None
        if takes_part and io is None:
            return None
        per_group.append(io)
    units = {
        db.hash_block_size for db, p in zip(databases, per_group, strict=True) if p is not None
    }
    if len(units) > 1:
        return None
    unit = units.pop() if units else 1
    loads = alignment is None
    groups = []
    for g, (db, io) in enumerate(zip(databases, per_group, strict=True)):
        step = 1 if steps is None else steps[g]
        groups.append(
            GroupScheme(
                g,
                str(g),
                # The masks say which blocks are worth moving. Here it only matters that a load
                # leaves out all that lies below what the GPU holds, and that a save takes no empty
                # entry for a hole.
                "full" if loads else "window",
                db.block_size,
                cacheable=io is not None,
                own=() if io is None else io.own,
                layouts=() if io is None else tuple(io.tables.regions),
                writers=step,
                # The phase turns with the group, which spreads the load over the ranks.
                turn=(rank + g) % step,
                eviction=None if io is None else io.eviction,
            )
        )
    lengths: Any = Lengths(unit, alignment or unit, partial_hits=loads)
    return Scheme(lengths, tuple(groups), bound=True, rank=rank)


def check_digests(scheme: Scheme, num_tokens: int, hashes: BlockHashes) -> None:
    """Refuse a length that its digests do not name.

    Raises:
        AlignmentError: It is no whole number of hash blocks, or there are too few digests.
    """
    unit = scheme.coord.hash_block_size
    if num_tokens % unit or num_tokens // unit > len(hashes):
        raise AlignmentError(
            "`num_tokens` must be covered by whole hash blocks, "
            f"got {num_tokens} tokens and {len(hashes)} digests of {unit}"
        )
