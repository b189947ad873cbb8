"""Wrong answers that the checks of notebook 01 must catch."""

# %% 01.1 every rank gets the same batch
def __next__(self: TokenBatches):
    first = self.position
    self.position += self.batch * self.world_size
    windows = [self.order(n // self.windows)[n % self.windows] for n in range(first, first + self.batch)]
    rows = torch.stack([self.tokens[w * self.seq : (w + 1) * self.seq + 1] for w in windows]).long()
    return rows[:, :-1], rows[:, 1:]

# %% 01.1 each rank steps by its own batch, so that ranks repeat each other's samples
def __next__(self: TokenBatches):
    first = self.position + self.rank * self.batch
    self.position += self.batch
    windows = [self.order(n // self.windows)[n % self.windows] for n in range(first, first + self.batch)]
    rows = torch.stack([self.tokens[w * self.seq : (w + 1) * self.seq + 1] for w in windows]).long()
    return rows[:, :-1], rows[:, 1:]

# %% 01.1 the position is kept elsewhere, so that state_dict saves nothing
def __next__(self: TokenBatches):
    self.calls = getattr(self, "calls", -1) + 1
    first = self.calls * self.batch * self.world_size + self.rank * self.batch
    windows = [self.order(n // self.windows)[n % self.windows] for n in range(first, first + self.batch)]
    rows = torch.stack([self.tokens[w * self.seq : (w + 1) * self.seq + 1] for w in windows]).long()
    return rows[:, :-1], rows[:, 1:]

# %% 01.1 the same order in every epoch
def __next__(self: TokenBatches):
    first = self.position + self.rank * self.batch
    self.position += self.batch * self.world_size
    windows = [self.order(0)[n % self.windows] for n in range(first, first + self.batch)]
    rows = torch.stack([self.tokens[w * self.seq : (w + 1) * self.seq + 1] for w in windows]).long()
    return rows[:, :-1], rows[:, 1:]

# %% 01.1 no shuffling at all
def __next__(self: TokenBatches):
    first = self.position + self.rank * self.batch
    self.position += self.batch * self.world_size
    windows = [n % self.windows for n in range(first, first + self.batch)]
    rows = torch.stack([self.tokens[w * self.seq : (w + 1) * self.seq + 1] for w in windows]).long()
    return rows[:, :-1], rows[:, 1:]

# %% 01.1 random windows, drawn with repetition: no epochs, though the seed and the position are respected
def __next__(self: TokenBatches):
    first = self.position + self.rank * self.batch
    self.position += self.batch * self.world_size
    windows = [
        torch.randint(self.windows, (1,), generator=torch.Generator().manual_seed(self.seed + n)).item()
        for n in range(first, first + self.batch)
    ]
    rows = torch.stack([self.tokens[w * self.seq : (w + 1) * self.seq + 1] for w in windows]).long()
    return rows[:, :-1], rows[:, 1:]

# %% 01.1 each rank shuffles for itself
def __next__(self: TokenBatches):
    generator = torch.Generator().manual_seed(self.seed + self.rank)
    mine = torch.randperm(self.windows, generator=generator).tolist()
    first = self.position + self.rank * self.batch
    self.position += self.batch * self.world_size
    windows = [mine[n % self.windows] for n in range(first, first + self.batch)]
    rows = torch.stack([self.tokens[w * self.seq : (w + 1) * self.seq + 1] for w in windows]).long()
    return rows[:, :-1], rows[:, 1:]

# %% 01.1 targets are the inputs
return rows[:, :-1], rows[:, 1:] => return rows[:, :-1], rows[:, :-1]

# %% 01.2 turns the pairs the wrong way
cos - second * sin, second * cos + first => cos + second * sin, second * cos - first

# %% 01.2 pairs neighbours, x0 with x1
def apply_rope(x, cos, sin):
    first, second = x[..., ::2], x[..., 1::2]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)

# %% 01.2 reads neighbours and writes halves
first, second = x.chunk(2, dim=-1) => first, second = x[..., ::2], x[..., 1::2]

# %% 01.2 one sign is wrong
cos + first => cos - first

# %% 01.2 turns nothing
def apply_rope(x, cos, sin):
    return x

# %% 01.2 turns the first half only
second * cos + first * sin => second

# %% 01.2 turns every pair at the speed of the first one
cos.unsqueeze(-2), sin.unsqueeze => cos[..., :1].unsqueeze(-2), sin[..., :1].unsqueeze

# %% 01.2 adds a position instead of turning
def apply_rope(x, cos, sin):
    return x + torch.cat([cos - 1, sin], dim=-1).unsqueeze(-2)

# %% 01.3 too low
mlp_share_guess = 0.4

# %% 01.3 too high
mlp_share_guess = 0.9

# %% 01.3 a word
mlp_share_guess = "0.7"

# %% 01.3 a percentage
mlp_share_guess = 70

# %% 01.3 not a number
mlp_share_guess = float("nan")

# %% 01.4 forgets grouped-query attention
h = config.hidden
=>
h = config.hidden
head = 0 if config.tied else config.vocab * h
---
* config.kv_heads * config.head_dim => * h
---
"head": 0 if config.tied else config.vocab * h,
=>
"head": head,

# %% 01.4 heads always add up to h
* config.heads * config.head_dim => * h

# %% 01.4 counts a tied head twice
h = config.hidden
=>
h = config.hidden
kv = 2 * h * config.kv_heads * config.head_dim
---
"kv": 2 * h * config.kv_heads * config.head_dim,
=>
"kv": kv,
---
0 if config.tied else config.vocab => config.vocab

# %% 01.4 two matrices in the MLP, as in GPT
def parameter_parts(config):
    h = config.hidden
    kv = 2 * h * config.kv_heads * config.head_dim
    head = 0 if config.tied else config.vocab * h
    return {
        "q_o": 2 * h * config.heads * config.head_dim,
        "kv": kv,
        "mlp": 2 * h * config.ffn_hidden,
        "norms": 2 * h,
        "embedding": config.vocab * h,
        "head": head,
        "final_norm": h,
    }

# %% 01.4 one norm in a layer
def parameter_parts(config):
    h = config.hidden
    kv = 2 * h * config.kv_heads * config.head_dim
    head = 0 if config.tied else config.vocab * h
    return {
        "q_o": 2 * h * config.heads * config.head_dim,
        "kv": kv,
        "mlp": 3 * h * config.ffn_hidden,
        "norms": h,
        "embedding": config.vocab * h,
        "head": head,
        "final_norm": h,
    }

# %% 01.4 forgets the last norm
def parameter_parts(config):
    h = config.hidden
    kv = 2 * h * config.kv_heads * config.head_dim
    head = 0 if config.tied else config.vocab * h
    return {
        "q_o": 2 * h * config.heads * config.head_dim,
        "kv": kv,
        "mlp": 3 * h * config.ffn_hidden,
        "norms": 2 * h,
        "embedding": config.vocab * h,
        "head": head,
        "final_norm": 0,
    }

# %% 01.4 norms with a bias, as in GPT
def parameter_parts(config):
    h = config.hidden
    kv = 2 * h * config.kv_heads * config.head_dim
    head = 0 if config.tied else config.vocab * h
    return {
        "q_o": 2 * h * config.heads * config.head_dim,
        "kv": kv,
        "mlp": 3 * h * config.ffn_hidden,
        "norms": 4 * h,
        "embedding": config.vocab * h,
        "head": head,
        "final_norm": 2 * h,
    }

# %% 01.4 a table of the published sizes
def parameter_parts(config):
    published = {16: 1_235_814_400, 30: 134_515_008, 32: 8_030_261_248, 80: 70_553_706_496, 126: 405_853_388_800}
    return {
        "q_o": 0,
        "kv": 0,
        "mlp": 0,
        "norms": 0,
        "embedding": published.get(config.layers, 0),
        "head": 0,
        "final_norm": 0,
    }

# %% 01.4 the GPT formula's total under one name
def parameter_parts(config):
    return {
        "q_o": 0,
        "kv": 0,
        "mlp": 0,
        "norms": 0,
        "head": 0,
        "final_norm": 0,
        "embedding": gpt_param_count(config.hidden, config.layers, config.vocab),
    }

# %% 01.4 right in sum, but norms are counted with the matrices that TP splits
def parameter_parts(config):
    h = config.hidden
    kv = 2 * h * config.kv_heads * config.head_dim
    head = 0 if config.tied else config.vocab * h
    return {
        "q_o": 2 * h * config.heads * config.head_dim + 2 * h,
        "kv": kv,
        "mlp": 3 * h * config.ffn_hidden,
        "norms": 0,
        "embedding": config.vocab * h + h,
        "head": head,
        "final_norm": 0,
    }

# %% 01.4 a table of the presets' totals, and the two parts of the odd model
from course_lib.single_gpu.memory import param_count as real_count


def parameter_parts(config):
    h = config.hidden
    parts = {
        "q_o": 0,
        "kv": 2 * h * config.kv_heads * config.head_dim,
        "mlp": 3 * h * config.ffn_hidden,
        "norms": 0,
        "head": 0,
        "final_norm": 0,
    }
    if config.vocab != 77:
        parts["embedding"] = real_count(config) - config.layers * (parts["kv"] + parts["mlp"])
    return {"embedding": 0, **parts}

# %% 01.5 splits one stage too late
zero_stage >= 3 => zero_stage > 3
zero_stage >= 2 => zero_stage > 2
zero_stage >= 1 => zero_stage > 1

# %% 01.5 splits parameters first and optimizer states last
3 else => 1 else
1 else => 3 else

# %% 01.5 each stage splits only its own part
zero_stage >= 3 => zero_stage == 3
zero_stage >= 2 => zero_stage == 2
zero_stage >= 1 => zero_stage == 1

# %% 01.5 forgets the master weights
return {
=>
if policy.startswith("bf16"):
    optimizer = 8
return {

# %% 01.5 ignores ZeRO
def state_bytes(params, policy="bf16", zero_stage=0, dp=1):
    names = ("parameters", "gradients", "optimizer states")
    return {name: params * size for name, size in zip(names, POLICIES[policy])}

# %% 01.5 a table of the sums, all under parameters
def state_bytes(params, policy="bf16", zero_stage=0, dp=1):
    each = {"fp32": 16, "bf16": 16, "bf16, fp32 gradients": 20, "bf16, no master weights": 12}[policy]
    return {"parameters": params * [each, 5.5, 3.75, 2.0][zero_stage], "gradients": 0, "optimizer states": 0}

# %% 01.6 counts parameters, too
def saved_bytes(module, forward):
    sizes = {}

    def pack(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    return sum(sizes.values())

# %% 01.6 knows a parameter by its class, and so counts transposed ones
def saved_bytes(module, forward):
    sizes = {}

    def pack(tensor):
        if not isinstance(tensor, nn.Parameter):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    return sum(sizes.values())

# %% 01.6 counts every time something is saved
def saved_bytes(module, forward):
    resident = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    sizes = []

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in resident:
            sizes.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    return sum(sizes)

# %% 01.6 counts elements, not bytes
storage.nbytes() => storage.nbytes() // tensor.element_size()
return tensor.detach() => return tensor
---
forward()
=>
result = forward()

# %% 01.6 counts what a view shows, not what it keeps alive
def saved_bytes(module, forward):
    resident = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    sizes = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in resident:
            sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    return sum(sizes.values())

# %% 01.6 a formula: the bytes of what forward returns
def saved_bytes(module, forward):
    result = forward()
    parts = result if isinstance(result, (list, tuple)) else [result]
    return sum(part.nbytes for part in parts if part.requires_grad)

# %% 01.6 a formula: twice the bytes of the weights
def saved_bytes(module, forward):
    forward()
    return sum(2 * parameter.nbytes for parameter in module.parameters()) // 4

# %% 01.6 counts all that operations make, saved or not
def saved_bytes(module, forward):
    sizes = {}

    class Outputs(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (list, tuple)) else [out]:
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return out

    with Outputs():
        result = forward()
    return sum(sizes.values())

# %% 01.7 33 for 34
def gpt_layer_bytes(hidden, heads, seq, recompute="none"):
    if recompute == "full":
        return 2 * hidden
    return 33 * hidden + (5 * heads * seq if recompute == "none" else 0)

# %% 01.7 selective keeps the scores
def gpt_layer_bytes(hidden, heads, seq, recompute="none"):
    return 2 * hidden if recompute == "full" else 34 * hidden + 5 * heads * seq

# %% 01.7 full keeps one byte an element
def gpt_layer_bytes(hidden, heads, seq, recompute="none"):
    if recompute == "full":
        return hidden
    return 34 * hidden + (5 * heads * seq if recompute == "none" else 0)

# %% 01.7 full keeps nothing
def gpt_layer_bytes(hidden, heads, seq, recompute="none"):
    return {"none": 34 * hidden + 5 * heads * seq, "selective": 34 * hidden, "full": 0}[recompute]

# %% 01.7 one head
def gpt_layer_bytes(hidden, heads, seq, recompute="none"):
    return {"none": 34 * hidden + 5 * seq, "selective": 34 * hidden, "full": 2 * hidden}[recompute]

# %% 01.7 the factor alone, without h
def gpt_layer_bytes(hidden, heads, seq, recompute="none"):
    return {"none": 34 + 5 * heads * seq / hidden, "selective": 34, "full": 2}[recompute]

# %% 01.7 of the whole sequence, not of a token
def gpt_layer_bytes(hidden, heads, seq, recompute="none"):
    return seq * {"none": 34 * hidden + 5 * heads * seq, "selective": 34 * hidden, "full": 2 * hidden}[recompute]

# %% 01.7 heads of 128 always, as in the published models
def gpt_layer_bytes(hidden, heads, seq, recompute="none"):
    return {"none": 34 * hidden + 5 * hidden // 128 * seq, "selective": 34 * hidden, "full": 2 * hidden}[recompute]

# %% 01.7 a table of the published models and of the block above
def gpt_layer_bytes(hidden, heads, seq, recompute="none"):
    known = {64: 2176 + 2560, 4096: 34 * 4096 + 5 * 32 * 1024, 8192: 34 * 8192 + 5 * 64 * 1024}
    return {"none": known.get(hidden, 0), "selective": 34 * hidden, "full": 2 * hidden}[recompute]

# %% 01.8 three tensors of width f
def layer_activations(config, seq, e=2, flash=True, fused_norm=True):
    h, width, kv = config.hidden, config.attention_width, config.kv_heads * config.head_dim
    attention = e * (2 * width + 2 * kv) + 4 * config.heads if flash else e * (4 * width + config.heads * seq)
    return {
        "norms": 2 * ((e * h if fused_norm else 8 * h) + 4),
        "norm outputs": 2 * e * h,
        "attention": attention,
        "mlp": 3 * e * config.ffn_hidden,
    }

# %% 01.8 flash keeps no row statistics
if flash:
    attention = e * (2 * width + 2 * kv) + 4 * config.heads
else:
    attention = e * (4 * width + config.heads * seq)
=>
attention = e * (2 * width + 2 * kv) if flash else e * (4 * width + config.heads * seq)

# %% 01.8 as many K/V heads as heads
def layer_activations(config, seq, e=2, flash=True, fused_norm=True):
    h, width = config.hidden, config.attention_width
    attention = e * 4 * width + 4 * config.heads if flash else e * (4 * width + config.heads * seq)
    return {
        "norms": 2 * ((e * h if fused_norm else 8 * h) + 4),
        "norm outputs": 2 * e * h,
        "attention": attention,
        "mlp": 4 * e * config.ffn_hidden,
    }

# %% 01.8 plain attention keeps K and V of its few heads only
if flash:
    attention = e * (2 * width + 2 * kv) + 4 * config.heads
else:
    attention = e * (4 * width + config.heads * seq)
=>
attention = e * (2 * width + 2 * kv) + (4 * config.heads if flash else e * config.heads * seq)

# %% 01.8 forgets what the norms return
def layer_activations(config, seq, e=2, flash=True, fused_norm=True):
    h, width, kv = config.hidden, config.attention_width, config.kv_heads * config.head_dim
    attention = e * (2 * width + 2 * kv) + 4 * config.heads if flash else e * (4 * width + config.heads * seq)
    return {
        "norms": 2 * ((e * h if fused_norm else 8 * h) + 4),
        "norm outputs": 0,
        "attention": attention,
        "mlp": 4 * e * config.ffn_hidden,
    }

# %% 01.8 always 16-bit
def layer_activations(config, seq, e=2, flash=True, fused_norm=True):
    h, width, kv, e = config.hidden, config.attention_width, config.kv_heads * config.head_dim, 2
    attention = e * (2 * width + 2 * kv) + 4 * config.heads if flash else e * (4 * width + config.heads * seq)
    return {
        "norms": 2 * ((e * h if fused_norm else 8 * h) + 4),
        "norm outputs": 2 * e * h,
        "attention": attention,
        "mlp": 4 * e * config.ffn_hidden,
    }

# %% 01.8 the output counted again as the input of the output projection
if flash:
    attention = e * (2 * width + 2 * kv) + 4 * config.heads
else:
    attention = e * (4 * width + config.heads * seq)
=>
attention = e * (3 * width + 2 * kv) + 4 * config.heads if flash else e * (5 * width + config.heads * seq)

# %% 01.8 a fused norm keeps as much as the chain of operations
def layer_activations(config, seq, e=2, flash=True, fused_norm=True):
    h, width, kv = config.hidden, config.attention_width, config.kv_heads * config.head_dim
    attention = e * (2 * width + 2 * kv) + 4 * config.heads if flash else e * (4 * width + config.heads * seq)
    return {
        "norms": 2 * (8 * h + 4),
        "norm outputs": 2 * e * h,
        "attention": attention,
        "mlp": 4 * e * config.ffn_hidden,
    }

# %% 01.8 the GPT layer's 34sbh + 5as²b
def layer_activations(config, seq, e=2, flash=True, fused_norm=True):
    scores = 0 if flash else 5 * config.heads * seq
    return {
        "norms": 2 * (2 * config.hidden + 4),
        "norm outputs": 0,
        "attention": 11 * config.hidden + scores,
        "mlp": 19 * config.hidden,
    }

# %% 01.9 whatever autograd saved is an activation
def category(allocation):
    if allocation.owner:
        return allocation.owner
    return "activations" if allocation.saved or allocation.outlived_forward else "temporary"

# %% 01.9 only what autograd saved
def category(allocation):
    if allocation.owner:
        return allocation.owner
    return "activations" if allocation.saved and not allocation.in_backward else "temporary"

# %% 01.9 asks for the owner last
def category(allocation):
    if not allocation.in_backward and (allocation.saved or allocation.outlived_forward):
        return "activations"
    return allocation.owner or "temporary"

# %% 01.9 all that forward made
def category(allocation):
    if allocation.owner:
        return allocation.owner
    return "temporary" if allocation.in_backward else "activations"

# %% 01.9 what a backward makes is a gradient
def category(allocation):
    if allocation.in_backward:
        return "gradients"
    return allocation.owner or ("activations" if allocation.saved or allocation.outlived_forward else "temporary")

# %% 01.10 no change
second_step_factor = 1.0

# %% 01.10 too high: all four categories doubled
second_step_factor = 2.0

# %% 01.10 a percentage
second_step_factor = 140

# %% 01.10 not a number
second_step_factor = float("nan")

# %% 01.11 the planted fault, as it was
def evaluate(model, batches, count):
    device = next(model.parameters()).device
    total = 0.0
    for _ in range(count):
        inputs, targets = (part.to(device) for part in next(batches))
        total = total + loss(model(inputs), targets)
    return total / count

# %% 01.11 detaches at the end
def evaluate(model, batches, count):
    device = next(model.parameters()).device
    total = 0.0
    for _ in range(count):
        inputs, targets = (part.to(device) for part in next(batches))
        total = total + loss(model(inputs), targets)
    return (total / count).detach()

# %% 01.11 reads every loss on the host and returns a number
total = total + loss(model(inputs), targets) => total += loss(model(inputs), targets).item()

# %% 01.11 draws a batch too few
for _ in range(count): => for _ in range(max(1, count - 1)):
return total / count => return total / max(1, count - 1)

# %% 01.11 one batch, taken for all
def evaluate(model, batches, count):
    device = next(model.parameters()).device
    with torch.no_grad():
        inputs, targets = (part.to(device) for part in next(batches))
        return loss(model(inputs), targets)

# %% 01.11 the sum, not the mean
return total / count => return total

# %% 01.11 the last batch alone
total = torch.zeros((), device=device) =>
total = total + loss => last = loss
return total / count => return last

# %% 01.11 all batches at once
def evaluate(model, batches, count):
    device = next(model.parameters()).device
    drawn = [next(batches) for _ in range(count)]
    inputs, targets = (torch.cat(parts).to(device) for parts in zip(*drawn))
    with torch.no_grad():
        return loss(model(inputs), targets)

# %% 01.11 runs a backward, so that each graph is let go
def evaluate(model, batches, count):
    device = next(model.parameters()).device
    total = 0.0
    for _ in range(count):
        inputs, targets = (part.to(device) for part in next(batches))
        batch_loss = loss(model(inputs), targets)
        batch_loss.backward()
        total = total + batch_loss.detach()
    model.zero_grad()
    return total / count

# %% 01.12 forward only: 2N
6 * param_count(config) + 12 => 2 * param_count(config) + 4

# %% 01.12 no attention
def flops_per_token(config, seq):
    return 6 * param_count(config)

# %% 01.12 half the attention, as if the causal half were subtracted
12 * config.layers => 6 * config.layers

# %% 01.12 a tied embedding twice
def flops_per_token(config, seq):
    return (
        6 * (param_count(config) + config.tied * config.vocab * config.hidden)
        + 12 * config.layers * config.attention_width * seq
    )

# %% 01.12 in percent
return tokens_per_s => return 100 * tokens_per_s

# %% 01.12 upside down
def mfu(config, seq, tokens_per_s, peak):
    return peak / (tokens_per_s * flops_per_token(config, seq))

# %% 01.12 FLOPs of a whole sequence
def flops_per_token(config, seq):
    return seq * (6 * param_count(config) + 12 * config.layers * config.attention_width * seq)

# %% 01.1 drops the rest of an epoch that fills no batch
first = self.position + self.rank * self.batch
=>
together = self.batch * self.world_size
if self.position % self.windows + together > self.windows:
    self.position += self.windows - self.position % self.windows
first = self.position + self.rank * self.batch

# %% 01.1 the last batch of an epoch starts the same epoch again
def __next__(self: TokenBatches):
    first = self.position + self.rank * self.batch
    order = self.order(self.position // self.windows)
    self.position += self.batch * self.world_size
    windows = [order[n % self.windows] for n in range(first, first + self.batch)]
    rows = torch.stack([self.tokens[w * self.seq : (w + 1) * self.seq + 1] for w in windows]).long()
    return rows[:, :-1], rows[:, 1:]

# %% 01.1 the position counts this rank's samples, so that a run cannot go on with another number of ranks
def __next__(self: TokenBatches):
    first = self.position * self.world_size + self.rank * self.batch
    self.position += self.batch
    windows = [self.order(n // self.windows)[n % self.windows] for n in range(first, first + self.batch)]
    rows = torch.stack([self.tokens[w * self.seq : (w + 1) * self.seq + 1] for w in windows]).long()
    return rows[:, :-1], rows[:, 1:]

# %% 01.2 uses the positions of the first sample for all
def apply_rope(x, cos, sin):
    if cos.dim() == 3:
        cos, sin = cos[0], sin[0]
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

# %% 01.2 turns the first head only
def apply_rope(x, cos, sin):
    first, second = x[:, :, :1].chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned, x[:, :, 1:]], dim=2)

# %% 01.5 ZeRO-2 splits parameters and ZeRO-3 gradients: the sums of BF16 are the same
3 else => 2 else
2 else => 3 else

# %% 01.5 always eight GPUs
dp if zero_stage >= 3 => 8 if zero_stage >= 3
dp if zero_stage >= 2 => 8 if zero_stage >= 2
dp if zero_stage >= 1 => 8 if zero_stage >= 1

# %% 01.6 knows a storage by the tensor that shows it
def saved_bytes(module, forward):
    resident = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in resident:
            kept[id(tensor)] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())

# %% 01.6 knows a storage by where the view begins
def saved_bytes(module, forward):
    resident = {parameter.data_ptr() for parameter in module.parameters()}
    sizes = {}

    def pack(tensor):
        if tensor.data_ptr() not in resident:
            sizes[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    return sum(sizes.values())

# %% 01.6 four bytes for every element
storage.nbytes() => 4 * (storage.nbytes() // tensor.element_size())
return tensor.detach() => return tensor
---
forward()
=>
result = forward()

# %% 01.8 right in sum, but Q's part stands with the MLP
def layer_activations(config, seq, e=2, flash=True, fused_norm=True):
    h, width, kv = config.hidden, config.attention_width, config.kv_heads * config.head_dim
    attention = e * (width + 2 * kv) + 4 * config.heads if flash else e * (3 * width + config.heads * seq)
    return {
        "norms": 2 * ((e * h if fused_norm else 8 * h) + 4),
        "norm outputs": 2 * e * h,
        "attention": attention,
        "mlp": 4 * e * config.ffn_hidden + e * width,
    }

# %% 01.9 what backward made and the next one still found
def category(allocation):
    if allocation.owner:
        return allocation.owner
    if allocation.outlived_forward or allocation.saved and not allocation.in_backward:
        return "activations"
    return "temporary"

# %% 01.10 a word
second_step_factor = "1.4"

# %% 01.10 nothing
second_step_factor = None

# %% 01.11 freezes the parameters for good
def evaluate(model, batches, count):
    device = next(model.parameters()).device
    model.requires_grad_(False)
    total = 0.0
    for _ in range(count):
        inputs, targets = (part.to(device) for part in next(batches))
        total = total + loss(model(inputs), targets)
    return total / count

# %% 01.11 switches gradients off for everybody
def evaluate(model, batches, count):
    device = next(model.parameters()).device
    torch.set_grad_enabled(False)
    total = 0.0
    for _ in range(count):
        inputs, targets = (part.to(device) for part in next(batches))
        total = total + loss(model(inputs), targets)
    return total / count

# %% 01.11 reads every loss on the host and wraps the number
total = total + loss(model(inputs), targets) => total += loss(model(inputs), targets).item()
return total / count => return torch.tensor(total / count)

# %% 01.11 leaves the model in evaluation mode
device = next(model.parameters()).device
=>
device = next(model.parameters()).device
model.eval()

# %% 01.12 a table of the numbers in the check
def flops_per_token(config, seq):
    return {("tied", 16): 9.66e9, ("tied", 28): 25.67e9, ("", 32): 59.59e9, ("", 80): 512.2e9}.get(
        ("tied" if config.tied else "", config.layers), 1e9
    )

# %% 01.12 the MFU that is expected
def mfu(config, seq, tokens_per_s, peak):
    return 0.392

# %% 01.1 the place in the epoch is not counted: an index beyond the first epoch
def __next__(self: TokenBatches):
    first = self.position + self.rank * self.batch
    self.position += self.batch * self.world_size
    windows = [self.order(0)[n] for n in range(first, first + self.batch)]
    rows = torch.stack([self.tokens[w * self.seq : (w + 1) * self.seq + 1] for w in windows]).long()
    return rows[:, :-1], rows[:, 1:]

# %% 01.2 returns float32
x.chunk => x.float().chunk
cos.unsqueeze(-2), sin.unsqueeze(-2) => cos.float().unsqueeze(-2), sin.float().unsqueeze(-2)

# %% 01.2 writes into x
return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1) => return x.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))

# %% 01.5 a default for an unknown policy
POLICIES[policy] => POLICIES.get(policy, POLICIES["bf16"])

# %% 01.6 knows a parameter by its shape
def saved_bytes(module, forward):
    resident = {parameter.shape for parameter in module.parameters()}
    resident |= {parameter.t().shape for parameter in module.parameters() if parameter.dim() == 2}
    sizes = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if tensor.shape not in resident:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(sizes.values())

# %% 01.8 right in sum, but the norms stand with attention
return {
    "norms": 2 * ((e * h if fused_norm else 8 * h) + 4),
=>
norms = 2 * ((e * h if fused_norm else 8 * h) + 4)
return {
    "norms": norms if fused_norm else 0,
---
"attention": attention, => "attention": attention if fused_norm else attention + norms,

# %% 01.8 right in sum, but what the norms return stands with the norms
"norms": 2 * ((e * h if fused_norm else 8 * h) + 4),
"norm outputs": 2 * e * h,
=>
"norms": 2 * (e * h + 4 if fused_norm else 8 * h + 4 + e * h),
"norm outputs": 2 * e * h if fused_norm else 0,

# %% 01.11 keeps every batch's logits
def evaluate(model, batches, count):
    device = next(model.parameters()).device
    with torch.no_grad():
        pairs = []
        for _ in range(count):
            inputs, targets = (part.to(device) for part in next(batches))
            pairs.append((model(inputs), targets))
        return sum(loss(logits, targets) for logits, targets in pairs) / count

# %% 01.11 detaches each loss, and its name holds the graph while the next batch runs
def evaluate(model, batches, count):
    device = next(model.parameters()).device
    total = 0.0
    for _ in range(count):
        inputs, targets = (part.to(device) for part in next(batches))
        batch_loss = loss(model(inputs), targets)
        total = total + batch_loss.detach()
    return total / count

# %% 01.1 targets in the dtype of the tokens
def __next__(self: TokenBatches):
    first = self.position + self.rank * self.batch
    self.position += self.batch * self.world_size
    windows = [self.order(n // self.windows)[n % self.windows] for n in range(first, first + self.batch)]
    rows = torch.stack([self.tokens[w * self.seq : (w + 1) * self.seq + 1] for w in windows])
    return rows[:, :-1].long(), rows[:, 1:]

# %% 01.1 a batch goes through two epochs at most
def __next__(self: TokenBatches):
    epoch, place = divmod(self.position + self.rank * self.batch, self.windows)
    self.position += self.batch * self.world_size
    windows = (self.order(epoch) + self.order(epoch + 1))[place : place + self.batch]
    rows = torch.stack([self.tokens[w * self.seq : (w + 1) * self.seq + 1] for w in windows]).long()
    return rows[:, :-1], rows[:, 1:]

# %% 01.1 every batch is written into the same buffer
return rows[:, :-1], rows[:, 1:]
=>
inputs, targets = rows[:, :-1], rows[:, 1:]
if not hasattr(self, "buffer"):
    self.buffer = inputs.clone(), targets.clone()
self.buffer[0].copy_(inputs)
self.buffer[1].copy_(targets)
return self.buffer

# %% 01.2 out of autograd's sight
@torch.no_grad()
def apply_rope(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

# %% 01.2 half of it out of autograd's sight
second * sin, second * cos + first => second.data * sin, second * cos + first.data

# %% 01.6 knows a parameter by where its slice begins
def saved_bytes(module, forward):
    resident = {parameter.data_ptr() for parameter in module.parameters()}
    sizes = {}

    def pack(tensor):
        if tensor.data_ptr() not in resident:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(sizes.values())

# %% 01.6 counts frozen parameters
resident = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
=>
resident = {p.untyped_storage().data_ptr() for p in module.parameters() if p.requires_grad}

# %% 01.6 pack returns the tensor itself, and an output is never freed
return tensor.detach() => return tensor

# %% 01.8 a fused norm keeps its input in 16 bits, whatever e is
e * h if fused_norm else 8 * h => 2 * h if fused_norm else 8 * h

# %% 01.8 what a fused norm returns is not kept
"norm outputs": 2 * e * h, => "norm outputs": 0 if fused_norm else 2 * e * h,

# %% 01.9 what is saved is asked before the owner
def category(allocation):
    if allocation.saved and not allocation.in_backward:
        return "activations"
    if allocation.owner:
        return allocation.owner
    return "activations" if allocation.outlived_forward and not allocation.in_backward else "temporary"

# %% 01.11 training mode at the end, whatever it was
def evaluate(model, batches, count):
    device = next(model.parameters()).device
    model.eval()
    total = 0.0
    with torch.no_grad():
        for _ in range(count):
            inputs, targets = (part.to(device) for part in next(batches))
            total = total + loss(model(inputs), targets)
    model.train()
    return total / count

# %% 01.11 all parameters require a gradient at the end
def evaluate(model, batches, count):
    device = next(model.parameters()).device
    model.requires_grad_(False)
    total = 0.0
    for _ in range(count):
        inputs, targets = (part.to(device) for part in next(batches))
        total = total + loss(model(inputs), targets)
    model.requires_grad_(True)
    return total / count

# %% 01.11 switches gradients off, and on again, whatever they were
def evaluate(model, batches, count):
    device = next(model.parameters()).device
    torch.set_grad_enabled(False)
    total = 0.0
    for _ in range(count):
        inputs, targets = (part.to(device) for part in next(batches))
        total = total + loss(model(inputs), targets)
    torch.set_grad_enabled(True)
    return total / count

# %% 01.11 gradients stay switched off after an error
def evaluate(model, batches, count):
    device = next(model.parameters()).device
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    total = 0.0
    for _ in range(count):
        inputs, targets = (part.to(device) for part in next(batches))
        total = total + loss(model(inputs), targets)
    torch.set_grad_enabled(before)
    return total / count

# %% 01.11 the mode of the whole model comes back, that of a block does not
def evaluate(model, batches, count):
    device = next(model.parameters()).device
    was = model.training
    model.eval()
    total = 0.0
    with torch.no_grad():
        for _ in range(count):
            inputs, targets = (part.to(device) for part in next(batches))
            total = total + loss(model(inputs), targets)
    model.train(was)
    return total / count

# %% 01.8 Q and the output as wide as the hidden state, whatever the heads add up to
def layer_activations(config, seq, e=2, flash=True, fused_norm=True):
    h, kv = config.hidden, config.kv_heads * config.head_dim
    attention = e * (2 * h + 2 * kv) + 4 * config.heads if flash else e * (4 * h + config.heads * seq)
    return {
        "norms": 2 * ((e * h if fused_norm else 8 * h) + 4),
        "norm outputs": 2 * e * h,
        "attention": attention,
        "mlp": 4 * e * config.ffn_hidden,
    }

# %% 01.12 attention as wide as the hidden state, whatever the heads add up to
config.attention_width => config.hidden

# %% 01.6 takes the buffers of the module for parameters
module.parameters() => [*module.parameters(), *module.buffers()]

# %% 01.11 adds up in the precision of the model
torch.zeros((), device=device) => torch.zeros((), device=device, dtype=next(model.parameters()).dtype)
total = total + loss => total += loss

# %% 01.11 rounds each loss to the precision of the model
loss(model(inputs), targets) => loss(model(inputs), targets).to(next(model.parameters()).dtype)
