"""One decoder for the whole book: a Llama/Qwen-style transformer that hands attention to whatever cache it is given."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvlab.batch import Batch
from kvlab.cache import KVCache, take_back
from kvlab.config import ModelConfig
from kvlab.rope import Rope, rotate


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row of x [..., d] to unit root mean square, in float32, then by weight [d]; gives x's dtype.

    Source: Zhang and Sennrich 2019."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise; all three [T, intermediate].

    Source: Shazeer 2020 (GLU variants)."""
    return functional.silu(gate) * up


def project(x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """Several projections of x [T, d], each [T, out]: one product where their weights lie one after the other in
    memory, as ``Decoder.merge_projections`` lays them, and no gradient is wanted.

    Source: chapter 07; vLLM merges the same projections."""
    if torch.is_grad_enabled() or any(type(layer) is not nn.Linear for layer in layers):  # one may have been replaced
        return tuple(layer(x) for layer in layers)
    weight = _as_one([layer.weight for layer in layers])
    biases = [layer.bias for layer in layers if layer.bias is not None]
    bias = _as_one(biases) if biases else None
    if weight is None or (biases and (bias is None or len(biases) < len(layers))):
        return tuple(layer(x) for layer in layers)
    return functional.linear(x, weight, bias).split([layer.out_features for layer in layers], dim=-1)


def _as_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Tensors that lie one after the other in one piece of memory as one tensor, along their first dimension."""
    first = parts[0]
    for a, b in itertools.pairwise(parts):
        together = a.data_ptr() + a.nbytes == b.data_ptr() and a.shape[1:] == b.shape[1:] and a.dtype == b.dtype
        if not (together and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()):
            return None
    if not all(part.is_contiguous() for part in parts) or first.numel() == 0:
        return None
    return first.as_strided((sum(part.shape[0] for part in parts), *first.shape[1:]), first.stride())


def _lay_together(layers: list[nn.Linear]) -> None:
    """Give the layers weights and biases that lie one after the other in memory, with the values they have."""
    for name in ("weight", "bias"):
        parts = [getattr(layer, name) for layer in layers]
        if all(part is not None for part in parts):
            whole = torch.cat([part.detach() for part in parts])
            for part, piece in zip(parts, whole.split([len(part) for part in parts]), strict=True):
                part.data = piece


@dataclass(frozen=True)
class Ops:
    """The three pointwise operations a decoder uses, so that a later chapter can hand it fused ones.

    Shapes and units: as ``rms_norm``, ``rope.rotate`` and ``swiglu``.

    Source: chapter 07.
    """

    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate
    swiglu: Callable[[Tensor, Tensor], Tensor] = swiglu


class RMSNorm(nn.Module):
    """A learned gain [size] over ``ops.rms_norm``. Source: Zhang and Sennrich 2019."""

    def __init__(self, size: int, eps: float, ops: Ops) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.ops = eps, ops

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] to [..., size]. Source: Zhang and Sennrich 2019."""
        return self.ops.rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Projections and rotation around ``cache.attend``: the only place where the model meets the cache.

    Shapes and units: x [T, d]; cos, sin [T, D].

    Source: chapter 01; Touvron et al. 2023 (Llama 2).
    """

    def __init__(self, config: ModelConfig, layer: int, ops: Ops) -> None:
        super().__init__()
        self.layer, self.head_dim, self.ops = layer, config.head_dim, ops
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.attention_out_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps, ops) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps, ops) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache) -> Tensor:
        """x [T, d] to [T, d]; k and v of the T tokens go into the cache. Source: chapter 01."""
        heads = (-1, self.head_dim)
        q, k, v = (y.unflatten(1, heads) for y in project(x, self.q_proj, self.k_proj, self.v_proj))
        q = self.ops.rotate(self.q_norm(q), cos, sin)  # [T, H, D]
        k = self.ops.rotate(self.k_norm(k), cos, sin)  # [T, H_kv, D]
        return self.o_proj(cache.attend(self.layer, q, k, v).flatten(1))


class MLP(nn.Module):
    """The gated feed-forward part of a layer; x [T, d] to [T, d]. Source: Shazeer 2020."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, d] to [T, d]. Source: Shazeer 2020."""
        return self.down_proj(self.ops.swiglu(*project(x, self.gate_proj, self.up_proj)))


class DecoderLayer(nn.Module):
    """Attention and MLP, each normalised first and added to the residual stream [T, d]. Source: Llama 2."""

    def __init__(self, config: ModelConfig, layer: int, ops: Ops) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, ops)
        self.self_attn = Attention(config, layer, ops)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, ops)
        self.mlp = MLP(config, ops)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache) -> Tensor:
        """x [T, d] to [T, d]. Source: Touvron et al. 2023."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """A decoder-only transformer over ragged batches.

    Shapes and units: ``decoder(batch, cache)`` gives logits [R, vocab] float32, R = len(batch.logits_indices).
    Parameters carry Hugging Face's names without the leading ``model.``. Weights start random (std 0.02).

    Raises: ValueError for shapes this decoder does not build (multi-head latent attention, experts).

    Source: chapter 01; Touvron et al. 2023 (Llama 2), Yang et al. 2025 (Qwen3).
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if config.mla is not None or config.moe is not None:
            raise ValueError(f"{config.name} has latent attention or experts; Decoder builds plain Llama-style layers")
        super().__init__()
        ops = ops or Ops()
        self.config = config
        self.rope = Rope(config)
        with torch.device(device):
            if torch.device(device).type == "meta":  # where its initialisation would import PyTorch's compiler: seconds
                table = torch.empty(config.vocab_size, config.hidden_size)
                self.embed_tokens = nn.Embedding.from_pretrained(table, freeze=False)
            else:
                self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(DecoderLayer(config, i, ops) for i in range(config.num_layers))
            self.norm = RMSNorm(config.hidden_size, config.norm_eps, ops)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.to(dtype)
        if torch.device(device).type != "meta":
            self.apply(_init_weights)

    def merge_projections(self) -> Decoder:
        """Lay the weights of q, k and v, and those of gate and up, one after the other in memory; gives the decoder.

        Then each group is one product wherever no gradient is wanted: fewer launches, and larger ones. Names, values
        and training stay as they are; moving or converting the decoder parts the weights again.

        Source: chapter 07; vLLM's and SGLang's merged projections.
        """
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            _lay_together([layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj])
            _lay_together([layer.mlp.gate_proj, layer.mlp.up_proj])
        return self

    @property
    def device(self) -> torch.device:
        """Where the weights are. Source: chapter 01."""
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are stored in. Source: chapter 01."""
        return self.embed_tokens.weight.dtype

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """Prepare the cache, run the layers, and give logits [R, vocab] float32 of the rows the batch asks for.

        A pass that fails is undone: every sequence has the tokens it had before, and one that had none is freed.

        Raises: whatever ``cache.prepare`` or a layer raises.  Source: chapter 01.
        """
        return self.forward_with_states(batch, cache)[0]

    def forward_with_states(self, batch: Batch, cache: KVCache) -> tuple[Tensor, Tensor]:
        """As calling the decoder, and beside the logits [R, vocab] the last hidden states [R, d] they come from.

        Raises: whatever ``cache.prepare`` or a layer raises.  Source: chapter 05, whose heads read the states.
        """
        cache.prepare(batch)
        try:
            states = self.hidden(batch, cache)[batch.logits_indices]
            return self.logits(states), states
        except BaseException:
            take_back(cache, batch.seq_ids, batch.past_lens)
            raise

    def hidden(self, batch: Batch, cache: KVCache) -> Tensor:
        """The last hidden states [T, d] of a batch for which the cache is prepared. Source: chapter 07."""
        x = self.embed_tokens(batch.token_ids)
        lengths = None
        if self.rope.needs_lengths:
            q_lens = batch.cu_seqlens_q[1:] - batch.cu_seqlens_q[:-1]
            lengths = batch.seq_lens.repeat_interleave(q_lens, output_size=batch.num_tokens)
        cos, sin = (t.to(x.dtype) for t in self.rope.table(batch.positions, lengths))
        for layer in self.layers:
            x = layer(x, cos, sin, cache)
        return self.norm(x)

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """Scores over the vocabulary: [R, d] to [R, vocab] float32. Source: chapter 01."""
        return self.lm_head(hidden_rows).float()


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
