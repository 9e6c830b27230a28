"""RankGrid: how an engine's ranks share the bytes of its KV cache, and who writes what.

A tensor rank ``r`` keeps the keys of one *cell*, a tensor shard and a decode-context rank. Ranks of
equal bytes have one cell. Which cell that is depends on whose keys they are:

=============  ====================================================  ============================
rule           cell of tensor rank ``r``                             keys
=============  ====================================================  ============================
equal bytes    ``(r // w, r % dcp if split else 0)``                 strict keys, SGLang's MLA
vllm           ``(r // f, 0)``, with DCP ``(r, r % dcp)``            vLLM
ascend         ``(r // f, r % dcp)``                                 vllm-ascend
own            ``(r, 0)``                                            SGLang else, LMCache
=============  ====================================================  ============================

``w`` ranks in a row hold the same heads: ``tp_size // min(kv_heads, tp_size)``. ``f`` is
``max(1, tp_size // kv_heads)``. A group of states has 1 for both: its states are cut by their own
heads. A `replication` that the user states comes before either.

The prefill-context rank and the pipeline stage are always part of a key. A store that is cut finer
than the engine (`store_tp_size`) gives each rank several shards in a row.

The replicas of a cell share the writing: replica number ``p``, counted by ascending tensor rank,
writes the blocks ``i`` of group number ``g`` with ``i % copies == (p + g) % copies``.

Sources: `_spec_tp_replication_factor`, `_init_lookup_key_prefixes` and the put step of
`mooncake/store/worker.py`, vLLM 0.33.0; `KVPoolWorker.__init__` of vllm-ascend's `pool_worker.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, NamedTuple

from kvmask._core import check_integer
from kvmask.errors import AlignmentError, ArgumentError

__all__ = ["MAX_RANKS", "RULES", "GroupRanks", "Namespace", "OwnRanks", "RankGrid"]

#: Ranks of an engine above which a grid is refused: a lookup names every one of them.
MAX_RANKS = 1 << 16
RULES = ("equal bytes", "vllm", "ascend", "own")

PerGroup = Any  # one value, a mapping by name, or a sequence in the order of the groups
_Cell = tuple[int, int]


class Namespace(NamedTuple):
    """Whose keys: the ranks in a key.

    Attributes:
        tensor: Tensor-parallel shard.
        context: Decode-context-parallel rank.
        prefill: Prefill-context-parallel rank.
        stage: Pipeline-parallel rank.
    """

    tensor: int
    context: int
    prefill: int
    stage: int


class OwnRanks(NamedTuple):
    """The ranks of one worker.

    Attributes:
        tp_rank: Tensor-parallel rank.
        pp_rank: Pipeline rank.
        dcp_rank: Decode-context-parallel rank.
        pcp_rank: Prefill-context-parallel rank.
    """

    tp_rank: int
    pp_rank: int
    dcp_rank: int
    pcp_rank: int


@dataclass(frozen=True, slots=True)
class GroupRanks:
    """How the ranks of a grid share one group.

    Attributes:
        cells: Per tensor rank the (tensor shard, decode-context rank) of its first shard.
        per_rank: Shards of each rank.
        stages: Pipeline ranks that hold layers of the group.
        prefill_size: Prefill-context-parallel size.
        split: The tokens of a block are spread over the context-parallel ranks.
        uneven_heads: KV heads of the model when shards have different numbers of them; else 0.
    """

    cells: tuple[_Cell, ...]
    per_rank: int
    stages: tuple[int, ...]
    prefill_size: int
    split: bool
    uneven_heads: int = 0

    @property
    def even(self) -> bool:
        """All shards have the same number of heads."""
        return not self.uneven_heads

    @property
    def shards(self) -> int:
        """Tensor shards of the group."""
        return len({tensor for tensor, _ in self.cells}) * self.per_rank

    @property
    def contexts(self) -> int:
        """Decode-context ranks that have keys of their own."""
        return len({context for _, context in self.cells})

    def own(self, tp_rank: int) -> tuple[_Cell, ...]:
        """(tensor shard, decode-context rank) of every shard of a rank."""
        tensor, context = self.cells[tp_rank]
        return tuple((tensor + i, context) for i in range(self.per_rank))

    def namespaces(self) -> tuple[Namespace, ...]:
        """All namespaces, prefill-context ranks outermost, stages innermost, as vLLM asks them."""
        cells: dict[_Cell, None] = {}
        for rank in range(len(self.cells)):
            cells.update(dict.fromkeys(self.own(rank)))
        return tuple(
            Namespace(tensor, context, prefill, stage)
            for prefill in range(self.prefill_size)
            for tensor, context in cells
            for stage in self.stages
        )

    def copies(self, tp_rank: int) -> int:
        """Ranks with the bytes of this one, itself included."""
        return self.cells.count(self.cells[tp_rank])

    def turn(self, tp_rank: int, number: int) -> int:
        """Of each ``copies`` blocks of group ``number``, the one that this rank writes."""
        position = self.cells[:tp_rank].count(self.cells[tp_rank])
        return (position + number) % self.copies(tp_rank)


def _own_rank(value: int | None, size: int, name: str) -> int:
    """A worker's rank. Rank 0 is not guessed: two workers of one rank would share their keys."""
    if value is None:
        if size > 1:
            raise ArgumentError(
                f"`{name}_rank` must be given when there are several, got None for "
                f"`{name}_size` {size}"
            )
        return 0
    rank = check_integer(value, f"{name}_rank", 0)
    if rank >= size:
        raise ArgumentError(f"`{name}_rank` must be below `{name}_size`, got {rank} and {size}")
    return rank


@dataclass(frozen=True)
class RankGrid:
    """The ranks of one engine, as the engine counts them.

    ``kv_heads``, ``replication``, ``context_split`` and ``stages`` are one value for all groups, or
    per group: a mapping by name (groups left out take the default) or a sequence in order, with
    None for the default. What is said of one group comes before what is said of all.

    Args:
        tp_size: Tensor-parallel ranks.
        pp_size: Pipeline stages.
        dcp_size: Decode-context-parallel ranks, which divide the tensor-parallel ones: rank ``r``
            of those has decode-context rank ``r % dcp_size``.
        pcp_size: Prefill-context-parallel ranks.
        kv_heads: KV heads of the model, over all ranks; 1 for latent attention (MLA). It does not
            apply to groups of states.
        replication: How many tensor ranks hold the same bytes, where heads do not say it.
        context_split: Whether context-parallel ranks hold different tokens of a block. Groups of
            states are not split unless it is said of them.
        store_tp_size: Tensor-parallel size that the store's objects are cut for, a multiple of
            ``tp_size``; None: this engine's own.
        stages: Pipeline ranks that hold layers of the group; None: all.

    Raises:
        AlignmentError: Sizes that must divide each other do not.
        ArgumentError: A number is out of range, or there are more than ``MAX_RANKS`` ranks.

    >>> RankGrid(tp_size=8, kv_heads=2)
    RankGrid(tp_size=8, kv_heads=2)
    """

    tp_size: int = 1
    pp_size: int = 1
    dcp_size: int = 1
    pcp_size: int = 1
    kv_heads: PerGroup = None
    replication: PerGroup = None
    context_split: PerGroup = True
    store_tp_size: int | None = None
    stages: PerGroup = None

    def __post_init__(self) -> None:
        for name in ("tp_size", "pp_size", "dcp_size", "pcp_size", "store_tp_size"):
            value = getattr(self, name)
            if value is not None or name != "store_tp_size":
                check_integer(value, name)
                self._set(name, int(value))
        widest = max(self.tp_size, self.store_tp_size or 1)
        if widest * self.pp_size * self.pcp_size > MAX_RANKS:
            raise ArgumentError(
                "`tp_size` (or `store_tp_size`) * `pp_size` * `pcp_size` must be at most "
                f"{MAX_RANKS}, got {widest} * {self.pp_size} * {self.pcp_size}"
            )
        if self.tp_size % self.dcp_size:
            raise AlignmentError(
                f"`tp_size` must be a multiple of `dcp_size`, got {self.tp_size} "
                f"and {self.dcp_size}"
            )
        if self.store_tp_size is not None:
            if self.store_tp_size % self.tp_size:
                raise AlignmentError(
                    f"`store_tp_size` must be a multiple of `tp_size`, got {self.store_tp_size} "
                    f"and {self.tp_size}"
                )
            if self.dcp_size > 1:
                raise ArgumentError(
                    f"`store_tp_size` must be None with `dcp_size` above 1, "
                    f"got {self.store_tp_size} and {self.dcp_size}"
                )
        for name, check in (
            ("kv_heads", _count_or_none),
            ("replication", _count_or_none),
            ("context_split", _flag),
            ("stages", self._stages),
        ):
            self._set(name, _normal(getattr(self, name), name, check))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        said = [
            f"{f.name}={dict(v) if isinstance(v, Mapping) else v!r}"
            for f in fields(self)
            if (v := getattr(self, f.name)) != f.default
        ]
        return f"RankGrid({', '.join(said)})"

    def __hash__(self) -> int:
        return hash((self.tp_size, self.pp_size, self.dcp_size, self.pcp_size, self.store_tp_size))

    def __reduce__(self) -> tuple[Any, ...]:
        values = (getattr(self, f.name) for f in fields(self))
        return RankGrid, tuple(dict(v) if isinstance(v, Mapping) else v for v in values)

    def _stages(self, value: Any, name: str) -> tuple[int, ...] | None:
        if value is None:
            return None
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise TypeError(f"`{name}` must be pipeline ranks, got {type(value).__name__}")
        for stage in value:
            check_integer(stage, name, 0)
        chosen = tuple(sorted({int(stage) for stage in value}))
        if not chosen or chosen[-1] >= self.pp_size:
            raise ArgumentError(
                f"`{name}` must name pipeline ranks from 0 to {self.pp_size - 1}, got {value!r}"
            )
        return chosen

    def own(
        self,
        tp_rank: int | None,
        pp_rank: int | None = None,
        dcp_rank: int | None = None,
        pcp_rank: int | None = None,
    ) -> OwnRanks:
        """The ranks of one worker, checked against the sizes. None is rank 0 of a size of 1.

        Args:
            tp_rank: Tensor-parallel rank.
            pp_rank: Pipeline rank.
            dcp_rank: Decode-context-parallel rank; None stands for ``tp_rank % dcp_size``.
            pcp_rank: Prefill-context-parallel rank.

        Raises:
            ArgumentError: A rank is left out where there are several, is not below its size, or
                ``dcp_rank`` is not ``tp_rank % dcp_size``.
        """
        tensor, stage, prefill = (
            _own_rank(value, size, name)
            for value, size, name in (
                (tp_rank, self.tp_size, "tp"),
                (pp_rank, self.pp_size, "pp"),
                (pcp_rank, self.pcp_size, "pcp"),
            )
        )
        right = tensor % self.dcp_size
        if dcp_rank is not None:
            check_integer(dcp_rank, "dcp_rank", 0)
            if dcp_rank != right:
                raise ArgumentError(
                    "`dcp_rank` must be `tp_rank` % `dcp_size`, "
                    f"got {dcp_rank} for {tensor} % {self.dcp_size}"
                )
        return OwnRanks(tensor, stage, right, prefill)

    def groups(
        self, names: Sequence[str], states: Sequence[bool], rule: Sequence[str]
    ) -> tuple[GroupRanks, ...]:
        """How the ranks share each group.

        Args:
            names: The groups' names.
            states: Whether a group is one of states.
            rule: Per group one of ``RULES``.

        Raises:
            ArgumentError: A statement names no group, two exclude each other, or they do not fit.
        """
        said = {
            name: _per_group(getattr(self, name), name, names)
            for name in ("kv_heads", "replication", "context_split", "stages")
        }
        made = []
        for i, name in enumerate(names):
            heads, of_heads = said["kv_heads"][i]
            replication, of_replication = said["replication"][i]
            split, of_split = said["context_split"][i]
            if heads is not None and replication is not None:
                if of_heads == of_replication:
                    raise ArgumentError(
                        f"`kv_heads` and `replication` exclude each other for group {name!r}, "
                        f"got {heads} and {replication}"
                    )
                heads, replication = (heads, None) if of_heads else (None, replication)
            if states[i]:
                if heads is not None and of_heads:
                    raise ArgumentError(
                        f"`kv_heads` must be None for group {name!r}, whose states are cut by "
                        f"their own heads, got {heads}"
                    )
                heads = None
                split = split and of_split
            stages = said["stages"][i][0] or tuple(range(self.pp_size))
            made.append(
                self._group(name, rule[i], heads, replication, bool(split), states[i], stages)
            )
        if self.store_tp_size is not None and all(
            ranks.shards != self.store_tp_size for ranks in made
        ):
            raise ArgumentError(
                "`store_tp_size` must cut a group: one of attention whose `kv_heads` are given, "
                f"got {self.store_tp_size} and {list(names)}"
            )
        return tuple(made)

    def _group(
        self,
        name: str,
        rule: str,
        heads: int | None,
        replication: int | None,
        split: bool,
        state: bool,
        stages: tuple[int, ...],
    ) -> GroupRanks:
        size, contexts = self.tp_size, self.dcp_size
        per_rank = 1
        if heads is not None and heads < size and size % heads:
            raise AlignmentError(
                f"`tp_size` must be a multiple of `kv_heads` of group {name!r} when it is larger, "
                f"got {size} and {heads}"
            )
        if self.store_tp_size is not None and replication is None and not state:
            if heads is None or heads % self.store_tp_size:
                raise AlignmentError(
                    f"`kv_heads` of group {name!r} must be a multiple of `store_tp_size`, "
                    f"got {heads} and {self.store_tp_size}"
                )
            per_rank = self.store_tp_size // size
            cells = [(rank * per_rank, 0) for rank in range(size)]
        else:
            cells = self._cells(name, rule, heads, replication, split, state)
        return GroupRanks(
            cells=tuple(cells),
            per_rank=per_rank,
            stages=stages,
            prefill_size=self.pcp_size,
            split=split and contexts * self.pcp_size > 1,
            uneven_heads=heads if heads is not None and heads > size and heads % size else 0,
        )

    def _cells(
        self,
        name: str,
        rule: str,
        heads: int | None,
        replication: int | None,
        split: bool,
        state: bool,
    ) -> list[_Cell]:
        size, contexts = self.tp_size, self.dcp_size
        engine = rule in ("vllm", "ascend")
        everyone = rule == "vllm" and contexts > 1
        if everyone and replication not in (None, 1):
            raise ArgumentError(
                f"`replication` of group {name!r} must be 1 in keys of vLLM with `dcp_size` above "
                f"1, where every rank has its own, got {replication} and {contexts}"
            )
        known = heads is not None or replication is not None or state or everyone
        if engine and size > 1 and not known:
            raise ArgumentError(
                f"`kv_heads` or `replication` of group {name!r} must be given with `tp_size` above "
                f"1, because the engine's keys depend on it, got None and {size}"
            )
        same_heads = 1 if heads is None else max(1, size // heads)
        if everyone:
            same_heads = 1
        # Ranks of the same heads and of different tokens stand between replicas.
        spread = contexts if split and rule in ("equal bytes", "ascend") else 1
        if replication is not None:
            same_heads = replication * spread
        elif heads is None and rule == "equal bytes":
            same_heads = spread
        if size % same_heads:
            raise AlignmentError(
                f"`tp_size` must be a multiple of `replication` of group {name!r}"
                f"{' times `dcp_size`' if spread > 1 else ''}, got {size} and {same_heads}"
            )
        if rule == "equal bytes" and same_heads % spread:
            raise AlignmentError(
                f"`dcp_size` must divide the {same_heads} tensor ranks of group {name!r} that hold "
                "the same heads, unless its `context_split` is False, "
                f"got {contexts} and {same_heads}"
            )
        ranks = range(size)
        if rule == "equal bytes":
            return [(r // same_heads, r % contexts if split else 0) for r in ranks]
        if rule == "own":
            return [(r // (replication or 1), 0) for r in ranks]
        return [(r // same_heads, r % contexts) for r in ranks]


def _count_or_none(value: Any, name: str) -> int | None:
    if value is None:
        return None
    check_integer(value, name)
    return int(value)


def _flag(value: Any, name: str) -> bool | None:
    if not isinstance(value, bool | None):
        raise TypeError(f"`{name}` must be True or False, got {type(value).__name__}")
    return value


def _normal(value: Any, name: str, check: Any) -> Any:
    """A checked copy of one value, of a mapping by name or of a sequence in order."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"`{name}` must map the names of groups, got {type(key).__name__}")
        return MappingProxyType({key: check(item, name) for key, item in value.items()})
    is_sequence = isinstance(value, Sequence) and not isinstance(value, str)
    if (
        is_sequence
        and name == "stages"
        and not any(item is None or isinstance(item, Sequence) for item in value)
    ):
        return check(value, name)
    if is_sequence:
        return tuple(check(item, name) for item in value)
    return check(value, name)


def _per_group(value: Any, name: str, names: Sequence[str]) -> list[tuple[Any, bool]]:
    """(value, whether it was said of this group) per group."""
    default = True if name == "context_split" else None
    if isinstance(value, Mapping):
        if unknown := sorted(value.keys() - set(names)):
            raise ArgumentError(
                f"`{name}` must name groups of the contract, got {unknown} and {list(names)}"
            )
        row = [(value.get(group), True) for group in names]
    elif isinstance(value, tuple) and not (name == "stages" and value and _is_count(value[0])):
        if len(value) != len(names):
            raise ArgumentError(
                f"`{name}` must have one entry per group, got {len(value)} and {len(names)}"
            )
        row = [(item, True) for item in value]
    else:
        return [(value, False)] * len(names)
    return [(default, False) if item is None else (item, said) for item, said in row]


def _is_count(value: Any) -> bool:
    return isinstance(value, int)
