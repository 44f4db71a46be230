"""Traffic, counted: the bytes that PyTorch's operators read and write, and those that a kernel loads.

``costs`` says what must be moved; here is what was.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvlab import runtime


class Traffic(TorchDispatchMode):
    """Adds up, while it is entered, what PyTorch's operators ask of memory.

    Shapes and units: ``moved``, the bytes that operators read and write, each tensor as often as it is used (a view
    moves nothing, and one that repeats elements is read once); ``peak``, the most bytes of their results that were
    alive at once. Tensors on the "meta" device, which have a shape and no numbers, count as if they had numbers.

    Source: chapter 03; PyTorch's dispatch modes.
    """

    moved = alive = peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator and count it. Source: PyTorch's dispatch modes."""
        out = func(*args, **(kwargs or {}))
        if func.is_view or func is torch.ops.aten._unsafe_view.default:  # the second is a view by another name
            return out
        given, made = ([x for x in tree_leaves(xs) if isinstance(x, Tensor)] for xs in ((args, kwargs), out))
        if "empty" not in func.__name__:  # memory that nobody has written to yet
            self.moved += sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in given + made)
        there = {x.untyped_storage()._cdata for x in given}
        for memory in (x.untyped_storage() for x in made):
            if memory._cdata not in there:  # not an operator that works in place
                self._hold(memory.nbytes())
                weakref.finalize(memory, self._hold, -memory.nbytes())
        return out

    def _hold(self, nbytes: int) -> None:
        self.alive += nbytes
        self.peak = max(self.peak, self.alive)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # PyTorch would else import its compiler here, which takes seconds


def operators(function: Callable[..., Any], *arguments: Any) -> Traffic:
    """The traffic of the operators of one call of a function, such as one of q [L, D], k [L, D] and v [L, D].

    Source: chapter 03.
    """
    with Traffic() as seen:
        function(*arguments)
    return seen


def kernels(run: Callable[[], Any]) -> tuple[int, int]:
    """What the kernels that ``run`` launches in Triton's interpreter load, and what they multiply.

    Shapes and units: bytes that are loaded, masked lanes not counted; operations of ``tl.dot`` (a multiply and an add
    are two).

    Raises: RuntimeError where Triton compiles kernels, or cannot be imported: then nobody sees what they do.

    Source: chapter 03.
    """
    if not runtime.INTERPRET:
        raise RuntimeError("kernels are not interpreted on this machine; what they load can be counted only there")
    from triton.runtime.interpreter import interpreter_builder as builder

    load, product = builder.create_masked_load, builder.create_dot
    loaded = multiplied = 0

    def counted_load(pointers: Any, mask: Any, *rest: Any) -> Any:
        nonlocal loaded
        loaded += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
        return load(pointers, mask, *rest)

    def counted_dot(a: Any, b: Any, *rest: Any) -> Any:
        nonlocal multiplied
        multiplied += 2 * a.data.size * b.data.shape[-1]
        return product(a, b, *rest)

    with mock.patch.multiple(builder, create_masked_load=counted_load, create_dot=counted_dot):
        run()
    return loaded, multiplied
