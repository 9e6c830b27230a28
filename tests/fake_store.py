"""A Mooncake store in memory, for tests: the store's calls with the answers a real one gives.

The answers were measured on Mooncake 0.3.13.post1 over TCP; `test_fake_store.py` runs the same
assertions against this class and against a real store, so that it cannot drift. Memory is read and
written by address, as the real store does.

What a test can script:
    fail(...)       chosen calls or keys answer a code, raise, or answer a list of another length
    hooks           functions run before each call: an eviction, a writer that races
    master_dead     every call answers as with a dead master
    capacity        a pool that fills up
"""

import ctypes
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

OK = 0
NO_AVAILABLE_HANDLE = -200
INVALID_PARAMS = -600
OBJECT_NOT_FOUND = -704
TRANSFER_FAIL = -800
RPC_FAIL = -900

EXIST = "batch_is_exist"
PUT = "batch_put_from_multi_buffers"
GET = "batch_get_into_multi_buffers"
REGISTER = "register_buffer"
UNREGISTER = "unregister_buffer"


class UnregisteredMemory(AssertionError):
    """A transfer touched memory outside every registered range: RDMA would refuse, TCP does not."""


@dataclass
class Call:
    """One call as the store saw it."""

    name: str
    keys: list[str] = field(default_factory=list)
    addresses: list[list[int]] = field(default_factory=list)
    sizes: list[list[int]] = field(default_factory=list)
    config: Any = None
    results: Any = None


@dataclass
class Failure:
    """One scripted answer of `FakeStore.fail`."""

    call: str
    index: int | None
    keys: Callable[[str], bool]
    answer: Any
    times: int | None
    whole: bool


def _uint64(value: Any) -> int:
    """What the real binding takes for an address or a size; TypeError for everything else."""
    number = operator.index(value)
    if not 0 <= number < 1 << 64:
        raise TypeError(f"incompatible function arguments: {number} is no uint64")
    return number


def _rows(rows: Any) -> list[list[int]]:
    return [[_uint64(v) for v in row] for row in rows]


def _keys(keys: Any) -> list[str]:
    if isinstance(keys, str | bytes) or not isinstance(keys, Sequence):
        raise TypeError("incompatible function arguments: keys must be a sequence of str")
    out = []
    for key in keys:
        if not isinstance(key, str | bytes):
            raise TypeError(f"incompatible function arguments: key {key!r}")
        text = key.decode() if isinstance(key, bytes) else key
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a lone surrogate
            raise TypeError("incompatible function arguments: key is not UTF-8") from error
        out.append(text)
    return out


class FakeStore:
    """See the module's docstring.

    Args:
        pool: Objects by key, shared between clients; a new one by default.
        capacity: Bytes the pool holds, or None for no limit.
        require_registration: Raise `UnregisteredMemory` for transfers outside registered ranges.
    """

    def __init__(
        self,
        pool: dict[str, bytes] | None = None,
        *,
        capacity: int | None = None,
        require_registration: bool = True,
    ) -> None:
        self.pool: dict[str, bytes] = {} if pool is None else pool
        self.capacity = capacity
        self.require_registration = require_registration
        self.master_dead = False
        self.closed = False
        self.registered: dict[int, int] = {}
        self.log: list[Call] = []
        self.counts: Counter[str] = Counter()
        self.keys_seen: Counter[str] = Counter()
        self.hooks: list[Callable[[FakeStore, str, list[str]], None]] = []
        self._failures: list[Failure] = []

    # Scripting

    def client(self, **options: Any) -> "FakeStore":
        """Return another client of the same pool, with registrations and log of its own."""
        options.setdefault("capacity", self.capacity)
        options.setdefault("require_registration", self.require_registration)
        return FakeStore(self.pool, **options)

    def fail(
        self,
        call: str,
        answer: Any,
        *,
        index: int | None = None,
        keys: Iterable[str] | Callable[[str], bool] | None = None,
        times: int | None = None,
        whole: bool = False,
    ) -> None:
        """Script an answer.

        Args:
            call: Name of the method, such as `PUT`.
            answer: A code for each chosen key (whose transfer then does not happen), an exception
                to raise, or with `whole` the answer itself or a function from the right answer.
            index: Only the n-th call of this method, from 0; None for every one.
            keys: Only these keys (or those a function picks); None for all.
            times: How many calls it holds for; None for ever.
            whole: `answer` replaces the whole answer of the call.
        """
        if callable(keys):
            chosen = keys
        else:
            wanted = None if keys is None else set(keys)
            chosen = lambda key: wanted is None or key in wanted  # noqa: E731
        self._failures.append(Failure(call, index, chosen, answer, times, whole))

    def short_answer(self, call: str, drop: int = 1, index: int | None = None) -> None:
        """Make a call answer `drop` results too few."""
        self.fail(call, lambda results: results[: len(results) - drop], index=index, whole=True)

    def evict(self, keys: Iterable[str]) -> None:
        """Take objects out behind the client's back."""
        for key in keys:
            self.pool.pop(key, None)

    def calls(self, name: str) -> list[Call]:
        """Return the logged calls of one method."""
        return [call for call in self.log if call.name == name]

    # The store's calls

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        call = Call(EXIST, _keys(keys))
        return self._run(call, self._exist_one)

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: Any = None,
    ) -> list[int]:
        call = Call(PUT, _keys(keys), _rows(all_buffer_ptrs), _rows(all_sizes), config)
        fits = len(call.addresses) == len(call.sizes) == len(call.keys) and all(
            len(a) == len(s) for a, s in zip(call.addresses, call.sizes, strict=True)
        )
        return self._run(call, self._put_one if fits else self._refuse_one)

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        call = Call(GET, _keys(keys), _rows(all_buffer_ptrs), _rows(all_sizes))
        fits = len(call.addresses) == len(call.sizes) == len(call.keys)
        return self._run(call, self._get_one if fits else self._refuse_one)

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        start, length = _uint64(buffer_ptr), _uint64(size)
        call = Call(REGISTER, addresses=[[start]], sizes=[[length]])
        return self._run_single(call, lambda: self._register(start, length))

    def unregister_buffer(self, buffer_ptr: int) -> int:
        start = _uint64(buffer_ptr)
        call = Call(UNREGISTER, addresses=[[start]])
        return self._run_single(
            call, lambda: INVALID_PARAMS if self.registered.pop(start, None) is None else OK
        )

    def put(self, key: str, value: bytes, config: Any = None) -> int:
        (key,) = _keys([key])
        call = Call("put", [key])

        def write() -> int:
            if not key or not value:
                return INVALID_PARAMS
            return self._store(key, bytes(value))

        return self._run_single(call, write)

    def get(self, key: str) -> bytes:
        return b"" if self.master_dead else self.pool.get(key, b"")

    def is_exist(self, key: str) -> int:
        return RPC_FAIL if self.master_dead else int(key in self.pool)

    def get_size(self, key: str) -> int:
        if self.master_dead:
            return RPC_FAIL
        return len(self.pool[key]) if key in self.pool else OBJECT_NOT_FOUND

    def remove_all(self, force: bool = False) -> int:
        """Remove everything. Leases are not modelled: only the forced call is like the real one."""
        if self.master_dead:
            return RPC_FAIL
        removed = len(self.pool)
        self.pool.clear()
        return removed

    def health_check(self) -> int:
        return 1 if self.closed else 2 if self.master_dead else 0

    def close(self) -> int:
        self.closed = True
        return OK

    # How they answer

    def _before(self, call: Call) -> list[Failure]:
        if self.closed:
            raise AssertionError(f"{call.name} on a closed store: the real one may crash")
        index = self.counts[call.name]
        self.counts[call.name] += 1
        self.keys_seen.update(call.keys)
        self.log.append(call)
        for hook in self.hooks:
            hook(self, call.name, call.keys)
        rules = []
        for rule in self._failures:
            if rule.call == call.name and rule.times != 0 and rule.index in (None, index):
                if rule.times is not None:
                    rule.times -= 1
                rules.append(rule)
        return rules

    def _run(self, call: Call, one: Callable[[int, str, Call], int]) -> list[int]:
        rules = self._before(call)
        results = []
        for i, key in enumerate(call.keys):
            code = None
            for rule in rules:
                if not rule.whole and rule.keys(key):
                    if isinstance(rule.answer, BaseException):
                        raise rule.answer
                    code = rule.answer
            if code is None:
                code = RPC_FAIL if self.master_dead else one(i, key, call)
            results.append(code)
        answer: Any = results
        for rule in rules:
            if rule.whole:
                if isinstance(rule.answer, BaseException):
                    raise rule.answer
                answer = rule.answer(answer) if callable(rule.answer) else rule.answer
        call.results = answer
        return answer

    def _run_single(self, call: Call, action: Callable[[], int]) -> int:
        code = None
        for rule in self._before(call):
            if isinstance(rule.answer, BaseException):
                raise rule.answer
            code = rule.answer
        call.results = action() if code is None else code
        return call.results

    def _exist_one(self, i: int, key: str, call: Call) -> int:
        return int(key in self.pool)

    def _refuse_one(self, i: int, key: str, call: Call) -> int:
        return INVALID_PARAMS

    def _put_one(self, i: int, key: str, call: Call) -> int:
        parts = [(a, s) for a, s in zip(call.addresses[i], call.sizes[i], strict=True) if s]
        if not key or not parts:
            return INVALID_PARAMS
        self._check_registered(parts)
        if key in self.pool:
            return OK  # the first value stays
        return self._store(key, b"".join(self._read(a, s) for a, s in parts))

    def _get_one(self, i: int, key: str, call: Call) -> int:
        if key not in self.pool:
            return OBJECT_NOT_FOUND
        value = self.pool[key]
        # Only as many buffers as there are sizes are used; the rest is ignored.
        parts = [(a, s) for a, s in zip(call.addresses[i], call.sizes[i], strict=False) if s]
        room = sum(s for _, s in parts)
        if room != len(value):
            return INVALID_PARAMS if room < len(value) else TRANSFER_FAIL
        self._check_registered(parts)
        offset = 0
        for address, size in parts:
            self._write(address, value[offset : offset + size])
            offset += size
        return offset

    def _read(self, address: int, size: int) -> bytes:
        return ctypes.string_at(address, size)

    def _write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def _store(self, key: str, value: bytes) -> int:
        if key not in self.pool:
            used = sum(map(len, self.pool.values())) if self.capacity is not None else 0
            if self.capacity is not None and used + len(value) > self.capacity:
                return NO_AVAILABLE_HANDLE
            self.pool[key] = value
        return OK

    def _register(self, start: int, length: int) -> int:
        if not start or not length:
            return INVALID_PARAMS
        for other, size in self.registered.items():
            if start < other + size and other < start + length:
                return INVALID_PARAMS
        self.registered[start] = length
        return OK

    def _check_registered(self, parts: list[tuple[int, int]]) -> None:
        if not self.require_registration:
            return
        for address, size in parts:
            if not any(
                start <= address and address + size <= start + length
                for start, length in self.registered.items()
            ):
                raise UnregisteredMemory(f"[{address:#x}, +{size}) is not registered")
