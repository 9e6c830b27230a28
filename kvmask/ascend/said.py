"""What the log says about the calls that AscendStore answers itself."""

from __future__ import annotations

import threading
from collections import Counter

from kvmask.ascend.releases import logger

# Reasons that are told apart. One that quotes what was raised could be a new one at every call.
MOST = 64
OTHER = "other reasons, of which there are many"

#: How often stock answered, by (what, why).
times: Counter[tuple[str, str]] = Counter()
_lock = threading.Lock()


def stays(what: str, why: str) -> None:
    """Note that stock answers a call. The log says it once per process and reason.

    Args:
        what: What stock gives, in the plural.
        why: What kvmask has no rule for.
    """
    with _lock:
        if (what, why) not in times and len(times) >= MOST:
            why = OTHER
        times[what, why] += 1
        first = times[what, why] == 1
    if first:
        logger.info("kvmask leaves %s to AscendStore: %s", what, why)
