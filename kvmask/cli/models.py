"""The KV cache groups of a model, from its config.json.

A config says of each layer what it attends to, and how large its keys and values are. Layers of one
kind make a group here. vLLM may spread them over several groups of equal rules, which have the same
masks. What a config does not say is assumed, and every assumption is told:

- Blocks have 16 tokens, vLLM's default. A model with state layers gets the smallest multiple of 16
  at which a block of one attention layer is no smaller than one state (vLLM 0.32 fits them so).
- A number of the cache has as many bytes as one of the model's dtype.
- Gemma 2 and 3 have the defaults of their config classes for what their configs leave out.
- A sparse model's indexer (DeepSeek-V3.2) keeps one packed FP8 key per token, as in vLLM 0.32.
- DeepSeek-V4 (a config with `compress_ratios`): blocks of 256, 64, 4 and 8 tokens, and the packed
  FP8 layout. These are facts of vLLM 0.32's `models/deepseek_v4`, not of the config.

Sources of the layer patterns: the config classes of Hugging Face transformers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmask._core import check_integer, shown
from kvmask.cli.files import unusable
from kvmask.cli.usage import UsageError
from kvmask.errors import ArgumentError
from kvmask.groups import ChunkedLocal, FullAttention, Group, Mamba, SlidingWindow

BLOCK = 16
#: Bytes per number of the dtypes that configs name.
DTYPES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
_NESTED = ("text_config", "language_config", "llm_config", "thinker_config")
_KINDS = {
    "full_attention": "full",
    "attention": "full",
    "global": "full",
    "sliding_attention": "window",
    "local": "window",
    "chunked_attention": "chunked",
    "linear_attention": "state",
    "mamba": "state",
    "mamba2": "state",
    "recurrent": "state",
}
_MOST_LAYERS = 4096
# Defaults that configs of Gemma 2 and 3 rely on. Other models divide `hidden_size` among the heads.
_GEMMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
# Fields of models with layers that are no attention, or with a pattern that is not read here.
# Without a list of layers such a model would pass for one of full attention alone.
_PATTERNS = (
    "attn_layer_indices",
    "attn_layer_period",
    "attn_type_list",
    "block_types",
    "full_attn_idxs",
    "global_attn_every_n_layers",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "linear_attn_config",
    "local_layer_ids",
    "mamba_d_state",
    "ssm_state_size",
    "state_size",
)
# Fields of models whose attention layers keep different numbers of bytes, or none of their own.
_SIZES = (
    "global_head_dim",
    "num_global_key_value_heads",
    "num_kv_shared_layers",
    "swa_head_dim",
    "swa_num_key_value_heads",
)


@dataclass(frozen=True)
class Layers:
    """The layers of one kind.

    Attributes:
        group: Their group.
        count: How many layers there are.
        block_bytes: Bytes of one block over all these layers and all ranks; None: not known.
        what: What they are, where the kind does not say it.
    """

    group: Group
    count: int
    block_bytes: int | None
    what: str = ""


@dataclass(frozen=True)
class Model:
    """A model as its KV cache sees it.

    Attributes:
        name: Its type.
        layers: Per group its layers.
        notes: What was assumed.
    """

    name: str
    layers: tuple[Layers, ...]
    notes: tuple[str, ...]

    @property
    def groups(self) -> list[Group]:
        """The groups, in order."""
        return [item.group for item in self.layers]


class _Config:
    """A config, or the part of it that is about the language model."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def number(self, name: str, default: int | None = None, low: int = 1) -> int:
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise ArgumentError(f"`{name}` must be in the config, got none")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise ArgumentError(f"`{name}` of the config must be an integer, got {shown(value)}")
        return check_integer(value, f"`{name}` of the config", low, 1 << 40)

    def text(self, name: str) -> str:
        value = self.values.get(name)
        return value if isinstance(value, str) else ""


def read_config(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The JSON of a config.json, or of the folder of a model.

    Raises:
        ArgumentError: It cannot be read, or is no object.
    """
    file = Path(path)
    if file.is_dir():
        file /= "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise unusable("--config", "name a readable config.json", file, error) from None
    if not isinstance(values, dict):
        raise ArgumentError(
            f"`--config` must hold one JSON object, got {type(values).__name__} in "
            f"{os.fspath(file)!r}"
        )
    return values


def model_of(
    values: Mapping[str, Any], block_size: int | None = None, kv_bytes: int | None = None
) -> Model:
    """The groups of a model.

    Args:
        values: Its config.
        block_size: Tokens per block; None: what an engine would take.
        kv_bytes: Bytes per number of the cache; None: those of the model's dtype.

    Raises:
        ArgumentError: The config lacks something, or has layers of a kind that is not known.
    """
    outer = _Config(values)
    inner = values
    for name in _NESTED:
        if isinstance(inner.get(name), dict) and "num_hidden_layers" not in inner:
            inner = inner[name]
    config = _Config(inner)
    name = config.text("model_type") or outer.text("model_type") or "a model"
    layers = config.number("num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise ArgumentError(
            f"`num_hidden_layers` of the config must be at most {_MOST_LAYERS}, got {layers}"
        )
    if config.has("compress_ratios"):
        for option, given in (("--block-size", block_size), ("--kv-bytes", kv_bytes)):
            if given is not None:
                raise UsageError(
                    f"`{option}` must not be given for a config with `compress_ratios`, whose "
                    f"blocks and packing are vLLM's, got {given}"
                )
        return _deepseek_v4(config, name, layers)
    kinds = layer_kinds(config, name, layers)
    notes: list[str] = []
    number = kv_bytes or _dtype_bytes(config, outer, notes)
    token = _token_bytes(config, name, number, notes)
    state = _state_bytes(config, number, notes) if "state" in kinds else None
    size = block_size or _block_size(token, state, "full" in kinds, notes)
    rows = []
    for kind in ("full", "window", "chunked", "state"):
        count = kinds.count(kind)
        if count:
            each = state if kind == "state" else token and token * size
            group = _group(config, kind, size)
            rows.append(Layers(group, count, None if each is None else each * count))
    return Model(name, tuple(rows), tuple(notes))


def _group(config: _Config, kind: str, size: int) -> Group:
    if kind == "window":
        return SlidingWindow(size, window=config.number("sliding_window"))
    if kind == "chunked":
        return ChunkedLocal(size, chunk_size=config.number("attention_chunk_size"))
    return Mamba(size) if kind == "state" else FullAttention(size)


def layer_kinds(config: _Config, name: str, layers: int) -> list[str]:
    """Per layer "full", "window", "chunked" or "state".

    Args:
        config: The config.
        name: The type of the model.
        layers: How many layers it has.
    """
    for field in ("layer_types", "layers_block_type"):
        given = config.values.get(field)
        if given is not None:
            return _named_kinds(given, field, layers)
    for field in _PATTERNS:
        given = config.values.get(field)
        alike = isinstance(given, list) and len(given) == layers and given.count(given[0]) == layers
        if given is not None and not alike:
            raise ArgumentError(
                f"`layer_types` must name the kind of each layer in a config with `{field}`, "
                "which is not read here, got none"
            )
    if name.startswith("gemma2"):  # every other layer, from the first on
        return ["full" if i % 2 else "window" for i in range(layers)]
    if name.startswith("gemma3"):
        period = config.number("sliding_window_pattern", 6)
        return ["window" if (i + 1) % period else "full" for i in range(layers)]
    if name.startswith("gpt_oss"):
        return ["full" if i % 2 else "window" for i in range(layers)]
    if name.startswith("llama4"):
        return _llama4(config, layers)
    if config.has("full_attention_interval") or name.startswith("qwen3_next"):
        period = config.number("full_attention_interval", 4)
        return ["state" if (i + 1) % period else "full" for i in range(layers)]
    windowed = config.has("sliding_window") and config.values.get("use_sliding_window") is not False
    if windowed and name.startswith("qwen") and not config.values.get("use_sliding_window"):
        windowed = False
    if windowed and config.has("sliding_window_pattern"):
        period = config.number("sliding_window_pattern")
        return ["window" if (i + 1) % period else "full" for i in range(layers)]
    if windowed and config.has("max_window_layers"):
        first = config.number("max_window_layers", low=0)
        return ["window" if i >= first else "full" for i in range(layers)]
    return ["window" if windowed else "full"] * layers


def _named_kinds(given: Any, field: str, layers: int) -> list[str]:
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ArgumentError(f"`{field}` of the config must be a list, got {shown(given)}")
    if len(given) != layers:
        raise ArgumentError(
            f"`{field}` of the config must name as many layers as `num_hidden_layers`, "
            f"got {len(given)} and {layers}"
        )
    unknown = sorted({str(kind) for kind in given if str(kind) not in _KINDS})
    if unknown:
        raise ArgumentError(
            f"`{field}` of the config must hold kinds out of {', '.join(_KINDS)}, "
            f"got {', '.join(unknown[:4])}"
        )
    return [_KINDS[str(kind)] for kind in given]


def _llama4(config: _Config, layers: int) -> list[str]:
    """Layers with rotary embeddings attend to their chunk, the others to everything."""
    if not config.has("attention_chunk_size"):
        return ["full"] * layers
    given = config.values.get("no_rope_layers")
    if isinstance(given, list) and len(given) == layers:
        return ["chunked" if rotary else "full" for rotary in given]
    period = config.number("no_rope_layer_interval", 4)
    return ["chunked" if (i + 1) % period else "full" for i in range(layers)]


def _dtype_bytes(config: _Config, outer: _Config, notes: list[str]) -> int:
    unknown = None
    for part in (config, outer):
        for name in ("torch_dtype", "dtype"):
            if part.text(name) in DTYPES:
                notes.append(f"{part.text(name)}, so {DTYPES[part.text(name)]} bytes per number")
                return DTYPES[part.text(name)]
            unknown = unknown or part.text(name)
    why = f"the dtype {unknown!r} is not known, see --kv-bytes" if unknown else "no dtype is named"
    notes.append(f"2 bytes per number: {why}")
    return 2


def _token_bytes(config: _Config, name: str, number: int, notes: list[str]) -> int | None:
    """Bytes of one token in one attention layer, over all ranks; None where layers differ."""
    for field in _SIZES:
        if config.values.get(field):  # 0 shared layers are none
            notes.append(f"the bytes are not known, because layers differ by `{field}`")
            return None
    if config.has("kv_lora_rank"):
        latent = config.number("kv_lora_rank") + config.number("qk_rope_head_dim", 0, 0)
        notes.append(f"latent attention: one vector of {latent} numbers per token")
        return latent * number + _indexer_bytes(config, notes)
    usual: Mapping[str, int] = _GEMMA if name.startswith(("gemma2", "gemma3")) else {}
    heads = config.number("num_attention_heads", usual.get("num_attention_heads"))
    kv_heads = config.number("num_key_value_heads", usual.get("num_key_value_heads", heads))
    size = config.number("head_dim", usual.get("head_dim", 0), 0)
    size = size or config.number("hidden_size") // heads
    if size == 0:
        raise ArgumentError(
            "`hidden_size` of the config must be at least `num_attention_heads`, "
            f"got {config.number('hidden_size')} and {heads}"
        )
    notes.append(f"{kv_heads} KV heads of {size} numbers, keys and values")
    return 2 * kv_heads * size * number


def _indexer_bytes(config: _Config, notes: list[str]) -> int:
    """Bytes of one token in the indexer of one layer: FP8, and a scale of 4 bytes per 128."""
    if not config.has("index_topk"):
        return 0
    size = config.number("index_head_dim", 128)
    packed = size + 4 * (size // 128)
    notes.append(f"{packed} bytes of the indexer per token")
    return packed


def _state_bytes(config: _Config, number: int, notes: list[str]) -> int | None:
    """Bytes of one state of one layer, over all ranks; None where the config has other fields."""
    if not config.has("linear_num_value_heads"):
        notes.append("the size of a state is not known for this model")
        return None
    keys = config.number("linear_num_key_heads") * config.number("linear_key_head_dim")
    values = config.number("linear_num_value_heads") * config.number("linear_value_head_dim")
    kernel = config.number("linear_conv_kernel_dim", 4)
    recurrent = values * config.number("linear_key_head_dim")
    total = (recurrent + (2 * keys + values) * (kernel - 1)) * number
    notes.append(f"a state of {total} bytes per layer, in the same dtype")
    return total


def _block_size(token: int | None, state: int | None, attends: bool, notes: list[str]) -> int:
    if state is None or token is None or not attends:
        notes.append(f"blocks of {BLOCK} tokens; see --block-size")
        return BLOCK
    size = -(-state // token)
    size = -(-size // BLOCK) * BLOCK
    notes.append(f"blocks of {size} tokens, no smaller than a state; see --block-size")
    return size


# vLLM 0.32, models/deepseek_v4: packed bytes of one compressed entry, of the indexer's, tokens per
# block of the compressed cache, of the window, and of the compressors' states.
_PACKED, _INDEXED = 584, 132
_V4_BLOCK, _V4_WINDOW_BLOCK, _V4_STATE_BLOCK = 256, 64, {4: 4, 128: 8}


def _deepseek_v4(config: _Config, name: str, layers: int) -> Model:
    """A window in every layer; in some also entries that stand for 4 or 128 tokens each, with the
    states of the compressor that makes them."""
    given = config.values["compress_ratios"]
    if not isinstance(given, list) or len(given) < layers:
        raise ArgumentError(
            f"`compress_ratios` of the config must name {layers} layers, got {shown(given)}"
        )
    ratios = given[:layers]  # further ones are of drafting layers
    unknown = sorted({str(r) for r in ratios if r not in (0, 1, *_V4_STATE_BLOCK)})
    if unknown:
        raise ArgumentError(
            f"`compress_ratios` of the config must hold 0, 1, 4 or 128, got {', '.join(unknown)}"
        )
    head = config.number("head_dim", 512)
    entries = _PACKED * _V4_BLOCK
    indexed = _INDEXED * _V4_BLOCK // 4
    compressed = sum(entries // r for r in ratios if r > 1) + ratios.count(4) * indexed
    rows = []
    if compressed:
        count = sum(r > 1 for r in ratios)
        rows.append(
            Layers(FullAttention(_V4_BLOCK), count, compressed, "compressed entries and indexer")
        )
    window = SlidingWindow(_V4_WINDOW_BLOCK, window=config.number("sliding_window", 128))
    rows.append(Layers(window, layers, _PACKED * _V4_WINDOW_BLOCK * layers))
    for ratio, block in _V4_STATE_BLOCK.items():
        count = ratios.count(ratio)
        if not count:
            continue
        twice = 2 if ratio == 4 else 1
        numbers = 2 * twice * (head + (config.number("index_head_dim", 128) if twice == 2 else 0))
        rows.append(
            Layers(
                SlidingWindow(block, window=twice * ratio),
                count,
                4 * numbers * block * count,
                f"compressor states, 1 to {ratio}",
            )
        )
    notes = (
        "the packed FP8 layout and block sizes of vLLM 0.32: 256, 64, 4 and 8 tokens",
        "4 bytes per number of a compressor's state",
    )
    return Model(name, tuple(rows), notes)
