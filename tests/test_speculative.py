from __future__ import annotations

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import config as configs
from kvlab import costs, flash, flash_decoding, paged, runtime, speculative, testing, zoo
from kvlab.batch import Batch
from kvlab.cache import NoCache
from kvlab.config import ModelConfig
from kvlab.generate import Generation, generate
from kvlab.model import Decoder
from kvlab.naive import NaiveCache
from kvlab.paged import PagedCache
from kvlab.sampling import SamplingParams, processed_probs
from kvlab.speculative import (
    Draft,
    HeadDrafter,
    Heads,
    ModelDrafter,
    NGramDrafter,
    SpecDecodingStats,
    Tree,
    _rejection,
    greedy_sample,
    rejection_sample,
)
from kvlab.zoo import scoring

TINY = ModelConfig(
    name="tiny", num_layers=2, hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48,
    vocab_size=40, max_seq_len=96, tie_embeddings=False,
)  # fmt: skip
SHAPES = {
    "short": Tree.chain(1),
    "chain": Tree.chain(3),
    "tree": Tree.branching((2, 2)),
    "uneven": Tree((-1, -1, 0, 0, 1, 2)),
}
LENGTHS = {"short": 2, "chain": 2, "tree": 3, "uneven": 2}  # a text of "short" and of "tree" may end in a bonus token
FILTERS = {
    "plain": SamplingParams(temperature=1.0), "cold": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(temperature=1.2, top_k=3), "top_p": SamplingParams(temperature=1.0, top_p=0.8),
    "min_p": SamplingParams(temperature=1.5, min_p=0.1),
}  # fmt: skip
ON = runtime.device()
needs_kernels = pytest.mark.skipif(not runtime.can_launch(), reason="no kernel can be launched here")


def tiny(seed: int, **changes) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(dataclasses.replace(TINY, **changes))
    for parameter in model.parameters():  # sharper than random weights are, so that choices are not ties
        parameter.data.mul_(4.0 if parameter.dim() > 1 else 1.0)
    return model.eval()


@pytest.fixture(scope="module")
def target() -> Decoder:
    return tiny(0)


@pytest.fixture(scope="module")
def draft() -> Decoder:
    """The target with noise on its weights: it agrees now and then."""
    model = tiny(0)
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data.add_(0.25 * parameter.data.std() * torch.randn_like(parameter))
    return model


def cache(model: Decoder, blocks: int = 64, block_size: int = 4, **options) -> PagedCache:
    return PagedCache(model.config, blocks, block_size, **options)


class Scripted:
    """A drafter that proposes what it was told, whatever the text."""

    def __init__(self, *drafts: Draft | list[int]) -> None:
        self.drafts = [d if isinstance(d, Draft) else Draft(d, Tree.chain(len(d))) for d in drafts]
        self.num_speculative_tokens, self.lengths, self.freed = 62, [], []

    def check(self, model):
        pass

    def propose(self, texts, params, depths):
        return {s: self.drafts.pop(0) for s in texts if self.drafts}

    def accepted(self, seq_id, length, state):
        self.lengths.append(length)

    def free(self, seq_id):
        self.freed.append(seq_id)


def drafters(target: Decoder, draft: Decoder) -> dict[str, object]:
    torch.manual_seed(3)
    heads = Heads(target.config.hidden_size, 3)
    for layer in heads.down:
        torch.nn.init.normal_(layer.weight, std=0.5)
    tree = Tree.branching((3, 2, 1))
    return {
        "model": ModelDrafter(draft, cache(draft, 256), 4), "itself": ModelDrafter(target, cache(target, 256), 4),
        "model tree": ModelDrafter(draft, cache(draft, 256), tree), "n-gram": NGramDrafter(4),
        "heads": HeadDrafter(target, heads), "heads tree": HeadDrafter(target, heads, tree),
    }  # fmt: skip


NAMES = ["model", "itself", "model tree", "n-gram", "heads", "heads tree"]


def batch_of(seed: int, batch: int, vocab: int, tree: Tree, certain: bool = False) -> dict[str, torch.Tensor | None]:
    rng = torch.Generator().manual_seed(seed)

    def rows(*shape):
        x = torch.rand(*shape, generator=rng) ** 4
        return (x / x.sum(-1, keepdim=True)).float()

    n = len(tree)
    q, p = rows(batch, n, vocab), rows(batch, n + 1, vocab)
    tokens = torch.multinomial((p[:, :n] + q).view(-1, vocab), 1, generator=rng).view(batch, n)
    made = {
        "draft_tokens": tokens, "draft_probs": None if certain else q, "target_probs": p,
        "accept_uniforms": torch.rand(batch, n, generator=rng, dtype=torch.float64),
        "sample_uniforms": torch.rand(batch, n + 1, generator=rng, dtype=torch.float64),
        "parents": torch.tensor([tree.parents] * batch, dtype=torch.int32),
    }  # fmt: skip
    return {name: x if x is None else x.to(ON) for name, x in made.items()}


def judge(p, q, tokens, accept=0.5, sample=0.5, **options):
    """One sequence, given as lists."""
    p = torch.tensor([p], dtype=torch.float32, device=ON)
    tokens = torch.tensor([tokens], device=ON)
    n = tokens.shape[1]
    q = None if q is None else torch.tensor([q], dtype=torch.float32, device=ON)
    uniforms = [torch.full((1, k), u, dtype=torch.float64, device=ON) for k, u in ((n, accept), (n + 1, sample))]
    made = rejection_sample(tokens, q, p, *uniforms, **options)
    return [t for t in made.tokens[0].tolist() if t >= 0], int(made.num_accepted)


IMPLS = ["torch", pytest.param("triton", marks=needs_kernels)]


# --- rejection sampling ----------------------------------------------------------------------------------------------


class TestRejectionSampling:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("params", FILTERS)
    def test_writes_as_the_target_alone_would(self, shape, params):
        pair = testing.MarkovPair(4, FILTERS[params])
        counts = pair.write(rejection_sample, 200_000, LENGTHS[shape], SHAPES[shape].parents)
        assert int(counts.sum()) == 200_000
        assert testing.chi_square(counts, pair.joint(LENGTHS[shape])) > 1e-3

    @pytest.mark.parametrize("shape", SHAPES)
    def test_drafts_that_are_certain_change_nothing_either(self, shape):
        pair = testing.MarkovPair(4, FILTERS["plain"])
        counts = pair.write(rejection_sample, 200_000, 2, SHAPES[shape].parents, certain=True)
        assert testing.chi_square(counts, pair.joint(2)) > 1e-3

    @pytest.mark.parametrize("shape", ["short", "tree"])
    def test_wrong_samplers_of_each_common_kind_are_caught(self, shape):
        params = FILTERS["cold"]

        def raw_q(tokens, q, p, *rest, **options):
            raw = q**params.temperature
            return rejection_sample(tokens, raw / raw.sum(-1, keepdim=True), p, *rest, **options)

        def check(sampler):
            pair = testing.MarkovPair(4, params)
            counts = pair.write(sampler, 60_000, LENGTHS[shape], SHAPES[shape].parents)
            assert testing.chi_square(counts, pair.joint(LENGTHS[shape])) > 1e-6

        resample = ("left = (p.double() - q.double().nan_to_num(0.0)).clamp(min=0)", "left = p.double()")
        bugs = {
            "resample from p": planted((resample,)),
            "accept by p alone, and draw again": planted(
                (resample, ("accept_uniforms[:, i] * q_x < p_x", "accept_uniforms[:, i] < p_x"))
            ),
            "residual not normalised": planted(
                (
                    ("torch.where(mass > 0, left / mass, p.double())", "torch.where(mass > 0, left, p.double())"),
                    (
                        "final = inverse_cdf(p, sample_uniforms[rows, at + 1])",
                        "final = torch.searchsorted(p.cumsum(1), sample_uniforms[rows, at + 1][:, None])[:, 0]"
                        ".clamp(max=vocab - 1)",
                    ),
                )
            ),
            "roles of p and q exchanged": planted(
                (("accept_uniforms[:, i] * q_x < p_x", "accept_uniforms[:, i] * p_x < q_x"),)
            ),
            "target rows off by one": planted((("target_probs[:, i + 1].double()", "target_probs[:, i].double()"),)),
            "bonus token after the last draft but one": planted(
                (("target_probs[:, i + 1].double()", "target_probs[:, min(i + 1, drafts - 1)].double()"),)
            ),
            "raw instead of processed q": raw_q,
        }
        testing.assert_caught(check, rejection_sample, bugs)

    @needs_kernels
    @pytest.mark.parametrize("vocab", [1, 5, 5000])
    @pytest.mark.parametrize("certain", [False, True])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_the_kernel_is_its_reference(self, vocab, certain, shape):
        before = runtime.launches["rejection_kernel"]
        for seed in range(3):
            case = batch_of(seed, 4, vocab, SHAPES[shape], certain)
            case["draft_tokens"][0, -1] = -1
            case["draft_tokens"][1, 0] = vocab
            wanted = rejection_sample(**case, impl="torch")
            made = rejection_sample(**case, impl="triton")
            for name in ("tokens", "nodes", "num_accepted"):
                assert torch.equal(getattr(made, name), getattr(wanted, name)), name
        assert runtime.launches["rejection_kernel"] == before + 3

    @pytest.mark.gpu
    @pytest.mark.skipif(not runtime.HAS_GPU, reason="200 000 programs in the interpreter take too long")
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("params", FILTERS)
    def test_the_kernel_writes_as_the_target_alone_would(self, shape, params):
        def sampler(*given, parents):
            made = rejection_sample(*(x.to(ON) for x in given), parents=parents.to(ON), impl="triton")
            return speculative.Accepted(made.tokens.cpu(), made.nodes.cpu(), made.num_accepted.cpu())

        pair = testing.MarkovPair(4, FILTERS[params])
        assert testing.chi_square(pair.write(sampler, 200_000, 2, SHAPES[shape].parents), pair.joint(2)) > 1e-3

    @needs_kernels
    def test_the_kernel_notices_planted_bugs(self):
        def check(sample):
            for seed in range(6):
                for shape in SHAPES.values():
                    case = batch_of(seed, 4, 5, shape)
                    wanted, made = rejection_sample(**case, impl="torch"), sample(**case, impl="triton")
                    assert torch.equal(made.tokens, wanted.tokens)
                    assert torch.equal(made.nodes, wanted.nodes)

        bugs = {
            "order of siblings": [("p_ptr, scale, spare = to_ptr, 1.0 / mass, 1 - spare", "pass")],
            "never normalised": [("to_ptr, 1.0 / mass, 1 - spare", "to_ptr, scale, 1 - spare")],
            "row of the draft before": [("target_ptr + (i + 1) * target_row", "target_ptr + i * target_row")],
            "uniform of the root": [("sample_ptr + first + seq + at + 1)", "sample_ptr + first + seq)")],
            "any parent": [("(parent == at) & (token >= 0) & (token < vocab)", "(token >= 0) & (token < vocab)")],
        }
        kernels = {name: testing.planted(speculative.rejection_kernel, bug) for name, bug in bugs.items()}

        def with_kernel(kernel):
            def run(**case):
                right = _rejection.rejection_kernel
                _rejection.rejection_kernel = kernel
                try:
                    return rejection_sample(**case)
                finally:
                    _rejection.rejection_kernel = right

            return run

        testing.assert_caught(check, rejection_sample, {name: with_kernel(k) for name, k in kernels.items()})

    @pytest.mark.parametrize("impl", IMPLS)
    def test_the_target_decides_where_both_are_certain(self, impl):
        """S1: the draft's best is a; the target prefers b, at temperature 0."""
        assert judge([[0, 1, 0]] * 2, [[1, 0, 0]], [0], impl=impl) == ([1], 0)
        assert judge([[0, 1, 0]] * 2, [[0.2, 0.4, 0.4]], [1], 0.999999, impl=impl) == ([1, 1], 1)

    def test_a_certain_draft_is_judged_by_certainty_not_by_the_model_behind_it(self):
        """S2: the marginal of a draft that always says a is the target's."""
        p, count = torch.tensor([0.3, 0.5, 0.2]), 100_000
        rng = torch.Generator().manual_seed(0)
        uniforms = [torch.rand(count, n, generator=rng, dtype=torch.float64) for n in (1, 2)]
        tokens, rows = torch.zeros(count, 1, dtype=torch.int64), p.expand(count, 2, 3)
        made = rejection_sample(tokens, None, rows, *uniforms).tokens[:, 0]
        assert testing.chi_square(torch.bincount(made, minlength=3), p) > 1e-3
        soft = torch.tensor([0.4, 0.3, 0.3]).expand(count, 1, 3)
        wrong = rejection_sample(tokens, soft, rows, *uniforms).tokens[:, 0]
        shares = torch.bincount(wrong, minlength=3) / count
        torch.testing.assert_close(shares, torch.tensor([0.75, 0.25, 0.0]), atol=0.01, rtol=0)

    @pytest.mark.parametrize("impl", IMPLS)
    @pytest.mark.parametrize("accept", [0.0, 0.5, 1 - 2**-53])
    def test_equal_distributions_always_accept(self, impl, accept):
        """S4, first part."""
        flat = [0.25] * 4
        for token in range(4):
            made, accepted = judge([flat] * 2, [flat], [token], accept, impl=impl)
            assert (made[0], accepted, len(made)) == (token, 1, 2)

    def test_nothing_left_of_equal_distributions_is_the_target(self):
        flat = torch.full((4,), 0.25)
        assert speculative.residual(flat, flat).tolist() == [0.25] * 4

    @pytest.mark.parametrize(
        ("p", "q", "name"),
        [
            (None, torch.ones(2), "p is a NoneType"), (torch.ones(2), [0.5, 0.5], "q is a list"),
            (torch.ones(2), torch.ones(3), r"q is \[3\]"), (torch.tensor(1.0), torch.tensor(1.0), "p has no dimension"),
            (torch.ones(2), torch.ones(2, device="meta"), "on meta"),
        ],
    )  # fmt: skip
    def test_a_residual_of_what_does_not_fit_is_refused(self, p, q, name):
        with pytest.raises(ValueError, match=name):
            speculative.residual(p, q)

    @pytest.mark.parametrize("impl", IMPLS)
    def test_a_draft_row_of_nan_is_rejected(self, impl):
        """S4, second part."""
        nan = [math.nan] * 4
        for token in range(4):
            assert judge([[0, 0, 1, 0]] * 2, [nan], [token], impl=impl) == ([2], 0)

    @pytest.mark.parametrize("impl", IMPLS)
    @pytest.mark.parametrize("bad", [[math.nan, 0.5, 0.5], [0, 0, 0], [math.inf, 0, 1]])
    def test_a_target_row_that_is_no_distribution_gives_no_token(self, impl, bad):
        assert judge([bad, [1, 0, 0]], [[0, 0.5, 0.5]], [0], impl=impl) == ([], 0)

    @pytest.mark.parametrize("impl", IMPLS)
    def test_a_draft_that_could_not_be_drawn_is_rejected(self, impl):
        made, accepted = judge([[0.5, 0.5, 0]] * 2, [[0, 1, 0]], [0], 0.0, sample=0.9, impl=impl)
        assert (made, accepted) == ([0], 0)  # what is left of p - q is all on 0

    @pytest.mark.parametrize("impl", IMPLS)
    def test_a_uniform_of_0_accepts_nothing_that_the_target_excludes(self, impl):
        assert judge([[0, 1, 0]] * 2, [[0.9, 0.1, 0]], [0], 0.0, 0.0, impl=impl) == ([1], 0)
        assert judge([[1e-30, 1, 0]] * 2, [[1, 0, 0]], [0], 0.0, 0.0, impl=impl)[1] == 1

    @pytest.mark.parametrize("impl", IMPLS)
    def test_no_drafts_is_plain_sampling(self, impl):
        p = torch.tensor([[[0.2, 0.3, 0.5]], [[0.2, 0.3, 0.5]]], device=ON)
        u = torch.tensor([[0.1], [0.6]], dtype=torch.float64, device=ON)
        nothing = torch.empty(2, 0, dtype=torch.int64, device=ON)
        empty = nothing, None, p, nothing.double(), u
        assert rejection_sample(*empty, impl=impl).tokens.tolist() == [[0], [2]]
        nobody = rejection_sample(*(x if x is None else x[:0] for x in empty), impl=impl)
        assert nobody.tokens.shape == (0, 1)

    @pytest.mark.parametrize("impl", IMPLS)
    def test_strided_rows_are_read_where_they_lie(self, impl):
        case = batch_of(5, 4, 7, SHAPES["tree"])
        wide = {
            n: torch.cat([case[n], torch.full_like(case[n], math.nan)], -1)[..., :7]
            for n in ("draft_probs", "target_probs")
        }
        assert torch.equal(rejection_sample(**case | wide, impl=impl).tokens, rejection_sample(**case).tokens)

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("draft_tokens", torch.zeros(4, 3), "draft_tokens is torch.float32"),
            ("draft_tokens", torch.zeros(4, 2, dtype=torch.int64), r"it must be torch.int64 \[4, 3\]"),
            ("draft_probs", torch.zeros(4, 3, 6), "draft_probs"),
            ("target_probs", torch.zeros(4, 5), "target_probs has"),
            ("target_probs", torch.zeros(4, 4, 5, dtype=torch.float64), "target_probs is torch.float64"),
            ("accept_uniforms", torch.zeros(4, 3), "accept_uniforms"),
            ("sample_uniforms", torch.zeros(4, 3), "sample_uniforms"),
            ("parents", torch.zeros(4, 3, dtype=torch.int64), "parents"), ("impl", "cuda", "impl"),
            ("target_probs", torch.zeros(4, 4, 5, requires_grad=True), "requires grad"),
            ("draft_tokens", None, "draft_tokens is a NoneType"), ("draft_probs", [0.5], "draft_probs is a list"),
            ("target_probs", None, "target_probs is a NoneType"), ("parents", [[-1]], "parents is a list"),
            ("accept_uniforms", None, "accept_uniforms is a NoneType"),
            ("sample_uniforms", 0.5, "sample_uniforms is a float"),
            ("target_probs", torch.zeros(4, 4, 5).to_sparse(), "target_probs is of layout"),
        ],
    )  # fmt: skip
    def test_bad_input_is_refused(self, name, value, message):
        case = batch_of(0, 4, 5, SHAPES["chain"])
        with pytest.raises(ValueError, match=message):
            rejection_sample(**case | {name: value.to(ON) if isinstance(value, torch.Tensor) else value})

    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, 10**6), st.integers(1, 6), st.sampled_from(sorted(SHAPES)), st.booleans())
    def test_what_is_emitted_is_a_path_of_the_proposal_and_one_token_more(self, seed, vocab, shape, certain):
        tree = SHAPES[shape]
        case = batch_of(seed, 3, vocab, tree, certain)
        made = rejection_sample(**case)
        for b in range(3):
            count = int(made.num_accepted[b])
            nodes, tokens = made.nodes[b].tolist(), made.tokens[b].tolist()
            assert nodes[count:] == [-1] * (len(tree) - count)
            assert tokens[count + 1 :] == [-1] * (len(tree) - count)
            assert nodes[:count] == tree.path(nodes[count - 1] if count else -1)
            assert tokens[:count] == case["draft_tokens"][b, nodes[:count]].tolist()
            row = case["target_probs"][b, nodes[count - 1] + 1 if count else 0]
            assert row[tokens[count]] > 0


class TestGreedySampling:
    @needs_kernels
    @pytest.mark.parametrize("shape", SHAPES)
    def test_the_kernel_is_its_reference_and_rejection_of_certain_rows(self, shape):
        tree = SHAPES[shape]
        for seed in range(4):
            rng = torch.Generator().manual_seed(seed)
            tokens = torch.randint(0, 2, (5, len(tree)), generator=rng).to(ON)
            wanted = torch.randint(0, 2, (5, len(tree) + 1), generator=rng).to(ON)
            parents = torch.tensor([tree.parents] * 5, dtype=torch.int32, device=ON)
            reference = greedy_sample(tokens, wanted, parents=parents, impl="torch")
            case = batch_of(seed, 5, 2, tree, certain=True)
            certain = case | {"draft_tokens": tokens, "target_probs": torch.nn.functional.one_hot(wanted, 2).float()}
            for made in (greedy_sample(tokens, wanted, parents=parents, impl="triton"), rejection_sample(**certain)):
                for name in ("tokens", "num_accepted"):
                    assert torch.equal(getattr(made, name), getattr(reference, name)), name

    def test_bad_input_is_refused(self):
        tokens = torch.zeros(2, 3, dtype=torch.int64)
        with pytest.raises(ValueError, match="target_tokens is a list"):
            greedy_sample(tokens, [[0]])
        with pytest.raises(ValueError, match="draft_tokens is a NoneType"):
            greedy_sample(None, torch.zeros(2, 4, dtype=torch.int64))
        with pytest.raises(ValueError, match="target_tokens has shape"):
            greedy_sample(tokens, torch.zeros(2, dtype=torch.int64))
        with pytest.raises(ValueError, match="draft_tokens is"):
            greedy_sample(tokens, torch.zeros(2, 3, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"target_tokens is torch\.int32"):
            greedy_sample(tokens, torch.zeros(2, 4, dtype=torch.int32))


def planted(replacements):
    """``rejection_sample`` of a changed copy of its module."""
    import inspect

    return testing.planted(inspect.getsource(_rejection), list(replacements), give="rejection_sample")


# --- trees -----------------------------------------------------------------------------------------------------------


class TestTree:
    def test_a_small_tree_by_hand(self):
        tree = Tree.branching((2, 1))
        assert tree.parents == (-1, -1, 0, 1)
        assert (tree.depths, tree.ranks, tree.children) == ([1, 1, 2, 2], [0, 1, 0, 0], {-1: [0, 1], 0: [2], 1: [3]})
        assert tree.masks() == [0b1, 0b11, 0b101, 0b1011, 0b10101]
        assert (tree.path(3), tree.path(-1), len(tree), tree.is_chain) == ([1, 3], [], 4, False)
        assert tree.cut(3).parents == (-1, -1, 0)

    def test_paths_of_ranks_name_a_tree(self):
        assert Tree.from_ranks([(0, 0), (1,), (0, 1)]) == Tree((-1, -1, 0, 0))
        assert Tree.from_ranks([]) == Tree(())
        for bad in ([(1,)], [(0, -1)], [(0, 2), (0, 0)]):
            with pytest.raises(ValueError, match="paths"):
                Tree.from_ranks(bad)

    @pytest.mark.parametrize("bad", [(0,), (-2,), (-1, 1), (-1, 0.5), tuple([-1] * 63)])
    def test_what_is_no_tree_is_refused(self, bad):
        with pytest.raises(ValueError, match="parents"):
            Tree(bad)

    @pytest.mark.parametrize("bad", [(0,), (64,), (2, 0), (8, 8)])
    def test_widths_that_make_no_tree_are_refused(self, bad):
        with pytest.raises(ValueError, match=r"widths|parents"):
            Tree.branching(bad)

    @pytest.mark.parametrize(
        ("call", "name"),
        [
            (lambda: Tree.chain(None), "length"), (lambda: Tree.chain(-1), "length"),
            (lambda: Tree.chain(63), "length"), (lambda: Tree.chain(10**12), "length"),
            (lambda: Tree.branching([10**12]), "widths"),
            (lambda: Tree.branching([2] * 100), "widths"), (lambda: Tree.from_ranks(None), "paths"),
            (lambda: Tree.from_ranks([5]), "paths"), (lambda: Tree.from_ranks([[0] * 10**5]), "paths"),
            (lambda: Tree.chain(3).cut(1.5), "length"), (lambda: Tree.chain(3).path(3), "node"),
            (lambda: Tree.chain(3).path(-2), "node"), (lambda: Tree.chain(3).path("0"), "node"),
        ],
    )  # fmt: skip
    def test_no_length_width_path_or_node_is_refused_before_anything_is_built(self, call, name):
        with pytest.raises(ValueError, match=name):
            call()

    def test_numbers_of_any_kind_will_do(self):
        tree = Tree.branching(torch.tensor([2, 2]))
        assert (tree, Tree.chain(np.int64(2))) == (Tree((-1, -1, 0, 0, 1, 1)), Tree((-1, 0)))
        assert list(map(type, tree.path(np.int64(4)))) == [int, int]

    @given(st.lists(st.integers(0, 61), max_size=62))
    def test_masks_are_ancestors_and_self(self, draws):
        tree = Tree(tuple(d % (i + 1) - 1 for i, d in enumerate(draws)))
        for node, mask in enumerate(tree.masks()[1:]):
            assert mask == 1 | sum(1 << (n + 1) for n in tree.path(node))
            assert mask.bit_count() - 1 == tree.depths[node] == len(tree.path(node))


# --- drafters --------------------------------------------------------------------------------------------------------


class TestNGramDrafter:
    def test_which_occurrence_is_copied(self):
        """S12."""
        text = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3]
        assert NGramDrafter(3, match="first").lookup(text) == [4, 1, 2]
        assert NGramDrafter(3).lookup(text) == [5, 1, 2]
        assert (NGramDrafter(1, match="first").lookup(text), NGramDrafter(1).lookup(text)) == ([4], [5])
        assert NGramDrafter(3).lookup([7]) == []
        assert NGramDrafter(3).lookup([1, 2]) == []
        assert NGramDrafter(3).lookup([]) == []

    def test_the_longest_suffix_decides_and_shorter_ones_follow(self):
        assert NGramDrafter(1, max_n=2).lookup([5, 6, 1, 9, 6, 2, 5, 6]) == [1]
        assert NGramDrafter(1, max_n=3, min_n=2).lookup([6, 1, 9, 6]) == []
        assert NGramDrafter(4).lookup([3, 3, 3]) == [3]

    def test_no_more_than_can_be_used_is_proposed(self):
        made = NGramDrafter(4).propose({7: [1, 2, 3, 1]}, {7: SamplingParams()}, {7: 2})
        assert made == {7: Draft([2, 3], Tree.chain(2))}

    def test_bad_texts_and_numbers_are_refused(self):
        for args, name in (((None,), "text"), (([2**70, 1, 2**70],), "text"), (([1, 2, 1], -1), "most"),
                           (([1, 2, 1], 1.5), "most")):  # fmt: skip
            with pytest.raises(ValueError, match=name):
                NGramDrafter(3).lookup(*args)

    @pytest.mark.parametrize(
        "bad", [{"num_speculative_tokens": 0}, {"max_n": 0}, {"min_n": 4}, {"match": "last"}, {"max_n": 1.5}]
    )
    def test_bad_settings_are_refused(self, bad):
        with pytest.raises(ValueError):
            NGramDrafter(**bad)


class TestModelDrafter:
    def test_lengths_keep_pace_with_the_target(self, target):
        """S10: of 4 drafts 1, 0 and 4 are accepted."""
        plain = generate(target, cache(target), [[1, 2, 3]], SamplingParams(max_tokens=20))[0].tokens
        drafter, store = ModelDrafter(target, cache(target), 4), cache(target)
        trims: list[tuple[str, int, int]] = []
        for name, one in (("draft", drafter.cache), ("target", store)):
            one.truncate = noting(one, name, trims)
        requests, params = {0: Generation([1, 2, 3], [])}, {0: SamplingParams(max_tokens=20)}
        speculative.step(target, store, drafter, requests, params)  # the prompt
        wrong = (plain[2] + 1) % 40
        for accepted, spoiled in ((1, {1: wrong}), (0, {0: wrong}), (4, {})):
            trims.clear()
            speculative.step(target, store, Spoiled(drafter, spoiled), requests, params)
            lost = {name: before - after for name, before, after in trims if before != after}
            assert lost.get("target", 0) == 4 - accepted
            assert lost.get("draft", 0) == max(0, 3 - accepted)
            assert store.length(0) == 3 + len(requests[0].tokens) - 1
            assert drafter.cache.length(0) == store.length(0) - (accepted == 4)  # its last token comes with the next
        speculative.step(target, store, drafter, requests, params)
        assert requests[0].tokens == plain[: len(requests[0].tokens)]
        assert len(requests[0].tokens) == 1 + 2 + 1 + 5 + 5

    def test_it_draws_from_what_it_hands_over(self, target):
        params = SamplingParams(temperature=0.8, top_k=5)
        settings_of = {seed: dataclasses.replace(params, seed=seed) for seed in range(1500)}
        drafter = ModelDrafter(target, cache(target, 1500), 2)
        made = drafter.propose({s: [1, 2, 3] for s in settings_of}, settings_of, dict.fromkeys(settings_of, 1))
        first = made[0].probs[0]
        assert int((first > 0).sum()) == 5
        for one in made.values():
            torch.testing.assert_close(one.probs[0], first)
        counts = torch.bincount(torch.tensor([one.tokens[0] for one in made.values()]), minlength=40)
        assert testing.chi_square(counts, first) > 1e-3

    def test_siblings_are_drawn_without_replacement(self, target):
        drafter = ModelDrafter(target, cache(target), Tree.branching((3, 2)))
        made = drafter.propose({0: [1, 2, 3]}, {0: SamplingParams(temperature=1.0, seed=1)}, {0: 2})[0]
        assert len(set(made.tokens[:3])) == 3
        for i, parent in enumerate(made.tree.parents):
            before = [made.tokens[j] for j in range(i) if made.tree.parents[j] == parent]
            assert float(made.probs[i][before].sum()) == 0
            assert made.probs[i][made.tokens[i]] > 0
            torch.testing.assert_close(made.probs[i].sum(), torch.tensor(1.0))

    def test_where_the_distribution_has_no_more_tokens_there_are_fewer_siblings(self, target):
        drafter = ModelDrafter(target, cache(target), Tree.branching((3, 2)))
        made = drafter.propose({0: [1, 2, 3]}, {0: SamplingParams(temperature=1.0, top_k=1)}, {0: 2})[0]
        assert made.tree == Tree.chain(2)

    def test_a_trees_branches_are_what_the_model_says_after_each(self, target):
        drafter = ModelDrafter(target, cache(target), Tree.branching((2, 2, 1)))
        made = drafter.propose({0: [4, 5]}, {0: SamplingParams()}, {0: 3})[0]
        for node in range(len(made.tokens)):
            text = [4, 5, *(made.tokens[n] for n in made.tree.path(node)[:-1])]
            with torch.inference_mode():
                logits = target(Batch.build([0], [text], [0]), cache(target))
            best = logits.topk(2).indices[0].tolist()
            assert made.tokens[node] == best[made.tree.ranks[node]]

    def test_another_vocabulary_is_refused(self, target):
        other = tiny(1, vocab_size=41)
        with pytest.raises(ValueError, match=r"vocabulary of 41 tokens.*must be that of the target tiny, 40"):
            speculative.generate(target, cache(target), ModelDrafter(other, cache(other)), [[1]])

    def test_another_device_is_refused(self, target):
        there = ModelDrafter(tiny(1).to("meta"), cache(target))
        with pytest.raises(ValueError, match=r"the draft tiny is on meta; it must be where the target"):
            speculative.generate(target, cache(target), there, [[1]])

    def test_what_is_no_model_is_refused(self, target):
        with pytest.raises(ValueError, match="model is a NoneType; it must be a Decoder"):
            ModelDrafter(None, cache(target))

    @pytest.mark.parametrize("bad", [0, 63, 1.5, "4", Tree(())])
    def test_bad_shapes_are_refused(self, target, bad):
        with pytest.raises(ValueError, match="shape"):
            ModelDrafter(target, cache(target), bad)

    def test_a_full_draft_cache_proposes_less_and_harms_nothing(self, target):
        plain = generate(target, cache(target), [[1, 2, 3, 4, 5]], SamplingParams(max_tokens=24))[0]
        for blocks in (1, 2, 3):
            drafter = ModelDrafter(target, cache(target, blocks), 4)
            [made], _ = speculative.generate(
                target, cache(target), drafter, [[1, 2, 3, 4, 5]], SamplingParams(max_tokens=24)
            )
            assert made == plain

    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_a_draft_that_gives_nan_proposes_nothing_and_harms_nothing(self, target, temperature):
        broken = tiny(0)
        broken.lm_head.weight.data[3] = math.nan
        params = SamplingParams(temperature=temperature, seed=4, max_tokens=12)
        plain = generate(target, cache(target), [[1, 2, 3]], params)[0]
        for shape in (4, Tree.branching((2, 2))):
            drafter = ModelDrafter(broken, cache(broken), shape)
            [made], stats = speculative.generate(target, cache(target), drafter, [[1, 2, 3]], params)
            assert made == plain
            assert stats.num_drafts == 0

    def test_a_draft_of_a_shorter_context_stops_proposing(self, target):
        short = tiny(0, max_seq_len=16)
        plain = generate(target, cache(target), [[1, 2, 3]], SamplingParams(max_tokens=40))[0]
        for shape in (4, Tree.branching((2, 2))):
            drafter = ModelDrafter(short, cache(short), shape)
            [made], stats = speculative.generate(
                target, cache(target), drafter, [[1, 2, 3]], SamplingParams(max_tokens=40)
            )
            assert made == plain
            assert stats.num_drafts < stats.num_steps


def noting(store: PagedCache, name: str, trims: list[tuple[str, int, int]]):
    truncate = store.truncate

    def noted(seq_id, length):
        trims.append((name, store.length(seq_id), length))
        truncate(seq_id, length)

    return noted


class Spoiled:
    """A drafter whose tokens are changed at some depths after it proposed."""

    def __init__(self, inner, changes) -> None:
        self.inner, self.changes = inner, changes
        self.num_speculative_tokens, self.accepted = inner.num_speculative_tokens, inner.accepted
        self.free, self.check = inner.free, inner.check

    def propose(self, texts, params, depths):
        made = self.inner.propose(texts, params, depths)
        return {s: Draft([self.changes.get(i, t) for i, t in enumerate(d.tokens)], d.tree) for s, d in made.items()}


class TestHeads:
    def test_new_heads_say_what_the_target_says(self, target):
        heads = Heads(32, 3)
        states, tokens = torch.randn(5, 32), target.embed_tokens(torch.arange(5))
        for k in range(3):
            torch.testing.assert_close(heads(k, states, tokens), states)

    def test_what_was_saved_is_loaded(self, target, tmp_path):
        heads = Heads(32, 2, width=24)
        torch.nn.init.normal_(heads.down[0].weight)
        heads.save(tmp_path / "deep" / "heads.safetensors", torch.float32)
        again = Heads.load(tmp_path / "deep" / "heads.safetensors", target)
        assert (again.num_heads, again.width, again.up[0].weight.requires_grad) == (2, 24, False)
        x = torch.randn(3, 32), torch.randn(3, 32)
        torch.testing.assert_close(again(0, *x), heads(0, *x))

    def test_files_without_heads_are_refused(self, target, tmp_path):
        path = tmp_path / "heads.safetensors"
        with pytest.raises(ValueError, match="holds no heads"):
            Heads.load(path, target)
        path.write_bytes(b"nonsense")
        with pytest.raises(ValueError, match="holds no heads"):
            Heads.load(path, target)
        Heads(16).save(path)
        with pytest.raises(ValueError, match="hidden size 16; it must be that of tiny, 32"):
            Heads.load(path, target)

    def test_bad_sizes_and_shapes_are_refused(self, target):
        with pytest.raises(ValueError, match="num_heads 0"):
            Heads(32, 0)
        with pytest.raises(ValueError, match="4 deep; there are 3 heads"):
            HeadDrafter(target, Heads(32, 3), 4)
        with pytest.raises(ValueError, match="hidden size"):
            HeadDrafter(target, Heads(16))
        with pytest.raises(ValueError, match="that same model"):
            speculative.generate(tiny(0), cache(target), HeadDrafter(target, Heads(32)), [[1]])

    def test_inputs_that_do_not_fit_are_refused(self, target):
        heads, x = Heads(32, 3), torch.zeros(2, 32)
        for args, name in (((3, x, x), "k is 3"), ((-1, x, x), "k is -1"), ((1.5, x, x), "k is 1.5"),
                           ((0, x[0], x), "states"), ((0, x, x[:1]), "embedded"), ((0, x, None), "embedded"),
                           ((0, x[:, :16], x), "states"), ((0, x.bfloat16(), x), "states")):  # fmt: skip
            with pytest.raises(ValueError, match=name):
                heads(*args)
        with pytest.raises(ValueError, match="norm_eps"):
            Heads(32, norm_eps=math.nan)
        with pytest.raises(ValueError, match="dtype"):
            heads.save("never written", torch.int32)
        with pytest.raises(ValueError, match="heads is a NoneType"):
            HeadDrafter(target, None)
        with pytest.raises(ValueError, match=r"heads are torch\.bfloat16"):
            HeadDrafter(target, Heads(32).bfloat16())
        with pytest.raises(ValueError, match="state has shape"):
            HeadDrafter(target, heads).accepted(0, 3, x)

    def test_each_node_is_what_its_head_says_after_the_nodes_above(self, target, draft):
        drafter = drafters(target, draft)["heads tree"]
        state = torch.randn(32)
        drafter.accepted(5, 3, state)
        texts, params = {5: [1, 2, 3], 6: [1]}, {5: SamplingParams(), 6: SamplingParams()}
        made = drafter.propose(texts, params, {5: 2, 6: 3})
        assert list(made) == [5]  # of 6 no state is known
        tree = made[5].tree
        assert tree == Tree.branching((3, 2))
        for node, token in enumerate(made[5].tokens):
            at = state[None]
            for k, before in enumerate([3, *(made[5].tokens[n] for n in tree.path(node)[:-1])]):
                at = drafter.heads(k, at, target.embed_tokens(torch.tensor([before])))
            assert token == target.logits(at)[0].topk(3).indices[tree.ranks[node]]
        drafter.accepted(5, 9, state)
        assert drafter.propose(texts, params, {5: 2, 6: 3}) == {}  # the state is of another length
        drafter.free(5)


# --- the loop --------------------------------------------------------------------------------------------------------

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7, 7, 7]]


class TestGenerate:
    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("kind", ["paged", "naive", "decoding"])
    def test_greedy_text_is_the_plain_one(self, target, draft, name, kind):
        stores = {
            "paged": lambda: cache(target, 256), "naive": lambda: NaiveCache(target.config, 4, 64),
            "decoding": lambda: cache(target, 256, attention=flash_decoding.attention),
        }  # fmt: skip
        params = [SamplingParams(max_tokens=n) for n in (30, 1, 40, 17)]
        plain = generate(target, stores[kind](), PROMPTS, params)
        store = stores[kind]()
        drafter = drafters(target, draft)[name]
        made, stats = speculative.generate(target, store, drafter, PROMPTS, params)
        assert made == plain
        assert store.used_nbytes == 0
        assert getattr(drafter, "cache", store).used_nbytes == 0
        assert stats.num_steps < 30 + 40 + 17 or name == "n-gram"
        if name == "itself":
            assert stats.mean_acceptance_length > 4

    @needs_kernels
    @pytest.mark.parametrize("attention", [paged.attention, flash.attention, flash_decoding.attention])
    def test_every_kernel_verifies_a_tree(self, target, draft, attention):
        params, prompts = SamplingParams(max_tokens=5), PROMPTS[:2]
        target, draft = (copy.deepcopy(model).to(ON) for model in (target, draft))
        plain = generate(target, cache(target, device=ON), prompts, params)
        drafter = ModelDrafter(draft, cache(draft, device=ON), Tree.branching((3, 2, 1)))
        store = cache(target, attention=attention, impl="triton", device=ON)
        before = sum(runtime.launches.values())
        assert speculative.generate(target, store, drafter, prompts, params)[0] == plain
        assert sum(runtime.launches.values()) > before

    @pytest.mark.parametrize("name", NAMES)
    def test_a_sampled_text_does_not_depend_on_its_company(self, target, draft, name):
        params = [SamplingParams(temperature=t, seed=i, max_tokens=20) for i, t in enumerate((0.7, 0.0, 1.0, 0.3))]
        together, _ = speculative.generate(target, cache(target), drafters(target, draft)[name], PROMPTS, params)
        for i, prompt in enumerate(PROMPTS):
            [alone], _ = speculative.generate(target, cache(target), drafters(target, draft)[name], [prompt], params[i])
            assert alone == together[i]

    @pytest.mark.parametrize("name", ["model", "model tree", "n-gram", "heads tree"])
    def test_the_first_tokens_are_distributed_as_the_targets(self, target, draft, name):
        """End to end through cache and drafters: the joint distribution of the second and third token."""
        params = SamplingParams(temperature=0.7, top_k=3, max_tokens=3)
        count, prompt = 1200, [2, 4, 2, 4, 2]
        texts = []
        for start in range(0, count, 600):
            some = [dataclasses.replace(params, seed=start + i) for i in range(600)]
            made, _ = speculative.generate(target, cache(target, 4000), big(target, draft, name), [prompt] * 600, some)
            texts += [tuple(g.tokens) for g in made]
        wanted = exact(target, prompt, params)
        counts = torch.tensor([texts.count(text) for text in wanted])
        assert int(counts.sum()) == count
        assert testing.chi_square(counts, torch.tensor(list(wanted.values()))) > 1e-3

    def test_truncated_sampling_is_obeyed(self, target):
        """S6: top_k = 1 gives the best token whatever is proposed; a flat distribution gives all its tokens."""
        best = generate(target, cache(target), [[1, 2, 3]], SamplingParams(max_tokens=8))[0].tokens
        second = [[(t + 1) % 40] * 2 for t in best[1:]]
        one = SamplingParams(temperature=1.0, top_k=1, max_tokens=8)
        assert speculative.generate(target, cache(target), Scripted(*second), [[1, 2, 3]], one)[0][0].tokens == best
        flat = torch.full((300, 2, 3), 1 / 3)
        u = [torch.rand(300, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) for n in (1, 2)]
        made = rejection_sample(torch.zeros(300, 1, dtype=torch.int64), None, flat, *u).tokens[:, 0]
        assert set(made.tolist()) == {0, 1, 2}

    def test_a_stop_token_inside_an_accepted_run_ends_the_text(self, target):
        """S8: nothing is kept after it, neither tokens nor keys and values."""
        plain = generate(target, cache(target), [[1, 2, 3]], SamplingParams(max_tokens=8))[0].tokens
        stop = next(i for i in range(2, 6) if plain[i] not in plain[:i])
        params = SamplingParams(max_tokens=8, stop_token_ids=(plain[stop],))
        for shape in (Tree.chain(7 - 1), Tree((-1, -1, 0, 2, 3, 4, 5))):
            tokens = plain[1:7] if shape.is_chain else [plain[1], 39, *plain[2:7]]
            store, requests = cache(target), {0: Generation([1, 2, 3], [])}
            drafter = Scripted(Draft(tokens, shape))
            speculative.step(target, store, drafter, requests, {0: params})
            stats = SpecDecodingStats()
            made = speculative.step(target, store, drafter, requests, {0: params}, stats=stats)
            assert made[0] == plain[1 : stop + 1]
            assert (requests[0].tokens, requests[0].finish_reason) == (plain[: stop + 1], "stop")
            assert store.length(0) == 3 + stop
            assert drafter.lengths[-1] == 3 + stop + 1
            assert stats.num_accepted_tokens == stop

    @pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 6])
    def test_max_tokens_inside_a_run_is_exact(self, target, most):
        plain = generate(target, cache(target), [[1, 2, 3]], SamplingParams(max_tokens=9))[0].tokens
        drafter = Scripted(plain[1:6])
        [made], _ = speculative.generate(target, cache(target), drafter, [[1, 2, 3]], SamplingParams(max_tokens=most))
        assert (made.tokens, made.finish_reason) == (plain[:most], "length")

    @pytest.mark.parametrize("name", NAMES)
    def test_the_last_slot_of_the_context_and_of_a_row(self, target, draft, name):
        params, prompt = SamplingParams(max_tokens=500), [1, 2, 3]
        plain = generate(target, cache(target), [prompt], params)[0]
        assert len(plain.tokens) == 96 - 3
        assert speculative.generate(target, cache(target), drafters(target, draft)[name], [prompt], params)[0] == [
            plain
        ]
        for row in (4, 9, 17):
            store = NaiveCache(target.config, 1, row)
            plain = generate(target, NaiveCache(target.config, 1, row), [prompt], params)[0]
            assert len(plain.tokens) == row + 1 - 3
            assert speculative.generate(target, store, drafters(target, draft)[name], [prompt], params)[0] == [plain]

    def test_a_stop_string_across_an_accepted_run_ends_the_text(self, target):
        plain = generate(target, cache(target), [[1, 2, 3]], SamplingParams(max_tokens=9))[0].tokens

        def decode(tokens):
            return "".join(f"<{t}>" for t in tokens)

        stop = f"{plain[2]}><{plain[3]}>"  # it begins inside one token and ends with another
        drafter = Scripted(plain[1:7])
        for one in (drafter, NGramDrafter()):
            [made], _ = speculative.generate(
                target, cache(target), one, [[1, 2, 3]], SamplingParams(max_tokens=9), stop=[stop], decode=decode
            )
            assert (made.tokens, made.finish_reason) == (plain[:4], "stop")

    @pytest.mark.parametrize(
        ("stop", "decode"), [(["x"], None), ("x", str), ([""], str), ([3], str), (None, str), (5, str), (["x"], "x")]
    )
    def test_stop_strings_that_are_none_are_refused(self, target, stop, decode):
        with pytest.raises(ValueError, match="stop"):
            speculative.generate(target, cache(target), NGramDrafter(), [[1]], stop=stop, decode=decode)
        with pytest.raises(ValueError, match="decode gives None"):
            speculative.generate(target, cache(target), NGramDrafter(), [[1]], stop=["x"], decode=lambda ids: None)

    def test_unverified_tokens_are_not_in_the_cache(self, target):
        """S13: 6 known, 5 of them stored in pages of 4, 4 drafts of which 1 is accepted."""
        prompt = [1, 2, 3, 4, 5]
        plain = generate(target, cache(target), [prompt], SamplingParams(max_tokens=9))[0].tokens
        store, requests = cache(target), {0: Generation(prompt, [])}
        wrong = [plain[1], *[(t + 1) % 40 for t in plain[2:5]]]
        params = {0: SamplingParams(max_tokens=9)}
        speculative.step(target, store, Scripted(), requests, params)
        assert (store.length(0), len(requests[0].tokens)) == (5, 1)
        speculative.step(target, store, Scripted(wrong), requests, params)
        assert (store.length(0), 5 + len(requests[0].tokens)) == (7, 8)
        assert store.length(0) // store.block_size == 1

    def test_sequences_are_accepted_each_to_its_own_length(self, target):
        prompts = [[1, 2, 3], [4, 5], [6, 7]]
        plain = [g.tokens for g in generate(target, cache(target), prompts, SamplingParams(max_tokens=8))]
        requests = {i: Generation(p, []) for i, p in enumerate(prompts)}
        params = dict.fromkeys(requests, SamplingParams(max_tokens=8))
        store = cache(target)
        proposals = [plain[0][1:4], [plain[1][1], (plain[1][2] + 1) % 40, 0], [(plain[2][1] + 1) % 40]]
        drafter = Scripted(*proposals)
        speculative.step(target, store, drafter, requests, params)
        stats = SpecDecodingStats()
        made = speculative.step(target, store, drafter, requests, params, stats=stats)
        assert made == {0: plain[0][1:5], 1: plain[1][1:3], 2: plain[2][1:2]}
        assert [store.length(i) for i in range(3)] == [3 + 4, 2 + 2, 2 + 1]
        assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 7, 4)
        assert stats.num_accepted_tokens_per_pos == [2, 1, 1]
        assert stats.mean_acceptance_length == 1 + 4 / 3
        store.manager.audit()

    def test_an_accepted_branch_that_is_not_the_first_is_moved_into_place(self, target):
        plain = generate(target, cache(target), [[1, 2, 3]], SamplingParams(max_tokens=12))[0].tokens
        tree, store = Tree.branching((2, 2)), cache(target)
        wrong = [(t + 1) % 40 for t in plain]
        tokens = [wrong[1], plain[1], wrong[2], 39, wrong[2], plain[2]]
        requests, params = {0: Generation([1, 2, 3], [])}, {0: SamplingParams(max_tokens=12)}
        drafter = Scripted(Draft(tokens, tree))
        for _ in range(9):
            speculative.step(target, store, drafter, requests, params)
            if requests[0].finish_reason:
                break
        assert requests[0].tokens[: len(plain)] == plain[: len(requests[0].tokens)]
        assert len(requests[0].tokens) == 1 + 3 + 7

    def test_a_shared_prompt_is_left_as_it_was(self, target):
        plain = generate(target, cache(target), [[1, 2, 3, 4, 5, 6]], SamplingParams(max_tokens=9))[0].tokens
        store, requests = cache(target), {0: Generation([1, 2, 3, 4, 5, 6], [])}
        params = dict.fromkeys((0, 1), SamplingParams(max_tokens=9))
        speculative.step(target, store, Scripted(), requests, params)
        store.fork(0, 1)
        requests[1] = Generation([1, 2, 3, 4, 5, 6], list(requests[0].tokens))
        tree = Tree.branching((2, 2))
        wrong = [(t + 1) % 40 for t in plain]
        drafter = Scripted(Draft([wrong[1], plain[1], 1, 2, wrong[2], plain[2]], tree), plain[1:4])
        speculative.step(target, store, drafter, requests, params)
        while not all(r.finish_reason for r in requests.values()):
            speculative.step(
                target, store, Scripted(), {s: r for s, r in requests.items() if not r.finish_reason}, params
            )
        assert [r.tokens for r in requests.values()] == [plain, plain]
        store.manager.audit()

    def test_where_proposals_do_not_fit_the_pool_a_plain_step_is_made(self, target):
        plain = generate(target, cache(target, 4), [[1] * 8], SamplingParams(max_tokens=8))[0]
        drafter = ModelDrafter(target, cache(target), Tree.branching((3, 3)))
        [made], stats = speculative.generate(target, cache(target, 4), drafter, [[1] * 8], SamplingParams(max_tokens=8))
        assert made == plain
        assert stats.num_drafts < stats.num_steps

    def test_a_model_that_breaks_leaves_all_as_it_was(self, target):
        broken = tiny(0)
        store, requests = cache(broken), {0: Generation([1, 2, 3], [])}
        params = {0: SamplingParams(max_tokens=9)}
        speculative.step(broken, store, Scripted(), requests, params)
        broken.lm_head.weight.data[0] = math.nan
        before = list(requests[0].tokens)
        with pytest.raises(ValueError, match=r"not finite.*sequence 0, position 4"):
            speculative.step(broken, store, Scripted([1, 2]), requests, params)
        assert (requests[0].tokens, store.length(0)) == (before, 3)
        with pytest.raises(ValueError, match="not finite"):
            speculative.step(broken, store, Scripted(), {5: Generation([1], [])}, {5: SamplingParams()})
        assert 5 not in store

    @pytest.mark.parametrize(
        ("proposal", "message"),
        [
            (Draft([1, 40], Tree.chain(2)), "token 40 for sequence 0"), (Draft([-1], Tree.chain(1)), "token -1"),
            (Draft([1], Tree.chain(1), torch.full((1, 41), 1 / 41)), "probs over 41 tokens"),
            (Draft([1], Tree.chain(1), torch.full((1, 40), 1 / 40, device="meta")), "on meta"),
            ([1, 2], "must be a Draft"),
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_proposal_that_does_not_fit_is_refused_before_it_is_verified(
        self, target, proposal, message, temperature
    ):
        store, requests = cache(target), {0: Generation([1, 2, 3], []), 1: Generation([4], [])}
        params = dict.fromkeys(requests, SamplingParams(temperature=temperature, max_tokens=9))
        speculative.step(target, store, Scripted(), requests, params)
        before = copy.deepcopy(requests)
        drafter = Scripted()
        drafter.drafts = [proposal, Draft([1], Tree.chain(1))]
        with pytest.raises(ValueError, match=message):
            speculative.step(target, store, drafter, requests, params)
        assert requests == before
        assert (store.length(0), store.length(1)) == (3, 1)
        store.manager.audit()

    @pytest.mark.parametrize("tree", [Tree.chain(2), Tree.branching((2,))])
    def test_a_stop_check_that_raises_changes_nothing(self, target, tree):
        store, requests = cache(target), {0: Generation([1, 2, 3], []), 1: Generation([4], [])}
        params = dict.fromkeys(requests, SamplingParams(max_tokens=9))
        speculative.step(target, store, Scripted(), requests, params)
        before, seen = copy.deepcopy(requests), []

        def stops(tokens):
            seen.append(tokens)
            if tokens[0] == before[1].tokens[0] and len(seen) > 1:
                raise RuntimeError("no text")
            return False

        with pytest.raises(RuntimeError, match="no text"):
            speculative.step(
                target, store, Scripted(Draft([1, 2], tree), Draft([3, 4], tree)), requests, params, stops=stops
            )
        assert requests == before
        assert (store.length(0), store.length(1)) == (3, 1)
        speculative.step(target, store, Scripted(), requests, params)
        assert [len(r.tokens) for r in requests.values()] == [2, 2]
        store.manager.audit()

    def test_a_drafter_that_breaks_leaves_text_and_cache_in_step(self, target):
        class Broken(Scripted):
            def accepted(self, seq_id, length, state):
                raise RuntimeError("forgot")

        store, requests = cache(target), {0: Generation([1, 2, 3], []), 1: Generation([4], [])}
        params = dict.fromkeys(requests, SamplingParams(max_tokens=9))
        speculative.step(target, store, Scripted(), requests, params)
        with pytest.raises(RuntimeError, match="forgot"):
            speculative.step(target, store, Broken([1, 2], [3, 4]), requests, params)
        for s, request in requests.items():
            assert store.length(s) == len(request.prompt) + len(request.tokens) - 1
        store.manager.audit()

    @pytest.mark.parametrize("bad", [None, NGramDrafter, object()])
    def test_what_is_no_drafter_is_refused(self, target, bad):
        with pytest.raises(ValueError, match="drafter is"):
            speculative.generate(target, cache(target), bad, [[1]])

    def test_bad_requests_are_refused_before_anything(self, target):
        store = cache(target)
        with pytest.raises(ValueError, match=r"prompts\[1\]"):
            speculative.generate(target, store, NGramDrafter(), [[1], []])
        with pytest.raises(ValueError, match="params has 2 entries"):
            speculative.generate(target, store, NGramDrafter(), [[1]], [SamplingParams()] * 2)
        with pytest.raises(ValueError, match=r"params\[0\]"):
            speculative.step(target, store, NGramDrafter(), {0: Generation([1], [])}, {})
        with pytest.raises(ValueError, match="request 0 has 0 tokens"):
            speculative.step(target, store, NGramDrafter(), {0: Generation([], [])}, {0: SamplingParams()})
        assert store.manager.seq_ids == []

    def test_a_drafter_needs_a_cache_of_its_own_and_forgets_other_texts(self, target):
        store = cache(target)
        with pytest.raises(ValueError, match="a cache each"):
            speculative.generate(target, store, ModelDrafter(target, store), [[1]])
        drafter = ModelDrafter(target, cache(target), 3)
        drafter.propose({0: [9] * 20}, {0: SamplingParams()}, {0: 3})  # left behind by somebody
        params = SamplingParams(max_tokens=12)
        _, stats = speculative.generate(target, store, drafter, [[1, 2, 3]], params)
        assert stats.num_accepted_tokens == stats.num_draft_tokens

    def test_no_tokens_and_no_prompts(self, target):
        [made], stats = speculative.generate(target, cache(target), NGramDrafter(), [[1]], SamplingParams(max_tokens=0))
        assert (made.tokens, made.finish_reason, stats.num_steps) == ([], "length", 0)
        assert speculative.generate(target, cache(target), NGramDrafter(), []) == ([], SpecDecodingStats())
        assert (stats.mean_acceptance_length, stats.draft_acceptance_rate, stats.tokens_per_step) == (1.0, 0.0, 0.0)

    @settings(max_examples=25, deadline=None)
    @given(st.data())
    def test_any_proposal_leaves_the_greedy_text_alone(self, target, data):
        prompt = data.draw(st.lists(st.integers(0, 39), min_size=1, max_size=9))
        plain = generate(target, cache(target), [prompt], SamplingParams(max_tokens=12))[0]
        store, requests, params = cache(target), {0: Generation(prompt, [])}, {0: SamplingParams(max_tokens=12)}
        while not requests[0].finish_reason:
            at = len(requests[0].tokens)
            size = data.draw(st.integers(0, 8))
            tree = Tree(tuple(data.draw(st.integers(-1, i - 1)) for i in range(size)))
            tokens = [plain.tokens[min(at + d - 1, 11)] if data.draw(st.booleans()) else 0 for d in tree.depths]
            kept, ids = list(tree.parents), tokens
            speculative.step(target, store, Scripted(Draft(ids, Tree(tuple(kept)))), requests, params)
            store.manager.audit()
        assert requests[0].tokens == plain.tokens

    def test_drafts_must_agree_in_number(self):
        with pytest.raises(ValueError, match="2, 3 and 2 entries"):
            Draft([1, 2], Tree.chain(3))

    @pytest.mark.parametrize(
        ("args", "name"),
        [
            ((None, Tree.chain(1)), "tokens"), (([1.5], Tree.chain(1)), "tokens"), (([1], (-1,)), "tree"),
            (([1], Tree.chain(1), [1.0]), "probs"), (([1], Tree.chain(1), torch.ones(1)), "probs"),
            (([1], Tree.chain(1), torch.ones(1, 4, dtype=torch.float64)), "probs"),
        ],
    )  # fmt: skip
    def test_what_makes_no_draft_is_refused(self, args, name):
        with pytest.raises(ValueError, match=name):
            Draft(*args)
        assert Draft(torch.tensor([1, 2]), Tree.chain(2)).tokens == [1, 2]

    @pytest.mark.parametrize("counts", [(1, 2, 3), (-1, 0, 1), (1.5, 1, 1), (2, 1, None)])
    def test_counts_that_cannot_be_are_refused(self, counts):
        stats = SpecDecodingStats()
        with pytest.raises(ValueError, match="num_"):
            stats.observe(*counts)
        assert stats == SpecDecodingStats()


def big(target, draft, name):
    drafter = drafters(target, draft)[name]
    if isinstance(drafter, ModelDrafter):
        drafter.cache = cache(drafter.model, 4000)
    return drafter


def exact(model: Decoder, prompt: list[int], params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of every text of three tokens."""
    found = {(): 1.0}
    for _ in range(3):
        longer = {}
        for text, probability in found.items():
            store = NoCache(model.config)
            with torch.inference_mode():
                probs = processed_probs(model(Batch.build([0], [[*prompt, *text]], [0]), store), params)[0]
            for token in probs.nonzero().flatten().tolist():
                longer[(*text, token)] = probability * float(probs[token])
        found = longer
    return found


@pytest.fixture(scope="module")
def pair():
    return zoo.load("stdlib-7m", "cpu"), zoo.load("stdlib-1m", "cpu")


class TestShippedPair:
    def test_greedy_text_is_the_plain_one_and_tokens_come_several_at_a_time(self, pair):
        target, draft = pair
        files = scoring.encode(zoo.held_out(), zoo.tokenizer())
        prompts, params = scoring.continuations(files, 128, 5), SamplingParams(max_tokens=24)
        plain = generate(target, cache(target, 300, 16), prompts, params)
        lengths = {}
        for name, drafter in {
            "model": ModelDrafter(draft, cache(draft, 300, 16), 4), "n-gram": NGramDrafter(4),
            "tree": ModelDrafter(draft, cache(draft, 300, 16), Tree.branching((3, 2, 1, 1))),
        }.items():  # fmt: skip
            made, stats = speculative.generate(target, cache(target, 300, 16), drafter, prompts, params)
            assert made == plain
            lengths[name] = stats.mean_acceptance_length
        assert lengths["model"] > 2
        assert lengths["tree"] > lengths["model"]


# --- the cost model --------------------------------------------------------------------------------------------------


class TestCostModel:
    @given(st.floats(0, 1), st.integers(0, 20))
    def test_expected_tokens_is_the_mean_of_the_process(self, alpha, gamma):
        mean = sum((k + 1) * alpha**k * (1 - alpha) for k in range(gamma)) + (gamma + 1) * alpha**gamma
        assert speculative.expected_tokens(alpha, gamma) == pytest.approx(mean)
        if alpha < 1:
            closed = (1 - alpha ** (gamma + 1)) / (1 - alpha)
            assert speculative.expected_tokens(alpha, gamma) == pytest.approx(closed, rel=1e-6)

    def test_ends(self):
        assert speculative.expected_tokens(1, 4) == 5
        assert speculative.expected_tokens(0, 4) == 1
        assert speculative.speedup(0.8, 0, 0.5) == 1
        assert speculative.speedup(1, 4, 0) == 5
        assert speculative.best_gamma(0, 0.1) == 0
        assert speculative.best_gamma(1, 0) == 16

    def test_a_batch_that_fills_the_arithmetic_loses(self):
        assert speculative.speedup(0.8, 4, 0.1, batch=1, saturation=200) == speculative.speedup(0.8, 4, 0.1)
        assert speculative.speedup(0.8, 4, 0.1, batch=400, saturation=200) < 1
        assert speculative.best_gamma(0.8, 0.1, 400, saturation=200) == 0

    @given(st.floats(0, 1), st.integers(0, 8), st.floats(0, 2), st.integers(1, 256), st.floats(1, 1e4))
    def test_speedup_falls_with_the_batch_and_the_drafts_cost(self, alpha, gamma, ratio, batch, saturation):
        here = speculative.speedup(alpha, gamma, ratio, batch, saturation=saturation)
        assert 0 < here <= gamma + 1 + 1e-9
        assert speculative.speedup(alpha, gamma, ratio, batch + 1, saturation=saturation) <= here + 1e-9
        assert speculative.speedup(alpha, gamma, ratio + 0.1, batch, saturation=saturation) <= here + 1e-9

    def test_measured_verification_replaces_the_models(self):
        assert speculative.speedup(0.5, 1, 0.25, verify_ratio=1.25) == pytest.approx(1.5 / 1.5)

    def test_saturation_is_where_the_roofline_bends(self):
        config, card = configs.get("llama-3-8b"), costs.HARDWARE["h200"]
        for context in (0, 4096):
            at = speculative.saturation(config, card, context)

            def limits(tokens, context=context):
                per_token = costs.num_parameters(config).active * 2 + costs.decode(config, context + 1).flops_attention
                read = costs.decode(config, 1).bytes_weights + costs.kv_bytes(config, context)
                return read / card.bandwidth, tokens * per_token / card.flops

            memory, arithmetic = limits(at)
            assert memory == pytest.approx(arithmetic, rel=1e-6)
        assert speculative.saturation(config, card, 4096, 8) > speculative.saturation(config, card, 0, 8)

    @pytest.mark.parametrize(
        "call",
        [
            lambda: speculative.expected_tokens(1.5, 4), lambda: speculative.expected_tokens(math.nan, 4),
            lambda: speculative.expected_tokens(0.5, -1), lambda: speculative.expected_tokens(0.5, 1.5),
            lambda: speculative.speedup(0.5, 4, -1), lambda: speculative.speedup(0.5, 4, 0.1, 0),
            lambda: speculative.speedup(0.5, 4, 0.1, saturation=0),
            lambda: speculative.speedup(0.5, 4, 0.1, saturation=True),
            lambda: speculative.speedup(0.5, 4, 0.1, verify_ratio=0),
            lambda: speculative.best_gamma(0.5, 0.1, gammas=()), lambda: speculative.best_gamma(0.5, 0.1, gammas=5),
            lambda: speculative.best_gamma(0.5, 0.1, gammas=["x", 1]),
            lambda: speculative.saturation("llama-3-8b", costs.HARDWARE["h200"]),
            lambda: speculative.saturation(configs.get("llama-3-8b"), "h200"),
            lambda: speculative.saturation(configs.get("llama-3-8b"), costs.HARDWARE["h200"], -1),
        ],
    )  # fmt: skip
    def test_bad_numbers_are_refused(self, call):
        with pytest.raises(ValueError):
            call()
