"""Drafting: what each method proposes for a batch of sequences, and how the proposals become trees within a budget."""

from __future__ import annotations

from typing import Any

from redraft.bundle.method import MethodConfig
from redraft.drafting.method import Method
from redraft.drafting.resampling import ResamplingMethod
from redraft.engines.api import DraftEngine


def start_method(config: MethodConfig, drafter: DraftEngine | None, *args: Any) -> Method:
    """A bundle's method, ready to draft. Arguments and errors: see `Method`."""
    kind = Method if config.resample_above is None else ResamplingMethod
    return kind(config, drafter, *args)
