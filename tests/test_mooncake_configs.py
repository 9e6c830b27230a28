"""Configurations of the kinds that people have, each with what kvmask makes of it.

The files in data/mooncake_configs were written for this test. Each is of a kind that a public
guide, chart, test or report has; hosts and sizes are examples. A file holds `settings` (what a JSON
file has), `text` (a file that is no JSON object) or `environment`. `outcome` is "taken", "mended"
(used, with a warning) or "refused" (before a client exists). `warns` and `names` are the keys that
warnings and the error must name; `expect` are values afterwards.
"""

import base64
import contextlib
import http.server
import json
import os
import threading
import warnings
from pathlib import Path

import pytest

from kvmask import mooncake
from kvmask.errors import ArgumentError, StoreConfigWarning, StoreError
from kvmask.mooncake import probe

FILES = sorted((Path(__file__).parent / "data" / "mooncake_configs").glob("*.json"))
CASES = [json.loads(path.read_text(encoding="utf-8")) for path in FILES]


def load(case, tmp_path, monkeypatch):
    """Load one case as `connect` does; returns the settings and the warnings."""
    for name in list(os.environ):
        if name.startswith("MOONCAKE_"):
            monkeypatch.delenv(name)
    for name, value in case.get("environment", {}).items():
        monkeypatch.setenv(name, value)
    if "environment" not in case:
        path = tmp_path / "mooncake.json"
        text = case["text"] if "text" in case else json.dumps(case["settings"])
        path.write_bytes(text.encode())
        monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(path))
    told, error, config = [], None, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            config = mooncake.load_settings(None)
        except ArgumentError as refused:
            error = str(refused)
    for warning in caught:
        assert warning.category is StoreConfigWarning
        told.append(str(warning.message))
    return config, told, error


def names(texts):
    """The keys in backticks that begin the messages."""
    return sorted({text.split("`")[1] for text in texts})


@pytest.mark.parametrize("case", CASES, ids=[path.stem for path in FILES])
def test_a_configuration_of_this_kind(case, tmp_path, monkeypatch):
    config, told, error = load(case, tmp_path, monkeypatch)
    assert names(told) == sorted(case.get("warns", []))
    if case["outcome"] == "refused":
        assert config is None
        quoted = error.split("`")
        # What is wrong with the file as a whole names the file, and no setting.
        assert (quoted[1] if len(quoted) > 1 else "source") in case["names"]
        return
    assert error is None
    assert bool(told) == (case["outcome"] == "mended")
    values = vars(config)
    for name, value in case.get("expect", {}).items():
        assert values[name] == value, name


def test_there_are_enough_of_each():
    assert len(FILES) >= 90
    counts = dict.fromkeys(("taken", "mended", "refused"), 0)
    for case in CASES:
        counts[case["outcome"]] += 1
    assert min(counts.values()) >= 20


@pytest.mark.parametrize(
    ("metadata", "master"),
    [
        ("redis://me:SECRET@127.0.0.1:9/0", "127.0.0.1:9"),
        ("etcd://me:SECRET@127.0.0.1:9", "127.0.0.1:9"),
        ("http://me:SECRET@127.0.0.1:99999/metadata", "127.0.0.1:9"),
        ("P2PHANDSHAKE", "me:SECRET@127.0.0.1:9"),
        ("P2PHANDSHAKE", "etcd://me:SECRET@127.0.0.1:9"),
    ],
)
def test_no_message_holds_a_password(metadata, master):
    with pytest.raises(ArgumentError, match=r"\*\*\*@127\.0\.0\.1") as caught:
        mooncake.StoreConfig(metadata, master, protocol="tcp")
    assert "SECRET" not in str(caught.value)


class Metadata(http.server.BaseHTTPRequestHandler):
    """A metadata server that wants a password."""

    def do_PUT(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        wanted = "Basic " + base64.b64encode(b"me:SECRET").decode()
        self.send_response(200 if self.headers.get("Authorization") == wanted else 401)
        self.end_headers()

    do_DELETE = do_PUT

    def log_message(self, *values):
        pass


def test_a_password_reaches_the_metadata_server_alone():
    with http.server.HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for secret, answer in (("SECRET", None), ("WRONG", "401")):
            url = f"http://me:{secret}@127.0.0.1:{server.server_port}/metadata"
            config = mooncake.StoreConfig(url, "127.0.0.1:9", protocol="tcp")
            assert secret not in repr(config)
            assert "***@127.0.0.1" in repr(config)
            if answer is None:
                probe._ask_http(url, 20)
            else:
                with pytest.raises(StoreError, match=answer):
                    probe._ask_http(url, 20)
        server.shutdown()


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("local_buffer_sise", "local_buffer_size"),
        ("master_server_adress", "master_server_address"),
        ("Protocol", "protocol"),
    ],
)
def test_a_key_that_looks_misspelt_is_named(key, name):
    values = {"master_server_address": "h:1", "metadata_server": "P2PHANDSHAKE", "protocol": "tcp"}
    values[key] = values.pop(name, 1 << 30)
    # A master that is missing is refused after the warning.
    with warnings.catch_warnings(record=True) as caught, contextlib.suppress(ArgumentError):
        warnings.simplefilter("always")
        mooncake.StoreConfig.from_mapping(values)
    assert f"'{key}' is not read: `{name}` may be meant" in [str(w.message) for w in caught]


@pytest.mark.parametrize(
    "key", ["enable_ssd_offload", "alloc_in_same_node", "metadata_server_auth", 7]
)
def test_other_keys_are_ignored(key, recwarn):
    values = {"master_server_address": "h:1", "metadata_server": "P2PHANDSHAKE", "protocol": "tcp"}
    mooncake.StoreConfig.from_mapping(values | {key: "1"})
    assert not recwarn.list
