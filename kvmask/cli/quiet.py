"""Connecting without the log lines of Mooncake's client."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Hide what Mooncake's client writes to stderr during its set-up, unless the set-up fails."""
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with tempfile.TemporaryFile() as log:
            os.dup2(log.fileno(), 2)
            try:
                yield
            except Exception:
                os.dup2(saved, 2)
                log.seek(0)
                sys.stderr.write(log.read().decode("utf-8", "replace"))
                raise
            finally:
                os.dup2(saved, 2)
    finally:
        os.close(saved)


def quiet_connect(*args: Any, **kwargs: Any) -> Any:
    """`mooncake.connect` without the client's log lines."""
    from kvmask import mooncake

    with hushed():
        return mooncake.connect(*args, **kwargs)


_MASTER = {"master_server_address": "--master"}


def connect_to_ask(
    config: str | None = None, master: str | None = None, timeout: float = 10.0
) -> Any:
    """A store for questions alone: it has no transfer engine and gives the pool no memory.

    Args:
        config: Path of the store's JSON file. None takes the environment, as `mooncake.connect`.
        master: Address of the master, as host:port, instead.
        timeout: Seconds to wait for the master.
    """
    import dataclasses
    import warnings

    from kvmask import mooncake
    from kvmask.cli.usage import UsageError, in_words_of_options, named
    from kvmask.errors import StoreConfigWarning, StoreError

    if master is not None:
        if config is not None:
            raise UsageError(
                f"`--config` and `--master` exclude each other, got {config!r} and {master!r}"
            )
        with named(_MASTER):
            settings = mooncake.StoreConfig.from_mapping(
                {"master_server_address": master, "protocol": "rpc_only"}
            )
    else:
        variables = (mooncake.CONFIG_ENV, mooncake.MASTER_ENV)
        if config is None and not any(map(os.environ.get, variables)):
            raise UsageError(
                f"`--config` or `--master` must be given when ${variables[0]} and ${variables[1]} "
                "are not set, got neither"
            )
        with warnings.catch_warnings():
            # They are about the memory and the transport of an engine's client.
            warnings.simplefilter("ignore", StoreConfigWarning)
            settings = mooncake.load_settings(config)
            settings = dataclasses.replace(
                settings,
                protocol="rpc_only",
                device_name="",
                global_segment_size=0,
                local_buffer_size=0,
            )
    try:
        return quiet_connect(settings, timeout=timeout)
    except StoreError as error:
        if master is None:
            raise
        raise StoreError(in_words_of_options(str(error), _MASTER), error.code) from error
