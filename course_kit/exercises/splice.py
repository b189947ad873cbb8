"""Put the definitions of an exported cell in the place of those that a module of the library has.

A comment directly above a definition names its owner: the exercise, or another cell of a notebook, that it comes from.

    # exercise 04.6
    def launch(self) -> None:

    # exercise 04.6 (yours)                in the copy of the library that a learner's job runs
    # notebook 13, cell attend-tiles
"""

import ast
import difflib
import re
from dataclasses import dataclass

from course_kit.exercises.cells import DEFINITIONS, ExportedCell, Piece
from course_kit.exercises.fits import check_fits, definitions, find, is_method, place_above, same_import

OWNER = re.compile(
    r"^[ ]*# (?P<owner>(?:exercise (?P<exercise>\d\d\.\d+)|notebook (?P<notebook>\w+), cell (?P<cell>[\w-]+))"
    r"(?: \(yours\))?)$"
)
YOURS = " (yours)"


@dataclass(frozen=True)
class Owned:
    """A definition of a module that bears an owner comment. Lines are counted from 1."""

    owner: str  # as "exercise 04.6"
    name: str
    cls: str | None
    start: int  # the definition's first line, decorators included; the comment stands above it
    end: int

    @property
    def label(self) -> str:
        """As "Bucket.launch"."""
        return f"{self.cls}.{self.name}" if self.cls else self.name

    @property
    def exercise(self) -> str | None:
        """As "04.6"; None where the owner is no exercise."""
        return OWNER.match(f"# {self.owner}")["exercise"]

    @property
    def is_learners(self) -> bool:
        """Whether it is a learner's answer."""
        return self.owner.endswith(YOURS)


def owned(text: str) -> list[Owned]:
    """The definitions of a module that bear an owner comment."""
    lines, found = text.split("\n"), []
    for node, cls, start, end in definitions(text):
        if start > 1 and (comment := OWNER.match(lines[start - 2])):
            found.append(Owned(comment["owner"], node.name, cls, start, end))
    return found


def without_owners(text: str) -> str:
    """A module's text without its owner comments, stale ones too."""
    return "\n".join(line for line in text.split("\n") if not OWNER.match(line))


def splice(text: str, cell: ExportedCell, owner: str, learners: bool = False) -> str:
    """The module's text with the cell's definitions in place of its own, an owner comment above each.

    learners: the cell may bring imports, constants and helpers, which are written above what uses them, and may add
    methods; otherwise each of its definitions has to be there. Raises CellError where the cell does not fit the module.
    """
    check_fits(text, cell, learners)
    for name, piece in cell.definitions.items():
        if found := find(text, name, cell.cls):
            text = replace(text, *found, as_method(piece, cell.cls) if cell.cls else list(piece.lines), owner)
    missing = [name for name in cell.definitions if not find(text, name, cell.cls)]
    for name in missing:
        if cell.cls and is_method(cell.definitions[name].node, cell.cls):
            text = add_method(text, cell, name, owner)
    above = [*cell.others, *(cell.definitions[name] for name in missing if not find(text, name, cell.cls))]
    return add_above(text, cell, above, owner) if above else text


def without_annotation(line: str, cls: str) -> str:
    """A line without the annotation that says whose method a function is."""
    return re.sub(rf"^((?:async )?def \w+\(\s*|\s+)(self|cls): {cls}(?=[,)])", r"\1\2", line)


def replace(text: str, start: int, end: int, code: list[str], owner: str) -> str:
    """The text with new lines in place of those of a definition, and of the owner comment above it."""
    lines = text.split("\n")
    above = start - 2 if start > 1 and OWNER.match(lines[start - 2]) else start - 1
    indent = lines[start - 1][: len(lines[start - 1]) - len(lines[start - 1].lstrip())]
    return "\n".join([*lines[:above], f"{indent}# {owner}", *code, *lines[end:]])


def add_method(text: str, cell: ExportedCell, name: str, owner: str) -> str:
    """The text with a new method at the end of the cell's class."""
    _, end = find(text, cell.cls, None)
    lines = text.split("\n")
    code = ["", f"    # {owner}", *as_method(cell.definitions[name], cell.cls)]
    return "\n".join([*lines[:end], *code, *lines[end:]])


def as_method(piece: Piece, cls: str) -> list[str]:
    """The lines of a function as they stand in a class: indented, but for those inside a string that has several."""
    texts = [node for node in ast.walk(piece.node) if isinstance(node, (ast.Constant, ast.JoinedStr))]
    inside = {line for node in texts for line in range(node.lineno + 1, node.end_lineno + 1)}
    documented = [node for node in ast.walk(piece.node) if isinstance(node, DEFINITIONS) and ast.get_docstring(node)]
    for doc in [node.body[0] for node in documented]:
        inside -= {*range(doc.lineno + 1, doc.end_lineno + 1)}
    lines = [(number in inside, without_annotation(line, cls)) for number, line in zip(piece.numbers, piece.lines)]
    return [line if is_inside or not line.strip() else f"    {line}" for is_inside, line in lines]


def add_above(text: str, cell: ExportedCell, pieces: list[Piece], owner: str) -> str:
    """The text with imports, constants and helpers above the first definition that the cell replaces."""
    lines, start = text.split("\n"), place_above(text, cell)
    tree = ast.parse("\n".join(lines[: start - 1]))
    start -= start > 1 and bool(OWNER.match(lines[start - 2]))
    code = []
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if all(same_import(piece.node, tree, name) for name in piece.names) and "." not in ast.unparse(piece.node):
            continue  # of `import os.path` the name that it binds does not say all
        code += [f"# {owner}", *piece.lines, "", ""] if isinstance(piece.node, DEFINITIONS) else [*piece.lines, ""]
    return "\n".join([*lines[: start - 1], *code, *lines[start - 1 :]])


def locate(text: str, line: int) -> tuple[Owned, int] | None:
    """The owned definition that a line of a module lies in, and how many lines below the definition's first one it is;
    None for other lines.
    """
    inside = [each for each in owned(text) if each.start <= line <= each.end]
    return (inside[-1], line - inside[-1].start) if inside else None


def line_in_cell(text: str, place: tuple[Owned, int], cell: ExportedCell) -> int | None:
    """The line of the cell that a line of a module comes from: `place` as `locate` gives it for `text`."""
    each, below = place
    piece = cell.definitions.get(each.name)
    if piece is None:
        return None
    in_module = [line.strip() for line in text.split("\n")[each.start - 1 : each.end]]
    in_cell = [without_annotation(line, cell.cls).strip() if cell.cls else line.strip() for line in piece.lines]
    if in_module == in_cell:
        return piece.numbers[below]
    matching = difflib.SequenceMatcher(None, in_module, in_cell, autojunk=False).get_matching_blocks()
    before = [block for block in matching if block.a <= below and block.size] or [matching[0]]
    number = min(before[-1].b + below - before[-1].a, len(piece.numbers) - 1)
    return piece.numbers[max(number, 0)]
