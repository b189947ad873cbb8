"""The "You have" table of each exercise: it is there, and calls in it fit the signatures of what they name. No GPU."""

import __future__

import ast
import inspect
import re

import pytest

from course_kit.exercises.cells import read
from course_kit.exercises.install import library_module
from course_kit.exercises.saved import exercise_cells
from export import NOTEBOOKS, read_notebook

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
NAME = re.compile(r"### Exercise (\d\d\.\d+)")
ROW = re.compile(r"^\| (`.*?`[^|]*) \| (.+) \|$", re.MULTILINE)
NEEDS_NONE = {  # exercises that ask for a value or a diagnosis, which the text above them is about
    "01.3", "01.10", "02.5", "03.2", "03.9", "03.11", "04.3", "05.1", "05.10", "05.13", "06.10", "06.11", 
    "08.7", "08.8", "08.14", "08.15", "09.8", "10.21",
}  # fmt: skip


def tables(notebook: dict) -> dict[str, list[tuple[str, str]]]:
    """(names, meaning) of each row, by exercise."""
    texts = [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
    parts = [part for text in texts for part in re.split(r"^(?=### Exercise )", text, flags=re.M)[1:]]
    return {NAME.match(part)[1]: rows_of(part) for part in parts}


def rows_of(text: str) -> list[tuple[str, str]]:
    _, has, table = text.partition("**You have**")
    return ROW.findall(table.partition("<details>")[0].replace("\\|", "¦")) if has else []


def faults(code: str, space: dict) -> str | None:
    """What is wrong with a row's code, if it is a call of something that the namespace has; else None."""
    try:
        tree = ast.parse(code.replace("…", "...").replace("¦", "|"), mode="eval").body
    except SyntaxError:
        return None
    if not isinstance(tree, ast.Call) or any(isinstance(each, ast.Starred) for each in tree.args):
        return None
    try:
        function = eval(compile(ast.Expression(tree.func), code, "eval"), dict(space))
        parameters = inspect.signature(function).parameters
    except Exception:  # a method of an object that the exercise is given, or one that says nothing of itself
        return None
    shortened = any(isinstance(each, ast.Constant) and each.value is ... for each in tree.args)
    named = {each.arg: None for each in tree.keywords if each.arg}
    if not shortened:
        try:
            inspect.Signature(list(parameters.values())).bind_partial(*tree.args, **named)
        except TypeError as error:
            return f"{code}: {error}; it has {', '.join(parameters)}"
    own = getattr(inspect.unwrap(function), "__module__", "").startswith("course_lib")
    for given, parameter in () if shortened else zip(tree.args, parameters, strict=False):
        positional = isinstance(given, ast.Name) and parameters[parameter].kind is not inspect.Parameter.VAR_POSITIONAL
        if own and positional and given.id in parameters and given.id != parameter:
            return f"{code}: {given.id} stands where {parameter} is"
    return None


def codes_of(row: str) -> list[str]:
    return re.findall(r"`([^`]+)`", row)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_calls_fit_the_signatures_of_what_they_name(path):
    notebook = read_notebook(path)
    setup = next(cell["source"] for cell in notebook["cells"] if cell["id"] == "setup")
    imports = [node for node in ast.parse(setup).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    space: dict = {}
    flags = __future__.annotations.compiler_flag
    exec(compile(ast.Module(imports, []), "setup", "exec", flags), space)
    found = []
    for name, cells in exercise_cells(notebook).items():
        here = dict(space)
        for exported in filter(None, (read(cell["source"], cell["id"]) for cell in cells)):
            module = library_module(exported.module)
            here |= vars(module)
        found += [
            f"{name}: {fault}"
            for row, _ in tables(notebook).get(name, [])
            for code in codes_of(row)
            if (fault := faults(code, here))
        ]
    assert not found


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_each_exercise_says_what_it_may_use(path):
    without = {name for name, rows in tables(read_notebook(path)).items() if not rows}
    assert not without - NEEDS_NONE
    assert not {name for name in NEEDS_NONE if name in tables(read_notebook(path))} - without, "it has a table by now"


def add(tensor, group=None, *, dim=0):
    """For the test below."""


@pytest.mark.parametrize(
    "code, is_wrong",
    [
        ("add(tensor, group)", False),
        ("add(tensor, group, dim=1)", False),
        ("add(…)", False),
        ("add(group, tensor)", True),
        ("add(tensor, group, 1)", True),
        ("add(tensor, axis=1)", True),
        ("rank.add(1, 2, 3, 4)", False),
        ("tensor[", False),
    ],
)
def test_a_call_that_does_not_fit_is_found(code, is_wrong, monkeypatch):
    monkeypatch.setattr(add, "__module__", "course_lib.made_up")
    assert bool(faults(code, {"add": add})) == is_wrong
