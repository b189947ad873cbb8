"""examples/own_model.py: a model that is not the course's has the losses of one process, whatever the way."""

import importlib.util
from pathlib import Path

import pytest
import torch

from course_lib.collectives.traffic import count_traffic

FILE = Path(__file__).resolve().parents[2] / "examples" / "own_model.py"


def example():
    """The example, imported from its file."""
    spec = importlib.util.spec_from_file_location("own_model", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compared(way: str) -> tuple[list[float], list[float], int]:
    """On a rank: what the example prints, its layers recomputed; and the bytes that all of that has sent."""
    with count_traffic() as traffic:
        losses = example().compare(way, recompute=True)
    return *losses, traffic.bytes


@pytest.mark.parametrize("way", example().WAYS)
def test_every_way_has_the_losses_of_one_process(way, ranks):
    for together, alone, sent_bytes in ranks(compared, way):
        assert together[-1] < together[0] - 0.1
        torch.testing.assert_close(together, alone, rtol=2e-6, atol=0)
        assert sent_bytes > 50_000, "the ranks share the work"
