"""Digests to store keys: one schema per format, all built by one routine of the core.

====================  ======================================  =========================
schema                written by                              format stated in
====================  ======================================  =========================
`VllmKeys`            vLLM's MooncakeStoreConnector           `kvmask.keys.vllm`
`AscendKeys`          vllm-ascend's AscendStore               `kvmask.keys.ascend`
`SglangKeys`          SGLang's HiCache over Mooncake          `kvmask.keys.sglang`
`LMCacheKeys`         LMCache inside an engine                `kvmask.keys.lmcache`
`LMCacheObjectKeys`   LMCache's multiprocess server           `kvmask.keys.lmcache`
`StrictKeys`          kvmask itself                           `kvmask.keys.strict`
====================  ======================================  =========================

Each has ``keys()`` and its inverse ``parse()``.
"""

from kvmask.hashing.lmcache import lmcache_chunk_hashes
from kvmask.hashing.sglang import sglang_page_hashes, sglang_seed
from kvmask.keys.ascend import AscendKeys
from kvmask.keys.base import KeySchema
from kvmask.keys.lmcache import LMCacheKeys, LMCacheObjectKeys
from kvmask.keys.sglang import SglangKeys
from kvmask.keys.strict import StrictKeys, fingerprint
from kvmask.keys.vllm import VllmKeys, store_namespace

#: Name to class of every format: those that a contract's JSON can carry.
FORMATS: dict[str, type[KeySchema]] = {
    kind.__name__: kind
    for kind in (AscendKeys, LMCacheKeys, LMCacheObjectKeys, SglangKeys, StrictKeys, VllmKeys)
}

__all__ = [
    "FORMATS",
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
