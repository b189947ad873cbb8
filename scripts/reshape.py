"""Convert a learner's notebook of an older course to exercises whose cells contain only the learner's code:
`def launch(self: Bucket)`, formerly a full class with given code around a blank.

A learner's code is extracted from the old cell by its names. An old cell with other changes is kept below the new one,
as a raw cell: nothing that a learner has written is lost.
"""

import ast
import itertools
import textwrap
from dataclasses import dataclass

from course_kit.exercises.cells import BLANK, CellError, Definition, ExportedCell, read
from course_kit.exercises.fits import definitions
from course_kit.exercises.saved import exercise_of
from export import program_of

JOINED = "\n\n\n"


@dataclass(frozen=True)
class Part:
    """A definition in a cell, or an import at its top level."""

    cls: str | None  # the class that it is in
    name: str
    node: ast.stmt
    text: str  # dedented
    lines: frozenset[int]  # from 1

    @property
    def key(self) -> tuple[str | None, str]:
        return self.cls, self.name


def parts(source: str) -> list[Part]:
    """Return the definitions and imports of a text, including those in classes. Raises SyntaxError."""
    lines, tree = source.split("\n"), ast.parse(source)

    def part(node: ast.stmt, cls: str | None, name: str, start: int, end: int) -> Part:
        text = textwrap.dedent("\n".join(lines[start - 1 : end]))
        return Part(cls, name, node, text, frozenset(range(start, end + 1)))

    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return [part(node, None, ast.unparse(node), node.lineno, node.end_lineno) for node in imports] + [
        part(node, cls, node.name, start, end) for node, cls, start, end in definitions(source)
    ]


def without_directives(cell: dict) -> str:
    """Return a cell's source without the lines `#| ...` that it begins with."""
    lines = cell["source"].split("\n")
    while lines and lines[0].startswith("#|"):
        lines.pop(0)
    return "\n".join(lines)


class Answers:
    """A learner's code in the cells of one exercise, to be moved to the cells of its new shape."""

    def __init__(self, handed_out: str | None, learners: str):
        self.handed_out, self.learners = handed_out, learners
        self.given = {part.key: part for part in parts(handed_out)} if handed_out is not None else {}
        self.parts = parts(learners)
        self.taken: set[int] = set()  # lines of `learners`

    def moved_to(self, wanted: ExportedCell) -> str | None:
        """Return the source of a new cell; None if the learner has written nothing for it."""
        result = {name: self.answer(name, definition.node, wanted) for name, definition in wanted.definitions.items()}
        if not any(result.values()):
            return None
        texts = [text or "\n".join(wanted.definitions[name].lines) for name, text in result.items()]
        return wanted.source.split("\n")[0] + "\n" + "\n\n\n".join([*self.added(wanted), *texts])

    def nothing_else(self) -> bool:
        """Return whether everything that was not moved is as handed out."""
        if self.handed_out is None:
            return False
        moved = {part.key for part in self.parts if part.lines <= self.taken}
        dropped = {line for key in moved & self.given.keys() for line in self.given[key].lines}
        return self.rest(self.learners, self.taken) == self.rest(self.handed_out, dropped)

    @staticmethod
    def rest(source: str, without: set[int]) -> list[str]:
        """Return the nonblank lines of a text, except some of them."""
        lines = enumerate(source.split("\n"), start=1)
        return [line.strip() for number, line in lines if line.strip() and number not in without]

    def is_theirs(self, part: Part) -> bool:
        """Return whether a part is a learner's own work."""
        given = self.given.get(part.key)
        return not BLANK.search(part.text) and (given is None or given.text != part.text)

    def find(self, name: str, cls: str | None) -> Part | None:
        """Return the learner's definition of a name; a method of the class, or else of the only class that has it."""
        result = [part for part in self.parts if part.name == name and (part.cls is None) == (cls is None)]
        exact = [part for part in result if part.cls == cls]
        return exact[-1] if exact else result[0] if len(result) == 1 else None

    def answer(self, name: str, course: Definition, wanted: ExportedCell) -> str | None:
        """Return the learner's code for a definition, or None."""
        part = self.find(name, wanted.cls)
        if part is None or not isinstance(course, ast.ClassDef) or not isinstance(part.node, ast.ClassDef):
            return annotated(self.take(part), wanted.cls) if part and self.is_theirs(part) else None
        methods, asked = ({each.name for each in methods_of(node)} for node in (part.node, course))
        if asked <= methods and [*map(ast.dump, part.node.bases)] == [*map(ast.dump, course.bases)]:
            return self.take(part) if self.is_theirs(part) else None
        return self.filled("\n".join(wanted.definitions[name].lines), course)

    def filled(self, text: str, course: ast.ClassDef) -> str | None:
        """Return the course's class, `text`, with the learner's methods; None if the learner has written none."""
        result = False
        for method in methods_of(course):
            for mine in [part for part in self.parts if part.key == (course.name, method.name)][-1:]:
                if not self.is_theirs(mine):
                    continue
                target = next(part for part in parts(text) if part.key == (course.name, method.name))
                lines = text.split("\n")
                new = textwrap.indent(self.take(mine), "    ").split("\n")
                text, result = "\n".join(lines[: min(target.lines) - 1] + new + lines[max(target.lines) :]), True
        return text if result else None

    def take(self, part: Part) -> str:
        """Mark a part as moved and return its text."""
        self.taken |= part.lines
        return part.text

    def added(self, wanted: ExportedCell) -> list[str]:
        """Return the imports and helpers that the learner has added, in order."""
        imports, helpers = [], []
        for part in self.parts if self.given else ():
            if part.key in self.given or part.lines <= self.taken:
                continue
            if isinstance(part.node, (ast.Import, ast.ImportFrom)):
                imports.append(self.take(part))
            elif part.cls is None:
                helpers.append(self.take(part))
            elif wanted.cls:
                helpers.append(annotated(self.take(part), wanted.cls))
        return ["\n".join(imports)] * bool(imports) + helpers


def methods_of(node: ast.ClassDef) -> list[ast.FunctionDef]:
    """Return the functions in a class."""
    return [each for each in node.body if isinstance(each, ast.FunctionDef)]


def annotated(text: str, cls: str | None) -> str:
    """Return a method's text with its first parameter annotated by its class."""
    node = ast.parse(text).body[0]
    decorators = {ast.unparse(each) for each in getattr(node, "decorator_list", ())}
    first = [*node.args.posonlyargs, *node.args.args][:1] if isinstance(node, ast.FunctionDef) else []
    if cls is None or decorators & {"staticmethod", "classmethod"} or not first or first[0].annotation:
        return text
    lines = text.split("\n")
    line = lines[first[0].lineno - 1].encode()
    end = first[0].end_col_offset
    lines[first[0].lineno - 1] = (line[:end] + f": {cls}".encode() + line[end:]).decode()
    return "\n".join(lines)


def has_old_shape(base: dict | None, learner: dict) -> bool:
    """Return whether the notebook handed out to the learner is of an older course."""
    return program_of(base or learner) is None


@dataclass
class Reshaped:
    """The input of an update of an older notebook, and its message."""

    base: dict | None  # the notebook that was handed out
    cells: list[dict]  # the learner's
    over: list[str]  # exercises whose new cells hold what the learner has written
    set_aside: list[str]  # ids of raw cells with what else the learner has changed

    def words(self) -> str:
        """Return the message for the learner."""
        over, set_aside = ", ".join(self.over), ", ".join(self.set_aside)
        over = f"; your answers stand in their new cells, run the checks again: {over}" if over else ""
        set_aside = f"; what else you had changed is kept in raw cells: {set_aside}" if set_aside else ""
        return f" to a new shape{over}{set_aside}"


def reshape(base: dict | None, learner: dict[str, dict], course: dict) -> Reshaped:
    """Before an update to the new shape, replace each code cell that the learner has changed by the course's, with the
    learner's answers; a raw cell below keeps their other changes.

    base, course: notebooks; learner: the cells by id.
    """
    old = {cell["id"]: cell for cell in base["cells"]} if base else {}
    new = {cell["id"]: cell for cell in course["cells"]}
    cells, result = {}, Reshaped(base, [], [], [])
    replaced, dropped = {}, set()
    for name, cell in learner.items():
        if name in cells:
            continue
        stands = new.get(name)
        if not is_changed(cell, old.get(name), stands):
            cells[name] = cell
        elif is_value(stands):
            cells[name] = {**cell, "source": without_directives(cell)}
        else:
            below = set_aside(cell, {*learner, *new, *cells})
            moved, nothing_else = move_answers(name, old, learner, new) if stands else ({}, False)
            result.over += [exercise_of(name)] * any(moved.values())
            if stands:
                moved = moved or {name: None}
                replaced |= {each: new[each] for each in moved}
                cells |= {each: new[each] | ({"source": text} if text else {}) for each, text in moved.items()}
            else:
                dropped.add(name)
            if not nothing_else:
                cells[below["id"]] = below
                result.set_aside.append(below["id"])
    if base:
        result.base = {**base, "cells": [cell for name, cell in (old | replaced).items() if name not in dropped]}
    result.cells = list(cells.values())
    return result


def is_changed(cell: dict, old: dict | None, new: dict | None) -> bool:
    """Return whether a course cell's code differs from both the version handed out and the course's present one."""
    same = [each for each in (old, new) if each and all(each[key] == cell[key] for key in ("cell_type", "source"))]
    return cell["cell_type"] in ("code", "raw") and not same and (old or new) is not None


def is_value(course: dict | None) -> bool:
    """Return whether a cell is a value exercise, which is not exported: the learner's text does not change."""
    return course is not None and exercise_of(course["id"]) is not None and not course["source"].startswith("#|")


def move_answers(name: str, old: dict, learner: dict, new: dict) -> tuple[dict[str, str | None], bool]:
    """Return the sources of the exercise's cells in the course, by id, None for a cell without an answer; and whether
    the learner's cells have no other code of their own. name: the id of the exercise's cell.
    """
    mine = [each for each in learner if exercise_of(each) == exercise_of(name) and learner[each]["cell_type"] == "code"]
    if name not in mine or exercise_of(name) is None:
        return {}, False
    cells = {each: cell for each, cell in new.items() if exercise_of(each) == exercise_of(name)}
    handed_out = [without_directives(old[each]) for each in mine if each in old]
    try:
        answers = Answers(
            JOINED.join(handed_out) if handed_out else None,
            JOINED.join(without_directives(learner[each]) for each in mine),
        )
        moved = {each: answers.moved_to(read(cell["source"], each)) for each, cell in cells.items()}
        return moved, answers.nothing_else()
    except (AttributeError, CellError, SyntaxError, ValueError):  # a learner's cell that is not finished
        return dict.fromkeys(cells), False


def set_aside(cell: dict, taken: set[str]) -> dict:
    """Return a raw cell with the text of a learner's cell and an id of its own."""
    ids = (f"old-{cell['id']}"[:60] + (f"-{number}" if number else "") for number in itertools.count())
    words = f"Your cell {cell['id']} as it was before this notebook changed its shape. Delete it when you like."
    free_id = next(each for each in ids if each not in taken)
    return {"cell_type": "raw", "id": free_id, "metadata": {}, "source": f"{words}\n\n{cell['source']}"}
