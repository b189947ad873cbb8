"""Check of exercise 10.3: the ranks of every group of a mesh."""

from __future__ import annotations

import torch
import torch.distributed as dist

from course_kit.ranks import shared
from course_lib.five_d import meshes
from course_lib.five_d.layouts import Layout


def groups_of(text: str, device_type: str | None) -> dict[str, list[int]]:
    """On a rank: the ranks in each group of the layout's mesh."""
    mesh = meshes.build_mesh(Layout.parse(text), device_type)
    assert mesh.device_mesh.device_type == (device_type or "cpu"), (
        f"device_type={device_type!r}: the mesh is on {mesh.device_mesh.device_type}"
    )
    return {
        name: dist.get_process_group_ranks(group) for name, group in mesh._asdict().items() if name != "device_mesh"
    }


def check() -> None:
    """Assert the groups of three layouts on eight ranks."""
    for text, device_type in (("dp2,ep2,cp2,tp2,sp", None), ("pp2,cp2,tp2", None), ("dp4,ep2,tp2,sp", "cpu")):
        layout = Layout.parse(text)
        position = torch.arange(8).view(layout.dp // layout.ep, layout.ep, layout.pp, layout.cp, layout.tp)
        axes = {"dp": (0, 1), "pp": (2,), "cp": (3,), "tp": (4,), "ep": (1,), "replicas": (0, 1, 3), "experts": (0, 3)}
        axes["tokens"] = (0, 1, 3, 4) if layout.sequence_parallel else (0, 1, 3)
        with shared(8).within(40):
            of_ranks = shared(8)(groups_of, text, device_type)
        for rank, result in enumerate(of_ranks):
            local = (position == rank).nonzero()[0].tolist()
            for name, differ in axes.items():
                wanted = position[tuple(slice(None) if n in differ else local[n] for n in range(5))].flatten().tolist()
                assert result[name] == wanted, (
                    f"{text}: {name} of rank {rank} should be {wanted}, and is {result[name]}"
                )
