"""FP8 recipes as data: the dtype and the scales of each matrix of a training run, and the bytes they take.

    bytes per parameter = master + accumulated gradient + weight + gradient + first moment + second moment

The Ultra-Scale Playbook (2025), chapter 10, has the table of six; how a recipe quantizes its matmuls is taken from its
own paper or code, which `source` names. Scales are not counted: one per matrix is negligible, and one per 128 elements
adds 3%.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from course_lib.fp8.operands import Cast, Casts
from course_lib.fp8.quantization import SQUARE, TILE

e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
fp32, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Recipe:
    """A training recipe: the dtypes of a model's state, and the quantization of matmul operands."""

    casts: Casts | None  # None: matmuls in BF16
    weights: torch.dtype  # as the matmuls read them
    gradients: torch.dtype  # as backward returns them
    master: torch.dtype | None  # what the optimizer updates; None: the weights
    accumulated: torch.dtype | None  # the sum of gradients over micro-batches; None: the gradients
    first: torch.dtype  # Adam's moments
    second: torch.dtype
    source: str

    def parameter_bytes(self) -> dict[str, int]:
        """Return the bytes per parameter of each part of the state, without scales."""
        dtypes = {
            "master weights": self.master,
            "accumulated gradients": self.accumulated,
            "weights": self.weights,
            "gradients": self.gradients,
            "first moment": self.first,
            "second moment": self.second,
        }
        return {name: 0 if dtype is None else dtype.itemsize for name, dtype in dtypes.items()}


def per_tensor(power_of_two: bool = False, history: int = 0, weight_history: int = 0) -> Casts:
    """Use e4m3 in forward and e5m2 for gradients, with a scale for each matrix; histories: see `Cast`."""
    return Casts(
        input=Cast(e4m3, power_of_two=power_of_two, history=history),
        weight=Cast(e4m3, power_of_two=power_of_two, history=weight_history),
        gradient=Cast(e5m2, power_of_two=power_of_two, history=history),
    )


def by_blocks(power_of_two: bool = False) -> Casts:
    """Use e4m3 everywhere, with a scale for each tile of 1 x 128, and for each square of 128 x 128 of a weight."""
    tile = Cast(e4m3, TILE, power_of_two)
    return Casts(tile, Cast(e4m3, SQUARE, power_of_two), tile)


TE_CASTS = per_tensor(history=1024, weight_history=1024)
FP8_LM_CASTS = per_tensor(power_of_two=True, history=16)
RECIPES = {
    "BF16, FP32 accumulation": Recipe(None, bf16, bf16, fp32, fp32, fp32, fp32, "Ultra-Scale Playbook, chapter 2"),
    "BF16": Recipe(None, bf16, bf16, fp32, None, fp32, fp32, "Ultra-Scale Playbook, chapter 2"),
    "Transformer Engine": Recipe(
        TE_CASTS, fp32, fp32, None, None, fp32, fp32, "NVIDIA/TransformerEngine, common/recipe: DelayedScaling"
    ),
    "FP8-LM": Recipe(FP8_LM_CASTS, e4m3, e4m3, fp16, fp16, e4m3, fp16, "Peng et al. 2023; Azure/MS-AMP, level O3"),
    "DeepSeek-V3": Recipe(by_blocks(), e4m3, bf16, fp32, fp32, bf16, bf16, "DeepSeek-AI 2024, §3.3"),
    "nanotron": Recipe(
        per_tensor(power_of_two=True), e4m3, e4m3, bf16, fp32, e4m3, e5m2, "huggingface/nanotron, pull request 70"
    ),
}
