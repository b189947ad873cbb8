"""Three training steps of a layout on ranks of this machine, without ipyparallel or torchrun: for gpu_jobs.py.

A module of its own, for each rank on a GPU is a process that imports it. All may have their tensors on one GPU, over
gloo. It sums and gathers tensors on a GPU, but it sends only from the CPU's memory. So sends go through there.
"""

import tempfile
from unittest import mock

import torch
import torch.distributed as dist

from course_lib.five_d.layouts import Layout
from course_lib.five_d.meshes import build_mesh
from course_lib.five_d.model import full_weights, parallelize
from course_lib.single_gpu.data import TokenBatches
from course_lib.single_gpu.model import ModelConfig

OF = ModelConfig(layers=2, hidden=64, heads=4, kv_heads=2, ffn_hidden=96, vocab=97)


class Staged:
    """A send or receive by way of a copy in the CPU's memory. After a receive, wait() copies the data to `tensor`."""

    def __init__(self, operation: dist.P2POp):
        self.tensor, self.comes = operation.tensor, operation.op is dist.irecv
        self.copy = torch.empty_like(self.tensor, device="cpu") if self.comes else self.tensor.cpu()
        self.operation = dist.P2POp(operation.op, self.copy, group=operation.group, group_peer=operation.group_peer)

    def wait(self) -> None:
        self.work.wait()
        if self.comes:
            self.tensor.copy_(self.copy)


def through_the_cpu(batch_isend_irecv):
    """`batch_isend_irecv` for gloo and tensors on any device."""

    def start(operations: list[dist.P2POp]) -> list[Staged]:
        staged = [Staged(operation) for operation in operations]
        for each, work in zip(staged, batch_isend_irecv([each.operation for each in staged]), strict=True):
            each.work = work
        return staged

    return start


def on_rank(rank: int, spec: str, device_type: str, folder: str) -> None:
    """Train three steps on a rank, and save the losses and the final weights in the folder."""
    layout = Layout.parse(spec)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=layout.ranks)
    mesh = build_mesh(layout, device_type)
    parallel = parallelize(OF, layout, mesh, lr=1e-3, eps=1e-4)
    tokens = torch.arange(3000) * 31 % OF.vocab
    batches = TokenBatches(tokens, 4 // layout.dp, 16, mesh.dp.rank(), layout.dp)
    with mock.patch.object(dist, "batch_isend_irecv", through_the_cpu(dist.batch_isend_irecv)):
        losses = [parallel.step(*(part.to(device_type) for part in next(batches)))[0].item() for _ in range(3)]
    weights = {name: value.detach().cpu() for name, value in full_weights(parallel).items()}
    torch.save((losses, weights), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(spec: str, device_type: str) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Return the losses and the final weights of each rank of a layout."""
    with tempfile.TemporaryDirectory() as folder:
        count = Layout.parse(spec).ranks
        start = "spawn" if device_type == "cuda" else "fork"  # CUDA does not live on in a fork
        torch.multiprocessing.start_processes(on_rank, (spec, device_type, folder), count, start_method=start)
        return [torch.load(f"{folder}/{rank}.pt") for rank in range(count)]
