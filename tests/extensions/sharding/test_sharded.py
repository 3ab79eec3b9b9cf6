"""A sharded state is saved by all members together, and can be loaded by any number of members."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sharded_crew import (
    ShardedCrew,
    model,
    save_while_another_takes_over,
    train,
    train_on_full_disk,
    train_on_while_saving,
)

from freetrain_parsl.errors import DamagedCheckpoint, StateLost
from freetrain_parsl.extensions.sharding.state import fill, is_sharded, read_index, split
from freetrain_parsl.protocol.options import Code, SessionOptions
from freetrain_parsl.storage.posix import CheckpointDirectory
from freetrain_parsl.training.checkpoints.loading import Restoration
from freetrain_parsl.training.checkpoints.manager import CheckpointManager
from freetrain_parsl.training.group.process_group import Group

if TYPE_CHECKING:
    from collections.abc import Iterator

    from freetrain_parsl.training.checkpoints.format import Restored

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sharded_crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShardedCrew]:
    crew = ShardedCrew(4, tmp_path_factory.mktemp("stores"))
    yield crew
    crew.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the parameters after nine steps on one process, not sharded."""
    return train(tmp_path_factory.mktemp("undisturbed"), Group(), until=9, shard=False)["parameters"]


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(float((torch.tensor(one[name]) - torch.tensor(other[name])).abs().max()) for name in other)


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


@pytest.mark.smoke
def test_any_number_of_members_goes_on_from_any_number(
    tmp_path: Path, sharded_crew: ShardedCrew, undisturbed: dict[str, Any]
) -> None:
    """2 -> 4 -> 3 members with Adam, a scheduler and a buffer end with the parameters of the undisturbed run."""
    for size, until in ((2, 3), (4, 6), (3, 9)):
        ends = sharded_crew.run(size, tmp_path, until=until, shard=True)
        assert [end["sharded"] for end in ends] == [True] * size
        assert {end["newest"] for end in ends} == {str(tmp_path / "net" / f"step-000000000{until}")}
    assert all(difference(end["parameters"], undisturbed) < 1e-5 for end in ends)


def test_a_sharded_checkpoint_goes_on_whole_and_the_other_way_round(
    tmp_path: Path, sharded_crew: ShardedCrew, undisturbed: dict[str, Any]
) -> None:
    """A single process needs no sharding; its checkpoint can be sharded again."""
    sharded_crew.run(2, tmp_path, until=3, shard=True)
    assert not train(tmp_path, Group(), until=6, shard=False)["sharded"]
    ends = sharded_crew.run(3, tmp_path, until=9, shard=True)
    assert all(difference(end["parameters"], undisturbed) < 1e-5 for end in ends)


def test_every_file_is_in_the_manifest_and_a_damaged_shard_is_refused(
    tmp_path: Path, sharded_crew: ShardedCrew, caplog: pytest.LogCaptureFixture
) -> None:
    sharded_crew.run(2, tmp_path, until=1, shard=True)
    sharded_crew.run(2, tmp_path, until=2, shard=True)
    directory = CheckpointDirectory(tmp_path, "net")
    newest, before = directory.entries()
    manifest = json.loads((newest.path / "manifest.json").read_text())
    files = {str(path.relative_to(newest.path)) for path in newest.path.rglob("*") if path.is_file()}
    assert manifest["files"].keys() == files - {"manifest.json"}
    assert (manifest["world_size"], manifest["code"]) == (2, Code("tests:train", {"tests.train": "1"}).identity)
    damage(newest.path / "shards" / "__1_0.distcp")
    with pytest.raises(DamagedCheckpoint, match="__1_0"):
        newest.verify()
    train(tmp_path, Group(), until=1, shard=False)
    assert f"damaged checkpoint {newest.path}" in caplog.text
    assert before.path.exists()


def test_a_checkpoint_that_is_damaged_after_its_verification_is_left_for_the_one_before(
    tmp_path: Path, sharded_crew: ShardedCrew
) -> None:
    """The parts are read when the objects are prepared: by then a disk may have failed."""
    for until in (1, 2):
        sharded_crew.run(2, tmp_path, until=until, shard=True)
    (newest, before) = CheckpointDirectory(tmp_path, "net").entries()
    code = Code("tests:train", {"tests.train": "1"})

    def restore() -> Restored:
        restored = CheckpointManager(SessionOptions("net", tmp_path, code=code), Group).restore()
        assert restored is not None
        return restored

    found = restore()
    assert found.entry == newest
    (newest.path / "shards" / "__1_0.distcp").unlink()
    objects = {"model": model()}
    with pytest.raises(StateLost, match="it was intact when the training job started"):
        Restoration(found).load(objects, objects)
    assert restore().entry == before


def test_a_full_disk_of_one_member_is_one_error_on_all(tmp_path: Path, sharded_crew: ShardedCrew) -> None:
    """No member assumes that there is a checkpoint, and no partial files remain."""
    sharded_crew.run(2, tmp_path, until=1, shard=True)
    ends = sharded_crew.run(2, tmp_path, train_on_full_disk, full_rank=1, until=2, shard=True)
    for end in ends:
        assert end.startswith(f"StorageUnavailable: cannot write a checkpoint in {tmp_path / 'net'}")
        assert end.endswith("(process 1 of 2): No space left on device")
        assert "\n" not in end
    directory = CheckpointDirectory(tmp_path, "net")
    assert [entry.step for entry in directory.entries()] == [1]
    directory.open()
    assert sharded_crew.run(2, tmp_path, until=2, shard=True)[0]["newest"].endswith("step-0000000002")


def test_a_sharded_state_is_written_while_the_training_goes_on(tmp_path: Path, sharded_crew: ShardedCrew) -> None:
    """The saved state is that at the time of the save; another save meanwhile is skipped."""
    for end in sharded_crew.run(2, tmp_path, train_on_while_saving):
        assert (end["ready"], end["newest"], end["entries"], end["last"]) == (False, 1, ["step-0000000001"], 2)
    entry = CheckpointDirectory(tmp_path, "net").entry(1)
    state, _ = entry.verify()
    net = model()
    net.load_state_dict(fill(torch.load(state, weights_only=True)["objects"]["model"], net, entry.path))
    assert {name: value.tolist() for name, value in net.state_dict().items()} == end["saved"]


def test_a_writer_that_was_fenced_off_while_it_saved_does_not_come_back(
    tmp_path: Path, sharded_crew: ShardedCrew
) -> None:
    """It would publish its state after that of its successor, and remove checkpoints that this one reads."""
    first, second = sharded_crew.run(2, tmp_path, save_while_another_takes_over)
    assert first["other_writes"]
    assert first["entries"] == second["entries"] == ["step-0000000001"]
    assert len(first["errors"]) == 2
    assert "another process has taken over (generation 99" in first["errors"][0]


def test_a_background_write_that_fails_on_one_member_has_failed_on_all(
    tmp_path: Path, sharded_crew: ShardedCrew
) -> None:
    """The members continue, partial files do not count, and the same state can be saved again."""
    for end in sharded_crew.run(2, tmp_path, train_on_while_saving, full_rank=1):
        assert (end["newest"], end["entries"], end["last"]) == (None, [], 2)
    names = {path.name for path in (tmp_path / "net").iterdir()}
    assert names == {"step-0000000002", "latest", "writer"}


# ── without a group ───────────────────────────────────────────────────────────────────────────────


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("true",)


@pytest.mark.parametrize("content", [Evil(), {"state": Evil()}, {"not": "an index"}, Path("/")])
def test_an_index_that_is_anything_else_is_refused_and_not_run(
    tmp_path: Path, content: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
    monkeypatch.setattr(os, "system", lambda _: pytest.fail("code from a checkpoint has run"))
    with pytest.raises(DamagedCheckpoint, match=r"shards/\.metadata"):
        read_index(tmp_path)


def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    index = Metadata({}, storage_data={MetadataIndex("w"): _StorageInfo("../../secret", 0, 1)})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(DamagedCheckpoint, match=r"refers to \.\./\.\./secret"):
        read_index(tmp_path)


def test_an_ordinary_state_is_not_sharded_and_passes_unchanged(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    assert not is_sharded({"model": net, "optimizer": optimizer})
    state = net.state_dict()
    plain, shards = split(state)
    assert shards == {}
    assert list(plain) == list(state)
    assert fill(state, net, tmp_path) is state
