"""course_lib.recompute.profiling: FLOPs against PyTorch's counter and PaLM's rule, profiles, timelines. CPU; one wants
CUDA.
"""

import json
import os
import threading
import time
from types import SimpleNamespace

os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import record_function
from torch.utils.flop_counter import FlopCounterMode

from course_lib.recompute.modes import apply_recompute, keep_matmuls
from course_lib.recompute.profiling import Span, count_flops, hfu, profile_step, profiler, spans, step_flops
from course_lib.single_gpu.memory import param_count
from course_lib.single_gpu.model import PRESETS, ModelConfig, Transformer, loss
from course_lib.single_gpu.training import flops_per_token, mfu

torch.set_num_threads(1)
CONFIGS = {
    "debug": PRESETS["debug"],
    "untied": ModelConfig(3, 96, 6, 2, 100, 300),
    "as many K/V heads": ModelConfig(1, 64, 4, 4, 88, 256, tied=True),
    "one K/V head": ModelConfig(2, 64, 8, 1, 200, 50),
    "heads wider than hidden": ModelConfig(2, 48, 6, 2, 100, 300, head_size=16),
}


# FLOPs.


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_executed_flops_are_those_that_pytorch_counts(config, mode):
    model = apply_recompute(Transformer(config), mode)
    words = torch.zeros(2, 3, 40, dtype=torch.int64)
    needed, executed = step_flops(config, 3, 40, mode)
    assert count_flops(lambda: loss(model(words[0]), words[1]).backward()) == executed
    assert needed == step_flops(config, 3, 40)[0] < executed
    assert isinstance(needed, int) and isinstance(executed, int)


def test_kept_products_run_no_product_again():
    config = CONFIGS["untied"]
    model = apply_recompute(Transformer(config), "selective", keep_matmuls)
    words = torch.zeros(2, 3, 40, dtype=torch.int64)
    assert count_flops(lambda: loss(model(words[0]), words[1]).backward()) == step_flops(config, 3, 40)[1]


@pytest.mark.parametrize("preset", ["debug", "SmolLM-135M", "llama3.2-1B", "llama3-8B", "llama3-70B", "bench-80B"])
def test_needed_flops_are_palms_rule_without_norms_and_an_untied_embedding(preset):
    """6N + 12Lads, exactly: 2N of forward and 4N of backward, for the weights that are in a matrix product."""
    config, seq = PRESETS[preset], 4096
    rule = flops_per_token(config, seq)
    idle = (2 * config.layers + 1) * config.hidden + (0 if config.tied else config.vocab * config.hidden)
    assert step_flops(config, 1, seq)[0] == seq * (rule - 6 * idle)
    assert 0.9 < step_flops(config, 1, seq)[0] / (seq * rule) <= 1


def test_full_adds_a_forward_without_its_last_product():
    """preset small: a quarter; a whole forward would be a third."""
    config = PRESETS["small"]
    needed, executed = step_flops(config, 4, 128, "full")
    without = step_flops(config, 4, 128)[1]
    layer = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 704
    assert executed - without == 4 * 128 * 6 * (2 * (layer - 256 * 704) + 4 * 256 * 128)
    assert 0.2 < executed / needed - 1 < 1 / 3


@pytest.mark.parametrize("mode", ["none", "full"])
def test_flops_grow_with_the_batch_and_attention_with_the_square_of_the_sequence(mode):
    config = PRESETS["llama3-8B"]
    assert step_flops(config, 6, 512, mode) == tuple(6 * flops for flops in step_flops(config, 1, 512, mode))
    weights = step_flops(config, 1, 1, mode)[0] - 12 * config.layers * config.hidden
    for seq in (1024, 8192):
        assert step_flops(config, 1, seq, mode)[0] == seq * (weights + 12 * config.layers * config.hidden * seq)


def test_a_product_is_two_flops_a_weight():
    x, layer = torch.randn(7, 5, requires_grad=True), torch.nn.Linear(5, 3)
    assert count_flops(lambda: layer(x)) == 2 * 7 * 5 * 3
    assert count_flops(lambda: layer(x).sum().backward()) == 3 * 2 * 7 * 5 * 3
    assert count_flops(lambda: None) == 0 == count_flops(lambda: x + 1)


def test_fused_attention_is_two_products_and_five_in_backward():
    """PyTorch's own counter does not know the CPU's kernel; on the meta device it sees the two products themselves."""
    q, k, v = (torch.randn(2, 4, 24, 16, requires_grad=True) for _ in range(3))
    product = 2 * 2 * 4 * 24 * 24 * 16

    def attend(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum()

    assert count_flops(lambda: attend(q, k, v)) == 2 * product
    assert count_flops(lambda: attend(q, k, v).backward()) == 7 * product
    with FlopCounterMode(display=False) as counter:
        (q @ k.transpose(-1, -2)).softmax(-1) @ v
    assert counter.get_total_flops() == 2 * product


def test_count_flops_leaves_no_mode_behind():
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    with pytest.raises(ZeroDivisionError):
        count_flops(lambda: 1 / 0)
    assert not _get_current_dispatch_mode_stack()


def test_hfu_is_mfu_where_only_the_needed_is_executed():
    config, seq, step_s, peak = PRESETS["bench-1B"], 4096, 0.5, 1e15
    used = mfu(config, seq, seq / step_s, peak)
    assert hfu(flops_per_token(config, seq) * seq, step_s, peak) == pytest.approx(used)
    needed, executed = step_flops(config, 1, seq, "full")
    assert hfu(executed, step_s, peak) / hfu(needed, step_s, peak) == pytest.approx(executed / needed)
    assert hfu(3e12, 2.0, 3e12) == 0.5
    assert param_count(config) > 0


# Profiles.


def small_step():
    """An operation with a mark around it."""
    with record_function("work"):
        torch.ones(4).add_(1)


def names(prof) -> list[str]:
    return [event.name for event in prof.events()]


@pytest.mark.parametrize("wait, warmup, active", [(1, 1, 3), (0, 1, 1), (2, 1, 2)])
def test_a_profile_records_the_active_steps_alone(wait, warmup, active):
    calls = []
    prof = profile_step(lambda: (calls.append(1), small_step()), wait=wait, warmup=warmup, active=active)
    assert len(calls) == wait + warmup + active
    assert names(prof).count("work") == active == names(prof).count("aten::add_")
    assert sum(name.startswith("ProfilerStep") for name in names(prof)) == active


def test_steps_after_the_active_ones_are_not_recorded():
    with profiler() as prof:
        for _ in range(9):
            small_step()
            prof.step()
    assert names(prof).count("work") == 3


@pytest.mark.parametrize("as_text", [True, False])
def test_a_trace_is_a_file_for_perfetto(tmp_path, as_text):
    file = tmp_path / "trace.json"
    profile_step(small_step, str(file) if as_text else file)
    events = json.loads(file.read_text())["traceEvents"]
    work = [event for event in events if event.get("name") == "work"]
    assert len(work) == 3 and all(event["ph"] == "X" and event["dur"] >= 0 for event in work)
    begins = [event["ts"] for event in work]
    assert begins == sorted(begins)


def test_without_a_trace_no_file_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prof = profile_step(small_step)
    assert list(tmp_path.iterdir()) == []
    assert any(row.key == "aten::add_" and row.count == 3 for row in prof.key_averages())


def test_an_exception_ends_the_profile():
    with pytest.raises(ZeroDivisionError):
        profile_step(lambda: 1 / 0)
    profile_step(small_step)  # another one can start


# Spans.


def marked_step():
    """Phases one after the other, one inside another, operators in and out of them."""
    x = torch.ones(64, 64)
    with record_function("forward"):
        x.matmul(x)
        with record_function("inner"):
            x.sum()
    x.add_(1)
    time.sleep(0.002)
    with record_function("backward"):
        x.to(torch.float64)  # calls aten::_to_copy, which calls aten::copy_


def test_spans_are_in_order_and_begin_at_zero():
    shown = spans(profile_step(marked_step))
    assert shown[0].start_ms == 0 and all(0 <= span.start_ms <= span.end_ms for span in shown)
    assert [span.start_ms for span in shown] == sorted(span.start_ms for span in shown)
    assert {span.lane for span in shown} == {"phases", "CPU"}


def test_marks_are_phases_and_nested_ones_lie_inside():
    shown = spans(profile_step(marked_step, active=2))
    phases = [span.name for span in shown if span.lane == "phases" and not span.name.startswith("ProfilerStep")]
    assert phases == ["forward", "inner", "backward"] * 2
    steps = [span for span in shown if span.name.startswith("ProfilerStep")]
    assert len(steps) == 2 and all(step.lane == "phases" for step in steps)
    (forward, *_), (inner, *_) = ([span for span in shown if span.name == name] for name in ("forward", "inner"))
    assert steps[0].start_ms <= forward.start_ms <= inner.start_ms <= inner.end_ms <= forward.end_ms <= steps[0].end_ms
    assert sum(span.end_ms - span.start_ms for span in steps) > 4, "milliseconds: each step sleeps two"


def test_only_the_outermost_operators_are_spans():
    """Inside of a mark or not."""
    prof = profile_step(marked_step, active=1)
    operators = [span.name for span in spans(prof) if span.lane == "CPU"]
    assert "aten::copy_" in names(prof) and "aten::mm" in names(prof), "they are in the profile"
    assert [name for name in operators if name != "aten::ones"] == [
        "aten::matmul", "aten::sum", "aten::add_", "aten::to"
    ]  # fmt: skip
    bars = [span for span in spans(prof) if span.lane == "CPU"]
    assert all(first.end_ms <= second.start_ms for first, second in zip(bars, bars[1:], strict=False)), (
        "one after the other"
    )


def test_a_backward_lies_in_spans_of_autograds_engine():
    model, words = Transformer(PRESETS["debug"]), torch.zeros(1, 8, dtype=torch.int64)
    shown = spans(profile_step(lambda: loss(model(words), words).backward(), active=1))
    engine = [span for span in shown if span.name.startswith("autograd::engine")]
    assert len(engine) > 10 and len({span.lane for span in engine}) == 1 and engine[0].lane.startswith("CPU")
    assert not any(span.name in ("aten::mm", "aten::addmm") for span in shown), "inside of others"


def event(name="aten::add", start=0.0, end=1.0, thread=1, parent=None, mark=False, device=DeviceType.CPU, stream=0):
    """As one of prof.events()."""
    return SimpleNamespace(
        name=name, time_range=SimpleNamespace(start=start, end=end), thread=thread, cpu_parent=parent,
        is_user_annotation=mark, device_type=device, device_resource_id=stream,
    )  # fmt: skip


def test_threads_streams_and_collectives_have_lanes():
    mark, outer = event("forward", 5, 60, mark=True), event("aten::linear", 10, 50)
    recorded = [
        event("kernel", 30, 90, device=DeviceType.CUDA, stream=7),
        event("aten::mm", 20, 40, parent=outer),
        event("all_reduce", 35, 80, device=DeviceType.CUDA, stream=20),
        mark,
        event("aten::linear", 10, 50, parent=mark),
        event("autograd::engine", 50, 55, thread=9),
        event("autograd::engine", 56, 57, thread=9),
        event("aten::copy_", 70, 75, thread=4),
        event("gloo:all_reduce", 76, 80, thread=5, mark=True),
        event("gloo:all_gather", 80, 81, thread=6, parent=outer),
        event("nccl:all_reduce", 82, 83, thread=5, mark=True),
    ]
    assert spans(SimpleNamespace(events=lambda: recorded)) == [
        Span("phases", "forward", 0.0, 0.055),
        Span("CPU", "aten::linear", 0.005, 0.045),
        Span("GPU stream 7", "kernel", 0.025, 0.085),
        Span("GPU stream 20", "all_reduce", 0.03, 0.075),
        Span("CPU 2", "autograd::engine", 0.045, 0.05),
        Span("CPU 2", "autograd::engine", 0.051, 0.052),
        Span("CPU 3", "aten::copy_", 0.065, 0.07),
        Span("communication", "gloo:all_reduce", 0.071, 0.075),
        Span("communication 2", "gloo:all_gather", 0.075, 0.076),
        Span("communication", "nccl:all_reduce", 0.077, 0.078),
    ]


def test_a_second_thread_has_a_lane_of_its_own():
    def step():
        torch.ones(8).add_(1)
        worker = threading.Thread(target=lambda: torch.ones(8).mul_(2))
        worker.start()
        worker.join()

    shown = spans(profile_step(step, active=1))
    lanes = {span.name: span.lane for span in shown}
    assert lanes["aten::add_"] == "CPU"
    if "aten::mul_" in lanes:  # this version of PyTorch profiles all threads
        assert lanes["aten::mul_"] == "CPU 2"


def test_an_empty_profile_has_no_spans():
    assert spans(SimpleNamespace(events=lambda: [])) == []


# The picture.

# On CUDA.


@pytest.mark.gpu
def test_cuda_kernels_have_a_lane_for_their_stream():
    with torch.device("cuda"):
        model, words = Transformer(PRESETS["debug"]), torch.zeros(2, 16, dtype=torch.int64)

    def step():
        with record_function("forward"):
            step_loss = loss(model(words), words)
        step_loss.backward()
        torch.cuda.synchronize()

    shown = spans(profile_step(step))
    kernels = [span for span in shown if span.lane.startswith("GPU stream")]
    assert len(kernels) > 3 * 20 and any("gemm" in span.name.lower() for span in kernels)
    assert {"phases", "CPU"} <= {span.lane for span in shown}
    marks = [span.name for span in shown if span.lane == "phases" and not span.name.startswith("ProfilerStep")]
    assert marks == ["forward"] * 3
    assert not {"forward"} & {span.name for span in kernels}, (
        "a mark's shadow on the GPU would hide gaps between kernels"
    )
