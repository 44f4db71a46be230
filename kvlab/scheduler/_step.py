"""What one forward pass computes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch

from kvlab.batch import Batch
from kvlab.scheduler._request import Request


@dataclass(slots=True)
class Step:
    """One forward pass: requests that decode, one token each, and chunks of prompts.

    Shapes and units: ``prefills`` maps a request to the tokens of its chunk; ``budget`` is what is left, in tokens;
    ``preempted`` are those that had to give their blocks back for it.

    Source: chapter 06.
    """

    budget: int
    decodes: list[Request] = field(default_factory=list)
    prefills: dict[Request, int] = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether there is anything to compute. Source: chapter 06."""
        return bool(self.decodes or self.prefills)

    @property
    def requests(self) -> list[Request]:
        """Everybody in the step, in the order of the batch: decodes, then chunks. Source: chapter 06."""
        return [*self.decodes, *self.prefills]

    @property
    def q_lens(self) -> list[int]:
        """New tokens of each request. Source: chapter 06."""
        return [*[1] * len(self.decodes), *self.prefills.values()]

    @property
    def num_tokens(self) -> int:
        """New tokens in all. Source: chapter 06."""
        return len(self.decodes) + sum(self.prefills.values())

    @property
    def sampled(self) -> list[Request]:
        """Those that have a new token after this step, in the order of its logits: whoever has caught up.

        To be asked before ``update``. Source: chapter 06."""
        done = [r for r, chunk in self.prefills.items() if r.num_computed_tokens + chunk == r.num_tokens]
        return [*self.decodes, *done]

    def batch(self, device: torch.device | str = "cpu") -> Batch:
        """The step as one ragged batch. Logits are asked for only of those who have caught up.

        Source: chapter 06.
        """
        requests, q_lens = self.requests, self.q_lens
        past = [r.num_computed_tokens for r in requests]
        new = [r.token_ids(p, p + q) for r, p, q in zip(requests, past, q_lens, strict=True)]
        batch = Batch.build([r.request_id for r in requests], new, past, device=device)
        caught_up = [p + q == r.num_tokens for r, p, q in zip(requests, past, q_lens, strict=True)]
        if not all(caught_up):
            last = [end - 1 for end in itertools.accumulate(q_lens)]
            batch.logits_indices = torch.tensor(
                list(itertools.compress(last, caught_up)), dtype=torch.int64, device=device
            )
        return batch
