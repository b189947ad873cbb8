"""Check of exercise 02.3: `random_state` and `replayed`, the same random numbers in the replay."""

from __future__ import annotations

import contextlib
import dataclasses
from contextlib import AbstractContextManager
from unittest import mock

import torch

from course_kit.checks.recompute.check_02_02 import CONFIG
from course_kit.labs.recompute.gradients import called_by, gradients_of
from course_lib.recompute import by_hand
from course_lib.single_gpu.model import Transformer


class OnGPU(torch.Tensor):
    """A tensor that says it is on a second GPU, on any machine."""

    device, is_cuda = torch.device("cuda", 1), True


def played_gpus(states: list[torch.Tensor]) -> AbstractContextManager:
    """Have torch.cuda read and write the states of its generators in the list `states`."""

    def number(gpu):
        return gpu if isinstance(gpu, int) else torch.device(gpu).index or 0

    def put(state, gpu="cuda"):
        states[number(gpu)] = state.clone()

    return mock.patch.multiple(
        torch.cuda, get_rng_state=lambda gpu="cuda": states[number(gpu)].clone(), set_rng_state=put
    )


def check() -> None:
    """Assert both generators inside and afterwards, also after an error; autocast; a model with dropout."""
    with torch.random.fork_rng(devices=[]):
        check_generators()
        with torch.autocast("cpu", torch.bfloat16):
            mixed = by_hand.random_state([torch.zeros(1)])
        with by_hand.replayed(mixed):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16, (
                "autocast must be on again: use what is given"
            )
        check_model()


def check_generators() -> None:
    """Assert the states of the generators, of the CPU and of a simulated GPU."""
    torch.manual_seed(3)
    before = by_hand.random_state([torch.zeros(1)])
    drawn = torch.rand(4)
    now = torch.get_rng_state()
    with by_hand.replayed(before):
        assert torch.equal(torch.rand(4), drawn), "inside, the generator must give the numbers of forward again"
    assert torch.equal(torch.get_rng_state(), now), (
        "afterwards the generator must have the state from before the replay"
    )
    with contextlib.suppress(KeyError), by_hand.replayed(before):
        raise KeyError
    assert torch.equal(torch.get_rng_state(), now), "an error in the replay must put the generator back as well"
    states = [torch.zeros(2), torch.tensor([1.0, 1.0])]
    with played_gpus(states):
        before_gpu = by_hand.random_state([torch.zeros(1).as_subclass(OnGPU)])
        states[1] = torch.tensor([2.0, 2.0])  # forward has drawn
        with by_hand.replayed(before_gpu):
            inside, states[1] = states[1], torch.tensor([3.0, 3.0])  # the replay has drawn
    assert inside[0] == 1, "inside, the generator of the tensors' GPU must have the state from before forward, too"
    assert states[1][0] == 2, "afterwards the GPU's generator must have the state from before the replay, too"


def check_model() -> None:
    """Assert the bits of the gradients of a model with dropout, under autocast too."""
    noisy = Transformer(dataclasses.replace(CONFIG, dropout=0.1)).train()
    tokens = torch.randint(256, (2, 3, 33), generator=torch.Generator().manual_seed(0))
    plain_loss, plain = gradients_of(noisy, *tokens)
    after_plain = torch.get_rng_state()
    with called_by(by_hand.recompute, noisy):
        again_loss, again = gradients_of(noisy, *tokens)
    assert again_loss == plain_loss and torch.equal(after_plain, torch.get_rng_state()), (
        "a model with dropout: the generator is not where it should be after its forward and its replay"
    )
    for name in plain:
        assert torch.equal(plain[name], again[name]), f"with dropout, the gradient of {name} is not the same bits"
    with torch.autocast("cpu", torch.bfloat16):
        plain = gradients_of(noisy, *tokens)[1]
        with called_by(by_hand.recompute, noisy):
            again = gradients_of(noisy, *tokens)[1]
    assert all(torch.equal(plain[n], again[n]) for n in plain), "under autocast the gradients are not the same bits"
