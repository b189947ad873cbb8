"""Wrong answers that the checks of notebook 10b must catch. Those that hang end at the check's own deadline."""

# %% 10.16 no factor of 2 in the interval
def save_interval(save_s: float, mtbf_s: float) -> float:
    return math.sqrt(save_s * mtbf_s)

# %% 10.16 the interval from save to save, the save in it
def save_interval(save_s: float, mtbf_s: float) -> float:
    return math.sqrt(2 * save_s * mtbf_s) - save_s

# %% 10.16 an interval that does not depend on failures
def save_interval(save_s: float, mtbf_s: float) -> float:
    return 600 * math.sqrt(save_s / 30)

# %% 10.16 the two shares of Young's sum
def lost_share(interval_s: float, save_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    return save_s / interval_s + (interval_s / 2 + restart_s) / mtbf_s

# %% 10.16 Young's sum with the save in the interval
def lost_share(interval_s: float, save_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    return save_s / (interval_s + save_s) + (interval_s / 2 + restart_s) / mtbf_s

# %% 10.16 no restart
math.exp(restart_s / mtbf_s) * math.expm1 => math.expm1

# %% 10.16 no failures in a restart
math.exp(restart_s / mtbf_s) => (1 + restart_s / mtbf_s)

# %% 10.16 the save is no loss
return 1 - interval_s / took => return 1 - (interval_s + save_s) / took

# %% 10.16 a save can't fail
((interval_s + save_s) / mtbf_s) => (interval_s / mtbf_s) + save_s

# %% 10.17 one generator for the batch
for i, row in enumerate(out):
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} sample {first + i}".encode()))
=>
generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} sample {first}".encode()))
for row in out:

# %% 10.17 the rank's own generator, sown anew for each sample
generator = torch.Generator().manual_seed => torch.manual_seed
(row), generator=generator => (row)
(len(row),), generator=generator => (len(row),)

# %% 10.17 writes into the batch that it was given
out = inputs.clone() => out = inputs

# %% 10.17 the row's number instead of the sample's
{first + i} => {i}

# %% 10.17 no seed
{seed} sample => sample

# %% 10.17 seed and number added up
zlib.crc32(f"{seed} sample {first + i}".encode()) => seed + first + i

# %% 10.17 seed and number run into each other
{seed} sample {first + i} => {seed}{first + i}

# %% 10.17 the seed above the 32 bits that the generator looks at
zlib.crc32(f"{seed} sample {first + i}".encode()) => (seed << 32) + first + i

# %% 10.17 Python's own hash, another one in each process
zlib.crc32(f"{seed} sample {first + i}".encode()) => hash(f"{seed} sample {first + i}")

# %% 10.17 the rate is the share that is kept
(len(row), generator=generator) < rate => (len(row), generator=generator) > rate

# %% 10.17 the same positions in all samples
(row), generator=generator => (row), generator=torch.Generator().manual_seed(seed)

# %% 10.17 one replacement for the whole row
(vocab, (len(row),), generator=generator) => (vocab, (1,), generator=generator).expand(len(row))

# %% 10.17 the last token of the vocabulary is never drawn
vocab, (len(row),) => vocab - 1, (len(row),)

# %% 10.18 row by row
full_rows = [((top,) + (0,) * (len(shape) - 1), (bottom - top, *shape[1:]))] if top < bottom else []
=>
full_rows = [((i,) + (0,) * (len(shape) - 1), (1, *shape[1:])) for i in range(top, bottom)]

# %% 10.18 element by element
def span_chunks(shape: tuple[int, ...], first: int, last: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    offsets = []
    for i in range(first, last):
        place = []
        for size in reversed(shape):
            i, at = divmod(i, size)
            place.insert(0, at)
        offsets.append(tuple(place))
    return [(place, (1,) * len(shape)) for place in offsets]

# %% 10.18 always three parts, and some of them empty
if first >= last:
    return []
=>
---
return [((first,) * len(shape), (last - first,) * len(shape))]
=>
return [((first,) * len(shape), (last - first,) * len(shape))] if first < last else []
---
"""Return the chunks of elements begin … end - 1 of row i.""" =>
---
full_rows = [((top,) + (0,) * (len(shape) - 1), (bottom - top, *shape[1:]))] if top < bottom else []
=>
full_rows = [((top,) + (0,) * (len(shape) - 1), (bottom - top, *shape[1:]))]

# %% 10.18 the first row is never in the whole ones
-(-first // row), last // row  # all of rows top … bottom - 1 => first // row + 1, last // row

# %% 10.18 one short at a row's end
row, row => row, row - 1

# %% 10.18 whole rows first
before + full_rows => full_rows + before

# %% 10.18 matrices alone, others as one row
def span_chunks(shape: tuple[int, ...], first: int, last: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    if first >= last:
        return []
    if len(shape) != 2:
        return [((0,) * len(shape), tuple(shape))]
    row = shape[1]
    top, bottom = -(-first // row), last // row
    if top > bottom:
        return [((bottom, first - bottom * row), (1, last - first))]
    before = [((top - 1, first - (top - 1) * row), (1, top * row - first))] if first < top * row else []
    full_rows = [((top, 0), (bottom - top, row))] if top < bottom else []
    after = [((bottom, 0), (1, last - bottom * row))] if last > bottom * row else []
    return before + full_rows + after

# %% 10.18 no tensor without dimensions
def span_chunks(shape: tuple[int, ...], first: int, last: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    if not shape:
        return []
    if first >= last:
        return []
    if len(shape) < 2:
        return [((first,) * len(shape), (last - first,) * len(shape))]
    row = math.prod(shape[1:])
    top, bottom = -(-first // row), last // row  # all of rows top … bottom - 1

    def row_chunks(i: int, begin: int, end: int) -> list:
        """Return the chunks of elements begin … end - 1 of row i."""
        return [((i, *offsets), (1, *sizes)) for offsets, sizes in span_chunks(shape[1:], begin, end)]

    if top > bottom:
        return row_chunks(bottom, first - bottom * row, last - bottom * row)
    before = row_chunks(top - 1, first - (top - 1) * row, row) if first < top * row else []
    full_rows = [((top,) + (0,) * (len(shape) - 1), (bottom - top, *shape[1:]))] if top < bottom else []
    return before + full_rows + row_chunks(bottom, 0, last - bottom * row)

# %% 10.18 one chunk around all of it
def span_chunks(shape: tuple[int, ...], first: int, last: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    if first >= last:
        return []
    if len(shape) < 2:
        return [((first,) * len(shape), (last - first,) * len(shape))]
    row = math.prod(shape[1:])
    top, bottom = first // row, -(-last // row)
    return [((top,) + (0,) * (len(shape) - 1), (bottom - top, *shape[1:]))]

# %% 10.19 writes into the saved ones
chunk.values[target] = other.values[source] => other.values[source] = chunk.values[target]

# %% 10.19 stops at the first chunk that overlaps
chunk.values[target] = other.values[source]
=>
chunk.values[target] = other.values[source]
break

# %% 10.19 a new tensor instead of the chunk's own memory
def fill(wanted: list[Chunk], saved: list[Chunk]) -> None:
    for number, chunk in enumerate(wanted):
        values = chunk.values.clone()
        for other in saved:
            sides = list(zip(chunk.offsets, chunk.values.shape, other.offsets, other.values.shape, strict=True))
            begins = [max(a, b) for a, _, b, _ in sides]
            ends = [min(a + n, b + m) for a, n, b, m in sides]
            if all(begin < end for begin, end in zip(begins, ends, strict=True)):
                spans = list(zip(begins, ends, strict=True))
                target = tuple(slice(begin - a, end - a) for (begin, end), a in zip(spans, chunk.offsets, strict=True))
                source = tuple(slice(begin - b, end - b) for (begin, end), b in zip(spans, other.offsets, strict=True))
                values[target] = other.values[source]
        wanted[number] = chunk._replace(values=values)

# %% 10.19 a slice of it gets another name, nothing is written
chunk.values[target] = other.values[source]
=>
part = chunk.values[target].clone()
part.copy_(other.values[source])

# %% 10.19 saved chunks that are wholly inside alone
if all(begin < end for begin, end in zip(begins, ends, strict=True)):
=>
if all(a <= b and b + m <= a + n for a, n, b, m in sides):

# %% 10.19 no chunks without dimensions
all => sides and all

# %% 10.19 the saved chunk is read from its beginning
source = tuple(slice(begin - b, end - b) for (begin, end), b in zip(spans, other.offsets, strict=True))
=>
source = tuple(slice(0, end - begin) for begin, end in spans)

# %% 10.19 by way of the whole tensor, gaps and all
def fill(wanted: list[Chunk], saved: list[Chunk]) -> None:
    for chunk in wanted:
        whole = torch.zeros(chunk.full_shape, dtype=chunk.values.dtype)
        for other in saved:
            sides = zip(other.offsets, other.values.shape, strict=True)
            whole[tuple(slice(offset, offset + size) for offset, size in sides)] = other.values
        sides = zip(chunk.offsets, chunk.values.shape, strict=True)
        chunk.values.copy_(whole[tuple(slice(offset, offset + size) for offset, size in sides)])

# %% 10.19 no look at whether they overlap
if all(begin < end for begin, end in zip(begins, ends, strict=True)):
=>
if True:

# %% 10.20 named first, then checkpoint.json
file, final = saving / ABOUT, saving.with_suffix("")
file.write_text(sealed(about))
flush(file)
flush(saving)
=>
final = saving.with_suffix("")
---
saving.rename(final)
=>
saving.rename(final)
(final / ABOUT).write_text(sealed(about))
flush(final / ABOUT)
flush(final)

# %% 10.20 checkpoint.json never waits for the disk
flush(file) =>

# %% 10.20 the names in the folder never wait for the disk
flush(saving) =>

# %% 10.20 the new name never waits for the disk
flush(final.parent) =>

# %% 10.20 waits for the disk after the rename alone
flush(file)
flush(saving)
=>
---
saving.rename(final)
=>
saving.rename(final)
flush(final / ABOUT)
flush(final)

# %% 10.20 fsync while the text is still in Python's buffer
file.write_text(sealed(about))
flush(file)
=>
with open(file, "w") as opened:
    json.dump({"format": FORMAT, "version": VERSION} | about, opened)
    os.fsync(opened.fileno())

# %% 10.20 waits for the folder before checkpoint.json is in it
file, final = saving / ABOUT, saving.with_suffix("")
=>
file, final = saving / ABOUT, saving.with_suffix("")
flush(saving)
---
flush(saving) =>

# %% 10.20 waits for the parent once the old ones are gone
def commit(saving: Path, about: dict, keep: int) -> Path:
    file, final = saving / ABOUT, saving.with_suffix("")
    file.write_text(sealed(about))
    flush(file)
    flush(saving)
    saving.rename(final)
    others = [folder for folder in complete(final.parent).values() if folder != final]
    for old in others[: max(0, len(others) - keep + 1)]:
        old.rename(old.with_suffix(DELETING))
    for leaving in final.parent.glob(f"step-*{DELETING}"):
        shutil.rmtree(leaving, ignore_errors=True)
    flush(final.parent)
    return final

# %% 10.20 the old ones first
def commit(saving: Path, about: dict, keep: int) -> Path:
    file, final = saving / ABOUT, saving.with_suffix("")
    file.write_text(sealed(about))
    flush(file)
    flush(saving)
    for old in [path for path in complete(final.parent).values() if path != final][::-1][keep - 1 :]:
        old.rename(old.with_suffix(DELETING))
    for leaving in final.parent.glob(f"step-*{DELETING}"):
        shutil.rmtree(leaving, ignore_errors=True)
    saving.rename(final)
    flush(final.parent)
    for leaving in final.parent.glob(f"step-*{DELETING}"):
        shutil.rmtree(leaving, ignore_errors=True)
    return final

# %% 10.20 old ones are deleted under their good names
old.rename(old.with_suffix(DELETING))
=>
shutil.rmtree(old)

# %% 10.20 one too many is kept
keep + 1 => keep

# %% 10.20 those on their way out stay
for leaving in final.parent.glob(f"step-*{DELETING}"):
    shutil.rmtree(leaving, ignore_errors=True)
=>

# %% 10.20 returns the folder's old name
return final => return saving

# %% 10.20 the last ones by number: the new one may not be among them
others = [folder for folder in complete(final.parent).values() if folder != final]
for old in others[: max(0, len(others) - keep + 1)]:
=>
for old in list(complete(final.parent).values())[:-keep]:

# %% 10.21 A and B the other way round
forgot = {"A": "step", "B": "optimizer", "C": "position"}  # "optimizer", "position" or "step"

# %% 10.21 A and C the other way round
forgot = {"A": "position", "B": "step", "C": "optimizer"}  # "optimizer", "position" or "step"

# %% 10.21 B and C the other way round
forgot = {"A": "optimizer", "B": "position", "C": "step"}  # "optimizer", "position" or "step"

# %% 10.21 all in a ring
forgot = {"A": "step", "B": "position", "C": "optimizer"}  # "optimizer", "position" or "step"

# %% 10.21 one answer for all
forgot = {"A": "optimizer", "B": "optimizer", "C": "optimizer"}  # "optimizer", "position" or "step"

# %% 10.19 through float32
chunk.values[target] = other.values[source] => chunk.values[target] = other.values[source].float()
