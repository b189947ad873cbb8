"""course_lib.kernels.program.use_kernels: a model of kernels trains as the plain one, by kernels alone. CPU,
interpreted.
"""

import copy
import dataclasses
import functools
import gc
import json

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from calls import said
from course_kit.checks.guard_bands import GuardBands
from course_kit.gpu.launches import record_launches
from course_lib.expert_parallel.mixture import apply_moe
from course_lib.kernels.adamw_optimizer import FusedAdamW
from course_lib.kernels.fused_loss import defer_head, linear_cross_entropy
from course_lib.kernels.fused_norm import FusedRMSNorm
from course_lib.kernels.fused_rope import rope
from course_lib.kernels.fused_swiglu import swiglu
from course_lib.kernels.program import FusedBlock, main, options, use_kernels
from course_lib.recompute.modes import apply_recompute, keep_matmuls, retained_bytes
from course_lib.single_gpu.model import Block, ModelConfig, Transformer, causal_attention, loss
from split_models import differing, init

torch.set_num_threads(1)
CONFIG = ModelConfig(2, 24, 4, 2, 37, 61)
RECOMPUTE = {
    "none": ("none", None),
    "selective": ("selective", None),
    "matmuls": ("selective", keep_matmuls),
    "full": ("full", None),
}
MAX_NORM = 0.5
A_LAYER = 5  # launches: two norms, two of RoPE, one SwiGLU


def model_of(config: ModelConfig) -> Transformer:
    """Weights of such a size that no gradient is but rounding errors."""
    model = Transformer(config)
    for name, parameter in model.named_parameters():
        init(name, parameter, config)
    return model


def batch(step: int, config: ModelConfig = CONFIG) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step, each [2, 3]; some targets do not count."""
    inputs, targets = torch.randint(config.vocab, (2, 2, 3), generator=torch.Generator().manual_seed(step)).unbind()
    targets = targets.clone()
    targets[0, : step + 1] = -100
    return inputs.clone(), targets


def eager_loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return loss(model(inputs), targets)


def fused_loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return linear_cross_entropy(model(inputs), model.head.weight, targets)


def trained(model: nn.Module, loss_of, optimizer, autocast: bool = False) -> dict[str, torch.Tensor]:
    """Losses, gradients and norms of 3 clipped steps, and the weights after them, by name."""
    found = {}
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            step_loss = loss_of(model, *batch(step, model.config))
        step_loss.backward()
        found[f"loss {step}"] = step_loss.detach()
        found |= {f"gradient {step} {name}": p.grad.clone() for name, p in model.named_parameters()}
        found[f"norm {step}"] = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return found | {f"weight {name}": tensor.clone() for name, tensor in model.state_dict().items()}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)


ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1}  # eps: above the gradients' rounding


# The same training.


def test_training_is_that_of_the_plain_model():
    """Losses, gradients, norms, weights after 3 steps, float32: within 1e-5 of each tensor's largest element."""
    plain, model = model_of(CONFIG), use_kernels(model_of(CONFIG))
    assert not differing(trained(model, eager_loss, sgd(model)), trained(plain, eager_loss, sgd(plain)))


def test_so_it_is_with_the_kernels_of_loss_and_optimizer():
    """Of a tied weight too: its gradients come from the embedding and from inside the loss."""
    config = dataclasses.replace(CONFIG, tied=True)
    plain, model = model_of(config), defer_head(use_kernels(model_of(config)))
    expected = trained(plain, eager_loss, torch.optim.AdamW(plain.parameters(), **ADAMW))
    assert not differing(trained(model, fused_loss, FusedAdamW(model.parameters(), **ADAMW)), expected)


@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
def test_in_bfloat16_it_is_as_exact_as_the_plain_model(how):
    """Errors by norm against float64, of the first step: the loss within 1%, no gradient's above 1.5 times that of
    PyTorch's operations and 0.5%. The dtypes are the plain model's.
    """

    def gradients(model: nn.Module, loss_of) -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            value = loss_of(model, *batch(0))
        value.backward()
        return {"loss": value.detach()} | {name: p.grad for name, p in model.named_parameters()}

    exact_model = model_of(CONFIG).double()
    logits, targets = exact_model(batch(0)[0]), batch(0)[1]
    value = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    value.backward()
    exact = {"loss": value.detach()} | {name: p.grad for name, p in exact_model.named_parameters()}
    plain, model = model_of(CONFIG), use_kernels(model_of(CONFIG))
    if how == "bfloat16":
        plain, model = plain.bfloat16(), model.bfloat16()
    deferred = defer_head(copy.deepcopy(model))
    theirs = gradients(plain, eager_loss)
    for ours in (gradients(model, eager_loss), gradients(deferred, fused_loss)):
        for name, expected in exact.items():
            error, rivals = ((found[name] - expected).norm() / expected.norm() for found in (ours, theirs))
            assert error <= 1.5 * rivals + 5e-3, (name, error, rivals)
            assert ours[name].dtype == theirs[name].dtype
        assert abs(ours["loss"] / exact["loss"] - 1) < 1e-2


@functools.cache
def one_step(mode: str, autocast: bool) -> tuple[int, int, dict[str, torch.Tensor]]:
    """Launches forward, launches backward, gradients and loss."""
    model = apply_recompute(defer_head(use_kernels(model_of(CONFIG))), *RECOMPUTE[mode])
    with record_launches() as launched, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = fused_loss(model, *batch(0))
    with record_launches() as launched_back:
        value.backward()
    found = {name: p.grad for name, p in model.named_parameters()} | {"loss": value.detach()}
    return len(launched), len(launched_back), found


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mode", ["selective", "matmuls", "full"])
def test_recomputation_changes_no_bit(mode, autocast):
    """Gradients of float32 and of autocast; the kernels of a recomputed layer run twice."""
    forward, back, expected = one_step("none", autocast)
    forward_now, back_now, found = one_step(mode, autocast)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert forward_now == forward
    assert back_now - back == (0 if mode == "selective" else CONFIG.layers * A_LAYER)


# Made of kernels.


def test_each_layer_is_its_kernels():
    """A launch for each norm, two for q and k, one for SwiGLU; what is left to PyTorch are products, attention, the
    embedding, and one sum a layer: the residual of the MLP.
    """
    model = use_kernels(model_of(CONFIG))
    with record_launches() as launches, GuardBands() as bands:
        model(batch(0)[0])
    bands.check()
    names = [launch.name for launch in launches]
    layers = CONFIG.layers
    assert names.count("rope_kernel") == 2 * layers and names.count("swiglu_forward_kernel") == layers
    assert sum("norm" in name for name in names) == 2 * layers + 1 and len(names) == A_LAYER * layers + 1
    left = {name.removeprefix("aten.") for name in bands.operations}
    assert left.isdisjoint({"_fused_rms_norm", "rms_norm", "rsqrt", "mean", "silu", "cat", "sub"}), left
    adds, plain_adds = count_of("add", bands.operations), count_of("add", operations_of(model_of(CONFIG)))
    assert adds == layers < plain_adds


def operations_of(model: nn.Module) -> list[str]:
    with GuardBands() as bands:
        model(batch(0)[0])
    return bands.operations


def count_of(kind: str, operations: list[str]) -> int:
    return sum(name == f"aten.{kind}" for name in operations)


def test_less_is_kept_for_backward():
    """Bytes that a forward leaves for backward, of b·s tokens in float32. Of a layer: silu(gate), [b, s, f], is not
    kept. Of the loss: no logits and no log-softmax.
    """
    config = dataclasses.replace(CONFIG, vocab=500)
    inputs, targets = batch(0, config)
    tokens = inputs.numel()
    plain, model = model_of(config), use_kernels(model_of(config))
    of_plain, of_model = (retained_bytes(each, lambda: each(inputs)) for each in (plain, model))
    assert of_plain - of_model >= config.layers * tokens * 4 * config.ffn_hidden
    of_plain = retained_bytes(plain, lambda: eager_loss(plain, inputs, targets))
    deferred = defer_head(model)
    of_model = retained_bytes(
        deferred, lambda: (fused_loss(deferred, inputs, targets), gc.collect())
    )  # cycles of launches
    gradients = 4 * (config.vocab + tokens) * config.hidden
    assert of_plain + gradients - of_model >= tokens * 4 * (config.layers * config.ffn_hidden + config.vocab)


def test_modules_change_in_place():
    """Parameters, their order and names, hooks: as before. What another verb has put in a place stays there."""
    model = Transformer(CONFIG)
    parameters, names, seen = list(model.parameters()), list(model.state_dict()), []
    model.blocks[0].register_forward_hook(lambda *_: seen.append("block"))
    model.blocks[0].mlp_norm.register_forward_hook(lambda *_: seen.append("norm"))
    assert use_kernels(model) is model and use_kernels(model) is model
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert list(model.state_dict()) == names
    assert all(type(module) is not nn.RMSNorm and type(module) is not Block for module in model.modules())
    assert all(type(block) is FusedBlock and block.mlp.activation is swiglu for block in model.blocks)
    assert all(block.attention.rope is rope and block.attention.core is causal_attention for block in model.blocks)
    model(batch(0)[0])
    assert seen == ["norm", "block"]
    model.load_state_dict(Transformer(CONFIG, seed=3).state_dict())


class OtherNorm(nn.Module):
    """As the norm that sequence parallelism puts in the place of nn.RMSNorm: no residual."""

    def __init__(self, norm: nn.RMSNorm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


def test_what_a_later_verb_replaces_stays_replaced():
    expected = model_of(CONFIG)(batch(0)[0])
    model, calls = use_kernels(model_of(CONFIG)), []

    def other_activation(gate, up):
        calls.append("activation")
        return nn.functional.silu(gate) * up

    for block in model.blocks:
        block.mlp_norm, block.mlp.activation = OtherNorm(block.mlp_norm), other_activation
    use_kernels(model)
    torch.testing.assert_close(model(batch(0)[0]), expected, rtol=1e-5, atol=1e-6)
    assert calls == ["activation"] * CONFIG.layers and isinstance(model.blocks[0].attention_norm, FusedRMSNorm)


def test_a_mixture_of_experts_has_kernels_too():
    """Its norms, positions, and the shared expert's SwiGLU; the same loss and gradients."""
    arguments = {"experts": 4, "top_k": 2, "ffn_hidden": 16, "shared": 1}
    found = []
    for change in (lambda model: model, use_kernels):
        model = change(apply_moe(model_of(CONFIG), **arguments))
        value = eager_loss(model, *batch(0))
        value.backward()
        found.append({"loss": value.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert not differing(*found[::-1])
    assert all(block.mlp.shared.activation is swiglu for block in model.blocks)


def test_on_meta_on_fake_tensors_and_traced():
    """A model without numbers; a step without numbers; one graph of the whole step."""
    with torch.device("meta"):
        model = use_kernels(Transformer(CONFIG))
    assert model(torch.zeros(2, 5, dtype=torch.int64, device="meta")).shape == (2, 5, CONFIG.vocab)
    with FakeTensorMode():
        model = defer_head(use_kernels(Transformer(CONFIG)))
        inputs = torch.zeros(2, 5, dtype=torch.int64)
        fused_loss(model, inputs, inputs).backward()
        FusedAdamW(model.parameters()).step()
    model = defer_head(use_kernels(model_of(CONFIG)))
    expected = fused_loss(model, *batch(0))
    traced = torch.compile(fused_loss, backend="aot_eager", fullgraph=True)
    assert torch.equal(traced(model, *batch(0)), expected)


def test_after_recomputation_it_is_too_late():
    model = apply_recompute(Transformer(CONFIG), "full")
    text = said(lambda: use_kernels(model))
    assert text.startswith("ValueError: a block's forward is replaced already") and "\n" not in text
    assert type(model.norm) is nn.RMSNorm and type(model.blocks[0]) is Block


# The program.

ARGUMENTS = ["--preset", "debug", "--steps", "2", "--batch", "1", "--seq", "4", "--dtype", "fp32"]


def test_main_trains_as_the_plain_program(tmp_path, capsys):
    """A line a step, the records in a file, and the losses of --plain within 1e-5."""
    file = tmp_path / "records.json"
    with record_launches() as launches:
        records = main([*ARGUMENTS, "--out", str(file)])
    assert {"cross_entropy_kernel", "swiglu_forward_kernel", "rope_kernel"} <= {launch.name for launch in launches}
    written = json.loads(file.read_text())
    assert written["records"] == records and written["options"]["plain"] == "False"
    assert capsys.readouterr().out.count(" | loss ") == 2
    with record_launches() as launches:
        plain = main([*ARGUMENTS, "--plain"])
    assert not launches
    losses, expected = (torch.tensor([record["loss"] for record in each]) for each in (records, plain))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    (first,) = main([*ARGUMENTS, "--steps", "1", "--dtype", "bf16"])
    assert abs(first["loss"] / records[0]["loss"] - 1) < 1e-2


def test_impossible_options_end_the_program(capsys):
    with pytest.raises(SystemExit) as ended:
        options(["--steps", "0"])
    assert ended.value.code == 2 and "must be 1 or more" in capsys.readouterr().err
    assert options([]).plain is False and options(["--plain"]).plain is True
