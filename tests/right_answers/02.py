"""Right answers in another style than the solutions, that the checks of notebook 02 must accept."""

# %% 02.1 flat, leaf by leaf
def detached(arguments):
    leaves, spec = tree_flatten(arguments)
    for index, leaf in enumerate(leaves):
        if torch.is_tensor(leaf):
            cut = leaf.detach()
            cut.requires_grad = leaf.requires_grad
            leaves[index] = cut
    return tree_unflatten(leaves, spec)

# %% 02.2 two lists
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
        again = detached(leaves)
        with torch.enable_grad():
            with replayed(ctx.state):
                result = ctx.function(*tree_unflatten(again, ctx.spec))
        tensors, of_tensors = [], []
        for output, gradient in zip(tree_flatten(result)[0], gradients):
            if output.requires_grad:
                tensors.append(output)
                of_tensors.append(gradient)
        torch.autograd.backward(tensors, of_tensors)
        found = [None] * len(again)
        for index in ctx.indices:
            found[index] = again[index].grad
        return (None, None, *found)

# %% 02.3 puts the generators back by itself
def random_state(tensors) -> tuple:
    gpus = {t.device for t in tensors if isinstance(t, torch.Tensor) and t.device.type == "cuda"}
    autocast = autocast_now("cuda" if gpus else "cpu")
    of_gpus = {}
    for gpu in gpus:
        of_gpus[gpu] = torch.cuda.get_rng_state(gpu)
    return torch.random.get_rng_state(), of_gpus, autocast


@contextlib.contextmanager
def replayed(state):
    cpu_state, gpu_states, autocast = state
    before, of_gpus = torch.get_rng_state(), {gpu: torch.cuda.get_rng_state(gpu) for gpu in gpu_states}
    try:
        torch.set_rng_state(cpu_state)
        for gpu in gpu_states:
            torch.cuda.set_rng_state(gpu_states[gpu], gpu)
        with torch.autocast(**autocast):
            yield
    finally:
        torch.set_rng_state(before)
        for gpu in of_gpus:
            torch.cuda.set_rng_state(of_gpus[gpu], gpu)

# %% 02.4 first back to none, then forward
def apply_recompute(model: nn.Module, mode: str, policy=None) -> nn.Module:
    if mode not in ("none", "selective", "full"):
        raise ValueError(f"mode {mode!r}: it is none, selective or full")
    if policy is not None and mode != "selective":
        raise ValueError(f"a policy belongs to mode selective, not {mode}")
    for block in model.blocks:
        if "forward" in vars(block):
            del block.forward
        core = block.attention.core
        block.attention.core = core.function if isinstance(core, Recomputed) else core
    if mode == "none":
        return model
    for block in model.blocks:
        if mode == "selective" and policy is None:
            block.attention.core = Recomputed(block.attention.core, keep_fused_attention)
        else:
            block.forward = Recomputed(block.forward, policy)
    return model

# %% 02.4 a partial of PyTorch's checkpoint
def apply_recompute(model: nn.Module, mode: str, policy=None) -> nn.Module:
    if mode not in ("none", "selective", "full"):
        raise ValueError(f"mode {mode!r}: it is none, selective or full")
    if policy is not None and mode != "selective":
        raise ValueError(f"a policy belongs to mode selective, not {mode}")

    def wrapped(function, policy=None):
        options = {"use_reentrant": False}
        if policy is not None:
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
        return functools.partial(checkpoint, function, **options)

    for block in model.blocks:
        block.__dict__.pop("forward", None)
        if isinstance(block.attention.core, functools.partial):
            block.attention.core = block.attention.core.args[0]
        if mode == "full" or policy is not None:
            block.forward = wrapped(block.forward, policy)
        elif mode == "selective":
            block.attention.core = wrapped(block.attention.core, keep_fused_attention)
    return model

# %% 02.5 a quarter
more_percent = 100 / 4

# %% 02.5 a number of NumPy's
more_percent = np.float32(25)

# %% 02.6 a set
def keep_matmuls(ctx, operation, *args, **kwargs) -> CheckpointPolicy:
    if operation in {*FUSED_ATTENTION, aten.mm.default, aten.addmm.default, aten._grouped_mm.default}:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE

# %% 02.6 insists on the rest, too
def keep_matmuls(ctx, operation, *args, **kwargs) -> CheckpointPolicy:
    if operation in FUSED_ATTENTION | {aten.mm.default, aten.addmm.default}:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.MUST_RECOMPUTE

# %% 02.7 forward, backward and what is done again
def step_flops(config: ModelConfig, batch: int, seq: int, recompute: str = "none") -> tuple[int, int]:
    parts, tokens, h = parameter_parts(config), batch * seq, config.hidden
    weights = sum(parts[name] for name in ("q_o", "kv", "mlp"))
    scores = 2 * config.heads * config.head_dim * seq  # q k^T of a token, and p v again
    forward = config.layers * (2 * weights + 2 * scores) + 2 * h * config.vocab
    backward = 2 * forward
    again = config.layers * scores  # a flash kernel's
    if recompute == "full":
        again += config.layers * (2 * weights + 2 * scores) - config.layers * 2 * h * config.ffn_hidden
    return tokens * (forward + backward), tokens * (forward + backward + again)

# %% 02.8 a list of parts
def accumulate(
    model: nn.Module, micro_batches, dtype: torch.dtype = torch.float32, tokens=None, loss_of=summed_loss
) -> torch.Tensor:
    micro_batches = list(micro_batches)
    if tokens is None and not micro_batches:
        raise ValueError("no micro-batch: there is nothing to learn from")
    if tokens is None:
        counts = [targets.ne(IGNORED).sum() for _, targets in micro_batches]
        tokens = torch.stack(counts).sum().clamp(min=1)
    done = []
    for inputs, targets in micro_batches:
        if dtype == torch.float32:
            out = model(inputs)
        else:
            with torch.autocast(device_type=inputs.device.type, dtype=dtype):
                out = model(inputs)
        mean = loss_of(out, targets).div(tokens)
        mean.backward()
        done.append(mean.detach())
    return sum(done)

# %% 02.9 handles in a stack
@contextlib.contextmanager
def fp32_gradients(model: nn.Module):
    sums = {}
    with contextlib.ExitStack() as stack:
        for parameter in model.parameters():
            parameter.grad = None
            if parameter.requires_grad:
                sums[parameter] = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)

                def collect(done):
                    sums[done] += done.grad.float()
                    done.grad = None

                stack.callback(parameter.register_post_accumulate_grad_hook(collect).remove)
        yield sums

# %% 02.10 a list for each kind
def symptoms(prof) -> dict[str, float]:
    steps, data, optimizer, host = [], [], [], []
    for span in spans(prof):
        if span.name.startswith("ProfilerStep"):
            steps.append(span)
        if span.lane == "phases":
            {"data": data, "optimizer": optimizer}.get(span.name, []).append(span)
        if span.lane.startswith("CPU"):
            host.append(span)
    count, step_ms = len(steps), sum(step.end_ms - step.start_ms for step in steps)
    ops = 0
    for span in host:
        ops += any(phase.start_ms <= span.start_ms < phase.end_ms for phase in optimizer)
    reads = [event for event in prof.events() if event.name == "aten::_local_scalar_dense"]
    return dict(
        data_share=sum(phase.end_ms - phase.start_ms for phase in data) / step_ms,
        host_reads=len(reads) / count,
        optimizer_ops=ops / count,
    )

# %% 02.11 an index for all windows, a fused optimizer
def marked_training(model, text):
    device = next(model.parameters()).device
    numbers = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    done = 0

    def data(step, batch=4, seq=64):
        starts = 37 * (step * batch + torch.arange(batch)) * seq % (len(numbers) - seq - 1)
        windows = numbers[starts[:, None] + torch.arange(seq + 1)].to(device)
        return windows[:, :-1], windows[:, 1:]

    def step():
        nonlocal done
        with record_function("data"):
            inputs, targets = data(done)
        done += 1
        with record_function("forward"):
            now = loss(model(inputs), targets)
        with record_function("backward"):
            now.backward()
        with record_function("clip"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with record_function("optimizer"):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return now.detach()

    return step

# %% 02.12 the first of all pairs in order
def plan(batch: int, seq: int, room_gib: float, config: ModelConfig = llama) -> tuple[str, int] | None:
    divisors = sorted((n for n in range(1, batch + 1) if batch % n == 0), reverse=True)
    pairs = [(mode, size) for mode in ("none", "matmuls", "full") for size in divisors]
    fit = (pair for pair in pairs if activation_bytes(config, pair[1], seq, recompute=pair[0]) / GiB <= room_gib)
    return next(fit, None)
