"""Reading the user's data, every way in which it can be wrong, and the split by hash."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from nlpconvert.dataset import check_disjoint, parse_columns, read, row_key, split
from nlpconvert.errors import UsageError


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_txt_is_a_text_a_line(tmp_path: Path) -> None:
    path = write(tmp_path, "a.TXT", "\ufeffone\r\n\n two\u2028still two \nüç")
    assert read(path, "feature-extraction") == [{"text": "one"}, {"text": " two\u2028still two "}, {"text": "üç"}]


def test_jsonl_keeps_the_tasks_columns_only(tmp_path: Path) -> None:
    path = write(
        tmp_path, "a.jsonl", '\ufeff{"text": "a", "label": 1, "extra": {}}\n\n{"text": "", "text_pair": null}\n'
    )
    assert read(path, "text-classification") == [{"text": "a", "label": 1}, {"text": ""}]


def test_csv_with_quotes_and_line_breaks(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", '\ufefftext,label,text_pair\n"a, ""b""\nc",7,\nd,good,e\n')
    assert read(path, "text-classification") == [
        {"text": 'a, "b"\nc', "label": 7},
        {"text": "d", "label": "good", "text_pair": "e"},
    ]


def test_csv_holds_lists_as_json(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", 'tokens,tags\n"[""a"", ""b""]","[0, ""B""]"\n')
    assert read(path, "token-classification") == [{"tokens": ["a", "b"], "tags": [0, "B"]}]


def test_other_tasks(tmp_path: Path) -> None:
    answers = '{"question": "q", "context": "c", "answers": {"text": ["c"], "answer_start": [0]}}'
    (row,) = read(write(tmp_path, "a.jsonl", answers), "question-answering")
    assert row["answers"] == {"text": ["c"], "answer_start": [0]}
    (row,) = read(write(tmp_path, "b.jsonl", '{"text": "t", "choices": ["a", "b"]}'), "multiple-choice")
    assert row == {"text": "t", "choices": ["a", "b"]}
    (row,) = read(write(tmp_path, "c.jsonl", '{"text": "t", "target": "u"}'), "text2text-generation")
    assert row == {"text": "t", "target": "u"}


def test_columns_rename_theirs(tmp_path: Path) -> None:
    columns = parse_columns("text=body, label=y=z")
    assert columns == {"text": "body", "label": "y=z"}
    path = write(tmp_path, "a.csv", "body,y=z,text\nours,3,not this one\n")
    assert read(path, "text-classification", columns=columns) == [{"text": "ours", "label": 3}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("text", "'text' is not \"ours=theirs\""),
        ("", "is not"),
        ("text=a,", "'' is not"),
        ("=a", "'=a' is not"),
        ("text=a,text=b", "names 'text' twice"),
    ],
)
def test_wrong_columns_option(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_columns(text)


WRONG: tuple[tuple[str, str, str | bytes, str], ...] = (
    # file, task, content, what the message says after the file's path
    ("a.txt", "fill-mask", "", ": is empty"),
    ("a.txt", "fill-mask", " \n\n", ": is empty"),
    ("a.csv", "fill-mask", "text\n", ": holds no rows"),
    ("a.tsv", "fill-mask", "text\n", ": cannot tell what kind of file this is; use one of .txt, .jsonl, .csv"),
    ("a", "fill-mask", "text\n", ": cannot tell what kind"),
    ("a.txt", "fill-mask", b"one\ntwo\n\0\n", ", line 3: holds a NUL byte, so it is binary or UTF-16"),
    ("a.txt", "fill-mask", "text".encode("utf-16"), ", line 1: holds a NUL byte"),
    ("a.txt", "fill-mask", "one\ncafé".encode("latin-1"), ", line 2: is not UTF-8 (byte 0xe9)"),
    (
        "a.txt",
        "question-answering",
        "one",
        ": a .txt file holds one column, text; question-answering needs question, context",
    ),
    (
        "a.txt",
        "text2text-generation",
        "one",
        ": a .txt file holds one column, text; text2text-generation needs text, target",
    ),
    ("a.jsonl", "fill-mask", '{"text": "a"}\n{"text": \n', ", line 2: is not JSON: Expecting value"),
    ("a.jsonl", "fill-mask", "just words\n", ", line 1: is not JSON"),
    ("a.jsonl", "fill-mask", "[" * 100000, ", line 1: is not JSON"),
    ("a.jsonl", "fill-mask", '["a"]', ', line 1: is a list, not an object like {"text": "..."}'),
    ("a.jsonl", "fill-mask", "3", ", line 1: is a number, not an object"),
    (
        "a.jsonl",
        "fill-mask",
        '{"text": "a"}\n{"txt": "b"}',
        ", line 2: has no column 'text'; found 'txt'; if another one is meant",
    ),
    ("a.jsonl", "fill-mask", "{}", ", line 1: has no column 'text'; found none"),
    ("a.jsonl", "fill-mask", '{"text": 3}', ", line 1: column 'text' is a number, not a text"),
    ("a.jsonl", "fill-mask", '{"text": null}', ", line 1: column 'text' is null, not a text"),
    ("a.jsonl", "fill-mask", '{"text": "\\ud83d"}', ", line 1: column 'text' holds half of a surrogate pair"),
    (
        "a.jsonl",
        "text-classification",
        '{"text": "a", "label": 0.5}',
        ", line 1: column 'label' is a number, not a text or a whole",
    ),
    ("a.jsonl", "text-classification", '{"text": "a", "label": true}', ", line 1: column 'label' is true or false"),
    (
        "a.jsonl",
        "token-classification",
        '{"tokens": "a b"}',
        ", line 1: column 'tokens' is a text, not a list of texts",
    ),
    ("a.jsonl", "token-classification", '{"tokens": ["a", 1]}', ", line 1: column 'tokens' holds more than texts"),
    (
        "a.jsonl",
        "token-classification",
        '{"tokens": []}',
        ", line 1: column 'tokens' is a list of 0; it needs 1 or more",
    ),
    ("a.jsonl", "token-classification", '{"tokens": ["a"], "tags": [1, 2]}', ", line 1: 2 tags for 1 tokens"),
    (
        "a.jsonl",
        "token-classification",
        '{"tokens": ["a"], "tags": 1}',
        ", line 1: column 'tags' is a number, not a list",
    ),
    (
        "a.jsonl",
        "multiple-choice",
        '{"text": "a", "choices": ["b"]}',
        ", line 1: column 'choices' is a list of 1; it needs 2",
    ),
    (
        "a.jsonl",
        "multiple-choice",
        '{"text": "a", "choices": ["b", "\\udc00"]}',
        ", line 1: column 'choices' holds half",
    ),
    (
        "a.jsonl",
        "question-answering",
        '{"question": "q", "context": "c", "answers": ["c"]}',
        "'answers' is not SQuAD's form",
    ),
    (
        "a.jsonl",
        "question-answering",
        '{"question": "q", "context": "c", "answers": {"text": ["c"], "answer_start": [1, 2]}}',
        "'answers' is not SQuAD's form",
    ),
    (
        "a.csv",
        "fill-mask",
        "body,y\na,1\n",
        ", line 1: has no column 'text'; found 'body', 'y'; if another one is meant: --columns text=",
    ),
    ("a.csv", "fill-mask", '{"text": "a"}\n{"text": "b"}\n', ", line 1: has no column 'text'"),
    ("a.csv", "fill-mask", "text,text\na,b\n", ", line 1: has the column 'text' 2 times"),
    (
        "a.csv",
        "fill-mask",
        "text,y\na,1\nb, c,2\n",
        ", line 3: has 3 cells where the header has 2; a cell with a comma",
    ),
    ("a.csv", "fill-mask", 'text,y\n"a\nb",1\n"c\nd",2,3\n', ", line 4: has 3 cells where the header has 2"),
    ("a.csv", "fill-mask", 'text\n"a\nb"\n"open\n', ", line 4: is not CSV: unexpected end of data"),
    ("a.csv", "fill-mask", "text\n" + "x" * 200000, ", line 2: is not CSV: field larger than field limit"),
    ("a.csv", "token-classification", "tokens\na b\n", ", line 2: column 'tokens' is a text, not a list"),
)


@pytest.mark.parametrize(("name", "task", "content", "message"), WRONG)
def test_what_is_wrong_is_said_in_one_line_with_the_place(
    tmp_path: Path, name: str, task: str, content: str | bytes, message: str
) -> None:
    path = write(tmp_path, name, content)
    with pytest.raises(UsageError) as caught:
        read(path, task)
    said = str(caught.value)
    assert said.startswith(str(path)) and message in said and "\n" not in said


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone\.txt: no such file"):
        read(tmp_path / "gone.txt", "fill-mask")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(UsageError, match=r"folder\.txt: is a directory; --data takes one file"):
        read(tmp_path / "folder.txt", "fill-mask")
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(UsageError, match="is not a regular file"):
        read(tmp_path / "pipe.txt", "fill-mask")
    with pytest.raises(UsageError, match=r"cannot be read|no such file"):
        read(tmp_path / ("x" * 300 + ".txt"), "fill-mask")


def test_columns_that_the_task_or_the_file_lacks(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "text\na\n")
    with pytest.raises(UsageError, match="fill-mask has no column 'label'; it has text, text_pair"):
        read(path, "fill-mask", columns={"label": "y"})
    with pytest.raises(UsageError, match="line 1: has no column 'other'; found 'text'"):
        read(path, "fill-mask", columns={"text_pair": "other"})
    with pytest.raises(UsageError, match="nothing to rename"):
        read(write(tmp_path, "a.txt", "a"), "fill-mask", columns={"text": "body"})


# -- the split ---------------------------------------------------------------------------------------------------------


def some(n: int) -> list[dict[str, Any]]:
    return [{"text": f"text number {i}"} for i in range(n)]


def test_split_is_about_40_20_40_and_holds_every_row_once() -> None:
    rows = some(2000)
    parts = split(rows)
    assert [round(len(part) / 2000, 1) for part in parts.values()] == [0.4, 0.2, 0.4]
    assert list(parts) == ["calibrate", "select", "judge"]
    assert sorted(row["text"] for part in parts.values() for row in part) == sorted(row["text"] for row in rows)


def test_more_data_moves_no_text() -> None:
    before, after = split(some(300)), split(some(600))
    for name, part in before.items():
        assert all(row in after[name] for row in part)


def test_duplicates_and_shared_passages_fall_together() -> None:
    assert row_key({"text": " Straße\u00a0 ONE "}) == row_key({"text": "STRASSE one"})
    assert row_key({"text": "ﬁne"}) == row_key({"text": "fine"}) != row_key({"text": "fine."})
    passage = "a passage that is longer than its questions"
    assert row_key({"question": "why?", "context": passage}) == row_key({"question": "how?", "context": passage})
    rows = some(200)
    parts = split(rows + [{"text": row["text"].upper(), "label": 1} for row in rows])
    check_disjoint(parts)


def test_an_overlap_is_an_error() -> None:
    with pytest.raises(
        UsageError, match="'One Text' stands both in calibrate and in judge; take it out of one of them"
    ):
        check_disjoint({"calibrate": [{"text": "one  text"}], "select": [], "judge": [{"text": "One Text"}]})
    with pytest.raises(UsageError, match="'a b' stands both"):
        check_disjoint({"calibrate": [{"tokens": ["a", "b"]}], "judge": [{"tokens": ["a", "b"]}]})


def test_too_few_different_texts() -> None:
    with pytest.raises(UsageError, match=r"50 rows with 1 different texts leave nothing to \w+ and \w+ on"):
        split([{"text": "the same"}] * 50)


def test_columns_that_a_metric_needs_besides(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("s1,s2,label\nOne cat.,A cat.,4.2\nTwo,,3\n")
    columns = {"text": "s1", "text_pair": "s2", "score": "label"}
    with pytest.raises(UsageError, match="has no column 'text_pair'"):
        read(path, "sentence-embedding", columns=columns)
    rows = read(path, "sentence-embedding", columns=columns, more=("text_pair", "score"))
    assert rows[0] == {"text": "One cat.", "text_pair": "A cat.", "score": 4.2}
    assert rows[1] == {"text": "Two", "score": 3}, "an optional one may be empty"
    path.write_text("text,score\nOne,high\n")
    with pytest.raises(UsageError, match=r"column 'score' is a text, not a number that is finite"):
        read(path, "sentence-embedding", more=("score",))
    path.with_suffix(".jsonl").write_text('{"text": "a", "score": NaN}\n')
    with pytest.raises(UsageError, match="not a number that is finite"):
        read(path.with_suffix(".jsonl"), "sentence-embedding", more=("score",))
