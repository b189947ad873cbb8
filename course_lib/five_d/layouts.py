"""A layout: how many ranks each kind of parallelism gets, and the settings that go with it.

    Layout.parse("dp2,pp2,tp4,sp,zero1,zb-h1")     str() gives the words back, in the order of the fields

    dp    sequences           other sequences; ep of these ranks share the experts (zero: and share states over dp x cp,
                              zero3 with rep2 over half of dp x cp, the inner dp places; the other half has the same)
    pp    layers              other layers
    cp    tokens              other tokens of the same sequences
    tp    heads and widths    the same tokens, other parts of every matrix; with sp other tokens between them

dp x pp x cp x tp ranks; tp is innermost: neighbours in rank. Everything that can be wrong with a layout is found
before a process starts, and the message names the number to change. (The Ultra-Scale Playbook, chapter 8.)
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass

from course_lib.context_parallel.attention import check_heads
from course_lib.context_parallel.model import METHODS
from course_lib.expert_parallel.router import Routing
from course_lib.pipeline.schedules import SCHEDULES, Schedule, num_stages, schedule_by_name
from course_lib.pipeline.stages import split_layers
from course_lib.sequence_parallel.shards import ORDERS
from course_lib.single_gpu.model import ModelConfig
from course_lib.tensor_parallel.model import check_degree


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
    virtual: int = 2  # stages a rank, of schedule interleaved
    recompute: str = "none"
    cp_method: str = "ring"
    cp_order: str = "zigzag"
    gather_once: bool = False  # zero_stage 3 with pp: gather once a step, for all micro-batches
    replicate: int = 1  # zero_stage 3: how many groups of ranks keep the same pieces (HSDP); a part of dp

    @property
    def ranks(self) -> int:
        """How many ranks it takes."""
        return self.dp * self.pp * self.cp * self.tp

    @property
    def order(self) -> str:
        """cp_order; "contiguous" where there is nothing to split, which takes odd lengths too."""
        return self.cp_order if self.cp > 1 else "contiguous"

    @property
    def keeps_float32_params(self) -> bool:
        """True without ZeRO: the modules' parameters stay float32, whatever dtype the stages compute in."""
        return self.zero_stage == 0

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Of words such as dp2,tp4,sp. Raises ValueError for a word that is none, and for a field named twice."""
        found = {}
        for word in text.replace(" ", "").split(","):
            number = re.fullmatch(r"([a-z]+)(\d+)", word)
            if number and number[1] in NUMERIC_TOKENS:
                name, value = NUMERIC_TOKENS[number[1]], int(number[2])
            elif word in NAMED_TOKENS:
                name, value = NAMED_TOKENS[word]
            else:
                known = ", ".join([*(f"{each}N" for each in NUMERIC_TOKENS), *NAMED_TOKENS])
                raise ValueError(f"layout {text!r}: {word!r} is none of {known}")
            if name in found:
                raise ValueError(f"layout {text!r}: {word!r} sets {name} again")
            found[name] = value
        return cls(**found)

    def __str__(self) -> str:
        """The words of what differs from Layout(), in the order of the fields."""
        words = {name: word for word, name in NUMERIC_TOKENS.items()} | {
            setting: word for word, setting in NAMED_TOKENS.items()
        }
        changed = [
            (f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        ]
        return ",".join(f"{words[n]}{v}" if n in words else words[n, v] for n, v in changed) or "dp1"


NUMERIC_TOKENS = {name: name for name in ("dp", "pp", "cp", "tp", "ep")}  # word: field
NUMERIC_TOKENS |= {"zero": "zero_stage", "mb": "micro_batch", "v": "virtual", "rep": "replicate"}
NAMED_TOKENS = {"sp": ("sequence_parallel", True), "keep": ("gather_once", True)}  # word: field and value
NAMED_TOKENS |= {name: ("schedule", name) for name in [*SCHEDULES, "interleaved"]}
NAMED_TOKENS |= {name: ("recompute", name) for name in ("selective", "full")}
NAMED_TOKENS |= {name: ("cp_method", name) for name in METHODS} | {name: ("cp_order", name) for name in ORDERS}


# exercise 10.1
def coordinates(rank: int, layout: Layout) -> dict[str, int]:
    """Return where a rank stands on each axis, {"dp": …, "pp": …, "cp": …, "tp": …}: dp outermost, tp innermost."""
    found = {}
    for axis in ("tp", "cp", "pp", "dp"):
        rank, found[axis] = divmod(rank, getattr(layout, axis))
    return {axis: found[axis] for axis in ("dp", "pp", "cp", "tp")}


# exercise 10.1
def groups_along(layout: Layout, *axes: str) -> list[list[int]]:
    """Return all groups of ranks that differ in these axes alone, such as ("dp", "cp"); ascending in each group."""
    groups = {}
    for rank in range(layout.ranks):
        fixed = tuple(place for axis, place in coordinates(rank, layout).items() if axis not in axes)
        groups.setdefault(fixed, []).append(rank)
    return list(groups.values())


# exercise 10.2
def check_ranks(layout: Layout, world_size: int) -> None:
    """Raise ValueError where a number is below 1, or the degrees do not make up the ranks that there are.

    The message names what is wrong, its value, and what to change: the dp that would fit, where one does.
    """
    for name in ("dp", "pp", "cp", "tp", "ep", "micro_batch", "virtual"):
        if getattr(layout, name) < 1:
            raise ValueError(f"{name} is {getattr(layout, name)}: make it 1 or more")
    inner = layout.pp * layout.cp * layout.tp
    if layout.ranks != world_size:
        product = f"dp {layout.dp} x pp {layout.pp} x cp {layout.cp} x tp {layout.tp} = {layout.ranks} ranks"
        fits = f"dp {world_size // inner}"
        change = f"pp x cp x tp, now {inner}, a divisor of {world_size}" if world_size % inner else fits
        raise ValueError(f"{product}, and there are {world_size}: make {change}")
    if layout.dp % layout.ep:
        raise ValueError(f"ep {layout.ep} does not divide dp {layout.dp}, whose ranks share the experts: change ep")


# exercise 10.2
def check_pairs(layout: Layout) -> None:
    """Raise ValueError where two settings do not go together. The message names both, and which one to change."""
    stage, pp = layout.zero_stage, layout.pp
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage {stage}: it is 0, 1, 2 or 3")
    if layout.sequence_parallel and layout.tp == 1:
        raise ValueError("sequence_parallel splits what tp leaves whole, and tp is 1: raise tp, or leave out sp")
    if stage == 3 and pp > 1 and not layout.gather_once:
        raise ValueError(f"zero_stage 3 with pp {pp} gathers in each micro-batch: make zero_stage 1, or keep it (keep)")
    if layout.gather_once and (stage < 3 or pp == 1):
        raise ValueError(f"gather_once with zero_stage {stage} and pp {pp}, not 3 and 2 or more: leave out keep")
    if stage == 3 and pp > 1 and layout.schedule == "dualpipe":
        raise ValueError("schedule dualpipe has each stage on two ranks, zero_stage 3 on none whole: make zero_stage 1")
    if layout.recompute == "selective" and layout.cp > 1:
        raise ValueError(f"recompute selective with cp {layout.cp} repeats the exchange: make recompute none or full")


def schedule_of(layout: Layout, m: int) -> Schedule:
    """The pipeline's lists for m micro-batches; a pipeline of one rank goes forward and backward in turn."""
    return schedule_by_name(layout.schedule if layout.pp > 1 else "1f1b", layout.pp, m, layout.virtual)


def micro_batches(layout: Layout, batch: int) -> int:
    """How many micro-batches each rank gets of a batch of all ranks. Raises ValueError where there is a rest."""
    each = layout.dp * layout.micro_batch
    if batch < 1 or batch % each:
        fits = max(1, -(-batch // each)) * each
        raise ValueError(f"batch {batch} is no multiple of dp {layout.dp} x mb {layout.micro_batch}: make it {fits}")
    return batch // each


def check_named_settings(layout: Layout) -> None:
    """Raise ValueError where a setting is none of those that there are."""
    for name in ("schedule", "recompute", "cp_method", "cp_order"):
        known = dict.fromkeys(
            [getattr(Layout(), name), *(value for field, value in NAMED_TOKENS.values() if field == name)]
        )
        if getattr(layout, name) not in known:
            raise ValueError(f"{name} {getattr(layout, name)!r}: make it one of {', '.join(known)}")


def check_replicas(layout: Layout) -> None:
    """Raise ValueError where there can't be so many groups that keep the same pieces."""
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
    """Raise ValueError where the degrees do not divide the model; the message names the number to change."""
    if config.dropout and layout.tp > 1:  # what its ranks hold whole would get another mask on each
        raise ValueError(f"dropout {config.dropout}: tp {layout.tp} ranks would draw different masks: make dropout 0")
    try:
        check_degree(config, layout.tp)
    except ValueError as error:
        raise ValueError(f"{error}; change tp") from None
    try:
        stages = num_stages(schedule_of(layout, 2 * layout.pp))  # as many micro-batches as any schedule asks for
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
    """Raise ValueError where sequences or tokens can't be shared out; the message names what would fit."""
    if batch is not None:
        m = micro_batches(layout, batch)
        try:
            schedule_of(layout, m)
        except ValueError as error:
            raise ValueError(f"batch {batch} makes {m} micro-batches a rank: {error}; change batch or mb") from None
    chunks = layout.cp * (2 if layout.order == "zigzag" else 1)
    parts = math.lcm(chunks, layout.cp * (layout.tp if layout.sequence_parallel else 1))
    if seq is not None and (seq < 1 or seq % parts):
        fits = max(1, -(-seq // parts)) * parts
        raise ValueError(f"seq {seq} is no multiple of {parts}, into which cp and sp cut it: make it {fits}")


def check_layout(
    config: ModelConfig,
    layout: Layout,
    world_size: int | None = None,
    batch: int | None = None,
    seq: int | None = None,
    moe: dict | None = None,
) -> None:
    """Raise ValueError where a layout does not fit; the message names the number to change. Touches nothing.

    world_size: ranks; batch: sequences of all ranks together; seq: tokens of each; moe: arguments of apply_moe. What is
    None is not looked at.
    """
    check_named_settings(layout)
    check_ranks(layout, layout.ranks if world_size is None else world_size)
    check_pairs(layout)
    check_replicas(layout)
    check_model(layout, config, moe)
    check_sizes(layout, batch, seq)


def fitted(layout: Layout, ranks: int) -> Layout:
    """The layout with as many dp ranks as it takes to use `ranks` ranks, for a job whose size changes. With replicas,
    as many of them as leave a group its dp places; where that does not come out, one group of all.

    Raises ValueError where the other dimensions do not divide them.
    """
    others = layout.ranks // layout.dp
    if ranks % others:
        raise ValueError(f"{ranks} ranks are no multiple of the {others} that {layout} has beside dp")
    dp, places = ranks // others, layout.dp // layout.replicate
    replicate = dp // places if layout.replicate > 1 and dp % places == 0 else 1
    return dataclasses.replace(layout, dp=dp, replicate=replicate)
