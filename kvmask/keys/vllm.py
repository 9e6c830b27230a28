"""Keys of vLLM's MooncakeStoreConnector, byte for byte.

::

    key       = prefix "@" hex
    prefix    = [cache_prefix "@"] model namespace
                "@tp_rank:" int "@pcp" int "@dcp" int "@pp_rank:" int "@group:" int
    model     = the last part of the model's path
    namespace = "" | from 0.32 on, when a store TP size is configured, one of
                "@store_tp:" int "@store_pp:" int "@store_format:tp_shared_" ("lbhnc" | "lbnhc")
                "@store_pp:" int "@store_format:tp_shared_mqa"
                "@store_pp:" int "@store_format:rank_local_tp" int "_layout_" name
    hex       = the digest of the block's last hash block, lower case

`tp_rank` is the rank divided by the number of ranks that hold the same bytes, or, in a
``tp_shared_lbhnc`` store, the shard. `group` is the index of the KV cache group; from 0.32 on its
index among those that are prefix cacheable.

Mooncake's group id of a block (from 0.28 on) names what is evicted together, all ranks and groups
of a chunk::

    "vllm-mooncake-store:" [cache_prefix "@"] model namespace "@" hex

The parts are joined without escapes, so different metadata can give equal keys (a model named
"b@m" under prefix "a" against "m" under "a@b"). A KeyFormatWarning says where.

Sources: `PoolKey.build_prefix`, `TPShardedStoreLayout.shared_namespace` in
`kv_connector/v1/mooncake/store/data.py`; `_make_mooncake_group_id`, `_select_store_layout` in
`worker.py`; vLLM 0.24.0, 0.28.0, 0.32.0, 0.33.0. The prefix without a namespace is the same in all
four.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from kvmask._core import KeyBuilder, build_keys, check_integer
from kvmask.errors import ArgumentError, KeyFormatError
from kvmask.keys.base import (
    MAX_COUNT,
    Hashes,
    KeySchema,
    Mask,
    check_counts,
    check_text,
    last_part,
    read_digest,
    release_number,
    warn,
)

RANK_PLACES = MappingProxyType(
    {
        "tp_rank": "tensor",
        "pcp_rank": "prefill",
        "dcp_rank": "context",
        "pp_rank": "stage",
        "group_id": "group",
    }
)
RANKS = tuple(RANK_PLACES)
STORE_LAYOUTS = ("lbhnc", "lbnhc")

_NAMESPACE = re.compile(r"(@store_[a-z]+:[^@]+)+")
_KEY = re.compile(
    r"(?P<head>.+?)(?P<namespace>(?:@store_[a-z]+:[^@]+)*)"
    r"@tp_rank:(?P<tp_rank>\d+)@pcp(?P<pcp_rank>\d+)@dcp(?P<dcp_rank>\d+)"
    r"@pp_rank:(?P<pp_rank>\d+)@group:(?P<group_id>\d+)@(?P<hex>[0-9a-f]+)",
    re.DOTALL,
)


def store_namespace(
    pp_size: int, *, store_tp: int | None = None, layout: str = "lbhnc", tp_size: int | None = None
) -> str:
    """Namespace that vLLM 0.32 and later puts into its keys when a store TP size is configured.

    Args:
        pp_size: Pipeline-parallel size.
        store_tp: Tensor-parallel size of the store, when its objects are shared between TP sizes;
            0 for a model with one KV head, whose objects are alike on every rank.
        layout: KV cache layout: "lbhnc" or "lbnhc" for a shared store, any name of vLLM's
            `KVCacheLayout` else.
        tp_size: Tensor-parallel size of the engine, for the rank-local form that vLLM falls back
            to. Excludes ``store_tp``.

    Raises:
        ArgumentError: A number is out of range, or two arguments exclude each other.

    >>> store_namespace(1, store_tp=4)
    '@store_tp:4@store_pp:1@store_format:tp_shared_lbhnc'
    >>> store_namespace(2, tp_size=8, layout="LBNHC")
    '@store_pp:2@store_format:rank_local_tp8_layout_LBNHC'
    """
    pp_size = check_integer(pp_size, "pp_size", 1, MAX_COUNT)
    if (store_tp is None) == (tp_size is None):
        raise ArgumentError(
            f"exactly one of `store_tp` and `tp_size` must be given, got {store_tp} and {tp_size}"
        )
    if tp_size is not None:
        tp_size = check_integer(tp_size, "tp_size", 1, MAX_COUNT)
        return f"@store_pp:{pp_size}@store_format:rank_local_tp{tp_size}_layout_{layout}"
    store_tp = check_integer(store_tp, "store_tp", 0, MAX_COUNT)
    if store_tp == 0:
        return f"@store_pp:{pp_size}@store_format:tp_shared_mqa"
    if layout not in STORE_LAYOUTS:
        raise ArgumentError(
            f"`layout` must be one of {', '.join(STORE_LAYOUTS)} for a shared store, got {layout!r}"
        )
    return f"@store_tp:{store_tp}@store_pp:{pp_size}@store_format:tp_shared_{layout}"


def store_numbers(namespace: str) -> dict[str, int]:
    """The numbers in a store namespace, by name.

    >>> store_numbers("@store_pp:2@store_format:rank_local_tp8_layout_LBNHC")
    {'store_pp': 2, 'rank_local_tp': 8}
    """
    found = re.findall(r"@(store_tp|store_pp):(\d+)(?=@|$)", namespace)
    found += re.findall(r"@store_format:(rank_local_tp)(\d+)_", namespace)
    return {name: int(number) for name, number in found}


@dataclass(frozen=True, eq=False)
class VllmKeys(KeySchema):
    """Keys of vLLM's MooncakeStoreConnector (0.24 to 0.33), byte for byte.

    The format joins free text with ``@``, so different metadata can give equal keys; a
    KeyFormatWarning says where. Outside vLLM prefer StrictKeys.

    Args:
        model: Model name; of a path only the last part is used, as vLLM does.
        tp_rank: Tensor-parallel rank, already divided by the number of equal replicas.
        pcp_rank: Prefill-context-parallel rank.
        dcp_rank: Decode-context-parallel rank.
        pp_rank: Pipeline-parallel rank.
        group_id: Index of the KV cache group.
        cache_prefix: Optional deployment prefix.
        namespace: Optional store namespace, see `store_namespace`. From 0.32 on.
        release: vLLM release. Keys are alike in all; it decides what else there is.

    Raises:
        KeyFormatError: The model name is empty, or a text is not valid Unicode.

    >>> VllmKeys(model="DeepSeek-V4").prefix
    'DeepSeek-V4@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0'
    """

    model: str
    tp_rank: int = 0
    pcp_rank: int = 0
    dcp_rank: int = 0
    pp_rank: int = 0
    group_id: int = 0
    cache_prefix: str = ""
    namespace: str = ""
    release: str = "0.32"
    _builder: KeyBuilder = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("model", "cache_prefix", "namespace"):
            check_text(getattr(self, name), name)
        check_counts(self, RANKS)
        short = last_part(self.model)
        if short != self.model:
            warn(f"`model` {self.model!r} is keyed as {short!r}: models of that name share keys")
        for name, value in (("model", short), ("cache_prefix", self.cache_prefix)):
            if "@" in value:
                warn(f"`{name}` {value!r} holds '@', which separates the parts of a key")
        if self.namespace:
            if release_number(self.release) < (0, 32):
                raise ArgumentError(
                    f"`namespace` must be empty before vLLM 0.32, got {self.namespace!r} "
                    f"and {self.release}"
                )
            if not _NAMESPACE.fullmatch(self.namespace):
                warn(
                    f"`namespace` {self.namespace!r} is not of vLLM's form and may read as a part "
                    "of the model name"
                )
        release_number(self.release)
        self._assemble()

    @property
    def rank_fields(self) -> Mapping[str, str]:
        """All five are filled in."""
        return RANK_PLACES

    @property
    def rank_rule(self) -> str:
        """vLLM's own: every rank has its keys under decode context parallelism."""
        return "vllm"

    @property
    def numbers_all_groups(self) -> bool:
        """vLLM counts all groups before 0.32, and the cacheable ones from then on."""
        return release_number(self.release) < (0, 32)

    def _assemble(self) -> None:
        self._build(
            f"{self._head}@tp_rank:{self.tp_rank}@pcp{self.pcp_rank}@dcp{self.dcp_rank}"
            f"@pp_rank:{self.pp_rank}@group:{self.group_id}@"
        )

    @property
    def _head(self) -> str:
        head = f"{self.cache_prefix}@" if self.cache_prefix else ""
        return f"{head}{last_part(self.model)}{self.namespace}"

    @property
    def eviction(self) -> KeyBuilder | None:
        """Builds Mooncake's group ids; None before vLLM 0.28, which sends none."""
        if release_number(self.release) < (0, 28):
            return None
        return KeyBuilder(f"vllm-mooncake-store:{self._head}@")

    def mooncake_group_ids(
        self, hashes: Hashes, mask: Mask | None = None, start: int = 0, scale: int = 1
    ) -> list[str]:
        """Mooncake's group ids of the blocks that `keys` names, in the same order.

        Args:
            hashes: One digest per hash block.
            mask: Which blocks from ``start`` on; None means all.
            start: First block.
            scale: Hash blocks per block.

        Raises:
            ArgumentError: vLLM before 0.28, which sends no group ids.

        >>> VllmKeys(model="m").mooncake_group_ids([b"abcd"])
        ['vllm-mooncake-store:m@61626364']
        """
        builder = self.eviction
        if builder is None:
            raise ArgumentError(
                f"`release` must be 0.28 or later for Mooncake group ids, got {self.release}"
            )
        return build_keys((builder,), hashes, mask, start, scale)

    @classmethod
    def _candidates(cls, key: str) -> Iterator[tuple[VllmKeys, bytes]]:
        found = _KEY.fullmatch(key)
        if not found:
            return
        prefix, at, model = found["head"].rpartition("@")
        if "@" in prefix:
            raise KeyFormatError(
                f"the text before the ranks fits several model names and prefixes, got {key!r}"
            )
        if at and not prefix:
            return
        ranks: dict[str, Any] = {name: int(found[name]) for name in RANKS}
        schema = cls(model, cache_prefix=prefix, namespace=found["namespace"], **ranks)
        yield schema, read_digest(found["hex"], key)
