"""Layouts drawn by chance, for tests that hold arrays of them against each one by itself."""

import numpy as np

from course_lib.best_config.layouts import degree_rules, degrees, first_reason, setting_rules, with_settings
from course_lib.best_config.tables import LayoutTable
from course_lib.single_gpu.model import ModelConfig

EXPERTS = {"experts": 8, "top_k": 2}


def some_rows(config: ModelConfig, gpus: int, batch: int, seq: int, moe: dict | None, rows: int) -> LayoutTable:
    """Layouts that can be, drawn by chance."""
    settings = {
        "micro_batch": (1, 2, 4), "ep": (1, 2) if moe else (1,), "sequence_parallel": (False, True),
        "schedule": ("1f1b", "afab", "naive", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe"),
        "virtual": (2, 3), "zero_stage": (0, 1, 2, 3), "replicate": (1, 2, 8), "recompute": ("none", "full"),
        "cp_method": ("ring", "ulysses"),
    }  # fmt: skip
    table = degrees(gpus)
    table = table.where(first_reason(degree_rules(config, table, batch, seq), [""]) == 0)
    table = with_settings(table, batch, settings)
    able = np.flatnonzero(first_reason(setting_rules(config, table, batch, seq, moe), [""]) == 0)
    return table.where(np.random.default_rng(0).choice(able, rows, replace=False))
