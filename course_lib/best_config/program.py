"""The planner as a program: a question from the command line, and its answer in lines, or as one JSON object.

python -m course_lib.best_config --preset llama3-8B --gpus 64 --batch 1024 --tokens 15e12
python -m course_lib.best_config --config Qwen3-30B-A3B/config.json --cluster H200 --gpus 32 --json
launch_nb_torchrun.py notebooks/11_best_config.ipynb --nproc-per-node 1 -- --preset llama3-70B --gpus 512
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch.distributed as dist

from course_lib.best_config.answer import SAME, Question, answer
from course_lib.best_config.clusters import CLUSTERS, Cluster
from course_lib.best_config.hardware import load_cluster
from course_lib.best_config.model_files import read_config
from course_lib.best_config.planner import RISK, check_job
from course_lib.expert_parallel.mixture import moe_options
from course_lib.single_gpu.model import PRESETS


def line_of(layout: dict) -> str:
    """A layout's line in the table."""
    days = f"{layout['days']:>9,.1f}" if "days" in layout else ""
    more = f"  (and {layout['ties']:,} as good)" if layout["ties"] else ""
    numbers = "{tokens_per_s_per_gpu:>10,.0f}{tokens_per_s:>14,.0f}{mfu:>8.1%}{peak_gib:>8.1f}{risk:>7.0%}"
    return numbers.format(**layout) + f"{days}  {layout['layout']}{more}"


def parts_of(parts: dict[str, float], unit: str) -> str:
    """A sum and its parts, the largest first; those below a hundredth of it together."""
    total = sum(parts.values())
    large = {name: part for name, part in parts.items() if part >= total / 100}
    rest = total - sum(large.values())
    large |= {"other": rest} if rest > total / 1000 else {}
    listed = ", ".join(f"{name} {part:.3g}" for name, part in sorted(large.items(), key=lambda each: -each[1]))
    return f"{total:.3g} {unit}: {listed}"


def found_lines(said: dict) -> list[str]:
    """The lines about the layouts that fit."""
    first, second = [*said["layouts"], None][:2]
    days, usable = f"{'days':>9}" if "days" in first else "", f"of {first['usable_gib']:.0f}"
    lines = [f"{'tokens/s':>10}{'tokens/s':>14}{'MFU':>8}{'GiB':>8}{'risk':>7}{days}"]
    lines += [f"{'a GPU':>10}{'in all':>14}{'':>8}{usable:>8}", *map(line_of, said["layouts"]), ""]
    lines += [f"step of the first: {parts_of(said['time'], 's')}", f"its memory: {parts_of(said['memory'], 'GiB')}"]
    if second:
        more, longer = second["peak_gib"] - first["peak_gib"], second["step_s"] / first["step_s"] - 1
        least = max(map(abs, said["second"].values()), default=0) / 10
        large = {name: share for name, share in said["second"].items() if abs(share) >= least}
        rest = longer - sum(large.values())
        large |= {"other": rest} if abs(rest) >= SAME else {}
        why = ", ".join(f"{share:+.1%} {name}" for name, share in large.items())
        why = f"takes {longer:.1%} longer: {why}"
        equal = f"is as fast, with {abs(more):.1f} GiB {'more' if more > 0 else 'less'}"
        lines.append(f"the second, {second['layout']}, {why if longer > SAME else equal}")
    for one in said["near"][:3]:
        gain = f"{one['gain']:+.1%} a GPU, {one['tokens_per_s'] / first['tokens_per_s'] - 1:+.1%} in all"
        lines.append(f"better near by: {one['gpus']:,} GPUs, batch {one['batch']:,}: {gain}, {one['layout']}")
    return lines


def as_text(said: dict) -> str:
    """What `answer` returns, as lines."""
    batch, seq = said["batch"], said["seq"]
    tokens = f"{batch:,} sequences of {seq:,} tokens a step, {batch * seq:,} tokens"
    lines = [f"{said['model']} on {said['gpus']:,} x {said['cluster']}; {tokens}", ""]
    if said["layouts"]:
        lines += found_lines(said)
    elif (lean := said["leanest"]) is None:
        lines.append("no layout runs: change the GPUs, the batch, or the length")
    else:
        needs = f"needs {lean['needed_gib']:.1f} GiB of {lean['usable_gib']:.1f}, with a risk of {lean['risk']:.0%}"
        lines.append(f"no layout fits: the leanest, {lean['layout']}, {needs}")
    if said["risky"]:
        lines += ["", f"faster on paper, but more likely than {said['risk']:.0%} to run out of memory:"]
        lines += map(line_of, said["risky"])
    lines += ["", *(f"{count:>10,} rejected: {reason}" for reason, count in said["rejected"].items())]
    start = said.get("launch", {})
    if "command" in start:
        lines += ["", "launch it (the same line on each node), or let Slurm do it:", start["command"], start["slurm"]]
    return "\n".join([*lines, *([start["note"]] if start else [])])


def program_parser() -> argparse.ArgumentParser:
    """The program's options."""
    parser = argparse.ArgumentParser(
        prog="best_config",
        usage="python -m course_lib.best_config [options]; --help lists them",
        description="The best layouts of a model on a cluster, by a model of the step's time and memory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--preset", default="llama3-8B", choices=list(PRESETS))
    model.add_argument("--config", type=Path, help="a model's config.json, as transformers writes it, or its folder")
    add("--experts", type=int, help="experts a layer, in the MLP's place")
    add("--top-k", type=int, help="experts per token; 2 by default")
    add("--expert-hidden", type=int, help="width of an expert; that of the MLP by default")
    add("--shared", type=int, help="experts that every token goes through; none by default")
    known = "; ".join(CLUSTERS)
    add("--cluster", default="H100", help=f"one of {known}; or a TOML file such as data/clusters/example.toml")
    add("--gpus", type=int, default=64)
    add("--batch", type=int, default=256, help="sequences a step, of all GPUs together")
    add("--seq", type=int, default=4096, help="tokens of a sequence")
    add("--risk", type=float, default=RISK, help="of running out of memory, up to which a layout will do")
    add("--tokens", type=float, help="of the whole training, for days")
    add("--top", type=int, default=5, help="layouts to print")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def read_cluster(name: str) -> Cluster:
    """A preset, or the cluster of a TOML file. Raises ValueError where it is neither."""
    if name in CLUSTERS:
        return CLUSTERS[name]
    try:
        return load_cluster(name)
    except OSError as error:
        raise ValueError(f"--cluster {name}: {error.strerror}, and it is none of {'; '.join(CLUSTERS)}") from None


def read_question(chosen: argparse.Namespace) -> Question:
    """What the options ask. Raises ValueError, in one line, where it makes no sense."""
    config, moe = read_config(chosen.config) if chosen.config else (PRESETS[chosen.preset], None)
    moe = moe_options(chosen, moe)
    sizes = chosen.gpus, chosen.batch, chosen.seq, moe
    cluster = read_cluster(chosen.cluster)
    check_job(config, cluster, *sizes)
    if chosen.top < 1 or not 0 < chosen.risk <= 1 or not 0 < (1 if chosen.tokens is None else chosen.tokens) < math.inf:
        raise ValueError("--top is 1 or more, --risk above 0 and at most 1, --tokens a number above 0")
    return Question(str(chosen.config or chosen.preset), config, cluster, *sizes, chosen.risk)


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """The program's options, and its `question`. Touches nothing; an unknown or impossible one ends the program with
    status 2.
    """
    parser = program_parser()
    chosen = parser.parse_args(argv)
    try:
        chosen.question = read_question(chosen)
    except ValueError as error:
        parser.error(str(error))
    return chosen


def main(argv: list[str] | None = None) -> dict:
    """Search as the options say; rank 0 prints the answer, which is returned."""
    chosen = options(argv)
    said = answer(chosen.question, chosen.top, chosen.tokens)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps(said) if chosen.json else as_text(said))
    return said
