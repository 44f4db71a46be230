"""Benchmarks: the record format, the table, and that each one runs. Nothing here asserts a time."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import json
import math
import os
import re
import signal
import sys
import tempfile
import types
from dataclasses import asdict, replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvlab import bench, flash_decoding, paged, reference, runtime, speculative
from kvlab import config as configs
from kvlab.batch import Batch
from kvlab.bench import (
    FIELDS,
    Record,
    Session,
    _peers,
    _timing,
    decode,
    load,
    measure,
    names,
    prefill,
    race,
    rotations,
    save,
    scheduler,
    table,
)
from kvlab.bench.__main__ import main
from kvlab.bench._captured import CapturedDecoder, Size
from kvlab.bench._rounds import Pass, Rounds
from kvlab.bench._session import commit
from kvlab.bench.speculative import matching_alpha
from kvlab.generate import generate
from kvlab.model import Decoder
from kvlab.paged import BlockManager, BlockPool
from kvlab.sampling import SamplingParams
from kvlab.scheduler import Request, RooflineCost, Scheduler, StepShape, fit_records

PROMISED = "run bench impl version shape dtype value unit ms spread error device driver torch triton date commit"

WORDS = "run bench impl dtype unit device torch date commit".split()  # noqa: SIM905


@pytest.fixture
def session() -> Session:
    return Session("cpu", quick=True)


def example(session: Session, **changes) -> Record:
    record = session.record("some.part", "impl", 1.5, "GB/s", shape={"B": 2, "L": 128}, dtype=torch.bfloat16)
    return replace(record, **changes)


def test_a_record_has_the_promised_fields(session):
    assert " ".join(FIELDS) == PROMISED
    record = example(session)
    assert record.dtype == "bfloat16"
    assert record.torch == torch.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", record.date)
    assert record.device
    assert record.driver is None


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "3", True, 10**400])
def test_a_record_needs_a_finite_number(session, value):
    with pytest.raises(ValueError, match="value"):
        example(session, value=value)


@pytest.mark.parametrize("field", [*WORDS, "version", "driver", "triton"])
@pytest.mark.parametrize("bad", ["", 5, None])
def test_a_record_needs_its_words(session, field, bad):
    if bad is None and field not in WORDS:
        assert getattr(example(session, **{field: None}), field) is None
        return
    with pytest.raises(ValueError, match=field):
        example(session, **{field: bad})


@pytest.mark.parametrize("field", ["ms", "spread", "error"])
@pytest.mark.parametrize("bad", ["x", math.nan, math.inf, -1, True, 10**400])
def test_a_record_refuses_what_is_no_time(session, field, bad):
    with pytest.raises(ValueError, match=field):
        example(session, **{field: bad})


@pytest.mark.parametrize("shape", [None, [1], {1: 2}, {"B": None}, {"B": math.nan}, {"B": True}, {"B": [1]}])
def test_a_record_refuses_what_is_no_shape(session, shape):
    with pytest.raises(ValueError, match="shape"):
        example(session, shape=shape)


@pytest.mark.parametrize("changes", [{"ms": math.nan}, {"ms": "fast"}, {"value": 10**400}, {"shape": None}])
def test_load_names_the_file_and_the_entry(session, tmp_path, changes):
    path = tmp_path / "records.json"
    path.write_text(json.dumps([asdict(example(session)), {**asdict(example(session)), **changes}]))
    with pytest.raises(ValueError, match=rf"records\.json: entry 1: {next(iter(changes))}"):
        load(path)


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_load_names_a_file_that_is_no_json(tmp_path, text):
    (tmp_path / "records.json").write_text(text)
    with pytest.raises(ValueError, match=r"records\.json is not valid JSON"):
        load(tmp_path / "records.json")


def test_records_survive_a_file(session, tmp_path):
    path = tmp_path / "new folder" / "records.json"
    records = [example(session), example(session, value=3, ms=0.25, spread=0.1, error=1e-3)]
    save(records, path)
    assert load(path) == records
    assert [asdict(r) for r in records] == json.loads(path.read_text())
    save([], path)
    assert load(path) == []


def test_a_file_of_something_else_is_refused(session, tmp_path):
    path = tmp_path / "records.json"
    entry = asdict(example(session))
    del entry["commit"]
    path.write_text(json.dumps([asdict(example(session)), {**entry, "color": "red"}]))
    with pytest.raises(ValueError, match=r"entry 1 .*missing \['commit'\], unknown \['color'\]"):
        load(path)
    path.write_text('{"a": 1}')
    with pytest.raises(ValueError, match="holds a dict"):
        load(path)


def test_the_table_shows_every_record_in_aligned_columns(session):
    records = [example(session, impl="short"), example(session, impl="a longer name", value=123456.0, error=0.001)]
    lines = table(records).splitlines()
    assert len(lines) == 4
    assert "B=2 L=128" in lines[1]
    assert "123456" in lines[2]
    assert len({line.index("GB/s") for line in lines[1:3]}) == 1
    assert records[0].device in lines[3]
    assert table([]) == "(no records)"


def test_records_of_one_session_share_a_run(session):
    assert example(session).run == example(session).run != example(Session("cpu")).run


def test_the_commit_can_be_given(monkeypatch):
    monkeypatch.setenv("KVLAB_COMMIT", "abc123")
    assert commit() == "abc123"
    monkeypatch.delenv("KVLAB_COMMIT")
    assert commit() == "unknown" or re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", commit())


def test_measure_counts_its_calls_and_gives_their_median():
    calls = []
    timing = measure(calls.append, device="cpu", seconds=0, min_count=7)
    assert timing.count == 7
    assert calls == list(range(8))  # one warm call, then seven with their own numbers, to rotate buffers by
    assert timing.ms > 0
    assert timing.spread >= 0
    assert timing.seconds == timing.ms / 1e3
    assert measure(calls.append, device="cpu", seconds=60, max_count=9).count == 9


def test_measure_and_rotations_refuse_bad_arguments():
    with pytest.raises(ValueError, match="min_count"):
        measure(print, device="cpu", min_count=0)
    with pytest.raises(ValueError, match="flush"):
        measure(print, device="cpu", graph=2, flush=True)
    for bad in (math.nan, math.inf, -1, "1", True):
        with pytest.raises(ValueError, match="seconds"):
            measure(print, device="cpu", seconds=bad)
    for name in ("min_count", "max_count", "graph"):
        for bad in (math.nan, 7.5, -1, True):
            with pytest.raises(ValueError, match=name):
                measure(print, device="cpu", **{name: bad})
    for bad in (0, -1, math.nan, math.inf, 2.5, True):
        with pytest.raises(ValueError, match="nbytes"):
            rotations(bad, "cpu")
    assert rotations(1 << 40, "cpu") == 2
    for nbytes in (1000, 1 << 20, 50_000_000):
        assert rotations(nbytes, "cpu") * nbytes >= 5 * bench.l2_bytes("cpu")


def test_a_race_lets_all_take_turns_in_changing_order():
    calls: list[tuple[str, int]] = []
    names_ = ["a", "b", "c"]
    functions = {name: lambda i, name=name: calls.append((name, i)) for name in names_}
    timings = race(functions, device="cpu", seconds=0, rounds=6)
    assert list(timings) == names_
    assert all(t.count == 6 and t.ms > 0 and t.spread >= 0 for t in timings.values())
    for name in names_:
        numbers = [i for who, i in calls if who == name]
        assert numbers == list(range(len(numbers)))  # to rotate buffers by
    turns = [who for who, _ in calls[6:]]  # each was called twice before the first round
    rounds = [turns[4 * r + 1 : 4 * r + 4] for r in range(6)]  # a call that does not count, then one of each
    assert all(sorted(order) == names_ for order in rounds)
    assert len({tuple(order) for order in rounds}) > 1


def test_a_race_gives_the_time_of_one_call(monkeypatch):
    now, calls = [0.0], {"a": 0, "b": 0}

    def work(name: str, seconds: float, i: int) -> None:
        now[0] += seconds
        calls[name] += 1

    monkeypatch.setattr("kvlab.bench._timing.time.perf_counter", lambda: now[0])
    functions = {"a": functools.partial(work, "a", 0.002), "b": functools.partial(work, "b", 0.004)}
    timings = race(functions, device="cpu", seconds=0.2, rounds=10)
    assert timings["a"].ms == pytest.approx(2)
    assert timings["b"].ms == pytest.approx(4)
    assert timings["a"].spread == pytest.approx(0, abs=1e-9)
    assert calls["a"] > calls["b"] > 2 * 10  # bursts of the same length in time


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"functions": {}}, "functions"), ({"rounds": 0}, "rounds"), ({"rounds": 2.5}, "rounds"),
        ({"graph": -1}, "graph"), ({"seconds": math.nan}, "seconds"), ({"seconds": -1}, "seconds"),
    ],
)  # fmt: skip
def test_a_race_refuses_bad_arguments(changes, match):
    with pytest.raises(ValueError, match=match):
        race(**{"functions": {"a": print}, "device": "cpu", **changes})


def test_what_a_call_has_done_is_taken_back_before_the_next():
    calls: list[object] = []
    assert measure(calls.append, device="cpu", seconds=0, min_count=3, reset=lambda: calls.append("reset")).count == 3
    assert calls == ["reset", 0, "reset", 1, "reset", 2, "reset", 3]
    with pytest.raises(ValueError, match="reset is given"):
        measure(print, device="cuda", reset=print)


def test_a_race_on_a_gpu_flushes_the_l2_and_replays_graphs(monkeypatch):
    """The part of a race that needs a GPU, with the GPU's events and graphs replaced by a log."""
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def elapsed_time(self, end: Event) -> float:
            return 6.0

    class Graph:
        def replay(self) -> None:
            log.append("replay")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda captured: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    trash = types.SimpleNamespace(zero_=lambda: log.append("flush"))
    for graph, unit in ((0, "call"), (3, "replay")):
        log.clear()

        def start(fn, graph=graph):
            return _timing._EventRunner(fn, graph, trash)

        functions = {"a": lambda i: log.append("call")}
        timing = _timing._race(functions, start, torch.cuda.synchronize, seconds=0.024, rounds=2, seed=0)["a"]
        assert timing.ms == 6.0 / 2 / max(graph, 1)  # 24 ms in 2 rounds are bursts of 2 units of 6 ms
        warm = ["call"] * 3 + ["wait"] + ["call"] * graph + [unit, "flush", "event", unit, "event", "wait"]
        assert log == warm + [unit, "flush", "event", unit, unit, "event", "wait"] * 2


def test_the_benchmarks_are_the_files_beside():
    assert {"ceilings", "decode", "naive", "prefill", "roofline", "speculative"} <= set(names())
    assert not any(name.startswith("_") for name in names())


@functools.cache
def quick_run(name: str) -> tuple[list[Record], str]:
    """The records and the printed table of ``python -m kvlab.bench NAME --quick`` on the CPU."""
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
        assert main([name, "--quick", "--device", "cpu", "--out", f"{folder}/records.json"]) == 0
        return load(f"{folder}/records.json"), printed.getvalue()


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("ceilings", "copy read matmul"),
        ("naive", "step total"),
        ("roofline", "linear decode prefill"),
        ("prefill", "dense ragged paged paged_vs_gather ceiling materialised"),
        ("decode", "read table contiguous splits naive launches"),
        ("speculative", "acceptance position identical verify draft speedup"),
    ],
)
def test_each_benchmark_runs_and_writes_what_it_prints(name, parts):
    records, printed = quick_run(name)
    assert {r.bench for r in records} == {f"{name}.{part}" for part in parts.split()}
    assert len({r.run for r in records}) == 1
    for r in records:
        assert r.value > 0
        assert r.bench in printed
        assert r.impl in printed
        assert r.error is None or 0 <= r.error < 1e-5  # float32 against float64
    keys = [(r.bench, r.impl, r.unit, tuple(r.shape.items()), r.dtype) for r in records]
    assert len(set(keys)) == len(keys)  # a chapter finds each number by these


def test_both_kinds_of_read_kernel_are_measured_and_right():
    if not runtime.can_launch("cpu"):
        pytest.skip("no Triton, or a GPU's: its kernels do not run on the CPU")
    records = [r for r in quick_run("ceilings")[0] if "triton" in r.impl]
    assert {r.impl.split()[1] for r in records} == {"blocks", "strided"}
    assert all(r.error < 1e-6 for r in records)
    assert runtime.launches["read_blocks"] > 0
    assert runtime.launches["read_strided"] > 0


def test_a_recorded_point_follows_from_its_parts():
    for record in quick_run("roofline")[0]:
        amount = record.shape["flops"] / 1e12 if record.unit == "TFLOP/s" else record.shape["bytes"] / 1e9
        assert record.value == pytest.approx(amount / (record.ms / 1e3))


def test_an_unknown_name_lists_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        main(["nonsense"])
    assert "ceilings" in capsys.readouterr().err


@pytest.mark.parametrize(("sent", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_an_interrupted_run_keeps_what_it_has(tmp_path, monkeypatch, capsys, sent, error):
    from kvlab.bench import naive

    def run(session):
        yield session.record("naive.step", "impl", 1.0, "ms", shape={}, dtype="float32")
        assert len(load(tmp_path / "r.json")) == 1, "nothing is kept of a run that is killed"
        os.kill(os.getpid(), sent)
        yield session.record("naive.step", "impl", 2.0, "ms", shape={}, dtype="float32")

    monkeypatch.setattr(naive, "run", run)
    before = signal.getsignal(signal.SIGTERM)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what runs behind it ignore this
    try:
        with pytest.raises(error):
            main(["naive", "--device", "cpu", "--out", str(tmp_path / "r.json")])
    finally:
        signal.signal(signal.SIGINT, interrupt)
    assert 1 <= len(load(tmp_path / "r.json")) <= 2
    assert signal.getsignal(signal.SIGTERM) is before


def test_counted_work_is_that_of_the_matrix_products():
    layer = torch.nn.Linear(6, 4, bias=False)
    other = torch.nn.Linear(4, 2, bias=False)
    with torch.no_grad(), bench.CountWork(layer) as work:
        other(layer(torch.randn(3, 6)).relu())
        layer(torch.randn(1, 6))
    assert work.flops == 2 * (3 * 6 * 4 + 3 * 4 * 2 + 1 * 6 * 4)
    assert work.weight_bytes == layer.weight.nbytes


# --- prefill ---------------------------------------------------------------------------------------------------------


def sequences(lengths: list[int], heads: int = 4, kv_heads: int = 2, size: int = 16, seed: int = 0):
    """q, k, v end to end, and where each sequence starts."""
    rng = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(sum(lengths), h, size, generator=rng) for h in (heads, kv_heads, kv_heads))
    return (q, k, v), [0, *torch.tensor(lengths).cumsum(0).tolist()]


def attended(q, k, v, starts: list[int], causal: bool = True) -> torch.Tensor:
    pairs = [slice(a, b) for a, b in itertools.pairwise(starts)]
    return torch.cat([reference.attend_one(q[s], k[s], v[s], causal=causal, dtype=None)[0] for s in pairs])


def test_prefill_measures_every_implementation_that_can_run_here():
    records = quick_run("prefill")[0]
    ours = {r.impl for r in records if r.bench == "prefill.dense"}
    assert {"kvlab torch", "materialised (torch)"} <= ours
    if runtime.can_launch("cpu"):
        assert "kvlab triton" in ours
        assert runtime.launches["flash_attention_kernel"] > 0
    assert all(r.error is not None for r in records if r.impl.startswith("kvlab"))
    assert {r.shape["causal"] for r in records if r.bench == "prefill.dense"} == {0, 1}


def test_prefill_counts_the_pairs_that_are_seen():
    for r in quick_run("prefill")[0]:
        if r.bench == "prefill.dense":
            seen = int(reference.visible_keys(r.shape["L"], r.shape["L"], causal=bool(r.shape["causal"])).sum())
            flops = 4 * r.shape["B"] * r.shape["H"] * seen * r.shape["D"]
            assert r.value == pytest.approx(flops / (r.ms / 1e3) / 1e12)
        if r.bench == "prefill.paged_vs_gather":
            seen = int(reference.visible_keys(r.shape["q_len"], r.shape["L"]).sum())
            assert r.shape["flops"] == 4 * r.shape["B"] * r.shape["H"] * seen * r.shape["D"]


def test_gathering_is_predicted_to_move_keys_and_values_three_times():
    records = [r for r in quick_run("prefill")[0] if r.bench == "prefill.paged_vs_gather"]
    by = {(r.impl, r.shape["B"], r.shape["q_len"]): r for r in records}
    copy = next(r.value for r in quick_run("prefill")[0] if r.impl == "copy")
    for (impl, b, q_len), r in by.items():
        s = r.shape
        kv, qo = 2 * 4 * b * s["L"] * s["H_kv"] * s["D"], 2 * 4 * b * q_len * s["H"] * s["D"]
        assert s["bytes"] == qo + kv * (3 if impl.endswith("gather then dense") else 1)
        if impl == "predicted, gather then dense":
            more = r.value - by["predicted, through the table", b, q_len].value
            assert more == pytest.approx(2 * kv / copy / 1e6)
            assert r.ms is None


def test_one_part_can_be_run_alone(capsys):
    assert main(["prefill", "--quick", "--device", "cpu", "--only", "ragged,materialised"]) == 0
    printed = capsys.readouterr().out
    assert "prefill.ragged" in printed
    assert "prefill.dense" not in printed
    for arguments in (["prefill", "--only", "ragged,sideways"], ["naive", "--only", "step"]):
        with pytest.raises(SystemExit):
            main(arguments)
        assert f"--only {arguments[2].split(',')[-1]}: {arguments[0]} has the parts" in capsys.readouterr().err


def test_the_ragged_lengths_are_lognormal_and_add_up():
    each = prefill.lengths(64, 32768)
    assert each == prefill.lengths(64, 32768)
    assert len(each) == 64
    assert sum(each) == 32768
    assert min(each) >= 1
    logs = torch.tensor(each).log()
    assert 0.7 < float(logs.std()) < 1.3
    assert prefill.lengths(3, 3) == [1, 1, 1]
    for count, total in ((4, 3), (0, 3)):
        with pytest.raises(ValueError, match="token"):
            prefill.lengths(count, total)


def test_pages_hold_what_they_were_given():
    k, v = torch.randn(2, 2, 12, 3, 5).unbind()
    k_cache, v_cache, table = prefill.into_pages(k, v, 4)
    used = torch.tensor([12, 12], dtype=torch.int32)
    assert torch.equal(paged.gather(k_cache, table, used), k)
    assert torch.equal(paged.gather(v_cache, table, used), v)
    assert k_cache.isnan().any()
    with pytest.raises(ValueError, match="multiple of block_size 5"):
        prefill.into_pages(k, v, 5)


@pytest.mark.parametrize("causal", [True, False])
def test_materialised_attention_is_attention(causal):
    qkv, starts = sequences([20, 20])
    dense = [x.view(2, 20, *x.shape[1:]) for x in qkv]
    out = prefill.materialised(*dense, causal)
    torch.testing.assert_close(out.flatten(0, 1), attended(*qkv, starts, causal))


def test_expected_rows_notice_what_is_wrong():
    lengths = [50, 1, 90, 30]
    qkv, starts = sequences(lengths)
    right = attended(*qkv, starts)
    expected = prefill.Expected(qkv, starts, starts, causal=True)
    assert expected.error(right) < 1e-6
    places = {"last row": 170, "first row": 0, "longest, middle": 51 + 45, "shortest": 50}
    for place, row in places.items():
        wrong = right.clone()
        wrong[row] = wrong[row].roll(1, 0)
        assert expected.error(wrong) > 0.05, place
    wrong = right.clone()
    wrong[49, 0, 0] = math.nan
    assert expected.error(wrong) == math.inf
    assert prefill.Expected(qkv, starts, starts, causal=False).error(right) > 0.05


def test_an_implementation_that_is_wrong_or_raises_is_left_out(session, capsys):
    (q, k, v), starts = sequences([24])
    expected = prefill.Expected((q, k, v), starts, starts, causal=True)
    right = attended(q, k, v, starts)

    def broken() -> torch.Tensor:
        raise NotImplementedError("no such kernel")

    runs = {
        "right": lambda: right,
        "wrong": lambda: right * 1.01,
        "unwritten": lambda: right * math.nan,
        "broken": broken,
    }
    kept = [
        e.name
        for name, run in runs.items()
        for e in prefill._admit(session, _peers.Peer(name, "1"), lambda run=run: _peers.Call(run, "how"), expected, q)
    ]
    assert kept == ["right"]
    said = capsys.readouterr().err
    assert "wrong: skipped, its output is off by 0.01" in said
    assert "unwritten: skipped" in said
    assert "broken: skipped, NotImplementedError: no such kernel" in said


def fake_flash_attention_3() -> types.ModuleType:
    """A module with FlashAttention-3's interface, computed by the reference."""
    module = types.ModuleType("flash_attn_interface")

    def flash_attn_func(q, k, v, causal=False):
        starts = range(0, (len(q) + 1) * q.shape[1], q.shape[1])
        return attended(*(x.flatten(0, 1) for x in (q, k, v)), starts, causal).view(q.shape), None

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False):
        assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
        return attended(q, k, v, cu_seqlens_q.tolist(), causal)

    def flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=None, page_table=None, causal=False):
        starts = torch.arange(len(q) + 1, dtype=torch.int32) * q.shape[1]
        out = reference.attention(
            q.flatten(0, 1), k_cache, v_cache, block_table=page_table, cu_seqlens_q=starts, seqused_k=cache_seqlens,
            causal=causal, dtype=None,
        )  # fmt: skip
        return out.view(q.shape), None

    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


def fake_flashinfer() -> types.ModuleType:
    """A module with FlashInfer's two wrappers, computed by the reference from what was planned."""
    module = types.ModuleType("flashinfer")
    module.__version__ = "0.6.4"

    class Wrapper:
        def __init__(self, float_workspace_buffer, kv_layout="NHD", backend="auto", use_cuda_graph=False, **buffers):
            assert kv_layout == "NHD"
            assert use_cuda_graph == bool(buffers)
            self._backend = "fa3"

    class Ragged(Wrapper):
        def plan(
            self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, *, causal, q_data_type, kv_data_type
        ):
            self.planned = (qo_indptr.tolist(), causal, num_qo_heads, num_kv_heads, head_dim_qk)

        def run(self, q, k, v):
            starts, causal, *sizes = self.planned
            assert sizes == [q.shape[1], k.shape[1], q.shape[2]]
            return attended(q, k, v, starts, causal)

    class Paged(Wrapper):
        def plan(
            self,
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            page_size,
            *,
            causal,
            q_data_type,
            kv_data_type,
        ):
            table, used = paged.from_flashinfer(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
            self.planned = (table, used, qo_indptr, causal, num_qo_heads, num_kv_heads, head_dim_qk, page_size)

        def run(self, q, caches):
            table, used, starts, causal, *sizes = self.planned
            assert sizes == [q.shape[1], caches[0].shape[2], q.shape[2], caches[0].shape[1]]
            return reference.attention(
                q, *caches, block_table=table, cu_seqlens_q=starts, seqused_k=used, causal=causal, dtype=None
            )

    class Decode(Paged):
        def __init__(self, *args, use_tensor_cores=False, **kwargs):
            assert use_tensor_cores
            names = "paged_kv_indptr_buffer paged_kv_indices_buffer paged_kv_last_page_len_buffer"
            assert names.split() == [name for name in kwargs if name != "use_cuda_graph"]
            super().__init__(*args, **kwargs)

        def plan(self, indptr, *pages_and_sizes, q_data_type, kv_data_type):
            starts = torch.arange(len(indptr), dtype=torch.int32)
            super().plan(
                starts, indptr, *pages_and_sizes, causal=True, q_data_type=q_data_type, kv_data_type=kv_data_type
            )

    module.BatchDecodeWithPagedKVCacheWrapper = Decode
    module.BatchPrefillWithRaggedKVCacheWrapper, module.BatchPrefillWithPagedKVCacheWrapper = Ragged, Paged
    return module


@pytest.fixture
def peers(monkeypatch) -> list[_peers.Peer]:
    """Fakes of the libraries that need a GPU, through the adapters that the real ones go through."""
    for name in _peers._FA3:
        monkeypatch.setitem(sys.modules, name, None)  # not importable
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fake_flash_attention_3())
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer())
    return [*_peers.flash_attention_3(print), *_peers.flashinfer(print)]


def test_the_adapters_hand_over_what_each_library_expects(peers):
    assert [p.name for p in peers] == ["FlashAttention-3", "FlashInfer"]
    qkv, starts = sequences([24, 24])
    right = attended(*qkv, starts)
    q, k, v = (x.view(2, 24, *x.shape[1:]) for x in qkv)
    for peer in peers:
        call = peer.dense(q, k, v, True)
        torch.testing.assert_close(call.run(), right.view(q.shape))
        assert call.how == ("backend fa3" if peer.name == "FlashInfer" else "")
        torch.testing.assert_close(peer.dense(q, k, v, False).run(), attended(*qkv, starts, False).view(q.shape))
        k_cache, v_cache, table = prefill.into_pages(k, v, 8)
        used = torch.tensor([24, 24], dtype=torch.int32)
        torch.testing.assert_close(peer.paged(q, k_cache, v_cache, table, used).run(), right.view(q.shape))
        ragged, places = sequences([5, 1, 30])
        out = peer.ragged(*ragged, torch.tensor(places, dtype=torch.int32), 30).run()
        torch.testing.assert_close(out, attended(*ragged, places))


def test_peers_join_the_race_and_the_ratios_are_printed(peers, monkeypatch, capsys):
    monkeypatch.setattr(prefill, "find", lambda device, note: [replace(p, sizes=None) for p in peers])
    assert main(["prefill", "--quick", "--peers", "--device", "cpu", "--only", "dense,ragged,paged"]) == 0
    printed = capsys.readouterr().out
    table_, _, ratios = printed.partition("commit ")
    assert "FlashInfer" in table_
    assert re.search(r"FlashAttention-3, dense .* 1\.000 of FlashAttention-3", ratios)
    assert len(re.findall(r"kvlab torch .* of FlashAttention-3", ratios)) == 2 + 1 + 1


def test_torch_is_a_peer_on_a_cpu(session):
    (peer,) = _peers.find(torch.device("cpu"), print)
    qkv, starts = sequences([24, 24])
    dense = [x.view(2, 24, *x.shape[1:]) for x in qkv]
    torch.testing.assert_close(peer.dense(*dense, True).run().flatten(0, 1), attended(*qkv, starts))


def test_a_peer_that_does_not_load_is_named(monkeypatch):
    said: list[str] = []
    for name in _peers._FA3:
        monkeypatch.setitem(sys.modules, name, None)
    assert _peers.flash_attention_3(said.append) == []
    assert "none of fa3_fwd_interface" in said[-1]

    def load(name):
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(_peers.importlib, "import_module", load)
    assert _peers.flashinfer(said.append) == []
    assert "libcudart.so.13" in said[-2]


def test_ratios_are_formed_within_a_race(session):
    def speed(impl: str, value: float, part: str = "dense", **shape: int) -> Record:
        return session.record(f"prefill.{part}", impl, value, "TFLOP/s", shape={"B": 1, **shape}, dtype="bfloat16")

    records = [
        speed("kvlab hopper", 660.0), speed("FlashAttention-3", 600.0), speed("FlashAttention-3 (other)", 660.0),
        speed("kvlab hopper", 50.0, B=2), speed("FlashAttention-3", 100.0, B=2),
        speed("kvlab hopper", 1.0, B=3),
        speed("kvlab hopper", 90.0, "paged"), speed("FlashAttention-3", 80.0, "paged"),
        speed("FlashAttention-3, dense", 100.0, "paged"),
        speed("matmul", 700.0, "ceiling"),
    ]  # fmt: skip
    found = [round(ratio, 3) for _, ratio in prefill.ratios(records)]
    assert found == [1.0, 0.909, 1.0, 0.5, 1.0, 0.9, 0.8, 1.0]
    assert "0.900 of FlashAttention-3" in prefill.summary(records)
    assert prefill.summary(records[5:6]) == ""


# --- decode ----------------------------------------------------------------------------------------------------------


def test_decode_measures_every_implementation_that_can_run_here():
    records = quick_run("decode")[0]
    for part in ("table", "contiguous", "splits", "naive"):
        impls = {r.impl for r in records if r.bench == f"decode.{part}"}
        assert "kvlab torch" in impls
        assert ("kvlab triton" in impls) == runtime.can_launch("cpu")
    assert {"naive (torch)", "naive, heads copied (torch)"} <= {r.impl for r in records if r.bench == "decode.naive"}
    assert {r.shape["num_splits"] for r in records if r.bench == "decode.splits"} == {0, 1, 3}
    assert {r.impl.partition(", ")[2] for r in records if r.bench == "decode.launches"} == {
        "plain launches",
        "wall clock",
    }
    assert all(r.error is not None for r in records if r.bench != "decode.read")
    if runtime.can_launch("cpu"):
        assert runtime.launches["flash_decoding_kernel"] > 0


def test_naive_decodes_are_attention():
    from kvlab import reference
    from kvlab.bench import decode

    q, (k, v) = torch.randn(2, 1, 6, 16), torch.randn(2, 2, 3, 9, 16)
    want = torch.cat([reference.attend_one(q[b], k[b].transpose(0, 1), v[b].transpose(0, 1))[0][None] for b in (0, 1)])
    for way in (decode.naive, decode.copying):
        torch.testing.assert_close(way(q, k, v), want.float())


@pytest.mark.parametrize(
    ("rule", "programs", "length", "splits"),
    [
        ("flash_attention", 8, 131072, 15),  # 120 programs of 132
        ("flash_attention", 106, 131072, 1),  # 80 % have work
        ("flash_attention", 8, 512, 1),  # four blocks of 128
        ("flashinfer", 8, 131072, 33),
        ("flashinfer", 8, 1024, 8),  # no chunk is shorter than 128
        ("flashinfer", 512, 4096, 1),
        ("flex_decoding", 8, 1, 32),
        ("flex_decoding", 512, 131072, 1),
    ],
)
def test_published_rules(rule, programs, length, splits):
    from kvlab.bench import _split_rules

    assert getattr(_split_rules, rule)(programs, length, 132) == splits


def test_decode_counts_live_keys_and_values():
    for r in quick_run("decode")[0]:
        if r.unit == "GB/s":
            assert r.value == pytest.approx(r.shape["bytes"] / (r.ms / 1e3) / 1e9)
        if r.bench in ("decode.table", "decode.splits") and "sequences" not in r.shape:
            keys = r.shape["B"] * r.shape["L"] * r.shape["H_kv"]
            assert r.shape["bytes"] == 2 * 4 * keys * r.shape["D"]
    lengths = decode.ragged_lengths(64, 131072)
    assert decode.Work(64, 131072, lengths=lengths).nbytes(2) == 2 * 2 * sum(lengths) * 8 * 128


def test_the_ragged_lengths_are_those_that_were_promised():
    lengths = decode.ragged_lengths(64, 131072)
    assert lengths == decode.ragged_lengths(64, 131072)
    assert (len(lengths), max(lengths)) == (64, 131072)
    assert min(lengths) < 10000
    for count, longest in ((0, 5), (5, 0)):
        with pytest.raises(ValueError, match=f"count is {count}"):
            decode.ragged_lengths(count, longest)


def test_the_rows_of_the_table_are_those_of_the_goals():
    gpu = types.SimpleNamespace(quick=False, on_gpu=True)
    works = decode.works(gpu)
    assert [(w.batch, w.length) for w in works[:7]] == [
        (1, 4096), (8, 4096), (1, 32768), (1, 131072), (4, 32768), (32, 32768), (128, 2048),
    ]  # fmt: skip
    assert {(w.heads, w.kv_heads) for w in works} == {(32, 8), (32, 1), (28, 4)}
    assert {w.block_size for w in works} == {1, 16, 64, 256}
    assert {w.q_len for w in works} == {1, 5}
    assert len({tuple(w.shape(2).items()) for w in works}) == len(works) == 16


def decode_inputs(session, **changes):
    return decode.build(session, decode.Work(3, 40, 4, 2, 16, 8, **changes))


@pytest.mark.parametrize("changes", [{}, {"q_len": 3}, {"lengths": (40, 3, 17)}], ids=str)
def test_expected_decodes_notice_what_is_wrong(session, changes):
    inputs = decode_inputs(session, **changes)
    expected = decode.Expected(inputs)
    right = inputs.call(impl="torch")
    assert expected.error(right) < 1e-6
    assert expected.error(inputs.call(1, impl="torch")) > 0.1, "another cache holds other keys"
    for b in range(3) if "lengths" in changes else (0, 2):
        wrong = right.clone()
        wrong[b] = wrong[b].roll(1, 1)
        assert expected.error(wrong) > 0.05
    wrong = right.clone()
    wrong[1, 0, 0, 0] = math.nan
    assert expected.error(wrong) == math.inf


@pytest.mark.parametrize("q_len", [1, 3])
def test_peers_decode_from_the_same_pages(peers, session, q_len):
    inputs = decode_inputs(session, q_len=q_len, lengths=(40, 3, 17))
    for peer in peers:
        calls = peer.decode(inputs.q, inputs.pools, inputs.table, inputs.used)
        assert len(calls) == len(inputs.pools) == 2
        for i, call in enumerate(calls):
            torch.testing.assert_close(call.run(), inputs.call(i, impl="torch"))


def test_naive_decode_is_right(session):
    inputs = decode_inputs(session)
    pools = [[x.transpose(1, 2).contiguous() for x in pool] for pool in decode._dense_pools(inputs)]
    torch.testing.assert_close(decode.naive(inputs.q, *pools[1]), inputs.call(1, impl="torch"))


def test_peers_join_the_decode_race_and_the_ratios_are_printed(peers, monkeypatch, capsys):
    monkeypatch.setattr(decode, "find", lambda device, note: [replace(p, sizes=None) for p in peers])
    assert main(["decode", "--quick", "--peers", "--device", "cpu", "--only", "read,table"]) == 0
    printed = capsys.readouterr().out
    table_, _, ratios = printed.partition("commit ")
    assert "FlashInfer" in table_
    assert len(re.findall(r"kvlab torch .* of the best peer .* % of the read rate", ratios)) == 3


def test_decode_ratios_are_to_the_best_peer_of_the_race(session):
    def speed(impl: str, value: float, part: str = "table", **shape: int) -> Record:
        return session.record(f"decode.{part}", impl, value, "GB/s", shape={"B": 1, **shape}, dtype="bfloat16")

    records = [
        speed("kvlab hopper", 4000.0), speed("FlashAttention-3", 3000.0), speed("FlashInfer", 3200.0),
        speed("kvlab", 50.0, B=2), speed("FlashInfer", 100.0, B=2), speed("kvlab", 1.0, B=3),
        speed("torch sum", 4200.0, "read"), speed("triton blocks", 5000.0, "read"), speed("kvlab", 9.0, "naive"),
    ]  # fmt: skip
    assert [(ratio, share) for _, ratio, share in decode.ratios(records)] == [(1.25, 0.8), (0.5, 0.01)]
    assert decode.ratios(records[:3])[0][2] is None
    assert decode.summary(records[:1]) == ""


def test_the_scheduler_benchmark_measures_each_of_its_parts(tmp_path):
    file = tmp_path / "records.json"
    assert main(["scheduler", "--quick", "--device", "cpu", "--out", str(file)]) == 0
    found = load(file)
    assert {r.bench.partition(".")[2] for r in found} == {
        "host", "simulated", "step", "launched", "serving", "held_out",
    }  # fmt: skip
    steps = [asdict(r) for r in found if r.bench == "scheduler.step"]
    model = fit_records(steps)
    assert len(model.residuals) == len(steps)
    assert {r.shape["policy"] for r in found if r.bench == "scheduler.simulated"} == {"continuous", "chunked", "fair"}
    workloads_ = {r.shape["workload"] for r in found if r.bench == "scheduler.held_out"}
    assert workloads_ == set(scheduler.held_out_workloads())
    ways = {r.shape["workload"] for r in found if r.bench == "scheduler.serving"}
    assert ways < set(scheduler.WAYS)


@pytest.mark.gpu
@pytest.mark.skipif(not runtime.HAS_GPU or runtime.INTERPRET, reason="needs a GPU")
def test_the_scheduler_benchmark_runs_on_a_gpu(tmp_path):
    file = tmp_path / "records.json"
    assert main(["scheduler", "--quick", "--only", "steps,serving,held_out", "--out", str(file)]) == 0
    found = {r.shape["figure"]: r.value for r in load(file) if r.bench == "scheduler.serving"}
    assert found["itl p99 by the roofline of its steps"] < found["itl p99"]


@pytest.mark.parametrize("policy", ["chunked", "continuous"])
def test_the_roofline_of_gaps_is_that_of_the_steps_between_two_tokens(policy):
    cost = RooflineCost(configs.get("stdlib-1m"), scheduler.HARDWARE["h200"])
    run, made = scheduler.Watched(cost), Scheduler(BlockManager(BlockPool(40, 4)), policy, 24, 4)
    waiting = [Request(i, range(prompt), SamplingParams(max_tokens=6)) for i, prompt in enumerate((3, 20))]
    shapes, tokens = [], {r: [] for r in waiting}
    while made.has_work or waiting:
        if waiting and len(shapes) in (0, 2):  # the second prompt comes between two tokens of the first text
            made.add(waiting.pop(0))
        step = made.schedule()
        shapes.append(StepShape.of(step))
        for request in step.sampled:
            tokens[request].append(len(shapes))
        made.update(step)
        run.observe(made, step, 0.0, 1.0)
    floors = [cost.floor(shape) for shape in shapes]
    gaps = [sum(floors[a:b]) for at in tokens.values() for a, b in itertools.pairwise(at)]
    assert len(gaps) == 10
    assert sorted(run.gaps) == pytest.approx(sorted(gaps), rel=1e-9)
    assert run.allowed(100) == pytest.approx(max(gaps))
    if policy == "continuous":  # a gap with a whole prompt in it
        assert run.allowed(100) == pytest.approx(floors[2] + floors[3])
    assert min(gaps) < run.allowed(50) < max(gaps)
    assert math.isnan(scheduler.Watched(cost).allowed(99))


def test_timed_steps_are_the_steps_they_are_said_to_be():
    session = Session("cpu", quick=True)
    server = scheduler.Server.build(session)
    lens = [(1, 20), (7, 7), (5, 30)]
    step = server.fill(lens)
    assert StepShape.of(step) == StepShape.build([20], [(7, 7), (5, 30)])
    for _ in range(2):  # what was computed is undone
        assert len(server.run(step)) == 3
    gpu = types.SimpleNamespace(quick=False, on_gpu=True)
    shapes = [
        StepShape.build([n for q, n in lens if q == 1], [x for x in lens if x[0] > 1]) for lens in scheduler.grid(gpu)
    ]
    assert len(set(shapes)) == len(shapes) > 200
    assert max(s.chunk_tokens for s in shapes) == 16384
    assert max(s.decode_kv + s.chunk_kv for s in shapes) <= 480_000
    assert max(s.decodes for s in shapes) == 120
    assert max(s.decodes + s.chunks for s in shapes) < scheduler.SIZES["rows"]  # one is spare


def test_a_step_of_each_kind_is_run_before_the_clock():
    session = Session("cpu", quick=True)
    server = scheduler.Server.build(session)
    kinds = scheduler.kinds_of_steps(session, server, scheduler.fixed(session), scheduler.WAYS["chunked 512"])
    assert {new for _, _, new, _ in kinds} >= {1, 32}
    assert {many for many, _, _, _ in kinds} == {1, 2}
    ran = []
    for (many, _, new, _), lens in kinds.items():
        assert (many == 1) == (len(lens) == 1)
        assert min(32, max(q for q, _ in lens)) > new // 2
        ran.append(len(server.fill(lens).requests))
        for i in range(len(lens)):
            server.cache.free(i)
    assert max(ran) == 4
    warm: set[tuple[int, ...]] = set()
    scheduler._warm(session, server, scheduler.fixed(session), scheduler.WAYS["chunked 512"], warm)
    assert warm == set(kinds)
    assert server.cache.manager.seq_ids == []


# --- captured passes -------------------------------------------------------------------------------------------------


def captured(dtype=torch.float32):
    """The smallest model, a cache for its plain passes, and its captured ones over another."""
    config = replace(configs.get("stdlib-1m"), max_seq_len=512)
    torch.manual_seed(0)
    model = Decoder(config, dtype=dtype, device=runtime.device())
    caches = [
        paged.PagedCache(config, 100, 8, attention=flash_decoding.attention, dtype=dtype, device=model.device,
                         max_model_len=longest)
        for longest in (None, 200)
    ]  # fmt: skip
    return model, caches[0], CapturedDecoder(model, caches[1], decodes=[2, 4], tokens=[8, 48], rows=5)


HISTORY = [  # (sequence, new tokens) of each pass
    [(0, 7)], [(1, 20), (2, 11)], [(0, 1)], [(0, 1), (1, 1)], [(0, 1), (1, 1), (2, 1)], [(0, 1), (3, 30)],
    [(0, 1), (1, 1), (2, 1), (3, 1)], [(0, 1), (1, 1), (2, 1), (3, 1), (4, 44)], [(4, 3), (2, 3)], [(5, 60)],
    [(n, 1) for n in range(6)], [(0, 1), (5, 90), (1, 1)], [(4, 1), (5, 1)],
]  # fmt: skip
WHERE = [Size(8, 5, 8), Size(48, 5, 48), Size(2, 2, 1), Size(2, 2, 1), Size(4, 4, 1), Size(48, 5, 48), Size(4, 4, 1),
         Size(48, 5, 48), Size(8, 5, 8), None, None, None, Size(2, 2, 1)]  # fmt: skip


NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not runtime.HAS_GPU or runtime.INTERPRET, reason="needs a GPU")]


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-4), pytest.param(torch.bfloat16, 2e-2, marks=NEEDS_GPU)]
)
@pytest.mark.parametrize(
    "first", [pytest.param(True, id="captured before"), pytest.param(False, id="captured on the way")]
)
def test_a_padded_pass_gives_the_logits_of_a_plain_one(dtype, bound, first):
    model, cache, made = captured(dtype)
    if first:
        made.capture(most_tokens=100)
        assert set(made._passes) == set(made.sizes)
        assert all(one.captured for one in made._passes.values()) == runtime.HAS_GPU
    numbers = torch.Generator().manual_seed(0)
    for repeat in range(4):
        past: dict[int, int] = {}
        for at, new in enumerate(HISTORY):
            ids, lens = [n for n, _ in new], [past.get(n, 0) for n, _ in new]
            tokens = [torch.randint(4096, (count,), generator=numbers).tolist() for _, count in new]
            wanted = Batch.build(ids, tokens, lens, device=model.device)
            batch = Batch.build(ids, tokens, lens, device=made.device)
            if at % 3 == 1:  # a chunk that is not its prompt's last asks for nothing
                wanted.logits_indices, batch.logits_indices = wanted.logits_indices[1:], batch.logits_indices[1:]
            assert made.size_of(batch) == WHERE[at]
            with torch.inference_mode():
                right, found = model(wanted, cache), made(batch, made.cache)
            assert found.shape == right.shape
            assert (found - right).norm() <= bound * right.norm(), f"pass {at}"
            past.update((n, past.get(n, 0) + count) for n, count in new)
            assert {n: made.cache.length(n) for n in past} == past
        for n in past:
            cache.free(n)
            made.cache.free(n)
        assert (made.replayed, made.plain) == (10 * (repeat + 1), 3 * (repeat + 1))


@pytest.mark.parametrize(("decodes", "tokens"), [([], [1, 8]), ([1], [1, 2])])
def test_sizes_of_one_token(decodes, tokens):
    model, cache, made = captured()
    made = CapturedDecoder(model, made.cache, decodes=decodes, tokens=tokens, rows=3)
    made.capture()
    past = [0, 0]
    for new in ([[1], [2, 3]], [[], [3]], [[4], []], [[5], [6]]):
        batch = Batch.build([0, 1], new, past, device=model.device)
        with torch.inference_mode():
            right, found = model(batch, cache), made(Batch.build([0, 1], new, past), made.cache)
        torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)
        past = [p + len(n) for p, n in zip(past, new, strict=True)]


def test_a_captured_pass_that_fails_changes_nothing(monkeypatch):
    _, _, made = captured()

    def batch(tokens, past=0):
        return Batch.build([7], [[1] * tokens], [past])

    with torch.inference_mode():
        made(batch(5), made.cache)
        with pytest.raises(ValueError, match="max_model_len is 200"):
            made(batch(196, 5), made.cache)
        with pytest.raises(ValueError, match="continues at 4"):
            made(batch(1, 4), made.cache)
        monkeypatch.setattr(CapturedDecoder, "_send", lambda *_: 1 / 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                made(batch(3, 5), made.cache)
            assert made.cache.length(7) == 5
        monkeypatch.undo()
        made(batch(3, 5), made.cache)
    assert made.cache.length(7) == 8
    made.cache.manager.audit()


def test_what_cannot_be_captured_is_refused():
    model, cache, made = captured()
    sizes = {"decodes": [2], "tokens": [8], "rows": 4}
    with pytest.raises(ValueError, match="no max_model_len"):
        CapturedDecoder(model, cache, **sizes)
    with pytest.raises(ValueError, match="not the one"):
        made(Batch.build([0], [[1]], [0]), cache)
    stretched = replace(model.config, rope=replace(model.config.rope, kind="dynamic", factor=2.0))
    with pytest.raises(ValueError, match="depend on lengths"):
        CapturedDecoder(Decoder(stretched), made.cache, **sizes)
    for name, wrong in (("rows", 0), ("rows", 2.5), ("decodes", [0]), ("tokens", [8, -1]), ("tokens", "ab")):
        with pytest.raises(ValueError, match=name):
            CapturedDecoder(model, made.cache, **sizes | {name: wrong})
    with pytest.raises(ValueError, match="decodes and tokens are empty"):
        CapturedDecoder(model, made.cache, decodes=[], tokens=[], rows=4)
    with pytest.raises(ValueError, match="most_tokens is -1"):
        made.capture(-1)
    for name, value in (("logits_indices", torch.tensor([-1])), ("logits_indices", torch.tensor([5])),
                        ("logits_indices", torch.tensor([True])), ("token_ids", torch.arange(4)),
                        ("positions", torch.arange(5.0))):  # fmt: skip
        with pytest.raises(ValueError, match=name):
            made(replace(Batch.build([0], [[1] * 5], [0]), **{name: value}), made.cache)
    assert made.cache.length(0) == made.replayed == 0
    trees = Batch.build([0], [[1, 2]], [0], tree_mask=[[1, 3]])
    assert made.size_of(trees) is None
    assert made.size_of(Batch.build([0], [[1, 2]], [0], all_logits=True)) is None


# --- speculation -----------------------------------------------------------------------------------------------------


def test_speculations_records_say_what_was_measured_and_what_imposed():
    records = quick_run("speculative")[0]
    by_name = {name: [r for r in records if r.bench == f"speculative.{name}"] for name in ("acceptance", "identical")}
    assert {r.impl for r in by_name["acceptance"]} >= {"model", "model tree", "n-gram"}
    assert {r.shape["text"] for r in by_name["acceptance"]} == {"source", "tests", "English"}
    assert all(r.value == 1 for r in by_name["identical"])
    [speed] = [r for r in records if r.bench == "speculative.speedup"]
    assert speed.shape["acceptance"] == "measured"
    expected = speculative.expected_tokens(speed.shape["alpha"], speed.shape["gamma"])
    assert expected == pytest.approx(speed.shape["tokens_per_step"])
    cost = speed.shape["gamma"] * speed.shape["cost_ratio"] + speed.shape["verify_ratio"]
    assert speed.shape["predicted"] == pytest.approx(expected / cost)


@pytest.fixture(scope="module")
def small_pair():
    config = replace(configs.get("stdlib-1m"), max_seq_len=128, vocab_size=64)
    torch.manual_seed(0)
    target, draft = Decoder(config), Decoder(config)
    for a, b in zip(target.parameters(), draft.parameters(), strict=True):
        a.data.mul_(3.0)
        b.data.copy_(a + 0.05 * a.std() * torch.randn_like(a))
    return target, draft


@pytest.mark.parametrize("gamma", [1, 3])
def test_rounds_write_what_plain_decoding_writes(small_pair, gamma):
    target, draft = small_pair
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10]]
    wanted = generate(target, paged.PagedCache(target.config, 64), prompts, SamplingParams(max_tokens=12))
    rounds = Rounds(target, draft, prompts, gamma, 100)
    for _ in range(2):
        for speculate in (False, True):
            run = rounds.run(12, speculate=speculate)
            assert [text[:12] for text in run.texts] == [g.tokens for g in wanted]
            assert run.seconds > 0
            if speculate:
                assert run.steps < 12
                assert run.tokens_per_step == pytest.approx(1 + sum(run.accepted) / len(run.accepted))


class Captured(TorchDispatchMode):
    """Refuses what a CUDA graph cannot hold: a read of the device by the host, and data that come from it."""

    READS = ("item", "_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "_unique2", "lift_fresh")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func._overloadpacket.__name__, kwargs or {}
        assert name not in self.READS
        if name in ("to", "_to_copy"):
            assert not any(isinstance(x, torch.device) for x in (*args, *kwargs.values())), f"{name} a device"
        if name in ("index", "index_put", "index_put_"):
            assert not any(i is not None and i.dtype == torch.bool for i in args[1]), f"{name} by a mask"
        if name == "repeat_interleave":
            assert kwargs.get("output_size") is not None, f"{name} without output_size"
        return func(*args, **kwargs)


@pytest.mark.skipif(not runtime.can_launch("cpu"), reason="no kernel can be launched on the CPU here")
def test_what_is_captured_never_reads_the_device(small_pair, monkeypatch):
    def refuse(*_):
        raise AssertionError("the host reads a tensor")

    def compute(one: Pass):
        with monkeypatch.context() as patch, Captured():
            patch.setattr(torch.Tensor, "tolist", refuse)
            patch.setattr(torch.Tensor, "__bool__", refuse)
            return right(one)

    right = Pass._compute
    monkeypatch.setattr(Pass, "_compute", compute)
    monkeypatch.setattr(runtime, "choose", lambda impl, on, name: "triton")
    before = runtime.launches["flash_decoding_kernel"], runtime.launches["greedy_kernel"]
    rounds = Rounds(*small_pair, [[1, 2, 3], [4, 5]], 2, 16)
    texts = [rounds.run(2, speculate=speculate).texts for speculate in (False, True)]
    assert [text[:2] for text in texts[0]] == [text[:2] for text in texts[1]]
    assert runtime.launches["flash_decoding_kernel"] > before[0]
    assert runtime.launches["greedy_kernel"] > before[1]
    for bad in (
        lambda x: x.item(), lambda x: x[x > 0], lambda x: torch.tensor([1]), lambda x: x.nonzero(),
        lambda x: x.repeat_interleave(x.long()), lambda x: x.to("meta"),
    ):  # fmt: skip
        for mode in (torch.no_grad, torch.inference_mode):
            with pytest.raises(AssertionError), mode(), Captured():
                bad(torch.ones(1))


def test_parts_of_a_step_are_timed_from_where_a_step_begins(small_pair, monkeypatch):
    rounds = Rounds(*small_pair, [[1, 2, 3], [4, 5]], 3, 60, imposed=0.5)
    rounds.run(5, speculate=True)
    seen = []

    def watch(name: str):
        right = getattr(rounds, name)

        def part(texts):
            before = [rounds.caches[model].length(0) for model in ("target", "draft")]
            found = right(texts)
            seen.append((name, *before, len(texts[0])))
            return found

        monkeypatch.setattr(rounds, name, part)

    for name in ("_plain_step", "_draft", "_verify"):
        watch(name)
    parts = rounds.parts(20, 0.0)
    assert min(parts) > 0
    assert {s[:3] for s in seen} == {(name, 19, 21) for name in ("_plain_step", "_draft", "_verify")}
    assert {s[3] for s in seen if s[0] == "_plain_step"} == {21}
    assert {s[3] for s in seen if s[0] == "_verify"} <= {21, 22, 23, 24}
    for length in (1, 57):
        with pytest.raises(ValueError, match=f"length is {length}"):
            rounds.parts(length, 0.0)


def test_both_loops_and_their_parts_are_timed_in_turns(small_pair, monkeypatch):
    rounds, seen = Rounds(*small_pair, [[1, 2], [3, 4, 5]], 2, 60, imposed=1.0), []
    for name in ("run", "parts"):
        right = getattr(rounds, name)

        def noted(*args, right=right, name=name, **options):
            seen.append((name, options.get("speculate"), *args))
            return right(*args, **options)

        monkeypatch.setattr(rounds, name, noted)
    both = rounds.compare(10, turns=2, seconds=0.0)
    turn = [("run", False, 10), ("run", True, 10), ("parts", None, 8, 0.0)]
    assert seen[2:] == 2 * turn
    assert both.tokens_per_step == 3
    assert both.speedup == pytest.approx(3 * both.plain / both.fast)
    assert min(both.parts) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not runtime.HAS_GPU, reason="needs a GPU")
def test_rounds_replayed_from_graphs_write_what_plain_decoding_writes(small_pair):
    target, draft = (copy.deepcopy(model).cuda() for model in small_pair)
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10]]
    cache = paged.PagedCache(target.config, 64, attention=flash_decoding.attention, device="cuda")
    wanted = generate(target, cache, prompts, SamplingParams(max_tokens=24))
    rounds = Rounds(target, draft, prompts, 3, 120)
    for _ in range(2):  # captured in the first run, replayed in the second
        for speculate in (False, True):
            run = rounds.run(24, speculate=speculate)
            assert [text[:24] for text in run.texts] == [g.tokens for g in wanted]
    assert all(one._run.captured for one in (rounds.plain, rounds.verify, rounds.draft_first, rounds.draft_next))


def test_imposed_acceptance_is_what_was_asked_for(small_pair):
    run = Rounds(*small_pair, [[1, 2]] * 8, 2, 120, imposed=0.7).run(80, speculate=True)
    assert run.tokens_per_step == pytest.approx(speculative.expected_tokens(0.7, 2), rel=0.1)
    assert Rounds(*small_pair, [[1, 2]], 2, 60, imposed=1.0).run(30, speculate=True).tokens_per_step == 3


def test_rounds_refuse_prompts_without_room(small_pair):
    for prompt in ([1], [1] * 40):
        with pytest.raises(ValueError, match=r"prompts\[0\]"):
            Rounds(*small_pair, [prompt], 4, 40)


def test_matching_alpha_inverts_the_closed_form():
    for alpha in (0.0, 0.3, 0.9, 1.0):
        assert matching_alpha(speculative.expected_tokens(alpha, 4), 4) == pytest.approx(alpha, abs=1e-6)
