"""The text of a run: the sources that its settings name, as sequences to train on and to evaluate."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from course_lib.single_gpu.errors import one_line_message
from course_lib.single_gpu.hf_tokenizers import load_tokenizer
from course_lib.train.batches import HeldOut, Mixture
from course_lib.train.settings import Settings
from course_lib.train.sources import Source, held_out_source, sources_of
from course_lib.train.streams import TokenStream, cache_folder
from course_lib.train.token_files import has_tokens, token_file_stream
from course_lib.train.tokens import ByteEncoder, TokenizerEncoder, text_stream
from course_lib.train.windows import Windows

DAYS = datetime.timedelta(days=30)  # a machine waits for others, which may still tokenize


class Text(NamedTuple):
    """vocab: the number of tokens that there are. tokenizer: of transformers, or None for bytes and for files of
    tokens. lines: to print on rank 0, on data that is left out.
    """

    train: Mixture
    held_out: HeldOut | None
    vocab: int
    tokenizer: Any
    lines: list[str]


def open_text(settings: Settings) -> Text:
    """Return the text that the settings name. Its tokens are made once per machine.

    With a default process group this is collective, and checks that all ranks have the same text. Raises ValueError, on
    all ranks, in one line.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return opened(settings)
    group = dist.new_group(backend="gloo", timeout=DAYS)
    try:
        return same_on_all_ranks(group, lambda: opened(settings))
    finally:
        dist.destroy_process_group(group)


def same_on_all_ranks(group: dist.ProcessGroup, open_local: Callable[[], Text]) -> Text:
    """Return the text of this rank. Raises ValueError on all ranks if one has none, or another than rank 0."""
    text, failure = None, ""
    try:
        text = open_local()
    except ValueError as error:
        failure = one_line_message(error)
    identity = (text.vocab, text.train.tokens, text.train.fingerprint) if text else None
    ranks: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, (failure, identity), group)
    for failed, _ in ranks:
        if failed:
            raise ValueError(failed)
    for rank, (_, other) in enumerate(ranks):
        if other != ranks[0][1]:
            (vocab, tokens, _), (first_vocab, first_tokens, _) = other, ranks[0][1]
            raise ValueError(
                f"rank {rank} has another text than rank 0 ({tokens:,} tokens of a vocabulary of {vocab:,}; rank 0 has "
                f"{first_tokens:,} tokens of a vocabulary of {first_vocab:,}): all machines need the same files, or "
                "for the course's text the same version of Python"
            )
    assert text is not None
    return text


def opened(settings: Settings) -> Text:
    """Return the text that the settings name, on this machine. Raises ValueError, in one line."""
    data, seq, evaluation = settings.data, settings.run.seq, settings.evaluation
    sources, separate = sources_of(data), held_out_source(settings)
    name = settings.tokenizer.tokenizer
    try:
        tokenizer, lines = load_tokenizer(name) if name else (None, [])
    except ImportError as error:
        raise ValueError(f"{error}; a tokenizer needs pip install -e '.[hf]'") from None
    lines = [f"{name}: {line}" for line in lines]
    every = sources + ([separate] if separate else [])
    streams, vocab = open_streams(every, tokenizer, data.cache)
    lines += [f"{stream.name}: {note}" for stream in streams for note in stream.notes]

    def cut(stream: TokenStream, first: int = 0, count: int | None = None) -> Windows:
        windows = Windows(stream, seq, data.document_masks, first, count)
        if windows.count < 1 or windows.targets < 1:
            raise ValueError(
                f"{stream.name}: {stream.tokens:,} tokens in {stream.documents:,} documents leave no token to predict "
                f"in {max(windows.count, 0):,} sequences"
            )
        return windows

    held: list[Windows] = []
    train = [cut(stream) for stream in streams[: len(sources)]]
    shares = [source.weight or windows.stream.tokens for source, windows in zip(sources, train, strict=True)]
    shares = [share / sum(shares) for share in shares]
    held_out = None
    if separate:
        held = [cut(streams[-1], 0, evaluation.eval_sequences)]
        held_out = HeldOut(held, [1.0], evaluation.eval_sequences)
    elif evaluation.eval_every:
        for number, windows in enumerate(train):
            to_train = windows.count - max(1, round(evaluation.eval_share * windows.count))
            if to_train < 1:
                sequences = f"{windows.count:,} sequence{'s' if windows.count > 1 else ''}"
                raise ValueError(
                    f"{windows.stream.name}: {windows.stream.tokens:,} tokens fill {sequences} of {seq}, "
                    "which cannot be split into training and held-out text: change eval_share, or set eval_dataset"
                )
            train[number], rest = cut(windows.stream, 0, to_train), cut(windows.stream, to_train)
            held.append(rest)
        held_out = HeldOut(held, shares, evaluation.eval_sequences)
    most = max(windows.most_documents() for windows in train + held)
    tokens = sum(windows.stream.tokens for windows in train)
    return Text(Mixture(train, shares, seq, data.document_masks, tokens, most), held_out, vocab, tokenizer, lines)


def open_streams(sources: list[Source], tokenizer: Any, cache: str | None) -> tuple[list[TokenStream], int]:
    """Return the tokens of each source, and the size of the vocabulary: of the tokenizer, or of bytes; for files of
    tokens without a tokenizer, 1 + the largest token. Raises ValueError, in one line that names the source.
    """
    folder, streams, largest = cache_folder(cache), [], -1
    of_tokens = [has_tokens(source.dataset) for source in sources]
    encoder = TokenizerEncoder(tokenizer) if tokenizer else ByteEncoder()
    vocab = None if tokenizer is None and all(of_tokens) else encoder.vocab
    for source, are_tokens in zip(sources, of_tokens, strict=True):
        try:
            if are_tokens:
                end = tokenizer.eos_token_id if tokenizer and source.end_token is None else source.end_token
                stream, most = token_file_stream(folder, source, end, vocab)
                largest = max(largest, most)
            else:
                if source.end_token is not None:
                    raise ValueError("end_token is for files of tokens; a text's documents end by themselves")
                key = source.key("text", encoder.key, encoder.before, encoder.after)
                stream = text_stream(folder / f"text-{key}", source, encoder)
        except ImportError as error:
            raise ValueError(f"{source.name}: {error}; this data set needs pip install -e '.[hf]'") from None
        except (ValueError, OSError) as error:
            raise ValueError(f"{source.name}: {one_line_message(error)}") from None
        streams.append(stream)
    return streams, 1 + largest if vocab is None else vocab
