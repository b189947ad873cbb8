"""The cases of benchmarks/kernels.py: the kernels of notebook 12b and their rivals, their sizes, and their work.

Columns. ours; eager: the model's code; PyTorch: its own single operator if there is one (linear_cross_entropy with
default options, AdamW with fused=True, of a flat buffer and of all of a model's parameters); Liger: Liger-Kernel's, if
it is installed. Work: the bytes that must move (each input read, each output written, once; gradients too), or the
matmuls' FLOPs.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
from kernel_runs import DTYPES, Case, random

from course_lib.kernels.adamw_optimizer import update_many
from course_lib.kernels.cuda_matmul import CUDA_LADDER, build_matmul
from course_lib.kernels.elu import elu
from course_lib.kernels.fused_adamw import adamw_step
from course_lib.kernels.fused_loss import linear_cross_entropy
from course_lib.kernels.fused_norm import rms_norm
from course_lib.kernels.fused_rope import rope
from course_lib.kernels.fused_softmax import softmax
from course_lib.kernels.fused_swiglu import swiglu as fused_swiglu
from course_lib.kernels.matmul import matmul
from course_lib.single_gpu.model import PRESETS, Transformer, apply_rope, loss, swiglu

liger = torch.cuda.is_available() and importlib.util.find_spec("liger_kernel")  # it cannot be interpreted
if liger:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.softmax import LigerSoftmaxFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

EPS = 1e-5
HEAD = 128  # elements of an attention head
SIZES = {  # rows and width of tensors; rows, hidden and vocabulary of the loss
    "cuda": {
        "rows": [(65536, 4096), (16384, 1024), (16384, 2048), (16384, 16384)],
        "loss": [(4096, 1024, 32768), (8192, 4096, 131072)],
        "parameters": [2**28],
        "models": ["SmolLM-135M"],
        "sides": [4096, 8192],
        "ladder": [],
    },
    "small": {"rows": [(300, 1000)], "loss": [(200, 96, 1000)], "parameters": [10_000], "models": ["debug"],
              "sides": [200], "ladder": [200]},
    "cpu": {"rows": [(4, 128)], "loss": [(6, 32, 50)], "parameters": [300], "models": ["debug"], "sides": [48],
            "ladder": []},
}  # fmt: skip


def row_cases(device: torch.device, rows: int, width: int) -> Iterator[Case]:
    """Yield kernels over rows of `width` elements: softmax, RMSNorm, also with the residual sum, SwiGLU, ELU."""
    size, tensor = f"{rows:,} x {width:,}", rows * width * DTYPES[device.type].itemsize

    def inputs(count: int, weight: bool = False):
        return lambda: (
            tuple(random(rows, width, device=device) for _ in range(count))
            + ((random(width, device=device),) if weight else ())
        )

    methods = {"ours": softmax, "eager": lambda x: torch.softmax(x, -1)}
    if liger:
        methods["Liger"] = LigerSoftmaxFunction.apply
    yield Case("softmax", size, inputs(1), methods, {"forward": 2 * tensor, "backward": 3 * tensor})

    methods = {"ours": lambda x, w: rms_norm(x, w, EPS), "eager": lambda x, w: F.rms_norm(x, w.shape, w, EPS)}
    if liger:
        methods["Liger"] = lambda x, w: LigerRMSNormFunction.apply(x, w, EPS)
    yield Case("rms_norm", size, inputs(1, weight=True), methods, {"forward": 2 * tensor, "backward": 3 * tensor})

    methods = {"ours": lambda x, r, w: rms_norm(x, w, EPS, residual=r), "eager": add_norm}
    if liger:
        methods["Liger"] = lambda x, r, w: LigerFusedAddRMSNormFunction.apply(x, r, w, EPS)
    yield Case("add + rms_norm", size, inputs(2, weight=True), methods, {"forward": 4 * tensor, "backward": 4 * tensor})

    methods = {"ours": fused_swiglu, "eager": swiglu}
    if liger:
        methods["Liger"] = LigerSiLUMulFunction.apply
    yield Case("swiglu", size, inputs(2), methods, {"forward": 3 * tensor, "backward": 5 * tensor})

    methods = {"ours": elu, "eager": F.elu}
    yield Case("elu", size, inputs(1), methods, {"forward": 2 * tensor, "backward": 3 * tensor})


def rope_case(device: torch.device, rows: int, width: int) -> Case:
    """Return a case of queries of `width` and keys of a quarter of it, as in grouped-query attention. Liger-Kernel
    rotates in place, and needs the angles twice in a row, in the layout of Hugging Face.
    """
    heads, groups = width // HEAD, max(1, width // HEAD // 4)

    def make():
        angles = torch.rand(rows, HEAD // 2, device=device)
        cos, sin = (f(angles).to(random(0, device=device).dtype) for f in (torch.cos, torch.sin))
        twice = [torch.cat([each, each], -1)[None] for each in (cos, sin)]
        x = [random(1, rows, count, HEAD, device=device) for count in (heads, groups)]
        return *x, cos, sin, *twice

    def rotate_liger(q, k, _cos, _sin, cos, sin):
        rotated = LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return tuple(each.transpose(1, 2) for each in rotated)

    methods = {
        "ours": lambda q, k, cos, sin, *_: (rope(q, cos, sin), rope(k, cos, sin)),
        "eager": lambda q, k, cos, sin, *_: (apply_rope(q, cos, sin), apply_rope(k, cos, sin)),
    }
    if liger:
        methods["Liger"] = rotate_liger
    work = (2 * (heads + groups) + 1) * HEAD * rows * DTYPES[device.type].itemsize
    return Case("rope", f"{rows:,} x {width:,}", make, methods, {"forward": work, "backward": work})


def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalized sum, and the sum."""
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, EPS), total


def loss_case(device: torch.device, rows: int, hidden: int, vocab: int) -> Case:
    """Return a case of the head and its loss. All matmuls count: two FLOPs for each of rows x hidden x vocab, three
    times.
    """

    def make():
        weight = random(vocab, hidden, device=device).detach().mul_(hidden**-0.5).requires_grad_()
        return random(rows, hidden, device=device), weight, torch.randint(vocab, (rows,), device=device)

    def chunked(x, w, t):
        return F.linear_cross_entropy(x, w, t, options=torch.nn.LinearCrossEntropyOptions())

    methods = {
        "ours": linear_cross_entropy,
        "eager": lambda x, w, t: loss(F.linear(x, w)[None], t[None]),
    }
    if hasattr(F, "linear_cross_entropy"):  # newer PyTorch
        methods["PyTorch"] = chunked
    if liger:
        methods["Liger"] = lambda x, w, t: LigerFusedLinearCrossEntropyFunction.apply(x, w, t)[0]
    work = {"forward and backward": 6 * rows * hidden * vocab}
    return Case("linear_cross_entropy", f"{rows:,} x {hidden:,} x {vocab:,}", make, methods, work, "TFLOP/s", peak=True)


def adamw_case(device: torch.device, count: int) -> Case:
    """Return a case of a step on a flat buffer with gradients, and a copy of the weights, in 16 bits."""
    lr, betas, eps, decay = 0.1, (0.9, 0.95), 1e-8, 0.1  # lr so large that a missing step would be noticed

    def make():
        master, m, v = (torch.rand(count, device=device) for _ in range(3))
        gradient = random(count, device=device, needs_gradient=False)
        weights = torch.zeros(count, dtype=torch.bfloat16, device=device)
        return master, gradient, m, v, torch.zeros((), device=device), weights

    def ours(master, gradient, m, v, step, weights):
        step.add_(1)
        adamw_step(master, gradient, m, v, step, lr, betas, eps, decay, weights)
        return master, m, v, weights

    @torch.no_grad()
    def eager(master, gradient, m, v, step, weights):
        gradient = gradient.to(master.dtype)
        step.add_(1)
        m.lerp_(gradient, 1 - betas[0])
        v.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
        scale = (v / (1 - betas[1] ** step)).sqrt_().add_(eps)
        master.mul_(1 - lr * decay).sub_(m / scale * (lr / (1 - betas[0] ** step)))
        weights.copy_(master)
        return master, m, v, weights

    @torch.no_grad()
    def fused(master, gradient, m, v, step, weights):
        step.add_(1)
        settings = {"beta1": betas[0], "beta2": betas[1], "lr": lr, "weight_decay": decay, "eps": eps}
        lists = [master], [gradient.float()], [m], [v], [], [step]
        torch._fused_adamw_(*lists, **settings, amsgrad=False, maximize=False)  # what AdamW(fused=True) calls
        weights.copy_(master)
        return master, m, v, weights

    def exact(master, gradient, m, v, step, weights):
        results = eager(*(each.double() for each in (master, gradient, m, v)), step, weights)
        return [each.float() for each in results]

    methods = {"ours": ours, "eager": eager, "PyTorch": fused}
    size = 24 + DTYPES[device.type].itemsize + 2  # master, m, v read and written; gradient; weights
    return Case("adamw_step", f"{count:,}", make, methods, {"step": size * count}, exact=exact)


def model_adamw_case(device: torch.device, preset: str) -> Case:
    """Return a case of a step of all of a model's parameters, many and small, with gradients in float32: one launch."""
    with torch.device("meta"):
        sizes = [parameter.numel() for parameter in Transformer(PRESETS[preset]).parameters()]
    count, settings = sum(sizes), {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}

    def make():
        return *(torch.rand(count, device=device) for _ in range(4)), torch.zeros(len(sizes), device=device)

    def lists(master, gradient, m, v, steps):
        steps.add_(1)
        return *([*each.split(sizes)] for each in (master, gradient, m, v)), [*steps.unbind()]

    def ours(*buffers):
        update_many(*lists(*buffers), **settings)
        return buffers[0], buffers[2], buffers[3]

    @torch.no_grad()
    def theirs(*buffers):
        master, gradient, m, v, steps = lists(*buffers)
        torch._fused_adamw_(master, gradient, m, v, [], steps, **settings, amsgrad=False, maximize=False)
        return buffers[0], buffers[2], buffers[3]

    def exact(*buffers):
        return [each.float() for each in theirs(*(each.double() for each in buffers[:4]), buffers[4])]

    methods = {"ours": ours, "PyTorch": theirs}
    size = f"{preset}, {len(sizes)} parameters"
    return Case("adamw, one launch", size, make, methods, {"step": 28 * count}, rival="PyTorch", exact=exact)


def matmul_case(device: torch.device, side: int) -> Case:
    """Return a case of the tutorial's matmul, against cuBLAS."""

    def make():
        return tuple(random(side, side, device=device, needs_gradient=False) for _ in range(2))

    return Case("matmul", f"{side:,}", make, {"ours": matmul, "eager": torch.mm}, {"forward": 2 * side**3}, "TFLOP/s")


def ladder_case(device: torch.device, side: int) -> Case:
    """Return a case that checks notebook 12's four matmuls in CUDA C++, in float32. (counters.py measures their
    traffic.)
    """

    @cache
    def built():
        return build_matmul()

    def make():
        return tuple(random(side, side + 8, device=device, needs_gradient=False).float() for _ in range(2))

    methods = {
        "ours": lambda a, b: tuple(built()(name, a, b.t().contiguous()) for name in CUDA_LADDER),
        "eager": lambda a, b: (a @ b.t(),) * len(CUDA_LADDER),
    }
    work = {"forward": len(CUDA_LADDER) * 2 * side**2 * (side + 8)}
    return Case("CUDA ladder", f"{side:,}", make, methods, work, "TFLOP/s")


def cases(device: torch.device, which: str) -> Iterator[Case]:
    """Yield all kernels at all sizes; on a GPU also compiled: on a CPU the compiler takes long."""
    for case in written_cases(device, SIZES[which]):
        if device.type == "cuda" and "eager" in case.methods:
            compiled = torch.compile(case.methods["eager"], dynamic=False)
            case = replace(case, methods=case.methods | {"compile": compiled})
        yield case


def written_cases(device: torch.device, sizes: dict) -> Iterator[Case]:
    """Yield all kernels at all sizes, with handwritten methods only."""
    for rows, width in sizes["rows"]:
        yield from row_cases(device, rows, width)
        yield rope_case(device, rows, width)
    for size in sizes["loss"]:
        yield loss_case(device, *size)
    for count in sizes["parameters"]:
        yield adamw_case(device, count)
    for preset in sizes["models"]:
        yield model_adamw_case(device, preset)
    for side in sizes["sides"]:
        yield matmul_case(device, side)
    for side in sizes["ladder"]:
        yield ladder_case(device, side)
