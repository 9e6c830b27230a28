"""Where a lookup is answered: in the worker, or by a store client that the scheduler can use.

A worker in the scheduler's process is asked without a hop. Else the scheduler has a store client of
its own: one that moves no bytes (Mooncake's protocol "rpc_only") and is set up in some 30 ms. It
needs the key prefixes of the worker, which vLLM's handshake brings. Where neither can be, the
worker answers over vLLM's own connection.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmask import mooncake
from kvmask.errors import StoreConfigWarning
from kvmask.plans import Breaker, Scheme
from kvmask.plans.lookup import Strategy
from kvmask.plans.metrics import TransferStats
from kvmask.vllm.acting import ACTING
from kvmask.vllm.asking import Over
from kvmask.vllm.local import FORGET, pack
from kvmask.vllm.lookup import Groups, Lookups, answer, lookups_of, result_of
from kvmask.vllm.outages import breaker_of
from kvmask.vllm.releases import (
    LOOKUP_MSG,
    HandshakeMetadata,
    current,
    decode_lookup_response,
    is_stock_coordinator,
)
from kvmask.vllm.rules import Rules, is_plain, rules_of
from kvmask.vllm.wire import PROBE, SEND_ALL, Sent

# Seconds for the probes of the servers before the scheduler's own client is set up.
CONNECT_TIMEOUT = 2.0


@dataclass(frozen=True)
class Handshake(HandshakeMetadata):  # type: ignore[misc]
    """What the worker of rank 0 tells the scheduler.

    Attributes:
        prefixes: Per group the key prefix of every rank namespace that must hold a block.
        block_sizes: Tokens per block of every group.
        store: Settings that reach the store: metadata server, master and tenant.
    """

    prefixes: tuple[tuple[str, ...], ...]
    block_sizes: tuple[int, ...]
    store: dict[str, str] = field(repr=False)  # an address may hold a password


def handshake_of(worker: Any) -> Handshake | None:
    """What a worker tells the scheduler; None for one that answers no lookups."""
    prefixes = getattr(worker, "_lookup_key_prefixes", None)
    if prefixes is None or getattr(worker, "lookup_server", None) is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StoreConfigWarning)
        config = mooncake.load_settings(None)
    return Handshake(
        tuple(map(tuple, prefixes)),
        tuple(db.block_size for db in worker.token_dbs),
        {
            "metadata_server": config.metadata_server,
            "master_server_address": config.master_server_address,
            "tenant_id": config.tenant_id,
        },
    )


class OverTheWire:
    """The worker, asked over vLLM's own connection.

    Args:
        client: vLLM's lookup client.
        thrifty: Only digests that the worker lacks travel, if its lookups are kvmask's; else all
            of a request, as vLLM's protocol has it.
    """

    breaker: Breaker | None = None  # the worker has it

    def __init__(self, client: Any, *, thrifty: bool = False) -> None:
        self._client = client
        self._thrifty = thrifty
        self._sent: Sent | None = None

    def ask(
        self, num_tokens: int, local_tokens: int, block_hashes: Sequence[bytes]
    ) -> tuple[Any, Over | None]:
        """See `kvmask.vllm.asking.Place`."""
        number = pack(num_tokens, local_tokens)
        if self._thrifty:
            self._thrifty = False
            if self._send(PROBE, ()).hit_length == SEND_ALL:
                self._sent = Sent()
        if self._sent is not None and block_hashes:
            result = self._send(*self._sent.message(number, block_hashes))
            if result.hit_length == SEND_ALL:
                self._sent.clear()
                result = self._send(*self._sent.message(number, block_hashes))
            return result, None
        if not local_tokens:
            return self._client._lookup(num_tokens, block_hashes), None
        return self._send(number, block_hashes), None

    def _send(self, number: int, block_hashes: Sequence[bytes]) -> Any:
        size = len(block_hashes[0]) if block_hashes else 0
        frames = (
            LOOKUP_MSG,
            number.to_bytes(max(8, (number.bit_length() + 7) // 8), "big"),
            size.to_bytes(2, "big"),
            b"".join(block_hashes),
        )
        self._client.socket.send_multipart(frames, copy=False)
        return decode_lookup_response(self._client.socket.recv())

    def forget(self) -> None:
        """See `kvmask.vllm.asking.Place`."""
        if self._sent is not None:
            self._sent.clear()
        if decode_lookup_response is not None:  # a worker whose answers are kvmask's to read
            self._send(FORGET, ())

    def close(self) -> None:
        """The connection is vLLM's."""


class InProcess:
    """The worker, in the scheduler's process.

    Args:
        worker: It is not kept alive.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = weakref.ref(worker)

    @property
    def breaker(self) -> Breaker | None:
        """See `kvmask.vllm.asking.Place`."""
        store = getattr(self._worker(), "store", None)
        return None if store is None else breaker_of(store)

    def ask(
        self, num_tokens: int, local_tokens: int, block_hashes: Sequence[bytes]
    ) -> tuple[Any, Over | None]:
        """See `kvmask.vllm.asking.Place`."""
        worker = self._worker()
        if worker is None or worker.store is None:  # the engine is being shut down
            return current().lookup_result(0), None
        return answer(worker, num_tokens, local_tokens, block_hashes)

    def forget(self) -> None:
        """See `kvmask.vllm.asking.Place`."""
        worker = self._worker()
        if worker is not None and worker.store is not None:
            lookups_of(worker).forget()

    def close(self) -> None:
        """The store is the worker's."""


class OwnClient:
    """A store client of the scheduler's own.

    Args:
        store: Connected; closed with this.
        groups: The engine's groups.
        record: Counts a call, as vLLM's workers count theirs.
        strategy: ``"staged"`` or ``"exact"``.
        worker: What answers instead when kvmask is turned off.
        renew: What hits make worth keeping is renewed.
        stats: Counters of its lookups.

    Attributes:
        lookups: What its lookups share.
    """

    def __init__(
        self,
        store: Any,
        groups: Groups,
        record: Any,
        strategy: Strategy,
        worker: OverTheWire,
        *,
        renew: bool = False,
        stats: TransferStats | None = None,
    ) -> None:
        self.lookups = Lookups(store, record, strategy, renew=renew, stats=stats)
        self._worker = worker
        self._groups = groups
        self._known: tuple[Rules | None, Scheme | None] = (None, None)

    @property
    def breaker(self) -> Breaker | None:
        """See `kvmask.vllm.asking.Place`."""
        return self.lookups.tools.breaker

    def scheme(self) -> Scheme | None:
        """The groups as lookup plans take them; None when they are not the core's to answer."""
        coord = self._groups.coord
        rules = rules_of(coord) if is_stock_coordinator(coord) else None
        if rules is None:
            return None
        if self._known[0] is not rules:
            self._known = rules, self._groups.scheme(rules)
        return self._known[1]

    def ask(
        self, num_tokens: int, local_tokens: int, block_hashes: Sequence[bytes]
    ) -> tuple[Any, Over | None]:
        """See `kvmask.vllm.asking.Place`."""
        if not ACTING.on:
            return self._worker.ask(num_tokens, 0, block_hashes)
        try:
            return self._ask(num_tokens, local_tokens, block_hashes)
        except Exception as e:
            ACTING.trip("a lookup in the scheduler", e)
            return self._worker.ask(num_tokens, 0, block_hashes)

    def _ask(
        self, num_tokens: int, local_tokens: int, block_hashes: Sequence[bytes]
    ) -> tuple[Any, Over | None]:
        scheme = self.scheme()
        if scheme is None or num_tokens <= 0 or not block_hashes or not is_plain(block_hashes):
            return current().lookup_result(0), None
        plan, over = self.lookups.run(scheme, block_hashes, num_tokens, local_tokens)
        return result_of(scheme, plan), over

    def forget(self) -> None:
        """See `kvmask.vllm.asking.Place`."""
        self.lookups.forget()

    def close(self) -> None:
        """Close the client."""
        self.lookups.close()
        self.lookups.store.close()


def connect(handshake: Handshake) -> Any:
    """A store client that moves no bytes.

    Raises:
        KVMaskError: The settings do not do for it, or a server does not answer.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StoreConfigWarning)
        config = mooncake.StoreConfig.from_mapping(
            {**handshake.store, "protocol": "rpc_only", "mode": "standalone-store"}
        )
        return mooncake.connect(config, timeout=CONNECT_TIMEOUT)


_lock = threading.Lock()
_workers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def offer(path: str, worker: Any) -> None:
    """Let schedulers of this process find a worker by the path of its lookup server."""
    with _lock:
        _workers[path] = worker


def worker_at(path: str) -> Any:
    """The worker of this process whose lookup server has a path, or None."""
    with _lock:
        return _workers.get(path)
