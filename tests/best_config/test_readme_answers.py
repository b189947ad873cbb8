"""README's answers are what the program of course_lib.best_config says; a failure prints the text that README should
have. CPU.
"""

import re
import shlex
from pathlib import Path

import pytest

from course_lib.best_config.program import as_text, main

PROGRAM = "$ python -m course_lib.best_config "
README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BLOCK = README[README.index(PROGRAM) :].split("```")[0]
ANSWERS = [answer.strip().splitlines() for answer in BLOCK.split(PROGRAM)[1:]]
SHOWN = (
    "no run has tested",
    "a better job size",
    "not allowed",
    "allowed",
    "compared with the first answer",
    "uncommon",
)
SHOWN += ("  with ", "  on ", "  fits ", "without any overlap", "with fused kernels")
ROWS = 3  # of a table


def excerpt(command: str) -> list[str]:
    """What README shows of an answer: the head and three rows of its first table, the first row of what is too risky,
    and lines that begin with one of SHOWN.
    """
    lines = as_text(main(shlex.split(command))).splitlines()
    head = next(at for at, line in enumerate(lines) if line.startswith("  tokens/s"))
    end = next(at for at in range(head, len(lines)) if not re.match(" +([\\d,]+ |tokens/s|per GPU)", lines[at]))
    found = [command, *lines[head : min(end, head + 2 + ROWS)]]
    for at, line in enumerate(lines):
        found += [line] if line.startswith(SHOWN) else []
        found += lines[at : at + 2] if line.startswith("faster by estimate") else []
    return found


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


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer[0].split("--preset ")[1])
def test_an_answer_in_readme_is_the_programs(answer):
    """Layouts and words to the letter."""
    expected = excerpt(answer[0])
    same = len(expected) == len(answer) and all(map(alike, answer, expected))
    assert len(ANSWERS) == 4
    if not same:
        pytest.fail("README should have:\n\n" + PROGRAM + "\n".join(expected), pytrace=False)
