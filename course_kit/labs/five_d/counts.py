"""Counts per rank: copies of a weight, norms, local shapes, bytes sent by axis and by step."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from course_kit.labs.five_d.models import MOE, SHALLOW, TINY, built, local_batch
from course_kit.ranks import Ranks
from course_kit.typed import grad_of, override, transformer_blocks
from course_lib.collectives.traffic import Record, count_traffic
from course_lib.five_d.layouts import Layout
from course_lib.pipeline.norm import clip_grad_norm_
from course_lib.single_gpu.model import ModelConfig
from course_lib.single_gpu.placement import placement_of

KINDS = {
    "blocks.1.attention.q_proj.weight": "matrix",
    "blocks.1.attention_norm.weight": "norm",
    "blocks.1.mlp.router.weight": "router",
    "blocks.1.mlp.experts.up_proj.weight": "expert",
}
FLAT = ModelConfig(6, 32, 4, 4, 64, 32)  # small embedding and head: nearly all parameters are in the layers
PIPED = {  # layout, and by how many sequences per rank the batch of each dp index grows
    "ZeRO-3 (dp4)": ("dp4,zero3", 1),
    "pipeline (pp4)": ("pp4", 4),
    "pipeline, each stage ZeRO-3, gathered once (dp2,pp2)": ("dp2,pp2,zero3,keep", 2),
    "pipeline, ZeRO-1 (dp2,pp2)": ("dp2,pp2,zero1", 2),
}
BY_AXIS = ["dp8", "dp4,tp2,sp", "dp4,cp2", "dp4,pp2", "dp4,ep2,tp2,sp", "dp2,cp2,tp2,sp", "dp2,pp2,tp2,sp"]
COUNTS = 64  # bytes; messages up to this size are counts, shapes, losses and norms


def counted_copies(text: str) -> dict[str, tuple[int, int]]:
    """On a rank: for each kind of weight, the number of ranks with the same bits, and of ranks that sum its
    gradient.
    """
    _, mesh, parallel = built(text, SHALLOW, MOE)
    bits_by_kind: dict[str, tuple[bytes, int]] = {}
    of_ranks: list = [None] * dist.get_world_size()
    for stage in parallel.stages.values():
        for name, weight in stage.named_parameters():
            if name in KINDS:
                group = placement_of(weight).reduce_group or mesh.replicas
                bits_by_kind[KINDS[name]] = (weight.detach().numpy().tobytes(), group.size())
    dist.all_gather_object(of_ranks, bits_by_kind)
    return {
        kind: (sum(other.get(kind, (None,))[0] == bits for other in of_ranks), size)
        for kind, (bits, size) in bits_by_kind.items()
    }


def three_norms(text: str) -> tuple[float, float, float]:
    """On a rank: the norm of the local gradients, of all ranks' squares summed, and of the full gradients."""
    layout, mesh, parallel = built(text, SHALLOW)
    inputs, targets = local_batch(layout, mesh)
    parallel.gradients(inputs, targets)
    local = torch.stack([grad_of(weight).square().sum() for weight in parallel.stages.parameters()]).sum()
    summed = local.clone()
    dist.all_reduce(summed)
    return local.sqrt().item(), summed.sqrt().item(), clip_grad_norm_(parallel.runner, 1e9).item()


class Layer(NamedTuple):
    """A rank's notes on its first layer, and on the traffic of a forward and backward."""

    shapes: dict[str, list[int]]  # of the modules' outputs
    weights: dict[str, list[int]]  # local shapes
    sent: dict[str, tuple[int, int]]  # calls and bytes by group of the mesh
    messages: list[int]  # bytes of each send to another stage
    records: list[Record]
    groups: dict[str, tuple[int, ...]]  # the ranks of each group of the mesh


def local_shapes(text: str, moe: dict | None, batch: int = 4, seq: int = 32) -> Layer:
    """On a rank: the output shapes of the modules of its first layer, its weights' shapes, and its traffic."""
    layout, mesh, parallel = built(text, SHALLOW, moe)
    block = next(block for stage in parallel.stages.values() for block in transformer_blocks(stage))
    shapes: dict[str, list[int]] = {}

    def note(name: str, module: nn.Module, args: tuple, out: torch.Tensor) -> None:
        shapes.setdefault(name, list(out.shape))

    for name, module in block.named_modules():
        if name in ("attention_norm", "attention.o_proj", "mlp_norm", "mlp", "mlp.router", "mlp.experts"):
            module.register_forward_hook(functools.partial(note, name.split(".")[-1]))
    core = block.attention.core

    def noted_core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        shapes.setdefault("q", list(q.shape)), shapes.setdefault("k", list(k.shape))
        out = core(q, k, v)
        shapes.setdefault("core", list(out.shape))
        return out

    override(block.attention, core=noted_core)
    inputs, targets = local_batch(layout, mesh, batch, seq)
    parallel.runner.shapes = {}
    with count_traffic() as traffic:
        parallel.gradients(inputs, targets)
    weights = {name: list(weight.shape) for name, weight in block.named_parameters()}
    groups = {
        name: tuple(dist.get_process_group_ranks(g)) for name, g in mesh._asdict().items() if name != "device_mesh"
    }
    traffic_by_group = {name: traffic.select(group=group) for name, group in groups.items() if len(group) > 1}
    calls = {name: (each.calls, each.bytes) for name, each in traffic_by_group.items()}
    messages = [record.bytes for record in traffic.select("send").records]
    return Layer(shapes, weights, calls, messages, traffic.records, groups)


def by_axis(layer: Layer) -> dict[str, int]:
    """Return the bytes that a rank has sent over each axis; over several axes: as "replicas" or "other"."""
    names = {layer.groups[name]: name for name in ("replicas", "ep", "pp", "cp", "tp") if len(layer.groups[name]) > 1}
    bytes_by_axis = dict.fromkeys(("tp", "cp", "ep", "pp", "replicas", "other"), 0)
    for record in layer.records:
        bytes_by_axis[names.get(record.group, "other")] += record.bytes
    return bytes_by_axis


def bytes_by_axis(ranks: Ranks) -> dict[str, dict[str, int]]:
    """Return the bytes that rank 0 of eight sends over each axis in a step of 8 sequences, for each of BY_AXIS."""
    sent = {}
    for text in BY_AXIS:  # a rank's sequences in one micro-batch, in two under a pipeline; more send the same bytes
        layout = Layout.parse(text)
        micro_batch = 8 // layout.dp // layout.pp
        layers = ranks(local_shapes, f"{text},mb{micro_batch}", MOE if layout.ep > 1 else None, 8, 32)
        sent[text] = by_axis(layers[0])
    return sent


def layer_text(layer: Layer, messages: list[int]) -> str:
    """Return what `local_shapes` has noted, with the bytes of messages between stages, as lines of text."""
    lines = [f"{'output of':16s}{'local shape':18s}{'weight':31s}local shape"]
    weights = [(name, shape) for name, shape in layer.weights.items() if "gate" not in name]
    for (module, out), (name, shape) in itertools.zip_longest(layer.shapes.items(), weights, fillvalue=("", "")):
        lines.append(f"{module:16s}{out!s:18s}{name:31s}{shape!s}".rstrip())
    lines.append("rank 0 sends in the group:")
    lines += [f"   {name:10s}{count:4d} calls{size:10,d} bytes" for name, (count, size) in layer.sent.items()]
    lines.append(f"with pp 2 in place of dp 2, a message between stages has {', '.join(map(str, messages))} bytes")
    return "\n".join(lines)


def sent_per_token(ranks: Ranks, counts: tuple[int, ...] = (1, 2, 4), seq: int = 32) -> dict[str, dict[int, float]]:
    """Return the bytes that four ranks send per token, by layout of PIPED and sequences per rank and step."""
    sent: dict[str, dict[int, float]] = {}
    for label, (text, times) in PIPED.items():
        of_steps = zip(*ranks(sent_per_step, text, [m * times for m in counts], seq), strict=True)
        sent[label] = {m: sum(each) / (m * len(ranks) * seq) for m, each in zip(counts, of_steps, strict=True)}
    return sent


def sent_per_step(text: str, counts: list[int], seq: int = 32) -> list[int]:
    """On a rank: bytes that steps with these numbers of micro-batches send, without counts, shapes, losses and
    norms.
    """
    layout, mesh, parallel = built(text, FLAT)
    bytes_sent = []
    for m in counts:
        parallel.optimizer.zero_grad()
        inputs, targets = local_batch(layout, mesh, m * layout.dp, seq, FLAT.vocab)
        with count_traffic() as traffic:
            parallel.gradients(inputs, targets)
        bytes_sent.append(sum(record.bytes for record in traffic.records if record.bytes > COUNTS))
    return bytes_sent


def sent_by_all(text: str) -> list[Record]:
    """On a rank: the records of one forward and backward."""
    layout, mesh, parallel = built(text, TINY)
    inputs, targets = local_batch(layout, mesh, 8, 32)
    with count_traffic() as traffic:
        parallel.gradients(inputs, targets)
    return traffic.records
