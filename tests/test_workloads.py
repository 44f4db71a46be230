"""Streams of requests: lengths as promised, a real cache filled by them, nothing lost on the way."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch

from kvlab import config, workloads
from kvlab.batch import Batch
from kvlab.cache import NoCache
from kvlab.model import Decoder
from kvlab.naive import NaiveCache
from kvlab.sampling import SamplingParams
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
    "bad",
    [
        {"count": -1},
        {"typical": 0},
        {"typical": float("nan")},
        {"spread": -0.1},
        {"limit": 1},
        {"typical": float("inf")},
        {"spread": float("nan")},
        {"answer": (10, -1)},
        {"limit": 2.5},
        {"seed": None},
    ],
)
def test_lengths_that_make_no_sense_are_refused(bad):
    with pytest.raises(ValueError, match=r"must be|integer"):
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


# --- memories without tensors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "prompts"), [("chat", 161), ("documents", 6000 * math.exp(0.125))])
def test_mixes_have_the_lengths_they_are_named_for(name, prompts):
    requests, longest = workloads.mix(name, 20_000)
    assert statistics.mean(r.prompt_len for r in requests) == pytest.approx(prompts, rel=0.06)
    assert max(r.prompt_len + r.new_tokens for r in requests) <= longest
    with pytest.raises(ValueError, match="poems"):
        workloads.mix("poems", 3)


def test_half_of_a_mixed_queue_is_chat():
    mixed, longest = workloads.mix("mixed", 100)
    assert mixed[::2] == workloads.mix("chat", 100)[0][::2]
    assert longest == workloads.mix("documents", 1)[1]


def test_first_fit_takes_the_first_hole_that_is_large_enough():
    memory = workloads.Contiguous(10, lambda r: r.prompt_len + r.new_tokens)
    assert [memory.start(i, Request(n, 1)) for i, n in enumerate((2, 1, 2, 3))] == [True, True, True, False]
    assert memory.state().tolist() == [2, 2, 1, 2, 1, 2, 2, 1, 0, 0]
    memory.finish(0)
    assert not memory.start(3, Request(3, 1))  # 3 + 2 slots are free, and no 4 of them in a row
    assert memory.start(4, Request(1, 1))
    assert memory.spans[4][0] == 0
    assert [memory.grow(4), memory.grow(4), memory.grow(4)] == [True, False, False]
    assert memory.spans[4] == [0, 2, 2]


def test_pages_waste_the_rest_of_a_block_only():
    memory = workloads.Pages(12, 4)
    assert memory.start(0, Request(5, 1))
    assert sorted(memory.state().tolist()) == [0] * 4 + [1] * 3 + [2] * 5
    assert memory.start(1, Request(4, 1))
    assert [memory.grow(0), memory.grow(1)] == [True, False]
    memory.finish(0)
    assert memory.grow(1)
    memory.manager.audit()


@pytest.mark.parametrize("pages", [True, False])
def test_serving_finishes_every_request_once(pages):
    requests = workloads.lognormal(5, 30, typical=6, spread=0.5, limit=32)
    memory = workloads.Pages(64, 4) if pages else workloads.Contiguous(64, lambda r: 32)
    run = workloads.serve(memory, requests, steps=10_000, snapshot_every=5)
    assert run.finished == 30
    assert not memory.state().any()
    for shares, state in zip(run.shares[::5], run.states, strict=True):
        assert shares == pytest.approx(tuple(np.bincount(state, minlength=3) / 64))
    assert run.at_once == statistics.mean(run.running[len(run.running) // 2 :])
    assert len(run.states) == -(-len(run.shares) // 5)
    assert (run.preempted > 0) == pages  # pages admit more than can grow
    row = run.row()
    assert list(row.values())[3:] == [run.at_once, 30, run.preempted]
    assert sum(list(row.values())[:3]) == pytest.approx(100)
    assert row["% with a token"] == pytest.approx(100 * run.mean(workloads.FILLED))
    few = workloads.serve(type(memory)(64, 4) if pages else memory, requests, 40, max_running=1)
    assert set(few.running) == {1}


def test_a_request_that_does_not_fit_alone_is_named():
    with pytest.raises(ValueError, match="prompt_len=70"):
        workloads.serve(workloads.Pages(64, 4), [Request(70, 1)], 3)
    with pytest.raises(ValueError, match="new_tokens=90"):
        workloads.serve(workloads.Pages(64, 4), [Request(3, 90)], 200)


def test_a_random_history_uses_every_operation_and_keeps_its_books():
    seen, shared = set(), False
    for books in workloads.random_history(seed=1, steps=200):
        books.audit()
        seen.update(books.seq_ids)
        shared |= any(books.pool.ref_count(b) > 1 for s in books.seq_ids for b in books.table(s))
    assert len(seen) > 20
    assert shared


def test_requests_and_memories_that_make_no_sense_are_refused():
    for bad in ((0, 1), (1, 0), (1.5, 1)):
        with pytest.raises(ValueError):
            Request(*bad)
    memory = workloads.Contiguous(16, lambda r: 4)
    with pytest.raises(ValueError, match="fewer than its prompt"):
        memory.start(0, Request(6, 1))
    memory.start(0, Request(2, 1))
    with pytest.raises(ValueError, match="known"):
        memory.start(0, Request(2, 1))
    for bad in ({"steps": -1}, {"steps": 3, "max_running": 0}):
        with pytest.raises(ValueError, match="steps"):
            workloads.serve(workloads.Pages(16, 4), [Request(1, 1)], **bad)
    pages = workloads.Pages(10, 4)
    assert len(pages.state()) == pages.slots == 8
    empty = workloads.serve(pages, [], 3)
    with pytest.raises(ValueError, match="no step"):
        empty.mean(0)


# --- real rows -------------------------------------------------------------------------------------------------------


def test_last_scores_are_those_that_attention_is_made_of():
    torch.manual_seed(0)
    model, ids = Decoder(TOY), [1, 5, 2, 7, 7]
    scores = workloads.last_scores(model, ids)
    assert scores.shape == (2, 5)
    seen = []

    class Noting(NoCache):
        def attend(self, layer, q, k, v):
            seen.append((q, k, v, super().attend(layer, q, k, v)))
            return seen[-1][-1]

    with torch.inference_mode():
        model(Batch.build([0], [ids], [0]), Noting(TOY))
    [(_, _, v, out)] = seen
    weights = torch.softmax(torch.from_numpy(scores), dim=-1)
    torch.testing.assert_close(weights @ v[:, 0], out[-1])


def test_last_scores_of_no_text_are_refused():
    with pytest.raises(ValueError, match="token_ids is empty"):
        workloads.last_scores(Decoder(TOY), [])


# --- requests that arrive --------------------------------------------------------------------------------------------


def test_a_burst_without_end_ends():
    assert len(workloads.bursty(4.0, 100, burst=1e300)) == 100


def test_a_long_gap_begins_no_earlier_than_the_clock():
    assert min(r.arrival for r in workloads.decodes_and_prompts(1, 1, 5, 8, gap=100.0, seed=1)) == 0


def test_numbers_of_numpy_make_requests():
    [found] = workloads.arriving([Request(np.int64(5), np.int32(3))], np.array([1.5]), first_id=np.int64(2))
    assert (found.request_id, len(found.prompt), found.params.max_tokens, found.arrival) == (2, 5, 3, 1.5)
    assert workloads.poisson(np.float32(2), np.int64(4), np.int64(1)) == workloads.poisson(2.0, 4, 1)


def test_a_trace_names_the_line_of_the_file_and_is_written_whole(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('\n{"timestamp": 0, "input_length": 3, "output_length": 1}\n\n{}\n')
    with pytest.raises(ValueError, match="line 4 is no request"):
        workloads.load_trace(path)
    assert len(workloads.load_trace(path, limit=3)) == 1
    [nothing] = workloads.arriving([Request(3, 1)], [0.0])
    nothing.params = SamplingParams(max_tokens=0)
    with pytest.raises(ValueError, match="request 0 has max_tokens 0"):
        workloads.save_trace([nothing], tmp_path / "none.jsonl")
    assert not (tmp_path / "none.jsonl").exists()


@pytest.mark.parametrize("make", [workloads.poisson, workloads.bursty])
def test_arrivals_rise_at_their_rate(make):
    times = make(4.0, 4000, 1)
    assert times == make(4.0, 4000, 1) != make(4.0, 4000, 2)
    assert times == sorted(times)
    assert len(times) == 4000
    assert times[-1] == pytest.approx(1000, rel=0.15)
    assert make(4.0, 0) == []


def test_bursts_are_burstier_than_chance():
    def variation(times):
        gaps = np.diff(times)
        return gaps.std() / gaps.mean()

    assert variation(workloads.poisson(4.0, 4000)) == pytest.approx(1, rel=0.1)
    assert variation(workloads.bursty(4.0, 4000)) > 2


def test_arriving_gives_requests_for_a_scheduler():
    found = workloads.arriving([Request(5, 3), Request(7, 2)], [0.5, 1.5], clients=("a", "b"), first_id=10)
    assert [(r.request_id, len(r.prompt), r.params.max_tokens, r.arrival, r.client) for r in found] == [
        (10, 5, 3, 0.5, "a"), (11, 7, 2, 1.5, "b"),
    ]  # fmt: skip
    more = workloads.arriving([Request(1, 1)], [1.0])
    assert [r.arrival for r in workloads.together(found, more)] == [0.5, 1.0, 1.5]
    with pytest.raises(ValueError, match="request_id twice"):
        workloads.together(found, found)
    with pytest.raises(ValueError, match="times has 1 entries; there are 2"):
        workloads.arriving([Request(1, 1)] * 2, [1.0])
    with pytest.raises(ValueError, match="clients is empty"):
        workloads.arriving([], [], clients=())


def test_a_trace_survives_a_file(tmp_path):
    path, found = tmp_path / "trace.jsonl", workloads.decodes_and_prompts(2, 10, 3, 100, gap=0.5)
    workloads.save_trace(found, path)

    def facts(requests, speed=1.0):
        return [(len(r.prompt), r.params.max_tokens, round(r.arrival * speed, 3)) for r in requests]

    assert facts(workloads.load_trace(path)) == facts(found)
    assert facts(workloads.load_trace(path, speed=2.0), 2.0) == facts(found)
    assert len(workloads.load_trace(path, limit=2)) == 2
    gaps = np.diff([r.arrival for r in found if len(r.prompt) == 100])
    assert all(0.3 <= gap <= 0.7 for gap in gaps)


def test_the_fixed_workload_is_the_one_in_the_file():
    from kvlab.bench import scheduler

    stored = workloads.load_trace(scheduler.TRACE)
    made = workloads.decodes_and_prompts()
    assert [(len(r.prompt), r.params.max_tokens) for r in stored] == [
        (len(r.prompt), r.params.max_tokens) for r in made
    ]
    assert [r.arrival for r in stored] == pytest.approx([r.arrival for r in made], abs=1e-3)
    assert [len(r.prompt) for r in stored].count(512) == 32


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"timestamp": 1}', '{"timestamp": -1, "input_length": 3, "output_length": 1}',
             '{"timestamp": 0, "input_length": 0, "output_length": 1}',
             '{"timestamp": "x", "input_length": 1, "output_length": 1}'],
)  # fmt: skip
def test_a_trace_names_the_line_that_is_none(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 3, "output_length": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match="line 2 is no request"):
        workloads.load_trace(path)
    with pytest.raises(ValueError, match="speed is 0"):
        workloads.load_trace(path, speed=0)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: workloads.poisson(0.0, 3), "rate is 0"),
        (lambda: workloads.poisson(1.0, -1), "count is -1"),
        (lambda: workloads.bursty(math.nan, 3), "rate is nan"),
        (lambda: workloads.bursty(1.0, 3, burst=0.5), "burst is 0.5"),
        (lambda: workloads.decodes_and_prompts(gap=0), "gap is 0"),
        (lambda: workloads.decodes_and_prompts(gap="x"), "gap is 'x'"),
        (lambda: workloads.decodes_and_prompts(decodes=-1), "decodes is -1"),
        (lambda: workloads.decodes_and_prompts(prompts=1.5), "prompts is 1.5"),
        (lambda: workloads.decodes_and_prompts(seed=None), "seed is None"),
        (lambda: workloads.poisson(1.0, 3, []), r"seed is \[\]"),
        (lambda: workloads.poisson(True, 3), "rate is True"),
        (lambda: workloads.poisson(5e-324, 3), "does not come in finite time"),
        (lambda: workloads.bursty(1.0, 3, burst=math.inf), "burst is inf"),
        (lambda: workloads.arriving(None, []), "requests is None"),
        (lambda: workloads.arriving([3], [1.0]), r"requests\[0\] is 3; it must be a Request"),
        (lambda: workloads.arriving([Request(1, 1)], 1.0), "times is 1.0"),
        (lambda: workloads.arriving([Request(1, 1)], [math.nan]), "arrival is nan"),
        (lambda: workloads.arriving([Request(1, 1)], [1.0], clients="ab"), "clients is 'ab'; it must be a list"),
        (lambda: workloads.arriving([Request(1, 1)], [1.0], clients=(3,)), "client is 3"),
        (lambda: workloads.arriving([Request(1, 1)], [1.0], first_id="a"), "first_id is 'a'"),
        (lambda: workloads.together([Request(1, 1)]), "streams holds Request"),
        (lambda: workloads.together(3), "streams is 3"),
        (lambda: workloads.save_trace(None, "x"), "requests is None"),
        (lambda: workloads.load_trace("x", limit=-1), "limit is -1"),
    ],
)
def test_arrivals_refuse(call, match):
    with pytest.raises(ValueError, match=match):
        call()
