"""Streams of requests: lengths as promised, a real cache filled by them, nothing lost on the way."""

from __future__ import annotations

import statistics

import pytest

from kvlab import config, workloads
from kvlab.naive import NaiveCache
from kvlab.workloads import Request

TOY = config.ModelConfig(
    "toy", num_layers=1, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, intermediate_size=8, vocab_size=8,
    max_seq_len=64,
)  # fmt: skip


def test_lengths_are_log_normal_cut_and_repeatable():
    drawn = workloads.lognormal(3, 4000, typical=100, spread=0.5, limit=1024)
    assert drawn == workloads.lognormal(3, 4000, typical=100, spread=0.5, limit=1024)
    assert drawn != workloads.lognormal(4, 4000, typical=100, spread=0.5, limit=1024)
    assert statistics.median(r.prompt_len for r in drawn) == pytest.approx(100, rel=0.06)
    assert all(1 <= r.prompt_len <= 512 and 1 <= r.new_tokens <= 512 for r in drawn)
    short = workloads.lognormal(3, 50, typical=0.01, spread=0.0, limit=2)
    assert short == [Request(1, 1)] * 50


@pytest.mark.parametrize(
    "bad", [{"count": -1}, {"typical": 0}, {"typical": float("nan")}, {"spread": -0.1}, {"limit": 1}]
)
def test_lengths_that_make_no_sense_are_refused(bad):
    with pytest.raises(ValueError, match=str(next(iter(bad.values())))):
        workloads.lognormal(**{"seed": 0, "count": 3, "typical": 10, "spread": 0.5, **bad})


def test_every_request_is_served_and_the_rows_are_given_back():
    cache = NaiveCache(TOY, max_num_seqs=3, max_seq_len=16)
    requests = [Request(5, 3), Request(1, 1), Request(15, 1), Request(2, 9), Request(4, 4)]
    usage = workloads.fill(cache, requests, steps=100)
    assert usage.finished == len(requests)
    assert (cache.used_nbytes, cache.length(0)) == (0, 0)
    assert max(usage.running) <= 3
    assert usage.used[0] == 2 * 4 * 4 * (6 + 2 + 16)  # k and v, head size 4, float32


def test_the_bytes_in_use_are_those_of_the_tokens():
    cache = NaiveCache(TOY, max_num_seqs=2, max_seq_len=16)
    usage = workloads.fill(cache, [Request(5, 3)], steps=10)
    assert usage.used == [32 * n for n in (6, 7, 8)]
    assert usage.running == [1, 1, 1]


def test_a_request_that_never_fits_is_named():
    with pytest.raises(ValueError, match="17 tokens"):
        workloads.fill(NaiveCache(TOY, 1, 16), [Request(17, 1)], steps=2)
    with pytest.raises(ValueError, match="steps is -1"):
        workloads.fill(NaiveCache(TOY, 1, 16), [], steps=-1)
