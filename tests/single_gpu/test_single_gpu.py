"""course_lib.single_gpu.training: training lowers the loss, MFU is the playbook's, options refuse early.

Needs no GPU.
"""

import dataclasses
import json
import math
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from course_lib.single_gpu import training as single_gpu
from course_lib.single_gpu.data import ByteTokenizer, TokenBatches, corpus
from course_lib.single_gpu.memory import param_count
from course_lib.single_gpu.model import PRESETS, ModelConfig, Transformer, loss
from course_lib.single_gpu.training import (
    evaluate,
    flops_per_token,
    main,
    mfu,
    options,
    train,
    train_step,
)

torch.set_num_threads(1)
CONFIG = PRESETS["debug"]
FIELDS = ["step", "loss", "step_s", "tokens_per_s", "mfu", "peak_memory"]


@pytest.fixture(scope="module")
def tokens():
    return ByteTokenizer().encode(corpus(400_000))


def fresh():
    """A model and its optimizer."""
    model = Transformer(CONFIG)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


# Training.


def test_thirty_steps_lower_the_loss(tokens):
    model, optimizer = fresh()
    records = train(model, optimizer, TokenBatches(tokens, batch=8, seq=64), steps=30)
    losses = [record["loss"] for record in records]
    assert losses[0] == pytest.approx(math.log(256), rel=0.05)
    assert sum(losses[-5:]) / 5 < losses[0] - 1.5, "a byte of Python costs far less than a random one"


def test_the_same_seed_gives_the_same_losses(tokens):
    runs = [train(*fresh(), TokenBatches(tokens, 2, 32), steps=3) for _ in range(2)]
    first, second = ([record["loss"] for record in records] for records in runs)
    assert first == second


def test_an_evaluation_is_the_mean_and_changes_nothing(tokens):
    model, _ = fresh()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    found = evaluate(model, TokenBatches(tokens, 2, 32), 3)
    with torch.no_grad():
        losses = [
            loss(model(inputs), targets)
            for _, (inputs, targets) in zip(range(3), TokenBatches(tokens, 2, 32), strict=False)
        ]
    assert found.item() == pytest.approx(sum(losses).item() / 3) and not found.requires_grad
    assert modes == [module.training for module in model.modules()]


@pytest.mark.parametrize("max_norm", [1.0, 0.1, 1e9])
def test_a_step_is_the_step_written_out(tokens, max_norm):
    """Three steps, so that clipping and the optimizer's states count."""
    (model, optimizer), (expected, expected_optimizer) = fresh(), fresh()
    batches = TokenBatches(tokens, 2, 32)
    for _ in range(3):
        inputs, targets = next(batches)
        found = train_step(model, optimizer, inputs, targets, max_norm=max_norm)
        step_loss = nn.functional.cross_entropy(expected(inputs).flatten(0, 1), targets.flatten())
        gradients = torch.autograd.grad(step_loss, list(expected.parameters()))
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        for parameter, gradient in zip(expected.parameters(), gradients, strict=True):
            parameter.grad = gradient * min(1.0, max_norm / (norm + 1e-6))
        expected_optimizer.step()
        assert found.item() == pytest.approx(step_loss.item(), rel=1e-6)
        assert not found.requires_grad and found.shape == ()
    for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        error = (parameter - other).norm() / other.norm()
        assert error < 1e-5, f"{name}: relative error {error:.1e}"


def test_old_gradients_do_not_count(tokens):
    (model, optimizer), (expected, expected_optimizer) = fresh(), fresh()
    inputs, targets = next(TokenBatches(tokens, 2, 32))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    train_step(model, optimizer, inputs, targets)
    train_step(expected, expected_optimizer, inputs, targets)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), expected.parameters(), strict=True))


def test_records_hold_what_each_step_did(tokens):
    (model, optimizer), shown = fresh(), []
    model.eval()
    records = train(model, optimizer, TokenBatches(tokens, 4, 32), steps=3, on_step=shown.append)
    assert shown == records and model.training
    for step, record in enumerate(records, start=1):
        assert list(record) == FIELDS and record["step"] == step
        assert 0 < record["step_s"] < 60
        assert record["tokens_per_s"] == pytest.approx(4 * 32 / record["step_s"])
        assert 4 * 4 * param_count(CONFIG) < record["peak_memory"] < 2**40
        if not torch.cuda.is_available():
            assert record["mfu"] is None
    json.dumps(records)


def test_the_records_mfu_is_that_of_the_device(tokens, monkeypatch):
    monkeypatch.setattr(single_gpu, "peak_flops", lambda: 1e12)
    (record,) = train(*fresh(), TokenBatches(tokens, 2, 32), steps=1)
    assert record["mfu"] == pytest.approx(record["tokens_per_s"] * flops_per_token(CONFIG, 32) / 1e12)
    assert f"MFU {record['mfu']:.1%}" in single_gpu.describe(record)
    assert "MFU" not in single_gpu.describe({**record, "mfu": None})


def test_a_mixtures_mfu_is_that_of_what_a_token_goes_through(tokens, monkeypatch):
    monkeypatch.setattr(single_gpu, "peak_flops", lambda: 1e12)
    model, optimizer = fresh()
    model.active_config = dataclasses.replace(CONFIG, ffn_hidden=2 * 64)
    (record,) = train(model, optimizer, TokenBatches(tokens, 2, 32), steps=1)
    flops = flops_per_token(model.active_config, 32)
    assert flops != flops_per_token(CONFIG, 32)
    assert record["mfu"] == pytest.approx(record["tokens_per_s"] * flops / 1e12)


def test_bfloat16_products_train_as_well(tokens):
    """Autocast: BF16 inside, FP32 weights, gradients and states; losses within 1%."""
    (model, optimizer), seen = fresh(), set()
    model.blocks[0].mlp.up_proj.register_forward_hook(lambda module, args, out: seen.add(out.dtype))
    records = train(model, optimizer, TokenBatches(tokens, 4, 32), 8, torch.bfloat16)
    assert seen == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
    exact = train(*fresh(), TokenBatches(tokens, 4, 32), 8)
    for found, expected in zip(records, exact, strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=0.01)


# MFU and peaks.


@pytest.mark.parametrize(
    "preset, gflops", [("bench-1B", 9.66), ("bench-3B", 25.67), ("bench-8B", 59.59), ("bench-80B", 512.2)]
)
def test_flops_of_the_benchmarked_models(preset, gflops):
    assert flops_per_token(PRESETS[preset], 4096) / 1e9 == pytest.approx(gflops, rel=1e-3)


def test_attention_is_linear_in_the_sequence():
    config = PRESETS["llama3-8B"]
    assert flops_per_token(config, 0) == 6 * param_count(config)
    assert flops_per_token(config, 8192) - flops_per_token(config, 4096) == 12 * 32 * 4096 * 4096


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(2, 48, 6, 2, 96, 131, tied=True, head_size=16, qk_norm=True),
        ModelConfig(2, 48, 6, 2, 96, 131, head_size=4),
        ModelConfig(3, 64, 4, 2, 176, 256, tied=True),
    ],
    ids=["heads wider than hidden", "heads narrower than hidden", "heads as wide"],
)
def test_flops_are_those_that_pytorch_counts(config):
    """FlopCounterMode counts matrix products, attention unmasked, as PaLM does: on the meta device q k^T and scores v
    run as plain products. Beside these 6N has the norms, and the rows of an untied embedding.
    """
    batch, seq = 2, 24
    with torch.device("meta"):
        model, words = Transformer(config), torch.zeros(batch, seq, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        loss(model(words), words).backward()
    idle = (2 * config.layers + 1) * config.hidden + (0 if config.tied else config.vocab * config.hidden)
    assert counter.get_total_flops() == batch * seq * (flops_per_token(config, seq) - 6 * idle)


def test_mfu_of_the_playbooks_1b_run():
    """8 H100, 40,150 tokens/s each, printed as 39.2% of 989.5 TFLOP/s."""
    assert mfu(PRESETS["bench-1B"], 4096, 40149.94, 989.5e12) == pytest.approx(0.392, abs=5e-4)


# The program.


def test_options_of_the_launch_line():
    chosen = options(["--steps", "30", "--preset", "debug", "--dtype", "bf16", "--lr", "0.1"])
    assert (chosen.steps, chosen.preset, chosen.dtype, chosen.lr, chosen.out) == (30, "debug", "bf16", 0.1, None)


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--no-such-option"], "--no-such-option"),
        (["extra"], "extra"),
        (["--preset", "gpt5"], "invalid choice: 'gpt5'"),
        (["--dtype", "fp8"], "invalid choice: 'fp8'"),
        (["--steps", "many"], "invalid int value: 'many'"),
        (["--steps", "0"], "must be 1 or more"),
        (["--batch", "-1"], "must be 1 or more"),
        (["--seq", "0"], "must be 1 or more"),
        (["--lr", "-1"], "--lr"),
        (["--lr", "nan"], "--lr"),
        (["--dataset", "texts"], "--dataset and --tokenizer go together"),
        (["--tokenizer", "words"], "--dataset and --tokenizer go together"),
        (["--dataset", "", "--tokenizer", "words"], "must not be empty"),
        *[
            (["--" + name, "5"], "--column, --split, --subset and --documents go with --dataset")
            for name in ("column", "split", "subset", "documents")
        ],
        (["--dataset", "texts", "--tokenizer", "words", "--documents", "0"], "--documents must be 1 or more"),
        (["--out", "no/such/folder/run.json"], "there is no folder no/such/folder"),
        (["--out", "a folder"], "a folder"),
    ],
)
def test_an_impossible_option_ends_with_status_2_and_touches_nothing(tmp_path, monkeypatch, capsys, argv, words):
    (tmp_path / "a folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        options(argv)
    assert end.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("single_gpu: error: ") and words in last
    assert [path.name for path in tmp_path.rglob("*")] == ["a folder"]


def test_options_touch_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options(["--out", "run.json", "--dataset", "texts", "--tokenizer", "words"])
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def short_corpus(monkeypatch):
    """The program's corpus, made short: reading all of it takes longer than training on it."""
    monkeypatch.setattr(single_gpu, "corpus", lambda: corpus(200_000))


def test_main_trains_prints_and_writes_its_records(tmp_path, capsys, short_corpus):
    out = tmp_path / "run.json"
    argv = ["--preset", "debug", "--steps", "3", "--batch", "2", "--seq", "32", "--dtype", "bf16", "--out", str(out)]
    records = main(argv)
    written = json.loads(out.read_text())
    assert written["records"] == records and [record["step"] for record in records] == [1, 2, 3]
    assert written["options"]["preset"] == "debug" and written["options"]["steps"] == "3"
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0].startswith("debug: 108,864 parameters on ") and len(lines) == 4
    for line, record in zip(lines[1:], records, strict=False):
        assert f"loss {record['loss']:.4f}" in line
        assert all(words in line for words in ("step", "tokens/s", "peak memory", "GiB"))


def test_main_trains_from_the_seed_that_was_given(short_corpus, capsys):
    argv = ["--preset", "debug", "--steps", "2", "--batch", "2", "--seq", "16", "--dtype", "fp32", "--seed"]
    losses = [[record["loss"] for record in main([*argv, seed])] for seed in ("0", "0", "1")]
    assert losses[0] == losses[1] != losses[2]


def test_main_is_what_train_does(short_corpus, capsys):
    argv = ["--preset", "debug", "--steps", "3", "--batch", "2", "--seq", "32", "--dtype", "fp32", "--lr", "0.01"]
    found = main([*argv, "--seed", "7"])
    model = Transformer(CONFIG, seed=7)
    norms, matrices = ([p for p in model.parameters() if p.dim() == n] for n in (1, 2))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    batches = TokenBatches(ByteTokenizer().encode(corpus(200_000)), 2, 32, seed=7)
    for record in found:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        step_loss = loss(model(inputs), targets)
        step_loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert record["loss"] == pytest.approx(step_loss.item(), rel=1e-4)


def test_run_trains_what_is_built_with_the_optimizer_that_is_made(short_corpus, capsys):
    """A wrapper that has the model as `.module`, and SGD."""
    calls = []

    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, tokens):
            return self.module(tokens)

    def build(config, seed):
        calls.append((config.vocab, seed))
        return Wrapper(Transformer(config, seed))

    def make_optimizer(model, lr):
        calls.append((type(model), lr))
        return torch.optim.SGD(model.parameters(), lr=lr)

    argv = ["--preset", "debug", "--steps", "2", "--batch", "2", "--seq", "16", "--seed", "3", "--dtype", "fp32"]
    found = single_gpu.run(options(argv), build=build, make_optimizer=make_optimizer)
    assert calls == [(256, 3), (Wrapper, 2e-3)]
    model = Transformer(CONFIG, seed=3)
    batches = TokenBatches(ByteTokenizer().encode(corpus(200_000)), 2, 16, seed=3)
    expected = train(model, torch.optim.SGD(model.parameters(), lr=2e-3), batches, 2)
    assert [record["loss"] for record in found] == [record["loss"] for record in expected]


def test_the_optimizer_of_the_course_is_adamw_with_its_options():
    model = Transformer(CONFIG)
    optimizer = single_gpu.adamw(model, 0.25)
    matrices, others = optimizer.param_groups
    assert type(optimizer) is torch.optim.AdamW
    assert {*matrices["params"], *others["params"]} == {*model.parameters()}
    assert {p.dim() for p in matrices["params"]} == {2} and {p.dim() for p in others["params"]} == {1}
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.1, 0.0)  # norms and biases do not decay
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["fused"]) == (0.25, (0.9, 0.95), True)


def test_main_takes_a_hugging_face_data_set(monkeypatch, capsys):
    """The vocabulary is the tokenizer's; test_data.py reads real folders."""
    numbers = torch.randint(300, (5000,), dtype=torch.int32)
    tokenizer, calls = mock.Mock(**{"get_vocab.return_value": {"the first": 0, "the last": 299}}), []
    monkeypatch.setattr(
        single_gpu, "hf_tokens", lambda *named, **more: calls.append((named, more)) or (numbers, tokenizer)
    )
    argv = ["--preset", "debug", "--steps", "1", "--batch", "2", "--seq", "16", "--dataset", "d", "--tokenizer", "t"]
    assert main(argv)[0]["loss"] == pytest.approx(math.log(300), rel=0.03)
    assert "5,000 tokens of text" in capsys.readouterr().out
    main([*argv, "--column", "c", "--split", "s", "--subset", "u", "--documents", "7"])
    first = {"column": "text", "split": "train", "subset": None, "documents": None}
    second = {"column": "c", "split": "s", "subset": "u", "documents": 7}
    assert calls == [(("d", "t"), first), (("d", "t"), second)]


@pytest.mark.parametrize("error", [ValueError("t.jsonl: line 3"), OSError("no access"), ImportError("No module 'x'")])
def test_bad_text_ends_the_program_with_one_line(monkeypatch, error):
    monkeypatch.setattr(single_gpu, "hf_tokens", mock.Mock(side_effect=error))
    with pytest.raises(SystemExit) as stop:
        main(["--dataset", "d", "--tokenizer", "t"])
    more = "; --dataset needs pip install -e '.[hf]'" if isinstance(error, ImportError) else ""
    assert stop.value.code == f"{error}{more}"


@pytest.mark.parametrize("named, text", [(["--dataset", "d", "--tokenizer", "t"], "d"), ([], "the text of the course")])
def test_a_text_shorter_than_a_sequence_ends_the_program_with_one_line(monkeypatch, named, text):
    tokenizer = mock.Mock(**{"get_vocab.return_value": {"only": 0}})
    monkeypatch.setattr(single_gpu, "hf_tokens", lambda *named, **more: (torch.zeros(16, dtype=torch.int32), tokenizer))
    monkeypatch.setattr(single_gpu, "corpus", lambda: "sixteen letters!")
    with pytest.raises(SystemExit, match=f"{text}: 16 tokens; --seq 16 needs 17 or more"):
        main([*named, "--seq", "16"])
    assert len(single_gpu.training_text(options([*named, "--seq", "15"]))[0]) == 16
