"""Blocks whose transfer may still go on after a failure: a call that timed out is not cancelled."""

import pytest
from fake_store import EXIST, GET, PUT
from rig import digests, key, mooncake_tools, pair

from kvmask import FullAttention, LoadPlan, Mamba, SavePlan, SlidingWindow, StorePolicy
from kvmask.mooncake import Code, MooncakePolicy
from kvmask.plans import MALFORMED_ANSWER, Handoff, PlanTools

HASHES = digests(4)
GONE = RuntimeError("no route")
# What Mooncake's client answers while a transfer may still go on, or when nobody can tell.
UNSETTLED = {Code.INTERNAL_ERROR, Code.WRITE_FAIL, Code.TRANSFER_FAIL}


def full_pair(**options):
    options.setdefault("max_pieces", 1)
    options.setdefault("breaker", None)
    return pair([FullAttention(16)], 16, 64, layers=1, **options)


def test_every_code_of_mooncake_is_sorted():
    settled = {code for code in Code if MooncakePolicy().settled(code)}
    assert set(Code) - settled - {Code.OK} == UNSETTLED
    for unknown in (-801, -902, -12345, MALFORMED_ANSWER):
        assert not MooncakePolicy().settled(unknown)
    assert not any(StorePolicy().settled(code) for code in Code)


@pytest.mark.parametrize("code", [c for c in Code if c != Code.OK])
def test_a_load_names_the_blocks_that_may_still_be_written(code):
    source, target = full_pair(max_pieces=4)
    source.save(HASHES, 64)
    hit = target.lookup(HASHES, 65)
    lost = [key(source, 0, HASHES[i]) for i in (0, 2)]
    target.store.fail(GET, int(code), keys=lost)
    result = target.load(HASHES, hit)
    ids = sorted(target.tables[0][i] for i in (0, 2))
    assert (result.loaded, result.invalid) == (2, {"0": ids})
    assert result.quarantined == ({"0": ids} if code in UNSETTLED else {})
    assert {f.unsettled for f in result.failures} == {code in UNSETTLED}
    count = 2 if code in UNSETTLED else 0
    assert target.kv.stats.load_quarantined_blocks == count
    assert ("2 blocks in quarantine" in str(result)) == bool(count)


@pytest.mark.parametrize("code", [c for c in Code if c not in (0, Code.OBJECT_ALREADY_EXISTS)])
def test_a_save_names_the_blocks_that_may_still_be_read(code):
    source, _ = full_pair(max_pieces=4)
    source.store.fail(PUT, int(code), keys=[key(source, 0, HASHES[1])])
    result = source.save(HASHES, 64)
    ids = [source.tables[0][1]]
    assert result.stored == 3
    assert result.quarantined == ({"0": ids} if code in UNSETTLED else {})
    assert source.kv.stats.save_quarantined_blocks == (code in UNSETTLED)


@pytest.mark.parametrize("how", [GONE, [0], "?", [1.5] * 4], ids=["raised", "short", "text", "no"])
def test_nobody_knows_how_far_a_call_came(how):
    """A call that raised, and an answer that does not fit: every block of it is in quarantine."""
    source, target = full_pair(max_pieces=4)
    source.save(HASHES, 64)
    hit = target.lookup(HASHES, 65)
    target.store.fail(GET, how, whole=True)
    assert target.load(HASHES, hit).quarantined == {"0": sorted(target.tables[0])}
    saver, _ = full_pair(max_pieces=4)
    saver.store.fail(PUT, how, whole=True)
    assert saver.save(HASHES, 64).quarantined == {"0": sorted(saver.tables[0])}


def test_the_call_that_raised_and_not_those_that_were_never_made():
    source, target = full_pair()
    source.save(HASHES, 64)
    hit = target.lookup(HASHES, 65)
    target.store.fail(GET, GONE, index=1)
    assert target.load(HASHES, hit).quarantined == {"0": [target.tables[0][1]]}
    saver, _ = full_pair()
    saver.store.fail(PUT, GONE, index=2)
    assert saver.save(HASHES, 64).quarantined == {"0": [saver.tables[0][2]]}


class Breaks:
    def synchronize(self):
        raise RuntimeError("device lost")


def test_no_transfer_began():
    """A wait that raised, a question that raised, an outage at the first question, a renewal."""
    source, target = full_pair()
    assert source.save(HASHES, 64, event=Breaks()).quarantined == {}
    source.store.fail(EXIST, GONE, index=1)
    asked = source.save(HASHES, 64)
    assert (len(asked.failures), asked.quarantined) == (4, {})
    assert source.save(HASHES, 64).ok
    hit = target.lookup(HASHES, 65)
    waited = target.load(HASHES, hit, event=Breaks())
    assert (len(waited.failures), waited.quarantined) == (4, {})
    target.store.fail(GET, -707)
    target.store.fail(EXIST, GONE, index=1)
    renewed = target.load(HASHES, hit)
    assert (len(renewed.failures), renewed.quarantined) == (4, {})


def test_a_short_answer_is_of_a_transfer_that_is_over():
    source, target = full_pair(max_pieces=4)
    source.save(HASHES, 64)
    hit = target.lookup(HASHES, 65)
    target.store.fail(GET, 5)
    result = target.load(HASHES, hit)
    assert (len(result.failures), result.quarantined) == (4, {})


def test_the_neutral_policy_takes_every_failure_for_one_that_goes_on():
    source, target = full_pair()
    source.save(HASHES, 64)
    plan = LoadPlan(target.bound, HASHES, target.lookup(HASHES, 65), target.tables)
    call = plan.next_call()
    plan.feed([-704] * len(call.args[0]))
    assert plan.next_call() is None
    assert plan.result.quarantined == {"0": sorted(target.tables[0])}


def test_groups_are_told_apart():
    groups = [FullAttention(64), SlidingWindow(16, window=32)]
    source, target = pair(groups, 16, 128, layers=1, max_pieces=None, breaker=None)
    hashes = digests(8)
    source.save(hashes, 128)
    hit = target.lookup(hashes, 129)
    target.store.fail(GET, -800)
    result = target.load(hashes, hit)
    masks = [mask.indices() for mask in hit.masks]
    assert result.quarantined == {
        str(g): sorted(target.tables[g][i] for i in masks[g]) for g in range(2)
    }
    assert result.quarantined == result.invalid


def test_of_equal_keys_the_block_that_was_put():
    groups = [Mamba(16)]
    source, _ = pair(groups, 16, 64, layers=1)
    last = source.tables[0][3]
    other = next(i for i in range(1, 6) if i not in source.tables[0])
    tools = mooncake_tools(log=None)
    handed = [Handoff(0, 64, other)]
    plan = SavePlan(source.bound, HASHES, source.tables, 64, handoffs=handed, tools=tools)
    call = plan.next_call()
    plan.feed([0] * len(call.args[0]))
    call = plan.next_call()
    plan.feed([-800] * len(call.args[0]))
    assert plan.next_call() is None
    named = plan.result.quarantined["0"]
    assert len(plan.result.failures) == len(named) + 1
    assert last in named
    assert other not in named


def test_an_interrupt_leaves_the_blocks_in_quarantine():
    source, _ = full_pair()
    plan = SavePlan(source.bound, HASHES, source.tables, 64, tools=PlanTools(MooncakePolicy()))
    plan.next_call()
    plan.feed([0] * 4)
    plan.next_call()
    with pytest.raises(KeyboardInterrupt) as caught:
        plan.fail(KeyboardInterrupt())
    assert caught.value.partial_result.quarantined == {"0": sorted(source.tables[0])}
