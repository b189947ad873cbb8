"""Learners' cells of the previous version: solutions whose names have changed since, in previous_cells.txt.

To renew that file at a release: the exercise cells of the last one for which `renamed` changes anything.
"""

import json
import re
import types
from pathlib import Path

import pytest

import make_workbook
from course_kit.checks import frame
from course_kit.exercises import notes
from course_kit.exercises.cells import digest, read
from course_kit.exercises.install import Answer, install, uninstall
from course_kit.exercises.renamed import NAMES, PLACEMENT, PROGRAMS, TARGETS, rename_in_kernel, renamed
from course_kit.exercises.saved import exercise_digest, exercise_of
from course_kit.exercises.splice import splice
from export import program_of
from launcher.answers import Answers
from launcher.program import defines_main, library_text

ROOT = Path(__file__).parents[2]
FIXTURE = Path(__file__).with_name("previous_cells.txt").read_text(encoding="utf-8")
PREVIOUS = dict(re.findall(r"^# %% (\S+)\n(.*?)(?=^# %% |\Z)", FIXTURE, re.MULTILINE | re.DOTALL))
LONG = {"02.6", "04.10", "10.7"}  # their checks take seconds
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TODAY = {
    cell["id"]: "".join(cell["source"])
    for path in PATHS
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
    if cell["cell_type"] == "code" and exercise_of(cell["id"])
}


@pytest.mark.parametrize("cell_id", PREVIOUS)
def test_a_previous_solution_runs_in_todays_library(cell_id):
    exercise, source = exercise_of(cell_id), PREVIOUS[cell_id]
    cell = read(source, cell_id)
    reference = read(TODAY[cell_id], cell_id)
    assert (cell.target, [*cell.definitions]) == (reference.target, [*reference.definitions])
    text = (ROOT / "course_lib").joinpath(*cell.module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
    compile(splice(text, cell, f"exercise {exercise} (yours)", learners=True), cell.module, "exec")
    install(Answer(exercise, ((source, f"{cell_id}.py"),)))
    uninstall(exercise)


@pytest.mark.parametrize("exercise", [each for each in dict.fromkeys(map(exercise_of, PREVIOUS)) if each not in LONG])
def test_it_passes_its_check(exercise, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cells = {name: source for name, source in (TODAY | PREVIOUS).items() if exercise_of(name) == exercise}
    try:
        frame.run(exercise, frame.cells_of(exercise, [(source, name) for name, source in cells.items()]), {})
        noted = json.loads((tmp_path / ".progress" / f"{exercise}.json").read_text())
    finally:
        uninstall(exercise)
    assert capsys.readouterr().out.startswith(f"{exercise} passes")
    # Notes of the previous version hold the digest of the same lines.
    assert noted["digest"] == exercise_digest([read(source, name) for name, source in cells.items()])


@pytest.mark.parametrize("cell_id", TODAY)
def test_todays_cells_stay_as_they_are(cell_id):
    assert renamed(TODAY[cell_id]) == TODAY[cell_id]


def test_the_digest_is_that_of_the_lines_as_written():
    source = PREVIOUS["ex-10-18"]
    assert "boxes_of_span" in source and read(source, "").names == ["span_chunks"]
    assert read(source, "").digest == digest(source)


def test_names_after_a_dot_and_others_are_told_apart():
    source = "#| export zero.by_hand\ndef zero_1_step(layout, own):\n    return layout.own(own), 'own'  # .own\n"
    assert renamed(source) == source.replace("layout.own(", "layout.local_shard(")


def test_a_name_stays_where_the_cell_has_the_new_one_too():
    source = "#| export recompute.modes\ndef keep_matmuls(x):\n    keep_products = 1\n    return keep_products\n"
    assert renamed(source) == source


def test_attributes_of_a_parameter_are_its_placements():
    source = "#| export pipeline.stages\ndef split_stages(model):\n    model.layers[0].weight.stages = (0, 1)\n"
    assert renamed(source).endswith("placement_of(model.layers[0].weight).stages = (0, 1)\n")
    source = "#| export data_parallel.buckets\ndef make_buckets(p):\n    return getattr(p, 'reduce_group', None)\n"
    assert renamed(source).endswith("return placement_of(p).reduce_group\n")


def test_a_cell_that_is_not_python_stays_as_it_is():
    source = "#| export checkpoint.boxes\ndef boxes_of_span(:\n    '''\n"
    assert renamed(source) == source


def test_a_kernel_runs_todays_names():
    shell = types.SimpleNamespace(input_transformers_post=[])
    rename_in_kernel(shell)
    rename_in_kernel(shell)
    (transform,) = shell.input_transformers_post
    lines = ["#| export sequence_parallel.model\n", "class GatheredProducts(ColumnProducts):\n", "    pass\n"]
    assert transform(lines)[1] == "class GatheredMatmul(ColumnMatmul):\n"
    assert transform(["def plan(batch):\n", "    return 'products', batch\n"])[1] == "    return 'matmuls', batch\n"
    assert transform(["%time products = 'products'\n"]) == ["%time products = 'products'\n"]


def test_the_table_leads_to_the_library():
    library = ROOT / "course_lib"
    for target in {*TARGETS.values(), *NAMES, *PLACEMENT}:
        module, _, cls = target.partition(":")
        text = library.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
        assert not cls or f"class {cls}" in text, target


def notebook(source: str) -> dict:
    cell = {"cell_type": "code", "id": "ex-10-18", "metadata": {}, "source": source, "outputs": []}
    return {"cells": [cell], "metadata": {"course": {"program": "m"}}, "nbformat": 4, "nbformat_minor": 5}


BLANK = "    # YOUR CODE HERE\n    raise NotImplementedError()\n"
OLD_BLANK = "#| export checkpoint.boxes\ndef boxes_of_span(shape, first, last):\n" + BLANK
NEW_BLANK = OLD_BLANK.replace("boxes_of_span", "span_chunks").replace("boxes", "chunks")


def test_an_update_of_the_workbook_keeps_a_learners_cell():
    learner = PREVIOUS["ex-10-18"]
    updated, left_out = make_workbook.merge(notebook(OLD_BLANK), notebook(learner), notebook(NEW_BLANK))
    (cell,) = updated["cells"]
    assert cell["source"] == learner.replace("checkpoint.boxes", "checkpoint.chunks") and left_out == ["ex-10-18"]
    assert read(cell["source"], "").names == ["span_chunks"] and read(cell["source"], "").digest == digest(learner)
    updated, left_out = make_workbook.merge(notebook(OLD_BLANK), notebook(OLD_BLANK), notebook(NEW_BLANK))
    assert updated["cells"][0]["source"] == NEW_BLANK and left_out == []


def test_a_launch_takes_a_previous_answer_that_has_passed(tmp_path):
    learner = PREVIOUS["ex-10-18"]
    notes.note(tmp_path, "10.18", True, digest(learner))
    answers = Answers(ROOT / "course_lib", unchecked=False)
    answers.add(notebook(learner), tmp_path / "10b_checkpoint.ipynb", launched=True)
    assert answers.taken == ["10.18"] and not answers.refused
    text = answers.texts()["checkpoint.chunks"]
    assert "# exercise 10.18 (yours)\ndef span_chunks(" in text and "boxes_of_span" not in text


@pytest.mark.parametrize("before, today", PROGRAMS.items())
def test_a_notebook_of_before_starts_todays_program(before, today):
    assert program_of({"metadata": {"course": {"program": before}}}) == today
    assert defines_main(library_text(today)) and not defines_main(library_text(before) or "pass")


def test_todays_programs_are_themselves():
    programs = [json.loads(path.read_text(encoding="utf-8"))["metadata"]["course"]["program"] for path in PATHS]
    assert [program_of({"metadata": {"course": {"program": each}}}) for each in programs] == programs
