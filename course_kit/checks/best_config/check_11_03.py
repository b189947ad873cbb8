"""Check of exercise 11.3: a layer's saved elements, against sums by hand: tp, sp, K/V heads, a mixture."""

from __future__ import annotations

import numpy as np

from course_lib.best_config import step_memory
from course_lib.best_config.clusters import CLUSTERS
from course_lib.best_config.tables import LayoutTable
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.model import PRESETS, ModelConfig


def check() -> None:
    """Assert counts for one layout at a time, for arrays, for wide heads, and for a mixture of experts."""
    config, h100 = (
        PRESETS["llama3-8B"],
        CLUSTERS["H100"].with_software(kept_hidden=11.0, kept_outside_tp=3.0, kept_ffn=5.0),
    )
    h, f, kv = config.hidden, config.ffn_hidden, 1024
    cases = {
        "dp1": (
            9 * h + 2 * kv + 5 * f,
            "elements, not bytes; K and V have 1,024 each, the others the software's counts",
        ),
        "tp4": (
            3 * h + (6 * h + 2 * kv + 5 * f) / 4,
            "without sp, kept_outside_tp of them are not split; tp splits all others",
        ),
        "tp4,sp": ((9 * h + 2 * kv + 5 * f) / 4, "with sp, tp splits all of them"),
        "tp16,sp": ((9 * h + 2 * kv * 2 + 5 * f) / 16, "tp 16 of 8 K/V heads: each head is held twice"),
    }
    for spec, (wanted, why) in cases.items():
        got = float(step_memory.kept_elements(config, h100, Layout.parse(spec)))
        assert abs(got / wanted - 1) < 1e-9, f"{spec}: {wanted:,.0f} elements per token, yours {got:,.0f}: {why}"
    lean = h100.with_software(kept_hidden=8.0, kept_outside_tp=2.0, kept_ffn=4.0)
    got, wanted = float(step_memory.kept_elements(config, lean, Layout(tp=4))), 2 * h + (4 * h + 2 * kv + 4 * f) / 4
    assert abs(got / wanted - 1) < 1e-9, (
        f"tp4, software that keeps 8 h, 2 of them outside, and 4 f: {wanted:,.0f} elements, yours {got:,.0f}"
    )
    counts = step_memory.kept_elements(config, h100, LayoutTable.of(map(Layout.parse, cases)))
    assert np.shape(counts) == (len(cases),) and np.allclose(counts, [wanted for wanted, _ in cases.values()]), (
        "arrays of layouts give other results than one at a time"
    )
    qwen = ModelConfig(36, 2560, 32, 8, 9728, 151936, head_size=128)  # 32 heads of 128 are wider than h
    got = float(step_memory.kept_elements(qwen, h100, Layout(tp=2)))
    wanted = 3 * 2560 + (6 * 4096 + 2 * kv + 5 * 9728) / 2
    assert abs(got / wanted - 1) < 1e-9, (
        f"h 2,560, 32 heads of 128: {wanted:,.0f} elements per token, yours {got:,.0f}; inside attention, heads times "
        "head_dim counts"
    )
    moe = {"experts": 8, "top_k": 2, "ffn_hidden": 7168}
    got = float(step_memory.kept_elements(config, h100, Layout(), moe))
    wanted = 9 * h + 2 * kv + 5 * (2 * 7168 + 8 / 3)
    assert abs(got / wanted - 1) < 1e-6, (
        f"a token uses two of eight experts of 7,168, and the router: {wanted:,.0f} elements, yours {got:,.0f}; "
        "expert_sizes says how many parameters it uses"
    )
