"""Members of arrays that change to another one, on a real embedded cluster."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl import training_app
from freetrain_parsl.executor.journal import read_journal
from freetrain_parsl.protocol import journal as record
from tests.executor.scenario import ScriptedPolicy

if TYPE_CHECKING:
    from freetrain_parsl import TrainingApp
    from tests.executor.scenario import Site

pytestmark = pytest.mark.cluster


def make_app() -> TrainingApp:
    @training_app
    def train(session, *, lr, begin, epochs):
        import time

        import torch
        from torch.nn.functional import cross_entropy
        from torch.utils.data import TensorDataset

        time.sleep(begin)
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(320, 32, generator=generator)
        y = torch.randint(0, 10, (320,), generator=generator)
        net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))
        model, _ = session.prepare(net, torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9))
        data = session.loader(TensorDataset(x, y), batch_size=16)
        for _epoch in session.epochs(epochs):
            for a, b in data:
                time.sleep(0.005)
                session.step(cross_entropy(model(a), b))
        return session.metrics["samples"]

    return train


def absences(site: Site) -> list[tuple[float, float]]:
    """Return when members that changed to another array did not train, in order."""
    entries = [(entry.time, entry.record) for _, entry in read_journal(site.executor.journal_path, 0)]
    left: dict[str, float] = {}
    found = []
    for time, entry in entries:
        if isinstance(entry, record.FragmentEnded):
            left[entry.subject] = time
        elif isinstance(entry, record.FragmentStarted) and entry.subject in left:
            found.append((left.pop(entry.subject), time))
    return sorted(found)


def test_members_change_to_a_new_array_one_after_another(start) -> None:
    """Each trains on until the new array can start it: starts take a second, and are made in turns."""
    policy = ScriptedPolicy(1)
    site = start(nodes=2, policy=policy)
    futures = make_app().sweep(lr=[0.001 * (n + 1) for n in range(6)], begin=[1.0] * 6, epochs=[5000] * 6)
    site.until(lambda run: sum(t.progress.get("step", 0) > 20 for t in run.trainings.values()) == len(futures))
    policy.nodes = 2
    site.until(lambda _: len(absences(site)) >= 2)
    for (_, back), (left, _) in pairwise(absences(site)):
        assert left >= back
