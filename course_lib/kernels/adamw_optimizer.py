"""`FusedAdamW`: torch.optim.AdamW by the kernel of `fused_adamw`, in one launch for all of a model's parameters."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from course_lib.kernels.fused_adamw import BLOCK, adamw_kernel, adamw_step, check_buffers, check_settings, update

MOMENTS = ("exp_avg", "exp_avg_sq")


def first_state(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return AdamW's state of a parameter before its first step."""
    moments = {name: torch.zeros_like(parameter) for name in MOMENTS}
    return {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)} | moments


@triton.jit
def adamw_many_kernel(
    addresses,  # int64 [tensors, 6]: addresses of master, gradient, both moments and step; numel
    owners,  # int32 [programs, 2]: the program's tensor, and its block of the tensor
    like,  # any gradient, for its dtype
    lr,
    keep,
    eps,
    ALIGNED: tl.constexpr,  # all addresses and sizes are multiples of 16, so a thread loads 16 bytes at once
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Run adamw_kernel for many tensors in one launch. Each tensor's pointers are offset so that this program's block
    is at program_id * BLOCK, where adamw_kernel looks for it.
    """
    program = tl.program_id(0)
    row = addresses + tl.load(owners + 2 * program).to(tl.int64) * 6
    moved = (tl.load(owners + 2 * program + 1) - program).to(tl.int64) * BLOCK
    master = tl.load(row).to(tl.pointer_type(tl.float32))
    grad = tl.load(row + 1).to(like.dtype)
    exp_avg = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    exp_avg_sq = tl.load(row + 3).to(tl.pointer_type(tl.float32))
    step = tl.load(row + 4).to(tl.pointer_type(tl.float32))
    numel = tl.load(row + 5)
    if ALIGNED:
        master, grad, numel = tl.multiple_of(master, 16), tl.multiple_of(grad, 16), numel // 16 * 16
        exp_avg, exp_avg_sq = tl.multiple_of(exp_avg, 16), tl.multiple_of(exp_avg_sq, 16)
    adamw_kernel(
        master + moved, grad + moved, exp_avg + moved, exp_avg_sq + moved, None, step, numel - moved,
        lr, keep, eps, BETA1, BETA2, BLOCK,
    )  # fmt: skip


def capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.lru_cache(maxsize=16)
def owners_of(numels: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the tensor of each program, and the program's block in it: int32 [programs, 2]."""
    blocks = torch.tensor([triton.cdiv(numel, BLOCK) for numel in numels])
    tensor = torch.arange(len(numels)).repeat_interleave(blocks)
    block = torch.arange(len(tensor)) - (blocks.cumsum(0) - blocks)[tensor]
    return torch.stack([tensor, block], 1).int().to(device)


@torch.library.custom_op("course::adamw_steps", mutates_args=("masters", "exp_avgs", "exp_avg_sqs"))
def update_many(
    masters: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    steps: list[torch.Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Run `update` for each tensor, in one launch, or two: one for the aligned tensors, one for the rest. Gradients
    have one dtype.
    """
    buffers = [row for row in zip(masters, grads, exp_avgs, exp_avg_sqs, steps, strict=True) if row[0].numel()]
    if buffers and capturing(masters[0].device):  # a replay would read freed tables; in a graph, launches cost nothing
        for master, grad, exp_avg, exp_avg_sq, step in buffers:
            update(master, grad, exp_avg, exp_avg_sq, None, step, lr, beta1, beta2, eps, weight_decay)
        return
    rows = [(*(each.data_ptr() for each in row), row[0].numel()) for row in buffers]
    by_alignment: dict[bool, list[tuple]] = {True: [], False: []}
    for row in rows:
        by_alignment[all(number % 16 == 0 for number in (*row[:4], row[5]))].append(row)
    for aligned, some in by_alignment.items():
        if some:
            launch_many(some, grads[0], aligned, (lr, 1 - lr * weight_decay, eps), (beta1, beta2))


def launch_many(
    rows: list[tuple[int, ...]], like: torch.Tensor, aligned: bool, settings: tuple, betas: tuple[float, float]
) -> None:
    """Launch once for the tensors at these addresses. rows: of adamw_many_kernel's table; like: one of the
    gradients.
    """
    device = like.device
    addresses = torch.tensor(rows, pin_memory=device.type == "cuda").to(device, non_blocking=True)  # asynchronous
    owners = owners_of(tuple(row[5] for row in rows), device)
    with torch.cuda.device_of(like):
        adamw_many_kernel[(len(owners),)](
            addresses, owners, like, *settings, aligned, *betas, BLOCK=BLOCK, num_warps=8
        )  # fmt: skip


@update_many.register_fake
def _(masters, grads, exp_avgs, exp_avg_sqs, steps, lr, beta1, beta2, eps, weight_decay):
    return None


class FusedAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW whose step is one launch for all parameters of one device with the same settings and gradient
    dtype, and one for all their counters. The first step, and every step while a CUDA graph is captured, is one launch
    per parameter: a graph needs kernels that are loaded before.

    Its state_dict is compatible with AdamW's in both directions: step (on the parameter's device), exp_avg, exp_avg_sq.
    Raises ValueError for parameters that are not contiguous or not float32: 16-bit parameters need a master copy, which
    ZeroOptimizer keeps.
    """

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.stepped = False

    def add_param_group(self, param_group: dict) -> None:
        """Add a parameter group. Raises ValueError, and adds nothing, if the group cannot be trained."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_settings(group["lr"], group["betas"], group["eps"], group["weight_decay"])
            if not all(p.dtype == torch.float32 and p.is_contiguous() for p in group["params"]):
                raise ValueError("a parameter is not contiguous float32; keep a float32 master copy to be updated")
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure=None):
        """Update every parameter that has a gradient. Return the result of `closure`, which is called first."""
        with torch.enable_grad():
            result = closure() if closure else None
        ready = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if any(parameter.grad.layout != torch.strided for parameter, _ in ready):
            raise ValueError("a gradient is sparse; AdamW decays every weight")
        launches = {}  # by settings, dtype and device: the buffers of each parameter
        for parameter, group in ready:
            state = self.state.get(parameter) or first_state(parameter)
            flat = {"master": parameter.view(-1), "grad": parameter.grad.reshape(-1)}
            flat |= {name: state[name].view(-1) for name in MOMENTS}
            settings = group["lr"], tuple(group["betas"]), group["eps"], group["weight_decay"]
            check_settings(*settings)
            check_buffers(flat, state["step"])
            self.state[parameter] = state
            alike = settings, parameter.grad.dtype, parameter.device
            launches.setdefault(alike, []).append((*flat.values(), state["step"]))
        if ready:
            torch._foreach_add_([self.state[parameter]["step"] for parameter, _ in ready], 1)
        for (settings, *_), buffers in launches.items():
            lr, betas, eps, weight_decay = settings
            if len(buffers) == 1 or not self.stepped:
                for each in buffers:
                    adamw_step(*each, *settings)
            else:
                update_many(*map(list, zip(*buffers, strict=True)), lr, *betas, eps, weight_decay)
        self.stepped = self.stepped or bool(ready)
        return result

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state of this class or of torch.optim.AdamW. Raises ValueError for amsgrad and maximize."""
        if any(group.get(name) for group in state_dict["param_groups"] for name in ("amsgrad", "maximize")):
            raise ValueError("the state is of AdamW with amsgrad or maximize, which FusedAdamW does not have")
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            state["step"] = torch.tensor(float(state["step"]), dtype=torch.float32, device=parameter.device)
