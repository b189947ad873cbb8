"""Guard bands, which show a kernel's reads and writes outside its tensors.

A Triton kernel works on blocks of a fixed size; where a row is shorter, a mask must switch off the lanes past its end.
Without the mask the numbers are usually right all the same: the stray stores fall into memory that is not read
here, and into another tensor in a long run. So `torch.testing.assert_close` is not enough. Two tests that are:

- `guarded(x)` is x in the middle of a larger buffer whose surroundings are NaN: a stray load poisons the result.
- `GuardBands()` gives every tensor that is allocated inside it the same surroundings, remembers their bits, and
  `check()` finds the stores that changed them. New memory is NaN too, so an element that is never written shows.

    |<-- 64 KiB of sentinel -->| tensor | sentinel in the gaps of a strided tensor | <-- 64 KiB of sentinel -->|

It also lists the PyTorch operations that computed something (a library call that poses as a kernel) and the largest
tensor that was made (logits that were never to exist). It watches below autograd (a `TorchDispatchMode`), so the
backward pass and the inside of custom operators are seen, on any device. What an overrun longer than a band hits is
unprotected, and may end the process: a crash is a finding as well.
"""

from dataclasses import dataclass

import torch
from torch._library.custom_ops import _maybe_get_opdef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from course_kit.checks.advice import CheckFailed

BAND_BYTES = 64 * 1024  # one row of 16k float32 numbers, the largest block a program of this course holds
SAME_SIZE_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element
UNWRITTEN = {"empty", "empty_permuted", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
FILLED = {"zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full"}
METADATA = {"is_same_size", "promote_types", "record_stream", "result_type", "set_"}


@dataclass(frozen=True)
class Band:
    """A tensor in the middle of a buffer; `bits` is the full buffer as integers, of which `sentinel` are outside."""

    tensor: torch.Tensor
    bits: torch.Tensor
    start: int  # the tensor's first element in the buffer
    end: int  # one after its last
    sentinel: int

    def overwritten(self) -> str:
        """Describe the writes around the tensor; "" if there are none."""
        outside = torch.ones_like(self.bits, dtype=torch.bool)
        outside.as_strided(self.tensor.size(), self.tensor.stride(), self.start).fill_(False)
        where = torch.nonzero((self.bits != self.sentinel) & outside).flatten().tolist()
        before = [position - self.start for position in where if position < self.start]
        between = [position - self.start for position in where if self.start <= position < self.end]
        after = [position - self.end for position in where if position >= self.end]
        outcome = []
        if before:
            outcome.append(f"{len(before)} elements before its start, the nearest at offset {before[-1]}")
        if between:
            outcome.append(f"{len(between)} elements in the gaps between its rows, the first at offset {between[0]}")
        if after:
            outcome.append(f"{len(after)} elements after its end, the first at offset +{after[0]} past the end")
        return " and ".join(outcome)


def band_round(x: torch.Tensor, number: int) -> Band:
    """Return a band for a tensor like x (shape, dtype, strides, device), filled with the sentinel.

    The sentinel's bits are a NaN in every floating type and -1 in every integer one (an index of -1 reads the band in
    front of the table, which is NaN). Buffers of different `number` have different NaNs, as far as the type has
    enough of them: a kernel that reads one band and stores it into another must not go unseen.
    """
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.size(), x.stride(), strict=True))
    band = BAND_BYTES // x.element_size()
    sentinel = -1 - number % 100 if x.dtype.is_floating_point and x.element_size() > 1 else -1
    integer = SAME_SIZE_INTEGER[x.element_size()]
    bits = torch.full((band + span + band,), sentinel, dtype=integer, device=x.device)
    tensor = torch.empty(0, dtype=x.dtype, device=x.device)
    tensor.set_(bits.untyped_storage(), band, x.size(), x.stride())  # unlike a view: nothing for autograd to follow
    return Band(tensor, bits, band, band + span, sentinel)


def can_be_banded(x: torch.Tensor) -> bool:
    return x.numel() > 0 and x.element_size() in SAME_SIZE_INTEGER and x.device.type != "meta"


def fill(band: Band, x: torch.Tensor) -> None:
    """Write the values of x into the middle. Of a dimension with stride 0 (expanded) one entry holds them all."""
    target, source = band.tensor, x.detach()
    for dim, stride in enumerate(x.stride()):
        if stride == 0:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)


def banded_copy(x: torch.Tensor, number: int) -> Band:
    """Return x in a buffer of its own. An active mode, such as `GuardBands`, does not see the copy."""
    with _disable_current_modes():
        band = band_round(x, number)
        fill(band, x)
        band.tensor.requires_grad_(x.requires_grad)
    return band


def guarded(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of x (values, shape, dtype, strides, requires_grad; a leaf) between NaN, or -1 for integers.

    A kernel that reads past the end gets NaN. An x with no elements is returned as it is.
    """
    if not can_be_banded(x):
        return x
    return banded_copy(x, number=0).tensor


class GuardBands(TorchDispatchMode):
    """`with GuardBands() as guards:` puts sentinel bands around everything allocated inside; then `guards.check()`.

    operations: the PyTorch operations inside, in order, as "aten.mm", without allocations, views and metadata; a custom
    operator is not in it, but what it calls is. largest_bytes: the largest tensor made inside, bands not counted, by
    an allocation or as the result of an operation.
    """

    def __init__(self):
        super().__init__()
        self.operations: list[str] = []
        self.largest_bytes = 0
        self.bands: dict[str, Band] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[-1]
        if _maybe_get_opdef(func) is not None:
            with self:
                return run_inside(func, args, kwargs)
        result = func(*args, **kwargs)
        if name in UNWRITTEN | FILLED:
            return self.allocated(result, name in FILLED)
        made = new_memory(result, args)
        is_view = not func._schema.is_mutable and tensors(result) and not made
        if not (is_view or name in METADATA or copies_onto_itself(name, args)):
            self.operations.append(f"{func.namespace}.{name}")
            self.largest_bytes = max([self.largest_bytes, *(x.nbytes for x in made)])
        return result

    def allocated(self, fresh: torch.Tensor, is_filled: bool) -> torch.Tensor:
        """Return the tensor to hand out in place of `fresh`: with bands around it, and NaN in it where it is not yet
        filled.
        """
        self.largest_bytes = max(self.largest_bytes, fresh.nbytes)
        if not can_be_banded(fresh):
            return fresh
        number = len(self.bands) + 1
        band = band_round(fresh, number)
        if is_filled:
            fill(band, fresh)
        self.bands[f"allocation {number}, {fresh.dtype} {list(fresh.shape)}"] = band
        return band.tensor

    def guarded(self, x: torch.Tensor) -> torch.Tensor:
        """Return a guarded copy that `check` examines too: for a kernel that writes into its input."""
        if not can_be_banded(x):
            return x
        band = banded_copy(x, number=0)
        self.bands[f"input {len(self.bands) + 1}, {x.dtype} {list(x.shape)}"] = band
        return band.tensor

    def check(self) -> None:
        """Raise CheckFailed for a write around a tensor: which tensor, which side, which offset."""
        for name, band in self.bands.items():
            with _disable_current_modes():
                outcome = band.overwritten()
            if outcome:
                raise CheckFailed(f"{name}: a kernel wrote {outcome}. Give its tl.store a mask")


def run_inside(func, args, kwargs):
    """Run a custom operator's Python code where an active mode sees it, and not the operator alone."""
    devices = [x.device.type for x in tensors((args, kwargs))]
    backend = getattr(torch._C.DispatchKey, (devices or ["cpu"])[0].upper())
    return func.redispatch(torch._C.DispatchKeySet(backend), *args, **kwargs)


def tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def new_memory(result, args) -> list[torch.Tensor]:
    """Return the tensors of `result` that are no view of an argument. (By schema, a `reshape` that copies is a view
    too.)
    """
    before = {x.untyped_storage().data_ptr() for x in tensors(args)}
    return [x for x in tensors(result) if x.untyped_storage().data_ptr() not in before]


def copies_onto_itself(name: str, args: tuple) -> bool:
    """Return whether a copy is Triton's interpreter returning a tensor that it never moved."""
    return name == "copy_" and args[0].data_ptr() == args[1].data_ptr()
