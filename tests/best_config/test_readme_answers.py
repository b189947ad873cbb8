"""README's answers are what the program of course_lib.best_config says. CPU."""

import re
import shlex
from pathlib import Path

import pytest

from course_lib.best_config.program import as_text, main

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BLOCK = README[README.index("$ python -m course_lib.best_config") :].split("```")[0]
ANSWERS = [answer.strip().splitlines() for answer in BLOCK.split("$ python -m course_lib.best_config")[1:]]


def figure(word: str) -> float | None:
    """62.7, 577,807 or +16.2% as a number; None where a word is none."""
    found = re.fullmatch(r"([+-]?[\d,]+(\.\d+)?)%?:?,?", word)
    return float(found[1].replace(",", "")) if found else None


def alike(line: str, other: str) -> bool:
    """The same words, and figures within a hundredth, or one of their last digits."""
    pairs = list(zip(line.split(), other.split(), strict=False))
    same = (one == two or None not in (a := figure(one), b := figure(two)) and abs(a - b) <= max(0.1, abs(a) / 100)
            for one, two in pairs)  # fmt: skip
    return len(line.split()) == len(other.split()) and all(same)


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer[0].split("--preset ")[1])
def test_an_answer_in_readme_is_the_programs(answer):
    """Layouts and words to the letter."""
    command, *lines = answer
    first, *rest = as_text(main(shlex.split(command))).splitlines()[4:]
    rows = [line for line in lines if "a GPU  " not in line and "MFU" not in line and line]
    assert len(ANSWERS) == 3 and alike(rows[0], first), (rows[0], first)
    for line in rows[1:]:
        assert any(alike(line, each) for each in rest), line
