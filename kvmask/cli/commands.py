"""How a subcommand is added, and how its help looks."""

from __future__ import annotations

import argparse
from typing import Any


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Help with defaults, and with the examples as they are written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        # No default at all, and those of switches, say nothing.
        if action.default is None or isinstance(action.default, bool) or not action.option_strings:
            return action.help
        return super()._get_help_string(action) if action.help else "default: %(default)s"


def add_command(
    commands: Any, name: str, summary: str, description: str, example: str
) -> argparse.ArgumentParser:
    """Add a subcommand whose help ends with an example.

    Args:
        commands: The object that `argparse.ArgumentParser.add_subparsers` returned.
        name: Name of the command.
        summary: What it does, in the list of commands.
        description: What it does, at the head of its own help.
        example: One or more command lines.
    """
    lines = "\n".join(f"  {line}" for line in example.splitlines())
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=f"example:\n{lines}",
        formatter_class=Help,
    )
    parser.set_defaults(example=example)
    return parser
