"""The text the shipped models learn from: Python's standard library, split by module, and one byte-level BPE.

    python -m kvlab.zoo.corpus --stdlib DIR [--stdlib DIR ...] --out corpus.json.gz

collects the text of one or several standard libraries, and trains the tokenizer if ``--tokenizer FILE`` is given.
A module stands in one split with its tests and submodules, in every version of the library, so that nothing of a
held-out module is ever trained on.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

HELD_OUT = (
    "bisect", "calendar", "colorsys", "configparser", "csv", "difflib", "fractions", "graphlib", "heapq", "netrc",
    "queue", "sched", "shelve", "textwrap",
)  # fmt: skip
"""Modules looked at once, after training: their text ships as ``held_out.json``."""

VALIDATION = ("filecmp", "fnmatch", "getopt", "gzip", "quopri", "shlex", "timeit", "zipapp")
"""Modules used while training, to choose settings."""

SKIPPED = ("site-packages", "dist-packages", "lib-dynload", "__pycache__", "ensurepip", "pydoc_data", "encodings")
"""Folders that hold other people's packages, or tables rather than code."""

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 4096

PRE_TOKENS = r"\n+|[ .]?[\p{L}\p{M}_]+| ?\p{N}| ?[^\s\p{L}\p{M}\p{N}_]+| +|[^\S\n ]+"
"""How text is cut before BPE: line ends and runs of spaces (an indentation is one piece), words with the space or
dot before them, single digits, runs of punctuation."""

_RUN_LINES, _RUN_CHARACTERS = 8, 240


@dataclass
class Corpus:
    """Three splits, each a dictionary from ``version/path`` to the file's text.

    Shapes and units: texts are str; ``dropped`` names training files left out because a run of their lines also
    stands in another split.

    Source: "The models that ship" in the project's design.
    """

    train: dict[str, str] = field(default_factory=dict)
    validation: dict[str, str] = field(default_factory=dict)
    held_out: dict[str, str] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)


def split_of(path: str) -> str:
    """Which split a path inside the library belongs to: "held_out", "validation" or "train".

    A part of the path names a module when it equals the module's name once ``.py`` and a leading ``test_`` or
    underscore are taken off: ``textwrap.py``, ``test/test_textwrap.py``, ``test/test_textwrap/data.py``.

    Source: "The models that ship" in the project's design.
    """
    names = {re.sub(r"^(test_|_)", "", part.removesuffix(".py")) for part in PurePosixPath(path).parts}
    if names & set(HELD_OUT):
        return "held_out"
    return "validation" if names & set(VALIDATION) else "train"


def _version_of(stdlib: Path) -> str:
    """The name of a library's folder, such as ``python3.11``."""
    return stdlib.resolve().name


def collect(stdlibs: Sequence[Path | str]) -> Corpus:
    """Read every ``.py`` file of one or several standard libraries, and split them by module.

    Shapes and units: ``stdlibs`` are folders such as ``lib/python3.11``. Validation and held-out text come from the
    first one alone; training text from all, each distinct file once. A training file that shares a run of 8 lines
    that are not blank (240 characters or more) with another split of any version is dropped.

    Raises: ValueError for a folder without ``.py`` files, or without one of the held-out modules in the first.

    Source: "The models that ship" in the project's design.
    """
    corpus, seen = Corpus(), set()
    guarded: list[str] = []  # held-out and validation text of every version
    for nth, stdlib in enumerate(map(Path, stdlibs)):
        files = _read(stdlib)
        if not files:
            raise ValueError(f"stdlib {stdlib} holds no .py file; it must be a standard library's folder")
        for path, text in files.items():
            split = split_of(path)
            if split != "train":
                guarded.append(text)
                if nth > 0:
                    continue
            digest = hashlib.sha256(text.encode()).digest()
            if split == "train" and digest in seen:
                continue
            seen.add(digest)
            getattr(corpus, split)[f"{_version_of(stdlib)}/{path}"] = text
    missing = [m for m in HELD_OUT if not any(split_of(p) == "held_out" and m in p for p in corpus.held_out)]
    if missing:
        raise ValueError(f"stdlib {stdlibs[0]} lacks {', '.join(missing)}; it must hold every held-out module")
    corpus.dropped = overlapping(corpus.train, guarded)
    for name in corpus.dropped:
        del corpus.train[name]
    return corpus


def _read(stdlib: Path) -> dict[str, str]:
    texts = {}
    for file in sorted(stdlib.rglob("*.py")):
        relative = file.relative_to(stdlib)
        if any(part in SKIPPED for part in relative.parts):
            continue
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue  # a handful of tests are in other encodings on purpose
        if text.strip() and "\0" not in text:
            texts[relative.as_posix()] = text.replace("\r\n", "\n")
    return texts


def runs_of_lines(text: str) -> set[int]:
    """Hashes of every run of 8 consecutive lines that are not blank and have 240 characters or more together.

    Shapes and units: lines are stripped first, so that indentation does not hide a copy.

    Source: n-gram overlap as a contamination check, Brown et al. 2020 (GPT-3), appendix C.
    """
    lines = [line for raw in text.splitlines() if (line := raw.strip())]
    runs = ("\n".join(lines[i : i + _RUN_LINES]) for i in range(len(lines) - _RUN_LINES + 1))
    return {hash(run) for run in runs if len(run) >= _RUN_CHARACTERS}


def overlapping(train: dict[str, str], guarded: Iterable[str]) -> list[str]:
    """Names of the ``train`` files that share a run of lines with any of the ``guarded`` texts.

    Shapes and units: as ``runs_of_lines``.

    Source: Brown et al. 2020, appendix C.
    """
    forbidden = set().union(*map(runs_of_lines, guarded), set())
    return [name for name, text in train.items() if not forbidden.isdisjoint(runs_of_lines(text))]


def save(corpus: Corpus, path: Path | str) -> None:
    """Write a corpus as gzipped JSON; the same corpus gives the same bytes. Source: kvlab.zoo."""
    data = json.dumps(vars(corpus), ensure_ascii=False, sort_keys=True).encode()
    Path(path).write_bytes(gzip.compress(data, mtime=0))


def load(path: Path | str) -> Corpus:
    """Read what ``save`` wrote. Raises: ValueError for a file of another shape.  Source: kvlab.zoo."""
    data = json.loads(gzip.decompress(Path(path).read_bytes()))
    if not isinstance(data, dict) or set(data) != set(vars(Corpus())):
        raise ValueError(f"corpus {path} is not one written by kvlab.zoo.corpus")
    return Corpus(**data)


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A byte-level BPE learnt from ``texts``: 256 bytes, one special token (id 0) and merges up to ``vocab_size``.

    Source: Sennrich et al. 2016 (BPE), Radford et al. 2019 (bytes as the base alphabet).
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def end_of_text(tokenizer: Tokenizer) -> int:
    """The id of the token that stands before each file.

    Raises: ValueError for a tokenizer without it.  Source: kvlab.zoo."""
    token = tokenizer.token_to_id(END_OF_TEXT)
    if token is None:
        raise ValueError(f"tokenizer has no {END_OF_TEXT}; it must be the one of kvlab.zoo")
    return token


def main(argv: Sequence[str] | None = None) -> None:
    """The command line of this module. Raises: ValueError as ``collect``.  Source: kvlab.zoo."""
    parser = argparse.ArgumentParser(prog="python -m kvlab.zoo.corpus", description="collect the training text")
    parser.add_argument("--stdlib", action="append", help="a standard library's folder (default: this Python's own)")
    parser.add_argument("--out", required=True, help="corpus file to write (.json.gz)")
    parser.add_argument("--tokenizer", help="also train the tokenizer, on the first library's training split, here")
    args = parser.parse_args(argv)
    corpus = collect(args.stdlib or [sysconfig.get_paths()["stdlib"]])
    save(corpus, args.out)
    for split in ("train", "validation", "held_out"):
        texts = getattr(corpus, split)
        print(f"{split:10} {len(texts):6} files {sum(len(t.encode()) for t in texts.values()):10} bytes")
    print(f"{len(corpus.dropped)} training files dropped for lines shared with another split: {corpus.dropped}")
    if args.tokenizer:
        first = next(iter(corpus.held_out)).split("/")[0]  # one version is enough, and six times as fast
        train_tokenizer(text for name, text in corpus.train.items() if name.split("/")[0] == first).save(args.tokenizer)
        print(f"wrote {args.tokenizer}")


if __name__ == "__main__":
    main()
