"""The Triton kernels that torch.compile writes for an H100, recorded on a machine that need not have one.

    python benchmarks/record_inductor.py [FOLDER]   # inductor_elu_h100.py.txt, inductor_rms_norm_h100.py.txt

FOLDER is data/ by default. In a process of its own, since PyTorch caches the machine's properties.

torch.compile runs whole on fake tensors "on cuda:0": dynamo traces, AOTAutograd decomposes, inductor fuses and writes
its module. What it would ask the driver (the GPU's properties, its current device, its random state) is answered here
with an H100's figures, and it stops before that module would be compiled and loaded. Below a heading, the files are
inductor's output, unedited. Left out on the way: patterns that inductor prepares with real CUDA tensors (attention,
padding of matmuls, random permutations), none of which these two functions contain.
"""

import contextlib
import datetime
import re
import runpy
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
import triton
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

DATA = Path(__file__).parents[1] / "data"

# What torch.cuda.get_device_properties says of an H100 SXM.
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65_536,
    max_threads_per_multi_processor=2_048,
    max_threads_per_block=1_024,
    shared_memory_per_block_optin=232_448,
    warp_size=32,
    total_memory=80 * 2**30,
)


def elu(x):
    """x: [100,000,000], float32."""
    return F.elu(x)


def add_and_norm(x, residual, weight):
    """x + residual, and its RMSNorm. x, residual: [8192, 4096]; weight: [4096]; bfloat16."""
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, 1e-5), total


@contextlib.contextmanager
def pretended_h100() -> Iterator[None]:
    """Inside, PyTorch and Triton find one H100 to write kernels for. Nothing can run on it."""
    random_state = torch.zeros(16, dtype=torch.uint8)
    answers = {
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.get_rng_state": lambda *device: random_state,
        "torch.cuda.set_rng_state": lambda *state: None,
        "torch.cuda._lazy_init": lambda: None,
        "torch.cuda._get_device_properties": lambda device: H100,
        "torch.cuda._exchange_device": lambda device: 0,
        "torch.cuda._maybe_exchange_device": lambda device: 0,
        "torch._inductor.fx_passes.joint_graph.lazy_init": lambda device: None,
    }
    with contextlib.ExitStack() as patches:
        for name, answer in answers.items():
            patches.enter_context(mock.patch(name, answer, create=name.endswith("_get_device_properties")))
        target = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
        patches.enter_context(mock.patch.object(driver, "_active", target))
        patches.enter_context(torch._inductor.config.patch(fx_graph_cache=False))
        patches.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        yield


def generated(function, *shapes: tuple[int, ...], dtype: torch.dtype) -> str:
    """The module that torch.compile writes for `function` of tensors of these shapes on an H100."""
    written = []

    def write_only(graph: GraphLowering) -> SimpleNamespace:
        """In place of writing, compiling and loading: a module that computes nothing."""
        code, _ = graph.codegen()
        written.append(code.value)
        return SimpleNamespace(call=lambda inputs: [None for _ in graph.graph_outputs])

    torch._dynamo.reset()
    with pretended_h100(), FakeTensorMode(), mock.patch.object(GraphLowering, "compile_to_module", write_only):
        torch.compile(function)(*(torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes))
    torch._dynamo.reset()
    (code,) = written
    return code


def configurations(code: str) -> list[str]:
    """The block sizes and warps between which the code's one kernel chooses when it first runs, by inductor's rules."""
    (source,) = re.findall(r"async_compile\.triton\('\w+', '''\n(.*?)'''", code, re.DOTALL)
    with tempfile.TemporaryDirectory() as folder, pretended_h100():
        file = Path(folder, "kernel.py")
        file.write_text(source)  # Triton reads the source of a function from its file
        with mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None):
            variables = runpy.run_path(str(file))
    (kernel,) = (value for value in variables.values() if isinstance(value, CachingAutotuner))
    return [str(configuration).split(", num_ctas")[0] for configuration in kernel.configs]


RECORDS = {
    "elu": lambda: generated(elu, (100_000_000,), dtype=torch.float32),
    "rms_norm": lambda: generated(add_and_norm, (8192, 4096), (8192, 4096), (4096,), dtype=torch.bfloat16),
}
WHAT = {
    "elu": "F.elu of 100 million float32",
    "rms_norm": "x + residual and its RMSNorm, 8192 rows of 4096 bfloat16",
}


def record(name: str, folder: Path) -> None:
    """Write FOLDER/inductor_NAME_h100.py.txt: the code and its origin."""
    code = RECORDS[name]()
    heading = (
        f"# {WHAT[name]}, as torch.compile writes it for an H100 (compute capability 9.0, 132 SMs).\n"
        f"# torch {torch.__version__}, triton {triton.__version__}, {datetime.date.today().isoformat()};"
        " the generator's output below this heading is unedited.\n"
        "# Made without a GPU by benchmarks/record_inductor.py: fake tensors, an H100's properties, nothing run.\n"
        f"# On the first call it times: {'; '.join(configurations(code))}.\n\n"
    )
    file = folder / f"inductor_{name}_h100.py.txt"
    file.write_text(heading + code)
    print(f"{file.name}: {len(code.splitlines())} lines")


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DATA
    for name in RECORDS:
        record(name, folder)
