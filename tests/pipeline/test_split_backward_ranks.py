"""course_lib.pipeline.split_backward on four ranks: I and W are B under other parallelism too. CPU, gloo."""

import torch
import torch.distributed as dist

from course_lib.collectives.traffic import count_traffic
from course_lib.expert_parallel.model import ExpertGroups, apply_expert_parallel
from course_lib.pipeline.split_backward import SplitPass
from course_lib.pipeline.stages import StagePass, split_stages
from course_lib.recompute.modes import apply_recompute
from course_lib.sequence_parallel.model import apply_sequence_parallel
from course_lib.single_gpu.model import ModelConfig
from course_lib.tensor_parallel.model import apply_tensor_parallel
from course_lib.tensor_parallel.vocabulary import vocab_parallel_cross_entropy
from split_models import Diary, group_of, whole_model

MOE = (("experts", 4), ("top_k", 2), ("ffn_hidden", 16), ("aux_loss_coeff", 0.3), ("z_loss_coeff", 0.02))
WAYS = {  # K/V heads, ranks that share matrices, what else
    "tp 4": (4, 4, {}),
    "copies of K and V": (2, 4, {}),
    "chunks": (4, 4, {"chunks": 2}),
    "sequence": (4, 4, {"sequence": True}),
    "sequence, copies of K and V": (2, 4, {"sequence": True}),
    "sequence, full": (4, 2, {"sequence": True, "recompute": "full"}),
    "ep 4": (4, 1, {"mixture": MOE, "ep": 4}),
    "ep 2, tp 2": (4, 2, {"mixture": MOE, "ep": 2}),
    "ep 4, full": (4, 1, {"mixture": MOE, "ep": 4, "recompute": "full"}),
}


def part(kv_heads: int, tp: int, chunks=1, sequence=False, mixture=(), ep=1, recompute="none"):
    """On a rank: a stage, and its group of tensor parallelism."""
    of = ModelConfig(layers=2, hidden=16, heads=4, kv_heads=kv_heads, ffn_hidden=32, vocab=31)
    model = whole_model(of, mixture)
    group = group_of(tp)
    if tp > 1:
        apply_tensor_parallel(model, group, chunks)
    if sequence:
        apply_sequence_parallel(model, group)
    if ep > 1:
        groups = ExpertGroups.make(ep, 1, tp)
        apply_expert_parallel(model, groups.exchange, groups.copies, groups.dp, groups.tp if tp > 1 else None)
    return apply_recompute(split_stages(model, 1)[0], recompute), group


def halves_differ(name: str) -> dict[str, object]:
    """On a rank: gradients of I and W that are not B's to the bit, what W has made too early, and the numbers that are
    multiplied and the bytes that are sent by B, and by I and W.
    """
    kv_heads, tp, options = WAYS[name]
    generator = torch.Generator().manual_seed(dist.get_rank() // tp)
    inputs, targets = torch.randint(31, (2, 2, 3, 8), generator=generator).unbind()
    found, gradients, early = {}, [], []
    for make in (StagePass, SplitPass):
        stage, group = part(kv_heads, tp, **options)

        def finish(logits, group=group, targets=targets):
            return vocab_parallel_cross_entropy(logits, targets[0], group, 31, "sum") / 24

        with count_traffic() as traffic, Diary() as diary:
            passes = [make(stage, tokens, finish) for tokens in inputs]
            for done in passes:
                if make is StagePass:
                    done.backward(torch.ones(()))
                else:
                    done.input_gradient(torch.ones(()))
            if make is SplitPass:
                early = [n for n, p in stage.named_parameters() if p.grad is not None]
                for done in passes:
                    done.weight_gradients()
        multiplied = sum(numbers for event, numbers in diary.events if event == "product")
        found[make.__name__] = multiplied, traffic.bytes
        gradients.append({n: p.grad for n, p in stage.named_parameters() if p.grad is not None})
    whole, halves = gradients
    names = whole.keys() | halves.keys()
    found["wrong"] = [n for n in names if n not in halves or not torch.equal(whole[n], halves[n])]
    return found | {"early": early, "parameters": len(names)}


def all_ways() -> dict[str, dict]:
    return {name: halves_differ(name) for name in WAYS}


def test_the_halves_are_the_whole(ranks):
    """To the bit, on every rank, with all layers in one stage, so that ranks could mix up their order; and no number
    is multiplied, and none is sent, that B does not multiply or send. Sequence parallelism: it gathers x in W alone.
    """
    for rank, of_all in enumerate(ranks(all_ways)):
        for name, found in of_all.items():
            assert found["wrong"] == [] and found["early"] == [] and found["parameters"] > 15, (name, rank, found)
            whole, halves = found["StagePass"], found["SplitPass"]
            assert whole[1] == halves[1] and whole[1] > 0, (name, rank, "bytes", whole[1], halves[1])
            assert whole[0] == halves[0] or name.endswith("full"), (name, rank, "matmuls", whole[0], halves[0])
