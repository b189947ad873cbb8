"""FP8 of notebook 14b on a GPU: matmuls, casts and linear layers against BF16, PyTorch's own FP8 and torchao.

    python benchmarks/gpu.py --out DIR --only "fp8: "                 # and with --record, fp8_<gpu>.json
    python benchmarks/gpu.py --out DIR --only "fp8: " --device cpu    # the same code at tiny sizes: is it right?

Needs a GPU with FP8 (Ada, Hopper); if torchao is not installed, or PyTorch does not support scales of blocks (below
CUDA 12.9), a column is empty. The cases and sizes are in fp8_cases.py, the measurement in kernel_runs.py. In the file:

    products    rates of one matmul whose operands are in 8 bits already, and errors
    casts       GB/s of quantization, and errors: ours and eager are the same to the bit
    layers      forward and backward of a linear layer with all quantization; BF16 runs twice to measure the noise

The aims, on an H200. Matmuls: one scale per matrix or row at 0.95 or more of torch._scaled_mm's rate, scales of blocks
at 0.7 or more of it. Layers of 8192 x 8192 x 8192: 1.3 times BF16's rate or more, and not slower than torchao's.
`missed` lists the misses.
"""

from fp8_cases import cast_cases, layer_cases, matmul_cases
from kernel_runs import Comparison

AIMS = {"product, tensor": 0.95, "product, row": 0.95, "blocks": 0.7, "BF16": 1.3, "torchao": 1.0}
AIM_SIDE = 8192  # of a layer's three dimensions

MATMULS = Comparison(
    ("ours", "plain", "scaled_mm", "fast", "blockwise", "BF16"),
    matmul_cases,
    {"cuda": 1e-2, "cpu": 1e-5},
    ours=("ours", "plain"),
)
CASTS = Comparison(("ours", "eager", "compile"), cast_cases, {"cuda": 1e-6, "cpu": 0.0})
LAYERS = Comparison(
    ("ours", "kept", "blocks", "BF16", "torchao"),
    layer_cases,
    {"cuda": 0.1, "cpu": 0.1},
    ours=("ours", "kept", "blocks"),
)


def missed(results: dict[str, list[dict]]) -> list[str]:
    """Return a line for each row that misses its aim: our rate divided by the rival's in the same repetitions."""
    lines = []
    for row in results["products"]:
        aim = AIMS[row["kernel"] if row["kernel"] in AIMS else "blocks"]
        reached = 1 / row["ours_against"]["scaled_mm"]
        if reached < aim:
            lines.append(f"{row['kernel']} {row['size']}: {reached:.2f} of scaled_mm, the aim is {aim}")
    for row in results["layers"]:
        if row["pass"] != "forward and backward" or {row["m"], row["n"], row["k"]} != {AIM_SIDE}:
            continue
        for rival in ("BF16", "torchao"):
            reached = 1 / row["ours_against"][rival] if rival in row["ours_against"] else AIMS[rival]
            if reached < AIMS[rival]:
                lines.append(f"linear {row['size']}: {reached:.2f} of {rival}, the aim is {AIMS[rival]}")
    return lines
