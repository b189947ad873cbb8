"""The program in a notebook: what its cells export, and which module is started.

A notebook of notebooks/ exports to course_lib/. A learner's notebook of workbook/ exports to workbook/course_lib, which
is laid over course_lib; a cell that is still blank is taken, by its id, from the notebook of the same name in
notebooks/. Of a notebook of the new shape, the answers that have passed are spliced into copies of the library's
modules (answers.py). With it go the learner's notebooks before it: a job runs all that a learner has built so far.
Nothing here writes.
"""

import ast
import contextlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from course_kit.exercises.cells import BLANK, CellError
from course_kit.exercises.saved import CELL_ID
from course_kit.exercises.splice import splice
from export import (
    LIBRARY,
    NOTEBOOKS,
    ROOT,
    ExportError,
    chapter,
    default_module,
    directive,
    exported_cells,
    formatted,
    hand_written_text,
    kept_lines,
    module_file,
    module_texts,
    owner_of,
    program_of,
    read_notebook,
    spliced_cells,
)
from launcher.answers import Answers, copies, has_answer_of
from launcher.first_error import shown

WORKBOOK = ROOT / "workbook"


class LaunchError(ValueError):
    """What keeps a launch from starting; its message is one line for the user."""


@dataclass
class Program:
    """A notebook that is ready to be launched."""

    path: Path  # of the notebook
    notebook: dict  # its content, blanks filled
    module: str  # the one whose main is started
    library: Path  # the folder that its modules go to
    texts: dict[str, str]  # what they shall hold; without export, what they do hold
    own: list[str]  # the learner's work: exercises, and chapters of the old shape that differ from the reference
    taken: list[str]  # what is still blank there, for the reader: exercises, or whole chapters
    refused: dict[str, str]  # exercises that are the reference's as well: why
    reference_modules: list[str]  # not to be taken from the learner

    @property
    def overlay(self) -> Path | None:
        """The learner's library, where the notebook is a learner's."""
        return None if self.library == LIBRARY else self.library

    def processes(self) -> object:
        """The number of processes that the notebook's metadata ask for; None where they do not."""
        course = self.notebook.get("metadata", {}).get("course", {})
        return course.get("nproc_per_node") if isinstance(course, dict) else None


def read_program(
    argument: str, chapters: list[str], export: bool, unchecked: bool = False, has_nbdev: Callable[[], bool] = bool
) -> Program:
    """The program of the notebook that the user named. `chapters`: those to take from the reference; unchecked: take a
    learner's answers whose checks have not passed as well; has_nbdev: asked only where a notebook cannot be exported
    without it.
    """
    notebook = read_notebook(Path(argument))
    folder, name = Path(argument).resolve().parent, Path(argument).resolve().name
    if folder not in (NOTEBOOKS, WORKBOOK):
        raise LaunchError(f"{argument} is not of this course: neither in {shown(NOTEBOOKS)} nor in {shown(WORKBOOK)}")
    if not LIBRARY.is_dir():
        raise LaunchError(f"there is no {shown(LIBRARY)}: 'python scripts/export.py' makes it")
    for option, given in (("--reference", chapters), ("--unchecked", unchecked)):
        if given and folder == NOTEBOOKS:
            raise LaunchError(
                f"{option} is for a notebook of workbook/: one of notebooks/ has nothing but the reference"
            )
    path = Path(os.path.relpath(folder / name))
    library = LIBRARY if folder == NOTEBOOKS else WORKBOOK / LIBRARY.name
    module, work = program_of(notebook) or default_module(notebook), Work({}, [], [], Answers(LIBRARY, unchecked))
    if not isinstance(module, str | None):
        raise LaunchError(f"{path}: the program that its metadata name is no module: {module!r}")
    if folder == WORKBOOK:
        work = learners_work(notebook, path, chapters, export, unchecked, has_nbdev)
    elif program_of(notebook):
        work.texts = spliced_modules(notebook, path) if export else {}
    else:
        export = export and has_nbdev()
        work.texts = module_texts(notebook, path, library) if export else standing_texts(notebook, path, library)
    if folder == WORKBOOK:
        work.texts.pop("__init__", None)  # the package is the reference's; the learner's modules lie over its own
    if not defines_main(work.texts.get(module) or library_text(module)):
        raise LaunchError(f"{path}: its module '{module}' has no function main: nothing to start")
    answers = work.answers
    own, taken = sorted(work.own + answers.taken, key=place), work.taken + answers.blank
    not_taken = modules_of(chapters) + passed_over(library, chapters, work.texts if export else None)
    return Program(path, notebook, module, library, work.texts, own, taken, answers.refused, not_taken)


def spliced_modules(notebook: dict, path: Path) -> dict[str, str]:
    """The modules that a notebook of the new shape changes, as `make export` writes them."""
    texts = {}
    for cell in spliced_cells(notebook, path):
        text = texts.get(cell.module) or hand_written_text(cell.module, f"{path}: cell {cell.name}", LIBRARY)
        try:
            texts[cell.module] = splice(text, cell, owner_of(cell, path))
        except CellError as error:
            raise ExportError(f"{path}: {error}") from None
    standing = {name: library_text(name) for name in texts}
    return {name: formatted(text) for name, text in texts.items() if formatted(text) != formatted(standing[name])}


def passed_over(library: Path, chapters: list[str], texts: dict[str, str] | None) -> list[str]:
    """The copies in a learner's library that this launch does not run: those that are none of `texts`; where nothing is
    exported (None), those that hold an answer of one of these chapters.
    """
    if library == LIBRARY:
        return []
    new = [each[:2] for each in chapters]
    there = copies(library).items()
    return [name for name, text in there if (name not in texts if texts is not None else has_answer_of(text, new))]


def library_text(module: str | None) -> str:
    """What the reference's library holds of a module, "" where it has none: a chapter's parts share one program."""
    file = module and module_file(LIBRARY, module)
    return file.read_text(encoding="utf-8") if file and file.is_file() else ""


@dataclass
class Work:
    """What a learner has built: modules of notebooks of the old shape, and answers to exercises of the new one."""

    texts: dict[str, str]  # of modules
    own: list[str]  # notebooks of the old shape that differ from the reference, by chapter
    taken: list[str]  # what is blank in them
    answers: Answers


def learners_work(
    notebook: dict, path: Path, chapters: list[str], export: bool, unchecked: bool, has_nbdev: Callable[[], bool]
) -> Work:
    """What a learner has built in a notebook and in those before it: notebooks of lower names that the reference has
    too, without the named chapters.
    """
    library, work = WORKBOOK / LIBRARY.name, Work({}, [], [], Answers(LIBRARY, unchecked))
    earlier = [found for found in sorted(WORKBOOK.glob("*.ipynb")) if found.name < path.name]
    earlier = [found for found in earlier if (NOTEBOOKS / found.name).exists() and not is_of(found, chapters)]
    for each in [*(Path(os.path.relpath(found)) for found in earlier), path]:
        try:
            content = notebook if each == path else read_notebook(each) if export else {}
            if each == path or export:
                check_shape(content, each)
            if content and program_of(content):
                if export and not is_of(each, chapters):
                    work.answers.add(content, each, each == path)
            elif export and has_nbdev():
                add_old(work, content, each, each == path)
            elif each == path:
                work.texts |= standing_texts(content, each, library)
        except (ExportError, LaunchError) as error:
            hint = "" if each == path else f" (--reference {chapter(each)} leaves this chapter out)"
            raise LaunchError(f"{error}{hint}") from None
    work.texts |= work.answers.texts()
    return work


def check_shape(notebook: dict, path: Path) -> None:
    """Raise LaunchError for a learner's notebook of the old shape where the course's has the new one."""
    reference = NOTEBOOKS / path.name
    if program_of(notebook) is None and reference.exists() and program_of(read_notebook(reference)):
        raise LaunchError(f"{path} is of an older course: 'make workbook' brings it up to date, and keeps your work")


def add_old(work: Work, content: dict, path: Path, launched: bool) -> None:
    """Add the modules of a learner's notebook of the old shape, blanks filled. launched: is it the one to launch."""
    library = WORKBOOK / LIBRARY.name
    exercises = [cell["id"] for _, cell in exported_cells(content) if CELL_ID.fullmatch(cell.get("id", ""))]
    blank = fill_blanks(content, path)
    work.texts |= name_origin(module_texts(content, path, library), blank, path, library)
    differs = differs_from_reference(content, path)
    work.own += [chapter(path)] if differs else []
    if differs or launched:
        work.taken += [f"all of {chapter(path)}"] if len(blank) == len(exercises) > 1 else map(exercise, blank)


def differs_from_reference(notebook: dict, path: Path) -> bool:
    """Whether what a learner's notebook exports, blanks filled, is not what the reference exports."""
    cells = [
        [(cell.get("id"), [text for _, text in kept_lines(cell["source"])]) for _, cell in exported_cells(each)]
        for each in (notebook, read_notebook(NOTEBOOKS / path.name))
    ]
    return cells[0] != cells[1]


def module_names(notebook: dict) -> list[str]:
    """The modules that a notebook of the old shape exports to; none of one of the new shape, which shares them."""
    if program_of(notebook):
        return []
    names = [directive(cell["source"], "export") or default_module(notebook) for _, cell in exported_cells(notebook)]
    return sorted({name for name in names if name})


def standing_texts(notebook: dict, path: Path, library: Path) -> dict[str, str]:
    """What the library holds of a notebook's modules."""
    module = default_module(notebook)
    if not module or not module_names(notebook):
        raise LaunchError(f"{path} exports no module: it needs a '#| default_exp' line and cells marked '#| export'")
    files = {name: module_file(library, name) for name in module_names(notebook)}
    if module in files and not files[module].is_file():
        raise LaunchError(f"{path}: there is no {shown(files[module])} yet: it has to be exported first")
    return {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}


def defines_main(text: str) -> bool:
    """Whether a module's text defines a function `main`; it is not run for that."""
    with contextlib.suppress(SyntaxError):  # possible without export alone, and told when it is imported
        return any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in ast.parse(text).body)
    return True


def fill_blanks(notebook: dict, path: Path) -> list[str]:
    """Put the reference's cell in the place of each exported cell that is still blank. Gives their ids."""
    blank = [(number, cell) for number, cell in exported_cells(notebook) if BLANK.search(cell["source"])]
    reference = {cell.get("id"): cell for cell in read_notebook(NOTEBOOKS / path.name)["cells"]} if blank else {}
    for number, cell in blank:
        cell_id = cell.get("id")
        if cell_id not in reference:
            raise LaunchError(f"{path}: cell {number} ({cell_id}) is still blank, and the reference has no such cell")
        cell["source"] = reference[cell_id]["source"]
    return [cell["id"] for _, cell in blank]


def name_origin(texts: dict[str, str], taken: list[str], path: Path, library: Path) -> dict[str, str]:
    """Head what was taken from the reference by the reference's path, so that an error in it leads there."""
    headed = {}
    for name, text in texts.items():
        folder = module_file(library, name).parent
        own, reference = (Path(os.path.relpath(each, folder)).as_posix() for each in (path, NOTEBOOKS / path.name))
        for cell in taken:
            text = text.replace(f"# %% {own} #{cell}\n", f"# %% {reference} #{cell}\n")
        headed[name] = text
    return headed


def modules_of(chapters: list[str]) -> list[str]:
    """The modules of the named chapters."""
    names = []
    for each in chapters:
        found = [path for path in sorted(NOTEBOOKS.glob("*.ipynb")) if is_of(path, [each])]
        if not found:
            raise LaunchError(f"--reference {each}: no such chapter; it takes two digits, as in --reference 05")
        names += [name for path in found for name in module_names(read_notebook(path))]
    return names


def is_of(path: Path, chapters: list[str]) -> bool:
    """Whether a notebook is one of `chapters`: "10" names both of its parts, 10_… and 10b_…, "10b" the second."""
    return chapter(path) in chapters or chapter(path)[:2] in chapters


def place(name: str) -> tuple[str, int]:
    """Where a chapter, "05", or an exercise, "04.10", stands in the course."""
    start, _, number = name.partition(".")
    return start, int(number or 0)


def exercise(cell_id: str) -> str:
    """A cell as the course calls it: '01.2 (ex-01-2)' for an exercise, else its id."""
    found = CELL_ID.fullmatch(cell_id)
    return f"{found['chapter']}.{found['number']} ({cell_id})" if found else cell_id


def parse(parser: Callable, words: object, who: object) -> object:
    """Call a parser of options; what it has against them, argparse's usage text included, becomes one line."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parser(words)
    except SystemExit as stop:
        if not stop.code:
            raise
        text = said.getvalue().split("error: ")[-1] or str(stop.code)
        raise LaunchError(f"{who}: {' '.join(text.split())}") from None
    except Exception as error:
        raise LaunchError(f"{who}: {type(error).__name__}: {' '.join(str(error).split())}") from None
