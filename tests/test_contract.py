"""One contract: what it refuses, what its fingerprint holds, and what it gives to plans."""

import copy
import itertools
import logging
import os
import pickle
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")

from kvmask import (  # noqa: E402
    Bitset,
    BlockHashes,
    ChunkedLocal,
    FullAttention,
    KVLayout,
    Mamba,
    SlidingWindow,
    _core,
    hash_tokens,
)
from kvmask.contract import BoundContract, Contract  # noqa: E402
from kvmask.errors import (  # noqa: E402
    AlignmentError,
    ArgumentError,
    HashInputError,
    KeyFormatWarning,
)
from kvmask.hashing.origin import DigestOrigin  # noqa: E402
from kvmask.hashing.settings import Hashing, start_digest  # noqa: E402
from kvmask.keys import (  # noqa: E402
    AscendKeys,
    LMCacheKeys,
    LMCacheObjectKeys,
    SglangKeys,
    StrictKeys,
    VllmKeys,
    store_namespace,
)
from kvmask.layout import head_shards  # noqa: E402
from kvmask.payload import PayloadFacts  # noqa: E402
from kvmask.ranks import RankGrid  # noqa: E402

HASHING = Hashing(seed="contract")
FULL, SWA = FullAttention(16), SlidingWindow(16, window=32)
BOTH = {"full": FULL, "swa": SWA}


def layout(dtype=np.float16, blocks=8, tensors=4, shape=(2, 16, 8)):
    arrays = [np.zeros((blocks, *shape), dtype) for _ in range(tensors)]
    return KVLayout.from_tensors(arrays, num_blocks=blocks)


def make(groups=None, keys=None, hashing=HASHING, hash_block_size=16, **more):
    return Contract(groups or BOTH, hash_block_size, keys or StrictKeys("m"), hashing, **more)


def prefixes(contract):
    return [[b.prefix for b in group.namespaces] for group in contract.scheme.groups]


# R1: two groups never share a key.


def test_groups_of_one_template_have_keys_of_their_own():
    contract = make()
    digest = contract.fingerprint
    assert prefixes(contract) == [
        [f"kvm1@m@@@{digest}@tp0@pcp0@dcp0@pp0@g0@"],
        [f"kvm1@m@@@{digest}@tp0@pcp0@dcp0@pp0@g1@"],
    ]


@pytest.mark.parametrize(
    "keys",
    [
        AscendKeys("m", release="0.19"),
        SglangKeys("m"),
        LMCacheKeys("m"),
        {"full": SglangKeys("m"), "swa": SglangKeys("m")},
        {"full": LMCacheKeys("m"), "swa": LMCacheKeys("m", dtype="bfloat16")},
    ],
)
def test_groups_that_would_share_keys_are_refused(keys):
    with pytest.raises(ArgumentError, match="groups 'full' and 'swa'"):
        make(keys=keys)


def test_groups_apart_by_their_templates():
    contract = make(keys={"full": SglangKeys("m"), "swa": SglangKeys("m", part="swa")})
    assert [g.namespaces[0].suffix for g in contract.scheme.groups] == ["_0_k", "_0_swa"]
    one = make({"full": FULL}, keys=AscendKeys("m", release="0.19"))
    assert len(one.scheme.groups[0].namespaces) == 1
    roles = {
        "full": AscendKeys("m"),
        "swa": AscendKeys("m", cache_role="state", cache_family="c4"),
    }
    assert prefixes(make(keys=roles)) == [
        ["m@dcp:0@head_or_tp_rank:0@pp_rank:0@group:0@cache_role:kv@cache_family:default@"],
        ["m@dcp:0@head_or_tp_rank:0@pp_rank:0@group:1@cache_role:state@cache_family:c4@"],
    ]


def test_two_objects_per_block_need_two_names():
    with pytest.raises(ArgumentError, match="for templates 0 and 1"):
        make({"full": FULL}, {"full": [SglangKeys("m"), SglangKeys("m")]})


@pytest.mark.parametrize(
    "keys",
    [
        StrictKeys("m", group_id=1),
        StrictKeys("m", tp_rank=1),
        StrictKeys("m", facts_digest="0123456789abcdef"),
        VllmKeys("m", pp_rank=2),
        AscendKeys("m", head_or_tp_rank=1),
        LMCacheObjectKeys("m", rank=0, object_group=3),
        {"full": VllmKeys("m", dcp_rank=1), "swa": VllmKeys("m")},
    ],
)
def test_templates_that_have_their_ranks_are_refused(keys):
    with pytest.raises(ArgumentError, match=r"to the contract, got [a-z_]+ "):
        make(keys=keys)


@pytest.mark.parametrize(
    ("keys", "grid", "said"),
    [
        (SglangKeys("m", mla=True), RankGrid(2), "the tensor-parallel rank"),
        (SglangKeys("m"), RankGrid(pcp_size=2), "the prefill-context-parallel rank"),
        (AscendKeys("m"), RankGrid(pcp_size=2), "the prefill-context-parallel rank"),
        (AscendKeys("m", layer_id=0), RankGrid(pp_size=2), "the pipeline rank"),
        (SglangKeys("m", mla=True), RankGrid(2, kv_heads=1, pcp_size=2), "the prefill"),
    ],
)
def test_templates_without_a_field_for_a_rank_are_refused(keys, grid, said):
    with pytest.raises(ArgumentError, match=f"must have a field for {said}"):
        make({"full": FULL}, keys, ranks=grid)


def test_sizes_in_a_template_are_those_of_the_ranks():
    make({"full": FULL}, SglangKeys("m", pp_size=2), ranks=RankGrid(pp_size=2))
    with pytest.raises(ArgumentError, match="got pp_size 2 and 4"):
        make({"full": FULL}, SglangKeys("m", pp_size=2), ranks=RankGrid(pp_size=4))
    with pytest.raises(ArgumentError, match="got world_size 8 and 2"):
        make({"full": FULL}, LMCacheKeys("m", world_size=8), ranks=RankGrid(2))
    with pytest.raises(ArgumentError, match="`dcp_size` must be 1 without `mla`, got 2"):
        make({"full": FULL}, SglangKeys("m"), ranks=RankGrid(2, dcp_size=2))


def test_lmcache_workers():
    contract = make({"full": FULL}, LMCacheKeys("m"), ranks=RankGrid(2, 2))
    assert prefixes(contract) == [["m@4@0@", "m@4@2@", "m@4@1@", "m@4@3@"]]
    first_only = make({"full": FULL}, LMCacheKeys("m"), ranks=RankGrid(4, replication=4))
    assert prefixes(first_only) == [["m@1@0@"]]
    objects = make(keys=LMCacheObjectKeys("m"), ranks=RankGrid(2))
    assert prefixes(objects) == [
        ["m@02000200@0@", "m@02010201@0@"],
        ["m@02000200@1@", "m@02010201@1@"],
    ]


@pytest.mark.parametrize(
    ("keys", "error", "said"),
    [
        ({"full": StrictKeys("m")}, ArgumentError, "a template for group 'swa'"),
        (dict.fromkeys(["full", "swa", "x"], StrictKeys("m")), ArgumentError, r"got \['x'\]"),
        ({"full": StrictKeys("m"), "swa": VllmKeys("m")}, ArgumentError, "of one format"),
        ({"full": [], "swa": StrictKeys("m")}, TypeError, "a sequence of them"),
        ({"full": "m", "swa": StrictKeys("m")}, TypeError, "a sequence of them"),
        ({"full": ["m"], "swa": StrictKeys("m")}, TypeError, "hold key schemas, got str"),
        ("m", TypeError, "a mapping from groups to them, got str"),
    ],
)
def test_wrong_templates(keys, error, said):
    with pytest.raises(error, match=said):
        make(keys=keys)


# How groups are numbered.


def test_group_numbers():
    groups = {"ring": FullAttention(4, prefix_cacheable=False), **BOTH}

    def numbers(keys):
        contract = make(groups, keys)
        assert contract.scheme.groups[0].namespaces == ()
        return [row[0].partition("group:")[2][:1] for row in prefixes(contract)[1:]]

    assert numbers(VllmKeys("m")) == ["0", "1"]
    assert numbers(VllmKeys("m", release="0.33")) == ["0", "1"]
    assert numbers(VllmKeys("m", release="0.28")) == ["1", "2"]
    assert numbers(AscendKeys("m")) == ["1", "2"]
    assert [row[0][-2] for row in prefixes(make(groups))[1:]] == ["0", "1"]


def test_vllm_namespace_and_eviction_groups():
    namespace = store_namespace(2, store_tp=4)
    grid = RankGrid(2, 2, kv_heads=8, store_tp_size=4)
    contract = make({"full": FULL}, VllmKeys("m", namespace=namespace), ranks=grid)
    assert prefixes(contract)[0][1] == f"m{namespace}@tp_rank:0@pcp0@dcp0@pp_rank:1@group:0@"
    assert len(prefixes(contract)[0]) == 8
    assert contract.scheme.groups[0].eviction.prefix == f"vllm-mooncake-store:m{namespace}@"
    assert make(keys=VllmKeys("m", release="0.24")).scheme.groups[0].eviction is None
    strict = make()
    ids = {group.eviction.prefix for group in strict.scheme.groups}
    assert ids == {f"kvm1@m@@@{strict.fingerprint}@"}


@pytest.mark.parametrize(
    ("namespace", "grid", "said"),
    [
        ("", RankGrid(2, kv_heads=8, store_tp_size=4), "must name the store's TP size"),
        (store_namespace(1, store_tp=8), RankGrid(2, kv_heads=8, store_tp_size=4), "store_tp of"),
        (store_namespace(1, store_tp=4), RankGrid(4, kv_heads=8), "store_tp of the ranks"),
        (store_namespace(2, store_tp=0), RankGrid(4, kv_heads=1), "store_pp of the ranks"),
        (store_namespace(1, tp_size=4, layout="X"), RankGrid(2, kv_heads=8), "`tp_size` of"),
    ],
)
def test_vllm_namespaces_that_are_not_of_the_ranks(namespace, grid, said):
    with pytest.raises(ArgumentError, match=said):
        make({"full": FULL}, VllmKeys("m", namespace=namespace), ranks=grid)


def test_vllm_cuts_a_store_for_one_full_group_only():
    keys = VllmKeys("m", namespace=store_namespace(1, store_tp=4))
    with pytest.raises(ArgumentError, match=r"got groups \['full', 'window'\] and 1"):
        make(keys=keys, ranks=RankGrid(kv_heads=8, store_tp_size=4))


def test_filling_a_template_does_not_warn_again():
    with pytest.warns(KeyFormatWarning):
        keys = VllmKeys("org/m")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(keys=keys, ranks=RankGrid(2, 2, kv_heads=2))


# R2: digests of another hash block, algorithm or start.


def test_digests_that_are_known_to_be_others_are_refused():
    contract = make()
    start = HASHING.start_hash
    tokens = range(64)
    contract.check_hashes(hash_tokens(tokens, block_size=16, parent=start))
    with pytest.raises(ArgumentError, match="`hash_block_size`, got 4 and 16"):
        contract.check_hashes(hash_tokens(tokens, block_size=4, parent=start))
    with pytest.raises(ArgumentError, match="got sha256_cbor and sha256"):
        contract.check_hashes(hash_tokens(tokens, algorithm="sha256_cbor", seed="contract"))
    with pytest.raises(ArgumentError, match="must start from the contract's seed") as caught:
        contract.check_hashes(hash_tokens(tokens, seed="other"))
    assert start.hex() not in str(caught.value)
    assert "other" not in str(caught.value)


def test_digests_of_unknown_origin_are_taken_by_their_width():
    contract = make()
    contract.check_hashes(BlockHashes(bytes(64), 32))
    contract.check_hashes(BlockHashes.from_list([]))
    with pytest.raises(ArgumentError, match="32 bytes, as sha256 gives them, got 16"):
        contract.check_hashes(BlockHashes(bytes(64), 16))
    with pytest.raises(ArgumentError, match="got 16 and 32"):
        contract.check_hashes(BlockHashes.from_list([bytes(32), bytes(16)]))
    make(hashing=None).check_hashes(BlockHashes(bytes(64), 16))


def test_the_scheme_checks_digests():
    with pytest.raises(ArgumentError, match="got 4 and 16"):
        make().scheme.hashes(hash_tokens(range(8), block_size=4, seed="contract"))


def test_hashing_without_a_seed():
    sealed = Hashing(check=HASHING.check)
    contract = make(hashing=sealed)
    assert contract == make()
    assert contract.fingerprint == make().fingerprint
    assert contract.origin is None
    contract.check_hashes(hash_tokens(range(64), seed="contract"))
    with pytest.raises(ArgumentError, match="must start from"):
        contract.check_hashes(hash_tokens(range(64), seed="other"))
    with pytest.raises(HashInputError, match="`seed` must be given to hash token ids"):
        contract.hasher()
    with pytest.raises(HashInputError, match="got None: pass digests"):
        make(hashing=None).hasher()
    assert make().origin == DigestOrigin(16, "sha256", HASHING.start_hash)
    hasher = make().hasher()
    hasher.extend(range(16))
    assert hasher.hashes == list(hash_tokens(range(16), seed="contract"))


@pytest.mark.parametrize(
    ("values", "error", "said"),
    [
        ({"algorithm": "md5"}, ArgumentError, "`algorithm` must be one of"),
        ({"seed": "a", "start": bytes(32)}, ArgumentError, "exclude each other"),
        ({"start": bytes(5)}, ArgumentError, "16 or 32 bytes, got 5"),
        ({"start": "text"}, TypeError, "`start` must be bytes-like, got str"),
        ({"seed": 5}, HashInputError, "`seed` must be text, got int"),
        ({"seed": "hidden\ud800"}, HashInputError, "valid Unicode, got a lone surrogate"),
        ({"check": "12"}, ArgumentError, "`check` must be 16 hex digits, got '12'"),
        ({"seed": "a", "check": "0" * 16}, ArgumentError, "must be the one that"),
        ({"check": "0" * 16, "release": "x"}, ArgumentError, "`release` must be"),
    ],
)
def test_wrong_hashing(values, error, said):
    with pytest.raises(error, match=said) as caught:
        Hashing(**values)
    assert "hidden" not in str(caught.value)


def test_the_start_of_an_engine():
    assert Hashing(start=HASHING.start_hash) == HASHING
    assert Hashing(start=bytearray(HASHING.start_hash)) == HASHING
    assert make(hashing=Hashing(start=HASHING.start_hash)).fingerprint == make().fingerprint


def test_secrets_are_not_shown(caplog):
    caplog.set_level(logging.DEBUG)
    secret = "a-secret-seed"
    hashing = Hashing("sha256", seed=secret)
    contract = make(hashing=hashing, payload=[layout(), layout()])
    bound = contract.bind([layout(), layout()])
    start = hashing.start_hash
    shown = " ".join(
        [
            *map(repr, (hashing, contract, bound, contract.origin, contract.scheme, bound.scheme)),
            *map(str, (hashing, contract, bound)),
            contract.to_json(),
            caplog.text,
        ]
    )
    for text in (secret, start.hex(), repr(start), str(list(start))):
        assert text not in shown


def test_digests_of_starts():
    assert start_digest("sha256", bytes(32)) == "22f6e763f48998a6"
    # Slow on purpose: its seed is a secret.
    assert start_digest("xxhash", bytes(16)) == "c151be9b1c758c46"


# R3: facts come from layouts.


def test_other_element_types_give_other_keys():
    one = make(payload=[layout(), layout()])
    two = make(payload=[layout(np.int16), layout(np.int16)])
    assert one.fingerprint != two.fingerprint
    shared = {row[0] for row in prefixes(one)} & {row[0] for row in prefixes(two)}
    assert shared == set()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (layout(np.int16), "got dtype 'int16' for 'float16'"),
        (layout(tensors=3), "layers .* for "),
        (layout(shape=(2, 8, 16)), "layout .* for "),
        (layout(shape=(2, 16, 16)), "token_bytes"),
    ],
)
def test_bind_compares_facts(other, said):
    contract = make(payload={"full": layout(), "swa": layout()})
    with pytest.raises(ArgumentError, match="must have the facts") as caught:
        contract.bind({"full": layout(), "swa": other})
    assert "`layouts['swa']`" in str(caught.value)
    assert re.search(said, str(caught.value))


def test_memory_order_is_a_fact():
    plain = np.zeros((8, 2, 16, 8), np.float16)
    swapped = np.zeros((8, 16, 2, 8), np.float16).transpose(0, 2, 1, 3)
    one, two = (KVLayout.from_tensors([a], num_blocks=8) for a in (plain, swapped))
    assert one.block_bytes == two.block_bytes
    groups = {"full": FULL}
    assert make(groups, payload=[one]).fingerprint != make(groups, payload=[two]).fingerprint


def test_what_does_not_change_bytes_is_no_fact():
    groups = {"full": FULL}
    first = make(groups, payload=[layout()]).fingerprint
    assert make(groups, payload=[layout(blocks=1)]).fingerprint == first
    assert make(groups, payload=[layout(blocks=31)]).fingerprint == first
    # Heads outermost, blocks within: the bytes of a block are the same.
    arrays = [np.zeros((2, 8, 16, 8), np.float16) for _ in range(4)]
    outer = KVLayout.from_tensors(arrays, num_blocks=8, block_dim=1)
    assert make(groups, payload=[outer]).fingerprint == first


def test_torch_and_numpy_have_the_same_facts():
    torch = pytest.importorskip("torch")
    ours = KVLayout.from_tensors([torch.zeros(8, 2, 16, 8, dtype=torch.float16)], num_blocks=8)
    assert ours.tensors == layout(tensors=1).tensors


def test_small_kernel_blocks_are_a_fact():
    arrays = [np.zeros((32, 4, 8), np.float16)]
    four = KVLayout.from_tensors(arrays, num_blocks=8)
    assert four.tensors[0].order == "b4 0:4 1:8"
    assert four.tensors[0].block_bytes == 256


def test_strict_keys_without_facts_cannot_be_bound():
    contract = make()
    with pytest.raises(ArgumentError, match="`payload` must be given for group 'full'"):
        contract.bind([layout(), layout()])
    with pytest.raises(ArgumentError, match="`payload` must be given for group 'swa'"):
        make(payload={"full": layout()}).bind([layout(), layout()])
    make(facts={"dtype": "v1"}).bind([layout(), layout()])
    make(keys=VllmKeys("m")).bind([layout(), layout()])


def test_facts_of_users():
    plain = make().fingerprint
    stated = make(facts={"revision": "abc", "fp8": True, "n": 1, "none": None})
    assert stated.fingerprint != plain
    assert make(facts={"fp8": True}).fingerprint != make(facts={"fp8": 1}).fingerprint
    in_template = make(keys=StrictKeys("m", facts={"revision": "abc"}))
    assert in_template.fingerprint == make(facts={"revision": "abc"}).fingerprint
    assert in_template.facts == {"revision": "abc"}
    both = make(keys=StrictKeys("m", facts={"a": "1"}), facts={"b": "2"})
    assert dict(both.facts) == {"a": "1", "b": "2"}
    with pytest.raises(TypeError):
        both.facts["c"] = "3"
    with pytest.raises(ArgumentError, match="got 'x' and 'y'"):
        make(keys=StrictKeys("m", facts={"a": "y"}), facts={"a": "x"})
    with pytest.raises(ArgumentError, match="got dtype 'int8'"):
        make(keys=StrictKeys("m", facts={"dtype": "int8"}), payload=[layout(), layout()])
    with pytest.raises(ArgumentError, match="`facts` must map text"):
        make(facts={"a": 1.5})
    with pytest.raises(TypeError, match="`facts` must be a mapping, got list"):
        make(facts=[])
    with pytest.raises(ArgumentError, match="valid Unicode"):
        make(facts={"a": "\ud800"})


def test_payload_without_memory():
    facts = PayloadFacts(dtype="float16")
    contract = make(payload={"full": facts, "swa": facts})
    contract.bind([layout(), layout()])
    with pytest.raises(ArgumentError, match="got dtype 'int16' for 'float16'"):
        contract.bind([layout(np.int16), layout()])
    assert contract.fingerprint != make(payload=[layout(), layout()]).fingerprint
    meaning = PayloadFacts.of(layout(np.uint8), 16)
    fp8 = PayloadFacts(
        meaning.dtype,
        meaning.layout,
        meaning.token_bytes,
        meaning.layers,
        meaning.block_bytes,
        {"means": "fp8_e4m3"},
    )
    assert make(payload=[fp8, fp8]).fingerprint != make(payload=[meaning, meaning]).fingerprint
    make(payload=[fp8, fp8]).bind([layout(np.uint8), layout(np.uint8)])


def test_layouts_of_regions():
    ours = KVLayout.from_regions([(4096, 512, 512), (8192, 256, 256)], 4, [(4096, 8192)])
    contract = make({"full": FULL}, payload=[ours])
    assert contract.payload[0][0].layout == ("unknown 256 bytes", "unknown 512 bytes")
    contract.bind([ours])


# Bind.


def test_bound_contract():
    rows = {"full": layout(), "swa": layout()}
    contract = make(payload=rows)
    bound = contract.bind(rows)
    assert isinstance(bound, BoundContract)
    assert bound.contract is contract
    assert bound.layouts == ((rows["full"],), (rows["swa"],))
    assert bound.scheme.bound
    assert not contract.scheme.bound
    assert bound.scheme.groups[1].own == contract.scheme.groups[1].namespaces
    assert bound.scheme.groups[1].layouts == (rows["swa"],)
    assert contract.bind([rows["full"], rows["swa"]]).scheme.groups == bound.scheme.groups
    assert "tp_rank=0" in repr(bound)


def test_bound_ranks():
    grid = RankGrid(4, 2, kv_heads=2)
    contract = make(ranks=grid, payload=[layout(), layout()])
    bound = contract.bind([layout(), layout()], 3, 1)
    group = bound.scheme.groups[1]
    assert group.own[0].prefix.endswith("@tp1@pcp0@dcp0@pp1@g1@")
    assert (group.writers, group.turn, bound.scheme.rank) == (2, 0, 3)
    assert (bound.tp_rank, bound.pp_rank, bound.dcp_rank, bound.pcp_rank) == (3, 1, 0, 0)
    with pytest.raises(ArgumentError, match="`tp_rank` must be below"):
        contract.bind([layout(), layout()], 4, 0)
    with pytest.raises(ArgumentError, match="`dcp_rank` must be"):
        contract.bind([layout(), layout()], 1, 0, dcp_rank=1)


@pytest.mark.parametrize(
    ("rows", "error", "said"),
    [
        ([layout()], ArgumentError, "one entry per group, got 1 and 2"),
        ({"full": layout(), "x": layout()}, ArgumentError, r"got \['x'\]"),
        ({"full": layout()}, ArgumentError, "hold a KVLayout for group 'swa', which has layers on"),
        ({"full": layout(), "swa": 5}, TypeError, "must be a KVLayout or several, got int"),
        ([layout(), [layout(), layout()]], ArgumentError, "got 2 and 1"),
        ([layout(), []], ArgumentError, "got 0 and 1"),
        ([layout(), [np.zeros(4)]], TypeError, "must hold KVLayout, got ndarray"),
        (layout(), TypeError, "got KVLayout"),
        ("ab", TypeError, "got str"),
    ],
)
def test_wrong_layouts(rows, error, said):
    with pytest.raises(error, match=said):
        make(keys=VllmKeys("m")).bind(rows)
    if not isinstance(rows, dict) or len(rows) != 1:
        with pytest.raises(error):
            make(keys=VllmKeys("m"), payload=rows)


def test_groups_that_are_not_cacheable_need_no_layout():
    groups = {"ring": FullAttention(4, prefix_cacheable=False), "full": FULL}
    contract = make(groups, payload={"full": layout()})
    for rows in ({"full": layout()}, [None, layout()], [layout(), layout()]):
        bound = contract.bind(rows)
        assert bound.layouts[0] == ()
        assert bound.scheme.groups[0].own == ()


def test_groups_without_layers_on_a_stage():
    grid = RankGrid(pp_size=2, stages={"swa": [1]})
    contract = make(payload=[layout(), layout()], ranks=grid)
    bound = contract.bind([layout(), None], pp_rank=0)
    assert bound.scheme.groups[1].own == ()
    assert len(bound.scheme.groups[1].namespaces) == 1
    contract.bind([layout(), layout()], pp_rank=1)
    with pytest.raises(ArgumentError, match=r"must be None on a stage .* got KVLayout on 0"):
        contract.bind([layout(), layout()], pp_rank=0)
    with pytest.raises(ArgumentError, match="must be a KVLayout on a stage"):
        contract.bind([layout(), None], pp_rank=1)


def test_layouts_on_two_devices():
    def on(device):
        return KVLayout.from_regions([(4096, 512, 512)], 4, [(4096, 2048)], device=device)

    contract = make(payload=[on("cuda:0"), on("cuda:1")])
    with pytest.raises(ArgumentError, match=r"on one device, got \['cuda:0', 'cuda:1'\]"):
        contract.bind([on("cuda:0"), on("cuda:1")])


def test_shards_of_a_finer_store():
    heads, grid = 8, RankGrid(2, kv_heads=8, store_tp_size=4)

    def shards(tp, rank):
        arrays = [np.zeros((8, heads // tp, 16, 8), np.float16) for _ in range(2)]
        return head_shards(arrays, 8, num_kv_heads=heads, local_tp=tp, store_tp=4, tp_rank=rank)

    groups = {"full": FULL}
    contract = make(groups, ranks=grid, payload=[shards(2, 0)])
    bound = contract.bind([shards(2, 1)], 1)
    assert [b.prefix[-22:] for b in bound.scheme.groups[0].own] == [
        "@tp2@pcp0@dcp0@pp0@g0@",
        "@tp3@pcp0@dcp0@pp0@g0@",
    ]
    assert len(bound.layouts[0]) == 2
    contract.bind([list(shards(2, 1).values())], 1)
    with pytest.raises(ArgumentError, match=r"got \[0, 1\] and \[2, 3\]"):
        contract.bind([shards(2, 0)], 1)
    # The same contract for an engine of another size.
    other = make(groups, ranks=RankGrid(1, kv_heads=8, store_tp_size=4), payload=[shards(1, 0)])
    assert other.fingerprint == contract.fingerprint
    assert other.scheme.groups[0].namespaces == contract.scheme.groups[0].namespaces
    odd = [next(iter(shards(2, 0).values())), layout(np.int16)]
    with pytest.raises(ArgumentError, match="shards of equal layouts"):
        make(groups, ranks=grid, payload=[odd])


def test_several_objects_per_block():
    keys = {"full": [SglangKeys("m"), SglangKeys("m", part="v")]}
    k, v = layout(tensors=2), layout(np.int8, tensors=2)
    contract = make({"full": FULL}, keys, payload=[[k, v]])
    bound = contract.bind([[k, v]])
    assert [b.suffix for b in bound.scheme.groups[0].own] == ["_0_k", "_0_v"]
    with pytest.raises(ArgumentError, match="got dtype 'int8' for 'float16'"):
        contract.bind([[v, k]])
    with pytest.raises(ArgumentError, match="each object of a block and shard"):
        contract.bind([[k]])
    with pytest.raises(ArgumentError, match="one PayloadFacts per object of a block, got 1 and 2"):
        make({"full": FULL}, keys, payload=[PayloadFacts(dtype="float16")])


# What differs per rank.


def test_stages_are_described_one_by_one():
    grid = RankGrid(pp_size=2)
    contract = make(ranks=grid, payload=[layout(tensors=6), layout(tensors=2)])
    # Layers differ between stages and are no part of what all share.
    again = make(ranks=grid, payload=[layout(tensors=1), layout(tensors=3)])
    assert contract == again
    contract.bind([layout(tensors=9), layout(tensors=9)], pp_rank=1)
    known = contract.describe_rank([layout(tensors=6), layout(tensors=2)])
    known = known.describe_rank([layout(tensors=5), layout(tensors=2)], pp_rank=1)
    assert known.fingerprint == contract.fingerprint
    assert known != contract
    known.bind([layout(tensors=6), layout(tensors=2)], pp_rank=0)
    known.bind([layout(tensors=5), layout(tensors=2)], pp_rank=1)
    with pytest.raises(ArgumentError, match=r"got layers .* for .*; block_bytes 2560 for 3072"):
        known.bind([layout(tensors=5), layout(tensors=2)], pp_rank=0)
    with pytest.raises(ArgumentError, match="got layers"):
        known.describe_rank([layout(tensors=5), layout(tensors=2)])
    with pytest.raises(ArgumentError, match="what differs between stages"):
        make(ranks=grid, payload=[PayloadFacts(block_bytes=512), None])


def test_uneven_shards_are_described_one_by_one():
    grid = RankGrid(4, kv_heads=6)
    one, two = layout(shape=(1, 16, 8)), layout(shape=(2, 16, 8))
    groups, facts = {"full": FULL}, PayloadFacts(dtype="float16", extra={"head_bytes": 16})
    with pytest.raises(ArgumentError, match="must be PayloadFacts with what shards of 6 heads"):
        make(groups, ranks=grid, payload=[one])
    contract = make(groups, ranks=grid, payload=[facts])
    # Another number of heads in as many shards is another cut.
    other = make(groups, ranks=RankGrid(4, kv_heads=7), payload=[facts])
    assert other.fingerprint != contract.fingerprint
    known = contract.describe_rank([one], 0).describe_rank([two], 1)
    known.bind([one], 0)
    with pytest.raises(ArgumentError, match="block_bytes"):
        known.bind([one], 1)
    with pytest.raises(ArgumentError, match="got dtype 'int16' for 'float16'"):
        contract.bind([layout(np.int16)], 0)


def test_even_ranks_need_no_description():
    contract = make(payload=[layout(), layout()])
    assert contract.describe_rank([layout(), layout()]) == contract


def test_tokens_of_a_block_under_context_parallelism():
    groups = {"full": FullAttention(32)}
    made = make(groups, ranks=RankGrid(2, dcp_size=2, kv_heads=1), payload=[layout(tensors=1)])
    assert made.payload[0][0].token_bytes == (32,)
    states = make({"full": FULL, "state": Mamba(16)}, payload=[layout(), layout()])
    assert states.payload[1][0].token_bytes == (512,)


# The two lists.

SHAPES = {
    "block size": {"groups": {"full": FullAttention(32), "swa": SWA}},
    "window": {"groups": {"full": FULL, "swa": SlidingWindow(16, window=48)}},
    "kind": {"groups": {"full": FULL, "swa": FullAttention(16)}},
    "chunk": {"groups": {"full": FULL, "swa": ChunkedLocal(16, 32)}},
    "another chunk": {"groups": {"full": FULL, "swa": ChunkedLocal(16, 48)}},
    "order": {"groups": {"swa": SWA, "full": FULL}},
    "number of groups": {"groups": {**BOTH, "third": FULL}},
    "hash block": {"hash_block_size": 8},
    "algorithm": {"hashing": Hashing("sha256_cbor", seed="contract")},
    "seed": {"hashing": Hashing(seed="another")},
    "extra keys": {"hashing": Hashing(seed="contract", release="0.28")},
    "no hashing": {"hashing": None},
    "model": {"keys": StrictKeys("n")},
    "namespace": {"keys": StrictKeys("m", namespace="n")},
    "format": {"keys": VllmKeys("m")},
    "shards": {"ranks": RankGrid(2)},
    "stages": {"ranks": RankGrid(pp_size=2)},
    "stage": {"ranks": RankGrid(pp_size=2, stages=[0])},
    "prefill": {"ranks": RankGrid(pcp_size=2)},
    "split": {"ranks": RankGrid(2, dcp_size=2, kv_heads=1)},
    "payload": {"payload": [layout(), layout()]},
    "facts": {"facts": {"a": 1}},
}
POLICIES = {
    "names": {"groups": {"a": FULL, "b": SWA}},
    "no names": {"groups": [FULL, SWA]},
    "eagle": {"groups": {"full": FullAttention(16, eagle=True), "swa": SWA}},
    "spec": {"groups": {"full": FullAttention(16, spec="x"), "swa": SWA}},
    "retained": {
        "groups": {"full": FULL, "swa": SlidingWindow(16, window=32, extra_retained_tokens=9)}
    },
    "scratch": {"groups": {"ring": FullAttention(3, prefix_cacheable=False), **BOTH}},
    "alignment": {"alignment": 64},
    "retention": {"retention_interval": 0},
    "partial hits": {"partial_hits": True},
    "states": {"states": "handoff"},
    "replicas": {"ranks": RankGrid(8, kv_heads=1)},
    "replicated contexts": {"ranks": RankGrid(8, dcp_size=2, kv_heads=1, context_split=False)},
    "template": {"keys": {"full": StrictKeys("m"), "swa": StrictKeys("m")}},
}


@pytest.mark.parametrize("name", SHAPES)
def test_what_shapes_keys_or_bytes_is_in_the_fingerprint(name):
    assert make(**SHAPES[name]).fingerprint != make().fingerprint


def test_fingerprints_differ_from_each_other():
    found = [make(**values).fingerprint for values in SHAPES.values()]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_local_policy_is_not(name):
    assert make(**POLICIES[name]).fingerprint == make().fingerprint


def test_golden_fingerprints():
    assert make().fingerprint == "9f6e0e57bae17cdf"
    rows = {"full": layout(), "swa": layout()}
    rich = make(
        ranks=RankGrid(8, 2, 2, kv_heads=2),
        payload=rows,
        facts={"revision": "main", "fp8": False},
    )
    assert rich.fingerprint == "da38f05e1273930b"
    assert make(keys=VllmKeys("m")).fingerprint == "571c43465932cf50"


def test_fingerprints_are_the_same_in_every_process():
    program = f"""if True:
        from kvmask import FullAttention, SlidingWindow, StrictKeys
        from kvmask.contract import Contract
        from kvmask.hashing.settings import Hashing
        groups = dict(full=FullAttention(16), swa=SlidingWindow(16, window=32))
        made = Contract(groups, 16, StrictKeys("m"), Hashing(seed="contract"))
        assert made.fingerprint == {make().fingerprint!r}, made.fingerprint
    """
    home = str(Path(_core.__file__).parent.parent)
    for seed in ("0", "7"):
        subprocess.run(
            [sys.executable, "-c", program],
            check=True,
            timeout=60,
            # The tested package first: benches put the sources' folder before it.
            env=os.environ
            | {"PYTHONHASHSEED": seed, "PATH": "", "PYTHONPATH": ":".join([home, *sys.path])},
        )


def test_strict_keys_carry_the_fingerprint():
    contract = make()
    schema, _ = StrictKeys.parse(contract.scheme.groups[0].namespaces[0].prefix + "00")
    assert schema.facts_digest == contract.fingerprint


# Constructor.


@pytest.mark.parametrize(
    ("values", "error", "said"),
    [
        ({"groups": 5}, TypeError, "`groups` must be a mapping by name or a sequence, got int"),
        ({"groups": "ab"}, TypeError, "got str"),
        ({"groups": {"": FULL}}, ArgumentError, "names of text, got ''"),
        ({"groups": {1: FULL}}, ArgumentError, "names of text, got 1"),
        ({"groups": {"a": 5}}, TypeError, "must hold kvmask groups, got int"),
        (
            {"groups": {"a": FullAttention(4, prefix_cacheable=False)}},
            ArgumentError,
            "at least one",
        ),
        ({"hash_block_size": 32}, AlignmentError, "got 16 and 32"),
        ({"hash_block_size": "16"}, TypeError, "`hash_block_size` must be an integer"),
        ({"alignment": 24}, AlignmentError, "got 24 and"),
        ({"retention_interval": -1}, ArgumentError, "`retention_interval`"),
        ({"partial_hits": 1}, TypeError, "`partial_hits` must be bool, got int"),
        ({"states": "maybe"}, ArgumentError, "`states` must be one of table, handoff, got 'maybe'"),
        ({"states": []}, ArgumentError, "`states` must be one of"),
        ({"hashing": "sha256"}, TypeError, "`hashing` must be"),
        ({"ranks": 4}, TypeError, "`ranks` must be RankGrid, got int"),
        ({"payload": 4}, TypeError, "`payload` must be a mapping"),
        ({"payload": {"x": None}}, ArgumentError, r"got \['x'\]"),
    ],
)
def test_wrong_arguments(values, error, said):
    with pytest.raises(error, match=said):
        make(**values)


def test_numpy_integers_are_integers():
    groups = [FullAttention(np.int64(16)), SlidingWindow(np.int32(16), window=np.int64(32))]
    contract = make(groups, hash_block_size=np.int64(16), ranks=RankGrid(np.int64(2)))
    assert contract.fingerprint == make(ranks=RankGrid(2)).fingerprint
    assert Contract.from_json(contract.to_json(with_seed=True)).fingerprint == contract.fingerprint
    contract.ranks.own(np.int64(1))


def test_contracts_are_values():
    contract = make(payload=[layout(), layout()])
    assert contract == make(payload=[layout(), layout()])
    assert hash(contract) == hash(make(payload=[layout(), layout()]))
    assert contract != make()
    assert contract != 5
    assert copy.copy(contract) is contract
    assert copy.deepcopy(contract) is contract
    assert pickle.loads(pickle.dumps(contract)) == contract
    assert pickle.loads(pickle.dumps(contract)).origin == contract.origin
    assert repr(contract).startswith("Contract(['full', 'swa'], fingerprint='")
    for name in ("names", "new"):
        with pytest.raises(AttributeError, match="must not be changed"):
            setattr(contract, name, 5)
    with pytest.raises(AttributeError, match="must not be changed"):
        del contract.names
    groups = dict(BOTH)
    kept = make(groups)
    groups.clear()
    assert kept.names == ("full", "swa")


def test_names_and_policies():
    contract = make(
        [FULL, Mamba(16)],
        retention_interval=0,
        alignment=64,
        partial_hits=True,
        states="handoff",
    )
    assert contract.names == ("0", "1")
    coord = contract.coordinator
    assert (coord.alignment, coord.retention_interval, coord.partial_hits) == (64, 0, True)
    assert (contract.hash_block_size, contract.digest_size) == (16, 32)
    assert not contract.scheme.states
    assert make().scheme.states
    assert isinstance(coord.load_mask(64)[0], Bitset)
    rows = [(g.index, g.name, g.kind, g.block_size, g.span) for g in make().scheme.groups]
    assert rows == [(0, "full", "full", 16, 0), (1, "swa", "window", 16, 32)]


def test_one_contract_in_many_threads():
    contract = make(payload=[layout(), layout()], ranks=RankGrid(4, kv_heads=4))
    wrong = []

    def work(rank):
        for _ in range(20):
            bound = contract.bind([layout(), layout()], rank)
            if f"@tp{rank}@" not in bound.scheme.groups[0].own[0].prefix:
                wrong.append(rank)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    assert not any(thread.is_alive() for thread in threads)


# Payload facts alone.


@pytest.mark.parametrize(
    ("values", "error", "said"),
    [
        ({"dtype": 5}, TypeError, "`dtype` must be text, got int"),
        ({"layout": 5}, TypeError, "`layout` must be text"),
        ({"layout": [5]}, TypeError, "`layout` must be text"),
        ({"token_bytes": -1}, ArgumentError, "`token_bytes` must be at least 0"),
        ({"token_bytes": "12"}, TypeError, "`token_bytes` must be an integer"),
        ({"layers": [0.5]}, TypeError, "`layers` must be an integer"),
        ({"block_bytes": 0}, ArgumentError, "`block_bytes` must be at least 1"),
        ({"layout": ["a"], "token_bytes": [1, 2]}, ArgumentError, "got 2 and 1"),
        ({"layout": ["a"], "layers": [0, 1]}, ArgumentError, "got 1 of 1"),
        ({"extra": {"a": 1.5}}, ArgumentError, "`extra` must map text"),
    ],
)
def test_wrong_facts(values, error, said):
    with pytest.raises(error, match=said):
        PayloadFacts(**values)


def test_facts_are_values():
    facts = PayloadFacts.of(layout(), 16)
    assert facts == PayloadFacts.of(layout(), 16)
    assert hash(facts) == hash(PayloadFacts.of(layout(), 16))
    assert pickle.loads(pickle.dumps(facts)) == facts
    mixed = [np.zeros((8, 4), np.int8), np.zeros((8, 4), np.float32), np.zeros((8, 4), np.int8)]
    of = PayloadFacts.of(KVLayout.from_tensors(mixed, num_blocks=8), 4)
    assert of.plain() == {
        "dtype": "float32,int8",
        "layout": ["float32 0:4", "int8 0:4"],
        "token_bytes": [4, 1],
        "layers": [[1, 1], [1, 0], [1, 1]],
        "block_bytes": 24,
        "extra": {},
    }


def test_stages_may_have_fewer_kinds_of_tensors():
    one = [np.zeros((8, 16, 4), np.int8)]
    both = [*one, np.zeros((8, 16, 4), np.float32)]
    rows = [KVLayout.from_tensors(t, num_blocks=8) for t in (both, one)]
    contract = make({"full": FULL}, ranks=RankGrid(pp_size=2), payload=[rows[0]])
    contract.bind([rows[1]], pp_rank=1)
    contract.bind([rows[0]], pp_rank=0)
    fewer = make({"full": FULL}, ranks=RankGrid(pp_size=2), payload=[rows[1]])
    with pytest.raises(ArgumentError, match="got dtype"):
        fewer.bind([rows[0]], pp_rank=0)


def test_every_combination_of_shapes_binds():
    """All kinds of groups under all small grids: each rank binds, and its keys are asked for."""
    kinds = [FULL, SWA, ChunkedLocal(16, 32), Mamba(16)]
    for size, stages, heads, pair in itertools.product(
        (1, 2, 4), (1, 2), (1, 2, 4), itertools.combinations(kinds, 2)
    ):
        grid = RankGrid(size, stages, kv_heads=heads)
        rows = [layout(), layout()]
        contract = make(pair, ranks=grid, payload=rows)
        for rank, stage in itertools.product(range(size), range(stages)):
            bound = contract.bind(rows, rank, stage)
            for group in bound.scheme.groups:
                assert set(group.own) <= set(group.namespaces)
                assert len(group.own) == len(group.layouts) == 1
                assert 0 <= group.turn < group.writers


def test_a_rank_is_never_guessed():
    """Two workers that forget their rank would share the keys of rank 0."""
    contract = make(
        groups={"full": FullAttention(16)},
        ranks=RankGrid(tp_size=2, pp_size=2, kv_heads=2),
        payload=None,
        facts={"dtype": "u1"},
    )
    for ranks, name in (({}, "tp"), ({"tp_rank": 1}, "pp"), ({"pp_rank": 1}, "tp")):
        with pytest.raises(ArgumentError, match=f"`{name}_rank` must be given"):
            contract.bind([layout()], **ranks)
    assert contract.bind([layout()], tp_rank=0, pp_rank=1).tp_rank == 0
