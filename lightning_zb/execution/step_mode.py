"""Which optimizer steps are optimistic: all, none, or as the run's clipping suggests."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class ModeSwitch:
    """Decides from verdicts alone, so that all devices decide alike without asking each other.

    An optimistic step that restarts costs little more than a synchronous one, so falling back matters only while nearly
    every step clips; coming back waits for as many steps without clipping.

    Args:
        is_optimistic: how the next step is finished.
        adapts: whether verdicts change it.
        num_quiet_steps: steps without clipping after which it becomes optimistic.
        num_recent_steps: steps over which restarts are counted.
        max_restarts: restarts among them above which it becomes synchronous.
    """

    is_optimistic: bool
    adapts: bool = False
    num_quiet_steps: int = 8
    num_recent_steps: int = 16
    max_restarts: int = 12
    _recent: deque[bool] = field(default_factory=deque)

    @classmethod
    def always(cls) -> ModeSwitch:
        """Every step is optimistic."""
        return cls(is_optimistic=True)

    @classmethod
    def never(cls) -> ModeSwitch:
        """Every step is synchronous."""
        return cls(is_optimistic=False)

    @classmethod
    def auto(cls) -> ModeSwitch:
        """Synchronous first, optimistic once gradients stop being clipped."""
        return cls(is_optimistic=False, adapts=True)

    @property
    def may_be_optimistic(self) -> bool:
        """Whether any step will ever be."""
        return self.is_optimistic or self.adapts

    def note(self, restarted: bool) -> bool:
        """Take note of a step's verdict.

        Returns:
            Whether the mode changed.
        """
        if not self.adapts:
            return False
        self._recent.append(restarted)
        length = self.num_recent_steps if self.is_optimistic else self.num_quiet_steps
        while len(self._recent) > length:
            self._recent.popleft()
        if self.is_optimistic:
            changes = sum(self._recent) > self.max_restarts
        else:
            changes = len(self._recent) == length and not any(self._recent)
        if changes:
            self.is_optimistic = not self.is_optimistic
            self._recent.clear()
        return changes
