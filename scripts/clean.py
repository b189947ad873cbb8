"""Clean notebooks, so that a diff shows only what was changed: python scripts/clean.py [NOTEBOOK ...]

Without a name, all of notebooks/. Keeps `course` and the kernel's name, as JupyterLab writes it, of a notebook's
metadata, and the keys in PRESERVED of a cell's. Removes execution counts, the outputs' metadata except for the width of
pictures, and the addresses in printed objects.
"""

import re
import sys
from pathlib import Path

import nbformat

from export import NOTEBOOKS, ExportError, read_notebook, write_atomically

PRESERVED = "nbgrader", "tags"
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
# The kernel's language metadata, without the version of the Python that happens to run it.
LANGUAGE = {
    "codemirror_mode": {"name": "ipython", "version": 3},
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "name": "python",
    "nbconvert_exporter": "python",
    "pygments_lexer": "ipython3",
}
ADDRESS = re.compile(r"(<.*?)( at 0x[0-9a-fA-F]+)(>)")


def notebook_metadata(before: dict) -> dict:
    """Return a notebook's cleaned metadata: `course`, and the kernel if it is Python's."""
    kernel = before.get("kernelspec", KERNEL)
    python = {"kernelspec": KERNEL, "language_info": LANGUAGE}
    preserved = python if kernel.get("name") == KERNEL["name"] else {"kernelspec": kernel}
    return nbformat.from_dict({key: before[key] for key in ("course",) if key in before} | preserved)


def without_address(text: str | list[str]) -> str | list[str]:
    """Return printed text without memory addresses, which differ in each run."""
    return [*map(without_address, text)] if isinstance(text, list) else ADDRESS.sub(r"\1\3", text)


def clean(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Clean the notebook in place; returns it."""
    notebook["metadata"] = notebook_metadata(notebook["metadata"])
    for cell in notebook["cells"]:
        cell["metadata"] = nbformat.from_dict(
            {key: cell["metadata"][key] for key in PRESERVED if key in cell["metadata"]}
        )
        if cell["cell_type"] == "code":
            cell["execution_count"] = None
        for output in cell.get("outputs", []):
            if "execution_count" in output:
                output["execution_count"] = None
            if "metadata" in output:
                pictures = {kind: of for kind, of in output["metadata"].items() if kind.startswith("image/")}
                widths = {kind: {"width": of["width"]} for kind, of in pictures.items() if "width" in of}
                output["metadata"] = nbformat.from_dict(widths)
            if "text" in output:
                output["text"] = without_address(output["text"])
            for kind, data in output.get("data", {}).items():
                if kind.startswith("text"):
                    output["data"][kind] = without_address(data)
                elif kind.startswith("image") and "svg" not in kind:
                    output["data"][kind] = data.rstrip()
    return notebook


def main(paths: list[str]) -> int:
    """Clean each notebook that is not clean; return 1, and write none, if one of them cannot be read."""
    try:
        texts = {}
        for path in map(Path, paths or sorted(NOTEBOOKS.glob("*.ipynb"))):
            read_notebook(path)
            texts[path] = nbformat.writes(clean(nbformat.read(path, as_version=4))) + "\n"
    except (ExportError, nbformat.ValidationError) as error:
        print("clean:", *str(error).splitlines()[:1], file=sys.stderr)
        return 1
    for path, text in texts.items():
        if path.read_text(encoding="utf-8") != text:
            write_atomically(path, text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
