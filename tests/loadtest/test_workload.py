"""Chat templates and arrival processes."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from redraft.loadtest.workload import ChatTokenizer, arrival_times, conversations_of, pick_prompts
from redraft.prompts import Prompt, load_prompts

SHIPPED = Path(__file__).parents[2] / "benchmarks" / "prompts.jsonl"


def test_each_prompt_is_used_before_any_repeats():
    prompts = load_prompts(SHIPPED)
    picked = pick_prompts(prompts, len(prompts) + 5, seed=3)
    assert len(picked) == len(prompts) + 5
    assert set(picked[: len(prompts)]) == set(prompts)
    assert picked == pick_prompts(prompts, len(prompts) + 5, seed=3)
    assert picked != pick_prompts(prompts, len(prompts) + 5, seed=4)


@pytest.fixture
def model_folder(tmp_path):
    tokenizer = Tokenizer(WordLevel({"user": 0, "hi": 1, "go": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": "inline"}))
    return tmp_path


def test_a_template_leaves_no_special_tokens_to_the_tokenizer(model_folder):
    """A token that the tokenizer writes and the template does not is in no chat that the model has seen."""
    (model_folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert ChatTokenizer(model_folder).adds_special_tokens, "this one has none to add"
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="go $A", special_tokens=[("go", 2)])
    tokenizer.save(str(model_folder / "tokenizer.json"))
    assert not ChatTokenizer(model_folder).adds_special_tokens
    assert not ChatTokenizer(model_folder).request("hi", 3).add_special_tokens


def test_chat_template_of_a_folder(model_folder):
    (model_folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}\n{{ m['role'] }}: {{ m['content'] }};\n{% endfor %}\n"
        "{% if add_generation_prompt %}\ngo{% endif %}"
    )
    tokenizer = ChatTokenizer(model_folder)
    assert tokenizer.chat("hi") == "<s>user: hi;\ngo", "a newline after a block belongs to the block"
    assert tokenizer.encode("user hi go") == [0, 1, 2]
    assert tokenizer.decode([1, 2]) == "hi go"


def test_chat_template_inside_the_tokenizer_config(model_folder):
    assert ChatTokenizer(model_folder).chat("hi") == "inline"


def test_lengthened_prompts_share_no_passage(tmp_path):
    words = {f"w{place}": place for place in range(500)} | {"?": 500}
    tokenizer = Tokenizer(WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    prompts = [Prompt(str(place), "c", (f"w{place}",)) for place in range(500)]
    made = conversations_of(prompts, 6, 0, ChatTokenizer(tmp_path), prompt_tokens=200)
    assert len({conversation.turns[0].split()[0] for conversation in made}) == 6
    assert all(198 <= len(conversation.turns[0].split()) <= 200 for conversation in made)


@pytest.mark.parametrize("tokens", [4096, 8064])
def test_prompts_of_4k_and_8k_tokens(smollm2, tokens):
    """With a tokenizer that reads a passage otherwise beside other text: up to 1% fewer."""
    tokenizer = ChatTokenizer(smollm2)
    for conversation in conversations_of(load_prompts(SHIPPED), 3, 0, tokenizer, prompt_tokens=tokens):
        assert tokens - tokens // 100 <= len(tokenizer.encode(tokenizer.chat(conversation.turns[0]))) <= tokens


def test_each_run_has_passages_of_its_own(tmp_path):
    """A server that caches prefixes would answer the second run from the first."""
    words = {f"w{place}": place for place in range(500)} | {"?": 500}
    tokenizer = Tokenizer(WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    prompts = [Prompt("q", "c", (" ".join(words),)), Prompt("r", "c", ("w1",))]
    first, second, again = (
        conversations_of(prompts, 1, seed, ChatTokenizer(tmp_path), prompt_tokens=200)[0].turns for seed in (0, 1, 0)
    )
    assert first == again
    assert first[0].split()[0] != second[0].split()[0]


def test_folder_without_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        ChatTokenizer(tmp_path)


@pytest.mark.parametrize("process", ["constant", "poisson"])
@pytest.mark.parametrize("rate", [0.5, 2.0, 40.0])
def test_arrivals_keep_the_rate(process, rate):
    times = arrival_times(rate, 200, process, seed=1)
    assert times[0] == 0
    assert (np.diff(times) >= 0).all()
    assert times[-1] == pytest.approx(199 / rate)


def test_poisson_gaps_are_exponential():
    gaps = np.diff(arrival_times(3.0, 20_001, seed=5))
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.03)
    assert (gaps > 1 / 3).mean() == pytest.approx(np.exp(-1), abs=0.02)


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (4.0, 0.5)])
def test_burstiness_sets_the_variation_of_gaps(burstiness, variation):
    gaps = np.diff(arrival_times(1.0, 20_001, burstiness=burstiness, seed=5))
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)


def test_arrivals_are_seeded():
    assert (arrival_times(1, 9, seed=1) == arrival_times(1, 9, seed=1)).all()
    assert (arrival_times(1, 9, seed=1) != arrival_times(1, 9, seed=2)).any()


def test_infinite_rate_sends_everything_at_once():
    assert arrival_times(float("inf"), 5).tolist() == [0] * 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 5), "request rate"),
        ((float("nan"), 5), "request rate"),
        ((1, 0), "number of prompts"),
        ((1, 5, "uniform"), "arrival"),
        ((1, 5, "poisson", 0), "burstiness"),
    ],
)
def test_arrival_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        arrival_times(*arguments)
