"""cache: NoCache, and the checks that every cache shares."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvlab.batch import Batch
from kvlab.cache import CacheFull, NoCache, check_keep, check_truncate
from kvlab.config import ModelConfig
from kvlab.reference import attend_one

CONFIG = ModelConfig("small", 2, 32, 4, 2, 8, 48, 64, 64)


def qkv(tokens: int, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, heads, 8, generator=g, dtype=torch.float64).to(dtype) for heads in (4, 2, 2)]


def attend(lengths, config=CONFIG, layer=0, tree_mask=None, tensors=None):
    cache = NoCache(config)
    cache.prepare(Batch.build(range(len(lengths)), [[0] * n for n in lengths], [0] * len(lengths), tree_mask=tree_mask))
    return cache.attend(layer, *(tensors or qkv(sum(lengths))))


def one_by_one(lengths, **options):
    parts = zip(*(x.split(lengths) for x in qkv(sum(lengths))), strict=True)
    return torch.cat([attend_one(*part, **options)[0] for part in parts])


@pytest.mark.parametrize("lengths", [[5], [4, 4, 4], [1, 1], [1, 7, 3], [3, 0, 2]])
def test_attends_each_sequence_to_itself(lengths):
    torch.testing.assert_close(attend(lengths), one_by_one(lengths))


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_nothing_to_attend(lengths):
    assert attend(lengths).shape == (0, 4, 8)


@pytest.mark.parametrize("lengths", [[6, 6], [2, 7]])
def test_window(lengths):
    windowed = replace(CONFIG, sliding_window=3, sliding_layers=(1,))
    torch.testing.assert_close(attend(lengths, windowed, layer=1), one_by_one(lengths, window_size=(2, 0)))
    torch.testing.assert_close(attend(lengths, windowed, layer=0), one_by_one(lengths))


def test_tree():
    masks = [[0b001, 0b011, 0b101], [0b001, 0b011, 0b101]]
    out = attend([3, 3], tree_mask=masks)
    q, k, v = (x[:3] for x in qkv(6))
    torch.testing.assert_close(out[:3], attend_one(q, k, v, tree_mask=torch.tensor(masks[0]))[0])
    assert not torch.allclose(out[2], one_by_one([3, 3])[2])


@pytest.mark.parametrize("lengths", [[4, 4], [2, 5]])
def test_is_differentiable(lengths):
    tensors = [x.requires_grad_() for x in qkv(sum(lengths))]
    attend(lengths, tensors=tensors).square().sum().backward()
    assert all(torch.isfinite(x.grad).all() and x.grad.abs().sum() > 0 for x in tensors)


def test_gradients_agree_between_the_two_paths():
    """Equal lengths take one fused call, others a loop: the same two sequences must get the same gradients."""
    fused = [x.requires_grad_() for x in qkv(8)]
    attend([4, 4], tensors=fused).square().sum().backward()
    looped = [torch.cat([x, x[:1]]).detach().requires_grad_() for x in qkv(8)]
    attend([4, 4, 1], tensors=looped)[:8].square().sum().backward()
    for a, b in zip(fused, looped, strict=True):
        torch.testing.assert_close(a.grad, b.grad[:8])


def test_keeps_nothing():
    cache = NoCache(CONFIG)
    cache.prepare(Batch.build([3], [[1, 2]], [0]))
    length = cache.length(3)
    assert (length, type(length), cache.nbytes) == (0, int, 0)
    cache.fork(3, 4)
    cache.keep(3, 0, [])
    cache.truncate(3, 0)
    cache.free(3)
    cache.free(99)


def test_refuses_a_past():
    with pytest.raises(ValueError, match="sequence 5 claims 2 cached tokens"):
        NoCache(CONFIG).prepare(Batch.build([4, 5], [[1], [1]], [0, 2]))


def test_refuses_to_attend_before_a_batch_or_without_keys():
    q, k, v = qkv(2)
    cache = NoCache(CONFIG)
    with pytest.raises(ValueError, match="prepared"):
        cache.attend(0, q, k, v)
    cache.prepare(Batch.build([0], [[1, 2]], [0]))
    with pytest.raises(ValueError, match="k and v"):
        cache.attend(0, q, None, None)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", lambda q, k, v: (q[:3], k, v)),
        ("q", lambda q, k, v: (torch.cat([q, q[:2]]), torch.cat([k, k[:2]]), torch.cat([v, v[:2]]))),
        ("q", lambda q, k, v: (q[:, :2], k, v)),
        ("k", lambda q, k, v: (q, k[:1], v)),
        ("k", lambda q, k, v: (q, k[..., :4], v)),
        ("v", lambda q, k, v: (q, k, v[:, :1])),
    ],
)
@pytest.mark.parametrize("lengths", [[2, 2], [1, 3]])
def test_refuses_tensors_that_are_not_the_batch_s(lengths, name, change):
    with pytest.raises(ValueError, match=f"^{name} has shape"):
        attend(lengths, tensors=change(*qkv(4)))


@pytest.mark.parametrize("layer", [-1, 2, 0.0, True])
def test_refuses_a_layer_that_the_model_does_not_have(layer):
    with pytest.raises(ValueError, match="layer is"):
        attend([2], layer=layer)


@pytest.mark.parametrize("length", [-1, -5, 1])
def test_truncate_refuses(length):
    with pytest.raises(ValueError, match=f"length is {length}"):
        NoCache(CONFIG).truncate(0, length)


def test_check_truncate():
    check_truncate(0, 3)
    check_truncate(3, 3)
    for length in (-1, 4):
        with pytest.raises(ValueError, match="between 0 and the 3 tokens"):
            check_truncate(length, 3)


def test_check_keep():
    check_keep(2, [2, 0, 1], 5)
    check_keep(5, [], 5)
    for base, indices, named in [(6, [], "base"), (-1, [], "base"), (2, [3], "indices"), (2, [0, 0], "indices")]:
        with pytest.raises(ValueError, match=named):
            check_keep(base, indices, 5)
    with pytest.raises(ValueError, match="indices"):
        check_keep(2, [-1], 5)


@pytest.mark.parametrize("wrong", [2.5, 2.0, float("nan"), True, None, "2"])
def test_lengths_and_offsets_are_integers(wrong):
    with pytest.raises(ValueError, match="truncate: length is"):
        check_truncate(wrong, 5)
    with pytest.raises(ValueError, match="truncate: length is"):
        NoCache(CONFIG).truncate(0, wrong)
    with pytest.raises(ValueError, match="keep: base is"):
        check_keep(wrong, [], 5)
    with pytest.raises(ValueError, match=r"keep: indices\[1\] is"):
        check_keep(0, [0, wrong], 5)


@pytest.mark.parametrize("kind", [np.int64, torch.tensor])
def test_lengths_and_offsets_become_python_ints(kind):
    length, (base, indices) = check_truncate(kind(3), 5), check_keep(kind(2), [kind(1), kind(0)], 5)
    assert (length, base, indices) == (3, 2, [1, 0])
    assert {type(x) for x in (length, base, *indices)} == {int}
    with pytest.raises(ValueError, match="distinct"):
        check_keep(0, torch.tensor([1, 1]), 5)


def test_cache_full_says_how_much_is_short():
    error = CacheFull(3, 1, "rows", "free a sequence")
    assert (error.needed, error.free, error.unit) == (3, 1, "rows")
    assert str(error) == "the cache needs 3 rows and has 1 free; free a sequence"
