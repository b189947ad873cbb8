"""Tensor parallelism of course_lib against PyTorch's DTensor: step time and peak memory, on several ranks.

    python benchmarks/tensor_parallel.py [PAIRS]        # writes benchmarks/results/tensor_parallel_<device>.json

A step is zero_grad, forward, the loss of split logits, backward. The rival is parallelize_module with its best options:
the inputs of attention and MLP prepared once for all matmuls, the logits left split, loss_parallel. Ours runs in
KINDS: row layers in 1, 2 and 4 chunks, and "apart", f and then plain linear layers, so that nothing is hidden in
backward. Two and four ranks on this machine's CPU, or a rank for each GPU. All have the same weights and tokens, and
their losses are compared. Each kind runs in alternation with DTensor, each after a barrier, as does DTensor with
itself: the spread of that ratio is the noise. Times are rank 0's, medians of PAIRS pairs; forward alone too.
"""

import contextlib
import sys
import warnings

import measure
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    loss_parallel,
)

from course_kit.labs.tensor_parallel.rivals import split_by_dtensor
from course_kit.ranks import Ranks
from course_lib.single_gpu.model import PRESETS, ModelConfig, Transformer, loss
from course_lib.tensor_parallel.model import apply_tensor_parallel
from course_lib.tensor_parallel.regions import copy_to_group
from course_lib.tensor_parallel.vocabulary import vocab_parallel_cross_entropy

PAIRS = 15
PEAKS = 7
KINDS = {"1 chunk": 1, "2 chunks": 2, "4 chunks": 4, "apart": 1}


def project_apart(x: torch.Tensor, layers: list) -> tuple[torch.Tensor, ...]:
    """Return what project_together returns, for layers without copies or biases, by f and PyTorch's linear layers."""
    x = copy_to_group(x, layers[0].group)
    return tuple(F.linear(x, layer.weight) for layer in layers)


def ours(model: Transformer, kind: str) -> Transformer:
    apply_tensor_parallel(model, chunks=KINDS[kind])
    if kind == "apart":
        for module in (module for block in model.blocks for module in (block.attention, block.mlp)):
            module.project_layers = project_apart
    return model


def dtensor(model: Transformer) -> Transformer:
    mesh = init_device_mesh(model.norm.weight.device.type, (dist.get_world_size(),))
    return split_by_dtensor(model, mesh)


def peak(step) -> float:
    """Return the least of PEAKS peaks: a block that a gloo thread has freed counts until its address is used again."""
    return min(measure.peak_mib(step) for _ in range(PEAKS))


def compare(config: ModelConfig, batch: int, seq: int, pairs: int) -> dict[str, dict]:
    """Return all figures, on a rank. batch: sequences, the same on all ranks."""
    measure.PAIRS = pairs
    warnings.filterwarnings("ignore")
    on_gpu = dist.get_backend() != "gloo"
    device = torch.accelerator.current_accelerator() if on_gpu else torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randint(config.vocab, (2, batch, seq), generator=generator).to(device)

    def runs(kind: str):
        """Return a forward and a training step without the optimizer, both with a synchronize, and the losses."""
        with device:
            model = Transformer(config).to(torch.bfloat16 if on_gpu else torch.float32)
        model, is_ours = (ours(model, kind), True) if kind in KINDS else (dtensor(model), False)

        def forward() -> torch.Tensor:
            if is_ours:
                return vocab_parallel_cross_entropy(model(inputs), targets, vocab=config.vocab)
            return loss(model(inputs), targets)

        def finished(run):
            def timed() -> None:
                with contextlib.nullcontext() if is_ours else loss_parallel():
                    run()
                if on_gpu:
                    torch.accelerator.synchronize()

            return timed

        def step() -> None:
            model.zero_grad()
            step_loss = forward()
            step_loss.backward()
            value = step_loss.detach()
            losses.append(value if is_ours else value.full_tensor())

        losses = []
        return finished(forward), finished(step), losses

    rival, again = runs("dtensor"), runs("dtensor")

    def against(kind: tuple) -> dict:
        """Return the times of forward and step of both, and the relative difference of their losses."""
        results = {"step": measure.paired(kind[1], rival[1], dist.barrier)}
        results["forward"] = measure.paired(kind[0], rival[0], dist.barrier)
        results["losses_differ_by"] = abs(kind[2][-1].item() / rival[2][-1].item() - 1)
        return results

    figures = {}
    for name in KINDS:
        kind = runs(name)
        figures[f"{name} against dtensor"] = against(kind)
        figures[name] = {"step_peak_mib": peak(kind[1])}
    figures["dtensor against itself"] = against(again)
    figures["dtensor"] = {"step_peak_mib": peak(rival[1])}
    return figures


def main(pairs: int = PAIRS) -> None:
    """Measure on this machine, print the figures and write them down."""
    gpus = torch.cuda.device_count()
    # As many K/V heads as query heads on GPUs: DTensor has no copies, and up to 32 ranks can share them.
    figures = {"preset": "bench-1B" if gpus else "small", "batch": 4, "seq": 2048 if gpus else 128}
    sizes = PRESETS[figures["preset"]], figures["batch"], figures["seq"]
    figures["pairs"] = pairs
    for n in [gpus] if gpus else [2, 4]:
        with Ranks(n, timeout_s=1800) as ranks:
            figures[f"{n} ranks, {ranks.backend}"] = ranks(compare, *sizes, pairs)[0]
    measure.write("tensor_parallel", figures)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
