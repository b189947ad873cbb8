"""PipelineRunner and the checks that TORCH_DISTRIBUTED_DEBUG turns on. One process."""

import pytest
import torch.distributed as dist
from torch import nn

from calls import as_rank
from course_lib.pipeline.runner import PipelineRunner
from course_lib.pipeline.schedules import one_f_one_b


def test_detail_is_refused_where_it_would_hang():
    """Its checks make a rank wait, in each collective, for ranks that wait for what it has not sent yet."""
    before = dist.get_debug_level()
    try:
        with as_rank(0, 2):
            dist.set_debug_level(dist.DebugLevel.DETAIL)
            with pytest.raises(ValueError, match="^TORCH_DISTRIBUTED_DEBUG=DETAIL hangs a pipeline.*: use INFO$"):
                PipelineRunner([nn.Linear(2, 2), nn.Linear(2, 2)], one_f_one_b(2, 4))
            dist.set_debug_level(dist.DebugLevel.INFO)
            PipelineRunner([nn.Linear(2, 2), nn.Linear(2, 2)], one_f_one_b(2, 4))
    finally:
        dist.set_debug_level(before)
