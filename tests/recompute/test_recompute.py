"""course_lib.recompute.modes: the same gradients, the bytes of the formulas, sums of micro-batches. CPU; three want
CUDA.
"""

import copy
import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from course_kit.labs.gpt import GPT
from course_kit.labs.recompute.gradients import micro_batches, uneven
from course_kit.labs.recompute.measures import plain_core, with_core
from course_lib.recompute.modes import (
    FUSED_ATTENTION,
    IGNORED,
    Recomputed,
    accumulate,
    accumulated_step,
    apply_recompute,
    fp32_gradients,
    keep_fused_attention,
    keep_matmuls,
    main,
    options,
    retained_bytes,
)
from course_lib.recompute.profiling import step_flops
from course_lib.single_gpu import training as single_gpu
from course_lib.single_gpu.data import ByteTokenizer, TokenBatches, corpus
from course_lib.single_gpu.memory import activation_bytes, gpt_activation_bytes, param_count
from course_lib.single_gpu.model import PRESETS, ModelConfig, Transformer, causal_attention, loss
from course_lib.single_gpu.profile import MemoryProfile

torch.set_num_threads(1)
CONFIG = ModelConfig(3, 64, 4, 2, 96, 256)
WIDE = ModelConfig(5, 96, 6, 2, 100, 300)
WIDE_HEADS = ModelConfig(3, 48, 6, 2, 100, 256, head_size=16)  # q is twice as wide as the hidden state
QWEN = dataclasses.replace(WIDE_HEADS, qk_norm=True)
CUDA_CONFIG = ModelConfig(4, 256, 4, 2, 704, 1024)
LOSS = 8  # bytes: the mean loss, and the count of targets that it keeps
MODES = {
    "none": ("none", None),
    "selective": ("selective", None),
    "matmuls": ("selective", keep_matmuls),
    "full": ("full", None),
}
every_mode = pytest.mark.parametrize("mode", ["selective", "matmuls", "full"])


def sequences(batch: int = 2, seq: int = 33, vocab: int = 256, device: str = "cpu"):
    """Inputs and targets, each [batch, seq]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab, (2, batch, seq), generator=generator).to(device)


def gradients(model: nn.Module, inputs, targets) -> dict[str, torch.Tensor]:
    """The gradient of each parameter; the same random numbers each time. The loss stands under "loss"."""
    torch.manual_seed(1)
    model.zero_grad()
    step_loss = loss(model(inputs), targets)
    step_loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"loss": step_loss.detach()}


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """No parameter is missing, and every bit is the same."""
    assert list(found) == list(expected)
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def apart(found, expected) -> float:
    """The norm of the difference over the norm, of all tensors together."""
    pairs = list(zip(found, expected, strict=True))
    difference = sum((a.double() - b.double()).square().sum() for a, b in pairs)
    return (difference / sum(b.double().square().sum() for _, b in pairs)).sqrt().item()


def all_grads(model: nn.Module) -> list[torch.Tensor]:
    """The gradients that are there now."""
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


class Counted(TorchDispatchMode):
    """How often each operation runs."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function] = self.counts.get(function, 0) + 1
        return function(*args, **(kwargs or {}))


# Recomputation changes no gradient.

VARIANTS = {
    "flash": lambda: Transformer(CONFIG),
    "plain core": lambda: with_core(Transformer(CONFIG), plain_core),
    "dropout": lambda: Transformer(dataclasses.replace(CONFIG, dropout=0.1)).train(),
    "bf16": lambda: Transformer(CONFIG).bfloat16(),
    "tied": lambda: Transformer(dataclasses.replace(CONFIG, tied=True)),
    "frozen": lambda: frozen(Transformer(CONFIG)),
}


def frozen(model: Transformer) -> Transformer:
    """Embedding and first block are not trained: the first input of a block requires no gradient."""
    model.embedding.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return model


@every_mode
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_mode_has_the_gradients_of_none_bit_by_bit(variant, mode):
    model = VARIANTS[variant]()
    expected = gradients(model, *sequences())
    after = torch.get_rng_state()
    assert apply_recompute(model, *MODES[mode]) is model
    assert_same_bits(gradients(model, *sequences()), expected)
    assert torch.equal(torch.get_rng_state(), after), "the replay leaves the random numbers where forward did"


@every_mode
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_autocast_reaches_the_replay(dropout, mode):
    """Backward runs outside of it."""
    model = Transformer(dataclasses.replace(CONFIG, dropout=dropout))

    def under_autocast():
        torch.manual_seed(1)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            step_loss = loss(model(sequences()[0]), sequences()[1])
        step_loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = under_autocast()
    apply_recompute(model, *MODES[mode])
    assert_same_bits(under_autocast(), expected)


@every_mode
def test_torch_compile_makes_one_graph_of_it(mode):
    """Selective modes too: torch.compile traces a policy that is given by functools.partial."""
    model = Transformer(dataclasses.replace(CONFIG, layers=1))
    expected = gradients(model, *sequences())
    apply_recompute(model, *MODES[mode])
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    step_loss = loss(compiled(sequences()[0]), sequences()[1])
    model.zero_grad()
    step_loss.backward()
    assert torch.equal(step_loss, expected["loss"])
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], rtol=1e-5, atol=1e-7), name


class Scaled(nn.Module):
    """A layer of another library: two linear layers, and an argument by name."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x, scale=1.0):
        return x + self.down(F.gelu(self.up(x))) * scale


def layers_loss(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """A scalar that all layers have a part in."""
    for layer in layers:
        x = layer(x, scale=0.5)
    return x.square().mean()


def test_a_module_list_of_any_model_is_recomputed():
    layers, x = nn.ModuleList(Scaled() for _ in range(4)), torch.randn(64, 8)
    names = list(layers.state_dict())
    expected = torch.autograd.grad(layers_loss(layers, x), list(layers.parameters()))
    kept = {}
    for mode, policy in (("none", None), ("full", None), ("selective", keep_matmuls), ("full", None)):
        assert apply_recompute(layers, mode, policy) is layers and list(layers.state_dict()) == names
        found = torch.autograd.grad(layers_loss(layers, x), list(layers.parameters()))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), mode
        kept[policy or mode] = retained_bytes(layers, lambda: layers_loss(layers, x))
    inputs, up = 4 * 64 * 8 * 4, 4 * 64 * 32 * 4  # bytes of the layers' inputs, and of what the wide ones return
    assert kept["full"] < 2 * inputs and kept["full"] + up <= kept[keep_matmuls] < kept["none"], kept
    apply_recompute(layers, "none")
    assert not any("forward" in vars(layer) for layer in layers)
    with pytest.raises(ValueError, match="needs a policy, such as keep_matmuls"):
        apply_recompute(layers, "selective")


@pytest.mark.parametrize("mode", ["none", "full"])
def test_compiled_blocks_are_refused_and_stay_as_they_are(mode):
    model, tokens = Transformer(ModelConfig(1, 32, 4, 2, 44, 97), 0), torch.randint(97, (2, 8))
    expected = model(tokens)
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    for modules in (model, model.blocks):
        with pytest.raises(ValueError, match="comes before torch.compile"):
            apply_recompute(modules, mode)
    torch.testing.assert_close(model(tokens), expected)


def test_a_model_with_other_blocks_is_refused():
    for model in (nn.Sequential(Scaled()), torch.nn.Module()):
        model.blocks = nn.ModuleList([Scaled()])
        with pytest.raises(TypeError, match=r"course's blocks, not \w+; apply_recompute\(model.layers, .full.\) works"):
            apply_recompute(model, "full")
        assert "forward" not in vars(model.blocks[0])
    with pytest.raises(TypeError, match="not Scaled"):
        apply_recompute(Scaled(), "full")


@every_mode
def test_a_copy_recomputes_with_its_own_weights(mode):
    original = apply_recompute(Transformer(CONFIG), *MODES[mode])
    twin = copy.deepcopy(original)
    before = gradients(original, *sequences())
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.01)
    expected = gradients(apply_recompute(copy.deepcopy(twin), "none"), *sequences())
    original.zero_grad()
    assert_same_bits(gradients(twin, *sequences()), expected)
    assert all(p.grad is None for p in original.parameters()), "the copy's backward does not touch the original"
    assert not torch.equal(before["loss"], expected["loss"])


@every_mode
def test_a_model_that_had_no_memory_yet(mode):
    """On the meta device, as later notebooks make large models; the weights come afterwards."""
    with torch.device("meta"):
        model = apply_recompute(Transformer(CONFIG), *MODES[mode])
    loss(
        model(torch.zeros(2, 8, dtype=torch.int64, device="meta")), torch.zeros(2, 8, dtype=torch.int64, device="meta")
    )
    model = model.to_empty(device="cpu")
    model.init_weights()
    assert_same_bits(gradients(model, *sequences()), gradients(Transformer(CONFIG), *sequences()))


@every_mode
def test_without_a_graph_there_is_nothing_to_replay(mode):
    model = Transformer(CONFIG).eval()
    inputs, targets = sequences()
    expected = model(inputs).detach()
    apply_recompute(model, *MODES[mode])
    with torch.no_grad(), Counted() as seen:
        found = model(inputs)
    assert torch.equal(found, expected) and not found.requires_grad
    assert seen.counts[torch.ops.aten.mm.default] == 7 * CONFIG.layers + 1
    with torch.inference_mode():
        assert torch.equal(model(inputs), expected)
    assert torch.equal(model(inputs).detach(), expected), "eval, with a graph"


@every_mode
def test_names_and_weights_stay(mode):
    plain, model = Transformer(CONFIG), apply_recompute(Transformer(CONFIG), *MODES[mode])
    assert_same_bits(model.state_dict(), plain.state_dict())
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    model.load_state_dict(Transformer(CONFIG, seed=3).state_dict())
    assert_same_bits(gradients(model, *sequences()), gradients(Transformer(CONFIG, seed=3), *sequences()))


@every_mode
def test_a_recomputed_model_is_saved_and_loaded(mode, tmp_path):
    model = apply_recompute(Transformer(CONFIG), *MODES[mode])
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert_same_bits(gradients(loaded, *sequences()), gradients(model, *sequences()))


def test_each_mode_takes_the_one_before_off():
    model = Transformer(CONFIG)
    for first in MODES:
        for second in MODES:
            apply_recompute(apply_recompute(model, *MODES[first]), *MODES[second])
            apply_recompute(model, *MODES[second])
            functions = [function for block in model.blocks for function in (block.forward, block.attention.core)]
            wrapped = [isinstance(function, Recomputed) for function in functions]
            layer = {"none": [False, False], "selective": [False, True]}.get(second, [True, False])
            assert wrapped == layer * CONFIG.layers, (first, second)
            inner = [getattr(function, "function", None) for function in functions]
            assert not any(isinstance(function, Recomputed) for function in inner), "wrapped once"
    apply_recompute(model, "none")
    for block in model.blocks:
        assert "forward" not in vars(block) and block.attention.core is causal_attention


@pytest.mark.parametrize(
    "mode, policy, words",
    [
        ("some", None, "mode 'some': it is none, selective or full"),
        (None, None, "mode None"),
        ("matmuls", None, "it is none, selective or full"),
        ("full", keep_matmuls, "a policy belongs to mode selective, not full"),
        ("none", keep_matmuls, "a policy belongs to mode selective, not none"),
    ],
)
def test_bad_input_changes_nothing(mode, policy, words):
    model = apply_recompute(Transformer(CONFIG), "full")
    before = [block.forward for block in model.blocks]
    with pytest.raises(ValueError, match=words):
        apply_recompute(model, mode, policy)
    assert [block.forward for block in model.blocks] == before


def test_a_block_runs_twice_with_full_and_once_without():
    runs = {}
    for mode in MODES:
        model, calls = apply_recompute(Transformer(CONFIG), *MODES[mode]), []
        for index, block in enumerate(model.blocks):
            block.attention_norm.register_forward_hook(lambda *_, index=index: calls.append(index))
        gradients(model, *sequences())
        runs[mode] = calls
    assert runs["none"] == runs["selective"] == [0, 1, 2]
    assert runs["full"] == runs["matmuls"] == [0, 1, 2, 2, 1, 0], "backward replays the last block first"


@pytest.mark.parametrize(
    "mode, products, attention",
    [("none", 7, 1), ("selective", 7, 1), ("matmuls", 7, 1), ("full", 13, 2)],  # full: all but down_proj again
)
def test_how_often_the_dear_operations_run(mode, products, attention):
    model = apply_recompute(Transformer(CONFIG), *MODES[mode])
    with Counted() as seen:
        gradients(model, *sequences())
    backward = 2 * (7 * CONFIG.layers + 1)
    assert seen.counts[torch.ops.aten.mm.default] - backward == products * CONFIG.layers + 1
    assert sum(seen.counts.get(operation, 0) for operation in FUSED_ATTENTION) == attention * CONFIG.layers


def test_selective_runs_a_plain_core_again():
    model, calls = with_core(Transformer(CONFIG), lambda *qkv: (calls.append(1), plain_core(*qkv))[1]), []
    for mode, times in (("none", 1), ("selective", 2), ("full", 2)):
        calls.clear()
        gradients(apply_recompute(model, mode), *sequences())
        assert len(calls) == times * CONFIG.layers, mode


@pytest.mark.parametrize("policy", [keep_fused_attention, keep_matmuls])
def test_policies_answer_for_every_operation(policy):
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    for operation in FUSED_ATTENTION:
        assert policy(None, operation) == CheckpointPolicy.MUST_SAVE
    for operation in products:
        assert (policy(None, operation) == CheckpointPolicy.MUST_SAVE) == (policy is keep_matmuls)
    for operation in (torch.ops.aten.bmm.default, torch.ops.aten.mul.Tensor, torch.ops.aten.silu.default):
        assert policy(None, operation, 1, other=2) == CheckpointPolicy.PREFER_RECOMPUTE


# Kept bytes against the formulas.


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("core", [causal_attention, plain_core], ids=["flash", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("config", [CONFIG, WIDE, WIDE_HEADS, QWEN], ids=["narrow", "wide", "wide heads", "Qwen3"])
def test_kept_bytes_are_those_of_the_formula(config, dtype, core, mode):
    model = apply_recompute(with_core(Transformer(config).to(dtype), core), mode)
    inputs, targets = sequences(3, 41)
    found = retained_bytes(model, lambda: loss(model(inputs.clone()), targets.clone()))
    formula = activation_bytes(config, 3, 41, dtype.itemsize, mode, core is causal_attention, fused_norm=False)
    assert found - formula == pytest.approx(LOSS, abs=1e-3)


def test_kept_products_are_each_layers_input_and_products():
    """Beside full's input: q, k, v, the core's output and statistics, o, gate, up and down."""
    kv = WIDE.kv_heads * WIDE.head_dim
    products = 4 * (2 * WIDE.hidden + 2 * kv + WIDE.hidden + 2 * WIDE.ffn_hidden + WIDE.hidden) + 4 * WIDE.heads
    inputs, kept = sequences(3, 40)[0], {}
    for mode in MODES:
        model = apply_recompute(Transformer(WIDE), *MODES[mode])
        kept[mode] = retained_bytes(model, lambda: model(inputs))
    assert kept["matmuls"] - kept["full"] == 3 * 40 * WIDE.layers * products
    assert kept["full"] < kept["matmuls"] < kept["selective"] == kept["none"]


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("layers, hidden, heads, batch, seq", [(3, 64, 4, 2, 128), (2, 96, 6, 3, 40)])
def test_a_gpt_keeps_what_korthikanti_et_al_count(mode, layers, hidden, heads, batch, seq):
    """Without the statistics of the LayerNorms, two of two bytes a token and norm, and the sum at the end."""
    gpt = GPT(layers, hidden, heads).bfloat16()
    apply_recompute(gpt, mode)

    def forward():
        return gpt(torch.randn(batch, seq, hidden, dtype=torch.bfloat16, requires_grad=True)).sum()

    statistics = 0 if mode == "full" else layers * 2 * 2 * 2 * batch * seq
    expected = gpt_activation_bytes(layers, hidden, heads, batch, seq, mode) + statistics + 2
    assert retained_bytes(gpt, forward) == pytest.approx(expected, abs=1e-3)


def test_a_gpts_gradients_are_the_same_bits_with_dropout_on_the_scores():
    torch.manual_seed(0)
    gpt = GPT(2, 64, 4)
    x, found = torch.randn(2, 16, 64, requires_grad=True), {}
    for mode in MODES:
        apply_recompute(gpt, *MODES[mode])
        torch.manual_seed(1)
        gpt.zero_grad()
        gpt(x).square().sum().backward()
        found[mode] = {name: p.grad.clone() for name, p in gpt.named_parameters()}
        assert_same_bits(found[mode], found["none"])


def test_kept_bytes_counts_the_result_and_leaves_out_parameters():
    model = Transformer(CONFIG)
    with torch.no_grad():
        assert retained_bytes(model, lambda: model(torch.zeros(1, 8, dtype=torch.int64))) == 4 * 8 * CONFIG.vocab
    assert retained_bytes(model, lambda: None) == 0


def test_full_lowers_the_peak_of_a_step():
    config, (inputs, targets), peaks = ModelConfig(12, 64, 4, 2, 96, 256), sequences(4, 64), {}
    for mode in MODES:
        model = apply_recompute(Transformer(config), *MODES[mode])
        with MemoryProfile(model) as profile:
            loss(model(inputs), targets).backward()
        peaks[mode] = sum(profile.peak().values())
    assert 2 * 4 * param_count(config) < peaks["full"] < peaks["matmuls"] < peaks["selective"] == peaks["none"]
    kept = {mode: activation_bytes(config, 4, 64, 4, mode, fused_norm=False) for mode in ("none", "full")}
    one_block = kept["none"] / config.layers
    assert peaks["none"] - peaks["full"] > kept["none"] - kept["full"] - 2 * one_block, "one block's replay is alive"


# Accumulation.


@pytest.mark.parametrize(
    "lengths, size",
    [([24] * 4, 1), ([24] * 5, 2), ([24, 3, 11, 1], 1), ([24, 5, 0, 0, 7, 2], 2), ([0, 9, 24], 1), ([24, 3], 2)],
)
def test_micro_batches_have_the_gradient_of_one_big_batch(lengths, size):
    """The oracle is PyTorch's mean over all targets; float32, relative 1e-5."""
    model = Transformer(CONFIG)
    inputs, targets = uneven(len(lengths), 24, lengths)
    whole = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    whole.backward()
    expected = all_grads(model)
    model.zero_grad()
    found = accumulate(model, micro_batches(inputs, targets, size))
    assert found.item() == pytest.approx(whole.item(), rel=1e-5)
    assert found.shape == () and found.dtype == torch.float32 and not found.requires_grad
    assert apart(all_grads(model), expected) < 1e-5


def test_the_mean_of_means_is_another_gradient():
    """What the exact sum is for."""
    model = Transformer(CONFIG)
    inputs, targets = uneven(4, 24, [24, 3, 3, 3])
    accumulate(model, micro_batches(inputs, targets, 1))
    exact = all_grads(model)
    model.zero_grad()
    for part in micro_batches(inputs, targets, 1):
        (F.cross_entropy(model(part[0]).flatten(0, 1), part[1].flatten()) / 4).backward()
    assert apart(all_grads(model), exact) > 0.1


def test_no_target_at_all_is_a_loss_of_zero():
    model = Transformer(CONFIG)
    inputs, targets = uneven(2, 8, [0, 0])
    assert accumulate(model, micro_batches(inputs, targets, 1)).item() == 0
    assert all((grad == 0).all() for grad in all_grads(model))


def test_it_adds_to_the_gradients_that_are_there():
    model, batch = Transformer(CONFIG), micro_batches(*uneven(4, 16, [16, 3, 9, 16]), 2)
    accumulate(model, batch)
    once = all_grads(model)
    accumulate(model, batch)
    assert apart(all_grads(model), [2 * grad for grad in once]) < 1e-6


@pytest.mark.parametrize("as_tensor", [True, False])
def test_tokens_is_what_the_sum_is_divided_by(as_tensor):
    """Two halves, each with the count of both, have the gradient of both together: as two data-parallel ranks."""
    model, (inputs, targets) = Transformer(CONFIG), uneven(4, 16, [16, 3, 9, 16])
    count = (targets != IGNORED).sum()
    expected_loss = accumulate(model, [(inputs, targets)])
    expected = all_grads(model)
    model.zero_grad()
    count = count if as_tensor else int(count)
    parts = [accumulate(model, [part], tokens=count) for part in micro_batches(inputs, targets, 2)]
    assert sum(parts).item() == pytest.approx(expected_loss.item(), rel=1e-6)
    assert apart(all_grads(model), expected) < 1e-5


def test_autocast_is_for_the_products():
    model, seen = Transformer(CONFIG), []
    model.blocks[0].mlp.up_proj.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    batch = micro_batches(*uneven(2, 16, [16, 5]), 1)
    exact = accumulate(model, batch).item()
    expected = all_grads(model)
    model.zero_grad()
    found = accumulate(model, batch, torch.bfloat16)
    assert seen == [torch.float32] * 2 + [torch.bfloat16] * 2
    assert found.dtype == torch.float32 and found.item() == pytest.approx(exact, rel=0.01)
    assert all(grad.dtype == torch.float32 for grad in all_grads(model))
    assert apart(all_grads(model), expected) < 0.05
    assert not torch.is_autocast_enabled("cpu")


def test_a_bf16_model_has_its_loss_in_float32():
    model = Transformer(CONFIG).bfloat16()
    found = accumulate(model, micro_batches(*uneven(2, 16, [16, 5]), 1))
    assert found.dtype == torch.float32 and {grad.dtype for grad in all_grads(model)} == {torch.bfloat16}


def test_no_value_is_read_on_the_host():
    """Fake tensors have shapes alone: reading one fails."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = Transformer(CONFIG)
        words = torch.zeros(2, 8, dtype=torch.int64)
        accumulate(model, [(words, words), (words, words)])


def test_frozen_parameters_get_no_gradient():
    model, expected = frozen(Transformer(CONFIG)), Transformer(CONFIG)
    batch = micro_batches(*uneven(3, 16, [16, 5, 2]), 1)
    accumulate(model, batch)
    accumulate(expected, batch)
    for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        if parameter.requires_grad:
            assert torch.equal(parameter.grad, other.grad), name
        else:
            assert parameter.grad is None, name


def test_one_micro_batchs_activations_are_alive_at_a_time():
    """Eight sequences by one peak where two do; all at once, above by the activations of the others."""
    peaks = {}
    for batch, size in ((2, 1), (8, 1), (8, 8)):
        model, (inputs, targets) = Transformer(CONFIG), uneven(batch, 64, [64] * batch)
        with MemoryProfile(model) as profile:
            accumulate(model, micro_batches(inputs, targets, size))
        peaks[batch, size] = sum(profile.peak().values())
    assert peaks[8, 1] == pytest.approx(peaks[2, 1], rel=0.001)
    one = activation_bytes(CONFIG, 1, 64, 4, fused_norm=False)
    assert peaks[8, 8] - peaks[8, 1] > 6 * one


@every_mode
def test_accumulation_and_recomputation_go_together(mode):
    model, batch = Transformer(CONFIG), micro_batches(*uneven(3, 16, [16, 5, 2]), 1)
    accumulate(model, batch)
    expected = all_grads(model)
    model.zero_grad()
    accumulate(apply_recompute(model, *MODES[mode]), batch)
    assert all(torch.equal(*pair) for pair in zip(all_grads(model), expected, strict=True))


# Float32 gradient sums.


def single_sequences(count: int = 6):
    return micro_batches(*uneven(count, 16, [16] * count), 1)


@pytest.mark.parametrize("tied", [False, True])
def test_sums_are_those_of_float64(tied):
    model = Transformer(dataclasses.replace(CONFIG, tied=tied)).bfloat16()
    exact = None
    for batch in single_sequences():
        model.zero_grad()
        accumulate(model, [batch])
        grads = [grad.double() for grad in all_grads(model)]
        exact = grads if exact is None else [a + b for a, b in zip(exact, grads, strict=True)]
    model.zero_grad()
    with fp32_gradients(model) as sums:
        for batch in single_sequences():
            accumulate(model, [batch])
            assert all(p.grad is None for p in model.parameters())
    assert list(sums) == list(model.parameters()), "one sum for each parameter, a tied one once, in their order"
    for parameter, total in sums.items():
        assert total.shape == parameter.shape and total.dtype == torch.float32 and not total.requires_grad
    assert apart(sums.values(), exact) < 1e-6
    accumulate(model, single_sequences(2))
    in_bf16 = all_grads(model)
    assert all(grad.dtype == torch.bfloat16 for grad in in_bf16), "afterwards .grad is used again"


def test_frozen_parameters_have_no_sum():
    model = frozen(Transformer(CONFIG)).bfloat16()
    with fp32_gradients(model) as sums:
        accumulate(model, single_sequences(1))
    assert set(sums) == {p for p in model.parameters() if p.requires_grad}
    assert all(total.abs().sum() > 0 for total in sums.values())


def test_sums_start_at_zero_each_time():
    model, totals = Transformer(CONFIG), []
    for _ in range(2):
        with fp32_gradients(model) as sums:
            accumulate(model, single_sequences(2))
        totals.append([total.clone() for total in sums.values()])
    assert all(torch.equal(*pair) for pair in zip(*totals, strict=True))


@pytest.mark.parametrize("fails", ["in the body", "in backward"])
def test_an_exception_passes_through_and_takes_the_hooks_off(fails):
    model = Transformer(CONFIG)
    handle = model.blocks[0].mlp.up_proj.weight.register_hook(lambda grad: 1 / 0) if fails == "in backward" else None
    with pytest.raises(ZeroDivisionError), fp32_gradients(model):
        accumulate(model, single_sequences(1))
        raise ZeroDivisionError
    if handle:
        handle.remove()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    model.zero_grad()
    accumulate(model, single_sequences(1))
    assert len(all_grads(model)) == len(list(model.parameters()))


def test_gradients_move_as_they_come():
    """Never two full sets of BF16 gradients; not even one: each is gone before the next layer's are made."""
    model, alive = Transformer(CONFIG).bfloat16(), []

    def count(grad):
        alive.append(sum(p.grad is not None for p in model.parameters()))

    for parameter in model.parameters():
        parameter.register_hook(count)
    with fp32_gradients(model):
        accumulate(model, single_sequences(2))
    assert max(alive) <= 2 and len(alive) == 2 * len(list(model.parameters()))


def test_the_peak_has_no_set_of_bf16_gradients():
    """Many small layers, so that one gradient is little beside all of them."""
    config, peaks = ModelConfig(12, 64, 4, 2, 96, 32), {}
    for moved in (True, False):
        model = Transformer(config).bfloat16()
        inputs, targets = torch.zeros(2, 1, 4, dtype=torch.int64)
        with MemoryProfile(model) as profile:
            if moved:
                with fp32_gradients(model):
                    accumulate(model, [(inputs, targets)] * 2)
            else:
                accumulate(model, [(inputs, targets)] * 2)
        peaks[moved] = sum(profile.peak().values())
    one_set = 2 * param_count(config)
    assert peaks[True] - peaks[False] < 1.2 * one_set, "4 bytes for a sum, less 2 that .grad would have taken"


# The step and the program.


@pytest.fixture(scope="module")
def tokens(text):
    return ByteTokenizer().encode(text)


def fresh():
    """A model and its optimizer."""
    model = Transformer(PRESETS["debug"])
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("micro_batch", [6, 4, 1])
def test_three_steps_are_those_of_single_gpu(tokens, micro_batch, dtype):
    """Float32 1e-5; bfloat16 products round each micro-batch in the same way, so 1e-2 is ample."""
    (model, optimizer), (expected, expected_optimizer) = fresh(), fresh()
    batches, close = TokenBatches(tokens, 6, 32), 1e-5 if dtype == torch.float32 else 1e-2
    for _ in range(3):
        inputs, targets = next(batches)
        found = accumulated_step(micro_batch, model, optimizer, inputs, targets, dtype)
        wanted = single_gpu.train_step(expected, expected_optimizer, inputs, targets, dtype)
        assert found.item() == pytest.approx(wanted.item(), rel=close)
        assert found.shape == () and not found.requires_grad
        assert apart(all_grads(model), all_grads(expected)) < 3 * close, "clipped gradients"
    if dtype == torch.float32:
        for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert apart([parameter], [other]) < 1e-4, name


@pytest.mark.parametrize("max_norm", [0.1, 1e9])
def test_a_step_clips_the_whole_gradient(tokens, max_norm):
    (model, optimizer), (inputs, targets) = fresh(), next(TokenBatches(tokens, 4, 32))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)  # of before: does not count
    accumulated_step(1, model, optimizer, inputs, targets, max_norm=max_norm)
    norm = torch.cat([grad.flatten() for grad in all_grads(model)]).norm().item()
    plain, _ = fresh()
    loss(plain(inputs), targets).backward()
    whole = torch.cat([grad.flatten() for grad in all_grads(plain)]).norm().item()
    assert norm == pytest.approx(min(max_norm, whole), rel=1e-4)


def test_options_of_the_launch_lines():
    chosen = options(["--recompute", "full", "--micro-batch", "1", "--steps", "10"])
    assert (chosen.recompute, chosen.micro_batch, chosen.batch, chosen.steps, chosen.trace) == ("full", 1, 8, 10, None)
    assert options(["--batch", "3"]).micro_batch == 3 and options([]).recompute == "none"
    assert options(["--recompute", "products"]).recompute == "matmuls", "its name in earlier versions"


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--recompute", "some"], "invalid choice: 'some'"),
        (["--micro-batch", "0"], "--micro-batch must be 1 or more"),
        (["--micro-batch", "-2"], "--micro-batch must be 1 or more"),
        (["--micro-batch", "9"], "no more than --batch"),
        (["--micro-batch", "two"], "invalid int value: 'two'"),
        (["--trace", "no/such/folder/trace.json"], "there is no folder no/such/folder"),
        (["--trace", "a folder"], "a folder"),
        (["--trace", "trace.json", "--steps", "4"], "--steps must be 5 or more"),
        (["--batch", "0"], "must be 1 or more"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_an_impossible_option_ends_with_status_2_and_touches_nothing(tmp_path, monkeypatch, capsys, argv, words):
    (tmp_path / "a folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        options(argv)
    assert end.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("recompute: error: ") and words in last
    assert [path.name for path in tmp_path.rglob("*")] == ["a folder"]


SHORT = ["--preset", "debug", "--batch", "4", "--seq", "16", "--dtype", "fp32"]


@pytest.fixture(scope="module")
def text():
    return corpus(200_000)


@pytest.fixture
def short_corpus(monkeypatch, text):
    """The program's corpus, made short: reading all of it takes longer than training on it."""
    monkeypatch.setattr(single_gpu, "corpus", lambda: text)


@pytest.mark.parametrize("mode", MODES)
def test_main_has_the_losses_of_single_gpu(short_corpus, capsys, mode):
    expected = single_gpu.main([*SHORT, "--steps", "3"])
    found = main([*SHORT, "--steps", "3", "--recompute", mode, "--micro-batch", "3"])
    for record, other in zip(found, expected, strict=True):
        assert record["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_main_recomputes_as_it_is_told(short_corpus, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(
        "course_lib.recompute.modes.apply_recompute",
        lambda model, *how: asked.append(how) or apply_recompute(model, *how),
    )
    for mode in MODES:
        main([*SHORT, "--steps", "1", "--recompute", mode])
    assert asked == list(MODES.values())


def test_main_writes_records_and_a_trace(short_corpus, tmp_path, capsys):
    out, trace = tmp_path / "run.json", tmp_path / "trace.json"
    records = main([*SHORT, "--steps", "6", "--micro-batch", "2", "--out", str(out), "--trace", str(trace)])
    written = json.loads(out.read_text())
    assert written["records"] == records and written["options"]["micro_batch"] == "2"
    steps = [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if "ProfilerStep" in event["name"]]
    assert sorted(set(steps)) == ["ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"], "steps 3 to 5, counted from 1"
    assert "HFU" not in capsys.readouterr().out or torch.cuda.is_available()


@pytest.mark.parametrize("mode", ["none", "matmuls", "full"])
def test_main_ends_with_hfu_where_the_peak_is_known(short_corpus, monkeypatch, capsys, mode):
    monkeypatch.setattr(single_gpu, "peak_flops", lambda: 1e10)
    (record,) = main([*SHORT, "--steps", "1", "--recompute", mode])
    used = (flops / record["step_s"] / 1e10 for flops in step_flops(PRESETS["debug"], 4, 16, MODES[mode][0]))
    expected = "last step, FLOPs counted exactly: MFU {:.1%}, HFU {:.1%}".format(*used)
    assert capsys.readouterr().out.splitlines()[-1] == expected


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [CONFIG, WIDE_HEADS, QWEN], ids=["narrow", "wide heads", "Qwen3"])
def test_kept_products_are_those_of_the_formula(config, dtype, flash):
    """But for the loss and its number of targets, 4 bytes each."""
    model = apply_recompute(Transformer(config).to(dtype), "selective", keep_matmuls)
    for block in model.blocks:
        block.attention.core = block.attention.core if flash else plain_core
    inputs, targets = sequences(3, 40, config.vocab)
    kept = retained_bytes(model, lambda: loss(model(inputs.clone()), targets.clone()))
    formula = activation_bytes(config, 3, 40, dtype.itemsize, "matmuls", flash, fused_norm=False)
    assert formula == activation_bytes(config, 3, 40, dtype.itemsize, "products", flash, fused_norm=False)
    assert kept - formula == pytest.approx(8, abs=1e-6)


def test_accumulate_takes_any_iterable_and_refuses_none():
    model, (inputs, targets) = Transformer(CONFIG), sequences(2, 9, CONFIG.vocab)
    whole = accumulate(model, [(inputs, targets)])
    pairs = ((inputs[i : i + 1], targets[i : i + 1]) for i in range(2))
    assert accumulate(model, pairs).item() == pytest.approx(whole.item(), rel=1e-6)
    with pytest.raises(ValueError, match="no micro-batch"):
        accumulate(model, [])
    assert accumulate(model, [], tokens=torch.tensor(3.0)) == 0.0, "all of this rank's part may lie elsewhere"


# On CUDA.


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_cuda_keeps_what_the_formula_says_within_5_percent(mode):
    """By the caching allocator, which rounds each tensor up to 512 bytes; PyTorch fuses the norm in bf16 there."""
    with torch.device("cuda"):
        model = apply_recompute(Transformer(CUDA_CONFIG).bfloat16(), mode)
    inputs, targets = sequences(4, 512, 1024, "cuda")
    gradients(model, inputs, targets)
    before = torch.cuda.memory_allocated()
    step_loss = loss(model(inputs.clone()), targets.clone())
    found = torch.cuda.memory_allocated() - before
    step_loss.backward()
    assert found == pytest.approx(activation_bytes(CUDA_CONFIG, 4, 512, 2, mode), rel=0.05)


@pytest.mark.gpu
@every_mode
def test_cuda_replays_the_same_dropout(mode):
    with torch.device("cuda"):
        model = Transformer(dataclasses.replace(CUDA_CONFIG, dropout=0.1)).train()
    batch = sequences(2, 64, 1024, "cuda")
    expected = gradients(model, *batch)
    after = torch.cuda.get_rng_state()
    apply_recompute(model, *MODES[mode])
    found = gradients(model, *batch)
    assert apart(found.values(), expected.values()) < 1e-4, "another mask would be far off; sums may differ in order"
    assert torch.equal(torch.cuda.get_rng_state(), after)


@pytest.mark.gpu
def test_cuda_accumulates_without_a_synchronization():
    with torch.device("cuda"):
        model = Transformer(CUDA_CONFIG)
    inputs, targets = sequences(4, 64, 1024, "cuda")
    accumulate(model, micro_batches(inputs, targets, 1))  # libraries are loaded
    torch.cuda.set_sync_debug_mode("error")
    try:
        accumulate(model, micro_batches(inputs, targets, 1), torch.bfloat16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
