"""A method: how drafts are made and verified. One record from `redraft build`'s flags to the scheduler.

`MethodFields` are what a user may choose. `redraft.compiler.methods.MethodSettings` adds where the drafter is read
from, and is the build's flags and file of methods. `MethodConfig` adds what the build found out, stands in a bundle's
`config.json` and is what the scheduler drafts by.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from redraft.bundle.budget_table import BudgetTable
from redraft.decoding.construction import CONSTRUCTIONS
from redraft.decoding.random_trees import RANDOM_CONSTRUCTIONS, DrawShape
from redraft.decoding.scores import UNFITTED, NgramScores, Scores
from redraft.decoding.verification import VERIFIERS, check_pairing
from redraft.errors import BundleError


def parse_levels(value: Any) -> Any:
    """Numbers of draws from "4,2,1"; any other value as it is. Raises BundleError."""
    if not isinstance(value, str):
        return value
    counts = value.split(",")
    if not all(count.strip().isdecimal() and int(count) for count in counts):
        raise BundleError(f"--levels {value}: expected whole numbers of 1 or more with commas between them")
    return tuple(map(int, counts))


class MethodFields(BaseModel):
    """The fields of a method that a user may set; the descriptions are their help. A default that depends on other
    fields is what `MethodSettings.config` puts in for a field that was not set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    construction: str | None = Field(
        default="best_first",
        description=f"How draft trees are made: {', '.join(CONSTRUCTIONS)}; at random: "
        f"{', '.join(RANDOM_CONSTRUCTIONS)}.",
    )
    """None: only the n-gram branch drafts."""
    beam_width: int = Field(default=4, ge=1, description="Nodes that the drafter expands at each depth.")
    beam_length: int = Field(default=5, ge=1, description="Depth of the drafts; default: 5, or the drafter's most.")
    candidates: int = Field(default=8, ge=1, description="Children of an expanded node.")
    levels: Annotated[tuple[int, ...], BeforeValidator(parse_levels)] = Field(
        default=(),
        description="Random draws at each depth, such as 4,2,1: children of every node (gumbel_top_k), or nodes of the "
        "depth. Default: "
        + "; ".join(f"{name} {','.join(map(str, known.levels))}" for name, known in RANDOM_CONSTRUCTIONS.items()),
    )
    support: int = Field(
        default=0,
        ge=0,
        description="Most likely tokens of each node that random draws are from, default 64; or that sampled requests' "
        "own noise chooses the candidates from, default 128, 0: they are the most likely.",
    )
    tree_budget: int = Field(
        default=15, ge=1, description="Most nodes that a step drafts for a sequence; default: 15, or all of --levels."
    )
    """With the root a tree of 15 is 16 rows: CPUs compute 16 rows in one tile, and CUDA graphs of the batch have as
    many."""
    ngram: bool = Field(
        default=False,
        description="Merge an n-gram branch; default: with a drafter, where the verification allows it.",
    )
    verification: str = Field(
        default="sampled_walk",
        description=f"Which drafted tokens are kept: {', '.join(VERIFIERS)}. Default: sampled_walk; at random: "
        + ", ".join(f"{known.verification} ({name})" for name, known in RANDOM_CONSTRUCTIONS.items()),
    )
    resample_above: int | None = Field(
        default=None,
        ge=0,
        description="Draft again from a rejected draft's chain where more steps than this are left; default: never.",
    )
    resample_budget: int = Field(
        default=0,
        ge=0,
        description="Nodes drafted so that are verified beside a new draft, on top of its own; default: 4.",
    )
    skip_above: int | None = Field(
        default=None,
        ge=0,
        description="Where more steps than this are left, do so instead of a new draft; default: never.",
    )


class ContextInfo(BaseModel):
    """A drafter's context cache: as many slots as the target's, with `draft_rows` rows after max_len for the nodes
    that a draft expands."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    layers: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_size: int = Field(ge=1)
    draft_rows: int = Field(ge=0)
    from_text: bool = False
    """Whether the first token of a text has a row too, which no features precede."""


class MethodConfig(MethodFields):
    """A method of a bundle, and what the scheduler drafts by: what its drafter's network is unrolled for, and how its
    drafts are used."""

    drafter: str | None = None
    """The drafter's kind; None where there is none."""
    chat_template: str | None = None
    """sha256 of the chat template that the drafter's training data was written with; None where it is not known."""
    acceptance_ratio: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Accepted over expected nodes of greedy drafts, as the drafter's training measured on held-out text; None where it
    is not known."""
    form: str | None = None
    """The form that the drafter was read from, where another project trained it."""
    context: ContextInfo | None = None
    """None where the drafter keeps no context."""
    chain_levels: int = 0
    """Levels that the engine can draft again from the chain of a draft before; 0 where it cannot."""
    budget: BudgetTable | None = Field(default=None, exclude=True)
    """How much to draft, whatever pays, for studies; None: up to `tree_budget` nodes, as many as pay."""
    scores: tuple[Scores, ...] = Field(default=UNFITTED, exclude=True)
    """How nodes are scored, by temperature; fitted ones stand in a file of their own."""
    ngram_scores: NgramScores = Field(default=NgramScores(), exclude=True)
    """How n-gram guesses are scored; fitted ones stand in the same file."""

    @property
    def table(self) -> BudgetTable:
        """How much to draft where nobody says what pays."""
        return self.budget or BudgetTable.constant(self.tree_budget)

    @property
    def shares_noise(self) -> bool:
        """Whether its drafter's network takes the target's noise: see `SharedNoise`."""
        return self.support > 0 and not self.levels

    @property
    def grows(self) -> bool:
        """Whether trees can be grown node by node, by n-grams and by the sequences' grammars."""
        return self.construction == "best_first"

    @property
    def joins_ngrams(self) -> bool:
        """Whether n-grams grow one tree with the drafter's, instead of a chain beside that tree."""
        return self.ngram and self.grows

    @property
    def merges(self) -> bool:
        """Whether other trees are merged into its drafts."""
        return self.ngram or self.resample_above is not None

    @property
    def shape(self) -> DrawShape | None:
        """What is fixed of a random construction's draws; None for the others."""
        random = RANDOM_CONSTRUCTIONS.get(self.construction or "")
        return random.shape(self.levels) if random else None

    def changed(self, **fields: Any) -> MethodConfig:
        """The method with some fields changed, which are not checked."""
        return self.model_copy(update=fields)

    def check(self) -> None:
        """Raise ValueError (PairingError) unless the verification is lossless on the trees that are drafted, and
        random draws have levels to be made on and tokens to be made from."""
        check_pairing(self.construction or "chain", self.verification, self.merges)
        if self.construction in RANDOM_CONSTRUCTIONS and (self.support < 1 or not self.levels or min(self.levels) < 1):
            raise ValueError(
                f"{self.construction!r} needs levels of 1 draw or more and a support of 1 token or more, got levels "
                f"{self.levels} and support {self.support}"
            )
