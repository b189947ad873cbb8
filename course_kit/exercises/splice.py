"""Put the definitions of an exported cell in the place of those that a module of the library has.

A comment directly above a definition names its owner: the exercise, or another cell of a notebook, that it comes from.

    # exercise 04.6
    def launch(self) -> None:

    # exercise 04.6 (yours)                in the copy of the library that a learner's job runs
    # notebook 13, cell attend-tiles
"""

import __future__

import ast
import builtins
import difflib
import dis
import inspect
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass

from course_kit.exercises.cells import DEFINITIONS, CellError, Definition, ExportedCell, Piece, bound, first_line, span

OWNER = re.compile(
    r"^[ ]*# (?P<owner>(?:exercise (?P<exercise>\d\d\.\d+)|notebook (?P<notebook>\w+), cell (?P<cell>[\w-]+))"
    r"(?: \(yours\))?)$"
)
YOURS = " (yours)"
ANNOTATIONS = __future__.annotations.compiler_flag


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


def definitions(text: str) -> Iterator[tuple[Definition, str | None, int, int]]:
    """Each definition at the top level of a module, and in its classes: node, class, first and last line."""
    lines, tree = text.split("\n"), ast.parse(text)
    for holder in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
        for node, following in zip(holder.body, [*holder.body[1:], None]):
            if isinstance(node, DEFINITIONS):
                yield node, getattr(holder, "name", None), *span(node, following, limited(lines, holder, tree))


def limited(lines: list[str], holder: ast.AST, tree: ast.Module) -> list[str]:
    """The lines of a file up to the end of a class, with the comments that trail it."""
    if holder is tree:
        return lines
    place = tree.body.index(holder)
    following = tree.body[place + 1] if place + 1 < len(tree.body) else None
    return lines[: span(holder, following, lines)[1]]


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


def check_fits(text: str, cell: ExportedCell, learners: bool) -> None:
    """Raise CellError where a cell does not fit the text of its module."""
    where, tree = f"course_lib.{cell.module}", ast.parse(text)
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    if cell.cls and cell.cls not in classes:
        raise CellError(f"cell {cell.name}: {where} has no class {cell.cls}")
    known = static_names(tree)
    for name, piece in cell.definitions.items():
        there = [1 for node, cls, _, _ in definitions(text) if node.name == name and cls == cell.cls]
        if len(there) > 1:
            raise CellError(f"cell {cell.name}: {where} defines {name} {len(there)} times")
        if there:
            continue
        if not learners:
            raise CellError(f"cell {cell.name}: {where} has no {cell.cls + '.' if cell.cls else ''}{name} to replace")
        if not (cell.cls and is_method(piece.node, cell.cls)) and name in known:
            raise CellError(f"cell {cell.name}: {where} has a {name} of its own: give your helper another name")
    if not any(find(text, name, cell.cls) for name in cell.definitions):
        names = ", ".join(cell.definitions)
        raise CellError(f"cell {cell.name} defines {names}, and {where} has nothing of that name to replace")
    for piece in cell.others:
        if not learners:
            raise CellError(
                f"cell {cell.name}, line {piece.start}: an exported cell of a notebook holds definitions alone; "
                f"{', '.join(piece.names)} belongs to {where}"
            )
        if "*" in piece.names:
            raise CellError(f"cell {cell.name}, line {piece.start}: import names, not *")
        for name in set(piece.names) & known:
            if not same_import(piece.node, tree, name):
                raise CellError(
                    f"cell {cell.name}, line {piece.start}: {where} has a {name} of its own: choose another name, or "
                    "import it inside the function"
                )
    own = {name for piece in (*cell.others, *cell.definitions.values()) for name in piece.names}
    for name, line in missing_names(cell, known | own):
        raise CellError(
            f"cell {cell.name}, line {line}: {where}, where your code runs, has no {name}: a slip of the pen? If not, "
            "import it inside the function"
        )
    for name, line in too_early(text, cell) if learners else ():
        raise CellError(
            f"cell {cell.name}, line {line}: {where}, where your code runs, has {name} further down: use it inside "
            "the function"
        )


def static_names(tree: ast.Module) -> set[str]:
    """The names that a module binds at its top level, also inside `if`, `try`, `with` and loops."""
    found, nodes = set(), list(tree.body)
    for node in nodes:  # grows
        if isinstance(node, DEFINITIONS):
            found.add(node.name)
            continue
        found |= set(bound(node))
        found |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            nodes += getattr(node, part, [])
    return found


def missing_names(cell: ExportedCell, known: set[str]) -> Iterator[tuple[str, int]]:
    """Names that functions of a cell look up in their module, and that nothing binds; with a line of the cell."""
    known = known | set(dir(builtins)) | {"__file__", "__name__", "__class__", "__builtins__", "__doc__"}
    known |= {cell.cls} if cell.cls else set()
    nodes = [piece.node for piece in cell.definitions.values()]
    codes = [compile(ast.Module(nodes, []), cell.name, "exec", flags=ANNOTATIONS, dont_inherit=True)]
    for code in codes:  # grows
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    steps = [(code, step) for code in codes for step in dis.get_instructions(code)]
    known |= {step.argval for _, step in steps if step.opname == "STORE_GLOBAL"}
    for code, step in steps:
        looked_up = step.opname == "LOAD_GLOBAL" or step.opname == "LOAD_NAME" and code is codes[0]
        if looked_up and step.argval not in known:
            yield step.argval, step.positions.lineno or code.co_firstlineno


def imported(statement: ast.stmt, name: str) -> str | None:
    """What a statement imports as `name`, as "torch.distributed", however that is written; None where it does not."""
    for each in statement.names if isinstance(statement, (ast.Import, ast.ImportFrom)) else ():
        if (each.asname or each.name.split(".")[0]) == name:
            if isinstance(statement, ast.ImportFrom):
                return "." * statement.level + ".".join(filter(None, [statement.module, each.name]))
            return each.name if each.asname else name
    return None


def same_import(node: ast.stmt, tree: ast.Module, name: str) -> bool:
    """Whether a module has the same import of a name as a cell."""
    wanted = imported(node, name)
    return wanted is not None and any(imported(statement, name) == wanted for statement in tree.body)


def find(text: str, name: str, cls: str | None) -> tuple[int, int] | None:
    """The first and last line of a definition."""
    return next(((a, b) for node, holder, a, b in definitions(text) if node.name == name and holder == cls), None)


def without_annotation(line: str, cls: str) -> str:
    """A line without the annotation that says whose method a function is."""
    return re.sub(rf"^((?:async )?def \w+\(\s*|\s+)(self|cls): {cls}(?=[,)])", r"\1\2", line)


def is_method(node: Definition, cls: str) -> bool:
    """Whether a function of a cell that the class does not have is meant as a method of it."""
    first = [*node.args.posonlyargs, *node.args.args][:1] if not isinstance(node, ast.ClassDef) else []
    decorators = {*map(ast.unparse, getattr(node, "decorator_list", ()))}
    return bool(decorators & {"staticmethod", "classmethod"}) or any(
        each.arg in ("self", "cls") or ast.unparse(each.annotation or ast.Constant(None)) == cls for each in first
    )


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


def place_above(text: str, cell: ExportedCell) -> int:
    """The line of the first definition that a cell replaces, or of its class, above which the rest of the cell goes."""
    places = [find(text, cell.cls, None)] if cell.cls else [find(text, name, None) for name in cell.definitions]
    return min(place[0] for place in places if place)


def too_early(text: str, cell: ExportedCell) -> Iterator[tuple[str, int]]:
    """Names that the cell's statements use at once, as a default or a constant does, and that the module binds further
    down; with a line of the cell.
    """
    tree, start = ast.parse(text), place_above(text, cell)

    def bound_above(line: int) -> set[str]:
        return static_names(ast.Module([node for node in tree.body if first_line(node) < line], []))

    late = static_names(tree) - bound_above(start)
    replaced = {name: found[0] for name in cell.definitions if (found := find(text, name, cell.cls))}
    above = [piece for name, piece in cell.definitions.items() if name not in replaced]
    for piece in sorted([*cell.others, *above], key=lambda piece: piece.start):
        yield from ((name, piece.start) for name in late & used_at_once(piece.node))
        late -= {*piece.names}
    if cell.cls:  # its body is one statement
        above = [piece for name, piece in cell.definitions.items() if name in replaced]
        yield from ((name, piece.start) for piece in above for name in late & used_at_once(piece.node))
        return
    for name, line in replaced.items():
        piece = cell.definitions[name]
        yield from ((each, piece.start) for each in (late - bound_above(line)) & used_at_once(piece.node))


def used_at_once(node: ast.stmt) -> set[str]:
    """The names of its module that a statement looks up where it stands, not in functions that are called later."""
    codes = [compile(ast.Module([node], []), "", "exec", flags=ANNOTATIONS, dont_inherit=True)]
    found = set()
    for code in codes:  # grows
        for each in [each for each in code.co_consts if isinstance(each, types.CodeType)]:
            is_class = not each.co_flags & inspect.CO_OPTIMIZED
            codes += [each] * (is_class or each.co_name.startswith("<") and each.co_name != "<lambda>")
        steps = [*dis.get_instructions(code)]
        own = {step.argval for step in steps if step.opname == "STORE_NAME" and code is not codes[0]}  # a class's
        found |= {step.argval for step in steps if step.opname in ("LOAD_NAME", "LOAD_GLOBAL")} - own
    return found


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
