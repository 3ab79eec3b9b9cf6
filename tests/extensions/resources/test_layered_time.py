"""Seconds of a step equal a simulation of all workers, servers and transfers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.errors import InvalidApp
from freetrain_parsl.extensions.resources.instances import LayeredTraining


def simulated_seconds(training, workers, servers):
    """Simulate a step event by event, with a transfer from each worker to each server per layer.

    Concurrent transfers share a worker's network and a server's network equally. A worker sends the gradients of one
    layer at a time and then requests the parameters of one layer at a time, as soon as the servers have all gradients.
    """
    layers = len(training.sizes)
    share = training.batch / workers
    # What each worker does next: passes to compute, layers to push, layers to pull.
    backward = [
        [(layer, training.backward[layer] * share) for layer in reversed(range(layers))] for _ in range(workers)
    ]
    forward = [[(layer, training.forward[layer] * share) for layer in range(layers)] for _ in range(workers)]
    ready_to_push = [[] for _ in range(workers)]
    pushed = [[] for _ in range(workers)]
    pulled = [[] for _ in range(workers)]
    flows = {}  # (worker, server) -> megabytes left of the layer in transfer
    now = 0.0
    while any(forward):
        for worker in range(workers):
            transferring = any(key[0] == worker for key in flows)
            if not transferring and ready_to_push[worker]:
                layer = ready_to_push[worker][0]
                flows.update({(worker, server): training.sizes[layer] / servers for server in range(servers)})
            elif not transferring and all(len(done) == layers for done in pushed) and len(pulled[worker]) < layers:
                layer = len(pulled[worker])
                flows.update({(worker, server): training.sizes[layer] / servers for server in range(servers)})
        of_worker = {worker: sum(key[0] == worker for key in flows) for worker in range(workers)}
        of_server = {server: sum(key[1] == server for key in flows) for server in range(servers)}
        rates = {
            (w, s): min(training.worker_rate / of_worker[w], training.server_rate / of_server[s]) for w, s in flows
        }
        computing = [
            backward[worker] or (forward[worker] if forward[worker] and forward[worker][0][0] in pulled[worker] else [])
            for worker in range(workers)
        ]
        lasts = [left / rates[key] for key, left in flows.items()] + [todo[0][1] for todo in computing if todo]
        step = min(lasts)
        now += step
        flows = {key: left - step * rates[key] for key, left in flows.items()}
        for worker, todo in enumerate(computing):
            if not todo:
                continue
            layer, left = todo[0]
            todo[0] = (layer, left - step)
            if left - step <= 1e-12:
                del todo[0]
                if todo is backward[worker]:
                    ready_to_push[worker].append(layer)
        finished = {key for key, left in flows.items() if left <= 1e-9}
        before = {key[0] for key in flows}
        flows = {key: left for key, left in flows.items() if key not in finished}
        for worker in before - {key[0] for key in flows}:
            if ready_to_push[worker]:
                pushed[worker].append(ready_to_push[worker].pop(0))
            else:
                pulled[worker].append(len(pulled[worker]))
    return now


durations = st.floats(0.001, 0.1)


@st.composite
def trainings(draw):
    layers = draw(st.integers(1, 5))
    per_layer = {
        name: tuple(draw(st.lists(values, min_size=layers, max_size=layers)))
        for name, values in (("forward", durations), ("backward", durations), ("sizes", st.floats(0.1, 100.0)))
    }
    rates = {name: draw(st.floats(10.0, 1000.0)) for name in ("worker_rate", "server_rate")}
    return LayeredTraining(**per_layer, batch=draw(st.integers(1, 64)), **rates)


def seconds(training, workers, servers):
    return float(training.step_seconds(np.array([workers]), np.array([servers]))[0])


@given(trainings(), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_a_step_takes_as_long_as_in_the_simulation(training, workers, servers):
    assert seconds(training, workers, servers) == pytest.approx(simulated_seconds(training, workers, servers), rel=1e-6)


def test_one_layer_has_no_overlap():
    training = LayeredTraining((0.1,), (0.2,), (50.0,), batch=10, worker_rate=1000.0, server_rate=100.0)
    assert seconds(training, 2, 1) == pytest.approx(5 * 0.2 + 50 / 50 + 50 / 50 + 5 * 0.1)


def test_transfers_hide_behind_computation_and_computation_behind_transfers():
    """Backward 1 s a layer: only the first layer's push shows. Then the first pull, and 1 s a layer forward."""
    slow = LayeredTraining((1.0,) * 3, (1.0,) * 3, (10.0,) * 3, batch=1, worker_rate=100.0, server_rate=100.0)
    assert seconds(slow, 1, 1) == pytest.approx(3 + 0.1 + 0.1 + 3)
    fast = LayeredTraining((0.001,) * 3, (0.001,) * 3, (10.0,) * 3, batch=1, worker_rate=100.0, server_rate=100.0)
    assert seconds(fast, 1, 1) == pytest.approx(0.001 + 3 * 0.1 + 3 * 0.1 + 0.001)


def test_servers_help_up_to_the_workers_own_network():
    training = LayeredTraining((0.001,), (0.001,), (10.0,), batch=1, worker_rate=300.0, server_rate=100.0)
    one, three, forty = (seconds(training, 1, servers) for servers in (1, 3, 40))
    assert one > three == forty


@given(trainings(), st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_more_servers_are_never_slower(training, workers):
    servers = np.arange(1, 41)
    assert np.all(np.diff(training.step_seconds(np.full(40, workers), servers)) <= 1e-12)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"forward": ()}, "one value for each layer, got 0, 1 and 1"),
        ({"sizes": (1.0, 2.0)}, "one value for each layer, got 1, 1 and 2"),
        ({"backward": (-1.0,)}, "backward must be zero or more"),
        ({"forward": (math.nan,)}, "forward must be zero or more"),
        ({"batch": 0}, "batch must be positive"),
        ({"server_rate": math.inf}, "server_rate must be positive"),
    ],
)
def test_impossible_layers_are_refused(change, problem):
    good = {"forward": (1.0,), "backward": (1.0,), "sizes": (1.0,), "batch": 1, "worker_rate": 1.0, "server_rate": 1.0}
    with pytest.raises(InvalidApp, match=problem):
        LayeredTraining(**{**good, **change})
