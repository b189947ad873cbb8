"""Read an exported cell: the definitions of the library that it replaces, and the names they need.

    #| export data_parallel.buckets:Bucket     the first line: the cell's functions are methods of this class
    def launch(self: Bucket) -> None:          replaces `Bucket.launch` in course_lib/data_parallel/buckets.py

Without `:Bucket`, each function and class at the cell's top level replaces the definition of that name in the module.
Imports, constants and helpers of the cell come along as far as the definitions use them.
"""

import ast
import hashlib
import re
from dataclasses import dataclass, field

from course_kit.exercises.renamed import renamed

EXPORT = re.compile(r"^#\| export (?P<module>[a-z]\w*(?:\.\w+)+)(?::(?P<cls>[A-Za-z]\w*))?$")
LOOKS_LIKE_EXPORT = re.compile(r"^\s*#\s*\|\s*export\b")
MARKER = re.compile(r"^[ \t]*### (BEGIN|END) (SOLUTION|HIDDEN TESTS)[ \t]*$")
BLANK = re.compile(r"^[ \t]*# YOUR CODE HERE[ \t]*\n[ \t]*raise NotImplementedError\(\)", re.MULTILINE)
# str.splitlines and many editors break a line at these characters; Python does not.
BREAKS = {"\v": "U+000B", "\f": "U+000C", "\x1c": "U+001C", "\x1d": "U+001D", "\x1e": "U+001E", "\x85": "U+0085"}
BREAKS |= {"\u2028": "U+2028", "\u2029": "U+2029"}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class CellError(ValueError):
    """A cell that cannot go into the library; the message is one line for its author."""


@dataclass(frozen=True)
class Statement:
    """A statement of a cell that can reach the library."""

    node: ast.stmt
    names: tuple[str, ...]  # that it binds
    start: int  # its first line in the cell, decorators included, from 1
    lines: tuple[str, ...]  # without solution markers
    numbers: tuple[int, ...]  # of these lines in the cell

    @property
    def definition(self) -> Definition:
        """The node of a function or a class."""
        assert isinstance(self.node, DEFINITIONS)
        return self.node


@dataclass(frozen=True)
class ExportedCell:
    """A cell with an export directive."""

    name: str  # of the cell, for messages: its id
    source: str  # as it was written; the definitions have today's names (renamed.py)
    module: str  # as "data_parallel.buckets"
    cls: str | None  # the class whose methods the cell's functions are
    definitions: dict[str, Statement]  # the functions and classes at the cell's top level, by name
    others: list[Statement] = field(repr=False)  # imports and assignments that the definitions use, in their order

    @property
    def target(self) -> str:
        """The target that the directive names, such as "data_parallel.buckets:Bucket"."""
        return self.module + (f":{self.cls}" if self.cls else "")

    @property
    def names(self) -> list[str]:
        """The names of the definitions."""
        return list(self.definitions)

    @property
    def digest(self) -> str:
        """A hash of everything that can reach the library; blank lines and comment lines do not count."""
        written, statements = self.source.split("\n"), (*self.others, *self.definitions.values())
        return digest("\n".join(written[number - 1] for statement in statements for number in statement.numbers))

    @property
    def is_blank(self) -> bool:
        """True while a blank of the exercise is still unfilled."""
        return bool(BLANK.search(self.source))


def digest(source: str) -> str:
    """Return a short hash of the code in a text, without blank lines, comment lines and solution markers."""
    lines = (line.rstrip() for line in plain(source).split("\n"))
    code = [line for line in lines if line and not line.lstrip().startswith("#")]
    return hashlib.sha256("\n".join(code).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def plain(source: str) -> str:
    """Return the source with the line endings that Python reads."""
    return source.replace("\r\n", "\n").replace("\r", "\n")


def is_exported(source: str) -> bool:
    """Return True if a line of the source is an export directive or looks like one."""
    return any(LOOKS_LIKE_EXPORT.match(line) for line in source.split("\n"))


def parsed(source: str, name: str) -> ast.Module:
    """Return the syntax tree of a cell. Raises CellError, with the line, for a syntax error."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        line = getattr(error, "lineno", None)
        position = f", line {line}" if line else ""
        raise CellError(f"cell {name}{position}: syntax error: {getattr(error, 'msg', error)}") from None


def read(source: str, name: str) -> ExportedCell | None:
    """Return the exported cell in `source`; None if none of its lines is an export directive.

    name: the cell's id, for messages. Raises CellError for a cell that cannot be exported, as far as that can be seen
    without the library.
    """
    source = plain(source)
    if not is_exported(source):
        return None
    text = renamed(source)
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if number > 1 and LOOKS_LIKE_EXPORT.match(line):
            raise CellError(f"cell {name}, line {number}: '{line.strip()}' must be the first line of the cell")
        for character in BREAKS.keys() & set(line):
            raise CellError(
                f"cell {name}, line {number} holds {BREAKS[character]}, at which many tools break a line: "
                f"write it as {character.encode('unicode_escape').decode()} in a string"
            )
    directive = EXPORT.match(lines[0].rstrip())
    if not directive:
        raise CellError(
            f"cell {name}: '{lines[0].strip()}' is not a directive such as '#| export package.module' or "
            "'#| export package.module:Class'"
        )
    body = parsed(text, name).body
    definitions: dict[str, Statement] = {}
    others = []
    for number, node in enumerate(body):
        following = body[number + 1] if number + 1 < len(body) else None
        if following is not None and first_line(following) <= last_line(node):
            raise CellError(f"cell {name}, line {node.end_lineno}: two statements on one line")
        statement = statement_of(node, following, lines)
        if isinstance(node, DEFINITIONS):
            if node.name in definitions:
                raise CellError(f"cell {name}: it defines {node.name} twice")
            if directive["cls"] and isinstance(node, ast.ClassDef):
                raise CellError(f"cell {name}: class {node.name} in a cell of methods of {directive['cls']}")
            definitions[node.name] = statement
        elif statement.names:
            others.append(statement)
    if not definitions:
        raise CellError(f"cell {name} is exported and defines no function or class")
    return ExportedCell(
        name, source, directive["module"], directive["cls"], definitions, used_statements(definitions, others)
    )


def first_line(node: ast.stmt) -> int:
    """Return the first line of a statement, decorators included."""
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])


def last_line(node: ast.stmt) -> int:
    """Return the last line of a statement."""
    assert node.end_lineno is not None  # ast.parse sets it
    return node.end_lineno


def span(node: ast.stmt, following: ast.stmt | None, lines: list[str]) -> tuple[int, int]:
    """Return the first and last line of a statement, from 1, including its decorators and the comments that follow it
    with a deeper indent.
    """
    start, end = first_line(node), last_line(node)
    limit = first_line(following) - 1 if following is not None else len(lines)
    for number in range(end + 1, limit + 1):
        text = lines[number - 1]
        indent = len(text) - len(text.lstrip())
        if text.strip() and (not text.lstrip().startswith("#") or indent <= node.col_offset):
            break
        if text.strip():
            end = number
    return start, end


def statement_of(node: ast.stmt, following: ast.stmt | None, lines: list[str]) -> Statement:
    """Return a statement with its names and its lines in the cell."""
    start, end = span(node, following, lines)
    numbers = [number for number in range(start, end + 1) if not MARKER.match(lines[number - 1])]
    return Statement(node, tuple(bound(node)), start, tuple(lines[number - 1] for number in numbers), tuple(numbers))


def bound(node: ast.stmt) -> list[str]:
    """Return the names that a definition, an import or an assignment binds; none for any other statement."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Import():
            return [each.asname or each.name.split(".")[0] for each in node.names]
        case ast.ImportFrom():
            return [each.asname or each.name for each in node.names if node.module != "__future__"]
        case ast.Assign():
            targets: list[ast.expr] = node.targets
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
    """Return the names that an AST node reads, without those in string annotations."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def used_statements(definitions: dict[str, Statement], others: list[Statement]) -> list[Statement]:
    """Return the statements of `others` that the definitions use, directly or through one another."""
    wanted = set().union(*(mentioned(statement.node) for statement in definitions.values()))
    used: list[Statement] = []
    while reached := [
        statement
        for statement in others
        if statement not in used and ({*statement.names} & wanted or "*" in statement.names)
    ]:
        used += reached
        wanted |= set().union(*(mentioned(statement.node) for statement in reached))
    return [statement for statement in others if statement in used]
