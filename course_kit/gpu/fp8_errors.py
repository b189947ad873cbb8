"""The errors of 8 bits: of each matmul of each layer, with outliers to provoke them.

`operands_of` takes x, w and dy of every linear layer from one ordinary forward and backward; `matmul_errors` computes
the three matmuls of each layer in 8 bits and compares. An error therefore belongs to its layer alone: the errors of the
layers before it are not in its operands.

`plant_outliers` makes one channel of the inputs of attention and MLP larger by a factor, and the weights that read it
smaller. With a power of two the model computes the same numbers as before, bit by bit, and only quantization sees a
difference. (Trained models have such channels: Dettmers et al. 2022, LLM.int8(), §4; Sun et al. 2024, Massive
Activations.)
"""

from typing import cast

import torch
from torch import nn

from course_kit.typed import transformer_blocks
from course_lib.fp8.linear import Fp8Linear, Fp8LinearFunction
from course_lib.fp8.operands import Casts
from course_lib.fp8.quantization import dequantize
from course_lib.mixed_precision.block_formats import relative_error
from course_lib.single_gpu.model import MLP, Transformer, loss

OPERANDS = ("x", "w", "dy")
MATMULS = ("y", "dx", "dw")


Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # x, w, dy


def operands_of(model: Transformer, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, Operands]:
    """Return x [tokens, in], w [out, in] and dy [tokens, out] of each linear layer of the blocks, by its name, from a
    forward and a backward; the model's gradients are overwritten. Raises ValueError for a model in FP8, or one that is
    split.
    """
    operands: dict[str, list] = {}
    handles = []
    layers = {name: layer for name, layer in model.blocks.named_modules() if isinstance(layer, nn.Linear)}
    if not layers:
        raise ValueError("no nn.Linear in the blocks: measure before apply_fp8 and apply_tensor_parallel")
    for name, layer in layers.items():
        operands[name] = [None, layer.weight.detach().clone(), None]

        def take_input(layer, arguments, out, row=operands[name]) -> None:
            row[0] = arguments[0].detach().flatten(0, -2)
            out.register_hook(lambda gradient: row.__setitem__(2, gradient.flatten(0, -2)))

        handles.append(layer.register_forward_hook(take_input))
    model.zero_grad()
    try:
        loss(model(inputs), targets).backward()
    finally:
        for handle in handles:
            handle.remove()
    return {name: (x, w, dy) for name, (x, w, dy) in operands.items()}


def layer_errors(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, casts: Casts) -> dict[str, float]:
    """Return the relative errors of one layer's operands and matmuls in 8 bits, and the share of dy that becomes 0."""
    layer = Fp8Linear(nn.Linear(w.shape[1], w.shape[0], bias=False, device=w.device, dtype=w.dtype), casts)
    layer.weight.data.copy_(w)
    leaf = x.detach().requires_grad_()
    (y,) = Fp8LinearFunction.apply(leaf, None, [layer.quantizers], layer.weight)
    dx, dw = torch.autograd.grad(y, [leaf, layer.weight], dy)
    x64, w64, dy64 = x.double(), w.double(), dy.double()
    quantizers = (layer.quantizers.input, layer.quantizers.weight, layer.quantizers.gradient)
    dequantized = [dequantize(quantizer(each)) for quantizer, each in zip(quantizers, (x, w, dy), strict=True)]
    pairs = [
        *zip(dequantized, (x64, w64, dy64), strict=True),
        (y, x64 @ w64.t()),
        (dx, dy64 @ w64),
        (dw, dy64.t() @ x64),
    ]
    errors = {name: relative_error(a.double(), b) for name, (a, b) in zip(OPERANDS + MATMULS, pairs, strict=True)}
    return errors | {"dy lost": ((dequantized[2] == 0) & (dy != 0)).float().mean().item()}


def matmul_errors(
    model: Transformer, casts: Casts, inputs: torch.Tensor, targets: torch.Tensor
) -> dict[str, dict[str, float]]:
    """Return the `layer_errors` of every linear layer of the blocks, by its name."""
    operands = operands_of(model, inputs, targets)
    return {name: layer_errors(x, w, dy, casts) for name, (x, w, dy) in operands.items()}


@torch.no_grad()
def plant_outliers(model: Transformer, factor: float, channel: int = 0) -> Transformer:
    """Make one channel of the input of every block's attention and MLP larger by `factor`, in place; the model's
    function stays. Returns the model. Raises ValueError unless factor is a power of two and the channel exists.
    """
    if torch.frexp(torch.tensor(float(factor)))[0] != 0.5:
        raise ValueError(f"factor {factor} is not a power of two: the model would compute other numbers")
    if not 0 <= channel < model.config.hidden:
        raise ValueError(f"channel {channel}: there are {model.config.hidden}, from 0 on")
    for block in transformer_blocks(model):
        attention, mlp = block.attention, cast(MLP, block.mlp)
        for norm, readers in (
            (block.attention_norm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (block.mlp_norm, (mlp.gate_proj, mlp.up_proj)),
        ):
            norm.weight[channel] *= factor
            for reader in readers:
                reader.weight[:, channel] /= factor
    return model
