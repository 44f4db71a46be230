"""The scheduler: nobody lost, nobody starved, no budget broken, and every text what it would have been alone."""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
import re
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import config, costs, flash_decoding, runtime, scheduler, testing
from kvlab.cache import NoCache
from kvlab.generate import generate
from kvlab.model import Decoder
from kvlab.paged import BlockManager, BlockPool, PagedCache
from kvlab.sampling import SamplingParams
from kvlab.scheduler import POLICIES, Metrics, Request, RooflineCost, Scheduler, StepShape, fit, serve, simulate

TOY = config.ModelConfig(
    "toy", num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=32, vocab_size=50,
    max_seq_len=256,
)  # fmt: skip
ON = runtime.device()
needs_triton = pytest.mark.skipif(not runtime.can_launch(), reason="no kernel can be launched here")


def pages(num_blocks: int) -> PagedCache:
    return PagedCache(TOY, num_blocks, 4, attention=flash_decoding.attention, device=ON)


def books(num_blocks: int, block_size: int = 4) -> BlockManager:
    return BlockManager(BlockPool(num_blocks, block_size))


def asks(request_id: int, prompt: int, answer: int = 4, **more) -> Request:
    return Request(request_id, range(prompt), SamplingParams(max_tokens=answer), **more)


def held(made: Scheduler, *requests: Request) -> Scheduler:
    for request in requests:
        made.add(request)
    return made


def play(made: Scheduler, steps: int = 10_000, start: int = 0) -> list[tuple[dict[int, int], list[int]]]:
    """Run with the number of the step as the clock; (tokens by request, who was preempted) of each step."""
    seen = []
    for now in range(start, start + steps):
        if not made.has_work:
            break
        step = made.schedule(now)
        seen.append((
            dict(zip([r.request_id for r in step.requests], step.q_lens, strict=True)),
            [r.request_id for r in step.preempted],
        ))  # fmt: skip
        if step:
            made.update(step, None, now + 1)
        made.audit()
    return seen


# --- texts -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Decoder:
    torch.manual_seed(0)
    made = Decoder(TOY, device=ON)
    for weights in made.parameters():
        weights.data.mul_(3)  # logits far enough apart for argmax not to hang on rounding
    return made


PROMPTS = [[(7 * i + 3 * j) % 50 for j in range(n)] for i, n in enumerate((5, 1, 23, 8, 12, 17))]
ANSWERS = (9, 12, 4, 1, 20, 7)


@pytest.fixture(scope="module")
def texts(model) -> list[list[int]]:
    """What each prompt gets when it is alone."""
    params = [SamplingParams(max_tokens=n) for n in ANSWERS]
    return [generate(model, pages(40), [p], one)[0].tokens for p, one in zip(PROMPTS, params, strict=True)]


def served(model, cache, made, order=range(6), **more) -> dict[int, Request]:
    requests = [Request(i, PROMPTS[i], SamplingParams(max_tokens=ANSWERS[i]), client=str(i % 2)) for i in order]
    return {r.request_id: r for r in serve(model, cache, made, requests, **more)}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunk", [1, 3, 16, 512, None])
def test_every_text_is_what_it_is_alone(model, texts, policy, chunk):
    rng = random.Random(f"{policy} {chunk}")
    for num_blocks, budget, seqs in ((40, 2048, 256), (8, 16, 3), (9, 6, 6)):  # 8 blocks: the longest text just fits
        cache, order = pages(num_blocks), rng.sample(range(6), 6)
        made = Scheduler(cache.manager, policy, budget, seqs, chunk, max_wait=0.0)
        found = served(model, cache, made, order)
        assert {i: r.tokens for i, r in found.items()} == dict(enumerate(texts))
        assert all(r.finish_reason == "length" for r in found.values())
        assert cache.manager.seq_ids == []
        cache.manager.audit()


def test_stop_tokens_end_a_text(model, texts):
    cache = pages(40)
    stop = texts[4][5]
    request = Request(0, PROMPTS[4], SamplingParams(max_tokens=20, stop_token_ids=(stop,)))
    [found] = serve(model, cache, Scheduler(cache.manager), [request])
    assert found.finish_reason == "stop"
    assert found.tokens == texts[4][: texts[4].index(stop) + 1]


def test_a_seeded_sample_survives_preemption(model):
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=n) for i, n in enumerate(ANSWERS)]
    alone = [generate(model, pages(40), [p], one)[0].tokens for p, one in zip(PROMPTS, params, strict=True)]
    cache = pages(9)
    made = Scheduler(cache.manager, "chunked", 16, 6, 5, watermark=0)
    found = list(
        serve(model, cache, made, [Request(i, p, one) for i, (p, one) in enumerate(zip(PROMPTS, params, strict=True))])
    )
    assert {r.request_id: r.tokens for r in found} == dict(enumerate(alone))
    assert sum(r.preemptions for r in found) > 0


def test_a_text_ends_where_the_model_does(model):
    cache = pages(100)
    made = Scheduler(cache.manager, max_model_len=TOY.max_seq_len)
    [found] = serve(model, cache, made, [Request(0, PROMPTS[0] * 50, SamplingParams(max_tokens=50))])
    [alone] = generate(model, pages(100), [PROMPTS[0] * 50], SamplingParams(max_tokens=50))
    assert (found.tokens, found.finish_reason) == (alone.tokens, alone.finish_reason)


def test_a_prompt_that_the_model_cannot_read_is_rejected(model, texts):
    cache = pages(40)
    strange = Request(7, [3, 50, 2], SamplingParams(max_tokens=3))
    fine = Request(0, PROMPTS[0], SamplingParams(max_tokens=ANSWERS[0]))
    found = {r.request_id: r for r in serve(model, cache, Scheduler(cache.manager), [strange, fine])}
    assert found[7].finish_reason == "rejected"
    assert found[7].error == "prompt[1] is 50; a token id must be an integer between 0 and 49"
    assert found[0].tokens == texts[0]


def test_a_scheduler_must_keep_to_the_models_context(model):
    cache = pages(100)
    with pytest.raises(ValueError, match="give the scheduler max_model_len=256"):
        serve(model, cache, Scheduler(cache.manager))


def test_a_cache_and_its_scheduler_share_their_books(model):
    cache = pages(20)
    with pytest.raises(ValueError, match="cache is a PagedCache, whose blocks are not the scheduler's"):
        serve(model, cache, Scheduler(books(20)))
    with pytest.raises(ValueError, match="cache is a NoCache"):
        serve(model, NoCache(TOY), Scheduler(cache.manager))
    for bad, match in (
        ({"metrics": 3}, "metrics is 3"),
        ({"clock": 3}, "clock is 3"),
        ({"requests": 3}, "requests is 3"),
    ):
        with pytest.raises(ValueError, match=match):
            serve(model, cache, Scheduler(cache.manager), **bad)
    with pytest.raises(ValueError, match="scheduler is 3"):
        serve(model, cache, 3)


def test_a_list_that_is_not_in_order_is_refused_before_anything_is_served(model):
    cache = pages(20)
    made, first = Scheduler(cache.manager), Request(0, PROMPTS[0], arrival=1.0)
    with pytest.raises(ValueError, match=r"requests has an arrival at 0\.5 after 1\.0; they must be in order"):
        serve(model, cache, made, [first, Request(1, PROMPTS[1], arrival=0.5)])
    with pytest.raises(ValueError, match="requests: a request is 'x'"):
        serve(model, cache, made, [first, "x"])
    assert (first.state, made.requests) == ("new", {})


def test_whoever_stops_listening_loses_nobody(model):
    cache, run = pages(40), Metrics()
    made = Scheduler(cache.manager)
    requests = [Request(i, PROMPTS[i], SamplingParams(max_tokens=3)) for i in range(4)]
    first = next(iter(serve(model, cache, made, requests, metrics=run)))
    left = made.take_finished()
    assert [r.request_id for r in (first, *left)] == [0, 1, 2, 3]
    made.reject(Request(9, [1]), "no")
    assert [r.request_id for r in serve(model, cache, made, metrics=run)] == [9]
    assert [s.reason for s in run.served] == ["length", "rejected"]


def test_a_step_that_fails_loses_nothing(model, texts):
    cache, rng = pages(12), random.Random(0)
    made = Scheduler(cache.manager, "chunked", 16, 6, 5)
    broken = functools.partial(Decoder.forward, model)

    class Sometimes:
        device, config = model.device, model.config

        def __call__(self, batch, cache):
            if rng.random() < 0.1:
                raise RuntimeError("a cosmic ray")
            logits = broken(batch, cache)
            if rng.random() < 0.1:
                raise RuntimeError("another, after the pass")
            return logits

    requests = [
        Request(i, p, SamplingParams(max_tokens=n)) for i, (p, n) in enumerate(zip(PROMPTS, ANSWERS, strict=True))
    ]
    found, errors = {}, 0
    for request in requests:
        made.add(request)
    while made.has_work:
        try:
            for done in serve(Sometimes(), cache, made):
                found[done.request_id] = done.tokens
        except RuntimeError:
            errors += 1
            made.audit()
        found |= {r.request_id: r.tokens for r in made.take_finished()}
    assert errors > 3
    assert found == dict(enumerate(texts))


def test_a_step_is_undone_whatever_fails_after_its_pass(model, texts):
    """The clock, or somebody who interrupts, between the pass and the entering of its tokens."""
    cache = pages(40)
    made, request = Scheduler(cache.manager), Request(0, PROMPTS[0], SamplingParams(max_tokens=ANSWERS[0]))
    for calls, odd in ((2, KeyboardInterrupt()), (3, KeyboardInterrupt()), (3, math.nan), (3, "late")):
        ticks = itertools.count()

        def clock(calls=calls, odd=odd, ticks=ticks):
            if next(ticks) != calls:
                return time.perf_counter()
            if isinstance(odd, BaseException):
                raise odd
            return odd

        with pytest.raises((KeyboardInterrupt, ValueError, TypeError)):
            list(serve(model, cache, made, [] if made.has_work else [request], clock=clock))
        assert made.in_flight is None
        made.audit()
    assert [r.tokens for r in serve(model, cache, made)] == [texts[0]]


def test_a_run_that_goes_on_has_one_clock(model):
    cache, run, broken = pages(40), Metrics(), [False, False, True]
    made = Scheduler(cache.manager)

    class Breaks:
        device, config = model.device, model.config

        def __call__(self, batch, cache):
            if broken and broken.pop(0):
                raise RuntimeError("once")
            return model(batch, cache)

    request = Request(0, PROMPTS[0], SamplingParams(max_tokens=6))
    with pytest.raises(RuntimeError, match="once"):
        list(serve(Breaks(), cache, made, [request], metrics=run))
    list(serve(Breaks(), cache, made, metrics=run))
    assert all(gap >= 0 for gap in run.values("itl"))
    assert run.seconds >= request.finished - request.token_times[0]
    assert made.time >= request.finished > 0
    other = Scheduler(BlockManager(BlockPool(40, 4)))
    with pytest.raises(ValueError, match="both must be of one run"):
        serve(model, PagedCache(TOY, 40, 4, manager=other.manager), other, metrics=run)
    late = asks(5, 3, arrival=made.time + 7.0)
    made.add(late)
    assert made.cancel(5)
    assert late.finished == late.arrival


def test_prompts_that_a_caller_added_are_looked_at_too(model, texts):
    cache = pages(40)
    made = Scheduler(cache.manager)
    made.add(Request(7, [1, TOY.vocab_size]))
    made.add(Request(0, PROMPTS[0], SamplingParams(max_tokens=ANSWERS[0])))
    done = {r.request_id: r for r in serve(model, cache, made)}
    assert done[7].finish_reason == "rejected"
    assert "token id must be" in done[7].error
    assert done[0].tokens == texts[0]
    made.audit()


def test_what_cannot_be_served_is_refused_at_the_call(model):
    for call in (
        lambda made: serve(3, pages(4), made),
        lambda made: scheduler.forward(None, pages(4), made.schedule()),
    ):
        with pytest.raises(ValueError, match=r"model is (3|None); it must be a Decoder"):
            call(held(Scheduler(books(40)), asks(0, 3)))
    cache = PagedCache(TOY, 40, 4, max_model_len=20, device=ON)
    with pytest.raises(ValueError, match="the cache's max_model_len is 20: give the scheduler"):
        serve(model, cache, Scheduler(cache.manager))
    cache = pages(40)
    made, one = Scheduler(cache.manager), asks(0, 3)
    for wanted in ([one, one], [one, asks(0, 4)]):
        with pytest.raises(ValueError, match="request_id 0 twice"):
            serve(model, cache, made, wanted)
    made.add(one)
    for start in (lambda: serve(model, cache, made, [asks(0, 4)]), lambda: simulate(made, [asks(0, 4)], Constant())):
        with pytest.raises(ValueError, match="request_id 0 is in use"):
            start()
    step = made.schedule()
    for start in (lambda: serve(model, cache, made), lambda: simulate(made, [], Constant())):
        with pytest.raises(ValueError, match="the last step is still in flight"):
            start()
    for call in (made.update, made.undo):
        with pytest.raises(ValueError, match="step is not the one in flight"):
            call(None)
    made.update(step, [1])
    with pytest.raises(ValueError, match="new tokens with ids; a simulation makes no tokens"):
        simulate(made, [], Constant())
    waits = Scheduler(books(40))
    waits.add(Request(0, [1], SamplingParams(stop_token_ids=(3,))))
    with pytest.raises(ValueError, match="request 0 has stop tokens"):
        simulate(waits, [], Constant())


def test_a_clock_that_stands_still_is_no_endless_loop(model, monkeypatch):
    cache, slept = pages(40), []
    monkeypatch.setattr(time, "sleep", slept.append)
    with pytest.raises(ValueError, match="clock stands still at 0"):
        list(serve(model, cache, Scheduler(cache.manager), [asks(0, 3, arrival=1e20)], clock=lambda: 0.0))
    assert slept == [60.0]


def test_an_id_that_somebody_takes_while_its_request_waits():
    for policy in ("chunked", "fair"):
        made = Scheduler(books(40), policy, max_wait=0.0)
        held(made, asks(0, 5), asks(1, 5, 2))
        made.manager.ensure(0, 3)
        made.manager.advance(0, 3)
        play(made)
        rejected, served_ = made.take_finished()
        assert (rejected.request_id, rejected.finish_reason) == (0, "rejected")
        assert "was taken in the cache while it waited" in rejected.error
        assert (served_.request_id, served_.num_new_tokens) == (1, 2)
        assert made.manager.length(0) == 3


def test_logits_are_asked_for_only_where_a_token_is_due(model):
    made = held(Scheduler(books(20), "chunked", 64, 4, 4), asks(0, 3), asks(1, 10))
    for expected in ([2], [0], [0, 2], [0, 1]):
        step = made.schedule()
        assert step.batch().logits_indices.tolist() == expected
        made.update(step, [0] * len(step.sampled))


# --- cases that have broken real systems -----------------------------------------------------------------------------


def test_r1_what_can_never_fit_is_rejected_and_the_next_one_runs():
    made = held(Scheduler(books(49, 16), "chunked"), asks(0, 1002), asks(1, 20, 3))
    [rejected] = made.take_finished()
    assert (rejected.request_id, rejected.finish_reason) == (0, "rejected")
    assert rejected.error is not None
    assert "1002 tokens" in rejected.error
    assert "785" in rejected.error
    play(made)
    [done] = made.take_finished()
    assert (done.request_id, done.finish_reason, done.num_new_tokens) == (1, "length", 3)


@pytest.mark.parametrize("policy", POLICIES)
def test_r2_a_text_ends_where_the_pool_does(policy):
    made = held(Scheduler(books(2), policy), asks(0, 8, 5), asks(1, 3, 2))
    play(made)
    found = {r.request_id: r for r in made.take_finished()}
    assert (found[0].finish_reason, found[0].num_new_tokens) == ("length", 1)
    assert (found[1].finish_reason, found[1].num_new_tokens) == ("length", 2)


def test_r3_a_preempted_request_computes_prompt_and_answer_again():
    made = held(Scheduler(books(4), "chunked", watermark=0), asks(0, 4, 9), asks(1, 4, 7))
    seen = play(made)
    resumed = next(i for i, (_, gone) in enumerate(seen) if gone) + 1
    assert seen[resumed - 1][1] == [1]  # who came last
    chunks = [step[1] for step, _ in seen[resumed:] if 1 in step]
    assert chunks[0] == 4 + len([s for s, _ in seen[:resumed] if 1 in s])
    assert {r.num_new_tokens for r in made.take_finished()} == {9, 7}


def test_r5_nobody_is_skipped_because_somebody_else_was_preempted():
    made = Scheduler(books(5), "chunked", 4, 4, 2, watermark=0)
    held(made, asks(1, 2, 5), asks(2, 1, 5))
    made.update(made.schedule())
    held(made, asks(0, 11, 5))
    made.update(made.schedule())
    assert [r.request_id for r in made.prefilling] == [0]
    step = next(s for s in iter(lambda: play(made, 1)[0], None) if s[1])
    assert step == ({1: 1, 2: 1}, [0])


def test_r7_decodes_go_on_during_a_long_prefill():
    made = held(Scheduler(books(400), "chunked", 64, 8), asks(0, 4, 100))
    made.update(made.schedule())
    held(made, asks(1, 1024))
    seen = [step for step, _ in play(made, 17)]
    assert all(step[0] == 1 for step in seen)
    assert [step[1] for step in seen] == [63] * 16 + [1024 - 16 * 63]
    assert made.requests[1].num_new_tokens == 1


def test_r8_chunks_and_the_first_token():
    made = held(Scheduler(books(20), "chunked", 64, 4, 4), asks(0, 3), asks(1, 10))
    seen = [step for step, _ in play(made, 3)]
    assert [step[1] for step in seen] == [4, 4, 2]
    assert made.requests[1].num_new_tokens == 1
    assert made.requests[0].num_new_tokens == 3


# --- policies --------------------------------------------------------------------------------------------------------


def test_a_static_batch_lets_nobody_in():
    made = held(Scheduler(books(50), "static", 64, 2), asks(0, 5, 2), asks(1, 7, 6), asks(2, 3, 1))
    seen = [step for step, _ in play(made)]
    assert seen == [{0: 5, 1: 7}, {0: 1, 1: 1}, {1: 1}, {1: 1}, {1: 1}, {1: 1}, {2: 3}]


def test_continuous_batching_computes_prompts_first_and_alone():
    made = held(Scheduler(books(50), "continuous", 8, 2), asks(0, 5, 3), asks(1, 20, 2), asks(2, 3, 1))
    seen = [step for step, _ in play(made)]
    assert seen == [{0: 5, 1: 3}, {1: 8}, {1: 8}, {1: 1}, {0: 1, 1: 1}, {2: 3}, {0: 1}]


def test_chunks_fill_what_decodes_leave():
    made = held(Scheduler(books(50), "chunked", 8, 3), asks(0, 5, 5), asks(1, 20, 2), asks(2, 3, 1))
    seen = [step for step, _ in play(made)]
    assert seen == [{0: 5, 1: 3}, {0: 1, 1: 7}, {0: 1, 1: 7}, {0: 1, 1: 3, 2: 3}, {0: 1, 1: 1}]


def test_the_watermark_is_left_free_while_somebody_runs():
    made = held(Scheduler(books(10), "chunked", watermark=0.3), asks(0, 16, 20), asks(1, 16, 1))
    assert [r.request_id for r in made.schedule().requests] == [0]
    roomy = held(Scheduler(books(10), "chunked", watermark=0.0), asks(0, 16, 20), asks(1, 16, 1))
    assert [r.request_id for r in roomy.schedule().requests] == [0, 1]
    alone = held(Scheduler(books(10), "chunked", watermark=0.5), asks(0, 40, 1))
    assert [r.request_id for r in alone.schedule().requests] == [0]


def test_blocks_that_others_hold_do_not_hang_the_engine():
    manager = books(10)
    manager.ensure(99, 30)
    made = held(Scheduler(manager, "chunked"), asks(0, 20), asks(1, 4, 2), asks(2, 4, 20))
    play(made)
    found = {r.request_id: (r.finish_reason, r.num_new_tokens) for r in made.take_finished()}
    assert found == {0: ("rejected", 0), 1: ("length", 2), 2: ("length", 5)}


def live(rng: random.Random, policy: str, kind: type[Scheduler] = Scheduler) -> None:
    """A random workload to its end: nobody lost or served twice, no budget exceeded, the books right at each step."""
    seqs = rng.randint(1, 6)
    made = kind(
        books(rng.randint(2, 20), rng.randint(1, 5)), policy, rng.randint(seqs, 20), seqs,
        rng.choice([None, 1, 3, 16]), watermark=rng.choice([0.0, 0.1]), max_wait=rng.choice([0, 3, 50]),
        aged_share=rng.choice([0.0, 0.3, 1.0]),
    )  # fmt: skip
    todo = [
        asks(i, rng.randint(1, 30), rng.randint(0, 12), client=rng.choice("abc")) for i in range(rng.randint(1, 15))
    ]
    every, ended, computed = list(todo), [], {}
    for now in itertools.count():
        while todo and (rng.random() < 0.3 or not made.has_work):
            todo[-1].arrival = now
            made.add(todo.pop())
        if not todo and not made.has_work:
            break
        before = set(made.decoding)
        step = made.schedule(now)
        assert step.num_tokens + step.budget == made.max_num_batched_tokens
        assert step.budget >= 0
        assert len(set(step.requests)) == len(step.requests)
        assert all(0 < chunk <= made.max_chunk for chunk in step.prefills.values())
        assert all(r.num_computed_tokens + q <= r.room for r, q in zip(step.requests, step.q_lens, strict=True))
        if policy == "chunked":
            assert before - set(step.preempted) == set(step.decodes)
        if policy in ("static", "continuous"):
            assert not (step.decodes and step.prefills)
        running = [r.order for r in (*made.prefilling, *made.decoding)]
        assert all(r.order > max(running, default=-1) for r in step.preempted), "someone who came later goes on"
        computed |= dict.fromkeys(step.preempted, 0)
        computed |= {r: computed.get(r, 0) + q for r, q in zip(step.requests, step.q_lens, strict=True)}
        if step:
            made.update(step, None, now + 1)
        assert all(r.num_computed_tokens == computed[r] for r in step.requests), (
            "a token was left out, or counted twice"
        )
        made.audit()
        ended += made.take_finished()
        assert now < 5000, "it hangs"
    ended += made.take_finished()
    assert sorted(r.request_id for r in ended) == sorted(r.request_id for r in every)
    assert made.manager.pool.num_free == made.manager.pool.num_blocks
    for r in ended:
        fits = made.capacity + 1 - r.num_prompt_tokens
        if fits < 1:
            assert r.finish_reason == "rejected"
        else:
            assert (r.finish_reason, r.num_new_tokens) == ("length", min(r.params.max_tokens, fits))
            assert len(r.token_times) == r.num_new_tokens


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(POLICIES))
def test_random_workloads(rng, policy):
    live(rng, policy)


class KeepsBlocks(Scheduler):
    def _leave(self, request):
        free, self.manager.free = self.manager.free, lambda seq_id: None
        super()._leave(request)
        self.manager.free = free


class KeepsItsPlace(Scheduler):
    def _put_back(self, request):
        computed = request.num_computed_tokens
        super()._put_back(request)
        request.num_computed_tokens = computed


class TakesTheOldest(Scheduler):
    def _latest(self):
        return min([*self.prefilling, *self.decoding], key=lambda r: r.order, default=None)


class ForgetsTheBudget(Scheduler):
    def _decode(self, step):
        before = step.budget
        super()._decode(step)
        step.budget = before


class SkipsAfterPreemption(Scheduler):
    def _decode(self, step):
        super()._decode(step)
        if step.preempted and step.decodes:
            step.budget += 1
            step.decodes.pop()


class LosesTheVictim(Scheduler):
    def _preempt(self, request, step):
        super()._preempt(request, step)
        request.state = "finished"


class CountsAChunkTwice(Scheduler):
    def update(self, step, tokens=None, now=0.0):
        super().update(step, tokens, now)
        for request in self.prefilling:
            request.num_computed_tokens += request in step.prefills and request.remaining > 1


MUTANTS = [KeepsBlocks, KeepsItsPlace, TakesTheOldest, ForgetsTheBudget, SkipsAfterPreemption, LosesTheVictim]


@pytest.mark.parametrize("kind", [*MUTANTS, CountsAChunkTwice])
def test_planted_bugs_are_caught(kind):
    caught = 0
    for seed in range(60):
        try:
            live(random.Random(seed), "chunked", kind)
        except (AssertionError, ValueError, IndexError):
            caught += 1
    assert caught


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False))
def test_nobody_starves_under_fair(rng):
    """A prompt is done at most ``max_wait`` and the steps of its share, and of those before it, after it came."""
    seqs = rng.randint(8, 30)
    made = Scheduler(
        books(2000), "fair", rng.randint(seqs, seqs + 20), seqs, max_wait=(limit := rng.randint(0, 30)),
        aged_share=rng.choice([0.0, 0.2, 0.6]),
    )  # fmt: skip
    requests: list[Request] = []
    for now in range(300):
        if now < 150 and made.num_running + made.num_waiting < seqs - 1 and rng.random() < 0.4:
            client = "greedy" if rng.random() < 0.2 else f"client {rng.randint(0, 3)}"
            prompt = rng.randint(40, 120) if client == "greedy" else rng.randint(1, 9)
            requests.append(asks(len(requests), prompt, rng.randint(1, 60), client=client, arrival=float(now)))
            made.add(requests[-1])
        if step := made.schedule(now):
            made.update(step, None, now + 1)
    for mine in requests:
        first = mine.token_times[0]
        ahead = [r for r in requests if r.order <= mine.order and r.token_times[0] > mine.arrival]
        steps = sum(math.ceil(r.num_prompt_tokens / made.share) for r in ahead)
        assert first - mine.arrival <= limit + steps + 1


def test_a_prompt_beside_many_decodes_gets_its_share():
    """The budget has one token more than there are decodes: without ageing a prompt takes a step a token."""
    first = {}
    for policy in ("chunked", "fair"):
        made = held(
            Scheduler(books(1000), policy, 32, 32, max_wait=10, aged_share=0.25), *[asks(i, 1, 200) for i in range(31)]
        )
        made.update(made.schedule())
        late = asks(99, 100, 1)
        held(made, late)
        play(made, 150, start=1)
        first[policy] = late.token_times[0]
    assert first == {"chunked": 101, "fair": 10 + math.ceil((100 - 9) / 8)}


def test_an_aged_prompt_takes_the_place_of_who_came_later():
    made = Scheduler(books(1000), "fair", 8, 2, max_wait=5)
    held(made, asks(0, 1, 100, client="greedy"), asks(3, 1, 4, client="greedy"))
    made.update(made.schedule(0), None, 1)
    held(made, asks(1, 30, 2, client="greedy", arrival=1.0), asks(2, 1, 100, client="modest", arrival=1.0))
    seen = play(made, 8, start=1)
    assert [sorted(step) for step, _ in seen] == [[0, 3]] * 3 + [[0, 2]] * 2 + [[0, 1]] * 3
    assert [gone for _, gone in seen] == [[]] * 5 + [[2], [], []]
    play(made, start=9)
    assert {r.request_id: r.num_new_tokens for r in made.take_finished()} == {0: 100, 1: 2, 2: 100, 3: 4}


def test_clients_share_alike_however_much_they_ask():
    made = Scheduler(books(4000), "fair", 64, 4, max_wait=1e9)
    for i in range(400):
        made.add(asks(i, 20, 10, client="greedy" if i % 8 else "modest"))
    done = {"greedy": 0, "modest": 0}
    for _ in range(120):
        made.update(made.schedule(0.0))
        for r in made.take_finished():
            done[r.client] += 1
    assert abs(done["greedy"] - done["modest"]) <= 4
    assert abs(made.queue.accounts["greedy"] - made.queue.accounts["modest"]) <= 4 * (20 + 2 * 10)


def test_idling_saves_nothing_up():
    made = Scheduler(books(4000), "fair", 64, 1, max_wait=1e9)
    held(made, *[asks(i, 10, 10, client="busy") for i in range(30)])
    play(made, 200)
    held(made, *[asks(100 + i, 10, 10, client="back") for i in range(10)])
    lowest = made.queue.accounts["back"]
    assert lowest >= made.queue.accounts["busy"] - 30
    seen = [next(iter(step)) >= 100 for step, _ in play(made, 200)]
    assert 0.3 < sum(seen) / len(seen) < 0.7


def test_who_cancels_and_comes_back_saves_nothing_up():
    made = Scheduler(books(9000), "fair", 2, 2, max_wait=1e9)
    busy = [asks(i, 10, 1000, client="busy") for i in range(2)] + [
        asks(2 + i, 10, 50, client="busy") for i in range(10)
    ]
    held(made, *busy)
    for step in range(990):
        if step == 50:  # both answers have begun: from here on the budget is spent before anybody looks at the queue
            held(made, asks(50, 10, 5, client="back"))
            made.cancel(50)
        made.update(made.schedule())
    held(made, *[asks(100 + i, 10, 50, client="back") for i in range(30)])
    assert made.queue.accounts["back"] >= made.queue.accounts["busy"] - 2100  # what two answers of 1000 cost
    order = []
    while made.has_work:
        order += [r.request_id for r in made.schedule().prefills if r.num_computed_tokens == 0]
        made.update(made.in_flight)
    assert {r >= 100 for r in order[:4]} == {True, False}


# --- cancelling, undoing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_thousand_requests_with_random_cancels_in_a_pool_for_three(policy):
    rng = random.Random(policy)
    made = Scheduler(books(12), policy, 16, 6, 5, max_wait=4)  # a request has 16 tokens at most: 4 blocks
    requests = [asks(i, rng.randint(1, 8), rng.randint(1, 8), client=rng.choice("ab")) for i in range(1000)]
    for request in requests:
        made.add(request)
    ended: list[Request] = []
    now = 0
    while made.has_work:
        step = made.schedule(now)
        for _ in range(rng.choice([0, 0, 1, 2])):  # in flight
            made.cancel(rng.randrange(1000), now)
        if step:
            made.update(step, None, now := now + 1)
        for _ in range(rng.choice([0, 0, 1])):
            made.cancel(rng.randrange(1000), now)
        made.audit()
        ended += made.take_finished()
    ended += made.take_finished()
    assert sorted(r.request_id for r in ended) == list(range(1000))
    reasons = [r.finish_reason for r in ended]
    assert set(reasons) == {"cancelled", "length"}
    assert min(map(reasons.count, ("cancelled", "length"))) > 100
    assert all(r.num_new_tokens == r.params.max_tokens for r in ended if r.finish_reason == "length")
    assert made.manager.pool.num_free == 12


def test_cancelled_in_flight_is_over_with_the_step(model):
    cache = pages(20)
    made = held(Scheduler(cache.manager, "chunked", 8, 4), Request(0, PROMPTS[0]), Request(1, PROMPTS[2]))
    step = made.schedule()
    assert made.cancel(0) is True
    assert made.cancel(1) is True
    assert made.cancel(1) is False
    assert made.cancel(7) is False
    assert set(made.requests) == {0, 1}
    made.update(step, scheduler.forward(model, cache, step))
    assert [r.finish_reason for r in made.take_finished()] == ["cancelled"] * 2
    assert cache.manager.seq_ids == []
    assert not made.has_work


def test_cancelled_beside_a_step_leaves_with_it():
    """A decode that is not part of the prompt's step does not stay for another one."""
    made = held(Scheduler(books(20), "continuous", 8, 4), asks(0, 3, 50))
    made.update(made.schedule())
    held(made, asks(1, 8))
    step = made.schedule()
    assert [r.request_id for r in step.requests] == [1]
    assert made.cancel(0)
    made.update(step)
    assert [r.request_id for r in made.take_finished()] == [0]
    made.audit()


def test_an_end_of_its_own_comes_before_a_cancellation():
    made = held(Scheduler(books(20), "chunked", 8, 4), asks(0, 3, 1))
    step = made.schedule()
    made.cancel(0)
    made.update(step)
    assert [r.finish_reason for r in made.take_finished()] == ["length"]
    assert not made.has_work


def test_undo_puts_everybody_back():
    made = held(Scheduler(books(20), "chunked", 8, 4), asks(0, 5), asks(1, 9))
    step = made.schedule()
    made.cancel(1)
    made.undo(step)
    made.audit()
    assert made.num_waiting == 1
    assert [r.request_id for r in made.take_finished()] == [1]
    play(made)
    assert [r.num_new_tokens for r in made.take_finished()] == [4]


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"policy": "best"}, "policy is 'best'"),
        ({"manager": BlockPool(4, 4)}, "manager is"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"max_num_batched_tokens": 2.5}, "max_num_batched_tokens is 2.5"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, "max_num_seqs is 9; it must be at most max_num_batched_tok"),
        ({"long_prefill_token_threshold": 0}, "long_prefill_token_threshold is 0"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"watermark": 1.0}, "watermark is 1.0"),
        ({"watermark": "x"}, "watermark is 'x'"),
        ({"max_wait": -1}, "max_wait is -1"),
        ({"aged_share": 2}, "aged_share is 2"),
        ({"decode_weight": math.nan}, "decode_weight is nan"),
        ({"decode_weight": True}, "decode_weight is True"),
        ({"max_wait": 10**400}, "max_wait is 1000"),
        ({"watermark": np.float32("nan")}, "watermark is np.float32(nan)"),
    ],
)
def test_a_scheduler_refuses(bad, match):
    with pytest.raises(ValueError, match=re.escape(match)):
        Scheduler(**{"manager": books(4), **bad})


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"request_id": "a"}, "request_id is 'a'"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": ["x"]}, "prompt[0] is 'x'"),
        ({"params": {}}, "params is {}"),
        ({"arrival": -1.0}, "arrival is -1.0"),
        ({"arrival": math.inf}, "arrival is inf"),
        ({"client": 3}, "client is 3"),
        ({"prompt": [3, -1]}, "prompt[1] is -1; a token id must be 0 or more"),
        ({"prompt": [2**63]}, "prompt[0] is 9223372036854775808"),
        ({"prompt": range(-2, 3)}, "prompt[0] is -2"),
        ({"prompt": range(10**12)}, "prompt is range(0, 1000000000000); it must have fewer than 2**31 tokens"),
        ({"prompt": range(0)}, "prompt is empty"),
        ({"arrival": "now"}, "arrival is 'now'"),
        ({"arrival": True}, "arrival is True"),
    ],
)
def test_a_request_refuses(bad, match):
    with pytest.raises(ValueError, match=re.escape(match)):
        Request(**{"request_id": 0, "prompt": [1], **bad})


def test_calls_out_of_turn_change_nothing():
    made = held(Scheduler(books(20)), asks(0, 5))
    with pytest.raises(ValueError, match="request_id 0 is in use"):
        made.add(asks(0, 3))
    with pytest.raises(ValueError, match="it must be a new Request"):
        made.add(made.requests[0])
    with pytest.raises(ValueError, match="request is 3"):
        made.add(3)
    step = made.schedule()
    with pytest.raises(ValueError, match="still in flight"):
        made.schedule()
    with pytest.raises(ValueError, match="tokens has 2 entries; this step gives one to 1 requests"):
        made.update(step, [1, 2])
    made.update(step, [1])
    with pytest.raises(ValueError, match="not the one in flight"):
        made.update(step, [1])
    with pytest.raises(ValueError, match="not the one in flight"):
        made.undo(step)
    made.audit()
    assert made.requests[0].tokens == [1]
    none = held(Scheduler(books(20)), asks(0, 5, 0))
    assert [r.finish_reason for r in none.take_finished()] == ["length"]


def test_numbers_of_numpy_are_numbers():
    made = Scheduler(
        books(20), "fair", np.int64(8), np.int32(4), np.int16(3), watermark=np.float32(0.1), max_wait=np.int64(2),
        aged_share=np.float64(0.5), decode_weight=np.float32(2),
    )  # fmt: skip
    request = Request(np.int64(3), np.arange(7), SamplingParams(max_tokens=2), np.float32(0.5))
    assert [type(x) for x in (request.request_id, request.arrival, request.prompt[0])] == [int, float, int]
    made.add(request, np.float64(0.5))
    while made.has_work:
        step = made.schedule(np.float32(1))
        made.update(step, torch.zeros(len(step.sampled), dtype=torch.int64), np.float64(2))
    [done] = made.take_finished(np.int64(1))
    assert (done.tokens, done.token_times, done.finished) == ([0, 0], [2.0, 2.0], 2.0)
    assert {type(x) for x in (*done.tokens, *done.token_times, done.admitted)} == {int, float}


@pytest.mark.parametrize("now", [math.nan, math.inf, "now", True, [0.0], 10**400, torch.tensor(1.0)])
def test_a_time_that_is_none_changes_nothing(now):
    new = asks(9, 3)
    made = held(Scheduler(books(20), "fair", 8, 4), asks(0, 3), asks(1, 30))
    step = made.schedule()
    for call in (
        lambda: made.add(new, now), lambda: made.reject(new, "no", now), lambda: made.cancel(0, now),
        lambda: made.update(step, [1], now), lambda: made.undo(step, now),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"now is .*it must be a finite number of seconds"):
            call()
    assert new.state == "new"
    assert not made.requests[0].cancelled
    assert made.requests[0].tokens == []
    made.update(step, [1])
    with pytest.raises(ValueError, match="now is"):
        made.schedule(now)
    made.audit()
    assert made.schedule().num_tokens == 8


@pytest.mark.parametrize(
    ("tokens", "match"),
    [
        ([-1], "tokens[0] is -1"),
        ([2**63], "tokens[0] is 9223372036854775808"),
        ([1.0], "tokens[0] is 1.0"),
        ([None], "tokens[0] is None"),
        ("7", "tokens[0] is '7'"),
        (7, "tokens is 7; it must be a list"),
        ([], "tokens has 0 entries"),
    ],
)
def test_what_is_no_token_changes_nothing(tokens, match):
    made = held(Scheduler(books(20), "chunked", 8, 4), asks(0, 3), asks(1, 9))
    step = made.schedule()
    with pytest.raises(ValueError, match=re.escape(match)):
        made.update(step, tokens)
    assert [r.num_computed_tokens for r in made.requests.values()] == [0, 0]
    assert made.requests[0].tokens == []
    made.update(step, [5])
    made.audit()
    assert made.requests[0].tokens == [5]


def test_a_text_has_the_ids_of_all_its_tokens_or_of_none():
    for first, second in ((None, [1]), ([1], None)):
        made = held(Scheduler(books(20)), asks(0, 3))
        made.update(made.schedule(), first)
        step = made.schedule()
        with pytest.raises(ValueError, match=r"request 0 has ids for . of its 1 new tokens"):
            made.update(step, second)
        made.update(step, first)
        made.audit()
    request = made.requests[0]
    assert request.token_ids(2, 5) == [2, 1, 1]
    for start, stop in ((-1, 2), (3, 2), (0, 6)):
        with pytest.raises(ValueError, match=f"start is {start} and stop {stop}; request 0 has the ids of 3 tokens"):
            request.token_ids(start, stop)
    lengths = held(Scheduler(books(20)), asks(0, 3))
    lengths.update(lengths.schedule())
    with pytest.raises(ValueError, match="and of 0 new ones"):
        lengths.schedule().batch()


def test_an_id_is_an_integer_also_where_it_is_cancelled():
    made = held(Scheduler(books(20)), asks(1, 3))
    for wrong in (True, "1", 1.0, [1]):
        with pytest.raises(ValueError, match="request_id is"):
            made.cancel(wrong)
    assert made.requests[1].state == "waiting"
    assert made.cancel(torch.tensor(1))
    made.add(asks(1, 3))  # the id is free again, though the queue has not come to the one that left
    play(made)
    assert [r.finish_reason for r in made.take_finished()] == ["cancelled", "length"]
    with pytest.raises(ValueError, match="reason is 3"):
        made.reject(asks(2, 3), 3)
    with pytest.raises(ValueError, match="count is -1"):
        made.take_finished(-1)
    spent = asks(4, 3)
    made.reject(spent, "no")
    with pytest.raises(ValueError, match="request is finished; it must be a new Request"):
        made.reject(spent, "no")


@pytest.mark.parametrize("policy", POLICIES)
def test_the_smallest_of_everything(policy):
    """A pool of one block of one token, a budget of 1, one place: two prompts of 1, and one that is too long."""
    made = Scheduler(books(1, 1), policy, 1, 1, 1, watermark=0.99, max_wait=0, aged_share=0, decode_weight=0)
    held(made, asks(0, 1, 10**9), asks(1, 1, 1), asks(2, 2, 1), asks(3, 1, 0))
    play(made)
    found = {r.request_id: (r.finish_reason, r.num_new_tokens) for r in made.take_finished()}
    assert found == {0: ("length", 1), 1: ("length", 1), 2: ("rejected", 0), 3: ("length", 0)}


def test_a_prompt_as_long_as_the_context_is_rejected_and_one_shorter_by_a_token_gets_one():
    made = held(Scheduler(books(50), max_model_len=20), asks(0, 20), asks(1, 19), asks(2, 21, 1))
    play(made)
    found = {r.request_id: r for r in made.take_finished()}
    assert {i: (r.finish_reason, r.num_new_tokens) for i, r in found.items()} == {
        0: ("rejected", 0), 1: ("length", 1), 2: ("rejected", 0),
    }  # fmt: skip
    assert found[0].error == "the prompt has 20 tokens; with one new one a text may have 20 (max_model_len)"


@settings(max_examples=80, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(POLICIES))
def test_a_random_life_with_all_that_can_happen(rng, policy):
    """Stop tokens, cancellations at any moment, steps that fail, blocks that somebody else takes and gives back."""
    seqs = rng.randint(1, 6)
    made = Scheduler(
        books(rng.choice([1, 2, 15]), rng.randint(1, 5)), policy, rng.randint(seqs, 20), seqs, rng.choice([None, 1, 7]),
        max_model_len=rng.choice([None, 1, 30]), watermark=rng.choice([0, 0.1, 0.99]), max_wait=rng.choice([0, 30]),
        aged_share=rng.choice([0, 0.3, 1]), decode_weight=rng.choice([0, 2]),
    )  # fmt: skip
    every: list[Request] = []
    ended: list[Request] = []
    for now in itertools.count():
        if len(every) < 30 and (rng.random() < 0.4 or not made.has_work):
            prompt = range(rng.choice([1, rng.randint(1, 40), made.max_length, max(1, made.max_length - 1)]))
            params = SamplingParams(max_tokens=rng.choice([0, 1, 12, 10**9]), stop_token_ids=rng.choice([(), (0,)]))
            every.append(Request(len(every), prompt, params, rng.randint(0, now), rng.choice("abc")))
            made.add(every[-1], now)
        if -1 in made.manager:
            made.manager.free(-1)
        elif rng.random() < 0.1:
            made.manager.ensure(-1, rng.randint(0, made.manager.pool.num_free) * made.manager.block_size)
        step = made.schedule(now)
        for _ in range(rng.choice([0, 0, 2])):
            made.cancel(rng.randrange(len(every)), now)
        if step and rng.random() < 0.05:
            made.undo(step, now)
        elif step:
            made.update(step, [rng.randrange(5) for _ in step.sampled], now)
        made.audit()
        ended += made.take_finished(rng.choice([None, 1]))
        if len(every) == 30 and not made.has_work:
            break
        assert now < 5000, "it hangs"
    ended += made.take_finished()
    assert sorted(r.request_id for r in ended) == list(range(30))
    for r in ended:
        assert len(r.tokens) == len(r.token_times) == r.num_new_tokens
        assert not r.num_new_tokens or r.num_tokens <= made.max_length
        assert (r.finish_reason == "stop") == (r.stops == {0} and r.tokens[-1:] == [0])
        assert not r.stops.intersection(r.tokens[:-1])
    made.manager.free(-1)
    assert made.manager.pool.num_free == made.manager.pool.num_blocks


SHAPE = StepShape.build([5])
LLAMA, H200 = config.get("llama-3-8b"), costs.HARDWARE["h200"]
TERMS = len(scheduler.FittedCost.TERMS)
ROW = {"shape": {name: getattr(SHAPE, name) for name in StepShape.__dataclass_fields__}, "ms": 5.0}


def queue_of(client):
    queue = scheduler.FairQueue()
    queue.push(Request(0, [1], client=client))
    return queue


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: StepShape(-1, 3), "decodes is -1"),
        (lambda: StepShape(1, 2.5), "decode_kv is 2.5"),
        (lambda: StepShape(1, 5, 1, "x"), "chunk_tokens is 'x'"),
        (lambda: StepShape(1, 10**30), "decode_kv is 1000"),
        (lambda: StepShape.of(3), "step is 3; it must be a Step"),
        (lambda: StepShape.build([0]), "decode_lens holds 0"),
        (lambda: StepShape.build(5), "decode_lens is 5"),
        (lambda: StepShape.build([math.nan]), "decode_lens[0] is nan"),
        (lambda: StepShape.build([], [3]), "chunks: a chunk is 3"),
        (lambda: StepShape.build([], [(1, 2, 3)]), "chunks hold (1, 2, 3)"),
        (lambda: StepShape.build([], [(4, 3)]), "chunks hold (4, 3)"),
        (lambda: StepShape.build([], [(0, 3)]), "chunks hold (0, 3)"),
        (lambda: StepShape.build([], 7), "chunks is 7"),
        (lambda: RooflineCost("llama", H200), "config is 'llama'; it must be a ModelConfig"),
        (lambda: RooflineCost(LLAMA, "h200"), "hardware is 'h200'; it must be a Hardware"),
        (lambda: RooflineCost(LLAMA, H200, "fp3"), "dtype"),
        (lambda: RooflineCost(LLAMA, H200, overhead=math.nan), "overhead is nan"),
        (lambda: RooflineCost(LLAMA, H200).seconds((1, 2)), "shape is (1, 2); it must be a StepShape"),
        (lambda: scheduler.FittedCost((1.0,)), f"coefficients has 1 entries; they must be {TERMS}"),
        (lambda: scheduler.FittedCost((1.0,) * (TERMS - 1) + (-1.0,)), f"coefficients[{TERMS - 1}] is -1.0"),
        (lambda: scheduler.FittedCost(None), "coefficients is None"),
        (lambda: scheduler.FittedCost((0.0,) * TERMS, ("x",)), "residuals[0] is 'x'"),
        (lambda: scheduler.FittedCost((0.0,) * TERMS).seconds(None), "shape is None"),
        (lambda: fit([3], [1.0]), "shape is 3"),
        (lambda: fit(SHAPE, [1.0]), "shapes is StepShape("),
        (lambda: fit([SHAPE], ["1"]), "seconds[0] is '1'"),
        (lambda: fit([SHAPE], [math.inf]), "seconds[0] is inf"),
        (lambda: scheduler.fit_records([3]), "records hold 3"),
        (lambda: scheduler.fit_records(None), "records is None"),
        (lambda: scheduler.fit_records([{"shape": ROW["shape"]}]), "records: ms is None"),
        (lambda: scheduler.fit_records([{**ROW, "shape": {**ROW["shape"], "chunks": 1.5}}]), "chunks is 1.5"),
        (lambda: Metrics(simulated="yes"), "simulated is 'yes'"),
        (lambda: Metrics().observe(None, scheduler.Step(1), 0, 1), "scheduler is None"),
        (lambda: Metrics().observe(Scheduler(books(4)), None, 0, 1), "step is None"),
        (lambda: Metrics().observe(Scheduler(books(4)), scheduler.Step(1), math.nan, 1), "start is nan"),
        (
            lambda: Metrics().observe(Scheduler(books(4)), scheduler.Step(1), 2, 1),
            "end is 1; it must be a finite number",
        ),
        (lambda: Metrics().finish(None), "request is None"),
        (lambda: Metrics().prometheus("1 bad"), "prefix is '1 bad'"),
        (lambda: Metrics().percentile("ttft", "x"), "q is 'x'"),
        (lambda: Metrics().goodput(itl=math.nan), "itl is nan"),
        (lambda: scheduler.table([Metrics()]), "runs is [<"),
        (lambda: scheduler.table({"a": 3}), "runs['a'] is 3; it must be a Metrics"),
        (lambda: scheduler.forward(None, None, None), "step is None"),
        (lambda: scheduler.forward(None, None, scheduler.Step(8)), "step is empty"),
        (lambda: scheduler.FirstCome().push(3), "request is 3; it must be a Request"),
        (lambda: scheduler.FirstCome().put_back(3), "request is 3"),
        (lambda: scheduler.FairQueue().push(3), "request is 3"),
        (lambda: scheduler.FairQueue().put_back(3), "request is 3"),
        (lambda: queue_of("a").charge("a", -1), "tokens is -1"),
        (lambda: queue_of("a").charge("a", math.nan), "tokens is nan"),
        (lambda: scheduler.FairQueue().charge(3, 1), "client is 3"),
    ],
)
def test_public_names_refuse(call, match):
    with pytest.raises(ValueError, match=re.escape(match)):
        call()


# --- metrics ---------------------------------------------------------------------------------------------------------


class Constant:
    label = "a second a step, and a tenth a token"

    def seconds(self, shape: StepShape) -> float:
        return 1 + shape.num_tokens / 10


def by_hand() -> Metrics:
    return simulate(Scheduler(books(100), "chunked", 8, 4), [asks(0, 10, 3), asks(1, 4, 1, arrival=2.0)], Constant())


def test_metrics_of_a_run_by_hand():
    """Steps: 8 tokens to 1.8; 2 of it to 3.0; a decode and the other's 4 to 4.5; a decode to 5.6."""
    run = by_hand()
    assert run.steps["end"].tolist() == pytest.approx([1.8, 3.0, 4.5, 5.6])
    first, second = sorted(run.served, key=lambda s: s.request_id)
    assert (first.ttft, first.queue_time, first.e2e) == pytest.approx((3.0, 0.0, 5.6))
    assert first.itl.tolist() == pytest.approx([1.5, 1.1])
    assert first.tpot == pytest.approx(1.3)
    assert (second.ttft, second.queue_time, second.tpot) == (pytest.approx(2.5), pytest.approx(1.0), None)
    assert run.values("itl").tolist() == pytest.approx([1.5, 1.1])
    assert run.percentile("ttft", 50) == pytest.approx(2.75)
    assert run.time_by_kind() == pytest.approx({"prefill": 3.0, "decode": 1.1, "mixed": 1.5})
    assert run.throughput() == pytest.approx(4 / 5.6)
    assert run.total_throughput() == pytest.approx(18 / 5.6)
    assert run.goodput(ttft=2.6) == pytest.approx(1 / 5.6)
    assert run.goodput(ttft=3.1, tpot=1.2) == pytest.approx(1 / 5.6)
    assert run.goodput(itl=1.6) == pytest.approx(2 / 5.6)
    assert run.steps["kv_use"].tolist() == pytest.approx([0.03, 0.03, 0.03, 0.0])
    assert "| ttft p50 | 2,750.0 ms |" in run.table()
    assert "(simulated)" in run.table()


def test_prometheus_reads_what_is_written():
    parser = pytest.importorskip("prometheus_client.parser")
    run = by_hand()
    families = {f.name: f for f in parser.text_string_to_metric_families(run.prometheus())}
    ttft = {(s.name, s.labels.get("le")): s.value for s in families["kvlab_time_to_first_token_seconds"].samples}
    assert families["kvlab_time_to_first_token_seconds"].type == "histogram"
    assert ttft["kvlab_time_to_first_token_seconds_bucket", "2.5"] == 1
    assert ttft["kvlab_time_to_first_token_seconds_bucket", "+Inf"] == 2
    assert ttft["kvlab_time_to_first_token_seconds_count", None] == 2
    assert ttft["kvlab_time_to_first_token_seconds_sum", None] == pytest.approx(5.5)
    counts = {s.labels["finished_reason"]: s.value for s in families["kvlab_requests"].samples}
    assert counts == {"length": 2}
    kinds = {s.labels["kind"]: s.value for s in families["kvlab_step_seconds"].samples}
    assert kinds == pytest.approx(run.time_by_kind())
    assert families["kvlab_generation_tokens"].samples[0].value == 4
    assert all("(simulated)" in f.documentation for f in families.values())
    empty = list(parser.text_string_to_metric_families(Metrics().prometheus()))
    assert len(empty) == len(families)


def test_the_trace_tells_every_step_and_life():
    run = by_hand()
    events = json.loads(run.chrome_trace())["traceEvents"]
    steps = [e for e in events if e["ph"] == "X" and e["pid"] == 0]
    assert [e["name"] for e in steps] == ["prefill", "prefill", "mixed", "decode"]
    assert sum(e["dur"] for e in steps) == pytest.approx(5.6e6)
    lives = {(e["tid"], e["name"]): e["dur"] for e in events if e["ph"] == "X" and e["pid"] == 1}
    assert lives == pytest.approx(
        {(0, "prefill"): 3e6, (0, "decode"): 2.6e6, (1, "queued"): 1e6, (1, "prefill"): 1.5e6}
    )


def test_metrics_refuse_what_is_no_figure():
    run = by_hand()
    with pytest.raises(ValueError, match="name is 'speed'"):
        run.values("speed")
    with pytest.raises(ValueError, match="q is 101"):
        run.percentile("ttft", 101)
    with pytest.raises(ValueError, match="ttft is 0"):
        run.goodput(ttft=0)
    with pytest.raises(ValueError, match="request 5 is new"):
        run.finish(asks(5, 3))
    nothing = Metrics()
    assert math.isnan(nothing.percentile("itl", 50))
    assert nothing.summary()["requests"] == 0
    assert nothing.goodput(ttft=1.0) == 0.0
    no_answer = simulate(Scheduler(books(40)), [asks(0, 4, 0), asks(1, 4, 1)], Constant())
    assert len(no_answer.served) == 2
    assert no_answer.goodput(ttft=9.0) == pytest.approx(1 / no_answer.seconds)


# --- step times and simulation ---------------------------------------------------------------------------------------


def test_roofline_cost_is_the_cost_of_the_pass():
    rng = random.Random(0)
    for name in ("llama-3-8b", "qwen3-0.6b", "stdlib-7m"):
        model, hardware = config.get(name), costs.HARDWARE["h200"]
        cost = RooflineCost(model, hardware, overhead=0.001)
        for _ in range(30):
            decodes = [rng.randint(2, 9000) for _ in range(rng.randint(0, 40))]
            chunks = [
                (q := rng.randint(1, 3000), q + rng.randint(0, 9000))
                for _ in range(rng.randint(0 if decodes else 1, 3))
            ]
            shape = StepShape.build(decodes, chunks)
            work = costs.forward(
                model, [*[1] * len(decodes), *[q for q, _ in chunks]], [*decodes, *[kv for _, kv in chunks]]
            )
            assert cost.work(shape) == pytest.approx((work.bytes, work.flops), rel=1e-12)
            assert cost.floor(shape) == pytest.approx(costs.roofline_time(work, hardware), rel=1e-12)
            over = (cost.seconds(shape) - 0.001) / cost.floor(shape)
            assert 1 - 1e-12 <= over <= 2 + 1e-12
            assert all(0 <= u <= 1 for u in cost.utilisation(shape))
    with pytest.raises(ValueError, match="deepseek-v3, which has experts"):
        RooflineCost(config.get("deepseek-v3"), costs.HARDWARE["h200"])
    with pytest.raises(ValueError, match="overhead is -1"):
        RooflineCost(config.get("llama-3-8b"), costs.HARDWARE["h200"], overhead=-1)


def random_shapes(rng, count):
    for _ in range(count):
        decodes = [rng.randint(2, 20000) for _ in range(rng.choice([0, 1, 8, 32, 128]))]
        chunks = [(q := rng.choice([1, 64, 200, 512, 2048, 8192]), q + rng.randint(0, 16384))]
        yield StepShape.build(decodes, chunks if not decodes or rng.random() < 0.7 else [])


def test_a_fit_finds_what_made_the_times():
    rng = random.Random(1)
    truth = (4e-3, 1e-6, 0, 0, 0, 0, 2e-5, 0, 5e-6, 3e-8, 1e-8, 0, 2e-8, 1e-9)
    model = scheduler.FittedCost(truth)
    shapes = list(random_shapes(rng, 200))
    found = fit(shapes, [model.seconds(s) for s in shapes])
    assert found.worst < 1e-6
    assert found.coefficients == pytest.approx(truth, rel=1e-3, abs=1e-12)
    noisy = fit(shapes, [model.seconds(s) * rng.uniform(0.95, 1.05) for s in shapes])
    assert all(c >= 0 for c in noisy.coefficients)
    assert 0.01 < noisy.typical < 0.05
    assert noisy.worst < 0.1
    assert noisy.residuals[0] == pytest.approx(noisy.seconds(shapes[0]) / model.seconds(shapes[0]) - 1, abs=0.06)


def test_a_fit_of_the_roofline_is_close():
    """The roofline of the weights bends where its two lines cross; slopes that rise at fixed counts follow it."""
    rng = random.Random(2)
    roofline = RooflineCost(config.get("llama-3-8b"), costs.HARDWARE["h200"])
    shapes = list(random_shapes(rng, 300))
    found = fit(shapes[:200], [roofline.seconds(s) for s in shapes[:200]])
    errors = [abs(found.seconds(s) / roofline.seconds(s) - 1) for s in shapes[200:]]
    assert np.median(errors) < 0.05


def test_a_fit_refuses():
    shape = StepShape.build([5])
    for shapes, seconds, match in (
        ([], [], "shapes has 0"),
        ([shape], [1.0, 2.0], "seconds 2"),
        ([shape], [0.0], "holds 0.0"),
    ):
        with pytest.raises(ValueError, match=match):
            fit(shapes, seconds)
    with pytest.raises(ValueError, match="records hold a shape without decode_kv"):
        scheduler.fit_records([{"shape": {"decodes": 1}, "ms": 1.0}])
    row = {"shape": {n: getattr(shape, n) for n in StepShape.__dataclass_fields__}, "ms": 5.0}
    assert scheduler.fit_records([row]).seconds(shape) == pytest.approx(0.005)


def test_a_simulation_is_the_scheduler_itself(model):
    """The same steps as the model's own loop, when both clocks stand still."""
    cache = pages(12)
    real, made = Metrics(), Scheduler(cache.manager, "chunked", 16, 4, 5, watermark=0)
    served(model, cache, made, metrics=real)
    again = Scheduler(books(12), "chunked", 16, 4, 5, watermark=0)
    run = simulate(again, [asks(i, len(PROMPTS[i]), ANSWERS[i]) for i in range(6)], Constant())
    for column in ("decodes", "chunks", "chunk_tokens", "running", "kv_use", "preempted"):
        assert real.steps[column].tolist() == run.steps[column].tolist()
    assert run.simulated
    assert not real.simulated


def test_a_simulation_waits_for_arrivals():
    run = simulate(Scheduler(books(100)), [asks(0, 4, 1), asks(1, 4, 1, arrival=50.0)], Constant())
    assert run.steps["start"].tolist() == [0.0, 50.0]
    assert run.percentile("ttft", 100) == pytest.approx(1.4)
    assert len(simulate(Scheduler(books(2)), [asks(0, 40)], Constant()).served) == 1


def test_a_simulation_refuses():
    with pytest.raises(ValueError, match=r"an arrival at 1\.0 after 2\.0"):
        simulate(Scheduler(books(100)), [asks(0, 4, arrival=2.0), asks(1, 4, arrival=1.0)], Constant())
    with pytest.raises(ValueError, match="request 0 has stop tokens"):
        simulate(Scheduler(books(100)), [Request(0, [1], SamplingParams(stop_token_ids=(3,)))], Constant())
    free = scheduler.FittedCost((0.0,) * len(scheduler.FittedCost.TERMS))
    with pytest.raises(ValueError, match="cost_model gives 0"):
        simulate(Scheduler(books(100)), [asks(0, 4)], free)
    for workload, match in (([3], "workload: a request is 3"), (None, "workload is None"), ("ab", "workload is 'ab'")):
        with pytest.raises(ValueError, match=match):
            simulate(Scheduler(books(100)), workload, Constant())
    with pytest.raises(ValueError, match="scheduler is None"):
        simulate(None, [], Constant())
    with pytest.raises(ValueError, match="cost_model is 3"):
        simulate(Scheduler(books(100)), [], 3)


def test_places_tell_who_was_at_work_when():
    """Two places. Steps of 1.4, 1.1 and 1.4 s: A's prompt; A decodes, its last; C, who came last, has A's place."""
    watch = scheduler.Places(2)
    made = Scheduler(books(100), "continuous", 8, 1)
    run = simulate(made, [asks(0, 4, 2), asks(1, 4, 1)], Constant(), watch)
    assert list(watch.lanes) == ["0", "1"]
    assert watch.lanes["0"] == [(0.0, 1.4, "a prompt"), (1.4, 2.5, "decodes"), (2.5, 3.9, "a prompt")]
    assert watch.lanes["1"] == []
    assert [end for _, end, _ in watch.steps] == run.steps["end"].tolist()
    assert watch.at_work() == pytest.approx(0.5)
    assert watch.at_work(1.0) == pytest.approx(0.5)
    assert scheduler.Places(3).at_work() == 0.0
    three = held(Scheduler(books(100)), asks(0, 4), asks(1, 4))
    with pytest.raises(ValueError, match="step has 2 newcomers; 1 of the 1 places"):
        simulate(three, [], Constant(), scheduler.Places(1))
    three.audit()
    assert three.num_waiting == 2
    again = Scheduler(books(100), "continuous", 8, 1)
    with pytest.raises(ValueError, match=r"start is 0\.0; the last step ended at"):
        simulate(again, [asks(0, 4, 2)], Constant(), watch)
    with pytest.raises(ValueError, match="step is 3"):
        watch(3, 9.0, 10.0)
    with pytest.raises(ValueError, match="count is 0"):
        scheduler.Places(0)
    with pytest.raises(ValueError, match="until is nan"):
        watch.at_work(math.nan)
    with pytest.raises(ValueError, match="watch is 3"):
        simulate(three, [], Constant(), 3)


def test_a_workload_is_judged_before_anything_is_served():
    spent = asks(5, 3)
    simulate(Scheduler(books(100)), [spent], Constant())
    for last, match in ((asks(0, 4, arrival=3.0), "request_id 0 twice"), (spent, "a request is finished")):
        made, first = Scheduler(books(100)), asks(0, 4)
        with pytest.raises(ValueError, match=match):
            simulate(made, [first, last], Constant())
        assert (first.state, made.requests) == ("new", {})


@pytest.mark.parametrize("took", [math.inf, math.nan, -1.0, "long", None])
def test_a_step_whose_time_is_none_is_undone(took):
    class Odd(Constant):
        def seconds(self, shape):
            return took if shape.decodes else 1.0

    made, request = Scheduler(books(100)), asks(0, 4, 3)
    with pytest.raises(ValueError, match="cost_model's time of a step is"):
        simulate(made, [request], Odd())
    made.audit()
    assert (request.state, request.num_new_tokens) == ("waiting", 1)
    play(made)
    assert request.num_new_tokens == 3


def test_a_simulation_that_runs_out_of_time_undoes_its_step():
    class Endless(Constant):
        def seconds(self, shape):
            return 1e308

    made, request = Scheduler(books(100)), asks(0, 4, 3)
    with pytest.raises(ValueError, match="end of a step is inf"):
        simulate(made, [request], Endless())
    assert made.in_flight is None
    made.audit()


# --- one launch for all ----------------------------------------------------------------------------------------------


@needs_triton
def test_a_mixed_launch_is_each_alone():
    """Chunk rows and decode rows in one launch equal the oracle, and what each gives by itself."""
    case = testing.AttentionCase("mixed", (1, 48, 1, 20), (70, 48, 9, 100), num_heads=4, num_kv_heads=1, head_dim=32)
    inputs = case.build(device=runtime.device())
    together = inputs.call(flash_decoding.attention, impl="triton")
    testing.assert_close(together, inputs.oracle()[0], inputs.plain()[0])
    for b, (start, stop) in enumerate(itertools.pairwise(inputs.cu_seqlens_q.tolist())):
        alone = inputs.alone(b).call(flash_decoding.attention, impl="triton")
        torch.testing.assert_close(alone, together[start:stop])
