"""Who proposes: a small model with a cache of its own, or the text itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvlab import runtime
from kvlab.batch import Batch, as_int, as_ints
from kvlab.cache import CacheFull, KVCache
from kvlab.model import Decoder
from kvlab.sampling import SamplingParams, inverse_cdf, processed_probs, uniform
from kvlab.speculative._tree import MAX_DRAFT_TOKENS, Tree


@dataclass(frozen=True)
class Draft:
    """What is proposed to follow one text.

    Shapes and units: ``tokens`` holds a token id a node of ``tree``; ``probs`` [len(tokens), vocab] float32 the
    distributions they were drawn from, given the siblings drawn before, None where each was certain.

    Raises: ValueError where their numbers differ, or one is of another type.

    Source: chapter 05.
    """

    tokens: list[int]
    tree: Tree
    probs: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", as_ints(self.tokens, "tokens"))
        if not isinstance(self.tree, Tree):
            raise ValueError(f"tree is {self.tree!r}; it must be a Tree")
        if self.probs is not None:
            runtime.require_tensor("probs", self.probs)
            if self.probs.ndim != 2 or self.probs.dtype != torch.float32:
                raise ValueError(
                    f"probs is {self.probs.dtype} {list(self.probs.shape)}; it must be torch.float32 [tokens, vocab]"
                )
        rows = len(self.tokens) if self.probs is None else len(self.probs)
        if not len(self.tokens) == len(self.tree) == rows:
            raise ValueError(
                f"tokens, tree and probs have {len(self.tokens)}, {len(self.tree)} and {rows} entries; each must have "
                "one a draft token"
            )

    def cut(self, length: int) -> Draft:
        """The first ``length`` draft tokens, all where it is more.

        Raises: ValueError for a length that is no integer.  Source: chapter 05.
        """
        tree = self.tree.cut(length)
        return Draft(self.tokens[: len(tree)], tree, None if self.probs is None else self.probs[: len(tree)])


class Drafter(Protocol):
    """What the speculative loop asks of whoever proposes.

    Shapes and units: ``num_speculative_tokens`` is the most tokens of a proposal that can be accepted.

    Source: chapter 05.
    """

    num_speculative_tokens: int

    def check(self, model: Decoder) -> None:
        """Refuse a target that these proposals do not fit. Raises: ValueError.  Source: chapter 05."""
        ...

    def propose(
        self, texts: Mapping[int, Sequence[int]], params: Mapping[int, SamplingParams], depths: Mapping[int, int]
    ) -> dict[int, Draft]:
        """What could follow each text; an id may be left out.

        Shapes and units: all keyed by sequence id; ``texts`` are token ids, all that is known of a sequence;
        ``depths`` the most tokens that could be accepted, 1 or more.  Source: chapter 05.
        """
        ...

    def accepted(self, seq_id: int, length: int, state: Tensor) -> None:
        """A sequence's text now has ``length`` tokens, the last of which the target chose from ``state`` [d].

        Source: chapter 05.
        """
        ...

    def free(self, seq_id: int) -> None:
        """Forget the sequence; an unknown id is no error. Source: chapter 05."""
        ...


def check_shape(shape: int | Tree) -> Tree:
    """A number of tokens as a chain, or a tree as it is.

    Raises: ValueError where it is neither, or holds no token or more than 62.  Source: chapter 05.
    """
    if isinstance(shape, Tree):
        tree = shape
    else:
        length = as_int(shape, "shape")
        if not 1 <= length <= MAX_DRAFT_TOKENS:
            raise ValueError(f"shape is {length}; it must be 1 to {MAX_DRAFT_TOKENS} tokens, or a Tree")
        tree = Tree.chain(length)
    if len(tree) == 0:
        raise ValueError("shape is a tree without nodes; it must have one or more")
    return tree


def require_decoder(name: str, model: object) -> None:
    """Refuse what is no Decoder. Raises: ValueError that names the argument.  Source: chapter 05."""
    if not isinstance(model, Decoder):
        raise ValueError(f"{name} is a {type(model).__name__}; it must be a Decoder")


class NGramDrafter:
    """Prompt lookup: what followed the last few tokens when they stood in the text before. No model at all.

    The longest suffix of ``max_n`` tokens or fewer that stands earlier in the text decides, down to ``min_n``.

    Shapes and units: ``num_speculative_tokens`` are copied at most. ``match`` is "latest", the occurrence nearest to
    the end, or "first", as vLLM has it.

    Raises: ValueError for a number under 1, min_n over max_n, or another ``match``.

    Source: chapter 05; Saxena 2023 (prompt lookup decoding).
    """

    def __init__(
        self, num_speculative_tokens: int = 4, *, max_n: int = 3, min_n: int = 1, match: str = "latest"
    ) -> None:
        self.num_speculative_tokens = len(check_shape(as_int(num_speculative_tokens, "num_speculative_tokens")))
        self.max_n, self.min_n, self.match = as_int(max_n, "max_n"), as_int(min_n, "min_n"), match
        if not 1 <= self.min_n <= self.max_n:
            raise ValueError(f"min_n is {min_n} and max_n {max_n}; they must be 1 or more, min_n no more than max_n")
        if match not in ("latest", "first"):
            raise ValueError(f'match is {match!r}; it must be "latest" or "first"')

    def check(self, model: Decoder) -> None:
        """Any target will do. Source: chapter 05."""

    def lookup(self, text: Sequence[int], most: int | None = None) -> list[int]:
        """The tokens that followed the last occurrence of the text's end; empty where there is none.

        Shapes and units: token ids in, up to ``most`` token ids out.

        Raises: ValueError for what are no integers of 64 bits, or a negative ``most``.  Source: chapter 05.
        """
        most = self.num_speculative_tokens if most is None else min(as_int(most, "most"), self.num_speculative_tokens)
        if most < 0:
            raise ValueError(f"most is {most}; it must be 0 or more")
        try:
            ids = np.asarray(as_ints(text, "text"), dtype=np.int64)
        except OverflowError:
            raise ValueError("text holds an integer beyond 64 bits; it must hold token ids") from None
        for n in range(min(self.max_n, len(ids) - 1), self.min_n - 1, -1):
            windows = np.lib.stride_tricks.sliding_window_view(ids[:-1], n)  # each is followed by a token
            found = np.flatnonzero((windows == ids[-n:]).all(axis=1))
            if len(found):
                start = int(found[0 if self.match == "first" else -1]) + n
                return ids[start : start + most].tolist()
        return []

    def propose(
        self, texts: Mapping[int, Sequence[int]], params: Mapping[int, SamplingParams], depths: Mapping[int, int]
    ) -> dict[int, Draft]:
        """A chain for each text whose end stands in it before. Source: chapter 05."""
        found = {s: self.lookup(text, depths[s]) for s, text in texts.items()}
        return {s: Draft(tokens, Tree.chain(len(tokens))) for s, tokens in found.items() if tokens}

    def accepted(self, seq_id: int, length: int, state: Tensor) -> None:
        """Nothing to keep; state [d] is not used. Source: chapter 05."""

    def free(self, seq_id: int) -> None:
        """Nothing to forget. Source: chapter 05."""


@dataclass
class Growth:
    """A proposal while it grows, level by level.

    Shapes and units: ``text_len`` tokens of the text, ``depth_limit`` levels at most; ``tokens`` and ``parents`` of its
    nodes so far, each drawn from its row of ``probs`` (empty where the request is greedy); ``frontier`` the nodes whose
    children come next, -1 the root, and ``rows`` those of the last logits from which they came.

    Source: chapter 05.
    """

    text_len: int
    depth_limit: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    shape_nodes: list[int] = field(default_factory=list)  # which node of the drafter's shape each one is
    probs: list[Tensor] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [-1])
    rows: list[int] = field(default_factory=list)
    depth: int = 0  # of the frontier


def grow(
    grown: Mapping[int, Growth], shape: Tree, params: Mapping[int, SamplingParams],
    logits_of: Callable[[dict[int, Growth]], Tensor],
) -> None:  # fmt: skip
    """Let proposals grow into a shape, all of them one level at a time.

    Shapes and units: ``logits_of`` gives logits [rows, vocab] after each node of every frontier, sequence by sequence.
    What has grown stays where it raises.

    Source: chapter 05.
    """
    growing = {s: g for s, g in grown.items() if g.depth_limit > 0}
    children = shape.children
    while growing:
        _add_level(growing, children, logits_of(growing), params)
        growing = {s: g for s, g in growing.items() if g.frontier and g.depth < g.depth_limit}


def _add_level(
    growing: Mapping[int, Growth], children: Mapping[int, Sequence[int]], logits: Tensor,
    params: Mapping[int, SamplingParams],
) -> None:  # fmt: skip
    """Give every node of the frontiers its children; those that have children in turn are the next frontier."""
    at = [(s, node) for s, g in growing.items() for node in g.frontier]
    wanted = [children[growing[s].shape_nodes[node] if node >= 0 else -1] for s, node in at]
    places = [growing[s].text_len + growing[s].depth for s, _ in at]
    tokens, probs = choose_siblings(logits, [params[s] for s, _ in at], [len(w) for w in wanted], places)
    for g in growing.values():
        g.frontier, g.rows, g.depth = [], [], g.depth + 1
    for row, (s, node) in enumerate(at):
        growth = growing[s]
        for rank, shape_node in enumerate(wanted[row]):
            if tokens[row][rank] < 0:
                break
            if shape_node in children:
                growth.frontier.append(len(growth.tokens))
                growth.rows.append(row)
            growth.tokens.append(tokens[row][rank])
            growth.parents.append(node)
            growth.shape_nodes.append(shape_node)
            if params[s].temperature > 0:
                growth.probs.append(probs[rank][row])


def drafts_of(grown: Mapping[int, Growth]) -> dict[int, Draft]:
    """Proposals as they have grown, without the empty ones. Source: chapter 05."""
    return {
        s: Draft(g.tokens, Tree(tuple(g.parents)), torch.stack(g.probs) if g.probs else None)
        for s, g in grown.items()
        if g.tokens
    }


class ModelDrafter:
    """A small model of the same vocabulary, with a cache of its own.

    It is sent what its cache has not seen, so it catches up by itself, also after all of its tokens were accepted (then
    two: its own last one, and the target's). A rejected tail is taken back by ``truncate``. A chain costs it one pass a
    token; a tree one pass a level, in which the levels above are computed again.

    It draws from the processed distribution of each request, and hands it over with the tokens. Siblings are drawn
    without replacement; a greedy request gets the likeliest ones.

    Shapes and units: ``shape`` is the length of a chain, or a ``Tree``. ``cache`` must hold each text and the tokens of
    one proposal; where it is full, less or nothing is proposed.

    Raises: ValueError for a model that is no Decoder, or a shape that is none or has more nodes than a tree mask has
    bits.

    Source: chapter 05; Leviathan et al. 2023; Chen et al. 2024 (Sequoia) for siblings without replacement.
    """

    def __init__(self, model: Decoder, cache: KVCache, shape: int | Tree = 4) -> None:
        require_decoder("model", model)
        self.model, self.cache, self.tree = model, cache, check_shape(shape)
        self.num_speculative_tokens = max(self.tree.depths)

    def check(self, model: Decoder) -> None:
        """Refuse a target of another vocabulary, whose tokens mean something else, or on another device.

        Raises: ValueError.  Source: chapter 05.
        """
        require_decoder("model", model)
        ours, theirs = self.model.config, model.config
        if ours.vocab_size != theirs.vocab_size:
            raise ValueError(
                f"the draft {ours.name} has a vocabulary of {ours.vocab_size} tokens; it must be that of the target "
                f"{theirs.name}, {theirs.vocab_size}"
            )
        if self.model.device != model.device:
            raise ValueError(
                f"the draft {ours.name} is on {self.model.device}; it must be where the target {theirs.name} is, on "
                f"{model.device}"
            )

    @torch.inference_mode()
    def propose(
        self, texts: Mapping[int, Sequence[int]], params: Mapping[int, SamplingParams], depths: Mapping[int, int]
    ) -> dict[int, Draft]:
        """A chain or tree for each text, all of them in one pass a level. Source: chapter 05."""
        context = self.model.config.max_seq_len
        grown = {
            s: Growth(len(text), min(depths[s], self.num_speculative_tokens, context - len(text)))
            for s, text in texts.items()
        }
        for s, growth in grown.items():
            self._forget_from(s, growth.text_len - 1)
        try:
            grow(grown, self.tree, params, lambda growing: self._logits(texts, growing))
        except CacheFull:
            pass  # what has grown so far is proposed
        finally:
            if not self.tree.is_chain:
                for s, growth in grown.items():
                    self._forget_from(s, growth.text_len)
        return drafts_of(grown)

    def _forget_from(self, seq_id: int, length: int) -> None:
        if self.cache.length(seq_id) > length:
            self.cache.truncate(seq_id, length)

    def _logits(self, texts: Mapping[int, Sequence[int]], growing: Mapping[int, Growth]) -> Tensor:
        """Logits [rows, vocab] after each node of every frontier, sequence by sequence."""
        ids, device = list(growing), self.model.device
        if self.tree.is_chain or next(iter(growing.values())).depth == 0:
            known = {s: [*texts[s], *growing[s].tokens] for s in ids}
            past = [self.cache.length(s) for s in ids]
            new = [known[s][p:] for s, p in zip(ids, past, strict=True)]
            return self.model(Batch.build(ids, new, past, device=device), self.cache)
        trees = [Tree(tuple(growing[s].parents)) for s in ids]
        for s in ids:
            self._forget_from(s, growing[s].text_len)
        batch = Batch.build(
            ids, [growing[s].tokens for s in ids], [growing[s].text_len for s in ids], device=device,
            tree_mask=[[mask >> 1 for mask in tree.masks()[1:]] for tree in trees],  # their root is in the cache
        )  # fmt: skip
        rows, start = [], 0
        for s, tree in zip(ids, trees, strict=True):
            rows += [start + node for node in growing[s].frontier]
            start += len(tree)
        batch.logits_indices = torch.tensor(rows, device=device)
        return self.model(batch, self.cache)

    def accepted(self, seq_id: int, length: int, state: Tensor) -> None:
        """Take back what was rejected: only the first ``length`` - 1 tokens of the text can be in the cache.

        Shapes and units: state [d] is not used.  Source: chapter 05.
        """
        self._forget_from(seq_id, length - 1)

    def free(self, seq_id: int) -> None:
        """Free the sequence in the draft's cache. Source: chapter 05."""
        self.cache.free(seq_id)


def choose_siblings(
    logits: Tensor, params: Sequence[SamplingParams], counts: Sequence[int], positions: Sequence[int]
) -> tuple[list[list[int]], list[Tensor]]:
    """Several different tokens a row: the likeliest ones of a greedy row, else drawn without replacement.

    A row that is not finite gives none: a draft that breaks costs speed, not the text.

    Shapes and units: logits [R, vocab]; ``counts[r]`` tokens are wanted in row r, at place ``positions[r]`` of its
    text. Gives for each row max(counts) token ids, -1 where there is none or none is wanted, and for each rank the
    distributions [R, vocab] float32 that its tokens were drawn from (empty where all rows are greedy).

    Source: chapter 05; Chen et al. 2024 (Sequoia).
    """
    most, vocab = max(counts, default=0), logits.shape[1]
    finite = logits.amax(dim=1).isfinite()  # NaN spreads through amax
    logits = logits.masked_fill(~finite[:, None], 0.0)
    wanted = [n if good else 0 for n, good in zip(counts, finite.tolist(), strict=True)]
    best = logits.topk(min(most, vocab), dim=1).indices.tolist()
    best = [row + [-1] * (most - len(row)) for row in best]
    chosen, given = best, []
    if any(p.temperature > 0 for p in params):
        probs, ranks = processed_probs(logits, params), []
        for rank in range(most):
            uniforms = [uniform(p.seed, at, f"draft {rank}") for p, at in zip(params, positions, strict=True)]
            token = inverse_cdf(probs, torch.tensor(uniforms, dtype=torch.float64, device=logits.device))
            there = probs.sum(dim=1) > 0
            given.append(probs)
            ranks.append(token.where(there, -1).tolist())
            left = probs.scatter(1, token[:, None], 0.0)
            probs = left / left.sum(dim=1, keepdim=True).clamp(min=torch.finfo(left.dtype).tiny)
        chosen = [
            greedy if p.temperature == 0 else list(drawn)
            for p, greedy, drawn in zip(params, best, zip(*ranks, strict=True), strict=True)
        ]
    return [row[:n] + [-1] * (most - n) for row, n in zip(chosen, wanted, strict=True)], given
