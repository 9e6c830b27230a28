"""`kvmask doctor`: checks of this machine, one line each. One puts an object and gets it back."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from kvmask import mooncake
from kvmask.errors import KVMaskError, StoreError

LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1", "libnuma.so.1")
DISTRIBUTIONS = (
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda",
)
SIZE = 4096

Check = tuple[str, bool, str]


def _python() -> str:
    return f"{platform.python_version()} on {platform.machine()}, {sys.executable}"


def _extension() -> str:
    import kvmask

    coord = kvmask.Coordinator(
        [kvmask.FullAttention(64), kvmask.SlidingWindow(16, window=32)], hash_block_size=16
    )
    mask = coord.store_mask(128)[1]
    if mask is None or mask.indices() != [2, 3, 6, 7]:
        raise KVMaskError(f"the core's mask must be 2-3,6-7, got {mask!r}")
    return f"kvmask {kvmask.__version__}, {kvmask._core.__file__}"


def _libraries() -> str:
    missing = []
    for name in LIBRARIES:
        try:
            ctypes.CDLL(name)
        except OSError as error:
            missing.append(str(error))
    if missing:
        raise KVMaskError(f"{'; '.join(missing)}; {mooncake.APT_HINT}")
    return ", ".join(LIBRARIES)


def _package() -> str:
    mooncake.import_store()
    found = []
    for name in DISTRIBUTIONS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    if len(found) > 1:  # they install the same files, so one overwrites the other
        raise KVMaskError(f"only one build of Mooncake may be installed, got {', '.join(found)}")
    return found[0] if found else "imported, from no installed distribution"


def _program() -> str:
    path = mooncake.find_master()
    if path is None:
        raise KVMaskError(f"no mooncake_master program found; {mooncake.PIP_HINT}")
    return str(path)


def round_trip(store: Any) -> str:
    """Put one object into a store, find it and get it back.

    Raises:
        StoreError: A call returned a wrong result, or the bytes differ.
    """
    key = f"kvmask-doctor/{uuid.uuid4().hex}"
    source = ctypes.create_string_buffer(os.urandom(SIZE), SIZE)
    target = ctypes.create_string_buffer(SIZE)
    here, there = ctypes.addressof(source), ctypes.addressof(target)
    registered = []
    try:
        for address in (here, there):
            _expect("register_buffer", store.register_buffer(address, SIZE), 0)
            registered.append(address)
        _expect("put", store.batch_put_from_multi_buffers([key], [[here]], [[SIZE]]), [0])
        _expect("exists", store.batch_is_exist([key, key + "/absent"]), [1, 0])
        _expect("get", store.batch_get_into_multi_buffers([key], [[there]], [[SIZE]]), [SIZE])
        if source.raw != target.raw:
            raise StoreError(f"get must return the bytes that were put, key {key}")
    finally:
        for address in registered:
            store.unregister_buffer(address)
    return f"{SIZE} bytes put, found and got back"


def _expect(call: str, answer: Any, right: Any) -> None:
    if answer != right:
        code = answer[0] if isinstance(answer, list) and answer else answer
        name = mooncake.code_name(code) if isinstance(code, int) and code < 0 else ""
        raise StoreError(
            f"{call} must answer {right}, got {answer} {name}".rstrip(),
            code if isinstance(code, int) else None,
        )


def run(
    config: str | None = None, connect: Callable[..., Any] = mooncake.connect
) -> Iterator[Check]:
    """Run all checks in order. A check runs even if earlier ones failed.

    Args:
        config: Path of the store's configuration. None takes the path from $MOONCAKE_CONFIG_PATH.
            If that is not set, a local master is started.
        connect: Called instead of `mooncake.connect`, with the same arguments.

    Yields:
        The name of the check, whether it passed, and what was found or is wrong.
    """
    path = config or os.environ.get(mooncake.CONFIG_ENV) or None
    settings: mooncake.StoreConfig | None = None

    def configuration() -> str:
        nonlocal settings
        if path is None:
            return f"${mooncake.CONFIG_ENV} is not set: a local master is used"
        settings = mooncake.StoreConfig.from_file(path)
        return f"{path}: master {settings.master_server_address}, {settings.protocol}"

    def trip() -> str:
        if path is not None and settings is None:
            raise KVMaskError("the configuration is wrong, see above")
        with ExitStack() as stack:
            if settings is None:
                store = connect(stack.enter_context(mooncake.local_master()))
            else:
                # Use little memory, because the engines on this machine need theirs.
                segment = min(settings.global_segment_size, 16 * mooncake.MIB)
                store = connect(settings, segment_bytes=segment, buffer_bytes=16 * mooncake.MIB)
            stack.callback(store.close)
            return round_trip(store)

    checks: list[tuple[str, Callable[[], str]]] = [
        ("python", _python),
        ("extension", _extension),
        ("libraries", _libraries),
        ("mooncake", _package),
        ("master", _program),
        ("config", configuration),
        ("round trip", trip),
    ]
    for name, check in checks:
        try:
            yield name, True, check()
        except (KVMaskError, OSError) as error:
            yield name, False, str(error)
