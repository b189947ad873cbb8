"""Optimizer states, gradients and parameters sharded over the ranks of data parallelism."""

from course_lib.zero.optimizer import ZeroOptimizer
from course_lib.zero.sharded_models import full_state_dict, fully_shard, load_full_state_dict

__all__ = ["fully_shard", "full_state_dict", "load_full_state_dict", "ZeroOptimizer"]
