"""scripts/fold.py: a reader sees text, exercises and the lines that call what was built; of the rest one line each,
which says what it is. Needs no GPU.
"""

import copy
import re
from pathlib import Path

import nbformat
import pytest

import clean
import edit
import fold
from export import directive, kept_lines, plain_directives, program_of

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PICTURE = nbformat.v4.new_output("display_data", data={"image/png": "iVBOR"})
PRINTED = nbformat.v4.new_output("stream", text="4.2")


def a_cell(cell_id, lines=1, first="x = 1", outputs=(), kind="code", tags=()):
    cell = getattr(nbformat.v4, f"new_{kind}_cell")("\n".join([first] + ["y = 2"] * (lines - 1)), id=cell_id)
    if kind == "code":
        cell.outputs = list(outputs)
    if tags:
        cell.metadata.tags = list(tags)
    return cell


FOLDED = [
    a_cell("setup"),
    a_cell("setup-first"),
    a_cell("check-01-2", 5),
    a_cell("tools-01-2", 5),
    a_cell("helpers", 5, "# Given: what the checks compare with"),
    a_cell("sliders", 5, "# Widget: a picture with sliders"),
    a_cell("watch-01-2", 5),
    a_cell("zero-shards", 1, "#| export zero"),
    a_cell("zero-docstring", 9, '#| export zero\n"""Shards."""', kind="raw"),
    a_cell("a-figure", fold.FIGURE_LINES + 1, outputs=(PRINTED, PICTURE)),
    a_cell("long", fold.LONGEST + 1),
]
OPEN = [
    a_cell("ex-01-2", 90, "#| export zero", [PICTURE]),
    a_cell("ex-01-2b", 90, "#| export zero", [PICTURE]),
    a_cell("text", 90, kind="markdown"),
    a_cell("setup-text", kind="markdown"),
    a_cell("a-figure", fold.FIGURE_LINES, outputs=(PICTURE,)),
    a_cell("measure", fold.FIGURE_LINES + 1, outputs=(PRINTED,)),
    a_cell("call", fold.LONGEST),
    a_cell("ex-01-2-tried"),
    a_cell("lab", fold.LONGEST + 1, outputs=(PICTURE,), tags=("measurement", "show-input")),
]


@pytest.mark.parametrize("cell, folded", [(cell, True) for cell in FOLDED] + [(cell, False) for cell in OPEN])
def test_the_rule(cell, folded):
    assert fold.is_folded(cell) == folded


LONG = fold.FIGURE_LINES + 1
FOLDED_NEW = [
    a_cell("a-figure", LONG, "# Figure: two lanes"),
    a_cell("a-widget", LONG, "# Widget: a slider"),
    a_cell("measured", LONG, "# Measured: both, about 9 s", (PRINTED, PICTURE)),
]
OPEN_NEW = [
    a_cell("setup", LONG),
    a_cell("check-01-2", 1, 'check("01.2")'),
    a_cell("ex-01-2b", 90, "#| export zero.shards:Unit", [PICTURE]),
    a_cell("attend", 90, "#| export zero.shards", [PICTURE]),
    a_cell("text", 90, kind="markdown"),
    a_cell("short", fold.FIGURE_LINES, "# Figure: one line", (PICTURE,)),
    a_cell("long-call", fold.LONGEST + 1, outputs=(PRINTED,)),
    a_cell("lab", LONG, outputs=(PICTURE,), tags=("show-input",)),
]


@pytest.mark.parametrize("cell, folded", [(cell, True) for cell in FOLDED_NEW] + [(cell, False) for cell in OPEN_NEW])
def test_the_rule_of_the_new_shape(cell, folded):
    assert fold.is_folded(cell, new_shape=True) == folded


def test_a_notebook_of_the_new_shape_keeps_its_directives():
    notebook = nbformat.v4.new_notebook(cells=copy.deepcopy(FOLDED_NEW + OPEN_NEW))
    notebook.metadata.course = {"program": "zero.program"}
    sources = [cell.source for cell in notebook.cells]
    folded = fold.fold(copy.deepcopy(notebook))
    assert [cell.source for cell in folded.cells] == sources
    assert [cell.id for cell in folded.cells if fold.TAG in cell.metadata.get("tags", [])] == [
        cell.id for cell in FOLDED_NEW
    ]
    assert fold.fold(copy.deepcopy(folded)) == folded
    back = edit.to_notebook(edit.to_text(folded), folded)
    assert [cell.metadata.get("jupyter") for cell in back.cells] == [
        cell.metadata.get("jupyter") for cell in folded.cells
    ]


def a_notebook() -> nbformat.NotebookNode:
    notebook = nbformat.v4.new_notebook(cells=[copy.deepcopy(cell) for cell in FOLDED + OPEN[:6]])
    for number, cell in enumerate(notebook.cells):
        cell.id = cell.id if number < len(FOLDED) else f"{cell.id}-open" if not cell.id.startswith("ex") else cell.id
    return notebook


def test_folding_leaves_all_other_metadata_and_is_undone():
    notebook = fold.fold(a_notebook())
    nbformat.validate(notebook)
    folded = [cell for cell in notebook.cells if cell.metadata.get("jupyter") == {"source_hidden": True}]
    assert [cell.id for cell in folded] == [cell.id for cell in FOLDED]
    assert all(cell.metadata.tags == [fold.TAG] for cell in folded)
    assert fold.fold(copy.deepcopy(notebook)) == notebook
    cell = notebook.cells[2]
    cell.metadata.update(tags=["measurement"], jupyter={"outputs_hidden": True}, nbgrader={"grade": True})
    before = copy.deepcopy(cell.metadata)
    fold.mark(cell, True)
    assert cell.metadata == before | {
        "tags": ["measurement", fold.TAG],
        "jupyter": {"outputs_hidden": True, "source_hidden": True},
    }
    fold.mark(cell, False)
    assert cell.metadata == before


@pytest.mark.parametrize(
    "source, first",
    [
        ('#| export zero.shards\n"""Where tensors lie.\n\nMore."""', "#| export zero.shards  # Where tensors lie."),
        ("#| export\nimport os\nfrom a import b", "#| export  # imports"),
        ("#| export a.b  # old words\nX = y = 1\nclass C:\n    z = 2\ndef f(): w = 3", "#| export a.b  # C, f, X, y"),
        ("#| export a.__init__\nfrom a.b import c\n_all_ = ['c']", "#| export a.__init__  # public names"),
        ("#| export\n" + "\n".join(f"def function_{i}(): pass" for i in range(20)), None),
        ("#| export", "#| export"),
    ],
)
def test_the_first_line_of_an_exported_cell_says_what_it_holds(source, first):
    cell = nbformat.v4.new_code_cell(source, id="zero")

    def folded() -> str:
        return fold.fold(nbformat.v4.new_notebook(cells=[cell])).cells[0].source

    once = folded()
    shown, _, rest = once.partition("\n")
    assert shown == first or first is None and len(shown) <= fold.WIDTH and shown.endswith("function_7 …")
    assert rest == source.partition("\n")[2] and folded() == once
    assert plain_directives(once) == plain_directives(source)
    assert directive(once, "export") == directive(source, "export")
    cell.metadata.tags = [fold.OPEN]
    assert folded() == plain_directives(source), "an open cell"


def test_folds_survive_cleaning_and_stand_not_in_the_text():
    notebook = fold.fold(a_notebook())
    cleaned = clean.clean(copy.deepcopy(notebook))
    assert [cell.metadata for cell in cleaned.cells] == [cell.metadata for cell in notebook.cells]
    text = edit.to_text(notebook)
    assert fold.TAG not in text and "source_hidden" not in text
    back = edit.to_notebook(text, notebook)
    assert [cell.metadata for cell in back.cells if "nbgrader" not in cell.metadata] == [
        cell.metadata for cell in notebook.cells if not cell.id.startswith(("ex-", "check-"))
    ]


def test_a_file_that_is_no_notebook_is_one_line(tmp_path, capsys):
    good, bad = tmp_path / "a.ipynb", tmp_path / "b.ipynb"
    nbformat.write(a_notebook(), good)
    bad.write_text("{}")
    assert fold.main([str(good)]) == 0 and "source_hidden" in good.read_text()
    assert fold.main([str(bad)]) == 1 and bad.read_text() == "{}"
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_courses_notebooks_are_folded(path):
    """By the rule. What is seen of a folded cell says what it is: a comment, the module that it goes to, a check."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert fold.fold(copy.deepcopy(notebook)) == notebook, f"python scripts/fold.py {path}"
    for cell in notebook.cells:
        first = cell.source.splitlines()[0] if cell.source else ""
        if fold.TAG in cell.metadata.get("tags", []):
            assert first.startswith(("#", "with check(")), f"{cell.id}: {first}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_reader_sees_90_cells_at_most_and_no_code_longer_than_a_screen(path):
    """Of a notebook of the new shape, which folds little, 110."""
    notebook = nbformat.read(path, as_version=4)
    seen = [cell for cell in notebook.cells if fold.TAG not in cell.metadata.get("tags", [])]
    most = 110 if program_of(notebook) else 90
    assert len(seen) <= most, f"{len(seen)} cells: what is beyond {most} goes to a second notebook"
    codes = {cell.id: cell.source for cell in seen if cell.cell_type == "code"}
    if program_of(notebook):  # without the lines that an exercise has beside its code
        codes = {name: "\n".join(text for _, text in kept_lines(source)) for name, source in codes.items()}
    long = [name for name, source in codes.items() if len(source.splitlines()) > fold.LONGEST]
    assert not long, f"more than {fold.LONGEST} lines: {long}"


@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.stem < "07"], ids=lambda path: path.stem)
def test_hints_come_in_four_steps(path):
    """Those of code to write; an exercise about reading or predicting has none, or an answer."""
    texts = [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "markdown"]
    hints = [re.findall(r"<summary>Hint (\d: [\w ]+)</summary>", text) for text in texts if "<summary>Hint 1" in text]
    assert len(hints) > 8
    for found in hints:
        *ahead, shapes, skeleton = found
        assert ahead == ["1: the idea", "2: the calls"] and skeleton == "4: the skeleton", found
        assert shapes in ("3: the shapes", "3: the numbers"), found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_code_is_as_wide_as_the_page(path):
    """Raw cells too, which become modules, and which ruff does not see."""
    wide = [
        (cell.id, line)
        for cell in nbformat.read(path, 4).cells
        if cell.cell_type != "markdown"
        for line in cell.source.splitlines()
        if len(line) > 120
    ]
    assert not wide
