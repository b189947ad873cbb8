"""AdamW with a dtype of their own for master weights and each moment: 12 bytes per parameter become 4.1.

Between two steps, Adam keeps the mean of gradients m, the mean of their squares v, and often master weights, each in
float32: 4 + 4 + 4 bytes. The arithmetic of a step stays in float32; the state is rounded:

    float32    4 bytes
    bfloat16   2           float32's range, 8 bits of precision
    float16    2           11 bits, and one scale for the tensor: v of gradients of 1e-4 is 1e-8, less than float16 has
    float8     1 + 4/128   a scale for each 128 elements; of v the ROOT is stored

Why the root. The update is m / (sqrt(v) + eps). If v rounds to 0 and m does not, it is m / 1e-8, which destroys the
weight. Squaring doubles all exponents. In one block, e4m3 holds numbers as far apart as 1 to 230,000; for v these are
gradients no further apart than 1 to 479. The root of v has as narrow a range as m, and its rounding error, 1/16 at
most, is the update's. A v that would still round to 0 becomes the smallest number above 0: a smaller step, never
a huge one.

How rounding to nearest affects means. A step changes v by (1 - beta2)(g^2 - v), so v falls by 5% at most with a beta2
of 0.95, and by 0.1% with 0.999. Half a unit of bfloat16 is 0.2 to 0.4%: with 0.999, v never falls again. In 8 bits,
half a unit of sqrt(v) is 3 to 6%, and 5% of v is 2.5% of sqrt(v): a single v does not change. `stochastic` rounds up or
down with a probability that makes the mean right (`mixed_precision.formats.stochastic_round`). Weights in bfloat16 need
it most.

Dtypes of m, v and master in other implementations:

    DeepSeek-V3 (2024, §3.3.3)           BF16, BF16, FP32 FP8-LM (Peng et al. 2023, §2.2)      e4m3, FP16, FP16, each
    with one scale per tensor; v in FP8 diverged (§3.3) nanotron (pull request 70)           e4m3, e5m2 in experiments,
    with eps 1e-7; its recipe has FP8-LM's, later FP32 Transformer Engine (FusedAdam)       each FP32, FP16, BF16 or
    e4m3 by choice, a scale per tensor; master FP32 or FP16 Fishman et al. 2024 (§5)             e4m3, e5m2 torchao
    (AdamWFp8)                   e4m3, e4m3, a scale for 256 elements COAT (Xi et al. 2024, §4)            e4m3, e4m3, a
    scale for 128, each block raised to a power that fills the range

v in e5m2 and sqrt(v) in e4m3 are nearly the same: one more exponent bit, or halved exponents.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from course_lib.fp8.quantization import (
    TILE,
    Quantized,
    block_amax,
    dequantize,
    in_blocks,
    out_of_blocks,
    quantize,
    scale_of,
)
from course_lib.mixed_precision.formats import BF16, E4M3, E5M2, FP16, stochastic_round

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
FORMAT_OF = {fmt.dtype: fmt for fmt in (BF16, FP16, E4M3, E5M2)}


def round_stored(x: torch.Tensor, dtype: torch.dtype, stochastic: bool) -> torch.Tensor:
    """Return x in `dtype`, rounded to nearest, or stochastically."""
    return (stochastic_round(x, FORMAT_OF[dtype]) if stochastic else x).to(dtype)


def float16_scale(x: torch.Tensor) -> torch.Tensor:
    """Return the power of two, a scalar, that scales the largest |x| to between 2^14 and 2^15; 1 if all are 0."""
    amax = x.abs().amax()
    scale = torch.ldexp(torch.ones_like(amax), (torch.frexp(amax).exponent - 15).clamp(min=-126))
    return torch.where(amax > 0, scale, 1.0)


def quantize_stored(x: torch.Tensor, dtype: torch.dtype, stochastic: bool, lift: bool) -> Quantized:
    """Return x [1, n] in 8 bits, with a scale for each 128; lift: values above 0 stay above it."""
    scale = scale_of(block_amax(x, TILE), dtype)
    scales = scale[:, None, :, None].expand(in_blocks(x, TILE).shape)
    unit = out_of_blocks(scales, x.shape)  # [1, n]: the scale of each element
    if lift:
        smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # subnormal
        x = torch.where(x > 0, x.clamp(min=smallest * unit), x)
    if stochastic:
        x = stochastic_round(x / unit, FORMAT_OF[dtype]).float() * unit
    return quantize(x, dtype, TILE, scale=scale)


def put_state(state: dict[str, torch.Tensor], name: str, x: torch.Tensor, dtype: torch.dtype, stochastic: bool) -> None:
    """Store x (float32) as state[name], in x's shape and in `dtype`, and its scales, if any, as state[name_scale].

    For "exp_avg_sq" in 8 bits, the root is stored.
    """
    if dtype in EIGHT_BITS:
        second = name == "exp_avg_sq"
        stored = quantize_stored((x.sqrt() if second else x).reshape(1, -1), dtype, stochastic, lift=second)
        state[name], state[f"{name}_scale"] = stored.values.view(x.shape), stored.scale
        return
    state.pop(f"{name}_scale", None)
    if dtype == torch.float16:
        state[f"{name}_scale"] = float16_scale(x)
        x = x / state[f"{name}_scale"]
    state[name] = x if dtype == torch.float32 else round_stored(x, dtype, stochastic)


def get_state(state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return the state stored by `put_state`, as a new float32 tensor."""
    values, scale = state[name], state.get(f"{name}_scale")
    if values.dtype not in EIGHT_BITS:
        return values.float() * scale if scale is not None else values.to(torch.float32, copy=True)
    x = dequantize(Quantized(values.reshape(1, -1), state[f"{name}_scale"], TILE)).view(values.shape)
    return x.square() if name == "exp_avg_sq" else x


def adamw_arithmetic(
    weight: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, step: torch.Tensor, group
) -> None:
    """Take step number `step` (from 1; a scalar on the device) of AdamW, in place, all in float32: Loshchilov and
    Hutter 2019, algorithm 2, as torch.optim.AdamW implements it. group: lr, betas, eps, weight_decay.
    """
    (beta1, beta2), lr, number = group["betas"], group["lr"], step.double()
    correction1, correction2 = 1 - beta1**number, 1 - beta2**number
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = (exp_avg_sq.sqrt() / correction2.sqrt().float()).add_(group["eps"])
    weight.mul_(1 - lr * group["weight_decay"])
    weight.sub_((lr / correction1).float() * (exp_avg / denominator))


def check_group(group: dict) -> None:
    """Raise ValueError for settings that LowPrecisionAdamW does not support."""
    for name in ("first", "second"):
        if group[name] not in (torch.float32, *SIXTEEN_BITS, *EIGHT_BITS):
            raise ValueError(f"{name}={group[name]}: a moment is kept in float32, 16 or 8 bits")
    if group["master"] not in (None, torch.float32, *SIXTEEN_BITS):
        raise ValueError(f"master={group['master']}: master weights are float32, bfloat16 or float16, or None")
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"betas {group['betas']}: each is at least 0 and below 1")
    if not min(group["lr"], group["eps"], group["weight_decay"]) >= 0:
        raise ValueError(f"lr {group['lr']}, eps {group['eps']}, weight_decay {group['weight_decay']}: 0 or more")


class LowPrecisionAdamW(torch.optim.Optimizer):
    """AdamW with a choice of dtypes for its state.

    first, second: dtypes of the moments: float32, bfloat16, float16 (a scale per tensor), float8_e4m3fn, float8_e5m2 (a
    scale for each 128 elements). master: dtype of master weights, one of the first three; None: no master weights, and
    parameters are rounded. stochastic: round state of less than 32 bits stochastically, by torch's global generator.
    All are settings of a parameter group, saved and loaded as lr is. Raises ValueError for other values, and adds
    nothing.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        master: torch.dtype | None = None,
        first: torch.dtype = torch.float32,
        second: torch.dtype = torch.float32,
        stochastic: bool = False,
    ):
        dtypes = {"master": master, "first": first, "second": second, "stochastic": stochastic}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay} | dtypes)

    def add_param_group(self, param_group: dict) -> None:
        check_group(self.defaults | param_group)
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure=None):
        """Update every parameter that has a gradient, one after the other: float32 copies exist for one at a time."""
        with torch.enable_grad():
            result = closure() if closure else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel():
                    step_parameter(parameter, self.state[parameter], group)
        return result

    def stored_bytes(self) -> int:
        """Return the bytes of the state, scales and step counters included."""
        return sum(tensor.nbytes for state in self.state.values() for tensor in state.values())

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state of this class, or of torch.optim.AdamW: the next step stores it in this optimizer's dtypes."""
        groups = [self.defaults | group for group in state_dict["param_groups"]]
        super().load_state_dict(state_dict | {"param_groups": groups})
        numbers = itertools.chain.from_iterable(group["params"] for group in groups)
        parameters = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            loaded = state_dict["state"].get(number, {})  # super() has cast it to the parameter's dtype
            self.state[parameter] = {name: value.to(parameter.device) for name, value in loaded.items()}


def step_parameter(parameter: torch.Tensor, state: dict, group: dict) -> None:
    """Take one step of one parameter, which has a gradient. state: its state; empty before the first step."""
    assert parameter.grad is not None
    if not state:
        state["step"] = torch.zeros((), device=parameter.device)
        for name, dtype in (("exp_avg", group["first"]), ("exp_avg_sq", group["second"])):
            put_state(state, name, torch.zeros_like(parameter, dtype=torch.float32), dtype, stochastic=False)
        if group["master"] is not None:
            put_state(state, "master", parameter.float(), group["master"], stochastic=False)
    state["step"] = state["step"] + 1
    weight = get_state(state, "master") if "master" in state else parameter.to(torch.float32, copy=True)
    exp_avg, exp_avg_sq = get_state(state, "exp_avg"), get_state(state, "exp_avg_sq")
    adamw_arithmetic(weight, parameter.grad.float(), exp_avg, exp_avg_sq, state["step"], group)
    put_state(state, "exp_avg", exp_avg, group["first"], group["stochastic"])
    put_state(state, "exp_avg_sq", exp_avg_sq, group["second"], group["stochastic"])
    if group["master"] is not None:
        put_state(state, "master", weight, group["master"], group["stochastic"])
        parameter.copy_(get_state(state, "master"))
    elif parameter.dtype == torch.float32:
        parameter.copy_(weight)
    else:
        parameter.copy_(round_stored(weight, parameter.dtype, group["stochastic"]))
