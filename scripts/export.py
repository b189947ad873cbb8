"""Export the notebooks' cells that begin with `#| export` to `course_lib/`.

    python scripts/export.py             # every notebook of notebooks/
    python scripts/export.py --check     # writes nothing; names each definition that differs from its cell

The library is written by hand. The functions and classes of an exported cell take the place of the definitions of their
names in the module that the directive names, and a comment above each names the cell (course_kit/exercises/splice.py).
Solution markers do not reach the library.
"""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # on a machine where the course is not installed
    sys.path.append(str(ROOT))

from course_kit.exercises.cells import CellError, ExportedCell, is_exported, read  # noqa: E402
from course_kit.exercises.renamed import PROGRAMS  # noqa: E402
from course_kit.exercises.saved import exercise_of, with_ids  # noqa: E402
from course_kit.exercises.splice import YOURS, Owned, line_in_cell, owned, splice, without_owners  # noqa: E402
from course_kit.exercises.splice import locate as locate_owned  # noqa: E402

NOTEBOOKS, LIBRARY = ROOT / "notebooks", ROOT / "course_lib"


class ExportError(ValueError):
    """A notebook that cannot be exported; its message is one line for the user."""


def read_notebook(path: Path) -> dict:
    """Return the notebook at `path`, each cell's source as one string. Raises ExportError if it cannot be read."""
    try:
        notebook = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ExportError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ExportError(f"{path} is a folder, not a notebook") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ExportError(f"{path} is not a notebook, or is cut short: {error}") from None
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        raise ExportError(f"{path} is not a notebook: it has no list of cells")
    if not all(isinstance(cell, dict) and {"source", "cell_type"} <= cell.keys() for cell in notebook["cells"]):
        raise ExportError(f"{path} is not a notebook: not all of its cells have a type and a source")
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"])
    return notebook


def chapter(path: Path) -> str:
    """Return the chapter in a notebook's file name: `10` for 10_5d.ipynb, `10b` for 10b_checkpoint.ipynb."""
    return Path(path).name.partition("_")[0]


def program_of(notebook: dict) -> str | None:
    """Return the module whose main a notebook starts, from its metadata; None for a workbook of an older course."""
    course = notebook.get("metadata", {}).get("course", {})
    program = course.get("program") if isinstance(course, dict) else None
    return PROGRAMS.get(program, program) if isinstance(program, str) else program


def spliced_cells(notebook: dict, path: Path) -> list[ExportedCell]:
    """Return the exported cells of a notebook. Raises ExportError for a cell that cannot be exported."""
    faults = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code" and is_exported(cell["source"]):
            try:
                faults.append(read(cell["source"], cell.get("id", "")))
            except CellError as error:
                raise ExportError(f"{path}: {error}") from None
    return faults


def owner_of(cell: ExportedCell, path: Path) -> str:
    """Return the comment above a spliced definition: "exercise 04.6", or else its cell's notebook and id."""
    exercise = exercise_of(cell.name)
    return f"exercise {exercise}" if exercise else f"notebook {chapter(path)}, cell {cell.name}"


def module_text(name: str, where: str, library: Path) -> str:
    """Return the text of a library module. Raises ExportError, which begins with `where`, if it does not exist."""
    try:
        return module_file(library, name).read_text(encoding="utf-8")
    except OSError:
        raise ExportError(f"{where}: there is no module {imported_as(name)} to export to") from None


def spliced_texts(notebooks: list[Path], library: Path = LIBRARY) -> dict[str, str]:
    """Return the modules of a library with the exported cells of these notebooks spliced in.

    An owner comment without a cell is removed. Raises ExportError for a cell that does not fit its module, and for two
    cells that export one definition.
    """
    files = sorted(library.rglob("*.py"))
    texts = {module_name(file, library): without_owners(file.read_text(encoding="utf-8")) for file in files}
    owners: dict[tuple, str] = {}
    for path in notebooks:
        for cell in spliced_cells(read_notebook(path), path):
            if cell.module not in texts:
                module_text(cell.module, f"{path}: cell {cell.name}", library)  # raises
            for name in cell.names:
                key, mine = (cell.module, cell.cls, name), f"{path.name}, cell {cell.name}"
                if key in owners:
                    raise ExportError(f"{mine} and {owners[key]} both export {name} to {cell.target}")
                owners[key] = mine
            try:
                texts[cell.module] = splice(texts[cell.module], cell, owner_of(cell, path))
            except CellError as error:
                raise ExportError(f"{path}: {error}") from None
    return texts


@functools.cache
def formatted(text: str) -> str:
    """Return a module's text formatted by `ruff format`, or unchanged if ruff is not installed."""
    if find_spec("ruff") is None:
        return text
    command = [sys.executable, "-m", "ruff", "format", "--line-length", "120", "--isolated", "-"]
    done = subprocess.run(command, check=False, input=text, capture_output=True, encoding="utf-8")
    return text if done.returncode else done.stdout


def module_file(library: Path, name: str) -> Path:
    """Return the file of a module in a library: zero/shards.py for `zero.shards`."""
    return library.joinpath(*name.split(".")).with_suffix(".py")


def imported_as(name: str) -> str:
    """Return the import name of a library module: course_lib.zero for `zero.__init__`."""
    return ".".join([LIBRARY.name, *name.split(".")]).removesuffix(".__init__")


def module_name(file: Path, library: Path) -> str:
    """Return the module name of a library file, as in `#| export zero.shards`."""
    return ".".join(file.relative_to(library).with_suffix("").parts)


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of `path` by `text` atomically: no reader sees half a file, even after a kill."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, path.stat().st_mode if path.exists() else 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_modules(texts: dict[str, str], library: Path) -> None:
    """Write each module that differs from the file in `library`, atomically."""
    for name, text in texts.items():
        file = module_file(library, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            write_atomically(file, text)


def library_texts(notebooks: Path = NOTEBOOKS) -> dict[str, str]:
    """Return the modules of the library beside a folder of notebooks, with the notebooks' exports."""
    return spliced_texts(sorted(notebooks.glob("*.ipynb")), notebooks.parent / LIBRARY.name)


def differences(texts: dict[str, str], library: Path = LIBRARY) -> list[str]:
    """Return one line per definition that differs between `library` and the texts that it should hold."""
    faults = []
    for name, text in texts.items():
        file = module_file(library, name)
        current = file.read_text(encoding="utf-8")
        if current != text and formatted(current) != formatted(text):
            faults += [
                f"{file.relative_to(library)} and {location} differ" for location in differing_owners(current, text)
            ]
    return faults


def differing_owners(old: str, new: str) -> list[str]:
    """List the definitions that differ between two texts of a module, as "exercise 04.6 (launch)"."""

    def definitions(text: str) -> dict[tuple[str, str], str]:
        text = formatted(text)
        lines = text.split("\n")
        return {(each.owner, each.label): "\n".join(lines[each.start - 1 : each.end]) for each in owned(text)}

    before, after = definitions(old), definitions(new)
    names = [each for each in {**before, **after} if before.get(each) != after.get(each)]
    return [f"{owner} ({label})" for owner, label in names] or ["what the notebooks export to it"]


def locate(file: Path, line: int, text: str | None = None) -> tuple[Path, int, str, int] | None:
    """Return the notebook, cell number, cell id and line in the cell that a module's line was exported from; None for a
    line that no cell exports. A learner's definition is located in `workbook/`.

    text: the module's content, if it is not written yet.
    """
    text = Path(file).read_text(encoding="utf-8") if text is None else text
    if (location := locate_owned(text, line)) is None:
        return None
    faults: Owned = location[0]
    parts = Path(file).with_suffix("").parts
    module = ".".join(parts[len(parts) - parts[::-1].index(LIBRARY.name) :])
    start = faults.exercise[:2] if faults.exercise else re.search(r"\w+", faults.owner.removeprefix("notebook"))[0]
    for path in sorted((ROOT / "workbook" if faults.is_learners else NOTEBOOKS).glob(f"{start}*_*.ipynb")):
        for number, cell in enumerate(with_ids(read_notebook(path)["cells"]), start=1):
            try:
                exported = read(cell["source"], cell.get("id", "")) if cell["cell_type"] == "code" else None
            except CellError:
                continue
            if exported and owner_of(exported, path) == faults.owner.removesuffix(YOURS):
                if (exported.module, exported.cls) == (module, faults.cls) and faults.name in exported.definitions:
                    return path, number, cell.get("id", ""), line_in_cell(text, location, exported)
    return None


def main(argv: list[str] | None = None) -> int:
    """Export every notebook, or list the differences (--check). Returns 0, 1 if there are any, 2 on an error."""
    argv = sys.argv[1:] if argv is None else argv
    if argv not in ([], ["--check"]):
        print("usage: python scripts/export.py [--check]", file=sys.stderr)
        return 2
    try:
        texts = library_texts()
    except ExportError as error:
        print(f"export: {error}", file=sys.stderr)
        return 2
    if argv:
        faults = differences(texts)
        print("\n".join(faults) if faults else f"course_lib is in sync with the notebooks ({len(texts)} modules)")
        return 1 if faults else 0
    for name, text in texts.items():
        standing = module_file(LIBRARY, name).read_text(encoding="utf-8")
        texts[name] = standing if formatted(standing) == formatted(text) else formatted(text)
    write_modules(texts, LIBRARY)
    print(f"course_lib: {len(texts)} modules")
    return 0


if __name__ == "__main__":
    sys.exit(main())
