"""Training functions that bypass the session, as plain PyTorch programs and libraries do."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from training_crew import Data, net


def plain_loop(session: Any) -> None:
    model, optimizer = session.prepare(net(), torch.optim.SGD, lr=0.1)
    data = session.loader(Data(), 8)
    for _ in session.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()


def step_after_session_backward(session: Any) -> None:
    model, optimizer = session.prepare(net(), torch.optim.SGD, lr=0.1)
    data = session.loader(Data(), 8)
    for _ in session.epochs(2):
        for x, y in data:
            session.backward(cross_entropy(model(x), y))
            optimizer.step()


def own_dataloader(session: Any) -> None:
    model, optimizer = session.prepare(net(), torch.optim.SGD, lr=0.1)
    session.loader(Data(), 8)
    for _ in session.epochs(2):
        for x, y in DataLoader(Data(), 8):
            cross_entropy(model(x), y).backward()
            optimizer.step()


class PlannedJob:
    """A stand-in for the trainers of libraries: with its own loader, optimizer and loop."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def train(self) -> None:
        optimizer = torch.optim.Adam(self.model.parameters())
        for x, y in DataLoader(Data(), 8):
            cross_entropy(self.model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


def library_trainer(session: Any) -> None:
    model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
    PlannedJob(model).train()


def library_trainer_without_prepare(session: Any) -> None:
    del session
    PlannedJob(net()).train()


def accumulate_by_hand(session: Any) -> None:
    model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
    data = session.loader(Data(), 8)
    for _ in session.epochs(1):
        for number, (x, y) in enumerate(data):
            if number % 2:
                session.step(cross_entropy(model(x), y))
            else:
                cross_entropy(model(x), y).backward()


def add_a_second_backward(session: Any) -> None:
    model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
    data = session.loader(Data(), 8)
    for _ in session.epochs(1):
        for x, y in data:
            sum(parameter.square().sum() for parameter in model.parameters()).backward()
            session.step(cross_entropy(model(x), y))


def manual_descent(session: Any) -> None:
    model, _ = session.prepare(net(), torch.optim.SGD, lr=0.1)
    for _ in session.epochs(1):
        for x, y in DataLoader(Data(), 8):
            cross_entropy(model(x), y).backward()
            for parameter in model.parameters():
                parameter.data -= 0.1 * parameter.grad
                parameter.grad = None
