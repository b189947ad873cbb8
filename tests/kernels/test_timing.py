"""course_lib.kernels.timing: each trap, and how it's avoided, by what is called and in which order; a GPU's own tests
need one.

No test compares wall-clock times with a bound: those that measure use a device whose clock the test turns.
"""

import threading
from types import SimpleNamespace

import pytest
import torch

from course_lib.kernels import timing
from course_lib.kernels.timing import Stream, Timing, launch_only_seconds, time_kernel

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """A clock that only `clock.append(seconds)` moves."""
    passed = []
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: sum(passed)))
    return passed


def test_the_first_runs_do_not_count(clock):
    """Compilation in the first run, then slower and slower steps towards steady: none of that is in the result."""
    times = iter([30.0, 4.0, 2.0, 1.5] + [1.0] * 100)
    found = time_kernel(lambda: clock.append(next(times)), CPU, repeats=7)
    assert found.runs_s == pytest.approx((1.0,) * 7)


def test_a_run_that_never_gets_steady_is_timed_too(clock):
    times = iter([1.0, 3.0] * 50)
    assert len(time_kernel(lambda: clock.append(next(times)), CPU, repeats=5, warmup=9).runs_s) == 5
    assert next(times) in (1.0, 3.0)
    assert len(clock) == 14  # no more than asked for: 9 to warm up, and 5


def test_the_median_is_not_moved_by_an_outlier():
    calm, hit = Timing((1.0, 1.1, 0.9, 1.0, 1.0)), Timing((1.0, 1.1, 0.9, 1.0, 500.0))
    assert calm.median_s == hit.median_s == 1.0
    assert hit.low_s <= hit.median_s <= hit.high_s < 500
    assert Timing((3.0,)).low_s == Timing((3.0,)).high_s == 3.0


def test_caches_are_flushed_before_each_run_and_not_timed(clock, monkeypatch):
    order = []
    empty = torch.empty

    def watched(size, **kwargs):
        cleared = empty(min(size, 64), **kwargs)
        order.append(size)
        cleared.zero_ = lambda: (order.append("flush"), clock.append(100.0))
        return cleared

    monkeypatch.setattr(timing.torch, "empty", watched)
    run = lambda: (order.append("run"), clock.append(1.0))  # noqa: E731
    found = time_kernel(run, CPU, repeats=4)
    assert order[0] > timing.last_cache_bytes(CPU)
    assert order[1:] == ["flush", "run"] * ((len(order) - 1) // 2) and order.count("run") == 3 + 4
    assert found.runs_s == pytest.approx((1.0,) * 4)


def test_without_flush_nothing_is_held(monkeypatch):
    sizes = []
    empty = torch.empty
    monkeypatch.setattr(timing.torch, "empty", lambda size, **kwargs: (sizes.append(size), empty(size, **kwargs))[1])
    time_kernel(lambda: None, CPU, repeats=1, flush=False)
    assert sizes == []


@pytest.mark.parametrize("host_s, runs", [(0.1e-3, 1), (0.9e-3, 2), (3e-3, 3), (1.0, 4)])
def test_the_device_sleeps_for_twice_as_long_as_the_host_launches(clock, monkeypatch, host_s, runs):
    """A run whose launching took longer does not count; what waits for the device itself is not tried for ever."""
    order = []

    class Event:
        def __init__(self, enable_timing):
            self.record = self.synchronize = lambda: None
            self.elapsed_time = lambda end: 7.0

    cuda = SimpleNamespace(Event=Event, _sleep=lambda cycles: order.append(cycles / timing.CLOCK_HZ))
    monkeypatch.setattr(timing.torch, "cuda", cuda)
    run = lambda: (order.append("run"), clock.append(host_s))  # noqa: E731
    assert timing.time_once(run, torch.device("cuda"), lambda: order.append("flush")) == 7e-3
    assert order == [word for start in timing.HEAD_STARTS_S[:runs] for word in ("flush", start, "run")]


def test_the_last_cache_is_what_the_system_says(tmp_path, monkeypatch):
    for name, words in {"index0": "48K", "index2": "1024K", "index3": "32M"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "size").write_text(words + "\n")
    monkeypatch.setattr(timing, "Path", lambda name: tmp_path)
    assert timing.last_cache_bytes(CPU) == 32 * 2**20
    monkeypatch.setattr(timing, "Path", lambda name: tmp_path / "none")
    assert timing.last_cache_bytes(CPU) == timing.UNKNOWN_CACHE


def test_wrong_calls_are_refused():
    for wrong in ({"device": "meta"}, {"device": "cpu", "repeats": 0}, {"device": "cpu", "warmup": 0}):
        with pytest.raises(ValueError):
            time_kernel(lambda: None, **wrong)


def test_a_timer_round_a_launch_measures_the_launch():
    """The work can't even begin before the timer has been read: so that was not its time."""
    may_begin, began = threading.Event(), threading.Event()

    def work():
        assert may_begin.wait(30)
        began.set()

    with Stream() as stream:
        launched_s = launch_only_seconds(lambda: stream.launch(work))
        assert not began.is_set() and launched_s >= 0
        may_begin.set()
        stream.synchronize()
        assert began.is_set()


def test_events_measure_the_work_between_them(clock):
    with Stream() as stream:
        stream.launch(clock.append, 5.0)
        start = stream.record_event()
        stream.launch(clock.append, 2.0)
        end = stream.record_event()
        stream.launch(clock.append, 7.0)
        stream.synchronize()
        assert start.seconds_until(end) == pytest.approx(2.0)


def test_an_event_is_not_read_before_the_stream_has_come_to_it():
    may_begin = threading.Event()
    with Stream() as stream:
        start = stream.record_event()
        stream.launch(may_begin.wait, 30)
        end = stream.record_event()
        with pytest.raises(RuntimeError, match="synchronize"):
            start.seconds_until(end)
        may_begin.set()
        stream.synchronize()
        assert start.seconds_until(end) >= 0


def test_a_stream_works_in_order_in_another_thread_and_reports_errors_late():
    found, threads = [], set()

    def work(number):
        threads.add(threading.get_ident())
        if number == 2:
            raise ZeroDivisionError("of launch 2")
        found.append(number)

    with Stream() as stream:
        for number in range(5):
            stream.launch(work, number)  # number 2 fails, and nobody hears of it yet
        with pytest.raises(ZeroDivisionError, match="of launch 2"):
            stream.synchronize()
        stream.synchronize()  # told once
        assert found == [0, 1, 3, 4] and len(threads) == 1 and threading.get_ident() not in threads
        a, out = torch.randn(8, 8), torch.empty(8, 8)
        stream.launch(lambda: torch.mm(a, a, out=out))
        stream.synchronize()
        assert torch.equal(out, a @ a)


@pytest.mark.gpu
def test_on_a_gpu_it_agrees_with_tritons_do_bench():
    from triton.testing import do_bench

    a = torch.randn(4096, 4096, device="cuda")
    product, twice = lambda: a @ a, lambda: a * 2
    for run in (product, twice):
        theirs = do_bench(run, return_mode="median") / 1e3
        ours = time_kernel(run).median_s
        assert ours <= 1.25 * theirs
        assert ours >= (0.75 if run is product else 0.6) * theirs  # whose L2 is not clean, which memory-bound runs pay
