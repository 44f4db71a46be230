"""Benchmarks: the record format, the table, and that each one runs. Nothing here asserts a time."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import re
import tempfile
from dataclasses import asdict, replace

import pytest
import torch

from kvlab import bench, runtime
from kvlab.bench import FIELDS, Record, Session, load, measure, names, rotations, save, table
from kvlab.bench.__main__ import main
from kvlab.bench._session import commit

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


def test_the_benchmarks_are_the_files_beside():
    assert {"ceilings", "naive", "roofline"} <= set(names())
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
    [("ceilings", "copy read matmul"), ("naive", "step total"), ("roofline", "linear decode prefill")],
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


def test_an_interrupted_run_keeps_what_it_has(tmp_path, monkeypatch, capsys):
    from kvlab.bench import naive

    def run(session):
        yield session.record("naive.step", "impl", 1.0, "ms", shape={}, dtype="float32")
        raise KeyboardInterrupt

    monkeypatch.setattr(naive, "run", run)
    with pytest.raises(KeyboardInterrupt):
        main(["naive", "--device", "cpu", "--out", str(tmp_path / "r.json")])
    assert len(load(tmp_path / "r.json")) == 1


def test_counted_work_is_that_of_the_matrix_products():
    layer = torch.nn.Linear(6, 4, bias=False)
    other = torch.nn.Linear(4, 2, bias=False)
    with torch.no_grad(), bench.CountWork(layer) as work:
        other(layer(torch.randn(3, 6)).relu())
        layer(torch.randn(1, 6))
    assert work.flops == 2 * (3 * 6 * 4 + 3 * 4 * 2 + 1 * 6 * 4)
    assert work.weight_bytes == layer.weight.nbytes
