"""Every kind of text file, and every way one can be broken, with the whole message."""

import codecs
import csv
import json
from pathlib import Path

import pytest

from tuning.data import files
from tuning.errors import DataError

ROWS = [{"input": "one", "output": "1"}, {"input": "two", "output": "2"}, {"input": "drei ü", "output": "3"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


def read(path):
    path = Path(path)
    return [row for chunk in files.iter_rows(path, files.holds(path)) for row in chunk]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".ndjson", ".JSONL", ".txt", ""])
@pytest.mark.parametrize(
    "content",
    [
        LINES.encode(),
        codecs.BOM_UTF8 + LINES.replace("\n", "\r\n").encode(),
        LINES.replace("\n", "\n\n  \n").rstrip("\n").encode(),
        LINES.replace("\n", "\r").encode(),
        json.dumps(ROWS, indent=1).encode(),
        codecs.BOM_UTF8 + json.dumps(ROWS, indent=1).replace("\n", "\r\n").encode(),
    ],
    ids=["plain", "bom and crlf", "blank lines", "lone carriage returns", "array", "array with bom and crlf"],
)
def test_json_in_any_dress(write, content, suffix):
    # https://github.com/huggingface/datasets/issues/8241
    assert read(write(content, "rows" + suffix)) == ROWS


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_json_as_windows_calls_unicode(write, encoding):
    mark = codecs.BOM_UTF16_LE if encoding == "utf-16-le" else b""
    assert read(write(mark + LINES.encode(encoding))) == ROWS


def test_line_separators_inside_a_text_split_no_row(write):
    rows = [{"text": "a\u2028b\u2029c\x85d\re"}, {"text": "f"}]
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    assert read(write(content)) == rows


def test_numbers_and_nulls_are_what_the_file_says(write):
    row = {"x": 3.14159265358979, "n": 2**70, "none": None, "nested": {"default": None, "v": 1e-7}}
    assert read(write([row])) == [row]


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv"])
def test_csv_keeps_texts_as_they_are(write, name):
    delimiter = "\t" if name.endswith("tsv") else ","
    lines = [["input", "output"], ["007", "NA"], ["1.10", ""], ['say "hi"', "two\nlines, one comma"]]
    content = "\r\n".join(delimiter.join('"' + field.replace('"', '""') + '"' for field in line) for line in lines)
    assert read(write(codecs.BOM_UTF8 + content.encode(), name)) == [
        {"input": "007", "output": "NA"},
        {"input": "1.10", "output": ""},
        {"input": 'say "hi"', "output": "two\nlines, one comma"},
    ]


def test_csv_takes_long_fields_and_leaves_the_limit_of_the_module_alone(write):
    before = 131_072  # the default
    csv.field_size_limit(before)
    assert read(write("text\n" + "x" * 200_000 + "\n", "long.csv")) == [{"text": "x" * 200_000}]
    assert csv.field_size_limit() == before


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b"", "rows.jsonl", "{path} is empty; it must hold one row or more"),
        (b" \n\r\n", "rows.jsonl", "{path} holds no rows; it must hold one or more"),
        (b"[]", "rows.json", "{path} holds no rows; it must hold one or more"),
        (b"a,b\n", "rows.csv", "{path} holds no rows; it must hold one or more"),
        (
            LINES.encode() + b'{"input": "fo',
            "rows.jsonl",
            "{path}, line 4, column 11 is not complete JSON (Unterminated string starting at); mend the line that "
            'begins \'{{"input": "fo\': a row must be one whole object on one line, or the file one JSON array of '
            "objects",
        ),
        (
            b'{\n "input": "a"\n}\n',
            "rows.json",
            "{path}, line 1, column 2 is not complete JSON (Expecting property name enclosed in double quotes); mend "
            "the line that begins '{{': a row must be one whole object on one line, or the file one JSON array of "
            "objects",
        ),
        (
            b'[{"a": 1},\n {"a": 2},\n',
            "rows.json",
            "{path}, line 3, column 1 is not complete JSON (Expecting value); mend the line that begins '': a row must "
            "be one whole object on one line, or the file one JSON array of objects",
        ),
        (
            b'[{"a": 1}]\n[{"a": 2}]\n',
            "rows.json",
            "{path}, line 2, column 1: something follows the JSON array; the file must be one array of objects, or "
            "hold one object a line",
        ),
        (
            b'{"a": 1}\n["a", 2]\n',
            "rows.jsonl",
            "{path}, line 2 is a list, not an object; a row must be an object with named columns, such as "
            '{{"input": "...", "output": "..."}}',
        ),
        (
            b'{"a": 1}\n"text"\n',
            "rows.jsonl",
            "{path}, line 2 is a text, not an object; a row must be an object with named columns, such as "
            '{{"input": "...", "output": "..."}}',
        ),
        (
            b'[{"a": 1}, null]',
            "rows.json",
            "{path}, row 1 is null, not an object; a row must be an object with named columns, such as "
            '{{"input": "...", "output": "..."}}',
        ),
        (
            b"\x1f\x8b\x08\x00",
            "rows.jsonl.gz",
            "{path} is compressed (gzip); unpack it and name the file that comes out",
        ),
        (b"PK\x03\x04\x14\x00", "rows", "{path} is compressed (zip); unpack it and name the file that comes out"),
        (
            b'{"a": 1}\n\x00\x01\x02\n',
            "rows.jsonl",
            "{path} is not text: it has a zero byte at offset 9; give a JSON array of objects, JSON lines, CSV, "
            "parquet or arrow, in UTF-8 where it is text",
        ),
        (
            b'{"a": "x"}\n{"a": "caf\xe9"}\n',
            "rows.jsonl",
            "{path}, line 2: byte 0xe9 is not valid UTF-8; save the file as UTF-8 text",
        ),
        (
            b'[{"a": "caf\xe9"}]',
            "rows.json",
            "{path}, line 1: byte 0xe9 is not valid UTF-8; save the file as UTF-8 text",
        ),
        (
            b"a,b\n1,2\n1,caf\xe9\n",
            "rows.csv",
            "{path}, line 3: byte 0xe9 is not valid UTF-8; save the file as UTF-8 text",
        ),
        (
            codecs.BOM_UTF16_LE + b"{\x00\x00\xdc",
            "rows.json",
            "{path}: byte 0x00 is not valid UTF-16-LE; save the file as UTF-8 text",
        ),
        (
            b"[" * 100_000,
            "rows.json",
            "{path} is nested too deeply to be read; mend or remove the row",
        ),
        (
            b'{"a": 1}\n' + b'{"a":' * 100_000 + b"\n",
            "rows.jsonl",
            "{path}, line 2 is nested too deeply to be read; mend or remove the line",
        ),
        (
            b"a,b\n1,2\n1,2,3\n",
            "rows.csv",
            "{path}, line 3 has 3 fields, but the first line names 2 columns; quote a field that holds a delimiter or "
            "a line break",
        ),
        (
            b"a,b\n1\n",
            "rows.csv",
            "{path}, line 2 has 1 fields, but the first line names 2 columns; quote a field that holds a delimiter or "
            "a line break",
        ),
        (
            b'a,b\n1,2\n1,"2\n',
            "rows.csv",
            "{path}, after line 2: unexpected end of data; mend the quotes there",
        ),
        (
            b"a,a\n1,2\n",
            "rows.csv",
            "{path}, line 1 names the column 'a' 2 times; the first line must give each column a name of its own",
        ),
        (
            b"PAR0",
            "rows.parquet",
            "{path} does not begin as a parquet file does; it is damaged or of another kind",
        ),
        (b'{"a": 1}\n', "rows.arrow", "{path} does not begin as an arrow file does; it is damaged or of another kind"),
        (
            b"hello\n",
            "rows.txt",
            "{path} has no suffix that says what it holds; name it .arrow, .csv, .json, .jsonl, .ndjson, .parquet, "
            ".tsv",
        ),
    ],
)
def test_broken_files_are_named_with_the_line(write, content, name, message):
    path = write(content, name)
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value) == message.format(path=path)


def test_a_file_that_may_not_be_read(write, monkeypatch):
    path = write(ROWS)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    # chmod does not stop root, so the refusal is made here
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError) as caught:
        files.check(Path(path))
    assert str(caught.value) == f"{path} cannot be read: Permission denied; mend the path or its permissions"


def test_a_folder_is_its_data_files_in_order(write, tmp_path):
    for name in ("b.jsonl", "sub/a.csv", "a.parquet", "README.md", ".hidden/c.json", "__pycache__/d.json"):
        write("x", "folder/" + name)
    found = files.find(tmp_path / "folder", asked="--training_data_path folder")
    assert [str(path.relative_to(tmp_path / "folder")) for path in found] == ["a.parquet", "b.jsonl", "sub/a.csv"]


def test_a_folder_inside_a_hidden_one(write, tmp_path):
    write("x", ".cache/folder/a.jsonl")
    assert len(files.find(tmp_path / ".cache" / "folder", asked="")) == 1


def test_a_folder_without_data(write, tmp_path):
    write("x", "folder/README.md")
    with pytest.raises(DataError) as caught:
        files.find(tmp_path / "folder", asked="--training_data_path folder")
    assert str(caught.value) == (
        "--training_data_path folder holds no data file; looked for names ending in .arrow, .csv, .json, .jsonl, "
        ".ndjson, .parquet, .tsv"
    )


def test_a_pipe_is_neither_file_nor_folder(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError) as caught:
        files.find(tmp_path / "pipe", asked="--training_data_path pipe")
    assert str(caught.value) == (
        "--training_data_path pipe is neither a file nor a folder; give a JSON array of objects, JSON lines, CSV, "
        "parquet or arrow, or a folder of such files"
    )


@pytest.mark.parametrize("path", ["missing.jsonl", "no/such/folder", "./x", "a b", "x.csv"])
def test_a_path_that_is_not_there_and_no_hub_name(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        files.is_local(path, asked=f"--training_data_path {path}")
    assert str(caught.value) == (
        f"--training_data_path {path} does not exist; give a file, a folder of files, or the name of a hub data set"
    )


def test_hub_names_are_told_from_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    assert not files.is_local("owner/name", asked="")
    assert not files.is_local("name", asked="")
    assert files.is_local("folder", asked="")


def test_a_path_too_long_to_ask_for():
    with pytest.raises(DataError) as caught:
        files.is_local("x" * 5000, asked="--training_data_path xxx")
    assert "--training_data_path xxx cannot be read: File name too long" in str(caught.value)


def test_check_reads_the_first_row_only(write):
    files.check(Path(write(LINES + "{broken")))
    with pytest.raises(DataError, match="line 1, column 2 is not complete JSON"):
        files.check(Path(write("{broken\n" + LINES)))
    # an array can only be read as a whole; short ones are
    with pytest.raises(DataError, match="is not complete JSON"):
        files.check(Path(write('[{"a": 1}, {"a"', "rows.json")))


def test_rows_come_in_chunks(write):
    path = Path(write([{"a": i} for i in range(5)]))
    assert [len(chunk) for chunk in files.iter_rows(path, "json", chunk_rows=2)] == [2, 2, 1]
