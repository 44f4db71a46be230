"""The hostile table, the tolerance rule and the planted bugs: they pass what is right and catch what is wrong."""

from __future__ import annotations

import sys
import types
import warnings

import numpy as np
import pytest
import torch

from kvlab import reference, runtime, testing
from kvlab.naive import NaiveCache
from kvlab.sampling import SamplingParams
from kvlab.testing import ATTENTION, CACHES, HOSTILE, AttentionCase, assert_caught, assert_close, planted

CASES = testing.cases("cpu")


def plain_attention(*args, out=None, return_lse=False, **kwargs):
    """The reference in float32, as a function under test."""
    result, lse = reference.attention(*args, **kwargs, return_lse=True, dtype=torch.float32)
    result = result if out is None else out.copy_(result)
    return (result, lse) if return_lse else result


def named(text):
    """The cases whose name holds the text."""
    return [case for case in HOSTILE if text in case.name]


# --- the table -----------------------------------------------------------------------------------------------------


def test_the_table_has_what_the_design_asks_for():
    names = " | ".join(case.name for case in HOSTILE)
    for wanted in (
        "lengths 0 and 1", "page edge", "garbage past the end", "no multiple of any tile", "group 5", "group 7",
        "head size 80", "chunk that ends in mid-page", "found whole in the cache", "preempt and resume",
        "rewind over a page", "fork of a half-full block",
    ):  # fmt: skip
        assert wanted in names
    assert len({case.name for case in ATTENTION}) == len(ATTENTION)
    assert len({case.name for case in CACHES}) == len(CACHES)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_inputs_are_hostile_and_well_formed(case):
    inputs = case.build()
    size, used = case.block_size, set()
    for b, length in enumerate(case.kv_lens):
        count = -(-length // size)
        pages = inputs.block_table[b, :count].tolist()
        assert all(0 <= page < inputs.k_cache.shape[0] for page in pages)
        assert used.isdisjoint(pages)
        used |= set(pages)
        past_end = inputs.block_table[b, count:]
        assert past_end.numel() >= 2
        assert bool(((past_end < 0) | (past_end >= inputs.k_cache.shape[0])).all())
    held = (~inputs.k_cache.isnan()).all(-1).all(-1).sum()
    assert int(held) == sum(case.kv_lens), "every slot that holds no token is poisoned"
    again = case.build(fill=1e4)
    assert torch.equal(inputs.q, again.q)
    assert torch.equal(inputs.block_table, again.block_table)
    out, lse = inputs.oracle()
    assert out.dtype == torch.float64
    assert not bool(out.isnan().any())
    assert lse.shape == (case.num_heads, sum(case.q_lens))


def test_pages_are_neither_in_order_nor_consecutive():
    tables = [
        case.build().block_table[b, : -(-n // case.block_size)] for case in CASES for b, n in enumerate(case.kv_lens)
    ]
    long = [t.diff() for t in tables if len(t) > 3]
    assert long
    assert all(bool((d != 1).any()) and bool((d < 0).any()) for d in long)


def test_known_values():
    inputs = named("all scores -60000")[0].build()
    out, lse = inputs.oracle()
    scale = inputs.q.shape[2] ** -0.5
    assert float(lse[0, 0]) == pytest.approx(-6e4 + torch.log(torch.tensor(4.0)).item(), abs=0.01)
    assert float(inputs.q[0, 0].sum()) * scale == pytest.approx(-6e4, rel=1e-4)
    inputs = next(c for c in ATTENTION if c.name == "more queries than keys").build()
    out, lse = inputs.oracle()
    assert bool((out[:3] == 0).all())
    assert bool(lse[:, :3].isneginf().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_plain_attention_passes_all_of_it(dtype):
    for case in CASES:
        testing.check_attention(plain_attention, case, dtype=dtype, fills=(float("nan"),))


def test_a_strided_case_keeps_its_strides_on_any_device():
    (case,) = (case for case in ATTENTION if case.strided)
    for inputs in (case.build(), case.build(device="meta")):
        q, k = inputs.q, inputs.k_cache
        assert q.stride() == (2 * q.shape[1] * q.shape[2], q.shape[2], 1)
        assert k.stride()[2:] == (2 * k.shape[3], 1)
        assert not q.is_contiguous()


def test_a_case_that_needs_a_gpu_is_left_out_visibly():
    (far,) = (case for case in ATTENTION if case.needs_gpu)
    assert [case for case in ATTENTION if case not in CASES] == [far]
    with pytest.warns(UserWarning, match="2\\*\\*31: not run, it needs a GPU"):
        error = testing.check_attention(lambda *a, **k: pytest.fail("it ran"), far)
    assert error != error
    pool = far.build(device="meta", dtype=torch.float16).k_cache
    assert (pool.shape[0] - 1) * pool.stride(0) >= 2**31
    assert pool.stride()[1:] == (2 * 64, 64, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="memory that is never touched costs nothing on Linux")
def test_an_offset_that_wraps_at_32_bits_is_caught():
    class Anywhere(AttentionCase):
        needs_gpu = property(lambda self: False)

    def wrapped(pool):
        pages = [(page * pool.stride(0) + 2**31) % 2**32 - 2**31 for page in range(pool.shape[0])]
        page = pool.shape[1:], pool.stride()[1:]
        return torch.stack([pool.as_strided(*page, pool.storage_offset() + start) for start in pages])

    def wraps(q, k_cache, v_cache, **kwargs):
        return plain_attention(q, wrapped(k_cache), wrapped(v_cache), **kwargs)

    (case,) = (Anywhere(**vars(case)) for case in ATTENTION if case.far)
    assert_caught(
        lambda fn: testing.check_attention(fn, case, dtype=torch.float16), plain_attention, {"32-bit offset": wraps}
    )


def test_no_fills_check_nothing_and_are_refused():
    with pytest.raises(ValueError, match="fills is empty"):
        testing.check_attention(plain_attention, ATTENTION[3], fills=())


def test_what_unused_slots_hold_may_not_matter_in_one_bit():
    def leaks(q, k_cache, v_cache, *, out, return_lse, **kwargs):
        result, lse = plain_attention(q, k_cache, v_cache, out=out, return_lse=True, **kwargs)
        out += k_cache.nan_to_num().mean() * 1e-11
        return result, lse

    with pytest.raises(AssertionError, match=r"out changes when unused slots hold 10000"):
        testing.check_attention(leaks, ATTENTION[3])


@pytest.mark.parametrize(
    "name", ["q", "k_cache", "v_cache", "block_table", "cu_seqlens_q", "seqused_k", "sinks", "tree_mask"]
)
def test_inputs_may_not_be_written_to(name):
    def scribbles(q, k_cache, v_cache, **kwargs):
        result = plain_attention(q, k_cache, v_cache, **kwargs)
        {"q": q, "k_cache": k_cache, "v_cache": v_cache, **kwargs}[name].zero_()
        return result

    with pytest.raises(AssertionError, match=f"{name} was written to"):
        testing.check_attention(scribbles, named("tree, softcap and sinks")[0])


def test_a_float64_lse_and_a_q_taken_as_contiguous_are_caught():
    def double(*args, **kwargs):
        result, lse = plain_attention(*args, **kwargs)
        return result, lse.double()

    def contiguous(q, *args, **kwargs):
        heads, size = q.shape[1:]
        return plain_attention(q.as_strided(q.shape, (heads * size, size, 1)), *args, **kwargs)

    def check(fn):
        for case in CASES:
            testing.check_attention(fn, case, fills=(1e4,))

    assert_caught(check, plain_attention, {"float64 lse": double, "contiguous q": contiguous})


@pytest.mark.parametrize("case", CACHES, ids=lambda c: c.name)
def test_the_naive_cache_passes(case):
    testing.run_cache_case(NaiveCache, case)


def test_a_cache_in_bf16_passes():
    for case in named("fork"):
        testing.run_cache_case(NaiveCache, case, dtype=torch.bfloat16)


def test_an_unknown_step_is_an_error():
    with pytest.raises(ValueError, match="none that a case can have"):
        testing.run_cache_case(NaiveCache, testing.CacheCase("x", (("jump", 0),)))


# --- tolerance -----------------------------------------------------------------------------------------------------


def test_the_tolerance_follows_the_plain_run():
    oracle = torch.linspace(-1, 1, 100, dtype=torch.float64)
    rough, fine = oracle + 1e-2, oracle + 1e-9
    assert testing.tolerance(torch.bfloat16, oracle, rough) > 2e-2
    assert testing.tolerance(torch.float32, oracle, fine) < 1e-6
    assert_close(oracle.float() + 0.015, oracle, rough, torch.float32)
    with pytest.raises(AssertionError, match=r"out is off by 0.05 at \[\d+\]"):
        assert_close(oracle.float() + 0.05, oracle, rough, torch.float32)


def test_nan_infinity_shape_and_oracle():
    oracle = torch.tensor([0.0, float("-inf")], dtype=torch.float64)
    assert assert_close(torch.tensor([0.0, float("-inf")]), oracle, None) == 0
    for wrong, says in ((float("nan"), "NaN"), (-5e4, "must be -inf"), (float("inf"), "must be -inf")):
        with pytest.raises(AssertionError, match=says):
            assert_close(torch.tensor([0.0, wrong]), oracle, None)
    with pytest.raises(AssertionError, match="shape"):
        assert_close(torch.zeros(3), oracle, None)
    with pytest.raises(ValueError, match="float64"):
        assert_close(torch.zeros(2), oracle.float(), None)
    with pytest.raises(ValueError, match="oracle is NaN in 3 places"):
        assert_close(torch.zeros(3), torch.full((3,), float("nan"), dtype=torch.float64), None)
    with pytest.raises(ValueError, match="plain has shape"):
        assert_close(torch.zeros(2, 2), torch.zeros(2, 2).double(), torch.full((2,), 9.0))


# --- planted bugs --------------------------------------------------------------------------------------------------


def check_reference(module_attention):
    def attention(*args, out=None, return_lse=False, **kwargs):
        result, lse = module_attention(*args, **kwargs, return_lse=True, dtype=torch.float32)
        return out.copy_(result), lse

    for case in CASES:
        testing.check_attention(attention, case, fills=(float("nan"),))


VISIBLE = {
    "mask off by one": ("q_slot = past + torch", "q_slot = past + 1 + torch"),
    "aligned top-left": ("past = kv_len - q_len\n", "past = 0\n"),
    "window off by one": ("k_pos >= q_pos - left", "k_pos > q_pos - left"),
    "right window ignored": ("if right >= 0:", "if False:"),
    "right 0 taken as unlimited": ("if right >= 0:", "if right > 0:"),
    "right window ignored without a left one": ("if right >= 0:", "if left >= 0 and right >= 0:"),
    "tree keys by slot": ("k_pos = torch.cat([torch.arange(past, device=device), depth])[None, :]", "k_pos = k_slot"),
    "tree depth off by one": ("bits.sum(1) - 1", "bits.sum(1)"),
}
ATTEND_ONE = {
    "wrong head map": ("keys = k.to(work).repeat_interleave(group, dim=1)", "keys = k.to(work).repeat(1, group, 1)"),
    "mask lost": ('scores = scores.masked_fill(~seen, float("-inf"))', "scores = scores + 0.0"),
    "cap after the mask": ("if softcap:", "if False:"),
    "scale forgotten": ("@ keys.transpose(1, 2) * scale", "@ keys.transpose(1, 2)"),
    "sink scaled": ("sink = sinks.to(work)", "sink = scale * sinks.to(work)"),
    "sinks off with a tree": ("if sinks is not None:  #", "if sinks is not None and tree_mask is None:  #"),
    "sinks off when not causal": ("if sinks is not None:  #", "if sinks is not None and causal:  #"),
    "softcap off with a tree": ("if softcap:", "if softcap and tree_mask is None:"),
    "softcap off when not causal": ("if softcap:", "if softcap and causal:"),
    "window dropped by softcap": (
        "window_size=window_size, tree_mask",
        "window_size=(-1, -1) if softcap and sinks is None else window_size, tree_mask",
    ),
    "empty row NaN": (".masked_fill(~seen, 0.0)", ""),
}
PAGES = {
    "pages in reverse": ("keys = k_cache[blocks]", "keys = k_cache[blocks.flip(0)]"),
    "stale V": ("values = v_cache[blocks]", "values = v_cache[blocks.roll(1)]"),
    "one slot too many": ("values = v_cache[blocks].flatten(0, 1)[:kv_len]", "values = keys"),
}


@pytest.mark.parametrize(
    ("function", "bugs"),
    [(reference.visible_keys, VISIBLE), (reference.attend_one, ATTEND_ONE), (reference.attention, PAGES)],
    ids=["which keys", "one sequence", "pages"],
)
def test_bugs_in_attention_are_caught(function, bugs):
    assert_caught(check_reference, function, bugs, give="attention")


def check_cache(make_cache):
    for case in CACHES:
        try:
            testing.run_cache_case(make_cache, case)
        except (RuntimeError, ValueError, LookupError) as error:
            raise AssertionError(f"{case.name}: {error}") from error


CACHE_BUGS = {
    NaiveCache.attend: {
        "stale V": ("self.v[layer, row, past:end] = v[new]", "pass"),
        "V stored as K": ("self.v[layer, row, past:end] = v[new]", "self.v[layer, row, past:end] = k[new]"),
        "one layer for all": ("self.k[layer, row, past:end] = k[new]", "self.k[0, row, past:end] = k[new]"),
        "window ignored": ("window_size=self.config.window_size(layer)", "window_size=(-1, -1)"),
        "nothing read when nothing is stored": ("if seq_id is None or q_len == 0:", "if seq_id is None or k is None:"),
    },
    NaiveCache.fork: {
        "V not copied": ("self.v[:, target, :length] =", "_ ="),
        "row shared": ("= self._free_rows.pop(), length", "= source, length"),
        "any child": ('as_int(child, "fork: child")', "child"),
    },
    NaiveCache.truncate: {"does nothing": ("self._lengths[seq_id] = check", "_ = check")},
    NaiveCache.keep: {
        "base forgotten": ("[base + i for i in indices]", "[i for i in indices]"),
        "order ignored": ("[base + i for i in indices]", "[base + i for i in sorted(indices)]"),
    },
    NaiveCache.prepare: {
        "no check": ("if past != self.length(seq_id):", "if False:"),
        "duplicate ids": ("if len(set(ids)) != len(ids):", "if False:"),
        "rows handed out before it is full": (
            "if len(unseen) > len(self._free_rows):",
            "for s in unseen if len(unseen) > len(self._free_rows) else ():\n"
            "            if self._free_rows:\n"
            "                self._rows[s], self._lengths[s] = self._free_rows.pop(), 0\n"
            "        if len(unseen) > len(self._free_rows):",
        ),
    },
    NaiveCache.free: {
        "row lost": ("self._free_rows.append(self._rows.pop(seq_id))", "self._rows.pop(seq_id)"),
        "given back twice": (
            "        if seq_id in self._rows:\n",
            "        if seq_id not in self._rows and hasattr(self, 'last'):\n"
            "            self._free_rows.append(self.last)\n"
            "        if seq_id in self._rows:\n"
            "            self.last = self._rows[seq_id]\n",
        ),
    },
}


@pytest.mark.parametrize("method", CACHE_BUGS, ids=lambda m: m.__name__)
def test_bugs_in_a_cache_are_caught(method):
    assert_caught(check_cache, method, CACHE_BUGS[method])


def test_what_a_planted_bug_computes_gives_no_warning():
    """In the interpreter a stray read may meet any bits; a notebook must not print other lines for it in every run."""

    def check(fn):
        large = np.float32(np.finfo(np.float32).max)
        assert np.isfinite(fn() * large * np.zeros(1)), "not finite"

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_caught(check, lambda: 1, {"overflows, and is not a number": lambda: np.float32(np.inf)})
        with pytest.raises(RuntimeWarning):
            check(lambda: np.float32(np.inf))  # what the original computes still warns


def test_a_bug_that_no_check_notices_is_named():
    with pytest.raises(AssertionError, match="does not notice: harmless"):
        assert_caught(lambda fn: None, reference.visible_keys, {"harmless": ("k_slot = ", "k_slot  = ")})
    with pytest.raises(ValueError, match="bugs is empty"):
        assert_caught(lambda fn: None, reference.visible_keys, {})

    def fails(fn):
        raise AssertionError("the original is wrong")

    with pytest.raises(AssertionError, match="the original is wrong"):
        assert_caught(fails, reference.visible_keys, {"any": ("k_slot = ", "k_slot  = ")})


def test_a_substitution_must_stand_once_and_change_something():
    for replace, says in (
        (("no such text", "x"), "stands 0 times"),
        (("q_pos", "x"), r"stands \d+ times"),
        (("k_slot = ", "k_slot = "), "changes nothing"),
        ([], "empty"),
    ):
        with pytest.raises(ValueError, match=says):
            planted(reference.visible_keys, replace)
    with pytest.raises(ValueError, match="must name"):
        planted(reference.visible_keys, ("k_slot = ", "k_slot  = "), give="nothing")
    with pytest.raises(ValueError, match="must name what to return"):
        planted("x = 1", ("1", "2"))
    with pytest.raises(ValueError, match="stands inside a function"):
        planted(lambda: 1, ("1", "2"))
    namespace = {}
    exec("def made(): return 1", namespace)
    with pytest.raises(ValueError, match="source not available"):
        planted(namespace["made"], ("1", "2"))


def test_text_lists_of_pairs_and_ready_variants():
    text = "LIMIT = 1\n\n\ndef limit():\n    return LIMIT\n"
    assert planted(text, [("LIMIT = 1", "LIMIT = 2"), ("return LIMIT", "return -LIMIT")], give="limit")() == -2

    def check(fn):
        assert fn() == 1

    assert_caught(check, text, {"two": ("LIMIT = 1", "LIMIT = 2"), "ready": lambda: 3}, give="limit")


@pytest.mark.skipif(not runtime.can_launch(), reason="no kernel can be launched here")
def test_a_kernel_can_be_planted_and_launched(tmp_path):
    text = """
from kvlab.runtime import counted, tl, triton

@counted
@triton.jit
def add_one(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(x_ptr + i, x + 1, mask=i < n)
"""
    original = planted(text, ("x + 1", "1 + x"), give="add_one")

    def check(kernel):
        x = torch.arange(5.0, device=runtime.device())
        kernel[(1,)](x, 4, BLOCK=8)
        assert x.tolist() == [1.0, 2.0, 3.0, 4.0, 4.0]

    before = runtime.launches["add_one"]
    check(original)
    assert runtime.launches["add_one"] == before + 1
    with pytest.raises(AssertionError):
        check(planted(original, ("mask=i < n)\n    tl.store", "mask=i < n, other=0)\n    n += 1\n    tl.store")))


def test_attention_is_held_to_the_reference_sequence_by_sequence():
    q, (k, v) = torch.randn(9, 4, 8), torch.randn(2, 14, 2, 8)
    out = torch.cat([reference.attend_one(q[:2], k[:9], v[:9])[0], reference.attend_one(q[2:], k[9:], v[9:])[0]])
    assert testing.assert_attention(out, q, k, v, [2, 0, 7], [9, 0, 5]) < 1e-5
    assert testing.assert_attention(reference.attend_one(q, k, v, causal=False)[0], q, k, v, causal=False) < 1e-5
    with pytest.raises(AssertionError, match="sequence 1 of out"):
        testing.assert_attention(torch.cat([out[:2], -out[2:]]), q, k, v, [2, 7], [9, 5])
    with pytest.raises(AssertionError, match="sequence 0 of out"):
        testing.assert_attention(out, q, k, v, [2, 7], [8, 6])
    with pytest.raises(AssertionError):
        testing.assert_attention(out, q, k, v)
    for bad in (([2, 6], [9, 5]), ([2, 7], [9, 4]), ([2, 7], [14])):
        with pytest.raises(ValueError, match="rows; the lengths are"):
            testing.assert_attention(out, q, k, v, *bad)


# --- distributions ---------------------------------------------------------------------------------------------------


def test_chi_square_of_a_known_example():
    fair = torch.tensor([0.5, 0.5])
    assert testing.chi_square(torch.tensor([44, 56]), fair) == pytest.approx(0.23014, abs=1e-4)  # one degree, 1.44
    assert testing.chi_square(torch.tensor([500, 500]), fair) == pytest.approx(1.0)
    assert testing.chi_square(torch.tensor([400, 600]), fair) < 1e-9


def test_chi_square_takes_rare_cells_together_and_refuses_the_impossible():
    probs = torch.tensor([0.9, 0.0996, 0.0002, 0.0002])
    assert testing.chi_square(torch.tensor([900, 100, 0, 0]), probs) > 0.1
    assert testing.chi_square(torch.tensor([900, 60, 40, 0]), probs) < 1e-9
    assert testing.chi_square(torch.tensor([999, 1]), torch.tensor([1.0, 0.0])) == 0.0
    assert testing.chi_square(torch.tensor([7]), torch.tensor([1.0])) == 1.0


def test_chi_square_is_uniform_where_nothing_is_wrong():
    rng, probs = torch.Generator().manual_seed(0), torch.tensor([0.1, 0.2, 0.3, 0.4])
    draws = torch.multinomial(probs, 400 * 500, replacement=True, generator=rng).view(400, 500)
    values = torch.tensor([testing.chi_square(torch.bincount(row, minlength=4), probs) for row in draws])
    assert testing.chi_square(torch.histc(values, 5, 0, 1), torch.full((5,), 0.2)) > 1e-3


@pytest.mark.parametrize(
    ("counts", "probs"),
    [([1, 2], [0.5, 0.3]), ([1, 2, 3], [0.5, 0.5]), ([0, 0], [0.5, 0.5]), ([1, 2], [1.5, -0.5])],
)
def test_chi_square_refuses_what_is_no_test(counts, probs):
    with pytest.raises(ValueError):
        testing.chi_square(torch.tensor(counts), torch.tensor(probs))


def test_a_markov_pair_knows_what_it_writes():
    pair = testing.MarkovPair(3, SamplingParams(temperature=0.9))
    joint = pair.joint(3, start=1)
    assert float(joint.sum()) == pytest.approx(1)
    assert float(joint[2 * 9 + 0 * 3 + 1]) == pytest.approx(
        float(pair.target[1, 2] * pair.target[2, 0] * pair.target[0, 1]), rel=1e-5
    )
    same = testing.MarkovPair(3, SamplingParams(temperature=0.9), closeness=1.0)
    torch.testing.assert_close(same.draft, same.target)
    with pytest.raises(ValueError, match="greedy"):
        testing.MarkovPair(3, SamplingParams())


def test_a_markov_pair_notices_a_sampler_that_gives_nothing_or_nonsense():
    pair = testing.MarkovPair(3, SamplingParams(temperature=1.0))

    def giving(token):
        return lambda tokens, *_, **__: types.SimpleNamespace(tokens=torch.full((len(tokens), 3), token))

    with pytest.raises(AssertionError, match="got no token"):
        pair.write(giving(-1), 10, 2, (-1, 0))
    with pytest.raises(AssertionError, match="token 3 came out"):
        pair.write(giving(3), 10, 2, (-1, 0))
    counts = pair.write(giving(2), 10, 2, (-1, 0))
    assert counts.tolist() == [0] * 8 + [10]
