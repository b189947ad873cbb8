"""Where 8 bits hurt: the error of each product of each layer, and outliers to try them with.

`operands_of` takes x, w and dy of every linear layer from one ordinary forward and backward; `matmul_errors` makes the
three products of each in 8 bits and compares. So an error is the layer's own: the errors of the layers before it are
not in its operands.

`plant_outliers` makes a channel of what goes into attention and MLP larger by a factor, and the weights that read it
smaller. With a power of two the model computes the same numbers as before, bit by bit, and quantization alone sees a
difference. (Trained models have such channels: Dettmers et al. 2022, LLM.int8(), §4; Sun et al. 2024, Massive
Activations.)
"""

import torch
from torch import nn

from course_lib.fp8.linear import Fp8Linear, Fp8LinearFunction
from course_lib.fp8.operands import Casts
from course_lib.fp8.quantization import dequantize
from course_lib.mixed_precision.block_formats import relative_error
from course_lib.single_gpu.model import loss

OPERANDS = ("x", "w", "dy")
MATMULS = ("y", "dx", "dw")


def operands_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, tuple[torch.Tensor, ...]]:
    """x [tokens, in], w [out, in] and dy [tokens, out] of each linear layer of the blocks, by its name, from a forward
    and a backward; the model's gradients are overwritten. Raises ValueError for a model in FP8, or one that is split.
    """
    found, handles = {}, []
    layers = {name: layer for name, layer in model.blocks.named_modules() if isinstance(layer, nn.Linear)}
    if not layers:
        raise ValueError("no nn.Linear in the blocks: measure before apply_fp8 and apply_tensor_parallel")
    for name, layer in layers.items():
        found[name] = [None, layer.weight.detach().clone(), None]

        def take_input(layer, arguments, out, kept=found[name]):
            kept[0] = arguments[0].detach().flatten(0, -2)
            out.register_hook(lambda gradient: kept.__setitem__(2, gradient.flatten(0, -2)))

        handles.append(layer.register_forward_hook(take_input))
    model.zero_grad()
    try:
        loss(model(inputs), targets).backward()
    finally:
        for handle in handles:
            handle.remove()
    return {name: tuple(kept) for name, kept in found.items()}


def layer_errors(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, casts: Casts) -> dict[str, float]:
    """The relative errors of one layer's operands and products in 8 bits; and the share of dy that becomes zero."""
    layer = Fp8Linear(nn.Linear(w.shape[1], w.shape[0], bias=False, device=w.device, dtype=w.dtype), casts)
    layer.weight.data.copy_(w)
    given = x.detach().requires_grad_()
    (y,) = Fp8LinearFunction.apply(given, None, [layer.quantizers], layer.weight)
    dx, dw = torch.autograd.grad(y, [given, layer.weight], dy)
    x64, w64, dy64 = x.double(), w.double(), dy.double()
    quantizers = (layer.quantizers.input, layer.quantizers.weight, layer.quantizers.gradient)
    kept = [dequantize(quantizer(each)) for quantizer, each in zip(quantizers, (x, w, dy), strict=True)]
    pairs = [*zip(kept, (x64, w64, dy64), strict=True), (y, x64 @ w64.t()), (dx, dy64 @ w64), (dw, dy64.t() @ x64)]
    errors = {name: relative_error(a.double(), b) for name, (a, b) in zip(OPERANDS + MATMULS, pairs, strict=True)}
    return errors | {"dy lost": ((kept[2] == 0) & (dy != 0)).float().mean().item()}


def matmul_errors(
    model: nn.Module, casts: Casts, inputs: torch.Tensor, targets: torch.Tensor
) -> dict[str, dict[str, float]]:
    """`layer_errors` of every linear layer of the blocks, by its name."""
    operands = operands_of(model, inputs, targets)
    return {name: layer_errors(*each, casts) for name, each in operands.items()}


@torch.no_grad()
def plant_outliers(model: nn.Module, factor: float, channel: int = 0) -> nn.Module:
    """Make one channel of the input of every block's attention and MLP larger by `factor`, in place; what the model
    computes stays. Returns the model. Raises ValueError unless factor is a power of two, and for no such channel.
    """
    if torch.frexp(torch.tensor(float(factor)))[0] != 0.5:
        raise ValueError(f"factor {factor} is not a power of two: the model would compute other numbers")
    if not 0 <= channel < model.config.hidden:
        raise ValueError(f"channel {channel}: there are {model.config.hidden}, from 0 on")
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        for norm, readers in (
            (block.attention_norm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (block.mlp_norm, (mlp.gate_proj, mlp.up_proj)),
        ):
            norm.weight[channel] *= factor
            for reader in readers:
                reader.weight[:, channel] /= factor
    return model
