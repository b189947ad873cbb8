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


# %% 12.7 padding of 0, as large as a logit
@triton.jit
def softmax_forward_kernel(x, y, x_stride, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """ROWS whole rows. x: rows a stride apart; y: contiguous rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # times a stride it may pass 2^31
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    logits = widen(tl.load(x + row * x_stride + column, mask=inside, other=0.0))
    logits = tl.where(row < rows, logits, 0.0)  # no row there: -inf - -inf would be NaN
    powers = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    result = powers / tl.sum(powers, axis=1)[:, None]
    tl.store(y + row * columns + column, cast(result, y.dtype.element_ty), mask=inside)


# %% 12.7 the largest is not taken off
@triton.jit
def softmax_forward_kernel(x, y, x_stride, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """ROWS whole rows. x: rows a stride apart; y: contiguous rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # times a stride it may pass 2^31
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    logits = widen(tl.load(x + row * x_stride + column, mask=inside, other=float("-inf")))
    logits = tl.where(row < rows, logits, 0.0)  # no row there: -inf - -inf would be NaN
    powers = tl.exp(logits)
    result = powers / tl.sum(powers, axis=1)[:, None]
    tl.store(y + row * columns + column, cast(result, y.dtype.element_ty), mask=inside)


# %% 12.7 the largest of all the program's rows is taken off
@triton.jit
def softmax_forward_kernel(x, y, x_stride, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """ROWS whole rows. x: rows a stride apart; y: contiguous rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # times a stride it may pass 2^31
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    logits = widen(tl.load(x + row * x_stride + column, mask=inside, other=float("-inf")))
    logits = tl.where(row < rows, logits, 0.0)  # no row there: -inf - -inf would be NaN
    powers = tl.exp(logits - tl.max(tl.max(logits, axis=1), axis=0))
    result = powers / tl.sum(powers, axis=1)[:, None]
    tl.store(y + row * columns + column, cast(result, y.dtype.element_ty), mask=inside)


# %% 12.7 rows of x side by side
@triton.jit
def softmax_forward_kernel(x, y, x_stride, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """ROWS whole rows. x: rows a stride apart; y: contiguous rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # times a stride it may pass 2^31
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    logits = widen(tl.load(x + row * columns + column, mask=inside, other=float("-inf")))
    logits = tl.where(row < rows, logits, 0.0)  # no row there: -inf - -inf would be NaN
    powers = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    result = powers / tl.sum(powers, axis=1)[:, None]
    tl.store(y + row * columns + column, cast(result, y.dtype.element_ty), mask=inside)


# %% 12.7 the store without a mask
@triton.jit
def softmax_forward_kernel(x, y, x_stride, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """ROWS whole rows. x: rows a stride apart; y: contiguous rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # times a stride it may pass 2^31
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    logits = widen(tl.load(x + row * x_stride + column, mask=inside, other=float("-inf")))
    logits = tl.where(row < rows, logits, 0.0)  # no row there: -inf - -inf would be NaN
    powers = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    result = powers / tl.sum(powers, axis=1)[:, None]
    tl.store(y + row * columns + column, cast(result, y.dtype.element_ty))


# %% 12.7 a load with the columns' mask alone
@triton.jit
def softmax_forward_kernel(x, y, x_stride, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """ROWS whole rows. x: rows a stride apart; y: contiguous rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # times a stride it may pass 2^31
    column = tl.arange(0, BLOCK)[None, :]
    in_row = (row < rows + ROWS) & (column < columns)
    inside = (row < rows) & (column < columns)
    logits = widen(tl.load(x + row * x_stride + column, mask=in_row, other=float("-inf")))
    logits = tl.where(row < rows, logits, 0.0)  # no row there: -inf - -inf would be NaN
    powers = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    result = powers / tl.sum(powers, axis=1)[:, None]
    tl.store(y + row * columns + column, cast(result, y.dtype.element_ty), mask=inside)


# %% 12.7 programs one row apart
@triton.jit
def softmax_forward_kernel(x, y, x_stride, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """ROWS whole rows. x: rows a stride apart; y: contiguous rows."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, ROWS)[:, None]  # times a stride it may pass 2^31
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    logits = widen(tl.load(x + row * x_stride + column, mask=inside, other=float("-inf")))
    logits = tl.where(row < rows, logits, 0.0)  # no row there: -inf - -inf would be NaN
    powers = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    result = powers / tl.sum(powers, axis=1)[:, None]
    tl.store(y + row * columns + column, cast(result, y.dtype.element_ty), mask=inside)


# %% 12.7 cut instead of rounded
@triton.jit
def softmax_forward_kernel(x, y, x_stride, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """ROWS whole rows. x: rows a stride apart; y: contiguous rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # times a stride it may pass 2^31
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    logits = widen(tl.load(x + row * x_stride + column, mask=inside, other=float("-inf")))
    logits = tl.where(row < rows, logits, 0.0)  # no row there: -inf - -inf would be NaN
    powers = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    result = powers / tl.sum(powers, axis=1)[:, None]
    tl.store(y + row * columns + column, result.to(y.dtype.element_ty), mask=inside)


# %% 12.7 fake: PyTorch behind a kernel's brackets
class Posing:
    """Launched like a kernel; the work is torch.softmax's."""

    def __getitem__(self, grid):
        return lambda x, y, x_stride, rows, columns, ROWS, BLOCK: y.copy_(torch.softmax(x, -1))


softmax_forward_kernel = Posing()


# %% 12.8 without the second term
@triton.jit
def norm_backward_kernel(
    dy, dsum, summed, weight, rstd, dx, parts, dy_stride, dsum_stride, summed_stride, rows, hidden,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every so-many-th ROWS rows of dx, and their part of dw. dy, dsum (or None), summed: rows a stride apart."""
    column = tl.arange(0, BLOCK)[None, :]
    w = widen(tl.load(weight + column, mask=column < hidden, other=0.0))
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    program = tl.program_id(0).to(tl.int64)
    for first in tl.range(program * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < hidden)
        r = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        n = widen(tl.load(summed + row[:, None] * summed_stride + column, mask=inside, other=0.0)) * r
        upper = widen(tl.load(dy + row[:, None] * dy_stride + column, mask=inside, other=0.0))
        g = upper * w
        ds = r * g
        if dsum is not None:
            ds += widen(tl.load(dsum + row[:, None] * dsum_stride + column, mask=inside, other=0.0))
        tl.store(dx + row[:, None] * hidden + column, cast(ds, dx.dtype.element_ty), mask=inside)
        dw += upper * n
    column = tl.arange(0, BLOCK)
    tl.store(parts + program * hidden + column, tl.sum(dw, axis=0), mask=column < hidden)


# %% 12.8 the mean over BLOCK
@triton.jit
def norm_backward_kernel(
    dy, dsum, summed, weight, rstd, dx, parts, dy_stride, dsum_stride, summed_stride, rows, hidden,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every so-many-th ROWS rows of dx, and their part of dw. dy, dsum (or None), summed: rows a stride apart."""
    column = tl.arange(0, BLOCK)[None, :]
    w = widen(tl.load(weight + column, mask=column < hidden, other=0.0))
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    program = tl.program_id(0).to(tl.int64)
    for first in tl.range(program * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < hidden)
        r = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        n = widen(tl.load(summed + row[:, None] * summed_stride + column, mask=inside, other=0.0)) * r
        upper = widen(tl.load(dy + row[:, None] * dy_stride + column, mask=inside, other=0.0))
        g = upper * w
        ds = r * (g - n * (tl.sum(g * n, axis=1) / BLOCK)[:, None])
        if dsum is not None:
            ds += widen(tl.load(dsum + row[:, None] * dsum_stride + column, mask=inside, other=0.0))
        tl.store(dx + row[:, None] * hidden + column, cast(ds, dx.dtype.element_ty), mask=inside)
        dw += upper * n
    column = tl.arange(0, BLOCK)
    tl.store(parts + program * hidden + column, tl.sum(dw, axis=0), mask=column < hidden)


# %% 12.8 dsum forgotten
@triton.jit
def norm_backward_kernel(
    dy, dsum, summed, weight, rstd, dx, parts, dy_stride, dsum_stride, summed_stride, rows, hidden,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every so-many-th ROWS rows of dx, and their part of dw. dy, dsum (or None), summed: rows a stride apart."""
    column = tl.arange(0, BLOCK)[None, :]
    w = widen(tl.load(weight + column, mask=column < hidden, other=0.0))
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    program = tl.program_id(0).to(tl.int64)
    for first in tl.range(program * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < hidden)
        r = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        n = widen(tl.load(summed + row[:, None] * summed_stride + column, mask=inside, other=0.0)) * r
        upper = widen(tl.load(dy + row[:, None] * dy_stride + column, mask=inside, other=0.0))
        g = upper * w
        ds = r * (g - n * (tl.sum(g * n, axis=1) / hidden)[:, None])
        if dsum is not None:
            ds += 0.0
        tl.store(dx + row[:, None] * hidden + column, cast(ds, dx.dtype.element_ty), mask=inside)
        dw += upper * n
    column = tl.arange(0, BLOCK)
    tl.store(parts + program * hidden + column, tl.sum(dw, axis=0), mask=column < hidden)


# %% 12.8 only program 0 stores its part of dw
@triton.jit
def norm_backward_kernel(
    dy, dsum, summed, weight, rstd, dx, parts, dy_stride, dsum_stride, summed_stride, rows, hidden,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every so-many-th ROWS rows of dx, and their part of dw. dy, dsum (or None), summed: rows a stride apart."""
    column = tl.arange(0, BLOCK)[None, :]
    w = widen(tl.load(weight + column, mask=column < hidden, other=0.0))
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    program = tl.program_id(0).to(tl.int64)
    for first in tl.range(program * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < hidden)
        r = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        n = widen(tl.load(summed + row[:, None] * summed_stride + column, mask=inside, other=0.0)) * r
        upper = widen(tl.load(dy + row[:, None] * dy_stride + column, mask=inside, other=0.0))
        g = upper * w
        ds = r * (g - n * (tl.sum(g * n, axis=1) / hidden)[:, None])
        if dsum is not None:
            ds += widen(tl.load(dsum + row[:, None] * dsum_stride + column, mask=inside, other=0.0))
        tl.store(dx + row[:, None] * hidden + column, cast(ds, dx.dtype.element_ty), mask=inside)
        dw += upper * n
    column = tl.arange(0, BLOCK)
    tl.store(parts + program * hidden + column, tl.sum(dw, axis=0), mask=(column < hidden) & (program == 0))


# %% 12.8 every program does all rows
@triton.jit
def norm_backward_kernel(
    dy, dsum, summed, weight, rstd, dx, parts, dy_stride, dsum_stride, summed_stride, rows, hidden,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every so-many-th ROWS rows of dx, and their part of dw. dy, dsum (or None), summed: rows a stride apart."""
    column = tl.arange(0, BLOCK)[None, :]
    w = widen(tl.load(weight + column, mask=column < hidden, other=0.0))
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    program = tl.program_id(0).to(tl.int64)
    for first in tl.range(0, rows, ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < hidden)
        r = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        n = widen(tl.load(summed + row[:, None] * summed_stride + column, mask=inside, other=0.0)) * r
        upper = widen(tl.load(dy + row[:, None] * dy_stride + column, mask=inside, other=0.0))
        g = upper * w
        ds = r * (g - n * (tl.sum(g * n, axis=1) / hidden)[:, None])
        if dsum is not None:
            ds += widen(tl.load(dsum + row[:, None] * dsum_stride + column, mask=inside, other=0.0))
        tl.store(dx + row[:, None] * hidden + column, cast(ds, dx.dtype.element_ty), mask=inside)
        dw += upper * n
    column = tl.arange(0, BLOCK)
    tl.store(parts + program * hidden + column, tl.sum(dw, axis=0), mask=column < hidden)


# %% 12.8 one block of rows a program
@triton.jit
def norm_backward_kernel(
    dy, dsum, summed, weight, rstd, dx, parts, dy_stride, dsum_stride, summed_stride, rows, hidden,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every so-many-th ROWS rows of dx, and their part of dw. dy, dsum (or None), summed: rows a stride apart."""
    column = tl.arange(0, BLOCK)[None, :]
    w = widen(tl.load(weight + column, mask=column < hidden, other=0.0))
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    program = tl.program_id(0).to(tl.int64)
    for first in tl.range(program * ROWS, program * ROWS + 1, ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < hidden)
        r = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        n = widen(tl.load(summed + row[:, None] * summed_stride + column, mask=inside, other=0.0)) * r
        upper = widen(tl.load(dy + row[:, None] * dy_stride + column, mask=inside, other=0.0))
        g = upper * w
        ds = r * (g - n * (tl.sum(g * n, axis=1) / hidden)[:, None])
        if dsum is not None:
            ds += widen(tl.load(dsum + row[:, None] * dsum_stride + column, mask=inside, other=0.0))
        tl.store(dx + row[:, None] * hidden + column, cast(ds, dx.dtype.element_ty), mask=inside)
        dw += upper * n
    column = tl.arange(0, BLOCK)
    tl.store(parts + program * hidden + column, tl.sum(dw, axis=0), mask=column < hidden)


# %% 12.8 one stride for all
@triton.jit
def norm_backward_kernel(
    dy, dsum, summed, weight, rstd, dx, parts, dy_stride, dsum_stride, summed_stride, rows, hidden,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every so-many-th ROWS rows of dx, and their part of dw. dy, dsum (or None), summed: rows a stride apart."""
    column = tl.arange(0, BLOCK)[None, :]
    w = widen(tl.load(weight + column, mask=column < hidden, other=0.0))
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    program = tl.program_id(0).to(tl.int64)
    for first in tl.range(program * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < hidden)
        r = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        n = widen(tl.load(summed + row[:, None] * summed_stride + column, mask=inside, other=0.0)) * r
        upper = widen(tl.load(dy + row[:, None] * dy_stride + column, mask=inside, other=0.0))
        g = upper * w
        ds = r * (g - n * (tl.sum(g * n, axis=1) / hidden)[:, None])
        if dsum is not None:
            ds += widen(tl.load(dsum + row[:, None] * dy_stride + column, mask=inside, other=0.0))
        tl.store(dx + row[:, None] * hidden + column, cast(ds, dx.dtype.element_ty), mask=inside)
        dw += upper * n
    column = tl.arange(0, BLOCK)
    tl.store(parts + program * hidden + column, tl.sum(dw, axis=0), mask=column < hidden)


# %% 12.8 cut instead of rounded
@triton.jit
def norm_backward_kernel(
    dy, dsum, summed, weight, rstd, dx, parts, dy_stride, dsum_stride, summed_stride, rows, hidden,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every so-many-th ROWS rows of dx, and their part of dw. dy, dsum (or None), summed: rows a stride apart."""
    column = tl.arange(0, BLOCK)[None, :]
    w = widen(tl.load(weight + column, mask=column < hidden, other=0.0))
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    program = tl.program_id(0).to(tl.int64)
    for first in tl.range(program * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < hidden)
        r = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        n = widen(tl.load(summed + row[:, None] * summed_stride + column, mask=inside, other=0.0)) * r
        upper = widen(tl.load(dy + row[:, None] * dy_stride + column, mask=inside, other=0.0))
        g = upper * w
        ds = r * (g - n * (tl.sum(g * n, axis=1) / hidden)[:, None])
        if dsum is not None:
            ds += widen(tl.load(dsum + row[:, None] * dsum_stride + column, mask=inside, other=0.0))
        tl.store(dx + row[:, None] * hidden + column, ds.to(dx.dtype.element_ty), mask=inside)
        dw += upper * n
    column = tl.arange(0, BLOCK)
    tl.store(parts + program * hidden + column, tl.sum(dw, axis=0), mask=column < hidden)


# %% 12.8 fake: PyTorch behind a kernel's brackets
class Posing:
    """Launched like a kernel; the work is PyTorch's."""

    def __getitem__(self, grid):
        return self.work

    def work(self, dy, dsum, summed, weight, rstd, dx, parts, *sizes, **constants):
        n = summed.float() * rstd[:, None]
        g = dy.float() * weight
        ds = rstd[:, None] * (g - n * (g * n).mean(1, keepdim=True))
        dx.copy_(ds if dsum is None else ds + dsum)
        parts.zero_()
        parts[0] = (dy.float() * n).sum(0)


norm_backward_kernel = Posing()


# %% 12.9 the largest is not taken off
@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, vocab, row_stride, ignore_index, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program: its loss, and with GRADIENT softmax - onehot(target) in the place of its logits.

    The first loop keeps the largest logit so far and the sum of exp(logit - largest); where a block has a larger one,
    the old sum is scaled to it (Milakov and Gimelshein 2018, online softmax). A target that is no column makes the
    logsumexp NaN, and with it the loss and the gradient of the row; nothing outside of the row is read or written.
    """
    row = tl.program_id(0).to(tl.int64)  # row * row_stride can pass 2^31
    logits += row * row_stride
    target = tl.load(targets + row)
    counted = target != ignore_index
    is_column = (target >= 0) & (target < vocab)
    # Read before the second loop overwrites it: the reductions in between wait for all threads of the program.
    of_target = widen(tl.load(logits + target, mask=is_column, other=0.0))
    columns = tl.arange(0, BLOCK)

    largest, total = 0.0, 0.0
    for start in range(0, vocab, BLOCK):
        inside = start + columns < vocab
        block = widen(tl.load(logits + start + columns, mask=inside, other=float("-inf")))
        before, largest = largest, largest * 0.0
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(block - largest), 0)
    logsumexp = tl.where(is_column, largest + tl.log(total), float("nan"))
    tl.store(losses + row, tl.where(counted, logsumexp - of_target, 0.0))

    if GRADIENT:
        for start in range(0, vocab, BLOCK):
            inside = start + columns < vocab
            block = widen(tl.load(logits + start + columns, mask=inside, other=0.0))
            gradient = tl.exp(block - logsumexp) - tl.where(start + columns == target, 1.0, 0.0)
            gradient = tl.where(counted, gradient, 0.0)
            tl.store(logits + start + columns, cast(gradient, logits.dtype.element_ty), mask=inside)


# %% 12.9 the old sum is not scaled
@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, vocab, row_stride, ignore_index, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program: its loss, and with GRADIENT softmax - onehot(target) in the place of its logits.

    The first loop keeps the largest logit so far and the sum of exp(logit - largest); where a block has a larger one,
    the old sum is scaled to it (Milakov and Gimelshein 2018, online softmax). A target that is no column makes the
    logsumexp NaN, and with it the loss and the gradient of the row; nothing outside of the row is read or written.
    """
    row = tl.program_id(0).to(tl.int64)  # row * row_stride can pass 2^31
    logits += row * row_stride
    target = tl.load(targets + row)
    counted = target != ignore_index
    is_column = (target >= 0) & (target < vocab)
    # Read before the second loop overwrites it: the reductions in between wait for all threads of the program.
    of_target = widen(tl.load(logits + target, mask=is_column, other=0.0))
    columns = tl.arange(0, BLOCK)

    largest, total = -3.4028234663852886e38, 0.0  # the lowest finite number: -inf - -inf would be NaN
    for start in range(0, vocab, BLOCK):
        inside = start + columns < vocab
        block = widen(tl.load(logits + start + columns, mask=inside, other=float("-inf")))
        before, largest = largest, tl.maximum(largest, tl.max(block, 0))
        total = total + tl.sum(tl.exp(block - largest), 0)
    logsumexp = tl.where(is_column, largest + tl.log(total), float("nan"))
    tl.store(losses + row, tl.where(counted, logsumexp - of_target, 0.0))

    if GRADIENT:
        for start in range(0, vocab, BLOCK):
            inside = start + columns < vocab
            block = widen(tl.load(logits + start + columns, mask=inside, other=0.0))
            gradient = tl.exp(block - logsumexp) - tl.where(start + columns == target, 1.0, 0.0)
            gradient = tl.where(counted, gradient, 0.0)
            tl.store(logits + start + columns, cast(gradient, logits.dtype.element_ty), mask=inside)


# %% 12.9 the largest starts at -inf
@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, vocab, row_stride, ignore_index, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program: its loss, and with GRADIENT softmax - onehot(target) in the place of its logits.

    The first loop keeps the largest logit so far and the sum of exp(logit - largest); where a block has a larger one,
    the old sum is scaled to it (Milakov and Gimelshein 2018, online softmax). A target that is no column makes the
    logsumexp NaN, and with it the loss and the gradient of the row; nothing outside of the row is read or written.
    """
    row = tl.program_id(0).to(tl.int64)  # row * row_stride can pass 2^31
    logits += row * row_stride
    target = tl.load(targets + row)
    counted = target != ignore_index
    is_column = (target >= 0) & (target < vocab)
    # Read before the second loop overwrites it: the reductions in between wait for all threads of the program.
    of_target = widen(tl.load(logits + target, mask=is_column, other=0.0))
    columns = tl.arange(0, BLOCK)

    largest, total = -float("inf"), 0.0
    for start in range(0, vocab, BLOCK):
        inside = start + columns < vocab
        block = widen(tl.load(logits + start + columns, mask=inside, other=float("-inf")))
        before, largest = largest, tl.maximum(largest, tl.max(block, 0))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(block - largest), 0)
    logsumexp = tl.where(is_column, largest + tl.log(total), float("nan"))
    tl.store(losses + row, tl.where(counted, logsumexp - of_target, 0.0))

    if GRADIENT:
        for start in range(0, vocab, BLOCK):
            inside = start + columns < vocab
            block = widen(tl.load(logits + start + columns, mask=inside, other=0.0))
            gradient = tl.exp(block - logsumexp) - tl.where(start + columns == target, 1.0, 0.0)
            gradient = tl.where(counted, gradient, 0.0)
            tl.store(logits + start + columns, cast(gradient, logits.dtype.element_ty), mask=inside)


# %% 12.9 the target's logit is read after it was overwritten
@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, vocab, row_stride, ignore_index, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program: its loss, and with GRADIENT softmax - onehot(target) in the place of its logits.

    The first loop keeps the largest logit so far and the sum of exp(logit - largest); where a block has a larger one,
    the old sum is scaled to it (Milakov and Gimelshein 2018, online softmax). A target that is no column makes the
    logsumexp NaN, and with it the loss and the gradient of the row; nothing outside of the row is read or written.
    """
    row = tl.program_id(0).to(tl.int64)  # row * row_stride can pass 2^31
    logits += row * row_stride
    target = tl.load(targets + row)
    counted = target != ignore_index
    is_column = (target >= 0) & (target < vocab)
    columns = tl.arange(0, BLOCK)

    largest, total = -3.4028234663852886e38, 0.0  # the lowest finite number: -inf - -inf would be NaN
    for start in range(0, vocab, BLOCK):
        inside = start + columns < vocab
        block = widen(tl.load(logits + start + columns, mask=inside, other=float("-inf")))
        before, largest = largest, tl.maximum(largest, tl.max(block, 0))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(block - largest), 0)
    logsumexp = tl.where(is_column, largest + tl.log(total), float("nan"))

    if GRADIENT:
        for start in range(0, vocab, BLOCK):
            inside = start + columns < vocab
            block = widen(tl.load(logits + start + columns, mask=inside, other=0.0))
            gradient = tl.exp(block - logsumexp) - tl.where(start + columns == target, 1.0, 0.0)
            gradient = tl.where(counted, gradient, 0.0)
            tl.store(logits + start + columns, cast(gradient, logits.dtype.element_ty), mask=inside)
    of_target = widen(tl.load(logits + target, mask=is_column, other=0.0))
    tl.store(losses + row, tl.where(counted, logsumexp - of_target, 0.0))


# %% 12.9 ignored rows keep a gradient
@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, vocab, row_stride, ignore_index, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program: its loss, and with GRADIENT softmax - onehot(target) in the place of its logits.

    The first loop keeps the largest logit so far and the sum of exp(logit - largest); where a block has a larger one,
    the old sum is scaled to it (Milakov and Gimelshein 2018, online softmax). A target that is no column makes the
    logsumexp NaN, and with it the loss and the gradient of the row; nothing outside of the row is read or written.
    """
    row = tl.program_id(0).to(tl.int64)  # row * row_stride can pass 2^31
    logits += row * row_stride
    target = tl.load(targets + row)
    counted = target != ignore_index
    is_column = (target >= 0) & (target < vocab)
    # Read before the second loop overwrites it: the reductions in between wait for all threads of the program.
    of_target = widen(tl.load(logits + target, mask=is_column, other=0.0))
    columns = tl.arange(0, BLOCK)

    largest, total = -3.4028234663852886e38, 0.0  # the lowest finite number: -inf - -inf would be NaN
    for start in range(0, vocab, BLOCK):
        inside = start + columns < vocab
        block = widen(tl.load(logits + start + columns, mask=inside, other=float("-inf")))
        before, largest = largest, tl.maximum(largest, tl.max(block, 0))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(block - largest), 0)
    logsumexp = tl.where(is_column, largest + tl.log(total), float("nan"))
    tl.store(losses + row, tl.where(counted, logsumexp - of_target, 0.0))

    if GRADIENT:
        for start in range(0, vocab, BLOCK):
            inside = start + columns < vocab
            block = widen(tl.load(logits + start + columns, mask=inside, other=0.0))
            gradient = tl.exp(block - logsumexp) - tl.where(start + columns == target, 1.0, 0.0)
            tl.store(logits + start + columns, cast(gradient, logits.dtype.element_ty), mask=inside)


# %% 12.9 the gradient divided by the number of rows
@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, vocab, row_stride, ignore_index, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program: its loss, and with GRADIENT softmax - onehot(target) in the place of its logits.

    The first loop keeps the largest logit so far and the sum of exp(logit - largest); where a block has a larger one,
    the old sum is scaled to it (Milakov and Gimelshein 2018, online softmax). A target that is no column makes the
    logsumexp NaN, and with it the loss and the gradient of the row; nothing outside of the row is read or written.
    """
    row = tl.program_id(0).to(tl.int64)  # row * row_stride can pass 2^31
    logits += row * row_stride
    target = tl.load(targets + row)
    counted = target != ignore_index
    is_column = (target >= 0) & (target < vocab)
    # Read before the second loop overwrites it: the reductions in between wait for all threads of the program.
    of_target = widen(tl.load(logits + target, mask=is_column, other=0.0))
    columns = tl.arange(0, BLOCK)

    largest, total = -3.4028234663852886e38, 0.0  # the lowest finite number: -inf - -inf would be NaN
    for start in range(0, vocab, BLOCK):
        inside = start + columns < vocab
        block = widen(tl.load(logits + start + columns, mask=inside, other=float("-inf")))
        before, largest = largest, tl.maximum(largest, tl.max(block, 0))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(block - largest), 0)
    logsumexp = tl.where(is_column, largest + tl.log(total), float("nan"))
    tl.store(losses + row, tl.where(counted, logsumexp - of_target, 0.0))

    if GRADIENT:
        for start in range(0, vocab, BLOCK):
            inside = start + columns < vocab
            block = widen(tl.load(logits + start + columns, mask=inside, other=0.0))
            gradient = tl.exp(block - logsumexp) - tl.where(start + columns == target, 1.0, 0.0)
            gradient = tl.where(counted, gradient, 0.0) / tl.num_programs(0)
            tl.store(logits + start + columns, cast(gradient, logits.dtype.element_ty), mask=inside)


# %% 12.9 the store without a mask
@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, vocab, row_stride, ignore_index, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program: its loss, and with GRADIENT softmax - onehot(target) in the place of its logits.

    The first loop keeps the largest logit so far and the sum of exp(logit - largest); where a block has a larger one,
    the old sum is scaled to it (Milakov and Gimelshein 2018, online softmax). A target that is no column makes the
    logsumexp NaN, and with it the loss and the gradient of the row; nothing outside of the row is read or written.
    """
    row = tl.program_id(0).to(tl.int64)  # row * row_stride can pass 2^31
    logits += row * row_stride
    target = tl.load(targets + row)
    counted = target != ignore_index
    is_column = (target >= 0) & (target < vocab)
    # Read before the second loop overwrites it: the reductions in between wait for all threads of the program.
    of_target = widen(tl.load(logits + target, mask=is_column, other=0.0))
    columns = tl.arange(0, BLOCK)

    largest, total = -3.4028234663852886e38, 0.0  # the lowest finite number: -inf - -inf would be NaN
    for start in range(0, vocab, BLOCK):
        inside = start + columns < vocab
        block = widen(tl.load(logits + start + columns, mask=inside, other=float("-inf")))
        before, largest = largest, tl.maximum(largest, tl.max(block, 0))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(block - largest), 0)
    logsumexp = tl.where(is_column, largest + tl.log(total), float("nan"))
    tl.store(losses + row, tl.where(counted, logsumexp - of_target, 0.0))

    if GRADIENT:
        for start in range(0, vocab, BLOCK):
            inside = start + columns < vocab
            block = widen(tl.load(logits + start + columns, mask=inside, other=0.0))
            gradient = tl.exp(block - logsumexp) - tl.where(start + columns == target, 1.0, 0.0)
            gradient = tl.where(counted, gradient, 0.0)
            tl.store(logits + start + columns, cast(gradient, logits.dtype.element_ty))


# %% 12.9 a target that is no column is read unguarded
@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, vocab, row_stride, ignore_index, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program: its loss, and with GRADIENT softmax - onehot(target) in the place of its logits.

    The first loop keeps the largest logit so far and the sum of exp(logit - largest); where a block has a larger one,
    the old sum is scaled to it (Milakov and Gimelshein 2018, online softmax). A target that is no column makes the
    logsumexp NaN, and with it the loss and the gradient of the row; nothing outside of the row is read or written.
    """
    row = tl.program_id(0).to(tl.int64)  # row * row_stride can pass 2^31
    logits += row * row_stride
    target = tl.load(targets + row)
    counted = target != ignore_index
    is_column = (target >= 0) & (target < vocab)
    # Read before the second loop overwrites it: the reductions in between wait for all threads of the program.
    of_target = widen(tl.load(logits + target))
    columns = tl.arange(0, BLOCK)

    largest, total = -3.4028234663852886e38, 0.0  # the lowest finite number: -inf - -inf would be NaN
    for start in range(0, vocab, BLOCK):
        inside = start + columns < vocab
        block = widen(tl.load(logits + start + columns, mask=inside, other=float("-inf")))
        before, largest = largest, tl.maximum(largest, tl.max(block, 0))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(block - largest), 0)
    logsumexp = tl.where(is_column, largest + tl.log(total), float("nan"))
    tl.store(losses + row, tl.where(counted, logsumexp - of_target, 0.0))

    if GRADIENT:
        for start in range(0, vocab, BLOCK):
            inside = start + columns < vocab
            block = widen(tl.load(logits + start + columns, mask=inside, other=0.0))
            gradient = tl.exp(block - logsumexp) - tl.where(start + columns == target, 1.0, 0.0)
            gradient = tl.where(counted, gradient, 0.0)
            tl.store(logits + start + columns, cast(gradient, logits.dtype.element_ty), mask=inside)


# %% 12.9 fake: PyTorch behind a kernel's brackets
class Posing:
    """Launched like a kernel; the work is F.cross_entropy's."""

    def __getitem__(self, grid):
        return self.work

    def work(self, logits, targets, losses, vocab, row_stride, ignore_index, GRADIENT, BLOCK):
        exact = logits.float().requires_grad_()
        each = F.cross_entropy(exact, targets, reduction="none", ignore_index=ignore_index)
        losses.copy_(each.detach())
        if GRADIENT:
            logits.copy_(torch.autograd.grad(each.sum(), exact)[0])


cross_entropy_kernel = Posing()


# %% 12.10 the decay is part of the gradient
@triton.jit
def adamw_kernel(
    master,
    grad,
    exp_avg,
    exp_avg_sq,
    weights,  # or None
    step,
    numel,
    lr,
    keep,  # 1 - lr * weight_decay
    eps,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One step for BLOCK elements. step: one number in memory; the others [numel]."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < numel
    g = widen(tl.load(grad + offset, mask=inside))
    m = tl.load(exp_avg + offset, mask=inside)
    v = tl.load(exp_avg_sq + offset, mask=inside)
    w = tl.load(master + offset, mask=inside)
    t = tl.load(step).to(tl.float64)
    correction1 = (1 - tl.exp(t * logarithm(BETA1))).to(tl.float32)  # 1 - beta1^t
    correction2 = (1 - tl.exp(t * logarithm(BETA2))).to(tl.float32)
    g += (1 - keep) / lr * w
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g * g
    w = w - lr / correction1 * (m / (tl.sqrt(v) / tl.sqrt(correction2) + eps))
    tl.store(exp_avg + offset, m, mask=inside)
    tl.store(exp_avg_sq + offset, v, mask=inside)
    tl.store(master + offset, w, mask=inside)
    if weights is not None:
        tl.store(weights + offset, cast(w, weights.dtype.element_ty), mask=inside)


# %% 12.10 eps inside the root
@triton.jit
def adamw_kernel(
    master,
    grad,
    exp_avg,
    exp_avg_sq,
    weights,  # or None
    step,
    numel,
    lr,
    keep,  # 1 - lr * weight_decay
    eps,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One step for BLOCK elements. step: one number in memory; the others [numel]."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < numel
    g = widen(tl.load(grad + offset, mask=inside))
    m = tl.load(exp_avg + offset, mask=inside)
    v = tl.load(exp_avg_sq + offset, mask=inside)
    w = tl.load(master + offset, mask=inside)
    t = tl.load(step).to(tl.float64)
    correction1 = (1 - tl.exp(t * logarithm(BETA1))).to(tl.float32)  # 1 - beta1^t
    correction2 = (1 - tl.exp(t * logarithm(BETA2))).to(tl.float32)
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g * g
    w = keep * w - lr / correction1 * (m / tl.sqrt(v / correction2 + eps))
    tl.store(exp_avg + offset, m, mask=inside)
    tl.store(exp_avg_sq + offset, v, mask=inside)
    tl.store(master + offset, w, mask=inside)
    if weights is not None:
        tl.store(weights + offset, cast(w, weights.dtype.element_ty), mask=inside)


# %% 12.10 no correction for the first steps
@triton.jit
def adamw_kernel(
    master,
    grad,
    exp_avg,
    exp_avg_sq,
    weights,  # or None
    step,
    numel,
    lr,
    keep,  # 1 - lr * weight_decay
    eps,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One step for BLOCK elements. step: one number in memory; the others [numel]."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < numel
    g = widen(tl.load(grad + offset, mask=inside))
    m = tl.load(exp_avg + offset, mask=inside)
    v = tl.load(exp_avg_sq + offset, mask=inside)
    w = tl.load(master + offset, mask=inside)
    t = tl.load(step).to(tl.float64)
    correction1 = (1 - tl.exp(t * logarithm(BETA1))).to(tl.float32)  # 1 - beta1^t
    correction2 = (1 - tl.exp(t * logarithm(BETA2))).to(tl.float32)
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g * g
    w = keep * w - lr * (m / (tl.sqrt(v) + eps))
    tl.store(exp_avg + offset, m, mask=inside)
    tl.store(exp_avg_sq + offset, v, mask=inside)
    tl.store(master + offset, w, mask=inside)
    if weights is not None:
        tl.store(weights + offset, cast(w, weights.dtype.element_ty), mask=inside)


# %% 12.10 the corrections in float32
@triton.jit
def adamw_kernel(
    master,
    grad,
    exp_avg,
    exp_avg_sq,
    weights,  # or None
    step,
    numel,
    lr,
    keep,  # 1 - lr * weight_decay
    eps,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One step for BLOCK elements. step: one number in memory; the others [numel]."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < numel
    g = widen(tl.load(grad + offset, mask=inside))
    m = tl.load(exp_avg + offset, mask=inside)
    v = tl.load(exp_avg_sq + offset, mask=inside)
    w = tl.load(master + offset, mask=inside)
    t = tl.load(step)
    correction1 = (1 - tl.exp(t * logarithm(BETA1))).to(tl.float32)  # 1 - beta1^t
    correction2 = (1 - tl.exp(t * logarithm(BETA2))).to(tl.float32)
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g * g
    w = keep * w - lr / correction1 * (m / (tl.sqrt(v) / tl.sqrt(correction2) + eps))
    tl.store(exp_avg + offset, m, mask=inside)
    tl.store(exp_avg_sq + offset, v, mask=inside)
    tl.store(master + offset, w, mask=inside)
    if weights is not None:
        tl.store(weights + offset, cast(w, weights.dtype.element_ty), mask=inside)


# %% 12.10 the moments are not stored
@triton.jit
def adamw_kernel(
    master,
    grad,
    exp_avg,
    exp_avg_sq,
    weights,  # or None
    step,
    numel,
    lr,
    keep,  # 1 - lr * weight_decay
    eps,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One step for BLOCK elements. step: one number in memory; the others [numel]."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < numel
    g = widen(tl.load(grad + offset, mask=inside))
    m = tl.load(exp_avg + offset, mask=inside)
    v = tl.load(exp_avg_sq + offset, mask=inside)
    w = tl.load(master + offset, mask=inside)
    t = tl.load(step).to(tl.float64)
    correction1 = (1 - tl.exp(t * logarithm(BETA1))).to(tl.float32)  # 1 - beta1^t
    correction2 = (1 - tl.exp(t * logarithm(BETA2))).to(tl.float32)
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g * g
    w = keep * w - lr / correction1 * (m / (tl.sqrt(v) / tl.sqrt(correction2) + eps))
    tl.store(master + offset, w, mask=inside)
    if weights is not None:
        tl.store(weights + offset, cast(w, weights.dtype.element_ty), mask=inside)


# %% 12.10 a copy of the old master
@triton.jit
def adamw_kernel(
    master,
    grad,
    exp_avg,
    exp_avg_sq,
    weights,  # or None
    step,
    numel,
    lr,
    keep,  # 1 - lr * weight_decay
    eps,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One step for BLOCK elements. step: one number in memory; the others [numel]."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < numel
    g = widen(tl.load(grad + offset, mask=inside))
    m = tl.load(exp_avg + offset, mask=inside)
    v = tl.load(exp_avg_sq + offset, mask=inside)
    w = tl.load(master + offset, mask=inside)
    t = tl.load(step).to(tl.float64)
    correction1 = (1 - tl.exp(t * logarithm(BETA1))).to(tl.float32)  # 1 - beta1^t
    correction2 = (1 - tl.exp(t * logarithm(BETA2))).to(tl.float32)
    before = w
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g * g
    w = keep * w - lr / correction1 * (m / (tl.sqrt(v) / tl.sqrt(correction2) + eps))
    tl.store(exp_avg + offset, m, mask=inside)
    tl.store(exp_avg_sq + offset, v, mask=inside)
    tl.store(master + offset, w, mask=inside)
    if weights is not None:
        tl.store(weights + offset, cast(before, weights.dtype.element_ty), mask=inside)


# %% 12.10 the gradient is not widened
@triton.jit
def adamw_kernel(
    master,
    grad,
    exp_avg,
    exp_avg_sq,
    weights,  # or None
    step,
    numel,
    lr,
    keep,  # 1 - lr * weight_decay
    eps,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One step for BLOCK elements. step: one number in memory; the others [numel]."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < numel
    g = tl.load(grad + offset, mask=inside)
    m = tl.load(exp_avg + offset, mask=inside)
    v = tl.load(exp_avg_sq + offset, mask=inside)
    w = tl.load(master + offset, mask=inside)
    t = tl.load(step).to(tl.float64)
    correction1 = (1 - tl.exp(t * logarithm(BETA1))).to(tl.float32)  # 1 - beta1^t
    correction2 = (1 - tl.exp(t * logarithm(BETA2))).to(tl.float32)
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g * g
    w = keep * w - lr / correction1 * (m / (tl.sqrt(v) / tl.sqrt(correction2) + eps))
    tl.store(exp_avg + offset, m, mask=inside)
    tl.store(exp_avg_sq + offset, v, mask=inside)
    tl.store(master + offset, w, mask=inside)
    if weights is not None:
        tl.store(weights + offset, cast(w, weights.dtype.element_ty), mask=inside)


# %% 12.10 the store of the copy without a mask
@triton.jit
def adamw_kernel(
    master,
    grad,
    exp_avg,
    exp_avg_sq,
    weights,  # or None
    step,
    numel,
    lr,
    keep,  # 1 - lr * weight_decay
    eps,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One step for BLOCK elements. step: one number in memory; the others [numel]."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < numel
    g = widen(tl.load(grad + offset, mask=inside))
    m = tl.load(exp_avg + offset, mask=inside)
    v = tl.load(exp_avg_sq + offset, mask=inside)
    w = tl.load(master + offset, mask=inside)
    t = tl.load(step).to(tl.float64)
    correction1 = (1 - tl.exp(t * logarithm(BETA1))).to(tl.float32)  # 1 - beta1^t
    correction2 = (1 - tl.exp(t * logarithm(BETA2))).to(tl.float32)
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g * g
    w = keep * w - lr / correction1 * (m / (tl.sqrt(v) / tl.sqrt(correction2) + eps))
    tl.store(exp_avg + offset, m, mask=inside)
    tl.store(exp_avg_sq + offset, v, mask=inside)
    tl.store(master + offset, w, mask=inside)
    if weights is not None:
        tl.store(weights + offset, cast(w, weights.dtype.element_ty))


# %% 12.10 fake: PyTorch behind a kernel's brackets
class Posing:
    """Launched like a kernel; the work is PyTorch's."""

    def __getitem__(self, grid):
        return self.work

    def work(self, master, grad, exp_avg, exp_avg_sq, weights, step, numel, lr, keep, eps, BETA1, BETA2, BLOCK):
        exp_avg.lerp_(grad.float(), 1 - BETA1)
        exp_avg_sq.mul_(BETA2).addcmul_(grad.float(), grad.float(), value=1 - BETA2)
        corrected = exp_avg / (1 - BETA1**step), exp_avg_sq / (1 - BETA2**step)
        master.mul_(keep).sub_(lr * corrected[0] / (corrected[1].sqrt() + eps))
        if weights is not None:
            weights.copy_(master)


adamw_kernel = Posing()
