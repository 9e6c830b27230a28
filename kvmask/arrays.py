"""What memory an array is, read from the array itself.

Three dialects, none of which needs an import: torch tensors (known by their methods), and objects
with `__array_interface__` (NumPy) or `__cuda_array_interface__` (CuPy, Numba). Every answer is
checked before use, because these are plain attributes that any object can have.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from kvmask import _core
from kvmask.errors import LayoutError

_INTERFACES = ("__array_interface__", "__cuda_array_interface__")
# Numbers and raw bytes. Not O, whose elements are pointers, nor t, which counts bits.
_TYPESTR = re.compile(r"[<>=|][biufcV]([0-9]{1,9})")
_MAX_DIMS = 64
_MAX_BASES = 64


@dataclass(frozen=True, slots=True)
class ArrayView:
    """One tensor as bytes. Strides and sizes in bytes, `storage` as (address, bytes)."""

    index: int
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str
    device: str
    storage: tuple[int, int]

    def narrow(self, dim: int, start: int, length: int) -> ArrayView:
        """Keep entries [start, start + length) of one dimension."""
        return replace(
            self,
            address=self.address + start * self.strides[dim],
            shape=(*self.shape[:dim], length, *self.shape[dim + 1 :]),
        )


def check_integer(value: Any, name: str, low: int, high: int) -> int:
    """The value as an int in [low, high)."""
    return _core.check_integer(value, name, low, high - 1, error=LayoutError)


def is_array(obj: Any) -> bool:
    """True for one tensor, which is easily passed where a list of them belongs."""
    return _is_torch(obj) or any(hasattr(type(obj), name) for name in _INTERFACES)


def view_of(obj: Any, index: int) -> ArrayView | None:
    """Describe entry `index` of a list of tensors; None when it has no elements.

    Whatever a foreign object raises while it is read becomes LayoutError.
    """
    name = f"`tensors[{index}]`"
    try:
        if _is_torch(obj):
            return _torch_view(obj, name, index)
        for attribute in _INTERFACES:
            interface = getattr(obj, attribute, None)
            if interface is not None:
                return _interface_view(obj, name, index, attribute, interface)
    except LayoutError:
        raise
    except Exception as error:
        raise LayoutError(
            f"{name} must be a strided array in memory, got {type(obj).__name__}: {error}"
        ) from error
    raise LayoutError(
        f"{name} must be a torch tensor or have `__array_interface__` or "
        f"`__cuda_array_interface__`, got {type(obj).__name__}"
    )


def _is_torch(obj: Any) -> bool:
    return callable(getattr(type(obj), "untyped_storage", None))


def _torch_view(tensor: Any, name: str, index: int) -> ArrayView | None:
    shape = tuple(int(n) for n in tensor.shape)
    if 0 in shape:
        return None
    storage = tensor.untyped_storage()
    itemsize = int(tensor.element_size())
    address = int(tensor.data_ptr())
    if address == 0:
        raise LayoutError(f"{name} must have memory of its own, got address 0 on {tensor.device}")
    return ArrayView(
        index=index,
        address=address,
        shape=shape,
        strides=tuple(int(s) * itemsize for s in tensor.stride()),
        itemsize=itemsize,
        dtype=str(tensor.dtype),
        device=str(tensor.device),
        storage=(int(storage.data_ptr()), int(storage.nbytes())),
    )


def _interface_view(
    obj: Any, name: str, index: int, attribute: str, interface: Any
) -> ArrayView | None:
    address, shape, strides, itemsize = _parse(interface, name)
    if 0 in shape:
        return None
    data = interface["data"]
    if data[1]:
        raise LayoutError(f"{name} must be writable, got a read-only array")
    if address == 0:
        raise LayoutError(f"{name} must have memory of its own, got address 0")
    return ArrayView(
        index=index,
        address=address,
        shape=shape,
        strides=strides,
        itemsize=itemsize,
        dtype=_element_type(obj, interface["typestr"]),
        device="cpu" if attribute == "__array_interface__" else _cuda_device(obj),
        storage=_storage(obj, attribute, name),
    )


def _element_type(obj: Any, typestr: str) -> str:
    """The type string; of raw bytes the name that the array has for them, such as bfloat16.

    Without it, types of one size (float8 of two kinds, structures) would look alike.
    """
    name = str(getattr(obj, "dtype", typestr)) if "V" in typestr else typestr
    return "".join(name.split())


def _parse(interface: Any, name: str) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
    """Address, shape, byte strides and item size of an interface dictionary."""
    if not isinstance(interface, dict):
        raise LayoutError(f"{name} must have a dict as interface, got {type(interface).__name__}")
    missing = {"shape", "typestr", "data"} - interface.keys()
    if missing:
        raise LayoutError(f"{name} must have {sorted(missing)} in its interface, got none")
    if interface.get("mask") is not None:
        raise LayoutError(f"{name} must not be masked, got a mask")
    typestr, shape, data = interface["typestr"], interface["shape"], interface["data"]
    match = _TYPESTR.fullmatch(typestr) if isinstance(typestr, str) else None
    if match is None or int(match[1]) == 0:
        raise LayoutError(f"{name} must have elements of a number type, got typestr {typestr!r}")
    itemsize = int(match[1])
    if not isinstance(shape, tuple) or len(shape) > _MAX_DIMS:
        raise LayoutError(
            f"{name} must have a tuple of at most {_MAX_DIMS} sizes as shape, got {shape!r}"
        )
    sizes = tuple(check_integer(n, f"{name} shape", 0, 1 << 63) for n in shape)
    if not isinstance(data, tuple) or len(data) != 2:
        raise LayoutError(
            f"{name} must have (address, read-only) as data, got {type(data).__name__}"
        )
    address = check_integer(data[0], f"{name} address", 0, 1 << 64)
    strides = interface.get("strides")
    if strides is None:
        steps = [itemsize]
        for n in sizes[:0:-1]:
            steps.append(steps[-1] * n)
        return address, sizes, tuple(steps[::-1])[: len(sizes)], itemsize
    if not isinstance(strides, tuple) or len(strides) != len(sizes):
        raise LayoutError(f"{name} must have one stride per dimension, got {strides!r}")
    limit = 1 << 63
    return (
        address,
        sizes,
        tuple(check_integer(s, f"{name} strides", -limit, limit) for s in strides),
        itemsize,
    )


def _extent(interface: Any, name: str) -> tuple[int, int]:
    """(address, bytes) from the first byte of an array to its last."""
    address, shape, strides, itemsize = _parse(interface, name)
    if 0 in shape:
        return address, 0
    ways = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]  # from first to last entry
    low = sum(way for way in ways if way < 0)
    return address + low, sum(abs(way) for way in ways) + itemsize


def _storage(obj: Any, attribute: str, name: str) -> tuple[int, int]:
    """Memory of the array that a view was cut from: the end of its chain of `base`."""
    extent = _extent(getattr(obj, attribute), name)
    for _ in range(_MAX_BASES):
        obj = getattr(obj, "base", None)
        if _is_torch(obj):  # torch.Tensor.numpy()
            storage = obj.untyped_storage()
            return int(storage.data_ptr()), int(storage.nbytes())
        interface = getattr(obj, attribute, None)
        if interface is None:  # bytes, mmap and the like: the array on top of it is all of it
            break
        extent = _extent(interface, name)
    return extent


def _cuda_device(obj: Any) -> str:
    """The interface does not name the device; CuPy's arrays do, as an object with an `id`."""
    number = getattr(getattr(obj, "device", None), "id", None)
    return "cuda" if number is None else f"cuda:{int(number)}"
