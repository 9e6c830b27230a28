"""Strict keys: no two different schemas give the same text.

A key, byte for byte::

    "kvm1@" model "@" namespace "@" tags "@" fingerprint
    "@tp" int "@pcp" int "@dcp" int "@pp" int "@g" int "@" hex

Free text is percent-escaped (``%`` and ``@``, in tags also ``=`` and ``,``; two lower-case hex
digits), tags are ``name=value`` joined by commas and sorted by name, and the fingerprint is the
first 16 hex digits of the SHA-256 of the facts that two engines must agree on: their JSON with
sorted names and no spaces, in ASCII.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvmask._core import KeyBuilder, shown
from kvmask.errors import ArgumentError, KeyFormatError
from kvmask.keys.base import KeySchema, check_counts, check_tags, check_text, read_digest
from kvmask.keys.vllm import RANK_PLACES, RANKS

_FINGERPRINT = re.compile(r"[0-9a-f]{16}")
_KEY = re.compile(
    r"kvm1@(?P<model>[^@]*)@(?P<namespace>[^@]*)@(?P<tags>[^@]*)@(?P<facts>[0-9a-f]{16})"
    r"@tp(?P<tp_rank>\d+)@pcp(?P<pcp_rank>\d+)@dcp(?P<dcp_rank>\d+)@pp(?P<pp_rank>\d+)"
    r"@g(?P<group_id>\d+)@(?P<hex>[0-9a-f]+)",
    re.DOTALL,
)


def escape(text: str, also: str = "") -> str:
    """Percent-escape the separators of strict keys, so that joined parts stay apart.

    >>> escape("a@b%c")
    'a%40b%25c'
    """
    for char in "%@" + also:
        text = text.replace(char, f"%{ord(char):02x}")
    return text


def unescape(text: str) -> str:
    """The inverse of `escape`.

    >>> unescape("a%40b%25c")
    'a@b%c'
    """
    return re.sub("%([0-9a-f]{2})", lambda found: chr(int(found[1], 16)), text)


def _check_mapping(facts: object) -> None:
    if not isinstance(facts, Mapping):
        raise TypeError(f"`facts` must be a mapping, got {type(facts).__name__}")


def fingerprint(facts: Mapping[str, str | int | bool | None]) -> str:
    """16 hex digits that stand for facts two engines must agree on to share keys.

    Args:
        facts: Names to text, integers, booleans or None.

    Raises:
        ArgumentError: Something else is among them.

    >>> fingerprint({"dtype": "bf16"}) == fingerprint({"dtype": "fp8"})
    False
    """
    _check_mapping(facts)
    for name, value in facts.items():
        if isinstance(value, int) and value.bit_length() > 256:
            raise ArgumentError(
                "`facts` must hold integers of at most 256 bits, "
                f"got {name!r} with {value.bit_length()}"
            )
        if not isinstance(name, str) or not isinstance(value, str | int | type(None)):
            raise ArgumentError(
                "`facts` must map text to text, integers or None, "
                f"got {shown(name)}: {shown(value)}"
            )
    import json  # `import kvmask` does not need it

    text = json.dumps(dict(facts), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
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
        facts_digest: The fingerprint of facts that are not at hand, as `parse` gives it.

    Raises:
        ArgumentError: Both ``facts`` and another fingerprint.
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
    facts_digest: str = ""
    _builder: KeyBuilder = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_text(self.model, "model")
        check_text(self.namespace, "namespace")
        check_counts(self, RANKS)
        if not self.model.strip("/"):
            raise KeyFormatError(f"`model` must name a model, got {self.model!r}")
        check_tags(self)
        check_text(self.facts_digest, "facts_digest")
        _check_mapping(self.facts)
        digest = self.facts_digest or fingerprint(self.facts)
        if not _FINGERPRINT.fullmatch(digest):
            raise KeyFormatError(f"`facts_digest` must be 16 hex digits, got {digest!r}")
        if self.facts and digest != fingerprint(self.facts):
            raise ArgumentError(f"`facts_digest` must be that of `facts`, got {digest}")
        self._assemble()

    def with_facts(self, facts: Mapping[str, str | int | bool | None]) -> StrictKeys:
        """The same keys under other facts.

        Args:
            facts: Names to text, integers, booleans or None.

        Raises:
            ArgumentError: Something else is among them.
        """
        _check_mapping(facts)
        return self._with(facts=dict(facts), facts_digest="")

    def with_facts_digest(self, digest: str) -> StrictKeys:
        """The same keys under other facts, of which the fingerprint is known.

        Args:
            digest: 16 hex digits.

        Raises:
            ArgumentError: It is not 16 hex digits.

        >>> StrictKeys("m").with_facts_digest("0123456789abcdef").prefix
        'kvm1@m@@@0123456789abcdef@tp0@pcp0@dcp0@pp0@g0'
        """
        if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{16}", digest):
            raise ArgumentError(f"`digest` must be 16 hex digits, got {shown(digest)}")
        return self._with(facts={}, facts_digest=digest)

    @property
    def rank_fields(self) -> Mapping[str, str]:
        """All five are filled in."""
        return RANK_PLACES

    @property
    def eviction(self) -> KeyBuilder:
        """Builds the store's group ids: all ranks and groups of a chunk share one."""
        return KeyBuilder(f"{self._head}@")

    @property
    def _head(self) -> str:
        digest = self.facts_digest or fingerprint(self.facts)
        tags = ",".join(
            f"{escape(k, '=,')}={escape(v, '=,')}" for k, v in sorted(self.tags.items())
        )
        return f"kvm1@{escape(self.model)}@{escape(self.namespace)}@{tags}@{digest}"

    def _assemble(self) -> None:
        self._build(
            f"{self._head}@tp{self.tp_rank}@pcp{self.pcp_rank}@dcp{self.dcp_rank}@pp{self.pp_rank}"
            f"@g{self.group_id}@"
        )

    @classmethod
    def _candidates(cls, key: str) -> Iterator[tuple[StrictKeys, bytes]]:
        found = _KEY.fullmatch(key)
        if not found:
            return
        pairs = [pair.partition("=") for pair in found["tags"].split(",") if pair]
        ranks: dict[str, Any] = {name: int(found[name]) for name in RANKS}
        schema = cls(
            unescape(found["model"]),
            namespace=unescape(found["namespace"]),
            tags={unescape(name): unescape(value) for name, _, value in pairs},
            facts_digest=found["facts"],
            **ranks,
        )
        yield schema, read_digest(found["hex"], key)
