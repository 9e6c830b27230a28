"""Why a prompt did not hit, or not further: asked of a live store, explained in a sentence.

`diagnose` asks for every key that can decide the hit of a request. `look_near` asks whether the
prompt would have hit under another seed, algorithm, namespace or grid of ranks. `kvmask why` prints
what they find.
"""

from kvmask.why.ask import diagnose
from kvmask.why.near import CHANGES, Near, look_near
from kvmask.why.report import Diagnosis, GroupView, Reason, Shard

__all__ = ["CHANGES", "Diagnosis", "GroupView", "Near", "Reason", "Shard", "diagnose", "look_near"]
