"""What a hostile reading found, by kind: wrong bytes, marks that run ahead, resources, words."""

import os
import pickle
import stat
import threading

import numpy as np
import pytest
from fake_store import GET, PUT, FakeStore
from rig import Engine, answer_with, contract_of, digests, flat_layout, key, pair, scheme_of

from kvmask import (
    Bitset,
    ChunkedLocal,
    Contract,
    Coordinator,
    FullAttention,
    Hashing,
    Hit,
    KVLayout,
    KVTransfer,
    LoadPlan,
    Mamba,
    PayloadFacts,
    PlanTools,
    RankGrid,
    SavePlan,
    SlidingWindow,
    StorePolicy,
    StrictKeys,
    VllmKeys,
    drive,
)
from kvmask.errors import AlignmentError, ArgumentError, PlanStateError
from kvmask.keys import LMCacheKeys
from kvmask.plans import Handoff

SEED = Hashing(seed="review")
FULL, WINDOW = FullAttention(16), SlidingWindow(16, window=33)
STATES = {"full": FULL, "state": Mamba(16)}


def layout(dtype=np.float16):
    return KVLayout.from_tensors([np.zeros((8, 16, 4), dtype)], num_blocks=8)


def strict(groups=None, **options):
    return Contract(groups or [FULL], 16, StrictKeys("m"), SEED, **options)


# Two that should not share a key


@pytest.mark.parametrize("said", [{"facts": {"revision": "a"}}, {"payload": [PayloadFacts()]}, {}])
def test_strict_keys_are_not_bound_without_facts_of_the_bytes(said):
    """A revision, or facts that state nothing, would let float16 and int16 share keys."""
    with pytest.raises(ArgumentError, match="`payload` must be given for group '0'"):
        strict(**said).bind([layout()])


@pytest.mark.parametrize("said", [{"facts": {"dtype": "fp8"}}, {"payload": [layout()]}])
def test_strict_keys_are_bound_with_facts_of_the_bytes(said):
    strict(**said).bind([layout()])


@pytest.mark.parametrize("sizes", [{"pcp_size": 2}, {"tp_size": 2, "dcp_size": 2, "kv_heads": 1}])
def test_whether_context_ranks_split_the_tokens_is_in_the_fingerprint(sizes):
    made = [strict(ranks=RankGrid(context_split=s, **sizes)).fingerprint for s in (True, False)]
    assert made[0] != made[1]


def test_keys_that_differ_in_leading_zeros_alone_are_one_key():
    keys = {"a": LMCacheKeys("m"), "b": LMCacheKeys("m", number=False)}
    with pytest.raises(ArgumentError, match="groups 'a' and 'b'"):
        Contract({"a": FULL, "b": FULL}, 16, keys, None)


def test_raw_bytes_have_the_name_that_their_array_gives_them():
    pair_of = np.dtype([("a", "u1"), ("b", "u1")])
    found = [layout(dtype).tensors[0].dtype for dtype in ("V2", pair_of)]
    assert found == ["raw2", "[('a','u1'),('b','u1')]"]


def test_a_fact_that_is_true_is_not_one():
    assert PayloadFacts(extra={"x": True}).differences(PayloadFacts(extra={"x": 1}))


def test_templates_of_two_releases_survive_the_file():
    groups = {"x": FullAttention(16, prefix_cacheable=False), "a": FULL, "b": FULL}
    made = Contract(groups, 16, {"a": VllmKeys("m"), "b": VllmKeys("m", release="0.24")}, None)
    assert Contract.from_json(made.to_json()) == made
    one = Contract([FULL], 16, VllmKeys("m"), None)
    assert one != Contract([FULL], 16, VllmKeys("m", release="0.24"), None)


# Bytes under a key that are not the key's


def test_what_a_load_does_not_fill_is_never_saved():
    """Of a window the last blocks alone are loaded; the others hold anything."""
    source, target = pair({"full": FULL, "swa": WINDOW}, 16, 128)
    assert source.save(digests(8), 64).ok
    request = target.request(digests(8))
    hit = target.kv.lookup(request)
    assert (hit.length, hit.masks[1].indices()) == (64, [2, 3])
    lost = key(source, 1, digests(8)[0])
    del source.store.pool[lost]
    assert target.kv.load(request, hit, target.tables).ok
    assert request.mark == 64
    target.kv.save(request, target.tables, 128)
    assert lost not in source.store.pool


def test_what_a_load_inside_an_alignment_unit_does_not_fill_is_never_saved():
    groups = {"chunk": ChunkedLocal(4, chunk_size=8), "full": FullAttention(16)}
    source, target = pair(groups, 4, 32, partial_hits=True)
    assert source.save(digests(8), 12).ok
    request = target.request(digests(8))
    hit = target.kv.lookup(request)
    assert (hit.length, hit.masks[0].indices()) == (12, [2])
    assert target.kv.load(request, hit, target.tables).ok
    lost = key(source, 0, digests(8)[0])
    del source.store.pool[lost]
    saved = target.kv.save(request, target.tables, 32)
    assert saved.ok
    assert lost not in source.store.pool
    plan = SavePlan(target.bound, digests(8), target.tables, 32, start_token=12)
    assert lost in plan.keys  # without a load the block was computed here


def test_a_block_that_was_handed_over_is_not_read_after_its_save():
    source, _ = pair(STATES, 16, 128, states="handoff")
    request = source.request(digests(8))
    request.hand_over("state", 64, source.tables[1][3])
    source.store.fail(PUT, -200, times=1)
    assert not source.kv.save(request, source.tables, 64).ok
    for tensor in source.tensors[1]:
        tensor[source.tables[1][3]] = 7  # the engine has let go of it
    assert source.kv.save(request, source.tables, 128).ok
    assert key(source, 1, digests(8)[3]) not in source.store.pool


def test_what_is_handed_over_during_a_save_is_for_the_next_one():
    source, _ = pair(STATES, 16, 128, states="handoff")
    request = source.request(digests(8))
    request.hand_over("state", 64, source.tables[1][3])
    plan = request.save_plan(source.bound, source.tables, 64)
    request.hand_over("state", 128, source.tables[1][7])
    assert request.saved(drive(plan, source.store)).stored == 5
    assert source.kv.save(request, source.tables, 128).stored == 5


# Loads that claim blocks they did not fill


def hits():
    short = contract_of([SlidingWindow(16, window=17)], 16)
    wide = contract_of([SlidingWindow(16, window=49)], 16)
    return wide, short.coordinator.find_hit([[True] * 4], 64)


def test_a_hit_of_a_smaller_window_is_refused():
    wide, hit = hits()
    engine = Engine(FakeStore(), wide, 64)
    with pytest.raises(ArgumentError, match="got 64 tokens without block 1 of group '0'"):
        engine.load(digests(4), hit)


@pytest.mark.parametrize("blocks", [1, 3, 8])
def test_a_hit_of_other_blocks_is_refused(blocks):
    engine = Engine(FakeStore(), contract_of([FULL], 16), 128)
    hit = Hit(32, (Bitset.ones(blocks),), (16 * blocks,))
    with pytest.raises(ArgumentError, match=f"got {blocks} and 2 for group '0'"):
        engine.load(digests(8), hit)


def test_a_window_of_one_token_needs_no_block():
    groups = [SlidingWindow(16, window=1, eagle=True)]
    source, target = pair(groups, 16, 64)
    assert source.save(digests(4), 64).ok
    hit = target.lookup(digests(4), 64)
    assert (hit.length, hit.masks[0].count()) == (48, 0)
    assert target.load(digests(4), hit).usable_tokens == 48


def test_chunks_that_begin_inside_a_block_are_refused():
    """The search would find 24 tokens in an empty store."""
    assert Coordinator([ChunkedLocal(8, chunk_size=27)], 8).find_hit([[]], 32).length == 24
    with pytest.raises(AlignmentError, match="`chunk_size` of group 'c' must be a multiple"):
        contract_of({"c": ChunkedLocal(8, chunk_size=27)}, 8)


@pytest.mark.parametrize("make", ["save", "load"])
def test_a_plan_that_lost_a_call_has_no_result(make):
    """What several threads do to a plan: two calls at once, of which one answer is counted."""
    coord = Coordinator([FULL], 16)
    scheme, tables = scheme_of(coord, [flat_layout()]), [[1, 2, 3, 4]]
    plan = {
        "save": lambda: SavePlan(scheme, digests(4), tables, 64),
        "load": lambda: LoadPlan(scheme, digests(4), coord.find_hit([[True] * 4], 64), tables),
    }[make]()
    if make == "save":
        plan.next_call()
        plan.feed([0] * 4)
    plan._calls.pop()
    with pytest.raises(PlanStateError, match="got word of 0 of its 4 keys"):
        plan.next_call()
    with pytest.raises(PlanStateError, match="got word of 0 of its 4 keys"):
        plan.result  # noqa: B018


@pytest.mark.parametrize("name", ["cut_put", "cut_get"])
@pytest.mark.parametrize("cut", [[(0, 2)], [(0, 4), (0, 4)], []])
def test_a_policy_that_leaves_keys_out_is_refused(name, cut):
    policy = type("Bad", (StorePolicy,), {name: lambda self, num_bytes, sizes: (cut, [])})()
    coord = Coordinator([FULL], 16)
    args, tables = (scheme_of(coord, [flat_layout()]), digests(4)), [[1, 2, 3, 4]]
    with pytest.raises(ArgumentError, match="`policy` must put every key into one call"):
        if name == "cut_put":
            plan = SavePlan(*args, tables, 64, tools=PlanTools(policy))
            answer_with(plan, lambda call: [0] * len(call.args[0]))
        else:
            hit = coord.find_hit([[True] * 4], 64)
            LoadPlan(*args, hit, tables, tools=PlanTools(policy))


# Marks that run ahead


def test_a_request_does_not_go_on_with_digests_of_another():
    source, _ = pair([FULL], 16, 128)
    request = source.request(digests(4))
    assert source.kv.save(request, source.tables, 64).mark == 64
    with pytest.raises(ArgumentError, match="must go on from the digests of the request"):
        request.extend(hashes=digests(8, salt=1))
    request.extend(hashes=digests(8))
    assert request.num_tokens == 128


def test_a_request_from_digests_does_not_shrink():
    request = contract_of([FULL], 16).request(hashes=digests(1), num_tokens=20)
    request.extend(hashes=digests(1))
    assert request.num_tokens == 20
    with pytest.raises(ArgumentError, match="for 19 tokens after 1 for 20"):
        request.extend(hashes=digests(1), num_tokens=19)


def test_a_hole_where_a_partial_hit_would_end_stops_the_mark():
    coord = Coordinator([FULL], 4, partial_hits=True)
    plan = SavePlan(scheme_of(coord, [flat_layout()]), digests(5), [[1, 0]], 20)
    answer_with(plan, lambda call: [0] * len(call.args[0]))
    assert plan.result.mark == 16


# Hand-offs


@pytest.mark.parametrize(
    ("handoff", "error"),
    [
        (("odd", 16, 1), ArgumentError),
        ((2, 16, 1), ArgumentError),
        ((True, 16, 1), TypeError),
        ((1.0, 16, 1), TypeError),
        ((1, 17, 1), ArgumentError),
        ((1, 0, 1), ArgumentError),
        ((1, 16, -1), ArgumentError),
        ((1, 16, True), TypeError),
        ((1, 16, "x"), TypeError),
    ],
)
def test_a_bad_hand_off_is_refused_where_it_is_made(handoff, error):
    """Kept for later, it would make every later save of the request raise."""
    source, _ = pair(STATES, 16, 64, states="handoff")
    request = source.request(digests(4))
    with pytest.raises(error, match=r"^`(group|num_tokens|block_id)` must"):
        request.hand_over(*handoff)
    assert source.kv.save(request, source.tables, 64).ok
    with pytest.raises(error, match=r"^`(group|num_tokens|block_id)` of `handoffs` must"):
        SavePlan(source.bound, digests(4), source.tables, 64, handoffs=[Handoff(*handoff)])


# Memory and threads


def test_close_within_a_call_of_the_same_thread_is_refused():
    """It would wait for itself for ever."""
    source, _ = pair([FULL], 16, 64)
    seen = []

    def close(store, name, keys):
        if name == PUT:
            with pytest.raises(PlanStateError, match="`close` must not be called while"):
                source.kv.close()
            seen.append(name)

    source.store.hooks.append(close)
    done = threading.Thread(target=lambda: seen.append(source.save(digests(4), 64).ok), daemon=True)
    done.start()
    done.join(20)
    assert seen == [PUT, True]
    source.kv.close()
    assert not source.store.registered


def interrupts(call, at):
    """The store's call, interrupted the n-th time."""
    count = [0]

    def run(*args):
        count[0] += 1
        if count[0] == at:
            raise KeyboardInterrupt
        return call(*args)

    return run


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupt_while_registering_leaves_nothing_registered(at):
    engine = Engine(FakeStore(), contract_of([FULL, WINDOW], 16), 64)
    engine.kv.close()
    engine.store.register_buffer = interrupts(engine.store.register_buffer, at)
    with pytest.raises(KeyboardInterrupt):
        KVTransfer(engine.store, engine.bound)
    assert not engine.store.registered


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupt_while_closing_leaves_the_rest_to_the_next_call(at):
    engine = Engine(FakeStore(), contract_of([FULL, WINDOW], 16), 64)
    engine.store.unregister_buffer = interrupts(engine.store.unregister_buffer, at)
    with pytest.raises(KeyboardInterrupt):
        engine.kv.close()
    engine.kv.close()
    assert not engine.store.registered


def test_a_bound_contract_does_not_change_and_stays_in_its_process():
    bound = strict(payload=[layout()]).bind([layout()])
    with pytest.raises(AttributeError, match="a BoundContract must not be changed"):
        bound.tp_rank = 1
    with pytest.raises(AttributeError, match="got a deletion of `scheme`"):
        del bound.scheme
    with pytest.raises(TypeError, match="must stay in its process"):
        pickle.dumps(bound)


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_file_has_the_mode_that_the_umask_gives(tmp_path, mask, monkeypatch):
    """Without asking for the umask, which would change it for all threads meanwhile."""
    contract, before = strict(payload=[layout()]), os.umask(mask)
    try:
        monkeypatch.setattr(os, "umask", None)
        contract.write(tmp_path / "open.json")
        contract.write(tmp_path / "secret.json", with_seed=True)
    finally:
        monkeypatch.undo()
        os.umask(before)
    modes = [
        stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("open.json", "secret.json")
    ]
    assert modes == [0o666 & ~mask, 0o600]
    assert sorted(os.listdir(tmp_path)) == ["open.json", "secret.json"]


# Stages without layers


def test_a_rank_needs_no_table_for_a_group_that_it_keeps_nothing_of():
    groups = {"a": FULL, "b": FULL}
    contract = contract_of(groups, 16, ranks=RankGrid(pp_size=2, stages={"a": [0], "b": [0, 1]}))
    bound = contract.bind({"b": layout()}, pp_rank=1)
    assert len(SavePlan(bound, digests(4), {"b": [1, 2, 3, 4]}, 64).keys) == 4
    hit = contract.coordinator.find_hit([[True] * 4] * 2, 64)
    assert len(LoadPlan(bound, digests(4), hit, {"b": [1, 2, 3, 4]}).keys) == 4
    with pytest.raises(ArgumentError, match="`tables` must hold one block table per group"):
        SavePlan(bound, digests(4), {"a": [1, 2, 3, 4]}, 64)


# Words


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: strict(facts={"r": 10**5000}), ArgumentError, "`facts` must hold integers of at"),
        (lambda: StrictKeys("m", facts={"r": 10**5000}), ArgumentError, "at most 256 bits"),
        (lambda: strict(states=np.array([1, 2])), ArgumentError, "`states` must be one of"),
        (lambda: strict().request(iter([1])), TypeError, "`token_ids` must be a sequence"),
        (lambda: strict().request([1] * 16, extra_keys=5), TypeError, "`extra_keys` must be a seq"),
        (
            lambda: strict().request([1] * 16, extra_keys=lambda first, count: None),
            TypeError,
            "`extra_keys` must be a sequence, or a function that gives one, got NoneType",
        ),
        (lambda: strict().request(hashes=5), TypeError, "`hashes` must be a sequence of bytes"),
        (
            lambda: strict().request([1] * 16).lookup_plan(held=10**30),
            ArgumentError,
            "`held` must be from 0 to",
        ),
        (lambda: Hashing(release=b"0.32"), TypeError, "`release` must be text, got bytes"),
    ],
)
def test_messages_name_the_argument(make, error, text):
    with pytest.raises(error) as caught:
        make()
    assert text in str(caught.value)


def test_a_get_that_fails_within_a_hit_is_still_reported():
    """The checks of a hit let every hit of a lookup through."""
    source, target = pair({"full": FULL, "swa": WINDOW}, 16, 128)
    source.save(digests(8), 128)
    request = target.request(digests(8))
    hit = target.kv.lookup(request)
    target.store.fail(GET, -800, keys=[key(source, 0, digests(8)[5])])
    result = target.kv.load(request, hit, target.tables)
    assert (result.usable_tokens, request.mark) == (0, 0)
    assert result.invalid == {"full": [target.tables[0][5]]}
