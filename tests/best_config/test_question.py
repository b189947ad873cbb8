"""course_lib.best_config.question: a question can be asked again from its JSON. CPU."""

import dataclasses
import json

import numpy as np
import pytest

from course_lib.best_config.answer import answer
from course_lib.best_config.clusters import CLUSTERS
from course_lib.best_config.program_features import FEATURES, MISSING, supports
from course_lib.best_config.question import Question, check_question, program_title, with_program
from course_lib.best_config.software import NANOTRON, SOFTWARE, Software
from course_lib.best_config.tables import LayoutTable
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.devices import read_table
from course_lib.single_gpu.model import PRESETS

H100 = CLUSTERS["H100"]
EIGHT = Question("llama3.2-1B", PRESETS["llama3.2-1B"], H100, 8, 64)


def test_a_question_is_asked_again_from_its_json(tmp_path):
    """With constants, experts, limits and a layout; and a model that is in a file."""
    cluster = dataclasses.replace(CLUSTERS["H200"], name="ours", network=25e9, software=NANOTRON)
    more = {"moe": {"experts": 8, "top_k": 2}, "risk": 0.2, "max_tp": 4, "max_cp": 2, "schedules": ("1f1b",)}
    more |= {"layout": Layout(dp=8, ep=2), "cluster": cluster.with_software(fused_loss=True)}
    asked = dataclasses.replace(EIGHT, **more)
    said = json.loads(json.dumps(answer(asked, 3)))
    assert Question.from_json(said["question"]) == asked
    assert json.loads(json.dumps(answer(Question.from_json(said["question"]), 3))) == said
    sizes = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"intermediate_size": 1024, "vocab_size": 1000}))
    of_file = dataclasses.replace(EIGHT, name=str(tmp_path))
    again = Question.from_json(json.loads(json.dumps(of_file.as_json())))
    assert again.config.layers == 4 and again.cluster == H100 and again.layout is again.schedules is None


@pytest.mark.parametrize("program", sorted(FEATURES))
def test_an_answer_names_what_the_program_has(program):
    asked = Question("llama3-70B", PRESETS["llama3-70B"], with_program(H100, program), 64, 256)
    found, everything = asked.search(), dataclasses.replace(asked, cluster=asked.cluster.with_software(program="mine"))
    limits, table = FEATURES[program], found.table.where(np.append(found.order, found.risky))
    for name, values in limits.items():
        matters = {"zero_stage": table.dp * table.cp > 1, "schedule": table.pp > 1}.get(name, np.ones(len(table), bool))
        assert set(getattr(table, name)[matters].tolist()) <= set(values), name
    every = everything.search()
    dropped = len(every.order) + len(every.risky) - len(table)
    assert MISSING not in every.rejected and found.rejected[MISSING] == dropped > 0 and program in SOFTWARE


@pytest.mark.parametrize("program", [name for name in FEATURES if name != "DeepSpeed 2021"])
def test_published_runs_of_a_program_are_in_its_features(program):
    rows = [row for row in read_table("tested_layouts.csv") if row["program"] == program]
    assert rows and supports(program, LayoutTable.of(Layout.parse(row["layout"]) for row in rows)).all()


@pytest.mark.parametrize(
    "software, name",
    [
        (Software(), "this course's program, unfused"),
        (Software(fused_loss=True), "this course's program, unfused, loss without logits"),
        (Software(matmul_dtype="fp8"), "this course's program, unfused, FP8 matmuls"),
        (NANOTRON, "nanotron"),
        (dataclasses.replace(SOFTWARE["Megatron-LM"], matmul_dtype="fp8"), "Megatron-LM, FP8 matmuls"),
    ],
)
def test_the_program_has_a_name(software, name):
    assert program_title(software) == name


def test_options_of_the_program_change_the_software_alone():
    assert with_program(H100) == H100 and with_program(H100, "course") == H100
    assert with_program(H100, "nanotron") == dataclasses.replace(H100, software=NANOTRON)
    assert with_program(H100, fused_loss=True, fp8=True) == H100.with_software(fused_loss=True, matmul_dtype="fp8")
    fitted = H100.with_software(matmul_efficiency=0.6)
    assert with_program(fitted, fp8=True).software.matmul_efficiency == 0.6
    with pytest.raises(ValueError, match="leave out --software"):
        with_program(fitted, "nanotron")


def test_a_question_in_python_is_checked_too():
    for wrong, message in (({"batch": 0}, "batch 0"), ({"schedules": ("none",)}, "--schedules none")):
        with pytest.raises(ValueError, match=message):
            check_question(dataclasses.replace(EIGHT, **wrong))
