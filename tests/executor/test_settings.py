"""Settings that the executor's constructor rejects, before anything is started."""

from __future__ import annotations

from datetime import timedelta

import pytest
from parsl.providers import LocalProvider

from freetrain_parsl import EmbeddedClusterProvider, FreeTrainExecutor
from freetrain_parsl.errors import CheckpointError, FreeTrainError, InvalidSettings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "best"}, "unknown policy 'best'"),
        ({"poll_interval": timedelta(0)}, "poll_interval must be positive"),
        ({"slots_per_node": 0}, "slots_per_node must be at least 1"),
        ({"submissions_per_minute": 0}, "submissions_per_minute must be at least 1"),
        ({"heartbeat_timeout": timedelta(0)}, "heartbeat_timeout must be positive"),
        ({"peer_timeout": timedelta(0)}, "peer_timeout must be positive"),
        ({"checkpoint_interval": timedelta(0)}, "checkpoint_interval must be positive"),
        ({"max_restarts": -1}, "max_restarts must be zero or more"),
    ],
)
def test_settings_out_of_range_are_refused_in_one_line(settings: dict, message: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        FreeTrainExecutor(provider=EmbeddedClusterProvider(), **settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_directory_that_cannot_be_written_is_refused_at_construction(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises((CheckpointError, InvalidSettings)) as caught:
        FreeTrainExecutor(provider=EmbeddedClusterProvider(), checkpoint_dir=tmp_path / "file")
    assert str(tmp_path / "file") in str(caught.value)


def test_a_provider_that_cannot_be_asked_for_windows_is_refused_by_name() -> None:
    with pytest.raises(FreeTrainError, match="cannot query LocalProvider for windows"):
        FreeTrainExecutor(provider=LocalProvider())


def test_the_representation_names_every_setting() -> None:
    executor = FreeTrainExecutor(label="holes", provider=EmbeddedClusterProvider(nodes=3))
    assert "label='holes'" in repr(executor)
    assert "nodes=3" in repr(executor)


def test_parsls_strategies_and_pollers_leave_it_alone() -> None:
    executor = FreeTrainExecutor(provider=EmbeddedClusterProvider())
    assert executor.status_polling_interval == 0
    assert executor.scale_out_facade(3) == []
    assert executor.scale_in_facade(3) == []
