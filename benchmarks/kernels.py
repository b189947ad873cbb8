"""The kernels of notebook 12 against eager PyTorch, its own fused operators, torch.compile and Liger-Kernel, on a GPU.

    PYTHONPATH=. python benchmarks/kernels.py                 # writes benchmarks/results/kernels_<gpu>.json
    PYTHONPATH=. python benchmarks/kernels.py --device cpu    # the same code at tiny sizes, interpreted: is it right?

Needs torch and triton alone; where liger_kernel is not installed its column stays empty. What is compared at which
sizes is in kernel_cases.py. All columns get the same inputs, and their results and gradients are compared with eager's
before anything is timed.

A time is the median of 11 runs from a flushed L2 (`timing`), the columns in alternation, after 3 that don't count. It
is the device's: launching from Python, which takes longer than a small kernel, is hidden for all columns alike.
Backward is timed alone, forward before it. Eager runs twice in each round: how far the two are apart is the noise.
Rate: the bytes that must move (each input read, each output written, once) or the products' FLOPs, by our time; and
that as a share of this GPU's own copy, or product of matrices, measured just before.

For the loss there are rows of peak memory, in MiB above the inputs.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator

import torch
from kernel_cases import Case, cases
from measure import gpu_word, peak_mib, save

from course_lib.roofline import Roofline, measure_roofline
from course_lib.timing import FLUSHED_CACHES, last_cache_bytes, time_once

ROUNDS = {"cuda": 11, "cpu": 1}
UNCOUNTED = {"cuda": 3, "cpu": 0}
COLUMNS = ("ours", "eager", "PyTorch", "compile", "Liger")


class Method:
    """A column of a case: its own inputs, and its passes as functions that can be timed."""

    def __init__(self, method: Callable, make: Callable[[], tuple]):
        torch.manual_seed(0)
        self.method, self.inputs = method, make()
        self.wanted = [tensor for tensor in self.inputs if tensor.requires_grad]
        self.outputs: tuple[torch.Tensor, ...] = ()
        self.gradients: tuple[torch.Tensor, ...] = ()

    def forward(self) -> None:
        found = self.method(*self.inputs)
        self.outputs = found if isinstance(found, tuple) else (found,)

    def prepare(self) -> None:
        """What comes before a backward."""
        self.forward()
        torch.manual_seed(1)
        self.gradients = tuple(torch.randn_like(output) for output in self.outputs)

    def backward(self) -> tuple[torch.Tensor, ...]:
        found = torch.autograd.grad(self.outputs, self.wanted, self.gradients)
        self.release()
        return found

    def both(self) -> None:
        self.forward()
        torch.autograd.grad(self.outputs, self.wanted)
        self.release()

    def release(self) -> None:
        self.outputs = self.gradients = ()

    def passes(self, name: str) -> tuple[Callable, Callable]:
        """What is timed, and what comes before it. A forward starts without the outputs of the one before."""
        if name == "backward":
            return self.backward, self.prepare
        return (self.both if name == "forward and backward" else self.forward), self.release

    def results(self) -> list[torch.Tensor]:
        """Outputs and gradients, in float32."""
        self.prepare()
        outputs = [output.detach().float() for output in self.outputs]
        return outputs + [gradient.float() for gradient in self.backward()] if self.wanted else outputs


def working(case: Case, device: torch.device) -> tuple[dict[str, Method], dict[str, float]]:
    """The methods that have room on the device, each with inputs of its own; and how far the results and gradients of
    each are from eager's, as a share of their norm, at worst. Raises ValueError where ours are off by more than 2%
    (bfloat16) or 0.1% (float32).
    """
    candidates = dict(case.methods)
    if device.type == "cuda":  # the compiler writes other code on a CPU, and takes long for it
        torch._dynamo.reset()  # it gives up on a function after eight sizes
        candidates["compile"] = torch.compile(case.methods["eager"], dynamic=False, mode="max-autotune-no-cudagraphs")
    expected = Method(case.methods["eager"], case.make).results()
    found, errors = {}, {}
    for column in (name for name in COLUMNS if name in candidates):
        try:
            pairs = zip(Method(candidates[column], case.make).results(), expected, strict=True)
            errors[column] = max(((mine - theirs).norm() / theirs.norm()).item() for mine, theirs in pairs)
            found[column] = Method(candidates[column], case.make)
        except Exception as error:
            if column in ("ours", "eager") and not isinstance(error, torch.OutOfMemoryError):
                raise
            print(f"{case.kernel} {case.size}, {column}: {str(error).splitlines()[0]}")  # its column stays empty
    if not errors["ours"] <= (2e-2 if device.type == "cuda" else 1e-3):
        raise ValueError(f"{case.kernel} {case.size}: our results are off by {errors['ours']:.2%}")
    return found, errors


def timed(methods: dict[str, Method], name: str, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each round of one pass, by column, in alternation; "again" is eager a second time."""
    cleared = torch.empty(FLUSHED_CACHES * last_cache_bytes(device), dtype=torch.uint8, device=device)
    found: dict[str, list[float]] = {column: [] for column in (*methods, "again")}
    for _ in range(UNCOUNTED[device.type] + ROUNDS[device.type]):
        for column, seconds in found.items():
            run, before = methods["eager" if column == "again" else column].passes(name)

            def start(before=before):
                before()
                cleared.zero_()

            seconds.append(time_once(run, device, start))
    return {column: seconds[UNCOUNTED[device.type] :] for column, seconds in found.items()}


def compared(seconds: dict[str, list[float]]) -> dict:
    """Medians of the columns, of ours by each other's in the same round, and how far eager is from itself."""
    ratios = {
        column: statistics.median(mine / theirs for mine, theirs in zip(seconds["ours"], each, strict=True))
        for column, each in seconds.items()
        if column not in ("ours", "again")
    }
    noise = statistics.median(abs(a / b - 1) for a, b in zip(seconds["again"], seconds["eager"], strict=True))
    medians = {column: 1e3 * statistics.median(each) for column, each in seconds.items() if column != "again"}
    return {"ms": medians, "ours_against": ratios, "noise": noise}


def measure(case: Case, device: torch.device, ceilings: Roofline) -> Iterator[dict]:
    """A row for each pass, and for the memory where that is asked for."""
    methods, errors = working(case, device)
    about = {"kernel": case.kernel, "size": case.size}
    for name, work in case.work.items():
        figures = compared(timed(methods, name, device))
        rate, unit = work / figures["ms"]["ours"] * 1e3, 1e9 if case.unit == "GB/s" else 1e12
        ceiling = ceilings.bytes_per_s if case.unit == "GB/s" else ceilings.peak_flops
        speed = {"rate": rate / unit, "unit": case.unit, "share": rate / ceiling}
        yield about | {"pass": name} | figures | speed | {"errors": errors}
    if case.peak:
        yield about | {"pass": "peak", "mib": {column: peak_mib(method.both) for column, method in methods.items()}}


def line(row: dict) -> str:
    """A row of the table."""
    values = row.get("ms") or row["mib"]
    digits = ".3f" if "ms" in row else ".0f"
    cells = [f"{values[column]:>9,{digits}}" if column in values else f"{'-':>9}" for column in COLUMNS]
    name = f"{row['kernel']:<20} {row['size']:<24} {row['pass'] + (', ms' if 'ms' in row else ', MiB'):<24}"
    if "ms" not in row:
        return " ".join([name, *cells])
    return " ".join([name, *cells, f"{row['rate']:>9,.1f} {row['unit']:<8} {row['share']:>5.0%} {row['noise']:>6.1%}"])


def run(device: torch.device, ceilings: Roofline) -> Iterator[list[dict]]:
    """Measure everything, and print it as it comes; yields all rows so far after each case."""
    columns = " ".join(f"{column:>9}" for column in COLUMNS)
    print(f"{'kernel':<20} {'size':<24} {'':<24} {columns} {'ours':>9} {'':<8} {'of':>5} {'noise':>6}")
    rows = []
    for case in cases(device):
        for row in measure(case, device, ceilings):
            rows.append(row)
            print(line(row), flush=True)
        yield rows


def main() -> None:
    """Measure on the GPU and write it down; or show on a CPU that everything runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    chosen = parser.parse_args().device
    if chosen == "cuda" and not torch.cuda.is_available():
        print("no GPU here, so there is nothing to measure; --device cpu runs the same code at tiny sizes")
        return
    if chosen == "cpu" and torch.cuda.is_available():
        parser.error("--device cpu is for machines without a GPU: here kernels are compiled, and for the GPU")
    device = torch.device(chosen)
    ceilings = measure_roofline(device, torch.bfloat16 if chosen == "cuda" else torch.float32)
    copy, product = ceilings.bytes_per_s / 1e9, ceilings.peak_flops / 1e12
    print(f"{ceilings.name}: copy {copy:,.0f} GB/s, product {product:,.2f} TFLOP/s")
    for rows in run(device, ceilings):
        if chosen == "cuda":  # a run that is cut off has left what it has measured
            save("kernels", {"copy_gb_per_s": copy, "product_tflop_per_s": product, "rows": rows}, gpu_word())
    if chosen == "cpu":
        print("interpreted: all of it runs and agrees; the times mean nothing, and none is written down")


if __name__ == "__main__":
    main()
