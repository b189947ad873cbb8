"""Train in FP8: `apply_fp8(model, recipe)`.

The linear layers of a model's blocks get their three products in 8 bits (`linear`), quantized as a recipe says
(`recipes`). Embedding, norms, attention, head and loss stay as they are, as in every recipe that has been published:
they are small, or a rounding error there costs too much (DeepSeek-AI 2024, §3.3.1).

Where the model is split over ranks, a scale for the whole matrix needs the amax of all its parts: one all-reduce of 4
bytes for each. A scale of a block that one rank has needs none.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn

from course_lib.collectives.devices import device_type
from course_lib.fp8.delayed_scaling import update_scales
from course_lib.fp8.linear import Fp8Linear, Fp8LinearFunction, LayerQuantizers
from course_lib.fp8.operands import Casts, Split
from course_lib.fp8.recipes import RECIPES, Recipe
from course_lib.single_gpu import training as single_gpu
from course_lib.single_gpu.model import PRESETS, need_transformer
from course_lib.tensor_parallel.linear import ColumnMatmul, ColumnParallelLinear, RowParallelLinear, as_autocast
from course_lib.tensor_parallel.model import check_degree


class Fp8ColumnFunction:
    """`ColumnMatmul` in 8 bits, for layers that have one input, by the quantizers of each."""

    def __init__(self, quantizers: list[LayerQuantizers]):
        self.quantizers = quantizers

    def apply(self, x, group, *weights):
        return Fp8LinearFunction.apply(x, group, self.quantizers, *weights)


class Fp8RowParallelLinear(Fp8Linear):
    """`RowParallelLinear` in 8 bits: the parts of the sum travel in x's dtype."""

    def __init__(self, layer: RowParallelLinear, casts: Casts, rows: tuple[Split, ...]):
        columns = Split(1, layer.group)
        super().__init__(layer, casts, {"input": (*rows, columns), "weight": (columns,), "gradient": rows})
        self.group, self.output_reduce = layer.group, layer.output_reduce

    def forward(self, x):
        out = self.output_reduce(self.product(x), self.group)
        return out if self.bias is None else out + self.bias.to(out.dtype)


def check_layers(model: nn.Module) -> None:
    """Raise ValueError for a model whose layers can't be made FP8."""
    need_transformer(model, "apply_fp8", "Fp8Linear(linear, recipe.casts) works on any nn.Linear")
    for name, layer in model.blocks.named_modules():
        if isinstance(layer, Fp8Linear):
            raise ValueError(f"blocks.{name} is FP8 already")
        if isinstance(layer, ColumnParallelLinear) and layer.matmul is not ColumnMatmul:
            raise ValueError(f"blocks.{name} has other matmuls already, perhaps those of sequence parallelism")
        if isinstance(layer, RowParallelLinear) and layer.chunks > 1:
            raise ValueError(f"blocks.{name} works in chunks, and FP8 does not: split the model with chunks=1")


def apply_fp8(model: nn.Module, recipe: Recipe, batch_group: dist.ProcessGroup | None = None) -> nn.Module:
    """Have the linear layers of a `Transformer`'s blocks multiply in 8 bits as the recipe says, in place; returns the
    model. After apply_tensor_parallel, before recomputation, data parallelism and ZeRO. A recipe with products in BF16
    changes nothing. Routers and experts (notebook 08) stay as they are.

    batch_group: the ranks that share the batch, where their scales are to be those of the whole batch. Call
    `update_scales(model)` after each optimizer step where the recipe has delayed scaling. A split model is that of one
    process where each rank's part is a whole number of blocks; a block that lies on two ranks is cut there.

    Raises ValueError, and changes nothing, for layers that are FP8 already, or sequence-parallel, or in chunks.
    """
    check_layers(model)
    if recipe.casts is None:
        return model
    rows = () if batch_group is None else (Split(0, batch_group),)
    for block in model.blocks:
        for parent in (module for module in list(block.modules()) if hasattr(module, "project")):
            convert(parent, recipe.casts, rows)
    return model


def fp8_project(x: torch.Tensor, layers: list[Fp8Linear]) -> tuple[torch.Tensor, ...]:
    """What each of the layers makes of x [..., in], which is quantized, and kept for backward, once."""
    (x,) = as_autocast(x)
    outs = Fp8LinearFunction.apply(x, None, [layer.quantizers for layer in layers], *(layer.weight for layer in layers))
    biases = [layer.bias for layer in layers]
    return tuple(out if bias is None else out + bias.to(out.dtype) for out, bias in zip(outs, biases, strict=True))


def convert(parent: nn.Module, casts: Casts, rows: tuple[Split, ...]) -> None:
    """Make the layers of an attention or an MLP FP8."""
    columns = [layer for layer in parent.children() if isinstance(layer, ColumnParallelLinear)]
    for layer in columns:
        group = layer.replicas.shards if layer.replicas else layer.group
        splits = {"input": rows, "weight": (Split(0, group),), "gradient": (*rows, Split(1, group))}
        layer.quantizers = LayerQuantizers(casts, splits).to(layer.weight.device)
        layer.quantizers.input = columns[0].quantizers.input  # of one x
    for i, layer in enumerate(columns):  # the first one multiplies for all, where all are wanted
        layer.matmul = Fp8ColumnFunction([each.quantizers for each in (columns if i == 0 else [layer])])
    for name, layer in list(parent.named_children()):
        if isinstance(layer, RowParallelLinear):
            setattr(parent, name, Fp8RowParallelLinear(layer, casts, rows))
        elif isinstance(layer, nn.Linear):
            setattr(parent, name, Fp8Linear(layer, casts, {"input": rows, "gradient": rows}))
    together = [layer for name, layer in parent.named_children() if name not in ("o_proj", "down_proj")]
    if not columns:
        for layer in together:
            layer.quantizers.input = together[0].quantizers.input
        parent.project_layers = fp8_project


PROGRAMS = {name.lower().replace(" ", "-").replace(",", ""): recipe for name, recipe in RECIPES.items()}


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """The program's options. Touches nothing; an unknown or impossible one ends the program with status 2."""
    parser = single_gpu.training_parser("fp8", "Train in FP8: tensor parallelism inside, ZeRO-3 outside.")
    parser.add_argument("--recipe", default="deepseek-v3", choices=list(PROGRAMS), help="how products are quantized")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the work on a batch")
    parser.add_argument("--gather", default="dtype", choices=["dtype", "fp8"], help="what weights travel in")
    chosen = single_gpu.parse(parser, argv)
    if chosen.tp < 1:
        parser.error("--tp must be 1 or more")
    if chosen.gather == "fp8" and PROGRAMS[chosen.recipe].casts is None:
        parser.error("--gather fp8 goes with a recipe whose products are in FP8")
    try:
        check_degree(PRESETS[chosen.preset], chosen.tp)
    except ValueError as error:
        parser.error(str(error))
    return chosen


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the options say. Rank 0 prints one line a step and writes where --out says; tokens/s are those of its
    batch, divided by the ranks that share it. Weights and optimizer states are in float32, sharded.

    Returns the records. Needs the default process group. Raises ValueError where --tp does not divide the ranks.
    """
    from torch.distributed.device_mesh import init_device_mesh

    from course_lib.fp8.gather import Fp8Gather
    from course_lib.single_gpu.model import Transformer, init_parameter
    from course_lib.tensor_parallel.model import apply_tensor_parallel
    from course_lib.tensor_parallel.shards import materialize
    from course_lib.tensor_parallel.vocabulary import vocab_parallel_cross_entropy
    from course_lib.zero.sharded_models import fully_shard
    from course_lib.zero.shards import clip_grad_norm_

    chosen, rank, world_size = options(argv), dist.get_rank(), dist.get_world_size()
    if world_size % chosen.tp:
        raise ValueError(f"--tp {chosen.tp} does not divide the {world_size} ranks")
    mesh = init_device_mesh(device_type(), (world_size // chosen.tp, chosen.tp), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"].get_group(), mesh["tp"].get_group()
    dtype = torch.bfloat16 if chosen.dtype == "bf16" else torch.float32

    def build(config, seed):
        with torch.device("meta"):
            model = apply_tensor_parallel(Transformer(config), tp)
        materialize(model, lambda name, tensor: init_parameter(name, tensor, config, seed))
        recipe = PROGRAMS[chosen.recipe]
        delayed = recipe.casts is not None and any(cast.history for cast in recipe.casts)
        apply_fp8(model, recipe, dp if delayed else None)  # a current scale would wait for all ranks, each time
        return fully_shard(model, dp, dtype, encode=Fp8Gather() if chosen.gather == "fp8" else None)

    def step(sharded, optimizer, inputs, targets, _dtype=None, max_norm=1.0):
        optimizer.zero_grad()
        step_loss = vocab_parallel_cross_entropy(sharded(inputs), targets, tp, sharded.module.config.vocab)
        step_loss.backward()
        sharded.finish()
        clip_grad_norm_(sharded.parameters(), max_norm)
        optimizer.step()
        update_scales(sharded.module)
        mean = step_loss.detach().clone()
        dist.all_reduce(mean, group=dp)
        return mean / dp.size()

    return single_gpu.run(chosen, step, build, rank=rank, world_size=world_size, ranks_per_batch=chosen.tp)
