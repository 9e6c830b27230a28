"""Shadow mode: vLLM answers, and kvmask runs beside it on one lookup of N.

``"shadow": N`` in ``kv_connector_extra_config`` puts nothing of kvmask in place. The worker answers
with vLLM's own lookup. After that, a thread of its own lets kvmask answer one request of N, and
compares the hit, the boundaries of its last blocks, and the masks for it. What differs is logged
and counted; so is an error of kvmask's.

The store changes meanwhile. So what differs is asked again of both, and counts only when vLLM's
answer is still the same. In vLLM's statistics a comparison is an operation ``shadow_lookup``: its
keys are those that kvmask asked, and with the status ``error`` something differed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from kvmask._core import MAX_TOKENS
from kvmask.errors import ArgumentError
from kvmask.plans import LookupPlan, PlanTools, drive
from kvmask.plans.lookup import Strategy
from kvmask.vllm import coordinator
from kvmask.vllm.acting import ACTING
from kvmask.vllm.binding import adopt, derived, state
from kvmask.vllm.ending import CALLS, CLOSE_SECONDS
from kvmask.vllm.lookup import result_of, scheme_of_worker
from kvmask.vllm.releases import StockCoordinator, StockWorker, current, logger
from kvmask.vllm.rules import digests_of, is_plain
from kvmask.vllm.seams import stock

# Lookups that wait for their comparison; with more, one is left out.
PENDING = 8
# Differences that are logged; all are counted.
SHOWN = 20


def check_option(value: Any) -> int:
    """Refuse what is no number of lookups; 0 compares none."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TOKENS:
        raise ArgumentError(f"`shadow` must be an integer of at least 0, got {value!r}")
    return value


class Shadow:
    """Compares a worker's lookups with kvmask's.

    Args:
        worker: vLLM's worker, which answers.
        every: One lookup of so many is compared.
        strategy: How kvmask looks up.

    Attributes:
        compared: Lookups that were compared.
        differing: Those of them in which something differed.
        left_out: Lookups that were not compared: too many waited, the core has no rules for their
            groups, or the store changed meanwhile.
    """

    def __init__(self, worker: Any, every: int, strategy: Strategy) -> None:
        self.compared = 0
        self.differing = 0
        self.left_out = 0
        self._worker = worker
        self._every = every
        self._strategy = strategy
        self._tools = PlanTools(hints=strategy == "staged", stats=False, log=None)
        self._seen = 0
        self._jobs: deque[tuple[int, Any, Any]] = deque()
        self._work = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._closed = False

    def take(self, num_tokens: int, block_hashes: Any, answer: Any) -> None:
        """Take a lookup that vLLM has answered; it is compared later, if it is its turn."""
        self._seen += 1
        if self._seen % self._every or self._closed:
            return
        if len(self._jobs) >= PENDING or not self._started():
            self.left_out += 1
            return
        self._jobs.append((num_tokens, block_hashes, answer))
        self._work.release()

    def _started(self) -> bool:
        """Start the thread, unless it runs; False where none can be had."""
        if self._thread is None:
            thread = threading.Thread(target=self._loop, name="kvmask-shadow", daemon=True)
            try:
                thread.start()
            except RuntimeError as e:  # vLLM has its answer all the same
                logger.warning("A lookup is not compared: %s", e)
                return False
            self._thread = thread
        return True

    @property
    def busy(self) -> bool:
        """Whether a comparison waits or runs."""
        return bool(self._jobs)

    def close(self) -> None:
        """End the thread, and wait for what it does, though no longer than vLLM waits for its
        own threads; before the store is closed."""
        self._closed = True
        self._work.release()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)

    def _loop(self) -> None:
        while True:
            self._work.acquire()
            if self._closed:
                self._jobs.clear()
                return
            job = self._jobs[0]
            try:
                self._compare(*job)
            except Exception as e:  # vLLM's own lookup failed
                self.left_out += 1
                logger.debug("A lookup was not compared: %s", e)
            self._jobs.popleft()

    def _compare(self, num_tokens: int, block_hashes: Any, answer: Any) -> None:
        worker, start = self._worker, time.perf_counter()
        scheme = scheme_of_worker(worker) if is_plain(block_hashes) and block_hashes else None
        if scheme is None or num_tokens <= 0 or worker._capacity_only:
            self.left_out += 1
            return
        asked, found = 0, ""
        try:
            asked, own = self._own(scheme, num_tokens, block_hashes)
            if own != answer:
                with CALLS:
                    again = stock("worker.lookup")(worker, num_tokens, block_hashes)
                _, own = self._own(scheme, num_tokens, block_hashes)
                if again != answer:
                    self.left_out += 1
                    return
                if own != answer:
                    found = f"vLLM answers {answer}, kvmask {own}"
            found = found or self._masks(num_tokens, block_hashes)
        except Exception as e:
            found = f"kvmask fails with {type(e).__name__}: {e}"
        self.compared += 1
        self.differing += bool(found)
        worker._record_kv_connector_operation(
            "shadow_lookup",
            time.perf_counter() - start,
            asked,
            status="error" if found else "ok",
            num_failed_keys=asked if found else 0,
        )
        if found and self.differing <= SHOWN:
            logger.error(
                "Shadow: a lookup of %d tokens differs (%d of %d so far): %s",
                num_tokens,
                self.differing,
                self.compared,
                found[:1000],
            )

    def _own(self, scheme: Any, num_tokens: int, block_hashes: Any) -> tuple[int, Any]:
        """How many keys kvmask asks, and what it answers."""
        plan = LookupPlan(
            scheme,
            digests_of(block_hashes),
            num_tokens,
            strategy=self._strategy,
            tools=self._tools,
        )
        with CALLS:
            hit = drive(plan, self._worker.store)
        if hit.cause is not None:
            raise hit.cause
        return hit.asked, result_of(scheme, plan)

    def _masks(self, num_tokens: int, block_hashes: Any) -> str:
        """What differs in the masks for this request; empty when nothing does."""
        coord = self._worker.coord
        if type(coord) is not StockCoordinator or not current().rules:
            return ""
        length = coord.align_lookup_length(
            min(num_tokens, len(block_hashes) * coord.hash_block_size)
        )
        if length <= 0:
            return ""
        for name, args in (
            ("store_mask", (length,)),
            ("lookup_mask", (length,)),
            ("load_mask", (block_hashes, length)),
        ):
            try:
                theirs = stock("coordinator." + name)(coord, *args)
            except Exception:
                continue  # nothing to compare with
            own = getattr(coordinator, name)(coord, *args)
            if not ACTING.on:  # by an error that is in the log, or by the file
                return f"{name} of {length} tokens: kvmask is off" if ACTING.failed else ""
            if _plain(own) != _plain(theirs):
                return f"{name} of {length} tokens: vLLM {_plain(theirs)}, kvmask {_plain(own)}"
        return ""


def _plain(masks: Sequence[Any]) -> list[Any]:
    return [None if mask is None else list(map(bool, mask)) for mask in masks]


def lookup(self: Any, num_tokens: int, block_hashes: Sequence[bytes]) -> Any:
    """As vLLM's; the worker's `Shadow` hears of it."""
    answer = stock("worker.lookup")(self, num_tokens, block_hashes)
    shadow: Shadow | None = state(self).get("shadow")
    if shadow is not None:
        shadow.take(num_tokens, block_hashes, answer)
    return answer


def close(self: Any) -> None:
    """As vLLM's, after the last comparison."""
    shadow: Shadow | None = state(self).get("shadow")
    if shadow is not None:
        shadow.close()
    StockWorker.close(self)


def attach(worker: Any, every: int, strategy: Strategy) -> Shadow | None:
    """Compare a worker's lookups from now on; None where the worker is not vLLM's own.

    Args:
        worker: vLLM's worker, just made.
        every: One lookup of so many is compared.
        strategy: How kvmask looks up.
    """
    own = derived(StockWorker, (("lookup", lookup), ("close", close)))
    if not adopt(worker, StockWorker, own):
        logger.error("Shadow: %s is not vLLM's worker, nothing is compared", type(worker).__name__)
        return None
    logger.info("Shadow: vLLM answers lookups, and kvmask is compared with it in one of %d", every)
    made = Shadow(worker, every, strategy)
    state(worker)["shadow"] = made
    return made
