"""What engines must agree on, end to end: thirteen silent disagreements, each with the rest of its
kind. In every case something ended with `ok` and wrong or useless bytes; now it is refused, is a
miss, or comes out right.
"""

import pickle
import random

import numpy as np
import pytest
import strategies
from fake_store import EXIST, GET, PUT, UNREGISTER, FakeStore
from fuzz_lookup import OneHint
from hypothesis import given
from hypothesis import strategies as st
from rig import Engine, contract_of, digests, pair, whole_chunks

from kvmask import (
    Bitset,
    BlockHasher,
    BlockHashes,
    ChunkedLocal,
    Contract,
    FullAttention,
    Hashing,
    KVLayout,
    KVTransfer,
    LoadPlan,
    LookupPlan,
    Mamba,
    PlanTools,
    PresenceMemo,
    RankGrid,
    SavePlan,
    SlidingWindow,
    StrictKeys,
    VllmKeys,
    drive,
    hash_tokens,
)
from kvmask.errors import AlignmentError, ArgumentError, PlanStateError, StoreError
from kvmask.keys import SglangKeys
from kvmask.plans import CALL_FAILED, MALFORMED_ANSWER, NOT_TRIED

FULL_AND_WINDOW = {"full": FullAttention(16), "swa": SlidingWindow(16, window=64)}
SEED = Hashing("sha256", seed="one")


def full_contract(**options):
    options.setdefault("facts", {"dtype": "made up"})
    return Contract([FullAttention(16)], 16, StrictKeys("m"), **options)


# R1: two groups never share a key


def test_r1_groups_of_one_template_keep_their_bytes_apart():
    """Blocks of equal bytes, the same strict keys for both: group 1 held group 0's bytes."""
    contract = contract_of(FULL_AND_WINDOW, 16, StrictKeys("m"), facts={"dtype": "made up"})
    store = FakeStore()
    rng = np.random.default_rng(1)
    memory = {name: rng.integers(0, 256, (6, 64), dtype=np.uint8) for name in FULL_AND_WINDOW}

    def transfer(client, arrays):
        layouts = {n: KVLayout.from_tensors([a], num_blocks=6) for n, a in arrays.items()}
        return KVTransfer(client, contract.bind(layouts))

    kv = transfer(store, memory)
    request = contract.request(hashes=digests(4), num_tokens=64)
    tables = {"full": [1, 2, 3, 4], "swa": [4, 3, 2, 1]}
    saved = kv.save(request, tables, 64)
    assert (saved.stored, saved.present, len(store.pool)) == (8, 0, 8)
    mine = {name: np.zeros((6, 64), np.uint8) for name in FULL_AND_WINDOW}
    reader = transfer(store.client(), mine)
    request = contract.request(hashes=digests(4), num_tokens=65)
    hit = reader.lookup(request)
    assert hit.length == 64
    assert reader.load(request, hit, tables).ok
    for name, mask in zip(FULL_AND_WINDOW, hit.masks, strict=True):
        for i in mask.indices():
            block = tables[name][i]
            assert np.array_equal(mine[name][block], memory[name][block])


@pytest.mark.parametrize(
    "keys",
    [
        SglangKeys("m", mla=True),
        {"full": SglangKeys("m", mla=True), "swa": SglangKeys("m", mla=True)},
    ],
    ids=["one", "each"],
)
def test_r1_groups_that_would_share_keys_are_refused_by_name(keys):
    with pytest.raises(ArgumentError) as caught:
        contract_of(FULL_AND_WINDOW, 16, keys)
    assert "'full'" in str(caught.value)
    assert "'swa'" in str(caught.value)


@pytest.mark.parametrize("kind", [StrictKeys, VllmKeys])
def test_r1_templates_that_name_a_group_already_are_refused(kind):
    keys = {"full": kind("m", group_id=1), "swa": kind("m")}
    with pytest.raises(ArgumentError, match="must be a template whose ranks and group are left"):
        contract_of(FULL_AND_WINDOW, 16, keys)


def test_r1_no_two_places_of_a_block_share_a_key():
    """Groups, objects of a block, shards, context ranks, stages: all have keys of their own."""
    grid = RankGrid(tp_size=4, pp_size=2, dcp_size=2, kv_heads=2)
    keys = {
        "full": [StrictKeys("m", tags={"part": "k"}), StrictKeys("m", tags={"part": "v"})],
        "swa": StrictKeys("m"),
    }
    contract = contract_of(FULL_AND_WINDOW, 16, keys, ranks=grid, facts={"dtype": "made up"})
    builders = [b for g in contract.scheme.groups for b in g.namespaces]
    assert len(builders) == 2 * 8 + 8
    assert len({(b.prefix, b.suffix) for b in builders}) == len(builders)


# R2: digests of another hash block, algorithm or start


TOKENS = list(range(64))


def use_everywhere(contract, engine, hashes):
    """Each way in which digests reach a plan."""
    hit = contract.coordinator.find_hit([[True] * 4], 64)
    return {
        "request": lambda: contract.request(hashes=hashes),
        "extend": lambda: contract.request(hashes=[]).extend(hashes=hashes),
        "lookup": lambda: LookupPlan(contract, hashes, 64),
        "bound lookup": lambda: LookupPlan(engine, hashes, 64),
        "save": lambda: SavePlan(engine, hashes, [[1, 2, 3, 4]], 64),
        "load": lambda: LoadPlan(engine, hashes, hit, [[1, 2, 3, 4]]),
    }


WAYS = ("request", "extend", "lookup", "bound lookup", "save", "load")


def hashing_engine():
    contract = full_contract(hashing=SEED)
    layout = KVLayout.from_tensors([np.zeros((6, 64), np.uint8)], num_blocks=6)
    return contract, contract.bind([layout])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"block_size": 4}, "`hash_block_size`, got 4 and 16"),
        ({"block_size": 32}, "`hash_block_size`, got 32 and 16"),
        ({"algorithm": "sha256_cbor"}, "algorithm, got sha256_cbor and sha256"),
        ({"seed": "two"}, "must start from the contract's seed"),
        ({"algorithm": "xxhash"}, "algorithm, got xxhash and sha256"),
    ],
    ids=str,
)
def test_r2_digests_that_are_known_to_be_others_are_refused(way, options, said):
    if options.get("algorithm") == "xxhash":
        pytest.importorskip("xxhash")
    contract, engine = hashing_engine()
    made = {"block_size": 16, "seed": "one", **options}
    hashes = hash_tokens(TOKENS * 4, **made)
    with pytest.raises(ArgumentError) as caught:
        use_everywhere(contract, engine, hashes)[way]()
    assert said in str(caught.value)


@pytest.mark.parametrize("way", WAYS)
def test_r2_what_is_known_of_digests_survives(way):
    """A pickle, a block hasher, and digests that continue others."""
    contract, engine = hashing_engine()
    grown = BlockHasher(4, seed="one")
    grown.extend(TOKENS)
    wrong = hash_tokens(TOKENS, 4, seed="one")
    for hashes in (pickle.loads(pickle.dumps(wrong)), grown.block_hashes()):
        with pytest.raises(ArgumentError, match="got 4 and 16"):
            use_everywhere(contract, engine, hashes)[way]()


@pytest.mark.parametrize("way", WAYS)
def test_r2_digests_of_unknown_origin_are_the_contracts_own_when_they_are_as_wide(way):
    contract, engine = hashing_engine()
    right = hash_tokens(TOKENS, 16, seed="one")
    for hashes in (right, list(right), BlockHashes(bytes(right.tobytes()), 32)):
        use_everywhere(contract, engine, hashes)[way]()
    for hashes in ([b"x" * 16] * 4, BlockHashes(bytes(64), 16), [b"x" * 32, b"y"] * 2):
        with pytest.raises(ArgumentError, match="must be digests of 32 bytes"):
            use_everywhere(contract, engine, hashes)[way]()


def test_r2_requests_that_share_four_tokens_share_no_key_of_sixteen():
    contract, engine = hashing_engine()
    one = contract.request([7, 7, 7, 7, *range(12)])
    two = contract.request([7, 7, 7, 7, *range(50, 62)])
    assert not set(SavePlan(engine, one.hashes, [[1]], 16).keys) & set(
        SavePlan(engine, two.hashes, [[1]], 16).keys
    )


# R3: bytes that mean something else


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        (lambda: np.zeros((6, 16, 4), np.int16), "another element type of the same size"),
        (lambda: np.zeros((6, 16, 2), np.float32), "a wider element type"),
        (lambda: np.zeros((6, 16, 8), np.float16), "more bytes per token"),
        (lambda: np.zeros((6, 4, 16), np.float16), "another shape of the same bytes"),
        (lambda: np.zeros((6, 4, 16), np.float16).swapaxes(1, 2), "another order in memory"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_r3_a_cache_of_another_kind_is_a_miss(theirs, why):
    """float16 blocks were loaded into an int16 cache as 15872; facts come from the layouts."""
    store = FakeStore()

    def transfer(client, memory):
        layout = KVLayout.from_tensors([memory], num_blocks=6)
        contract = contract_of([FullAttention(16)], 16, StrictKeys("m"), payload=[layout])
        return contract, KVTransfer(client, contract.bind([layout]))

    mine = np.full((6, 16, 4), 1.5, np.float16)
    contract, kv = transfer(store, mine)
    request = contract.request(hashes=digests(4), num_tokens=65)
    assert kv.save(request, [[1, 2, 3, 4]], 64).stored == 4
    twin, other = transfer(store.client(), np.zeros((9, 16, 4), np.float16)[:6])
    assert twin.fingerprint == contract.fingerprint
    assert other.lookup(twin.request(hashes=digests(4), num_tokens=65)).length == 64
    memory = theirs()
    contract2, other = transfer(store.client(), memory)
    assert contract2.fingerprint != contract.fingerprint
    hit = other.lookup(contract2.request(hashes=digests(4), num_tokens=65))
    assert hit.length == 0
    assert not memory.any()
    # An engine that starts from the writer's file is told which group and what differs.
    read = Contract.from_json(contract.to_json())
    with pytest.raises(ArgumentError, match=r"`layouts\['0'\]` must have the facts"):
        read.bind([KVLayout.from_tensors([memory], num_blocks=6)])


def test_r3_facts_that_no_layout_knows():
    """fp8 kept in uint8, and a model's revision."""
    layout = KVLayout.from_tensors([np.zeros((6, 64), np.uint8)], num_blocks=6)

    def made(**facts):
        return contract_of(
            [FullAttention(16)], 16, StrictKeys("m"), payload=[layout], facts=facts
        ).fingerprint

    prints = [made(), made(fp8="e4m3"), made(fp8="e5m2"), made(revision="abc")]
    assert len(set(prints)) == 4


def test_r3_strict_keys_without_facts_hold_nothing():
    contract = Contract([FullAttention(16)], 16, StrictKeys("m"))
    with pytest.raises(ArgumentError, match="`payload` must be given"):
        contract.bind([KVLayout.from_tensors([np.zeros((6, 64), np.uint8)], num_blocks=6)])


# R4: states are found


@pytest.mark.parametrize("partial", [False, True])
def test_r4_states_are_saved_and_found_by_default(partial):
    groups = {"full": FullAttention(16), "state": Mamba(32)}
    source, target = pair(groups, 16, 64, partial_hits=partial)
    saved = source.save(digests(4), 64)
    hit = target.lookup(digests(5), 80)
    assert (saved.mark, hit.length) == (64, 64)
    assert hit.masks[1].indices() == [1]
    assert target.load(digests(4), hit).ok
    assert target.block(1, 1) == source.block(1, 1)


def test_r4_a_contract_that_hands_states_over_says_so():
    groups = {"full": FullAttention(16), "state": Mamba(32)}
    source, target = pair(groups, 16, 64, states="handoff")
    request = source.request(digests(4))
    assert source.kv.save(request, source.tables, 64).stored == 4  # full attention alone
    assert target.lookup(digests(5), 80).length == 0
    request.hand_over("state", 64, source.tables[1][1])
    assert source.kv.save(request, source.tables, 64).stored == 1
    hit = target.lookup(digests(5), 80)
    assert hit.length == 64
    assert target.load(digests(4), hit).ok
    assert target.block(1, 1) == source.block(1, 1)


# R5: what is held is said once


def test_r5_a_load_begins_where_the_hit_says():
    """full(64), window(16, 97), 64 tokens held, hit 128: no block that it rests on is missing."""
    groups = {"full": FullAttention(64), "swa": SlidingWindow(16, window=97)}
    source, target = pair(groups, 16, 128)
    source.save(digests(8), 128)
    fill(target, source, {"full": [0], "swa": [0, 1, 2, 3]})
    hit = target.lookup(digests(9), 144, held=64)
    assert hit.length == 128
    result = target.load(digests(8), hit)
    assert result.loaded == 1 + 4  # block 1 of full attention, 4 to 7 of the window
    assert_hit(source, target, hit)


def fill(target, source, blocks):
    """Give an engine these blocks of another one, per group by name."""
    names = target.contract.names
    for name, indices in blocks.items():
        g = names.index(name)
        for mine, theirs in zip(target.tensors[g], source.tensors[g], strict=True):
            for i in indices:
                mine[target.tables[g][i]] = theirs[source.tables[g][i]]


def assert_hit(source, target, hit):
    """All that a hit rests on has the right bytes."""
    for g, mask in enumerate(hit.masks):
        for i in mask.indices():
            assert target.block(g, i) == source.block(g, i), (g, i)


def prefix_blocks(group, tokens):
    """Blocks that an engine has after a prefix hit of its own: whole ones below its end that hold
    a token which the next position can see."""
    size = group.block_size
    first = 0
    if isinstance(group, SlidingWindow):
        first = tokens - (group.window + group.extra_retained_tokens - 1)
    elif isinstance(group, ChunkedLocal):
        first = tokens - tokens % group.chunk_size
    elif isinstance(group, Mamba):
        first = tokens
    return [i for i in range(tokens // size) if (i + 1) * size > first]


@given(st.data())
def test_r5_what_is_held_and_what_is_loaded_make_up_the_hit(data):
    """Any groups, any statement: an engine with exactly the stated blocks ends with right bytes."""
    config = data.draw(strategies.configs())
    num_tokens = min(data.draw(strategies.token_counts(config)), 200 * config.hash_block_size)
    contract = contract_of(
        {f"g{i}": whole_chunks(group) for i, group in enumerate(config.groups)},
        config.hash_block_size,
        alignment=config.alignment,
        retention_interval=config.retention_interval,
        partial_hits=config.partial_hits,
    )
    rng = data.draw(st.randoms(use_true_random=False))
    store = FakeStore()
    source = Engine(store, contract, num_tokens, seed=2, layers=1)
    target = Engine(store.client(), contract, num_tokens, layers=1, hints=OneHint(num_tokens))
    hashes = digests(num_tokens // config.hash_block_size)
    source.save(hashes, num_tokens)
    share = data.draw(st.sampled_from((0, 0, 0.02, 0.1)))
    store.evict([k for k in sorted(store.pool) if rng.random() < share])
    shape = data.draw(st.sampled_from(("prefix", "per group", "blocks", "mixed")))
    limit = num_tokens // 2
    said, blocks = {}, {}
    prefix = rng.randint(0, limit)
    for name, group in zip(contract.names, config.groups, strict=True):
        if shape in ("blocks", "mixed") and (shape == "blocks" or rng.random() < 0.5):
            count = num_tokens // group.block_size
            blocks[name] = [i for i in range(count) if rng.random() < 0.5]
            said[name] = Bitset.from_indices(count, blocks[name])
        else:
            tokens = prefix if shape == "prefix" else rng.randint(0, limit)
            blocks[name] = prefix_blocks(group, tokens)
            said[name] = tokens
    fill(target, source, blocks)
    held = prefix if shape == "prefix" else said
    if shape != "prefix" and rng.random() < 0.5:
        held = list(said.values())
    strategy = data.draw(st.sampled_from(("staged", "exact")))
    hit = target.lookup(hashes, num_tokens, held=held, strategy=strategy)
    result = target.load(hashes, hit)
    assert result.ok
    assert_hit(source, target, hit)
    asked = {k for call in target.store.calls(EXIST) for k in call.keys}
    read = {k for call in target.store.calls(GET) for k in call.keys}
    if not config.partial_hits:  # a tail can be read under a boundary that another one proved
        assert read <= asked


# R6: answers that do not fit, and calls that are wrong


@pytest.mark.parametrize("answer", [[0], [0] * 9, [0, 0, 0, None], None, 5, "0000"], ids=repr)
def test_r6_a_malformed_answer_is_a_code_of_its_keys_and_later_calls_are_made(answer):
    source, target = pair([FullAttention(16)], 16, 128, layers=1, max_pieces=4)
    source.store.fail(PUT, answer, whole=True, index=0)
    result = source.save(digests(8), 128)
    bad = [3] if answer == [0, 0, 0, None] else [0, 1, 2, 3]
    assert [(f.block, f.code) for f in result.failures] == [(i, MALFORMED_ANSWER) for i in bad]
    assert (result.stored, result.present, result.mark) == (8 - len(bad), 0, 16 * bad[0])
    assert source.save(digests(8), 128, result.mark).ok
    hit = target.lookup(digests(9), 129)
    target.store.fail(GET, [] if answer is None else answer, whole=True, index=0)
    result = target.load(digests(8), hit)
    assert [f.code for f in result.failures[-4:]].count(MALFORMED_ANSWER) in (1, 4)
    assert (result.loaded, result.usable_tokens) == (4, 0)


@pytest.mark.parametrize("call", [EXIST, PUT, GET])
def test_r6_an_exception_that_says_the_call_is_wrong_has_the_partial_result(call):
    source, target = pair([FullAttention(16)], 16, 64, layers=1, max_pieces=2)
    source.save(digests(2), 32)
    hit = target.lookup(digests(3), 33)
    wrong = TypeError("incompatible function arguments")
    engine = target if call == GET else source
    engine.store.fail(call, wrong)
    with pytest.raises(TypeError) as caught:
        target.load(digests(2), hit) if call == GET else source.save(digests(4), 64, 32)
    partial = caught.value.partial_result
    assert caught.value is wrong
    assert len(partial.failures) == 2
    assert {f.cause for f in partial.failures} == {wrong}


# R7: counters tell what was asked


def test_r7_keys_that_a_memory_answers_are_not_asked():
    source, _ = pair([FullAttention(16)], 16, 64, memo=PresenceMemo(clock=lambda: 0.0))
    source.save(digests(4), 64)
    before = source.store.counts[EXIST]
    hit = source.lookup(digests(4), 65)
    stats = source.kv.stats
    assert source.store.counts[EXIST] == before
    assert (hit.length, hit.asked, hit.probes, hit.present) == (64, 0, 0, 0)
    assert (stats.asked_keys, stats.probes, stats.present_keys, stats.memo_keys) == (0, 0, 0, 4)


# R8: the end is reported


@pytest.mark.parametrize("how", [-600, RuntimeError("gone")], ids=repr)
def test_r8_a_storage_that_stays_registered_is_reported(how):
    source, _ = pair([FullAttention(16)], 16, 64)
    source.store.fail(UNREGISTER, how, times=1)
    with pytest.raises(StoreError, match="must unregister every storage") as caught:
        source.kv.close()
    assert caught.value.code == (how if isinstance(how, int) else None)
    assert caught.value.__cause__ is (how if isinstance(how, Exception) else None)
    assert len(source.store.registered) == 1
    with pytest.raises(PlanStateError):
        source.lookup(digests(4), 64)
    source.kv.close()
    assert source.store.registered == {}


# R9: numbers that disagree are refused where they meet, before any registration


def layouts(n, shape=(6, 64)):
    return [KVLayout.from_tensors([np.zeros(shape, np.uint8)], num_blocks=6) for _ in range(n)]


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda c: c.bind(layouts(1)), "got 1 and 2"),
        (lambda c: c.bind(layouts(3)), "got 3 and 2"),
        (lambda c: c.bind({"full": layouts(1)[0]}), "for group 'swa'"),
        (lambda c: c.bind({"odd": layouts(1)[0]}), "'odd'"),
        (lambda c: c.bind([layouts(2), layouts(1)[0]]), r"layouts\['full'\]"),
        (
            lambda c: contract_of(FULL_AND_WINDOW, 16, ranks=RankGrid(replication=[1] * 3)),
            "replication",
        ),
        (lambda c: contract_of(FULL_AND_WINDOW, 16, ranks=RankGrid(kv_heads=[8] * 3)), "kv_heads"),
        (lambda c: contract_of(FULL_AND_WINDOW, 16, payload=layouts(1)), "payload"),
        (lambda c: contract_of(FULL_AND_WINDOW, 16, {"full": VllmKeys("m")}), "'swa'"),
        (lambda c: RankGrid(tp_size=4, dcp_size=3), "`dcp_size`"),
        (lambda c: c.bind(layouts(2), tp_rank=1), "`tp_rank` must be below `tp_size`"),
    ],
)
def test_r9_counts_that_disagree_are_refused_where_they_are_stated(build, said):
    contract = contract_of(FULL_AND_WINDOW, 16)
    with pytest.raises((ArgumentError, AlignmentError), match=said):
        build(contract)


# R10: a mark says whose it is


def test_r10_the_mark_of_one_rank_of_several_says_so():
    """Eight ranks hold the same bytes: one of them stored its eighth."""
    grid = RankGrid(tp_size=8, kv_heads=1)
    contract = contract_of(
        [FullAttention(16)], 16, StrictKeys("m"), ranks=grid, facts={"dtype": "made up"}
    )
    store = FakeStore()
    engines = [Engine(store.client(), contract, 256, seed=1, bind={"tp_rank": r}) for r in range(8)]
    results = []
    for engine in engines:
        results.append(engine.save(digests(16), 256))
        reader = KVTransfer(store.client(), contract)
        hit = reader.lookup(contract.request(hashes=digests(16), num_tokens=257))
        assert hit.length == (256 if len(results) == 8 else 16 * min(
            i for i in range(16) if i % 8 >= len(results)))  # fmt: skip
    for result in results:
        assert (result.stored, result.mark, result.writers) == (2, 256, 8)
        assert "saved up to token 256 of this rank's part (1 of 8)" in str(result)
    alone = Engine(FakeStore(), contract_of([FullAttention(16)], 16), 256).save(digests(16), 256)
    assert alone.writers == 1
    assert "part" not in str(alone)


def test_r10_groups_that_are_shared_by_different_numbers_of_ranks():
    grid = RankGrid(tp_size=4, replication={"full": 4, "swa": 2})
    contract = contract_of(
        FULL_AND_WINDOW, 16, StrictKeys("m"), ranks=grid, facts={"dtype": "made up"}
    )
    engine = Engine(FakeStore(), contract, 64, seed=1, bind={"tp_rank": 0})
    assert engine.save(digests(4), 64).writers == 4


# R11: too few digests


@pytest.mark.parametrize("n", [0, 1, 3])
def test_r11_too_few_digests_are_refused_alike(n):
    contract = contract_of([FullAttention(16)], 16)
    engine = Engine(FakeStore(), contract, 64)
    hashes = digests(n)
    said = f"`hashes` must have one digest for every full hash block, got {n} digests of 16 tokens"
    for call in (
        lambda: contract.request(hashes=hashes, num_tokens=64),
        lambda: LookupPlan(contract, hashes, 64),
        lambda: LookupPlan(contract, hashes, 79, strategy="exact"),
        lambda: SavePlan(engine.bound, hashes, engine.tables, 64),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert said in str(caught.value)
    assert not engine.store.calls(EXIST)
    hit = contract.coordinator.find_hit([[True] * 4], 64)
    with pytest.raises(ArgumentError, match=f"must cover the hit, got {n} digests"):
        LoadPlan(engine.bound, hashes, hit, engine.tables)


# R12: why it failed


@pytest.mark.parametrize("call", [EXIST, PUT, GET, "renewal", "event"])
def test_r12_every_failure_has_its_cause_and_the_log_has_it_once(call, caplog):
    source, target = pair([FullAttention(16)], 16, 64, layers=1, max_pieces=2)
    gone = OSError("no route to master")

    class Event:
        def synchronize(self):
            raise gone

    if call in (GET, "renewal"):
        source.save(digests(4), 64)
        hit = target.lookup(digests(4), 65)
        if call == "renewal":
            target.store.fail(GET, -707)
            target.store.fail(EXIST, gone)
        else:
            target.store.fail(GET, gone)
        result = target.load(digests(4), hit)
    else:
        if call != "event":
            source.store.fail(call, gone)
        result = source.save(digests(4), 64, event=Event() if call == "event" else None)
    # Puts and gets of two keys each: no second one is made after the first has failed whole.
    made = 4 if call in (EXIST, "event") else 2
    codes = [CALL_FAILED] * made + [NOT_TRIED] * (4 - made)
    assert [(f.code, f.cause) for f in result.failures] == [(code, gone) for code in codes]
    assert not result.ok
    (record,) = caplog.records
    assert record.getMessage().count("no route to master") == 1


def test_r12_a_lookup_whose_call_fails_says_why(caplog):
    source, _ = pair([FullAttention(16)], 16, 64)
    gone = OSError("no route to master")
    source.store.fail(EXIST, gone)
    hit = source.lookup(digests(4), 65)
    assert (hit.length, hit.cause, hit.answered) == (0, gone, False)
    (record,) = caplog.records
    assert record.getMessage().count("no route to master") == 1
    # A store that has nothing is told apart.
    other, _ = pair([FullAttention(16)], 16, 64)
    hit = other.lookup(digests(4), 65)
    assert (hit.length, hit.cause, hit.answered) == (0, None, True)
    assert (source.kv.stats.failed_lookups, other.kv.stats.failed_lookups) == (1, 0)


# R13: one writer per key


class Rank:
    """One rank of a grid, whose bytes depend on the cell that it holds of each group."""

    def __init__(self, contract, cells, store, tp_rank, pp_rank=0, empty=False, blocks=18):
        self.memory = []
        for g, group in enumerate(contract.groups):
            shape = (blocks, group.block_size // 2, 4)
            cell = cells(g, tp_rank)
            seed = hash((g, cell, pp_rank)) % (1 << 32)
            array = np.zeros(shape, np.uint8)
            if not empty:
                array[:] = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
            self.memory.append(array)
        layouts = [KVLayout.from_tensors([a], num_blocks=blocks) for a in self.memory]
        self.bound = contract.bind(layouts, tp_rank=tp_rank, pp_rank=pp_rank)
        self.kv = KVTransfer(store.client(), self.bound)


def test_r13_decode_context_parallelism_beside_a_group_that_all_ranks_hold():
    """TP 8, DCP 2: ranks 0, 2, 4, 6 and 1, 3, 5, 7 hold equal bytes; the second group is the same
    on all 8. 16 of 32 keys were never written."""
    groups = {"full": FullAttention(16), "all": FullAttention(16, spec="replicated")}
    grid = RankGrid(tp_size=8, dcp_size=2, kv_heads=1, context_split={"all": False})
    contract = contract_of(groups, 16, StrictKeys("m"), ranks=grid, facts={"dtype": "made up"})
    assert [len(g.namespaces) for g in contract.scheme.groups] == [2, 1]
    store = FakeStore()

    def cells(g, rank):
        return rank % 2 if g == 0 else 0

    ranks = [Rank(contract, cells, store, r) for r in range(8)]
    tables = [list(range(1, 17))] * 2
    written = {}
    for r in random.Random(1).sample(range(8), 8):
        request = contract.request(hashes=digests(16), num_tokens=256)
        result = ranks[r].kv.save(request, tables, 256)
        assert (result.ok, result.present, result.mark) == (True, 0, 256)
        # All copies of a group share the work evenly.
        assert result.stored == 16 // 4 + 16 // 8
        for call in ranks[r].kv.store.calls(PUT):
            for name in call.keys:
                assert name not in written
                written[name] = r
    assert len(written) == len(store.pool) == 32 + 16
    for r in range(8):
        reader = Rank(contract, cells, store, r, empty=True)
        request = contract.request(hashes=digests(16), num_tokens=257)
        hit = reader.kv.lookup(request)
        assert (hit.length, hit.exact_keys) == (256, 48)
        assert reader.kv.load(request, hit, tables).loaded == 32
        for mine, theirs in zip(reader.memory, ranks[r].memory, strict=True):
            assert np.array_equal(mine[1:17], theirs[1:17])


@given(st.data())
def test_r13_every_key_of_any_grid_has_one_writer(data):
    """Strict keys: ranks that hold the same bytes share keys, each is written once, all are read
    back by every rank that holds them."""
    tp = data.draw(st.sampled_from((1, 2, 4, 6, 8)))
    dcp = data.draw(st.sampled_from([d for d in (1, 2, 4) if tp % d == 0]))
    heads = [h for h in (1, 2, 4, 8) if (tp % h == 0 if h < tp else True)]
    heads = data.draw(st.sampled_from([h for h in heads if (tp // min(h, tp)) % dcp == 0] or [1]))
    pp = data.draw(st.sampled_from((1, 1, 2)))
    split = data.draw(st.booleans())
    groups = {
        "full": FullAttention(16),
        "other": SlidingWindow(16, window=160),
        "state": Mamba(16),
    }
    grid = RankGrid(
        tp_size=tp, pp_size=pp, dcp_size=dcp, kv_heads=heads, context_split={"other": split}
    )
    contract = contract_of(groups, 16, StrictKeys("m"), ranks=grid, facts={"dtype": "made up"})
    width = tp // min(heads, tp)

    def cells(g, rank):
        if g == 2:
            return rank  # states are cut by their own heads
        return rank // width, rank % dcp if g == 0 or split else 0

    store = FakeStore()
    rng = data.draw(st.randoms(use_true_random=False))
    every = [(r, p) for p in range(pp) for r in range(tp)]
    ranks = {(r, p): Rank(contract, cells, store, r, p, blocks=8) for r, p in every}
    tables = [list(range(1, 7))] * 3
    written = set()
    for place in rng.sample(every, len(every)):
        result = ranks[place].kv.save(contract.request(hashes=digests(6)), tables, 96)
        assert (result.ok, result.present, result.mark) == (True, 0, 96)
        names = [k for call in ranks[place].kv.store.calls(PUT) for k in call.keys]
        assert not written & set(names)
        written.update(names)
    want = sum(6 * len({(cells(g, r), p) for r, p in every}) for g in range(3))
    assert len(written) == len(store.pool) == want
    for r, p in rng.sample(every, min(3, len(every))):
        reader = Rank(contract, cells, store, r, p, empty=True, blocks=8)
        request = contract.request(hashes=digests(6), num_tokens=97)
        hit = reader.kv.lookup(request)
        assert hit.length == 96
        assert reader.kv.load(request, hit, tables).ok
        for mask, mine, theirs in zip(hit.masks, reader.memory, ranks[r, p].memory, strict=True):
            blocks = [i + 1 for i in mask.indices()]
            assert np.array_equal(mine[blocks], theirs[blocks])


def test_r13_templates_of_vllm_follow_vllm():
    """Under decode context parallelism every rank has keys of its own there; `dcp_rank` follows
    from `tp_rank`."""
    groups = [FullAttention(16)]
    grid = RankGrid(tp_size=8, dcp_size=2, kv_heads=1)
    contract = contract_of(groups, 16, ranks=grid)
    assert len(contract.scheme.groups[0].namespaces) == 8
    bound = contract.bind(layouts(1), tp_rank=3)
    assert (bound.dcp_rank, bound.scheme.groups[0].writers) == (1, 1)
    assert "@tp_rank:3@pcp0@dcp1@" in bound.scheme.groups[0].own[0].prefix
    with pytest.raises(ArgumentError, match="`dcp_rank` must be `tp_rank` % `dcp_size`"):
        contract.bind(layouts(1), tp_rank=3, dcp_rank=0)
    mla = contract_of(groups, 16, ranks=RankGrid(tp_size=8, kv_heads=1))
    assert mla.bind(layouts(1), tp_rank=3).scheme.groups[0].writers == 8
    some = contract_of(groups, 16, ranks=RankGrid(tp_size=8, kv_heads=4))
    assert some.bind(layouts(1), tp_rank=3).scheme.groups[0].writers == 2


# All of it at once


def test_an_engine_that_starts_from_anothers_file_reads_its_bytes():
    groups = {"full": FullAttention(64), "swa": SlidingWindow(16, window=32)}
    store = FakeStore()
    source = Engine(
        store,
        contract_of(groups, 16, StrictKeys("m"), hashing=SEED, facts={"dtype": "made up"}),
        640,
        seed=3,
    )
    tokens = list(range(640))
    request = source.contract.request(tokens)
    assert source.kv.save(request, source.tables, 640).ok
    text = source.contract.to_json()
    assert "one" not in text.replace('"none"', "")
    contract = Contract.from_json(text, seed="one")
    target = Engine(store.client(), contract, 640)
    request = contract.request([*tokens, 1])
    hit = target.kv.lookup(request)
    assert hit.length == 640
    assert target.kv.load(request, hit, target.tables).ok
    assert_hit(source, target, hit)
    tools = PlanTools()
    assert drive(LookupPlan(contract, request.hashes, 641, tools=tools), store).length == 640
