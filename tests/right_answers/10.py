"""Right answers in another style than the solutions, that the checks of notebook 10 must accept."""

# %% 10.1 by strides, and by a view of all ranks
from course_lib.five_d.cast_weights import torch


def coordinates(rank: int, layout: Layout) -> dict[str, int]:
    return dict(
        dp=rank // (layout.pp * layout.cp * layout.tp),
        pp=rank // (layout.cp * layout.tp) % layout.pp,
        cp=rank // layout.tp % layout.cp,
        tp=rank % layout.tp,
    )


def groups_along(layout: Layout, *axes: str) -> list[list[int]]:
    order = ("dp", "pp", "cp", "tp")
    ranks = torch.arange(layout.ranks).view([getattr(layout, axis) for axis in order])
    fixed = [place for place, axis in enumerate(order) if axis not in axes]
    moving = [place for place, axis in enumerate(order) if axis in axes]
    size = layout.ranks
    for place in fixed:
        size //= ranks.shape[place]
    return ranks.permute(*fixed, *moving).reshape(-1, size).tolist()

# %% 10.2 rules in a list, in other words
def check_ranks(layout: Layout, world_size: int) -> None:
    for name in ("dp", "pp", "cp", "tp", "ep", "micro_batch", "virtual"):
        if getattr(layout, name) < 1:
            raise ValueError(f"{name} is {getattr(layout, name)}: make it 1 or more")
    dp, rest = divmod(world_size, layout.pp * layout.cp * layout.tp)
    if rest:
        raise ValueError(
            f"pp {layout.pp} x cp {layout.cp} x tp {layout.tp} does not divide the {world_size} ranks: change one of them"
        )
    if dp != layout.dp:
        raise ValueError(f"dp {layout.dp} makes {layout.ranks} ranks, there are {world_size}: set dp {dp}")
    if dp // layout.ep * layout.ep != dp:
        raise ValueError(f"dp {dp} is no multiple of ep {layout.ep}: choose another ep")


def check_pairs(layout: Layout) -> None:
    stage, pipeline = layout.zero_stage, layout.pp > 1
    rules = [
        (stage not in range(4), f"zero_stage is {stage}: choose 0, 1, 2 or 3"),
        (layout.sequence_parallel and layout.tp < 2, "sequence_parallel needs tp above 1, and tp is 1: change tp"),
        (
            stage == 3 and pipeline and not layout.gather_once,
            f"with zero_stage 3, pp {layout.pp} gathers anew for each micro-batch: set zero_stage 1, or keep (gather_once)",
        ),
        (
            layout.gather_once and not (stage == 3 and pipeline),
            f"gather_once needs zero_stage 3 (it is {stage}) and pp above 1 (it is {layout.pp}): drop keep",
        ),
        (
            layout.schedule == "dualpipe" and stage == 3 and pipeline,
            "dualpipe holds each stage twice, zero_stage 3 not even once: another schedule, or zero_stage 1",
        ),
        (
            layout.recompute == "selective" and layout.cp > 1,
            f"selective recompute saves nothing with cp {layout.cp}: set recompute to full or none",
        ),
    ]
    for broken, message in rules:
        if broken:
            raise ValueError(message)

# %% 10.3 the groups of several axes made rank by rank
def build_mesh(layout: Layout, device_type: str | None = None) -> Mesh:
    check_ranks(layout, dist.get_world_size())
    if device_type is None:
        device_type = "cpu" if dist.get_backend() == "gloo" else torch.accelerator.current_accelerator().type
    shape = [layout.dp // layout.ep, layout.ep, layout.pp, layout.cp, layout.tp]
    cube = init_device_mesh(device_type, tuple(shape), mesh_dim_names=AXES)

    def joined(*axes):
        moving = [AXES.index(axis) for axis in axes]
        fixed = [place for place in range(len(AXES)) if place not in moving]
        size = 1
        for place in moving:
            size *= shape[place]
        rows = cube.mesh.permute(*fixed, *moving).reshape(-1, size)
        return dist.new_subgroups_by_enumeration(rows.tolist())[0]

    replicas = joined("copies", "ep", "cp")
    tokens = joined("copies", "ep", "cp", "tp") if layout.sequence_parallel else replicas
    pp, cp, tp, ep = (cube.get_group(axis) for axis in ("pp", "cp", "tp", "ep"))
    return Mesh(cube, joined("copies", "ep"), pp, cp, tp, ep, replicas, joined("copies", "cp"), tokens)

# %% 10.4 kind by kind
def copies(kind, layout):
    replicas = layout.dp * layout.cp
    if kind == "matrix":
        return replicas, replicas
    if kind == "expert":
        return replicas // layout.ep, replicas // layout.ep
    return replicas * layout.tp, replicas * (layout.tp if layout.sequence_parallel else 1)

# %% 10.5 a table of verbs
def split_model(
    config: ModelConfig, layout: Layout, mesh: Mesh, extra: Iterable[Callable] = (), moe: dict | None = None
) -> nn.Module:
    with torch.device("meta"):
        model = Transformer(config)
    cut, mixed = layout.tp > 1, moe is not None
    verbs = [
        (mixed, lambda: apply_moe(model, **moe)),
        (cut, lambda: apply_tensor_parallel(model, mesh.tp)),
        (layout.sequence_parallel, lambda: apply_sequence_parallel(model, mesh.tp, mesh.tokens)),
        (mixed, lambda: apply_expert_parallel(model, mesh.ep, mesh.experts, mesh.tokens, mesh.tp if cut else None)),
        (layout.cp > 1, lambda: apply_context_parallel(model, mesh.cp, layout.cp_method, layout.cp_order)),
    ]
    for wanted, verb in verbs:
        if wanted:
            verb()
    for verb in extra:
        verb(model)
    return model

# %% 10.6 counts ranks by the world's size
def gradients(self: ParallelModel, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    layout, mesh, runner = self.layout, self.mesh, self.runner
    sequences, length = inputs.shape
    check_sizes(layout, None, length)
    micro_batches, rest = divmod(sequences, layout.micro_batch)
    if rest:
        raise ValueError(f"micro_batch {layout.micro_batch} does not divide {sequences} sequences")
    if micro_batches != runner.m:
        runner.use(schedule_of(layout, micro_batches))
    for router in routers_of(runner.stages):
        router.loss_weight = 1 / micro_batches
    inputs = shard_sequence(inputs, mesh.cp, layout.order)
    targets = shard_sequence(targets, mesh.cp, layout.order)
    count = targets.ne(IGNORED).sum(dtype=torch.float32)
    dist.all_reduce(count, group=mesh.replicas)
    mean_count = torch.clamp(count, min=1).div(dist.get_world_size(mesh.replicas))
    quiet = None if layout.zero_stage >= 2 else self.sharding.no_sync
    places = local_positions(inputs.shape[1], mesh.cp, layout.order, inputs.device)
    loss = runner.step(inputs, targets, self.dtype, mean_count, quiet, places)
    self.sharding.finish()
    dist.all_reduce(loss)
    return loss * mesh.pp.size() / dist.get_world_size()

# %% 10.7 stage by stage of ZeRO
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
    schedule, own = local_stages(config, layout, mesh, extra, moe)
    init, sharding, loss_of = initial_values(config, seed), None, summed_loss_over(mesh.tp, config.vocab)
    with torch.device(mesh.device_mesh.device_type):
        if layout.zero_stage < 3:
            materialize(nn.ModuleDict({str(number): stage for number, stage in own.items()}), init)
            hooks = step_hooks(own, layout, dtype, None)
            runner = PipelineRunner(own, schedule, mesh.pp, loss_of, mesh.replicas, **hooks)
            if layout.zero_stage:
                optimizer = ZeroOptimizer(
                    runner.stages,
                    optimizer_cls,
                    mesh.replicas,
                    stage=layout.zero_stage,
                    grad_dtype=torch.float32,
                    compute_dtype=dtype,
                    param_groups=decay_groups(runner.stages),
                    **settings,
                )
                sharding = optimizer
            else:
                sharding = DataParallel(runner.stages, mesh.replicas)
                optimizer = optimizer_cls(decay_groups(runner.stages), **settings)
        else:
            sharding, sharded = shard_stages(own, layout, mesh, schedule, init, dtype)
            hooks = step_hooks(sharded, layout, dtype, sharding)
            runner = PipelineRunner(sharded, schedule, mesh.pp, loss_of, mesh.replicas, **hooks)
            optimizer = optimizer_cls(decay_groups(runner.stages), **settings)
    return ParallelModel(layout, mesh, runner, sharding, optimizer, dtype)

# %% 10.8 computed from the sizes
batch, seq, hidden, heads = 2, 16, 32, 4
apart = [batch, seq // 2, hidden]
shapes = {name: list(apart) for name in ("attention_norm", "o_proj", "mlp_norm", "mlp")}
shapes["core"] = [batch, seq, heads // 2, hidden // heads]

# %% 10.9 shortened
def weights_over_activations(params, hidden, tokens, ranks):
    return 1.5 * params / (hidden * tokens * ranks)

# %% 10.10 unit by unit
def gather(self: GatherOncePerStep) -> None:
    self._start(self.root)
    for unit in self.units:
        self._start(unit)
    self.unreduced = [unit for unit in self.units]
    for part in self.root.flat_params:
        part.buffer.wait()


def _start(self: GatherOncePerStep, unit: FSDPUnit) -> None:
    for part in unit.flat_params:
        part.buffer.gather()
        part.register(part.unsharded_params)


def pre_forward(self: GatherOncePerStep, unit: FSDPUnit) -> None:
    for buffer in [part.buffer for part in unit.flat_params]:
        buffer.wait()

# %% 10.11 by the square of a cosine, and by exact fractions
from fractions import Fraction


def learning_rate(step: int, peak: float, warmup: int, steps: int, least: float = 0.1) -> float:
    if step >= steps > warmup:
        return least * peak
    if step >= warmup:
        share = math.cos(math.pi / 2 * (step - warmup) / max(1, steps - warmup)) ** 2
        return peak * share + least * peak * (1 - share)
    return step / warmup * peak


def batch_at(step: int, start: int, full: int, ramp: int) -> int:
    if ramp < step:
        return full
    grown = math.floor(start + (full - start) * Fraction(step - 1, ramp))
    return grown - grown % start

# %% 10.12 a group at a time, by a function of its own
def find_desync(groups: dict[str, list[int]], records: dict[int, list[CollectiveRecord]]) -> list[str]:
    began = {rank: min((flight.time_ns for flight in flights), default=0) for rank, flights in records.items()}

    def line_of(name: str, ranks: list[int]) -> str | None:
        by_number = {}
        lowest = []
        for rank in ranks:
            own = [flight for flight in records.get(rank, []) if flight.group == name]
            lowest += [min(flight.number for flight in own)] if own else []
            for flight in own:
                by_number.setdefault(flight.number, {})[rank] = flight
        for number in sorted(by_number):
            if number < max(lowest):
                continue
            there = by_number[number]
            earliest = min(flight.time_ns for flight in there.values())
            missing = [rank for rank in ranks if rank not in there and began.get(rank, 0) <= earliest]
            kinds = {}
            for rank in sorted(there, key=ranks.index):
                kinds.setdefault(described(there[rank]), []).append(rank)
            if missing or len(kinds) > 1:
                text = f"group {ranks}, number {number}: "
                text += "; ".join(f"{who} in {what}" for what, who in kinds.items())
                return text + (f"; not there: {missing}" if missing else "")
        return None

    lines = (line_of(name, ranks) for name, ranks in groups.items())
    return [line for line in lines if line]

# %% 10.13 the ranks of the circle in another order
verdict = dict(A=("left", [7]), B=("circle", [4, 1]), C=("alone", [7]))

# %% 10.14 sorts those that came
from collections import defaultdict


def straggler_delay(groups: dict[str, list[int]], records: dict[int, list[CollectiveRecord]]) -> dict[int, float]:
    arrivals = defaultdict(list)
    for rank in records:
        for flight in records[rank]:
            arrivals[flight.group, flight.number].append((flight.time_ns, rank))
    waited = {rank: 0.0 for rank in records}
    for (group, _), came in arrivals.items():
        size = len(groups[group]) if group in groups else 0
        if size < 2 or len(came) < size:
            continue
        came.sort()
        middle = (came[(size - 1) // 2][0] + came[size // 2][0]) / 2
        waited[came[-1][1]] += (came[-1][0] - middle) * 1e-9
    return waited

# %% 10.15 a function for who is reached
def inter_node_bytes(traffic: Traffic, slots: list[int], ranks_per_node: int) -> int:
    node = [slot // ranks_per_node for slot in slots]

    def leaving(record) -> int:
        rank = record.rank
        if record.collective == "send":
            return record.bytes if node[record.peer] != node[rank] else 0
        if record.collective in {"all_reduce", "all_gather", "reduce_scatter"}:
            after = [other for other in record.group if slots[other] > slots[rank]]
            following = min(after or record.group, key=slots.__getitem__)
            return record.bytes if node[following] != node[rank] else 0
        others = [other for other in record.group if other != rank]
        away = len([other for other in others if node[other] != node[rank]])
        return record.bytes * away // len(others) if others else 0

    return sum(map(leaving, traffic.records))
