"""What takes eight ranks: three kinds of parallelism that each cut what the others cut. One start serves the tests of
several modules: it costs as much as they do. CPU, gloo.
"""

import pytest
import torch

import test_checkpoint_ranks as checkpoints
import test_context_parallel_ranks as context
import test_five_d_ranks as five_d
from course_kit.ranks import Ranks
from course_lib.checkpoint import files  # noqa: F401  the last notebook that these tests concern


@pytest.fixture(scope="module")
def eight():
    with Ranks(8, "gloo", timeout_s=300) as pool:
        yield pool


def test_eight_ranks_train_as_one_process(eight):
    five_d.check(eight(five_d.trained, five_d.WAYS[8]), five_d.WAYS[8])


def test_the_program_of_notebook_07_on_two_by_two_by_two_ranks(eight):
    """Data, context, and tensor parallelism with sequence parallelism: the losses of one process."""
    argv = "--batch 4 --dtype fp32 --cp 2 --tp 2 --micro-batch 2".split()
    expected = context.of_one_process()
    for found in eight(context.trained, [*context.ARGUMENTS, *argv]):
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=0)


def test_checkpoints_go_from_four_ranks_to_eight_and_back(ranks, eight, tmp_path):
    expected = ranks(checkpoints.saved_by, "dp2,tp2,sp,zero2", tmp_path / "4")[0]
    for text in ("dp2,pp2,tp2,zero1", "dp8,zero3"):
        of_ranks = eight(checkpoints.loaded, text, tmp_path / "4", 2)
        assert all(not checkpoints.unequal(found, expected) for found in of_ranks), text
    of_eight = eight(checkpoints.saved_by, "dp2,pp2,tp2,sp,zero1", tmp_path / "8")[0]
    of_ranks = ranks(checkpoints.loaded, "dp4,zero3", tmp_path / "8", 2)
    assert all(not checkpoints.unequal(found, of_eight) for found in of_ranks)
