"""Run notebooks and save their outputs in them, so that they read like a book: make render, or make render NB=01.

    python scripts/render.py notebooks/01_single_gpu.ipynb ...

A notebook is replaced atomically after its last cell has run; if it fails, it does not change. It is cleaned
(clean.py), and the code of figures is collapsed (edit.py). Not saved: widget views, which are error messages without a
kernel (so each widget has a static figure next to it), warnings that name files of this machine, and the remains of a
long cell's progress bar. Pictures are compressed losslessly.
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
from PIL import Image

from clean import clean
from course_kit.local_kernel import LocalKernelManager
from edit import collapse_figures
from export import ROOT, ExportError, read_notebook, write_atomically

WIDGET = "application/vnd.jupyter.widget-view+json"
CELL_TIMEOUT_S = 600


def shrunk(png: str) -> str:
    """Compress a picture losslessly, without an alpha channel if nothing is transparent. Base64 in and out."""
    picture = Image.open(io.BytesIO(base64.b64decode(png)))
    if picture.mode == "RGBA" and picture.getextrema()[3] == (255, 255):
        picture = picture.convert("RGB")
    smaller = io.BytesIO()
    picture.save(smaller, "PNG", optimize=True)
    return min(base64.b64encode(smaller.getvalue()).decode(), "".join(png.split()), key=len)


def is_stored(output: dict) -> bool:
    """Return whether an output is saved: no widget view, no warning that names a file of this machine, not empty."""
    complains = output.get("name") == "stderr" and re.search(rf"{re.escape(str(ROOT))}|site-packages", output["text"])
    return WIDGET not in output.get("data", {}) and output.get("data") != {} and not complains


def render(path: Path) -> None:
    """Run the notebook at `path` and replace it by the result. Raises ExportError, naming the cell, if one fails."""
    read_notebook(path)
    notebook = nbformat.read(path, as_version=4)
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
            cell.outputs = [output for output in cell.outputs if is_stored(output)]
            for data in (output.data for output in cell.outputs if "image/png" in output.get("data", {})):
                data["image/png"] = shrunk(data["image/png"])
    write_atomically(path, nbformat.writes(collapse_figures(clean(notebook))) + "\n")


def main(paths: list[str]) -> int:
    """Render the notebooks one after the other. Returns 1 if one of them failed."""
    status = 0
    for path in map(Path, paths):
        start_s = time.perf_counter()
        try:
            render(path)
            print(f"{path}: {time.perf_counter() - start_s:.0f} s", flush=True)
        except ExportError as error:
            print(f"render: {error}", file=sys.stderr, flush=True)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
