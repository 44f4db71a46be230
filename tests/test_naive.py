"""NaiveCache: the contiguous rows of chapter 01, held to a model made of Python lists."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvlab import reference
from kvlab.batch import Batch
from kvlab.cache import CacheFull, NoCache
from kvlab.config import ModelConfig
from kvlab.model import Decoder
from kvlab.naive import NaiveCache

CONFIG = ModelConfig("tiny", 2, 32, 4, 2, 8, 48, 61, 64)


def make_cache(rows: int = 3, length: int = 16, config: ModelConfig = CONFIG) -> NaiveCache:
    """A cache whose unused slots hold NaN, as memory may."""
    cache = NaiveCache(config, rows, length)
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    return cache


def make_model(config: ModelConfig = CONFIG, seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(config)
    for parameter in model.parameters():
        parameter.data.mul_(4)  # far from the uniform outputs of small weights
    return model.eval()


def vectors(tokens: int, seed: int = 0, config: ModelConfig = CONFIG) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    return tuple(torch.randn(tokens, h, config.head_dim, generator=generator) for h in heads)


def put(cache: NaiveCache, seq_id: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Append ``tokens`` random tokens in every layer; gives the last layer's output."""
    past = cache.length(seq_id)
    cache.prepare(Batch.build([seq_id], [[0] * tokens], [past]))
    for layer in range(cache.config.num_layers):
        out = cache.attend(layer, *vectors(tokens, seed + layer))
    return out


def snapshot(cache: NaiveCache) -> tuple:
    return (
        dict(cache._rows), dict(cache._lengths), list(cache._free_rows), cache.k.clone(), cache.v.clone()
    )  # fmt: skip


def same(a: tuple, b: tuple) -> bool:
    return a[:3] == b[:3] and all(
        torch.equal(x.nan_to_num(7e7), y.nan_to_num(7e7)) for x, y in zip(a[3:], b[3:], strict=True)
    )


@torch.inference_mode()
def logits(model: Decoder, cache, seq_ids, new, past, **options) -> torch.Tensor:
    return model(Batch.build(seq_ids, new, past, **options), cache)


# --- M1, M3: lengths ---------------------------------------------------------------------------------------------


def test_truncate_refuses_negative_lengths_and_changes_nothing():
    cache = make_cache()
    put(cache, 0, 3)
    before = snapshot(cache)
    for length in (-5, -1, 4):
        with pytest.raises(ValueError, match=f"length is {length}"):
            cache.truncate(0, length)
        assert same(before, snapshot(cache))
    cache.truncate(0, 0)
    assert cache.length(0) == 0
    put(cache, 0, 2)  # the row is still its own
    assert cache.length(0) == 2


def test_length_is_a_python_int_whatever_the_keys_hold():
    cache = make_cache(rows=4)
    assert [cache.length(i) for i in range(4)] == [0, 0, 0, 0]
    cache.prepare(Batch.build([0], [[5]], [0]))
    zeros = torch.zeros(1, CONFIG.num_kv_heads, CONFIG.head_dim)
    cache.attend(0, torch.zeros(1, CONFIG.num_heads, CONFIG.head_dim), zeros, zeros)
    assert cache.length(0) == 1
    assert all(type(cache.length(i)) is int for i in range(5))


# --- M4 and the model: ragged batches equal single runs, cached equals recomputed ---------------------------------


def test_a_ragged_batch_equals_the_single_runs():
    model, texts = make_model(), [[3, 1, 4], [1, 5, 9, 2, 6], [5], list(range(12))]
    batch = Batch.build(range(4), texts, [0] * 4)
    assert batch.positions.tolist() == [p for text in texts for p in range(len(text))]
    together = logits(model, make_cache(rows=4), range(4), texts, [0] * 4, all_logits=True)
    for text, rows in zip(texts, together.split([len(t) for t in texts]), strict=True):
        torch.testing.assert_close(
            rows, logits(model, make_cache(), [7], [text], [0], all_logits=True), atol=1e-5, rtol=1e-5
        )
        torch.testing.assert_close(
            rows, logits(model, NoCache(CONFIG), [7], [text], [0], all_logits=True), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("pieces", [[1] * 11, [11], [4, 1, 1, 5], [0, 6, 0, 5], [10, 1]])
def test_any_chunking_equals_recomputing(pieces, window):
    config = ModelConfig("tiny", 2, 32, 4, 2, 8, 48, 61, 64, sliding_window=window)
    model, text, cache = make_model(config), [7 * i % 61 for i in range(11)], make_cache(config=config)
    whole = logits(model, NoCache(config), [0], [text], [0], all_logits=True)
    done, parts = 0, []
    for piece in pieces:
        parts.append(logits(model, cache, [0], [text[done : done + piece]], [done], all_logits=True))
        done += piece
        assert cache.length(0) == done
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=1e-5)


def test_spare_rows_and_empty_sequences_store_nothing():
    cache = make_cache()
    q, k, v = vectors(5)
    cache.prepare(Batch.build([None, 0, 1, None], [[1], [1, 2, 3], [], [9]], [0, 0, 0, 0]))
    out = cache.attend(0, q, k, v)
    assert torch.equal(out[[0, 4]], torch.zeros(2, CONFIG.num_heads, CONFIG.head_dim))
    torch.testing.assert_close(out[1:4], reference.attend_one(q[1:4], k[1:4], v[1:4], dtype=None)[0])
    assert (cache.length(0), cache.length(1)) == (3, 0)
    assert int((~cache.k[0].isnan()).any(-1).any(-1).sum()) == 3  # three slots written, no more


def test_attend_without_k_and_v_only_reads():
    cache = make_cache()
    put(cache, 0, 5)
    before = snapshot(cache)
    q = vectors(1, seed=9)[0]
    cache.prepare(Batch.build([0], [[1]], [5]))
    with pytest.raises(ValueError):
        cache.truncate(0, 7)
    cache.truncate(0, 5)
    cache.prepare(Batch.build([0], [[]], [5]))
    assert cache.attend(0, q[:0], None, None).shape == (0, CONFIG.num_heads, CONFIG.head_dim)
    assert same(before, snapshot(cache))


def test_gradients_are_refused():
    cache = make_cache()
    q, k, v = vectors(2)
    cache.prepare(Batch.build([0], [[1, 2]], [0]))
    with pytest.raises(ValueError, match="requires grad"):
        cache.attend(0, q.requires_grad_(), k, v)


def test_attend_before_prepare_is_refused():
    with pytest.raises(ValueError, match="prepare"):
        make_cache().attend(0, *vectors(1))


# --- poison ------------------------------------------------------------------------------------------------------


def test_unused_slots_never_reach_the_output():
    model, cache = make_model(), make_cache(rows=2, length=12)
    text = [2, 7, 1, 8, 2, 8]
    logits(model, cache, [0], [[9] * 11], [0])
    cache.free(0)
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    first = logits(model, cache, [1], [text[:4]], [0])
    cache.fork(1, 2)
    second = logits(model, cache, [1, 2], [text[4:], text[4:]], [4, 4])
    assert first.isfinite().all()
    assert second.isfinite().all()
    cache.truncate(1, 2)
    cache.k[:, cache.row(1), 2:] = float("nan")
    cache.v[:, cache.row(1), 2:] = float("nan")
    again = logits(model, cache, [1], [text[2:]], [2])
    torch.testing.assert_close(again[0], second[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(second[1], second[0], atol=1e-5, rtol=1e-5)


# --- fork, keep, free --------------------------------------------------------------------------------------------


def test_a_fork_is_a_copy_that_goes_its_own_way():
    model, cache = make_model(), make_cache()
    logits(model, cache, [0], [[1, 2, 3]], [0])
    cache.fork(0, 5)
    assert cache.length(5) == 3
    assert cache.row(5) != cache.row(0)
    child, parent = logits(model, cache, [5, 0], [[4], [7, 8]], [3, 3])
    torch.testing.assert_close(
        child[None], logits(model, NoCache(CONFIG), [0], [[1, 2, 3, 4]], [0]), atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(
        parent[None], logits(model, NoCache(CONFIG), [0], [[1, 2, 3, 7, 8]], [0]), atol=1e-5, rtol=1e-5
    )
    cache.free(0)
    again = logits(model, cache, [5], [[6]], [4])
    torch.testing.assert_close(again, logits(model, NoCache(CONFIG), [0], [[1, 2, 3, 4, 6]], [0]), atol=1e-5, rtol=1e-5)


def test_fork_errors_change_nothing():
    cache = make_cache(rows=2)
    put(cache, 0, 3)
    put(cache, 1, 2)
    before = snapshot(cache)
    with pytest.raises(ValueError, match="sequence 9"):
        cache.fork(9, 2)
    with pytest.raises(ValueError, match="child 1"):
        cache.fork(0, 1)
    with pytest.raises(CacheFull) as full:
        cache.fork(0, 2)
    assert (full.value.needed, full.value.free, full.value.unit) == (1, 0, "rows")
    assert same(before, snapshot(cache))


@pytest.mark.parametrize(("base", "indices"), [(2, [0, 3]), (2, [3, 1]), (2, []), (0, [5, 4, 3, 2, 1, 0]), (6, [])])
def test_keep_leaves_the_named_tokens_in_the_named_order(base, indices):
    cache = make_cache()
    put(cache, 1, 2)
    put(cache, 0, 6)
    row = cache.row(0)
    order = [*range(base), *(base + i for i in indices)]
    k, v = cache.k[:, row, order].clone(), cache.v[:, row, order].clone()
    other = cache.k[:, cache.row(1), :2].clone()
    cache.keep(0, base, indices)
    assert cache.length(0) == len(order)
    assert torch.equal(cache.k[:, row, : len(order)], k)
    assert torch.equal(cache.v[:, row, : len(order)], v)
    assert torch.equal(cache.k[:, cache.row(1), :2], other)


def test_keep_errors_change_nothing():
    cache = make_cache()
    put(cache, 0, 6)
    before = snapshot(cache)
    for base, indices in [(-1, []), (7, []), (2, [4]), (2, [-1]), (2, [1, 1])]:
        with pytest.raises(ValueError, match="keep"):
            cache.keep(0, base, indices)
    with pytest.raises(ValueError, match="sequence 3"):
        cache.keep(3, 0, [])
    assert same(before, snapshot(cache))


def test_free_gives_the_row_back_once():
    cache = make_cache(rows=2)
    put(cache, 0, 3)
    cache.free(0)
    cache.free(0)
    cache.free(77)
    assert cache.length(0) == 0
    put(cache, 0, 1)
    put(cache, 1, 1)
    with pytest.raises(CacheFull):
        put(cache, 2, 1)


# --- room --------------------------------------------------------------------------------------------------------


def test_a_refused_batch_changes_nothing():
    cache = make_cache(rows=3, length=8)
    put(cache, 0, 5)
    put(cache, 1, 2)
    before = snapshot(cache)
    with pytest.raises(CacheFull, match="needs 2 rows and has 1 free"):
        cache.prepare(Batch.build([0, 2, 3], [[1], [1], [1]], [5, 0, 0]))
    with pytest.raises(ValueError, match="max_seq_len"):
        cache.prepare(Batch.build([1, 2, 0], [[1], [1], [1] * 4], [2, 0, 5]))
    with pytest.raises(ValueError, match="sequence 0 continues at 4"):
        cache.prepare(Batch.build([1, 0], [[1], [1]], [2, 4]))
    with pytest.raises(ValueError, match="sequence 9 continues at 1"):
        cache.prepare(Batch.build([9], [[1]], [1]))
    twice = Batch.build([1, 0], [[1], [1]], [2, 5])
    twice.seq_ids = [0, 0]
    with pytest.raises(ValueError, match="twice"):
        cache.prepare(twice)
    assert same(before, snapshot(cache))
    put(cache, 0, 3)  # exactly full is no error
    assert cache.length(0) == 8


@pytest.mark.parametrize("fails_in", ["attend", "lm_head"])
def test_a_failed_forward_is_undone(monkeypatch, fails_in):
    model, cache = make_model(), make_cache()
    logits(model, cache, [0], [[1, 2, 3]], [0])
    before = snapshot(cache)

    def broken(*args, **kwargs):
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        if fails_in == "attend":
            whole = cache.attend
            patch.setattr(cache, "attend", lambda layer, *a: broken() if layer == 1 else whole(layer, *a))
        else:
            patch.setattr(model, "logits", broken)
        with pytest.raises(RuntimeError, match="planted"):
            logits(model, cache, [0, 1], [[4, 5], [6]], [3, 0])
    assert before[:3] == snapshot(cache)[:3]
    after = logits(model, cache, [0], [[4, 5]], [3])
    torch.testing.assert_close(after, logits(model, NoCache(CONFIG), [0], [[1, 2, 3, 4, 5]], [0]), atol=1e-5, rtol=1e-5)


def test_sizes_and_bytes():
    cache = make_cache(rows=3, length=16)
    assert cache.nbytes == 2 * 2 * 3 * 16 * 2 * 8 * 4  # k and v, layers, rows, slots, KV heads, head size, bytes
    assert cache.used_nbytes == 0
    put(cache, 0, 5)
    put(cache, 1, 1)
    assert cache.used_nbytes == 6 * 2 * 2 * 2 * 8 * 4
    for rows, length in [(0, 4), (4, 0), (-1, 4)]:
        with pytest.raises(ValueError, match="1 or more"):
            NaiveCache(CONFIG, rows, length)


def test_a_full_gpu_names_the_size_that_would_fit(monkeypatch):
    per_token = 2 * 2 * 2 * 8 * 2  # bf16
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda on=None: (100 * per_token * 4 + 3, 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda on=None: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda on=None: 0)
    monkeypatch.setattr(torch, "empty", lambda *a, **k: pytest.fail("memory was asked for"))
    with pytest.raises(MemoryError, match="at most 100 tokens a sequence would fit"):
        NaiveCache(CONFIG, 4, 101, dtype=torch.bfloat16, device="cuda")


# --- everything at once, against lists ---------------------------------------------------------------------------


class Machine(RuleBasedStateMachine):
    """Random calls, on a cache and on a model of it that is made of lists of key and value tensors."""

    ROWS, LENGTH, IDS = 3, 7, st.integers(0, 4)

    @initialize()
    def start(self) -> None:
        self.cache = make_cache(self.ROWS, self.LENGTH)
        self.model: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.seed = 0

    @rule(news=st.dictionaries(IDS, st.integers(0, 4), max_size=4), lie=st.sampled_from([0] * 9 + [1]))
    def run_batch(self, news, lie):
        ids = list(news)
        past = [len(self.model.get(s, [])) + lie for s in ids]
        batch = Batch.build(ids, [[0] * news[s] for s in ids], past)
        unseen = [s for s in ids if s not in self.model]
        wrong = ids and (lie or any(p + news[s] > self.LENGTH for s, p in zip(ids, past, strict=True)))
        full = len(self.model) + len(unseen) > self.ROWS
        if wrong or full:
            with pytest.raises(ValueError if wrong else CacheFull):
                self.cache.prepare(batch)
            return
        self.cache.prepare(batch)
        self.seed += 1
        parts = [vectors(batch.num_tokens, 100 * self.seed + layer) for layer in range(CONFIG.num_layers)]
        outs = [self.cache.attend(layer, *part) for layer, part in enumerate(parts)]
        keys, values = (torch.stack([part[i] for part in parts]) for i in (1, 2))
        start = 0
        for s in ids:
            mine = self.model.setdefault(s, [])
            mine += [(keys[:, start + i], values[:, start + i]) for i in range(news[s])]
            rows = slice(start, start + news[s])
            start += news[s]
            for layer, (out, part) in enumerate(zip(outs, parts, strict=True)):
                if news[s]:
                    k, v = (torch.stack([token[i][layer] for token in mine]) for i in (0, 1))
                    expected, _ = reference.attend_one(part[0][rows], k, v)
                    torch.testing.assert_close(out[rows].double(), expected, atol=1e-5, rtol=1e-5)

    @rule(parent=IDS, child=IDS)
    def fork(self, parent, child):
        if parent not in self.model or child in self.model:
            with pytest.raises(ValueError):
                self.cache.fork(parent, child)
        elif len(self.model) == self.ROWS:
            with pytest.raises(CacheFull):
                self.cache.fork(parent, child)
        else:
            self.cache.fork(parent, child)
            self.model[child] = list(self.model[parent])

    @rule(seq_id=IDS, length=st.integers(-2, 8))
    def truncate(self, seq_id, length):
        if seq_id not in self.model or not 0 <= length <= len(self.model[seq_id]):
            with pytest.raises(ValueError):
                self.cache.truncate(seq_id, length)
        else:
            self.cache.truncate(seq_id, length)
            del self.model[seq_id][length:]

    @precondition(lambda self: any(self.model.values()))
    @rule(data=st.data())
    def keep(self, data):
        seq_id = data.draw(st.sampled_from([s for s, tokens in self.model.items() if tokens]))
        tokens = self.model[seq_id]
        base = data.draw(st.integers(0, len(tokens)))
        indices = data.draw(st.permutations(range(len(tokens) - base)))
        indices = indices[: data.draw(st.integers(0, len(indices)))]
        self.cache.keep(seq_id, base, indices)
        tokens[base:] = [tokens[base + i] for i in indices]

    @rule(seq_id=IDS)
    def free(self, seq_id):
        self.cache.free(seq_id)
        self.model.pop(seq_id, None)

    @invariant()
    def contents_agree(self):
        assert all(self.cache.length(s) == len(self.model.get(s, [])) for s in range(6))
        rows = [self.cache.row(s) for s in self.model]
        assert sorted(rows + self.cache._free_rows) == list(range(self.ROWS))
        for s, tokens in self.model.items():
            for i, (k, v) in enumerate(tokens):
                assert torch.equal(self.cache.k[:, self.cache.row(s), i], k)
                assert torch.equal(self.cache.v[:, self.cache.row(s), i], v)


Machine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestAgainstLists = Machine.TestCase


# --- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "layer", "change"),
    [
        ("layer is -1", -1, lambda q, k, v: (q, k, v)),
        ("layer is 2", 2, lambda q, k, v: (q, k, v)),
        ("q has shape", 0, lambda q, k, v: (q[:1], k, v)),
        ("q has shape", 0, lambda q, k, v: (torch.cat([q, q]), k, v)),
        ("q has shape", 0, lambda q, k, v: (q[:, :2], k, v)),
        ("k has shape", 0, lambda q, k, v: (q, k[:1], v)),
        ("k has shape", 0, lambda q, k, v: (q, torch.cat([k, k]), v)),
        ("k has shape", 0, lambda q, k, v: (q, k[:, :1], v)),
        ("v has shape", 0, lambda q, k, v: (q, k, v[..., :1])),
        ("v None", 0, lambda q, k, v: (q, k, None)),
        ("k is None", 0, lambda q, k, v: (q, None, v)),
    ],
)
def test_attend_refuses_what_is_not_the_batch_s_and_changes_nothing(named, layer, change):
    cache = make_cache()
    put(cache, 0, 2)
    cache.prepare(Batch.build([0], [[1, 2, 3]], [2]))
    before = snapshot(cache)
    with pytest.raises(ValueError, match=named):
        cache.attend(layer, *change(*vectors(3)))
    assert same(before, snapshot(cache))


@pytest.mark.parametrize(
    "undo", [lambda c: c.free(1), lambda c: c.truncate(1, 1), lambda c: c.keep(1, 0, [2])], ids=["free", "cut", "keep"]
)
def test_attend_after_a_sequence_was_freed_or_cut_is_refused(undo):
    cache = make_cache()
    cache.prepare(Batch.build([0, 1], [[1, 2], [1, 2, 3]], [0, 0]))
    undo(cache)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=r"sequence 1 has \d tokens, and 3 when the batch was prepared"):
        cache.attend(0, *vectors(5))
    assert same(before, snapshot(cache))


@pytest.mark.parametrize("child", [None, "x", 1.5, True, [1]])
def test_an_id_is_an_integer(child):
    cache = make_cache()
    put(cache, 0, 3)
    before = snapshot(cache)
    with pytest.raises(ValueError, match="child"):
        cache.fork(0, child)
    assert same(before, snapshot(cache))


def test_integers_of_other_kinds_become_python_ints():
    cache = make_cache()
    put(cache, 0, 6)
    cache.fork(0, np.int64(2))
    cache.truncate(0, torch.tensor(4))
    cache.keep(0, np.int64(2), torch.tensor([1]))
    assert (cache.length(0), type(cache.length(0))) == (3, int)
    assert {type(s) for s in cache._rows} == {int}
    assert 2 in cache
    assert 3 not in cache


def test_a_copy_that_fails_loses_no_row():
    with torch.inference_mode():
        cache = make_cache(rows=2)
        put(cache, 0, 3)
    before = snapshot(cache)
    with pytest.raises(RuntimeError, match="inference"):
        cache.fork(0, 1)  # tensors made in inference mode cannot be written to outside it
    assert before[:3] == snapshot(cache)[:3]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, "float32", None])
def test_keys_are_floating_point(dtype):
    with pytest.raises(ValueError, match="dtype is"):
        NaiveCache(CONFIG, 1, 4, dtype=dtype)


@pytest.mark.parametrize("sizes", [(1.0, 4), (1, 4.0), (True, 4), (1, float("nan"))])
def test_sizes_are_integers(sizes):
    with pytest.raises(ValueError, match=r"max_(num_seqs|seq_len) is"):
        NaiveCache(CONFIG, *sizes)
