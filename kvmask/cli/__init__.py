"""The `kvmask` command: doctor, demo, explain, why, contract, bench, key."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from kvmask import __version__
from kvmask.cli.commands import add_command
from kvmask.cli.contracts import add_contract_command
from kvmask.cli.explain_command import add_explain_command
from kvmask.cli.key import add_key_command
from kvmask.cli.numbers import number
from kvmask.cli.quiet import quiet_connect
from kvmask.cli.terminal import Progress
from kvmask.cli.usage import UsageError
from kvmask.cli.why import add_why_command
from kvmask.errors import KVMaskError


def run_doctor(args: argparse.Namespace) -> int:
    from kvmask.cli import doctor

    good, rows = True, []
    for name, works, text in doctor.run(args.config, args.timeout):
        if args.json:
            rows.append({"check": name, "ok": works, "text": text})
        else:
            print(f"{'ok  ' if works else 'FAIL'} {name:10} {text}", flush=True)
        good = good and works
    if args.json:
        print(json.dumps({"kvmask": __version__, "ok": good, "checks": rows}, indent=2))
    return 0 if good else 1


def run_demo(args: argparse.Namespace) -> int:
    from kvmask.cli import demo

    with Progress("demo") as progress:
        return demo.run(
            args.tokens, args.memory, quiet_connect, say=progress.say, begin=progress.step
        )


def run_bench(args: argparse.Namespace) -> int:
    from kvmask.cli import measure

    shapes = args.shape or list(measure.SHAPES)
    for shape in shapes:
        least = max(group.block_size for group in measure.SHAPES[shape][0])
        for tokens in args.tokens:
            if tokens < least:
                raise UsageError(f"`--tokens` must be at least {least} for {shape!r}, got {tokens}")
    header = f"{'shape':12} {'tokens':>8}  {'step':24} {'us':>10} {'items':>8} {'ns each':>8}"
    print(header, flush=True)
    for shape in shapes:
        for tokens in args.tokens:
            with Progress("bench") as progress:
                progress.step(f"{shape}, {tokens} tokens")
                rows = measure.measure(shape, tokens, args.repeat)
            for step, seconds, items in rows:
                each = seconds * 1e9 / max(1, items)
                row = f"{shape:12} {tokens:8}  {step:24} {seconds * 1e6:10.1f}"
                print(f"{row} {items:8} {each:8.1f}", flush=True)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="kvmask",
        description="Masks, keys and transfers of a KV cache kept in Mooncake Store.",
        epilog="`kvmask COMMAND --help` tells the options of a command, with an example.",
    )
    parser.add_argument("--version", action="version", version=f"kvmask {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    doctor = add_command(
        commands,
        "doctor",
        "check this machine, one line per check",
        "Check this machine, one line per check: Python, the compiled core, libraries, Mooncake, "
        "vLLM and kvmask's plugin where it is installed, the store's configuration, its pool, and "
        "a round trip of bytes between two processes. "
        "Exit with 1 if a check fails.",
        "kvmask doctor --config mooncake.json",
    )
    doctor.add_argument(
        "--config", metavar="PATH", help="the store's JSON file; default: $MOONCAKE_CONFIG_PATH"
    )
    doctor.add_argument(
        "--timeout",
        type=number(1, 3600),
        default=60,
        metavar="SECONDS",
        help="for each process of a round trip",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON, for bug reports")
    doctor.set_defaults(run=run_doctor)

    demo = add_command(
        commands,
        "demo",
        "save, look up and load a request on this machine",
        "Start a Mooncake master on loopback, save the KV cache of a request in the groups of "
        "DeepSeek-V4, find it from a second client, load it into other blocks, and compare every "
        "byte.",
        "kvmask demo --tokens 32768",
    )
    demo.add_argument(
        "--tokens",
        type=number(1, 1 << 20),
        default=32_768,
        help="tokens of the request, a multiple of 256",
    )
    demo.add_argument(
        "--memory",
        choices=["auto", "torch", "numpy"],
        default="auto",
        help="what the tensors are made of; auto takes torch where it is installed",
    )
    demo.set_defaults(run=run_demo)

    add_explain_command(commands)
    add_why_command(commands)
    add_contract_command(commands)

    bench = add_command(
        commands,
        "bench",
        "time the hot path, without a store",
        "Time masks, keys, addresses and lookups on this machine. The store of the lookups has "
        "every key and takes no time.",
        "kvmask bench --shape DeepSeek-V4 --tokens 8192 --repeat 1",
    )
    bench.add_argument(
        "--shape",
        action="append",
        choices=["DeepSeek-V4", "Gemma", "full 16"],
        help="groups of a model; default: all",
    )
    bench.add_argument(
        "--tokens",
        type=number(1, 1 << 22),
        nargs="+",
        default=[8_192, 131_072],
        help="lengths of the request",
    )
    bench.add_argument("--repeat", type=number(1, 1_000_000), default=5, help="runs of each step")
    bench.set_defaults(run=run_bench)

    add_key_command(commands)

    def run_help(args: argparse.Namespace) -> int:
        parser.print_help()
        return 0

    parser.set_defaults(run=run_help)
    return parser


def _end(signum: int, frame: Any) -> None:
    raise SystemExit(128 + signum)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise, as Ctrl-C does. So a command stops what it started."""
    saved = []
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGTERM, signal.SIGHUP):
            # Leave it as it is if the caller ignores the signal (nohup does) or has a handler.
            if signal.getsignal(signum) is signal.SIG_DFL:
                saved.append(signum)
                signal.signal(signum, _end)
    try:
        yield
    finally:
        for signum in saved:
            signal.signal(signum, signal.SIG_DFL)


def prepare_streams() -> None:
    """Make printing safe with closed streams and with characters that the encoding lacks."""
    # The next opened file would get the number of a closed descriptor, and then the printed text.
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.dup(fd), "w"))
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _drop_stdout() -> None:
    """Redirect stdout to the null device. Otherwise flushing its buffer fails again at exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.close(devnull)


def _run(args: argparse.Namespace) -> int:
    failed = 1
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except UsageError as error:
        print(f"kvmask: {error}", file=sys.stderr)
        failed = 2
    except KVMaskError as error:
        print(f"kvmask: {error}", file=sys.stderr)
    except BrokenPipeError:
        _drop_stdout()  # the reader has closed the pipe, as `| head` does
    except OSError as error:
        print(f"kvmask: {error}", file=sys.stderr)
    except MemoryError as error:
        print(f"kvmask: not enough memory: {error}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:
        _drop_stdout()
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status (130 after Ctrl-C, 143 after SIGTERM)."""
    prepare_streams()
    args = build_parser().parse_args(argv)
    with ended_by_signals():
        try:
            return _run(args)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
