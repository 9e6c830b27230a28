"""The `kvmask` command under bad numbers, broken streams and signals."""

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvmask import Bitset, mooncake
from kvmask.cli import main
from kvmask.cli.explain import draw_mask

ROOT = Path(mooncake.__file__).parent.parent.parent
HUGE = "99999999999999999998"
DRAW = "explain --full 64 --hash-block 64"


def command(words, *, shell="", wait=True, own_group=False, **env):
    """Run the command in a process of its own, through a shell for its redirections."""
    line = f'exec "$0" -m kvmask {words} {shell}'
    process = subprocess.Popen(
        ["/bin/sh", "-c", line, sys.executable],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A suite that runs in the background of a shell has it ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        process_group=0 if own_group else None,
    )
    if not wait:
        return process
    out, err = process.communicate(timeout=120)
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bench --tokens -5", "--tokens: must be an integer from 1 to 4194304, got -5"),
        (f"bench --tokens {HUGE}", f"got {HUGE}"),
        ("bench --tokens 1_000", "got 1_000"),
        ("bench --repeat 0", "--repeat: must be an integer from 1 to 1000000, got 0"),
        ("bench --repeat -1", "got -1"),
        (f"demo --tokens {HUGE}", f"--tokens: must be an integer from 1 to 1048576, got {HUGE}"),
        ("demo --tokens " + "9" * 5000, "got " + "9" * 40 + "..."),
        (f"{DRAW} --tokens 0", "--tokens: must be an integer from 1 to 4294967296, got 0"),
        (f"{DRAW} --tokens {HUGE}", f"got {HUGE}"),
        (f"{DRAW} --tokens 64 --start -1", "--start: must be an integer from 0"),
        (f"{DRAW} --tokens 64 --prompt 0", "--prompt: must be an integer from 1"),
        (f"{DRAW} --tokens 64 --width 0", "--width: must be an integer from 1"),
        (f"{DRAW} --tokens 64 --retention -1", "--retention: must be an integer from 0"),
        (f"{DRAW} --tokens 64 --alignment 0", "--alignment: must be an integer from 1"),
        (f"{DRAW} --tokens 64 --swa 64,x", "--swa: must be an integer from 1"),
        (f"{DRAW} --tokens 64 --swa {HUGE},5", f"got {HUGE}"),
        ("key --block-size 0", "--block-size: must be an integer from 1"),
        ("key --block-size -5", "got -5"),
        ("key --hash-block 0", "--hash-block: must be an integer from 1"),
        ("key --group -1", "--group: must be an integer from 0"),
    ],
)
def test_numbers_out_of_range_are_wrong_usage(capsys, words, message):
    with pytest.raises(SystemExit) as caught:
        main(words.split())
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bench --tokens 100", "`--tokens` must be at least 256 for 'DeepSeek-V4', got 100"),
        (
            f"{DRAW} --tokens 63",
            "`--tokens` must be at least 64, because hits are multiples of that, got 63",
        ),
        (
            f"{DRAW} --tokens 129 --start 128",
            "`--start` must be less than the 128 tokens that are drawn, got 128",
        ),
        (
            "explain --full 1 --hash-block 1 --tokens 4294967296",
            "`--tokens` must give at most 268435456 blocks, got 4294967296",
        ),
    ],
)
def test_numbers_that_do_not_fit_each_other(capsys, words, message):
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""


def test_explain_says_what_it_leaves_out(capsys):
    assert main(f"{DRAW} --tokens 65".split()) == 0
    assert capsys.readouterr().out.startswith("64 of 65 tokens, hash blocks of 64")


@pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer takes memory of its own"
)
def test_a_picture_of_many_blocks_keeps_them_as_bits():
    """64 million blocks: lists of their bools would take half a gigabyte each."""
    # The peak of the process itself: getrusage would begin with what its parent had.
    code = "import sys; from kvmask.cli import main; main(sys.argv[1:]); "
    code += "print(open('/proc/self/status').read())"
    words = ["explain", "--full", "1", "--swa", "1,5", "--hash-block", "1", "--alignment", "64"]
    words += ["--tokens", str(1 << 26), "--start", "70"]
    text = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    assert f"{(1 << 26) - 70} of {(1 << 26) - 70}" in text
    assert f"store  {'+' * 64}  {(1 << 26) // 16 - 4}" in text
    assert int(re.search(r"VmHWM:\s+(\d+) kB", text)[1]) < 200_000


@pytest.mark.parametrize("width", [1, 3, 64])
@pytest.mark.parametrize("first", [0, 1, 5, 20, 25])
def test_a_suffix_is_drawn_as_if_nothing_lay_before(first, width):
    count = max(0, 20 - first)
    bits = [i % 3 == 0 for i in range(count)]
    whole = [False] * min(first, 20) + bits
    for mask in (bits, Bitset(bits)):
        assert draw_mask(mask, 20, width, first) == draw_mask(whole, 20, width)
    assert draw_mask(None, 20, width, first) == draw_mask(
        [False] * min(first, 20) + [True] * count, 20, width
    )


def test_key_refuses_a_closed_stdin():
    code, out, err = command("key --model m --tokens -", shell="<&-")
    assert (code, out) == (1, "")
    assert err == "kvmask: `--tokens` must be readable, got - and a closed standard input\n"


@pytest.mark.parametrize("words", [f"{DRAW} --tokens 64", "bench --tokens 512 --repeat 1"])
def test_a_full_disk_is_told(words):
    code, _, err = command(words, shell="> /dev/full")
    assert code == 1
    assert err == "kvmask: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("shell", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams(shell):
    code, _, err = command(f"{DRAW} --tokens 64", shell=shell)
    assert (code, err) == (0, "")
    code, _, err = command(f"{DRAW} --tokens 63", shell=shell)
    assert code == 2
    assert "Traceback" not in err


def test_an_encoding_that_lacks_characters(tmp_path):
    ascii_only = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    code, out, err = command("bench --tokens 512 --repeat 1 --shape 'full 16'", **ascii_only)
    assert (code, err) == (0, "")
    assert out.isascii()
    path = tmp_path / "tokens"
    path.write_text(" ".join(map(str, range(16))))
    code, out, err = command(f"key --model modèle --tokens {path}", **ascii_only)
    assert code == 0, err
    assert "mod\\xe8le@tp_rank:0" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"tokens": [1]}', "must hold a JSON list of integers, got an object"),
        ('"1 2"', "must hold a JSON list of integers, got text"),
        ("[1, 2.5]", "must hold integers, got 2.5 at index 1"),
        ("[1, true]", "must hold integers, got True at index 1"),
        ("[1, [2]]", "must hold integers, got [2] at index 1"),
        ("[" * 100_000, "must hold integers"),
        ("[" + "9" * 5000 + "]", "must hold integers"),
        ("1 " + "9" * 5000, "must hold integers, got '999"),
        ("1 2_0", "must hold integers, got '2_0' at index 1"),
        ("1 -2", "from 0 to 2**63 - 1, got -2"),
        ("[1, 18446744073709551616]", "from 0 to 2**63 - 1, got 18446744073709551616"),
    ],
)
def test_token_files(tmp_path, capsys, text, message):
    path = tmp_path / "tokens"
    path.write_text(text)
    words = ["key", "--model", "m", "--seed", "0", "--block-size", "1", "--tokens", str(path)]
    assert main(words) == 1
    err = capsys.readouterr().err
    assert message in err
    assert len(err) < 300


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("key --tokens FILE KEY", "`--tokens` makes keys, and KEY is one to take apart"),
        ("key --salt s KEY", "`--salt` makes keys"),
        ("key --engine sglang --hash-block 1 --tokens FILE", "`--hash-block` must not be given"),
        ("key --engine sglang --seed 0 --tokens FILE", "`--seed` must not be given"),
        ("key --engine lmcache --model m --salt 0 --tokens FILE", "`--salt` must not be given"),
        ("key --engine sglang --adapter a b --tokens FILE", "`--adapter` must not be given"),
    ],
)
def test_options_that_would_do_nothing(tmp_path, capsys, words, message):
    path = tmp_path / "tokens"
    path.write_text(json.dumps(list(range(300))))
    assert main([str(path) if word == "FILE" else word for word in words.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("memory", "extra"), [("torch", "torch"), ("numpy", "numpy")])
def test_the_demo_names_the_extra_that_is_missing(monkeypatch, capsys, memory, extra):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["demo", "--memory", memory]) == 1
    assert f"pip install 'kvmask[{extra}]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_a_command_without_a_traceback(signum, code):
    # A caller that ignores the signal, as `nohup` does, would hand that down.
    before = signal.signal(signum, signal.SIG_DFL)
    try:
        # Empty is as if it were not set: the header must not wait in a buffer for the rows.
        words = "bench --tokens 8192 --repeat 1000000"
        process = command(words, wait=False, PYTHONUNBUFFERED="")
    finally:
        signal.signal(signum, before)
    try:
        assert select.select([process.stdout], [], [], 30)[0], "no line in 30 s"
        assert process.stdout.readline().startswith(b"shape")  # it runs
        process.send_signal(signum)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, err) == (code, b"")


def test_a_signal_handler_of_the_caller_stays(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr("sys.stdin", io.StringIO("1"))
    before = signal.signal(signal.SIGTERM, lambda *args: seen.append(args))
    try:
        assert main(f"{DRAW} --tokens 64".split()) == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert len(seen) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    statuses = []
    thread = threading.Thread(target=lambda: statuses.append(main(f"{DRAW} --tokens 64".split())))
    thread.start()
    thread.join(60)
    assert statuses == [0]
    assert signal.getsignal(signal.SIGTERM) is before


def children(pid):
    """Processes whose parent is `pid`: (id, start time), so that a reused id is another one."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(words[1]) == pid:
            found.append((int(stat.parent.name), words[19]))
    return found


def gone(process, limit=30.0):
    end = time.monotonic() + limit
    while time.monotonic() < end:
        try:
            words = Path(f"/proc/{process[0]}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return True
        if words[19] != process[1] or words[0] == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.store
@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_a_demo_that_is_ended_leaves_nothing_behind(master, tmp_path, signum, code):
    pytest.importorskip("numpy")
    words = "demo --memory numpy --tokens 524288"
    process = command(words, wait=False, TMPDIR=str(tmp_path))
    try:
        assert b"master at" in process.stdout.readline()  # it serves two clients
        started = children(process.pid)
        assert len(started) == 1
        process.send_signal(signum)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == code
    assert b"Traceback" not in err
    assert gone(started[0])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.store
def test_a_demo_that_ctrl_c_ends_still_has_its_master(master):
    """A terminal sends SIGINT to the whole group. The clients then still need the master."""
    pytest.importorskip("numpy")
    process = command("demo --memory numpy --tokens 524288", wait=False, own_group=True)
    try:
        assert b"master at" in process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    assert b"RPC" not in err
