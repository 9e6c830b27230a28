"""The switches of vLLM's plugin entry points, without an engine."""

import logging

import pytest

from kvmask import _plugin, engines

SWITCHES = {"KVMASK_VLLM": _plugin.vllm, "KVMASK_ASCEND": _plugin.ascend}


@pytest.fixture
def hooks(monkeypatch):
    """The modules that are waited for."""
    found = []
    monkeypatch.setattr(engines, "after_import", lambda module, _: found.append(module))
    for name in (*SWITCHES, "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"):
        monkeypatch.setenv(name, "")
    return found


@pytest.mark.parametrize("value", ["1", "true", "YES", "on"])
@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_that_is_on(hooks, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    SWITCHES[name]()
    assert any("store" in module and "factory" not in module for module in hooks)


@pytest.mark.parametrize("value", ["", "0", "false", "No", "off", "ja"])
@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_that_is_off_or_says_neither(hooks, monkeypatch, caplog, name, value):
    monkeypatch.setenv(name, value)
    with caplog.at_level(logging.ERROR, "vllm.kvmask"):
        SWITCHES[name]()
    assert not any("store" in module and "factory" not in module for module in hooks)
    said = [r.getMessage() for r in caplog.records]
    assert [f"{name} must be 1 or 0, got 'ja'" in text for text in said] == [True] * (value == "ja")
