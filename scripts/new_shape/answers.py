"""Write the wrong and right answers of a notebook that has moved to the new shape in their new form.

    python scripts/new_shape/answers.py 06 [TABLE]

A step of the move; it goes once all notebooks have moved. Until now an answer was the whole source of the exercise's
cell; from here on it is what is changed in the solution (tests/scripts/written_answers.py). The answers are those of
BEFORE, the solutions those of the notebook as it is now. Each is written as the shortest changes that stand once in the
solution, or whole where these would be longer than MOST of it.

A file that is in the new form already, or was changed since BEFORE, stays as it is.

Each answer is then expanded again, and every function of it compared with the function it was: the same AST, but for
docstrings, annotations that an answer has left out, and imports of the module. What could not be kept is printed, and
written to TABLE: an answer that changed what the library gives now goes, or loses that part. Those in `by_hand/` are
taken from there: most of them called the library's own function, and would call themselves now.
"""

import ast
import builtins
import copy
import difflib
import dis
import json
import re
import subprocess
import sys
import textwrap
import types
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "tests/scripts")]
from course_kit.exercises.cells import DEFINITIONS, EXPORT, bound, first_line  # noqa: E402
from course_kit.exercises.fits import ANNOTATIONS, static_names  # noqa: E402
from course_kit.exercises.saved import exercise_cells  # noqa: E402
from export import LIBRARY, NOTEBOOKS, ROOT, program_of, read_notebook  # noqa: E402
from written_answers import ARROW, HEADING, RULE, AnswerError, directive, expanded, solution  # noqa: E402

BEFORE = "4081eda"  # the commit whose notebooks and answers are the old ones
MOST = 0.6
WIDTH = 120  # of a line in a file of answers
SHORT = 40  # characters of a line that is changed as a whole
LEAST_ALIKE = 0.5  # of two lines, one of which is a change of the other

Key = tuple[str | None, str]  # class, name

# Functions of exercises that have another name now.
RENAMED = {"06.5": {("RowParallelLinear", "forward"): ("RowParallelLinear", "forward_at_once")}}


@dataclass
class Def:
    """A function, method or class as it is written, not indented."""

    node: ast.stmt
    text: str

    @property
    def body(self) -> list[ast.stmt]:
        """Its statements, the docstring left out."""
        return self.node.body[1:] if ast.get_docstring(self.node) is not None else self.node.body


@dataclass
class Source:
    """The text of an exercise's cell, or of an answer, in pieces."""

    defs: dict[Key, Def] = field(default_factory=dict)
    bases: dict[str, str] = field(default_factory=dict)  # of its classes
    others: list[tuple[ast.stmt, str]] = field(default_factory=list)  # imports, constants
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)


def git(path: str) -> str:
    return subprocess.run(
        ["git", "show", f"{BEFORE}:{path}"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def renamed(source: Source, exercise: str) -> Source:
    """An old answer, or solution, with the names of now."""
    for key, new in RENAMED.get(exercise, {}).items():
        if found := source.defs.get(key):
            text = found.text.replace(f"def {key[1]}(", f"def {new[1]}(", 1)
            other = Def(ast.parse(text).body[0], text)
            source.defs = dict((new, other) if each is found else (k, each) for k, each in source.defs.items())
    return source


def read(text: str, cls: str | None = None) -> Source:
    """A text in pieces. cls: the class whose methods its functions are."""
    lines, found = text.split("\n"), Source()

    def piece(node: ast.stmt) -> Def:
        return Def(node, textwrap.dedent("\n".join(lines[first_line(node) - 1 : node.end_lineno])))

    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            found.bases[node.name] = ", ".join(map(ast.unparse, node.bases))
            found.classes[node.name] = node
            for each in node.body:
                if isinstance(each, DEFINITIONS):
                    found.defs[node.name, each.name] = piece(each)
        elif isinstance(node, DEFINITIONS):
            found.defs[cls, node.name] = piece(node)
        else:
            found.others.append((node, "\n".join(lines[node.lineno - 1 : node.end_lineno])))
    return found


def plain(node: ast.stmt, cls: str | None) -> ast.stmt:
    """A definition without docstrings and without annotations, but those that Triton reads."""
    node = copy.deepcopy(node)
    for each in ast.walk(node):
        if isinstance(each, DEFINITIONS):
            if ast.get_docstring(each) is not None:
                each.body = each.body[1:] or [ast.Pass()]
        if isinstance(each, ast.FunctionDef):
            each.returns = None
        if isinstance(each, ast.arg) and "constexpr" not in ast.unparse(each.annotation or ast.Constant(0)):
            each.annotation = None
    return node


def dump(each: Def | None, cls: str | None = None) -> str:
    return ast.dump(plain(each.node, cls)) if each else ""


def imports_of(text: str) -> set[str]:
    """What a module, or a cell, imports at its top: a line for each name."""
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
    return {line for node in nodes for line in single_imports(node)}


def single_imports(node: ast.Import | ast.ImportFrom) -> list[str]:
    copies = [copy.copy(node) for _ in node.names]
    for each, name in zip(copies, node.names):
        each.names = [name]
    return list(map(ast.unparse, copies))


def free_names(each: Def) -> set[str]:
    """The names that a function looks up in its module."""
    codes = [compile(ast.Module([each.node], []), "answer", "exec", flags=ANNOTATIONS, dont_inherit=True)]
    for code in codes:  # grows
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return {step.argval for code in codes[1:] for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}


def without_docstrings(text: str) -> str:
    """A definition without docstrings, and those of its methods."""
    node, lines = ast.parse(text).body[0], text.split("\n")
    for each in reversed([node, *(node.body if isinstance(node, ast.ClassDef) else ())]):
        if isinstance(each, DEFINITIONS) and ast.get_docstring(each) is not None and len(each.body) > 1:
            end = each.body[0].end_lineno
            end += end < len(lines) and not lines[end].strip()
            del lines[each.body[0].lineno - 1 : end]
    return "\n".join(lines)


def code_of(line: str) -> str:
    """A line without a comment at its end."""
    return re.sub(r"\s+# .*$", "", line).rstrip()


class Converter:
    """Converts the answers to one exercise."""

    def __init__(self, exercise: str, old: str, cells: list[str]):
        self.exercise, self.cells = exercise, [solution(cell) for cell in cells]
        self.old = renamed(read(solution(old)), exercise)
        self.targets = [EXPORT.match(directive(cell)) for cell in self.cells]
        self.new = [read(cell, target and target["cls"]) for cell, target in zip(self.cells, self.targets)]
        self.of_cell = {key: number for number, source in enumerate(self.new) for key in source.defs}
        self.at_hand = set(dir(builtins))  # names that the modules have
        self.known = set().union(*map(imports_of, [solution(old), *self.cells]))
        for target in filter(None, self.targets):
            text = LIBRARY.joinpath(*target["module"].split(".")).with_suffix(".py").read_text(encoding="utf-8")
            self.known |= imports_of(text)
            self.at_hand |= static_names(ast.parse(text))
        self.remarks: list[str] = []

    def import_of(self, name: str) -> str | None:
        """An import of a name that stood in the notebook, and that the exercise's module has not."""
        if name in sys.stdlib_module_names:
            return f"import {name}"
        packages = list(dict.fromkeys(target["module"].split(".")[0] for target in filter(None, self.targets)))
        files = [file for package in packages for file in sorted((LIBRARY / package).glob("*.py"))]
        labs = ROOT / "course_kit" / "labs"
        for package in packages:
            files += sorted([*labs.glob(f"{package}.py"), *labs.glob(f"{package}/*.py")])
        for file in files:
            nodes = ast.parse(file.read_text(encoding="utf-8")).body
            if name in {each for node in nodes if not isinstance(node, ast.ImportFrom) for each in bound(node)}:
                module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
                return f"from {module} import {name}"
        return None

    def converted(self, text: str) -> str | None:
        """An answer in the new form; None for one that has nothing to change any more. `remarks` says what was lost."""
        self.remarks = []
        try:
            answer = renamed(read(text), self.exercise)
        except SyntaxError:
            return text
        if not self.of_cell:  # a value: as short as it is
            return self.best([text], [text])
        wanted = self.wanted(answer)
        given = [key for key in answer.defs if key in self.old.defs and key not in self.of_cell]
        given = [key for key in given if dump(answer.defs[key]) != dump(self.old.defs[key])]
        if given:
            names = " and ".join(name for _, name in given)
            self.remarks.append(f"changes {names}, which the library gives now")
            if any(cls for cls, _ in given) or not wanted:
                return None
            self.remarks[-1] += ": that part goes"
        if not wanted:
            return None
        extra = self.extra(answer, wanted)
        cells = [self.cell_with(number, wanted, extra) for number in range(len(self.cells))]
        return self.best(cells, [self.whole(wanted, extra)])

    def wanted(self, answer: Source) -> dict[Key, Def]:
        """The answer's definitions that are not the solution's, and methods that it adds."""
        found, self.bases, self.trimmed = {}, {}, {}
        for key, each in answer.defs.items():
            cls, name = key
            if key not in self.of_cell:
                if key in self.old.defs or cls is None:
                    continue
                self.remarks.append(f"adds the method {name}")
                found[key] = each
                continue
            each = self.without_given(key, each)
            there = self.new[self.of_cell[key]].defs[key]
            if dump(each) != dump(there):
                found[key] = each
        for cls, base in answer.bases.items():
            if "course_lib." not in base and cls in self.old.bases and base != self.old.bases[cls]:
                self.bases[cls] = base
                if not any(cls in source.classes for source in self.new):
                    self.remarks.append(f"its class derived from {base}")
        return found

    def without_given(self, key: Key, each: Def) -> Def:
        """A definition without statements of the old solution that the new one has not: the library has them now."""
        old, new = self.old.defs.get(key), self.new[self.of_cell[key]].defs[key]
        if old is None:
            return each
        there = {ast.dump(node) for node in old.body} - {ast.dump(node) for node in new.body}
        moved = [node for node in each.body if ast.dump(node) in there]
        still = [node for node in each.body if ast.dump(node) not in there]
        if not moved or dump(old) == dump(new) or not still:
            return each
        lines, top = each.text.split("\n"), first_line(each.node)
        for node in reversed(moved):
            del lines[node.lineno - top : node.end_lineno - top + 1]
        self.remarks.append(f"{key[1]} without what the library does before it")
        text = "\n".join(lines)
        self.trimmed[key] = Def(ast.parse(text).body[0], text)
        return self.trimmed[key]

    def extra(self, answer: Source, wanted: dict[Key, Def]) -> list[str]:
        """Lines above the definitions: imports, constants and functions that they use and the solution has not."""
        used = {node.id for each in wanted.values() for node in ast.walk(each.node) if isinstance(node, ast.Name)}
        found = []
        for (cls, name), each in answer.defs.items():
            if cls is None and (cls, name) not in self.of_cell and (cls, name) not in self.old.defs and name in used:
                self.remarks.append(f"has a function {name} of its own")
                used |= {node.id for node in ast.walk(each.node) if isinstance(node, ast.Name)}
                found.append(each.text)
        for node, text in reversed(answer.others):
            if isinstance(node, ast.Import | ast.ImportFrom):
                lines = [line for line in single_imports(node) if line not in self.known]
                names = [re.split(r"\W", line.split(" as ")[-1].split("import ")[-1])[0] for line in lines]
                found[:0] = [line for line, name in zip(lines, names) if name in used - self.at_hand]
            elif not any(ast.dump(node) == ast.dump(other) for other, _ in self.old.others):
                names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and each.id in used}
                if names and ("course_lib." not in text):
                    self.remarks.append(f"has '{text.splitlines()[0]}' of its own")
                    found.insert(0, text)
        if all(self.targets):
            own = {each for text in found for node in ast.parse(text).body for each in bound(node)}
            own |= {each.name for each in map(lambda each: each.node, wanted.values())}
            for name in sorted(set().union(*map(free_names, wanted.values())) - own - self.at_hand):
                if line := self.import_of(name):
                    found.insert(0, line)
                else:
                    self.remarks.append(f"names {name}, which its module has not")
        return found

    def head(self, key: Key, each: Def) -> str:
        """A definition as a cell has it: a method says whose it is."""
        cls, _ = key
        number = self.of_cell.get(key, next((self.of_cell[other] for other in self.of_cell if other[0] == cls), 0))
        if not cls or cls in self.new[number].classes:
            return each.text
        first = next(iter(each.node.args.args), None)
        if first is None or first.arg not in ("self", "cls") or first.annotation:
            return each.text
        return re.sub(rf"(def {each.node.name}\(\s*{first.arg})\b", rf"\1: {cls}", each.text, count=1)

    def merged(self, key: Key, each: Def) -> str:
        """A definition with the solution's signature, docstring and comments where they say the same."""
        there = self.new[self.of_cell[key]].defs[key]
        text, lines = self.head(key, each), there.text.split("\n")
        node = ast.parse(text).body[0]
        theirs = text.split("\n")
        same_head = ast.dump(plain(ast.parse(text).body[0], None).args) == ast.dump(plain(there.node, None).args)
        same_head &= list(map(ast.dump, node.decorator_list)) == list(map(ast.dump, there.node.decorator_list))
        top = first_line(there.node)
        if same_head:
            start = there.body[0].lineno - top if there.body else len(lines)
            head = lines[:start]
        else:
            head = theirs[: node.body[0].lineno - 1]
            if ast.get_docstring(there.node) is not None:
                head += lines[there.node.body[0].lineno - top : there.node.body[0].end_lineno - top + 1]
        body = Def(node, text).body
        theirs = theirs[body[0].lineno - 1 :] if body else []
        ours = lines[there.body[0].lineno - top :] if there.body else []
        match = difflib.SequenceMatcher(None, list(map(code_of, ours)), list(map(code_of, theirs)), autojunk=False)
        for a, b, size in match.get_matching_blocks():
            theirs[b : b + size] = ours[a : a + size]
        return "\n".join(head + theirs)

    def cell_with(self, number: int, wanted: dict[Key, Def], extra: list[str]) -> str:
        """A cell of the solution with these definitions in it."""
        source, lines = self.new[number], self.cells[number].split("\n")
        edits = []
        for key, each in wanted.items():
            cls, name = key
            if self.of_cell.get(key) == number:
                node = source.defs[key].node
                indent = " " * node.col_offset
                edits.append((first_line(node) - 1, node.end_lineno, textwrap.indent(self.merged(key, each), indent)))
            elif key not in self.of_cell and any(self.of_cell[k] == number for k in self.of_cell if k[0] == cls):
                text = self.head(key, each)
                if cls in source.classes:
                    end = source.classes[cls].end_lineno
                    edits.append((end, end, "\n" + textwrap.indent(text, "    ")))
                else:
                    edits.append((len(lines), len(lines), "\n\n" + text))
        if extra and edits:
            first = min(
                first_line(node) for node in ast.parse(self.cells[number]).body if isinstance(node, DEFINITIONS)
            )
            edits.append((first - 1, first - 1, "\n".join(spaced(extra))))
        for cls in source.classes.keys() & self.bases.keys() & {cls for cls, _ in wanted}:
            place = source.classes[cls].lineno - 1
            head = f"class {cls}({source.bases[cls]}):"
            edits.append((place, place + 1, lines[place].replace(head, f"class {cls}({self.bases[cls]}):")))
        for start, end, text in sorted(edits, key=lambda edit: edit[0], reverse=True):
            lines[start:end] = text.split("\n")
        return "\n".join(lines)

    def whole(self, wanted: dict[Key, Def], extra: list[str]) -> str:
        """The answer written whole: the definitions that it changes, a class with all of its methods."""
        texts, done = [], set()
        for key, each in wanted.items():
            cls, _ = key
            number = self.of_cell.get(key, 0)
            if cls is None or cls not in self.new[number].classes:
                texts.append(self.head(key, each))
            elif cls not in done:
                done.add(cls)
                cell = self.cell_with(number, {k: v for k, v in wanted.items() if k[0] == cls}, [])
                node = read(cell).classes[cls]
                texts.append("\n".join(cell.split("\n")[first_line(node) - 1 : node.end_lineno]))
        texts = list(map(without_docstrings, texts))
        return "\n\n\n".join(["\n".join(spaced(extra)).strip("\n"), *texts] if extra else texts)

    def best(self, cells: list[str], whole: list[str]) -> str:
        """The changes that make `cells` of the solution, or the whole text where they are not much shorter."""
        (text,) = whole
        try:
            changed = changes_between(self.cells, cells)
            if len(changed) <= MOST * len(text) and expanded(changed, self.cells) == cells:
                return changed
        except AnswerError:  # no changes that stand once
            pass
        return text

    def differences(self, old: str, new: str) -> list[str]:
        """The functions of an answer that are not what they were; `new` is its new form."""
        try:
            answer = renamed(read(old), self.exercise)
        except SyntaxError:
            return []
        cells = expanded(new, self.cells)
        if not self.of_cell:
            same = ast.dump(ast.parse(cells[0])) == ast.dump(ast.parse(old))
            return [] if same else ["the text"]
        found = {}
        for cell, target in zip(cells, self.targets):
            found |= read(cell, target and target["cls"]).defs
        bases = {name: base for cell in cells for name, base in read(cell).bases.items()}
        other = [name for name, base in self.bases.items() if bases.get(name, base) != base]
        return other + [
            name
            for (cls, name), each in answer.defs.items()
            if ((cls, name) in self.of_cell or (cls, name) not in self.old.defs)
            and dump(found.get((cls, name)) or found.get((None, name)) or self.anywhere(cells, name))
            != dump(self.trimmed.get((cls, name), each))
        ]

    @staticmethod
    def anywhere(cells: list[str], name: str) -> Def | None:
        """A helper that came along, wherever it is in the cells."""
        nodes = [node for cell in cells for node in ast.walk(ast.parse(cell)) if getattr(node, "name", None) == name]
        return Def(nodes[0], "") if nodes else None


def spaced(extra: list[str]) -> list[str]:
    """Imports and helpers with blank lines after them."""
    lines = []
    for text in extra:
        lines += [text] if text.startswith(("import ", "from ")) else ["", text, ""]
    return [*lines, "", ""] if lines and lines[-1] else [*lines, ""]


Hunk = tuple[int, int, int, int]


def changes_between(old: list[str], new: list[str]) -> str:
    """The changes that make some cells of others, as an answer writes them."""
    found = []
    for before, after in zip(old, new):
        a, b = before.split("\n"), after.split("\n")
        match = difflib.SequenceMatcher(None, a, b, autojunk=False)
        hunks = [(i1, i2, j1, j2) for tag, i1, i2, j1, j2 in match.get_opcodes() if tag != "equal"]
        found += changes_of(widened(hunks, a, b, old), a, b, old)
    text, was_block = "", False
    for lines, is_block in found:
        rule = text and (is_block or was_block)
        text += f"\n{RULE}\n{lines}" if rule else f"\n{lines}" if text else lines
        was_block = is_block
    return text


def is_once(lines: list[str], cells: list[str]) -> bool:
    """Whether lines stand once in cells, however far they are indented."""
    wanted = textwrap.dedent("\n".join(lines)).split("\n")
    count = 0
    for cell in cells:
        there = cell.split("\n")
        for start in range(len(there) - len(wanted) + 1):
            count += textwrap.dedent("\n".join(there[start : start + len(wanted)])).split("\n") == wanted
    return count == 1 and any(line.strip() for line in lines)


def widened(hunks: list[Hunk], a: list[str], b: list[str], cells: list[str]) -> list[Hunk]:
    """Hunks with as many lines round them as make them stand once; those that touch then are one."""
    found: list[Hunk] = []
    for i1, i2, j1, j2 in hunks:
        while not one_liners(a[i1:i2], b[j1:j2], cells) and not (i2 > i1 and is_once(a[i1:i2], cells)):
            blank_above = i1 > 0 and not a[i1 - 1].strip() or i1 <= 1  # 0: the directive
            if not blank_above or i2 >= len(a):
                i1, j1 = i1 - 1, j1 - 1
            else:
                i2, j2 = i2 + 1, j2 + 1
            if i1 < 0 or i2 > len(a):
                raise AnswerError("a change that stands nowhere once")
        if found and found[-1][1] > i1:
            start = found.pop()
            i1, j1 = min(start[0], i1), min(start[2], j1)
        found.append((i1, i2, j1, j2))
    return found


def changes_of(hunks: list[Hunk], a: list[str], b: list[str], cells: list[str]) -> list[tuple[str, bool]]:
    """Each hunk as it is written, and whether that is a block of whole lines."""
    found = []
    for i1, i2, j1, j2 in hunks:
        old, new = a[i1:i2], b[j1:j2]
        block = "\n".join([*textwrap.dedent("\n".join(old)).split("\n"), ARROW, *moved(old, new)])
        lines = one_liners(old, new, cells)
        if lines and len("\n".join(lines)) <= len(block) and max(map(len, lines)) <= WIDTH:
            found += [(line, False) for line in lines]
        else:
            found.append((block, True))
    return found


def moved(old: list[str], new: list[str]) -> list[str]:
    """New lines as far to the left as the old ones are when these stand at the margin; all of them, if that fits."""
    depth = min(len(line) - len(line.lstrip()) for line in old if line.strip())
    if any(line.strip() and line[:depth].strip() for line in new):
        raise AnswerError("new lines that stand further to the left than the old ones")
    return [line[depth:] for line in new]


def one_liners(old: list[str], new: list[str], cells: list[str]) -> list[str] | None:
    """Changes of parts of lines that make new lines of old ones; None where there are none."""
    if not new and len(old) == 1:
        line = old[0].strip()
        return [f"{line} {ARROW}"] if line and part_is_once(line, cells) else None
    if len(old) != len(new) or not old:
        return None
    found = []
    for one, other in zip(old, new):
        if one == other:
            continue
        if len(one) - len(one.lstrip()) != len(other) - len(other.lstrip()):
            return None
        if difflib.SequenceMatcher(None, one.strip(), other.strip(), autojunk=False).ratio() < LEAST_ALIKE:
            return None
        if not (change := part_change(one, other, cells)):
            return None
        found.append(change)
    return found


def part_is_once(part: str, cells: list[str]) -> bool:
    return sum(len(re.findall(f"(?={re.escape(part)})", cell)) for cell in cells) == 1


def part_change(one: str, other: str, cells: list[str]) -> str | None:
    """The change of a part of a line that makes another line of it: what stands once, and can be read by itself. A
    short line is changed as a whole.
    """
    one, other = one.strip(), other.strip()
    if f" {ARROW} " in one:
        return None
    if len(one) <= SHORT and part_is_once(one, cells):
        return f"{one} {ARROW} {other}"
    a, b = (re.findall(r"\s+|[\w.]+|\W", line) for line in (one, other))  # names with dots are one word
    most = min(len(a), len(b))
    start = next((i for i in range(most) if a[i] != b[i]), most)
    end = next((i for i in range(most - start) if a[-1 - i] != b[-1 - i]), most - start)
    for size in range(len(a) - end - start, len(a) + 1):  # ever more words round the change
        for left in range(max(0, len(a) - end - size), min(start, len(a) - size) + 1):
            right = len(a) - left - size
            old, new = ("".join(each[left : len(each) - right]) for each in (a, b))
            clean = old and old == old.strip() and new == new.strip() and new
            if clean and is_closed(old) and is_closed(new) and part_is_once(old, cells):
                return f"{old} {ARROW} {new}"
    return f"{one} {ARROW} {other}" if part_is_once(one, cells) else None


def is_closed(part: str) -> bool:
    """Whether a part of a line can be read by itself: its brackets are pairs, and it begins and ends with a word."""
    depth = 0
    for character in part:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return False
    ends = re.match(r"[\w\"\[({*-]", part) and re.search(r"[\w\"\])}]$", part)
    return bool(ends) and depth == 0 and part.count('"') % 2 == 0 and len(part) > 2


def convert(chapter: str, table: Path | None) -> int:
    """Convert both files of answers of a notebook. 0: done."""
    (path,) = NOTEBOOKS.glob(f"{chapter}_*.ipynb")
    notebook = read_notebook(path)
    if not program_of(notebook):
        print(f"answers: {path.name} has not moved to the new shape", file=sys.stderr)
        return 2
    old = json.loads(git(f"notebooks/{path.name}"))
    for cell in old["cells"]:
        cell["source"] = "".join(cell["source"])
    return convert_files(chapter, exercise_cells(old), exercise_cells(notebook), table)


def convert_files(chapter: str, old: dict, new: dict, table: Path | None) -> int:
    lines = []
    for kind in ("wrong", "right"):
        file = ROOT / "tests" / f"{kind}_answers" / f"{chapter}.py"
        text = git(file.relative_to(ROOT).as_posix())
        by_hand = written_by_hand(Path(__file__).parent / "by_hand" / f"{kind}_{chapter}.txt")
        top, *blocks = re.split(r"(?m)^(?=# %%)", text)
        written, counts = [top.strip()], {"changes": 0, "whole": 0, "by hand": 0, "gone": 0}
        same = 0
        for block in blocks:
            heading, _, source = block.partition("\n")
            name, what = HEADING.match(heading).groups()
            if name not in new:
                lines.append(f"{kind} {name} {what}: goes, there is no such exercise any more")
                continue
            if (name, what) in by_hand:
                counts["by hand"] += 1
                written.append(f"{heading}\n{by_hand.pop((name, what))}")
                lines.append(f"{kind} {name} {what}: by hand")
                continue
            converter = Converter(name, old[name][0]["source"], [cell["source"] for cell in new[name]])
            found = converter.converted(source.strip("\n").rstrip())
            if found is None:
                counts["gone"] += 1
                lines.append(f"{kind} {name} {what}: goes: {'; '.join(converter.remarks) or 'nothing is changed'}")
                continue
            counts["whole" if found.strip() and is_text(found) else "changes"] += 1
            differ = converter.differences(source, found)
            same += not differ
            remarks = converter.remarks + [f"not the same: {', '.join(differ)}"] * bool(differ)
            if re.search(r"super\(\)\.|course_lib\.[\w.]*\.\w+\(", found):
                remarks.append("LOOK: it may call the library's own, which is the answer's now")
            if remarks:
                lines.append(f"{kind} {name} {what}: {'; '.join(remarks)}")
            written.append(f"{heading}\n{found}")
        written += [f"# %% {name} {what}\n{source}" for (name, what), source in by_hand.items()]
        lines += [f"{kind} {name} {what}: a new one" for name, what in by_hand]
        before = len(text)
        old_text, text = text, "\n\n".join(written) + "\n"
        if file.read_text(encoding="utf-8") == old_text:
            file.write_text(text, encoding="utf-8")
        else:
            print(f"{file.name} of the {kind} answers is not what it was at {BEFORE}: it stays as it is")
        size = f"{before} characters before, {len(text)} now; {same} expand to the functions that they were, by AST"
        lines.append(f"{kind}_answers/{chapter}.py: {', '.join(f'{n} {what}' for what, n in counts.items())}; {size}")
    print("\n".join(lines))
    if table:
        table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


def written_by_hand(file: Path) -> dict[tuple[str, str], str]:
    """The answers of a file by exercise and what they are."""
    blocks = re.split(r"(?m)^(?=# %%)", file.read_text(encoding="utf-8"))[1:] if file.exists() else []
    heads = [block.partition("\n") for block in blocks]
    return {HEADING.match(head).groups(): text.strip("\n").rstrip() for head, _, text in heads}


def is_text(text: str) -> bool:
    """Whether an answer is written whole."""
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        print("usage: python scripts/new_shape/answers.py NN [TABLE]", file=sys.stderr)
        sys.exit(2)
    sys.exit(convert(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) == 3 else None))
