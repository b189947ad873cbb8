"""course_lib.data_parallel.replicas in one process: which parameters share a bucket, and in which order. CPU."""

import pytest
import torch
from torch import nn

from calls import as_rank
from course_lib.data_parallel import replicas
from course_lib.data_parallel.buckets import MODES, make_buckets
from course_lib.data_parallel.program import options
from course_lib.data_parallel.replicas import overlap_ratio
from course_lib.single_gpu.model import PRESETS, Transformer
from course_lib.single_gpu.placement import placement_of


def parameters(*numels: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(numel, dtype=dtype)) for numel in numels]


def places(given: list[nn.Parameter], buckets: list[list[nn.Parameter]]) -> list[list[int]]:
    """The buckets, each parameter as its place in `given`."""
    place = {parameter: i for i, parameter in enumerate(given)}
    return [[place[parameter] for parameter in bucket] for bucket in buckets]


def test_buckets_are_filled_from_the_last_parameter_up_to_their_size():
    given = parameters(10, 10, 10, 10, 10)
    assert places(given, make_buckets(given, 80)) == [[4, 3], [2, 1], [0]]
    assert places(given, make_buckets(given, 79)) == [[4], [3], [2], [1], [0]]
    assert places(given, make_buckets(iter(given), 1e9)) == [[4, 3, 2, 1, 0]]


def test_a_parameter_larger_than_a_bucket_is_alone():
    given = parameters(1, 100, 1, 1)
    assert places(given, make_buckets(given, 40)) == [[3, 2], [1], [0]]


def test_size_zero_is_a_bucket_for_each_parameter():
    given = parameters(3, 0, 5)
    assert places(given, make_buckets(given, 0))[0] == [2]
    given = parameters(3, 4, 5)
    assert places(given, make_buckets(given, 0)) == [[2], [1], [0]]


def test_only_one_dtype_one_device_and_one_reduce_group_share_a_bucket():
    given = parameters(1, 1) + parameters(1, dtype=torch.float64) + parameters(1, 1, 1)
    placement_of(given[3]).reduce_group = "experts"
    given[4] = nn.Parameter(torch.zeros(1, device="meta"))
    assert sorted(places(given, make_buckets(given, 1e9))) == [[2], [3], [4], [5, 1, 0]]


def test_a_bucket_that_is_complete_late_comes_late():
    """A dtype that appears in every layer, too little for many buckets, must not hold up all the others."""
    matrices, norms = parameters(10, 10, 10, 10), parameters(1, 1, 1, 1, dtype=torch.float64)
    given = [parameter for layer in zip(norms, matrices, strict=True) for parameter in layer]
    assert places(given, make_buckets(given, 80)) == [[7, 5], [3, 1], [6, 4, 2, 0]]


@pytest.mark.parametrize(("world_size", "given", "megabytes"), [(4, None, 25), (64, None, 64), (64, 3.0, 3.0)])
def test_buckets_grow_with_the_ranks(world_size, given, megabytes, monkeypatch):
    """A ring sends a bucket in as many pieces as there are ranks: 25 MB over 1,024 would be 24 KB each."""
    found, real = [], replicas.Reducer
    monkeypatch.setattr(replicas, "check_same_model", lambda *given: None)
    monkeypatch.setattr(replicas, "Reducer", lambda *given: found.append(given[3]) or real(*given))
    with as_rank(0, world_size):
        replicas.DataParallel(nn.Linear(2, 3), bucket_mb=given)
    assert found == [megabytes]


def test_every_parameter_of_the_transformer_is_in_one_bucket_and_the_tied_one_in_the_last():
    model = Transformer(PRESETS["debug"])
    buckets = make_buckets(model.parameters(), 2e5)
    assert sorted(i for bucket in places(list(model.parameters()), buckets) for i in bucket) == list(
        range(len(list(model.parameters())))
    )
    assert len(buckets) > 2 and buckets[-1][-1] is model.embedding.weight
    assert all(sum(p.nbytes for p in bucket) <= 2e5 for bucket in buckets)


def test_there_are_three_modes():
    assert list(MODES) == ["naive", "overlap", "bucket"]


@pytest.mark.parametrize("bandwidth, ratio", [(450e9, 0.235), (50e9, 2.11)])
def test_the_overlap_ratio_is_the_published_one_in_elements_and_twice_that_in_bf16(bandwidth, ratio):
    """The playbook's appendix A3, its slips corrected: 4,096 tokens on 8 H100."""
    assert overlap_ratio(4096, 8, bandwidth, 989.5e12, gradient_bytes=1) == pytest.approx(ratio, rel=5e-3)
    assert overlap_ratio(4096, 8, bandwidth, 989.5e12) == pytest.approx(2 * ratio, rel=5e-3)


def test_the_overlap_ratio_is_that_of_the_two_times():
    params, tokens, dp, bandwidth, peak = 8e9, 5000, 24, 1e11, 5e14
    communication, backward = 2 * (dp - 1) / dp * 4 * params / bandwidth, 4 * tokens * params / peak
    assert overlap_ratio(tokens, dp, bandwidth, peak, 4) == pytest.approx(communication / backward)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--micro-batch", "9", "--batch", "8"], "--micro-batch must be"),
        (["--micro-batch", "0"], "--micro-batch must be"),
        (["--bucket-mb", "0"], "--bucket-mb must be above 0"),
        (["--bucket-mb", "nan"], "--bucket-mb must be above 0"),
        (["--check-every", "-1"], "--check-every 0 or more"),
        (["--mode", "ring"], "invalid choice"),
        (["--mode", "naive", "--reduce-fp32"], "--mode naive has none"),
        (["--mode", "overlap", "--bucket-mb", "3"], "--mode overlap has none"),
    ],
)
def test_bad_options_end_with_one_line(argv, message, capsys):
    with pytest.raises(SystemExit) as ended:
        options(argv)
    assert ended.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]


def test_options_default_to_one_micro_batch():
    chosen = options(["--batch", "6"])
    assert (chosen.micro_batch, chosen.mode, chosen.bucket_mb, chosen.reduce_fp32) == (6, "bucket", None, False)
