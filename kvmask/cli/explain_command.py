"""`kvmask explain`: its options, and what it draws."""

from __future__ import annotations

import argparse
from typing import Any

from kvmask.cli.commands import add_command
from kvmask.cli.demo import table
from kvmask.cli.explain import counted, draw, picture_of, savings, size_text
from kvmask.cli.files import unusable
from kvmask.cli.models import Layers, Model, model_of, read_config
from kvmask.cli.numbers import natural, number, positive
from kvmask.cli.options import (
    GROUP_NAMES,
    GROUPS,
    add_group_options,
    common_block,
    flag_eagle,
    make_groups,
)
from kvmask.cli.svg import svg
from kvmask.cli.terminal import Paint, picture_width
from kvmask.cli.usage import UsageError, named
from kvmask.coordinator import Coordinator

# "  lookup " before a picture, and counts after it.
_BESIDE = 30


def _model(args: argparse.Namespace) -> Model | None:
    """The model of `--config`, if one is given."""
    if args.config is None:
        for name in ("block_size", "kv_bytes"):
            if getattr(args, name) is not None:
                raise UsageError(
                    f"`--{name.replace('_', '-')}` is for `--config`, got it without one"
                )
        return None
    if args.groups:
        raise UsageError(f"`--config` says which groups there are, got --{args.groups[0][0]} too")
    given = {"block_size": "--block-size"} if args.block_size is not None else {}
    with named(given):
        return model_of(read_config(args.config), args.block_size, args.kv_bytes)


def _details(layers: Layers) -> str:
    """What is said of a group of a model."""
    what = f" of {layers.what}" if layers.what else ""
    size = "" if layers.block_bytes is None else f", {size_text(layers.block_bytes)} per block"
    return f"{counted(layers.count, 'layer')}{what}{size}"


def run_explain(args: argparse.Namespace) -> int:
    """Run the command."""
    model = _model(args)
    if model is None and not args.groups:
        options = ", ".join(f"--{option}" for option in GROUPS)
        raise UsageError(f"`explain` needs `--config` or at least one of {options}")
    if args.prompt is not None and args.retention is None:
        raise UsageError(f"`--prompt` is for `--retention`, got {args.prompt} without it")
    if model is None:
        groups = make_groups(args.groups, args.eagle)
    else:
        groups = flag_eagle(model.groups, args.eagle)
    names = GROUP_NAMES | {"retention_interval": "--retention", "tokens": "--tokens"}
    if model is not None:
        names |= {"block_size": "--block-size", "groups": "--config"}
    with named(names):
        coord = Coordinator(
            groups,
            hash_block_size=args.hash_block or common_block(groups),
            alignment=args.alignment,
            retention_interval=args.retention,
            partial_hits=args.partial,
        )
    if args.tokens < coord.hit_alignment:
        raise UsageError(
            f"`--tokens` must be at least {coord.hit_alignment}, because hits are multiples of "
            f"that, got {args.tokens}"
        )
    drawn = coord.align(args.tokens)
    if args.start >= drawn:
        raise UsageError(
            f"`--start` must be less than the {drawn} tokens that are drawn, got {args.start}"
        )
    with named(names):
        picture = picture_of(
            coord,
            args.tokens,
            start_token=args.start,
            num_prompt_tokens=args.prompt,
            states=model is not None,
        )
    details = () if model is None else tuple(map(_details, model.layers))
    name = "" if model is None else model.name
    if args.svg is not None:
        text = svg(picture, name, details)
        try:
            with open(args.svg, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise unusable("--svg", "name a file that can be written", args.svg, error) from None
    if model is not None:
        print(f"{name}: {'; '.join(model.notes)}")
    print(draw(picture, args.width or picture_width(_BESIDE), Paint(), details))
    if model is not None:
        print()
        print(table(savings(picture, [layers.block_bytes for layers in model.layers])))
    return 0


def add_explain_command(commands: Any) -> None:
    """Add `explain` to the subcommands of a parser."""
    parser = add_command(
        commands,
        "explain",
        "draw the masks of KV cache groups",
        "Draw which blocks of each KV cache group are stored, which ones a lookup asks for, and "
        "which ones a load reads. The groups are options, or those of a model's config.json.",
        "kvmask explain --full 64 --swa 16,32 --tokens 512\n"
        "kvmask explain --config config.json --tokens 32768 --svg picture.svg",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="config.json of a model, or its folder: its groups"
    )
    parser.add_argument(
        "--block-size",
        type=positive,
        metavar="TOKENS",
        help="tokens per block, with --config; default: 16, more with state layers",
    )
    parser.add_argument(
        "--kv-bytes",
        type=number(1, 16),
        metavar="BYTES",
        help="bytes per number of the cache, with --config; default: the model's dtype",
    )
    parser.add_argument("--svg", metavar="FILE", help="also write the picture as SVG")
    add_group_options(parser)
    parser.add_argument("--tokens", type=positive, required=True, help="tokens of the prefix")
    parser.add_argument(
        "--retention",
        type=natural,
        metavar="TOKENS",
        help="store one window tail per so many tokens, and those where a prompt can be replayed; "
        "0: those alone; default: one at every boundary",
    )
    parser.add_argument("--start", type=natural, default=0, help="first token of the store masks")
    parser.add_argument(
        "--prompt", type=positive, help="tokens of the prompt, with --retention; default: --tokens"
    )
    parser.add_argument(
        "--width",
        type=number(1, 10_000),
        help="characters per picture; default: the terminal's width, or 64",
    )
    parser.set_defaults(run=run_explain)
