"""Check of exercise 04.5: which parameters share a bucket, and the order of the buckets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from course_lib.data_parallel import buckets
from course_lib.single_gpu.model import ModelConfig, Transformer
from course_lib.single_gpu.placement import placement_of


def placed(parameters: Iterable[nn.Parameter], names: dict[nn.Parameter, str], bucket_bytes: int) -> list[list[int]]:
    """Return the buckets as places in `names`, which has all parameters. Assert that each of them is in one bucket."""
    made = buckets.make_buckets(parameters, bucket_bytes)
    assert made is not None, "make_buckets returns None: return the list of buckets"
    is_list = isinstance(made, (list, tuple)) and all(isinstance(bucket, (list, tuple)) for bucket in made)
    assert is_list and all(isinstance(p, nn.Parameter) for bucket in made for p in bucket), (
        "return a list of buckets, each of them a list of parameters"
    )
    position = {parameter: i for i, parameter in enumerate(names)}
    result = [[position[parameter] for parameter in bucket] for bucket in made]
    counts = {name: sum(bucket.count(i) for bucket in result) for i, name in enumerate(names.values())}
    lost, twice = [name for name, n in counts.items() if n == 0], [name for name, n in counts.items() if n > 1]
    assert len(lost) < len(names), "no parameter is in any bucket (an iterator can be read only once)"
    which = ", ".join(lost[:3]) + (", ..." if len(lost) > 3 else "")
    assert not lost, (
        f"bucket_bytes {bucket_bytes:,}: in no bucket: {which} ({len(lost)} of {len(names)} parameters). Does your "
        "list hold the buckets still being filled at the end?"
    )
    assert not twice, f"bucket_bytes {bucket_bytes:,}: {twice[0]} is in a bucket more than once"
    return result


def check() -> None:
    """Assert order, sizes and kinds of the buckets of a model, of mixed parameters, and of none."""
    model = Transformer(ModelConfig(3, 64, 4, 2, 96, 300))
    names = {parameter: name for name, parameter in model.named_parameters()}
    nbytes = [parameter.nbytes for parameter in names]
    for limit in (0, 20_000, 40_000, 10**9):  # 20,000: a norm is between larger ones
        made = placed(list(names), names, limit)
        assert [i for bucket in made for i in bucket] == [*range(len(names))][::-1], (
            f"bucket_bytes {limit:,}: from the last parameter to the first"
        )
        for number, bucket in enumerate(made):
            size = sum(nbytes[i] for i in bucket)
            assert size <= limit or len(bucket) == 1, f"a bucket of {size:,} bytes; the limit is {limit:,}"
            fits = number + 1 < len(made) and size + nbytes[made[number + 1][0]] <= limit
            assert not fits, "a bucket ends although the next parameter would fit"
    mixed = [nn.Parameter(torch.zeros(10, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16) * 5]
    mixed[2] = nn.Parameter(torch.zeros(10, device="meta"))
    for index, group in ((4, "a group"), (6, "another group")):
        placement_of(mixed[index]).reduce_group = cast(dist.ProcessGroup, group)
    names = {parameter: f"parameter {i}" for i, parameter in enumerate(mixed)}
    made = placed(iter(mixed), names, 1000)
    assert sorted(map(sorted, made)) == [[0, 8], [1, 3, 5, 7, 9], [2], [4], [6]], (
        f"{made}: one bucket for each dtype, device (parameter 2's) and reduce_group (parameters 4's and 6's)"
    )
    assert made == [[6], [4], [2], [9, 7, 5, 3, 1], [8, 0]], (
        f"{made}: each bucket from the last parameter to the first, and sorted by the parameter that each took last"
    )
    made = placed(iter(mixed), names, 60)
    assert made == [[8], [6], [9, 7, 5], [4], [2], [3, 1], [0]], (
        "60 bytes hold one float32 parameter of 40, or three bfloat16 ones of 20"
    )
    assert buckets.make_buckets([], 100) == [], "no parameters, no buckets"
