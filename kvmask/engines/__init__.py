"""What the adapters of engines share. It imports no engine."""

from kvmask.engines.after_import import after_import
from kvmask.engines.features import Feature, Placed, Table
from kvmask.engines.seams import Seams
from kvmask.engines.sources import source_digest

__all__ = ["Feature", "Placed", "Seams", "Table", "after_import", "source_digest"]
