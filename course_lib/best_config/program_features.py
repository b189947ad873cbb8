"""Layouts that other training programs can run, by the program's name in SOFTWARE; answers for it list no others.

Values of a LayoutTable's fields; a field that is not listed may have any value. The course's programs and DeepSeek-V3's
have no row and no limits. The ZeRO stage matters where several ranks share
parameters, the schedule where there is a pipeline.

Sources: nanotron's README (ZeRO-1, AFAB and 1F1B; ZeRO-3 and interleaving are on its roadmap); torchtitan's code, which
takes the schedules of torch.distributed.pipelining; Megatron-Core's distributed optimizer, which is ZeRO-1; Llama 3,
section 3.3.2, whose FSDP keeps parameters gathered; Narayanan et al. 2021, section 5.2, for DeepSpeed's ZeRO-3, without
a pipeline. Of llm-foundry: what its published runs use. Newer versions have more, such as Megatron-FSDP, of which this
planner has no runs.
"""

from __future__ import annotations

import numpy as np

from course_lib.best_config.tables import LayoutTable

MISSING = "the program has no such ZeRO stage, schedule or parallelism"
PIPELINES = ("1f1b", "interleaved")
MEGATRON = {"zero_stage": (0, 1), "schedule": PIPELINES}
FEATURES = {
    "nanotron": {"zero_stage": (0, 1), "schedule": ("1f1b",)},
    "Megatron-LM": MEGATRON | {"cp": (1,)},
    "Megatron-Core": MEGATRON,
    "NeMo": MEGATRON,
    "Llama 3": MEGATRON,
    "torchtitan": {"zero_stage": (0, 2, 3), "schedule": (*PIPELINES, "zb-v")},
    "llm-foundry": {"zero_stage": (0, 2, 3), "pp": (1,), "cp": (1,), "tp": (1,)},
    "DeepSpeed 2021": {"zero_stage": (3,), "pp": (1,), "cp": (1,)},
}


def has(program: str, table: LayoutTable) -> np.ndarray:
    """Return which layouts of a table a program can run, as a boolean array [n]; all for a program without limits."""
    limits = FEATURES.get(program, {})
    free = {"zero_stage": table.dp * table.cp == 1, "schedule": table.pp == 1}
    able = [np.isin(getattr(table, name), values) | free.get(name, False) for name, values in limits.items()]
    return np.all([np.ones(len(table), bool), *able], axis=0)
