"""Ask a store for every key that can decide a hit, and say what came back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from kvmask._core import Bitset, build_keys, read_answers
from kvmask.checks import check_function
from kvmask.contract import Contract
from kvmask.coordinator import Coordinator
from kvmask.errors import StoreError
from kvmask.mooncake.policy import MooncakePolicy
from kvmask.plans.breaker import no_answer
from kvmask.plans.calls import EXISTS, Existence
from kvmask.plans.lookup import LookupPlan, Strategy
from kvmask.plans.policy import StorePolicy
from kvmask.ranks import Namespace, RankGrid
from kvmask.request import CacheRequest
from kvmask.why.reasons import Evidence, explain
from kvmask.why.report import Diagnosis, GroupView, Shard

#: Keys of one call. Small enough to show progress, large enough that calls do not count.
BATCH = 8192
Progress = Callable[[int, int], None]


def check_questions(store: Any, policy: Any, progress: Any) -> None:
    """Refuse what is no store, no policy or no function.

    Raises:
        TypeError: One of them is of another kind.
    """
    if not callable(getattr(store, EXISTS, None)):
        raise TypeError(f"`store` must have `{EXISTS}`, got {type(store).__name__}")
    if not isinstance(policy, StorePolicy | None):
        raise TypeError(f"`policy` must be a StorePolicy or None, got {type(policy).__name__}")
    if progress is not None:
        check_function(progress, "progress")


def ask_keys(
    store: Existence, keys: Sequence[str], policy: StorePolicy, progress: Progress | None = None
) -> list[int]:
    """The store's answers to keys, in calls of at most `BATCH` keys.

    Args:
        store: The store.
        keys: The keys.
        policy: Tells codes of a store that does not answer.
        progress: Called with the keys that are answered, and with all, after each call.

    Raises:
        StoreError: The store does not answer.
    """
    answers: list[int] = []
    for start in range(0, len(keys), BATCH):
        part = list(keys[start : start + BATCH])
        try:
            given = store.batch_is_exist(part)
        except Exception as error:
            raise StoreError(
                f"the store must answer which of {len(part)} keys it has, got {error!r}"
            ) from error
        codes = read_answers(given, len(part))
        if policy.outage(codes):
            raise no_answer(codes)
        answers += codes
        if progress is not None:
            progress(len(answers), len(keys))
    return answers


def diagnose(
    request: CacheRequest,
    store: Existence,
    *,
    policy: StorePolicy | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Ask a store for all keys that can decide the hit of a request, and explain the hit.

    Asking for a key that is there renews its lease, as a lookup does. Nothing else is changed.

    Args:
        request: The request, made from token ids or from digests.
        store: Any object with ``batch_is_exist``.
        policy: What the store's codes mean; Mooncake's by default.
        progress: Called after each call, with the number of keys that are answered and of all.

    Returns:
        The hit that a lookup would find, what it rests on, and why it is not longer.

    Raises:
        StoreError: The store does not answer.
        TypeError: An argument is of another kind.

    >>> from kvmask import Contract, FullAttention, StrictKeys
    >>> request = Contract([FullAttention(16)], 16, StrictKeys("m")).request(range(33))
    >>> class Empty:
    ...     def batch_is_exist(self, keys): return [0] * len(keys)
    >>> diagnose(request, Empty()).length
    0
    """
    check_questions(store, policy, progress)
    if not isinstance(request, CacheRequest):
        raise TypeError(
            "`request` must be a CacheRequest, which `contract.request` makes, "
            f"got {type(request).__name__}"
        )
    agreed: Any = request.contract
    contract: Contract = getattr(agreed, "contract", agreed)  # also where it is bound to memory
    policy = MooncakePolicy() if policy is None else policy
    keys, spans = _keys(contract, request)
    answers = ask_keys(store, keys, policy, progress)
    units, shards = _presence(contract, answers, spans)
    known = dict(zip(keys, answers, strict=True))
    hit = _replayed(contract, request, known, "exact").result
    staged = _replayed(contract, request, known, "staged")
    length = hit.length
    evidence = Evidence(
        contract.coordinator,
        contract.names,
        request.num_tokens,
        tuple(needed for needed, _ in spans),
        tuple(units),
    )
    views = tuple(
        _view(contract, index, spans[index][0], units[index], hit.masks[index], shards[index])
        for index in range(len(contract.groups))
    )
    longest, reasons = explain(evidence, length, views)
    return Diagnosis(
        num_tokens=request.num_tokens,
        length=length,
        longest=longest,
        groups=views,
        reasons=reasons,
        exact_keys=len(keys),
        staged_keys=staged.asked,
        staged_calls=staged.probes,
        present_keys=answers.count(1),
        unknown_keys=sum(code < 0 for code in answers),
    )


def _keys(contract: Contract, request: CacheRequest) -> tuple[list[str], list[tuple[Bitset, int]]]:
    """The keys of an ``exact`` lookup; per group the digests that name them, as bits over its
    blocks (with partial hits: over hash blocks), and the number of its keys."""
    coord = contract.coordinator
    hashes = request.hashes
    length = coord.align(request.num_tokens)
    masks = coord.lookup_mask(length) if length else (None,) * len(contract.groups)
    keys: list[str] = []
    spans: list[tuple[Bitset, int]] = []
    for group, mask, builders in zip(
        contract.groups, masks, contract.scheme.namespaces, strict=True
    ):
        unit = unit_tokens(coord, group.block_size)
        if not group.prefix_cacheable:
            spans.append((Bitset.zeros(0), 0))
            continue
        scale = unit // coord.hash_block_size
        count = min(len(hashes) // scale, length // unit)
        bits = Bitset.ones(count) if coord.partial_hits or mask is None else mask[:count]
        made = build_keys(builders, hashes, bits, 0, scale)
        keys += made
        spans.append((bits, len(made)))
    return keys, spans


def unit_tokens(coord: Coordinator, block_size: int) -> int:
    """Tokens of one digest that names a block of a group."""
    return coord.hash_block_size if coord.partial_hits else block_size


def _presence(
    contract: Contract, answers: Sequence[int], spans: Sequence[tuple[Bitset, int]]
) -> tuple[list[Bitset], list[tuple[Bitset, ...]]]:
    """Per group what all namespaces have, and what each has."""
    units: list[Bitset] = []
    shards: list[tuple[Bitset, ...]] = []
    at = 0
    for (needed, count), builders in zip(spans, contract.scheme.namespaces, strict=True):
        given = answers[at : at + count]
        at += count
        width, size = len(builders), len(needed)
        positions = needed.indices()
        row = tuple(
            Bitset.from_indices(
                size,
                [p for p, a in zip(positions, given[j::width], strict=True) if a == 1],
            )
            for j in range(width)
        )
        joint = needed
        for bits in row:
            joint = joint & bits
        units.append(joint)
        shards.append(row)
    return units, shards


def _replayed(
    contract: Contract, request: CacheRequest, known: dict[str, int], strategy: Strategy
) -> LookupPlan:
    """A lookup whose answers are those that the store gave already."""
    plan = LookupPlan(contract, request.hashes, request.num_tokens, strategy=strategy)
    while (call := plan.next_call()) is not None:
        # A key without a usable answer counts as not there, as in a lookup of its own.
        plan.feed([int(known[key] == 1) for key in call.args[0]])
    return plan


def _view(
    contract: Contract,
    index: int,
    needed: Bitset,
    present: Bitset,
    rests: Bitset,
    shards: Sequence[Bitset],
) -> GroupView:
    coord, group = contract.coordinator, contract.groups[index]
    scale = max(1, group.block_size // coord.hash_block_size) if coord.partial_hits else 1
    count = max(len(needed) // scale, len(rests))
    inside = 0
    if scale > 1 and len(needed):
        inside = present.count() - present[scale - 1 :: scale].count()
    namespaces = contract._filled[index].ranks.namespaces()
    row = (
        [
            Shard(
                namespace,
                part,
                namespace_name(namespace, part, contract.ranks, len(contract.keys[index])),
                _blocks(bits, scale, count),
            )
            for (namespace, part), bits in zip(
                product(namespaces, range(len(contract.keys[index]))), shards, strict=True
            )
        ]
        if shards
        else []
    )
    return GroupView(
        index=index,
        name=contract.names[index],
        group=group,
        needed=_blocks(needed, scale, count),
        present=_blocks(present, scale, count),
        rests=_padded(rests, count),
        shards=tuple(row),
        inside=inside,
    )


def _blocks(bits: Bitset, scale: int, count: int) -> Bitset:
    """Bits over whole blocks, from bits over the digests that can name them."""
    return _padded(bits if scale == 1 else bits[scale - 1 :: scale], count)


def _padded(bits: Bitset, count: int) -> Bitset:
    return bits if len(bits) == count else Bitset.from_indices(count, bits.indices())


def namespace_name(namespace: Namespace, part: int, grid: RankGrid, parts: int) -> str:
    """The ranks of a namespace in words, as far as there are several."""
    words = []
    for name, value, size in (
        ("tensor shard", namespace.tensor, max(grid.tp_size, grid.store_tp_size or 1)),
        ("context rank", namespace.context, grid.dcp_size),
        ("prefill rank", namespace.prefill, grid.pcp_size),
        ("pipeline stage", namespace.stage, grid.pp_size),
        ("object", part, parts),
    ):
        if size > 1:
            words.append(f"{name} {value}")
    return ", ".join(words)


def ask_all(
    plan: LookupPlan, store: Existence, policy: StorePolicy, most: int
) -> tuple[list[int], bool]:
    """Drive a lookup until it is decided or would ask for more than ``most`` keys.

    Returns:
        (the store's answers, whether the lookup is decided).

    Raises:
        StoreError: The store does not answer.
    """
    answers: list[int] = []
    while (call := plan.next_call()) is not None:
        if len(answers) + len(call.args[0]) > most:
            return answers, False
        given = ask_keys(store, call.args[0], policy)
        plan.feed(given)
        answers += given
    return answers, True
