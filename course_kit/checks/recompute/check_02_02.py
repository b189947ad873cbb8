"""Check of exercise 02.2: `Recompute`, the same bits from the arguments alone."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import nn

from course_kit.labs.recompute.gradients import called_by, gradients_of
from course_kit.typed import grad_of
from course_lib.recompute import by_hand
from course_lib.single_gpu.model import ModelConfig, Transformer
from course_lib.single_gpu.profile import MemoryProfile

CONFIG = ModelConfig(3, 64, 4, 2, 96, 256)


@contextlib.contextmanager
def advice_for_the_replay() -> Iterator[None]:
    """Turn PyTorch's errors of a wrong replay into the probable cause."""
    try:
        yield
    except NotImplementedError:  # a blank one, which is a RuntimeError too
        raise
    except (RuntimeError, TypeError) as error:
        raise AssertionError(
            f"the replay fails, '{str(error).splitlines()[0][:90]}': detach the leaves, run with torch.enable_grad(), "
            "leave out outputs that require no gradient"
        ) from None


def saved_by(run: Callable[[], object]) -> list[torch.Tensor]:
    """Return the tensors that autograd saves in run()."""
    outcome = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        outcome.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = run()  # noqa: F841  (it holds the graph)
    return outcome


def counted_blocks(counts: dict) -> Callable:
    """Return a recompute that notes how often each block's forward has run."""

    def around(block, *args):
        def run(*inner):
            counts[block] = counts.get(block, 0) + 1
            return block(*inner)

        return by_hand.recompute(run, *args)

    return around


def check() -> None:
    """Assert a model's gradients bit by bit, what is kept, two outputs and nested inputs, BF16, and dropout."""
    probe = Transformer(CONFIG)
    tokens = torch.randint(256, (2, 3, 33), generator=torch.Generator().manual_seed(0))
    counts: dict = {}
    plain_loss, plain = gradients_of(probe, *tokens)
    with called_by(counted_blocks(counts), probe), advice_for_the_replay():
        again_loss, again = gradients_of(probe, *tokens)
    assert plain_loss == again_loss, "the loss differs: forward must not change"
    missing = [name for name in plain if name not in again]
    assert not missing, (
        f"no gradient for {missing[0]}: does the graph of the replay reach it? Return the inputs' gradients"
    )
    for name in plain:
        assert torch.equal(plain[name], again[name]), f"the gradient of {name} is not the same bits"
    assert list(counts.values()) == [2] * 3, (
        f"each block's forward must run twice, it ran {list(counts.values())} times"
    )
    check_saved()
    check_outputs()
    check_bf16()
    noisy = Transformer(dataclasses.replace(CONFIG, dropout=0.1)).train()
    _, plain = gradients_of(noisy, *tokens)
    with called_by(by_hand.recompute, noisy):
        _, again = gradients_of(noisy, *tokens)
    for name in plain:
        assert torch.equal(plain[name], again[name]), (
            f"with dropout, the gradient of {name} is not the same bits: run the replay inside of "
            "`with replayed(ctx.state)`"
        )


def check_saved() -> None:
    """Assert that nothing but the arguments is saved, or alive after forward."""
    weight, x = torch.ones(5, 5, requires_grad=True), torch.ones(2, 5, requires_grad=True)
    saved = saved_by(lambda: by_hand.recompute(lambda a: (a @ weight).exp().sin(), x))
    assert all(tensor is x or tensor.data_ptr() == x.data_ptr() for tensor in saved), (
        "forward saves more than its arguments: it must run without a graph"
    )
    layer, wide = nn.Linear(64, 64), torch.ones(32, 64, requires_grad=True)
    with MemoryProfile(layer) as profile:
        total = by_hand.recompute(lambda a: layer(a).exp().sin(), wide).sum()  # noqa: F841  (it holds the graph)
        profile.mark("kept")
    retained = profile.peak("kept")["activations"] + profile.peak("kept")["temporary"]
    assert retained < wide.nbytes, (
        f"after forward {retained:,} bytes are alive beside the arguments: what does ctx hold? "
        "Outputs must not stay there"
    )


def check_bf16() -> None:
    """Assert dtype and bits of BF16 gradients, and that a block's output in BF16 is in BF16."""
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).bfloat16()
    x = torch.linspace(-2, 2, 24).view(3, 8).bfloat16().requires_grad_()
    block(x).square().sum().backward()
    wanted = [grad_of(x).clone(), *(grad_of(p).clone() for p in block.parameters())]
    block.zero_grad()
    x.grad = None
    with advice_for_the_replay():
        output = by_hand.recompute(block, x)
        output.square().sum().backward()
    got = [x.grad, *(p.grad for p in block.parameters())]
    assert output.dtype == torch.bfloat16, f"a block in BF16 gives {output.dtype}: hand on what the function returns"
    assert all(g is not None and g.dtype == w.dtype and torch.equal(g, w) for g, w in zip(got, wanted, strict=True)), (
        "a block in BF16: a gradient is not the same bits, or not in BF16"
    )


def check_outputs() -> None:
    """Assert the gradients of a function with nested inputs and three outputs, one of which requires none."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 5, generator=generator).requires_grad_()
    x = torch.randn(2, 5, generator=generator).requires_grad_()

    def pair(a, rest):
        return torch.tanh(a @ weight), rest["shift"] + rest["times"] * a, 2 * rest["shift"]

    with advice_for_the_replay():
        first, second, third = by_hand.recompute(pair, x, {"shift": torch.ones(5), "times": 3})
        (first.sum() + second.square().sum() + third.sum()).backward()
    got = weight.grad, x.grad
    weight.grad = x.grad = None
    first, second, _ = pair(x, {"shift": torch.ones(5), "times": 3})
    (first.sum() + second.square().sum()).backward()
    assert got[0] is not None and torch.equal(got[0], grad_of(weight)), (
        "two outputs: a weight's gradient is not the same"
    )
    assert got[1] is not None and torch.equal(got[1], grad_of(x)), (
        "two outputs, nested inputs: the gradient of x is not the same"
    )
