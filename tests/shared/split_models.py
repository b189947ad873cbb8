"""Models that are split over ranks, and what one process makes of the same: for the tests of notebooks 06 to 08."""

import contextlib
import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.data_parallel.replicas import DataParallel, find_diverged_params
from course_lib.expert_parallel.mixture import apply_moe
from course_lib.expert_parallel.router import routers_of, take_counts, update_bias
from course_lib.recompute.modes import IGNORED, apply_recompute, keep_matmuls
from course_lib.sequence_parallel.model import apply_sequence_parallel
from course_lib.single_gpu.model import ModelConfig, Transformer, init_parameter, loss, project_each
from course_lib.single_gpu.placement import placement_of
from course_lib.tensor_parallel.linear import replicas_of
from course_lib.tensor_parallel.model import apply_tensor_parallel
from course_lib.tensor_parallel.partitioned_checkpoints import apply_partitioned_recompute
from course_lib.tensor_parallel.shards import gather_state_dict, materialize, shard_init
from course_lib.tensor_parallel.vocabulary import vocab_parallel_cross_entropy
from course_lib.zero.optimizer import ZeroOptimizer
from course_lib.zero.sharded_models import full_state_dict, fully_shard
from course_lib.zero.shards import clip_grad_norm_

STEPS, BATCH, SEQ, MAX_NORM, BIAS_RATE = 3, 4, 7, 0.5, 0.01
OPTIMIZERS = {  # eps: a gradient's rounding error must not become a whole step
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9, weight_decay=0.1),
}


def config(kv_heads: int, tied: bool = False) -> ModelConfig:
    """12 heads go on 2, 3 and 4 ranks; 97 tokens on none of them."""
    return ModelConfig(layers=2, hidden=48, heads=12, kv_heads=kv_heads, ffn_hidden=60, vocab=97, tied=tied)


def group_of(n: int) -> dist.ProcessGroup:
    """On one of 4 ranks: its group of n neighbours; the last of 3 and 1 is alone."""
    lists = {1: [[0], [1], [2], [3]], 2: [[0, 1], [2, 3]], 3: [[0, 1, 2], [3]], 4: [[0, 1, 2, 3]]}[n]
    return dist.new_subgroups_by_enumeration(lists)[0]


def init(name: str, tensor: torch.Tensor, of: ModelConfig) -> None:
    """Larger weights than at the start of a training: there, attention's gradients are little but rounding errors."""
    init_parameter(name, tensor, of)
    with torch.no_grad():
        tensor.mul_(4 if tensor.dim() > 1 else 1)


def whole_model(of: ModelConfig, mixture: tuple = ()) -> Transformer:
    """mixture: the arguments of apply_moe, each with its name; none: the model is dense."""
    model = Transformer(of)
    if mixture:
        apply_moe(model, **dict(mixture))
    for name, parameter in model.named_parameters():
        init(name, parameter, of)
    return model


def meta_model(of: ModelConfig, mixture: tuple = ()) -> Transformer:
    with torch.device("meta"):
        return apply_moe(Transformer(of), **dict(mixture)) if mixture else Transformer(of)


def split_model(
    of: ModelConfig, group: dist.ProcessGroup, meta: bool = False, sequence: bool = False, reduce_group=None, **options
) -> Transformer:
    """The same model with its matrices split, and with `sequence` what is between them; every rank of the default group
    makes one at the same time.
    """
    if group.size() == 1 and dist.get_world_size() - 1 > of.kv_heads:
        replicas_of(group, 1)  # the other three have copies, and make groups for them with all ranks
    model = apply_tensor_parallel(meta_model(of) if meta else whole_model(of), group, **options)
    if sequence:
        apply_sequence_parallel(model, group, reduce_group)
    return materialize(model, lambda name, tensor: init(name, tensor, of)) if meta else model


def batches(step: int, batch: int = BATCH, seq: int = SEQ, ignored: str = "few") -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step, [b, s] each; some targets do not count: few, or all of the first third as well."""
    inputs, targets = torch.randint(97, (2, batch, seq), generator=torch.Generator().manual_seed(step)).unbind()
    targets[0, : step + 2] = IGNORED
    if ignored == "first third":
        targets[:, : seq // 3] = IGNORED
    return inputs.clone(), targets.clone()  # each in memory of its own


RECOMPUTE = {
    "none": lambda model, group: apply_recompute(model, "none"),
    "selective": lambda model, group: apply_recompute(model, "selective"),
    "matmuls": lambda model, group: apply_recompute(model, "selective", keep_matmuls),
    "full": lambda model, group: apply_recompute(model, "full"),
    "partitioned": apply_partitioned_recompute,
}


def split_loss(model: Transformer, inputs: torch.Tensor, targets: torch.Tensor, group) -> torch.Tensor:
    """Of a model that returns its rank's logits, or all of them."""
    logits = model(inputs)
    if logits.shape[-1] == model.config.vocab and group.size() > 1:
        return loss(logits, targets)
    return vocab_parallel_cross_entropy(logits, targets, group, model.config.vocab)


def whole_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """By name; those of split parameters are put together. Parameters without one are left out. Collective."""
    named = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
    return {
        n: placement_of(p).tensor_shard.gather(p.grad) if placement_of(p).tensor_shard else p.grad.clone()
        for n, p in named
    }


@functools.cache
def one_process(
    of: ModelConfig,
    optimizer: str = "SGD",
    seq: int = SEQ,
    batch: int = BATCH,
    ignored: str = "few",
    mixture: tuple = (),
) -> dict[str, torch.Tensor]:
    """Loss, gradients and norm of each step, and the weights after the last, by name; and the biases of routers."""
    model, found = whole_model(of, mixture), {}
    stepper = OPTIMIZERS[optimizer](model.parameters())
    for step in range(STEPS):
        stepper.zero_grad()
        inputs, targets = batches(step, batch, seq, ignored)
        step_loss = loss(model(inputs), targets)
        step_loss.backward()
        found[f"loss {step}"] = step_loss.detach()
        found |= {f"gradient {step} {name}": p.grad.clone() for name, p in model.named_parameters()}
        found[f"norm {step}"] = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        stepper.step()
        move_biases(model, step)
    return found | {f"weight {name}": tensor for name, tensor in model.state_dict().items()}


def move_biases(model: Transformer, step: int) -> None:
    """After a step, where there are mixtures; each time farther, so that none comes back to 0. Collective over their
    batch_group.
    """
    if routers_of(model):
        update_bias(model, take_counts(model), BIAS_RATE * (step + 1))


def on_ranks(
    of: ModelConfig, group, optimizer: str = "SGD", recompute: str = "none", seq: int = SEQ, **options
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The same of a split model; and the parameters that ranks should have alike and have not, in any bit."""
    model, found = RECOMPUTE[recompute](split_model(of, group, **options), group), {}
    stepper = OPTIMIZERS[optimizer](model.parameters())
    for step in range(STEPS):
        stepper.zero_grad()
        step_loss = split_loss(model, *batches(step, seq=seq), group)
        step_loss.backward()
        found[f"loss {step}"] = step_loss.detach()
        found |= {f"gradient {step} {name}": whole for name, whole in whole_gradients(model).items()}
        found[f"norm {step}"] = clip_grad_norm_(model.parameters(), MAX_NORM)
        stepper.step()
        with torch.no_grad():  # an evaluation between steps
            model(batches(step, seq=seq)[0])
    found |= {f"weight {name}": tensor for name, tensor in gather_state_dict(model).items()}
    return found, drifted(model, group)


def only_when_there(project_layers, zero: ZeroOptimizer):
    """`project_layers`, which raises an error where a weight's new values are still on their way."""

    def checked(x: torch.Tensor, layers: list):
        weights = [layer.weight for layer in layers]
        for shard in zero.shards:
            on_its_way = shard.work is not None and any(p is weight for p in shard.parameters for weight in weights)
            assert not on_its_way, "a product with weights that have not arrived"
        return project_layers(x, layers)

    return checked


REPLICAS = ("DataParallel", "ZeRO stage 1", "ZeRO stage 2", "fully_shard")


def in_replicas(
    how: str, model: Transformer, replicas, tp, own, seq: int = SEQ, optimizer: str = "SGD", **of_batches
) -> dict:
    """Losses, norms and the weights after 3 steps, by name, of a model whose gradients are averaged over `replicas`;
    those of DataParallel too. how: of REPLICAS; a model for fully_shard is on the meta device. tp: the group that
    shares the logits; own(tensor): what this rank has of a batch. optimizer: of OPTIMIZERS; ZeRO's is SGD.
    """
    of, found = model.config, {}
    named = model.named_parameters(remove_duplicate=False)
    shards = {name: placement_of(p).tensor_shard for name, p in named}
    if how == "fully_shard":
        fill = shard_init(model, lambda name, tensor: init(name, tensor, of))
        wrapped = fully_shard(model, replicas, init=fill)
        stepper, finish = OPTIMIZERS[optimizer](wrapped.parameters()), wrapped.finish
    elif how == "DataParallel":
        wrapped = DataParallel(model, replicas)
        stepper, finish = OPTIMIZERS[optimizer](wrapped.parameters()), wrapped.finish
    else:
        wrapped, options = model, {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.1}
        stepper = ZeroOptimizer(model, torch.optim.SGD, replicas, stage=int(how[-1]), bucket_mb=0.02, **options)
        finish = stepper.finish
        for part in (part for block in model.blocks for part in (block.attention, block.mlp)):
            if getattr(part, "project_layers", project_each) is not project_each:
                part.project_layers = only_when_there(part.project_layers, stepper)
    for step in range(STEPS):
        inputs, targets = batches(step, seq=seq, **of_batches)
        count = (targets != IGNORED).sum()
        summed = vocab_parallel_cross_entropy(wrapped(own(inputs)), own(targets), tp, of.vocab, "sum")
        (summed / count * replicas.size()).backward()
        finish()
        found[f"loss {step}"] = summed.detach() / count
        dist.all_reduce(found[f"loss {step}"], group=replicas)
        if how == "DataParallel":
            found |= {f"gradient {step} {name}": whole for name, whole in whole_gradients(model).items()}
        if how.startswith("ZeRO"):
            found[f"norm {step}"] = stepper.clip_grad_norm_(MAX_NORM)
        else:
            found[f"norm {step}"] = clip_grad_norm_(wrapped.parameters(), MAX_NORM)
        stepper.step()
        stepper.zero_grad()
        move_biases(model, step)
    if how == "fully_shard":  # two times put together: the pieces of a part, then the parts
        state = full_state_dict(wrapped)
        state = {name: shards[name].gather(part) if shards.get(name) else part for name, part in state.items()}
    else:
        state = gather_state_dict(model)
    return found | {f"weight {name}": tensor for name, tensor in state.items()}


def not_as(found: dict, expected: dict, relative: float = 1e-5) -> list[str]:
    """As differing, of what is found."""
    missing = [f"{name} is not expected" for name in found.keys() - expected.keys()]
    return missing or differing(found, {name: expected[name] for name in found}, relative)


def drifted(model: Transformer, group) -> list[str]:
    """Names of parameters that differ in any bit on ranks that should have the same: whole ones, and copies."""
    alike = {group: {n: p for n, p in model.named_parameters() if not placement_of(p).tensor_shard}}
    for number, block in enumerate(model.blocks):
        for name in ("k_proj", "v_proj"):
            layer = getattr(block.attention, name)
            if layer.replicas:
                alike.setdefault(layer.replicas.copies, {})[f"blocks.{number}.{name}"] = layer.weight
    wrong = []
    for members, parameters in alike.items():
        module, names = nn.ParameterList(parameters.values()), list(parameters)
        wrong += [names[int(place)] for place in find_diverged_params(module, members)]
    return wrong


def differing(found: dict, expected: dict, relative: float = 1e-5) -> list[str]:
    """What is not the same within `relative` of the largest element of each tensor."""
    wrong = [f"{name} is there once only" for name in found.keys() ^ expected.keys()]
    for name in found.keys() & expected.keys():
        ours, theirs = found[name].detach(), expected[name].detach()
        if ours.shape != theirs.shape:
            wrong.append(f"{name}: {list(ours.shape)}, not {list(theirs.shape)}")
            continue
        error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
        wrong += [f"{name}: {error:.1e}"] * (not error <= relative)
    return wrong


class Noted:
    """A work whose wait() is noted."""

    def __init__(self, work, events: list):
        self.work, self.events = work, events

    def wait(self, *args):
        self.events.append(("wait", 0))
        return self.work.wait(*args)


class Exchanges:
    """Inside, `events` gets a ("start", numbers) for each all-gather, reduce-scatter and exchange with neighbours that
    is under way, and a ("wait", 0) for each wait.
    """

    def __init__(self, events: list):
        self.events = events

    def noted(self, name: str):
        plain = getattr(dist, name)

        def start(*args, **kwargs):
            if name == "batch_isend_irecv":
                self.events.append(("start", args[0][0].tensor.numel()))
                return [Noted(work, self.events) for work in plain(*args, **kwargs)]
            self.events.append(("start", args[1].numel()))
            work = plain(*args, **kwargs)
            return Noted(work, self.events) if kwargs.get("async_op") else work

        return start

    def __enter__(self):
        names = ["batch_isend_irecv", "all_gather_into_tensor", "reduce_scatter_tensor"]
        names += ["all_gather_single", "reduce_scatter_single"]  # as newer PyTorch calls them
        self.plain = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
        for name in self.plain:
            setattr(dist, name, self.noted(name))
        return self

    def __exit__(self, *error):
        for name, function in self.plain.items():
            setattr(dist, name, function)


class Diary(TorchDispatchMode):
    """What a rank does inside, in order: `events`, each ("product", multiplications), ("start" or "sum", numbers) of an
    all-reduce that is waited for later or at once, or ("wait", 0).
    """

    PRODUCTS = {"mm": 0, "mm.out": 0, "addmm": 1, "addmm_": 1}  # the place of a product's first factor

    def __init__(self):
        super().__init__()
        self.events = []

    @classmethod
    def _should_skip_dynamo(cls):  # otherwise the first operator imports torch._dynamo: seconds on each rank
        return False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        if name in self.PRODUCTS:
            self.events.append(("product", out.numel() * args[self.PRODUCTS[name]].shape[-1]))
        return out

    def all_reduce(self, tensor, *args, async_op=False, **kwargs):
        self.events.append(("start" if async_op else "sum", tensor.numel()))
        work = self.plain(tensor, *args, async_op=async_op, **kwargs)
        return Noted(work, self.events) if async_op else work

    def __enter__(self):
        self.plain, dist.all_reduce = dist.all_reduce, self.all_reduce
        return super().__enter__()

    def __exit__(self, *error):
        dist.all_reduce = self.plain
        return super().__exit__(*error)


class Additions(TorchDispatchMode):
    """Notes the dtypes of what is added up by index, inside. A GPU rounds after each addition to a BF16 number; a CPU
    adds in float32 whatever the dtype, so that results alone do not tell.
    """

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name in ("aten::index_add", "aten::index_add_"):
            self.dtypes.append(args[0].dtype)
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def kept_storages(but=()):
    """What autograd saves inside: bytes by storage; not the storages of the tensors in `but`."""
    kept, own = {}, {tensor.untyped_storage()._cdata for tensor in but}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield kept


def stored(tensors) -> int:
    """Bytes of the storages of tensors, each counted once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
