"""Errors of 8 bits: by scale, by the size of an outlier, by the length of a sum, and of Adam's second moment."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from course_kit.gpu.fp8_errors import MATMULS, OPERANDS, matmul_errors, plant_outliers
from course_kit.labs.fp8.models import trained_model, warmed_up_optimizer
from course_lib.fp8 import quantization, scaled_matmul
from course_lib.fp8.operands import Casts
from course_lib.fp8.program import apply_fp8
from course_lib.fp8.recipes import RECIPES
from course_lib.mixed_precision.block_formats import relative_error
from course_lib.mixed_precision.formats import FloatFormat, round_to
from course_lib.single_gpu import model as plain_model
from course_lib.single_gpu.model import Transformer

Storage = Callable[[torch.Tensor], torch.Tensor]  # returns a tensor as it is after storage


def fp8_name(dtype: torch.dtype) -> str:
    """Return e4m3 or e5m2."""
    return {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}[dtype]


def error_at_scale(x: torch.Tensor, fmt: FloatFormat, scale: float) -> float:
    """Return the relative error of x in a format, with x divided by a scale before rounding."""
    return relative_error(round_to(x / scale, fmt, saturate=True) * scale, x)


class ScaleErrors(NamedTuple):
    """Relative errors of a tensor in a format, by its scale."""

    factors: Sequence[float]  # scales, as multiples of max / largest number of the format
    errors: Sequence[float]
    unscaled: tuple[float, float]  # the factor that is a scale of 1, and its error


def errors_at(x: torch.Tensor, fmt: FloatFormat, factors: Sequence[float]) -> ScaleErrors:
    """Return the relative errors of x at multiples of the scale at which its largest element fits just so."""
    best = x.abs().max().item() / fmt.largest
    errors = [error_at_scale(x, fmt, best * factor) for factor in factors]
    return ScaleErrors(factors, errors, (1 / best, error_at_scale(x, fmt, 1.0)))


ERROR_COLUMNS = OPERANDS + MATMULS


def errors_by_layer(
    model: Transformer, casts: Casts, batch: tuple[torch.Tensor, torch.Tensor]
) -> dict[str, list[float]]:
    """Return the errors of the operands and matmuls of each linear layer of the blocks, by its short name."""
    results = matmul_errors(model, casts, *batch)
    short = {name: name.replace("attention.", "").replace("mlp.", "").replace("_proj", "") for name in results}
    return {short[name]: [row[key] for key in ERROR_COLUMNS] for name, row in results.items()}


def in_e4m3(x: torch.Tensor, block: tuple[int, int] = quantization.TENSOR) -> torch.Tensor:
    """Return x after quantization to e4m3 with a scale for each block, by `quantize`."""
    return quantization.dequantize(quantization.quantize(x, block=block))


def int8(x: torch.Tensor) -> torch.Tensor:
    """Return x after quantization to 8-bit integers with one scale."""
    scale = x.abs().max() / 127
    return (x / scale).round() * scale


def outlier_errors(way: Storage, factors: list[float]) -> list[float]:
    """Return the error of 1,023 channels of normal numbers, stored by `way`, for each factor of one more channel."""
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(2))
    errors = []
    for factor in factors:
        large = x.clone()
        large[:, 0] *= factor  # one channel of every token
        errors.append(relative_error(way(large)[:, 1:], x[:, 1:]))
    return errors


def short_sum_errors(
    a: torch.Tensor, b: torch.Tensor, lengths: list[int], bits: int, promote: int | None
) -> list[float]:
    """Return the error of a sum of products by its length, in an accumulator of `bits` bits."""
    errors = []
    for k in lengths:
        left, right = quantization.quantize(a[:, :k]), quantization.quantize(b[:, :k])
        exact = scaled_matmul.emulated_matmul(left, right, torch.float64)
        errors.append(relative_error(scaled_matmul.short_sum_matmul(left, right, bits, promote=promote), exact))
    return errors


def moments() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield Adam's two moments of each matrix after 20 steps in float32."""
    optimizer = warmed_up_optimizer()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.dim() == 2:
                state = optimizer.state[parameter]
                yield state["exp_avg"], state["exp_avg_sq"]


def stored_second_moment(storage: Storage, rate: float = 1e-3) -> tuple[float, float]:
    """Store the second moment of each matrix by `storage`. Returns the share of elements whose second moment became 0
    while the first is not 0, and the largest resulting update of a weight.
    """
    lost, largest, count = 0, 0.0, 0
    for first, second in moments():
        stored = storage(second)
        lost, count = lost + int(((stored == 0) & (first != 0)).sum()), count + first.numel()
        largest = max(largest, (rate * first / (stored.sqrt() + 1e-8)).abs().max().item())
    return lost / count, largest


@torch.no_grad()
def losses_with_outliers(casts: Casts | None, factors: list[float]) -> list[float]:
    """Return a trained model's loss with a planted outlier of each size. casts None: in float32."""
    trained, (inputs, targets) = trained_model()
    losses = []
    for factor in factors:
        model = plant_outliers(copy.deepcopy(trained), factor)
        if casts:
            apply_fp8(model, dataclasses.replace(RECIPES["DeepSeek-V3"], casts=casts))
        losses.append(plain_model.loss(model(inputs), targets).item())
    return losses
