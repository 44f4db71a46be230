"""The generation loop: with a cache it says what it says without one, and it leaves the cache as it found it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvlab import checkpoint, zoo
from kvlab.batch import Batch
from kvlab.cache import CacheFull, NoCache
from kvlab.config import ModelConfig
from kvlab.generate import Generation, beam_search, check_prompt, generate, step, stream
from kvlab.model import Decoder
from kvlab.naive import NaiveCache
from kvlab.paged import PagedCache
from kvlab.sampling import SamplingParams

CONFIG = ModelConfig("tiny", 3, 32, 4, 2, 16, 48, 101, 40, tie_embeddings=True)


def make_model(config: ModelConfig = CONFIG, seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(config)
    for parameter in model.parameters():
        parameter.data.mul_(8)  # small random weights would repeat one token for ever
    return model.eval()


@pytest.fixture(scope="module")
def model() -> Decoder:
    return make_model()


def make_cache(rows: int = 4, length: int = 40, config: ModelConfig = CONFIG) -> NaiveCache:
    return NaiveCache(config, rows, length)


def empty(cache: NaiveCache) -> bool:
    return not cache._rows and not cache._lengths and len(cache._free_rows) == cache.max_num_seqs


PROMPTS = [[1, 2, 3], [50], list(range(30)), [99, 98, 97, 96, 95, 94]]
SAMPLERS = [
    SamplingParams(max_tokens=9),
    SamplingParams(temperature=1.0, seed=3, max_tokens=9),
    SamplingParams(temperature=1.5, top_k=20, top_p=0.9, seed=-1, max_tokens=9),
    SamplingParams(temperature=0.7, min_p=0.1, seed=2**63, max_tokens=9),
]


@pytest.mark.parametrize("params", SAMPLERS, ids=["greedy", "plain", "truncated", "min-p"])
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_cached_and_recomputed_agree_token_for_token(model, prompt, params):
    cache = make_cache()
    recomputed = list(stream(model, NoCache(CONFIG), prompt, params))
    assert list(stream(model, cache, prompt, params)) == recomputed
    assert len(recomputed) == 9
    assert empty(cache)


@pytest.mark.parametrize("name", ["window", "qk norm", "bias", "llama3 rope", "one KV head"])
def test_every_shape_of_model_agrees_with_its_recomputation(name):
    from kvlab.config import RopeConfig

    options = {
        "window": {"sliding_window": 4},
        "qk norm": {"qk_norm": True},
        "bias": {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
        "llama3 rope": {"rope": RopeConfig(5e5, "llama3", 8.0, 16)},
        "one KV head": {"num_kv_heads": 1},
    }[name]
    config = ModelConfig(**{**{field: getattr(CONFIG, field) for field in CONFIG.__dataclass_fields__}, **options})
    small, params = make_model(config, seed=1), SamplingParams(temperature=1.0, seed=5, max_tokens=24)
    cached = list(stream(small, make_cache(config=config), [5, 4, 3], params))
    assert cached == list(stream(small, NoCache(config), [5, 4, 3], params))
    assert len(set(cached)) > 4


def test_the_texts_are_not_trivial(model):
    greedy = list(stream(model, make_cache(), [1, 2, 3], SamplingParams(max_tokens=12)))
    sampled = list(stream(model, make_cache(), [1, 2, 3], SamplingParams(temperature=1.0, max_tokens=12)))
    assert greedy != sampled
    assert len(set(sampled)) > 4
    assert list(stream(model, make_cache(), [1, 2, 4], SamplingParams(temperature=1.0, max_tokens=12))) != sampled


def test_a_batch_gives_each_request_what_it_gets_alone(model):
    params = [
        SamplingParams(p.temperature, p.top_k, p.top_p, p.min_p, p.seed, 3 + 2 * i) for i, p in enumerate(SAMPLERS)
    ]
    cache = make_cache()
    together = generate(model, cache, PROMPTS, params)
    assert empty(cache)
    for prompt, p, result in zip(PROMPTS, params, together, strict=True):
        assert result.prompt == prompt
        assert result.tokens == list(stream(model, make_cache(), prompt, p))
        assert result.finish_reason == "length"
    assert [r.tokens for r in together] == [r.tokens for r in generate(model, NoCache(CONFIG), PROMPTS, params)]
    assert [r.tokens for r in generate(model, cache, PROMPTS[::-1], params[::-1])] == [r.tokens for r in together[::-1]]


def test_nothing_to_do(model, monkeypatch):
    monkeypatch.setattr(Decoder, "forward", lambda *a: pytest.fail("something was computed"))
    cache = make_cache()
    none = SamplingParams(max_tokens=0)
    assert list(stream(model, cache, [1, 2], none)) == []
    assert generate(model, cache, [[1], [2, 3]], none) == [
        Generation([1], [], "length"),
        Generation([2, 3], [], "length"),
    ]
    assert generate(model, cache, []) == []
    assert empty(cache)


def test_max_tokens_may_differ_and_be_zero_in_a_batch(model):
    params = [SamplingParams(max_tokens=0), SamplingParams(max_tokens=1), SamplingParams(max_tokens=4)]
    assert [len(r.tokens) for r in generate(model, make_cache(), PROMPTS[:3], params)] == [0, 1, 4]


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        ([], "empty"),
        ([1] * 40, "40 tokens"),
        ([1] * 41, "41 tokens"),
        ([1, 101], r"\[1\] is 101"),
        ([-1, 1], r"\[0\] is -1"),
        ([1, 2.0], r"\[1\] is 2.0"),
        ([True], r"\[0\] is True"),
        (["a"], r"\[0\] is 'a'"),
        (5, r"is 5; it must be a list"),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_runs(model, monkeypatch, prompt, match):
    monkeypatch.setattr(Decoder, "forward", lambda *a: pytest.fail("something was computed"))
    cache = make_cache()
    with pytest.raises(ValueError, match=match):
        stream(model, cache, prompt)  # at the call itself, not at the first token
    with pytest.raises(ValueError, match=r"prompts\[1\]"):
        generate(model, cache, [[1], prompt])
    with pytest.raises(ValueError, match="the text"):
        check_prompt(model, prompt, "the text")
    assert empty(cache)


def test_wrong_arguments_are_refused(model):
    cache = make_cache()
    with pytest.raises(ValueError, match="params has 1"):
        generate(model, cache, [[1], [2]], [SamplingParams()])
    tokens = stream(model, cache, [1], SamplingParams(max_tokens=3))
    next(tokens)
    with pytest.raises(ValueError, match="seq_id 0 is already"):
        stream(model, cache, [1])
    with pytest.raises(ValueError, match="id 0 is already"):
        generate(model, cache, [[1]])
    assert len(list(stream(model, cache, [1], SamplingParams(max_tokens=3), seq_id=1))) == 3
    assert len(list(tokens)) == 2


def test_a_stop_token_ends_the_text_and_is_its_last(model):
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=20)
    full = list(stream(model, make_cache(), [1, 2, 3], params))
    stop = full[5]
    first = full.index(stop)
    stopping = SamplingParams(temperature=1.0, seed=4, max_tokens=20, stop_token_ids=[stop, 100_000])
    assert list(stream(model, make_cache(), [1, 2, 3], stopping)) == full[: first + 1]
    cache = make_cache()
    other, stopped = generate(model, cache, [[7, 7], [1, 2, 3]], [params, stopping])
    assert (stopped.tokens, stopped.finish_reason) == (full[: first + 1], "stop")
    assert (len(other.tokens), other.finish_reason) == (20, "length")
    assert list(stream(model, cache, [stop], stopping))  # one in the prompt stops nothing
    assert empty(cache)


def test_a_stop_token_that_is_also_the_last_allowed_counts_as_stop(model):
    params = SamplingParams(max_tokens=1)
    (token,) = stream(model, make_cache(), [1, 2, 3], params)
    (result,) = generate(model, make_cache(), [[1, 2, 3]], SamplingParams(max_tokens=1, stop_token_ids=(token,)))
    assert result.finish_reason == "stop"


def test_the_context_ends_the_text(model):
    (result,) = generate(model, make_cache(), [[1] * 37], SamplingParams(max_tokens=50))
    assert (len(result.prompt) + len(result.tokens), result.finish_reason) == (40, "length")
    (result,) = generate(model, make_cache(), [[1] * 39], SamplingParams(max_tokens=50))
    assert len(result.tokens) == 1
    assert result.tokens == list(stream(model, NoCache(CONFIG), [1] * 39, SamplingParams(max_tokens=50)))


def test_a_stream_frees_its_sequence_however_it_ends(model):
    cache = make_cache()
    tokens = stream(model, cache, [1, 2, 3], seq_id=9)
    assert empty(cache)  # nothing is taken before the first token
    next(tokens)
    assert cache.length(9) == 3
    next(tokens)
    assert cache.length(9) == 4  # one token a step, the newest not yet stored
    tokens.close()
    assert empty(cache)
    for token in stream(model, cache, [1, 2, 3]):
        assert 0 <= token < CONFIG.vocab_size
        break
    assert empty(cache)
    tokens = stream(model, cache, [1, 2, 3])
    next(tokens)
    with pytest.raises(RuntimeError, match="reader"):
        tokens.throw(RuntimeError("reader"))
    assert empty(cache)


class Failing:
    """A model that answers as another does until its ``at``-th pass, then breaks as told."""

    def __init__(self, model: Decoder, at: int, how) -> None:
        self.model, self.at, self.how, self.passes = model, at, how, 0
        self.config, self.device = model.config, model.device

    def __call__(self, batch, cache):
        self.passes += 1
        logits = self.model(batch, cache)
        return self.how(logits) if self.passes == self.at else logits


def nan_in_last(logits: torch.Tensor) -> torch.Tensor:
    logits = logits.clone()
    logits[-1, 17] = float("nan")
    return logits


def explode(logits: torch.Tensor) -> torch.Tensor:
    raise KeyboardInterrupt


@pytest.mark.parametrize("params", SAMPLERS[:2], ids=["greedy", "sampled"])
def test_nan_logits_name_sequence_and_position_and_leave_a_clean_cache(model, params):
    cache = make_cache()
    tokens = stream(Failing(model, 3, nan_in_last), cache, [1, 2, 3], params, seq_id=6)
    assert next(tokens) >= 0
    assert next(tokens) >= 0
    with pytest.raises(ValueError, match=r"sequence 6, position 5.*nan"):
        next(tokens)
    assert empty(cache)
    with pytest.raises(ValueError, match="sequence 1, position 7"):
        generate(Failing(model, 2, nan_in_last), cache, [[1, 2, 3], [5] * 6], params)
    assert empty(cache)
    assert list(stream(model, cache, [1], params)) == list(stream(model, make_cache(), [1], params))


def test_nan_weights_are_reported_at_the_first_token():
    broken = make_model()
    broken.layers[1].mlp.down_proj.weight.data[3, 3] = float("nan")
    cache = make_cache()
    with pytest.raises(ValueError, match="sequence 0, position 3"):
        generate(broken, cache, [[1, 2, 3]])
    assert empty(cache)


def test_an_interrupt_leaves_a_clean_cache(model):
    cache = make_cache()
    with pytest.raises(KeyboardInterrupt):
        generate(Failing(model, 2, explode), cache, [[1, 2, 3], [4]])
    assert empty(cache)


def test_too_many_prompts_for_the_cache(model):
    cache = make_cache(rows=2)
    with pytest.raises(CacheFull, match="needs 3 rows and has 2 free"):
        generate(model, cache, [[1], [2], [3]])
    assert empty(cache)


def test_a_step_that_fails_changes_no_request(model):
    cache = make_cache()
    requests = {0: Generation([1, 2], []), 4: Generation([3], [])}
    params = dict.fromkeys(requests, SamplingParams())
    step(model, cache, requests, params)
    with pytest.raises(ValueError, match="sequence 4"):
        step(Failing(model, 1, nan_in_last), cache, requests, params)
    assert [len(r.tokens) for r in requests.values()] == [1, 1]


def test_the_progress_bar_shows_on_request_only(model, capfd):
    generate(model, make_cache(), [[1]], SamplingParams(max_tokens=3))
    assert capfd.readouterr().err == ""
    generate(model, make_cache(), [[1]], SamplingParams(max_tokens=3), progress=True)
    assert "0/3" in capfd.readouterr().err


# --- ids, rows and failures --------------------------------------------------------------------------------------


def test_two_streams_on_one_id(model):
    cache, params = make_cache(), SamplingParams(max_tokens=5)
    alone = list(stream(model, make_cache(), [1, 2, 3], params))
    first, second = stream(model, cache, [1, 2, 3], params), stream(model, cache, [9, 8], params)
    tokens = [next(first)]
    with pytest.raises(ValueError, match="seq_id 0 is already"):
        next(second)
    assert cache.length(0) == 3  # the second has freed nothing
    assert tokens + list(first) == alone
    assert empty(cache)


@pytest.mark.parametrize("seq_id", [None, "a", 1.5, True])
def test_an_id_is_an_integer(model, seq_id):
    with pytest.raises(ValueError, match="seq_id is"):
        stream(model, make_cache(), [1, 2, 3], seq_id=seq_id)
    with pytest.raises(ValueError, match="key of requests is"):
        step(model, make_cache(), {seq_id: Generation([1], [])}, {seq_id: SamplingParams()})


def test_an_empty_sequence_of_another_is_left_alone(model):
    cache = make_cache()
    cache.prepare(Batch.build([0], [[]], [0]))
    for call in (lambda: stream(model, cache, [1]), lambda: generate(model, cache, [[1]])):
        with pytest.raises(ValueError, match="seq_id 0 is already in the cache with 0 tokens"):
            call()
    assert 0 in cache


@pytest.mark.parametrize("params", [5, "a", [SamplingParams()], 0, []])
def test_params_of_another_type_are_refused_at_the_call(model, params):
    with pytest.raises(ValueError, match="params"):
        stream(model, make_cache(), [1], params)
    with pytest.raises(ValueError, match="params"):
        generate(model, make_cache(), [[1], [2]], params)


def test_prompts_of_other_kinds_of_integers(model):
    ours = list(stream(model, make_cache(), [1, 2], SamplingParams(max_tokens=3)))
    for prompt in (np.array([1, 2], dtype=np.int32), torch.tensor([1, 2]), (1, 2)):
        assert check_prompt(model, prompt) == [1, 2]
        assert list(stream(model, make_cache(), prompt, SamplingParams(max_tokens=3))) == ours
    with pytest.raises(ValueError, match=r"prompts\[0\] is 1"):
        generate(model, make_cache(), [1, 2])


@pytest.mark.parametrize("length", [3, 8])
def test_the_end_of_a_row_ends_the_text(model, length):
    prompts, params, roomy = [[1, 2, 3], [5]], SamplingParams(max_tokens=20), make_cache()
    cache = make_cache(rows=2, length=length)
    for made, prompt in zip(generate(model, cache, prompts, params), prompts, strict=True):
        assert (len(made.prompt) + len(made.tokens), made.finish_reason) == (length + 1, "length")
        assert made.tokens == list(stream(model, roomy, prompt, params))[: len(made.tokens)]
        assert made.tokens == list(stream(model, cache, prompt, params))
    assert empty(cache)


def test_a_prompt_longer_than_a_row_is_refused_at_the_call(model):
    cache = make_cache(rows=2, length=4)
    with pytest.raises(ValueError, match=r"prompt has 5 tokens.*4 at most \(max_seq_len\)"):
        stream(model, cache, [1] * 5)
    with pytest.raises(ValueError, match=r"prompts\[1\] has 5 tokens"):
        generate(model, cache, [[1], [1] * 5])
    assert empty(cache)


@pytest.mark.parametrize(
    ("second", "params", "named"),
    [
        (Generation([3], []), {0: SamplingParams()}, r"params\[4\] is None"),
        (Generation([3], []), {0: SamplingParams(), 4: 5}, r"params\[4\] is 5"),
        (Generation([], []), dict.fromkeys((0, 4), SamplingParams()), "request 4 has 0 tokens"),
        (Generation([9, 9], []), dict.fromkeys((0, 4), SamplingParams()), "request 4 has 2 tokens and 2 are cached"),
    ],
)
def test_a_step_that_cannot_be_done_changes_nothing(model, second, params, named):
    cache = make_cache()
    if len(second.prompt) == 2:
        step(model, cache, {4: Generation([9, 9], [])}, {4: SamplingParams()})
    lengths = dict(cache._lengths)
    requests = {0: Generation([1, 2], []), 4: second}
    with pytest.raises(ValueError, match=named):
        step(model, cache, requests, params)
    assert requests[0].tokens == requests[4].tokens == []
    assert cache._lengths == lengths


def test_a_step_can_be_tried_again_after_the_sampler_failed(model):
    cache, fresh = make_cache(), make_cache()
    requests, others = ({0: Generation([1, 2], []), 4: Generation([3], [])} for _ in range(2))
    params = dict.fromkeys(requests, SamplingParams())
    for at in range(3):  # in the first step the sequences are new, later they are kept
        lengths = dict(cache._lengths)
        with pytest.raises(ValueError, match="sequence 4"):
            step(Failing(model, 1, nan_in_last), cache, requests, params)
        assert cache._lengths == lengths
        assert step(model, cache, requests, params) == step(model, fresh, others, params)
        assert len(requests[0].tokens) == at + 1


# --- beam search -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shipped():
    return zoo.load("stdlib-1m", device="cpu", dtype=torch.float32), zoo.tokenizer().encode(
        "def heappush(heap, item):\n    "
    ).ids


@pytest.fixture(scope="module")
def hf_copy(shipped, tmp_path_factory):
    """transformers' own model with the shipped weights."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("hf")
    checkpoint.save(shipped[0], folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def paged_cache(model):
    return PagedCache(model.config, 64, 4)


@pytest.mark.parametrize("width", [2, 3, 5, 8])
@pytest.mark.parametrize(
    ("stops", "penalty", "early"),
    [("", 1.0, False), ("common", 1.0, False), ("common", 0.0, "never"), ("common", 2.0, "never"),
     ("common", 1.0, True), ("three", 1.0, False), ("three", 0.5, True)],
    ids=str,
)  # fmt: skip
def test_beam_search_is_that_of_transformers(shipped, hf_copy, width, stops, penalty, early):
    model, prompt = shipped
    newline = zoo.tokenizer().encode("\n").ids[0]
    ends = {"common": [newline], "three": [newline, *zoo.tokenizer().encode("(.").ids[:2]]}.get(stops, [])
    found = beam_search(
        model, paged_cache(model), prompt, width, max_tokens=12, stop_token_ids=ends, length_penalty=penalty,
        early_stopping=early,
    )  # fmt: skip
    ids = torch.tensor([prompt])
    theirs = hf_copy.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=width, num_return_sequences=width, max_new_tokens=12,
        do_sample=False, length_penalty=penalty, early_stopping=early, eos_token_id=ends or None, pad_token_id=1,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    rows = [row[len(prompt) :].tolist() for row in theirs.sequences]
    for hypothesis, row in zip(found, rows, strict=True):
        assert hypothesis.tokens == row[: len(hypothesis.tokens)]
        assert set(row[len(hypothesis.tokens) :]) <= {1}  # padding
        assert hypothesis.finish_reason == ("stop" if hypothesis.tokens[-1] in ends else "length")
    if width > 1:
        torch.testing.assert_close(
            torch.tensor([h.score for h in found]), theirs.sequences_scores, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_beams_that_share_equal_beams_that_copy(shipped, groups):
    model, prompt = shipped
    options = {"max_tokens": 16, "num_groups": groups, "diversity_penalty": 0.7 * (groups > 1)}
    pages = paged_cache(model)
    found = beam_search(model, pages, prompt, 4, **options)
    assert found == beam_search(model, NaiveCache(model.config, 7, 64), prompt, 4, **options)
    again = beam_search(model, NoCache(model.config), prompt, 4, **options)
    assert [h.tokens for h in found] == [h.tokens for h in again]
    assert (pages.manager.pool.num_free, pages.manager.seq_ids) == (64, [])
    pages.manager.audit()
    if groups > 1:
        assert len({h.tokens[0] for h in found}) > 1  # a group avoids what an earlier one has just chosen


def test_beams_share_their_blocks(shipped, monkeypatch):
    model, prompt = shipped
    pages, seen = paged_cache(model), []
    prepare = pages.prepare

    def watched(batch):
        prepare(batch)
        pages.manager.audit()
        alone = sum(-(-pages.length(s) // 4) for s in pages.manager.seq_ids)
        seen.append((len(pages.manager.seq_ids), 64 - pages.manager.pool.num_free, alone))

    monkeypatch.setattr(pages, "prepare", watched)
    beam_search(model, pages, prompt * 3, 4, max_tokens=10)
    assert seen[0][0] == 1
    assert {beams for beams, _, _ in seen[1:]} == {4}
    assert all(used < alone for _, used, alone in seen[1:])


@pytest.mark.parametrize(
    "bad",
    [{"beam_width": 0}, {"beam_width": 2.0}, {"max_tokens": 0}, {"num_groups": 3}, {"num_groups": 0}, {"prompt": []},
     {"diversity_penalty": -1.0}, {"diversity_penalty": float("nan")}, {"early_stopping": "sometimes"},
     {"early_stopping": 1}, {"stop_token_ids": "ab"}, {"length_penalty": float("nan")}, {"length_penalty": 1e6},
     {"length_penalty": None}, {"diversity_penalty": float("inf")}],
    ids=str,
)  # fmt: skip
def test_beam_search_refuses(shipped, bad):
    model, prompt = shipped
    with pytest.raises(ValueError):
        beam_search(**{"model": model, "cache": NoCache(model.config), "prompt": prompt, "beam_width": 4, **bad})


def test_a_beam_search_that_runs_out_of_blocks_leaves_nothing_behind(shipped):
    model, prompt = shipped
    pages = PagedCache(model.config, 6, 4)
    pages.prepare(Batch.build([0], [[1, 2, 3]], [0]))
    with pytest.raises(CacheFull, match="blocks"):
        beam_search(model, pages, prompt, 4, max_tokens=40)
    assert (pages.manager.seq_ids, pages.length(0), pages.manager.pool.num_free) == ([0], 3, 5)
    pages.manager.audit()


def test_a_group_avoids_what_an_earlier_one_took_also_on_the_last_step(shipped):
    model, prompt = shipped
    found = beam_search(model, NoCache(model.config), prompt, 2, max_tokens=1, num_groups=2, diversity_penalty=100.0)
    assert found[0].tokens != found[1].tokens


def test_beams_end_where_the_row_ends(shipped):
    model, prompt = shipped
    row = len(prompt) + 4
    found = beam_search(model, NaiveCache(model.config, 3, row), prompt, 2, max_tokens=20)
    assert found == beam_search(model, paged_cache(model), prompt, 2, max_tokens=5)
    with pytest.raises(ValueError, match="max_seq_len"):
        beam_search(model, NaiveCache(model.config, 3, len(prompt) - 1), prompt, 2)


def test_beams_of_a_broken_model_are_refused(shipped):
    model, prompt = shipped
    broken = Decoder(model.config)
    broken.norm.weight.data.fill_(float("nan"))
    pages = paged_cache(broken)
    with pytest.raises(ValueError, match="not finite"):
        beam_search(broken, pages, prompt, 2)
    assert pages.manager.seq_ids == []


def test_beam_search_of_the_larger_model_is_that_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = zoo.load("stdlib-7m", device="cpu", dtype=torch.float32)
    prompt = zoo.tokenizer().encode("def heappop(heap):\n    ").ids
    checkpoint.save(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    rows = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=4, num_return_sequences=4, max_new_tokens=24,
        do_sample=False, eos_token_id=None, pad_token_id=1,
    )  # fmt: skip
    found = beam_search(model, paged_cache(model), prompt, 4, max_tokens=24)
    assert [h.tokens for h in found] == [row[len(prompt) :].tolist() for row in rows]
