"""Write an nbgrader course from all notebooks, with points by difficulty.

    python scripts/make_course.py course     # make course, make course OUT=course

The folder gets `nbgrader_config.py`, `source/NN_name/NN_name.ipynb` for each notebook, and
nbgrader's release version of each, with the data that notebooks read: `release/` can be handed out as it is. A check is
worth its exercise's difficulty, 1 to 5, given in the text above it; the notebooks' own metadata says 1 point, since
nbgrader needs a number there. Outputs are removed: they would reveal solutions.

A second run brings in changes of the course. It keeps assignments that a teacher has changed or that have
submissions: their points belong to the notebook that was handed out.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from exercises import exercise_name
from export import NOTEBOOKS, ROOT, ExportError, read_notebook, write_atomically
from make_workbook import read_learners, stamp, to_text

NAME, DIFFICULTY = re.compile(r"### Exercise (\d\d\.\d+) "), re.compile(r"^\*(?:★ )?Difficulty ([1-5]) of 5 ", re.M)
READ_BESIDE = "data", "benchmarks/results"
MARK = "from course_kit.checks.grading import AUTOGRADE"
CONFIG = f'''"""How nbgrader runs this course. Written once by `make course`; change what you like."""

import os

{MARK}

c = get_config()  # noqa: F821
c.CourseDirectory.course_id = "llm-training-at-scale"
c.Autograde.autograde_preprocessors = AUTOGRADE
c.Execute.timeout = 120  # seconds per cell; the longest take 10, on a busy server 50
c.Execute.skip_cells_with_tag = "measurement"  # they only measure and draw: no check depends on one
os.environ.setdefault("OMP_NUM_THREADS", "1")  # kernels and ranks outnumber the cores
'''


def difficulties(notebook: dict) -> dict[str, int]:
    """Return the difficulty of each exercise, by name, from its heading."""
    texts = (cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    parts = [part for text in texts for part in re.split(r"^(?=### Exercise )", text, flags=re.M)]
    matches = [(NAME.match(part), DIFFICULTY.search(part)) for part in parts]
    return {name[1]: int(difficulty[1]) for name, difficulty in matches if name and difficulty}


def course_notebook(path: Path) -> dict:
    """Return the teacher's version of the notebook at `path`: without outputs, with points, stamped."""
    notebook = read_notebook(path)
    worth = difficulties(notebook)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell.update(outputs=[], execution_count=None)
        if name := exercise_name(cell, "check"):
            if name not in worth:
                raise ExportError(f"{path}: the heading of exercise {name} does not say how difficult it is")
            cell["metadata"]["nbgrader"]["points"] = worth[name]
    notebook["metadata"].setdefault("course", {})["base"] = stamp(notebook)
    return notebook


def refuse_other_folders(folder: Path) -> None:
    """Raise ExportError unless a folder is new, empty, or a course that make course has written."""
    config = folder / "nbgrader_config.py"
    if folder.exists() and not folder.is_dir():
        raise ExportError(f"{folder} is no folder: name one that is new or empty, OUT=...")
    if config.exists() and MARK not in config.read_text(encoding="utf-8", errors="replace"):
        raise ExportError(f"{folder} is another nbgrader course: name a folder that is new or empty, OUT=...")
    if folder.is_dir() and not config.exists() and any(folder.iterdir()):
        raise ExportError(f"{folder} holds something else: name a folder that is new or empty, OUT=...")


def what_stands(source: Path, new: dict, submissions: int) -> str | None:
    """Return why a source notebook is kept; None if the new one is to be written."""
    if not source.exists():
        return None
    old = read_learners(source)
    if old["metadata"]["course"].get("base") == new["metadata"]["course"]["base"]:
        return "up to date"
    if old["metadata"]["course"].get("base") != stamp(old):
        return "you have changed it: yours stays, and the course's new one is left out"
    return f"has submissions ({submissions}): it stays, and the course's new one is left out" if submissions else None


def nbgrader_at(folder: Path):
    """Return nbgrader's API for a course's folder, configured by its nbgrader_config.py."""
    from nbgrader.apps import NbGraderAPI
    from traitlets.config import PyFileConfigLoader

    try:
        config = PyFileConfigLoader("nbgrader_config.py", path=str(folder)).load_config()
    except Exception as error:  # the file is a teacher's
        raise ExportError(f"{folder}/nbgrader_config.py: {type(error).__name__}: {error}") from None
    config.CourseDirectory.root = str(folder.resolve())
    return NbGraderAPI(config=config)


def base(path: Path) -> str | None:
    """Return the stamp of the source that the course's notebook at `path` was made from; None without a full one."""
    try:
        return read_learners(path)["metadata"]["course"].get("base")
    except ExportError:
        return None


def make_course(notebooks: Path, folder: Path) -> Iterator[str]:
    """Write or update an nbgrader course of every notebook; return a line for each. Reads all before it writes any."""
    refuse_other_folders(folder)
    new = {path.stem: course_notebook(path) for path in sorted(notebooks.glob("*.ipynb"))}
    sources = {name: folder / "source" / name / f"{name}.ipynb" for name in new}
    releases = {name: folder / "release" / name / f"{name}.ipynb" for name in new}
    submissions = {name: len(list(folder.glob(f"submitted/*/{name}"))) for name in new}
    staying = {name: what_stands(sources[name], new[name], submissions[name]) for name in new}
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "nbgrader_config.py").exists():
        write_atomically(folder / "nbgrader_config.py", CONFIG)
    nbgrader = nbgrader_at(folder)
    for name in new:
        if not staying[name]:
            sources[name].parent.mkdir(parents=True, exist_ok=True)
            write_atomically(sources[name], to_text(new[name]))
    for name in [name for name in new if base(releases[name]) != base(sources[name])]:
        result = nbgrader.generate_assignment(name)
        if not result["success"]:
            message = (result.get("error") or result.get("log") or "it does not say why").strip()
            raise ExportError(f"nbgrader cannot release {name}: {message.splitlines()[-1]}")
    for beside in READ_BESIDE:
        shutil.copytree(ROOT / beside, folder / "release" / beside, dirs_exist_ok=True)
    for name, notebook in new.items():
        points = [cell["metadata"]["nbgrader"]["points"] for cell in notebook["cells"] if exercise_name(cell, "check")]
        yield f"{name}: " + (staying[name] or f"written, {len(points)} checks, {sum(points)} points")


def main(argv: list[str] | None = None) -> int:
    """Write the course. Returns 0, or 2 after printing why not."""
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 1 or argv[0].startswith("-"):
        print("usage: python scripts/make_course.py FOLDER", file=sys.stderr)
        return 2
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])  # nbgrader runs alembic
    try:
        for line in make_course(NOTEBOOKS, Path(argv[0])):
            print(line, flush=True)
    except ExportError as error:
        print(f"course: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        # Of a whole folder that is copied, it is a list of what went wrong, without a strerror.
        print(f"course: {error.strerror}: {error.filename}" if error.strerror else f"course: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
