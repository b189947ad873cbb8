"""Tokenizers of transformers: loading one, its special tokens, and the characters that it has no token for."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from course_lib.single_gpu.documents import HUB_NAME, loading_error

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")


def has_tokenizer(folder: Path) -> bool:
    """Return whether a model's folder has a tokenizer of transformers."""
    return any(folder.glob("tokenizer*"))


def load_tokenizer(tokenizer: str) -> tuple:
    """Return the tokenizer of a name, a folder or a tokenizer.json, and a list of notes on its end token.

    A tokenizer that names no end token gets the first of END_TOKENS in its vocabulary. Raises ValueError, in one line.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

    path, notes = Path(tokenizer), []
    loaded: PreTrainedTokenizerBase
    works = "a tokenizer is a tokenizer.json, a folder with one, or a name at Hugging Face"
    if not path.exists() and (path.suffix == ".json" or not re.fullmatch(HUB_NAME, tokenizer)):
        raise ValueError(f"{tokenizer}: no such file or folder; {works}")
    alone = path.is_file() and not (path.name == "tokenizer.json" and (path.parent / "tokenizer_config.json").is_file())
    try:
        if alone:
            loaded = PreTrainedTokenizerFast(tokenizer_file=tokenizer)
        else:  # the folder of a tokenizer.json names the end token
            source = str(path.parent) if path.is_file() else tokenizer
            loaded = AutoTokenizer.from_pretrained(source, trust_remote_code=False)  # None would ask on the terminal
    except Exception as error:
        reason = "it has no tokenizer that can be read" if path.exists() else "no such file or folder"
        raise ValueError(f"{tokenizer}: {reason}; {works} ({loading_error(error)})") from None
    vocabulary = loaded.get_vocab()
    if vocabulary.keys() <= set(loaded.all_special_tokens):  # transformers makes one of a config.json alone
        raise ValueError(f"{tokenizer}: its tokenizer has no vocabulary; {works}")
    if loaded.eos_token_id is None:
        loaded.eos_token = next((token for token in END_TOKENS if token in vocabulary), None)
        notes.append(
            f"no end token is named; {loaded.eos_token} of its vocabulary ends each document"
            if loaded.eos_token
            else "there is no end token: documents follow each other without one"
        )
    return loaded, notes


def special_tokens(tokenizer) -> tuple[list[int], list[int]]:
    """Return the token ids that `tokenizer` puts before and after a text, and the end token once at the end."""
    special = tokenizer.all_special_tokens  # a vocabulary may lack the letter a: of DNA, of one script
    texts = ("a", *(token for token in tokenizer.get_vocab() if token not in special))
    for text in texts:
        if bare := tokenizer(text, add_special_tokens=False)["input_ids"]:
            break
    full = tokenizer(text, add_special_tokens=True)["input_ids"]
    start = next((n for n in range(len(full)) if full[n : n + len(bare)] == bare), 0)
    before, after, end = full[:start], full[start + len(bare) :], tokenizer.eos_token_id
    return before, after + ([] if end in (None, *after[-1:]) else [end])


def may_lose_characters(tokenizer) -> bool:
    """Return whether the tokenizer has no token for some characters, not even an unknown one."""
    if tokenizer.unk_token_id is not None:
        return False
    return not tokenizer("\ue000", add_special_tokens=False, verbose=False)["input_ids"]  # of no language: bytes


def lost_characters(tokenizer, characters: set[str]) -> list[str]:
    """Return a note if the tokenizer `tokenizer` has no token for some characters of a text, not even an unknown
    one.
    """
    if not may_lose_characters(tokenizer):
        return []
    read = functools.partial(tokenizer, add_special_tokens=False, verbose=False)
    lost = sorted(each for each in characters if each.isprintable() and each != " " and not read(each)["input_ids"])
    shown = " ".join(lost[:10] + ["..."] * (len(lost) > 10))
    return [f"the tokenizer has no token for {len(lost):,} characters, which are left out: {shown}"] if lost else []
