"""Hand out the notebooks to a learner: `workbook/` gets each notebook of `notebooks/` with its exercises blank.

    python scripts/make_workbook.py             # hands out missing notebooks, updates the others
    python scripts/make_workbook.py --missing   # touches no existing notebook

nbgrader's own preprocessors make the blank, so a workbook has the cells that `nbgrader generate_assignment` releases.

An update never loses a learner's cell. Cells are matched by id: a cell that the learner changed is kept unmodified; all
others are replaced by the course's new ones. If the course has moved cells to a notebook that the learner does not have
yet, the learner's versions move with them. Each blank that was handed out is kept in `workbook/.base/`, named by its
hash, and a workbook's metadata names the blank it was made from. So one atomic write moves a workbook and its base
together: after a kill, a restored old copy, or a browser tab that saves over an update, the next update still starts
from the right blank. If the course's exercises take a new shape, an update carries over the learner's answers
(reshape.py).

scripts/lab/welcome.md goes to `workbook/00_welcome.md`, and is replaced unless the learner has changed it. JupyterLab's
first layout, scripts/lab/workspace.json, goes to `workbook/.lab/`, where JupyterLab keeps the learner's from then on.

nbdime merges only the metadata. Its merge of cells (use-local), on 1000 random pairs of edits, lost a learner's cell in
9 of them, mixed the lines of two versions in 9 and gave two cells one id in 26.
"""

import collections
import contextlib
import difflib
import hashlib
import itertools
import json
import platform
import re
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

from course_kit.exercises.saved import exercise_of
from export import NOTEBOOKS, ROOT, ExportError, read_notebook, write_atomically
from reshape import has_old_shape, is_value, reshape

WORKBOOK = ROOT / "workbook"
LAB = ROOT / "scripts" / "lab"
WELCOME = LAB / "welcome.md"
LAYOUT = ".lab/default-37a8.jupyterlab-workspace"  # the file where JupyterLab keeps its default workspace
IMPORT = re.compile(r"\s*from course_(?:lib|kit)[\w.]* import (.+)")
GOES_ON = "raises-exception"
OLDER = "of an older course, and does not fit the library any more: 'make workbook' updates it, and keeps your work"
STEPS = "LockCells", "ClearSolutions", "ClearOutput", "ClearHiddenTests", "ComputeChecksums", "CheckCellMetadata"


def stamp(notebook: dict) -> str:
    """Return a short hash of a notebook without its own stamp."""
    course = {key: value for key, value in notebook["metadata"].get("course", {}).items() if key != "base"}
    unstamped = {**notebook, "metadata": {**notebook["metadata"], "course": course}}
    return hashlib.sha256(json.dumps(unstamped, sort_keys=True).encode()).hexdigest()[:12]


def blank_notebook(path: Path) -> dict:
    """Return the blank of the notebook at `path`: no solutions, hidden tests or outputs; checks locked; stamped."""
    import nbformat
    from nbgrader import preprocessors
    from nbgrader.nbgraderformat import ValidationError

    notebook = nbformat.from_dict(read_notebook(path))
    ids = [cell.get("id") for cell in notebook.cells]
    if twice := [name for number, name in enumerate(ids) if name is None or name in ids[:number]]:
        raise ExportError(f"{path}: each cell needs an id of its own; {twice[0]} is not")
    try:
        for step in STEPS:
            notebook, _ = getattr(preprocessors, step)().preprocess(notebook, {})
    except (RuntimeError, ValidationError) as error:
        raise ExportError(f"{path}: nbgrader cannot make it blank: {error}") from None
    notebook = json.loads(json.dumps(notebook))  # plain dicts again
    go_on_after_failures(notebook)
    notebook["metadata"].setdefault("course", {})["base"] = stamp(notebook)
    return notebook


def go_on_after_failures(notebook: dict) -> None:
    """Tag cells that fail until an exercise is solved, checks and values, so that Run All continues below them."""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code" and (exercise_of(cell["id"], "check") or is_value(cell)):
            cell["metadata"]["tags"] = [*cell["metadata"].get("tags", []), GOES_ON]


def opens_clean(notebook: dict) -> dict:
    """Return the notebook with this Python's version: JupyterLab would add it on opening, as a change."""
    language = notebook["metadata"].get("language_info", {})
    if language.get("name") != "python" or "version" in language:
        return notebook
    language = {**language, "version": platform.python_version()}
    return {**notebook, "metadata": {**notebook["metadata"], "language_info": language}}


def to_text(notebook: dict) -> str:
    """Return the notebook as a file's text. Escaped, since a learner's output may contain half of a surrogate pair."""
    cells = [{**cell, "source": cell["source"].splitlines(keepends=True)} for cell in notebook["cells"]]
    return json.dumps({**notebook, "cells": cells}, indent=1, sort_keys=True) + "\n"


def read_learners(path: Path) -> dict:
    """Return the learner's notebook at `path`. Raises ExportError if an editor or a crash has damaged it."""
    try:
        notebook = read_notebook(path)
        notebook.setdefault("metadata", {}).setdefault("course", {}).get("base")
        for cell in notebook["cells"]:
            cell.setdefault("metadata", {}).get("nbgrader", {}).get("grade_id")
            cell["cell_type"].lower()
    except (AttributeError, KeyError, TypeError):
        raise ExportError(f"{path} is not a notebook: some of its cells are damaged") from None
    return notebook


def base_file(path: Path, base_stamp: str) -> Path:
    """Return the path of the blank with this stamp, from which the workbook at `path` was made."""
    return path.parent / ".base" / f"{path.stem}.{base_stamp}.ipynb"


def read_base(path: Path, base_stamp: str) -> dict | None:
    """Return the blank that the workbook at `path` was made from; None if it is missing or damaged."""
    try:
        base = read_learners(base_file(path, base_stamp))
    except ExportError:
        return None
    return base if stamp(base) == base_stamp else None


def alike(one: dict | None, other: dict | None) -> bool:
    """Return whether two cells, either of which may be absent, have the same kind, text and attached pictures."""
    if one is None or other is None:
        return one is other
    return all((one.get(key) or "") == (other.get(key) or "") for key in ("cell_type", "source", "attachments"))


def by_id(cells: list[dict], known: dict[str, dict]) -> dict[str, dict]:
    """Return the learner's cells by id, in order. An editor may have dropped, repeated or replaced ids.

    A cell without a usable id is taken for the known cell that its nbgrader metadata names, or, if it has no id at
    all, for a cell with the same text; otherwise it is the learner's own.
    """
    ids = [None] * len(cells)
    for number, cell in enumerate(cells):
        if isinstance(cell.get("id"), str) and cell["id"] not in ids:
            ids[number] = cell["id"]
    for number, cell in enumerate(cells):
        if ids[number] in known:
            continue
        graded = cell["metadata"].get("nbgrader", {}).get("grade_id")
        if graded in known and graded not in ids:
            ids[number] = graded
        elif ids[number] is None:
            free = {} if cell.get("id") else {name: other for name, other in known.items() if name not in ids}
            same = next((name for name, other in free.items() if alike(cell, other)), None)
            ids[number] = same or uuid.uuid4().hex[:8]
    return {name: {**cell, "id": name} for name, cell in zip(ids, cells, strict=True)}


def merged_metadata(base: dict, learner: dict, course: dict) -> dict:
    """Return both sides' changes to a metadata mapping; on conflict, the learner's."""
    if learner == base or course == base:
        return course if learner == base else learner
    from nbdime.merging.decisions import apply_decisions
    from nbdime.merging.generic import decide_merge
    from nbdime.utils import Strategies

    return apply_decisions(base, decide_merge(base, learner, course, Strategies({"/": "use-local"})))


def settled(base: dict | None, learner: dict | None, course: dict | None) -> dict | None:
    """Return the version of a cell, of three, to keep in an update. None means no cell, as argument and result."""
    if learner is None:
        return course if base is None else None
    if alike(learner, base) and course is None:
        return None
    if course is None or not (alike(learner, base) or alike(learner, course)):
        return learner
    outputs = {key: learner[key] for key in ("outputs", "execution_count") if key in learner and alike(learner, course)}
    metadata = merged_metadata(base["metadata"] if base else {}, learner["metadata"], course["metadata"])
    return {**course, **outputs, "metadata": metadata}


def directives(cell: dict) -> str:
    """Return the lines `#| ...` that a cell begins with."""
    lines = cell["source"].splitlines(keepends=True)
    return "".join(itertools.takewhile(lambda line: line.startswith("#|"), lines))


def with_moved_imports(cell: dict | None, base: dict | None, course: dict | None) -> dict | None:
    """Return a cell with the course's updates to lines that the learner has not changed: the directives that name an
    answer's module, and the modules that library names are imported from.
    """
    if None in (cell, base, course):
        return cell
    old, new, source = directives(base), directives(course), cell["source"]
    if directives(cell) == old:
        source = new + source[len(old) :]
    moved = {matched[1]: line for line in course["source"].split("\n") if (matched := IMPORT.match(line))}
    moved = {
        line: moved.get(matched[1], line) for line in base["source"].split("\n") if (matched := IMPORT.match(line))
    }
    return {**cell, "source": "\n".join(moved.get(line, line) for line in source.split("\n"))}


def ordered(base: dict, learner: dict, course: dict, standing: dict) -> list[str]:
    """Return the ids of the kept cells in the course's order; cells that the learner added or moved stay in place."""
    reference = list(base or course)
    blocks = difflib.SequenceMatcher(None, reference, list(learner), autojunk=False).get_matching_blocks()
    unmoved = {name for block in blocks for name in reference[block.a : block.a + block.size]}
    order = [name for name in course if name in standing and (name in unmoved or name not in learner)]
    previous = None
    for name in learner:
        if name in standing:
            if name not in order:
                order.insert(order.index(previous) + 1 if previous else 0, name)
            previous = name
    return order


def merge(
    base: dict | None, learner: dict, course: dict, elsewhere: dict[str, dict] | None = None
) -> tuple[dict, list[str]]:
    """Return the updated notebook, and the ids of the course's changes left out in favor of the learner's cells.

    Without a base every cell that differs from the course's counts as the learner's, and deleted cells are restored.
    elsewhere: the learner's cells in other notebooks, by id. A cell dropped here by the course and found there goes.
    """
    elsewhere = elsewhere or {}
    old = {cell["id"]: cell for cell in base["cells"]} if base else {}
    new = {cell["id"]: cell for cell in course["cells"]}
    mine = by_id(learner["cells"], old or new)
    cells, left_out = {}, []
    for name in {**new, **mine, **old}:
        first, course_cell = old.get(name), new.get(name)
        versions = *(with_moved_imports(cell, first, course_cell) for cell in (first, mine.get(name))), course_cell
        cell = settled(*versions)
        if (
            cell
            and course_cell is None
            and alike(with_moved_imports(cell, first, elsewhere.get(name)), elsewhere.get(name))
        ):
            cell = None
        if cell is not None:
            cells[name] = cell
        if not alike(versions[0], versions[2]) and not alike(cell, versions[2]):
            left_out.append(name)
    metadata = merged_metadata(base["metadata"] if base else {}, learner["metadata"], course["metadata"])
    metadata["course"] = course["metadata"]["course"]
    in_order = [cells[name] for name in ordered(old, mine, new, cells)]
    return {**learner, **course, "metadata": metadata, "cells": in_order}, left_out


def describe(left_out: list[str], notebook: dict, course: dict) -> str:
    """Describe each change of the course that was left out, by the number and id of its cell."""
    numbers = {cell["id"]: number for number, cell in enumerate(notebook["cells"], start=1)}
    offered = {cell["id"] for cell in course["cells"]}
    words = []
    for name in left_out:
        location = f"cell {numbers[name]} ({name})" if name in numbers else f"{name}, which you deleted"
        words.append(location if name in offered else f"{location}, which the course dropped")
    return ", ".join(words)


def set_aside(path: Path) -> Path:
    """Rename a notebook that cannot be read; return its new path."""
    number = 1
    while (aside := path.with_name(f"{path.name}.broken-{number}")).exists():
        number += 1
    path.rename(aside)
    return aside


def keep_base(path: Path, blank: dict) -> None:
    """Keep `blank` as a base for the workbook at `path`. It has no effect until a workbook has its stamp."""
    base_stamp = blank["metadata"]["course"]["base"]
    if read_base(path, base_stamp) is None:
        base_file(path, base_stamp).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(base_file(path, base_stamp), to_text(blank))


def dropped_here(learner: dict, blank: dict) -> set[str]:
    """Return the ids of a learner's cells that the course does not have in this notebook."""
    return {cell.get("id") for cell in learner["cells"]} - {cell["id"] for cell in blank["cells"]}


def cells_elsewhere(path: Path, names: set[str]) -> dict[str, dict]:
    """Return the cells named `names` in the learner's other notebooks."""
    matched = {}
    for other in sorted(path.parent.glob("*.ipynb")) if names else ():
        if other != path:
            with contextlib.suppress(ExportError):
                matched |= {cell["id"]: cell for cell in read_learners(other)["cells"] if cell.get("id") in names}
    return matched


def with_moved_cells(blank: dict, path: Path, notebooks: Path) -> dict:
    """Return the blank of a notebook that the learner does not have yet, with the learner's versions of cells that the
    course had in other notebooks before.
    """
    now = {each.name: [cell.get("id") for cell in read_notebook(each)["cells"]] for each in notebooks.glob("*.ipynb")}
    counts = collections.Counter(itertools.chain(*now.values()))  # many notebooks have a cell named title
    cells = {cell["id"]: cell for cell in blank["cells"]}
    for other in sorted(path.parent.glob("*.ipynb")):
        try:
            learner = read_learners(other)
        except ExportError:
            continue
        base = read_base(other, learner["metadata"]["course"].get("base"))
        old = {cell["id"]: cell for cell in base["cells"]} if base else {}
        mine = by_id(learner["cells"], old)
        gone = {name for name in cells if counts[name] == 1} - {*now.get(other.name, ())}
        mine = {name: cell for name, cell in mine.items() if name in gone}
        if has_old_shape(base, learner):
            matched = reshape(base, mine, blank)
            old = {cell["id"]: cell for cell in matched.base["cells"]} if matched.base else {}
            mine = {cell["id"]: cell for cell in matched.cells}
        previous = None
        for name, cell in mine.items():
            if name in cells:
                first, new = old.get(name), cells[name]
                cells[name] = settled(*(with_moved_imports(each, first, new) for each in (first, cell)), new)
            else:  # what is kept of the one before it
                order = [*cells]
                order.insert(order.index(previous) + 1, name)
                cells = {each: cells.get(each, cell) for each in order}
            previous = name
    return {**blank, "cells": list(cells.values())}


def update(path: Path, blank: dict) -> str:
    """Update the learner's notebook at `path` to `blank`; return one line on the result."""
    saved = path.read_bytes()
    learner = read_learners(path)
    base_stamp = learner["metadata"]["course"].get("base")
    keep_base(path, blank)
    if base_stamp == blank["metadata"]["course"]["base"]:
        return f"{path.stem}: up to date"
    base = full_base = read_base(path, base_stamp)
    message = ""
    if has_old_shape(base, learner):
        known = {cell["id"]: cell for cell in (base or blank)["cells"]}
        matched = reshape(base, by_id(learner["cells"], known), blank)
        base, learner, message = matched.base, {**learner, "cells": matched.cells}, matched.words()
    notebook, left_out = merge(base, learner, blank, cells_elsewhere(path, dropped_here(learner, blank)))
    if path.read_bytes() != saved:  # JupyterLab has saved in between: use that version
        return update(path, blank)
    write_atomically(path, to_text(opens_clean(notebook)))
    line = f"{path.stem}: updated{message}"
    if full_base is None:
        line += ", without the copy once handed out, which is missing or damaged: all that differs is taken as yours"
    if left_out:
        new = base_file(path, blank["metadata"]["course"]["base"])
        named = describe(left_out, notebook, blank)
        line += f"; yours is kept, and the course's change (in .base/{new.name}) is left out: {named}"
    return line


def hand_out(path: Path, blank: dict, notebooks: Path) -> str:
    """Write or update the workbook at `path`; return one line on the result."""
    aside = ""
    if path.exists():
        try:
            return update(path, blank)
        except ExportError as error:
            keep_base(path, blank)
            aside = f" afresh, since {error}; the old file is kept in {set_aside(path)}"
            checkpoint = path.parent / ".ipynb_checkpoints" / f"{path.stem}-checkpoint.ipynb"
            aside += f", and JupyterLab's last checkpoint in {checkpoint}" if checkpoint.exists() else ""
    keep_base(path, blank)
    new = blank if aside else with_moved_cells(blank, path, notebooks)
    write_atomically(path, to_text(opens_clean(new)))
    moved = ", with what you have written in its cells where they stood before" if new != blank else ""
    return f"{path.stem}: handed out{aside}{moved}"


def is_older(path: Path) -> bool:
    """Return whether the learner's notebook at `path` is of an older course, with given code in exercise cells."""
    try:
        return has_old_shape(None, read_learners(path))
    except ExportError:  # there is none, or it is damaged
        return False


def make_workbook(notebooks: Path, workbook: Path, only_missing: bool = False) -> Iterator[str]:
    """Hand out or update every notebook of a folder; return a line for each. All blanks are made before any is written.
    Missing notebooks come first: an update drops a moved cell once it is in its new notebook.
    """
    paths = sorted(notebooks.glob("*.ipynb"))
    if only_missing:
        yield from (f"{path.stem}: {OLDER}" for path in paths if is_older(workbook / path.name))
        paths = [path for path in paths if not (workbook / path.name).exists()]
    blanks = {path.name: blank_notebook(path) for path in paths}
    for name in sorted(blanks, key=lambda name: (workbook / name).exists()):
        yield hand_out(workbook / name, blanks[name], notebooks)
    for path in [] if only_missing else sorted(workbook.glob("*.ipynb")):
        with contextlib.suppress(ExportError):
            if not (notebooks / path.name).exists() and read_learners(path)["metadata"]["course"].get("base"):
                yield f"{path.stem}: the course has it no longer; yours stays as it is"


def hand_out_page(source: Path, path: Path, only_missing: bool = False) -> Iterator[str]:
    """Write or update a page that is not a notebook; return a line if anything changed.

    Each version that was handed out is kept in `.base/`, named by its hash. Any other version is a learner's.
    """

    def saved_blank(page: bytes) -> Path:
        return path.parent / ".base" / f"{path.stem}.{hashlib.sha256(page).hexdigest()[:12]}{path.suffix}"

    text = source.read_text(encoding="utf-8")
    present = path.read_bytes() if path.exists() else None
    if present is None or not only_missing and present != text.encode() and saved_blank(present).exists():
        saved_blank(text.encode()).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(saved_blank(text.encode()), text)
        write_atomically(path, text)
        yield f"{path.stem}: {'handed out' if present is None else 'updated'}"


def main(argv: list[str] | None = None) -> int:
    """Write the workbooks. Returns 0, or 2 after printing why not."""
    argv = sys.argv[1:] if argv is None else argv
    if argv not in ([], ["--missing"]):
        print("usage: python scripts/make_workbook.py [--missing]", file=sys.stderr)
        return 2
    try:
        lines = make_workbook(NOTEBOOKS, WORKBOOK, only_missing=bool(argv))
        page = hand_out_page(WELCOME, WORKBOOK / "00_welcome.md", only_missing=bool(argv))
        for line in itertools.chain(lines, page):
            print(line, flush=True)
        if not (WORKBOOK / LAYOUT).exists():
            (WORKBOOK / LAYOUT).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(WORKBOOK / LAYOUT, (LAB / "workspace.json").read_text(encoding="utf-8"))
    except ExportError as error:
        print(f"workbook: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"workbook: {error.strerror}: {error.filename or WORKBOOK}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
