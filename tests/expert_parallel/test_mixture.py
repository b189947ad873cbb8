"""course_lib.expert_parallel.mixture: mixtures in a model, their sizes, and Mixtral's numbers. One process, CPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from calls import said
from course_lib.expert_parallel.experts import loop_experts
from course_lib.expert_parallel.mixture import MoE, active_config, apply_moe, describe_model, mixture_params
from course_lib.expert_parallel.router import routers_of
from course_lib.recompute.modes import apply_recompute
from course_lib.single_gpu.model import MLP, PRESETS, ModelConfig, Transformer, init_parameter, loss
from course_lib.tensor_parallel.shards import materialize

TINY = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=40, vocab=61)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def tokens(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(TINY.vocab, (2, 3, 8), generator=torch.Generator().manual_seed(seed)).unbind()


def meta(*sizes, of=TINY, **options) -> Transformer:
    with torch.device("meta"):
        return apply_moe(Transformer(of), *sizes, **options)


# apply_moe.


def test_the_model_is_changed_in_place_and_its_names_are_plain():
    model = Transformer(TINY)
    assert apply_moe(model, 4, 2, 24, shared=2) is model
    shapes = {name: list(p.shape) for name, p in model.blocks[1].mlp.state_dict().items()}
    assert shapes == {
        "router.weight": [4, 32],
        "router.bias": [4],
        "experts.gate_proj.weight": [4, 24, 32],
        "experts.up_proj.weight": [4, 24, 32],
        "experts.down_proj.weight": [4, 32, 24],
        "shared.gate_proj.weight": [48, 32],
        "shared.up_proj.weight": [48, 32],
        "shared.down_proj.weight": [32, 48],
    }
    assert model(tokens()[0]).shape == (3, 8, TINY.vocab)
    assert "router.bias" not in dict(model.named_parameters())


def test_initial_values_are_those_of_the_names_and_the_same_from_meta():
    for seed in (0, 3):
        model = apply_moe(Transformer(TINY, seed), 4, 2, shared=1, seed=seed)
        for name, parameter in model.named_parameters():
            alone = torch.empty_like(parameter)
            init_parameter(name, alone, TINY, seed)
            assert torch.equal(parameter, alone), name
        later = meta(4, 2, shared=1)
        assert all(t.is_meta for t in later.state_dict().values())
        materialize(later, lambda name, tensor: init_parameter(name, tensor, TINY, seed))
        for name, tensor in later.state_dict().items():
            assert torch.equal(tensor, model.state_dict()[name]), name
    up, down = (model.blocks[0].mlp.experts.get_submodule(name).weight for name in ("up_proj", "down_proj"))
    assert up.std().item() == pytest.approx(0.02, rel=0.05) and down.std().item() == pytest.approx(0.01, rel=0.05)
    assert not any(router.bias.any() for router in routers_of(model))


def test_options_go_to_the_routers_and_the_dtype_is_the_models():
    model = apply_moe(Transformer(TINY).bfloat16(), 8, 2, score="sigmoid", aux_loss_coeff=0.1, nodes=4, node_limit=2)
    for how in (router.routing for router in routers_of(model)):
        assert (how.score, how.aux_loss_coeff, how.nodes, how.node_limit) == ("sigmoid", 0.1, 4, 2)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(tokens()[0]).dtype == torch.bfloat16


def test_the_biases_of_a_bfloat16_model_stay_in_float32():
    """A step of 0.001 beside a bias of 1 is lost in 8 bits."""
    for router in routers_of(apply_moe(Transformer(TINY).bfloat16(), 4, 2)):
        assert router.bias.dtype == torch.float32


def test_refusals_change_nothing():
    whole = Transformer(TINY)
    replaced = Transformer(TINY)
    replaced.blocks[1].mlp = nn.Identity()
    partly = Transformer(TINY)
    partly.blocks[1].mlp.down_proj = nn.Identity()
    cases = {
        "top_k 5": (whole, (4, 5), {}),
        "nodes 3, node_limit 1: nodes must divide": (whole, (4, 2), {"nodes": 3}),
        "score 'relu'": (whole, (4, 2), {"score": "relu"}),
        "a block's MLP is split or replaced already": (apply_moe(Transformer(TINY), 4, 2), (4, 2), {}),
        "a block's MLP is split or replaced already: call apply_moe first": (replaced, (4, 2), {}),
        "a block's MLP is split": (partly, (4, 2), {}),
    }
    for words, (model, sizes, routing) in cases.items():
        before = str(model), [id(module) for module in model.modules()], dict(vars(model))
        text = said(lambda: apply_moe(model, *sizes, **routing))
        assert text.startswith("ValueError: ") and words in text and "\n" not in text, text
        assert before == (str(model), [id(module) for module in model.modules()], dict(vars(model))), words


# What a mixture computes.


def test_a_mixture_is_the_sum_of_its_experts_and_the_shared_one():
    layer, x = MoE(TINY, 4, 2, 24, shared=1), torch.randn(2, 5, 32)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.2)
    gates, expected = layer.router(x), layer.shared(x)
    for e in range(4):
        gate, up, down = (getattr(layer.experts, f"{name}_proj").weight[e] for name in ("gate", "up", "down"))
        expected = expected + gates[..., e, None] * F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    torch.testing.assert_close(layer(x), expected)
    assert isinstance(layer.shared, MLP) and MoE(TINY, 4, 2).shared is None


def test_one_expert_of_one_is_the_dense_model():
    """Its gate is 1: the softmax of one number."""
    dense, model = Transformer(TINY), apply_moe(Transformer(TINY), 1, 1)
    for block, other in zip(model.blocks, dense.blocks, strict=True):
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(block.mlp.experts, name).weight.data[0] = getattr(other.mlp, name).weight.data
    torch.testing.assert_close(model(tokens()[0]), dense(tokens()[0]))


def test_with_a_capacity_slots_are_computed_and_others_dropped():
    layer, x = MoE(TINY, 4, 2, capacity=0.75), torch.randn(3, 10, 32)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.2)
    gates = layer.router(x).flatten(0, 1)
    assert (gates != 0).sum(0).max() == layer.router.routing.slots(30) == 12  # ceil(0.75 · 30 · 2 / 4)
    torch.testing.assert_close(layer(x).flatten(0, 1), loop_experts(layer.experts, x.flatten(0, 1), gates, 0))


def test_dropout_comes_once_at_the_end_and_in_training_alone():
    of = ModelConfig(**{**vars(TINY), "dropout": 0.5})
    layer, x = MoE(of, 4, 2, shared=1), torch.randn(2, 50, 32)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.2)
    out = layer(x)
    assert 0.4 < (out == 0).float().mean() < 0.6
    whole = layer.eval()(x)
    torch.testing.assert_close(out, torch.where(out == 0, 0, 2 * whole))


def test_training_through_recomputation_changes_nothing():
    def trained(mode: str) -> dict[str, torch.Tensor]:
        model = apply_moe(Transformer(TINY), 4, 2, 24, shared=1, aux_loss_coeff=0.1, z_loss_coeff=0.01)
        apply_recompute(model, mode)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=1.0), {}
        for step in range(3):
            inputs, targets = tokens(step)
            step_loss = loss(model(inputs), targets)
            optimizer.zero_grad()
            step_loss.backward()
            optimizer.step()
            found[f"loss {step}"] = step_loss.detach()
        return found | {name: p.detach() for name, p in model.named_parameters()}

    expected = trained("none")
    for mode in ("selective", "full"):
        for name, tensor in trained(mode).items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-7, msg=lambda m: f"{name}: {m}")


# Sizes.


@pytest.mark.parametrize(
    "of, sizes, options",
    [(TINY, (8, 2), {}), (TINY, (6, 1), {"ffn_hidden": 16, "shared": 2}), (PRESETS["debug"], (4, 4), {"shared": 1})],
)
def test_mixture_params_are_those_of_the_model(of, sizes, options):
    model = meta(*sizes, of=of, **options)
    total = sum(p.numel() for p in model.parameters())
    idle = (sizes[0] - sizes[1]) * sum(block.mlp.experts.up_proj.weight[0].numel() * 3 for block in model.blocks)
    assert mixture_params(of, *sizes, **options) == (total, total - idle)
    width = (sizes[1] + options.get("shared", 0)) * options.get("ffn_hidden", of.ffn_hidden)
    assert model.active_config == ModelConfig(**{**vars(of), "ffn_hidden": width}) and model.config is of
    with torch.device("meta"):
        dense = sum(p.numel() for p in Transformer(model.active_config).parameters())
    assert total - idle == dense + of.layers * sizes[0] * of.hidden  # and the routers


def test_the_active_config_of_arguments_is_the_models():
    """Other arguments of apply_moe play no part; without a mixture it is the config itself."""
    some = ({"top_k": 2}, {"top_k": 3, "ffn_hidden": None, "shared": 0}, {"top_k": 1, "ffn_hidden": 16, "shared": 2})
    for moe in some:
        found = active_config(TINY, {"experts": 8, "seed": 3, "aux_loss_coeff": 0.1, **moe})
        assert found == meta(8, of=TINY, **moe).active_config
    assert active_config(TINY, None) is TINY


def test_the_published_sizes_of_mixtral_and_deepseek_v3():
    """46.7B with 12.9B active (Mixtral of Experts); 671B with 37B active (DeepSeek-V3's report, abstract; its
    embedding and head are counted here: 37.6B).
    """
    mixtral = ModelConfig(32, 4096, 32, 8, 14336, 32000, rope_theta=1e6)
    assert [round(n / 1e9, 1) for n in mixture_params(mixtral, 8, 2)] == [46.7, 12.9]
    deepseek, heads, rope = ModelConfig(61, 7168, 128, 128, 18432, 129280), 128, 64
    latent = 7168 * 1536 + 1536 + 1536 * heads * (128 + rope)  # q
    latent += 7168 * (512 + rope) + 512 + 512 * heads * (128 + 128) + heads * 128 * 7168  # k, v, o
    found = mixture_params(deepseek, 256, 8, 2048, shared=1, dense_layers=3, attention=latent)
    assert [round(n / 1e9, 1) for n in found] == [671.0, 37.6]


@pytest.mark.parametrize("extra", [{}, {"qkv_bias": True}, {"head_size": 24, "qk_norm": True}])
@pytest.mark.parametrize("moe", [None, {"experts": 4, "top_k": 2, "ffn_hidden": 48, "shared": 1}])
def test_a_described_model_has_as_many_parameters_as_the_real_one(extra, moe):
    config = ModelConfig(2, 64, 4, 2, 128, 100, **extra)
    with torch.device("meta"):
        model = Transformer(config)
    model = apply_moe(model, **moe) if moe else model
    total = f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters"
    assert total in describe_model("mine", config, moe)
