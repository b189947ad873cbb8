"""course_lib.single_gpu.memory: the playbook's published numbers, and what autograd really keeps, to the byte. Needs no
GPU.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from course_kit.widgets.memory import GPUS_GIB, _calculator_controls, memory_calculator
from course_lib.single_gpu.devices import read_table
from course_lib.single_gpu.memory import (
    POLICIES,
    activation_bytes,
    gpt_activation_bytes,
    gpt_param_count,
    layer_activations,
    param_count,
    parameter_parts,
    state_bytes,
    training_bytes,
)
from course_lib.single_gpu.model import PRESETS, ModelConfig, Transformer, loss

torch.set_num_threads(1)
GiB = 2**30
SHAPES = {"8B": (32, 4096, 32), "70B": (80, 8192, 64), "405B": (126, 16384, 128)}  # layers, hidden, heads


# Parameters.


@pytest.mark.parametrize("name", [*PRESETS, "odd", "one head"])
def test_the_count_is_that_of_the_model(name):
    others = {"odd": ModelConfig(3, 42, 3, 1, 50, 77), "one head": ModelConfig(1, 6, 1, 1, 7, 9, tied=True)}
    config = PRESETS.get(name) or others[name]
    with torch.device("meta"):
        model = Transformer(config)
    assert param_count(config) == sum(parameter.numel() for parameter in model.parameters())


def test_each_part_is_that_of_the_model():
    config = ModelConfig(2, 48, 6, 2, 100, 77)
    with torch.device("meta"):
        model = Transformer(config)
    block = model.blocks[1]
    modules = {
        "q_o": [block.attention.q_proj, block.attention.o_proj],
        "kv": [block.attention.k_proj, block.attention.v_proj],
        "mlp": [block.mlp],
        "norms": [block.attention_norm, block.mlp_norm],
        "embedding": [model.embedding],
        "head": [model.head],
        "final_norm": [model.norm],
    }
    assert parameter_parts(config) == {
        part: sum(parameter.numel() for module in found for parameter in module.parameters())
        for part, found in modules.items()
    }


def gpt2_parameters(hidden: int, layers: int, vocab: int) -> int:
    """Parameters of Hugging Face's GPT-2, positions aside."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab, n_positions=8, n_embd=hidden, n_layer=layers, n_head=2))
    return sum(parameter.numel() for parameter in model.parameters()) - 8 * hidden


@pytest.mark.parametrize("hidden, layers, vocab", [(64, 2, 256), (30, 3, 77), (768, 12, 50257)])
def test_the_gpt_count_is_that_of_gpt2(hidden, layers, vocab):
    assert gpt_param_count(hidden, layers, vocab) == gpt2_parameters(hidden, layers, vocab)


@pytest.mark.parametrize("name, weights_gib", [("8B", 25.96), ("70B", 243.95), ("405B", 1519.93)])
def test_the_gpt_count_gives_the_playbooks_weights(name, weights_gib):
    layers, hidden, _ = SHAPES[name]
    weights = state_bytes(gpt_param_count(hidden, layers, 128256), "fp32")
    assert weights["parameters"] / GiB == weights["gradients"] / GiB == pytest.approx(weights_gib, abs=0.005)
    assert weights["optimizer states"] == 2 * weights["parameters"]


def test_positions_make_up_the_rest_of_the_playbooks_plot():
    weights = 4 * gpt_param_count(4096, 32, 128256) + 4 * 4096 * 1024
    assert weights / GiB == pytest.approx(25.979, abs=0.0005)


# States.


@pytest.mark.parametrize(
    "billions, plain, accumulated", [(1, 16, 20), (7, 112, 140), (70, 1120, 1400), (405, 6480, 8100)]
)
def test_the_playbooks_table_of_16_and_20_bytes(billions, plain, accumulated):
    totals = {policy: sum(state_bytes(billions * 1e9, policy).values()) / 1e9 for policy in POLICIES}
    assert totals["fp32"] == totals["bf16"] == plain
    assert totals["bf16, fp32 gradients"] == accumulated


@pytest.mark.parametrize("stage, gigabytes", enumerate([112, 38.5, 26.25, 14.0]))
def test_zero_of_7b_on_8_gpus(stage, gigabytes):
    assert sum(state_bytes(7e9, "bf16", stage, dp=8).values()) / 1e9 == pytest.approx(gigabytes, rel=1e-12)


@pytest.mark.parametrize("stage, expected", enumerate([(2, 6, 12), (2, 6, 3), (2, 1.5, 3), (0.5, 1.5, 3)]))
def test_each_zero_stage_divides_its_own_part(stage, expected):
    parts = state_bytes(1000, "bf16, fp32 gradients", stage, dp=4)
    assert parts == {
        name: 1000 * size for name, size in zip(("parameters", "gradients", "optimizer states"), expected, strict=True)
    }


@pytest.mark.parametrize(
    "split, gib",
    [
        ({}, (14.957, 14.957, 59.828)),
        ({"pp": 8}, (2.604, 2.604, 10.414)),
        ({"ep": 8}, (5.77, 5.77, 23.08)),
        ({"zero_stage": 3, "dp": 8}, (1.87, 1.87, 7.48)),
    ],
    ids=["whole", "PP8", "EP8", "ZeRO-3"],
)
def test_states_of_8b_at_12_bytes_a_parameter(split, gib):
    parts = training_bytes(PRESETS["llama3-8B"], 1, 1024, "bf16, no master weights", **split)
    sizes = [parts[name] / GiB for name in ("parameters", "gradients", "optimizer states")]
    assert sizes == [pytest.approx(size, rel=1e-3) for size in gib]


@pytest.mark.parametrize("policy, dtype", [("fp32", torch.float32), ("bf16, no master weights", torch.bfloat16)])
def test_the_states_are_what_adamw_holds(policy, dtype):
    model = Transformer(PRESETS["debug"]).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    loss(model(torch.zeros(1, 4, dtype=torch.int64)), torch.zeros(1, 4, dtype=torch.int64)).backward()
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    expected = state_bytes(param_count(PRESETS["debug"]), policy)
    assert sum(p.nbytes for p in model.parameters()) == expected["parameters"]
    assert sum(p.grad.nbytes for p in model.parameters()) == expected["gradients"]
    held = sum(value.numel() * 4 for value in states)  # the policy keeps moments in FP32, whatever the weights are in
    assert held == expected["optimizer states"]


def test_an_unknown_policy_is_a_key_error():
    with pytest.raises(KeyError, match="fp12"):
        state_bytes(1, "fp12")


@pytest.mark.parametrize("tp, pp, ep, expected", [(1, 2, 1, 0), (2, 1, 1, 1), (4, 3, 1, 2), (1, 1, 4, 3), (2, 3, 2, 4)])
def test_the_fullest_gpu_of_a_split_model(tp, pp, ep, expected):
    """Added up part by part for 7 layers with two K/V heads: h 64, kv·d 32, f 96, v 256, untied."""
    config = ModelConfig(7, 64, 4, 2, 96, 256)
    qo, kv, mlp, norms, table = 2 * 64 * 64, 2 * 64 * 32, 3 * 64 * 96, 128, 64 * 256
    by_hand = [
        4 * (qo + kv + mlp + norms) + table + 64,  # the last of two stages: head and norm
        7 * (qo // 2 + kv // 2 + mlp // 2 + norms) + table + 64,  # both tables halved
        3 * (qo // 4 + kv // 2 + mlp // 4 + norms) + table // 4 + 64,  # one K/V head each, on two ranks
        7 * (qo + kv + mlp // 4 + norms) + 2 * table + 64,
        3 * (qo // 2 + kv // 2 + mlp // 4 + norms) + table // 2 + 64,
    ]
    assert param_count(config, tp, pp, ep) == by_hand[expected]


# Activations of a GPT: the published numbers.


@pytest.mark.parametrize(
    "mode, gib", [("none", (9.25, 46.25, 145.69)), ("selective", (4.25, 21.25, 66.94)), ("full", (0.25, 1.25, 3.94))]
)
def test_activations_by_recomputation(mode, gib):
    for shape, size in zip(SHAPES.values(), gib, strict=True):
        assert gpt_activation_bytes(*shape, 1, 1024, mode) / GiB == pytest.approx(size, abs=0.0051)


@pytest.mark.parametrize(
    "model, split, gib",
    [
        ("70B", {"tp": 8}, 8.125),
        ("70B", {"tp": 16}, 7.1875),
        ("70B", {"tp": 8, "sp": True}, 2.65625),
        ("70B", {"tp": 16, "sp": True}, 1.328125),
        ("8B", {"tp": 2}, 2.75),
        ("8B", {"tp": 2, "cp": 4}, 0.6875),
    ],
)
def test_activations_by_split(model, split, gib):
    assert gpt_activation_bytes(*SHAPES[model], 1, 1024, "selective", **split) / GiB == gib


@pytest.mark.parametrize(
    "mode, split, gib",
    [
        ("none", {"tp": 8}, 11.25),
        ("none", {"tp": 8, "sp": True}, 5.78125),
        ("full", {"tp": 8}, 1.25),
        ("full", {"tp": 8, "sp": True}, 0.15625),
        ("full", {"cp": 4}, 0.3125),
    ],
)
def test_what_a_split_leaves_whole(mode, split, gib):
    """TP splits the scores, and leaves a layer's input whole; SP splits it."""
    assert gpt_activation_bytes(*SHAPES["70B"], 1, 1024, mode, **split) / GiB == gib


def test_a_token_of_a_context_parallel_rank_sees_the_whole_sequence():
    assert gpt_activation_bytes(*SHAPES["8B"], 1, 4096, cp=4) == gpt_activation_bytes(*SHAPES["8B"], 1, 4096) / 4


@pytest.mark.parametrize(
    "model, plotted",
    [
        ("8B", ("9.25", "28.5", "97.0", "354.0", "1348.1")),
        ("70B", ("46.3", "142.5", "485.0", "1770.1", "6740.1")),
        ("405B", ("145.7", "448.9", "1527.8", "5575.6", "21231.3")),
    ],
)
def test_the_playbooks_activation_plot(model, plotted):
    """It has one mask of s·b·h bytes more than the formula."""
    for seq, size in zip((1024, 2048, 4096, 8192, 16384), plotted, strict=True):
        found = (gpt_activation_bytes(*SHAPES[model], 1, seq) + seq * SHAPES[model][1]) / GiB
        decimals = len(size.split(".")[1])
        assert abs(found - float(size)) <= 0.5 * 10**-decimals + 1e-9, f"{seq} tokens"


def test_gpt3_is_the_papers_example():
    """Korthikanti et al. 2022: selective recomputation saves 70% of the activations of GPT-3 175B at 2,048 tokens."""
    shape = (96, 12288, 96, 1, 2048)
    saved = 1 - gpt_activation_bytes(*shape, "selective") / gpt_activation_bytes(*shape)
    assert saved == pytest.approx(0.70, abs=0.005)


# Activations of our model: what autograd keeps.


def kept_by_autograd(model: nn.Module, forward) -> int:
    """Bytes of all storages saved for a backward, other than those of parameters; written without course_lib."""
    parameters, held = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    assert result.requires_grad
    return sum(storage.nbytes() for address, storage in held.items() if address not in parameters)


class FusedNorm(torch.autograd.Function):
    """RMSNorm that keeps its input and one number a row, as a fused kernel does."""

    @staticmethod
    def forward(context, x, weight, eps):
        scale = x.float().square().mean(-1, keepdim=True).add(eps).rsqrt()
        context.save_for_backward(x, weight, scale)
        return (x.float() * scale).to(x.dtype) * weight

    @staticmethod
    def backward(context, gradient):
        x, weight, scale = context.saved_tensors
        normal = x.float() * scale
        inner = gradient.float() * weight.float()
        of_x = scale * (inner - normal * (inner * normal).mean(-1, keepdim=True))
        return of_x.to(x.dtype), (gradient * normal).flatten(0, -2).sum(0).to(weight.dtype), None


def plain_attention(q, k, v):
    """Scores and softmax written out, for as many K/V heads as heads. q, k, v: [b, s, a, d]."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    future = torch.full((q.shape[1], q.shape[1]), -torch.inf, dtype=q.dtype).triu(1)
    scores = torch.einsum("bsad,btad->bast", q, k) * q.shape[-1] ** -0.5 + future
    return torch.einsum("bast,btad->bsad", scores.softmax(-1), v)


CONFIGS = {
    "grouped": ModelConfig(2, 64, 4, 2, 176, 256, tied=True),
    "odd": ModelConfig(3, 42, 3, 1, 50, 77),
    "multi-head": ModelConfig(1, 40, 5, 5, 33, 300),
    "heads wider than hidden": ModelConfig(2, 40, 6, 2, 33, 300, head_size=16),
    "heads narrower than hidden": ModelConfig(2, 48, 4, 1, 50, 77, head_size=6),
    "norms of q and k": ModelConfig(2, 40, 6, 2, 33, 300, tied=True, head_size=16, qk_norm=True),  # as Qwen3
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("flash", [True, False], ids=["flash", "plain"])
@pytest.mark.parametrize("fused_norm", [True, False], ids=["fused norm", "chain of operations"])
def test_activations_are_what_autograd_keeps(config, dtype, flash, fused_norm):
    """The whole model with its loss; beyond the formula there is one scalar, the loss's count of tokens."""
    model, (batch, seq) = Transformer(config).to(dtype), (3, 37)
    for block in model.blocks:
        block.attention.core = block.attention.core if flash else plain_attention
    if fused_norm:
        for module in [module for module in model.modules() if isinstance(module, nn.RMSNorm)]:
            module.forward = lambda x, norm=module: FusedNorm.apply(x, norm.weight, norm.eps)
    inputs, targets = (torch.randint(config.vocab, (batch, seq)) for _ in range(2))
    kept = kept_by_autograd(model, lambda: loss(model(inputs), targets))
    counted = activation_bytes(config, batch, seq, dtype.itemsize, flash=flash, fused_norm=fused_norm)
    assert round(kept - counted, 3) == 4, f"kept {kept}, counted {counted}"


def test_the_fused_norm_of_these_tests_is_rms_norm():
    """Otherwise what it keeps would say nothing."""
    x, weight = torch.randn(2, 3, 5, requires_grad=True), torch.randn(5, requires_grad=True)
    ours, theirs = FusedNorm.apply(x, weight, 1e-5), F.rms_norm(x, (5,), weight, 1e-5)
    torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad(out.square().sum(), (x, weight)) for out in (ours, theirs)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("seq", [1024, 4096])
def test_selective_recomputation_takes_the_core_and_full_takes_the_layer(seq):
    config, tokens = PRESETS["llama3-8B"], 2 * seq
    none, selective, full = (
        activation_bytes(config, 2, seq, recompute=mode, flash=False) for mode in ("none", "selective", "full")
    )
    plain = layer_activations(config, seq, flash=False)
    copies_and_scores = 2 * (2 * (4096 - 1024)) + 2 * 32 * seq  # K and V copied to all heads, softmax
    assert none - selective == 32 * tokens * copies_and_scores
    assert none - full == 32 * tokens * (sum(plain.values()) - 2 * 4096)


def test_context_parallelism_leaves_a_part_of_the_tokens():
    config = PRESETS["llama3-8B"]
    assert activation_bytes(config, 1, 8192, cp=4) == activation_bytes(config, 1, 2048)
    plain = {"flash": False, "recompute": "none"}
    assert activation_bytes(config, 1, 8192, cp=4, **plain) == activation_bytes(config, 1, 8192, **plain) / 4


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_and_sequence_parallelism_split_everything_but_the_indices(tp):
    config, tokens = PRESETS["llama3-8B"], 2048
    indices = tokens * (16 + 2 * 128)
    whole, split = (activation_bytes(config, 1, tokens, tp=degree, sp=degree > 1) - indices for degree in (1, tp))
    assert split == whole / tp
    without_sp = activation_bytes(config, 1, tokens, tp=tp) - indices
    regions = 32 * 2 * (2 * 4096 + 4) + 32 * 2 * 2 * 4096 + (2 * 4096 + 4) + 2 * 4096  # norms and what they return
    assert without_sp == pytest.approx(split + tokens * regions * (1 - 1 / tp), rel=1e-12)


def test_key_and_value_heads_are_copied_beyond_their_number():
    config = PRESETS["llama3-8B"]  # 8 K/V heads, on 16 GPUs two copies of each
    more = activation_bytes(config, 1, 1024, tp=16, sp=True) - activation_bytes(config, 1, 1024, tp=8, sp=True) / 2
    indices = 1024 * (16 + 2 * 128) / 2
    assert more == pytest.approx(32 * 1024 * 2 * 2 * 1024 / 16 + indices, rel=1e-9)


def test_a_pipelines_first_stage_holds_as_much_as_the_whole_model():
    """p micro-batches of 1/p of the layers; the last stage holds one, and the loss."""
    config, tokens = PRESETS["llama3-8B"], 4096
    layers = 32 * tokens * sum(layer_activations(config, tokens).values())
    first = activation_bytes(config, 1, tokens, pp=4)
    assert layers < first < layers + tokens * 10_000
    with_loss = activation_bytes(config, 1, tokens, recompute="full", pp=32)
    assert with_loss > 4 * 128256 * tokens, "under full recomputation the stage with the loss is the fullest"


# The sum, the picture and the calculator.


@pytest.mark.parametrize("policy", POLICIES)
def test_training_bytes_adds_up_its_parts(policy):
    config = PRESETS["llama3-8B"]
    parts = training_bytes(config, 2, 4096, policy, "full")
    assert list(parts) == ["parameters", "gradients", "optimizer states", "activations"]
    states = state_bytes(param_count(config), policy)
    assert {name: parts[name] for name in states} == states
    assert parts["activations"] == activation_bytes(config, 2, 4096, 4 if policy == "fp32" else 2, "full")


def test_zero_shards_over_context_parallel_gpus_too():
    config = PRESETS["llama3-8B"]
    parts = training_bytes(config, 1, 4096, zero_stage=1, dp=4, cp=2)
    assert parts["optimizer states"] == 12 * param_count(config) / 8
    assert parts["activations"] == activation_bytes(config, 1, 4096, cp=2)


@pytest.fixture(scope="module")
def calculator():
    """The calculator's controls by description, its picture and its words."""
    import ipywidgets

    rows = memory_calculator().children
    controls = {control.description: control for column in rows[0].children for control in column.children}
    picture, words = rows[1:]
    assert isinstance(picture, ipywidgets.Image) and isinstance(words, ipywidgets.HTML)
    return controls, picture, words


@pytest.fixture
def reset(calculator):
    """The calculator as it opens: Llama-3 8B, one sequence of 4,096 tokens."""
    controls, picture, words = calculator
    for name, value in {"model": "llama3-8B", "batch b": 1, "sequence s": 4096, "precision": "bf16"}.items():
        controls[name].value = value
    controls["recompute"].value, controls["GPU memory"].value = "none", 80
    return controls, picture, words


def test_the_calculator_opens_with_a_picture_and_a_verdict(reset):
    _, picture, words = reset
    assert bytes(picture.value).startswith(b"\x89PNG") and len(picture.value) > 5000
    parts = training_bytes(PRESETS["llama3-8B"], 1, 4096)
    too_much = sum(parts.values()) / GiB - 80
    assert "8.03 billion parameters" in words.value and f"does not fit, {too_much:,.1f} GiB too much" in words.value
    assert all(f"{name} {size / GiB:,.1f}" in words.value for name, size in parts.items())


@pytest.mark.parametrize(
    "control, value",
    [
        ("batch b", 2),
        ("sequence s", 8192),
        ("precision", "fp32"),
        ("recompute", "full"),
        ("GPU memory", 192),
        ("model", "llama3-70B"),
        ("layers L", 31),
        ("hidden h", 4160),
        ("feed-forward f", 14344),
        ("vocabulary v", 128512),
    ],
)
def test_every_control_redraws(reset, control, value):
    controls, picture, words = reset
    before = bytes(picture.value), words.value
    controls[control].value = value
    assert bytes(picture.value) != before[0]
    assert words.value != before[1]


def test_the_verdict_changes_sides(reset):
    controls, _, words = reset
    controls["GPU memory"].value = 192
    spare = 192 - sum(training_bytes(PRESETS["llama3-8B"], 1, 4096).values()) / GiB
    assert f" {spare:,.1f} GiB to spare" in words.value and "not fit" not in words.value


def test_a_moved_size_makes_own_sizes_and_a_preset_moves_the_sizes(reset):
    controls, _, words = reset
    controls["layers L"].value = 16
    assert controls["model"].value == "custom sizes"
    assert f"{param_count(ModelConfig(16, 4096, 32, 8, 14336, 128256)) / 1e9:,.2f} billion" in words.value
    controls["model"].value = "llama3-70B"
    assert [controls[name].value for name in ("layers L", "hidden h", "feed-forward f", "vocabulary v")] == [
        80,
        8192,
        28672,
        128256,
    ]
    assert "70.55 billion" in words.value
    controls["model"].value = "custom sizes"
    assert controls["hidden h"].value == 8192, "the sizes stay where the preset left them"


@pytest.mark.parametrize("hidden", [64, 576, 20480])
def test_own_sizes_work_at_every_width(reset, hidden):
    controls, _, words = reset
    controls["hidden h"].value = hidden
    assert controls["model"].value == "custom sizes" and "GiB" in words.value


def test_every_preset_fits_the_sliders():
    controls = _calculator_controls()
    for name, config in PRESETS.items():
        controls["preset"].value = name
        assert controls["preset"].value == name, "a slider that cannot show a preset's size leaves the preset"
        for size in ("layers", "hidden", "ffn_hidden", "vocab"):
            assert controls[size].value == getattr(config, size)


def test_the_gpus_to_pick_have_the_published_memory():
    rows = read_table("hardware.csv")
    names = {"A100-SXM-40GB": 40, "A100-SXM-80GB": 80, "H100-SXM-80GB": 80, "GH200 (96GB)": 96, "H200-SXM-141GB": 141}
    names |= {"B200-SXM": 180, "MI300X": 192}
    for name, size in names.items():
        published = {float(row["hbm_gb"]) for row in rows if row["gpu"] == name and row["hbm_gb"]}
        assert published == {size} and size in GPUS_GIB.values(), name
