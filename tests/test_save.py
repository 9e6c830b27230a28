"""Saves: what is planned, what is put, what became of it, and where the next save resumes."""

import random

import pytest
import strategies
from fake_store import EXIST, PUT, FakeStore
from hypothesis import given
from hypothesis import strategies as st
from reference import ReferenceCoordinator
from rig import (
    Engine,
    answer_with,
    contract_of,
    coord_of,
    digests,
    flat_layout,
    key,
    keys_of,
    mooncake_tools,
    pair,
    scheme_of,
)

from kvmask import (
    ChunkedLocal,
    Contract,
    Coordinator,
    FullAttention,
    Mamba,
    RankGrid,
    SavePlan,
    SlidingWindow,
    StrictKeys,
    drive,
)
from kvmask._core import Bitset, BlockHashes, digests_differ
from kvmask.errors import ArgumentError, BlockIdError, PlanStateError, StoreError
from kvmask.plans import CALL_FAILED, EXISTS, MALFORMED_ANSWER, NOT_TRIED

CODES = (0, -1, -200, -400, -500, -600, -703, -705, -800, -900, -12345)


def plan_of(groups, hash_block, num_tokens, tables=None, start=0, prompt=None, **options):
    coord = coord_of(groups, hash_block, options)
    scheme_options = {
        name: options.pop(name) for name in ("states", "writers", "writer") if name in options
    }
    scheme = scheme_of(coord, [flat_layout()] * len(groups), **scheme_options)
    if tables is None:
        tables = [list(range(1, 2 + num_tokens // g.block_size)) for g in groups]
    return SavePlan(
        scheme,
        digests(num_tokens // hash_block),
        tables,
        num_tokens,
        start_token=start,
        num_prompt_tokens=prompt,
        tools=mooncake_tools(**options),
    )


def finish(plan, held=(), code=0):
    """Drive a plan; the keys that were put."""

    def answer(call):
        if call.name == EXISTS:
            return [int(k in held) for k in call.args[0]]
        return [code] * len(call.args[0])

    return keys_of(answer_with(plan, answer), PUT)


def asked(plan, answers):
    """Answer the existence call of a plan; its next call."""
    call = plan.next_call()
    assert (call.name, call.args) == (EXISTS, (plan.keys,))
    plan.feed(answers)
    return plan.next_call()


def planned(plan):
    """Per group the digest numbers of the planned keys."""
    found = {}
    for name in plan.keys:
        g = int(name.split("group:")[1].split("@")[0])
        found.setdefault(g, []).append(int(name.rsplit("@", 1)[1], 16))
    return found


# Which blocks


@given(st.data())
def test_the_planned_keys_are_those_of_the_store_mask(data):
    config = data.draw(strategies.configs())
    num_tokens = data.draw(strategies.token_counts(config))
    start = data.draw(st.sampled_from((0, config.common, num_tokens // 2)))
    start -= start % config.common
    prompt = data.draw(st.sampled_from((None, max(1, num_tokens), num_tokens + config.common)))
    states = data.draw(st.booleans())
    hash_block, partial = config.hash_block_size, config.partial_hits
    plan = plan_of(
        list(config.groups), hash_block, num_tokens, None, start, prompt, states=states,
        alignment=config.alignment, retention_interval=config.retention_interval,
        partial_hits=partial,
    )  # fmt: skip
    aligned = num_tokens // config.unit * config.unit
    reference = ReferenceCoordinator(*config.args)
    masks = reference.store_mask(aligned, start, prompt, states)
    found = planned(plan)
    for g, (group, mask) in enumerate(zip(config.groups, masks, strict=True)):
        first = -(-start // group.block_size)
        whole = range(first, aligned // group.block_size)
        wanted = {i for i in whole if mask is None or mask[i - first]}
        if aligned <= start or not group.prefix_cacheable:
            wanted = set()
        scale = group.block_size // hash_block if group.prefix_cacheable else 1
        got = found.get(g, [])
        assert got == sorted(got)
        blocks = {d // scale - 1 for d in got if d % scale == 0}
        if partial:  # and what a hit at this very end needs
            assert wanted <= blocks
        else:
            assert blocks == wanted
            assert all(d % scale == 0 for d in got)


def test_replay_boundaries_shape_the_save():
    groups = [FullAttention(64), SlidingWindow(16, window=32)]
    for retention, wanted in ((None, [*range(3, 28, 4)]), (0, [27]), (128, [7, 15, 23, 27])):
        plan = plan_of(groups, 16, 448, prompt=500, retention_interval=retention)
        assert [d - 1 for d in planned(plan)[1] if d % 2 == 0] == wanted


def test_a_suffix_save_continues_where_the_last_one_ended():
    groups = [FullAttention(64), SlidingWindow(16, window=32), ChunkedLocal(16, chunk_size=64)]
    whole = set(plan_of(groups, 16, 512).keys)
    parts = []
    start = 0
    for end in (60, 64, 200, 256, 511, 512):
        plan = plan_of(groups, 16, end, start=start)
        finish(plan)
        parts += plan.keys
        start = plan.result.mark
    assert start == 512
    assert sorted(parts) == sorted(whole)


@given(st.data())
def test_saves_in_pieces_store_all_that_one_save_stores(data):
    config = data.draw(strategies.configs())
    total = data.draw(strategies.token_counts(config))
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=4)))
    options = {
        "alignment": config.alignment,
        "retention_interval": config.retention_interval,
        "partial_hits": config.partial_hits,
        "states": data.draw(st.booleans()),
    }
    prompt = data.draw(st.sampled_from((None, max(total, 1))))
    groups, unit = list(config.groups), config.hash_block_size
    tables = [list(range(1, 2 + total // g.block_size)) for g in groups]
    one = plan_of(groups, unit, total, tables, 0, prompt, **options)
    stored, start = set(), 0
    for end in [*cuts, total]:
        plan = plan_of(groups, unit, end, tables, start, prompt, **options)
        stored.update(finish(plan, stored))
        assert plan.result.mark >= start
        start = plan.result.mark
    assert set(one.keys) <= stored


def test_what_a_hit_at_the_end_needs_may_end_before_it():
    """A window of larger blocks ends the joint hit of a save of 48 tokens at 32."""
    groups = [SlidingWindow(16, window=17), SlidingWindow(32, window=17), ChunkedLocal(16, 48)]
    plan = plan_of(groups, 16, 48, partial_hits=True, retention_interval=0)
    assert planned(plan)[1] == [2]
    assert 2 in planned(plan)[0]


def test_null_blocks_are_never_put():
    """B19: at the front, in the middle, everywhere, and a table shorter than the mask."""
    for table, wanted in (
        ([0, 0, 0, 7], [(3, 7)]),
        ([5, 0, 6, 7], [(0, 5), (2, 6), (3, 7)]),
        ([0, 0, 0, 0], []),
        ([5, 6], [(0, 5), (1, 6)]),
        ([], []),
    ):
        plan = plan_of([FullAttention(16)], 16, 64, [table])
        assert planned(plan).get(0, []) == [i + 1 for i, _ in wanted]
        if plan.keys:
            call = asked(plan, [0] * len(plan.keys))
            assert (call.name, call.num_bytes) == (PUT, 64 * len(wanted))
            assert call.args[1] == [[(1 << 20) + 64 * block] for _, block in wanted]
            assert plan.feed([0] * len(wanted)) == ()
        assert plan.next_call() is None
        assert plan.result.stored == len(wanted)
        assert plan.result.ok
        # A hole in full attention ends the mark: no later hit can reach past it.
        hole = table.index(0) if 0 in table else len(table)
        assert plan.result.mark == min(64, 16 * hole)


def test_windows_let_go_of_blocks_and_the_mark_goes_on():
    groups = [FullAttention(16), SlidingWindow(16, window=32)]
    plan = plan_of(groups, 16, 64, [[1, 2, 3, 4], [0, 0, 5, 6]])
    finish(plan)
    assert plan.result.mark == 64


def test_another_null_block_or_none():
    plan = plan_of([FullAttention(16)], 16, 64, [[0, 9, 2, 3]], null_block=9)
    assert planned(plan)[0] == [1, 3, 4]
    plan = plan_of([FullAttention(16)], 16, 64, [[0, 9, 2, 3]], null_block=None)
    assert planned(plan)[0] == [1, 2, 3, 4]


@pytest.mark.parametrize("start", [0, 48, 160])
def test_who_stores_what_among_ranks_that_hold_the_same(start):
    """B27: TP 8, 37 chunks, 2 groups; the owner does not depend on where a suffix starts."""
    groups = [FullAttention(16), FullAttention(16, spec="other")]
    first = start // 16
    for step in (8, 2, 1):
        writers = {}
        for rank in range(8):
            plan = plan_of(groups, 16, 37 * 16, start=start, writers=[step] * 2, writer=rank)
            for g, numbers in planned(plan).items():
                for d in numbers:
                    writers.setdefault((g, d - 1), []).append(rank)
            finish(plan)
            assert (plan.result.mark, plan.result.writers) == (37 * 16, step)
        assert len(writers) == 2 * (37 - first)
        for (g, chunk), ranks in writers.items():
            assert ranks == [r for r in range(8) if chunk % step == (r + g) % step]
        if step == 8 and not start:
            assert (writers[0, 0], writers[1, 0]) == ([0], [7])
        if step == 2 and not start:
            assert (writers[0, 0], writers[1, 0]) == ([0, 2, 4, 6], [1, 3, 5, 7])


def test_a_key_has_the_last_digest_of_its_block_and_a_tail_its_own_end():
    """B42: chunks (0, 64) -> digest 4, (64, 80) -> digest 5."""
    plan = plan_of([FullAttention(64)], 16, 80, partial_hits=True)
    assert planned(plan)[0] == [4, 5]
    plan = plan_of([FullAttention(64)], 16, 80)
    assert planned(plan)[0] == [4]
    assert len(plan_of([FullAttention(256)], 4, 256).keys[0].rsplit("@", 1)[1]) == 32


def test_masks_that_a_caller_states():
    """An engine's own masks take the place of the contract's rule, group by group."""
    groups = [FullAttention(16), SlidingWindow(16, window=32), Mamba(16)]
    scheme = scheme_of(coord_of(groups, 16, {}), [flat_layout()] * 3)
    tables = [[1, 2, 3, 4]] * 3
    masks = [None, [False, True, False, True], [False] * 4]
    plan = SavePlan(scheme, digests(4), tables, 64, masks=masks)
    assert planned(plan) == {0: [1, 2, 3, 4], 1: [2, 4]}


# What became of it


@pytest.mark.parametrize("num_pieces", [None, 1, 3])
@given(st.data())
def test_every_planned_key_is_in_one_place(num_pieces, data):
    rng = data.draw(st.randoms(use_true_random=False))
    groups = [FullAttention(64), SlidingWindow(16, window=32)]
    plan = plan_of(groups, 16, 64 * data.draw(st.integers(0, 9)), max_pieces=num_pieces)
    held = {k for k in plan.keys if rng.random() < 0.3}
    if plan.keys:
        plan.next_call()
        plan.feed([int(k in held) for k in plan.keys])
    given_codes, told = {}, []
    while (call := plan.next_call()) is not None:
        keys = call.args[0]
        if num_pieces:
            assert len(keys) <= num_pieces
        if rng.random() < 0.2:
            plan.fail(OSError("gone"))
            given_codes.update(dict.fromkeys(keys, CALL_FAILED))
            assert plan.next_call() is None
            break
        codes = [rng.choice(CODES) if rng.random() < 0.4 else 0 for _ in keys]
        given_codes.update(zip(keys, codes, strict=True))
        told += plan.feed(codes)
        if set(codes) == {-900}:
            assert plan.next_call() is None
            break
    result = plan.result
    untried = set(plan.keys) - held - set(given_codes)
    given_codes.update(dict.fromkeys(untried, NOT_TRIED))
    assert result.stored + result.present + len(result.failures) == len(plan.keys)
    assert set(given_codes) == set(plan.keys) - held
    assert {f.key: f.code for f in result.failures} == {
        k: c for k, c in given_codes.items() if c not in (0, -705)
    }
    # What `feed` returned, what `fail` was told and what was not tried: the result names no more.
    by_calls = [f for f in result.failures if f.cause is not None]
    assert {f.key for f in told} | {f.key for f in by_calls} == {f.key for f in result.failures}
    assert all(
        isinstance(f.cause, OSError if f.code == CALL_FAILED else OSError | StoreError)
        and f.code in (CALL_FAILED, NOT_TRIED)
        for f in by_calls
    )
    assert result.stored == sum(c == 0 for c in given_codes.values())
    assert result.num_bytes == 64 * result.stored
    # The mark lies at or below the first block that is not stored.
    for f in result.failures:
        assert result.mark <= f.block * groups[f.group].block_size
        assert plan.keys.count(f.key) == 1
        assert f.name == f"group{f.group}"
    if result.ok:
        assert result.mark == plan.num_tokens
    bad = {(f.group, f.block) for f in result.failures}
    put = {k for k in given_codes if k not in held}
    every = [(g, b) for g, blocks in plan.written for b in blocks]
    assert len(every) == len(set(every)) == len(put) - len(bad)
    assert not bad & set(every)


def test_no_room_leaves_the_mark_at_the_first_hole():
    """B49: 63 of 80 stored; the next save starts there; pressure is per request."""
    plan = plan_of([FullAttention(16)], 16, 80 * 16, max_pieces=None)
    asked(plan, [0] * 80)
    plan.feed([0] * 63 + [-200] * 17)
    assert plan.next_call() is None
    first = plan.result
    assert (first.stored, first.mark, first.pressure) == (63, 63 * 16, True)
    again = plan_of([FullAttention(16)], 16, 80 * 16, start=first.mark)
    assert planned(again)[0] == list(range(64, 81))
    finish(again)
    assert (again.result.mark, again.result.pressure) == (1280, False)


def test_a_full_pool_of_real_objects():
    source, _ = pair([FullAttention(16)], 16, 160, layers=1)
    source.store.capacity = 5 * 48
    request = source.request(digests(10))
    result = source.kv.save(request, source.tables, 160)
    assert (result.stored, result.mark, result.pressure) == (5, 80, True)
    assert {f.code for f in result.failures} == {-200}
    source.store.capacity = None
    assert request.mark == 80
    result = source.kv.save(request, source.tables, 160)
    assert (result.stored, result.mark, result.pressure) == (5, 160, False)
    assert request.mark == 160


def test_already_there_is_success_and_no_key_is_put_twice():
    """B50: 0 and -705 alike; of equal keys in one save the first is put."""
    store = FakeStore()
    engine = Engine(store, contract_of([FullAttention(16)], 16), 64, seed=1)
    same = [b"x" * 16, b"y" * 16, b"x" * 16, b"y" * 16]

    def save():
        # A request refuses such digests; a plan without one takes them.
        tools = engine.kv.tools
        return drive(SavePlan(engine.bound, same, engine.tables, 64, tools=tools), store)

    result = save()
    assert (result.stored, result.present, len(result.failures)) == (2, 2, 0)
    assert result.num_bytes == 2 * len(engine.block(0, 0))
    assert store.pool[key(engine, 0, b"x" * 16)] == engine.block(0, 0)
    assert len(store.calls(PUT)) == 1
    result = save()
    assert (result.stored, result.present, result.num_bytes) == (0, 4, 0)
    assert len(store.calls(PUT)) == 1
    store.fail(EXIST, 0)  # it says absent, and the put finds them
    store.fail(PUT, -705)
    result = save()
    assert (result.stored, result.present, result.ok) == (0, 4, True)
    assert result.mark == 64


def test_only_one_is_there_for_a_save():
    """An answer that is no 1 means that the block is put, never that it is skipped."""
    for odd in (0, -1, -704, -900, 2):
        plan = plan_of([FullAttention(16)], 16, 64)
        assert len(asked(plan, [1, odd, 1, 1]).args[0]) == 1


def test_ten_thousand_failures_are_told_in_short():
    """B64: the text of a result does not grow with its failures."""
    plan = plan_of([FullAttention(1)], 1, 10_000, max_pieces=None, log=None)
    finish(plan, code=-800)
    result = plan.result
    assert len(result.failures) == 10_000
    for text in (str(result), repr(result)):
        assert len(text) < 1000
    assert "10000 with codes [-800]" in str(result)
    assert result.failures[0].key in str(result)


# Bad answers


@pytest.mark.parametrize("bad", [[], [0], [0] * 3, [0] * 5, None, 7, "0000"], ids=repr)
def test_answers_of_another_length(bad):
    """To the existence call: nothing is believed, so all is put. To a put: all has failed."""
    plan = plan_of([FullAttention(16)], 16, 64)
    assert asked(plan, bad).args[0] == plan.keys
    told = plan.feed(bad)
    assert plan.next_call() is None
    result = plan.result
    assert told == result.failures
    assert [f.key for f in result.failures] == plan.keys
    assert {f.code for f in result.failures} == {MALFORMED_ANSWER}
    assert (result.stored, result.present, result.mark, result.num_bytes) == (0, 0, 0, 0)


@pytest.mark.parametrize("odd", [None, "0", 0.0, 0.5, [0]], ids=repr)
def test_answers_that_are_no_integers(odd):
    plan = plan_of([FullAttention(16)], 16, 64)
    assert asked(plan, [1, 1, 1, odd]).args[0] == plan.keys[3:]
    plan = plan_of([FullAttention(16)], 16, 64)
    asked(plan, [0] * 4)
    (failure,) = plan.feed([0, 0, 0, odd])
    assert (failure.key, failure.code) == (plan.keys[3], MALFORMED_ANSWER)
    assert plan.next_call() is None
    assert (plan.result.stored, plan.result.num_bytes, plan.result.mark) == (3, 192, 48)


def test_a_block_id_outside_the_tensors_puts_nothing():
    engine = Engine(FakeStore(), contract_of([FullAttention(16)], 16), 64, seed=1)
    for bad in (6, -1, 1 << 31, 1 << 63, 1 << 70, None, 1.0, "1", True, [1]):
        with pytest.raises(BlockIdError, match=r"`block_ids` must (be at least|hold integers)"):
            engine.save(digests(4), 64, tables=[[1, 2, bad, 3]])
    assert not engine.store.pool
    with pytest.raises(ArgumentError, match=r"`num_tokens` must be no more .*, got 64 and 48"):
        engine.save(digests(3), 64)


def test_a_block_id_outside_the_tensors_never_counts_as_saved():
    """A driver that goes on after the exception meets it again, and no result."""
    plan = plan_of([FullAttention(16)], 16, 64, [[1, 2, 1 << 40, 3]])
    plan.next_call()
    for _ in range(2):
        with pytest.raises(BlockIdError, match="must be at least 0 and below"):
            plan.feed([0] * 4)
        with pytest.raises(PlanStateError):
            plan.next_call()
        with pytest.raises(PlanStateError):
            plan.result  # noqa: B018
    plan.feed([1] * 4)
    assert plan.next_call() is None
    assert plan.result.present == 4


def test_states_are_saved_only_where_they_stay():
    groups = [FullAttention(16), Mamba(16)]
    assert set(planned(plan_of(groups, 16, 64, states=False))) == {0}
    assert planned(plan_of(groups, 16, 64))[1] == [1, 2, 3, 4]


def test_ranks_share_the_work_of_real_puts():
    """Four ranks with the same bytes write every block once between them."""
    groups = {"full": FullAttention(16), "swa": SlidingWindow(16, window=64)}
    grid = RankGrid(tp_size=4, replication={"full": 4, "swa": 2})
    contract = contract_of(groups, 16, ranks=grid)
    store = FakeStore()
    ranks = [Engine(store.client(), contract, 160, seed=3, bind={"tp_rank": r}) for r in range(4)]
    order = list(range(4))
    random.Random(1).shuffle(order)
    results = [ranks[r].save(digests(10), 160) for r in order]
    assert all(r.ok and r.mark == 160 and r.writers == 4 for r in results)
    # Two pairs of ranks have different bytes in the second group: two objects per block.
    assert sum(r.stored for r in results) == 30
    assert len(store.pool) == 30
    for rank in ranks:
        for g in range(2):
            for i, digest in enumerate(digests(10)):
                assert store.pool[key(rank, g, digest)] == rank.block(g, i)


def test_an_unfinished_state_is_saved_at_a_hash_block_only():
    """The block holds the state of the last token computed: at 56 tokens none of token 48."""
    groups = [FullAttention(32), Mamba(32)]
    for num_tokens, states in ((48, 2), (56, 1), (64, 2)):
        contract = Contract(
            groups, 16, StrictKeys("m"), None, partial_hits=True, facts={"dtype": "u1"}
        )
        engine = Engine(FakeStore(), contract, 96, seed=1)
        engine.save(digests(num_tokens // 16), num_tokens)
        stored = [key for key in engine.store.pool if "@g1@" in key]
        assert len(stored) == states, num_tokens


@pytest.mark.parametrize("seed", range(40))
def test_whether_digests_differ(seed):
    rng = random.Random(seed)
    for _ in range(50):
        size, scale, start = rng.choice([8, 16, 32]), rng.choice([1, 2, 3]), rng.randrange(3)
        pool = [rng.randbytes(size) for _ in range(rng.choice([3, 40, 1000]))]
        digests = [rng.choice(pool) for _ in range(rng.randrange(60))]
        n = max(0, len(digests) // scale - start)
        planned = Bitset.from_bools([rng.random() < 0.7 for _ in range(n)])
        named = [digests[(start + i + 1) * scale - 1] for i in planned.indices()]
        for hashes in (BlockHashes.from_list(digests), BlockHashes(b"".join(digests), size)):
            assert digests_differ(hashes, planned, start, scale) == (len(set(named)) == len(named))


def test_digests_of_less_than_eight_bytes_are_taken_for_equal():
    hashes = BlockHashes.from_list([b"ab", b"cd"])
    assert digests_differ(hashes, Bitset.ones(2), 0, 1) is False
    assert digests_differ(BlockHashes.from_list([bytes(32)]), Bitset.ones(1), 0, 1) is False
    assert digests_differ(BlockHashes.from_list([]), Bitset.ones(0), 0, 1) is True


@pytest.mark.parametrize("masks", [[[True], [True] * 2], [[True] * 99, [True] * 2 + [False] * 40]])
@pytest.mark.parametrize("reused", [0, 32])
@pytest.mark.parametrize("held", [None, 40])
def test_masks_of_other_lengths_than_the_blocks(masks, reused, held):
    groups = [FullAttention(16), SlidingWindow(16, window=33)]
    coord = Coordinator(groups, hash_block_size=4, partial_hits=True)
    scheme = scheme_of(coord, [flat_layout(), flat_layout()])
    tables = [list(range(1, 12))] * 2
    plan = SavePlan(scheme, digests(40), tables, 158, masks=masks, reused_tokens=reused, held=held)
    # A hit at this very end needs all blocks of the first group, and a window of the second.
    first = 2 if reused and held is None else 0
    saved = [e.blocks for e in plan._parts]
    assert saved[0] == list(range(first, 10))
    assert saved[1] == [i for i in (0, 1, 7, 8) if i >= first]
