"""Wrong and right answers as they are written in `wrong_answers/NN.py` and `right_answers/NN.py`.

    # %% 04.6 forgets the flag
    self.flags[i] = 0 =>

    # %% 04.6 sends a copy, and counts none
    self.outgoing() => self.outgoing().clone()
    fill_(1) => fill_(0)
    ---
    elif parameter in self.missing:
        self.views[parameter].zero_()
    =>
    else:
        self.views[parameter].zero_()

    # %% 04.6 returns at once
    def launch(self: Bucket):
        self.work = None

A heading has the exercise and what is wrong with the answer, or what is other about it. Below it stands the whole
answer, or what is changed in the notebook's solution:

- `old => new` changes a part of a line, `old =>` takes it out, and the line with it if nothing is left. A line each.
- Whole lines, old ones, `=>`, and new ones. How far they are indented together does not matter; the new ones move with
  the old ones. A line `---` ends such a change where another one follows.
- What is old stands once in the exercise's cells: in any of them, where there are several. All of it is sought in the
  solution as it is, so changes do not meet. `    def launch` or an import before it are lines like others.
- A whole answer is text that Python can read, with arrows in strings alone. Each function and class takes the place of
  the solution's of that name, in whichever cell that is; what it leaves out stays. Imports and helpers come along with
  the definition below them. If it has none of the solution's definitions, it is all that the exercise's one cell holds,
  but for the directive.
"""

import ast
import io
import re
import textwrap
import tokenize
from pathlib import Path
from typing import NamedTuple

from course_kit.exercises.cells import DEFINITIONS, MARKER, is_exported
from course_kit.exercises.cells import first_line as start_of

FEWEST = {"wrong": 3, "right": 1}
HEADING = re.compile(r"^# %% (\d\d\.\d+) (\S.*)$")
ARROW, RULE = "=>", "---"


class AnswerError(ValueError):
    """An answer that cannot be made of what is written; the message is one line for its author."""


class Change(NamedTuple):
    """A change of a solution."""

    old: str
    new: str
    whole_lines: bool


class Place(NamedTuple):
    """Where a change goes: characters of a cell."""

    cell: int
    start: int
    end: int
    new: str


def read_answers(file: Path, names: list[str], kind: str) -> tuple[dict[str, list[tuple[str, str]]], list[str]]:
    """The wrong or right answers of a file as they are written, as (what is wrong or other, text), by exercise; and
    what is the matter with the file.
    """
    answers, faults = {name: [] for name in names}, []
    if not file.exists():
        missing = [f"{file.name} is missing: it holds the wrong answers that the checks must catch"]
        return answers, missing if kind == "wrong" else []
    for block in re.split(r"(?m)^(?=# %%)", file.read_text(encoding="utf-8"))[1:]:
        heading, _, text = block.partition("\n")
        found = HEADING.match(heading)
        if not found:
            faults.append(f"{file.name}: '{heading}' is no heading such as '# %% 01.2 counts the head twice'")
        elif found[1] not in answers:
            faults.append(f"{file.name}: there is no exercise {found[1]}")
        else:
            answers[found[1]].append((found[2], text.strip("\n").rstrip()))
    few = {name: len(given) for name, given in answers.items() if len(given) < (least := FEWEST[kind])}
    return answers, faults + [f"{name} has {n} {kind} answers; it needs {least} or more" for name, n in few.items()]


def solution(source: str) -> str:
    """An exercise's cell without the marks of its solution."""
    return "\n".join(line for line in source.split("\n") if not MARKER.match(line))


def expanded(text: str, cells: list[str]) -> list[str]:
    """The cells of an answer: those of the solution, changed as `text` says. Raises AnswerError with one line."""
    cells = [solution(cell) for cell in cells]
    if is_whole(text):
        return whole_answer(text, cells)
    places = sorted(place_of(change, cells) for change in changes(text))
    for one, other in zip(places, places[1:], strict=False):
        if one.cell == other.cell and one.end > other.start:
            raise AnswerError(f"two changes meet: one begins in '{first_line(cells[one.cell][other.start :])}'")
    for place in reversed(places):
        cell = cells[place.cell]
        cells[place.cell] = cell[: place.start] + place.new + cell[place.end :]
    return cells


def is_whole(text: str) -> bool:
    """Whether a text is a whole answer: one that Python can read, but for arrows in comments, or without any arrow."""
    if ARROW not in text:
        return True
    try:
        ast.parse(text)
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (SyntaxError, tokenize.TokenError):
        return False
    return not any(ARROW in token.string for token in tokens if token.type == tokenize.COMMENT)


def changes(text: str) -> list[Change]:
    """The changes that an answer consists of."""
    found = []
    for part in re.split(rf"(?m)^{RULE}[ ]*$", text):
        lines = [line.rstrip() for line in part.strip("\n").rstrip().split("\n")]
        if ARROW in (bare := [line.strip() for line in lines]):
            if bare.count(ARROW) > 1:
                raise AnswerError(f"two lines '{ARROW}' in one change: a line '{RULE}' ends a change")
            middle = bare.index(ARROW)
            old, new = ("\n".join(each).strip("\n") for each in (lines[:middle], lines[middle + 1 :]))
            if not old:
                raise AnswerError(f"nothing stands before '{ARROW}'")
            found.append(Change(old, new, True))
            continue
        for line in filter(None, bare):
            old, arrow, new = f"{line} ".partition(f" {ARROW} ")
            if not arrow or not old.strip():
                raise AnswerError(f"'{line}' is no change such as 'old {ARROW} new'")
            found.append(Change(old, new.strip(), False))
    return found


def place_of(change: Change, cells: list[str]) -> Place:
    """The one place of what a change replaces."""
    find = lines_in if change.whole_lines else parts_in
    places = [place for number, cell in enumerate(cells) for place in find(change, cell, number)]
    if len(places) != 1:
        more = " and what follows it" if "\n" in change.old else ""
        count = f"{len(places)} times" if places else "nowhere"
        raise AnswerError(f"'{first_line(change.old)}'{more} stands {count} in the solution")
    return places[0]


def first_line(text: str) -> str:
    return text.strip().split("\n")[0]


def parts_in(change: Change, cell: str, number: int) -> list[Place]:
    """The places of a part of a line. Taken out, it takes its line along, or blanks before it at the end of one."""
    found = []
    for match in re.finditer(f"(?={re.escape(change.old)})", cell):
        start, end = match.start(), match.start() + len(change.old)
        if not change.new:
            line_start, line_end = cell.rfind("\n", 0, start) + 1, cell.find("\n", end)
            line_end = len(cell) if line_end < 0 else line_end
            if not (cell[line_start:start] + cell[end:line_end]).strip():
                start, end = whole_lines(cell, line_start, line_end + 1)
            elif not cell[end:line_end].strip():
                start = line_start + len(cell[line_start:start].rstrip())
        found.append(Place(number, start, end, change.new))
    return found


def indent(text: str) -> int:
    """How far all lines of a text are indented, blank ones left out."""
    return min((len(line) - len(line.lstrip()) for line in text.split("\n") if line.strip()), default=0)


def lines_in(change: Change, cell: str, number: int) -> list[Place]:
    """The places of whole lines."""
    lines, wanted, found = cell.split("\n"), textwrap.dedent(change.old).split("\n"), []
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    for first in range(len(lines) - len(wanted) + 1):
        there = "\n".join(lines[first : first + len(wanted)])
        if [line.rstrip() for line in textwrap.dedent(there).split("\n")] != wanted:
            continue
        moved = indent(there) - indent(change.old)
        new = [moved_line(line, moved) for line in change.new.split("\n")] if change.new else []
        start, end = starts[first], starts[first + len(wanted)]
        if new:
            found.append(Place(number, start, end - 1, "\n".join(new)))
        else:
            found.append(Place(number, *whole_lines(cell, start, end), ""))
    return found


def whole_lines(cell: str, start: int, end: int) -> tuple[int, int]:
    """Lines with the line end that goes with them: theirs, or at the end of a cell the one before them."""
    return (start, end) if end <= len(cell) else (max(start - 1, 0), len(cell))


def moved_line(line: str, columns: int) -> str:
    """A line moved to the right, or to the left."""
    bare = line.lstrip()
    place = len(line) - len(bare) + columns
    if bare and place < 0:
        raise AnswerError(f"'{bare}' stands too far to the left: new lines move with the old ones")
    return bare and " " * place + bare


def whole_answer(text: str, cells: list[str]) -> list[str]:
    """The cells of an answer that is written whole."""
    ours = [spans(cell) for cell in cells]
    try:
        theirs = {name: span for name, span in spans(text).items() if any(name in each for each in ours)}
    except SyntaxError:  # it will say so when it runs
        theirs = {}
    if not theirs:
        if len(cells) > 1:
            raise AnswerError("it defines nothing of what the exercise's cells define")
        return [f"{directive(cells[0])}\n{text}".lstrip("\n")]
    lines, start, parts = text.split("\n"), 0, {}
    for name, (_, end) in theirs.items():
        parts[name], start = lines[start:end], end
    parts[name] += lines[start:]
    found = []
    for cell, there in zip(cells, ours, strict=True):
        lines = cell.split("\n")
        for name, (start, end) in reversed(there.items()):
            lines[start:end] = parts.get(name, lines[start:end])
        found.append("\n".join(lines))
    return found


def spans(text: str) -> dict[str, tuple[int, int]]:
    """The lines of the functions and classes at the top level of a text, decorators included: from, up to."""
    nodes = [node for node in ast.parse(text).body if isinstance(node, DEFINITIONS)]
    return {node.name: (start_of(node) - 1, node.end_lineno) for node in nodes}


def directive(cell: str) -> str:
    """The line that says where a cell goes; "" for a cell that is not exported."""
    line = cell.split("\n")[0].rstrip()
    return line if is_exported(line) else ""
