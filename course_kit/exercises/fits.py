"""Check that a cell fits a module of the library: the module defines what the cell replaces, and binds what it needs.

Both texts are only parsed; nothing is imported or run. A check, an export and a launch therefore refuse the same cells.
"""

import __future__

import ast
import builtins
import dis
import inspect
import types
from collections.abc import Iterator

from course_kit.exercises.cells import (
    DEFINITIONS,
    CellError,
    Definition,
    ExportedCell,
    bound,
    first_line,
    span,
)

ANNOTATIONS = __future__.annotations.compiler_flag


def definitions(text: str) -> Iterator[tuple[Definition, str | None, int, int]]:
    """Yield each definition at the top level of a module and in its classes: node, class, first and last line."""
    lines, tree = text.split("\n"), ast.parse(text)
    scopes: list[ast.Module | ast.ClassDef] = [tree]
    scopes += [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for scope in scopes:
        for node, following in zip(scope.body, [*scope.body[1:], None], strict=False):
            if isinstance(node, DEFINITIONS):
                yield node, getattr(scope, "name", None), *span(node, following, limited(lines, scope, tree))


def limited(lines: list[str], holder: ast.Module | ast.ClassDef, tree: ast.Module) -> list[str]:
    """Return the lines of a file up to the end of a class, with the comments that trail it."""
    if isinstance(holder, ast.Module):
        return lines
    index = tree.body.index(holder)
    following = tree.body[index + 1] if index + 1 < len(tree.body) else None
    return lines[: span(holder, following, lines)[1]]


def find(text: str, name: str, cls: str | None) -> tuple[int, int] | None:
    """Return the first and last line of a definition; None if the text does not define it."""
    return next(((a, b) for node, holder, a, b in definitions(text) if node.name == name and holder == cls), None)


def is_method(node: Definition, cls: str) -> bool:
    """Return True if a function of a cell, which the class does not define, is meant as a new method of the class."""
    first = [*node.args.posonlyargs, *node.args.args][:1] if not isinstance(node, ast.ClassDef) else []
    decorators = {*map(ast.unparse, getattr(node, "decorator_list", ()))}
    return bool(decorators & {"staticmethod", "classmethod"}) or any(
        each.arg in ("self", "cls") or ast.unparse(each.annotation or ast.Constant(None)) == cls for each in first
    )


def check_fits(text: str, cell: ExportedCell, learners: bool) -> None:
    """Raise CellError if a cell does not fit the text of its module."""
    where, tree = f"course_lib.{cell.module}", ast.parse(text)
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    if cell.cls and cell.cls not in classes:
        raise CellError(f"cell {cell.name}: {where} has no class {cell.cls}")
    known = static_names(tree)
    for name, statement in cell.definitions.items():
        matches = [1 for node, cls, _, _ in definitions(text) if node.name == name and cls == cell.cls]
        if len(matches) > 1:
            raise CellError(f"cell {cell.name}: {where} defines {name} {len(matches)} times")
        if matches:
            continue
        if not learners:
            raise CellError(f"cell {cell.name}: {where} has no {cell.cls + '.' if cell.cls else ''}{name} to replace")
        if not (cell.cls and is_method(statement.definition, cell.cls)) and name in known:
            raise CellError(f"cell {cell.name}: {where} already has {name}: give your helper another name")
    if not any(find(text, name, cell.cls) for name in cell.definitions):
        names = ", ".join(cell.definitions)
        raise CellError(f"cell {cell.name} defines {names}, and {where} has no definition of that name to replace")
    for statement in cell.others:
        if not learners:
            raise CellError(
                f"cell {cell.name}, line {statement.start}: an exported cell of a notebook holds only definitions; "
                f"{', '.join(statement.names)} belongs to {where}"
            )
        if "*" in statement.names:
            raise CellError(f"cell {cell.name}, line {statement.start}: import names, not *")
        for name in set(statement.names) & known:
            if not same_import(statement.node, tree, name):
                raise CellError(
                    f"cell {cell.name}, line {statement.start}: {where} already has {name}: choose another name, or "
                    "import it inside the function"
                )
    brought = {name for statement in (*cell.others, *cell.definitions.values()) for name in statement.names}
    for name, line in missing_names(cell, known | brought):
        raise CellError(
            f"cell {cell.name}, line {line}: {where}, where your code runs, has no {name}: a typo? If not, "
            "import it inside the function"
        )
    for name, line in too_early(text, cell) if learners else ():
        raise CellError(
            f"cell {cell.name}, line {line}: {where}, where your code runs, defines {name} further down: use it inside "
            "the function"
        )


def static_names(tree: ast.Module) -> set[str]:
    """Return the names that a module binds at its top level, also inside `if`, `try`, `with` and loops."""
    names, nodes = set(), list(tree.body)
    for node in nodes:  # grows
        if isinstance(node, DEFINITIONS):
            names.add(node.name)
            continue
        names |= set(bound(node))
        names |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            nodes += getattr(node, field, [])
    return names


def missing_names(cell: ExportedCell, known: set[str]) -> Iterator[tuple[str, int]]:
    """Yield names that functions of a cell look up in their module and that nothing binds, with a line of the cell."""
    known = known | set(dir(builtins)) | {"__file__", "__name__", "__class__", "__builtins__", "__doc__"}
    known |= {cell.cls} if cell.cls else set()
    nodes = [statement.node for statement in cell.definitions.values()]
    codes: list[types.CodeType] = [
        compile(ast.Module(nodes, []), cell.name, "exec", flags=ANNOTATIONS, dont_inherit=True)
    ]
    for code in codes:  # grows
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    steps = [(code, step) for code in codes for step in dis.get_instructions(code)]
    known |= {step.argval for _, step in steps if step.opname == "STORE_GLOBAL"}
    for code, step in steps:
        looked_up = step.opname == "LOAD_GLOBAL" or step.opname == "LOAD_NAME" and code is codes[0]
        if looked_up and step.argval not in known:
            line = step.positions.lineno if step.positions else None
            yield step.argval, line or code.co_firstlineno


def imported(node: ast.stmt, name: str) -> str | None:
    """Return the full name that a statement imports as `name`, such as "torch.distributed"; None if it imports no
    such name.
    """
    for each in node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else ():
        if (each.asname or each.name.split(".")[0]) == name:
            if isinstance(node, ast.ImportFrom):
                return "." * node.level + ".".join(filter(None, [node.module, each.name]))
            return each.name if each.asname else name
    return None


def same_import(node: ast.stmt, tree: ast.Module, name: str) -> bool:
    """Return True if a module has the same import of a name as a cell."""
    wanted = imported(node, name)
    return wanted is not None and any(imported(other, name) == wanted for other in tree.body)


def line_above(text: str, cell: ExportedCell) -> int:
    """Return the line above which the helpers of a cell are written: the line of the first definition it replaces, or
    of its class.
    """
    all_lines = [find(text, cell.cls, None)] if cell.cls else [find(text, name, None) for name in cell.definitions]
    return min(lines[0] for lines in all_lines if lines)


def too_early(text: str, cell: ExportedCell) -> Iterator[tuple[str, int]]:
    """Yield names that the cell's statements use when they are executed (as defaults and constants do) and that the
    module binds further down, with a line of the cell.
    """
    tree, start = ast.parse(text), line_above(text, cell)

    def bound_above(line: int) -> set[str]:
        return static_names(ast.Module([node for node in tree.body if first_line(node) < line], []))

    late = static_names(tree) - bound_above(start)
    replaced = {name: lines[0] for name in cell.definitions if (lines := find(text, name, cell.cls))}
    above = [statement for name, statement in cell.definitions.items() if name not in replaced]
    for statement in sorted([*cell.others, *above], key=lambda statement: statement.start):
        yield from ((name, statement.start) for name in late & used_at_once(statement.node))
        late -= {*statement.names}
    if cell.cls:  # its body is one statement
        above = [statement for name, statement in cell.definitions.items() if name in replaced]
        yield from ((name, statement.start) for statement in above for name in late & used_at_once(statement.node))
        return
    for name, line in replaced.items():
        statement = cell.definitions[name]
        yield from ((each, statement.start) for each in (late - bound_above(line)) & used_at_once(statement.node))


def used_at_once(node: ast.stmt) -> set[str]:
    """Return the module's names that a statement looks up when it is executed, not in functions that run later."""
    codes: list[types.CodeType] = [compile(ast.Module([node], []), "", "exec", flags=ANNOTATIONS, dont_inherit=True)]
    names = set()
    for code in codes:  # grows
        for each in [each for each in code.co_consts if isinstance(each, types.CodeType)]:
            is_class = not each.co_flags & inspect.CO_OPTIMIZED
            codes += [each] * (is_class or each.co_name.startswith("<") and each.co_name != "<lambda>")
        steps = [*dis.get_instructions(code)]
        stored = {step.argval for step in steps if step.opname == "STORE_NAME" and code is not codes[0]}  # a class's
        names |= {step.argval for step in steps if step.opname in ("LOAD_NAME", "LOAD_GLOBAL")} - stored
    return names
