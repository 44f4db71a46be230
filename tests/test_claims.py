"""Verdicts: what a chapter may say about a claim, and the ledger built from what chapters said."""

from __future__ import annotations

import json
import re

import pytest

from kvlab import claims


def notebook(path, *verdicts):
    """An executed notebook whose cells gave these verdicts."""
    cells = [
        {
            "cell_type": "code", "source": "claims.verdict(...)", "metadata": {}, "execution_count": 1,
            "outputs": [{"output_type": "display_data", "metadata": {claims.MIME: dict(vars(v))}, "data": {}}],
        }
        for v in verdicts
    ]  # fmt: skip
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


A3 = claims.make("A3", "holds", "4,096 bytes", "computed")
A11 = claims.make("A11", "holds if", "1.07 billion | each", "computed", condition="for one head")
B3 = claims.make("B3", "wrong", "2.62 MB", "computed", right_value="2.62 MB")


def test_there_are_68_claims_and_each_has_a_chapter():
    ids = list(claims.all_claims())
    assert ids == [f"A{i}" for i in range(1, 39)] + [f"B{i}" for i in range(1, 31)]
    for claim in claims.all_claims().values():
        assert claim.chapters
        assert all(re.fullmatch(r"\d\d[a-z]?", chapter) for chapter in claim.chapters)
        assert len(claim.text) > 20


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        (("A99", "holds", "1", "computed"), {}, "id is 'A99'"),
        (("a3", "holds", "1", "computed"), {}, "id is 'a3'"),
        (("A3", "true", "1", "computed"), {}, "must be one of: holds, holds if, wrong, untested"),
        (("A3", "holds", "", "computed"), {}, "figure"),
        (("A3", "holds", 4096, "computed"), {}, "figure"),
        (("A3", "holds", "1", "guessed"), {}, "how"),
        (("A3", "holds", "1", "measured on"), {}, "how"),
        (("A3", "holds", "1", "measured"), {}, "how"),
        *((("A3", "holds", "1", how), {}, "how") for how in ("computedly", "simulatedfoo", "measured ona card", 5)),
        ((["A3"], "holds", "1", "computed"), {}, "id is ['A3']"),
        (("A3", "holds if", "1", "computed"), {}, "condition"),
        (("A3", "holds if", "1", "computed"), {"condition": " "}, "condition"),
        (("A3", "holds", "1", "computed"), {"condition": "always"}, "condition"),
        (("A3", "wrong", "1", "computed"), {}, "right_value"),
        (("A3", "holds", "1", "computed"), {"right_value": "2"}, "right_value"),
    ],
)
def test_a_verdict_that_lacks_something_is_refused(args, kwargs, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        claims.verdict(*args, **kwargs)


def test_a_script_prints_the_verdict(capsys):
    claims.verdict("A11", "holds if", "1.07 billion", "computed", condition="for one head")
    out = capsys.readouterr().out
    assert out.startswith("A11: ")
    assert "holds if for one head: 1.07 billion (computed)" in out


def test_the_ledger_of_nothing_has_all_rows_and_says_who_will_test_them():
    text = claims.ledger([])
    for claim in claims.all_claims().values():
        assert text.count(f"**{claim.id}**") == 1
    assert text.count("untested yet") == sum(len(c.chapters) for c in claims.all_claims().values())
    assert "chapter 03b will test it" in text
    assert "holds 0, holds if 0, wrong 0, untested so far 68." in text


def test_the_ledger_shows_each_verdict_with_figure_how_and_link(tmp_path):
    nb = notebook(tmp_path / "00_memory_wall.ipynb", A3, A11, B3)
    text = claims.ledger([nb])
    row = next(line for line in text.splitlines() if "**A3**" in line)
    assert "**holds** | 4,096 bytes | computed" in row
    assert '<a href="chapters/00_memory_wall.html#claim-a3">00</a>' in row
    assert "**wrong; right is 2.62 MB**" in text
    assert "holds 1, holds if 1, wrong 1, untested so far 65." in text


def test_rows_keep_six_columns_whatever_a_verdict_says(tmp_path):
    text = claims.ledger([notebook(tmp_path / "00_x.ipynb", A3, A11, B3)])
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert {len(re.split(r"(?<!\\)\|", row)) for row in rows} == {8}


def test_two_chapters_on_one_claim_are_both_shown(tmp_path):
    first = notebook(tmp_path / "00_a.ipynb", A11)
    assert "chapter 03 will test it" in claims.ledger([first]).split("**A11**")[1].split("**A12**")[0]
    second = notebook(
        tmp_path / "03_b.ipynb", claims.make("A11", "wrong", "9 ms", "measured on an H200", right_value="9 ms")
    )
    part = claims.ledger([second, first]).split("**A11**")[1].split("**A12**")[0]
    assert part.index("holds if for one head") < part.index("wrong; right is 9 ms")
    assert "holds if 0, wrong 1," in claims.ledger([first, second])


def test_the_ledger_does_not_depend_on_the_order_of_notebooks(tmp_path):
    a = notebook(tmp_path / "00_a.ipynb", A11, A3)
    b = notebook(tmp_path / "03_b.ipynb", A11)
    assert claims.ledger([a, b]) == claims.ledger([b, a])


def test_conflicts_and_strangers_are_errors(tmp_path):
    with pytest.raises(ValueError, match="two verdicts on A3"):
        claims.ledger([notebook(tmp_path / "00_a.ipynb", A3, A3)])
    with pytest.raises(ValueError, match="belongs to chapter 00"):
        claims.ledger([notebook(tmp_path / "01_a.ipynb", A3)])
    with pytest.raises(ValueError, match="both chapter 00"):
        claims.ledger([notebook(tmp_path / "00_b.ipynb", A3), notebook(tmp_path / "00_c.ipynb", A3)])
    with pytest.raises(ValueError, match="no chapter's name"):
        claims.ledger([notebook(tmp_path / "notes.ipynb", A3)])
    (tmp_path / "02_x.ipynb").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        claims.ledger([tmp_path / "02_x.ipynb"])
    forged = notebook(tmp_path / "00_d.ipynb", claims.Verdict("A3", "certainly", "1", "computed"))
    with pytest.raises(ValueError, match="a verdict that is none"):
        claims.ledger([forged])


@pytest.mark.parametrize(
    "cells",
    [
        None, 5, {}, "", [1], [None], [[]], [{"outputs": None}], [{"outputs": {}}], [{"outputs": [1]}],
        [{"outputs": [{"metadata": None}]}], [{"outputs": [{"metadata": []}]}],
        [{"outputs": [{"metadata": {claims.MIME: 5}}]}], [{"outputs": [{"metadata": {claims.MIME: {"id": ["A3"]}}}]}],
        [{"outputs": [{"metadata": {claims.MIME: {**vars(A3), "condition": []}}}]}],
    ],
)  # fmt: skip
def test_a_notebook_of_another_form_is_named(tmp_path, cells):
    (tmp_path / "00_x.ipynb").write_text(json.dumps({"cells": cells}))
    with pytest.raises(ValueError, match=r"00_x\.ipynb"):
        claims.read(tmp_path / "00_x.ipynb")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"cells": [' + "[" * 100_000, "[]", "\xff"])
def test_a_file_that_is_no_notebook_is_named(tmp_path, text):
    (tmp_path / "00_x.ipynb").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"00_x\.ipynb"):
        claims.read(tmp_path / "00_x.ipynb")


@pytest.mark.parametrize("how", ["computed", "computed, by hand", "measured on an H200", "simulated (a queue)"])
def test_how_begins_with_a_whole_word(how):
    assert claims.make("A3", "holds", "1", how).how == how


def test_the_command_writes_the_ledger_and_names_what_is_owed(tmp_path, capsys):
    nb = notebook(tmp_path / "01_naive.ipynb")
    out = tmp_path / "book" / "claims.md"
    assert claims.main([str(nb), "--out", str(out)]) == 0
    assert "gives no verdict on B2" in capsys.readouterr().err
    assert out.read_text() == claims.ledger([nb])
    assert claims.main([str(nb), "--out", str(out), "--strict"]) == 1
    settled = notebook(
        tmp_path / "01_naive.ipynb", claims.make("B2", "holds if", "1.9", "computed", condition="n is long")
    )
    assert claims.main([str(settled), "--out", str(out), "--strict"]) == 0
    (tmp_path / "07_bad.ipynb").write_text("[]")
    assert claims.main([str(tmp_path / "07_bad.ipynb"), "--out", str(out)]) == 1


def test_markdown_shows_words_as_they_stand():
    assert claims._escaped("a_b*c `x_y|z` <k>") == r"a\_b\*c `x_y|z` &lt;k&gt;"
    assert claims._cell("`x|y` z|w") == r"`x\|y` z\|w"


# --- comparisons -----------------------------------------------------------------------------------------------------


def compared(capsys, speeds, *steps):
    claims.compare("A13", speeds, *steps, how="measured on a toy")
    return capsys.readouterr().out.splitlines()[-1].strip()


def test_a_comparison_holds_where_every_shape_is_in_range(capsys):
    step = ("a", "b", 1.5, 2.0)
    assert compared(capsys, {"1K": {"a": 3, "b": 2}, "2K": {"a": 2.04, "b": 1}}, step) == (
        "holds: a over b: 1.50 (1K), 2.04 (2K) (measured on a toy)"
    )
    assert compared(capsys, {"1K": {"a": 3, "b": 2}, "2K": {"a": 3, "b": 1}}, step).startswith(
        "holds if the shape is 1K: "
    )
    assert compared(capsys, {"1K": {"a": 3, "b": 2}, "2K": {"a": 3}}, step).startswith("holds if the shape is 1K: ")
    assert compared(capsys, {"1K": {"a": 1, "b": 1}}, step).startswith("wrong; right is a over b 1.0 to 1.0: ")


def test_each_step_of_a_comparison_must_hold(capsys):
    speeds = {"1K": {"a": 4, "b": 2, "c": 1}, "2K": {"a": 4, "b": 2, "c": 2}}
    steps = ("a", "b", 2.0, 2.0), ("b", "c", 2.0, 2.0)
    assert compared(capsys, speeds, *steps).startswith("holds if the shape is 1K: a over b: 2.00 (1K)")
    assert compared(capsys, speeds, ("a", "d", 1, 2)) == (
        "untested: a and d are not recorded in one shape yet (computed)"
    )
    assert "untested" in compared(capsys, {}, *steps)
    with pytest.raises(ValueError, match="steps is empty"):
        claims.compare("A13", speeds, how="computed")
