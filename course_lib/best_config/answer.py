"""An answer that can be launched: a job's best layouts, what they take, why the next one loses, and the command.

    answer(Question("llama3-8B", PRESETS["llama3-8B"], CLUSTERS["H100"], gpus=64, batch=1024))

Layouts whose times and memory are the same within 0.1% are ties: one line, that of the simplest. `answer` returns plain
numbers and words, what --json prints; `program.as_text` puts them into lines.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from course_lib.best_config.clusters import CLUSTERS, GIB, Cluster
from course_lib.best_config.model_files import read_config
from course_lib.best_config.planner import RISK, Ranking, search
from course_lib.checkpoint.files import CheckpointError
from course_lib.checkpoint.hf_files import fp8_block, read_hf_config, weight_files
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.model import PRESETS, ModelConfig

SAME = 1e-3  # a tie: times and bytes that are nearer than that, relative


@dataclass(frozen=True)
class Question:
    """A job whose layout is wanted. name: of PRESETS, or the file that `config` is from; moe: arguments of apply_moe;
    risk: of running out of memory, up to which a layout will do.
    """

    name: str
    config: ModelConfig
    cluster: Cluster
    gpus: int
    batch: int
    seq: int = 4096
    moe: dict | None = None
    risk: float = RISK

    def search(self, **settings) -> Ranking:
        """All layouts of it. Raises ValueError, see `search`."""
        return search(self.config, self.cluster, self.gpus, self.batch, self.seq, self.moe, settings, risk=self.risk)


def simplicity(layout: Layout) -> tuple:
    """Sorts the simplest layout first: the one with the fewest words beside dp and mb, that is techniques switched on;
    of these the smallest pp x cp x tp, the lowest ZeRO stage, the smallest micro-batch.
    """
    words = [word for word in str(layout).split(",") if not word.startswith(("dp", "mb"))]
    return len(words), layout.pp * layout.cp * layout.tp, layout.zero_stage, layout.micro_batch


def ties(found: Ranking, rows: np.ndarray, n: int) -> list[tuple[int, int]]:
    """The first n kinds of layout among these rows, which are sorted by time: the simplest one's row, and how many
    others tie with it.
    """
    step_s, needed, kinds = found.estimate.step_s, found.estimate.needed_bytes, []
    while len(rows) and len(kinds) < n:
        same = np.abs(step_s[rows] / step_s[rows[0]] - 1) <= SAME
        same &= np.abs(needed[rows] / needed[rows[0]] - 1) <= SAME
        kinds.append((int(min(rows[same], key=lambda row: simplicity(found.table[row]))), int(same.sum()) - 1))
        rows = rows[~same]
    return kinds


def described(found: Ranking, row: int, others: int, tokens: float | None) -> dict:
    """A layout of the ranking in numbers; tokens: of the whole training, for days."""
    e, layout = found.estimate, found.table[row]
    speed, step_s = float(e.tokens_per_s[row]), float(e.step_s[row])
    numbers = {"layout": str(layout), "ties": others, "step_s": step_s, "tokens_per_s_per_gpu": speed}
    numbers |= {"tokens_per_s": speed * layout.ranks, "mfu": float(e.mfu[row]), "risk": float(e.risk[row])}
    numbers |= {"peak_gib": float(e.peak_bytes[row]) / GIB, "usable_gib": e.usable_bytes / GIB}
    return numbers | ({"days": tokens / numbers["tokens_per_s"] / 86400} if tokens else {})


def differences(found: Ranking, first: int, other: int) -> dict[str, float]:
    """The parts of a step in which `other` differs from `first`, as shares of the first's step: those of 0.1% and more,
    the one in which it loses most first.
    """
    e = found.estimate
    more = {name: float((part[other] - part[first]) / e.step_s[first]) for name, part in e.time.items()}
    return {name: share for name, share in sorted(more.items(), key=lambda each: -each[1]) if abs(share) >= SAME}


QUICK = {"micro_batch": (1, 2, 4, 8), "schedule": ("1f1b", "zb-h1", "zb-v")}  # of near


def near(question: Question, speed: float) -> list[dict]:
    """Jobs beside this one with 2% more tokens/s a GPU, or more, than `speed`: whole nodes within an eighth, batches
    within 6% that GPUs divide. Each number of GPUs once, with its best batch; the largest gain first. They are sought
    with few settings, so a gain may be larger than it says.
    """
    gpus, batch, found = question.gpus, question.batch, []
    step = question.cluster.gpus_per_node * max(1, gpus // (16 * question.cluster.gpus_per_node))
    for count in {gpus, *range(step * -(-7 * gpus // (8 * step)), 9 * gpus // 8 + 1, step)}:
        sizes = [count * 2**power // 8 for power in range(7) if count * 2**power % 8 == 0]
        tried = {batch, *(size * round(batch / size) for size in sizes)} - {0}
        best = []
        for each in (b for b in tried if abs(b / batch - 1) <= 0.06 and (count, b) != (gpus, batch)):
            ranking = replace(question, gpus=count, batch=each).search(**QUICK)
            best += [(each, described(ranking, *kind, None)) for kind in ties(ranking, ranking.order, 1)]
        for each, layout in sorted(best, key=lambda one: -one[1]["tokens_per_s_per_gpu"])[:1]:
            found.append({"gpus": count, "batch": each, "gain": layout["tokens_per_s_per_gpu"] / speed - 1} | layout)
    return sorted((one for one in found if one["gain"] >= 0.02), key=lambda one: -one["gain"])


LAUNCHER = ["python", "scripts/launch_nb_torchrun.py", "notebooks/10_5d.ipynb"]


def source_of(name: str, moe: dict | None) -> tuple[list[str], str]:
    """Return the options of notebook 10's program that name a model, and a note on its weights. name: a preset, a
    config.json under any file name, or its folder; moe: arguments of apply_moe.

    Raises ValueError, in one line, if the program refuses the model. Without transformers this is not checked, and the
    note says so.
    """
    if name in PRESETS:
        note = "without --dataset and --tokenizer it trains on the course's text, with a vocabulary of 256"
        return ["--preset", name], note
    path, note = Path(name), "without --dataset and --tokenizer it trains on the course's text"
    file = path / "config.json" if path.is_dir() else path
    try:
        read_hf_config(file)
    except ImportError:
        note += "; transformers, which knows whether the program takes this model, is not installed here"
    if file.name != "config.json" or moe and read_config(file)[1] is None:  # a dense model has no weights of experts
        return ["--model", str(file)], f"it starts from random weights; {note}"
    fp8_block(file.parent)
    try:
        weight_files(file.parent)
    except CheckpointError as error:
        return ["--model", str(file)], f"{error}; it starts from random weights; {note}"
    return ["--from-hf", str(file.parent)], f"it starts from the weights beside {file}; {note}"


def launch(question: Question, layout: Layout, tokens: float | None = None) -> dict:
    """The command for notebook 10's program, "command" (the same on each node) and "slurm", and a "note"; without
    commands where that program can't train such a model. tokens: of the whole training; else its own number of steps.
    """
    moe = question.moe or {}
    try:
        sizes, note = source_of(question.name, moe)
    except ValueError as error:
        return {"note": f"no command: notebook 10's program can't train this model ({error})"}
    program = [*sizes, "--layout", layout, "--batch", question.batch, "--seq", question.seq, "--dtype", "bf16"]
    program += ["--experts", moe["experts"], "--top-k", moe["top_k"]] if moe else []
    program += ["--expert-hidden", moe["ffn_hidden"]] if moe.get("ffn_hidden") else []
    program += ["--shared", moe["shared"]] if moe.get("shared") else []
    program += ["--steps", math.ceil(tokens / question.batch / question.seq)] if tokens else []
    presets = ((each.name, each.peak_flops) for each in CLUSTERS.values())  # the program knows their peaks
    if (question.cluster.name, question.cluster.peak_flops) not in presets:
        program += ["--peak-tflops", f"{question.cluster.peak_flops / 1e12:g}"]
    node = question.cluster.gpus_per_node
    each = question.gpus if question.gpus <= node else math.gcd(question.gpus, node)
    nodes, program = question.gpus // each, ["--", *map(str, program)]
    torchrun = ["--nnodes", str(nodes)] if nodes > 1 else []
    torchrun += ["--nproc-per-node", str(each)]
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "first-node:29500", "--rdzv-id", "run1"] if nodes > 1 else []
    return {
        "command": shlex.join([*LAUNCHER, *torchrun, *meet, *program]),
        "slurm": shlex.join([*LAUNCHER, "--slurm", f"nodes={nodes},gpus={each}", *program]),
        "note": note,
    }


def leanest(found: Ranking) -> dict | None:
    """Of all layouts that run, the one that needs the least memory; None where none runs."""
    rows = np.flatnonzero(found.estimate.runs)
    if not len(rows):
        return None
    row = rows[np.argmin(found.estimate.needed_bytes[rows])]
    return described(found, row, 0, None) | {"needed_gib": float(found.estimate.needed_bytes[row]) / GIB}


def answer(question: Question, top: int = 5, tokens: float | None = None) -> dict:
    """The `top` best kinds of layout ("layouts"), of the first its seconds and GiB by part ("time", "memory") and where
    the second loses ("second"), what is faster on paper and too near the end of memory ("risky"), better jobs beside
    this one ("near"), how many layouts each rule rejects ("rejected"), and the command ("launch"). Where nothing fits:
    "leanest". Plain numbers and words. Raises ValueError where `search` does.
    """
    found = question.search()
    e, kinds = found.estimate, ties(found, found.order, top)
    layouts = [described(found, *kind, tokens) for kind in kinds]
    asked = {"model": question.name, "cluster": question.cluster.name, "moe": question.moe, "risk": question.risk}
    said = asked | {"gpus": question.gpus, "batch": question.batch, "seq": question.seq, "layouts": layouts}
    risky = found.risky
    if layouts:
        row = kinds[0][0]
        risky = risky[e.step_s[risky] < e.step_s[row]]
        said["time"] = {name: float(part[row]) for name, part in e.time.items()}
        said["memory"] = {name: float(part[row]) / GIB for name, part in e.memory.items()}
        said["second"] = differences(found, row, kinds[1][0]) if len(kinds) > 1 else {}
        said["near"] = near(question, layouts[0]["tokens_per_s_per_gpu"])
        said["launch"] = launch(question, found.table[row], tokens)
    else:
        said["leanest"] = leanest(found)
    said["risky"] = [described(found, *kind, tokens) for kind in ties(found, risky, 3)]
    return said | {"rejected": dict(sorted(found.rejected.items(), key=lambda each: -each[1]))}
