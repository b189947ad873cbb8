"""The kernels of notebook 12b against eager PyTorch, its own fused operators, torch.compile and Liger-Kernel, on a GPU.

    python benchmarks/gpu.py --out DIR --only "kernels: "                 # and with --record, kernels_<gpu>.json
    python benchmarks/gpu.py --out DIR --only "kernels: " --device cpu    # the same code at tiny sizes: is it right?

If liger_kernel is not installed, its column is empty. The cases and sizes are in kernel_cases.py, the measurement in
kernel_runs.py. The reference is eager in a wider dtype; eager runs twice to measure the noise. Rate: the bytes that
must move (each input read, each output written, once) or the matmuls' FLOPs, divided by our time. The loss has rows of
peak memory as well.

The aims, at 65,536 x 4,096: 0.9 or more of this GPU's own copy, and no slower than torch.compile or Liger-Kernel.
`missed` lists the rows that miss them.
"""

from kernel_cases import cases
from kernel_runs import Comparison

KERNELS = Comparison(
    columns=("ours", "eager", "PyTorch", "compile", "Liger"), cases=cases, tolerance={"cuda": 2e-2, "cpu": 1e-3}
)
AIM, AIM_SIZE = 0.9, "65,536 x 4,096"
LEVEL = 0.01  # times and errors that differ by less count as equal


def missed(results: dict[str, list[dict]]) -> list[str]:
    """Return a line for each row that misses an aim."""
    lines = []
    for row in results["rows"]:
        if row["size"] != AIM_SIZE or "ms" not in row:
            continue
        if row["share"] < AIM:
            lines.append(f"{row['kernel']}, {row['pass']}: {row['share']:.2f} of the copy, the aim is {AIM}")
        for rival in ("compile", "Liger"):
            if row["ours_against"].get(rival, 0) > 1 + max(row["noise"], LEVEL):
                times = row["ours_against"][rival]
                lines.append(f"{row['kernel']}, {row['pass']}: {times:.2f} of {rival}'s time, the aim is 1")
    return lines
