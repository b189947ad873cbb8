"""course_lib.flash_attention.operator in a model: it trains as the plain one, and documents packed into a row as by
themselves. CPU, interpreted.
"""

import copy
import dataclasses
import functools
import json

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from course_kit.gpu.launches import record_launches
from course_lib.flash_attention.operator import (
    flash_attention,
    lengths_to_cu_seqlens,
    main,
    options,
    packed_attention,
    use_flash_attention,
)
from course_lib.kernels.program import use_kernels
from course_lib.recompute.modes import apply_recompute, retained_bytes
from course_lib.single_gpu.model import ModelConfig, Transformer, causal_attention, loss
from split_models import differing, init

torch.set_num_threads(1)
CONFIG = ModelConfig(layers=2, hidden=32, heads=2, kv_heads=1, ffn_hidden=37, vocab=61)
BATCH, SEQ, MAX_NORM = 1, 9, 0.5


def model_of(config: ModelConfig) -> Transformer:
    """Weights of such a size that no gradient is but rounding errors."""
    model = Transformer(config)
    for name, parameter in model.named_parameters():
        init(name, parameter, config)
    return model


def batch(step: int, tokens: int = SEQ) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step, each [b, s]; some targets do not count."""
    numbers = torch.randint(CONFIG.vocab, (2, BATCH, tokens), generator=torch.Generator().manual_seed(step))
    inputs, targets = (x.clone() for x in numbers.unbind())
    targets[0, : step + 1] = -100
    return inputs, targets


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    """Losses, gradients and norms of 3 clipped steps, and the weights after them, by name."""
    found, optimizer = {}, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)
    for step in range(3):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        step_loss = loss(model(inputs), targets)
        step_loss.backward()
        found[f"loss {step}"] = step_loss.detach()
        found |= {f"gradient {step} {name}": p.grad.clone() for name, p in model.named_parameters()}
        found[f"norm {step}"] = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return found | {f"weight {name}": tensor.clone() for name, tensor in model.state_dict().items()}


@functools.cache
def plainly_trained(tied: bool) -> dict[str, torch.Tensor]:
    return trained(model_of(dataclasses.replace(CONFIG, tied=tied)))


@pytest.mark.parametrize("tied, kernels, recompute", [
    (False, False, "none"), (True, True, "none"), (False, False, "full"), (False, True, "selective"),
])  # fmt: skip
def test_training_is_that_of_the_plain_model(tied, kernels, recompute):
    """Losses, gradients, norms, weights after 3 steps, float32: within 1e-5 of each tensor's largest element."""
    model = use_flash_attention(model_of(dataclasses.replace(CONFIG, tied=tied)))
    model = apply_recompute(use_kernels(model) if kernels else model, recompute)
    assert not differing(trained(model), plainly_trained(tied))


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_changes_no_bit(mode):
    """Each repeats forward's kernel. (What "selective" saves elsewhere, the scores, are not there to be saved.)"""
    found = {}
    for how in ("none", mode):
        model = apply_recompute(use_flash_attention(model_of(CONFIG)), how)
        inputs, targets = batch(0)
        with record_launches() as launches:
            loss(model(inputs), targets).backward()
        names = [launch.name for launch in launches]
        count = CONFIG.layers * (1 if how == "none" else 2)
        assert names.count("flash_forward_kernel") == count and names.count("key_gradient_kernel") == CONFIG.layers
        found[how] = [p.grad for p in model.parameters()]
    assert all(map(torch.equal, found["none"], found[mode]))


def test_autocast_and_bfloat16_as_exact_as_the_plain_model():
    """Errors by norm against float64, of the first step: no gradient's above 1.5 times that of SDPA and 0.5%."""

    def gradients(model: nn.Module, autocast: bool = False) -> dict[str, torch.Tensor]:
        inputs, targets = batch(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(inputs)
        nn.functional.cross_entropy(logits.flatten(0, 1).to(torch.float64), targets.flatten()).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    exact = gradients(model_of(CONFIG).double())
    for autocast in (True, False):
        plain = model_of(CONFIG) if autocast else model_of(CONFIG).bfloat16()
        ours = gradients(use_flash_attention(copy.deepcopy(plain)), autocast)
        theirs = gradients(plain, autocast)
        for name, expected in exact.items():
            error, usual = ((found[name] - expected).norm() / expected.norm() for found in (ours, theirs))
            assert ours[name].dtype == theirs[name].dtype and error <= 1.5 * usual + 5e-3, (name, error, usual)


def test_no_layer_keeps_scores():
    """What a forward keeps grows with the tokens; SDPA's own, which keeps none either, keeps as much."""
    model = use_flash_attention(model_of(CONFIG))
    short, long = (retained_bytes(model, lambda: model(batch(0, tokens)[0])) for tokens in (16, 32))
    assert long == 2 * short
    plain = model_of(CONFIG)
    assert long <= retained_bytes(plain, lambda: plain(batch(0, 32)[0]))


def test_parameters_stay_and_an_attention_of_another_verb_is_left_alone():
    model = model_of(CONFIG)
    before = dict(model.named_parameters())

    def other(q, k, v):
        return causal_attention(q, k, v)

    model.blocks[1].attention.core = other
    assert use_flash_attention(model) is model and use_flash_attention(model) is model
    assert [block.attention.core for block in model.blocks] == [flash_attention, other]
    assert all(before[name] is p for name, p in model.named_parameters())


def test_without_numbers():
    """A model on the meta device, and fake tensors."""
    with torch.device("meta"):
        model = use_flash_attention(Transformer(CONFIG))
        assert model(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, CONFIG.vocab)
    with FakeTensorMode():
        model = use_flash_attention(Transformer(CONFIG))
        model(torch.zeros(2, 5, dtype=torch.int64)).float().sum().backward()
        assert all(p.grad.shape == p.shape for p in model.parameters())


# Documents of several lengths in one row.

DOCUMENTS = [5, 1, 12, 3]


def test_packed_documents_are_as_by_themselves():
    """Positions begin anew with each; the mean is over all tokens: loss, logits and every gradient within 1e-5."""
    inputs, targets = (x[:1] for x in batch(7, sum(DOCUMENTS)))
    alone, together = model_of(CONFIG), model_of(CONFIG)
    parts = list(zip(inputs.split(DOCUMENTS, 1), targets.split(DOCUMENTS, 1), strict=True))
    logits = torch.cat([alone(tokens) for tokens, _ in parts], 1)
    expected = loss(logits, targets)
    expected.backward()
    use_flash_attention(together, packed_attention(*lengths_to_cu_seqlens(DOCUMENTS)))
    positions = torch.cat([torch.arange(count) for count in DOCUMENTS])
    packed = together(inputs, positions)
    value = loss(packed, targets)
    value.backward()

    def named(model, **values):
        return {name: p.grad for name, p in model.named_parameters()} | values

    assert not differing(named(together, loss=value, logits=packed), named(alone, loss=expected, logits=logits))
    wrong = use_flash_attention(model_of(CONFIG))(inputs, positions)  # the documents see each other
    assert differing({"logits": wrong}, {"logits": logits})


def test_a_document_does_not_change_with_its_neighbours():
    """Logits and, of its own loss, gradients: to the bit."""
    found = []
    for step in range(2):
        inputs = batch(step, 18)[0][:1]
        inputs[:, 5:11] = torch.arange(6)
        model = use_flash_attention(model_of(CONFIG), packed_attention(*lengths_to_cu_seqlens([5, 6, 7])))
        logits = model(inputs, torch.cat([torch.arange(count) for count in (5, 6, 7)]))[:, 5:11]
        hidden = model.embedding.weight
        found.append((logits, *torch.autograd.grad(logits.square().sum(), hidden)))
    (logits, gradient), (other, other_gradient) = found
    assert torch.equal(logits, other) and torch.equal(gradient[:6], other_gradient[:6])


# The program.


def test_the_program_trains_with_each_attention(tmp_path):
    losses = {}
    for name in ("flash", "tiled", "pytorch"):
        out = tmp_path / f"{name}.json"
        records = main(["--attention", name, "--steps", "1", "--batch", "1", "--seq", "8", "--out", str(out)])
        assert json.loads(out.read_text())
        losses[name] = [record["loss"] for record in records]
    assert losses["flash"] == pytest.approx(losses["pytorch"], rel=1e-5)
    assert losses["tiled"] == pytest.approx(losses["pytorch"], rel=1e-5)


def test_an_unknown_option_ends_the_program(capsys):
    with pytest.raises(SystemExit) as ended:
        options(["--attention", "sparse"])
    assert ended.value.code == 2 and "invalid choice: 'sparse'" in capsys.readouterr().err
