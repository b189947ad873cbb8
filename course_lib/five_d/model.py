"""Five dimensions at once: a model on the meta device, and the transforms of notebooks 04 to 09 in their order.

    layout = Layout.parse("dp2,pp2,tp2,sp,zero1")
    mesh = build_mesh(layout)
    parallel = parallelize(config, layout, mesh, lr=1e-3)
    loss, norm = parallel.step(inputs, targets)            # each [b / dp, s]: the sequences of this rank's dp index

    tensor, sequence, expert, context     change what a layer computes      on the meta device: shapes alone
    extra                                 kernels, FP8 (notebooks 12 on)    on the meta device
    stages, recompute                     cut the model into stages         on the meta device
    materialize, or fully_shard           this rank's shards get values     one full tensor at a time
    runner, DataParallel or ZeRO          decide which gradients are sent   once per step

Every value depends on the seed and a parameter's name alone, so all layouts start from the same model, and see the same
batches. (The Ultra-Scale Playbook, chapter 8; Llama Team 2024, The Llama 3 Herd of Models, §3.3.2.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course_lib.context_parallel.model import apply_context_parallel
from course_lib.data_parallel.gradient_owner import GradientOwner
from course_lib.data_parallel.replicas import DataParallel
from course_lib.expert_parallel.mixture import apply_moe
from course_lib.expert_parallel.model import apply_expert_parallel
from course_lib.expert_parallel.router import Routing, routers_of
from course_lib.five_d.cast_weights import CastWeights
from course_lib.five_d.gather_once import GatherOncePerStep
from course_lib.five_d.layouts import Layout, check_layout, check_sizes, schedule_of
from course_lib.five_d.meshes import Mesh, shard_groups
from course_lib.mixed_precision.masters import step_unless
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
) -> Transformer:
    """Make a `Transformer` on the meta device, split over tp, ep and cp by the transforms of notebooks 06 to 08.

    extra: transforms of your own, applied to the split model in their order; moe: arguments of apply_moe.
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
    for transform in extra:
        transform(model)
    return model


def initial_values(config: ModelConfig, seed: int) -> Callable[[str, torch.Tensor], None]:
    """Return init(name, full tensor) for names such as 3.blocks.7.mlp_norm.weight. A tied head is the embedding."""

    def init(name: str, tensor: torch.Tensor) -> None:
        name = plain_name(name.split(".", 1)[1])
        init_parameter("embedding.weight" if config.tied and name == "head.weight" else name, tensor, config, seed)

    return init


def shard_stages(
    stages: dict[int, nn.Module], layout: Layout, mesh: Mesh, schedule: Schedule, init: Callable, dtype: torch.dtype
) -> tuple[FullyShard, dict[int, nn.Module]]:
    """Apply ZeRO stage 3 to this rank's meta-device stages. Return the wrapper, and the stages to run."""

    group, reduce_dtype = shard_groups(layout, mesh), torch.float32
    compute_dtype = None if dtype == torch.float32 else dtype
    encode = vars(next(iter(stages.values()))).get("encode")  # set by a transform: of the weights that are gathered
    if layout.pp == 1:
        fill = shard_init(stages[0], lambda name, tensor: init(f"0.{name}", tensor))
        wrapped = fully_shard(stages[0], group, compute_dtype, encode, reduce_dtype=reduce_dtype, init=fill)
        return wrapped, {0: wrapped}
    local = nn.ModuleDict({str(number): stage for number, stage in stages.items()})
    tied = sync_tied_weights(local, schedule, mesh.pp, mesh.replicas)  # they are sharded over both stages' ranks
    fill, wrapper = shard_init(local, init), GatherOncePerStep
    settings: dict[str, Any] = {"reduce_dtype": reduce_dtype, "init": fill, "wrapper": wrapper}
    wrapped = fully_shard(local, group, compute_dtype, encode, **settings)
    assert isinstance(wrapped, GatherOncePerStep)
    wrapped.reduce_at_finish(tied.groups.values())
    return wrapped, stages


def step_hooks(
    stages: dict[int, nn.Module], layout: Layout, dtype: torch.dtype, sharding: FullyShard | None
) -> dict[str, Callable[[], None]]:
    """Return before_step and after_step of a PipelineRunner, which give the stages their weights once per step:
    gathered (GatherOncePerStep), or cast to `dtype` if the parameters themselves stay float32 (DataParallel).
    """
    if isinstance(sharding, GatherOncePerStep):
        return {"before_step": sharding.gather}
    if layout.keeps_float32_params and dtype != torch.float32:
        casts = CastWeights(nn.ModuleDict({str(number): stage for number, stage in stages.items()}), dtype)
        return {"before_step": casts.cast, "after_step": casts.restore}
    return {}


class ParallelModel:
    """A rank's shard of a model: its stages, the owner of their gradients, and its optimizer. `parallelize` returns it:
    `loss, norm = parallel.step(inputs, targets)`.

    dtype: of the weights in the stages' computation, of hidden states and of messages between stages. Each weight is
    cast once per step; under ZeRO-3 without a pipeline, a rank's shard of it before each gather. Values, states, and
    gradients as they are summed and sent are float32 in every ZeRO stage. Raises ValueError for float16.
    """

    reads_flags = True  # False in a dry run, whose tensors have no values: then no step is skipped

    def __init__(
        self,
        layout: Layout,
        mesh: Mesh,
        runner: PipelineRunner,
        sharding: GradientOwner,
        optimizer: torch.optim.Optimizer,
        dtype: torch.dtype,
    ):
        if dtype == torch.float16:
            raise ValueError("float16 needs a loss scale, which this model's step does not have: take bfloat16")
        self.layout, self.mesh, self.runner, self.sharding = layout, mesh, runner, sharding
        self.optimizer, self.dtype = optimizer, dtype

    @property
    def stages(self) -> nn.ModuleDict:
        """This rank's stages, by number as a string."""
        return self.runner.stages

    @property
    def config(self) -> ModelConfig:
        """The sizes of the full model."""
        return self._of_stages("config")

    @property
    def routing(self) -> Routing | None:
        """The routing of all mixtures; None without experts. Every stage has it, even one without layers."""
        return self._of_stages("routing")

    def _of_stages(self, name: str) -> Any:
        """Return an attribute that all stages have, even if they are wrapped."""
        return next(getattr(getattr(stage, "module", stage), name) for stage in self.stages.values())

    @property
    def inner_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that updates tensors: the one inside of a ZeroOptimizer, any other itself."""
        return self.optimizer.optimizer if isinstance(self.optimizer, ZeroOptimizer) else self.optimizer

    def step(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        max_norm: float = 1.0,
        positions: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute gradients, clip them by the norm over all ranks, and step; inputs and targets each [b / dp, s].

        positions: [b / dp, s], of each token in its document; None: in its sequence. All ranks of one dp index pass the
        same ones. Returns the loss of the full batch, and the norm. If one of them is not finite, no weight, moment or
        counter changes, on any rank. torch's fused Adam and AdamW skip that step on the device, and the host does not
        learn of it. For another optimizer the host waits for loss and norm.
        """
        self.optimizer.zero_grad()
        if positions is not None:
            positions = shard_sequence(positions, self.mesh.cp, self.layout.order)
        with self.runner.at_positions(positions):
            loss = self.gradients(inputs, targets)
        norm = clip_grad_norm_(self.runner, max_norm, self.sharding)
        bad = ~(loss.isfinite() & norm.isfinite())
        inner = self.inner_optimizer
        if isinstance(inner, torch.optim.Adam) and getattr(inner, "_step_supports_amp_scaling", False):  # and AdamW
            step_unless(bad.float(), self.optimizer)
        elif not (self.reads_flags and bool(bad)):
            self.optimizer.step()
        return loss, norm

    # exercise 10.6
    def gradients(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Run forward and backward: the gradient of the mean loss over all target tokens of the whole batch.

        inputs, targets: each [b / dp, s], b / dp a multiple of the layout's micro-batch. Returns that loss, the same on
        all ranks. Raises ValueError if sequences or tokens cannot be divided.
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
        no_sync = self.sharding.no_sync if self.sharding.supports_no_sync else None
        loss = runner.step(inputs, targets, tokens=tokens, no_sync=no_sync, positions=positions)
        self.sharding.finish()
        dist.all_reduce(loss)  # every rank of the last stage has a part, the same on all tp ranks
        return loss / (mesh.tp.size() * mesh.replicas.size())


def local_stages(
    config: ModelConfig, layout: Layout, mesh: Mesh, extra: Iterable[Callable], moe: dict | None
) -> tuple[Schedule, dict[int, nn.Module]]:
    """Return the layout's schedule, and this rank's stages of the split model by their numbers: on the meta device,
    with their recomputation. Raises ValueError if the layout does not fit the ranks or the model.
    """
    if not isinstance(config, ModelConfig):
        raise TypeError(f"parallelize builds the model from a ModelConfig; it can't take a {type(config).__name__}")
    check_layout(config, layout, dist.get_world_size(), moe=moe)
    model = split_model(config, layout, mesh, extra, moe)
    vars(model)["routing"] = next((router.routing for router in routers_of(model)), None)  # its stages have it as well
    schedule = schedule_of(layout, 2 * layout.pp)
    stages = split_stages(model, num_stages(schedule))
    numbers = sorted({action.stage for action in schedule[mesh.pp.rank()]})
    local: dict[int, nn.Module] = {number: stages[number] for number in numbers}
    for stage in local.values() if layout.recompute != "none" else ():  # `extra` may have compiled the blocks
        apply_recompute(stage, layout.recompute)
    return schedule, local


def summed_loss_over(tp: dist.ProcessGroup, vocab: int) -> Callable:
    """Return a function of logits, whose vocabulary is split over tp, and targets: the sum of the tokens' losses."""
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
    """Build this rank's shard of a `Transformer` of these sizes, ready to train. Collective over the default group.

    extra: transforms of the split model (kernels, FP8); moe: arguments of apply_moe; dtype: see ParallelModel;
    settings: arguments of the optimizer. Norms and biases have no weight decay. A rank holds its shard (and a gathered
    block, or buckets) and one full tensor at a time. Raises ValueError if the layout does not fit the ranks or the
    model.
    """
    schedule, stages = local_stages(config, layout, mesh, extra, moe)
    init, loss_of = initial_values(config, seed), summed_loss_over(mesh.tp, config.vocab)
    sharding: Any = None  # a GradientOwner
    optimizer: torch.optim.Optimizer
    with torch.device(mesh.device_mesh.device_type):
        if layout.zero_stage == 3:
            sharding, stages = shard_stages(stages, layout, mesh, schedule, init, dtype)
        else:
            materialize(nn.ModuleDict({str(number): stage for number, stage in stages.items()}), init)
        hooks = step_hooks(stages, layout, dtype, sharding)
        runner = PipelineRunner(stages, schedule, mesh.pp, loss_of, mesh.replicas, **hooks)
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
    """Return the full weights of this rank's stages, all at once, by their names in the unsplit model. Collective."""
    unsharded, full = dict(parallel.sharding.full_weights()), {}
    for stage in parallel.stages.values():
        for name, weight in stage.named_parameters(remove_duplicate=False):
            values, shard = unsharded.get(weight, weight).detach(), placement_of(weight).tensor_shard
            full[plain_name(name).removeprefix("module.")] = shard.gather(values) if shard else values.clone()
    return full
