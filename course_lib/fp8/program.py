"""Train in FP8: `apply_fp8(model, recipe)`.

The linear layers of a model's blocks get their three matmuls in 8 bits (`linear`), quantized as a recipe says
(`recipes`). Embedding, norms, attention, head and loss do not change, as in every published recipe: they are small, or
a rounding error there costs too much (DeepSeek-AI 2024, §3.3.1).

If the model is split over ranks, the scale of a full matrix needs the amax of all its shards: one all-reduce of 4 bytes
for each. The scale of a block that one rank holds needs none.
"""

from __future__ import annotations

import argparse
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from course_lib.collectives.devices import device_type
from course_lib.fp8.delayed_scaling import update_scales
from course_lib.fp8.linear import Fp8Linear, Fp8LinearFunction, LayerQuantizers
from course_lib.fp8.operands import Casts, Split
from course_lib.fp8.recipes import RECIPES, Recipe
from course_lib.single_gpu import training as single_gpu
from course_lib.single_gpu.model import PRESETS, Transformer, need_transformer
from course_lib.tensor_parallel.linear import ColumnMatmul, ColumnParallelLinear, RowParallelLinear, as_autocast
from course_lib.tensor_parallel.model import check_degree


class Fp8ColumnFunction:
    """`ColumnMatmul` in 8 bits, for layers that share an input, with the quantizers of each layer."""

    def __init__(self, quantizers: list[LayerQuantizers]):
        self.quantizers = quantizers

    def apply(self, x: torch.Tensor, group: dist.ProcessGroup, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return Fp8LinearFunction.apply(x, group, self.quantizers, *weights)


class Fp8RowParallelLinear(Fp8Linear):
    """`RowParallelLinear` in 8 bits: the partial sums travel in x's dtype."""

    def __init__(self, layer: RowParallelLinear, casts: Casts, rows: tuple[Split, ...]):
        columns = Split(1, layer.group)
        super().__init__(layer, casts, {"input": (*rows, columns), "weight": (columns,), "gradient": rows})
        self.group, self.output_reduce = layer.group, layer.output_reduce

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.output_reduce(self.matmul(x), self.group)
        return out if self.bias is None else out + self.bias.to(out.dtype)


def check_layers(model: nn.Module) -> None:
    """Raise ValueError for a model whose layers cannot be converted to FP8."""
    need_transformer(model, "apply_fp8", "Fp8Linear(linear, recipe.casts) works on any nn.Linear")
    assert isinstance(model, Transformer)
    for name, layer in model.blocks.named_modules():
        if isinstance(layer, Fp8Linear):
            raise ValueError(f"blocks.{name} is FP8 already")
        if isinstance(layer, ColumnParallelLinear) and layer.matmul is not ColumnMatmul:
            raise ValueError(f"the matmuls of blocks.{name} are replaced already, perhaps by sequence parallelism")
        if isinstance(layer, RowParallelLinear) and layer.chunks > 1:
            raise ValueError(f"blocks.{name} works in chunks, which FP8 does not: split the model with chunks=1")


def apply_fp8(model: nn.Module, recipe: Recipe, batch_group: dist.ProcessGroup | None = None) -> nn.Module:
    """Have the linear layers of a `Transformer`'s blocks multiply in 8 bits as the recipe says, in place; return the
    model. Apply it after apply_tensor_parallel, before recomputation, data parallelism and ZeRO. A recipe with matmuls
    in BF16 changes nothing. Routers and experts (notebook 08) are left alone.

    batch_group: the ranks that share the batch, if scales are to cover the full batch. Call
    `update_scales(model)` after each optimizer step of a recipe with delayed scaling. A split model computes what one
    process computes if each rank's shard is an integer number of blocks; a block that spans two ranks is cut there.

    Raises ValueError, and changes nothing, for layers that are in FP8 already, sequence-parallel, or in chunks.
    """
    check_layers(model)
    assert isinstance(model, Transformer)
    if recipe.casts is None:
        return model
    rows = () if batch_group is None else (Split(0, batch_group),)
    for block in model.blocks:
        for parent in (module for module in list(block.modules()) if hasattr(module, "project")):
            convert(parent, recipe.casts, rows)
    return model


def fp8_project(x: torch.Tensor, layers: list[Fp8Linear]) -> tuple[torch.Tensor, ...]:
    """Return the output of each of the layers for x [..., in], which is quantized, and kept for backward, once."""
    (x,) = as_autocast(x)
    outs = Fp8LinearFunction.apply(x, None, [layer.quantizers for layer in layers], *(layer.weight for layer in layers))
    biases = [layer.bias for layer in layers]
    return tuple(out if bias is None else out + bias.to(out.dtype) for out, bias in zip(outs, biases, strict=True))


def convert(parent: nn.Module, casts: Casts, rows: tuple[Split, ...]) -> None:
    """Convert the layers of an attention or an MLP to FP8."""
    columns = [layer for layer in parent.children() if isinstance(layer, ColumnParallelLinear)]
    quantizers: list[LayerQuantizers] = []
    for column in columns:
        group = column.replicas.shards if column.replicas else column.group
        splits = {"input": rows, "weight": (Split(0, group),), "gradient": (*rows, Split(1, group))}
        column.quantizers = LayerQuantizers(casts, splits).to(column.weight.device)
        quantizers.append(column.quantizers)
        column.quantizers.input = quantizers[0].input  # all have the same x
    for i, column in enumerate(columns):  # the first one multiplies for all, if all outputs are wanted
        column.matmul = Fp8ColumnFunction(quantizers if i == 0 else [quantizers[i]])
    for name, layer in list(parent.named_children()):
        if isinstance(layer, RowParallelLinear):
            setattr(parent, name, Fp8RowParallelLinear(layer, casts, rows))
        elif isinstance(layer, nn.Linear):
            setattr(parent, name, Fp8Linear(layer, casts, {"input": rows, "gradient": rows}))
    if not columns:
        named = [(name, cast(Fp8Linear, layer)) for name, layer in parent.named_children()]
        same_input = [layer for name, layer in named if name not in ("o_proj", "down_proj")]
        for layer in same_input:
            layer.quantizers.input = same_input[0].quantizers.input
        parent.project_layers = fp8_project  # type: ignore[assignment]  # of an Attention or MLP


RECIPE_OF_OPTION = {name.lower().replace(" ", "-").replace(",", ""): recipe for name, recipe in RECIPES.items()}


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the program's options. Exits with status 2 for an unknown or impossible option."""
    parser = single_gpu.training_parser("fp8", "Train in FP8: tensor parallelism inside, ZeRO-3 outside.")
    parser.add_argument(
        "--recipe",
        default="deepseek-v3",
        choices=list(RECIPE_OF_OPTION),
        help="how the operands of matmuls are quantized",
    )
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the work on a batch")
    parser.add_argument(
        "--gather", default="dtype", choices=["dtype", "fp8"], help="the format in which weights are gathered"
    )
    args = single_gpu.parse(parser, argv)
    if args.tp < 1:
        parser.error("--tp must be 1 or more")
    if args.gather == "fp8" and RECIPE_OF_OPTION[args.recipe].casts is None:
        parser.error("--gather fp8 needs a recipe whose matmuls are in FP8")
    try:
        check_degree(PRESETS[args.preset], args.tp)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the options say, and return the records. Rank 0 prints one line per step and writes the records to
    --out; tokens/s count its batch, divided by the ranks that share it. Weights and optimizer states are in
    float32, sharded.

    Needs the default process group. Raises ValueError if --tp does not divide the number of ranks.
    """
    from torch.distributed.device_mesh import init_device_mesh

    from course_lib.fp8.gather import Fp8Gather
    from course_lib.single_gpu.model import init_parameter
    from course_lib.tensor_parallel.model import apply_tensor_parallel
    from course_lib.tensor_parallel.shards import materialize
    from course_lib.tensor_parallel.vocabulary import vocab_parallel_cross_entropy
    from course_lib.zero.sharded_models import fully_shard
    from course_lib.zero.shards import clip_grad_norm_

    args, rank, world_size = options(argv), dist.get_rank(), dist.get_world_size()
    if world_size % args.tp:
        raise ValueError(f"--tp {args.tp} does not divide the {world_size} ranks")
    mesh = init_device_mesh(device_type(), (world_size // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"].get_group(), mesh["tp"].get_group()
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32

    def build(config, seed):
        with torch.device("meta"):
            model = apply_tensor_parallel(Transformer(config), tp)
        materialize(model, lambda name, tensor: init_parameter(name, tensor, config, seed))
        recipe = RECIPE_OF_OPTION[args.recipe]
        delayed = recipe.casts is not None and any(cast.history for cast in recipe.casts)
        apply_fp8(model, recipe, dp if delayed else None)  # a current scale would wait for all ranks in every matmul
        return fully_shard(model, dp, dtype, encode=Fp8Gather() if args.gather == "fp8" else None)

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

    return single_gpu.run(args, step, build, rank=rank, world_size=world_size, ranks_per_batch=args.tp)
