"""`kvmask key`: make the keys of an engine from token ids, or take a key apart."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvmask._core import BlockHashes, TokenIds, shown
from kvmask.cli.commands import add_command
from kvmask.cli.files import read_input
from kvmask.cli.numbers import natural, plain_integer, positive
from kvmask.cli.usage import UsageError, named
from kvmask.errors import ArgumentError, HashInputError, KeyFormatError, KeyFormatWarning
from kvmask.hashing.chain import ALGORITHMS, hash_tokens, start_hash
from kvmask.hashing.extra_keys import block_extra_keys
from kvmask.keys import (
    AscendKeys,
    LMCacheKeys,
    LMCacheObjectKeys,
    SglangKeys,
    StrictKeys,
    VllmKeys,
    lmcache_chunk_hashes,
    sglang_page_hashes,
)
from kvmask.keys.base import KeySchema

ENGINES: dict[str, type[KeySchema]] = {
    "vllm": VllmKeys,
    "ascend": AscendKeys,
    "sglang": SglangKeys,
    "lmcache": LMCacheKeys,
    "lmcache-objects": LMCacheObjectKeys,
    "strict": StrictKeys,
}
# The engine's own names for the rank and group options.
SHORT = {
    "ascend": {"tp_rank": "head_or_tp_rank", "group": "group_id"},
    "lmcache": {"tp_rank": "worker_id"},
    "lmcache-objects": {"tp_rank": "rank", "group": "object_group"},
}


_LIST = re.compile(r"\s*\d+(?:\s*,\s*\d+)*\s*,?\s*", re.ASCII)


def read_tokens(path: str) -> list[int]:
    """Read token ids: a JSON list, or numbers separated by commas or white space.

    Args:
        path: A file, "-" for stdin, or the numbers themselves, as 1,2,3.

    Raises:
        ArgumentError: It cannot be read, or holds something else than integers.
    """
    if not path.strip():
        raise UsageError("`--tokens` must be a file, - or a list such as 1,2,3, got no text")
    # `Path.exists` raises where a list is longer than a name of a file may be.
    if _LIST.fullmatch(path) and not os.path.exists(path):
        words = [word.strip() for word in path.split(",")]
        try:
            ids = [token_id(word, i) for i, word in enumerate(words) if word]
            TokenIds(ids)
        except ArgumentError as error:
            raise UsageError(str(error)) from None
        return ids
    text = read_input("--tokens", "name a readable file, or be a list such as 1,2,3", path)
    values: Any
    if text.lstrip()[:1] in ("[", "{", '"'):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"`--tokens` must hold integers: {error}") from None
        if not isinstance(values, list):
            kind = "an object" if isinstance(values, dict) else "text"
            raise ArgumentError(f"`--tokens` must hold a JSON list of integers, got {kind}")
    else:
        values = [word for word in re.split(r"[\s,]+", text) if word]
    return [token_id(value, i) for i, value in enumerate(values)]


def token_id(value: object, i: int) -> int:
    """One integer of a token file."""
    if type(value) is int:
        return value
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,30}", value, re.ASCII):
        return int(value)
    raise ArgumentError(f"`--tokens` must hold integers, got {shown(value)} at index {i}")


def schema_fields(engine: str) -> dict[str, Any]:
    """Return the names and types of the arguments of an engine's key schema."""
    cls: Any = ENGINES[engine]
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}


def convert(name: str, text: str, hint: Any) -> Any:
    """Convert text from the command line to the value of a field."""
    if typing.get_origin(hint) is Mapping:
        pairs = [pair.partition("=") for pair in text.split(",") if pair]
        if not all(equals for _, equals, _ in pairs):
            raise UsageError(
                f"`{name}` must be NAME=VALUE, or several with commas between them, got {text!r}"
            )
        return {key: value for key, _, value in pairs}
    kinds = typing.get_args(hint) or (hint,)
    if bool in kinds:
        if text.lower() not in ("true", "false"):
            raise UsageError(f"`{name}` must be true or false, got {text!r}")
        return text.lower() == "true"
    if int in kinds:
        value = plain_integer(text)
        if value is None:
            raise UsageError(f"`{name}` must be an integer, got {shown(text)}")
        return value
    return text


def make_schema(args: argparse.Namespace) -> KeySchema:
    """Create the key schema that the options describe."""
    fields = schema_fields(args.engine)
    given: dict[str, Any] = {}
    said: dict[str, str] = {}
    for option in ("model", "tp_rank", "pp_rank", "group", "release"):
        value = getattr(args, option)
        if value is None:
            continue
        name = SHORT.get(args.engine, {}).get(option, "group_id" if option == "group" else option)
        if name not in fields:
            raise UsageError(
                f"`--{option.replace('_', '-')}` is no part of the keys of {args.engine!r}, whose "
                f"parts are {', '.join(fields)}"
            )
        given[name], said[name] = value, f"--{option.replace('_', '-')}"
    for pair in args.set or ():
        name, equals, text = pair.partition("=")
        if not equals or name not in fields:
            raise UsageError(
                f"`--set` must be NAME=VALUE with a name out of {', '.join(fields)}, got {pair!r}"
            )
        given[name], said[name] = convert(name, text, fields[name]), name
    if "model" not in given and args.engine != "sglang":
        raise UsageError("`--model` must be given to make keys, got none")
    with named(said):
        return typing.cast(Callable[..., KeySchema], ENGINES[args.engine])(**given)


# Arguments of the library that make hashes, and the options that give them.
_HASH_NAMES = {
    "block_size": "--block-size",
    "page_size": "--block-size",
    "chunk_size": "--block-size",
    "algorithm": "--algorithm",
    "seed": "--seed",
    "cache_salt": "--salt",
    "adapter": "--adapter",
    "release": "--release",
}


def make_hashes(args: argparse.Namespace, tokens: list[int]) -> tuple[BlockHashes, int, int]:
    """Return the block hashes, the tokens per hash block and the hash blocks per key."""
    if args.engine == "sglang":
        size = args.block_size or 64
        return sglang_page_hashes(tokens, size, cache_salt=args.salt), size, 1
    if args.engine.startswith("lmcache"):
        size = args.block_size or 256
        objects = args.engine == "lmcache-objects"
        algorithm = args.algorithm or ("blake3" if objects else "sha256_cbor")
        return lmcache_chunk_hashes(tokens, size, algorithm, args.seed, objects=objects), size, 1
    block = args.block_size or 16
    size = args.hash_block or block
    if block % size:
        raise UsageError(
            f"`--block-size` must be a multiple of `--hash-block`, got {block} and {size}"
        )
    release = args.release if args.engine == "vllm" and args.release else "0.32"
    algorithm = args.algorithm or "sha256"
    if algorithm not in ALGORITHMS:
        raise UsageError(f"`--algorithm` must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    extras = None
    if args.salt or args.adapter:
        extras = block_extra_keys(
            len(tokens) // size,
            size,
            adapter=tuple(args.adapter) if args.adapter else None,
            cache_salt=args.salt,
            release=release,
        )
    start = start_of(algorithm, args.seed, release)
    return (
        hash_tokens(tokens, size, algorithm, parent=start, extra_keys=extras),
        size,
        block // size,
    )


def start_of(algorithm: str, seed: str | None, release: str) -> bytes:
    """`start_hash` for a command, whose user has an option and no arguments."""
    with named(_HASH_NAMES):
        try:
            return start_hash(algorithm, seed, release)
        except HashInputError:
            if seed is not None:
                raise
            raise UsageError(
                f"`--seed` must be given for {algorithm} of vLLM {release}, whose start is random "
                "where PYTHONHASHSEED is not set, got none"
            ) from None


def parts(schema: KeySchema) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a schema's arguments."""
    for field in dataclasses.fields(typing.cast(Any, schema)):
        if field.init:
            yield field.name, getattr(schema, field.name)


def printed(value: object) -> str:
    """Text on one line: what is not printable is escaped, which `--json` never needs to be."""
    text = str(value)
    return text if text.isprintable() else repr(text)[1:-1]


def _either(names: Sequence[str]) -> str:
    """Names as alternatives.

    >>> _either(["a"]), _either(["a", "b", "c"])
    ('a', 'a, b or c')
    """
    return " or ".join([*([", ".join(names[:-1])] if names[1:] else []), *names[-1:]])


def show_parts(key: str, engines: list[str], as_json: bool) -> bool:
    """Print the parts of a key for each engine whose format it fits. False when it fits none."""
    found = []
    for engine in engines:
        try:
            schema, digest = ENGINES[engine].parse(key)
        except KeyFormatError as error:
            if not str(error).startswith("not a key"):
                print(f"kvmask: {engine}: {error}", file=sys.stderr)
            continue
        fields = {"engine": engine, **dict(parts(schema)), "digest": digest.hex()}
        found.append(fields)
    if as_json:
        print(json.dumps({"key": key, "readings": found}, default=dict))
    for fields in [] if as_json else found:
        for name, value in fields.items():
            print(f"{name:16} {printed(value)}")
        print()
    if not found:
        print(f"kvmask: {shown(key)} is not a key of {_either(engines)}", file=sys.stderr)
    return bool(found)


def run_key(args: argparse.Namespace) -> int:
    """Run the command."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", KeyFormatWarning)
        status = _run(args)
    for message in dict.fromkeys(str(entry.message) for entry in seen):
        print(f"kvmask: warning: {message}", file=sys.stderr)
    return status


# Options that are only for making keys, and the engines that they apply to.
MAKING: dict[str, tuple[str, ...]] = {
    "tokens": tuple(ENGINES),
    "block_size": tuple(ENGINES),
    "hash_block": ("vllm", "ascend", "strict"),
    "algorithm": tuple(name for name in ENGINES if name != "sglang"),
    "seed": tuple(name for name in ENGINES if name != "sglang"),
    "salt": ("vllm", "ascend", "strict", "sglang"),
    "adapter": ("vllm", "ascend", "strict"),
}


def check_options(args: argparse.Namespace) -> None:
    """Refuse options that would otherwise be ignored."""
    for option, engines in MAKING.items():
        if getattr(args, option) is None:
            continue
        name = f"--{option.replace('_', '-')}"
        if args.keys:
            raise UsageError(
                f"`{name}` makes keys, and KEY is one to take apart: give one of them, "
                f"got {getattr(args, option)!r} and {args.keys[0]!r}"
            )
        if args.engine not in engines:
            raise UsageError(
                f"`{name}` must not be given for {args.engine!r}, whose keys do not depend on it"
            )


def _run(args: argparse.Namespace) -> int:
    if args.keys:
        check_options(args)
        engines = [args.engine] if args.engine else list(ENGINES)
        read = [show_parts(key, engines, args.json) for key in args.keys]
        return 0 if all(read) else 1
    if args.tokens is None:
        raise UsageError("`key` needs keys to take apart, or `--tokens` to make some")
    args.engine = args.engine or "vllm"
    check_options(args)
    tokens = read_tokens(args.tokens)
    schema = make_schema(args)
    with named(_HASH_NAMES):
        hashes, size, scale = make_hashes(args, tokens)
    keys = schema.keys(hashes, scale=scale)
    step = size * scale
    if not keys:
        print(f"kvmask: no key: {len(tokens)} tokens fill no block of {step}", file=sys.stderr)
    if args.json:
        rows = [{"start": i * step, "stop": (i + 1) * step, "key": k} for i, k in enumerate(keys)]
        print(json.dumps(rows))
        return 0
    for i, key in enumerate(keys):
        print(f"{i * step:8} {(i + 1) * step:8}  {printed(key)}")
    left = len(tokens) - len(keys) * step
    print(f"# {len(keys)} keys of {step} tokens, {left} tokens without one", file=sys.stderr)
    return 0


def add_key_command(commands: Any) -> argparse.ArgumentParser:
    """Add `key` to the subcommands of a parser.

    Args:
        commands: The object that `argparse.ArgumentParser.add_subparsers` returned.

    Returns:
        The subcommand's parser. Its default `run` is a function of the parsed arguments.
    """
    parser = add_command(
        commands,
        "key",
        "make an engine's keys from token ids, or take keys apart",
        "Without KEY, print the keys of token ids, one per block, after the first token "
        "and the one past the last. With KEY, print what it is made of, in every engine's reading "
        "unless --engine is given.",
        "kvmask key --engine vllm DeepSeek-V4@tp_rank:1@pcp0@dcp0@pp_rank:0@group:2@00ff\n"
        "kvmask key --model m --tokens prompt.json --block-size 16",
    )
    parser.add_argument("keys", nargs="*", metavar="KEY", help="a key to take apart")
    parser.add_argument("--engine", choices=list(ENGINES), help="default: vllm")
    parser.add_argument("--release", help="of the engine, as in 0.32")
    parser.add_argument("--model", help="name of the model")
    parser.add_argument("--tp-rank", type=natural, metavar="RANK", help="tensor-parallel rank")
    parser.add_argument("--pp-rank", type=natural, metavar="RANK", help="pipeline rank")
    parser.add_argument("--group", type=natural, metavar="INDEX", help="KV cache group")
    parser.add_argument(
        "--set", action="append", metavar="NAME=VALUE", help="any other part of the key"
    )
    parser.add_argument(
        "--tokens",
        metavar="IDS",
        help="token ids: a file (JSON or plain), - for stdin, or a list such as 1,2,3",
    )
    parser.add_argument("--block-size", type=positive, metavar="TOKENS", help="tokens per key")
    parser.add_argument(
        "--hash-block",
        type=positive,
        metavar="TOKENS",
        help="tokens per hash; default: --block-size",
    )
    parser.add_argument("--algorithm", help="hash algorithm; default: the engine's own")
    parser.add_argument("--seed", help="text of the start hash; default: as the engine")
    parser.add_argument("--salt", help="the request's cache salt")
    parser.add_argument("--adapter", nargs=2, metavar=("NAME", "PATH"), help="LoRA adapter")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_key)
    return parser
