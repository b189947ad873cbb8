"""course_lib.single_gpu.documents: local files that Hugging Face's `datasets` does not read. test_data.py has the other
sources and the tokens. Needs no GPU.
"""

import bz2
import gzip
import json
import lzma

import pytest

from course_lib.single_gpu.documents import open_documents


def read(path, column: str = "text") -> list[tuple[str, object]]:
    rows, notes = open_documents(str(path), "train", None, column)
    assert notes == []
    return list(rows)


def lines(*rows: object) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


ROWS = lines({"text": "a\u2192", "id": 1}, {"text": None, "id": "x"}, {"id": [{}]}, {"text": "\ud800", "more": {}})
SHORT = lambda value: repr(value)[:24]  # noqa: E731  (names of tests)
READ = ["a\u2192", None, None, "\ud800"]


@pytest.mark.parametrize(
    "name, content, expected",
    [
        ("a.jsonl", ROWS, READ),
        ("bom.jsonl", b"\xef\xbb\xbf" + ROWS, READ),
        ("crlf and a space.JSONL", ROWS.replace(b"\n", b"\r\n"), READ),
        ("empty_lines.jsonl", b"\n \n" + ROWS.replace(b"\n", b"\n\n"), READ),
        ("no_last_newline.json", ROWS.rstrip(b"\n"), READ),
        ("v1.2[a]*.jsonl.gz", gzip.compress(ROWS, mtime=0), READ),
        ("a.jsonl.bz2", bz2.compress(ROWS), READ),
        ("a.jsonl.xz", lzma.compress(ROWS), READ),
        ("list.json", json.dumps([{"text": "a"}, {"text": "b"}]).encode(), ["a", "b"]),
        ("list.json", b"\n" + json.dumps([{"text": "a"}, {"text": "b"}], indent=1).encode(), ["a", "b"]),
        ("none.jsonl", b"", []),
        ("none.json", b"[]", []),
        ("a.txt", b"\xef\xbb\xbfone\n\n two", ["one\n\n two"]),
        ("empty.txt", b"", [""]),
        ("a.txt.gz", gzip.compress(b"one", mtime=0), ["one"]),
        ("a.csv", b'id,text\r\n1,"a\n""b"", c"\r\n2,\r\n3,12\r\n', ['a\n"b", c', "", "12"]),
        ("long.csv", b"text\n" + b"a" * 200_000, ["a" * 200_000]),
        ("a.tsv", b"id\ttext\n1\ta, b\n2", ["a, b", None]),
    ],
    ids=SHORT,
)
def test_a_file_is_read(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    assert [value for _, value in read(tmp_path / name)] == expected


def test_a_link_and_a_relative_path(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(lines({"body": "a"}))
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    monkeypatch.chdir(tmp_path)
    assert read("link.jsonl", "body") == [("line 1", "a")]


@pytest.mark.parametrize("name", ["text", "json", "data"])
def test_a_folder_with_the_name_of_a_reader_of_datasets(tmp_path, monkeypatch, name):
    """By a relative path: "text" alone would be the library's own reader, of the current folder."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "a.txt").write_text("one")
    (tmp_path / "other.txt").write_text("not of the folder")
    monkeypatch.chdir(tmp_path)
    assert [text for _, text in read(name)] == ["one"]


def test_a_place_is_a_line_of_the_file(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\n" + lines({"text": 1}) + b"\n" + lines({"text": []}))
    assert read(tmp_path / "a.jsonl") == [("line 2", 1), ("line 4", [])]
    (tmp_path / "a.json").write_text(json.dumps([{"text": 1}, {"text": []}], indent=1))
    assert read(tmp_path / "a.json") == [("entry 1", 1), ("entry 2", [])]


OBJECTS = "; a JSON file has one object per line, or is one list of objects"


@pytest.mark.parametrize(
    "name, content, line",
    [
        ("a.jsonl", lines({"content": "a", "id": 1}), "there is no column text; it has content, id (--column)"),
        (
            "a.jsonl",
            lines({"text": "a"}) + b'{"text": "b',
            "line 2, column 10: Unterminated string starting at" + OBJECTS,
        ),
        ("a.jsonl", b"plain text", "line 1, column 1: Expecting value" + OBJECTS),
        (
            "a.json",
            b'{\n "text": "a"\n}',
            "line 1, column 2: Expecting property name enclosed in double quotes" + OBJECTS,
        ),
        ("a.json", b'\n[{"text": "a"},\n{"text"}]', "line 3, column 8: Expecting ':' delimiter" + OBJECTS),
        ("a.json", b'{"data": [{"text": "a"}]}', "there is no column text; it has data (--column)"),
        ("a.jsonl", lines({"text": "a"}, "b"), "line 2 is of type str; it must be an object with columns"),
        ("a.json", b'["a", "b"]', "entry 1 is of type str; it must be an object with columns"),
        ("a.jsonl", lines({"text": "a"}) + b'{"text": "\xe9"}', "this is not UTF-8 text"),
        ("a.txt", "a".encode("utf-16"), "this is not UTF-8 text"),
        (
            "a.txt.gz",
            gzip.compress(b"abc" * 99, mtime=0)[:-9],
            "Compressed file ended before the end-of-stream marker was reached",
        ),
        ("a.jsonl.gz", ROWS, "Not a gzipped file (b'{\""),
        ("a.csv", b"id;text\n1;a", "there is no column text; it has id;text (--column)"),
        ("a.csv", b'text\n"a\nb', "unexpected end of data"),
        ("a.parquet", b"no parquet", "Parquet magic bytes not found in footer"),
        ("a.jsonl", b"[" * 100_000, "maximum recursion depth exceeded"),
        ("a.pdf", b"%PDF", "this file cannot be read; a data set is a file (.jsonl, .json, .txt, "),
        ("a", b"text", "this file cannot be read; a data set is a file"),
        ("a.gz", b"text", "this file cannot be read; a data set is a file"),
    ],
    ids=SHORT,
)
def test_a_bad_file_is_told_in_one_line(tmp_path, name, content, line):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        read(tmp_path / name)
    said = str(error.value)
    assert said.startswith(line) and "\n" not in said and len(said) < 400


@pytest.mark.parametrize(
    "dataset, split, subset, line",
    [
        ("no/such/folder/texts", "train", None, "there is no such file or folder"),
        ("./texts", "train", None, "there is no such file or folder"),
        ("texts.jsonl", "train", None, "there is no such file or folder"),
        ("me/texts.jsonl.gz", "train", None, "there is no such file or folder"),
        ("dangling.txt", "train", None, "there is no such file or folder"),
        ("here.txt", "test", None, "one file is the split train; there is no split test"),
        ("here.txt", "train", "en", "it has no subsets; leave --subset out"),
    ],
)
def test_a_path_split_or_subset_that_is_not_there(tmp_path, monkeypatch, dataset, split, subset, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.txt").write_text("a")
    (tmp_path / "dangling.txt").symlink_to("nowhere")
    with pytest.raises(ValueError) as error:
        open_documents(dataset, split, subset, "text")
    assert str(error.value) == line
