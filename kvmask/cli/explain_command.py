"""`kvmask explain`: its options, and what it draws."""

from __future__ import annotations

import argparse
from typing import Any

from kvmask.cli.commands import add_command
from kvmask.cli.explain import explain
from kvmask.cli.numbers import natural, number, positive
from kvmask.cli.options import GROUPS, add_group_options, common_block, make_groups
from kvmask.cli.terminal import picture_width
from kvmask.coordinator import Coordinator
from kvmask.errors import ArgumentError

# "  lookup " before a picture, and counts after it.
_BESIDE = 30


def run_explain(args: argparse.Namespace) -> int:
    """Run the command."""
    if not args.groups:
        options = ", ".join(f"--{option}" for option in GROUPS)
        raise ArgumentError(f"`explain` needs at least one of {options}")
    groups = make_groups(args.groups, args.eagle)
    coord = Coordinator(
        groups,
        hash_block_size=args.hash_block or common_block(groups),
        alignment=args.alignment,
        retention_interval=args.retention,
        partial_hits=args.partial,
    )
    if args.tokens < coord.hit_alignment:
        raise ArgumentError(
            f"`--tokens` must be at least {coord.hit_alignment}, what hits are multiples of, "
            f"got {args.tokens}"
        )
    print(
        explain(
            coord,
            args.tokens,
            start_token=args.start,
            num_prompt_tokens=args.prompt,
            width=args.width or picture_width(_BESIDE),
        )
    )
    return 0


def add_explain_command(commands: Any) -> None:
    """Add `explain` to the subcommands of a parser."""
    parser = add_command(
        commands,
        "explain",
        "draw the masks of KV cache groups",
        "Draw which blocks of each KV cache group are stored, which ones a lookup asks for, and "
        "which ones a load reads.",
        "kvmask explain --full 64 --swa 16,32 --tokens 512",
    )
    add_group_options(parser)
    parser.add_argument("--tokens", type=positive, required=True, help="tokens of the prefix")
    parser.add_argument(
        "--retention",
        type=natural,
        metavar="TOKENS",
        help="how dense window tails are stored; default: at every boundary",
    )
    parser.add_argument("--start", type=natural, default=0, help="first token of the store masks")
    parser.add_argument(
        "--prompt", type=positive, help="tokens of the prompt, for sparse retention"
    )
    parser.add_argument(
        "--width",
        type=number(1, 10_000),
        help="characters per picture; default: the terminal's width, or 64",
    )
    parser.set_defaults(run=run_explain)
