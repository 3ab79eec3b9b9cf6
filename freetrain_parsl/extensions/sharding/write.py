"""A checkpoint of a sharded state: planned by all members together, written separately, published by the first.

Members communicate to plan and once all have written, at boundaries and in their main threads; the writing itself runs
in the background without communication. `torch.distributed.checkpoint` is used for each of these steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.extensions.sharding.state import INDEX
from freetrain_parsl.storage.atomic_files import sync_directory
from freetrain_parsl.storage.entry import SHARDS, checksum
from freetrain_parsl.storage.problems import storage_error

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    import torch
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.distributed.tensor import DTensor

    from freetrain_parsl.training.group.process_group import Group

_PRIVATE, _PRIVATE_FOLDER = 0o600, 0o700


@dataclass(frozen=True)
class Part:
    """The result of one member's write.

    Parameters
    ----------
    problem
        The error; ``None`` if the write succeeded.
    files
        Path in the checkpoint -> ``bytes`` and ``sha256``.
    results
        Write results for the index.
    """

    problem: OSError | None = None
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    results: list[WriteResult] = field(default_factory=list)


class JointWrite:
    """The sharded tensors of one checkpoint; all members construct this together.

    Parameters
    ----------
    path
        Directory of the checkpoint, the same on all members.
    shards
        Name -> tensor.
    local
        Name -> this member's part of the tensor, which must not change until `write` has returned.
    group
        The members.
    where
        Directory to name in errors.

    Raises
    ------
    CheckpointError
        The file system operation failed on one member; raised on all members.
    PeerFailed
        A member has failed.
    """

    def __init__(
        self, path: Path, shards: dict[str, DTensor], local: Mapping[str, torch.Tensor], group: Group, where: Path
    ) -> None:
        self._folder = path / SHARDS
        self._group = group
        self._where = where
        self._planner, self._writer = _torch_writes(self._folder, local)
        self._planner.set_up_planner(shards, is_coordinator=group.is_first)
        self._writer.set_up_storage_writer(group.is_first)
        problem: OSError | None = None
        plan = None
        try:
            plan = self._writer.prepare_local_plan(self._planner.create_local_plan())
        except OSError as error:
            problem = error
        gathered = group.gather_objects((problem, plan))
        self._raise_first([problem for problem, _ in gathered])
        # Each member computes all plans from all members' data and takes its own: no plans are sent.
        plans, self._metadata = self._planner.create_global_plan([plan for _, plan in gathered])
        self._plan = self._planner.finish_plan(self._writer.prepare_global_plan(plans)[group.rank])

    def write(self) -> Part:
        """Write this member's part durably; in any thread."""
        try:
            results = self._writer.write_data(self._plan, self._planner).wait()
            mine = list(self._folder.glob(f"__{self._group.rank}_*"))
            for file in mine:
                file.chmod(_PRIVATE)  # torch uses the umask
            return Part(files={f"{SHARDS}/{file.name}": checksum(file) for file in mine}, results=results)
        except OSError as error:
            return Part(error)

    def collect(self, part: Part) -> list[Part]:
        """Exchange the results of all members.

        Raises
        ------
        CheckpointError
            A write failed on one member; raised on all members.
        PeerFailed
            A member has failed.
        """
        parts = self._group.gather_objects(part)
        self._raise_first([part.problem for part in parts])
        return parts

    def finish(self, parts: list[Part]) -> dict[str, dict[str, Any]]:
        """Write the index durably, on the first member; in any thread.

        Returns
        -------
        files
            All files of the folder: path in the checkpoint -> ``bytes`` and ``sha256``.

        Raises
        ------
        CheckpointError
            The file system operation failed.
        """
        try:
            self._writer.finish(self._metadata, [part.results for part in parts])
            (self._folder / INDEX).chmod(_PRIVATE)
            self._folder.chmod(_PRIVATE_FOLDER)
            sync_directory(self._folder)
            files = {f"{SHARDS}/{INDEX}": checksum(self._folder / INDEX)}
        except OSError as error:
            raise storage_error(f"cannot write a checkpoint in {self._where}", self._where.parent, error) from error
        return {name: facts for part in parts for name, facts in part.files.items()} | files

    def _raise_first(self, problems: list[OSError | None]) -> None:
        for rank, problem in enumerate(problems):
            if problem is not None:
                attempt = f"cannot write a checkpoint in {self._where} (process {rank} of {self._group.size})"
                raise storage_error(attempt, self._where.parent, problem) from problem


def _torch_writes(folder: Path, local: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
    """Return torch's planner and writer."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
    from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta

    class Files(FileSystem):
        """Makes no parents: a writer that was fenced off would get the directory back that is missing for this."""

        def mkdir(self, path: str | os.PathLike[str]) -> None:
            Path(path).mkdir(exist_ok=True)

    class Planner(DefaultSavePlanner):
        """Takes the tensors from `local`: those of the state continue to change."""

        def lookup_object(self, index: MetadataIndex) -> Any:
            return local[index.fqn]

    class Writer(FileSystemWriter):
        """Omits the path, which changes, from the index."""

        def storage_meta(self) -> StorageMeta:
            return StorageMeta()

    writer = Writer(folder)
    writer.fs = Files()
    return Planner(), writer
