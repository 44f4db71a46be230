"""Where prefill and decode sit on the roofline: one Llama-3-8B layer's matrices and its attention, measured.

The linear work of a layer takes T tokens at a time; its weights are read once whatever T is. Decode attention reads
every sequence's own keys and values, so batching does not raise its intensity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvlab import config as configs
from kvlab import reference
from kvlab.bench import Record, Session, Timing, measure, rotations
from kvlab.config import ModelConfig

Shape = dict[str, int | float | str]


def run(session: Session) -> Iterator[Record]:
    """Achieved TFLOP/s and GB/s against T (linear work), batch (decode attention) and length (prefill attention).

    Shapes and units: each point gives two records, one in TFLOP/s and one in GB/s, and ``shape["flops"]``,
    ``shape["bytes"]``: bytes count weights, keys and values once, and inputs and outputs. 1 GB is 1e9 bytes.

    Source: chapter 00; Williams et al. 2009 (roofline).
    """
    small = configs.ModelConfig("small", 1, 64, 4, 2, 16, 128, 256, 256)
    config = small if session.quick else configs.get("llama-3-8b")
    dtype = torch.bfloat16 if session.on_gpu else torch.float32
    if session.quick:
        tokens, batches, context, prompts = [1, 4], [1, 2], 64, [32]
    elif session.on_gpu:
        tokens, batches, context, prompts = [2**e for e in range(14)], [2**e for e in range(7)], 8192, [512, 2048, 8192]
    else:
        tokens, batches, context, prompts = [1, 4, 16, 64], [1, 2, 4], 1024, [256]
    yield from _linear(session, config, tokens, dtype)
    yield from _decode_attention(session, config, batches, context, dtype)
    yield from _prefill_attention(session, config, prompts, dtype)


def _copies(session: Session, nbytes: int) -> int:
    """How many sets of buffers to rotate: five times the L2's worth, two in a quick run."""
    return 2 if session.quick else rotations(nbytes, session.device)


def _two(session: Session, bench: str, impl: str, flops: int, nbytes: int, timing: Timing, shape: Shape,
         dtype: torch.dtype, error: float) -> Iterator[Record]:  # fmt: skip
    shape = {**shape, "flops": flops, "bytes": nbytes}
    for value, unit in ((flops / timing.seconds / 1e12, "TFLOP/s"), (nbytes / timing.seconds / 1e9, "GB/s")):
        yield session.record(
            bench, impl, value, unit, shape=shape, dtype=dtype, timing=timing, error=error, version=torch.__version__
        )


def _linear(session: Session, config: ModelConfig, tokens: list[int], dtype: torch.dtype) -> Iterator[Record]:
    d, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = [(d, q_size + 2 * kv_size), (q_size, d), (d, 2 * inner), (inner, d)]  # qkv, o, gate and up, down
    jobs = {"layer": sizes, "up": [(d, inner)]}
    for job, matrices in jobs.items():
        params = sum(a * b for a, b in matrices)
        copies = _copies(session, params * dtype.itemsize)
        weights = [
            [torch.randn(b, a, device=session.device, dtype=dtype) * a**-0.5 for a, b in matrices]
            for _ in range(copies)
        ]
        for count in tokens:
            inputs = [torch.randn(count, a, device=session.device, dtype=dtype) for a, _ in matrices]

            def fn(i: int, inputs=inputs, weights=weights) -> Tensor:
                for x, w in zip(inputs, weights[i % len(weights)], strict=True):
                    out = functional.linear(x, w)
                return out

            truth = inputs[-1][:1].double() @ weights[0][-1].double().T
            error = ((fn(0)[:1].double() - truth).norm() / truth.norm()).item()
            timing = measure(
                fn, device=session.device, seconds=session.seconds(0.15), graph=copies if session.on_gpu else 0
            )
            flops = 2 * count * params
            nbytes = dtype.itemsize * (params + count * sum(a + b for a, b in matrices))
            shape: Shape = {"T": count, "d": d, "intermediate": inner, "matrices": job}
            yield from _two(session, "roofline.linear", "torch linear", flops, nbytes, timing, shape, dtype, error)


def _backends(session: Session) -> dict[str, list[SDPBackend]]:
    if not session.on_gpu:
        return {"torch SDPA": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]}
    return {
        "torch SDPA flash": [SDPBackend.FLASH_ATTENTION],
        "torch SDPA cudnn": [SDPBackend.CUDNN_ATTENTION],
        "torch SDPA efficient": [SDPBackend.EFFICIENT_ATTENTION],
    }


def _attempt(session: Session, name: str, backends: list[SDPBackend], fn: Callable[[int], Tensor], graph: int):
    """(output of call 0, timing), or None where this build has no such kernel for these shapes."""
    try:
        with sdpa_kernel(backends), torch.inference_mode():
            out = fn(0)
            return out, measure(
                fn, device=session.device, seconds=session.seconds(0.15), graph=graph if session.on_gpu else 0
            )
    except RuntimeError as error:
        session.note(f"  {name}: skipped, {str(error).splitlines()[0][:120]}")
        return None


def _decode_attention(
    session: Session, config: ModelConfig, batches: list[int], context: int, dtype: torch.dtype
) -> Iterator[Record]:
    heads, kv_heads, size, group = config.num_heads, config.num_kv_heads, config.head_dim, config.group_size
    for b in batches:
        kv_bytes = 2 * b * context * kv_heads * size * dtype.itemsize
        copies = _copies(session, kv_bytes) if kv_bytes < 1 << 31 else 1
        caches = [
            tuple(torch.randn(b, kv_heads, context, size, device=session.device, dtype=dtype) for _ in range(2))
            for _ in range(copies)
        ]
        q = torch.randn(b, heads, 1, size, device=session.device, dtype=dtype)
        folded = q.view(b, kv_heads, group, size)  # a group's query heads as rows: K and V are then read once

        def plain(i: int, q=q, caches=caches) -> Tensor:
            k, v = caches[i % len(caches)]
            return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        def fold(i: int, q=folded, caches=caches) -> Tensor:
            k, v = caches[i % len(caches)]
            return functional.scaled_dot_product_attention(q, k, v)

        k, v = (x[0].transpose(0, 1) for x in caches[0])
        truth = reference.attend_one(q[0].transpose(0, 1), k, v)[0].flatten()
        flops = 4 * b * heads * context * size
        nbytes = kv_bytes + 2 * b * heads * size * dtype.itemsize
        shape: Shape = {"B": b, "L": context, "H": heads, "H_kv": kv_heads, "D": size}
        for backend, kinds in _backends(session).items():
            for how, fn in (("", plain), (", group folded", fold)):
                impl = backend + how
                if (done := _attempt(session, impl, kinds, fn, copies)) is None:
                    continue
                out, timing = done
                error = ((out[0].flatten().double() - truth).norm() / truth.norm()).item()
                yield from _two(session, "roofline.decode", impl, flops, nbytes, timing, shape, dtype, error)
        del caches


def _prefill_attention(
    session: Session, config: ModelConfig, prompts: list[int], dtype: torch.dtype
) -> Iterator[Record]:
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
    for length in prompts:
        nbytes = length * (2 * heads + 2 * kv_heads) * size * dtype.itemsize
        copies = min(4, _copies(session, nbytes))
        inputs = [
            tuple(
                torch.randn(1, h, length, size, device=session.device, dtype=dtype) for h in (heads, kv_heads, kv_heads)
            )
            for _ in range(copies)
        ]

        def fn(i: int, inputs=inputs) -> Tensor:
            q, k, v = inputs[i % len(inputs)]
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        q, k, v = (x[0].transpose(0, 1) for x in inputs[0])
        truth = reference.attend_one(q[-1:], k, v)[0][0]  # the last row sees every key
        pairs = length * (length + 1) // 2
        shape: Shape = {"B": 1, "L": length, "H": heads, "H_kv": kv_heads, "D": size}
        for impl, kinds in _backends(session).items():
            if (done := _attempt(session, impl, kinds, fn, copies)) is None:
                continue
            out, timing = done
            error = ((out[0, :, -1].double() - truth).norm() / truth.norm()).item()
            flops = 4 * heads * pairs * size
            yield from _two(session, "roofline.prefill", impl, flops, nbytes, timing, shape, dtype, error)
