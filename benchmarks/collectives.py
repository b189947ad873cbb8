"""course_lib's ring and tree collectives against torch.distributed's own: time, on 2 and 4 ranks of this machine.

    python benchmarks/collectives.py        # writes benchmarks/results/collectives_<device>.json

Ours and PyTorch's run in alternation on the same tensors, each after a barrier, as does PyTorch's against itself:
the spread of that ratio is the noise. Times are rank 0's, medians of 9 pairs. On NCCL where there are enough GPUs.
"""

import torch
import torch.distributed as dist
from measure import paired, write

from course_kit.ranks import Ranks
from course_lib.collectives.into_tensor import all_gather_into_tensor, reduce_scatter_tensor
from course_lib.collectives.rings import ring_all_gather, ring_all_reduce, ring_reduce_scatter, tree_broadcast

SIZES = (4 * 2**10, 2**20, 64 * 2**20)


def compare(size: int) -> dict[str, dict]:
    """On a rank: for each collective, ours against PyTorch's and PyTorch's against itself; `size`: bytes of float32."""
    on_gpu, n = dist.get_backend() != "gloo", dist.get_world_size()
    tensor = torch.zeros(size // 4, device=torch.accelerator.current_accelerator() if on_gpu else "cpu")
    shard = torch.zeros_like(tensor[: tensor.numel() // n])

    def finished(function, *args):
        """A run that ends when the device has finished it."""

        def run():
            function(*args)
            if on_gpu:
                torch.accelerator.synchronize()

        return run

    rivals = {
        "all_reduce": ((ring_all_reduce, tensor), (dist.all_reduce, tensor)),
        "reduce_scatter": ((ring_reduce_scatter, tensor), (reduce_scatter_tensor, shard, tensor)),
        "all_gather": ((ring_all_gather, tensor), (all_gather_into_tensor, tensor, shard)),
        "broadcast": ((tree_broadcast, tensor), (dist.broadcast, tensor, 0)),
    }
    ratios = {}
    for name, (ours, theirs) in rivals.items():
        ratios[name] = {
            "against_pytorch": paired(finished(*ours), finished(*theirs), dist.barrier),
            "pytorch_against_itself": paired(finished(*theirs), finished(*theirs), dist.barrier),
        }
    return ratios


def main() -> None:
    """Measure on this machine, print the figures and write them down."""
    figures = {}
    for n in (2, 4):
        with Ranks(n, timeout_s=300) as ranks:
            figures[f"{n} ranks, {ranks.backend}"] = {f"{size} bytes": ranks(compare, size)[0] for size in SIZES}
    write("collectives", figures)


if __name__ == "__main__":
    main()
