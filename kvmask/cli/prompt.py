"""The prompt of a command: token ids from a file, from stdin or as a list, or text to tokenize."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kvmask.cli.files import read_input
from kvmask.cli.key import read_tokens
from kvmask.cli.usage import UsageError
from kvmask.errors import ArgumentError, MissingDependencyError


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which prompt is meant."""
    prompt = parser.add_argument_group("the prompt")
    prompt.add_argument(
        "--tokens",
        metavar="IDS",
        help="token ids: a file (JSON or plain), - for stdin, or a list such as 1,2,3",
    )
    prompt.add_argument("--text", help="text to tokenize; needs --tokenizer")
    prompt.add_argument(
        "--text-file", metavar="FILE", help="a file with the text, - for stdin; needs --tokenizer"
    )
    prompt.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="tokenizer.json of the model, or its folder; needs the package `tokenizers`",
    )
    prompt.add_argument(
        "--no-special-tokens",
        action="store_true",
        help="do not add the tokens that the tokenizer puts around a text",
    )
    prompt.add_argument("--salt", help="the request's cache salt")
    prompt.add_argument("--adapter", nargs=2, metavar=("NAME", "PATH"), help="LoRA adapter")


def prompt_tokens(args: argparse.Namespace) -> list[int]:
    """The token ids that the options name."""
    given = [n for n in ("tokens", "text", "text_file") if getattr(args, n) is not None]
    if len(given) != 1:
        shown = ", ".join(f"--{n.replace('_', '-')}" for n in given) or "none"
        raise UsageError(
            f"exactly one of `--tokens`, `--text` and `--text-file` must be given, got {shown}"
        )
    if args.tokens is not None:
        if args.tokenizer is not None:
            raise UsageError("`--tokenizer` is for text, got it beside `--tokens`")
        if args.no_special_tokens:
            raise UsageError("`--no-special-tokens` is for text, got it beside `--tokens`")
        return read_tokens(args.tokens)
    if args.tokenizer is None:
        raise UsageError(
            f"`--tokenizer` must name a tokenizer.json for `--{given[0].replace('_', '-')}`, "
            "got none"
        )
    if args.text == "":
        raise UsageError("`--text` must be some text, got none")
    if args.text is None:
        text = read_input("--text-file", "name a readable file", args.text_file)
    else:
        text = args.text
        check_unicode(text, UsageError)
    return tokenize(text, args.tokenizer, special=not args.no_special_tokens)


def check_unicode(text: str, kind: type[ArgumentError]) -> None:
    """Refuse what is no text. `kind` is the error to raise."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # A byte that is no UTF-8 comes from the command line, or from stdin, as half a character.
        raise kind(f"the text must be valid Unicode, got {error.reason}") from None


def tokenize(text: str, path: str, *, special: bool = True) -> list[int]:
    """The token ids of a text.

    Args:
        text: The text. No chat template is applied to it.
        path: A tokenizer.json, or a folder that has one.
        special: Add the tokens that the tokenizer puts around a text.

    Raises:
        ArgumentError: There is no such file, or it is no tokenizer.
        MissingDependencyError: The package `tokenizers` is not installed.
    """
    check_unicode(text, ArgumentError)
    file = Path(path)
    if file.is_dir():
        file /= "tokenizer.json"
    if not file.is_file():
        raise ArgumentError(
            f"`--tokenizer` must be a tokenizer.json or a folder that has one, got {path!r}"
        )
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingDependencyError(
            f"text needs a tokenizer: pip install tokenizers, or pass token ids ({error})"
        ) from None
    try:
        tokenizer: Any = Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises Exception itself
        raise ArgumentError(
            f"`--tokenizer` must be a tokenizer.json, got {str(file)!r}: {error}"
        ) from None
    ids: list[int] = tokenizer.encode(text, add_special_tokens=special).ids
    return ids
