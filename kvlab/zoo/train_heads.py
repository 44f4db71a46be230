"""Train the heads of chapter 05: on the frozen target that ships, and jointly with a copy of it.

    python -m kvlab.zoo.train_heads --corpus corpus.json.gz --out runs/heads

trains both one after the other, measures both on validation text and writes ``frozen/heads.safetensors``,
``joint/heads.safetensors``, ``joint/model`` and ``records.json``. A run can be stopped at any moment and started again:
see ``kvlab.zoo.training``.

Frozen heads learn to say what the target itself will say further on: its distribution there costs nothing more. Joint
heads and their copy of the target learn from the text, as in multi-token prediction.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from kvlab import checkpoint
from kvlab.batch import Batch
from kvlab.cache import NoCache
from kvlab.model import Decoder
from kvlab.sampling import SamplingParams
from kvlab.speculative import HeadDrafter, Heads, generate
from kvlab.zoo import scoring
from kvlab.zoo.training import Plan, add_arguments, fit, plan_facts, read_corpus, read_plan, run_records, tokenize

KINDS = ("frozen", "joint")


class HeadedModel(nn.Module):
    """A decoder and its heads, and the loss they are trained with.

    Shapes and units: ``joint`` trains the decoder too, on the text; else it is frozen, and the heads learn its own
    distributions. ``share`` is the weight of the heads' mean loss beside the decoder's.

    Source: Cai et al. 2024 (Medusa); Gloeckle et al. 2024 (multi-token prediction).
    """

    def __init__(self, decoder: Decoder, heads: Heads, plan: Plan, *, joint: bool, share: float = 1.0) -> None:
        super().__init__()
        self.decoder, self.heads, self.joint, self.share = decoder.requires_grad_(joint), heads, joint, share
        shape = [[0] * plan.sequence_length] * plan.batch_size
        self.template = Batch.build(range(plan.batch_size), shape, [0] * plan.batch_size, device=decoder.device)
        self.template.logits_indices = torch.empty(0)  # every row is scored, none gathered
        self.cache = NoCache(decoder.config)
        decoder.rope.inv_freq = decoder.rope.inv_freq.to(decoder.device)

    def loss(self, windows: Tensor) -> Tensor:
        """Nats a token: the heads' mean, and the decoder's own where both are trained.

        Shapes and units: windows [batch_size, sequence_length + 1] int64; gives a scalar.

        Source: Gloeckle et al. 2024.
        """
        kind = self.decoder.device.type
        batch = dataclasses.replace(self.template, token_ids=windows[:, :-1].flatten())
        self.cache.prepare(batch)
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            with torch.set_grad_enabled(self.joint):
                states = self.decoder.hidden(batch, self.cache)
                logits = self.decoder.logits(states)
            length, most = windows.shape[1] - 1, self.heads.num_heads
            states = states.view(len(windows), length, -1)
            own = None if self.joint else logits.softmax(dim=-1).view(len(windows), length, -1)
            ahead = length - most  # places from which every head still has something to name
            made, losses = states[:, :ahead].flatten(0, 1), []
            for k in range(most):
                known = self.decoder.embed_tokens(windows[:, k + 1 : k + 1 + ahead]).flatten(0, 1)
                made = self.heads(k, made, known)
                wanted = windows[:, k + 2 : k + 2 + ahead] if own is None else own[:, k + 1 : k + 1 + ahead]
                losses.append(functional.cross_entropy(self.decoder.logits(made), wanted.flatten(0, 1)))
        loss = torch.stack(losses).mean()
        if not self.joint:
            return loss
        return functional.cross_entropy(logits, windows[:, 1:].flatten()) + self.share * loss


@torch.no_grad()
def acceptance(
    decoder: Decoder, heads: Heads, files: Sequence[tuple[np.ndarray, int]], *, prompt: int, new: int, most: int
) -> float:
    """Tokens a proposal of the heads yields, greedy, on continuations of text the decoder never saw.

    Shapes and units: ``files`` as ``scoring.encode`` gives them; ``most`` continuations of ``new`` tokens, each after
    ``prompt`` tokens.

    Raises: ValueError where no file is long enough.

    Source: chapter 05; Leviathan et al. 2023.
    """
    from kvlab.naive import NaiveCache

    prompts = scoring.continuations(files, prompt, most)
    cache = NaiveCache(
        decoder.config, len(prompts), min(prompt + new + heads.num_heads, decoder.config.max_seq_len),
        dtype=decoder.dtype, device=decoder.device,
    )  # fmt: skip
    drafter = HeadDrafter(decoder, heads)
    _, stats = generate(decoder, cache, drafter, prompts, SamplingParams(max_tokens=new), progress=False)
    return stats.mean_acceptance_length


def train(
    decoder: Decoder,
    plan: Plan,
    train_files: Sequence[np.ndarray],
    validation: Sequence[tuple[np.ndarray, int]],
    out: Path,
    *,
    joint: bool,
    num_heads: int = 4,
    width: int | None = None,
    prompt: int = 256,
    new: int = 64,
    most: int = 16,
    stop_after: int | None = None,
    log: Callable[[str], object] = print,
) -> tuple[HeadedModel, list[dict[str, float]]]:
    """Train heads on a frozen decoder, or jointly with a copy of it, or continue the run that stands in ``out``.

    Shapes and units: as ``kvlab.zoo.train.train``; ``validation`` of the curve is the mean acceptance length of a chain
    of ``num_heads`` tokens (tokens a proposal), measured as ``acceptance`` does. The decoder given is not changed.

    Raises: ValueError for a corpus shorter than a batch, windows no longer than the heads look ahead, or a checkpoint
    of another plan.

    Source: chapter 05; Cai et al. 2024, Gloeckle et al. 2024.
    """
    if plan.sequence_length <= num_heads:
        raise ValueError(f"sequence_length is {plan.sequence_length}; it must be over num_heads, {num_heads}")
    torch.manual_seed(plan.seed)
    config = decoder.config
    heads = Heads(config.hidden_size, num_heads, width, config.norm_eps).to(decoder.device)
    model = HeadedModel(copy.deepcopy(decoder) if joint else decoder, heads, plan, joint=joint)
    curve = fit(
        model, torch.compile(model.loss) if plan.compile else model.loss, plan, train_files,
        lambda: (
            acceptance(model.decoder, heads, validation, prompt=prompt, new=new, most=most), "tokens a proposal"
        ),
        out, name="joint heads" if joint else "heads", stop_after=stop_after, log=log,
    )  # fmt: skip
    return model, curve


def main(argv: Sequence[str] | None = None) -> None:
    """The command line of this module. Raises: ValueError as ``train``.  Source: chapter 05."""
    from kvlab import bench, costs, zoo
    from kvlab.zoo.train import export

    parser = argparse.ArgumentParser(prog="python -m kvlab.zoo.train_heads", description="train heads that draft")
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS, help="default: both")
    parser.add_argument("--target", help="a trained model's folder (default: stdlib-7m as it ships)")
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--width", type=int, help="of a head's hidden layer (default: the model's)")
    add_arguments(parser, steps=3000, learning_rate=1e-3, distill=0.0)
    parser.add_argument("--prompt", type=int, default=256, help="tokens before each measured continuation")
    parser.add_argument("--new", type=int, default=64, help="tokens of each measured continuation")
    parser.add_argument("--most", type=int, default=16, help="measured continuations")
    args = parser.parse_args(argv)
    plan, out = read_plan(args), Path(args.out)
    corpus, tokenizer = read_corpus(args), zoo.tokenizer()
    files, validation = tokenize(corpus.train, tokenizer), scoring.encode(corpus.validation, tokenizer)
    torch.set_float32_matmul_precision("high")
    command = " ".join(["python -m kvlab.zoo.train_heads", *(sys.argv[1:] if argv is None else argv)])
    session, made = bench.Session(args.device), list[bench.Record]()
    for kind in args.kinds:
        if args.target:
            decoder = checkpoint.load(args.target, device=args.device, dtype=torch.float32)
        else:
            decoder = zoo.load("stdlib-7m", args.device, torch.float32)
        model, curve = train(
            decoder, plan, files, validation, out / kind, joint=kind == "joint", num_heads=args.num_heads,
            width=args.width, prompt=args.prompt, new=args.new, most=args.most,
            log=lambda line: print(line, flush=True),
        )  # fmt: skip
        model.heads.save(out / kind / "heads.safetensors")
        if kind == "joint":
            export(model.decoder, out / kind / "model")
        facts = {
            "command": command, "target": decoder.config.name, "num_heads": args.num_heads,
            "width": model.heads.width, "parameters": sum(p.numel() for p in model.heads.parameters()),
            "target_parameters": costs.num_parameters(decoder.config).total, "kv_bytes_per_token": 0,
            "bits_per_byte": scoring.bits_per_byte(model.decoder, validation), **plan_facts(plan),
        }  # fmt: skip
        made += run_records(
            session, "heads_training.run", "heads_training.curve", kind, curve, "tokens/proposal", facts
        )
        bench.save(made, out / "records.json")


if __name__ == "__main__":
    main()
