"""llama.cpp as a contender: a child process of an interpreter that has llama-cpp-python, asked prompt by prompt.

Its Python package speculates by prompt lookup only. Draft models are options of llama.cpp's own programs, which the
package does not have.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.speed.inprocess import Clock
from redraft.llm import Answer
from redraft.request import GenerateRequest
from redraft.runtime import Runtime

WAIT_S = 10.0
PROGRAM = """
import json, sys, time
import numpy
import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
model, context, threads, lookup, all_logits = sys.argv[1], *map(int, sys.argv[2:])
llm = llama_cpp.Llama(
    model, n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False,
    logits_all=bool(all_logits or lookup),
    draft_model=LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None,
)
print(llama_cpp.__version__, flush=True)
for line in sys.stdin:
    task = json.loads(line)
    llm.reset()
    if "logits" in task:
        llm.eval(task["prompt"])
        numpy.save(task["logits"], llm.scores[:len(task["prompt"])])
        print("{}", flush=True)
        continue
    started, first, tokens = time.perf_counter(), 0.0, []
    llm.set_seed(task["seed"])
    options = dict(temp=task["temperature"], top_p=task["top_p"], top_k=0, min_p=0.0, repeat_penalty=1.0)
    for token in llm.generate(task["prompt"], **options):
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
    """llama.cpp over a GGUF file for texts of up to `context` tokens, in a process of the interpreter `python`.

    `lookup`: tokens that it drafts at a time by prompt lookup, 0 for plain decoding; `all_logits`: whether it is asked
    for logits. Raises RuntimeError where it cannot load the file, or ends.
    """

    def __init__(
        self,
        python: Path,
        model: Path,
        context: int,
        lookup: int = 0,
        threads: int | None = None,
        all_logits: bool = False,
    ):
        self._name = f"llama.cpp with {model}"
        numbers = context, threads or os.cpu_count() or 1, lookup, int(all_logits)
        command = [str(python), "-c", PROGRAM, str(model), *map(str, numbers)]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            raise RuntimeError(f"{python}: {error.strerror}") from None
        self.version = self._read()

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits float32 [N, V] after every token of a text."""
        with TemporaryDirectory() as folder:
            file = Path(folder) / "logits.npy"
            self.ask({"prompt": list(token_ids), "logits": str(file)})
            logits: np.ndarray = np.load(file)
            return logits

    def ask(self, task: dict[str, Any]) -> dict[str, Any]:
        """What it answers to a task."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        result: dict[str, Any] = json.loads(self._read())
        return result

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._name} ended with status {self._process.wait()}")
        return line.strip()


@dataclass(frozen=True)
class LlamaDecoder:
    """llama.cpp, which gets each prompt as the token ids that a bundle encodes: a `Decoder`."""

    process: LlamaCpp
    runtime: Runtime

    def run(self, requests: list[GenerateRequest]) -> tuple[list[Answer], Clock]:
        """See `Decoder.run`; one request after the other, each with an empty cache."""
        answers = [self._answer(request) for request in requests]
        return answers, Clock(wall_s=sum(answer.seconds for answer in answers))

    def _answer(self, request: GenerateRequest) -> Answer:
        state, sampling = self.runtime.sequence(0, request), request.sampling
        prompt = state.prompt.tolist()
        task = {"prompt": prompt, "max_tokens": request.max_tokens, "end_ids": sorted(state.end_ids)}
        task |= {"temperature": sampling.temperature or 0, "top_p": sampling.top_p or 1, "seed": sampling.seed or 0}
        result = self.process.ask(task)
        answer = Answer(token_ids=result["tokens"], seconds=result["seconds"])
        answer.stats.prompt_tokens, answer.stats.decode_ms = len(prompt), 1e3 * result["decode_s"]
        return answer
