"""course_lib.zero.program, and the formula of stage 3's overlap: one process, and four ranks. CPU, gloo."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from calls import as_rank
from course_lib.single_gpu import training as single_gpu
from course_lib.zero import optimizer as zero_optimizer
from course_lib.zero.full_sharding import gather_ratio
from course_lib.zero.program import main, options
from course_lib.zero.sharded_models import fully_shard
from course_lib.zero.sharded_parameters import find_blocks

SMALL = ["--preset", "debug", "--steps", "3", "--batch", "2", "--seq", "16"]


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--stage", "0"], "--stage"),
        (["--stage", "4"], "--stage"),
        (["--bucket-mb", "0"], "--bucket-mb must be above 0"),
        (["--bucket-mb", "nan"], "--bucket-mb must be above 0"),
        (["--micro-batch", "9", "--batch", "8"], "--micro-batch must be 1 or more, and no more than --batch"),
        (["--offload", "--stage", "3"], "--offload needs stage 1 or 2"),
        (["--steps", "0"], "--steps, --batch and --seq must be 1 or more"),
    ],
)
def test_bad_options_end_with_one_line(argv, message, capsys):
    with pytest.raises(SystemExit) as ended:
        options(argv)
    assert ended.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]


def losses(argv: list[str]) -> list[float]:
    return [record["loss"] for record in main(argv)]


def test_main_trains_in_each_stage_as_one_process_with_the_whole_batch(ranks):
    alone = single_gpu.main(["--preset", "debug", "--steps", "3", "--batch", "8", "--seq", "16"])
    expected = torch.tensor([record["loss"] for record in alone])
    for more in (
        ["--stage", "1", "--micro-batch", "1"],
        ["--stage", "2", "--micro-batch", "1", "--bucket-mb", "0.1", "--offload"],
        ["--stage", "3", "--micro-batch", "1"],
    ):
        for found in ranks(losses, SMALL + more):
            torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=0, msg=lambda m: f"{more}: {m}")


def test_main_trains_in_bfloat16(ranks):
    alone = single_gpu.main(["--preset", "debug", "--steps", "3", "--batch", "8", "--seq", "16"])
    expected = torch.tensor([record["loss"] for record in alone])
    for stage in ("2", "3"):
        for found in ranks(losses, [*SMALL, "--stage", stage, "--dtype", "bf16", "--grad-fp32"]):
            torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-2, atol=0)  # BF16 has 8 significant bits


def test_gather_ratio_is_that_of_the_two_times():
    tokens, dp, bandwidth, peak, hidden = 4096, 8, 450e9, 989.5e12, 4096
    gather = 2 * 16 * hidden**2 * (dp - 1) / (dp * bandwidth)
    forward = 2 * 16 * hidden**2 * tokens / peak
    assert gather_ratio(tokens, dp, bandwidth, peak) == pytest.approx(gather / forward)
    # The Ultra-Scale Playbook counts elements, and has 0.235 here; in bytes of BF16 it is twice that.
    assert gather_ratio(tokens, dp, bandwidth, peak) == pytest.approx(2 * 0.235, rel=2e-3)


def test_units_are_the_blocks_and_what_stands_between():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.ReLU()
            self.inner = nn.Module()
            self.inner.before = nn.Linear(2, 2)
            self.inner.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
            self.inner.after = nn.Linear(2, 2)
            self.last = nn.Linear(2, 2)

    model = Model()
    inner = model.inner
    expected = [
        [model.first, model.second],
        [inner.before],
        [inner.layers[0]],
        [inner.layers[1]],
        [inner.after],
        [model.last],
    ]
    assert find_blocks(model) == expected
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert find_blocks(net) == [[net[0]], [net[1]], [net[2]]]
    assert find_blocks(nn.Linear(2, 2)) == []


def without_parameters() -> list[torch.Tensor]:
    model = fully_shard(nn.Sequential(nn.ReLU(), nn.Flatten()))
    out = model(torch.tensor([[-1.0, dist.get_rank()]]))
    model.finish()
    return [out, *model.parameters()]


def test_a_module_without_parameters_runs(ranks):
    for rank, found in enumerate(ranks(without_parameters)):
        assert len(found) == 1 and found[0].tolist() == [[0.0, rank]]


@pytest.mark.parametrize(("world_size", "given", "megabytes"), [(4, None, 25), (64, None, 64), (64, 3.0, 3.0)])
def test_buckets_grow_with_the_ranks(world_size, given, megabytes, monkeypatch):
    """A rank sends its piece of a bucket: of 25 MB over 1,024 ranks that would be 24 KB."""
    found = []
    real = zero_optimizer.split_into_buckets
    monkeypatch.setattr(zero_optimizer, "check_same_model", lambda *given: None)
    monkeypatch.setattr(zero_optimizer, "split_into_buckets", lambda *given: found.append(given[2]) or real(*given))
    with as_rank(0, world_size):
        zero_optimizer.ZeroOptimizer(torch.nn.Linear(2, 3), torch.optim.SGD, bucket_mb=given, lr=0.1)
    assert found == [megabytes]
