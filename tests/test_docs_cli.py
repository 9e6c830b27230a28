"""Every command of docs/cli.md is run, on the files that the page speaks of and a live store."""

import itertools
import json
import re
import shlex
from pathlib import Path

import pytest

import kvmask
from kvmask import Contract, FullAttention, Hashing, VllmKeys
from kvmask.cli import build_parser, main

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "cli.md"
if not PAGE.exists():
    pytest.skip("the pages are not beside the tests", allow_module_level=True)
TEXT = PAGE.read_text(encoding="utf-8")
FENCES = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, body in FENCES if kind == "sh" for line in body.splitlines()]
# Commands whose exit status tells something, as `diff` has it.
STATUS = {"contract diff": 1}

CONTRACT = Contract(
    {"full": FullAttention(64), "other": FullAttention(64, spec="other heads")},
    16,
    VllmKeys("m"),
    Hashing(seed="a seed"),
)
TOKENS = list(range(64 * 12 + 1))


@pytest.fixture
def folder(tmp_path, monkeypatch, master, live_store):
    """The files of the page, and what it says is in the store."""
    CONTRACT.write(tmp_path / "contract.json", with_seed=True)
    other = Contract(CONTRACT.groups, 16, VllmKeys("m"), Hashing(seed="another"), alignment=128)
    other.write(tmp_path / "other.json", with_seed=True)
    config = ROOT / "tests" / "data" / "configs" / "gemma-3-27b.json"
    (tmp_path / "config.json").write_text(config.read_text())
    (tmp_path / "prompt.json").write_text(json.dumps(TOKENS))
    settings = {"metadata_server": "P2PHANDSHAKE", "protocol": "tcp"}
    settings["master_server_address"] = master.address
    (tmp_path / "mooncake.json").write_text(json.dumps(settings))
    hashes = CONTRACT.request(TOKENS).hashes
    for group, blocks in ((0, range(8, 12)), (1, range(12))):
        (builder,) = CONTRACT.scheme.namespaces[group]
        mask = kvmask.Bitset.from_indices(12, blocks)
        for key in kvmask._core.build_keys((builder,), hashes, mask, 0, 4):
            assert live_store.put(key, b"x") == 0
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.store
@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_of_the_page_runs(line, folder, capsys):
    words = shlex.split(line)
    assert words[0] == "kvmask"
    status = STATUS.get(" ".join(words[1:3]), 0)
    assert main(words[1:]) == status, capsys.readouterr()
    capsys.readouterr()


@pytest.mark.store
def test_what_the_page_shows_is_what_the_command_prints(folder, capsys):
    """A text fence after a fence with one command is its output."""
    shown = 0
    for (kind, body), (next_kind, output) in itertools.pairwise(FENCES):
        if (kind, next_kind) == ("sh", "text"):
            (line,) = body.splitlines()
            main(shlex.split(line)[1:])
            assert capsys.readouterr().out == output
            shown += 1
    assert shown


def subparsers(parser=None, before=()):
    for action in (parser or build_parser())._actions:
        if isinstance(action.choices, dict):
            for name, inner in action.choices.items():
                yield " ".join([*before, name]), inner
                yield from subparsers(inner, [*before, name])


@pytest.mark.parametrize(("name", "parser"), list(subparsers()))
def test_the_help_of_every_command(name, parser):
    """It has a description, an example that can be parsed, and a text for each option."""
    text = parser.format_help()
    assert parser.description
    assert "example:" in text
    for line in (parser.get_default("example") or "").splitlines():
        words = shlex.split(line)[1:]
        assert " ".join(words).startswith(name)
        assert build_parser().parse_args(words).command == words[0]
    for action in parser._actions:
        assert action.help, f"{name} {action.option_strings}"


def test_defaults_are_in_the_help():
    texts = {name: " ".join(parser.format_help().split()) for name, parser in subparsers()}
    assert "--repeat REPEAT runs of each step (default: 5)" in texts["bench"]
    assert "(default: 32768)" in texts["demo"]
    assert "(default: 60)" in texts["doctor"]
    for text in texts.values():
        assert "default: None" not in text
        assert "default: False" not in text
