"""course_kit/labs/checkpoint: tensors assembled from chunks, what differs, what runs forget. Needs no GPU."""

import torch

from course_kit.labs.checkpoint import resharding, restarts, saves
from course_lib.checkpoint.chunks import Chunk


def halves(full: torch.Tensor) -> list[dict[str, list[Chunk]]]:
    """Return the upper and the lower rows of a tensor [4, n], each of one rank."""
    chunks = [Chunk((first, 0), tuple(full.shape), full[first : first + 2].clone()) for first in (0, 2)]
    return [{"a": [chunk]} for chunk in chunks]


def test_boxes_of_two_ranks_make_the_tensor():
    full = torch.randn(4, 3)
    assert torch.equal(resharding.assembled(resharding.merged(halves(full)))["a"], full)


def test_what_no_box_has_is_nan():
    found = resharding.assembled(halves(torch.ones(4, 3))[0])["a"]
    assert found[:2].eq(1).all() and found[2:].isnan().all()


def test_the_farthest_element_counts():
    full = torch.zeros(4, 3)
    others = resharding.merged(halves(full))
    others["a"][1].values[1, 2] = 0.25
    assert resharding.farthest({"a": full}, others) == 0.25


def test_each_run_forgets_another_thing():
    assert sorted(restarts.drawn().values()) == sorted(restarts.FORGOTTEN)


def test_stalls_are_told_by_kind(capsys):
    times = [0.1] * saves.STEPS
    for step, seconds in ((3, 0.5), (7, 0.2), (11, 0.5), (15, 0.2)):
        times[step] = seconds
    saves.print_stalls(times, [0.4, 0.01, 0.4, 0.01])
    waits, beside, quiet = capsys.readouterr().out.splitlines()
    assert "still for  400 ms; this step and the three after it take  400 ms more" in waits
    assert "still for   10 ms; this step and the three after it take  100 ms more" in beside
    assert quiet == "a step without a save: 100 ms"
