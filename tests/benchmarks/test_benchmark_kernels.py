"""benchmarks/kernels.py and counters.py: what they compare and count, interpreted at tiny sizes; figures need a GPU."""

import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from course_kit.gpu.launches import record_launches

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="here kernels are compiled: run the benchmark itself")


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def kernels(on_path):
    return __import__("kernels")


@pytest.fixture
def kernel_runs(on_path):
    return __import__("kernel_runs")


@pytest.fixture
def counters(on_path):
    return __import__("counters")


def test_ours_are_kernels_and_not_pytorch_under_another_name(kernels, kernel_runs):
    for case in kernels.cases(CPU, "cpu"):
        for column, method in case.methods.items():
            with record_launches() as launches:
                kernel_runs.Method(method, case.make).results()
            assert bool(launches) == (column == "ours"), (case.kernel, column)


def test_the_bytes_are_those_of_what_goes_in_and_out(kernels, kernel_runs):
    """Forward reads its inputs and writes its outputs; backward at least reads gradients of these and writes those of
    the inputs. Weights of one row, and the angles twice side by side for a rival, may be left out.
    """
    for case in kernels.cases(CPU, "cpu"):
        if case.unit != "GB/s" or case.kernel.startswith("adamw"):
            continue
        method = kernel_runs.Method(case.methods["eager"], case.make)
        method.forward()
        inputs = sum(x.nbytes for x in method.inputs[: 4 if case.kernel == "rope" else 2] if x.dim() > 1)
        outputs = sum(x.nbytes for x in method.outputs)
        assert case.work["forward"] == inputs + outputs, case.kernel
        wanted = sum(x.nbytes for x in method.wanted if x.dim() > 1)
        if case.kernel == "add + rms_norm":
            wanted //= 2  # both have the same gradient
        assert case.work["backward"] >= outputs + wanted, case.kernel


def test_adamw_moves_each_state_twice(kernels):
    (case,) = [case for case in kernels.cases(CPU, "cpu") if case.kernel == "adamw_step"]
    master, gradient, m, v, _, weights = case.make()
    assert case.work["step"] == 2 * (master.nbytes + m.nbytes + v.nbytes) + gradient.nbytes + weights.nbytes
    (case,) = [case for case in kernels.cases(CPU, "cpu") if case.kernel == "adamw, one launch"]
    master, gradient, m, v, steps = case.make()
    assert case.work["step"] == 2 * (master.nbytes + m.nbytes + v.nbytes) + gradient.nbytes and len(steps) > 10


def test_a_kernel_that_is_wrong_is_not_timed(kernels, kernel_runs):
    case = next(kernels.cases(CPU, "cpu"))
    wrong = replace(case, methods=case.methods | {"ours": lambda x: torch.softmax(1.01 * x, -1)})
    with pytest.raises(ValueError, match="softmax 4 x 128, ours: our results are off"):
        kernel_runs.working(wrong, CPU, kernels.KERNELS)


def test_columns_take_turns_and_only_the_named_pass_is_timed(kernel_runs, monkeypatch):
    order = []
    monkeypatch.setattr(
        kernel_runs, "time_once", lambda run, device, flush: (flush(), order.append("timed"), run(), 1.0)[3]
    )
    monkeypatch.setitem(kernel_runs.REPEATS, "cpu", 2)
    monkeypatch.setitem(kernel_runs.WARMUP, "cpu", 1)

    def watched(name):
        return lambda x: (order.append(name), 2 * x)[1]

    make = lambda: (torch.ones(3, requires_grad=True),)  # noqa: E731
    methods = {name: kernel_runs.Method(watched(name), make) for name in ("ours", "eager")}
    seconds = kernel_runs.timed(methods, "backward", CPU, "eager")
    assert seconds == {"ours": [1.0] * 2, "eager": [1.0] * 2, "again": [1.0] * 2}
    assert order == ["ours", "timed", "eager", "timed", "eager", "timed"] * 3  # forward comes before the timed part
    order.clear()
    kernel_runs.timed(methods, "forward", CPU, "eager")
    assert order == ["timed", "ours", "timed", "eager", "timed", "eager"] * 3


def test_ratios_are_of_pairs(kernel_runs):
    seconds = {"ours": [1.0, 2.0, 3.0], "eager": [2.0, 4.0, 6.0], "again": [2.2, 4.0, 6.0]}
    found = kernel_runs.compared(seconds, "eager")
    assert found == {"ms": {"ours": 2e3, "eager": 4e3}, "ours_against": {"eager": 0.5}, "noise": 0.0}


def row_of(share: float, against: dict[str, float], **changes) -> dict:
    row = {"kernel": "softmax", "size": "65,536 x 4,096", "pass": "forward", "ms": {}, "noise": 0.01}
    return row | {"share": share, "ours_against": against} | changes


def test_what_misses_the_aims_is_said(kernels):
    fine = [row_of(0.91, {"compile": 1.0, "eager": 1.5}), row_of(0.5, {"compile": 2.0}, size="16,384 x 1,024")]
    assert kernels.missed({"rows": fine}) == []
    assert kernels.missed({"rows": [row_of(0.8, {"compile": 1.02, "Liger": 0.9})]}) == [
        "softmax, forward: 0.80 of the copy, the aim is 0.9", "softmax, forward: 1.02 of compile's time, the aim is 1"
    ]  # fmt: skip


def test_without_a_gpu_one_line_says_so(counters, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["script"])
    monkeypatch.setattr(counters, "save", lambda *args: pytest.fail("nothing was measured, so nothing is written"))
    counters.main()
    assert len(capsys.readouterr().out.splitlines()) == 1


# In the form of `ncu --csv --print-units base --metrics ...` (Nsight Compute, command line interface, "Print Details").
NCU = """==PROF== Connected to process 4242 (/usr/bin/python3.11)
==PROF== Profiling "softmax_kernel" - 0: 0%....50%....100% - 1 pass
==PROF== Profiling "softmax_kernel" - 1: 0%....50%....100% - 1 pass
==PROF== Disconnected from process 4242
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"Section Name","Metric Name","Metric Unit","Metric Value"
"0","4242","python3.11","127.0.0.1","softmax_kernel","1","7","(128, 1, 1)","(8, 1, 1)","0","9.0",\
"Command line profiler metrics","l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum","sector","1,024"
"0","4242","python3.11","127.0.0.1","softmax_kernel","1","7","(128, 1, 1)","(8, 1, 1)","0","9.0",\
"Command line profiler metrics","l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum","sector","512"
"1","4242","python3.11","127.0.0.1","softmax_backward_kernel","1","7","(128, 1, 1)","(8, 1, 1)","0","9.0",\
"Command line profiler metrics","l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum","sector","2,048"
"1","4242","python3.11","127.0.0.1","softmax_backward_kernel","1","7","(128, 1, 1)","(8, 1, 1)","0","9.0",\
"Command line profiler metrics","l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum","sector","0"
"""
COUNTED = [
    {"kernel": "softmax_kernel", "load": 1024, "store": 512},
    {"kernel": "softmax_backward_kernel", "load": 2048, "store": 0},
]
FORBIDDEN = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters"


def test_what_ncu_writes_is_read(counters):
    assert counters.parse_ncu(NCU) == COUNTED
    with pytest.raises(ValueError, match="no table: ==ERROR== ERR_NVGPUCTRPERM"):
        counters.parse_ncu("==PROF== Connected\n" + FORBIDDEN)
    with pytest.raises(ValueError, match="softmax_kernel: ncu could not read .*_ld.sum: 'n/a'"):
        counters.parse_ncu(NCU.replace("1,024", "n/a"))


def fake_ncu(folder: Path, lines: list[str]) -> None:
    """A program called ncu, in Python, whose lines see `option(name)`."""
    start = [f"#!{sys.executable}", "import sys", "option = lambda name: sys.argv[sys.argv.index(name) + 1]"]
    file = folder / "ncu"
    file.write_text("\n".join(start + lines) + "\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def test_ncu_is_asked_for_our_kernels_counters(counters, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    lines = ["assert sys.argv[-2:] == ['program', '--launch'] and '--csv' in sys.argv"]
    lines += [f"assert set(option('--metrics').split(',')) == {set(counters.METRICS)!r}"]
    lines += ["import re", "pattern = option('--kernel-name').removeprefix('regex:')"]
    lines += ["assert re.search(pattern, 'softmax_kernel') and not re.search(pattern, 'my_softmax_kernel')"]
    fake_ncu(tmp_path, lines + [f"open(option('--log-file'), 'w').write({NCU!r})"])
    assert counters.ncu_sectors(["program", "--launch"], ["softmax_kernel", "softmax_backward_kernel"]) == COUNTED


def test_ncu_without_the_right_to_count_is_reported(counters, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    fake_ncu(tmp_path, [f"print({FORBIDDEN!r})"])
    with pytest.raises(RuntimeError, match="ERR_NVGPUCTRPERM"):
        counters.ncu_sectors(["program"], ["softmax_kernel"])
