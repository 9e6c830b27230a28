"""Every attention kind of `kvmask.groups.KINDS` is known wherever kinds differ."""

from dataclasses import MISSING, fields, replace

import pytest
from reference import MASKS, SEARCHES, SEEN, held_blocks

from kvmask import Contract, Coordinator, Hashing, StrictKeys, _core
from kvmask.cli.explain import explain
from kvmask.cli.options import GROUPS, make_groups
from kvmask.coordinator import group_row
from kvmask.groups import KINDS

# What engines may differ in and still share blocks.
LOCAL = {"prefix_cacheable", "eagle", "extra_retained_tokens", "spec"}


def make(kind):
    """A group of 16 tokens per block, whose other sizes are 64 where they have no default."""
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.name != "block_size"]
    return kind(block_size=16, **dict.fromkeys(needed, 64))


def contract(group):
    hashing = Hashing(seed="the same")
    return Contract({"g": group}, 16, StrictKeys("m"), hashing, facts={"dtype": "int8"})


def test_each_kind_has_rules_here_and_an_option_of_explain():
    kinds = set(KINDS.values())
    assert set(MASKS) == set(SEARCHES) == set(SEEN) == kinds
    assert {make for make, *_ in GROUPS.values()} == kinds


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_the_core_knows_the_kind(kind):
    group = make(kind)
    name, size, span = group_row(group)
    assert KINDS[name] is kind
    for tokens in (0, 15, 32, 33, 170):
        held = _core.held_blocks(name, size, span, tokens, 12)
        assert set(held.indices()) == held_blocks(group, tokens, 12)
    text = explain(Coordinator([group], 16), 320)
    assert f"group 0: {group.title}, blocks of 16" in text


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_a_contract_can_be_written_and_tells_sizes_apart(kind):
    group = make(kind)
    one = contract(group)
    assert Contract.from_json(one.to_json(with_seed=True)) == one
    for item in fields(kind):
        if item.name not in LOCAL:
            other = contract(replace(group, **{item.name: getattr(group, item.name) * 2}))
            assert other.fingerprint != one.fingerprint, item.name
    assert contract(replace(group, spec="x")).fingerprint == one.fingerprint


def test_no_two_kinds_share_a_fingerprint():
    assert len({contract(make(kind)).fingerprint for kind in KINDS.values()}) == len(KINDS)


def test_eagle_for_all_groups_leaves_out_kinds_that_have_none():
    given = [(option, [16, 64][: len(names)]) for option, (_, names, *_) in GROUPS.items()]
    for group in make_groups(given, []):
        assert group.eagle == group.drops_for_eagle
