"""The one protocol of all plans: take the next call, make it, feed the answer back.

A driver is one loop::

    while (call := plan.next_call()) is not None:
        try:
            answer = call.run(store)
        except Exception as error:
            plan.fail(error)
        else:
            plan.feed(answer)
    result = plan.result

A call has a name and arguments. The names are those of Mooncake's store, and `WAIT`, which waits
for an event of the caller's and asks the store nothing. An asynchronous driver runs the calls
elsewhere and waits for them; the loop stays the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

EXISTS = "batch_is_exist"
PUT = "batch_put_from_multi_buffers"
GET = "batch_get_into_multi_buffers"
WAIT = "wait"

_new = tuple.__new__


class Existence(Protocol):
    """The one call of a store that lookups make."""

    def batch_is_exist(self, keys: list[str], /) -> Sequence[int]:
        """As `Store.batch_is_exist`.

        Args:
            keys: The keys.

        Returns:
            One integer per key.
        """
        ...


class Store(Protocol):
    """The calls that kvmask makes of a store.

    ``mooncake.store.MooncakeDistributedStore`` has them all. Addresses and sizes are in bytes, one
    row per key.
    """

    def batch_is_exist(self, keys: list[str], /) -> Sequence[int]:
        """1 for every key that the store has; renews its lease.

        Args:
            keys: The keys.

        Returns:
            One integer per key. Anything but 1 counts as not present.
        """
        ...

    def batch_put_from_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]], /, *config: Any
    ) -> Sequence[int]:
        """Write every key from its pieces of memory; one code per key.

        Args:
            keys: The keys, none of them twice.
            addresses: Per key where its pieces lie, in registered memory.
            sizes: Per key the bytes of its pieces.
            config: What `StorePolicy.put_arguments` gives.

        Returns:
            One integer per key, as the policy reads it.
        """
        ...

    def batch_get_into_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]], /
    ) -> Sequence[int]:
        """Read every key into its pieces of memory; the bytes read, or a code, per key.

        Args:
            keys: The keys, none of them twice.
            addresses: Per key where its pieces lie, in registered memory.
            sizes: Per key the bytes of its pieces.

        Returns:
            One integer per key, as the policy reads it.
        """
        ...

    def register_buffer(self, address: int, size: int, /) -> int:
        """Make memory known to the transport; 0 when it worked.

        Args:
            address: Where it begins.
            size: Its bytes.

        Returns:
            A code.
        """
        ...

    def unregister_buffer(self, address: int, /) -> int:
        """Undo `register_buffer`; 0 when it worked.

        Args:
            address: Where it begins.

        Returns:
            A code.
        """
        ...


class Guard(Protocol):
    """Stands between plans and the store's puts and gets: bounce memory, seals.

    `kvmask.guard.StoreGuard` is one. A `KVTransfer` makes it and puts it into its tools.
    """

    @property
    def isolates(self) -> bool:
        """Whether the store never touches the engine's blocks."""
        ...

    @property
    def seals(self) -> bool:
        """Whether objects carry a checksum."""
        ...

    def cut(self, cut: Any, num_bytes: list[int], sizes: Any, /) -> tuple[Any, list[int]]:
        """Cut keys into calls with a policy's ``cut_put`` or ``cut_get``; see `StorePolicy`.

        Args:
            cut: The policy's method.
            num_bytes: Bytes per key.
            sizes: Sizes of the pieces of memory, per key.

        Returns:
            As the policy's method.
        """
        ...

    def run(self, store: Any, name: str, args: tuple[Any, ...], /) -> Sequence[int]:
        """Make a put or get of the engine's blocks; the answer is as if there were no guard.

        Args:
            store: The store.
            name: `PUT` or `GET`.
            args: The arguments of the call. The keys come first.

        Returns:
            One integer per key.
        """
        ...


class Call(NamedTuple):
    """One call that a plan wants to be made.

    Attributes:
        name: `EXISTS`, `PUT`, `GET` or `WAIT`.
        args: Its positional arguments. The keys come first.
        num_bytes: Bytes that a put or get moves; 0 otherwise.
        guard: What makes a put or get in place of the store, or None. Addresses and sizes are then
            not those that the store sees, so make the call by `run`.
    """

    name: str
    args: tuple[Any, ...]
    num_bytes: int = 0
    guard: Guard | None = None

    def run(self, store: Any) -> Any:
        """Make the call, and return the answer that the plan is to be fed with.

        Args:
            store: A connected store (`Store`).

        Returns:
            The store's answer; of a wait what ``synchronize`` returned.
        """
        if self.guard is not None:
            return self.guard.run(store, self.name, self.args)
        if self.name == WAIT:
            return self.args[0].synchronize()
        return getattr(store, self.name)(*self.args)


def new_call(
    name: str, args: tuple[Any, ...], num_bytes: int = 0, guard: Guard | None = None
) -> Call:
    """A Call, made without the detour of a NamedTuple's constructor."""
    return _new(Call, (name, args, num_bytes, guard))


class Plan(Protocol):
    """What `LookupPlan`, `SavePlan` and `LoadPlan` have in common."""

    def next_call(self) -> Call | None:
        """The next call, or None when all is done.

        Raises:
            PlanStateError: The answer to the last call is missing.
        """
        ...

    def feed(self, answer: Any) -> Any:
        """Take the answer to the last call. Saves and loads return the failures it brought.

        Args:
            answer: What `Call.run` returned.

        Raises:
            PlanStateError: There was no call, or it was answered already.
        """
        ...

    def fail(self, error: BaseException) -> None:
        """Take the exception that the last call raised.

        Args:
            error: The exception.

        Raises:
            PlanStateError: There was no call, or it was answered already.
            BaseException: ``error`` itself when it says that the call was wrong (`TypeError`, a
                missing method) or that the program is to end. It then has an attribute
                ``partial_result``: what the plan had done by then.
        """
        ...

    @property
    def result(self) -> Any:
        """What became of the plan.

        Raises:
            PlanStateError: `next_call` has not returned None yet.
        """
        ...


def drive(plan: Plan, store: Any) -> Any:
    """Run a plan against a store, call by call, and return its result.

    Args:
        plan: The plan.
        store: A connected store (`Store`).

    Returns:
        What `Plan.result` is: a `Hit`, a `SaveResult` or a `LoadResult`.

    Raises:
        PlanStateError: Somebody else drives the plan, too.
        BaseException: What a call raised, when it says that the call was wrong or that the program
            is to end.
    """
    while (call := plan.next_call()) is not None:
        try:
            answer = call.run(store)
        except BaseException as error:
            plan.fail(error)
        else:
            plan.feed(answer)
    return plan.result


def is_wrong_call(error: BaseException) -> bool:
    """Whether an exception says that the call itself was wrong, not that the store failed.

    What is no ``Exception`` (an interrupt, a cancelled task) belongs to the caller too.
    """
    if not isinstance(error, BaseException):
        raise TypeError(f"`error` must be an exception, got {type(error).__name__}")
    wrong = (TypeError, AttributeError, NameError, NotImplementedError, AssertionError)
    return isinstance(error, wrong) or not isinstance(error, Exception)


def check_event(event: Any) -> None:
    """Refuse what cannot be waited for.

    Raises:
        TypeError: It has no ``synchronize``.
    """
    if not callable(getattr(event, "synchronize", None)):
        raise TypeError(
            f"`event` must be a CUDA event or stream with synchronize(), got {type(event).__name__}"
        )
