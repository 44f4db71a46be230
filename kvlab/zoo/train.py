"""Train the models that ship, from the source of the reader's own Python.

    python -m kvlab.zoo.train stdlib-7m --stdlib DIR --out runs/stdlib-7m
    python -m kvlab.zoo.train stdlib-1m --stdlib DIR --out runs/stdlib-1m --teacher runs/stdlib-7m/model

A run can be stopped at any moment and started again: see ``kvlab.zoo.training``.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kvlab import checkpoint
from kvlab import config as model_configs
from kvlab.batch import Batch
from kvlab.cache import NoCache
from kvlab.config import ModelConfig
from kvlab.model import Decoder, Ops, swiglu
from kvlab.zoo import scoring
from kvlab.zoo.training import (
    Plan,
    Windows,
    add_arguments,
    fit,
    plan_facts,
    read_corpus,
    read_plan,
    run_records,
    tokenize,
)

__all__ = ["Plan", "Windows", "build", "export", "main", "tokenize", "train"]


class _Loss:
    """Mean cross-entropy (nats a token) of a decoder over windows, with a teacher's distribution mixed in."""

    def __init__(self, model: Decoder, plan: Plan, teacher: Decoder | None) -> None:
        self.model, self.plan, self.teacher = model, plan, teacher
        shape = [[0] * plan.sequence_length] * plan.batch_size
        self.template = Batch.build(range(plan.batch_size), shape, [0] * plan.batch_size, device=model.device)
        self.template.logits_indices = torch.empty(0)  # every row is scored, none gathered
        self.cache, self.teacher_cache = NoCache(model.config), NoCache((teacher or model).config)
        self.fn: Callable[..., Tensor] = torch.compile(self._compute) if plan.compile else self._compute
        model.rope.inv_freq = model.rope.inv_freq.to(model.device)
        if teacher is not None:
            teacher.rope.inv_freq = teacher.rope.inv_freq.to(model.device)

    def __call__(self, windows: Tensor) -> Tensor:
        batch = dataclasses.replace(self.template, token_ids=windows[:, :-1].flatten())
        self.cache.prepare(batch)
        self.teacher_cache.prepare(batch)
        with torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.model.device.type == "cuda"):
            return self.fn(batch, windows[:, 1:].flatten())

    def _compute(self, batch: Batch, targets: Tensor) -> Tensor:
        logits = self.model.logits(self.model.hidden(batch, self.cache))
        loss = functional.cross_entropy(logits, targets)
        if self.teacher is None:
            return loss
        with torch.no_grad():
            wanted = self.teacher.logits(self.teacher.hidden(batch, self.teacher_cache)).softmax(dim=-1)
        imitation = -(wanted * logits.log_softmax(dim=-1)).sum(dim=-1).mean()
        return (1 - self.plan.distill) * loss + self.plan.distill * imitation


def build(config: ModelConfig, plan: Plan, device: torch.device | str) -> Decoder:
    """A decoder ready to be trained: dropout in its MLPs, projections into the residual stream started smaller.

    Source: Radford et al. 2019 (1 / sqrt(2 layers) at the residual projections).
    """
    torch.manual_seed(plan.seed)

    def dropped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return functional.dropout(swiglu(gate, up), plan.dropout, training=torch.is_grad_enabled())

    model = Decoder(config, Ops(swiglu=dropped_swiglu) if plan.dropout else None, device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(1 / math.sqrt(2 * config.num_layers))
    return model


def train(
    config: ModelConfig,
    plan: Plan,
    train_files: Sequence[np.ndarray],
    validation: Sequence[tuple[np.ndarray, int]],
    out: Path,
    *,
    device: torch.device | str = "cpu",
    teacher: Decoder | None = None,
    stop_after: int | None = None,
    log: Callable[[str], object] = print,
) -> tuple[Decoder, list[dict[str, float]]]:
    """Train one decoder, or continue the run that stands in ``out``.

    Shapes and units: ``train_files`` token ids a file; ``validation`` pairs of (token ids, bytes) a file;
    ``stop_after`` leaves the run unfinished after that many steps in all, its checkpoint written. Gives the decoder
    (float32) and the loss curve: step, train_loss (nats a token, mean since the last point), validation (bits a
    byte), learning_rate, seconds.

    Raises: ValueError for a corpus shorter than a batch, or a checkpoint of another plan.

    Source: "The models that ship" in the project's design.
    """
    model = build(config, plan, device)
    curve = fit(
        model, _Loss(model, plan, teacher if plan.distill else None), plan, train_files,
        lambda: (scoring.bits_per_byte(model, validation), "bits a byte"), out,
        name=config.name, stop_after=stop_after, log=log,
    )  # fmt: skip
    return model, curve


def export(model: Decoder, folder: Path) -> None:
    """Write a decoder as a Hugging Face folder in bfloat16. Source: the Hugging Face checkpoint layout."""
    rounded = Decoder(model.config, dtype=torch.bfloat16, device=model.device)
    rounded.load_state_dict(model.state_dict())
    checkpoint.save(rounded, folder)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line of this module. Raises: ValueError as ``train``.  Source: kvlab.zoo."""
    from kvlab import bench, zoo

    parser = argparse.ArgumentParser(prog="python -m kvlab.zoo.train", description="train a model that ships")
    parser.add_argument("name", choices=["stdlib-7m", "stdlib-1m"])
    parser.add_argument("--teacher", help="a trained model's folder, whose distribution the loss then mixes in")
    add_arguments(parser, steps=4000, distill=None)
    args = parser.parse_args(argv)
    if args.distill is None:
        args.distill = 0.5 if args.teacher else 0.0
    plan = read_plan(args)
    config, out = model_configs.get(args.name), Path(args.out)
    tokenizer = zoo.tokenizer()
    corpus = read_corpus(args)
    files = tokenize(corpus.train, tokenizer)
    validation = scoring.encode(corpus.validation, tokenizer)
    print(f"{sum(map(len, files)) / 1e6:.1f} M tokens to train on, {len(files)} files", flush=True)
    torch.set_float32_matmul_precision("high")
    teacher = checkpoint.load(args.teacher, device=args.device) if args.teacher else None
    model, curve = train(
        config, plan, files, validation, out, device=args.device, teacher=teacher,
        log=lambda line: print(line, flush=True),
    )  # fmt: skip
    export(model, out / "model")
    session = bench.Session(args.device)
    command = " ".join(["python -m kvlab.zoo.train", *(sys.argv[1:] if argv is None else argv)])
    facts = {"command": command, "train_tokens": sum(map(len, files)), "train_files": len(files), **plan_facts(plan)}
    made = run_records(
        session, "zoo_training.run", "zoo_training.loss_curve", args.name, curve, "validation bits/byte", facts
    )
    bench.save(made, out / "records.json")


if __name__ == "__main__":
    main()
