"""Wrong answers that the checks of notebook 12 must catch."""

# %% 12.1 warps are rounded down
warps = -(-threads_per_block // WARP) => warps = max(threads_per_block // WARP, 1)

# %% 12.1 registers without portions and quarters
"registers": blocks_by_registers(gpu, warps, registers_per_thread),
=>
"registers": gpu.registers_per_sm // (threads_per_block * registers_per_thread),

# %% 12.1 what CUDA keeps of shared memory is forgotten
shared_bytes + gpu.reserved_shared_bytes => max(shared_bytes, 1)

# %% 12.1 shared memory is not rounded up
round_up(shared_bytes + gpu.reserved_shared_bytes, gpu.shared_granularity) => shared_bytes + gpu.reserved_shared_bytes

# %% 12.1 an H100, whatever the GPU
gpu.shared_bytes_per_sm => 228 * 1024

# %% 12.1 one limit where two run out
tuple(name for name, limit in limits.items() if limit == blocks) => (min(limits, key=limits.get),)

# %% 12.1 a block always fits
blocks = min(limits.values()) => blocks = max(1, min(limits.values()))

# %% 12.1 nothing is refused
for what, value, least, most in (
    ("threads of a block", threads_per_block, 1, gpu.threads_per_block),
    ("registers of a thread", registers_per_thread, 1, gpu.max_registers_per_thread),
    ("bytes of shared memory", shared_bytes, 0, gpu.shared_bytes_per_block),
):
    if not least <= value <= most:
        raise ValueError(f"{value} {what}: on {gpu.name} they are {least} to {most}")
=>

# %% 12.1 fake: knows the check's kernels
def occupancy(gpu: GPU, threads_per_block: int, registers_per_thread: int, shared_bytes: int = 0) -> Occupancy:
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
    return int(active.sum())

# %% 12.2 all requests together
def touched_units(addresses: np.ndarray, active: np.ndarray, unit: int) -> int:
    return len(np.unique(addresses[active].astype(np.int64) // unit))

# %% 12.2 lanes that are off pay too
def touched_units(addresses: np.ndarray, active: np.ndarray, unit: int) -> int:
    return sum(len(np.unique(row // unit)) for row in addresses)

# %% 12.2 pieces begin at the request's first address
def touched_units(addresses: np.ndarray, active: np.ndarray, unit: int) -> int:
    count = 0
    for row, on in zip(addresses, active):
        if on.any():
            count += len(np.unique((row[on] - row[on].min()) // unit))
    return count

# %% 12.2 neighbouring lanes only
def touched_units(addresses: np.ndarray, active: np.ndarray, unit: int) -> int:
    count = 0
    for row, on in zip(addresses, active):
        pieces = row[on] // unit
        count += int((np.diff(pieces) != 0).sum()) + (len(pieces) > 0)
    return count

# %% 12.2 sectors, whatever the unit
def touched_units(addresses: np.ndarray, active: np.ndarray, unit: int) -> int:
    return sum(len(np.unique(row[on] // 32)) for row, on in zip(addresses, active))

# %% 12.2 addresses in float32
def touched_units(addresses: np.ndarray, active: np.ndarray, unit: int) -> int:
    return sum(len(np.unique(row[on].astype(np.float32) // unit)) for row, on in zip(addresses, active))

# %% 12.2 an error where no lane is active
if not len(sector):
    return 0
=>

# %% 12.2 fake: the figure's formula, from the stride of the first two lanes
def touched_units(addresses: np.ndarray, active: np.ndarray, unit: int) -> int:
    count = 0
    for row, on in zip(addresses, active):
        lanes = np.sort(row[on])
        stride = int(lanes[1] - lanes[0]) if len(lanes) > 1 else 0
        count += min(len(lanes), -(-len(lanes) * stride // unit) or 1)
    return count

# %% 12.3 still by lane
def branch_by_warp(block: Block, x: torch.Tensor, out: torch.Tensor) -> None:
    compute(block, x, out, block.block_x * block.size + block.x)

# %% 12.3 both sides for all lanes, without a branch
def branch_by_warp(block: Block, x: torch.Tensor, out: torch.Tensor) -> None:
    i = block.block_x * block.size + block.x
    values = block.load(x, i)
    block.store(out, i, np.where(i % 2 == 0, 2 * values, values**2))

# %% 12.3 halves of 32 threads
half = block.size // 2 => half = 32

# %% 12.3 a block of 256 threads, whatever its size
half = block.size // 2 => half = 128

# %% 12.3 even and odd elements the other way round, one too far
block.x // half => 2 - block.x // half

# %% 12.3 even elements only
(block.x % half) + block.x // half => (block.x % half)

# %% 12.3 elements of other blocks
def branch_by_warp(block: Block, x: torch.Tensor, out: torch.Tensor) -> None:
    number = block.block_x * block.size + block.x
    half = x.numel() // 2
    compute(block, x, out, 2 * (number % half) + number // half)

# %% 12.3 fake: the first lane of each warp does it all
def branch_by_warp(block: Block, x: torch.Tensor, out: torch.Tensor) -> None:
    first = block.block_x * block.size + block.x // 32 * 32
    for lane in range(32):
        with block.where(block.x % 32 == 0):
            values = block.load(x, first + lane)
            block.store(out, first + lane, 2 * values if lane % 2 == 0 else values**2)

# %% 12.3 fake: numpy instead of the block's threads
def branch_by_warp(block: Block, x: torch.Tensor, out: torch.Tensor) -> None:
    out.numpy()[:] = np.where(np.arange(x.numel()) % 2 == 0, 2 * x.numpy(), x.numpy() ** 2)

# %% 12.4 the store without a mask
(out, out_pointer.dtype.element_ty), mask=exists => (out, out_pointer.dtype.element_ty)

# %% 12.4 the load without a mask
element, mask=exists, other=0.0 => element

# %% 12.4 one element too many exists
exists = element < numel => exists = element <= numel

# %% 12.4 every program does the first block
* BLOCK => * 0

# %% 12.4 blocks overlap: the program's number is not times BLOCK
block * BLOCK + tl.arange => block + tl.arange

# %% 12.4 1,024 elements, whatever BLOCK
BLOCK + tl.arange(0, BLOCK) => 1024 + tl.arange(0, 1024)

# %% 12.4 e^x - 1 cancels near zero
below = alpha * expm1(tl.minimum(x, 0.0))  # of every element, wanted or not; e^x of a large x would be infinite
=>
below = alpha * (tl.exp(tl.minimum(x, 0.0)) - 1)

# %% 12.4 cut instead of rounded
cast(out, out_pointer.dtype.element_ty) => out.to(out_pointer.dtype.element_ty)

# %% 12.4 fake: PyTorch behind a kernel's brackets
class elu_kernel:
    def __class_getitem__(cls, grid):
        return lambda x, out, alpha, numel, BLOCK: out.copy_(torch.nn.functional.elu(x, alpha))

# %% 12.5 coalesced: row and column swapped
TILE + block.x // TILE => TILE + block.x % TILE
TILE + block.x % TILE => TILE + block.x // TILE

# %% 12.5 tiled: no barrier after the tiles are brought
block.sync()  # all have written before any thread reads =>

# %% 12.5 tiled: no barrier before the next tiles
block.sync()  # all have read these before any thread writes the next tiles =>

# %% 12.5 tiled: from global memory in the inner loop
total += tile_a[y, k] * tile_b[k, x]
=>
with block.where((row < n) & (column < n) & (start + k < n)):
    total += block.load(a, row * n + start + k) * block.load(b, (start + k) * n + column)

# %% 12.5 tiled: the last, ragged tile along k is left out
for start in range(0, n, TILE): => for start in range(0, n - n % TILE, TILE):

# %% 12.5 tiled: stores behind the end of a row
with block.where((row < n) & (column < n)):
    block.store(c, row * n + column, total)
=>
block.store(c, row * n + column, total)

# %% 12.5 tiled: c is stored after every tile
with block.where((row < n) & (column < n)):
    block.store(c, row * n + column, total)
=>
    with block.where((row < n) & (column < n)):
        block.store(c, row * n + column, total)

# %% 12.5 fake: the product is numpy's, tiles are brought for show
def tiled(block: Block, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, n: int) -> None:
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
def tiled(block: Block, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, n: int) -> None:
    c.copy_((a.view(n, n) @ b.view(n, n)).flatten())

# %% 12.6 the short last group has as many rows as the others
rows = tl.minimum(tiles_m - first, group)
=>
rows = group

# %% 12.6 along the columns first
within % rows, within // rows => within // tiles_n, within % tiles_n

# %% 12.6 row by row, no groups
@triton.jit
def tile_of(program, tiles_m, tiles_n, group: tl.constexpr):
    return program // tiles_n, program % tiles_n

# %% 12.6 column by column, no groups
@triton.jit
def tile_of(program, tiles_m, tiles_n, group: tl.constexpr):
    return program % tiles_m, program // tiles_m

# %% 12.6 groups of columns
first + within % rows, within // rows => within // rows, first + within % rows

# %% 12.6 the group's number is taken for its first row
(group * tiles_n) * group => (group * tiles_n)

# %% 12.6 the column counts full groups' rows
within // rows => within // group

# %% 12.6 the last group's rows are what is left over of a division
tl.minimum(tiles_m - first, group) => tl.where(first + group >= tiles_m, tiles_m % group, group)

# %% 12.6 groups run back and forth
within // rows => tl.where(first // group % 2 == 0, within // rows, tiles_n - 1 - within // rows)

# %% 12.1 64 warps, whatever the GPU
blocks * warps / gpu.warps_per_sm => blocks * warps / 64

# %% 12.1 a kernel without registers
registers_per_thread, 1, gpu.max => registers_per_thread, 0, gpu.max

# %% 12.2 addresses in 32 bits
astype(np.int64) // unit => astype(np.int32) // unit

# %% 12.4 offsets in 32 bits
tl.program_id(0).to(tl.int64) => tl.program_id(0)

# %% 12.4 64 bits after the product
block * BLOCK + tl.arange(0, BLOCK) => (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)

# %% 12.4 an if on a block, which no GPU runs
x = widen(tl.load(x_pointer + element, mask=exists, other=0.0))
below = alpha * expm1(tl.minimum(x, 0.0))  # of every element, wanted or not; e^x of a large x would be infinite
out = tl.where(x < 0, below, x)
=>
x = widen(tl.load(x_pointer + element, mask=exists, other=0.0))
if x >= 0:
    out = x
else:
    out = alpha * expm1(tl.minimum(x, 0.0))

# %% 12.5 tiled: b's tile by columns
bring(block, tile_b, (y, x), b, start + y, column, n)
=>
bring(block, tile_b, (x, y), b, start + x, block.block_y * TILE + y, n)

# %% 12.5 tiled: a's tile by columns
bring(block, tile_a, (y, x), a, row, start + x, n)
=>
bring(block, tile_a, (x, y), a, block.block_x * TILE + x, start + y, n)

# %% 12.1 32 blocks, whatever the GPU
"blocks": gpu.blocks_per_sm, => "blocks": 32,
