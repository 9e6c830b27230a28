"""Wrong arguments: the right exception, naming the argument, the rule and the values; no crash."""

import array
import contextlib
import copy
import ctypes
import pickle
from dataclasses import replace

import numpy as np
import pytest

from kvmask import (
    AbsenceMemo,
    Bitset,
    BlockHashes,
    Breaker,
    ChunkedLocal,
    Contract,
    Coordinator,
    CostModel,
    FullAttention,
    HitHints,
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
    _core,
    hash_tokens,
)
from kvmask._core import (
    CoordinatorCore,
    KeyBuilder,
    LookupCore,
    Regions,
    build_keys,
    held_blocks,
    plan_save,
    present_bits,
)
from kvmask.errors import (
    AlignmentError,
    ArgumentError,
    BlockIdError,
    HashInputError,
    KeyFormatError,
    KVMaskError,
    LayoutError,
    PlanStateError,
)
from kvmask.mooncake import MooncakePolicy
from kvmask.plans import Handoff, Renewals
from kvmask.why import diagnose, look_near

HUGE = (1 << 63, -(1 << 63), 1 << 200, -1)
WRONG = (None, "16", 16.0, b"16", [16], True, 1j, object(), float("nan"), float("inf"))
GROUPS = {"full": FullAttention(16), "swa": SlidingWindow(16, window=32)}
LAYOUT = KVLayout.from_regions([(4096, 64, 64)], 8, [(4096, 512)])
CONTRACT = Contract(GROUPS, 16, VllmKeys("m"), hashing=None)
COORD = CONTRACT.coordinator
BOUND = CONTRACT.bind([LAYOUT] * 2)
HASHES = BlockHashes(bytes(range(64)), 16)
HIT = COORD.find_hit([[True] * 4] * 2, 64)


class Empty:
    """A store that has nothing."""

    def batch_is_exist(self, keys):
        return [0] * len(keys)


def save(**change):
    args = {"source": BOUND, "hashes": HASHES, "tables": [[1, 2, 3, 4]] * 2, "num_tokens": 64}
    return SavePlan(**{**args, **change})


def load(**change):
    args = {"source": BOUND, "hashes": HASHES, "tables": [[1, 2, 3, 4]] * 2, "hit": HIT}
    return LoadPlan(**{**args, **change})


def look(**change):
    args = {"source": CONTRACT, "hashes": HASHES, "num_tokens": 65}
    return LookupPlan(**{**args, **change})


def ask(**change):
    return CONTRACT.request(**{"hashes": HASHES, **change})


def planned(table):
    return plan_save(
        BOUND.scheme.loaded[:1], HASHES, [None], None, [table], 64, 0, 0, False, True, ()
    )


TEXTS = [
    (lambda: Coordinator([FullAttention(24)], 16), AlignmentError,
     "`block_size` must be a multiple of `hash_block_size`, got 24 and 16"),
    (lambda: Coordinator([FullAttention(4)], 8704), AlignmentError,
     "`block_size` must be a multiple of `hash_block_size`, got 4 and 8704"),
    (lambda: Coordinator([FullAttention(16), FullAttention(24)], 8, alignment=16), AlignmentError,
     "`alignment` must be a multiple of every group's `block_size`, got 16 and [16, 24]"),
    (lambda: Coordinator([], 16), ArgumentError,
     "`groups` must hold at least one prefix-cacheable group, got 0 groups and none"),
    (lambda: Coordinator([FullAttention(16, prefix_cacheable=False)], 16), ArgumentError,
     "`groups` must hold at least one prefix-cacheable group, got 1 groups and none"),
    (lambda: Coordinator([FullAttention(16)] * 3 + [16], 16), TypeError,
     "`groups` must hold kvmask groups, got int"),
    (lambda: FullAttention(0), ArgumentError, "`block_size` must be from 1 to 4294967296, got 0"),
    (lambda: SlidingWindow(16, window=0), ArgumentError,
     "`window` must be from 1 to 4294967296, got 0"),
    (lambda: SlidingWindow(16, window=1, extra_retained_tokens=-1), ArgumentError,
     "`extra_retained_tokens` must be from 0 to 4294967296, got -1"),
    (lambda: ChunkedLocal(16, chunk_size=0), ArgumentError,
     "`chunk_size` must be from 1 to 4294967296, got 0"),
    (lambda: ChunkedLocal(16, chunk_size=16, eagle=True), ArgumentError,
     "`eagle` must be False for ChunkedLocal, got True"),
    (lambda: Mamba(-1), ArgumentError, "`block_size` must be from 1 to 4294967296, got -1"),
    (lambda: COORD.store_mask(17), AlignmentError,
     "`num_tokens` must be a multiple of the alignment, got 17 and 16"),
    (lambda: COORD.store_mask(1 << 33), ArgumentError,
     "`num_tokens` must be from 0 to 4294967296, got 8589934592"),
    (lambda: COORD.store_mask(16, num_prompt_tokens=0), ArgumentError,
     "`num_prompt_tokens` must be from 1 to 4294967296, got 0"),
    (lambda: COORD.find_hit([[True]], 16), ArgumentError,
     "`present` must hold one bitset per group, got 1 and 2"),
    (lambda: BlockHashes(bytes(33), 16), AlignmentError,
     "the length of `buffer` must be a multiple of `digest_size`, got 33 and 16"),
    (lambda: BlockHashes(b"", 0), ArgumentError, "`digest_size` must be from 1 to 4096, got 0"),
    (lambda: BlockHashes.from_list([b"a", 5]), HashInputError,
     "`digests` must hold bytes-like objects, got int at index 1"),
    (lambda: BlockHashes.from_list([b"a", b""]), HashInputError,
     "a digest must have from 1 to 4096 bytes, got 0 at index 1"),
    (lambda: build_keys([KeyBuilder("a@")], HASHES, [True] * 5), ArgumentError,
     "`mask` must not be longer than the blocks from `start` on, got 5 and 4"),
    (lambda: VllmKeys("m").keys(HASHES, [True], start=4), ArgumentError,
     "`mask` must not be longer than the blocks from `start` on, got 1 and 0"),
    (lambda: VllmKeys("/"), KeyFormatError, "`model` must name a model, got '/'"),
    (lambda: VllmKeys(""), KeyFormatError, "`model` must name a model, got ''"),
    (lambda: VllmKeys("a\ud800"), KeyFormatError, "`model` must be valid Unicode, got 'a\\ud800'"),
    (lambda: StrictKeys("m", tp_rank=-1), ArgumentError,
     "`tp_rank` must be from 0 to 4294967295, got -1"),
    (lambda: KVLayout.from_tensors([], 4), LayoutError,
     "`tensors` must hold a tensor that is not empty, got none"),
    (lambda: KVLayout.from_tensors([np.zeros((5, 4), np.uint8)], 4), LayoutError,
     "`tensors[0]` must have a multiple of `num_blocks` entries in dimension 0, got 5 and 4"),
    (lambda: LAYOUT.addresses([8]), BlockIdError,
     "`block_ids` must be at least 0 and below `num_blocks`, got 8 at index 0 and 8"),
    (lambda: LAYOUT.addresses([0], null_block=0), BlockIdError,
     "`block_ids` must not name the null block, got 0 at index 0"),
    (lambda: save(hashes=HASHES[:3]), ArgumentError,
     "`hashes` must have one digest for every full hash block, "
     "got 3 digests of 16 tokens for 64 tokens"),
    (lambda: look(hashes=HASHES[:3]), ArgumentError,
     "`hashes` must have one digest for every full hash block, "
     "got 3 digests of 16 tokens for 65 tokens"),
    (lambda: ask(num_tokens=80), ArgumentError,
     "`hashes` must have one digest for every full hash block, "
     "got 4 digests of 16 tokens for 80 tokens"),
    (lambda: load(hashes=HASHES[:3]), ArgumentError,
     "`hashes` must cover the hit, got 3 digests of 16 for 64 tokens"),
    (lambda: save(tables=[[1]]), ArgumentError,
     "`tables` must hold one block table per group, got 1 and 2"),
    (lambda: save(tables={"full": [1]}), ArgumentError,
     "`tables` must hold one block table per group, got ['full'] and ['full', 'swa']"),
    (lambda: save(source=CONTRACT), PlanStateError,
     "saves and loads need memory: bind the contract to its layouts with "
     "`contract.bind(layouts)` first, got Contract"),
    (lambda: load(source=5), TypeError,
     "`source` must be a Contract, a bound contract or a Scheme, got int"),
    (lambda: save(tools=MooncakePolicy()), TypeError,
     "`tools` must be PlanTools, got MooncakePolicy"),
    (lambda: save(handoffs=[Handoff("odd", 16, 1)]), ArgumentError,
     "`group` of `handoffs` must be a cacheable group of the contract, "
     "got 'odd' and ['full', 'swa']"),
    (lambda: save(handoffs=[Handoff("swa", 17, 1)]), ArgumentError,
     "`num_tokens` of `handoffs` must be a multiple of the hash block size above 0, "
     "got 17 and 16"),
    (lambda: save(handoffs=[Handoff("swa", 80, 1)]), ArgumentError,
     "`num_tokens` of `handoffs` must be covered by the digests, "
     "got 80 tokens and 4 digests of 16"),
    (lambda: save(handoffs=[Handoff("swa", 0, 1)]), ArgumentError,
     "`num_tokens` of `handoffs` must be a multiple of the hash block size above 0, "
     "got 0 and 16"),
    (lambda: save(handoffs=[Handoff("swa", 16, 0)]), ArgumentError,
     "`block_id` of `handoffs` must not be the null block, got 0"),
    (lambda: ask().hand_over("odd", 16, 1), ArgumentError,
     "`group` must be a cacheable group of the contract, got 'odd' and ['full', 'swa']"),
    (lambda: ask().hand_over(None, 16, 1), TypeError,
     "`group` must be an integer, got NoneType"),
    (lambda: ask().hand_over(0, 10**30, 1), ArgumentError,
     f"`num_tokens` must be from 0 to 4294967296, got {10**30}"),
    (lambda: ask().hand_over(0, 17, 1), ArgumentError,
     "`num_tokens` must be a multiple of the hash block size above 0, got 17 and 16"),
    (lambda: ask().hand_over(0, 16, -1), ArgumentError, "`block_id` must be at least 0, got -1"),
    (lambda: setattr(ask(), "hit", 5), TypeError, "`hit` must be a Hit or None, got int"),
    (lambda: setattr(ask(), "mark", -1), ArgumentError,
     "`mark` must be from 0 to 4294967296, got -1"),
    (lambda: setattr(ask(), "mark", HIT), TypeError, "`mark` must be an integer, got Hit"),
    (lambda: Renewals(clock=5), TypeError, "`clock` must be a function, got int"),
    (lambda: Breaker(clock=None), TypeError, "`clock` must be a function, got NoneType"),
    (lambda: PresenceMemo(clock=0.5), TypeError, "`clock` must be a function, got float"),
    (lambda: AbsenceMemo(clock=0.5), TypeError, "`clock` must be a function, got float"),
    (lambda: PresenceMemo(seconds=True), TypeError, "`seconds` must be a number, got bool"),
    (lambda: CostModel(call=True), TypeError, "`call` must be a number, got bool"),
    (lambda: Renewals(share="1"), TypeError, "`share` must be a number, got str"),
    (lambda: diagnose(ask(), Empty(), progress=5), TypeError,
     "`progress` must be a function, got int"),
    (lambda: diagnose(ask(), 5), TypeError, "`store` must have `batch_is_exist`, got int"),
    (lambda: diagnose(5, Empty()), TypeError,
     "`request` must be a CacheRequest, which `contract.request` makes, got int"),
    (lambda: diagnose(ask(), Empty(), policy=5), TypeError,
     "`policy` must be a StorePolicy or None, got int"),
    (lambda: look_near(CONTRACT, Empty(), [1], progress="x"), TypeError,
     "`progress` must be a function, got str"),
    (lambda: PlanTools(log=5), TypeError, "`log` must be a Logger or None, got int"),
    (lambda: PlanTools(stats=None), TypeError, "`stats` must be True or False, got NoneType"),
    (lambda: MooncakePolicy(max_pieces=0), ArgumentError,
     "`max_pieces` must be at least 1, got 0"),
    (lambda: MooncakePolicy(staging=0), ArgumentError, "`staging` must be at least 1, got 0"),
    (lambda: MooncakePolicy(group_ids=True), ArgumentError,
     "`replicate_config` must be a function when `group_ids` is set, got NoneType"),
    (lambda: PlanTools(policy=None), TypeError, "`policy` must be a StorePolicy, got NoneType"),
    (lambda: PlanTools(costs=1.0), TypeError, "`costs` must be a CostModel, got float"),
    (lambda: PlanTools(hints=5), TypeError, "`hints` must be HitHints, a bool or None, got int"),
    (lambda: PlanTools(memo=AbsenceMemo()), TypeError,
     "`memo` must be a PresenceMemo or None, got AbsenceMemo"),
    (lambda: PlanTools(failed_loads=PresenceMemo()), TypeError,
     "`failed_loads` must be an AbsenceMemo or None, got PresenceMemo"),
    (lambda: look(strategy="best"), ArgumentError,
     "`strategy` must be one of ('staged', 'exact'), got 'best'"),
    (lambda: look(strategy=None), ArgumentError,
     "`strategy` must be one of ('staged', 'exact'), got None"),
    (lambda: look(held={"odd": 16}), ArgumentError,
     "`held` must name groups of the contract, got 'odd' and ['full', 'swa']"),
    (lambda: look(held=[16]), ArgumentError,
     "`held` must hold one entry per group, got 1 and 2"),
    (lambda: CONTRACT.request(), ArgumentError,
     "exactly one of `token_ids` and `hashes` must be given, got none"),
    (lambda: ask(token_ids=[1]), ArgumentError,
     "exactly one of `token_ids` and `hashes` must be given, got both"),
    (lambda: ask(extra_keys=[None] * 4), ArgumentError,
     "`extra_keys` must be None for digests, which hold them already"),
    (lambda: ask().extend([1]), ArgumentError,
     "`hashes` must be given to a request that was made from digests"),
    (lambda: ask().extend(hashes=HASHES[:3]), ArgumentError,
     "`hashes` must hold all digests of the request, got 3 for 64 tokens after 4 for 64"),
    (lambda: CostModel(call=0), ArgumentError, "`call` must be more than 0, got 0"),
    (lambda: CostModel(missing=float("nan")), ArgumentError,
     "`missing` must be more than 0, got nan"),
    (lambda: CostModel(miss_rate=1.1), ArgumentError, "`miss_rate` must be from 0 to 1, got 1.1"),
    (lambda: PresenceMemo(seconds=0), ArgumentError, "`seconds` must be more than 0, got 0"),
    (lambda: PresenceMemo(capacity=0), ArgumentError, "`capacity` must be at least 1, got 0"),
    (lambda: Bitset.ones(-1), ArgumentError, "`n` must be from 0 to 4294967296, got -1"),
    (lambda: Bitset.from_indices(8, [8]), ArgumentError, "`indices` must be from 0 to 7, got 8"),
    (lambda: Bitset.from_words(3, b"\xff" * 8), ArgumentError,
     "`words` must have no bit set past `n`, got 3 bits"),
    (lambda: Bitset([True]) & Bitset([True, True]), ArgumentError,
     "bitsets must have equal lengths, got 1 and 2"),
    (lambda: Bitset([2]), ArgumentError,
     "`bools` must hold only True and False, got 2 at index 0"),
    (lambda: planned(["7"]), BlockIdError,
     "`block_ids` must hold integers, got str at index 0"),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(TEXTS)))
def test_the_text(index):
    call, error, text = TEXTS[index]
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text
    assert type(caught.value) is error


# Counts of every kind, everywhere one is taken

COUNTS = {
    "block_size": FullAttention,
    "window": lambda v: SlidingWindow(16, window=v),
    "extra_retained_tokens": lambda v: SlidingWindow(16, window=16, extra_retained_tokens=v),
    "chunk_size": lambda v: ChunkedLocal(16, chunk_size=v),
    "hash_block_size": lambda v: Coordinator([FullAttention(16)], v),
    "alignment": lambda v: Coordinator([FullAttention(16)], 16, alignment=v),
    "retention_interval": lambda v: Coordinator([FullAttention(16)], 16, retention_interval=v),
    "num_tokens": COORD.store_mask,
    "num_tokens of lookup_mask": COORD.lookup_mask,
    "num_tokens of load_mask": COORD.load_mask,
    "start_token": lambda v: COORD.store_mask(64, v),
    "num_prompt_tokens": lambda v: COORD.store_mask(64, 0, v),
    "max_length": lambda v: COORD.find_hit([[True]] * 2, v),
    "digest_size": lambda v: BlockHashes(bytes(64), v),
    "start": lambda v: VllmKeys("m").keys(HASHES, None, v),
    "scale": lambda v: VllmKeys("m").keys(HASHES, None, 0, v),
    "tp_rank": lambda v: VllmKeys("m", tp_rank=v),
    "pp_rank": lambda v: StrictKeys("m", pp_rank=v),
    "num_blocks": lambda v: KVLayout.from_regions([(4096, 64, 64)], v, [(4096, 64)]),
    "num_tokens of save": lambda v: save(num_tokens=v),
    "start_token of save": lambda v: save(start_token=v),
    "num_prompt_tokens of save": lambda v: save(num_prompt_tokens=v),
    "handoffs of save": lambda v: save(handoffs=[Handoff("full", v, 1)]),
    "num_tokens of look": lambda v: look(num_tokens=v),
    "num_tokens of request": lambda v: ask(num_tokens=v),
    "num_prompt_tokens of request": lambda v: ask(num_prompt_tokens=v),
    "held of look": lambda v: look(held=v),
    "held of load": lambda v: load(held=v),
    "held of a group": lambda v: look(held={"swa": v}),
    "max_pieces": lambda v: MooncakePolicy(max_pieces=v),
    "staging": lambda v: MooncakePolicy(staging=v),
    "null_block": lambda v: PlanTools(null_block=v),
    "tp_size": lambda v: RankGrid(tp_size=v),
    "tp_rank of bind": lambda v: CONTRACT.bind([LAYOUT] * 2, tp_rank=v),
    "n": Bitset.zeros,
    "indices": lambda v: Bitset.from_indices(8, [v]),
    "capacity": HitHints,
    "capacity of memo": lambda v: PresenceMemo(capacity=v),
}
OPTIONAL = {"alignment", "retention_interval", "num_prompt_tokens", "max_pieces", "null_block",
            "staging", "held of look", "held of load", "num_tokens of request",
            "tp_rank of bind"}  # fmt: skip
# Python's own integers of any size are fine where only their order counts.
UNBOUNDED = {"max_pieces", "staging", "capacity of memo"}


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name):
    call, argument = COUNTS[name], name.split(" of ")[0]
    for value in WRONG:
        if value is None and (argument in OPTIONAL or name in OPTIONAL):
            call(None)
            continue
        if argument == "held" and isinstance(value, list):
            continue  # one entry per group, or per block
        with pytest.raises((TypeError, LayoutError)) as caught:
            call(value)
        assert argument in str(caught.value), (name, value, str(caught.value))
    for value in HUGE:
        if value > 0 and (name in UNBOUNDED or argument in UNBOUNDED):
            call(value)
            continue
        with pytest.raises(KVMaskError) as caught:
            call(value)
        assert str(value) in str(caught.value), (name, value)
        assert "`" in str(caught.value)


def test_arguments_that_are_no_sequences():
    for wrong in (None, 5, 1.0, object()):
        for call in (
            lambda w=wrong: save(source=w),
            lambda w=wrong: load(source=w),
            lambda w=wrong: look(source=w),
            lambda w=wrong: save(tables=w),
            lambda w=wrong: load(tables=w),
            lambda w=wrong: save(tables=[w, w]),
            lambda w=wrong: save(tables={"full": w, "swa": w}),
            lambda w=wrong: load(tables=[w, w]),
            lambda w=wrong: save(handoffs=w),
            lambda w=wrong: save(handoffs=[w]),
            lambda w=wrong: save(masks=[w, w] if w is not None else 5),
            lambda w=wrong: save(event=w if w is not None else 5),
            lambda w=wrong: CONTRACT.request(hashes=w),
            lambda w=wrong: CONTRACT.request(w),
            lambda w=wrong: save(hashes=w),
            lambda w=wrong: load(hit=w),
            lambda w=wrong: look(hashes=w),
            lambda w=wrong: Coordinator(w, 16),
            lambda w=wrong: COORD.find_hit(w, 16),
            lambda w=wrong: COORD.find_hit([w, w], 16),
            lambda w=wrong: Bitset.from_bools(w),
            lambda w=wrong: BlockHashes.from_list(w),
            lambda w=wrong: BlockHashes(w, 4) if w is not None else BlockHashes(5, 4),
            lambda w=wrong: KVTransfer(object(), w),
            lambda w=wrong: CONTRACT.bind(w),
            lambda w=wrong: CONTRACT.bind([w, w]),
        ):
            with pytest.raises((TypeError, KVMaskError)):
                call()
    for call in (save, load):
        with pytest.raises(TypeError, match="`tables` must be a sequence, got NoneType"):
            call(tables=None)
        with pytest.raises(TypeError, match="`tables` must be a sequence, got NoneType"):
            call(tables=[None, None])
    with pytest.raises(TypeError, match="`handoffs` must be a sequence of Handoff, got int"):
        save(handoffs=5)
    with pytest.raises(TypeError, match="`handoffs` must hold Handoff, got int"):
        save(handoffs=[5])
    with pytest.raises(TypeError, match="`masks` must"):
        save(masks=5)
    with pytest.raises(ArgumentError, match="`masks` must hold one mask per group, got 1 and 2"):
        save(masks=[None])


def test_integers_of_numpy_are_integers_and_results_hold_plain_ones():
    for kind in (np.int64, np.int32, np.uint16):
        plan = save(num_tokens=kind(64), start_token=kind(16), num_prompt_tokens=kind(64),
                    handoffs=[Handoff("swa", kind(48), kind(7))])  # fmt: skip
        assert plan.next_call().args[0] == plan.keys
        plan.feed(np.ones(len(plan.keys), kind))
        assert plan.next_call() is None
        assert type(plan.result.mark) is int
        assert (plan.result.mark, plan.result.present) == (64, 7)
        asked = look(num_tokens=kind(65), held=kind(16))
        while (call := asked.next_call()) is not None:
            asked.feed(np.ones(len(call.args[0]), kind))
        hit = asked.result
        assert (type(hit.length), hit.length, hit.held.tokens) == (int, 64, 16)
        assert type(hit.held.tokens) is int
        loading = load(hit=hit, held=[kind(16), kind(16)])
        assert len(loading.next_call().args[0]) == 5
        loading.feed(np.full(5, 64, kind))
        assert loading.next_call() is None
        assert type(loading.result.num_bytes) is int
        request = ask(num_tokens=kind(65), num_prompt_tokens=kind(65))
        assert {type(request.num_tokens), type(request.num_prompt_tokens)} == {int}


# Bitset under abuse


def test_slices_with_huge_steps():
    bools = [i % 3 == 0 for i in range(130)]
    bits = Bitset(bools)
    big = 1 << 62
    for start in (None, 0, 5, -5, 129, 130, 500, -500, big, -big):
        for stop in (None, 0, 64, -1, 130, 500, big, -big):
            for step in (None, 1, 2, 63, 64, 65, 129, big, -1, -2, -64, -129, -big):
                assert bits[start:stop:step] == bools[start:stop:step]
    with pytest.raises(ValueError):
        bits[::0]
    for bad in (130, -131, 1 << 63, -(1 << 70)):
        with pytest.raises(IndexError, match="out of range for 130 bits"):
            bits[bad]
    for bad in (None, "1", 1.0):
        with pytest.raises(TypeError, match="a bitset index must be an integer or a slice"):
            bits[bad]


def test_a_bitset_cannot_be_written_or_made_anew():
    bits = Bitset([True] * 70)
    view = memoryview(bits)
    with pytest.raises(TypeError):
        view[0] = 0
    with pytest.raises((BufferError, TypeError)):
        ctypes.c_uint64.from_buffer(bits)
    with pytest.raises(TypeError, match="read-only and cannot be made anew"):
        bits.__init__([False])
    with pytest.raises(TypeError):
        bits[0] = False
    del bits
    assert view[0] == (1 << 64) - 1
    assert view[1] == 63
    empty = Bitset.__new__(Bitset)
    assert memoryview(empty).nbytes == 0
    for call in (repr, list, len, hash, copy.copy):
        with contextlib.suppress(TypeError, BufferError):
            call(empty)
    empty.__init__([True])
    assert empty == [True]


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 1000])
def test_copies_and_pickles(n):
    bits = Bitset.from_indices(n, range(0, n, 3))
    hashes = BlockHashes(bytes(n * 4 or 4), 4)
    listed = BlockHashes.from_list([b"ab", b"c"] * n)
    builder = KeyBuilder("pre@", "é")
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(bits, protocol)) == bits
        assert pickle.loads(pickle.dumps(hashes, protocol)) == hashes
        assert pickle.loads(pickle.dumps(listed, protocol)) == listed
        again = pickle.loads(pickle.dumps(builder, protocol))
        assert (again.prefix, again.suffix) == ("pre@", "é")
    for value in (bits, hashes, listed):
        assert copy.copy(value) == value
        assert copy.deepcopy(value) == value
    with pytest.raises(TypeError):
        pickle.dumps(LookupCore(COORD._core, [[KeyBuilder("a")]] * 2, HASHES, 64))


# Digests over odd buffers


def test_odd_buffers():
    with pytest.raises((BufferError, ValueError)):
        BlockHashes(memoryview(bytes(64))[::2], 4)
    with pytest.raises((BufferError, ValueError)):
        BlockHashes(np.zeros((8, 8), np.uint8)[:, ::2], 4)
    released = memoryview(bytes(64))
    released.release()
    with pytest.raises(ValueError):
        BlockHashes(released, 4)
    assert len(BlockHashes(np.zeros((4, 16), np.uint32), 16)) == 16
    assert len(BlockHashes(array.array("Q", [1, 2]), 8)) == 2
    assert BlockHashes(b"", 32)[:] == []
    for text in ("abcd", 5, [1, 2]):
        with pytest.raises(TypeError):
            BlockHashes(text, 1)


def test_a_buffer_cannot_move_while_it_is_in_use():
    owner = bytearray(b"abcd" * 4)
    hashes = BlockHashes(owner, 4)
    with pytest.raises(BufferError):
        owner.extend(b"x" * 1000)
    del hashes
    owner.extend(b"x")


@pytest.mark.parametrize("strategy", ["staged", "exact"])
def test_a_list_that_changes_while_it_is_in_use(strategy):
    for change, message in (
        (lambda d: d.clear(), "must not shrink while it is in use"),
        (lambda d: d.__setitem__(0, None), "not change while it is in use, got NoneType"),
        (lambda d: d.__setitem__(0, "text"), "not change while it is in use, got str"),
    ):
        listed = [b"a" * 16] * 4
        plan = look(hashes=BlockHashes.from_list(listed), strategy=strategy)
        change(listed)
        with pytest.raises(HashInputError, match=message):
            plan.next_call()
    listed = [b"a" * 16] * 4
    hashes = BlockHashes.from_list(listed)
    listed[1] = b"b" * 4000
    assert VllmKeys("m").keys(hashes)[1].endswith("62" * 4000)


def test_ids_whose_own_code_misbehaves():
    table = [1, 2, 3, 4]

    class Evil:
        def __index__(self):
            table.clear()
            return 3

    table[0] = Evil()
    with pytest.raises(BlockIdError, match="must not shrink"):
        planned(table)

    class Grows:
        def __index__(self):
            grown.extend(range(1, 100_000))
            return 3

    grown = [Grows(), 2]
    keys, parts, _ = planned(grown)
    assert (len(keys), parts[0].block_ids) == (2, [3, 2])

    class Broken:
        def __index__(self):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        save(tables=[[Broken(), 2, 3, 4]] * 2)


def core_load(
    groups=BOUND.scheme.loaded[:1], masks=((True,),), tails=(0,), starts=None, tables=([1],)
):
    return _core.plan_load(
        groups,
        HASHES,
        masks,
        tails,
        16 * len(masks[0]) if masks else 16,
        starts,
        list(tables),
        None,
        True,
    )


def core_save(handed=(), masks=(None,), starts=None, tables=([1, 2, 3, 4],), tokens=64):
    groups = BOUND.scheme.loaded[:1]
    return plan_save(
        groups, HASHES, masks, starts, list(tables), tokens, 0, None, False, True, handed
    )


GROUP = BOUND.scheme.loaded[0]
TO_THE_CORE = [
    *(
        (lambda groups=groups: core_load(groups=groups), TypeError)
        for groups in ((None,), (1,), [GROUP])
    ),
    (lambda: core_load(masks=()), IndexError),
    (lambda: core_load(masks=(None,)), TypeError),
    (lambda: core_load(masks=((True,) * 9,), tables=(list(range(9)),)), ArgumentError),
    (lambda: core_load(tails=()), IndexError),
    (lambda: core_load(starts=()), IndexError),
    (lambda: core_load(starts=(9,)), ArgumentError),
    (lambda: core_load(tables=()), IndexError),
    (lambda: core_load(tables=((1,),)), TypeError),
    *(
        (lambda boundary=boundary: core_save([(GROUP, 0, 7, boundary)]), ArgumentError)
        for boundary in (0, -1, 5, 80, 1 << 62)
    ),
    (lambda: core_save([(GROUP, 0, 7, 1 << 63)]), OverflowError),
    (lambda: core_save([(None, 0, 7, 16)]), TypeError),
    (lambda: core_save([(GROUP, 0, 7)]), ValueError),
    (lambda: core_save(masks=()), IndexError),
    (lambda: core_save(starts=()), IndexError),
    (lambda: core_save(starts=(5,)), ArgumentError),
    (lambda: core_save(tables=()), IndexError),
    (lambda: core_save(tokens=144, tables=(list(range(9)),)), ArgumentError),
    *((lambda of=of: _core.PlanPart(of), TypeError) for of in (None, 1)),
    *(
        (lambda parts=parts: _core.describe_parts(parts), TypeError)
        for parts in (None, [None], [1])
    ),
    (lambda: _core.PlanGroup(None, 16), AttributeError),
    (lambda: _core.PlanGroup(GROUP.group, 0), ArgumentError),
    (lambda: _core.PlanGroup(replace(GROUP.group, own=GROUP.group.own * 2), 16), ArgumentError),
    (lambda: _core.same_attributes(None), TypeError),
    (lambda: _core.same_attributes([None]), TypeError),
    (lambda: _core.same_attributes([()]), IndexError),
    (lambda: _core.same_attributes([(GROUP, 5, 1)]), TypeError),
]


@pytest.mark.parametrize("i", range(len(TO_THE_CORE)))
def test_what_plans_never_give_the_core_is_refused(i):
    call, error = TO_THE_CORE[i]
    with pytest.raises(error):
        call()


def test_schemes_of_equal_parts_are_equal():
    scheme = BOUND.scheme
    assert replace(scheme) == scheme
    assert hash(replace(scheme)) == hash(scheme)
    assert replace(scheme, rank=1) != scheme


def test_regions_of_wrong_kinds():
    for region in ((0, 0, 0), (-1, 1, 1), (1 << 64, 1, 1), (1, 2, 1)):
        with pytest.raises(LayoutError):
            Regions([region], 4)
    for region in (("a", 1, 1), (None, 1, 1), (1, 1.0, 1), (1, 1, True)):
        with pytest.raises(TypeError, match=r"`regions\[0\]` must be an integer, got"):
            Regions([region], 4)
    for count in (0, -1, 1 << 63):
        with pytest.raises(LayoutError):
            Regions([(4096, 1, 1)], count)


def test_regions_and_rows_of_wrong_lengths():
    for region in ((1, 2), (1, 2, 3, 4), 5, None, "abc"):
        with pytest.raises(LayoutError, match=r"`regions\[0\]` must be 3 integers, got"):
            Regions([region], 4)
    for row in ("a", 5, (1, 2), None):
        with pytest.raises(TypeError, match="`groups` must hold rows of 6 values, got"):
            CoordinatorCore([row], 16, 16, None, partial=False)
    for kind in ("x", [], None):
        with pytest.raises(ArgumentError, match="`kind` must be one of full, window"):
            CoordinatorCore([(kind, 16, 0, False, True, 0)], 16, 16, None, partial=False)
        with pytest.raises(ArgumentError, match="`kind` must be one of full, window"):
            held_blocks(kind, 16, 16, 0, 4)


def test_what_holds_digests_is_a_set():
    for wrong in ([], {}, 5, "ab"):
        with pytest.raises(TypeError, match="`exists` must be a set or None, got"):
            present_bits(HASHES, wrong, 0, 1, 4)


def test_mappings_and_stores_of_wrong_kinds():
    for wrong in (None, 5, "ab", [1]):
        for call in (
            lambda w=wrong: StrictKeys("m", facts=w),
            lambda w=wrong: StrictKeys("m").with_facts(w),
            lambda w=wrong: StrictKeys("m", facts=w, facts_digest="0" * 16),
            lambda w=wrong: StrictKeys("m", tags=w),
            lambda w=wrong: KVTransfer(w, CONTRACT),
        ):
            with pytest.raises(TypeError):
                call()
    with pytest.raises(TypeError, match="`facts_digest` must be a str, got int"):
        StrictKeys("m", facts_digest=5)


LONG = "x" * 5_000_000


@pytest.mark.parametrize(
    "call",
    [
        lambda: StrictKeys("m", facts={"a": [LONG]}),
        lambda: StrictKeys("m", facts={LONG: [1]}),
        lambda: StrictKeys(LONG + "\ud800"),
        lambda: StrictKeys.parse(LONG),
        lambda: VllmKeys("m", release=LONG),
        lambda: look(strategy=LONG),
        lambda: look(held={LONG: 1}),
        lambda: Bitset([LONG]),
        lambda: Bitset([1]).index(LONG),
        lambda: Bitset.from_indices(0, [LONG]),
        lambda: Contract({"a": FullAttention(16)}, 16, VllmKeys("m"), states=LONG),
    ],
)
def test_long_values_are_cut(call):
    with pytest.raises(ValueError) as caught:
        call()
    assert 20 < len(str(caught.value)) < 4200


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda n: StrictKeys("m", facts={"a": n}), ArgumentError),
        (lambda n: Bitset([n]), ArgumentError),
        (lambda n: Bitset([1])[n], IndexError),
        (lambda n: Bitset([1]).index(n), ValueError),
        (lambda n: Bitset.from_indices(0, [n]), ArgumentError),
        (lambda n: HASHES[n], IndexError),
        (lambda n: hash_tokens([n]), HashInputError),
        (lambda n: hash_tokens([-n]), HashInputError),
    ],
)
def test_integers_of_many_digits(call, error):
    """Python itself refuses to write them out."""
    with pytest.raises(error, match="bits"):
        call(1 << 30_000)


def test_values_that_are_nested_deeply():
    nest: tuple = ()
    for _ in range(100_000):
        nest = (nest,)
    for call, error in (
        (lambda: StrictKeys("m", facts={"a": nest}), ArgumentError),
        (lambda: Contract(GROUPS, 16, StrictKeys("m"), facts={"a": nest}), ArgumentError),
        (lambda: Bitset([nest]), ArgumentError),
        (lambda: KVLayout.from_regions([nest], 4, storages=[(1, 2)]), LayoutError),
        (lambda: Regions([nest], 4), LayoutError),
        (lambda: hash_tokens(range(16), extra_keys=[nest]), HashInputError),
        (lambda: hash_tokens(range(16), 16, "sha256_cbor", extra_keys=[nest]), HashInputError),
    ):
        with pytest.raises(error):
            call()
    with pytest.raises(LayoutError, match="must be 3 integers, got a value of tuple"):
        Regions([nest], 4)
    numbers = [1 << 30_000]
    with pytest.raises(ArgumentError, match="got a value of list at index 0"):
        Bitset([numbers])


def test_messages_keep_both_ends():
    error = ArgumentError("a" * 10_000 + "end")
    assert str(error).startswith("aaa")
    assert str(error).endswith("end")
    assert "... 6103 characters ..." in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_keys_that_would_break_a_line_of_a_log():
    odd = VllmKeys("m\nERROR all is lost\x1b[2J")
    contract = Contract(GROUPS, 16, odd, hashing=None)
    plan = SavePlan(contract.bind([LAYOUT] * 2), HASHES, [[1, 2, 3, 4]] * 2, 64)
    while plan.next_call() is not None:
        plan.fail(OSError("gone"))
    for shown in (str(plan.result), repr(plan.result.failures[0])):
        assert shown.isprintable()
        assert r"m\nERROR" in shown
