"""Whether a cell fits a module of the library: what it replaces is there, and what it needs is bound where it runs.

Everything is read from the two texts; nothing is imported or run. So a check, an export and a launch refuse the same.
"""

import __future__

import ast
import builtins
import dis
import inspect
import types
from collections.abc import Iterator

from course_kit.exercises.cells import DEFINITIONS, CellError, Definition, ExportedCell, bound, first_line, span

ANNOTATIONS = __future__.annotations.compiler_flag


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


def find(text: str, name: str, cls: str | None) -> tuple[int, int] | None:
    """The first and last line of a definition."""
    return next(((a, b) for node, holder, a, b in definitions(text) if node.name == name and holder == cls), None)


def is_method(node: Definition, cls: str) -> bool:
    """Whether a function of a cell that the class does not have is meant as a method of it."""
    first = [*node.args.posonlyargs, *node.args.args][:1] if not isinstance(node, ast.ClassDef) else []
    decorators = {*map(ast.unparse, getattr(node, "decorator_list", ()))}
    return bool(decorators & {"staticmethod", "classmethod"}) or any(
        each.arg in ("self", "cls") or ast.unparse(each.annotation or ast.Constant(None)) == cls for each in first
    )


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
