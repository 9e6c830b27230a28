"""What became of a save or a load: every planned key is accounted for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class BlockFailure:
    """One key that was not moved.

    Attributes:
        group: Index of the group.
        name: Name of the group.
        block: Index of the block in its group.
        block_id: Its entry in the block table.
        key: The key.
        code: The store's return code; for a get also the number of bytes when it was short.
            `CALL_FAILED` when the call or the wait before it raised, `NOT_TRIED` when none was
            made, `MALFORMED_ANSWER` when the answer did not fit the call.
        cause: What the call raised, or why none was made; None when it answered.
        unsettled: The transfer may still go on: the store can yet read the block, or write it.
    """

    group: int
    name: str
    block: int
    block_id: int
    key: str
    code: int
    cause: BaseException | None = field(default=None, compare=False)
    unsettled: bool = False


def _shown(key: str) -> str:
    """A key in a line of a log: cut, and with escapes when it would break the line."""
    key = key[:200]
    return key if key.isprintable() else repr(key)


def describe(failures: Sequence[BlockFailure]) -> str:
    """Failures in short: how many, which codes, the first three keys, the first cause."""
    if not failures:
        return "none"
    codes = sorted({f.code for f in failures})
    keys = ", ".join(_shown(f.key) for f in failures[:3]) + (", ..." if len(failures) > 3 else "")
    cause = next((f.cause for f in failures if f.cause is not None), None)
    because = "" if cause is None else f" ({repr(cause)[:300]})"
    return f"{len(failures)} with codes {codes[:8]}{because}: {keys}"


def quarantine(failures: Sequence[BlockFailure]) -> dict[str, list[int]]:
    """Per group, by name, the ids of the blocks whose transfers may still go on, ascending."""
    found: dict[str, set[int]] = {}
    for failure in failures:
        if failure.unsettled:
            found.setdefault(failure.name, set()).add(failure.block_id)
    return {name: sorted(ids) for name, ids in found.items()}


def _and_quarantined(groups: dict[str, list[int]]) -> str:
    count = sum(map(len, groups.values()))
    return f"; {count} blocks in quarantine" if count else ""


def _shape(result: Any, *names: str) -> str:
    """A result for a debugger: its fields, and its failures in short."""
    texts = ((name, repr(getattr(result, name))) for name in names)
    shown = ", ".join(f"{k}={v if len(v) <= 200 else v[:200] + '...'}" for k, v in texts)
    return f"{type(result).__name__}({shown}, failures=<{describe(result.failures)}>)"


@dataclass(frozen=True, slots=True, repr=False)
class SaveResult:
    """What became of a save: every planned key is stored, was present, or failed.

    Attributes:
        stored: Keys written.
        present: Keys that the store had already.
        failures: The others, each with its code and cause.
        mark: Tokens. What this rank has to write below it is in the store; the next save of the
            request begins here. Where several ranks hold the same bytes, each writes a part: what
            the others wrote is not known here. Where the table of a window, a chunk or a state has
            an empty entry, there is nothing to write.
        writers: How many ranks share the writing, in the group where they are most; with 1 the
            mark speaks of all bytes.
        num_bytes: Bytes written.
        pressure: The store had no room for some of it: worth another try later.
        quarantined: Per group, by name, the block ids that the store may still read, ascending. A
            put that timed out is not cancelled: until the store's client is closed, what is
            written to these blocks can be sent in place of what was to be saved.
        owner: What the plan was made by, as `CacheRequest` says it; None for plans made otherwise.
    """

    stored: int
    present: int
    failures: tuple[BlockFailure, ...]
    mark: int
    writers: int
    num_bytes: int
    pressure: bool = False
    quarantined: dict[str, list[int]] = field(default_factory=dict)
    owner: object = field(default=None, compare=False)

    @property
    def ok(self) -> bool:
        """Nothing failed."""
        return not self.failures

    def __repr__(self) -> str:
        names = ("stored", "present", "mark", "writers", "num_bytes", "pressure", "quarantined")
        return _shape(self, *names)

    def __str__(self) -> str:
        part = "" if self.writers == 1 else f" of this rank's part (1 of {self.writers})"
        return (
            f"saved up to token {self.mark}{part}: {self.stored} keys stored "
            f"({self.num_bytes} bytes), {self.present} present, failed: {describe(self.failures)}"
            f"{_and_quarantined(self.quarantined)}"
        )


@dataclass(frozen=True, slots=True, repr=False)
class LoadResult:
    """What became of a load: every planned key is loaded or failed.

    Attributes:
        loaded: Keys read whole.
        failures: The others, each with its code and cause.
        num_bytes: Bytes read.
        invalid: Per group, by name, the block ids that hold nothing that may be used, ascending.
            Only groups with failures are named.
        usable_tokens: Tokens of the longest prefix that can be used all the same: the hit's length
            when nothing failed. The engine computes from here on.
        quarantined: Per group, by name, the block ids that the store may still write, ascending;
            all are invalid too. A get that timed out is not cancelled: until the store's client
            is closed, its bytes can arrive and overwrite what these blocks hold by then.
        held: What the engine held itself at the lookup, as `kvmask.plans.held` has it; None when it
            was nothing. Whether the store has that is not known.
        owner: As in `SaveResult`.
    """

    loaded: int
    failures: tuple[BlockFailure, ...]
    num_bytes: int
    invalid: dict[str, list[int]]
    usable_tokens: int
    quarantined: dict[str, list[int]] = field(default_factory=dict)
    held: Any = field(default=None, compare=False)
    owner: object = field(default=None, compare=False)

    @property
    def ok(self) -> bool:
        """Nothing failed."""
        return not self.failures

    def __repr__(self) -> str:
        return _shape(self, "loaded", "num_bytes", "invalid", "usable_tokens", "quarantined")

    def __str__(self) -> str:
        return (
            f"{self.loaded} keys loaded ({self.num_bytes} bytes), {self.usable_tokens} tokens "
            f"usable, failed: {describe(self.failures)}{_and_quarantined(self.quarantined)}"
        )
