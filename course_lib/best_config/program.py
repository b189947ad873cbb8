"""The planner as a program: a question from the command line, and its answer in lines, or as one JSON object.

python -m course_lib.best_config --preset llama3-8B --gpus 64 --batch 1024 --tokens 15e12
python -m course_lib.best_config --config Qwen3-30B-A3B/config.json --cluster H200 --gpus 32 --json
python -m course_lib.best_config --preset llama3-405B --batch 2048 --seq 8192 --layout dp128,pp16,tp8,sp,zero1
launch_nb_torchrun.py notebooks/11_best_config.ipynb --nproc-per-node 1 -- --preset llama3-70B --gpus 512
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
from pathlib import Path

import torch.distributed as dist

from course_lib.best_config.answer import answer
from course_lib.best_config.answer_text import as_text
from course_lib.best_config.clusters import CLUSTERS, Cluster
from course_lib.best_config.hardware import load_cluster
from course_lib.best_config.model_files import read_config
from course_lib.best_config.planner import RISK
from course_lib.best_config.question import Question, check_question, with_program
from course_lib.best_config.software import SOFTWARE
from course_lib.expert_parallel.mixture import moe_options
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.model import PRESETS


def program_parser() -> argparse.ArgumentParser:
    """Return the parser of the program's options."""
    parser = argparse.ArgumentParser(
        prog="best_config",
        usage="python -m course_lib.best_config [options]; --help lists them",
        description="The best layouts of a model on a cluster, by a model of the step's time and memory.",
        epilog="docs/planner.md: how to read an answer. "
        "python -m course_lib.best_config calibrate --help: fit the planner's constants to your own runs.",
    )
    model, job, program, limits, output = map(
        parser.add_argument_group, ("the model", "the job", "the training program", "the search", "the output")
    )
    source = model.add_mutually_exclusive_group(required=True)
    source.add_argument("--preset", choices=list(PRESETS), metavar="NAME", help=f"one of {', '.join(PRESETS)}")
    source.add_argument("--config", type=Path, help="a model's config.json, as transformers writes it, or its folder")
    add = model.add_argument
    add("--experts", type=int, help="experts per layer, in the MLP's place")
    add("--top-k", type=int, help="experts per token; 2 by default")
    add("--expert-hidden", type=int, help="width of an expert; that of the MLP by default")
    add("--shared", type=int, help="experts that every token goes through; none by default")
    add, known = job.add_argument, "; ".join(CLUSTERS)
    add("--cluster", default="H100", help=f"one of {known}; or a file like data/clusters/example.toml; H100 by default")
    add("--gpus", type=int, help="as many as --layout has ranks; without it, 64")
    add("--batch", type=int, default=256, help="sequences per step, of all GPUs together; 256 by default")
    add("--seq", type=int, default=4096, help="tokens of a sequence; 4096 by default")
    add("--tokens", type=float, help="of the full training, to print days")
    add = program.add_argument
    add(
        "--software",
        help=f"the training program, one of {'; '.join(SOFTWARE)}; by default the cluster's, or the course's",
    )
    add("--kernels", action="store_true", help="short for --software 'course, kernels'")
    add("--fused-loss", action="store_true", help="a loss that stores no logits")
    add("--fp8", action="store_true", help="FP8 matmuls in the layers")
    add = limits.add_argument
    add("--layout", help="one layout to judge, such as dp128,pp16,tp8,sp,zero1")
    add("--max-tp", type=int, help="the largest tp to try")
    add("--schedules", help="pipeline schedules to try, such as 1f1b,interleaved; all by default")
    risk = f"the largest risk of running out of memory that a layout may have, 0 to 1; {RISK:g} by default"
    add("--risk", type=float, default=RISK, help=risk)
    add = output.add_argument
    add("--top", type=int, default=5, help="layouts to print, at most; 5 by default")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def read_cluster(name: str) -> Cluster:
    """Return a preset, by its name in any case, or the cluster of a TOML file. Raises ValueError if it is neither."""
    names = {known.casefold(): known for known in CLUSTERS}
    if name.casefold() in names:
        return CLUSTERS[names[name.casefold()]]
    try:
        return load_cluster(name)
    except OSError as error:
        like = difflib.get_close_matches(name.casefold(), names, 1)
        meant = f"; do you mean {names[like[0]]}?" if like else ""
        known = "; ".join(CLUSTERS)
        raise ValueError(f"--cluster {name}: {error.strerror}, and it is none of {known}{meant}") from None


def read_question(chosen: argparse.Namespace) -> Question:
    """Return the question that the options ask. Raises ValueError, in one line, if it makes no sense."""
    config, moe = (PRESETS[chosen.preset], None) if chosen.preset else read_config(chosen.config)
    moe = moe_options(chosen, moe)
    cluster = with_program(read_cluster(chosen.cluster), chosen.software, chosen.kernels, chosen.fused_loss, chosen.fp8)
    layout = Layout.parse(chosen.layout) if chosen.layout is not None else None
    gpus = chosen.gpus if chosen.gpus is not None else layout.ranks if layout else 64
    schedules = tuple(chosen.schedules.replace(" ", "").split(",")) if chosen.schedules is not None else None
    limits = chosen.risk, chosen.max_tp, schedules, layout
    question = Question(
        str(chosen.preset or chosen.config), config, cluster, gpus, chosen.batch, chosen.seq, moe, *limits
    )
    check_question(question)
    if chosen.top < 1 or not 0 < (1 if chosen.tokens is None else chosen.tokens) < math.inf:
        raise ValueError("--top is 1 or more, --tokens a number above 0")
    return question


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the program's options, with their `question`. Touches nothing; an unknown or impossible option ends the
    program with status 2.
    """
    parser = program_parser()
    chosen = parser.parse_args(argv)
    try:
        chosen.question = read_question(chosen)
    except ValueError as error:
        parser.error(str(error))
    return chosen


def main(argv: list[str] | None = None) -> dict:
    """Search as the options say, print the answer on rank 0, and return it."""
    chosen = options(argv)
    result = answer(chosen.question, chosen.top, chosen.tokens)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps(result) if chosen.json else as_text(result))
    return result
