"""course_lib.single_gpu.data: batches are disjoint shards of one endless order, whatever the number of ranks. Needs no
GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from course_lib.single_gpu.data import ByteTokenizer, TokenBatches, corpus, hf_tokens, mapped_once, text_parts
from course_lib.single_gpu.hf_tokenizers import END_TOKENS, load_tokenizer
from course_lib.single_gpu.same_text import check_same_text, text_sum

# windows, seq, batch of one rank, ranks; windows that batch * ranks divides, and odd ones
CASES = [(24, 5, 2, 3), (100, 10, 2, 3), (17, 3, 4, 1), (7, 1, 2, 5), (3, 8, 2, 4), (1, 4, 3, 2)]
each_case = pytest.mark.parametrize("windows, seq, batch, ranks", CASES)


def loaders(windows: int, seq: int, batch: int, ranks: int, seed: int = 0) -> list[TokenBatches]:
    """One loader a rank; the tokens are 0, 1, 2, …, so that each tells where it stood."""
    tokens = torch.arange(windows * seq + 1 + seq // 2)  # a rest that fills no window
    return [TokenBatches(tokens, batch, seq, rank, ranks, seed) for rank in range(ranks)]


def drawn(loader: TokenBatches, steps: int) -> list[int]:
    """The window numbers of the next `steps` batches."""
    return [start // loader.seq for _ in range(steps) for start in next(loader)[0][:, 0].tolist()]


def in_order(ranks: list[TokenBatches], steps: int) -> list[int]:
    """The window numbers of all ranks in the global order."""
    return [window for _ in range(steps) for loader in ranks for window in drawn(loader, 1)]


@each_case
def test_inputs_and_targets_are_whole_windows(windows, seq, batch, ranks):
    for loader in loaders(windows, seq, batch, ranks):
        assert loader.windows == windows
        for _ in range(5):
            inputs, targets = next(loader)
            assert inputs.shape == targets.shape == (batch, seq)
            assert inputs.dtype == targets.dtype == torch.int64
            assert (inputs[:, 0] % seq == 0).all() and (inputs.max() < windows * seq)
            assert torch.equal(inputs, inputs[:, :1] + torch.arange(seq)) and torch.equal(targets, inputs + 1)


@each_case
def test_every_epoch_has_every_window_once(windows, seq, batch, ranks):
    """Over all ranks and without a gap: the next epoch begins in the middle of a batch."""
    steps = -(-4 * windows // (batch * ranks))
    order = in_order(loaders(windows, seq, batch, ranks), steps)
    for epoch in range(4):
        assert sorted(order[epoch * windows : (epoch + 1) * windows]) == list(range(windows)), f"epoch {epoch}"


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_every_epoch_is_shuffled_anew(seed):
    (loader,) = loaders(50, 2, 1, 1, seed)
    epochs = [tuple(drawn(loader, 50)) for _ in range(5)]
    assert len({*epochs, tuple(range(50))}) == 6


def test_a_seed_may_be_any_integer():
    """Small ones draw what torch draws; other ones, too large for torch, draw something else each."""
    for seed in (-7, 0, 1, 2**40):
        expected = torch.randperm(50, generator=torch.Generator().manual_seed(1_000_003 * seed + 1))
        assert TokenBatches(torch.arange(151), 1, 3, seed=seed).order(1) == expected.tolist()
    seeds = -1, 0, 2**63 - 1, 2**63, 2**64, 2**70, -(2**70), 10**100
    orders = {tuple(TokenBatches(torch.arange(151), 1, 3, seed=seed).order(0)) for seed in seeds}
    assert len(orders) == len(seeds)


def test_the_seed_decides_the_order():
    orders = [tuple(drawn(loaders(50, 2, 1, 1, seed)[0], 50)) for seed in (0, 0, 1, 2)]
    assert orders[0] == orders[1] and len(set(orders)) == 3


@each_case
def test_ranks_share_one_order_without_overlap(windows, seq, batch, ranks):
    """What many ranks see together is what one rank sees with their common batch."""
    many, one = loaders(windows, seq, batch, ranks), loaders(windows, seq, batch * ranks, 1)
    assert in_order(many, 20) == in_order(one, 20)
    shards = [drawn(loader, 1) for loader in loaders(windows, seq, batch, ranks)]
    if windows >= batch * ranks:
        assert len({window for shard in shards for window in shard}) == batch * ranks, "shards overlap"


@pytest.mark.parametrize("before, after", [((2, 3), (2, 3)), ((2, 3), (3, 1)), ((6, 1), (1, 4)), ((1, 1), (5, 2))])
@pytest.mark.parametrize("steps", [0, 1, 7, 40])
def test_a_restored_run_goes_on_with_the_next_sample(before, after, steps):
    """On the same number of ranks and on another; from the state of any rank, through JSON as a checkpoint would."""
    first = loaders(37, 4, *before, seed=9)
    in_order(first, steps)
    for rank in first:
        state = json.loads(json.dumps(rank.state_dict()))
        second = loaders(37, 4, *after)
        in_order(second, 2)  # it may have begun elsewhere, with another seed
        for loader in second:
            loader.load_state_dict(state)
        (expected,) = loaders(37, 4, 1, 1, seed=9)
        drawn(expected, steps * before[0] * before[1])
        assert in_order(second, 9) == drawn(expected, 9 * after[0] * after[1])


def test_a_run_may_go_back_to_an_earlier_epoch():
    (loader,) = loaders(10, 2, 3, 1)
    start, beginning = loader.state_dict(), in_order([loader], 3)
    in_order([loader], 20)
    loader.load_state_dict(start)
    assert in_order([loader], 3) == beginning


def test_saving_does_not_move_the_position():
    (loader,), (other,) = loaders(10, 2, 3, 1), loaders(10, 2, 3, 1)
    for _ in range(5):
        loader.state_dict()
        assert drawn(loader, 1) == drawn(other, 1)


def test_batches_never_end():
    for step, (inputs, _) in enumerate(loaders(1, 4, 3, 2)[1]):
        assert torch.equal(inputs, torch.arange(4).expand(3, 4))
        if step == 10:
            break


def test_ranks_with_another_text_are_named(monkeypatch):
    """Two ranks, simulated: the other one contributes `theirs`."""
    tokens = torch.arange(1000, dtype=torch.int32)
    theirs = [97, *text_sum(tokens)]

    def gather(found, mine):
        found[:] = [mine, tuple(theirs)]

    check_same_text(tokens, 97)  # without a group there is nothing to compare
    monkeypatch.setattr("course_lib.single_gpu.same_text.dist.is_initialized", lambda: True)
    monkeypatch.setattr("course_lib.single_gpu.same_text.dist.get_world_size", lambda: 2)
    monkeypatch.setattr("course_lib.single_gpu.same_text.dist.all_gather_object", gather)
    check_same_text(tokens, 97)
    for changed, vocab in ((tokens[:-1], 97), (tokens, 98), (tokens.flip(0), 97)):
        line = one_line(check_same_text, changed, vocab)
        assert line.startswith("rank 1 has another text than rank 0 (1,000 tokens of a vocabulary of 97; rank 0 has ")
        assert f"; rank 0 has {len(changed):,} tokens of a vocabulary of {vocab})" in line


@pytest.mark.parametrize("length, fits", [(11, True), (10, False), (1, False)])
def test_a_text_shorter_than_a_window_is_refused(length, fits):
    if fits:
        assert next(TokenBatches(torch.arange(length), 1, 10))[0].shape == (1, 10)
    else:
        with pytest.raises(ValueError, match=rf"{length} tokens hold no window of 10 \+ 1 tokens"):
            TokenBatches(torch.arange(length), 1, 10)


@pytest.mark.parametrize("batch, rank, ranks", [(0, 0, 1), (-1, 0, 1), (1, 1, 1), (1, 4, 4), (1, -1, 2), (1, 0, 0)])
def test_impossible_batches_and_ranks_are_refused(batch, rank, ranks):
    with pytest.raises(ValueError, match=f"batch {batch}, rank {rank} of {ranks}"):
        TokenBatches(torch.arange(100), batch, 10, rank, ranks)


# The corpus and its tokenizer.


@pytest.fixture(scope="module")
def text():
    return corpus()


def test_the_corpus_is_real_text_and_always_the_same(text):
    assert text == corpus()
    assert text.count("\ndef ") > 1000 and text.count("import ") > 1000
    assert 4_000_000 < len(text) <= 8_000_000


@pytest.fixture
def small_library(tmp_path, monkeypatch):
    """A standard library of three modules, two of them in order; tests and installed packages stand beside them."""
    for name, content in {
        "b/module.py": "second = 'ñ'\n",
        "a.py": "first\n",
        "c.py": "third\n",
        "c.txt": "no code",
        "test/test_a.py": "a test",
        "b/tests/test_b.py": "a test",
        "site-packages/torch.py": "installed",
        "b/__pycache__/module.py": "compiled",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))


def test_the_corpus_has_no_tests_or_installed_packages(small_library):
    assert corpus() == "first\nsecond = 'ñ'\nthird\n"


@pytest.mark.parametrize("max_characters", [1, 6, 17, 25, 1000])
def test_a_shorter_corpus_is_the_beginning_of_the_whole_one(small_library, max_characters):
    assert corpus(max_characters) == corpus()[:max_characters]


@pytest.mark.parametrize("text", ["def f(x):\n\treturn x\n", "λ → ∞, naïve, 你好, 𝄞", "\x00\x7f"])
def test_bytes_there_and_back(text):
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.dtype == torch.uint8 and tokens.tolist() == list(text.encode())
    assert tokenizer.decode(tokens) == tokenizer.decode(tokens.long()) == text


def test_half_a_character_does_not_stop_decoding():
    tokens = ByteTokenizer().encode("añb")
    assert ByteTokenizer().decode(tokens[:2]) == "a�"


# A Hugging Face data set and tokenizer, in folders.


@pytest.fixture
def tokenizer_folder(tmp_path, monkeypatch):
    """A tokenizer of five words and an end token, saved as Hugging Face does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<end>": 0, "<?>": 1, "where": 2, "memory": 3, "goes": 4}, unk_token="<?>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<?>")
    tokenizer.save_pretrained(tmp_path / "words")
    return str(tmp_path / "words")


@pytest.fixture
def dataset_folder(tmp_path):
    """Three documents as JSON lines."""
    (tmp_path / "texts").mkdir()
    documents = ["where memory goes", "memory leaks", "goes"]
    lines = [json.dumps({"text": text, "body": text.upper() + " memory"}) for text in documents]
    (tmp_path / "texts" / "train.jsonl").write_text("\n".join(lines))
    return str(tmp_path / "texts")


def test_tokens_of_a_hugging_face_data_set(dataset_folder, tokenizer_folder):
    tokens, tokenizer = hf_tokens(dataset_folder, tokenizer_folder)
    assert len(tokenizer) == 5
    assert tokens.dtype == torch.int32
    assert tokens.tolist() == [2, 3, 4, 0, 3, 1, 0, 4, 0], "each document ends with <end>"


def test_another_column_and_fewer_documents(dataset_folder, tokenizer_folder):
    tokens, _ = hf_tokens(dataset_folder, tokenizer_folder, column="body", documents=1)
    assert tokens.tolist() == [1, 1, 1, 3, 0]


def test_a_data_set_in_parquet(tmp_path, dataset_folder, tokenizer_folder):
    from datasets import Dataset

    (tmp_path / "columns").mkdir()
    Dataset.from_dict({"text": ["goes where", "memory"]}).to_parquet(tmp_path / "columns" / "train.parquet")
    tokens, _ = hf_tokens(str(tmp_path / "columns"), tokenizer_folder)
    assert tokens.tolist() == [4, 2, 0, 3, 0]
    inputs, targets = next(TokenBatches(tokens, batch=1, seq=4))
    assert inputs.tolist() == [[4, 2, 0, 3]] and targets.tolist() == [[2, 0, 3, 0]]


def test_a_data_set_is_read_once_and_a_folder_that_changes_again(dataset_folder, tokenizer_folder, tmp_path):
    from transformers import PreTrainedTokenizerFast

    with mock.patch.object(PreTrainedTokenizerFast, "__call__", autospec=True) as calls:
        calls.side_effect = lambda self, text, **more: {"input_ids": [len(text)]}
        first, _ = hf_tokens(dataset_folder, tokenizer_folder)
        again, _ = hf_tokens(dataset_folder, tokenizer_folder)
        assert calls.call_count == 7 and torch.equal(first, again)  # two calls each time find the special tokens
        hf_tokens(dataset_folder, tokenizer_folder, documents=2)
        assert calls.call_count == 11, "another choice is another file"
        file = Path(dataset_folder) / "train.jsonl"
        file.write_text(json.dumps({"text": "goes"}))
        assert hf_tokens(dataset_folder, tokenizer_folder)[0].tolist() == [4, 0] and calls.call_count == 14
    assert not list((tmp_path / "cache").rglob("*.part"))


def json_lines(folder: Path, texts: list) -> str:
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(folder)


def test_all_documents_arrive_and_nothing_is_said(tmp_path, tokenizer_folder, capsys):
    folder = json_lines(tmp_path / "many", ["goes", "where memory"] * 5_001)
    tokens, _ = hf_tokens(folder, tokenizer_folder)
    assert torch.equal(tokens, torch.tensor([4, 0, 2, 3, 0] * 5_001, dtype=torch.int32))
    assert capsys.readouterr().out == ""


def test_what_a_limit_cuts_is_told_by_every_run(tmp_path, tokenizer_folder, capsys):
    folder = json_lines(tmp_path / "some", ["goes"] * 250)
    for limit, line in ((120, "120 of 250 documents"), (1, "1 of 250 documents"), (250, ""), (251, "")):
        for _ in range(2):  # the second one maps the file of the first
            tokens, _ = hf_tokens(folder, tokenizer_folder, documents=limit)
            assert tokens.tolist() == [4, 0] * min(limit, 250)
            assert capsys.readouterr().out == (f"{folder}: {line}\n" if line else "")
    for limit in (0, -1):
        with pytest.raises(ValueError, match=f"documents {limit}: 1 or more"):
            hf_tokens(folder, tokenizer_folder, documents=limit)


def test_a_limit_does_not_read_a_whole_data_set_by_name(tokenizer_folder, monkeypatch, capsys):
    """To count what is left would download it."""
    import datasets

    read = []

    def rows():
        for number in range(1_000):
            read.append(number)
            yield {"text": "goes"}

    made = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: made)
    tokens, _ = hf_tokens("somebody/texts", tokenizer_folder, documents=150)
    assert tokens.tolist() == [4, 0] * 150 and len(read) <= 152
    assert capsys.readouterr().out == "somebody/texts: the first 150 documents; it has more\n"


def test_documents_without_text_are_left_out_and_counted(tmp_path, tokenizer_folder, capsys):
    folder = json_lines(tmp_path / "holes", ["goes", None, "", "where", None])
    assert hf_tokens(folder, tokenizer_folder)[0].tolist() == [4, 0, 2, 0]
    assert capsys.readouterr().out == f"{folder}: 3 of 5 documents have no text and are left out\n"
    assert hf_tokens(folder, tokenizer_folder, documents=4)[0].tolist() == [4, 0, 2, 0]
    assert capsys.readouterr().out == (
        f"{folder}: 4 of 5 documents\n{folder}: 2 of 4 documents have no text and are left out\n"
    )
    folder = json_lines(tmp_path / "nothing", ["", "", ""])
    assert hf_tokens(folder, tokenizer_folder)[0].numel() == 0
    assert capsys.readouterr().out == f"{folder}: 3 of 3 documents have no text and are left out\n"


def test_only_rank_0_tells(tmp_path, tokenizer_folder, monkeypatch, capsys):
    folder = json_lines(tmp_path / "some", ["goes"] * 3)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank, told in ((1, ""), (0, f"{folder}: 2 of 3 documents\n"), (3, "")):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        hf_tokens(folder, tokenizer_folder, documents=2)
        assert capsys.readouterr().out == told


def test_a_long_document_is_tokenized_part_by_part_into_the_same_tokens(tmp_path, tokenizer_folder):
    """A tokenizer of GPT's kind. Of the special tokens a document has those of one text."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    llama_3 = r"\s*[\r\n]+|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"
    of_words = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(llama_3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    text = corpus(30_000) + "\r\n \n\n  λ.\n\nx" * 100 + "y" * 900 + " a b\n c\nd\n"
    for number, splits in enumerate((of_words, pre_tokenizers.ByteLevel(add_prefix_space=False))):
        words = Tokenizer(models.BPE())
        words.pre_tokenizer = splits
        trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<begin>", "<end>"], show_progress=False)
        words.train_from_iterator([text], trainer)
        words.post_processor = processors.TemplateProcessing("<begin> $A", special_tokens=[("<begin>", 0)])
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<begin>", eos_token="<end>")
        expected = tokenizer(text)["input_ids"]
        for size in (1, 50, 1_000, 20_000):
            parts = list(text_parts(text, size))
            found = [token for part in parts for token in tokenizer(part, add_special_tokens=False)["input_ids"]]
            assert "".join(parts) == text and [0, *found] == expected
            assert max(map(len, parts)) < size + 3_000, "the text's longest run without a place to cut has 2,107"
        tokenizer.save_pretrained(tmp_path / "words_of_bytes")
        folder = json_lines(tmp_path / f"texts_{number}", [text, "x"])
        with mock.patch("course_lib.single_gpu.data.text_parts", lambda text: text_parts(text, 500)):
            tokens, _ = hf_tokens(folder, str(tmp_path / "words_of_bytes"))
        assert tokens.tolist() == [*expected, 1, *tokenizer("x")["input_ids"], 1]


def test_a_tokenizer_that_puts_a_space_before_any_text_puts_one_before_a_long_document(tmp_path, tokenizer_folder):
    """A tokenizer of Llama 2's kind."""
    from tokenizers import Tokenizer, models, normalizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: n for n, token in enumerate(["<end>", "<0x0A>", "▁", "a", "b", "▁a"])}
    words = Tokenizer(models.BPE(vocabulary, [("▁", "a")], byte_fallback=True))
    words.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    tokenizer.save_pretrained(tmp_path / "llama")
    text = "ab ab\nab a\n b" * 9
    assert tokenizer("ab a\nab")["input_ids"] == [5, 4, 5, 1, 3, 4], "no space behind a newline"
    with mock.patch("course_lib.single_gpu.data.text_parts", lambda text: text_parts(text, 1)):
        tokens, _ = hf_tokens(json_lines(tmp_path / "texts", [text]), str(tmp_path / "llama"))
    assert tokens.tolist() == [*tokenizer(text)["input_ids"], 0]


@pytest.mark.parametrize("text", ["", "x", "x" * 500, " \n" * 300])
def test_a_text_without_a_place_to_cut_is_one_part(text):
    assert list(text_parts(text, 10)) == [text]


def test_a_text_file_is_one_document_with_its_newlines(tmp_path, tokenizer_folder, capsys):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from tokenizers.decoders import ByteLevel
    from transformers import PreTrainedTokenizerFast

    of_bytes = {letter: number for number, letter in enumerate(["<end>", *pre_tokenizers.ByteLevel.alphabet()])}
    words = Tokenizer(models.BPE(of_bytes, merges=[]))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(tmp_path / "of_bytes")
    (tmp_path / "books").mkdir()
    books = ["Chapter 1\n\nIt was\n  a night.\n", "one line", "λ\n" * 300]
    for number, book in enumerate(books):
        (tmp_path / "books" / f"{number}.txt").write_text(book)
    tokens, tokenizer = hf_tokens(str(tmp_path / "books"), str(tmp_path / "of_bytes"))
    assert int((tokens == tokenizer.eos_token_id).sum()) == len(books)
    assert tokenizer.decode(tokens.tolist()).split("<end>") == [*books, ""]
    assert capsys.readouterr().out == ""


def test_files_that_load_dataset_leaves_out_are_told(tmp_path, tokenizer_folder, capsys, monkeypatch):
    """By its rules: one file with "train" in its name makes those without it vanish; the rarer kind of file does."""
    books, mixed = tmp_path / "books", tmp_path / "mixed"
    (books / "deep").mkdir(parents=True)
    for name in ("train_of_thought.txt", "crime.txt", "deep/zola.txt", "README.md", ".hidden", "LICENSE"):
        (books / name).write_text("goes")
    told = "files are in no split, by name or kind: crime.txt, deep/zola.txt\n"
    assert hf_tokens(str(books), tokenizer_folder)[0].tolist() == [4, 0]
    assert capsys.readouterr().out == f"{books}: 2 of 3 {told}"
    monkeypatch.chdir(tmp_path)
    hf_tokens("books", tokenizer_folder)
    assert capsys.readouterr().out == f"books: 2 of 3 {told}"
    mixed.mkdir()
    for name in ("a.txt", "b.txt", "c.jsonl"):
        (mixed / name).write_text("goes" if name[-1] == "t" else '{"text": "where"}')
    assert hf_tokens(str(mixed), tokenizer_folder)[0].tolist() == [4, 0, 4, 0]
    assert capsys.readouterr().out == f"{mixed}: 1 of 3 files are in no split, by name or kind: c.jsonl\n"
    for number in range(3):
        (books / f"{number}.txt").write_text("goes")
    hf_tokens(str(books), tokenizer_folder)
    more = told.replace("crime.txt, deep/zola.txt", "0.txt, 1.txt, 2.txt, ...")
    assert capsys.readouterr().out == f"{books}: 5 of 6 {more}"
    for number in range(3):
        (books / f"{number}.txt").unlink()
    (books / "test.txt").write_text("where")
    assert hf_tokens(str(books), tokenizer_folder)[0].tolist() == [4, 0], "a file for tests is in a split"
    assert capsys.readouterr().out == f"{books}: 2 of 4 {told}"


def one_line(call, *args, **kwargs) -> str:
    with pytest.raises(ValueError) as error:
        call(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_file_is_read_again_when_it_changes(tmp_path, tokenizer_folder):
    file = tmp_path / "a.jsonl"
    for number, (column, text) in enumerate(
        (("text", "goes"), ("text", "where"), ("body", "where"), ("body", "memory"))
    ):
        file.write_text(json.dumps({column: text}))
        os.utime(file, (1, number // 2))  # by its size alone, too
        assert hf_tokens(str(file), tokenizer_folder, column=column)[0].tolist()[-1] == 0
        expected = {"goes": 4, "where": 2, "memory": 3}[text]
        assert hf_tokens(str(file), tokenizer_folder, column=column)[0].tolist() == [expected, 0]


def test_a_folder_is_read_again_when_a_file_has_another_name(tmp_path, tokenizer_folder):
    folder = json_lines(tmp_path / "texts", ["goes"])
    assert hf_tokens(folder, tokenizer_folder)[0].tolist() == [4, 0]
    (tmp_path / "texts" / "train.jsonl").rename(tmp_path / "texts" / "test.jsonl")
    said = one_line(hf_tokens, folder, tokenizer_folder)
    assert said == f"{folder}: there is no split train; it has test (--split)"


def test_rows_that_hold_no_string_are_named(tmp_path, tokenizer_folder):
    from datasets import Dataset

    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "goes"}\n\n{"text": 0}\n')
    told = "column text is of type {}; it must be a string"
    assert one_line(hf_tokens, str(file), tokenizer_folder) == f"{file}: line 3: {told.format('int')}"
    assert hf_tokens(str(file), tokenizer_folder, documents=1)[0].tolist() == [4, 0]
    Dataset.from_dict({"id": [1], "text": [["goes"]]}).to_parquet(tmp_path / "a.parquet")
    file = str(tmp_path / "a.parquet")
    assert one_line(hf_tokens, file, tokenizer_folder) == f"{file}: row 1: {told.format('list')}"
    line = f"{file}: there is no column body; it has id, text (--column)"
    assert one_line(hf_tokens, file, tokenizer_folder, column="body") == line


def test_half_a_surrogate_pair_does_not_stop_a_run(tmp_path, tokenizer_folder):
    (tmp_path / "a.jsonl").write_text('{"text": "goes \\ud83d where"}')
    assert hf_tokens(str(tmp_path / "a.jsonl"), tokenizer_folder)[0].tolist() == [4, 1, 2, 0]


def test_folders_of_save_to_disk(tmp_path, tokenizer_folder):
    from datasets import Dataset, DatasetDict

    train, test = (Dataset.from_dict({"text": [text, None], "id": [1, 2]}) for text in ("goes", "where"))
    train.save_to_disk(tmp_path / "one")
    DatasetDict(train=train, test=test).save_to_disk(tmp_path / "two")
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    assert hf_tokens(one, tokenizer_folder)[0].tolist() == [4, 0]
    assert hf_tokens(two, tokenizer_folder)[0].tolist() == [4, 0]
    assert hf_tokens(two, tokenizer_folder, split="test")[0].tolist() == [2, 0]
    assert hf_tokens(str(tmp_path / "two" / "test"), tokenizer_folder)[0].tolist() == [2, 0]
    for folder, splits in ((one, "train"), (two, "train, test")):
        said = one_line(hf_tokens, folder, tokenizer_folder, split="dev")
        assert said == f"{folder}: there is no split dev; it has {splits} (--split)"
        said = one_line(hf_tokens, folder, tokenizer_folder, column="body")
        assert said == f"{folder}: there is no column body; it has text, id (--column)"
        assert (
            one_line(hf_tokens, folder, tokenizer_folder, subset="en")
            == f"{folder}: it has no subsets; leave --subset out"
        )


def test_splits_and_subsets_of_a_folder(tmp_path, tokenizer_folder):
    """Files may differ in their other columns."""
    folder = tmp_path / "splits"
    for name, row in {
        "train/a": {"text": "goes"},
        "train/b": {"text": "goes", "id": 1},
        "test/c": {"text": "where"},
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.jsonl").write_text(json.dumps(row))
    assert hf_tokens(str(folder), tokenizer_folder)[0].tolist() == [4, 0, 4, 0]
    assert hf_tokens(str(folder), tokenizer_folder, split="test")[0].tolist() == [2, 0]
    said = one_line(hf_tokens, str(folder), tokenizer_folder, split="dev")
    assert said == f"{folder}: there is no split dev; it has train, test (--split)"
    (folder / "train" / "b.jsonl").write_text(json.dumps({"body": "goes"}))
    said = one_line(hf_tokens, str(folder), tokenizer_folder)
    assert said == f"{folder}: train/b.jsonl: there is no column text; it has body (--column)"
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("en", "de"))
    languages = json_lines(tmp_path / "languages", ["goes"])
    (tmp_path / "languages" / "train.jsonl").rename(tmp_path / "languages" / "en.jsonl")
    (tmp_path / "languages" / "de.jsonl").write_text(json.dumps({"text": "where"}))
    (tmp_path / "languages" / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    assert hf_tokens(languages, tokenizer_folder, subset="en")[0].tolist() == [4, 0]
    assert hf_tokens(languages, tokenizer_folder, subset="de")[0].tolist() == [2, 0]
    said = one_line(hf_tokens, languages, tokenizer_folder)
    assert said.startswith(f"{languages}: ") and "['en', 'de']" in said and said.endswith("(--subset)")
    said = one_line(hf_tokens, languages, tokenizer_folder, subset="fr")
    assert "'fr'" in said and "['en', 'de']" in said


def test_folders_without_a_file_that_can_be_read(tmp_path, tokenizer_folder, capsys):
    for name, file in (("nothing", ".hidden"), ("papers", "a.pdf"), ("brackets[1]", "a.txt"), ("mostly", "a.xml")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("goes")
    for name in ("nothing", "papers"):
        assert "no file in this folder can be read; a data set is a file (.jsonl, .json, .txt" in one_line(
            hf_tokens, str(tmp_path / name), tokenizer_folder
        )
    assert "rename the folder" in one_line(hf_tokens, str(tmp_path / "brackets[1]"), tokenizer_folder)
    for number in range(2):
        (tmp_path / "mostly" / f"{number}.xml").write_text("<goes/>")
    (tmp_path / "mostly" / "a.txt").write_text("goes")
    said = one_line(hf_tokens, str(tmp_path / "mostly"), tokenizer_folder)
    assert ".xml cannot be read; a data set is" in said
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "a.txt").write_text("goes")
    (tmp_path / "linked" / "more").symlink_to(tmp_path / "mostly")
    assert hf_tokens(str(tmp_path / "linked"), tokenizer_folder)[0].tolist() == [4, 0]
    assert capsys.readouterr().out.endswith("1 of 2 files are in no split, by name or kind: more\n")


def test_names_that_cannot_be_reached(tokenizer_folder, dataset_folder, tmp_path):
    said = one_line(hf_tokens, "somebody/texts", tokenizer_folder)
    assert said.startswith("somebody/texts: there is no such file or folder, and at Hugging Face: Couldn't reach")
    assert said.endswith("; call hf download --repo-type dataset before")
    works = "; a tokenizer is a tokenizer.json, a folder with one, or a name at Hugging Face"
    for name in ("somebody/words", "tokenizer.json", "./words", str(tmp_path / "gone")):
        reached = " (" if name == "somebody/words" else ""  # no file's name is looked up at Hugging Face
        said = one_line(hf_tokens, dataset_folder, name)
        assert said.startswith(f"{name}: no such file or folder{works}{reached}") and ("http" in said) == bool(reached)
    for name in (dataset_folder, str(Path(dataset_folder) / "train.jsonl")):
        assert one_line(hf_tokens, dataset_folder, name).startswith(
            f"{name}: it has no tokenizer that can be read{works} ("
        )


def test_a_downloaded_data_set_is_read_by_its_name_without_a_network(tokenizer_folder, tmp_path, monkeypatch):
    """As `hf download` leaves it: a snapshot of links to files without a suffix."""
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder, commit = tmp_path / "datasets--somebody--texts", "a" * 40
    for name in ("refs", "blobs", f"snapshots/{commit}"):
        (folder / name).mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    (folder / "blobs" / "123").write_text('{"text": "memory goes"}')
    (folder / "snapshots" / commit / "train.jsonl").symlink_to("../../blobs/123")
    assert hf_tokens("somebody/texts", tokenizer_folder)[0].tolist() == [3, 4, 0]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gemma3_text", "gpt2"])
def test_a_model_s_folder_without_its_tokenizer_is_refused(tmp_path, kind):
    """transformers makes a tokenizer without words of such a folder: each text would be its end token alone."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    said = one_line(load_tokenizer, str(tmp_path))
    assert said.startswith(f"{tmp_path}: its tokenizer has no vocabulary; a tokenizer is a tokenizer.json, a folder")


@pytest.mark.parametrize("end", [*END_TOKENS, None])
def test_a_tokenizer_json_alone(tmp_path, tokenizer_folder, dataset_folder, capsys, end):
    (tmp_path / "alone").mkdir()
    saved = json.loads((Path(tokenizer_folder) / "tokenizer.json").read_text())
    saved["model"]["vocab"][end or "<end>"] = saved["model"]["vocab"].pop("<end>")
    saved["added_tokens"] = []
    (tmp_path / "alone" / "tokenizer.json").write_text(json.dumps(saved))
    for name in ("alone/tokenizer.json", "alone"):
        tokens, tokenizer = hf_tokens(dataset_folder, str(tmp_path / name))
        assert tokens.tolist() == ([2, 3, 4, 0, 3, 1, 0, 4, 0] if end else [2, 3, 4, 3, 1, 4])
        assert tokenizer.eos_token == end and len(tokenizer) == 5
        told = f"no end token is named; {end} of its vocabulary ends each document"
        told = told if end else "there is no end token: documents follow each other without one"
        assert capsys.readouterr().out == f"{tmp_path / name}: {told}\n"


def test_special_tokens_stand_once_around_a_long_document(tmp_path, tokenizer_folder):
    """An end token that the tokenizer adds by itself is not added again; truncation and padding are not used."""
    from tokenizers import Tokenizer, processors

    words = Tokenizer.from_file(str(Path(tokenizer_folder) / "tokenizer.json"))
    special = [("memory", 3), ("<end>", 0)]
    words.post_processor = processors.TemplateProcessing("memory $A <end>", special_tokens=special)
    words.enable_truncation(3)
    words.enable_padding(length=9)
    words.save(str(Path(tokenizer_folder) / "tokenizer.json"))
    folder = json_lines(tmp_path / "texts", ["goes where memory", "goes"])
    with mock.patch("course_lib.single_gpu.data.text_parts", lambda text: text_parts(text, 1)):
        tokens, _ = hf_tokens(folder, tokenizer_folder)
    assert tokens.tolist() == [3, 4, 2, 3, 0, 3, 4, 0]


def test_a_vocabulary_without_the_letter_a_and_without_an_unknown_token(tmp_path, tokenizer_folder, capsys):
    """Four bases of DNA: special tokens are where they belong, and whatever else is in a text is told."""
    from tokenizers import Tokenizer, models, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.BPE({token: n for n, token in enumerate(["<begin>", "<end>", *"ACGT"])}, []))
    special = [("<begin>", 0), ("<end>", 1)]
    words.post_processor = processors.TemplateProcessing("<begin> $A <end>", special_tokens=special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<begin>", eos_token="<end>")
    tokenizer.save_pretrained(tmp_path / "bases")
    tokens, _ = hf_tokens(json_lines(tmp_path / "texts", ["ACG", "TT"]), str(tmp_path / "bases"))
    assert tokens.tolist() == [0, 2, 3, 4, 1, 0, 5, 5, 1] and capsys.readouterr().out == ""
    tokens, _ = hf_tokens(json_lines(tmp_path / "masked", ["AcgG", "T\nN"]), str(tmp_path / "bases"))
    assert tokens.tolist() == [0, 2, 4, 1, 0, 5, 1]
    lost = "the tokenizer has no token for 3 characters, which are left out: N c g"
    assert capsys.readouterr().out == f"{tmp_path / 'masked'}: {lost}\n"


def test_a_cache_that_cannot_be_written_is_named(tmp_path, tokenizer_folder, dataset_folder, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OSError, match=rf"for tokens, {tmp_path}/file/llm_training_at_scale .*Not a directory"):
        hf_tokens(dataset_folder, tokenizer_folder)


def test_a_tokenizer_json_with_its_folder(tokenizer_folder, dataset_folder, capsys):
    tokens, tokenizer = hf_tokens(dataset_folder, str(Path(tokenizer_folder) / "tokenizer.json"))
    assert tokens.tolist() == [2, 3, 4, 0, 3, 1, 0, 4, 0] and tokenizer.eos_token == "<end>"
    assert capsys.readouterr().out == ""


MAKES = """
import sys, time, torch
from pathlib import Path
from course_lib.single_gpu.data import mapped_once

def make():
    with open(sys.argv[2], "a") as log:
        log.write("made\\n")
    time.sleep(0.5)  # the others come meanwhile
    return torch.arange(100_000, dtype=torch.int32)

tokens = mapped_once(Path(sys.argv[1]), make)
mapped = sys.argv[1] in Path("/proc/self/maps").read_text() if Path("/proc/self/maps").exists() else True
print(int(tokens.sum()), tokens.dtype, len(tokens), mapped)
"""


def test_one_process_of_a_machine_makes_what_all_map(tmp_path):
    file, log = tmp_path / "deep" / "tokens.int32", tmp_path / "log"
    command = [sys.executable, "-c", MAKES, str(file), str(log)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert {process.communicate()[0] for process in running} == {"4999950000 torch.int32 100000 True\n"}
    assert log.read_text() == "made\n"
    assert mapped_once(tmp_path / "empty", lambda: torch.empty(0, dtype=torch.int32)).numel() == 0


def test_a_process_that_dies_while_it_makes_leaves_nothing_half(tmp_path):
    def dies():
        raise KeyboardInterrupt

    file = tmp_path / "tokens.int32"
    with pytest.raises(KeyboardInterrupt):
        mapped_once(file, dies)
    assert mapped_once(file, lambda: torch.ones(3, dtype=torch.int32)).tolist() == [1, 1, 1]
