"""Which cells of a notebook a check depends on: those that bind what it names, what these cells name, and so on.

A function looks its names up when it is called: what its body names is sought before the cell that uses the function,
and before the check, which may hold an object with such methods. A cell that sets an attribute or an item of a needed
object, or calls a method of it as a statement, is needed too. What a cell reaches in another way (`globals()`, a file)
is not seen: the check fails then, in a kernel that never ran that cell.
"""

import ast
import dis
import inspect
from functools import cache
from types import CodeType

LOADS, STORES = ("LOAD_NAME", "LOAD_GLOBAL"), ("STORE_NAME", "STORE_GLOBAL")
DRAWS = "figures", "widgets"  # how the names of modules that draw end: they change nothing that a check could need


def compiled(source: str) -> CodeType | None:
    """The code of a cell; None where it is not Python, or wrong: it will say so when it runs."""
    try:
        return compile(source, "cell", "exec")
    except SyntaxError:
        return None


def named_in(code: CodeType, operations: tuple[str, ...]) -> set[str]:
    """What the instructions of one code object, not of those inside it, load or store."""
    return {one.argval for one in dis.get_instructions(code) if one.opname in operations}


@cache
def bound_names(source: str) -> set[str]:
    """The names that a cell binds."""
    code = compiled(source)
    return named_in(code, STORES) if code else set()


@cache
def used_names(source: str) -> tuple[set[str], set[str]]:
    """The names that a cell looks up when it runs and has not bound by then, and those that its functions look up when
    they are called.

    A comprehension may be a function of its own and runs with its cell: what functions name counts as both, unless the
    cell itself binds it.
    """
    now, inner, later, bound = set(), set(), set(), set()

    def visit(code: CodeType, in_function: bool) -> None:
        in_function = in_function or bool(code.co_flags & inspect.CO_OPTIMIZED)
        names = named_in(code, LOADS)
        inner.update(names)
        later.update(names if in_function else ())
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                visit(constant, in_function)

    if code := compiled(source):
        for one in dis.get_instructions(code):  # in the order of the text
            if one.opname in LOADS and one.argval not in bound:
                now.add(one.argval)
            elif one.opname in STORES:
                bound.add(one.argval)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                visit(constant, False)
    return now | inner - bound, later


@cache
def changed_names(source: str) -> set[str]:
    """The names whose objects a cell changes without binding them: `x.a = 1`, `x[0] += 1`, `x.append(1)`."""
    found = set()

    def root(node) -> None:
        while isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        found.update({node.id} if isinstance(node, ast.Name) else ())

    def visit(node) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef | ast.Lambda):
                continue
            if isinstance(child, ast.Attribute | ast.Subscript) and not isinstance(child.ctx, ast.Load):
                root(child)
            called = child.value.func if isinstance(child, ast.Expr) and isinstance(child.value, ast.Call) else None
            if isinstance(called, ast.Attribute):
                root(called)
            visit(child)

    if compiled(source):
        visit(ast.parse(source))
    return {name for name in found if not name.endswith(DRAWS)}


def needed_cells(sources: list[str], check: int, variants: dict[int, list[str]]) -> set[int]:
    """The numbers of the cells before `check`, and its own, that it depends on.

    `variants`: other sources of a cell, such as wrong answers, which may use other names.
    """
    used, bound, changed = {}, {}, {}
    for number in range(check + 1):
        every = [sources[number], *variants.get(number, [])]
        used[number] = [set().union(*names) for names in zip(*map(used_names, every), strict=True)]
        bound[number] = set().union(*map(bound_names, every))
        changed[number] = changed_names(sources[number])

    needed, seen = {check}, set()
    queue = [(name, check) for name in used[check][0]]
    while queue:
        name, before = queue.pop()
        if (name, before) in seen:
            continue
        seen.add((name, before))
        found = []
        for number in range(before - 1, -1, -1):
            if name in bound[number]:
                found.append(number)
                break
            if name in changed[number]:
                found.append(number)
        else:
            continue  # a built-in, or bound nowhere: what only changes it is no cell of ours
        for number in found:
            needed.add(number)
            now, later = used[number]
            queue += [(other, number) for other in now]
            queue += [(other, when) for other in later for when in (before, check)]
    return needed
