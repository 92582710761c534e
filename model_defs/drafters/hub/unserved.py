"""Forms of drafters that are recognised and not served yet."""

from __future__ import annotations

from collections.abc import Callable

from redraft.model_defs.drafters.hub.folder import HubFolder


def _speculators(kind: str) -> Callable[[HubFolder], bool]:
    return lambda folder: folder.config.get("speculators_model_type") == kind


def _named(architecture: str) -> Callable[[HubFolder], bool]:
    return lambda folder: folder.names_architecture(architecture)


def _projects(kind: str) -> Callable[[HubFolder], bool]:
    """Whether a folder holds a drafter of DFlash's form with a projector of this kind, which is not served."""
    return lambda folder: folder.says("projector_type", "dflash_config") == kind


def _is_mla(folder: HubFolder) -> bool:
    return folder.names_architecture("Eagle3Deepseek")


UNSERVED: dict[str, tuple[Callable[[HubFolder], bool], ...]] = {
    "P-EAGLE of SpecForge": (lambda folder: "mask_hidden" in folder.names and not _speculators("peagle")(folder),),
    "Domino": (_projects("domino"),),
    "XPress": (_speculators("xpress"),),
    "DFlash 2": (_speculators("dflash2"), _named("DFlash2DraftModel"), _projects("dflash2")),
    "LiLiCorr": (_named("LiLiCorrDraftModel"), _projects("lilicorr")),
    "MTP": (_speculators("mtp"), lambda folder: any(name.startswith("mtp") for name in folder.names)),
    "EAGLE-1 in speculators form": (_speculators("eagle"),),
    "Arctic's MLP speculator": (_speculators("mlp"), lambda folder: folder.says("model_type") == "mlp_speculator"),
    "EAGLE-3 with latent attention": (_is_mla,),
}
"""Names, and what tells of them: any is enough."""


def unserved_form(folder: HubFolder) -> str | None:
    """The form of a folder that is recognised and not served, None for any other."""
    return next((form for form, signs in UNSERVED.items() if any(sign(folder) for sign in signs)), None)
