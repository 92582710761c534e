"""llama.cpp as a contender: a child process of an interpreter that has llama-cpp-python, asked prompt by prompt."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from redraft.llm import Answer
from redraft.sequence import Sequence

SERVER = """
import json, sys, time
from llama_cpp import Llama
model_path, threads = sys.argv[1], int(sys.argv[2])
llm = Llama(model_path, n_ctx=2048, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False)
print("ready", flush=True)
for line in sys.stdin:
    task = json.loads(line)
    started = time.perf_counter()
    first, tokens = 0.0, []
    llm.reset()
    for token in llm.generate(task["prompt"], top_k=1, temp=0.0, repeat_penalty=1.0):
        first = first or time.perf_counter()
        if token in task["end_ids"]:
            break
        tokens.append(int(token))
        if len(tokens) == task["max_tokens"]:
            break
    ended = time.perf_counter()
    print(json.dumps({"tokens": tokens, "seconds": ended - started, "decode_s": ended - first}), flush=True)
"""


class LlamaCpp:
    """A greedy llama.cpp decoder on `model` (GGUF), run by the interpreter `python`."""

    def __init__(self, python: Path, model: Path, threads: int | None = None):
        command = [str(python), "-c", SERVER, str(model), str(threads or os.cpu_count() or 1)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self._read() != "ready":
            raise RuntimeError(f"llama.cpp did not load {model} under {python}")

    def answer(self, sequence: Sequence, max_tokens: int) -> Answer:
        """Greedy tokens of a sequence's prompt and the seconds they took."""
        assert self._process.stdin is not None
        prompt = sequence.prompt.tolist()
        task = {"prompt": prompt, "max_tokens": max_tokens, "end_ids": sorted(sequence.end_ids)}
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        result = json.loads(self._read())
        answer = Answer(token_ids=result["tokens"], seconds=result["seconds"])
        answer.stats.prompt_tokens, answer.stats.decode_ms = len(prompt), 1e3 * result["decode_s"]
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=10)

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"llama.cpp ended with status {self._process.wait()}")
        return line.strip()
