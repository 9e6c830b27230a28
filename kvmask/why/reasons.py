"""Why a hit is not longer: the limits that hold for every request first, then what is missing.

The longest hit is found step by step. With every key there it is what alignment, the last token and
EAGLE leave. With the full-attention groups as they are it ends at the first block that one of them
lacks. Below that, the other groups decide: at each boundary they need the blocks of their window,
their chunk or their state. Each step that shortens the hit is a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmask._core import Bitset
from kvmask.coordinator import Coordinator, Hit, group_row
from kvmask.groups import FullAttention, Group, Mamba, SlidingWindow
from kvmask.why.report import GroupView, Reason, runs_text


@dataclass(frozen=True)
class Evidence:
    """What is known of one request.

    Attributes:
        coord: Masks and hits.
        names: Names of the groups.
        num_tokens: Tokens of the request.
        needed: Per group the digests that can affect a hit, as bits over blocks; with partial hits
            over hash blocks.
        present: Per group those of them that every rank has.
    """

    coord: Coordinator
    names: tuple[str, ...]
    num_tokens: int
    needed: tuple[Bitset, ...]
    present: tuple[Bitset, ...]

    @property
    def usable(self) -> int:
        """The longest aligned prefix without the last token."""
        return self.coord.align(max(0, self.num_tokens - 1))

    def search(self, present: Sequence[Bitset], eagle: bool = True) -> Hit:
        """The hit that a lookup finds with these blocks.

        A hit of the whole request is searched again without its last token, as a lookup does.
        """
        limit = self.coord.align(self.num_tokens)
        hit = self.coord.find_hit(present, limit, eagle)
        if hit.length >= self.num_tokens:
            hit = self.coord.find_hit(present, self.usable, eagle)
        return hit

    def with_only(self, chosen: Sequence[int]) -> tuple[Bitset, ...]:
        """Presence if all groups but the chosen ones had everything."""
        return tuple(
            self.present[g] if g in chosen else self.needed[g] for g in range(len(self.needed))
        )

    def drops(self, index: int) -> bool:
        """Whether a group drops its last block: it, or one of equal rules, is flagged for EAGLE."""
        mine = self.coord.groups[index]
        return mine.drops_for_eagle and any(
            other.eagle
            for other in self.coord.groups
            if other.prefix_cacheable
            and (group_row(other), other.spec) == (group_row(mine), mine.spec)
        )

    def lacking(self, length: int) -> dict[int, tuple[int, ...]]:
        """Per group the blocks that a hit of ``length`` needs and that are missing."""
        masks = self.coord.load_mask(length)
        found: dict[int, tuple[int, ...]] = {}
        for g, group in enumerate(self.coord.groups):
            if not group.prefix_cacheable:
                continue
            wanted = self.wanted(g, length, masks[g])
            missing = tuple(b for b in wanted if not self._has(g, b, length))
            if missing:
                found[g] = missing
        return found

    def wanted(self, index: int, length: int, mask: Bitset | None = None) -> list[int]:
        """The blocks of a group that a hit of ``length`` rests on, the one EAGLE drops included."""
        group = self.coord.groups[index]
        if mask is None:
            mask = self.coord.load_mask(length)[index]
        if not self.drops(index):
            return mask.indices()
        dropped = length // group.block_size
        # A window of one token needs one block, which is then the dropped one.
        alone = isinstance(group, SlidingWindow) and group.span == 1
        return [dropped] if alone else [*mask.indices(), dropped]

    def _has(self, index: int, block: int, length: int) -> bool:
        """Whether a block is there, or, where a hit may end inside of it, enough of it."""
        bits, size = self.present[index], self.coord.groups[index].block_size
        if not self.coord.partial_hits:
            return block < len(bits) and bits[block]
        unit = self.coord.hash_block_size
        last = (block + 1) * size // unit
        first = last - 1
        if block * size < length < (block + 1) * size:
            first = length // unit - 1
            # A state is that of one token. Other blocks may hold more than the hit uses.
            last = first + 1 if isinstance(self.coord.groups[index], Mamba) else last
        return any(bits[i] for i in range(first, min(last, len(bits))))


def explain(
    evidence: Evidence, length: int, views: Sequence[GroupView]
) -> tuple[int, tuple[Reason, ...]]:
    """The longest hit that there could be, and the reasons why the hit is not longer.

    Args:
        evidence: What is known of the request.
        length: The hit.
        views: What each group needs and has.

    Returns:
        (tokens, reasons, the one that decides first).
    """
    longest = evidence.search(evidence.needed).length
    fixed = _fixed(evidence, longest)
    if length >= longest:
        return longest, fixed
    found: list[Reason] = []
    cacheable = [g for g, group in enumerate(evidence.coord.groups) if group.prefix_cacheable]
    full = [g for g in cacheable if isinstance(evidence.coord.groups[g], FullAttention)]
    bound = evidence.search(evidence.with_only(full)).length if full else longest
    if bound < longest:
        found.append(_missing(evidence, full, bound, views))
    if length < bound:
        found.insert(0, _boundary(evidence, cacheable, length, bound, views))
    return longest, (*found, *fixed)


def _fixed(evidence: Evidence, longest: int) -> tuple[Reason, ...]:
    """The limits of a request whose keys are all there."""
    coord, tokens, usable = evidence.coord, evidence.num_tokens, evidence.usable
    unit = coord.hit_alignment
    found = []
    if longest < usable:
        plain = evidence.search(evidence.needed, eagle=False).length
        if coord.align(tokens) > 0 and plain > longest:
            found.append(
                Reason(
                    "eagle",
                    longest,
                    f"EAGLE drops the last matched block, so a hit of {plain} tokens ends "
                    f"at {longest}",
                )
            )
        else:
            found.append(_never(evidence, longest))
    if usable == 0:
        text = (
            f"hits are multiples of {unit} tokens, and the last token is always computed, so a "
            f"prompt needs at least {unit + 1} tokens"
        )
        found.append(Reason("short", 0, text))
    elif coord.align(tokens) > usable:
        text = f"the last token is always computed, and hits are multiples of {unit} tokens"
        found.append(Reason("last token", usable, text))
    elif usable < tokens - 1:
        text = (
            f"hits are multiples of {unit} tokens, so the last {tokens - usable} tokens are "
            "always computed"
        )
        found.append(Reason("alignment", usable, text))
    else:
        found.append(Reason("last token", usable, "the last token is always computed"))
    return tuple(found)


def _never(evidence: Evidence, longest: int) -> Reason:
    """Why a hit with everything there is shorter than alignment and the last token leave."""
    for g, group in enumerate(evidence.coord.groups):
        alone = isinstance(group, SlidingWindow) and group.span == 1
        if group.prefix_cacheable and alone and not evidence.drops(g):
            text = (
                f"{_title(evidence, g)} is never stored, so there is never a hit: it should be "
                "`prefix_cacheable=False`"
            )
            return Reason("never", longest, text, g)
    text = "no longer prefix ends where a block of every group ends"
    return Reason("never", longest, text)


def title(index: int, name: str, group: Group) -> str:
    """A group in a sentence.

    >>> title(1, "swa", FullAttention(64))
    'group 1 "swa" (full attention, blocks of 64)'
    """
    shown = "" if name == str(index) else f' "{name}"'
    return f"group {index}{shown} ({group.title}, blocks of {group.block_size})"


def _title(evidence: Evidence, index: int) -> str:
    return title(index, evidence.names[index], evidence.coord.groups[index])


def _tokens(block: int, group: Group) -> str:
    return f"tokens {block * group.block_size} to {(block + 1) * group.block_size - 1}"


def _missing(
    evidence: Evidence, full: Sequence[int], bound: int, views: Sequence[GroupView]
) -> Reason:
    """The full-attention group whose first missing block ends all hits."""
    lengths = {g: evidence.search(evidence.with_only([g])).length for g in full}
    index = min(lengths, key=lambda g: (lengths[g], g))
    group, view = evidence.coord.groups[index], views[index]
    missing = view.missing.indices()
    if not missing:  # with partial hits the end of the prompt alone can be what is not there
        text = f"{_title(evidence, index)} has nothing that names a longer prefix"
        return Reason("missing", bound, text, index)
    first = missing[0]
    has = view.present.count()
    if has == 0:
        held = f"{_title(evidence, index)} has none of its {len(view.present)} blocks"
    else:
        total = len(view.present)
        held = (
            f"{_title(evidence, index)} has {'block' if has == 1 else 'only blocks'} "
            f"{runs_text(view.present.indices())} of {total}"
            if bound == 0
            else f"{_title(evidence, index)} has {has} of {total} blocks"
        )
    text = (
        f"{held}, and a longer hit needs all from the start: block {first} "
        f"({_tokens(first, group)}) is missing{_ranks(view, (first,))}"
    )
    end = next((i for i, b in enumerate(missing) if b != first + i), len(missing))
    return Reason("missing", bound, text, index, tuple(missing[:end]))


def _boundary(
    evidence: Evidence,
    cacheable: Sequence[int],
    length: int,
    bound: int,
    views: Sequence[GroupView],
) -> Reason:
    """What the groups other than full attention lack at the longest hit that those leave."""
    lacking = evidence.lacking(bound)
    unit = evidence.coord.hit_alignment
    between = (bound - length) // unit - 1
    if lacking:
        index: int | None = next(iter(lacking))
        assert index is not None
        blocks = lacking[index]
        need = evidence.wanted(index, bound)
        size = evidence.coord.groups[index].block_size
        if blocks == (bound // size,) and bound % size:
            what = f"what ends at token {bound} in block {blocks[0]}"
            need = list(blocks)
        else:
            what = f"{'block' if len(need) == 1 else 'blocks'} {runs_text(need)}"
        text = (
            f"a hit of {bound} needs {what} of {_title(evidence, index)}, and "
            f"{_lack(need, blocks)}{_ranks(views[index], blocks)}"
        )
        others = [g for g in lacking if g != index]
        if others:
            text += f"; {_groups(others)} {'lacks' if len(others) == 1 else 'lack'} some there too"
    else:  # hits inside of blocks: the search takes the first of several ends that would do
        index, blocks = None, ()
        text = f"nothing that is there ends a longer prefix in all of {_groups(cacheable)}"
    if between > 0:
        span = f"between {length} and {bound}" if length else "below it"
        text += f"; every length {span} lacks some too"
    return Reason("boundary", bound - unit, text, index, blocks)


def _groups(indices: Sequence[int]) -> str:
    return f"{'group' if len(indices) == 1 else 'groups'} {runs_text(indices)}"


def _lack(need: Sequence[int], missing: Sequence[int]) -> str:
    if len(missing) == len(need):
        return "it is missing" if len(need) == 1 else "none of them is there"
    return f"{runs_text(missing)} {'is' if len(missing) == 1 else 'are'} missing"


def _ranks(view: GroupView, blocks: Sequence[int]) -> str:
    """Which ranks lack blocks, when others have them."""
    if len(view.shards) < 2:
        return ""
    poor = [s for s in view.shards if not all(b < len(s.present) and s.present[b] for b in blocks)]
    if not poor or len(poor) == len(view.shards):
        return ""
    shown = "; ".join(shard.name for shard in poor[:3])
    more = f" and {len(poor) - 3} more" if len(poor) > 3 else ""
    return f" on {shown}{more} (of {len(view.shards)} ranks that hold it)"
