"""A checkpoint's folder: its safetensors checked and read into a decoder, a decoder written as one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvlab import runtime
from kvlab.checkpoint._config import ARCHITECTURES, comparable, config_from_hf, config_to_hf
from kvlab.config import ModelConfig
from kvlab.model import Decoder, Ops

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def load(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    max_seq_len: int | None = None,
    ops: Ops | None = None,
) -> Decoder:
    """Read a local Hugging Face folder: ``config.json`` and ``model.safetensors``, or shards and their index.

    Shapes and units: ``device`` None is ``runtime.device()``; ``dtype`` None is what the file stores the embedding
    in; ``max_seq_len`` in tokens replaces the context of config.json (RoPE keeps the angles of config.json); ``ops``
    as in ``Decoder``. One copy of the weights is made, tensor by tensor.

    Raises: FileNotFoundError for a folder or file that is not there; ValueError as ``config_from_hf``, for a ``dtype``
    that is not one of float64, float32, float16 and bfloat16, for a tensor that is missing, not expected, of a wrong
    shape or quantised, for an index that disagrees with its shards or leaves the folder, and for a folder that holds
    pickles only; MemoryError where a GPU is too full. Each comes before memory is taken for weights.

    Source: chapter 01; the safetensors format.
    """
    if dtype is not None and dtype not in _DTYPES.values():
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(map(str, _DTYPES.values()))}, or None")
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not a folder on this machine; kvlab loads local folders and downloads none"
        )
    config = config_from_hf(_read_json(folder / "config.json"), folder.resolve().name)
    if max_seq_len is not None:
        config = replace(config, max_seq_len=max_seq_len)
    decoder = Decoder(config, ops, device="meta")
    expected = {_hf_name(key): key for key in decoder.state_dict()}
    if config.tie_embeddings:
        del expected["lm_head.weight"]
    stored = _headers(_weight_files(folder))
    _check_tensors(folder, stored, {name: decoder.state_dict()[key].shape for name, key in expected.items()}, config)
    if dtype is None:
        dtype = _DTYPES[stored["model.embed_tokens.weight"].dtype]
    target = runtime.device() if device is None else torch.device(device)
    size = sum(decoder.state_dict()[key].numel() for key in expected.values())
    what = f"loading {config.name} ({size:,} parameters, {str(dtype).removeprefix('torch.')})"
    runtime.require_memory(size * dtype.itemsize, target, what, dtype.itemsize, "parameters")
    weights = {expected[name]: tensor for name, tensor in _read(stored, expected, target, dtype)}
    if config.tie_embeddings:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    decoder.load_state_dict(weights, strict=True, assign=True)
    if config.tie_embeddings:
        decoder.lm_head.weight = decoder.embed_tokens.weight
    return decoder


def _hf_name(key: str) -> str:
    return key if key.startswith("lm_head.") else f"model.{key}"


def _read_json(file: Path) -> Any:
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there; a checkpoint folder must hold {file.name}")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, brackets without end
        raise ValueError(f"{file} is not valid JSON: {error}") from None


def _weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """The safetensors files of a folder, each with the tensor names that an index gives it (None: no index)."""
    if (folder / _SINGLE).is_file():
        return {folder / _SINGLE: None}
    if not (folder / _INDEX).is_file():
        pickles = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLES)
        if pickles:
            raise ValueError(
                f"{folder} holds {', '.join(pickles[:3])} and no {_SINGLE}; kvlab never opens a pickle, which can run "
                "any code: convert the checkpoint to safetensors"
            )
        raise FileNotFoundError(f"{folder} holds neither {_SINGLE} nor {_INDEX}; one must be there")
    index = _read_json(folder / _INDEX)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / _INDEX} has no weight_map; it must map each tensor to its file")
    files: dict[Path, set[str] | None] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or "/" in name or "\\" in name or name in ("", ".", ".."):
            raise ValueError(
                f"{_INDEX}: {tensor} is said to be in {name!r}; a shard must be a file in the folder itself"
            )
        if not name.endswith(".safetensors"):
            raise ValueError(f"{_INDEX}: {tensor} is said to be in {name!r}; a shard must be a .safetensors file")
        names = files.setdefault(folder / name, set())
        assert names is not None
        names.add(tensor)
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{file} is named by {_INDEX} and is not there")
    return files


@dataclass(frozen=True)
class _Stored:
    """Where a tensor is, its shape and safetensors' name of its dtype."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def _open(file: Path, device: str = "cpu") -> Any:
    from safetensors import SafetensorError, safe_open  # kept out of `import kvlab`

    try:
        return safe_open(file, framework="pt", device=device)
    except SafetensorError as error:
        raise ValueError(f"{file} is not a complete safetensors file: {error}") from None


def _headers(files: Mapping[Path, set[str] | None]) -> dict[str, _Stored]:
    """What each file says it holds, read from its header alone."""
    stored: dict[str, _Stored] = {}
    for file, promised in files.items():
        with _open(file) as shard:
            names = set(shard.keys())
            if promised is not None and names != promised:
                name = sorted(names ^ promised)[0]
                said = "lists" if name in promised else "does not list"
                raise ValueError(f"{file}: {_INDEX} {said} the tensor {name} there; the index and the shard must agree")
            for name in sorted(names):
                part = shard.get_slice(name)
                stored[name] = _Stored(file, tuple(part.get_shape()), part.get_dtype())
    return stored


def _check_tensors(
    folder: Path, stored: dict[str, _Stored], expected: Mapping[str, torch.Size], config: ModelConfig
) -> None:
    for name, shape in expected.items():
        if name not in stored:
            close = [other for other in stored if other.endswith(name.removeprefix("model."))]
            found = f" (it holds {close[0]})" if close else ""
            raise ValueError(
                f"{folder} has no tensor {name}{found}; the model of its config.json needs it, {list(shape)}"
            )
        if stored[name].shape != tuple(shape):
            raise ValueError(
                f"{folder}: the tensor {name} is {list(stored[name].shape)}; by config.json it must be {list(shape)}"
            )
    for name, tensor in stored.items():
        if name.endswith("rotary_emb.inv_freq"):  # old checkpoints keep the angles, which config.json gives anyway
            continue
        if name == "lm_head.weight" and config.tie_embeddings:
            _check_tied(folder, stored)
        elif name not in expected:
            raise ValueError(
                f"{folder}: the tensor {name} {list(tensor.shape)} has no place in the model of its config.json"
            )
        if tensor.dtype not in _DTYPES:
            raise ValueError(
                f"{folder}: the tensor {name} is stored as {tensor.dtype}; it must be one of {', '.join(_DTYPES)}"
            )


def _check_tied(folder: Path, stored: dict[str, _Stored]) -> None:
    """Some exporters write the output layer although it is the embedding; the two must then be the same."""
    head, embedding = (dict(_read(stored, [name], torch.device("cpu"), None))[name] for name in _TIED)
    if not torch.equal(head, embedding):
        raise ValueError(
            f"{folder}: config.json sets tie_word_embeddings, and lm_head.weight differs from model.embed_tokens.weight"
        )


_TIED = ("lm_head.weight", "model.embed_tokens.weight")


def _read(
    stored: Mapping[str, _Stored], names: Iterable[str], device: torch.device, dtype: torch.dtype | None
) -> Iterable[tuple[str, Tensor]]:
    """Tensors one by one, each file opened once. A copy is made: safetensors maps the file into memory, and a mapped
    weight would change, or crash the process, when somebody writes to the file."""
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(stored[name].file, []).append(name)
    for file, held in by_file.items():
        with _open(file) as shard:
            for name in held:
                yield name, shard.get_tensor(name).to(device=device, dtype=dtype, copy=True)


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a local Hugging Face folder, from its ``tokenizer.json``.

    Shapes and units: gives a ``tokenizers.Tokenizer``: ``encode(text).ids`` is a list of token ids, ``decode(ids)``
    text.

    Raises: FileNotFoundError where the folder has no tokenizer.json; ValueError where the file is not a tokenizer.

    Source: chapter 01; Hugging Face tokenizers.
    """
    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there; kvlab reads tokenizer.json and no other tokenizer file")
    from tokenizers import Tokenizer  # kept out of `import kvlab`

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file} is not a tokenizer: {error}") from None


def _alone(tensor: Tensor) -> Tensor:
    """The tensor in memory of its own: merged projections share one piece, which safetensors refuses."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def save(decoder: Decoder, path: str | os.PathLike[str], architecture: str = "LlamaForCausalLM") -> None:
    """Write a decoder as a Hugging Face folder (``config.json``, ``model.safetensors``) that transformers reads too.

    Shapes and units: weights are stored in the decoder's dtype, tied embeddings once. ``architecture`` is a key of
    ``ARCHITECTURES``. Both files are written beside their places before either is put there, each whole or not at all.
    Of a stretched RoPE the layout keeps the trained context and the factor; ``load`` gives as ``max_seq_len`` what
    these reach.

    Raises: ValueError where the architecture is unknown or cannot describe this decoder, or the decoder holds other
    tensors than its configuration says (an output layer of its own where it should be tied), before anything is
    written.

    Source: chapter 01; the safetensors format.
    """
    if architecture not in tuple(ARCHITECTURES):
        raise ValueError(f"architecture is {architecture!r}; it must be one of {', '.join(ARCHITECTURES)}")
    config = decoder.config
    hf = config_to_hf(config, architecture, decoder.dtype)
    back = comparable(config_from_hf(hf, config.name))
    wrong = [f.name for f in fields(config) if getattr(back, f.name) != getattr(comparable(config), f.name)]
    if wrong:
        name = wrong[0]
        raise ValueError(f"a {architecture} cannot have {name} {getattr(config, name)!r}; choose another architecture")
    weights = decoder.state_dict()
    shapes, right = (
        {k: list(t.shape) for k, t in d.items()} for d in (weights, Decoder(config, device="meta").state_dict())
    )
    for key in sorted(shapes.keys() | right.keys()):
        if shapes.get(key) != right.get(key):
            raise ValueError(f"decoder has {key} {shapes.get(key)}; by its configuration it must be {right.get(key)}")
    if config.tie_embeddings:
        head, embedding = weights.pop("lm_head.weight"), weights["embed_tokens.weight"]
        if head.data_ptr() != embedding.data_ptr() and not torch.equal(head, embedding):
            raise ValueError(
                "decoder has an lm_head.weight that differs from embed_tokens.weight; its configuration ties them, so "
                "they must be equal (or tie_embeddings False)"
            )
    from safetensors.torch import save_file  # kept out of `import kvlab`

    weights = {_hf_name(key): _alone(tensor.detach().cpu().contiguous()) for key, tensor in weights.items()}
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    partials = {name: folder / f".{name}.partial" for name in (_SINGLE, "config.json")}
    try:
        save_file(weights, partials[_SINGLE], metadata={"format": "pt"})
        partials["config.json"].write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")
        for name, partial in partials.items():
            os.replace(partial, folder / name)
    finally:
        for partial in partials.values():
            partial.unlink(missing_ok=True)
