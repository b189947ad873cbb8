"""Mixtures of experts, and experts on ranks of their own."""

from course_lib.expert_parallel.mixture import MoE, apply_moe
from course_lib.expert_parallel.model import apply_expert_parallel
from course_lib.expert_parallel.router import Router

__all__ = ["MoE", "apply_moe", "apply_expert_parallel", "Router"]
