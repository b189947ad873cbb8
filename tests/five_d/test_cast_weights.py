"""course_lib.five_d.cast_weights in one process: a copy's gradient is its weight's, and there while backward runs."""

import torch
from torch import nn

from course_lib.five_d.cast_weights import CastWeights
from course_lib.pipeline.split_backward import SplitPass
from course_lib.pipeline.stages import StagePass
from course_lib.single_gpu.model import ModelConfig, Transformer, init_parameter, loss

OF = ModelConfig(layers=3, hidden=16, heads=2, kv_heads=1, ffn_hidden=24, vocab=31, tied=True)


def a_model() -> nn.ModuleDict:
    """In a ModuleDict, as the runner has its stages."""
    model = Transformer(OF)
    for name, parameter in model.named_parameters():
        init_parameter(name, parameter, OF)
    model.blocks[1].mlp.up_proj.weight.requires_grad_(False)
    return nn.ModuleDict({"0": model})


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    tokens = torch.randint(31, (2, 2, 9), generator=torch.Generator().manual_seed(0))
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


def gradients(stages: nn.ModuleDict, make) -> dict[str, torch.Tensor]:
    """Of two micro-batches, between cast() and restore()."""
    casts, weights = CastWeights(stages, torch.bfloat16), dict(stages.named_parameters())
    casts.cast()
    assert {each.dtype for each in stages.parameters()} == {torch.bfloat16}
    for inputs, targets in batches():
        done = make(stages["0"], inputs, lambda out, targets=targets: loss(out.float(), targets))
        if make is StagePass:
            done.backward(torch.ones(()))
        else:
            done.input_gradient(torch.ones(()))
            done.weight_gradients()
    casts.restore()
    assert all(own is weights[name] for name, own in stages.named_parameters())
    return {name: weight.grad for name, weight in weights.items() if weight.grad is not None}


def test_gradients_are_those_of_casts_by_autograd():
    """To the bit, tied, frozen and over two micro-batches; in halves too."""
    stages, expected = a_model(), {}
    named = dict(stages["0"].named_parameters())
    for inputs, targets in batches():
        copies = {name: weight.bfloat16() for name, weight in named.items()}
        loss(torch.func.functional_call(stages["0"], copies, (inputs,)).float(), targets).backward()
    for name, weight in named.items():
        expected[f"0.{name}"], weight.grad = weight.grad, None
    for make in (StagePass, SplitPass):
        found = gradients(stages, make)
        stages.zero_grad()
        assert found.keys() == {name for name, gradient in expected.items() if gradient is not None}
        assert "0.blocks.1.mlp.up_proj.weight" not in found
        for name, gradient in found.items():
            assert gradient.dtype == torch.float32 and torch.equal(gradient, expected[name]), name


def test_a_weight_has_its_gradient_while_backward_runs():
    """The last layer's before the first one's is made: so buckets can leave, and no copy keeps a gradient."""
    stages, log = a_model(), []
    for name, weight in stages["0"].named_parameters():
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(lambda _, name=name: log.append(name))
    first, last = "blocks.0.mlp.down_proj.weight", "blocks.2.mlp.down_proj.weight"
    casts = CastWeights(stages, torch.bfloat16)
    casts.cast()
    stages["0"].blocks[1].register_full_backward_hook(lambda *_: log.append("block 1 is done"))
    inputs, targets = batches()[0]
    loss(stages["0"](inputs).float(), targets).backward()
    assert all(copy.grad is None for copy in stages.parameters())
    casts.restore()
    assert log.index(last) < log.index("block 1 is done") < log.index(first), log
    assert sorted(log) == sorted(set(log)), "each hook once"
