"""scripts/render.py: outputs come in, ids stay, a notebook that fails stays as it was. Starts two kernels, no GPU."""

import base64
import io
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from PIL import Image, ImageChops, ImageStat

import clean
from render import shrunk, texts_to_read

ROOT = Path(__file__).resolve().parents[2]
CELLS = {
    "look": "import os\nprint('one')\nprint('two')",
    "widget": "import ipywidgets\nipywidgets.IntSlider()",
    "drawing": "from matplotlib.figure import Figure\nfrom course_kit.widgets.redrawn import redrawn\n"
    "redrawn(lambda x: Figure((1, 1), dpi=100), x=ipywidgets.IntSlider())",
    "object": "object()",
    "complaint": "import sys\nprint(f'Failed to load {sys.prefix}/lib/site-packages/a.so', file=sys.stderr)",
    "warning": "import sys\nprint('this is slow', file=sys.stderr)",
    "bar": "import course_kit",  # shows one over each cell after it that says that it is long
    "long": "# Measured: nothing, about 30 s\nprint('ready')",
}


def render(folder: Path, **cells: str) -> tuple[Path, subprocess.CompletedProcess]:
    """A notebook with one code cell for each id and source, rendered."""
    path = folder / "a.ipynb"
    made = [nbformat.v4.new_code_cell(source, id=name, metadata={"scrolled": True}) for name, source in cells.items()]
    nbformat.write(nbformat.v4.new_notebook(cells=made, metadata={"course": {"nproc_per_node": 1}}), path)
    command = [sys.executable, str(ROOT / "scripts/render.py"), str(path)]
    return path, subprocess.run(command, capture_output=True, text=True, cwd=folder)


def test_outputs_come_in_and_nothing_is_left_to_clean(tmp_path):
    path, run = render(tmp_path, **CELLS)
    assert run.returncode == 0, run.stderr
    look, widget, drawing, thing, complaint, warning, _, long = cells = nbformat.read(path, as_version=4).cells
    assert [cell.id for cell in cells] == list(CELLS)
    assert complaint.outputs == [] and warning.outputs[0].text == "this is slow\n"
    assert [output.text for output in look.outputs] == ["one\ntwo\n"] and look.execution_count is None
    assert [{*output.data} for output in drawing.outputs] == [{"image/png", "text/plain"}]
    assert drawing.outputs[0].metadata["image/png"] == {"width": 100}
    assert widget.outputs == [] and thing.outputs[0].data["text/plain"] == "<object>"
    assert [output.text for output in long.outputs] == ["ready\n"]
    assert look.metadata == {}

    before = path.read_bytes()
    assert clean.main([str(path)]) == 0 and path.read_bytes() == before


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_no_notebook_names_a_file_of_the_machine_it_ran_on(path):
    assert not re.search(r"site-packages/|/(home/\w+|root)/", path.read_text(encoding="utf-8"))


def encoded(picture: Image.Image) -> str:
    stored = io.BytesIO()
    picture.save(stored, "PNG", compress_level=1)
    return base64.b64encode(stored.getvalue()).decode()


def decoded(png: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(png)))


@pytest.mark.parametrize("alpha, mode", [(255, "P"), (0, "RGBA")])
def test_a_drawing_gets_smaller_and_stays_the_same(alpha, mode):
    """Where something is transparent it stays so; what can't get smaller is left alone."""
    picture = Image.new("RGBA", (90, 60), (255, 255, 255, 255))
    for x in range(90):
        picture.putpixel((x, x * 7 % 60), (x // 3, 3 * (x // 3), 200, alpha))
    after = shrunk(before := encoded(picture))
    assert len(after) < len(before) and decoded(after).mode == mode
    assert decoded(after).convert("RGBA").tobytes() == picture.tobytes()
    assert shrunk(after + "\n") == after


def test_smooth_transitions_get_no_bands():
    picture = Image.new("RGB", (256, 256))
    picture.putdata([(x, y, (x + y) // 2) for y in range(256) for x in range(256)])
    after = decoded(shrunk(encoded(picture))).convert("RGB")
    assert max(ImageStat.Stat(ImageChops.difference(picture, after)).rms) < 6  # of 255; with 64 colors 10


def test_texts_below_outputs_that_have_changed_are_listed():
    def notebook(*outputs: str) -> nbformat.NotebookNode:
        cells = []
        for number, output in enumerate(outputs):
            printed = [nbformat.v4.new_output("stream", text=output)]
            cells.append(nbformat.v4.new_code_cell("x", id=f"cell-{number}", outputs=printed))
            cells.append(nbformat.v4.new_markdown_cell("y", id=f"text-{number}"))
        return nbformat.v4.new_notebook(cells=cells)

    assert texts_to_read(notebook("a", "b", "c"), notebook("a", "B", "c")) == ["text-1"]
    assert texts_to_read(notebook("a"), notebook("a", "b")) == ["text-1"]


def test_a_notebook_that_fails_stays_as_it_was(tmp_path):
    path, run = render(tmp_path, **CELLS, bad="1 / 0")
    assert run.returncode == 1
    place = len(CELLS) + 1
    assert f"render: {path}: cell {place} (bad): ZeroDivisionError: division by zero" in run.stderr.splitlines()
    assert "one" not in path.read_text().replace("'one'", "") and list(tmp_path.glob(".*")) == []
