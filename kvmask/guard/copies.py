"""Copies between the blocks of an engine and a chunk: by address on the host, by torch else."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Protocol

from kvmask import _core
from kvmask.errors import ArgumentError, MissingDependencyError
from kvmask.guard.memory import Chunk
from kvmask.layout import KVLayout

Rows = Sequence[list[int]]


class Copies(Protocol):
    """Copies the pieces of blocks to their offsets in a chunk and back."""

    def open(self, chunk: Chunk) -> None:
        """Prepare a new chunk."""
        ...

    def gather(self, addresses: Rows, sizes: Rows, chunk: Chunk, offsets: list[int]) -> None:
        """Copy blocks to offsets in a chunk. When it returns, the bytes are there."""
        ...

    def scatter(self, addresses: Rows, sizes: Rows, chunk: Chunk, offsets: list[int]) -> None:
        """Copy from offsets in a chunk to blocks. When it returns, the bytes are there."""
        ...


def copies_for(layouts: Sequence[KVLayout]) -> Copies:
    """The copies for the device of some layouts.

    Raises:
        ArgumentError: The layouts do not say where they are, or nothing here can copy there.
        MissingDependencyError: They are on a device, and torch is not installed.
    """
    devices = {layout.device for layout in layouts if layout.storages}
    if devices <= {"cpu"}:
        return HostCopies()
    if len(devices) > 1 or None in devices:
        raise ArgumentError(
            "`layouts` must be on one device, and say which (`device` of `from_regions`), "
            f"got {sorted(map(str, devices))}"
        )
    return TorchCopies(layouts, str(devices.pop()))


class HostCopies:
    """Copies in host memory, without the GIL."""

    def open(self, chunk: Chunk) -> None:
        """Nothing to do."""

    def gather(self, addresses: Rows, sizes: Rows, chunk: Chunk, offsets: list[int]) -> None:
        """From the blocks' pieces into the chunk."""
        _core.gather(list(addresses), list(sizes), [chunk.address + offset for offset in offsets])

    def scatter(self, addresses: Rows, sizes: Rows, chunk: Chunk, offsets: list[int]) -> None:
        """From the chunk to the blocks' pieces."""
        _core.scatter(list(addresses), list(sizes), [chunk.address + offset for offset in offsets])


class TorchCopies:
    """Copies between a device and the host by torch, on a stream of their own.

    A plan has waited for its event before a block is first touched, so the stream need not wait
    for another. After the copies of a call the host waits for an event behind them.

    Args:
        layouts: The layouts. Those that torch tensors own are reached through their storages,
            others on a CUDA device by their addresses.
        device: Their device.

    Raises:
        ArgumentError: The memory belongs to no torch tensor, and the device is not CUDA.
        MissingDependencyError: torch is not installed.
    """

    def __init__(self, layouts: Sequence[KVLayout], device: str) -> None:
        try:
            import torch
        except ImportError as error:
            raise MissingDependencyError(
                f"bounce memory for {device} needs torch: {error}"
            ) from error
        self._torch: Any = torch
        self._device = device
        self._cuda = device.startswith("cuda")
        self._stream = self._torch.cuda.Stream(device=device) if self._cuda else None
        flats: dict[int, Any] = {}
        for layout in layouts:
            for owner in layout.owners:
                if callable(getattr(type(owner), "untyped_storage", None)):
                    storage = owner.untyped_storage()
                    if storage.nbytes():
                        flat = torch.empty(0, dtype=torch.uint8, device=owner.device)
                        flats[storage.data_ptr()] = flat.set_(storage, 0, (storage.nbytes(),), (1,))
        for layout in layouts:
            for address, size in layout.storages:
                if not any(a <= address and address + size <= a + len(f) for a, f in flats.items()):
                    flats[address] = self._by_address(address, size)
        self._starts = sorted(flats)
        self._flats = [flats[start] for start in self._starts]

    def _by_address(self, address: int, size: int) -> Any:
        """Device memory that is no torch tensor's, as bytes."""
        if not self._cuda:
            raise ArgumentError(
                f"`layouts` on {self._device!r} must be made from torch tensors for bounce memory, "
                f"got {size} bytes at {address:#x} that belong to none"
            )
        return self._torch.as_tensor(_Raw(address, size), device=self._device)

    def _piece(self, address: int, size: int) -> Any:
        i = bisect_right(self._starts, address) - 1
        start = address - self._starts[i]
        return self._flats[i][start : start + size]

    def open(self, chunk: Chunk) -> None:
        """Lock a chunk into memory, so that a CUDA device copies without a copy in between."""
        if not self._cuda:
            return
        runtime = self._torch.cuda.cudart()
        if int(runtime.cudaHostRegister(chunk.address, chunk.size, 0)) == 0:
            chunk.unlock = lambda: runtime.cudaHostUnregister(chunk.address)

    def gather(self, addresses: Rows, sizes: Rows, chunk: Chunk, offsets: list[int]) -> None:
        """From the blocks' pieces into the chunk."""
        self._copy(addresses, sizes, chunk, offsets, out=False)

    def scatter(self, addresses: Rows, sizes: Rows, chunk: Chunk, offsets: list[int]) -> None:
        """From the chunk to the blocks' pieces."""
        self._copy(addresses, sizes, chunk, offsets, out=True)

    def _copy(
        self, addresses: Rows, sizes: Rows, chunk: Chunk, offsets: list[int], *, out: bool
    ) -> None:
        torch = self._torch
        host = torch.frombuffer(chunk.view, dtype=torch.uint8)
        with torch.no_grad(), torch.cuda.stream(self._stream):
            for row, lengths, offset in zip(addresses, sizes, offsets, strict=True):
                at = offset
                for address, size in zip(row, lengths, strict=True):
                    piece, here = self._piece(address, size), host[at : at + size]
                    if out:
                        piece.copy_(here, non_blocking=self._cuda)
                    else:
                        here.copy_(piece, non_blocking=self._cuda)
                    at += size
            if self._stream is not None:
                done = torch.cuda.Event()
                done.record(self._stream)
                done.synchronize()


class _Raw:
    """Device memory by address, in the form that torch takes from others."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
