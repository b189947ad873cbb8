"""The measurements of kernels.py, attention.py and fp8.py: columns in alternation, correctness first, each pass alone.

A `Comparison` is a table of cases. A `Case` is one computation at one size, with a method for each column. All columns
get the same inputs, and their results and gradients are compared with a reference in a wider dtype before anything is
timed. gpu.py runs them.

A time is the median of 11 runs from a flushed and clean L2 (`timing`), with the columns in alternation, after 3 runs
that do not count. It is the device's time: launching from Python, which takes longer than a small kernel, is hidden for
all columns. Backward is timed alone, after its forward. A case's rival runs twice in each repetition: the difference
between the two is the noise. Rate: the case's work divided by a column's time; ours also as a share of this GPU's own
copy or matmul, measured just before. Peak memory is in MiB above the inputs.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from measure import peak_mib

from course_lib.kernels.roofline import Roofline
from course_lib.kernels.timing import flusher, time_once

REPEATS = {"cuda": 11, "cpu": 1}
WARMUP = {"cuda": 3, "cpu": 0}
UNITS = {"GB/s": 1e9, "TFLOP/s": 1e12}
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
WIDER = {torch.bfloat16: torch.float32, torch.float32: torch.float64}


@dataclass(frozen=True)
class Case:
    """One kernel at one size. Methods, by column, take the inputs that `make` creates for each of them."""

    kernel: str
    size: str
    make: Callable[[], tuple[torch.Tensor, ...]]  # tensors that require a gradient get one
    methods: dict[str, Callable]
    work: dict[str, float]  # of each pass, forward or backward: bytes to be moved, or FLOPs
    unit: str = "GB/s"
    peak: bool = False  # measure its memory, too
    rival: str = "eager"  # the column that must run, and runs twice
    exact: Callable[..., list[torch.Tensor]] | None = None  # results and gradients; None: the rival's in a wider type
    about: dict = field(default_factory=dict)  # more keys of its rows


@dataclass(frozen=True)
class Comparison:
    """A table."""

    columns: tuple[str, ...]  # a case may have fewer
    cases: Callable[[torch.device, str], Iterator[Case]]  # the str: a key of SIZES, cuda, cpu, or small on a GPU
    tolerance: dict[str, float]  # by device: the largest error of our results, relative to their norm
    ours: tuple[str, ...] = ("ours",)  # the columns that must meet it


def random(*shape: int, device: torch.device, needs_gradient: bool = True) -> torch.Tensor:
    """Return normal numbers in the device's training dtype."""
    return torch.randn(shape, device=device, dtype=DTYPES[device.type]).requires_grad_(needs_gradient)


def widened(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return the same numbers in the next wider dtype, for a reference."""
    return tuple(
        each.detach().to(WIDER.get(each.dtype, each.dtype)).requires_grad_(each.requires_grad) for each in tensors
    )


def draw_gradients(outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return gradients of the outputs: the same values for all methods, in any layout and dtype."""
    torch.manual_seed(1)
    return tuple(random(*each.shape, device=each.device, needs_gradient=False).to(each.dtype) for each in outputs)


class Method:
    """A column of a case: its own inputs, and its passes as functions that can be timed."""

    def __init__(self, method: Callable, make: Callable[[], tuple]):
        torch.manual_seed(0)
        self.method, self.inputs = method, make()
        self.wanted = [tensor for tensor in self.inputs if tensor.requires_grad]
        self.outputs: tuple[torch.Tensor, ...] = ()
        self.gradients: tuple[torch.Tensor, ...] = ()

    def forward(self) -> None:
        outputs = self.method(*self.inputs)
        self.outputs = outputs if isinstance(outputs, tuple) else (outputs,)

    def prepare(self) -> None:
        """Run forward, as preparation for a backward."""
        self.forward()
        self.gradients = draw_gradients(self.outputs) if self.wanted else ()

    def backward(self) -> tuple[torch.Tensor, ...]:
        gradients = torch.autograd.grad(self.outputs, self.wanted, self.gradients)
        self.release()
        return gradients

    def draw(self) -> None:
        """Draw the outputs' gradients, without keeping outputs, as preparation for a forward with its backward."""
        self.prepare()
        self.outputs = ()

    def both(self) -> None:
        self.forward()
        self.backward()

    def release(self) -> None:
        self.outputs = self.gradients = ()

    def passes(self, name: str) -> tuple[Callable, Callable]:
        """Return the function to time, and the one to run before it. A forward starts without the outputs of the
        previous one.
        """
        if name == "backward":
            return self.backward, self.prepare
        return (self.both, self.draw) if name == "forward and backward" else (self.forward, self.release)

    def results(self) -> list[torch.Tensor]:
        """Return outputs and gradients, in float32."""
        self.prepare()
        outputs = [output.detach().float() for output in self.outputs]
        return outputs + [gradient.float() for gradient in self.backward()] if self.wanted else outputs


def reference(case: Case) -> list[torch.Tensor]:
    """Return the results with which all columns are compared."""
    if case.exact:
        return case.exact(*Method(None, case.make).inputs)
    return Method(case.methods[case.rival], lambda: widened(case.make())).results()


def working(case: Case, device: torch.device, comparison: Comparison) -> tuple[dict[str, Method], dict[str, float]]:
    """Return the methods that fit on the device, each with its own inputs; and the largest error of the results and
    gradients of each, relative to the norm of the reference. Raises ValueError if an error of ours exceeds the
    comparison's tolerance.
    """
    if device.type == "cuda":
        torch._dynamo.reset()  # it stops compiling a function after eight sizes
    expected = reference(case)
    methods, errors = {}, {}
    for column in (name for name in comparison.columns if name in case.methods):
        try:
            pairs = zip(Method(case.methods[column], case.make).results(), expected, strict=True)
            errors[column] = max(((mine - theirs).norm() / theirs.norm()).item() for mine, theirs in pairs)
            methods[column] = Method(case.methods[column], case.make)
        except Exception as error:
            if column in ("ours", case.rival) and not isinstance(error, torch.OutOfMemoryError):
                raise
            reason = str(error).partition("\n")[0].partition(". ")[0]
            print(f"{case.kernel} {case.size}, {column}: {reason}")  # its column stays empty
    for column in comparison.ours:
        if column in errors and not errors[column] <= comparison.tolerance[device.type]:
            raise ValueError(f"{case.kernel} {case.size}, {column}: our results are off by {errors[column]:.2%}")
    return methods, errors


def timed(methods: dict[str, Method], name: str, device: torch.device, rival: str) -> dict[str, list[float]]:
    """Return the seconds of each repetition of one pass, by column, measured in alternation; "again" is the rival a
    second time.
    """
    flush = flusher(device)
    times: dict[str, list[float]] = {column: [] for column in (*methods, "again")}
    for _ in range(WARMUP[device.type] + REPEATS[device.type]):
        for column, seconds in tuple(times.items()):
            method = methods[rival if column == "again" else column]
            run, before = method.passes(name)

            def start(before=before):
                before()
                flush()

            try:
                seconds.append(time_once(run, device, start))
            except torch.OutOfMemoryError:
                if column in ("ours", rival, "again"):
                    raise
                print(f"{column}: no memory is left for its {name}")  # its column stays empty
                del times[column]
            method.release()  # memory that one column keeps for backward must not limit another
    return {column: seconds[WARMUP[device.type] :] for column, seconds in times.items()}


def compared(seconds: dict[str, list[float]], rival: str) -> dict:
    """Return the columns' medians, the median ratio of ours to each other column in the same repetition, and the
    rival's deviation from itself.
    """
    ratios = {
        column: statistics.median(mine / theirs for mine, theirs in zip(seconds["ours"], each, strict=True))
        for column, each in seconds.items()
        if column not in ("ours", "again")
    }
    noise = statistics.median(abs(a / b - 1) for a, b in zip(seconds["again"], seconds[rival], strict=True))
    medians = {column: 1e3 * statistics.median(each) for column, each in seconds.items() if column != "again"}
    return {"ms": medians, "ours_against": ratios, "noise": noise}


def measure(case: Case, device: torch.device, ceilings: Roofline, comparison: Comparison) -> Iterator[dict]:
    """Yield a row for each pass, and for peak memory if the case asks for it."""
    methods, errors = working(case, device, comparison)
    about = {"kernel": case.kernel, "size": case.size} | case.about
    ceiling = ceilings.bytes_per_s if case.unit == "GB/s" else ceilings.peak_flops
    for name, work in case.work.items():
        figures = compared(timed(methods, name, device, case.rival), case.rival)
        rates = {column: work / ms * 1e3 / UNITS[case.unit] for column, ms in figures["ms"].items()}
        speed = {"rates": rates, "rate": rates["ours"], "unit": case.unit}
        share = {"share": rates["ours"] * UNITS[case.unit] / ceiling}
        yield about | {"pass": name} | figures | speed | share | {"errors": errors}
    if case.peak:
        peaks = {}
        for column, method in methods.items():
            method.draw()
            peaks[column] = peak_mib(method.both)
        yield about | {"pass": "peak", "mib": peaks}
