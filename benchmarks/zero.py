"""ZeRO of course_lib against PyTorch's: whole steps with fused AdamW, their time and peak memory, on several ranks.

    python benchmarks/zero.py [PAIRS]        # writes benchmarks/results/zero_<device>.json

Stages 1 and 2 run against ZeroRedundancyOptimizer over DistributedDataParallel, stage 3 against FSDP2's fully_shard by
block, once with its default, which frees parameters after forward, and once keeping them until backward; on four ranks
and more also both as two replicas (HSDP). Two and four ranks on this machine's CPU, or one rank per GPU. The rivals
have their best options, and all have the bucket size of BUCKET_MB at which they were fastest. They run in alternation,
each after a barrier, as do two instances of the rival: the spread of that ratio is the noise. A run is STEPS steps, and
ends when all values have arrived, so that the last step's all-gathers count. Times are of a run on rank 0, medians of
PAIRS pairs. All start from the same weights, and their losses are compared. Peaks are above the memory between steps
("step"), or before the model ("first": making it, its optimizer, and two steps). On a GPU also: bytes by category of
llama3.2-1B at world size 1 against the formulas.
"""

import statistics
import sys
import warnings

import measure
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from course_kit.ranks import Ranks
from course_lib.single_gpu.memory import param_count, state_bytes
from course_lib.single_gpu.model import PRESETS, Transformer, loss
from course_lib.zero.optimizer import ZeroOptimizer
from course_lib.zero.sharded_models import fully_shard

BUCKET_MB = (1, 5, 25)
STEPS = 2
TRIES = 3  # runs per choice
PAIRS = 15
ADAMW = {"lr": 1e-3, "fused": True}
BY = {"ours_1": "zero_redundancy", "ours_2": "zero_redundancy", "ours_3": "fsdp2", "ours_hsdp": "fsdp2_hsdp"}


def ours(stage: int):
    """Return a function of a model: (module to run, optimizer, function to call after backward)."""

    def wrap(model: Transformer, bucket_mb: float):
        zero = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, bucket_mb=bucket_mb, **ADAMW)
        return model, zero, None

    return wrap


def mesh_of(model: Transformer, replicas: int):
    """Return a mesh of all ranks, with two dimensions if there are replicas."""
    device, shape = next(model.parameters()).device.type, (replicas, dist.get_world_size() // replicas)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("replica", "shard"))
    return mesh if replicas > 1 else mesh["shard"]


def ours_3(replicas: int):
    def wrap(model: Transformer):
        sharded = fully_shard(model, mesh_of(model, replicas) if replicas > 1 else None)
        return sharded, torch.optim.AdamW(sharded.parameters(), **ADAMW), sharded.finish

    return wrap


def zero_redundancy(model: Transformer, bucket_mb: float, static_graph: bool, in_buckets: bool):
    options = {"gradient_as_bucket_view": True, "broadcast_buffers": False, "static_graph": static_graph}
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_mb, **options)
    theirs = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=in_buckets, **ADAMW
    )
    return ddp, theirs, None


def fsdp(reshard: bool, replicas: int = 1):
    def wrap(model: Transformer, prefetch: bool):
        mesh = mesh_of(model, replicas)
        blocks = list(model.blocks)
        for block in blocks:
            fsdp2(block, mesh=mesh, reshard_after_forward=reshard)
        fsdp2(model, mesh=mesh, reshard_after_forward=reshard)
        if prefetch:
            model.set_modules_to_forward_prefetch(blocks[:1])
            for one, following in zip(blocks, blocks[1:], strict=False):
                one.set_modules_to_forward_prefetch([following])
                following.set_modules_to_backward_prefetch([one])
        return model, torch.optim.AdamW(model.parameters(), **ADAMW), None

    return wrap


CHOICES = {
    "ours_1": (ours(1), [(mb,) for mb in BUCKET_MB]),
    "ours_2": (ours(2), [(mb,) for mb in BUCKET_MB]),
    "ours_3": (ours_3(1), [()]),
    "ours_hsdp": (ours_3(2), [()]),
    "zero_redundancy": (
        zero_redundancy,
        [(mb, static, in_buckets) for mb in BUCKET_MB for static in (False, True) for in_buckets in (False, True)],
    ),
    "fsdp2": (fsdp(True), [(False,), (True,)]),
    "fsdp2, parameters kept": (fsdp(False), [(False,), (True,)]),
    "fsdp2_hsdp": (fsdp(True, 2), [(False,), (True,)]),
}


def compare(preset: str, batch: int, seq: int, pairs: int) -> dict[str, dict]:
    """Return all figures of a rank; batch: sequences per rank."""
    measure.PAIRS = pairs
    warnings.filterwarnings("ignore")
    on_gpu = dist.get_backend() != "gloo"
    device = torch.accelerator.current_accelerator() if on_gpu else torch.device("cpu")
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs, targets = torch.randint(PRESETS[preset].vocab, (2, batch, seq), generator=generator).to(device)

    def step(wrap, choice: tuple):
        """Return a function that runs STEPS training steps until the device has finished; `losses` has their losses."""
        with device:
            model = Transformer(PRESETS[preset]).to(torch.bfloat16 if on_gpu else torch.float32)
        module, optimizer, finish = wrap(model, *choice)

        def run(steps: int = STEPS) -> None:
            for _ in range(steps):
                step_loss = loss(module(inputs), targets)
                step_loss.backward()
                if finish:
                    finish()
                optimizer.step()
                optimizer.zero_grad()
                run.losses.append(step_loss.detach())
            if isinstance(optimizer, ZeroOptimizer):
                optimizer.wait()
            if on_gpu:
                torch.accelerator.synchronize()

        run.losses = []
        return run

    def best(wrap, choices: list[tuple]) -> tuple:
        """Return the choice with the fastest steps on the slowest rank. Alternates the choices after two steps each."""
        runs, times = [step(wrap, choice) for choice in choices], [[] for _ in choices]
        for _ in range(min(TRIES, pairs) + 2):
            for run, taken in zip(runs, times, strict=True):
                dist.barrier()
                taken.append(measure.seconds(run))
        medians = torch.tensor([statistics.median(taken[2:]) for taken in times], device=device)
        dist.all_reduce(medians, op=dist.ReduceOp.MAX)
        return choices[medians.argmin().item()]

    results, runs = {}, {}
    names = [name for name in CHOICES if dist.get_world_size() >= 4 or "hsdp" not in name]
    for name in names:
        wrap, choices = CHOICES[name]
        choice = best(wrap, choices) if len(choices) > 1 else choices[0]

        def first(wrap=wrap, choice=choice, name=name) -> None:
            runs[name] = step(wrap, choice)
            runs[name](2)

        results[name] = {"choice": choice, "first_peak_mib": measure.peak_mib(first)}
        runs[name]()
        results[name] |= {
            "step_peak_mib": measure.peak_mib(lambda name=name: runs[name](1)),
            "losses": torch.stack(runs[name].losses).tolist(),
        }
    for name, rival in [*((n, r) for n, r in BY.items() if n in names), ("ours_3", "fsdp2, parameters kept")]:
        results[f"{name} against {rival}"] = measure.paired(runs[name], runs[rival], dist.barrier)
        expected = torch.tensor(results[rival]["losses"])
        difference = (torch.tensor(results[name]["losses"]) / expected - 1).abs().max().item()
        results[f"{name} against {rival}"]["losses_differ_by"] = difference
    for rival in (name for name in ("zero_redundancy", "fsdp2", "fsdp2_hsdp") if name in names):
        other = step(CHOICES[rival][0], results[rival]["choice"])
        results[f"{rival} against itself"] = measure.paired(other, runs[rival], dist.barrier)
    return results


def arithmetic(preset: str) -> dict[str, dict]:
    """Return bytes by category on one GPU at world size 1: from the allocator, and from memory.state_bytes.

    Stage 3 has float32 shards, which are master weights too, and is gathered in bfloat16: the policy fp32.
    """
    config, results = PRESETS[preset], {}
    device, psi = torch.accelerator.current_accelerator(), param_count(PRESETS[preset])
    tokens = torch.zeros(2, 1, 16, dtype=torch.long, device=device)
    for stage in (1, 2, 3):
        levels = [torch.cuda.memory_allocated()]
        with device:
            model = Transformer(config).to(torch.bfloat16 if stage < 3 else torch.float32)
        levels.append(torch.cuda.memory_allocated())
        if stage < 3:
            optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, **ADAMW)
            buffers = {b.gradient.untyped_storage() for b in optimizer.gradients}
            buffers |= {f.untyped_storage() for b in optimizer.gradients if b.pool for f in b.pool.free}
            gradients = sum({s.data_ptr(): s.nbytes() for s in buffers}.values())
        else:
            model = fully_shard(model, compute_dtype=torch.bfloat16)
            optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        torch.cuda.empty_cache()
        levels.append(torch.cuda.memory_allocated())
        loss(model(tokens[0]), tokens[1]).backward()
        optimizer.finish() if stage < 3 else model.finish()
        if stage == 3:
            gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
        if stage < 3:
            optimizer.wait()
        torch.accelerator.synchronize()
        levels.append(torch.cuda.memory_allocated())
        start, with_model, _, end = levels
        measured = {
            "parameters": with_model - start,
            "gradients": gradients,
            "optimizer states": end - with_model - (gradients if stage < 3 else 0),
        }
        expected = state_bytes(psi, "bf16" if stage < 3 else "fp32", stage, 1)
        results[f"stage {stage}"] = {"parameters": psi, "measured": measured, "expected": expected}
        del model, optimizer
        if stage < 3:
            del buffers
    return results


def main(pairs: int = PAIRS) -> None:
    """Measure on this machine, print the figures and write them down."""
    gpus = torch.cuda.device_count()
    figures = {"preset": "SmolLM-135M" if gpus else "small", "batch": 8 if gpus else 4, "seq": 1024 if gpus else 128}
    sizes = tuple(figures.values())
    figures |= {"steps a run": STEPS, "pairs": pairs}
    for n in [gpus] if gpus else [2, 4]:
        with Ranks(n, timeout_s=1800) as ranks:
            figures[f"{n} ranks, {ranks.backend}"] = ranks(compare, *sizes, pairs)[0]
    if gpus:
        with Ranks(1, timeout_s=600) as ranks:
            figures["llama3.2-1B, 1 rank"] = ranks(arithmetic, "llama3.2-1B")[0]
    measure.write("zero", figures)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
