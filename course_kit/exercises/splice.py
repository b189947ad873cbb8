"""Replace definitions of a module of the library with an exported cell's.

A comment directly above a definition names its owner: the exercise or other cell of a notebook that it comes from.

    # exercise 04.6
    def launch(self) -> None:

    # exercise 04.6 (yours)                in the copy of the library that a learner's job runs
    # notebook 13, cell attend-tiles
"""

import ast
import difflib
import re
from dataclasses import dataclass

from course_kit.exercises.cells import DEFINITIONS, ExportedCell, Statement, last_line
from course_kit.exercises.fits import check_fits, definitions, find, is_method, line_above, same_import

OWNER = re.compile(
    r"^[ ]*# (?P<owner>(?:exercise (?P<exercise>\d\d\.\d+)|notebook (?P<notebook>\w+), cell (?P<cell>[\w-]+))"
    r"(?: \(yours\))?)$"
)
YOURS = " (yours)"


@dataclass(frozen=True)
class Owned:
    """A definition of a module with an owner comment. Lines are counted from 1."""

    owner: str  # as "exercise 04.6"
    name: str
    cls: str | None
    start: int  # the definition's first line, decorators included; the comment is above it
    end: int

    @property
    def label(self) -> str:
        """The qualified name, such as "Bucket.launch"."""
        return f"{self.cls}.{self.name}" if self.cls else self.name

    @property
    def exercise(self) -> str | None:
        """The exercise, such as "04.6"; None if the owner is not an exercise."""
        comment = OWNER.match(f"# {self.owner}")
        return comment["exercise"] if comment else None

    @property
    def is_learners(self) -> bool:
        """True for a learner's answer."""
        return self.owner.endswith(YOURS)


def owned(text: str) -> list[Owned]:
    """Return the definitions of a module that have an owner comment."""
    lines, result = text.split("\n"), []
    for node, cls, start, end in definitions(text):
        if start > 1 and (comment := OWNER.match(lines[start - 2])):
            result.append(Owned(comment["owner"], node.name, cls, start, end))
    return result


def without_owners(text: str) -> str:
    """Return a module's text without owner comments, stale ones included."""
    return "\n".join(line for line in text.split("\n") if not OWNER.match(line))


def splice(text: str, cell: ExportedCell, owner: str, learners: bool = False) -> str:
    """Return the module's text with the cell's definitions instead of its own, and an owner comment above each.

    learners: the cell may bring imports, constants and helpers, which are written above their first use, and may add
    methods; otherwise the module must have each of its definitions. Raises CellError if the cell does not fit the
    module.
    """
    check_fits(text, cell, learners)
    for name, statement in cell.definitions.items():
        if lines := find(text, name, cell.cls):
            text = replace(text, *lines, as_method(statement, cell.cls) if cell.cls else list(statement.lines), owner)
    missing = [name for name in cell.definitions if not find(text, name, cell.cls)]
    for name in missing:
        if cell.cls and is_method(cell.definitions[name].definition, cell.cls):
            text = add_method(text, cell.cls, cell.definitions[name], owner)
    above = [*cell.others, *(cell.definitions[name] for name in missing if not find(text, name, cell.cls))]
    return add_above(text, cell, above, owner) if above else text


def without_annotation(line: str, cls: str) -> str:
    """Return a line without the annotation that names the class of a method."""
    return re.sub(rf"^((?:async )?def \w+\(\s*|\s+)(self|cls): {cls}(?=[,)])", r"\1\2", line)


def replace(text: str, start: int, end: int, code: list[str], owner: str) -> str:
    """Return the text with new lines instead of a definition and of the owner comment above it."""
    lines = text.split("\n")
    above = start - 2 if start > 1 and OWNER.match(lines[start - 2]) else start - 1
    indent = lines[start - 1][: len(lines[start - 1]) - len(lines[start - 1].lstrip())]
    return "\n".join([*lines[:above], f"{indent}# {owner}", *code, *lines[end:]])


def add_method(text: str, cls: str, method: Statement, owner: str) -> str:
    """Return the text with a new method at the end of a class."""
    lines_of_class = find(text, cls, None)
    assert lines_of_class is not None  # `check_fits` has seen to it
    end, lines = lines_of_class[1], text.split("\n")
    code = ["", f"    # {owner}", *as_method(method, cls)]
    return "\n".join([*lines[:end], *code, *lines[end:]])


def as_method(statement: Statement, cls: str) -> list[str]:
    """Return the lines of a function as a method of a class: indented, except for lines inside a multi-line string."""
    texts = [node for node in ast.walk(statement.node) if isinstance(node, (ast.Constant, ast.JoinedStr))]
    inside = {line for node in texts for line in range(node.lineno + 1, (node.end_lineno or node.lineno) + 1)}
    documented = [
        node for node in ast.walk(statement.node) if isinstance(node, DEFINITIONS) and ast.get_docstring(node)
    ]
    for doc in [node.body[0] for node in documented]:
        inside -= {*range(doc.lineno + 1, last_line(doc) + 1)}
    lines = [without_annotation(line, cls) for line in statement.lines]
    pairs = zip(statement.numbers, lines, strict=True)
    return [line if number in inside or not line.strip() else f"    {line}" for number, line in pairs]


def add_above(text: str, cell: ExportedCell, statements: list[Statement], owner: str) -> str:
    """Return the text with imports, constants and helpers above the first definition that the cell replaces."""
    lines, start = text.split("\n"), line_above(text, cell)
    tree = ast.parse("\n".join(lines[: start - 1]))
    start -= start > 1 and bool(OWNER.match(lines[start - 2]))
    code = []
    for statement in sorted(statements, key=lambda statement: statement.start):
        if all(same_import(statement.node, tree, name) for name in statement.names) and "." not in ast.unparse(
            statement.node
        ):
            continue  # the module has it; the name that `import os.path` binds does not say enough
        code += (
            [f"# {owner}", *statement.lines, "", ""]
            if isinstance(statement.node, DEFINITIONS)
            else [*statement.lines, ""]
        )
    return "\n".join([*lines[: start - 1], *code, *lines[start - 1 :]])


def locate(text: str, line: int) -> tuple[Owned, int] | None:
    """Return the owned definition that contains a line of a module, and the line's offset from the definition's first
    line; None for other lines.
    """
    inside = [each for each in owned(text) if each.start <= line <= each.end]
    return (inside[-1], line - inside[-1].start) if inside else None


def line_in_cell(text: str, location: tuple[Owned, int], cell: ExportedCell) -> int | None:
    """Return the line of the cell that a line of a module comes from. location: the result of `locate` for `text`."""
    each, below = location
    statement = cell.definitions.get(each.name)
    if statement is None:
        return None
    in_module = [line.strip() for line in text.split("\n")[each.start - 1 : each.end]]
    in_cell = [without_annotation(line, cell.cls).strip() if cell.cls else line.strip() for line in statement.lines]
    if in_module == in_cell:
        return statement.numbers[below]
    matching = difflib.SequenceMatcher(None, in_module, in_cell, autojunk=False).get_matching_blocks()
    before = [block for block in matching if block.a <= below and block.size] or [matching[0]]
    number = min(before[-1].b + below - before[-1].a, len(statement.numbers) - 1)
    return statement.numbers[max(number, 0)]
