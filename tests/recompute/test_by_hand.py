"""course_lib.recompute.by_hand: the bits of PyTorch's checkpoint, nested arguments, the generator afterwards. CPU."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from course_lib.recompute.by_hand import detached, random_state, recompute, replayed


def noisy(x: torch.Tensor, rest: dict) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.nn.functional.dropout(x @ rest["weight"], 0.5).exp() * rest["times"], x.detach() * 2


def test_gradients_are_the_bits_of_pytorchs_reentrant_checkpoint():
    found = []
    for call in (recompute, lambda *args: checkpoint(*args, use_reentrant=True)):
        torch.manual_seed(0)
        x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4)
        out, _ = call(noisy, x, {"weight": weight, "times": 3})
        out.square().sum().backward()
        found.append((x.grad, torch.rand(2)))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_nested_tensors_lose_their_history_and_keep_their_memory():
    leaf = torch.ones(2, requires_grad=True)
    (copy, number), source = detached(([leaf * 2], 7)), leaf * 2
    assert copy[0].is_leaf and copy[0].requires_grad and number == 7
    assert detached(source).data_ptr() == source.data_ptr() and source.grad_fn is not None


def test_a_replay_draws_the_same_numbers_and_leaves_the_generator_alone():
    state = random_state([torch.zeros(1)])
    drawn, after = torch.rand(3), torch.get_rng_state()
    with replayed(state):
        assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(torch.get_rng_state(), after)
