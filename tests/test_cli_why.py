"""`kvmask why`: what it prints of a live store, and wrong arguments."""

import io
import json
import os
import re
import subprocess
import sys

import pytest
from fake_store import FakeStore

import kvmask
from kvmask import Contract, FullAttention, Hashing, RankGrid, SlidingWindow, VllmKeys, mooncake
from kvmask._core import Bitset, build_keys
from kvmask.cli import main, prompt, why
from kvmask.cli.terminal import Paint
from kvmask.errors import ArgumentError, MissingDependencyError

GROUPS = {
    "full": FullAttention(64),
    "swa": SlidingWindow(16, window=32),
    "other": FullAttention(64, spec="other heads"),
}
TOKENS = list(range(64 * 12 + 1))
ENV = os.environ | {"PYTHONPATH": os.path.dirname(os.path.dirname(kvmask.__file__))}
CONTRACT = Contract(
    GROUPS,
    16,
    VllmKeys("m"),
    Hashing(seed="a seed"),
    ranks=RankGrid(tp_size=2, kv_heads=8),
)


def keys_of(group, blocks, shards=(0, 1), contract=CONTRACT):
    size = contract.groups[group].block_size
    builders = [contract.scheme.namespaces[group][i] for i in shards]
    bits = Bitset.from_indices(len(TOKENS) // size, blocks)
    hashes = contract.request(TOKENS).hashes
    return build_keys(builders, hashes, bits, 0, size // contract.hash_block_size)


@pytest.fixture
def files(tmp_path):
    """A contract with its seed, and a prompt."""
    CONTRACT.write(tmp_path / "contract.json", with_seed=True)
    (tmp_path / "prompt.json").write_text(json.dumps(TOKENS))
    return tmp_path


def words(files, *more):
    return [
        "why",
        "--contract",
        str(files / "contract.json"),
        "--tokens",
        str(files / "prompt.json"),
        *more,
    ]


@pytest.fixture
def asked(monkeypatch):
    """The store that the command connects to, in memory, and how it connects."""
    store = FakeStore()
    settings = []

    def connect(config, **options):
        settings.append((config, options))
        store.closed = False
        return store

    monkeypatch.setattr("kvmask.cli.quiet.quiet_connect", connect)
    store.settings = settings
    return store


EXAMPLE = """\
No hit for 769 tokens: group 0 "full" (full attention, blocks of 64) has only blocks 8 to 11 of \
12, and a longer hit needs all from the start: block 0 (tokens 0 to 63) is missing.
With every key there it would be 768: the last token is always computed.

# all blocks of a cell, + some, . none

group 0 'full': full attention, blocks of 64, 12 blocks
  needed   ############  12
  present  ........####  4 of 12: 8 to 11
  missing  ########....  8 of 12: 0 to 7
  hit      ............  0
  all 2 ranks miss the same

group 1 'swa': sliding window 32, blocks of 16, 48 blocks
  needed   ..##..##..##..##..##..##..##..##..##..##..##..##  24
  present  ..##..##..##..##..##..##..##..##..##..##..##..##  24 of 24
  missing  ................................................  0 of 24
  hit      ................................................  0
  all 2 ranks have their part

group 2 'other': full attention, blocks of 64, 12 blocks
  needed   ############  12
  present  ............  0 of 12
  missing  ############  12 of 12
  hit      ............  0
  tensor shard 1: 0 of 12, missing 0 to 11

keys: exact asks 96 in one call, staged 24 in 1; 68 of 96 are there
Asking renewed the leases of the keys that are there, as a lookup does.
"""
STORED = [*keys_of(0, range(8, 12)), *keys_of(1, range(48)), *keys_of(2, range(12), [0])]


def test_the_whole_picture(files, asked, capsys):
    asked.pool.update(dict.fromkeys(STORED, b"x"))
    assert main(words(files, "--master", "127.0.0.1:1")) == 0
    assert capsys.readouterr() == (EXAMPLE, "")
    ((config, options),) = asked.settings
    assert options == {"timeout": 10}
    assert (config.protocol, config.local_buffer_size, config.global_segment_size) == (
        "rpc_only",
        0,
        0,
    )
    assert asked.closed


@pytest.mark.store
def test_a_live_store(files, master, live_store, capsys):
    for key in STORED:
        assert live_store.put(key, b"x") == 0
    settings = {"metadata_server": "P2PHANDSHAKE", "protocol": "tcp", "device_name": ""}
    config = files / "mooncake.json"
    config.write_text(json.dumps(settings | {"master_server_address": master.address}))
    for source in (["--master", master.address], ["--config", str(config)]):
        assert main(words(files, *source)) == 0
        assert capsys.readouterr() == (EXAMPLE, "")
    assert main(words(files, "--master", master.address, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["groups"][0]["present"] == [[8, 11]]
    assert found["groups"][2]["shards"][0]["present"] == [[0, 11]]
    assert found["fingerprint"] == CONTRACT.fingerprint
    assert found["renews_leases"]
    assert "near" not in found
    for key in keys_of(0, range(8)) + keys_of(2, range(12), [1]):
        assert live_store.put(key, b"x") == 0
    assert main(words(files, "--master", master.address)) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("The hit is 768 of 769 tokens: the last token is always computed.\n")


@pytest.mark.store
def test_near_in_a_live_store(files, master, live_store, capsys):
    theirs = Contract(GROUPS, 16, VllmKeys("m"), Hashing("sha256_cbor", seed="0"))
    for group, block in ((0, 64), (1, 16), (2, 64)):
        for key in keys_of(group, range(768 // block), [0], theirs):
            assert live_store.put(key, b"x") == 0
    described = ["why", "--full", "64", "--swa", "16,32", "--full", "64", "--model", "m"]
    described += ["--tokens", str(files / "prompt.json"), "--master", master.address]
    assert main([*described, "--seed", "mine", "--near"]) == 0
    printed = capsys.readouterr().out
    assert "has none of its 12 blocks" in printed
    assert re.search(r"\nnear: \d+ tried, \d+ keys asked\n  with algorithm", printed)
    assert "with algorithm 'sha256_cbor' and seed '0': a hit of 768\n" in printed
    tried = ["--seed", "0", "--try", "algorithm=sha256_cbor", "--json"]
    assert main([*described, *tried]) == 0
    (near,) = json.loads(capsys.readouterr().out)["near"]
    assert near["change"] == {"algorithm": "sha256_cbor"}
    assert near["length"] == 768


@pytest.mark.store
def test_asking_gives_the_pool_no_memory_and_moves_no_bytes(files, master):
    """In a process of its own: the client has no transfer engine, so it opens no port."""
    code = f"""if True:
        import os, sys
        from kvmask.cli import main, quiet
        seen = []
        connect = quiet.quiet_connect
        def watched(config, **options):
            store = connect(config, **options)
            inodes = set()
            for fd in os.listdir("/proc/self/fd"):
                try:
                    link = os.readlink(f"/proc/self/fd/{{fd}}")
                except OSError:
                    continue
                if link.startswith("socket:["):
                    inodes.add(link[8:-1])
            for name in ("tcp", "tcp6"):
                for line in open(f"/proc/self/net/{{name}}").read().splitlines()[1:]:
                    row = line.split()
                    if row[3] == "0A" and row[9] in inodes:
                        seen.append(row[1])
            return store
        quiet.quiet_connect = watched
        status = main({words(files, "--master", master.address)!r})
        print("listening:", seen)
        sys.exit(status)
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=ENV
    )
    assert done.returncode == 0, done.stderr
    assert "listening: []" in done.stdout


@pytest.mark.store
def test_a_master_that_is_not_there(files, master, capsys):
    assert main(words(files, "--master", "127.0.0.1:1", "--timeout", "1")) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvmask: no Mooncake master answers at `--master` 127.0.0.1")


def test_tokens_from_stdin_and_from_a_list(asked, capsys, monkeypatch):
    base = ["why", "--full", "4", "--model", "m", "--seed", "s", "--master", "h:1", "--json"]
    found = []
    for given in ("-", "1,2,3,4,5", "1, 2, 3, 4, 5"):
        monkeypatch.setattr("sys.stdin", io.StringIO("[1, 2, 3, 4, 5]"))
        assert main([*base, "--tokens", given]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1] == found[2]
    assert [found[0][name] for name in ("num_tokens", "exact_keys")] == [5, 1]


def test_a_contract_from_stdin(files, asked, capsys, monkeypatch):
    found = []
    text = (files / "contract.json").read_text()
    for given in (str(files / "contract.json"), "-"):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        base = ["why", "--contract", given, "--seed", "a seed", "--master", "h:1", "--json"]
        assert main([*base, "--tokens", "1,2,3"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert main([*base, "--tokens", "-"]) == 2
    assert "`--contract` must not be - beside a prompt from stdin" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tried", "message"),
    [
        ("tp_size=x", "`--try tp_size` must be an integer, got 'x'"),
        ("blocks=0", "`--try blocks` must be a number above 0"),
        ("algorithm=x", "`--try algorithm` must be one of sha256"),
        ("hash_block=5", "`BLOCK` must be a multiple of `--try hash_block`, got 16 and 5"),
    ],
)
def test_tries_that_are_wrong(asked, capsys, tried, message):
    base = ["why", "--full", "16", "--model", "m", "--seed", "s", "--master", "h:1"]
    assert main([*base, "--tokens", ",".join(["1"] * 40), "--try", tried]) == 2
    assert message in capsys.readouterr().err


def test_salt_and_adapter_change_the_keys(asked, capsys):
    base = ["why", "--full", "4", "--model", "m", "--seed", "s", "--master", "h:1"]
    seen = []
    for more in ([], ["--salt", "x"], ["--adapter", "name", "path"]):
        asked.log.clear()
        assert main([*base, "--tokens", "1,2,3,4,5", *more]) == 0
        seen.append(asked.log[0].keys[0])
    assert len(set(seen)) == 3
    plain = Contract([FullAttention(4)], 4, VllmKeys("m"), Hashing(seed="s"))
    assert seen[0] == build_keys(plain.scheme.namespaces[0], plain.request([1, 2, 3, 4]).hashes)[0]
    asked.pool[seen[0]] = b"x"
    capsys.readouterr()
    assert main([*base, "--tokens", "1,2,3,4,5", "--salt", "x", "--near"]) == 0
    assert "  without salt and adapter: a hit of 4\n" in capsys.readouterr().out


def test_the_options_of_a_contract_make_that_contract(asked, files, capsys):
    options = [
        "--full",
        "64",
        "--swa",
        "16,32",
        "--full",
        "64",
        "--model",
        "m",
        "--tp",
        "2",
        "--kv-heads",
        "8",
    ]
    prompt_file = ["--tokens", str(files / "prompt.json"), "--master", "h:1", "--json"]
    assert main(["why", *options, "--seed", "a seed", *prompt_file]) == 0
    described = {key for call in asked.log for key in call.keys}
    asked.log.clear()
    assert main(words(files, "--master", "h:1", "--json")) == 0
    # Two equal full-attention groups, where the file keeps them apart: the keys are the same.
    assert described == {key for call in asked.log for key in call.keys}


def test_colours_and_the_width_of_a_terminal(files, asked, monkeypatch, capsys):
    asked.pool.update(dict.fromkeys(STORED, b"x"))
    assert main(words(files, "--master", "h:1", "--width", "6")) == 0
    assert "  present  ....##  4 of 12: 8 to 11\n" in capsys.readouterr().out
    monkeypatch.setattr(why, "Paint", lambda: Paint(on=True))
    assert main(words(files, "--master", "h:1")) == 0
    assert "  present  \x1b[32m........####\x1b[0m  4 of 12" in capsys.readouterr().out


# --- wrong arguments


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tokens", "1,2", "--text", "a"], "exactly one of `--tokens`, `--text` and `--text-"),
        ([], "exactly one of `--tokens`, `--text` and `--text-file` must be given, got none"),
        (["--text", "a"], "`--tokenizer` must name a tokenizer.json for `--text`, got none"),
        (["--tokens", "1", "--tokenizer", "t"], "`--tokenizer` is for text, got it beside"),
        (["--tokens", "1", "--try", "colour=red"], "`--try` must be NAME=VALUE with a name out"),
        (["--tokens", "1", "--try", "seed"], "`--try` must be NAME=VALUE"),
        (["--tokens", "1", "--max-keys", "5"], "`--max-keys` bounds `--near` and `--try`, got 5"),
        (["--tokens", "1", "--no-special-tokens"], "`--no-special-tokens` is for text, got it"),
        (["--tokens", "1", "--eagle", "0", "3"], "`--eagle` must name groups from 0 to 0, got 0 3"),
        (
            ["--tokens", "1", "--engine", "strict"],
            "`--engine` must be vllm or ascend without `--contract`, because the fingerprint",
        ),
        (["--tokens", "1", "--master", "h:1", "--config", "x"], "`--config` and `--master` excl"),
        (["--tokens", "1", "--swa", "16"], ""),
        (["--tokens", "1", "--tp", "2"], "`--kv-heads` of group '0' must be given with `--tp` "),
        (["--tokens", "1", "--tp", "2", "--dcp", "3"], "`--tp` must be a multiple of `--dcp`"),
        (["--tokens", "1", "--hash-block", "5"], "`BLOCK` must be a multiple of `--hash-block`"),
        (["--tokens", "1", "--release", "x"], "`--release` must be a vLLM release"),
        (["--tokens", "1", "--master", "a b"], "`--master` must be host:port, got 'a b'"),
        (["--tokens", ""], "`--tokens` must be a file, - or a list such as 1,2,3, got no text"),
        (["--text", "", "--tokenizer", "t"], "`--text` must be some text, got none"),
        (["--tokens", "1", "--engine", "sglang"], "`--engine` must be one whose digests"),
        (["--tokens", "1", "--algorithm", "md5"], "`--algorithm` must be one of sha256"),
        (["--tokens", "1", "--set", "colour=red"], "`--set` must be NAME=VALUE"),
    ],
)
def test_wrong_arguments(asked, capsys, more, message):
    base = ["why", "--full", "16", "--model", "m", "--seed", "s"]
    if not message:
        with pytest.raises(SystemExit):
            main([*base, *more])
        return
    assert main([*base, *more]) == 2
    assert message in capsys.readouterr().err
    assert asked.settings == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tokens", "nowhere.json"], "1,2,3, got 'nowhere.json': No such file"),
        (["--tokens", os.devnull], "the prompt must have at least one token, got none"),
        (["--tokens", "1,,2"], "must name a readable file, or be a list such as 1,2,3, got '1,,2'"),
        (["--text-file", "nowhere", "--tokenizer", "."], "`--text-file` must name a readable file"),
        (["--text", "a", "--tokenizer", "nowhere"], "`--tokenizer` must be a tokenizer.json or a"),
    ],
)
def test_files_that_cannot_be_used(asked, capsys, more, message):
    assert main(["why", "--full", "16", "--model", "m", "--seed", "s", *more]) == 1
    assert message in capsys.readouterr().err
    assert asked.settings == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "`--contract` or at least one of --full, --swa"),
        (["--full", "16"], "`--model` must be given"),
    ],
)
def test_too_little_is_told(asked, capsys, more, message):
    assert main(["why", "--tokens", "1", *more]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "option"),
    [(["--full", "16"], "--full"), (["--model", "m"], "--model"), (["--kv-heads", "8"], "--kv-")],
)
def test_a_file_says_all_of_a_contract(files, asked, capsys, more, option):
    assert main(words(files, *more)) == 2
    assert (
        f"`--contract` must stand without the options that describe a contract, got {option}"
        in capsys.readouterr().err
    )


def test_a_contract_without_its_seed_cannot_hash(tmp_path, asked, capsys, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    CONTRACT.write(tmp_path / "contract.json")
    base = ["why", "--contract", str(tmp_path / "contract.json"), "--tokens", "1,2"]
    assert main([*base, "--master", "h:1"]) == 2
    assert "`--seed` must be given for a contract file without its seed" in capsys.readouterr().err
    assert main([*base, "--master", "h:1", "--seed", "a seed"]) == 0


# --- text


def test_a_missing_tokenizer_package_is_told(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingDependencyError, match="pip install tokenizers, or pass token ids"):
        prompt.tokenize("a", str(tmp_path))


TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {
            "id": 0,
            "content": "<s>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    },
    "decoder": None,
    "model": {
        "type": "WordLevel",
        "vocab": {"<s>": 0, "one": 11, "two": 12, "?": 1},
        "unk_token": "?",
    },
}


def test_bytes_that_are_no_text_are_told(tmp_path, asked, capsys, monkeypatch):
    """Python reads such a byte of the command line, or of stdin in the C locale, as a surrogate."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    base = ["why", "--full", "2", "--model", "m", "--master", "h:1", "--tokenizer", str(tmp_path)]
    assert main([*base, "--text", "a\udcffb"]) == 2
    assert "the text must be valid Unicode, got surrogates" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\udcffb"))
    assert main([*base, "--text-file", "-"]) == 1
    assert "the text must be valid Unicode, got surrogates" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", None)
    assert main([*base, "--text-file", "-"]) == 1
    assert "`--text-file` must be readable, got - and a closed" in capsys.readouterr().err


def test_text_with_a_tokenizer(tmp_path, asked, capsys):
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(TOKENIZER))
    text = tmp_path / "text"
    text.write_text("one two one")
    base = ["why", "--full", "2", "--model", "m", "--seed", "s", "--master", "h:1", "--json"]
    seen = []
    for more in (
        ["--tokens", "0,11,12,11"],
        ["--text", "one two one", "--tokenizer", str(path)],
        ["--text-file", str(text), "--tokenizer", str(tmp_path)],
        ["--text", "one two one", "--tokenizer", str(path), "--no-special-tokens"],
    ):
        asked.log.clear()
        assert main([*base, *more]) == 0
        seen.append([call.keys for call in asked.log])
    assert seen[0] == seen[1] == seen[2] != seen[3]
    path.write_text("{}")
    with pytest.raises(ArgumentError, match="`--tokenizer` must be a tokenizer"):
        prompt.tokenize("a", str(path))


def test_a_list_may_be_longer_than_a_name_of_a_file(asked, capsys):
    ids = ",".join(map(str, range(20_000)))
    words = ["why", "--full", "16", "--model", "m", "--seed", "s", "--master", "h:1"]
    assert main([*words, "--tokens", ids]) == 0
    assert "No hit for 20000 tokens" in capsys.readouterr().out
    assert main([*words, "--tokens", f"{ids}x"]) == 1
    assert "0,1,2" in (err := capsys.readouterr().err)
    assert len(err) < 320
    assert main([*words, "--tokens", "9" * 5000]) == 2
    assert "`--tokens` must hold integers, got '999" in (err := capsys.readouterr().err)
    assert len(err) < 320


def test_the_command_as_users_run_it(files):
    env = dict(ENV)
    env.pop("MOONCAKE_CONFIG_PATH", None)
    env.pop("MOONCAKE_MASTER", None)
    done = subprocess.run(
        [sys.executable, "-m", "kvmask", *words(files)],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"kvmask: `--config` or `--master` must be given when ${mooncake.CONFIG_ENV} and "
        "$MOONCAKE_MASTER are not set, got neither\n"
    )


def test_a_prompt_that_fills_no_block_has_no_picture(asked, capsys):
    words = ["why", "--full", "64", "--model", "m", "--seed", "s", "--master", "h:1"]
    assert main([*words, "--tokens", "1,2,3"]) == 0
    assert capsys.readouterr().out == (
        "No hit for 3 tokens: hits are multiples of 64 tokens, and the last token is always "
        "computed, so a prompt needs at least 65 tokens.\n"
    )
