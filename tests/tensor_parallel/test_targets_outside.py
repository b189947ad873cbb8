"""vocab_parallel_cross_entropy of targets that are in no rank's part of the vocabulary. One process."""

import pytest
import torch

from calls import as_rank
from course_lib.recompute.modes import IGNORED
from course_lib.tensor_parallel.vocabulary import vocab_parallel_cross_entropy


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("target", "fails"), [(96, False), (IGNORED, False), (97, True), (-1, True), (1_000, True)])
def test_a_target_outside_of_the_vocabulary_makes_the_loss_nan(target, fails, reduction):
    with as_rank(0, 2) as group:
        logits = torch.randn(3, 49, generator=torch.Generator().manual_seed(0)).requires_grad_()
        loss = vocab_parallel_cross_entropy(logits, torch.tensor([5, target, 60]), group, 97, reduction)
        loss.backward()
    assert loss.isnan() == fails == logits.grad.isnan().any(), "a step with it is skipped"
