"""Published jobs as questions: their layouts, and the planner's answers for the same jobs and programs.

    answers = [ask(job) for job in published_jobs("data/published_throughput.csv")]

The mixtures' rows are not fitted; `mixture_job` adds the values that the rows lack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from course_kit.planning.published_runs import PublishedRun, cluster_of, load_published, published_rows, published_run
from course_lib.best_config.clusters import GIB, Cluster
from course_lib.best_config.model_files import sizes_of
from course_lib.best_config.planner import Estimate, estimate
from course_lib.best_config.question import Question
from course_lib.best_config.simplicity import first_layout
from course_lib.best_config.software import SOFTWARE
from course_lib.five_d.layouts import Layout

MODELS = ("Llama 3 405B", "Llama 3.1 405B", "Nemotron-4 340B", "GPT-3 175B")  # of the dense jobs
LEAST_GPUS = 512  # of a job
# DeepSeek-V3's config.json on Hugging Face.
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "vocab_size": 129280, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3,
    "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "tie_word_embeddings": False,
}  # fmt: skip
GROK_1 = {"experts": 8, "top_k": 2, "ffn_hidden": 32768}
H800_LINK = 200e9  # bytes/s of NVLink in one direction, of 400 in both


@dataclasses.dataclass(frozen=True)
class Job:
    """A published run, the cluster it was on, and its experts, as arguments of apply_moe."""

    run: PublishedRun
    cluster: Cluster
    moe: dict | None = None

    @property
    def sizes(self) -> tuple[int, int, dict | None]:
        """Sequences per step, tokens per sequence, and experts."""
        return self.run.batch, self.run.seq, self.moe

    def estimate(self) -> Estimate:
        """Return the estimate of the published layout."""
        return estimate(self.run.config, self.cluster, self.run.layout, *self.sizes)


def mixture_job(row: dict[str, str]) -> Job:
    """Return the job of a mixture's row. Raises KeyError for an unknown model."""
    if row["model"].startswith("Grok-1"):
        run = published_run(row)
        run = dataclasses.replace(run, layout=dataclasses.replace(run.layout, ep=int(float(row["ep"]))))
        even = cluster_of(run, dataclasses.replace(SOFTWARE[run.program], expert_spread=0.0))
        return Job(run, even, GROK_1)  # padded to a capacity of 1: all experts have the same number of rows
    if not row["model"].startswith("DeepSeek-V3"):
        raise KeyError(f"{row['model']}: its experts are not known")
    config, moe = sizes_of(DEEPSEEK_V3)
    gpus, pp, ep = (int(float(row[name])) for name in ("n_gpus", "pp", "ep"))
    layout = Layout(dp=gpus // pp, pp=pp, ep=ep, zero_stage=1, schedule="dualpipe")
    assumed = ("micro-batch 1", "without the layer that predicts a second token")
    known = {name: str(getattr(config, name)) for name in ("heads", "kv_heads", "vocab")} | {"dp": str(layout.dp)}
    run = published_run(row | known | {"ffn_hidden": str(config.ffn_hidden)})
    run = dataclasses.replace(run, config=config, layout=layout, assumed=assumed)
    cluster = dataclasses.replace(cluster_of(run, SOFTWARE[run.program]), name="H800", node_link=H800_LINK)
    return Job(run, cluster, moe)


def published_jobs(file: Path | str) -> Iterator[Job]:
    """Yield the large jobs of MODELS (of GPT-3 the job without DeepSpeed), and the mixtures."""
    for run in load_published(file):
        if run.model in MODELS and run.gpus >= LEAST_GPUS and run.program != "DeepSpeed 2021":
            yield Job(run, cluster_of(run, SOFTWARE[run.program]))
    yield from mixture_jobs(file)


def mixture_jobs(file: Path | str) -> Iterator[Job]:
    """Yield the jobs of mixtures. Raises KeyError for a model whose experts are not known."""
    for row in published_rows(file):
        if float(row.get("ep") or 1) > 1:
            yield mixture_job(row)


def figures(e: Estimate, row: int | tuple = ()) -> dict[str, float]:
    """Return seconds per step, MFU, GiB and risk of an estimate of one layout, or of a row."""
    return {
        "step_s": float(e.step_s[row]),
        "mfu": float(e.mfu[row]),
        "gib": float(e.needed_bytes[row]) / GIB,
        "risk": float(e.risk[row]),
    }


def ask(job: Job, **settings: tuple) -> dict:
    """Return a job, the planner's figures of its published layout, and of its first answer for the same job and
    program, with the reasons why no run has tested the answer. settings: values to try of each setting, see `search`.

    "faster": predicted step of the published layout over the first's, minus 1. "first" is None if nothing fits.
    """
    run = job.run
    result: dict[str, Any] = {name: getattr(run, name) for name in ("source", "model", "program", "dtype", "gpus")}
    published: dict[str, Any] = {**figures(job.estimate()), "layout": str(run.layout), "measured_s": run.step_s}
    question = Question(run.model, run.config, job.cluster, run.gpus, *job.sizes)
    ranking = question.search(**settings)
    result |= {"published": published, "first": None, "layouts": len(ranking.order)}
    if len(ranking.order):
        row = first_layout(question, ranking)
        layout = ranking.table[row]
        result["first"] = figures(ranking.estimate, row) | {"layout": str(layout)}
        result["faster"] = published["step_s"] / result["first"]["step_s"] - 1
        result["untested"] = question.untested(layout)
    return result
