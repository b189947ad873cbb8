"""Batches, the break-it lab and the measurements of notebook 04: `ranks(step_ms, "naive")`, `drift_runs(ranks)`."""

from __future__ import annotations

import csv
import functools
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import course_lib
from course_kit.labs.peak import peak_of
from course_kit.ranks import Ranks
from course_kit.typed import grad_of
from course_lib.collectives.traffic import count_traffic
from course_lib.data_parallel import naive, replicas
from course_lib.single_gpu.model import PRESETS, ModelConfig, Transformer, loss

FAULTS = (2, 5, 12), (0, 3, 5), (3, 1, 3)  # of the drift lab: the rank, the step of its fault, steps in all
MiB = 2**20


@functools.cache
def published_scaling() -> list[dict[str, float]]:
    """Return the rows of data/dp_scaling.csv: published runs on 8 to 256 data-parallel GPUs."""
    path = Path(course_lib.__file__).parents[1] / "data" / "dp_scaling.csv"
    with path.open(encoding="utf-8") as file:
        return [{key: float(value) for key, value in row.items() if key != "source"} for row in csv.DictReader(file)]


def batch_of(rank: int, config: ModelConfig, batch: int = 2, seq: int = 17) -> torch.Tensor:
    """Return inputs and targets of one rank, [2, batch, seq], the same in every call."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(config.vocab, (2, batch, seq), generator=generator)


@torch.no_grad()
def sgd_step(module: nn.Module, lr: float = 0.1) -> None:
    """Take a step of plain SGD. (The first torch.optim optimizer in a process imports a compiler, which takes
    seconds.)
    """
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.sub_(lr * parameter.grad)


def sent_per_step(preset: str) -> int:
    """Return the bytes that this rank sends to average the gradients of a preset, one all-reduce per gradient."""
    model = Transformer(PRESETS[preset])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with count_traffic() as traffic:
        naive.average_gradients(model)
    return traffic.bytes


Step = list[tuple[str, float, float]]  # (name, start in ms, ms) of each phase and all-reduce


def timed_steps(modes: tuple[str, ...] = ("naive", "overlap", "bucket"), repeats: int = 5) -> dict[str, Step]:
    """Return this rank's step of median length for each mode, measured in alternation over a slow link.

    The link runs one all-reduce at a time, then stays busy for 0.5 ms plus the time of the bytes at 0.5 GB/s.
    """
    torch.set_num_threads(1)
    config = PRESETS["small"]
    models = {mode: replicas.DataParallel(Transformer(config), mode=mode, bucket_mb=4.0) for mode in modes}
    inputs, targets = batch_of(dist.get_rank(), config, batch=2, seq=128)
    all_reduce = dist.all_reduce
    runs: dict[str, list[tuple[float, Step]]] = {mode: [] for mode in modes}

    def timed(mode: str) -> tuple[float, Step]:
        sends, marks, model = [], [], models[mode]

        def slow_all_reduce(tensor, group=None, async_op=True):
            def carry() -> None:
                start = time.perf_counter()
                all_reduce(tensor, group=group)
                time.sleep(0.5e-3 + tensor.nbytes / 0.5e9)
                sends.append(("all-reduce", start, time.perf_counter()))

            work = link.submit(carry)
            work.wait = work.result
            return work

        model.zero_grad()
        dist.barrier()
        with mock.patch.object(dist, "all_reduce", slow_all_reduce):
            marks.append(time.perf_counter())
            step_loss = loss(model(inputs), targets)
            marks.append(time.perf_counter())
            step_loss.backward()
            marks.append(time.perf_counter())
            model.finish()
            marks.append(time.perf_counter())
        spans = [*sends, *zip(("forward", "backward", "wait"), marks, marks[1:], strict=False)]
        return marks[-1] - marks[0], [(name, 1e3 * (a - marks[0]), 1e3 * (b - a)) for name, a, b in spans]

    with ThreadPoolExecutor(1) as link:
        for _ in range(repeats):
            for mode in modes:
                runs[mode].append(timed(mode))
    return {mode: sorted(steps[2:])[(repeats - 2) // 2][1] for mode, steps in runs.items()}


def step_ms(mode: str, bucket_mb: float = 25.0, steps: int = 4) -> list[float]:
    """Return the ms of forward, backward and finish, on the slowest rank, of each step after the first."""
    torch.set_num_threads(1)
    model = replicas.DataParallel(Transformer(PRESETS["small"]), mode=mode, bucket_mb=bucket_mb)
    inputs, targets = batch_of(dist.get_rank(), PRESETS["small"], batch=1, seq=64)
    taken = []
    for _ in range(steps):
        model.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        loss(model(inputs), targets).backward()
        model.finish()
        taken.append(time.perf_counter() - start)
    slowest = torch.tensor(taken[1:])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [1e3 * seconds for seconds in slowest.tolist()]


def backward_ms(steps: int = 8) -> list[list[float]]:
    """Return the ms of backward on this rank, without finish(): pairs of (naive, bucket), in alternation."""
    torch.set_num_threads(1)
    config = PRESETS["small"]
    models = [replicas.DataParallel(Transformer(config), mode=mode, bucket_mb=2.0) for mode in ("naive", "bucket")]
    inputs, targets = batch_of(dist.get_rank(), config, batch=2, seq=128)
    pairs: list[list[float]] = []
    for _ in range(steps):
        pairs.append([])
        for model in models:
            model.zero_grad()
            step_loss = loss(model(inputs), targets)
            dist.barrier()
            start = time.perf_counter()
            step_loss.backward()
            pairs[-1].append(1e3 * (time.perf_counter() - start))
            model.finish()
    return pairs[2:]


class Branches(nn.Module):
    """A trunk, two branches and a head that is tied to the trunk; the caller decides which branch is used."""

    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right, self.never = (nn.Linear(4, 4) for _ in range(4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.trunk.weight

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        """Return the head's output for one branch; x: [b, 4]."""
        x = self.frozen(self.trunk(x))
        return self.head(self.left(x) if branch == "left" else self.right(x))


def branches_trial() -> tuple[dict[str, float | None], dict[str, float | None]]:
    """Return the sums of the gradients of `Branches` on this rank, and in one process with all four batches.

    Rank 3 uses the right branch, the other ranks the left one.
    """

    def sums(module: nn.Module) -> dict[str, float | None]:
        gradients = {name: p.grad for name, p in module.named_parameters()}
        return {name: None if grad is None else round(grad.sum().item(), 4) for name, grad in gradients.items()}

    torch.manual_seed(dist.get_rank())
    branches, alone = Branches(), Branches()
    dp = replicas.DataParallel(branches)
    alone.load_state_dict(branches.state_dict())
    dp(torch.ones(2, 4), "right" if dist.get_rank() == 3 else "left").sum().backward()
    dp.finish()
    (sum(alone(torch.ones(2, 4), branch).sum() for branch in ["left"] * 3 + ["right"]) / 4).backward()
    return sums(branches) | {"frozen, its values": round(branches.frozen.weight.sum().item(), 4)}, sums(alone)


def bf16_error(reduce_dtype: torch.dtype | None) -> tuple[float, int]:
    """Return the relative error of the mean of BF16 gradients, and the bytes that the all-reduces sent."""
    dp = replicas.DataParallel(Transformer(PRESETS["debug"]).bfloat16(), reduce_dtype=reduce_dtype)
    inputs, targets = batch_of(dist.get_rank(), PRESETS["debug"], seq=64)
    with dp.no_sync():
        loss(dp(inputs), targets).backward()
    exact = [grad_of(p).double() for p in dp.parameters()]
    for gradient in exact:
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())
    with count_traffic() as traffic:
        dp.finish()
    pairs = zip(dp.parameters(), exact, strict=True)
    difference = torch.stack([(grad_of(p).double() - e).square().sum() for p, e in pairs]).sum()
    return (difference / torch.stack([e.square().sum() for e in exact]).sum()).sqrt().item(), traffic.bytes


def drifting(bad_rank: int, bad_step: int, steps: int) -> dict[str, list[float]]:
    """Return, by step, this rank's loss, the norm of the averaged gradient, and the norm of the local gradient on a
    batch that all ranks share (probe). In step `bad_step` rank `bad_rank` updates its weights before finish().
    """
    config, rank = PRESETS["debug"], dist.get_rank()
    dp = replicas.DataParallel(Transformer(config), mode="naive")
    records: dict[str, list[float]] = {"loss": [], "averaged": [], "probe": []}
    for step in range(steps):
        dp.zero_grad()
        with dp.no_sync():  # the same batch on all ranks, nothing sent
            inputs, targets = batch_of(1000, config, seq=32)
            loss(dp(inputs), targets).backward()
        records["probe"].append(torch.cat([grad_of(p).flatten() for p in dp.parameters()]).norm().item())
        dp.zero_grad()
        inputs, targets = batch_of(10 * step + rank, config, seq=32)
        step_loss = loss(dp(inputs), targets)
        step_loss.backward()
        if rank == bad_rank and step == bad_step:
            sgd_step(dp, lr=0.5)
            dp.finish()
        else:
            dp.finish()
            sgd_step(dp, lr=0.5)
        records["loss"].append(step_loss.item())
        records["averaged"].append(torch.cat([grad_of(p).flatten() for p in dp.parameters()]).norm().item())
    return records


@functools.cache
def drift_runs(ranks: Ranks) -> dict[tuple[int, int], list[dict[str, list[float]]]]:
    """Run `drifting` with each of FAULTS; return its results, by (rank, step) of the fault, as a list with one entry
    per rank.

    The results are the same every time, so they are cached.
    """
    return {fault[:2]: ranks(drifting, *fault) for fault in FAULTS}


def against_ddp(preset: str = "small", repeats: int = 3) -> tuple[dict[str, np.ndarray], dict[str, float], float]:
    """Return the seconds of each step and the peak MiB of ours, of DDP and of DDP again, and the largest relative
    difference of the gradients.
    """
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    config = PRESETS[preset]
    inputs, targets = batch_of(dist.get_rank(), config, batch=2, seq=128)
    models: dict[str, nn.Module] = {"ours": replicas.DataParallel(Transformer(config))}
    models |= {
        name: DistributedDataParallel(Transformer(config), gradient_as_bucket_view=True, static_graph=True)
        for name in ("DDP", "DDP again")
    }

    def step(model: nn.Module) -> float:
        model.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        loss(model(inputs), targets).backward()
        if isinstance(model, replicas.DataParallel):
            model.finish()
        return time.perf_counter() - start

    times = np.array([[step(model) for model in models.values()] for _ in range(repeats + 2)])[2:]
    ours, theirs = ([grad_of(p) for p in models[name].parameters()] for name in ("ours", "DDP"))
    difference = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, theirs, strict=True))
    peaks = {name: peak_of(functools.partial(step, model)) for name, model in models.items()}
    return dict(zip(models, times.T, strict=True)), peaks, difference
