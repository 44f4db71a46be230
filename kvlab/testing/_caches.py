"""Caches: scripts of operations that any of them must carry out as a list of tensors would."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlab import reference
from kvlab.batch import Batch
from kvlab.cache import CacheFull, KVCache
from kvlab.config import ModelConfig
from kvlab.testing._close import assert_close

Step = tuple[Any, ...]


@dataclass(frozen=True)
class CacheCase:
    """A script of operations that any ``KVCache`` must carry out as a list of tensors would.

    Shapes and units: lengths and sizes in tokens. The steps are written for pages of 4 tokens and mean something to a
    cache without pages too:

        ("append", {seq_id: num_tokens, ...})    one pass over these sequences, in this order; None is a spare row
        ("tree", seq_id, [mask, ...])            one pass whose new tokens form a tree
        ("read", {seq_id: num_tokens, ...})      the same, and each layer attends a second time, without k and v
        ("twice", seq_id)                        prepare a batch that holds the sequence twice
        ("fork", parent, child)   ("truncate", seq_id, length)   ("free", seq_id)   ("keep", seq_id, base, indices)
        ("preempt", seq_id)   ("resume", seq_id)    free it; later compute all of its tokens again in one pass
        ("refuse", step, Error)                  the step raises this and changes nothing

    ``window`` is the model's sliding window in tokens.

    Source: chapter 01.
    """

    name: str
    steps: tuple[Step, ...]
    max_num_seqs: int = 4
    max_seq_len: int = 24
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    window: int | None = None

    @property
    def config(self) -> ModelConfig:
        """The shape of the two-layer model that the cache is made for. Source: chapter 01."""
        return ModelConfig(
            "hostile", num_layers=2, hidden_size=self.num_heads * self.head_dim, num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, intermediate_size=16, vocab_size=16,
            max_seq_len=self.max_seq_len, sliding_window=self.window,
        )  # fmt: skip


CACHES: tuple[CacheCase, ...] = (
    CacheCase("lengths 0 and 1", (("append", {0: 0, 1: 1, 2: 3}), ("append", {0: 1, 1: 0, 2: 1}))),
    CacheCase("page edge", (("append", {0: 3, 1: 4, 2: 5}), *[("append", {0: 1, 1: 1, 2: 1})] * 6)),
    CacheCase("chunk that ends in mid-page", (("append", {0: 6}), ("append", {0: 3, 1: 7}), ("append", {1: 2, 0: 6}))),
    CacheCase(
        "order of the batch changes",
        (("append", {2: 5, 0: 2}), ("append", {0: 3, 2: 1}), ("append", {1: 1, 2: 2, 0: 1})),
    ),
    CacheCase(
        "to the last slot",
        (("append", {0: 24, 1: 23}), ("append", {1: 1}), ("truncate", 0, 20), ("append", {0: 4})),
    ),
    CacheCase(
        "spare rows of a captured graph",
        (("append", {0: 3, None: 1}), ("append", {None: 1, 0: 1, 1: 4}), ("append", {1: 1, 0: 2, None: 3})),
    ),
    CacheCase("group 5", (("append", {0: 5, 1: 3}), ("append", {0: 2, 1: 1})), num_heads=10),
    CacheCase("group 7", (("append", {0: 5, 1: 3}), ("append", {0: 2, 1: 1})), num_heads=7, num_kv_heads=1),
    CacheCase("head size 80", (("append", {0: 5, 1: 3}), ("append", {0: 2, 1: 1})), head_dim=80),
    CacheCase("window", (("append", {0: 9, 1: 2}), ("append", {0: 1, 1: 5}), ("append", {0: 6})), window=5),
    CacheCase(
        "fork of a half-full block",
        (("append", {0: 6}), ("fork", 0, 1), ("append", {0: 1, 1: 1}), ("append", {1: 3}), ("append", {0: 2, 1: 1})),
    ),
    CacheCase(
        "fork of a full block",
        (("append", {0: 8}), ("fork", 0, 1), ("append", {1: 1, 0: 1}), ("append", {0: 4, 1: 5})),
    ),
    CacheCase(
        "fork of a fork, the parents gone",
        (
            ("append", {0: 6}), ("fork", 0, 1), ("fork", 1, 2), ("append", {1: 1}), ("free", 0),
            ("append", {2: 3, 1: 2}), ("free", 1), ("append", {2: 1, 3: 9}),
        ),
    ),
    CacheCase("fork of an empty sequence", (("append", {0: 0}), ("fork", 0, 1), ("append", {1: 2, 0: 3}))),
    CacheCase(
        "prompt found whole in the cache: its last token again",
        (("append", {0: 8}), ("fork", 0, 1), ("truncate", 1, 7), ("append", {1: 1}), ("append", {0: 1, 1: 1})),
    ),
    CacheCase(
        "rewind over a page",
        (("append", {0: 10, 1: 4}), ("truncate", 0, 3), ("append", {0: 6, 1: 1}), ("truncate", 0, 8),
         ("append", {0: 1})),
    ),
    CacheCase(
        "rewind of a fork leaves its parent",
        (("append", {0: 7}), ("fork", 0, 1), ("append", {1: 4}), ("truncate", 1, 5), ("append", {1: 2}),
         ("append", {0: 1})),
    ),
    CacheCase("rewind to nothing", (("append", {0: 5}), ("truncate", 0, 0), ("append", {0: 2}))),
    CacheCase(
        "preempt and resume",
        (("append", {0: 4, 1: 6}), ("append", {0: 1, 1: 1}), ("preempt", 0), ("append", {1: 1, 2: 9}), ("resume", 0),
         ("append", {0: 1, 1: 1, 2: 1})),
    ),
    CacheCase("an id is used again", (("append", {0: 7}), ("free", 0), ("append", {0: 3, 1: 2}), ("append", {0: 2}))),
    CacheCase(
        "freed pages come back in another order",
        (("append", {0: 9, 1: 9, 2: 5}), ("free", 1), ("free", 0), ("append", {3: 13, 2: 4}),
         ("append", {3: 1, 2: 1, 0: 6})),
    ),
    CacheCase(
        "one path of a tree is kept",
        (("append", {0: 6}), ("tree", 0, [0b1, 0b11, 0b101, 0b1001, 0b10101]), ("keep", 0, 6, [0, 2, 4]),
         ("append", {0: 2})),
    ),
    CacheCase(
        "a path kept behind a fork leaves its parent",
        (("append", {0: 6}), ("fork", 0, 1), ("append", {1: 3}), ("keep", 1, 5, [0, 3]), ("append", {0: 1, 1: 1})),
    ),
    CacheCase("keep in another order", (("append", {0: 9}), ("keep", 0, 2, [6, 0, 3]), ("append", {0: 1}),
                                       ("truncate", 0, 4), ("append", {0: 1}))),
    CacheCase("keep nothing", (("append", {0: 9}), ("keep", 0, 5, []), ("append", {0: 1}))),
    CacheCase(
        "refusals change nothing",
        (
            ("append", {0: 6, 1: 2}), ("refuse", ("truncate", 0, -1), ValueError),
            ("refuse", ("truncate", 0, 7), ValueError), ("refuse", ("fork", 0, 1), ValueError),
            ("refuse", ("fork", 9, 2), ValueError), ("refuse", ("keep", 0, 4, [2]), ValueError),
            ("refuse", ("keep", 0, 4, [0, 0]), ValueError), ("refuse", ("append", {0: 1, 1: 1}, {1: 5}), ValueError),
            ("refuse", ("append", {2: 1}, {2: 3}), ValueError), ("refuse", ("twice", 0), ValueError),
            ("append", {0: 1, 1: 1}), ("truncate", 0, 0),
        ),
    ),
    CacheCase(
        "numbers that are no integers",
        (
            ("append", {0: 6}), ("refuse", ("truncate", 0, 2.5), ValueError),
            ("refuse", ("truncate", 0, float("nan")), ValueError), ("refuse", ("truncate", 0, True), ValueError),
            ("refuse", ("keep", 0, 2.0, [0]), ValueError), ("refuse", ("keep", 0, 2, [0.0]), ValueError),
            ("refuse", ("keep", 0, 2, torch.tensor([1, 1])), ValueError), ("refuse", ("fork", 0, None), ValueError),
            ("refuse", ("fork", 0, 1.5), ValueError), ("truncate", 0, torch.tensor(5)), ("append", {0: 1}),
            ("keep", 0, torch.tensor(2), torch.tensor([3, 1])), ("append", {0: 1}),
        ),
    ),
    CacheCase("read without storing", (("append", {0: 6, 1: 3}), ("read", {1: 2, 0: 1}), ("read", {0: 4}))),
    CacheCase(
        "full",
        (("append", {0: 8, 1: 8}), ("refuse", ("append", {2: 1}), CacheFull), ("truncate", 1, 7), ("append", {1: 1}),
         ("free", 0), ("append", {2: 8})),
        max_num_seqs=2, max_seq_len=8,
    ),
    CacheCase(
        "room for one of two",
        (("append", {0: 8}), ("refuse", ("append", {1: 8, 2: 8}), CacheFull), ("append", {3: 8})),
        max_num_seqs=2, max_seq_len=8,
    ),
    CacheCase(
        "freed twice",
        (("append", {0: 8}), ("free", 0), ("free", 0), ("append", {1: 8, 2: 8}), ("free", 1), ("append", {3: 4}),
         ("truncate", 2, 7)),
        max_num_seqs=2, max_seq_len=8,
    ),
)  # fmt: skip


class _Dense:
    """The specification: each sequence is a list of (k, v), one pair [layers, H_kv, D] a token."""

    def __init__(self) -> None:
        self.kept: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.preempted: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def stacked(self, seq_id: int, layer: int) -> tuple[Tensor, Tensor]:
        pairs = self.kept[seq_id]
        return torch.stack([k[layer] for k, _ in pairs]), torch.stack([v[layer] for _, v in pairs])


def poison(cache: Any) -> None:
    """Fill every floating-point tensor that a new cache holds with NaN, so that reading an unused slot shows.

    Source: chapter 02.
    """
    for value in vars(cache).values():
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                tensor.fill_(float("nan"))


def run_cache_case(
    make_cache: Callable[..., KVCache],
    case: CacheCase,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> KVCache:
    """Drive a cache through a case beside a list of tensors, comparing every output and length; gives the cache.

    Shapes and units: ``make_cache(config, max_num_seqs, max_seq_len, dtype=..., device=...)`` gives a new cache with
    room for ``max_num_seqs`` sequences of ``max_seq_len`` tokens; ``NaiveCache`` is such a function.

    Raises: AssertionError that names the case and its step.

    Source: chapter 01.
    """
    config, rng = case.config, torch.Generator().manual_seed(0)
    cache = make_cache(config, case.max_num_seqs, case.max_seq_len, dtype=dtype, device=device)
    poison(cache)
    dense = _Dense()
    steps = [*case.steps, ("last",)]
    for number, step in enumerate(steps):
        if step == ("last",):  # one more token a sequence reads everything that is left
            room = {s: 1 for s, kept in dense.kept.items() if len(kept) < case.max_seq_len}
            step = ("append", room)
        where = f"{case.name}, step {number} {step}"
        if step[0] == "refuse":
            try:
                _carry_out(cache, _Dense(), step[1], config, rng, dtype, device, where)
            except step[2]:
                pass
            else:
                raise AssertionError(f"{where}: it must raise {step[2].__name__} and raised nothing")
        else:
            _carry_out(cache, dense, step, config, rng, dtype, device, where)
        for seq_id in {*dense.kept, *dense.preempted, 0, 1, 2, 3}:
            length, wanted = cache.length(seq_id), len(dense.kept.get(seq_id, []))
            assert type(length) is int, f"{where}: length({seq_id}) is of type {type(length).__name__}; it must be int"
            assert length == wanted, f"{where}: length({seq_id}) is {length}; it must be {wanted}"
    return cache


def _carry_out(
    cache: KVCache, dense: _Dense, step: Step, config: ModelConfig, rng: torch.Generator, dtype: torch.dtype,
    device: torch.device | str, where: str,
) -> None:  # fmt: skip
    kind, *args = step
    if kind in ("append", "read"):
        pretended = args[1] if len(args) > 1 else {}
        _forward(cache, dense, args[0], None, pretended, config, rng, dtype, device, where, again=kind == "read")
    elif kind == "twice":
        batch = Batch.build([args[0], args[0] + 1], [[1], [1]], [cache.length(args[0])] * 2, device=device)
        batch.seq_ids = [args[0], args[0]]
        cache.prepare(batch)
    elif kind == "tree":
        _forward(cache, dense, {args[0]: len(args[1])}, args[1], {}, config, rng, dtype, device, where)
    elif kind == "resume":
        _forward(cache, dense, {args[0]: len(dense.preempted[args[0]])}, None, {}, config, rng, dtype, device, where)
    elif kind == "fork":
        cache.fork(args[0], args[1])
        dense.kept[args[1]] = list(dense.kept[args[0]])
    elif kind == "truncate":
        cache.truncate(args[0], args[1])
        del dense.kept[args[0]][args[1] :]
    elif kind == "keep":
        cache.keep(*args)
        seq_id, base, indices = args
        tail = dense.kept[seq_id][base:]
        dense.kept[seq_id][base:] = [tail[i] for i in indices]
    elif kind == "free":
        cache.free(args[0])
        dense.kept.pop(args[0], None)
    elif kind == "preempt":
        cache.free(args[0])
        dense.preempted[args[0]] = dense.kept.pop(args[0])
    else:
        raise ValueError(f"step {step} is none that a case can have")


def _forward(
    cache: KVCache, dense: _Dense, new: Mapping[int | None, int], tree: Sequence[int] | None,
    pretended: Mapping[int, int],
    config: ModelConfig, rng: torch.Generator, dtype: torch.dtype, device: torch.device | str, where: str,
    again: bool = False,
) -> None:  # fmt: skip
    """One pass: prepare, then attend in each layer, held against the dense sequences. ``pretended``: false lengths."""
    if not new:
        return
    past = {s: 0 if s is None else pretended.get(s, cache.length(s)) for s in new}
    batch = Batch.build(
        list(new), [[1] * n for n in new.values()], list(past.values()), device=device,
        tree_mask=None if tree is None else [tree],
    )  # fmt: skip
    cache.prepare(batch)
    for seq_id, count in new.items():
        if seq_id is None:
            continue
        resumed = dense.preempted.pop(seq_id, [])
        kept = dense.kept.setdefault(seq_id, [])
        for i in range(count):
            shape = (config.num_layers, config.num_kv_heads, config.head_dim)
            fresh = (torch.randn(shape, generator=rng), torch.randn(shape, generator=rng))
            kept.append(resumed[i] if resumed else (fresh[0].to(dtype), fresh[1].to(dtype)))
    for layer in range(config.num_layers):
        q = torch.randn(sum(new.values()), config.num_heads, config.head_dim, generator=rng).to(dtype)
        empty = torch.empty(0, config.num_kv_heads, config.head_dim, dtype=dtype)
        spare = torch.full((config.num_layers, *empty.shape[1:]), float("nan"), dtype=dtype)
        parts = [[(spare, spare)] * n if s is None else dense.kept[s][len(dense.kept[s]) - n :] for s, n in new.items()]
        k = torch.stack([p[0][layer] for part in parts for p in part]) if len(q) else empty
        v = torch.stack([p[1][layer] for part in parts for p in part]) if len(q) else empty
        with torch.inference_mode():
            out = cache.attend(layer, q.to(device), k.to(device), v.to(device)).cpu()
            if again:
                out = cache.attend(layer, q.to(device), None, None).cpu()
        assert out.shape == q.shape, f"{where}: attend gave {list(out.shape)}; it must give {list(q.shape)}"
        start = 0
        for seq_id, count in new.items():
            rows = slice(start, start + count)
            start += count
            if seq_id is None:
                assert not bool(out[rows].any()), f"{where}: layer {layer}, the spare row must be 0"
            elif count:
                keys, values = dense.stacked(seq_id, layer)
                mask = None if tree is None else torch.tensor(tree)
                shared: dict[str, Any] = {"window_size": config.window_size(layer), "tree_mask": mask}
                want, _ = reference.attend_one(q[rows], keys, values, **shared)
                plain, _ = reference.attend_one(q[rows], keys, values, dtype=None, **shared)
                assert_close(out[rows], want, plain, dtype, f"{where}: layer {layer}, sequence {seq_id}")
