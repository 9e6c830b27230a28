"""Keys of SGLang's HiCache over Mooncake, byte for byte.

::

    key    = [tag "_"] [model "_"] [grid "_"] hex "_" owner "_" part
    tag    = `extra_backend_tag` of the storage configuration, when it is set
    model  = the model name with "-" for every "/"
    grid   = "tp" int "_dcp" int "_page" int "_pp" int "_cp" int, sizes, only with DCP
    hex    = the page's hash, 64 lower-case digits
    owner  = tp_rank ["_" pp_rank]               attention with KV heads
           | [pp_rank]                           MLA, alike on every TP rank: may be empty
           | "dcp" int "_cp" int ["_" pp_rank]   MLA with DCP
    part   = "k" | "v"          MLA has "k" only
           | "draft_k" | "draft_v" | "swa" | "swa_k" | "temporal" | "conv_" int | ...

`pp_rank` is there only when the pipeline-parallel size is above 1; the stage of an MLA model then
reads like a TP rank, so that two such deployments must not share model name and tag. Where heads
are split between TP sizes, a rank writes the keys of several `tp_rank`. Mooncake's group id of a
page is ``"sglang-hicache:"`` and the key up to and including `hex`.

What `hex` is made of is stated in `kvmask.hashing.sglang`.

Source: `mem_cache/storage/mooncake_store/mooncake_store.py` of SGLang 0.5.23. The unified key
scheme of that release (``--hicache-storage-key-scheme unified``) is another format and not covered.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from kvmask._core import KeyBuilder, build_keys
from kvmask.errors import ArgumentError, KeyFormatError
from kvmask.keys.base import (
    Hashes,
    KeyRanks,
    KeySchema,
    Mask,
    check_counts,
    check_flags,
    check_text,
    read_digest,
    warn,
)

_PART = re.compile(r"[a-z0-9]+(_[a-z0-9]+)*")
_KEY = re.compile(
    r"(?:(?P<head>.*)_)?(?P<hex>[0-9a-f]{64})"
    r"_(?:dcp(?P<dcp_rank>\d+)_cp(?P<cp_rank>\d+)(?:_(?P<dcp_pp>\d+))?|(?P<owner>\d+(?:_\d+)?|))"
    r"_(?P<part>[a-z][a-z0-9]*(?:_[a-z0-9]+)*)",
    re.DOTALL,
)
_GRID = re.compile(
    r"(?:(?P<model>.*)_)?tp(?P<tp_size>\d+)_dcp(?P<dcp_size>\d+)_page(?P<page_size>\d+)"
    r"_pp(?P<pp_size>\d+)_cp(?P<cp_size>\d+)",
    re.DOTALL,
)

PLACES = MappingProxyType(
    {
        "tp_rank": "tensor",
        "pp_rank": "stage",
        "pp_size": "stage_size",
        "dcp_rank": "context",
        "dcp_size": "context_size",
        "cp_rank": "prefill",
        "cp_size": "prefill_size",
        "tp_size": "tensor_size",
    }
)


@dataclass(frozen=True, eq=False)
class SglangKeys(KeySchema):
    """Keys of one object per page in SGLang's HiCache over Mooncake (0.5.23), byte for byte.

    A page of attention with KV heads is two objects, ``part="k"`` and ``part="v"``: a schema each,
    both of which must be there for the page to be.

    Args:
        model: Model name, path included; empty for none.
        tp_rank: Tensor-parallel rank (of the shard, where heads are split). Not part of MLA's keys.
        pp_rank: Pipeline-parallel rank.
        pp_size: Pipeline-parallel size.
        mla: Whether the model's cache is alike on every TP rank.
        part: Which object of the page.
        backend_tag: The configuration's `extra_backend_tag`; None when it is not set.
        dcp_rank: Decode-context-parallel rank.
        dcp_size: Decode-context-parallel size; the fields after it count only above 1.
        cp_rank: Rank in the attention's context-parallel group.
        cp_size: Size of that group.
        tp_size: Tensor-parallel size.
        page_size: Tokens per page.

    Raises:
        ArgumentError: A rank is not below its size, or DCP without MLA.
        KeyFormatError: Text that the format cannot hold.

    >>> SglangKeys("m", tp_rank=3, part="v").key(bytes(32))[-9:]
    '00000_3_v'
    """

    model: str = ""
    tp_rank: int = 0
    pp_rank: int = 0
    pp_size: int = 1
    mla: bool = False
    part: str = "k"
    backend_tag: str | None = None
    dcp_rank: int = 0
    dcp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    tp_size: int = 1
    page_size: int = 1
    _builder: KeyBuilder = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_text(self.model, "model")
        check_text(self.part, "part")
        check_flags(self, ("mla",))
        check_counts(self, ("tp_rank", "pp_rank", "dcp_rank", "cp_rank"))
        check_counts(self, ("pp_size", "dcp_size", "cp_size", "tp_size", "page_size"), 1)
        for name in ("pp", "dcp", "cp"):
            rank, size = getattr(self, f"{name}_rank"), getattr(self, f"{name}_size")
            if rank >= size:
                raise ArgumentError(
                    f"`{name}_rank` must be below `{name}_size`, got {rank} and {size}"
                )
        if not _PART.fullmatch(self.part):
            raise KeyFormatError(
                f"`part` must be lower-case words joined by '_', got {self.part!r}"
            )
        if self.dcp_size > 1 and not self.mla:
            raise ArgumentError(f"`dcp_size` must be 1 without `mla`, got {self.dcp_size}")
        if self.backend_tag is not None:
            check_text(self.backend_tag, "backend_tag")
            if "_" in self.backend_tag:
                warn(f"`backend_tag` {self.backend_tag!r} holds '_', which separates the parts")
        if "/" in self.model:
            short = self.model.replace("/", "-")
            warn(f"`model` {self.model!r} is keyed as {short!r}, '-' and '/' alike")
        self._assemble()

    @property
    def rank_rule(self) -> str:
        """SGLang's own: an MLA page is one object, any other one per rank."""
        return "equal bytes" if self.mla else "own"

    @property
    def rank_fields(self) -> Mapping[str, str]:
        """Ranks and sizes; a group has none, its `part` tells it apart."""
        return PLACES

    def _filled(self, ranks: KeyRanks) -> dict[str, Any]:
        fields = super()._filled(ranks)
        if ranks.context_size > 1 and not self.mla:
            raise ArgumentError(f"`dcp_size` must be 1 without `mla`, got {ranks.context_size}")
        return fields

    def _assemble(self) -> None:
        words = [] if self.backend_tag is None else [self.backend_tag]
        if self.model:
            words.append(self.model.replace("/", "-"))
        pp = [str(self.pp_rank)] if self.pp_size > 1 else []
        owner = [*pp] if self.mla else [str(self.tp_rank), *pp]
        if self.dcp_size > 1:
            words.append(
                f"tp{self.tp_size}_dcp{self.dcp_size}_page{self.page_size}"
                f"_pp{self.pp_size}_cp{self.cp_size}"
            )
            owner = [f"dcp{self.dcp_rank}_cp{self.cp_rank}", *pp]
        head = "_".join(words) + "_" if words else ""
        self._build(head, f"_{'_'.join(owner)}_{self.part}")

    @property
    def eviction(self) -> KeyBuilder:
        """Builds Mooncake's group ids of pages."""
        return KeyBuilder(f"sglang-hicache:{self._builder.prefix}")

    def mooncake_group_ids(
        self, hashes: Hashes, mask: Mask | None = None, start: int = 0, scale: int = 1
    ) -> list[str]:
        """Mooncake's group ids of the pages that `keys` names, in the same order.

        Args:
            hashes: One digest per page.
            mask: Which pages from ``start`` on; None means all.
            start: First page.
            scale: Digests per page.
        """
        return build_keys((self.eviction,), hashes, mask, start, scale)

    @classmethod
    def _candidates(cls, key: str) -> Iterator[tuple[SglangKeys, bytes]]:
        """Tag and model are joined by "_", which both may hold: all of it is given as the model."""
        found = _KEY.fullmatch(key)
        if not found:
            return
        digest = read_digest(found["hex"], key)
        head = found["head"]
        tag, model = (None, head) if head else ("" if head is not None else None, "")
        part = found["part"]
        if found["dcp_rank"] is not None:
            grid = _GRID.fullmatch(head or "")
            if grid:
                sizes: dict[str, Any] = {
                    name: int(grid[name])
                    for name in ("tp_size", "dcp_size", "page_size", "pp_size", "cp_size")
                }
                sizes |= {"dcp_rank": int(found["dcp_rank"]), "cp_rank": int(found["cp_rank"])}
                pp_rank = int(found["dcp_pp"] or 0)
                model = grid["model"] or ""
                yield cls(model, pp_rank=pp_rank, mla=True, part=part, **sizes), digest
            return
        numbers = [int(word) for word in found["owner"].split("_") if word]
        # One number is a TP rank, or the stage of an MLA model; a draft's own keys do not say.
        if not numbers:
            yield cls(model, mla=True, part=part, backend_tag=tag), digest
        elif len(numbers) == 1:
            yield cls(model, numbers[0], part=part, backend_tag=tag), digest
        else:
            tp_rank, pp_rank = numbers
            yield (
                cls(model, tp_rank, pp_rank, max(2, pp_rank + 1), part=part, backend_tag=tag),
                digest,
            )
