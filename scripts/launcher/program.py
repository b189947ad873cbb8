"""The program of a launch: the module to start, and the library modules that a notebook changes.

A notebook in notebooks/ exports to course_lib/. For a learner's notebook in workbook/, its passed answers and those in
earlier notebooks are spliced into copies of the library's modules (answers.py). The copies go to workbook/course_lib,
which takes precedence over course_lib, so a job runs everything that a learner has built so far. `train` is no
notebook: it is course_lib.train of the reference, and changes no module. Nothing here writes files.
"""

import ast
import contextlib
import difflib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from course_kit.exercises.cells import CellError
from course_kit.exercises.splice import splice
from export import (
    LIBRARY,
    NOTEBOOKS,
    ROOT,
    ExportError,
    chapter,
    formatted,
    module_file,
    module_text,
    owner_of,
    program_of,
    read_notebook,
    spliced_cells,
)
from launcher.answers import Answers, copies, has_answer_of
from launcher.first_error import shown

WORKBOOK = ROOT / "workbook"
TRAIN = "train"  # names the training program of the library


class LaunchError(ValueError):
    """An error that keeps a launch from starting; its message is one line for the user."""


@dataclass
class Program:
    """A program that is ready to be launched."""

    path: Path  # of the notebook, or TRAIN
    notebook: dict  # its content; {} for TRAIN
    module: str  # the module whose main is started
    library: Path  # the folder that its modules go to
    texts: dict[str, str]  # their new content; without export, their present content
    answered: list[str]  # the exercises whose answers are the learner's
    taken: list[str]  # those that are still blank: exercises, or "all of 05"
    refused: dict[str, str]  # exercises that are the reference's as well: why
    reference_modules: list[str]  # not to be taken from the learner

    @property
    def overlay(self) -> Path | None:
        """The learner's library, if the notebook is a learner's."""
        return None if self.library == LIBRARY else self.library

    @property
    def argument(self) -> str:
        """The argument that names the program to a launcher in any folder."""
        return str(self.path.resolve()) if self.notebook else TRAIN

    def processes(self) -> object:
        """The number of processes in the notebook's metadata, or None."""
        course = self.notebook.get("metadata", {}).get("course", {})
        return course.get("nproc_per_node") if isinstance(course, dict) else None


def read_program(argument: str, chapters: list[str], export: bool, unchecked: bool = False) -> Program:
    """Return the program that the user named: a notebook's, or TRAIN. chapters: the ones to take from the reference;
    unchecked: also take a learner's answers whose checks have not passed.
    """
    if argument == TRAIN:
        return train_program(chapters, unchecked)
    if difflib.get_close_matches(argument, [TRAIN]) and not Path(argument).exists():
        raise LaunchError(f"{argument}: no such file; did you mean {TRAIN}?")
    notebook = read_notebook(Path(argument))
    folder, name = Path(argument).resolve().parent, Path(argument).resolve().name
    if folder not in (NOTEBOOKS, WORKBOOK):
        raise LaunchError(f"{argument} is not of this course: neither in {shown(NOTEBOOKS)} nor in {shown(WORKBOOK)}")
    if not LIBRARY.is_dir():
        raise LaunchError(f"there is no {shown(LIBRARY)}, the library of the course")
    if folder == NOTEBOOKS:
        check_reference("one of notebooks/", chapters, unchecked)
    for each in chapters:
        if not any(is_of(notebook, [each]) for notebook in NOTEBOOKS.glob("*.ipynb")):
            raise LaunchError(f"--reference {each}: no such chapter; it takes two digits, as in --reference 05")
    path = Path(os.path.relpath(folder / name))
    library = LIBRARY if folder == NOTEBOOKS else WORKBOOK / LIBRARY.name
    check_shape(notebook, path)
    module, answers, texts = program_of(notebook), Answers(LIBRARY, unchecked), {}
    if not isinstance(module, str):
        raise LaunchError(f"{path}: its metadata must name the module to start, as course.program")
    if export:
        texts = spliced_modules(notebook, path) if folder == NOTEBOOKS else learners_texts(answers, path, chapters)
    if not defines_main(texts.get(module) or library_text(module)):
        raise LaunchError(f"{path}: its module '{module}' has no function main: nothing to start")
    answered = sorted(answers.taken, key=course_position)
    not_taken = passed_over(library, chapters, texts if export else None)
    return Program(path, notebook, module, library, texts, answered, answers.blank, answers.refused, not_taken)


def train_program(chapters: list[str], unchecked: bool) -> Program:
    """Return the training program of the library, which starts without an export."""
    check_reference(TRAIN, chapters, unchecked)
    module = f"{TRAIN}.program"
    if not library_text(module):
        raise LaunchError(f"there is no {shown(module_file(LIBRARY, module))}, the training program of the library")
    return Program(Path(TRAIN), {}, module, LIBRARY, {}, [], [], {}, [])


def check_reference(who: str, chapters: list[str], unchecked: bool) -> None:
    """Raise LaunchError for options that choose between a learner's answers and the reference."""
    for option, given in (("--reference", chapters), ("--unchecked", unchecked)):
        if given:
            raise LaunchError(f"{option} is for a notebook of workbook/: {who} has nothing but the reference")


def spliced_modules(notebook: dict, path: Path) -> dict[str, str]:
    """Return the modules that a notebook changes, as `make export` writes them."""
    texts = {}
    for cell in spliced_cells(notebook, path):
        text = texts.get(cell.module) or module_text(cell.module, f"{path}: cell {cell.name}", LIBRARY)
        try:
            texts[cell.module] = splice(text, cell, owner_of(cell, path))
        except CellError as error:
            raise ExportError(f"{path}: {error}") from None
    standing = {name: library_text(name) for name in texts}
    return {name: formatted(text) for name, text in texts.items() if formatted(text) != formatted(standing[name])}


def passed_over(library: Path, chapters: list[str], texts: dict[str, str] | None) -> list[str]:
    """Return the copies in a learner's library that this launch does not run: those not in `texts`; if nothing is
    exported (None), those with an answer of one of these chapters.
    """
    if library == LIBRARY:
        return []
    text_there, named = copies(library).items(), [each[:2] for each in chapters]
    return [
        name for name, text in text_there if (name not in texts if texts is not None else has_answer_of(text, named))
    ]


def library_text(module: str) -> str:
    """Return the text of a module in the reference library, "" if it has none."""
    file = module_file(LIBRARY, module)
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def learners_texts(answers: Answers, path: Path, chapters: list[str]) -> dict[str, str]:
    """Add to `answers` the answers of a learner's notebook and of the course's earlier notebooks, except the named
    chapters; return the modules that contain them.
    """
    earlier = [notebook for notebook in sorted(WORKBOOK.glob("*.ipynb")) if notebook.name < path.name]
    earlier = [Path(os.path.relpath(notebook)) for notebook in earlier if (NOTEBOOKS / notebook.name).exists()]
    for each in [*earlier, path]:
        if is_of(each, chapters):
            continue
        try:
            content = read_notebook(each)
            check_shape(content, each)
            answers.add(content, each, each == path)
        except (ExportError, LaunchError) as error:
            hint = "" if each == path else f" (--reference {chapter(each)} leaves this chapter out)"
            raise LaunchError(f"{error}{hint}") from None
    return answers.texts()


def check_shape(notebook: dict, path: Path) -> None:
    """Raise LaunchError for a learner's notebook of an older course, whose cells do not fit the library."""
    if program_of(notebook) is None and path.resolve().parent == WORKBOOK and (NOTEBOOKS / path.name).exists():
        raise LaunchError(f"{path} is of an older course: 'make workbook' brings it up to date, and keeps your work")


def defines_main(text: str) -> bool:
    """Return whether a module's text defines a function `main`, without running it."""
    with contextlib.suppress(SyntaxError):  # possible without export alone, and told when it is imported
        return any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in ast.parse(text).body)
    return True


def is_of(path: Path, chapters: list[str]) -> bool:
    """Return whether a notebook is one of `chapters`: "10" names both parts, 10_… and 10b_…, "10b" the second."""
    return chapter(path) in chapters or chapter(path)[:2] in chapters


def course_position(name: str) -> tuple[str, int]:
    """Return the position of a chapter, "05", or an exercise, "04.10", in the course."""
    start, _, number = name.partition(".")
    return start, int(number or 0)


def parse(parser: Callable, words: object, who: object) -> object:
    """Call an option parser; its error, including argparse's usage text, becomes one line."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            return parser(words)
    except SystemExit as stop:
        if not stop.code:
            raise
        text = output.getvalue().split("error: ")[-1] or str(stop.code)
        raise LaunchError(f"{who}: {' '.join(text.split())}") from None
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise LaunchError(f"{who}: {kind}{' '.join(str(error).split())}") from None
