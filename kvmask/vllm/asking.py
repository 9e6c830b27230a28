"""How the scheduler asks for a request's hit: with a deadline, and without a hop where it can.

`Asking` takes the place of the scheduler's lookup client and has its methods. A lookup runs on a
thread of its own, and the scheduler waits for it no longer than the deadline. Past that the request
goes on as a miss. The answer that comes late only teaches hints. While the thread still waits for
it, further lookups are misses at once. Which store client answers is the business of
`kvmask.vllm.places`.

A request's digests are neither copied nor joined: a lookup reads those that it needs from the
request's own list. (Only where the worker answers they travel, see `kvmask.vllm.wire`.)
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from kvmask.plans import Breaker
from kvmask.vllm.ending import CALLS
from kvmask.vllm.releases import current, logger

# While the store is known not to answer, the lookup that tries again holds the scheduler for at
# most this part of the deadline.
PROBE = 0.1
# What follows a lookup is done when no other has come for so many seconds: the scheduler, which
# waits for the answer, gets the interpreter first. So many lookups may wait for what follows them.
SETTLE = 0.001
UNSETTLED = 16

Over = Callable[[], None]


class Place(Protocol):
    """What answers lookups."""

    @property
    def breaker(self) -> Breaker | None:
        """The breaker of the store that is asked; None where another process has it."""
        ...

    def ask(
        self, num_tokens: int, local_tokens: int, block_hashes: Sequence[bytes]
    ) -> tuple[Any, Over | None]:
        """Answer a lookup.

        Returns:
            (what vLLM's worker answers, what is to be done once the scheduler has it).
        """
        ...

    def forget(self) -> None:
        """Drop what is remembered of the store's content."""
        ...

    def close(self) -> None:
        """Release what this place holds. No lookup is running."""
        ...


class _Job:
    """Something for the thread to do, whose result another thread waits for."""

    __slots__ = (
        "_done",
        "_result",
        "_task",
        "began",
        "dropped",
        "error",
        "finished",
        "local_tokens",
        "settled",
    )

    def __init__(
        self,
        task: Callable[[], tuple[Any, Over | None]],
        local_tokens: int = 0,
        *,
        settled: bool = False,
    ) -> None:
        self._task: Any = task
        self._done = threading.Lock()
        self._done.acquire()
        self._result: Any = None
        self.error: Exception | None = None
        self.local_tokens = local_tokens
        self.settled = settled  # it begins when what follows the earlier jobs is done
        self.began: float | None = None
        self.dropped = False
        self.finished = False

    def drop(self) -> None:
        """It is not to be run."""
        self.dropped = True
        self._task = None  # it holds the request's digests

    def run(self) -> Over | None:
        """Do it, and let the thread that waits go on.

        Returns:
            What is to be done once that thread has the result.
        """
        task, over = self._task, None
        self._task = None
        try:
            self._result, over = task()
        except Exception as e:
            # Its traceback holds this frame, and through it this job: a cycle with the digests.
            self.error = e.with_traceback(None)
        del task
        self.finished = True
        self._done.release()
        return over

    def wait(self, seconds: float = -1) -> bool:
        """Whether the job is finished within this many seconds; -1 waits for it."""
        if not self.finished and self._done.acquire(timeout=seconds):
            self._done.release()
        return self.finished

    def result(self) -> Any:
        """What came of it; raises what the task raised."""
        if self.error is not None:
            raise self.error
        return self._result


class _Thread:
    """Does one job after another. It starts with the first one."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # of what follows
        self._stopped = False
        self._last: Callable[[], None] | None = None
        self.running: _Job | None = None

    def put(self, job: _Job) -> None:
        """Have a job done.

        Raises:
            RuntimeError: No thread can be started; the next job tries again.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._loop, name="KVMaskLookup", daemon=True)
            thread.start()
            self._thread = thread
        self._jobs.put(job)

    def drop(self, job: _Job) -> None:
        """Leave a job undone that has not begun."""
        with self._lock:
            if job.began is None:
                job.drop()

    def stop(self, last: Callable[[], None]) -> None:
        """End the thread after what it does now.

        Args:
            last: Is called when no job runs any more: here, or by the thread at its end.
        """
        with self._lock:
            self._stopped = True
            busy = self.running is not None
            if busy:
                self._last = last
        self._jobs.put(None)
        if not busy:
            last()

    def _loop(self) -> None:
        overs: deque[Over] = deque()  # what follows the lookups that are done
        while (job := self._next(overs)) is not None:
            with self._lock:
                if self._stopped:
                    break
                if job.dropped:
                    continue
                job.began = time.monotonic()
                self.running = job
            while job.settled and overs:
                _settle(overs.popleft())
            over = job.run()
            with self._lock:
                self.running = None
            if over is not None:
                overs.append(over)
            del job, over  # the thread may wait long for the next one
        for over in overs:
            _settle(over)
        if self._last is not None:
            try:
                with CALLS:
                    self._last()
            except Exception as e:
                logger.warning("The end of the lookups failed: %s", e)

    def _next(self, overs: deque[Over]) -> _Job | None:
        """The next job; None ends the thread. While there is none, do what follows earlier ones."""
        while overs:
            if len(overs) <= UNSETTLED:
                try:
                    return self._jobs.get(timeout=SETTLE)
                except Empty:
                    pass
            _settle(overs.popleft())
        return self._jobs.get()


def _settle(over: Over) -> None:
    try:
        over()
    except Exception as e:
        logger.exception("What follows a lookup failed: %s", e)


class Asking:
    """The scheduler's lookups. It has the methods of vLLM's lookup client.

    One thread, the scheduler's, may call it.

    Args:
        client: vLLM's lookup client; the connection to the worker stays its own.
        choose: Makes what answers lookups; called before the first one.
        deadline: Seconds that a lookup may hold the scheduler.

    Attributes:
        late: Lookups that went on as misses because no answer had come in time.
    """

    def __init__(self, client: Any, choose: Callable[[], Place], deadline: float) -> None:
        self.client = client
        self.late = 0
        self._choose = choose
        self._place: Place | None = None
        self._deadline = deadline
        self._thread = _Thread()
        self._jobs: dict[str, _Job] = {}
        self._stuck: _Job | None = None  # is past its deadline, and still running
        self._local_tokens = 0

    @property
    def place(self) -> Place:
        """What answers lookups."""
        if self._place is None:
            self._place = self._choose()
        return self._place

    def choose_again(self) -> None:
        """Choose what answers lookups anew: more is known of the worker."""
        if self._thread.running is None and not self._jobs:
            before, self._place = self._place, self._choose()
            if before is not None and before is not self._place:
                before.close()

    def tell(self, local_tokens: int) -> None:
        """How many tokens the engine holds of the request that is looked up next."""
        self._local_tokens = local_tokens

    def lookup(
        self, req_id: str, num_tokens: int, block_hashes: Sequence[bytes], non_block: bool = False
    ) -> Any:
        """The hit of a request, as vLLM's worker answers it.

        Args:
            req_id: Id of the request.
            num_tokens: Its tokens.
            block_hashes: Its digests. They are read while the lookup runs.
            non_block: Return None while there is no answer, instead of waiting for it.
        """
        job = self._jobs.get(req_id)
        if job is None:
            if self._is_stuck():
                return self._miss(req_id)
            place, local = self.place, self._local_tokens
            job = _Job(lambda: place.ask(num_tokens, local, block_hashes), local)
            try:
                self._thread.put(job)
            except RuntimeError as e:
                logger.error("The lookup of request %s is not made: %s", req_id, e)
                return _nothing()
            self._jobs[req_id] = job
        if non_block:
            if not job.finished:
                if not self._overdue():
                    return None
                self._give_up(job)
        elif not job.wait(self._patience()):
            self._give_up(job)
        del self._jobs[req_id]
        if not job.finished:
            return self._miss(req_id)
        if job.error is not None:
            logger.error("The lookup of request %s failed: %s", req_id, job.error)
            return _nothing()
        if self._local_tokens < job.local_tokens:
            return _nothing()  # the engine has let go of blocks that the hit rests on
        return job.result()

    def _patience(self) -> float:
        """Seconds to wait for an answer."""
        breaker = self.place.breaker
        if breaker is not None and breaker.open:
            return self._deadline * PROBE
        return self._deadline

    def _overdue(self) -> bool:
        """Whether the lookup that is running has run for longer than the deadline."""
        job = self._thread.running
        began = None if job is None else job.began
        return began is not None and time.monotonic() - began > self._deadline

    def _is_stuck(self) -> bool:
        """Whether the thread still waits for an answer that is late."""
        if self._stuck is not None and self._stuck.finished:
            self._stuck = None
        return self._stuck is not None

    def _give_up(self, job: _Job) -> None:
        """Wait no longer: the lookup runs on, or is not begun at all."""
        self._thread.drop(job)
        running = self._thread.running
        if running is not None and not running.finished:
            if self._stuck is None:
                logger.warning(
                    "A lookup in the Mooncake store has taken more than %d ms: requests go on as "
                    "misses until it answers",
                    round(self._patience() * 1e3),
                )
            self._stuck = running

    def _miss(self, req_id: str) -> Any:
        self.late += 1
        logger.debug("Request %s goes on without its lookup, which is late", req_id)
        return _nothing()

    def discard(self, req_id: str) -> None:
        """Drop the lookup of a request that is no more."""
        job = self._jobs.pop(req_id, None)
        if job is not None:
            self._thread.drop(job)

    def reset(self) -> bool:
        """Empty the store by way of the worker, and forget what is remembered of it.

        Lookups that the scheduler has yet to hear of are made anew when it asks again: what they
        found is gone.
        """
        place, client = self.place, self.client
        for job in self._jobs.values():
            self._thread.drop(job)
        self._jobs.clear()

        def task() -> tuple[Any, Over | None]:
            place.forget()
            return client._reset(), None

        job = _Job(task, settled=True)
        self._thread.put(job)
        job.wait()
        return bool(job.result())

    def close(self) -> None:
        """As vLLM's client. What a running lookup needs is closed at the end of that lookup."""
        place, client = self._place, self.client

        def last() -> None:
            if place is not None:
                place.close()
            client.close()

        self._thread.stop(last)


def _nothing() -> Any:
    return current().lookup_result(0)
