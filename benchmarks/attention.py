"""FlashAttention of notebook 13 against PyTorch's own and FlexAttention, on a GPU, and the value of each idea.

    python benchmarks/gpu.py --out DIR --only "attention: "                 # and with --record, attention_<gpu>.json
    python benchmarks/gpu.py --out DIR --only "attention: " --device cpu    # the same code at tiny sizes: is it right?

If flash_attn is not installed, or a backend does not support a case (cuDNN on a CPU, stored scores of a long sequence),
its column is empty. The cases and sizes are in attention_cases.py, the measurement in kernel_runs.py. The reference is
attention_exact.py; SDPA's flash runs twice to measure the noise. In the file:

    rows    by case and pass: ms, rates (TFLOP/s) and errors of each column; peak MiB of forward and backward
    rungs   forward of one causal case by the first kernel of the notebook, by ours with one idea undone at a time, by
            ours, and by the kernels for Hopper: ms, rates and errors. Each at its best tile sizes

The aims, for heads of 128 and sequences from 2k to 16k: forward as fast as SDPA's flash and at 0.85 or more of cuDNN's
speed, backward at 0.9 or more of flash's, and errors no larger than SDPA's. `missed` lists the misses.
"""

from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import torch
import triton
from attention_cases import BACKENDS, SIZES, backend, cases, flops
from attention_exact import exact
from kernel_runs import Case, Comparison, random

from course_kit.gpu.ablations import STEPS, undone
from course_lib.flash_attention import forward as flash_forward
from course_lib.flash_attention.first import first_attention
from course_lib.flash_attention.forward import FORWARD_CONFIGURATIONS, flash_forward_kernel, launch_forward
from course_lib.flash_attention.hopper import hopper_attention
from course_lib.flash_attention.operator import flash_attention
from course_lib.kernels.matmul import tunable

AIMS = {"forward": {"flash": 1.0, "cuDNN": 0.85}, "backward": {"flash": 0.9}}  # our speed divided by theirs
AIM_HEAD, AIM_SEQUENCES = 128, range(2048, 16384 + 1)
TOLERANCE = {"cuda": 1e-2, "cpu": 1e-5}


def launched(kernel) -> Callable:
    """Return forward by another kernel with the same arguments, launched as ours is, at the best of our tile sizes."""
    tuned = triton.autotune(configs=tunable(FORWARD_CONFIGURATIONS), key=["HEAD_DIM", "CAUSAL"])(kernel)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with mock.patch.object(flash_forward, "flash_forward_kernel", tuned):
            return launch_forward(q, k, v, None, q.shape[1], True, q.shape[3] ** -0.5)[0]

    return attend


RUNGS = ("first", *STEPS, "ours", "hopper", "hopper, overlapped")


def rungs(device: torch.device, which: str) -> Iterator[Case]:
    """Yield one case with a column for each rung; forward only, since not all have a backward."""
    (sequence, head_dim), tokens, width = (SIZES[which][name] for name in ("rungs", "tokens", "width"))
    shape = tokens // sequence, sequence, width // head_dim, head_dim
    methods: dict[str, Callable] = {"ours": flash_attention}
    methods["first"] = lambda q, k, v: first_attention(q, k, v)[0]
    methods |= {step: launched(undone(flash_forward_kernel, changes)) for step, changes in STEPS.items()}
    methods["hopper"] = lambda q, k, v: hopper_attention(q, k, v)[0]
    methods["hopper, overlapped"] = lambda q, k, v: hopper_attention(q, k, v, overlapped=True)[0]
    methods |= {column: partial(backend, BACKENDS[column], causal=True) for column in AIMS["forward"]}
    yield Case(
        "rungs",
        f"{shape[0]} x {sequence:,}, {head_dim}, causal",
        lambda: tuple(random(*shape, device=device, needs_gradient=False) for _ in range(3)),
        methods,
        {"forward": flops(shape[0] * shape[2] * sequence**2 * head_dim, causal=True)["forward"]},
        "TFLOP/s",
        rival="flash",
        exact=partial(exact, [sequence] * shape[0], True),
        about={"b": shape[0], "s": sequence, "heads": shape[2], "head_dim": head_dim, "causal": True},
    )


COLUMNS = ("ours", "flash", "cuDNN", "math", "flex", "padded", "flash_attn")
ATTENTION = Comparison(COLUMNS, cases, TOLERANCE)
LADDER = Comparison((*RUNGS, *AIMS["forward"]), rungs, TOLERANCE, ours=RUNGS)


def missed(results: dict[str, list[dict]]) -> list[str]:
    """Return a line for each row that misses an aim in speed, and for each case that misses it in error."""
    lines = []
    for row in results["rows"]:
        if row["pass"] == "peak" or "flash" not in row["ms"]:
            continue
        name = f"{row['kernel']} {row['size']}"
        aimed = row["kernel"] == "attention" and row["head_dim"] == AIM_HEAD and row["s"] in AIM_SEQUENCES
        for rival, aim in AIMS[row["pass"]].items() if aimed else ():
            reached = 1 / row["ours_against"].get(rival, 1 / aim)
            if reached < aim:
                lines.append(f"{name}, {row['pass']}: {reached:.2f} of {rival}, the aim is {aim}")
        ours, theirs = row["errors"]["ours"], max(row["errors"][name] for name in BACKENDS if name in row["errors"])
        if row["pass"] == "forward" and ours > 1.01 * theirs:  # a case's errors cover both passes
            lines.append(f"{name}: an error of {ours:.2e}, SDPA's is {theirs:.2e}")
    return lines
