"""The kernels of notebook 12 against eager PyTorch, its own fused operators, torch.compile and Liger-Kernel, on a GPU.

    PYTHONPATH=. python benchmarks/kernels.py                 # writes benchmarks/results/kernels_<gpu>.json
    PYTHONPATH=. python benchmarks/kernels.py --device cpu    # the same code at tiny sizes, interpreted: is it right?

Needs torch and triton alone; where liger_kernel is not installed its column stays empty. What is compared at which
sizes is in kernel_cases.py, and how it is measured in kernel_runs.py; the reference, and what runs twice for the noise,
is eager. Rate: the bytes that must move (each input read, each output written, once) or the products' FLOPs, by our
time. For the loss there are rows of peak memory.
"""

import kernel_runs
from kernel_cases import cases
from kernel_runs import Comparison

KERNELS = Comparison(
    columns=("ours", "eager", "PyTorch", "compile", "Liger"), cases=cases, tolerance={"cuda": 2e-2, "cpu": 1e-3}
)


def main() -> None:
    """Measure on the GPU and write it down; or show on a CPU that everything runs."""
    kernel_runs.main("kernels", __doc__.splitlines()[0], {"rows": KERNELS})


if __name__ == "__main__":
    main()
