"""The hostile table, the tolerance rule and the planted bugs: they pass what is right and catch what is wrong."""

from __future__ import annotations

import pytest
import torch

from kvlab import reference, runtime, testing
from kvlab.naive import NaiveCache
from kvlab.testing import ATTENTION, CACHES, HOSTILE, assert_caught, assert_close, planted


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


@pytest.mark.parametrize("case", ATTENTION, ids=lambda c: c.name)
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
        case.build().block_table[b, : -(-n // case.block_size)]
        for case in ATTENTION
        for b, n in enumerate(case.kv_lens)
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
    for case in ATTENTION:
        testing.check_attention(plain_attention, case, dtype=dtype, fills=(float("nan"),))


def test_what_unused_slots_hold_may_not_matter_in_one_bit():
    def leaks(q, k_cache, v_cache, *, out, return_lse, **kwargs):
        result, lse = plain_attention(q, k_cache, v_cache, out=out, return_lse=True, **kwargs)
        out += k_cache.nan_to_num().mean() * 1e-11
        return result, lse

    with pytest.raises(AssertionError, match=r"out changes when unused slots hold 10000"):
        testing.check_attention(leaks, ATTENTION[3])


def test_inputs_may_not_be_written_to():
    def scribbles(q, *args, **kwargs):
        result = plain_attention(q, *args, **kwargs)
        q.zero_()
        return result

    with pytest.raises(AssertionError, match="q was written to"):
        testing.check_attention(scribbles, ATTENTION[3])


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


# --- planted bugs --------------------------------------------------------------------------------------------------


def check_reference(module_attention):
    def attention(*args, out=None, return_lse=False, **kwargs):
        result, lse = module_attention(*args, **kwargs, return_lse=True, dtype=torch.float32)
        return out.copy_(result), lse

    for case in ATTENTION:
        testing.check_attention(attention, case, fills=(float("nan"),))


VISIBLE = {
    "mask off by one": ("q_slot = past + torch", "q_slot = past + 1 + torch"),
    "aligned top-left": ("past = kv_len - q_len\n", "past = 0\n"),
    "window off by one": ("k_pos >= q_pos - left", "k_pos > q_pos - left"),
    "right window ignored": ("if right >= 0:", "if False:"),
    "tree depth off by one": ("bits.sum(1) - 1", "bits.sum(1)"),
}
ATTEND_ONE = {
    "wrong head map": ("keys = k.to(work).repeat_interleave(group, dim=1)", "keys = k.to(work).repeat(1, group, 1)"),
    "mask lost": ('scores = scores.masked_fill(~seen, float("-inf"))', "scores = scores + 0.0"),
    "cap after the mask": ("if softcap:", "if False:"),
    "scale forgotten": ("@ keys.transpose(1, 2) * scale", "@ keys.transpose(1, 2)"),
    "sink scaled": ("sink = sinks.to(work)", "sink = scale * sinks.to(work)"),
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
        except (RuntimeError, ValueError) as error:
            raise AssertionError(f"{case.name}: {error}") from error


CACHE_BUGS = {
    NaiveCache.attend: {
        "stale V": ("self.v[layer, row, past:end] = v[new]", "pass"),
        "V stored as K": ("self.v[layer, row, past:end] = v[new]", "self.v[layer, row, past:end] = k[new]"),
        "one layer for all": ("self.k[layer, row, past:end] = k[new]", "self.k[0, row, past:end] = k[new]"),
        "window ignored": ("window_size=self.config.window_size(layer)", "window_size=(-1, -1)"),
    },
    NaiveCache.fork: {
        "V not copied": ("self.v[:, target, :length] =", "_ ="),
        "row shared": ("self._free_rows.pop(), self._lengths", "self._rows[parent], self._lengths"),
    },
    NaiveCache.truncate: {"does nothing": ("self._lengths[seq_id] = length", "pass")},
    NaiveCache.keep: {"base forgotten": ("[base + i for i in indices]", "[i for i in indices]")},
    NaiveCache.prepare: {"no check": ("if past != self.length(seq_id):", "if False:")},
    NaiveCache.free: {"row lost": ("self._free_rows.append(self._rows.pop(seq_id))", "self._rows.pop(seq_id)")},
}


@pytest.mark.parametrize("method", CACHE_BUGS, ids=lambda m: m.__name__)
def test_bugs_in_a_cache_are_caught(method):
    assert_caught(check_cache, method, CACHE_BUGS[method])


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
