"""Whole lookups, both strategies, against the reference over a store of keys."""

import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from reference import ReferenceCoordinator
from rig import answer_with, ask, scheme_of

from kvmask import BlockHashes, ChunkedLocal, Coordinator, FullAttention, LookupPlan, VllmKeys
from kvmask.plans import Held


def digests_for(config, num_tokens):
    return [i.to_bytes(4, "big") for i in range(num_tokens // config.hash_block_size)]


@given(st.data())
def test_lookups(data):
    config = data.draw(strategies.configs())
    num_tokens = data.draw(strategies.token_counts(config))
    present = data.draw(strategies.presence(config, num_tokens))
    local = data.draw(st.sampled_from((0, 0, 0, 1, config.common, num_tokens // 2, num_tokens)))
    digests = digests_for(config, num_tokens)
    names = [
        [VllmKeys(model="m", group_id=g, tp_rank=r) for r in range(data.draw(st.integers(1, 2)))]
        for g in range(len(config.groups))
    ]
    stored, held = set(), [list(units) for units in present]
    for schemas, group, units in zip(names, config.groups, held, strict=True):
        if not group.prefix_cacheable:
            continue
        scale = config.entry(group) // config.hash_block_size
        named = digests[scale - 1 :: scale]
        for schema in schemas:
            stored.update(schema.key(d) for d, there in zip(named, units, strict=False) if there)
        # One rank alone has the rest: that is as good as absent.
        stored.update(schemas[0].key(d) for d in named if len(schemas) > 1)
        if isinstance(group, FullAttention):
            # The engine holds these blocks itself, whatever the store has.
            step = group.block_size // config.entry(group)
            mine = min(local, num_tokens) // group.block_size * step
            units += [False] * (mine - len(units))
            units[step - 1 : mine : step] = [True] * (mine // step)
    expected = ReferenceCoordinator(*config.args).lookup(held, num_tokens)
    if expected[0] <= local:  # nothing beyond what the engine holds
        expected = 0, (), (0,) * len(config.groups)
    scheme = scheme_of(Coordinator(*config.args), schemas=names)
    # The engine has freed what full attention does not keep.
    mine = Held(tuple(local if isinstance(g, FullAttention) else 0 for g in config.groups), local)
    # Only 1 means present: not 2, and no code.
    absent = data.draw(st.sampled_from((0, 0, 2, -704, -900)))
    asked = {}
    for strategy in ("exact", "staged"):
        plan = LookupPlan(
            scheme, BlockHashes.from_list(digests), num_tokens, held=mine, strategy=strategy
        )
        calls = answer_with(
            plan, lambda call: [1 if key in stored else absent for key in call.args[0]]
        )
        batches = [call.args[0] for call in calls]
        keys = [key for batch in batches for key in batch]
        hit = plan.result
        masks = tuple(list(m) for m in hit.masks)
        assert (hit.length, hit.tail_tokens) == (expected[0], expected[2])
        if hit.length:
            assert masks == expected[1]
        assert (hit.asked, hit.probes) == (len(keys), len(batches))
        assert len(set(keys)) == len(keys)
        asked[strategy] = set(keys)
    assert asked["staged"] <= asked["exact"]


@pytest.mark.parametrize("strategy", ["exact", "staged"])
def test_a_chunk_edge_inside_a_block_is_passed_over(strategy):
    # At 192 tokens the chunk begins at 145, inside block 3: the blocks before count as present.
    # A search that is capped at 144 from the start would look into the chunk before.
    coord = Coordinator([ChunkedLocal(48, chunk_size=145)], 48)
    schema = VllmKeys(model="m")
    digests = [bytes([i] * 4) for i in range(4)]
    stored = set(schema.keys(digests[:2]))
    plan = LookupPlan(scheme_of(coord), digests, 192, strategy=strategy)
    ask(plan, stored)
    assert plan.result.length == 144
    assert plan.result.masks[0] == [False] * 3
