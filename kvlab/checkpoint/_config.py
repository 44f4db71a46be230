"""A checkpoint's config.json and a ``ModelConfig``: one made from the other, and what is not understood refused."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from kvlab import costs
from kvlab.config import ROPE_KINDS, ModelConfig, RopeConfig, is_number

if TYPE_CHECKING:
    pass


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
_LONGEST, _LARGEST = 2**63, 2**48  # tokens and parameters under which no byte count of a tensor overflows


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


def config_to_hf(config: ModelConfig, architecture: str, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of a model class, one of ``ARCHITECTURES``, with weights of ``dtype``.

    What the class cannot have is left out: compare the way back. Source: transformers' configuration files.
    """
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


def comparable(config: ModelConfig) -> ModelConfig:
    """A configuration without what the layout cannot keep: the context where RoPE stretches it, and spellings.

    Source: chapter 01.
    """
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
