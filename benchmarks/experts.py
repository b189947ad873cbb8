"""Mixtures of experts of course_lib against transformers', and dispatch against gathering: time, peak memory, bytes.

    python benchmarks/experts.py [PAIRS]        # writes benchmarks/results/experts_<device>.json

Layer: forward and backward of one mixture (router, experts, gradients of x and of all weights) by WAYS, against
MixtralSparseMoeBlock of transformers with the same weights, by its grouped matmuls (its best) and by its loop (eager).
"batched" has as many slots as the fullest expert needs, known in advance; the others are exact too. Choices are even or
skewed: random logits, or SKEW more for the first eighth of the experts. "error": the largest difference of the outputs
over the largest output.

Dispatch: the output of all ranks' experts for each rank's tokens, forward and backward, by `dispatch_and_combine`
(all-to-all), against an all-gather of tokens and gates before the experts and a reduce-scatter after them, both with
grouped experts; k = 8 of 32 also with a token on at most M of 4 nodes. "error": as above. "mib_sent": bytes that a rank
sends, counted.

In float32 on CPUs, in bfloat16 on GPUs. Each kind runs in alternation with its rival, as does the rival with
itself: the spread of that ratio is the noise. Times are medians of PAIRS pairs, on several ranks after a barrier and
until all are done; peaks the least of PEAKS, the largest of all ranks.
"""

import sys
import warnings

import measure
import torch
import torch.distributed as dist
from torch import nn

from course_kit.ranks import Ranks
from course_lib.collectives.traffic import count_traffic
from course_lib.expert_parallel.exchange import dispatch_and_combine
from course_lib.expert_parallel.experts import Experts, batched_experts, grouped_experts, loop_experts
from course_lib.expert_parallel.router import Router
from course_lib.sequence_parallel.model import gather_sequence, reduce_scatter_sequence

PAIRS = 15
PEAKS = 3
WAYS = {"loop": loop_experts, "batched": batched_experts, "grouped": grouped_experts}
SKEW = 1.5
# tokens, hidden, width of an expert, top_k
ON_CPU = {8: (1024, 256, 512, 2), 64: (1024, 256, 64, 8)}
ON_GPU = {8: (8192, 4096, 14336, 2), 64: (8192, 4096, 1792, 8)}
# (experts, k, M of 4 nodes)
CHOICES = [(8, 2, 4), (32, 8, 4), (32, 8, 2)]


def device_and_dtype() -> tuple[torch.device, torch.dtype]:
    gpu = torch.cuda.is_available()
    return torch.device("cuda" if gpu else "cpu"), torch.bfloat16 if gpu else torch.float32


def finished(run):
    """Return `run` with a wait for the device and any other ranks after it."""

    def timed() -> None:
        run()
        if torch.cuda.is_available():
            torch.accelerator.synchronize()
        if dist.is_initialized():
            dist.barrier()

    return timed


def peak(run) -> float:
    """Return the largest peak of all ranks, in MiB. The peak of a rank is the least of PEAKS measurements: a block that
    a gloo thread has freed unnoticed counts until its address is used again.
    """
    local = min(measure.peak_mib(run) for _ in range(PEAKS))
    if not dist.is_initialized():
        return local
    peaks = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, local)
    return max(peaks)


def gap(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out - expected).abs().max() / expected.abs().max()).item()


def step_of(layer: nn.Module, x: torch.Tensor, gradient: torch.Tensor):
    """Return a function that runs forward and backward of a layer, with new gradients each time."""

    def step() -> None:
        layer.zero_grad()
        x.grad = None
        layer(x).backward(gradient)

    return finished(step)


# One layer.


class Mixture(nn.Module):
    """A router and experts, like course_lib.expert_parallel.mixture.MoE; slots: see batched_experts."""

    def __init__(self, theirs: nn.Module, way: str, top_k: int, slots: int):
        super().__init__()
        weights = theirs.experts
        experts, width, hidden = len(weights.down_proj), weights.down_proj.shape[-1], weights.down_proj.shape[1]
        self.router = Router(hidden, experts, top_k)
        self.experts = Experts(experts, hidden, width, WAYS[way])
        self.to(weights.down_proj)
        self.top_k, self.slots = top_k, slots if way == "batched" else None
        with torch.no_grad():
            self.router.weight.copy_(theirs.gate.weight)
            for layer, weight in zip(
                (self.experts.gate_proj, self.experts.up_proj), weights.gate_up_proj.chunk(2, 1), strict=True
            ):
                layer.weight.copy_(weight)
            self.experts.down_proj.weight.copy_(weights.down_proj)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        gates = self.router(rows)
        return self.experts(rows, gates, self.slots or len(rows) * self.top_k).view_as(x)


def mixtral(experts: int, sizes: tuple, skewed: bool, how: str) -> nn.Module:
    """transformers' layer with random weights; how: of its experts' implementations."""
    from transformers import MixtralConfig, MixtralForCausalLM

    _, hidden, width, top_k = sizes
    model = MixtralForCausalLM(
        MixtralConfig(
            num_hidden_layers=1,
            hidden_size=hidden,
            intermediate_size=width,
            num_local_experts=experts,
            num_experts_per_tok=top_k,
            num_attention_heads=8,
            num_key_value_heads=8,
            vocab_size=8,
        )
    )
    model.set_experts_implementation(how)
    layer, generator = model.model.layers[0].mlp, torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
        if skewed:  # x has 1 in its first place: see inputs
            layer.gate.weight[: experts // 8, 0] += SKEW
    device, dtype = device_and_dtype()
    return layer.to(device, dtype).train()


def inputs(tokens: int, hidden: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """x and the gradient of the output, [1, t, h] each."""
    x, gradient = torch.randn(2, 1, tokens, hidden, generator=torch.Generator().manual_seed(seed))
    x[..., 0] = 1
    return tuple(each.to(*device_and_dtype()) for each in (x, gradient))


def compare_layers(pairs: int) -> dict[str, dict]:
    measure.PAIRS = pairs
    figures = {}
    for experts, sizes in (ON_GPU if torch.cuda.is_available() else ON_CPU).items():
        for skewed in (False, True):
            title = f"{experts} experts, {'skewed' if skewed else 'even'}"
            figures[title] = compare_layer(experts, sizes, skewed)
    return figures


def compare_layer(experts: int, sizes: tuple, skewed: bool) -> dict[str, dict]:
    tokens, hidden, width, top_k = sizes
    x, gradient = inputs(tokens, hidden)
    x.requires_grad_()
    theirs = {how: mixtral(experts, sizes, skewed, how) for how in ("grouped_mm", "eager")}
    with torch.no_grad():
        _, _, choices = theirs["eager"].gate(x)
        fullest = int(choices.flatten().bincount(minlength=experts).max())
        expected = theirs["eager"](x)
    rival = step_of(theirs["grouped_mm"], x, gradient)
    layers = {way: Mixture(theirs["eager"], way, top_k, fullest) for way in WAYS}
    layers["transformers, eager"] = theirs["eager"]
    layers["transformers, grouped_mm"] = theirs["grouped_mm"]
    figures = {"tokens": tokens, "hidden": hidden, "width": width, "top_k": top_k}
    figures["busiest over even share"] = fullest * experts / (tokens * top_k)
    for name, layer in layers.items():
        step = step_of(layer, x, gradient)
        itself = name == "transformers, grouped_mm"
        against = f"{name} against {'itself' if itself else 'transformers, grouped_mm'}"
        figures[against] = measure.paired(step, rival)
        figures[name] = {"step_peak_mib": peak(step), "error": gap(layer(x).detach(), expected)}
    return figures


# Dispatch.


def by_gathering(x: torch.Tensor, gates: torch.Tensor, compute, group) -> torch.Tensor:
    """Gather all ranks' tokens, and reduce-scatter the sums of the local experts. x: [t, h]; gates: [t, E]."""
    local_gates = gather_sequence(gates[None], group)[0].chunk(group.size(), 1)[group.rank()]  # [n t, E/n]
    rows = gather_sequence(x[None], group)[0]
    choices = int((local_gates != 0).sum())  # a read on the host, as `dispatch_and_combine` has one
    return reduce_scatter_sequence(compute(rows, local_gates, choices)[None], group)[0]


def compare_dispatch(pairs: int, tokens: int, hidden: int, width: int) -> dict[str, dict]:
    """Return all figures of dispatch, on a rank. tokens: per rank."""
    measure.PAIRS = pairs
    warnings.filterwarnings("ignore")
    group, figures = dist.group.WORLD, {}
    device, dtype = device_and_dtype()
    for experts, top_k, limit in CHOICES:
        router = Router(hidden, experts, top_k, nodes=4, node_limit=limit)
        local = Experts(experts // group.size(), hidden, width, grouped_experts)
        with torch.no_grad():
            for number, parameter in enumerate((*router.parameters(), *local.parameters())):
                seed = number and 100 * number + group.rank()  # the router is the same on all ranks
                generator = torch.Generator().manual_seed(seed)
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
        router, local = router.to(device), local.to(device, dtype)
        (x, gradient), layers, mib_sent, outs = inputs(tokens, hidden, group.rank()), {}, {}, {}
        x, gradient = x[0].requires_grad_(), gradient[0]

        class Dispatch(nn.Module):
            def __init__(self, way: str, router=router, local=local):
                super().__init__()
                self.router, self.local, self.way = router, local, way

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                gates = self.router(x)
                if self.way == "gathering":
                    return by_gathering(x, gates, self.local, group)
                return dispatch_and_combine(x, gates, None, group, self.local)

        for way in ("dispatch", "gathering"):
            layers[way] = Dispatch(way)
            with count_traffic() as traffic:
                step_of(layers[way], x, gradient)()
            mib_sent[way] = traffic.bytes / 2**20
            with torch.no_grad():
                outs[way] = layers[way](x)
        rival = step_of(layers["gathering"], x, gradient)
        reached = (router(x).detach().unflatten(1, (group.size(), -1)) != 0).any(2)
        results = {"ranks a token goes to": reached.sum(1).float().mean().item()}
        for way, name in (("dispatch", "dispatch against gathering"), ("gathering", "gathering against itself")):
            step = step_of(layers[way], x, gradient)
            results[name] = measure.paired(step, rival, dist.barrier)
            results[way] = {
                "step_peak_mib": peak(step),
                "mib_sent": mib_sent[way],
                "error": gap(outs[way], outs["gathering"]),
            }
        figures[f"k = {top_k} of {experts}, on {limit} of 4 nodes"] = results
    return figures


def main(pairs: int = PAIRS) -> None:
    """Measure on this machine, print the figures and write them down."""
    gpus = torch.cuda.device_count()
    sizes = (4096, 4096, 2048) if gpus else (512, 256, 256)
    figures = {"pairs": pairs, "one layer": compare_layers(pairs)}
    figures["dispatch"] = dict(zip(("tokens of a rank", "hidden", "width"), sizes, strict=True))
    for n in [gpus] if gpus else [2, 4]:
        with Ranks(n, timeout_s=1800) as ranks:
            figures[f"dispatch, {n} ranks, {ranks.backend}"] = ranks(compare_dispatch, pairs, *sizes)[0]
    measure.write("experts", figures)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
