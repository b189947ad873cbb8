"""A layout: the degree of each kind of parallelism, and its settings.

    Layout.parse("dp2,pp2,tp4,sp,zero1,zb-h1")     str() returns the spec, in the order of the fields

          splits              each rank of the axis has
    dp    sequences           other sequences; groups of ep ranks split the experts (zero: dp x cp ranks split states;
                              zero3 with rep2: half of them, adjacent along dp, and the other half has the same shards)
    pp    layers              other layers
    cp    tokens              other tokens of the same sequences
    tp    heads and widths    the same tokens, other shards of every matrix; with sp other tokens between the matrices

A layout has dp x pp x cp x tp ranks. tp is innermost: its ranks are adjacent. Every error in a layout is found before a
process starts, and the message names the number to change. (The Ultra-Scale Playbook, chapter 8.)
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass

from course_lib.context_parallel.methods import METHOD_NAMES, check_heads
from course_lib.expert_parallel.routing import Routing
from course_lib.pipeline.schedules import SCHEDULES, Schedule, num_stages, schedule_by_name
from course_lib.sequence_parallel.orders import ORDERS
from course_lib.single_gpu.config import ModelConfig


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism and their settings."""

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1  # a part of dp
    zero_stage: int = 0  # over dp x cp
    sequence_parallel: bool = False  # over tp
    micro_batch: int = 1  # sequences
    schedule: str = "1f1b"
    virtual: int = 2  # stages per rank, for schedule interleaved
    recompute: str = "none"
    cp_method: str = "ring"
    cp_order: str = "zigzag"
    gather_once: bool = False  # zero_stage 3 with pp: gather once per step, for all micro-batches
    replicate: int = 1  # zero_stage 3: number of groups that hold the same shards (HSDP); a part of dp

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.dp * self.pp * self.cp * self.tp

    @property
    def order(self) -> str:
        """cp_order; with cp 1 "contiguous", which also allows odd lengths."""
        return self.cp_order if self.cp > 1 else "contiguous"

    @property
    def keeps_float32_params(self) -> bool:
        """True without ZeRO: the modules' parameters stay float32, whatever dtype the stages compute in."""
        return self.zero_stage == 0

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Return the layout of a spec such as dp2,tp4,sp. Raises ValueError for an unknown token, and for a field that
        is set twice.
        """
        fields: dict = {}
        for token in text.replace(" ", "").split(","):
            number = re.fullmatch(r"([a-z]+)(\d+)", token)
            value: int | str
            if number and number[1] in NUMERIC_TOKENS:
                name, value = NUMERIC_TOKENS[number[1]], int(number[2])
            elif token in NAMED_TOKENS:
                name, value = NAMED_TOKENS[token]
            else:
                known = ", ".join([*(f"{each}N" for each in NUMERIC_TOKENS), *NAMED_TOKENS])
                raise ValueError(f"layout {text!r}: {token!r} is not one of {known}")
            if name in fields:
                raise ValueError(f"layout {text!r}: {token!r} sets {name} again")
            fields[name] = value
        return cls(**fields)

    def __str__(self) -> str:
        """Return the spec: the tokens of the fields that differ from Layout(), in the order of the fields."""
        prefixes = {name: token for token, name in NUMERIC_TOKENS.items()}
        names = {setting: token for token, setting in NAMED_TOKENS.items()}
        changed = [
            (f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        ]
        return ",".join(f"{prefixes[n]}{v}" if n in prefixes else names[n, v] for n, v in changed) or "dp1"


NUMERIC_TOKENS = {name: name for name in ("dp", "pp", "cp", "tp", "ep")}  # prefix of a number: field
NUMERIC_TOKENS |= {"zero": "zero_stage", "mb": "micro_batch", "v": "virtual", "rep": "replicate"}
NAMED_TOKENS: dict[str, tuple[str, bool | str]] = {"sp": ("sequence_parallel", True), "keep": ("gather_once", True)}
NAMED_TOKENS |= {name: ("schedule", name) for name in [*SCHEDULES, "interleaved"]}  # token: field and value
NAMED_TOKENS |= {name: ("recompute", name) for name in ("selective", "full")}
NAMED_TOKENS |= {name: ("cp_method", name) for name in METHOD_NAMES} | {name: ("cp_order", name) for name in ORDERS}


# exercise 10.1
def coordinates(rank: int, layout: Layout) -> dict[str, int]:
    """Return a rank's index along each axis, {"dp": …, "pp": …, "cp": …, "tp": …}: dp outermost, tp innermost."""
    indices = {}
    for axis in ("tp", "cp", "pp", "dp"):
        rank, indices[axis] = divmod(rank, getattr(layout, axis))
    return {axis: indices[axis] for axis in ("dp", "pp", "cp", "tp")}


# exercise 10.1
def groups_along(layout: Layout, *axes: str) -> list[list[int]]:
    """Return all groups of ranks that differ only in these axes, such as ("dp", "cp"), each in ascending order."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.ranks):
        fixed = tuple(index for axis, index in coordinates(rank, layout).items() if axis not in axes)
        groups.setdefault(fixed, []).append(rank)
    return list(groups.values())


# exercise 10.2
def check_ranks(layout: Layout, world_size: int) -> None:
    """Raise ValueError if a number is below 1, or the product of the degrees is not `world_size`.

    The message names the setting, its value, and what to change: if possible, the dp that would fit.
    """
    for name in ("dp", "pp", "cp", "tp", "ep", "micro_batch", "virtual"):
        if getattr(layout, name) < 1:
            raise ValueError(f"{name} is {getattr(layout, name)}: make it 1 or more")
    inner = layout.pp * layout.cp * layout.tp
    if layout.ranks != world_size:
        degrees = f"dp {layout.dp} x pp {layout.pp} x cp {layout.cp} x tp {layout.tp} = {layout.ranks} ranks"
        fits = f"dp {world_size // inner}"
        change = f"pp x cp x tp, now {inner}, a divisor of {world_size}" if world_size % inner else fits
        raise ValueError(f"{degrees}, and there are {world_size}: make {change}")
    if layout.dp % layout.ep:
        raise ValueError(f"ep {layout.ep} does not divide dp {layout.dp}, whose ranks share the experts: change ep")


# exercise 10.2
def check_pairs(layout: Layout) -> None:
    """Raise ValueError if two settings cannot be combined. The message names both, and the one to change."""
    stage, pp = layout.zero_stage, layout.pp
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage {stage}: it is 0, 1, 2 or 3")
    if layout.sequence_parallel and layout.tp == 1:
        raise ValueError(
            "sequence_parallel splits activations that tp does not, and tp is 1: raise tp, or leave out sp"
        )
    if stage == 3 and pp > 1 and not layout.gather_once:
        raise ValueError(f"zero_stage 3 with pp {pp} gathers in each micro-batch: make zero_stage 1, or keep it (keep)")
    if layout.gather_once and (stage < 3 or pp == 1):
        raise ValueError(f"gather_once with zero_stage {stage} and pp {pp}, not 3 and 2 or more: leave out keep")
    if stage == 3 and pp > 1 and layout.schedule == "dualpipe":
        raise ValueError("schedule dualpipe has two full copies of each stage, zero_stage 3 none: make zero_stage 1")
    if layout.recompute == "selective" and layout.cp > 1:
        raise ValueError(f"recompute selective with cp {layout.cp} repeats the exchange: make recompute none or full")


def schedule_of(layout: Layout, m: int) -> Schedule:
    """Return the pipeline's schedule for m micro-batches; a pipeline of one rank alternates forward and backward."""
    return schedule_by_name(layout.schedule if layout.pp > 1 else "1f1b", layout.pp, m, layout.virtual)


def micro_batches(layout: Layout, batch: int) -> int:
    """Return the number of micro-batches per rank for a batch of all ranks. Raises ValueError if it is no integer."""
    sequences = layout.dp * layout.micro_batch
    if batch < 1 or batch % sequences:
        fits = max(1, -(-batch // sequences)) * sequences
        raise ValueError(f"batch {batch} is not a multiple of dp {layout.dp} x mb {layout.micro_batch}: make it {fits}")
    return batch // sequences


def check_named_settings(layout: Layout) -> None:
    """Raise ValueError for an unknown schedule, recompute, cp_method or cp_order."""
    for name in ("schedule", "recompute", "cp_method", "cp_order"):
        known = dict.fromkeys(
            [getattr(Layout(), name), *(value for field, value in NAMED_TOKENS.values() if field == name)]
        )
        if getattr(layout, name) not in known:
            raise ValueError(f"{name} {getattr(layout, name)!r}: make it one of {', '.join(known)}")


def check_replicas(layout: Layout) -> None:
    """Raise ValueError if `replicate` groups cannot hold the same shards."""
    if layout.replicate < 1:
        raise ValueError(f"replicate is {layout.replicate}: make it 1 or more")
    if layout.replicate > 1 and layout.zero_stage < 3:
        raise ValueError(
            f"replicate {layout.replicate} needs zero_stage 3, and zero_stage is {layout.zero_stage}: "
            "make replicate 1, or zero_stage 3"
        )
    if layout.dp % layout.replicate:
        raise ValueError(f"replicate {layout.replicate} does not divide dp {layout.dp} into groups: change replicate")


def check_model(layout: Layout, config: ModelConfig, moe: dict | None) -> None:
    """Raise ValueError if the degrees do not divide the model. The message names the number to change."""
    from course_lib.pipeline.stages import split_layers  # these need torch; a Layout does not
    from course_lib.tensor_parallel.model import check_degree

    if config.dropout and layout.tp > 1:  # activations that all tp ranks hold in full would get different masks
        raise ValueError(f"dropout {config.dropout}: tp {layout.tp} ranks would draw different masks: make dropout 0")
    try:
        check_degree(config, layout.tp)
    except ValueError as error:
        raise ValueError(f"{error}; change tp") from None
    try:
        stages = num_stages(schedule_of(layout, 2 * layout.pp))  # enough micro-batches for every schedule
        split_layers(config.layers, stages)
    except ValueError as error:
        raise ValueError(f"pp {layout.pp}, schedule {layout.schedule}: {error}; change pp") from None
    if (layout.zero_stage, layout.schedule) == (2, "interleaved") and layout.pp > 1 and config.tied:
        raise ValueError(
            "zero_stage 2 sums the tied embedding after every backward: with schedule interleaved its stages would "
            "wait for each other: make zero_stage 1"
        )
    if layout.cp_method == "ulysses":
        try:
            check_heads(config.heads // layout.tp, max(1, config.kv_heads // layout.tp), layout.cp)
        except ValueError as error:
            raise ValueError(f"cp {layout.cp} with tp {layout.tp}: {error}; change cp") from None
    if moe is None and layout.ep > 1:
        raise ValueError(f"ep {layout.ep}, and the model has no experts: make ep 1")
    if moe is not None:
        Routing(**{name: value for name, value in moe.items() if name not in ("ffn_hidden", "shared", "seed")})
    if moe is not None and moe["experts"] % layout.ep:
        raise ValueError(f"ep {layout.ep} does not divide experts, which is {moe['experts']}: change ep")
    width = (moe or {}).get("ffn_hidden") or config.ffn_hidden
    if moe is not None and width % layout.tp:
        raise ValueError(f"tp {layout.tp} does not divide the experts' width {width}: change tp")


def check_sizes(layout: Layout, batch: int | None, seq: int | None) -> None:
    """Raise ValueError if sequences or tokens cannot be divided evenly. The message names a size that fits."""
    if batch is not None:
        m = micro_batches(layout, batch)
        try:
            schedule_of(layout, m)
        except ValueError as error:
            raise ValueError(f"batch {batch} makes {m} micro-batches per rank: {error}; change batch or mb") from None
    chunks = layout.cp * (2 if layout.order == "zigzag" else 1)
    shards = math.lcm(chunks, layout.cp * (layout.tp if layout.sequence_parallel else 1))
    if seq is not None and (seq < 1 or seq % shards):
        fits = max(1, -(-seq // shards)) * shards
        raise ValueError(f"seq {seq} is not a multiple of {shards}, into which cp and sp split it: make it {fits}")


def check_layout(
    config: ModelConfig,
    layout: Layout,
    world_size: int | None = None,
    batch: int | None = None,
    seq: int | None = None,
    moe: dict | None = None,
) -> None:
    """Raise ValueError if a layout does not fit. The message names the number to change.

    world_size: ranks; batch: sequences of all ranks; seq: tokens per sequence; moe: arguments of apply_moe. An argument
    that is None is not checked.
    """
    check_named_settings(layout)
    check_ranks(layout, layout.ranks if world_size is None else world_size)
    check_pairs(layout)
    check_replicas(layout)
    check_model(layout, config, moe)
    check_sizes(layout, batch, seq)


def fitted(layout: Layout, ranks: int) -> Layout:
    """Return the layout with dp changed to use `ranks` ranks, for a job whose size changes. With `replicate`, each
    group keeps its size along dp; if that does not divide dp, all ranks form one group.

    Raises ValueError if the other degrees do not divide `ranks`.
    """
    others = layout.ranks // layout.dp
    if ranks % others:
        raise ValueError(f"{ranks} ranks are not a multiple of the {others} that {layout} has beside dp")
    dp, group_dp = ranks // others, layout.dp // layout.replicate
    replicate = dp // group_dp if layout.replicate > 1 and dp % group_dp == 0 else 1
    return dataclasses.replace(layout, dp=dp, replicate=replicate)
