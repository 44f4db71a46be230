"""How the models that ship, and the heads beside them, are trained: plans, windows of text, a loop that can be stopped.

Stopped at any moment and started again with the same arguments, a run continues from its last checkpoint and ends as
if it had never stopped: what step n trains on, and which units it drops, depend on (seed, n) alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from kvlab.zoo import corpus as corpora

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from kvlab.bench import Record, Session


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


def device_of(model: nn.Module) -> torch.device:
    """Where a model's weights are. Source: kvlab.zoo."""
    return next(model.parameters()).device


def _optimizer(model: nn.Module, plan: Plan) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=plan.learning_rate,
        betas=(0.9, 0.95),
        fused=device_of(model).type == "cuda",
    )


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside, then rename: a reader sees the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.part")
    write(beside)
    os.replace(beside, path)


def save_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, facts: dict[str, Any]) -> None:
    """Write weights, optimizer state, RNG state and ``facts`` (step, plan, curve) as one safetensors file, atomically.

    Source: kvlab.zoo.
    """
    tensors = {"rng.cpu": torch.get_rng_state()}
    if device_of(model).type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(device_of(model))
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{key}.{name}"] = value
    tensors = {name: t.contiguous().cpu() for name, t in tensors.items()}
    _write(path, lambda part: save_file(tensors, part, metadata={"facts": json.dumps(facts)}))


def load_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> dict[str, Any]:
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
                    on_host = key == "step" and device_of(model).type != "cuda"
                    state[key] = value if on_host else value.to(device_of(model))
            optimizer.state[parameter] = state
        torch.set_rng_state(file.get_tensor("rng.cpu"))
        if "rng.cuda" in names:
            torch.cuda.set_rng_state(file.get_tensor("rng.cuda"), device_of(model))
    return facts


def fit(
    model: nn.Module,
    loss_of: Callable[[Tensor], Tensor],
    plan: Plan,
    train_files: Sequence[np.ndarray],
    evaluate: Callable[[], tuple[float, str]],
    out: Path,
    *,
    name: str,
    stop_after: int | None = None,
    log: Callable[[str], object] = print,
) -> list[dict[str, float]]:
    """Train the parameters of a model that require grad, or continue the run that stands in ``out``.

    Shapes and units: ``loss_of`` takes windows [batch_size, sequence_length + 1] int64 and gives a scalar in nats a
    token; ``evaluate`` gives a number and its unit; ``stop_after`` leaves the run unfinished after that many steps in
    all, its checkpoint written. Gives the curve: step, train_loss (mean since the last point), validation,
    learning_rate, seconds.

    Raises: ValueError for a corpus shorter than a batch, or a checkpoint of another plan.

    Source: kvlab.zoo; Loshchilov and Hutter 2019 (AdamW).
    """
    windows = Windows(train_files, plan.sequence_length, plan.batch_size, plan.seed)
    optimizer, device = _optimizer(model, plan), device_of(model)
    facts: dict[str, Any] = {"step": 0, "plan": asdict(plan), "curve": [], "seconds": 0.0, "losses": []}
    state = out / "state.safetensors"
    if state.exists():
        facts = load_state(state, model, optimizer, plan)
        log(f"continuing {name} at step {facts['step']} of {plan.steps}")
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
            value, unit = evaluate()
            point = {
                "step": done,
                "train_loss": torch.stack(losses).mean().item(),
                "validation": value,
                "learning_rate": plan.rate(step),
                "seconds": time.perf_counter() - clock,
            }
            losses = []
            facts["curve"].append(point)
            tokens = done * plan.batch_size * plan.sequence_length
            log(
                f"{name} step {done}/{plan.steps}  {tokens / 1e6:.1f} M tokens  "
                f"train {point['train_loss']:.4f} nats a token  validation {point['validation']:.4f} {unit}  "
                f"{point['seconds']:.0f} s"
            )
        if done % plan.save_every == 0 or done == last:
            facts |= {"step": done, "seconds": time.perf_counter() - clock, "losses": [x.item() for x in losses]}
            save_state(state, model, optimizer, facts)
    return facts["curve"]


def add_arguments(parser: argparse.ArgumentParser, **defaults: int | float | None) -> None:
    """The options that every training command has: where the text comes from, where to write, and the plan.

    Source: kvlab.zoo.
    """
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--stdlib", action="append", help="a standard library's folder; may be given several times")
    source.add_argument("--corpus", help="a file written by python -m kvlab.zoo.corpus")
    parser.add_argument("--out", required=True, help="folder for the checkpoint, the model and the records")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, kind in Plan.__annotations__.items():
        if name == "compile":
            parser.add_argument("--compile", action="store_true")
        else:
            default = defaults.get(name, getattr(Plan, name, None))
            parser.add_argument(f"--{name.replace('_', '-')}", type=float if kind == "float" else int, default=default)


def read_plan(args: argparse.Namespace) -> Plan:
    """The plan that the options of ``add_arguments`` name. Source: kvlab.zoo."""
    return Plan(**{name: getattr(args, name) for name in Plan.__annotations__})


def read_corpus(args: argparse.Namespace) -> corpora.Corpus:
    """The text that the options of ``add_arguments`` name; by default this Python's own library. Source: kvlab.zoo."""
    if args.corpus:
        return corpora.load(args.corpus)
    return corpora.collect(args.stdlib or [sysconfig.get_paths()["stdlib"]])


def plan_facts(plan: Plan) -> dict[str, int | float]:
    """A plan as sizes that a record can hold. Source: kvlab.zoo."""
    return {key: int(value) if isinstance(value, bool) else value for key, value in asdict(plan).items()}


def run_records(
    session: Session, run: str, curve: str, name: str, points: Sequence[Mapping[str, float]], unit: str,
    facts: Mapping[str, int | float | str],
) -> list[Record]:  # fmt: skip
    """What is recorded of a finished run of ``name``: its seconds as the bench ``run``, its points as ``curve``.

    Shapes and units: ``points`` as ``fit`` gives them, whose ``validation`` has the ``unit``.

    Source: kvlab.zoo.
    """
    made = [session.record(run, name, points[-1]["seconds"], "s", shape=dict(facts), dtype=torch.float32)]
    return made + [
        session.record(
            curve, name, point["validation"], unit, dtype=torch.float32,
            shape={k: v for k, v in point.items() if k != "validation"},
        )
        for point in points
    ]  # fmt: skip
