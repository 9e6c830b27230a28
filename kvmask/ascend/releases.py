"""What each release of vllm-ascend's AscendStore does, as far as kvmask must know.

* 0.30: a lookup asks for the tails of the retention interval's segments and of every aligned
  boundary. Block sizes are tokens of the request. Keys name the decode-context-parallel rank as a
  field, and a lookup asks for every such rank.
* 0.23: a lookup asks for the tails of every aligned boundary, whatever the retention interval.
  Blocks of a compressed cache family count its own rows: a block covers its size times the ratio. A
  block of several hash blocks is named by a digest of their digests; such groups stay stock, as do
  lookups that they are part of.

The table at the end holds the digests of the functions that kvmask replaces or relies on.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import threading
from dataclasses import dataclass

from vllm.logger import init_logger

from kvmask.engines import Feature, Placed, Seams, Table
from kvmask.engines.kinds import Kinds
from kvmask.versions import ASCEND

logger = init_logger("vllm.kvmask")

_STORE = "vllm_ascend.distributed.kv_transfer.kv_pool.ascend_store."
# The module was renamed in 0.27.
_DATA = _STORE + ("metadata:" if importlib.util.find_spec(_STORE + "metadata") else "config_data:")
_DATABASE = _DATA + "ChunkedTokenDatabase."
_WORKER = _STORE + "pool_worker:KVPoolWorker."
_COORDINATOR = _STORE + "coordinator:AscendStoreCoordinator."
_POOL = _STORE + "coordinator:ExternalCachedBlockPool."

PATHS: dict[str, str] = {
    # replaced
    "worker.lookup_scheduler": _WORKER + "lookup_scheduler",
    "coordinator.store_mask": _COORDINATOR + "store_mask",
    "coordinator.lookup_mask": _COORDINATOR + "lookup_mask",
    "coordinator.load_mask": _COORDINATOR + "load_mask",
    "database.key_strings": _DATABASE + "process_token_key_strings",
    "database.key_strings_with_ids": _DATABASE + "process_token_key_strings_with_block_ids",
    "database.prepare_value": _DATABASE + "prepare_value",
    # called, and listened to
    "worker.register": _WORKER + "register_kv_caches",
    # relied on
    "worker.with_coordinator": _WORKER + "_lookup_with_coordinator",
    "worker.build_keys": _WORKER + "_build_lookup_keys",
    "worker.expand_by_rank": _WORKER + "_expand_lookup_keys_by_rank",
    "worker.expand_variants": _WORKER + "_expand_lookup_key_variants",
    "worker.replace_field": _WORKER + "_replace_key_field",
    "worker.tp_size": _WORKER + "get_group_tp_size",
    "worker.kv_heads": _WORKER + "_get_group_num_kv_heads",
    "worker.continuous": _WORKER + "find_all_continuous_hit_positions",
    "worker.intersection": _WORKER + "_max_intersection_hit_position",
    "coordinator.init": _COORDINATOR + "__init__",
    "coordinator.split": _COORDINATOR + "_verify_and_split_kv_cache_groups",
    "coordinator.find": _COORDINATOR + "find_longest_cache_hit",
    "coordinator.find_blocks": _COORDINATOR + "_find_hit_blocks",
    "coordinator.find_tokens": _COORDINATOR + "find_reachable_hit_tokens",
    "coordinator.hashes_for_spec": _COORDINATOR + "block_hashes_for_spec",
    "coordinator.reachable_masks": _COORDINATOR + "_reachable_masks",
    "coordinator.manager_class": _STORE + "coordinator:_get_manager_class",
    "coordinator.find_in_manager": _STORE + "coordinator:_find_longest_cache_hit",
    "coordinator.manager_mask": _STORE + "coordinator:_reachable_block_mask",
    "coordinator.accepted_kwargs": _STORE + "coordinator:_reachable_mask_accepted_kwargs",
    "coordinator.uses_mask": _STORE + "coordinator:_uses_reachable_mask",
    "coordinator.copy_spec": _STORE + "coordinator:_copy_spec_with_block_size",
    "coordinator.granularity": _STORE + "coordinator:_cache_family_granularity",
    "coordinator.num_chunks": _STORE + "coordinator:_num_chunks",
    "pool.init": _POOL + "__init__",
    "pool.get_cached_block": _POOL + "get_cached_block",
    "data.block_hashes": _DATA + "get_block_hashes",
    "data.grouped_hashes": _DATA + "_LazyGroupedBlockHashList",
    "data.hash_to_str": _DATA + "block_hash_to_str",
    "data.hash_to_bytes": _DATA + "block_hash_to_bytes",
    "data.family_ratio": _DATA + "infer_cache_family_ratio",
    "data.family_granularity": _DATA + "get_cache_family_granularity",
    "database.iter_chunks": _DATABASE + "_iter_token_chunks",
    "database.key_prefix": _DATABASE + "_get_key_prefix",
    "database.block_size": _DATABASE + "get_block_size",
    "database.group_buffers": _DATABASE + "_get_group_buffers",
    "vllm.block_hashes": "vllm.v1.core.kv_cache_utils:resolve_block_hashes",
}

_SEARCH = (
    "coordinator.init",
    "coordinator.split",
    "coordinator.find",
    "coordinator.find_blocks",
    "coordinator.hashes_for_spec",
    "coordinator.reachable_masks",
    "coordinator.manager_class",
    "coordinator.find_in_manager",
    "coordinator.manager_mask",
    "coordinator.accepted_kwargs",
    "coordinator.uses_mask",
    "coordinator.copy_spec",
    "coordinator.granularity",
    "coordinator.num_chunks",
    "pool.init",
    "pool.get_cached_block",
    "data.hash_to_bytes",
    "vllm.block_hashes",
)
_CHUNKS = (
    "data.block_hashes",
    "data.grouped_hashes",
    "data.hash_to_str",
    "data.family_ratio",
    "data.family_granularity",
    "database.iter_chunks",
    "database.key_prefix",
    "database.block_size",
)

FEATURES = (
    Feature(
        "lookup",
        ("worker.lookup_scheduler",),
        (
            "worker.with_coordinator",
            "worker.build_keys",
            "worker.expand_by_rank",
            "worker.expand_variants",
            "worker.replace_field",
            "worker.tp_size",
            "worker.kv_heads",
            "worker.continuous",
            "worker.intersection",
            "coordinator.find_tokens",
            "coordinator.lookup_mask",
            "database.key_strings",
            *_SEARCH,
            *_CHUNKS,
        ),
    ),
    Feature(
        "masks",
        ("coordinator.store_mask", "coordinator.lookup_mask", "coordinator.load_mask"),
        _SEARCH,
    ),
    Feature("keys", ("database.key_strings", "database.key_strings_with_ids"), _CHUNKS),
    Feature(
        "descriptors",
        ("database.prepare_value",),
        ("database.block_size", "database.group_buffers"),
    ),
)

seams = Seams(PATHS, prefix=_STORE)


@dataclass(frozen=True)
class Release:
    """The differences between releases.

    Attributes:
        name: Release.
        kinds: Recognises the cache managers of the vLLM releases that it runs with.
        asks_retention: A lookup mask also has the segments of the retention interval.
        every_boundary: Without a prompt length a store mask has every aligned boundary.
        masks_states: States have a mask rule.
        scales_families: Blocks of a compressed family count its own rows.
        digests_digests: Blocks of several hash blocks have a digest of their own.
        names_contexts: Keys hold the decode-context-parallel rank as a field of its own.
    """

    name: str
    kinds: Kinds
    asks_retention: bool = True
    every_boundary: bool = True
    masks_states: bool = True
    scales_families: bool = False
    digests_digests: bool = False
    names_contexts: bool = True

    def ratio(self, family: str | None) -> int:
        """Tokens per row that a block of a cache family counts."""
        digits = (family or "")[1:]
        if self.scales_families and (family or "").startswith("c") and digits.isdigit():
            return max(1, int(digits))
        return 1


_NEED = {"window": {"_contiguous_blocks_for_hit": frozenset({"1459460e6e"})}}
# vLLM 0.30 to 0.32.
_KINDS_30 = Kinds(
    {"6dd4e4634b": "full", "317189354f": "window", "81e2b7c1a1": "state"},
    {
        "full": frozenset({"b5f70b906e"}),
        "window": frozenset({"5e71c02618"}),
        "state": frozenset({"1f91c44801"}),
    },
    frozenset({"944b27a883"}),
    _NEED,
)
# vLLM 0.23, where states have no mask rule; vllm-ascend has two managers of its own there.
_KINDS_23 = Kinds(
    {
        "3413c02f09": "full",
        "9e76ed5d8d": "full",
        "e6dc4c6bae": "window",
        "8bc2026375": "state",
        "9b3a988f82": "state",
    },
    {
        "full": frozenset({"8419978f98"}),
        "window": frozenset({"f1f995eb47"}),
        "state": frozenset({"8419978f98"}),
    },
    more=_NEED,
)

_KNOWN = {
    "0.30.0rc2": Release("0.30.0rc2", _KINDS_30),
    "0.23.0.post1": Release(
        "0.23.0.post1",
        _KINDS_23,
        asks_retention=False,
        every_boundary=False,
        masks_states=False,
        scales_families=True,
        digests_digests=True,
        names_contexts=False,
    ),
}

# seam, then its digest in every release of `ASCEND`; "-" where kvmask does not rely on it
TABLE = Table(
    ASCEND,
    """
worker.lookup_scheduler e4c5ffec60 14379d459b
coordinator.store_mask 814a18bf23 814a18bf23
coordinator.lookup_mask 86c7476bec a14d2d65ef
coordinator.load_mask 520f21523d 738f705238
database.key_strings ff4d8c55be 895dcba984
database.key_strings_with_ids f99cc537af 9db1adbc16
database.prepare_value 8f19a944ee 8f19a944ee
worker.with_coordinator 6d58099526 019bb4ae4d
worker.build_keys 33199f7809 c42d43b7b4
worker.expand_by_rank - 16333c7da5
worker.expand_variants ad020567b2 ce6f55371c
worker.replace_field 381e5ad396 381e5ad396
worker.tp_size d6fc7c4c3d 9da4cfb3fc
worker.kv_heads 579a6e385b 579a6e385b
worker.continuous dbbdd6b10b dbbdd6b10b
worker.intersection 389e981e99 389e981e99
coordinator.init eaace77c2d b87d3d2f58
coordinator.split 33643207af c14c94c697
coordinator.find e6908dcbeb 6dd8143d92
coordinator.find_blocks efda687820 a443db04aa
coordinator.find_tokens - d47e2999e3
coordinator.hashes_for_spec d2c2f9127c bed14930a4
coordinator.reachable_masks 6157166220 cd1d8e1c06
coordinator.manager_class bc3d5c4b17 696c9e0711
coordinator.find_in_manager cecccf4ab4 09c10bc6a8
coordinator.manager_mask 6609495230 67df244e96
coordinator.accepted_kwargs - e0cd232b48
coordinator.uses_mask 10f1d0e0ab 10f1d0e0ab
coordinator.copy_spec 052c8d6c62 052c8d6c62
coordinator.granularity 7aa5609a07 -
coordinator.num_chunks 2ea2761147 -
pool.init e66fe00fe8 b3dc387252
pool.get_cached_block c0c6ddb0e3 c0c6ddb0e3
data.block_hashes 8c57de3a80 f7232f0542
data.grouped_hashes bd257ff337 066aee8054
data.hash_to_str bc72d02de1 bc72d02de1
data.hash_to_bytes 7f98934aed acf05d0f34
data.family_ratio 67be373e7e -
data.family_granularity 98ee654299 -
database.iter_chunks cb45fa78ae e20b0ecfb8
database.key_prefix a8b91f76d9 bce82ba4c3
database.block_size 2363efe571 2363efe571
database.group_buffers 5c06fbb438 5c06fbb438
vllm.block_hashes - c74fcc5f9f
""",
    FEATURES,
)

_lock = threading.Lock()
_found: list[Placed] = []


def version() -> str:
    """The version of vllm-ascend as its package says it."""
    try:
        return importlib.metadata.version("vllm-ascend")
    except importlib.metadata.PackageNotFoundError:
        return "(no version)"


def fitting() -> Placed:
    """What fits the installed vllm-ascend, found once.

    Raises:
        UnsupportedReleaseError: Nothing does; the message names what changed.
    """
    with _lock:
        if not _found:
            _found.append(TABLE.fit(seams, "vllm-ascend", version()))
    return _found[0]


def current() -> Release:
    """The release whose functions the installed vllm-ascend has."""
    return _KNOWN[fitting().release]


if __name__ == "__main__":
    print(seams.report())
