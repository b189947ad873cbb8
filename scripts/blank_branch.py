"""Write the blank notebooks that can be opened in Colab and Binder, without `make lab`.

    python scripts/blank_branch.py    # workbook/*.ipynb, each with a cell that installs the course in Colab

.github/workflows/blank.yml pushes them to the branch `blank`, with the rest of the repository. .binder/ has what Binder
installs.
"""

import os
import sys
from pathlib import Path

from nbformat.v4 import new_code_cell, new_markdown_cell

from address import address
from export import NOTEBOOKS, write_atomically
from make_workbook import WORKBOOK, blank_notebook, to_text

BRANCH = "blank"
TEXT = """**In Colab**, run the next cell first, and again whenever Colab gives you a new machine: it fetches the course
and installs what Colab lacks. Elsewhere it does nothing.

What is different in Colab and Binder:

- There is no `make`. `!python ../scripts/exercises.py solution 01.3` shows a solution, and
  `!python ../scripts/exercises.py progress` shows your progress.
- The machine is temporary: save a copy of the notebook in Drive (Colab), or download it (Binder).
- In Colab the notebook's file is not beside the library. After the kernel has restarted, run your answers
  and their checks again. To launch a job with your answers, download the notebook, and use a clone.
- With two cores and little memory, cells with four or eight processes take longer than they say, and may need more
  memory than Binder gives."""
INSTALL = """# In Colab: fetch and install the course. Elsewhere this cell does nothing.
import sys

if "google.colab" in sys.modules:
    !test -d {folder} || git clone -q --depth 1 --branch {branch} {address} {folder}
    %pip install -q -e {folder} {packages}
    sys.path.insert(0, "{folder}")
    %cd -q {folder}/workbook"""
FOLDER = "/content/course"
PACKAGES = "cloudpickle ipyparallel ninja"  # imported by the notebooks; Colab lacks them


def for_elsewhere(blank: dict, repository: str, folder: str = FOLDER) -> dict:
    """Return a blank notebook with a text and a cell for Colab below its title."""
    install = INSTALL.format(folder=folder, branch=BRANCH, address=repository, packages=PACKAGES)
    title, *others = blank["cells"]
    new = new_markdown_cell(TEXT, id="elsewhere-text"), new_code_cell(install, id="elsewhere")
    return {**blank, "cells": [title, *new, *others]}


def main(workbook: Path = WORKBOOK) -> int:
    """Write all notebooks to a new folder. Returns 0, or 2 after printing that there is one."""
    try:
        workbook.mkdir()
    except FileExistsError:
        print(f"blank_branch: {workbook} is there already; this is for a fresh checkout", file=sys.stderr)
        return 2
    repository = os.environ.get("REPOSITORY") or address()  # a fork's workflow knows its own
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        write_atomically(workbook / path.name, to_text(for_elsewhere(blank_notebook(path), repository)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
