"""A learner's answers to exercises: which of them a launch takes, and the modules that hold them.

Taken are those whose check has passed on what the notebook holds now; the reference stands for all others. Nothing here
writes.
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
    """Answers of some notebooks, spliced into copies of the modules of a library."""

    library: Path  # the reference's
    unchecked: bool  # take all that are not blank
    taken: list[str] = field(default_factory=list)  # exercises, as "04.6"
    blank: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # exercise: why the reference stands for it
    spliced: dict[str, str] = field(default_factory=dict)  # module: text

    def add(self, notebook: dict, path: Path, launched: bool) -> None:
        """Add the answers of a learner's notebook. path: where it stands; launched: is it the one to launch.

        Raises ExportError for an answer that cannot be exported and is to be taken unchecked.
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
        """Why an answer is not taken; None for one that has passed."""
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
        """The reference's text of a module."""
        return module_text(module, "", self.library)

    def texts(self) -> dict[str, str]:
        """Return the text of the copies, by module."""
        return {name: headed(text, name, self.original(name)) for name, text in self.spliced.items()}


def exported_exercises(path: Path) -> set[str]:
    """The exercises of the course's notebook of this name whose answers go into the library."""
    reference = NOTEBOOKS / path.name
    cells_by_name = exercise_cells(read_notebook(reference)) if reference.exists() else {}
    return {name for name, cells in cells_by_name.items() if any(is_exported(cell["source"]) for cell in cells)}


def copies(overlay: Path) -> dict[str, str]:
    """The copies that lie in a learner's library, by module."""
    cells_by_name = {}
    for file in sorted(overlay.rglob("*.py")):
        text = file.read_text(encoding="utf-8", errors="replace")
        if is_copy(text):
            cells_by_name[".".join(file.relative_to(overlay).with_suffix("").parts)] = text
    return cells_by_name


def has_answer_of(text: str, chapters: list[str]) -> bool:
    """Return whether a copy holds a learner's answer to an exercise of these chapters."""
    return any(each.is_learners and each.exercise and each.exercise[:2] in chapters for each in owned(text))
