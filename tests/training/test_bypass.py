"""Training that bypasses the session raises an error at once; code that only looks like it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from bypassing import (
    accumulate_by_hand,
    add_a_second_backward,
    library_trainer,
    library_trainer_without_prepare,
    manual_descent,
    own_dataloader,
    plain_loop,
    step_after_session_backward,
)
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from training_crew import SAMPLES, Data, net

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.fragment import run_local

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew

pytestmark = pytest.mark.slow


def no_step(session: Any) -> None:
    session.prepare(net(), torch.optim.SGD, lr=0.1)
    data = session.loader(Data(), 8)
    for _ in session.epochs(1):
        for _x, _y in data:
            pass


BYPASSES = [
    (plain_loop, r"SGD.step\(\) was called outside session.step\(\).*replace loss.backward\(\)"),
    (step_after_session_backward, r"SGD.step\(\) was called outside session.step\(\)"),
    (own_dataloader, r"SGD.step\(\) was called outside session.step\(\)"),
    (library_trainer, r"Adam.step\(\) was called outside session.step\(\).*Trainer.train\(\), runs in"),
    (library_trainer_without_prepare, r"called Adam.step\(\), but never session.step\(\).*Trainer.train"),
    (accumulate_by_hand, r"loss.backward\(\) and without session.step\(\).*micro_batch"),
    (add_a_second_backward, r"loss.backward\(\) was called before session.step\(loss\) in the same batch"),
    (manual_descent, r"epoch 0: loss.backward\(\) was called on the model.*take the batches from session.loader"),
    (no_step, rf"epoch 0: session.step\(\) was called for none of the {-(-SAMPLES // 8)} batches"),
]


@pytest.mark.parametrize(("function", "message"), BYPASSES)
def test_training_past_the_session_is_refused_in_one_line(tmp_path: Path, function: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        run_local(function, directory=tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.smoke
def test_two_processes_refuse_a_plain_loop_instead_of_finishing_with_different_models(
    crew: Crew, tmp_path: Path
) -> None:
    for outcome in crew.run(2, tmp_path, plain_loop):
        assert outcome is not None
        assert outcome.end is None
        assert outcome.error.startswith(("UsageError: SGD.step() was called outside", "PeerFailed"))


def test_a_long_loop_without_prepare_is_refused_before_it_ends(tmp_path: Path) -> None:
    steps = []

    def train(session: Any) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(1000):
            model(Data().x[:2]).sum().backward()
            optimizer.step()
            steps.append(1)

    with pytest.raises(UsageError, match=r"100 steps of SGD were made before session.prepare\(\)"):
        run_local(train, directory=tmp_path)
    assert len(steps) == 99


def test_skipped_batches_adversarial_examples_probes_and_validation_are_no_mistakes(tmp_path: Path) -> None:
    """Each has its own backward pass or optimizer, or no step, in addition to steps of the session."""

    def train(session: Any) -> dict[str, Any]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        probe = nn.Linear(3, 3)
        for_probe = torch.optim.SGD(probe.parameters(), lr=0.1)
        for_probe.step()
        optimizer.step()  # some code initializes an optimizer like this: without gradients it does nothing
        model, optimizer = session.prepare(model, optimizer)
        data = session.loader(Data(), 8)
        for epoch in session.epochs(2):
            for number, (x, y) in enumerate(data):
                if number == 1:
                    continue
                if number == 2:
                    session.backward(cross_entropy(model(x), y))
                    optimizer.zero_grad()
                    continue
                x.requires_grad_()
                cross_entropy(model(x), y).backward()
                model.zero_grad()
                session.step(cross_entropy(model(x + 0.01 * x.grad.sign()), y))
                optimizer.step()  # has no effect after session.step
            for x, y in DataLoader(Data(), 16):
                cross_entropy(probe(model(x).detach()), y).backward()
                for_probe.step()
                cross_entropy(model(x), y).backward()  # for example for the norm of the gradients
            model.zero_grad()
            session.log(epoch=epoch)
        return session.metrics

    batches = -(-SAMPLES // 8)
    assert run_local(train, directory=tmp_path)["steps"] == 2 * (batches - 2)


def test_optimizers_are_free_again_after_the_session(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        run_local(plain_loop, directory=tmp_path)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(200):
        model(Data().x[:2]).sum().backward()
        optimizer.step()
