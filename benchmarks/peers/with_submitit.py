"""submitit: preemptible jobs of one node that save and are requeued, by a ``checkpoint`` method.

As in its documentation: https://github.com/facebookincubator/submitit/blob/main/docs/checkpointing.md
"""

import time
from pathlib import Path

import submitit
import torch
from _peers_ways import Request, main
from _peers_workload import BATCH, Job, Numbered, Record, model_of, pretend
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

REQUEUE = "[ $code != 140 ] || scontrol requeue ${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"  # it ended by the signal
SAVE_SECONDS = 20.0  # a preemption may come without a signal


class Training:
    def __init__(self, job: Job, directory: str) -> None:
        self.job, self.directory = job, directory
        self.state = None

    def __call__(self) -> None:
        job, path = self.job, Path(self.directory, f"{self.job.name}.pt")
        record = Record(self.directory, job)
        model = model_of(job)
        optimizer = torch.optim.SGD(model.parameters(), lr=job.lr, momentum=0.9)
        start, begun = 0, 0
        if path.exists():
            saved = torch.load(path, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            start, begun = saved["epoch"], saved["batch"]
        last_save = time.monotonic()
        for epoch in range(start, job.epochs):
            generator = torch.Generator().manual_seed(epoch)
            data = DataLoader(Numbered(job.kind), batch_size=BATCH, shuffle=True, generator=generator)
            for batch, (x, y, numbers) in enumerate(data):
                if epoch == start and batch < begun:
                    continue
                pretend(len(x))
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
                record.trained(epoch, numbers)
                self.state = {
                    "model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "batch": batch + 1
                }  # fmt: skip
                if time.monotonic() - last_save > SAVE_SECONDS:
                    self.save()
                    last_save = time.monotonic()
        record.finished(model)

    def save(self) -> None:
        if self.state is not None:
            aside = Path(self.directory, f"{self.job.name}.new")
            torch.save(self.state, aside)
            aside.replace(aside.with_suffix(".pt"))

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        self.save()
        return submitit.helpers.DelayedSubmission(Training(self.job, self.directory))


def submit(request: Request) -> None:
    executor = submitit.SlurmExecutor("logs", max_num_timeout=1_000_000)
    executor.update_parameters(
        partition=request.partition,
        nodes=1,
        ntasks_per_node=1,
        exclusive=True,
        time=request.minutes,
        signal_delay_s=15,
        teardown=["code=$?", REQUEUE, "exit $code"],  # signalled before submitit handles it
        additional_parameters={"requeue": True},
    )
    with executor.batch():
        for job in request.jobs:
            executor.submit(Training(job, request.directory))


if __name__ == "__main__":
    main(submit)
