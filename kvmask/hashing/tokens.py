"""What token ids may be given as, for type checkers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if sys.version_info >= (3, 12):
    from collections.abc import Buffer
elif TYPE_CHECKING:
    from typing_extensions import Buffer
else:
    Buffer = bytes | bytearray | memoryview


class Array(Protocol):
    """An array or tensor: NumPy's and torch's have these."""

    def __len__(self) -> int:
        """Its items."""
        ...

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """It as NumPy's array."""
        ...


#: A sequence of int, or what `hash_tokens` reads in place. Its items are checked when it is read.
Tokens: TypeAlias = Sequence[int] | Buffer | Array
