"""Wrong answers that the checks of notebook 08 must catch. None of them hangs."""

# %% 08.1 gates are not divided by their sum
def top_k_gates(scores, ranking, k):

    experts = ranking.topk(k, dim=-1).indices
    gates = scores.gather(-1, experts).clamp(min=torch.finfo(scores.dtype).tiny)
    return torch.zeros_like(scores).scatter(-1, experts, gates)

# %% 08.1 divided for k = 1 too
def top_k_gates(scores, ranking, k):

    experts = ranking.topk(k, dim=-1).indices
    gates = scores.gather(-1, experts)
    gates = (gates / gates.sum(-1, keepdim=True)).clamp(min=torch.finfo(gates.dtype).tiny)
    return torch.zeros_like(scores).scatter(-1, experts, gates)

# %% 08.1 the scores choose, the ranking is ignored
def top_k_gates(scores, ranking, k):

    gates, experts = scores.topk(k, dim=-1)
    gates = gates / gates.sum(-1, keepdim=True) if k > 1 else gates
    return torch.zeros_like(scores).scatter(-1, experts, gates.clamp(min=torch.finfo(gates.dtype).tiny))

# %% 08.1 the ranking's values are the gates
def top_k_gates(scores, ranking, k):

    gates, experts = ranking.topk(k, dim=-1)
    gates = gates / gates.sum(-1, keepdim=True) if k > 1 else gates
    gates = gates + 0 * scores.sum(-1, keepdim=True)
    return torch.zeros_like(scores).scatter(-1, experts, gates.clamp(min=torch.finfo(gates.dtype).tiny))

# %% 08.1 a mask, and no clamp
def top_k_gates(scores, ranking, k):

    mask = torch.zeros_like(scores).scatter(-1, ranking.topk(k, dim=-1).indices, 1.0)
    gates = scores * mask
    return gates / gates.sum(-1, keepdim=True) if k > 1 else gates

# %% 08.1 all gates are clamped, chosen or not
def top_k_gates(scores, ranking, k):

    mask = torch.zeros_like(scores).scatter(-1, ranking.topk(k, dim=-1).indices, 1.0)
    gates = scores * mask
    gates = gates / gates.sum(-1, keepdim=True) if k > 1 else gates
    return gates.clamp(min=torch.finfo(gates.dtype).tiny)

# %% 08.1 a threshold: more than k where scores are equal
def top_k_gates(scores, ranking, k):

    experts = ranking >= ranking.topk(k, dim=-1).values[..., -1:]
    gates = scores.masked_fill(~experts, 0)
    gates = gates / gates.sum(-1, keepdim=True) if k > 1 else gates
    return torch.where(experts, gates.clamp(min=torch.finfo(gates.dtype).tiny), 0)

# %% 08.1 a softmax of the chosen scores
def top_k_gates(scores, ranking, k):

    experts = ranking.topk(k, dim=-1).indices
    gates = scores.gather(-1, experts)
    gates = gates.softmax(-1) if k > 1 else gates
    return torch.zeros_like(scores).scatter(-1, experts, gates)

# %% 08.1 filled in without a gradient
def top_k_gates(scores, ranking, k):

    experts = ranking.topk(k, dim=-1).indices
    gates = scores.gather(-1, experts)
    gates = gates / gates.sum(-1, keepdim=True) if k > 1 else gates
    out = torch.zeros_like(scores)
    out.scatter_(-1, experts, gates.detach().clamp(min=torch.finfo(gates.dtype).tiny))
    return out + 0 * scores

# %% 08.2 fake: all tokens through all experts, masked by their gates
def loop_experts(experts, x, gates, choices):

    x, *weights = experts.weights(x)
    out = torch.zeros_like(x, dtype=gates.dtype)
    for e, (gate, up, down) in enumerate(zip(*(weight.unbind() for weight in weights), strict=True)):
        rows = F.linear(swiglu(F.linear(x, gate), F.linear(x, up)), down)
        out = out + rows * gates[:, e, None]
    return out.to(x.dtype)

# %% 08.2 fake: one product of all tokens with all experts
def loop_experts(experts, x, gates, choices):

    x, gate, up, down = experts.weights(x)
    rows = swiglu(x @ gate.transpose(1, 2), x @ up.transpose(1, 2)) @ down.transpose(1, 2)
    return (rows * gates.t()[..., None]).sum(0).to(x.dtype)

# %% 08.2 experts without a token are left out
token = gates.detach()[:, e].nonzero().squeeze(1)
=>
token = gates.detach()[:, e].nonzero().squeeze(1)
if len(token) == 0:
    continue

# %% 08.2 a second choice overwrites the first
out = out.index_add(0, token, rows * gates[token, e, None])
=>
out = out.index_copy(0, token, (rows * gates[token, e, None]).to(out.dtype))

# %% 08.2 gates before the experts
rows = x[token] => rows = x[token] * gates[token, e, None]
rows * gates[token, e, None] => rows.to(gates.dtype)

# %% 08.2 gates without a gradient
* gates => * gates.detach()

# %% 08.2 gate and up the other way round
gate, up => up, gate

# %% 08.2 without gates: a plain sum
rows * gates => rows + 0 * gates

# %% 08.2 returns float32, whatever x is
return out.to(x.dtype) => return out

# %% 08.2 sums in the dtype of x
torch.zeros_like(x, dtype=gates.dtype) => torch.zeros_like(x)
rows * gates[token, e, None]) => (rows * gates[token, e, None]).to(x.dtype))

# %% 08.3 fake: a loop over experts in a list comprehension
def grouped_experts(experts, x, gates, choices):
    x, gate, up, down = experts.weights(x)
    expert, token, ends = sorted_choices(gates, choices)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    rows = x.index_select(0, token).split(sizes)
    rows = torch.cat([F.linear(swiglu(F.linear(r, g), F.linear(r, u)), d) for r, g, u, d in zip(rows, gate, up, down)])
    rows = rows * gates.flatten().index_select(0, token * gates.shape[1] + expert)[:, None]
    return torch.zeros_like(x, dtype=gates.dtype).index_add(0, token, rows).to(x.dtype)

# %% 08.3 fake: all tokens through all experts, in a list comprehension
def grouped_experts(experts, x, gates, choices):
    x, *weights = experts.weights(x)
    parts = [F.linear(swiglu(F.linear(x, g), F.linear(x, u)), d) for g, u, d in zip(*weights)]
    return sum(part * gate[:, None] for part, gate in zip(parts, gates.unbind(1))).to(x.dtype)

# %% 08.3 nonzero asks the host how many there are
torch.nonzero_static(by_expert, size=choices) => by_expert.nonzero()
rows = TakeByToken.apply(x, token) => rows = x.index_select(0, token)
---
return AddByToken.apply(rows, token, len(x)).to(x.dtype)
=>
return torch.zeros_like(x, dtype=gates.dtype).index_add(0, token, rows).to(x.dtype)

# %% 08.3 a mask asks the host how many there are
def sorted_choices(gates, choices):
    chosen = gates.detach().t() != 0
    places = torch.arange(gates.numel()).view_as(chosen)[chosen]
    return places // len(gates), places % len(gates), chosen.sum(1).cumsum(0, dtype=torch.int32)


def grouped_experts(experts, x, gates, choices):
    x, gate, up, down = experts.weights(x)
    expert, token, ends = sorted_choices(gates, choices)
    rows = x.index_select(0, token)
    rows = swiglu(grouped_matmul(rows, gate, ends), grouped_matmul(rows, up, ends))
    row_gates = gates.flatten().index_select(0, token * gates.shape[1] + expert)
    rows = grouped_matmul(rows, down, ends) * row_gates[:, None]
    return torch.zeros_like(x, dtype=gates.dtype).index_add(0, token, rows).to(x.dtype)

# %% 08.3 ends are added up on the host
def sorted_choices(gates, choices):
    by_expert, ends, total = gates.detach().t(), [], 0
    expert, token = torch.nonzero_static(by_expert, size=choices).unbind(1)
    for size in (by_expert != 0).sum(1).tolist():
        total += size
        ends.append(total)
    return expert, token, torch.tensor(ends, dtype=torch.int32)


def grouped_experts(experts, x, gates, choices):
    x, gate, up, down = experts.weights(x)
    expert, token, ends = sorted_choices(gates, choices)
    rows = x.index_select(0, token)
    rows = swiglu(grouped_matmul(rows, gate, ends), grouped_matmul(rows, up, ends))
    row_gates = gates.flatten().index_select(0, token * gates.shape[1] + expert)
    rows = grouped_matmul(rows, down, ends) * row_gates[:, None]
    return torch.zeros_like(x, dtype=gates.dtype).index_add(0, token, rows).to(x.dtype)

# %% 08.3 ends are how many, not where
(1).cumsum(0, dtype=torch.int32) => (1).to(torch.int32)
rows = TakeByToken.apply(x, token) => rows = x.index_select(0, token)
---
return AddByToken.apply(rows, token, len(x)).to(x.dtype)
=>
return torch.zeros_like(x, dtype=gates.dtype).index_add(0, token, rows).to(x.dtype)

# %% 08.3 sorted by token
def sorted_choices(gates, choices):
    token, expert = torch.nonzero_static(gates.detach(), size=choices).unbind(1)
    return expert, token, (gates.detach() != 0).sum(0).cumsum(0, dtype=torch.int32)


def grouped_experts(experts, x, gates, choices):
    x, gate, up, down = experts.weights(x)
    expert, token, ends = sorted_choices(gates, choices)
    rows = x.index_select(0, token)
    rows = swiglu(grouped_matmul(rows, gate, ends), grouped_matmul(rows, up, ends))
    row_gates = gates.flatten().index_select(0, token * gates.shape[1] + expert)
    rows = grouped_matmul(rows, down, ends) * row_gates[:, None]
    return torch.zeros_like(x, dtype=gates.dtype).index_add(0, token, rows).to(x.dtype)

# %% 08.3 the gates of the wrong rows
rows = TakeByToken.apply(x, token) => rows = x.index_select(0, token)
gates.flatten => gates.t().flatten
---
return AddByToken.apply(rows, token, len(x)).to(x.dtype)
=>
return torch.zeros_like(x, dtype=gates.dtype).index_add(0, token, rows).to(x.dtype)

# %% 08.3 ends are counted in a loop over experts
return expert, token, (by_expert != 0).sum(1).cumsum(0, dtype=torch.int32)
=>
return expert, token, torch.stack([(by_expert[: e + 1] != 0).sum() for e in range(len(by_expert))]).int()
---
rows = TakeByToken.apply(x, token) => rows = x.index_select(0, token)
---
return AddByToken.apply(rows, token, len(x)).to(x.dtype)
=>
return torch.zeros_like(x, dtype=gates.dtype).index_add(0, token, rows).to(x.dtype)

# %% 08.3 gates in the dtype of x
row_gates[:, None] => row_gates[:, None].to(x.dtype)

# %% 08.4 fake: all tokens through all experts, masked by their gates
def batched_experts(experts, x, gates, slots):
    x, gate, up, down = experts.weights(x)
    by_expert = gates.t()
    kept = by_expert * (by_expert >= by_expert.topk(min(slots, len(x)), dim=1).values[:, -1:])
    rows = swiglu(x @ gate.transpose(-2, -1), x @ up.transpose(-2, -1)) @ down.transpose(-2, -1)
    return (rows * kept[..., None]).sum(0).to(x.dtype)

# %% 08.4 fake: a loop over experts
def batched_experts(experts, x, gates, slots):
    x, *weights = experts.weights(x)
    out = torch.zeros_like(x, dtype=gates.dtype)
    for e, (gate, up, down) in enumerate(zip(*(weight.unbind() for weight in weights), strict=True)):
        token = gates.detach()[:, e].nonzero().squeeze(1)
        token = token[gates.detach()[token, e].argsort(descending=True)[:slots]]
        rows = F.linear(swiglu(F.linear(x[token], gate), F.linear(x[token], up)), down)
        out = out.index_add(0, token, rows * gates[token, e, None])
    return out.to(x.dtype)

# %% 08.4 the first tokens get the slots
def batched_experts(experts, x, gates, slots):
    x, gate, up, down = experts.weights(x)
    token = (gates.detach().t() != 0).to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :slots]
    slot_gates = gates.t().gather(1, token)
    rows = x.index_select(0, token.flatten()).view(*token.shape, -1)
    rows = swiglu(rows @ gate.transpose(-2, -1), rows @ up.transpose(-2, -1))
    rows = rows @ down.transpose(-2, -1) * slot_gates[..., None]
    out = torch.zeros_like(x, dtype=gates.dtype).index_add(0, token.flatten(), rows.flatten(0, 1))
    return out.to(x.dtype)

# %% 08.4 slots for all tokens
def batched_experts(experts, x, gates, slots):
    x, gate, up, down = experts.weights(x)
    slot_gates, token = gates.t().topk(len(x), dim=1)
    rows = x.index_select(0, token.flatten()).view(*token.shape, -1)
    rows = swiglu(rows @ gate.transpose(-2, -1), rows @ up.transpose(-2, -1))
    rows = rows @ down.transpose(-2, -1) * slot_gates[..., None]
    out = torch.zeros_like(x, dtype=gates.dtype).index_add(0, token.flatten(), rows.flatten(0, 1))
    return out.to(x.dtype)

# %% 08.4 gates only choose, and weigh nothing
def batched_experts(experts, x, gates, slots):
    x, gate, up, down = experts.weights(x)
    slot_gates, token = gates.t().topk(min(slots, len(x)), dim=1)
    rows = x.index_select(0, token.flatten()).view(*token.shape, -1)
    rows = swiglu(rows @ gate.transpose(-2, -1), rows @ up.transpose(-2, -1))
    rows = rows @ down.transpose(-2, -1) * (slot_gates != 0)[..., None] + 0 * slot_gates[..., None]
    out = torch.zeros_like(x, dtype=gates.dtype).index_add(0, token.flatten(), rows.flatten(0, 1))
    return out.to(x.dtype)

# %% 08.4 gates without a gradient
def batched_experts(experts, x, gates, slots):
    x, gate, up, down = experts.weights(x)
    slot_gates, token = gates.detach().t().topk(min(slots, len(x)), dim=1)
    rows = x.index_select(0, token.flatten()).view(*token.shape, -1)
    rows = swiglu(rows @ gate.transpose(-2, -1), rows @ up.transpose(-2, -1))
    rows = rows @ down.transpose(-2, -1) * slot_gates[..., None]
    out = torch.zeros_like(x, dtype=gates.dtype).index_add(0, token.flatten(), rows.flatten(0, 1))
    return out.to(x.dtype)

# %% 08.4 a second choice overwrites the first
def batched_experts(experts, x, gates, slots):
    x, gate, up, down = experts.weights(x)
    slot_gates, token = gates.t().topk(min(slots, len(x)), dim=1)
    rows = x.index_select(0, token.flatten()).view(*token.shape, -1)
    rows = swiglu(rows @ gate.transpose(-2, -1), rows @ up.transpose(-2, -1))
    rows = rows @ down.transpose(-2, -1) * slot_gates[..., None]
    out = torch.zeros_like(x, dtype=gates.dtype).index_copy(0, token.flatten(), rows.flatten(0, 1).to(gates.dtype))
    return out.to(x.dtype)

# %% 08.4 one slot too few
def batched_experts(experts, x, gates, slots):
    x, gate, up, down = experts.weights(x)
    slot_gates, token = gates.t().topk(min(slots, len(x)) - 1, dim=1)
    rows = x.index_select(0, token.flatten()).view(*token.shape, -1)
    rows = swiglu(rows @ gate.transpose(-2, -1), rows @ up.transpose(-2, -1))
    rows = rows @ down.transpose(-2, -1) * slot_gates[..., None]
    out = torch.zeros_like(x, dtype=gates.dtype).index_add(0, token.flatten(), rows.flatten(0, 1))
    return out.to(x.dtype)

# %% 08.4 returns float32, whatever x is
def batched_experts(experts, x, gates, slots):
    x, gate, up, down = experts.weights(x)
    slot_gates, token = gates.t().topk(min(slots, len(x)), dim=1)
    rows = x.index_select(0, token.flatten()).view(*token.shape, -1)
    rows = swiglu(rows @ gate.transpose(-2, -1), rows @ up.transpose(-2, -1))
    rows = rows @ down.transpose(-2, -1) * slot_gates[..., None]
    out = torch.zeros_like(x, dtype=gates.dtype).index_add(0, token.flatten(), rows.flatten(0, 1))
    return out

# %% 08.4 gates in the dtype of x
slot_gates[..., None] => slot_gates[..., None].to(x.dtype)

# %% 08.5 values by the name within the block
check_moe(model, experts, top_k, **routing) =>
f"blocks.{number}.mlp.{name}" => name

# %% 08.5 values by a name without mlp
check_moe(model, experts, top_k, **routing) =>
{number}.mlp.{name} => {number}.{name}

# %% 08.5 the layers share one mixture
check_moe(model, experts, top_k, **routing) =>
---
with torch.device(like.device):
    block.mlp = MoE(model.config, experts, top_k, ffn_hidden, shared, **routing)
=>
if number == 0:
    with torch.device(like.device):
        mixture = MoE(model.config, experts, top_k, ffn_hidden, shared, **routing)
block.mlp = mixture

# %% 08.5 active_config counts all experts
check_moe(model, experts, top_k, **routing) =>
---
sizes = {"top_k": top_k, "ffn_hidden": ffn_hidden, "shared": shared}
model.active_config = active_config(model.config, sizes)
=>
width = (experts + shared) * (ffn_hidden or model.config.ffn_hidden)
model.active_config = dataclasses.replace(model.config, ffn_hidden=width)

# %% 08.5 the seed is ignored
check_moe(model, experts, top_k, **routing) =>
model.config, seed => model.config

# %% 08.5 always on the CPU, in float32
check_moe(model, experts, top_k, **routing) =>
with torch.device(like.device): => with torch.device("cpu"):
parameter.data = parameter.data.to(like.dtype) =>

# %% 08.5 capacity is ignored
if routing.capacity is None:
    out = experts(rows, row_gates, len(rows) * routing.top_k)
else:
    out = batched_experts(experts, rows, row_gates, routing.slots(len(rows)))
return out.view_as(x)
=>
return experts(rows, row_gates, len(rows) * routing.top_k).view_as(x)
---
check_moe(model, experts, top_k, **routing) =>

# %% 08.5 as many choices as tokens
    out = experts(rows, row_gates, len(rows) * routing.top_k)
else:
    out = batched_experts(experts, rows, row_gates, routing.slots(len(rows)))
return out.view_as(x)
=>
    return experts(rows, row_gates, len(rows)).view_as(x)
return batched_experts(experts, rows, row_gates, routing.slots(len(rows))).view_as(x)
---
check_moe(model, experts, top_k, **routing) =>

# %% 08.5 slots of the batch instead of the tokens
    out = experts(rows, row_gates, len(rows) * routing.top_k)
else:
    out = batched_experts(experts, rows, row_gates, routing.slots(len(rows)))
return out.view_as(x)
=>
    return experts(rows, row_gates, len(rows) * routing.top_k).view_as(x)
return batched_experts(experts, rows, row_gates, routing.slots(len(x))).view_as(x)
---
check_moe(model, experts, top_k, **routing) =>

# %% 08.6 no router
experts * config.hidden + (used + shared) => (used + shared)

# %% 08.6 two matrices an expert
expert = 3 => expert = 2

# %% 08.6 the active router has k rows
experts * config.hidden => used * config.hidden

# %% 08.6 shared experts are not active
(used + shared) * expert => (used + shared * (used == experts)) * expert

# %% 08.6 no norms
layer = (count["q_o"] + count["kv"] if attention is None else attention) + count["norms"]
=>
layer = count["q_o"] + count["kv"] if attention is None else attention

# %% 08.6 dense layers have a router and experts too
mixtures = config.layers - dense_layers => mixtures = config.layers

# %% 08.6 attention comes on top
(count["q_o"] + count["kv"] if attention is None else attention) => count["q_o"] + count["kv"] + (attention or 0)

# %% 08.6 as the name says: eight times the whole model
def mixture_params(config, experts, top_k, ffn_hidden=None, shared=0, dense_layers=0, attention=None):
    whole = sum(parameter_parts(config).values()) * config.layers
    return experts * whole, top_k * whole

# %% 08.6 the embedding is not active
return total, active => return total, active - count["embedding"]

# %% 08.7 detached and normalized confused
from course_kit.labs.expert_parallel.routers import LETTERS

others = {"detached": "normalized", "normalized": "detached"}
diagnosis = {letter: others.get(name, name) for letter, name in LETTERS.items()}

# %% 08.7 sound and rewarded confused
from course_kit.labs.expert_parallel.routers import LETTERS

others = {"sound": "rewarded", "rewarded": "sound"}
diagnosis = {letter: others.get(name, name) for letter, name in LETTERS.items()}

# %% 08.7 the collapsed one is called detached
from course_kit.labs.expert_parallel.routers import LETTERS

others = {"detached": "rewarded", "rewarded": "detached"}
diagnosis = {letter: others.get(name, name) for letter, name in LETTERS.items()}

# %% 08.7 all are sound, since all losses fall
diagnosis = dict.fromkeys("ABCD", "sound")

# %% 08.7 a word that is none of the four
from course_kit.labs.expert_parallel.routers import LETTERS

diagnosis = {**LETTERS, "C": "collapsed"}

# %% 08.7 one is left out
from course_kit.labs.expert_parallel.routers import LETTERS

diagnosis = {letter: LETTERS[letter] for letter in "ABC"}

# %% 08.8 counts are not divided by their sum
counts / counts.sum() * shares => counts * shares

# %% 08.8 without E
len(counts) * (counts / counts.sum() * shares) => (counts / counts.sum() * shares)

# %% 08.8 counts with a gradient: the shares take their place
counts / counts.sum() => shares

# %% 08.8 the right value, and a gradient through the counts too
def balance_loss(scores, counts):
    shares = (scores / scores.sum(-1, keepdim=True)).flatten(0, -2).mean(0)
    f = counts / counts.sum() + shares - shares.detach()
    return len(counts) * (f * shares).sum()

# %% 08.8 scores without a gradient
def balance_loss(scores, counts):
    shares = (scores.detach() / scores.sum(-1, keepdim=True).detach()).flatten(0, -2).mean(0)
    return len(counts) * (counts / counts.sum() * shares).sum()

# %% 08.8 sigmoid scores are not divided by their sum
def balance_loss(scores, counts):
    shares = scores.flatten(0, -2).mean(0)
    return len(counts) * (counts / counts.sum() * shares).sum()

# %% 08.8 a sum over the tokens
(0, -2).mean(0)  # P => (0, -2).sum(0)

# %% 08.8 z: log sum exp without the square
(-1).square() => (-1)

# %% 08.8 z: exp overflows
def z_loss(logits):
    return logits.exp().sum(-1).log().square().mean()

# %% 08.8 the maximum begins at 0
def z_loss(logits: torch.Tensor) -> torch.Tensor:
    return ((logits - logits.amax(-1, keepdim=True).clamp(min=0)).exp().sum(-1).log() + logits.amax(-1).clamp(min=0)).square().mean()

# %% 08.9 counts in forward
class RouterLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gates: torch.Tensor, extra: torch.Tensor, counts: torch.Tensor, router: Router) -> torch.Tensor:
        ctx.router, ctx.counts = router, counts
        router.counts = counts if router.counts is None else router.counts + counts
        return gates.view_as(gates)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        router = ctx.router
        return gradient, gradient.new_full((), router.loss_weight), None, None

# %% 08.9 the extra loss's gradient is 1
class RouterLoss(OnceDifferentiable): => class RouterLoss(torch.autograd.Function):
(()) * router.loss_weight => (())

# %% 08.9 the extra loss gets no gradient
class RouterLoss(OnceDifferentiable): => class RouterLoss(torch.autograd.Function):
gradient.new_ones(()) * router.loss_weight => None

# %% 08.9 the gates' gradient is scaled too
class RouterLoss(OnceDifferentiable): => class RouterLoss(torch.autograd.Function):
---
return gradient, gradient.new_ones(()) * router.loss_weight, None, None
=>
return gradient * router.loss_weight, gradient.new_full((), router.loss_weight), None, None

# %% 08.9 reads loss_weight in forward
class RouterLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gates: torch.Tensor, extra: torch.Tensor, counts: torch.Tensor, router: Router) -> torch.Tensor:
        ctx.weight = router.loss_weight
        ctx.router, ctx.counts = router, counts
        return gates.view_as(gates)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        router, counts = ctx.router, ctx.counts
        router.counts = counts if router.counts is None else router.counts + counts
        return gradient, gradient.new_full((), ctx.weight), None, None

# %% 08.9 keeps the last micro-batch's counts alone
class RouterLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gates: torch.Tensor, extra: torch.Tensor, counts: torch.Tensor, router: Router) -> torch.Tensor:
        ctx.router, ctx.counts = router, counts
        return gates.view_as(gates)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        router, counts = ctx.router, ctx.counts
        router.counts = counts
        return gradient, gradient.new_full((), router.loss_weight), None, None

# %% 08.9 the gates' gradient is lost
class RouterLoss(OnceDifferentiable): => class RouterLoss(torch.autograd.Function):
gradient, gradient.new_ones(()) * router.loss_weight => gradient * 0, gradient.new_full((), router.loss_weight)

# %% 08.9 never counts, unless there is an extra loss
class RouterLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gates: torch.Tensor, extra: torch.Tensor, counts: torch.Tensor, router: Router) -> torch.Tensor:
        ctx.router, ctx.counts = router, counts
        return gates.view_as(gates)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        router, counts = ctx.router, ctx.counts
        if router.routing.aux_loss_coeff:
            router.counts = counts if router.counts is None else router.counts + counts
        return gradient, gradient.new_full((), router.loss_weight), None, None

# %% 08.10 an all-reduce for each router
@torch.no_grad()
def take_counts(model):
    found = []
    for router in routers_of(model):
        counts = torch.zeros_like(router.bias, dtype=torch.long) if router.counts is None else router.counts
        if router.batch_group is not None:
            dist.all_reduce(counts, group=router.batch_group)
        router.counts = None
        found.append(counts)
    return torch.stack(found)

# %% 08.10 each rank by itself
@torch.no_grad()
def take_counts(model):
    routers = routers_of(model)
    counts = [torch.zeros_like(r.bias, dtype=torch.long) if r.counts is None else r.counts for r in routers]
    counts = torch.stack(counts)
    for router in routers:
        router.counts = None
    return counts

# %% 08.10 over all ranks, whatever the group
if not routers:  # a stage without mixtures
    return torch.zeros(0, 0, dtype=torch.long)
=>
---
group=routers[0].batch_group => group=dist.group.WORLD

# %% 08.10 counts are not reset
if not routers:  # a stage without mixtures
    return torch.zeros(0, 0, dtype=torch.long)
=>
---
for router in routers:
    router.counts = None
=>

# %% 08.10 an all-gather, added up
if not routers:  # a stage without mixtures
    return torch.zeros(0, 0, dtype=torch.long)
=>
---
dist.all_reduce(counts, group=routers[0].batch_group)
=>
group = routers[0].batch_group
parts = [torch.empty_like(counts) for _ in range(group.size())]
dist.all_gather(parts, counts, group=group)
counts = sum(parts)

# %% 08.10 the bias moves the wrong way
if not routers:  # a stage without mixtures
    return torch.zeros(0, 0, dtype=torch.long)
=>
---
counts.mean(1, keepdim=True) - counts => counts - counts.mean(1, keepdim=True)

# %% 08.10 the bias moves by the difference
if not routers:  # a stage without mixtures
    return torch.zeros(0, 0, dtype=torch.long)
=>
---
(counts.mean(1, keepdim=True) - counts).sign() => (counts.mean(1, keepdim=True) - counts)

# %% 08.10 against the mean of all layers
if not routers:  # a stage without mixtures
    return torch.zeros(0, 0, dtype=torch.long)
=>
---
counts.mean(1, keepdim=True) => counts.mean()

# %% 08.10 reads counts on the host
@torch.no_grad()
def take_counts(model):
    routers = routers_of(model)
    counts = [torch.zeros_like(r.bias, dtype=torch.long) if r.counts is None else r.counts for r in routers]
    counts = torch.stack(counts)
    for router in routers:
        router.counts = None
    if routers[0].batch_group is not None:
        dist.all_reduce(counts, group=routers[0].batch_group)
    return counts


@torch.no_grad()
def update_bias(model, counts, rate):
    for router, row in zip(routers_of(model), counts.float(), strict=True):
        for expert, count in enumerate(row):
            if count > row.mean():
                router.bias[expert] -= rate
            elif count < row.mean():
                router.bias[expert] += rate

# %% 08.11 the smallest gates are dropped
def within_capacity(gates, slots):
    rows = gates.flatten(0, -2)
    least = rows.detach().topk(min(slots, len(rows)), dim=0).values[-1]
    return (rows * (rows.detach() >= least)).view_as(gates)

# %% 08.11 what remains is divided anew
return gates * (position <= slots)
=>
kept = gates * (position <= slots)
return kept / kept.sum(-1, keepdim=True).clamp(min=1e-9)

# %% 08.11 one slot too few
return gates * (position <= slots) => return gates * (position < slots)

# %% 08.11 each sequence by itself
def within_capacity(gates, slots):
    position = (gates.detach() != 0).cumsum(-2)
    return gates * (position <= slots)

# %% 08.11 the last come are served
(0, -2).cumsum => (0, -2).flip(0).cumsum(0).flip

# %% 08.11 a token is dropped whole
return gates * (position <= slots) => return gates * ((position <= slots) | (gates == 0)).all(-1, keepdim=True)

# %% 08.11 without a gradient
return gates * (position <= slots) => return gates.detach() * (position <= slots) + 0 * gates

# %% 08.11 a loop that reads on the host
def within_capacity(gates, slots):
    rows, keep = gates.flatten(0, -2), torch.ones_like(gates.flatten(0, -2))
    for e in range(rows.shape[1]):
        keep[(rows.detach()[:, e] != 0).nonzero().squeeze(1)[slots:], e] = 0
    return (rows * keep).view_as(gates)

# %% 08.12 fake: pieces of one size, padded
def start(self: AsyncAllToAll, tensors, reverse=False):
    sends, receives = (self.receives, self.sends) if reverse else (self.sends, self.receives)
    most = torch.tensor(max(sends + receives))
    dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
    for tensor in tensors:
        padded = tensor.new_zeros(self.group.size(), int(most), *tensor.shape[1:])
        for place, piece in zip(padded, tensor.split(sends)):
            place[: len(piece)] = piece
        came = torch.empty_like(padded)
        work = dist.all_to_all_single(came, padded, group=self.group, async_op=True)
        work.wait()
        self.pending.append((work, torch.cat([place[:size] for place, size in zip(came, receives)])))
    return tuple(received for _, received in self.pending)

# %% 08.12 fake: an all-gather, of which each keeps its own
def start(self: AsyncAllToAll, tensors, reverse=False):
    sends, receives = (self.receives, self.sends) if reverse else (self.sends, self.receives)
    found = [None] * self.group.size()
    dist.all_gather_object(found, [tensor.contiguous().split(sends) for tensor in tensors], group=self.group)
    work = dist.barrier(group=self.group, async_op=True)
    for i in range(len(tensors)):
        self.pending.append((work, torch.cat([each[i][self.group.rank()] for each in found])))
    return tuple(received for _, received in self.pending)

# %% 08.12 backward does not swap the lists
(self.receives, self.sends) if reverse else (self.sends, self.receives) => self.sends, self.receives

# %% 08.12 the lists the wrong way round
sends, receives = (self.receives, self.sends) if reverse else (self.sends, self.receives)
=>
sends, receives = (self.sends, self.receives) if reverse else (self.receives, self.sends)

# %% 08.12 home is the gradients that were given
def start(self: AsyncAllToAll, tensors, reverse=False):
    if reverse:
        self.pending = [(work, tensor) for tensor in tensors for work in [dist.barrier(self.group, async_op=True)]]
        return tensors
    sends, receives = (self.receives, self.sends) if reverse else (self.sends, self.receives)
    for tensor in tensors:
        received = tensor.new_empty(sum(receives), *tensor.shape[1:])
        work = dist.all_to_all_single(received, tensor.contiguous(), receives, sends, group=self.group, async_op=True)
        self.pending.append((work, received))
    return tuple(received for _, received in self.pending)

# %% 08.12 backward gives zeros
def start(self: AsyncAllToAll, tensors, reverse=False):
    if reverse:
        rows = [tensor.new_zeros(sum(self.sends), *tensor.shape[1:]) for tensor in tensors]
        self.pending = [(dist.barrier(self.group, async_op=True), each) for each in rows]
        return tensors
    sends, receives = (self.receives, self.sends) if reverse else (self.sends, self.receives)
    for tensor in tensors:
        received = tensor.new_empty(sum(receives), *tensor.shape[1:])
        work = dist.all_to_all_single(received, tensor.contiguous(), receives, sends, group=self.group, async_op=True)
        self.pending.append((work, received))
    return tuple(received for _, received in self.pending)

# %% 08.12 waits for each before the next is started
work = dist.all_to_all_single(rows, tensor.contiguous(), receives, sends, group=self.group, async_op=True)
=>
work = dist.all_to_all_single(rows, tensor.contiguous(), receives, sends, group=self.group, async_op=True)
work.wait()

# %% 08.12 over all ranks, whatever the group
self.group => dist.group.WORLD

# %% 08.12 sends and receives instead of one exchange
def start(self: AsyncAllToAll, tensors, reverse=False):
    sends, receives = (self.receives, self.sends) if reverse else (self.sends, self.receives)
    for tensor in tensors:
        received, n, own = tensor.new_empty(sum(receives), *tensor.shape[1:]), self.group.size(), self.group.rank()
        pieces, places = tensor.contiguous().split(sends), received.split(receives)
        places[own].copy_(pieces[own])
        others = [other for other in range(n) if other != own]
        calls = [dist.P2POp(dist.isend, pieces[o], group=self.group, group_peer=o) for o in others if sends[o]]
        calls += [dist.P2POp(dist.irecv, places[o], group=self.group, group_peer=o) for o in others if receives[o]]
        works = dist.batch_isend_irecv(calls) if calls else []
        for work in works[1:]:
            work.wait()
        self.pending.append((works[0] if works else dist.barrier(self.group, async_op=True), received))
    return tuple(received for _, received in self.pending)

# %% 08.12 waits where it starts
def start(self: AsyncAllToAll, tensors, reverse=False):
    sends, receives = (self.receives, self.sends) if reverse else (self.sends, self.receives)
    for tensor in tensors:
        received = tensor.new_empty(sum(receives), *tensor.shape[1:])
        work = dist.all_to_all_single(received, tensor.contiguous(), receives, sends, group=self.group, async_op=True)
        self.pending.append((work, received))
    for work, _ in self.pending:
        work.wait()
    return tuple(received for _, received in self.pending)

# %% 08.12 waits on the way home where it starts
def start(self: AsyncAllToAll, tensors, reverse=False):
    sends, receives = (self.receives, self.sends) if reverse else (self.sends, self.receives)
    for tensor in tensors:
        received = tensor.new_empty(sum(receives), *tensor.shape[1:])
        work = dist.all_to_all_single(received, tensor.contiguous(), receives, sends, group=self.group, async_op=True)
        self.pending.append((work, received))
    for work, _ in self.pending if reverse else ():
        work.wait()
    return tuple(received for _, received in self.pending)

# %% 08.12 nobody waits
for work, _ in self.pending:
    work.wait()
=>

# %% 08.12 what has arrived stays in the list
self.pending.clear() =>

# %% 08.12 waits for the last alone
for work, _ in self.pending:
    work.wait()
=>
self.pending[-1][0].wait()

# %% 08.13 fake: all tokens are gathered, and sums scattered
from course_lib.expert_parallel.experts import F


def dispatch_and_combine(x, gates, choices, group, compute, overlap_with=None):
    from course_lib.sequence_parallel.model import gather_sequence, reduce_scatter_sequence

    n, (x,) = group.size(), as_autocast(x)
    most = torch.tensor(len(x))
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    padding = int(most) - len(x)
    rows = gather_sequence(F.pad(x, (0, 0, 0, padding))[None], group)[0]
    row_gates = gather_sequence(F.pad(gates, (0, 0, 0, padding))[None], group)[0]
    own = row_gates.chunk(n, 1)[group.rank()]
    out = compute(rows, own, int((own != 0).sum()))
    return reduce_scatter_sequence(out[None], group)[0][: len(x)]

# %% 08.13 one row for each choice
from course_lib.expert_parallel.experts import F


def dispatch_and_combine(x, gates, choices, group, compute, overlap_with=None):
    n, (x,) = group.size(), as_autocast(x)
    own = gates.shape[1] // n
    chosen = (gates.detach() != 0).t()
    sizes = chosen.sum(1).view(n, own).sum(1)
    sends, receives, received_choices = read_sizes(sizes, sizes, group)
    expert, token = torch.nonzero_static(chosen, size=sum(sends)).unbind(1)
    row_gates = gates[token, expert, None] * F.one_hot(expert % own, own)
    rows, row_gates = send_rows(group, sends, receives, x.index_select(0, token), row_gates, overlap_with=overlap_with)
    out = compute(rows, row_gates, received_choices)
    (returned,) = send_rows(group, receives, sends, out)
    return torch.zeros_like(x).index_add(0, token, returned)

# %% 08.13 gates are applied at home
from course_lib.expert_parallel.experts import F


def dispatch_and_combine(x, gates, choices, group, compute, overlap_with=None):
    n, (x,) = group.size(), as_autocast(x)
    own = gates.shape[1] // n
    chosen = (gates.detach() != 0).t()
    sizes = chosen.sum(1).view(n, own).sum(1)
    sends, receives, received_choices = read_sizes(sizes, sizes, group)
    expert, token = torch.nonzero_static(chosen, size=sum(sends)).unbind(1)
    which = F.one_hot(expert % own, own).to(gates.dtype)
    rows, which = send_rows(group, sends, receives, x.index_select(0, token), which, overlap_with=overlap_with)
    (returned,) = send_rows(group, receives, sends, compute(rows, which, received_choices))
    return torch.zeros_like(x).index_add(0, token, returned * gates[token, expert, None])

# %% 08.13 gates without a gradient
def dispatch_and_combine(x, gates, choices, group, compute, overlap_with=None):
    n, (x,) = group.size(), as_autocast(x)
    rank_gates = gates.unflatten(1, (n, -1))
    wanted = rank_gates.detach() != 0
    goes = wanted.any(2).t()
    sends, receives, received_choices = read_sizes(goes.sum(1), wanted.sum((0, 2)), group)
    to, token = torch.nonzero_static(goes, size=sum(sends)).unbind(1)
    row_gates = rank_gates.detach().flatten(0, 1).index_select(0, token * n + to)
    rows, row_gates = send_rows(group, sends, receives, x.index_select(0, token), row_gates, overlap_with=overlap_with)
    out = compute(rows, row_gates, received_choices)
    (returned,) = send_rows(group, receives, sends, out)
    return torch.zeros_like(x).index_add(0, token, returned)

# %% 08.13 compute is told this rank's choices
def dispatch_and_combine(x, gates, choices, group, compute, overlap_with=None):
    n, (x,) = group.size(), as_autocast(x)
    rank_gates = gates.unflatten(1, (n, -1))
    wanted = rank_gates.detach() != 0
    goes = wanted.any(2).t()
    sends, receives, received_choices = read_sizes(goes.sum(1), wanted.sum((0, 2)), group)
    to, token = torch.nonzero_static(goes, size=sum(sends)).unbind(1)
    row_gates = rank_gates.flatten(0, 1).index_select(0, token * n + to)
    rows, row_gates = send_rows(group, sends, receives, x.index_select(0, token), row_gates, overlap_with=overlap_with)
    out = compute(rows, row_gates, choices)
    (returned,) = send_rows(group, receives, sends, out)
    return torch.zeros_like(x).index_add(0, token, returned)

# %% 08.13 compute is told the rows, not the choices
def dispatch_and_combine(x, gates, choices, group, compute, overlap_with=None):
    n, (x,) = group.size(), as_autocast(x)
    rank_gates = gates.unflatten(1, (n, -1))
    wanted = rank_gates.detach() != 0
    goes = wanted.any(2).t()
    sends, receives, received_choices = read_sizes(goes.sum(1), wanted.sum((0, 2)), group)
    to, token = torch.nonzero_static(goes, size=sum(sends)).unbind(1)
    row_gates = rank_gates.flatten(0, 1).index_select(0, token * n + to)
    rows, row_gates = send_rows(group, sends, receives, x.index_select(0, token), row_gates, overlap_with=overlap_with)
    out = compute(rows, row_gates, len(rows))
    (returned,) = send_rows(group, receives, sends, out)
    return torch.zeros_like(x).index_add(0, token, returned)

# %% 08.13 the gates of other tokens
def dispatch_and_combine(x, gates, choices, group, compute, overlap_with=None):
    n, (x,) = group.size(), as_autocast(x)
    rank_gates = gates.unflatten(1, (n, -1))
    wanted = rank_gates.detach() != 0
    goes = wanted.any(2).t()
    sends, receives, received_choices = read_sizes(goes.sum(1), wanted.sum((0, 2)), group)
    to, token = torch.nonzero_static(goes, size=sum(sends)).unbind(1)
    row_gates = rank_gates.flatten(0, 1).index_select(0, to * len(x) + token)
    rows, row_gates = send_rows(group, sends, receives, x.index_select(0, token), row_gates, overlap_with=overlap_with)
    out = compute(rows, row_gates, received_choices)
    (returned,) = send_rows(group, receives, sends, out)
    return torch.zeros_like(x).index_add(0, token, returned)

# %% 08.13 what comes back goes to the tokens in order
rows = TakeByToken.apply(x, token)
rows, row_gates = send_rows(group, sends, receives, rows, row_gates, overlap_with=overlap_with)
=>
rows, row_gates = send_rows(group, sends, receives, x.index_select(0, token), row_gates, overlap_with=overlap_with)
---
return AddByToken.apply(returned, token, len(x))
=>
return torch.zeros_like(x).index_add(0, token.sort().values, returned)

# %% 08.13 nonzero asks the host once more
def dispatch_and_combine(x, gates, choices, group, compute, overlap_with=None):
    n, (x,) = group.size(), as_autocast(x)
    rank_gates = gates.unflatten(1, (n, -1))
    wanted = rank_gates.detach() != 0
    goes = wanted.any(2).t()
    sends, receives, received_choices = read_sizes(goes.sum(1), wanted.sum((0, 2)), group)
    to, token = goes.nonzero().unbind(1)
    row_gates = rank_gates.flatten(0, 1).index_select(0, token * n + to)
    rows, row_gates = send_rows(group, sends, receives, x.index_select(0, token), row_gates, overlap_with=overlap_with)
    out = compute(rows, row_gates, received_choices)
    (returned,) = send_rows(group, receives, sends, out)
    return torch.zeros_like(x).index_add(0, token, returned)

# %% 08.13 adds up in x's dtype
rows = TakeByToken.apply(x, token)
rows, row_gates = send_rows(group, sends, receives, rows, row_gates, overlap_with=overlap_with)
=>
rows, row_gates = send_rows(group, sends, receives, TakeByToken.apply(x, token), row_gates, overlap_with=overlap_with)
---
return AddByToken.apply(returned, token, len(x))
=>
return torch.zeros_like(x).index_add(0, token, returned)

# %% 08.13 gradients are added up in x's dtype
rows = TakeByToken.apply(x, token)
rows, row_gates = send_rows(group, sends, receives, rows, row_gates, overlap_with=overlap_with)
=>
rows, row_gates = send_rows(group, sends, receives, x.index_select(0, token), row_gates, overlap_with=overlap_with)

# %% 08.13 meanwhile is never called
rows = TakeByToken.apply(x, token)
rows, row_gates = send_rows(group, sends, receives, rows, row_gates, overlap_with=overlap_with)
=>
rows, row_gates = send_rows(group, sends, receives, TakeByToken.apply(x, token), row_gates)

# %% 08.13 meanwhile before the rows leave
rows = TakeByToken.apply(x, token)
rows, row_gates = send_rows(group, sends, receives, rows, row_gates, overlap_with=overlap_with)
=>
if overlap_with is not None:
    overlap_with()
rows, row_gates = send_rows(group, sends, receives, TakeByToken.apply(x, token), row_gates)

# %% 08.13 meanwhile when the rows are there
rows = TakeByToken.apply(x, token)
rows, row_gates = send_rows(group, sends, receives, rows, row_gates, overlap_with=overlap_with)
=>
rows, row_gates = send_rows(group, sends, receives, TakeByToken.apply(x, token), row_gates)
if overlap_with is not None:
    overlap_with()

# %% 08.13 meanwhile on the way back
rows = TakeByToken.apply(x, token)
rows, row_gates = send_rows(group, sends, receives, rows, row_gates, overlap_with=overlap_with)
=>
rows, row_gates = send_rows(group, sends, receives, TakeByToken.apply(x, token), row_gates)
---
sends, out => sends, out, overlap_with=overlap_with

# %% 08.14 k, since there are k choices
copies = {(8, 2, 4): 2, (8, 2, 8): 2, (256, 8, 8): 8}

# %% 08.14 k of which 1 in n is at home
copies = {(e, k, n): k * (n - 1) / n for e, k, n in ((8, 2, 4), (8, 2, 8), (256, 8, 8))}

# %% 08.14 its own rank is counted too
copies = {
    (e, k, n): n * (1 - math.comb(e - e // n, k) / math.comb(e, k)) for e, k, n in ((8, 2, 4), (8, 2, 8), (256, 8, 8))
}

# %% 08.14 every other rank
copies = {(8, 2, 4): 3, (8, 2, 8): 7, (256, 8, 8): 7}

# %% 08.14 drawn with replacement
copies = {(e, k, n): (n - 1) * (1 - (1 - 1 / n) ** k) for e, k, n in ((8, 2, 4), (8, 2, 8), (256, 8, 8))}

# %% 08.14 what it leaves out
copies = {
    (e, k, n): (n - 1) * math.comb(e - e // n, k) / math.comb(e, k) for e, k, n in ((8, 2, 4), (8, 2, 8), (256, 8, 8))
}

# %% 08.14 the last one is left blank
copies = {(8, 2, 4): 1.393, (8, 2, 8): 1.75, (256, 8, 8): None}

# %% 08.15 nodes by their single best expert
by_node.topk(-(-k // limit), dim=-1).values.sum => by_node.amax

# %% 08.15 nodes by the sum of all their experts
by_node.topk(-(-k // limit), dim=-1).values.sum => by_node.sum

# %% 08.15 nodes by their k best
-(-k // limit) => min(k, by_node.shape[-1])

# %% 08.15 k over M rounded down
-(-k // limit) => min(k // limit, by_node.shape[-1])

# %% 08.15 experts are limited, not nodes
def within_nodes(ranking, nodes, limit, k):
    least = ranking.topk(limit * ranking.shape[-1] // nodes, dim=-1).values[..., -1:]
    return ranking.masked_fill(ranking < least, -math.inf)

# %% 08.15 the gates change: a node's sum is added to its experts
-(-k // limit) => min(-(-k // limit), by_node.shape[-1])
by_node.masked_fill => (by_node + best.unsqueeze(-1)).masked_fill

# %% 08.15 0 instead of -inf
-(-k // limit) => min(-(-k // limit), by_node.shape[-1])
-math.inf => 0.0

# %% 08.15 experts dealt out to the nodes in turn
(-1, (nodes, -1))  # [..., nodes, E/nodes] => (-1, (-1, nodes)).transpose(-2, -1)
-(-k // limit) => min(-(-k // limit), by_node.shape[-1])
(~allowed.unsqueeze(-1), -math.inf) => (~allowed.unsqueeze(-1), -math.inf).transpose(-2, -1)

# %% 08.15 no limit at all
-(-k // limit) => min(-(-k // limit), by_node.shape[-1])
(~allowed.unsqueeze(-1), -math.inf) => (allowed.unsqueeze(-1) & False, -math.inf)

# %% 08.16 experts are summed over dp: no reduce_group
def apply_expert_parallel(model, group=None, reduce_group=None, batch_group=None, tp_group=None):
    groups = list(group) if isinstance(group, (list, tuple)) else [group or dist.group.WORLD]
    layers = mixtures_of(model)
    reduce_group, batch_group = reduce_group or dist.new_subgroups(group_size=1)[0], batch_group or groups[0]
    input_gather, output_reduce = tp_boundary(model, tp_group)
    for layer in layers:
        experts = layer.experts
        for linear, dim in ((experts.gate_proj, 1), (experts.up_proj, 1), (experts.down_proj, 2)):
            cuts = [(each, 0) for each in groups] + [(tp_group, dim)] * (tp_group is not None)
            linear.weight = shard_nested(linear.weight, cuts)
        layer.router.batch_group = placement_of(layer.router.weight).reduce_group = batch_group
        compute = experts
        for each in reversed(groups):
            compute = functools.partial(dispatch_and_combine, group=each, compute=compute)
        layer.run = functools.partial(
            run_expert_parallel, compute=compute, input_gather=input_gather, output_reduce=output_reduce
        )
    if sequence_group := model.applied.get("sequence_parallel"):
        for layer in layers:
            layer.router.sequence_shards = sequence_group.size()
    return model

# %% 08.16 experts are averaged over dp/ep alone
from course_lib.expert_parallel.experts import Experts


def apply_expert_parallel(model, group=None, reduce_group=None, batch_group=None, tp_group=None):
    groups = list(group) if isinstance(group, (list, tuple)) else [group or dist.group.WORLD]
    layers = mixtures_of(model)
    reduce_group, batch_group = reduce_group or dist.new_subgroups(group_size=1)[0], batch_group or groups[0]
    input_gather, output_reduce = tp_boundary(model, tp_group)
    for layer in layers:
        experts = layer.experts
        for linear, dim in ((experts.gate_proj, 1), (experts.up_proj, 1), (experts.down_proj, 2)):
            cuts = [(each, 0) for each in groups] + [(tp_group, dim)] * (tp_group is not None)
            linear.weight = shard_nested(linear.weight, cuts)
            placement_of(linear.weight).reduce_group = reduce_group
        layer.router.batch_group = placement_of(layer.router.weight).reduce_group = batch_group
        factor = batch_group.size() / reduce_group.size()

        def weights(x, experts=experts, factor=factor):
            x, *parts = Experts.weights(experts, x)
            return x, *(part * factor - part.detach() * (factor - 1) for part in parts)

        experts.weights = weights
        compute = experts
        for each in reversed(groups):
            compute = functools.partial(dispatch_and_combine, group=each, compute=compute)
        layer.run = functools.partial(
            run_expert_parallel, compute=compute, input_gather=input_gather, output_reduce=output_reduce
        )
    if sequence_group := model.applied.get("sequence_parallel"):
        for layer in layers:
            layer.router.sequence_shards = sequence_group.size()
    return model

# %% 08.16 no batch_group
def apply_expert_parallel(model, group=None, reduce_group=None, batch_group=None, tp_group=None):
    groups = list(group) if isinstance(group, (list, tuple)) else [group or dist.group.WORLD]
    layers = mixtures_of(model)
    reduce_group, batch_group = reduce_group or dist.new_subgroups(group_size=1)[0], batch_group or groups[0]
    input_gather, output_reduce = tp_boundary(model, tp_group)
    for layer in layers:
        experts = layer.experts
        for linear, dim in ((experts.gate_proj, 1), (experts.up_proj, 1), (experts.down_proj, 2)):
            cuts = [(each, 0) for each in groups] + [(tp_group, dim)] * (tp_group is not None)
            linear.weight = shard_nested(linear.weight, cuts)
            placement_of(linear.weight).reduce_group = reduce_group
        placement_of(layer.router.weight).reduce_group = batch_group
        compute = experts
        for each in reversed(groups):
            compute = functools.partial(dispatch_and_combine, group=each, compute=compute)
        layer.run = functools.partial(
            run_expert_parallel, compute=compute, input_gather=input_gather, output_reduce=output_reduce
        )
    if sequence_group := model.applied.get("sequence_parallel"):
        for layer in layers:
            layer.router.sequence_shards = sequence_group.size()
    return model

# %% 08.16 the router's weight is summed over dp alone
def apply_expert_parallel(model, group=None, reduce_group=None, batch_group=None, tp_group=None):
    groups = list(group) if isinstance(group, (list, tuple)) else [group or dist.group.WORLD]
    layers = mixtures_of(model)
    reduce_group, batch_group = reduce_group or dist.new_subgroups(group_size=1)[0], batch_group or groups[0]
    input_gather, output_reduce = tp_boundary(model, tp_group)
    for layer in layers:
        experts = layer.experts
        for linear, dim in ((experts.gate_proj, 1), (experts.up_proj, 1), (experts.down_proj, 2)):
            cuts = [(each, 0) for each in groups] + [(tp_group, dim)] * (tp_group is not None)
            linear.weight = shard_nested(linear.weight, cuts)
            placement_of(linear.weight).reduce_group = reduce_group
        layer.router.batch_group = batch_group
        compute = experts
        for each in reversed(groups):
            compute = functools.partial(dispatch_and_combine, group=each, compute=compute)
        layer.run = functools.partial(
            run_expert_parallel, compute=compute, input_gather=input_gather, output_reduce=output_reduce
        )
    if sequence_group := model.applied.get("sequence_parallel"):
        for layer in layers:
            layer.router.sequence_shards = sequence_group.size()
    return model

# %% 08.16 gates do not pass through f
def apply_expert_parallel(model, group=None, reduce_group=None, batch_group=None, tp_group=None):
    groups = list(group) if isinstance(group, (list, tuple)) else [group or dist.group.WORLD]
    layers = mixtures_of(model)
    reduce_group, batch_group = reduce_group or dist.new_subgroups(group_size=1)[0], batch_group or groups[0]
    input_gather, output_reduce = tp_boundary(model, tp_group)
    for layer in layers:
        experts = layer.experts
        for linear, dim in ((experts.gate_proj, 1), (experts.up_proj, 1), (experts.down_proj, 2)):
            cuts = [(each, 0) for each in groups] + [(tp_group, dim)] * (tp_group is not None)
            linear.weight = shard_nested(linear.weight, cuts)
            placement_of(linear.weight).reduce_group = reduce_group
        layer.router.batch_group = placement_of(layer.router.weight).reduce_group = batch_group
        compute = experts
        for each in reversed(groups):
            compute = functools.partial(dispatch_and_combine, group=each, compute=compute)

        def run(x, gates, overlap_with, compute=compute, input_gather=input_gather, output_reduce=output_reduce):
            whole, gates = input_gather(x), input_gather(gates) if "sequence_parallel" in model.applied else gates
            out = compute(whole.flatten(0, -2), gates.flatten(0, -2), None, overlap_with=overlap_with)
            return output_reduce(out.view(*whole.shape[:-1], -1))

        layer.run = run
    if sequence_group := model.applied.get("sequence_parallel"):
        for layer in layers:
            layer.router.sequence_shards = sequence_group.size()
    return model

# %% 08.16 down is cut along h
def apply_expert_parallel(model, group=None, reduce_group=None, batch_group=None, tp_group=None):
    groups = list(group) if isinstance(group, (list, tuple)) else [group or dist.group.WORLD]
    layers = mixtures_of(model)
    reduce_group, batch_group = reduce_group or dist.new_subgroups(group_size=1)[0], batch_group or groups[0]
    input_gather, output_reduce = tp_boundary(model, tp_group)
    for layer in layers:
        experts = layer.experts
        for linear, dim in ((experts.gate_proj, 1), (experts.up_proj, 1), (experts.down_proj, 1)):
            cuts = [(each, 0) for each in groups] + [(tp_group, dim)] * (tp_group is not None)
            linear.weight = shard_nested(linear.weight, cuts)
            placement_of(linear.weight).reduce_group = reduce_group
        layer.router.batch_group = placement_of(layer.router.weight).reduce_group = batch_group
        compute = experts
        for each in reversed(groups):
            compute = functools.partial(dispatch_and_combine, group=each, compute=compute)
        layer.run = functools.partial(
            run_expert_parallel, compute=compute, input_gather=input_gather, output_reduce=output_reduce
        )
    if sequence_group := model.applied.get("sequence_parallel"):
        for layer in layers:
            layer.router.sequence_shards = sequence_group.size()
    return model

# %% 08.16 no norm_groups
def apply_expert_parallel(model, group=None, reduce_group=None, batch_group=None, tp_group=None):
    groups = list(group) if isinstance(group, (list, tuple)) else [group or dist.group.WORLD]
    layers = mixtures_of(model)
    reduce_group, batch_group = reduce_group or dist.new_subgroups(group_size=1)[0], batch_group or groups[0]
    input_gather, output_reduce = tp_boundary(model, tp_group)
    for layer in layers:
        experts = layer.experts
        for linear, dim in ((experts.gate_proj, 1), (experts.up_proj, 1), (experts.down_proj, 2)):
            cuts = [(each, 0) for each in groups] + [(tp_group, dim)] * (tp_group is not None)
            linear.weight = shard_nested(linear.weight, cuts)
            placement_of(linear.weight).reduce_group = reduce_group
            placement_of(linear.weight).norm_groups = ()
        layer.router.batch_group = placement_of(layer.router.weight).reduce_group = batch_group
        compute = experts
        for each in reversed(groups):
            compute = functools.partial(dispatch_and_combine, group=each, compute=compute)
        layer.run = functools.partial(
            run_expert_parallel, compute=compute, input_gather=input_gather, output_reduce=output_reduce
        )
    if sequence_group := model.applied.get("sequence_parallel"):
        for layer in layers:
            layer.router.sequence_shards = sequence_group.size()
    return model

# %% 08.16 fake: one hop over all ranks for two
def apply_expert_parallel(model, group=None, reduce_group=None, batch_group=None, tp_group=None):
    groups = list(group) if isinstance(group, (list, tuple)) else [group or dist.group.WORLD]
    layers = mixtures_of(model)
    reduce_group, batch_group = reduce_group or dist.new_subgroups(group_size=1)[0], batch_group or groups[0]
    input_gather, output_reduce = tp_boundary(model, tp_group)
    for layer in layers:
        experts = layer.experts
        for linear, dim in ((experts.gate_proj, 1), (experts.up_proj, 1), (experts.down_proj, 2)):
            cuts = [(each, 0) for each in groups] + [(tp_group, dim)] * (tp_group is not None)
            linear.weight = shard_nested(linear.weight, cuts)
            placement_of(linear.weight).reduce_group = reduce_group
        layer.router.batch_group = placement_of(layer.router.weight).reduce_group = batch_group
        compute = experts
        for each in [batch_group] if len(groups) > 1 else groups:
            compute = functools.partial(dispatch_and_combine, group=each, compute=compute)
        layer.run = functools.partial(
            run_expert_parallel, compute=compute, input_gather=input_gather, output_reduce=output_reduce
        )
    if sequence_group := model.applied.get("sequence_parallel"):
        for layer in layers:
            layer.router.sequence_shards = sequence_group.size()
    return model

# %% 08.16 fake: weights are gathered, tokens stay
def apply_expert_parallel(model, group=None, reduce_group=None, batch_group=None, tp_group=None):
    groups = list(group) if isinstance(group, (list, tuple)) else [group or dist.group.WORLD]
    layers = mixtures_of(model)
    reduce_group, batch_group = reduce_group or dist.new_subgroups(group_size=1)[0], batch_group or groups[0]
    input_gather, output_reduce = tp_boundary(model, tp_group)
    for layer in layers:
        experts = layer.experts
        for linear, dim in ((experts.gate_proj, 1), (experts.up_proj, 1), (experts.down_proj, 2)):
            cuts = [(each, 0) for each in groups] + [(tp_group, dim)] * (tp_group is not None)
            linear.weight = shard_nested(linear.weight, cuts)
            placement_of(linear.weight).reduce_group = reduce_group
        layer.router.batch_group = placement_of(layer.router.weight).reduce_group = batch_group
        compute = experts
        for each in reversed(groups):
            compute = functools.partial(dispatch_and_combine, group=each, compute=compute)

        def run(x, gates, overlap_with, experts=experts, top_k=layer.router.routing.top_k):
            from course_lib.tensor_parallel.regions import gather_from_group

            overlap_with()
            named = dict(experts.named_parameters())
            whole = {name: gather_from_group(part, placement_of(part).tensor_shard) for name, part in named.items()}
            rows, row_gates = x.flatten(0, -2), gates.flatten(0, -2)
            out = torch.func.functional_call(experts, whole, (rows, row_gates, len(rows) * top_k))
            return out.view_as(x)

        layer.run = run
    if sequence_group := model.applied.get("sequence_parallel"):
        for layer in layers:
            layer.router.sequence_shards = sequence_group.size()
    return model

# %% 08.17 the other way round
def dispatch_ratio(copies, top_k, ffn_hidden, bandwidth, peak, dispatch_bytes=2, combine_bytes=2):
    return 6 * top_k * ffn_hidden / (copies * (dispatch_bytes + combine_bytes)) * bandwidth / peak

# %% 08.17 there, and not back
(dispatch_bytes + combine_bytes) => dispatch_bytes

# %% 08.17 a multiplication is one operation
6 * top_k => 3 * top_k

# %% 08.17 two matrices an expert
6 * top_k => 4 * top_k

# %% 08.17 one expert a token
top_k * ffn_hidden => ffn_hidden

# %% 08.17 a copy for each choice
(dispatch_bytes + combine_bytes) => top_k * (dispatch_bytes + combine_bytes)

# %% 08.17 always BF16
* (dispatch_bytes + combine_bytes) => * 4

# %% 08.17 a hidden size of 4096
(dispatch_bytes + combine_bytes) => 4096 * (dispatch_bytes + combine_bytes)

# %% 08.1 takes float32 for gates whatever the scores are
torch.zeros_like(scores).scatter(-1, experts, gates) => torch.zeros(scores.shape).scatter(-1, experts, gates.float())

# %% 08.1 divides tiny scores by an epsilon
gates = gates / gates.sum(-1, keepdim=True).clamp(min=torch.finfo(gates.dtype).tiny) => gates = gates / gates.sum(-1, keepdim=True).clamp(min=1e-6)

# %% 08.1 ranks along dimension 1
experts = ranking.topk(k, dim=-1).indices => experts = ranking.topk(k, dim=1).indices

# %% 08.5 gives each expert a slot per token whatever the capacity
routing.slots(len(rows)) => len(rows)

# %% 08.5 leaves the shared experts out
MoE(model.config, experts, top_k, ffn_hidden, shared, **routing) => MoE(model.config, experts, top_k, ffn_hidden, 0, **routing)

# %% 08.5 freezes the experts
parameter.data = parameter.data.to(like.dtype) => parameter.data = parameter.data.to(like.dtype); parameter.requires_grad_(False)

# %% 08.9 copies the gates
return gates.view_as(gates) => return gates.clone()

# %% 08.10 counts in 32 bits
torch.zeros_like(r.bias, dtype=torch.long) if => torch.zeros_like(r.bias, dtype=torch.int32) if

# %% 08.10 fails for a stage without routers
if not routers: =>
    return torch.zeros(0, 0, dtype=torch.long) =>

# %% 08.11 takes the first two dimensions for those of tokens
.flatten(0, -2) => .flatten(0, 1)

# %% 08.12 sends float32
rows = tensor.new_empty(sum(receives), *tensor.shape[1:]) => rows = tensor.float().new_empty(sum(receives), *tensor.shape[1:])
tensor.contiguous(), receives => tensor.float().contiguous(), receives

# %% 08.13 does not cast x under autocast
group.size(), as_autocast(x) => group.size(), (x,)

# %% 08.13 sends outputs back in float32
send_rows(group, receives, sends, out) => send_rows(group, receives, sends, out.float())
AddByToken.apply(returned, token, len(x)) => AddByToken.apply(returned, token, len(x)).to(x.dtype)
