"""course_lib's DataParallel against PyTorch's DistributedDataParallel: step time and peak memory, on several ranks.

    python benchmarks/data_parallel.py        # writes benchmarks/results/data_parallel_<device>.json

Two and four ranks on this machine's CPU, or one rank per GPU. A step is zero_grad, forward, backward, finish. The
rival has its best options, and both have the bucket size of BUCKET_MB at which they were fastest. They run in
alternation, each after a barrier, as does the rival against itself: the spread of that ratio is the noise. Times
are rank 0's, medians of PAIRS pairs, and of 9 for the modes naive and overlap.
"""

import statistics
import warnings

import measure
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from course_kit.ranks import Ranks
from course_lib.data_parallel.replicas import DataParallel
from course_lib.single_gpu.model import PRESETS, Transformer, loss

BUCKET_MB = (1, 5, 25)
TRIES = 9  # steps per bucket size
PAIRS = 41  # steps differ by more than the rivals do


def compare(preset: str, batch: int, seq: int) -> dict[str, dict]:
    """Return all figures of a rank; batch: sequences per rank."""
    measure.PAIRS = PAIRS
    warnings.filterwarnings("ignore", message=".*broadcast_buffers")
    on_gpu = dist.get_backend() != "gloo"
    device = torch.accelerator.current_accelerator() if on_gpu else torch.device("cpu")
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs, targets = torch.randint(PRESETS[preset].vocab, (2, batch, seq), generator=generator).to(device)

    def model() -> Transformer:
        with device:
            return Transformer(PRESETS[preset]).to(torch.bfloat16 if on_gpu else torch.float32)

    def step(wrapped: torch.nn.Module):
        """Return a function that runs a training step without the optimizer, until the device has finished it."""

        def run() -> None:
            wrapped.zero_grad()
            loss(wrapped(inputs), targets).backward()
            if isinstance(wrapped, DataParallel):
                wrapped.finish()
            if on_gpu:
                torch.accelerator.synchronize()

        return run

    def ours(bucket_mb: float = 25, mode: str = "bucket", module: Transformer | None = None):
        return step(DataParallel(module or model(), mode=mode, bucket_mb=bucket_mb))

    def rival(bucket_mb: float, static_graph: bool, module: Transformer | None = None):
        options = {"gradient_as_bucket_view": True, "broadcast_buffers": False, "static_graph": static_graph}
        return step(DistributedDataParallel(module or model(), bucket_cap_mb=bucket_mb, **options))

    def best(make, choices: list[tuple]) -> tuple:
        """Return the choice with the fastest steps on the slowest rank. Alternates the choices after two steps each."""
        runs, times = [make(*choice) for choice in choices], [[] for _ in choices]
        for _ in range(TRIES + 2):
            for run, taken in zip(runs, times, strict=True):
                dist.barrier()
                taken.append(measure.seconds(run))
        medians = torch.tensor([statistics.median(taken[2:]) for taken in times], device=device)
        dist.all_reduce(medians, op=dist.ReduceOp.MAX)
        return choices[medians.argmin().item()]

    our_choice = best(ours, [(mb,) for mb in BUCKET_MB])
    their_choice = best(rival, [(mb, static) for mb in BUCKET_MB for static in (False, True)])
    our_step, their_step = ours(*our_choice), rival(*their_choice)
    results = {
        "ours": {"bucket_mb": our_choice[0]},
        "ddp": {"bucket_cap_mb": their_choice[0], "static_graph": their_choice[1]},
        "ours_against_ddp": measure.paired(our_step, their_step, dist.barrier),
        "ddp_against_itself": measure.paired(rival(*their_choice), their_step, dist.barrier),
    }
    measure.PAIRS = 9
    for mode in ("overlap", "naive"):
        results[f"{mode}_against_ddp"] = measure.paired(ours(mode=mode), their_step, dist.barrier)
    for name, make, choice, run in (("ours", ours, our_choice, our_step), ("ddp", rival, their_choice, their_step)):
        module = model()
        results[name]["step_peak_mib"] = measure.peak_mib(run)  # above weights and buckets
        results[name]["first_peak_mib"] = measure.peak_mib(lambda: twice(make(*choice, module=module)))  # above weights
    return results


def twice(run) -> None:
    """Run two steps: DistributedDataParallel rebuilds its buckets after the first."""
    run()
    run()


def main() -> None:
    """Measure on this machine, print the figures and write them down."""
    gpus = torch.cuda.device_count()
    figures = {"preset": "SmolLM-135M" if gpus else "small", "batch": 8 if gpus else 4, "seq": 1024 if gpus else 128}
    sizes = tuple(figures.values())
    for n in [gpus] if gpus else [2, 4]:
        with Ranks(n, timeout_s=900) as ranks:
            figures[f"{n} ranks, {ranks.backend}"] = ranks(compare, *sizes)[0]
    measure.write("data_parallel", figures)


if __name__ == "__main__":
    main()
