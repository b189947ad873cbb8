"""Wrong answers that the checks of notebook 14 must catch."""

# %% 14.1 subnormals have a leading 1
torch.where(exponent > 0, mantissa + 2**fmt.mantissa_bits, mantissa) => mantissa + 2**fmt.mantissa_bits

# %% 14.1 subnormals have the unit of exponent field 0
exponent.clamp(min=1) => exponent

# %% 14.1 the highest exponent is infinity and NaN in all formats
(codes & (2 ** (fmt.bits - 1) - 1)) > fmt.largest_code => exponent == 2**fmt.exponent_bits - 1
(mantissa == 0) & (fmt.top_codes == "ieee") => mantissa == 0

# %% 14.1 infinity where it should be NaN
mantissa == 0 => mantissa >= 0

# %% 14.1 the sign is not masked: all negative numbers are NaN
(codes & (2 ** (fmt.bits - 1) - 1)) => codes

# %% 14.1 there is no -0
return torch.where(negative, -value, value)
=>
return value - 2 * value * negative

# %% 14.1 negative is a code past the half, which torch's int16 has not
(codes >> (fmt.bits - 1)) & 1 == 1 => codes >= 2 ** (fmt.bits - 1)

# %% 14.1 fake: torch's own dtypes, and a table of E2M1
def decode(codes: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
        raise ValueError(f"codes are integers, not {codes.dtype}")
    codes = codes.long() & (2**fmt.bits - 1)
    if fmt.bits == 8:
        return codes.to(torch.uint8).view(fmt.dtype).double()
    if fmt.bits == 16:
        return codes.to(torch.int16).view(fmt.dtype).double()
    if fmt.bits < 8:
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double()
        return torch.cat([table, -table])[codes % 16]
    return (codes << (32 - fmt.bits)).to(torch.int32).view(torch.float32).double()  # FP32, and TF32 in its upper bits

# %% 14.2 cut off
rounded = (significand + half - 1 + odd) >> cut  # up from half a unit if odd, otherwise from just above it
=>
rounded = significand >> cut

# %% 14.2 ties away from zero
rounded = (significand + half - 1 + odd) >> cut  # up from half a unit if odd, otherwise from just above it
=>
rounded = (significand + half) >> cut

# %% 14.2 shifts by more than 63 bits
cut = cut.clamp(max=DOUBLE_MANTISSA + 2)  # with a larger cut the value is below half a unit anyway =>

# %% 14.2 no carry from the mantissa to the exponent
rounded = (significand + half - 1 + odd) >> cut  # up from half a unit if odd, otherwise from just above it
=>
rounded = torch.minimum((significand + half - 1 + odd) >> cut, 2 ** (fmt.mantissa_bits + 1) - 1 + 0 * cut)

# %% 14.2 subnormals are flushed to zero
rounded = (significand + half - 1 + odd) >> cut  # up from half a unit if odd, otherwise from just above it
=>
rounded = (significand + half - 1 + odd) >> cut  # up from half a unit if odd, otherwise from just above it
rounded = torch.where(values.double().abs() < fmt.smallest_normal, 0, rounded)

# %% 14.2 float32 first: rounded twice
(values, fmt) => (values.float(), fmt)

# %% 14.2 always saturates: an overflow is hidden
fmt, saturate => fmt, True

# %% 14.2 fake: torch's cast, for the formats that it has
check_floating(values)
=>
check_floating(values)
if fmt.bits in (8, 16):
    cast = (values.clamp(-fmt.largest, fmt.largest) if saturate else values).to(fmt.dtype)
    if fmt.top_codes == "fn" and not saturate:  # torch's cast saturates
        cast = torch.where(values.abs() <= fmt.largest, cast.float(), torch.nan * values.sign()).to(fmt.dtype)
    return cast.view(torch.int16 if fmt.bits == 16 else torch.uint8).long() & (2**fmt.bits - 1)

# %% 14.3 fake: the masters are the weights, widened anew in each step
@torch.no_grad()
def step(self: MasterWeights) -> None:
    torch._foreach_copy_(self.master_parameters, self.weights)
    self.accumulate_into_master()
    self.optimizer.step()
    torch._foreach_copy_(self.weights, self.master_parameters)

# %% 14.3 fake: masters of 16 bits
def accumulate_into_master(self: MasterWeights) -> None:
=>
def __init__(self: MasterWeights, parameters, optimizer_cls, **kwargs):
    self.weights = [parameter for parameter in parameters if parameter.requires_grad]
    self.master_parameters = [nn.Parameter(weight.detach().clone()) for weight in self.weights]
    self.optimizer = optimizer_cls(self.master_parameters, **kwargs)
    self.param_groups = self.optimizer.param_groups


def accumulate_into_master(self: MasterWeights) -> None:
---
weight.grad.float(), None => weight.grad, None

# %% 14.3 the masters are new tensors where float32 ones are there already
def accumulate_into_master(self: MasterWeights) -> None:
=>
def __init__(self: MasterWeights, parameters, optimizer_cls, **kwargs):
    self.weights = [parameter for parameter in parameters if parameter.requires_grad]
    self.master_parameters = [nn.Parameter(weight.detach().float().clone()) for weight in self.weights]
    self.optimizer = optimizer_cls(self.master_parameters, **kwargs)
    self.param_groups = self.optimizer.param_groups


def accumulate_into_master(self: MasterWeights) -> None:

# %% 14.3 the model never gets the masters
torch._foreach_copy_(self.weights, self.master_parameters) =>

# %% 14.3 the model gets the masters before the step
@torch.no_grad()
def step(self: MasterWeights) -> None:
    self.accumulate_into_master()
    torch._foreach_copy_(self.weights, self.master_parameters)
    self.optimizer.step()

# %% 14.3 the 16-bit gradients stay
grad, weight.grad = weight.grad.float(), None => grad = weight.grad.float()

# %% 14.3 micro-batches are summed in 16 bits
def accumulate_into_master(self: MasterWeights) -> None:
    for weight, master in zip(self.weights, self.master_parameters, strict=True):
        if weight.grad is not None:
            grad, weight.grad = weight.grad, None
            master.grad = (grad if master.grad is None else master.grad.to(grad.dtype) + grad).float()

# %% 14.3 cut off instead of rounded
@torch.no_grad()
def step(self: MasterWeights) -> None:
    self.accumulate_into_master()
    self.optimizer.step()
    for weight, master in zip(self.weights, self.master_parameters, strict=True):
        cut = (master.view(torch.int32) & -65536).view(torch.float32)
        weight.copy_(master if weight.dtype == torch.float32 else cut)

# %% 14.3 rounds the first weight alone
@torch.no_grad()
def step(self: MasterWeights) -> None:
    self.accumulate_into_master()
    self.optimizer.step()
    self.weights[0].copy_(self.master_parameters[0])

# %% 14.4 fake: asks the host whether there is an inf
torch.maximum(self.found_inf, (~gradient.isfinite()).any().float(), out=self.found_inf)
=>
if not gradient.isfinite().all():
    self.found_inf.fill_(1.0)
---
shrunk = (factor * self.backoff).float().clamp(min=2.0**-126)  # below it, 1 / S is inf
self.factor.copy_(torch.where(skipped, shrunk, unskipped))
=>
self.factor.copy_(torch.where(skipped, (factor * self.backoff).float(), unskipped))

# %% 14.4 fake: the host decides on the step
@torch.no_grad()
def update(self: LossScaler) -> None:
=>
def step(self: LossScaler, optimizer):
    if self.found_inf.item() == 0:
        optimizer.step()


@torch.no_grad()
def update(self: LossScaler) -> None:

# %% 14.4 fake: a skipped step is one with gradients of 0, which counts
@torch.no_grad()
def update(self: LossScaler) -> None:
=>
def step(self: LossScaler, optimizer):
    optimizer.step()


@torch.no_grad()
def update(self: LossScaler) -> None:
---
if self.group is not None:
=>
for gradient in gradients:
    gradient.copy_(torch.where(self.found_inf > 0, 0.0, gradient))
if self.group is not None:

# %% 14.4 divides by S in 16 bits
gradient.mul_(inverse) => gradient.copy_(gradient.half() * inverse.half())
---
shrunk = (factor * self.backoff).float().clamp(min=2.0**-126)  # below it, 1 / S is inf
self.factor.copy_(torch.where(skipped, shrunk, unskipped))
=>
self.factor.copy_(torch.where(skipped, (factor * self.backoff).float(), unskipped))

# %% 14.4 only the last gradient's inf counts
torch.maximum(self.found_inf, (~gradient.isfinite()).any().float(), out=self.found_inf)
=>
self.found_inf.copy_((~gradient.isfinite()).any())
---
shrunk = (factor * self.backoff).float().clamp(min=2.0**-126)  # below it, 1 / S is inf
self.factor.copy_(torch.where(skipped, shrunk, unskipped))
=>
self.factor.copy_(torch.where(skipped, (factor * self.backoff).float(), unskipped))

# %% 14.4 each rank decides for itself
if self.group is not None:
    dist.all_reduce(self.found_inf, dist.ReduceOp.MAX, self.group)
=>
---
shrunk = (factor * self.backoff).float().clamp(min=2.0**-126)  # below it, 1 / S is inf
self.factor.copy_(torch.where(skipped, shrunk, unskipped))
=>
self.factor.copy_(torch.where(skipped, (factor * self.backoff).float(), unskipped))

# %% 14.4 S grows to infinity
@torch.no_grad()
def update(self: LossScaler) -> None:
    skipped, good_steps, factor = self.found_inf > 0, self.good_steps + 1, self.factor.double()
    due, grown = good_steps == self.interval, (factor * self.growth).float()
    unskipped = torch.where(due, grown, self.factor)
    self.factor.copy_(torch.where(skipped, (factor * self.backoff).float(), unskipped))
    self.good_steps.copy_(torch.where(skipped | due, 0, good_steps))
    self.found_inf.zero_()

# %% 14.4 good steps need not be in a row
@torch.no_grad()
def update(self: LossScaler) -> None:
    skipped, good_steps, factor = self.found_inf > 0, self.good_steps + 1, self.factor.double()
    due, grown = good_steps == self.interval, (factor * self.growth).float()
    unskipped = torch.where(due & grown.isfinite(), grown, self.factor)
    self.factor.copy_(torch.where(skipped, (factor * self.backoff).float(), unskipped))
    self.good_steps.copy_(torch.where(due, 0, torch.where(skipped, self.good_steps, good_steps)))
    self.found_inf.zero_()

# %% 14.4 walks the parameters twice: the second walk of a generator is empty
gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
if any(gradient.dtype == torch.float16 for gradient in gradients):
=>
if any(parameter.grad is not None and parameter.grad.dtype == torch.float16 for parameter in parameters):
---
for gradient in gradients: => for gradient in [p.grad for p in parameters if p.grad is not None]:

# %% 14.4 wants a gradient of every parameter
parameters if parameter.grad is not None => parameters

# %% 14.4 doubles S, whatever growth says
* self.growth => * 2

# %% 14.4 halves S, whatever backoff says
self.backoff => 0.5

# %% 14.4 counts to 3, whatever interval says
good_steps == self.interval => good_steps == 3

# %% 14.1 changes the codes that it is given
codes = codes.long()
=>
codes = codes.long()
codes &= 2**fmt.bits - 1

# %% 14.1 one dimension alone
return torch.where(negative, -value, value)
=>
return torch.where(negative, -value, value).flatten()

# %% 14.1 takes True for a code
codes.is_complex() or codes.dtype == torch.bool => codes.is_complex()

# %% 14.2 one dimension alone
base + rounded, values, fmt => (base + rounded).flatten(), values.flatten(), fmt

# %% 14.3 gives the weights new memory, of which no bucket knows
torch._foreach_copy_(self.weights, self.master_parameters)
=>
for weight, master in zip(self.weights, self.master_parameters, strict=True):
    weight.data = master.detach().to(weight.dtype)

# %% 14.3 rounds to bfloat16, whatever the weights are
(self.weights, self.master_parameters) => (self.weights, [master if w.dtype == torch.float32 else master.bfloat16() for w, master in zip(self.weights, self.master_parameters)])

# %% 14.3 drops the sums of earlier micro-batches
self.accumulate_into_master()
self.optimizer.step()
=>
for master in self.master_parameters:
    master.grad = None
self.accumulate_into_master()
self.optimizer.step()

# %% 14.4 gives the gradients new memory
gradient.mul_(inverse) => gradient.data = gradient * inverse

# %% 14.4 refuses bfloat16, too
gradient.dtype == torch.float16 for => gradient.dtype != torch.float32 for

# %% 14.4 looks at the first gradient's dtype alone
any(gradient.dtype == torch.float16 for gradient in gradients) => gradients and gradients[0].dtype == torch.float16

# %% 14.4 S below 1 counts as 1
self.factor.double().reciprocal().float() => self.factor.clamp(min=1.0).reciprocal()

# %% 14.4 S shrinks until 1 / S is inf
.clamp(min=2.0**-126) =>

# %% 14.4 a sum that overflows counts as inf
(~gradient.isfinite()).any() => (~gradient.sum().isfinite())

# %% 14.4 each call forgets what the one before it has found
gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
=>
gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
self.found_inf.zero_()

# %% 14.4 hangs the others: no all-reduce on a rank without gradients
if self.group is not None: => if self.group is not None and gradients:
