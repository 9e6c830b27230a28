"""Features: what an adapter replaces together, and where a release allows it.

A feature fits a release when all seams that it replaces or relies on are as that release has them.
What does not fit stays the engine's own, and one line of the log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kvmask.engines.seams import Seams
from kvmask.errors import UnsupportedReleaseError


@dataclass(frozen=True, slots=True)
class Feature:
    """What is replaced together.

    Attributes:
        name: For the log.
        replaces: Seams that get kvmask's functions. A release may lack some of them.
        relies: Seams that those call, or answer for.
        needs: Features without which this one has nothing to work with.
    """

    name: str
    replaces: tuple[str, ...]
    relies: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Placed:
    """What fits the engine.

    Attributes:
        release: The release whose seams the engine has.
        features: What fits it, in the table's order, with the seams that the release has.
        stock: Feature to what is the matter with it.
        absent: Features that kvmask does not have for this release.
    """

    release: str
    features: tuple[Feature, ...]
    stock: Mapping[str, list[str]]
    absent: tuple[str, ...] = ()

    def has(self, name: str) -> bool:
        """Whether a feature fits."""
        return any(feature.name == name for feature in self.features)

    @property
    def seams(self) -> frozenset[str]:
        """The seams to replace."""
        return frozenset(name for feature in self.features for name in feature.replaces)

    def line(self, engine: str, version: str) -> str:
        """The line of the log: what is in place and what stays."""
        text = (
            f"kvmask is in place in {engine} {version}, whose functions are those of "
            f"{self.release}: {', '.join(f.name for f in self.features)}"
        )
        for name, changed in self.stock.items():
            more = "; ..." if len(changed) > 3 else ""
            text += f". Stock stays: {name} ({'; '.join(changed[:3])}{more})"
        return text


class Table:
    """Digests of the seams of every known release.

    Args:
        releases: Oldest first.
        text: One line per seam: its name, then per release its digest, ``-`` where nothing relies
            on it, or several digests joined by ``|``. With ``release:digest``, a digest holds from
            that release to the next one named. An indented line continues the one before it.
        features: What can be replaced.
        offers: Release to the names of the features that kvmask has for it; without it, those of
            whose seams the release lacks none.
    """

    def __init__(
        self,
        releases: Iterable[str],
        text: str,
        features: Iterable[Feature] = (),
        offers: Mapping[str, frozenset[str]] | None = None,
    ) -> None:
        self.releases = tuple(releases)
        self.features = tuple(features)
        self._offers = offers
        self._rows: dict[str, list[str]] = {}
        for line in text.strip().replace("\n ", " ").splitlines():
            name, *digests = line.split()
            self._rows[name] = self._held(digests) if ":" in digests[0] else digests

    def _held(self, changes: list[str]) -> list[str]:
        """One digest per release, from those with a digest of their own."""
        from_release = dict(change.split(":") for change in changes)
        row, now = [], "-"
        for release in self.releases:
            now = from_release.get(release, now)
            row.append(now)
        return row

    def digests(self, release: str, feature: Feature | None = None) -> dict[str, str]:
        """Seam to digest in a release: all that matter there, or those of one feature."""
        column = self.releases.index(release)
        known = {name: row[column] for name, row in self._rows.items() if row[column] != "-"}
        if feature is None:
            return known
        return {n: known[n] for n in (*feature.replaces, *feature.relies) if n in known}

    def _exists(self, release: str, feature: Feature) -> bool:
        """Whether kvmask has this feature for a release."""
        if self._offers is not None:
            return feature.name in self._offers[release]
        known = self.digests(release)
        return all(name in known for name in feature.replaces)

    def _fit(self, seams: Seams, release: str) -> Placed:
        """What of one release fits."""
        fits: list[Feature] = []
        stock: dict[str, list[str]] = {}
        absent = []
        for feature in self.features:
            if not self._exists(release, feature):
                absent.append(feature.name)
                continue
            known = self.digests(release, feature)
            names = {f.name for f in fits}
            changed = seams.differences(known)
            changed += [f"it needs {n}, which stays stock" for n in feature.needs if n not in names]
            if changed:
                stock[feature.name] = changed
            else:
                # Another module's name for a seam has no digest of its own.
                kept = tuple(n for n in feature.replaces if n in known or n not in self._rows)
                fits.append(replace(feature, replaces=kept))
        return Placed(release, tuple(fits), stock, tuple(absent))

    def fit(self, seams: Seams, engine: str, version: str) -> Placed:
        """The release that most features fit; of equals, the one with least amiss, then the newest.

        Raises:
            UnsupportedReleaseError: None fits any; the message names what changed.
        """
        best: Placed | None = None
        for release in reversed(self.releases):
            found = self._fit(seams, release)
            if best is None or _rank(found) > _rank(best):
                best = found
        if best is None or not best.features:
            what = (
                sorted({text for changed in best.stock.values() for text in changed})
                if best
                else []
            )
            shown = "; ".join(what[:8]) + ("; ..." if len(what) > 8 else "")
            raise UnsupportedReleaseError(
                f"kvmask was checked against {engine} {', '.join(self.releases)}; "
                f"in the installed {version} {shown}"
            )
        return best


def _rank(placed: Placed) -> tuple[int, int]:
    return len(placed.features), -sum(map(len, placed.stock.values()))


def log_placed(logger: logging.Logger, placed: Placed, engine: str, version: str) -> None:
    """Write the one line."""
    write = logger.warning if placed.stock else logger.info
    write("%s", placed.line(engine, version))


def log_left(logger: logging.Logger, names: Iterable[str]) -> None:
    """Name the functions that kvmask cannot take out, because others lie over them.

    Args:
        logger: Where.
        names: What `Seams.restore` returned.
    """
    for name in names:
        logger.warning("kvmask cannot leave %s: somebody else has replaced it since", name)
