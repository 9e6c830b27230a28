"""The fake store answers as a real one: every assertion runs against both."""

import ctypes
import uuid

import fake_store
import pytest
from fake_store import EXIST, GET, PUT, FakeStore, UnregisteredMemory

SIZE = 1 << 16


class Rig:
    """A store, two registered buffers and key names of its own."""

    def __init__(self, store):
        self.store = store
        self.a = ctypes.create_string_buffer(bytes(i * 7 % 251 for i in range(SIZE)), SIZE)
        self.b = ctypes.create_string_buffer(SIZE)
        self.tag = uuid.uuid4().hex
        for buffer in (self.a, self.b):
            assert store.register_buffer(ctypes.addressof(buffer), SIZE) == 0

    def close(self):
        for buffer in (self.a, self.b):
            assert self.store.unregister_buffer(ctypes.addressof(buffer)) == 0

    def key(self, name):
        return f"{self.tag}/{name}"

    def put(self, names, rows, sizes):
        base = ctypes.addressof(self.a)
        return self.store.batch_put_from_multi_buffers(
            [self.key(n) for n in names], [[base + o for o in row] for row in rows], sizes
        )

    def get(self, names, rows, sizes):
        base = ctypes.addressof(self.b)
        return self.store.batch_get_into_multi_buffers(
            [self.key(n) for n in names], [[base + o for o in row] for row in rows], sizes
        )

    def exist(self, *names):
        return self.store.batch_is_exist([self.key(n) for n in names])


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.store)])
def rig(request):
    store = FakeStore() if request.param == "fake" else request.getfixturevalue("live_store")
    rig = Rig(store)
    yield rig
    rig.close()


def test_put_then_get_the_same_bytes(rig):
    assert rig.put(["x", "y"], [[0, 8192], [100]], [[4096, 4096], [50]]) == [0, 0]
    assert rig.exist("x", "nope", "y", "x") == [1, 0, 1, 1]
    assert rig.get(["x", "nope", "y"], [[0], [9000], [10000]], [[8192], [10], [50]]) == [
        8192,
        -704,
        50,
    ]
    assert rig.b.raw[:8192] == rig.a.raw[:4096] + rig.a.raw[8192:12288]
    assert rig.b.raw[10000:10050] == rig.a.raw[100:150]
    assert rig.b.raw[8192:10000] == bytes(1808)


def test_parts_may_be_regrouped(rig):
    assert rig.put(["x"], [[0, 4096]], [[4096, 4096]]) == [0]
    assert rig.get(["x"], [[30000, 0, 10000]], [[2048, 2048, 4096]]) == [8192]
    got = rig.b.raw
    assert got[30000:32048] + got[:2048] + got[10000:14096] == rig.a.raw[:8192]


def test_an_existing_key_is_a_success_and_keeps_its_value(rig):
    assert rig.put(["x"], [[0]], [[100]]) == [0]
    assert rig.put(["x", "x", "z"], [[500], [600], [700]], [[100], [90], [10]]) == [0, 0, 0]
    assert rig.put(["d", "d"], [[0], [1]], [[10], [10]]) == [0, 0]
    assert rig.get(["x", "d"], [[0], [200]], [[100], [10]]) == [100, 10]
    assert rig.b.raw[:100] == rig.a.raw[:100]
    assert rig.b.raw[200:210] == rig.a.raw[:10]


def test_sizes_that_hold_nothing(rig):
    assert rig.put(["zero", "ok"], [[0], [0]], [[0], [10]]) == [-600, 0]
    assert rig.put(["none", "ok2"], [[], [0]], [[], [10]]) == [-600, 0]
    assert rig.put(["part"], [[0, 0]], [[0, 4096]]) == [0]
    assert rig.store.get_size(rig.key("part")) == 4096
    assert rig.exist("zero", "ok", "none", "ok2", "part") == [0, 1, 0, 1, 1]


def test_shapes_that_do_not_match(rig):
    assert rig.put(["p", "q"], [[0]], [[10], [10]]) == [-600, -600]
    assert rig.put(["p"], [[0], [0]], [[10]]) == [-600]
    assert rig.put(["p", "q"], [[0, 0], [0]], [[10], [10]]) == [-600, -600]
    assert rig.exist("p", "q") == [0, 0]
    assert rig.put(["p"], [[0]], [[10]]) == [0]
    assert rig.get(["p", "q"], [[0]], [[10], [10]]) == [-600, -600]


def test_empty_batches_and_empty_keys(rig):
    store = rig.store
    assert store.batch_is_exist([]) == []
    assert store.batch_put_from_multi_buffers([], [], []) == []
    assert store.batch_get_into_multi_buffers([], [], []) == []
    address = ctypes.addressof(rig.a)
    keys = ["", rig.key("k")]
    assert store.batch_put_from_multi_buffers(keys, [[address]] * 2, [[10]] * 2) == [-600, 0]
    assert store.batch_is_exist([""]) == [0]


@pytest.mark.parametrize(
    ("sizes", "code"),
    [([4096], -600), ([8193], -800), ([0], -600), ([], -600), ([8192, 0], 8192)],
)
def test_a_buffer_of_another_size(rig, sizes, code):
    assert rig.put(["x", "y"], [[0], [0]], [[8192], [100]]) == [0, 0]
    rows = [[10000 * i for i in range(len(sizes))], [50000]]
    assert rig.get(["x", "y"], rows, [sizes, [100]]) == [code, 100]


def test_registration(rig):
    store, base = rig.store, ctypes.addressof(rig.a)
    assert store.register_buffer(base, SIZE) == -600  # the same
    assert store.register_buffer(base + 8, 8) == -600  # inside
    assert store.register_buffer(base + SIZE - 8, 64) == -600  # over the end
    assert store.register_buffer(base - 8, 16) == -600  # over the start
    assert store.register_buffer(base - 8, SIZE + 16) == -600  # around
    assert store.register_buffer(base + SIZE // 2, 0) == -600
    assert store.register_buffer(0, 8) == -600
    assert store.unregister_buffer(base + 8) == -600
    assert store.unregister_buffer(0) == -600
    assert store.unregister_buffer(base) == 0
    assert store.unregister_buffer(base) == -600
    assert store.register_buffer(base, SIZE) == 0


@pytest.mark.parametrize("number", [-1, 1 << 64, 1.0, None, "1"])
def test_numbers_that_are_no_uint64(rig, number):
    store, base = rig.store, ctypes.addressof(rig.a)
    with pytest.raises(TypeError):
        store.register_buffer(number, 8)
    with pytest.raises(TypeError):
        store.batch_put_from_multi_buffers(["k"], [[number]], [[8]])
    with pytest.raises(TypeError):
        store.batch_put_from_multi_buffers(["k"], [[base]], [[number]])
    with pytest.raises(TypeError):
        store.batch_get_into_multi_buffers(["k"], [[number]], [[8]])


@pytest.mark.parametrize("keys", [["\ud800"], [1], [None], "ab"])
def test_keys_that_are_no_text(rig, keys):
    with pytest.raises(TypeError):
        rig.store.batch_is_exist(keys)
    with pytest.raises(TypeError):
        rig.store.batch_put_from_multi_buffers(keys, [[1]] * len(keys), [[1]] * len(keys))


@pytest.mark.parametrize(
    "name", ["a/b", "a b", "line\nbreak", "nul\0", "\N{SNOWMAN}", "漢字", "x" * 5000]
)
def test_any_other_text_is_a_key(rig, name):
    assert rig.put([name], [[0]], [[10]]) == [0]
    assert rig.exist(name, name + "2") == [1, 0]
    assert rig.get([name], [[0]], [[10]]) == [10]


def test_removing_everything(rig):
    assert rig.put(["x"], [[0]], [[10]]) == [0]
    assert rig.store.remove_all(True) >= 1
    assert rig.exist("x") == [0]


# The fake alone: what only a script can do.


@pytest.fixture
def fake():
    rig = Rig(FakeStore())
    yield rig
    rig.close()


def test_unregistered_memory_is_refused():
    other = ctypes.create_string_buffer(64)
    rig = Rig(FakeStore())
    row = [[ctypes.addressof(other)]]
    with pytest.raises(UnregisteredMemory):
        rig.store.batch_put_from_multi_buffers(["k"], row, [[64]])
    end = ctypes.addressof(rig.a) + SIZE - 8
    with pytest.raises(UnregisteredMemory):
        rig.store.batch_put_from_multi_buffers(["k"], [[end]], [[16]])
    loose = FakeStore(require_registration=False)
    assert loose.batch_put_from_multi_buffers(["k"], row, [[64]]) == [0]


def test_a_full_pool_refuses_until_something_is_evicted():
    rig = Rig(FakeStore(capacity=250))
    assert rig.put(["a", "b", "c"], [[0]] * 3, [[100]] * 3) == [0, 0, -200]
    assert rig.put(["big"], [[0]], [[251]]) == [-200]
    rig.store.evict([rig.key("a")])
    assert rig.put(["c"], [[0]], [[100]]) == [0]
    assert rig.exist("a", "b", "c") == [0, 1, 1]


def test_two_clients_share_a_pool(fake):
    other = Rig(fake.store.client())
    assert fake.put(["x"], [[0]], [[10]]) == [0]
    assert other.store.batch_is_exist([fake.key("x")]) == [1]
    assert other.store.counts == {EXIST: 1, fake_store.REGISTER: 2}


def test_scripted_codes_by_key_and_by_call(fake):
    fake.store.fail(PUT, -800, keys=[fake.key("y")], times=1)
    assert fake.put(["x", "y"], [[0], [0]], [[10], [10]]) == [0, -800]
    assert fake.exist("x", "y") == [1, 0]
    assert fake.put(["y"], [[0]], [[10]]) == [0]
    fake.store.fail(GET, -707, index=1)
    assert fake.get(["x"], [[0]], [[10]]) == [10]
    assert fake.get(["x", "y"], [[0], [0]], [[10], [10]]) == [-707, -707]
    assert fake.get(["x"], [[0]], [[10]]) == [10]


def test_scripted_exceptions_and_answers(fake):
    fake.store.fail(EXIST, RuntimeError("gone"), index=0)
    with pytest.raises(RuntimeError, match="gone"):
        fake.exist("x")
    fake.store.short_answer(EXIST, index=1)
    assert fake.exist("x", "y") == [0]
    fake.store.fail(EXIST, [True, 2], index=2, whole=True)
    assert fake.exist("x", "y") == [True, 2]
    fake.store.fail(fake_store.REGISTER, -600, times=1)
    assert fake.store.register_buffer(1 << 40, 8) == -600
    assert fake.store.register_buffer(1 << 40, 8) == 0


def test_hooks_run_before_each_call(fake):
    def racing_writer(store, call, keys):
        if call == EXIST:
            store.pool[fake.key("y")] = b"1234"
        else:
            store.evict([fake.key("x")])

    assert fake.put(["x"], [[0]], [[10]]) == [0]
    fake.store.hooks.append(racing_writer)
    assert fake.exist("x", "y") == [1, 1]
    assert fake.get(["x", "y"], [[0], [0]], [[10], [4]]) == [-704, 4]


def test_a_dead_master(fake):
    fake.store.master_dead = True
    assert fake.exist("x", "y") == [-900, -900]
    assert fake.put(["x"], [[0]], [[10]]) == [-900]
    assert fake.get(["x"], [[0]], [[10]]) == [-900]
    assert fake.store.health_check() == 2


def test_the_log_counts(fake):
    fake.put(["x"], [[0]], [[10]])
    fake.exist("x", "y")
    fake.exist("x")
    assert fake.store.counts[EXIST] == 2
    assert [call.results for call in fake.store.calls(EXIST)] == [[1, 0], [1]]
    assert fake.store.keys_seen[fake.key("x")] == 3
    assert fake.store.calls(PUT)[0].sizes == [[10]]
