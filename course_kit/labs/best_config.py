"""Tables, jobs and failed plans of notebook 11: `print(scales_table(names))`, `judge("A", "dp64,zero3")`, `FAILED`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from course_kit.planning.regret import split_regret
from course_lib.best_config import calibration, step_memory
from course_lib.best_config.clusters import CLUSTERS, Cluster
from course_lib.best_config.dry_runs import DryRun, measured_step
from course_lib.best_config.planner import RISK, Estimate, estimate
from course_lib.best_config.runs import MeasuredRun, Predicted, accuracy, loss_of_picks, predict
from course_lib.best_config.software import SOFTWARE
from course_lib.best_config.step_time import layer_times
from course_lib.five_d import build_mesh, parallelize
from course_lib.five_d.layouts import Layout, check_layout
from course_lib.single_gpu.memory import param_count
from course_lib.single_gpu.model import PRESETS, ModelConfig

GIB = 2**30

# The jobs of exercise 11.9 on H100 nodes: preset, GPUs, sequences per step, tokens per sequence.
JOBS = {
    "A": ("llama3-8B", 64, 512, 4096),
    "B": ("llama3-70B", 256, 512, 4096),
    "C": ("llama3-8B", 64, 16, 131072),
}

# The plans of exercise 11.10, which ran out of memory, for 256 sequences of 4,096 tokens: bench model, nodes, layout.
FAILED = {
    "A": ("8B", 16, "dp2,pp16,tp4,zero1,sp,mb8"),
    "B": ("8B", 4, "pp2,tp16,sp,mb32"),
    "C": ("3B", 8, "dp16,pp2,tp2,zero1,sp,mb16"),
}

SMALL = ModelConfig(2, 128, 4, 2, 352, 1024, tied=True)  # for the dry runs that two real ranks confirm

COLUMNS = {  # of the recorded validation: its names, and their headings in the table
    "tokens/s": "tokens/s",
    "peak memory": "memory",
    "ok or out of memory": "fits right",
    "failed favorites": "failed",
    "regret": "regret",
}

REGRET_PARTS = {  # of `RegretSplit`, and their headings in the table
    "other_model": "other model",
    "unexplained": "chance",
    "caution": "caution",
    "scatter": "scatter",
    "avoidable": "avoidable",
}


def rounded(count: float) -> str:
    """Return a count in T, B or M with one decimal; a small count unchanged."""
    unit, size = next(((u, n) for u, n in (("T", 1e12), ("B", 1e9), ("M", 1e6)) if count >= n), ("", 1))
    return f"{count / size:,.1f} {unit}" if unit else f"{count:,}"


def scales(config: ModelConfig, b: int = 1, s: int = 4096) -> dict[str, float]:
    """Return the quantities of the playbook's appendix A2, with the model's own MLP instead of the 4h of its formulas.

    b: sequences per micro-batch; s: tokens per sequence.
    """
    h, f, layers = config.hidden, config.ffn_hidden, config.layers
    kv = config.kv_heads * config.head_dim
    return {
        "tokens b·s": b * s,
        "hidden state b·s·h": b * s * h,
        "matrix h²": h * h,
        "its states, 12 bytes each = 6 h²": 6 * h * h,
        "Q, K, V": h * h + 2 * h * kv,
        "attention output h²": h * h,
        "gate and up 2·h·f": 2 * h * f,
        "down h·f": h * f,
        "a layer": 2 * h * h + 2 * h * kv + 3 * h * f,
        "a layer, if f = 4 h: 16 h²": 16 * h * h,
        "all layers": layers * (2 * h * h + 2 * h * kv + 3 * h * f),
        "embedding and head": config.vocab * h * (1 if config.tied else 2),
        "FLOPs forward, 2·tokens·N": 2 * b * s * param_count(config),
        "FLOPs backward, 4·tokens·N": 4 * b * s * param_count(config),
    }


def scales_table(presets: tuple[str, ...]) -> str:
    """Return the `scales` of some presets as a table with one column per preset."""
    tables = {name: scales(PRESETS[name]) for name in presets}
    lines = [f"{'b = 1, s = 4,096':38s}" + "".join(f"{name:>16s}" for name in tables)]
    lines += [
        f"{line:38s}" + "".join(f"{rounded(table[line]):>16s}" for table in tables.values())
        for line in next(iter(tables.values()))
    ]
    return "\n".join(lines)


def layer_ms(spec: str, config: ModelConfig, cluster: Cluster) -> dict[str, float]:
    """Return the milliseconds of a layer by part, forward and backward, for one sequence of 4,096 tokens."""
    return {name: float(1e3 * part) for name, part in layer_times(config, cluster, Layout.parse(spec), 4096).items()}


def overlap_ratios(
    tokens: float, h: float, layers: int = 4, degree: int = 8, peak: float = 989.5e12, bandwidth: float = 450e9
) -> dict[str, float]:
    """Return time to send over time to compute by technique, in BF16 bytes; tokens: per GPU and micro-batch."""
    return {
        "DP, ZeRO-3": (degree - 1) / degree * peak / (tokens * bandwidth),
        "TP": (degree - 1) * peak / (h * bandwidth),
        "PP": peak / (16 * h * layers * bandwidth),
    }


def measured_slots(runs: list[MeasuredRun], model: str, nodes: int, tp: int, pp: int) -> list[tuple[int, float]]:
    """Return (micro-batch, ms per layer) of the successful runs with these degrees: the measured step over slots and
    layers, in ascending order.
    """
    slots = []
    for run in runs:
        layout = run.layout
        if run.ok and (run.model, run.nodes, layout.tp, layout.pp) == (model, nodes, tp, pp):
            m = run.batch / (layout.dp * layout.micro_batch)
            layer_s = run.step_s / (m + pp - 1) / (run.config.layers / pp)
            slots.append((layout.micro_batch, round(1e3 * layer_s, 1)))
    return sorted(slots)


def speeds_by_tp(runs: list[MeasuredRun], model: str, nodes: int = 16) -> dict[int, list[float]]:
    """Return the tokens/s per GPU of the successful runs without a pipeline on up to so many nodes, by tp above 1."""
    those = [run for run in runs if run.ok and run.model == model and run.layout.pp == 1 and run.nodes <= nodes]
    return {
        tp: [run.batch * 4096 / run.step_s / (8 * run.nodes) for run in those if run.layout.tp == tp]
        for tp in sorted({run.layout.tp for run in those} - {1})
    }


def errors_line(runs: list[MeasuredRun], predicted: Predicted) -> str:
    """Return median errors, the share of right "it fits", and how many runs took over twice their predicted time."""
    errors = ", ".join(f"{name} {value:.2%}" for name, value in accuracy(runs, predicted).items() if name != "runs")
    times = [(run.step_s, step_s) for run, step_s in zip(runs, predicted.step_s, strict=True) if run.ok]
    slow = sum(measured > 2 * step_s for measured, step_s in times)
    return f"{errors}; slow runs: {slow} of the {len(times)} that ran"


def errors_by_nodes(runs: list[MeasuredRun], predicted: Predicted) -> str:
    """Return `errors_line` for the runs on up to 32 nodes, and for those on 64."""
    lines = []
    for name, nodes in (("up to 32 nodes", range(33)), ("64 nodes", (64,))):
        rows = [i for i, run in enumerate(runs) if run.nodes in nodes]
        part = Predicted(predicted.step_s[rows], predicted.peak_bytes[rows], predicted.risk[rows])
        lines.append(f"{name}: {errors_line([runs[i] for i in rows], part)}")
    return "\n".join(lines)


def seen_and_unseen(runs: list[MeasuredRun], cluster: Cluster) -> dict[str, dict[str, float]]:
    """Return the errors on runs that a fit has seen, and of fits that have not seen the run's cell (seconds each)."""
    fitted = predict(runs, calibration.fit(runs, cluster))
    held_out = calibration.cross_validate(runs, cluster)
    return {"fitted to them": accuracy(runs, fitted), "not seen": accuracy(runs, held_out)}


def validation_table(recorded: dict) -> str:
    """Return the validation in benchmarks/results/planner.json as a table: goals, in sample, cross-validated."""
    rows = {f"goal, {size}": goals for size, goals in recorded["goals"].items()}
    for how, label in (("in sample", "fitted to them"), ("cross-validated", "not seen")):
        for size, those in recorded[how].items():
            rows[f"{label}, {size}"] = those["all"]
            rows[f"{label}, {size}, no slow runs"] = those["without the slow mode"]
    wide = max(map(len, rows))
    lines = [" " * wide + "".join(f"{short:>12s}" for short in COLUMNS.values())]
    lines += [f"{name:{wide}s}" + "".join(f"{row[column]:12.1%}" for column in COLUMNS) for name, row in rows.items()]
    return "\n".join(lines)


def recorded_predictions(recorded: dict) -> Predicted:
    """Return the cross-validated predictions in benchmarks/results/planner.json, in the order of load_runs."""
    return Predicted(*(np.array(recorded["predictions"][name]) for name in ("step_s", "peak_bytes", "risk")))


def failed_favorites(runs: list[MeasuredRun], recorded: dict) -> str:
    """Return which cells' favorites failed, by the recorded predictions: with "it fits" as the limit, and with RISK."""
    held_out = recorded_predictions(recorded)
    lines = []
    for risk in (0.5, RISK):
        losses = loss_of_picks(runs, held_out, risk)
        failed = [f"{model} on {nodes}" for (model, nodes), loss in losses.items() if loss == 1]
        head = f"with a risk up to {risk:.0%}, favorites failed in {len(failed)} of {len(losses)}"
        lines.append(f"{head}: {', '.join(failed)}")
    return "\n".join(lines)


def regret_table(runs: list[MeasuredRun], recorded: dict, cluster: Cluster) -> str:
    """Return the regret of the recorded predictions by part, as a table: the means over the cells, and each cell with a
    regret of 1% or more.
    """
    split, names = split_regret(runs, recorded_predictions(recorded), cluster), ("regret", *REGRET_PARTS)
    rows = []
    for size, nodes in (("mean, up to 32 nodes", range(33)), ("mean, 64 nodes", (64,))):
        those = [each for (_, count), each in split.items() if count in nodes]
        rows.append((size, [np.mean([getattr(each, name) for each in those]) for name in names], ""))
    large = {cell: each for cell, each in split.items() if each.regret >= 0.01}
    rows += [
        (f"{model} on {nodes}", [getattr(each, name) for name in names], f"  {each.reason}")
        for (model, nodes), each in large.items()
    ]
    heads = ("regret", *REGRET_PARTS.values())
    wide, widths = max(len(row) for row, *_ in rows), [max(9, len(head) + 2) for head in heads]
    lines = [" " * wide + "".join(f"{head:>{width}s}" for head, width in zip(heads, widths, strict=True))]
    for row, parts, reason in rows:
        cells = "".join(f"{each:{width}.1%}" for each, width in zip(parts, widths, strict=True))
        lines.append(f"{row:{wide}s}{cells}{reason}")
    return "\n".join(lines)


def programs_table(recorded: dict) -> str:
    """Return the programs in benchmarks/results/planner.json as a table: the number of published runs, the median error
    on runs that the fit has seen and on sources that it left out, the program's efficiencies and saved activations.
    """
    heads = ("runs", "seen", "left out", "matmuls", "attention")
    lines = [f"{'':15s}" + "".join(f"{head:>10s}" for head in heads) + "   saved per token and layer"]
    errors = {row["program"]: row for row in recorded["programs"] if row["source"] == "all"}
    for name in ("course", *errors):
        software, row = SOFTWARE[name], errors.get(name, {})
        values = [f"{row['runs']}" if row else ""]
        values += ["" if (error := row.get(which)) is None else f"{error:.1%}" for which in ("in sample", "left out")]
        values += [f"{software.matmul_efficiency:.0%}", f"{software.attention_efficiency:.0%}"]
        saved = f"   {software.kept_hidden:g} h + {software.kept_ffn:g} f" + (
            ", scores" if software.score_bytes else ""
        )
        lines.append(f"{name:15s}" + "".join(f"{value:>10s}" for value in values) + saved)
    return "\n".join(lines)


def spoiled(cluster: Cluster) -> Cluster:
    """Return the cluster with wrong time constants: two thirds of each efficiency, all other constants doubled."""
    known = calibration.constants_of(cluster, "step_s")
    changed = {name: value / 1.5 if name.endswith("efficiency") else value * 2 for name, value in known.items()}
    return calibration.with_constants(cluster, changed)


def errors_by_model(runs: list[MeasuredRun], clusters: dict[str, Cluster]) -> str:
    """Return the median error of tokens/s of each model on up to 32 nodes, as a table with a column per cluster."""
    lines = [f"{'median error of tokens/s, up to 32 nodes:':42s}" + "".join(f"{name:>10s}" for name in clusters)]
    for model in ("1B", "3B", "8B", "80B"):
        those = [run for run in runs if run.model == model and run.nodes <= 32]
        errors = [accuracy(those, predict(those, cluster))["tokens/s"] for cluster in clusters.values()]
        lines.append(f"{model:>42s}" + "".join(f"{error:10.1%}" for error in errors))
    return "\n".join(lines)


def judge(job: str, spec: str) -> None:
    """Print the planner's estimate of a layout for one of JOBS: whether it fits within RISK, tokens/s, and the largest
    parts of memory and of time. Raises ValueError for a layout that the job cannot have.
    """
    preset, gpus, batch, seq = JOBS[job]
    check_layout(PRESETS[preset], Layout.parse(spec), gpus, batch, seq)
    e = estimate(PRESETS[preset], CLUSTERS["H100"], Layout.parse(spec), batch, seq)
    memory = sorted(((float(size) / GIB, name) for name, size in e.memory.items()), reverse=True)[:4]
    seconds = sorted(((float(part), name) for name, part in e.time.items()), reverse=True)[:5]
    fits = f"{'fits' if e.fits else 'DOES NOT FIT'}, risk {e.risk:.0%}"
    fits += f", ABOVE THE {RISK:.0%} LIMIT" if e.fits and e.risk > RISK else ""
    print(f"{job}: {spec}: {fits}, {e.tokens_per_s:,.0f} tokens/s per GPU")
    print("   GiB:", ", ".join(f"{name} {size:.0f}" for size, name in memory))
    print("   seconds:", ", ".join(f"{name} {part:.1f}" for part, name in seconds))


def on_paper(config: ModelConfig, cluster: Cluster, layout: Layout) -> float:
    """Return the GiB of states and of one micro-batch's activations with layers divided evenly: a sum that misses the
    peak of the fullest GPU.
    """
    layers = config.layers / layout.pp
    parameters = sum(step_memory.stage_parameters(config, layout, None, layers, 1 / layout.pp, 1 / layout.pp))
    states = 8 * parameters + 12 * parameters / (layout.dp if layout.zero_stage else 1)
    saved = 2 * layout.micro_batch * 4096 * layers * step_memory.kept_elements(config, cluster, layout)
    return float(states + saved) / GIB


def real_step(spec: str) -> tuple[dict[str, int], dict]:
    """Return bytes at the peak by category, and bytes sent, of this rank's second step of SMALL in a layout."""
    layout = Layout.parse(spec)
    parallel = parallelize(SMALL, layout, build_mesh(layout), dtype=torch.bfloat16)
    tokens = torch.zeros(4 // layout.dp, 64, dtype=torch.int64)
    parallel.step(tokens, tokens)
    return measured_step(parallel, tokens, tokens)[1:]


def dry_and_estimated(dry: DryRun, estimated: Estimate) -> str:
    """Return GiB at the peak by part as a table: of a dry run, and of the estimate of the same layout."""
    states = ("parameters", "gradients", "optimizer states")
    rows: dict[str, tuple[float, Any]] = {name: (dry.peak[name], estimated.memory[name]) for name in states}
    others = sum(estimated.memory[name] for name in ("activations", "logits", "buffers", "gathered weights"))
    rows["activations and the rest"] = dry.peak_bytes - sum(dry.peak[name] for name in states), others
    lines = [f"{'GiB':26s}{'dry run':>10s}{'estimate':>10s}"]
    lines += [
        f"{name:26s}{counted / GIB:10.2f}{float(formula) / GIB:10.2f}" for name, (counted, formula) in rows.items()
    ]
    return "\n".join(lines)
