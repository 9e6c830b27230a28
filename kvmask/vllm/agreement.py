"""The contract of a vLLM worker, written to a file for routers, `kvmask why` and other engines.

It is made of what the worker itself uses: the coordinator's groups, the parts of its keys, its
ranks. Before it is written, the keys that it gives are compared with the worker's own, so a file
that is there can be relied on.

vLLM derives the start of its hashes from ``PYTHONHASHSEED``, or, for SHA-256, from a fixed text.
The seed is written only where it is set; then the file is its owner's to read alone. The `xxhash`
algorithms without it start from random bytes, which no other process can know: the contract then
takes digests, and no token ids.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvmask.contract import Contract
from kvmask.errors import ArgumentError, HashInputError, KVMaskError
from kvmask.groups import KINDS, FullAttention, Group
from kvmask.hashing.settings import Hashing
from kvmask.keys.vllm import VllmKeys
from kvmask.ranks import RankGrid
from kvmask.vllm.releases import current, logger
from kvmask.vllm.rules import kind_of, partial_hits, unwrap

SEED_ENV = "PYTHONHASHSEED"


def check_option(path: Any) -> str | None:
    """Refuse what is no path of a file that can be written.

    Args:
        path: The entry ``"contract"`` of the connector's extra config; None: it is not there.
    """
    if path is None:
        return None
    if not isinstance(path, str) or not path:
        raise ArgumentError(f"`contract` must be the path of a file, got {path!r}")
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise ArgumentError(f"`contract` must be in a folder that exists, got {path!r}")
    return path


def groups_of(coord: Any) -> list[Group]:
    """The groups of a coordinator, as vLLM has merged and flagged them.

    Raises:
        ArgumentError: One of them is of a kind that kvmask has no rule for.
    """
    found: list[Group | None] = [None] * len(coord.kv_cache_groups)
    seen: dict[tuple[str, int, int], int] = {}
    for number, (spec, indices, manager, eagle) in enumerate(coord.attention_groups):
        kind = kind_of(spec, manager)
        if kind is None:
            raise ArgumentError(
                "`groups` must be of kinds that kvmask knows to be written as a contract, "
                f"got {type(spec).__name__}"
            )
        fields: dict[str, Any] = {"block_size": spec.block_size, "eagle": bool(eagle)}
        if kind == "window":
            fields["window"] = spec.sliding_window
        elif kind == "chunked":
            fields["chunk_size"] = spec.attention_chunk_size
        rules = (kind, spec.block_size, fields.get("window", fields.get("chunk_size", 0)))
        # Sets of one rule and other tensors are searched apart.
        first = seen.setdefault(rules, number)
        fields["spec"] = None if first == number else number
        group = KINDS[kind](**fields)
        for index in indices:
            found[index] = group
    return [
        FullAttention(unwrap(group.kv_cache_spec).block_size, prefix_cacheable=False)
        if made is None
        else made
        for made, group in zip(found, coord.kv_cache_groups, strict=True)
    ]


def ranks_of(worker: Any) -> RankGrid:
    """The ranks of a worker's engine, and which of them hold equal bytes."""
    store_tp_size = getattr(worker, "store_tp_size", None)
    shared: dict[str, Any] = {"kv_heads": worker.num_kv_head}
    factors = getattr(worker, "_group_tp_replication_factors", None)
    if store_tp_size is None and factors is not None and worker.dcp_size == 1:
        shared = {"replication": tuple(factors)}
    return RankGrid(
        tp_size=worker.tp_size,
        pp_size=worker.pp_size,
        dcp_size=worker.dcp_size,
        pcp_size=worker.pcp_size,
        store_tp_size=store_tp_size,
        **shared,
    )


def hashing_of(algorithm: str, release: str) -> Hashing | None:
    """What the engine hashes with; None, and logged, where no other process can know its start."""
    try:
        return Hashing(algorithm, seed=os.environ.get(SEED_ENV), release=release)
    except HashInputError:
        logger.warning(
            "kvmask: the contract takes digests alone: %s starts from random bytes unless %s is "
            "set",
            algorithm,
            SEED_ENV,
        )
        return None


def contract_of(worker: Any, vllm_config: Any) -> Contract:
    """The contract of a worker.

    Args:
        worker: A MooncakeStoreWorker.
        vllm_config: vLLM's configuration.

    Raises:
        ArgumentError: kvmask has no rule for a group, or would make other keys than the worker.
    """
    release, coord = current(), worker.coord
    metadata = worker.token_dbs[0].metadata
    contract = Contract(
        groups_of(coord),
        worker.hash_block_size,
        VllmKeys(
            metadata.model_name,
            cache_prefix=metadata.cache_prefix,
            namespace=getattr(metadata, "store_namespace", ""),
            release=release.name,
        ),
        hashing_of(vllm_config.cache_config.prefix_caching_hash_algo, release.name),
        alignment=coord.lcm_block_size,
        retention_interval=coord.retention_interval,
        partial_hits=partial_hits(coord),
        states="table" if release.stores_states else "handoff",
        ranks=ranks_of(worker),
    )
    mine = [[builder.prefix for builder in row] for row in contract.scheme.namespaces]
    theirs = [
        [f"{prefix}@" for prefix in row] if group.prefix_cacheable else []
        for row, group in zip(worker._lookup_key_prefixes, contract.groups, strict=True)
    ]
    for index, (own, right) in enumerate(zip(mine, theirs, strict=True)):
        if own != right:
            raise ArgumentError(
                f"`keys` of group {index} must be those of the worker to be written as a contract, "
                f"got {own[:2]} of {len(own)} and {right[:2]} of {len(right)}"
            )
    return contract


def write(worker: Any, vllm_config: Any, path: str | None) -> None:
    """Write the contract of the worker of rank 0. What cannot be written is logged."""
    if path is None or worker is None or vllm_config.parallel_config.rank != 0:
        return
    if worker._capacity_only:
        logger.warning("kvmask: no contract is written to %s: this worker only gives memory", path)
        return
    try:
        contract = contract_of(worker, vllm_config)
        seeded = SEED_ENV in os.environ and contract.hashing is not None
        contract.write(path, with_seed=seeded)
    except (KVMaskError, TypeError, OSError, AttributeError) as error:
        logger.error("kvmask: no contract is written to %s: %s", path, error)
        return
    logger.info("kvmask: contract %s written to %s", contract.fingerprint, path)
