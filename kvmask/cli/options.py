"""Options that several commands share: groups, and the rest of a contract."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvmask.cli.files import unusable
from kvmask.cli.key import ENGINES, make_schema, start_of
from kvmask.cli.numbers import natural, number, positive
from kvmask.cli.usage import UsageError, in_words_of_options, named
from kvmask.contract import Contract
from kvmask.contract.file import MAX_CHARACTERS, read_text
from kvmask.errors import ArgumentError, KVMaskError
from kvmask.groups import ChunkedLocal, FullAttention, Group, Mamba, SlidingWindow
from kvmask.hashing.chain import ALGORITHMS
from kvmask.hashing.settings import Hashing
from kvmask.ranks import RankGrid

# Option to class, its sizes in the order given, their names in the help, and the help.
GROUPS: dict[str, tuple[Any, tuple[str, ...], str, str]] = {
    "full": (FullAttention, ("block_size",), "BLOCK", "a full-attention group"),
    "swa": (SlidingWindow, ("block_size", "window"), "BLOCK,WINDOW", "a sliding-window group"),
    "chunked": (
        ChunkedLocal,
        ("block_size", "chunk_size"),
        "BLOCK,CHUNK",
        "a chunked local attention group",
    ),
    "mamba": (Mamba, ("block_size",), "BLOCK", "a state group"),
}

# Arguments of the library that the options of groups give. The sizes of a group have no option of
# their own, so they have the names that the help of `GROUPS` gives them.
GROUP_NAMES = {
    "block_size": "BLOCK",
    "window": "WINDOW",
    "chunk_size": "CHUNK",
    "hash_block_size": "--hash-block",
    "alignment": "--alignment",
    "partial_hits": "--partial",
    "eagle": "--eagle",
    "groups": ", ".join(f"--{option}" for option in GROUPS),
}
# Those that the other options of a contract give. `replication` has none.
_CONTRACT_NAMES = {
    "kv_heads` or `replication": "--kv-heads",
    "kv_heads": "--kv-heads",
    "tp_size` (or `store_tp_size`) * `pp_size": "--tp` * `--pp",
    "tp_size": "--tp",
    "pp_size": "--pp",
    "dcp_size": "--dcp",
    "pcp_size": "--pcp",
    "algorithm": "--algorithm",
    "seed": "--seed",
    "release": "--release",
    "model": "--model",
}


class GroupAction(argparse.Action):
    """Collects the values of the options of `GROUPS` in the order given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        try:
            numbers = [positive(word) for word in str(values).split(",")]
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        if len(numbers) != len(GROUPS[self.dest][1]):
            parser.error(f"{option_string} takes {self.metavar}, got {values!r}")
        namespace.groups = [*(namespace.groups or ()), (self.dest, numbers)]


def make_groups(given: Sequence[tuple[str, list[int]]], eagle: Sequence[int] | None) -> list[Group]:
    """Create groups from the command line; see `flag_eagle`."""
    groups: list[Group] = []
    for option, numbers in given:
        make, names, _, _ = GROUPS[option]
        with named(GROUP_NAMES):
            groups.append(make(**dict(zip(names, numbers, strict=True))))
    return flag_eagle(groups, eagle)


def flag_eagle(groups: Sequence[Group], eagle: Sequence[int] | None) -> list[Group]:
    """Flag groups for EAGLE.

    Args:
        groups: The groups.
        eagle: Ids of the EAGLE groups. Empty means all groups that support EAGLE; None means none.
    """
    if eagle is None:
        return list(groups)
    if any(not 0 <= g < len(groups) for g in eagle):
        raise UsageError(
            f"`--eagle` must name groups from 0 to {len(groups) - 1}, "
            f"got {' '.join(map(str, eagle))}"
        )
    with named(GROUP_NAMES):
        return [
            replace(group, eagle=g in eagle if eagle else group.drops_for_eagle)  # type: ignore[type-var]
            for g, group in enumerate(groups)
        ]


def add_group_options(parser: Any) -> None:
    """Add the options that describe groups and how hits are aligned."""
    for option, (_, _, metavar, text) in GROUPS.items():
        parser.add_argument(f"--{option}", action=GroupAction, metavar=metavar, help=text)
    parser.add_argument(
        "--eagle",
        type=natural,
        nargs="*",
        metavar="GROUP",
        help="EAGLE groups; all when none is named",
    )
    parser.add_argument(
        "--hash-block",
        type=positive,
        metavar="TOKENS",
        help="tokens per block hash; default: the greatest common divisor of all blocks",
    )
    parser.add_argument(
        "--alignment",
        type=positive,
        metavar="TOKENS",
        help="hits are multiples of it; default: the least common multiple of all blocks",
    )
    parser.add_argument("--partial", action="store_true", help="hits may end inside a block")
    parser.set_defaults(groups=None)


def add_contract_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a contract without a file."""
    described = parser.add_argument_group("a contract without a file")
    add_group_options(described)
    described.add_argument(
        "--engine", choices=list(ENGINES), default="vllm", help="whose keys they are"
    )
    described.add_argument("--release", help="of the engine, as in 0.32")
    described.add_argument("--model", help="name of the model")
    described.add_argument(
        "--set", action="append", metavar="NAME=VALUE", help="any other part of the keys"
    )
    described.add_argument("--algorithm", help="hash algorithm; default: sha256")
    for name, text in (
        ("tp", "tensor-parallel ranks"),
        ("pp", "pipeline stages"),
        ("dcp", "decode-context-parallel ranks"),
        ("pcp", "prefill-context-parallel ranks"),
    ):
        described.add_argument(f"--{name}", type=number(1, 1 << 16), metavar="RANKS", help=text)
    described.add_argument(
        "--kv-heads", type=positive, metavar="HEADS", help="KV heads of the model; 1 for MLA"
    )


# Options that say what a contract file says, with their defaults.
_OF_A_CONTRACT: dict[str, Any] = {
    "groups": None,
    "eagle": None,
    "hash_block": None,
    "alignment": None,
    "partial": False,
    "engine": "vllm",
    "release": None,
    "model": None,
    "set": None,
    "algorithm": None,
    "tp": None,
    "pp": None,
    "dcp": None,
    "pcp": None,
    "kv_heads": None,
}


def contract_text(path: str) -> str:
    """The text of a contract file, or of standard input; see `read_contract`."""
    if path != "-":
        return read_text(path)
    if sys.stdin is None:
        raise OSError("standard input is closed")
    try:
        return sys.stdin.read(MAX_CHARACTERS + 1)
    except UnicodeDecodeError as error:
        raise ArgumentError(f"`path` must be text in UTF-8, got - with {error.reason}") from None


def read_contract(path: str, seed: str | None = None, name: str = "--contract") -> Contract:
    """The contract of a file. Of several files an error says which one is wrong.

    Args:
        path: The file; "-" is standard input.
        seed: The hash seed, where the file does not hold it.
        name: The option or argument that names the file.

    Raises:
        ArgumentError: It cannot be read, or holds no contract.
    """
    try:
        return Contract.from_json(contract_text(path), seed=seed)
    except OSError as error:
        raise unusable(name, "name a readable file", path, error) from None
    except (KVMaskError, TypeError) as error:
        names = {"path": name} if seed is None else {"path": name, "seed": "--seed"}
        text = in_words_of_options(str(error), names)
        shown = "standard input" if path == "-" else path
        raise ArgumentError(f"{shown}: {text}") from error


def contract_of(args: argparse.Namespace) -> Contract:
    """The contract of a file, or the one that the options describe."""
    said = [name for name, default in _OF_A_CONTRACT.items() if getattr(args, name) != default]
    if args.contract is not None:
        if said:
            shown = "--full and the like" if said[0] == "groups" else f"--{said[0]}"
            raise UsageError(
                "`--contract` must stand without the options that describe a contract, got "
                f"{shown.replace('_', '-')} too"
            )
        return read_contract(args.contract, args.seed)
    if not args.groups:
        options = ", ".join(f"--{option}" for option in GROUPS)
        raise UsageError(f"`--contract` or at least one of {options} must be given, got none")
    groups = make_groups(args.groups, args.eagle)
    args.tp_rank = args.pp_rank = args.group = None  # the contract fills them in
    grid = {f"{name}_size": getattr(args, name) for name in ("tp", "pp", "dcp", "pcp")}
    if args.engine == "strict":
        # Nothing can be saved under such keys without the facts of the bytes, and no option says
        # them. So none of these keys would ever be there.
        raise UsageError(
            "`--engine` must be vllm or ascend without `--contract`, because the fingerprint in "
            f"strict keys covers the bytes of the blocks, got {args.engine!r}"
        )
    if args.engine not in ("vllm", "ascend"):
        raise UsageError(
            "`--engine` must be one whose digests kvmask's contracts make: vllm or ascend, "
            f"got {args.engine!r}"
        )
    release = args.release if args.engine == "vllm" and args.release else "0.32"
    if args.algorithm in ALGORITHMS or args.algorithm is None:
        start_of(args.algorithm or "sha256", args.seed, release)
    schema = make_schema(args)
    with named(GROUP_NAMES | _CONTRACT_NAMES):
        return Contract(
            groups,
            args.hash_block or common_block(groups),
            schema,
            Hashing(args.algorithm or "sha256", seed=args.seed, release=release),
            alignment=args.alignment,
            partial_hits=args.partial,
            ranks=RankGrid(
                **{name: size for name, size in grid.items() if size is not None},
                kv_heads=args.kv_heads,
            ),
        )


def common_block(groups: Sequence[Group]) -> int:
    """The largest hash block that fits the blocks of all cacheable groups.

    >>> common_block([FullAttention(64), SlidingWindow(16, window=32)])
    16
    """
    return math.gcd(*(group.block_size for group in groups if group.prefix_cacheable)) or 1
