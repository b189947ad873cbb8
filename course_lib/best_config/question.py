"""A question to the planner: a job whose layout is wanted, and what the search may use.

Question("llama3-8B", PRESETS["llama3-8B"], CLUSTERS["H100"], gpus=64, batch=1024, max_tp=8)
Question.from_json(question.as_json())          the same question, with all constants of its cluster and program
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from course_lib.best_config.clusters import Cluster
from course_lib.best_config.layouts import SCHEDULES
from course_lib.best_config.model_files import read_config
from course_lib.best_config.planner import RISK, Ranking, check_job, search
from course_lib.best_config.program_features import MISSING, has
from course_lib.best_config.software import SOFTWARE, Software
from course_lib.context_parallel.attention import check_heads
from course_lib.five_d.layouts import Layout, check_named_settings, check_pairs, check_ranks, check_replicas
from course_lib.single_gpu.model import PRESETS, ModelConfig

TITLES = {"course": "this course's program, unfused", "course, kernels": "this course's program with fused kernels"}


@dataclass(frozen=True)
class Question:
    """A job whose layout is wanted. name: of PRESETS, or the file that `config` is from; moe: arguments of apply_moe;
    risk: the largest risk of running out of memory that a recommended layout may have; max_tp: the largest tp to try;
    schedules: of the pipeline, the ones to try (None: all); layout: one to judge beside the best.
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

    def search(self, **settings) -> Ranking:
        """Return the ranking of all layouts that the question allows and its program has. Raises ValueError, see
        `search`.
        """
        settings |= {"schedule": self.schedules} if self.schedules else {}
        sizes = self.gpus, self.batch, self.seq, self.moe
        found = search(self.config, self.cluster, *sizes, settings, risk=self.risk, max_tp=self.max_tp)
        able = has(self.cluster.software.program, found.table)
        order, risky = (rows[able[rows]] for rows in (found.order, found.risky))
        if missing := len(found.order) + len(found.risky) - len(order) - len(risky):
            found.rejected[MISSING] = missing
        return dataclasses.replace(found, order=order, risky=risky)

    def as_json(self) -> dict:
        """Return the question as JSON can hold it; the model by its name."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "config"}
        found |= {"cluster": dataclasses.asdict(self.cluster), "layout": str(self.layout) if self.layout else None}
        return found

    @classmethod
    def from_json(cls, found: dict) -> Question:
        """Return the question that `as_json` wrote; a model that is no preset is read from its file once more."""
        cluster, software = found["cluster"], found["cluster"]["software"]
        software = Software(**{name: tuple(v) if isinstance(v, list) else v for name, v in software.items()})
        config = PRESETS.get(found["name"]) or read_config(Path(found["name"]))[0]
        changed = {"cluster": Cluster(**cluster | {"software": software}), "config": config}
        changed["schedules"] = tuple(found["schedules"]) if found["schedules"] else None
        changed["layout"] = Layout.parse(found["layout"]) if found["layout"] else None
        return cls(**found | changed)


def program_of(software: Software) -> str:
    """Return the title of the program whose step is predicted, with what is switched on in it."""
    usual = SOFTWARE.get(software.program, Software())
    title = TITLES.get(software.program, software.program)
    title += ", loss without logits" if software.fused_loss and not usual.fused_loss else ""
    return title + (", FP8 matmuls" if software.products == "fp8" and usual.products != "fp8" else "")


def with_program(
    cluster: Cluster, software: str | None = None, kernels: bool = False, fused_loss: bool = False, fp8: bool = False
) -> Cluster:
    """Return the cluster with the software of a question's options. Raises ValueError, in one line, if they contradict
    each other or the cluster.
    """
    if kernels and software not in (None, "course, kernels"):
        raise ValueError(f"--kernels is short for --software 'course, kernels', and --software is {software!r}")
    names = {name.casefold(): name for name in SOFTWARE}
    software = "course, kernels" if kernels else software and names.get(software.casefold(), software)
    if software is not None and software not in SOFTWARE:
        raise ValueError(f"--software {software!r}: it is one of {'; '.join(SOFTWARE)}")
    if software is not None and cluster.software not in (Software(), SOFTWARE[software]):
        raise ValueError(f"{cluster.name} has constants of its own program: leave out --software, or take other GPUs")
    if fp8 and cluster.fp8_flops is None:
        raise ValueError(f"--fp8: {cluster.name}: these GPUs have no FP8")
    changes = ({"fused_loss": True} if fused_loss else {}) | ({"products": "fp8"} if fp8 else {})
    chosen = cluster if software is None else dataclasses.replace(cluster, software=SOFTWARE[software])
    return chosen.with_software(**changes)


def check_question(question: Question) -> None:
    """Raise ValueError, in one line, for a question that makes no sense: sizes that `check_job` refuses, unknown
    schedules, a limit below 1, or a layout that cannot be or that the question's own limits exclude.
    """
    check_job(question.config, question.cluster, question.gpus, question.batch, question.seq, question.moe)
    if not 0 < question.risk <= 1:
        raise ValueError(f"risk {question.risk}: it must be a probability above 0")
    if question.max_tp is not None and question.max_tp < 1:
        raise ValueError(f"--max-tp {question.max_tp}: it must be 1 or more")
    for schedule in question.schedules or ():
        if schedule not in SCHEDULES:
            raise ValueError(f"--schedules {schedule}: it is none of {', '.join(SCHEDULES)}")
    if (layout := question.layout) is None:
        return
    for check in (check_named_settings, check_pairs, check_replicas):
        check(layout)
    check_ranks(layout, question.gpus)
    if layout.cp_method == "ulysses":
        check_heads(*(max(1, n // layout.tp) for n in (question.config.heads, question.config.kv_heads)), layout.cp)
    if layout.ep > 1 and question.moe is None:
        raise ValueError(f"--layout {layout}: ep {layout.ep}, and the model has no experts: make ep 1")
    if layout.tp > (question.max_tp or layout.tp):
        raise ValueError(f"--layout {layout}: tp {layout.tp}, and --max-tp is {question.max_tp}")
    if layout.pp > 1 and layout.schedule not in (question.schedules or (layout.schedule,)):
        raise ValueError(f"--layout {layout}: schedule {layout.schedule} is none of --schedules")
