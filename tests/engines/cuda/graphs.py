"""A GPU's CUDA graphs on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor


class FakeGraphs:
    """What is captured runs again at each replay, into the same memory. `room`: graphs for which memory suffices."""

    def __init__(self, room: int | None = None):
        self.captured = self.replayed = 0
        self.results: list[list[tuple[int, ...]]] = []
        """Shapes of the results of each warm-up, in order."""
        self._room = room

    def warm_up(self, function: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        results = function()
        self.results.append([tuple(result.shape) for result in results])
        return results

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        if self.captured == self._room:
            raise RuntimeError("CUDA error: out of memory")
        function()
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            function()

        return replay
