"""course_lib.train.text on two ranks: both have the same text, or both say why not. CPU, gloo."""

import json
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from course_lib.train.batches import PackedBatches
from course_lib.train.settings import Settings
from course_lib.train.text import open_text
from course_lib.train.tokens import ByteEncoder


def opened(folder: str, names: list[str]) -> tuple[str, int, list]:
    """On a rank: the error or the fingerprint of the rank's text, calls of the encoder, and the first batch."""
    settings, rank = Settings(), dist.get_rank()
    settings.data.cache, settings.data.dataset, settings.run.seq = f"{folder}/cache", f"{folder}/{names[rank]}", 8
    with mock.patch.object(ByteEncoder, "encode", autospec=True, side_effect=ByteEncoder.encode) as encode:
        try:
            text = open_text(settings)
        except ValueError as error:
            return str(error), encode.call_count, []
    batch = next(PackedBatches(text.train, 2, rank, 2))
    return text.train.fingerprint, encode.call_count, batch.inputs.tolist()


@pytest.fixture
def folder(tmp_path):
    for name, texts in {"a": ["some text of a run"] * 9, "b": ["some text of a ruin"] * 9}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(tmp_path)


def test_one_of_the_ranks_makes_the_tokens(two, folder):
    (first, calls, rows), (other, more_calls, other_rows) = two(opened, folder, ["a.jsonl", "a.jsonl"])
    assert first == other and calls + more_calls == 1
    assert not {*map(tuple, rows)} & {*map(tuple, other_rows)} and torch.tensor(rows).shape == (2, 8)


def test_all_ranks_say_that_one_has_another_text_or_none(two, folder):
    for names, line in (
        (
            ["a.jsonl", "b.jsonl"],
            "rank 1 has another text than rank 0 (171 tokens of a vocabulary of 256; rank 0 has 162",
        ),
        (["a.jsonl", "gone.jsonl"], f"{folder}/gone.jsonl: there is no such file or folder"),
        (["gone.jsonl", "a.jsonl"], f"{folder}/gone.jsonl: there is no such file or folder"),
    ):
        for said, _, _ in two(opened, folder, names):
            assert said.startswith(line)
