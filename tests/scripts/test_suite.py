"""suite.py: what a word chooses, what a file of tests concerns, what runs at a stretch. Starts nothing."""

import collections
import importlib.util
from types import SimpleNamespace

import pytest
import suite
import yaml


@pytest.mark.parametrize(
    "word, number",
    [("zero", "05"), ("05", "05"), ("5d", "10"), ("context", "07"), ("pipe", "09"), ("scripts", "scripts")],
)
def test_a_word_chooses_the_one_notebook_that_has_it_in_its_name(word, number):
    assert suite.chosen_notebook(word) == number


@pytest.mark.parametrize("word, found", [("parallel", 3), ("zer0", 0), ("", 17)])
def test_another_word_gets_one_line_with_the_names(word, found):
    with pytest.raises(pytest.UsageError) as caught:
        suite.chosen_notebook(word)
    message = str(caught.value)
    assert message.startswith(f"'{word}' names {found} notebooks") and "05_zero" in message and "\n" not in message


def test_each_notebook_has_tests_and_scripts_have_those_that_are_left():
    concerned = {file.stem: suite.notebook_of(file) for file in suite.TESTS.glob("*/test_*.py")}
    assert set(concerned.values()) == {None, *suite.NOTEBOOKS}
    for name, number in {
        "test_zero_ranks": "05", "test_shards": "05", "test_expert_exchange_ranks": "08", "test_fp8_ranks": "14b",
        "test_survival": "10b", "test_planner": "11", "test_ranks": None, "test_export": None, "test_answers": None,
    }.items():  # fmt: skip
        assert concerned[name] == number, name


def test_each_file_of_tests_lies_in_the_folder_of_what_it_tests_and_has_a_name_of_its_own():
    packages = {file.parent.name for file in suite.ROOT.glob("course_lib/*/__init__.py")}
    folders = {str(file.parent.relative_to(suite.TESTS)) for file in suite.TESTS.rglob("test_*.py")}
    assert folders == packages | {"kit", "figures", "scripts", "benchmarks", "examples"}
    names = [
        file.stem
        for place in ("tests/*", "scripts", "benchmarks", "examples")
        for file in suite.ROOT.glob(f"{place}/*.py")
    ]
    importable = [name for name in names if name.isidentifier()]
    assert len(set(importable)) == len(importable)


def test_no_folder_of_tests_passes_for_a_package():
    """tests/kernels would be found in place of benchmarks/kernels.py, or by a library that asks for one of its own."""
    for folder in suite.TESTS.iterdir():
        found = importlib.util.find_spec(folder.stem)
        assert found is None or str(folder) not in (found.submodule_search_locations or []), folder


def test_what_counts_processes_runs_at_a_stretch_and_each_notebook_by_itself():
    units = {
        "tests/zero/test_shards.py::test_x[1]": "tests/zero/test_shards.py",
        "notebooks/05_zero.ipynb::": "notebooks/05_zero.ipynb",
        "tests/scripts/test_answers.py::test_every[04_data_parallel]": "exercises of 04_data_parallel",
        "tests/scripts/test_answers.py::test_harness": "tests/scripts/test_answers.py",
        "tests/scripts/test_launch.py::test_y": "tests of processes",
        "tests/kit/test_ranks.py::test_z": "tests of processes",
    }
    assert {nodeid: suite.unit(nodeid) for nodeid in units} == units
    assert all([*suite.TESTS.glob(f"*/test_{name}.py")] for name in suite.PROCESSES)
    assert sorted(suite.LONGEST_FIRST) == sorted(suite.NOTEBOOKS)


def collected(*nodeids: str, chosen: str | None) -> tuple[list[str], list[str]]:
    """What is run, in order, and what is left out."""
    left_out, items = [], [collections.UserString(nodeid) for nodeid in nodeids]
    for item in items:
        item.nodeid = item.data
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    suite.pytest_collection_modifyitems(SimpleNamespace(chosen=chosen, hook=hook), items)
    return [item.data for item in items], [item.data for item in left_out]


NODES = (
    "tests/zero/test_zero.py::a",
    "tests/scripts/test_answers.py::test_every[05_zero]",
    "tests/scripts/test_answers.py::test_every[10_5d]",
    "tests/scripts/test_answers.py::harness",
    "tests/scripts/test_launch.py::b",
    "notebooks/05_zero.ipynb::",
    "notebooks/10_5d.ipynb::",
)


def test_the_longest_come_first():
    zero, ex_zero, ex_5d, harness, launch, nb_zero, nb_5d = NODES
    order, left_out = collected(*NODES, chosen=None)
    assert order == [launch, ex_5d, nb_5d, ex_zero, nb_zero, harness, zero] and not left_out


def test_of_the_exercises_a_choice_leaves_its_own():
    zero, ex_zero, ex_5d, harness, launch, nb_zero, nb_5d = NODES
    order, left_out = collected(zero, ex_zero, ex_5d, harness, nb_zero, chosen="05")
    assert sorted(order) == sorted([zero, ex_zero, nb_zero]) and sorted(left_out) == sorted([ex_5d, harness])
    order, left_out = collected(ex_zero, harness, launch, chosen="scripts")
    assert order == [launch, harness] and left_out == [ex_zero]


def test_the_workflow_has_a_job_for_each_choice():
    workflow = yaml.safe_load((suite.ROOT / ".github" / "workflows" / "parts.yml").read_text(encoding="utf-8"))
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["part"] == [*suite.NOTEBOOKS, suite.SCRIPTS]
