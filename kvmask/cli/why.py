"""`kvmask why`: ask a live store why a prompt does not hit, or not further."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from kvmask._core import Bitset
from kvmask.cli.commands import add_command
from kvmask.cli.explain import counted, describe, draw_mask
from kvmask.cli.numbers import number
from kvmask.cli.options import add_contract_options, contract_of
from kvmask.cli.prompt import add_prompt_options, prompt_tokens
from kvmask.cli.quiet import connect_to_ask
from kvmask.cli.terminal import Paint, Progress, picture_width
from kvmask.cli.usage import UsageError, named
from kvmask.contract import Contract
from kvmask.errors import ArgumentError
from kvmask.hashing.extra_keys import block_extra_keys
from kvmask.why import CHANGES, Diagnosis, GroupView, Near, diagnose, look_near
from kvmask.why.near import MAX_KEYS
from kvmask.why.report import runs_text

_ROWS = (("needed", ""), ("present", "green"), ("missing", "red"), ("rests", "cyan"))
_LABELS = {"rests": "hit"}
# A label, its padding and the counts after a picture.
_BESIDE = 40


def extra_keys_of(args: argparse.Namespace, contract: Contract) -> Any:
    """What salt and adapter put into the hashes: a function of (first block, blocks)."""
    if args.salt is None and args.adapter is None:
        return None
    release = contract.hashing.release if contract.hashing else "0.32"
    size = contract.hash_block_size

    def extra(first: int, blocks: int) -> Sequence[Any]:
        return block_extra_keys(
            first + blocks,
            size,
            adapter=tuple(args.adapter) if args.adapter else None,
            cache_salt=args.salt,
            release=release,
        )[first:]

    return extra


def tries_of(pairs: Sequence[str] | None) -> list[dict[str, str]]:
    """The changes that `--try` names."""
    found = []
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        name = name.replace("-", "_")
        if not equals or name not in CHANGES:
            raise UsageError(
                f"`--try` must be NAME=VALUE with a name out of {', '.join(CHANGES)}, got {pair!r}"
            )
        found.append({name: value})
    return found


def draw_group(view: GroupView, width: int, paint: Paint) -> list[str]:
    """One group: what the hit needs of it, what is there, what is missing, what it rests on."""
    shown = "" if view.name == str(view.index) else f" {view.name!r}"
    blocks = counted(len(view.needed), "block")
    lines = [f"group {view.index}{shown}: {describe(view.group)}, {blocks}"]
    if not view.group.prefix_cacheable:
        return lines
    for name, colour in _ROWS:
        bits: Bitset = getattr(view, name)
        picture = draw_mask(bits, len(bits), width)
        count = bits.count()
        text = f"{count}" if name == "needed" else f"{count} of {view.needed.count()}"
        if name == "rests":
            text = f"{count}"
        elif name != "needed" and 0 < count < view.needed.count():
            text += f": {runs_text(bits.indices(), 3)}"
        painted = paint(picture, colour) if colour else picture
        lines.append(f"  {_LABELS.get(name, name):8} {painted}  {text}")
    if view.inside:
        lines.append(f"  and {counted(view.inside, 'key')} of parts of blocks")
    lines += [f"  {line}" for line in _shard_lines(view)]
    return lines


def _shard_lines(view: GroupView, most: int = 8) -> list[str]:
    """The ranks that lack what others have."""
    if len(view.shards) < 2:
        return []
    wanted = view.needed.count()
    poor = [s for s in view.shards if s.present.count() < wanted]
    if not poor:
        return [f"all {len(view.shards)} ranks have their part"]
    if len(poor) == len(view.shards) and all(s.present == view.present for s in poor):
        return [f"all {len(view.shards)} ranks miss the same"]
    lines = []
    for shard in poor[:most]:
        lack = (view.needed & ~shard.present).indices()
        lines.append(
            f"{shard.name}: {shard.present.count()} of {wanted}, missing {runs_text(lack, 3)}"
        )
    if len(poor) > most:
        lines.append(f"and {counted(len(poor) - most, 'more rank')}")
    return lines


def draw(found: Diagnosis, width: int, paint: Paint) -> str:
    """A diagnosis as text."""
    lines = [paint(found.sentence, "bold")]
    others = found.reasons[1:]
    if found.length < found.longest:
        fixed = "; ".join(r.text for r in others if r.kind not in ("missing", "boundary"))
        lines.append(f"With every key there it would be {found.longest}: {fixed}.")
        others = tuple(r for r in others if r.kind in ("missing", "boundary"))
    lines += [f"Also: {reason.text}." for reason in others]
    if not any(len(view.needed) for view in found.groups):
        return "\n".join(lines)  # no block is whole, so nothing was asked, and there is no picture
    lines += ["", "# all blocks of a cell, + some, . none"]
    for view in found.groups:
        lines += ["", *draw_group(view, width, paint)]
    lines += [
        "",
        f"keys: exact asks {found.exact_keys} in one call, staged {found.staged_keys} in "
        f"{found.staged_calls}; {found.present_keys} of {found.exact_keys} are there",
    ]
    if found.unknown_keys:
        lines.append(
            f"The store gave no usable answer to {counted(found.unknown_keys, 'key')}: "
            "that counts as missing."
        )
    return "\n".join(lines)


def draw_near(tries: Sequence[Near], left: int, length: int, paint: Paint) -> str:
    """The tries as text: those that found something, then how many did not."""
    keys = sum(near.asked for near in tries)
    lines = [f"near: {len(tries)} tried, {counted(keys, 'key')} asked"]
    hits = [near for near in tries if near.length or near.present or not near.decided]
    for near in sorted(hits, key=lambda near: -near.length):
        if not near.decided:
            text = f"{near.present} of the first {near.asked} keys are there; --max-keys ends it"
        elif near.length:
            text = f"a hit of {near.length}"
            text = paint(text, "green") if near.length > length else text
        else:
            text = f"no hit, though {near.present} of {counted(near.asked, 'key')} asked are there"
        lines.append(f"  {near.name}: {text}")
    if not hits:
        lines.append("  none of them has anything")
    if left:
        lines.append(f"  {left} more were not tried: --max-keys bounds the keys")
    return "\n".join(lines)


NOTE = "Asking renewed the leases of the keys that are there, as a lookup does."


def run_why(args: argparse.Namespace) -> int:
    """Run the command."""
    tries = tries_of(getattr(args, "try"))
    if args.max_keys is not None and not (args.near or tries):
        raise UsageError(
            f"`--max-keys` bounds `--near` and `--try`, got {args.max_keys} without them"
        )
    if args.contract == "-" and "-" in (args.tokens, args.text_file):
        raise UsageError("`--contract` must not be - beside a prompt from stdin, got - for both")
    contract = contract_of(args)
    if contract.hashing is not None and not contract.hashing.known:
        raise UsageError(
            "`--seed` must be given for a contract file without its seed, got none: token ids "
            f"cannot be hashed with the start known as {contract.hashing.check} alone"
        )
    tokens = prompt_tokens(args)
    if not tokens:
        raise ArgumentError("the prompt must have at least one token, got none")
    extra = extra_keys_of(args, contract)
    with named({"cache_salt": "--salt", "adapter": "--adapter"}):
        request = contract.request(tokens, extra_keys=extra)
    store = connect_to_ask(args.config, args.master, args.timeout)
    try:
        with Progress("keys asked") as progress:
            found = diagnose(request, store, progress=progress)
        near: tuple[Near, ...] | None = None
        left = 0
        if args.near or tries:
            told = {name: f"--try {name}" for change in tries for name in change}
            if "hash_block" in told:
                told |= {"hash_block_size": "--try hash_block", "block_size": "BLOCK"}
            with named(told), Progress("others tried") as progress:
                near, left = look_near(
                    contract,
                    store,
                    tokens,
                    extra_keys=extra,
                    tries=tries,
                    usual=args.near,
                    max_keys=args.max_keys or MAX_KEYS,
                    progress=progress,
                )
    finally:
        store.close()
    if args.json:
        document = found.plain() | {"fingerprint": contract.fingerprint, "renews_leases": True}
        if near is not None:
            document["near"] = [item.plain() for item in near]
            document["near_left"] = left
        print(json.dumps(document))
        return 0
    paint = Paint()
    print(draw(found, args.width or picture_width(_BESIDE), paint))
    if near is not None:
        print()
        print(draw_near(near, left, found.length, paint))
    if found.present_keys or any(item.present for item in near or ()):
        print(NOTE)
    return 0


def add_why_command(commands: Any) -> None:
    """Add `why` to the subcommands of a parser."""
    parser = add_command(
        commands,
        "why",
        "say why a prompt does not hit in a live store, or not further",
        "Ask a live store for every key that can decide the hit of a prompt. Draw, per group, the "
        "blocks that are needed, present and missing, and those that the hit rests on. Say in a "
        "sentence why the hit is not longer. The client has no transfer engine and gives the pool "
        "no memory. Asking for a key that is there renews its lease, as a lookup does.",
        "kvmask why --contract contract.json --tokens prompt.json --config mooncake.json --near\n"
        "kvmask why --full 64 --swa 16,32 --model m --tokens prompt.json --master 127.0.0.1:50051",
    )
    parser.add_argument(
        "--contract", metavar="FILE", help="the contract of the engine, as JSON, - for stdin"
    )
    parser.add_argument(
        "--seed", help="text of the start hash; default: that of the file, or the engine's own"
    )
    add_contract_options(parser)
    add_prompt_options(parser)
    store = parser.add_argument_group("the store")
    store.add_argument(
        "--config", metavar="PATH", help="the store's JSON file; default: $MOONCAKE_CONFIG_PATH"
    )
    store.add_argument("--master", metavar="HOST:PORT", help="or the address of its master")
    store.add_argument(
        "--timeout",
        type=number(1, 3600),
        default=10,
        metavar="SECONDS",
        help="to wait for the master",
    )
    parser.add_argument(
        "--near",
        action="store_true",
        help="also try other seeds, algorithms, namespaces, ranks and block sizes",
    )
    parser.add_argument(
        "--try",
        action="append",
        metavar="NAME=VALUE",
        help=f"also try this; a name is one of {', '.join(CHANGES)}",
    )
    parser.add_argument(
        "--max-keys",
        type=number(1, 1 << 24),
        metavar="KEYS",
        help=f"that --near and --try may ask for, together; default: {MAX_KEYS}",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--width",
        type=number(1, 10_000),
        help="characters per picture; default: the terminal's width, or 64",
    )
    parser.set_defaults(run=run_why)
