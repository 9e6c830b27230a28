"""Request traces in the FAST'25 Mooncake format: JSON lines, one request each.

    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, ...]}

A hash id stands for 512 tokens and for the whole prefix that ends there. The last one may stand for
fewer tokens. The traces are published with the paper "Mooncake: Trading More Storage for Less
Computation" (FAST'25). `generate` makes a similar trace.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TOKENS_PER_ID = 512
DIGEST_BYTES = 32


@dataclass(frozen=True)
class Request:
    """One line of a trace."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def load(path: str | Path) -> Iterator[Request]:
    """Read a trace.

    Raises:
        ValueError: A line is not a request, or its hash ids do not cover its tokens.
    """
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                request = Request(
                    int(row["timestamp"]),
                    int(row["input_length"]),
                    int(row["output_length"]),
                    tuple(int(i) for i in row["hash_ids"]),
                )
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"line {number} of {path} is no request: {error!r}") from error
            if len(request.hash_ids) != -(-request.input_length // TOKENS_PER_ID):
                raise ValueError(
                    f"line {number} of {path} must have one hash id per {TOKENS_PER_ID} tokens, "
                    f"got {len(request.hash_ids)} and {request.input_length} tokens"
                )
            yield request


def generate(requests: int, seed: int = 1) -> Iterator[Request]:
    """Generate a trace that is similar to the public conversation trace.

    Every request starts with the same 512 tokens. Most requests start a conversation. The others
    continue one, and their prompt contains all earlier prompts and outputs. Lengths are log-normal,
    with a mean near 12,000 tokens and a tail past 100,000.
    """
    pick = random.Random(seed)
    next_id = 1
    clock = 0.0
    open_conversations: list[Request] = []
    for _ in range(requests):
        clock += pick.expovariate(1 / 294)
        kept: tuple[int, ...] = (0,)
        length = 0
        if open_conversations and pick.random() < 0.4:
            before = open_conversations.pop(pick.randrange(len(open_conversations)))
            kept = before.hash_ids[: before.input_length // TOKENS_PER_ID]
            length = before.input_length + before.output_length
            length += int(pick.lognormvariate(6.0, 1.2))
        if not TOKENS_PER_ID < length <= 126_000:
            kept = (0,)
            length = min(126_000, 600 + int(pick.lognormvariate(8.55, 1.1)))
        fresh = -(-length // TOKENS_PER_ID) - len(kept)
        ids = (*kept, *range(next_id, next_id + fresh))
        next_id += fresh
        request = Request(int(clock), length, 1 + int(pick.lognormvariate(5.5, 0.8)), ids)
        open_conversations.append(request)
        if len(open_conversations) > 400:
            open_conversations.pop(0)
        yield request


def agents(requests: int, seed: int = 1) -> Iterator[Request]:
    """Generate a trace of agents: long shared prefixes, branches, and turns seconds apart.

    A session begins with one of 24 system prompts of up to 8,192 tokens, some much more popular
    than others, and a task. Its next turn comes after about four seconds, one of four after about
    two minutes, and its prompt contains all earlier ones. One turn of seven is followed by two to
    four branches, which go on from it or from an earlier turn.
    """
    pick = random.Random(seed)
    next_id = 0

    def fresh(count: int) -> tuple[int, ...]:
        nonlocal next_id
        next_id += count
        return tuple(range(next_id - count, next_id))

    def longer(before: tuple[int, tuple[int, ...]], tokens: int) -> tuple[int, tuple[int, ...]]:
        length, ids = before[0] + tokens, before[1][: before[0] // TOKENS_PER_ID]
        return length, ids + fresh(-(-length // TOKENS_PER_ID) - len(ids))

    systems = [longer((0, ()), TOKENS_PER_ID * pick.randint(1, 16)) for _ in range(24)]
    weights = [1 / (rank + 1) for rank in range(len(systems))]
    # Turns to come: when, a number that keeps the order, and the session's prompts so far.
    turns: list[tuple[float, int, list[tuple[int, tuple[int, ...]]]]] = []
    order = itertools.count()
    clock = 0.0
    for _ in range(requests):
        arrival = clock + pick.expovariate(1 / 3000)
        if turns and turns[0][0] < arrival:
            clock, _, prompts = heapq.heappop(turns)
            added = min(6000, 50 + int(pick.lognormvariate(6.2, 1.0)))
            prompt = longer(prompts[-1], added)
        else:
            clock, prompts = arrival, []
            (system,) = pick.choices(systems, weights)
            prompt = longer(system, 200 + int(pick.lognormvariate(7.3, 0.9)))
        prompts = [*prompts, prompt]
        yield Request(int(clock), prompt[0], 1 + int(pick.lognormvariate(5.0, 0.8)), prompt[1])
        if prompt[0] > 100_000 or pick.random() < 0.3:
            continue
        branches = pick.randint(2, 4) if pick.random() < 1 / 7 else 1
        for branch in range(branches):
            back = 0 if branch == 0 else pick.randrange(min(4, len(prompts)))
            pause = pick.expovariate(1 / 4000 if pick.random() < 0.75 else 1 / 120_000)
            kept = prompts[: len(prompts) - back]
            heapq.heappush(turns, (clock + 300 + pause, next(order), kept))


@functools.lru_cache(4096)
def _digests_of(hash_id: int, per_id: int) -> bytes:
    """Return the digests of the hash blocks that one id covers.

    They depend on the id, which stands for its whole prefix, and on the position within it.
    """
    return hashlib.shake_256(b"kvmask trace %d" % hash_id).digest(per_id * DIGEST_BYTES)


def digests(request: Request, hash_block: int) -> bytes:
    """Return one digest per full hash block of a request."""
    parts = [_digests_of(i, TOKENS_PER_ID // hash_block) for i in request.hash_ids]
    return b"".join(parts)[: request.input_length // hash_block * DIGEST_BYTES]


class Model:
    """Computes the correct hits from hash ids alone, by tracking what was saved."""

    def __init__(self, alignment: int) -> None:
        self.alignment = alignment
        self.stored: dict[int, int] = {}

    def _down(self, num_tokens: int) -> int:
        return num_tokens // self.alignment * self.alignment

    def hit(self, request: Request) -> int:
        """Return the number of tokens that a lookup must find."""
        found = 0
        for i in request.hash_ids:
            here = self.stored.get(i, 0)
            found += here
            if here < TOKENS_PER_ID:
                break
        return self._down(min(found, request.input_length - 1))

    def save(self, request: Request) -> None:
        """Record that the request was saved."""
        left = self._down(request.input_length)
        for i in request.hash_ids:
            self.stored[i] = max(self.stored.get(i, 0), min(left, TOKENS_PER_ID))
            left -= TOKENS_PER_ID
            if left <= 0:
                break
