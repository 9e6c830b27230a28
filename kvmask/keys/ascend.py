"""Keys of vllm-ascend's AscendStore, byte for byte.

Whole blocks, by release::

    0.13 to 0.19   model "@pcp" int "@dcp" int "@head_or_tp_rank:" int "@pp_rank:" int "@" hex
    0.20 to 0.25   model "@pcp" int "@dcp" int "@head_or_tp_rank:" int "@pp_rank:" int tail "@" hex
    and 0.27
    0.26           the same with "@pcp:" int "@dcp:" int
    0.28 to 0.30   model "@dcp:" int "@head_or_tp_rank:" int "@pp_rank:" int tail "@" hex

    tail  = "@group:" int "@cache_role:" role "@cache_family:" family
    model = the last part of the model's path
    hex   = the digest of the block's last hash block, lower case. In 0.21 to 0.24 a block of
            several hash blocks has a SHA-256 of their digests instead, and in 0.20 all of their
            digests where they came as text. Give those to the schema as they are.

One layer of a block: "@pp_rank:" int is left out, and the key ends in ``"@" hex "@" layer`` up to
0.19, in ``"@layer_id:" layer "@" hex`` from 0.20 on. Layers are numbered over the whole model, so
pipeline stages stay apart all the same.

`head_or_tp_rank` is the TP rank, divided by ``tp_size // kv_heads`` when there are fewer KV heads
than ranks. `role` is "kv" (or "state"), `family` "default", "c<compression ratio>" or "mixed".

Sources: `PoolKey.to_string`, `LayerPoolKey.to_string`, `infer_cache_family_from_ratio` in
`kvpool/config_data.py` (0.13.0), `kv_pool/ascend_store/config_data.py` (0.18.0 to 0.26.0rc1) and
`metadata.py` (0.27.1rc1 to 0.30.0rc2), read in 0.13.0, 0.18.0, 0.19.1rc1, 0.20.2rc1, 0.23.0,
0.25.1rc1, 0.26.0rc1, 0.27.1rc1, 0.28.0rc1, 0.30.0rc2. The layer-wise transfer keys of the Mooncake
and MemCache backends are another format and not covered.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from kvmask._core import KeyBuilder
from kvmask.errors import ArgumentError, KeyFormatError
from kvmask.keys.base import (
    KeySchema,
    check_counts,
    check_text,
    last_part,
    read_digest,
    release_number,
    warn,
)

PLACES = MappingProxyType(
    {
        "head_or_tp_rank": "tensor",
        "pcp_rank": "prefill",
        "dcp_rank": "context",
        "pp_rank": "stage",
        "group_id": "group",
    }
)
RANKS = tuple(PLACES)

_CONTEXT = (
    r"(?P<model>.+?)(?:@pcp(?P<colon>:?)(?P<pcp_rank>\d+)@dcp(?P=colon)|@dcp:)(?P<dcp_rank>\d+)"
)
_KEY = re.compile(
    _CONTEXT + r"@head_or_tp_rank:(?P<head_or_tp_rank>\d+)(?:@pp_rank:(?P<pp_rank>\d+))?"
    r"(?P<tail>@group:(?P<group_id>\d+)@cache_role:(?P<cache_role>[^@]+)"
    r"@cache_family:(?P<cache_family>[^@]+))?(?:@layer_id:(?P<layer_id>\d+))?"
    r"@(?P<hex>[0-9a-f]+)(?:@(?P<old_layer>\d+))?",
    re.DOTALL,
)


def _form(release: str) -> str:
    """Which of the formats above: its first release."""
    number = release_number(release)
    if number == (0, 26):
        return "0.26"
    for first, last, form in (
        ((0, 13), (0, 19), "0.13"),
        ((0, 20), (0, 27), "0.20"),
        ((0, 28), (0, 99), "0.28"),
    ):
        if first <= number <= last:
            return form
    raise ArgumentError(f"`release` must be a vllm-ascend release from 0.13 on, got {release!r}")


@dataclass(frozen=True, eq=False)
class AscendKeys(KeySchema):
    """Keys of vllm-ascend's AscendStore (0.13 to 0.30), byte for byte.

    Args:
        model: Model name; of a path only the last part is used.
        head_or_tp_rank: Tensor-parallel rank, already divided by the number of equal replicas.
        pcp_rank: Prefill-context-parallel rank; 0 from 0.28 on, where keys do not have it.
        dcp_rank: Decode-context-parallel rank.
        pp_rank: Pipeline-parallel rank; not part of a layer's key.
        group_id: Index of the KV cache group; 0 before 0.20.
        cache_role: "kv" or "state"; "kv" before 0.20.
        cache_family: "default", "c4", ...; "default" before 0.20.
        layer_id: Layer, for keys of one layer; None for whole blocks.
        release: vllm-ascend release.

    Raises:
        ArgumentError: An unknown release, or a value that its keys cannot hold.
        KeyFormatError: The model name is empty, or a text is not valid Unicode.

    >>> AscendKeys("DeepSeek-V4").prefix
    'DeepSeek-V4@dcp:0@head_or_tp_rank:0@pp_rank:0@group:0@cache_role:kv@cache_family:default'
    """

    model: str
    head_or_tp_rank: int = 0
    pcp_rank: int = 0
    dcp_rank: int = 0
    pp_rank: int = 0
    group_id: int = 0
    cache_role: str = "kv"
    cache_family: str = "default"
    layer_id: int | None = None
    release: str = "0.30"
    _builder: KeyBuilder = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("model", "cache_role", "cache_family"):
            check_text(getattr(self, name), name)
        check_counts(self, RANKS)
        if self.layer_id is not None:
            check_counts(self, ("layer_id",))
        form = _form(self.release)
        absent = {"0.13": ("group_id", "cache_role", "cache_family"), "0.28": ("pcp_rank",)}
        for name in absent.get(form, ()):
            default = type(self).__dataclass_fields__[name].default
            if getattr(self, name) != default:
                raise ArgumentError(
                    f"`{name}` must be {default!r} in keys of vllm-ascend {self.release}, "
                    f"got {getattr(self, name)!r}"
                )
        for name in ("cache_role", "cache_family"):
            if not getattr(self, name) or "@" in getattr(self, name):
                raise KeyFormatError(
                    f"`{name}` must be text without '@', got {getattr(self, name)!r}"
                )
        short = last_part(self.model)
        if short != self.model:
            warn(f"`model` {self.model!r} is keyed as {short!r}: models of that name share keys")
        if "@" in short:
            warn(f"`model` {short!r} holds '@', which separates the parts of a key")
        self._assemble()

    @property
    def rank_rule(self) -> str:
        """AscendStore's own: a key always holds the decode-context-parallel rank."""
        return "ascend"

    @property
    def rank_fields(self) -> Mapping[str, str]:
        """Those that keys of this release have."""
        absent = {"group_id"} if _form(self.release) == "0.13" else set()
        if _form(self.release) == "0.28":
            absent.add("pcp_rank")
        if self.layer_id is not None:
            absent.add("pp_rank")
        return {name: source for name, source in PLACES.items() if name not in absent}

    @property
    def numbers_all_groups(self) -> bool:
        """AscendStore counts all of them."""
        return True

    def _assemble(self) -> None:
        form, short = _form(self.release), last_part(self.model)
        context = {
            "0.13": f"@pcp{self.pcp_rank}@dcp{self.dcp_rank}",
            "0.20": f"@pcp{self.pcp_rank}@dcp{self.dcp_rank}",
            "0.26": f"@pcp:{self.pcp_rank}@dcp:{self.dcp_rank}",
            "0.28": f"@dcp:{self.dcp_rank}",
        }[form]
        prefix = f"{short}{context}@head_or_tp_rank:{self.head_or_tp_rank}"
        suffix = ""
        if self.layer_id is None:
            prefix += f"@pp_rank:{self.pp_rank}"
        if form != "0.13":
            prefix += f"@group:{self.group_id}@cache_role:{self.cache_role}"
            prefix += f"@cache_family:{self.cache_family}"
        if self.layer_id is not None:
            if form == "0.13":
                suffix = f"@{self.layer_id}"
            else:
                prefix += f"@layer_id:{self.layer_id}"
        self._build(prefix + "@", suffix)

    @classmethod
    def _candidates(cls, key: str) -> Iterator[tuple[AscendKeys, bytes]]:
        found = _KEY.fullmatch(key)
        if not found:
            return
        if found["pcp_rank"] is None:
            release = "0.28"
        elif found["colon"]:
            release = "0.26"
        else:
            release = "0.20" if found["tail"] else "0.13"
        layer = found["layer_id"] or found["old_layer"]
        yield (
            cls(
                found["model"],
                layer_id=None if layer is None else int(layer),
                cache_role=found["cache_role"] or "kv",
                cache_family=found["cache_family"] or "default",
                release=release,
                **{name: int(found[name] or 0) for name in RANKS},
            ),
            read_digest(found["hex"], key),
        )
