"""One run of a sweep: a model, a layout and a batch, the command that runs them, and the resulting row.

A run has a folder. Its ranks write steps.jsonl, device.txt and error-N.json to it (`rank`), and each node its log and
the outcome of the command (`enclosed`). `row_of` reads a row from that folder, so it is the same on this machine and
after a Slurm job. A row has the columns of the playbook's published runs first and its own columns after them, so that
the same code plots both. tokens_per_s_per_gpu is per rank, from the median step; peak_mem_gb is of the fullest rank, in
units of 2**30 bytes: of CUDA's allocator, or on a CPU of the entire process.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import statistics
import sys
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from course_kit.sweep.enclosed import Outcome, run_enclosed
from course_lib.five_d.layouts import Layout, check_layout
from course_lib.single_gpu.model import PRESETS
from course_lib.train import program

WARM_UP_STEPS = 2  # not counted: allocators, autotuning, the first use of each group
PROGRAM = ("-m", "course_kit.sweep.rank")  # what torchrun starts on each rank
PUBLISHED = "model nodes dp tp pp zero_stage micro_batch grad_accum global_batch_seqs".split()
PUBLISHED += "ok mfu_pct tokens_per_s_per_gpu peak_mem_gb".split()
OF_SWEEPS = "cp ep layout seq steps options step_s loss why seconds date machine".split()
COLUMNS = PUBLISHED + OF_SWEEPS
# Each step is timed separately. Text and loss are as the planner's constants assume: no document masks, stored logits.
FIXED = ("--log-every", "1", "--no-document-masks", "--no-chunked-loss")
# Options of the training program that a run sets itself, and options with which its steps would differ from each other,
# or its model or layout from those of its row.
SET_BY_RUN = {"--preset", "--layout", "--batch", "--seq", "--steps", "--out", "--log-every", "--document-masks"}
SET_BY_RUN |= {"--no-document-masks", "--chunked-loss", "--no-chunked-loss"}
NOT_IN_SWEEP = {"--from-hf", "--hf-config", "--checkpoints", "--elastic", "--start-batch", "--ramp", "--recompute"}
NOT_IN_SWEEP |= {"--layers", "--hidden", "--heads", "--kv-heads", "--ffn-hidden", "--print-config"}
ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*: (\d+).*?exitcode\s*: (-?\d+)", re.DOTALL)  # torchrun's last words


@dataclass(frozen=True)
class Run:
    """A preset of the model in a layout, with `batch` sequences per step, on all ranks together."""

    preset: str
    layout: Layout
    batch: int
    seq: int
    steps: int
    nodes: int = 1
    options: tuple[str, ...] = ()  # other options of the program, such as --dtype bf16

    def __post_init__(self):
        if self.steps <= WARM_UP_STEPS:
            raise ValueError(f"{self.steps} steps: the first {WARM_UP_STEPS} are not counted, so make it more")
        for option in self.options:
            if (name := option.partition("=")[0]) in SET_BY_RUN | NOT_IN_SWEEP:
                raise ValueError(f"{name} is set for each run" if name in SET_BY_RUN else f"{name} is not for a sweep")

    @property
    def key(self) -> tuple:
        """The values that identify its row."""
        options = " ".join(self.options)
        return self.preset, self.nodes, str(self.layout), self.batch, self.seq, self.steps, options

    @property
    def name(self) -> str:
        """The name of its folder."""
        number = zlib.crc32(repr(self.key).encode())  # two runs may differ only in their batch
        return f"{self.preset}-{self.nodes}n-{str(self.layout).replace(',', '-')}-{number:08x}"

    def arguments(self) -> list[str]:
        """Return the options of the training program."""
        sizes = {"--batch": self.batch, "--seq": self.seq, "--steps": self.steps}
        options = [text for name, value in sizes.items() for text in (name, str(value))]
        return ["--preset", self.preset, "--layout", str(self.layout), *options, *FIXED, *self.options]


def refusal(run: Run) -> str:
    """Return the message with which the training program refuses a run, without starting it; "" for a possible run."""
    if run.layout.ranks % run.nodes:
        return f"{run.nodes} nodes do not divide {run.layout.ranks} ranks"
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message):
            program.options(run.arguments())
    except SystemExit:
        return message.getvalue().strip().rpartition("train: error: ")[2]
    return ""


def layouts_of(
    ranks: int,
    preset: str,
    batch: int,
    seq: int,
    zero_stages: Iterable[int] = (0, 1),
    micro_batches: Iterable[int] = (1,),
) -> list[Layout]:
    """Return all layouts of so many ranks that fit the model, the batch and the length; tp always with sp, zero only
    with replicas, zero 3 under a pipeline with weights that are gathered once per step.
    """
    degrees = [n for n in range(1, ranks + 1) if ranks % n == 0]
    layouts = []
    for dp, pp, cp, tp in itertools.product(degrees, repeat=4):
        for zero, micro_batch in itertools.product(zero_stages, micro_batches):
            if dp * pp * cp * tp != ranks or (zero and dp * cp == 1):
                continue
            layout = Layout(
                dp, pp, cp, tp,
                zero_stage=zero, sequence_parallel=tp > 1, micro_batch=micro_batch, gather_once=zero == 3 and pp > 1,
            )  # fmt: skip
            with contextlib.suppress(ValueError):
                check_layout(PRESETS[preset], layout, ranks, batch, seq)
                layouts.append(layout)
    return layouts


def torchrun_command(
    run: Run, folder: Path, program: Sequence[str] = PROGRAM, rendezvous: list[str] | None = None
) -> list[str]:
    """Return the command of one node. rendezvous: torchrun's options for it; by default its own, on a free port."""
    if rendezvous is None:
        rendezvous = ["--standalone", "--local-addr", "127.0.0.1"]
    # torchrun's own log folder would stay in the folder of temporary files when torchrun is killed.
    logs = ["--log-dir", str(folder.resolve() / "torchrun")]
    ranks = ["--nproc-per-node", str(run.layout.ranks // run.nodes)]
    command = [sys.executable, "-m", "torch.distributed.run", *rendezvous, *ranks, *logs]
    return [*command, *program, str(folder.resolve()), *run.arguments()]


def measure(
    run: Run,
    folder: Path,
    time_limit_s: float,
    program: Sequence[str] = PROGRAM,
    node: int = 0,
    rendezvous: list[str] | None = None,
) -> Outcome:
    """Run the ranks of one node, and write the node's log and outcome to the folder. No process is left in any case."""
    command = torchrun_command(run, folder, program, rendezvous)
    outcome = run_enclosed(command, time_limit_s, folder / f"node-{node}.log")
    partial = folder / f"node-{node}.part"
    partial.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
    partial.replace(partial.with_suffix(".json"))  # complete or not at all
    return outcome


def read_json(folder: Path, pattern: str) -> list[dict]:
    """Return the contents of a folder's JSON files, in the order of their names."""
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob(pattern))]


def why_failed(run: Run, folder: Path, time_limit_s: float, from_outside: str = "") -> str:
    """Return in one line why a run ended before its last step; "" for a run that completed.

    In this order: a rank's own error; `from_outside`, if the run was ended from outside; processes that did not end;
    the time limit; a rank that a signal killed; a lost connection, which is a consequence of something that this
    machine has not seen; the exit status.
    """
    outcomes = [Outcome(**each) for each in read_json(folder, "node-*.json")]
    errors = sorted(read_json(folder, "error-*.json"), key=lambda error: error["time_ns"])
    for error in errors:
        if not error["lost_peer"]:
            kind = "out of memory: " if error["no_memory"] else ""
            return f"{kind}rank {error['rank']}: {error['headline']}"[:300]
    if from_outside:
        return from_outside
    if left := [process for outcome in outcomes for process in outcome.left]:
        return f"processes {left} do not end, even by SIGKILL"
    hows = [outcome.how for outcome in outcomes]
    if "time limit" in hows:
        return f"time limit {time_limit_s:g} s"
    for log in sorted(folder.glob("node-*.log")):
        cause = ROOT_CAUSE.search(log.read_text(encoding="utf-8", errors="replace"))
        if cause and int(cause[2]) < 0 and int(cause[2]) != -15:
            memory = "; a machine that runs out of memory does this" if cause[2] == "-9" else ""
            return f"rank {cause[1]} was killed by signal {-int(cause[2])}{memory}"
    if errors:
        return f"rank {errors[0]['rank']} lost another rank: {errors[0]['headline']}"[:300]
    if len(outcomes) < run.nodes:
        return f"{len(outcomes)} of {run.nodes} nodes have reported their outcome"
    if "lost" in hows:
        return "the process that keeps the command was killed"
    bad = [outcome for outcome in outcomes if outcome.status != 0]
    if bad:
        return bad[0].how if bad[0].status is None else f"exit status {bad[0].status}"
    return ""


def read_steps(folder: Path) -> list[dict]:
    """Return the steps that the program has logged, without half a line that a kill has left."""
    file = folder / "steps.jsonl"
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def settings(run: Run) -> dict[str, Any]:
    """Return a row with the columns that are known before the run; the others are blank."""
    layout = run.layout
    degrees = {name: getattr(layout, name) for name in ("dp", "tp", "pp", "zero_stage", "micro_batch", "cp", "ep")}
    sizes = {"seq": run.seq, "steps": run.steps, "options": " ".join(run.options), "layout": str(layout)}
    accumulated = run.batch / (layout.dp * layout.micro_batch)
    batch = {"global_batch_seqs": run.batch, "grad_accum": int(accumulated) if accumulated.is_integer() else ""}
    known = {"model": run.preset, "nodes": run.nodes} | degrees | sizes | batch
    return {name: known.get(name, "") for name in COLUMNS}


def refused(run: Run, why: str, date: str) -> dict[str, Any]:
    """Return the row of a run that was not started."""
    return settings(run) | {"ok": 0, "why": why, "seconds": 0.0, "date": date}


def row_of(run: Run, folder: Path, time_limit_s: float, from_outside: str = "") -> dict[str, Any]:
    """Return the row of a run that has ended, from its folder. from_outside: what ended it, if not the run itself."""
    steps, outcomes = read_steps(folder), read_json(folder, "node-*.json")
    why = why_failed(run, folder, time_limit_s, from_outside)
    if not why and len(steps) != run.steps:
        why = f"{len(steps)} of {run.steps} steps are logged"
    device = folder / "device.txt"
    row = settings(run) | {
        "ok": int(not why),
        "why": why,
        "seconds": max((outcome["seconds"] for outcome in outcomes), default=""),
        "date": max((outcome["ended"] for outcome in outcomes), default=""),
        "machine": device.read_text(encoding="utf-8") if device.exists() else "",
    }
    if why:
        return row
    counted = steps[WARM_UP_STEPS:]
    step_s = statistics.median(record["step_s"] for record in counted)
    shares = [record["mfu"] for record in counted if record["mfu"] is not None]
    return row | {
        "step_s": round(step_s, 6),
        "tokens_per_s_per_gpu": round(run.batch * run.seq / step_s / run.layout.ranks, 1),
        "mfu_pct": round(100 * statistics.median(shares), 2) if shares else "",
        "peak_mem_gb": round(max(record["peak_memory"] for record in steps) / 2**30, 3),
        "loss": round(steps[-1]["loss"], 4),
    }
