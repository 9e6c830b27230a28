"""Digests and token containers that break their word, and copies of a hasher."""

import array
import copy
import pickle
import types

import numpy as np
import pytest

from kvmask import _core
from kvmask.errors import ArgumentError, HashInputError
from kvmask.hashing.chain import BlockHasher, hash_tokens

PARENT = bytes(range(32))


class TestDigestCalls:
    @pytest.mark.parametrize("encoding", [_core.ENCODING_PICKLE, _core.ENCODING_CBOR])
    @pytest.mark.parametrize(
        ("digest", "message"),
        [
            (lambda data: b"x" * 100_000, "from 1 to 255 bytes, got 100000"),
            (lambda data: b"x" * 256, "from 1 to 255 bytes, got 256"),
            (lambda data: b"", "from 1 to 255 bytes, got 0"),
            (lambda data: "x" * 32, "must return bytes, got str"),
            (lambda data: None, "must return bytes, got NoneType"),
            (lambda data: b"x" * (1 + len(data) % 7), "equally many bytes each time"),
        ],
    )
    def test_every_digest_is_checked(self, encoding, digest, message):
        with pytest.raises(HashInputError, match=message):
            _core.hash_chain([1] * 64 + [300] * 64, 16, encoding, digest, PARENT)

    def test_pages_too(self):
        with pytest.raises(HashInputError, match="got 0"):
            _core.hash_chain([1, 2], 1, _core.ENCODING_PAGES, lambda data: b"", b"")

    def test_what_fits_is_chained(self):
        for size in (1, 255):
            made = _core.hash_chain(
                [1, 2, 3], 1, _core.ENCODING_PICKLE, lambda data, n=size: data[-n:].rjust(n), PARENT
            )
            assert len(made) == 3 * size

    def test_arguments_of_the_chain(self):
        for encoding in (-1, 3, 99):
            with pytest.raises(ArgumentError, match="`encoding` must be one of"):
                _core.hash_chain([1], 1, encoding, lambda data: b"x", PARENT)
        for size in (1 << 31, 1 << 61, (1 << 63) - 1):
            with pytest.raises(ArgumentError, match="from 1 to 2147483647 tokens"):
                _core.hash_chain([1], size, _core.ENCODING_PICKLE, lambda data: b"x", PARENT)

        class Equal:  # to None, and to all else
            def __eq__(self, other):
                return True

            __hash__ = None

        with pytest.raises(ArgumentError, match="pages have no extra keys"):
            _core.hash_chain([1], 1, _core.ENCODING_PAGES, lambda data: b"x", b"", [Equal()])


class TestStrangeTokens:
    ROOM = np.arange(8, dtype=np.int64)

    @pytest.mark.parametrize(
        "change",
        [
            {"shape": (-5,)},
            {"shape": (1 << 70,)},
            {"shape": (1 << 62,)},
            {"shape": (2.0,)},
            {"shape": 8},
            {"shape": None},
            {"typestr": None},
            {"typestr": b"<i8"},
            {"data": None},
            {"data": ()},
            {"data": (0, False)},
            {"data": (-8, False)},
            {"data": (1 << 64, False)},
            {"data": ("x", False)},
            {"strides": (1 << 70,)},
            {"strides": (1 << 62,)},
            {"strides": (-(1 << 62),)},
            {"strides": ()},
            {"strides": (8, 8)},
            {"strides": 8},
            {"strides": ("8",)},
        ],
    )
    def test_an_interface_that_says_nonsense(self, change):
        interface = {**self.ROOM.__array_interface__, **change}
        for wrong in (interface, {k: v for k, v in interface.items() if k not in change}):
            if wrong is not interface and "strides" in change:
                continue  # optional
            with pytest.raises(HashInputError):
                hash_tokens(types.SimpleNamespace(__array_interface__=wrong), 4, seed="0")

    @pytest.mark.parametrize("wrong", [None, [], 5, "x"])
    def test_an_interface_of_another_type(self, wrong):
        with pytest.raises(HashInputError, match="must be a dict"):
            hash_tokens(types.SimpleNamespace(__array_interface__=wrong), 4, seed="0")

    def test_an_interface_that_is_right(self):
        for tokens in (self.ROOM, self.ROOM[::-1], self.ROOM[::3], self.ROOM[:0]):
            holder = types.SimpleNamespace(__array_interface__=tokens.__array_interface__)
            made = hash_tokens(holder, 2, seed="0")
            assert list(made) == list(hash_tokens(tokens.tolist(), 2, seed="0"))

    @pytest.mark.parametrize(
        ("address", "stride", "count"), [(0, 1, 4), (-1, 1, 4), (4096, 1, -4), (4096, 1 << 61, 4)]
    )
    def test_a_tensor_that_says_nonsense(self, address, stride, count):
        tensor = types.SimpleNamespace(
            dtype="torch.int64",
            dim=lambda: 1,
            device=types.SimpleNamespace(type="cpu"),
            data_ptr=lambda: address,
            stride=lambda: (stride,),
            shape=(count,),
        )
        with pytest.raises(HashInputError):
            hash_tokens(tensor, 4, seed="0")

    def test_a_sequence_is_as_long_as_it_says(self):
        class Endless:
            def __init__(self, length):
                self.length = length

            def __len__(self):
                return self.length

            def __getitem__(self, i):
                return 7

        assert list(hash_tokens(Endless(3), 3, seed="0")) == list(hash_tokens([7] * 3, 3, seed="0"))

        class Short(Endless):
            def __getitem__(self, i):
                return [7, 7][i]

        with pytest.raises(HashInputError, match="got 2 and 3"):
            hash_tokens(Short(3), 3, seed="0")

        class Broken(Endless):
            def __getitem__(self, i):
                raise KeyError(i)

        for wrong in (Broken(3), Endless(-1), Endless("x"), {0: 1}, range(1 << 70)):
            with pytest.raises(HashInputError):
                hash_tokens(wrong, 3, seed="0")

    def test_a_released_view(self):
        view = memoryview(array.array("q", [1, 2]))
        view.release()
        with pytest.raises(HashInputError, match="released"):
            hash_tokens(view, 1, seed="0")


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda h: pickle.loads(pickle.dumps(h))])
def test_a_copy_of_a_hasher_goes_on_by_itself(how):
    class Named(BlockHasher):
        pass

    for kind in (BlockHasher, Named):
        if kind is Named and how not in (copy.copy, copy.deepcopy):
            continue  # a local class has no pickle
        first = kind(4, seed="0")
        first.extend(range(6))
        second = how(first)
        assert type(second) is kind
        first.extend([6, 7, 8])
        second.extend([9, 9, 9, 9])
        assert (first.num_tokens, second.num_tokens) == (9, 10)
        assert first.hashes == list(hash_tokens(range(9), 4, seed="0"))
        assert second.hashes == list(hash_tokens([*range(6), 9, 9, 9, 9], 4, seed="0"))
