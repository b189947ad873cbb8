"""Run notebooks and save their outputs in them, so that they read like a book: make render, or make render NB=01.

    python scripts/render.py notebooks/01_single_gpu.ipynb ...

A notebook is replaced atomically after its last cell has run; if it fails, it does not change. It is cleaned
(clean.py). Of a widget, its picture is saved: its view is an error message without a kernel. Not saved: warnings that
name files of this machine, and the remains of a long cell's progress bar. Pictures have twice the screen's pixels, and
64 colors to make up for it. Text cells below an output that has changed are listed: read them again.
"""

import base64
import io
import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, DeadKernelError
from PIL import Image, ImageChops, ImageStat

from clean import clean
from course_kit.local_kernel import LocalKernelManager
from export import ROOT, ExportError, read_notebook, write_atomically

WIDGET = "application/vnd.jupyter.widget-view+json"
CELL_TIMEOUT_S = 600
MOST_ERROR = 4  # of 255, root mean square per channel


def shrunk(png: str) -> str:
    """Compress a picture: few colors, and no alpha channel if nothing is transparent. Base64 in and out.

    A picture with smooth transitions, which 64 colors would turn into bands, keeps 256.
    """
    picture = Image.open(io.BytesIO(base64.b64decode(png)))
    if picture.mode == "RGBA" and picture.getextrema()[3] == (255, 255):
        picture = picture.convert("RGB")
    if picture.mode == "RGB":
        few = picture.quantize(64, dither=Image.Dither.NONE)
        error = ImageStat.Stat(ImageChops.difference(picture, few.convert("RGB"))).rms
        picture = few if max(error) < MOST_ERROR else picture.quantize(256, dither=Image.Dither.NONE)
    smaller = io.BytesIO()
    picture.save(smaller, "PNG", optimize=True)
    return min(base64.b64encode(smaller.getvalue()).decode(), "".join(png.split()), key=len)


def texts_to_read(before: nbformat.NotebookNode, after: nbformat.NotebookNode) -> list[str]:
    """Return the ids of the text cells that stand directly below a cell whose outputs have changed."""
    outputs = {cell.id: cell.outputs for cell in before.cells if cell.cell_type == "code"}
    pairs = zip(after.cells, after.cells[1:], strict=False)
    return [
        below.id
        for cell, below in pairs
        if cell.cell_type == "code" and below.cell_type == "markdown" and cell.outputs != outputs.get(cell.id, [])
    ]


def is_stored(output: dict) -> bool:
    """Return whether an output is saved: no widget view, no warning that names a file of this machine, not empty."""
    complains = output.get("name") == "stderr" and re.search(rf"{re.escape(str(ROOT))}|site-packages", output["text"])
    return WIDGET not in output.get("data", {}) and output.get("data") != {} and not complains


def render(path: Path) -> list[str]:
    """Run the notebook at `path`, replace it by the result, and return the ids of text cells below changed outputs.

    Raises ExportError, naming the cell, if one fails.
    """
    read_notebook(path)
    notebook, before = (nbformat.read(path, as_version=4) for _ in range(2))
    running = [0]
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        kernel_manager_class=LocalKernelManager,
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
        on_cell_start=lambda cell, cell_index: running.append(cell_index),
    )
    try:
        client.execute()
    except (CellControlSignal, DeadKernelError, TimeoutError) as error:
        index = running[-1]
        what = f"{error.ename}: {error.evalue}" if hasattr(error, "ename") else str(error)
        raise ExportError(f"{path}: cell {index + 1} ({notebook.cells[index].id}): {what.splitlines()[0]}") from None
    for cell in notebook.cells:
        if cell.cell_type == "code":
            for data in (output.data for output in cell.outputs if "image/png" in output.get("data", {})):
                data["image/png"] = shrunk(data["image/png"])
                data.pop(WIDGET, None)
            cell.outputs = [output for output in cell.outputs if is_stored(output)]
    write_atomically(path, nbformat.writes(clean(notebook)) + "\n")
    return texts_to_read(before, notebook)


def main(paths: list[str]) -> int:
    """Render the notebooks one after the other. Returns 1 if one of them failed."""
    status = 0
    for path in map(Path, paths):
        start_s = time.perf_counter()
        try:
            texts = render(path)
            print(f"{path}: {time.perf_counter() - start_s:.0f} s", flush=True)
            if texts:
                print(f"  read again, below outputs that have changed: {', '.join(texts)}", flush=True)
        except ExportError as error:
            print(f"render: {error}", file=sys.stderr, flush=True)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
