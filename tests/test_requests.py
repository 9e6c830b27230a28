"""CacheRequest: what it knows to be stored, whose results it takes, and what it refuses."""

import pickle

import pytest
from fake_store import EXIST, PUT, FakeStore
from rig import Engine, contract_of, digests

import kvmask
from kvmask import FullAttention, LoadPlan, Mamba, SavePlan, SlidingWindow, drive
from kvmask.errors import ArgumentError
from kvmask.plans import Handoff

np = pytest.importorskip("numpy")

GROUPS = {"full": FullAttention(64), "swa": SlidingWindow(16, window=32)}


def pair(groups=GROUPS, tokens=640):
    """An engine with bytes and one without, at one store."""
    store, contract = FakeStore(), contract_of(groups, 16)
    return Engine(store, contract, tokens, seed=1), Engine(store, contract, tokens)


def asked(store, call=EXIST):
    return [key for c in store.log if c.name == call for key in c.keys]


# What is known to be stored


def test_a_load_moves_the_mark_when_the_engine_held_nothing():
    source, target = pair()
    source.save(digests(40), 640)
    request = target.request(digests(40), 641)
    hit = target.kv.lookup(request)
    target.kv.load(request, hit, target.tables)
    assert (request.mark, hit.length) == (640, 640)


@pytest.mark.parametrize("held", [192, {"full": 192, "swa": 0}])
def test_blocks_that_the_engine_held_itself_are_saved_when_the_store_lacks_them(held):
    source, target = pair()
    source.save(digests(40), 640)
    # What the engine holds was evicted since.
    lost = [key for key in source.store.pool if key in keys_below(source, 192)]
    for key in lost:
        del source.store.pool[key]
    request = target.request(digests(40), 640)
    hit = target.kv.lookup(request, held)
    assert hit.length == 576
    loaded = target.kv.load(request, hit, target.tables)
    assert loaded.ok
    assert request.mark == 0
    result = target.kv.save(request, target.tables, 576)
    # Of the full group the three blocks that it held. Of the window group the two blocks below the
    # length that it held, when it said that it holds them.
    assert result.stored == 3 + 2 * (held == 192)
    assert {key.rpartition("@")[0] for key in asked(target.store, PUT)} <= {
        key.rpartition("@")[0] for key in lost
    }
    assert (request.mark, result.mark) == (576, 576)
    # The rest came from the store and is not asked for again.
    before = len(target.store.log)
    assert target.kv.save(request, target.tables, 576).stored == 0
    assert len(target.store.log) == before


def keys_below(engine, tokens):
    plan = SavePlan(engine.bound, digests(40), engine.tables, tokens)
    return set(plan.keys)


def test_what_a_load_did_not_fill_is_not_saved():
    """Of a window the load fills the last blocks; the table's entries below hold anything."""
    source, target = pair()
    source.save(digests(40), 640)
    request = target.request(digests(40), 641)
    hit = target.kv.lookup(request, 64)
    target.kv.load(request, hit, target.tables)
    plan = request.save_plan(target.bound, target.tables, 640)
    held = keys_below(source, 64)
    assert set(plan.keys) == held
    assert drive(plan, target.store).present == len(held)


def test_after_a_partial_load_the_save_begins_where_it_ended():
    source, target = pair({"full": FullAttention(16)}, 160)
    source.save(digests(10), 160)
    request = target.request(digests(10), 161)
    hit = target.kv.lookup(request, 32)
    target.store.fail("batch_get_into_multi_buffers", -704, keys=[source_key(source, 7)])
    loaded = target.kv.load(request, hit, target.tables)
    assert (loaded.usable_tokens, len(loaded.failures)) == (112, 1)
    plan = request.save_plan(target.bound, target.tables, 160)
    blocks = [int(key.rpartition("@")[2], 16) - 1 for key in plan.keys]
    assert blocks == [0, 1, 7, 8, 9]


def source_key(engine, block):
    return SavePlan(engine.bound, digests(10), engine.tables, 160).keys[block]


def test_a_plan_by_hand_takes_what_was_held_from_the_result():
    source, target = pair({"full": FullAttention(16)}, 160)
    source.save(digests(10), 160)
    hit = target.lookup(digests(10), 161, 48)
    loaded = drive(LoadPlan(target.bound, digests(10), hit, target.tables), target.store)
    options = {"reused_tokens": loaded.usable_tokens}
    assert SavePlan(target.bound, digests(10), target.tables, 160, **options).keys == []
    plan = SavePlan(target.bound, digests(10), target.tables, 160, **options, held=loaded.held)
    assert len(plan.keys) == 3


# Whose result it is


def test_a_result_of_another_request_is_refused():
    source, target = pair()
    one, other = source.request(digests(40), 641), source.request(digests(40, 7), 641)
    saved = drive(one.save_plan(source.bound, source.tables, 640), source.store)
    with pytest.raises(ArgumentError, match="`result` must be that of a plan of this request"):
        other.saved(saved)
    # A result may come from another thread's or process's queue.
    assert (other.mark, one.saved(pickle.loads(pickle.dumps(saved))).mark) == (0, 640)
    hit = drive(one.lookup_plan(), target.store)
    loaded = drive(one.load_plan(target.bound, hit, target.tables), target.store)
    with pytest.raises(ArgumentError, match="`result` must be that of a plan of this request"):
        other.loaded(loaded)
    assert one.loaded(loaded) is loaded


def test_attributes_that_are_not_to_be_set_are_refused():
    source, _ = pair()
    request = source.request(digests(40), 640)
    hit = source.kv.lookup(request)
    assert request.hit is hit
    request.hit = None
    request.hit, request.mark = hit, np.int64(64)
    assert (type(request.mark), request.mark) == (int, 64)
    names = [name for name in dir(request) if not name.startswith("_")]
    for name in {*names, "hits", "num_prompt_token"} - {"hit", "mark"}:
        with pytest.raises(AttributeError):
            setattr(request, name, 5)


def test_a_result_of_the_other_kind_is_refused():
    source, _target = pair()
    request = source.request(digests(40), 641)
    saved = drive(request.save_plan(source.bound, source.tables, 640), source.store)
    with pytest.raises(TypeError, match="`result` must be a LoadResult, got SaveResult"):
        request.loaded(saved)
    with pytest.raises(TypeError, match="`result` must be a SaveResult, got NoneType"):
        request.saved(None)
    assert request.mark == 0


def test_a_result_of_a_plan_without_a_request_is_taken():
    source, _ = pair()
    plan = SavePlan(source.bound, digests(40), source.tables, 640)
    request = source.request(digests(40), 641)
    request.saved(drive(plan, source.store))
    assert request.mark == 640


# What it refuses


def test_two_blocks_for_one_boundary_are_refused():
    source, _ = pair({"full": FullAttention(64), "state": Mamba(64)})
    request = source.request(digests(40), 640)
    request.hand_over("state", 64, 3)
    request.hand_over(1, 64, 3)
    with pytest.raises(
        ArgumentError,
        match="`block_id` must be the one block of its boundary, got 4 after 3 for 64 tokens of "
        "group 'state'",
    ):
        request.hand_over("state", 64, 4)
    request.hand_over("state", 128, 4)
    plan = request.save_plan(source.bound, source.tables, 0)
    assert len(plan.keys) == 2
    request.hand_over("state", 64, 4)  # for the save after that
    two = [Handoff(1, 64, 3), Handoff("state", 64, 4)]
    with pytest.raises(ArgumentError, match="got 4 after 3 for 64 tokens of group 'state'"):
        SavePlan(source.bound, digests(40), source.tables, 0, handoffs=two)


def test_a_save_beyond_the_request_names_the_number_of_tokens():
    source, _ = pair()
    request = source.request(digests(4), 70)
    with pytest.raises(
        ArgumentError, match=r"`num_tokens` must be no more than the request has .*, got 128 and 70"
    ):
        source.kv.save(request, source.tables, 128)
    request.extend(hashes=digests(8), num_tokens=130)
    assert source.kv.save(request, source.tables, 128).ok


@pytest.mark.parametrize(
    "hashes", [[b"a" * 32] * 4, [b"a" * 32, b"b" * 32, b"a" * 32], [b"a" * 32, b"a" * 32]]
)
def test_digests_that_stand_twice_are_refused(hashes):
    contract = contract_of(GROUPS, 16)
    with pytest.raises(ArgumentError, match=r"`hashes` must be chained, .* got block 0 and block"):
        contract.request(hashes=hashes)
    request = contract.request(hashes=hashes[:1])
    with pytest.raises(ArgumentError, match="`hashes` must be chained"):
        request.extend(hashes=hashes)
    assert request.num_tokens == 16


# What a result shows


def test_a_result_shows_its_failures():
    source, target = pair()
    source.save(digests(40), 640)
    hit = target.lookup(digests(40), 641)
    target.store.fail("batch_get_into_multi_buffers", -704, whole=False)
    loaded = target.load(digests(40), hit)
    assert f"failures=<{len(loaded.failures)} with codes [-704]" in repr(loaded)
    assert repr(loaded).startswith("LoadResult(loaded=")
    saved = source.save(digests(40), 640)
    assert repr(saved).endswith("quarantined={}, failures=<none>)")
    assert isinstance(saved, kvmask.SaveResult)


# What a transfer says of a contract that is another


def contract_with(**changes):
    arguments = {"groups": GROUPS, "hash_block_size": 16, "keys": kvmask.StrictKeys("m")}
    return kvmask.Contract(**{**arguments, "hashing": kvmask.Hashing(seed="0"), **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"keys": kvmask.StrictKeys("n")}, "keys[0][0].before "),
        ({"hashing": kvmask.Hashing(seed="1")}, "hashing.start "),
        ({"hashing": None}, "hashing None and {"),
        ({"hash_block_size": 8}, "hash_block_size 8 and 16"),
        ({"facts": {"dtype": "float16"}}, "facts.dtype 'float16' and absent"),
        (
            {"groups": {"full": FullAttention(64), "swa": SlidingWindow(16, window=48)}},
            "groups[1].window 48 and 32",
        ),
        ({"ranks": kvmask.RankGrid(tp_size=2)}, "ranks[0].shards 2 and 1"),
        (
            {"payload": [kvmask.PayloadFacts(dtype="float16", block_bytes=64)] * 2},
            "payload[0] [{",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_request_of_another_contract_is_refused_by_field(changes, said):
    other, mine = contract_with(**changes), contract_with()
    kv = kvmask.KVTransfer(FakeStore(), mine)
    with pytest.raises(TypeError, match="`request` must be one of this contract") as caught:
        kv.lookup(other.request(hashes=[]))
    assert f", which differ in {said}" in str(caught.value) or f"; {said}" in str(caught.value)
    found = other.differences(mine)
    assert any(str(item).startswith(said) for item in found if item.in_fingerprint)
    assert "seed" not in str(found)


def test_what_engines_may_decide_is_no_difference_of_the_fingerprint():
    grown = contract_with(alignment=128, partial_hits=True, retention_interval=0)
    named = contract_with(groups={"a": FullAttention(64, eagle=True), "b": GROUPS["swa"]})
    mine = contract_with()
    assert mine.differences(contract_with()) == []
    assert [str(d) for d in mine.differences(grown)] == [
        "alignment 64 and 128",
        "retention_interval None and 0",
        "partial_hits False and True",
    ]
    assert [str(d) for d in mine.differences(named)] == [
        "names[0] 'full' and 'a'",
        "names[1] 'swa' and 'b'",
        "groups[0].eagle False and True",
    ]
    for other in (grown, named):
        assert not any(d.in_fingerprint for d in mine.differences(other))
        assert other.fingerprint == mine.fingerprint
    with pytest.raises(TypeError, match="`other` must be a Contract, got str"):
        mine.differences("text")


def test_the_messages_of_a_contract_name_what_a_user_can_pass():
    with pytest.raises(TypeError) as caught:
        contract_with(hashing="sha256")
    assert str(caught.value) == (
        "`hashing` must be a Hashing, such as Hashing('sha256'), or None, got str"
    )
    for name, said in (("ranks", "RankGrid"), ("partial_hits", "bool")):
        with pytest.raises(TypeError, match=f"`{name}` must be {said}, got int"):
            contract_with(**{name: 2})


def test_what_is_no_request_is_refused_with_the_call_that_makes_one():
    kv = kvmask.KVTransfer(FakeStore(), contract_with())
    with pytest.raises(TypeError, match=r"which `contract.request` makes, got int"):
        kv.lookup(700)


# Facts that a user states of memory


@pytest.mark.parametrize(
    ("dtype", "stated", "good"),
    [
        ("float16", "float16", True),
        ("float16", "fp16", True),
        ("float16", "torch.float16", True),
        ("float32", "float", True),
        ("uint8", "fp8_e4m3", True),
        ("float16", "bfloat16", False),
        ("float16", "bf16", False),
        ("int16", "float16", False),
        ("float16", "float8_e4m3fn", False),
        ("float16", "uint8", False),
        ("float16", "v1", True),
    ],
)
def test_memory_of_another_dtype_than_the_stated_one_is_refused(dtype, stated, good):
    contract = kvmask.Contract(
        [FullAttention(16)], 16, kvmask.StrictKeys("m"), None, facts={"dtype": stated}
    )
    layout = kvmask.KVLayout.from_tensors([np.zeros((4, 16, 2), dtype)], num_blocks=4)
    if good:
        assert contract.bind([layout]).contract is contract
        return
    with pytest.raises(ArgumentError) as caught:
        contract.bind([layout])
    assert f"must have the dtype that `facts` state, got '{dtype}' and '{stated}'" in str(
        caught.value
    )


def test_memory_of_other_block_bytes_than_the_stated_ones_is_refused():
    layout = kvmask.KVLayout.from_tensors([np.zeros((4, 16, 2), np.float16)], num_blocks=4)
    for stated, good in ((64, True), (128, False)):
        contract = kvmask.Contract(
            [FullAttention(16)], 16, kvmask.StrictKeys("m"), None, facts={"block_bytes": stated}
        )
        if good:
            contract.bind([layout])
        else:
            with pytest.raises(ArgumentError, match="`facts` state, got 64 and 128"):
                contract.bind([layout])


def test_names_can_be_a_fact():
    """Equal groups in another order have equal fingerprints, unless their names are a fact."""
    one = {"self": FullAttention(16), "cross": FullAttention(16, spec=1)}
    other = dict(reversed(one.items()))
    plain = [contract_with(groups=groups).fingerprint for groups in (one, other)]
    named = [
        contract_with(groups=groups, facts={"groups": ",".join(groups)}).fingerprint
        for groups in (one, other)
    ]
    assert plain[0] == plain[1]
    assert named[0] != named[1]


def test_memory_that_is_registered_already():
    source, _ = pair()
    source.store.fail("register_buffer", -600)
    with pytest.raises(kvmask.errors.StoreError, match="memory that is registered already") as e:
        kvmask.KVTransfer(source.store, source.bound)
    assert e.value.code == -600


# Two names of a length


def test_the_largest_hit_by_either_name():
    coord = kvmask.Coordinator([FullAttention(16)], 16)
    hit = coord.find_hit([[True] * 4], 48)
    assert hit == coord.find_hit([[True] * 4], max_length=48)
    assert hit == coord.find_hit([[True] * 4], num_tokens=48, eagle=False)
    assert hit.length == 48
    for arguments, got in (({}, "none"), ({"num_tokens": 48, "max_length": 48}, "both")):
        with pytest.raises(TypeError, match=f"`num_tokens` must be given, got {got}"):
            coord.find_hit([[True] * 4], **arguments)
