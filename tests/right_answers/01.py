"""Right answers in another style than the solutions, that the checks of notebook 01 must accept."""

# %% 01.1 window by window into memory that is there
def __next__(self: TokenBatches) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.empty(self.batch, self.seq, dtype=torch.int64)
    targets = torch.empty_like(inputs)
    for row in range(self.batch):
        epoch, place = divmod(self.position + self.rank * self.batch + row, self.windows)
        start = self.order(epoch)[place] * self.seq
        inputs[row] = self.tokens[start : start + self.seq]
        targets[row] = self.tokens[start + 1 : start + 1 + self.seq]
    self.position += self.world_size * self.batch
    return inputs, targets

# %% 01.2 the halves exchanged, one of them negated
def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    cos, sin = (torch.cat((each, each), dim=-1)[..., None, :] for each in (cos, sin))
    return x * cos + turned * sin

# %% 01.3 two thirds
mlp_share_guess = 2 / 3

# %% 01.3 a number of NumPy's
mlp_share_guess = np.float32(0.7)

# %% 01.4 from the shapes of the weights
def parameter_parts(config: ModelConfig) -> dict[str, int]:
    hidden, kv_width = config.hidden, config.kv_heads * config.head_dim
    table, width = config.vocab * hidden, config.heads * config.head_dim
    parts = dict(q_o=hidden * width + width * hidden, kv=hidden * kv_width + hidden * kv_width)
    parts["mlp"] = sum([hidden * config.ffn_hidden] * 3)
    parts |= {"norms": hidden + hidden, "final_norm": hidden, "embedding": table, "head": table}
    if config.tied:
        parts["head"] = 0
    return parts

# %% 01.5 a loop over what ZeRO deals out
def state_bytes(params: int, policy: str = "bf16", zero_stage: int = 0, dp: int = 1) -> dict[str, float]:
    found = {}
    kinds = ("parameters", "gradients", "optimizer states")
    for kind, dealt_from, size in zip(kinds, (3, 2, 1), POLICIES[policy]):
        found[kind] = size * params
        if zero_stage >= dealt_from:
            found[kind] /= dp
    return found

# %% 01.6 keeps what it is given
def saved_bytes(module: nn.Module, forward) -> int:
    own = [parameter.untyped_storage().data_ptr() for parameter in module.parameters()]
    kept = []
    pack = lambda tensor: kept.append(tensor.detach()) or kept[-1]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        out = forward()
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    del out
    return sum(size for place, size in storages.items() if place not in own)

# %% 01.7 tensor by tensor
def gpt_layer_bytes(hidden: int, heads: int, seq: int, recompute: str = "none") -> int:
    if recompute not in ("none", "selective", "full"):
        raise ValueError(f"recompute={recompute!r}: it is none, selective or full")
    inputs, scores = 2 * hidden, heads * seq
    attention = inputs + 2 * inputs + inputs + inputs + hidden  # Q, K, V's input; Q and K; V; output's input; a mask
    mlp = inputs + 2 * 4 * inputs + hidden
    if recompute == "full":
        return inputs
    if recompute == "selective":
        return attention + mlp + 2 * inputs
    return attention + mlp + 2 * inputs + 2 * scores + scores + 2 * scores

# %% 01.8 tensor by tensor
def layer_activations(
    config: ModelConfig, seq: int, e: int = 2, flash: bool = True, fused_norm: bool = True
) -> dict[str, int]:
    hidden, width = config.hidden, config.heads * config.head_dim
    a_norm = e * hidden + 4 if fused_norm else 4 * hidden + 4 * hidden + 4
    if flash:
        q_and_out, k_and_v, lse = 2 * width * e, 2 * config.kv_heads * config.head_dim * e, 4 * config.heads
        attention = q_and_out + k_and_v + lse
    else:
        scores = config.heads * seq * e
        attention = scores + width * e * 4
    return {"mlp": config.ffn_hidden * e * 4, "attention": attention, "norm outputs": hidden * e * 2, "norms": a_norm * 2}

# %% 01.9 the other case first
def category(allocation: Allocation) -> str:
    lives_on = allocation.saved or allocation.outlived_forward
    made_in_forward = not allocation.in_backward
    return allocation.owner or ("activations" if lives_on and made_in_forward else "temporary")

# %% 01.10 as a fraction
second_step_factor = 7 / 5

# %% 01.10 a number of NumPy's
second_step_factor = np.float32(1.4)

# %% 01.11 a running mean
@torch.no_grad()
def evaluate(model, batches, count):
    device = next(model.parameters()).device
    mean = torch.zeros((), device=device)
    for number in range(1, count + 1):
        inputs, targets = next(batches)
        mean += (loss(model(inputs.to(device)), targets.to(device)) - mean) / number
    return mean

# %% 01.11 detaches each loss: the graph of a batch goes before the next one comes
def evaluate(model, batches, count):
    device = next(model.parameters()).device
    total = 0.0
    for _ in range(count):
        inputs, targets = (part.to(device) for part in next(batches))
        total = total + loss(model(inputs), targets).detach()
    return total / count

# %% 01.12 twice forward, and once more
def flops_per_token(config: ModelConfig, seq: int) -> float:
    forward = 2 * param_count(config) + 4 * config.layers * config.attention_width * seq
    return 3 * forward


def mfu(config: ModelConfig, seq: int, tokens_per_s: float, peak: float) -> float:
    achieved = flops_per_token(config, seq) * tokens_per_s
    return achieved / peak
