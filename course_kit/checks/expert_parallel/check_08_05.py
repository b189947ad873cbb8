"""Check of exercise 08.5: a model of mixtures: initial values, results token by token, sizes, a capacity."""

from __future__ import annotations

from typing import cast

import torch

from course_kit.checks.expert_parallel.work import Work
from course_kit.labs.expert_parallel.experts import by_token
from course_kit.labs.expert_parallel.models import TINY
from course_kit.labs.tensor_parallel.models import relative_error
from course_kit.typed import transformer_blocks
from course_lib.expert_parallel import mixture
from course_lib.expert_parallel.mixture import MoE
from course_lib.single_gpu.model import ModelConfig, Transformer, init_parameter

OPTIONS: tuple[tuple[int, dict], ...] = (  # top_k, and the others
    (2, {}),
    (2, {"ffn_hidden": 12, "shared": 2}),
    (3, {"score": "sigmoid", "scale": 2.5}),
)


def from_parts(layer: MoE, x: torch.Tensor) -> torch.Tensor:
    """Return the output of a mixture for x [b, s, h], one token at a time."""
    gates = layer.router(x)
    rows = by_token(layer.experts, x.flatten(0, 1), gates.flatten(0, 1)).view_as(x)
    return rows if layer.shared is None else rows + layer.shared(x)


def check() -> None:
    """Judge run_local_experts and apply_moe."""
    x = torch.randn(2, 5, TINY.hidden, generator=torch.Generator().manual_seed(6))
    for top_k, options in OPTIONS:
        judge_model(top_k, options, x[: top_k - 1])
    seeded_model = mixture.apply_moe(Transformer(TINY).bfloat16(), 8, 2, seed=3)
    seeded = cast(mixture.MoE, transformer_blocks(seeded_model)[1].mlp).experts.up_proj.weight
    expected = torch.empty_like(seeded)
    init_parameter("blocks.1.mlp.experts.up_proj.weight", expected, TINY, 3)
    assert seeded.dtype == torch.bfloat16, f"a bfloat16 model gets {seeded.dtype} experts"
    assert torch.equal(seeded, expected), "seed = 3: the experts have not the values of that seed"
    judge_capacity(x)
    with torch.device("meta"):
        on_meta = Transformer(TINY)
    assert all(p.is_meta for p in mixture.apply_moe(on_meta, 4, 2).parameters()), (
        "a meta model stays on the meta device"
    )


def judge_model(top_k: int, options: dict, x: torch.Tensor) -> None:
    """Judge a model of 8 experts per layer, `top_k` per token."""
    model = mixture.apply_moe(Transformer(TINY), 8, top_k, **options).eval()
    what = f"top_k {top_k}, {options or 'no options'}"
    for number, block in enumerate(model.blocks):
        layer = block.mlp
        assert isinstance(layer, MoE), f"block {number} still has its dense MLP"
        width = None if layer.shared is None else layer.shared.gate_proj.weight.shape[0]
        wanted = options.get("shared", 0) * options.get("ffn_hidden", TINY.ffn_hidden) or None
        assert width == wanted, f"{what}, block {number}: the shared experts are {width} wide, not {wanted}"
        for name, parameter in layer.named_parameters():
            assert parameter.requires_grad, f"{what}: blocks.{number}.mlp.{name} cannot be trained"
            expected, full_name = torch.empty_like(parameter), f"blocks.{number}.mlp.{name}"
            init_parameter(full_name, expected, TINY, 0)
            assert torch.equal(parameter, expected), f"the values are not init_parameter's of {full_name}"
        with torch.no_grad():
            layer.experts.down_proj.weight.mul_(10)
            got, expected = layer(x), from_parts(layer, x)
        assert relative_error(got, expected) < 1e-5, f"{what}, block {number}: not the sum of gates times experts"
    width = options.get("ffn_hidden", 40) * (top_k + options.get("shared", 0))
    active = cast(ModelConfig, model.active_config).ffn_hidden
    assert active == width, f"{what}: a token passes through a width of {width}, not {active}"


def judge_capacity(x: torch.Tensor) -> None:
    """Judge a capacity of 4 times the even share: no token is dropped."""
    wide = MoE(TINY, 8, 2, capacity=4.0).eval()
    with torch.no_grad():
        for parameter in wide.parameters():
            parameter.normal_(0, 0.3)
        gates = wide.router.weight.new_zeros(2, 5, 8).scatter(-1, torch.arange(20).view(2, 5, 2) % 8, 0.5)
        with Work() as work:
            got = wide.run(x, gates, lambda: None)
    expected = by_token(wide.experts, x.flatten(0, 1), gates.flatten(0, 1)).view_as(x)
    assert relative_error(got, expected) < 1e-5, (
        "capacity 4, 10 tokens: no token is dropped, yet it is not the sum of gates times experts"
    )
    narrow = MoE(TINY, 8, 2, capacity=1.0).eval()
    with torch.no_grad(), Work() as less:
        narrow.run(x, gates, lambda: None)
    slots = narrow.router.routing.slots(10)
    assert less.multiplications == 8 * slots * 3 * 48 * 40, (
        f"capacity 1, 10 tokens: each of 8 experts has {slots} rows, not {less.multiplications // (8 * 3 * 48 * 40)}"
    )
    assert not work.read and work.multiplications == 8 * 10 * 3 * 48 * 40, (
        "with a capacity the sizes are fixed: batched_experts with the router's slots"
    )
