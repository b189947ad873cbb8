"""README's answer is what the program of course_lib.best_config says, and its command, which docs/planner.md repeats; a
failure prints what it should have. CPU.
"""

import re
import shlex
from pathlib import Path

import pytest

from course_lib.best_config.answer_text import in_lines
from course_lib.best_config.program import as_text, main

PROGRAM = "$ python -m course_lib.best_config "
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = README[README.index(PROGRAM) :].split("```")[0]
ANSWER = BLOCK.removeprefix(PROGRAM).strip().splitlines()
ROWS = 4  # of the table


def excerpt(command: str) -> list[str]:
    """What README shows of an answer: the head and the first rows of its first table."""
    lines = as_text(main(shlex.split(command))).splitlines()
    head = next(at for at, line in enumerate(lines) if line.startswith("  tokens/s"))
    return [command, *lines[head : head + 2 + ROWS]]


def figure(word: str) -> float | None:
    """62.7, 577,807 or +16.2% as a number; None for a word that is no number."""
    found = re.fullmatch(r"\(?([+-]?[\d,]+(\.\d+)?)%?[);:,]*", word)
    return float(found[1].replace(",", "")) if found else None


def alike(line: str, other: str) -> bool:
    """Whether two lines have the same words, and figures within a hundredth, or one of their last digits."""
    pairs = list(zip(line.split(), other.split(), strict=False))
    same = (one == two or None not in (a := figure(one), b := figure(two)) and abs(a - b) <= max(0.1, abs(a) / 100)
            for one, two in pairs)  # fmt: skip
    return len(line.split()) == len(other.split()) and all(same)


def test_the_answer_in_readme_is_the_programs():
    """Layouts and words to the letter."""
    expected = excerpt(ANSWER[0])
    if len(expected) != len(ANSWER) or not all(map(alike, ANSWER, expected)):
        pytest.fail("README should have:\n\n" + PROGRAM + "\n".join(expected), pytrace=False)


@pytest.mark.parametrize("page", ["README.md", "docs/planner.md"])
def test_the_command_is_the_programs(page):
    command = in_lines(main(shlex.split(ANSWER[0]))["launch"]["command"])
    if command not in (ROOT / page).read_text(encoding="utf-8"):
        pytest.fail(f"{page} should have:\n\n{command}", pytrace=False)
