"""Memory of a CUDA device for tests, and of this machine in the same words.

What must hold on a device is written once and runs on both: on CPU tensors everywhere, on a device
under the marker `gpu`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_store import FakeStore

# Long enough that a call that does not wait is done before it: about 0.5 s of a device's clock.
SLEEP_CYCLES = 1_000_000_000


def why_no_device() -> str:
    """Why the tests of a device cannot run here; empty when they can."""
    try:
        import torch
    except ImportError:
        return "needs torch"
    if not torch.backends.cuda.is_built():
        return f"needs a CUDA device, and torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "needs a CUDA device: torch.cuda.is_available() is False"
    return ""


def why_no_cuda_client() -> str:
    """Why Mooncake's client cannot reach a device's memory here; empty when it can."""
    for name in ("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
            return ""
    return "needs a build of Mooncake with CUDA: mooncake-transfer-engine, or its -cuda13"


NO_DEVICE = why_no_device()
#: `@both` runs a test with the argument `device` on this machine's memory, and on a device's.
both = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda:0",
            marks=[pytest.mark.gpu, pytest.mark.skipif(bool(NO_DEVICE), reason=NO_DEVICE)],
        ),
    ],
)


class Raw:
    """Bytes at an address of a device, as torch takes them without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            # What was put on other streams is the caller's to wait for, as for a network card.
            "stream": None,
        }


class DeviceStore(FakeStore):
    """A store that reads and writes a device's memory, as a client with CUDA does.

    It waits for no stream of a caller's: it copies on a stream of its own.

    Args:
        device: Device of all addresses; "cpu" for this machine's.
    """

    def __init__(self, device: str, **options: Any) -> None:
        super().__init__(**options)
        self.device = device

    def _read(self, address: int, size: int) -> bytes:
        if self.device == "cpu":
            return super()._read(address, size)
        import torch

        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            host = torch.as_tensor(Raw(address, size), device=self.device).to("cpu")
        stream.synchronize()
        return host.numpy().tobytes()

    def _write(self, address: int, data: bytes) -> None:
        if self.device == "cpu":
            super()._write(address, data)
            return
        import torch

        stream = torch.cuda.Stream(self.device)
        host = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        with torch.cuda.stream(stream):
            torch.as_tensor(Raw(address, len(data)), device=self.device).copy_(host)
        stream.synchronize()


class Work:
    """Work that a device does later, in order: what an engine puts on its stream.

    Args:
        device: Where; on the CPU it is done when somebody waits for it.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.waited = 0
        self._todo: list[Callable[[], Any]] = []
        self._stream: Any = None
        if device != "cpu":
            import torch

            self._stream = torch.cuda.Stream(device)

    def put(self, action: Callable[[], Any]) -> None:
        """Do something after all before it, and not at once."""
        if self._stream is None:
            self._todo.append(action)
            return
        import torch

        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(SLEEP_CYCLES)
            action()

    def event(self) -> Any:
        """What is done when all so far is."""
        if self._stream is None:
            return self
        import torch

        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def stream(self) -> Any:
        """The stream itself, which an engine may hand over as well."""
        return self if self._stream is None else self._stream

    def synchronize(self) -> None:
        """Wait until all is done. On a device the event and the stream have one of their own."""
        self.waited += 1
        todo, self._todo = self._todo, []
        for action in todo:
            action()
        if self._stream is not None:
            self._stream.synchronize()


def random_bytes(device: str, shape: tuple[int, ...], seed: int) -> Any:
    """A tensor of random bytes."""
    import torch

    array = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return torch.from_numpy(array).to(device)


def same(a: Any, b: Any) -> bool:
    """Whether two tensors hold the same bytes, wherever they are."""
    import torch

    return bool(torch.equal(a.cpu(), b.cpu()))
