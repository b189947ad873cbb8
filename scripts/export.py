"""Write `course_lib/` from the cells that notebooks mark with `#| export`.

    python scripts/export.py             # every notebook of notebooks/
    python scripts/export.py --check     # writes nothing; names each cell whose exported text is out of step

Notebooks have one of two shapes. In the new one (its metadata name a `program`) each exported cell is spliced into a
module that is written by hand: its functions and classes take the place of those of their name, and a comment above
each names the cell (course_kit/exercises/splice.py). In the old one whole modules are exported, by nbdev's
`nb_export`: it collects the cells, turns `from course_lib.model import x` into `from .model import x`, and heads each
block with the notebook and the cell id it came from. This script adds four things. Solution markers do not reach the
library. One notebook may fill several modules, of one package or more: `#| export zero.shards` goes to
`course_lib/zero/shards.py`. A string that opens the first cell of a module becomes the module's docstring. And a raw
cell marked `#| export` reaches the library too; it does not run in the notebook. Imports from modules of the same
notebook are written so: there the name stands in the kernel already, perhaps in the learner's own version.
"""

import ast
import copy
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
from course_kit.exercises.saved import exercise_of, with_ids  # noqa: E402
from course_kit.exercises.splice import YOURS, Owned, line_in_cell, owned, splice, without_owners  # noqa: E402
from course_kit.exercises.splice import locate as locate_owned  # noqa: E402

NOTEBOOKS, LIBRARY = ROOT / "notebooks", ROOT / "course_lib"
MARKER = re.compile(r"^\s*### (BEGIN|END) (SOLUTION|HIDDEN TESTS)\s*$")
DIRECTIVE = re.compile(r"^(#\|\s*(export|default_exp)\b[: ]*([^\s#]*))\s*(?:#.*)?$")
BLOCK = re.compile(r"^# %% (\S+\.ipynb) #(\S+)$")


class ExportError(ValueError):
    """A notebook that cannot be exported; its message is one line for the user."""


def read_notebook(path: Path) -> dict:
    """The notebook at `path`, each cell's source as one string. Raises ExportError where it cannot be read."""
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
    """How a notebook's file name begins: `10` of 10_5d.ipynb, `10b` of its second part, 10b_checkpoint.ipynb."""
    return Path(path).name.partition("_")[0]


def program_of(notebook: dict) -> str | None:
    """The module whose main a notebook of the new shape starts; None for a notebook of the old shape."""
    course = notebook.get("metadata", {}).get("course", {})
    return course.get("program") if isinstance(course, dict) else None


def spliced_cells(notebook: dict, path: Path) -> list[ExportedCell]:
    """The exported cells of a notebook of the new shape. Raises ExportError for a cell that cannot be exported."""
    found = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code" and is_exported(cell["source"]):
            try:
                found.append(read(cell["source"], cell.get("id", "")))
            except CellError as error:
                raise ExportError(f"{path}: {error}") from None
    return found


def owner_of(cell: ExportedCell, path: Path) -> str:
    """What the comment above a spliced definition says: "exercise 04.6", or for another cell its notebook and id."""
    exercise = exercise_of(cell.name)
    return f"exercise {exercise}" if exercise else f"notebook {chapter(path)}, cell {cell.name}"


def hand_written(text: str) -> bool:
    """Whether the text of a module is written by hand, and not exported as a whole."""
    return not any(BLOCK.match(line) for line in text.split("\n"))


def hand_written_text(name: str, where: str, library: Path) -> str:
    """The text of a module that cells are spliced into. Raises ExportError where there is none."""
    try:
        text = module_file(library, name).read_text(encoding="utf-8")
    except OSError:
        raise ExportError(f"{where}: there is no module {imported_as(name)} to export to") from None
    if not hand_written(text):
        raise ExportError(f"{where}: the module {imported_as(name)} belongs to a notebook as a whole")
    return text


def spliced_texts(notebooks: list[Path], library: Path = LIBRARY) -> dict[str, str]:
    """The hand-written modules of a library, the cells of these notebooks of the new shape spliced into them.

    Owner comments that no cell stands behind any more are gone. Raises ExportError where a cell does not fit its
    module, or two cells export one definition.
    """
    texts: dict[str, str] = {}
    for file in sorted(library.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if hand_written(text):
            texts[module_name(file, library)] = without_owners(text)
    owners: dict[tuple, str] = {}
    for path in notebooks:
        for cell in spliced_cells(read_notebook(path), path):
            if cell.module not in texts:
                hand_written_text(cell.module, f"{path}: cell {cell.name}", library)  # says what is the matter
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
    """A module's text as `ruff format` leaves it; as it is where there is no ruff."""
    if find_spec("ruff") is None:
        return text
    command = [sys.executable, "-m", "ruff", "format", "--line-length", "120", "--isolated", "-"]
    done = subprocess.run(command, input=text, capture_output=True, encoding="utf-8")
    return text if done.returncode else done.stdout


def directive(source: str, name: str) -> str | None:
    """The argument of a cell's `#| name` line ("" where it has none), or None where the cell has no such line."""
    for line in source.splitlines():
        if not line.startswith("#|"):
            return None
        if (found := DIRECTIVE.match(line)) and found[2] == name:
            return found[3]
    return None


def plain_directives(source: str) -> str:
    """A cell's source as nbdev reads it: its `#| name` lines without what fold.py says behind them."""
    lines = source.split("\n")
    end = next((number for number, line in enumerate(lines) if not line.startswith("#|")), len(lines))
    return "\n".join([DIRECTIVE.sub(r"\1", line).rstrip() for line in lines[:end]] + lines[end:])


def module_file(library: Path, name: str) -> Path:
    """Where a module stands in a library: `zero.shards` in zero/shards.py."""
    return library.joinpath(*name.split(".")).with_suffix(".py")


def imported_as(name: str) -> str:
    """How a module of the library is imported: `zero.__init__` as course_lib.zero."""
    return ".".join([LIBRARY.name, *name.split(".")]).removesuffix(".__init__")


def exported_cells(notebook: dict) -> list[tuple[int, dict]]:
    """(number, cell) of every cell marked `#| export`; cells are numbered from 1, as they stand in the notebook."""
    return [(number, cell) for number, cell in enumerate(notebook["cells"], start=1)
            if cell["cell_type"] in ("code", "raw") and directive(cell["source"], "export") is not None]


def default_module(notebook: dict) -> str | None:
    """The module that a bare `#| export` goes to, from the notebook's `#| default_exp` line."""
    names = (directive(cell["source"], "default_exp") for cell in notebook["cells"] if cell["cell_type"] == "code")
    return next((name for name in names if name), None)


def kept_lines(source: str) -> list[tuple[int, str]]:
    """(line number in the cell, text) of the lines that reach the library: no directives, no solution markers."""
    lines = list(enumerate(source.splitlines(), start=1))
    while lines and (lines[0][1].startswith("#|") or not lines[0][1].strip()):
        lines.pop(0)
    return [(number, text) for number, text in lines if not MARKER.match(text)]


def split_docstring(text: str) -> tuple[str, str]:
    """The string that opens the text of a module's first cell, and the rest; ("", text) where none does."""
    body = ast.parse(text).body
    if not body or not isinstance(body[0], ast.Expr) or not isinstance(getattr(body[0].value, "value", None), str):
        return "", text
    lines = text.split("\n")
    return "\n".join(lines[: body[0].end_lineno]), "\n".join(lines[body[0].end_lineno :])


def module_texts(notebook: dict, path: Path, library: Path = LIBRARY) -> dict[str, str]:
    """The text of every module that `notebook` exports, by name. `path`: where it stands, for headings and messages."""
    from nbdev.export import nb_export
    from nbdev.maker import ModuleMaker

    cells = exported_cells(notebook)
    if not cells:
        raise ExportError(f"{path} has no cell marked '#| export': nothing to export")
    if not default_module(notebook):
        raise ExportError(f"{path} has no '#| default_exp MODULE' line: its default module has no name")
    for number, cell in cells:
        try:
            ast.parse(cell["source"])
        except SyntaxError as error:
            where = f"{path}: cell {number} ({cell.get('id')}), line {error.lineno}"
            raise ExportError(f"{where}: syntax error: {error.msg}") from None

    def drop_markers(cell):
        if cell.cell_type == "code":
            cell.set_source("\n".join(text for _, text in kept_lines(cell.source)))

    class Maker(ModuleMaker):
        """One text for each module: always new, docstring first."""

        def __init__(self, dest, name, nb_path, is_new=True, **kwargs):
            super().__init__(dest, name, nb_path, is_new=True)
            self.dest2nb = Path(os.path.relpath(path, module_file(library, name).parent)).as_posix()
            self.hdr = f"# %% {self.dest2nb}"

        def make(self, cells, all_cells=None, lib_path=None):
            docstring, rest = split_docstring(cells[0].source)
            cells[0].set_source(rest)
            super().make(cells, cells, lib_path)
            if docstring:
                text = self.fname.read_text(encoding="utf-8")
                self.fname.write_text(f"{docstring}\n\n{text}", encoding="utf-8")

    notebook = copy.deepcopy(notebook)
    for _, cell in exported_cells(notebook):
        cell.update(cell_type="code", outputs=[], execution_count=None)  # a raw cell too
    # nbdev would put a markdown title, "# ...", into the default module.
    notebook["cells"] = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell in notebook["cells"]:
        cell["source"] = plain_directives(cell["source"])
    with tempfile.TemporaryDirectory() as folder:
        plain, made = Path(folder) / Path(path).name, Path(folder) / library.name
        plain.write_text(json.dumps(notebook), encoding="utf-8")
        nb_export(str(plain), lib_path=made, procs=[drop_markers], mod_maker=Maker)
        return {module_name(file, made): file.read_text(encoding="utf-8") for file in sorted(made.rglob("*.py"))}


def module_name(file: Path, library: Path) -> str:
    """The name of the module in a file of a library, as in `#| export zero.shards`."""
    return ".".join(file.relative_to(library).with_suffix("").parts)


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step, so that a reader or a kill never meets half a file."""
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
    """Write each module that differs from what stands in `library`, atomically."""
    for name, text in texts.items():
        file = module_file(library, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            write_atomically(file, text)


def library_texts(notebooks: Path = NOTEBOOKS) -> dict[str, str]:
    """What all the notebooks of a folder export between them; a module belongs to one notebook as a whole, or is
    written by hand.
    """
    paths = sorted(notebooks.glob("*.ipynb"))
    new = [path for path in paths if program_of(read_notebook(path))]
    texts = spliced_texts(new, notebooks.parent / LIBRARY.name)
    owner = dict.fromkeys(texts, "the library's authors")
    for path in []:  # the old shape: no longer exported
        for name, text in module_texts(read_notebook(path), path).items():
            if name in texts:
                raise ExportError(f"{path} exports to '{name}', a module of {owner[name]}: a new idea is a new module")
            texts[name], owner[name] = text, path.name
    return texts


def blocks(text: str) -> dict[str, str]:
    """An exported module in pieces: the text under each heading line, the module's top under ''."""
    pieces, heading = {"": ""}, ""
    for line in text.splitlines():
        if BLOCK.match(line):
            heading = line
            pieces[heading] = ""
        else:
            pieces[heading] += line.rstrip() + "\n"
    return {heading: piece.strip() for heading, piece in pieces.items()}


def differences(texts: dict[str, str], library: Path = LIBRARY) -> list[str]:
    """One line for each cell whose text is not what `library` holds, and for each module that no notebook exports."""
    found = []
    for file in sorted(library.rglob("*.py")):
        if module_name(file, library) not in texts and not hand_written(file.read_text(encoding="utf-8")):
            found.append(f"{file.relative_to(library)} is exported by no notebook")
    for name, text in texts.items():
        file = module_file(library, name)
        shown = file.relative_to(library)
        if not file.exists():
            found.append(f"{shown} is missing: run 'make export'")
            continue
        there = file.read_text(encoding="utf-8")
        if hand_written(text) and there != text and formatted(there) != formatted(text):
            found += [f"{shown} and {place} differ" for place in differing_owners(there, text)]
        if hand_written(text):
            continue
        old, new = blocks(there), blocks(text)
        for heading in {**new, **old}:
            if old.get(heading) != new.get(heading):
                where = BLOCK.match(heading)
                place = f"{Path(where[1]).name}, cell {where[2]}" if where else "docstring and imports at the top"
                found.append(f"{shown} and {place} differ")
        if not found and old != new or list(old) != list(new):
            found.append(f"{shown} holds the cells in another order")
    return found


def differing_owners(old: str, new: str) -> list[str]:
    """Which definitions differ between two texts of a hand-written module, as "exercise 04.6 (launch)"."""

    def definitions(text: str) -> dict[tuple[str, str], str]:
        text = formatted(text)
        lines = text.split("\n")
        return {(each.owner, each.label): "\n".join(lines[each.start - 1 : each.end]) for each in owned(text)}

    before, after = definitions(old), definitions(new)
    names = [each for each in {**before, **after} if before.get(each) != after.get(each)]
    return [f"{owner} ({label})" for owner, label in names] or ["what the notebooks export to it"]


def locate_spliced(file: Path, line: int, text: str, workbook: Path) -> tuple[Path, int, str, int] | None:
    """As `locate`, for a module that is written by hand; a learner's definition is in a notebook of `workbook`."""
    if (place := locate_owned(text, line)) is None:
        return None
    found: Owned = place[0]
    parts = Path(file).with_suffix("").parts
    module = ".".join(parts[len(parts) - parts[::-1].index(LIBRARY.name) :])
    start = found.exercise[:2] if found.exercise else re.search(r"\w+", found.owner.removeprefix("notebook"))[0]
    for path in sorted((workbook if found.is_learners else NOTEBOOKS).glob(f"{start}*_*.ipynb")):
        for number, cell in enumerate(with_ids(read_notebook(path)["cells"]), start=1):
            try:
                exported = read(cell["source"], cell.get("id", "")) if cell["cell_type"] == "code" else None
            except CellError:
                continue
            if exported and owner_of(exported, path) == found.owner.removesuffix(YOURS):
                if (exported.module, exported.cls) == (module, found.cls) and found.name in exported.definitions:
                    return path, number, cell.get("id", ""), line_in_cell(text, place, exported)
    return None


def locate(file: Path, line: int, text: str | None = None) -> tuple[Path, int, str, int] | None:
    """The notebook, cell number, cell id and line in the cell that a line of a module came from; None outside a block.

    `text` is what the module holds, where it is not written yet.
    """
    text = Path(file).read_text(encoding="utf-8") if text is None else text
    if hand_written(text):
        return locate_spliced(file, line, text, ROOT / "workbook")
    lines = text.splitlines()
    heading = next((i for i in range(line - 1, -1, -1) if BLOCK.match(lines[i])), None)
    if heading is None:
        return None
    name, cell_id = BLOCK.match(lines[heading]).groups()
    path = (Path(file).parent / name).resolve()
    for number, cell in exported_cells(read_notebook(path)):
        if cell.get("id") == cell_id:
            kept = kept_lines(cell["source"])
            if not any(map(BLOCK.match, lines[:heading])):  # the module's first cell: its docstring is at the top
                lifted = split_docstring("\n".join(text for _, text in kept))[0]
                kept = kept[len(lifted.splitlines()) :]
            offset = line - 2 - heading
            return (path, number, cell_id, kept[offset][0]) if 0 <= offset < len(kept) else None
    return None


def main(argv: list[str] | None = None) -> int:
    """Export every notebook, or say what is out of step (--check). 0: done; 1: out of step; 2: cannot be exported."""
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
        found = differences(texts)
        print("\n".join(found) if found else f"course_lib is in step with the notebooks ({len(texts)} modules)")
        return 1 if found else 0
    standing = {name: module_file(LIBRARY, name) for name in texts}
    standing = {name: file.read_text(encoding="utf-8") for name, file in standing.items() if file.exists()}
    for name in [name for name in texts if hand_written(texts[name])]:
        texts[name] = standing[name] if formatted(standing[name]) == formatted(texts[name]) else formatted(texts[name])
    write_modules(texts, LIBRARY)
    for file in LIBRARY.rglob("*.py"):
        if module_name(file, LIBRARY) not in texts and not hand_written(file.read_text(encoding="utf-8")):
            file.unlink()
    print(f"course_lib: {len(texts)} modules")
    return 0


if __name__ == "__main__":
    sys.exit(main())
