"""Verdicts on the claims that the book tests, and the ledger that collects them.

A chapter gives each verdict in a cell of its own::

    claims.verdict("A3", "holds", f"{bytes_per_token} bytes a token", "computed")

The verdict is shown to the reader and stored, machine-readable, with the cell's output. ``python -m kvlab.claims
NOTEBOOK... --out FILE`` reads the executed notebooks and writes the ledger: every claim, what was found, how, and a
link to the cell that found it.
"""

from __future__ import annotations

import argparse
import functools
import html
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvlab import display

VERDICTS = ("holds", "holds if", "wrong", "untested")
MIME = "application/vnd.kvlab.verdict+json"


@dataclass(frozen=True)
class Claim:
    """A statement put to the test: its id, what it says in short, and the chapters (numbers) that test it.

    Source: the two survey articles that the book begins with.
    """

    id: str
    text: str
    chapters: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """What one chapter found about one claim; all fields are words, "" where they do not apply.

    Source: the chapters' sections named Claims.
    """

    id: str
    verdict: str
    figure: str
    how: str
    condition: str = ""
    right_value: str = ""

    @property
    def anchor(self) -> str:
        """The HTML id beside the verdict on its chapter's page. Source: book/claims.md."""
        return f"claim-{self.id.lower()}"

    @property
    def sentence(self) -> str:
        """The verdict in words: "holds if ...", "wrong: ...", "holds". Source: book/claims.md."""
        if self.verdict == "holds if":
            return f"holds if {self.condition}"
        return f"wrong; right is {self.right_value}" if self.verdict == "wrong" else self.verdict


@functools.cache
def all_claims() -> dict[str, Claim]:
    """The 68 claims by id, in the ledger's order. Source: kvlab/claims.json."""
    entries = json.loads((Path(__file__).with_suffix(".json")).read_text(encoding="utf-8"))
    return {e["id"]: Claim(e["id"], e["text"], tuple(e["chapters"])) for e in entries}


def make(
    id: str, verdict: str, figure: str, how: str, *, condition: str | None = None, right_value: str | None = None
) -> Verdict:
    """Check the parts of a verdict and put them together; the arguments are those of the function ``verdict``.

    Raises: ValueError as ``verdict``.  Source: CONTRIBUTING.md.
    """
    if not isinstance(id, str) or id not in all_claims():
        raise ValueError(f"id is {id!r}; it must be one of the claims A1 to A38 and B1 to B30")
    if verdict not in VERDICTS:
        raise ValueError(f"verdict on {id} is {verdict!r}; it must be one of: {', '.join(VERDICTS)}")
    words = {"figure": figure, "how": how, "condition": condition, "right_value": right_value}
    for name, value in words.items():
        optional = name in ("condition", "right_value") and value is None
        if not optional and (not isinstance(value, str) or not value.strip()):
            raise ValueError(f"{name} of the verdict on {id} is {value!r}; it must be words")
    if not re.match(r"(computed|simulated)\b|measured on\s+\w", how):
        raise ValueError(
            f"how of the verdict on {id} is {how!r}; it must begin: computed, measured on (a machine), simulated"
        )
    for name, value, wanted in (("condition", condition, "holds if"), ("right_value", right_value, "wrong")):
        if (value is None) == (verdict == wanted):
            rule = f"{wanted!r} needs one" if value is None else f"only {wanted!r} has one"
            raise ValueError(f"{name} of the verdict {verdict!r} on {id} is {value!r}; {rule}")
    return Verdict(id, verdict, *(_line(w or "") for w in (figure, how, condition, right_value)))


def verdict(
    id: str, verdict: str, figure: str, how: str, *, condition: str | None = None, right_value: str | None = None
) -> None:
    """Say what became of a claim: shown as a line, and stored with the cell's output for the ledger.

    Shapes and units:
        id           "A1" to "A38", "B1" to "B30"
        verdict      "holds", "holds if", "wrong" or "untested"
        figure       what we found, with its unit, put together from computed values (for "untested": why)
        how          begins with "computed", "measured on" (which machine) or "simulated"
        condition    for "holds if": what must be so
        right_value  for "wrong": what is right instead

    Raises: ValueError for an unknown id or verdict, or a part that is missing or does not belong.

    Source: book/claims.md.
    """
    found = make(id, verdict, figure, how, condition=condition, right_value=right_value)
    claim = all_claims()[id]
    line = (
        f'<a id="{found.anchor}"></a>**{id}** · *{_escaped(claim.text)}*  \n'
        f"**{_escaped(found.sentence)}** · {_escaped(found.figure)} ({_escaped(found.how)})"
    )
    plain = f"{id}: {claim.text}\n  {found.sentence}: {found.figure} ({found.how})"
    # In the metadata: as a representation of its own it would be one that no front end knows.
    display.emit({"text/markdown": line, "text/plain": plain}, {MIME: asdict(found)})


def compare(
    id: str, speeds: Mapping[str, Mapping[str, float]], *steps: tuple[str, str, float, float], how: str
) -> None:
    """The verdict on "this is low to high times as fast as that", from speeds in several shapes.

    It holds where it does in every shape, to one decimal place; where it does in some, it holds if the shape is one of
    them; untested where a pair was never measured.

    Shapes and units: ``speeds`` gives for each shape, in words, {implementation: speed}, in one unit a shape; a step is
    (fast, slow, low, high), and a claim of several steps makes each of them; ``how`` as in ``verdict``.

    Raises: ValueError where there is no step, or as ``verdict``.

    Source: book/claims.md.
    """
    if not steps:
        raise ValueError("steps is empty; a comparison needs (fast, slow, low, high)")
    good, figures, spans = set(speeds), [], []
    for fast, slow, low, high in steps:
        ratios = {at: found[fast] / found[slow] for at, found in speeds.items() if fast in found and slow in found}
        if not ratios:
            return verdict(id, "untested", f"{fast} and {slow} are not recorded in one shape yet", "computed")
        good &= {at for at, ratio in ratios.items() if low <= round(ratio, 1) <= high}
        figures.append(f"{fast} over {slow}: " + ", ".join(f"{ratio:.2f} ({at})" for at, ratio in ratios.items()))
        spans.append(f"{fast} over {slow} {min(ratios.values()):.1f} to {max(ratios.values()):.1f}")
    word = "holds" if good == set(speeds) else "holds if" if good else "wrong"
    condition = "the shape is " + " or ".join(at for at in speeds if at in good) if word == "holds if" else None
    right = "; ".join(spans) if word == "wrong" else None
    return verdict(id, word, "; ".join(figures), how, condition=condition, right_value=right)


# --- the ledger ----------------------------------------------------------------------------------------------------


def read(notebook: str | Path) -> list[Verdict]:
    """The verdicts that an executed notebook's outputs hold in their metadata, in order.

    Raises: ValueError naming the notebook where it cannot be read, or gives two verdicts on one claim.

    Source: Jupyter's notebook format.
    """
    try:
        cells = _list(json.loads(Path(notebook).read_text(encoding="utf-8"))["cells"])
        outputs = [output for cell in cells for output in _list(cell.get("outputs", []))]
        held = [output.get("metadata", {}).get(MIME) for output in outputs]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{notebook} cannot be read as a notebook: {error}") from None
    found: list[Verdict] = []
    for parts in held:
        if parts is None:
            continue
        try:
            one = make(**{k: v for k, v in parts.items() if v != "" or k not in ("condition", "right_value")})
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{notebook} holds a verdict that is none: {error}") from None
        if any(one.id == other.id for other in found):
            raise ValueError(f"{notebook} gives two verdicts on {one.id}; a chapter gives one")
        found.append(one)
    return found


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"it has {value!r} where a list must be")
    return value


def chapter_of(notebook: str | Path) -> str:
    """The number of a notebook's chapter, from its name: "03b" of ``03b_hopper.ipynb``.

    Raises: ValueError for a name that does not begin with a number and an underscore.

    Source: CONTRIBUTING.md.
    """
    match = re.match(r"(\d\d[a-z]?)_", Path(notebook).name)
    if match is None:
        raise ValueError(f"{notebook} is no chapter's name; it must be like 03_flash.ipynb")
    return match[1]


def collect(notebooks: Iterable[str | Path]) -> dict[str, tuple[Path, list[Verdict]]]:
    """The verdicts of each chapter's notebook, by chapter number in order.

    Raises: ValueError as ``read`` and ``chapter_of``; for two notebooks of one chapter; for a verdict on a claim that
    ``kvlab/claims.json`` gives to other chapters.

    Source: book/claims.md.
    """
    found: dict[str, tuple[Path, list[Verdict]]] = {}
    for notebook in sorted(map(Path, notebooks), key=lambda path: path.name):
        chapter = chapter_of(notebook)
        if chapter in found:
            raise ValueError(f"{notebook} and {found[chapter][0]} are both chapter {chapter}")
        verdicts = read(notebook)
        for one in verdicts:
            if chapter not in all_claims()[one.id].chapters:
                theirs = " and ".join(all_claims()[one.id].chapters)
                raise ValueError(f"{notebook} gives a verdict on {one.id}, which belongs to chapter {theirs}")
        found[chapter] = (notebook, verdicts)
    return dict(sorted(found.items()))


def owed(found: dict[str, tuple[Path, list[Verdict]]]) -> list[str]:
    """What the chapters at hand still owe: a line for each claim they should settle and do not.

    Source: CONTRIBUTING.md.
    """
    lines = []
    for claim in all_claims().values():
        for chapter in claim.chapters:
            if chapter in found:
                notebook, verdicts = found[chapter]
                given = [one for one in verdicts if one.id == claim.id]
                if not given:
                    lines.append(f"{notebook} gives no verdict on {claim.id}: {claim.text}")
                elif given[0].verdict == "untested":
                    lines.append(f"{notebook} leaves {claim.id} untested: {given[0].figure}")
    return lines


def ledger(notebooks: Iterable[str | Path]) -> str:
    """The text of ``book/claims.md``: a table of all claims, with a row for each chapter that tests one.

    Raises: ValueError as ``collect``.  Source: book/claims.md.
    """
    found = collect(notebooks)
    rows, counts = [], dict.fromkeys(VERDICTS, 0)
    for claim in all_claims().values():
        given = []
        first = f'<a id="{claim.id.lower()}"></a>**{claim.id}** | {_cell(claim.text)}'
        for chapter in claim.chapters:
            path, verdicts = found.get(chapter, (None, []))
            one = next((v for v in verdicts if v.id == claim.id), None)
            if one is None:
                when = f"chapter {chapter} will test it" if path is None else f"chapter {chapter} has not settled it"
                cells = ["untested yet", when, "", f"{chapter}"]
            else:
                assert path is not None
                given.append(one.verdict)
                link = f'<a href="chapters/{html.escape(path.stem)}.html#{one.anchor}">{chapter}</a>'
                cells = [f"**{_cell(one.sentence)}**", _cell(one.figure), _cell(one.how), link]
            rows.append("| " + " | ".join([first, *cells]) + " |")
            first = " | "
        counts[_overall(given)] += 1
    return "\n".join(
        [
            "<!-- Written by `make book` from the chapters' verdicts: edit those. -->",
            "",
            "# The claims, and what became of them",
            "",
            "Two survey articles of 2026 are this book's starting point. Each of their claims is treated as a "
            "hypothesis. A chapter tests it and gives one of four verdicts: it **holds**; it **holds if** a condition "
            "is met, which is named; it is **wrong**, with the right value; or it is **untested**. The last column "
            "leads to the cell that produced the figure. *Computed* figures follow from shapes and rates, *measured* "
            "ones from a record of the machine named, *simulated* ones from a model of a server.",
            "",
            f"Of {len(all_claims())} claims: holds {counts['holds']}, holds if {counts['holds if']}, wrong "
            f"{counts['wrong']}, untested so far {counts['untested']}. One that two chapters settled counts by the "
            "harder verdict.",
            "",
            "| id | claim, in short | verdict | our figure | how | chapter |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _overall(given: Sequence[str]) -> str:
    return max(given, key=("untested", "holds", "holds if", "wrong").index, default="untested")


def _line(text: str) -> str:
    return " ".join(text.split())


def _escaped(text: str) -> str:
    """Text that Markdown must show as it stands, but for `code`."""
    parts = text.split("`")
    plain = [re.sub(r"([\\*_$|\[\]#~{}])", r"\\\1", html.escape(p, quote=False)) for p in parts]
    if len(parts) % 2 == 0:
        return "\\`".join(plain)
    return "".join(f"`{parts[i]}`" if i % 2 else plain[i] for i in range(len(parts)))


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", _escaped(text))


def main(argv: Sequence[str] | None = None) -> int:
    """Write the ledger from executed notebooks; gives the exit status (1 with ``--strict`` where a verdict is owed).

    Source: book/claims.md.
    """
    parser = argparse.ArgumentParser(prog="python -m kvlab.claims", description="Build the ledger of claims.")
    parser.add_argument("notebooks", nargs="*", metavar="NOTEBOOK", help="executed chapters (.ipynb)")
    parser.add_argument("--out", required=True, metavar="FILE", help="where to write it")
    parser.add_argument("--strict", action="store_true", help="fail where a chapter leaves one of its claims open")
    options = parser.parse_args(argv)
    try:
        text = ledger(options.notebooks)
        debts = owed(collect(options.notebooks))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    out = Path(options.out)
    if not out.exists() or out.read_text(encoding="utf-8") != text:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    for debt in debts:
        print(f"{'error' if options.strict else 'note'}: {debt}", file=sys.stderr)
    return 1 if options.strict and debts else 0


if __name__ == "__main__":
    sys.exit(main())
