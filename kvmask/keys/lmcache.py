"""Keys of LMCache, byte for byte.

Keys of one engine process (`CacheEngineKey`, `LayerCacheEngineKey`)::

    key  = model "@" world_size "@" worker_id "@" hash "@" dtype ["@" layer] {"@" tag "%" value}
    hash = the chunk hash as a number: lower-case hex without leading zeros
         | all its hex digits, where an engine hands over bytes
    dtype = "half" | "bfloat16" | "float" | "double" | "int8" | "uint8" | "fp8_e4m3fn" | ...

Tags come from a request's configuration ("lmcache.tag.<tag>") in its order. With
`save_only_first_rank` the world size is 1. A "@" in the model or a value, and a "%" in a tag's
name, make the text ambiguous; a KeyFormatWarning says so.

Keys of the multiprocess server (`ObjectKey`), in stores that take text (the native connectors,
Mooncake among them, and S3)::

    key     = model "@" kv_rank "@" object_group "@" hex ["@" cache_salt]
    kv_rank = 8 hex digits: world size, rank, local world size, local rank, one byte each
    object_group = lower-case hex without leading zeros
    hex     = all digits of the chunk hash

Model and salt hold no "@", so this text is unambiguous. File names (its `fs` adapter) differ.

What the two hashes are made of is stated in `kvmask.hashing.lmcache`.

Sources: `lmcache/utils.py`, `v1/distributed/api.py`,
`v1/distributed/l2_adapters/native_connector_l2_adapter.py` and `s3_l2_adapter.py` of LMCache 0.5.6.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvmask._core import KeyBuilder, check_integer, shown
from kvmask.errors import ArgumentError, KeyFormatError
from kvmask.keys.base import (
    KeySchema,
    check_counts,
    check_flags,
    check_tags,
    check_text,
    read_digest,
    warn,
)

#: LMCache's names of torch dtypes, by torch's.
DTYPES = {
    "float16": "half",
    "bfloat16": "bfloat16",
    "float32": "float",
    "float64": "double",
    "int8": "int8",
    "uint8": "uint8",
    "int16": "int16",
    "int32": "int32",
    "int64": "int64",
    "bool": "bool",
    "float8_e4m3fn": "fp8_e4m3fn",
    "float8_e4m3fnuz": "fp8_e4m3fnuz",
    "float8_e5m2": "fp8_e5m2",
    "float8_e5m2fnuz": "fp8_e5m2fnuz",
}
SALT_FORBIDDEN = "@/\\\0"
SALT_LENGTH = 128

_KEY = re.compile(
    r"(?P<model>.+?)@(?P<world_size>\d+)@(?P<worker_id>\d+)@(?P<hash>[0-9a-f]+)"
    rf"@(?P<dtype>{'|'.join(DTYPES.values())})(?:@(?P<layer>\d+))?(?P<tags>(?:@[^@%]*%[^@]*)*)",
    re.DOTALL,
)
_OBJECT_KEY = re.compile(
    r"(?P<model>[^@]+)@(?P<rank>[0-9a-f]{8})@(?P<group>[0-9a-f]+)@(?P<hash>[0-9a-f]+)"
    r"(?:@(?P<salt>[^@]+))?",
    re.DOTALL,
)


@dataclass(frozen=True, eq=False)
class LMCacheKeys(KeySchema):
    """Keys of LMCache inside an engine process (0.5.6), byte for byte.

    Args:
        model: Model name, whole.
        world_size: Workers of the engine; 1 with `save_only_first_rank`.
        worker_id: Rank of the worker.
        dtype: dtype of the cache, by torch's name or LMCache's.
        layer_id: Layer, for keys of one layer; None for whole chunks.
        tags: Names and values of the request's tags, in its order.
        number: Whether the hash is written as a number, as LMCache's own hashes are.

    Raises:
        ArgumentError: An unknown dtype.
        KeyFormatError: The model name is empty, or a text is not valid Unicode.

    >>> LMCacheKeys("m", 8, 3, "bfloat16").key(bytes.fromhex("00ab"))
    'm@8@3@ab@bfloat16'
    """

    model: str
    world_size: int = 1
    worker_id: int = 0
    dtype: str = "bfloat16"
    layer_id: int | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    number: bool = True
    _builder: KeyBuilder = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_text(self.model, "model")
        check_flags(self, ("number",))
        check_counts(self, ("world_size",), 1)
        check_counts(self, ("worker_id",))
        if not self.model:
            raise KeyFormatError("`model` must name a model, got ''")
        if "@" in self.model:
            warn(f"`model` {self.model!r} holds '@', which separates the parts of a key")
        dtype = DTYPES.get(self.dtype, self.dtype)
        if dtype not in DTYPES.values():
            raise ArgumentError(
                f"`dtype` must be one of {', '.join(DTYPES)}, got {shown(self.dtype)}"
            )
        if self.layer_id is not None:
            check_counts(self, ("layer_id",))
        check_tags(self)
        for name, value in self.tags.items():
            if "@" in name + value or "%" in name:
                warn(f"tag {name!r}: {value!r} holds '@' or '%', which separate the parts of a key")
        self._assemble()

    @property
    def rank_rule(self) -> str:
        """LMCache's own: one object per worker."""
        return "own"

    @property
    def rank_fields(self) -> Mapping[str, str]:
        """The worker's number and their count; a group has none."""
        return {"world_size": "world_size", "worker_id": "world_rank"}

    def _assemble(self) -> None:
        words = [DTYPES.get(self.dtype, self.dtype)]
        if self.layer_id is not None:
            words.append(str(self.layer_id))
        words += [f"{name}%{value}" for name, value in self.tags.items()]
        prefix = f"{self.model}@{self.world_size}@{self.worker_id}@"
        self._build(prefix, "@" + "@".join(words), as_number=self.number)

    @classmethod
    def _candidates(cls, key: str) -> Iterator[tuple[LMCacheKeys, bytes]]:
        found = _KEY.fullmatch(key)
        if not found:
            return
        if "@" in found["model"]:
            raise KeyFormatError(f"a model name with '@' fits several keys, got {key!r}")
        words = found["tags"].split("@")[1:]
        tags = dict(word.split("%", 1) for word in words)
        if len(tags) < len(words):
            raise KeyFormatError(f"a key must not name a tag twice, got {key!r}")
        text = found["hash"]
        digest = read_digest("0" + text if len(text) % 2 else text, key)
        layer = None if found["layer"] is None else int(found["layer"])
        # LMCache's own hashes are numbers of 8 bytes; more digits are those of a whole digest.
        for number in (True, False) if len(text) <= 16 else (False, True):
            schema = cls(
                found["model"],
                int(found["world_size"]),
                int(found["worker_id"]),
                found["dtype"],
                layer,
                tags,
                number,
            )
            yield schema, digest


@dataclass(frozen=True, eq=False)
class LMCacheObjectKeys(KeySchema):
    """Keys of LMCache's multiprocess server (0.5.6) in stores that take text, byte for byte.

    Args:
        model: Model name, whole; without "@".
        world_size: Workers of the engine (tensor times pipeline parallel), at most 255.
        rank: Global rank of the worker.
        local_world_size: Workers on the node; None: ``world_size``, as LMCache passes it.
        local_rank: Rank on the node; None: ``rank``, as LMCache passes it.
        object_group: Index of the object group.
        cache_salt: Salt of the tenant; at most 128 characters, none of them "@", "/", "\\\\", NUL.

    Raises:
        ArgumentError: A rank that does not fit.
        KeyFormatError: Text that the format refuses.

    >>> LMCacheObjectKeys("m", 8, 3).prefix
    'm@08030803@0'
    """

    model: str
    world_size: int = 1
    rank: int = 0
    local_world_size: int | None = None
    local_rank: int | None = None
    object_group: int = 0
    cache_salt: str = ""
    _builder: KeyBuilder = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_text(self.model, "model")
        check_text(self.cache_salt, "cache_salt")
        check_counts(self, ("object_group",))
        if not self.model or "@" in self.model:
            raise KeyFormatError(f"`model` must be text without '@', got {self.model!r}")
        if len(self.cache_salt) > SALT_LENGTH or set(self.cache_salt) & set(SALT_FORBIDDEN):
            raise KeyFormatError(
                f"`cache_salt` must be at most {SALT_LENGTH} characters without '@', '/', "
                f"'\\' and NUL, got {self.cache_salt!r}"
            )
        self._assemble()

    @property
    def rank_rule(self) -> str:
        """LMCache's own: one object per worker."""
        return "own"

    @property
    def rank_fields(self) -> Mapping[str, str]:
        """The worker's number, their count and the object group."""
        return {"world_size": "world_size", "rank": "world_rank", "object_group": "group"}

    def _assemble(self) -> None:
        numbers = {
            "world_size": self.world_size,
            "rank": self.rank,
            "local_world_size": (
                self.world_size if self.local_world_size is None else self.local_world_size
            ),
            "local_rank": self.rank if self.local_rank is None else self.local_rank,
        }
        for name, value in numbers.items():
            numbers[name] = check_integer(value, name, 0, 255)
        kv_rank = bytes(numbers.values()).hex()
        suffix = f"@{self.cache_salt}" if self.cache_salt else ""
        self._build(f"{self.model}@{kv_rank}@{self.object_group:x}@", suffix)

    @classmethod
    def _candidates(cls, key: str) -> Iterator[tuple[LMCacheObjectKeys, bytes]]:
        found = _OBJECT_KEY.fullmatch(key)
        if not found:
            return
        numbers = (*bytes.fromhex(found["rank"]), int(found["group"], 16))
        names = ("world_size", "rank", "local_world_size", "local_rank", "object_group")
        fields: dict[str, Any] = dict(zip(names, numbers, strict=True))
        schema = cls(found["model"], cache_salt=found["salt"] or "", **fields)
        yield schema, read_digest(found["hash"], key)
