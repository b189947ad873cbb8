"""Right answers in another style than the solutions, that the checks of notebook 10b must accept."""

# %% 10.16 by powers and exponentials
def save_interval(save_s: float, mtbf_s: float) -> float:
    return (2 * save_s * mtbf_s) ** 0.5


def lost_share(interval_s: float, save_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    rate = 1 / mtbf_s
    useful = rate * interval_s * math.exp(-rate * restart_s) / math.expm1(rate * (interval_s + save_s))
    return 1 - useful

# %% 10.17 rows put together, seeds by another hash
import hashlib


def drop_tokens(inputs: torch.Tensor, rate: float, vocab: int, seed: int, first: int) -> torch.Tensor:
    rows = []
    for number, row in enumerate(inputs, start=first):
        generator = torch.Generator()
        generator.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:4], "big"))
        chosen = torch.rand(row.shape, generator=generator) < rate
        rows.append(torch.where(chosen, torch.randint(0, vocab, row.shape, generator=generator), row))
    return torch.stack(rows)

# %% 10.18 the largest aligned chunk first
def span_chunks(shape: tuple[int, ...], first: int, last: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    chunks, at = [], first
    while at < last:
        offsets = tuple(at // stride % size for stride, size in zip(strides, shape))
        for axis, stride in enumerate(strides):
            if at % stride == 0 and at + stride <= last:
                count = min((last - at) // stride, shape[axis] - offsets[axis])
                chunks.append((offsets, (1,) * axis + (count,) + tuple(shape[axis + 1 :])))
                at += count * stride
                break
        else:
            return [((), ())]  # a tensor without dimensions
    return chunks

# %% 10.19 narrows both, a dimension at a time
def fill(wanted: list[Chunk], saved: list[Chunk]) -> None:
    for target in wanted:
        for source in saved:
            into, out_of = target.values, source.values
            for dim, (here, there) in enumerate(zip(target.offsets, source.offsets)):
                begin = max(here, there)
                length = min(here + target.values.shape[dim], there + source.values.shape[dim]) - begin
                if length <= 0:
                    break
                into, out_of = into.narrow(dim, begin - here, length), out_of.narrow(dim, begin - there, length)
            else:
                into.copy_(out_of)

# %% 10.20 with open and replace
def commit(saving: Path, about: dict, keep: int) -> Path:
    root, final = saving.parent, saving.parent / saving.stem
    with open(saving / ABOUT, "w") as out:
        out.write(sealed(about))
    for path in (saving / ABOUT, saving):
        flush(path)
    saving.replace(final)
    flush(root)
    kept = {final, *[folder for folder in complete(root).values() if folder != final][::-1][: max(0, keep - 1)]}
    for folder in complete(root).values():
        if folder not in kept:
            folder.replace(folder.with_suffix(DELETING))
    for folder in sorted(root.glob("*" + DELETING)):
        shutil.rmtree(folder, ignore_errors=True)
    return final

# %% 10.21 one at a time
forgot = {}
forgot["A"] = "optimizer"
forgot["B"] = "step"
forgot["C"] = "position"
