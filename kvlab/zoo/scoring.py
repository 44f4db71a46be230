"""How good a model of text is: bits a byte, and how often a draft names the token its target would.

Bits a byte, not perplexity a token: models and compressors that cut text differently stand on one scale.
"""

from __future__ import annotations

import ast
import codeop
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kvlab.batch import Batch
from kvlab.cache import NoCache
from kvlab.model import Decoder
from kvlab.zoo.corpus import end_of_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def encode(texts: dict[str, str], tokenizer: Tokenizer) -> list[tuple[np.ndarray, int]]:
    """Each file as (token ids after an end-of-text token, number of UTF-8 bytes). Source: kvlab.zoo."""
    start = end_of_text(tokenizer)
    return [
        (np.array([start, *tokenizer.encode(text).ids], dtype=np.int64), len(text.encode())) for text in texts.values()
    ]


def windows(length: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Cut ``length`` predictions into windows: (start, end, first scored), each prediction scored exactly once.

    Shapes and units: all in tokens; a window holds ``context`` tokens at most, the next begins ``stride`` later and
    scores what the last one did not.

    Raises: ValueError where stride is not between 1 and context.

    Source: kvlab.zoo; the strided evaluation of Hugging Face's perplexity guide.
    """
    if not 1 <= stride <= context:
        raise ValueError(f"stride is {stride}; it must be between 1 and the context, {context}")
    scored = 0
    for start in range(0, max(length, 1), stride):
        end = min(start + context, length)
        yield start, end, scored
        scored = end
        if end == length:
            return


def _logits(model: Decoder, token_ids: np.ndarray) -> Tensor:
    batch = Batch.build([0], [token_ids.tolist()], [0], device=model.device)
    cache = NoCache(model.config)
    cache.prepare(batch)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
        return model.logits(model.hidden(batch, cache))


@torch.no_grad()
def total_bits(model: Decoder, token_ids: np.ndarray, *, stride: int | None = None) -> float:
    """Bits a model needs for ``token_ids`` [L] after their first, over windows of its whole context.

    Shapes and units: bits; ``stride`` tokens between windows, half the context by default.

    Raises: ValueError for a bad stride.  Source: Shannon 1951; kvlab.zoo.
    """
    context = model.config.max_seq_len
    nats = 0.0
    for start, end, first in windows(len(token_ids) - 1, context, stride or context // 2):
        if end == first:
            continue
        logits = _logits(model, token_ids[start:end])[first - start :]
        targets = torch.from_numpy(token_ids[first + 1 : end + 1].astype(np.int64)).to(logits.device)
        nats += functional.cross_entropy(logits, targets, reduction="sum").item()
    return nats / math.log(2)


def bits_per_byte(model: Decoder, files: Sequence[tuple[np.ndarray, int]], *, stride: int | None = None) -> float:
    """Bits a byte over files given as ``encode`` gives them; all bytes of each file are counted.

    Shapes and units: bits a byte; ``stride`` as ``total_bits``.

    Raises: ValueError where there are no bytes.  Source: kvlab.zoo.
    """
    size = sum(n for _, n in files)
    if size == 0:
        raise ValueError("files hold no bytes; bits a byte needs at least one")
    return sum(total_bits(model, ids, stride=stride) for ids, _ in files) / size


@torch.no_grad()
def named(model: Decoder, token_ids: np.ndarray) -> np.ndarray:
    """The likeliest next token after each token but the last.

    Shapes and units: ``token_ids`` [L]; gives [L - 1] int64, from windows of the whole context.

    Source: kvlab.zoo.
    """
    context = model.config.max_seq_len
    found = [np.empty(0, dtype=np.int64)]
    for start, end, first in windows(len(token_ids) - 1, context, context // 2):
        if end > first:
            found.append(_logits(model, token_ids[start:end])[first - start :].argmax(-1).cpu().numpy())
    return np.concatenate(found)


def continuations(files: Sequence[tuple[np.ndarray, int]], prompt: int, most: int) -> list[list[int]]:
    """Places to go on from: each file's first, third, fifth... ``prompt`` tokens; evenly spaced ones if over ``most``.

    Shapes and units: ``files`` as ``encode`` gives them; token ids.

    Raises: ValueError where no file is long enough.  Source: kvlab.zoo.
    """
    starts = [ids[i : i + prompt].tolist() for ids, _ in files for i in range(0, len(ids) - prompt, 2 * prompt)]
    if not starts:
        raise ValueError(f"files have fewer than {prompt} tokens each; acceptance needs one longer")
    return [starts[i] for i in np.linspace(0, len(starts) - 1, min(most, len(starts))).astype(int)]


def tokens_per_step(agreed: np.ndarray, gamma: int = 4) -> float:
    """Tokens that one greedy speculative step yields, on text that the target itself wrote greedily.

    Shapes and units: ``agreed`` [n] bool, whether the draft names the token that stands at each place; each step
    proposes ``gamma`` tokens, keeps those before the first wrong one, and adds the target's own. Gives n tokens over
    the number of steps.

    Raises: ValueError for gamma under 1 or no tokens.  Source: Leviathan et al. 2023.
    """
    if gamma < 1 or len(agreed) == 0:
        raise ValueError(f"gamma is {gamma} and there are {len(agreed)} tokens; both must be 1 or more")
    at, steps = 0, 0
    while at < len(agreed):
        accepted = 0
        while accepted < gamma and at + accepted < len(agreed) and agreed[at + accepted]:
            accepted += 1
        at += accepted + 1
        steps += 1
    return len(agreed) / steps


def function_prompts(source: str) -> list[str]:
    """The opening of each function of a file: header and docstring, or header and first statement.

    A method's opening has its class's header above it. Functions whose body is the docstring or the first statement
    alone are left out, as nothing would be left to complete. The text ends in a full line.

    Raises: SyntaxError where ``source`` is not Python.  Source: kvlab.zoo.
    """
    lines = source.splitlines(keepends=True)
    prompts = []
    tree = ast.parse(source)
    owners: list[ast.Module | ast.ClassDef] = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
    for owner in owners:
        head = ""
        if isinstance(owner, ast.ClassDef):
            header_end = owner.body[0].lineno - 1
            if isinstance(first := owner.body[0], ast.FunctionDef | ast.ClassDef) and first.decorator_list:
                header_end = first.decorator_list[0].lineno - 1
            head = "".join(line for line in lines[owner.lineno - 1 : header_end] if line.strip())
        for node in owner.body:
            if isinstance(node, ast.FunctionDef) and len(node.body) > 1:
                start = node.decorator_list[0].lineno if node.decorator_list else node.lineno
                prompts.append(head + "".join(lines[start - 1 : node.body[0].end_lineno]))
    return prompts


def full_lines(text: str) -> str:
    """``text`` up to and with its last line end. Source: kvlab.zoo."""
    return text[: text.rfind("\n") + 1]


def is_python_or_prefix(source: str) -> bool:
    """Whether ``source`` is Python, or could become so if more were typed.

    Shapes and units: text that ends in a full line. A body that is still missing, an open bracket and an open
    string are prefixes; a syntax error is not.

    Source: the standard library's codeop, the rule of the interactive prompt.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            codeop.compile_command(source, "<completion>", "exec")
        except (SyntaxError, ValueError, OverflowError):
            return False
    return True
