"""The groups of a layout: who talks to whom, and about what.

    group       ranks that differ in      what travels over it
    tp          tp                        hidden states: 2 all-reduces a layer and direction (sp: same bytes, in halves)
    cp          cp                        keys and values, in attention alone
    pp          pp                        hidden states, from stage to stage
    ep          the inner part of dp      tokens, to their experts and back
    replicas    dp and cp                 gradients of dense weights, once a step (zero: and weights)
    experts     dp / ep and cp            gradients of experts
    tokens      replicas (sp: and tp)     gradients of what sees a rank's own tokens only: norms under sp, routers

With rep2 and zero3, replicas are two groups of near ranks, and weights travel inside of a group (`shard_groups`).
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
    """A rank's groups, and the DeviceMesh of AXES that they come from."""

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

    From the inside out that is Llama 3's order: tp, cp, pp, dp (Llama Team 2024, §3.3.2). Raises ValueError where the
    degrees do not make up the ranks.
    """
    check_ranks(layout, dist.get_world_size())
    if device_type is None:
        device_type = "cpu" if dist.get_backend() == "gloo" else torch.accelerator.current_accelerator().type
    sizes = (layout.dp // layout.ep, layout.ep, layout.pp, layout.cp, layout.tp)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=AXES)

    def over(*axes: str) -> dist.ProcessGroup:
        """This rank and those that differ from it in these axes alone."""
        return (mesh[axes]._flatten("_".join(axes)) if len(axes) > 1 else mesh[axes[0]]).get_group()

    replicas = over("copies", "ep", "cp")
    tokens = over("copies", "ep", "cp", "tp") if layout.sequence_parallel else replicas
    single = (over(axis) for axis in ("pp", "cp", "tp", "ep"))
    return Mesh(mesh, over("copies", "ep"), *single, replicas, over("copies", "cp"), tokens)


def shard_groups(layout: Layout, mesh: Mesh) -> dist.ProcessGroup | ReplicaGroups:
    """What ZeRO stage 3 shares parameters out over, as fully_shard takes it: the replicas, or, where several groups of
    them keep the same pieces (HSDP), this rank's group, and the ranks at its place in the others. A group is neighbours
    along dp, with all of cp; so what it gathers stays near. Collective over the default group.
    """
    if layout.replicate == 1:
        return mesh.replicas
    of_all = groups_along(layout, "dp", "cp")
    size = len(of_all[0]) // layout.replicate
    shards = [ranks[first : first + size] for ranks in of_all for first in range(0, len(ranks), size)]
    replicas = [ranks[place::size] for ranks in of_all for place in range(size)]
    return ReplicaGroups(mesh.replicas, new_disjoint_subgroups(shards), new_disjoint_subgroups(replicas))
