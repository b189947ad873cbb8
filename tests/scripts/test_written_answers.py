"""written_answers.py: what is written of an answer, and the cells that are made of it. Needs no PyTorch."""

import pytest

from written_answers import AnswerError, expanded

CELLS = [
    """#| export a.b:Bucket
def launch(self: Bucket) -> None:
    \"""Start it.\"""
    ### BEGIN SOLUTION
    for i, parameter in enumerate(self.parameters):
        if parameter.grad is None:
            self.flags[i] = 0  # nobody's
    self.work = start(self.sent)
    ### END SOLUTION


def finish(self: Bucket) -> None:
    ### BEGIN SOLUTION
    self.work.wait()
    ### END SOLUTION""",
    """#| export a.b
@jit
def start(tensor):
    ### BEGIN SOLUTION
    return all_reduce(tensor)
    ### END SOLUTION""",
]
FLAG = "            self.flags[i] = 0  # nobody's\n"


def answer(text: str) -> list[str]:
    return expanded(text, CELLS)


def test_parts_of_lines_are_changed_and_taken_out():
    solved = answer("all_reduce => all_reduce")
    assert solved == [
        cell.replace("    ### BEGIN SOLUTION\n", "").replace("\n    ### END SOLUTION", "") for cell in CELLS
    ]
    launch, start = answer("self.flags[i] = 0 => pass\nself.sent => self.sent, None\n\nall_reduce(tensor) => tensor")
    assert launch == solved[0].replace("self.flags[i] = 0", "pass").replace("self.sent", "self.sent, None")
    assert start == solved[1].replace("all_reduce(tensor)", "tensor")
    assert answer("  # nobody's =>")[0] == solved[0].replace("  # nobody's", "")
    assert answer("self.flags[i] = 0  # nobody's =>")[0] == solved[0].replace(FLAG, ""), "with its line"
    assert answer('grad is None: => grad == "a => b":')[0] == solved[0].replace("is None", '== "a => b"')


def test_whole_lines_are_changed_wherever_they_stand():
    solved = answer("all_reduce => all_reduce")
    wanted = solved[0].replace(FLAG, "            self.flags[i] = 1\n            break\n")
    for depth in ("", "    ", " " * 20):
        lines = "if parameter.grad is None:\n    self.flags[i] = 0  # nobody's\n=>\nif parameter.grad is None:\n"
        text = "\n".join(f"{depth}{line}" for line in (lines + "    self.flags[i] = 1\n    break").split("\n"))
        assert answer(text)[0] == wanted
    two = "self.work.wait()\n=>\n---\n@jit\n=>\nimport os\n\n@jit\n---\nself.sent => None"
    launch, start = answer(two)
    assert launch == solved[0].replace("\n    self.work.wait()", "").replace("self.sent", "None")
    assert start == solved[1].replace("@jit", "import os\n\n@jit")


def test_a_whole_answer_takes_the_place_of_what_it_defines():
    solved = answer("all_reduce => all_reduce")
    text = "def finish(self: Bucket):\n    pass"
    assert answer(text) == [solved[0].partition("def finish")[0] + text, solved[1]]
    text = "import os\n\n\n@other\ndef start(tensor):\n    return os\n\nLAST = 1"
    assert answer(text) == [solved[0], "#| export a.b\n" + text]
    both = answer("def start(t):\n    return t\n\ndef launch(self: Bucket):\n    pass")
    assert (
        "\ndef launch(self: Bucket):\n    pass\n" in both[0] and both[1] == "#| export a.b\ndef start(t):\n    return t"
    )
    assert expanded("x = None", ["### BEGIN SOLUTION\nx = 1\n### END SOLUTION"]) == ["x = None"]
    assert expanded("x = = 1", ["#| export a.b\nx = 1"]) == ["#| export a.b\nx = = 1"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("self.work => self.play", "'self.work' stands 2 times in the solution"),
        ("self.flag => 1", None),
        ("self.plays => 1", "'self.plays' stands nowhere in the solution"),
        ("self.work.wait()\nreturn\n=>", "'self.work.wait()' and what follows it stands nowhere in the solution"),
        (
            "self.flags => 1\n0 => 1\nself.flags[i] => 2",
            "two changes meet: one begins in 'self.flags[i] = 0  # nobody's'",
        ),
        ("self.sent => 1\nself.flags", "'self.flags' is no change such as 'old => new'"),
        ("=>\nself.flags", "nothing stands before '=>'"),
        ("a\n=>\nb\n=>\nc", "two lines '=>' in one change: a line '---' ends a change"),
        (
            "        self.work.wait()\n=>\nreturn",
            "'return' stands too far to the left: new lines move with the old ones",
        ),
        ("x = 1", "it defines nothing of what the exercise's cells define"),
    ],
)
def test_what_cannot_be_made_is_refused_with_one_line(text, message):
    if message is None:
        assert answer(text)
        return
    with pytest.raises(AnswerError) as caught:
        answer(text)
    assert str(caught.value) == message
