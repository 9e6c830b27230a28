"""Digests to store keys.

A key is ``prefix`` + ``@`` + the lower-case hexadecimal digest of a block's last hash block.

``VllmKeys`` prefix, byte-equal to vLLM 0.32.0 (PoolKey.build_prefix)::

    [<cache_prefix> "@"] <model> <namespace>
    "@tp_rank:" <int> "@pcp" <int> "@dcp" <int> "@pp_rank:" <int> "@group:" <int>

``StrictKeys`` prefix, where no two different schemas give the same text::

    "kvm1@" <model> "@" <namespace> "@" <tags> "@" <fingerprint>
    "@tp" <int> "@pcp" <int> "@dcp" <int> "@pp" <int> "@g" <int>

Free text in strict keys is percent-escaped (``%``, ``@``, and in tags also ``=`` and ``,``), tags
are ``name=value`` joined by commas and sorted by name, and the fingerprint is the first 16 hex
digits of the SHA-256 of the facts that two engines must agree on.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvmask._core import Bitset, BlockHashes, KeyBuilder, build_keys
from kvmask.errors import ArgumentError, KeyFormatError, KeyFormatWarning
from kvmask.groups import check_count

RANKS = ("tp_rank", "pcp_rank", "dcp_rank", "pp_rank", "group_id")

# What vLLM itself puts there: "@store_tp:4@store_pp:1@store_format:tp_shared_lbhnc".
_VLLM_NAMESPACE = re.compile(r"(@store_[a-z]+:[^@]+)+")


def check_text(value: str, name: str) -> None:
    """Refuse what is no text or cannot be stored as UTF-8."""
    if not isinstance(value, str):
        raise TypeError(f"`{name}` must be a str, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as e:
        raise KeyFormatError(f"`{name}` must be valid Unicode, got {value!r}") from e


class KeySchema:
    """What all schemas share: a prefix, and keys built from it in the core."""

    _builder: KeyBuilder

    @property
    def prefix(self) -> str:
        """Everything before the ``@`` of the digest."""
        return self._builder.prefix[:-1]

    @property
    def builder(self) -> KeyBuilder:
        """The core's key builder of this namespace."""
        return self._builder

    def keys(
        self,
        hashes: BlockHashes | Sequence[bytes],
        mask: Bitset | Sequence[bool] | None = None,
        start: int = 0,
        scale: int = 1,
    ) -> list[str]:
        """Keys of the blocks from ``start`` on.

        Args:
            hashes: One digest per hash block.
            mask: Which blocks from ``start`` on; None means all.
            start: First block.
            scale: Hash blocks per block; block ``i`` is named by digest ``(i + 1) * scale - 1``.

        Returns:
            One key per selected block, ascending.

        Raises:
            ArgumentError: The mask is longer than the blocks from ``start`` on.
        """
        return build_keys((self._builder,), hashes, mask, start, scale)

    def key(self, digest: bytes) -> str:
        """The key of one digest."""
        return self.keys([digest])[0]


def _check_ranks(schema: object) -> None:
    for name in RANKS:
        check_count(getattr(schema, name), name, 0)


@dataclass(frozen=True)
class VllmKeys(KeySchema):
    """Keys of vLLM's MooncakeStoreConnector (0.28 to 0.33), byte for byte.

    The format joins free text with ``@``, so different metadata can give equal keys; a
    KeyFormatWarning says where. Outside vLLM prefer StrictKeys.

    Args:
        model: Model name; of a path only the last part is used, as vLLM does.
        tp_rank: Tensor-parallel rank.
        pcp_rank: Prefill-context-parallel rank.
        dcp_rank: Decode-context-parallel rank.
        pp_rank: Pipeline-parallel rank.
        group_id: Index of the KV cache group.
        cache_prefix: Optional deployment prefix.
        namespace: Optional store namespace (vLLM's store formats).

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
    _builder: KeyBuilder = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("model", "cache_prefix", "namespace"):
            check_text(getattr(self, name), name)
        _check_ranks(self)
        short = self.model.rstrip("/").split("/")[-1]
        if not short:
            raise KeyFormatError(f"`model` must name a model, got {self.model!r}")
        if short != self.model:
            warnings.warn(
                f"`model` {self.model!r} is keyed as {short!r}: models of that name share keys",
                KeyFormatWarning,
                stacklevel=3,
            )
        for name, value in (("model", short), ("cache_prefix", self.cache_prefix)):
            if "@" in value:
                warnings.warn(
                    f"`{name}` {value!r} holds '@', which separates the parts of a key",
                    KeyFormatWarning,
                    stacklevel=3,
                )
        if self.namespace and not _VLLM_NAMESPACE.fullmatch(self.namespace):
            warnings.warn(
                f"`namespace` {self.namespace!r} is not of vLLM's form and may read as a part "
                "of the model name",
                KeyFormatWarning,
                stacklevel=3,
            )
        head = f"{self.cache_prefix}@" if self.cache_prefix else ""
        prefix = (
            f"{head}{short}{self.namespace}@tp_rank:{self.tp_rank}@pcp{self.pcp_rank}"
            f"@dcp{self.dcp_rank}@pp_rank:{self.pp_rank}@group:{self.group_id}@"
        )
        object.__setattr__(self, "_builder", KeyBuilder(prefix))


def escape(text: str, also: str = "") -> str:
    """Percent-escape the separators of strict keys, so that joined parts stay apart.

    >>> escape("a@b%c")
    'a%40b%25c'
    """
    for char in "%@" + also:
        text = text.replace(char, f"%{ord(char):02x}")
    return text


def fingerprint(facts: Mapping[str, str | int | bool | None]) -> str:
    """16 hex digits that stand for facts two engines must agree on to share keys.

    >>> fingerprint({"dtype": "bf16"}) == fingerprint({"dtype": "fp8"})
    False
    """
    for name, value in facts.items():
        if not isinstance(name, str) or not isinstance(value, str | int | type(None)):
            raise ArgumentError(
                f"`facts` must map text to text, integers or None, got {name!r}: {value!r}"
            )
    text = json.dumps(dict(facts), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class StrictKeys(KeySchema):
    """Keys that two engines share only when they agree on everything that shapes the bytes.

    Args:
        model: Whole model name, path included.
        tp_rank: Tensor-parallel rank.
        pcp_rank: Prefill-context-parallel rank.
        dcp_rank: Decode-context-parallel rank.
        pp_rank: Pipeline-parallel rank.
        group_id: Index of the KV cache group.
        namespace: Free text that keeps deployments apart.
        tags: Further names and values, for instance of an adapter.
        facts: What the bytes depend on: dtype, layout tag, block bytes, model revision, hash
            algorithm and seed.

    Raises:
        KeyFormatError: The model name is empty, or a text is not valid Unicode.

    >>> StrictKeys(model="org/m@1", facts={"dtype": "bf16"}).prefix
    'kvm1@org/m%401@@@fe424e154544e8a4@tp0@pcp0@dcp0@pp0@g0'
    """

    model: str
    tp_rank: int = 0
    pcp_rank: int = 0
    dcp_rank: int = 0
    pp_rank: int = 0
    group_id: int = 0
    namespace: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, str | int | bool | None] = field(default_factory=dict)
    _builder: KeyBuilder = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_text(self.model, "model")
        check_text(self.namespace, "namespace")
        _check_ranks(self)
        if not self.model.strip("/"):
            raise KeyFormatError(f"`model` must name a model, got {self.model!r}")
        for name, value in self.tags.items():
            check_text(name, "tags")
            check_text(value, "tags")
        pairs = sorted(self.tags.items())
        tags = ",".join(f"{escape(k, '=,')}={escape(v, '=,')}" for k, v in pairs)
        prefix = (
            f"kvm1@{escape(self.model)}@{escape(self.namespace)}@{tags}@{fingerprint(self.facts)}"
            f"@tp{self.tp_rank}@pcp{self.pcp_rank}@dcp{self.dcp_rank}@pp{self.pp_rank}"
            f"@g{self.group_id}@"
        )
        object.__setattr__(self, "_builder", KeyBuilder(prefix))
