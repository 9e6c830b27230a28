"""Failures from public trackers that a block hash can have; numbers as in the trackers' threads."""

import array
from typing import ClassVar

import pytest
from golden_hashes import GOLDEN

from kvmask import _core
from kvmask.errors import KeyFormatWarning
from kvmask.hashing.chain import BlockHasher, hash_tokens
from kvmask.hashing.extra_keys import block_extra_keys

SEED = "vllm-none-hash"
PARENT = bytes(range(32))


def first_hash(algorithm, extra):
    return hash_tokens(range(16), 16, algorithm, seed=SEED, extra_keys=[extra])[0][:8].hex()


class TestB39AdapterAndSalt:
    """vllm#44701, #30931, #44250; dynamo#8197. Digests observed on vLLM 0.32.0."""

    def test_tagged(self):
        plain, salt, adapter = (
            block_extra_keys(1),
            block_extra_keys(1, cache_salt="S"),
            block_extra_keys(1, adapter=("S", "/p")),
        )
        got = [first_hash("sha256", keys[0]) for keys in (plain, salt, adapter)]
        assert got == ["fe8fa5dda3210d0c", "33c57aa3ed5952eb", "06318ddbd3b343bf"]
        got = [first_hash("sha256_cbor", keys[0]) for keys in (plain, salt, adapter)]
        assert got == ["dc918a88b139e5af", "db3c485d19686b9a", "456d1e081382259f"]

    def test_bare_form_cannot_tell_them_apart(self):
        salt = block_extra_keys(1, cache_salt="S", release="0.28")[0]
        adapter = block_extra_keys(1, adapter=("S", "/p"), release="0.28")[0]
        assert salt == adapter == ("S",)
        assert first_hash("sha256", salt) == "8b729536d360415e"
        assert first_hash("sha256_cbor", salt) == "ceb7d4dfcaf3f9d9"

    def test_adapters_of_one_name(self):
        one, two = (block_extra_keys(1, adapter=("S", path))[0] for path in ("/p", "/q"))
        assert first_hash("sha256", one) != first_hash("sha256", two)

    def test_salt_is_in_the_first_block_only(self):
        assert block_extra_keys(3, cache_salt="S") == [(("cache_salt", "S"),), None, None]
        assert block_extra_keys(3, cache_salt="S", first_block=1) == [None] * 3


class TestB41Pickle:
    """Mooncake#3232, vllm#20511: a pickle written by hand."""

    @pytest.mark.parametrize(
        ("block_size", "token"), [(32749, 7), (21833, 300), (13100, 70_000), (9357, 2**31)]
    )
    def test_second_frame(self, block_size, token):
        parts = [
            _core.serialise_block(_core.ENCODING_PICKLE, PARENT, [token] * n)
            for n in (block_size - 1, block_size)
        ]
        # None opens a frame of its own: FRAME 4, None, TUPLE3, MEMOIZE, STOP.
        tail = bytes.fromhex("95 0400000000000000 4e 87 94 2e")
        assert [part.endswith(tail) for part in parts] == [False, True]
        for n in (block_size - 1, block_size):
            got = hash_tokens([token] * n, n, parent=PARENT)[0].hex()
            assert got == GOLDEN["sha256"][f"frame {n} {token}"]

    def test_one_string_or_two(self):
        name = "".join(["ad", "apter"])
        copy = "".join(["ad", "apter"])
        for algorithm, differ in (("sha256", True), ("sha256_cbor", False)):
            one, two = (
                hash_tokens(
                    range(16), 16, algorithm, parent=PARENT, extra_keys=[(("lora", name, other),)]
                )[0].hex()
                for other in (name, copy)
            )
            assert (one, two) == (GOLDEN[algorithm]["same"], GOLDEN[algorithm]["equal"])
            assert (one != two) is differ

    def test_one_image_twice_in_a_block(self):
        image = "".join(["im", "age"])
        for algorithm in ("sha256", "sha256_cbor"):
            keys = block_extra_keys(1, 16, media=[(image, 0, 4), (image, 8, 4)])
            got = hash_tokens(range(16), 16, algorithm, parent=PARENT, extra_keys=keys)
            apart = block_extra_keys(1, 16, media=[(image, 0, 4), ("".join(["im", "age"]), 8, 4)])
            other = hash_tokens(range(16), 16, algorithm, parent=PARENT, extra_keys=apart)
            assert (got[0] == other[0]) is (algorithm == "sha256_cbor")

    def test_parent_is_bytes_whatever_holds_it(self):
        expected = list(hash_tokens(range(16), parent=PARENT))
        for parent in (bytearray(PARENT), memoryview(PARENT), array.array("B", PARENT)):
            assert list(hash_tokens(range(16), parent=parent)) == expected


def test_b42_last_sub_hash_names_a_block():
    """vllm#45969: the hash half. One digest per hash block, chained, so that the last one of a
    block covers it; blocks of 64 over hash blocks of 16, and a partial tail of 16."""
    h = hash_tokens(range(80), 16, seed=SEED)
    assert [len(digest) for digest in h] == [32] * 5
    other = hash_tokens([*range(15), 99, *range(16, 80)], 16, seed=SEED)
    assert all(a != b for a, b in zip(h, other, strict=True))
    changed_later = hash_tokens([*range(64), *range(1000, 1016)], 16, seed=SEED)
    assert changed_later[3] == h[3]
    assert changed_later[4] != h[4]


class TestF11OverlappingMedia:
    """vllm#26334, #44543: audio within the range of a video, as vLLM 0.32.0 takes it."""

    MEDIA = (("vid", 4, 6), ("aud", 4, 6))
    VLLM: ClassVar = [None, (("mm", "vid", 0),), (("mm", "vid", -4), ("mm", "aud", -4)), None]
    ALL: ClassVar = [None, (("mm", "vid", 0), ("mm", "aud", 0)), VLLM[2], None]

    @staticmethod
    def grown(**kwargs):
        """Extra keys and digests of 16 tokens that come one by one."""
        hasher, extras = BlockHasher(4, seed=SEED), []
        for token in range(16):
            keys = None
            if token % 4 == 3:
                keys = block_extra_keys(1, 4, first_block=token // 4, **kwargs)
                extras += keys
            hasher.extend([token], keys)
        return extras, hasher.hashes

    def test_as_vllm_with_a_warning(self):
        with pytest.warns(KeyFormatWarning, match="`media` overlap") as seen:
            keys = block_extra_keys(4, 4, media=self.MEDIA)
        assert keys == self.VLLM
        assert seen[0].filename == __file__
        with pytest.warns(KeyFormatWarning):
            old = block_extra_keys(4, 4, media=self.MEDIA, release="0.28")
        assert old == [None, (("vid", 0),), (("vid", -4), ("aud", -4)), None]
        with pytest.warns(KeyFormatWarning):
            extras, digests = self.grown(media=self.MEDIA)
        assert extras == self.VLLM
        assert digests == list(hash_tokens(range(16), 4, seed=SEED, extra_keys=keys))

    def test_another_audio_shares_a_block_unless_strict(self):
        def digests(audio, **kwargs):
            media = (self.MEDIA[0], (audio, 4, 6))
            keys = block_extra_keys(4, 4, media=media, **kwargs)
            return list(hash_tokens(range(16), 4, seed=SEED, extra_keys=keys))

        with pytest.warns(KeyFormatWarning):
            one, two = digests("aud"), digests("other")
        assert [a == b for a, b in zip(one, two, strict=True)] == [True, True, False, False]
        strict, other = digests("aud", strict=True), digests("other", strict=True)
        assert [a == b for a, b in zip(strict, other, strict=True)] == [True, False, False, False]
        assert [a == b for a, b in zip(one, strict, strict=True)] == [True, False, False, False]

    def test_strict_whole_and_grown(self):
        keys = block_extra_keys(4, 4, media=self.MEDIA, strict=True)
        assert keys == self.ALL
        extras, digests = self.grown(media=self.MEDIA, strict=True)
        assert extras == self.ALL
        assert digests == list(hash_tokens(range(16), 4, seed=SEED, extra_keys=keys))

    def test_strict_is_no_other_where_none_overlap(self):
        media = [("a", 1, 3), ("b", 4, 9), ("c", 13, 1)]
        assert block_extra_keys(5, 4, media=media, strict=True) == block_extra_keys(
            5, 4, media=media
        )

    def test_the_one_that_starts_last_ends_first(self):
        """vLLM looks at the last medium's end before all else."""
        media = [("vid", 0, 12), ("aud", 2, 2)]
        with pytest.warns(KeyFormatWarning):
            keys = block_extra_keys(3, 4, media=media)
        assert keys == [(("mm", "vid", 0),), None, None]
        assert block_extra_keys(3, 4, media=media, strict=True) == [
            (("mm", "vid", 0), ("mm", "aud", 2)),
            (("mm", "vid", -4),),
            (("mm", "vid", -8),),
        ]
