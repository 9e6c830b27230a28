"""Contract: what engines must agree on to share a KV cache, in one object that is checked once.

Two lists. *What shapes keys or bytes* is in the `fingerprint`, which strict keys carry: kinds,
block sizes, windows and chunks of the cacheable groups in order, the hash block, the hash algorithm
and its start, the text around the digest in a key, shards and stages, the facts of the payload that
all ranks have, and the user's own facts. *What is local policy* is not: names, EAGLE, retention,
alignment, partial hits, how states are saved, retained tokens, `spec`, numbers of blocks,
addresses, and which rank it is.

A contract holds no tensor and no rank of its own. `bind` adds both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvmask._core import BlockHashes, shown
from kvmask.contract.bound import BoundContract
from kvmask.contract.memory import (
    LocalShard,
    by_group,
    check_chunks,
    facts_by_shard,
    layout_rows,
    named_groups,
    payload_row,
)
from kvmask.contract.portable import Portable
from kvmask.contract.schemes import lookup_scheme
from kvmask.contract.shape import (
    check_stated,
    digest,
    shape,
    stated_facts,
    states_bytes,
    with_digest,
    without_facts,
)
from kvmask.contract.templates import (
    FilledGroup,
    check_engine,
    check_sealed,
    check_templates,
    group_numbers,
    template_fields,
)
from kvmask.coordinator import Coordinator, group_row
from kvmask.errors import ArgumentError, HashInputError
from kvmask.groups import Group
from kvmask.hashing.chain import BlockHasher
from kvmask.hashing.origin import DigestOrigin
from kvmask.hashing.settings import Hashing, check_digests
from kvmask.hashing.tokens import Tokens
from kvmask.keys.base import KeySchema
from kvmask.keys.strict import StrictKeys
from kvmask.layout import KVLayout
from kvmask.payload import Fact, PayloadFacts
from kvmask.plans.scheme import Scheme
from kvmask.ranks import OwnRanks, RankGrid

if TYPE_CHECKING:
    from kvmask.contract.compare import Difference
    from kvmask.request import CacheRequest

__all__ = ["Contract"]

STATES = ("table", "handoff")
_DEFAULT: Any = object()
_NO_GRID = RankGrid()


class Contract(Portable):
    """What engines must agree on to share a KV cache: portable, checked once, immutable.

    Safe to use from several threads.

    Args:
        groups: The KV cache groups, by name or in order (then named "0", "1", ...). The order is
            that of the engine's block tables.
        hash_block_size: Tokens per block hash.
        keys: A key schema as a template, whose ranks and group are left to the contract; or a
            mapping from group names to one template, or to one per object of a block.
        hashing: Algorithm and start of the digests, by default `Hashing()`. None: they come from
            elsewhere, and no token ids are hashed here.
        alignment: As in Coordinator.
        retention_interval: As in Coordinator.
        partial_hits: As in Coordinator.
        states: "table": state groups are saved by their place in the block table. "handoff": the
            engine hands each state over.
        ranks: The engine's ranks.
        payload: Per group, by name or in order: the KVLayout of any one rank (one per shard), a
            PayloadFacts, or None. Their facts are kept, not their memory.
        facts: What else the bytes depend on: names to text, integers, booleans or None.
        sealed: Every object carries a checksum of its bytes and key, which a load verifies. Needs
            strict keys. In device memory it needs a transfer with bounce memory.

    Attributes:
        names: Names of the groups.
        groups: The groups.
        coordinator: Their masks and hits.
        keys: Per group its templates; none for a group that is not prefix-cacheable.
        hashing: As given.
        states: As given.
        ranks: As given.
        payload: Per group the facts that all ranks share, one entry per object of a block; None
            where nobody stated them.
        facts: The user's facts, with those of the templates.
        sealed: As given.
        fingerprint: 16 hex digits of all that shapes keys or bytes. The same in every process.
        scheme: What plans take; without memory, so for lookups alone.

    Raises:
        ArgumentError: Something breaks a rule.

    >>> from kvmask.groups import FullAttention
    >>> hashing = Hashing(seed="vllm-none-hash")
    >>> Contract({"full": FullAttention(16)}, 16, StrictKeys("org/model"), hashing).names
    ('full',)
    """

    __slots__ = (
        "_filled",
        "_local",
        "coordinator",
        "facts",
        "fingerprint",
        "groups",
        "hashing",
        "keys",
        "names",
        "payload",
        "ranks",
        "scheme",
        "sealed",
        "states",
    )

    names: tuple[str, ...]
    groups: tuple[Group, ...]
    coordinator: Coordinator
    keys: tuple[tuple[KeySchema, ...], ...]
    hashing: Hashing | None
    states: str
    ranks: RankGrid
    payload: tuple[tuple[PayloadFacts, ...] | None, ...]
    facts: Mapping[str, Fact]
    sealed: bool
    fingerprint: str
    scheme: Scheme
    _filled: tuple[FilledGroup, ...]
    _local: Mapping[LocalShard, PayloadFacts]

    def __init__(
        self,
        groups: Mapping[str, Group] | Sequence[Group],
        hash_block_size: int,
        keys: KeySchema | Mapping[str, KeySchema | Sequence[KeySchema]],
        hashing: Hashing | None = _DEFAULT,
        *,
        alignment: int | None = None,
        retention_interval: int | None = None,
        partial_hits: bool = False,
        states: str = "table",
        ranks: RankGrid = _NO_GRID,
        payload: Any = None,
        facts: Mapping[str, Fact] | None = None,
        sealed: bool = False,
    ) -> None:
        names, members = named_groups(groups)
        if hashing is _DEFAULT:
            hashing = Hashing()
        for value, kind, name, wanted in (
            (hashing, Hashing | None, "hashing", "a Hashing, such as Hashing('sha256'), or None"),
            (ranks, RankGrid, "ranks", "RankGrid"),
            (partial_hits, bool, "partial_hits", "bool"),
            (sealed, bool, "sealed", "bool"),
        ):
            if not isinstance(value, kind):
                raise TypeError(f"`{name}` must be {wanted}, got {type(value).__name__}")
        if not isinstance(states, str) or states not in STATES:
            raise ArgumentError(f"`states` must be one of {', '.join(STATES)}, got {shown(states)}")
        coordinator = Coordinator(
            members,
            hash_block_size=hash_block_size,
            alignment=alignment,
            retention_interval=retention_interval,
            partial_hits=partial_hits,
        )
        check_chunks(names, members)
        kinds = [group_row(group)[0] for group in members]
        cacheable = [group.prefix_cacheable for group in members]
        templates = check_templates(keys, names, cacheable)
        check_engine(templates, kinds, ranks)
        if sealed:
            check_sealed(templates)
        numbers = group_numbers(templates)
        shares = ranks.groups(
            names,
            [kind == "state" for kind in kinds],
            [row[0].rank_rule if row else "own" for row in templates],
        )
        rows = [None] * len(names) if payload is None else by_group(payload, names, "payload")
        described = tuple(
            payload_row(
                rows[i],
                f"payload[{names[i]!r}]",
                members[i],
                shares[i],
                ranks.dcp_size,
                len(templates[i]),
                ranks.pp_size,
            )
            if cacheable[i]
            else None
            for i in range(len(names))
        )
        stated = stated_facts(facts, templates, described)
        templates = tuple(tuple(without_facts(schema) for schema in row) for row in templates)
        filled = tuple(
            FilledGroup(row, number, share)
            for row, number, share in zip(templates, numbers, shares, strict=True)
        )
        self._set(
            names=names,
            groups=members,
            coordinator=coordinator,
            keys=templates,
            hashing=hashing,
            states=states,
            ranks=ranks,
            payload=described,
            facts=MappingProxyType(stated),
            sealed=sealed,
            _filled=filled,
            _local=MappingProxyType({}),
        )
        fingerprint = digest(
            shape(
                filled,
                members,
                coordinator.hash_block_size,
                hashing,
                ranks,
                described,
                stated,
                sealed,
            )
        )
        filled = tuple(
            FilledGroup(
                tuple(with_digest(schema, fingerprint) for schema in group.templates),
                group.number,
                group.ranks,
            )
            for group in filled
        )
        self._set(fingerprint=fingerprint, _filled=filled)
        self._set(
            scheme=lookup_scheme(
                coordinator, names, filled, ranks, states == "table", sealed, self.check_hashes
            )
        )

    @property
    def hash_block_size(self) -> int:
        """Tokens per block hash."""
        return self.coordinator.hash_block_size

    @property
    def digest_size(self) -> int | None:
        """Bytes per digest; None when they come from elsewhere."""
        return None if self.hashing is None else self.hashing.digest_size

    @property
    def origin(self) -> DigestOrigin | None:
        """What digests of this contract are made with; None when it cannot hash."""
        if self.hashing is None or self.hashing.start is None:
            return None
        return DigestOrigin(self.hash_block_size, self.hashing.algorithm, self.hashing.start)

    def hasher(self) -> BlockHasher:
        """Hashes the tokens of one request as this contract says.

        Raises:
            HashInputError: The contract does not know its seed, or its digests come from elsewhere.
        """
        if self.hashing is None:
            raise HashInputError(
                "`hashing` of the contract must be given to hash token ids, got None: pass digests"
            )
        start = self.hashing.start_hash
        return BlockHasher(self.hash_block_size, self.hashing.algorithm, parent=start)

    def check_hashes(self, hashes: BlockHashes) -> None:
        """Refuse digests that cannot be this contract's.

        Digests of unknown origin are taken as the contract's own when their width fits.

        Args:
            hashes: One digest per hash block.

        Raises:
            ArgumentError: They are of another width, or known to be of another hash block,
                algorithm or start.
        """
        check_digests(hashes, self.hash_block_size, self.hashing)

    def bind(
        self,
        layouts: Any,
        tp_rank: int | None = None,
        pp_rank: int | None = None,
        dcp_rank: int | None = None,
        pcp_rank: int | None = None,
    ) -> BoundContract:
        """Give the contract of one rank with its memory.

        Args:
            layouts: Per group, by name or in order, the KVLayout of this rank: one, or one per
                shard that the rank stores (also as `head_shards` gives them). Groups that are not
                prefix-cacheable need none. None for a group without layers on this stage.
            tp_rank: Tensor-parallel rank. It and the next two may be left out where the grid has
                one.
            pp_rank: Pipeline-parallel rank.
            dcp_rank: Decode-context-parallel rank; None: ``tp_rank % dcp_size``.
            pcp_rank: Prefill-context-parallel rank.

        Returns:
            BoundContract, which keeps the layouts.

        Raises:
            ArgumentError: A rank is not of the grid, a layout is missing or one too many, or its
                facts are not the contract's; the message names the group and both values.
        """
        ranks = self.ranks.own(tp_rank, pp_rank, dcp_rank, pcp_rank)
        rows = layout_rows(layouts, self.names, self._filled, ranks)
        for index, row in enumerate(rows):
            if row and self._is_strict(index) and not states_bytes(self.payload[index], self.facts):
                raise ArgumentError(
                    f"`payload` must be given for group {self.names[index]!r}: without facts of "
                    "its bytes strict keys cannot tell unlike caches apart; pass "
                    "`payload=layouts` (or a dtype in `facts`) to the contract, got "
                    f"{self.payload[index]} and facts of {list(self.facts)}"
                )
            shards = self._by_shard(index, row, ranks)
            self._compare(index, shards)
            check_stated(self.facts, shards.values(), f"layouts[{self.names[index]!r}]")
        devices = sorted({str(item.device) for row in rows for item in row if item.storages})
        if len(devices) > 1:
            raise ArgumentError(f"`layouts` must be on one device, got {devices}")
        return BoundContract(self, tuple(tuple(row) for row in rows), ranks)

    def describe_rank(self, layouts: Any, tp_rank: int = 0, pp_rank: int = 0) -> Contract:
        """A contract that also knows what is particular to one rank's memory.

        That is what differs between pipeline stages (layers, bytes of a block) and between uneven
        shards. It stands in the JSON, and `bind` compares it. The fingerprint stays.

        Args:
            layouts: As for `bind`.
            tp_rank: Tensor-parallel rank.
            pp_rank: Pipeline-parallel rank.

        Raises:
            ArgumentError: As for `bind`; or the rank was described otherwise before.
        """
        ranks = self.ranks.own(tp_rank, pp_rank, None, 0)
        known = dict(self._local)
        for index, row in enumerate(layout_rows(layouts, self.names, self._filled, ranks)):
            shards = self._by_shard(index, row, ranks)
            self._compare(index, shards)
            if self.ranks.pp_size > 1 or not self._filled[index].ranks.even:
                known.update(shards)
        return self._knowing(known)

    def _by_shard(
        self, index: int, row: Sequence[KVLayout], ranks: OwnRanks
    ) -> dict[LocalShard, PayloadFacts]:
        return facts_by_shard(
            index, row, self.groups[index], self._filled[index], self.ranks.dcp_size, ranks
        )

    def _compare(self, index: int, shards: Mapping[LocalShard, PayloadFacts]) -> None:
        shared = self.payload[index]
        for shard, facts in shards.items():
            found = []
            if shared is not None:
                found += shared[shard.part].differences(facts, subset=self.ranks.pp_size > 1)
            if shard in self._local:
                found += self._local[shard].differences(facts)
            if found:
                raise ArgumentError(
                    f"`layouts[{self.names[index]!r}]` must have the facts that the contract "
                    f"states of the group, got {'; '.join(dict.fromkeys(found))}"
                )

    def _knowing(self, known: Mapping[LocalShard, PayloadFacts]) -> Contract:
        made = object.__new__(Contract)
        for name in self.__slots__:
            object.__setattr__(made, name, getattr(self, name))
        made._set(_local=MappingProxyType(dict(sorted(known.items()))))
        return made

    def _is_strict(self, index: int) -> bool:
        return any(isinstance(schema, StrictKeys) for schema in self.keys[index])

    def request(
        self,
        token_ids: Tokens | None = None,
        *,
        hashes: Any = None,
        num_tokens: int | None = None,
        num_prompt_tokens: int | None = None,
        extra_keys: Any = None,
    ) -> CacheRequest:
        """A request under this contract; see `kvmask.CacheRequest`.

        Args:
            token_ids: The request's tokens.
            hashes: Or its digests, one per full hash block.
            num_tokens: Tokens of the request, beside ``hashes``.
            num_prompt_tokens: Length of the prompt in tokens.
            extra_keys: What goes into the hashes besides tokens.

        Raises:
            ArgumentError: As for `kvmask.CacheRequest`.
            HashInputError: Tokens or extra keys that have no exact digest.
        """
        from kvmask.request import CacheRequest

        return CacheRequest(
            self,
            token_ids,
            hashes=hashes,
            num_tokens=num_tokens,
            num_prompt_tokens=num_prompt_tokens,
            extra_keys=extra_keys,
        )

    def differences(self, other: Contract) -> list[Difference]:
        """What another contract says otherwise, field by field.

        Args:
            other: The other contract.

        Returns:
            What shapes keys or bytes first. Without any of it the fingerprints are equal.

        >>> from kvmask.groups import FullAttention
        >>> mine = Contract([FullAttention(16)], 16, StrictKeys("m"))
        >>> for found in mine.differences(Contract([FullAttention(32)], 16, StrictKeys("m"))):
        ...     print(found)
        groups[0].block_size 16 and 32
        alignment 16 and 32
        """
        from kvmask.contract.compare import differences

        if not isinstance(other, Contract):
            raise TypeError(f"`other` must be a Contract, got {type(other).__name__}")
        return differences(self, other)

    def _state(self) -> tuple[Any, ...]:
        coord = self.coordinator
        return (
            self.names,
            self.groups,
            coord.hash_block_size,
            coord.alignment,
            coord.retention_interval,
            coord.partial_hits,
            [[(type(schema), template_fields(schema)) for schema in row] for row in self.keys],
            self.hashing,
            self.states,
            self.ranks,
            self.payload,
            dict(self.facts),
            self.sealed,
            dict(self._local),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Contract):
            return NotImplemented
        return self._state() == other._state()

    def __hash__(self) -> int:
        return hash((self.fingerprint, self.names))

    def __repr__(self) -> str:
        return f"Contract({list(self.names)}, fingerprint={self.fingerprint!r})"
