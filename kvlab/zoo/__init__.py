"""Two small decoders that ship: ``stdlib-7m``, a target, and ``stdlib-1m``, its draft, trained on Python's own library.

Nothing is downloaded. Weights, tokenizer and held-out text lie beside this file, with their checksums.
``kvlab.zoo.train`` trains the models, ``kvlab.zoo.evaluate`` says how good they are.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from kvlab.model import Decoder, Ops

NAMES = ("stdlib-7m", "stdlib-1m")

FOLDER = Path(__file__).parent
_HEADS = "stdlib-7m/heads.safetensors"


def _manifest() -> dict[str, str]:
    file = FOLDER / "manifest.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read: {error}; install kvlab again") from None
    if not isinstance(found, dict) or not all(isinstance(digest, str) for digest in found.values()):
        raise ValueError(f"{file} is no object of names and checksums; install kvlab again")
    return found


def _verify(relative: str) -> Path:
    """The path of a shipped file whose checksum is right."""
    file, expected = FOLDER / relative, _manifest().get(relative)
    if expected is None:
        raise ValueError(f"{relative} is not listed in {FOLDER / 'manifest.json'}")
    if not file.is_file():
        raise ValueError(f"{file} is missing; install kvlab again")
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != expected:
        raise ValueError(f"{file} has checksum {found[:16]}..., it must be {expected[:16]}...; install kvlab again")
    return file


def load(
    name: str, device: torch.device | str | None = None, dtype: torch.dtype | None = None, *, ops: Ops | None = None
) -> Decoder:
    """One of the two decoders that ship, its files' checksums verified.

    Shapes and units: ``name`` is "stdlib-7m" or "stdlib-1m"; ``device`` None is ``runtime.device()``; ``dtype`` None
    is bfloat16 (as stored) on a GPU and float32 on a CPU, where bfloat16 is slow; ``ops`` as in ``Decoder``.

    Raises: ValueError for another name, device or dtype, and for a file that is missing or differs from its checksum,
    naming it.

    Source: "The models that ship" in the project's design.
    """
    if name not in NAMES:
        raise ValueError(f"name is {name!r}; it must be one of {', '.join(NAMES)}")
    from kvlab import checkpoint, runtime  # not at the top: `zoo.held_out()` needs neither

    try:
        device = runtime.device() if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {device!r}; it must be one that torch knows: {error}") from None
    for file in ("config.json", "model.safetensors"):
        _verify(f"{name}/{file}")
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return checkpoint.load(FOLDER / name, device=device, dtype=dtype, ops=ops)


@functools.cache
def _tokenizer_json() -> str:
    return _verify("tokenizer.json").read_text(encoding="utf-8")


def tokenizer() -> Tokenizer:
    """The byte-level BPE of 4096 tokens that both models use; each call makes one of its own, to be set up at will.

    Shapes and units: ``encode(text).ids`` gives token ids, ``decode(ids)`` the text again, for any text. Id 0 is
    ``<|endoftext|>``, which stands before each file; written out in a text it is encoded as plain characters.

    Raises: ValueError where the file is missing or differs from its checksum.

    Source: "The models that ship" in the project's design.
    """
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_str(_tokenizer_json())
    loaded.encode_special_tokens = True
    return loaded


@functools.cache
def _held_out() -> dict[str, str]:
    return json.loads(_verify("held_out.json").read_bytes())


def held_out() -> dict[str, str]:
    """Source text that neither model was trained on: whole modules with their tests, path to text.

    Raises: ValueError where the file is missing or differs from its checksum.

    Source: the standard library of CPython 3.11; its licence is ``LICENSE-held_out.txt`` beside the text.
    """
    return dict(_held_out())


def heads_file() -> Path | None:
    """The trained heads of ``stdlib-7m``, their checksum verified; None where this version ships none.

    Raises: ValueError where the file is missing or differs from its checksum.

    Source: chapter 05; ``kvlab.zoo.train_heads``.
    """
    return _verify(_HEADS) if _HEADS in _manifest() else None


def write_manifest() -> dict[str, str]:
    """Write ``manifest.json``, the SHA-256 of every shipped file (path to hexadecimal digest). Source: kvlab.zoo."""
    files = ["tokenizer.json", "held_out.json", _HEADS]
    files += [f"{name}/{file}" for name in NAMES for file in ("config.json", "model.safetensors")]
    present = [file for file in files if (FOLDER / file).is_file()]
    sums = {file: hashlib.sha256((FOLDER / file).read_bytes()).hexdigest() for file in present}
    (FOLDER / "manifest.json").write_text(json.dumps(sums, indent=2) + "\n")
    return sums
