"""What a process uses, and how fast its training job is."""

from __future__ import annotations

import os

import pytest
import torch

from freetrain_parsl.training.helper_verbs import ResourceUsage


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_rates_are_means_since_the_last_measurement(clock):
    usage = ResourceUsage(torch.device("cpu"), 1000, clock)
    clock.now = 102.0
    values = usage.read(1500)
    assert values["samples_per_second"] == 250.0
    clock.now = 104.0
    assert usage.read(1600)["samples_per_second"] == 50.0


def test_it_measures_at_most_once_a_second(clock):
    usage = ResourceUsage(torch.device("cpu"), 0, clock)
    clock.now = 100.9
    assert usage.read(10) == {}
    clock.now = 101.0
    values = usage.read(10)
    clock.now = 101.5
    assert usage.read(500) == values


def test_processor_and_memory_are_those_of_this_process(clock):
    begin = os.times()
    usage = ResourceUsage(torch.device("cpu"), 0, clock)
    while (now := os.times()).user - begin.user < 0.2:  # processor time: other processes may have most of the cores
        pass
    clock.now = 101.0
    values = usage.read(0)
    assert values.keys() == {"samples_per_second", "cpu_percent", "memory_gib"}
    assert values["cpu_percent"] > 50 * 0.2 / (now.elapsed - begin.elapsed)
    assert 0.05 < values["memory_gib"] < 50


@pytest.mark.parametrize("has_nvml", [True, False])
def test_on_a_gpu_its_memory_and_use_are_added(clock, monkeypatch, has_nvml):
    """The GPU is a fake."""

    def utilization(_device):
        if not has_nvml:
            raise ModuleNotFoundError("pynvml")
        return 87

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (60 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    usage = ResourceUsage(torch.device("cuda"), 0, clock)
    clock.now = 101.0
    values = usage.read(0)
    assert values["gpu_memory_gib"] == 20.0
    assert values.get("gpu_percent") == (87.0 if has_nvml else None)
