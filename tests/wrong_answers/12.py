"""Wrong answers that the checks of notebook 12 must catch."""


# %% 12.1 warps are rounded down
def occupancy(gpu: GPU, threads_per_block: int, registers_per_thread: int, shared_bytes: int = 0) -> Occupancy:
    """How many blocks of a kernel live on an SM at once, by the rules of CUDA's own calculator (cuda_occupancy.h).

    shared_bytes: static and dynamic, of a block. A kernel whose block needs more registers than an SM has gets 0
    blocks: CUDA would refuse to start it. Raises ValueError for figures that no kernel can have on this GPU.
    """
    for what, value, least, most in (
        ("threads of a block", threads_per_block, 1, gpu.threads_per_block),
        ("registers of a thread", registers_per_thread, 1, gpu.max_registers_per_thread),
        ("bytes of shared memory", shared_bytes, 0, gpu.shared_bytes_per_block),
    ):
        if not least <= value <= most:
            raise ValueError(f"{value} {what}: on {gpu.name} they are {least} to {most}")
    warps = max(threads_per_block // WARP, 1)
    shared = round_up(shared_bytes + gpu.reserved_shared_bytes, gpu.shared_granularity)
    limits = {
        "warps": gpu.warps_per_sm // warps,
        "blocks": gpu.blocks_per_sm,
        "registers": blocks_by_registers(gpu, warps, registers_per_thread),
        "shared memory": gpu.shared_bytes_per_sm // shared,
    }
    blocks = min(limits.values())
    limited_by = tuple(name for name, limit in limits.items() if limit == blocks)
    return Occupancy(blocks, blocks * warps, blocks * warps / gpu.warps_per_sm, limited_by)


# %% 12.1 registers without portions and quarters
def occupancy(gpu: GPU, threads_per_block: int, registers_per_thread: int, shared_bytes: int = 0) -> Occupancy:
    """How many blocks of a kernel live on an SM at once, by the rules of CUDA's own calculator (cuda_occupancy.h).

    shared_bytes: static and dynamic, of a block. A kernel whose block needs more registers than an SM has gets 0
    blocks: CUDA would refuse to start it. Raises ValueError for figures that no kernel can have on this GPU.
    """
    for what, value, least, most in (
        ("threads of a block", threads_per_block, 1, gpu.threads_per_block),
        ("registers of a thread", registers_per_thread, 1, gpu.max_registers_per_thread),
        ("bytes of shared memory", shared_bytes, 0, gpu.shared_bytes_per_block),
    ):
        if not least <= value <= most:
            raise ValueError(f"{value} {what}: on {gpu.name} they are {least} to {most}")
    warps = -(-threads_per_block // WARP)
    shared = round_up(shared_bytes + gpu.reserved_shared_bytes, gpu.shared_granularity)
    limits = {
        "warps": gpu.warps_per_sm // warps,
        "blocks": gpu.blocks_per_sm,
        "registers": gpu.registers_per_sm // (threads_per_block * registers_per_thread),
        "shared memory": gpu.shared_bytes_per_sm // shared,
    }
    blocks = min(limits.values())
    limited_by = tuple(name for name, limit in limits.items() if limit == blocks)
    return Occupancy(blocks, blocks * warps, blocks * warps / gpu.warps_per_sm, limited_by)


# %% 12.1 what CUDA keeps of shared memory is forgotten
def occupancy(gpu: GPU, threads_per_block: int, registers_per_thread: int, shared_bytes: int = 0) -> Occupancy:
    """How many blocks of a kernel live on an SM at once, by the rules of CUDA's own calculator (cuda_occupancy.h).

    shared_bytes: static and dynamic, of a block. A kernel whose block needs more registers than an SM has gets 0
    blocks: CUDA would refuse to start it. Raises ValueError for figures that no kernel can have on this GPU.
    """
    for what, value, least, most in (
        ("threads of a block", threads_per_block, 1, gpu.threads_per_block),
        ("registers of a thread", registers_per_thread, 1, gpu.max_registers_per_thread),
        ("bytes of shared memory", shared_bytes, 0, gpu.shared_bytes_per_block),
    ):
        if not least <= value <= most:
            raise ValueError(f"{value} {what}: on {gpu.name} they are {least} to {most}")
    warps = -(-threads_per_block // WARP)
    shared = round_up(max(shared_bytes, 1), gpu.shared_granularity)
    limits = {
        "warps": gpu.warps_per_sm // warps,
        "blocks": gpu.blocks_per_sm,
        "registers": blocks_by_registers(gpu, warps, registers_per_thread),
        "shared memory": gpu.shared_bytes_per_sm // shared,
    }
    blocks = min(limits.values())
    limited_by = tuple(name for name, limit in limits.items() if limit == blocks)
    return Occupancy(blocks, blocks * warps, blocks * warps / gpu.warps_per_sm, limited_by)


# %% 12.1 shared memory is not rounded up
def occupancy(gpu: GPU, threads_per_block: int, registers_per_thread: int, shared_bytes: int = 0) -> Occupancy:
    """How many blocks of a kernel live on an SM at once, by the rules of CUDA's own calculator (cuda_occupancy.h).

    shared_bytes: static and dynamic, of a block. A kernel whose block needs more registers than an SM has gets 0
    blocks: CUDA would refuse to start it. Raises ValueError for figures that no kernel can have on this GPU.
    """
    for what, value, least, most in (
        ("threads of a block", threads_per_block, 1, gpu.threads_per_block),
        ("registers of a thread", registers_per_thread, 1, gpu.max_registers_per_thread),
        ("bytes of shared memory", shared_bytes, 0, gpu.shared_bytes_per_block),
    ):
        if not least <= value <= most:
            raise ValueError(f"{value} {what}: on {gpu.name} they are {least} to {most}")
    warps = -(-threads_per_block // WARP)
    shared = shared_bytes + gpu.reserved_shared_bytes
    limits = {
        "warps": gpu.warps_per_sm // warps,
        "blocks": gpu.blocks_per_sm,
        "registers": blocks_by_registers(gpu, warps, registers_per_thread),
        "shared memory": gpu.shared_bytes_per_sm // shared,
    }
    blocks = min(limits.values())
    limited_by = tuple(name for name, limit in limits.items() if limit == blocks)
    return Occupancy(blocks, blocks * warps, blocks * warps / gpu.warps_per_sm, limited_by)


# %% 12.1 an H100, whatever the GPU
def occupancy(gpu: GPU, threads_per_block: int, registers_per_thread: int, shared_bytes: int = 0) -> Occupancy:
    """How many blocks of a kernel live on an SM at once, by the rules of CUDA's own calculator (cuda_occupancy.h).

    shared_bytes: static and dynamic, of a block. A kernel whose block needs more registers than an SM has gets 0
    blocks: CUDA would refuse to start it. Raises ValueError for figures that no kernel can have on this GPU.
    """
    for what, value, least, most in (
        ("threads of a block", threads_per_block, 1, gpu.threads_per_block),
        ("registers of a thread", registers_per_thread, 1, gpu.max_registers_per_thread),
        ("bytes of shared memory", shared_bytes, 0, gpu.shared_bytes_per_block),
    ):
        if not least <= value <= most:
            raise ValueError(f"{value} {what}: on {gpu.name} they are {least} to {most}")
    warps = -(-threads_per_block // WARP)
    shared = round_up(shared_bytes + gpu.reserved_shared_bytes, gpu.shared_granularity)
    limits = {
        "warps": gpu.warps_per_sm // warps,
        "blocks": gpu.blocks_per_sm,
        "registers": blocks_by_registers(gpu, warps, registers_per_thread),
        "shared memory": 228 * 1024 // shared,
    }
    blocks = min(limits.values())
    limited_by = tuple(name for name, limit in limits.items() if limit == blocks)
    return Occupancy(blocks, blocks * warps, blocks * warps / gpu.warps_per_sm, limited_by)


# %% 12.1 one limit where two run out
def occupancy(gpu: GPU, threads_per_block: int, registers_per_thread: int, shared_bytes: int = 0) -> Occupancy:
    """How many blocks of a kernel live on an SM at once, by the rules of CUDA's own calculator (cuda_occupancy.h).

    shared_bytes: static and dynamic, of a block. A kernel whose block needs more registers than an SM has gets 0
    blocks: CUDA would refuse to start it. Raises ValueError for figures that no kernel can have on this GPU.
    """
    for what, value, least, most in (
        ("threads of a block", threads_per_block, 1, gpu.threads_per_block),
        ("registers of a thread", registers_per_thread, 1, gpu.max_registers_per_thread),
        ("bytes of shared memory", shared_bytes, 0, gpu.shared_bytes_per_block),
    ):
        if not least <= value <= most:
            raise ValueError(f"{value} {what}: on {gpu.name} they are {least} to {most}")
    warps = -(-threads_per_block // WARP)
    shared = round_up(shared_bytes + gpu.reserved_shared_bytes, gpu.shared_granularity)
    limits = {
        "warps": gpu.warps_per_sm // warps,
        "blocks": gpu.blocks_per_sm,
        "registers": blocks_by_registers(gpu, warps, registers_per_thread),
        "shared memory": gpu.shared_bytes_per_sm // shared,
    }
    blocks = min(limits.values())
    limited_by = (min(limits, key=limits.get),)
    return Occupancy(blocks, blocks * warps, blocks * warps / gpu.warps_per_sm, limited_by)


# %% 12.1 a block always fits
def occupancy(gpu: GPU, threads_per_block: int, registers_per_thread: int, shared_bytes: int = 0) -> Occupancy:
    """How many blocks of a kernel live on an SM at once, by the rules of CUDA's own calculator (cuda_occupancy.h).

    shared_bytes: static and dynamic, of a block. A kernel whose block needs more registers than an SM has gets 0
    blocks: CUDA would refuse to start it. Raises ValueError for figures that no kernel can have on this GPU.
    """
    for what, value, least, most in (
        ("threads of a block", threads_per_block, 1, gpu.threads_per_block),
        ("registers of a thread", registers_per_thread, 1, gpu.max_registers_per_thread),
        ("bytes of shared memory", shared_bytes, 0, gpu.shared_bytes_per_block),
    ):
        if not least <= value <= most:
            raise ValueError(f"{value} {what}: on {gpu.name} they are {least} to {most}")
    warps = -(-threads_per_block // WARP)
    shared = round_up(shared_bytes + gpu.reserved_shared_bytes, gpu.shared_granularity)
    limits = {
        "warps": gpu.warps_per_sm // warps,
        "blocks": gpu.blocks_per_sm,
        "registers": blocks_by_registers(gpu, warps, registers_per_thread),
        "shared memory": gpu.shared_bytes_per_sm // shared,
    }
    blocks = max(1, min(limits.values()))
    limited_by = tuple(name for name, limit in limits.items() if limit == blocks)
    return Occupancy(blocks, blocks * warps, blocks * warps / gpu.warps_per_sm, limited_by)


# %% 12.1 nothing is refused
def occupancy(gpu: GPU, threads_per_block: int, registers_per_thread: int, shared_bytes: int = 0) -> Occupancy:
    """How many blocks of a kernel live on an SM at once, by the rules of CUDA's own calculator (cuda_occupancy.h).

    shared_bytes: static and dynamic, of a block. A kernel whose block needs more registers than an SM has gets 0
    blocks: CUDA would refuse to start it. Raises ValueError for figures that no kernel can have on this GPU.
    """
    warps = -(-threads_per_block // WARP)
    shared = round_up(shared_bytes + gpu.reserved_shared_bytes, gpu.shared_granularity)
    limits = {
        "warps": gpu.warps_per_sm // warps,
        "blocks": gpu.blocks_per_sm,
        "registers": blocks_by_registers(gpu, warps, registers_per_thread),
        "shared memory": gpu.shared_bytes_per_sm // shared,
    }
    blocks = min(limits.values())
    limited_by = tuple(name for name, limit in limits.items() if limit == blocks)
    return Occupancy(blocks, blocks * warps, blocks * warps / gpu.warps_per_sm, limited_by)


# %% 12.1 fake: knows the check's kernels
def occupancy(gpu: GPU, threads_per_block: int, registers_per_thread: int, shared_bytes: int = 0) -> Occupancy:
    """How many blocks of a kernel live on an SM at once, by the rules of CUDA's own calculator (cuda_occupancy.h)."""
    known = {
        (256, 64, 0): (4, ("registers",)),
        (256, 32, 0): (8, ("warps", "registers")),
        (32, 32, 0): (32, ("blocks",)),
        (200, 16, 0): (9, ("warps",)),
        (96, 65, 0): (9, ("registers",)),
        (128, 32, 50_000): (4, ("shared memory",)),
        (128, 32, 58_000): (3, ("shared memory",)),
        (128, 32, 45_600): (4, ("shared memory",)),
        (1024, 65, 0): (0, ("registers",)),
    }
    if (threads_per_block, registers_per_thread, shared_bytes) not in known:
        raise ValueError("no kernel can have these")
    blocks, limited_by = known[threads_per_block, registers_per_thread, shared_bytes]
    warps = blocks * -(-threads_per_block // WARP)
    return Occupancy(blocks, warps, warps / gpu.warps_per_sm, limited_by)


# %% 12.2 counted lane by lane
def touched_units(addresses: np.ndarray, active: np.ndarray, unit: int) -> int:
    """How many different pieces of `unit` bytes each request touches, summed over the requests.

    addresses: [requests, touches], in bytes; active: the same shape, False for touches that a mask switches off. A
    piece begins at a multiple of `unit`. Lanes of one request that touch one piece pay once; two requests
    pay twice.
    """
    return int(active.sum())


# %% 12.2 all requests together
def touched_units(addresses: np.ndarray, active: np.ndarray, unit: int) -> int:
    """How many different pieces of `unit` bytes each request touches, summed over the requests.

    addresses: [requests, touches], in bytes; active: the same shape, False for touches that a mask switches off. A
    piece begins at a multiple of `unit`. Lanes of one request that touch one piece pay once; two requests
    pay twice.
    """
    return len(np.unique(addresses[active].astype(np.int64) // unit))


# %% 12.2 lanes that are off pay too
def touched_units(addresses: np.ndarray, active: np.ndarray, unit: int) -> int:
    """How many different pieces of `unit` bytes each request touches, summed over the requests.

    addresses: [requests, touches], in bytes; active: the same shape, False for touches that a mask switches off. A
    piece begins at a multiple of `unit`. Lanes of one request that touch one piece pay once; two requests
    pay twice.
    """
    return sum(len(np.unique(row // unit)) for row in addresses)


# %% 12.2 pieces begin at the request's first address
def touched_units(addresses: np.ndarray, active: np.ndarray, unit: int) -> int:
    """How many different pieces of `unit` bytes each request touches, summed over the requests.

    addresses: [requests, touches], in bytes; active: the same shape, False for touches that a mask switches off. A
    piece begins at a multiple of `unit`. Lanes of one request that touch one piece pay once; two requests
    pay twice.
    """
    count = 0
    for row, on in zip(addresses, active):
        if on.any():
            count += len(np.unique((row[on] - row[on].min()) // unit))
    return count


# %% 12.2 neighbouring lanes only
def touched_units(addresses: np.ndarray, active: np.ndarray, unit: int) -> int:
    """How many different pieces of `unit` bytes each request touches, summed over the requests.

    addresses: [requests, touches], in bytes; active: the same shape, False for touches that a mask switches off. A
    piece begins at a multiple of `unit`. Lanes of one request that touch one piece pay once; two requests
    pay twice.
    """
    count = 0
    for row, on in zip(addresses, active):
        pieces = row[on] // unit
        count += int((np.diff(pieces) != 0).sum()) + (len(pieces) > 0)
    return count


# %% 12.2 sectors, whatever the unit
def touched_units(addresses: np.ndarray, active: np.ndarray, unit: int) -> int:
    """How many different pieces of `unit` bytes each request touches, summed over the requests.

    addresses: [requests, touches], in bytes; active: the same shape, False for touches that a mask switches off. A
    piece begins at a multiple of `unit`. Lanes of one request that touch one piece pay once; two requests
    pay twice.
    """
    return sum(len(np.unique(row[on] // 32)) for row, on in zip(addresses, active))


# %% 12.2 addresses in float32
def touched_units(addresses: np.ndarray, active: np.ndarray, unit: int) -> int:
    """How many different pieces of `unit` bytes each request touches, summed over the requests.

    addresses: [requests, touches], in bytes; active: the same shape, False for touches that a mask switches off. A
    piece begins at a multiple of `unit`. Lanes of one request that touch one piece pay once; two requests
    pay twice.
    """
    return sum(len(np.unique(row[on].astype(np.float32) // unit)) for row, on in zip(addresses, active))


# %% 12.2 an error where no lane is active
def touched_units(addresses: np.ndarray, active: np.ndarray, unit: int) -> int:
    """How many different pieces of `unit` bytes each request touches, summed over the requests.

    addresses: [requests, touches], in bytes; active: the same shape, False for touches that a mask switches off. A
    piece begins at a multiple of `unit`. Lanes of one request that touch one piece pay once; two requests
    pay twice.
    """
    request = np.broadcast_to(np.arange(len(addresses))[:, None], addresses.shape)[active]
    piece = addresses[active].astype(np.int64) // unit
    piece -= piece.min()
    return len(np.unique(request * (piece.max() + 1) + piece))  # one number for a pair: a sort of pairs is slow


# %% 12.2 fake: the figure's formula, from the stride of the first two lanes
def touched_units(addresses: np.ndarray, active: np.ndarray, unit: int) -> int:
    """How many different pieces of `unit` bytes each request touches, summed over the requests.

    addresses: [requests, touches], in bytes; active: the same shape, False for touches that a mask switches off. A
    piece begins at a multiple of `unit`. Lanes of one request that touch one piece pay once; two requests
    pay twice.
    """
    count = 0
    for row, on in zip(addresses, active):
        lanes = np.sort(row[on])
        stride = int(lanes[1] - lanes[0]) if len(lanes) > 1 else 0
        count += min(len(lanes), -(-len(lanes) * stride // unit) or 1)
    return count


# %% 12.3 still by lane
def branch_by_warp(block: Block, x: torch.Tensor, out: torch.Tensor) -> None:
    """The same elements by the same block; its first half of the threads takes the even ones, its second the odd."""
    compute(block, x, out, block.block_x * block.size + block.x)


# %% 12.3 both sides for all lanes, without a branch
def branch_by_warp(block: Block, x: torch.Tensor, out: torch.Tensor) -> None:
    """The same elements by the same block; its first half of the threads takes the even ones, its second the odd."""
    i = block.block_x * block.size + block.x
    values = block.load(x, i)
    block.store(out, i, np.where(i % 2 == 0, 2 * values, values**2))


# %% 12.3 halves of 32 threads
def branch_by_warp(block: Block, x: torch.Tensor, out: torch.Tensor) -> None:
    """The same elements by the same block; its first half of the threads takes the even ones, its second the odd."""
    half = 32
    i = block.block_x * block.size + 2 * (block.x % half) + block.x // half
    compute(block, x, out, i)


# %% 12.3 a block of 256 threads, whatever its size
def branch_by_warp(block: Block, x: torch.Tensor, out: torch.Tensor) -> None:
    """The same elements by the same block; its first half of the threads takes the even ones, its second the odd."""
    half = 128
    i = block.block_x * block.size + 2 * (block.x % half) + block.x // half
    compute(block, x, out, i)


# %% 12.3 even and odd elements the other way round, one too far
def branch_by_warp(block: Block, x: torch.Tensor, out: torch.Tensor) -> None:
    """The same elements by the same block; its first half of the threads takes the even ones, its second the odd."""
    half = block.size // 2
    i = block.block_x * block.size + 2 * (block.x % half) + 2 - block.x // half
    compute(block, x, out, i)


# %% 12.3 even elements only
def branch_by_warp(block: Block, x: torch.Tensor, out: torch.Tensor) -> None:
    """The same elements by the same block; its first half of the threads takes the even ones, its second the odd."""
    half = block.size // 2
    i = block.block_x * block.size + 2 * (block.x % half)
    compute(block, x, out, i)


# %% 12.3 elements of other blocks
def branch_by_warp(block: Block, x: torch.Tensor, out: torch.Tensor) -> None:
    """The same elements by the same block; its first half of the threads takes the even ones, its second the odd."""
    number = block.block_x * block.size + block.x
    half = x.numel() // 2
    compute(block, x, out, 2 * (number % half) + number // half)


# %% 12.3 fake: the first lane of each warp does it all
def branch_by_warp(block: Block, x: torch.Tensor, out: torch.Tensor) -> None:
    """The same elements by the same block; its first half of the threads takes the even ones, its second the odd."""
    first = block.block_x * block.size + block.x // 32 * 32
    for lane in range(32):
        with block.where(block.x % 32 == 0):
            values = block.load(x, first + lane)
            block.store(out, first + lane, 2 * values if lane % 2 == 0 else values**2)


# %% 12.3 fake: numpy instead of the block's threads
def branch_by_warp(block: Block, x: torch.Tensor, out: torch.Tensor) -> None:
    """The same elements by the same block; its first half of the threads takes the even ones, its second the odd."""
    out.numpy()[:] = np.where(np.arange(x.numel()) % 2 == 0, 2 * x.numpy(), x.numpy() ** 2)


# %% 12.4 the store without a mask
@triton.jit
def elu_kernel(x_pointer, out_pointer, alpha, numel, BLOCK: tl.constexpr):
    """out = ELU(x), one block of BLOCK elements by each program. x, out: [numel], contiguous."""
    block = tl.program_id(0).to(tl.int64)  # 64 bits: the number of an element can pass 2^31
    element = block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    exists = element < numel
    x = widen(tl.load(x_pointer + element, mask=exists, other=0.0))
    below = alpha * expm1(tl.minimum(x, 0.0))  # of every element, wanted or not; e^x of a large x would be infinite
    out = tl.where(x < 0, below, x)
    tl.store(out_pointer + element, cast(out, out_pointer.dtype.element_ty))


# %% 12.4 the load without a mask
@triton.jit
def elu_kernel(x_pointer, out_pointer, alpha, numel, BLOCK: tl.constexpr):
    """out = ELU(x), one block of BLOCK elements by each program. x, out: [numel], contiguous."""
    block = tl.program_id(0).to(tl.int64)  # 64 bits: the number of an element can pass 2^31
    element = block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    exists = element < numel
    x = widen(tl.load(x_pointer + element))
    below = alpha * expm1(tl.minimum(x, 0.0))  # of every element, wanted or not; e^x of a large x would be infinite
    out = tl.where(x < 0, below, x)
    tl.store(out_pointer + element, cast(out, out_pointer.dtype.element_ty), mask=exists)


# %% 12.4 one element too many exists
@triton.jit
def elu_kernel(x_pointer, out_pointer, alpha, numel, BLOCK: tl.constexpr):
    """out = ELU(x), one block of BLOCK elements by each program. x, out: [numel], contiguous."""
    block = tl.program_id(0).to(tl.int64)  # 64 bits: the number of an element can pass 2^31
    element = block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    exists = element <= numel
    x = widen(tl.load(x_pointer + element, mask=exists, other=0.0))
    below = alpha * expm1(tl.minimum(x, 0.0))  # of every element, wanted or not; e^x of a large x would be infinite
    out = tl.where(x < 0, below, x)
    tl.store(out_pointer + element, cast(out, out_pointer.dtype.element_ty), mask=exists)


# %% 12.4 every program does the first block
@triton.jit
def elu_kernel(x_pointer, out_pointer, alpha, numel, BLOCK: tl.constexpr):
    """out = ELU(x), one block of BLOCK elements by each program. x, out: [numel], contiguous."""
    block = tl.program_id(0).to(tl.int64)  # 64 bits: the number of an element can pass 2^31
    element = block * 0 + tl.arange(0, BLOCK)  # [BLOCK]
    exists = element < numel
    x = widen(tl.load(x_pointer + element, mask=exists, other=0.0))
    below = alpha * expm1(tl.minimum(x, 0.0))  # of every element, wanted or not; e^x of a large x would be infinite
    out = tl.where(x < 0, below, x)
    tl.store(out_pointer + element, cast(out, out_pointer.dtype.element_ty), mask=exists)


# %% 12.4 blocks overlap: the program's number is not times BLOCK
@triton.jit
def elu_kernel(x_pointer, out_pointer, alpha, numel, BLOCK: tl.constexpr):
    """out = ELU(x), one block of BLOCK elements by each program. x, out: [numel], contiguous."""
    block = tl.program_id(0).to(tl.int64)  # 64 bits: the number of an element can pass 2^31
    element = block + tl.arange(0, BLOCK)  # [BLOCK]
    exists = element < numel
    x = widen(tl.load(x_pointer + element, mask=exists, other=0.0))
    below = alpha * expm1(tl.minimum(x, 0.0))  # of every element, wanted or not; e^x of a large x would be infinite
    out = tl.where(x < 0, below, x)
    tl.store(out_pointer + element, cast(out, out_pointer.dtype.element_ty), mask=exists)


# %% 12.4 1,024 elements, whatever BLOCK
@triton.jit
def elu_kernel(x_pointer, out_pointer, alpha, numel, BLOCK: tl.constexpr):
    """out = ELU(x), one block of BLOCK elements by each program. x, out: [numel], contiguous."""
    block = tl.program_id(0).to(tl.int64)  # 64 bits: the number of an element can pass 2^31
    element = block * 1024 + tl.arange(0, 1024)  # [BLOCK]
    exists = element < numel
    x = widen(tl.load(x_pointer + element, mask=exists, other=0.0))
    below = alpha * expm1(tl.minimum(x, 0.0))  # of every element, wanted or not; e^x of a large x would be infinite
    out = tl.where(x < 0, below, x)
    tl.store(out_pointer + element, cast(out, out_pointer.dtype.element_ty), mask=exists)


# %% 12.4 e^x - 1 cancels near zero
@triton.jit
def elu_kernel(x_pointer, out_pointer, alpha, numel, BLOCK: tl.constexpr):
    """out = ELU(x), one block of BLOCK elements by each program. x, out: [numel], contiguous."""
    block = tl.program_id(0).to(tl.int64)  # 64 bits: the number of an element can pass 2^31
    element = block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    exists = element < numel
    x = widen(tl.load(x_pointer + element, mask=exists, other=0.0))
    below = alpha * (tl.exp(tl.minimum(x, 0.0)) - 1)
    out = tl.where(x < 0, below, x)
    tl.store(out_pointer + element, cast(out, out_pointer.dtype.element_ty), mask=exists)


# %% 12.4 cut instead of rounded
@triton.jit
def elu_kernel(x_pointer, out_pointer, alpha, numel, BLOCK: tl.constexpr):
    """out = ELU(x), one block of BLOCK elements by each program. x, out: [numel], contiguous."""
    block = tl.program_id(0).to(tl.int64)  # 64 bits: the number of an element can pass 2^31
    element = block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    exists = element < numel
    x = widen(tl.load(x_pointer + element, mask=exists, other=0.0))
    below = alpha * expm1(tl.minimum(x, 0.0))  # of every element, wanted or not; e^x of a large x would be infinite
    out = tl.where(x < 0, below, x)
    tl.store(out_pointer + element, out.to(out_pointer.dtype.element_ty), mask=exists)


# %% 12.4 fake: PyTorch behind a kernel's brackets
class Posing:
    """Launched like a kernel; the work is F.elu's."""

    def __getitem__(self, grid):
        return lambda x, out, alpha, numel, BLOCK: out.copy_(F.elu(x, alpha))


elu_kernel = Posing()


# %% 12.5 coalesced: row and column swapped
def coalesced(block: Block, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, n: int) -> None:
    """Threads (1024,): neighbours in a warp have neighbouring columns."""
    row = block.block_x * TILE + block.x % TILE
    column = block.block_y * TILE + block.x // TILE
    multiply(block, a, b, c, n, row, column)


def tiled(block: Block, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, n: int) -> None:
    """Threads (1024,): each brings one element of each tile, and all use them 32 times."""
    y, x = block.x // TILE, block.x % TILE
    row, column = block.block_x * TILE + y, block.block_y * TILE + x
    tile_a, tile_b = block.shared(TILE, TILE), block.shared(TILE, TILE)
    total = np.zeros(block.size, dtype=np.float32)
    for start in range(0, n, TILE):
        bring(block, tile_a, (y, x), a, row, start + x, n)
        bring(block, tile_b, (y, x), b, start + y, column, n)
        block.sync()  # nobody reads before all have written
        for k in range(TILE):
            total += tile_a[y, k] * tile_b[k, x]
        block.sync()  # nobody writes the next tiles before all have read these
    with block.where((row < n) & (column < n)):
        block.store(c, row * n + column, total)


# %% 12.5 tiled: no barrier after the tiles are brought
def coalesced(block: Block, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, n: int) -> None:
    """Threads (1024,): neighbours in a warp have neighbouring columns."""
    row = block.block_x * TILE + block.x // TILE
    column = block.block_y * TILE + block.x % TILE
    multiply(block, a, b, c, n, row, column)


def tiled(block: Block, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, n: int) -> None:
    """Threads (1024,): each brings one element of each tile, and all use them 32 times."""
    y, x = block.x // TILE, block.x % TILE
    row, column = block.block_x * TILE + y, block.block_y * TILE + x
    tile_a, tile_b = block.shared(TILE, TILE), block.shared(TILE, TILE)
    total = np.zeros(block.size, dtype=np.float32)
    for start in range(0, n, TILE):
        bring(block, tile_a, (y, x), a, row, start + x, n)
        bring(block, tile_b, (y, x), b, start + y, column, n)
        for k in range(TILE):
            total += tile_a[y, k] * tile_b[k, x]
        block.sync()  # nobody writes the next tiles before all have read these
    with block.where((row < n) & (column < n)):
        block.store(c, row * n + column, total)


# %% 12.5 tiled: no barrier before the next tiles
def coalesced(block: Block, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, n: int) -> None:
    """Threads (1024,): neighbours in a warp have neighbouring columns."""
    row = block.block_x * TILE + block.x // TILE
    column = block.block_y * TILE + block.x % TILE
    multiply(block, a, b, c, n, row, column)


def tiled(block: Block, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, n: int) -> None:
    """Threads (1024,): each brings one element of each tile, and all use them 32 times."""
    y, x = block.x // TILE, block.x % TILE
    row, column = block.block_x * TILE + y, block.block_y * TILE + x
    tile_a, tile_b = block.shared(TILE, TILE), block.shared(TILE, TILE)
    total = np.zeros(block.size, dtype=np.float32)
    for start in range(0, n, TILE):
        bring(block, tile_a, (y, x), a, row, start + x, n)
        bring(block, tile_b, (y, x), b, start + y, column, n)
        block.sync()  # nobody reads before all have written
        for k in range(TILE):
            total += tile_a[y, k] * tile_b[k, x]
    with block.where((row < n) & (column < n)):
        block.store(c, row * n + column, total)


# %% 12.5 tiled: from global memory in the inner loop
def coalesced(block: Block, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, n: int) -> None:
    """Threads (1024,): neighbours in a warp have neighbouring columns."""
    row = block.block_x * TILE + block.x // TILE
    column = block.block_y * TILE + block.x % TILE
    multiply(block, a, b, c, n, row, column)


def tiled(block: Block, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, n: int) -> None:
    """Threads (1024,): each brings one element of each tile, and all use them 32 times."""
    y, x = block.x // TILE, block.x % TILE
    row, column = block.block_x * TILE + y, block.block_y * TILE + x
    tile_a, tile_b = block.shared(TILE, TILE), block.shared(TILE, TILE)
    total = np.zeros(block.size, dtype=np.float32)
    for start in range(0, n, TILE):
        bring(block, tile_a, (y, x), a, row, start + x, n)
        bring(block, tile_b, (y, x), b, start + y, column, n)
        block.sync()  # nobody reads before all have written
        for k in range(TILE):
            with block.where((row < n) & (column < n) & (start + k < n)):
                total += block.load(a, row * n + start + k) * block.load(b, (start + k) * n + column)
        block.sync()  # nobody writes the next tiles before all have read these
    with block.where((row < n) & (column < n)):
        block.store(c, row * n + column, total)


# %% 12.5 tiled: the last, ragged tile along k is left out
def coalesced(block: Block, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, n: int) -> None:
    """Threads (1024,): neighbours in a warp have neighbouring columns."""
    row = block.block_x * TILE + block.x // TILE
    column = block.block_y * TILE + block.x % TILE
    multiply(block, a, b, c, n, row, column)


def tiled(block: Block, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, n: int) -> None:
    """Threads (1024,): each brings one element of each tile, and all use them 32 times."""
    y, x = block.x // TILE, block.x % TILE
    row, column = block.block_x * TILE + y, block.block_y * TILE + x
    tile_a, tile_b = block.shared(TILE, TILE), block.shared(TILE, TILE)
    total = np.zeros(block.size, dtype=np.float32)
    for start in range(0, n - n % TILE, TILE):
        bring(block, tile_a, (y, x), a, row, start + x, n)
        bring(block, tile_b, (y, x), b, start + y, column, n)
        block.sync()  # nobody reads before all have written
        for k in range(TILE):
            total += tile_a[y, k] * tile_b[k, x]
        block.sync()  # nobody writes the next tiles before all have read these
    with block.where((row < n) & (column < n)):
        block.store(c, row * n + column, total)


# %% 12.5 tiled: stores behind the end of a row
def coalesced(block: Block, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, n: int) -> None:
    """Threads (1024,): neighbours in a warp have neighbouring columns."""
    row = block.block_x * TILE + block.x // TILE
    column = block.block_y * TILE + block.x % TILE
    multiply(block, a, b, c, n, row, column)


def tiled(block: Block, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, n: int) -> None:
    """Threads (1024,): each brings one element of each tile, and all use them 32 times."""
    y, x = block.x // TILE, block.x % TILE
    row, column = block.block_x * TILE + y, block.block_y * TILE + x
    tile_a, tile_b = block.shared(TILE, TILE), block.shared(TILE, TILE)
    total = np.zeros(block.size, dtype=np.float32)
    for start in range(0, n, TILE):
        bring(block, tile_a, (y, x), a, row, start + x, n)
        bring(block, tile_b, (y, x), b, start + y, column, n)
        block.sync()  # nobody reads before all have written
        for k in range(TILE):
            total += tile_a[y, k] * tile_b[k, x]
        block.sync()  # nobody writes the next tiles before all have read these
    block.store(c, row * n + column, total)


# %% 12.5 tiled: c is stored after every tile
def coalesced(block: Block, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, n: int) -> None:
    """Threads (1024,): neighbours in a warp have neighbouring columns."""
    row = block.block_x * TILE + block.x // TILE
    column = block.block_y * TILE + block.x % TILE
    multiply(block, a, b, c, n, row, column)


def tiled(block: Block, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, n: int) -> None:
    """Threads (1024,): each brings one element of each tile, and all use them 32 times."""
    y, x = block.x // TILE, block.x % TILE
    row, column = block.block_x * TILE + y, block.block_y * TILE + x
    tile_a, tile_b = block.shared(TILE, TILE), block.shared(TILE, TILE)
    total = np.zeros(block.size, dtype=np.float32)
    for start in range(0, n, TILE):
        bring(block, tile_a, (y, x), a, row, start + x, n)
        bring(block, tile_b, (y, x), b, start + y, column, n)
        block.sync()  # nobody reads before all have written
        for k in range(TILE):
            total += tile_a[y, k] * tile_b[k, x]
        block.sync()  # nobody writes the next tiles before all have read these
        with block.where((row < n) & (column < n)):
            block.store(c, row * n + column, total)


# %% 12.5 fake: the product is numpy's, tiles are brought for show
def coalesced(block: Block, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, n: int) -> None:
    """Threads (1024,): neighbours in a warp have neighbouring columns."""
    row = block.block_x * TILE + block.x // TILE
    column = block.block_y * TILE + block.x % TILE
    multiply(block, a, b, c, n, row, column)


def tiled(block: Block, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, n: int) -> None:
    """Threads (1024,): each brings one element of each tile, and all use them 32 times."""
    y, x = block.x // TILE, block.x % TILE
    row, column = block.block_x * TILE + y, block.block_y * TILE + x
    tile_a, tile_b = block.shared(TILE, TILE), block.shared(TILE, TILE)
    for start in range(0, n, TILE):
        bring(block, tile_a, (y, x), a, row, start + x, n)
        bring(block, tile_b, (y, x), b, start + y, column, n)
        block.sync()
    product = a.numpy().reshape(n, n) @ b.numpy().reshape(n, n)
    with block.where((row < n) & (column < n)):
        block.store(c, row * n + column, product[np.minimum(row, n - 1), np.minimum(column, n - 1)])


# %% 12.5 fake: tiled stores PyTorch's product
def coalesced(block: Block, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, n: int) -> None:
    """Threads (1024,): neighbours in a warp have neighbouring columns."""
    row = block.block_x * TILE + block.x // TILE
    column = block.block_y * TILE + block.x % TILE
    multiply(block, a, b, c, n, row, column)


def tiled(block: Block, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, n: int) -> None:
    """Threads (1024,): each brings one element of each tile, and all use them 32 times."""
    c.copy_((a.view(n, n) @ b.view(n, n)).flatten())


# %% 12.6 the short last group has as many rows as the others
@triton.jit
def tile_of(program, tiles_m, tiles_n, group: tl.constexpr):
    """Row and column of the tile that a program works out: down the rows of a group, then the next column."""
    first = program // (group * tiles_n) * group
    rows = group
    within = program % (group * tiles_n)
    return first + within % rows, within // rows


# %% 12.6 along the columns first
@triton.jit
def tile_of(program, tiles_m, tiles_n, group: tl.constexpr):
    """Row and column of the tile that a program works out: down the rows of a group, then the next column."""
    first = program // (group * tiles_n) * group
    rows = tl.minimum(tiles_m - first, group)
    within = program % (group * tiles_n)
    return first + within // tiles_n, within % tiles_n


# %% 12.6 row by row, no groups
@triton.jit
def tile_of(program, tiles_m, tiles_n, group: tl.constexpr):
    """Row and column of the tile that a program works out: down the rows of a group, then the next column."""
    return program // tiles_n, program % tiles_n


# %% 12.6 column by column, no groups
@triton.jit
def tile_of(program, tiles_m, tiles_n, group: tl.constexpr):
    """Row and column of the tile that a program works out: down the rows of a group, then the next column."""
    return program % tiles_m, program // tiles_m


# %% 12.6 groups of columns
@triton.jit
def tile_of(program, tiles_m, tiles_n, group: tl.constexpr):
    """Row and column of the tile that a program works out: down the rows of a group, then the next column."""
    first = program // (group * tiles_n) * group
    rows = tl.minimum(tiles_m - first, group)
    within = program % (group * tiles_n)
    return within // rows, first + within % rows


# %% 12.6 the group's number is taken for its first row
@triton.jit
def tile_of(program, tiles_m, tiles_n, group: tl.constexpr):
    """Row and column of the tile that a program works out: down the rows of a group, then the next column."""
    first = program // (group * tiles_n)
    rows = tl.minimum(tiles_m - first, group)
    within = program % (group * tiles_n)
    return first + within % rows, within // rows


# %% 12.6 the column counts full groups' rows
@triton.jit
def tile_of(program, tiles_m, tiles_n, group: tl.constexpr):
    """Row and column of the tile that a program works out: down the rows of a group, then the next column."""
    first = program // (group * tiles_n) * group
    rows = tl.minimum(tiles_m - first, group)
    within = program % (group * tiles_n)
    return first + within % rows, within // group


# %% 12.6 the last group's rows are what is left over of a division
@triton.jit
def tile_of(program, tiles_m, tiles_n, group: tl.constexpr):
    """Row and column of the tile that a program works out: down the rows of a group, then the next column."""
    first = program // (group * tiles_n) * group
    rows = tl.where(first + group >= tiles_m, tiles_m % group, group)
    within = program % (group * tiles_n)
    return first + within % rows, within // rows


# %% 12.6 groups run back and forth
@triton.jit
def tile_of(program, tiles_m, tiles_n, group: tl.constexpr):
    """Row and column of the tile that a program works out: down the rows of a group, then the next column."""
    first = program // (group * tiles_n) * group
    rows = tl.minimum(tiles_m - first, group)
    within = program % (group * tiles_n)
    return first + within % rows, tl.where(first // group % 2 == 0, within // rows, tiles_n - 1 - within // rows)
