"""The jobs of gpu.py, in order: correctness, then the headline sizes, then the rest.

machine            versions, clocks, ceilings
right: KERNEL      each kernel's results and gradients against PyTorch in a wider type, small, each in a process of
                   its own; warp-specialized kernels last
tests: FILE        the tests that need CUDA (pytest -m gpu)
ranks: LAYOUT      two ranks with tensors on one GPU, over gloo, against one rank: losses and weights after 3 steps
launcher: NAME     a notebook's program by the launcher, NCCL on one rank
memory             a memory profile, against the allocator's figure for the same step
tests of kernels: FILE    the kernels' tests, compiled and on the GPU (pytest -m device)
ready: FILE: KERNEL SIZE  compiles all kernels of the next job, and compares with PyTorch at this size
FILE: KERNEL SIZE  kernels.py, attention.py, fp8.py: times against the rivals, the headline sizes first
step               bench-1B: eager, compiled, with the kernels, in FP8: seconds, tokens/s, MFU, peak memory
in turns: WAY      its steps and BF16 steps with the kernels, in alternation in one process: README's FP8 row
sanitizer: TOOL    compute-sanitizer over every kernel, small
sectors            ncu's counts against the predictions of count_transactions (counters.py)
"""

import dataclasses
import datetime
import functools
import gc
import importlib.util
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import attention
import fp8
import kernels
import torch
import triton
from gpu import Job, Skipped
from kernel_runs import DTYPES, Case, Comparison, measure, working
from measure import PAIRS, gpu_word, paired, save
from rank_steps import on_ranks
from triton.runtime.autotuner import Autotuner

from course_lib.flash_attention.operator import flash_attention
from course_lib.fp8.delayed_scaling import update_scales
from course_lib.fp8.linear import quantized_once
from course_lib.fp8.program import apply_fp8
from course_lib.fp8.recipes import RECIPES, by_blocks, per_tensor
from course_lib.kernels.fused_loss import defer_head
from course_lib.kernels.program import kernel_step, use_kernels
from course_lib.kernels.roofline import measure_roofline
from course_lib.single_gpu.data import ByteTokenizer, TokenBatches, corpus
from course_lib.single_gpu.model import PRESETS, Transformer
from course_lib.single_gpu.profile import MemoryProfile
from course_lib.single_gpu.training import adamw, train, train_step

ROOT = Path(__file__).resolve().parent.parent
COMPARISONS: dict[str, dict[str, Comparison]] = {  # by file and the key of its rows
    "kernels": {"rows": kernels.KERNELS},
    "attention": {"rows": attention.ATTENTION, "rungs": attention.LADDER},
    "fp8": {"products": fp8.MATMULS, "casts": fp8.CASTS, "layers": fp8.LAYERS},
}
HEADLINES = re.compile(
    r"attention: attention \d+ x (4,096|8,192|16,384), 128|fp8: (linear|product.*) 8,192 x 8,192 x 8,192"
    r"|kernels: \D+ 65,536 x 4,096"
)
SECONDS = {"attention": 12, "product": 3, "cast": 2, "linear": 10, "linear_cross_entropy": 10, "matmul": 10}
SECONDS |= {"rungs": 30}
READY_S = {"attention": 50, "rungs": 90}
MISSED = {"kernels": kernels.missed, "attention": attention.missed, "fp8": fp8.missed}
REASONS = {  # why a bound is missed, where we have an explanation
    r"attention .* cuDNN": "its groups of warps take turns, by barriers that Triton does not offer (notebook 13)",
    r"elu, forward": "30 instructions per element, which take nearly as long to issue as its bytes take",
    r"linear .* torchao": "casts that also transpose a matrix left room for 8 warps per SM, and ran at a third of a "
    "copy's speed; now there is room for 20, not measured again",
    r"product, 1 x 128": "applying the scales keeps ordinary cores busy for over half of the products' time (616 issue "
    "slots for 1,024 clocks, counted in the machine code), and tiles come without multicast; training uses cuBLAS's",
}
STEP_AIMS = {"eager": 1.15, "compile": 1.0}
LAYOUTS = ("dp2", "dp2,zero1", "tp2", "dp2,zero3", "pp2", "pp2,zb-v")
LARGE = {"cuda": ("bench-1B", 4, 4096, 12), "cpu": ("debug", 1, 8, 2)}  # preset, batch, sequence, steps
IN_TURNS = ("FP8, blocks", "kernels")  # a way and its rival
TOLERANCE = 1e-4  # of losses and weights on two ranks, whose sums have another order


def machine(device: torch.device) -> Iterator[dict]:
    """Yield versions and ceilings; every other job that needs ceilings measures them again, in its own process."""
    row = {"date": datetime.date.today().isoformat(), "threads": torch.get_num_threads()}
    row |= {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    if device.type == "cuda":
        row |= {"machine": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        row["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
        asked = "clocks.sm,clocks.max.sm,clocks.mem,power.limit,driver_version"
        if shutil.which("nvidia-smi"):
            command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
            reported = subprocess.run(command, capture_output=True, text=True).stdout.strip()
            row |= dict(zip(asked.split(","), reported.split(", "), strict=True))
    yield row | ceilings_of(device)


def ceilings_of(device: torch.device) -> dict[str, float]:
    ceilings = roofline(device)
    return {"copy_gb_per_s": ceilings.bytes_per_s / 1e9, "product_tflop_per_s": ceilings.peak_flops / 1e12}


@functools.cache
def roofline(device: torch.device):
    return measure_roofline(device, DTYPES[device.type])


def tests(marked: str, file: str) -> Iterator[dict]:
    """Run a file's tests and yield their counts. Raises AssertionError if one fails."""
    if not importlib.util.find_spec("pytest"):
        raise Skipped("pytest is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-m", marked, "-p", "no:cacheprovider", file]
    wide = os.environ | {"COLUMNS": "300"}  # so that a test's name leaves room for its error
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=wide)
    print(done.stdout, done.stderr, flush=True)
    last = done.stdout.rstrip().rpartition("\n")[2]
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error|skipped)", last)}
    reported = re.findall(r"^(?:FAILED|ERROR) .*?::(.*)", done.stdout, re.M)  # name and error, one per line
    yield {"file": file} | counts | ({"failures": [line[:200] for line in reported]} if reported else {})
    assert done.returncode in (0, 5), last  # 5: none is chosen
    if "skipped" in counts and "passed" not in counts:
        raise Skipped(last)


def files_with(pattern: str) -> list[str]:
    paths = (path for path in (ROOT / "tests").glob("*/test_*.py") if re.search(pattern, path.read_text(), re.M))
    return sorted(str(path.relative_to(ROOT)) for path in paths)


def tuners() -> list[Autotuner]:
    """Return our autotuned kernels that exist so far."""
    return [each for each in gc.get_objects() if type(each) is Autotuner]


def fresh() -> None:
    """Free the memory of the previous job, and clear the autotuners' caches, which would hold the best configuration of
    another size.
    """
    gc.collect()
    for kernel in tuners():
        kernel.cache.clear()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def right(case: Case, comparison: Comparison, device: torch.device) -> Iterator[dict]:
    """Yield the errors of the columns. Raises ValueError if ours are too large."""
    our_methods = {
        column: method for column, method in case.methods.items() if column in (*comparison.ours, case.rival)
    }
    fresh()
    for kernel in tuners():
        kernel.configs = kernel.configs[:1]  # compiling all would take a minute; this process runs nothing else
    yield {"errors": working(dataclasses.replace(case, methods=our_methods), device, comparison)[1]}


def ready(case: Case, comparison: Comparison, device: torch.device) -> Iterator[dict]:
    """Compile all columns, at all tile sizes, for `measured`, and compare ours with the reference at this size. "math"
    is left out: it has nothing to compile, and its scores take the memory of concurrent jobs.
    """
    fresh()
    case = dataclasses.replace(case, methods={name: each for name, each in case.methods.items() if name != "math"})
    yield {"errors": working(case, device, comparison)[1]}


def measured(file: str, case: Case, comparison: Comparison, device: torch.device) -> Iterator[dict]:
    """Yield the rows of a case, with the key of its table in the file's results."""
    (table,) = (key for key, each in COMPARISONS[file].items() if each is comparison)
    fresh()
    yield from ({"table": table} | row for row in measure(case, device, roofline(device), comparison))


def ways(preset: str) -> dict[str, Callable]:
    """Return, by name, functions that create a large model and its training step."""

    def plain() -> tuple:
        return Transformer(PRESETS[preset]), train_step

    def compiled() -> tuple:
        model = Transformer(PRESETS[preset])
        model.compile(dynamic=False)
        return model, train_step

    def with_kernels(attend: bool = False) -> tuple:
        model = defer_head(use_kernels(Transformer(PRESETS[preset])))
        for block in model.blocks if attend else ():
            block.attention.core = flash_attention
        return model, kernel_step

    def in_fp8(casts) -> tuple:
        model = apply_fp8(with_kernels()[0], dataclasses.replace(RECIPES["DeepSeek-V3"], casts=casts))

        def step(*arguments):
            with quantized_once(model):
                step_loss = kernel_step(*arguments)
            update_scales(model)
            return step_loss

        return model, step

    return {
        "eager": plain,
        "compile": compiled,
        "kernels": with_kernels,
        "kernels + attention": functools.partial(with_kernels, True),
        "FP8, delayed": lambda: in_fp8(per_tensor(history=16, weight_history=16)),
        "FP8, tensor": lambda: in_fp8(per_tensor()),
        "FP8, blocks": lambda: in_fp8(by_blocks()),
    }


def trainer(way: str, device: torch.device) -> Callable[[int], list[dict]]:
    """Create a large model with its optimizer; return a function that trains it for some steps and returns the records:
    float32 weights, autocast to BF16.
    """
    preset, batch, seq, _ = LARGE[device.type]
    with device:
        model, its_step = ways(preset)[way]()
    optimizer, batches = adamw(model, 1e-4), TokenBatches(ByteTokenizer().encode(corpus()), batch, seq)
    return lambda steps: train(model, optimizer, batches, steps, torch.bfloat16, step=its_step)


def step(way: str, device: torch.device) -> Iterator[dict]:
    """Yield medians of a training step, float32 weights and autocast to BF16; the first third of the steps does not
    count. Raises AssertionError for a loss that is not finite.
    """
    preset, batch, seq, steps = LARGE[device.type]
    fresh()
    if way == "compile" and device.type == "cpu":
        raise Skipped("for a CPU the compiler writes other code, and takes long")
    train_for = trainer(way, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    records = train_for(steps)
    settled = records[steps // 3 :]
    row = {key: statistics.median(r[key] for r in settled) for key in ("step_s", "tokens_per_s", "peak_memory")}
    row["mfu"] = settled[-1]["mfu"] and statistics.median(record["mfu"] for record in settled)
    losses = [record["loss"] for record in records]
    yield {"way": way, "preset": preset, "batch": batch, "seq": seq} | row | {"losses": losses}
    assert all(map(math.isfinite, losses)), losses


def in_turns(way: str, rival: str, device: torch.device) -> Iterator[dict]:
    """Yield the ratio of a step's time to a rival step's time, with both models in memory; then the rival's ratio to
    itself, which is the noise. Raises AssertionError for a loss that is not finite.
    """

    def one_step(name: str) -> Callable[[], None]:
        train_for = trainer(name, device)

        def run() -> None:
            (record,) = train_for(1)  # waits for the device
            assert math.isfinite(record["loss"]), f"{name}: the loss is {record['loss']}"

        return run

    fresh()
    pairs = PAIRS if device.type == "cuda" else 1
    run, rivals = one_step(way), one_step(rival)
    yield {"pair": f"{way} against {rival}"} | paired(run, rivals, pairs=pairs)
    yield {"pair": f"{rival} against itself"} | paired(rivals, rivals, pairs=pairs)


def two_ranks(spec: str, device: torch.device) -> Iterator[dict]:
    """Compare a layout on two ranks with one rank. Raises AssertionError if they differ."""
    ((expected, weights),) = on_ranks("dp1", device.type)
    results = on_ranks(spec, device.type)
    apart = max(abs(a / b - 1) for losses, _ in results for a, b in zip(losses, expected, strict=True))
    shards = [(name, value) for _, each in results for name, value in each.items()]
    assert {name for name, _ in shards} == weights.keys()
    far = max(((value - weights[name]).norm() / weights[name].norm()).item() for name, value in shards)
    yield {"layout": spec, "losses apart": apart, "weights apart": far}
    assert max(apart, far) <= TOLERANCE, f"losses are {apart:.1e} from one rank's, weights {far:.1e}"


def launcher(notebook: str, arguments: list[str]) -> Iterator[dict]:
    """Yield the last record of a program on one rank."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.jsonl"
        script = [sys.executable, "scripts/launch_nb_torchrun.py", f"notebooks/{notebook}.ipynb"]
        command = [*script, "--nproc-per-node", "1", "--", *arguments, "--out", str(out)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        print(done.stdout, done.stderr, flush=True)
        assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr.strip()[-300:]}"
        yield {"notebook": notebook, "last line": done.stdout.strip().splitlines()[-1]}


def memory(device: torch.device) -> Iterator[dict]:
    """Yield a step's peak as MemoryProfile and the allocator count it. Raises AssertionError if they differ by more
    than a tenth.
    """
    preset, batch, seq = ("SmolLM-135M", 4, 1024) if device.type == "cuda" else ("debug", 2, 16)
    with device:
        model = Transformer(PRESETS[preset])
    optimizer, batches = adamw(model, 1e-4), TokenBatches(ByteTokenizer().encode(corpus()), batch, seq)
    inputs, targets = (part.to(device) for part in next(batches))
    train_step(model, optimizer, inputs, targets)
    fresh()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with MemoryProfile(model, optimizer) as profile:
        train_step(model, optimizer, inputs, targets)
    counted = sum(profile.peak().values())
    row = {"preset": preset, "counted": counted}
    if device.type == "cuda":
        row |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    yield row
    if device.type == "cuda":
        assert abs(counted / row["allocated"] - 1) < 0.1, row


def sanitizer() -> str | None:
    """Return the path of compute-sanitizer, or None."""
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def of_dispatch(report: str) -> int:
    """Return how many of racecheck's hazards are reads at a kernel's first line. Warps that Triton splits off wait
    there, and read their task between two barriers (as the PTX shows), which racecheck does not see.
    """
    reads = re.findall(r"Race reported between Read access at (\w+)\+0x\w+ in (\w+\.py):(\d+)", report)
    return sum(
        line.startswith(f"def {kernel}(")
        for kernel, name, number in reads
        for path in (ROOT / "course_lib").rglob(name)
        for line in path.read_text().splitlines()[int(number) - 1 : int(number)]
    )


def sanitized(tool: str, device: str, names: list[str]) -> Iterator[dict]:
    """Yield the errors that compute-sanitizer finds in the `right` jobs. Raises AssertionError if there are any."""
    program = sanitizer()
    if not program:
        raise Skipped("compute-sanitizer is not installed")
    command = [program, "--tool", tool, "--print-limit", "20", sys.executable, str(ROOT / "benchmarks/gpu.py")]
    done = subprocess.run(
        [*command, "--work", "--device", device], input="\n".join(names), capture_output=True, text=True,
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )  # fmt: skip
    print(done.stdout, done.stderr, flush=True)
    passed = sum('"outcome": "passed"' in line for line in done.stdout.splitlines())
    summary = r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard"
    hazards = [int(a or b) for a, b in re.findall(summary, done.stdout + done.stderr)]
    false = of_dispatch(done.stdout + done.stderr)
    errors = sum(hazards) - false
    yield {"tool": tool, "kernels": passed, "found": errors, "of Triton's dispatch": false}
    assert hazards and not errors and passed == len(names), f"{errors} errors; {passed} of {len(names)} passed"


def sectors() -> Iterator[dict]:
    """Run counters.py and yield its rows."""
    if not shutil.which("ncu"):
        raise Skipped("ncu is not installed")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "benchmarks/counters.py", "--out", str(out)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        print(done.stdout, done.stderr, flush=True)
        assert done.returncode == 0, done.stderr.strip()[-300:]
        yield from json.loads(out.read_text())["rows"]


def cases(device: torch.device, which: str) -> Iterator[tuple[str, Comparison, Case]]:
    """Yield all cases, with their file and comparison."""
    for file, comparisons in COMPARISONS.items():
        for each in comparisons.values():
            yield from ((file, each, case) for case in each.cases(device, which))


def jobs(device_type: str) -> Iterator[Job]:
    """Yield all jobs, in order."""
    device, on_gpu = torch.device(device_type), device_type == "cuda"
    beside = functools.partial(Job, beside=True)
    yield Job("machine", functools.partial(machine, device), 15)
    small: dict[str, list[Job]] = {file: [] for file in COMPARISONS}
    for file, each, case in cases(device, "small" if on_gpu else "cpu"):
        its_run = functools.partial(right, case, each, device)
        small[file].append(beside(f"right: {case.kernel} {case.size}", its_run, 15, alone=on_gpu))
    rightness = [job for of_file in small.values() for job in of_file]
    yield from sorted(rightness, key=lambda job: bool(re.match("right: (product|rungs)", job.name)))  # Hopper's last
    for file in files_with("mark.gpu") if on_gpu else ["tests/kernels/test_timing.py"]:
        yield beside(f"tests: {Path(file).stem}", functools.partial(tests, "gpu", file), 12)
    for spec in LAYOUTS if on_gpu else ["tp2", "pp2,zb-v"]:
        yield beside(f"ranks: {spec}", functools.partial(two_ranks, spec, device), 30, alone=True)
    small_run = [] if on_gpu else "--preset debug --batch 2 --seq 16".split()
    for notebook in ("04_data_parallel", "05_zero", "10_5d") if on_gpu else ("10_5d",):
        yield beside(f"launcher: {notebook}", functools.partial(launcher, notebook, ["--steps", "3", *small_run]), 25)
    yield beside("memory", functools.partial(memory, device), 15)
    for file in files_with(r"^DEVICE = |^from \w+ import .*\bDEVICE\b|^    DEVICE,$") if on_gpu else ():
        name = f"tests of kernels: {Path(file).stem}"
        yield beside(name, functools.partial(tests, "device", file), 60, limit_s=400)
    timed, compile_first = {}, {}
    for file, each, case in cases(device, device_type):
        name, kind = f"{file}: {case.kernel} {case.size}", re.match(r"\w+", case.kernel)[0]
        timed[name] = Job(name, functools.partial(measured, file, case, each, device), SECONDS.get(kind, 3))
        its_run = functools.partial(ready, case, each, device)
        compile_first[name] = beside(f"ready: {name}", its_run, READY_S.get(kind, 15))
    headlines = [name for name in timed if HEADLINES.match(name)]
    others = [name for name in timed if not HEADLINES.match(name)]
    yield from (compile_first[name] for name in headlines if on_gpu)
    yield from (timed[name] for name in headlines)
    for way in ways(LARGE[device_type][0]):
        yield Job(f"step: {way}", functools.partial(step, way, device), 35 if way == "compile" else 8)
    yield Job(f"in turns: {IN_TURNS[0]}", functools.partial(in_turns, *IN_TURNS, device), 30)
    yield from (compile_first[name] for name in others if on_gpu)
    yield from (timed[name] for name in others)
    for tool in ("memcheck", "racecheck"):
        for file, of_file in small.items():
            its_run = functools.partial(sanitized, tool, device_type, [job.name for job in of_file])
            yield beside(f"sanitizer: {tool}, {file}", its_run, 100, alone=bool(sanitizer()))
    yield Job("sectors", sectors, 60, alone=bool(shutil.which("ncu")))


def record(known: dict[str, dict]) -> Iterator[str]:
    """Write benchmarks/results/NAME_<gpu>.json for each name that has been measured, in full or in part; yield a line
    for each file, and one for each bound that is missed.
    """
    (about,) = known.get("machine", {}).get("rows") or [{}]
    if "machine" not in about:
        yield "nothing was measured on a GPU: there is nothing to record"
        return
    gpu = gpu_word(about["machine"])
    keys = "date", "machine", "threads", "torch", "triton", "copy_gb_per_s", "product_tflop_per_s"
    shared = {key: about[key] for key in keys if key in about}  # date and threads: of the run, not of this machine

    def rows_of(start: str) -> list[dict]:
        passed = {name: job["rows"] for name, job in known.items() if job.get("outcome") == "passed"}
        return [row for name, rows in passed.items() if name.startswith(start) for row in rows]

    for file, comparisons in COMPARISONS.items():
        measured_rows = rows_of(f"{file}: ")
        figures = {key: [row for row in measured_rows if row["table"] == key] for key in comparisons}
        if measured_rows:
            save(file, shared | figures, gpu)
            yield f"benchmarks/results/{file}_{gpu}.json: {len(measured_rows)} rows"
            yield from map(with_reason, MISSED[file](figures))
    if measured_rows := rows_of("sectors"):
        save("sectors", shared | {"rows": measured_rows}, gpu)
        yield f"benchmarks/results/sectors_{gpu}.json: {len(measured_rows)} rows"
    pairs = {row["pair"]: {key: row[key] for key in row if key != "pair"} for row in rows_of("in turns: ")}
    if measured_rows := rows_of("step: "):
        save("steps", shared | {"rows": measured_rows} | ({"in turns": pairs} if pairs else {}), gpu)
        yield f"benchmarks/results/steps_{gpu}.json: {len(measured_rows)} rows"
        yield from map(with_reason, missed_steps(measured_rows))


def with_reason(line: str) -> str:
    """Return the line for a missed bound, with its reason."""
    known = (reason for pattern, reason in REASONS.items() if re.search(pattern, line))
    return f"missed: {line}: {next(known, 'the reason is not known')}"


def missed_steps(rows: list[dict]) -> list[str]:
    """Return a line for each aim that a step with the kernels misses."""
    times = {row["way"]: row["step_s"] for row in rows}
    return [
        f"a step with the kernels: {times[rival] / times['kernels']:.2f} of {rival}, the aim is {aim}"
        for rival, aim in STEP_AIMS.items()
        if {rival, "kernels"} <= times.keys() and times[rival] / times["kernels"] < aim
    ]
