"""The options of a request, as `LLM`'s methods take them.

Rendered from the table in redraft/request.py by `python -m studies.figures.site`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from redraft.request import Guide


class Options(TypedDict, total=False):
    """Options of a request, with the names and meaning of `GenerateRequest` and `SamplingConfig`.

    Without `temperature` decoding is greedy. Without `seed` one is drawn; `stats.seed` has it.
    """

    stop_words: list[str]
    include_stop_words: bool
    stop_token_ids: list[int]
    bad_words: list[str]
    skip_special_tokens: bool
    method: str | None
    draft_trees: bool
    cache_prompt: bool
    cache_salt: str | None
    store: bool
    timeout_s: float | None
    add_special_tokens: bool
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    min_length: int | None
    logit_bias: dict[int, float] | None
    penalize_prompt: bool
    end_id: int | None
    pad_id: int | None
    stop_word_ids: list[list[int]]
    bad_word_ids: list[list[int]]
    return_log_probs: bool
    top_log_probs: int
    prompt_log_probs: bool
    guide: Guide | None
    exclude_input_in_output: bool
