"""`kvmask contract`: what it shows, what it notes, and what it keeps to itself."""

import io
import json
import os

import pytest

from kvmask import (
    Contract,
    FullAttention,
    Hashing,
    KVLayout,
    PayloadFacts,
    RankGrid,
    SlidingWindow,
    StrictKeys,
    VllmKeys,
)
from kvmask.cli import main
from kvmask.cli.contracts import share_keys

GROUPS = {"full": FullAttention(64), "swa": SlidingWindow(16, window=32, eagle=True)}
SECRET = "the same in every engine"
FACTS = PayloadFacts(dtype="float16", token_bytes=(16,), block_bytes=1024)


def contract_of(groups=None, keys=None, seed=SECRET, **more):
    keys = VllmKeys("m") if keys is None else keys
    return Contract(groups or GROUPS, 16, keys, Hashing(seed=seed), **more)


@pytest.fixture
def write(tmp_path):
    def write(name, contract, with_seed=True):
        contract.write(tmp_path / name, with_seed=with_seed)
        return str(tmp_path / name)

    return write


def test_show_says_every_field(write, capsys):
    contract = contract_of(
        ranks=RankGrid(tp_size=2, kv_heads=8),
        payload=[FACTS, None],
        facts={"revision": "2"},
        retention_interval=128,
        partial_hits=True,
    )
    path = write("c.json", contract)
    assert main(["contract", "show", path]) == 0
    printed = capsys.readouterr().out
    lines = dict(line.split(None, 1) for line in printed.splitlines()[:1])
    assert lines["fingerprint"] == contract.fingerprint
    for text in (
        f"hash         sha256 of vLLM 0.32, start {contract.hashing.check}",
        "seed         known",
        "alignment    64 tokens, partial hits",
        "retention    every 128 tokens",
        "ranks        tp_size=2, kv_heads=8",
        "facts        revision '2'",
        "group 1      sliding window 32, blocks of 16, EAGLE 'swa'",
        "m@tp_rank:0@pcp0@dcp0@pp_rank:0@group:1@<digest>, the first of 2 namespaces",
        "payload    dtype float16, token bytes [16], block bytes 1024",
    ):
        assert text in printed
    assert SECRET not in printed


def test_the_seed_is_shown_only_when_asked_for(write, capsys, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    path = write("c.json", contract_of())
    for words in (["show", path], ["show", path, "--json"], ["check", path], ["diff", path, path]):
        assert main(["contract", *words]) == 0
        out, err = capsys.readouterr()
        assert SECRET not in out + err
    assert main(["contract", "show", path, "--show-seed"]) == 0
    assert f"seed '{SECRET}'" in capsys.readouterr().out
    assert main(["contract", "show", path, "--show-seed", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hash"]["seed"] == SECRET
    bare = write("bare.json", contract_of(), with_seed=False)
    for more in ([], ["--json"]):
        assert main(["contract", "show", bare, "--show-seed", *more]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "`--show-seed` needs a contract whose seed is known" in err
    assert main(["contract", "show", bare, "--seed", SECRET, "--show-seed"]) == 0
    start = Contract(GROUPS, 16, VllmKeys("m"), Hashing(start=bytes(range(32))))
    path = write("start.json", start)
    assert main(["contract", "show", path]) == 0
    assert bytes(range(32)).hex() not in capsys.readouterr().out
    assert main(["contract", "show", path, "--show-seed"]) == 0
    assert f"start {bytes(range(32)).hex()}" in capsys.readouterr().out


def test_show_json_is_the_file_without_its_seed(write, capsys):
    contract = contract_of()
    assert main(["contract", "show", write("c.json", contract), "--json"]) == 0
    assert capsys.readouterr().out == contract.to_json()


def test_check_reads_every_file(write, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    good = write("good.json", contract_of())
    bare = write("bare.json", contract_of(), with_seed=False)
    strict = write("strict.json", contract_of(keys=StrictKeys("m")))
    wrong = tmp_path / "wrong.json"
    wrong.write_text(contract_of().to_json().replace('"alignment": 64', '"alignment": 65'))
    nowhere = str(tmp_path / "nowhere.json")
    assert main(["contract", "check", good]) == 0
    printed = capsys.readouterr().out
    assert printed == f"ok   {good}: fingerprint {contract_of().fingerprint}, 2 groups\n"
    assert main(["contract", "check", good, bare, strict, str(wrong), nowhere]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert [line[:4] for line in printed] == [
        "ok  ",
        "ok  ",
        "note",
        "ok  ",
        "note",
        "note",
        "FAIL",
        "FAIL",
    ]
    assert "its seed is not known here" in printed[2]
    assert "nothing says what the bytes of group 'full' are" in printed[4]
    assert "`alignment` must be a multiple of every group's `block_size`" in printed[6]
    assert "No such file" in printed[7]


def test_check_notes_a_seed_that_others_can_read(write, capsys):
    path = write("c.json", contract_of())
    assert os.stat(path).st_mode & 0o777 == 0o600
    os.chmod(path, 0o644)
    assert main(["contract", "check", path]) == 0
    assert "the file holds the seed, and others can read it (mode 0644)" in capsys.readouterr().out


def test_check_compares_a_seed(write, capsys):
    path = write("c.json", contract_of(), with_seed=False)
    assert main(["contract", "check", path, "--seed", SECRET]) == 0
    assert "note" not in capsys.readouterr().out
    assert main(["contract", "check", path, "--seed", "another"]) == 1
    out = capsys.readouterr().out
    assert "`--seed` must be the one that the contract was made with" in out
    assert "another" not in out


def test_diff_names_each_field(write, capsys):
    left = contract_of()
    groups = {"full": FullAttention(64), "swa": SlidingWindow(16, window=48)}
    right = contract_of(groups, seed="another", alignment=128)
    words = ["contract", "diff", write("left.json", left), write("right.json", right)]
    assert main(words) == 1
    printed = capsys.readouterr().out
    assert "groups[1].window\n  - 32\n  + 48\n" in printed
    assert "alignment (local policy)\n  - 64\n  + 128\n" in printed
    assert "groups[1].eagle (local policy)\n  - true\n  + false\n" in printed
    assert "hashing.start\n" in printed
    assert "another" not in printed
    assert printed.endswith(
        f"4 fields differ, fingerprints {left.fingerprint} and {right.fingerprint}: no key is "
        "shared\n"
    )
    assert main([*words, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["share_keys"]
    assert not found["same_fingerprint"]
    assert {row["field"]: row["in_fingerprint"] for row in found["differences"]} == {
        "groups[1].window": True,
        "hashing.start": True,
        "alignment": False,
        "groups[1].eagle": False,
    }


def test_diff_says_whether_keys_are_shared(write, capsys):
    left = write("left.json", contract_of())
    assert main(["contract", "diff", left, left]) == 0
    assert capsys.readouterr().out.startswith("the contracts are equal: fingerprint ")
    local = write("local.json", contract_of(retention_interval=0))
    assert main(["contract", "diff", left, local]) == 1
    assert "1 field differs, all of them local" in capsys.readouterr().out
    facts = write("facts.json", contract_of(facts={"revision": "2"}))
    assert main(["contract", "diff", left, facts]) == 1
    assert "some keys are the same, though their bytes may not be" in capsys.readouterr().out


def test_engines_share_keys_when_one_writes_what_the_other_asks():
    base = contract_of()
    assert share_keys(base, contract_of(facts={"revision": "2"}))
    assert share_keys(base, contract_of(ranks=RankGrid(tp_size=2, kv_heads=8)))
    assert not share_keys(base, contract_of(seed="another"))
    assert not share_keys(base, contract_of(keys=VllmKeys("other")))
    # Blocks of 64 and of 32 tokens that end at the same token have the same key.
    assert share_keys(base, contract_of({"full": FullAttention(32), "swa": GROUPS["swa"]}))
    assert share_keys(base, contract_of({"full": FullAttention(64)}))
    asked = []
    for size in (64, 32):
        request = contract_of({"full": FullAttention(size)}).request(range(129))
        asked.append(set(request.lookup_plan(strategy="exact").next_call().args[0]))
    assert len(asked[0] & asked[1]) == 2
    strict = StrictKeys("m")
    assert share_keys(contract_of(keys=strict), contract_of(keys=strict, retention_interval=0))
    assert not share_keys(contract_of(keys=strict), contract_of(keys=strict, facts={"r": "2"}))


def test_shards_that_are_described(write, capsys):
    np = pytest.importorskip("numpy")
    groups = {"full": FullAttention(16)}
    layouts = {"full": KVLayout.from_tensors([np.zeros((3, 16, 8), np.float16)], num_blocks=3)}
    contract = contract_of(groups, ranks=RankGrid(pp_size=2), payload=layouts).describe_rank(
        layouts, pp_rank=1
    )
    assert main(["contract", "show", write("c.json", contract)]) == 0
    assert "described    1 shard with facts of its own" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (
            ["show", "nowhere.json"],
            1,
            "`FILE` must name a readable file, got 'nowhere.json': No such",
        ),
        (
            ["diff", "nowhere.json", "x"],
            2,
            "`FILE` must name a readable file, got 'nowhere.json': No",
        ),
    ],
)
def test_files_that_are_not_there(capsys, words, status, message):
    assert main(["contract", *words]) == status
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["show"], ["diff", "one.json"], ["melt", "one.json"]])
def test_wrong_usage(words):
    with pytest.raises(SystemExit) as caught:
        main(["contract", *words])
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "a contract must be JSON"), ("[]", "a contract must be an object"), ("{}", "`kvmask_")],
)
def test_errors_say_which_of_two_files_is_wrong(write, tmp_path, capsys, text, message):
    good, bad = write("good.json", contract_of()), tmp_path / "bad.json"
    bad.write_text(text)
    for words in (
        ["contract", "diff", good, str(bad)],
        ["contract", "diff", str(bad), good],
        ["contract", "show", str(bad)],
        ["why", "--contract", str(bad), "--tokens", "1", "--master", "h:1"],
    ):
        assert main(words) in (1, 2)
        assert f"kvmask: {bad}: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "a contract must be JSON"), ("[]", "a contract must be an object"), ("{}", "`kvmask_")],
)
def test_files_that_are_no_contracts(tmp_path, capsys, text, message):
    path = tmp_path / "c.json"
    path.write_text(text)
    assert main(["contract", "check", str(path)]) == 1
    assert message in capsys.readouterr().out


def test_a_contract_from_stdin(write, capsys, monkeypatch):
    contract, other = contract_of(), contract_of(seed="another")
    path, apart = write("c.json", contract), write("other.json", other)
    for words, status in (
        (["show", "FILE"], 0),
        (["show", "FILE", "--json"], 0),
        (["check", apart, "FILE"], 0),
        (["diff", "FILE", apart], 1),
        (["diff", apart, "FILE"], 1),
    ):
        seen = []
        for file in (path, "-"):
            monkeypatch.setattr("sys.stdin", io.StringIO(contract.to_json(with_seed=True)))
            assert (
                main(["contract", *(file if word == "FILE" else word for word in words)]) == status
            )
            seen.append(capsys.readouterr().out)
        assert seen[0].replace(path, "-") == seen[1]


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["show", "-"], 1, "kvmask: standard input: a contract must be JSON"),
        (["check", "-"], 1, "FAIL -: a contract must be JSON"),
        (["diff", "-", "GOOD"], 2, "kvmask: standard input: a contract must be JSON"),
        (["check", "-", "-"], 2, "`FILE` must be - at most once, got it more often"),
        (["diff", "-", "-"], 2, "`FILE` must be - at most once, got it more often"),
    ],
)
def test_a_stdin_that_is_no_contract(write, capsys, monkeypatch, words, status, message):
    good = write("good.json", contract_of())
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["contract", *(good if word == "GOOD" else word for word in words)]) == status
    assert message in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("words", "status"), [(["show", "-"], 1), (["check", "-"], 1), (["diff", "-", "GOOD"], 2)]
)
def test_a_closed_stdin_has_no_contract(write, capsys, monkeypatch, words, status):
    good = write("good.json", contract_of())
    monkeypatch.setattr("sys.stdin", None)
    assert main(["contract", *(good if word == "GOOD" else word for word in words)]) == status
    assert "-: standard input is closed\n" in "".join(capsys.readouterr()).replace("'", "")
