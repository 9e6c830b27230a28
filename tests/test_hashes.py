"""Token ids to block hashes: against pickle, cbor2, vLLM itself and recorded digests."""

import array
import hashlib
import os
import pickle
import random
import subprocess
import sys
import threading
import time
import types
from collections import UserList, deque
from pathlib import Path

import pytest
from golden_hashes import EDGES, GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmask import _core
from kvmask.errors import ArgumentError, HashInputError, MissingDependencyError
from kvmask.hashing import chain as hashes
from kvmask.hashing import digests as _digests
from kvmask.hashing.cbor import canonical_cbor
from kvmask.hashing.chain import ALGORITHMS, BlockHasher, digest_size, hash_tokens, start_hash
from kvmask.hashing.extra_keys import Medium, block_extra_keys

PARENT = bytes(range(32))
EDGE_SIZES = [n + d for n in (32749, 21833, 13100, 9357) for d in (-1, 0, 1)]

tokens = st.one_of(
    st.integers(0, 300),
    st.integers(0, 200_000),
    st.integers(0, 2**63 - 1),
    st.sampled_from(EDGES),
)
text = st.text(max_size=8)
scalars = st.one_of(st.none(), st.booleans(), st.integers(-(2**64), 2**64 - 1), text, st.binary())
extra_values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple)),
    max_leaves=8,
)


@pytest.fixture(autouse=True)
def no_hash_seed(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


def copy_of(value):
    """An equal object with another identity."""
    return "".join([value[:1], value[1:]])


def pickled(parent, block, extra):
    return pickle.dumps((parent, block, extra), protocol=5)


def digest_of(algorithm, data):
    if algorithm.startswith("sha256"):
        return hashlib.sha256(data).digest()
    return pytest.importorskip("xxhash").xxh3_128_digest(data)


def reference(algorithm, ids, block_size, parent, extras=None):
    """The definition, by pickle and cbor2: one serialised tuple and one digest per block."""
    out = []
    for i in range(len(ids) // block_size):
        block = tuple(ids[i * block_size : (i + 1) * block_size])
        extra = extras[i] if extras else None
        if algorithm.endswith("_cbor"):
            cbor2 = pytest.importorskip("cbor2")
            data = cbor2.dumps((parent, block, extra), canonical=True)
        else:
            data = pickled(parent, block, extra)
        parent = digest_of(algorithm, data)
        out.append(parent)
    return out


@pytest.mark.parametrize("algorithm", ALGORITHMS)
class TestDigests:
    def test_recorded(self, algorithm):
        golden = GOLDEN[algorithm]
        assert start_hash(algorithm, "0").hex() == golden["none"]
        for name, digest in golden.items():
            kind, *numbers = name.split()
            if kind == "chain48":
                got = hash_tokens(list(range(48)), int(numbers[0]), algorithm, seed="0")[-1]
            elif kind == "edges":
                got = hash_tokens(EDGES, len(EDGES), algorithm, parent=PARENT)[0]
            elif kind == "frame":
                n = int(numbers[0])
                token = 2**63 - 1 if numbers[1] == "2**63-1" else int(numbers[1])
                got = hash_tokens([token] * n, n, algorithm, parent=PARENT)[0]
            else:
                continue
            assert got.hex() == digest, name

    def test_recorded_extra_keys(self, algorithm):
        golden = GOLDEN[algorithm]
        adapter, image = copy_of("adapter"), copy_of("image")
        cases = {
            "same": (("lora", adapter, adapter),),
            "equal": (("lora", adapter, copy_of("adapter")),),
            "img same": (("mm", image, -3), ("mm", image, 5)),
            "img equal": (("mm", image, -3), ("mm", copy_of("image"), 5)),
            "all": (
                ("lora", "S", "/p"),
                ("mm", image, 0),
                ("cache_salt", "salt"),
                ("prompt_embeds", bytes(32)),
            ),
        }
        for name, extra in cases.items():
            got = hash_tokens(range(16), 16, algorithm, parent=PARENT, extra_keys=[extra])
            assert got[0].hex() == golden[name], name

    @given(ids=st.lists(tokens, max_size=40), block_size=st.integers(1, 9), parent=st.binary())
    def test_equals_the_definition(self, algorithm, ids, block_size, parent):
        parent = hashlib.sha256(parent).digest()
        got = hash_tokens(ids, block_size, algorithm, parent=parent)
        assert list(got) == reference(algorithm, ids, block_size, parent)

    @settings(max_examples=60)
    @given(data=st.data(), block_size=st.integers(1, 6), blocks=st.integers(1, 4))
    def test_extra_keys_equal_the_definition(self, algorithm, data, block_size, blocks):
        ids = data.draw(
            st.lists(tokens, min_size=block_size * blocks, max_size=block_size * blocks)
        )
        extra = st.one_of(st.none(), st.lists(extra_values, max_size=4).map(tuple))
        extras = data.draw(st.lists(extra, min_size=blocks, max_size=blocks))
        got = hash_tokens(ids, block_size, algorithm, parent=PARENT, extra_keys=extras)
        assert list(got) == reference(algorithm, ids, block_size, PARENT, extras)

    @pytest.mark.parametrize("block_size", [*EDGE_SIZES, 4096, 12288, 16384, 65521, 65535, 65536])
    def test_frame_edges(self, algorithm, block_size):
        rng = random.Random(block_size)
        for token in (7, 300, 70_000, 2**31, 2**63 - 1, None):
            ids = [
                rng.choice((rng.randrange(256), rng.randrange(2**17), rng.randrange(2**63)))
                if token is None
                else token
                for _ in range(block_size)
            ]
            got = hash_tokens(ids, block_size, algorithm, parent=PARENT)
            assert list(got) == reference(algorithm, ids, block_size, PARENT)

    @pytest.mark.parametrize("block_size", [1, 6_000, 6_500, 9357, 16384])
    def test_extra_keys_near_frame_edges(self, algorithm, block_size):
        ids = [2**40 + i for i in range(2 * block_size)]
        for size in (10, 60_000, 65_535, 70_000):
            extras = [(b"x" * size, "tail"), None]
            got = hash_tokens(ids, block_size, algorithm, parent=PARENT, extra_keys=extras)
            assert list(got) == reference(algorithm, ids, block_size, PARENT, extras)

    def test_continues_from_parent(self, algorithm):
        ids = list(range(1000))
        whole = hash_tokens(ids, 7, algorithm, seed="0")
        for cut in (1, 50, 100):
            rest = hash_tokens(ids[7 * cut :], 7, algorithm, parent=whole[cut - 1])
            assert list(rest) == whole[cut:]

    def test_digests_by_python_calls_are_equal(self, algorithm, monkeypatch):
        ids = list(range(5000))
        fast = hash_tokens(ids, 1, algorithm, seed="0")
        encoding, _, size = hashes._KINDS[algorithm]

        def python(data):
            return digest_of(algorithm, data)

        monkeypatch.setitem(hashes._KINDS, algorithm, (encoding, lambda: python, size))
        assert list(hash_tokens(ids, 1, algorithm, seed="0")) == list(fast)


def test_both_ways_to_sha256_agree():
    hashlib_file = getattr(pytest.importorskip("_hashlib"), "__file__", None)
    low = _core.Digest.sha256(hashlib_file)
    evp = _core.Digest.sha256(hashlib_file, low_level=False)
    if evp is None:
        pytest.skip("this interpreter's libcrypto exports nothing")
    assert evp.kind == "sha256-evp"
    for n in (0, 1, 55, 56, 64, 1000):
        assert evp(bytes(n)) == low(bytes(n)) == hashlib.sha256(bytes(n)).digest()
    ids = list(range(4000))
    pickle_ = _core.ENCODING_PICKLE
    assert _core.hash_chain(ids, 4, pickle_, evp, PARENT) == _core.hash_chain(
        ids, 4, pickle_, low, PARENT
    )


def test_a_library_without_the_function_is_refused(tmp_path):
    assert _core.Digest.sha256(str(tmp_path / "missing.so")) is None
    assert _core.Digest.sha256("libm.so.6") is None
    assert _core.Digest.xxh3_128("libm.so.6") is None
    with pytest.raises(TypeError, match="comes from"):
        _core.Digest()


def test_an_unknown_pickler_takes_the_slow_way(monkeypatch):
    ids = list(range(64))
    fast = hash_tokens(ids, 4, seed="0")
    monkeypatch.setattr(hashes, "_pickler_is_known", lambda: False)
    assert list(hash_tokens(ids, 4, seed="0")) == list(fast)


def test_the_pickler_of_this_python_is_known():
    assert hashes._pickler_is_known()


@pytest.mark.vllm
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_equals_vllm(algorithm, monkeypatch):
    utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    hashing = pytest.importorskip("vllm.utils.hashing")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    hash_fn = hashing.get_hash_fn_by_name(algorithm)
    utils.init_none_hash(hash_fn)
    assert start_hash(algorithm) == utils.NONE_HASH
    rng = random.Random(1)
    for block_size in [*range(1, 18), 64, 1000, *EDGE_SIZES, 12288, 16384]:
        high = rng.choice((200, 60_000, 150_000, 2**31 + 1, 2**63))
        ids = [rng.randrange(high) for _ in range(block_size * 3)]
        image = copy_of("image")
        extras = [
            rng.choice(
                (
                    None,
                    (("lora", "name", "/path"),),
                    (("mm", image, -1), ("mm", image, 2)),
                    (("cache_salt", "s"), ("prompt_embeds", bytes(32))),
                )
            )
            for _ in range(3)
        ]
        expected, parent = [], None
        for i in range(3):
            block = ids[i * block_size : (i + 1) * block_size]
            parent = utils.hash_block_tokens(hash_fn, parent, block, extras[i])
            expected.append(parent)
        assert list(hash_tokens(ids, block_size, algorithm, extra_keys=extras)) == expected


class TestTokenIds:
    ids = tuple(range(100, 165))

    def check(self, value):
        assert list(hash_tokens(value, 4)) == list(hash_tokens(self.ids, 4))

    def test_sequences(self):
        for make in (list, tuple, UserList, deque, lambda ids: range(ids[0], ids[-1] + 1)):
            self.check(make(self.ids))

    @pytest.mark.parametrize("code", ["i", "l", "q"])
    def test_arrays(self, code):
        flat = array.array(code, self.ids)
        self.check(flat)
        self.check(memoryview(flat))
        self.check(memoryview(array.array(code, list(self.ids[::-1])))[::-1])

    @pytest.mark.parametrize("kind", ["int32", "int64"])
    def test_numpy(self, kind):
        np = pytest.importorskip("numpy")
        flat = np.array(self.ids, dtype=kind)
        self.check(flat)
        flat.flags.writeable = False
        self.check(flat)
        spread = np.zeros((len(self.ids), 3), dtype=kind)
        spread[:, 1] = self.ids
        self.check(spread[:, 1])
        self.check(np.array(list(self.ids[::-1]), dtype=kind)[::-1])
        interface = types.SimpleNamespace(__array_interface__=spread[:, 1].__array_interface__)
        self.check(interface)
        for wrong in (spread, flat.astype("float32"), flat.astype("uint64"), flat.astype(">i4")):
            with pytest.raises(HashInputError):
                hash_tokens(wrong, 4)

    @pytest.mark.parametrize("kind", ["int32", "int64"])
    def test_torch(self, kind):
        torch = pytest.importorskip("torch")
        flat = torch.tensor(self.ids, dtype=getattr(torch, kind))
        self.check(flat)
        spread = torch.zeros((len(self.ids), 3), dtype=flat.dtype)
        spread[:, 2] = flat
        self.check(spread[:, 2])
        for wrong in (spread, flat.float(), flat.to(torch.int16), flat.to("meta")):
            with pytest.raises(HashInputError):
                hash_tokens(wrong, 4)

    @pytest.mark.parametrize(
        ("ids", "message"),
        [
            ([1, True, 2, 3], "`token_ids` must hold plain ints, got bool at index 1"),
            ([1, 2.0, 2, 3], "`token_ids` must hold plain ints, got float at index 1"),
            ([1, 2, "3", 3], "`token_ids` must hold plain ints, got str at index 2"),
            ([1, 2, 3, -1], r"from 0 to 2\*\*63 - 1, got -1 at index 3"),
            ([2**63], r"from 0 to 2\*\*63 - 1, got 9223372036854775808 at index 0"),
            (array.array("q", [0] * 9 + [-5]), "got -5 at index 9"),
            (array.array("i", [-1] * 8), "got -1 at index 0"),
            (array.array("f", [1.0] * 4), "int32 or int64, got format 'f'"),
            (array.array("Q", [1] * 4), "int32 or int64, got format 'Q'"),
            ("1234", "integers, got str"),
            (b"1234", "integers, got bytes"),
            (memoryview(b"1234"), "int32 or int64, got format 'B'"),
            (iter([1, 2, 3, 4]), "sequence, an array or a tensor, got list_iterator"),
            (4, "sequence, an array or a tensor, got int"),
            (None, "sequence, an array or a tensor, got NoneType"),
        ],
    )
    def test_refused(self, ids, message):
        with pytest.raises(HashInputError, match=message):
            hash_tokens(ids, 1)

    def test_numpy_scalars_in_a_list_are_refused(self):
        np = pytest.importorskip("numpy")
        text = r"plain ints, got int64 at index 0: give the array, or its `tolist\(\)`"
        with pytest.raises(HashInputError, match=text):
            hash_tokens([np.int64(1)] * 4, 4)

    def test_start(self):
        ids = list(range(50))
        for make in (list, tuple):
            for start in (0, 7, 50):
                tokens = _core.TokenIds(make(ids), start)
                assert tokens.take(0, len(tokens)) == tuple(ids[start:])
        with pytest.raises(HashInputError, match="got bool at index 3"):
            _core.TokenIds([0, 1, 2, True], 2)
        for start in (-1, 51):
            with pytest.raises(ArgumentError, match=f"from 0 to 50, got {start}"):
                _core.TokenIds(ids, start)
        with pytest.raises(ArgumentError, match="must be 0 for a array, got 1"):
            _core.TokenIds(array.array("q", ids), 1)

    def test_split_digests(self):
        assert _core.split_digests(b"abcdef", 2) == [b"ab", b"cd", b"ef"]
        assert _core.split_digests(b"", 2) == []

    def test_only_full_blocks(self):
        assert len(hash_tokens([1, 2, 3], 4)) == 0
        assert len(hash_tokens([], 4)) == 0
        assert len(hash_tokens([1] * 11, 4)) == 2


class TestArguments:
    def test_default_seed(self, monkeypatch):
        default = hash_tokens(range(16))
        assert list(default) == list(hash_tokens(range(16), seed="vllm-none-hash"))
        monkeypatch.setenv("PYTHONHASHSEED", "0")
        assert list(hash_tokens(range(16))) == list(hash_tokens(range(16), seed="0"))
        assert list(hash_tokens(range(16))) != list(default)

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_start_hash_by_release(self, algorithm, monkeypatch):
        for release in ("0.24", "0.28.0", "0.31"):
            with pytest.raises(HashInputError, match="random unless PYTHONHASHSEED"):
                start_hash(algorithm, release=release)
        if algorithm.startswith("xxhash"):
            with pytest.raises(HashInputError, match="random unless PYTHONHASHSEED"):
                hash_tokens(range(16), algorithm=algorithm)
        monkeypatch.setenv("PYTHONHASHSEED", "0")
        for release in ("0.24", "0.28.0", "0.32", "0.33.1"):
            assert start_hash(algorithm, release=release).hex() == GOLDEN[algorithm]["none"]

    def test_two_processes_with_other_hash_seeds_agree(self):
        code = (
            "import kvmask.hashing.chain as k; print(k.hash_tokens(range(64), seed='x')[3].hex())"
        )
        # The tested package first: benches put the sources' folder before it.
        paths = [str(Path(_core.__file__).parent.parent), *(p for p in sys.path if p)]
        seen = set()
        for seed in ("1", "2"):
            done = subprocess.run(
                [sys.executable, "-c", code],
                env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(paths)},
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            )
            seen.add(done.stdout)
        assert len(seen) == 1

    @pytest.mark.parametrize("parent", [bytearray(PARENT), memoryview(PARENT)])
    def test_parent_as_buffer(self, parent):
        assert list(hash_tokens(range(16), parent=parent)) == list(
            hash_tokens(range(16), parent=PARENT)
        )

    @pytest.mark.parametrize(
        ("kwargs", "error", "message"),
        [
            ({"algorithm": "md5"}, ArgumentError, "`algorithm` must be one of sha256, .*got 'md5'"),
            ({"algorithm": []}, ArgumentError, "`algorithm` must be one of"),
            ({"block_size": 0}, ArgumentError, "`block_size` must be from 1 to .*got 0"),
            ({"block_size": 2**31}, ArgumentError, "`block_size` must be from 1 to"),
            ({"block_size": 1.5}, TypeError, "`block_size` must be an integer, got float"),
            ({"seed": b"x"}, HashInputError, "`seed` must be text, got bytes"),
            ({"seed": "x", "parent": PARENT}, ArgumentError, "exclude each other"),
            ({"parent": b""}, HashInputError, "16 or 32 bytes, got 0"),
            ({"parent": bytes(31)}, HashInputError, "16 or 32 bytes, got 31"),
            ({"parent": "x"}, HashInputError, "bytes-like, got str"),
            ({"extra_keys": [None, None]}, ArgumentError, "per full block, got 2 and 1"),
            ({"extra_keys": []}, ArgumentError, "per full block, got 0 and 1"),
            (
                {"extra_keys": [["x"]]},
                HashInputError,
                "or None per block, got list for block 0",
            ),
            ({"extra_keys": [(lambda: 0,)]}, HashInputError, "picklable"),
            (
                {"extra_keys": [(1.5,)], "algorithm": "sha256_cbor"},
                HashInputError,
                "for a CBOR algorithm must be .* got float",
            ),
        ],
    )
    def test_refused(self, kwargs, error, message):
        with pytest.raises(error, match=message):
            hash_tokens(range(16), **{"block_size": 16, **kwargs})

    def test_parent_that_is_also_an_extra_key(self):
        """Pickle then writes a reference instead of the bytes."""
        extras = [(PARENT, "x"), None, ("y", PARENT)]
        got = hash_tokens(range(12), 4, parent=PARENT, extra_keys=extras)
        assert list(got) == reference("sha256", range(12), 4, PARENT, extras)
        apart = hash_tokens(range(12), 4, parent=bytearray(PARENT), extra_keys=extras)
        assert apart[0] != got[0]

    def test_missing_xxhash(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "xxhash", None)
        _digests.xxh3_128.cache_clear()
        try:
            with pytest.raises(MissingDependencyError, match="pip install xxhash"):
                hash_tokens(range(16), algorithm="xxhash", seed="0")
        finally:
            _digests.xxh3_128.cache_clear()

    def test_digest_size(self):
        assert [digest_size(a) for a in ALGORITHMS] == [32, 32, 16, 16]
        assert hash_tokens(range(16)).digest_size == 32

    def test_serialise_block_refuses(self):
        with pytest.raises(ArgumentError, match="from 1 to 255 bytes, got 256"):
            _core.serialise_block(_core.ENCODING_CBOR, bytes(256), [1])
        with pytest.raises(
            ArgumentError, match="a block must have from 1 to 2147483647 tokens, got 0"
        ):
            _core.serialise_block(_core.ENCODING_CBOR, PARENT, [])
        with pytest.raises(HashInputError, match="first frame"):
            _core.serialise_block(_core.ENCODING_PICKLE, PARENT, [1] * 7000, b"N")


@pytest.mark.parametrize(
    "n", [64, _core.HASH_GIL_MIN_TOKENS - 1, _core.HASH_GIL_MIN_TOKENS, 300_000]
)
def test_threads(n):
    """The same digests from several threads at once, on both sides of the GIL threshold."""
    flat = array.array("q", (i * 7919 % 150_000 for i in range(n)))
    expected = hash_tokens(flat, 16).tobytes()
    failures = []

    def work():
        for value in (flat, flat.tolist()):
            if hash_tokens(value, 16).tobytes() != expected:
                failures.append(type(value))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


@pytest.mark.parametrize("kind", [array.array, list])
def test_long_call_lets_other_threads_run(kind):
    """With forced switches off, another thread runs during a call only if the call allows it."""
    flat = array.array("q", range(1 << 20))
    value = flat if kind is array.array else flat.tolist()
    state, seen = "before", []

    def watch():
        while state != "after":
            seen.append(state)
            time.sleep(0)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=watch)
    thread.start()
    sys.setswitchinterval(1000)
    try:
        state = "during"
        hash_tokens(value, 4)
        state = "after"
    finally:
        state = "after"
        sys.setswitchinterval(interval)
        thread.join(60)
    assert "during" in seen


class TestBlockHasher:
    @given(
        parts=st.lists(st.lists(st.integers(0, 150_000), max_size=20), max_size=8),
        block_size=st.integers(1, 7),
        flat=st.booleans(),
    )
    def test_equals_one_call(self, parts, block_size, flat):
        hasher = BlockHasher(block_size, seed="0")
        new = []
        for part in parts:
            new += hasher.extend(array.array("i", part) if flat else part)
        whole = [token for part in parts for token in part]
        assert hasher.hashes == new == list(hash_tokens(whole, block_size, seed="0"))
        assert hasher.num_tokens == len(whole)

    def test_extra_keys(self):
        ids = list(range(40))
        extras = [(("mm", "a", i),) if i % 2 else None for i in range(10)]
        whole = hash_tokens(ids, 4, parent=PARENT, extra_keys=extras)
        hasher = BlockHasher(4, parent=PARENT)
        hasher.extend(ids[:6], extras[:1])
        hasher.extend(ids[6:7], [])
        hasher.extend(ids[7:23], extras[1:5])
        hasher.extend(ids[23:], extras[5:])
        assert hasher.hashes == list(whole)

    def test_an_error_changes_nothing(self):
        hasher = BlockHasher(4, seed="0")
        hasher.extend([1, 2, 3, 4, 5, 6])
        for wrong in ([7, True], [7, 8, 9, 10, -1], array.array("q", [7, -8]), [7, 8, 9, 2.0]):
            with pytest.raises(HashInputError):
                hasher.extend(wrong)
        with pytest.raises(ArgumentError, match="per full block, got 1 and 0"):
            hasher.extend([7], [None])
        with pytest.raises(ArgumentError, match="per full block, got 0 and 1"):
            hasher.extend([7, 8], [])
        assert hasher.num_tokens == 6
        hasher.extend([7, 8])
        assert hasher.hashes == list(hash_tokens(range(1, 9), 4, seed="0"))

    def test_seed_and_parent(self):
        with pytest.raises(ArgumentError, match="exclude each other"):
            BlockHasher(4, seed="0", parent=PARENT)


class TestCbor:
    @given(extra_values)
    def test_equals_cbor2(self, value):
        cbor2 = pytest.importorskip("cbor2")
        assert canonical_cbor(value) == cbor2.dumps(value, canonical=True)

    @pytest.mark.parametrize(
        ("value", "encoded"),
        # RFC 8949, appendix A
        [
            (23, "17"),
            (24, "1818"),
            (1000, "1903e8"),
            (1000000, "1a000f4240"),
            (18446744073709551615, "1bffffffffffffffff"),
            (-1, "20"),
            (-1000, "3903e7"),
            (b"\1\2\3\4", "4401020304"),
            ("ü", "62c3bc"),
            ([1, [2, 3], [4, 5]], "8301820203820405"),
            (list(range(1, 26)), "98190102030405060708090a0b0c0d0e0f101112131415161718181819"),
            (False, "f4"),
            (True, "f5"),
            (None, "f6"),
        ],
    )
    def test_examples(self, value, encoded):
        assert canonical_cbor(value).hex() == encoded

    @pytest.mark.parametrize("value", [1.5, {}, {1}, 2**64, -(2**64) - 1, "\ud800", range(2)])
    def test_refused(self, value):
        with pytest.raises(HashInputError):
            canonical_cbor((value,))

    def test_endless_nesting(self):
        loop: list = []
        loop.append(loop)
        with pytest.raises(HashInputError, match="nested deeper"):
            canonical_cbor(loop)


class TestExtraKeys:
    def test_forms(self):
        kwargs = {"adapter": ("S", "/p"), "media": [Medium("img", 3, 6)], "cache_salt": "salt"}
        assert block_extra_keys(3, 4, prompt_embeds=[b"0", b"1", b"2"], **kwargs) == [
            (
                ("lora", "S", "/p"),
                ("mm", "img", 3),
                ("cache_salt", "salt"),
                ("prompt_embeds", b"0"),
            ),
            (("lora", "S", "/p"), ("mm", "img", -1), ("prompt_embeds", b"1")),
            (("lora", "S", "/p"), ("mm", "img", -5), ("prompt_embeds", b"2")),
        ]
        for release in ("0.24", "0.28.1"):
            assert block_extra_keys(3, 4, release=release, **kwargs) == [
                ("S", ("img", 3), "salt"),
                ("S", ("img", -1)),
                ("S", ("img", -5)),
            ]

    def test_nothing(self):
        assert block_extra_keys(2) == [None, None]
        assert block_extra_keys(2, cache_salt="") == [None, None]
        assert block_extra_keys(1, 4, cache_salt="s", first_block=1) == [None]

    def test_refused(self):
        with pytest.raises(
            HashInputError, match="`media` must be sorted by offset, got 2 before 0"
        ):
            block_extra_keys(2, 4, media=[("a", 2, 3), ("b", 0, 1)])
        for bad in (("a", 0), "abc", 5):
            with pytest.raises(TypeError, match="`media` must hold"):
                block_extra_keys(2, 4, media=[bad])
        for bad in (-1, 1 << 62):
            with pytest.raises(ArgumentError, match="`media offset` must be from 0 to"):
                block_extra_keys(2, 4, media=[("a", bad, 1)])
        with pytest.raises(TypeError, match="`adapter` must be"):
            block_extra_keys(2, 4, adapter="ab")
        for blocks, first in ((1 << 62, 0), (1 << 32, 0), (1, 1 << 28), (1 << 28, 1)):
            with pytest.raises(ArgumentError, match="`num_blocks` must be"):
                block_extra_keys(blocks, 16, first_block=first)
        with pytest.raises(ArgumentError, match="one digest per block, got 1 and 2"):
            block_extra_keys(2, 4, prompt_embeds=[b""])
        for release in ("0.30", "0.23", "x", "1"):
            with pytest.raises(ArgumentError, match="`release` must be"):
                block_extra_keys(1, release=release)

    @given(data=st.data(), first=st.integers(0, 3))
    def test_media_touch_their_blocks(self, data, first):
        media, at = [], 0
        for gap, length in data.draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)))):
            media.append(Medium(f"m{len(media)}", at + gap, length))
            at += gap + length
        keys = block_extra_keys(8, 4, media=media, first_block=first)
        for i, extra in enumerate(keys):
            start = (first + i) * 4
            touching = [
                ("mm", m.identifier, m.offset - start)
                for m in media
                if m.offset < start + 4 and start < m.offset + m.length
            ]
            assert list(extra or ()) == touching
