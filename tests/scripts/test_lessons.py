"""A notebook holds the lesson alone: its exercises are functions of the library, and any can be skipped."""

import ast
import builtins
import re

import pytest

from course_kit.checks import frame
from course_kit.exercises.cells import bound, is_exported, read
from course_kit.exercises.saved import exercise_cells, exercise_of
from course_kit.exercises.splice import owned
from export import LIBRARY, NOTEBOOKS, ROOT, program_of, read_notebook
from needed_cells import bound_names, used_names

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
# Exercises whose answer is not exported, and why nothing of the library could call it.
NOT_EXPORTED = {
    "01.3": "a predicted number",
    "01.10": "a predicted number",
    "02.5": "a predicted number",
    "02.12": "arithmetic on paper",
    "03.1": "calls of PyTorch's",
    "03.2": "predicted numbers",
    "03.9": "predicted numbers",
    "03.10": "a lab's bug, fixed",
    "03.11": "a diagnosis",
    "03.12": "a lab's bug, fixed",
    "04.1": "arithmetic on paper",
    "04.3": "a predicted number",
    "04.9": "a diagnosis",
    "04.12": "arithmetic on paper",
    "05.1": "predicted numbers",
    "05.5": "a diagnosis",
    "05.10": "predicted numbers",
    "05.13": "a predicted number",
    "06.10": "a predicted number",
    "06.11": "a diagnosis",
    "07.3": "a diagnosis",
    "07.5": "predicted shapes",
    "07.14": "predicted numbers",
    "08.7": "a diagnosis",
    "08.14": "predicted numbers",
    "09.8": "predicted numbers",
    "09.16": "a diagnosis",
    "10.4": "arithmetic on paper",
    "10.8": "predicted shapes",
    "10.9": "arithmetic on paper",
    "10.13": "a diagnosis",
    "10.21": "a diagnosis",
    "11.9": "layouts by hand",
    "11.10": "a diagnosis",
}
# Exported exercises that nothing else calls.
UNCALLED: dict[str, str] = {}
# Phrases that describe a single measurement: wrong when a notebook is rendered again, and where there is no output yet.
OF_ONE_RUN = re.compile(
    r"\bin (?:this|that|our|both) runs?\b|\brun (?:shown|that you see)\b|\bin ours\b"
    r"|\b(?:in|at|of) our (?:picture|figure)\b|\bon our machine\b|\*here\*"
    r"|\b(?:faster|slower|longer|cheaper|the same) here\b|\bof the (?:speed|time) here\b",
    re.IGNORECASE,
)
CAPTION = re.compile(r"^\*(?:Measured|Counted) in this run\.\*$", re.MULTILINE)  # says no more than that
MOST_CELLS, LONGEST = 110, 40  # lines of a cell that is no exercise
MOST_LINES, MOST_LINES_OF = 700, {"07": 850, "09": 850, "10": 850}  # of code in a notebook, as the file has them
MOST_LINES_IN_ALL = 9_500
WIDEST = 88  # columns of code in a text cell: JupyterLab wraps longer lines
# What draws is course_kit/figures, in one style: a notebook has no plotting code, color or resolution of its own.
PLOTTING = re.compile(r"\b(?:plt|matplotlib|pyplot|seaborn|figsize|rcParams|savefig|dpi)\b|[\"']#[0-9A-Fa-f]{6}\b")


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def cells(path):
    return [cell for cell in read_notebook(path)["cells"] if cell["cell_type"] != "markdown"]


def names_read(source: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}


def names_bound(source: str) -> set[str]:
    return {name for node in ast.parse(source).body for name in bound(node)}


def test_prose_describes_no_single_run(path):
    """A cell prints what it has measured; the text below says what holds in any run."""
    texts = {cell["id"]: cell["source"] for cell in read_notebook(path)["cells"] if cell["cell_type"] == "markdown"}
    found = {name: OF_ONE_RUN.findall(CAPTION.sub("", text)) for name, text in texts.items()}
    assert not {name: phrases for name, phrases in found.items() if phrases}


@pytest.mark.parametrize(
    "sentence, is_of_one_run",
    [
        ("In the run shown, v with one scale diverges.", True),
        ("The ring need not be faster, and in our picture it is not.", True),
        ("In ours layer 0 is uneven.", True),
        ("*Measured in this run, on two ranks.*", True),
        ("*Measured in this run.*", False),
        ("All runs of the 8B model fit on this machine.", False),
    ],
)
def test_phrases_that_describe_a_single_run_are_found(sentence, is_of_one_run):
    assert bool(OF_ONE_RUN.search(CAPTION.sub("", sentence))) == is_of_one_run


def test_what_the_library_holds_stands_in_no_cell(path, cells):
    """No cell of a module's text, no raw cell, no body of a check, no plotting code; nothing is collapsed."""
    assert not [cell["id"] for cell in cells if cell["cell_type"] != "code" or "#| default_exp" in cell["source"]]
    setup = next(cell for cell in cells if cell["id"] == "setup")
    assert cells[0] is setup and setup["source"].startswith("from __future__ import annotations\n")
    assert f'setup("{path.name.partition("_")[0]}")' in setup["source"]
    for cell in cells:
        if name := exercise_of(cell["id"], "check"):
            assert cell["source"] == f'check("{name}")'
        assert not {"hide-input", "hide-cell"} & set(cell["metadata"].get("tags", [])), f"{cell['id']} is collapsed"
        assert "source_hidden" not in cell["metadata"].get("jupyter", {}), f"{cell['id']} is collapsed"
        assert not PLOTTING.findall(cell["source"]), f"{cell['id']} draws: write a function in course_kit/figures"
    assert (LIBRARY / (program_of(read_notebook(path)).replace(".", "/") + ".py")).exists()


def test_a_notebook_is_short(path, cells):
    assert len(read_notebook(path)["cells"]) <= MOST_CELLS
    lines = {}  # an import whose names the formatter puts on a line each counts as one line; empty lines do not count
    for cell in cells:
        if not exercise_of(cell["id"]):
            source = re.sub(r"import \([^)]*\)", "import", cell["source"])
            lines[cell["id"]] = len(re.findall(r"\S.*", source))
    assert not {cell: n for cell, n in lines.items() if n > LONGEST}
    assert lines_of(cells) <= MOST_LINES_OF.get(path.name.partition("_")[0], MOST_LINES)


def lines_of(cells: list[dict]) -> int:
    return sum(len(cell["source"].splitlines()) for cell in cells)


def test_all_notebooks_together_are_short():
    notebooks = [[cell for cell in read_notebook(path)["cells"] if cell["cell_type"] == "code"] for path in PATHS]
    assert sum(map(lines_of, notebooks)) <= MOST_LINES_IN_ALL


def wide_lines(text: str) -> list[str]:
    """The lines of its fenced code that are too long."""
    found, fenced = [], False
    for line in text.splitlines():
        if line.lstrip("> ").startswith("```"):
            fenced = not fenced
        elif fenced and len(line) > WIDEST:
            found.append(line)
    return found


def test_code_in_a_text_cell_does_not_wrap(path):
    wide = {
        cell["id"]: wide_lines(cell["source"])
        for cell in read_notebook(path)["cells"]
        if cell["cell_type"] == "markdown"
    }
    assert not {name: lines for name, lines in wide.items() if lines}


@pytest.mark.parametrize(
    "source, is_plotting",
    [
        ("import matplotlib.pyplot as plt", True),
        ('ax.plot(x, color="#4C72B0")', True),
        ("fig.savefig(png, dpi=72)", True),
        ("figures.ring_step(step=3)", False),
        ("# exercise 04.6: the plot thickens", False),
    ],
)
def test_plotting_code_is_found(source, is_plotting):
    assert bool(PLOTTING.search(source)) == is_plotting


def test_every_figure_is_shown_and_tested():
    """A function of course_kit/figures that returns a figure: some notebook, widget or figure calls it, and a test."""
    drawn = {}
    for file in (ROOT / "course_kit/figures").rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and any(ast.unparse(each) == "styled" for each in node.decorator_list):
                drawn[node.name] = file
    callers = [cell["source"] for path in PATHS for cell in read_notebook(path)["cells"]]
    callers += [file.read_text(encoding="utf-8") for folder in ("widgets", "sweep") for file in
                (ROOT / "course_kit" / folder).rglob("*.py")]  # fmt: skip
    tests = [file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py")]
    for texts, what in ((callers, "shown"), (tests, "tested")):
        text = "\n".join(texts)
        assert not [
            f"{name} of {file.stem} is not {what}"
            for name, file in drawn.items()
            if not re.search(rf"\b{name}\b", text)
        ]


def test_every_exercise_has_one_check_and_its_answer_goes_into_the_library(path, cells):
    exercises, checks = exercise_cells({"cells": cells}), [exercise_of(cell["id"], "check") for cell in cells]
    assert [name for name in checks if name] == list(exercises)
    for name, own in exercises.items():
        assert frame.check_module(name), f"no check of {name}"
        exported = [read(cell["source"], cell["id"]) for cell in own]
        assert all(exported) != (name in NOT_EXPORTED), name
        found = {cell.target: sorted(cell.names) for cell in exported if cell}
        assert found == {target: sorted(names) for target, names in frame.targets_by_exercise().get(name, {}).items()}


def test_what_is_exported_is_called(path, cells):
    """The library, another exercise, a figure or a lab calls every exported function."""
    callers = [
        file.read_text()
        for folder in ("course_lib", "course_kit/labs", "course_kit/figures")
        for file in (ROOT / folder).rglob("*.py")
    ]
    called = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for text in callers
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Attribute, ast.Name))
    }
    for name, own in exercise_cells({"cells": cells}).items():
        others = [cell["source"] for cell in cells if cell not in own]
        here = called.union(
            *(
                {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
                for source in others
            )
        )
        for cell in own:
            exported = read(cell["source"], cell["id"])
            uncalled = [each for each in exported.names if each not in here] if exported else []
            special = {"forward", "backward", "__next__"}  # PyTorch and Python call them
            assert name in UNCALLED or not set(uncalled) - special, f"{name}: nothing calls {uncalled}"


def test_later_cells_call_an_exercise_through_its_package(path, cells):
    """A blank cell binds a function that raises, or nothing: a later cell that names it barely would end there."""
    exercises = {cell["id"]: names_bound(cell["source"]) for cell in cells if exercise_of(cell["id"])}
    found = []
    for number, cell in enumerate(cells):
        if exercise_of(cell["id"], "check") or is_exported(cell["source"]) or exercise_of(cell["id"]):
            continue  # what is exported is run in the library
        own = names_bound(cell["source"])
        for name in names_read(cell["source"]) - own:
            makers = [other for other in cells[:number] if name in names_bound(other["source"])]
            if makers and makers[-1]["id"] in exercises:
                found.append(f"{cell['id']} names {name} of {makers[-1]['id']}")
    assert not found


def test_an_exercise_cell_needs_nothing_of_the_notebook_but_the_setup(path, cells):
    """Bases, decorators and defaults are evaluated when the cell is run: the set-up has to bind their names."""
    setup = cells[0]["source"]
    known = names_bound(setup) | set(dir(__builtins__) if not isinstance(__builtins__, dict) else __builtins__)
    known |= {"NotImplementedError", "staticmethod", "classmethod", "property"}
    for cell in cells:
        if exercise_of(cell["id"]) and is_exported(cell["source"]):
            for node in ast.parse(cell["source"]).body:
                parts = list(getattr(node, "decorator_list", ())) + list(getattr(node, "bases", ()))
                if isinstance(node, ast.FunctionDef):
                    parts += [each for each in (*node.args.defaults, *node.args.kw_defaults) if each is not None]
                missing = set().union(*(names_read(ast.unparse(part)) for part in parts)) - known
                assert not missing, f"{cell['id']}: the set-up does not import {missing}"


def test_names_in_an_exercise_mean_in_the_notebook_what_they_mean_in_the_library(path, cells):
    """A learner tries a function where it is written: no figure may bind, or bind anew, a name that it looks up."""
    makers = {}
    for cell in cells:
        for name in bound_names(cell["source"]):
            makers.setdefault(name, []).append(cell)
    for cell in cells:
        if exercise_of(cell["id"]) and is_exported(cell["source"]):
            looked_up = set().union(*used_names(cell["source"])) - bound_names(cell["source"]) - set(dir(builtins))
            for name in looked_up:
                found = [each["id"] for each in makers.get(name, []) if each is cells[0] or is_exported(each["source"])]
                others = [each["id"] for each in makers.get(name, []) if each["id"] not in found]
                assert found and not others, f"{cell['id']} looks up {name}: bound by {found}, and by {others}"


def test_every_owner_comment_of_the_library_is_true():
    """Each names a cell that exports the definition below it; `make export` writes them."""
    claimed = {}
    for path in PATHS:
        for cell in read_notebook(path)["cells"]:
            if cell["cell_type"] == "code" and is_exported(cell["source"]):
                exported = read(cell["source"], cell["id"])
                owner = exercise_of(cell["id"])
                owner = f"exercise {owner}" if owner else f"notebook {path.name.partition('_')[0]}, cell {cell['id']}"
                claimed |= {(exported.module, exported.cls, name): owner for name in exported.names}
    found = {}
    for file in LIBRARY.rglob("*.py"):
        module = ".".join(file.relative_to(LIBRARY).with_suffix("").parts)
        found |= {(module, each.cls, each.name): each.owner for each in owned(file.read_text())}
    assert found == claimed
