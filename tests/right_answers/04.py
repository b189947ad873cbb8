"""Right answers in another style than the solutions, that the checks of notebook 04 must accept."""

# %% 04.1 one product
def accumulation_steps(batch_tokens: int, seq: int, micro_batch: int, dp: int) -> int:
    per_step = seq * micro_batch * dp
    if batch_tokens < per_step or batch_tokens % per_step:
        raise ValueError(f"a step of {batch_tokens} tokens is no multiple of {seq} x {micro_batch} x {dp} = {per_step}")
    return batch_tokens // per_step

# %% 04.2 divided first
def average_gradients(module: nn.Module, group=None) -> None:
    for gradient in [parameter.grad for parameter in module.parameters() if parameter.grad is not None]:
        gradient.div_(dist.get_world_size(group))
        dist.all_reduce(gradient, op=dist.ReduceOp.SUM, group=group)

# %% 04.3 from bytes
# Set gigabytes_sent: what each of 64 GPUs sends in a step.
gigabytes_sent = 2 * (64 - 1) / 64 * 2 * 8.03e9 / 1e9

# %% 04.4 a queue of works
def overlap_gradients(module: nn.Module, group=None):
    from_backward = []

    def reduce_now(parameter):
        gradient = parameter.grad
        gradient.mul_(1 / dist.get_world_size(group))
        from_backward.append(dist.all_reduce(gradient, group=group, async_op=True))

    for parameter in filter(lambda p: p.requires_grad, module.parameters()):
        parameter.register_post_accumulate_grad_hook(reduce_now)

    def finish():
        while from_backward:
            from_backward.pop(0).wait()

    return finish

# %% 04.5 the kinds apart, then in order
def make_buckets(parameters: Iterable[nn.Parameter], bucket_bytes: float) -> list[list[nn.Parameter]]:
    order = list(parameters)[::-1]
    kinds = {}
    for number, parameter in enumerate(order):
        kind = parameter.dtype, parameter.device, placement_of(parameter).reduce_group
        kinds.setdefault(kind, []).append((number, parameter))
    closed = []
    for members in kinds.values():
        current, held = [], 0
        for number, parameter in members:
            size = parameter.numel() * parameter.element_size()
            if current and held + size > bucket_bytes:
                closed.append(current)
                current, held = [], 0
            current.append((number, parameter))
            held += size
        closed.append(current)
    closed.sort(key=lambda bucket: bucket[-1][0])
    return [[parameter for _, parameter in bucket] for bucket in closed]

# %% 04.6 what is missing, one by one
def launch(self: Bucket) -> None:
    self.flags.fill_(1)
    for flag, parameter in zip(self.flags, self.parameters):
        if parameter not in self.missing:
            continue
        if parameter.grad is None:
            flag.zero_()
            self.views[parameter].fill_(0)
        else:
            self.store(parameter, self.scale)
    if self.reduce_dtype == self.flat.dtype:
        self.sent = self.flat
    else:
        self.sent = self.flat.to(self.reduce_dtype) * self.copy_scale
    self.work = dist.all_reduce(self.sent, op=dist.ReduceOp.SUM, group=self.group, async_op=True)

# %% 04.7 returns early
def add(self: Reducer, parameter: nn.Parameter, final: bool) -> None:
    bucket = self.bucket_of[parameter]
    if not final:
        bucket.store(parameter, 1.0)
        return
    bucket.store(parameter, bucket.scale)
    bucket.missing.discard(parameter)
    if self.launches_early:
        for ready in self.buckets[self.launched :]:
            if ready.missing:
                break
            ready.launch()
            self.launched += 1

# %% 04.8 the last micro-batch apart
def parallel_accumulate(
    dp: DataParallel, micro_batches, dtype: torch.dtype = torch.float32, loss_of=summed_loss
) -> torch.Tensor:
    micro_batches = list(micro_batches)
    counts = torch.stack([targets.ne(IGNORED).sum() for _, targets in micro_batches])
    tokens = counts.sum(dtype=torch.float32)
    dist.all_reduce(tokens, op=dist.ReduceOp.SUM, group=dp.group)
    n = dist.get_world_size(dp.group)
    share = torch.clamp(tokens, min=1.0) / n
    *early, last = micro_batches
    loss = torch.zeros_like(tokens)
    if early:
        with dp.no_sync():
            loss = loss + accumulate(dp, early, dtype, tokens=share, loss_of=loss_of)
    loss = loss + accumulate(dp, [last], dtype, tokens=share, loss_of=loss_of)
    dp.finish()
    loss /= n
    dist.all_reduce(loss, group=dp.group)
    return loss

# %% 04.9 all at once
def first_drift(norms: list[list[float]]) -> tuple[int, int] | None:
    table = np.array(norms, dtype=float)  # [ranks, steps]
    table[np.isnan(table)] = -1  # which no norm is
    usual = np.median(table, axis=0)
    same = np.abs(table - usual) <= 1e-4 * np.abs(usual)
    places = np.argwhere(~same.T)
    return tuple(int(place) for place in places[0]) if len(places) else None

# %% 04.10 largest and smallest apart, by a sum of products with a pattern
def find_diverged_params(module: nn.Module, group=None) -> list[str]:
    named = list(module.named_parameters()) + list(module.named_buffers())

    def checksum(tensor):
        bits = tensor.detach().contiguous().view(INTEGERS[tensor.element_size()]).reshape(-1)
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for start in range(0, len(bits), 2**20):
            part = bits[start : start + 2**20].to(torch.int64)
            places = torch.arange(start + 1, start + 1 + len(part), device=tensor.device)
            total += torch.sum(part * (2 * places + 1))
        return total

    sums = torch.stack([checksum(tensor) for _, tensor in named])
    both = torch.cat([sums, -sums])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    most, least = both[: len(sums)], -both[len(sums) :]
    return [name for (name, _), differs in zip(named, (most != least).tolist()) if differs]

# %% 04.11 two times
def overlap_ratio(tokens: int, dp: int, bandwidth: float, peak: float, gradient_bytes: int = 2) -> float:
    communication_s = gradient_bytes * (dp - 1) / dp * 2 / bandwidth  # of one parameter
    backward_s = 4 * tokens / peak
    return communication_s / backward_s

# %% 04.12 all that divide, then the largest
def recipe(sequences: int, gpus: int, largest_micro_batch: int) -> tuple[int, int, int]:
    best = max(
        (dp, size)
        for dp in range(1, gpus + 1)
        for size in range(1, largest_micro_batch + 1)
        if sequences % (dp * size) == 0
    )
    return best[0], best[1], sequences // (best[0] * best[1])

# %% 04.1 a whole number of NumPy
def accumulation_steps(batch_tokens: int, seq: int, micro_batch: int, dp: int) -> int:
    steps, rest = np.divmod(batch_tokens, np.prod([seq, micro_batch, dp]))
    if rest or steps == 0:
        raise ValueError(f"{batch_tokens} tokens leave {rest}")
    return steps

# %% 04.3 a number of NumPy
gigabytes_sent = np.float32(8.03) * 2 * 2 * 63 / 64

# %% 04.9 counts how many agree
def first_drift(norms: list[list[float]]) -> tuple[int, int] | None:
    def same(a, b):
        return a == b or abs(a - b) <= 1e-4 * abs(b) or (a != a and b != b)

    for step, column in enumerate(zip(*norms, strict=True)):
        agree = [sum(same(a, b) for b in column) for a in column]
        if min(agree) < len(column):
            return step, agree.index(min(agree))
    return None

# %% 04.4 waits for futures
def overlap_gradients(module: nn.Module, group=None):
    futures = []

    def start(parameter):
        parameter.grad /= dist.get_world_size(group)
        futures.append(dist.all_reduce(parameter.grad, group=group, async_op=True).get_future())

    def finish():
        torch.futures.wait_all(futures)
        futures.clear()

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(start)
    return finish
