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
import sys
from pathlib import Path

from course_lib.best_config.answer import answer
from course_lib.best_config.answer_text import as_text
from course_lib.best_config.clusters import CLUSTERS, Cluster
from course_lib.best_config.hardware import load_cluster
from course_lib.best_config.model_files import read_config
from course_lib.best_config.one_layout import Numbers
from course_lib.best_config.planner import RISK
from course_lib.best_config.question import Question, check_question, with_program
from course_lib.best_config.software import SOFTWARE
from course_lib.expert_parallel.sizes import moe_options
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.config import PRESETS


def program_parser() -> argparse.ArgumentParser:
    """Return the parser of the program's options."""
    parser = argparse.ArgumentParser(
        prog="best_config",
        usage="python -m course_lib.best_config [options]; --help lists them",
        description="Find the best layouts of a model on a cluster, by a model of the step's time and memory.",
        epilog="docs/planner.md explains how to read an answer. "
        "python -m course_lib.best_config calibrate --help: fit the planner's constants to your own runs.",
    )
    add_model_and_job(parser)
    add_program_and_search(parser)
    add = parser.add_argument_group("the output").add_argument
    add("--top", type=int, default=5, help="layouts to print, at most; 5 by default")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def add_model_and_job(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe the model and the job."""
    model, job = parser.add_argument_group("the model"), parser.add_argument_group("the job")
    source = model.add_mutually_exclusive_group(required=True)
    source.add_argument("--preset", choices=list(PRESETS), metavar="NAME", help=f"one of {', '.join(PRESETS)}")
    source.add_argument("--config", type=Path, help="a model's config.json, as transformers writes it, or its folder")
    add = model.add_argument
    add("--experts", type=int, help="experts per layer, in place of the MLP")
    add("--top-k", type=int, help="experts per token; 2 by default")
    add("--expert-hidden", type=int, help="width of an expert; the MLP's width by default")
    add("--shared", type=int, help="experts that every token uses; none by default")
    add, known = job.add_argument, "; ".join(CLUSTERS)
    add("--cluster", default="H100", help=f"one of {known}; or a file like data/clusters/example.toml; H100 by default")
    add("--gpus", type=int, help="as many as --layout has ranks; without it, 64")
    add("--batch", type=int, default=256, help="sequences per step, on all GPUs together; 256 by default")
    add("--seq", type=int, default=4096, help="tokens of a sequence; 4096 by default")
    add("--tokens", type=float, help="tokens of the full training, to print days")


def add_program_and_search(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe the training program, and the limits of the search."""
    add = parser.add_argument_group("the training program").add_argument
    add(
        "--software",
        help=f"the training program, one of {'; '.join(SOFTWARE)}; by default the cluster's, or the course's",
    )
    add("--kernels", action="store_true", help="short for --software 'course, kernels'")
    add("--fused-loss", action="store_true", help="a loss that stores no logits")
    add("--fp8", action="store_true", help="FP8 matmuls in the layers")
    add = parser.add_argument_group("the search").add_argument
    add("--layout", help="one layout to judge, such as dp128,pp16,tp8,sp,zero1")
    add("--max-tp", type=int, help="the largest tp to try")
    add("--max-cp", type=int, help="the largest cp to try; 1 for a run with document masks")
    add("--schedules", help="pipeline schedules to try, such as 1f1b,interleaved; all by default")
    risk = f"the largest risk of running out of memory that a layout may have, 0 to 1; {RISK:g} by default"
    add("--risk", type=float, default=RISK, help=risk)


def read_cluster(name: str) -> Cluster:
    """Return a preset, by its name in any case, or the cluster of a TOML file. Raises ValueError for other names."""
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


def read_question(args: argparse.Namespace) -> Question:
    """Return the question of the options. Raises ValueError, in one line, for options that make no sense."""
    config, moe = (PRESETS[args.preset], None) if args.preset else read_config(args.config)
    moe = moe_options(args, moe)
    cluster = with_program(read_cluster(args.cluster), args.software, args.kernels, args.fused_loss, args.fp8)
    layout = Layout.parse(args.layout) if args.layout is not None else None
    gpus = args.gpus if args.gpus is not None else layout.ranks if layout else 64
    schedules = tuple(args.schedules.replace(" ", "").split(",")) if args.schedules is not None else None
    limits = args.risk, args.max_tp, schedules, layout, args.max_cp
    question = Question(str(args.preset or args.config), config, cluster, gpus, args.batch, args.seq, moe, *limits)
    check_question(question)
    if args.top < 1 or not 0 < (1 if args.tokens is None else args.tokens) < math.inf:
        raise ValueError("--top is 1 or more, --tokens a number above 0")
    return question


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the program's options, with their `question`. Changes nothing; an unknown or impossible option ends the
    program with status 2.
    """
    parser = program_parser()
    args = parser.parse_args(argv)
    try:
        args.question = read_question(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def is_first_rank() -> bool:
    """Return True on rank 0, and without a process group. Imports no torch: without torch there is no group."""
    dist = sys.modules.get("torch.distributed")
    return dist is None or not dist.is_initialized() or dist.get_rank() == 0


def main(argv: list[str] | None = None) -> Numbers:
    """Search as the options say, print the answer on rank 0, and return it."""
    args = options(argv)
    result = answer(args.question, args.top, args.tokens)
    if is_first_rank():
        print(json.dumps(result) if args.json else as_text(result))
    return result
