"""Check of exercise 09.17: `pipeline_ratio`, the ratio of a message's time to the next stage's forward."""

from __future__ import annotations

from course_lib.pipeline import runner


def check() -> None:
    """Assert a number, and how the ratio depends on each argument."""
    ratio = runner.pipeline_ratio(4096, 4, 450e9, 989.5e12)
    assert abs(ratio - 0.0083876) < 1e-5, (
        f"h = 4096, 4 layers, 450 GB/s: {ratio:.5f} instead of 0.00839 (twice the playbook's 0.004)"
    )
    for arguments, factor, why in (
        ((4096, 4, 50e9, 989.5e12), 9, "a ninth of the bandwidth: nine times the ratio"),
        ((8192, 2, 450e9, 989.5e12), 1, "h doubled, layers halved: the same"),
        ((4096, 4, 450e9, 989.5e12, 1), 0.5, "one byte per element halves it"),
        ((4096, 4, 450e9, 2 * 989.5e12), 2, "a GPU twice as fast, and the message takes as long: twice the ratio"),
    ):
        assert abs(runner.pipeline_ratio(*arguments) / ratio - factor) < 1e-6, why
