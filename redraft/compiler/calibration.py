"""What a target's linear layers take: the largest magnitudes over texts, from which FP8 scales are made."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from redraft.model_defs.files import read_json
from redraft.model_defs.target.attention import causal_attend
from redraft.model_defs.target.model import Target

FORMAT_VERSION = 1


def linear_layers(target: Target) -> dict[str, nn.Linear]:
    """The linear layers by name: `layers.0.qkv`, ..., `lm_head`."""
    return {name: module for name, module in target.named_modules() if isinstance(module, nn.Linear)}


@dataclass(frozen=True)
class Calibration:
    """The largest magnitude of every linear layer's input over `tokens` tokens of `texts` texts."""

    target_fingerprint: str
    texts: int
    tokens: int
    largest_inputs: dict[str, float]
    format_version: int = FORMAT_VERSION

    @classmethod
    def load(cls, file: Path) -> Calibration:
        """Read what `save` wrote. Raises FileNotFoundError, or ValueError for anything else."""
        raw = read_json(file)
        if raw.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"{file}: format_version {raw.get('format_version')!r}, expected {FORMAT_VERSION}; "
                "write it with redraft calibrate"
            )
        try:
            calibration = cls(**raw)
            largest = {str(name): float(value) for name, value in calibration.largest_inputs.items()}
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{file}: not a calibration ({error}); write it with redraft calibrate") from None
        for name, value in largest.items():
            if not 0 < value < float("inf"):
                raise ValueError(f"{file}: the largest input of {name} is {value}, expected a positive number")
        return calibration

    def save(self, file: Path) -> None:
        """Write it as JSON."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(self), indent=1) + "\n")

    def check(self, target: Target, fingerprint: str, file: Path) -> None:
        """Raise ValueError where it is of another target."""
        if self.target_fingerprint != fingerprint:
            raise ValueError(
                f"{file} was made for another target: fingerprint {self.target_fingerprint}, this one has "
                f"{fingerprint}; calibrate this one with redraft calibrate"
            )
        expected, names = set(linear_layers(target)), set(self.largest_inputs)
        if expected != names:
            wrong = sorted(expected ^ names)
            what = "lacks" if wrong[0] in expected else "names"
            raise ValueError(
                f"{file} {what} the layer {wrong[0]} ({len(wrong)} names differ from the target's); "
                "write it anew with redraft calibrate"
            )


def calibrate(
    target: Target, fingerprint: str, texts: Iterable[list[int]], on_text: Callable[[], None] = lambda: None
) -> Calibration:
    """Run the target over texts (token ids) and record what its linear layers take. Raises ValueError for none, or
    where a layer takes infinite values, NaN or only zeros."""
    largest = {name: torch.zeros(()) for name in linear_layers(target)}

    def record(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            largest[name] = torch.maximum(largest[name], inputs[0].abs().max())

        return hook

    hooks = [layer.register_forward_pre_hook(record(name)) for name, layer in linear_layers(target).items()]
    count = tokens = 0
    try:
        with torch.inference_mode():
            for ids in texts:
                target.lm_head(target(torch.tensor([ids]), causal_attend(target.config, len(ids))).hidden)
                count, tokens = count + 1, tokens + len(ids)
                on_text()
    finally:
        for hook in hooks:
            hook.remove()
    if not count:
        raise ValueError("expected at least one text to calibrate with")
    for name, value in largest.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"the largest input of {name} is {float(value)}: this target cannot be calibrated")
    return Calibration(fingerprint, count, tokens, {name: float(value) for name, value in largest.items()})
