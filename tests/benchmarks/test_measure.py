"""benchmarks/measure.py: as many pairs as a benchmark asks for. CPU."""

from pathlib import Path

import pytest


@pytest.mark.parametrize("constant, argument, expected", [(3, None, 3), (3, 5, 5), (4, None, 4)])
def test_runs_and_rivals_alternate_in_so_many_pairs_after_two(monkeypatch, constant, argument, expected):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    measure = __import__("measure")
    monkeypatch.setattr(measure, "PAIRS", constant)  # as the benchmarks do with their own argument
    calls: list[str] = []
    measure.paired(lambda: calls.append("ours"), lambda: calls.append("theirs"), pairs=argument)
    assert calls == ["ours", "theirs"] * (expected + 2)
