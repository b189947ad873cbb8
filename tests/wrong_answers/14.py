"""Wrong answers that the checks of notebook 14 must catch."""


# %% 14.1 subnormals have a leading 1
def decode(codes: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """The numbers that these codes stand for, float64, exactly. codes: integers, whose lowest fmt.bits bits count, so
    that `x.view(torch.int16)` will do. Raises ValueError for codes that aren't integers.
    """
    if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
        raise ValueError(f"codes are integers, not {codes.dtype}")
    codes = codes.long()
    mantissa = codes & (2**fmt.mantissa_bits - 1)
    exponent = (codes >> fmt.mantissa_bits) & (2**fmt.exponent_bits - 1)
    negative = (codes >> (fmt.bits - 1)) & 1 == 1
    significand = mantissa + 2**fmt.mantissa_bits  # the leading 1 isn't stored
    unit = power_of_two(exponent.clamp(min=1) - fmt.bias - fmt.mantissa_bits)
    value = significand.double() * unit
    past_largest = (codes & (2 ** (fmt.bits - 1) - 1)) > fmt.largest_code
    infinite = (mantissa == 0) & (fmt.top_codes == "ieee")
    value = torch.where(past_largest, torch.where(infinite, torch.inf, torch.nan), value)
    return torch.where(negative, -value, value)


# %% 14.1 subnormals have the unit of exponent field 0
def decode(codes: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """The numbers that these codes stand for, float64, exactly. codes: integers, whose lowest fmt.bits bits count, so
    that `x.view(torch.int16)` will do. Raises ValueError for codes that aren't integers.
    """
    if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
        raise ValueError(f"codes are integers, not {codes.dtype}")
    codes = codes.long()
    mantissa = codes & (2**fmt.mantissa_bits - 1)
    exponent = (codes >> fmt.mantissa_bits) & (2**fmt.exponent_bits - 1)
    negative = (codes >> (fmt.bits - 1)) & 1 == 1
    significand = torch.where(exponent > 0, mantissa + 2**fmt.mantissa_bits, mantissa)  # the leading 1 isn't stored
    unit = power_of_two(exponent - fmt.bias - fmt.mantissa_bits)
    value = significand.double() * unit
    past_largest = (codes & (2 ** (fmt.bits - 1) - 1)) > fmt.largest_code
    infinite = (mantissa == 0) & (fmt.top_codes == "ieee")
    value = torch.where(past_largest, torch.where(infinite, torch.inf, torch.nan), value)
    return torch.where(negative, -value, value)


# %% 14.1 the highest exponent is infinity and NaN in all formats
def decode(codes: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """The numbers that these codes stand for, float64, exactly. codes: integers, whose lowest fmt.bits bits count, so
    that `x.view(torch.int16)` will do. Raises ValueError for codes that aren't integers.
    """
    if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
        raise ValueError(f"codes are integers, not {codes.dtype}")
    codes = codes.long()
    mantissa = codes & (2**fmt.mantissa_bits - 1)
    exponent = (codes >> fmt.mantissa_bits) & (2**fmt.exponent_bits - 1)
    negative = (codes >> (fmt.bits - 1)) & 1 == 1
    significand = torch.where(exponent > 0, mantissa + 2**fmt.mantissa_bits, mantissa)  # the leading 1 isn't stored
    unit = power_of_two(exponent.clamp(min=1) - fmt.bias - fmt.mantissa_bits)
    value = significand.double() * unit
    past_largest = exponent == 2**fmt.exponent_bits - 1
    infinite = mantissa == 0
    value = torch.where(past_largest, torch.where(infinite, torch.inf, torch.nan), value)
    return torch.where(negative, -value, value)


# %% 14.1 infinity where it should be NaN
def decode(codes: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """The numbers that these codes stand for, float64, exactly. codes: integers, whose lowest fmt.bits bits count, so
    that `x.view(torch.int16)` will do. Raises ValueError for codes that aren't integers.
    """
    if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
        raise ValueError(f"codes are integers, not {codes.dtype}")
    codes = codes.long()
    mantissa = codes & (2**fmt.mantissa_bits - 1)
    exponent = (codes >> fmt.mantissa_bits) & (2**fmt.exponent_bits - 1)
    negative = (codes >> (fmt.bits - 1)) & 1 == 1
    significand = torch.where(exponent > 0, mantissa + 2**fmt.mantissa_bits, mantissa)  # the leading 1 isn't stored
    unit = power_of_two(exponent.clamp(min=1) - fmt.bias - fmt.mantissa_bits)
    value = significand.double() * unit
    past_largest = (codes & (2 ** (fmt.bits - 1) - 1)) > fmt.largest_code
    infinite = (mantissa >= 0) & (fmt.top_codes == "ieee")
    value = torch.where(past_largest, torch.where(infinite, torch.inf, torch.nan), value)
    return torch.where(negative, -value, value)


# %% 14.1 the sign is not masked: all negative numbers are NaN
def decode(codes: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """The numbers that these codes stand for, float64, exactly. codes: integers, whose lowest fmt.bits bits count, so
    that `x.view(torch.int16)` will do. Raises ValueError for codes that aren't integers.
    """
    if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
        raise ValueError(f"codes are integers, not {codes.dtype}")
    codes = codes.long()
    mantissa = codes & (2**fmt.mantissa_bits - 1)
    exponent = (codes >> fmt.mantissa_bits) & (2**fmt.exponent_bits - 1)
    negative = (codes >> (fmt.bits - 1)) & 1 == 1
    significand = torch.where(exponent > 0, mantissa + 2**fmt.mantissa_bits, mantissa)  # the leading 1 isn't stored
    unit = power_of_two(exponent.clamp(min=1) - fmt.bias - fmt.mantissa_bits)
    value = significand.double() * unit
    past_largest = codes > fmt.largest_code
    infinite = (mantissa == 0) & (fmt.top_codes == "ieee")
    value = torch.where(past_largest, torch.where(infinite, torch.inf, torch.nan), value)
    return torch.where(negative, -value, value)


# %% 14.1 there is no -0
def decode(codes: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """The numbers that these codes stand for, float64, exactly. codes: integers, whose lowest fmt.bits bits count, so
    that `x.view(torch.int16)` will do. Raises ValueError for codes that aren't integers.
    """
    if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
        raise ValueError(f"codes are integers, not {codes.dtype}")
    codes = codes.long()
    mantissa = codes & (2**fmt.mantissa_bits - 1)
    exponent = (codes >> fmt.mantissa_bits) & (2**fmt.exponent_bits - 1)
    negative = (codes >> (fmt.bits - 1)) & 1 == 1
    significand = torch.where(exponent > 0, mantissa + 2**fmt.mantissa_bits, mantissa)  # the leading 1 isn't stored
    unit = power_of_two(exponent.clamp(min=1) - fmt.bias - fmt.mantissa_bits)
    value = significand.double() * unit
    past_largest = (codes & (2 ** (fmt.bits - 1) - 1)) > fmt.largest_code
    infinite = (mantissa == 0) & (fmt.top_codes == "ieee")
    value = torch.where(past_largest, torch.where(infinite, torch.inf, torch.nan), value)
    return value - 2 * value * negative


# %% 14.1 negative is a code past the half, which torch's int16 has not
def decode(codes: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """The numbers that these codes stand for, float64, exactly. codes: integers, whose lowest fmt.bits bits count, so
    that `x.view(torch.int16)` will do. Raises ValueError for codes that aren't integers.
    """
    if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
        raise ValueError(f"codes are integers, not {codes.dtype}")
    codes = codes.long()
    mantissa = codes & (2**fmt.mantissa_bits - 1)
    exponent = (codes >> fmt.mantissa_bits) & (2**fmt.exponent_bits - 1)
    negative = codes >= 2 ** (fmt.bits - 1)
    significand = torch.where(exponent > 0, mantissa + 2**fmt.mantissa_bits, mantissa)  # the leading 1 isn't stored
    unit = power_of_two(exponent.clamp(min=1) - fmt.bias - fmt.mantissa_bits)
    value = significand.double() * unit
    past_largest = (codes & (2 ** (fmt.bits - 1) - 1)) > fmt.largest_code
    infinite = (mantissa == 0) & (fmt.top_codes == "ieee")
    value = torch.where(past_largest, torch.where(infinite, torch.inf, torch.nan), value)
    return torch.where(negative, -value, value)


# %% 14.1 fake: torch's own dtypes, and a table of E2M1
def decode(codes: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """The numbers that these codes stand for, float64, exactly. codes: integers, whose lowest fmt.bits bits count, so
    that `x.view(torch.int16)` will do. Raises ValueError for codes that aren't integers.
    """
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
def encode(values: torch.Tensor, fmt: FloatFormat, saturate: bool = False) -> torch.Tensor:
    """Codes (int64) of the nearest numbers, ties to the even code. From float64 in one rounding: torch's own casts go
    by float32, and round twice.

    What rounds past the largest number becomes inf; in E4M3 NaN; with saturate, and always in E2M1, the largest, inf
    too. (torch's cast to float8_e4m3fn saturates since 2.13, and gave NaN before; that to float8_e5m2 gives inf.) Zeros
    and NaN keep their signs; NaN in E2M1 is the largest, positive, as by CUDA's conversion: OCP MX §5.3.3 leaves it
    open. Raises ValueError for values that aren't floating-point.
    """
    check_floating(values)
    _, significand, cut, base = cut_numbers(values, fmt)
    cut = cut.clamp(max=DOUBLE_MANTISSA + 2)  # from here on, all of it is below half a unit
    odd = (significand >> cut) & 1
    half = 1 << (cut - 1)
    rounded = significand >> cut
    return with_top_codes(base + rounded, values, fmt, saturate)


# %% 14.2 ties away from zero
def encode(values: torch.Tensor, fmt: FloatFormat, saturate: bool = False) -> torch.Tensor:
    """Codes (int64) of the nearest numbers, ties to the even code. From float64 in one rounding: torch's own casts go
    by float32, and round twice.

    What rounds past the largest number becomes inf; in E4M3 NaN; with saturate, and always in E2M1, the largest, inf
    too. (torch's cast to float8_e4m3fn saturates since 2.13, and gave NaN before; that to float8_e5m2 gives inf.) Zeros
    and NaN keep their signs; NaN in E2M1 is the largest, positive, as by CUDA's conversion: OCP MX §5.3.3 leaves it
    open. Raises ValueError for values that aren't floating-point.
    """
    check_floating(values)
    _, significand, cut, base = cut_numbers(values, fmt)
    cut = cut.clamp(max=DOUBLE_MANTISSA + 2)  # from here on, all of it is below half a unit
    odd = (significand >> cut) & 1
    half = 1 << (cut - 1)
    rounded = (significand + half) >> cut
    return with_top_codes(base + rounded, values, fmt, saturate)


# %% 14.2 shifts by more than 63 bits
def encode(values: torch.Tensor, fmt: FloatFormat, saturate: bool = False) -> torch.Tensor:
    """Codes (int64) of the nearest numbers, ties to the even code. From float64 in one rounding: torch's own casts go
    by float32, and round twice.

    What rounds past the largest number becomes inf; in E4M3 NaN; with saturate, and always in E2M1, the largest, inf
    too. (torch's cast to float8_e4m3fn saturates since 2.13, and gave NaN before; that to float8_e5m2 gives inf.) Zeros
    and NaN keep their signs; NaN in E2M1 is the largest, positive, as by CUDA's conversion: OCP MX §5.3.3 leaves it
    open. Raises ValueError for values that aren't floating-point.
    """
    check_floating(values)
    _, significand, cut, base = cut_numbers(values, fmt)
    odd = (significand >> cut) & 1
    half = 1 << (cut - 1)
    rounded = (significand + half - 1 + odd) >> cut  # up from half a unit where odd, else from just above it
    return with_top_codes(base + rounded, values, fmt, saturate)


# %% 14.2 no carry from the mantissa to the exponent
def encode(values: torch.Tensor, fmt: FloatFormat, saturate: bool = False) -> torch.Tensor:
    """Codes (int64) of the nearest numbers, ties to the even code. From float64 in one rounding: torch's own casts go
    by float32, and round twice.

    What rounds past the largest number becomes inf; in E4M3 NaN; with saturate, and always in E2M1, the largest, inf
    too. (torch's cast to float8_e4m3fn saturates since 2.13, and gave NaN before; that to float8_e5m2 gives inf.) Zeros
    and NaN keep their signs; NaN in E2M1 is the largest, positive, as by CUDA's conversion: OCP MX §5.3.3 leaves it
    open. Raises ValueError for values that aren't floating-point.
    """
    check_floating(values)
    _, significand, cut, base = cut_numbers(values, fmt)
    cut = cut.clamp(max=DOUBLE_MANTISSA + 2)  # from here on, all of it is below half a unit
    odd = (significand >> cut) & 1
    half = 1 << (cut - 1)
    rounded = torch.minimum((significand + half - 1 + odd) >> cut, 2 ** (fmt.mantissa_bits + 1) - 1 + 0 * cut)
    return with_top_codes(base + rounded, values, fmt, saturate)


# %% 14.2 subnormals are flushed to zero
def encode(values: torch.Tensor, fmt: FloatFormat, saturate: bool = False) -> torch.Tensor:
    """Codes (int64) of the nearest numbers, ties to the even code. From float64 in one rounding: torch's own casts go
    by float32, and round twice.

    What rounds past the largest number becomes inf; in E4M3 NaN; with saturate, and always in E2M1, the largest, inf
    too. (torch's cast to float8_e4m3fn saturates since 2.13, and gave NaN before; that to float8_e5m2 gives inf.) Zeros
    and NaN keep their signs; NaN in E2M1 is the largest, positive, as by CUDA's conversion: OCP MX §5.3.3 leaves it
    open. Raises ValueError for values that aren't floating-point.
    """
    check_floating(values)
    _, significand, cut, base = cut_numbers(values, fmt)
    cut = cut.clamp(max=DOUBLE_MANTISSA + 2)  # from here on, all of it is below half a unit
    odd = (significand >> cut) & 1
    half = 1 << (cut - 1)
    rounded = (significand + half - 1 + odd) >> cut  # up from half a unit where odd, else from just above it
    rounded = torch.where(values.double().abs() < fmt.smallest_normal, 0, rounded)
    return with_top_codes(base + rounded, values, fmt, saturate)


# %% 14.2 float32 first: rounded twice
def encode(values: torch.Tensor, fmt: FloatFormat, saturate: bool = False) -> torch.Tensor:
    """Codes (int64) of the nearest numbers, ties to the even code. From float64 in one rounding: torch's own casts go
    by float32, and round twice.

    What rounds past the largest number becomes inf; in E4M3 NaN; with saturate, and always in E2M1, the largest, inf
    too. (torch's cast to float8_e4m3fn saturates since 2.13, and gave NaN before; that to float8_e5m2 gives inf.) Zeros
    and NaN keep their signs; NaN in E2M1 is the largest, positive, as by CUDA's conversion: OCP MX §5.3.3 leaves it
    open. Raises ValueError for values that aren't floating-point.
    """
    check_floating(values)
    _, significand, cut, base = cut_numbers(values.float(), fmt)
    cut = cut.clamp(max=DOUBLE_MANTISSA + 2)  # from here on, all of it is below half a unit
    odd = (significand >> cut) & 1
    half = 1 << (cut - 1)
    rounded = (significand + half - 1 + odd) >> cut  # up from half a unit where odd, else from just above it
    return with_top_codes(base + rounded, values, fmt, saturate)


# %% 14.2 always saturates: an overflow is hidden
def encode(values: torch.Tensor, fmt: FloatFormat, saturate: bool = False) -> torch.Tensor:
    """Codes (int64) of the nearest numbers, ties to the even code. From float64 in one rounding: torch's own casts go
    by float32, and round twice.

    What rounds past the largest number becomes inf; in E4M3 NaN; with saturate, and always in E2M1, the largest, inf
    too. (torch's cast to float8_e4m3fn saturates since 2.13, and gave NaN before; that to float8_e5m2 gives inf.) Zeros
    and NaN keep their signs; NaN in E2M1 is the largest, positive, as by CUDA's conversion: OCP MX §5.3.3 leaves it
    open. Raises ValueError for values that aren't floating-point.
    """
    check_floating(values)
    _, significand, cut, base = cut_numbers(values, fmt)
    cut = cut.clamp(max=DOUBLE_MANTISSA + 2)  # from here on, all of it is below half a unit
    odd = (significand >> cut) & 1
    half = 1 << (cut - 1)
    rounded = (significand + half - 1 + odd) >> cut  # up from half a unit where odd, else from just above it
    return with_top_codes(base + rounded, values, fmt, True)


# %% 14.2 fake: torch's cast, for the formats that it has
def encode(values: torch.Tensor, fmt: FloatFormat, saturate: bool = False) -> torch.Tensor:
    """Codes (int64) of the nearest numbers, ties to the even code. From float64 in one rounding: torch's own casts go
    by float32, and round twice.

    What rounds past the largest number becomes inf; in E4M3 NaN; with saturate, and always in E2M1, the largest, inf
    too. (torch's cast to float8_e4m3fn saturates since 2.13, and gave NaN before; that to float8_e5m2 gives inf.) Zeros
    and NaN keep their signs; NaN in E2M1 is the largest, positive, as by CUDA's conversion: OCP MX §5.3.3 leaves it
    open. Raises ValueError for values that aren't floating-point.
    """
    check_floating(values)
    if fmt.bits in (8, 16):
        cast = (values.clamp(-fmt.largest, fmt.largest) if saturate else values).to(fmt.dtype)
        if fmt.top_codes == "fn" and not saturate:  # torch's cast saturates
            cast = torch.where(values.abs() <= fmt.largest, cast.float(), torch.nan * values.sign()).to(fmt.dtype)
        return cast.view(torch.int16 if fmt.bits == 16 else torch.uint8).long() & (2**fmt.bits - 1)
    _, significand, cut, base = cut_numbers(values, fmt)
    cut = cut.clamp(max=DOUBLE_MANTISSA + 2)  # from here on, all of it is below half a unit
    odd = (significand >> cut) & 1
    half = 1 << (cut - 1)
    rounded = (significand + half - 1 + odd) >> cut  # up from half a unit where odd, else from just above it
    return with_top_codes(base + rounded, values, fmt, saturate)


# %% 14.3 fake: the masters are the weights, widened anew in each step
class MasterWeights(Float32Copies):
    def take_gradients(self) -> None:
        """Add the 16-bit gradients to the masters' and drop them. Called for each micro-batch, it sums in float32."""
        for weight, master in zip(self.weights, self.master_parameters, strict=True):
            if weight.grad is not None:
                grad, weight.grad = weight.grad.float(), None
                master.grad = grad if master.grad is None else master.grad + grad

    @torch.no_grad()
    def step(self) -> None:
        """Take the gradients, update the masters, round them to the weights: to nearest, ties to even."""
        torch._foreach_copy_(self.master_parameters, self.weights)
        self.take_gradients()
        self.optimizer.step()
        torch._foreach_copy_(self.weights, self.master_parameters)


# %% 14.3 fake: masters of 16 bits
class MasterWeights(Float32Copies):
    def __init__(self, parameters: Iterable[nn.Parameter], optimizer_cls: type[torch.optim.Optimizer], **kwargs):
        self.weights = [parameter for parameter in parameters if parameter.requires_grad]
        if wrong := {p.dtype for p in self.weights} - {torch.float16, torch.bfloat16, torch.float32}:
            raise ValueError(f"float32 master weights are for parameters of 16 bits, not {wrong.pop()}")
        self.master_parameters = [nn.Parameter(weight.detach().clone()) for weight in self.weights]
        self.optimizer = optimizer_cls(self.master_parameters, **kwargs)
        self.param_groups = self.optimizer.param_groups

    def take_gradients(self) -> None:
        """Add the 16-bit gradients to the masters' and drop them. Called for each micro-batch, it sums in float32."""
        for weight, master in zip(self.weights, self.master_parameters, strict=True):
            if weight.grad is not None:
                grad, weight.grad = weight.grad, None
                master.grad = grad if master.grad is None else master.grad + grad

    @torch.no_grad()
    def step(self) -> None:
        """Take the gradients, update the masters, round them to the weights: to nearest, ties to even."""
        self.take_gradients()
        self.optimizer.step()
        torch._foreach_copy_(self.weights, self.master_parameters)


# %% 14.3 the masters are new tensors where float32 ones are there already
class MasterWeights(Float32Copies):
    def __init__(self, parameters: Iterable[nn.Parameter], optimizer_cls: type[torch.optim.Optimizer], **kwargs):
        self.weights = [parameter for parameter in parameters if parameter.requires_grad]
        if wrong := {p.dtype for p in self.weights} - {torch.float16, torch.bfloat16, torch.float32}:
            raise ValueError(f"float32 master weights are for parameters of 16 bits, not {wrong.pop()}")
        self.master_parameters = [nn.Parameter(weight.detach().float().clone()) for weight in self.weights]
        self.optimizer = optimizer_cls(self.master_parameters, **kwargs)
        self.param_groups = self.optimizer.param_groups

    def take_gradients(self) -> None:
        """Add the 16-bit gradients to the masters' and drop them. Called for each micro-batch, it sums in float32."""
        for weight, master in zip(self.weights, self.master_parameters, strict=True):
            if weight.grad is not None:
                grad, weight.grad = weight.grad.float(), None
                master.grad = grad if master.grad is None else master.grad + grad

    @torch.no_grad()
    def step(self) -> None:
        """Take the gradients, update the masters, round them to the weights: to nearest, ties to even."""
        self.take_gradients()
        self.optimizer.step()
        torch._foreach_copy_(self.weights, self.master_parameters)


# %% 14.3 the model never gets the masters
class MasterWeights(Float32Copies):
    def take_gradients(self) -> None:
        """Add the 16-bit gradients to the masters' and drop them. Called for each micro-batch, it sums in float32."""
        for weight, master in zip(self.weights, self.master_parameters, strict=True):
            if weight.grad is not None:
                grad, weight.grad = weight.grad.float(), None
                master.grad = grad if master.grad is None else master.grad + grad

    @torch.no_grad()
    def step(self) -> None:
        """Take the gradients, update the masters, round them to the weights: to nearest, ties to even."""
        self.take_gradients()
        self.optimizer.step()


# %% 14.3 the model gets the masters before the step
class MasterWeights(Float32Copies):
    def take_gradients(self) -> None:
        """Add the 16-bit gradients to the masters' and drop them. Called for each micro-batch, it sums in float32."""
        for weight, master in zip(self.weights, self.master_parameters, strict=True):
            if weight.grad is not None:
                grad, weight.grad = weight.grad.float(), None
                master.grad = grad if master.grad is None else master.grad + grad

    @torch.no_grad()
    def step(self) -> None:
        """Take the gradients, update the masters, round them to the weights: to nearest, ties to even."""
        self.take_gradients()
        torch._foreach_copy_(self.weights, self.master_parameters)
        self.optimizer.step()


# %% 14.3 the 16-bit gradients stay
class MasterWeights(Float32Copies):
    def take_gradients(self) -> None:
        """Add the 16-bit gradients to the masters' and drop them. Called for each micro-batch, it sums in float32."""
        for weight, master in zip(self.weights, self.master_parameters, strict=True):
            if weight.grad is not None:
                grad = weight.grad.float()
                master.grad = grad if master.grad is None else master.grad + grad

    @torch.no_grad()
    def step(self) -> None:
        """Take the gradients, update the masters, round them to the weights: to nearest, ties to even."""
        self.take_gradients()
        self.optimizer.step()
        torch._foreach_copy_(self.weights, self.master_parameters)


# %% 14.3 micro-batches are summed in 16 bits
class MasterWeights(Float32Copies):
    def take_gradients(self) -> None:
        """Add the 16-bit gradients to the masters' and drop them. Called for each micro-batch, it sums in float32."""
        for weight, master in zip(self.weights, self.master_parameters, strict=True):
            if weight.grad is not None:
                grad, weight.grad = weight.grad, None
                master.grad = (grad if master.grad is None else master.grad.to(grad.dtype) + grad).float()

    @torch.no_grad()
    def step(self) -> None:
        """Take the gradients, update the masters, round them to the weights: to nearest, ties to even."""
        self.take_gradients()
        self.optimizer.step()
        torch._foreach_copy_(self.weights, self.master_parameters)


# %% 14.3 cut off instead of rounded
class MasterWeights(Float32Copies):
    def take_gradients(self) -> None:
        """Add the 16-bit gradients to the masters' and drop them. Called for each micro-batch, it sums in float32."""
        for weight, master in zip(self.weights, self.master_parameters, strict=True):
            if weight.grad is not None:
                grad, weight.grad = weight.grad.float(), None
                master.grad = grad if master.grad is None else master.grad + grad

    @torch.no_grad()
    def step(self) -> None:
        """Take the gradients, update the masters, round them to the weights: to nearest, ties to even."""
        self.take_gradients()
        self.optimizer.step()
        for weight, master in zip(self.weights, self.master_parameters, strict=True):
            cut = (master.view(torch.int32) & -65536).view(torch.float32)
            weight.copy_(master if weight.dtype == torch.float32 else cut)


# %% 14.3 rounds the first weight alone
class MasterWeights(Float32Copies):
    """`optimizer_cls` on float32 copies of 16-bit `parameters`; a float32 parameter is its own master.

    After backward: take_gradients(), clip `master_parameters`, step(), zero_grad(). `param_groups` are the optimizer's.
    Raises ValueError for parameters that float32 doesn't hold.
    """

    def take_gradients(self) -> None:
        """Add the 16-bit gradients to the masters' and drop them. Called for each micro-batch, it sums in float32."""
        for weight, master in zip(self.weights, self.master_parameters, strict=True):
            if weight.grad is not None:
                grad, weight.grad = weight.grad.float(), None
                master.grad = grad if master.grad is None else master.grad + grad

    @torch.no_grad()
    def step(self) -> None:
        """Take the gradients, update the masters, round them to the weights: to nearest, ties to even."""
        self.take_gradients()
        self.optimizer.step()
        self.weights[0].copy_(self.master_parameters[0])


# %% 14.4 fake: asks the host whether there is an inf
class LossScaler(LossScale):
    @torch.no_grad()
    def unscale(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide all gradients by S, once a step, BEFORE they are clipped, and look for inf and nan; all ranks of the
        group call it. Raises ValueError for float16 gradients: divided by S they would underflow again.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("a float16 gradient divided by the scale underflows; take it to float32 first")
        inverse = self.factor.double().reciprocal().float()
        for gradient in gradients:
            if not gradient.isfinite().all():
                self.found_inf.fill_(1.0)
            gradient.mul_(inverse)
        if self.group is not None:
            dist.all_reduce(self.found_inf, dist.ReduceOp.MAX, self.group)

    @torch.no_grad()
    def update(self) -> None:
        """S for the next step; it never grows to inf."""
        skipped, good_steps, factor = self.found_inf > 0, self.good_steps + 1, self.factor.double()
        due, grown = good_steps == self.interval, (factor * self.growth).float()
        kept = torch.where(due & grown.isfinite(), grown, self.factor)
        self.factor.copy_(torch.where(skipped, (factor * self.backoff).float(), kept))
        self.good_steps.copy_(torch.where(skipped | due, 0, good_steps))
        self.found_inf.zero_()


# %% 14.4 fake: the host decides on the step
class LossScaler(LossScale):
    @torch.no_grad()
    def unscale(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide all gradients by S, once a step, BEFORE they are clipped, and look for inf and nan; all ranks of the
        group call it. Raises ValueError for float16 gradients: divided by S they would underflow again.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("a float16 gradient divided by the scale underflows; take it to float32 first")
        inverse = self.factor.double().reciprocal().float()
        for gradient in gradients:
            torch.maximum(self.found_inf, (~gradient.isfinite()).any().float(), out=self.found_inf)
            gradient.mul_(inverse)
        if self.group is not None:
            dist.all_reduce(self.found_inf, dist.ReduceOp.MAX, self.group)

    def step(self, optimizer: torch.optim.Optimizer | MasterWeights) -> None:
        """The optimizer's step, or none: see `step_unless`."""
        if self.found_inf.item() == 0:
            optimizer.step()

    @torch.no_grad()
    def update(self) -> None:
        """S for the next step; it never grows to inf."""
        skipped, good_steps, factor = self.found_inf > 0, self.good_steps + 1, self.factor.double()
        due, grown = good_steps == self.interval, (factor * self.growth).float()
        kept = torch.where(due & grown.isfinite(), grown, self.factor)
        self.factor.copy_(torch.where(skipped, (factor * self.backoff).float(), kept))
        self.good_steps.copy_(torch.where(skipped | due, 0, good_steps))
        self.found_inf.zero_()


# %% 14.4 fake: a skipped step is one with gradients of 0, which counts
class LossScaler(LossScale):
    @torch.no_grad()
    def unscale(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide all gradients by S, once a step, BEFORE they are clipped, and look for inf and nan; all ranks of the
        group call it. Raises ValueError for float16 gradients: divided by S they would underflow again.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("a float16 gradient divided by the scale underflows; take it to float32 first")
        inverse = self.factor.double().reciprocal().float()
        for gradient in gradients:
            torch.maximum(self.found_inf, (~gradient.isfinite()).any().float(), out=self.found_inf)
            gradient.mul_(inverse)
        for gradient in gradients:
            gradient.copy_(torch.where(self.found_inf > 0, 0.0, gradient))
        if self.group is not None:
            dist.all_reduce(self.found_inf, dist.ReduceOp.MAX, self.group)

    def step(self, optimizer: torch.optim.Optimizer | MasterWeights) -> None:
        """The optimizer's step, or none: see `step_unless`."""
        optimizer.step()

    @torch.no_grad()
    def update(self) -> None:
        """S for the next step; it never grows to inf."""
        skipped, good_steps, factor = self.found_inf > 0, self.good_steps + 1, self.factor.double()
        due, grown = good_steps == self.interval, (factor * self.growth).float()
        kept = torch.where(due & grown.isfinite(), grown, self.factor)
        self.factor.copy_(torch.where(skipped, (factor * self.backoff).float(), kept))
        self.good_steps.copy_(torch.where(skipped | due, 0, good_steps))
        self.found_inf.zero_()


# %% 14.4 divides by S in 16 bits
class LossScaler(LossScale):
    @torch.no_grad()
    def unscale(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide all gradients by S, once a step, BEFORE they are clipped, and look for inf and nan; all ranks of the
        group call it. Raises ValueError for float16 gradients: divided by S they would underflow again.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("a float16 gradient divided by the scale underflows; take it to float32 first")
        inverse = self.factor.double().reciprocal().float()
        for gradient in gradients:
            torch.maximum(self.found_inf, (~gradient.isfinite()).any().float(), out=self.found_inf)
            gradient.copy_(gradient.half() * inverse.half())
        if self.group is not None:
            dist.all_reduce(self.found_inf, dist.ReduceOp.MAX, self.group)

    @torch.no_grad()
    def update(self) -> None:
        """S for the next step; it never grows to inf."""
        skipped, good_steps, factor = self.found_inf > 0, self.good_steps + 1, self.factor.double()
        due, grown = good_steps == self.interval, (factor * self.growth).float()
        kept = torch.where(due & grown.isfinite(), grown, self.factor)
        self.factor.copy_(torch.where(skipped, (factor * self.backoff).float(), kept))
        self.good_steps.copy_(torch.where(skipped | due, 0, good_steps))
        self.found_inf.zero_()


# %% 14.4 only the last gradient's inf counts
class LossScaler(LossScale):
    @torch.no_grad()
    def unscale(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide all gradients by S, once a step, BEFORE they are clipped, and look for inf and nan; all ranks of the
        group call it. Raises ValueError for float16 gradients: divided by S they would underflow again.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("a float16 gradient divided by the scale underflows; take it to float32 first")
        inverse = self.factor.double().reciprocal().float()
        for gradient in gradients:
            self.found_inf.copy_((~gradient.isfinite()).any())
            gradient.mul_(inverse)
        if self.group is not None:
            dist.all_reduce(self.found_inf, dist.ReduceOp.MAX, self.group)

    @torch.no_grad()
    def update(self) -> None:
        """S for the next step; it never grows to inf."""
        skipped, good_steps, factor = self.found_inf > 0, self.good_steps + 1, self.factor.double()
        due, grown = good_steps == self.interval, (factor * self.growth).float()
        kept = torch.where(due & grown.isfinite(), grown, self.factor)
        self.factor.copy_(torch.where(skipped, (factor * self.backoff).float(), kept))
        self.good_steps.copy_(torch.where(skipped | due, 0, good_steps))
        self.found_inf.zero_()


# %% 14.4 each rank decides for itself
class LossScaler(LossScale):
    @torch.no_grad()
    def unscale(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide all gradients by S, once a step, BEFORE they are clipped, and look for inf and nan; all ranks of the
        group call it. Raises ValueError for float16 gradients: divided by S they would underflow again.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("a float16 gradient divided by the scale underflows; take it to float32 first")
        inverse = self.factor.double().reciprocal().float()
        for gradient in gradients:
            torch.maximum(self.found_inf, (~gradient.isfinite()).any().float(), out=self.found_inf)
            gradient.mul_(inverse)

    @torch.no_grad()
    def update(self) -> None:
        """S for the next step; it never grows to inf."""
        skipped, good_steps, factor = self.found_inf > 0, self.good_steps + 1, self.factor.double()
        due, grown = good_steps == self.interval, (factor * self.growth).float()
        kept = torch.where(due & grown.isfinite(), grown, self.factor)
        self.factor.copy_(torch.where(skipped, (factor * self.backoff).float(), kept))
        self.good_steps.copy_(torch.where(skipped | due, 0, good_steps))
        self.found_inf.zero_()


# %% 14.4 S grows to infinity
class LossScaler(LossScale):
    @torch.no_grad()
    def unscale(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide all gradients by S, once a step, BEFORE they are clipped, and look for inf and nan; all ranks of the
        group call it. Raises ValueError for float16 gradients: divided by S they would underflow again.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("a float16 gradient divided by the scale underflows; take it to float32 first")
        inverse = self.factor.double().reciprocal().float()
        for gradient in gradients:
            torch.maximum(self.found_inf, (~gradient.isfinite()).any().float(), out=self.found_inf)
            gradient.mul_(inverse)
        if self.group is not None:
            dist.all_reduce(self.found_inf, dist.ReduceOp.MAX, self.group)

    @torch.no_grad()
    def update(self) -> None:
        """S for the next step; it never grows to inf."""
        skipped, good_steps, factor = self.found_inf > 0, self.good_steps + 1, self.factor.double()
        due, grown = good_steps == self.interval, (factor * self.growth).float()
        kept = torch.where(due, grown, self.factor)
        self.factor.copy_(torch.where(skipped, (factor * self.backoff).float(), kept))
        self.good_steps.copy_(torch.where(skipped | due, 0, good_steps))
        self.found_inf.zero_()


# %% 14.4 good steps need not be in a row
class LossScaler(LossScale):
    @torch.no_grad()
    def unscale(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide all gradients by S, once a step, BEFORE they are clipped, and look for inf and nan; all ranks of the
        group call it. Raises ValueError for float16 gradients: divided by S they would underflow again.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("a float16 gradient divided by the scale underflows; take it to float32 first")
        inverse = self.factor.double().reciprocal().float()
        for gradient in gradients:
            torch.maximum(self.found_inf, (~gradient.isfinite()).any().float(), out=self.found_inf)
            gradient.mul_(inverse)
        if self.group is not None:
            dist.all_reduce(self.found_inf, dist.ReduceOp.MAX, self.group)

    @torch.no_grad()
    def update(self) -> None:
        """S for the next step; it never grows to inf."""
        skipped, good_steps, factor = self.found_inf > 0, self.good_steps + 1, self.factor.double()
        due, grown = good_steps == self.interval, (factor * self.growth).float()
        kept = torch.where(due & grown.isfinite(), grown, self.factor)
        self.factor.copy_(torch.where(skipped, (factor * self.backoff).float(), kept))
        self.good_steps.copy_(torch.where(due, 0, torch.where(skipped, self.good_steps, good_steps)))
        self.found_inf.zero_()


# %% 14.4 walks the parameters twice: the second walk of a generator is empty
class LossScaler(LossScale):
    """The loss scale S and its schedule: scale(loss).backward(), unscale, clip, step, update; Micikevicius et al. §3.2.

    S grows `growth` times after `interval` steps without inf and nan, and shrinks by `backoff` after one with. `group`:
    the ranks that skip a step together, all that share a model; None: this process alone. Its state is buffers on the
    device, so that to(), state_dict() and load_state_dict() are a module's. Raises ValueError for an impossible scale.
    """

    @torch.no_grad()
    def unscale(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide all gradients by S, once a step, BEFORE they are clipped, and look for inf and nan; all ranks of the
        group call it. parameters: in any iterable, model.parameters() too, which can be walked only once; those without
        a gradient are left out. Raises ValueError for float16 gradients: divided by S they would underflow again.
        """
        if any(parameter.grad is not None and parameter.grad.dtype == torch.float16 for parameter in parameters):
            raise ValueError("a float16 gradient divided by the scale underflows; take it to float32 first")
        inverse = self.factor.double().reciprocal().float()
        for gradient in [p.grad for p in parameters if p.grad is not None]:
            torch.maximum(self.found_inf, (~gradient.isfinite()).any().float(), out=self.found_inf)
            gradient.mul_(inverse)
        if self.group is not None:
            dist.all_reduce(self.found_inf, dist.ReduceOp.MAX, self.group)

    @torch.no_grad()
    def update(self) -> None:
        """S for the next step; it never grows to inf."""
        skipped, good_steps, factor = self.found_inf > 0, self.good_steps + 1, self.factor.double()
        due, grown = good_steps == self.interval, (factor * self.growth).float()
        kept = torch.where(due & grown.isfinite(), grown, self.factor)
        shrunk = (factor * self.backoff).float().clamp(min=2.0**-126)  # below it, 1 / S is inf
        self.factor.copy_(torch.where(skipped, shrunk, kept))
        self.good_steps.copy_(torch.where(skipped | due, 0, good_steps))
        self.found_inf.zero_()


# %% 14.4 wants a gradient of every parameter
class LossScaler(LossScale):
    """The loss scale S and its schedule: scale(loss).backward(), unscale, clip, step, update; Micikevicius et al. §3.2.

    S grows `growth` times after `interval` steps without inf and nan, and shrinks by `backoff` after one with. `group`:
    the ranks that skip a step together, all that share a model; None: this process alone. Its state is buffers on the
    device, so that to(), state_dict() and load_state_dict() are a module's. Raises ValueError for an impossible scale.
    """

    @torch.no_grad()
    def unscale(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide all gradients by S, once a step, BEFORE they are clipped, and look for inf and nan; all ranks of the
        group call it. parameters: in any iterable, model.parameters() too, which can be walked only once; those without
        a gradient are left out. Raises ValueError for float16 gradients: divided by S they would underflow again.
        """
        gradients = [parameter.grad for parameter in parameters]
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("a float16 gradient divided by the scale underflows; take it to float32 first")
        inverse = self.factor.double().reciprocal().float()
        for gradient in gradients:
            torch.maximum(self.found_inf, (~gradient.isfinite()).any().float(), out=self.found_inf)
            gradient.mul_(inverse)
        if self.group is not None:
            dist.all_reduce(self.found_inf, dist.ReduceOp.MAX, self.group)

    @torch.no_grad()
    def update(self) -> None:
        """S for the next step; it never grows to inf."""
        skipped, good_steps, factor = self.found_inf > 0, self.good_steps + 1, self.factor.double()
        due, grown = good_steps == self.interval, (factor * self.growth).float()
        kept = torch.where(due & grown.isfinite(), grown, self.factor)
        shrunk = (factor * self.backoff).float().clamp(min=2.0**-126)  # below it, 1 / S is inf
        self.factor.copy_(torch.where(skipped, shrunk, kept))
        self.good_steps.copy_(torch.where(skipped | due, 0, good_steps))
        self.found_inf.zero_()


# %% 14.4 doubles S, whatever growth says
class LossScaler(LossScale):
    """The loss scale S and its schedule: scale(loss).backward(), unscale, clip, step, update; Micikevicius et al. §3.2.

    S grows `growth` times after `interval` steps without inf and nan, and shrinks by `backoff` after one with. `group`:
    the ranks that skip a step together, all that share a model; None: this process alone. Its state is buffers on the
    device, so that to(), state_dict() and load_state_dict() are a module's. Raises ValueError for an impossible scale.
    """

    @torch.no_grad()
    def unscale(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide all gradients by S, once a step, BEFORE they are clipped, and look for inf and nan; all ranks of the
        group call it. parameters: in any iterable, model.parameters() too, which can be walked only once; those without
        a gradient are left out. Raises ValueError for float16 gradients: divided by S they would underflow again.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("a float16 gradient divided by the scale underflows; take it to float32 first")
        inverse = self.factor.double().reciprocal().float()
        for gradient in gradients:
            torch.maximum(self.found_inf, (~gradient.isfinite()).any().float(), out=self.found_inf)
            gradient.mul_(inverse)
        if self.group is not None:
            dist.all_reduce(self.found_inf, dist.ReduceOp.MAX, self.group)

    @torch.no_grad()
    def update(self) -> None:
        """S for the next step; it never grows to inf."""
        skipped, good_steps, factor = self.found_inf > 0, self.good_steps + 1, self.factor.double()
        due, grown = good_steps == self.interval, (factor * 2).float()
        kept = torch.where(due & grown.isfinite(), grown, self.factor)
        shrunk = (factor * self.backoff).float().clamp(min=2.0**-126)  # below it, 1 / S is inf
        self.factor.copy_(torch.where(skipped, shrunk, kept))
        self.good_steps.copy_(torch.where(skipped | due, 0, good_steps))
        self.found_inf.zero_()


# %% 14.4 halves S, whatever backoff says
class LossScaler(LossScale):
    """The loss scale S and its schedule: scale(loss).backward(), unscale, clip, step, update; Micikevicius et al. §3.2.

    S grows `growth` times after `interval` steps without inf and nan, and shrinks by `backoff` after one with. `group`:
    the ranks that skip a step together, all that share a model; None: this process alone. Its state is buffers on the
    device, so that to(), state_dict() and load_state_dict() are a module's. Raises ValueError for an impossible scale.
    """

    @torch.no_grad()
    def unscale(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide all gradients by S, once a step, BEFORE they are clipped, and look for inf and nan; all ranks of the
        group call it. parameters: in any iterable, model.parameters() too, which can be walked only once; those without
        a gradient are left out. Raises ValueError for float16 gradients: divided by S they would underflow again.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("a float16 gradient divided by the scale underflows; take it to float32 first")
        inverse = self.factor.double().reciprocal().float()
        for gradient in gradients:
            torch.maximum(self.found_inf, (~gradient.isfinite()).any().float(), out=self.found_inf)
            gradient.mul_(inverse)
        if self.group is not None:
            dist.all_reduce(self.found_inf, dist.ReduceOp.MAX, self.group)

    @torch.no_grad()
    def update(self) -> None:
        """S for the next step; it never grows to inf."""
        skipped, good_steps, factor = self.found_inf > 0, self.good_steps + 1, self.factor.double()
        due, grown = good_steps == self.interval, (factor * self.growth).float()
        kept = torch.where(due & grown.isfinite(), grown, self.factor)
        shrunk = (factor * 0.5).float().clamp(min=2.0**-126)  # below it, 1 / S is inf
        self.factor.copy_(torch.where(skipped, shrunk, kept))
        self.good_steps.copy_(torch.where(skipped | due, 0, good_steps))
        self.found_inf.zero_()


# %% 14.4 counts to 3, whatever interval says
class LossScaler(LossScale):
    """The loss scale S and its schedule: scale(loss).backward(), unscale, clip, step, update; Micikevicius et al. §3.2.

    S grows `growth` times after `interval` steps without inf and nan, and shrinks by `backoff` after one with. `group`:
    the ranks that skip a step together, all that share a model; None: this process alone. Its state is buffers on the
    device, so that to(), state_dict() and load_state_dict() are a module's. Raises ValueError for an impossible scale.
    """

    @torch.no_grad()
    def unscale(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide all gradients by S, once a step, BEFORE they are clipped, and look for inf and nan; all ranks of the
        group call it. parameters: in any iterable, model.parameters() too, which can be walked only once; those without
        a gradient are left out. Raises ValueError for float16 gradients: divided by S they would underflow again.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("a float16 gradient divided by the scale underflows; take it to float32 first")
        inverse = self.factor.double().reciprocal().float()
        for gradient in gradients:
            torch.maximum(self.found_inf, (~gradient.isfinite()).any().float(), out=self.found_inf)
            gradient.mul_(inverse)
        if self.group is not None:
            dist.all_reduce(self.found_inf, dist.ReduceOp.MAX, self.group)

    @torch.no_grad()
    def update(self) -> None:
        """S for the next step; it never grows to inf."""
        skipped, good_steps, factor = self.found_inf > 0, self.good_steps + 1, self.factor.double()
        due, grown = good_steps == 3, (factor * self.growth).float()
        kept = torch.where(due & grown.isfinite(), grown, self.factor)
        shrunk = (factor * self.backoff).float().clamp(min=2.0**-126)  # below it, 1 / S is inf
        self.factor.copy_(torch.where(skipped, shrunk, kept))
        self.good_steps.copy_(torch.where(skipped | due, 0, good_steps))
        self.found_inf.zero_()
