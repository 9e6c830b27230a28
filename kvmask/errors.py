"""Exception types of kvmask.

Every message names the argument, the rule and the values, as in
"`block_size` must be a multiple of `hash_block_size`, got 24 and 16".

Argument errors are also `ValueError`; a broken size rule (something that must divide something
else) is also an `AssertionError`, because that is what connector code written against vLLM expects.

A value can be of any size, a message cannot: its middle is left out where it is long.
"""

# Room for the end of a server's log; a line of a log takes less.
_HEAD, _TAIL = 3000, 900


def _cut(text: str) -> str:
    left = len(text) - _HEAD - _TAIL
    return text if left <= 100 else f"{text[:_HEAD]}... {left} characters ...{text[-_TAIL:]}"


class KVMaskError(Exception):
    """Base of every exception that kvmask raises on purpose."""

    def __init__(self, *args: object) -> None:
        # No generator: CPython 3.12 crashes when memory runs out as it makes one.
        super().__init__(*[_cut(arg) if isinstance(arg, str) else arg for arg in args])


class ArgumentError(KVMaskError, ValueError):
    """An argument breaks a rule."""


class AlignmentError(ArgumentError, AssertionError):
    """Sizes or lengths that must divide each other do not."""


class BlockIdError(ArgumentError):
    """A block id lies outside the tensors, or names the null block."""


class LayoutError(ArgumentError):
    """Tensors, strides or regions that cannot be described safely."""


class KeyFormatError(ArgumentError):
    """Text that a key format cannot carry without ambiguity."""


class HashInputError(ArgumentError):
    """Token ids or extra keys that cannot be hashed exactly."""


class PlanStateError(KVMaskError, RuntimeError):
    """A plan is driven out of order."""


class StoreError(KVMaskError, RuntimeError):
    """The store answered in a way that breaks its contract, or refused to be set up.

    Attributes:
        code: The store's return code, or None when there was none.
    """

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class MissingDependencyError(KVMaskError, ImportError):
    """A package or system library that a feature needs is missing or does not load."""


class KeyFormatWarning(UserWarning):
    """A key in an engine's own format that other metadata could also produce."""


class StoreConfigWarning(UserWarning):
    """A setting of a store that was mended, or that engines read in different ways."""


class UnsupportedReleaseError(KVMaskError, RuntimeError):
    """The installed vLLM differs from the releases kvmask was checked against."""
