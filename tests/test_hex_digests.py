"""Digests written in hexadecimal: a view over a list of text, decoded when a digest is used."""

from __future__ import annotations

import copy
import pickle
import random

import pytest

from kvmask import BlockHashes, HitHints
from kvmask._core import MAX_DIGEST_BYTES, KeyBuilder, build_keys
from kvmask.errors import HashInputError


def digests(seed: int, n: int) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(rng.choice((1, 7, 8, 16, 32, 33, MAX_DIGEST_BYTES))) for _ in range(n)]


def test_text_names_what_its_bytes_name() -> None:
    raw = digests(1, 60)
    text = BlockHashes.from_hex([d.hex() for d in raw])
    assert list(text) == raw
    assert text == BlockHashes.from_list(raw)
    assert (len(text), text.digest_size, text[-1], text[1:3]) == (60, None, raw[-1], raw[1:3])
    assert text.tobytes() == b"".join(raw)
    names = (KeyBuilder("a@"), KeyBuilder("é@", "@z", as_number=True))
    assert build_keys(names, text, None, 1, 3) == build_keys(names, raw, None, 1, 3)
    assert pickle.loads(pickle.dumps(text)) == raw
    assert copy.copy(text) == raw


def test_hints_know_a_prefix_in_either_form() -> None:
    raw = [bytes([i]) * 32 for i in range(64)]
    text = BlockHashes.from_hex([d.hex() for d in raw])
    hints = HitHints(1 << 10)
    hints.learn(text, 16, 256, 1024)
    assert hints.predict(raw, 16, 256, 1024) == hints.predict(text, 16, 256, 1024) == 1024


OTHERS = ["", "a", "0g", "AB", " 0", "0x12", "é0", "aé", "/0", ":0", "`0", b"ab", None, 5]


@pytest.mark.parametrize("text", [*OTHERS, "00" * (MAX_DIGEST_BYTES + 1)])
def test_other_text_is_refused_when_it_is_used(text: object) -> None:
    hashes = BlockHashes.from_hex(["ab", text])  # type: ignore[list-item]
    assert hashes[0] == b"\xab"
    with pytest.raises(HashInputError, match="at index 1"):
        hashes[1]


def test_only_a_list_is_taken() -> None:
    for texts in (("ab",), "ab", None):
        with pytest.raises(TypeError, match="`texts` must be a list"):
            BlockHashes.from_hex(texts)  # type: ignore[arg-type]
    shrunk = ["ab", "cd"]
    hashes = BlockHashes.from_hex(shrunk)
    shrunk.pop()
    with pytest.raises(HashInputError, match="must not shrink"):
        hashes[1]
