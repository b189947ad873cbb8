"""Check of exercise 04.5: which parameters share a bucket, and in which order buckets stand."""

from __future__ import annotations

import torch
from torch import nn

from course_lib.data_parallel import buckets
from course_lib.single_gpu.model import ModelConfig, Transformer


def check() -> None:
    """Assert order, sizes and kinds of the buckets of a model, of mixed parameters, and of none."""
    model = Transformer(ModelConfig(3, 64, 4, 2, 96, 300))
    order = list(model.parameters())
    for limit in (0, 20_000, 40_000, 10**9):  # 20,000: a norm stands between larger ones
        made = buckets.make_buckets(order, limit)
        assert [id(p) for b in made for p in b] == [id(p) for p in reversed(order)], (
            "from the last parameter to the first"
        )
        for number, bucket in enumerate(made):
            size = sum(p.nbytes for p in bucket)
            assert size <= limit or len(bucket) == 1, f"a bucket of {size:,} bytes; the limit is {limit:,}"
            fits = number + 1 < len(made) and size + made[number + 1][0].nbytes <= limit
            assert not fits, "a bucket ends although the next parameter would fit"
    mixed = [nn.Parameter(torch.zeros(10, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16) * 5]
    mixed[2] = nn.Parameter(torch.zeros(10, device="meta"))
    mixed[4].reduce_group, mixed[6].reduce_group = "a group", "another group"
    place = {parameter: i for i, parameter in enumerate(mixed)}
    made = [[place[parameter] for parameter in bucket] for bucket in buckets.make_buckets(iter(mixed), 1000)]
    assert sorted(map(sorted, made)) == [[0, 8], [1, 3, 5, 7, 9], [2], [4], [6]], (
        f"{made}: one bucket for each dtype, device (that of parameter 2) and reduce_group (those of 4 and 6)"
    )
    assert made == [[6], [4], [2], [9, 7, 5, 3, 1], [8, 0]], "sorted by each bucket's last parameter"
    made = [[place[parameter] for parameter in bucket] for bucket in buckets.make_buckets(iter(mixed), 60)]
    assert made == [[8], [6], [9, 7, 5], [4], [2], [3, 1], [0]], (
        "60 bytes hold one float32 parameter of 40, or three bfloat16 ones of 20"
    )
    assert buckets.make_buckets([], 100) == [], "no parameters, no buckets"
