"""Mixtures of experts (MoE), and experts sharded over ranks."""

from course_lib.expert_parallel.mixture import MoE, apply_moe
from course_lib.expert_parallel.model import apply_expert_parallel
from course_lib.expert_parallel.router import Router

__all__ = ["MoE", "apply_moe", "apply_expert_parallel", "Router"]
