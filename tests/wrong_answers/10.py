"""Wrong answers that the checks of notebook 10 must catch. Those that hang end at the check's own deadline."""

# %% 10.1 tp outermost
def coordinates(rank: int, layout: Layout) -> dict[str, int]:
    """Where a rank stands on each axis, {"dp": …, "pp": …, "cp": …, "tp": …}: dp outermost, tp innermost."""
    found = {}
    for axis in ("dp", "pp", "cp", "tp"):
        rank, found[axis] = divmod(rank, getattr(layout, axis))
    return {axis: found[axis] for axis in ("dp", "pp", "cp", "tp")}


def groups_along(layout: Layout, *axes: str) -> list[list[int]]:
    """The ranks in groups, ascending: in a group are those that differ in these axes alone. E.g. ("dp", "cp")."""
    groups = {}
    for rank in range(layout.ranks):
        fixed = tuple(place for axis, place in coordinates(rank, layout).items() if axis not in axes)
        groups.setdefault(fixed, []).append(rank)
    return list(groups.values())


# %% 10.1 cp and pp the other way round
def coordinates(rank: int, layout: Layout) -> dict[str, int]:
    """Where a rank stands on each axis, {"dp": …, "pp": …, "cp": …, "tp": …}: dp outermost, tp innermost."""
    found = {}
    for axis in ("tp", "pp", "cp", "dp"):
        rank, found[axis] = divmod(rank, getattr(layout, axis))
    return {axis: found[axis] for axis in ("dp", "pp", "cp", "tp")}


def groups_along(layout: Layout, *axes: str) -> list[list[int]]:
    """The ranks in groups, ascending: in a group are those that differ in these axes alone. E.g. ("dp", "cp")."""
    groups = {}
    for rank in range(layout.ranks):
        fixed = tuple(place for axis, place in coordinates(rank, layout).items() if axis not in axes)
        groups.setdefault(fixed, []).append(rank)
    return list(groups.values())


# %% 10.1 places in the order of the axes from the inside
def coordinates(rank: int, layout: Layout) -> dict[str, int]:
    """Where a rank stands on each axis, {"dp": …, "pp": …, "cp": …, "tp": …}: dp outermost, tp innermost."""
    found = {}
    for axis in ("tp", "cp", "pp", "dp"):
        rank, found[axis] = divmod(rank, getattr(layout, axis))
    return found


def groups_along(layout: Layout, *axes: str) -> list[list[int]]:
    """The ranks in groups, ascending: in a group are those that differ in these axes alone. E.g. ("dp", "cp")."""
    groups = {}
    for rank in range(layout.ranks):
        fixed = tuple(place for axis, place in coordinates(rank, layout).items() if axis not in axes)
        groups.setdefault(fixed, []).append(rank)
    return list(groups.values())


# %% 10.1 the remainder is taken of the rank itself
def coordinates(rank: int, layout: Layout) -> dict[str, int]:
    """Where a rank stands on each axis, {"dp": …, "pp": …, "cp": …, "tp": …}: dp outermost, tp innermost."""
    found = {}
    for axis in ("tp", "cp", "pp", "dp"):
        found[axis] = rank % getattr(layout, axis)
    return {axis: found[axis] for axis in ("dp", "pp", "cp", "tp")}


def groups_along(layout: Layout, *axes: str) -> list[list[int]]:
    """The ranks in groups, ascending: in a group are those that differ in these axes alone. E.g. ("dp", "cp")."""
    groups = {}
    for rank in range(layout.ranks):
        fixed = tuple(place for axis, place in coordinates(rank, layout).items() if axis not in axes)
        groups.setdefault(fixed, []).append(rank)
    return list(groups.values())


# %% 10.1 groups of ranks that agree on these axes
def coordinates(rank: int, layout: Layout) -> dict[str, int]:
    """Where a rank stands on each axis, {"dp": …, "pp": …, "cp": …, "tp": …}: dp outermost, tp innermost."""
    found = {}
    for axis in ("tp", "cp", "pp", "dp"):
        rank, found[axis] = divmod(rank, getattr(layout, axis))
    return {axis: found[axis] for axis in ("dp", "pp", "cp", "tp")}


def groups_along(layout: Layout, *axes: str) -> list[list[int]]:
    """The ranks in groups, ascending: in a group are those that differ in these axes alone. E.g. ("dp", "cp")."""
    groups = {}
    for rank in range(layout.ranks):
        fixed = tuple(place for axis, place in coordinates(rank, layout).items() if axis in axes)
        groups.setdefault(fixed, []).append(rank)
    return list(groups.values())


# %% 10.1 only this layout's first group
def coordinates(rank: int, layout: Layout) -> dict[str, int]:
    """Where a rank stands on each axis, {"dp": …, "pp": …, "cp": …, "tp": …}: dp outermost, tp innermost."""
    found = {}
    for axis in ("tp", "cp", "pp", "dp"):
        rank, found[axis] = divmod(rank, getattr(layout, axis))
    return {axis: found[axis] for axis in ("dp", "pp", "cp", "tp")}


def groups_along(layout: Layout, *axes: str) -> list[list[int]]:
    """The ranks in groups, ascending: in a group are those that differ in these axes alone. E.g. ("dp", "cp")."""
    groups = {}
    for rank in range(layout.ranks):
        fixed = tuple(place for axis, place in coordinates(rank, layout).items() if axis not in axes)
        groups.setdefault(fixed, []).append(rank)
    return list(groups.values())[:1]


# %% 10.1 all ranks that stand at one place of the first axis
def coordinates(rank: int, layout: Layout) -> dict[str, int]:
    """Where a rank stands on each axis, {"dp": …, "pp": …, "cp": …, "tp": …}: dp outermost, tp innermost."""
    found = {}
    for axis in ("tp", "cp", "pp", "dp"):
        rank, found[axis] = divmod(rank, getattr(layout, axis))
    return {axis: found[axis] for axis in ("dp", "pp", "cp", "tp")}


def groups_along(layout: Layout, *axes: str) -> list[list[int]]:
    """The ranks in groups, ascending: in a group are those that differ in these axes alone. E.g. ("dp", "cp")."""
    groups = {}
    for rank in range(layout.ranks):
        fixed = tuple(place for axis, place in coordinates(rank, layout).items() if axis != axes[0])
        groups.setdefault(fixed, []).append(rank)
    return list(groups.values())


# %% 10.1 groups of neighbours
def coordinates(rank: int, layout: Layout) -> dict[str, int]:
    """Where a rank stands on each axis, {"dp": …, "pp": …, "cp": …, "tp": …}: dp outermost, tp innermost."""
    found = {}
    for axis in ("tp", "cp", "pp", "dp"):
        rank, found[axis] = divmod(rank, getattr(layout, axis))
    return {axis: found[axis] for axis in ("dp", "pp", "cp", "tp")}


def groups_along(layout: Layout, *axes: str) -> list[list[int]]:
    """The ranks in groups, ascending: in a group are those that differ in these axes alone. E.g. ("dp", "cp")."""
    size = 1
    for axis in axes:
        size *= getattr(layout, axis)
    return [list(range(first, first + size)) for first in range(0, layout.ranks, size)]


# %% 10.2 a message without numbers
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
        raise ValueError("the degrees do not make up the ranks")
    if layout.dp % layout.ep:
        raise ValueError(f"ep {layout.ep} does not divide dp {layout.dp}, whose ranks share the experts: change ep")


def check_pairs(layout: Layout) -> None:
    """Raise ValueError where two settings do not go together. The message names both, and which one to change."""
    if layout.zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage {layout.zero_stage}: it is 0, 1, 2 or 3")
    if layout.sequence_parallel and layout.tp == 1:
        raise ValueError("sequence_parallel splits what tp leaves whole, and tp is 1: raise tp, or leave out sp")
    if layout.zero_stage == 3 and layout.pp > 1 and not layout.keep_gathered:
        raise ValueError(
            f"zero_stage 3 with pp {layout.pp} would gather all weights for every micro-batch: make zero_stage 1, "
            "or keep what is gathered (keep)"
        )
    if layout.keep_gathered and (layout.zero_stage < 3 or layout.pp == 1):
        raise ValueError(
            f"keep_gathered with zero_stage {layout.zero_stage} and pp {layout.pp}: it goes with zero_stage 3 and pp "
            "above 1; leave out keep"
        )
    if layout.zero_stage == 3 and layout.pp > 1 and layout.schedule == "dualpipe":
        raise ValueError("schedule dualpipe has each stage on two ranks, zero_stage 3 on none whole: make zero_stage 1")
    if layout.recompute == "selective" and layout.cp > 1:
        raise ValueError(
            f"recompute selective drops scores, and cp {layout.cp} keeps none: it would only repeat the exchange; make "
            "recompute none or full"
        )


# %% 10.2 the same advice where no dp fits
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
        change = fits
        raise ValueError(f"{product}, and there are {world_size}: make {change}")
    if layout.dp % layout.ep:
        raise ValueError(f"ep {layout.ep} does not divide dp {layout.dp}, whose ranks share the experts: change ep")


def check_pairs(layout: Layout) -> None:
    """Raise ValueError where two settings do not go together. The message names both, and which one to change."""
    if layout.zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage {layout.zero_stage}: it is 0, 1, 2 or 3")
    if layout.sequence_parallel and layout.tp == 1:
        raise ValueError("sequence_parallel splits what tp leaves whole, and tp is 1: raise tp, or leave out sp")
    if layout.zero_stage == 3 and layout.pp > 1 and not layout.keep_gathered:
        raise ValueError(
            f"zero_stage 3 with pp {layout.pp} would gather all weights for every micro-batch: make zero_stage 1, "
            "or keep what is gathered (keep)"
        )
    if layout.keep_gathered and (layout.zero_stage < 3 or layout.pp == 1):
        raise ValueError(
            f"keep_gathered with zero_stage {layout.zero_stage} and pp {layout.pp}: it goes with zero_stage 3 and pp "
            "above 1; leave out keep"
        )
    if layout.zero_stage == 3 and layout.pp > 1 and layout.schedule == "dualpipe":
        raise ValueError("schedule dualpipe has each stage on two ranks, zero_stage 3 on none whole: make zero_stage 1")
    if layout.recompute == "selective" and layout.cp > 1:
        raise ValueError(
            f"recompute selective drops scores, and cp {layout.cp} keeps none: it would only repeat the exchange; make "
            "recompute none or full"
        )


# %% 10.2 fewer ranks than there are pass
def check_ranks(layout: Layout, world_size: int) -> None:
    """Raise ValueError where a number is below 1, or the degrees do not make up the ranks that there are.

    The message names what is wrong, its value, and what to change: the dp that would fit, where one does.
    """
    for name in ("dp", "pp", "cp", "tp", "ep", "micro_batch", "virtual"):
        if getattr(layout, name) < 1:
            raise ValueError(f"{name} is {getattr(layout, name)}: make it 1 or more")
    inner = layout.pp * layout.cp * layout.tp
    if layout.ranks > world_size:
        product = f"dp {layout.dp} x pp {layout.pp} x cp {layout.cp} x tp {layout.tp} = {layout.ranks} ranks"
        fits = f"dp {world_size // inner}"
        change = f"pp x cp x tp, now {inner}, a divisor of {world_size}" if world_size % inner else fits
        raise ValueError(f"{product}, and there are {world_size}: make {change}")
    if layout.dp % layout.ep:
        raise ValueError(f"ep {layout.ep} does not divide dp {layout.dp}, whose ranks share the experts: change ep")


def check_pairs(layout: Layout) -> None:
    """Raise ValueError where two settings do not go together. The message names both, and which one to change."""
    if layout.zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage {layout.zero_stage}: it is 0, 1, 2 or 3")
    if layout.sequence_parallel and layout.tp == 1:
        raise ValueError("sequence_parallel splits what tp leaves whole, and tp is 1: raise tp, or leave out sp")
    if layout.zero_stage == 3 and layout.pp > 1 and not layout.keep_gathered:
        raise ValueError(
            f"zero_stage 3 with pp {layout.pp} would gather all weights for every micro-batch: make zero_stage 1, "
            "or keep what is gathered (keep)"
        )
    if layout.keep_gathered and (layout.zero_stage < 3 or layout.pp == 1):
        raise ValueError(
            f"keep_gathered with zero_stage {layout.zero_stage} and pp {layout.pp}: it goes with zero_stage 3 and pp "
            "above 1; leave out keep"
        )
    if layout.zero_stage == 3 and layout.pp > 1 and layout.schedule == "dualpipe":
        raise ValueError("schedule dualpipe has each stage on two ranks, zero_stage 3 on none whole: make zero_stage 1")
    if layout.recompute == "selective" and layout.cp > 1:
        raise ValueError(
            f"recompute selective drops scores, and cp {layout.cp} keeps none: it would only repeat the exchange; make "
            "recompute none or full"
        )


# %% 10.2 ep is an axis of its own
def check_ranks(layout: Layout, world_size: int) -> None:
    """Raise ValueError where a number is below 1, or the degrees do not make up the ranks that there are.

    The message names what is wrong, its value, and what to change: the dp that would fit, where one does.
    """
    for name in ("dp", "pp", "cp", "tp", "ep", "micro_batch", "virtual"):
        if getattr(layout, name) < 1:
            raise ValueError(f"{name} is {getattr(layout, name)}: make it 1 or more")
    inner = layout.pp * layout.cp * layout.tp
    if layout.ranks * layout.ep != world_size:
        product = f"dp {layout.dp} x pp {layout.pp} x cp {layout.cp} x tp {layout.tp} = {layout.ranks} ranks"
        fits = f"dp {world_size // inner}"
        change = f"pp x cp x tp, now {inner}, a divisor of {world_size}" if world_size % inner else fits
        raise ValueError(f"{product}, and there are {world_size}: make {change}")
    if layout.dp % layout.ep:
        raise ValueError(f"ep {layout.ep} does not divide dp {layout.dp}, whose ranks share the experts: change ep")


def check_pairs(layout: Layout) -> None:
    """Raise ValueError where two settings do not go together. The message names both, and which one to change."""
    if layout.zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage {layout.zero_stage}: it is 0, 1, 2 or 3")
    if layout.sequence_parallel and layout.tp == 1:
        raise ValueError("sequence_parallel splits what tp leaves whole, and tp is 1: raise tp, or leave out sp")
    if layout.zero_stage == 3 and layout.pp > 1 and not layout.keep_gathered:
        raise ValueError(
            f"zero_stage 3 with pp {layout.pp} would gather all weights for every micro-batch: make zero_stage 1, "
            "or keep what is gathered (keep)"
        )
    if layout.keep_gathered and (layout.zero_stage < 3 or layout.pp == 1):
        raise ValueError(
            f"keep_gathered with zero_stage {layout.zero_stage} and pp {layout.pp}: it goes with zero_stage 3 and pp "
            "above 1; leave out keep"
        )
    if layout.zero_stage == 3 and layout.pp > 1 and layout.schedule == "dualpipe":
        raise ValueError("schedule dualpipe has each stage on two ranks, zero_stage 3 on none whole: make zero_stage 1")
    if layout.recompute == "selective" and layout.cp > 1:
        raise ValueError(
            f"recompute selective drops scores, and cp {layout.cp} keeps none: it would only repeat the exchange; make "
            "recompute none or full"
        )


# %% 10.2 ep has to divide all ranks, not dp
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
    if layout.ranks % layout.ep:
        raise ValueError(f"ep {layout.ep} does not divide dp {layout.dp}, whose ranks share the experts: change ep")


def check_pairs(layout: Layout) -> None:
    """Raise ValueError where two settings do not go together. The message names both, and which one to change."""
    if layout.zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage {layout.zero_stage}: it is 0, 1, 2 or 3")
    if layout.sequence_parallel and layout.tp == 1:
        raise ValueError("sequence_parallel splits what tp leaves whole, and tp is 1: raise tp, or leave out sp")
    if layout.zero_stage == 3 and layout.pp > 1 and not layout.keep_gathered:
        raise ValueError(
            f"zero_stage 3 with pp {layout.pp} would gather all weights for every micro-batch: make zero_stage 1, "
            "or keep what is gathered (keep)"
        )
    if layout.keep_gathered and (layout.zero_stage < 3 or layout.pp == 1):
        raise ValueError(
            f"keep_gathered with zero_stage {layout.zero_stage} and pp {layout.pp}: it goes with zero_stage 3 and pp "
            "above 1; leave out keep"
        )
    if layout.zero_stage == 3 and layout.pp > 1 and layout.schedule == "dualpipe":
        raise ValueError("schedule dualpipe has each stage on two ranks, zero_stage 3 on none whole: make zero_stage 1")
    if layout.recompute == "selective" and layout.cp > 1:
        raise ValueError(
            f"recompute selective drops scores, and cp {layout.cp} keeps none: it would only repeat the exchange; make "
            "recompute none or full"
        )


# %% 10.2 experts over dp and cp
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
    if layout.dp * layout.cp % layout.ep:
        raise ValueError(f"ep {layout.ep} does not divide dp {layout.dp}, whose ranks share the experts: change ep")


def check_pairs(layout: Layout) -> None:
    """Raise ValueError where two settings do not go together. The message names both, and which one to change."""
    if layout.zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage {layout.zero_stage}: it is 0, 1, 2 or 3")
    if layout.sequence_parallel and layout.tp == 1:
        raise ValueError("sequence_parallel splits what tp leaves whole, and tp is 1: raise tp, or leave out sp")
    if layout.zero_stage == 3 and layout.pp > 1 and not layout.keep_gathered:
        raise ValueError(
            f"zero_stage 3 with pp {layout.pp} would gather all weights for every micro-batch: make zero_stage 1, "
            "or keep what is gathered (keep)"
        )
    if layout.keep_gathered and (layout.zero_stage < 3 or layout.pp == 1):
        raise ValueError(
            f"keep_gathered with zero_stage {layout.zero_stage} and pp {layout.pp}: it goes with zero_stage 3 and pp "
            "above 1; leave out keep"
        )
    if layout.zero_stage == 3 and layout.pp > 1 and layout.schedule == "dualpipe":
        raise ValueError("schedule dualpipe has each stage on two ranks, zero_stage 3 on none whole: make zero_stage 1")
    if layout.recompute == "selective" and layout.cp > 1:
        raise ValueError(
            f"recompute selective drops scores, and cp {layout.cp} keeps none: it would only repeat the exchange; make "
            "recompute none or full"
        )


# %% 10.2 keep also without a pipeline
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


def check_pairs(layout: Layout) -> None:
    """Raise ValueError where two settings do not go together. The message names both, and which one to change."""
    if layout.zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage {layout.zero_stage}: it is 0, 1, 2 or 3")
    if layout.sequence_parallel and layout.tp == 1:
        raise ValueError("sequence_parallel splits what tp leaves whole, and tp is 1: raise tp, or leave out sp")
    if layout.zero_stage == 3 and layout.pp > 1 and not layout.keep_gathered:
        raise ValueError(
            f"zero_stage 3 with pp {layout.pp} would gather all weights for every micro-batch: make zero_stage 1, "
            "or keep what is gathered (keep)"
        )
    if layout.keep_gathered and (layout.zero_stage < 3):
        raise ValueError(
            f"keep_gathered with zero_stage {layout.zero_stage} and pp {layout.pp}: it goes with zero_stage 3 and pp "
            "above 1; leave out keep"
        )
    if layout.zero_stage == 3 and layout.pp > 1 and layout.schedule == "dualpipe":
        raise ValueError("schedule dualpipe has each stage on two ranks, zero_stage 3 on none whole: make zero_stage 1")
    if layout.recompute == "selective" and layout.cp > 1:
        raise ValueError(
            f"recompute selective drops scores, and cp {layout.cp} keeps none: it would only repeat the exchange; make "
            "recompute none or full"
        )


# %% 10.2 dualpipe never
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


def check_pairs(layout: Layout) -> None:
    """Raise ValueError where two settings do not go together. The message names both, and which one to change."""
    if layout.zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage {layout.zero_stage}: it is 0, 1, 2 or 3")
    if layout.sequence_parallel and layout.tp == 1:
        raise ValueError("sequence_parallel splits what tp leaves whole, and tp is 1: raise tp, or leave out sp")
    if layout.zero_stage == 3 and layout.pp > 1 and not layout.keep_gathered:
        raise ValueError(
            f"zero_stage 3 with pp {layout.pp} would gather all weights for every micro-batch: make zero_stage 1, "
            "or keep what is gathered (keep)"
        )
    if layout.keep_gathered and (layout.zero_stage < 3 or layout.pp == 1):
        raise ValueError(
            f"keep_gathered with zero_stage {layout.zero_stage} and pp {layout.pp}: it goes with zero_stage 3 and pp "
            "above 1; leave out keep"
        )
    if layout.schedule == "dualpipe":
        raise ValueError("schedule dualpipe has each stage on two ranks, zero_stage 3 on none whole: make zero_stage 1")
    if layout.recompute == "selective" and layout.cp > 1:
        raise ValueError(
            f"recompute selective drops scores, and cp {layout.cp} keeps none: it would only repeat the exchange; make "
            "recompute none or full"
        )


# %% 10.2 any zero_stage passes
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


def check_pairs(layout: Layout) -> None:
    """Raise ValueError where two settings do not go together. The message names both, and which one to change."""
    if layout.zero_stage < 0:
        raise ValueError(f"zero_stage {layout.zero_stage}: it is 0, 1, 2 or 3")
    if layout.sequence_parallel and layout.tp == 1:
        raise ValueError("sequence_parallel splits what tp leaves whole, and tp is 1: raise tp, or leave out sp")
    if layout.zero_stage == 3 and layout.pp > 1 and not layout.keep_gathered:
        raise ValueError(
            f"zero_stage 3 with pp {layout.pp} would gather all weights for every micro-batch: make zero_stage 1, "
            "or keep what is gathered (keep)"
        )
    if layout.keep_gathered and (layout.zero_stage < 3 or layout.pp == 1):
        raise ValueError(
            f"keep_gathered with zero_stage {layout.zero_stage} and pp {layout.pp}: it goes with zero_stage 3 and pp "
            "above 1; leave out keep"
        )
    if layout.zero_stage == 3 and layout.pp > 1 and layout.schedule == "dualpipe":
        raise ValueError("schedule dualpipe has each stage on two ranks, zero_stage 3 on none whole: make zero_stage 1")
    if layout.recompute == "selective" and layout.cp > 1:
        raise ValueError(
            f"recompute selective drops scores, and cp {layout.cp} keeps none: it would only repeat the exchange; make "
            "recompute none or full"
        )


# %% 10.3 tp outermost
def build_mesh(layout: Layout, device_type: str | None = None) -> Mesh:
    """The groups of a layout over all ranks of the default group: dp outermost, then pp, cp, tp. Collective.

    From the inside out that is Llama 3's order: tp, cp, pp, dp (Llama Team 2024, §3.3.2). Raises ValueError where the
    degrees do not make up the ranks.
    """
    check_ranks(layout, dist.get_world_size())
    if device_type is None:
        device_type = "cpu" if dist.get_backend() == "gloo" else torch.accelerator.current_accelerator().type
    sizes = (layout.tp, layout.cp, layout.pp, layout.ep, layout.dp // layout.ep)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=AXES[::-1])

    def over(*axes: str) -> dist.ProcessGroup:
        """This rank and those that differ from it in these axes alone."""
        axes = axes[::-1]
        return (mesh[axes]._flatten("_".join(axes)) if len(axes) > 1 else mesh[axes[0]]).get_group()

    replicas = over("copies", "ep", "cp")
    tokens = over("copies", "ep", "cp", "tp") if layout.sequence_parallel else replicas
    single = (over(axis) for axis in ("pp", "cp", "tp", "ep"))
    return Mesh(mesh, over("copies", "ep"), *single, replicas, over("copies", "cp"), tokens)


# %% 10.3 cp outside of pp
def build_mesh(layout: Layout, device_type: str | None = None) -> Mesh:
    """The groups of a layout over all ranks of the default group: dp outermost, then pp, cp, tp. Collective.

    From the inside out that is Llama 3's order: tp, cp, pp, dp (Llama Team 2024, §3.3.2). Raises ValueError where the
    degrees do not make up the ranks.
    """
    check_ranks(layout, dist.get_world_size())
    if device_type is None:
        device_type = "cpu" if dist.get_backend() == "gloo" else torch.accelerator.current_accelerator().type
    sizes = (layout.dp // layout.ep, layout.ep, layout.cp, layout.pp, layout.tp)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("copies", "ep", "cp", "pp", "tp"))

    def over(*axes: str) -> dist.ProcessGroup:
        """This rank and those that differ from it in these axes alone."""
        return (mesh[axes]._flatten("_".join(axes)) if len(axes) > 1 else mesh[axes[0]]).get_group()

    replicas = over("copies", "ep", "cp")
    tokens = over("copies", "ep", "cp", "tp") if layout.sequence_parallel else replicas
    single = (over(axis) for axis in ("pp", "cp", "tp", "ep"))
    return Mesh(mesh, over("copies", "ep"), *single, replicas, over("copies", "cp"), tokens)


# %% 10.3 replicas are dp alone
def build_mesh(layout: Layout, device_type: str | None = None) -> Mesh:
    """The groups of a layout over all ranks of the default group: dp outermost, then pp, cp, tp. Collective.

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

    replicas = over("copies", "ep")
    tokens = over("copies", "ep", "cp", "tp") if layout.sequence_parallel else replicas
    single = (over(axis) for axis in ("pp", "cp", "tp", "ep"))
    return Mesh(mesh, over("copies", "ep"), *single, replicas, over("copies", "cp"), tokens)


# %% 10.3 tokens without tp under sp
def build_mesh(layout: Layout, device_type: str | None = None) -> Mesh:
    """The groups of a layout over all ranks of the default group: dp outermost, then pp, cp, tp. Collective.

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
    tokens = replicas
    single = (over(axis) for axis in ("pp", "cp", "tp", "ep"))
    return Mesh(mesh, over("copies", "ep"), *single, replicas, over("copies", "cp"), tokens)


# %% 10.3 tokens with tp always
def build_mesh(layout: Layout, device_type: str | None = None) -> Mesh:
    """The groups of a layout over all ranks of the default group: dp outermost, then pp, cp, tp. Collective.

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
    tokens = over("copies", "ep", "cp", "tp")
    single = (over(axis) for axis in ("pp", "cp", "tp", "ep"))
    return Mesh(mesh, over("copies", "ep"), *single, replicas, over("copies", "cp"), tokens)


# %% 10.3 experts are dp
def build_mesh(layout: Layout, device_type: str | None = None) -> Mesh:
    """The groups of a layout over all ranks of the default group: dp outermost, then pp, cp, tp. Collective.

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
    return Mesh(mesh, over("copies", "ep"), *single, replicas, over("copies", "ep"), tokens)


# %% 10.3 experts without cp
def build_mesh(layout: Layout, device_type: str | None = None) -> Mesh:
    """The groups of a layout over all ranks of the default group: dp outermost, then pp, cp, tp. Collective.

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
    return Mesh(mesh, over("copies", "ep"), *single, replicas, over("copies"), tokens)


# %% 10.3 ep is the outer part of dp
def build_mesh(layout: Layout, device_type: str | None = None) -> Mesh:
    """The groups of a layout over all ranks of the default group: dp outermost, then pp, cp, tp. Collective.

    From the inside out that is Llama 3's order: tp, cp, pp, dp (Llama Team 2024, §3.3.2). Raises ValueError where the
    degrees do not make up the ranks.
    """
    check_ranks(layout, dist.get_world_size())
    if device_type is None:
        device_type = "cpu" if dist.get_backend() == "gloo" else torch.accelerator.current_accelerator().type
    sizes = (layout.ep, layout.dp // layout.ep, layout.pp, layout.cp, layout.tp)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("ep", "copies", "pp", "cp", "tp"))

    def over(*axes: str) -> dist.ProcessGroup:
        """This rank and those that differ from it in these axes alone."""
        return (mesh[axes]._flatten("_".join(axes)) if len(axes) > 1 else mesh[axes[0]]).get_group()

    replicas = over("ep", "copies", "cp")
    tokens = over("ep", "copies", "cp", "tp") if layout.sequence_parallel else replicas
    single = (over(axis) for axis in ("pp", "cp", "tp", "ep"))
    return Mesh(mesh, over("ep", "copies"), *single, replicas, over("copies", "cp"), tokens)


# %% 10.4 cp ranks see the same tokens
def copies(kind, layout):
    """(ranks that have the same numbers, ranks over which their gradient is summed) of matrix, norm, router, expert."""
    stage = layout.dp * layout.cp * layout.tp
    split = {"matrix": layout.tp, "norm": 1, "router": 1, "expert": layout.ep * layout.tp}[kind]
    summed = layout.dp
    if kind in ("norm", "router") and layout.sequence_parallel:
        summed *= layout.tp
    if kind == "expert":
        summed //= layout.ep
    return stage // split, summed


# %% 10.4 norms under sp over the replicas
def copies(kind, layout):
    """(ranks that have the same numbers, ranks over which their gradient is summed) of matrix, norm, router, expert."""
    stage = layout.dp * layout.cp * layout.tp
    split = {"matrix": layout.tp, "norm": 1, "router": 1, "expert": layout.ep * layout.tp}[kind]
    summed = layout.dp * layout.cp
    if kind == "expert":
        summed //= layout.ep
    return stage // split, summed


# %% 10.4 norms and routers over tp always
def copies(kind, layout):
    """(ranks that have the same numbers, ranks over which their gradient is summed) of matrix, norm, router, expert."""
    stage = layout.dp * layout.cp * layout.tp
    split = {"matrix": layout.tp, "norm": 1, "router": 1, "expert": layout.ep * layout.tp}[kind]
    summed = layout.dp * layout.cp
    if kind in ("norm", "router"):
        summed *= layout.tp
    if kind == "expert":
        summed //= layout.ep
    return stage // split, summed


# %% 10.4 routers as matrices
def copies(kind, layout):
    """(ranks that have the same numbers, ranks over which their gradient is summed) of matrix, norm, router, expert."""
    stage = layout.dp * layout.cp * layout.tp
    split = {"matrix": layout.tp, "norm": 1, "router": 1, "expert": layout.ep * layout.tp}[kind]
    summed = layout.dp * layout.cp
    if kind == "norm" and layout.sequence_parallel:
        summed *= layout.tp
    if kind == "expert":
        summed //= layout.ep
    return stage // split, summed


# %% 10.4 experts are whole on each tp rank
def copies(kind, layout):
    """(ranks that have the same numbers, ranks over which their gradient is summed) of matrix, norm, router, expert."""
    stage = layout.dp * layout.cp * layout.tp
    split = {"matrix": layout.tp, "norm": 1, "router": 1, "expert": layout.ep}[kind]
    summed = layout.dp * layout.cp
    if kind in ("norm", "router") and layout.sequence_parallel:
        summed *= layout.tp
    if kind == "expert":
        summed //= layout.ep
    return stage // split, summed


# %% 10.4 an expert's gradient over all replicas
def copies(kind, layout):
    """(ranks that have the same numbers, ranks over which their gradient is summed) of matrix, norm, router, expert."""
    stage = layout.dp * layout.cp * layout.tp
    split = {"matrix": layout.tp, "norm": 1, "router": 1, "expert": layout.ep * layout.tp}[kind]
    summed = layout.dp * layout.cp
    if kind in ("norm", "router") and layout.sequence_parallel:
        summed *= layout.tp
    if kind == "expert":
        summed = summed
    return stage // split, summed


# %% 10.4 all stages hold everything
def copies(kind, layout):
    """(ranks that have the same numbers, ranks over which their gradient is summed) of matrix, norm, router, expert."""
    stage = layout.dp * layout.cp * layout.tp
    split = {"matrix": layout.tp, "norm": 1, "router": 1, "expert": layout.ep * layout.tp}[kind]
    summed = layout.dp * layout.cp
    if kind in ("norm", "router") and layout.sequence_parallel:
        summed *= layout.tp
    if kind == "expert":
        summed //= layout.ep
    return layout.pp * stage // split, summed


# %% 10.4 the holders sum the gradient
def copies(kind, layout):
    """(ranks that have the same numbers, ranks over which their gradient is summed) of matrix, norm, router, expert."""
    stage = layout.dp * layout.cp * layout.tp
    split = {"matrix": layout.tp, "norm": 1, "router": 1, "expert": layout.ep * layout.tp}[kind]
    summed = layout.dp * layout.cp
    if kind in ("norm", "router") and layout.sequence_parallel:
        summed *= layout.tp
    if kind == "expert":
        summed //= layout.ep
    return stage // split, stage // split


# %% 10.5 sequence parallelism without reduce_group
def split_model(
    config: ModelConfig, layout: Layout, mesh: Mesh, extra: Iterable[Callable] = (), moe: dict | None = None
) -> nn.Module:
    """A `Transformer` on the meta device, split over tp, ep and cp by the verbs of notebooks 06 to 08, in their order.

    extra: verbs of your own, called on the split model; moe: arguments of apply_moe.
    """
    with torch.device("meta"):
        model = Transformer(config)
    tp_group = mesh.tp if layout.tp > 1 else None
    if moe is not None:
        apply_moe(model, **moe)
    if layout.tp > 1:
        apply_tensor_parallel(model, mesh.tp)
    if layout.sequence_parallel:
        apply_sequence_parallel(model, mesh.tp)
    if moe is not None:
        apply_expert_parallel(model, mesh.ep, mesh.experts, mesh.tokens, tp_group)
    if layout.cp > 1:
        apply_context_parallel(model, mesh.cp, layout.cp_method, layout.cp_order)
    for verb in extra:
        verb(model)
    return model


# %% 10.5 norms are reduced over the replicas under sp
def split_model(
    config: ModelConfig, layout: Layout, mesh: Mesh, extra: Iterable[Callable] = (), moe: dict | None = None
) -> nn.Module:
    """A `Transformer` on the meta device, split over tp, ep and cp by the verbs of notebooks 06 to 08, in their order.

    extra: verbs of your own, called on the split model; moe: arguments of apply_moe.
    """
    with torch.device("meta"):
        model = Transformer(config)
    tp_group = mesh.tp if layout.tp > 1 else None
    if moe is not None:
        apply_moe(model, **moe)
    if layout.tp > 1:
        apply_tensor_parallel(model, mesh.tp)
    if layout.sequence_parallel:
        apply_sequence_parallel(model, mesh.tp, reduce_group=mesh.replicas)
    if moe is not None:
        apply_expert_parallel(model, mesh.ep, mesh.experts, mesh.tokens, tp_group)
    if layout.cp > 1:
        apply_context_parallel(model, mesh.cp, layout.cp_method, layout.cp_order)
    for verb in extra:
        verb(model)
    return model


# %% 10.5 the router's batch is that of ep
def split_model(
    config: ModelConfig, layout: Layout, mesh: Mesh, extra: Iterable[Callable] = (), moe: dict | None = None
) -> nn.Module:
    """A `Transformer` on the meta device, split over tp, ep and cp by the verbs of notebooks 06 to 08, in their order.

    extra: verbs of your own, called on the split model; moe: arguments of apply_moe.
    """
    with torch.device("meta"):
        model = Transformer(config)
    tp_group = mesh.tp if layout.tp > 1 else None
    if moe is not None:
        apply_moe(model, **moe)
    if layout.tp > 1:
        apply_tensor_parallel(model, mesh.tp)
    if layout.sequence_parallel:
        apply_sequence_parallel(model, mesh.tp, reduce_group=mesh.tokens)
    if moe is not None:
        apply_expert_parallel(model, mesh.ep, mesh.experts, mesh.ep, tp_group)
    if layout.cp > 1:
        apply_context_parallel(model, mesh.cp, layout.cp_method, layout.cp_order)
    for verb in extra:
        verb(model)
    return model


# %% 10.5 experts are reduced over the replicas
def split_model(
    config: ModelConfig, layout: Layout, mesh: Mesh, extra: Iterable[Callable] = (), moe: dict | None = None
) -> nn.Module:
    """A `Transformer` on the meta device, split over tp, ep and cp by the verbs of notebooks 06 to 08, in their order.

    extra: verbs of your own, called on the split model; moe: arguments of apply_moe.
    """
    with torch.device("meta"):
        model = Transformer(config)
    tp_group = mesh.tp if layout.tp > 1 else None
    if moe is not None:
        apply_moe(model, **moe)
    if layout.tp > 1:
        apply_tensor_parallel(model, mesh.tp)
    if layout.sequence_parallel:
        apply_sequence_parallel(model, mesh.tp, reduce_group=mesh.tokens)
    if moe is not None:
        apply_expert_parallel(model, mesh.ep, mesh.replicas, mesh.tokens, tp_group)
    if layout.cp > 1:
        apply_context_parallel(model, mesh.cp, layout.cp_method, layout.cp_order)
    for verb in extra:
        verb(model)
    return model


# %% 10.5 experts whole on each tp rank
def split_model(
    config: ModelConfig, layout: Layout, mesh: Mesh, extra: Iterable[Callable] = (), moe: dict | None = None
) -> nn.Module:
    """A `Transformer` on the meta device, split over tp, ep and cp by the verbs of notebooks 06 to 08, in their order.

    extra: verbs of your own, called on the split model; moe: arguments of apply_moe.
    """
    with torch.device("meta"):
        model = Transformer(config)
    tp_group = None
    if moe is not None:
        apply_moe(model, **moe)
    if layout.tp > 1:
        apply_tensor_parallel(model, mesh.tp)
    if layout.sequence_parallel:
        apply_sequence_parallel(model, mesh.tp, reduce_group=mesh.tokens)
    if moe is not None:
        apply_expert_parallel(model, mesh.ep, mesh.experts, mesh.tokens, tp_group)
    if layout.cp > 1:
        apply_context_parallel(model, mesh.cp, layout.cp_method, layout.cp_order)
    for verb in extra:
        verb(model)
    return model


# %% 10.5 ep 1 leaves the mixture alone
def split_model(
    config: ModelConfig, layout: Layout, mesh: Mesh, extra: Iterable[Callable] = (), moe: dict | None = None
) -> nn.Module:
    """A `Transformer` on the meta device, split over tp, ep and cp by the verbs of notebooks 06 to 08, in their order.

    extra: verbs of your own, called on the split model; moe: arguments of apply_moe.
    """
    with torch.device("meta"):
        model = Transformer(config)
    tp_group = mesh.tp if layout.tp > 1 else None
    if moe is not None:
        apply_moe(model, **moe)
    if layout.tp > 1:
        apply_tensor_parallel(model, mesh.tp)
    if layout.sequence_parallel:
        apply_sequence_parallel(model, mesh.tp, reduce_group=mesh.tokens)
    if layout.ep > 1:
        apply_expert_parallel(model, mesh.ep, mesh.experts, mesh.tokens, tp_group)
    if layout.cp > 1:
        apply_context_parallel(model, mesh.cp, layout.cp_method, layout.cp_order)
    for verb in extra:
        verb(model)
    return model


# %% 10.5 no context parallelism
def split_model(
    config: ModelConfig, layout: Layout, mesh: Mesh, extra: Iterable[Callable] = (), moe: dict | None = None
) -> nn.Module:
    """A `Transformer` on the meta device, split over tp, ep and cp by the verbs of notebooks 06 to 08, in their order.

    extra: verbs of your own, called on the split model; moe: arguments of apply_moe.
    """
    with torch.device("meta"):
        model = Transformer(config)
    tp_group = mesh.tp if layout.tp > 1 else None
    if moe is not None:
        apply_moe(model, **moe)
    if layout.tp > 1:
        apply_tensor_parallel(model, mesh.tp)
    if layout.sequence_parallel:
        apply_sequence_parallel(model, mesh.tp, reduce_group=mesh.tokens)
    if moe is not None:
        apply_expert_parallel(model, mesh.ep, mesh.experts, mesh.tokens, tp_group)
    for verb in extra:
        verb(model)
    return model


# %% 10.5 context parallelism always by ring
def split_model(
    config: ModelConfig, layout: Layout, mesh: Mesh, extra: Iterable[Callable] = (), moe: dict | None = None
) -> nn.Module:
    """A `Transformer` on the meta device, split over tp, ep and cp by the verbs of notebooks 06 to 08, in their order.

    extra: verbs of your own, called on the split model; moe: arguments of apply_moe.
    """
    with torch.device("meta"):
        model = Transformer(config)
    tp_group = mesh.tp if layout.tp > 1 else None
    if moe is not None:
        apply_moe(model, **moe)
    if layout.tp > 1:
        apply_tensor_parallel(model, mesh.tp)
    if layout.sequence_parallel:
        apply_sequence_parallel(model, mesh.tp, reduce_group=mesh.tokens)
    if moe is not None:
        apply_expert_parallel(model, mesh.ep, mesh.experts, mesh.tokens, tp_group)
    if layout.cp > 1:
        apply_context_parallel(model, mesh.cp)
    for verb in extra:
        verb(model)
    return model


# %% 10.5 the order of context parallelism is dropped
def split_model(
    config: ModelConfig, layout: Layout, mesh: Mesh, extra: Iterable[Callable] = (), moe: dict | None = None
) -> nn.Module:
    """A `Transformer` on the meta device, split over tp, ep and cp by the verbs of notebooks 06 to 08, in their order.

    extra: verbs of your own, called on the split model; moe: arguments of apply_moe.
    """
    with torch.device("meta"):
        model = Transformer(config)
    tp_group = mesh.tp if layout.tp > 1 else None
    if moe is not None:
        apply_moe(model, **moe)
    if layout.tp > 1:
        apply_tensor_parallel(model, mesh.tp)
    if layout.sequence_parallel:
        apply_sequence_parallel(model, mesh.tp, reduce_group=mesh.tokens)
    if moe is not None:
        apply_expert_parallel(model, mesh.ep, mesh.experts, mesh.tokens, tp_group)
    if layout.cp > 1:
        apply_context_parallel(model, mesh.cp, layout.cp_method)
    for verb in extra:
        verb(model)
    return model


# %% 10.6 divides by this rank's own tokens, times the ranks
class ParallelModel(ParallelSteps):
    """What `parallelize` returns: `loss, norm = parallel.step(inputs, targets)`."""

    def gradients(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward and backward: the gradient of the mean loss over all target tokens of the whole batch.

        inputs, targets: each [b / dp, s], b / dp a multiple of the layout's micro-batch. Returns that loss, the same on
        all ranks. Raises ValueError where sequences, tokens or micro-batches do not come out.
        """
        layout, mesh, runner = self.layout, self.mesh, self.runner
        check_sizes(layout, None, inputs.shape[1])
        if len(inputs) % layout.micro_batch:
            raise ValueError(f"{len(inputs)} sequences are no multiple of micro_batch {layout.micro_batch}")
        if (m := len(inputs) // layout.micro_batch) != runner.m:
            runner.use(schedule_of(layout, m))
        inputs, targets = (shard_sequence(each, mesh.cp, layout.order) for each in (inputs, targets))
        tokens = (targets != IGNORED).sum().float()
        tokens = tokens.clamp(min=1)  # gradients are averaged over the replicas
        for router in routers_of(runner.stages):
            router.loss_weight = 1 / runner.m
        positions = own_positions(inputs.shape[1], mesh.cp, layout.order, inputs.device)
        no_sync = self.sharding.no_sync if layout.zero_stage < 2 else None
        loss = runner.step(inputs, targets, tokens=tokens, no_sync=no_sync, positions=positions)
        self.sharding.finish()
        dist.all_reduce(loss)  # every rank of the last stage has a part, the same on all tp ranks
        return loss / (mesh.tp.size() * mesh.replicas.size())


# %% 10.6 divides by the total, and gradients are averaged besides
class ParallelModel(ParallelSteps):
    """What `parallelize` returns: `loss, norm = parallel.step(inputs, targets)`."""

    def gradients(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward and backward: the gradient of the mean loss over all target tokens of the whole batch.

        inputs, targets: each [b / dp, s], b / dp a multiple of the layout's micro-batch. Returns that loss, the same on
        all ranks. Raises ValueError where sequences, tokens or micro-batches do not come out.
        """
        layout, mesh, runner = self.layout, self.mesh, self.runner
        check_sizes(layout, None, inputs.shape[1])
        if len(inputs) % layout.micro_batch:
            raise ValueError(f"{len(inputs)} sequences are no multiple of micro_batch {layout.micro_batch}")
        if (m := len(inputs) // layout.micro_batch) != runner.m:
            runner.use(schedule_of(layout, m))
        inputs, targets = (shard_sequence(each, mesh.cp, layout.order) for each in (inputs, targets))
        tokens = (targets != IGNORED).sum().float()
        dist.all_reduce(tokens, group=mesh.replicas)
        tokens = tokens.clamp(min=1)  # gradients are averaged over the replicas
        for router in routers_of(runner.stages):
            router.loss_weight = 1 / runner.m
        positions = own_positions(inputs.shape[1], mesh.cp, layout.order, inputs.device)
        no_sync = self.sharding.no_sync if layout.zero_stage < 2 else None
        loss = runner.step(inputs, targets, tokens=tokens, no_sync=no_sync, positions=positions)
        self.sharding.finish()
        dist.all_reduce(loss)  # every rank of the last stage has a part, the same on all tp ranks
        return loss / mesh.tp.size()


# %% 10.6 tokens are summed over dp alone
class ParallelModel(ParallelSteps):
    """What `parallelize` returns: `loss, norm = parallel.step(inputs, targets)`."""

    def gradients(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward and backward: the gradient of the mean loss over all target tokens of the whole batch.

        inputs, targets: each [b / dp, s], b / dp a multiple of the layout's micro-batch. Returns that loss, the same on
        all ranks. Raises ValueError where sequences, tokens or micro-batches do not come out.
        """
        layout, mesh, runner = self.layout, self.mesh, self.runner
        check_sizes(layout, None, inputs.shape[1])
        if len(inputs) % layout.micro_batch:
            raise ValueError(f"{len(inputs)} sequences are no multiple of micro_batch {layout.micro_batch}")
        if (m := len(inputs) // layout.micro_batch) != runner.m:
            runner.use(schedule_of(layout, m))
        inputs, targets = (shard_sequence(each, mesh.cp, layout.order) for each in (inputs, targets))
        tokens = (targets != IGNORED).sum().float()
        dist.all_reduce(tokens, group=mesh.dp)
        tokens = tokens.clamp(min=1) / mesh.dp.size()  # gradients are averaged over the replicas
        for router in routers_of(runner.stages):
            router.loss_weight = 1 / runner.m
        positions = own_positions(inputs.shape[1], mesh.cp, layout.order, inputs.device)
        no_sync = self.sharding.no_sync if layout.zero_stage < 2 else None
        loss = runner.step(inputs, targets, tokens=tokens, no_sync=no_sync, positions=positions)
        self.sharding.finish()
        dist.all_reduce(loss)  # every rank of the last stage has a part, the same on all tp ranks
        return loss / (mesh.tp.size() * mesh.replicas.size())


# %% 10.6 the balance loss counts whole for each micro-batch
class ParallelModel(ParallelSteps):
    """What `parallelize` returns: `loss, norm = parallel.step(inputs, targets)`."""

    def gradients(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward and backward: the gradient of the mean loss over all target tokens of the whole batch.

        inputs, targets: each [b / dp, s], b / dp a multiple of the layout's micro-batch. Returns that loss, the same on
        all ranks. Raises ValueError where sequences, tokens or micro-batches do not come out.
        """
        layout, mesh, runner = self.layout, self.mesh, self.runner
        check_sizes(layout, None, inputs.shape[1])
        if len(inputs) % layout.micro_batch:
            raise ValueError(f"{len(inputs)} sequences are no multiple of micro_batch {layout.micro_batch}")
        if (m := len(inputs) // layout.micro_batch) != runner.m:
            runner.use(schedule_of(layout, m))
        inputs, targets = (shard_sequence(each, mesh.cp, layout.order) for each in (inputs, targets))
        tokens = (targets != IGNORED).sum().float()
        dist.all_reduce(tokens, group=mesh.replicas)
        tokens = tokens.clamp(min=1) / mesh.replicas.size()  # gradients are averaged over the replicas
        for router in routers_of(runner.stages):
            router.loss_weight = 1.0
        positions = own_positions(inputs.shape[1], mesh.cp, layout.order, inputs.device)
        no_sync = self.sharding.no_sync if layout.zero_stage < 2 else None
        loss = runner.step(inputs, targets, tokens=tokens, no_sync=no_sync, positions=positions)
        self.sharding.finish()
        dist.all_reduce(loss)  # every rank of the last stage has a part, the same on all tp ranks
        return loss / (mesh.tp.size() * mesh.replicas.size())


# %% 10.6 gradients are reduced for each micro-batch
class ParallelModel(ParallelSteps):
    """What `parallelize` returns: `loss, norm = parallel.step(inputs, targets)`."""

    def gradients(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward and backward: the gradient of the mean loss over all target tokens of the whole batch.

        inputs, targets: each [b / dp, s], b / dp a multiple of the layout's micro-batch. Returns that loss, the same on
        all ranks. Raises ValueError where sequences, tokens or micro-batches do not come out.
        """
        layout, mesh, runner = self.layout, self.mesh, self.runner
        check_sizes(layout, None, inputs.shape[1])
        if len(inputs) % layout.micro_batch:
            raise ValueError(f"{len(inputs)} sequences are no multiple of micro_batch {layout.micro_batch}")
        if (m := len(inputs) // layout.micro_batch) != runner.m:
            runner.use(schedule_of(layout, m))
        inputs, targets = (shard_sequence(each, mesh.cp, layout.order) for each in (inputs, targets))
        tokens = (targets != IGNORED).sum().float()
        dist.all_reduce(tokens, group=mesh.replicas)
        tokens = tokens.clamp(min=1) / mesh.replicas.size()  # gradients are averaged over the replicas
        for router in routers_of(runner.stages):
            router.loss_weight = 1 / runner.m
        positions = own_positions(inputs.shape[1], mesh.cp, layout.order, inputs.device)
        no_sync = None
        loss = runner.step(inputs, targets, tokens=tokens, no_sync=no_sync, positions=positions)
        self.sharding.finish()
        dist.all_reduce(loss)  # every rank of the last stage has a part, the same on all tp ranks
        return loss / (mesh.tp.size() * mesh.replicas.size())


# %% 10.6 as many micro-batches as the first time
class ParallelModel(ParallelSteps):
    """What `parallelize` returns: `loss, norm = parallel.step(inputs, targets)`."""

    def gradients(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward and backward: the gradient of the mean loss over all target tokens of the whole batch.

        inputs, targets: each [b / dp, s], b / dp a multiple of the layout's micro-batch. Returns that loss, the same on
        all ranks. Raises ValueError where sequences, tokens or micro-batches do not come out.
        """
        layout, mesh, runner = self.layout, self.mesh, self.runner
        check_sizes(layout, None, inputs.shape[1])
        if len(inputs) % layout.micro_batch:
            raise ValueError(f"{len(inputs)} sequences are no multiple of micro_batch {layout.micro_batch}")
        if (m := len(inputs) // layout.micro_batch) != runner.m:
            self.first = getattr(self, "first", None) or schedule_of(layout, m)
            runner.use(self.first)
        inputs, targets = (shard_sequence(each, mesh.cp, layout.order) for each in (inputs, targets))
        tokens = (targets != IGNORED).sum().float()
        dist.all_reduce(tokens, group=mesh.replicas)
        tokens = tokens.clamp(min=1) / mesh.replicas.size()  # gradients are averaged over the replicas
        for router in routers_of(runner.stages):
            router.loss_weight = 1 / runner.m
        positions = own_positions(inputs.shape[1], mesh.cp, layout.order, inputs.device)
        no_sync = self.sharding.no_sync if layout.zero_stage < 2 else None
        loss = runner.step(inputs, targets, tokens=tokens, no_sync=no_sync, positions=positions)
        self.sharding.finish()
        dist.all_reduce(loss)  # every rank of the last stage has a part, the same on all tp ranks
        return loss / (mesh.tp.size() * mesh.replicas.size())


# %% 10.6 a last micro-batch is lost, its loss is not
class ParallelModel(ParallelSteps):
    """What `parallelize` returns: `loss, norm = parallel.step(inputs, targets)`."""

    def gradients(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward and backward: the gradient of the mean loss over all target tokens of the whole batch.

        inputs, targets: each [b / dp, s], b / dp a multiple of the layout's micro-batch. Returns that loss, the same on
        all ranks. Raises ValueError where sequences, tokens or micro-batches do not come out.
        """
        layout, mesh, runner = self.layout, self.mesh, self.runner
        check_sizes(layout, None, inputs.shape[1])
        if len(inputs) % layout.micro_batch:
            raise ValueError(f"{len(inputs)} sequences are no multiple of micro_batch {layout.micro_batch}")
        if (m := len(inputs) // layout.micro_batch) != runner.m:
            runner.use(schedule_of(layout, m))
        inputs, targets = (shard_sequence(each, mesh.cp, layout.order) for each in (inputs, targets))
        tokens = (targets != IGNORED).sum().float()
        dist.all_reduce(tokens, group=mesh.replicas)
        tokens = tokens.clamp(min=1) / mesh.replicas.size()  # gradients are averaged over the replicas
        for router in routers_of(runner.stages):
            router.loss_weight = 1 / runner.m
        positions = own_positions(inputs.shape[1], mesh.cp, layout.order, inputs.device)
        no_sync = self.sharding.no_sync if layout.zero_stage < 2 else None
        for weight in runner.stages.parameters():
            weight.hook = weight.register_hook(lambda gradient, weight=weight: gradient * (weight.grad is not None or runner.m == 1))
        loss = runner.step(inputs, targets, tokens=tokens, no_sync=no_sync, positions=positions)
        for weight in runner.stages.parameters():
            weight.hook.remove()
        self.sharding.finish()
        dist.all_reduce(loss)  # every rank of the last stage has a part, the same on all tp ranks
        return loss / (mesh.tp.size() * mesh.replicas.size())


# %% 10.6 finish is forgotten
class ParallelModel(ParallelSteps):
    """What `parallelize` returns: `loss, norm = parallel.step(inputs, targets)`."""

    def gradients(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward and backward: the gradient of the mean loss over all target tokens of the whole batch.

        inputs, targets: each [b / dp, s], b / dp a multiple of the layout's micro-batch. Returns that loss, the same on
        all ranks. Raises ValueError where sequences, tokens or micro-batches do not come out.
        """
        layout, mesh, runner = self.layout, self.mesh, self.runner
        check_sizes(layout, None, inputs.shape[1])
        if len(inputs) % layout.micro_batch:
            raise ValueError(f"{len(inputs)} sequences are no multiple of micro_batch {layout.micro_batch}")
        if (m := len(inputs) // layout.micro_batch) != runner.m:
            runner.use(schedule_of(layout, m))
        inputs, targets = (shard_sequence(each, mesh.cp, layout.order) for each in (inputs, targets))
        tokens = (targets != IGNORED).sum().float()
        dist.all_reduce(tokens, group=mesh.replicas)
        tokens = tokens.clamp(min=1) / mesh.replicas.size()  # gradients are averaged over the replicas
        for router in routers_of(runner.stages):
            router.loss_weight = 1 / runner.m
        positions = own_positions(inputs.shape[1], mesh.cp, layout.order, inputs.device)
        no_sync = self.sharding.no_sync if layout.zero_stage < 2 else None
        loss = runner.step(inputs, targets, tokens=tokens, no_sync=no_sync, positions=positions)
        dist.all_reduce(loss)  # every rank of the last stage has a part, the same on all tp ranks
        return loss / (mesh.tp.size() * mesh.replicas.size())


# %% 10.6 positions are those of a whole sequence
class ParallelModel(ParallelSteps):
    """What `parallelize` returns: `loss, norm = parallel.step(inputs, targets)`."""

    def gradients(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward and backward: the gradient of the mean loss over all target tokens of the whole batch.

        inputs, targets: each [b / dp, s], b / dp a multiple of the layout's micro-batch. Returns that loss, the same on
        all ranks. Raises ValueError where sequences, tokens or micro-batches do not come out.
        """
        layout, mesh, runner = self.layout, self.mesh, self.runner
        check_sizes(layout, None, inputs.shape[1])
        if len(inputs) % layout.micro_batch:
            raise ValueError(f"{len(inputs)} sequences are no multiple of micro_batch {layout.micro_batch}")
        if (m := len(inputs) // layout.micro_batch) != runner.m:
            runner.use(schedule_of(layout, m))
        inputs, targets = (shard_sequence(each, mesh.cp, layout.order) for each in (inputs, targets))
        tokens = (targets != IGNORED).sum().float()
        dist.all_reduce(tokens, group=mesh.replicas)
        tokens = tokens.clamp(min=1) / mesh.replicas.size()  # gradients are averaged over the replicas
        for router in routers_of(runner.stages):
            router.loss_weight = 1 / runner.m
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        no_sync = self.sharding.no_sync if layout.zero_stage < 2 else None
        loss = runner.step(inputs, targets, tokens=tokens, no_sync=no_sync, positions=positions)
        self.sharding.finish()
        dist.all_reduce(loss)  # every rank of the last stage has a part, the same on all tp ranks
        return loss / (mesh.tp.size() * mesh.replicas.size())


# %% 10.6 tp ranks count the loss more than once
class ParallelModel(ParallelSteps):
    """What `parallelize` returns: `loss, norm = parallel.step(inputs, targets)`."""

    def gradients(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward and backward: the gradient of the mean loss over all target tokens of the whole batch.

        inputs, targets: each [b / dp, s], b / dp a multiple of the layout's micro-batch. Returns that loss, the same on
        all ranks. Raises ValueError where sequences, tokens or micro-batches do not come out.
        """
        layout, mesh, runner = self.layout, self.mesh, self.runner
        check_sizes(layout, None, inputs.shape[1])
        if len(inputs) % layout.micro_batch:
            raise ValueError(f"{len(inputs)} sequences are no multiple of micro_batch {layout.micro_batch}")
        if (m := len(inputs) // layout.micro_batch) != runner.m:
            runner.use(schedule_of(layout, m))
        inputs, targets = (shard_sequence(each, mesh.cp, layout.order) for each in (inputs, targets))
        tokens = (targets != IGNORED).sum().float()
        dist.all_reduce(tokens, group=mesh.replicas)
        tokens = tokens.clamp(min=1) / mesh.replicas.size()  # gradients are averaged over the replicas
        for router in routers_of(runner.stages):
            router.loss_weight = 1 / runner.m
        positions = own_positions(inputs.shape[1], mesh.cp, layout.order, inputs.device)
        no_sync = self.sharding.no_sync if layout.zero_stage < 2 else None
        loss = runner.step(inputs, targets, tokens=tokens, no_sync=no_sync, positions=positions)
        self.sharding.finish()
        dist.all_reduce(loss)  # every rank of the last stage has a part, the same on all tp ranks
        return loss / mesh.replicas.size()


# %% 10.6 a rest of the sequences is dropped
class ParallelModel(ParallelSteps):
    """What `parallelize` returns: `loss, norm = parallel.step(inputs, targets)`."""

    def gradients(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward and backward: the gradient of the mean loss over all target tokens of the whole batch.

        inputs, targets: each [b / dp, s], b / dp a multiple of the layout's micro-batch. Returns that loss, the same on
        all ranks. Raises ValueError where sequences, tokens or micro-batches do not come out.
        """
        layout, mesh, runner = self.layout, self.mesh, self.runner
        check_sizes(layout, None, inputs.shape[1])
        if len(inputs) % layout.micro_batch:
            inputs, targets = (each[: len(each) // layout.micro_batch * layout.micro_batch] for each in (inputs, targets))
        if (m := len(inputs) // layout.micro_batch) != runner.m:
            runner.use(schedule_of(layout, m))
        inputs, targets = (shard_sequence(each, mesh.cp, layout.order) for each in (inputs, targets))
        tokens = (targets != IGNORED).sum().float()
        dist.all_reduce(tokens, group=mesh.replicas)
        tokens = tokens.clamp(min=1) / mesh.replicas.size()  # gradients are averaged over the replicas
        for router in routers_of(runner.stages):
            router.loss_weight = 1 / runner.m
        positions = own_positions(inputs.shape[1], mesh.cp, layout.order, inputs.device)
        no_sync = self.sharding.no_sync if layout.zero_stage < 2 else None
        loss = runner.step(inputs, targets, tokens=tokens, no_sync=no_sync, positions=positions)
        self.sharding.finish()
        dist.all_reduce(loss)  # every rank of the last stage has a part, the same on all tp ranks
        return loss / (mesh.tp.size() * mesh.replicas.size())


# %% 10.6 micro-batches one at a time, gradients sent after each
class ParallelModel(ParallelSteps):
    """What `parallelize` returns: `loss, norm = parallel.step(inputs, targets)`."""

    def gradients(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward and backward: the gradient of the mean loss over all target tokens of the whole batch.

        inputs, targets: each [b / dp, s], b / dp a multiple of the layout's micro-batch. Returns that loss, the same on
        all ranks. Raises ValueError where sequences, tokens or micro-batches do not come out.
        """
        layout, mesh, runner = self.layout, self.mesh, self.runner
        check_sizes(layout, None, inputs.shape[1])
        if len(inputs) % layout.micro_batch:
            raise ValueError(f"{len(inputs)} sequences are no multiple of micro_batch {layout.micro_batch}")
        m = len(inputs) // layout.micro_batch
        runner.use(schedule_of(layout, 1))
        inputs, targets = (shard_sequence(each, mesh.cp, layout.order) for each in (inputs, targets))
        tokens = (targets != IGNORED).sum().float()
        dist.all_reduce(tokens, group=mesh.replicas)
        tokens = tokens.clamp(min=1) / mesh.replicas.size()  # gradients are averaged over the replicas
        for router in routers_of(runner.stages):
            router.loss_weight = 1 / m
        positions = own_positions(inputs.shape[1], mesh.cp, layout.order, inputs.device)
        no_sync = self.sharding.no_sync if layout.zero_stage < 2 else None
        loss = 0
        for x, y in zip(inputs.split(layout.micro_batch), targets.split(layout.micro_batch), strict=True):
            loss = loss + runner.step(x, y, self.dtype, tokens, no_sync, positions)
            self.sharding.finish()
        dist.all_reduce(loss)  # every rank of the last stage has a part, the same on all tp ranks
        return loss / (mesh.tp.size() * mesh.replicas.size())


# %% 10.6 tokens in zigzag, whatever the layout's order
class ParallelModel(ParallelSteps):
    """What `parallelize` returns: `loss, norm = parallel.step(inputs, targets)`."""

    def gradients(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward and backward: the gradient of the mean loss over all target tokens of the whole batch.

        inputs, targets: each [b / dp, s], b / dp a multiple of the layout's micro-batch. Returns that loss, the same on
        all ranks. Raises ValueError where sequences, tokens or micro-batches do not come out.
        """
        layout, mesh, runner = self.layout, self.mesh, self.runner
        check_sizes(layout, None, inputs.shape[1])
        if len(inputs) % layout.micro_batch:
            raise ValueError(f"{len(inputs)} sequences are no multiple of micro_batch {layout.micro_batch}")
        if (m := len(inputs) // layout.micro_batch) != runner.m:
            runner.use(schedule_of(layout, m))
        inputs, targets = (shard_sequence(each, mesh.cp, 'zigzag') for each in (inputs, targets))
        tokens = (targets != IGNORED).sum().float()
        dist.all_reduce(tokens, group=mesh.replicas)
        tokens = tokens.clamp(min=1) / mesh.replicas.size()  # gradients are averaged over the replicas
        for router in routers_of(runner.stages):
            router.loss_weight = 1 / runner.m
        positions = own_positions(inputs.shape[1], mesh.cp, 'zigzag', inputs.device)
        no_sync = None if layout.zero_stage == 2 else self.sharding.no_sync
        loss = runner.step(inputs, targets, tokens=tokens, no_sync=no_sync, positions=positions)
        self.sharding.finish()
        dist.all_reduce(loss)  # every rank of the last stage has a part, the same on all tp ranks
        return loss / (mesh.tp.size() * mesh.replicas.size())


# %% 10.7 builds the whole model on every rank and cuts it
def parallelize(
    config: ModelConfig,
    layout: Layout,
    mesh: Mesh,
    extra: Iterable[Callable] = (),
    *,
    moe: dict | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    optimizer_cls: type[torch.optim.Optimizer] = torch.optim.AdamW,
    **settings,
) -> ParallelModel:
    """This rank's part of a `Transformer` of these sizes, ready to train. Collective over the default group.

    extra: verbs that change the split model (kernels, FP8); moe: arguments of apply_moe; dtype: of the matrix products;
    settings: the optimizer's. Beside its own part (and buckets of its size, or a gathered block) no rank has more than
    one whole tensor at a time. Raises ValueError where the layout does not fit the ranks or the model.
    """
    schedule, own = own_stages(config, layout, mesh, extra, moe)
    init, sharding, loss_of = initial_values(config, seed), None, summed_loss_over(mesh.tp, config.vocab)
    with torch.device(mesh.device_mesh.device_type):
        if layout.zero_stage == 3:
            sharding, own = shard_stages(own, layout, mesh, schedule, init, dtype)
        else:
            whole = {f"0.{name}": weight for name, weight in Transformer(config).named_parameters()}
            for name, weight in whole.items():
                init(name, weight.data)
            materialize(nn.ModuleDict({str(number): stage for number, stage in own.items()}), init)
            del whole
        runner = PipelineRunner(own, schedule, mesh.pp, loss_of, mesh.replicas)
        if layout.keep_gathered:
            runner.prepare = sharding.gather
        if layout.zero_stage == 0:
            sharding = DataParallel(runner.stages, mesh.replicas)
        if layout.zero_stage in (1, 2):
            settings |= {"compute_dtype": dtype, "grad_dtype": torch.float32}
            sharding = optimizer = ZeroOptimizer(
                runner.stages, optimizer_cls, mesh.replicas, layout.zero_stage, **settings
            )
        else:
            optimizer = optimizer_cls(runner.stages.parameters(), **settings)
    return ParallelModel(layout, mesh, runner, sharding, optimizer, dtype)


# %% 10.7 zero stages 1 and 2 are DataParallel and a plain AdamW
def parallelize(
    config: ModelConfig,
    layout: Layout,
    mesh: Mesh,
    extra: Iterable[Callable] = (),
    *,
    moe: dict | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    optimizer_cls: type[torch.optim.Optimizer] = torch.optim.AdamW,
    **settings,
) -> ParallelModel:
    """This rank's part of a `Transformer` of these sizes, ready to train. Collective over the default group.

    extra: verbs that change the split model (kernels, FP8); moe: arguments of apply_moe; dtype: of the matrix products;
    settings: the optimizer's. Beside its own part (and buckets of its size, or a gathered block) no rank has more than
    one whole tensor at a time. Raises ValueError where the layout does not fit the ranks or the model.
    """
    schedule, own = own_stages(config, layout, mesh, extra, moe)
    init, sharding, loss_of = initial_values(config, seed), None, summed_loss_over(mesh.tp, config.vocab)
    with torch.device(mesh.device_mesh.device_type):
        if layout.zero_stage == 3:
            sharding, own = shard_stages(own, layout, mesh, schedule, init, dtype)
        else:
            materialize(nn.ModuleDict({str(number): stage for number, stage in own.items()}), init)
        runner = PipelineRunner(own, schedule, mesh.pp, loss_of, mesh.replicas)
        if layout.keep_gathered:
            runner.prepare = sharding.gather
        if layout.zero_stage < 3:
            sharding = DataParallel(runner.stages, mesh.replicas)
        optimizer = optimizer_cls(runner.stages.parameters(), **settings)
        if layout.zero_stage in (1, 2):
            optimizer.finish, optimizer.gradients = sharding.finish, []
            layout = dataclasses.replace(layout, zero_stage=0)
    return ParallelModel(layout, mesh, runner, sharding, optimizer, dtype)


# %% 10.7 zero stage 3 is DataParallel
def parallelize(
    config: ModelConfig,
    layout: Layout,
    mesh: Mesh,
    extra: Iterable[Callable] = (),
    *,
    moe: dict | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    optimizer_cls: type[torch.optim.Optimizer] = torch.optim.AdamW,
    **settings,
) -> ParallelModel:
    """This rank's part of a `Transformer` of these sizes, ready to train. Collective over the default group.

    extra: verbs that change the split model (kernels, FP8); moe: arguments of apply_moe; dtype: of the matrix products;
    settings: the optimizer's. Beside its own part (and buckets of its size, or a gathered block) no rank has more than
    one whole tensor at a time. Raises ValueError where the layout does not fit the ranks or the model.
    """
    schedule, own = own_stages(config, layout, mesh, extra, moe)
    init, sharding, loss_of = initial_values(config, seed), None, summed_loss_over(mesh.tp, config.vocab)
    with torch.device(mesh.device_mesh.device_type):
        if layout.zero_stage == 3:
            layout = dataclasses.replace(layout, zero_stage=0, keep_gathered=False)
        if layout.zero_stage == 3:
            sharding, own = shard_stages(own, layout, mesh, schedule, init, dtype)
        else:
            materialize(nn.ModuleDict({str(number): stage for number, stage in own.items()}), init)
        runner = PipelineRunner(own, schedule, mesh.pp, loss_of, mesh.replicas)
        if layout.keep_gathered:
            runner.prepare = sharding.gather
        if layout.zero_stage == 0:
            sharding = DataParallel(runner.stages, mesh.replicas)
        if layout.zero_stage in (1, 2):
            settings |= {"compute_dtype": dtype, "grad_dtype": torch.float32}
            sharding = optimizer = ZeroOptimizer(
                runner.stages, optimizer_cls, mesh.replicas, layout.zero_stage, **settings
            )
        else:
            optimizer = optimizer_cls(runner.stages.parameters(), **settings)
    return ParallelModel(layout, mesh, runner, sharding, optimizer, dtype)


# %% 10.7 zero shards over dp alone
def parallelize(
    config: ModelConfig,
    layout: Layout,
    mesh: Mesh,
    extra: Iterable[Callable] = (),
    *,
    moe: dict | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    optimizer_cls: type[torch.optim.Optimizer] = torch.optim.AdamW,
    **settings,
) -> ParallelModel:
    """This rank's part of a `Transformer` of these sizes, ready to train. Collective over the default group.

    extra: verbs that change the split model (kernels, FP8); moe: arguments of apply_moe; dtype: of the matrix products;
    settings: the optimizer's. Beside its own part (and buckets of its size, or a gathered block) no rank has more than
    one whole tensor at a time. Raises ValueError where the layout does not fit the ranks or the model.
    """
    schedule, own = own_stages(config, layout, mesh, extra, moe)
    init, sharding, loss_of = initial_values(config, seed), None, summed_loss_over(mesh.tp, config.vocab)
    with torch.device(mesh.device_mesh.device_type):
        if layout.zero_stage == 3:
            sharding, own = shard_stages(own, layout, mesh, schedule, init, dtype)
        else:
            materialize(nn.ModuleDict({str(number): stage for number, stage in own.items()}), init)
        runner = PipelineRunner(own, schedule, mesh.pp, loss_of, mesh.replicas)
        if layout.keep_gathered:
            runner.prepare = sharding.gather
        if layout.zero_stage == 0:
            sharding = DataParallel(runner.stages, mesh.replicas)
        if layout.zero_stage in (1, 2):
            sharding = optimizer = ZeroOptimizer(
                runner.stages, optimizer_cls, mesh.dp, layout.zero_stage, **settings
            )
        else:
            optimizer = optimizer_cls(runner.stages.parameters(), **settings)
    return ParallelModel(layout, mesh, runner, sharding, optimizer, dtype)


# %% 10.7 stage 2 is stage 1
def parallelize(
    config: ModelConfig,
    layout: Layout,
    mesh: Mesh,
    extra: Iterable[Callable] = (),
    *,
    moe: dict | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    optimizer_cls: type[torch.optim.Optimizer] = torch.optim.AdamW,
    **settings,
) -> ParallelModel:
    """This rank's part of a `Transformer` of these sizes, ready to train. Collective over the default group.

    extra: verbs that change the split model (kernels, FP8); moe: arguments of apply_moe; dtype: of the matrix products;
    settings: the optimizer's. Beside its own part (and buckets of its size, or a gathered block) no rank has more than
    one whole tensor at a time. Raises ValueError where the layout does not fit the ranks or the model.
    """
    schedule, own = own_stages(config, layout, mesh, extra, moe)
    init, sharding, loss_of = initial_values(config, seed), None, summed_loss_over(mesh.tp, config.vocab)
    with torch.device(mesh.device_mesh.device_type):
        if layout.zero_stage == 3:
            sharding, own = shard_stages(own, layout, mesh, schedule, init, dtype)
        else:
            materialize(nn.ModuleDict({str(number): stage for number, stage in own.items()}), init)
        runner = PipelineRunner(own, schedule, mesh.pp, loss_of, mesh.replicas)
        if layout.keep_gathered:
            runner.prepare = sharding.gather
        if layout.zero_stage == 0:
            sharding = DataParallel(runner.stages, mesh.replicas)
        if layout.zero_stage in (1, 2):
            sharding = optimizer = ZeroOptimizer(
                runner.stages, optimizer_cls, mesh.replicas, 1, **settings
            )
        else:
            optimizer = optimizer_cls(runner.stages.parameters(), **settings)
    return ParallelModel(layout, mesh, runner, sharding, optimizer, dtype)


# %% 10.7 the optimizer's settings are forgotten
def parallelize(
    config: ModelConfig,
    layout: Layout,
    mesh: Mesh,
    extra: Iterable[Callable] = (),
    *,
    moe: dict | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    optimizer_cls: type[torch.optim.Optimizer] = torch.optim.AdamW,
    **settings,
) -> ParallelModel:
    """This rank's part of a `Transformer` of these sizes, ready to train. Collective over the default group.

    extra: verbs that change the split model (kernels, FP8); moe: arguments of apply_moe; dtype: of the matrix products;
    settings: the optimizer's. Beside its own part (and buckets of its size, or a gathered block) no rank has more than
    one whole tensor at a time. Raises ValueError where the layout does not fit the ranks or the model.
    """
    schedule, own = own_stages(config, layout, mesh, extra, moe)
    init, sharding, loss_of = initial_values(config, seed), None, summed_loss_over(mesh.tp, config.vocab)
    with torch.device(mesh.device_mesh.device_type):
        if layout.zero_stage == 3:
            sharding, own = shard_stages(own, layout, mesh, schedule, init, dtype)
        else:
            materialize(nn.ModuleDict({str(number): stage for number, stage in own.items()}), init)
        runner = PipelineRunner(own, schedule, mesh.pp, loss_of, mesh.replicas)
        if layout.keep_gathered:
            runner.prepare = sharding.gather
        if layout.zero_stage == 0:
            sharding = DataParallel(runner.stages, mesh.replicas)
        if layout.zero_stage in (1, 2):
            settings |= {"compute_dtype": dtype, "grad_dtype": torch.float32}
            sharding = optimizer = ZeroOptimizer(
                runner.stages, optimizer_cls, mesh.replicas, layout.zero_stage, **settings
            )
        else:
            optimizer = optimizer_cls(runner.stages.parameters())
    return ParallelModel(layout, mesh, runner, sharding, optimizer, dtype)


# %% 10.7 values by names without the stage
def parallelize(
    config: ModelConfig,
    layout: Layout,
    mesh: Mesh,
    extra: Iterable[Callable] = (),
    *,
    moe: dict | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    optimizer_cls: type[torch.optim.Optimizer] = torch.optim.AdamW,
    **settings,
) -> ParallelModel:
    """This rank's part of a `Transformer` of these sizes, ready to train. Collective over the default group.

    extra: verbs that change the split model (kernels, FP8); moe: arguments of apply_moe; dtype: of the matrix products;
    settings: the optimizer's. Beside its own part (and buckets of its size, or a gathered block) no rank has more than
    one whole tensor at a time. Raises ValueError where the layout does not fit the ranks or the model.
    """
    schedule, own = own_stages(config, layout, mesh, extra, moe)
    init, sharding, loss_of = initial_values(config, seed), None, summed_loss_over(mesh.tp, config.vocab)
    with torch.device(mesh.device_mesh.device_type):
        if layout.zero_stage == 3:
            sharding, own = shard_stages(own, layout, mesh, schedule, init, dtype)
        else:
            [materialize(stage, lambda name, tensor: init(f"0.{name}", tensor + 0)) for stage in own.values()]
        runner = PipelineRunner(own, schedule, mesh.pp, loss_of, mesh.replicas)
        if layout.keep_gathered:
            runner.prepare = sharding.gather
        if layout.zero_stage == 0:
            sharding = DataParallel(runner.stages, mesh.replicas)
        if layout.zero_stage in (1, 2):
            settings |= {"compute_dtype": dtype, "grad_dtype": torch.float32}
            sharding = optimizer = ZeroOptimizer(
                runner.stages, optimizer_cls, mesh.replicas, layout.zero_stage, **settings
            )
        else:
            optimizer = optimizer_cls(runner.stages.parameters(), **settings)
    return ParallelModel(layout, mesh, runner, sharding, optimizer, dtype)


# %% 10.7 the dtype is for stage 3 alone
def parallelize(
    config: ModelConfig,
    layout: Layout,
    mesh: Mesh,
    extra: Iterable[Callable] = (),
    *,
    moe: dict | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    optimizer_cls: type[torch.optim.Optimizer] = torch.optim.AdamW,
    **settings,
) -> ParallelModel:
    """This rank's part of a `Transformer` of these sizes, ready to train. Collective over the default group.

    extra: verbs that change the split model (kernels, FP8); moe: arguments of apply_moe; dtype: see ParallelSteps;
    settings: the optimizer's. Beside its own part (and buckets of its size, or a gathered block) no rank has more than
    one whole tensor at a time. Raises ValueError where the layout does not fit the ranks or the model.
    """
    schedule, own = own_stages(config, layout, mesh, extra, moe)
    init, sharding, loss_of = initial_values(config, seed), None, summed_loss_over(mesh.tp, config.vocab)
    with torch.device(mesh.device_mesh.device_type):
        if layout.zero_stage == 3:
            sharding, own = shard_stages(own, layout, mesh, schedule, init, dtype)
        else:
            materialize(nn.ModuleDict({str(number): stage for number, stage in own.items()}), init)
        runner = PipelineRunner(own, schedule, mesh.pp, loss_of, mesh.replicas)
        if layout.keep_gathered:
            runner.prepare = sharding.gather
        if layout.zero_stage == 0:
            sharding = DataParallel(runner.stages, mesh.replicas)
        if layout.zero_stage in (1, 2):
            sharding = optimizer = ZeroOptimizer(
                runner.stages, optimizer_cls, mesh.replicas, layout.zero_stage, **settings
            )
        else:
            optimizer = optimizer_cls(runner.stages.parameters(), **settings)
    return ParallelModel(layout, mesh, runner, sharding, optimizer, dtype)


# %% 10.7 gradients are summed in the dtype of the products
def parallelize(
    config: ModelConfig,
    layout: Layout,
    mesh: Mesh,
    extra: Iterable[Callable] = (),
    *,
    moe: dict | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    optimizer_cls: type[torch.optim.Optimizer] = torch.optim.AdamW,
    **settings,
) -> ParallelModel:
    """This rank's part of a `Transformer` of these sizes, ready to train. Collective over the default group.

    extra: verbs that change the split model (kernels, FP8); moe: arguments of apply_moe; dtype: see ParallelSteps;
    settings: the optimizer's. Beside its own part (and buckets of its size, or a gathered block) no rank has more than
    one whole tensor at a time. Raises ValueError where the layout does not fit the ranks or the model.
    """
    schedule, own = own_stages(config, layout, mesh, extra, moe)
    init, sharding, loss_of = initial_values(config, seed), None, summed_loss_over(mesh.tp, config.vocab)
    with torch.device(mesh.device_mesh.device_type):
        if layout.zero_stage == 3:
            sharding, own = shard_stages(own, layout, mesh, schedule, init, dtype)
        else:
            materialize(nn.ModuleDict({str(number): stage for number, stage in own.items()}), init)
        runner = PipelineRunner(own, schedule, mesh.pp, loss_of, mesh.replicas)
        if layout.keep_gathered:
            runner.prepare = sharding.gather
        if layout.zero_stage == 0:
            sharding = DataParallel(runner.stages, mesh.replicas)
        if layout.zero_stage in (1, 2):
            settings |= {"compute_dtype": dtype}
            sharding = optimizer = ZeroOptimizer(
                runner.stages, optimizer_cls, mesh.replicas, layout.zero_stage, **settings
            )
        else:
            optimizer = optimizer_cls(runner.stages.parameters(), **settings)
    return ParallelModel(layout, mesh, runner, sharding, optimizer, dtype)


# %% 10.7 the runner does not know the replicas
def parallelize(
    config: ModelConfig,
    layout: Layout,
    mesh: Mesh,
    extra: Iterable[Callable] = (),
    *,
    moe: dict | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    optimizer_cls: type[torch.optim.Optimizer] = torch.optim.AdamW,
    **settings,
) -> ParallelModel:
    """This rank's part of a `Transformer` of these sizes, ready to train. Collective over the default group.

    extra: verbs that change the split model (kernels, FP8); moe: arguments of apply_moe; dtype: of the matrix products;
    settings: the optimizer's. Beside its own part (and buckets of its size, or a gathered block) no rank has more than
    one whole tensor at a time. Raises ValueError where the layout does not fit the ranks or the model.
    """
    schedule, own = own_stages(config, layout, mesh, extra, moe)
    init, sharding, loss_of = initial_values(config, seed), None, summed_loss_over(mesh.tp, config.vocab)
    with torch.device(mesh.device_mesh.device_type):
        if layout.zero_stage == 3:
            sharding, own = shard_stages(own, layout, mesh, schedule, init, dtype)
        else:
            materialize(nn.ModuleDict({str(number): stage for number, stage in own.items()}), init)
        runner = PipelineRunner(own, schedule, mesh.pp, loss_of)
        if layout.keep_gathered:
            runner.prepare = sharding.gather
        if layout.zero_stage == 0:
            sharding = DataParallel(runner.stages, mesh.replicas)
        if layout.zero_stage in (1, 2):
            settings |= {"compute_dtype": dtype, "grad_dtype": torch.float32}
            sharding = optimizer = ZeroOptimizer(
                runner.stages, optimizer_cls, mesh.replicas, layout.zero_stage, **settings
            )
        else:
            optimizer = optimizer_cls(runner.stages.parameters(), **settings)
    return ParallelModel(layout, mesh, runner, sharding, optimizer, dtype)


# %% 10.7 always AdamW
def parallelize(
    config: ModelConfig,
    layout: Layout,
    mesh: Mesh,
    extra: Iterable[Callable] = (),
    *,
    moe: dict | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    optimizer_cls: type[torch.optim.Optimizer] = torch.optim.AdamW,
    **settings,
) -> ParallelModel:
    """This rank's part of a `Transformer` of these sizes, ready to train. Collective over the default group.

    extra: verbs that change the split model (kernels, FP8); moe: of apply_moe; dtype: see ParallelSteps; settings: the
    optimizer's. A rank has its part (and a gathered block, or buckets) and one whole tensor at a time. Raises
    ValueError where the layout does not fit the ranks or the model.
    """
    schedule, own = own_stages(config, layout, mesh, extra, moe)
    init, sharding, loss_of = initial_values(config, seed), None, summed_loss_over(mesh.tp, config.vocab)
    with torch.device(mesh.device_mesh.device_type):
        if layout.zero_stage == 3:
            sharding, own = shard_stages(own, layout, mesh, schedule, init, dtype)
        else:
            materialize(nn.ModuleDict({str(number): stage for number, stage in own.items()}), init)
        runner = PipelineRunner(own, schedule, mesh.pp, loss_of, mesh.replicas)
        if layout.keep_gathered:
            runner.prepare = sharding.gather
        if layout.zero_stage == 0:
            sharding = DataParallel(runner.stages, mesh.replicas)
        if layout.zero_stage in (1, 2):
            settings |= {"stage": layout.zero_stage, "compute_dtype": dtype, "grad_dtype": torch.float32}
            sharding = optimizer = ZeroOptimizer(runner.stages, torch.optim.AdamW, mesh.replicas, **settings)
        else:
            optimizer = torch.optim.AdamW(runner.stages.parameters(), **settings)
    return ParallelModel(layout, mesh, runner, sharding, optimizer, dtype)


# %% 10.7 without ZeRO always AdamW
def parallelize(
    config: ModelConfig,
    layout: Layout,
    mesh: Mesh,
    extra: Iterable[Callable] = (),
    *,
    moe: dict | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    optimizer_cls: type[torch.optim.Optimizer] = torch.optim.AdamW,
    **settings,
) -> ParallelModel:
    """This rank's part of a `Transformer` of these sizes, ready to train. Collective over the default group.

    extra: verbs that change the split model (kernels, FP8); moe: of apply_moe; dtype: see ParallelSteps; settings: the
    optimizer's. A rank has its part (and a gathered block, or buckets) and one whole tensor at a time. Raises
    ValueError where the layout does not fit the ranks or the model.
    """
    schedule, own = own_stages(config, layout, mesh, extra, moe)
    init, sharding, loss_of = initial_values(config, seed), None, summed_loss_over(mesh.tp, config.vocab)
    with torch.device(mesh.device_mesh.device_type):
        if layout.zero_stage == 3:
            sharding, own = shard_stages(own, layout, mesh, schedule, init, dtype)
        else:
            materialize(nn.ModuleDict({str(number): stage for number, stage in own.items()}), init)
        runner = PipelineRunner(own, schedule, mesh.pp, loss_of, mesh.replicas)
        if layout.keep_gathered:
            runner.prepare = sharding.gather
        if layout.zero_stage == 0:
            sharding = DataParallel(runner.stages, mesh.replicas)
        if layout.zero_stage in (1, 2):
            settings |= {"stage": layout.zero_stage, "compute_dtype": dtype, "grad_dtype": torch.float32}
            sharding = optimizer = ZeroOptimizer(runner.stages, optimizer_cls, mesh.replicas, **settings)
        else:
            optimizer = torch.optim.AdamW(runner.stages.parameters(), **settings)
    return ParallelModel(layout, mesh, runner, sharding, optimizer, dtype)


# %% 10.7 in ZeRO always AdamW
def parallelize(
    config: ModelConfig,
    layout: Layout,
    mesh: Mesh,
    extra: Iterable[Callable] = (),
    *,
    moe: dict | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    optimizer_cls: type[torch.optim.Optimizer] = torch.optim.AdamW,
    **settings,
) -> ParallelModel:
    """This rank's part of a `Transformer` of these sizes, ready to train. Collective over the default group.

    extra: verbs that change the split model (kernels, FP8); moe: of apply_moe; dtype: see ParallelSteps; settings: the
    optimizer's. A rank has its part (and a gathered block, or buckets) and one whole tensor at a time. Raises
    ValueError where the layout does not fit the ranks or the model.
    """
    schedule, own = own_stages(config, layout, mesh, extra, moe)
    init, sharding, loss_of = initial_values(config, seed), None, summed_loss_over(mesh.tp, config.vocab)
    with torch.device(mesh.device_mesh.device_type):
        if layout.zero_stage == 3:
            sharding, own = shard_stages(own, layout, mesh, schedule, init, dtype)
        else:
            materialize(nn.ModuleDict({str(number): stage for number, stage in own.items()}), init)
        runner = PipelineRunner(own, schedule, mesh.pp, loss_of, mesh.replicas)
        if layout.keep_gathered:
            runner.prepare = sharding.gather
        if layout.zero_stage == 0:
            sharding = DataParallel(runner.stages, mesh.replicas)
        if layout.zero_stage in (1, 2):
            settings |= {"stage": layout.zero_stage, "compute_dtype": dtype, "grad_dtype": torch.float32}
            sharding = optimizer = ZeroOptimizer(runner.stages, torch.optim.AdamW, mesh.replicas, **settings)
        else:
            optimizer = optimizer_cls(runner.stages.parameters(), **settings)
    return ParallelModel(layout, mesh, runner, sharding, optimizer, dtype)


# %% 10.8 nothing is split
shapes = {"attention_norm": [4, 32, 32], "core": [4, 32, 4, 8], "o_proj": [4, 32, 32], "mlp_norm": [4, 32, 32], "mlp": [4, 32, 32]}


# %% 10.8 sp cuts no tokens
shapes = {"attention_norm": [2, 16, 32], "core": [2, 16, 2, 8], "o_proj": [2, 16, 32], "mlp_norm": [2, 16, 32], "mlp": [2, 16, 32]}


# %% 10.8 attention sees a part of the tokens of cp
shapes = {"attention_norm": [2, 8, 32], "core": [2, 8, 2, 8], "o_proj": [2, 8, 32], "mlp_norm": [2, 8, 32], "mlp": [2, 8, 32]}


# %% 10.8 all heads inside attention
shapes = {"attention_norm": [2, 8, 32], "core": [2, 16, 4, 8], "o_proj": [2, 8, 32], "mlp_norm": [2, 8, 32], "mlp": [2, 8, 32]}


# %% 10.8 o_proj's output before g*
shapes = {"attention_norm": [2, 8, 32], "core": [2, 16, 2, 8], "o_proj": [2, 16, 32], "mlp_norm": [2, 8, 32], "mlp": [2, 8, 32]}


# %% 10.8 sp cuts the hidden size
shapes = {"attention_norm": [2, 16, 16], "core": [2, 16, 2, 8], "o_proj": [2, 8, 32], "mlp_norm": [2, 16, 16], "mlp": [2, 8, 32]}


# %% 10.8 dp does not cut sequences
shapes = {"attention_norm": [4, 8, 32], "core": [4, 16, 2, 8], "o_proj": [4, 8, 32], "mlp_norm": [4, 8, 32], "mlp": [4, 8, 32]}


# %% 10.8 ep cuts what leaves the mixture
shapes = {"attention_norm": [2, 8, 32], "core": [2, 16, 2, 8], "o_proj": [2, 8, 32], "mlp_norm": [2, 8, 32], "mlp": [1, 8, 32]}


# %% 10.9 weights are gathered once
def weights_over_activations(params, hidden, tokens, ranks):
    """Numbers sent by ZeRO-3 over those of a pipeline, on `ranks` ranks with a micro-batch of `tokens` tokens each."""
    sharded = 2 * params * (ranks - 1)
    piped = (ranks - 1) * 2 * ranks * tokens * hidden
    return sharded / piped


# %% 10.9 no gradients
def weights_over_activations(params, hidden, tokens, ranks):
    """Numbers sent by ZeRO-3 over those of a pipeline, on `ranks` ranks with a micro-batch of `tokens` tokens each."""
    sharded = 3 * params * (ranks - 1)
    piped = (ranks - 1) * ranks * tokens * hidden
    return sharded / piped


# %% 10.9 one rank's tokens cross
def weights_over_activations(params, hidden, tokens, ranks):
    """Numbers sent by ZeRO-3 over those of a pipeline, on `ranks` ranks with a micro-batch of `tokens` tokens each."""
    sharded = 3 * params * (ranks - 1)
    piped = (ranks - 1) * 2 * tokens * hidden
    return sharded / piped


# %% 10.9 ZeRO-3 of one rank only
def weights_over_activations(params, hidden, tokens, ranks):
    """Numbers sent by ZeRO-3 over those of a pipeline, on `ranks` ranks with a micro-batch of `tokens` tokens each."""
    sharded = 3 * params * (ranks - 1) / ranks
    piped = (ranks - 1) * 2 * ranks * tokens * hidden
    return sharded / piped


# %% 10.9 the other way round
def weights_over_activations(params, hidden, tokens, ranks):
    """Numbers sent by ZeRO-3 over those of a pipeline, on `ranks` ranks with a micro-batch of `tokens` tokens each."""
    sharded = 3 * params * (ranks - 1)
    piped = (ranks - 1) * 2 * ranks * tokens * hidden
    return piped / sharded


# %% 10.9 every rank is a cut
def weights_over_activations(params, hidden, tokens, ranks):
    """Numbers sent by ZeRO-3 over those of a pipeline, on `ranks` ranks with a micro-batch of `tokens` tokens each."""
    sharded = 3 * params * ranks * ranks
    piped = ranks * 2 * ranks * tokens * hidden
    return sharded / piped


# %% 10.10 gathers a unit again for each micro-batch
class KeptGathers(KeptUnits):
    """What fully_shard makes of a ModuleDict of stages: gather(); the stages' passes, in any order; finish()."""

    def gather(self) -> None:
        """Before a step, on all ranks: start all all-gathers, in the order of forward. The stages have whole parameters
        from here on, whose values may still be on their way. finish() sends the gradients of all units.
        """
        for part in (part for unit in [self.root, *self.units] for part in unit.parts):
            part.buffer.gather()
            part.register(part.whole)
        self.open = list(self.units)
        self.before_forward(self.root)  # its weights are in no unit, or in two: nobody waits for them later

    def before_forward(self, unit: Unit) -> None:
        """Wait until the unit's values are there; leave its parameters alone: a split pass has stand-ins there."""
        for part in unit.parts:
            if part.layout.group.size() == self.group.size():
                part.buffer.free()
                part.buffer.gather()
            part.buffer.wait()

    def backward_begins(self, unit: Unit) -> None:
        """Everything is there."""


# %% 10.10 weights stay in memory after the step
class KeptGathers(KeptUnits):
    """What fully_shard makes of a ModuleDict of stages: gather(); the stages' passes, in any order; finish()."""

    def gather(self) -> None:
        """Before a step, on all ranks: start all all-gathers, in the order of forward. The stages have whole parameters
        from here on, whose values may still be on their way. finish() sends the gradients of all units.
        """
        for part in (part for unit in [self.root, *self.units] for part in unit.parts):
            part.buffer.gather()
            part.register(part.whole)
        self.open = list(self.units)
        self.before_forward(self.root)  # its weights are in no unit, or in two: nobody waits for them later

    def before_forward(self, unit: Unit) -> None:
        """Wait until the unit's values are there; leave its parameters alone: a split pass has stand-ins there."""
        for part in unit.parts:
            part.buffer.wait()

    def finish(self):
        super().finish()
        for unit in self.units:
            for part in unit.parts:
                part.buffer.gather()

    def backward_begins(self, unit: Unit) -> None:
        """Everything is there."""


# %% 10.10 no unit is open
class KeptGathers(KeptUnits):
    """What fully_shard makes of a ModuleDict of stages: gather(); the stages' passes, in any order; finish()."""

    def gather(self) -> None:
        """Before a step, on all ranks: start all all-gathers, in the order of forward. The stages have whole parameters
        from here on, whose values may still be on their way. finish() sends the gradients of all units.
        """
        for part in (part for unit in [self.root, *self.units] for part in unit.parts):
            part.buffer.gather()
            part.register(part.whole)
        self.open = []
        self.before_forward(self.root)  # its weights are in no unit, or in two: nobody waits for them later

    def before_forward(self, unit: Unit) -> None:
        """Wait until the unit's values are there; leave its parameters alone: a split pass has stand-ins there."""
        for part in unit.parts:
            part.buffer.wait()

    def backward_begins(self, unit: Unit) -> None:
        """Everything is there."""


# %% 10.10 waits for each before it starts the next one
class KeptGathers(KeptUnits):
    """What fully_shard makes of a ModuleDict of stages: gather(); the stages' passes, in any order; finish()."""

    def gather(self) -> None:
        """Before a step, on all ranks: start all all-gathers, in the order of forward. The stages have whole parameters
        from here on, whose values may still be on their way. finish() sends the gradients of all units.
        """
        for part in (part for unit in [self.root, *self.units] for part in unit.parts):
            part.buffer.gather()
            part.buffer.wait()
            part.register(part.whole)
        self.open = list(self.units)
        self.before_forward(self.root)  # its weights are in no unit, or in two: nobody waits for them later

    def before_forward(self, unit: Unit) -> None:
        """Wait until the unit's values are there; leave its parameters alone: a split pass has stand-ins there."""
        for part in unit.parts:
            part.buffer.wait()

    def backward_begins(self, unit: Unit) -> None:
        """Everything is there."""


# %% 10.10 gathers nothing before a unit runs
class KeptGathers(KeptUnits):
    """What fully_shard makes of a ModuleDict of stages: gather(); the stages' passes, in any order; finish()."""

    def gather(self) -> None:
        """Before a step, on all ranks: start all all-gathers, in the order of forward. The stages have whole parameters
        from here on, whose values may still be on their way. finish() sends the gradients of all units.
        """
        for part in (part for unit in [self.root] for part in unit.parts):
            part.buffer.gather()
            part.register(part.whole)
        self.open = list(self.units)
        self.before_forward(self.root)  # its weights are in no unit, or in two: nobody waits for them later

    def before_forward(self, unit: Unit) -> None:
        """Wait until the unit's values are there; leave its parameters alone: a split pass has stand-ins there."""
        for part in unit.parts:
            part.buffer.gather()
            part.buffer.wait()
            part.register(part.whole)

    def backward_begins(self, unit: Unit) -> None:
        """Everything is there."""


# %% 10.10 sends the gradients of each micro-batch
class KeptGathers(KeptUnits):
    """What fully_shard makes of a ModuleDict of stages: gather(); the stages' passes, in any order; finish()."""

    def gather(self) -> None:
        """Before a step, on all ranks: start all all-gathers, in the order of forward. The stages have whole parameters
        from here on, whose values may still be on their way. finish() sends the gradients of all units.
        """
        for part in (part for unit in [self.root, *self.units] for part in unit.parts):
            part.buffer.gather()
            part.register(part.whole)
        self.open = list(self.units)
        self.before_forward(self.root)  # its weights are in no unit, or in two: nobody waits for them later

    def before_forward(self, unit: Unit) -> None:
        """Wait until the unit's values are there; leave its parameters alone: a split pass has stand-ins there."""
        for part in unit.parts:
            part.buffer.wait()

    def backward_begins(self, unit: Unit) -> None:
        for part in unit.parts:
            if part.has_gradients and part.layout.group.size() == self.group.size():
                part.launch()


# %% 10.10 the root is forgotten
class KeptGathers(KeptUnits):
    """What fully_shard makes of a ModuleDict of stages: gather(); the stages' passes, in any order; finish()."""

    def gather(self) -> None:
        """Before a step, on all ranks: start all all-gathers, in the order of forward. The stages have whole parameters
        from here on, whose values may still be on their way. finish() sends the gradients of all units.
        """
        for part in (part for unit in self.units for part in unit.parts):
            part.buffer.gather()
            part.register(part.whole)
        self.open = list(self.units)
        self.before_forward(self.root)  # its weights are in no unit, or in two: nobody waits for them later

    def before_forward(self, unit: Unit) -> None:
        """Wait until the unit's values are there; leave its parameters alone: a split pass has stand-ins there."""
        for part in unit.parts:
            part.buffer.wait()

    def backward_begins(self, unit: Unit) -> None:
        """Everything is there."""


# %% 10.10 waits for the root only
class KeptGathers(KeptUnits):
    """What fully_shard makes of a ModuleDict of stages: gather(); the stages' passes, in any order; finish()."""

    def gather(self) -> None:
        """Before a step, on all ranks: start all all-gathers, in the order of forward. The stages have whole parameters
        from here on, whose values may still be on their way. finish() sends the gradients of all units.
        """
        for part in (part for unit in [self.root, *self.units] for part in unit.parts):
            part.buffer.gather()
            part.register(part.whole)
        self.open = list(self.units)
        self.before_forward(self.root)  # its weights are in no unit, or in two: nobody waits for them later

    def before_forward(self, unit: Unit) -> None:
        """Wait until the unit's values are there; leave its parameters alone: a split pass has stand-ins there."""
        for part in unit.parts if unit is self.root else ():
            part.buffer.wait()

    def backward_begins(self, unit: Unit) -> None:
        """Everything is there."""


# %% 10.10 whole parameters are not registered
class KeptGathers(KeptUnits):
    """What fully_shard makes of a ModuleDict of stages: gather(); the stages' passes, in any order; finish()."""

    def gather(self) -> None:
        """Before a step, on all ranks: start all all-gathers, in the order of forward. The stages have whole parameters
        from here on, whose values may still be on their way. finish() sends the gradients of all units.
        """
        for part in (part for unit in [self.root, *self.units] for part in unit.parts):
            part.buffer.gather()
        self.open = list(self.units)
        self.before_forward(self.root)  # its weights are in no unit, or in two: nobody waits for them later

    def before_forward(self, unit: Unit) -> None:
        """Wait until the unit's values are there; leave its parameters alone: a split pass has stand-ins there."""
        for part in unit.parts:
            part.buffer.wait()

    def backward_begins(self, unit: Unit) -> None:
        """Everything is there."""


# %% 10.11 steps count from 0
import math


def learning_rate(step: int, peak: float, warmup: int, steps: int, least: float = 0.1) -> float:
    """The learning rate of a step, which count from 1: linear up to `peak` at step `warmup`, then a half cosine down to
    least · peak at step `steps`.
    """
    if step < warmup:
        return peak * (step - 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (least + (1 - least) * (1 + math.cos(math.pi * min(1.0, done))) / 2)


def batch_at(step: int, start: int, full: int, ramp: int) -> int:
    """Sequences of a step, which count from 1: `start` at step 1, growing evenly to `full` after `ramp` steps, rounded
    down to a multiple of `start`: no layout has a say in it.
    """
    if step > ramp:
        return full
    grown = start + (full - start) * (step - 1) // max(1, ramp)
    return grown // start * start


# %% 10.11 falls in a line
import math


def learning_rate(step: int, peak: float, warmup: int, steps: int, least: float = 0.1) -> float:
    """The learning rate of a step, which count from 1: linear up to `peak` at step `warmup`, then a half cosine down to
    least · peak at step `steps`.
    """
    if step < warmup:
        return peak * step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (least + (1 - least) * (1 - min(1.0, done)))


def batch_at(step: int, start: int, full: int, ramp: int) -> int:
    """Sequences of a step, which count from 1: `start` at step 1, growing evenly to `full` after `ramp` steps, rounded
    down to a multiple of `start`: no layout has a say in it.
    """
    if step > ramp:
        return full
    grown = start + (full - start) * (step - 1) // max(1, ramp)
    return grown // start * start


# %% 10.11 falls to nothing
import math


def learning_rate(step: int, peak: float, warmup: int, steps: int, least: float = 0.1) -> float:
    """The learning rate of a step, which count from 1: linear up to `peak` at step `warmup`, then a half cosine down to
    least · peak at step `steps`.
    """
    if step < warmup:
        return peak * step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (1 + math.cos(math.pi * min(1.0, done))) / 2


def batch_at(step: int, start: int, full: int, ramp: int) -> int:
    """Sequences of a step, which count from 1: `start` at step 1, growing evenly to `full` after `ramp` steps, rounded
    down to a multiple of `start`: no layout has a say in it.
    """
    if step > ramp:
        return full
    grown = start + (full - start) * (step - 1) // max(1, ramp)
    return grown // start * start


# %% 10.11 the cosine counts from step 0
import math


def learning_rate(step: int, peak: float, warmup: int, steps: int, least: float = 0.1) -> float:
    """The learning rate of a step, which count from 1: linear up to `peak` at step `warmup`, then a half cosine down to
    least · peak at step `steps`.
    """
    if step < warmup:
        return peak * step / warmup
    done = step / steps
    return peak * (least + (1 - least) * (1 + math.cos(math.pi * min(1.0, done))) / 2)


def batch_at(step: int, start: int, full: int, ramp: int) -> int:
    """Sequences of a step, which count from 1: `start` at step 1, growing evenly to `full` after `ramp` steps, rounded
    down to a multiple of `start`: no layout has a say in it.
    """
    if step > ramp:
        return full
    grown = start + (full - start) * (step - 1) // max(1, ramp)
    return grown // start * start


# %% 10.11 the cosine comes up again
import math


def learning_rate(step: int, peak: float, warmup: int, steps: int, least: float = 0.1) -> float:
    """The learning rate of a step, which count from 1: linear up to `peak` at step `warmup`, then a half cosine down to
    least · peak at step `steps`.
    """
    if step < warmup:
        return peak * step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (least + (1 - least) * (1 + math.cos(math.pi * done)) / 2)


def batch_at(step: int, start: int, full: int, ramp: int) -> int:
    """Sequences of a step, which count from 1: `start` at step 1, growing evenly to `full` after `ramp` steps, rounded
    down to a multiple of `start`: no layout has a say in it.
    """
    if step > ramp:
        return full
    grown = start + (full - start) * (step - 1) // max(1, ramp)
    return grown // start * start


# %% 10.11 a whole cosine
import math


def learning_rate(step: int, peak: float, warmup: int, steps: int, least: float = 0.1) -> float:
    """The learning rate of a step, which count from 1: linear up to `peak` at step `warmup`, then a half cosine down to
    least · peak at step `steps`.
    """
    if step < warmup:
        return peak * step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (least + (1 - least) * (1 + math.cos(2 * math.pi * min(1.0, done))) / 2)


def batch_at(step: int, start: int, full: int, ramp: int) -> int:
    """Sequences of a step, which count from 1: `start` at step 1, growing evenly to `full` after `ramp` steps, rounded
    down to a multiple of `start`: no layout has a say in it.
    """
    if step > ramp:
        return full
    grown = start + (full - start) * (step - 1) // max(1, ramp)
    return grown // start * start


# %% 10.11 any number of sequences
import math


def learning_rate(step: int, peak: float, warmup: int, steps: int, least: float = 0.1) -> float:
    """The learning rate of a step, which count from 1: linear up to `peak` at step `warmup`, then a half cosine down to
    least · peak at step `steps`.
    """
    if step < warmup:
        return peak * step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (least + (1 - least) * (1 + math.cos(math.pi * min(1.0, done))) / 2)


def batch_at(step: int, start: int, full: int, ramp: int) -> int:
    """Sequences of a step, which count from 1: `start` at step 1, growing evenly to `full` after `ramp` steps, rounded
    down to a multiple of `start`: no layout has a say in it.
    """
    if step > ramp:
        return full
    grown = start + (full - start) * (step - 1) // max(1, ramp)
    return grown


# %% 10.11 the batch is full a step early
import math


def learning_rate(step: int, peak: float, warmup: int, steps: int, least: float = 0.1) -> float:
    """The learning rate of a step, which count from 1: linear up to `peak` at step `warmup`, then a half cosine down to
    least · peak at step `steps`.
    """
    if step < warmup:
        return peak * step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (least + (1 - least) * (1 + math.cos(math.pi * min(1.0, done))) / 2)


def batch_at(step: int, start: int, full: int, ramp: int) -> int:
    """Sequences of a step, which count from 1: `start` at step 1, growing evenly to `full` after `ramp` steps, rounded
    down to a multiple of `start`: no layout has a say in it.
    """
    if step > ramp:
        return full
    grown = start + (full - start) * step // max(1, ramp)
    return grown // start * start


# %% 10.11 a quarter at a time
import math


def learning_rate(step: int, peak: float, warmup: int, steps: int, least: float = 0.1) -> float:
    """The learning rate of a step, which count from 1: linear up to `peak` at step `warmup`, then a half cosine down to
    least · peak at step `steps`.
    """
    if step < warmup:
        return peak * step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (least + (1 - least) * (1 + math.cos(math.pi * min(1.0, done))) / 2)


def batch_at(step: int, start: int, full: int, ramp: int) -> int:
    """Sequences of a step, which count from 1: `start` at step 1, growing evenly to `full` after `ramp` steps, rounded
    down to a multiple of `start`: no layout has a say in it.
    """
    if step > ramp:
        return full
    grown = start + (full - start) // 4 * (4 * (step - 1) // max(1, ramp))
    return grown // start * start


# %% 10.12 only the last number is looked at
def find_desync(groups: dict[str, list[int]], records: dict[int, list[Flight]]) -> list[str]:
    """What keeps the ranks from going on: a line for each group whose ranks do not agree, about its first collective on
    which they do not. Groups of one rank, and those in step, are left out.

    groups: their ranks, by name; records: of each rank, in the order of issue. A rank without records counts as
    one that has come to nothing.
    """
    found, first_ns = [], {rank: flights[0].time_ns for rank, flights in records.items() if flights}
    for name, ranks in groups.items():
        seen = {rank: {f.number: f for f in records.get(rank, ()) if f.group == name} for rank in ranks}
        oldest = max((min(flights) for flights in seen.values() if flights), default=1)  # the buffers are rings
        newest = max((max(flights) for flights in seen.values() if flights), default=0)
        for number in range(newest, newest + 1):
            there = {rank: seen[rank][number] for rank in ranks if number in seen[rank]}
            at = min((flight.time_ns for flight in there.values()), default=0)
            absent = [rank for rank in ranks if rank not in there and first_ns.get(rank, 0) <= at]  # else: lost
            came = {}
            for rank, flight in there.items():
                came.setdefault(described(flight), []).append(rank)
            if there and absent or len(came) > 1:
                words = "; ".join(f"{who} in {what}" for what, who in came.items())
                found.append(f"group {ranks}, number {number}: {words}" + (f"; not there: {absent}" if absent else ""))
                break
    return found


# %% 10.12 sizes do not matter
def find_desync(groups: dict[str, list[int]], records: dict[int, list[Flight]]) -> list[str]:
    """What keeps the ranks from going on: a line for each group whose ranks do not agree, about its first collective on
    which they do not. Groups of one rank, and those in step, are left out.

    groups: their ranks, by name; records: of each rank, in the order of issue. A rank without records counts as
    one that has come to nothing.
    """
    found, first_ns = [], {rank: flights[0].time_ns for rank, flights in records.items() if flights}
    for name, ranks in groups.items():
        seen = {rank: {f.number: f for f in records.get(rank, ()) if f.group == name} for rank in ranks}
        oldest = max((min(flights) for flights in seen.values() if flights), default=1)  # the buffers are rings
        newest = max((max(flights) for flights in seen.values() if flights), default=0)
        for number in range(oldest, newest + 1):
            there = {rank: seen[rank][number] for rank in ranks if number in seen[rank]}
            at = min((flight.time_ns for flight in there.values()), default=0)
            absent = [rank for rank in ranks if rank not in there and first_ns.get(rank, 0) <= at]  # else: lost
            came = {}
            for rank, flight in there.items():
                came.setdefault(flight.name, []).append(rank)
            if there and absent or len(came) > 1:
                words = "; ".join(f"{who} in {what}" for what, who in came.items())
                found.append(f"group {ranks}, number {number}: {words}" + (f"; not there: {absent}" if absent else ""))
                break
    return found


# %% 10.12 an all-to-all's sizes matter
def find_desync(groups: dict[str, list[int]], records: dict[int, list[Flight]]) -> list[str]:
    """What keeps the ranks from going on: a line for each group whose ranks do not agree, about its first collective on
    which they do not. Groups of one rank, and those in step, are left out.

    groups: their ranks, by name; records: of each rank, in the order of issue. A rank without records counts as
    one that has come to nothing.
    """
    found, first_ns = [], {rank: flights[0].time_ns for rank, flights in records.items() if flights}
    for name, ranks in groups.items():
        seen = {rank: {f.number: f for f in records.get(rank, ()) if f.group == name} for rank in ranks}
        oldest = max((min(flights) for flights in seen.values() if flights), default=1)  # the buffers are rings
        newest = max((max(flights) for flights in seen.values() if flights), default=0)
        for number in range(oldest, newest + 1):
            there = {rank: seen[rank][number] for rank in ranks if number in seen[rank]}
            at = min((flight.time_ns for flight in there.values()), default=0)
            absent = [rank for rank in ranks if rank not in there and first_ns.get(rank, 0) <= at]  # else: lost
            came = {}
            for rank, flight in there.items():
                came.setdefault(f"{flight.name} {flight.sizes}", []).append(rank)
            if there and absent or len(came) > 1:
                words = "; ".join(f"{who} in {what}" for what, who in came.items())
                found.append(f"group {ranks}, number {number}: {words}" + (f"; not there: {absent}" if absent else ""))
                break
    return found


# %% 10.12 only ranks that have come are compared
def find_desync(groups: dict[str, list[int]], records: dict[int, list[Flight]]) -> list[str]:
    """What keeps the ranks from going on: a line for each group whose ranks do not agree, about its first collective on
    which they do not. Groups of one rank, and those in step, are left out.

    groups: their ranks, by name; records: of each rank, in the order of issue. A rank without records counts as
    one that has come to nothing.
    """
    found, first_ns = [], {rank: flights[0].time_ns for rank, flights in records.items() if flights}
    for name, ranks in groups.items():
        seen = {rank: {f.number: f for f in records.get(rank, ()) if f.group == name} for rank in ranks}
        oldest = max((min(flights) for flights in seen.values() if flights), default=1)  # the buffers are rings
        newest = max((max(flights) for flights in seen.values() if flights), default=0)
        for number in range(oldest, newest + 1):
            there = {rank: seen[rank][number] for rank in ranks if number in seen[rank]}
            at = min((flight.time_ns for flight in there.values()), default=0)
            absent = [rank for rank in ranks if rank not in there and first_ns.get(rank, 0) <= at]  # else: lost
            came = {}
            for rank, flight in there.items():
                came.setdefault(described(flight), []).append(rank)
            if len(came) > 1:
                words = "; ".join(f"{who} in {what}" for what, who in came.items())
                found.append(f"group {ranks}, number {number}: {words}" + (f"; not there: {absent}" if absent else ""))
                break
    return found


# %% 10.12 only who is missing
def find_desync(groups: dict[str, list[int]], records: dict[int, list[Flight]]) -> list[str]:
    """What keeps the ranks from going on: a line for each group whose ranks do not agree, about its first collective on
    which they do not. Groups of one rank, and those in step, are left out.

    groups: their ranks, by name; records: of each rank, in the order of issue. A rank without records counts as
    one that has come to nothing.
    """
    found, first_ns = [], {rank: flights[0].time_ns for rank, flights in records.items() if flights}
    for name, ranks in groups.items():
        seen = {rank: {f.number: f for f in records.get(rank, ()) if f.group == name} for rank in ranks}
        oldest = max((min(flights) for flights in seen.values() if flights), default=1)  # the buffers are rings
        newest = max((max(flights) for flights in seen.values() if flights), default=0)
        for number in range(oldest, newest + 1):
            there = {rank: seen[rank][number] for rank in ranks if number in seen[rank]}
            at = min((flight.time_ns for flight in there.values()), default=0)
            absent = [rank for rank in ranks if rank not in there and first_ns.get(rank, 0) <= at]  # else: lost
            came = {}
            for rank, flight in there.items():
                came.setdefault(described(flight), []).append(rank)
            if there and absent:
                words = "; ".join(f"{who} in {what}" for what, who in came.items())
                found.append(f"group {ranks}, number {number}: {words}" + (f"; not there: {absent}" if absent else ""))
                break
    return found


# %% 10.12 what the ring has lost was missed
def find_desync(groups: dict[str, list[int]], records: dict[int, list[Flight]]) -> list[str]:
    """What keeps the ranks from going on: a line for each group whose ranks do not agree, about its first collective on
    which they do not. Groups of one rank, and those in step, are left out.

    groups: their ranks, by name; records: of each rank, in the order of issue. A rank without records counts as
    one that has come to nothing.
    """
    found, first_ns = [], {rank: flights[0].time_ns for rank, flights in records.items() if flights}
    for name, ranks in groups.items():
        seen = {rank: {f.number: f for f in records.get(rank, ()) if f.group == name} for rank in ranks}
        oldest = min((min(flights) for flights in seen.values() if flights), default=1)  # the buffers are rings
        newest = max((max(flights) for flights in seen.values() if flights), default=0)
        for number in range(oldest, newest + 1):
            there = {rank: seen[rank][number] for rank in ranks if number in seen[rank]}
            at = min((flight.time_ns for flight in there.values()), default=0)
            absent = [rank for rank in ranks if rank not in there and first_ns.get(rank, 0) <= at]  # else: lost
            came = {}
            for rank, flight in there.items():
                came.setdefault(described(flight), []).append(rank)
            if there and absent or len(came) > 1:
                words = "; ".join(f"{who} in {what}" for what, who in came.items())
                found.append(f"group {ranks}, number {number}: {words}" + (f"; not there: {absent}" if absent else ""))
                break
    return found


# %% 10.12 a rank without records is left out
def find_desync(groups: dict[str, list[int]], records: dict[int, list[Flight]]) -> list[str]:
    """What keeps the ranks from going on: a line for each group whose ranks do not agree, about its first collective on
    which they do not. Groups of one rank, and those in step, are left out.

    groups: their ranks, by name; records: of each rank, in the order of issue. A rank without records counts as
    one that has come to nothing.
    """
    found, first_ns = [], {rank: flights[0].time_ns for rank, flights in records.items() if flights}
    for name, ranks in groups.items():
        seen = {rank: {f.number: f for f in records.get(rank, ()) if f.group == name} for rank in ranks if records.get(rank)}
        oldest = max((min(flights) for flights in seen.values() if flights), default=1)  # the buffers are rings
        newest = max((max(flights) for flights in seen.values() if flights), default=0)
        for number in range(oldest, newest + 1):
            there = {rank: seen[rank][number] for rank in seen if number in seen[rank]}
            at = min((flight.time_ns for flight in there.values()), default=0)
            absent = [rank for rank in seen if rank not in there and first_ns.get(rank, 0) <= at]  # else: lost
            came = {}
            for rank, flight in there.items():
                came.setdefault(described(flight), []).append(rank)
            if there and absent or len(came) > 1:
                words = "; ".join(f"{who} in {what}" for what, who in came.items())
                found.append(f"group {ranks}, number {number}: {words}" + (f"; not there: {absent}" if absent else ""))
                break
    return found


# %% 10.12 every number at which they differ
def find_desync(groups: dict[str, list[int]], records: dict[int, list[Flight]]) -> list[str]:
    """What keeps the ranks from going on: a line for each group whose ranks do not agree, about its first collective on
    which they do not. Groups of one rank, and those in step, are left out.

    groups: their ranks, by name; records: of each rank, in the order of issue. A rank without records counts as
    one that has come to nothing.
    """
    found, first_ns = [], {rank: flights[0].time_ns for rank, flights in records.items() if flights}
    for name, ranks in groups.items():
        seen = {rank: {f.number: f for f in records.get(rank, ()) if f.group == name} for rank in ranks}
        oldest = max((min(flights) for flights in seen.values() if flights), default=1)  # the buffers are rings
        newest = max((max(flights) for flights in seen.values() if flights), default=0)
        for number in range(oldest, newest + 1):
            there = {rank: seen[rank][number] for rank in ranks if number in seen[rank]}
            at = min((flight.time_ns for flight in there.values()), default=0)
            absent = [rank for rank in ranks if rank not in there and first_ns.get(rank, 0) <= at]  # else: lost
            came = {}
            for rank, flight in there.items():
                came.setdefault(described(flight), []).append(rank)
            if there and absent or len(came) > 1:
                words = "; ".join(f"{who} in {what}" for what, who in came.items())
                found.append(f"group {ranks}, number {number}: {words}" + (f"; not there: {absent}" if absent else ""))
    return found


# %% 10.12 stops at the first group
def find_desync(groups: dict[str, list[int]], records: dict[int, list[Flight]]) -> list[str]:
    """What keeps the ranks from going on: a line for each group whose ranks do not agree, about its first collective on
    which they do not. Groups of one rank, and those in step, are left out.

    groups: their ranks, by name; records: of each rank, in the order of issue. A rank without records counts as
    one that has come to nothing.
    """
    found, first_ns = [], {rank: flights[0].time_ns for rank, flights in records.items() if flights}
    for name, ranks in groups.items():
        seen = {rank: {f.number: f for f in records.get(rank, ()) if f.group == name} for rank in ranks}
        oldest = max((min(flights) for flights in seen.values() if flights), default=1)  # the buffers are rings
        newest = max((max(flights) for flights in seen.values() if flights), default=0)
        for number in range(oldest, newest + 1):
            there = {rank: seen[rank][number] for rank in ranks if number in seen[rank]}
            at = min((flight.time_ns for flight in there.values()), default=0)
            absent = [rank for rank in ranks if rank not in there and first_ns.get(rank, 0) <= at]  # else: lost
            came = {}
            for rank, flight in there.items():
                came.setdefault(described(flight), []).append(rank)
            if there and absent or len(came) > 1:
                words = "; ".join(f"{who} in {what}" for what, who in came.items())
                found.append(f"group {ranks}, number {number}: {words}" + (f"; not there: {absent}" if absent else ""))
                return found
    return found


# %% 10.13 circle and alone exchanged
verdict = {"A": ("left", [7]), "B": ("alone", [7]), "C": ("circle", [1, 4])}


# %% 10.13 everyone has left
verdict = {"A": ("left", [7]), "B": ("left", [1, 4]), "C": ("left", [7])}


# %% 10.13 the victims of job B
verdict = {"A": ("left", [7]), "B": ("circle", [0, 2, 3, 5, 6, 7]), "C": ("alone", [7])}


# %% 10.13 one of two
verdict = {"A": ("left", [7]), "B": ("circle", [1]), "C": ("alone", [7])}


# %% 10.13 the partner of the culprit
verdict = {"A": ("left", [6]), "B": ("circle", [1, 4]), "C": ("alone", [7])}


# %% 10.13 a fault that is none of the three
verdict = {"A": ("NaN", [7]), "B": ("circle", [1, 4]), "C": ("alone", [7])}


# %% 10.14 charges the first
def lateness(groups: dict[str, list[int]], records: dict[int, list[Flight]]) -> dict[int, float]:
    """For how many seconds others have waited for each rank: of each collective that all ranks of a group of two or
    more have come to, from the median of the times at which they came to the last one's, which is charged with it. The
    hosts' clocks have to agree.
    """
    late, came = dict.fromkeys(records, 0.0), {}
    for rank, flights in records.items():
        for flight in flights:
            came.setdefault((flight.group, flight.number), {})[rank] = flight.time_ns
    for (name, _), times in came.items():
        if len(times) > 1 and len(times) == len(groups.get(name, ())):
            last = min(times, key=times.get)
            late[last] += (times[last] - statistics.median(times.values())) / 1e9
    return late


# %% 10.14 charges the first for all
def lateness(groups: dict[str, list[int]], records: dict[int, list[Flight]]) -> dict[int, float]:
    """For how many seconds others have waited for each rank: of each collective that all ranks of a group of two or
    more have come to, from the median of the times at which they came to the last one's, which is charged with it. The
    hosts' clocks have to agree.
    """
    late, came = dict.fromkeys(records, 0.0), {}
    for rank, flights in records.items():
        for flight in flights:
            came.setdefault((flight.group, flight.number), {})[rank] = flight.time_ns
    for (name, _), times in came.items():
        if len(times) > 1 and len(times) == len(groups.get(name, ())):
            first = min(times, key=times.get)
            late[first] += (max(times.values()) - times[first]) / 1e9
    return late


# %% 10.14 charges all but the first
def lateness(groups: dict[str, list[int]], records: dict[int, list[Flight]]) -> dict[int, float]:
    """For how many seconds others have waited for each rank: of each collective that all ranks of a group of two or
    more have come to, from the median of the times at which they came to the last one's, which is charged with it. The
    hosts' clocks have to agree.
    """
    late, came = dict.fromkeys(records, 0.0), {}
    for rank, flights in records.items():
        for flight in flights:
            came.setdefault((flight.group, flight.number), {})[rank] = flight.time_ns
    for (name, _), times in came.items():
        if len(times) > 1 and len(times) == len(groups.get(name, ())):
            for rank, at in times.items():
                late[rank] += (at - min(times.values())) / 1e9
    return late


# %% 10.14 nanoseconds
def lateness(groups: dict[str, list[int]], records: dict[int, list[Flight]]) -> dict[int, float]:
    """For how many seconds others have waited for each rank: of each collective that all ranks of a group of two or
    more have come to, from the median of the times at which they came to the last one's, which is charged with it. The
    hosts' clocks have to agree.
    """
    late, came = dict.fromkeys(records, 0.0), {}
    for rank, flights in records.items():
        for flight in flights:
            came.setdefault((flight.group, flight.number), {})[rank] = flight.time_ns
    for (name, _), times in came.items():
        if len(times) > 1 and len(times) == len(groups.get(name, ())):
            last = max(times, key=times.get)
            late[last] += (times[last] - statistics.median(times.values()))
    return late


# %% 10.14 from the earliest
def lateness(groups: dict[str, list[int]], records: dict[int, list[Flight]]) -> dict[int, float]:
    """For how many seconds others have waited for each rank: of each collective that all ranks of a group of two or
    more have come to, from the median of the times at which they came to the last one's, which is charged with it. The
    hosts' clocks have to agree.
    """
    late, came = dict.fromkeys(records, 0.0), {}
    for rank, flights in records.items():
        for flight in flights:
            came.setdefault((flight.group, flight.number), {})[rank] = flight.time_ns
    for (name, _), times in came.items():
        if len(times) > 1 and len(times) == len(groups.get(name, ())):
            last = max(times, key=times.get)
            late[last] += (times[last] - min(times.values())) / 1e9
    return late


# %% 10.14 from the mean
def lateness(groups: dict[str, list[int]], records: dict[int, list[Flight]]) -> dict[int, float]:
    """For how many seconds others have waited for each rank: of each collective that all ranks of a group of two or
    more have come to, from the median of the times at which they came to the last one's, which is charged with it. The
    hosts' clocks have to agree.
    """
    late, came = dict.fromkeys(records, 0.0), {}
    for rank, flights in records.items():
        for flight in flights:
            came.setdefault((flight.group, flight.number), {})[rank] = flight.time_ns
    for (name, _), times in came.items():
        if len(times) > 1 and len(times) == len(groups.get(name, ())):
            last = max(times, key=times.get)
            late[last] += (times[last] - statistics.mean(times.values())) / 1e9
    return late


# %% 10.14 what some have not come to counts too
def lateness(groups: dict[str, list[int]], records: dict[int, list[Flight]]) -> dict[int, float]:
    """For how many seconds others have waited for each rank: of each collective that all ranks of a group of two or
    more have come to, from the median of the times at which they came to the last one's, which is charged with it. The
    hosts' clocks have to agree.
    """
    late, came = dict.fromkeys(records, 0.0), {}
    for rank, flights in records.items():
        for flight in flights:
            came.setdefault((flight.group, flight.number), {})[rank] = flight.time_ns
    for (name, _), times in came.items():
        if len(times) > 1:
            last = max(times, key=times.get)
            late[last] += (times[last] - statistics.median(times.values())) / 1e9
    return late


# %% 10.14 numbers of all groups together
def lateness(groups: dict[str, list[int]], records: dict[int, list[Flight]]) -> dict[int, float]:
    """For how many seconds others have waited for each rank: of each collective that all ranks of a group of two or
    more have come to, from the median of the times at which they came to the last one's, which is charged with it. The
    hosts' clocks have to agree.
    """
    late, came = dict.fromkeys(records, 0.0), {}
    for rank, flights in records.items():
        for flight in flights:
            came.setdefault(("1", flight.number), {})[rank] = flight.time_ns
    for (name, _), times in came.items():
        if len(times) > 1 and len(times) == len(groups.get(name, ())):
            last = max(times, key=times.get)
            late[last] += (times[last] - statistics.median(times.values())) / 1e9
    return late


# %% 10.14 the worst one, not the sum
def lateness(groups: dict[str, list[int]], records: dict[int, list[Flight]]) -> dict[int, float]:
    """For how many seconds others have waited for each rank: of each collective that all ranks of a group of two or
    more have come to, from the median of the times at which they came to the last one's, which is charged with it. The
    hosts' clocks have to agree.
    """
    late, came = dict.fromkeys(records, 0.0), {}
    for rank, flights in records.items():
        for flight in flights:
            came.setdefault((flight.group, flight.number), {})[rank] = flight.time_ns
    for (name, _), times in came.items():
        if len(times) > 1 and len(times) == len(groups.get(name, ())):
            last = max(times, key=times.get)
            late[last] = max(late[last], (times[last] - statistics.median(times.values())) / 1e9)
    return late


# %% 10.15 the ring goes by rank
def bytes_across(traffic: Traffic, slots: list[int], ranks_per_node: int) -> int:
    """Bytes of `traffic` that leave a node. slots: by rank; node n has the slots from n · ranks_per_node on.

    all_reduce, all_gather, reduce_scatter: a rank sends all of its bytes to the next slot of its group, the last one to
    the first. send: to its peer. Anything else: evenly to the others of its group.
    """
    crossing = 0
    for record in traffic.records:
        ring = sorted(record.group)
        own = slots[record.rank] // ranks_per_node
        if record.collective in ("all_reduce", "all_gather", "reduce_scatter"):
            reached = [ring[(ring.index(record.rank) + 1) % len(ring)]]
        elif record.collective == "send":
            reached = [record.peer]
        else:
            reached = [rank for rank in ring if rank != record.rank]
        outside = sum(slots[rank] // ranks_per_node != own for rank in reached)
        crossing += record.bytes * outside // max(1, len(reached))
    return crossing


# %% 10.15 ranks in place of slots
def bytes_across(traffic: Traffic, slots: list[int], ranks_per_node: int) -> int:
    """Bytes of `traffic` that leave a node. slots: by rank; node n has the slots from n · ranks_per_node on.

    all_reduce, all_gather, reduce_scatter: a rank sends all of its bytes to the next slot of its group, the last one to
    the first. send: to its peer. Anything else: evenly to the others of its group.
    """
    crossing = 0
    for record in traffic.records:
        ring = sorted(record.group, key=lambda rank: slots[rank])
        own = record.rank // ranks_per_node
        if record.collective in ("all_reduce", "all_gather", "reduce_scatter"):
            reached = [ring[(ring.index(record.rank) + 1) % len(ring)]]
        elif record.collective == "send":
            reached = [record.peer]
        else:
            reached = [rank for rank in ring if rank != record.rank]
        outside = sum(rank // ranks_per_node != own for rank in reached)
        crossing += record.bytes * outside // max(1, len(reached))
    return crossing


# %% 10.15 all bytes of an all-to-all
def bytes_across(traffic: Traffic, slots: list[int], ranks_per_node: int) -> int:
    """Bytes of `traffic` that leave a node. slots: by rank; node n has the slots from n · ranks_per_node on.

    all_reduce, all_gather, reduce_scatter: a rank sends all of its bytes to the next slot of its group, the last one to
    the first. send: to its peer. Anything else: evenly to the others of its group.
    """
    crossing = 0
    for record in traffic.records:
        ring = sorted(record.group, key=lambda rank: slots[rank])
        own = slots[record.rank] // ranks_per_node
        if record.collective in ("all_reduce", "all_gather", "reduce_scatter"):
            reached = [ring[(ring.index(record.rank) + 1) % len(ring)]]
        elif record.collective == "send":
            reached = [record.peer]
        else:
            reached = [rank for rank in ring if rank != record.rank]
        outside = sum(slots[rank] // ranks_per_node != own for rank in reached)
        crossing += record.bytes * (outside > 0)
    return crossing


# %% 10.15 once for each rank that is reached
def bytes_across(traffic: Traffic, slots: list[int], ranks_per_node: int) -> int:
    """Bytes of `traffic` that leave a node. slots: by rank; node n has the slots from n · ranks_per_node on.

    all_reduce, all_gather, reduce_scatter: a rank sends all of its bytes to the next slot of its group, the last one to
    the first. send: to its peer. Anything else: evenly to the others of its group.
    """
    crossing = 0
    for record in traffic.records:
        ring = sorted(record.group, key=lambda rank: slots[rank])
        own = slots[record.rank] // ranks_per_node
        if record.collective in ("all_reduce", "all_gather", "reduce_scatter"):
            reached = [ring[(ring.index(record.rank) + 1) % len(ring)]]
        elif record.collective == "send":
            reached = [record.peer]
        else:
            reached = [rank for rank in ring if rank != record.rank]
        outside = sum(slots[rank] // ranks_per_node != own for rank in reached)
        crossing += record.bytes * outside
    return crossing


# %% 10.15 sums go to all others
def bytes_across(traffic: Traffic, slots: list[int], ranks_per_node: int) -> int:
    """Bytes of `traffic` that leave a node. slots: by rank; node n has the slots from n · ranks_per_node on.

    all_reduce, all_gather, reduce_scatter: a rank sends all of its bytes to the next slot of its group, the last one to
    the first. send: to its peer. Anything else: evenly to the others of its group.
    """
    crossing = 0
    for record in traffic.records:
        ring = sorted(record.group, key=lambda rank: slots[rank])
        own = slots[record.rank] // ranks_per_node
        if record.collective in ("all_gather", "reduce_scatter"):
            reached = [ring[(ring.index(record.rank) + 1) % len(ring)]]
        elif record.collective == "send":
            reached = [record.peer]
        else:
            reached = [rank for rank in ring if rank != record.rank]
        outside = sum(slots[rank] // ranks_per_node != own for rank in reached)
        crossing += record.bytes * outside // max(1, len(reached))
    return crossing


# %% 10.15 sends go round in the ring
def bytes_across(traffic: Traffic, slots: list[int], ranks_per_node: int) -> int:
    """Bytes of `traffic` that leave a node. slots: by rank; node n has the slots from n · ranks_per_node on.

    all_reduce, all_gather, reduce_scatter: a rank sends all of its bytes to the next slot of its group, the last one to
    the first. send: to its peer. Anything else: evenly to the others of its group.
    """
    crossing = 0
    for record in traffic.records:
        ring = sorted(record.group, key=lambda rank: slots[rank])
        own = slots[record.rank] // ranks_per_node
        if record.collective in ("send", "all_reduce", "all_gather", "reduce_scatter"):
            reached = [ring[(ring.index(record.rank) + 1) % len(ring)]]
        elif record.collective == "send":
            reached = [record.peer]
        else:
            reached = [rank for rank in ring if rank != record.rank]
        outside = sum(slots[rank] // ranks_per_node != own for rank in reached)
        crossing += record.bytes * outside // max(1, len(reached))
    return crossing


# %% 10.15 the last one sends to nobody
def bytes_across(traffic: Traffic, slots: list[int], ranks_per_node: int) -> int:
    """Bytes of `traffic` that leave a node. slots: by rank; node n has the slots from n · ranks_per_node on.

    all_reduce, all_gather, reduce_scatter: a rank sends all of its bytes to the next slot of its group, the last one to
    the first. send: to its peer. Anything else: evenly to the others of its group.
    """
    crossing = 0
    for record in traffic.records:
        ring = sorted(record.group, key=lambda rank: slots[rank])
        own = slots[record.rank] // ranks_per_node
        if record.collective in ("all_reduce", "all_gather", "reduce_scatter"):
            reached = ring[ring.index(record.rank) + 1 :][:1]
        elif record.collective == "send":
            reached = [record.peer]
        else:
            reached = [rank for rank in ring if rank != record.rank]
        outside = sum(slots[rank] // ranks_per_node != own for rank in reached)
        crossing += record.bytes * outside // max(1, len(reached))
    return crossing


# %% 10.15 all that groups over several nodes send
def bytes_across(traffic: Traffic, slots: list[int], ranks_per_node: int) -> int:
    """Bytes of `traffic` that leave a node. slots: by rank; node n has the slots from n · ranks_per_node on.

    all_reduce, all_gather, reduce_scatter: a rank sends all of its bytes to the next slot of its group, the last one to
    the first. send: to its peer. Anything else: evenly to the others of its group.
    """
    crossing = 0
    for record in traffic.records:
        ring = sorted(record.group, key=lambda rank: slots[rank])
        own = slots[record.rank] // ranks_per_node
        if record.collective in ("all_reduce", "all_gather", "reduce_scatter"):
            reached = [ring[(ring.index(record.rank) + 1) % len(ring)]]
        elif record.collective == "send":
            reached = [record.peer]
        else:
            reached = [rank for rank in ring if rank != record.rank]
        crossing += record.bytes * (len({slots[rank] // ranks_per_node for rank in ring}) > 1)
    return crossing


# %% 10.15 an all-to-all sends to itself too
def bytes_across(traffic: Traffic, slots: list[int], ranks_per_node: int) -> int:
    """Bytes of `traffic` that leave a node. slots: by rank; node n has the slots from n · ranks_per_node on.

    all_reduce, all_gather, reduce_scatter: a rank sends all of its bytes to the next slot of its group, the last one to
    the first. send: to its peer. Anything else: evenly to the others of its group.
    """
    crossing = 0
    for record in traffic.records:
        ring = sorted(record.group, key=lambda rank: slots[rank])
        own = slots[record.rank] // ranks_per_node
        if record.collective in ("all_reduce", "all_gather", "reduce_scatter"):
            reached = [ring[(ring.index(record.rank) + 1) % len(ring)]]
        elif record.collective == "send":
            reached = [record.peer]
        else:
            reached = ring
        outside = sum(slots[rank] // ranks_per_node != own for rank in reached)
        crossing += record.bytes * outside // max(1, len(reached))
    return crossing
