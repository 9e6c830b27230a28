"""The `kvmask` command: doctor, demo, explain, bench, key."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from kvmask.cli_key import add_key_command
from kvmask.errors import ArgumentError, KVMaskError


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Keep what Mooncake's client writes to stderr while it is set up; show it after a failure."""
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with tempfile.TemporaryFile() as log:
            os.dup2(log.fileno(), 2)
            try:
                yield
            except BaseException:
                os.dup2(saved, 2)
                log.seek(0)
                sys.stderr.write(log.read().decode("utf-8", "replace"))
                raise
            finally:
                os.dup2(saved, 2)
    finally:
        os.close(saved)


def quiet_connect(*args: Any, **kwargs: Any) -> Any:
    """`mooncake.connect` without the client's own lines."""
    from kvmask import mooncake

    with hushed():
        return mooncake.connect(*args, **kwargs)


class GroupAction(argparse.Action):
    """Collects --full, --swa, --chunked and --mamba in the order given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        try:
            numbers = [int(word) for word in str(values).split(",")]
        except ValueError:
            parser.error(f"{option_string} takes numbers, got {values!r}")
        wanted = 2 if self.dest in ("swa", "chunked") else 1
        if len(numbers) != wanted:
            parser.error(f"{option_string} takes {self.metavar}, got {values!r}")
        namespace.groups = [*(namespace.groups or ()), (self.dest, numbers)]


def make_groups(given: Sequence[tuple[str, list[int]]], eagle: Sequence[int] | None) -> list[Any]:
    """Build groups from the command line; `eagle` holds group ids, empty means all that can."""
    import kvmask

    makers = {
        "full": kvmask.FullAttention,
        "swa": kvmask.SlidingWindow,
        "chunked": kvmask.ChunkedLocal,
        "mamba": kvmask.Mamba,
    }
    if eagle is not None and any(not 0 <= g < len(given) for g in eagle):
        raise ArgumentError(f"`eagle` must name groups below {len(given)}, got {list(eagle)}")
    groups = []
    for g, (kind, numbers) in enumerate(given):
        flag = eagle is not None and (g in eagle if eagle else kind != "mamba")
        groups.append(makers[kind](*numbers, eagle=flag))
    return groups


def run_doctor(args: argparse.Namespace) -> int:
    from kvmask import doctor

    good = True
    for name, works, text in doctor.run(args.config, quiet_connect):
        print(f"{'ok  ' if works else 'FAIL'} {name:10} {text}", flush=True)
        good = good and works
    return 0 if good else 1


def run_demo(args: argparse.Namespace) -> int:
    from kvmask import demo

    return demo.run(args.tokens, args.memory, quiet_connect)


def run_explain(args: argparse.Namespace) -> int:
    import kvmask
    from kvmask import explain

    if not args.groups:
        raise ArgumentError("`explain` needs at least one of --full, --swa, --chunked, --mamba")
    coord = kvmask.Coordinator(
        make_groups(args.groups, args.eagle),
        hash_block_size=args.hash_block,
        alignment=args.alignment,
        retention_interval=args.retention,
        partial_hits=args.partial,
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
    from kvmask import measure

    print(f"{'shape':12} {'tokens':>8}  {'step':24} {'µs':>10} {'items':>8} {'ns each':>8}")
    for shape in args.shape or measure.SHAPES:
        for tokens in args.tokens:
            for step, seconds, items in measure.measure(shape, tokens, args.repeat):
                each = seconds * 1e9 / max(1, items)
                row = f"{shape:12} {tokens:8}  {step:24} {seconds * 1e6:10.1f}"
                print(f"{row} {items:8} {each:8.1f}", flush=True)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="kvmask", description="Masks, keys and transfers of a KV cache kept in Mooncake Store."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    doctor = commands.add_parser("doctor", help="check this machine, one line per check")
    doctor.add_argument("--config", metavar="PATH", help="the store's JSON file")
    doctor.set_defaults(run=run_doctor)

    demo = commands.add_parser("demo", help="save, look up and load a request on this machine")
    demo.add_argument("--tokens", type=int, default=32_768)
    demo.add_argument("--memory", choices=["auto", "torch", "numpy"], default="auto")
    demo.set_defaults(run=run_demo)

    explain = commands.add_parser("explain", help="draw the masks of KV cache groups")
    for name, metavar, text in (
        ("full", "BLOCK", "a full-attention group"),
        ("swa", "BLOCK,WINDOW", "a sliding-window group"),
        ("chunked", "BLOCK,CHUNK", "a chunked local attention group"),
        ("mamba", "BLOCK", "a state group"),
    ):
        explain.add_argument(f"--{name}", action=GroupAction, metavar=metavar, help=text)
    explain.add_argument("--hash-block", type=int, required=True, metavar="TOKENS")
    explain.add_argument("--tokens", type=int, required=True)
    explain.add_argument(
        "--eagle", type=int, nargs="*", metavar="GROUP", help="EAGLE groups; all when none is named"
    )
    explain.add_argument("--retention", type=int, metavar="TOKENS")
    explain.add_argument("--alignment", type=int, metavar="TOKENS")
    explain.add_argument("--partial", action="store_true", help="hits may end inside a block")
    explain.add_argument("--start", type=int, default=0, help="first token of the store masks")
    explain.add_argument("--prompt", type=int, help="tokens of the prompt, for sparse retention")
    explain.add_argument("--width", type=int, default=64, help="characters per picture")
    explain.set_defaults(run=run_explain, groups=None)

    bench = commands.add_parser("bench", help="time the hot path, without a store")
    bench.add_argument("--shape", action="append", choices=["DeepSeek-V4", "Gemma", "full 16"])
    bench.add_argument("--tokens", type=int, nargs="+", default=[8_192, 131_072])
    bench.add_argument("--repeat", type=int, default=5)
    bench.set_defaults(run=run_bench)

    add_key_command(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    args = build_parser().parse_args(argv)
    # The client logs each line of its set-up; it reads this when it is imported.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        status: int = args.run(args)
    except KVMaskError as error:
        print(f"kvmask: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of the pipe has gone, as `| head` does; nothing more may be written to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    return status
