"""Wrong answers that the checks of notebook 10 must catch. Those that hang end at the check's own deadline."""

# %% 10.1 tp outermost
for axis in ("tp", "cp", "pp", "dp"): => for axis in ("dp", "pp", "cp", "tp"):

# %% 10.1 cp and pp the other way round
for axis in ("tp", "cp", "pp", "dp"): => for axis in ("tp", "pp", "cp", "dp"):

# %% 10.1 places in the order of the axes from the inside
return {axis: indices[axis] for axis in ("dp", "pp", "cp", "tp")}
=>
return indices

# %% 10.1 the remainder is taken of the rank itself
rank, indices[axis] = divmod(rank, getattr(layout, axis)) => indices[axis] = rank % getattr(layout, axis)

# %% 10.1 groups of ranks that agree on these axes
axis not in => axis in

# %% 10.1 only this layout's first group
return list(groups.values()) => return list(groups.values())[:1]

# %% 10.1 all ranks that stand at one place of the first axis
axis not in axes => axis != axes[0]

# %% 10.1 groups of neighbours
def groups_along(layout: Layout, *axes: str) -> list[list[int]]:
    size = 1
    for axis in axes:
        size *= getattr(layout, axis)
    return [list(range(first, first + size)) for first in range(0, layout.ranks, size)]

# %% 10.2 a message without numbers
def check_ranks(layout: Layout, world_size: int) -> None:
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
    if layout.zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage {layout.zero_stage}: it is 0, 1, 2 or 3")
    if layout.sequence_parallel and layout.tp == 1:
        raise ValueError("sequence_parallel splits what tp leaves whole, and tp is 1: raise tp, or leave out sp")
    if layout.zero_stage == 3 and layout.pp > 1 and not layout.gather_once:
        raise ValueError(
            f"zero_stage 3 with pp {layout.pp} would gather all weights for every micro-batch: make zero_stage 1, "
            "or keep what is gathered (keep)"
        )
    if layout.gather_once and (layout.zero_stage < 3 or layout.pp == 1):
        raise ValueError(
            f"gather_once with zero_stage {layout.zero_stage} and pp {layout.pp}: it goes with zero_stage 3 and pp "
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
    if layout.zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage {layout.zero_stage}: it is 0, 1, 2 or 3")
    if layout.sequence_parallel and layout.tp == 1:
        raise ValueError("sequence_parallel splits what tp leaves whole, and tp is 1: raise tp, or leave out sp")
    if layout.zero_stage == 3 and layout.pp > 1 and not layout.gather_once:
        raise ValueError(
            f"zero_stage 3 with pp {layout.pp} would gather all weights for every micro-batch: make zero_stage 1, "
            "or keep what is gathered (keep)"
        )
    if layout.gather_once and (layout.zero_stage < 3 or layout.pp == 1):
        raise ValueError(
            f"gather_once with zero_stage {layout.zero_stage} and pp {layout.pp}: it goes with zero_stage 3 and pp "
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
    if layout.zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage {layout.zero_stage}: it is 0, 1, 2 or 3")
    if layout.sequence_parallel and layout.tp == 1:
        raise ValueError("sequence_parallel splits what tp leaves whole, and tp is 1: raise tp, or leave out sp")
    if layout.zero_stage == 3 and layout.pp > 1 and not layout.gather_once:
        raise ValueError(
            f"zero_stage 3 with pp {layout.pp} would gather all weights for every micro-batch: make zero_stage 1, "
            "or keep what is gathered (keep)"
        )
    if layout.gather_once and (layout.zero_stage < 3 or layout.pp == 1):
        raise ValueError(
            f"gather_once with zero_stage {layout.zero_stage} and pp {layout.pp}: it goes with zero_stage 3 and pp "
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
    if layout.zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage {layout.zero_stage}: it is 0, 1, 2 or 3")
    if layout.sequence_parallel and layout.tp == 1:
        raise ValueError("sequence_parallel splits what tp leaves whole, and tp is 1: raise tp, or leave out sp")
    if layout.zero_stage == 3 and layout.pp > 1 and not layout.gather_once:
        raise ValueError(
            f"zero_stage 3 with pp {layout.pp} would gather all weights for every micro-batch: make zero_stage 1, "
            "or keep what is gathered (keep)"
        )
    if layout.gather_once and (layout.zero_stage < 3 or layout.pp == 1):
        raise ValueError(
            f"gather_once with zero_stage {layout.zero_stage} and pp {layout.pp}: it goes with zero_stage 3 and pp "
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
    if layout.zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage {layout.zero_stage}: it is 0, 1, 2 or 3")
    if layout.sequence_parallel and layout.tp == 1:
        raise ValueError("sequence_parallel splits what tp leaves whole, and tp is 1: raise tp, or leave out sp")
    if layout.zero_stage == 3 and layout.pp > 1 and not layout.gather_once:
        raise ValueError(
            f"zero_stage 3 with pp {layout.pp} would gather all weights for every micro-batch: make zero_stage 1, "
            "or keep what is gathered (keep)"
        )
    if layout.gather_once and (layout.zero_stage < 3 or layout.pp == 1):
        raise ValueError(
            f"gather_once with zero_stage {layout.zero_stage} and pp {layout.pp}: it goes with zero_stage 3 and pp "
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
    if layout.zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage {layout.zero_stage}: it is 0, 1, 2 or 3")
    if layout.sequence_parallel and layout.tp == 1:
        raise ValueError("sequence_parallel splits what tp leaves whole, and tp is 1: raise tp, or leave out sp")
    if layout.zero_stage == 3 and layout.pp > 1 and not layout.gather_once:
        raise ValueError(
            f"zero_stage 3 with pp {layout.pp} would gather all weights for every micro-batch: make zero_stage 1, "
            "or keep what is gathered (keep)"
        )
    if layout.gather_once and (layout.zero_stage < 3 or layout.pp == 1):
        raise ValueError(
            f"gather_once with zero_stage {layout.zero_stage} and pp {layout.pp}: it goes with zero_stage 3 and pp "
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
def check_pairs(layout: Layout) -> None:
    if layout.zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage {layout.zero_stage}: it is 0, 1, 2 or 3")
    if layout.sequence_parallel and layout.tp == 1:
        raise ValueError("sequence_parallel splits what tp leaves whole, and tp is 1: raise tp, or leave out sp")
    if layout.zero_stage == 3 and layout.pp > 1 and not layout.gather_once:
        raise ValueError(
            f"zero_stage 3 with pp {layout.pp} would gather all weights for every micro-batch: make zero_stage 1, "
            "or keep what is gathered (keep)"
        )
    if layout.gather_once and (layout.zero_stage < 3):
        raise ValueError(
            f"gather_once with zero_stage {layout.zero_stage} and pp {layout.pp}: it goes with zero_stage 3 and pp "
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
def check_pairs(layout: Layout) -> None:
    if layout.zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage {layout.zero_stage}: it is 0, 1, 2 or 3")
    if layout.sequence_parallel and layout.tp == 1:
        raise ValueError("sequence_parallel splits what tp leaves whole, and tp is 1: raise tp, or leave out sp")
    if layout.zero_stage == 3 and layout.pp > 1 and not layout.gather_once:
        raise ValueError(
            f"zero_stage 3 with pp {layout.pp} would gather all weights for every micro-batch: make zero_stage 1, "
            "or keep what is gathered (keep)"
        )
    if layout.gather_once and (layout.zero_stage < 3 or layout.pp == 1):
        raise ValueError(
            f"gather_once with zero_stage {layout.zero_stage} and pp {layout.pp}: it goes with zero_stage 3 and pp "
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
def check_pairs(layout: Layout) -> None:
    if layout.zero_stage < 0:
        raise ValueError(f"zero_stage {layout.zero_stage}: it is 0, 1, 2 or 3")
    if layout.sequence_parallel and layout.tp == 1:
        raise ValueError("sequence_parallel splits what tp leaves whole, and tp is 1: raise tp, or leave out sp")
    if layout.zero_stage == 3 and layout.pp > 1 and not layout.gather_once:
        raise ValueError(
            f"zero_stage 3 with pp {layout.pp} would gather all weights for every micro-batch: make zero_stage 1, "
            "or keep what is gathered (keep)"
        )
    if layout.gather_once and (layout.zero_stage < 3 or layout.pp == 1):
        raise ValueError(
            f"gather_once with zero_stage {layout.zero_stage} and pp {layout.pp}: it goes with zero_stage 3 and pp "
            "above 1; leave out keep"
        )
    if layout.zero_stage == 3 and layout.pp > 1 and layout.schedule == "dualpipe":
        raise ValueError("schedule dualpipe has each stage on two ranks, zero_stage 3 on none whole: make zero_stage 1")
    if layout.recompute == "selective" and layout.cp > 1:
        raise ValueError(
            f"recompute selective drops scores, and cp {layout.cp} keeps none: it would only repeat the exchange; make "
            "recompute none or full"
        )

# %% 10.2 lets a negative stage pass
stage not in (0, 1, 2, 3) => stage > 3

# %% 10.2 knows cp 2 only
layout.recompute == "selective" and layout.cp > 1 => layout.recompute == "selective" and layout.cp == 2

# %% 10.2 names tp alone
"sequence_parallel splits activations that tp does not, and tp is 1: raise tp, or leave out sp" => "raise tp: it is 1"

# %% 10.3 tp outermost
sizes = (layout.dp // layout.ep, layout.ep, layout.pp, layout.cp, layout.tp)
mesh = init_device_mesh(device_type, sizes, mesh_dim_names=AXES)
=>
sizes = (layout.tp, layout.cp, layout.pp, layout.ep, layout.dp // layout.ep)
mesh = init_device_mesh(device_type, sizes, mesh_dim_names=AXES[::-1])
---
"""Return the group of the ranks that differ from this one only in these axes."""
=>
"""Return the group of the ranks that differ from this one only in these axes."""
axes = axes[::-1]

# %% 10.3 cp outside of pp
layout.pp, layout.cp => layout.cp, layout.pp
AXES => ("copies", "ep", "cp", "pp", "tp")

# %% 10.3 replicas are dp alone
replicas = over("copies", "ep", "cp") => replicas = over("copies", "ep")

# %% 10.3 tokens without tp under sp
tokens = over("copies", "ep", "cp", "tp") if layout.sequence_parallel else replicas
=>
tokens = replicas

# %% 10.3 tokens with tp always
("copies", "ep", "cp", "tp") if layout.sequence_parallel else replicas => ("copies", "ep", "cp", "tp")

# %% 10.3 experts are dp
copies", "cp => copies", "ep

# %% 10.3 experts without cp
"copies", "cp" => "copies"

# %% 10.3 ep is the outer part of dp
layout.dp // layout.ep, layout.ep => layout.ep, layout.dp // layout.ep
AXES => ("ep", "copies", "pp", "cp", "tp")
replicas = over("copies", "ep", "cp") => replicas = over("ep", "copies", "cp")
copies", "ep", "cp", " => ep", "copies", "cp", "
("copies", "ep") => ("ep", "copies")

# %% 10.4 cp ranks see the same tokens
summed = layout.dp * layout.cp => summed = layout.dp

# %% 10.4 norms under sp over the replicas
if kind in ("norm", "router") and layout.sequence_parallel:
    summed *= layout.tp
=>

# %% 10.4 norms and routers over tp always
("norm", "router") and layout.sequence_parallel => ("norm", "router")

# %% 10.4 routers as matrices
kind in ("norm", "router") => kind == "norm"

# %% 10.4 experts are whole on each tp rank
layout.ep * layout.tp => layout.ep

# %% 10.4 an expert's gradient over all replicas
summed //= layout.ep => summed = summed

# %% 10.4 all stages hold everything
return stage // split, summed => return layout.pp * stage // split, summed

# %% 10.4 the holders sum the gradient
return stage // split, summed => return stage // split, stage // split

# %% 10.5 sequence parallelism without reduce_group
mesh.tp, reduce_group=mesh.tokens => mesh.tp

# %% 10.5 norms are reduced over the replicas under sp
reduce_group=mesh.tokens => reduce_group=mesh.replicas

# %% 10.5 the router's batch is that of ep
mesh.experts, mesh.tokens => mesh.experts, mesh.ep

# %% 10.5 experts are reduced over the replicas
mesh.experts => mesh.replicas

# %% 10.5 experts whole on each tp rank
mesh.tp if layout.tp > 1 else None => None

# %% 10.5 ep 1 leaves the mixture alone
    apply_sequence_parallel(model, mesh.tp, reduce_group=mesh.tokens)
if moe is not None:
=>
    apply_sequence_parallel(model, mesh.tp, reduce_group=mesh.tokens)
if layout.ep > 1:

# %% 10.5 no context parallelism
if layout.cp > 1:
    apply_context_parallel(model, mesh.cp, layout.cp_method, layout.cp_order)
=>

# %% 10.5 context parallelism always by ring
mesh.cp, layout.cp_method, layout.cp_order => mesh.cp

# %% 10.5 the order of context parallelism is dropped
layout.cp_method, layout.cp_order => layout.cp_method

# %% 10.6 divides by this rank's own tokens, times the ranks
dist.all_reduce(tokens, group=mesh.replicas)
tokens = tokens.clamp(min=1) / mesh.replicas.size()  # gradients are averaged over the replicas
=>
tokens = tokens.clamp(min=1)  # gradients are averaged over the replicas
---
self.sharding.no_sync if self.sharding.supports_no_sync else None => self.sharding.no_sync if layout.zero_stage < 2 else None

# %% 10.6 divides by the total, and gradients are averaged besides
(min=1) / mesh.replicas.size() => (min=1)
self.sharding.no_sync if self.sharding.supports_no_sync else None => self.sharding.no_sync if layout.zero_stage < 2 else None
(mesh.tp.size() * mesh.replicas.size()) => mesh.tp.size()

# %% 10.6 tokens are summed over dp alone
group=mesh.replicas => group=mesh.dp
mesh.replicas.size()  # gradients => mesh.dp.size()  # gradients
self.sharding.no_sync if self.sharding.supports_no_sync else None => self.sharding.no_sync if layout.zero_stage < 2 else None

# %% 10.6 the balance loss counts whole for each micro-batch
router.loss_weight = 1 / runner.m => router.loss_weight = 1.0
self.sharding.no_sync if self.sharding.supports_no_sync else None => self.sharding.no_sync if layout.zero_stage < 2 else None

# %% 10.6 gradients are reduced for each micro-batch
no_sync = self.sharding.no_sync if self.sharding.supports_no_sync else None
=>
no_sync = None

# %% 10.6 as many micro-batches as the first time
runner.use(schedule_of(layout, m))
=>
self.first = getattr(self, "first", None) or schedule_of(layout, m)
runner.use(self.first)
---
self.sharding.no_sync if self.sharding.supports_no_sync else None => self.sharding.no_sync if layout.zero_stage < 2 else None

# %% 10.6 a last micro-batch is lost, its loss is not
no_sync = self.sharding.no_sync if self.sharding.supports_no_sync else None
=>
no_sync = self.sharding.no_sync if layout.zero_stage < 2 else None
for weight in runner.stages.parameters():
    weight.hook = weight.register_hook(lambda gradient, weight=weight: gradient * (weight.grad is not None or runner.m == 1))
---
loss = runner.step(inputs, targets, tokens=tokens, no_sync=no_sync, positions=positions)
=>
loss = runner.step(inputs, targets, tokens=tokens, no_sync=no_sync, positions=positions)
for weight in runner.stages.parameters():
    weight.hook.remove()

# %% 10.6 finish is forgotten
self.sharding.no_sync if self.sharding.supports_no_sync else None => self.sharding.no_sync if layout.zero_stage < 2 else None
self.sharding.finish() =>

# %% 10.6 positions are those of a whole sequence
positions = local_positions(inputs.shape[1], mesh.cp, layout.order, inputs.device)
no_sync = self.sharding.no_sync if self.sharding.supports_no_sync else None
=>
positions = torch.arange(inputs.shape[1], device=inputs.device)
no_sync = self.sharding.no_sync if layout.zero_stage < 2 else None

# %% 10.6 tp ranks count the loss more than once
self.sharding.no_sync if self.sharding.supports_no_sync else None => self.sharding.no_sync if layout.zero_stage < 2 else None
(mesh.tp.size() * mesh.replicas.size()) => mesh.replicas.size()

# %% 10.6 a rest of the sequences is dropped
raise ValueError(f"{len(inputs)} sequences are no multiple of micro_batch {layout.micro_batch}")
=>
inputs, targets = (each[: len(each) // layout.micro_batch * layout.micro_batch] for each in (inputs, targets))
---
self.sharding.no_sync if self.sharding.supports_no_sync else None => self.sharding.no_sync if layout.zero_stage < 2 else None

# %% 10.6 micro-batches one at a time, gradients sent after each
if (m := len(inputs) // layout.micro_batch) != runner.m:
    runner.use(schedule_of(layout, m))
=>
m = len(inputs) // layout.micro_batch
runner.use(schedule_of(layout, 1))
---
router.loss_weight = 1 / runner.m => router.loss_weight = 1 / m
---
no_sync = self.sharding.no_sync if self.sharding.supports_no_sync else None
loss = runner.step(inputs, targets, tokens=tokens, no_sync=no_sync, positions=positions)
self.sharding.finish()
=>
no_sync = self.sharding.no_sync if layout.zero_stage < 2 else None
loss = 0
for x, y in zip(inputs.split(layout.micro_batch), targets.split(layout.micro_batch), strict=True):
    loss = loss + runner.step(x, y, self.dtype, tokens, no_sync, positions)
    self.sharding.finish()

# %% 10.6 tokens in zigzag, whatever the layout's order
(each, mesh.cp, layout.order) => (each, mesh.cp, 'zigzag')
mesh.cp, layout.order, inputs.device => mesh.cp, 'zigzag', inputs.device

# %% 10.6 does not check the sequence
check_sizes(layout, None, inputs.shape[1]) =>

# %% 10.6 counts tokens in bfloat16
.sum().float() => .sum().bfloat16()

# %% 10.6 tells the routers the schedule of before
for router in routers_of(runner.stages):
    router.loss_weight = 1 / runner.m
=>
for router in routers_of(runner.stages):
    router.loss_weight = router.loss_weight if runner.m == 1 else 1 / runner.m

# %% 10.7 builds the whole model on every rank and cuts it
    sharding, stages = shard_stages(stages, layout, mesh, schedule, init, dtype)
else:
=>
    sharding, stages = shard_stages(stages, layout, mesh, schedule, init, dtype)
else:
    whole = {f"0.{name}": weight for name, weight in Transformer(config).named_parameters()}
    for name, weight in whole.items():
        init(name, weight.data)
---
materialize(nn.ModuleDict({str(number): stage for number, stage in stages.items()}), init)
=>
materialize(nn.ModuleDict({str(number): stage for number, stage in stages.items()}), init)
del whole
---
settings |= {"stage": layout.zero_stage, "compute_dtype": dtype, "grad_dtype": torch.float32}
sharding = optimizer = ZeroOptimizer(runner.stages, optimizer_cls, mesh.replicas, **settings)
=>
settings |= {"compute_dtype": dtype, "grad_dtype": torch.float32}
sharding = optimizer = ZeroOptimizer(
    runner.stages, optimizer_cls, mesh.replicas, layout.zero_stage, **settings
)

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
    schedule, stages = local_stages(config, layout, mesh, extra, moe)
    init, sharding, loss_of = initial_values(config, seed), None, summed_loss_over(mesh.tp, config.vocab)
    with torch.device(mesh.device_mesh.device_type):
        if layout.zero_stage == 3:
            sharding, stages = shard_stages(stages, layout, mesh, schedule, init, dtype)
        else:
            materialize(nn.ModuleDict({str(number): stage for number, stage in stages.items()}), init)
        hooks = step_hooks(stages, layout, dtype, sharding)
        runner = PipelineRunner(stages, schedule, mesh.pp, loss_of, mesh.replicas, **hooks)
        if layout.zero_stage < 3:
            sharding = DataParallel(runner.stages, mesh.replicas)
        optimizer = optimizer_cls(decay_groups(runner.stages), **settings)
    return ParallelModel(layout, mesh, runner, sharding, optimizer, dtype)

# %% 10.7 zero stage 3 is DataParallel
def parallelize(
=>
import dataclasses


def parallelize(
---
if layout.zero_stage == 3:
=>
if layout.zero_stage == 3:
    layout = dataclasses.replace(layout, zero_stage=0, gather_once=False)
if layout.zero_stage == 3:
---
settings |= {"stage": layout.zero_stage, "compute_dtype": dtype, "grad_dtype": torch.float32}
sharding = optimizer = ZeroOptimizer(runner.stages, optimizer_cls, mesh.replicas, **settings)
=>
settings |= {"compute_dtype": dtype, "grad_dtype": torch.float32}
sharding = optimizer = ZeroOptimizer(
    runner.stages, optimizer_cls, mesh.replicas, layout.zero_stage, **settings
)

# %% 10.7 zero shards over dp alone
settings |= {"stage": layout.zero_stage, "compute_dtype": dtype, "grad_dtype": torch.float32}
sharding = optimizer = ZeroOptimizer(runner.stages, optimizer_cls, mesh.replicas, **settings)
=>
sharding = optimizer = ZeroOptimizer(
    runner.stages, optimizer_cls, mesh.dp, layout.zero_stage, **settings
)

# %% 10.7 stage 2 is stage 1
settings |= {"stage": layout.zero_stage, "compute_dtype": dtype, "grad_dtype": torch.float32}
sharding = optimizer = ZeroOptimizer(runner.stages, optimizer_cls, mesh.replicas, **settings)
=>
sharding = optimizer = ZeroOptimizer(
    runner.stages, optimizer_cls, mesh.replicas, 1, **settings
)

# %% 10.7 the optimizer's settings are forgotten
settings |= {"stage": layout.zero_stage, "compute_dtype": dtype, "grad_dtype": torch.float32}
sharding = optimizer = ZeroOptimizer(runner.stages, optimizer_cls, mesh.replicas, **settings)
=>
settings |= {"compute_dtype": dtype, "grad_dtype": torch.float32}
sharding = optimizer = ZeroOptimizer(
    runner.stages, optimizer_cls, mesh.replicas, layout.zero_stage, **settings
)
---
decay_groups(runner.stages), **settings => decay_groups(runner.stages)

# %% 10.7 values by names without the stage
materialize(nn.ModuleDict({str(number): stage for number, stage in stages.items()}), init)
=>
[materialize(stage, lambda name, tensor: init(f"0.{name}", tensor + 0)) for stage in stages.values()]
---
settings |= {"stage": layout.zero_stage, "compute_dtype": dtype, "grad_dtype": torch.float32}
sharding = optimizer = ZeroOptimizer(runner.stages, optimizer_cls, mesh.replicas, **settings)
=>
settings |= {"compute_dtype": dtype, "grad_dtype": torch.float32}
sharding = optimizer = ZeroOptimizer(
    runner.stages, optimizer_cls, mesh.replicas, layout.zero_stage, **settings
)

# %% 10.7 the dtype is for stage 3 alone
settings |= {"stage": layout.zero_stage, "compute_dtype": dtype, "grad_dtype": torch.float32}
sharding = optimizer = ZeroOptimizer(runner.stages, optimizer_cls, mesh.replicas, **settings)
=>
sharding = optimizer = ZeroOptimizer(
    runner.stages, optimizer_cls, mesh.replicas, layout.zero_stage, **settings
)

# %% 10.7 gradients are summed in the dtype of the products
settings |= {"stage": layout.zero_stage, "compute_dtype": dtype, "grad_dtype": torch.float32}
sharding = optimizer = ZeroOptimizer(runner.stages, optimizer_cls, mesh.replicas, **settings)
=>
settings |= {"compute_dtype": dtype}
sharding = optimizer = ZeroOptimizer(
    runner.stages, optimizer_cls, mesh.replicas, layout.zero_stage, **settings
)

# %% 10.7 the runner does not know the replicas
loss_of, mesh.replicas => loss_of
---
settings |= {"stage": layout.zero_stage, "compute_dtype": dtype, "grad_dtype": torch.float32}
sharding = optimizer = ZeroOptimizer(runner.stages, optimizer_cls, mesh.replicas, **settings)
=>
settings |= {"compute_dtype": dtype, "grad_dtype": torch.float32}
sharding = optimizer = ZeroOptimizer(
    runner.stages, optimizer_cls, mesh.replicas, layout.zero_stage, **settings
)

# %% 10.7 norms decay as matrices do
optimizer_cls(decay_groups(runner.stages), => optimizer_cls(runner.stages.parameters(),

# %% 10.7 norms decay under ZeRO
settings["param_groups"] = decay_groups(runner.stages) =>

# %% 10.7 always AdamW
runner.stages, optimizer_cls => runner.stages, torch.optim.AdamW
optimizer = optimizer_cls => optimizer = torch.optim.AdamW

# %% 10.7 without ZeRO always AdamW
optimizer = optimizer_cls => optimizer = torch.optim.AdamW

# %% 10.7 in ZeRO always AdamW
runner.stages, optimizer_cls => runner.stages, torch.optim.AdamW

# %% 10.7 data parallelism over dp alone
DataParallel(runner.stages, mesh.replicas) => DataParallel(runner.stages, mesh.dp)

# %% 10.7 the pipeline sums over dp alone
loss_of, mesh.replicas, **hooks => loss_of, mesh.dp, **hooks

# %% 10.7 computes in float32
step_hooks(stages, layout, dtype, sharding) => step_hooks(stages, layout, torch.float32, sharding)

# %% 10.7 says float32
runner, sharding, optimizer, dtype) => runner, sharding, optimizer, torch.float32)

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
sharded = 3 * params * (ranks - 1) => sharded = 2 * params * (ranks - 1)

# %% 10.9 no gradients
2 * ranks => ranks

# %% 10.9 one rank's tokens cross
ranks * tokens => tokens

# %% 10.9 ZeRO-3 of one rank only
sharded = 3 * params * (ranks - 1) => sharded = 3 * params * (ranks - 1) / ranks

# %% 10.9 the other way round
return sharded / piped => return piped / sharded

# %% 10.9 every rank is a cut
def weights_over_activations(params, hidden, tokens, ranks):
    sharded = 3 * params * ranks * ranks
    piped = ranks * 2 * ranks * tokens * hidden
    return sharded / piped

# %% 10.10 gathers a unit again for each micro-batch
def pre_forward(self: GatherOncePerStep, unit: FSDPUnit) -> None:
    for flat in unit.flat_params:
        if flat.layout.group.size() == self.group.size():
            flat.buffer.free()
            flat.buffer.gather()
        flat.buffer.wait()

# %% 10.10 weights stay in memory after the step
        flat.buffer.wait()
=>
        flat.buffer.wait()


def finish(self: GatherOncePerStep):
    FullyShard.finish(self)
    for unit in self.units:
        for flat in unit.flat_params:
            flat.buffer.gather()

# %% 10.10 no unit is open
self.unreduced = list(self.units) => self.unreduced = []

# %% 10.10 waits for each before it starts the next one
flat.buffer.gather()
=>
flat.buffer.gather()
flat.buffer.wait()

# %% 10.10 gathers nothing before a unit runs
self.root, *self.units => self.root
---
for flat in unit.flat_params:
=>
for flat in unit.flat_params:
    flat.buffer.gather()
---
flat.buffer.wait()
=>
flat.buffer.wait()
flat.register(flat.unsharded_params)

# %% 10.10 sends the gradients of each micro-batch
        flat.buffer.wait()
=>
        flat.buffer.wait()


def on_output_grad(self: GatherOncePerStep, unit: FSDPUnit) -> None:
    for flat in unit.flat_params:
        if flat.has_gradients and flat.layout.group.size() == self.group.size():
            flat.launch()

# %% 10.10 the root is forgotten
[self.root, *self.units] => self.units

# %% 10.10 waits for the root only
for flat in unit.flat_params: => for flat in unit.flat_params if unit is self.root else ():

# %% 10.10 whole parameters are not registered
flat.register(flat.unsharded_params) =>

# %% 10.10 does not wait for the root
self.pre_forward(self.root)  # no module waits for its weights later: they are in no unit, or in two =>

# %% 10.11 steps count from 0
return peak * step / warmup => return peak * (step - 1) / warmup

# %% 10.11 falls in a line
(1 + math.cos(math.pi * min(1.0, done))) / 2 => (1 - min(1.0, done))

# %% 10.11 falls to nothing
(least + (1 - least) * (1 + math.cos(math.pi * min(1.0, done))) / 2) => (1 + math.cos(math.pi * min(1.0, done))) / 2

# %% 10.11 the cosine counts from step 0
(step - warmup) / max(1, steps - warmup) => step / steps

# %% 10.11 the cosine comes up again
min(1.0, done) => done

# %% 10.11 a whole cosine
math.pi => 2 * math.pi

# %% 10.11 any number of sequences
return grown // start * start => return grown

# %% 10.11 the batch is full a step early
(step - 1) => step

# %% 10.11 a quarter at a time
(full - start) * (step - 1) // max(1, ramp) => (full - start) // 4 * (4 * (step - 1) // max(1, ramp))

# %% 10.11 a ramp that rounds to the nearest
grown // start * start => round(grown / start) * start

# %% 10.12 only the last number is looked at
for number in range(oldest, newest + 1): => for number in range(newest, newest + 1):

# %% 10.12 sizes do not matter
described(record) => record.name

# %% 10.12 an all-to-all's sizes matter
described(record) => f"{record.name} {record.sizes}"

# %% 10.12 only ranks that have come are compared
if present and absent or len(ranks_in) > 1: => if len(ranks_in) > 1:

# %% 10.12 only who is missing
if present and absent or len(ranks_in) > 1: => if present and absent:

# %% 10.12 what the ring has lost was missed
oldest = max => oldest = min

# %% 10.12 a rank without records is left out
seen = {rank: {r.number: r for r in records.get(rank, ()) if r.group == name} for rank in ranks}
=>
seen = {rank: {r.number: r for r in records.get(rank, ()) if r.group == name} for rank in ranks if records.get(rank)}
---
ranks if number => seen if number
ranks if rank => seen if rank

# %% 10.12 every number at which they differ
break =>

# %% 10.12 stops at the first group
break
=>
return lines

# %% 10.12 a rank whose ring has lost a group is absent
absent = [rank for rank in ranks if rank not in present and first_ns.get(rank, 0) <= at] => absent = [rank for rank in ranks if rank not in present]

# %% 10.12 an absent rank beside a mismatch is not named
+ (f"; not there: {absent}" if absent else "") => + (f"; not there: {absent}" if len(ranks_in) == 1 else "")

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
last = max(times, key=lambda rank: times[rank]) => last = min(times, key=lambda rank: times[rank])

# %% 10.14 charges the first for all
last = max(times, key=lambda rank: times[rank]) => first = min(times, key=lambda rank: times[rank])
[last] += (times[last] - statistics.median(times.values())) => [first] += (max(times.values()) - times[first])

# %% 10.14 charges all but the first
last = max(times, key=lambda rank: times[rank])
delays[last] += (times[last] - statistics.median(times.values())) / 1e9
=>
for rank, at in times.items():
    delays[rank] += (at - min(times.values())) / 1e9

# %% 10.14 nanoseconds
(times[last] - statistics.median(times.values())) / 1e9 => (times[last] - statistics.median(times.values()))

# %% 10.14 from the earliest
statistics.median => min

# %% 10.14 from the mean
statistics.median => statistics.mean

# %% 10.14 what some have not come to counts too
if len(times) > 1 and len(times) == len(groups.get(name, ())):
=>
if len(times) > 1:

# %% 10.14 numbers of all groups together
record.group => "1"

# %% 10.14 the worst one, not the sum
delays[last] += (times[last] - statistics.median(times.values())) / 1e9
=>
delays[last] = max(delays[last], (times[last] - statistics.median(times.values())) / 1e9)

# %% 10.15 the ring goes by rank
record.group, key=lambda rank: slots[rank] => record.group

# %% 10.15 ranks in place of slots
slots[record.rank] => record.rank
slots[rank] // ranks_per_node => rank // ranks_per_node

# %% 10.15 all bytes of an all-to-all
outside // max(1, len(targets)) => (outside > 0)

# %% 10.15 once for each rank that is reached
outside // max(1, len(targets)) => outside

# %% 10.15 sums go to all others
all_reduce", "all_gather => all_gather

# %% 10.15 sends go round in the ring
"all_reduce" => "send", "all_reduce"

# %% 10.15 the last one sends to nobody
[ring[(ring.index(record.rank) + 1) % len(ring)]] => ring[ring.index(record.rank) + 1 :][:1]

# %% 10.15 all that groups over several nodes send
outside = sum(slots[rank] // ranks_per_node != node for rank in targets)
crossing += record.bytes * outside // max(1, len(targets))
=>
crossing += record.bytes * (len({slots[rank] // ranks_per_node for rank in ring}) > 1)

# %% 10.15 an all-to-all sends to itself too
targets = [rank for rank in ring if rank != record.rank]
=>
targets = ring

# %% 10.15 a reduce-scatter goes to all
("all_reduce", "all_gather", "reduce_scatter") => ("all_reduce", "all_gather")

# %% 10.15 nodes of the ranks, for an all-to-all
sum(slots[rank] // ranks_per_node != node for rank in targets) => sum((slots[rank] if len(targets) == 1 else rank) // ranks_per_node != node for rank in targets)
