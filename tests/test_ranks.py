"""Who holds what and who writes what, over whole grids of ranks."""

import copy
import itertools
import pickle

import pytest

from kvmask import FullAttention, Mamba, SlidingWindow
from kvmask.contract import Contract
from kvmask.errors import AlignmentError, ArgumentError
from kvmask.hashing.settings import Hashing
from kvmask.keys import AscendKeys, SglangKeys, StrictKeys, VllmKeys
from kvmask.ranks import MAX_RANKS, RULES, GroupRanks, RankGrid

HASHING = Hashing(seed="ranks")


def contract(grid, keys=None, groups=None, **more):
    groups = groups or {"full": FullAttention(16)}
    return Contract(groups, 16, keys or StrictKeys("m"), HASHING, ranks=grid, **more)


def all_ranks(grid):
    return itertools.product(range(grid.tp_size), range(grid.pp_size), range(grid.pcp_size))


def writers_of(made, blocks):
    """(key prefix, block) to the ranks that write it, over all groups and ranks of the grid.

    The turns are those of the groups' ranks, since binding needs memory.
    """
    found = {}
    for group, ranks in zip(made._filled, (g.ranks for g in made._filled), strict=True):
        if not group.templates:
            continue
        for rank, stage, prefill in all_ranks(made.ranks):
            if stage not in ranks.stages:
                continue
            for tensor, context in ranks.own(rank):
                place = next(
                    p
                    for p in ranks.namespaces()
                    if (p.tensor, p.context, p.prefill, p.stage)
                    == (tensor, context, prefill, stage)
                )
                for schema in group.schemas(made.ranks, [place]):
                    for block in range(blocks):
                        row = found.setdefault((schema.builder, block), [])
                        if block % ranks.copies(rank) == ranks.turn(rank, group.number):
                            row.append(rank)
    return found


def prefixes(made, group=0):
    return [builder.prefix for builder in made.scheme.groups[group].namespaces]


GROUPS = {"full": FullAttention(16), "swa": SlidingWindow(16, window=32), "state": Mamba(16)}


@pytest.mark.parametrize("keys", [StrictKeys("m"), VllmKeys("m"), AscendKeys("m", release="0.25")])
@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16])
def test_each_key_has_one_writer_and_every_namespace_is_looked_up(keys, heads):
    tried = 0
    for size, stages, contexts, prefill in itertools.product(
        (1, 2, 4, 8), (1, 2), (1, 2, 4, 8), (1, 2)
    ):
        for split in (True, False):
            try:
                grid = RankGrid(
                    size, stages, contexts, prefill, kv_heads=heads, context_split=split
                )
                made = contract(grid, keys, GROUPS)
            except AlignmentError:
                continue
            tried += 1
            found = writers_of(made, 16)
            assert all(len(writers) == 1 for writers in found.values())
            asked = {b for g in made.scheme.groups for b in g.namespaces}
            assert {builder for builder, _ in found} == asked
    assert tried > 20


def test_replicas_share_the_work_evenly():
    made = contract(RankGrid(8, kv_heads=2), groups=GROUPS)
    counts = {}
    for writers in writers_of(made, 16).values():
        counts[writers[0]] = counts.get(writers[0], 0) + 1
    # Two attention groups of two shards, 16 blocks each, and a state of its own per rank.
    assert counts == dict.fromkeys(range(8), 2 * 16 * 2 // 8 + 16)


def test_one_group_on_one_stage_only():
    grid = RankGrid(2, 3, stages={"full": [0, 2]})
    made = contract(grid, groups={"full": FullAttention(16), "swa": SlidingWindow(16, window=32)})
    assert len(made.scheme.groups[0].namespaces) == 4
    assert len(made.scheme.groups[1].namespaces) == 6
    assert all(len(writers) == 1 for writers in writers_of(made, 4).values())


@pytest.mark.parametrize("split", [True, False])
def test_ranks_share_keys_when_they_hold_the_same_bytes_and_only_then(split):
    """Against which heads and which tokens each rank holds."""
    tried = 0
    for size, heads, contexts in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16), (1, 2, 4)):
        try:
            grid = RankGrid(size, dcp_size=contexts, kv_heads=heads, context_split=split)
            cells = contract(grid)._filled[0].ranks.cells
        except AlignmentError:
            continue
        tried += 1

        def held(rank, size=size, heads=heads, contexts=contexts):
            each = heads / size
            first = int(rank * each)
            part = rank % contexts if split else 0
            return range(first, first + max(1, int(each))), part

        for one, two in itertools.combinations(range(size), 2):
            assert (cells[one] == cells[two]) == (held(one) == held(two))
    assert tried > 30


# F12: who writes what under decode context parallelism.


def test_strict_keys_derive_who_writes_under_decode_context_parallelism():
    grid = RankGrid(8, dcp_size=2, kv_heads=1, context_split={"second": False})
    one = contract(RankGrid(8, dcp_size=2, kv_heads=1))
    found = writers_of(one, 16)
    assert len(found) == 32
    assert {len(writers) for writers in found.values()} == {1}
    ranks = one._filled[0].ranks
    assert [ranks.cells[r] for r in (0, 2, 4, 6)] == [(0, 0)] * 4
    assert [ranks.cells[r] for r in (1, 3, 5, 7)] == [(0, 1)] * 4
    two = contract(grid, groups={"first": FullAttention(16), "second": FullAttention(16)})
    found = writers_of(two, 16)
    assert len(found) == 48
    assert {len(writers) for writers in found.values()} == {1}


def test_replication_says_the_same_as_heads():
    said = contract(RankGrid(8, dcp_size=2, replication=4))
    derived = contract(RankGrid(8, dcp_size=2, kv_heads=1))
    assert said.scheme.groups == derived.scheme.groups
    assert said.fingerprint == derived.fingerprint


def test_every_rank_has_keys_of_its_own_under_vllms_decode_context_parallelism():
    made = contract(RankGrid(8, dcp_size=2, kv_heads=1), VllmKeys("m"))
    found = writers_of(made, 16)
    assert len(found) == 8 * 16
    assert {len(writers) for writers in found.values()} == {1}


# B25: the namespaces of vLLM's lookups, in its order.


def test_namespaces_of_eight_decode_context_ranks():
    names = prefixes(contract(RankGrid(8, dcp_size=8, kv_heads=1), VllmKeys("m")))
    assert len(names) == 8
    assert names[3] == "m@tp_rank:3@pcp0@dcp3@pp_rank:0@group:0@"
    both = prefixes(contract(RankGrid(8, 2, 8, kv_heads=1), VllmKeys("m")))
    assert len(both) == 16
    assert both[:3] == [
        "m@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@",
        "m@tp_rank:0@pcp0@dcp0@pp_rank:1@group:0@",
        "m@tp_rank:1@pcp0@dcp1@pp_rank:0@group:0@",
    ]


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("contexts", [1, 2, 4])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("pcp", [1, 2])
def test_namespaces_are_those_of_vllm(heads, contexts, pp, pcp):
    """By the rules of vLLM 0.33, written out."""
    size = 8
    made = contract(RankGrid(size, pp, contexts, pcp, kv_heads=heads), VllmKeys("m"), GROUPS)
    for index, state in enumerate((False, False, True)):
        factor = 1 if contexts > 1 or state else max(1, size // heads)
        shards = range(size) if contexts > 1 else range(size // factor)
        wanted = [
            f"m@tp_rank:{t}@pcp{p}@dcp{t % contexts}@pp_rank:{s}@group:{index}@"
            for p in range(pcp)
            for t in shards
            for s in range(pp)
        ]
        assert prefixes(made, index) == wanted
        ranks = made._filled[index].ranks
        for rank in range(size):
            assert ranks.own(rank) == ((rank // factor, rank % contexts),)
            assert (ranks.copies(rank), ranks.turn(rank, index)) == (
                factor,
                (rank + index) % factor,
            )


# B27: fixed owners.


@pytest.mark.parametrize(("heads", "step"), [(1, 8), (4, 2), (8, 1)])
def test_owners_of_chunks(heads, step):
    groups = {"a": FullAttention(16), "b": FullAttention(16)}
    made = contract(RankGrid(8, kv_heads=heads), VllmKeys("m"), groups)
    for number, group in enumerate(made._filled):
        for chunk in range(37):
            owners = {r for r in range(8) if chunk % step == group.ranks.turn(r, number)}
            assert owners == {r for r in range(8) if chunk % step == (r + number) % step}
            assert len(owners) == 8 // step
    if step == 8:
        first = [g.ranks.turn(r, n) for n, g in enumerate(made._filled) for r in range(8)]
        assert (first.index(0), first.index(0, 8) - 8) == (0, 7)
    if step == 2:
        turns = [made._filled[0].ranks.turn(r, 0) for r in range(8)]
        assert [r for r in range(8) if turns[r] == 0] == [0, 2, 4, 6]


# Engines' keys.


def test_ascend_divides_the_tensor_rank_by_heads_and_keeps_the_context_rank():
    made = contract(RankGrid(8, dcp_size=2, kv_heads=2), AscendKeys("m", release="0.25"))
    assert prefixes(made)[0].startswith("m@pcp0@dcp0@head_or_tp_rank:0@pp_rank:0@group:0@")
    assert made._filled[0].ranks.cells == tuple((r // 4, r % 2) for r in range(8))
    assert len(prefixes(made)) == 4


def test_sglang_names_every_rank_unless_the_cache_is_mla():
    grid = RankGrid(4, kv_heads=1)
    parts = {"full": [SglangKeys("m"), SglangKeys("m", part="v")]}
    made = contract(grid, parts)
    suffixes = [b.suffix for b in made.scheme.groups[0].namespaces]
    assert suffixes == [f"_{r}_{part}" for r in range(4) for part in "kv"]
    latent = contract(grid, SglangKeys("m", mla=True))
    assert [b.suffix for b in latent.scheme.groups[0].namespaces] == ["__k"]
    with pytest.raises(ArgumentError, match="must have a field for the tensor-parallel rank"):
        contract(RankGrid(4), SglangKeys("m", mla=True))


# B28: stores cut for another TP size.


def test_store_shards():
    made = contract(RankGrid(2, kv_heads=8, store_tp_size=4))
    ranks = made._filled[0].ranks
    assert (ranks.own(0), ranks.own(1)) == (((0, 0), (1, 0)), ((2, 0), (3, 0)))
    assert (ranks.shards, ranks.copies(1), ranks.turn(1, 5)) == (4, 1, 0)
    assert len(made.scheme.groups[0].namespaces) == 4
    sizes = {contract(RankGrid(t, kv_heads=8, store_tp_size=4)).fingerprint for t in (1, 2, 4)}
    assert sizes == {made.fingerprint}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tp_size": 8, "store_tp_size": 4}, "got 4 and 8"),
        ({"tp_size": 3, "store_tp_size": 4}, "got 4 and 3"),
        ({"tp_size": 1, "store_tp_size": 16}, "got 8 and 16"),
    ],
)
def test_store_shards_that_do_not_fit(values, said):
    with pytest.raises(AlignmentError, match=said):
        contract(RankGrid(kv_heads=8, **values))


def test_store_shards_need_something_to_cut():
    with pytest.raises(ArgumentError, match="`store_tp_size` must cut a group"):
        contract(RankGrid(store_tp_size=2, kv_heads=8), groups={"state": Mamba(16)})
    with pytest.raises(AlignmentError, match="got None and 2"):
        contract(RankGrid(store_tp_size=2))
    with pytest.raises(ArgumentError, match="with `dcp_size` above 1"):
        RankGrid(2, dcp_size=2, store_tp_size=2)


# What is refused.


@pytest.mark.parametrize(
    ("values", "error", "said"),
    [
        ({"tp_size": 0}, ArgumentError, "`tp_size` must be at least 1, got 0"),
        ({"tp_size": "2"}, TypeError, "`tp_size` must be an integer"),
        ({"tp_size": True}, TypeError, "`tp_size` must be an integer"),
        ({"pp_size": None}, TypeError, "`pp_size` must be an integer"),
        ({"tp_size": MAX_RANKS, "pp_size": 2}, ArgumentError, "must be at most 65536"),
        ({"tp_size": 4, "dcp_size": 3}, AlignmentError, "got 4 and 3"),
        ({"kv_heads": 0}, ArgumentError, "`kv_heads` must be at least 1, got 0"),
        ({"kv_heads": {"full": 1.5}}, TypeError, "`kv_heads` must be an integer"),
        ({"kv_heads": {1: 1}}, TypeError, "`kv_heads` must map the names"),
        ({"context_split": 1}, TypeError, "`context_split` must be True or False"),
        ({"stages": [1]}, ArgumentError, "pipeline ranks from 0 to 0, got \\[1\\]"),
        ({"stages": []}, ArgumentError, "pipeline ranks from 0 to 0"),
        ({"stages": "0"}, TypeError, "`stages` must be pipeline ranks"),
        ({"pp_size": 2, "stages": [0, -1]}, ArgumentError, "at least 0, got -1"),
    ],
)
def test_wrong_grids(values, error, said):
    with pytest.raises(error, match=said):
        RankGrid(**values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"kv_heads": {"swa": 1}}, r"groups of the contract, got \['swa'\] and \['full'\]"),
        ({"kv_heads": [1, 2]}, "one entry per group, got 2 and 1"),
        ({"kv_heads": 1, "replication": 2}, "exclude each other for group 'full', got 1 and 2"),
        ({"kv_heads": [1], "replication": {"full": 2}}, "exclude each other"),
        ({"tp_size": 4, "kv_heads": 3}, "got 4 and 3"),
        ({"tp_size": 4, "replication": 3}, "got 4 and 3"),
        ({"tp_size": 4, "dcp_size": 2, "kv_heads": 4}, "got 2 and 1"),
        ({"tp_size": 4, "dcp_size": 4, "replication": 2}, "times `dcp_size`, got 4 and 8"),
    ],
)
def test_grids_that_do_not_fit_the_groups(values, said):
    with pytest.raises(ArgumentError, match=said):
        contract(RankGrid(**values))


def test_what_is_said_of_one_group_comes_first():
    groups = {"a": FullAttention(16), "b": FullAttention(16)}
    made = contract(RankGrid(4, kv_heads=4, replication={"b": 4}), groups=groups)
    assert [g.ranks.shards for g in made._filled] == [4, 1]
    made = contract(RankGrid(4, kv_heads={"a": 1}, replication=2), groups=groups)
    assert [g.ranks.shards for g in made._filled] == [1, 2]


def test_states_are_each_ranks_own():
    groups = {"full": FullAttention(16), "state": Mamba(16)}
    made = contract(RankGrid(4, kv_heads=1), groups=groups)
    assert [g.ranks.shards for g in made._filled] == [1, 4]
    with pytest.raises(ArgumentError, match="`kv_heads` must be None for group 'state'"):
        contract(RankGrid(4, kv_heads=[1, 1]), groups=groups)
    made = contract(RankGrid(4, kv_heads=1, replication={"state": 4}), groups=groups)
    assert [g.ranks.shards for g in made._filled] == [1, 1]


def test_engine_templates_must_know_the_heads():
    for keys in (VllmKeys("m"), AscendKeys("m")):
        with pytest.raises(ArgumentError, match="`kv_heads` or `replication` of group 'full'"):
            contract(RankGrid(2), keys)
    contract(RankGrid(2, dcp_size=2), VllmKeys("m"))
    with pytest.raises(ArgumentError, match="must be 1 in keys of vLLM"):
        contract(RankGrid(2, dcp_size=2, replication=2), VllmKeys("m"))


def test_own_ranks():
    grid = RankGrid(4, 2, 2, 3)
    assert grid.own(3, 1, 1, 2) == (3, 1, 1, 2)
    assert grid.own(3, 0, None, 0) == (3, 0, 1, 0)
    assert RankGrid().own(None) == (0, 0, 0, 0)
    for ranks, said in (
        ((4,), "`tp_rank` must be below `tp_size`, got 4 and 4"),
        ((0, 2), "`pp_rank` must be below `pp_size`, got 2 and 2"),
        ((0, 0, None, 3), "`pcp_rank` must be below `pcp_size`, got 3 and 3"),
        ((3, 0, 0, 0), "`dcp_rank` must be `tp_rank` % `dcp_size`, got 0 for 3 % 2"),
        ((-1,), "`tp_rank` must be at least 0, got -1"),
        ((None,), "`tp_rank` must be given when there are several, got None for `tp_size` 4"),
        ((1,), "`pp_rank` must be given when there are several, got None for `pp_size` 2"),
    ):
        with pytest.raises(ArgumentError, match=said):
            grid.own(*ranks)


def test_grids_are_values():
    grid = RankGrid(4, 2, kv_heads={"full": 1}, stages=[[0], [0, 1]])
    assert grid == RankGrid(4, 2, kv_heads={"full": 1}, stages=((0,), (1, 0)))
    assert hash(grid) == hash(RankGrid(4, 2, kv_heads={"full": 1}, stages=[[0], [1, 0]]))
    assert pickle.loads(pickle.dumps(grid)) == copy.deepcopy(grid) == grid
    assert (
        repr(grid) == "RankGrid(tp_size=4, pp_size=2, kv_heads={'full': 1}, stages=((0,), (0, 1)))"
    )
    heads = {"full": 1}
    grid = RankGrid(kv_heads=heads)
    heads["full"] = 2
    assert grid.kv_heads == {"full": 1}
    with pytest.raises(AttributeError):
        grid.tp_size = 2


def test_rules_are_named():
    assert RULES == ("equal bytes", "vllm", "ascend", "own")
    row = GroupRanks(((0, 0),), 1, (0,), 1, split=False)
    assert (row.shards, row.contexts, row.copies(0), row.turn(0, 3)) == (1, 1, 1, 0)
    assert row.even
