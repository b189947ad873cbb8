"""ZeRO stages 1 and 2: data parallelism in which no two ranks keep the same optimizer state, or the same gradient.

With Psi parameters, N ranks, and k bytes of optimizer state and master weights a parameter (Adam: 12), in bytes a rank:

    stage 0   2 Psi + 2 Psi + k Psi           all-reduce of the gradients                     sends 2 Psi elements
    stage 1   2 Psi + 2 Psi + k Psi / N       reduce-scatter, all-gather of the parameters    sends 2 Psi
    stage 2   2 Psi + (2 Psi + k Psi) / N     the same, gradients are freed during backward   sends 2 Psi

(times (N-1)/N). An all-reduce is a reduce-scatter and an all-gather. ZeRO puts the optimizer between the two, so each
rank updates only what it owns. (Rajbhandari et al. 2020, "ZeRO", SC, §5 and §7.) Stage 3: `fully_shard`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

from course_lib.data_parallel.replicas import broadcast_from_first, check_same_model, default_bucket_mb
from course_lib.recompute.modes import IGNORED, accumulate
from course_lib.single_gpu import training as single_gpu
from course_lib.single_gpu.model import Transformer, init_parameter
from course_lib.single_gpu.placement import placement_of
from course_lib.zero.gradient_rounds import GradientRounds, watch
from course_lib.zero.optimizer_shards import GradientShard, OptimizerShard, ShardReducer, reserve, split_into_buckets
from course_lib.zero.shards import clip_grad_norm_
from course_lib.zero.state import check_states, load_state, whole_state

WHOLE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")  # an element's update depends on its whole matrix, or on all


def parameter_groups(
    module_or_params: nn.Module | Iterable[nn.Parameter], param_groups: list[dict] | None
) -> list[dict]:
    """Parameter groups as of torch.optim, with the parameters that are to be trained."""
    if param_groups is None:
        is_module = isinstance(module_or_params, nn.Module)
        param_groups = list(module_or_params.parameters() if is_module else module_or_params)
    if param_groups and not isinstance(param_groups[0], dict):
        param_groups = [{"params": param_groups}]
    groups = [each | {"params": [each["params"]]} if torch.is_tensor(each["params"]) else each for each in param_groups]
    return [each | {"params": [p for p in each["params"] if p.requires_grad]} for each in groups]


def check_choices(module: nn.Module, optimizer_cls: type, stage: int, bucket_mb: float, parameters: list) -> None:
    """Raise ValueError where ZeroOptimizer can do nothing with its arguments."""
    if not parameters:
        raise ValueError("there is no parameter to train")
    if len(set(parameters)) < len(parameters):
        raise ValueError("a parameter is in more than one parameter group, or twice in one")
    if not set(parameters) <= set(module.parameters()):
        raise ValueError("a parameter in the parameter groups is not of the module")
    if stage not in (1, 2):
        raise ValueError(f"stage {stage}: it is 1 or 2; stage 3 is fully_shard, stage 0 DataParallel")
    if not bucket_mb > 0:
        raise ValueError(f"bucket_mb {bucket_mb}: a bucket has a size above 0")
    if issubclass(optimizer_cls, tuple(getattr(torch.optim, name) for name in WHOLE if hasattr(torch.optim, name))):
        raise ValueError(f"{optimizer_cls.__name__} needs whole matrices; a shard is a piece of a flat buffer")
    if any(parameter.is_meta for parameter in parameters):
        raise ValueError("parameters are on the meta device: give them values first")


class ZeroOptimizer(GradientRounds, torch.optim.Optimizer):
    """`optimizer_cls` whose gradients, states and master weights are shared out over the ranks of `group`.

    `loss.backward(); zero.clip_grad_norm_(1.0); zero.step(); zero.zero_grad()` steps by the mean gradient. Backward's
    gradients leave `.grad` at once. stage 1: they stay whole, in buckets; stage 2: two buckets at a time are whole.
    With a module, all-gathers overlap its next forward; call wait() before you read parameters elsewhere. All ranks
    run as many backwards, and with several a step (outside of no_sync()) use the same parameters, or call finish()
    after each. A parameter that no rank has used stays as it is, without decay. If some ranks have used it, the others
    count as having a gradient of 0. With a loss scale: `zero.unscale_(scaler)`, clip, `scaler.step(zero)`.
    """

    def __init__(
        self,
        module_or_params: nn.Module | Iterable[nn.Parameter],
        optimizer_cls: type[torch.optim.Optimizer],
        group: dist.ProcessGroup | None = None,
        stage: int = 1,
        *,
        param_groups: list[dict] | None = None,
        bucket_mb: float | None = None,
        compute_dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
        offload: bool = False,
        **kwargs,
    ):
        """param_groups: the module's parameters, with options; bucket_mb: MB (10**6 bytes) of parameters a bucket, see
        default_bucket_mb; compute_dtype: what the parameters become, and are gathered in; their values stay in float32, a
        piece on each rank; grad_dtype: of gradients in buckets, on their way and between micro-batches; offload: the
        states are on the host, which does the update; **kwargs: the optimizer's. A parameter's `reduce_group` is read
        as by DataParallel.

        Raises ValueError, on all ranks, for arguments that make no sense and for different models or arguments.
        """
        groups = parameter_groups(module_or_params, param_groups)
        trained = [parameter for each in groups for parameter in each["params"]]
        self.module = module_or_params if isinstance(module_or_params, nn.Module) else None
        module = nn.ParameterList(trained) if self.module is None else self.module
        self.group, self.stage, self.synchronizes = group or dist.group.WORLD, stage, True
        bucket_mb = default_bucket_mb(self.group.size()) if bucket_mb is None else bucket_mb
        choices = {"optimizer_cls": optimizer_cls.__name__, "stage": stage, "bucket_mb": bucket_mb}
        sizes = param_groups and [len(each["params"]) for each in groups]
        choices |= {"compute_dtype": compute_dtype, "grad_dtype": grad_dtype, "offload": offload, "param_groups": sizes}
        check_same_model(module, self.group, choices)
        check_choices(module, optimizer_cls, stage, bucket_mb, trained)
        broadcast_from_first(module, self.group)
        buckets = split_into_buckets(module, groups, bucket_mb)
        self.gradients, self.shards, own = [], [], [[] for _ in groups]
        for number, parameters in buckets:
            reduce_group = placement_of(parameters[0]).reduce_group or self.group
            self.shards.append(OptimizerShard(parameters, reduce_group, offload, compute_dtype))
            self.gradients.append(GradientShard(parameters, reduce_group, 1 / self.group.size(), grad_dtype))
            own[number].append(self.shards[-1].shard)
        reserve(self.gradients, [number for number, _ in buckets], stage)
        self.optimizer = optimizer_cls([g | {"params": p} for g, p in zip(groups, own, strict=True)], **kwargs)
        super().__init__(groups, self.optimizer.defaults)
        self.reducer = ShardReducer({p: name for name, p in module.named_parameters()}, self.gradients)
        watch(self)

    def add_param_group(self, param_group: dict) -> None:
        """For __init__ alone; later it raises RuntimeError, since buckets are made once."""
        if hasattr(self, "reducer"):
            raise RuntimeError("no parameter group can be added: make a new ZeroOptimizer, with param_groups")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update this rank's pieces, by one call for all, and send them, those of the first layers first."""
        with torch.enable_grad():
            result = closure() if closure else None
        self.finish()
        if any(shard.moved for shard in self.shards):
            raise RuntimeError("parameters have moved (module.to(), assign=True): make the ZeroOptimizer afterwards")
        for ours, inner in zip(self.param_groups, self.optimizer.param_groups, strict=True):  # a scheduler changes ours
            inner.update((key, value) for key, value in ours.items() if key != "params")
        for bucket, shard in zip(self.gradients, self.shards, strict=True):
            shard.hold(bucket, self.optimizer)
        self.update_and_gather()
        return result

    # exercise 05.8
    def update_and_gather(self) -> None:
        """Update this rank's pieces of all buckets by one call, then start the all-gathers, the first layers' first.

        Each bucket's `gradient` is its piece of the mean gradient. Without a module, wait until all values are there.
        """
        for bucket, shard in zip(self.gradients, self.shards, strict=True):
            shard.set_grad(bucket.gradient)
        self.optimizer.step()
        for shard in reversed(self.shards):
            shard.gather()
        if self.module is None:
            self.wait()

    def wait(self) -> None:
        """Until all parameters have their new values. The module's own forward and state_dict do it by themselves."""
        for shard in self.shards:
            shard.wait()

    def all_gather_params(self) -> None:
        """Give the parameters the shards' values. Collective."""
        for shard in self.shards:
            shard.gather()
        self.wait()

    @torch.no_grad()
    def copy_from_params(self) -> None:
        """Make the shards anew from the parameters. A module's load_state_dict does it by itself."""
        self.wait()
        for shard in self.shards:
            shard.shard.copy_(shard.own_values)

    def state_dict(self) -> dict:
        """The whole state, on the CPU of every rank: that of `optimizer_cls` in one process. Collective.

        Parameters of less than 32 bits have their float32 values in it too, as "master".
        """
        return whole_state(self)

    def load_state_dict(self, state_dict: dict) -> None:
        """Take over a state of any world size and stage, or of `optimizer_cls` in one process. Collective.

        Load the module's own state before. Raises ValueError where it is no state of these parameters; nothing is
        changed then.
        """
        check_states(self.param_groups, state_dict)
        load_state(self, state_dict)


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """The program's options. Touches nothing; an unknown or impossible one ends the program with status 2."""
    parser = single_gpu.training_parser("zero", "Train with sharded states, gradients or parameters.")
    parser.add_argument("--stage", type=int, default=2, choices=[1, 2, 3], help="stage 0 is data_parallel")
    parser.add_argument("--bucket-mb", type=float, help="stages 1 and 2: MB of parameters a bucket (25, or 1 a rank)")
    parser.add_argument("--micro-batch", type=int, help="sequences at a time; all by default")
    parser.add_argument("--grad-fp32", action="store_true", help="send and add gradients in float32")
    parser.add_argument("--offload", action="store_true", help="stages 1 and 2: optimizer states on the host")
    parser.add_argument("--replicas", type=int, default=1, help="stage 3: groups of ranks, each with a whole model")
    chosen = single_gpu.parse(parser, argv)
    chosen.micro_batch = chosen.batch if chosen.micro_batch is None else chosen.micro_batch
    if not 1 <= chosen.micro_batch <= chosen.batch:
        parser.error("--micro-batch must be 1 or more, and no more than --batch")
    if chosen.bucket_mb is not None and not chosen.bucket_mb > 0:
        parser.error("--bucket-mb must be above 0")
    if chosen.replicas < 1 or chosen.replicas > 1 and chosen.stage < 3:
        parser.error("--replicas must be 1 or more, and goes with stage 3")
    if chosen.offload and chosen.stage == 3:
        parser.error("--offload goes with stages 1 and 2")
    return chosen


def sharded_accumulate(model: nn.Module, sharding, micro_batches: list) -> torch.Tensor:
    """As data_parallel.parallel_accumulate; sharding: the ZeroOptimizer of the model, or the model by fully_shard."""
    tokens = sum((targets != IGNORED).sum() for _, targets in micro_batches).float()
    dist.all_reduce(tokens, group=sharding.group)
    tokens = tokens.clamp(min=1) / sharding.group.size()
    keeps = nullcontext() if getattr(sharding, "stage", 3) == 2 else sharding.no_sync()
    with keeps:
        total = accumulate(model, micro_batches[:-1], tokens=tokens)
    total = (total + accumulate(model, micro_batches[-1:], tokens=tokens)) / sharding.group.size()
    sharding.finish()
    dist.all_reduce(total, group=sharding.group)
    return total


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the options say. Rank 0 prints one line a step (its own tokens/s) and writes where --out says.

    Returns the records. Needs the default process group. Raises ValueError where --replicas does not divide its ranks.
    With bf16, parameters are BF16 with master weights (stages 1 and 2), or gathered in BF16 (stage 3): all begin with
    the same values.
    """
    from torch.distributed.device_mesh import init_device_mesh

    from course_lib.zero.sharded_models import fully_shard

    chosen = options(argv)
    dtype = torch.bfloat16 if chosen.dtype == "bf16" else torch.float32
    sums = torch.float32 if chosen.grad_fp32 else None
    mesh, ranks = None, dist.get_world_size()
    if ranks % chosen.replicas:
        raise ValueError(f"--replicas {chosen.replicas} does not divide the {ranks} ranks")
    if chosen.replicas > 1:
        device = "cpu" if dist.get_backend() == "gloo" else torch.accelerator.current_accelerator().type
        shape = chosen.replicas, ranks // chosen.replicas
        mesh = init_device_mesh(device, shape, mesh_dim_names=("replica", "shard"))

    def build(config, seed):
        if chosen.stage < 3:
            return Transformer(config, seed)
        with torch.device("meta"):
            model = Transformer(config)
        init = lambda name, tensor: init_parameter(name, tensor, config, seed)  # noqa: E731
        return fully_shard(model, mesh, compute_dtype=dtype, reduce_dtype=sums, init=init)

    def make_optimizer(model, lr):
        if chosen.stage == 3:
            return single_gpu.adamw(model, lr)
        settings = {"stage": chosen.stage, "bucket_mb": chosen.bucket_mb, "offload": chosen.offload}
        settings |= {"compute_dtype": dtype, "grad_dtype": sums, "lr": lr}
        settings |= {"param_groups": single_gpu.decay_groups(model)}
        return ZeroOptimizer(model, torch.optim.AdamW, **settings, **single_gpu.ADAMW)

    def step(model, optimizer, inputs, targets, _dtype=None, max_norm=1.0):
        optimizer.zero_grad()
        parts = zip(inputs.split(chosen.micro_batch), targets.split(chosen.micro_batch), strict=True)
        step_loss = sharded_accumulate(model, model if chosen.stage == 3 else optimizer, list(parts))
        if chosen.stage == 3:
            clip_grad_norm_(model.parameters(), max_norm)
        else:
            optimizer.clip_grad_norm_(max_norm)
        optimizer.step()
        return step_loss

    return single_gpu.run(chosen, step, build, make_optimizer, dist.get_rank(), dist.get_world_size())
