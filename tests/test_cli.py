"""The `kvmask` command: what it prints and its exit status."""

import ctypes
import json
import os
import subprocess
import sys

import pytest
from fake_store import EXIST, GET, PUT, REGISTER, FakeStore

import kvmask
from kvmask import Bitset, ChunkedLocal, FullAttention, Mamba, SlidingWindow
from kvmask.cli import main, trip
from kvmask.cli.explain import describe, draw_mask
from kvmask.errors import StoreError

PICTURES = """\
512 tokens, hash blocks of 16, alignment 64, retention 128
# all blocks of a cell, + some, . none

group 0: full attention, blocks of 64, 8 blocks
  store  ...#####  5 of 5
  lookup ########  8 of 8
  load   ########  8 of 8

group 1: sliding window 32, blocks of 16, 32 blocks
  store  ..............##......##..##..##  8 of 23
  lookup ..##..##..##..##..##..##..##..##  16 of 32
  load   ..............................##  2 of 32
"""


def test_explain_draws_the_masks(capsys):
    words = "explain --full 64 --swa 16,32 --hash-block 16 --tokens 512 --retention 128 --start 130"
    assert main(words.split()) == 0
    assert capsys.readouterr().out == PICTURES


def test_explain_takes_groups_in_order_and_eagle_by_id(capsys):
    words = "explain --swa 16,32 --full 64 --mamba 64 --hash-block 16 --tokens 256"
    assert main([*words.split(), "--eagle", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "group 0: sliding window 32, blocks of 16, EAGLE, 16 blocks" in lines
    assert "group 1: full attention, blocks of 64, 4 blocks" in lines
    # The EAGLE mask of case B07, one block further than without it.
    assert "  store  ..###.###.###.##  11 of 16" in lines
    assert main([*words.split(), "--eagle"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "group 1: full attention, blocks of 64, EAGLE, 4 blocks" in lines
    assert "group 2: state, blocks of 64, 4 blocks" in lines


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "explain --full 64 --swa 24,32 --hash-block 16 --tokens 64",
            "kvmask: `BLOCK` must be a multiple of `--hash-block`, got 24 and 16\n",
        ),
        (
            "explain --hash-block 16 --tokens 64",
            "kvmask: `explain` needs `--config` or at least one of --full, --swa, --chunked, "
            "--mamba\n",
        ),
        (
            "explain --full 64 --hash-block 16 --tokens 64 --eagle 1",
            "kvmask: `--eagle` must name groups from 0 to 0, got 1\n",
        ),
        (
            "demo --tokens 100",
            "kvmask: `--tokens` must be a positive multiple of 256, got 100\n",
        ),
    ],
)
def test_wrong_values_are_told_without_a_traceback(capsys, words, message):
    assert main(words.split()) == 2
    assert capsys.readouterr().err == message


def test_without_a_command_help_is_printed(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: kvmask [-h] [--version] COMMAND ...")
    assert "why" in printed


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"kvmask {kvmask.__version__}\n"


ASK = "why --full 16 --model m --seed s --tokens 1,2"


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("nonsense", 2),  # argparse refuses these
        ("explain --swa 4 --hash-block 4 --tokens 4", 2),
        ("explain --full x --tokens 4", 2),
        ("key", 2),  # something is missing
        ("key --tokens 1", 2),
        ("explain --tokens 64", 2),
        ("why --full 16 --model m --seed s", 2),
        ("why --model m --tokens 1", 2),
        ("key --model m --tokens 1 KEY", 2),  # something stands beside what excludes it
        ("explain --full 16 --block-size 16 --tokens 64", 2),
        (f"{ASK} --master h:1 --config x", 2),
        (f"{ASK} --contract x", 2),
        ("contract diff - -", 2),
        ("demo --tokens 100", 2),  # a value is wrong
        ("bench --tokens 1", 2),
        ("key --model m --tokens 1 --algorithm x", 2),
        ("key --model m --tokens 1 --set x", 2),
        (f"{ASK} --release x", 2),
        (f"{ASK} --try x", 2),
        ("explain --full 16 --alignment 24 --tokens 64", 2),  # values do not fit each other
        (f"{ASK} --tp 2 --dcp 3", 2),
        ("key --model m --tokens nowhere", 1),  # a file is wrong
        ("explain --config nowhere --tokens 64", 1),
        ("contract show nowhere", 1),
        ("key x", 1),  # a check fails
        ("contract check nowhere", 1),
        ("doctor --config nowhere", 1),
    ],
)
def test_wrong_usage_is_status_2_and_the_rest_is_1(words, status, capsys):
    try:
        found = main(words.split())
    except SystemExit as error:
        found = error.code
    assert found == status
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("group", "text"),
    [
        (FullAttention(16), "full attention, blocks of 16"),
        (
            SlidingWindow(16, window=32, extra_retained_tokens=8),
            "sliding window 32 + 8 retained, blocks of 16",
        ),
        (ChunkedLocal(16, chunk_size=64), "chunked local 64, blocks of 16"),
        (Mamba(16, prefix_cacheable=False), "state, blocks of 16, not cacheable"),
    ],
)
def test_groups_in_words(group, text):
    assert describe(group) == text


@pytest.mark.parametrize("width", [1, 2, 7, 64])
@pytest.mark.parametrize("num_blocks", [0, 1, 63, 64, 65, 200])
def test_a_picture_has_no_more_characters_than_asked(num_blocks, width):
    mask = Bitset.from_indices(num_blocks, range(0, num_blocks, 3))
    for drawn in (draw_mask(mask, num_blocks, width), draw_mask(None, num_blocks, width)):
        assert len(drawn) <= width
        assert bool(drawn) == (num_blocks > 0)
    assert set(draw_mask(None, num_blocks, width)) <= {"#"}
    assert set(draw_mask([False] * num_blocks, num_blocks, width)) <= {"."}


def test_the_round_trip_names_what_fails():
    data = bytes(range(256)) * 16
    trip.put(FakeStore(), "key", data)
    for call, answer, message in (
        (REGISTER, -600, "register_buffer must answer 0, got -600 INVALID_PARAMS"),
        (PUT, -200, r"put must answer \[0\], got \[-200\] NO_AVAILABLE_HANDLE"),
        (EXIST, 0, r"exists must answer \[1, 0\], got \[0, 0\]"),
        (GET, -704, r"get must answer \[4096\], got \[-704\] OBJECT_NOT_FOUND"),
    ):
        store = FakeStore()
        store.fail(call, answer)
        with pytest.raises(StoreError, match=message):
            trip.put(store, "key", data)
        assert store.registered == {}  # nothing stays registered on any path

    class Corrupting(FakeStore):
        def batch_get_into_multi_buffers(self, keys, addresses, sizes):
            results = super().batch_get_into_multi_buffers(keys, addresses, sizes)
            ctypes.memmove(addresses[0][0], bytes(8), 8)
            return results

    with pytest.raises(StoreError, match="get must return the bytes that were put"):
        trip.put(Corrupting(), "key", data)


def test_doctor_fails_on_a_wrong_configuration(tmp_path, capsys):
    assert main(["doctor", "--config", str(tmp_path / "absent.json")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line[:4] for line in lines][:2] == ["ok  ", "ok  "]
    assert lines[-3].startswith("FAIL config     the settings must be a readable JSON file")
    assert lines[-2] == "FAIL pool       the configuration is wrong, see above"
    assert lines[-1] == "FAIL round trip the configuration is wrong, see above"


@pytest.mark.store
def test_doctor_passes_against_a_real_store(master, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    path = tmp_path / "mooncake.json"
    settings = {
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "master_server_address": master.address,
    }
    path.write_text(json.dumps(settings))
    assert main(["doctor", "--config", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:4] for line in lines] == ["ok  "] * 8
    assert lines[-1].startswith("ok   round trip 4096 bytes put, found and got back, by a second")


def test_bench_prints_a_row_per_step(capsys):
    assert main(["bench", "--tokens", "512", "--repeat", "1", "--shape", "DeepSeek-V4"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    # 512 tokens: 2 + 8 + 8 + 128 + 64 blocks; of them 2 + 4 + 8 + 8 + 16 can decide a hit.
    assert rows[1][2:] == ["store_mask", rows[1][3], "210", rows[1][5]]
    assert rows[3][:6] == ["DeepSeek-V4", "512", "keys", "of", "a", "save"]
    assert rows[3][7] == "38"
    assert len(rows) == 7


DEMO_GROUPS = """\
group                               blocks  stored  asked exact  asked staged  loaded  without masks
0 full attention, blocks of 256          4       4            4             4       4              4
1 sliding window 128, blocks of 64      16       8            8             2       2             16
2 sliding window 512, blocks of 64      16      16           16             8       8             16
3 sliding window 16, blocks of 4       256      16           16             4       4            256
4 sliding window 64, blocks of 8       128      32           32             8       8            128
all                                    420      76           76            26      26            420
"""


def run_demo(memory, connect=None):
    from kvmask.cli import demo

    lines = []
    options = {} if connect is None else {"connect": connect}
    status = demo.run(1024, memory, say=lines.append, **options)
    return status, "\n".join(lines)


@pytest.mark.store
@pytest.mark.parametrize("memory", ["numpy", "torch"])
def test_the_demo_moves_every_byte(master, memory):
    pytest.importorskip(memory)
    status, text = run_demo(memory)
    assert DEMO_GROUPS in text
    # 2 layers of 16 bytes per token: 4*256 + 2*64 + 8*64 + 4*4 + 8*8 tokens
    assert f"hit 1024 of 1024 tokens; {1744 * 32} bytes compared, 0 differ: the same" in text
    assert status == 0


@pytest.mark.store
def test_the_demo_fails_when_one_byte_differs(master):
    pytest.importorskip("numpy")
    pool = {}

    class Corrupting(FakeStore):
        def batch_get_into_multi_buffers(self, keys, addresses, sizes):
            results = super().batch_get_into_multi_buffers(keys, addresses, sizes)
            byte = ctypes.c_uint8.from_address(addresses[-1][0])
            byte.value ^= 1
            return results

    status, text = run_demo("numpy", lambda *args, **kwargs: Corrupting(pool))
    assert f"{1744 * 32} bytes compared, 1 differ: NOT THE SAME" in text
    assert status == 1


@pytest.mark.store
def test_the_demo_closes_the_first_client_when_the_second_cannot_connect(master):
    pytest.importorskip("numpy")
    made = []

    def connect(*args, **kwargs):
        if made:
            raise StoreError("the pool is full")
        made.append(FakeStore())
        return made[0]

    with pytest.raises(StoreError, match="the pool is full"):
        run_demo("numpy", connect)
    assert made[0].closed


@pytest.mark.store
def test_the_demo_fails_when_a_key_is_refused(master):
    pytest.importorskip("numpy")
    pool = {}

    def connect(*args, **kwargs):
        store = FakeStore(pool)
        store.fail(PUT, -200, keys=lambda key: "@group:1@" in key)
        return store

    status, text = run_demo("numpy", connect)
    assert "not saved: DeepSeek-V4@tp_rank:0@pcp0@dcp0@pp_rank:0@group:1@" in text
    assert "code NO_AVAILABLE_HANDLE" in text
    assert status == 1


def test_python_m_kvmask_and_a_closed_pipe(tmp_path):
    words = [sys.executable, "-m", "kvmask", "explain", "--full", "64", "--hash-block", "64"]
    good = subprocess.run([*words, "--tokens", "64"], capture_output=True, text=True, timeout=60)
    assert good.returncode == 0, good.stderr
    assert "group 0: full attention, blocks of 64, 1 block\n" in good.stdout
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        broken = subprocess.run(
            [*words, "--tokens", "64"], stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert "Traceback" not in broken.stderr
