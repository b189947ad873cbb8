"""Layouts that other training programs support, by the program's name in SOFTWARE; an answer for a program lists no
others.

A row has the allowed values of LayoutTable's fields; a field that is not listed may have any value. The course's
programs and DeepSeek-V3's have no row and no limits. The ZeRO stage matters if several ranks share parameters, the
schedule if there is a pipeline.

Sources: nanotron's README (ZeRO-1, AFAB and 1F1B; ZeRO-3 and interleaving are on its roadmap); torchtitan's code, which
takes the schedules of torch.distributed.pipelining; Megatron-Core's distributed optimizer, which is ZeRO-1; Llama 3,
section 3.3.2, whose FSDP keeps parameters gathered; Narayanan et al. 2021, section 5.2, for DeepSpeed's ZeRO-3, without
a pipeline. The row of llm-foundry is what its published runs use. Newer versions support more, such as Megatron-FSDP,
but this planner has no runs of it.
"""

from __future__ import annotations

import numpy as np

from course_lib.best_config.tables import LayoutTable

MISSING = "the program has no such ZeRO stage, schedule or parallelism"
PIPELINES = ("1f1b", "interleaved")
MEGATRON: dict[str, tuple] = {"zero_stage": (0, 1), "schedule": PIPELINES}
FEATURES: dict[str, dict[str, tuple]] = {
    "nanotron": {"zero_stage": (0, 1), "schedule": ("1f1b",)},
    "Megatron-LM": MEGATRON | {"cp": (1,)},
    "Megatron-Core": MEGATRON,
    "NeMo": MEGATRON,
    "Llama 3": MEGATRON,
    "torchtitan": {"zero_stage": (0, 2, 3), "schedule": (*PIPELINES, "zb-v")},
    "llm-foundry": {"zero_stage": (0, 2, 3), "pp": (1,), "cp": (1,), "tp": (1,)},
    "DeepSpeed 2021": {"zero_stage": (3,), "pp": (1,), "cp": (1,)},
}


def supports(program: str, table: LayoutTable) -> np.ndarray:
    """Return the layouts that a program can run, as a boolean array [n]; all for a program without limits."""
    limits = FEATURES.get(program, {})
    free = {"zero_stage": table.dp * table.cp == 1, "schedule": table.pp == 1}
    allowed = [np.isin(getattr(table, name), values) | free.get(name, False) for name, values in limits.items()]
    return np.all([np.ones(len(table), bool), *allowed], axis=0)
