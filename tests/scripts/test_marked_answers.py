"""A marked version of every exercise's function is the one that its check runs, in this process or on ranks, and the
one that a launched job imports.

So a check cannot pass by what stands in the library, and nothing that was kept before (an alias, a registry, a compiled
kernel) goes on with the reference. Each function is marked by itself, the rest of the answer being the solution.
"""

import ast
import json
import subprocess
import sys
import types

import pytest

from course_kit.checks import CheckFailed, frame
from course_kit.exercises.cells import MARKER, plain, read
from course_kit.exercises.install import Answer, install, installed, uninstall
from course_kit.exercises.saved import exercise_cells
from course_kit.exercises.swap import raw
from export import LIBRARY, NOTEBOOKS, ROOT, read_notebook, write_modules
from launcher.answers import Answers

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))


def solutions(path) -> dict[str, list[tuple[str, str]]]:
    """The exported exercises of a notebook: their cells without markers."""
    found = {}
    for name, cells in exercise_cells(read_notebook(path)).items():
        sources = [plain(cell["source"]) for cell in cells]
        if all(read(source, "") for source in sources):
            texts = ["\n".join(line for line in source.split("\n") if not MARKER.match(line)) for source in sources]
            found[name] = [(text, f"{cell['id']}") for text, cell in zip(texts, cells, strict=True)]
    return found


def functions(source: str) -> list[str]:
    """The functions of a cell, those in its classes too, as "Class.name"."""
    names = []
    for node in ast.parse(source).body:
        inside = [node] if isinstance(node, ast.FunctionDef) else getattr(node, "body", [])
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        names += [prefix + each.name for each in inside if isinstance(each, ast.FunctionDef)]
    return names


def marked(source: str, function: str) -> str:
    """The cell, one of its functions raising its own name and nothing else."""
    tree, directive = ast.parse(source), source.split("\n")[0]
    for node in ast.walk(tree):
        for each in getattr(node, "body", []) if isinstance(node, (ast.Module, ast.ClassDef)) else ():
            prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
            if isinstance(each, ast.FunctionDef) and prefix + each.name == function:
                each.body = ast.parse(f"raise ValueError('marked {function}')").body
    return f"{directive}\n{ast.unparse(tree)}\n"


CASES = [
    pytest.param(name, number, function, id=f"{name}-{function}")
    for path in PATHS
    for name, cells in solutions(path).items()
    for number, (source, _) in enumerate(cells)
    for function in functions(source)
]
BY_NAME = {name: cells for path in PATHS for name, cells in solutions(path).items()}


@pytest.fixture(autouse=True, scope="module")
def ranks_end():
    """The ranks that checks share end with the module."""
    yield
    from course_kit.ranks import calls

    for ranks in calls._shared.values():
        ranks.close()


@pytest.fixture(autouse=True)
def nothing_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not installed(), "a failing answer leaves nothing behind"


@pytest.mark.parametrize("exercise, number, function", CASES)
def test_a_marked_function_is_the_one_that_its_check_runs(exercise, number, function):
    cells = list(BY_NAME[exercise])
    cells[number] = marked(cells[number][0], function), cells[number][1]
    with pytest.raises(CheckFailed) as failed:
        frame.run(exercise, cells, {})
    assert f"marked {function}" in str(failed.value)


@pytest.mark.parametrize("exercise", list(BY_NAME))
def test_an_installed_answer_reaches_what_was_kept_and_leaves_no_trace(exercise):
    """Functions and classes stay the objects that they are; of functions and methods the code is the cell's."""
    kept = {}
    for target, names in frame.targets_by_exercise()[exercise].items():
        module, _, cls = target.partition(":")
        owner = frame.library_module(module)
        owner = getattr(owner, cls) if cls else owner
        kept |= {(target, name): (owner, name, vars(owner)[name]) for name in names}
    codes = {key: code_of(value) for key, (_, _, value) in kept.items()}
    install(Answer(exercise, tuple(BY_NAME[exercise])))
    for owner, name, before in kept.values():
        now = vars(owner)[name]
        if isinstance(before, (types.FunctionType, type)) and isinstance(owner, types.ModuleType):
            assert now is before
        assert set(files_of(now)) <= {file for _, file in BY_NAME[exercise]}, name
    uninstall(exercise)
    assert codes == {key: code_of(vars(owner)[name]) for key, (owner, name, _) in kept.items()}


def functions_of(value) -> list[types.FunctionType]:
    """The plain functions in a function, a method, a class or a kernel."""
    if isinstance(value, type):
        own = [each for each in vars(value).values() if not isinstance(each, type)]  # autograd's: they refer back
        return [function for each in own for function in functions_of(each)]
    value = getattr(value, "__func__", value)
    while not isinstance(value, types.FunctionType) and hasattr(value, "fn"):  # a kernel, perhaps tuned
        value = value.fn
    function = raw(value)
    return [function] if function else []


def code_of(value) -> list:
    return [function.__code__ for function in functions_of(value)]


def files_of(value) -> list[str]:
    return [function.__code__.co_filename for function in functions_of(value)]


IN_A_JOB = """
import json, sys, types
from pathlib import Path

sys.path.insert(0, "scripts")
from rank_entry import open_library

open_library(Path(sys.argv[1]), [])
import importlib

from course_kit.exercises.swap import raw


def constants(value):
    inner = [vars(value)[name] for name in vars(value)] if isinstance(value, type) else [value]
    functions = [raw(unwrapped(each)) for each in inner]
    return [constant for each in functions if each for constant in each.__code__.co_consts]


def unwrapped(value):
    value = getattr(value, "__func__", value)
    while not isinstance(value, types.FunctionType) and hasattr(value, "fn"):  # a kernel, perhaps tuned
        value = value.fn
    return value


for module, cls, name, mark in json.load(sys.stdin):
    owner = importlib.import_module(f"course_lib.{module}")
    value = vars(getattr(owner, cls) if cls else owner)[name]
    assert mark in constants(value), (module, cls, name, mark)
print("all marked")
"""


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_launched_job_imports_the_marked_functions(path, tmp_path):
    """All of a notebook's exercises, marked, spliced as the launcher does it, and imported as its ranks do."""
    notebook, marks = read_notebook(path), []
    for cells in exercise_cells(notebook).values():
        for cell in cells:
            if exported := read(plain(cell["source"]), cell["id"]):
                source = "\n".join(line for line in plain(cell["source"]).split("\n") if not MARKER.match(line))
                for function in functions(source):
                    source = marked(source, function)
                    marks.append((exported.module, exported.cls, function.split(".")[0], f"marked {function}"))
                cell["source"] = source
    answers = Answers(LIBRARY, unchecked=True)
    answers.add(notebook, path, launched=True)
    write_modules(answers.texts(), tmp_path)
    command = [sys.executable, "-c", IN_A_JOB, str(tmp_path)]
    done = subprocess.run(command, input=json.dumps(marks), cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "all marked\n", done.stderr
    assert not answers.refused and len(answers.taken) == len(solutions(path))
