"""Learned scaling curves are kept for later training jobs of the same code and shapes."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

import parsl
import pytest

from freetrain_parsl import training_app
from freetrain_parsl.executor.jobs.curve_learning import CurveKeeper
from freetrain_parsl.executor.jobs.likeness import SHARDED, recall_rates
from freetrain_parsl.executor.jobs.request import Training, TrainingRequest
from freetrain_parsl.extensions.replay.recorded_run import read_run
from freetrain_parsl.planning import events as planner
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.sizes import ANY_COUNT, AllowedCounts
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.storage.measurements import measurement_path, read_rates

if TYPE_CHECKING:
    from pathlib import Path

    from freetrain_parsl import TrainingApp
    from freetrain_parsl.planning.model import PlannedJob
    from tests.executor.scenario import Site
    from tests.executor.stage import Stage


def test_the_newest_curves_are_written_at_the_latest_when_the_run_ends(tmp_path: Path) -> None:
    keeper = CurveKeeper(tmp_path)
    for rate in (10.0, 20.0, 30.0):
        for key in ("one", "other"):
            keeper.keep(key, {"": {1: rate}})
    keeper.close()
    assert read_rates(tmp_path, "one") == read_rates(tmp_path, "other") == {"": {1: 30.0}}


def test_a_run_without_curves_writes_nothing(tmp_path: Path) -> None:
    CurveKeeper(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def sharded(root: Path, bounds: tuple[int, int] = (1, 4)) -> Training:
    """Make a training job that is like the others here, with what these have learned."""
    request = TrainingRequest(
        SessionOptions("t"), min_nodes=bounds[0], max_nodes=bounds[1], scaling=ScalingCurve.default(), likeness="alike"
    )
    training = Training(request, b"function", Future())
    recall_rates(training, root, 1, 1, None)
    return training


def submitted(stage: Stage) -> PlannedJob:
    return [event.trainer for event in stage.events if isinstance(event, planner.TrainerSubmitted)][-1]


def test_a_later_training_job_begins_on_a_number_of_nodes_that_its_model_allows(stage: Stage, tmp_path: Path) -> None:
    """The first one learns it when its function has prepared the model."""
    stage.manager.submit(sharded(tmp_path))
    assert submitted(stage).allowed_counts == ANY_COUNT
    stage.on("n0", "n1", "n2")
    for step in (1, 2):
        stage.progress("s0", step=step, sharded_bytes=100, allowed_counts=AllowedCounts(divisor_of=4))
    stage.manager.close()

    stage.manager.submit(later := sharded(tmp_path))
    assert later.sharded_on == submitted(stage).allowed_counts == AllowedCounts(divisor_of=4)
    stage.manager.submit(sharded(tmp_path, (3, 3)))
    assert submitted(stage).allowed_counts == ANY_COUNT, "none is allowed within its bounds, as its own report will say"


def test_a_damaged_rule_is_learned_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = measurement_path(tmp_path, SHARDED, sharded(tmp_path).curve_key)
    for content in ("[0, 4]", "[3, 4]", '["1", 0]', "{}", "[1", "[true, 0]"):
        path.write_text(content)
        assert sharded(tmp_path).sharded_on is None
    assert caplog.text.count("it is learned anew") == 6


def make_app() -> TrainingApp:
    @training_app
    def train(session, *, width, lr):
        import time

        import torch
        from torch.nn.functional import mse_loss
        from torch.utils.data import TensorDataset

        net = torch.nn.Linear(width, 1)
        model, _ = session.prepare(net, torch.optim.SGD(net.parameters(), lr=lr))
        data = session.loader(TensorDataset(torch.randn(200, width), torch.randn(200, 1)), batch_size=20)
        for _epoch in session.epochs(10):
            for a, b in data:
                time.sleep(0.05)
                session.step(mse_loss(model(a), b))
        return session.metrics["samples"]

    return train


def first_curve(site: Site) -> ScalingCurve:
    """Return the curve with which the first training job was submitted to the planner."""
    events = (event for step in read_run(site.executor.journal_path).steps for event in step.events)
    return next(event.trainer.curve for event in events if isinstance(event, planner.TrainerSubmitted))


@pytest.mark.cluster
def test_a_later_run_begins_with_the_curve_of_a_training_with_another_learning_rate(start) -> None:
    site = start(nodes=1)
    assert make_app()(width=4, lr=0.01).result(timeout=120) == 2000
    assert first_curve(site).relative
    parsl.dfk().cleanup()
    parsl.clear()
    site = start(nodes=1)
    assert make_app()(width=4, lr=0.02).result(timeout=120) == 2000
    assert not first_curve(site).relative
    assert 50 < first_curve(site)(1) < 400, "20 samples in 50 ms or more"
