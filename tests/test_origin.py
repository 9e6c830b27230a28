"""Digests know how they were made: hash block, algorithm and start."""

import copy
import pickle

import pytest

from kvmask import BlockHasher, BlockHashes, hash_tokens
from kvmask.errors import ArgumentError
from kvmask.hashing import ALGORITHMS, DigestOrigin, digest_size, start_hash

ORIGIN = DigestOrigin(4, "sha256", bytes(32))


def flat(**kwargs):
    return BlockHashes(bytes(range(64)), 32, **kwargs)


def listed(**kwargs):
    return BlockHashes.from_list([bytes(32), b"\x01" * 32], **kwargs)


@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if a.startswith("sha")])
def test_hash_tokens_says_how(algorithm):
    made = hash_tokens(range(20), 4, algorithm, seed="s")
    assert made.origin == (4, algorithm, start_hash(algorithm, "s"))
    assert type(made.origin) is DigestOrigin
    parent = b"\x07" * digest_size(algorithm)
    for given in (parent, bytearray(parent), memoryview(parent)):
        assert hash_tokens(range(20), 4, algorithm, parent=given).origin.start == parent
    # Too few tokens for a block, and still known.
    assert hash_tokens([], 4, algorithm, seed="s").origin == made.origin


def test_a_hasher_says_how():
    hasher = BlockHasher(4, seed="s")
    before = hasher.block_hashes()
    hasher.extend(range(9))
    after = hasher.block_hashes()
    assert before.origin == after.origin == hasher.origin == hash_tokens([], 4, seed="s").origin
    assert (len(before), len(after)) == (0, 2)
    assert after == hash_tokens(range(9), 4, seed="s")
    copied = copy.copy(hasher)
    copied.extend(range(9, 12))
    assert len(copied.block_hashes()) == 3
    assert len(hasher.block_hashes()) == 2
    assert copied.origin == hasher.origin
    parent = bytes(range(32))
    assert BlockHasher(4, parent=bytearray(parent)).origin.start == parent


@pytest.mark.parametrize("make", [flat, listed])
def test_it_is_kept(make):
    assert make().origin is None
    known = make(origin=ORIGIN)
    for same in (
        known,
        copy.copy(known),
        copy.deepcopy(known),
        pickle.loads(pickle.dumps(known)),
        BlockHashes.from_list(known),
        BlockHashes.from_list(known, origin=ORIGIN),
        BlockHashes.from_list(make(), origin=ORIGIN),
    ):
        assert same == known
        assert same.origin == ORIGIN
        assert type(same.origin) is DigestOrigin
        assert same.digest_size == known.digest_size
    assert pickle.loads(pickle.dumps(make())).origin is None
    # What was unknown stays so for those who hold it.
    unknown = make()
    BlockHashes.from_list(unknown, origin=ORIGIN)
    assert unknown.origin is None
    # Where digests come from is no part of what they are.
    assert known == unknown


@pytest.mark.parametrize("make", [flat, listed])
def test_it_cannot_be_changed(make):
    known = make(origin=ORIGIN)
    with pytest.raises(AttributeError):
        known.origin = None
    with pytest.raises(ArgumentError, match="`origin` must be that of the digests, got"):
        BlockHashes.from_list(known, origin=ORIGIN._replace(block_size=8))


@pytest.mark.parametrize("make", [flat, listed])
@pytest.mark.parametrize("wrong", [(4, "sha256", bytes(32)), "sha256", 4, DigestOrigin])
def test_nothing_else_is_an_origin(make, wrong):
    with pytest.raises(TypeError, match="`origin` must be a DigestOrigin, got"):
        make(origin=wrong)


def test_the_start_is_not_shown():
    secret = hash_tokens(range(4), 4, seed="secret")
    shown = f"{secret!r} {secret.origin!r} {BlockHasher(4, seed='secret').origin}"
    assert secret.origin.start.hex() not in shown
    assert repr(secret.origin.start) not in shown
