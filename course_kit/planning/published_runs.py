"""Published runs with their layouts: the constants of programs are fitted to these runs and tested on them.

    runs = load_published("data/published_throughput.csv")         or data/fsdp_runs_llm_foundry.csv
    predicted_step(runs[0]).step_s              to compare with runs[0].step_s, which was measured

They are runs of other programs, other models and an older GPU, on up to 16,384 GPUs, in BF16 and FP8. Peaks and links
are from the data sheets; a program has its own efficiencies, fitted to its runs (`program_fits`), and its own memory
(`software.SOFTWARE`). Values that a source does not give are assumed, and each run lists its assumptions. A step's time
is the published one, or follows from the published tokens/s or FLOP/s:

    F = 96 B s l h^2 (1 + s / (6 h) + V / (16 l h))    recomputation included: Narayanan et al. 2021, equation 3
    F = 72 B s l h^2 (1 + s / (6 h) + V / (12 l h))    for Megatron-Core: without recomputation
    F = B s (6 N + 6 l h s)                            for Llama 3: causal, of the model alone

GPT's MLP has two matrices of h x f, the course's has three. An MLP of 2/3 the width has the same parameters and FLOPs.
"""

from __future__ import annotations

import csv
import dataclasses
from dataclasses import dataclass
from pathlib import Path

from course_lib.best_config.clusters import CLUSTERS, Cluster
from course_lib.best_config.planner import Estimate, estimate
from course_lib.best_config.software import SOFTWARE, Software
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.memory import param_count
from course_lib.single_gpu.model import ModelConfig

PUBLISHED_COLUMNS = {
    "source", "gpu", "n_gpus", "model", "layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab", "seq_len",
    "global_batch_seqs", "micro_batch", "tp", "sp", "cp", "pp", "pp_interleave", "dp", "zero_stage_or_fsdp",
    "recompute", "dtype", "iter_time_s", "tflops_per_gpu", "tokens_per_s_per_gpu", "status", "tier",
}  # fmt: skip


@dataclass(frozen=True)
class PublishedRun:
    """A published run."""

    source: str
    gpu: str  # a name in CLUSTERS
    gpus: int
    model: str
    config: ModelConfig
    layout: Layout
    program: str  # a name in SOFTWARE
    dtype: str  # of a layer's matmuls: bf16, fp16 or fp8
    batch: int  # sequences per step
    seq: int
    step_s: float
    assumed: tuple[str, ...]  # what its source does not say, and differences from the course's nearest model or layout


def load_published(file: Path | str) -> list[PublishedRun]:
    """Return the runs whose layout is known, or nearly (Llama 3). Raises ValueError for a file with other columns."""
    return [published_run(row) for row in published_rows(file) if reason_left_out(row) is None]


def left_out(file: Path | str) -> dict[str, int]:
    """Return the number of rows that are left out, by reason."""
    reasons = [reason_left_out(row) for row in published_rows(file)]
    return {reason: reasons.count(reason) for reason in dict.fromkeys(reasons) if reason is not None}


def published_rows(file: Path | str) -> list[dict[str, str]]:
    """Return the rows of a file of published runs. Raises ValueError for a file with other columns."""
    with open(file, newline="") as stream:
        rows = list(csv.DictReader(stream))
    if not rows or not PUBLISHED_COLUMNS <= set(rows[0]):
        raise ValueError(f"{file} lacks columns of the published runs")
    return rows


def reason_left_out(row: dict[str, str]) -> str | None:
    """Return the reason why a row is not used; None if it is used. Tier A: every field of the layout was published; B:
    nearly all; C: MegaScale's runs of Megatron-LM and Megatron-Core's runs without a pipeline, whose other fields
    follow from the published ones.
    """
    if row["status"] != "ok":
        return "the run did not end"
    if float(row.get("ep") or 1) > 1:
        return "a mixture of experts: compared, and not fitted (questions.py)"
    if row["tier"] in ("A", "B") or row["model"].endswith("(Megatron-LM)"):
        return None
    if row["source"].startswith("Megatron-Core"):
        return None if row["pp"] == "1.0" else "chunks of a pipeline's stages not published"
    if row["source"].startswith("MegaScale"):
        return "another model: parallel blocks and sliding windows, or no step time"
    return "micro-batch, recomputation or ZeRO stage not published"


def published_run(row: dict[str, str]) -> PublishedRun:
    """Return the run in a row of the file, with the assumptions about it."""
    config, of_model = _config(row)
    layout, of_layout = _layout(row)
    assumed = [*of_model, *of_layout]
    if "HBM2e" in row["gpu"]:
        assumed.append("an H100 SXM, for one with slower memory and less power")
    if row["source"].startswith("torchtitan") and "A100" in row["gpu"]:
        assumed.append("200 Gb/s per GPU")
    if row["source"].startswith("Llama 3"):
        assumed.append("FLOP/s counted as 6N + 6lhs per token")
    return PublishedRun(
        source=_source(row),
        gpu=_gpu(row),
        gpus=_number(row, "n_gpus"),
        model=row["model"],
        config=config,
        layout=layout,
        program=_program(row),
        dtype=row["dtype"],
        batch=_number(row, "global_batch_seqs"),
        seq=_number(row, "seq_len"),
        step_s=_measured_step_s(row, config),
        assumed=tuple(assumed),
    )


PROGRAMS = {  # by how the name of a source begins
    "Megatron-LM SC21": "Megatron-LM",
    "Korthikanti": "Megatron-LM",
    "MegaScale": "Megatron-LM",
    "Megatron-Core": "Megatron-Core",
    "NVIDIA": "NeMo",
    "Llama 3": "Llama 3",
    "torchtitan": "torchtitan",
    "MosaicML": "llm-foundry",
    "DeepSeek-V3": "DeepSeek-V3",
}


def _program(row: dict[str, str]) -> str:
    """Return the program, a name in SOFTWARE; Narayanan et al. ran DeepSpeed too."""
    if "DeepSpeed" in row["zero_stage_or_fsdp"]:
        return "DeepSpeed 2021"
    return next(program for start, program in PROGRAMS.items() if row["source"].startswith(start))


def _gpu(row: dict[str, str]) -> str:
    """Return the GPU's name in CLUSTERS."""
    return ("A100-40GB" if "40GB" in row["gpu"] else "A100") if "A100" in row["gpu"] else "H100"


def _source(row: dict[str, str]) -> str:
    """Return a short name, with FP8 if it applies: for llm-foundry's tables with the section, for NVIDIA's and
    torchtitan's with the model family or the GPU.
    """
    name = row["source"].split(" (")[0].split(" docs/")[0]
    fp8 = ", FP8" * (row["dtype"] == "fp8")
    if name.startswith("MosaicML"):
        section = row["source_detail"].split('section "')[1].split('"')[0].split(" with")[0]
        section = section.replace(" (Large Scale, >= 128 GPUs)", ", large scale")
        return f"llm-foundry, {section}"
    if name.startswith("NVIDIA"):
        family = row["model"].split(" PROXY")[0]
        return f"NVIDIA 24.11, {family}{fp8}"
    if name == "torchtitan":
        return f"torchtitan, {row['model']} on {row['gpu'].split('-')[0]}{fp8}"
    if name == "Megatron-LM SC21":
        program = "DeepSpeed" if "DeepSpeed" in row["zero_stage_or_fsdp"] else "Megatron-LM"
        return f"Narayanan et al. 2021, {program}"
    names = {"MegaScale": "MegaScale, Megatron-LM", "Megatron-Core H100 weak scaling": "Megatron-Core 0.8"}
    return names.get(name, name) + fp8


def _number(row: dict[str, str], name: str, otherwise: int = 0) -> int:
    """Return an integer of a row; `otherwise` if it is blank."""
    return int(float(row[name])) if row[name] else otherwise


def _config(row: dict[str, str]) -> tuple[ModelConfig, list[str]]:
    """Return the model, and the assumptions about it. GPT's embedding and head are one matrix, unless the published
    number of parameters has two (Megatron-Core 0.8); Nemotron's are two.
    """
    width, assumed = _number(row, "ffn_hidden"), []
    if row["model"].startswith(("GPT", "Nemotron", "MPT")):
        width = width or 4 * _number(row, "hidden")
        width = 8 * round(width / 12)  # 2/3, and a multiple of any tp in a node
        assumed.append("an MLP of two matrices as one of three, 2/3 as wide")
    if not row["vocab"]:
        assumed.append("vocabulary 128,256, published as 128K")
    layers, hidden, heads, kv_heads = (_number(row, name) for name in ("layers", "hidden", "heads", "kv_heads"))
    tied = row["model"].startswith(("GPT", "MPT")) and not row["source"].startswith("Megatron-Core")
    vocab = _number(row, "vocab", 128256)
    return ModelConfig(layers, hidden, heads, kv_heads, width, vocab, tied=tied), assumed


def _layout(row: dict[str, str]) -> tuple[Layout, list[str]]:
    """Return the layout, and the assumptions about it.

    Llama 3's paper reports interleaved stages, the first with the embedding alone and the last with the head alone: one
    layer each, so 128 / 16 = 8 per rank; and no recomputation, with 8K tokens.
    """
    tp, pp = _number(row, "tp"), _number(row, "pp")
    virtual, assumed = _number(row, "pp_interleave", 1), []
    if pp > 1 and not row["pp_interleave"]:
        virtual = 8 if row["tier"] == "B" else 1
        assumed.append("8 stages per rank, interleaved" if virtual > 1 else "not interleaved")
    size = 1  # sequences per micro-batch, if not published
    if row["source"].startswith("Megatron-Core"):  # one micro-batch: of several, the last could not hide the gradients
        size = _number(row, "global_batch_seqs") // _number(row, "dp")
    if not row["micro_batch"]:
        assumed.append(f"micro-batch {size}")
    if tp > 1 and not row["sp"]:
        assumed.append("sequence parallel")
    zero, nearest = _zero_stage(row["zero_stage_or_fsdp"])
    recompute, nearest_recompute = _recompute(row)
    layout = Layout(
        dp=_number(row, "dp"),
        pp=pp,
        cp=_number(row, "cp"),
        tp=tp,
        zero_stage=zero,
        sequence_parallel=tp > 1 and row["sp"] != "False",
        micro_batch=_number(row, "micro_batch", size),
        schedule="interleaved" if virtual > 1 and pp > 1 else "1f1b",
        virtual=virtual if virtual > 1 and pp > 1 else Layout().virtual,
        recompute=recompute,
    )
    return layout, [*assumed, *nearest, *nearest_recompute]


def _zero_stage(text: str) -> tuple[int, list[str]]:
    """Return the stage in a text such as "1 (distributed_fused_adam)", "fsdp2 (ZeRO-3)", and the assumptions about it.
    Raises ValueError for other texts.
    """
    if text[:1].isdigit():
        return int(text[0]), []
    if "ZeRO-3" in text:
        return 3, []
    if "ZeRO-2" in text:
        return 2, []
    if not text:
        return 1, ["ZeRO stage 1"]
    if text.startswith("fsdp (optimizer+gradient sharded"):
        return 1, ["ZeRO stage 1, for a stage 2 that sends gradients once per step"]
    raise ValueError(f"zero_stage_or_fsdp {text!r}: not a known text for a ZeRO stage")


def _recompute(row: dict[str, str]) -> tuple[str, list[str]]:
    """Return the recomputation as a value of Layout, and the assumptions about it. "selective": Megatron-LM's, the
    scores.
    """
    text = row["recompute"]
    if row["source"].startswith("MegaScale"):
        return "selective", ["selective recomputation: with full it would reach 70% of the peak"]
    if not text:
        return "none", ["no recomputation"]
    if row["source"].startswith("torchtitan") and text.startswith("selective"):
        nearest = ["every other matmul again, for every other layer"] if "layer" in text else []
        return "selective", nearest
    return text, []


def _measured_step_s(row: dict[str, str], config: ModelConfig) -> float:
    """Return the seconds of a step: published, or from tokens/s, or from FLOP/s by the source's own count of FLOPs."""
    if row["iter_time_s"]:
        return float(row["iter_time_s"])
    gpus, seq = _number(row, "n_gpus"), _number(row, "seq_len")
    tokens = _number(row, "global_batch_seqs") * seq
    if row["tokens_per_s_per_gpu"]:
        return tokens / (float(row["tokens_per_s_per_gpu"]) * gpus)
    layers, h = config.layers, config.hidden
    flops = 96 * layers * h * h * (1 + seq / (6 * h) + config.vocab / (16 * layers * h))  # per token
    if row["source"].startswith("Megatron-Core"):
        flops = 72 * layers * h * h * (1 + seq / (6 * h) + config.vocab / (12 * layers * h))  # no recomputation
    if row["source"].startswith("Llama 3"):
        flops = 6 * param_count(config) + 6 * layers * h * seq
    return tokens * flops / (gpus * float(row["tflops_per_gpu"]) * 1e12)


def predicted_step(run: PublishedRun) -> Estimate:
    """Return the planner's estimate of a run, on a cluster by its GPU's data sheet, with its program's software."""
    cluster = cluster_of(run, SOFTWARE[run.program])
    return estimate(run.config, cluster, run.layout, run.batch, run.seq)


def cluster_of(run: PublishedRun, software: Software) -> Cluster:
    """Return a cluster of the run's GPUs, with this software and the run's dtype."""
    software = dataclasses.replace(software, matmul_dtype="fp8" if run.dtype == "fp8" else "bf16")
    return dataclasses.replace(CLUSTERS[run.gpu], software=software)
