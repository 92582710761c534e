"""Streams answers with LiteLLM or LangChain, a few at a time, and prints when their pieces came.

    CLIENTS/bin/python benchmarks/load/other_clients/ask.py litellm URL MODEL MAX_TOKENS CONCURRENCY < prompts.json

Runs in the environment of these packages, without anything of this repository. Standard input is a JSON array of
prompts. Standard output is a JSON array with an object per answer: `sent`, `pieces` (seconds on one clock at which text
came), `finished`, `tokens` (as the client counts them) and `text`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

Pieces = Iterator[tuple[str, int]]
"""Text and the number of output tokens, 0 where the client does not say it yet."""


def litellm(url: str, model: str, max_tokens: int) -> Callable[[str], Pieces]:
    """LiteLLM's `completion`."""
    from litellm import completion

    def ask(prompt: str) -> Pieces:
        for part in completion(
            model=f"openai/{model}",
            api_base=f"{url}/v1",
            api_key="none",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ):
            usage = getattr(part, "usage", None)
            text = part.choices[0].delta.content if part.choices else None
            yield text or "", usage.completion_tokens if usage else 0

    return ask


def langchain(url: str, model: str, max_tokens: int) -> Callable[[str], Pieces]:
    """LangChain's `ChatOpenAI`."""
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model=model, max_tokens=max_tokens, temperature=0, stream_usage=True
    )

    def ask(prompt: str) -> Pieces:
        for part in chat.stream(prompt):
            yield str(part.content), (part.usage_metadata or {}).get("output_tokens", 0)

    return ask


def timed(ask: Callable[[str], Pieces], prompt: str) -> dict:
    """One answer and when its pieces came."""
    sent, pieces, texts, tokens = time.perf_counter(), [], [], 0
    for text, count in ask(prompt):
        if text:
            pieces.append(time.perf_counter())
        texts.append(text)
        tokens = max(tokens, count)
    finished = time.perf_counter()
    return {"sent": sent, "pieces": pieces, "finished": finished, "tokens": tokens, "text": "".join(texts)}


def main() -> None:
    name, url, model, max_tokens, concurrency = sys.argv[1:]
    ask = {"litellm": litellm, "langchain": langchain}[name](url, model, int(max_tokens))
    with ThreadPoolExecutor(int(concurrency)) as pool:
        json.dump(list(pool.map(lambda prompt: timed(ask, prompt), json.load(sys.stdin))), sys.stdout)


if __name__ == "__main__":
    main()
