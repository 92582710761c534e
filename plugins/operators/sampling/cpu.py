"""Drawing tokens by the CPU kernels; see README.md."""

from __future__ import annotations

import ctypes
from ctypes import byref

import numpy as np

from redraft.plugins.headers import PLUGINS, kernel_arguments, structures
from redraft.plugins.kernels import data_of, library


class TokenDraws:
    """Draws of one request, by its seed, inverse temperature, top-k (0: all) and top-p (1: all).

    Arguments of the kernels are filled in once; a call changes what is new, since a draw takes little longer than
    filling them in. Logits are float32 [V] of one V. Results are valid until the next call.
    """

    def __init__(self, seed: int, inverse_temperature: float, top_k: int, top_p: float):
        self.seed, arguments = seed, kernel_arguments(PLUGINS)
        tokens = structures(PLUGINS)["TokenFilter"](
            logits=None, vocabulary=0, inverse_temperature=inverse_temperature, top_k=top_k, top_p=top_p
        )
        self._count, self._total, self._token = ctypes.c_int64(), ctypes.c_double(), ctypes.c_int32()
        drawn = {"seed": seed, "position": 0, "token": ctypes.addressof(self._token)}
        self._choose = arguments["choose"](f=tokens, **drawn)
        self._race = arguments["race"](weights=None, ids=None, count=0, **drawn)
        self._distribution = arguments["distribution"](
            f=tokens,
            ids=None,
            weights=None,
            count=ctypes.addressof(self._count),
            total=ctypes.addressof(self._total),
        )
        self._ids, self._weights = np.empty(0, np.int32), np.empty(0, np.float32)

    @property
    def address(self) -> int:
        """Where the arguments of `choose` are."""
        return ctypes.addressof(self._choose)

    def choose(self, logits: np.ndarray, position: int) -> int:
        """The token drawn from what the filters leave of the logits."""
        arguments = self._choose
        arguments.f.logits, arguments.f.vocabulary, arguments.position = data_of(logits), len(logits), position
        _check(library().redraft_choose(byref(arguments)))
        return self._token.value

    def distribution(self, logits: np.ndarray) -> tuple[np.ndarray | None, np.ndarray, float]:
        """What `choose` draws from: ids int32 [n], ascending (None: all), their weights float32 [n] and the sum."""
        if len(logits) > len(self._ids):
            self._ids, self._weights = np.empty(len(logits), np.int32), np.empty(len(logits), np.float32)
        arguments = self._distribution
        arguments.f.logits, arguments.f.vocabulary = data_of(logits), len(logits)
        arguments.ids, arguments.weights = data_of(self._ids), data_of(self._weights)
        _check(library().redraft_distribution(byref(arguments)))
        count = self._count.value
        return self._ids[:count] if count < len(logits) else None, self._weights[:count], self._total.value

    def race(self, ids: np.ndarray | None, weights: np.ndarray, position: int) -> int:
        """The token drawn from such a distribution, by the same noise as `choose`."""
        arguments = self._race
        arguments.ids, arguments.weights = None if ids is None else data_of(ids), data_of(weights)
        arguments.count, arguments.position = len(weights), position
        _check(library().redraft_race(byref(arguments)))
        return self._token.value


def _check(message: bytes | None) -> None:
    if message:
        raise ValueError(message.decode())
