"""Which checkpoint a training job resumes from, and which it refuses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from freetrain_parsl.errors import CheckpointMismatch, CodeChanged, StorageUnavailable
from freetrain_parsl.protocol.options import Code, SessionOptions
from freetrain_parsl.storage.entry import sign_manifest
from freetrain_parsl.storage.root import check_writable, identify_root
from freetrain_parsl.training.checkpoints.manager import CheckpointManager
from freetrain_parsl.training.group.process_group import Group

if TYPE_CHECKING:
    from pathlib import Path

    from controlled_manager import ControlledManager


OLD = Code("app:train", {"app.train": "1", "app.LR": "1"})
NEW = Code("app:train", {"app.train": "1", "app.LR": "2", "app.augment": "3"})


def restored(tmp_path: Path, code: Code | None, **options: Any) -> tuple[CheckpointManager, int | None]:
    """Resume, with this code, from a checkpoint of step 5 of the old code."""
    before = CheckpointManager(SessionOptions("net", tmp_path, code=OLD), Group)
    before.restore()
    before.save(lambda: {"objects": {}}, step=5, epoch=0, reason="test", wait=True)
    before.close()
    after = CheckpointManager(SessionOptions("net", tmp_path, code=code, **options), Group)
    try:
        found = after.restore()
    finally:
        after.close()
    return after, None if found is None else found.entry.step


def test_manifests_tell_where_a_checkpoint_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_manager = CheckpointManager(SessionOptions("net", tmp_path, code=OLD), lambda: Group(0, 1, 7))
    checkpoint_manager.restore()
    checkpoint_manager.save(lambda: {"objects": {}}, step=3, epoch=1, reason="test", wait=False)
    checkpoint_manager.close()
    manifest = json.loads((checkpoint_manager.newest.path / "manifest.json").read_text())
    told = {
        name: manifest[name]
        for name in ("format", "trainer", "step", "epoch", "reason", "world_size", "generation", "code")
    }
    assert told == {
        "format": 3, "trainer": "net", "step": 3, "epoch": 1, "reason": "test", "world_size": 1, "generation": 7,
        "code": OLD.identity,
    }  # fmt: skip
    assert manifest["torch"] == torch.__version__
    assert manifest["bytes"] == sum(file["bytes"] for file in manifest["files"].values())
    assert {"freetrain", "python", "written", "write_seconds", "blocked_seconds"} <= manifest.keys()


@pytest.mark.parametrize("code", [OLD, None])
def test_a_checkpoint_of_the_same_code_is_gone_on_from_without_a_word(tmp_path: Path, code: Code | None) -> None:
    checkpoint_manager, step = restored(tmp_path, code)
    assert (step, checkpoint_manager.code_note) == (5, "")


def test_a_checkpoint_of_other_code_is_refused_and_the_message_tells_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(
        CodeChanged, match=r"changed: app\.LR, app\.augment\); undo the change, resume .*'resume'"
    ) as caught:
        restored(tmp_path, NEW)
    assert "\n" not in str(caught.value)
    assert "training job 'net'" in str(caught.value)
    assert "on_code_change='restart'" in str(caught.value)


def test_a_checkpoint_of_other_code_is_gone_on_from_if_that_was_asked_for(tmp_path: Path) -> None:
    checkpoint_manager, step = restored(tmp_path, NEW, on_code_change="resume")
    assert step == 5
    assert "was written by other code (changed: app.LR, app.augment); resuming from it" in checkpoint_manager.code_note


def test_a_restart_sets_the_checkpoints_of_other_code_aside(tmp_path: Path) -> None:
    checkpoint_manager, step = restored(tmp_path, NEW, on_code_change="restart")
    assert step is None
    aside = tmp_path / "net" / "set-aside-1"
    assert str(aside) in checkpoint_manager.code_note
    assert [path.name for path in aside.iterdir()] == ["step-0000000005"]
    again = CheckpointManager(SessionOptions("net", tmp_path, code=NEW, on_code_change="restart"), Group)
    assert again.restore() is None
    again.save(lambda: {"objects": {}}, step=1, epoch=0, reason="test", wait=True)
    again.close()
    later = CheckpointManager(SessionOptions("net", tmp_path, code=NEW, on_code_change="restart"), Group)
    assert later.restore().entry.step == 1, "it resumes from the checkpoint of the new code"
    later.close()


def test_code_of_another_python_cannot_be_compared_and_that_is_said(tmp_path: Path) -> None:
    checkpoint_manager, step = restored(tmp_path, Code("app:train", {"app.train": "9"}, "3.99"))
    assert step == 5
    assert "cannot determine whether the code has changed since" in checkpoint_manager.code_note


def test_a_call_of_edited_code_begins_anew_and_says_how_to_go_on(tmp_path: Path) -> None:
    before = CheckpointManager(SessionOptions("train-0000-aaaa", tmp_path, code=OLD, call="train-0000"), Group)
    before.restore()
    before.save(lambda: {"objects": {}}, step=5, epoch=0, reason="test", wait=True)
    before.close()
    after = CheckpointManager(SessionOptions("train-0000-bbbb", tmp_path, code=NEW, call="train-0000"), Group)
    assert after.restore() is None
    after.close()
    assert "its code has changed since train-0000-aaaa, which has a checkpoint of step 5" in after.code_note
    assert "options(name='train-0000-aaaa', on_code_change='resume')" in after.code_note


def test_another_format_is_refused_by_name(controlled: ControlledManager) -> None:
    controlled.save(1, wait=True)
    path = controlled.manager.newest.path / "manifest.json"
    manifest = controlled.manager.newest.manifest()
    path.write_text(sign_manifest({**manifest, "format": 4, "freetrain": "0.9"}))
    with pytest.raises(CheckpointMismatch, match=r"format 4, this version reads 3; resume with .*\(freetrain 0\.9\)"):
        controlled.manager.restore()


def test_a_flip_in_the_format_falls_back_to_the_checkpoint_before(controlled: ControlledManager) -> None:
    controlled.save(1, wait=True)
    controlled.save(2, wait=True)
    path = controlled.manager.newest.path / "manifest.json"
    path.write_text(path.read_text().replace('"format": 3', '"format": 2'))
    restored = controlled.manager.restore()
    assert restored is not None
    assert (restored.entry.step, restored.refused) == (1, (str(path.parent),))


def test_a_mount_that_is_missing_is_not_written_beneath(tmp_path: Path) -> None:
    """Nor is it taken for a training job without checkpoints, which would start over."""
    root = tmp_path / "root"
    check_writable(root)
    checkpoint_manager = CheckpointManager(SessionOptions("net", root, root_identity=identify_root(root)), Group)
    checkpoint_manager.restore()
    checkpoint_manager.save(lambda: {"objects": {}}, step=1, epoch=0, reason="test", wait=True)
    checkpoint_manager.close()
    root.rename(tmp_path / "unmounted")
    root.mkdir()
    with pytest.raises(StorageUnavailable, match=r"cannot use the checkpoint directory"):
        checkpoint_manager.restore()
    assert list(root.iterdir()) == []
    root.rmdir()
    (tmp_path / "unmounted").rename(root)
    assert checkpoint_manager.restore().entry.step == 1
    checkpoint_manager.close()
