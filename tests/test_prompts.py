"""Prompt files of every format."""

import csv
import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from redraft.chat import encode_user_turn
from redraft.prompts import load_prompts, read_prompts, spread
from tests.toy_engine import toy_codec

SHIPPED = Path(__file__).parents[1] / "benchmarks" / "prompts.jsonl"
KINDS = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "first "}, {"type": "text", "text": "part"}]},
    {"role": "assistant", "content": "an answer"},
    {"role": "user", "content": "later"},
]
SHAREGPT = [
    {"from": "gpt", "value": "Welcome."},
    {"from": "human", "value": "first part"},
    {"from": "gpt", "value": "an answer"},
]


def write(tmp_path, text, name="prompts.jsonl"):
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    return file


def turns(file, column=None):
    return [prompt.turns for prompt in read_prompts(file, column).prompts]


def test_shipped_prompts_cover_every_kind():
    prompts = load_prompts(SHIPPED)
    assert len(prompts) >= 80
    counts = Counter(prompt.category for prompt in prompts)
    assert set(counts) == KINDS
    assert min(counts.values()) >= 10
    assert len({prompt.question_id for prompt in prompts}) == len(prompts)
    assert len({prompt.turns[0] for prompt in prompts}) == len(prompts)
    assert {len(prompt.turns) for prompt in prompts} == {1, 2}


def test_fields_beside_the_prompt(tmp_path):
    rows = [
        {"question_id": 81, "category": "qa", "turns": ["a", "b"], "reference": []},
        {"prompt": "c", "source": "mine", "response": "d"},
        {"prompt": "e", "source": None, "turns": None},
    ]
    first, second, third = read_prompts(write(tmp_path, "\n".join(map(json.dumps, rows)) + "\n\n")).prompts
    assert (first.question_id, first.category, first.turns, first.response) == ("81", "qa", ("a", "b"), None)
    assert (second.question_id, second.category, second.turns, second.response) == ("2", "mine", ("c",), "d")
    assert (third.category, third.turns) == ("all", ("e",))


@pytest.mark.parametrize(
    ("row", "expected", "response"),
    [
        ({"messages": MESSAGES}, ("first part", "later"), "an answer"),
        ({"conversations": SHAREGPT, "id": "x"}, ("first part",), "an answer"),
        ({"prompt": "a", "messages": MESSAGES}, ("a",), None),
        ({"messages": MESSAGES[:2] + MESSAGES[3:]}, ("first part", "later"), None),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]}, ("a",), None),
        ("a text\nof two lines", ("a text\nof two lines",), None),
    ],
)
def test_rows_of_every_shape(tmp_path, row, expected, response):
    for text in (json.dumps(row), json.dumps([row], indent=2)):
        (prompt,) = read_prompts(write(tmp_path, text)).prompts
        assert (prompt.turns, prompt.response) == (expected, response)


@pytest.mark.parametrize(
    ("name", "text", "column"),
    [
        ("p.txt", "a, b\n\n  [c]  \n", None),
        ("p.json", '["a, b", ["[c]"]]', None),
        ("p.jsonl", '["a, b"]\n["[c]"]', None),
        ("p.jsonl", '{"instruction": "a, b", "prompt": "x"}\n{"instruction": "[c]"}', "instruction"),
        ("p.csv", 'id,prompt\n1,"a, b"\n2,[c]\n', None),
        ("p.csv", 'question;kind\r\n"a, b";x\r\n[c];y\r\n', "question"),
        ("p.tsv", "kind\tquestion\nx\ta, b\ny\t[c]\nz\n", "question"),
    ],
)
def test_the_same_prompts_in_every_text_format(tmp_path, name, text, column):
    assert turns(write(tmp_path, text, name), column) == [("a, b",), ("[c]",)]
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert turns(packed, column) == [("a, b",), ("[c]",)]


def test_a_csv_cell_may_be_long_and_have_several_lines(tmp_path):
    text = "word\n" * 50_000
    for cell in (text, "short"):
        assert turns(write(tmp_path, f'prompt\n"{cell}"\n', "p.csv")) == [(cell,)]
        assert csv.field_size_limit() >= len(text), "other readers of CSV in this process keep what they had"


def test_parquet(tmp_path):
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    file = tmp_path / "p.parquet"
    parquet.write_table(pyarrow.table({"messages": [MESSAGES[2:], SHAREGPT and None], "text": ["a", "b"]}), file)
    assert turns(file) == [("later",)]
    assert turns(file, "text") == [("a",), ("b",)]
    with pytest.raises(ValueError, match="there is no field 'question': --column takes one of 'messages', 'text'"):
        read_prompts(file, "question")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="not Parquet, or damaged"):
        read_prompts(file)


def test_a_model_without_a_chat_template_gets_the_text_as_it_is(tmp_path):
    codec = toy_codec()
    assert encode_user_turn(tmp_path, codec, "hello") == codec.encode("hello")
    (tmp_path / "chat_template.jinja").write_text("<{{ messages[0].content }}>")
    assert encode_user_turn(tmp_path, codec, "hello") == codec.encode("<hello>")


def test_references_are_texts_by_turn(tmp_path):
    rows = [
        {"turns": ["a"], "reference": ["x"]},
        {"turns": ["a", "b"], "reference": [["x", " ", "y"], ""]},
        {"turns": ["a"], "reference": None},
        {"turns": ["a"]},
    ]
    file = write(tmp_path, "\n".join(map(json.dumps, rows)))
    assert [prompt.references for prompt in load_prompts(file)] == [(("x",),), (("x", "y"), ()), (), ()]


def test_one_column_of_text_with_commas_is_read_whole(tmp_path):
    file = tmp_path / "prompts.csv"
    file.write_text('prompt\nHello, how are you?\n"Two; lines,\nof one"\n')
    assert [prompt.turns[0] for prompt in load_prompts(file)] == ["Hello, how are you?", "Two; lines,\nof one"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "expected a text, a list of texts, or a list of messages"),
        ('{"instruction": "a"}', "no turns, prompt, messages or conversations among 'instruction': .*--column"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "content is"),
    ],
)
def test_wrong_lines_are_named(tmp_path, line, message):
    with pytest.raises(ValueError, match=rf"prompts.jsonl, line 2: .*{message}"):
        load_prompts(write(tmp_path, '{"prompt": "good"}\n' + line))


@pytest.mark.parametrize(
    ("name", "content", "column", "message"),
    [
        ("p.jsonl", b"", None, "holds no prompts"),
        ("p.bin", bytes(range(256)) * 9, None, "neither UTF-8 text nor Parquet"),
        ("p.txt.gz", b"\x1f\x8b\x08 cut", None, "neither UTF-8 text nor Parquet"),
        ("p.csv", b"question,answer\na,b\n", None, "among 'question', 'answer': name the field with --column"),
    ],
)
def test_files_without_prompts(tmp_path, name, content, column, message):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        read_prompts(file, column)
    assert str(file) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_spreading_over_a_sorted_file():
    prompts = load_prompts(SHIPPED)
    assert {prompt.category for prompt in spread(prompts, 8)} == KINDS
    assert len(set(spread(prompts, 30))) == 30
    assert spread(prompts, None) == spread(prompts, 500) == prompts


def test_a_byte_order_mark_is_no_text(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "c"}\n', encoding="utf-8-sig")
    assert turns(file) == [("c",)]


def test_speed_bench(tmp_path, capsys):
    """Rows whose texts are to be fetched must not be sent as prompts."""
    marker = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    row = {
        "category": "math",
        "sub_category": "algebra",
        "source": "s",
        "src_id": "1",
        "difficulty": "",
        "multiturn": True,
    }
    rows = [
        row | {"question_id": "ab", "turns": ["one", "two"]},
        row | {"question_id": "cd", "turns": [marker, marker]},
    ]
    file = write(tmp_path, "\n".join(map(json.dumps, rows)))
    (prompt,) = load_prompts(file)
    assert (prompt.question_id, prompt.category, prompt.turns) == ("ab", "math", ("one", "two"))
    assert "1 row left out, whose texts SPEED-Bench's own script fetches" in capsys.readouterr().err
    with pytest.raises(ValueError, match="the texts of all 1 rows are to be fetched"):
        read_prompts(write(tmp_path, json.dumps(rows[1])))
