"""Five dimensions at once: a model on the meta device, and the verbs of notebooks 04 to 09 in their order.

    layout = Layout.parse("dp2,pp2,tp2,sp,zero1")
    mesh = build_mesh(layout)
    parallel = parallelize(config, layout, mesh, lr=1e-3)
    loss, norm = parallel.step(inputs, targets)            # each [b / dp, s]: the sequences of this rank's dp place

    tensor, sequence, expert, context     change what a layer computes      on the meta device: shapes alone
    extra                                 kernels, FP8 (notebooks 12 on)    on the meta device
    stages, recompute                     cut the model into pieces         on the meta device
    materialize, or fully_shard           this rank's parts get values      one whole tensor at a time
    runner, DataParallel or ZeRO          who sends which gradients when    once a step

Every number depends on the seed and a parameter's name alone, so all layouts start from the same model, and see the
same batches. (The Ultra-Scale Playbook, chapter 8; Llama Team 2024, The Llama 3 Herd of Models, §3.3.2.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn

from course_lib.context_parallel.model import apply_context_parallel
from course_lib.data_parallel.replicas import DataParallel
from course_lib.expert_parallel.mixture import apply_moe
from course_lib.expert_parallel.model import apply_expert_parallel
from course_lib.expert_parallel.router import Routing, routers_of
from course_lib.five_d.cast_weights import CastWeights
from course_lib.five_d.gather_once import GatherOncePerStep
from course_lib.five_d.layouts import Layout, check_layout, check_sizes, schedule_of
from course_lib.five_d.meshes import Mesh, shard_groups
from course_lib.pipeline.norm import clip_grad_norm_
from course_lib.pipeline.runner import PipelineRunner
from course_lib.pipeline.schedules import Schedule, num_stages
from course_lib.pipeline.stages import split_stages
from course_lib.pipeline.tied_weights import sync_tied_weights
from course_lib.recompute.modes import IGNORED, apply_recompute, summed_loss
from course_lib.sequence_parallel.model import apply_sequence_parallel
from course_lib.sequence_parallel.shards import local_positions, shard_sequence
from course_lib.single_gpu.model import ModelConfig, Transformer, init_parameter, plain_name
from course_lib.single_gpu.placement import placement_of
from course_lib.single_gpu.training import decay_groups
from course_lib.tensor_parallel.model import apply_tensor_parallel
from course_lib.tensor_parallel.shards import materialize, shard_init
from course_lib.tensor_parallel.vocabulary import vocab_parallel_cross_entropy
from course_lib.zero.full_sharding import FullyShard
from course_lib.zero.optimizer import ZeroOptimizer
from course_lib.zero.sharded_models import fully_shard


# exercise 10.5
def split_model(
    config: ModelConfig, layout: Layout, mesh: Mesh, extra: Iterable[Callable] = (), moe: dict | None = None
) -> nn.Module:
    """Make a `Transformer` on the meta device, split over tp, ep and cp by the verbs of notebooks 06 to 08, in order.

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
        apply_context_parallel(model, mesh.cp, layout.cp_method, layout.cp_order)
    for verb in extra:
        verb(model)
    return model


def initial_values(config: ModelConfig, seed: int) -> Callable[[str, torch.Tensor], None]:
    """init(name, whole tensor) of numbered stages (3.blocks.7.mlp_norm.weight). A tied head is the embedding."""

    def init(name: str, tensor: torch.Tensor) -> None:
        name = plain_name(name.split(".", 1)[1])
        init_parameter("embedding.weight" if config.tied and name == "head.weight" else name, tensor, config, seed)

    return init


def shard_stages(
    stages: dict[int, nn.Module], layout: Layout, mesh: Mesh, schedule: Schedule, init: Callable, dtype: torch.dtype
) -> tuple[FullyShard, dict[int, nn.Module]]:
    """ZeRO stage 3 of this rank's meta-device stages: what gathers and sends, and the stages to run."""
    settings = {"compute_dtype": None if dtype == torch.float32 else dtype, "reduce_dtype": torch.float32}
    group = shard_groups(layout, mesh)
    if layout.pp == 1:
        fill = shard_init(stages[0], lambda name, tensor: init(f"0.{name}", tensor))
        whole = fully_shard(stages[0], group, **settings, init=fill)
        return whole, {0: whole}
    own = nn.ModuleDict({str(number): stage for number, stage in stages.items()})
    copies = sync_tied_weights(
        own, schedule, mesh.pp, mesh.replicas
    )  # tied embeddings: sharded over both stages' ranks
    kept = fully_shard(own, group, **settings, init=shard_init(own, init), wrapper=GatherOncePerStep)
    kept.send_late(copies.groups.values())
    return kept, stages


def is_set(flag: torch.Tensor) -> bool:
    """Whether it is, read on the host. (A dry run has no numbers to read, and takes no for an answer.)"""
    return bool(flag)


class ParallelModel:
    """A rank's part of a model: its stages, what sends their gradients, and its optimizer. `parallelize` returns it:
    `loss, norm = parallel.step(inputs, targets)`.

    dtype: of weights as the stages compute with them, and so of hidden states and what stages send. Each weight is cast
    once a step; under ZeRO-3 without a pipeline, a rank's piece of it before each gather. Values, states, and gradients
    as they are summed and sent are float32, whatever the ZeRO stage. Raises ValueError for float16.
    """

    def __init__(self, layout: Layout, mesh: Mesh, runner: PipelineRunner, sharding, optimizer, dtype: torch.dtype):
        if dtype == torch.float16:
            raise ValueError("float16 needs a loss scale, which this model's step does not have: take bfloat16")
        self.layout, self.mesh, self.runner, self.sharding = layout, mesh, runner, sharding
        self.optimizer, self.dtype = optimizer, dtype
        if layout.zero_stage == 0 and dtype != torch.float32:
            casts = CastWeights(runner.stages, dtype)
            runner.prepare, runner.release = casts.cast, casts.restore

    @property
    def stages(self) -> nn.ModuleDict:
        """This rank's stages, by number as a word."""
        return self.runner.stages

    @property
    def config(self) -> ModelConfig:
        """The sizes of the whole model."""
        return next(getattr(stage, "module", stage).config for stage in self.stages.values())

    @property
    def routing(self) -> Routing | None:
        """The routing of all mixtures; None without experts. Every stage has it, even one without layers."""
        return next(getattr(stage, "module", stage).routing for stage in self.stages.values())

    def step(
        self, inputs: torch.Tensor, targets: torch.Tensor, max_norm: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients, clipped by the norm of all ranks', and the optimizer's step; inputs and targets each [b / dp, s].

        All ranks of one dp place come with the same ones. Returns the loss of the whole batch, and the norm. Where one
        of them is not finite, no weight, moment or counter changes, on any rank. torch's fused Adam and AdamW skip that
        step on the device, and the host does not learn of it. For another optimizer the host waits for loss and norm.
        """
        self.optimizer.zero_grad()
        loss = self.gradients(inputs, targets)
        norm = clip_grad_norm_(self.runner, max_norm, self.optimizer if self.layout.zero_stage in (1, 2) else None)
        inner = getattr(self.optimizer, "optimizer", self.optimizer)  # what ZeRO's steps with
        bad = ~(loss.isfinite() & norm.isfinite())
        # A fused SGD can skip too, but leaves momentum that it has not made yet uninitialised.
        if isinstance(inner, torch.optim.Adam) and getattr(inner, "_step_supports_amp_scaling", False):  # and AdamW
            inner.found_inf = bad.float().to(inner.param_groups[0]["params"][0].device)  # the host, if offloaded
        elif is_set(bad):
            return loss, norm
        try:
            self.optimizer.step()
        finally:
            inner.__dict__.pop("found_inf", None)
        return loss, norm

    # exercise 10.6
    def gradients(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Run forward and backward: the gradient of the mean loss over all target tokens of the whole batch.

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
        positions = local_positions(inputs.shape[1], mesh.cp, layout.order, inputs.device)
        no_sync = None if layout.zero_stage == 2 else self.sharding.no_sync
        loss = runner.step(inputs, targets, tokens=tokens, no_sync=no_sync, positions=positions)
        self.sharding.finish()
        dist.all_reduce(loss)  # every rank of the last stage has a part, the same on all tp ranks
        return loss / (mesh.tp.size() * mesh.replicas.size())


def local_stages(
    config: ModelConfig, layout: Layout, mesh: Mesh, extra: Iterable[Callable], moe: dict | None
) -> tuple[Schedule, dict[int, nn.Module]]:
    """The layout's schedule, and this rank's stages of the split model by their numbers: on the meta device, with their
    recomputation. Raises ValueError where the layout does not fit the ranks or the model.
    """
    if not isinstance(config, ModelConfig):
        raise TypeError(f"parallelize builds the model from a ModelConfig; it can't take a {type(config).__name__}")
    check_layout(config, layout, dist.get_world_size(), moe=moe)
    model = split_model(config, layout, mesh, extra, moe)
    model.routing = next((router.routing for router in routers_of(model)), None)  # its stages have it as well
    schedule = schedule_of(layout, 2 * layout.pp)
    stages = split_stages(model, num_stages(schedule))
    own = {number: stages[number] for number in sorted({action.stage for action in schedule[mesh.pp.rank()]})}
    for stage in own.values() if layout.recompute != "none" else ():  # `extra` may have compiled the blocks
        apply_recompute(stage, layout.recompute)
    return schedule, own


def summed_loss_over(tp: dist.ProcessGroup, vocab: int) -> Callable:
    """The sum of the tokens' losses, a function of logits, whose vocabulary is split over tp, and targets."""
    if tp.size() == 1:
        return summed_loss
    return functools.partial(vocab_parallel_cross_entropy, group=tp, vocab=vocab, reduction="sum")


# exercise 10.7
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
    """Build this rank's part of a `Transformer` of these sizes, ready to train. Collective over the default group.

    extra: verbs that change the split model (kernels, FP8); moe: of apply_moe; dtype: see ParallelModel; settings: the
    optimizer's. Norms and biases have no weight decay. A rank has its part (and a gathered block, or buckets) and one
    whole tensor at a time. Raises ValueError where the layout does not fit the ranks or the model.
    """
    schedule, own = local_stages(config, layout, mesh, extra, moe)
    init, sharding, loss_of = initial_values(config, seed), None, summed_loss_over(mesh.tp, config.vocab)
    with torch.device(mesh.device_mesh.device_type):
        if layout.zero_stage == 3:
            sharding, own = shard_stages(own, layout, mesh, schedule, init, dtype)
        else:
            materialize(nn.ModuleDict({str(number): stage for number, stage in own.items()}), init)
        runner = PipelineRunner(own, schedule, mesh.pp, loss_of, mesh.replicas)
        if layout.gather_once:
            runner.prepare = sharding.gather
        if layout.zero_stage == 0:
            sharding = DataParallel(runner.stages, mesh.replicas)
        if layout.zero_stage in (1, 2):
            settings["param_groups"] = decay_groups(runner.stages)
            settings |= {"stage": layout.zero_stage, "compute_dtype": dtype, "grad_dtype": torch.float32}
            sharding = optimizer = ZeroOptimizer(runner.stages, optimizer_cls, mesh.replicas, **settings)
        else:
            optimizer = optimizer_cls(decay_groups(runner.stages), **settings)
    return ParallelModel(layout, mesh, runner, sharding, optimizer, dtype)


def full_weights(parallel: ParallelModel) -> dict[str, torch.Tensor]:
    """The whole weights of this rank's stages, by their names in the unsplit model. Collective.

    A rank holds all of its stages at once here: for checks of small models.
    """
    sharding, gathered = parallel.sharding, {}
    for shard in sharding.shards if parallel.layout.zero_stage in (1, 2) else ():
        own = shard.shard.detach().to(shard.values.device)
        gathered.update(zip(shard.parameters, shard.layout.gather(own), strict=True))
    units = [*sharding.units, sharding.root] if parallel.layout.zero_stage == 3 else []
    for part in (part for unit in units for part in unit.flat_params):
        gathered.update(zip(part.sharded_params, part.layout.gather(part.shard), strict=True))
    whole = {}
    for stage in parallel.stages.values():
        for name, weight in stage.named_parameters(remove_duplicate=False):
            own, shard = gathered.get(weight, weight).detach(), placement_of(weight).tensor_shard
            whole[plain_name(name).removeprefix("module.")] = shard.gather(own) if shard else own.clone()
    return whole
