"""What fusion is compared with: arrays written by hand, and processes that share a device."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from _at_once import at_once
from _fusion_nets import losses, models, samples
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

HAND_GROUPED = ("mlp", "cnn")


class Grouped(nn.Module):
    """The MLP or the CNN for several members, written with batched products and grouped convolutions."""

    def __init__(self, net: str, members: int) -> None:
        super().__init__()
        self.members = members
        nets = [models(net)[0].layers for _ in range(members)]
        self.layers = nets[0]
        self.stacks = nn.ParameterList(
            torch.stack([parameter.detach() for parameter in parameters])
            for parameters in zip(*(net.parameters() for net in nets), strict=True)
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the sum of the members' mean losses."""
        stacks = iter(self.stacks)
        images = x.dim() > 2
        samples_, inputs = len(x), x
        rows = None if images else x.expand(self.members, *x.shape)
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                if rows is None:
                    rows = inputs.view(samples_, self.members, -1).transpose(0, 1)
                weight, bias = next(stacks), next(stacks)
                rows = torch.baddbmm(bias.unsqueeze(1), rows, weight.transpose(1, 2))
            elif isinstance(layer, nn.Conv2d):
                weight, bias = next(stacks).flatten(0, 1), next(stacks).flatten()
                groups = inputs.shape[1] // weight.shape[1]
                inputs = functional.conv2d(inputs, weight, bias, padding=1, groups=groups)
            elif isinstance(layer, nn.BatchNorm2d):
                weight, bias = next(stacks).flatten(), next(stacks).flatten()
                mean, variance = torch.zeros_like(bias), torch.ones_like(bias)
                inputs = functional.batch_norm(inputs, mean, variance, weight, bias, training=True)
            elif rows is not None:
                rows = layer(rows)
            else:
                inputs = layer(inputs)
        assert rows is not None, "the last layer is linear"
        labels = y.expand(self.members, -1).flatten()
        return functional.cross_entropy(rows.flatten(0, 1), labels, reduction="sum") / samples_


def hand_grouped(net: str, data: Any, batch: int, members: int, steps: int, lap: Callable[[], None]) -> None:
    """Train members as one model, with one optimizer for all, on batches that are there; call `lap` in each step."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    grouped = Grouped(net, members).to(device)
    optimizer = torch.optim.Adam(grouped.stacks.parameters(), lr=1e-3, fused=True)
    inputs, labels = (tensor.to(device) for tensor in data.tensors)
    for step in range(steps):
        lap()
        begin = step * batch % (len(inputs) - batch + 1)
        grouped(inputs[begin : begin + batch], labels[begin : begin + batch]).backward()
        optimizer.step()
        optimizer.zero_grad()


def plain(net: str, data: Any, batch: int, steps: int, lap: Callable[[], None]) -> None:
    """Train in a PyTorch loop, on batches that are there; call `lap` in each step."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parts = [model.to(device) for model in models(net)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3, fused=True) for model in parts]
    inputs, labels = (tensor.to(device) for tensor in data.tensors)
    for step in range(steps):
        lap()
        begin = step * batch % (len(inputs) - batch + 1)
        for loss, number in losses(parts, inputs[begin : begin + batch], labels[begin : begin + batch]):
            loss.backward()
            optimizers[number].step()
            for optimizer in optimizers:
                optimizer.zero_grad()


def co_located(net: str, batch: int, members: int, steps: int) -> float:
    """Return the seconds of a step of all members, each in a process of its own on the same device."""
    return max(at_once(members, _one_of, net, batch, steps))


def _one_of(net: str, batch: int, steps: int, ready: Any, times: Any) -> None:
    torch.set_num_threads(1)
    skipped, laps = 3, []

    def lap() -> None:
        if len(laps) == skipped:
            ready.wait()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        laps.append(time.perf_counter())

    plain(net, samples(net), batch, steps + skipped + 1, lap)
    times.put((laps[-1] - laps[skipped]) / steps)
