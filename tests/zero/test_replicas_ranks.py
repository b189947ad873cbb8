"""ZeRO stage 3 in groups that are replicas of one another (HSDP): four ranks as 2 x 2, against one process. On gloo."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from calls import said
from course_lib.collectives.traffic import count_traffic
from course_lib.single_gpu.model import PRESETS, Transformer, loss
from course_lib.single_gpu.placement import placement_of
from course_lib.zero.program import main as zero_main
from course_lib.zero.program import options, sharded_accumulate
from course_lib.zero.sharded_models import full_state_dict, fully_shard
from course_lib.zero.shards import clip_grad_norm_

CONFIG, SEQ, STEPS, MAX_NORM = PRESETS["debug"], 16, 3, 0.3
PLACES = {"next to each other": [[0, 1], [2, 3]], "across": [[0, 2], [1, 3]], "the second first": [[2, 3], [0, 1]]}


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all ranks together: 8 sequences."""
    return torch.randint(CONFIG.vocab, (2, 8, SEQ), generator=torch.Generator().manual_seed(step)).unbind()


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4)


def in_one_process() -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    model = Transformer(CONFIG)
    optimizer, losses, norms = adamw(model.parameters()), [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        step_loss = loss(model(batch(step)[0]), batch(step)[1])
        step_loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        losses.append(step_loss.item())
    return losses, norms, model.state_dict()


def on_ranks(places: list[list[int]], micro_batches: int):
    """Losses, norms and weights; what a rank keeps; traffic of the last step, and the all-reduces before finish()."""
    mesh = DeviceMesh("cpu", torch.tensor(places), mesh_dim_names=("replica", "shard"))
    model = fully_shard(Transformer(CONFIG, seed=dist.get_rank()), mesh)  # others than the first rank's
    optimizer, losses, norms, finish, early = adamw(model.parameters()), [], [], model.finish, []

    def noted() -> None:
        early.append(traffic.select("all_reduce").calls)
        finish()

    model.finish = noted
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = (part.chunk(4)[dist.get_rank()].chunk(micro_batches) for part in batch(step))
        with count_traffic() as traffic:
            losses.append(sharded_accumulate(model, model, list(zip(*parts, strict=True))).item())
        norms.append(clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    pieces = [part for unit in [*model.units, model.root] for part in unit.flat_params]
    kept, padded = sum(p.numel() for p in model.parameters()), sum(part.layout.padded for part in pieces)
    found = {name: traffic.select(name) for name in ("all_gather", "reduce_scatter", "all_reduce")}
    sent = {name: (each.calls, each.bytes) for name, each in found.items()}
    return losses, norms, full_state_dict(model), kept, padded, len(pieces), sent, early[-1]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("places", PLACES)
def test_losses_norms_and_weights_are_one_processs(ranks, places, micro_batches):
    losses, norms, weights = in_one_process()
    numel = sum(p.numel() for p in Transformer(CONFIG).parameters())
    for found in ranks(on_ranks, PLACES[places], micro_batches):
        assert found[0] == pytest.approx(losses, rel=1e-5) and found[1] == pytest.approx(norms, rel=1e-4)
        for name, value in found[2].items():
            torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-5)
        kept, padded, parts, sent, early = found[3:]
        assert abs(kept - numel / 2) <= parts, "half of it each, and so each rank twice as much as over all four"
        assert sent["reduce_scatter"] == (micro_batches * parts, micro_batches * 4 * padded // 2)
        # Two scalars (tokens and loss), and one all-reduce of each piece in a step, however many micro-batches it has;
        # of two ranks each sends as much as the piece has.
        assert sent["all_reduce"] == (2 + parts, 2 * 6 + 4 * padded // 2)
        assert early >= 1 + parts - 3, "all but two units' and the root's are under way before finish()"


class Weighted(torch.nn.Module):
    """x times the sum of three vectors' elements, each times its number."""

    def __init__(self):
        super().__init__()
        for name, size in VECTORS.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(size)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * sum((vector * torch.arange(1, len(vector) + 1)).sum() for vector in self.parameters())


VECTORS = {"dense": 20, "shared": 50, "expert": 11}  # a piece is a multiple of 8 elements


def with_reduce_groups() -> tuple[dict[str, tuple], float, int]:
    """On a rank of 2 x 2: each vector's span and gradient, the norm, and the bytes of all-reduces in backward."""
    mesh = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("replica", "shard"))
    model = Weighted()
    placement_of(model.shared).reduce_group, placement_of(model.expert).reduce_group = (
        dist.group.WORLD,
        mesh.get_group(0),
    )
    sharded = fully_shard(model, mesh)
    with count_traffic() as traffic:
        sharded(torch.tensor(dist.get_rank() + 1.0)).backward()
        sharded.finish()
    norm = clip_grad_norm_(sharded.parameters(), 1e9).item()
    found = {name: (placement_of(p).flat_shard.span, p.grad.tolist()) for name, p in sharded.module.named_parameters()}
    return found, norm, traffic.select("all_reduce").bytes


def test_a_reduce_group_shares_its_parameter_out_and_has_no_replicas(ranks):
    """All ranks sum x = 1 + 2 + 3 + 4; an expert's copies 1 + 3, or 2 + 4; all divide by the four ranks. The norm
    counts each number of the model once: both experts', and no replica's.
    """
    means = {"dense": (2.5, 2.5), "shared": (2.5, 2.5), "expert": (1.0, 1.5)}
    squares = {name: sum(n * n for n in range(1, size + 1)) for name, size in VECTORS.items()}
    once = {"dense": [2.5], "shared": [2.5], "expert": means["expert"]}
    norm = sum(squares[name] * mean**2 for name, those in once.items() for mean in those) ** 0.5
    for rank, (found, its_norm, sent) in enumerate(ranks(with_reduce_groups)):
        for name, pieces, place in (("dense", 2, rank % 2), ("shared", 4, rank), ("expert", 2, rank // 2)):
            (first, last), gradient = found[name]
            size = -(-VECTORS[name] // (8 * pieces)) * 8
            assert (first, last) == (place * size, min((place + 1) * size, VECTORS[name])), (rank, name)
            expected = [means[name][rank % 2] * (n + 1) for n in range(first, last)]
            assert gradient == pytest.approx(expected), (rank, name)
        assert its_norm == pytest.approx(norm) and sent == 4 * 16, "of two ranks' all-reduce, a piece of dense alone"


def differing(what: str):
    mesh = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("replica", "shard"))
    model = torch.nn.Sequential(torch.nn.Linear(3, 3 + (what == "shape" and dist.get_rank() == 2)))
    if what == "order":
        mesh = DeviceMesh("cpu", torch.tensor([[3, 1], [0, 2]]), mesh_dim_names=("replica", "shard"))
    if what == "line":
        mesh = DeviceMesh("cpu", torch.arange(4))
    return said(lambda: fully_shard(model, mesh))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("shape", "the ranks differ: rank 2 has 0.weight [4, 3]"),
        ("order", "the mesh [[3, 1], [0, 2]]: the ranks of a row must be in ascending order"),
        ("line", "it needs 2 dimensions with names"),
    ],
)
def test_bad_input_gets_one_clear_line(ranks, what, message):
    assert all(message in found and "\n" not in found for found in ranks(differing, what))


def program(stage: int, replicas: int) -> list[float]:
    words = f"--preset debug --steps 3 --batch 4 --seq 16 --micro-batch 2 --stage {stage} --replicas {replicas}"
    return [record["loss"] for record in zero_main(words.split())]


def test_the_programs_losses_are_those_of_one_group(ranks):
    expected = ranks(program, 3, 1)[0]
    for found in ranks(program, 3, 2):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("words", ["--replicas 0 --stage 3", "--replicas 2 --stage 2"])
def test_the_programs_options(words, capsys):
    with pytest.raises(SystemExit):
        options(words.split())
    assert "--replicas must be 1 or more, and needs stage 3" in capsys.readouterr().err
