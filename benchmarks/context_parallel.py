"""Context and sequence parallelism of course_lib against PyTorch's own means: time and peak memory, on several ranks.

    python benchmarks/context_parallel.py [PAIRS]        # writes benchmarks/results/context_parallel_<device>.json

Attention: METHODS in both orders against an all-gather of K and V and F.scaled_dot_product_attention, with a mask made
beforehand for each chunk of queries, whose keys end where the chunk does; backward reduce-scatters (GatherSequence).
Which kinds run at which length: ON_CPU, ON_GPUS. "error": the norm of the error over the norm of one process's
attention, the largest of out and three gradients.

Sequence parallelism: a step (zero_grad, forward, loss of split logits, backward) of the preset `small` against DTensor:
parallelize_module with Shard(1) between the layers, SequenceParallel norms and loss_parallel; DTensor leaves the sum of
the norms' gradients to the code that reads them, ours computes it. Their losses are compared.

Two and four ranks on this machine's CPU, or a rank for each GPU. Each kind runs in alternation with its rival, each
after a barrier and until all ranks are done, as does the rival with itself: the spread of that ratio is the noise.
Times are medians of PAIRS pairs; peaks the largest of all ranks.
"""

import contextlib
import sys
import warnings

import measure
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from course_kit.ranks import Ranks
from course_lib.context_parallel.model import METHODS
from course_lib.sequence_parallel.model import apply_sequence_parallel, gather_sequence
from course_lib.sequence_parallel.shards import ORDERS, chunks_of, from_order, shard_sequence, unshard_sequence
from course_lib.single_gpu.model import PRESETS, ModelConfig, Transformer, loss
from course_lib.tensor_parallel.model import apply_tensor_parallel
from course_lib.tensor_parallel.vocabulary import vocab_parallel_cross_entropy

PAIRS = 7
PEAKS = 3
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64
# By length of the whole sequence, the kinds that are measured there.
ALL = [(method, order) for order in ORDERS for method in METHODS]
IN_ZIGZAG = [(method, "zigzag") for method in METHODS]
ON_CPU = {1024: ALL, 4096: ALL, 8192: [("ring", order) for order in ORDERS]}
ON_GPUS = {4096: ALL, 16384: ALL, 65536: IN_ZIGZAG}


def finished(run):
    """Return a function that calls `run` and waits until all ranks and their devices are done."""

    def timed() -> None:
        run()
        if dist.get_backend() != "gloo":
            torch.accelerator.synchronize()
        dist.barrier()

    return timed


def peak(run) -> float:
    """Return the largest peak of all ranks, in MiB. The peak of a rank is the least of PEAKS measurements: a block that
    a gloo thread has freed unnoticed counts until its address is used again.
    """
    peaks = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, min(measure.peak_mib(run) for _ in range(PEAKS)))
    return max(peaks)


def against(ours: dict, rival: dict) -> dict[str, dict]:
    return {name: measure.paired(ours[name], rival[name], dist.barrier) for name in ("forward", "step")}


# Attention.


def gathered(length: int, order: str, device: torch.device):
    """Return the rival: attention [b, s/n, a, d] of the local queries, after one all-gather of K and V."""
    rank, n = dist.get_rank(), dist.get_world_size()
    numbers = chunks_of(rank, n, order)
    chunk, masks = length // (n * len(numbers)), []
    for number in numbers:
        positions = torch.arange(chunk * number, chunk * (number + 1), device=device)
        masks.append(positions[:, None] >= torch.arange(chunk * (number + 1), device=device))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        full = from_order(gather_sequence(torch.cat([k, v], 2), dist.group.WORLD), n, order)
        keys, values = full.transpose(1, 2).chunk(2, 1)  # [b, kv, s, d]
        outs = []
        for queries, mask in zip(q.transpose(1, 2).split(chunk, 2), masks, strict=True):
            end = mask.shape[1]
            outs.append(
                F.scaled_dot_product_attention(
                    queries, keys[:, :, :end], values[:, :, :end], attn_mask=mask, enable_gqa=True
                )
            )
        return torch.cat(outs, 2).transpose(1, 2)

    return attend


def in_one_process(full: dict) -> dict[str, torch.Tensor]:
    """Return out and the gradients of q, k, v, computed in one process."""
    leaves = [full[name].detach().requires_grad_() for name in "qkv"]
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves), is_causal=True, enable_gqa=True)
    grads = torch.autograd.grad(out.transpose(1, 2), leaves, full["gradient"])
    return {"out": out.detach().transpose(1, 2)} | dict(zip("qkv", grads, strict=True))


def compare_attention(length: int, kinds: list[tuple[str, str]], pairs: int) -> dict[str, dict]:
    """Return all figures of one length, on a rank."""
    measure.PAIRS = pairs
    warnings.filterwarnings("ignore")
    on_gpu = dist.get_backend() != "gloo"
    device = torch.accelerator.current_accelerator() if on_gpu else torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    sizes = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS, "gradient": HEADS}
    full = {name: torch.randn(1, length, a, HEAD_DIM, generator=generator) for name, a in sizes.items()}
    full = {name: x.to(device, torch.bfloat16 if on_gpu else torch.float32) for name, x in full.items()}
    exact = in_one_process(full)

    def runs(attend, order: str) -> dict:
        """Return a forward, a forward with backward, and the error of their results against one process's."""
        local = {name: shard_sequence(x, order=order) for name, x in full.items()}
        leaves, results = [local[name].requires_grad_() for name in "qkv"], {}

        def step() -> None:
            results["out"] = attend(*leaves)
            grads = torch.autograd.grad(results["out"], leaves, local["gradient"])
            results.update(zip("qkv", grads, strict=True))

        step()
        all_tokens = {name: unshard_sequence(x, order=order).double() for name, x in results.items()}
        errors = [((x - exact[name]).norm() / exact[name].double().norm()).item() for name, x in all_tokens.items()]
        results.clear()
        return {"forward": finished(lambda: attend(*leaves)), "step": finished(step), "error": max(errors)}

    figures, rivals = {}, {}
    for order in dict.fromkeys(order for _, order in kinds):
        rival = gathered(length, order, device)
        rivals[order] = runs(rival, order)
        figures[f"sdpa {order} against itself"] = against(runs(rival, order), rivals[order])
        figures[f"sdpa {order}"] = {"step_peak_mib": peak(rivals[order]["step"]), "error": rivals[order]["error"]}
    for method, order in kinds:

        def attend(q, k, v, method=METHODS[method], order=order) -> torch.Tensor:
            return method(q, k, v, order=order)

        ours = runs(attend, order)
        figures[f"{method} {order} against sdpa"] = against(ours, rivals[order])
        figures[f"{method} {order}"] = {"step_peak_mib": peak(ours["step"]), "error": ours["error"]}
    return figures


# Sequence parallelism.


def dtensor(model: Transformer) -> Transformer:
    config, full, tokens = model.config, Replicate(), Shard(1)
    plan = {
        "embedding": RowwiseParallel(input_layouts=full, output_layouts=tokens),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False),
    }
    for number in range(config.layers):
        block = f"blocks.{number}"
        for name, others in (("attention", (None, None)), ("mlp", ())):
            plan[f"{block}.{name}_norm"] = SequenceParallel()
            plan[f"{block}.{name}"] = PrepareModuleInput(
                input_layouts=(tokens, *others), desired_input_layouts=(full, *others)
            )
        for name in ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"{block}.{name}"] = ColwiseParallel()
        for name in ("attention.o_proj", "mlp.down_proj"):
            plan[f"{block}.{name}"] = RowwiseParallel(output_layouts=tokens)
    if config.tied:  # split one by one, tied again afterwards
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    parallelize_module(model, init_device_mesh(model.norm.weight.device.type, (dist.get_world_size(),)), plan)
    if config.tied:
        model.head.weight = model.embedding.weight
    return model


def compare_models(config: ModelConfig, batch: int, seq: int, pairs: int) -> dict[str, dict]:
    """Return all figures of sequence parallelism, on a rank. batch: sequences, the same on all ranks."""
    measure.PAIRS = pairs
    warnings.filterwarnings("ignore")
    on_gpu = dist.get_backend() != "gloo"
    device = torch.accelerator.current_accelerator() if on_gpu else torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randint(config.vocab, (2, batch, seq), generator=generator).to(device)

    def runs(kind: str) -> dict:
        """Return a forward, a training step without the optimizer, and the losses of the steps so far."""
        with device:
            model = Transformer(config).to(torch.bfloat16 if on_gpu else torch.float32)
        if kind == "dtensor":
            dtensor(model)
        else:
            apply_tensor_parallel(model)
        if kind == "sequence parallel":
            apply_sequence_parallel(model)
        losses = []

        def forward() -> torch.Tensor:
            if kind == "dtensor":
                return loss(model(inputs), targets)
            return vocab_parallel_cross_entropy(model(inputs), targets, vocab=config.vocab)

        def step() -> None:
            model.zero_grad()
            with loss_parallel() if kind == "dtensor" else contextlib.nullcontext():
                step_loss = forward()
                step_loss.backward()
            value = step_loss.detach()
            losses.append(value.full_tensor() if kind == "dtensor" else value)

        def forward_alone() -> None:
            with loss_parallel() if kind == "dtensor" else contextlib.nullcontext():
                forward()

        return {"forward": finished(forward_alone), "step": finished(step), "losses": losses}

    rival, figures = runs("dtensor"), {}
    for name in ("dtensor", "sequence parallel", "tensor parallel alone"):
        ours = runs(name)
        title = f"{name} against {'itself' if name == 'dtensor' else 'dtensor'}"
        figures[title] = against(ours, rival)
        figures[title]["losses_differ_by"] = abs(ours["losses"][-1].item() / rival["losses"][-1].item() - 1)
        figures[name] = {"step_peak_mib": peak(ours["step"])}
    return figures


def main(pairs: int = PAIRS, longest: int = 2**20) -> None:
    """Measure on this machine, at lengths up to `longest`, print the figures and write them down."""
    gpus = torch.cuda.device_count()
    lengths = {length: kinds for length, kinds in (ON_GPUS if gpus else ON_CPU).items() if length <= longest}
    # As many K/V heads as query heads on GPUs: DTensor has no copies, and up to 32 ranks can share them.
    figures = {"preset": "bench-1B" if gpus else "small", "batch": 4, "seq": 2048 if gpus else 128, "pairs": pairs}
    figures |= {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    sizes = PRESETS[figures["preset"]], figures["batch"], figures["seq"]
    for n in [gpus] if gpus else [2, 4]:
        with Ranks(n, timeout_s=1800) as ranks:
            of_length = {
                f"attention, {s} tokens": ranks(compare_attention, s, kinds, pairs)[0] for s, kinds in lengths.items()
            }
            of_models = {"sequence parallelism": ranks(compare_models, *sizes, pairs)[0]}
            figures[f"{n} ranks, {ranks.backend}"] = of_length | of_models
    measure.write("context_parallel", figures)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
