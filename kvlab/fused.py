"""The decoder's pointwise operations, one kernel each.

As PyTorch writes them, an RMSNorm is eight kernels, a rotation five and a SwiGLU two. At batch 1 each of them costs a
launch and little else; in a prompt each reads and writes all of the tokens' activations. ``OPS`` is handed to
``Decoder(config, ops=fused.OPS)``. There is no backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab import model, rope
from kvlab.model import Ops
from kvlab.runtime import cdiv, choose, counted, load_rows, next_power_of_2, require_no_grad, require_tensor, tl, triton

HEADS, ELEMENTS = 8, 1024  # of one program


@counted
@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, out_ptr, x_row, size, eps, WIDTH: tl.constexpr):
    """Normalise one row and scale it: one program a row. Source: chapter 07; Zhang and Sennrich 2019."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    x = load_rows(x_ptr, row * x_row + i, i < size)
    wide = x.to(tl.float32)
    unit = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)).to(x.dtype).to(tl.float32)
    out = unit * load_rows(weight_ptr, i, i < size).to(tl.float32)
    tl.store(out_ptr + row * size + i, out.to(out_ptr.dtype.element_ty), mask=i < size)


@counted
@triton.jit
def rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr, x_token, x_head, heads, HALF: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Turn a few heads of one token by its angles. Source: chapter 07; Su et al. 2021."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, WIDTH)
    there = (head < heads)[:, None] & (i < HALF)[None, :]
    at = token * x_token + head.to(tl.int64)[:, None] * x_head + i[None, :]
    first = load_rows(x_ptr, at, there).to(tl.float32)
    second = load_rows(x_ptr, at + HALF, there).to(tl.float32)
    angle = token * 2 * HALF + i
    cos = load_rows(cos_ptr, angle, i < HALF).to(tl.float32)[None, :]
    sin = load_rows(sin_ptr, angle, i < HALF).to(tl.float32)[None, :]
    cos_2 = load_rows(cos_ptr, angle + HALF, i < HALF).to(tl.float32)[None, :]
    sin_2 = load_rows(sin_ptr, angle + HALF, i < HALF).to(tl.float32)[None, :]
    to = (token * heads + head)[:, None] * 2 * HALF + i[None, :]
    kind = out_ptr.dtype.element_ty
    tl.store(out_ptr + to, (first * cos - second * sin).to(kind), mask=there)
    tl.store(out_ptr + to + HALF, (second * cos_2 + first * sin_2).to(kind), mask=there)


@counted
@triton.jit
def swiglu_kernel(gate_ptr, up_ptr, out_ptr, gate_row, up_row, size, BLOCK: tl.constexpr):
    """silu(gate) * up, a block of one row. Source: chapter 07; Shazeer 2020."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = load_rows(gate_ptr, row * gate_row + i, i < size).to(tl.float32)
    up = load_rows(up_ptr, row * up_row + i, i < size).to(tl.float32)
    small = tl.exp(-tl.abs(gate))  # never too large
    sigmoid = tl.where(gate < 0, small, 1.0) / (1.0 + small)
    out = gate * sigmoid * up
    tl.store(out_ptr + row * size + i, out.to(out_ptr.dtype.element_ty), mask=i < size)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, impl: str | None = None) -> Tensor:
    """``model.rms_norm`` in one kernel.

    Shapes and units: x [..., d] and weight [d], floating-point of one dtype on one device; gives [..., d] in it.
    ``impl`` is "torch", "triton" or None (by device).

    Raises: ValueError where shapes, dtypes or devices do not fit or a tensor requires grad; RuntimeError where
    "triton" cannot be launched.

    Source: chapter 07; Zhang and Sennrich 2019.
    """
    _require_alike(x=x, weight=weight)
    if x.ndim == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(f"weight is of shape {list(weight.shape)}; it must be {list(x.shape[-1:])}, as a row of x")
    if choose(impl, x.device, "fused.rms_norm") == "torch":
        return model.rms_norm(x, weight, eps)
    require_no_grad(x, weight)
    size = x.shape[-1]
    rows = _rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        width = next_power_of_2(size)
        rms_norm_kernel[(len(rows),)](
            rows, weight.contiguous(), out, rows.stride(0), size, eps, WIDTH=width, num_warps=_warps(width)
        )
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, impl: str | None = None) -> Tensor:
    """``rope.rotate`` in one kernel, in float32 within.

    Shapes and units: x [T, H, D], D even; cos, sin [T, D]; floating-point of one dtype on one device; gives [T, H, D]
    in it. ``impl`` is "torch", "triton" or None (by device).

    Raises: ValueError where shapes, dtypes or devices do not fit or a tensor requires grad; RuntimeError where
    "triton" cannot be launched.

    Source: chapter 07; Su et al. 2021.
    """
    _require_alike(x=x, cos=cos, sin=sin)
    if x.ndim != 3 or x.shape[2] % 2:
        raise ValueError(f"x is of shape {list(x.shape)}; it must be [T, H, D] with an even D")
    total, heads, size = x.shape
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape != (total, size):
            raise ValueError(f"{name} is of shape {list(table.shape)}; it must be {[total, size]}")
    if choose(impl, x.device, "fused.rotate") == "torch":
        return rope.rotate(x, cos, sin)
    require_no_grad(x, cos, sin)
    x = x if x.stride(2) == 1 or size < 2 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        block, width = min(HEADS, next_power_of_2(heads)), next_power_of_2(size // 2)
        rotate_kernel[(total, cdiv(heads, block))](
            x, cos.contiguous(), sin.contiguous(), out, *x.stride()[:2], heads, HALF=size // 2, BLOCK=block,
            WIDTH=width, num_warps=_warps(block * width),
        )  # fmt: skip
    return out


def swiglu(gate: Tensor, up: Tensor, *, impl: str | None = None) -> Tensor:
    """``model.swiglu`` in one kernel, in float32 within.

    Shapes and units: gate and up [..., n], floating-point of one dtype on one device; gives [..., n] in it. ``impl`` is
    "torch", "triton" or None (by device).

    Raises: ValueError where shapes, dtypes or devices do not fit or a tensor requires grad; RuntimeError where
    "triton" cannot be launched.

    Source: chapter 07; Shazeer 2020.
    """
    _require_alike(gate=gate, up=up)
    if gate.ndim == 0 or up.shape != gate.shape:
        raise ValueError(f"up is of shape {list(up.shape)}; it must be {list(gate.shape)}, as gate, and no scalar")
    if choose(impl, gate.device, "fused.swiglu") == "torch":
        return model.swiglu(gate, up)
    require_no_grad(gate, up)
    size = gate.shape[-1]
    gates, ups = _rows(gate), _rows(up)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        swiglu_kernel[(len(gates), cdiv(size, ELEMENTS))](
            gates, ups, out, gates.stride(0), ups.stride(0), size, BLOCK=ELEMENTS, num_warps=4
        )
    return out


OPS = Ops(rms_norm, rotate, swiglu)


def _rows(x: Tensor) -> Tensor:
    """x [..., n] as [rows, n], contiguous within a row."""
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] < 2 else rows.contiguous()


def _warps(elements: int) -> int:
    """Warps of a program: eight numbers a thread, where there are enough."""
    return max(1, min(16, next_power_of_2(elements) // 256))


def _require_alike(**tensors: Tensor) -> None:
    first = ""
    for name, tensor in tensors.items():
        require_tensor(name, tensor)
        first = first or name
        like = tensors[first]
        if not tensor.is_floating_point():
            raise ValueError(f"{name} is {tensor.dtype}; it must be a floating-point tensor")
        if (tensor.dtype, tensor.device) != (like.dtype, like.device):
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}; it must be {like.dtype} on {like.device}, as {first}"
            )
