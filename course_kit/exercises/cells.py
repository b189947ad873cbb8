"""Read an exported cell: which definitions of the library it replaces, and what else they need.

    #| export data_parallel.buckets:Bucket     the first line: the cell's functions are methods of this class
    def launch(self: Bucket) -> None:          replaces `Bucket.launch` in course_lib/data_parallel/buckets.py

Without `:Bucket`, each function and class at the cell's top level replaces the definition of that name in the module.
Imports, constants and helpers of the cell come along as far as the definitions use them.
"""

import ast
import hashlib
import re
from dataclasses import dataclass, field

EXPORT = re.compile(r"^#\| export (?P<module>[a-z]\w*(?:\.\w+)+)(?::(?P<cls>[A-Za-z]\w*))?$")
LOOKS_LIKE_EXPORT = re.compile(r"^\s*#\s*\|\s*export\b")
MARKER = re.compile(r"^[ \t]*### (BEGIN|END) (SOLUTION|HIDDEN TESTS)[ \t]*$")
BLANK = re.compile(r"^[ \t]*# YOUR CODE HERE[ \t]*\n[ \t]*raise NotImplementedError\(\)", re.MULTILINE)
# At these, str.splitlines and many editors break a line, and Python does not.
BREAKS = {"\v": "U+000B", "\f": "U+000C", "\x1c": "U+001C", "\x1d": "U+001D", "\x1e": "U+001E", "\x85": "U+0085"}
BREAKS |= {"\u2028": "U+2028", "\u2029": "U+2029"}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class CellError(ValueError):
    """A cell that cannot go into the library; the message is one line for its author."""


@dataclass(frozen=True)
class Piece:
    """A statement of a cell that can reach the library."""

    node: ast.stmt
    names: tuple[str, ...]  # that it binds
    start: int  # its first line in the cell, decorators included, from 1
    lines: tuple[str, ...]  # without solution markers
    numbers: tuple[int, ...]  # of these lines in the cell


@dataclass(frozen=True)
class ExportedCell:
    """A cell with an export directive."""

    name: str  # of the cell, for messages: its id
    source: str
    module: str  # as "data_parallel.buckets"
    cls: str | None  # the class whose methods the cell's functions are
    definitions: dict[str, Piece]  # the functions and classes at the cell's top level, by name
    others: list[Piece] = field(repr=False)  # imports and assignments that the definitions use, in their order

    @property
    def target(self) -> str:
        """What the directive names, as "data_parallel.buckets:Bucket"."""
        return self.module + (f":{self.cls}" if self.cls else "")

    @property
    def names(self) -> list[str]:
        """The names of the definitions."""
        return list(self.definitions)

    @property
    def digest(self) -> str:
        """A hash of all that can reach the library; blank lines and lines of comment do not count."""
        return digest("\n".join(line for piece in (*self.others, *self.definitions.values()) for line in piece.lines))

    @property
    def is_blank(self) -> bool:
        """Whether a blank of the exercise is still as it was handed out."""
        return bool(BLANK.search(self.source))


def digest(source: str) -> str:
    """A short hash of the code in a text: without blank lines, lines of comment and solution markers."""
    lines = (line.rstrip() for line in plain(source).split("\n"))
    code = [line for line in lines if line and not line.lstrip().startswith("#")]
    return hashlib.sha256("\n".join(code).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def plain(source: str) -> str:
    """The source with the line ends that Python reads."""
    return source.replace("\r\n", "\n").replace("\r", "\n")


def is_exported(source: str) -> bool:
    """Whether a line of the source is an export directive, or looks like one."""
    return any(LOOKS_LIKE_EXPORT.match(line) for line in source.split("\n"))


def parsed(source: str, name: str) -> ast.Module:
    """The syntax tree of a cell. Raises CellError, with the line, for a syntax error."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        place = f", line {error.lineno}" if getattr(error, "lineno", None) else ""
        raise CellError(f"cell {name}{place}: syntax error: {getattr(error, 'msg', error)}") from None


def read(source: str, name: str) -> ExportedCell | None:
    """The exported cell in `source`; None where no line of it is an export directive.

    name: the cell's id, for messages. Raises CellError for a cell that cannot be exported, wherever that can be seen
    without the library.
    """
    source = plain(source)
    if not is_exported(source):
        return None
    lines = source.split("\n")
    for number, line in enumerate(lines, start=1):
        if number > 1 and LOOKS_LIKE_EXPORT.match(line):
            raise CellError(f"cell {name}, line {number}: '{line.strip()}' must be the first line of the cell")
        for character in BREAKS.keys() & set(line):
            raise CellError(
                f"cell {name}, line {number} holds {BREAKS[character]}, at which many tools break a line: "
                f"write it as {character.encode('unicode_escape').decode()} in a string"
            )
    found = EXPORT.match(lines[0].rstrip())
    if not found:
        raise CellError(
            f"cell {name}: '{lines[0].strip()}' is no directive such as '#| export package.module' or "
            "'#| export package.module:Class'"
        )
    body = parsed(source, name).body
    definitions: dict[str, Piece] = {}
    others = []
    for number, node in enumerate(body):
        following = body[number + 1] if number + 1 < len(body) else None
        if following is not None and first_line(following) <= node.end_lineno:
            raise CellError(f"cell {name}, line {node.end_lineno}: two statements on one line")
        piece = piece_of(node, following, lines)
        if isinstance(node, DEFINITIONS):
            if node.name in definitions:
                raise CellError(f"cell {name}: it defines {node.name} twice")
            if found["cls"] and isinstance(node, ast.ClassDef):
                raise CellError(f"cell {name}: class {node.name} in a cell of methods of {found['cls']}")
            definitions[node.name] = piece
        elif piece.names:
            others.append(piece)
    if not definitions:
        raise CellError(f"cell {name} is exported and defines no function or class")
    return ExportedCell(name, source, found["module"], found["cls"], definitions, used_pieces(definitions, others))


def first_line(node: ast.stmt) -> int:
    """The first line of a statement, decorators included."""
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])


def span(node: ast.stmt, following: ast.stmt | None, lines: list[str]) -> tuple[int, int]:
    """The first and last line of a statement, from 1: with its decorators, and with the comments that are indented
    deeper than it and stand before the following statement.
    """
    start, end = first_line(node), node.end_lineno
    limit = first_line(following) - 1 if following is not None else len(lines)
    for number in range(end + 1, limit + 1):
        text = lines[number - 1]
        indent = len(text) - len(text.lstrip())
        if text.strip() and (not text.lstrip().startswith("#") or indent <= node.col_offset):
            break
        if text.strip():
            end = number
    return start, end


def piece_of(node: ast.stmt, following: ast.stmt | None, lines: list[str]) -> Piece:
    """A statement as a piece of its cell."""
    start, end = span(node, following, lines)
    kept = [number for number in range(start, end + 1) if not MARKER.match(lines[number - 1])]
    return Piece(node, tuple(bound(node)), start, tuple(lines[number - 1] for number in kept), tuple(kept))


def bound(node: ast.stmt) -> list[str]:
    """The names that a definition, an import or an assignment binds; none for any other statement."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Import():
            return [each.asname or each.name.split(".")[0] for each in node.names]
        case ast.ImportFrom():
            return [each.asname or each.name for each in node.names if node.module != "__future__"]
        case ast.Assign():
            targets = node.targets
        case ast.AnnAssign():
            targets = [node.target] if node.value is not None else []
        case _:
            return []
    targets = [*targets, *(each.target for each in ast.walk(node) if isinstance(each, ast.NamedExpr))]
    return [
        each.id
        for target in targets
        for each in ast.walk(target)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    ]


def mentioned(node: ast.AST) -> set[str]:
    """The names that a piece of code reads, those in annotations that are strings left out."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def used_pieces(definitions: dict[str, Piece], others: list[Piece]) -> list[Piece]:
    """Those of the other statements that the definitions use, directly or by way of one another."""
    wanted = set().union(*(mentioned(piece.node) for piece in definitions.values()))
    used: list[Piece] = []
    while more := [piece for piece in others if piece not in used and ({*piece.names} & wanted or "*" in piece.names)]:
        used += more
        wanted |= set().union(*(mentioned(piece.node) for piece in more))
    return [piece for piece in others if piece in used]
