"""course_kit.planning.questions: published jobs, the planner's estimate of their layouts, and its first answer."""

import csv
import dataclasses
from pathlib import Path

import pytest

from course_kit.planning.questions import ask, mixture_job, published_jobs
from course_lib.best_config.planned_config import count_parameters

FILE = Path(__file__).parents[2] / "data" / "published_throughput.csv"
JOBS = list(published_jobs(FILE))
FIRST = {(job.run.model.split()[0], job.run.dtype): job for job in reversed(JOBS)}
FEW = {"schedule": ("1f1b", "interleaved"), "virtual": (8,), "micro_batch": (1,), "recompute": ("none",)}
FEW |= {"replicate": (1,), "zero_stage": (1,), "sequence_parallel": (True,)}


def test_every_large_job_and_every_mixture_is_asked_about():
    with open(FILE, newline="") as stream:
        mixtures = sum(float(row["ep"] or 1) > 1 for row in csv.DictReader(stream))
    assert sum(job.moe is not None for job in JOBS) == mixtures == 8
    assert {job.run.program for job in JOBS} == {"Llama 3", "NeMo", "Megatron-LM", "DeepSeek-V3"}
    assert sum(job.run.program == "Llama 3" for job in JOBS) == 3
    for name, billions in (("DeepSeek-V3", 671), ("Grok-1", 314)):
        job = next(job for job in JOBS if job.run.model.startswith(name))
        assert count_parameters(job.run.config, job.moe)[0] / 1e9 == pytest.approx(billions, rel=0.01)
        assert job.run.layout.ranks == job.run.gpus


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.run.model}-{job.run.dtype}-{job.run.gpus}")
def test_published_steps_are_predicted_without_a_fit_to_mixtures(job):
    assert float(job.estimate().step_s) == pytest.approx(job.run.step_s, rel=0.2)


def test_padded_experts_have_equal_loads():
    job = FIRST["Grok-1", "bf16"]
    uneven = dataclasses.replace(job, cluster=job.cluster.with_software(expert_spread=0.32))
    assert uneven.estimate().step_s > 1.1 * job.estimate().step_s


def test_the_answer_is_beside_the_published_layout():
    job = FIRST["Grok-1", "bf16"]
    found = ask(job, **FEW)
    assert found["published"]["layout"] == str(job.run.layout) and found["published"]["measured_s"] == job.run.step_s
    assert found["first"]["risk"] <= 0.1 and found["layouts"] > 1 and isinstance(found["untested"], list)
    assert found["faster"] == pytest.approx(found["published"]["step_s"] / found["first"]["step_s"] - 1)
    tiny = dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, memory_bytes=2**33))
    assert ask(tiny, **FEW)["first"] is None


def test_a_mixture_of_unknown_sizes_is_refused():
    with pytest.raises(KeyError, match="its experts are not known"):
        mixture_job({"model": "Mixtral 8x7B", "ep": "8"})
