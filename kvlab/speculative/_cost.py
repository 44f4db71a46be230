"""What speculation gains, predicted: accepted tokens on one side, the cost of proposing and verifying on the other."""

from __future__ import annotations

from collections.abc import Iterable

from kvlab import costs
from kvlab.batch import as_count, as_int, as_ints
from kvlab.config import ModelConfig, is_number


def _require_share(alpha: float) -> None:
    if not is_number(alpha) or not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha!r}; it must be a probability, 0 to 1")


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens that one step yields on average: 1 + alpha + ... + alpha^gamma.

    Each of ``gamma`` drafts is accepted with probability ``alpha``, independently, if all before it were; the target
    adds one of its own.

    Raises: ValueError for an alpha outside 0..1 or a gamma that is no integer, 0 or more.

    Source: chapter 05; Leviathan et al. 2023, equation 1.
    """
    _require_share(alpha)
    gamma = as_count(gamma, "gamma")
    return float(sum(alpha**i for i in range(gamma + 1)))


def saturation(
    config: ModelConfig, hardware: costs.Hardware, context: int = 0, batch: int = 1, dtype: str = "bf16"
) -> float:
    """Tokens in one pass from which arithmetic, not memory, sets its time.

    With the keys and values of ``batch`` sequences of ``context`` tokens the pass has more to read, and stays
    memory-bound for longer.

    Shapes and units: a count of tokens over the whole batch, not rounded.

    Raises: ValueError for counts that are none, an unknown dtype, or a config or hardware of another type.

    Source: chapter 05; Williams et al. 2009 (roofline), Pope et al. 2022.
    """
    for name, value, kind in (("config", config, ModelConfig), ("hardware", hardware, costs.Hardware)):
        if not isinstance(value, kind):
            raise ValueError(f"{name} is {value!r}; it must be a {kind.__name__}")
    context, batch = as_count(context, "context"), as_count(batch, "batch", 1)
    one = costs.decode(config, context + 1, batch, dtype)
    read = one.bytes_weights + batch * costs.kv_bytes(config, context, 1, dtype)
    params = costs.num_parameters(config)
    per_token = 2.0 * params.active + one.flops_attention / batch
    return read / hardware.bandwidth / (per_token / hardware.flops)


def speedup(
    alpha: float,
    gamma: int,
    cost_ratio: float,
    batch: int = 1,
    *,
    saturation: float = float("inf"),
    verify_ratio: float | None = None,
) -> float:
    """How many times faster decoding is with speculation than without.

    A pass over n tokens takes t(n) = max(1, n / saturation) times as long as one that only reads the weights. A step
    drafts ``gamma`` times at ``cost_ratio`` · t(batch) and verifies once at t(batch · (gamma + 1)).

    Shapes and units: ``cost_ratio`` is the time of a draft pass over that of a target pass; ``saturation`` in tokens a
    pass, infinite where memory is always the limit; ``verify_ratio``, where it was measured, is the time to verify over
    the time of a plain step, and replaces the model's.

    Raises: ValueError naming the argument that is out of range.

    Source: chapter 05; Leviathan et al. 2023, theorem 3.8; Liu et al. 2024 on the batch.
    """
    tokens = expected_tokens(alpha, gamma)
    gamma, batch = as_int(gamma, "gamma"), as_count(batch, "batch", 1)
    if not is_number(cost_ratio) or cost_ratio < 0:
        raise ValueError(f"cost_ratio is {cost_ratio!r}; it must be a number, 0 or more")
    if isinstance(saturation, bool) or not isinstance(saturation, int | float) or not saturation > 0:
        raise ValueError(f"saturation is {saturation!r}; it must be a positive number of tokens")
    if verify_ratio is not None and (not is_number(verify_ratio) or verify_ratio <= 0):
        raise ValueError(f"verify_ratio is {verify_ratio!r}; it must be a positive number, or None")
    plain = max(1.0, batch / saturation)
    verify = max(1.0, batch * (gamma + 1) / saturation) if verify_ratio is None else verify_ratio * plain
    return tokens * plain / (gamma * cost_ratio * plain + verify)


def best_gamma(
    alpha: float,
    cost_ratio: float,
    batch: int = 1,
    *,
    saturation: float = float("inf"),
    gammas: Iterable[int] = range(17),
) -> int:
    """The number of draft tokens that gains most; 0 is not to speculate. The smallest among equals.

    Shapes and units: as ``speedup``; ``gammas`` are the candidates.

    Raises: ValueError as ``speedup``, or where there are no candidates.

    Source: chapter 05; Leviathan et al. 2023, section 3.5.
    """
    candidates = sorted(set(as_ints(gammas, "gammas")))
    if not candidates:
        raise ValueError("gammas is empty; name at least one candidate")
    return max(candidates, key=lambda g: (speedup(alpha, g, cost_ratio, batch, saturation=saturation), -g))
