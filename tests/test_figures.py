"""Figures: drawn from data, small, the same each time, with alt text; records found or missed in words."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvlab import config, costs, figures
from kvlab.batch import Batch
from kvlab.naive import NaiveCache
from kvlab.paged import BlockManager, BlockPool

PNG = b"\x89PNG\r\n"


def record(**changes):
    base = {
        "run": "r", "bench": "ceilings.read", "impl": "triton", "version": None, "shape": {"B": 1}, "dtype": "float32",
        "value": 1.0, "unit": "GB/s", "ms": 1.0, "spread": 0.1, "error": None, "device": "NVIDIA H200", "driver": None,
        "torch": "2", "triton": "3", "date": "2026-01-01", "commit": "c",
    }  # fmt: skip
    return {**base, **changes}


@pytest.fixture
def measured(tmp_path, monkeypatch):
    monkeypatch.setattr(figures._records, "_MEASURED", tmp_path)
    (tmp_path / "a.json").write_text(json.dumps([record(), record(impl="torch", value=2.0)]))
    (tmp_path / "b.json").write_text(
        json.dumps(
            [record(bench="ceilings.copy", shape={"B": 4}), record(bench="ceiling", device="CPU", dtype="bfloat16")]
        )
    )
    (tmp_path / "curve.json").write_text(json.dumps({"loss": [1, 2]}))  # no list of records
    return tmp_path


def test_records_are_found_by_field_and_by_shape(measured):
    assert [r["value"] for r in figures.records(bench="ceilings.read")] == [1.0, 2.0]
    assert len(figures.records(bench="ceilings")) == 3
    assert len(figures.records(bench="ceiling")) == 1
    assert len(figures.records(device="H200")) == 3
    assert figures.records(B=4)[0]["bench"] == "ceilings.copy"
    assert figures.records(bench="ceilings", impl="torch", unit="GB/s")[0]["value"] == 2.0
    assert figures.records(dtype="bfloat16")[0]["device"] == "CPU"


def test_a_record_that_is_not_there_is_named(measured, monkeypatch):
    with pytest.raises(LookupError, match=r"bench='decode'.*ceilings\.copy"):
        figures.records(bench="decode")
    monkeypatch.setattr(figures._records, "_MEASURED", measured / "nowhere")
    with pytest.raises(FileNotFoundError, match="checkout"):
        figures.records(bench="ceilings")


def test_png_is_small_and_the_same_each_time():
    def draw():
        fig, ax = figures.figure(6.4, 3.6)
        ax.plot([1, 2, 3], [1, 4, 9], label="squares")
        ax.legend()
        return figures.png(fig)

    first = draw()
    assert first.startswith(PNG)
    assert first == draw()
    assert len(first) < 40_000
    width, height = int.from_bytes(first[16:20], "big"), int.from_bytes(first[20:24], "big")
    assert (width, height) == (704, 396)


def test_figure_gives_the_axes_asked_for():
    assert figures.figure()[1].get_xlabel() == ""
    assert figures.figure(columns=2)[1].shape == (2,)
    assert figures.figure(rows=2, columns=3)[1].shape == (2, 3)
    for bad in ({"width": 0}, {"height": -1}, {"rows": 0}):
        with pytest.raises(ValueError, match="positive"):
            figures.figure(**bad)


def test_a_figure_without_alt_text_is_refused():
    fig, _ = figures.figure()
    for alt in ("", "  ", None):
        with pytest.raises(ValueError, match="alt"):
            figures.show(fig, alt=alt)


def test_a_script_prints_alt_and_caption(capsys):
    figures.show(figures.figure()[0], alt="An empty frame", caption="Nothing yet.")
    assert capsys.readouterr().out == "[Figure: An empty frame]\nNothing yet.\n"
    figures.markdown("**bold**")
    assert capsys.readouterr().out == "**bold**\n"


# Machado, Oliveira and Fernandes 2009: linear RGB as people without one kind of cone see it.
VISION = {
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


@pytest.mark.parametrize("kind", VISION)
def test_colours_can_be_told_apart_by_everyone(kind):
    rgb = np.array([[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in (*figures.COLORS[:6], figures.CARD)])
    seen = np.clip(np.array(VISION[kind]) @ (rgb**2.2).T, 0, 1).T ** (1 / 2.2)
    apart = np.linalg.norm(seen[:, None] - seen[None, :], axis=2) + 9 * np.eye(len(seen))
    assert apart.min() > 0.1, f"{kind}: {apart.min():.2f}"


def test_roofline_bends_at_the_ridge():
    _, ax = figures.figure()
    figures.roofline(ax, {"chip": (100.0, 1000.0)}, {"work": (2.0, 200.0)})
    roof = ax.lines[0].get_xydata()
    assert np.allclose(roof[:, 1], np.minimum(roof[:, 0] * 100, 1000))
    labels = [t.get_text() for t in ax.get_legend().get_texts()]
    assert labels == ["chip", "work"]
    with pytest.raises(ValueError, match="positive"):
        figures.roofline(ax, {"chip": (0, 1)}, {})


def test_stacked_bars_stand_on_each_other():
    _, ax = figures.figure()
    figures.stacked_bars(ax, ["x", "y"], {"a": [1, 2], "b": [3, 4]})
    assert [(p.get_y(), p.get_height()) for p in ax.patches] == [(0, 1), (0, 2), (1, 3), (2, 4)]
    with pytest.raises(ValueError, match="3 numbers for 2"):
        figures.stacked_bars(ax, ["x", "y"], {"a": [1, 2, 3]})
    with pytest.raises(ValueError, match="0 or more"):
        figures.stacked_bars(ax, ["x"], {"a": [-1]})


def test_heatmap_writes_every_number():
    _, ax = figures.figure()
    figures.heatmap(ax, [[0.0, 0.5, 1.0]], ["row"], ["a", "b", "c"], fmt="{:.0%}")
    assert [t.get_text() for t in ax.texts] == ["0%", "50%", "100%"]
    with pytest.raises(ValueError, match="1 rows of 2"):
        figures.heatmap(ax, [[1.0]], ["row"], ["a", "b"])


def test_heatmap_leaves_out_what_is_not_there():
    _, ax = figures.figure()
    figures.heatmap(ax, [[float("nan"), 2.0], [4.0, float("nan")]], ["r", "s"], ["a", "b"])
    assert [t.get_text() for t in ax.texts] == ["2", "4"]
    assert ax.images[0].get_clim() == (2.0, 4.0)
    figures.heatmap(ax, [[float("nan")]], ["r"], ["a"])


def test_timeline_gives_a_kind_one_colour():
    _, ax = figures.figure()
    figures.timeline(ax, {"gpu": [(0, 1, "prefill"), (1, 3, "decode")], "cpu": [(0, 2, "decode")]})
    colors = [p.get_facecolor() for p in ax.patches]
    assert colors[1] == colors[2] != colors[0]
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["prefill", "decode"]
    assert len({p.get_hatch() for p in ax.patches}) == 2
    _, plain = figures.figure()
    figures.timeline(plain, {"gpu": [(0, 1, "prefill"), (1, 3, "decode")]}, hatched=False)
    assert {(p.get_hatch(), p.get_linewidth()) for p in plain.patches} == {("", 0.0)}
    with pytest.raises(ValueError, match="before it starts"):
        figures.timeline(ax, {"gpu": [(2, 1, "x")]})


@pytest.mark.parametrize("slots", [12, 256])
def test_cache_map_draws_the_cache_that_is_there(slots):
    from matplotlib.colors import to_hex

    cache = NaiveCache(config.get("stdlib-1m"), 3, slots)
    cache.prepare(Batch.build([7, 9], [[1] * 5, [1] * 2], [0, 0]))
    cache.free(7)
    cache.prepare(Batch.build([9], [[1]], [2]))
    fig = figures.cache_map(cache)
    ax = fig.axes[0]
    filled = [p for p in ax.patches if to_hex(p.get_facecolor()) == figures.COLORS[0].lower() and p.get_width() > 0]
    assert sum(p.get_width() for p in filled) == 3
    assert {round(p.get_y() + 0.4) for p in filled} == {cache.row(9)}
    assert sum(p.get_width() for p in ax.patches) == 3 * slots
    assert sorted(t.get_text() for t in ax.get_yticklabels()) == ["row 0: free", "row 1: sequence 9", "row 2: free"]
    assert figures.png(fig).startswith(PNG)
    with pytest.raises(ValueError, match="contiguous"):
        figures.cache_map(object())


def test_token_boxes():
    _, ax = figures.figure()
    figures.token_boxes(ax, {"tokens": ["a", "b", None], "page": [0, 0, 1]}, groups={"page": [0, 0, 1]})
    assert [t.get_text() for t in ax.texts] == ["a", "b", "", "0", "0", "1"]
    colors = [p.get_facecolor() for p in ax.patches]
    assert colors[3] == colors[4] != colors[5]
    with pytest.raises(ValueError, match="2 entries"):
        figures.token_boxes(ax, {"t": [1]}, groups={"t": [1, 2]})


def test_fitted_exponents():
    x = [1, 2, 4, 8, 16]
    assert figures.fit_exponent(x, [3 * v**2.5 for v in x]) == pytest.approx(2.5)
    _, ax = figures.figure()
    exponents = figures.growth(ax, x, {"a": x, "b": [v**3 for v in x]})
    assert exponents == {"a": pytest.approx(1), "b": pytest.approx(3)}
    assert "b: exponent 3.00" in [t.get_text() for t in ax.get_legend().get_texts()]
    for bad in (([1], [1]), ([1, 2], [1]), ([1, 2], [0, 1]), ([1, 2], [1, float("nan")]), ([2, 2], [1, 2])):
        with pytest.raises(ValueError):
            figures.fit_exponent(*bad)


def test_plot_draws_lines_levels_and_ticks():
    _, ax = figures.figure()
    figures.plot(
        {"a": ([1, 2, 4], [1, 4, 16]), "b": ([1, 4], [2, 2], {"ls": "--", "marker": ""})},
        "x", "y", alt="", log="xy", levels=(3,), xticks=[1, 2, 4], ymin=1, ax=ax,
    )  # fmt: skip
    assert [line.get_xydata().tolist() for line in ax.lines[:2]] == [[[1, 1], [2, 4], [4, 16]], [[1, 2], [4, 2]]]
    assert (ax.get_xscale(), ax.get_yscale(), ax.get_ylim()[0]) == ("log", "log", 1)
    assert ax.lines[1].get_linestyle() == "--"
    assert set(ax.lines[2].get_ydata()) == {3}
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["a", "b"]
    for bad in ({"log": "z"}, {"alt": " "}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            figures.plot({"a": ([1], [1])}, "x", "y", **{"alt": "a point", **bad})
    with pytest.raises(ValueError, match="2 x and 1 y"):
        figures.plot({"a": ([1, 2], [1])}, "x", "y", alt="a line")


def test_visible_colours_keys_of_the_cache():
    _, ax = figures.figure()
    figures.visible(ax, [[True, True, True, False], [True, True, True, True]], "two after two")
    assert len(ax.patches) == 7
    colors = [p.get_facecolor() for p in ax.patches]
    assert colors[0] == colors[1] != colors[2]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["2", "3"]
    with pytest.raises(ValueError, match="q_len, kv_len"):
        figures.visible(ax, [True], "flat")


def test_a_recorded_line_is_in_order(measured):
    rows = [
        record(bench="x", shape={"T": t, "kind": "k"}, value=v, ms=10 * v) for t, v in ((4, 2.0), (1, 1.0), (2, 5.0))
    ]
    (measured / "x.json").write_text(json.dumps(rows))
    x, y = figures.record_line("x", "triton", "T", kind="k")
    assert (x.tolist(), y.tolist()) == ([1, 2, 4], [1.0, 5.0, 2.0])
    assert figures.record_line("x", "triton", "T", field="ms")[1].tolist() == [10.0, 50.0, 20.0]
    with pytest.raises(LookupError):
        figures.record_line("x", "torch", "T")


def test_measured_hardware_is_what_was_recorded():
    h200 = figures.measured_hardware("h200")
    assert h200.bandwidth == max(r["value"] for r in figures.records("ceilings.read", device="H200", unit="GB/s")) * 1e9
    sheet = costs.HARDWARE["h200"]
    assert 0.5 < h200.bandwidth / sheet.bandwidth < 1
    assert 0.5 < h200.flops / sheet.flops < 1
    assert h200.joules_per_byte > 0 < h200.joules_per_flop
    with pytest.raises(LookupError, match="abacus"):
        figures.measured_hardware("abacus")


def test_block_tables_draws_every_block_and_word():
    from matplotlib.colors import to_hex

    books = BlockManager(BlockPool(4, 2))
    books.ensure(0, 3)
    books.advance(0, 3)
    books.fork(0, 1)
    books.ensure(1, 4)
    books.advance(1, 4)
    _, ax = figures.figure()
    figures.block_tables(ax, books, {0: "abc", 1: "abcd"}, "title")
    texts = [t.get_text() for t in ax.texts]
    assert texts[:3] == ["a", "b", "0"]
    assert "sequence 1: [0, 2], 4 tokens" in texts
    colors = [to_hex(p.get_facecolor()) for p in ax.patches[::2]]
    assert len(set(colors)) == 3  # shared, one owner, free
    assert colors[1] == colors[2]
    with pytest.raises(ValueError, match="sequence 1"):
        figures.block_tables(ax, books, {0: "abc", 1: "abc"})


def test_memory_map_shows_states_over_time():
    _, ax = figures.figure()
    states = [np.array([0, 1, 2, 2], np.uint8), np.array([2, 2, 0, 0], np.uint8)]
    figures.memory_map(ax, states, "pool")
    assert ax.images[0].get_array().tolist() == [[0, 2], [1, 2], [2, 0], [2, 0]]
    with pytest.raises(ValueError, match="states"):
        figures.memory_map(ax, [])


def test_memory_maps_show_runs_side_by_side(capsys):
    states = [np.array([0, 1, 2, 2], np.uint8)]
    figures.memory_maps({"rows": states, "pages": states}, alt="two maps")
    figures.memory_maps({"pages": states}, alt="one map", caption="It is full.")
    assert capsys.readouterr().out == "[Figure: two maps]\n[Figure: one map]\nIt is full.\n"
    for bad in ({}, {"rows": []}):
        with pytest.raises(ValueError, match="is empty"):
            figures.memory_maps(bad, alt="none")


def test_what_is_not_recorded_is_an_empty_list_and_a_line(measured, capsys):
    assert len(figures.recorded("ceilings.read")) == 2
    assert capsys.readouterr().out == ""
    assert figures.recorded("prefill.dense", D=128) == []
    assert capsys.readouterr().out == "prefill.dense: not recorded yet\n"


def test_the_best_of_each_implementation_by_shape(measured):
    rows = [("a (x)", 1, 2.0), ("a (y)", 1, 3.0), ("b", 1, 1.0), ("a", 8, 5.0)]
    races = [record(bench="race", impl=i, shape={"L": n}, value=x, unit="TFLOP/s") for i, n, x in rows]
    races += [record(bench="race", impl=i, shape={"L": n}, value=x, unit="ms") for i, n, x in rows]
    (measured / "race.json").write_text(json.dumps(races))
    found = figures.by_shape("race", "L")
    assert found == {(1,): {"a": 3.0, "b": 1.0}, (8,): {"a": 5.0}}
    assert figures.by_shape("race", "L", unit="ms")[1,] == {"a": 2.0, "b": 1.0}
    assert list(figures.by_shape("race", "H")) == [(None,)]
    assert figures.by_impl(found) == {"a": ([1, 8], [3.0, 5.0]), "b": ([1], [1.0])}
    assert figures.by_shape("race", "L", H=4) == {}


def test_a_table_divides_by_the_base_that_is_there(capsys):
    figures.table("t", {(1, 2): {"a": 3.0, "b": 2.0}, (8, 2): {"a": 5.0}}, ["L", "B"], base=("c", "b"))
    assert capsys.readouterr().out.splitlines() == [
        "| t: L, B | a | b |", "|---|---|---|", "| 1, 2 | 3 (1.50) | 2 (1.00) |", "| 8, 2 | 5 |  |",
    ]  # fmt: skip
    figures.table("t", {}, ["L"], base=())
    assert capsys.readouterr().out == ""
    figures.table("GB/s", {(1, None): {"a": 4136.4}}, ["B", "x"], base=())
    assert capsys.readouterr().out.splitlines()[2] == "| 1, – | 4,136 |"


def test_bars_show_their_numbers(capsys):
    figures.bars({"x": 1.0, "y": 0.0}, "s", alt="Two bars", caption="Short.")
    figures.bars({"x": 1.0, "y": 2.0}, "s", alt="Two bars", log=True, special=["y"])
    assert capsys.readouterr().out.count("[Figure: Two bars]") == 2
    for bad in ({}, {"x": -1.0}, {"x": float("nan")}):
        with pytest.raises(ValueError, match="values are"):
            figures.bars(bad, "s", alt="None")
    with pytest.raises(ValueError, match="above 0"):
        figures.bars({"x": 0.0}, "s", alt="None", log=True)


def test_tiles_have_the_colours_of_their_kinds():
    _, ax = figures.figure()
    figures.tiles(ax, 5, 9, 2, 4, "a pass")
    [image], [dots] = ax.get_images(), ax.lines
    assert image.get_array().tolist() == [[2, 1, 0], [2, 1, 0], [2, 2, 1]]
    assert len(dots.get_xdata()) == 5 + 6 + 7 + 8 + 9
    assert image.get_extent() == [0, 12, 6, 0]
    assert ax.get_title(loc="left") == "a pass"


def test_ways_become_an_entry_of_the_shape():
    found = {(1, 4096): {"ours, replayed": 2.0, "theirs, replayed": 3.0, "ours, plain": 9.0}, (8, 4096): {"ours": 1.0}}
    assert figures.by_way(found) == {
        (1, 4096, "replayed"): {"ours": 2.0, "theirs": 3.0},
        (1, 4096, "plain"): {"ours": 9.0},
        (8, 4096, ""): {"ours": 1.0},
    }


def test_as_many_squares_are_filled_as_there_are_programs():
    _, ax = figures.figure(2, 2)
    figures.occupied(ax, 20, 132, "batch 1")
    (mesh,) = ax.collections
    values = np.ma.filled(mesh.get_array(), np.nan)
    assert np.nansum(values) == 20
    assert values.size == 132
    assert ax.get_title(loc="left") == "batch 1"
    with pytest.raises(ValueError, match=r"^programs is -1 "):
        figures.occupied(ax, -1, 132)


def test_many_lanes_touch():
    for count, height in ((24, 0.7), (25, 1.0)):
        _, ax = figures.figure(2, 2)
        figures.timeline(ax, {str(i): [(0, 1, "x")] for i in range(count)})
        assert [bar.get_height() for bar in ax.patches] == pytest.approx([height] * count)
