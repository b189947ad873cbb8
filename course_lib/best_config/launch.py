"""The command that trains a question's job in a layout, with this course's training program, course_lib.train.

launch(question, Layout.parse("dp8,tp8,sp,zero1"))["command"]
"""

from __future__ import annotations

import math
import shlex
from pathlib import Path

from course_lib.best_config.clusters import CLUSTERS
from course_lib.best_config.model_files import read_config
from course_lib.best_config.question import TITLES, Question, program_title
from course_lib.best_config.software import Software
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.config import PRESETS

LAUNCHER = ["python", "scripts/launch_nb_torchrun.py", "train"]
RENDEZVOUS = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "first-node:29500", "--rdzv-id", "run1"]
RECIPE = "transformer-engine"  # of 8-bit matmuls: a scale per matrix, and weights in float32 for the optimizer


def source_of(name: str, moe: dict | None) -> tuple[list[str], str]:
    """Return the options of the training program that name a model, and a note about its weights. name: a preset, a
    config.json under any file name, or its folder; moe: arguments of apply_moe.

    Raises ValueError, in one line, if the program refuses the model. Without transformers the model is not checked, and
    the note says so.
    """
    if name in PRESETS:
        note = "without --dataset and --tokenizer it trains on the course's text, with a vocabulary of 256"
        return ["--preset", name], note
    from course_lib.checkpoint.files import CheckpointError
    from course_lib.checkpoint.hf_files import fp8_block, read_hf_config, weight_files

    path, note = Path(name), "without --dataset and --tokenizer it trains on the course's text"
    file = path / "config.json" if path.is_dir() else path
    try:
        read_hf_config(file)
    except ImportError:
        note += "; transformers, which knows whether the program takes this model, is not installed here"
    if file.name != "config.json" or moe and read_config(file)[1] is None:  # a dense model has no expert weights
        return ["--hf-config", str(file)], f"it starts from random weights; {note}"
    try:
        fp8_block(file.parent)
        weight_files(file.parent)
    except CheckpointError as error:
        return ["--hf-config", str(file)], f"{error}; it starts from random weights; {note}"
    return ["--from-hf", str(file.parent)], f"it starts from the weights beside {file}; {note}"


def program_options(software: Software, layout: Layout, moe: dict) -> list[str]:
    """Return the options with which the training program computes as an answer for `software` counts. Raises ValueError
    if no options do.
    """
    if software.program not in TITLES:
        raise ValueError(f"the answer is for {program_title(software)}")
    options = ["--dtype", "bf16"]
    options += ["--kernels"] if software.program == "course, kernels" else []
    options += [] if software.fused_loss else ["--no-chunked-loss"]
    options += ["--no-document-masks"] if layout.cp > 1 else []  # ranks would share a document
    if software.matmul_dtype != "fp8":
        return options
    if layout.sequence_parallel or moe:
        other = "experts, which stay in BF16" if moe else "sequence parallelism (sp)"
        raise ValueError(f"the answer has FP8 matmuls, and the program does not combine them with {other}")
    return [*options, "--fp8", RECIPE]


def launch(question: Question, layout: Layout, tokens: float | None = None) -> dict[str, str]:
    """Return the command for the training program, "command" (the same on each node) and "slurm", and a "note"; only
    the note if the answer is for another program, or this one cannot train the model. tokens: of the full training;
    None: the program's default number of steps.
    """
    moe, software = question.moe or {}, question.cluster.software
    try:
        like_answer = program_options(software, layout, moe)
    except ValueError as error:
        return {"note": f"no command: {error}"}
    try:
        sizes, note = source_of(question.name, moe)
    except ValueError as error:
        return {"note": f"no command: the course's Transformer is not this model ({error})"}
    options: list[object] = [*sizes, "--layout", layout, "--batch", question.batch, "--seq", question.seq]
    options += like_answer
    options += ["--experts", moe["experts"], "--top-k", moe["top_k"]] if moe else []
    options += ["--expert-hidden", moe["ffn_hidden"]] if moe.get("ffn_hidden") else []
    options += ["--shared", moe["shared"]] if moe.get("shared") else []
    options += ["--steps", math.ceil(tokens / question.batch / question.seq)] if tokens else []
    presets = ((each.name, each.peak_flops) for each in CLUSTERS.values())  # the program knows their peaks
    if (question.cluster.name, question.cluster.peak_flops) not in presets:
        options += ["--peak-tflops", f"{question.cluster.peak_flops / 1e12:g}"]
    node = question.cluster.gpus_per_node
    ranks = question.gpus if question.gpus <= node else math.gcd(question.gpus, node)  # per node
    nodes, program = question.gpus // ranks, ["--", *map(str, options)]
    torchrun = ["--nnodes", str(nodes)] if nodes > 1 else []
    torchrun += ["--nproc-per-node", str(ranks)]
    torchrun += RENDEZVOUS if nodes > 1 else []
    return {
        "command": shlex.join([*LAUNCHER, *torchrun, *program]),
        "slurm": shlex.join([*LAUNCHER, "--slurm", f"nodes={nodes},gpus={ranks}", *program]),
        "note": note,
    }
