"""`kvmask explain`: the groups of models, what masks save, pictures as SVG, and terminals."""

import fcntl
import itertools
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from kvmask import ChunkedLocal, Coordinator, FullAttention, Mamba, SlidingWindow, cli
from kvmask.cli import main, svg
from kvmask.cli.explain import picture_of, savings
from kvmask.cli.models import model_of, read_config
from kvmask.cli.terminal import PIPED_WIDTH, Paint, Progress, picture_width
from kvmask.errors import ArgumentError

CONFIGS = Path(__file__).parent / "data" / "configs"
ROOT = Path(cli.__file__).parents[2]
KIB = 1024


def model(name, **options):
    return model_of(read_config(CONFIGS / f"{name}.json"), **options)


# --- models


@pytest.mark.parametrize(
    ("name", "groups", "counts", "block_bytes"),
    [
        # 2 (keys and values) * 8 heads * 128 numbers * 2 bytes * 16 tokens * 32 layers
        ("llama-3.1-8b", [FullAttention(16)], [32], [2048 * KIB]),
        ("mistral-7b-v0.1", [SlidingWindow(16, window=4096)], [32], [2048 * KIB]),
        ("mistral-7b-v0.3", [FullAttention(16)], [32], [2048 * KIB]),
        (
            "gemma-2-9b",
            [FullAttention(16), SlidingWindow(16, window=4096)],
            [21, 21],
            [2688 * KIB, 2688 * KIB],
        ),
        # Every sixth layer is global: 10 of 62.
        (
            "gemma-3-27b",
            [FullAttention(16), SlidingWindow(16, window=1024)],
            [10, 52],
            [1280 * KIB, 6656 * KIB],
        ),
        (
            "gpt-oss-20b",
            [FullAttention(16), SlidingWindow(16, window=128)],
            [12, 12],
            [384 * KIB, 384 * KIB],
        ),
        (
            "llama-4-scout",
            [FullAttention(16), ChunkedLocal(16, chunk_size=8192)],
            [12, 36],
            [768 * KIB, 2304 * KIB],
        ),
        # vLLM takes blocks of 544 tokens for this model: 1,097,728 bytes of state, 2,048 per token.
        (
            "qwen3-next-80b",
            [FullAttention(544), Mamba(544)],
            [12, 36],
            [544 * 2048 * 12, 1_097_728 * 36],
        ),
        # One latent vector per token: 576 numbers of 2 bytes.
        ("deepseek-v3", [FullAttention(16)], [61], [576 * 2 * 16 * 61]),
        (
            "deepseek-v4-like",
            [
                FullAttention(256),
                SlidingWindow(64, window=128),
                SlidingWindow(4, window=8),
                SlidingWindow(8, window=128),
            ],
            [6, 8, 3, 3],
            [
                3 * (584 + 132) * 64 + 3 * 584 * 2,
                584 * 64 * 8,
                3 * 4 * 4 * (2 * 2 * (512 + 128)),
                3 * 8 * 4 * (2 * 512),
            ],
        ),
    ],
)
def test_the_groups_of_models(name, groups, counts, block_bytes):
    found = model(name)
    assert found.groups == groups
    assert [layers.count for layers in found.layers] == counts
    assert [layers.block_bytes for layers in found.layers] == block_bytes
    assert found.notes


def test_patterns_and_lists_of_layers_agree():
    """The newer configs of these models name each layer."""
    for name, field, kinds in (
        ("gemma-2-9b", None, ["sliding_attention", "full_attention"] * 21),
        (
            "gemma-3-27b",
            "text_config",
            ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(62)],
        ),
        (
            "llama-4-scout",
            "text_config",
            (["chunked_attention"] * 3 + ["full_attention"]) * 12,
        ),
        ("qwen3-next-80b", None, (["linear_attention"] * 3 + ["full_attention"]) * 12),
    ):
        values = json.loads((CONFIGS / f"{name}.json").read_text())
        inner = values[field] if field else values
        before = model_of(values).layers
        inner["layer_types"] = kinds
        for old in ("sliding_window_pattern", "no_rope_layers", "full_attention_interval"):
            inner.pop(old, None)
        assert model_of(values).layers == before


def test_windows_that_a_model_does_not_use():
    base = {
        "model_type": "qwen2",
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "hidden_size": 64,
        "sliding_window": 128,
    }
    assert model_of(base).groups == [FullAttention(16)]
    on = base | {"use_sliding_window": True, "max_window_layers": 3}
    assert model_of(on).groups == [FullAttention(16), SlidingWindow(16, window=128)]
    assert [layers.count for layers in model_of(on).layers] == [3, 1]
    other = base | {"model_type": "new", "use_sliding_window": False}
    assert model_of(other).groups == [FullAttention(16)]


def test_options_of_a_model():
    found = model("llama-3.1-8b", block_size=64, kv_bytes=1)
    assert found.groups == [FullAttention(64)]
    assert found.layers[0].block_bytes == 2 * 8 * 128 * 64 * 32
    assert model("qwen3-next-80b", block_size=1056).groups[0] == FullAttention(1056)
    unknown = {"num_hidden_layers": 2, "num_attention_heads": 1, "hidden_size": 8}
    made = model_of(unknown | {"layers_block_type": ["mamba", "attention"]})
    assert made.layers[1].block_bytes is None
    assert any("size of a state is not known" in note for note in made.notes)


def test_what_configs_of_gemma_leave_out():
    """gemma-3-12b-it names no `head_dim`, and gemma-3-4b-it no heads either."""
    text = {"model_type": "gemma3_text", "num_hidden_layers": 48, "hidden_size": 3840}
    text |= {"sliding_window": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}
    full = model_of({"model_type": "gemma3", "text_config": text}).layers[0]
    assert (full.count, full.block_bytes) == (8, 2 * 8 * 256 * 2 * 16 * 8)
    text |= {"num_hidden_layers": 34, "hidden_size": 2560}
    del text["num_attention_heads"], text["num_key_value_heads"]
    full = model_of({"model_type": "gemma3", "text_config": text}).layers[0]
    assert (full.count, full.block_bytes) == (5, 2 * 4 * 256 * 2 * 16 * 5)


def test_the_indexer_of_a_sparse_model_is_counted():
    values = json.loads((CONFIGS / "deepseek-v3.json").read_text())
    sparse = model_of(values | {"index_topk": 2048, "index_head_dim": 128})
    assert sparse.layers[0].block_bytes == (576 * 2 + 128 + 4) * 16 * 61
    assert "132 bytes of the indexer per token" in sparse.notes


def test_a_pattern_of_windows_of_any_model():
    values = {"model_type": "cohere2", "num_hidden_layers": 8, "num_attention_heads": 2}
    values |= {"hidden_size": 64, "sliding_window": 4096, "sliding_window_pattern": 4}
    assert [layers.count for layers in model_of(values).layers] == [2, 6]
    unused = model_of(values | {"sliding_window": None})
    assert unused.groups == [FullAttention(16)]


@pytest.mark.parametrize(
    "field",
    [
        {"attn_layer_period": 8},  # Jamba
        {"hybrid_override_pattern": "M-M*"},  # Nemotron-H
        {"attn_layer_indices": [1]},  # Bamba
        {"attn_type_list": [0, 1, 0, 1]},  # MiniMax-Text-01
        {"linear_attn_config": {"full_attn_layers": [3]}},  # Kimi Linear
        {"mamba_d_state": 16},  # Falcon-H1
        {"state_size": 128},  # Mamba
    ],
    ids=lambda field: next(iter(field)),
)
def test_layers_that_are_no_attention_do_not_pass_for_it(field):
    base = {"num_hidden_layers": 4, "num_attention_heads": 2, "hidden_size": 64}
    with pytest.raises(ArgumentError, match=f"`layer_types` must name .* `{next(iter(field))}`"):
        model_of(base | field)
    named = base | field | {"layer_types": ["mamba", "attention"] * 2}
    assert [layers.count for layers in model_of(named).layers] == [2, 2]


def test_a_list_of_layers_of_one_kind_is_no_pattern():
    base = {"num_hidden_layers": 4, "num_attention_heads": 2, "hidden_size": 64}
    found = model_of(base | {"attn_type_list": [1] * 4})  # MiniMax-M2
    assert found.groups == [FullAttention(16)]


@pytest.mark.parametrize("field", ["global_head_dim", "num_kv_shared_layers", "swa_head_dim"])
def test_bytes_of_layers_that_differ_are_not_known(capsys, tmp_path, field):
    base = {"num_hidden_layers": 4, "num_attention_heads": 2, "hidden_size": 64}
    found = model_of(base | {field: 2})
    assert [layers.block_bytes for layers in found.layers] == [None]
    assert found.notes[1] == f"the bytes are not known, because layers differ by `{field}`"
    assert model_of(base | {field: 0}).layers[0].block_bytes
    path = tmp_path / "config.json"
    path.write_text(json.dumps(base | {field: 2}))
    assert main(["explain", "--config", str(path), "--tokens", "64"]) == 0
    assert "bytes  saved" not in capsys.readouterr().out


def test_a_folder_is_as_good_as_its_file(tmp_path):
    values = (CONFIGS / "gpt-oss-20b.json").read_text()
    (tmp_path / "config.json").write_text(values)
    assert read_config(tmp_path) == json.loads(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "`num_hidden_layers` must be in the config"),
        ({"num_hidden_layers": "4"}, "`num_hidden_layers` of the config must be an integer"),
        ({"num_hidden_layers": 0}, "`num_hidden_layers` of the config must be from 1 to"),
        ({"num_hidden_layers": 5000}, "`num_hidden_layers` of the config must be at most 4096"),
        (
            {"layer_types": ["full_attention"]},
            "must name as many layers as `num_hidden_layers`, got 1",
        ),
        ({"layer_types": "full"}, "`layer_types` of the config must be a list, got 'full'"),
        ({"layer_types": ["full_attention", "x"]}, "must hold kinds out of full_attention"),
        ({"layer_types": ["sliding_attention"] * 2}, "`sliding_window` must be in the config"),
        ({"num_attention_heads": None}, "`num_attention_heads` must be in the config"),
        ({"layer_types": [{}, []]}, "must hold kinds out of full_attention"),
        ({"hidden_size": 1}, "`hidden_size` of the config must be at least `num_attention_heads`"),
        ({"head_dim": 1 << 41}, "`head_dim` of the config must be from 0 to"),
        ({"compress_ratios": [4]}, "`compress_ratios` of the config must name 2 layers"),
        ({"compress_ratios": [4, 16]}, "`compress_ratios` of the config must hold 0, 1, 4 or 128"),
    ],
)
def test_configs_that_lack_something(tmp_path, capsys, change, message):
    base = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(base | change))
    assert main(["explain", "--config", str(path), "--tokens", "64"]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--block-size", "--kv-bytes"])
def test_options_that_a_config_leaves_no_room_for_are_refused(capsys, option):
    words = ["explain", "--config", str(CONFIGS / "deepseek-v4-like.json"), "--tokens", "4096"]
    assert main([*words, option, "2"]) == 2
    assert f"`{option}` must not be given for a config with `comp" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("dtype", "note"),
    [
        ({}, "2 bytes per number: no dtype is named"),
        ({"torch_dtype": "float3"}, "the dtype 'float3' is not known, see --kv-bytes"),
        ({"torch_dtype": "float3", "dtype": "float32"}, "float32, so 4 bytes per number"),
    ],
)
def test_a_dtype_that_is_not_known_is_said_so(tmp_path, capsys, dtype, note):
    base = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(base | dtype))
    assert main(["explain", "--config", str(path), "--tokens", "64"]) == 0
    assert note in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "must name a readable config.json"), ("[1]", "must hold one JSON object, got list")],
)
def test_files_that_are_no_configs(tmp_path, capsys, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    assert main(["explain", "--config", str(path), "--tokens", "64"]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--config nowhere --full 16", "`--config` says which groups there are, got --full too"),
        ("--full 16 --block-size 16", "`--block-size` is for `--config`"),
        ("--full 16 --kv-bytes 2", "`--kv-bytes` is for `--config`"),
        ("--full 16 --prompt 32", "`--prompt` is for `--retention`, got 32 without it"),
        ("", "`explain` needs `--config` or at least one of --full"),
        ("--full 16 --hash-block 5", "`BLOCK` must be a multiple of `--hash-block`, got 16 and 5"),
        ("--full 16 --alignment 24", "`--alignment` must be a multiple of every group's `BLOCK`"),
        ("--chunked 16,32 --eagle 0", "`--eagle` must be False for ChunkedLocal"),
        (
            f"--config {CONFIGS / 'gpt-oss-20b.json'} --hash-block 5",
            "`--block-size` must be a multiple of `--hash-block`, got 16 and 5",
        ),
    ],
)
def test_wrong_arguments(capsys, words, message):
    assert main(["explain", *words.split(), "--tokens", "64"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--config /", "`--config` must name a readable config.json, got '/config.json': No such"),
        ("--config nowhere", "`--config` must name a readable config.json, got 'nowhere': No such"),
        (
            "--full 16 --svg /nowhere/x.svg",
            "`--svg` must name a file that can be written, got '/nowhere/x.svg': No such file",
        ),
    ],
)
def test_files_that_cannot_be_used(capsys, words, message):
    assert main(["explain", *words.split(), "--tokens", "64"]) == 1
    assert message in capsys.readouterr().err


# --- what masks save


def test_what_a_model_saves(capsys):
    words = ["explain", "--config", str(CONFIGS / "gpt-oss-20b.json"), "--tokens", "4096"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("gpt_oss: bfloat16, so 2 bytes per number; 8 KV heads of 64 numbers")
    assert "group 1: sliding window 128, blocks of 16, 256 blocks; 12 layers, 384 KiB" in printed
    # 256 blocks of both groups; a hit loads all of one and 8 of the other.
    assert [line.split() for line in printed.splitlines()[-5:]] == [
        ["blocks", "bytes", "saved"],
        ["without", "masks", "512", "192", "MiB"],
        ["stored", "512", "192", "MiB", "0%"],
        ["asked", "512", "0%"],
        ["loaded", "264", "99", "MiB", "48%"],
    ]


def test_states_of_a_model_are_drawn_as_stored(capsys):
    words = ["explain", "--config", str(CONFIGS / "qwen3-next-80b.json"), "--tokens", "5440"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "hash blocks of 544" in printed
    assert "  store  ##########  10 of 10\n  lookup ##########  10 of 10\n" in printed
    assert printed.splitlines()[-1].split()[:2] == ["loaded", "11"]


def test_savings_without_sizes_are_of_blocks():
    coord = Coordinator([FullAttention(64), SlidingWindow(16, window=32)], 16)
    table = savings(picture_of(coord, 512), [None, 16])
    assert table == [
        ["", "blocks", "saved"],
        ["without masks", "40", ""],
        ["stored", "24", "40%"],
        ["asked", "24", "40%"],
        ["loaded", "10", "75%"],
    ]


def test_eagle_and_the_hash_block_of_a_model(capsys):
    words = ["explain", "--config", str(CONFIGS / "gpt-oss-20b.json"), "--tokens", "512"]
    assert main([*words, "--eagle", "1", "--hash-block", "8"]) == 0
    printed = capsys.readouterr().out
    assert "hash blocks of 8" in printed
    assert "sliding window 128, blocks of 16, EAGLE" in printed


def test_the_hash_block_is_derived(capsys):
    assert main(["explain", "--full", "64", "--swa", "48,96", "--tokens", "192"]) == 0
    assert "hash blocks of 16, alignment 192" in capsys.readouterr().out


# --- SVG


SVG = "{http://www.w3.org/2000/svg}"


def drawn(tmp_path, words):
    path = tmp_path / "picture.svg"
    assert main(["explain", *words.split(), "--svg", str(path)]) == 0
    return ET.fromstring(path.read_text(encoding="utf-8"))


def test_the_svg_shows_every_block(tmp_path, capsys):
    root = drawn(tmp_path, "--full 64 --swa 16,32 --tokens 512")
    boxes = list(root.iter(f"{SVG}rect"))
    colours = [box.get("class") for box in boxes]
    assert colours.count("store") == 8 + 16
    assert colours.count("lookup") == 8 + 16
    assert colours.count("load") == 8 + 2
    assert colours.count("none") == 16 + 16 + 30
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "group 1: sliding window 32, blocks of 16, 32 blocks" in texts
    assert texts.count("16 of 32") == 2
    width = float(root.get("viewBox").split()[2])
    for box in boxes:
        assert 0 <= float(box.get("x")) <= float(box.get("x")) + float(box.get("width")) <= width


def test_the_svg_reads_on_light_and_on_dark_pages(tmp_path, capsys):
    root = drawn(tmp_path, "--full 64 --tokens 512")
    style = root.find(f"{SVG}style").text
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    for name in ("text", ".none", ".store", ".lookup", ".load"):
        one, other = (
            re.search(rf"{re.escape(name)} {{[^}}]*fill: (#\w+)", s) for s in (light, dark)
        )
        assert one[1] != other[1]
    assert root.find(f"{SVG}title").text.startswith("512 tokens")
    assert root.get("role") == "img"


def test_an_svg_of_many_blocks_stays_small(tmp_path, capsys):
    words = f"--config {CONFIGS / 'deepseek-v4-like.json'} --tokens 1048576"
    root = drawn(tmp_path, words)
    assert (tmp_path / "picture.svg").stat().st_size < 200_000
    assert "deepseek_v4" in [text.text for text in root.iter(f"{SVG}text")]
    assert any(box.get("opacity") for box in root.iter(f"{SVG}rect"))


def test_cells_are_shares_of_their_blocks():
    coord = Coordinator([FullAttention(64), SlidingWindow(16, window=32)], 16)
    picture = picture_of(coord, 1024, start_token=512)
    store, lookup, _ = picture.rows[1]
    assert svg.cells(lookup, 64, 32) == [0.0, 1.0] * 16
    assert svg.cells(lookup, 64, 16) == [0.5] * 16
    assert svg.cells(store, 64, 4) == [0.0, 0.0, 0.5, 0.5]
    full = picture.rows[0][0]
    assert svg.cells(full, 16, 16) == [0.0] * 8 + [1.0] * 8


# --- terminals


def on_terminal(words, columns=100, **env):
    """What a command prints on a terminal of so many columns."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    base = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "TERM")}
    process = subprocess.Popen(
        [sys.executable, "-m", "kvmask", *words.split()],
        stdout=child,
        stderr=child,
        stdin=child,
        env=base | {"TERM": "xterm", "PYTHONPATH": str(ROOT)} | env,
    )
    os.close(child)
    parts = []
    while True:
        try:
            part = os.read(parent, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(parent)
    assert process.wait(60) == 0
    return b"".join(parts).decode().replace("\r\n", "\n")


DRAW = "explain --full 16 --swa 16,32 --tokens 16384"


@pytest.mark.parametrize("columns", [60, 100, 200])
def test_a_terminal_s_width_and_colours(columns):
    printed = on_terminal(DRAW, columns)
    assert "\x1b[32m" in printed
    plain = re.sub(r"\x1b\[\d+m", "", printed)
    pictures = [line for line in plain.splitlines() if re.match(r"  (store|lookup|load) ", line)]
    assert len(pictures) == 6
    assert all(columns - 45 <= len(line) <= columns for line in pictures)


def test_no_colour_where_it_is_not_wanted():
    assert "\x1b" not in on_terminal(DRAW, NO_COLOR="1")
    assert "\x1b" not in on_terminal(DRAW, TERM="dumb")
    assert "\x1b" in on_terminal(DRAW, NO_COLOR="")


def test_pipes_have_a_fixed_width_and_no_colour(capsys):
    assert picture_width(30) == PIPED_WIDTH
    assert not Paint().on
    assert main(DRAW.split()) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "  store  " + "#" * 64 + "  1024 of 1024\n" in printed


class Terminal:
    """A stream that a person looks at."""

    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_progress_is_one_line_that_goes_away(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr("kvmask.cli.terminal.time.monotonic", lambda: next(clock))
    stream = Terminal()
    with Progress("requests", stream, after=2.0) as progress:
        progress(1, 10)
        assert stream.text == ""  # not yet two seconds
        progress(2, 10)
        assert stream.text == "\r\x1b[Krequests: 2 of 10 (20%), 2 s"
        progress(10, 10)
        assert stream.text.endswith("\r\x1b[Krequests: 10 of 10 (100%), 3 s")
    assert stream.text.endswith("3 s\r\x1b[K")
    written = stream.text
    progress(11, 10)  # it is over
    assert stream.text == written


def test_a_step_is_seen_to_be_alive():
    stream = Terminal()
    with Progress("demo", stream, after=0) as progress:
        progress.step("save")
        deadline = time.monotonic() + 30
        while stream.text.count("demo: save") < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
    assert stream.text.count("demo: save") >= 2
    assert not any(thread.name == "kvmask-progress" for thread in threading.enumerate())


def test_lines_of_output_stand_above_the_progress(capsys):
    stream = Terminal()
    with Progress("demo", stream, after=0) as progress:
        progress(1, 2)
        progress.say("a result")
        assert stream.text.endswith("\r\x1b[K")
    assert capsys.readouterr().out == "a result\n"


def test_progress_is_quiet_in_a_pipe(capsys):
    with Progress("requests", after=0) as progress:
        progress(1, 10)
        progress.step("more")
    assert capsys.readouterr() == ("", "")


def test_a_wrong_cell_of_a_config_is_refused():
    with pytest.raises(ArgumentError, match="`head_dim` of the config must be an integer"):
        model_of(
            {
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
                "hidden_size": 8,
                "head_dim": True,
            }
        )


@pytest.mark.store
def test_a_demo_says_how_far_it_is(master):
    pytest.importorskip("numpy")
    from kvmask.cli import demo

    steps = []
    assert demo.run(1024, "numpy", say=lambda line: None, begin=steps.append) == 0
    assert steps == [
        "make tensors",
        "hash tokens",
        "save",
        "lookup, exact",
        "lookup, staged",
        "load",
        "compare bytes",
    ]


@pytest.mark.store
def test_a_demo_is_quiet_in_a_pipe(master, capfd):
    pytest.importorskip("numpy")
    assert main(["demo", "--tokens", "1024", "--memory", "numpy"]) == 0
    out, err = capfd.readouterr()
    assert "\x1b" not in out + err
    assert "demo: " not in out + err
