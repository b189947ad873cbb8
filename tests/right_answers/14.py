"""Right answers in another style than the solutions, that the checks of notebook 14 must accept."""

# %% 14.1 a table of all codes
import math


def decode(codes: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    if codes.dtype not in (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64):
        raise ValueError(f"{codes.dtype} has no codes: give integers")
    half = 2 ** (fmt.bits - 1)
    table = []
    for code in range(half):
        exponent, mantissa = divmod(code, 2**fmt.mantissa_bits)
        if code > fmt.largest_code:
            table.append(math.inf if fmt.top_codes == "ieee" and mantissa == 0 else math.nan)
        elif exponent == 0:
            table.append(math.ldexp(mantissa, 1 - fmt.bias - fmt.mantissa_bits))
        else:
            table.append(math.ldexp(2**fmt.mantissa_bits + mantissa, exponent - fmt.bias - fmt.mantissa_bits))
    positive = torch.tensor(table, dtype=torch.float64, device=codes.device)
    both = torch.cat([positive, -positive])
    return both[codes.long() & (2 * half - 1)]

# %% 14.2 what is cut off, against a half
def encode(values: torch.Tensor, fmt: FloatFormat, saturate: bool = False) -> torch.Tensor:
    check_floating(values)
    _, significand, cut, base = cut_numbers(values, fmt)
    cut = torch.clamp(cut, max=DOUBLE_MANTISSA + 2)
    kept = significand >> cut
    rest = significand - (kept << cut)
    half = torch.ones_like(cut) << (cut - 1)
    up = (rest > half) | ((rest == half) & (kept % 2 == 1))
    return with_top_codes(base + kept + up.long(), values, fmt, saturate)

# %% 14.3 in place
def accumulate_into_master(self: MasterWeights) -> None:
    for weight, master in zip(self.weights, self.master_parameters):
        if weight.grad is None:
            continue
        if master.grad is None:
            master.grad = weight.grad.to(torch.float32)
        else:
            master.grad.add_(weight.grad)
        weight.grad = None


@torch.no_grad()
def step(self: MasterWeights) -> None:
    self.accumulate_into_master()
    self.optimizer.step()
    for weight, master in zip(self.weights, self.master_parameters):
        weight.copy_(master)

# %% 14.4 a sum that looks for what is not finite
@torch.no_grad()
def unscale(self: LossScaler, parameters: Iterable[torch.Tensor]) -> None:
    gradients = []
    for parameter in parameters:
        if parameter.grad is not None:
            if parameter.grad.dtype is torch.float16:
                raise ValueError("unscale wants float32 gradients, or they underflow again")
            gradients.append(parameter.grad)
    reciprocal = (1.0 / self.factor.double()).float()
    for gradient in gradients:
        bad = torch.logical_not(torch.isfinite(gradient).all())
        self.found_inf.copy_(torch.where(bad, 1.0, self.found_inf))
        gradient *= reciprocal
    if self.group:
        dist.all_reduce(self.found_inf, op=dist.ReduceOp.MAX, group=self.group)


@torch.no_grad()
def update(self: LossScaler) -> None:
    bad = self.found_inf.bool()
    count = self.good_steps + 1
    larger = (self.factor.double() * self.growth).float()
    smaller = torch.clamp((self.factor.double() * self.backoff).float(), min=2.0**-126)
    grows = (count >= self.interval) & ~bad
    factor = torch.where(grows & torch.isfinite(larger), larger, self.factor)
    self.factor.copy_(torch.where(bad, smaller, factor))
    self.good_steps.copy_(torch.where(bad | grows, torch.zeros_like(count), count))
    self.found_inf.fill_(0.0)
