"""ZeRO stages 1 and 2: data parallelism in which no two ranks keep the same optimizer state, or the same gradient.

With Psi parameters, N ranks, and k bytes of optimizer state and master weights per parameter (Adam: 12), in bytes per
rank:

    stage 0   2 Psi + 2 Psi + k Psi           all-reduce of the gradients                     sends 2 Psi elements
    stage 1   2 Psi + 2 Psi + k Psi / N       reduce-scatter, all-gather of the parameters    sends 2 Psi
    stage 2   2 Psi + (2 Psi + k Psi) / N     the same, gradients are freed during backward   sends 2 Psi

(times (N-1)/N). An all-reduce is a reduce-scatter and an all-gather. ZeRO puts the optimizer between the two, so each
rank updates only its own shard. (Rajbhandari et al. 2020, "ZeRO", SC, §5 and §7.) Stage 3: `fully_shard`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from course_lib.data_parallel.buckets import default_bucket_mb
from course_lib.data_parallel.gradient_owner import LocalGradient, UpdatedTensor
from course_lib.data_parallel.same_model import broadcast_from_first, check_same_model
from course_lib.mixed_precision.masters import LossScaler
from course_lib.single_gpu.clipping import clip_factor
from course_lib.zero.arguments import check_arguments, check_states, parameter_groups
from course_lib.zero.buckets import make_shards, remove_hooks, shards_by_reader, split_into_buckets
from course_lib.zero.optimizer_shards import ShardReducer
from course_lib.zero.shards import nested_norm, norm_group


class ZeroOptimizer(torch.optim.Optimizer):
    """`optimizer_cls` whose gradients, states and master weights are sharded over the ranks of `group`.

    `loss.backward(); zero.clip_grad_norm_(1.0); zero.step(); zero.zero_grad()` steps by the mean gradient. Backward's
    gradients leave `.grad` at once. stage 1: they stay unsharded, in buckets; stage 2: two buffers at a time are
    unsharded. With a module, all-gathers overlap its next forward; call wait() before you read parameters elsewhere.
    All ranks run the same number of backwards, and with several per step (outside of no_sync()) use the same
    parameters, or call finish() after each. A parameter that no rank has used does not change, not even by weight
    decay. If some ranks have used it, the others count as having a gradient of 0. With a loss scale:
    `zero.unscale_(scaler)`, clip, `scaler.step(zero)`.
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
        """param_groups: the module's parameters, with options; bucket_mb: MB (10**6 bytes) of parameters per bucket,
        see default_bucket_mb; compute_dtype: the new dtype of the parameters, in which they are gathered; each rank
        keeps its shard of their values in float32; grad_dtype: of gradients in buckets, in transfers and between
        micro-batches; offload: keep the states on the host, which does the update; **kwargs: the optimizer's. The
        `reduce_group` of a parameter's placement is used as by DataParallel.

        Raises ValueError, on all ranks, for invalid arguments and for different models or arguments.
        """
        groups = parameter_groups(module_or_params, param_groups)
        trained = [parameter for each in groups for parameter in each["params"]]
        self.module = module_or_params if isinstance(module_or_params, nn.Module) else None
        module = nn.ParameterList(trained) if self.module is None else self.module
        self.group, self.stage = cast(dist.ProcessGroup, group or dist.group.WORLD), stage
        self.synchronizes = True  # False inside no_sync()
        self.unscaled = False  # True if unscale_() has divided this step's gradients
        bucket_mb = default_bucket_mb(self.group.size()) if bucket_mb is None else bucket_mb
        sizes = [len(each["params"]) for each in groups] if param_groups else param_groups
        arguments = {"optimizer_cls": optimizer_cls.__name__, "stage": stage, "bucket_mb": bucket_mb}
        arguments |= {"compute_dtype": compute_dtype, "grad_dtype": grad_dtype, "offload": offload}
        check_same_model(module, self.group, arguments | {"param_groups": sizes})
        check_arguments(module, optimizer_cls, stage, bucket_mb, trained)
        broadcast_from_first(module, self.group)
        buckets = split_into_buckets(module, groups, bucket_mb)
        self.gradients, self.shards = make_shards(buckets, self.group, stage, offload, compute_dtype, grad_dtype)
        local: list[list[nn.Parameter]] = [[] for _ in groups]
        for (number, _), shard in zip(buckets, self.shards, strict=True):
            local[number].append(shard.shard)
        self.optimizer = optimizer_cls([g | {"params": p} for g, p in zip(groups, local, strict=True)], **kwargs)
        super().__init__(groups, self.optimizer.defaults)
        self.reducer = ShardReducer({p: name for name, p in module.named_parameters()}, self.gradients)
        weakref.finalize(self, remove_hooks, self._register_hooks(), self.shards).atexit = False

    def _register_hooks(self) -> list[RemovableHandle]:
        """Hook the gradients, and whatever reads the module's parameters. The hooks do not keep the optimizer alive."""
        weak = weakref.proxy(self)
        handles = [
            parameter.register_post_accumulate_grad_hook(lambda p: weak.reducer.add(p, weak.synchronizes))
            for parameter in self.reducer.bucket_of
        ]
        if self.module is None:
            return handles
        for reader, shard in shards_by_reader(self.module, self.shards):
            handles.append(reader.register_forward_pre_hook(lambda *_, shard=shard: shard.wait()))
        handles.append(self.module.register_state_dict_pre_hook(lambda *_: weak.wait()))
        handles.append(self.module.register_load_state_dict_pre_hook(lambda *_: weak.wait()))
        handles.append(self.module.register_load_state_dict_post_hook(lambda *_: weak.copy_from_params()))
        return handles

    def add_param_group(self, param_group: dict) -> None:
        """Add a group in __init__; later raise RuntimeError, since buckets are made once."""
        if hasattr(self, "reducer"):
            raise RuntimeError("no parameter group can be added: make a new ZeroOptimizer, with param_groups")
        super().add_param_group(param_group)

    @property
    def supports_no_sync(self) -> bool:
        """False in stage 2, which reduces the gradients of every backward."""
        return self.stage == 1

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate this rank's gradients without reducing them. Raises RuntimeError in stage 2."""
        if not self.supports_no_sync:
            raise RuntimeError(
                "no_sync() keeps unsharded gradients, as stage 1 does; stage 2 reduces gradients in every backward"
            )
        before, self.synchronizes = self.synchronizes, False
        try:
            yield
        finally:
            self.synchronizes = before

    def finish(self) -> None:
        """Wait for the gradients, after a step's last backward, on all ranks: each has its shard of the mean.

        clip_grad_norm_() and step() call it. A rank without a batch takes part with zeros. Raises RuntimeError inside
        no_sync().
        """
        if not self.synchronizes:
            raise RuntimeError("finish() inside no_sync(): call a step's last backward, and what follows, outside it")
        if not all(bucket.reduced and not bucket.full_grads.stored for bucket in self.gradients):
            self.reducer.finish()

    def unscale_(self, scaler: LossScaler) -> None:
        """Divide the mean gradient by the scale of a LossScaler, before it is clipped, and look for inf and nan on all
        ranks. Raises ValueError if gradients are summed in float16: `grad_dtype=torch.float32` changes that.
        """
        self.finish()
        shards = [SimpleNamespace(grad=bucket.gradient) for bucket in self.gradients]
        scaler.unscale(cast(list[torch.Tensor], shards))  # it reads `.grad` alone
        if scaler.group is None:
            dist.all_reduce(scaler.found_inf, dist.ReduceOp.MAX, self.group)
        self.unscaled = True

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Raise RuntimeError. torch.amp.GradScaler asks for it before a step, and would find no gradients."""
        raise RuntimeError(
            "torch.amp.GradScaler does not find a ZeroOptimizer's gradients: use mixed_precision.LossScaler and "
            "zero.unscale_(scaler), or BF16 without a scaler"
        )

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the mean gradient to a norm of at most `max_norm`, and return the norm that it had."""
        gradients = []
        for gradient, _, group, outer in self.local_gradients():
            gradients.append((gradient, (norm_group(self.group, cast(dist.ProcessGroup, group), outer), *outer)))
        norm = nested_norm(gradients)
        factor = clip_factor(norm, max_norm)
        torch._foreach_mul_([bucket.gradient for bucket in self.gradients], factor)
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        if self.reducer.unfinished:
            self.reducer.finish()
        self.unscaled = False
        for bucket in self.gradients:
            bucket.clear()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update this rank's shards, by one call for all, and start their all-gathers, the first layers' first."""
        with torch.enable_grad():
            result = closure() if closure else None
        self.finish()
        if any(shard.moved for shard in self.shards):
            raise RuntimeError("parameters have moved (module.to(), assign=True): create the ZeroOptimizer afterward")
        for group, inner in zip(self.param_groups, self.optimizer.param_groups, strict=True):
            inner.update((key, value) for key, value in group.items() if key != "params")  # a scheduler changes `group`
        for bucket, shard in zip(self.gradients, self.shards, strict=True):
            shard.save_unused(bucket, self.optimizer)
        self.update_and_gather()
        return result

    # exercise 05.8
    def update_and_gather(self) -> None:
        """Update this rank's shards of all buckets by one call, then start the all-gathers, the first layers' first.

        Each bucket's `gradient` is its shard of the mean gradient. Without a module, wait for the all-gathers.
        """
        for bucket, shard in zip(self.gradients, self.shards, strict=True):
            shard.set_grad(bucket.gradient)
        self.optimizer.step()
        for shard in reversed(self.shards):
            shard.gather()
        if self.module is None:
            self.wait()

    def wait(self) -> None:
        """Wait until all parameters have their values. The module's forward and state_dict do it by themselves."""
        for shard in self.shards:
            shard.wait()

    def all_gather_params(self) -> None:
        """Give the parameters the values of the shards. Collective."""
        for shard in self.shards:
            shard.gather()
        self.wait()

    @torch.no_grad()
    def copy_from_params(self) -> None:
        """Copy the parameters' values to the shards. A module's load_state_dict does it by itself."""
        self.wait()
        for shard in self.shards:
            shard.shard.copy_(shard.local_values)

    def updated_tensors(self) -> Iterator[UpdatedTensor]:
        """Yield this rank's shards, which are float32, and the parameters whose elements they hold."""
        for shard in self.shards:
            yield shard.updated_tensor()

    def local_gradients(self) -> list[LocalGradient]:
        """Call `finish()`, and return this rank's shards of the mean gradient."""
        self.finish()
        return [bucket.local_gradient() for bucket in self.gradients]

    def full_weights(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield each parameter with its unsharded values in float32. Collective; one bucket at a time."""
        for shard in self.shards:
            local = shard.shard.detach().to(shard.values.device)
            yield from zip(shard.parameters, shard.layout.gather(local), strict=True)

    def extra_memory(self) -> dict[str, list[torch.Tensor]]:
        """Return master copies, shards of the gradient, and the buffers of stage 2."""
        pools = {bucket.pool for bucket in self.gradients if bucket.pool is not None}
        return {
            "optimizer states": [shard.shard for shard in self.shards if shard.is_copy],
            "gradients": [bucket.gradient for bucket in self.gradients],
            "temporary": [buffer for pool in pools for buffer in pool.free],
        }

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the unsharded state, on the CPU of every rank, as `optimizer_cls` has it in one process. Collective.

        {"state": {number of the parameter: {name: full tensor, or a number}}, "param_groups": [...]}, as torch.optim
        has it: 12 bytes per parameter with Adam and master weights. Parameters of less than 32 bits have their float32
        values in it too, as "master".
        """
        self.wait()
        numbers = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        states: dict[int, dict[str, Any]] = {number: {} for number in numbers.values()}
        for shard in self.shards:
            for name, full in shard.full_states(self.optimizer).items():
                for parameter, value in zip(shard.parameters, full, strict=True):
                    states[numbers[parameter]][name] = value
        groups = [group | {"params": [numbers[p] for p in group["params"]]} for group in self.param_groups]
        return {"state": {number: state for number, state in states.items() if state}, "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of any world size and stage, or of `optimizer_cls` in one process. Collective.

        Load the module's own state first. Raises ValueError, and changes nothing, for the state of other parameters.
        """
        check_states(self.param_groups, state_dict)
        self.copy_from_params()
        parameters = [p for group in self.param_groups for p in group["params"]]
        states = {parameter: state_dict["state"].get(i, {}) for i, parameter in enumerate(parameters)}
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update((key, value) for key, value in loaded.items() if key != "params")
        local = {}
        for shard in self.shards:
            local[shard.shard] = shard.local_states([states[parameter] for parameter in shard.parameters])
            master = local[shard.shard].pop("master", None)
            if master is not None:
                shard.shard.copy_(master)
            shard.gather()
        inner = self.optimizer.state_dict()
        order = [shard for group in self.optimizer.param_groups for shard in group["params"]]
        inner["state"] = {i: local[shard] for i, shard in enumerate(order) if local[shard]}
        self.optimizer.load_state_dict(inner)
        self.wait()
