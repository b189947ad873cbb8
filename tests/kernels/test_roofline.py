"""course_lib.kernels.roofline: the two ceilings by hand, measured on this machine (a GPU where there is one), and
drawn.
"""

import pytest
import torch

from course_lib.kernels import roofline
from course_lib.kernels.gpus import GPUS
from course_lib.kernels.roofline import Roofline, measure_roofline, roofline_of
from course_lib.kernels.timing import Timing


def test_two_ceilings():
    line = Roofline(peak_flops=100.0, bytes_per_s=20.0)
    assert line.ridge == 5
    assert [line.attainable(each) for each in (1, 5, 50)] == [20, 100, 100]
    assert line.time(flops=100, bytes_moved=40) == 2 and line.bound(100, 40) == "memory"
    assert line.time(flops=300, bytes_moved=40) == 3 and line.bound(300, 40) == "compute"
    assert line.bound(100, 20) == "compute"  # at the ridge
    for flops, size in ((3.0, 7.0), (700.0, 1.0), (5.0, 1.0)):
        assert flops / line.time(flops, size) == pytest.approx(line.attainable(flops / size))
    for wrong in ((0.0, 1.0), (1.0, 0.0), (1.0, float("nan"))):
        with pytest.raises(ValueError, match="above 0"):
            Roofline(*wrong)


def test_the_data_sheets():
    assert roofline_of(GPUS["H100"]).ridge == pytest.approx(295, abs=1)
    assert roofline_of(GPUS["H100"], torch.float32).ridge == pytest.approx(20, abs=0.1)
    with pytest.raises(ValueError, match="no peak for float8_e4m3fn: it has bfloat16"):
        roofline_of(GPUS["A100"], torch.float8_e4m3fn)


class HalfSecond:
    """A time_kernel that runs once, notes what ran, and says that it took half a second."""

    def __init__(self):
        self.ran = []

    def __call__(self, run, device, **options) -> Timing:
        with torch.profiler.profile(record_shapes=True) as log:
            run()
        names = "aten::copy_", "aten::mm"
        self.ran += [(event.name, event.input_shapes[0]) for event in log.events() if event.name in names]
        return Timing((0.5,))


def test_measured_ceilings_are_of_the_work_that_was_done(monkeypatch):
    """What is counted is what ran: the bytes of the copy, read and written, and the FLOPs of the product."""
    timed = HalfSecond()
    monkeypatch.setattr(roofline, "time_kernel", timed)
    monkeypatch.setattr(roofline, "last_cache_bytes", lambda device: 2**16)
    line = measure_roofline("cpu", torch.bfloat16)
    assert timed.ran == [("aten::mm", [256, 256])] * 2 + [("aten::copy_", [8 * 2**16])]
    assert (line.peak_flops, line.bytes_per_s) == (2 * 256**3 / 0.5, 2 * 8 * 2**16 / 0.5)
    assert "this CPU, bfloat16" in line.name


def test_a_product_grows_until_it_is_long_enough(monkeypatch):
    monkeypatch.setattr(roofline, "time_kernel", lambda run, device, **options: Timing((1e-6,)))
    monkeypatch.setattr(roofline, "LARGEST_SIDE", 1024)
    assert roofline.measure_matmul(torch.device("cpu"), torch.float32) == 2 * 1024**3 / 1e-6


def test_this_machine_has_two_ceilings():
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    line = measure_roofline(dtype=dtype)
    assert 1e9 < line.bytes_per_s < 1e14 and 1e8 < line.peak_flops < 1e17
    assert line.bound(1.0, 1e9) == "memory" and line.bound(1e12, 1.0) == "compute"
