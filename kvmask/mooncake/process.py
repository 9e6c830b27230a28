"""Child processes that end when this process ends, even if it is killed.

A Linux process can ask for a signal when its parent ends (PR_SET_PDEATHSIG). This has two
consequences:

- The child must make the request itself, after the fork. Python code between fork and exec
  (`preexec_fn`) can deadlock if the process has other threads. So a small Python program makes the
  request and then executes the real program. That keeps the process id and the request.
- "Parent" means the *thread* that forked. When that thread ends, the child gets the signal. So each
  child is started by a thread of its own, which waits until the child ends.

A child has a process group of its own. Ctrl-C reaches every process of a terminal's group, and a
master that it ends first leaves its clients to wait for answers that do not come.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from typing import IO

# Arguments: the parent's process id, then the command. The signal is SIGKILL, because after the
# parent's end nobody could send a second one. The parent may have ended before the request, so its
# id is compared. Without ctypes the program is executed without the request.
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


def start(
    command: Sequence[str], log: IO[bytes], env: Mapping[str, str] | None = None
) -> Popen[bytes]:
    """Start a program that is killed when this process ends.

    Args:
        command: Path of the program, and its arguments.
        log: The file for its output.
        env: Its environment. None is that of this process.

    Returns:
        The process. Its id is the id of the program. It ends with status 126 if the program cannot
        be executed.

    Raises:
        OSError: No process could be started.
    """
    guard: list[str] = []
    if sys.executable:  # empty in some programs that embed Python
        guard = [sys.executable, "-I", "-S", "-c", _HELPER, str(os.getpid())]
    started: SimpleQueue[Popen[bytes] | BaseException] = SimpleQueue()

    def hold() -> None:
        try:
            process = Popen(
                [*guard, *command],
                stdin=DEVNULL,
                stdout=log,
                stderr=STDOUT,
                env=env,
                process_group=0,
            )
        except BaseException as error:
            started.put(error)
            return
        started.put(process)
        process.wait()

    threading.Thread(target=hold, name="kvmask-child", daemon=True).start()
    try:
        result = started.get()
    except BaseException:  # for example Ctrl-C: the process may have been started already
        result = started.get()
        if isinstance(result, Popen):
            result.kill()
        raise
    if isinstance(result, BaseException):
        raise result
    return result


def stop(process: Popen[bytes]) -> None:
    """End exactly this process: first SIGTERM, then SIGKILL. It takes at most about ten seconds."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(5)
        except TimeoutExpired:
            process.kill()
    with contextlib.suppress(TimeoutExpired):
        process.wait(5)
