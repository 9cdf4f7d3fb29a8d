"""Local data files: which there are, what they hold, and their rows.

Rows are read by Python's own ``json`` and ``csv``, not by the readers of ``datasets``, for three reasons: an error
can name the line; what a file says survives exactly (``datasets`` 5.2 rewrites 3.14159265358979 in a nested column as
3.1415926536 and turns a CSV's ``007`` into 7 and ``NA`` into null); and a key that appears late in a file is no error.
It parses about 100 MB a second; larger sets are better kept as parquet or arrow, which ``datasets`` maps from disk.

What a file holds is told by its first bytes where they say so, by its suffix otherwise.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tuning.errors import DataError

__all__ = ["SUFFIXES", "check", "find", "holds", "is_local", "is_saved", "iter_rows"]

# suffix -> what such a file holds
SUFFIXES = {
    ".arrow": "arrow",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".tsv": "tsv",
}
_DELIMITERS = {"csv": ",", "tsv": "\t"}
_MAGIC = ((b"PAR1", "parquet"), (b"ARROW1", "arrow"), (b"\xff\xff\xff\xff", "arrow"))
_COMPRESSED = (
    (b"\x1f\x8b", "gzip"), (b"PK\x03\x04", "zip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"BZh", "bzip2"),
    (b"\xfd7zXZ", "xz"),
)  # fmt: skip
# longer marks first: the mark of UTF-32 begins with that of UTF-16
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_HEAD_BYTES = 1 << 16
_MAX_ARRAY_BYTES = 1 << 24  # an array is parsed as a whole: 0.2 s for so many bytes
_ROWS_A_CHUNK = 2_000  # a chunk's texts must fit the 2 GiB of an Arrow string array
_EXPECTED = "give a JSON array of objects, JSON lines, CSV, parquet or arrow"

Row = dict[str, Any]


def is_local(path: str, *, asked: str) -> bool:
    """Say whether ``path`` is a file or folder; if not, it must look like a hub name.

    Args:
        path: What the user gave.
        asked: Flag and value, for messages.

    Raises:
        DataError: If it is neither.
    """
    try:
        if Path(path).exists():
            return True
    except OSError as error:
        raise DataError(f"{asked} cannot be read: {error.strerror}; mend the path or its permissions") from error
    if Path(path).suffix.lower() in SUFFIXES or _HUB_NAME.fullmatch(path) is None:
        raise DataError(f"{asked} does not exist; give a file, a folder of files, or the name of a hub data set")
    return False


def is_saved(path: Path) -> bool:
    """Say whether ``path`` is a folder that ``Dataset.save_to_disk`` wrote."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def find(path: Path, *, asked: str) -> list[Path]:
    """List the data files that ``path`` stands for: itself, or those in a folder and its subfolders, sorted.

    Args:
        path: A file or a folder that exists.
        asked: What the user wrote, for messages: flag and value.

    Raises:
        DataError: If a folder holds no data file or cannot be read.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{asked} is neither a file nor a folder; {_EXPECTED}, or a folder of such files")
    try:
        found = sorted(
            file
            for file in path.rglob("*")
            if file.suffix.lower() in SUFFIXES and file.is_file() and not _is_hidden(file.relative_to(path))
        )
    except OSError as error:
        raise DataError(f"{asked} cannot be listed: {error.strerror}; mend the folder or its permissions") from error
    if not found:
        raise DataError(f"{asked} holds no data file; looked for names ending in {', '.join(sorted(SUFFIXES))}")
    return found


def holds(path: Path) -> str:
    """Say what a file holds: ``"json"``, ``"csv"``, ``"tsv"``, ``"parquet"`` or ``"arrow"``.

    Raises:
        DataError: If it is empty, cannot be read, is binary, or is of no known kind.
    """
    head = _read_head(path)
    by_suffix = SUFFIXES.get(path.suffix.lower())
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            return kind
    if by_suffix in ("parquet", "arrow"):
        raise DataError(f"{path} does not begin as {_article(by_suffix)} file does; it is damaged or of another kind")
    packed = next((name for magic, name in _COMPRESSED if head.startswith(magic)), None)
    if packed is not None:
        raise DataError(f"{path} is compressed ({packed}); unpack it and name the file that comes out")
    if _encoding(head) == "utf-8" and b"\0" in head:
        raise DataError(
            f"{path} is not text: it has a zero byte at offset {head.index(0)}; {_EXPECTED}, in UTF-8 where it is text"
        )
    if by_suffix is None and head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
        return "json"
    if by_suffix is None:
        raise DataError(f"{path} has no suffix that says what it holds; name it {', '.join(sorted(SUFFIXES))}")
    return by_suffix


def check(path: Path) -> None:
    """Read as little of a file as shows that it has a first row; of parquet, arrow and long arrays the head alone.

    Raises:
        DataError: As :func:`holds` and :func:`iter_rows`.
    """
    kind = holds(path)
    if kind == "json" and _first_character(path) == "[" and path.stat().st_size > _MAX_ARRAY_BYTES:
        return
    if kind in ("json", *_DELIMITERS):
        next(iter_rows(path, kind, chunk_rows=1))


def iter_rows(path: Path, kind: str, *, chunk_rows: int = _ROWS_A_CHUNK) -> Iterator[list[Row]]:
    """Yield the rows of a text file in chunks; blank lines are skipped.

    Args:
        path: File.
        kind: ``"json"``, ``"csv"`` or ``"tsv"``.
        chunk_rows: Rows a chunk.

    Raises:
        DataError: If there is no row, or one cannot be read; names the line.
    """
    if kind in _DELIMITERS:
        rows = _iter_csv(path, _DELIMITERS[kind])
    elif _first_character(path) == "[":
        rows = _iter_array(path)
    else:
        rows = _iter_lines(path)
    chunk: list[Row] = []
    has_rows = False
    for row in rows:
        chunk.append(row)
        has_rows = True
        if len(chunk) == chunk_rows:
            yield chunk
            chunk = []
    if not has_rows:
        raise DataError(f"{path} holds no rows; it must hold one or more")
    if chunk:
        yield chunk


def _iter_lines(path: Path) -> Iterator[Row]:
    number = 0
    try:
        # lines end by "\n", "\r\n" or "\r", none of which JSON allows inside a text; U+2028 it does, and it ends none
        with path.open(encoding=_encoding(_read_head(path))) as file:
            for number, line in enumerate(file, start=1):
                if not line.isspace():
                    yield _as_row(json.loads(line.rstrip()), path, f"line {number}")
    except json.JSONDecodeError as error:
        raise DataError(_json_problem(path, f"line {number}, column {error.colno}", error.msg, error.doc)) from error
    except RecursionError as error:
        raise DataError(f"{path}, line {number} is nested too deeply to be read; mend or remove the line") from error
    except UnicodeDecodeError as error:
        raise DataError(_encoding_problem(path, error)) from error
    except OSError as error:
        raise DataError(_access_problem(path, error)) from error


def _iter_array(path: Path) -> Iterator[Row]:
    try:
        text = path.read_text(encoding=_encoding(_read_head(path)))
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        line = text.split("\n")[error.lineno - 1]
        where = f"line {error.lineno}, column {error.colno}"
        if error.msg == "Extra data":
            raise DataError(
                f"{path}, {where}: something follows the JSON array; the file must be one array of objects, or "
                "hold one object a line"
            ) from error
        raise DataError(_json_problem(path, where, error.msg, line)) from error
    except RecursionError as error:
        raise DataError(f"{path} is nested too deeply to be read; mend or remove the row") from error
    except UnicodeDecodeError as error:
        raise DataError(_encoding_problem(path, error)) from error
    except OSError as error:
        raise DataError(_access_problem(path, error)) from error
    for index, row in enumerate(rows):
        yield _as_row(row, path, f"row {index}")


def _iter_csv(path: Path, delimiter: str) -> Iterator[Row]:
    limit = csv.field_size_limit(sys.maxsize)  # the default refuses a field of more than 131,072 characters
    line = 1
    try:
        with path.open(encoding=_encoding(_read_head(path)), newline="") as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            columns = next(reader, [])
            _check_header(path, columns)
            for values in reader:
                line = reader.line_num
                if not values:
                    continue
                if len(values) != len(columns):
                    raise DataError(
                        f"{path}, line {line} has {len(values)} fields, but the first line names {len(columns)} "
                        "columns; quote a field that holds a delimiter or a line break"
                    )
                yield dict(zip(columns, values, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}, after line {line}: {error}; mend the quotes there") from error
    except UnicodeDecodeError as error:
        raise DataError(_encoding_problem(path, error)) from error
    except OSError as error:
        raise DataError(_access_problem(path, error)) from error
    finally:
        csv.field_size_limit(limit)


def _check_header(path: Path, columns: list[str]) -> None:
    bad = [name for name in columns if not name.strip() or columns.count(name) > 1]
    if bad:
        raise DataError(
            f"{path}, line 1 names the column {bad[0]!r} {columns.count(bad[0])} times; the first line must give each "
            "column a name of its own"
        )


def _as_row(value: object, path: Path, where: str) -> Row:
    if isinstance(value, dict):
        return value
    raise DataError(
        f"{path}, {where} is {_json_name(value)}, not an object; a row must be an object with named columns, such as "
        '{"input": "...", "output": "..."}'
    )


def _read_head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise DataError(_access_problem(path, error)) from error
    if not head:
        raise DataError(f"{path} is empty; it must hold one row or more")
    return head


def _encoding(head: bytes) -> str:
    return next((name for mark, name in _BYTE_ORDER_MARKS if head.startswith(mark)), "utf-8")


def _first_character(path: Path) -> str:
    head = _read_head(path)
    return head.decode(_encoding(head), errors="ignore").lstrip()[:1]


def _json_problem(path: Path, where: str, message: str, line: str) -> str:
    begin = line.strip()[:60]
    return (
        f"{path}, {where} is not complete JSON ({message}); mend the line that begins {begin!r}: a row must be one "
        "whole object on one line, or the file one JSON array of objects"
    )


def _encoding_problem(path: Path, error: UnicodeDecodeError) -> str:
    encoding = error.encoding.upper()
    where = f", line {_bad_line(path)}" if encoding == "UTF-8" else ""
    byte = error.object[error.start]
    return f"{path}{where}: byte 0x{byte:02x} is not valid {encoding}; save the file as UTF-8 text"


def _bad_line(path: Path) -> int:
    """Return the first line that is not UTF-8, from 1; the reader's own position is only that of its buffer."""
    line = 0
    with path.open("rb") as file:
        for content in file:
            line += 1
            try:
                content.decode()
            except UnicodeDecodeError:
                break
    return line


def _access_problem(path: Path, error: OSError) -> str:
    return f"{path} cannot be read: {error.strerror}; mend the path or its permissions"


def _json_name(value: object) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "__")) for part in path.parts)
