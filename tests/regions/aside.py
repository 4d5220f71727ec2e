"""The other thread that copies sessions, stepped by a test."""

from collections import deque

from regions.offload.kv_store import Steps, Way


class Aside:
    """Takes a step of a copy when the test says so."""

    def __init__(self) -> None:
        self.waiting: deque[Steps] = deque()

    def __call__(self, way: Way, steps: Steps) -> None:
        self.waiting.append(steps)

    def step(self) -> bool:
        """One step of the oldest copy; False without one."""
        if not self.waiting:
            return False
        try:
            next(self.waiting[0])
        except StopIteration:
            self.waiting.popleft()
        return True

    def finish(self) -> int:
        """All steps; returns how many."""
        steps = 0
        while self.step():
            steps += 1
        return steps
