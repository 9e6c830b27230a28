"""Digests to store keys: one schema per format, all built by one routine of the core.

====================  ======================================  =========================
schema                written by                              format stated in
====================  ======================================  =========================
`VllmKeys`            vLLM's MooncakeStoreConnector           `kvmask.keys_vllm`
`AscendKeys`          vllm-ascend's AscendStore               `kvmask.keys_ascend`
`SglangKeys`          SGLang's HiCache over Mooncake          `kvmask.keys_sglang`
`LMCacheKeys`         LMCache inside an engine                `kvmask.keys_lmcache`
`LMCacheObjectKeys`   LMCache's multiprocess server           `kvmask.keys_lmcache`
`StrictKeys`          kvmask itself                           `kvmask.keys_strict`
====================  ======================================  =========================

Each has ``keys()`` and its inverse ``parse()``.
"""

from kvmask._schema import KeySchema
from kvmask.keys_ascend import AscendKeys
from kvmask.keys_lmcache import LMCacheKeys, LMCacheObjectKeys, lmcache_chunk_hashes
from kvmask.keys_sglang import SglangKeys, sglang_page_hashes, sglang_seed
from kvmask.keys_strict import StrictKeys, fingerprint
from kvmask.keys_vllm import VllmKeys, store_namespace

__all__ = [
    "AscendKeys",
    "KeySchema",
    "LMCacheKeys",
    "LMCacheObjectKeys",
    "SglangKeys",
    "StrictKeys",
    "VllmKeys",
    "fingerprint",
    "lmcache_chunk_hashes",
    "sglang_page_hashes",
    "sglang_seed",
    "store_namespace",
]
