"""What checks say of an answer that goes wrong on a rank: its own line, or the method whose gradients do not fit."""

import linecache

import pytest

from course_kit.checks import CheckFailed, frame
from course_kit.exercises.saved import exercise_cells
from export import read_notebook
from test_marked_answers import nothing_left, ranks_end  # noqa: F401
from tiny_course import ROOT
from written_answers import expanded

NOTEBOOK = ROOT / "notebooks" / "06_tensor_parallel.ipynb"
PLACES = {  # the exercise, what is changed in its solution, and the line that the message shows
    "06.4 shapes": ("tuple(F.linear(x, weight) => tuple(F.linear(x, weight.t())", "F.linear(x, weight.t())"),
    "06.4 backward": ("row.t() @ x.flatten(0, -2) => row @ x.flatten(0, -2)", "row @ x.flatten(0, -2)"),
    "06.7 dtype": ("rows.masked_fill(elsewhere, 0) => rows.float()", "F.embedding(rows.float(), self.weight)"),
    "06.8 backward": ("grad.mul_(gradient[:, None]) => grad.mul_(gradient[None])", "grad.mul_(gradient[None])"),
    "06.12 shapes": (
        "torch.mm(x_chunk, weight.t(), out=out_chunk) => torch.mm(x_chunk, weight, out=out_chunk)",
        "torch.mm(x_chunk, weight",
    ),
}
METHODS = {
    "06.2 too few": ("return total, None => return total", "CopyToGroup.backward returned an incorrect number"),
    "06.2 another shape": ("return total, None => return total[0], None", "CopyToGroup.backward returned an invalid"),
    "06.4 too few": ("return grad_x, None, *grad_weights => return grad_x, *grad_weights", "ColumnMatmul.backward"),
    "06.8 too few": (".to(ctx.dtype), None, None => .to(ctx.dtype), None", "VocabParallelCrossEntropy.backward"),
}


def message(exercise: str, change: str) -> str:
    """What the check says of the solution with a change."""
    sources = expanded(change, [cell["source"] for cell in exercise_cells(read_notebook(NOTEBOOK))[exercise]])
    cells = [(source, f"answer {number}") for number, source in enumerate(sources)]
    for source, name in cells:
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    with pytest.raises(CheckFailed) as failed:
        frame.run(exercise, cells, {})
    return str(failed.value)


@pytest.mark.parametrize("case", PLACES)
def test_an_error_on_a_rank_shows_the_answers_line(case):
    change, line = PLACES[case]
    first, place, *_ = message(case.split()[0], change).split("\n")
    assert "check itself" not in place and "answer 0, line" in place and line in place


@pytest.mark.parametrize("case", METHODS)
def test_gradients_that_autograd_refuses_are_those_of_a_method(case):
    change, words = METHODS[case]
    text = message(case.split()[0], change)
    assert words in text.split("\n")[0] and "in the check itself" not in text
