"""The conformance suite for homes of checkpoints: subclass `HomeConformance` in your tests, and pytest runs its tests.

It plays two sites, ``a`` and ``b``, that share a home. Nothing happens at home but in `HomeConformance.work`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from freetrain_parsl.storage.home import ResultStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.storage.home import Home

__all__ = ["HomeConformance"]

_PASSES = 200
_FEW = 40  # far less than a lease


class HomeConformance(ABC):
    """What a home must do; see the module's docstring."""

    @abstractmethod
    def make(self, site: str) -> Home:
        """Return the home as a new driver of the site's only run uses it."""

    @abstractmethod
    def work(self, home: Home) -> None:
        """Let a home do what is due, and let a little time pass: in 40 passes far less than a lease."""

    @abstractmethod
    def pass_lease(self) -> None:
        """Let so much time pass that a home which has not worked since owns nothing any more."""

    @abstractmethod
    def save(self, site: str, training: str, step: int, content: bytes) -> None:
        """Write a checkpoint in the checkpoint directory of a site, as a training job does."""

    @abstractmethod
    def content(self, site: str, training: str) -> bytes:
        """Return the content of the newest checkpoint in the checkpoint directory of a site."""

    def until(self, condition: Callable[[], bool], *homes: Home, passes: int = _PASSES) -> None:
        """Let homes work until something holds."""
        for _ in range(passes):
            if condition():
                return
            for home in homes:
                self.work(home)
        raise AssertionError([home.lines() for home in homes])

    def ready(self, site: str, training: str = "net") -> Home:
        """Return a home at which a training job may start."""
        home = self.make(site)
        home.want([training])
        assert not home.is_ready(training), "it is not owned yet"
        self.until(lambda: home.is_ready(training), home)
        return home

    def test_a_training_runs_at_one_site(self) -> None:
        """While one site trains it, the other one waits and says why."""
        one, other = self.ready("a"), self.make("b")
        other.want(["net"])
        for _ in range(20):
            self.work(one)
            self.work(other)
        assert one.is_ready("net")
        assert not one.lost("net")
        assert not other.is_ready("net")
        assert other.remark("net")

    def test_a_result_counts_once_it_is_confirmed_and_the_checkpoint_comes_home(self) -> None:
        """The home is not settled before; afterwards another site continues from the checkpoint."""
        one = self.ready("a")
        self.save("a", "net", 10, b"ten")
        assert [one.settled, one.finished("net"), one.settled] == [True, ResultStatus.PENDING, False]
        self.until(lambda: one.finished("net") is ResultStatus.CONFIRMED and one.settled, one)
        self.until(lambda: one.has_left("net"), one)
        self.ready("b")
        assert self.content("b", "net") == b"ten"

    def test_a_training_that_leaves_continues_elsewhere(self) -> None:
        """It has left once its last checkpoint is at home; it can come back."""
        one = self.make("a")
        assert one.has_left("net"), "it was never wanted"
        one = self.ready("a")
        self.save("a", "net", 10, b"ten")
        one.leave("net")
        assert not one.has_left("net")
        self.until(lambda: one.has_left("net"), one)
        other = self.ready("b")
        assert self.content("b", "net") == b"ten"
        self.save("b", "net", 20, b"twenty")
        other.leave("net")
        self.until(lambda: other.has_left("net"), other)
        one.want(["net"])
        self.until(lambda: one.is_ready("net"), one)
        assert self.content("a", "net") == b"twenty"

    def test_a_training_that_waits_can_leave_at_once(self) -> None:
        """It has no checkpoint here, and the owner keeps it."""
        one, other = self.ready("a"), self.make("b")
        other.want(["net"])
        other.leave("net")
        self.until(lambda: other.has_left("net"), one, other)
        assert one.is_ready("net")

    def test_what_is_lost_does_not_count(self) -> None:
        """A site that was cut off for long must stop its training job; it wants it again, and gets it again."""
        one = self.ready("a")
        self.pass_lease()
        self.until(lambda: bool(one.lost("net")), one)
        assert not one.is_ready("net")
        assert one.finished("net") is ResultStatus.LOST
        one.stopped("net")
        assert not one.lost("net")
        self.until(lambda: one.is_ready("net"), one)

    def test_another_site_takes_over_what_was_lost(self) -> None:
        """The first one gets it back only when it is free."""
        one, other = self.ready("a"), self.make("b")
        other.want(["net"])
        self.work(other)
        self.pass_lease()
        self.until(lambda: other.is_ready("net"), other)
        self.until(lambda: bool(one.lost("net")), one, other)
        one.stopped("net")
        for _ in range(20):
            self.work(one)
            self.work(other)
        assert other.is_ready("net")
        assert not one.is_ready("net")

    def test_a_new_driver_continues_and_can_release_what_it_does_not_want(self) -> None:
        """The next driver of the same run need not wait for a lease, neither for what it wants nor for the rest."""
        self.ready("a", "net")
        again = self.ready("a", "net")
        assert not again.lost("net")
        last, other = self.make("a"), self.make("b")
        last.abandon(["net"])
        other.want(["net"])
        self.until(lambda: other.is_ready("net"), last, other, passes=_FEW)
