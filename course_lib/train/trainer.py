"""A run in progress: its model, its batches, its checkpoints and its log.

A run is a loop around `ParallelModel.step`. Between two lines of its log the host never waits for the device: losses
and norms stay there until a line, an evaluation or a checkpoint is due, and are then read together.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from course_lib.checkpoint.checkpoints import CheckpointError
from course_lib.checkpoint.hugging_face import from_hf
from course_lib.checkpoint.noise import drop_tokens
from course_lib.checkpoint.saved_run import SavedRun
from course_lib.expert_parallel.sizes import active_config
from course_lib.five_d.layouts import Layout
from course_lib.five_d.meshes import build_mesh
from course_lib.five_d.model import ParallelModel, parallelize
from course_lib.five_d.plan import batch_at
from course_lib.single_gpu import training as single_gpu
from course_lib.train.batches import PackedBatches
from course_lib.train.evaluation import evaluate
from course_lib.train.model import NamedModel
from course_lib.train.run_log import RunLog
from course_lib.train.schedule import rate_at
from course_lib.train.sections import Settings
from course_lib.train.settings import as_toml
from course_lib.train.streams import write_bytes
from course_lib.train.text import Text
from course_lib.train.transforms import compile_blocks, transforms

NOT_PLANNED = "out summary tensorboard wandb log_every checkpoints export layout elastic cluster".split()


def optimizer_of(settings: Settings) -> dict[str, Any]:
    """Return the arguments of parallelize that make the optimizer."""
    args = settings.optimizer
    common = {"lr": args.lr, "weight_decay": args.weight_decay, "fused": True}
    if args.optimizer == "sgd":
        return {"optimizer_cls": torch.optim.SGD, "momentum": args.momentum, **common}
    return {"optimizer_cls": torch.optim.AdamW, "betas": tuple(args.betas), "eps": args.eps, **common}


def dtype_of(settings: Settings) -> str:
    """Return the dtype of the matmuls: from the settings, or by default BF16 on a GPU and FP32 elsewhere."""
    return settings.precision.dtype or ("bf16" if torch.cuda.is_available() else "fp32")


def plan_of(settings: Settings) -> dict[str, Any]:
    """Return the settings that a run may change when it continues, by name: it prints each change. Paths are absolute,
    since a program that reads them from a checkpoint may run in another folder.
    """
    sections = (vars(getattr(settings, each.name)) for each in dataclasses.fields(settings))
    plan = {name: value for section in sections for name, value in section.items() if name not in NOT_PLANNED}
    plan["dtype"] = dtype_of(settings)  # a run may continue on another machine
    for name in ("dataset", "tokenizer", "eval_dataset"):
        if plan[name] and Path(plan[name]).exists():
            plan[name] = str(Path(plan[name]).resolve())
    return plan


class Trainer:
    """A run in progress: a model, its batches, its checkpoints and its log."""

    def __init__(self, settings: Settings, model: NamedModel, layout: Layout, text: Text):
        self.settings, self.model, self.layout, self.text = settings, model, layout, text
        mesh = build_mesh(layout)
        self.batches = PackedBatches(
            text.train, settings.run.batch // layout.dp, mesh.dp.rank(), layout.dp, settings.run.seed
        )
        self.parallel: ParallelModel = parallelize(
            model.config,
            layout,
            mesh,
            transforms(settings, layout, text.train.max_documents),
            moe=model.moe,
            seed=settings.run.seed,
            dtype=torch.bfloat16 if dtype_of(settings) == "bf16" else torch.float32,
            **optimizer_of(settings),
        )
        if settings.compile.compile:
            compile_blocks(self.parallel.stages, settings.compile.backend)
        self.device = next(self.parallel.stages.parameters()).device
        self.waiting: list[dict[str, Any]] = []  # records of steps whose losses are still on the device
        self.saved = self.open_checkpoints()
        log = settings.logging
        self.log = RunLog(log, self.saved.step, as_toml(settings)) if dist.get_rank() == 0 else None
        peak = log.peak_tflops
        self.peak = peak * 1e12 if peak else single_gpu.peak_flops()

    def open_checkpoints(self) -> SavedRun:
        """Return the run's checkpoints; the last one is loaded, or else the weights of from_hf."""
        settings, root = self.settings, self.settings.checkpoints
        same = {"seed": settings.run.seed, "drop_tokens": settings.run.drop_tokens, "moe": self.model.moe}
        folder = Path(root.checkpoints) if root.checkpoints else None
        bad_steps, plan = settings.optimizer.bad_steps, plan_of(settings)
        saved = SavedRun(self.parallel, self.batches, folder, root.save_every, root.keep, same, plan, bad_steps)
        try:
            if settings.model.from_hf and not saved.step:
                from_hf(self.parallel, Path(settings.model.from_hf))
            if folder and dist.get_rank() == 0:
                try:
                    write_bytes(folder / "run.toml", as_toml(settings).encode())
                except OSError as error:
                    saved.say(f"{folder / 'run.toml'}: {error.strerror}; the settings are not written to it")
        except BaseException:
            saved.release()
            raise
        return saved

    def train(self) -> list[dict]:
        """Train to the end; return the records of all steps. Rank 0 prints and writes them."""
        run, last, records = self.settings.run, self.settings.run.steps, []
        self.parallel.stages.train()
        start = time.perf_counter()
        for step in range(self.saved.step + 1, last + 1):
            self.step(step)
            evaluates = self.is_due(step, self.settings.evaluation.eval_every)
            saves = self.saved.checkpoints is not None and self.is_due(step, self.saved.every)
            if evaluates or saves or self.is_due(step, self.settings.logging.log_every):
                records += self.report(time.perf_counter() - start)
                if evaluates:
                    self.evaluate(step)
                start = time.perf_counter()
        if self.saved.step >= run.steps:
            self.saved.say(f"nothing left to do: {self.saved.step} steps are done, steps is {run.steps}")
            if self.settings.evaluation.eval_every:
                self.evaluate(self.saved.step, again=True)
        self.saved.finish()
        if self.saved.checkpoints and (failure := self.saved.checkpoints.failure):  # of the last step, on all ranks
            raise CheckpointError(f"ended without a checkpoint of its last step: {failure}; {self.saved.last_good()}")
        return records

    def is_due(self, step: int, every: int) -> bool:
        """Return whether something that is done every so many steps, and after the last one, is due; 0: never."""
        return every > 0 and (step % every == 0 or step == self.settings.run.steps)

    def step(self, step: int) -> None:
        """Do one step, and note what its record will need. The host does not wait for the device."""
        run = self.settings.run
        batch = batch_at(step, run.start_batch or run.batch, run.batch, run.ramp)
        rate = rate_at(step, self.settings.optimizer, run.steps)
        for group in self.parallel.optimizer.param_groups:
            group["lr"] = rate
        self.batches.batch = batch // self.layout.dp
        first_sample = self.batches.position + self.batches.rank * self.batches.batch
        inputs, targets, positions = next(self.batches)
        if run.drop_tokens:
            inputs = drop_tokens(inputs, run.drop_tokens, self.model.config.vocab, run.seed, first_sample)
        inputs, targets = (each.to(self.device, non_blocking=True) for each in (inputs, targets))
        positions = None if positions is None else positions.to(self.device, non_blocking=True)
        loss, norm = self.parallel.step(inputs, targets, self.settings.optimizer.max_norm, positions)
        if self.settings.precision.fp8 != "none":
            self.update_scales()
        tokens = self.batches.position * run.seq
        self.waiting.append({"step": step, "loss": loss, "norm": norm, "lr": rate, "batch": batch, "tokens": tokens})

    def update_scales(self) -> None:
        """End a step of the scales that depend on earlier steps. The amax of a skipped step does not count."""
        from course_lib.fp8.delayed_scaling import DelayedQuantizer, update_scales

        for module in self.parallel.stages.modules():
            if isinstance(module, DelayedQuantizer):
                module.amax.nan_to_num_(0, 0, 0)
        update_scales(self.parallel.stages)

    def report(self, seconds: float) -> list[dict]:
        """Read the losses and norms of the steps since the last report, print and write their records, and save if it
        is due; return the records. seconds: for all of these steps.
        """
        waiting, self.waiting = self.waiting, []
        # The fullest rank's bytes and its number, in one integer: no list as long as the world.
        encoded = single_gpu.peak_memory(self.device) * self.layout.ranks + dist.get_rank()
        fullest = torch.full((), encoded, dtype=torch.int64, device=self.device)
        dist.all_reduce(fullest, dist.ReduceOp.MAX)
        values = [each[name].double() for each in waiting for name in ("loss", "norm")]
        *numbers, encoded = torch.stack([*values, fullest.double()]).tolist()  # exact up to 2^53
        peak_memory, rank = divmod(int(encoded), self.layout.ranks)
        sequences = sum(each["batch"] for each in waiting)
        speed = sequences * self.settings.run.seq / seconds / self.layout.ranks
        sizes = active_config(self.model.config, self.model.moe)
        mfu = single_gpu.mfu(sizes, self.settings.run.seq, speed, self.peak) if self.peak else None
        common = {"tokens_per_s": speed, "mfu": mfu, "peak_memory": peak_memory, "fullest_rank": rank}
        common["layout"] = str(self.layout)
        for each, loss, norm in zip(waiting, numbers[::2], numbers[1::2], strict=True):
            each |= {"loss": loss, "norm": norm, "step_s": seconds * each["batch"] / sequences, **common}
        if self.log:
            print(single_gpu.describe(waiting[-1]), flush=True)
            self.log.add(waiting)
        for each in waiting:
            last = each["step"] == self.settings.run.steps
            self.saved.after(each["step"], each["loss"], each["norm"], last, may_save=each is waiting[-1])
        return waiting

    def evaluate(self, step: int, again: bool = False) -> None:
        """Print the loss on held-out text, and write it to the log. again: not to the log, which has this step."""
        assert self.text.held_out is not None, "there is held-out text where eval_every is set"
        loss = evaluate(self.parallel, self.text.held_out).item()
        if self.log:
            print(f"step {step:>5} | held-out loss {loss:.4f}", flush=True)
            if not again:
                self.log.evaluation(step, loss)

    def close(self) -> None:
        """Release the checkpoints, and end the log."""
        self.saved.release()
        if self.log:
            self.log.close()
