"""course_lib.single_gpu.data: batches are disjoint shards of one endless order, whatever the number of ranks. Needs no
GPU.
"""

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from course_lib.single_gpu.data import ByteTokenizer, TokenBatches, corpus, hf_tokens, mapped_once, text_parts

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
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
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
        assert calls.call_count == 3 and torch.equal(first, again)
        hf_tokens(dataset_folder, tokenizer_folder, documents=2)
        assert calls.call_count == 5, "another choice is another file"
        file = Path(dataset_folder) / "train.jsonl"
        file.write_text(json.dumps({"text": "goes"}))
        assert hf_tokens(dataset_folder, tokenizer_folder)[0].tolist() == [4, 0] and calls.call_count == 6
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
    of_words = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(llama_3), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
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
