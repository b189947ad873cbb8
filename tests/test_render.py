"""scripts/render.py: outputs come in, ids stay, a notebook that fails stays as it was. Starts two kernels, no GPU."""

import subprocess
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
CELLS = {
    "look": "import os\nprint('one')\nprint('two')",
    "widget": "import ipywidgets\nipywidgets.IntSlider()",
    "object": "object()",
}


def render(folder: Path, **cells: str) -> tuple[Path, subprocess.CompletedProcess]:
    """A notebook with one code cell for each id and source, rendered."""
    path = folder / "a.ipynb"
    made = [nbformat.v4.new_code_cell(source, id=name, metadata={"scrolled": True}) for name, source in cells.items()]
    nbformat.write(nbformat.v4.new_notebook(cells=made, metadata={"course": {"nproc_per_node": 1}}), path)
    command = [sys.executable, str(ROOT / "scripts/render.py"), str(path)]
    return path, subprocess.run(command, capture_output=True, text=True, cwd=folder)


def test_outputs_come_in_and_nbdev_clean_has_nothing_left_to_do(tmp_path):
    path, run = render(tmp_path, **CELLS)
    assert run.returncode == 0, run.stderr
    look, widget, thing = nbformat.read(path, as_version=4).cells
    assert [look.id, widget.id, thing.id] == list(CELLS)
    assert [output.text for output in look.outputs] == ["one\ntwo\n"] and look.execution_count is None
    assert widget.outputs == [] and thing.outputs[0].data["text/plain"] == "<object>"
    assert look.metadata == {}

    before = path.read_bytes()
    subprocess.run([Path(sys.executable).parent / "nbdev-clean", "--fname", path], check=True, cwd=ROOT)
    assert path.read_bytes() == before


def test_a_notebook_that_fails_stays_as_it_was(tmp_path):
    path, run = render(tmp_path, **CELLS, bad="1 / 0")
    assert run.returncode == 1
    assert f"render: {path}: cell 4 (bad): ZeroDivisionError: division by zero" in run.stderr.splitlines()
    assert "one" not in path.read_text().replace("'one'", "") and list(tmp_path.glob(".*")) == []
