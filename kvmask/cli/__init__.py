"""The `kvmask` command: doctor, demo, explain, bench, key."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from kvmask.cli.key import add_key_command
from kvmask.cli.numbers import natural, number, positive
from kvmask.errors import ArgumentError, KVMaskError
from kvmask.groups import ChunkedLocal, FullAttention, Mamba, SlidingWindow


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Hide what Mooncake's client writes to stderr during its set-up, unless the set-up fails."""
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with tempfile.TemporaryFile() as log:
            os.dup2(log.fileno(), 2)
            try:
                yield
            except Exception:
                os.dup2(saved, 2)
                log.seek(0)
                sys.stderr.write(log.read().decode("utf-8", "replace"))
                raise
            finally:
                os.dup2(saved, 2)
    finally:
        os.close(saved)


def quiet_connect(*args: Any, **kwargs: Any) -> Any:
    """`mooncake.connect` without the client's log lines."""
    from kvmask import mooncake

    with hushed():
        return mooncake.connect(*args, **kwargs)


# Option to class, its sizes in the order given, their names in the help, and the help.
GROUPS: dict[str, tuple[Any, tuple[str, ...], str, str]] = {
    "full": (FullAttention, ("block_size",), "BLOCK", "a full-attention group"),
    "swa": (SlidingWindow, ("block_size", "window"), "BLOCK,WINDOW", "a sliding-window group"),
    "chunked": (
        ChunkedLocal,
        ("block_size", "chunk_size"),
        "BLOCK,CHUNK",
        "a chunked local attention group",
    ),
    "mamba": (Mamba, ("block_size",), "BLOCK", "a state group"),
}


class GroupAction(argparse.Action):
    """Collects the values of the options of `GROUPS` in the order given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        try:
            numbers = [positive(word) for word in str(values).split(",")]
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        if len(numbers) != len(GROUPS[self.dest][1]):
            parser.error(f"{option_string} takes {self.metavar}, got {values!r}")
        namespace.groups = [*(namespace.groups or ()), (self.dest, numbers)]


def make_groups(given: Sequence[tuple[str, list[int]]], eagle: Sequence[int] | None) -> list[Any]:
    """Create groups from the command line.

    `eagle` holds the ids of the EAGLE groups. Empty means all groups that support EAGLE.
    """
    if eagle is not None and any(not 0 <= g < len(given) for g in eagle):
        raise ArgumentError(f"`eagle` must name groups below {len(given)}, got {list(eagle)}")
    groups = []
    for g, (option, numbers) in enumerate(given):
        make, names, _, _ = GROUPS[option]
        flag = eagle is not None and (g in eagle if eagle else make.drops_for_eagle)
        groups.append(make(**dict(zip(names, numbers, strict=True)), eagle=flag))
    return groups


def run_doctor(args: argparse.Namespace) -> int:
    from kvmask.cli import doctor

    good = True
    for name, works, text in doctor.run(args.config, args.timeout):
        print(f"{'ok  ' if works else 'FAIL'} {name:10} {text}", flush=True)
        good = good and works
    return 0 if good else 1


def run_demo(args: argparse.Namespace) -> int:
    from kvmask.cli import demo

    return demo.run(args.tokens, args.memory, quiet_connect)


def run_explain(args: argparse.Namespace) -> int:
    import kvmask
    from kvmask.cli import explain

    if not args.groups:
        options = ", ".join(f"--{option}" for option in GROUPS)
        raise ArgumentError(f"`explain` needs at least one of {options}")
    coord = kvmask.Coordinator(
        make_groups(args.groups, args.eagle),
        hash_block_size=args.hash_block,
        alignment=args.alignment,
        retention_interval=args.retention,
        partial_hits=args.partial,
    )
    if args.tokens < coord.hit_alignment:
        raise ArgumentError(
            f"`--tokens` must be at least {coord.hit_alignment}, what hits are multiples of, "
            f"got {args.tokens}"
        )
    print(
        explain.explain(
            coord,
            args.tokens,
            start_token=args.start,
            num_prompt_tokens=args.prompt,
            width=args.width,
        )
    )
    return 0


def run_bench(args: argparse.Namespace) -> int:
    from kvmask.cli import measure

    shapes = args.shape or list(measure.SHAPES)
    for shape in shapes:
        least = max(group.block_size for group in measure.SHAPES[shape][0])
        for tokens in args.tokens:
            if tokens < least:
                raise ArgumentError(
                    f"`--tokens` must be at least {least} for {shape!r}, got {tokens}"
                )
    print(f"{'shape':12} {'tokens':>8}  {'step':24} {'us':>10} {'items':>8} {'ns each':>8}")
    for shape in shapes:
        for tokens in args.tokens:
            for step, seconds, items in measure.measure(shape, tokens, args.repeat):
                each = seconds * 1e9 / max(1, items)
                row = f"{shape:12} {tokens:8}  {step:24} {seconds * 1e6:10.1f}"
                print(f"{row} {items:8} {each:8.1f}", flush=True)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="kvmask", description="Masks, keys and transfers of a KV cache kept in Mooncake Store."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    doctor = commands.add_parser("doctor", help="check this machine, one line per check")
    doctor.add_argument("--config", metavar="PATH", help="the store's JSON file")
    doctor.add_argument(
        "--timeout",
        type=number(1, 3600),
        default=60,
        metavar="SECONDS",
        help="for each process of a round trip",
    )
    doctor.set_defaults(run=run_doctor)

    demo = commands.add_parser("demo", help="save, look up and load a request on this machine")
    demo.add_argument("--tokens", type=number(1, 1 << 20), default=32_768)
    demo.add_argument("--memory", choices=["auto", "torch", "numpy"], default="auto")
    demo.set_defaults(run=run_demo)

    explain = commands.add_parser("explain", help="draw the masks of KV cache groups")
    for option, (_, _, metavar, text) in GROUPS.items():
        explain.add_argument(f"--{option}", action=GroupAction, metavar=metavar, help=text)
    explain.add_argument("--hash-block", type=positive, required=True, metavar="TOKENS")
    explain.add_argument("--tokens", type=positive, required=True)
    explain.add_argument(
        "--eagle",
        type=natural,
        nargs="*",
        metavar="GROUP",
        help="EAGLE groups; all when none is named",
    )
    explain.add_argument("--retention", type=natural, metavar="TOKENS")
    explain.add_argument("--alignment", type=positive, metavar="TOKENS")
    explain.add_argument("--partial", action="store_true", help="hits may end inside a block")
    explain.add_argument("--start", type=natural, default=0, help="first token of the store masks")
    explain.add_argument(
        "--prompt", type=positive, help="tokens of the prompt, for sparse retention"
    )
    explain.add_argument(
        "--width", type=number(1, 10_000), default=64, help="characters per picture"
    )
    explain.set_defaults(run=run_explain, groups=None)

    bench = commands.add_parser("bench", help="time the hot path, without a store")
    bench.add_argument("--shape", action="append", choices=["DeepSeek-V4", "Gemma", "full 16"])
    bench.add_argument("--tokens", type=number(1, 1 << 22), nargs="+", default=[8_192, 131_072])
    bench.add_argument("--repeat", type=number(1, 1_000_000), default=5, help="runs of each step")
    bench.set_defaults(run=run_bench)

    add_key_command(commands)
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
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
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
    return 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status (130 after Ctrl-C, 143 after SIGTERM)."""
    prepare_streams()
    args = build_parser().parse_args(argv)
    with ended_by_signals():
        try:
            return _run(args)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
