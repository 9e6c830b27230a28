"""Fixtures shared by the tests. A real store is used where the machine has the master program."""

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from kvmask import mooncake

# Machines differ in speed and a test never asserts a time; derandomized runs repeat on CI.
SLOW = [HealthCheck.too_slow]
settings.register_profile("kvmask", deadline=None, suppress_health_check=SLOW)
settings.register_profile("ci", deadline=None, suppress_health_check=SLOW, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "kvmask")

# Mooncake's client logs each set-up line by line; its errors stay.
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")


@pytest.fixture(scope="session")
def master() -> Iterator[mooncake.LocalMaster]:
    """One Mooncake master for the whole run; skips where there is none to run."""
    if mooncake.find_master() is None:
        pytest.skip("no mooncake_master program on this machine")
    try:
        mooncake.import_store()
    except ImportError as error:
        pytest.skip(str(error))
    with mooncake.local_master() as running:
        yield running


@pytest.fixture(scope="session")
def session_store(master: mooncake.LocalMaster) -> Iterator[Any]:
    """A connected store for the whole run: connecting and closing takes seconds."""
    store = mooncake.connect(master)
    yield store
    store.close()


@pytest.fixture
def live_store(session_store: Any) -> Iterator[Any]:
    """The connected store, emptied afterwards."""
    yield session_store
    session_store.remove_all(True)


@pytest.fixture(autouse=True)
def kvmask_acts(request: pytest.FixtureRequest) -> Iterator[None]:
    """kvmask acts to the end of a test: one in which it gave up compares vLLM with vLLM.

    A test that provokes an internal error has the mark `gives_up`.
    """
    yield
    module = sys.modules.get("kvmask.vllm.acting")
    if module is not None:
        failed = module.ACTING.failed
        module.ACTING.reset()
        assert failed == (request.node.get_closest_marker("gives_up") is not None)
