"""Which attention kind a cache manager is, told by the source of its functions.

Names do not tell: a subclass may keep the rules of a kind or change them. The digest of the
function that searches hits names the kind, and the mask rule must be that kind's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvmask.engines.sources import source_digest


class Kinds:
    """Recognises cache managers by class, once each.

    Args:
        search: Digest of `find_longest_cache_hit` to kind.
        masks: Kind to the digests of `reachable_block_mask` that are its rule.
        wrappers: Digests of searches that only call the next class's.
        more: Kind to further functions and their digests.
    """

    def __init__(
        self,
        search: Mapping[str, str],
        masks: Mapping[str, frozenset[str]],
        wrappers: frozenset[str] = frozenset(),
        more: Mapping[str, Mapping[str, frozenset[str]]] | None = None,
    ) -> None:
        self._search = dict(search)
        self._masks = dict(masks)
        self._wrappers = wrappers
        self._more = dict(more or {})
        self._known: dict[type, str | None] = {}

    def kind_of(self, manager: type) -> str | None:
        """The kind, or None when its rules are not known."""
        if manager not in self._known:
            self._known[manager] = self._find(manager)
        return self._known[manager]

    def _find(self, manager: type) -> str | None:
        kind = None
        for cls in manager.__mro__:
            function = vars(cls).get("find_longest_cache_hit")
            digest = "" if function is None else source_digest(function)
            if function is None or digest in self._wrappers:
                continue
            kind = self._search.get(digest)
            break
        if kind is None or _digest(manager, "reachable_block_mask") not in self._masks[kind]:
            return None
        for name, digests in self._more.get(kind, {}).items():
            if _digest(manager, name) not in digests:
                return None
        return kind


def _digest(cls: type, name: str) -> str:
    function: Any = getattr(cls, name, None)
    return "" if function is None else source_digest(function)
