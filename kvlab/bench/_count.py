"""Work counted in a real pass, so that formulas can be held against what PyTorch was asked to do."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class CountWork(TorchDispatchMode):
    """Adds up the operations of matrix products while it is entered, and the parameters that they read.

    Enter it under ``torch.no_grad``: inference mode hides matrix products inside larger operators.

    Shapes and units: ``flops`` in operations (a multiply and an add are two); ``weight_bytes`` counts each parameter of
    ``module`` once, however often it was read.

    Source: chapter 00; PyTorch's ``flop_counter``.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.flops = 0
        self._read: dict[int, int] = {}
        self._parameters = {p.data_ptr(): p.nbytes for p in module.parameters()}

    @property
    def weight_bytes(self) -> int:
        """Bytes of the distinct parameters that matrix products have read. Source: chapter 00."""
        return sum(self._read.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator and count it. Source: PyTorch's dispatch modes."""
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.flops += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
            for tensor in args:
                if isinstance(tensor, torch.Tensor) and tensor.data_ptr() in self._parameters:
                    self._read[tensor.data_ptr()] = self._parameters[tensor.data_ptr()]
        return out
