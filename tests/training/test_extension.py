"""What takes part in a session: how it is found, and that it is asked at its places."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from freetrain_parsl import run_local
from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.extension import SESSIONS, SessionExtension, extension_for, filled

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Marked(nn.Linear):
    """A model that needs the extension."""


class Counted(SessionExtension):
    """Notes the calls, and provides all batches of the first epoch."""

    calls: list[str] = []  # noqa: RUF012 - the session makes the instance

    @classmethod
    def applies(cls, objects: Mapping[str, Any]) -> bool:
        return isinstance(objects.get("model"), Marked)

    @classmethod
    def fill(cls, saved: Any, target: Any, checkpoint: Path) -> Any:
        cls.calls.append(f"fill {type(target).__name__}")
        return saved

    def prepared(self, objects: Mapping[str, Any], *_: Any) -> None:
        self.calls.append(f"prepared {', '.join(objects)}")

    def data(self, source: Any) -> Any:
        self.calls.append(f"data of {source.order.length}")
        return self

    def get(self, epoch: int, position: int, fetch: Any) -> Any:
        self.calls.append(f"batch {epoch} {position}")
        return None if epoch else fetch()

    def started(self, state: Any, _in_batch: Any) -> None:
        if state.best_epochs.followed:
            raise UsageError("not with a marked model")
        self.calls.append("started")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SESSIONS, "counted", Counted)
    Counted.calls.clear()


def train(session: Any, kind: type[nn.Linear], *, best: bool = False) -> dict[str, list[float]]:
    model, _ = session.prepare(kind(2, 1), torch.optim.SGD, lr=0.1)
    x = torch.arange(12.0).reshape(6, 2) / 12
    data = session.loader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=3)
    if best:
        session.keep_best("loss", mode="min")
    for _ in session.epochs(2):
        for inputs, wanted in data:
            session.step(mse_loss(model(inputs), wanted))
    return {name: value.tolist() for name, value in model.state_dict().items()}


def test_it_is_asked_at_its_places_and_changes_no_result() -> None:
    with_it = run_local(train, Marked)
    assert Counted.calls == [
        "prepared model, optimizer",
        "data of 6",
        "started",
        "batch 0 0",
        "batch 0 3",
        "batch 1 0",  # after this the loader fetches all
    ]
    assert with_it == run_local(train, nn.Linear)
    assert len(Counted.calls) == 6, "a training job that does not need it"


def test_it_refuses_before_the_first_step() -> None:
    with pytest.raises(UsageError, match="not with a marked model"):
        run_local(train, Marked, best=True)
    run_local(train, nn.Linear, best=True)


def test_a_checkpoint_may_need_it_though_the_objects_do_not(tmp_path: Path) -> None:
    """As that of a sharded training job which resumes in one process."""
    run_local(train, nn.Linear, directory=tmp_path)
    assert Counted.calls == []
    run_local(train, nn.Linear, directory=tmp_path)
    assert Counted.calls == ["fill Linear", "fill SGD"]


def test_the_present_one_stays_unless_another_is_needed() -> None:
    present = SessionExtension()
    assert extension_for({"model": nn.Linear(1, 1)}, present) is present
    found = extension_for({"model": Marked(1, 1)}, present)
    assert type(found) is Counted
    assert extension_for({"model": Marked(1, 1)}, found) is found


def test_without_effect_a_state_is_as_it_was_saved(tmp_path: Path) -> None:
    saved = {"weight": torch.ones(1)}
    assert filled(saved, nn.Linear(1, 1), tmp_path) is saved
