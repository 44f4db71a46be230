"""Heads on the target's own last state, each of which names a token further ahead; and the drafter that asks them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from kvlab import runtime
from kvlab.batch import as_int
from kvlab.config import is_number
from kvlab.model import Decoder
from kvlab.sampling import SamplingParams
from kvlab.speculative._drafters import Draft, Growth, check_shape, drafts_of, grow, require_decoder
from kvlab.speculative._tree import Tree


class Heads(nn.Module):
    """Small networks that look ahead from one state of a target, and share its embedding and its output matrix.

    Where the target chose token t + 1 from the state of token t, head k names token t + 1 + k. As Medusa's heads they
    begin at that one state, and have no keys and values. As Hydra's they go step by step: head k reads what head k - 1
    made of the state, and token t + k, which has been named by then.

    Shapes and units: ``hidden_size`` d and ``norm_eps`` are the target's; ``num_heads`` heads, each of one hidden layer
    of ``width`` (default 2 d).

    Raises: ValueError for a size under 1 or a norm_eps that is no number, 0 or more.

    Source: chapter 05; Cai et al. 2024 (Medusa), Ankner et al. 2024 (Hydra), Gloeckle et al. 2024 (joint training).
    """

    def __init__(self, hidden_size: int, num_heads: int = 4, width: int | None = None, norm_eps: float = 1e-5) -> None:
        hidden_size, num_heads = as_int(hidden_size, "hidden_size"), as_int(num_heads, "num_heads")
        width = 2 * hidden_size if width is None else as_int(width, "width")
        if min(hidden_size, num_heads, width) < 1:
            raise ValueError(
                f"hidden_size is {hidden_size}, num_heads {num_heads} and width {width}; each must be 1 or more"
            )
        if not is_number(norm_eps) or norm_eps < 0:
            raise ValueError(f"norm_eps is {norm_eps!r}; it must be a number, 0 or more")
        super().__init__()
        self.hidden_size, self.num_heads, self.width, self.norm_eps = hidden_size, num_heads, width, norm_eps
        self.up = nn.ModuleList(nn.Linear(2 * hidden_size, width) for _ in range(num_heads))
        down = [nn.Linear(width, hidden_size, bias=False) for _ in range(num_heads)]
        for layer in down:
            nn.init.zeros_(layer.weight)  # each head begins as the target's own output
        self.down = nn.ModuleList(down)

    def forward(self, k: int, states: Tensor, embedded: Tensor) -> Tensor:
        """Head k's states, which the target's output matrix turns into logits.

        Shapes and units: ``k`` from 0; states [R, d] of the head before (of head 0: ``Decoder.hidden``'s), embedded
        [R, d] the embedding of the token that was chosen from each; gives [R, d].

        Raises: ValueError for a head that there is not, or states that do not fit.

        Source: chapter 05; Ankner et al. 2024.
        """
        self._check(k, states, embedded)
        size = (self.hidden_size,)
        both = [functional.rms_norm(x.float(), size, eps=self.norm_eps).to(states.dtype) for x in (states, embedded)]
        return states + self.down[k](functional.silu(self.up[k](torch.cat(both, dim=1))))

    def _check(self, k: int, states: Tensor, embedded: Tensor) -> None:
        if not 0 <= as_int(k, "k") < self.num_heads:
            raise ValueError(f"k is {k}; it must be one of the {self.num_heads} heads, from 0")
        for name, x in (("states", states), ("embedded", embedded)):
            runtime.require_tensor(name, x)
            if x.ndim != 2 or x.shape[1] != self.hidden_size or len(x) != len(states):
                raise ValueError(
                    f"{name} has shape {list(x.shape)}; it must be [R, {self.hidden_size}], R of both equal"
                )
            if (weight := self.down[0].weight).dtype != x.dtype or weight.device != x.device:
                raise ValueError(
                    f"{name} is {x.dtype} on {x.device}; it must be as the heads, {weight.dtype} on {weight.device}"
                )

    def save(self, path: Path | str, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write the heads as one safetensors file, rounded to ``dtype``.

        Raises: ValueError for a dtype that is not one of floating point.  Source: chapter 05.
        """
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"dtype is {dtype!r}; it must be one of floating point, such as torch.bfloat16")
        facts = {name: getattr(self, name) for name in ("hidden_size", "num_heads", "width", "norm_eps")}
        tensors = {name: t.detach().to(dtype).contiguous().cpu() for name, t in self.state_dict().items()}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata={"heads": json.dumps(facts)})

    @classmethod
    def load(cls, path: Path | str, model: Decoder) -> Heads:
        """Read what ``save`` wrote, in the target's dtype and on its device.

        Raises: ValueError for a file that holds no heads, or heads of another hidden size.  Source: chapter 05.
        """
        try:
            with safe_open(path, "pt", device="cpu") as file:
                facts = json.loads((file.metadata() or {})["heads"])
                heads = cls(**facts)
                heads.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        except (OSError, KeyError, TypeError, RuntimeError, ValueError, SafetensorError) as error:
            raise ValueError(f"{path} holds no heads: {error}") from None
        _check_size(heads, model)
        return heads.to(device=model.device, dtype=model.dtype).requires_grad_(False)


def _check_size(heads: Heads, model: Decoder) -> None:
    require_decoder("model", model)
    if not isinstance(heads, Heads):
        raise ValueError(f"heads is a {type(heads).__name__}; it must be Heads")
    if heads.hidden_size != model.config.hidden_size:
        raise ValueError(
            f"heads are of hidden size {heads.hidden_size}; it must be that of {model.config.name}, "
            f"{model.config.hidden_size}"
        )


class HeadDrafter:
    """Proposals of heads on the target's last state: no second model, no second cache, a few small products a step.

    It draws from the processed distribution of each request, as ``ModelDrafter`` does.

    Shapes and units: ``shape`` is the length of a chain (default: one token a head) or a ``Tree`` no deeper than there
    are heads.

    Raises: ValueError for heads of another hidden size, dtype or device, or a shape that is none or too deep.

    Source: chapter 05; Cai et al. 2024 (Medusa), Ankner et al. 2024 (Hydra).
    """

    def __init__(self, model: Decoder, heads: Heads, shape: int | Tree | None = None) -> None:
        _check_size(heads, model)
        if (weight := heads.down[0].weight).dtype != model.dtype or weight.device != model.device:
            raise ValueError(
                f"heads are {weight.dtype} on {weight.device}; they must be as the model, {model.dtype} on "
                f"{model.device}"
            )
        self.model, self.heads = model, heads
        self.tree = check_shape(heads.num_heads if shape is None else shape)
        self.num_speculative_tokens = max(self.tree.depths)
        if self.num_speculative_tokens > heads.num_heads:
            raise ValueError(f"shape is {self.num_speculative_tokens} deep; there are {heads.num_heads} heads")
        self._states: dict[int, tuple[int, Tensor]] = {}

    def check(self, model: Decoder) -> None:
        """Refuse any target but the one whose states the heads know. Raises: ValueError.  Source: chapter 05."""
        if model is not self.model:
            raise ValueError(f"the heads were given {self.model.config.name}; the target must be that same model")

    @torch.inference_mode()
    def propose(
        self, texts: Mapping[int, Sequence[int]], params: Mapping[int, SamplingParams], depths: Mapping[int, int]
    ) -> dict[int, Draft]:
        """A chain or tree for each text whose last token's state is known. Source: chapter 05."""
        known = [s for s, text in texts.items() if self._states.get(s, (0,))[0] == len(text)]
        grown = {s: Growth(len(texts[s]), min(depths[s], self.num_speculative_tokens)) for s in known}
        states = torch.stack([self._states[s][1] for s in known]) if known else torch.empty(0)

        def logits_of(growing: dict[int, Growth]) -> Tensor:
            nonlocal states
            if (depth := next(iter(growing.values())).depth) == 0:
                newest = [texts[s][-1] for s in growing]
            else:
                newest = [g.tokens[node] for g in growing.values() for node in g.frontier]
                states = states[[row for g in growing.values() for row in g.rows]]
            token_ids = torch.tensor(newest, device=self.model.device)
            states = self.heads(depth, states, self.model.embed_tokens(token_ids))
            return self.model.logits(states)

        grow(grown, self.tree, params, logits_of)
        return drafts_of(grown)

    def accepted(self, seq_id: int, length: int, state: Tensor) -> None:
        """Keep the state [d] from which the last of ``length`` tokens was chosen.

        Raises: ValueError for a state of another shape.  Source: chapter 05.
        """
        runtime.require_tensor("state", state)
        if state.shape != (self.heads.hidden_size,):
            raise ValueError(f"state has shape {list(state.shape)}; it must be [{self.heads.hidden_size}]")
        self._states[seq_id] = (length, state)

    def free(self, seq_id: int) -> None:
        """Forget the sequence's state. Source: chapter 05."""
        self._states.pop(seq_id, None)
