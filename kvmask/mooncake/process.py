"""Child processes that do not outlive this one, however it ends.

Linux sends a child the signal of its choice when its parent is gone (PR_SET_PDEATHSIG). Two of its
rules shape this module:

- The child must ask, after the fork. Code of ours between fork and exec (`preexec_fn`) may deadlock
  where other threads run, so a small Python program asks and then executes the real one, which
  keeps the process id and the request.
- "Parent" is the *thread* that forked: from a short-lived thread, the child would be killed when
  that thread returns. So a thread of its own starts the child and waits for it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from subprocess import DEVNULL, STDOUT, Popen
from typing import IO

# Its arguments: the parent's process id, then the command. SIGKILL, because nobody is left to ask
# again. The parent may have died before the request, hence the comparison. Without ctypes the
# program runs all the same.
_HELPER = """
import os, sys
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
except (ImportError, OSError, AttributeError):
    pass
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
try:
    os.execv(sys.argv[2], sys.argv[2:])
except OSError as error:
    print(f"{sys.argv[2]}: {error}", file=sys.stderr, flush=True)
    os._exit(126)
"""


def start(command: Sequence[str], log: IO[bytes]) -> Popen[bytes]:
    """Start a program that is killed when this process ends.

    Args:
        command: Path of the program, and its arguments.
        log: Takes its output.

    Returns:
        The process; its id is the program's. Status 126 says that it could not be executed.

    Raises:
        OSError: No process could be started.
    """
    guard: list[str] = []
    if sys.executable:  # empty in some programs that embed Python
        guard = [sys.executable, "-I", "-S", "-c", _HELPER, str(os.getpid())]
    started: SimpleQueue[Popen[bytes] | BaseException] = SimpleQueue()

    def hold() -> None:
        try:
            process = Popen([*guard, *command], stdin=DEVNULL, stdout=log, stderr=STDOUT)
        except BaseException as error:
            started.put(error)
            return
        started.put(process)
        process.wait()

    threading.Thread(target=hold, name="kvmask-child", daemon=True).start()
    try:
        result = started.get()
    except BaseException:  # Ctrl-C: the process may be there already
        result = started.get()
        if isinstance(result, Popen):
            result.kill()
        raise
    if isinstance(result, BaseException):
        raise result
    return result
