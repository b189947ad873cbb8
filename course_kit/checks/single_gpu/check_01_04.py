"""Check of exercise 01.4: `parameter_parts` against the real models, built on the meta device."""

from __future__ import annotations

from course_kit.checks.single_gpu.counting import counted_parameters
from course_lib.single_gpu import memory
from course_lib.single_gpu.model import PRESETS, ModelConfig


def check() -> None:
    """Assert each of the seven parts for an odd model, and the sum for every preset."""
    odd = ModelConfig(3, 48, 6, 2, 100, 77, head_size=10)
    truth = counted_parameters(odd)
    inside = {"q_o": ("q_proj", "o_proj"), "kv": ("k_proj", "v_proj"), "mlp": (".mlp.",), "norms": ("_norm.",)}
    expected = {
        part: sum(n for name, n in truth.items() if "blocks.0." in name and any(word in name for word in spec))
        for part, spec in inside.items()
    }
    expected |= {
        "embedding": truth["embedding.weight"],
        "head": truth["head.weight"],
        "final_norm": truth["norm.weight"],
    }
    yours = memory.parameter_parts(odd)
    assert set(yours) == set(expected), f"return these seven parts: {', '.join(expected)}"
    for part, count in expected.items():
        layer = " in ONE layer (param_count multiplies)" if part in inside else ""
        assert yours[part] == count, f"{part}: {odd} has {count:,}{layer}, you count {yours[part]:,}"
    for name, config in PRESETS.items():
        total = sum(counted_parameters(config).values())
        assert memory.param_count(config) == total, (
            f"{name}: you count {memory.param_count(config):,}, the model has {total:,}: look at its head, which is "
            f"{'tied' if config.tied else 'not tied'}"
        )
