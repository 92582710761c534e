"""The methods of a bundle, as flags or a TOML file describe them, and their drafting loops."""

from __future__ import annotations

import copy
import tomllib
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Self, cast

from pydantic import Field, ValidationError, model_validator

from redraft.bundle.backends import TORCH, Backend
from redraft.bundle.config import BundleConfig
from redraft.bundle.method import ContextInfo, MethodConfig, MethodFields
from redraft.compiler.draft_model import is_model, load_draft_model
from redraft.decoding.construction import Draws
from redraft.decoding.random_trees import RANDOM_CONSTRUCTIONS
from redraft.decoding.verification import VERIFIERS, draws_of
from redraft.errors import BundleError, read_text
from redraft.model_defs.drafters.base import Drafter
from redraft.model_defs.drafters.context_drafter import ChainDrafter
from redraft.model_defs.drafters.draft_lm import DraftLM
from redraft.model_defs.drafters.hub.readers import parse_answers
from redraft.model_defs.drafters.registry import DRAFTERS, hub_form, kind_of, load_drafter
from redraft.model_defs.drafters.token_info import InfoForm
from redraft.model_defs.export.drafter import Drafting
from redraft.model_defs.files import read_json
from redraft.model_defs.loops.beam_search import BeamSearch
from redraft.model_defs.loops.context_cache import CacheTables
from redraft.model_defs.loops.random_draws import RandomDraws
from redraft.model_defs.target.model import Target
from redraft.plugins.operators.beam_step.cuda import MOST as MOST_CANDIDATES
from redraft.plugins.operators.perturbed_topk.cuda import MOST as MOST_SUPPORT
from redraft.request import AUTO_REGRESSIVE, describe

USUAL_RESAMPLED = 4
"""Re-sampled nodes where `resample_above` is set and their number is not."""
RESAMPLING = {"resample_above", "resample_budget", "skip_above"}
NGRAM = "ngram"
"""What a method without drafter is called."""


class Way(StrEnum):
    """What a method's drafts come from."""

    search = "beam search"
    draws = "random draws"
    ngrams = "the n-gram branch only"


ANY = {"ngram", "tree_budget", "verification"}
DRAFTER = ANY | {"drafter", "read_as", "hot_vocabulary", "construction", "token_info"}
READS = {
    Way.search: DRAFTER | {"beam_width", "beam_length", "candidates", "support", *RESAMPLING},
    Way.draws: DRAFTER | {"levels", "support"},
    Way.ngrams: ANY,
}
"""The settings that matter to each; any other that is given is refused."""
USUAL_SUPPORT = {Way.search: 128, Way.draws: 64}
"""Most likely tokens of a node that the target's noise, or random draws, choose from."""
NO_DRAFTER = "which has no drafter: no candidates to build other trees of, and no probabilities to draw from"
WHY_OTHERS_DO_NOT = {
    Way.search: "which draws no token",
    Way.draws: "whose trees --levels shape, and which leave no chain to draft again from",
    Way.ngrams: NO_DRAFTER,
}
SOURCES = "a drafter or ngram = true"


Source = tuple[Path, Path | None, str | None]
"""What a drafter is read from: `drafter`, `hot_vocabulary` and `read_as` of a method's settings."""


class MethodSettings(MethodFields):
    """One method as a user writes it: a table of the TOML file, or the flags of the same names."""

    drafter: Path | None = Field(
        None,
        description="Trained drafter's folder, ours or one of the hub; or, as draft LM, that of any model with the "
        "target's tokenizer. Default: the one that you trained for the model, or the shipped one.",
    )
    read_as: str | None = Field(
        None,
        description="What a drafter's folder from the hub leaves open, name=value with commas between several; the "
        "build asks for it. ignore=NAME takes a field or a file as absent. Default: nothing is left open.",
    )
    hot_vocabulary: Path | None = Field(
        None, description="Trained drafter whose hot vocabulary a model as draft LM drafts from; default: all tokens."
    )
    token_info: InfoForm | None = Field(
        None,
        description="What a hidden_state drafter's network holds of token info: a table in int8, fp8 or bf16, or "
        "low_rank: its factors, which take little memory and more time. Default: int8, with TensorRT bf16.",
    )

    @property
    def way(self) -> Way | None:
        """What its drafts come from; None where there is nothing."""
        if self.drafter is None:
            return Way.ngrams if self.ngram else None
        return Way.draws if self.construction in RANDOM_CONSTRUCTIONS else Way.search

    @model_validator(mode="after")
    def _reads_all_that_is_given(self) -> Self:
        if self.drafter:
            draws_of(self.construction or "chain")
        if "resample_budget" in self.model_fields_set and not (
            self.resample_budget and self.resample_above is not None
        ):
            wanted = "expected --resample-above too" if self.resample_budget else "expected 1 or more"
            raise ValueError(f"--resample-budget {self.resample_budget}: {wanted}")
        for name in sorted(self.model_fields_set):
            value, readers = getattr(self, name), [way for way in READS if name in READS[way]]
            if value is None or value is False or self.way in readers:
                continue
            written = ",".join(map(str, value)) if isinstance(value, tuple) else value
            flag = f"--{name.replace('_', '-')} {written}"
            if self.way is None:
                raise ValueError(f"{flag}: expected {SOURCES} too")
            why = WHY_OTHERS_DO_NOT[self.way]
            raise ValueError(f"{flag}: only for {' and '.join(readers)}, and this method drafts by {self.way}, {why}")
        if self.way == Way.search and self.support > MOST_SUPPORT:
            raise ValueError(
                f"--support {self.support}: expected at most {MOST_SUPPORT}, as many as a GPU's kernel takes"
            )
        return self

    @property
    def source(self) -> Source:
        """What tells its drafter from others'. Only of a method with one."""
        assert self.drafter is not None
        return self.drafter, self.hot_vocabulary, self.read_as

    def check_backend(self, backend: Backend) -> None:
        """Refuse a support or a beam that a backend's drafters do not take. Raises BundleError."""
        if self.support and self.way == Way.search and backend.native_drafters:
            raise BundleError(
                f"--support {self.support}: drafters of {backend} are in native form, which cannot make the target's "
                "noise; they draft the most likely tokens"
            )
        if backend == TORCH and self.way == Way.search and self.beam_width * self.candidates > MOST_CANDIDATES:
            raise BundleError(
                f"--beam-width {self.beam_width} --candidates {self.candidates}: expected a product of at most "
                f"{MOST_CANDIDATES}, as many candidates as a GPU's kernel takes at a depth"
            )

    def config(self) -> MethodConfig:
        """The method as the bundle records it: what was set, and the usual of its way for the rest. Raises BundleError,
        or FileNotFoundError where there is no drafter."""
        random = RANDOM_CONSTRUCTIONS[self.construction or ""] if self.way == Way.draws else None
        levels = self.levels or (random.levels if random else ())
        verification = random.verification if random else self.verification
        if "verification" in self.model_fields_set:
            verification = self.verification
        usual = {
            "levels": levels,
            "verification": verification,
            "support": USUAL_SUPPORT.get(self.way, 0) if self.way else 0,
            "ngram": verification in VERIFIERS and VERIFIERS[verification].merges,
            "resample_budget": 0 if self.resample_above is None else USUAL_RESAMPLED,
        }
        if random:
            usual["tree_budget"] = sum(random.shape(levels).widths)
        if not self.drafter:
            usual["construction"] = None
        fields = {name: getattr(self, name) for name in MethodFields.model_fields}
        trained = read_json(self.drafter / "config.json") if self.drafter and not is_model(self.drafter) else None
        form = hub_form(self.drafter) if self.drafter and trained else None
        return MethodConfig(
            **fields | {name: value for name, value in usual.items() if name not in self.model_fields_set},
            drafter=drafter_kind(self.drafter) if self.drafter else None,
            form=form,
            chat_template=None if trained is None else trained.get("chat_template"),
            acceptance_ratio=None if trained is None or form else trained.get("acceptance_ratio"),
        )

    def fitted(self, method: MethodConfig, most: int | None) -> MethodConfig:
        """The method of these settings for a drafter of at most `most` steps, None for any number: a depth that was not
        set is no greater. Raises BundleError for thresholds that never matter then."""
        depth_is_set = not {"beam_length", "levels"}.isdisjoint(self.model_fields_set)
        if most is None or depth_is_set or (len(method.levels) or method.beam_length) <= most:
            return method
        if levels := method.levels[:most]:
            draws = sum(RANDOM_CONSTRUCTIONS[self.construction or ""].shape(levels).widths)
            budget = self.tree_budget if "tree_budget" in self.model_fields_set else draws
            return method.changed(levels=levels, tree_budget=budget)
        check_thresholds(shorter := method.changed(beam_length=most), fitted=True)
        return shorter


def drafter_kind(folder: Path) -> str:
    """Which kind of `DRAFTERS` a folder holds; a whole model is a draft LM."""
    return DraftLM.name if is_model(folder) else kind_of(folder)


def read_methods(path: Path) -> dict[str, MethodSettings]:
    """The methods of a TOML file, in its order. Raises BundleError that names the file and what is wrong with it."""
    try:
        tables = tomllib.loads(read_text(path, "--methods"))
    except tomllib.TOMLDecodeError as error:
        raise BundleError(f"--methods {path}: {error}") from None
    if not tables:
        raise BundleError(f"--methods {path}: expected a table for each method, found none")
    result = {}
    for name, table in tables.items():
        try:
            result[name] = MethodSettings.model_validate(table)
        except ValidationError as error:
            raise BundleError(f"--methods {path}, [{name}]: {describe(error)}") from None
        if result[name].way is None:
            raise BundleError(f"--methods {path}, [{name}]: expected {SOURCES}")
    return result


def check_method(name: str, method: MethodConfig, config: BundleConfig) -> None:
    """Refuse a method that cannot work in this bundle. Raises BundleError or ValueError."""
    if name == AUTO_REGRESSIVE:
        raise BundleError(f"a method cannot be called {name!r}: every bundle has that one")
    method.check()
    if method.drafter and method.drafter not in DRAFTERS:
        raise BundleError(f"unknown drafter {method.drafter!r}; known are {', '.join(DRAFTERS)}")
    chains = [name for name, kind in DRAFTERS.items() if kind.has_raw_logits]
    if method.resample_above is not None and method.drafter not in chains:
        raise BundleError(
            f"--resample-above {method.resample_above}: only drafters {', '.join(map(repr, chains))} leave a chain "
            f"behind, this is {method.drafter!r}"
        )
    check_thresholds(method)
    if method.tree_budget + method.resample_budget >= config.limits.max_tree:
        option = f"--levels {','.join(map(str, method.levels))}, " if method.levels else ""
        beside = f" and --resample-budget {method.resample_budget} together" if method.resample_budget else ""
        raise BundleError(
            f"{option}--tree-budget {method.tree_budget}{beside}: expected less than "
            f"--max-tree {config.limits.max_tree}"
        )
    if not method.levels and method.candidates < method.beam_width:
        raise BundleError(f"--candidates {method.candidates}: expected at least --beam-width {method.beam_width}")
    random = RANDOM_CONSTRUCTIONS.get(method.construction or "")
    if random and not method.support:
        raise BundleError(f"--support 0: expected 1 or more tokens for {method.construction!r} to draw from")
    if random and random.draws == Draws.WITHOUT_REPLACEMENT:
        for above, count in pairwise((1, *random.shape(method.levels).widths)):
            if count > above * method.support:
                raise BundleError(
                    f"--levels {','.join(map(str, method.levels))}: {count} draws without replacement below {above} "
                    f"nodes, expected at most --support {method.support} of each"
                )


def check_thresholds(method: MethodConfig, fitted: bool = False) -> None:
    """Refuse thresholds of re-sampling that never matter, or between which nothing would be drafted. A step takes one
    token or more off a chain of `beam_length`, which is the drafter's own if it was `fitted`. Raises BundleError."""
    resample, skip, most = method.resample_above, method.skip_above, method.beam_length - 1
    length = f"{most + 1} tokens, as deep as this drafter goes" if fitted else f"--beam-length {most + 1}"
    for flag, threshold in (("--resample-above", resample), ("--skip-above", skip)):
        if threshold is not None and threshold >= most:
            raise BundleError(
                f"{flag} {threshold}: expected less than {most}, the most steps that are left of a draft of {length}"
            )
    if skip is not None and (resample is None or skip < resample):
        raise BundleError(
            f"--skip-above {skip}: expected --resample-above of {skip} or less, got {resample}: where more steps than "
            f"{skip} are left nothing else is drafted"
        )


def load_draft_source(
    folder: Path, hot_vocabulary: Path | None, read_as: str | None, target: Target, model: Path, fingerprint: str
) -> Drafter:
    """A trained drafter, or a model as draft LM, for the target of the folder `model`. Raises BundleError."""
    if is_model(folder):
        if read_as:
            raise BundleError(f"--read-as {read_as}: {folder} holds a whole model, which leaves nothing open")
        return load_draft_model(folder, target, model, hot_vocabulary)
    if hot_vocabulary:
        raise BundleError(f"--hot-vocabulary {hot_vocabulary}: {folder} was trained with its own")
    return load_checked(folder, target, fingerprint, read_as)


def load_checked(folder: Path, target: Target, fingerprint: str, read_as: str | None = None) -> Drafter:
    """A trained drafter. Raises BundleError where it is another target's, or as `load_drafter`."""
    trained_for = read_json(folder / "config.json").get("target_fingerprint")
    if trained_for not in (None, fingerprint):
        raise BundleError(
            f"{folder} was trained for another target: fingerprint {trained_for}, this one's is {fingerprint}"
        )
    return load_drafter(folder, target, parse_answers(read_as))


def drafting_loop(
    drafter: Drafter, method: MethodConfig, config: BundleConfig, token_info: InfoForm | None = None
) -> tuple[MethodConfig, Drafting]:
    """The method with what its drafter needs at run time, and its drafting loop. The loop's drafter is a copy that
    shares the weights, so that methods may share a drafter. Raises ValueError where it cannot draft so deep, or so far
    into a text."""
    random = RANDOM_CONSTRUCTIONS.get(method.construction or "")
    length = len(method.levels) if random else method.beam_length
    option = f"--levels {','.join(map(str, method.levels))}" if random else f"--beam-length {length}"
    drafter.require_steps(length, option)
    if (longest := drafter.longest_context) and config.limits.max_len > longest:
        raise ValueError(
            f"--max-len {config.limits.max_len}: the drafter {drafter.name!r} reads contexts of {longest} positions"
        )
    draft_rows = sum(random.shape(method.levels).widths[:-1]) if random else method.beam_width * (length - 1)
    draft_rows = drafter.block_rows or draft_rows
    drafter = copy.deepcopy(drafter, {id(tensor): tensor for tensor in (*drafter.parameters(), *drafter.buffers())})
    known = len(drafter.hot_ids)
    if not random and method.candidates > known:
        raise ValueError(f"--candidates {method.candidates}: expected at most {known}, all that the drafter knows")
    if token_info and drafter.token_info is None:
        raise ValueError(f"--token-info {token_info}: this drafter {drafter.name!r} has none")
    native, taken = config.backend.native_drafters, config.backend.token_info
    if token_info and token_info not in taken:
        raise ValueError(f"--token-info {token_info}: {config.backend} takes {', '.join(taken)}")
    if isinstance(drafter, ChainDrafter) and drafter.token_info is not None:
        known_forms = drafter.info_forms
        if token_info and token_info not in known_forms:
            raise ValueError(f"--token-info {token_info}: this drafter {drafter.name!r} takes {', '.join(known_forms)}")
        drafter.info_form = token_info or next(InfoForm(form) for form in taken if form in known_forms)
    if native:  # drafted nodes stand beside the cache; padding is a pair at max_len and, after it, a draft or a block
        draft_rows = max(config.limits.max_tree, length, drafter.block_size + 1)
    drafter.prepare(config.limits.max_len + draft_rows, length, config.limits.max_len)
    needs: dict[str, object] = {}
    if drafter.reads_context:
        heads = cast(CacheTables, drafter.tables).config
        needs["context"] = ContextInfo(
            layers=drafter.context_layers,
            num_kv_heads=heads.num_kv_heads,
            head_size=heads.head_size,
            draft_rows=draft_rows,
            from_text=drafter.reads_text,
        )
    if not random and drafter.has_raw_logits and (method.resample_above is not None or not native):
        needs["chain_levels"] = method.beam_length - 1
    if not random:  # networks in native form cannot make the target's noise: `export_drafter_native` says why
        needs["support"] = 0 if native else min(method.support, known)
        if 0 < method.support < method.candidates:
            raise ValueError(f"--support {method.support}: expected at least --candidates {method.candidates}, or 0")
    method = method.changed(**needs)
    loop: Drafting = (
        RandomDraws(drafter, random.rule, method.levels, method.support)
        if random
        else BeamSearch(drafter, method.beam_width, method.beam_length, method.candidates, method.support)
    )
    return method, loop.eval()
