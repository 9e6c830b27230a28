"""What saves and loads share: keys and descriptors of selected blocks, calls, and outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvmask._core import BlockHashes, PlanPart, describe_parts, read_answers
from kvmask.errors import ArgumentError, PlanStateError
from kvmask.plans.breaker import Breaker, no_answer
from kvmask.plans.calls import WAIT, Call, Guard, check_event, is_wrong_call, new_call
from kvmask.plans.policy import CALL_FAILED, NOT_TRIED, OVERSIZE, StorePolicy
from kvmask.plans.results import BlockFailure, describe
from kvmask.plans.scheme import scheme_of
from kvmask.plans.tools import PlanTools, tools_or_default

Rows = list[list[int]]


def _check_guard(guard: Guard | None, sealed: bool) -> None:
    if (guard is not None and guard.seals) != sealed:
        raise PlanStateError(
            "a sealed contract, and no other, needs tools that seal (`KVTransfer.tools`), "
            f"got sealed={sealed} and guard {guard!r}"
        )


class BlockPlan:
    """What saves and loads share. See `kvmask.plans.calls` for the protocol."""

    # Slots: an instance with more than 30 attributes and no slots is slow to make.
    __slots__ = (
        "_batch",
        "_begun",
        "_breaker",
        "_call",
        "_call_bytes",
        "_calls",
        "_each_bytes",
        "_event",
        "_failed",
        "_failures",
        "_finished",
        "_guard",
        "_hashes",
        "_moved",
        "_num_bytes",
        "_outage",
        "_parts",
        "_policy",
        "_positions",
        "_present",
        "_range",
        "_reported",
        "_runs",
        "_scheme",
        "_stopped",
        "_told",
        "_tools",
        "_total_bytes",
        "_unit",
        "keys",
    )

    def __init__(
        self,
        source: Any,
        hashes: BlockHashes | Sequence[bytes],
        event: Any,
        tools: PlanTools | None,
    ) -> None:
        self._scheme = scheme_of(source, memory=True)
        self._tools = tools_or_default(tools)
        self._policy = self._tools.policy
        self._guard = guard = self._tools.guard
        if guard is not None or self._scheme.sealed:
            _check_guard(guard, self._scheme.sealed)
        self._hashes = self._scheme.hashes(hashes)
        if event is not None:
            check_event(event)
        self._event = event
        self._unit = self._scheme.coord.hash_block_size
        self.keys: list[str] = []
        self._parts: list[PlanPart] = []
        self._failures: list[BlockFailure] = []
        self._failed: set[int] = set()  # their positions among all keys
        self._reported = 0  # failures that `feed` has returned
        self._moved = 0
        self._present = 0
        self._num_bytes = 0
        self._total_bytes = 0  # of the batch
        self._call_bytes = 0  # of the put or get that is on its way
        # The keys that are moved: their positions among all keys, descriptors and bytes.
        self._positions: list[int] | None = None  # None: all keys, in order
        self._batch: tuple[list[str], Rows, Rows] = ([], [], [])
        self._runs: list[tuple[list[int], int]] = []  # bytes of a block's shards, and how often
        self._each_bytes: list[int] | None = None  # of every key; made when somebody asks
        self._calls: list[tuple[int, int]] = []  # the next one last
        self._call: str | None = None  # the name of the call that is on its way
        self._range = (0, 0)
        self._stopped = False
        self._finished = False
        self._breaker = self._tools.breaker
        self._begun: int | None = None  # what `Breaker.outages` was when the call was let through
        self._outage: BaseException | None = None  # why the store is not asked any more
        self._told: int | None = None  # failures before the outage; those after it say nothing new

    def _some_descriptors(self, part: PlanPart, ordinals: list[int]) -> tuple[Rows, Rows]:
        """Addresses and sizes of the keys at these positions of a part. Their bytes are noted
        behind those of the parts before."""
        ids, shards, every = part.block_ids, part.shards, part.num_bytes
        each = [every[i % shards] for i in ordinals]
        self._total_bytes += sum(each)
        self._runs.append((each, 1))
        addresses: Rows = [[]] * len(ordinals)
        sizes: Rows = [[]] * len(ordinals)
        for shard, layout in enumerate(part.group.layouts):
            mine = [p for p, i in enumerate(ordinals) if i % shards == shard]
            rows, pieces = layout.addresses([ids[ordinals[p] // shards] for p in mine])
            for p, row, piece in zip(mine, rows, pieces, strict=True):
                addresses[p] = row
                sizes[p] = piece
        return addresses, sizes

    def _all_descriptors(self) -> tuple[Rows, Rows]:
        """Addresses and sizes of all keys."""
        addresses, sizes, self._total_bytes, self._runs = describe_parts(self._parts)
        return addresses, sizes

    def _bytes(self) -> list[int]:
        """Bytes of every key that is moved."""
        found = self._each_bytes
        if found is None:
            found = []
            for pattern, times in self._runs:
                found += pattern * times
            self._each_bytes = found
        return found

    def _forget_bytes(self) -> None:
        """Begin the descriptors anew."""
        self._runs, self._each_bytes, self._total_bytes = [], None, 0

    def part_of(self, position: int) -> tuple[PlanPart, int]:
        """The part that holds the key at a position of all keys, and its block's index there.

        Args:
            position: Index among all keys of the plan.

        Raises:
            PlanStateError: There is no such key.
        """
        for part in reversed(self._parts):
            if position >= part.first_key:
                return part, (position - part.first_key) // part.shards
        raise PlanStateError(f"no key at position {position} of {len(self.keys)}")

    def position(self, i: int) -> int:
        """Where the key of an entry of the batch stands among all keys.

        Args:
            i: Index among the keys that are moved.
        """
        return i if self._positions is None else self._positions[i]

    def _fail_key(
        self, position: int, code: int, cause: BaseException | None, unsettled: bool = False
    ) -> None:
        """Record a failure of the key at this position of all keys.

        Args:
            position: The position.
            code: The code.
            cause: What the call raised, or why none was made.
            unsettled: Its transfer may still go on.
        """
        part, i = self.part_of(position)
        group = part.group
        if unsettled and self._guard is not None:
            unsettled = not self._guard.isolates
        self._failed.add(position)
        self._failures.append(
            BlockFailure(
                group.index,
                group.name,
                part.blocks[i],
                part.block_ids[i],
                self.keys[position],
                int(code),
                cause,
                unsettled,
            )
        )

    def _cut(self, keys: list[str], addresses: Rows, sizes: Rows, *, put: bool) -> None:
        """Plan the calls for these keys; what no call can hold has failed."""
        self._batch = keys, addresses, sizes
        policy, guard = self._policy, self._guard
        if guard is None and put and type(policy).cut_put is StorePolicy.cut_put:  # it never cuts
            self._calls = [(0, len(keys))] if keys else []
            return
        cut = policy.cut_put if put else policy.cut_get
        if guard is None:
            calls, oversize = cut(self._bytes(), sizes)
        else:
            calls, oversize = guard.cut(cut, self._bytes(), sizes)
        if not oversize and len(calls) == 1 and calls[0] == (0, len(keys)):
            self._calls = [(0, len(keys))]
            return
        self._calls = list(calls)
        if sum(stop - start for start, stop in self._calls) + len(oversize) != len(keys):
            raise ArgumentError(
                "`policy` must put every key into one call, or say that none can hold it, "
                f"got calls {self._calls[:8]} and {len(oversize)} others for {len(keys)} keys"
            )
        self._calls.reverse()
        for i in oversize:
            self._fail_key(self.position(i), OVERSIZE, None)

    def next_call(self) -> Call | None:
        """The next call, or None when all is done.

        Raises:
            PlanStateError: The answer to the last call is missing.
        """
        if self._call is not None:
            raise PlanStateError("`feed` must be given the answer before the next call")
        if self._finished:
            return None
        breaker = self._breaker
        if breaker is not None and self._begun is None:
            # A wait may lie between this and the call of the store.
            self._begun = breaker.outages
            if breaker.open and self._left():
                self._enter(breaker)
        call = self._next()
        if call is None:
            self._finish()
        else:
            self._call = call.name
        return call

    def _next(self) -> Call | None:
        raise NotImplementedError

    def _left(self) -> int:
        """Calls of the store that are still to be made, as far as they are planned."""
        return len(self._calls)

    def _enter(self, breaker: Breaker) -> None:
        """Ask an open breaker whether the next call may be made."""
        cause = breaker.refusal()
        self._begun = breaker.outages
        if cause is not None:
            self._outage = cause
            self._told = len(self._failures)
            self._give_up()

    def _heard(self, codes: list[int] | None = None) -> None:
        """Note that a call of the store came back, with these codes or with success for all."""
        if codes is not None and self._policy.outage(codes):
            self._silent(no_answer(codes))
        elif self._breaker is not None:
            begun, self._begun = self._begun, None
            if self._breaker.open and begun is not None:
                self._tools.answered(begun)

    def _silent(self, error: BaseException) -> None:
        """Note that the store did not answer. To be followed by `_give_up`."""
        self._outage = error
        self._told = len(self._failures)
        begun, self._begun = self._begun, None
        if begun is not None:
            self._tools.unanswered(error, begun)

    def _give_up(self) -> None:
        """After a store that did not answer: the rest fails at once."""
        left = self._left()
        if left and self._tools.stats is not None:
            self._tools.stats.add(spared_calls=left)
        self.stop(cause=self._outage)

    def _finish(self) -> None:
        self._finished = True
        self._check_finished()
        log = self._tools.log
        # The breaker's line tells of an outage, whatever fails through it.
        failures = self._failures if self._breaker is None else self._failures[: self._told]
        if failures and log is not None:
            log.warning("%s", f"{type(self).__name__}: {describe(failures)}"[:1900])

    def _wait(self) -> Call | None:
        """The wait for the event, once, before memory is first touched."""
        event, self._event = self._event, None
        return None if event is None else new_call(WAIT, (event,))

    def _slice(self) -> tuple[list[str], Rows, Rows]:
        """Arguments of the next put or get; `_call_bytes` is what it moves."""
        start, stop = self._range = self._calls.pop()
        keys, addresses, sizes = self._batch
        if start == 0 and stop == len(keys):
            self._call_bytes = self._total_bytes
            return self._batch
        self._call_bytes = sum(self._bytes()[start:stop])
        return keys[start:stop], addresses[start:stop], sizes[start:stop]

    def _take(self) -> str:
        """The name of the call that is answered now; the call is done."""
        name = self._call
        if name is None:
            raise PlanStateError("`feed` must follow a call of `next_call`, got an answer to none")
        self._call = None
        return name

    def _read(self, answer: Any) -> list[int]:
        """The answers to the last put or get, one per key."""
        start, stop = self._range
        call = self._take() if self._call is None else self._call
        given = read_answers(answer, stop - start)
        if self._call is not call or self._range != (start, stop):
            # An iterator's own code, or another thread.
            raise PlanStateError("`feed` must be given an answer once, got it while it was read")
        self._call = None
        return given

    def stop(self, code: int = NOT_TRIED, cause: BaseException | None = None) -> None:
        """Make no further call: the keys that none was made for have failed with this code.

        It can be called while a call is on its way, which must then still be answered.

        Args:
            code: The code of these failures.
            cause: Why; None when nothing raised.
        """
        self._stopped = True
        while self._calls:
            start, stop = self._calls.pop()
            for i in range(start, stop):
                self._fail_key(self.position(i), code, cause)

    def fail(self, error: BaseException) -> None:
        """Take what the last call raised: its keys have failed, and so has all that is left.

        Args:
            error: The exception.

        Raises:
            PlanStateError: There was no call.
            BaseException: ``error`` itself when it says that the call was wrong, with an attribute
                ``partial_result``.
        """
        name = self._take()
        if is_wrong_call(error):
            self._fail_call(name, error)
            self.stop(cause=error)
            self._finish()
            error.partial_result = self.result  # type: ignore[attr-defined]
            raise error
        if name == WAIT:
            self._fail_call(name, error)
            return
        self._silent(error)
        self._fail_call(name, error)
        self._give_up()

    def _fail_call(self, name: str, error: BaseException) -> None:
        """Record that a call raised."""
        if name == WAIT:
            self.stop(CALL_FAILED, error)
            return
        for i in range(*self._range):
            # How far it came is not known.
            self._fail_key(self.position(i), CALL_FAILED, error, True)

    def _news(self) -> tuple[BlockFailure, ...]:
        """The failures since the last answer."""
        news = tuple(self._failures[self._reported :]) if self._failures else ()
        self._reported = len(self._failures)
        return news

    @property
    def failures(self) -> tuple[BlockFailure, ...]:
        """What has failed so far; `result` has it too, at the end."""
        return tuple(self._failures)

    @property
    def result(self) -> Any:
        """What became of the plan.

        Raises:
            PlanStateError: `next_call` has not returned None yet.
        """
        raise NotImplementedError

    def _check_finished(self) -> None:
        if not self._finished:
            raise PlanStateError("`result` is there when `next_call` has returned None")
        accounted = self._moved + self._present + len(self._failures)
        if accounted != len(self.keys):
            raise PlanStateError(
                "a plan must be driven by one thread at a time: "
                f"got word of {accounted} of its {len(self.keys)} keys"
            )
