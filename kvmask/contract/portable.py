"""Portable: a contract as text, as a file and as a pickle."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any, Self

from kvmask.contract.bound import Frozen
from kvmask.contract.memory import LocalShard, check_shards
from kvmask.contract.templates import FilledGroup
from kvmask.errors import ArgumentError
from kvmask.hashing.origin import DigestOrigin
from kvmask.payload import PayloadFacts


class Portable(Frozen):
    """What of a `Contract` reads and writes it. Nothing else derives from it."""

    __slots__ = ()

    fingerprint: str
    _filled: tuple[FilledGroup, ...]

    @property
    def origin(self) -> DigestOrigin | None:
        """What digests of this contract are made with; None when it cannot hash."""
        raise NotImplementedError

    def _knowing(self, known: Mapping[LocalShard, PayloadFacts]) -> Self:
        raise NotImplementedError

    def to_json(self, *, with_seed: bool = False) -> str:
        """The contract as text that another engine can start from.

        Args:
            with_seed: Also write the seed (or the start), which is a secret for some algorithms.

        Raises:
            ArgumentError: A group's `spec` or a key format has no place in JSON, or the seed is not
                known.
        """
        from kvmask.contract.file import encode  # JSON is for few programs: not at import

        return encode(self, with_seed=with_seed)

    @classmethod
    def from_json(cls, text: str, *, seed: str | None = None, start: bytes | None = None) -> Self:
        """The contract that `to_json` wrote.

        Without a seed, in the text or here, the one that `Hashing` takes by default is tried. If
        that is another, the contract can look up by digests and refuses to hash token ids.

        Args:
            text: What `to_json` gave.
            seed: The hash seed, checked against a digest in the text.
            start: Or the start hash itself.

        Raises:
            ArgumentError: The text is no contract, holds a field that is not known, or another
                seed's.
        """
        from kvmask.contract.file import decode

        made, local, fingerprint = decode(text, seed, start)
        contract = cls(**made)
        if contract.fingerprint != fingerprint:
            raise ArgumentError(
                "`fingerprint` must be that of the contract it stands in, "
                f"got {fingerprint!r} and {contract.fingerprint!r}"
            )
        known = {LocalShard(*shard): facts for shard, facts in local.items()}
        check_shards(known, contract._filled)
        return contract._knowing(known)

    def write(self, path: str | PathLike[str], *, with_seed: bool = False) -> None:
        """Write `to_json` to a file, in one step; with the seed only the owner can read it.

        Args:
            path: The file. It is replaced.
            with_seed: As for `to_json`.

        Raises:
            ArgumentError: As for `to_json`.
            OSError: The file cannot be written.
        """
        from kvmask.contract.file import write_text

        write_text(path, self.to_json(with_seed=with_seed), private=with_seed)

    @classmethod
    def read(
        cls, path: str | PathLike[str], *, seed: str | None = None, start: bytes | None = None
    ) -> Self:
        """The contract in a file; see `from_json`.

        Args:
            path: The file.
            seed: The hash seed, as for `from_json`.
            start: The start hash itself, 16 or 32 bytes.

        Raises:
            ArgumentError: As for `from_json`.
            OSError: The file cannot be read.
        """
        from kvmask.contract.file import read_text

        return cls.from_json(read_text(path), seed=seed, start=start)

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickle is for another process of the same engine, so it holds the seed.
        return type(self).from_json, (self.to_json(with_seed=self.origin is not None),)
