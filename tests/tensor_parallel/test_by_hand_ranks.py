"""course_lib.tensor_parallel.by_hand on two to four ranks: an MLP that is trained without autograd, against one process
and against the package's layers. CPU, gloo.
"""

import json

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from course_lib.single_gpu.training import ADAMW
from course_lib.tensor_parallel import by_hand, model

SIZES = {"hidden": 6, "ffn_hidden": 20, "tokens": 11, "steps": 4, "lr": 0.01, "seed": 3}  # no power of two among them


def in_one_process(hidden, ffn_hidden, tokens, steps, lr, seed):
    """The losses of the same training by autograd, with the same random numbers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator)
    (c, d), (a, b) = (by_hand.mlp_weights(hidden, ffn_hidden, generator) for _ in range(2))
    target, parameters = F.silu(x @ c.t()) @ d.t(), [a.requires_grad_(), b.requires_grad_()]
    optimizer = torch.optim.AdamW(parameters, lr, betas=ADAMW["betas"], weight_decay=ADAMW["weight_decay"])
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(F.silu(x @ a.t()) @ b.t(), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def on_a_group(size, wrong):
    """The records of a training in groups of `size`, or the message with which other sizes are refused."""
    group = dist.new_subgroups(group_size=size)[0] if size < dist.get_world_size() else None
    seen = []
    records = by_hand.train(**SIZES, group=group, on_step=seen.append)
    assert seen == records
    try:
        by_hand.train(**SIZES | wrong, group=group)
    except ValueError as error:
        return records, str(error)


@pytest.mark.parametrize("size", [2, 4])
def test_losses_are_those_of_one_process_and_of_the_layers(ranks, size):
    expected = in_one_process(**SIZES)
    for records, refused in ranks(on_a_group, size, {"ffn_hidden": 21}):
        assert [record["step"] for record in records] == [1, 2, 3, 4]
        for name in ("loss", "layers_loss"):
            assert [record[name] for record in records] == pytest.approx(expected, rel=1e-5)
        assert refused == f"ffn_hidden 21 is not divisible by {size} ranks"
    assert expected[-1] < 0.9 * expected[0]


def test_the_program_trains_by_hand_and_writes_the_records(ranks, tmp_path, capsys):
    argv = ["--by-hand", "--preset", "debug", "--steps", "2", "--batch", "2", "--seq", "16", "--out"]
    records = ranks(model.main, [*argv, str(tmp_path / "out.json")])[0]
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["records"] == records and told["options"]["by_hand"] == "True"
    shown = [line for line in capsys.readouterr().out.splitlines() if "by hand" in line]
    assert len(shown) == 2 and f"loss {records[0]['loss']:.6f} by hand" in shown[0]


@pytest.mark.parametrize("argv", [["--tp", "2"], ["--chunks", "2"], ["--recompute", "full"]])
def test_by_hand_goes_with_no_option_of_the_model(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        model.options(["--by-hand", *argv])
    assert ended.value.code == 2
    assert "--by-hand trains over all ranks on random inputs" in capsys.readouterr().err
