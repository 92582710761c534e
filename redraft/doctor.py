"""Why a bundle is slow on this machine, or its drafts are rejected: one finding per subject, with a remedy each."""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from redraft.bundle.backends import OPENVINO
from redraft.bundle.config import BundleConfig, target_folder
from redraft.bundle.manifest import Manifest, cpu_features
from redraft.chat import render_chat, template_digest
from redraft.console.resources import cpu_quota
from redraft.llm import LLM
from redraft.plugins.operators.linear.pack import bytes_as
from redraft.prompts import load_prompts, spread
from redraft.request import AUTO_REGRESSIVE

OVER_FLOOR = 1.7
"""A step that takes this many times what reading the weights takes is not bound by memory."""
LOW_ACCEPTANCE = 0.85
"""Tokens per step without the chat template, over those with it, that is worth a word."""
BUSY_SHARE = 0.15
"""Load of other programs, as a share of all cores, that slows a bundle noticeably."""
LEAST_FROM_NGRAMS = 1.1
"""Tokens per step on the user's prompts, from n-grams, below which the answers repeat too little."""
BANDWIDTH_BYTES, BANDWIDTH_ROUNDS = 1 << 29, 5
OBSERVED_S = 1.0
PROMPTS, TOKENS, NODES = 8, 48, 15
"""Prompts that acceptance is measured on, tokens of each answer, and drafted nodes of a step."""
NARROW = {
    "fp32": "bf16, which reads half the bytes",
    "bf16": "int8, which reads half the bytes",
    "int8": "int4, which reads fewer bytes",
}
EMBEDDING = re.compile(rb"Embedding\t[^\n]*?\tin_features=(\d+)\tout_features=(\d+)\tdtype=([^\t\n]+)")
"""The step that takes rows of an embedding table in a network's file, which holds its programs as text"""
BF16_FEATURES = {"avx512_bf16", "amx_bf16"}
TRAIN = "train a drafter on your prompts: redraft drafter --model MODEL --prompts PROMPTS"


@dataclass(frozen=True)
class Finding:
    """What was seen of one subject. There is a remedy where something is wrong."""

    subject: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{'problem' if self.remedy else 'ok':8}{self.subject:14}{self.found}"
        return f"{line}\n{'':22}-> {self.remedy}" if self.remedy else line


def examine(path: Path, prompts: Path | None = None, threads: int | None = None) -> Iterator[Finding]:
    """Findings about a bundle, in the order in which they are worth mending; acceptance only with `prompts`.

    Loads the bundle and decodes with it for about a minute. Raises BundleError where it cannot be loaded, ValueError
    for a prompt file that cannot be read.
    """
    Manifest.read(path)
    config = BundleConfig.read(path)
    texts = [prompt.turns[0] for prompt in spread(load_prompts(prompts), PROMPTS)] if prompts else []
    yield other_load()
    yield processor(config, cpu_features())
    yield cores(threads)
    yield from templates(path, config)
    with LLM(path, threads) as llm:
        if config.backend == OPENVINO:
            read = bandwidth(threads or len(os.sched_getaffinity(0)))
            yield memory(path, config, step_seconds(llm), read)
        if texts:
            yield from acceptance(llm, path, texts)


def other_load() -> Finding:
    """How busy other programs keep the cores."""
    processes = list(psutil.process_iter(["name"]))
    for process in processes:
        _cpu_percent(process)
    share = psutil.cpu_percent(OBSERVED_S) / 100
    busiest = max(processes, key=_cpu_percent, default=None)
    found = f"other programs use {share:.0%} of the cores"
    if share < BUSY_SHARE or busiest is None:
        return Finding("other load", found)
    return Finding(
        "other load",
        f"{found}, {busiest.info['name']} (process {busiest.pid}) the most",
        "stop them, or give the service cores of its own: taskset -c 0-3 redraft serve ...",
    )


def _cpu_percent(process: psutil.Process) -> float:
    try:
        return process.cpu_percent() if process.pid != os.getpid() else 0.0
    except psutil.Error:
        return 0.0


def processor(config: BundleConfig, features: set[str]) -> Finding:
    """Whether the CPU multiplies what the bundle stores."""
    if config.backend != OPENVINO:
        return Finding("processor", f"not checked: {config.backend} is for a GPU")
    names = ("amx_bf16", "avx512_bf16", "avx512_vnni", "avx512f", "avx_vnni", "avx2")
    best = next((name for name in names if name in features), "no AVX2")
    if config.precision == "bf16" and not features & BF16_FEATURES:
        return Finding(
            "processor",
            f"{best}: this CPU widens bf16 before it multiplies, so that drafted rows cost more",
            "build with --precision int8, or serve on a CPU with AVX-512 BF16 or AMX",
        )
    return Finding("processor", f"{best}, {config.precision} weights")


def cores(threads: int | None) -> Finding:
    """Whether the engine's threads have a physical core each."""
    usable, quota = len(os.sched_getaffinity(0)), cpu_quota()
    wanted, physical = threads or usable, psutil.cpu_count(logical=False) or usable
    if quota and wanted > quota:
        return Finding(
            "threads",
            f"{wanted} threads share a quota of {quota:g} cores, and wait for each other",
            f"serve with --threads {max(int(quota), 1)}, or raise the container's CPU limit",
        )
    if wanted > physical:
        return Finding(
            "threads", f"{wanted} threads on {physical} physical cores", f"compare with --threads {physical}"
        )
    return Finding("threads", f"{wanted} on {usable} usable cores")


def templates(path: Path, config: BundleConfig) -> Iterator[Finding]:
    """Whether the drafters were trained with the bundle's chat template."""
    digest = template_digest(path)
    for name, method in config.methods.items():
        if method.chat_template and method.chat_template != digest:
            yield Finding(
                "chat template",
                f"{name} was trained on answers under another template than the bundle's",
                "redraft fetch SOURCE --replace --chat-template FILE, that of the training, or distill and train again",
            )
        elif method.chat_template:
            yield Finding("chat template", f"{name} was trained with the bundle's")


def step_seconds(llm: LLM) -> float:
    """Median time of a step of one stream without drafts, in seconds."""
    answers = [llm.generate("The", max_tokens=25, method=AUTO_REGRESSIVE, end_id=-1) for _ in range(3)]
    return statistics.median(answer.stats.decode_ms / 1e3 / (answer.stats.output_tokens - 1) for answer in answers)


def bandwidth(threads: int) -> float:
    """Bytes per second that so many threads read of memory together: the best of several rounds."""
    parts = np.array_split(np.ones(BANDWIDTH_BYTES // 4, np.float32), threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(BANDWIDTH_ROUNDS):
            started = time.perf_counter()
            list(pool.map(np.max, parts))
            best = max(best, BANDWIDTH_BYTES / (time.perf_counter() - started))
    return best


def memory(path: Path, config: BundleConfig, step: float, read: float) -> Finding:
    """A step of one stream beside its floor: reading every weight of the target once, but for the embedding table, of
    which it reads a row."""
    folders = [target_folder(path, rank, config.tensor_parallel) for rank in range(config.tensor_parallel)]
    weights = sum(file.stat().st_size for folder in folders for file in folder.glob("target.*"))
    if not config.target.tie_embeddings or config.tensor_parallel > 1:  # a rank's LM head is a table of its own
        weights -= sum(embedding_bytes(folder / "target.onnx") for folder in folders)
    floor = weights / read
    found = (
        f"a step takes {1e3 * step:.1f} ms; reading {weights / 1e6:.0f} MB of weights at {read / 1e9:.1f} GB/s takes "
        f"{1e3 * floor:.1f} ms"
    )
    if step > OVER_FLOOR * floor:
        return Finding("memory", found, "not bound by memory: look at load, threads and processor above")
    if step < floor:
        return Finding("memory", f"{found}: the CPU's caches hold a part, or each token has a part of the experts only")
    if config.precision in NARROW:
        return Finding("memory", f"{found}: bound by memory, as decoding is; faster is {NARROW[config.precision]}")
    return Finding("memory", f"{found}: bound by memory, as decoding is")


def embedding_bytes(network: Path) -> int:
    """Bytes of the tables of which a target's network takes rows: embeddings and, in some families, positions."""
    tables = EMBEDDING.findall(network.read_bytes())
    return sum(bytes_as(dtype.decode(), (int(rows), int(features))) for features, rows, dtype in tables)


def acceptance(llm: LLM, path: Path, prompts: Sequence[str]) -> Iterator[Finding]:
    """Tokens per step of each method on the user's prompts, and what the chat template changes. As much is drafted as
    may be: what pays depends on the load."""
    fitting = [text for text in prompts if _fits(llm, text)]
    if len(fitting) < len(prompts):
        yield Finding("acceptance", f"{len(prompts) - len(fitting)} prompts do not fit the context and are left out")
    prompts, chat = fitting, _rendered(path, fitting)
    if not prompts:
        return
    llm.runtime.fix_budget(min(NODES, llm.runtime.limits.max_tree - 1))
    for name in (method for method in llm.methods if method != AUTO_REGRESSIVE):
        found = tokens_per_step(llm, name, chat or prompts, add_special_tokens=not chat)
        plan = llm.runtime.methods[name]
        low = plan.drafter is None and found < LEAST_FROM_NGRAMS
        text = f"{name}: {found:.2f} tokens/step on these prompts"
        yield (
            Finding("acceptance", f"{text}: their answers repeat too little for n-grams", TRAIN)
            if low
            else Finding("acceptance", text)
        )
        if not chat or plan.drafter is None:  # n-grams know no template
            continue
        raw = tokens_per_step(llm, name, prompts)
        if raw < LOW_ACCEPTANCE * found:
            yield Finding("chat template", f"{name}: {raw:.2f} tokens/step for clients that send prompts without it")


def _fits(llm: LLM, text: str) -> bool:
    """Whether a prompt leaves room for its answer, under a template too."""
    return len(llm.runtime.codec.encode(text)) + 2 * TOKENS <= llm.runtime.limits.max_len


def _rendered(path: Path, prompts: Sequence[str]) -> list[str]:
    """The prompts under the bundle's chat template; none where it has no template."""
    try:
        return [render_chat(path, prompt) for prompt in prompts]
    except FileNotFoundError:
        return []


def tokens_per_step(llm: LLM, method: str, prompts: Sequence[str], add_special_tokens: bool = True) -> float:
    """Tokens that a step of one stream gave, over all answers; 1 where there was no step."""
    answers = [
        llm.generate(prompt, TOKENS, temperature=0, method=method, add_special_tokens=add_special_tokens)
        for prompt in prompts
    ]
    steps = sum(answer.stats.steps for answer in answers)
    return (steps + sum(answer.stats.accepted for answer in answers)) / steps if steps else 1.0
