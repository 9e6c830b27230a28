"""Failures from public trackers that a key format can have; numbers as in the trackers' threads."""

import itertools
import warnings

import pytest

from kvmask.errors import KeyFormatError, KeyFormatWarning
from kvmask.hashing.chain import hash_tokens
from kvmask.keys import AscendKeys, LMCacheKeys, SglangKeys, StrictKeys, VllmKeys, store_namespace

HASHES = hash_tokens(range(320), 4, seed="0")


class TestB34AmbiguousJoins:
    """LMCache#4904, #3042: text parts joined by '@' without escapes."""

    def test_vllm_format_warns(self):
        with pytest.warns(KeyFormatWarning, match="`model` 'b@m' holds '@'"):
            one = VllmKeys("b@m", cache_prefix="a")
        with pytest.warns(KeyFormatWarning, match="`cache_prefix` 'a@b' holds '@'"):
            two = VllmKeys("m", cache_prefix="a@b")
        assert one.prefix == two.prefix == "a@b@m@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0"
        namespace = store_namespace(1, store_tp=4)
        with pytest.warns(KeyFormatWarning, match="holds '@'"):
            fake = VllmKeys(f"m{namespace}")
        assert fake.prefix == VllmKeys("m", namespace=namespace).prefix
        with pytest.warns(KeyFormatWarning, match="`model` '@@m' holds '@'"):
            VllmKeys("@@m")

    def test_lmcache_tags_warn(self):
        with pytest.warns(KeyFormatWarning, match="'@' or '%'"):
            one = LMCacheKeys("m", tags={"a%b": "c"})
        two = LMCacheKeys("m", tags={"a": "b%c"})
        assert one.key(b"h") == two.key(b"h") == "m@1@0@68@bfloat16@a%b%c"

    def test_strict_keys_differ(self):
        pairs = [
            (StrictKeys("b@m", namespace="a"), StrictKeys("m", namespace="a@b")),
            (StrictKeys("m@ns"), StrictKeys("m", namespace="ns")),
            (StrictKeys("@@m"), StrictKeys("m", namespace="@@")),
            (StrictKeys("m", tags={"a%b": "c"}), StrictKeys("m", tags={"a": "b%c"})),
        ]
        for one, two in pairs:
            assert one.prefix != two.prefix
            assert StrictKeys.parse(one.key(b"h")) == (one, b"h")
            assert StrictKeys.parse(two.key(b"h")) == (two, b"h")


class TestB35LastPartOfTheName:
    names = ("org1/llama", "org2/llama", "org1/llama/", "/models/org3/llama//")

    @pytest.mark.parametrize("cls", [VllmKeys, AscendKeys])
    def test_engines_share_keys_and_warn(self, cls):
        prefixes = set()
        for name in self.names:
            with pytest.warns(KeyFormatWarning, match="is keyed as 'llama'"):
                prefixes.add(cls(name).prefix)
        assert prefixes == {cls("llama").prefix}
        assert cls("llama").prefix.startswith("llama@")

    def test_strict_keys_differ(self):
        assert len({StrictKeys(name).prefix for name in self.names}) == 4

    @pytest.mark.parametrize("cls", [VllmKeys, AscendKeys, StrictKeys])
    @pytest.mark.parametrize("name", ["", "/", "//"])
    def test_empty_names(self, cls, name):
        with pytest.raises(KeyFormatError, match="`model` must name a model"):
            cls(name)


class TestB36EveryRankInTheKey:
    """sglang#15175, #24794: the pipeline rank was missing."""

    def test_tp8_pp2(self):
        ranks = list(itertools.product(range(8), range(2)))
        assert len({VllmKeys("m", tp_rank=t, pp_rank=p).prefix for t, p in ranks}) == 16
        assert len({AscendKeys("m", t, pp_rank=p).prefix for t, p in ranks}) == 16
        assert len({StrictKeys("m", tp_rank=t, pp_rank=p).prefix for t, p in ranks}) == 16
        keys = {
            SglangKeys("m", t, p, 2, part=part).key(b"h" * 32) for t, p in ranks for part in "kv"
        }
        assert len(keys) == 32
        assert f"m_{'68' * 32}_7_1_v" in keys

    @pytest.mark.parametrize("cls", [VllmKeys, StrictKeys])
    def test_all_ranks(self, cls):
        values = (0, 1, 2, 10, 11)
        prefixes = [cls("m", *ranks).prefix for ranks in itertools.product(values, repeat=5)]
        assert len(set(prefixes)) == len(prefixes) == 3125


def test_b42_one_digest_per_key():
    """vllm#45969: a block of 256 over hash blocks of 4 has the last digest, not all 64."""
    schema = VllmKeys("m")
    assert schema.keys(HASHES, scale=64) == [f"{schema.prefix}@{HASHES[63].hex()}"]
    assert len(schema.keys(HASHES, scale=64)[0]) == len(schema.prefix) + 1 + 64
    assert schema.keys(HASHES, scale=4) == [
        f"{schema.prefix}@{HASHES[4 * k + 3].hex()}" for k in range(20)
    ]
    # 80 tokens, blocks of 64 over 16: the tail ends at hash 5 and is named by it alone.
    hashes = hash_tokens(range(80), 16, seed="0")
    assert schema.keys(hashes, scale=4) == [schema.key(hashes[3])]
    assert schema.keys(hashes, mask=[True], start=4) == [schema.key(hashes[4])]


def test_no_warning_where_nothing_is_ambiguous():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        VllmKeys("llama-3.1", cache_prefix="prod", namespace=store_namespace(1, store_tp=4))
        AscendKeys("llama-3.1")
        SglangKeys("llama-3.1", backend_tag="prod")
        LMCacheKeys("org/llama-3.1", tags={"user": "a%b"})
