"""ZeRO stage 3 on two to four ranks against one process and PyTorch's fully_shard (FSDP2). CPU, gloo."""

import contextlib
import gc
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

from calls import peak_bytes, said
from course_kit.checks.watchers import NoHostReads
from course_lib.collectives.traffic import count_traffic
from course_lib.recompute.modes import apply_recompute
from course_lib.single_gpu.model import ModelConfig, Transformer, init_parameter, loss
from course_lib.single_gpu.placement import placement_of
from course_lib.zero.full_sharding import FullyShard
from course_lib.zero.sharded_models import full_state_dict, fully_shard, load_full_state_dict
from course_lib.zero.sharded_parameters import Encoding, GatheredBuffer
from course_lib.zero.shards import clip_grad_norm_

STEPS, SEQUENCES, SEQ, MAX_NORM = 3, 12, 7, 0.5  # 12 sequences: as many for each of 2, 3 or 4 ranks


def config(tied: bool) -> ModelConfig:
    return ModelConfig(layers=3, hidden=30, heads=3, kv_heads=1, ffn_hidden=37, vocab=53, tied=tied)


def subgroups() -> dict[int, dist.ProcessGroup]:
    """On a rank: groups of the first 2, 3 and 4 ranks; every rank makes all of them."""
    return {n: dist.new_group([*range(n)]) for n in (2, 3, 4)}


def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step for all ranks together, [b, s] each."""
    return torch.randint(53, (2, SEQUENCES, SEQ), generator=torch.Generator().manual_seed(step)).unbind()


def init(name: str, tensor: torch.Tensor, seed: int = 0) -> None:
    """Larger weights than at the start of a training: there, attention's gradients are little but rounding errors."""
    init_parameter(name, tensor, config(True), seed)
    tensor.mul_(4 if tensor.dim() > 1 else 1)


def make_model(tied: bool = True, seed: int = 0) -> Transformer:
    model = Transformer(config(tied), seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            init(name, parameter, seed)
    return model


OPTIMIZERS = {  # eps: a gradient's rounding error must not become a whole step
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9, weight_decay=0.1),
}
LOSSLESS = Encoding(lambda shard: shard.view(torch.uint8), lambda given, out: out.copy_(given.view(out.dtype)))
BLOCK = 32  # elements that share a scale


def to_int8(shard: torch.Tensor) -> torch.Tensor:
    """int8 [n, padded to blocks], then a float32 scale for each block, as bytes."""
    blocks = nn.functional.pad(shard, (0, -len(shard) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return torch.cat([(blocks / scales).round().to(torch.int8).flatten(), scales.flatten().view(torch.int8)])


def from_int8(payloads: torch.Tensor, out: torch.Tensor) -> None:
    numel = -(-out.shape[1] // BLOCK) * BLOCK
    for payload, values in zip(payloads, out, strict=True):
        scales = payload[numel:].clone().view(torch.float32)
        values.copy_((payload[:numel].view(-1, BLOCK) * scales[:, None]).flatten()[: len(values)])


class Checkpointed(nn.Module):
    """Runs blocks again in backward."""

    def __init__(self, blocks: list[nn.Module], use_reentrant: bool):
        super().__init__()
        self.run, self.use_reentrant = blocks, use_reentrant  # a list: no submodules

    def all(self, x: torch.Tensor, *args) -> torch.Tensor:
        for block in self.run:
            x = block(x, *args)
        return x

    def forward(self, *args):
        with warnings.catch_warnings(action="ignore"):  # the first one has no input that requires a gradient
            return checkpoint(self.all, *args, use_reentrant=self.use_reentrant)


def in_one_process(tied: bool, optimizer: str) -> dict[str, list[torch.Tensor]]:
    """Losses, gradients, norms in each step on the whole batch, and the weights after the last."""
    model, found = make_model(tied), {"losses": [], "gradients": [], "norms": []}
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = batches(step)
        step_loss = loss(model(inputs), targets)
        step_loss.backward()
        found["losses"].append(step_loss.detach())
        found["gradients"] += [parameter.grad.clone() for parameter in model.parameters()]
        found["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        optimizer.step()
    return found | {"weights": list(model.state_dict().values())}


def whole_gradients(model: FullyShard) -> dict[str, torch.Tensor]:
    """By name, put together from all ranks' pieces; parameters without a gradient anywhere are left out."""
    wholes = {}
    for part in (part for unit in [*model.units, model.root] for part in unit.flat_params):
        shard = torch.zeros_like(part.shard)
        for parameter, piece in zip(part.sharded_params, part.layout.local_views(shard), strict=True):
            if parameter.grad is not None:
                piece.copy_(parameter.grad)
        wholes.update(zip((each[0][0] for each in part.slots), part.layout.gather(shard), strict=True))
    return wholes


def on_ranks(
    group,
    tied: bool,
    optimizer: str = "AdamW",
    *,
    micro_batches: int = 1,
    recompute: str = "none",
    outside: tuple[bool, int] | None = None,
    meta: bool = False,
    one_unit: bool = False,
    **kwargs,
) -> dict[str, list[torch.Tensor]]:
    """The same by fully_shard. outside: checkpoints round the sharded blocks (use_reentrant, blocks in each)."""
    n, rank = group.size(), group.rank()
    with torch.device("meta" if meta else "cpu"):
        model = Transformer(config(tied)) if meta else make_model(tied, seed=rank)  # others than the first rank's
    names = list(dict(model.named_parameters()))
    apply_recompute(model, recompute)
    units = [model] if one_unit else None
    sharded = fully_shard(model, group, init=init if meta else None, units=units, **kwargs)
    blocks, pieces = model.blocks, list(sharded.parameters())
    if outside:
        reentrant, size = outside
        wrapped = [Checkpointed([*blocks][i : i + size], reentrant) for i in range(0, len(blocks), size)]
        model.blocks = nn.ModuleList(wrapped)
    stepper, found = OPTIMIZERS[optimizer](pieces), {"losses": [], "gradients": [], "norms": []}
    for step in range(STEPS):
        inputs, targets = (part.chunk(n)[rank].chunk(micro_batches) for part in batches(step))
        whole = torch.zeros(())
        for i in range(micro_batches):
            part_loss = loss(sharded(inputs[i]), targets[i]) / micro_batches
            part_loss.backward()
            whole += part_loss.detach()
        sharded.finish()
        dist.all_reduce(whole, group=group)
        found["losses"].append(whole / n)
        gradients = whole_gradients(sharded)
        found["gradients"] += [gradients[name] for name in names]
        found["norms"].append(clip_grad_norm_(pieces, MAX_NORM))
        stepper.step()
        stepper.zero_grad()
        with torch.no_grad():  # an evaluation between steps
            sharded(inputs[0])
    if outside:
        model.blocks = blocks
    return found | {"weights": list(full_state_dict(sharded).values())}


def differing(found: dict, expected: dict, relative: float = 1e-5) -> list[str]:
    """What is not the same within `relative` of the largest element of each tensor, by name and place."""
    wrong = [f"{key}: {len(found[key])}" for key in expected if len(found[key]) != len(expected[key])]
    for key in expected:
        for i, (ours, theirs) in enumerate(zip(found[key], expected[key], strict=False)):
            error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
            wrong += [f"{key} {i}: {error:.1e}"] * (not error <= relative)
    return wrong


WAYS = [
    {"tied": True},
    {"tied": False},
    {"tied": True, "optimizer": "SGD", "micro_batches": 2},
    {"tied": False, "recompute": "full", "meta": True},
    {"tied": True, "recompute": "selective", "encode": LOSSLESS},
    {"tied": False, "outside": (True, 1)},
    {"tied": False, "outside": (False, 1), "micro_batches": 2},
    {"tied": False, "outside": (True, 2)},
    {"tied": False, "outside": (False, 2)},
    {"tied": False, "one_unit": True, "optimizer": "SGD"},
]


def training_differs() -> dict[str, list[str]]:
    """On a rank: what differs from one process, by ranks and way of training."""
    expected, found = {}, {}
    for n, group in subgroups().items():
        ways = {2: WAYS[:3], 3: WAYS, 4: [*WAYS[2:5], WAYS[-1]]}[n]  # odd sizes are cut worst by 3
        for way in ways if dist.get_rank() < n else ():
            options = dict(way)
            key = options.pop("tied"), options.get("optimizer", "AdamW")
            expected[key] = expected.get(key) or in_one_process(*key)
            if n != 3 and options.get("micro_batches"):
                options["micro_batches"] = 3
            found[f"{n} {way}"] = differing(on_ranks(group, key[0], **options), expected[key])
    return found


def test_training_is_that_of_one_process_with_the_whole_batch(ranks):
    """Losses, gradients, norms, weights after 3 clipped steps; 2 to 4 ranks; recomputation and accumulation too."""
    results = ranks(training_differs)
    assert [len(found) for found in results] == [17, 17, 14, 4]
    assert [{key: wrong for key, wrong in found.items() if wrong} for found in results] == [{}] * 4


def in_other_precisions() -> dict[str, list]:
    """On a rank: what differs in bfloat16; bits that a lossless encoding changes; what int8 weights cost and save."""
    group, found = dist.group.WORLD, {}
    expected = in_one_process(False, "SGD")
    for reduce_dtype in (None, torch.float32):
        ours = on_ranks(group, False, "SGD", compute_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        first = {key: values[: len(values) // STEPS] for key, values in ours.items() if key != "weights"}
        theirs = {key: values[: len(values) // STEPS] for key, values in expected.items() if key != "weights"}
        found[f"bfloat16, {reduce_dtype}"] = differing(first, theirs, 0.05) + differing(
            {"weights": ours["weights"]}, {"weights": expected["weights"]}, 0.05
        )
        same = all(torch.equal(a, b) for a, b in zip(ours["weights"], expected["weights"], strict=True))
        found[f"bfloat16, {reduce_dtype}, is not float32"] = ["the same"] * same
    plain, encoded = (on_ranks(group, False, **more) for more in ({}, {"encode": LOSSLESS}))
    equal = [torch.equal(a, b) for key in plain for a, b in zip(plain[key], encoded[key], strict=True)]
    found["lossless"] = [] if all(equal) else ["bits"]
    rough = on_ranks(group, False, "SGD", encode=Encoding(to_int8, from_int8))
    found["int8"] = differing({"losses": rough["losses"]}, {"losses": expected["losses"]}, 0.02)
    same = all(torch.equal(a, b) for a, b in zip(rough["losses"], expected["losses"], strict=True))
    found["int8 is not float32"] = ["the same"] * same
    return found


def test_bfloat16_gathers_and_encodings(ranks):
    """compute_dtype bfloat16: within 5% of the largest element; int8 weights: losses within 2%; lossless: every bit."""
    for found in ranks(in_other_precisions):
        assert not any(found.values()), found


def against_pytorch() -> dict[str, list[str]]:
    """On a rank: what differs from FSDP2 by block."""
    mesh, group = init_device_mesh("cpu", (4,)), dist.group.WORLD
    model, found = make_model(False), {"losses": [], "gradients": [], "norms": [], "weights": []}
    for block in model.blocks:
        torch.distributed.fsdp.fully_shard(block, mesh=mesh)
    torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    for step in range(STEPS):
        inputs, targets = (part.chunk(4)[group.rank()] for part in batches(step))
        step_loss = loss(model(inputs), targets)
        step_loss.backward()
        whole = step_loss.detach().clone()
        dist.all_reduce(whole)
        found["losses"].append(whole / 4)
        found["gradients"] += [parameter.grad.full_tensor() for parameter in model.parameters()]
        found["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).full_tensor())
        optimizer.step()
        optimizer.zero_grad()
    found["weights"] = [parameter.full_tensor() for parameter in model.state_dict().values()]
    return differing(on_ranks(group, False), found, 3e-6)


def test_training_is_that_of_fsdp2(ranks):
    assert ranks(against_pytorch) == [[]] * 4


# What is sent, stored, and when.


def sent_and_stored() -> list[str]:
    """On a rank: what is wrong with the traffic of a second step, and with the bytes that a rank keeps."""
    wrong, (inputs, targets) = [], batches(0)
    for n, group in subgroups().items():
        ways = (
            ("float32", False, 1, {}),
            ("tied", True, 1, {}),
            ("two micro-batches", False, 2, {}),
            ("bfloat16", False, 1, {"compute_dtype": torch.bfloat16}),
            ("float32 sums", False, 1, {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32}),
            ("int8", False, 1, {"encode": Encoding(to_int8, from_int8)}),
        )
        ways = ways if n == 3 else ways[:2]  # of odd sizes, 3 ranks have the most padding
        for name, tied, micro, options in ways if dist.get_rank() < n else ():
            model = fully_shard(make_model(tied), group, **options)
            about = f"{n} ranks, {name}"
            optimizer = OPTIMIZERS["AdamW"](model.parameters())
            for _ in range(2):
                with count_traffic() as traffic:
                    for _ in range(micro):
                        loss(model(inputs), targets).backward()
                    model.finish()
                optimizer.step()
                optimizer.zero_grad()
            shards = [sum(part.layout.shard_numel for part in unit.flat_params) for unit in [*model.units, model.root]]
            units, root = len(model.units), int(tied)
            wrong += [f"{about}: {units} units"] * (units != (4 if tied else 5))
            calls = {"all_gather": micro * (2 * units - 1) + root, "reduce_scatter": micro * (units + root)}
            size = 2 if "compute_dtype" in options else 4
            sizes = [(-(-s // BLOCK) * (BLOCK + 4) if name == "int8" else size * s) for s in shards]
            gathered = micro * (2 * sum(sizes[:-1]) - sizes[-2]) + sizes[-1]
            reduced = micro * sum(shards) * (4 if "reduce_dtype" in options else size)
            expected = {"all_gather": (n - 1) * gathered, "reduce_scatter": (n - 1) * reduced}
            for collective in calls:
                part = traffic.select(collective, (*range(n),))
                wrong += [f"{about}: {part.calls} x {collective}"] * (part.calls != calls[collective])
                wrong += [f"{about}: {collective} of {part.bytes} bytes, not {expected[collective]}"] * (
                    part.bytes != expected[collective]
                )
            wrong += [f"{about}: other collectives"] * (traffic.calls != sum(calls.values()))
            psi = 4 * sum(parameter.numel() for parameter in make_model(tied).parameters())
            if name == "float32":  # 3 Psi less the last unit, for padding a little more
                last = 4 * (30 + 53 * 30)  # norm and head
                exact = (3 * psi - last) * (n - 1) / n
                wrong += [f"{about}: {traffic.bytes} for {exact}"] * (not exact <= traffic.bytes < 1.01 * exact)
            kept = (
                stored(model.parameters()),
                stored(v for s in optimizer.state.values() for v in s.values() if v.dim()),
            )
            wrong += [f"{about}: keeps {kept}"] * (
                kept != (4 * sum(shards), 8 * sum(p.numel() for p in model.parameters()))
            )
            wrong += [f"{about}: no nth"] * (not psi / n <= kept[0] < psi / n * 1.01)
            wrong += [f"{about}: something is whole"] * any(whole_units(model))
    return wrong


def stored(tensors) -> int:
    """Bytes of the storages behind tensors, each once."""
    return sum({s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}.values())


def whole_units(model: FullyShard) -> list[int]:
    """The units whose whole parameters have memory; -1: the root."""
    units = [*enumerate(model.units), (-1, model.root)]
    return [i for i, unit in units if any(part.buffer.values.untyped_storage().nbytes() for part in unit.flat_params)]


def test_a_step_gathers_each_unit_twice_but_the_last_and_a_rank_keeps_an_nth(ranks):
    """To the byte: 2 L - 1 all-gathers (and the root's), L reduce-scatters; parameters and states that are kept."""
    assert ranks(sent_and_stored) == [[]] * 4


class Noted(nn.Module):
    """A layer that tells when its forward computes, and when its backward begins."""

    def __init__(self, number: int, note):
        super().__init__()
        self.linear, self.number, self.note = nn.Linear(20, 20), number, note

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note("forward", self.number)
        return Note.apply(torch.tanh(self.linear(x)), lambda: self.note("backward", self.number))


class Note(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, note):
        ctx.note = note
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.note()
        return gradient, None


def order_of_issue(use_reentrant: bool | None) -> dict:
    """On a rank: all-gathers and reduce-scatters that had started, and units that were whole, at each computation of
    a step; after forward, backward and finish(); and the most units that were whole after any all-gather began.
    """
    events, most = [], [0]

    def note(phase: str, number: int = -1) -> None:
        calls = [traffic.select(name).calls for name in ("all_gather", "reduce_scatter")]
        events.append((phase, number, *calls, whole_units(model)))

    layers = nn.ModuleList(Noted(i, note) for i in range(5))
    net = nn.Module()
    net.layers = layers
    runs = layers if use_reentrant is None else [Checkpointed([layer], use_reentrant) for layer in layers]
    net.forward = lambda x: run_all(runs, x)
    model, plain = fully_shard(net), GatheredBuffer.gather

    def gather(buffer: GatheredBuffer) -> None:
        plain(buffer)
        most[0] = max(most[0], len(whole_units(model)))

    try:
        GatheredBuffer.gather = gather
        for _ in range(2):
            events.clear()
            with count_traffic() as traffic:
                out = model(torch.ones(3, 20, requires_grad=True)).sum()
                note("after forward")
                out.backward()
                note("after backward")
                model.finish()
                note("after finish")
    finally:
        GatheredBuffer.gather = plain
    return {"events": events, "most": most[0]}


def run_all(layers, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def test_the_next_unit_is_on_its_way_while_one_computes_and_two_are_whole_at_most(ranks):
    """In forward and backward; the graph holds all units' parameters all the while."""
    for found in ranks(order_of_issue, None):
        assert found["events"] == [
            *(("forward", i, min(i + 2, 5), 0, [i, i + 1] if i < 4 else [4]) for i in range(5)),
            ("after forward", -1, 5, 0, [4]),
            *(("backward", i, 5 + min(5 - i, 4), 4 - i, [i - 1, i] if i else [0]) for i in reversed(range(5))),
            ("after backward", -1, 9, 4, [0]),
            ("after finish", -1, 9, 5, []),
        ]
        assert found["most"] == 2


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_units_that_are_recomputed_are_gathered_no_more_often(ranks, use_reentrant):
    for found in ranks(order_of_issue, use_reentrant):
        computed = [event[:2] for event in found["events"]]
        forward, backward = [("forward", i) for i in range(5)], []
        for i in reversed(range(5)):
            backward += [("forward", i), ("backward", i)][:: 1 if use_reentrant else -1]
        assert computed == [*forward, ("after forward", -1), *backward, ("after backward", -1), ("after finish", -1)]
        assert found["events"][-1][2:] == (9, 5, []) and found["most"] == 2, found


def steps_without_reading() -> None:
    inputs, targets = batches(0)
    model = fully_shard(make_model(), compute_dtype=torch.bfloat16)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    with NoHostReads():
        for _ in range(2):
            loss(model(inputs), targets).backward()
            model.finish()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def test_a_step_reads_no_value_on_the_host(ranks):
    ranks(steps_without_reading)


# Construction.


class Layers(nn.Module):
    """Layers of 360 kB each, and a buffer."""

    def __init__(self, count: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(300, 300, bias=False) for _ in range(count))
        self.register_buffer("ones", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return run_all(self.layers, x)


def constructed() -> dict:
    """On a rank: the peak, in layers, of making a model of 16 layers from the meta device; and whether the transformer
    has the bits that it has without the meta device.
    """
    kept = []

    def make(name: str, tensor: torch.Tensor) -> None:
        tensor.fill_(0.01)

    def construct() -> None:
        with torch.device("meta"):
            model = Layers(16)
        kept.append(fully_shard(model, init=make))

    found = {"construct": peak_bytes(construct) / 360_000}
    found["buffer"] = kept[0].module.ones.tolist()
    with torch.device("meta"):
        meta = Transformer(config(True))
    real, meta = fully_shard(make_model()), fully_shard(meta, init=init)
    states = full_state_dict(real), full_state_dict(meta)
    found["same names"] = list(states[0]) == list(states[1]) == list(make_model().state_dict())
    found["same bits"] = all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    found["as alone"] = all(torch.equal(value, states[1][name]) for name, value in make_model().state_dict().items())
    return found


def test_a_model_from_the_meta_device_is_never_whole_and_has_the_same_bits(ranks):
    """The pieces are 4 layers of 16; above them: one layer and its copy, laid out, while it is made."""
    for found in ranks(constructed):
        assert 4 <= found["construct"] < 6.2, found
        assert found["buffer"] == pytest.approx([0.01] * 3)
        assert found["same names"] and found["same bits"] and found["as alone"], found


# Modules of all kinds.


class Two(nn.Module):
    """Returns a tuple with a dict in it; a weight of its own is used twice, one is transposed, one is empty."""

    def __init__(self, size: int):
        super().__init__()
        self.a, self.b = nn.Linear(size, size), nn.Linear(size, size, bias=False)
        self.b.weight = self.a.weight
        self.c = nn.Parameter(torch.rand(size, 3).t())
        self.empty, self.scale = nn.Parameter(torch.rand(0, 2)), nn.Parameter(torch.rand(()))

    def forward(self, x: torch.Tensor, *, factor: float):
        return torch.tanh(self.b(self.a(x))) * factor, {"more": [x @ self.c.t() * self.scale + self.empty.sum()]}


class Anything(nn.Module):
    """Odd sizes, units of several modules in another order than they run, weights and modules that are shared inside
    of units and across them, a module without parameters, a scalar that belongs to no unit.
    """

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.late, self.stem = nn.Linear(7, 7), nn.Linear(5, 7)  # the stem runs first
        self.blocks = nn.ModuleList([Two(7), nn.Tanh(), Two(7), nn.Sequential(nn.Linear(7, 7), nn.ReLU())])
        self.blocks.append(self.blocks[3])  # the same block again
        self.blocks[2].b.weight = nn.Parameter(torch.rand(7, 7))
        self.blocks[3][0].bias = self.blocks[2].a.bias  # across units
        self.head, self.norm = nn.Linear(7, 3, bias=False), nn.LayerNorm(7)  # the norm runs first
        self.copy = self.norm  # a module under two names
        self.shift, self.unused = nn.Parameter(torch.rand(())), nn.Parameter(torch.rand(2))

    def forward(self, x: torch.Tensor, skip: tuple = ()) -> dict:
        x = torch.tanh(self.late(torch.tanh(self.stem(x)))) + self.shift
        for i, block in enumerate(self.blocks):
            if i in skip:
                continue
            if isinstance(block, Two):
                first, rest = block(x, factor=0.5)
                x = first + rest["more"][0].sum(-1, keepdim=True)
            else:
                x = block(x)
        return {"out": self.head(self.copy(x))}


def some_input(rank: int, number: int) -> torch.Tensor:
    return torch.rand(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * number + rank))


def run_plain(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(some_input(rank, step))["out"].square().mean()


def run_two(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Two forwards, another one without a graph between them, then one backward."""
    first = run_plain(model, rank, step)
    with torch.no_grad():
        run_plain(model, rank, step + 7)
    return first + run_plain(model, rank, step + 5)


def run_skipping(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Other units in each step, the same on all ranks; the last unit changes."""
    skip = [(), (3, 4), (0, 2), (), (2,)][step % 5]
    return model(some_input(rank, step), skip=skip)["out"].square().mean()


def freeze(*names: str):
    def change(model: Anything) -> None:
        for name in names:
            model.get_submodule(name).requires_grad_(False)

    return change


CASES = {  # how it runs; what is changed before; how it is sharded
    "plain": (run_plain, None, None),
    "two forwards": (run_two, None, None),
    "skipping": (run_skipping, None, None),
    "a frozen unit": (run_plain, freeze("blocks.0"), None),
    "half a unit frozen": (run_two, freeze("blocks.2.a", "stem"), None),
    "all but the head": (run_plain, freeze("late", "stem", "blocks", "norm"), None),
    "units by hand": (run_two, None, lambda m: [m.norm, [m.blocks[0], m.blocks[1]], m.head]),
    "a unit of others": (run_plain, None, lambda m: [[m.head, m.blocks[0]], m.stem]),
    "one small unit": (run_plain, None, lambda m: [m.late]),
}


def modules_differ() -> list[str]:
    """On a rank: gradients and weights that differ from one process with the mean of all ranks' losses."""
    wrong, rank = [], dist.get_rank()
    for name, (run, change, units) in CASES.items():
        model, alone = Anything(rank), Anything(0)
        for net in (model, alone):
            net.double()
            if change:
                change(net)
        sharded = fully_shard(model, units=units and units(model))
        options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}  # what no rank has used does not decay
        sgd, theirs = (torch.optim.SGD(net.parameters(), **options) for net in (sharded, alone))
        for step in range(5 if run is run_skipping else 2):
            run(sharded, rank, step).backward()
            sharded.finish()
            wrong += [f"{name}, step {step}: something is whole"] * any(whole_units(sharded))
            (sum(run(alone, r, step) for r in range(4)) / 4).backward()
            gradients = whole_gradients(sharded)
            for key, parameter in alone.named_parameters():
                expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                same = torch.allclose(gradients[key], expected, rtol=1e-9, atol=1e-12)
                wrong += [f"{name}, step {step}: {key}"] * (not same or gradients[key].stride() != parameter.stride())
            for optimizer in (sgd, theirs):
                optimizer.step()
                optimizer.zero_grad()
        state, expected = full_state_dict(sharded), alone.state_dict()
        wrong += [f"{name}: names"] * (list(state) != list(expected))
        for key, value in expected.items():
            same = key in state and state[key].shape == value.shape
            same = same and torch.allclose(state[key], value, rtol=1e-9, atol=1e-12)
            wrong += [f"{name}: weights {key}"] * (not same)
    return wrong


def test_modules_of_all_kinds_have_the_gradients_of_one_process(ranks):
    """In float64, within 1e-9: SGD with momentum, which passes a parameter without gradient over as alone."""
    assert ranks(modules_differ) == [[]] * 4


def multi_module_units() -> dict:
    """On a rank: all-gathers of a step of a model whose first and last unit have two modules each."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.second, self.first = nn.Linear(4, 4), nn.Linear(4, 4)
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.head, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, x):
            return self.head(self.norm(run_all(self.blocks, torch.tanh(self.second(torch.tanh(self.first(x)))))))

    model, found = fully_shard(Net()), {}
    for _ in range(2):
        with count_traffic() as traffic:
            model(torch.ones(2, 4)).sum().backward()
            model.finish()
    found["units"] = [len(unit.modules) for unit in model.units]
    found["gathers"], found["reduces"] = traffic.select("all_gather").calls, traffic.select("reduce_scatter").calls
    with count_traffic() as traffic, torch.no_grad():
        model.eval()(torch.ones(2, 4))
    found["evaluation"] = traffic.select("all_gather").calls, whole_units(model)
    return found


def test_a_unit_of_several_modules_is_gathered_once_a_pass(ranks):
    for found in ranks(multi_module_units):
        assert found == {"units": [2, 1, 1, 1, 2], "gathers": 9, "reduces": 5, "evaluation": (5, [])}


def after_a_skip() -> list[int]:
    """On a rank: all-gathers of each step of 4 units, of which the last one is left out from the third step on."""
    torch.manual_seed(0)
    net, found = nn.Module(), []
    net.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
    net.forward = lambda x, count: run_all(net.layers[:count], x)
    model = fully_shard(net)
    for count in (4, 4, 3, 3, 3, 4, 4):
        with count_traffic() as traffic:
            model(torch.ones(2, 4), count).sum().backward()
            model.finish()
        found.append(traffic.select("all_gather").calls)
    return found


def test_the_order_is_learnt_from_the_last_forward(ranks):
    """A wrong guess costs an all-gather in that step alone."""
    assert ranks(after_a_skip) == [[7, 7, 6, 5, 5, 7, 7]] * 4


def own_groups() -> dict:
    """On a rank: the second layer is shared by ranks 0 and 2, and by 1 and 3."""
    pairs, rank = [dist.new_group([0, 2]), dist.new_group([1, 3])], dist.get_rank()
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3, bias=False))
    placement_of(net[1].weight).reduce_group = pairs[rank % 2]
    start = [value.clone() for value in net.state_dict().values()]
    model = fully_shard(net)
    x = torch.rand(4, 3, generator=torch.Generator().manual_seed(rank))
    model(x).square().sum().backward()
    model.finish()
    state, gradients = full_state_dict(model), whole_gradients(model)
    alone = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3, bias=False))
    alone.load_state_dict(state)
    alone(x).square().sum().backward()
    sizes = [placement_of(parameter).flat_shard.group.size() for parameter in model.parameters()]
    return {
        "start": start,
        "state": state,
        "gradients": gradients,
        "sizes": sizes,
        "own": [p.grad for p in alone.parameters()],
        "norm": clip_grad_norm_(model.parameters(), 1e9),
    }


def test_a_parameter_with_a_group_of_its_own_is_shared_out_there_and_divided_by_the_whole_size(ranks):
    results = ranks(own_groups)
    for rank, found in enumerate(results):
        assert sorted(found["sizes"]) == [2, 4, 4]
        assert torch.equal(found["state"]["1.weight"], results[rank % 2]["start"][2])
        assert torch.equal(found["state"]["0.weight"], results[0]["start"][0])
        pair = sum(results[r]["own"][2] for r in (rank % 2, rank % 2 + 2)) / 4
        torch.testing.assert_close(found["gradients"]["1.weight"], pair)
        torch.testing.assert_close(found["gradients"]["0.weight"], sum(each["own"][0] for each in results) / 4)
        whole = [results[r]["gradients"]["1.weight"] for r in (0, 1)]  # one for each pair of ranks: both count
        whole += [results[0]["gradients"][name] for name in ("0.weight", "0.bias")]
        torch.testing.assert_close(found["norm"], torch.cat([g.flatten() for g in whole]).norm())


# Mistakes.


def wrong_arguments() -> dict[str, str]:
    rank, net = dist.get_rank(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    half = torch.bfloat16 if rank == 2 else None
    calls = {
        "meta": lambda: fully_shard(nn.Linear(3, 3, device="meta")),
        "meta buffer": lambda: fully_shard(nn.BatchNorm1d(3, affine=False, device="meta")),
        "inside": lambda: fully_shard(net, units=[net, net[0]]),
        "twice": lambda: fully_shard(net, units=[net[0], net[0]]),
        "foreign": lambda: fully_shard(net, units=[nn.Linear(3, 3)]),
        "shape": lambda: fully_shard(nn.Linear(3, 4 if rank == 2 else 3)),
        "compute_dtype": lambda: fully_shard(net, compute_dtype=half),
        "reduce_dtype": lambda: fully_shard(net, reduce_dtype=half),
        "units": lambda: fully_shard(net, units=[net] if rank == 2 else [net[0], net[1]]),
        "again": lambda: fully_shard(fully_shard(nn.Linear(3, 3))),
    }
    return {name: said(call) for name, call in calls.items()}


def test_bad_arguments_are_one_line_on_all_ranks(ranks):
    first, *others = ranks(wrong_arguments)
    assert others == [first] * 3
    assert all(text.startswith("ValueError: ") and "\n" not in text for text in first.values()), first
    parts = {
        "meta": ["weight is on the meta device", "init"],
        "meta buffer": ["running_mean is on the meta device"],
        "inside": ["Linear", "is inside another one"],
        "twice": ["Linear", "is listed twice"],
        "foreign": ["a unit is not of the module"],
        "shape": ["rank 2 has weight [4, 3]"],
        "compute_dtype": ["rank 2", "bfloat16"],
        "reduce_dtype": ["rank 2", "bfloat16"],
        "units": ["rank 2", "'units': 1"],
        "again": ["sharded already"],
    }
    for name, words in parts.items():
        assert all(word in first[name] for word in words), (name, first[name])


def misuse() -> dict[str, str]:
    """On a rank: what is said where the optimizer steps before finish(), in the first step and later."""
    found, (inputs, targets) = {}, batches(0)
    for name, make in OPTIMIZERS.items():
        model, other = fully_shard(make_model()), fully_shard(make_model())
        optimizer, free = make(model.parameters()), make(other.parameters())
        for step in range(2):
            for micro in range(2):
                loss(model(inputs), targets).backward()
                found[f"{name} {step} {micro}"] = said(optimizer.step)
            free.step()  # of another model
            model.finish()
            optimizer.step()
            optimizer.zero_grad()
    return found


def test_a_step_before_finish_is_one_clear_line(ranks):
    for found in ranks(misuse):
        for text in found.values():
            assert text.startswith("RuntimeError: optimizer.step() before finish()") and "\n" not in text


def changed_values() -> list[str]:
    """On a rank: pieces that are changed between steps, or while the last unit is kept, are gathered anew."""
    wrong, model = [], fully_shard(make_model(False))
    inputs, _ = batches(0)
    first = model(inputs).detach()  # keeps the last unit and the root
    wrong += ["kept"] * (whole_units(model) != [4])
    with torch.no_grad():
        for unit in model.units:
            for part in unit.flat_params:
                for parameter in part.sharded_params:
                    parameter.mul_(2)
    alone = make_model(False)
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter.mul_(2)
    second = model(inputs).detach()
    wrong += ["old values"] * (not torch.allclose(second, alone(inputs), rtol=1e-4, atol=1e-5))
    wrong += ["no change"] * torch.allclose(first, second)
    return wrong


def test_changed_pieces_are_gathered_anew(ranks):
    assert ranks(changed_values) == [[]] * 4


def lives() -> dict[str, bool]:
    """On a rank: whether wrapper and model go when they should; what an error in forward leaves; parameters between."""
    found, (inputs, targets) = {}, batches(0)
    net = make_model()
    model = fully_shard(net)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    for _ in range(2):
        loss(model(inputs), targets).backward()
        model.finish()
        optimizer.step()
        optimizer.zero_grad()
    pieces = list(model.parameters())
    found["pieces between steps"] = all(p.dim() == 1 and placement_of(p).flat_shard is not None for p in pieces)
    found["of the same optimizer"] = {*pieces} == {p for group in optimizer.param_groups for p in group["params"]}
    with contextlib.suppress(IndexError):
        model(inputs + 1000)
    expected = make_model()
    expected.load_state_dict(full_state_dict(model))
    found["an error in forward"] = torch.allclose(model(inputs), expected(inputs), rtol=1e-4, atol=1e-5)
    model.finish()
    before, (late, target) = len(_global_optimizer_pre_hooks), batches(1)
    gone = [weakref.ref(each) for each in (model, net, *(part.buffer for part in model.flat_params))]
    step_loss = loss(model(late), target)
    del model
    gc.collect()
    step_loss.backward()  # the module keeps what the wrapper knows
    found["the wrapper lives as long as its module"] = all(ref() is not None for ref in gone)
    with contextlib.suppress(RuntimeError):
        optimizer.step()
        found["a step without finish()"] = False
    gone[0]().finish()
    found["gradients"] = all(p.grad is not None for p in pieces if p.numel())
    del net, optimizer, pieces, step_loss
    gc.collect()
    found["both go together"] = not any(ref() for ref in gone)
    found["so does the hook on optimizers"] = len(_global_optimizer_pre_hooks) == before - 1
    fully_shard(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)))(torch.ones(2, 3)).sum().backward()
    fully_shard(nn.Linear(3, 1))(torch.ones(2, 3)).sum().backward()  # a root alone
    buffered = fully_shard(Layers(1))
    state = full_state_dict(buffered)
    buffered.module.ones.add_(1)
    found["a state is a copy"] = state["ones"].tolist() == [1, 1, 1]
    return found


def test_the_module_keeps_its_wrapper_and_both_go_together(ranks):
    for found in ranks(lives):
        assert all(found.values()), found


def looked_at_in_between(tied: bool) -> list[torch.Tensor]:
    """Gradients, where the model runs without grad between a forward and its backward, and where it does not."""
    found, (inputs, targets) = [], (part.chunk(4)[dist.get_rank()] for part in batches(0))
    for look in (False, True):
        model = fully_shard(make_model(tied))
        step_loss = loss(model(inputs), targets)
        if look:
            with torch.no_grad():
                model(inputs)
        step_loss.backward()
        model.finish()
        found.append(torch.cat([gradient.flatten() for gradient in whole_gradients(model).values()]))
    return found


def test_a_forward_without_grad_between_forward_and_backward_changes_nothing(ranks):
    for tied in (True, False):
        for plain, looked in ranks(looked_at_in_between, tied):
            assert torch.equal(plain, looked)


def loaded() -> tuple[dict, dict, list[str]]:
    """A state, what a model with other weights has after loading it and failing to load bad ones, and the messages."""
    first = fully_shard(make_model(tied=True))
    second = fully_shard(make_model(tied=True, seed=1), compute_dtype=torch.bfloat16)
    state = full_state_dict(first)
    load_full_state_dict(second, state)
    bad_states = {}, state | {"more": torch.zeros(1)}, state | {"norm.weight": torch.zeros(2)}
    errors = [said(lambda bad=bad: load_full_state_dict(second, bad)) for bad in bad_states]
    return state, full_state_dict(second), errors


def test_a_whole_state_is_loaded_and_a_bad_one_is_one_line(ranks):
    for state, after, said_of in ranks(loaded):
        assert list(state) == list(after) and all(torch.equal(state[name], after[name]) for name in state)
        names = ("blocks.0.attention.k_proj.weight", "more", "norm.weight")
        for text, name in zip(said_of, names, strict=True):
            assert text.startswith(f"ValueError: {name}: the module has") and "\n" not in text


class Routed(nn.Module):
    """A layer that keeps an auxiliary loss on itself, as a router does."""

    def __init__(self):
        super().__init__()
        self.router, self.expert = nn.Linear(6, 3), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.router(x).softmax(-1)
        self.auxiliary = gates.mean(0).square().sum()
        return x + torch.tanh(self.expert(x)) * gates.amax(-1, keepdim=True)


def with_auxiliary_losses() -> tuple[dict, dict]:
    """Gradients by name of a model whose layers keep an auxiliary loss: sharded, and the mean of the ranks' own."""
    torch.manual_seed(0)
    net = nn.Module()
    net.blocks = nn.ModuleList(Routed() for _ in range(3))
    net.forward = lambda x: [x := block(x) for block in net.blocks][-1]
    x = torch.rand(5, 6, generator=torch.Generator().manual_seed(dist.get_rank()))

    def backward(run) -> None:
        out = run(x)
        (out.square().mean() + sum(block.auxiliary for block in net.blocks)).backward()

    backward(net)
    expected = {}
    for name, parameter in net.named_parameters():
        dist.all_reduce(parameter.grad)
        expected[name], parameter.grad = parameter.grad / dist.get_world_size(), None
    model = fully_shard(net)
    backward(model)
    model.finish()
    return whole_gradients(model), expected


def test_an_auxiliary_loss_that_a_unit_keeps_on_itself_has_its_gradient(ranks):
    for found, expected in ranks(with_auxiliary_losses):
        assert found.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(found[name], expected[name])
