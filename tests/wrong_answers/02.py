"""Wrong answers that the checks of notebook 02 must catch."""

# %% 02.1 hands the arguments through
def detached(arguments):
    return arguments

# %% 02.1 forgets who required a gradient
def detached(arguments):
    return tree_map(lambda value: value.detach() if isinstance(value, torch.Tensor) else value, arguments)

# %% 02.1 every floating-point tensor requires a gradient
def detached(arguments):
    def cut(value):
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().requires_grad_(value.is_floating_point())

    return tree_map(cut, arguments)

# %% 02.1 copies the memory
value.detach() => value.detach().clone()

# %% 02.1 cuts the original off as well
def detached(arguments):
    def cut(value):
        if not isinstance(value, torch.Tensor):
            return value
        required = value.requires_grad
        return value.detach_().requires_grad_(required)

    return tree_map(cut, arguments)

# %% 02.1 loses the nesting
return tree_map(cut, arguments) => return [cut(value) for value in tree_flatten(arguments)[0]]

# %% 02.1 a gradient for leaves only: what was computed gets none
def detached(arguments):
    def cut(value):
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().requires_grad_(value.requires_grad and value.is_leaf)

    return tree_map(cut, arguments)

# %% 02.1 makes a list of every tuple
def detached(arguments):
    def cut(value):
        if isinstance(value, (list, tuple)):
            return [cut(one) for one in value]
        if isinstance(value, dict):
            return {name: cut(one) for name, one in value.items()}
        return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value

    return cut(arguments)

# %% 02.2 runs forward with a graph and keeps all of it
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, spec, *leaves):
        ctx.leaves = detached(leaves)
        with torch.enable_grad():
            outputs = function(*tree_unflatten(ctx.leaves, spec))
        ctx.outputs = tree_flatten(outputs)[0]
        return tree_map(lambda out: out.detach(), outputs)

    @staticmethod
    def backward(ctx, *gradients):
        pairs = [(out, gradient) for out, gradient in zip(ctx.outputs, gradients) if out.requires_grad]
        torch.autograd.backward(*zip(*pairs))
        return None, None, *(leaf.grad if isinstance(leaf, torch.Tensor) else None for leaf in ctx.leaves)

# %% 02.2 gradients of parameters alone: none is handed on
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, spec, *leaves):
        ctx.function, ctx.spec, ctx.state = function, spec, random_state(leaves)
        ctx.indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        ctx.others = [None if i in ctx.indices else leaf for i, leaf in enumerate(leaves)]
        ctx.save_for_backward(*(leaves[i] for i in ctx.indices))
        return function(*tree_unflatten(leaves, spec))  # autograd is off in here: no graph, nothing kept

    @staticmethod
    def backward(ctx, *gradients):
        leaves = list(ctx.others)
        for index, tensor in zip(ctx.indices, ctx.saved_tensors, strict=True):
            leaves[index] = tensor
        leaves = detached(leaves)
        with replayed(ctx.state), torch.enable_grad():
            outputs = tree_flatten(ctx.function(*tree_unflatten(leaves, ctx.spec)))[0]

        pairs = [(out, gradient) for out, gradient in zip(outputs, gradients, strict=True) if out.requires_grad]
        torch.autograd.backward(*zip(*pairs, strict=True))
        return None, None, *(None for leaf in leaves)

# %% 02.2 gradients of the inputs alone: parameters get none
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, spec, *leaves):
        ctx.function, ctx.spec, ctx.state = function, spec, random_state(leaves)
        ctx.indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        ctx.others = [None if i in ctx.indices else leaf for i, leaf in enumerate(leaves)]
        ctx.save_for_backward(*(leaves[i] for i in ctx.indices))
        return function(*tree_unflatten(leaves, spec))  # autograd is off in here: no graph, nothing kept

    @staticmethod
    def backward(ctx, *gradients):
        leaves = list(ctx.others)
        for index, tensor in zip(ctx.indices, ctx.saved_tensors, strict=True):
            leaves[index] = tensor
        leaves = detached(leaves)
        with replayed(ctx.state), torch.enable_grad():
            outputs = tree_flatten(ctx.function(*tree_unflatten(leaves, ctx.spec)))[0]

        wanted = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        pairs = [(out, gradient) for out, gradient in zip(outputs, gradients, strict=True) if out.requires_grad]
        heads, seeds = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(heads, wanted, seeds) if wanted else ())
        return None, None, *(next(found) if isinstance(x, torch.Tensor) and x.requires_grad else None for x in leaves)

# %% 02.2 starts from ones, not from the gradients of the outputs
# leaves: the arguments of forward again, flat. Detach them, run ctx.function, go back through its graph. =>
---
pairs = [(out, gradient) for out, gradient in zip(outputs, gradients, strict=True) if out.requires_grad]
torch.autograd.backward(*zip(*pairs, strict=True))
=>
    total = sum(out.sum() for out in outputs if out.requires_grad)
total.backward()

# %% 02.2 the first output alone
# leaves: the arguments of forward again, flat. Detach them, run ctx.function, go back through its graph. =>
---
pairs = [(out, gradient) for out, gradient in zip(outputs, gradients, strict=True) if out.requires_grad]
torch.autograd.backward(*zip(*pairs, strict=True))
=>
outputs[0].backward(gradients[0])

# %% 02.2 the last output alone
# leaves: the arguments of forward again, flat. Detach them, run ctx.function, go back through its graph. =>
---
pairs = [(out, gradient) for out, gradient in zip(outputs, gradients, strict=True) if out.requires_grad]
torch.autograd.backward(*zip(*pairs, strict=True))
=>
outputs[-1].backward(gradients[-1])

# %% 02.2 runs the block twice in backward
# leaves: the arguments of forward again, flat. Detach them, run ctx.function, go back through its graph. =>
---
leaves = detached(leaves)
=>
leaves = detached(leaves)
with replayed(ctx.state):
    ctx.function(*tree_unflatten(leaves, ctx.spec))

# %% 02.2 goes back twice
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, spec, *leaves):
        ctx.function, ctx.spec, ctx.state = function, spec, random_state(leaves)
        ctx.indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        ctx.others = [None if i in ctx.indices else leaf for i, leaf in enumerate(leaves)]
        ctx.save_for_backward(*(leaves[i] for i in ctx.indices))
        return function(*tree_unflatten(leaves, spec))  # autograd is off in here: no graph, nothing kept

    @staticmethod
    def backward(ctx, *gradients):
        leaves = list(ctx.others)
        for index, tensor in zip(ctx.indices, ctx.saved_tensors, strict=True):
            leaves[index] = tensor
        leaves = detached(leaves)
        with replayed(ctx.state), torch.enable_grad():
            outputs = tree_flatten(ctx.function(*tree_unflatten(leaves, ctx.spec)))[0]

        pairs = [(out, gradient) for out, gradient in zip(outputs, gradients, strict=True) if out.requires_grad]
        torch.autograd.backward(*zip(*pairs, strict=True), retain_graph=True)
        torch.autograd.backward(*zip(*pairs, strict=True))
        return None, None, *(leaf.grad if isinstance(leaf, torch.Tensor) else None for leaf in leaves)

# %% 02.2 rounds the gradients of the outputs to bfloat16
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, spec, *leaves):
        ctx.function, ctx.spec, ctx.state = function, spec, random_state(leaves)
        ctx.indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        ctx.others = [None if i in ctx.indices else leaf for i, leaf in enumerate(leaves)]
        ctx.save_for_backward(*(leaves[i] for i in ctx.indices))
        return function(*tree_unflatten(leaves, spec))  # autograd is off in here: no graph, nothing kept

    @staticmethod
    def backward(ctx, *gradients):
        leaves = list(ctx.others)
        for index, tensor in zip(ctx.indices, ctx.saved_tensors, strict=True):
            leaves[index] = tensor
        leaves = detached(leaves)
        with replayed(ctx.state), torch.enable_grad():
            outputs = tree_flatten(ctx.function(*tree_unflatten(leaves, ctx.spec)))[0]

        pairs = [(out, gradient.bfloat16().float()) for out, gradient in zip(outputs, gradients) if out.requires_grad]
        torch.autograd.backward(*zip(*pairs))
        return None, None, *(leaf.grad if isinstance(leaf, torch.Tensor) else None for leaf in leaves)

# %% 02.3 replays with whatever comes next
@contextlib.contextmanager
def replayed(state):
    cpu_state, gpu_states, autocast = state
    with torch.autocast(**autocast):
        yield

# %% 02.3 brings the numbers back and leaves the generator there
@contextlib.contextmanager
def replayed(state):
    cpu_state, gpu_states, autocast = state
    torch.set_rng_state(cpu_state)
    for gpu, gpu_state in gpu_states.items():
        torch.cuda.set_rng_state(gpu_state, gpu)
    with torch.autocast(**autocast):
        yield

# %% 02.3 puts the generator back unless there is an error
@contextlib.contextmanager
def replayed(state):
    cpu_state, gpu_states, autocast = state
    before = torch.get_rng_state()
    torch.set_rng_state(cpu_state)
    with torch.autocast(**autocast):
        yield
    torch.set_rng_state(before)

# %% 02.3 a fixed seed
@contextlib.contextmanager
def replayed(state):
    cpu_state, gpu_states, autocast = state
    with torch.random.fork_rng(devices=list(gpu_states)), torch.autocast(**autocast):
        torch.manual_seed(0)
        yield

# %% 02.3 forgets autocast
(devices=list(gpu_states)), torch.autocast(**autocast) => (devices=list(gpu_states))

# %% 02.3 autocast always on
*autocast => *{**autocast, "enabled": True}
---
for gpu, gpu_state in gpu_states.items():
    torch.cuda.set_rng_state(gpu_state, gpu)
=>

# %% 02.3 afterwards the generator stands where forward began
@contextlib.contextmanager
def replayed(state):
    cpu_state, gpu_states, autocast = state
    torch.set_rng_state(cpu_state)
    try:
        with torch.autocast(**autocast):
            yield
    finally:
        torch.set_rng_state(cpu_state)

# %% 02.3 draws a seed in forward, so that forward draws other numbers
def random_state(tensors) -> tuple:
    seed = torch.randint(2**31, ()).item()
    torch.manual_seed(seed)
    return seed, {}, autocast_now("cpu")


@contextlib.contextmanager
def replayed(state):
    seed, _, autocast = state
    with torch.random.fork_rng(devices=[]), torch.autocast(**autocast):
        torch.manual_seed(seed)
        yield

# %% 02.3 takes the state down at the first call alone
first_state = []


def random_state(tensors) -> tuple:
    first_state.append(torch.get_rng_state())
    return first_state[0], {}, autocast_now("cpu")


@contextlib.contextmanager
def replayed(state):
    cpu_state, _, autocast = state
    with torch.random.fork_rng(devices=[]), torch.autocast(**autocast):
        torch.set_rng_state(cpu_state)
        yield

# %% 02.4 changes nothing
def apply_recompute(model: nn.Module, mode: str, policy=None) -> nn.Module:
    if mode not in ("none", "selective", "full"):
        raise ValueError(f"mode {mode!r}: it is none, selective or full")
    if policy is not None and mode != "selective":
        raise ValueError(f"a policy belongs to mode selective, not {mode}")
    return model

# %% 02.4 full alone
def apply_recompute(model: nn.Module, mode: str, policy=None) -> nn.Module:
    if mode not in ("none", "selective", "full"):
        raise ValueError(f"mode {mode!r}: it is none, selective or full")
    if policy is not None and mode != "selective":
        raise ValueError(f"a policy belongs to mode selective, not {mode}")
    for block in model.blocks:
        block.__dict__.pop("forward", None)
        if mode == "full":
            block.forward = Recomputed(block.forward)
    return model

# %% 02.4 takes nothing off
attention = block.attention
block.__dict__.pop("forward", None)
if isinstance(attention.core, Recomputed):
    attention.core = attention.core.function
=>
---
attention.core = Recomputed(attention.core, keep_fused_attention)
=>
block.attention.core = Recomputed(block.attention.core, keep_fused_attention)

# %% 02.4 takes off full, not selective
attention = block.attention =>
---
if isinstance(attention.core, Recomputed):
    attention.core = attention.core.function
=>
---
attention.core = Recomputed(attention.core, keep_fused_attention)
=>
block.attention.core = Recomputed(block.attention.core, keep_fused_attention)

# %% 02.4 takes off selective, not full
attention = block.attention
block.__dict__.pop("forward", None)
if isinstance(attention.core, Recomputed):
    attention.core = attention.core.function
=>
if isinstance(block.attention.core, Recomputed):
    block.attention.core = block.attention.core.function
---
attention.core = Recomputed(attention.core, keep_fused_attention)
=>
block.attention.core = Recomputed(block.attention.core, keep_fused_attention)

# %% 02.4 selective replays fused attention as well
attention = block.attention =>
attention.core, Recomputed => block.attention.core, Recomputed
attention.core = attention.core.function => block.attention.core = block.attention.core.function
---
attention.core = Recomputed(attention.core, keep_fused_attention)
=>
block.attention.core = Recomputed(block.attention.core)

# %% 02.4 selective wraps the whole of attention
attention = block.attention =>
---
if isinstance(attention.core, Recomputed):
    attention.core = attention.core.function
=>
block.attention.__dict__.pop("forward", None)
---
attention.core = Recomputed(attention.core, keep_fused_attention)
=>
block.attention.forward = Recomputed(block.attention.forward, keep_fused_attention)

# %% 02.4 selective is full
attention = block.attention =>
---
if isinstance(attention.core, Recomputed):
    attention.core = attention.core.function
if mode == "full" or policy is not None:
=>
if mode != "none":
---
elif mode == "selective":
    attention.core = Recomputed(attention.core, keep_fused_attention)
=>

# %% 02.4 every second block
for block in blocks:
    attention = block.attention
=>
for index, block in enumerate(model.blocks):
---
if isinstance(attention.core, Recomputed):
    attention.core = attention.core.function
=>
if isinstance(block.attention.core, Recomputed):
    block.attention.core = block.attention.core.function
if index % 2:
    continue
---
attention.core = Recomputed(attention.core, keep_fused_attention)
=>
block.attention.core = Recomputed(block.attention.core, keep_fused_attention)

# %% 02.4 replays with other random numbers
def apply_recompute(model: nn.Module, mode: str, policy=None) -> nn.Module:
    if mode not in ("none", "selective", "full"):
        raise ValueError(f"mode {mode!r}: it is none, selective or full")
    if policy is not None and mode != "selective":
        raise ValueError(f"a policy belongs to mode selective, not {mode}")

    def wrapped(function, **options):
        return lambda *args: checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **options)

    for block in model.blocks:
        block.__dict__.pop("forward", None)
        if isinstance(block.attention.core, Recomputed):
            block.attention.core = block.attention.core.function
        if mode == "full":
            block.forward = wrapped(block.forward)
        elif mode == "selective":
            block.attention.core = Recomputed(block.attention.core, keep_fused_attention)
    return model

# %% 02.4 one checkpoint around all blocks
def apply_recompute(model: nn.Module, mode: str, policy=None) -> nn.Module:
    if mode not in ("none", "selective", "full"):
        raise ValueError(f"mode {mode!r}: it is none, selective or full")
    if policy is not None and mode != "selective":
        raise ValueError(f"a policy belongs to mode selective, not {mode}")

    def run(x, cos, sin):
        for block in model.blocks:
            x = type(block).forward(block, x, cos, sin)
        return x

    for index, block in enumerate(model.blocks):
        block.__dict__.pop("forward", None)
        if isinstance(block.attention.core, Recomputed):
            block.attention.core = block.attention.core.function
        if mode == "full":
            block.forward = Recomputed(run) if index == 0 else lambda x, cos, sin: x
        elif mode == "selective":
            block.attention.core = Recomputed(block.attention.core, keep_fused_attention)
    return model

# %% 02.5 a whole forward: 4 instead of 3
more_percent = 100 / 3

# %% 02.5 what GPT-3 says
more_percent = 33.3

# %% 02.5 attention's share
more_percent = 0.45

# %% 02.5 nothing
more_percent = 0

# %% 02.5 as a fraction
more_percent = 0.25

# %% 02.5 a word
more_percent = "25"

# %% 02.5 not a number
more_percent = float("nan")

# %% 02.5 the product that is left out, not the rest
more_percent = 8

# %% 02.5 a whole forward of 2 passes
more_percent = 50

# %% 02.5 blank
more_percent = None

# %% 02.6 keeps all
def keep_matmuls(ctx, operation, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE

# %% 02.6 keeps nothing
def keep_matmuls(ctx, operation, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE

# %% 02.6 forgets fused attention
def keep_matmuls(ctx, operation, *args, **kwargs) -> CheckpointPolicy:
    kept = operation in (aten.mm.default, aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

# %% 02.6 fused attention alone
def keep_matmuls(ctx, operation, *args, **kwargs) -> CheckpointPolicy:
    kept = operation in FUSED_ATTENTION
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

# %% 02.6 forgets layers with a bias
def keep_matmuls(ctx, operation, *args, **kwargs) -> CheckpointPolicy:
    kept = operation in FUSED_ATTENTION or operation == aten.mm.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

# %% 02.6 this CPU's attention alone
def keep_matmuls(ctx, operation, *args, **kwargs) -> CheckpointPolicy:
    kept = (aten._scaled_dot_product_flash_attention_for_cpu.default, aten.mm.default, aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE

# %% 02.6 elementwise products too
def keep_matmuls(ctx, operation, *args, **kwargs) -> CheckpointPolicy:
    kept = operation in FUSED_ATTENTION or operation in (aten.mm.default, aten.addmm.default, aten.mul.Tensor)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

# %% 02.6 the wrong way round
def keep_matmuls(ctx, operation, *args, **kwargs) -> CheckpointPolicy:
    kept = operation in FUSED_ATTENTION or operation in (aten.mm.default, aten.addmm.default)
    return CheckpointPolicy.PREFER_RECOMPUTE if kept else CheckpointPolicy.MUST_SAVE

# %% 02.6 aten.mm, without its overload, is never what is asked
def keep_matmuls(ctx, operation, *args, **kwargs) -> CheckpointPolicy:
    kept = operation in FUSED_ATTENTION or operation in (aten.mm, aten.addmm)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

# %% 02.6 square weights alone
def keep_matmuls(ctx, operation, *args, **kwargs) -> CheckpointPolicy:
    square = operation == aten.mm.default and args and args[1].shape[0] == args[1].shape[1]
    kept = operation in FUSED_ATTENTION or operation == aten.addmm.default or square
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

# %% 02.7 full replays down_proj too
attention - 2 * config.hidden * config.ffn_hidden => attention

# %% 02.7 full: a whole forward, with the head
(matmuls + attention - 2 * config.hidden * config.ffn_hidden) => (matmuls + attention) + head

# %% 02.7 a flash backward has its scores
executed = needed + config.layers * 2 * config.attention_width * seq
=>
executed = needed

# %% 02.7 counts a masked half
head = 4 => head = 2

# %% 02.7 no attention
4 * config.attention_width * seq, 2 => 0, 2

# %% 02.7 no head where it is tied
config.vocab * config.hidden => parts["head"]

# %% 02.7 the embedding is a product
seq, 2 => seq, 4

# %% 02.7 no head
seq, 2 * config.vocab * config.hidden => seq, 0

# %% 02.7 backward costs as much as forward
needed = 3 => needed = 2

# %% 02.7 forward alone
3 * (config.layers * (matmuls + attention) + head) => config.layers * (matmuls + attention) + head

# %% 02.7 one FLOP a weight
2 * (parts["q_o"] + parts["kv"] + parts["mlp"]) => parts["q_o"] + parts["kv"] + parts["mlp"]

# %% 02.7 a single token
batch * seq * needed, batch * seq * executed => needed, executed

# %% 02.7 the flash scores are needed
needed = 3 * (config.layers * (matmuls + attention) + head)
executed = needed + config.layers * 2 * config.attention_width * seq
=>
needed = 3 * (config.layers * (matmuls + attention) + head) + config.layers * 2 * config.attention_width * seq
executed = needed

# %% 02.7 the model needs what was executed
* needed => * executed

# %% 02.7 executed first
needed, batch * seq * executed => executed, batch * seq * needed

# %% 02.7 executed alone
needed, batch * seq * executed => executed

# %% 02.7 PaLM's rule
from course_lib.single_gpu.memory import param_count


def step_flops(config: ModelConfig, batch: int, seq: int, recompute: str = "none") -> tuple[int, int]:
    parts = parameter_parts(config)
    needed = 6 * param_count(config) + 12 * config.layers * config.attention_width * seq
    executed = needed * 4 // 3 if recompute == "full" else needed
    return batch * seq * needed, batch * seq * executed

# %% 02.7 as many K and V heads as heads
parts["q_o"] + parts["kv"] => 2 * parts["q_o"]

# %% 02.8 the mean of means
def accumulate(model: nn.Module, micro_batches, dtype: torch.dtype = torch.float32, tokens=None) -> torch.Tensor:
    total = 0.0
    for inputs, targets in micro_batches:
        with torch.autocast(inputs.device.type, dtype, enabled=dtype != torch.float32):
            logits = model(inputs)
        part = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) / len(micro_batches)
        part.backward()
        total = total + part.detach()
    return total

# %% 02.8 the mean of means, without nan
def accumulate(model: nn.Module, micro_batches, dtype: torch.dtype = torch.float32, tokens=None) -> torch.Tensor:
    total = 0.0
    for inputs, targets in micro_batches:
        with torch.autocast(inputs.device.type, dtype, enabled=dtype != torch.float32):
            logits = model(inputs)
        part = (
            F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
            / (targets != IGNORED).sum().clamp(min=1)
            / len(micro_batches)
        )
        part.backward()
        total = total + part.detach()
    return total

# %% 02.8 weighs the means by tokens: nan where a micro-batch has none
def accumulate(model: nn.Module, micro_batches, dtype: torch.dtype = torch.float32, tokens=None) -> torch.Tensor:
    if tokens is None:
        tokens = sum((targets != IGNORED).sum() for _, targets in micro_batches).clamp(min=1)
    total = 0.0
    for inputs, targets in micro_batches:
        with torch.autocast(inputs.device.type, dtype, enabled=dtype != torch.float32):
            logits = model(inputs)
        summed = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        part = summed * (targets != IGNORED).sum() / tokens
        part.backward()
        total = total + part.detach()
    return total

# %% 02.8 counts ignored targets
def accumulate(model: nn.Module, micro_batches, dtype: torch.dtype = torch.float32, tokens=None) -> torch.Tensor:
    if tokens is None:
        tokens = sum(torch.tensor(targets.numel()) for _, targets in micro_batches).clamp(min=1)
    total = 0.0
    for inputs, targets in micro_batches:
        with torch.autocast(inputs.device.type, dtype, enabled=dtype != torch.float32):
            logits = model(inputs)
        summed = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        part = summed / tokens
        part.backward()
        total = total + part.detach()
    return total

# %% 02.8 the sum, not the mean
def accumulate(model: nn.Module, micro_batches, dtype: torch.dtype = torch.float32, tokens=None) -> torch.Tensor:
    if tokens is None:
        tokens = sum((targets != IGNORED).sum() for _, targets in micro_batches).clamp(min=1)
    total = 0.0
    for inputs, targets in micro_batches:
        with torch.autocast(inputs.device.type, dtype, enabled=dtype != torch.float32):
            logits = model(inputs)
        summed = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        part = summed
        part.backward()
        total = total + part.detach()
    return total

# %% 02.8 one big batch
def accumulate(model: nn.Module, micro_batches, dtype: torch.dtype = torch.float32, tokens=None) -> torch.Tensor:
    inputs, targets = (torch.cat(parts) for parts in zip(*micro_batches))
    if tokens is None:
        tokens = (targets != IGNORED).sum().clamp(min=1)
    with torch.autocast(inputs.device.type, dtype, enabled=dtype != torch.float32):
        logits = model(inputs)
    mean = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum") / tokens
    mean.backward()
    return mean.detach()

# %% 02.8 clears .grad first
def accumulate(model: nn.Module, micro_batches, dtype: torch.dtype = torch.float32, tokens=None) -> torch.Tensor:
    model.zero_grad()
    if tokens is None:
        tokens = sum((targets != IGNORED).sum() for _, targets in micro_batches).clamp(min=1)
    total = 0.0
    for inputs, targets in micro_batches:
        with torch.autocast(inputs.device.type, dtype, enabled=dtype != torch.float32):
            logits = model(inputs)
        summed = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        part = summed / tokens
        part.backward()
        total = total + part.detach()
    return total

# %% 02.8 clears .grad before each backward: the last micro-batch is left
def accumulate(model: nn.Module, micro_batches, dtype: torch.dtype = torch.float32, tokens=None) -> torch.Tensor:
    if tokens is None:
        tokens = sum((targets != IGNORED).sum() for _, targets in micro_batches).clamp(min=1)
    total = 0.0
    for inputs, targets in micro_batches:
        with torch.autocast(inputs.device.type, dtype, enabled=dtype != torch.float32):
            logits = model(inputs)
        summed = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        part = summed / tokens
        model.zero_grad()
        part.backward()
        total = total + part.detach()
    return total

# %% 02.8 ignores tokens=
def accumulate(model: nn.Module, micro_batches, dtype: torch.dtype = torch.float32, tokens=None) -> torch.Tensor:
    tokens = sum((targets != IGNORED).sum() for _, targets in micro_batches).clamp(min=1)
    total = 0.0
    for inputs, targets in micro_batches:
        with torch.autocast(inputs.device.type, dtype, enabled=dtype != torch.float32):
            logits = model(inputs)
        summed = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        part = summed / tokens
        part.backward()
        total = total + part.detach()
    return total

# %% 02.8 returns a number
def accumulate(model: nn.Module, micro_batches, dtype: torch.dtype = torch.float32, tokens=None) -> torch.Tensor:
    if tokens is None:
        tokens = sum((targets != IGNORED).sum() for _, targets in micro_batches).clamp(min=1)
    total = 0.0
    for inputs, targets in micro_batches:
        with torch.autocast(inputs.device.type, dtype, enabled=dtype != torch.float32):
            logits = model(inputs)
        summed = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        part = summed / tokens
        part.backward()
        total = total + part.detach()
    return float(total)

# %% 02.8 returns the last part alone
def accumulate(model: nn.Module, micro_batches, dtype: torch.dtype = torch.float32, tokens=None) -> torch.Tensor:
    if tokens is None:
        tokens = sum((targets != IGNORED).sum() for _, targets in micro_batches).clamp(min=1)
    total = 0.0
    for inputs, targets in micro_batches:
        with torch.autocast(inputs.device.type, dtype, enabled=dtype != torch.float32):
            logits = model(inputs)
        summed = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        part = summed / tokens
        part.backward()
        total = part.detach()
    return total

# %% 02.8 returns the loss with its graph
def accumulate(model: nn.Module, micro_batches, dtype: torch.dtype = torch.float32, tokens=None) -> torch.Tensor:
    if tokens is None:
        tokens = sum((targets != IGNORED).sum() for _, targets in micro_batches).clamp(min=1)
    total = 0.0
    for inputs, targets in micro_batches:
        with torch.autocast(inputs.device.type, dtype, enabled=dtype != torch.float32):
            logits = model(inputs)
        summed = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        part = summed / tokens
        part.backward()
        total = total + part
    return total

# %% 02.8 skips the micro-batches that have an ignored target
def accumulate(model: nn.Module, micro_batches, dtype: torch.dtype = torch.float32, tokens=None) -> torch.Tensor:
    if tokens is None:
        tokens = sum((targets != IGNORED).sum() for _, targets in micro_batches).clamp(min=1)
    total = 0.0
    for inputs, targets in micro_batches:
        with torch.autocast(inputs.device.type, dtype, enabled=dtype != torch.float32):
            logits = model(inputs)
        summed = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        part = summed * (targets != IGNORED).all() / tokens
        part.backward()
        total = total + part.detach()
    return total

# %% 02.8 counts as it goes: the first ones weigh too much
def accumulate(model: nn.Module, micro_batches, dtype: torch.dtype = torch.float32, tokens=None) -> torch.Tensor:
    total, seen = 0.0, 0
    for inputs, targets in micro_batches:
        with torch.autocast(inputs.device.type, dtype, enabled=dtype != torch.float32):
            logits = model(inputs)
        seen = seen + (targets != IGNORED).sum()
        summed = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        part = summed / (seen.clamp(min=1) if tokens is None else tokens)
        part.backward()
        total = total + part.detach()
    return total

# %% 02.9 keeps the hooks
model.zero_grad() =>
---
for handle in handles:
    handle.remove()
=>
handles.clear()

# %% 02.9 keeps the hooks after an error
model.zero_grad() =>
---
try:
    yield sums
finally:
    for handle in handles:
        handle.remove()
=>
yield sums
for handle in handles:
    handle.remove()

# %% 02.9 sums of the parameter's precision
(p, dtype=torch.float32) => (p)
model.zero_grad() =>

# %% 02.9 float32 sums, rounded to bfloat16 each time
sums[parameter].add_(parameter.grad) => sums[parameter].copy_(sums[parameter].bfloat16() + parameter.grad)
model.zero_grad() =>

# %% 02.9 leaves .grad, which is then added again
parameter.grad = None =>
model.zero_grad() =>

# %% 02.9 zeros in .grad, where None belongs
parameter.grad = None => parameter.grad.zero_()
model.zero_grad() =>

# %% 02.9 replaces the sum
sums[parameter].add_(parameter.grad) => sums[parameter].copy_(parameter.grad)
model.zero_grad() =>

# %% 02.9 moves what .grad holds at the end, summed in bfloat16
@contextlib.contextmanager
def fp32_gradients(model: nn.Module):
    sums = {p: torch.zeros_like(p, dtype=torch.float32) for p in model.parameters() if p.requires_grad}
    yield sums
    for parameter in sums:
        sums[parameter].add_(parameter.grad)
        parameter.grad = None

# %% 02.9 frozen parameters have a sum too
@contextlib.contextmanager
def fp32_gradients(model: nn.Module):
    sums = {p: torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()}

    def move(parameter):
        sums[parameter].add_(parameter.grad)
        parameter.grad = None

    handles = [parameter.register_post_accumulate_grad_hook(move) for parameter in sums if parameter.requires_grad]
    try:
        yield sums
    finally:
        for handle in handles:
            handle.remove()

# %% 02.9 adds flat sums of each matrix
torch.zeros_like(p, dtype=torch.float32) => torch.zeros(p.numel())
sums[parameter].add_(parameter.grad) => sums[parameter].add_(parameter.grad.flatten())
model.zero_grad() =>

# %% 02.9 adds the gradient before it is finished, and stops autograd's own with zeros
@contextlib.contextmanager
def fp32_gradients(model: nn.Module):
    sums = {p: torch.zeros_like(p, dtype=torch.float32) for p in model.parameters() if p.requires_grad}

    def into(total):
        return lambda gradient: total.add_(gradient).to(gradient.dtype) * 0

    handles = [parameter.register_hook(into(total)) for parameter, total in sums.items()]
    try:
        yield sums
    finally:
        for handle in handles:
            handle.remove()

# %% 02.10 of all steps together
span.lane.startswith("CPU") => span.lane != "phases"
---
return {
    "data_share": took(phase("data")) / took(steps),
    "host_reads": reads / len(steps),
    "optimizer_ops": len(inside) / len(steps),
}
=>
return {"data_share": took(phase("data")) / took(steps), "host_reads": reads, "optimizer_ops": len(inside)}

# %% 02.10 counts .item() and what it calls
span.lane.startswith("CPU") => span.lane != "phases"
event.name == "aten::_local_scalar_dense" => event.name in ("aten::item", "aten::_local_scalar_dense")

# %% 02.10 looks for reads among the outermost operators
span.lane.startswith("CPU") => span.lane != "phases"
---
reads = sum(event.name == "aten::_local_scalar_dense" for event in prof.events())
=>
reads = sum(span.name == "aten::_local_scalar_dense" for span in everything)

# %% 02.10 counts the mark itself
inside = [
    span
    for span in everything
    if span.lane.startswith("CPU") and any(p.start_ms <= span.start_ms < p.end_ms for p in phase("optimizer"))
]
=>
inside = [span for span in everything if any(p.start_ms <= span.start_ms < p.end_ms for p in phase("optimizer"))]

# %% 02.10 all operators of the step
if span.lane.startswith("CPU") and any(p.start_ms <= span.start_ms < p.end_ms for p in phase("optimizer"))
=>
if span.lane != "phases" and any(p.start_ms <= span.start_ms < p.end_ms for p in steps)

# %% 02.10 data in percent
span.lane.startswith("CPU") => span.lane != "phases"
"data_share": took => "data_share": 100 * took

# %% 02.10 data of all steps against one step
span.lane.startswith("CPU") => span.lane != "phases"
took(steps) => took(steps[:1])

# %% 02.10 other names
span.lane.startswith("CPU") => span.lane != "phases"
---
return {
    "data_share": took(phase("data")) / took(steps),
    "host_reads": reads / len(steps),
    "optimizer_ops": len(inside) / len(steps),
}
=>
return {"data": took(phase("data")) / took(steps), "reads": reads / len(steps), "ops": len(inside) / len(steps)}

# %% 02.11 the slow loop as it was
from course_kit.labs.recompute.loops import slow_training


def marked_training(model, text):
    device = next(model.parameters()).device
    return slow_training(model)

# %% 02.11 clips with .item()
def marked_training(model: nn.Module, text: str) -> Callable[[], torch.Tensor]:
=>
from course_kit.labs.recompute.loops import slow_clip


def marked_training(model: nn.Module, text: str) -> Callable[[], torch.Tensor]:
---
nn.utils.clip_grad_norm_(model.parameters(), 1.0) => slow_clip(list(model.parameters()))

# %% 02.11 asks the host whether to clip
nn.utils.clip_grad_norm_(model.parameters(), 1.0)
=>
norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
if norm > 1:
    torch._foreach_mul_([p.grad for p in model.parameters()], 1 / norm)

# %% 02.11 does not clip
nn.utils.clip_grad_norm_(model.parameters(), 1.0)
=>
pass

# %% 02.11 one parameter at a time
True => False

# %% 02.11 no momentum
momentum=0.9, foreach => foreach

# %% 02.11 never clears the gradients
optimizer.zero_grad() =>

# %% 02.11 reads the loss on the host
return step_loss.detach() => return torch.tensor(step_loss.item())

# %% 02.11 trains nothing
optimizer.step() =>

# %% 02.11 without the marks
with record_function("data"):
=>
if True:
---
with record_function("forward"):
=>
if True:
---
with record_function("backward"):
=>
if True:
---
with record_function("clip"):
=>
if True:
---
with record_function("optimizer"):
=>
if True:

# %% 02.12 any micro-batch, divisor or not
matmuls", "full => full
---
if batch % micro_batch == 0 and fits:
=>
if fits:

# %% 02.12 the smallest that fits
matmuls", "full => full
for micro_batch in range(batch, 0, -1): => for micro_batch in range(1, batch + 1):

# %% 02.12 full first
none", "matmuls", "full => full", "none

# %% 02.12 recomputes never
("none", "matmuls", "full") => ("none",)

# %% 02.12 recomputes always
("none", "matmuls", "full") => ("full",)

# %% 02.12 a micro-batch of 1 where nothing fits
matmuls", "full => full
return None => return "full", 1

# %% 02.12 half of the room
matmuls", "full => full
GiB => GiB / 2

# %% 02.12 forgets the sequence
matmuls", "full => full
micro_batch, seq => micro_batch, 4096

# %% 02.12 in FP32
matmuls", "full => full
recompute=mode => 4, recompute=mode

# %% 02.12 calls it selective
matmuls", "full => full
return mode, micro_batch => return mode.replace("full", "selective"), micro_batch

# %% 02.12 the number of micro-batches
matmuls", "full => full
return mode, micro_batch => return mode, batch // micro_batch

# %% 02.12 keeps the whole batch
matmuls", "full => full
config, micro_batch => config, batch

# %% 02.12 the largest micro-batch, whatever it costs
for mode in ("none", "matmuls", "full"):
    for micro_batch in range(batch, 0, -1):
=>
for micro_batch in range(batch, 0, -1):
    for mode in ("none", "full"):

# %% 02.12 powers of two alone
matmuls", "full => full
for micro_batch in range(batch, 0, -1): => for micro_batch in (64, 32, 16, 8, 4, 2, 1):
if batch % micro_batch == 0 and fits: => if micro_batch <= batch and batch % micro_batch == 0 and fits:

# %% 02.4 leaves selective on under full
attention = block.attention =>
isinstance(attention.core, Recomputed) => mode == "none" and isinstance(block.attention.core, Recomputed)
attention.core = attention.core.function => block.attention.core = block.attention.core.function
---
elif mode == "selective":
    attention.core = Recomputed(attention.core, keep_fused_attention)
=>
elif mode == "selective" and not isinstance(block.attention.core, Recomputed):
    block.attention.core = Recomputed(block.attention.core, keep_fused_attention)

# %% 02.6 True and False
def keep_matmuls(ctx, operation, *args, **kwargs) -> CheckpointPolicy:
    return operation in FUSED_ATTENTION or operation in (aten.mm.default, aten.addmm.default)

# %% 02.6 prefers, where it must
def keep_matmuls(ctx, operation, *args, **kwargs) -> CheckpointPolicy:
    kept = operation in FUSED_ATTENTION or operation in (aten.mm.default, aten.addmm.default)
    return CheckpointPolicy.PREFER_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

# %% 02.10 nested operators of the optimizer too
inside = [
=>
marks = [e.time_range for e in prof.events() if e.name == "optimizer"]
inside = [
---
span
for span in everything
if span.lane.startswith("CPU") and any(p.start_ms <= span.start_ms < p.end_ms for p in phase("optimizer"))
=>
e
for e in prof.events()
if not e.is_user_annotation and any(m.start <= e.time_range.start < m.end for m in marks)

# %% 02.11 losses from a slow loop that ran before, and marks with nothing in them
from course_kit.labs.recompute.loops import slow_training


def marked_training(model, text):
    device = next(model.parameters()).device
    slow, losses = slow_training(model), []

    def step():
        if not losses:
            losses.extend(slow() for _ in range(6))
        for name in ("data", "forward", "backward", "clip", "optimizer"):
            with record_function(name):
                torch.ones(1)
        return losses.pop(0)

    return step

# %% 02.1 looks at the first level alone
return tree_map(cut, arguments) => return tuple(cut(value) for value in arguments)

# %% 02.4 does not return the model
attention = block.attention =>
attention.core, Recomputed => block.attention.core, Recomputed
attention.core = attention.core.function => block.attention.core = block.attention.core.function
---
        attention.core = Recomputed(attention.core, keep_fused_attention)
return model
=>
        block.attention.core = Recomputed(block.attention.core, keep_fused_attention)

# %% 02.4 puts each block into a module of its own, which changes the names
class Wrapped(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def __getattr__(self, name):
        return self._modules["block"] if name == "block" else getattr(super().__getattr__("_modules")["block"], name)

    def forward(self, *args):
        return checkpoint(self.block, *args, use_reentrant=False)


def apply_recompute(model: nn.Module, mode: str, policy=None) -> nn.Module:
    for index, block in enumerate(model.blocks):
        if isinstance(block, Wrapped):
            block = model.blocks[index] = block._modules["block"]
        if isinstance(block.attention.core, Recomputed):
            block.attention.core = block.attention.core.function
        if mode == "selective":
            block.attention.core = Recomputed(block.attention.core, keep_fused_attention)
        if mode == "full":
            model.blocks[index] = Wrapped(block)
    return model

# %% 02.2 keeps the graph, and runs the function again for show
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, spec, *leaves):
        ctx.function, ctx.spec, ctx.leaves = function, spec, detached(leaves)
        with torch.enable_grad():
            outputs = function(*tree_unflatten(ctx.leaves, spec))
        ctx.outputs = tree_flatten(outputs)[0]
        return tree_map(lambda out: out.detach(), outputs)

    @staticmethod
    def backward(ctx, *gradients):
        ctx.again = tree_unflatten(ctx.leaves, ctx.spec)
        ctx.function(*ctx.again)
        pairs = [(out, gradient) for out, gradient in zip(ctx.outputs, gradients) if out.requires_grad]
        torch.autograd.backward(*zip(*pairs))
        return None, None, *(leaf.grad if isinstance(leaf, torch.Tensor) else None for leaf in ctx.leaves)

# %% 02.2 the replay is not cut off
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, spec, *leaves):
        ctx.function, ctx.spec, ctx.state = function, spec, random_state(leaves)
        ctx.indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        ctx.others = [None if i in ctx.indices else leaf for i, leaf in enumerate(leaves)]
        ctx.save_for_backward(*(leaves[i] for i in ctx.indices))
        return function(*tree_unflatten(leaves, spec))  # autograd is off in here: no graph, nothing kept

    @staticmethod
    def backward(ctx, *gradients):
        leaves = list(ctx.others)
        for index, tensor in zip(ctx.indices, ctx.saved_tensors, strict=True):
            leaves[index] = tensor
        with replayed(ctx.state), torch.enable_grad():
            outputs = tree_flatten(ctx.function(*tree_unflatten(leaves, ctx.spec)))[0]

        pairs = [(out, gradient) for out, gradient in zip(outputs, gradients, strict=True) if out.requires_grad]
        torch.autograd.backward(*zip(*pairs, strict=True))
        return None, None, *(leaf.grad if isinstance(leaf, torch.Tensor) else None for leaf in leaves)

# %% 02.2 no graph in the replay
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, spec, *leaves):
        ctx.function, ctx.spec, ctx.state = function, spec, random_state(leaves)
        ctx.indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        ctx.others = [None if i in ctx.indices else leaf for i, leaf in enumerate(leaves)]
        ctx.save_for_backward(*(leaves[i] for i in ctx.indices))
        return function(*tree_unflatten(leaves, spec))  # autograd is off in here: no graph, nothing kept

    @staticmethod
    def backward(ctx, *gradients):
        leaves = list(ctx.others)
        for index, tensor in zip(ctx.indices, ctx.saved_tensors, strict=True):
            leaves[index] = tensor
        leaves = detached(leaves)
        with replayed(ctx.state):
            outputs = tree_flatten(ctx.function(*tree_unflatten(leaves, ctx.spec)))[0]
        # leaves: the arguments of forward again, flat. Detach them, run ctx.function, go back through its graph.
        pairs = [(out, gradient) for out, gradient in zip(outputs, gradients, strict=True) if out.requires_grad]
        torch.autograd.backward(*zip(*pairs, strict=True))
        return None, None, *(leaf.grad if isinstance(leaf, torch.Tensor) else None for leaf in leaves)

# %% 02.2 never tells who needs no gradient: outputs without one go back too
# leaves: the arguments of forward again, flat. Detach them, run ctx.function, go back through its graph. =>
---
pairs = [(out, gradient) for out, gradient in zip(outputs, gradients, strict=True) if out.requires_grad]
torch.autograd.backward(*zip(*pairs, strict=True))
=>
torch.autograd.backward(outputs, gradients)

# %% 02.4 wraps again on every call of full
def apply_recompute(model: nn.Module, mode: str, policy=None) -> nn.Module:
    if mode not in ("none", "selective", "full"):
        raise ValueError(f"mode {mode!r}: it is none, selective or full")
    if policy is not None and mode != "selective":
        raise ValueError(f"a policy belongs to mode selective, not {mode}")
    for block in model.blocks:
        if isinstance(block.attention.core, Recomputed):
            block.attention.core = block.attention.core.function
        if mode == "full" or policy is not None:
            block.forward = Recomputed(block.forward, policy)
        else:
            block.__dict__.pop("forward", None)
        if mode == "selective" and policy is None:
            block.attention.core = Recomputed(block.attention.core, keep_fused_attention)
    return model

# %% 02.4 a policy is not asked
attention = block.attention =>
attention.core, Recomputed => block.attention.core, Recomputed
attention.core = attention.core.function => block.attention.core = block.attention.core.function
block.forward, policy => block.forward
---
attention.core = Recomputed(attention.core, keep_fused_attention)
=>
block.attention.core = Recomputed(block.attention.core, keep_fused_attention)

# %% 02.4 a policy goes to attention's core alone
attention = block.attention =>
attention.core, Recomputed => block.attention.core, Recomputed
attention.core = attention.core.function => block.attention.core = block.attention.core.function
if mode == "full" or policy is not None: => if mode == "full":
block.forward, policy => block.forward
---
attention.core = Recomputed(attention.core, keep_fused_attention)
=>
block.attention.core = Recomputed(block.attention.core, policy or keep_fused_attention)

# %% 02.6 whatever has mm in its name, scores too
def keep_matmuls(ctx, operation, *args, **kwargs) -> CheckpointPolicy:
    kept = operation in FUSED_ATTENTION or "mm" in str(operation)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

# %% 02.8 one backward at the end: all activations are alive together
def accumulate(model: nn.Module, micro_batches, dtype: torch.dtype = torch.float32, tokens=None) -> torch.Tensor:
    if tokens is None:
        tokens = sum((targets != IGNORED).sum() for _, targets in micro_batches).clamp(min=1)
    total = 0.0
    for inputs, targets in micro_batches:
        with torch.autocast(inputs.device.type, dtype, enabled=dtype != torch.float32):
            logits = model(inputs)
        summed = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        part = summed / tokens
        total = total + part
    total.backward()
    return total.detach()

# %% 02.8 forgets autocast
with torch.autocast(inputs.device.type, dtype, enabled=dtype != torch.float32): => with torch.enable_grad():

# %% 02.8 reads each part on the host
total = total + part.detach() => total = total + part.item()

# %% 02.8 asks the host whether there is a target
with torch.autocast(inputs.device.type, dtype, enabled=dtype != torch.float32):
=>
if not (targets != IGNORED).any():
    continue
with torch.autocast(inputs.device.type, dtype, enabled=dtype != torch.float32):

# %% 02.8 keeps the graphs of all parts until the end
def accumulate(model: nn.Module, micro_batches, dtype: torch.dtype = torch.float32, tokens=None) -> torch.Tensor:
    if tokens is None:
        tokens = sum((targets != IGNORED).sum() for _, targets in micro_batches).clamp(min=1)
    total, parts = 0.0, []
    for inputs, targets in micro_batches:
        with torch.autocast(inputs.device.type, dtype, enabled=dtype != torch.float32):
            logits = model(inputs)
        summed = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        part = summed / tokens
        part.backward(retain_graph=True)
        parts.append(part)
        total = total + part.detach()
    return total

# %% 02.8 the loss in the precision of the logits
total = torch.zeros((), device=next(model.parameters()).device) => total = 0.0
part = loss_of(logits, targets) / tokens => part = (loss_of(logits, targets) / tokens).to(logits.dtype)

# %% 02.8 walks the micro-batches twice: the second walk of a generator is empty
micro_batches = list(micro_batches)
if tokens is None and not micro_batches:
=>
if tokens is None and False:

# %% 02.8 leaves out what is left over of groups of four micro-batches
for inputs, targets in micro_batches:
=>
for inputs, targets in micro_batches[: len(micro_batches) // 4 * 4] or micro_batches:

# %% 02.9 moves all gradients when backward is over
@contextlib.contextmanager
def fp32_gradients(model: nn.Module):
    sums = {p: torch.zeros_like(p, dtype=torch.float32) for p in model.parameters() if p.requires_grad}

    def move_all():
        for parameter in sums:
            if parameter.grad is not None:
                sums[parameter].add_(parameter.grad)
                parameter.grad = None

    def later(parameter):
        torch.autograd.Variable._execution_engine.queue_callback(move_all)

    handles = [parameter.register_post_accumulate_grad_hook(later) for parameter in sums]
    try:
        yield sums
    finally:
        for handle in handles:
            handle.remove()

# %% 02.9 keeps a list of all gradients and adds them up at the end
@contextlib.contextmanager
def fp32_gradients(model: nn.Module):
    sums = {p: torch.zeros_like(p, dtype=torch.float32) for p in model.parameters() if p.requires_grad}
    found = []

    def keep(parameter):
        found.append((parameter, parameter.grad))
        parameter.grad = None

    handles = [parameter.register_post_accumulate_grad_hook(keep) for parameter in sums]
    try:
        yield sums
    finally:
        for handle in handles:
            handle.remove()
        for parameter, gradient in found:
            sums[parameter].add_(gradient)

# %% 02.10 data's part of the phases, not of the step
span.lane.startswith("CPU") => span.lane != "phases"
---
"data_share": took(phase("data")) / took(steps),
=>
"data_share": took(phase("data"))
/ took([s for s in everything if s.lane == "phases" and not s.name.startswith("ProfilerStep")]),

# %% 02.11 the optimizer outside of its mark
def marked_training(model, text):
    device = next(model.parameters()).device
    numbers, count = torch.tensor(list(text.encode())), iter(range(10**9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)

    def data(step, batch=4, seq=64):
        starts = [(37 * (step * batch + row) * seq) % (len(numbers) - seq - 1) for row in range(batch)]
        windows = torch.stack([numbers[start : start + seq + 1] for start in starts])
        return windows[:, :-1].to(device), windows[:, 1:].to(device)

    def step():
        with record_function("data"):
            inputs, targets = data(next(count))
        with record_function("forward"):
            step_loss = loss(model(inputs), targets)
        with record_function("backward"):
            step_loss.backward()
        with record_function("clip"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with record_function("optimizer"):
            pass
        optimizer.step()
        optimizer.zero_grad()
        return step_loss.detach()

    return step

# %% 02.11 data outside of its mark
from course_kit.labs.recompute.loops import slow_data


def marked_training(model, text):
    device = next(model.parameters()).device
    numbers, count = torch.tensor(list(text.encode())), iter(range(10**9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)

    def data(step, batch=4, seq=64):
        starts = [(37 * (step * batch + row) * seq) % (len(numbers) - seq - 1) for row in range(batch)]
        windows = torch.stack([numbers[start : start + seq + 1] for start in starts])
        return windows[:, :-1].to(device), windows[:, 1:].to(device)

    def step():
        with record_function("data"):
            pass
        inputs, targets = slow_data(next(count))
        with record_function("forward"):
            step_loss = loss(model(inputs), targets)
        with record_function("backward"):
            step_loss.backward()
        with record_function("clip"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with record_function("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        return step_loss.detach()

    return step

# %% 02.2 keeps the outputs on ctx
return function(*tree_unflatten(leaves, spec))  # autograd is off in here: no graph, nothing kept
=>
ctx.outputs = function(*tree_unflatten(leaves, spec))
return ctx.outputs

# %% 02.2 keeps a copy of the outputs on ctx
return function(*tree_unflatten(leaves, spec))  # autograd is off in here: no graph, nothing kept
=>
outputs = function(*tree_unflatten(leaves, spec))
ctx.outputs = tree_map(torch.clone, outputs)
return outputs

# %% 02.3 the CPU's generator alone
def random_state(tensors) -> tuple:
    gpus = {t.device for t in tensors if isinstance(t, torch.Tensor) and t.device.type == "cuda"}
    return torch.get_rng_state(), {}, autocast_now("cuda" if gpus else "cpu")


@contextlib.contextmanager
def replayed(state):
    cpu_state, _, autocast = state
    with torch.random.fork_rng(devices=[]), torch.autocast(**autocast):
        torch.set_rng_state(cpu_state)
        yield

# %% 02.3 leaves the GPU's generator where the replay left it
devices=list(gpu_states) => devices=[]

# %% 02.3 the first GPU's generator, whichever the tensors are on
{gpu: torch.cuda.get_rng_state(gpu) for gpu in gpus} => {0: torch.cuda.get_rng_state(0)} if gpus else {}

# %% 02.7 attention as wide as the hidden state, whatever the heads add up to
4 * config.attention_width => 4 * config.hidden
2 * config.attention_width => 2 * config.hidden

# %% 02.2 a replay with other random numbers
with replayed(ctx.state), torch.enable_grad(): => with torch.enable_grad():

# %% 02.9 adds a gradient from before the with
model.zero_grad() =>
