"""The families there are. A new one is a module of its own and an entry here."""

from __future__ import annotations

from redraft.model_defs.target.bounds import shown
from redraft.model_defs.target.errors import UnsupportedModelError
from redraft.model_defs.target.families.base import Family
from redraft.model_defs.target.families.gemma3 import GEMMA3
from redraft.model_defs.target.families.glm4 import GLM4
from redraft.model_defs.target.families.granite import GRANITE
from redraft.model_defs.target.families.llama import LLAMA
from redraft.model_defs.target.families.mistral import MISTRAL
from redraft.model_defs.target.families.mixtral import MIXTRAL
from redraft.model_defs.target.families.opt import OPT
from redraft.model_defs.target.families.phi3 import PHI3
from redraft.model_defs.target.families.qwen2 import QWEN2
from redraft.model_defs.target.families.qwen3 import QWEN3
from redraft.model_defs.target.families.qwen3_moe import QWEN3_MOE
from redraft.model_defs.target.families.smollm3 import SMOLLM3

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, SMOLLM3, GEMMA3, OPT, QWEN3_MOE, MIXTRAL, GLM4, GRANITE)
}
SUPPORTED = ", ".join(f"{family.title} (model_type {family.model_type})" for family in FAMILIES.values())


def family_of(model_type: str | None) -> Family:
    """The family of a configuration's `model_type`. Raises UnsupportedModelError that lists the known ones."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedModelError(f"model_type {shown(model_type)}", SUPPORTED)
    return FAMILIES[model_type]
