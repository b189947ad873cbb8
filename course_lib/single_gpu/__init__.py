"""The model that every notebook transforms, its data and its memory, and one training step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.lazy import lazy_exports

if TYPE_CHECKING:
    from course_lib.single_gpu.config import PRESETS, ModelConfig
    from course_lib.single_gpu.data import TokenBatches
    from course_lib.single_gpu.devices import peak_flops
    from course_lib.single_gpu.hugging_face import from_hf, to_hf
    from course_lib.single_gpu.memory import activation_bytes, gpt_param_count, param_count, state_bytes, training_bytes
    from course_lib.single_gpu.model import Transformer, loss
    from course_lib.single_gpu.placement import Placement, placement_of
    from course_lib.single_gpu.profile import MemoryProfile, saved_bytes
    from course_lib.single_gpu.training import adamw, decay_groups, evaluate, mfu, train, train_step
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "single_gpu.config": "PRESETS ModelConfig",
            "single_gpu.data": "TokenBatches",
            "single_gpu.devices": "peak_flops",
            "single_gpu.hugging_face": "from_hf to_hf",
            "single_gpu.memory": "activation_bytes gpt_param_count param_count state_bytes training_bytes",
            "single_gpu.model": "Transformer loss",
            "single_gpu.placement": "Placement placement_of",
            "single_gpu.profile": "MemoryProfile saved_bytes",
            "single_gpu.training": "adamw decay_groups evaluate mfu train train_step",
        },
    )

__all__ = [
    "TokenBatches",
    "param_count",
    "gpt_param_count",
    "state_bytes",
    "activation_bytes",
    "training_bytes",
    "ModelConfig",
    "PRESETS",
    "Transformer",
    "loss",
    "Placement",
    "placement_of",
    "from_hf",
    "to_hf",
    "MemoryProfile",
    "saved_bytes",
    "train_step",
    "train",
    "adamw",
    "decay_groups",
    "evaluate",
    "mfu",
    "peak_flops",
]
