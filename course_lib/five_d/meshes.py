"""The process groups of a layout: which ranks communicate, and the data they send.

    group       ranks that differ in      what they send
    tp          tp                        hidden states: 2 all-reduces per layer and direction (sp: same bytes, halved)
    cp          cp                        keys and values, only in attention
    pp          pp                        hidden states, from stage to stage
    ep          the inner part of dp      tokens, to their experts and back
    replicas    dp and cp                 gradients of dense weights, once per step (zero: also weights)
    experts     dp / ep and cp            gradients of experts
    tokens      replicas (sp: and tp)     gradients of weights that see only a rank's tokens: norms under sp, routers

With rep2 and zero3, replicas form two groups of nearby ranks, and weights are sent within a group (`shard_groups`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from course_lib.five_d.layouts import Layout, check_ranks, groups_along
from course_lib.tensor_parallel.linear import new_disjoint_subgroups
from course_lib.zero.sharded_models import ReplicaGroups

AXES = ("copies", "ep", "pp", "cp", "tp")  # outermost first; dp is copies x ep


class Mesh(NamedTuple):
    """A rank's groups, and the DeviceMesh of AXES that has them."""

    device_mesh: DeviceMesh
    dp: dist.ProcessGroup
    pp: dist.ProcessGroup
    cp: dist.ProcessGroup
    tp: dist.ProcessGroup
    ep: dist.ProcessGroup
    replicas: dist.ProcessGroup
    experts: dist.ProcessGroup
    tokens: dist.ProcessGroup


# exercise 10.3
def build_mesh(layout: Layout, device_type: str | None = None) -> Mesh:
    """Make the groups of a layout over all ranks of the default group: dp outermost, then pp, cp, tp. Collective.

    From the inside out, this is the order of Llama 3: tp, cp, pp, dp (Llama Team 2024, §3.3.2). Raises ValueError if
    the product of the degrees is not the number of ranks.
    """
    check_ranks(layout, dist.get_world_size())
    if device_type is None:
        accelerator = torch.accelerator.current_accelerator()
        device_type = "cpu" if accelerator is None or dist.get_backend() == "gloo" else accelerator.type
    sizes = (layout.dp // layout.ep, layout.ep, layout.pp, layout.cp, layout.tp)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=AXES)

    def over(*axes: str) -> dist.ProcessGroup:
        """Return the group of the ranks that differ from this one only in these axes."""
        return (mesh[axes]._flatten("_".join(axes)) if len(axes) > 1 else mesh[axes[0]]).get_group()

    replicas = over("copies", "ep", "cp")
    tokens = over("copies", "ep", "cp", "tp") if layout.sequence_parallel else replicas
    dp, pp, cp, tp, ep = over("copies", "ep"), over("pp"), over("cp"), over("tp"), over("ep")
    return Mesh(mesh, dp, pp, cp, tp, ep, replicas, over("copies", "cp"), tokens)


def shard_groups(layout: Layout, mesh: Mesh) -> dist.ProcessGroup | ReplicaGroups:
    """Return the group over which ZeRO stage 3 shards parameters: the replicas. With `replicate` (HSDP), return this
    rank's group and the ranks that hold the same shards in the other groups. Each group is adjacent along dp, with all
    of cp, so gathers are between nearby ranks. Collective over the default group.
    """
    if layout.replicate == 1:
        return mesh.replicas
    replica_groups = groups_along(layout, "dp", "cp")
    size = len(replica_groups[0]) // layout.replicate
    shards = [tuple(ranks[first : first + size]) for ranks in replica_groups for first in range(0, len(ranks), size)]
    replicas = [tuple(ranks[index::size]) for ranks in replica_groups for index in range(size)]
    shard_group, replica_group = new_disjoint_subgroups(shards), new_disjoint_subgroups(replicas)
    assert shard_group is not None and replica_group is not None  # every rank is in one of each
    return ReplicaGroups(mesh.replicas, shard_group, replica_group)
