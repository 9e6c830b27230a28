"""LookupPlan: which keys decide how long a reusable prefix is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

from kvmask._core import (
    MAX_TOKENS,
    Bitset,
    BlockHashes,
    LookupCore,
    check_integer,
    read_answers,
    shown,
)
from kvmask.coordinator import Hit
from kvmask.errors import ArgumentError, PlanStateError, StoreError
from kvmask.plans.breaker import Breaker, no_answer
from kvmask.plans.calls import EXISTS, Call, is_wrong_call, new_call
from kvmask.plans.held import held_of
from kvmask.plans.policy import MALFORMED_ANSWER
from kvmask.plans.scheme import Scheme, scheme_of
from kvmask.plans.tools import PlanTools, tools_or_default

Strategy = Literal["staged", "exact"]
STRATEGIES: tuple[Strategy, ...] = ("staged", "exact")
GROWTH = 4


def check_strategy(strategy: Any, name: str = "strategy") -> Strategy:
    """Refuse what is no lookup strategy.

    Args:
        strategy: The argument.
        name: Its name in the message.

    Raises:
        ArgumentError: There is no such strategy.
    """
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        raise ArgumentError(f"`{name}` must be one of {STRATEGIES}, got {shown(strategy)}")
    return "exact" if strategy == "exact" else "staged"


class LookupPlan:
    """The existence calls that decide how long a reusable prefix is, one after another.

    ``exact`` asks once for the keys vLLM would ask, in its order. ``staged`` asks the
    full-attention groups first, in growing batches, until a miss bounds the hit. It then asks only
    for the blocks that the other groups need at the longest length still possible, and moves left
    in growing batches. Both run the same hit search, so they give the same hit as long as the store
    does not change in between. ``staged`` never asks a key twice, nor one that ``exact`` would not
    ask.

    Drive it as `kvmask.plans.calls` says. A plan belongs to one thread at a time.

    Args:
        source: A Contract, bound or not, or a Scheme.
        hashes: One digest for every full hash block of the request.
        num_tokens: Tokens of the request. The last one is always left to compute.
        held: What the engine holds itself: tokens for all groups, or per group tokens or a Bitset
            over its blocks (see `kvmask.plans.held`). Those blocks are not asked for. A hit must be
            longer than what the engine holds; otherwise its length is 0.
        strategy: ``"staged"`` or ``"exact"``.
        tools: Policy, hints, memos and counters; neutral ones by default.

    Attributes:
        scheme: The groups.
        num_tokens: Tokens of the request.

    Raises:
        ArgumentError: A number is out of range, digests are missing, or they are known to be of
            another hash block size, algorithm or start.

    >>> from kvmask import Contract, FullAttention, StrictKeys
    >>> contract = Contract([FullAttention(16)], 16, StrictKeys("m"))
    >>> plan = LookupPlan(contract, [b"a" * 32, b"b" * 32], num_tokens=33)
    >>> while (call := plan.next_call()) is not None: plan.feed([1] * len(call.args[0]))
    >>> plan.result.length
    32
    """

    __slots__ = (
        "_begun",
        "_breaker",
        "_call",
        "_called_at",
        "_coord",
        "_core",
        "_digests",
        "_groups",
        "_held",
        "_hints",
        "_in_store",
        "_known",
        "_remembers",
        "_result",
        "_skipped",
        "_spared",
        "_started",
        "_tools",
        "_vouched",
        "num_tokens",
        "scheme",
    )

    def __init__(
        self,
        source: Any,
        hashes: BlockHashes | Sequence[bytes],
        num_tokens: int,
        *,
        held: Any = 0,
        strategy: Strategy = "staged",
        tools: PlanTools | None = None,
    ) -> None:
        self._started = time.perf_counter()
        self._in_store = 0.0
        self._called_at = 0.0
        # What is of the right kind by its looks is not looked at again: a short lookup takes some
        # microseconds in all.
        scheme = source if type(source) is Scheme else scheme_of(source)
        self.scheme = scheme
        if type(tools) is not PlanTools:
            tools = tools_or_default(tools)
        self._tools = tools
        staged = strategy == "staged" or check_strategy(strategy) == "staged"
        num_tokens = check_integer(num_tokens, "num_tokens", 0, MAX_TOKENS)
        self.num_tokens = num_tokens
        if scheme.check_hashes is None and type(hashes) is BlockHashes:
            digests = hashes
        else:
            digests = scheme.hashes(hashes)
        self._digests = digests
        self._coord = coord = scheme.coord
        if scheme.covers:
            check_digests(scheme, digests, num_tokens)
        self._held = kept = None if held is None else held_of(scheme, held)
        self._hints = hints = tools.hints if staged else None
        hint = 0
        if hints is not None and num_tokens > 1:
            hint = hints.predict(digests, coord.hash_block_size, coord.alignment, num_tokens - 1)
        costs = tools.costs
        self._core = LookupCore(
            scheme.core,
            scheme.namespaces,
            digests,
            num_tokens,
            0 if kept is None else kept.tokens,
            None if kept is None else kept.groups,
            staged=staged,
            first_batch=costs.first_batch,
            growth=GROWTH,
            hint=hint,
            slack=costs.slack,
        )
        self._groups = len(scheme.groups)
        self._remembers = tools.memo is not None or tools.failed_loads is not None
        self._call: list[str] | None = None  # the keys of the call that is on its way
        self._known: list[int | None] = []  # per key of the core's batch, the remembered answer
        self._skipped = 0  # keys that memos answered
        self._vouched = 0  # those of them that count as present
        self._spared = 0  # batches that they answered whole
        self._breaker = tools.breaker
        self._begun = 0  # what `Breaker.outages` was when the call was let through
        self._result: Hit | None = None

    @property
    def hashes(self) -> BlockHashes:
        """The digests of the request."""
        return self._digests

    @property
    def asked(self) -> int:
        """Keys asked so far."""
        return self._core.asked - self._skipped

    @property
    def probes(self) -> int:
        """Calls asked for so far."""
        return self._core.probes - self._spared

    @property
    def exact_keys(self) -> int:
        """Keys that ``exact`` asks for this request."""
        return self._core.exact_keys

    def next_call(self) -> Call | None:
        """The next existence call, or None when the hit is decided.

        Raises:
            PlanStateError: The answer to the last call is missing.
        """
        if self._result is not None:
            return None
        if self._call is not None:
            raise PlanStateError("`feed` must be given the answer before the next call")
        keys = self._core.next_keys()
        if self._remembers:
            keys = self._leave_out(keys)
        if not keys:
            self._finish(None)
            return None
        if self._breaker is not None:
            if self._breaker.open and self._refused(self._breaker, keys):
                return None
            self._begun = self._breaker.outages
        self._call = keys
        self._called_at = time.perf_counter()
        return new_call(EXISTS, (keys,))

    def _refused(self, breaker: Breaker, keys: list[str]) -> bool:
        """Whether an open breaker refuses the call for these keys, which ends the lookup."""
        cause = breaker.refusal()
        if cause is None:
            return False
        self._skipped += len(keys)  # nobody asks for them
        self._spared += 1
        if self._tools.stats is not None:
            self._tools.stats.add(spared_calls=1)
        self._finish(cause)
        return True

    def _leave_out(self, keys: list[str]) -> list[str]:
        """The keys that no memo answers; batches that memos answer whole are fed at once."""
        while keys:
            known: list[int | None] = [None] * len(keys)
            for memo, answer in ((self._tools.memo, 1), (self._tools.failed_loads, 0)):
                if memo is not None:
                    found = memo.known(keys)
                    known = [answer if f else k for f, k in zip(found, known, strict=True)]
            rest = [key for key, k in zip(keys, known, strict=True) if k is None]
            self._skipped += len(keys) - len(rest)
            if self._tools.stats is not None:
                self._tools.stats.add(memo_keys=known.count(1), avoided_keys=known.count(0))
            if rest:
                self._known = known
                return rest
            self._spared += 1
            self._vouched += known.count(1)
            self._core.feed([k for k in known if k is not None])
            keys = self._core.next_keys()
        return keys

    def _taken(self) -> list[str]:
        """The keys of the call that is answered now."""
        keys = self._call
        if keys is None:
            raise PlanStateError("`feed` must follow a call of `next_call`, got an answer to none")
        self._call = None
        self._in_store += time.perf_counter() - self._called_at
        return keys

    def feed(self, answer: Any) -> None:
        """Take the answers to the last call, in its order. Only ``1`` means present.

        A negative answer, or one that does not fit the call, leaves its keys unknown. They count as
        not present in this lookup, and `Hit.unknown` says how many they are. `Hit.cause` names an
        answer that does not fit. When the policy says that the store did not answer, the lookup
        ends as if the call had raised.

        Args:
            answer: One integer per key of the call.

        Raises:
            PlanStateError: There was no call.
        """
        # The answers can be an object with code of its own: the call is done only when they are
        # read.
        keys = self._taken() if self._call is None else self._call
        plain = type(answer) is list and not self._remembers  # what the core reads by itself
        given = answer if plain else read_answers(answer, len(keys))
        if self._call is not keys:
            raise PlanStateError("`feed` must be given an answer once, got it while it was read")
        if not self._remembers:
            core = self._core
            unknown = core.unknown
            core.feed(given)
            self._call = None
            self._in_store += time.perf_counter() - self._called_at
            if core.unknown != unknown and core.unknown - unknown == len(keys):
                self._heard(read_answers(given, len(keys)), 0)
            elif self._breaker is not None and self._breaker.open:
                self._tools.answered(self._begun)
            return
        self._taken()
        if self._heard(given, len(keys)):
            return
        if self._tools.memo is not None:
            self._tools.memo.add(k for k, a in zip(keys, given, strict=True) if a == 1)
        self._vouched += self._known.count(1)
        rest = iter(given)
        self._core.feed([next(rest) if k is None else k for k in self._known])

    def _heard(self, codes: list[int], unanswered: int) -> bool:
        """Note that a call came back. True when it says that the store did not answer, which ends
        the lookup.

        Args:
            codes: The answers.
            unanswered: Keys that the core was not told of.
        """
        if self._tools.policy.outage(codes):
            self._silent(no_answer(codes), unanswered)
            return True
        if self._breaker is not None and self._breaker.open:
            self._tools.answered(self._begun)
        return False

    def _silent(self, error: BaseException, unanswered: int) -> None:
        """End the lookup, because the store did not answer."""
        self._finish(error, unanswered)
        if self._breaker is not None:
            self._tools.unanswered(error, self._begun)
        elif self._tools.log is not None:
            self._tools.log.warning(
                "the store failed to answer %d keys of a lookup: %r", self.result.unknown, error
            )

    def fail(self, error: BaseException) -> None:
        """Take what the last call raised: the lookup ends, with a hit of 0 that names the cause.

        Args:
            error: The exception.

        Raises:
            PlanStateError: There was no call.
            BaseException: ``error`` itself when it says that the call was wrong.
        """
        wrong = is_wrong_call(error)
        keys = self._taken()
        if wrong:
            self._finish(error, len(keys))
            error.partial_result = self._result  # type: ignore[attr-defined]
            raise error
        self._silent(error, len(keys))

    def _finish(self, cause: BaseException | None, unanswered: int = 0) -> None:
        core = self._core
        failed = cause is not None
        found = None if failed else core.result()
        if found is None:
            found = 0, (Bitset.zeros(0),) * self._groups, (0,) * self._groups
        length = found[0]
        if self._hints is not None and length:
            self._hints.learn(
                self._digests, self._coord.hash_block_size, self._coord.alignment, length
            )
        if cause is None and core.malformed:
            cause = StoreError(
                "the store must answer every key with an integer, "
                f"got no usable answer to {core.malformed} of {self.asked} keys",
                MALFORMED_ANSWER,
            )
        other = time.perf_counter() - self._started - self._in_store
        fields = core.fields()
        if self._skipped or unanswered:
            fields["asked"] -= self._skipped
            fields["probes"] -= self._spared
            fields["present"] -= self._vouched
            fields["unknown"] += unanswered
        fields["length"], fields["masks"], fields["tail_tokens"] = found
        fields["store_seconds"], fields["other_seconds"] = self._in_store, other
        fields["cause"], fields["held"] = cause, self._held
        self._result = hit = Hit._looked_up(fields)
        if self._tools.stats is not None:
            self._tools.stats.add_lookup(hit, failed)

    @property
    def result(self) -> Hit:
        """The decided hit.

        Raises:
            PlanStateError: `next_call` has not returned None yet.
        """
        if self._result is None:
            raise PlanStateError("`result` is there when `next_call` has returned None")
        return self._result


def check_digests(scheme: Scheme, digests: BlockHashes, num_tokens: int) -> None:
    """Refuse digests that do not name every full hash block of the tokens.

    Raises:
        ArgumentError: There are too few.
    """
    unit = scheme.coord.hash_block_size
    if num_tokens // unit > len(digests):
        raise ArgumentError(
            "`hashes` must have one digest for every full hash block, "
            f"got {len(digests)} digests of {unit} tokens for {num_tokens} tokens"
        )
