"""A contract as JSON: golden files, round trips, and what a reader refuses."""

import json
import os
import stat
import traceback
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmask import ChunkedLocal, FullAttention, KVLayout, Mamba, SlidingWindow
from kvmask.contract import Contract
from kvmask.contract.file import MAX_CHARACTERS, MAX_LAYERS
from kvmask.errors import ArgumentError, HashInputError
from kvmask.hashing.settings import Hashing
from kvmask.keys import AscendKeys, LMCacheObjectKeys, SglangKeys, StrictKeys, VllmKeys
from kvmask.payload import PayloadFacts
from kvmask.ranks import RankGrid

DATA = Path(__file__).parent / "data"
SECRET = "a-secret-seed"


def regions(count=2, size=512):
    rows = [(4096 * (i + 1), size, size) for i in range(count)]
    return KVLayout.from_regions(rows, 4, [(4096, 1 << 20)])


def plain():
    groups = {"full": FullAttention(16), "swa": SlidingWindow(16, window=32)}
    return Contract(groups, 16, StrictKeys("org/model"), Hashing(seed=SECRET))


def rich():
    """Every field that a contract has."""
    facts = PayloadFacts("uint8", "unknown 512 bytes", 4, extra={"means": "fp8_e4m3"})
    groups = {
        "full": FullAttention(256, eagle=True, spec=("mla", 576, None)),
        "window": SlidingWindow(64, window=128, extra_retained_tokens=3),
        "chunked": ChunkedLocal(64, 8192),
        "state": Mamba(256),
        "ring": FullAttention(4, prefix_cacheable=False),
    }
    contract = Contract(
        groups,
        4,
        StrictKeys("org/model", namespace="prod", tags={"a": "b"}, facts={"revision": "main"}),
        Hashing("sha256_cbor", seed=SECRET, release="0.33"),
        alignment=512,
        retention_interval=1024,
        partial_hits=True,
        states="handoff",
        ranks=RankGrid(
            8,
            2,
            2,
            1,
            kv_heads=1,
            context_split={"window": False},
            stages={"state": [1]},
        ),
        payload={"full": facts, "window": regions(), "chunked": regions()},
        facts={"fp8": True, "epoch": 3, "note": None},
    )
    return contract.describe_rank([regions(), regions(), regions(), None, None], 3)


def parts():
    keys = {
        "full": [SglangKeys("m"), SglangKeys("m", part="v")],
        "swa": SglangKeys("m", part="swa"),
    }
    groups = {"full": FullAttention(16), "swa": SlidingWindow(16, window=32)}
    payload = {"full": [regions(1), regions(3)], "swa": regions()}
    return Contract(groups, 16, keys, None, payload=payload, ranks=RankGrid(2, stages=[[0], None]))


def engine():
    grid = RankGrid(8, 2, kv_heads={"0": 2}, replication={"1": 8})
    groups = [FullAttention(16), SlidingWindow(16, window=32)]
    return Contract(groups, 16, VllmKeys("m", cache_prefix="p"), Hashing(seed=SECRET), ranks=grid)


MADE = {"plain": plain, "rich": rich, "parts": parts, "engine": engine}


def load(name):
    return (DATA / f"contract_{name}.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", MADE)
def test_golden_files(name):
    contract = MADE[name]()
    assert contract.to_json() == load(name)
    assert Contract.from_json(load(name)) == contract


@pytest.mark.parametrize("name", MADE)
def test_round_trips(name):
    contract = MADE[name]()
    text = contract.to_json()
    found = Contract.from_json(text)
    assert found == contract
    assert found.fingerprint == contract.fingerprint
    assert found.scheme.groups == contract.scheme.groups
    assert found.to_json() == text
    if contract.hashing is not None:
        whole = contract.to_json(with_seed=True)
        assert Contract.from_json(whole).origin == contract.origin
        assert Contract.from_json(whole).to_json(with_seed=True) == whole


def test_described_ranks_are_compared_after_loading():
    found = Contract.from_json(load("rich"))
    rows = [regions(), regions(), regions(), None, None]
    found.bind(rows, 3, 0)
    with pytest.raises(ArgumentError, match="got layers"):
        found.bind([regions(), regions(3), regions(), None, None], 3, 0)


# The seed.


def test_the_seed_is_left_out_unless_asked_for():
    contract = plain()
    assert SECRET not in contract.to_json()
    assert contract.hashing.start.hex() not in contract.to_json()
    assert json.loads(contract.to_json(with_seed=True))["hash"]["seed"] == SECRET
    started = Contract({"a": FullAttention(16)}, 16, StrictKeys("m"), Hashing(start=bytes(32)))
    assert json.loads(started.to_json(with_seed=True))["hash"]["start"] == "00" * 32
    assert Contract.from_json(started.to_json(with_seed=True)).origin.start == bytes(32)


def test_a_contract_without_its_seed_looks_up_and_does_not_hash():
    found = Contract.from_json(plain().to_json())
    assert found == plain()
    assert found.origin is None
    with pytest.raises(HashInputError, match="`seed` must be given"):
        found.hasher()
    assert Contract.from_json(found.to_json()) == found
    with pytest.raises(ArgumentError, match="`with_seed` needs a contract that knows its seed"):
        found.to_json(with_seed=True)


def test_the_seed_given_apart_must_be_the_right_one():
    text = plain().to_json()
    start = plain().hashing.start
    assert Contract.from_json(text, seed=SECRET).origin == plain().origin
    assert Contract.from_json(text, start=start).origin == plain().origin
    for wrong in ({"seed": "wrong-seed"}, {"start": bytes(32)}):
        with pytest.raises(ArgumentError, match="must be the one that the contract") as caught:
            Contract.from_json(text, **wrong)
        shown = "".join(traceback.format_exception(caught.value))
        assert "wrong-seed" not in str(caught.value)
        assert SECRET not in shown
    with pytest.raises(ArgumentError, match="must be None for a contract without hashing"):
        Contract.from_json(load("parts"), seed=SECRET)
    with pytest.raises(ArgumentError, match="exclude each other"):
        Contract.from_json(text, seed=SECRET, start=start)


def test_a_start_that_is_no_secret_is_found_again(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    contract = Contract({"a": FullAttention(16)}, 16, StrictKeys("m"))
    assert Contract.from_json(contract.to_json()).origin == contract.origin
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert Contract.from_json(contract.to_json()).origin is None
    own = Contract({"a": FullAttention(16)}, 16, StrictKeys("m"))
    assert own.fingerprint != contract.fingerprint
    assert Contract.from_json(own.to_json()).origin == own.origin


def test_files(tmp_path):
    path = tmp_path / "contract.json"
    path.write_text("older and longer " * 1000)
    os.chmod(path, 0o666)
    contract = plain()
    contract.write(path)
    assert Contract.read(path) == contract
    assert SECRET not in path.read_text()
    contract.write(path, with_seed=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Contract.read(str(path)).origin == contract.origin
    contract.write(path)
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    assert Contract.read(path, seed=SECRET).origin == contract.origin
    assert os.listdir(tmp_path) == ["contract.json"]
    with pytest.raises(FileNotFoundError):
        contract.write(tmp_path / "none" / "contract.json")


def test_a_file_that_cannot_be_put_in_place_leaves_nothing(tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(OSError):
        plain().write(tmp_path / "taken", with_seed=True)
    assert os.listdir(tmp_path) == ["taken"]


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "x").write_bytes(bytes(range(256)))
    with pytest.raises(ArgumentError, match=r"must be a file in UTF-8, got '.*x'"):
        Contract.read(tmp_path / "x")


# What is refused.


def changed(name="rich", **edits):
    """A golden file with fields changed, by dotted path; None removes one."""
    document = json.loads(load(name))
    for path, value in edits.items():
        place = document
        *steps, last = path.split("__")
        for step in steps:
            place = place[int(step) if step.isdigit() else step]
        if value is ...:
            del place[last]
        else:
            place[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        ({"extra": 1}, "no field that is not known, got `extra`"),
        ({"hash__salt": 1}, "got `hash.salt`"),
        ({"keys__tp_rank": 1}, "to the contract, got tp_rank 1"),
        ({"keys__colour": 1}, "got `keys.colour`"),
        ({"ranks__ep_size": 1}, "got `ranks.ep_size`"),
        ({"groups__1__dilation": 2}, r"got `groups\[1\].dilation`"),
        ({"groups__0__window": 2}, r"got `groups\[0\].window`"),
        ({"groups__0__payload__0__colour": 2}, r"got `groups\[0\].payload\[0\].colour`"),
        ({"groups__0__namespaces__0__rank": 2}, r"got `groups\[0\].namespaces\[0\].rank`"),
        ({"groups__0__namespaces__0__facts__x": 2}, r"namespaces\[0\].facts.x`"),
        ({"kvmask_contract": 2}, "`kvmask_contract` must be 1, .* got 2"),
        ({"kvmask_contract": True}, "must be an integer, got true or false"),
        ({"kvmask_contract": ...}, "`kvmask_contract` must be there"),
        ({"fingerprint": ...}, "`fingerprint` must be there"),
        ({"fingerprint": "0" * 16}, "must be that of the contract it stands in, got '0000"),
        ({"hash_block_size": "4"}, "`hash_block_size` must be an integer, got text"),
        ({"hash_block_size": 4.0}, "must be an integer, got a number with a fraction"),
        ({"partial_hits": 1}, "`partial_hits` must be true or false, got an integer"),
        ({"states": "maybe"}, "`states` must be one of"),
        ({"hash": []}, "`hash` must be an object or null, got a list"),
        ({"hash__algorithm": "md5"}, "`algorithm` must be one of"),
        ({"hash__check": "12"}, "`check` must be 16 hex digits"),
        ({"hash__release": "new"}, "`release` must be"),
        ({"hash__seed": "x"}, "must be the one that the contract"),
        ({"hash__start": "zz"}, "`hash.start` must be hexadecimal digits"),
        ({"keys__format": "Other"}, "`keys.format` must be one of .* got 'Other'"),
        ({"keys__model": 5}, "`keys` must be valid: `model` must be a str, got int"),
        ({"keys__tags": [1]}, "`keys` must be valid"),
        ({"ranks__tp_size": "8"}, "`ranks` must be valid: `tp_size` must be an integer"),
        ({"ranks__kv_heads": {"other": 1}}, r"`kv_heads` must name groups"),
        ({"groups": {}}, "`groups` must be a list, got an object"),
        ({"groups": []}, "`groups` must"),
        ({"groups__0__name": "window"}, "must be of one group alone, got 'window' again"),
        ({"groups__0__name": 5}, r"`groups\[0\].name` must be text, got an integer"),
        ({"groups__0__kind": "new"}, r"`groups\[0\].kind` must be one of .* got 'new'"),
        ({"groups__0__block_size": "256"}, r"`groups\[0\]` must be valid: `block_size`"),
        ({"groups__0__eagle": 1}, r"`groups\[0\].eagle` must be true or false, got an integer"),
        ({"groups__0__spec": 1.5}, "got a number with a fraction"),
        ({"groups__0__spec": [{}]}, r"`groups\[0\].spec` must hold .* got an object"),
        ({"groups__0__payload": {}}, r"`groups\[0\].payload` must be a list or null"),
        ({"groups__0__payload": []}, "must hold"),
        ({"groups__0__payload__0__layers": [[1]]}, "pairs of integers, .* got"),
        ({"groups__0__payload__0__layers": [[MAX_LAYERS + 1, 0]]}, "must be at most 65536"),
        ({"groups__0__payload__0__layers": [[-1, 0]]}, "pairs of integers"),
        ({"groups__0__payload__0__dtype": 5}, r"payload\[0\]` must be valid: `dtype`"),
        ({"groups__0__namespaces__0__tensor": 99}, "must be of the ranks"),
        ({"groups__0__namespaces__0__part": -1}, "must be of the ranks"),
        ({"groups__0__namespaces__0__stage": 2}, "must be of the ranks"),
        ({"groups__0__namespaces": 5}, "must be a list, got an integer"),
        ({"facts": []}, "`facts` must be an object"),
        ({"facts__x": [1]}, "`facts` must map text"),
    ],
)
def test_wrong_fields(edits, said):
    with pytest.raises(ArgumentError, match=said):
        Contract.from_json(changed(**edits))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must be JSON, got JSONDecodeError"),
        ("[]", "a contract must be an object, got a list"),
        ("null", "must be an object, got null"),
        ("{}", "`kvmask_contract` must be there"),
        ('{"a": 1, "a": 2}', "name each field once, got 'a' twice"),
        ('{"kvmask_contract": NaN}', "must hold JSON numbers, got NaN"),
        ('{"kvmask_contract": 1e999}', "must be an integer, got a number"),
        ("[" * 100_000, "must be JSON, got RecursionError"),
        ('{"a":' * 100_000, "must be JSON, got RecursionError"),
        ('{"kvmask_contract": ' + "1" * 10_000 + "}", "must be JSON, got ValueError"),
        (" " * (MAX_CHARACTERS + 1), "at most 16777216 characters, got 16777217"),
    ],
)
def test_wrong_texts(text, said):
    with pytest.raises(ArgumentError, match=said):
        Contract.from_json(text)


def test_shards_that_are_named_twice():
    document = json.loads(load("rich"))
    row = document["groups"][0]
    row["namespaces"] *= 2
    with pytest.raises(ArgumentError, match=r"must name each shard once, got \(0, 0, 0\) again"):
        Contract.from_json(json.dumps(document))


def test_texts_that_are_none():
    for text in (None, b"{}", {}):
        with pytest.raises(TypeError, match="`text` must be a str"):
            Contract.from_json(text)


@pytest.mark.parametrize(
    "path",
    ["groups__0__spec", "facts__x", "groups__0__payload__0__layers", "keys__tags", "extra", "hash"],
)
def test_deep_values_are_no_recursion_error(path):
    for depth in (40, 500):
        deep = json.loads("[" * depth + "]" * depth)
        with pytest.raises(ArgumentError, match="at most 32 deep"):
            Contract.from_json(changed(**{path: deep}))


def test_deep_specs():
    def deep(depth):
        value = ()
        for _ in range(depth):
            value = (value,)
        return Contract({"a": FullAttention(16, spec=value)}, 16, StrictKeys("m"))

    assert Contract.from_json(deep(27).to_json()) == deep(27)
    for depth in (28, 29, 400):
        with pytest.raises(ArgumentError, match="nested deeper than 28"):
            deep(depth).to_json()


def test_what_json_cannot_carry():
    for spec in (1.5, frozenset(), (1, object()), b"x"):
        contract = Contract({"a": FullAttention(16, spec=spec)}, 16, StrictKeys("m"))
        with pytest.raises(ArgumentError, match="`spec` of group 'a' must be"):
            contract.to_json()

    class OwnKeys(StrictKeys):
        pass

    with pytest.raises(ArgumentError, match=r"must be of a format of kvmask .* got OwnKeys"):
        Contract({"a": FullAttention(16)}, 16, OwnKeys("m"), Hashing(seed=SECRET)).to_json()


def test_every_format_is_carried():
    for keys in (
        AscendKeys("m", cache_role="state", release="0.28"),
        LMCacheObjectKeys("m", cache_salt="s"),
        SglangKeys("m", mla=True, backend_tag="t"),
        VllmKeys("m", release="0.28"),
    ):
        contract = Contract({"a": FullAttention(16)}, 16, keys, Hashing(seed=SECRET))
        found = Contract.from_json(contract.to_json())
        assert found == contract
        assert found.keys[0][0] == keys


def test_order_of_groups_is_kept():
    groups = {name: FullAttention(16 + 16 * (i % 2)) for i, name in enumerate("zayb")}
    contract = Contract(groups, 16, StrictKeys("m"), Hashing(seed=SECRET))
    text = json.dumps(json.loads(contract.to_json()), sort_keys=True)
    assert Contract.from_json(text).names == ("z", "a", "y", "b")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda children: (
        st.lists(children, max_size=2) | st.dictionaries(st.text(max_size=3), children, max_size=2)
    ),
    max_leaves=4,
)


def places(value, path=()):
    """Every place in a document."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value)
    if isinstance(value, dict | list):
        for key, item in items:
            yield from (
                places(item, (*path, key)) if isinstance(item, dict | list) else [(*path, key)]
            )


PLACES = [path for path in places(json.loads(rich().to_json())) if path]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(PLACES), VALUES)
def test_any_edit_is_refused_or_harmless(path, value):
    document = json.loads(rich().to_json())
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    try:
        found = Contract.from_json(json.dumps(document))
    except ArgumentError:
        return
    assert found.fingerprint == rich().fingerprint
    assert Contract.from_json(found.to_json()) == found


def test_a_file_that_cannot_be_written_is_named_itself(tmp_path):
    path = tmp_path / "nowhere" / "contract.json"
    with pytest.raises(FileNotFoundError) as caught:
        plain().write(path)
    assert caught.value.filename == str(path)
