"""Draw the pictures of the documentation into docs/figures.

    python scripts/figures.py [FOLDER]

Blocks and keys come from kvmask itself: its masks, and lookups that are driven here. Latencies come
from docs/figures/replay.json, which `--replay` makes from figures of the replay:

    python bench/replay.py --trace conversation_trace.jsonl --json dsv4.json
    python bench/replay.py --agents --requests 3000 --json agents.json
    python scripts/figures.py --replay dsv4.json agents.json --title Conversations Agents \
        --source "what was run, and where"

The pictures are checked in. A test draws them again and compares.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from drawing import Drawing, LogPlot

from kvmask import (
    Contract,
    CostModel,
    FullAttention,
    LookupPlan,
    PlanTools,
    SlidingWindow,
    VllmKeys,
)
from kvmask.groups import Group

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))
FOLDER = ROOT / "docs" / "figures"
REPLAY = FOLDER / "replay.json"
GROUPS: tuple[Group, ...] = (FullAttention(64), SlidingWindow(16, window=32))
NAMES = ("full attention", "window of 32 tokens")
HASH_BLOCK = 16
LEFT, CELLS = 150, 512  # where rows of blocks begin, and how wide they are
ROW = 18

Found = list[set[int]]  # per group the blocks that something holds for


def drive(plan: LookupPlan, present: Callable[[int, int], bool]) -> list[Found]:
    """Drive a lookup, and return per call the blocks that it asks for.

    Args:
        plan: A lookup under a contract with `VllmKeys`, whose digests are numbers from 0 on.
        present: Says of a group and a block whether the store has it.
    """
    calls = []
    while (call := plan.next_call()) is not None:
        asked: Found = [set() for _ in GROUPS]
        answers = []
        for key in call.args[0]:
            match = re.search(r"group:(\d+)@([0-9a-f]+)$", key)
            assert match is not None
            group = int(match[1])
            block = (int(match[2], 16) + 1) * HASH_BLOCK // GROUPS[group].block_size - 1
            asked[group].add(block)
            answers.append(int(present(group, block)))
        plan.feed(answers)
        calls.append(asked)
    return calls


def numbered(num_tokens: int) -> list[bytes]:
    """Digests that say which hash block they are of."""
    return [n.to_bytes(32, "big") for n in range(num_tokens // HASH_BLOCK)]


def row(
    draw: Drawing, y: float, group: int, num_tokens: int, label: str, cells: dict[str, set[int]]
) -> None:
    """Draw the blocks of a group in the scale of tokens; `cells` are blocks by class."""
    size = GROUPS[group].block_size
    step = CELLS * size / num_tokens
    draw.text(LEFT - 8, y + 11, label, "soft", "end")
    for block in range(num_tokens // size):
        name = next((name for name, blocks in cells.items() if block in blocks), "none")
        draw.rect(name, LEFT + block * step, y, step - 1, 13)


def window_blocks() -> str:
    """What is stored, asked and loaded of a window group, beside full attention."""
    tokens = 512
    contract = Contract(GROUPS, HASH_BLOCK, VllmKeys("m"))
    masks = contract.coordinator
    plan = LookupPlan(contract, numbered(tokens), tokens + 1)
    staged = [set().union(*blocks) for blocks in zip(*drive(plan, lambda *_: True), strict=True)]
    stored, asked, loaded = (
        [
            set(range(tokens // group.block_size)) if mask is None else set(mask.indices())
            for group, mask in zip(GROUPS, found, strict=True)
        ]
        for found in (
            masks.store_mask(tokens),
            masks.lookup_mask(tokens),
            masks.load_mask(tokens),
        )
    )
    draw = Drawing(760, 268, "Blocks that are stored, asked for and loaded, of 512 tokens")
    y = 22.0
    for g, name in enumerate(NAMES):
        size, count = GROUPS[g].block_size, tokens // GROUPS[g].block_size
        draw.text(12, y, f"Group {g}: {name}, {count} blocks of {size} tokens", "head")
        y += 10
        for label, kind, blocks in (
            ("stored", "store", stored[g]),
            ("asked, as vLLM does", "lookup", asked[g]),
            ("asked, staged", "lookup", staged[g]),
            ("loaded", "load", loaded[g]),
        ):
            row(draw, y, g, tokens, label, {kind: blocks})
            draw.text(LEFT + CELLS + 10, y + 11, f"{len(blocks)} of {count}")
            y += ROW
        y += 26
    draw.text(
        12,
        y + 2,
        "A hit can end at each multiple of 64 tokens. There the window needs the two blocks",
    )
    draw.text(12, y + 18, "before the end, and no others. All blocks are in the store here.")
    return draw.svg()


def staged_lookup() -> str:
    """How a staged lookup goes, call by call."""
    tokens, hit_blocks, lost = 1024, 11, {42, 43}
    contract = Contract(GROUPS, HASH_BLOCK, VllmKeys("m"))
    stored = contract.coordinator.store_mask(tokens)[1]

    def present(group: int, block: int) -> bool:
        if group == 0:
            return block < hit_blocks
        inside = block < hit_blocks * 4 and (stored is None or stored[block])
        return inside and block not in lost

    costs = CostModel(call=8 * 0.7e-6)  # so that the first batch is eight blocks
    plan = LookupPlan(contract, numbered(tokens), tokens + 1, tools=PlanTools(costs=costs))
    calls = drive(plan, present)
    hit = plan.result
    draw = Drawing(760, 52 + 62 * len(calls) + 66, "The calls of a staged lookup")
    draw.text(12, 22, "1,024 tokens; the store has the first 704, but lost a window's end", "head")
    draw.legend(
        LEFT, 42, [("store", "asked: there"), ("miss", "asked: missing"), ("stock", "asked before")]
    )
    y = 58.0
    before: Found = [set(), set()]
    for number, asked in enumerate(calls, 1):
        draw.text(12, y + 20, f"call {number}", "head")
        for g, label in enumerate(("full", "window")):
            there = {block for block in asked[g] if present(g, block)}
            cells = {"store": there, "miss": asked[g] - there, "stock": before[g]}
            row(draw, y + g * ROW, g, tokens, label, cells)
            before[g] |= asked[g]
        count = sum(map(len, asked))
        draw.text(LEFT + CELLS + 10, y + 20, f"{count} key{'s' if count > 1 else ''}")
        y += 62
    end = LEFT + CELLS * hit.length / tokens
    draw.line("edge", (end - 0.5, 52), (end - 0.5, y - 20))
    draw.text(end, y - 6, f"hit: {hit.length} tokens", "head", "middle")
    draw.text(
        12,
        y + 20,
        f"{hit.asked} keys in {hit.probes} calls; vLLM asks for {hit.exact_keys} in one.",
    )
    draw.text(
        12,
        y + 38,
        "A first call is for up to 429 blocks, eight here. With a hint, one call is mostly enough.",
        "soft",
    )
    return draw.svg()


def architecture() -> str:
    """The way from tokens to the store."""
    draw = Drawing(760, 330, "The way from tokens to the store")
    draw.box(16, 20, 220, ["groups, keys, ranks, facts", "what engines must agree on"])
    draw.box(300, 20, 160, ["contract", "checked once"], "own")
    draw.box(534, 20, 210, ["bound contract", "memory and rank of a worker"], "own")
    draw.arrow((236, 42), (300, 42))
    draw.arrow((460, 42), (534, 42))
    draw.text(497, 36, "bind", "soft", "middle")
    draw.box(16, 112, 160, ["tokens", "or an engine's digests"])
    draw.box(300, 112, 160, ["request", "digests, how far saved"], "own")
    draw.arrow((176, 134), (300, 134))
    draw.text(238, 128, "hash", "soft", "middle")
    draw.arrow((380, 64), (380, 112))
    draw.box(300, 204, 220, ["plan: lookup, save or load", "keys, addresses, sizes; no I/O"], "own")
    draw.arrow((380, 156), (380, 204))
    draw.arrow((640, 64), (640, 180), (500, 180), (500, 204))
    draw.box(16, 204, 184, ["engine's block tables", "and what it holds itself"])
    draw.arrow((200, 226), (300, 226))
    draw.box(300, 280, 220, ["transfer, or your own loop"], "own")
    draw.arrow((360, 248), (360, 280))
    draw.text(352, 268, "next call", "soft", "end")
    draw.arrow((460, 280), (460, 248))
    draw.text(468, 268, "answer", "soft")
    draw.box(610, 280, 134, ["store"])
    draw.arrow((520, 288), (610, 288))
    draw.arrow((610, 300), (520, 300))
    return draw.svg()


def vllm_process() -> str:
    """A vLLM process with kvmask's connector."""
    draw = Drawing(760, 388, "A request in vLLM with kvmask's connector")
    draw.legend(12, 20, [("own", "replaced by kvmask"), ("box", "vLLM's own")])
    draw.rect("edge", 12, 50, 320, 278, round_=8)
    draw.text(24, 44, "Scheduler", "head")
    draw.rect("edge", 428, 50, 320, 278, round_=8)
    draw.text(440, 44, "Worker, one per GPU", "head")
    draw.box(36, 62, 272, ["request's tokens", "from the API server"])
    draw.box(36, 128, 272, ["block hasher", "the same digests, in C"], "own")
    draw.box(36, 194, 272, ["lookup", "few keys, and a deadline"], "own")
    draw.box(36, 260, 272, ["vLLM's scheduler", "blocks for the hit and for the rest"])
    for y in (106, 172, 238):
        draw.arrow((172, y), (172, y + 22))
    draw.text(180, 253, "length of the hit", "soft")
    draw.arrow((308, 282), (428, 282))
    draw.text(380, 250, "what to load,", "soft", "middle")
    draw.text(380, 266, "compute, save", "soft", "middle")
    draw.arrow((36, 216), (24, 216), (24, 344))
    draw.text(32, 322, "which keys are there?", "soft")
    draw.box(446, 62, 284, ["model runner", "computes what was not hit"])
    draw.box(446, 138, 284, ["KV cache", "blocks in GPU memory"])
    draw.arrow((588, 106), (588, 138))
    draw.box(446, 216, 134, ["receiving thread", "which blocks,", "keys, addresses"], "own")
    draw.box(596, 216, 134, ["sending thread", "which blocks,", "keys, addresses"], "own")
    draw.arrow((513, 216), (513, 182))
    draw.arrow((663, 182), (663, 216))
    draw.arrow((513, 344), (513, 276))
    draw.arrow((663, 276), (663, 344))
    draw.text(521, 310, "get", "soft")
    draw.text(671, 310, "put", "soft")
    draw.rect("box", 12, 344, 736, 32, round_=5)
    draw.text(
        380, 365, "Mooncake store: the same keys and bytes as without kvmask", "head", "middle"
    )
    return draw.svg()


def keys_by_length() -> str:
    """Keys that one lookup asks for, against the length of the prompt."""
    from shapes import SHAPES

    titles = {"dsv4": "DeepSeek-V4", "gemma": "Gemma", "full16": "full attention"}
    lengths = [1 << n for n in range(11, 21)]
    draw = Drawing(760, 312, "Keys asked for in one lookup, against the length of the prompt")
    draw.text(12, 22, "Keys that one lookup asks for, against the tokens of the prompt", "head")
    draw.legend(
        12,
        44,
        [
            ("stock", "vLLM"),
            ("lookup", "kvmask, all is stored"),
            ("store", "kvmask, nothing is stored"),
        ],
    )
    for i, (name, title) in enumerate(titles.items()):
        shape = SHAPES[name]
        contract = shape.contract()
        plot = LogPlot(
            draw, (68 + i * 232, 86, 190, 170), (lengths[0], lengths[-1]), (5, 1_000_000)
        )
        plot.axes(
            title,
            [(1 << 11, "2k"), (1 << 14, "16k"), (1 << 17, "131k"), (1 << 20, "1M")],
            [(10, "10"), (1_000, "1,000"), (100_000, "100,000")]
            if i == 0
            else [(10, ""), (1_000, ""), (100_000, "")],
        )
        found: dict[str, list[tuple[float, float]]] = {"stock": [], "lookup": [], "store": []}
        for length in lengths:
            for answer, kind in ((1, "lookup"), (0, "store")):
                plan = LookupPlan(contract, _digests(length // shape.hash_block), length)
                while (call := plan.next_call()) is not None:
                    plan.feed([answer] * len(call.args[0]))
                found[kind].append((length, plan.result.asked))
            found["stock"].append((length, plan.result.exact_keys))
        for kind, points in found.items():
            plot.curve(kind, points)
    draw.text(
        12,
        302,
        "For full attention alone, vLLM and a staged lookup of a stored prompt ask alike.",
        "soft",
    )
    return draw.svg()


@functools.lru_cache(4)
def _digests(count: int) -> list[bytes]:
    stream = hashlib.shake_256(b"figures").digest(32 * count)
    return [stream[i : i + 32] for i in range(0, len(stream), 32)]


def latencies() -> str:
    """Latencies of the replay: which share of the lookups takes longer than a time."""
    replay = json.loads(REPLAY.read_text(encoding="utf-8"))
    draw = Drawing(760, 474, "Latency of lookups in a replay with a live store")
    draw.text(12, 22, "Share of the lookups that take longer than a time", "head")
    draw.legend(
        12,
        44,
        [("stock", "vLLM"), ("load", "exact"), ("lookup", "staged"), ("store", "staged, hints")],
    )
    for i, panel in enumerate(replay["panels"]):
        plot = LogPlot(
            draw, (60 + i % 2 * 366, 84 + i // 2 * 190, 304, 130), (0.1, 400), (0.001, 1)
        )
        plot.axes(
            panel["title"],
            [(0.1, "0.1 ms"), (1, "1 ms"), (10, "10 ms"), (100, "100 ms")],
            [(1, "100 %"), (0.5, "50 %"), (0.1, "10 %"), (0.01, "1 %"), (0.001, "0.1 %")],
        )
        for side, kind in (
            ("vLLM", "stock"),
            ("exact", "load"),
            ("staged", "lookup"),
            ("hinted", "store"),
        ):
            shares = zip(replay["shares"], panel["milliseconds"][side], strict=True)
            plot.curve(kind, [(ms, 1 - share) for share, ms in shares if share < 1])
    draw.text(12, 446, replay["source"], "soft")
    draw.text(12, 463, "The median is at 50 %, the p99 at 1 %.", "soft")
    return draw.svg()


def take_replay(files: Sequence[str], titles: Sequence[str], source: str) -> None:
    """Write what `latencies` draws, from files that the replay wrote."""
    from replay import SHARES

    panels: list[dict[str, Any]] = []
    for file, title in zip(files, titles, strict=True):
        outcome = json.loads(Path(file).read_text(encoding="utf-8"))
        panels.append(
            {
                "title": title,
                "milliseconds": outcome["quantiles"],
            }
        )
    text = json.dumps({"source": source, "shares": SHARES, "panels": panels})
    REPLAY.write_text(text.replace("}, ", "},\n").replace("], ", "],\n") + "\n", encoding="utf-8")


PICTURES = {
    "window.svg": window_blocks,
    "staged.svg": staged_lookup,
    "architecture.svg": architecture,
    "vllm.svg": vllm_process,
    "keys.svg": keys_by_length,
    "latency.svg": latencies,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--replay", nargs="+", help="files that bench/replay.py --json wrote")
    parser.add_argument("--title", nargs="+", help="what each of them shows")
    parser.add_argument("--source", default="", help="what was run, and where")
    args = parser.parse_args(argv)
    if args.replay:
        take_replay(args.replay, args.title, args.source)
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, picture in PICTURES.items():
        (args.folder / name).write_text(picture(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
