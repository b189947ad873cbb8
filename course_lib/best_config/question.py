"""A question to the planner: the job that needs a layout, and the limits of the search.

Question("llama3-8B", PRESETS["llama3-8B"], CLUSTERS["H100"], gpus=64, batch=1024, max_tp=8)
Question.from_json(question.as_json())          the same question, with all constants of its cluster and program
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from course_lib.best_config.clusters import Cluster
from course_lib.best_config.job_checks import check_job
from course_lib.best_config.layouts import SCHEDULES
from course_lib.best_config.model_files import read_config
from course_lib.best_config.planner import RISK, Ranking, search
from course_lib.best_config.program_features import MISSING, supports
from course_lib.best_config.software import SOFTWARE, Software
from course_lib.best_config.tables import LayoutTable
from course_lib.best_config.tested import is_tested, untested
from course_lib.context_parallel.methods import check_heads
from course_lib.five_d.layouts import Layout, check_named_settings, check_pairs, check_ranks, check_replicas
from course_lib.single_gpu.config import PRESETS, ModelConfig

TITLES = {"course": "this course's program, unfused", "course, kernels": "this course's program with fused kernels"}


@dataclass(frozen=True)
class Question:
    """A job that needs a layout. name: a preset, or the file of `config`; moe: arguments of apply_moe; risk: the
    largest risk of running out of memory that a recommended layout may have; max_tp, max_cp: the largest tp and cp to
    try; schedules: the pipeline schedules to try (None: all); layout: a layout to compare with the best.
    """

    name: str
    config: ModelConfig
    cluster: Cluster
    gpus: int
    batch: int
    seq: int = 4096
    moe: dict | None = None
    risk: float = RISK
    max_tp: int | None = None
    schedules: tuple[str, ...] | None = None
    layout: Layout | None = None
    max_cp: int | None = None

    def search(self, **settings) -> Ranking:
        """Return the ranking of all layouts that the question allows and its program supports. Raises ValueError as
        `search` does.
        """
        settings |= {"schedule": self.schedules} if self.schedules else {}
        sizes = self.gpus, self.batch, self.seq, self.moe
        limits = self.risk, self.max_tp, self.max_cp
        ranking = search(self.config, self.cluster, *sizes, settings, *limits)
        supported = supports(self.cluster.software.program, ranking.table)
        order, risky = (rows[supported[rows]] for rows in (ranking.order, ranking.risky))
        if missing := len(ranking.order) + len(ranking.risky) - len(order) - len(risky):
            ranking.rejected[MISSING] = missing
        return dataclasses.replace(ranking, order=order, risky=risky)

    def is_tested(self, table: LayoutTable) -> np.ndarray:
        """Return the layouts that measured runs back for this job, as a boolean array [n]; see `tested`."""
        return is_tested(self.config, self.cluster, table, self.seq, self.moe, self.batch)

    def untested(self, layout: Layout) -> list[str]:
        """Return the reasons why no measured run backs a layout for this job; see `tested`."""
        return list(untested(self.config, self.cluster, layout, self.seq, self.moe, self.batch))

    def as_json(self) -> dict[str, Any]:
        """Return the question as values that JSON can hold, with the model's name in place of its sizes."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "config"}
        values |= {"cluster": dataclasses.asdict(self.cluster), "layout": str(self.layout) if self.layout else None}
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Question:
        """Return the question that `as_json` wrote; a model that is no preset is read from its file again."""
        cluster, constants = values["cluster"], values["cluster"]["software"]
        constants = {name: tuple(value) if isinstance(value, list) else value for name, value in constants.items()}
        config = PRESETS.get(values["name"]) or read_config(Path(values["name"]))[0]
        fields = {"cluster": Cluster(**cluster | {"software": Software(**constants)}), "config": config}
        fields["schedules"] = tuple(values["schedules"]) if values["schedules"] else None
        fields["layout"] = Layout.parse(values["layout"]) if values["layout"] else None
        return cls(**values | fields)


def program_title(software: Software) -> str:
    """Return the title of the program whose step is predicted, with the options that are switched on."""
    usual = SOFTWARE.get(software.program, Software())
    title = TITLES.get(software.program, software.program)
    title += ", loss without logits" if software.fused_loss and not usual.fused_loss else ""
    return title + (", FP8 matmuls" if software.matmul_dtype == "fp8" and usual.matmul_dtype != "fp8" else "")


def with_program(
    cluster: Cluster, software: str | None = None, kernels: bool = False, fused_loss: bool = False, fp8: bool = False
) -> Cluster:
    """Return the cluster with the software of a question's options. Raises ValueError, in one line, for options that
    contradict each other or the cluster.
    """
    if kernels and software not in (None, "course, kernels"):
        raise ValueError(f"--kernels is short for --software 'course, kernels', and --software is {software!r}")
    names = {name.casefold(): name for name in SOFTWARE}
    software = "course, kernels" if kernels else software and names.get(software.casefold(), software)
    if software is not None and software not in SOFTWARE:
        raise ValueError(f"--software {software!r}: it is one of {'; '.join(SOFTWARE)}")
    if software is not None and cluster.software not in (Software(), SOFTWARE[software]):
        raise ValueError(f"{cluster.name} has constants of its own program: leave out --software, or use other GPUs")
    if fp8 and cluster.fp8_flops is None:
        raise ValueError(f"--fp8: {cluster.name}: these GPUs have no FP8")
    changes = ({"fused_loss": True} if fused_loss else {}) | ({"matmul_dtype": "fp8"} if fp8 else {})
    if software is not None:
        cluster = dataclasses.replace(cluster, software=SOFTWARE[software])
    return cluster.with_software(**changes)


def check_question(question: Question) -> None:
    """Raise ValueError, in one line, for a question that makes no sense: sizes that `check_job` refuses, unknown
    schedules, a limit below 1, or a layout that is impossible or that the question's own limits exclude.
    """
    check_job(question.config, question.cluster, question.gpus, question.batch, question.seq, question.moe)
    if not 0 < question.risk <= 1:
        raise ValueError(f"risk {question.risk}: it must be a probability above 0")
    for name, most in (("tp", question.max_tp), ("cp", question.max_cp)):
        if most is not None and most < 1:
            raise ValueError(f"--max-{name} {most}: it must be 1 or more")
    for schedule in question.schedules or ():
        if schedule not in SCHEDULES:
            raise ValueError(f"--schedules {schedule}: it is none of {', '.join(SCHEDULES)}")
    if (layout := question.layout) is None:
        return
    for check in (check_named_settings, check_pairs, check_replicas):
        check(layout)
    check_ranks(layout, question.gpus)
    if layout.cp_method == "ulysses":
        heads, kv_heads = (max(1, n // layout.tp) for n in (question.config.heads, question.config.kv_heads))
        check_heads(heads, kv_heads, layout.cp)
    if layout.ep > 1 and question.moe is None:
        raise ValueError(f"--layout {layout}: ep {layout.ep}, and the model has no experts: make ep 1")
    for name, most in (("tp", question.max_tp), ("cp", question.max_cp)):
        if (degree := getattr(layout, name)) > (most or degree):
            raise ValueError(f"--layout {layout}: {name} {degree}, and --max-{name} is {most}")
    if layout.pp > 1 and layout.schedule not in (question.schedules or (layout.schedule,)):
        raise ValueError(f"--layout {layout}: schedule {layout.schedule} is none of --schedules")
