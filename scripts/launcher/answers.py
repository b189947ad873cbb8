"""A learner's answers to exercises: the ones that a launch uses, and the modules that contain them.

An answer is used if its check has passed on the notebook's current code; otherwise the reference is used. Nothing here
writes files.
"""

from dataclasses import dataclass, field
from pathlib import Path

from course_kit.exercises.cells import BLANK, CellError, ExportedCell, is_exported, read
from course_kit.exercises.notes import state
from course_kit.exercises.saved import digest_of_cells, exercise_cells
from course_kit.exercises.splice import YOURS, owned, splice
from export import NOTEBOOKS, ExportError, chapter, module_text, read_notebook
from launcher.copies import headed, is_copy

NOT_PASSED, CHANGED = "its check has not passed", "it has changed since it passed"
REASONS = {"fails": NOT_PASSED, "not tried": NOT_PASSED, "changed": CHANGED}


@dataclass
class Answers:
    """The answers of some notebooks, spliced into copies of a library's modules."""

    library: Path  # the reference's
    unchecked: bool  # take all that are not blank
    taken: list[str] = field(default_factory=list)  # exercises, as "04.6"
    blank: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # exercise: why the reference is used
    spliced: dict[str, str] = field(default_factory=dict)  # module: text

    def add(self, notebook: dict, path: Path, launched: bool) -> None:
        """Add the answers of the learner's notebook at `path`. launched: True for the notebook to launch.

        Raises ExportError for an unchecked answer that is to be used and cannot be exported.
        """
        cells_by_name = exercise_cells(notebook, path.parent)
        undirected = [
            name for name, cells in cells_by_name.items() if not any(is_exported(cell["source"]) for cell in cells)
        ]
        for name in {*undirected} & exported_exercises(path):
            self.refused[name] = "its cell has lost the line '#| export ...' that it begins with"
        cells_by_name = {name: cells for name, cells in cells_by_name.items() if name not in undirected}
        blank = [name for name, cells in cells_by_name.items() if any(BLANK.search(cell["source"]) for cell in cells)]
        if launched or len(blank) < len(cells_by_name):  # do not list a notebook that is not begun
            self.blank += [f"all of {chapter(path)}"] if len(blank) == len(cells_by_name) > 1 else blank
        for name in [name for name in cells_by_name if name not in blank]:
            if reason := None if self.unchecked else self.reason(name, cells_by_name[name], path):
                self.refused[name] = reason
                continue
            try:
                self.splice(name, [read(cell["source"], cell["id"]) for cell in cells_by_name[name]])
            except (CellError, ExportError) as error:
                if self.unchecked:
                    raise ExportError(f"{path}: {error}") from None
                self.refused[name] = f"it does not fit the library: {error}"

    @staticmethod
    def reason(name: str, cells: list[dict], path: Path) -> str | None:
        """Return why an answer is not used; None for one that has passed."""
        return REASONS.get(state(path.parent, name, digest_of_cells(cells) or "unreadable"))

    def splice(self, name: str, cells: list[ExportedCell | None]) -> None:
        """Put the cells of an exercise into copies of their modules: all of them, or none."""
        texts = {}
        for cell in filter(None, cells):
            text = texts.get(cell.module) or self.spliced.get(cell.module) or self.original(cell.module)
            texts[cell.module] = splice(text, cell, f"exercise {name}{YOURS}", learners=True)
        self.spliced |= texts
        self.taken.append(name)

    def original(self, module: str) -> str:
        """Return the reference's text of a module."""
        return module_text(module, "", self.library)

    def texts(self) -> dict[str, str]:
        """Return the text of the copies, by module."""
        return {name: headed(text, name, self.original(name)) for name, text in self.spliced.items()}


def exported_exercises(path: Path) -> set[str]:
    """Return the exercises of the course's notebook of this name whose answers are exported to the library."""
    reference = NOTEBOOKS / path.name
    cells_by_name = exercise_cells(read_notebook(reference)) if reference.exists() else {}
    return {name for name, cells in cells_by_name.items() if any(is_exported(cell["source"]) for cell in cells)}


def copies(overlay: Path) -> dict[str, str]:
    """Return the copies in a learner's library, by module."""
    cells_by_name = {}
    for file in sorted(overlay.rglob("*.py")):
        text = file.read_text(encoding="utf-8", errors="replace")
        if is_copy(text):
            cells_by_name[".".join(file.relative_to(overlay).with_suffix("").parts)] = text
    return cells_by_name


def has_answer_of(text: str, chapters: list[str]) -> bool:
    """Return whether a copy holds a learner's answer to an exercise of these chapters."""
    return any(each.is_learners and each.exercise and each.exercise[:2] in chapters for each in owned(text))
