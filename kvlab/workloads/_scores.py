"""Real rows of scores, from a model that reads a text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvlab.batch import Batch
from kvlab.cache import NoCache
from kvlab.model import Decoder


class _Watching(NoCache):
    """A cache that keeps nothing and notes the last query's scores against all keys."""

    def __init__(self, model: Decoder) -> None:
        super().__init__(model.config)
        self.rows: list[Tensor] = []

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        assert k is not None
        last = q[-1].unflatten(0, (k.shape[1], -1)) * q.shape[2] ** -0.5  # [H_kv, G, D]
        self.rows.append(torch.einsum("hgd,thd->hgt", last.float(), k.float()).flatten(0, 1))
        return super().attend(layer, q, k, v)


@torch.inference_mode()
def last_scores(model: Decoder, token_ids: Sequence[int]) -> np.ndarray:
    """The scaled scores of a text's last query against all of its keys, in every layer and head.

    Shapes and units: token_ids of one text, L of them; gives float32 [layers · H, L], the input of a softmax.

    Raises: ValueError where there are no tokens.

    Source: chapter 03.
    """
    if len(token_ids) == 0:
        raise ValueError("token_ids is empty; a text has one token or more")
    watching = _Watching(model)
    model(Batch.build([0], [list(token_ids)], [0], device=model.device), watching)
    return torch.cat(watching.rows).cpu().numpy()
