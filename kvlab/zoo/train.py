"""Train the models that ship, from the source of the reader's own Python.

    python -m kvlab.zoo.train stdlib-7m --stdlib DIR --out runs/stdlib-7m
    python -m kvlab.zoo.train stdlib-1m --stdlib DIR --out runs/stdlib-1m --teacher runs/stdlib-7m/model

Stopped at any moment and started again with the same arguments, a run continues from its last checkpoint and ends as
if it had never stopped: what step n trains on, and which units it drops, depend on (seed, n) alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from kvlab import checkpoint
from kvlab import config as model_configs
from kvlab.batch import Batch
from kvlab.cache import NoCache
from kvlab.config import ModelConfig
from kvlab.model import Decoder, Ops, swiglu
from kvlab.zoo import corpus as corpora
from kvlab.zoo import scoring

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Plan:
    """How a run goes.

    Shapes and units: ``steps`` optimizer steps of ``batch_size`` windows of ``sequence_length`` tokens; the learning
    rate climbs over ``warmup`` steps and then falls linearly to 0; ``dropout`` is the share of MLP units dropped;
    ``distill`` the weight of the teacher's distribution in the loss (the text itself has the rest); ``eval_every``
    and ``save_every`` in steps; ``compile`` uses torch.compile.

    Source: Loshchilov and Hutter 2019 (AdamW); Hinton et al. 2015 (distillation).
    """

    steps: int
    batch_size: int = 16
    sequence_length: int = 4096
    learning_rate: float = 3e-3
    warmup: int = 200
    weight_decay: float = 0.1
    dropout: float = 0.0
    distill: float = 0.0
    seed: int = 0
    eval_every: int = 500
    save_every: int = 500
    compile: bool = False

    def rate(self, step: int) -> float:
        """The learning rate of a step (from 0): linear climb, linear fall. Source: kvlab.zoo."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        return self.learning_rate * (self.steps - step) / max(1, self.steps - self.warmup)


class Windows:
    """Windows of a token stream in an order that depends on (seed, step) alone.

    Shapes and units: ``files`` are arrays of token ids, each beginning with the end-of-text token; every epoch lays
    them end to end in a fresh order, at a fresh offset, and cuts windows of ``length`` + 1 tokens.
    ``batch(step)`` gives [batch_size, length + 1] int64.

    Raises: ValueError where all files together are shorter than one batch.

    Source: kvlab.zoo.
    """

    def __init__(self, files: Sequence[np.ndarray], length: int, batch_size: int, seed: int) -> None:
        self.files, self.length, self.batch_size, self.seed = files, length, batch_size, seed
        self.per_epoch = (sum(map(len, files)) - length - 1) // length // batch_size
        if self.per_epoch < 1:
            raise ValueError(
                f"the corpus has {sum(map(len, files))} tokens; one batch needs {batch_size} windows of {length + 1}"
            )
        self._epoch = -1
        self._stream: np.ndarray = np.empty(0, dtype=np.uint16)
        self._starts: np.ndarray = np.empty(0, dtype=np.int64)

    def batch(self, step: int) -> Tensor:
        """The windows of one step, [batch_size, length + 1] int64. Source: kvlab.zoo."""
        epoch, nth = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng([self.seed, epoch])
            self._stream = np.concatenate([self.files[i] for i in rng.permutation(len(self.files))])
            first = rng.integers(self.length)
            self._starts = first + self.length * rng.permutation(self.per_epoch * self.batch_size)
            self._epoch = epoch
        starts = self._starts[nth * self.batch_size : (nth + 1) * self.batch_size]
        rows = [self._stream[s : s + self.length + 1] for s in starts]
        return torch.from_numpy(np.stack(rows).astype(np.int64))


def tokenize(texts: dict[str, str], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Token ids (uint16) of each file, after an end-of-text token. Source: kvlab.zoo."""
    start = corpora.end_of_text(tokenizer)
    values = list(texts.values())
    encoded = (e.ids for i in range(0, len(values), 256) for e in tokenizer.encode_batch_fast(values[i : i + 256]))
    return [np.array([start, *ids], dtype=np.uint16) for ids in encoded]


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


def _optimizer(model: Decoder, plan: Plan) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=plan.learning_rate,
        betas=(0.9, 0.95),
        fused=model.device.type == "cuda",
    )


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside, then rename: a reader sees the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.part")
    write(beside)
    os.replace(beside, path)


def save_state(path: Path, model: Decoder, optimizer: torch.optim.Optimizer, facts: dict[str, Any]) -> None:
    """Write weights, optimizer state, RNG state and ``facts`` (step, plan, curve) as one safetensors file, atomically.

    Source: kvlab.zoo.
    """
    tensors = {"rng.cpu": torch.get_rng_state()}
    if model.device.type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(model.device)
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{key}.{name}"] = value
    tensors = {name: t.contiguous().cpu() for name, t in tensors.items()}
    _write(path, lambda part: save_file(tensors, part, metadata={"facts": json.dumps(facts)}))


def load_state(path: Path, model: Decoder, optimizer: torch.optim.Optimizer, plan: Plan) -> dict[str, Any]:
    """Put back what ``save_state`` wrote, and give its facts.

    Raises: ValueError where the checkpoint belongs to another plan.  Source: kvlab.zoo.
    """
    with safe_open(path, "pt", device="cpu") as file:
        facts = json.loads(file.metadata()["facts"])
        if facts["plan"] != asdict(plan):
            other = {k: v for k, v in facts["plan"].items() if v != asdict(plan)[k]}
            raise ValueError(f"checkpoint {path} is of another plan ({other}); use those settings or another --out")
        names = set(file.keys())
        for name, parameter in model.named_parameters():
            parameter.data.copy_(file.get_tensor(f"model.{name}"))
            state = {}
            for key in ("step", "exp_avg", "exp_avg_sq"):
                if f"optimizer.{key}.{name}" in names:
                    value = file.get_tensor(f"optimizer.{key}.{name}")
                    on_host = key == "step" and model.device.type != "cuda"
                    state[key] = value if on_host else value.to(model.device)
            optimizer.state[parameter] = state
        torch.set_rng_state(file.get_tensor("rng.cpu"))
        if "rng.cuda" in names:
            torch.cuda.set_rng_state(file.get_tensor("rng.cuda"), model.device)
    return facts


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
    windows = Windows(train_files, plan.sequence_length, plan.batch_size, plan.seed)
    model = build(config, plan, device)
    optimizer = _optimizer(model, plan)
    loss_of = _Loss(model, plan, teacher if plan.distill else None)
    facts: dict[str, Any] = {"step": 0, "plan": asdict(plan), "curve": [], "seconds": 0.0, "losses": []}
    state = out / "state.safetensors"
    if state.exists():
        facts = load_state(state, model, optimizer, plan)
        log(f"continuing {config.name} at step {facts['step']} of {plan.steps}")
    last = min(plan.steps, stop_after or plan.steps)
    losses: list[Tensor] = [torch.tensor(x, device=device) for x in facts["losses"]]
    clock = time.perf_counter() - facts["seconds"]
    for step in range(facts["step"], last):
        torch.manual_seed((plan.seed << 32) + step + 1)  # dropout of step n is the same however often a run stopped
        for group in optimizer.param_groups:
            group["lr"] = plan.rate(step)
        loss = loss_of(windows.batch(step).to(device, non_blocking=True))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        done = step + 1
        if done % plan.eval_every == 0 or done == plan.steps:
            point = {
                "step": done,
                "train_loss": torch.stack(losses).mean().item(),
                "validation": scoring.bits_per_byte(model, validation),
                "learning_rate": plan.rate(step),
                "seconds": time.perf_counter() - clock,
            }
            losses = []
            facts["curve"].append(point)
            tokens = done * plan.batch_size * plan.sequence_length
            log(
                f"{config.name} step {done}/{plan.steps}  {tokens / 1e6:.1f} M tokens  "
                f"train {point['train_loss']:.4f} nats a token  validation {point['validation']:.4f} bits a byte  "
                f"{point['seconds']:.0f} s"
            )
        if done % plan.save_every == 0 or done == last:
            facts |= {"step": done, "seconds": time.perf_counter() - clock, "losses": [x.item() for x in losses]}
            save_state(state, model, optimizer, facts)
    return model, facts["curve"]


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
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--stdlib", action="append", help="a standard library's folder; may be given several times")
    source.add_argument("--corpus", help="a file written by python -m kvlab.zoo.corpus")
    parser.add_argument("--out", required=True, help="folder for the checkpoint, the model and the records")
    parser.add_argument("--teacher", help="a trained model's folder, whose distribution the loss then mixes in")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, kind in Plan.__annotations__.items():
        if name == "compile":
            parser.add_argument("--compile", action="store_true")
        else:
            default = {"steps": 4000, "distill": None}.get(name, getattr(Plan, name, None))
            parser.add_argument(f"--{name.replace('_', '-')}", type=float if kind == "float" else int, default=default)
    args = parser.parse_args(argv)
    if args.distill is None:
        args.distill = 0.5 if args.teacher else 0.0
    plan = Plan(**{name: getattr(args, name) for name in Plan.__annotations__})
    config, out = model_configs.get(args.name), Path(args.out)
    tokenizer = zoo.tokenizer()
    own = sysconfig.get_paths()["stdlib"]
    corpus = corpora.load(args.corpus) if args.corpus else corpora.collect(args.stdlib or [own])
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
    settings = {key: int(value) if isinstance(value, bool) else value for key, value in asdict(plan).items()}
    facts = {"command": command, "train_tokens": sum(map(len, files)), "train_files": len(files), **settings}
    made = [session.record("zoo_training.run", args.name, curve[-1]["seconds"], "s", shape=facts, dtype=torch.float32)]
    made += [
        session.record(
            "zoo_training.loss_curve", args.name, point["validation"], "validation bits/byte", dtype=torch.float32,
            shape={k: v for k, v in point.items() if k != "validation"},
        )
        for point in curve
    ]  # fmt: skip
    bench.save(made, out / "records.json")


if __name__ == "__main__":
    main()
