"""Why a prompt does not hit: diagnoses against lookups, and against stores made by hand."""

import json
import random

import pytest
from fake_store import EXIST, FakeStore
from vllm_cases import random_case

from kvmask import (
    Bitset,
    ChunkedLocal,
    Contract,
    FullAttention,
    Hashing,
    Mamba,
    RankGrid,
    SlidingWindow,
    StrictKeys,
    VllmKeys,
    drive,
)
from kvmask._core import build_keys
from kvmask.errors import AlignmentError, ArgumentError, StoreError
from kvmask.why import CHANGES, ask, diagnose, look_near
from kvmask.why.near import changed, usual_changes
from kvmask.why.reasons import Evidence
from kvmask.why.report import runs, runs_text

SEED = Hashing(seed="a seed")


def contract_of(groups, hash_block=16, keys=None, **more):
    more.setdefault("hashing", SEED)
    return Contract(groups, hash_block, StrictKeys("m") if keys is None else keys, **more)


def fill(store, contract, request, group, blocks, shards=None):
    """Put blocks of a group, for some of its rank namespaces."""
    size = contract.groups[group].block_size
    count = request.num_tokens // size
    builders = contract.scheme.namespaces[group]
    chosen = builders if shards is None else [builders[i] for i in shards]
    mask = Bitset.from_indices(count, blocks)
    scale = size // contract.hash_block_size
    for key in build_keys(chosen, request.hashes, mask, 0, scale):
        store.pool[key] = b"x"


def asked(groups, tokens, present, hash_block=16, shards=None, **more):
    """The diagnosis of a request of so many tokens, with these blocks present per group."""
    contract = contract_of(groups, hash_block, **more)
    request = contract.request(range(tokens))
    store = FakeStore()
    for group, blocks in enumerate(present):
        fill(store, contract, request, group, blocks, None if shards is None else shards[group])
    return diagnose(request, store)


# --- examples


def test_the_example_that_was_done_by_hand():
    """Group 0 has only blocks 8 to 11, group 5 all 12."""
    groups = [
        FullAttention(64),
        *(SlidingWindow(16, window=32, spec=i) for i in range(4)),
        FullAttention(64, spec="other heads"),
    ]
    windows = [range(48)] * 4
    found = asked(groups, 64 * 12 + 1, [range(8, 12), *windows, range(12)])
    assert found.sentence == (
        "No hit for 769 tokens: group 0 (full attention, blocks of 64) has only blocks 8 to 11 of "
        "12, and a longer hit needs all from the start: block 0 (tokens 0 to 63) is missing."
    )
    assert (found.length, found.longest) == (0, 768)
    first, last = found.groups[0], found.groups[5]
    assert runs(first.present.indices()) == [(8, 11)]
    assert runs(first.missing.indices()) == [(0, 7)]
    assert (last.present.count(), last.missing.count()) == (12, 0)
    assert found.reasons[0].group == 0
    assert found.reasons[0].blocks == tuple(range(8))


def test_the_first_missing_block_of_full_attention():
    found = asked([FullAttention(64)], 64 * 12 + 1, [[*range(5), *range(6, 12)]])
    assert found.sentence == (
        "The hit is 320 of 769 tokens: group 0 (full attention, blocks of 64) has 11 of 12 blocks, "
        "and a longer hit needs all from the start: block 5 (tokens 320 to 383) is missing."
    )
    assert found.groups[0].rests.indices() == [0, 1, 2, 3, 4]
    assert found.reasons[0].bound == 320


def test_a_window_block_below_the_boundary():
    groups = {"full": FullAttention(64), "swa": SlidingWindow(16, window=32)}
    found = asked(groups, 257, [range(4), [2, 3, 6, 7, 11, 15]])
    assert found.sentence == (
        'The hit is 128 of 257 tokens: a hit of 256 needs blocks 14 to 15 of group 1 "swa" '
        "(sliding window 32, blocks of 16), and 14 is missing; every length between 128 and 256 "
        "lacks some too."
    )
    assert found.reasons[0].kind == "boundary"
    assert found.reasons[0].blocks == (14,)
    assert found.groups[1].rests.indices() == [6, 7]


def test_a_state_that_is_missing():
    found = asked([FullAttention(16), Mamba(32)], 97, [range(6), [0, 1]])
    assert found.sentence == (
        "The hit is 64 of 97 tokens: a hit of 96 needs block 2 of group 1 (state, blocks of 32), "
        "and it is missing."
    )


def test_a_chunk_that_is_missing():
    found = asked([FullAttention(16), ChunkedLocal(16, chunk_size=64)], 97, [range(6), [5]])
    assert "a hit of 96 needs blocks 4 to 5 of group 1 (chunked local 64" in found.sentence
    assert "and 4 is missing" in found.sentence
    assert found.length == 64


def test_full_attention_and_a_window_below_it_are_both_told():
    groups = [FullAttention(64), SlidingWindow(16, window=32)]
    found = asked(groups, 257, [range(3), [2, 3]])
    assert [reason.kind for reason in found.reasons] == ["boundary", "missing", "last token"]
    assert [reason.bound for reason in found.reasons] == [128, 192, 256]
    assert found.length == 64


@pytest.mark.parametrize(
    ("tokens", "length", "kind", "text"),
    [
        (257, 256, "last token", "the last token is always computed"),
        (256, 192, "last token", "the last token is always computed, and hits are multiples of 64"),
        (300, 256, "alignment", "hits are multiples of 64 tokens, so the last 44 tokens are"),
        (64, 0, "short", "so a prompt needs at least 65 tokens"),
        (1, 0, "short", "so a prompt needs at least 65 tokens"),
    ],
)
def test_limits_that_no_key_can_change(tokens, length, kind, text):
    found = asked([FullAttention(64)], tokens, [range(tokens // 64)])
    assert (found.length, found.longest) == (length, length)
    assert found.reasons[0].kind == kind
    assert text in found.sentence


def test_eagle_drops_a_block():
    found = asked([FullAttention(16, eagle=True)], 65, [range(4)])
    assert found.length == found.longest == 48
    assert found.sentence == (
        "The hit is 48 of 65 tokens: EAGLE drops the last matched block, so a hit of 64 tokens "
        "ends at 48."
    )


def test_a_window_of_one_token_is_never_stored():
    found = asked([FullAttention(16), SlidingWindow(16, window=1)], 65, [range(4), []])
    assert (found.length, found.longest) == (0, 0)
    assert "group 1 (sliding window 1, blocks of 16) is never stored" in found.sentence


def test_ranks_that_lack_what_others_have():
    found = asked(
        [FullAttention(16)],
        65,
        [range(4)],
        ranks=RankGrid(tp_size=2, pp_size=2, kv_heads=8),
        shards=[[0, 1, 3]],
    )
    assert found.length == 0
    assert found.sentence.endswith(
        "block 0 (tokens 0 to 15) is missing on tensor shard 1, pipeline stage 0 (of 4 ranks that "
        "hold it)."
    )
    (view,) = found.groups
    assert [shard.present.count() for shard in view.shards] == [4, 4, 0, 4]
    assert view.shards[2].name == "tensor shard 1, pipeline stage 0"


def test_groups_that_are_not_cacheable_are_left_out():
    groups = [FullAttention(16), SlidingWindow(24, window=48, prefix_cacheable=False)]
    found = asked(groups, 65, [range(2), []])
    assert found.length == 32
    assert len(found.groups[1].needed) == 0
    assert found.groups[1].shards == ()


def test_keys_of_parts_of_blocks():
    groups = [FullAttention(32)]
    contract = contract_of(groups, partial_hits=True)
    request = contract.request(range(113))
    store = FakeStore()
    builders = contract.scheme.namespaces[0]
    # Digests of 32, 64 and 80 tokens: two whole blocks, and half of the third one.
    for key in build_keys(builders, request.hashes, Bitset.from_indices(7, [1, 3, 4])):
        store.pool[key] = b"x"
    found = diagnose(request, store)
    assert found.length == 80
    assert found.groups[0].inside == 1
    assert found.groups[0].present.indices() == [0, 1]
    assert "block 2 (tokens 64 to 95) is missing" in found.sentence


def test_how_many_keys_the_strategies_ask():
    groups = [FullAttention(64), SlidingWindow(16, window=32)]
    contract = contract_of(groups)
    request = contract.request(range(64 * 40 + 1))
    store = FakeStore()
    fill(store, contract, request, 0, range(40))
    fill(store, contract, request, 1, range(160))
    found = diagnose(request, store)
    assert found.exact_keys == 40 + 80
    plans = {how: request.lookup_plan(strategy=how) for how in ("exact", "staged")}
    for plan in plans.values():
        drive(plan, store)
    assert (found.staged_keys, found.staged_calls) == (
        plans["staged"].asked,
        plans["staged"].probes,
    )
    assert found.present_keys == 120


def test_a_diagnosis_is_json():
    found = asked([FullAttention(64)], 64 * 4 + 1, [[0, 1, 3]])
    plain = json.loads(json.dumps(found.plain()))
    assert plain["sentence"] == found.sentence
    assert plain["groups"][0]["missing"] == [[2, 2]]
    assert plain["reasons"][0]["kind"] == "missing"


# --- against lookups


def random_contract(case):
    return contract_of(
        case.groups,
        case.hash_block_size,
        alignment=case.alignment,
        retention_interval=case.retention,
        partial_hits=case.partial,
    )


def test_every_diagnosis_is_that_of_a_lookup_and_its_reasons_hold():
    exact, reasons = 0, []
    for index in range(1500):
        case = random_case(41, index)
        try:
            contract = random_contract(case)
        except AlignmentError:
            continue
        request = contract.request(range(case.num_tokens))
        store = FakeStore()
        for g, units in enumerate(case.present):
            if case.groups[g].prefix_cacheable:
                scale = case.per_block(g)
                bits = Bitset.from_bools(units[: len(request.hashes) // scale])
                builders = contract.scheme.namespaces[g]
                for key in build_keys(builders, request.hashes, bits, 0, scale):
                    store.pool[key] = b"x"
        found = diagnose(request, store)
        plans = {how: request.lookup_plan(strategy=how) for how in ("exact", "staged")}
        hits = {how: drive(plan, store) for how, plan in plans.items()}
        assert found.length == hits["exact"].length == hits["staged"].length
        assert found.exact_keys == plans["exact"].asked
        assert (found.staged_keys, found.staged_calls) == (
            plans["staged"].asked,
            plans["staged"].probes,
        )
        assert found.reasons
        assert found.longest >= found.length
        keys, spans = ask._keys(contract, request)
        units, _ = ask._presence(contract, store.batch_is_exist(keys), spans)
        needed = tuple(bits for bits, _ in spans)
        evidence = Evidence(
            contract.coordinator, contract.names, case.num_tokens, needed, tuple(units)
        )
        assert evidence.search(units).length == found.length
        if found.length < found.longest:
            reasons.append(found.reasons[0].kind)
            check_reason(evidence, found)
        # Two drafted sets, or ends inside of blocks: vLLM's search then takes the first that does.
        if not case.partial and not any(g.eagle for g in case.groups):
            unit = contract.coordinator.hit_alignment
            fits = [n for n in range(unit, found.longest + 1, unit) if not evidence.lacking(n)]
            assert found.length == max(fits, default=0)
            exact += 1
    assert exact > 300
    assert min(reasons.count("missing"), reasons.count("boundary")) > 100


def check_reason(evidence, found):
    """The blocks that a reason names are missing, and with all others there they are in the way."""
    for reason in found.reasons:
        if reason.group is None or not reason.blocks:
            continue
        if evidence.coord.partial_hits:
            continue  # a block can be there, and what ends inside of it not
        view = found.groups[reason.group]
        assert not any(view.present[b] for b in reason.blocks if b < len(view.present))
        bits = evidence.needed[reason.group]
        absent = Bitset.from_indices(
            len(bits), [b for b in bits.indices() if b not in reason.blocks]
        )
        others = list(evidence.needed)
        others[reason.group] = absent
        length = evidence.search(others).length
        if reason.kind == "missing":
            assert length <= reason.bound
        elif found.reasons[0] is reason:
            # No hit ends at the length that the sentence names.
            assert length != reason.bound + evidence.coord.hit_alignment


# --- a store that fails


def test_a_store_that_does_not_answer():
    contract = contract_of([FullAttention(16)])
    request = contract.request(range(65))
    for answer, message in (
        (OSError("gone"), "must answer which of 4 keys it has, got OSError"),
        (-900, "got code -900 for all 4 keys"),
    ):
        store = FakeStore()
        store.fail(EXIST, answer)
        with pytest.raises(StoreError, match=message):
            diagnose(request, store)


def test_keys_without_an_answer_count_as_missing():
    contract = contract_of([FullAttention(16)])
    request = contract.request(range(65))
    store = FakeStore()
    fill(store, contract, request, 0, range(4))
    keys = list(store.pool)
    store.fail(EXIST, -500, keys=[keys[2]])
    found = diagnose(request, store)
    assert (found.length, found.unknown_keys, found.present_keys) == (32, 1, 3)


def test_progress_is_told_after_each_call(monkeypatch):
    monkeypatch.setattr(ask, "BATCH", 3)
    contract = contract_of([FullAttention(16)])
    request = contract.request(range(129))
    seen = []
    diagnose(request, FakeStore(), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(3, 8), (6, 8), (8, 8)]


# --- near


GROUPS = {"full": FullAttention(64), "swa": SlidingWindow(16, window=32)}


def saved_by(contract, tokens, extra_keys=None):
    """A store with all that an engine of a contract saves."""
    store = FakeStore()
    request = contract.request(tokens, extra_keys=extra_keys)
    for g in range(len(contract.groups)):
        if contract.groups[g].prefix_cacheable:
            fill(store, contract, request, g, range(len(tokens) // contract.groups[g].block_size))
    return store


TOKENS = list(range(64 * 8 + 1))


@pytest.mark.parametrize("keys", [StrictKeys("m"), VllmKeys("m")])
@pytest.mark.parametrize(
    "other",
    [
        {"hashing": Hashing(seed="0")},
        {"hashing": Hashing(seed="vllm-none-hash")},
        {"hashing": Hashing("sha256_cbor", seed="a seed")},
        {"hashing": Hashing("sha256_cbor", seed="0")},
        {"hash_block": 8},
    ],
)
def test_another_seed_algorithm_or_hash_block_is_found(keys, other):
    theirs = contract_of(GROUPS, keys=keys, **other)
    mine = contract_of(GROUPS, keys=keys)
    store = saved_by(theirs, TOKENS)
    assert diagnose(mine.request(TOKENS), store).length == 0
    tries, left = look_near(mine, store, TOKENS)
    hits = [near for near in tries if near.length]
    assert [near.length for near in hits] == [512]
    assert left == 0
    made = changed(mine, hits[0].change)
    assert (made.hash_block_size, made.hashing) == (theirs.hash_block_size, theirs.hashing)


def test_other_ranks_of_strict_keys_are_found():
    grid = RankGrid(tp_size=4, kv_heads=8)
    mine = contract_of(GROUPS, ranks=grid)
    theirs = contract_of(GROUPS, ranks=RankGrid(tp_size=2, kv_heads=8))
    tries, _ = look_near(mine, saved_by(theirs, TOKENS), TOKENS)
    assert [near.name for near in tries if near.length] == ["with tp size 2"]


def test_fewer_ranks_in_keys_of_vllm_are_found():
    keys = VllmKeys("m")
    mine = contract_of(GROUPS, keys=keys, ranks=RankGrid(tp_size=4, kv_heads=8))
    theirs = contract_of(GROUPS, keys=keys, ranks=RankGrid(tp_size=2, kv_heads=8))
    tries, _ = look_near(mine, saved_by(theirs, TOKENS), TOKENS)
    assert [near.name for near in tries if near.length] == ["with tp size 1", "with tp size 2"]


def test_a_prefix_a_namespace_and_what_is_asked_for_are_found():
    mine = contract_of(GROUPS, keys=VllmKeys("m", cache_prefix="blue"))
    theirs = contract_of(GROUPS, keys=VllmKeys("m"))
    tries, _ = look_near(mine, saved_by(theirs, TOKENS), TOKENS)
    assert [near.name for near in tries if near.length] == ["without cache prefix"]
    green = contract_of(GROUPS, keys=VllmKeys("m", cache_prefix="green"))
    asked_for = [{"cache_prefix": "green"}, {"model": "other"}]
    tries, _ = look_near(mine, saved_by(green, TOKENS), TOKENS, tries=asked_for, usual=False)
    assert [(near.name, near.length) for near in tries] == [
        ("with cache prefix 'green'", 512),
        ("with model 'other'", 0),
    ]


def test_blocks_of_another_size_are_found():
    mine = contract_of({"full": FullAttention(16)}, 16, keys=VllmKeys("m"))
    theirs = contract_of({"full": FullAttention(32)}, 32, keys=VllmKeys("m"))
    tries, _ = look_near(mine, saved_by(theirs, TOKENS), TOKENS)
    assert {"with all blocks 2 times as large"} <= {near.name for near in tries if near.length}


def test_the_same_prompt_without_salt_is_found():
    contract = contract_of(GROUPS, keys=VllmKeys("m"))
    store = saved_by(contract, TOKENS)

    def salted(first, blocks):
        return [(("cache_salt", "s"),) if first + i == 0 else None for i in range(blocks)]

    assert diagnose(contract.request(TOKENS, extra_keys=salted), store).length == 0
    tries, _ = look_near(contract, store, TOKENS, extra_keys=salted)
    assert tries[0].name == "without salt and adapter"
    assert tries[0].length == 512


def test_the_keys_of_all_tries_are_bounded():
    contract = contract_of(GROUPS)
    for most in (1, 5, 20, 64):
        store = FakeStore()
        tries, left = look_near(contract, store, TOKENS, max_keys=most)
        assert sum(len(call.keys) for call in store.calls(EXIST)) <= most
        assert sum(near.asked for near in tries) <= most
        assert left > 0
    everything, none = look_near(contract, FakeStore(), TOKENS)
    assert none == 0
    assert len(everything) > 10


def test_a_try_that_the_bound_ends_is_not_called_a_hit():
    theirs = contract_of(GROUPS, hashing=Hashing(seed="0"))
    tokens = list(range(64 * 64 + 1))
    store = saved_by(theirs, tokens)
    tries, _ = look_near(
        contract_of(GROUPS), store, tokens, tries=[{"seed": "0"}], usual=False, max_keys=20
    )
    assert [(near.decided, near.length, near.present > 0) for near in tries] == [(False, 0, True)]


def test_changes_that_give_the_same_keys_are_left_out():
    contract = contract_of(GROUPS)
    tries, _ = look_near(contract, FakeStore(), TOKENS, tries=[{"seed": "a seed"}], usual=False)
    assert tries == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": "red"}, "`change` must name one of seed, algorithm"),
        ({"algorithm": "md5"}, "`algorithm` must be one of sha256"),
        ({"hash_block": 24}, "`block_size` must be a multiple of `hash_block_size`"),
        ({"blocks": 0.3}, "`blocks` must leave whole tokens"),
        ({"blocks": "x"}, "`blocks` must be a number above 0 and at most 65536, got 'x'"),
        ({"blocks": "nan"}, "`blocks` must be a number above 0 and at most 65536, got 'nan'"),
        ({"blocks": float("inf")}, "`blocks` must be a number above 0"),
        ({"blocks": 1e308}, "`blocks` must be a number above 0"),
        ({"blocks": True}, "`blocks` must be a number above 0"),
        ({"blocks": None}, "`blocks` must be a number above 0"),
        ({"cache_prefix": "x"}, "`cache_prefix` must be a part of StrictKeys"),
        ({"tp_size": "0"}, "`tp_size` must be"),
        ({"tp_size": "x"}, "`tp_size` must be an integer, got 'x'"),
        ({"pp_size": "1e5"}, "`pp_size` must be an integer, got '1e5'"),
        ({"hash_block": "1_6"}, "`hash_block` must be an integer, got '1_6'"),
        ({"hash_block": "9" * 5000}, "`hash_block` must be an integer, got '999"),
    ],
)
def test_changes_that_cannot_be(change, message):
    with pytest.raises(ArgumentError, match=message):
        look_near(contract_of(GROUPS), FakeStore(), TOKENS, tries=[change])


@pytest.mark.parametrize("tries", [5, "seed", [5], ["seed"], [{}], {"seed": "0"}])
def test_tries_that_are_no_changes(tries):
    with pytest.raises(TypeError, match="`tries` must"):
        look_near(contract_of(GROUPS), FakeStore(), TOKENS, tries=tries)
    with pytest.raises(TypeError, match="`tp_size` must be an integer, got float"):
        look_near(contract_of(GROUPS), FakeStore(), TOKENS, tries=[{"tp_size": 2.0}])


def test_usual_changes_are_known_ones():
    for keys in (StrictKeys("m", namespace="n"), VllmKeys("m", cache_prefix="p")):
        for change in usual_changes(contract_of(GROUPS, keys=keys), True):
            assert change.keys() <= {*CHANGES, "extra_keys"}


def test_digests_from_elsewhere_have_no_seeds_to_try():
    contract = contract_of(GROUPS, hashing=None)
    assert not any("seed" in change for change in usual_changes(contract, False))
    with pytest.raises(ArgumentError, match="`hashing` of the contract must be given"):
        changed(contract, {"seed": "0"})


# --- words


def test_runs_in_words():
    rng = random.Random(3)
    for _ in range(200):
        blocks = sorted(rng.sample(range(40), rng.randint(0, 20)))
        assert [b for first, last in runs(blocks) for b in range(first, last + 1)] == blocks
        assert runs_text(blocks).count(" more") <= 1
    assert runs_text([]) == ""


def test_one_token_is_one_token():
    contract = Contract([FullAttention(16)], 16, VllmKeys("m"), Hashing(seed="s"))
    assert diagnose(contract.request([1]), FakeStore()).sentence.startswith("No hit for 1 token:")
