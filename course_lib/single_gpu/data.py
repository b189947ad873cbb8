"""Text for training: the standard library's own source as corpus, bytes as tokens, batches with a position.

`TokenBatches` gives rank r of N its share of one global order of samples. The order depends on the seed alone, not on
N, and the position is a single number: a run can stop, change its number of ranks, and continue with the next sample.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import sysconfig
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from course_lib.single_gpu.documents import open_documents
from course_lib.single_gpu.hf_tokenizers import load_tokenizer, lost_characters, special_tokens
from course_lib.single_gpu.same_text import text_sum


def library_files() -> list[Path]:
    """Return the files of the Python standard library's source, without tests and installed packages, by name."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - skipped  # these are not even walked through
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


def corpus(max_characters: int = 8_000_000) -> str:
    """Return the first `max_characters` of the source of the Python standard library, without tests and installed
    packages, in the order of the file names. Bytes that are not UTF-8 are left out.
    """
    texts, size = [], 0
    for file in library_files():
        texts.append(file.read_text(encoding="utf-8", errors="ignore"))
        size += len(texts[-1])
        if size >= max_characters:
            break
    return "".join(texts)[:max_characters]


class ByteTokenizer:
    """One token per byte of UTF-8: nothing to train, nothing to download."""

    vocab_size = 256

    def encode(self, text: str) -> torch.Tensor:
        """Return tokens [n], uint8."""
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    def decode(self, tokens: torch.Tensor) -> str:
        """Return the text of `tokens`, [n]."""
        return bytes(tokens.tolist()).decode(errors="replace")


def text_parts(text: str, size: int = 200_000) -> Iterator[str]:
    """Yield `text` in parts of `size` characters or a little more, cut where byte-level tokenizers (GPT, Llama 3, Qwen)
    cut too: before a space or behind a newline that stands alone. A tokenizer takes 190 bytes of memory per character.
    """
    start, between = 0, re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")
    while start + size < len(text) and (cut := between.search(text, start + size)):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def text_tokens(tokenizer, text: str) -> Iterator[list[int]]:
    """Yield the token ids of `text`, part by part, without special tokens.

    Some tokenizers put a space before any text (Llama 2, Mistral). All parts but the first are read behind a newline,
    whose tokens are left out again, so that they begin as they do inside the text.
    """
    read = functools.partial(tokenizer, add_special_tokens=False, verbose=False)
    for number, part in enumerate(text_parts(text)):
        valid = part.encode(errors="replace").decode()  # JSON can hold half of a surrogate pair
        newline = read("\n")["input_ids"] if number else []
        ids = read(f"\n{valid}" if number else valid)["input_ids"]
        yield ids[len(newline) :] if ids[: len(newline)] == newline else read(valid)["input_ids"]


def read_documents(
    tokenizer, special: tuple, dataset: str, split: str, column: str, limit: int | None, subset: str | None
) -> tuple[torch.Tensor, list[str]]:
    """Return the tokens [n], int32, of a data set, and a line for each kind of data that is not among them: documents
    beyond `limit` or without text, files in no split, characters without a token.

    special: the tokens before and after each document, see special_tokens.
    """
    rows, files_left_out = open_documents(dataset, split, subset, column)
    before, after = special
    ids, count, empty, left_out = array("i"), 0, 0, []  # 4 bytes per token; an int in a list takes 36
    characters: set[str] = set()
    counted = Path(dataset).exists()  # the rest of a data set by name would be downloaded only to be counted
    for position, text in rows:
        count += 1
        if limit is not None and count > limit:
            if counted:
                continue
            break
        if text is None or text == "":
            empty += 1
            continue
        if not isinstance(text, str):
            raise ValueError(f"{position}: column {column} is of type {type(text).__name__}; it must be a string")
        characters.update(text)
        ids.extend(before)
        for part in text_tokens(tokenizer, text):
            ids.extend(part)
        ids.extend(after)
    used = count if limit is None else min(limit, count)
    if used < count:
        left_out.append(f"{used:,} of {count:,} documents" if counted else f"the first {used:,} documents; it has more")
    if empty:
        left_out.append(f"{empty:,} of {used:,} documents have no text and are left out")
    tokens = torch.frombuffer(ids, dtype=torch.int32) if ids else torch.empty(0, dtype=torch.int32)
    return tokens, left_out + files_left_out + lost_characters(tokenizer, characters)


def digest(sources: tuple[str, ...], options: tuple) -> str:
    """Return 16 hexadecimal digits that change with the options, and with any file of the sources (paths or names)."""
    paths = [Path(source).resolve() if Path(source).exists() else source for source in sources]
    files = [(Path(top), file) for top in sources for file in (Path(top), *Path(top).rglob("*"))]
    stats = [(str(file.relative_to(top)), file.stat()) for top, file in sorted(files) if file.is_file()]
    changed = [(name, stat.st_mtime_ns, stat.st_size) for name, stat in stats]  # names: they decide on the split
    return hashlib.sha256(repr(("v5", paths, options, changed)).encode()).hexdigest()[:16]


def hf_tokens(
    dataset: str,
    tokenizer: str,
    split: str = "train",
    column: str = "text",
    documents: int | None = None,
    subset: str | None = None,
):
    """Return tokens [n], and the tokenizer, of a data set and a tokenizer by file, folder or name at Hugging Face.
    Needs `[hf]`. A text file is one document. documents: how many at most; None: all. subset: one of the configurations
    of a data set. Rank 0 prints a line about omitted rows. Raises ValueError, in one line.

    One process of a machine reads and tokenizes; the others, and later runs, map the file that it has left in the
    user's cache folder. A file or folder that changes is read again; for a data set by name, delete that file.
    """
    if documents is not None and documents < 1:
        raise ValueError(f"documents {documents}: 1 or more, or None for all")
    hf_tokenizer, messages = load_tokenizer(tokenizer)
    special = special_tokens(hf_tokenizer)

    def read() -> torch.Tensor:
        try:
            tokens, left_out = read_documents(hf_tokenizer, special, dataset, split, column, documents, subset)
        except (ValueError, OSError) as error:
            raise ValueError(f"{dataset}: {error}") from None
        notes.write_text("\n".join(left_out))
        return tokens

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llm_training_at_scale"
    key = digest((dataset, tokenizer), (split, column, documents, subset, special))
    notes = cache / f"tokens-{key}.txt"  # later runs, which do not read, say the same
    try:
        tokens = mapped_once(cache / f"tokens-{key}.int32", read)
    except OSError as error:
        raise OSError(f"the folder for tokens, {cache} (or below $XDG_CACHE_HOME): {error}") from None
    if not (dist.is_initialized() and dist.get_rank()):
        left_out = notes.read_text().splitlines() if notes.exists() else []
        lines = [f"{tokenizer}: {line}\n" for line in messages] + [f"{dataset}: {line}\n" for line in left_out]
        print("".join(lines), end="")
    return tokens, hf_tokenizer


def mapped_once(file: Path, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return `make()`, an int32 tensor [n], from a mapped file: the processes of a machine share its pages.

    The first process makes the file, the others wait for it. A file that exists is complete.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the process, however that ends
        if not file.exists():
            made, part = make(), file.with_suffix(f".{os.getpid()}.part")
            if made.numel() == 0:
                return made  # nothing to map
            made.numpy().tofile(part)  # raises if the disk is full; a write to a mapped file would be SIGBUS
            part.replace(file)
    return torch.from_file(str(file), shared=False, size=file.stat().st_size // 4, dtype=torch.int32)


def seeded(number: int) -> torch.Generator:
    """Return a CPU generator seeded by any integer; one of more than 64 bits is reduced modulo a prime."""
    if not -(2**63) <= number < 2**64:
        number %= 2**63 - 25
    return torch.Generator().manual_seed(number)


class TokenBatches:
    """Endless batches of `tokens` ([n]) for one rank: pairs of inputs and targets, each [batch, seq], int64.

    The tokens are cut into windows, which are shuffled anew in each epoch. The last (n - 1) % seq tokens fill no window
    and are never drawn. Raises ValueError if the text is shorter than one window, or the rank is not one of
    `world_size`.
    """

    def __init__(self, tokens: torch.Tensor, batch: int, seq: int, rank: int = 0, world_size: int = 1, seed: int = 0):
        self.tokens, self.batch, self.seq = tokens, batch, seq
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.windows = (len(tokens) - 1) // seq
        self.position = 0  # samples that all ranks together have consumed
        self.shuffled: tuple[int, list[int]] | None = None  # an epoch, and its order
        if self.windows < 1:
            raise ValueError(f"{len(tokens)} tokens hold no window of {seq} + 1 tokens")
        if batch < 1 or not 0 <= rank < world_size:
            raise ValueError(
                f"batch {batch}, rank {rank} of {world_size}: batch must be 1 or more, and rank below world_size"
            )

    def order(self, epoch: int) -> list[int]:
        """Return the window numbers of `epoch`, shuffled by the seed and the epoch alone."""
        if self.shuffled is None or self.shuffled[0] != epoch:
            generator = seeded(1_000_003 * self.seed + epoch)
            self.shuffled = (epoch, torch.randperm(self.windows, generator=generator).tolist())
        return self.shuffled[1]

    @property
    def fingerprint(self) -> list[int]:
        """The number of tokens and a checksum, which identify the text."""
        return text_sum(self.tokens)

    def state_dict(self) -> dict[str, int]:
        """Return the state that brings a run back to this sample, on any number of ranks."""
        return {"position": self.position, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from the sample at which `state` was taken."""
        self.position, self.seed, self.shuffled = state["position"], state["seed"], None

    def __iter__(self):
        return self

    # exercise 01.1
    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's next inputs and targets, each [batch, seq], int64, and move `position` on.

        `position` grows by the samples of all ranks. Later calls leave the returned tensors as they are.
        """
        first = self.position + self.rank * self.batch
        self.position += self.batch * self.world_size
        windows = [self.order(n // self.windows)[n % self.windows] for n in range(first, first + self.batch)]
        rows = torch.stack([self.tokens[w * self.seq : (w + 1) * self.seq + 1] for w in windows]).long()
        return rows[:, :-1], rows[:, 1:]
