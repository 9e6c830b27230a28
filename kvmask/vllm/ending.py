"""What the interpreter's exit waits for in vLLM: the store's calls in threads that nobody joins."""

from __future__ import annotations

from kvmask.exits import StoreCalls

# As long as vLLM's worker waits for its transfer threads before it closes the store.
CLOSE_SECONDS = 5.0

# Of kvmask's own threads, and of the thread in which vLLM's worker answers lookups.
CALLS = StoreCalls()
# Saves and loads, in vLLM's threads. What waits in their queues goes on for as long as vLLM waits.
JOBS = StoreCalls(grace=CLOSE_SECONDS)
