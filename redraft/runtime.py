"""A bundle ready to run: its engine, tokenizer and scheduler, and requests turned into sequences."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Collection, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from redraft import metrics
from redraft.budgets.controller import BudgetController, Estimates
from redraft.budgets.gain import Calibration
from redraft.budgets.learned import LearnedFile
from redraft.budgets.warm_up import time_steps
from redraft.bundle.budget_table import BudgetTable
from redraft.bundle.method import MethodConfig
from redraft.bundle.scores import ScoresFile
from redraft.decoding.token_tree import TokenTree
from redraft.decoding.verification import Verdict
from redraft.drafting.served import ServedTexts, TextOptions
from redraft.engines.api import Engine
from redraft.errors import BundleError, Code
from redraft.grammar.compiler import Grammars
from redraft.learning.answers import AnswerStore
from redraft.learning.policy import Policy
from redraft.operator_build import build_operators
from redraft.plugins.trees import native
from redraft.request import AUTO_REGRESSIVE, GenerateRequest, InvalidRequest, shown
from redraft.request_state import RequestState
from redraft.scheduling.scheduler import Limits, Scheduler
from redraft.text import TextCodec

if TYPE_CHECKING:
    from redraft.bundle.manifest import Bundle
    from redraft.grammar.state import Grammar

BIGRAMS_FILE_NAME = "bigrams.npy"
BUILD_DIGITS = 12
"""Hexadecimal digits that tell builds of a bundle apart in metrics."""

log = logging.getLogger("redraft.runtime")


def first_estimates(engine: Engine, limits: Limits, methods: Mapping[str, MethodConfig]) -> Estimates:
    """What budgets begin with: the engine's times, and what the training of the methods' drafters measured."""
    most = max(method.tree_budget for method in methods.values())
    ratios = {name: ratio for name, method in methods.items() if (ratio := method.acceptance_ratio)}
    calibrations = {name: Calibration.measured(ratio) for name, ratio in ratios.items()}
    return Estimates(costs=time_steps(engine, limits, most), calibrations=calibrations)


def _served_texts(options: TextOptions | None, bundle: Bundle) -> ServedTexts | None:
    """The texts that the bundle's n-grams guess from, None where they guess from none."""
    if options is None or not options.capacity or not any(method.ngram for method in bundle.config.methods.values()):
        return None
    tokenizer = hashlib.sha256((bundle.path / "tokenizer.json").read_bytes()).hexdigest()
    return ServedTexts(options, tokenizer, bundle.config.target.vocab_size)


class Runtime:
    """What a worker or a benchmark needs to serve requests. `sequence` may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        codec: TextCodec,
        limits: Limits,
        vocab_size: int,
        end_ids: frozenset[int] = frozenset(),
        methods: Mapping[str, MethodConfig] | None = None,
        bigrams: np.ndarray | None = None,
        name: str = "",
        stream_interval_s: float = 0.0,
        path: Path | None = None,
        prefix_reuse: bool = True,
        unknown_tokens: frozenset[int] = frozenset(),
        budgets: BudgetController | None = None,
        learned: LearnedFile | None = None,
        texts: ServedTexts | None = None,
    ):
        """`prefix_reuse`, `unknown_tokens`, `budgets` and `texts`: see `Scheduler`. `learned` keeps the budgets'
        estimates."""
        self.engine = engine
        self.codec = codec
        self.limits = limits
        self.vocab_size = vocab_size
        self.end_ids = end_ids
        self.bigrams = bigrams
        self.name = name
        self.stream_interval_s = stream_interval_s
        self.path = path
        """The bundle's folder."""
        self.prompt_limits = codec.limits(limits.max_len)
        self.grammars = Grammars(codec, vocab_size, end_ids)
        self.methods = dict(methods or {})
        """The bundle's own, by method."""
        self.taken = False
        """Whether an `LLM` steps the scheduler, whose outputs nobody else gets."""
        self.prefix_reuse = prefix_reuse
        if prefix_reuse and (reason := engine.reuse_refusal):
            log.info("no prompt is reused: %s", reason)
        self._unknown_tokens, self._learned = unknown_tokens, learned
        self.texts = texts
        """What was served, to be drafted from; None: nothing is kept. `with_methods` begins with what is set here."""
        self._answers: AnswerStore | None = None
        self.budgets = budgets
        """What says how much to draft; None: each method's configuration."""
        self.scheduler = self._scheduler(self.methods)

    @classmethod
    def load(
        cls,
        path: str | Path,
        threads: int | None = None,
        max_queue: int = 128,
        stream_interval_s: float = 0.0,
        prefix_reuse: bool = True,
        learned_dir: Path | None = None,
        texts: TextOptions | None = None,
    ) -> Runtime:
        """Load a bundle. `learned_dir`: see `LearnedFile.of`. `texts`: how served texts are stored; None: not at all,
        as measurements want it. Raises BundleError where it does not fit this machine, ValueError for damaged scores,
        BuildError where the compiled part of drafting is missing and cannot be compiled."""
        from redraft.bundle.manifest import Bundle
        from redraft.engines import gpu_name, load_engine

        build_operators()
        native.prepare()
        bundle = Bundle.load(Path(path))
        config = bundle.config
        for name, method in config.methods.items():
            try:
                method.check()
            except ValueError as error:
                remedy = "build the bundle again" + ", with --no-drafter --ngram" * (method.drafter is None)
                raise BundleError(f"{path}, method {name}: {error}; {remedy}") from None
        limits = Limits(**config.limits.model_dump(), max_queue=max_queue)
        bigrams = Path(path) / BIGRAMS_FILE_NAME
        with ThreadPoolExecutor(1) as beside:  # both take a while
            codec = beside.submit(TextCodec.load, Path(path) / "tokenizer.json")
            engine = load_engine(bundle, threads)
        budgets, learned = None, LearnedFile.of(Path(path), threads, gpu_name(config.backend), learned_dir)
        if config.methods:
            if (estimates := learned.load()) is None:
                estimates = first_estimates(engine, limits, config.methods)
                learned.save(estimates)
                if learned_dir is None:  # in a folder that bundles share, whose a file is does not show
                    learned.remove_outdated()
            budgets = BudgetController(estimates)
        return cls(
            engine=engine,
            codec=codec.result(),
            limits=limits,
            vocab_size=config.target.vocab_size,
            end_ids=frozenset(config.target.eos_token_ids),
            methods=ScoresFile.load(Path(path)).fitted(config.methods),
            bigrams=np.load(bigrams) if bigrams.is_file() else None,
            name=config.name,
            stream_interval_s=stream_interval_s,
            path=Path(path),
            prefix_reuse=prefix_reuse,
            unknown_tokens=frozenset(chain.from_iterable(range(*ids) for ids in config.target.unknown_tokens)),
            budgets=budgets,
            learned=learned,
            texts=_served_texts(texts, bundle),
        )

    def store_answers(self, policy: Policy) -> None:
        """Store answers for drafters to learn from, until `end_storing`. Raises BundleError where the bundle gives
        nothing to learn from, RuntimeError while a request is running."""
        assert self.path is not None
        self._answers = AnswerStore.of(policy, self.path, lambda ids: self.codec.decode(ids, skip_special=False))
        self.with_methods(self.methods)

    def end_storing(self) -> None:
        """Write the answers that have ended, and all texts where they were asked to be kept. `with_methods` serves on
        without storing answers."""
        if self.texts is not None:  # first: a writer of answers that hangs does not take them with it
            self.texts.close()
        if self._answers:
            self._answers.close()
            self._answers = None

    def keep_learned(self) -> None:
        """Write what was learned of the engine and the traffic beside the bundle, for the next start."""
        if self.budgets is not None and self._learned is not None:
            self._learned.save(self.budgets.estimates)

    def keep_texts(self) -> None:
        """Write served texts where they were asked to be kept, beside what goes on."""
        if self.texts is not None:
            self.texts.keep()

    def fix_budget(self, nodes: int | None = None, methods: Collection[str] | None = None) -> None:
        """Let these methods, or all, draft this many nodes for each sequence from now on, whatever pays; `nodes` None:
        as many as each may. Raises RuntimeError while a request is running."""
        for name in self.methods.keys() & (self.methods if methods is None else methods):
            method = self.methods[name]
            most = method.tree_budget if nodes is None else nodes
            self.methods[name] = method.changed(budget=BudgetTable.constant(most))
        self.with_methods(self.methods)

    def with_methods(
        self,
        methods: Mapping[str, MethodConfig],
        observe: Callable[[TokenTree, int, Verdict], None] | None = None,
    ) -> None:
        """Serve by other methods from now on, on the same engine, whose drafters go by the methods' names. `observe` is
        as in `Scheduler`. Raises RuntimeError while a request is running."""
        if not self.scheduler.idle:
            raise RuntimeError("the methods can change only while no request is running")
        self.scheduler = self._scheduler(methods, observe)

    def _scheduler(
        self,
        methods: Mapping[str, MethodConfig],
        observe: Callable[[TokenTree, int, Verdict], None] | None = None,
    ) -> Scheduler:
        scheduler = Scheduler(
            self.engine,
            self.limits,
            methods,
            self.bigrams,
            observe,
            self.prefix_reuse,
            self._unknown_tokens,
            self.budgets,
            self.texts,
            self._answers,
        )
        build = self._learned.build[:BUILD_DIGITS] if self._learned else ""
        scheduler.metrics[metrics.BUNDLE].labels(self.name, build).set(1)
        return scheduler

    def check(self, request: GenerateRequest) -> None:
        """Raises InvalidRequest where a request does not fit the bundle, as far as can be told without encoding it."""
        if request.method not in (None, AUTO_REGRESSIVE, *self.methods):
            known = ", ".join((*self.methods, AUTO_REGRESSIVE))
            raise InvalidRequest(f"method: expected one of {known}, got {shown(request.method)}")
        if request.text is not None:
            self.prompt_limits.check_text(len(request.text.encode()))
        self.prompt_limits.check_tokens(len(request.input_ids or ()))
        if request.end_id is not None and request.end_id >= self.vocab_size:
            raise InvalidRequest(f"end_id: expected an id below {self.vocab_size}, got {request.end_id}")
        if (largest := max(request.stop_token_ids, default=0)) >= self.vocab_size:
            raise InvalidRequest(f"stop_token_ids: expected token ids below {self.vocab_size}, got {largest}")
        if (biased := max(request.sampling.logit_bias or (), default=0)) >= self.vocab_size:
            raise InvalidRequest(f"sampling.logit_bias: expected token ids below {self.vocab_size}, got {biased}")
        for field, words in (("stop_word_ids", request.stop_word_ids), ("bad_word_ids", request.bad_word_ids)):
            if (largest := max(map(max, words), default=0)) >= self.vocab_size:
                raise InvalidRequest(f"{field}: expected token ids below {self.vocab_size}, got {largest}")

    def sequence(
        self,
        key: Hashable,
        request: GenerateRequest,
        arrived: float | None = None,
        grammar: Grammar | None = None,
        compile_s: float | None = None,
        prompt: list[int] | None = None,
    ) -> RequestState:
        """The sequence of a request. `arrived`: see `RequestState`. Raises InvalidRequest where it does not fit the
        bundle. Its guide is compiled where its `grammar` is not given, which may take seconds; in at most `compile_s`,
        if given, as by `Grammars.compile`. `prompt` are its tokens, where it was encoded and checked before."""
        seed = secrets.randbits(63)
        if prompt is None:
            self.check(request)
            prompt = self._prompt(request)
        if request.guide is not None and grammar is None:
            grammar = self.grammars.compile(request.guide, compile_s)
        interval_s = self.stream_interval_s
        sequence = RequestState(key, request, prompt, self.codec, self.end_ids, seed, interval_s, arrived, grammar)
        if (state := sequence.sampler.grammar) is not None and not state.mask().any():
            raise InvalidRequest("guide.text: only end tokens could begin its texts: expected another guide or end_id")
        return sequence

    def _prompt(self, request: GenerateRequest) -> list[int]:
        prompt = request.input_ids
        if request.text is not None:
            prompt = self.codec.encode(request.text, request.add_special_tokens)
        if not prompt:
            raise InvalidRequest("text: expected at least one token, got none")
        self.prompt_limits.check_tokens(len(prompt))
        if max(prompt) >= self.vocab_size:
            field = "input_ids" if request.text is None else "text"
            raise InvalidRequest(f"{field}: expected token ids below {self.vocab_size}, got {max(prompt)}")
        left = self.limits.max_len - len(prompt)
        if request.max_tokens > left:
            raise InvalidRequest(
                f"max_tokens: expected at most {left} after a prompt of {len(prompt)} tokens in a context of "
                f"{self.limits.max_len}, got {request.max_tokens}",
                Code.CONTEXT_LENGTH,
            )
        return prompt
