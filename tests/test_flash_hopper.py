"""The Hopper kernel: what it takes and refuses, the order of its tiles, and on a Hopper GPU its numbers."""

from __future__ import annotations

import itertools

import compiling
import pytest
import torch

from kvlab import flash, flash_hopper, reference, runtime, testing

ON = runtime.device()
WHY_NOT = flash_hopper.unavailable(ON)
needs_hopper = [pytest.mark.gpu, pytest.mark.skipif(WHY_NOT is not None, reason=f"no Hopper kernel here: {WHY_NOT}")]
needs_triton = pytest.mark.skipif(not runtime.can_launch(), reason="no kernel can be launched here")
HALF = (torch.bfloat16, torch.float16)


def tensors(q_shape, kv_shape, dtype=torch.bfloat16, device="cpu", seed=0, v_dim=None):
    rng = torch.Generator().manual_seed(seed)
    v_shape = (*kv_shape[:-1], v_dim or kv_shape[-1])
    return [torch.randn(shape, generator=rng).to(device, dtype) for shape in (q_shape, kv_shape, v_shape)]


# --- what it refuses -------------------------------------------------------------------------------------------------


def test_plain_arguments_are_not_refused():
    for dtype in HALF:
        q, k, v = tensors((2, 5, 4, 64), (2, 7, 2, 64), dtype)
        assert flash_hopper.refusal(q, k, v, paged=False) is None
    for size in (8, 16, 64, 256):
        q, k, v = tensors((5, 4, 128), (3, size, 2, 128))
        assert flash_hopper.refusal(q, k, v, paged=True, softmax_scale=0.1, window_size=(3, 0), softcap=5.0) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda q, k, v: {"q": q.float(), "k": k.float(), "v": v.float()}, "float32 has no place"),
        (lambda q, k, v: {"q": q[..., :59].contiguous(), "k": k, "v": v}, "q is strided by 59"),
        (lambda q, k, v: {"k": k[..., ::2], "v": v}, "k is strided by 2"),
        (lambda q, k, v: {"v": v.repeat(1, 1, 1, 5)}, "head size 320 is over 256"),
        (lambda q, k, v: {"softmax_scale": -1.0}, "not positive"),
        (lambda q, k, v: {"softmax_scale": 0.0}, "not positive"),
        (lambda q, k, v: {"k": k[:0], "v": v[:0]}, "empty"),
        (lambda q, k, v: {"k": torch.zeros(k.numel() + 1, dtype=k.dtype)[1:].view(k.shape)}, "16 bytes"),
        (lambda q, k, v: {"tree_mask": torch.ones(5, dtype=torch.int64)}, "tree mask"),
    ],
)
def test_each_refusal_says_why(change, reason):
    q, k, v = tensors((2, 5, 4, 64), (2, 7, 2, 64))
    arguments = {"q": q, "k": k, "v": v, **change(q, k, v)}
    assert reason in flash_hopper.refusal(paged=False, **arguments)


@pytest.mark.parametrize(("size", "reason"), [(4, "pages of 4"), (48, "pages of 48"), (1, "pages of 1 ")])
def test_pages_that_a_copy_cannot_bring(size, reason):
    q, k, v = tensors((5, 4, 64), (3, size, 2, 64))
    assert reason in flash_hopper.refusal(q, k, v, paged=True)


def test_pages_apart_in_memory_are_refused():
    q, k, v = tensors((5, 4, 64), (6, 16, 2, 64))
    assert "do not follow each other" in flash_hopper.refusal(q, k[::2], v[::2], paged=True)
    both = torch.randn(4, 2, 16, 2, 64).bfloat16()  # k and v of a block side by side
    assert "do not follow each other" in flash_hopper.refusal(q, both[:, 0], both[:, 1], paged=True)


def test_unavailable_names_the_device():
    assert "CPU" in flash_hopper.unavailable(torch.device("cpu"))


def test_asking_for_it_where_it_cannot_run_is_an_error():
    q, k, v = tensors((1, 5, 4, 64), (1, 7, 2, 64))
    with pytest.raises(RuntimeError, match="hopper"):
        flash.flash_attn_func(q, k, v, impl="hopper")


def test_tile_sizes_fit_the_shared_memory():
    for dim, dim_v in itertools.product((40, 64, 96, 128, 192, 256), repeat=2):
        sizes = flash_hopper.tiling(dim, dim_v)
        assert sizes["wide"] >= dim
        assert sizes["wide_v"] >= dim_v
        queries = 2 * sizes["q_stages"] * 64 * sizes["wide"]
        keys = sizes["stages"] * sizes["N"] * (sizes["wide"] + sizes["wide_v"])
        assert 2 * (queries + keys) + 1024 <= 227 * 1024


# --- the order of the tiles ------------------------------------------------------------------------------------------


def plan(q_lens, kv_lens, tokens, causal, paged, longer_than=0):
    cu_q, cu_k = (torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32, device=ON) for x in (q_lens, kv_lens))
    used = torch.tensor(kv_lens, dtype=torch.int32, device=ON)
    count = sum(-(-n // tokens) for n in q_lens if n > longer_than)
    order = torch.full((2 + 2 * count + 8,), -7, dtype=torch.int32, device=ON)
    grid = (len(q_lens), max(1, -(-max(q_lens) // (tokens * 64))))
    flash_hopper.plan_tiles_kernel[grid](
        order, cu_q, None if paged else cu_k, used if paged else None, len(q_lens), TOKENS=tokens, PAGED=paged,
        CAUSAL=causal, WIDTH=64, LONGER_THAN=longer_than,
    )  # fmt: skip
    assert order[2 + 2 * count :].tolist() == [-7] * 8  # nothing past the end is written
    assert order[0] == count
    return order[2 : 2 + 2 * count].view(-1, 2).tolist()


@needs_triton
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("paged", [True, False])
def test_every_tile_is_planned_once_and_the_longest_come_first(causal, paged):
    rng = torch.Generator().manual_seed(1)
    for lengths in ([5], [0, 0], [32, 32, 32], [0, 1, 200, 3, 77, 128, 0, 31, 33], None, [2] * 66):
        q_lens = lengths or torch.randint(0, 90, (20,), generator=rng).tolist()
        kv_lens = [max(0, n + int(torch.randint(-20, 300, (), generator=rng))) for n in q_lens]
        order = plan(q_lens, kv_lens, 32, causal, paged)
        assert sorted(map(tuple, order)) == [(b, m) for b, n in enumerate(q_lens) for m in range(-(-n // 32))]
        ends = [kv_lens[b] - q_lens[b] + (m + 1) * 32 if causal else kv_lens[b] for b, m in order]
        if min(ends, default=1) > 0:
            assert ends == sorted(ends, reverse=True)


@needs_triton
@pytest.mark.parametrize("causal", [True, False])
def test_short_sequences_can_be_left_out(causal):
    for q_lens in ([5], [16, 17, 200, 3, 0, 77, 1], [1] * 70 + [40], [16, 1]):
        order = plan(q_lens, [n + 50 for n in q_lens], 32, causal, True, longer_than=16)
        want = [(b, m) for b, n in enumerate(q_lens) for m in range(-(-n // 32)) if n > 16]
        assert sorted(map(tuple, order)) == want


# --- what the compiler makes of it, which needs no GPU ---------------------------------------------------------------

CHILD = r"""
from kvlab import flash_hopper
from kvlab.flash_hopper._kernel import Plan, flash_hopper_kernel

kernel = flash_hopper_kernel.fn
LAUNCH = {"paged": ("table_ptr", "cu_q", "used"), "ragged": ("cu_q", "cu_k"), "dense": ()}

OUT = {"dense": lambda rows: [1, rows, 1], "ragged": lambda rows: [1, 1, rows], "paged": lambda rows: [1, 1, rows]}

def build(form, dim, group, **options):
    options |= flash_hopper.tiling(dim, dim)
    plan = Plan(form=form, group=group, share=1, dim=dim, dim_v=dim, lse=True, copies_out=options["q_stages"] > 1,
                **options)
    bound = [1] if form == "dense" else [1, 1]
    types = {"q_desc": descriptor([1, plan.queries, 1, group, plan.wide]),
             "k_desc": descriptor([*bound, plan.rows, 1, plan.wide]),
             "v_desc": descriptor([*bound, plan.rows, 1, plan.wide_v]),
             "out_desc": descriptor([*OUT[form](plan.queries), group, plan.wide_v]) if plan.copies_out else "*bf16",
             "out_ptr": "*bf16", "lse_ptr": "*fp32", "scale": "fp32", "softcap": "fp32"}
    types |= {name: "*i32" for name in ("plan_ptr", "counter", *LAUNCH[form])}
    types |= {name: "i64" for name in ("table_row", "out_seq", "lse_seq")}
    types |= {"sink_ptr": "*fp32"} if plan.sinks else {}
    values = {"C": plan}
    values |= {name: None for name in ("table_ptr", "cu_q", "cu_k", "used", "sink_ptr") if name not in types}
    return compiled_gluon(kernel, types, values)

def block_loops(sass):
    lines = [line for line in sass.splitlines() if re.search(r"^\s*/\*[0-9a-f]{4,5}\*/|^\.L_", line)]
    places = {line.strip(": "): i for i, line in enumerate(lines) if line.startswith(".L_")}
    for i, line in enumerate(lines):
        jump = re.search(r"BRA (?:`\()?(\.L_x_\d+)", line)
        if jump and places.get(jump.group(1), i) < i:
            body = lines[places[jump.group(1)] : i + 1]
            if any("HGMMA" in x for x in body) and not any("STG" in x for x in body):
                yield sum(bool(re.search(r"\b(LDL|STL)\b", x)) for x in body)

for form, dim, group, options in [
    ("paged", 128, 4, dict(causal=True, block_size=16)), ("dense", 256, 1, dict(causal=True)),
    ("ragged", 64, 2, dict(left=100, right=3, softcap=True, sinks=True)),
    ("dense", 128, 4, dict(causal=True, left=100, softcap=True, sinks=True)),
]:
    done, said = build(form, dim, group, **options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(done.asm["cubin"])
        cubin.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, cubin.name]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found.append({"name": f"{form} {dim}", "said": said, "shared": done.metadata.shared,
                  "loops": list(block_loops(sass)), "overwritten": overwritten_barriers(done.asm["ptx"]),
                  "spills": sum(int(n) for n in re.findall(r"(\d+) bytes spill", said)),
                  **{word: word in sass for word in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG")}})
"""


@pytest.mark.slow
@pytest.mark.skipif(not runtime.HAS_TRITON, reason="triton is not installed")
def test_it_compiles_to_asynchronous_products_and_copies_and_keeps_its_loop_in_registers(pytestconfig):
    found = compiling.child(pytestconfig, hopper=CHILD)["hopper"]
    assert len(found) == 4
    for kernel in found:
        assert kernel["HGMMA"], kernel
        assert kernel["UTMALDG"], kernel
        assert kernel["UTMASTG"] or "256" in kernel["name"], kernel
        assert kernel["USETMAXREG"], kernel
        assert "serialized" not in kernel["said"], kernel  # ptxas gives up asynchrony with a remark only
        assert kernel["shared"] <= 227 * 1024, kernel
        assert not kernel["overwritten"], kernel
        assert kernel["spills"] <= 128, kernel  # a few numbers of a tile, kept aside while its blocks are computed
        assert len(kernel["loops"]) == 2, kernel  # one a consumer
        assert kernel["loops"] == [0, 0], kernel


# --- its numbers, on a Hopper GPU ------------------------------------------------------------------------------------


def hold(out, lse, q, k, v, **options):
    """Compare one dense sequence to float64, by the tolerance rule."""
    want, want_lse = reference.attend_one(q, k, v, dtype=torch.float64, **options)
    plain, _ = reference.attend_one(q, k, v, dtype=None, **options)
    single = reference.attend_one(q.float(), k.float(), v.float(), dtype=torch.float32, **options)[1]
    testing.assert_close(out, want, plain)
    testing.assert_close(lse, want_lse, single, torch.float32, "lse")


class TestOnHopper:
    pytestmark = needs_hopper

    @pytest.mark.parametrize("dtype", HALF, ids=str)
    def test_the_hostile_table(self, dtype):
        taken = 0
        for case in testing.cases(ON):
            inputs = case.build(dtype=dtype, device=ON)
            options = {name: x for name, x in inputs.kwargs.items() if name != "causal"}
            why = flash_hopper.refusal(inputs.q, inputs.k_cache, inputs.v_cache, paged=True, **options)
            del inputs
            if why is None:
                before = runtime.launches["flash_hopper_kernel"]
                testing.check_attention(flash.attention, case, dtype=dtype, device=ON, impl="hopper")
                assert runtime.launches["flash_hopper_kernel"] > before or sum(case.q_lens) == 0
                taken += 1
        assert taken > 20

    @pytest.mark.parametrize("dim", [40, 64, 96, 128, 192, 256])
    @pytest.mark.parametrize("heads", [(6, 6), (6, 2), (5, 1), (14, 2)], ids=str)
    def test_dense_shapes(self, dim, heads):
        for (q_len, kv_len), causal in itertools.product(
            [(1, 1), (239, 1), (799, 3), (113, 203), (1023, 1024), (3, 799)], (True, False)
        ):
            q, k, v = tensors((1, q_len, heads[0], dim), (1, kv_len, heads[1], dim), device=ON)
            out = torch.full_like(q, float("nan"))
            _, lse = flash.flash_attn_func(q, k, v, causal=causal, impl="hopper", out=out, return_lse=True)
            hold(out[0], lse[0], q[0], k[0], v[0], causal=causal)

    def test_options(self):
        for options in (
            {"causal": True, "window_size": (100, -1)}, {"causal": False, "window_size": (64, 30)},
            {"causal": True, "window_size": (0, 0)}, {"causal": True, "softcap": 5.0}, {"causal": True, "sinks": True},
            {"causal": True, "softmax_scale": 0.3}, {"causal": False, "window_size": (-1, 40), "softcap": 20.0},
        ):  # fmt: skip
            q, k, v = tensors((1, 333, 8, 128), (1, 700, 2, 128), device=ON)
            given = dict(options)
            if given.pop("sinks", False):
                given["sinks"] = torch.randn(8, device=ON)
            out, lse = flash.flash_attn_func(q, k, v, impl="hopper", return_lse=True, **given)
            hold(out[0], lse[0], q[0], k[0], v[0], **given)

    @pytest.mark.parametrize("dim", [64, 128, 256])
    def test_a_maximum_that_keeps_growing(self, dim):
        """The kernel moves its running maximum, and rescales, only where scores have grown 256-fold: make them grow in
        some rows and not in others, and from block to block, last to first, which is its order."""
        q, k, v = tensors((1, 200, 8, dim), (1, 1500, 2, dim), device=ON)
        q[:, ::3] *= 0.01  # these rows never rescale
        k *= torch.linspace(40, 0.1, 1500, device=ON)[:, None, None]
        out, lse = flash.flash_attn_func(q, k, v, causal=False, impl="hopper", return_lse=True)
        hold(out[0], lse[0], q[0], k[0], v[0], causal=False)

    def test_an_output_that_the_copy_engine_cannot_write(self):
        q, k, v = tensors((2, 300, 8, 128), (2, 310, 2, 128), device=ON)
        want = flash.flash_attn_func(q, k, v, causal=True, impl="hopper")
        wider = torch.full((2, 300, 8, 129), 7.0, dtype=q.dtype, device=ON)
        flash.flash_attn_func(q, k, v, causal=True, impl="hopper", out=wider[..., :128])
        assert torch.equal(wider[..., :128], want)
        assert (wider[..., 128] == 7.0).all()

    def test_strided_inputs_and_values_of_another_size(self):
        q, k, v = tensors((2, 8, 300, 64), (2, 2, 310, 64), device=ON, v_dim=128)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, L, D] in memory
        out, lse = flash.flash_attn_func(q, k, v, causal=True, impl="hopper", return_lse=True)
        for b in range(2):
            hold(out[b], lse[b], q[b], k[b], v[b], causal=True)

    def test_a_neighbour_of_nan_does_not_show(self):
        q, k, v = tensors((300, 8, 128), (300, 2, 128), device=ON)
        cu = torch.tensor([0, 100, 200, 300], dtype=torch.int32, device=ON)
        clean = flash.flash_attn_varlen_func(q, k, v, cu, cu, causal=True, impl="hopper")
        k[100:200], v[100:200] = float("nan"), float("inf")
        out = flash.flash_attn_varlen_func(q, k, v, cu, cu, causal=True, impl="hopper")
        assert torch.equal(out[:100], clean[:100])
        assert torch.equal(out[200:], clean[200:])

    def test_dense_ragged_and_paged_agree_to_the_bit(self):
        for page, dim in ((16, 128), (64, 64), (8, 256), (256, 128)):
            q, k, v = tensors((1, 1000, 8, dim), (1, 1000, 2, dim), device=ON)
            dense = flash.flash_attn_func(q, k, v, causal=True, impl="hopper")[0]
            cu = torch.tensor([0, 1000], dtype=torch.int32, device=ON)
            ragged = flash.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, causal=True, impl="hopper")
            assert torch.equal(ragged, dense)
            blocks = -(-1000 // page)
            table = torch.randperm(blocks, device=ON).int()
            caches = []
            for x in (k, v):
                padded = torch.nn.functional.pad(x[0], (0, 0, 0, 0, 0, blocks * page - 1000), value=float("nan"))
                cache = torch.empty(blocks, page, 2, dim, dtype=x.dtype, device=ON)
                cache[table.long()] = padded.view(blocks, page, 2, dim)
                caches.append(cache)
            used = torch.tensor([1000], dtype=torch.int32, device=ON)
            lengths = {"cu_seqlens_q": cu, "seqused_k": used}
            paged = flash.attention(q[0], *caches, block_table=table[None], **lengths, impl="hopper")
            assert torch.equal(paged, dense)

    def test_a_launch_repeated_100_times_is_equal_to_the_bit(self):
        q, k, v = tensors((3, 515, 8, 128), (3, 2000, 2, 128), device=ON)
        first = flash.flash_attn_func(q, k, v, causal=True, impl="hopper")
        for _ in range(100):
            out = torch.full_like(q, float("nan"))
            flash.flash_attn_func(q, k, v, causal=True, impl="hopper", out=out)
            assert torch.equal(out, first)

    def test_two_streams_and_a_graph_do_not_share_a_counter(self):
        q, k, v = tensors((8, 777, 8, 128), (8, 777, 2, 128), device=ON)
        want = flash.flash_attn_func(q, k, v, causal=True, impl="hopper")
        streams = [torch.cuda.Stream() for _ in range(2)]
        outs = [torch.full_like(q, float("nan")) for _ in streams]
        torch.cuda.synchronize()
        for _ in range(20):
            for stream, out in zip(streams, outs, strict=True):
                with torch.cuda.stream(stream):
                    flash.flash_attn_func(q, k, v, causal=True, impl="hopper", out=out)
        torch.cuda.synchronize()
        assert all(torch.equal(out, want) for out in outs)
        graph, out = torch.cuda.CUDAGraph(), torch.empty_like(q)
        with torch.cuda.graph(graph):
            flash.flash_attn_func(q, k, v, causal=True, impl="hopper", out=out)
        for _ in range(3):
            out.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, want)
