"""`kvmask contract`: show, check and compare contract files."""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvmask.cli.commands import add_command
from kvmask.cli.explain import counted, describe
from kvmask.cli.files import why
from kvmask.cli.key import printed
from kvmask.cli.options import contract_text, read_contract
from kvmask.cli.terminal import Paint
from kvmask.cli.usage import UsageError, in_words_of_options
from kvmask.contract import Contract
from kvmask.errors import KVMaskError
from kvmask.keys import StrictKeys


def has_seed(text: str) -> bool:
    """Whether the text of a contract holds its seed, or the start itself."""
    found = json.loads(text).get("hash") or {}
    return "seed" in found or "start" in found


def show_lines(contract: Contract, with_seed: bool) -> Iterator[tuple[str, str]]:
    """(name, text) of each line about a contract. The seed is in it only when asked for."""
    coord, hashing = contract.coordinator, contract.hashing
    yield "fingerprint", contract.fingerprint
    if hashing is None:
        yield "hash", "digests come from elsewhere"
    else:
        known = "known" if hashing.known else "not known: no token ids can be hashed"
        yield "hash", f"{hashing.algorithm} of vLLM {hashing.release}, start {hashing.check}"
        yield "seed", known
        if with_seed and hashing.seed is not None:
            yield "", f"seed {hashing.seed!r}"
        elif with_seed and hashing.start is not None:
            yield "", f"start {hashing.start.hex()}"
    yield "hash block", f"{coord.hash_block_size} tokens"
    partial = ", partial hits" if coord.partial_hits else ""
    yield "alignment", f"{coord.alignment} tokens{partial}"
    dense = coord.retention_interval is None
    yield "retention", "dense" if dense else f"every {coord.retention_interval} tokens"
    yield "states", contract.states
    ranks = repr(contract.ranks).removeprefix("RankGrid")
    yield "ranks", ranks.strip("()") or "one"
    if contract.facts:
        yield "facts", ", ".join(f"{name} {value!r}" for name, value in contract.facts.items())
    for index, group in enumerate(contract.groups):
        shown = "" if contract.names[index] == str(index) else f" {contract.names[index]!r}"
        yield f"group {index}", f"{describe(group)}{shown}"
        builders = contract.scheme.namespaces[index]
        if not builders:
            continue
        first = builders[0]
        count = "" if len(builders) == 1 else f", the first of {len(builders)} namespaces"
        yield "  keys", f"{first.prefix}<digest>{first.suffix}{count}"
        for facts in contract.payload[index] or ():
            text = ", ".join(
                f"{name.replace('_', ' ')} {value}"
                for name, value in facts.plain().items()
                if value is not None and name != "layers"
            )
            yield "  payload", text or "not stated"
    described = len(contract._local)
    if described:
        whose = "its" if described == 1 else "their"
        yield "described", f"{counted(described, 'shard')} with facts of {whose} own"


def run_show(args: argparse.Namespace) -> int:
    """Run `kvmask contract show`."""
    contract = read_contract(args.file, args.seed, "FILE")
    if args.show_seed and (contract.hashing is None or not contract.hashing.known):
        raise UsageError("`--show-seed` needs a contract whose seed is known, got one without")
    if args.json:
        sys.stdout.write(contract.to_json(with_seed=args.show_seed))
        return 0
    for name, text in show_lines(contract, args.show_seed):
        print(f"{name:12} {printed(text)}".rstrip())
    return 0


def notes(path: str, text: str, contract: Contract) -> Iterator[str]:
    """What is not wrong with a contract file, and worth knowing."""
    hashing = contract.hashing
    mode = 0 if path == "-" else stat.S_IMODE(os.stat(path).st_mode)
    if has_seed(text) and mode & 0o077:
        yield f"the file holds the seed, and others can read it (mode {mode:04o}): chmod 600"
    if hashing is not None and not hashing.known:
        yield "its seed is not known here, so it takes digests and no token ids; see --seed"
    for index, row in enumerate(contract.keys):
        if any(isinstance(schema, StrictKeys) for schema in row) and not contract.payload[index]:
            yield (
                f"nothing says what the bytes of group {contract.names[index]!r} are: "
                "engines of unlike caches would not be told apart"
            )


def one_stdin(paths: Sequence[str]) -> None:
    """Refuse standard input that is named twice: it can be read once."""
    if paths.count("-") > 1:
        raise UsageError("`FILE` must be - at most once, got it more often")


def run_check(args: argparse.Namespace) -> int:
    """Run `kvmask contract check`."""
    one_stdin(args.files)
    names = {"path": "FILE"} if args.seed is None else {"path": "FILE", "seed": "--seed"}
    good = True
    for path in args.files:
        try:
            text = contract_text(path)
            contract = Contract.from_json(text, seed=args.seed)
            found = list(notes(path, text, contract))
        except (KVMaskError, TypeError, OSError) as error:
            print(f"FAIL {path}: {in_words_of_options(why(error), names)}")
            good = False
            continue
        groups = counted(len(contract.groups), "group")
        print(f"ok   {path}: fingerprint {contract.fingerprint}, {groups}")
        for note in found:
            print(f"note {path}: {note}")
    return 0 if good else 1


def _plain(value: Any) -> Any:
    """What JSON has no form for: a mapping by group, or a group's `spec`."""
    return dict(value) if isinstance(value, Mapping) else repr(value)


def _value(value: Any) -> str:
    return json.dumps(value, default=_plain)


def share_keys(left: Contract, right: Contract) -> bool:
    """Whether the engines of two contracts ask for keys that the other one's engine writes.

    Strict keys carry the fingerprint, so they are shared when it is the same. Keys in an engine's
    own format can also be shared by engines whose bytes mean something else. Their blocks may even
    be of different sizes: a block is named by the digest of its last hash block, so blocks that end
    at the same token have the same key.
    """
    hashes = [
        (c.hash_block_size, c.hashing and (c.hashing.algorithm, c.hashing.check))
        for c in (left, right)
    ]
    names = [{b for row in c.scheme.namespaces for b in row} for c in (left, right)]
    return hashes[0] == hashes[1] and not names[0].isdisjoint(names[1])


def run_diff(args: argparse.Namespace) -> int:
    """Run `kvmask contract diff`."""
    one_stdin(args.files)
    try:
        left, right = (read_contract(path, name="FILE") for path in args.files)
        found = left.differences(right)
    except KVMaskError as error:
        print(f"kvmask: {error}", file=sys.stderr)
        return 2
    shared = share_keys(left, right)
    if args.json:
        rows = [
            dict(zip(("field", "left", "right", "in_fingerprint"), item, strict=True))
            for item in found
        ]
        same = left.fingerprint == right.fingerprint
        document = {"differences": rows, "share_keys": shared, "same_fingerprint": same}
        print(json.dumps(document, default=_plain))
        return 1 if found else 0
    paint = Paint()
    for item in found:
        print(f"{item.field}{'' if item.in_fingerprint else ' (local policy)'}")
        print(paint(f"  - {_value(item.mine)}", "red"))
        print(paint(f"  + {_value(item.theirs)}", "green"))
    print(_verdict(left, right, shared, len(found)))
    return 1 if found else 0


def _verdict(left: Contract, right: Contract, shared: bool, count: int) -> str:
    if not count:
        return f"the contracts are equal: fingerprint {left.fingerprint}"
    fields = f"{count} field{'s differ' if count > 1 else ' differs'}"
    prints = f"fingerprints {left.fingerprint} and {right.fingerprint}"
    if left.fingerprint == right.fingerprint:
        return f"{fields}, all of them local: fingerprint {left.fingerprint}, the keys are shared"
    if shared:
        return f"{fields}, {prints}: some keys are the same, though their bytes may not be"
    return f"{fields}, {prints}: no key is shared"


def add_contract_command(commands: Any) -> None:
    """Add `contract` to the subcommands of a parser."""
    parser = add_command(
        commands,
        "contract",
        "show, check or compare contract files",
        "Show, check or compare contract files: what engines that share a KV cache agree on.",
        "kvmask contract show contract.json",
    )
    inner = parser.add_subparsers(dest="action", metavar="ACTION", required=True, help="what to do")

    show = add_command(
        inner,
        "show",
        "print what a contract says",
        "Print what a contract file says. The seed is not printed unless asked for.",
        "kvmask contract show contract.json",
    )
    show.add_argument("file", metavar="FILE", help="the contract, - for stdin")
    show.add_argument("--json", action="store_true", help="print its JSON, without the seed")
    show.add_argument("--show-seed", action="store_true", help="print the seed too")
    show.set_defaults(run=run_show)

    check = add_command(
        inner,
        "check",
        "check contract files, one line each",
        "Check contract files, one line each, with notes on what is worth knowing. Exit with 1 if "
        "one of them cannot be read.",
        "kvmask contract check contract.json",
    )
    check.add_argument("files", metavar="FILE", nargs="+", help="the contracts, - for stdin")
    check.set_defaults(run=run_check)
    for command in (show, check):
        command.add_argument("--seed", help="the hash seed, where the file does not hold it")

    diff = add_command(
        inner,
        "diff",
        "compare two contract files, field by field",
        "Compare two contract files, field by field. Exit with 0 if they are equal, with 1 if they "
        "differ, with 2 if one cannot be read. Seeds are compared by a digest, never printed.",
        "kvmask contract diff contract.json other.json",
    )
    diff.add_argument("files", metavar="FILE", nargs=2, help="the two contracts, - for stdin")
    diff.add_argument("--json", action="store_true", help="print JSON")
    diff.set_defaults(run=run_diff)
