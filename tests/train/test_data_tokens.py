"""course_lib.train: text becomes tokens once per machine, also after a kill or on a full disk, and files of tokens are
read as they are. Needs no GPU.
"""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from course_lib.single_gpu.data import library_files
from course_lib.train import tokens
from course_lib.train.settings import Settings, SettingsError
from course_lib.train.text import open_text
from course_lib.train.tokens import ByteEncoder, TokenizerEncoder


@pytest.fixture
def words(tmp_path):
    """A folder with a tokenizer of five words and an end token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.WordLevel({"<end>": 0, "<?>": 1, "where": 2, "memory": 3, "goes": 4}, unk_token="<?>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>", unk_token="<?>")
    tokenizer.save_pretrained(tmp_path / "words")
    return str(tmp_path / "words")


@pytest.fixture
def settings(tmp_path):
    """Settings of a short sequence, with a cache of their own."""
    made = Settings()
    made.data.cache, made.run.seq = str(tmp_path / "cache"), 4
    return made


def json_lines(file: Path, texts: list) -> str:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(file)


def stream_of(text, source: int = 0):
    return text.train.windows[source].stream


def all_tokens(text, source: int = 0) -> list[int]:
    stream = stream_of(text, source)
    return stream.read(0, stream.tokens).tolist()


def all_ends(text, source: int = 0) -> list[int]:
    stream = stream_of(text, source)
    return [int(end) for ends in stream.ends_in(0, stream.tokens) for end in ends]


def one_line(settings: Settings) -> str:
    with pytest.raises(ValueError) as raised:
        open_text(settings)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def encoded(*texts: str) -> list[int]:
    return [token for text in texts for token in text.encode()]


# Text.


def test_the_default_text_is_the_standard_library_in_bytes(settings):
    settings.run.seq = 128
    text = open_text(settings)
    files = [file.read_text(errors="ignore") for file in library_files()]
    assert text.vocab == 256 and text.tokenizer is None and text.lines == [] and text.held_out is None
    assert all_tokens(text) == encoded(*files)
    assert np.diff([0, *all_ends(text)]).tolist() == [len(each.encode()) for each in files if each]


def test_each_kind_of_text(settings, words, tmp_path):
    from datasets import Dataset

    texts = ["where memory goes", "memory leaks", "goes"]
    json_lines(tmp_path / "a.jsonl", texts)
    (tmp_path / "folder").mkdir()
    Dataset.from_dict({"text": texts}).to_parquet(tmp_path / "folder" / "train.parquet")
    Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "saved")
    (tmp_path / "a.txt").write_text("where memory goes")
    settings.tokenizer.tokenizer = words
    for name in ("a.jsonl", "folder", "saved"):
        settings.data.dataset = str(tmp_path / name)
        for _ in range(2):  # the second time from the cache
            text = open_text(settings)
            assert all_tokens(text) == [2, 3, 4, 0, 3, 1, 0, 4, 0] and all_ends(text) == [4, 7, 9]
            assert text.vocab == 5 and text.lines == [] and stream_of(text).shards[0].tokens.dtype == np.uint16
    settings.data.dataset = str(tmp_path / "a.txt")
    assert all_tokens(open_text(settings)) == [2, 3, 4, 0]
    settings.tokenizer.tokenizer = None
    assert all_tokens(open_text(settings)) == encoded("where memory goes")


def test_a_large_vocabulary_is_stored_in_32_bits(settings, words, tmp_path):
    file = Path(words) / "tokenizer.json"
    saved = json.loads(file.read_text())
    saved["model"]["vocab"]["large"] = 2**16
    file.write_text(json.dumps(saved))
    settings.tokenizer.tokenizer = words
    settings.data.dataset = json_lines(tmp_path / "a.jsonl", ["large goes"])
    text = open_text(settings)
    assert all_tokens(text) == [2**16, 4, 0] and text.vocab == 2**16 + 1
    assert stream_of(text).shards[0].tokens.dtype == np.int32


def test_parts_of_a_document_are_read_as_they_are_inside_it(settings, tmp_path, monkeypatch):
    """By a tokenizer that puts a space before any text, in batches that end within a document."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {each: n for n, each in enumerate(["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    model = Tokenizer(models.BPE(alphabet, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>")
    document = "one two\nthree  four\n\nfive\nsix seven eight " * 20
    expected = tokenizer(document)["input_ids"]
    for size, batch in ((1, 1), (7, 300), (1000, 10_000)):
        monkeypatch.setattr(tokens, "PART_CHARACTERS", size)
        monkeypatch.setattr(tokens, "BATCH_CHARACTERS", batch)
        settings.data.cache = str(tmp_path / f"cache{size}")
        settings.data.dataset = json_lines(tmp_path / "a.jsonl", [document, "one", document])
        tokenizer.save_pretrained(tmp_path / "bytes")
        settings.tokenizer.tokenizer = str(tmp_path / "bytes")
        assert all_tokens(open_text(settings)) == [*expected, 0, *tokenizer("one")["input_ids"], 0, *expected, 0]


def test_nothing_is_left_out_silently_by_any_run(settings, words, tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    file = settings.data.dataset = json_lines(tmp_path / "a.jsonl", ["AC", None, "", "xGT", "T"])
    bases = Tokenizer(models.BPE({token: n for n, token in enumerate(["<end>", *"ACGT"])}, []))
    PreTrainedTokenizerFast(tokenizer_object=bases, eos_token="<end>").save_pretrained(tmp_path / "bases")
    settings.tokenizer.tokenizer, settings.data.documents = str(tmp_path / "bases"), 4
    for _ in range(2):
        text = open_text(settings)
        assert all_tokens(text) == [1, 2, 0, 3, 4, 0]
        assert text.lines == [
            f"{file}: 4 of 5 documents",
            f"{file}: 2 of 4 documents have no text and are left out",
            f"{file}: the tokenizer has no token for 1 characters, which are left out: x",
        ]


def test_text_is_tokenized_once_and_again_if_its_file_changes(settings, tmp_path):
    settings.data.dataset = json_lines(tmp_path / "a.jsonl", ["one two"])
    with mock.patch.object(ByteEncoder, "encode", autospec=True, side_effect=ByteEncoder.encode) as encode:
        first, again = open_text(settings), open_text(settings)
        assert encode.call_count == 1 and first.train.fingerprint == again.train.fingerprint
        json_lines(tmp_path / "a.jsonl", ["one three"])
        changed = open_text(settings)
    assert all_tokens(changed) == encoded("one three") and changed.train.fingerprint != first.train.fingerprint


# Shards, a killed process, a full disk.

DOCUMENTS = [f"document {number} " * (1 + number % 5) for number in range(120)]


@pytest.fixture
def small_shards(settings, tmp_path, monkeypatch):
    """Shards of about 300 tokens."""
    monkeypatch.setattr(tokens, "SHARD_TOKENS", 300)
    monkeypatch.setattr(tokens, "BATCH_CHARACTERS", 400)
    settings.data.dataset = json_lines(tmp_path / "a.jsonl", DOCUMENTS)
    return settings


def test_shards_hold_complete_documents(small_shards, tmp_path):
    text = open_text(small_shards)
    stream = stream_of(text)
    assert len(stream.shards) > 10 and all(shard.ends[-1] == len(shard.tokens) for shard in stream.shards)
    assert all_tokens(text) == encoded(*DOCUMENTS)
    assert all_ends(text) == np.cumsum([len(each) for each in DOCUMENTS]).tolist()
    for start in range(0, stream.tokens, 37):
        assert stream.read(start, start + 700).tolist() == encoded(*DOCUMENTS)[start : start + 700]
        expected = [end for end in all_ends(text) if start < end <= start + 700]
        assert np.concatenate([*stream.ends_in(start, start + 700)]).tolist() == expected
        assert stream.count_ends(start, start + 700) == len(expected)
    other = Settings()  # one shard
    other.data.cache, other.run.seq, other.data.dataset = str(tmp_path / "other"), 4, small_shards.data.dataset
    with mock.patch.object(tokens, "SHARD_TOKENS", 10**6):
        assert open_text(other).train.fingerprint == text.train.fingerprint


TOKENIZES = """
import sys, time
from course_lib.train import tokens
from course_lib.train.settings import read_settings
from course_lib.train.text import open_text

encode, tokens.SHARD_TOKENS, tokens.BATCH_CHARACTERS = tokens.ByteEncoder.encode, 300, 400

def slowly(self, parts):
    time.sleep(0.02)
    return encode(self, parts)

tokens.ByteEncoder.encode = slowly
open_text(read_settings(sys.argv[1:]))
"""


def test_a_killed_process_loses_the_shard_that_it_was_writing_alone(small_shards, tmp_path):
    cache = Path(small_shards.data.cache)
    command = [sys.executable, "-c", TOKENIZES, "--dataset", small_shards.data.dataset, "--cache", str(cache)]
    child = subprocess.Popen(command)
    while not list(cache.glob("*/00002.ends")):
        assert child.poll() is None
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait()
    (manifest,) = cache.glob("*/manifest.json")
    done = json.loads(manifest.read_text())
    assert not done["complete"] and 2 <= len(done["shards"]) and done["rows"] < len(DOCUMENTS)
    with mock.patch.object(ByteEncoder, "encode", autospec=True, side_effect=ByteEncoder.encode) as encode:
        text = open_text(small_shards)
    read = [part for call in encode.call_args_list for part, _ in call.args[1]]
    assert read == DOCUMENTS[done["rows"] :] and all_tokens(text) == encoded(*DOCUMENTS)
    assert not list(cache.rglob("*.part"))


def test_a_full_disk_is_one_line_and_the_next_run_continues(small_shards, tmp_path):
    """The disk is full for one file, which must not be larger than 6,000 bytes."""
    texts = [*DOCUMENTS[:60], "long " * 2000, *DOCUMENTS[60:]]
    json_lines(tmp_path / "a.jsonl", texts)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, hard))
    try:
        said = one_line(small_shards)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (folder,) = Path(small_shards.data.cache).iterdir()
    assert said == (
        f"{small_shards.data.dataset}: the folder for tokens, {folder}: File too large; complete shards in it stay, "
        "and the next run continues with them"
    )
    kept = json.loads((folder / "manifest.json").read_text())["rows"]
    assert 40 < kept <= 60 and not list(folder.glob("*.part"))
    with mock.patch.object(ByteEncoder, "encode", autospec=True, side_effect=ByteEncoder.encode) as encode:
        text = open_text(small_shards)
    assert encode.call_args_list[0].args[1][0][0] == texts[kept]
    assert all_tokens(text) == encoded(*texts)


def test_a_damaged_shard_is_named(small_shards):
    open_text(small_shards)
    (file,) = Path(small_shards.data.cache).glob("*/00001.tokens")
    for damage in (lambda: file.write_bytes(b"ab"), file.unlink):
        damage()
        assert one_line(small_shards).endswith(
            f": {file} is gone or damaged; delete its folder, and it is written again"
        )


def test_a_cache_that_cannot_be_written_is_named(settings, tmp_path):
    (tmp_path / "file").write_text("")
    settings.data.cache = str(tmp_path / "file")
    assert re.match(rf"the Python .*: the folder for tokens, {tmp_path}/file/text-\w+: Not a dir", one_line(settings))


# Files of tokens.

TOKENS = [5, 6, 0, 7, 8, 9, 0, 5]


def write_tokens(file: Path, ids: list[int], dtype: str = "uint16", magic: int | None = None) -> str:
    header = np.zeros(256, np.int32)
    header[:3] = magic or 0, 1, len(ids)
    file.write_bytes((header.tobytes() if magic else b"") + np.array(ids, dtype).tobytes())
    return str(file)


def test_files_of_tokens(settings, tmp_path):
    np.save(tmp_path / "a.npy", np.array(TOKENS, np.int64))
    for dtype in ("uint16", "int32", "uint32"):
        write_tokens(tmp_path / f"{dtype}.bin", TOKENS, dtype)
    write_tokens(tmp_path / "gpt2.bin", TOKENS, magic=20240520)
    write_tokens(tmp_path / "llama3.bin", TOKENS, "uint32", 20240801)
    for name, dtype in [("a.npy", "uint16"), *((f"{each}.bin", each) for each in ("uint16", "int32", "uint32"))] + [
        ("gpt2.bin", "int32"),
        ("llama3.bin", "uint16"),
    ]:
        settings.data.dataset, settings.data.token_dtype = str(tmp_path / name), dtype
        for end, ends in ((None, [8]), (0, [3, 7, 8]), (5, [1, 8])):
            settings.data.end_token = end
            text = open_text(settings)
            assert (all_tokens(text), all_ends(text), text.vocab, text.lines) == (TOKENS, ends, 10, [])
            base = stream_of(text).shards[0].tokens
            while not isinstance(base, np.memmap):
                base = base.base
    settings.data.documents, settings.data.end_token = 2, 0
    text = open_text(settings)
    assert all_tokens(text) == TOKENS[:7] and text.lines == [f"{settings.data.dataset}: 2 of 3 documents"]


def test_the_end_token_is_the_tokenizer_s(settings, words, tmp_path):
    settings.tokenizer.tokenizer = words
    file = settings.data.dataset = write_tokens(tmp_path / "a.bin", [2, 3, 0, 4, 0])
    text = open_text(settings)
    assert all_ends(text) == [3, 5] and text.vocab == 5 and text.lines == []
    write_tokens(tmp_path / "a.bin", [2, 3, 4, 4])
    assert open_text(settings).lines == [
        f"{file}: the end token 0 ends no document within a file: each file is one document"
    ]
    write_tokens(tmp_path / "a.bin", [2, 3, 0, 5, 0])
    assert one_line(settings) == f"{file}: a.bin: it has the token 5; the tokenizer has 5, from 0 on"


def test_the_scan_of_a_file_happens_once_and_in_chunks(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("course_lib.train.token_files.CHUNK", 3)
    settings.data.dataset, settings.data.end_token = write_tokens(tmp_path / "a.bin", TOKENS * 5), 0
    assert all_ends(open_text(settings)) == [n + 1 for n, token in enumerate(TOKENS * 5) if token == 0] + [40]
    with mock.patch("course_lib.train.token_files.index", side_effect=AssertionError):
        open_text(settings)
    write_tokens(tmp_path / "a.bin", [1, 0, 2])
    assert all_ends(open_text(settings)) == [2, 3]


def test_a_folder_of_token_files(settings, tmp_path):
    """Its split is in the names of its files; other files are told."""
    folder = tmp_path / "tokens"
    folder.mkdir()
    for name, ids in (("train_1.bin", [1, 2, 3]), ("train_2.bin", [4, 5]), ("val_1.bin", [6, 7])):
        write_tokens(folder / name, ids)
    (folder / "README.md").write_text("")
    settings.data.dataset = str(folder)
    text = open_text(settings)
    assert all_tokens(text) == [1, 2, 3, 4, 5] and all_ends(text) == [3, 5]
    assert text.lines == [f"{folder}: 1 of 3 files are not read, by name or kind: val_1.bin"]
    settings.data.split = "val"
    assert all_tokens(open_text(settings)) == [6, 7]
    settings.data.split = "test"
    assert one_line(settings) == f"{folder}: there is no split test: no name of a file has it"


def test_files_that_hold_no_tokens_are_named(settings, tmp_path):
    np.save(tmp_path / "two.npy", np.zeros((2, 2), np.int32))
    np.save(tmp_path / "floats.npy", np.zeros(2, np.float32))
    np.save(tmp_path / "negative.npy", np.array([1, -1]))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "text.npy").write_text("text")
    (tmp_path / "empty.bin").write_bytes(b"")
    (tmp_path / "odd.bin").write_bytes(b"abc")
    write_tokens(tmp_path / "short.bin", [1, 2], magic=20240520)
    with open(tmp_path / "short.bin", "ab") as out:
        out.write(b"ab")
    for name, reason in {
        "two.npy": "it has int32 of shape [2, 2]; tokens are integers, [n]",
        "floats.npy": "it has float32 of shape [2]; tokens are integers, [n]",
        "negative.npy": "it has the token -1; tokens are 0 or above",
        "objects.npy": "this is not an array in NumPy's format",
        "text.npy": "this is not an array in NumPy's format",
        "empty.bin": "it has no tokens",
        "odd.bin": "3 bytes are not a multiple of uint16; set token_dtype",
        "short.bin": "its header says 2 tokens, and it has 3",
    }.items():
        settings.data.dataset = str(tmp_path / name)
        assert one_line(settings) == f"{tmp_path / name}: {name}: {reason}"
    settings.data.dataset = str(tmp_path / "gone.bin")
    assert one_line(settings) == f"{tmp_path / 'gone.bin'}: there is no such file or folder"


# Several sources, and settings that cannot be.


@pytest.mark.parametrize(
    "tables, line",
    [
        ([{"datset": "a"}], "[[data.sources]] 1 has no key datset; did you mean dataset?"),
        ([{"dataset": "a"}, {"dataset": 3}], "dataset in [[data.sources]] 2 is 3; it must be a string"),
        ([{"dataset": "a", "weight": "x"}], 'weight in [[data.sources]] 1 is "x"; it must be a number'),
        ([{"dataset": "a", "weight": 0}], "weight in [[data.sources]] 1 is 0; it must be from 1e-18 to 1e18"),
        ([{"dataset": "a", "documents": 0}], "documents in [[data.sources]] 1 is 0; it must be 1 or more"),
        ([{"dataset": "a", "token_dtype": "int16"}], 'token_dtype in [[data.sources]] 1 is "int16"; did you mean '),
        ([{"weight": 1}], "[[data.sources]] 1 has no dataset"),
        ([{"dataset": "a", "weight": 1}, {"dataset": "b"}], "b has no weight; write one for each of [[data.sources]]"),
    ],
)
def test_tables_of_sources_that_cannot_be_are_one_line(settings, tables, line):
    settings.data.sources = tables
    with pytest.raises(SettingsError) as raised:
        open_text(settings)
    assert str(raised.value).startswith(line)


def test_wrong_sources_are_one_line(settings, words, tmp_path):
    file = settings.data.dataset = json_lines(tmp_path / "a.jsonl", ["one", 2])
    assert one_line(settings) == f"{file}: line 2: column text is of type int; it must be a string"
    settings.data.column = "body"
    assert one_line(settings) == f"{file}: there is no column body; it has text (--column)"
    settings.data.end_token = 3
    assert one_line(settings).startswith(f"{file}: end_token is for files of tokens")
    settings.data.dataset = str(tmp_path / "gone")
    settings.data.end_token = None
    assert "there is no such file or folder" in one_line(settings)
    settings.tokenizer.tokenizer = str(tmp_path / "none.json")
    assert "no such file or folder; a tokenizer is" in one_line(settings)


def test_sources_have_their_own_keys_and_the_others_of_data(settings, tmp_path):
    (tmp_path / "b.jsonl").write_text('{"body": "bodies"}\n{"body": "two"}\n')
    settings.data.column = "body"
    settings.data.sources = [
        {"dataset": str(tmp_path / "b.jsonl"), "documents": 1},
        {"dataset": json_lines(tmp_path / "a.jsonl", ["a text"]), "column": "text"},
    ]
    text = open_text(settings)
    assert [all_tokens(text, source) for source in range(2)] == [encoded("bodies"), encoded("a text")]
    assert text.train.shares == [0.5, 0.5] and text.train.tokens == 12
    assert text.lines == [f"{tmp_path / 'b.jsonl'}: 1 of 2 documents"]


def test_the_tokenizer_of_the_cache_is_known_by_its_contents(words):
    from course_lib.single_gpu.hf_tokenizers import load_tokenizer

    key = TokenizerEncoder(load_tokenizer(words)[0]).key
    os.utime(Path(words) / "tokenizer.json", (0, 0))
    assert TokenizerEncoder(load_tokenizer(words)[0]).key == key
    file = Path(words) / "tokenizer.json"
    file.write_text(file.read_text().replace("memory", "memories"))
    assert TokenizerEncoder(load_tokenizer(words)[0]).key != key
