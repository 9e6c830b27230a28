"""`kvmask key`: keys out of a token file, and parts out of a key."""

import io
import json

import pytest

from kvmask.cli import main
from kvmask.cli.key import ENGINES
from kvmask.hashing.chain import hash_tokens
from kvmask.keys import SglangKeys, VllmKeys, sglang_page_hashes

HEX = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"


@pytest.fixture(autouse=True)
def no_hash_seed(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(list(range(37))))
    return str(path)


def test_keys_of_vllm(tokens, capsys):
    args = ["key", "--model", "m", "--tp-rank", "1", "--group", "2", "--tokens", tokens]
    assert main([*args, "--set", "dcp_rank=3", "--hash-block", "4"]) == 0
    out, err = capsys.readouterr()
    expected = VllmKeys("m", 1, dcp_rank=3, group_id=2).keys(hash_tokens(range(37), 4), scale=4)
    assert [line.split() for line in out.splitlines()] == [
        ["0", "16", expected[0]],
        ["16", "32", expected[1]],
    ]
    assert err == "# 2 keys of 16 tokens, 5 tokens without one\n"


def test_recorded_first_hash(tokens, capsys):
    """The digests are those of vLLM 0.32.0 for tokens 0 to 15."""
    args = ["key", "--model", "m", "--tokens", tokens, "--json"]
    for more, digest in (
        ([], "fe8fa5dda3210d0c"),
        (["--salt", "S"], "33c57aa3ed5952eb"),
        (["--adapter", "S", "/p"], "06318ddbd3b343bf"),
        (["--algorithm", "sha256_cbor"], "dc918a88b139e5af"),
    ):
        assert main([*args, *more]) == 0
        key = json.loads(capsys.readouterr().out)[0]["key"]
        assert VllmKeys.parse(key)[1].hex().startswith(digest)


def test_keys_of_sglang(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("0, 1 2\n3,4"))
    args = ["key", "--engine", "sglang", "--model", "m", "--tokens", "-", "--block-size", "2"]
    assert main([*args, "--set", "mla=true", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    keys = SglangKeys("m", mla=True).keys(sglang_page_hashes(range(5), 2))
    assert [row["key"] for row in rows] == keys
    assert [(row["start"], row["stop"]) for row in rows] == [(0, 2), (2, 4)]


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "lmcache-objects"])
def test_round_trip(engine, tokens, capsys):
    args = ["key", "--engine", engine, "--model", "m", "--tokens", tokens, "--block-size", "16"]
    assert main([*args, "--json"]) == 0
    key = json.loads(capsys.readouterr().out)[0]["key"]
    assert main(["key", "--engine", engine, key, "--json"]) == 0
    reading = json.loads(capsys.readouterr().out)["readings"][0]
    assert (reading["engine"], reading["model"]) == (engine, "m")
    assert main(["key", key]) == 0
    assert f"digest           {reading['digest']}" in capsys.readouterr().out


def test_parts_of_a_key(capsys):
    assert main(["key", f"pre@m@tp_rank:1@pcp0@dcp0@pp_rank:0@group:5@{HEX}"]) == 0
    lines = {line[:16].strip(): line[17:] for line in capsys.readouterr().out.splitlines()}
    assert lines["engine"] == "vllm"
    assert lines["cache_prefix"] == "pre"
    assert lines["group_id"] == "5"
    assert lines["digest"] == HEX


def test_tags_and_layers(tokens, capsys):
    args = ["key", "--engine", "lmcache", "--model", "m", "--tokens", tokens, "--block-size", "32"]
    assert main([*args, "--set", "tags=a=b,c=d", "--set", "layer_id=3", "--seed", "0"]) == 0
    assert capsys.readouterr().out.split()[-1].endswith("@bfloat16@3@a%b@c%d")


def test_warnings_are_shown_once(tokens, capsys):
    assert main(["key", "--model", "org/m", "--tokens", tokens]) == 0
    err = capsys.readouterr().err
    assert err.count("kvmask: warning: `model` 'org/m' is keyed as 'm'") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "needs keys to take apart, or `--tokens`"),
        (["--tokens", "TOKENS", "--model", "m", "--set", "tp_rank=1_0"], "integer, got '1_0'"),
        (
            ["--engine", "strict", "--tokens", "TOKENS", "--model", "m", "--set", "tags=a"],
            "`tags` must be NAME=VALUE, or several with commas between them, got 'a'",
        ),
        (
            ["--engine", "sglang", "--tokens", "TOKENS", "--release", "0.32"],
            "`--release` is no part of the keys of 'sglang'",
        ),
        (["--tokens", "TOKENS"], "`--model` must be given"),
        (["--tokens", "TOKENS", "--model", "m", "--set", "x=1"], "`--set` must be NAME=VALUE"),
        (["--tokens", "TOKENS", "--model", "m", "--set", "tp_rank=a"], "must be an integer"),
        (["--tokens", "TOKENS", "--model", "m", "--hash-block", "5"], "a multiple of"),
        (["--tokens", "TOKENS", "--model", "m", "--algorithm", "x"], "must be one of"),
        (
            ["--engine", "lmcache", "--group", "1", "--tokens", "TOKENS", "--model", "m"],
            "`--group` is no part of the keys of 'lmcache'",
        ),
        (
            ["--engine", "sglang", "--tokens", "TOKENS", "--set", "mla=1"],
            "`mla` must be true or false, got '1'",
        ),
        (
            ["--tokens", "TOKENS", "--model", "m", "--release", "0.28"],
            "random where PYTHONHASHSEED is not set",
        ),
        (["--tokens", "", "--model", "m"], "`--tokens` must be a file, - or a list such as 1,2,3"),
        (["--tokens", f"{1 << 63}", "--model", "m"], "`token_ids` must be from 0 to 2**63 - 1"),
        (["--tokens", "TOKENS", "--model", ""], "`--model` must name a model, got ''"),
        (["--tokens", "TOKENS", "--model", "m", "--release", "x"], "`--release` must be a release"),
        (
            ["--tokens", "TOKENS", "--model", "m", "--set", "release=x"],
            "`release` must be a release",
        ),
        (
            ["--tokens", "TOKENS", "--model", "m", "--block-size", f"{1 << 32}"],
            "`--block-size` must be from 1 to",
        ),
    ],
)
def test_wrong_usage(args, message, tokens, capsys):
    assert main(["key", *(tokens if word == "TOKENS" else word for word in args)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["foo"], "'foo' is not a key of vllm, ascend, sglang, lmcache, lmcache-objects or strict"),
        (["foo", "--engine", "vllm"], "'foo' is not a key of vllm\n"),
        (["--tokens", "/nowhere/x", "--model", "m"], "1,2,3, got '/nowhere/x': No such"),
        (
            [f"a@b@m@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{HEX}", "--engine", "vllm"],
            "fits several model names",
        ),
    ],
)
def test_errors(args, message, tokens, capsys):
    assert main(["key", *(tokens if word == "TOKENS" else word for word in args)]) == 1
    assert message in capsys.readouterr().err


def test_tokens_may_be_a_list(tmp_path, capsys):
    path = tmp_path / "tokens"
    path.write_text("[1, 2, 3, 4]")
    seen = []
    for ids in (str(path), "1,2,3,4", " 1, 2,3,4, "):
        words = ["key", "--model", "m", "--seed", "0", "--block-size", "2", "--tokens", ids]
        assert main(words) == 0
        seen.append(capsys.readouterr().out)
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0].splitlines()) == 2


def test_a_prompt_without_a_whole_block_has_no_key_and_says_so(capsys):
    words = ["key", "--model", "m", "--seed", "0", "--block-size", "16", "--tokens", "1,2,3"]
    assert main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("[]\n", "kvmask: no key: 3 tokens fill no block of 16\n")


def test_words_that_are_no_numbers(tmp_path, capsys):
    path = tmp_path / "tokens"
    path.write_text("[1, 2, x]")
    assert main(["key", "--model", "m", "--tokens", str(path)]) == 1
    assert "`--tokens` must hold integers" in capsys.readouterr().err


def test_text_that_is_not_printable(tokens, capsys):
    args = ["key", "--model", "m\nx\x1b[2J", "--tokens", tokens]
    assert main(args) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert r"m\nx\x1b[2J@" in lines[0]
    assert main([*args, "--json"]) == 0
    key = json.loads(capsys.readouterr().out)[0]["key"]
    assert key.startswith("m\nx\x1b[2J@")
    assert main(["key", "--engine", "vllm", key]) == 0
    assert r"m\nx\x1b[2J" in capsys.readouterr().out


def test_deep_nesting(tmp_path, capsys):
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    assert main(["key", "--model", "m", "--tokens", str(path)]) == 1
    assert "`--tokens` must hold integers" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["key", "--tokens", "1,2", "--block-size", "1", "--algorithm", "xxhash"],
        ["key", "--tokens", "1,2", "--block-size", "1", "--release", "0.28"],
        ["why", "--tokens", "1,2", "--full", "16", "--algorithm", "xxhash"],
        ["why", "--tokens", "1,2", "--full", "16", "--release", "0.28"],
    ],
)
def test_a_start_that_is_random_asks_for_the_option(capsys, monkeypatch, words):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert main([*words, "--model", "m"]) == 2
    assert "kvmask: `--seed` must be given for " in capsys.readouterr().err
