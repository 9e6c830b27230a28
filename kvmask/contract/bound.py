"""BoundContract: the contract of one rank with its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from kvmask.contract.schemes import bound_scheme
from kvmask.layout import KVLayout
from kvmask.plans.scheme import Scheme
from kvmask.ranks import OwnRanks

if TYPE_CHECKING:
    from kvmask.contract.agreement import Contract

T = TypeVar("T", bound="Frozen")


class Frozen:
    """An object whose attributes are set once, by itself; a copy of it is the object."""

    __slots__ = ()

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a {type(self).__name__} must not be changed, got a new `{name}`")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(
            f"a {type(self).__name__} must not be changed, got a deletion of `{name}`"
        )

    def __copy__(self: T) -> T:
        return self

    def __deepcopy__(self: T, memo: object) -> T:
        return self


class BoundContract(Frozen):
    """The contract of one rank with its memory; made by `Contract.bind`.

    Safe to use from several threads. It stays in its process, as the memory does.

    Attributes:
        contract: The contract.
        layouts: Per group the layouts, one per object that the rank stores of a block.
        scheme: What plans take.
        tp_rank: Tensor-parallel rank.
        pp_rank: Pipeline-parallel rank.
        dcp_rank: Decode-context-parallel rank.
        pcp_rank: Prefill-context-parallel rank.
    """

    __slots__ = ("contract", "dcp_rank", "layouts", "pcp_rank", "pp_rank", "scheme", "tp_rank")

    contract: Contract
    layouts: tuple[tuple[KVLayout, ...], ...]
    scheme: Scheme
    tp_rank: int
    pp_rank: int
    dcp_rank: int
    pcp_rank: int

    def __init__(
        self, contract: Contract, layouts: tuple[tuple[KVLayout, ...], ...], ranks: OwnRanks
    ) -> None:
        scheme = bound_scheme(contract.scheme, contract._filled, contract.ranks, layouts, ranks)
        self._set(contract=contract, layouts=layouts, scheme=scheme, **ranks._asdict())

    def __reduce__(self) -> Any:
        raise TypeError(
            "a BoundContract must stay in its process, where its addresses are: "
            f"pickle its `contract`, got {self!r}"
        )

    def __repr__(self) -> str:
        return (
            f"BoundContract({self.contract!r}, tp_rank={self.tp_rank}, pp_rank={self.pp_rank}, "
            f"dcp_rank={self.dcp_rank}, pcp_rank={self.pcp_rank})"
        )
