"""HTTP bodies as the worker's requests."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from redraft.chat import Writing, turns
from redraft.errors import Code
from redraft.openai.errors import CLIENTS_FIELDS, ApiError, not_served
from redraft.openai.model import ServedModel
from redraft.openai.schemas import MAX_CHOICES, NEUTRAL, ChatBody, CompletionBody, GenerationBody, ResponsesBody
from redraft.openai.structured.formats import only_guide
from redraft.openai.structured.reader import CallReader
from redraft.openai.structured.thoughts import Thinking, ThoughtReader
from redraft.openai.structured.use import ToolUse, tool_use
from redraft.request import (
    AUTO_REGRESSIVE,
    GenerateRequest,
    Guide,
    SamplingConfig,
    SamplingOptions,
    TextOptions,
    clipped,
    shown,
)

ROLES = ("system", "developer", "user", "assistant")
"""Those that messages have. What a tool said is another kind of item."""
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
NOTHING_ENDS = -1
"""The end token of a text that no token ends."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids, and as the text that an echo begins with."""

    ids: list[int]
    text: str = ""
    thinking: Thinking | None = None
    """How thoughts may begin the answer to a conversation, if they may."""

    @property
    def thinks(self) -> bool:
        """Whether a format, or a call, begins after thoughts."""
        return self.thinking is not None and self.thinking.expected


@dataclass(frozen=True)
class Job:
    """The worker's requests of one HTTP request: those of each prompt together, in the order of the choices."""

    prompts: list[Prompt]
    n: int
    tools: ToolUse | None = None
    fields: Mapping[str, str] = field(default_factory=lambda: CLIENTS_FIELDS)
    """The client's names of the worker's fields that only the worker can check to the end."""
    requests: list[GenerateRequest] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once however many choices it has."""
        return sum(len(prompt.ids) for prompt in self.prompts)

    def call_reader(self) -> CallReader | None:
        """The reader of one choice's calls, where it may have some."""
        return self.tools.reader(self.prompts[0].thinks) if self.tools else None

    def thought_reader(self) -> ThoughtReader | None:
        """The reader of one choice's thoughts, where it may have some."""
        thinking = self.prompts[0].thinking
        return ThoughtReader(thinking) if thinking else None

    def prompt_of(self, choice: int) -> Prompt:
        """The prompt of a choice."""
        return self.prompts[choice // self.n]


def derived_seed(seed: int, choice: int) -> int:
    """The seed of one of several choices: the request's for the first, for choice i the first 63 bits of the SHA-256 of
    the text `SEED:i`. A negative seed counts as the one 2**64 above it."""
    seed %= 2**64
    if choice == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}:{choice}".encode()).digest()[:8]) >> 1


def chat_job(body: ChatBody, model: ServedModel) -> Job:
    """A conversation's job. Raises ApiError."""
    tools = tool_use([tool.function for tool in body.tools], body.tool_choice, body.parallel_tool_calls, model)
    messages = [message.model_dump() for message in body.messages]
    prompt = prompt_of(messages, tools, model, "messages", body.writing())
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    return job(body, model, [prompt], body.n, getattr(body, name), name, "messages", tools=tools)


def prompt_of(
    messages: Sequence[Mapping[str, Any]], tools: ToolUse | None, model: ServedModel, param: str, writing: Writing
) -> Prompt:
    """The prompt of a conversation, the field `param`, with the tools that it may call. Raises ApiError."""
    text, thinking = prompt_text(messages, tools, model, param, writing)
    ids = model.encode(text, param, model.encoder(writing), add_special_tokens=False)  # the template writes them
    return Prompt(ids, thinking=thinking)


def prompt_text(
    messages: Sequence[Mapping[str, Any]], tools: ToolUse | None, model: ServedModel, param: str, writing: Writing
) -> tuple[str, Thinking | None]:
    """The same before it is encoded, and how thoughts may begin the answer. A forced call's opening is part of it where
    no thoughts come before the call."""
    text = model.chat_text(messages, tools.for_template if tools else [], param, writing)
    continued = turns(messages)[-1]["content"] if writing.continue_final_message else ""
    thinking = model.thinking_after(text, continued)
    if tools is not None and not (thinking and thinking.expected):
        text += tools.opening
    return text, thinking


def completion_job(body: CompletionBody, model: ServedModel) -> Job:
    """The job of one or more prompts. Raises ApiError."""
    prompts = []
    for item in body.prompt:
        if isinstance(item, str):
            prompts.append(Prompt(model.encode(item, "prompt", add_special_tokens=body.add_special_tokens), item))
        else:
            ids = model.check_ids(item, "prompt")
            prompts.append(Prompt(ids, model.codec.decode(ids, body.skip_special_tokens) if body.echo else ""))
    prompt_log_probs = body.echo and body.log_probs
    return job(body, model, prompts, body.n, body.max_tokens, "max_tokens", "prompt", prompt_log_probs=prompt_log_probs)


def responses_job(body: ResponsesBody, model: ServedModel) -> Job:
    """The job of a request. Raises ApiError."""
    tools = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, model)
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        messages += _messages(body.input)
    if not messages:
        raise ApiError("input: expected at least one message, got none", "input")
    try:
        prompt = prompt_of(messages, tools, model, "input", body.writing())
    except ApiError:
        if body.instructions:
            model.encode(body.instructions, "instructions")  # raises where they are too long by themselves
        raise
    return job(body, model, [prompt], 1, body.max_output_tokens, "max_output_tokens", "input", tools=tools)


def _messages(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items of the input as messages: calls belong to the assistant's message before them, and thoughts to what comes
    after them."""
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        message = _message(item, f"input[{index}]")
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" == message["role"] else {}
        if last and "tool_calls" in message:
            last.setdefault("tool_calls", []).extend(message["tool_calls"])
        elif last and last["content"] is None and "tool_calls" not in last and "reasoning_content" not in message:
            last["content"] = message["content"]
        else:
            messages.append(message)
    return messages


def _message(item: dict[str, Any], where: str) -> dict[str, Any]:
    """An item of the input as a message."""
    kind = item.get("type", "message")
    if kind == "message":
        if (role := item.get("role")) not in ROLES:
            raise ApiError(f"{where}.role: expected one of {', '.join(ROLES)}, got {shown(role)}", "input")
        return {"role": role, "content": _content(item.get("content"), f"{where}.content")}
    if kind == "function_call":
        if not isinstance(name := item.get("name"), str):
            raise ApiError(f"{where}.name: expected a function's name, got {shown(name)}", "input")
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        content = _content(item.get("output"), f"{where}.output")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
    if kind == "reasoning":
        return {"role": "assistant", "content": None, "reasoning_content": _thoughts(item, where)}
    text = "expected message, reasoning, function_call or function_call_output"
    raise not_served("input", f"{where}.type: {text}, got {clipped(str(kind))!r}")


def _thoughts(item: dict[str, Any], where: str) -> str:
    """The thoughts of an item, or else their summary."""
    return _content(item.get("content") or [], f"{where}.content") or _content(
        item.get("summary") or [], f"{where}.summary"
    )


def _content(content: Any, where: str) -> str:
    """The text of an item."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(f"{where}: expected a text or a list of text parts, got {shown(content)}", "input")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS:
            raise not_served(
                "input", f"{where}[{index}]: expected a part of text, got {shown(kind or part)}: text only"
            )
        if not isinstance(part.get("text"), str):
            raise ApiError(f"{where}[{index}].text: expected a text, got {shown(part.get('text'))}", "input")
        texts.append(part["text"])
    return "\n".join(texts)


def job(
    body: GenerationBody,
    model: ServedModel,
    prompts: list[Prompt],
    n: int,
    max_tokens: int | None,
    max_tokens_name: str,
    prompt_name: str,
    *,
    prompt_log_probs: bool = False,
    tools: ToolUse | None = None,
) -> Job:
    """The worker's requests for prompts, `n` for each; `max_tokens` None is what is left of the context. Errors call
    prompts and `max_tokens` by the client's names of them. Ids are unique only within the job. Raises ApiError."""
    model.check_method(body.method)
    if len(prompts) * n > MAX_CHOICES:
        raise ApiError(f"n: expected at most {MAX_CHOICES} choices in all, got {len(prompts) * n}", "n")
    base = body.seed if body.seed is not None else secrets.randbits(63)
    # One choice without a seed leaves it to the worker; several need seeds that differ.
    seeds = [derived_seed(base, choice) for choice in range(n)] if body.seed is not None or n > 1 else [None]
    thinking = prompts[0].thinking
    special = (tools is not None and tools.special) or (thinking is not None and thinking.special)
    guided_by, guide = _guide(body, tools, prompts[0])
    asked = {"text": prompt_name, "input_ids": prompt_name, "max_tokens": max_tokens_name}
    fields = {**CLIENTS_FIELDS, **asked, "guide": guided_by, "guide.text": guided_by}
    result = Job(prompts, n, tools, fields)
    top_log_probs = max(body.alternatives, body.prompt_alternatives or 0)
    for prompt in prompts:
        left = model.max_len - len(prompt.ids)
        if max_tokens is not None and max_tokens > left:
            raise ApiError(
                f"{max_tokens_name}: expected at most {left} after a prompt of {len(prompt.ids)} tokens in a context "
                f"of {model.max_len}, got {max_tokens}",
                max_tokens_name,
                Code.CONTEXT_LENGTH,
            )
        wanted = min(left if max_tokens is None else max_tokens, model.defaults.max_new_tokens or left)
        # A harness that asks for the prompt's scores and one token drops one entry at the end: an end token has none.
        min_length = 1 if prompt_log_probs and wanted == 1 else body.min_length
        for seed in seeds:
            values = {
                **{name: getattr(body, name) for name in TextOptions.model_fields},
                "id": f"c{len(result.requests)}",
                "input_ids": prompt.ids,
                "max_tokens": wanted,
                "sampling": _sampling(body, model, seed, min_length),
                "end_id": NOTHING_ENDS if body.ignore_eos else None,
                "return_log_probs": body.log_probs or top_log_probs > 0,
                "top_log_probs": top_log_probs,
                "prompt_log_probs": prompt_log_probs or body.prompt_alternatives is not None or wanted == 0,
                "guide": guide,
                "skip_special_tokens": body.skip_special_tokens and not special,
                "method": body.method if body.speculative else AUTO_REGRESSIVE,
            }
            # Body, prompt and guide have been checked, and the worker checks what arrives: not once more in between,
            # since a prompt may have 128 choices.
            result.requests.append(GenerateRequest.model_construct(**values))
    if not body.speculative and body.method not in (None, AUTO_REGRESSIVE):
        raise ApiError("speculative: expected true with a drafting_method, got false", "speculative")
    return result


def _guide(body: GenerationBody, tools: ToolUse | None, prompt: Prompt) -> tuple[str, Guide | None]:
    """The field that asks for a guide, and the guide, which begins after thoughts. Raises ApiError where fields do not
    go together."""
    field, guide = only_guide(dict(body.guides())) or ("", None)
    if tools is not None:
        field, guide = "tools", tools.guide(field, guide, prompt.thinks)
    if guide is not None and prompt.thinking is not None and prompt.thinks:
        guide = guide.model_copy(update={"before": prompt.thinking.grammar()})
    return field, guide


def sampling(body: GenerationBody, model: ServedModel) -> dict[str, float]:
    """The fields that filter and scale the choice of tokens: the client's, else the model's own, else neutral ones."""

    def first(name: str, neutral: float) -> float:
        values = getattr(body, name), getattr(model.defaults, name), neutral
        return next(value for value in values if value is not None)

    return {name: first(name, neutral) for name, neutral in NEUTRAL.items()}


def _sampling(body: GenerationBody, model: ServedModel, seed: int | None, min_length: int | None) -> SamplingConfig:
    values = {name: getattr(body, name) for name in SamplingOptions.model_fields} | sampling(body, model)
    # 0 and nothing mean the same, except of these two.
    kept = {"temperature": values["temperature"], "seed": seed}
    values = {name: value or None for name, value in (values | {"min_length": min_length}).items()}
    return SamplingConfig.model_construct(**values | kept | {"penalize_prompt": False})
