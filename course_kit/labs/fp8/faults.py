"""One layer in FP8: its results and times, and the break-it lab of notebook 14b, with one fault per layer."""

from __future__ import annotations

import random
import time

import torch
from torch import nn

from course_kit.typed import override
from course_lib.fp8.linear import Fp8Linear
from course_lib.fp8.operands import Cast, Casts
from course_lib.fp8.quantization import Quantized, dequantize, quantize
from course_lib.mixed_precision.block_formats import relative_error

LAB_ORDER = random.Random(5).sample("seow", 4)  # the faults of layers 1 to 4


def linear_case(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """Return the output and the gradients of a layer: y, dx, dw."""
    y = layer(x)
    return [y, *torch.autograd.grad(y, [x, next(layer.parameters())], dy)]


def median_ms(layers: dict[str, nn.Module], x: torch.Tensor, dy: torch.Tensor, repeats: int = 7) -> dict[str, float]:
    """Return the median milliseconds of forward and backward of each layer, measured in alternation."""
    times: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(repeats):
        for name, layer in layers.items():
            start = time.perf_counter()
            linear_case(layer, x, dy)
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: sorted(each)[repeats // 2] for name, each in times.items()}


def broken_layer(fault: str, w: torch.Tensor) -> Fp8Linear:
    """Return an FP8 layer with blocks of 1 x 32 and a fault; "-": no fault."""
    tile = Cast(block=(1, 32))
    casts = Casts(tile._replace(dtype=torch.float8_e5m2) if fault == "e" else tile, tile, tile)
    layer = Fp8Linear(nn.Linear(w.shape[1], w.shape[0], bias=False), casts)
    layer.weight.data.copy_(w)
    quantizers = layer.quantizers

    def with_scale_of(m: torch.Tensor, of: torch.Tensor) -> Quantized:
        return quantize(m, block=tile.block, scale=quantize(of, block=tile.block).scale)

    if fault == "s":
        flat = lambda g: with_scale_of(g, 448 * torch.ones_like(g))  # noqa: E731
        override(quantizers.gradient, forward=flat, transposed=lambda q, g: flat(g.t()))
    if fault == "o":
        small = lambda m, scale=None: with_scale_of(m, m / 64)  # noqa: E731
        override(quantizers.weight, forward=small, transposed=lambda q, m: small(m.t()))
    if fault == "w":
        flipped = lambda q, g: Quantized(q.values.t().contiguous(), q.scale.t().flip(0), (32, 1))  # noqa: E731
        override(quantizers.gradient, transposed=flipped)
    return layer


def lab_errors() -> dict[str, tuple[list[float], float]]:
    """Return the errors of y, dx and dw and the share of zeros in dy, for a layer without a fault and layers 1 to 4."""
    torch.manual_seed(4)
    x, w, dy = torch.randn(64, 128, requires_grad=True), torch.randn(96, 128), 1e-3 * torch.randn(64, 96)
    wanted = [x.detach() @ w.t(), dy @ w, dy.t() @ x.detach()]
    errors_by_layer = {}
    for number, fault in enumerate(["-", *LAB_ORDER]):
        layer = broken_layer(fault, w)
        errors = [relative_error(mine, exact) for mine, exact in zip(linear_case(layer, x, dy), wanted, strict=True)]
        lost = (dequantize(layer.quantizers.gradient(dy)) == 0).float().mean().item()
        errors_by_layer[f"layer {number}" if number else "no fault"] = errors, lost
    return errors_by_layer
