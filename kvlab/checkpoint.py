"""Real checkpoints: a local Hugging Face folder (Llama, Qwen2, Qwen3, Mistral) becomes a ``model.Decoder``, and back.

Nothing is downloaded and no pickle is opened. All that can be checked without the weights (the configuration, the
name and shape of every tensor) is checked before memory is taken for them. A field or a tensor that is not understood
is an error: a decoder that leaves something out would still give plausible text.
"""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvlab import costs, runtime
from kvlab.config import ROPE_KINDS, ModelConfig, RopeConfig, is_number
from kvlab.model import Decoder, Ops

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class _Architecture:
    """What one model class fixes, and which fields of config.json it obeys."""

    model_type: str
    qkv_bias: bool | None = False  # None: the field attention_bias decides
    out_bias: bool = False  # whether attention_bias covers o_proj too
    has_mlp_bias: bool = False  # whether the field mlp_bias is obeyed
    qk_norm: bool = False
    default_head_dim: int | None = None  # None: hidden_size / num_attention_heads
    window: str = "none"  # none; always: the field sliding_window; switched: use_sliding_window and layer_types


ARCHITECTURES: dict[str, _Architecture] = {
    "LlamaForCausalLM": _Architecture("llama", qkv_bias=None, out_bias=True, has_mlp_bias=True),
    "MistralForCausalLM": _Architecture("mistral", window="always"),
    "Qwen2ForCausalLM": _Architecture("qwen2", qkv_bias=True, window="switched"),
    "Qwen3ForCausalLM": _Architecture(
        "qwen3", qkv_bias=None, out_bias=True, qk_norm=True, default_head_dim=128, window="switched"
    ),
}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Fields that config_from_hf reads.
_READ = _words("""
    architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim max_position_embeddings rms_norm_eps tie_word_embeddings attention_bias mlp_bias
    rope_theta rope_scaling rope_parameters original_max_position_embeddings sliding_window use_sliding_window
    max_window_layers layer_types
""")

# Fields with one value that this decoder computes; null is as good as absent.
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "pretraining_tp": 1,
    "partial_rotary_factor": 1,
    "rope_interleaved": False,
    "use_mrope": False,
    "quantization_config": None,
    "compression_config": None,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "pruned_heads": {},
}

# Fields that change nothing in a forward pass at inference: training, generation defaults, bookkeeping.
_IGNORED = _words("""
    attention_dropout attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id chat_template
    chunk_size_feed_forward decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id id2label initializer_range is_decoder is_llama_config label2id length_penalty max_length
    max_sequence_length min_length model_max_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix problem_type
    remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens
    task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype
    torchscript transformers.js_config transformers_version typical_p unk_token_id unsloth_fixed unsloth_version
    use_bfloat16 use_cache
""")

_ROPE_FIELDS = _words("""
    rope_type type rope_theta factor original_max_position_embeddings low_freq_factor high_freq_factor beta_fast
    beta_slow attention_factor mscale mscale_all_dim truncate partial_rotary_factor finetuned
""")

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LONGEST, _LARGEST = 2**63, 2**48  # tokens and parameters under which no byte count of a tensor overflows
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


# ---------------------------------------------------------------------------------------------- config.json


def config_from_hf(hf: Mapping[str, Any], name: str = "checkpoint") -> ModelConfig:
    """The configuration that a ``config.json`` of a Llama, Qwen2, Qwen3 or Mistral model describes.

    Shapes and units: ``hf`` is the parsed JSON object, ``name`` becomes ``ModelConfig.name``. Both spellings of RoPE
    are read: ``rope_parameters``, and ``rope_theta`` beside ``rope_scaling`` (whose kind may stand under ``type``).
    ``max_seq_len`` is max_position_embeddings; ``linear``, ``dynamic`` and ``yarn`` stretch it, in tokens, to what
    their factor reaches.

    Raises: ValueError for an unsupported architecture, a field that is missing, of a wrong type, too large, in
    contradiction with another, of a value this decoder does not compute, or not known here.

    Source: chapter 01; the configuration classes of Hugging Face transformers.
    """
    if not isinstance(hf, Mapping):
        raise ValueError(f"config.json holds a {type(hf).__name__}; it must hold an object")
    architecture = _architecture(hf)
    _refuse_unsupported(hf)
    num_layers, num_heads = _integer(hf, "num_hidden_layers"), _integer(hf, "num_attention_heads")
    hidden_size, max_positions = _integer(hf, "hidden_size"), _integer(hf, "max_position_embeddings")
    num_kv_heads = _integer(hf, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads is {num_heads}; it must be a multiple of num_key_value_heads "
            f"({num_kv_heads})"
        )
    rope = _rope(hf, max_positions)
    head_dim = _head_dim(hf, architecture, hidden_size, num_heads)
    window, window_layers = _window(hf, architecture, num_layers)
    attention_bias = _flag(hf, "attention_bias", bool(architecture.qkv_bias))
    if architecture.qkv_bias is not None and attention_bias != architecture.qkv_bias:
        raise ValueError(
            f"config.json: attention_bias is {attention_bias}; a {architecture.model_type} model always has "
            f"{architecture.qkv_bias}"
        )
    mlp_bias = _flag(hf, "mlp_bias", False)
    if mlp_bias and not architecture.has_mlp_bias:
        raise ValueError(f"config.json: mlp_bias is true; a {architecture.model_type} model has none")
    config = ModelConfig(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=_integer(hf, "intermediate_size"),
        vocab_size=_integer(hf, "vocab_size"),
        max_seq_len=_context(rope, max_positions),
        rope=rope,
        norm_eps=_number(hf, "rms_norm_eps", 1e-6),
        tie_embeddings=_flag(hf, "tie_word_embeddings", False),
        attention_bias=attention_bias,
        attention_out_bias=attention_bias and architecture.out_bias,
        mlp_bias=mlp_bias,
        qk_norm=architecture.qk_norm,
        sliding_window=window,
        sliding_layers=window_layers,
    )
    parameters = costs.num_parameters(config).total
    if parameters >= _LARGEST:
        raise ValueError(
            f"config.json describes a model of {parameters:,} parameters (vocab_size is {config.vocab_size}, "
            f"hidden_size {config.hidden_size}); it must have under {_LARGEST:,}"
        )
    return config


def _architecture(hf: Mapping[str, Any]) -> _Architecture:
    known = ", ".join(ARCHITECTURES)
    names, model_type = hf.get("architectures"), hf.get("model_type")
    if names is None:
        for architecture in ARCHITECTURES.values():
            if architecture.model_type == model_type:
                return architecture
        raise ValueError(f"config.json: model_type is {model_type!r}, without architectures; kvlab loads {known}")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in tuple(ARCHITECTURES):
        raise ValueError(f"config.json: architectures is {names!r}; kvlab loads one of {known}")
    architecture = ARCHITECTURES[names[0]]
    if model_type is not None and model_type != architecture.model_type:
        raise ValueError(
            f"config.json: model_type is {model_type!r} and architectures {names!r}; the two must name one model"
        )
    return architecture


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
    for key, value in hf.items():
        if value is None or key in _READ or key in _IGNORED or key.startswith("_"):
            continue
        if key not in _FIXED:
            raise ValueError(
                f"config.json: the field {key} (value {reprlib.repr(value)}) is not one that kvlab knows, and it may "
                "change what the model computes; take it out of config.json if it does not"
            )
        if value != _FIXED[key]:
            raise ValueError(
                f"config.json: {key} is {reprlib.repr(value)}; kvlab supports only {_FIXED[key]!r} (or no such field)"
            )


def _integer(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = hf.get(key)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"config.json has no {key}; it must hold it, a positive integer")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {key} is {value!r}; it must be a positive integer")
    if value >= _LONGEST:
        raise ValueError(f"config.json: {key} is {reprlib.repr(value)}; it must be under 2**63")
    return value


def _number(hf: Mapping[str, Any], key: str, default: float | None, where: str = "config.json") -> float:
    value = hf.get(key)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"{where} has no {key}; it must hold it, a positive number")
    if not is_number(value) or value <= 0:
        raise ValueError(f"{where}: {key} is {reprlib.repr(value)}; it must be a positive number")
    return float(value)


def _flag(hf: Mapping[str, Any], key: str, default: bool, where: str = "config.json") -> bool:
    value = hf.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{where}: {key} is {value!r}; it must be true or false")
    return value


def _head_dim(hf: Mapping[str, Any], architecture: _Architecture, hidden_size: int, num_heads: int) -> int:
    if hf.get("head_dim") is not None or ("head_dim" not in hf and architecture.default_head_dim):
        head_dim = _integer(hf, "head_dim", architecture.default_head_dim)
    elif hidden_size % num_heads:
        raise ValueError(
            f"config.json has no head_dim and hidden_size ({hidden_size}) is no multiple of num_attention_heads "
            f"({num_heads}); one of the two must hold"
        )
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise ValueError(f"config.json: the head size is {head_dim}; RoPE turns pairs, so it must be even")
    return head_dim


def _window(
    hf: Mapping[str, Any], architecture: _Architecture, num_layers: int
) -> tuple[int | None, tuple[int, ...] | None]:
    """(window in tokens, layers it holds for); (None, None) where no layer has one, (W, None) where all have."""
    kinds = hf.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise ValueError(
                f"config.json: layer_types is {kinds!r}; it must list one kind for each {num_layers} layers"
            )
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise ValueError(
                    f"config.json: layer_types holds {kind!r}; kvlab knows full_attention and sliding_attention"
                )
    if architecture.window == "none":
        if hf.get("sliding_window") is not None or _flag(hf, "use_sliding_window", False):
            raise ValueError(
                f"config.json: sliding_window is {hf.get('sliding_window')!r}; "
                f"a {architecture.model_type} model has none"
            )
        sliding: list[int] = []
    elif architecture.window == "always":
        on = "sliding_window" not in hf or hf["sliding_window"] is not None
        sliding = list(range(num_layers)) if on else []
    else:
        on = _flag(hf, "use_sliding_window", False)
        first = hf.get("max_window_layers", 28)
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise ValueError(f"config.json: max_window_layers is {first!r}; it must be 0 or more")
        on = on and ("sliding_window" not in hf or hf["sliding_window"] is not None)
        sliding = [i for i in range(num_layers) if on and i >= first]
        if kinds is not None:
            if not on and "sliding_attention" in kinds:
                raise ValueError("config.json: layer_types holds sliding_attention and use_sliding_window is off")
            sliding = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    if kinds is not None and sliding != [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]:
        raise ValueError(
            f"config.json: layer_types is {kinds!r}; by its other fields this {architecture.model_type} model has a "
            f"window in the layers {sliding}"
        )
    if not sliding:
        return None, None
    return _integer(hf, "sliding_window", 4096), None if len(sliding) == num_layers else tuple(sliding)


def _rope(hf: Mapping[str, Any], max_positions: int) -> RopeConfig:
    found, where = _rope_fields(hf)
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise ValueError(f"config.json: {where} has the kind {kind!r}; kvlab knows {', '.join(ROPE_KINDS)}")
    unknown = [key for key, value in found.items() if key not in _ROPE_FIELDS and value is not None]
    if unknown:
        raise ValueError(f"config.json: {where} holds {unknown[0]}, which kvlab does not know for the kind {kind!r}")
    if found.get("partial_rotary_factor") not in (None, 1):
        raise ValueError(
            f"config.json: partial_rotary_factor is {found['partial_rotary_factor']!r} in {where}; "
            "kvlab supports only 1"
        )
    theta = _theta(hf, found, where)
    if kind == "default":
        return RopeConfig(theta)
    where = f"config.json, {where}"
    original = None
    if kind in ("llama3", "yarn"):  # where both places name it, the outer one counts, as in transformers
        outer = hf.get("original_max_position_embeddings")
        merged = {**found, "original_max_position_embeddings": outer} if outer is not None else found
        original = _integer(merged, "original_max_position_embeddings", max_positions)
    elif kind in ("linear", "dynamic"):
        original = max_positions
    implied = max_positions / original if kind == "yarn" and original else None
    factor = _number(found, "factor", implied, where)
    if factor < 1:
        raise ValueError(f"{where}: factor is {factor}; it must be 1 or more")
    if factor * (original or max_positions) >= _LONGEST:
        raise ValueError(f"{where}: factor is {factor}; it must stretch the context to under 2**63 tokens")
    if kind == "llama3":
        low, high = (_number(found, key, None, where) for key in ("low_freq_factor", "high_freq_factor"))
        if not low < high:
            raise ValueError(f"{where}: low_freq_factor is {low}; it must be under high_freq_factor ({high})")
        return RopeConfig(theta, kind, factor, original, low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn":
        optional = {
            key: _number(found, key, None, where)
            for key in ("attention_factor", "mscale", "mscale_all_dim")
            if found.get(key) not in (None, 0)
        }
        if found.get("attention_factor") == 0:
            raise ValueError(f"{where}: attention_factor is 0; it must be a positive number")
        return RopeConfig(
            theta, kind, factor, original,
            beta_fast=_number(found, "beta_fast", 32.0, where), beta_slow=_number(found, "beta_slow", 1.0, where),
            truncate=_flag(found, "truncate", True, where), **optional,
        )  # fmt: skip
    return RopeConfig(theta, kind, factor, original)


def _rope_fields(hf: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The dictionary that describes RoPE, and the name it stands under."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(hf.get(key) or {}, Mapping):
            raise ValueError(f"config.json: {key} is {hf[key]!r}; it must be an object")
    new, old = hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {}

    def plain(found: Mapping[str, Any]) -> dict[str, Any]:
        kept = {k: v for k, v in found.items() if v is not None and k not in ("type", "rope_type", "rope_theta")}
        return {**kept, "rope_type": found.get("rope_type") or found.get("type") or "default"}

    if new and old and plain(new) != plain(old):
        raise ValueError(f"config.json: rope_parameters is {new!r} and rope_scaling {old!r}; the two must agree")
    return (new, "rope_parameters") if new else (old, "rope_scaling")


def _theta(hf: Mapping[str, Any], found: Mapping[str, Any], where: str) -> float:
    outer, inner = hf.get("rope_theta"), found.get("rope_theta")
    if outer is not None and inner is not None and outer != inner:
        raise ValueError(f"config.json: rope_theta is {outer!r} and {inner!r} in {where}; the two must agree")
    return _number({"rope_theta": outer if inner is None else inner}, "rope_theta", 10_000.0)


def _context(rope: RopeConfig, max_positions: int) -> int:
    """Tokens that the model is meant to reach. Only ``llama3`` configurations name that length themselves."""
    if rope.kind in ("linear", "dynamic", "yarn"):
        return max(max_positions, int((rope.original_max_seq_len or max_positions) * rope.factor))
    return max_positions


# ------------------------------------------------------------------------------------------------- the weights


def load(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    max_seq_len: int | None = None,
    ops: Ops | None = None,
) -> Decoder:
    """Read a local Hugging Face folder: ``config.json`` and ``model.safetensors``, or shards and their index.

    Shapes and units: ``device`` None is ``runtime.device()``; ``dtype`` None is what the file stores the embedding
    in; ``max_seq_len`` in tokens replaces the context of config.json (RoPE keeps the angles of config.json); ``ops``
    as in ``Decoder``. One copy of the weights is made, tensor by tensor.

    Raises: FileNotFoundError for a folder or file that is not there; ValueError as ``config_from_hf``, for a ``dtype``
    that is not one of float64, float32, float16 and bfloat16, for a tensor that is missing, not expected, of a wrong
    shape or quantised, for an index that disagrees with its shards or leaves the folder, and for a folder that holds
    pickles only; MemoryError where a GPU is too full. Each comes before memory is taken for weights.

    Source: chapter 01; the safetensors format.
    """
    if dtype is not None and dtype not in _DTYPES.values():
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(map(str, _DTYPES.values()))}, or None")
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not a folder on this machine; kvlab loads local folders and downloads none"
        )
    config = config_from_hf(_read_json(folder / "config.json"), folder.resolve().name)
    if max_seq_len is not None:
        config = replace(config, max_seq_len=max_seq_len)
    decoder = Decoder(config, ops, device="meta")
    expected = {_hf_name(key): key for key in decoder.state_dict()}
    if config.tie_embeddings:
        del expected["lm_head.weight"]
    stored = _headers(_weight_files(folder))
    _check_tensors(folder, stored, {name: decoder.state_dict()[key].shape for name, key in expected.items()}, config)
    if dtype is None:
        dtype = _DTYPES[stored["model.embed_tokens.weight"].dtype]
    target = runtime.device() if device is None else torch.device(device)
    size = sum(decoder.state_dict()[key].numel() for key in expected.values())
    what = f"loading {config.name} ({size:,} parameters, {str(dtype).removeprefix('torch.')})"
    runtime.require_memory(size * dtype.itemsize, target, what, dtype.itemsize, "parameters")
    weights = {expected[name]: tensor for name, tensor in _read(stored, expected, target, dtype)}
    if config.tie_embeddings:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    decoder.load_state_dict(weights, strict=True, assign=True)
    if config.tie_embeddings:
        decoder.lm_head.weight = decoder.embed_tokens.weight
    return decoder


def _hf_name(key: str) -> str:
    return key if key.startswith("lm_head.") else f"model.{key}"


def _read_json(file: Path) -> Any:
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there; a checkpoint folder must hold {file.name}")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, brackets without end
        raise ValueError(f"{file} is not valid JSON: {error}") from None


def _weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """The safetensors files of a folder, each with the tensor names that an index gives it (None: no index)."""
    if (folder / _SINGLE).is_file():
        return {folder / _SINGLE: None}
    if not (folder / _INDEX).is_file():
        pickles = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLES)
        if pickles:
            raise ValueError(
                f"{folder} holds {', '.join(pickles[:3])} and no {_SINGLE}; kvlab never opens a pickle, which can run "
                "any code: convert the checkpoint to safetensors"
            )
        raise FileNotFoundError(f"{folder} holds neither {_SINGLE} nor {_INDEX}; one must be there")
    index = _read_json(folder / _INDEX)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / _INDEX} has no weight_map; it must map each tensor to its file")
    files: dict[Path, set[str] | None] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or "/" in name or "\\" in name or name in ("", ".", ".."):
            raise ValueError(
                f"{_INDEX}: {tensor} is said to be in {name!r}; a shard must be a file in the folder itself"
            )
        if not name.endswith(".safetensors"):
            raise ValueError(f"{_INDEX}: {tensor} is said to be in {name!r}; a shard must be a .safetensors file")
        names = files.setdefault(folder / name, set())
        assert names is not None
        names.add(tensor)
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{file} is named by {_INDEX} and is not there")
    return files


@dataclass(frozen=True)
class _Stored:
    """Where a tensor is, its shape and safetensors' name of its dtype."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def _open(file: Path, device: str = "cpu") -> Any:
    from safetensors import SafetensorError, safe_open  # kept out of `import kvlab`

    try:
        return safe_open(file, framework="pt", device=device)
    except SafetensorError as error:
        raise ValueError(f"{file} is not a complete safetensors file: {error}") from None


def _headers(files: Mapping[Path, set[str] | None]) -> dict[str, _Stored]:
    """What each file says it holds, read from its header alone."""
    stored: dict[str, _Stored] = {}
    for file, promised in files.items():
        with _open(file) as shard:
            names = set(shard.keys())
            if promised is not None and names != promised:
                name = sorted(names ^ promised)[0]
                said = "lists" if name in promised else "does not list"
                raise ValueError(f"{file}: {_INDEX} {said} the tensor {name} there; the index and the shard must agree")
            for name in sorted(names):
                part = shard.get_slice(name)
                stored[name] = _Stored(file, tuple(part.get_shape()), part.get_dtype())
    return stored


def _check_tensors(
    folder: Path, stored: dict[str, _Stored], expected: Mapping[str, torch.Size], config: ModelConfig
) -> None:
    for name, shape in expected.items():
        if name not in stored:
            close = [other for other in stored if other.endswith(name.removeprefix("model."))]
            found = f" (it holds {close[0]})" if close else ""
            raise ValueError(
                f"{folder} has no tensor {name}{found}; the model of its config.json needs it, {list(shape)}"
            )
        if stored[name].shape != tuple(shape):
            raise ValueError(
                f"{folder}: the tensor {name} is {list(stored[name].shape)}; by config.json it must be {list(shape)}"
            )
    for name, tensor in stored.items():
        if name.endswith("rotary_emb.inv_freq"):  # old checkpoints keep the angles, which config.json gives anyway
            continue
        if name == "lm_head.weight" and config.tie_embeddings:
            _check_tied(folder, stored)
        elif name not in expected:
            raise ValueError(
                f"{folder}: the tensor {name} {list(tensor.shape)} has no place in the model of its config.json"
            )
        if tensor.dtype not in _DTYPES:
            raise ValueError(
                f"{folder}: the tensor {name} is stored as {tensor.dtype}; it must be one of {', '.join(_DTYPES)}"
            )


def _check_tied(folder: Path, stored: dict[str, _Stored]) -> None:
    """Some exporters write the output layer although it is the embedding; the two must then be the same."""
    head, embedding = (dict(_read(stored, [name], torch.device("cpu"), None))[name] for name in _TIED)
    if not torch.equal(head, embedding):
        raise ValueError(
            f"{folder}: config.json sets tie_word_embeddings, and lm_head.weight differs from model.embed_tokens.weight"
        )


_TIED = ("lm_head.weight", "model.embed_tokens.weight")


def _read(
    stored: Mapping[str, _Stored], names: Iterable[str], device: torch.device, dtype: torch.dtype | None
) -> Iterable[tuple[str, Tensor]]:
    """Tensors one by one, each file opened once. A copy is made: safetensors maps the file into memory, and a mapped
    weight would change, or crash the process, when somebody writes to the file."""
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(stored[name].file, []).append(name)
    for file, held in by_file.items():
        with _open(file) as shard:
            for name in held:
                yield name, shard.get_tensor(name).to(device=device, dtype=dtype, copy=True)


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a local Hugging Face folder, from its ``tokenizer.json``.

    Shapes and units: gives a ``tokenizers.Tokenizer``: ``encode(text).ids`` is a list of token ids, ``decode(ids)``
    text.

    Raises: FileNotFoundError where the folder has no tokenizer.json; ValueError where the file is not a tokenizer.

    Source: chapter 01; Hugging Face tokenizers.
    """
    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there; kvlab reads tokenizer.json and no other tokenizer file")
    from tokenizers import Tokenizer  # kept out of `import kvlab`

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file} is not a tokenizer: {error}") from None


# ------------------------------------------------------------------------------------------------------ saving


def save(decoder: Decoder, path: str | os.PathLike[str], architecture: str = "LlamaForCausalLM") -> None:
    """Write a decoder as a Hugging Face folder (``config.json``, ``model.safetensors``) that transformers reads too.

    Shapes and units: weights are stored in the decoder's dtype, tied embeddings once. ``architecture`` is a key of
    ``ARCHITECTURES``. Both files are written beside their places before either is put there, each whole or not at all.
    Of a stretched RoPE the layout keeps the trained context and the factor; ``load`` gives as ``max_seq_len`` what
    these reach.

    Raises: ValueError where the architecture is unknown or cannot describe this decoder, or the decoder holds other
    tensors than its configuration says (an output layer of its own where it should be tied), before anything is
    written.

    Source: chapter 01; the safetensors format.
    """
    if architecture not in tuple(ARCHITECTURES):
        raise ValueError(f"architecture is {architecture!r}; it must be one of {', '.join(ARCHITECTURES)}")
    config = decoder.config
    hf = _to_hf(config, architecture, decoder.dtype)
    back = _comparable(config_from_hf(hf, config.name))
    wrong = [f.name for f in fields(config) if getattr(back, f.name) != getattr(_comparable(config), f.name)]
    if wrong:
        name = wrong[0]
        raise ValueError(f"a {architecture} cannot have {name} {getattr(config, name)!r}; choose another architecture")
    weights = decoder.state_dict()
    shapes, right = (
        {k: list(t.shape) for k, t in d.items()} for d in (weights, Decoder(config, device="meta").state_dict())
    )
    for key in sorted(shapes.keys() | right.keys()):
        if shapes.get(key) != right.get(key):
            raise ValueError(f"decoder has {key} {shapes.get(key)}; by its configuration it must be {right.get(key)}")
    if config.tie_embeddings:
        head, embedding = weights.pop("lm_head.weight"), weights["embed_tokens.weight"]
        if head.data_ptr() != embedding.data_ptr() and not torch.equal(head, embedding):
            raise ValueError(
                "decoder has an lm_head.weight that differs from embed_tokens.weight; its configuration ties them, so "
                "they must be equal (or tie_embeddings False)"
            )
    from safetensors.torch import save_file  # kept out of `import kvlab`

    weights = {_hf_name(key): tensor.detach().cpu().contiguous() for key, tensor in weights.items()}
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    partials = {name: folder / f".{name}.partial" for name in (_SINGLE, "config.json")}
    try:
        save_file(weights, partials[_SINGLE], metadata={"format": "pt"})
        partials["config.json"].write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")
        for name, partial in partials.items():
            os.replace(partial, folder / name)
    finally:
        for partial in partials.values():
            partial.unlink(missing_ok=True)


def _to_hf(config: ModelConfig, architecture: str, dtype: torch.dtype) -> dict[str, Any]:
    kind = ARCHITECTURES[architecture]
    hf: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": kind.model_type,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _trained(config)
        if config.rope.kind in ("linear", "dynamic")
        else config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_to_hf(config),
    }
    if kind.qkv_bias is None:
        hf["attention_bias"] = config.attention_bias
    if kind.has_mlp_bias:
        hf["mlp_bias"] = config.mlp_bias
    if kind.window == "always":
        hf["sliding_window"] = config.sliding_window
    elif kind.window == "switched":
        on = [config.window_size(i) != (-1, -1) for i in range(config.num_layers)]
        hf["use_sliding_window"], hf["sliding_window"] = any(on), config.sliding_window
        hf["layer_types"] = ["sliding_attention" if sliding else "full_attention" for sliding in on]
    return hf


def _trained(config: ModelConfig) -> int:
    return config.rope.original_max_seq_len or config.max_seq_len


def _rope_to_hf(config: ModelConfig) -> dict[str, Any] | None:
    rope = config.rope
    if rope.kind == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = _trained(config)
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        keys = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
        scaling |= {key: getattr(rope, key) for key in keys if getattr(rope, key) is not None}
    return scaling


def _comparable(config: ModelConfig) -> ModelConfig:
    """A configuration without what the layout cannot keep: the context where RoPE stretches it, and spellings."""
    rope = config.rope
    original = _trained(config) if rope.kind != "default" else None
    layers = config.sliding_layers
    if config.sliding_window is None or (layers is not None and set(layers) >= set(range(config.num_layers))):
        layers = None
    stretched = rope.kind in ("linear", "dynamic", "yarn")
    return replace(
        config,
        max_seq_len=1 if stretched else config.max_seq_len,
        rope=replace(rope, original_max_seq_len=original),
        sliding_layers=layers,
    )
