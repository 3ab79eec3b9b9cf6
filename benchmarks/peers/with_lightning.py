"""Lightning: preemptible jobs of one node that save and are requeued on a signal.

As in https://lightning.ai/docs/pytorch/stable/clouds/cluster_advanced.html. The loader is stateful, as Lightning asks
for where a checkpoint is inside an epoch: https://meta-pytorch.org/data/main/torchdata.stateful_dataloader.html
"""

import signal
import subprocess
import sys
from pathlib import Path

import lightning
import torch
from _peers_ways import Request, main
from _peers_workload import BATCH, Job, Numbered, Record, model_of, pretend
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch.nn.functional import cross_entropy
from torchdata.stateful_dataloader import StatefulDataLoader


class Module(lightning.LightningModule):
    def __init__(self, job: Job, record: Record) -> None:
        super().__init__()
        self.job, self.record, self.saved = job, record, False
        self.model = model_of(job)

    def training_step(self, batch, number):
        x, y, self.numbers = batch
        pretend(len(x))
        return cross_entropy(self.model(x), y)

    def on_save_checkpoint(self, _):
        self.saved = True

    def on_train_batch_end(self, *_):
        if not self.saved:  # in this batch: it ends, but its step is not in the checkpoint
            self.record.trained(self.current_epoch, self.numbers)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.job.lr, momentum=0.9)


def train(job: Job, directory: str) -> None:
    record = Record(directory, job)
    module = Module(job, record)
    home = Path(directory, job.name)
    trainer = lightning.Trainer(
        max_epochs=job.epochs,
        accelerator="cpu",
        devices=1,
        default_root_dir=home,
        plugins=[SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR1)],
        enable_checkpointing=False,  # but for the one at the signal
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, StatefulDataLoader(Numbered(job.kind), batch_size=BATCH, shuffle=True))
    record.finished(module.model)


def submit(request: Request) -> None:
    for number, _ in enumerate(request.jobs):
        script = f"""#!/bin/bash
#SBATCH --partition={request.partition} --requeue --nodes=1 --ntasks-per-node=1 --exclusive --open-mode=append
#SBATCH --time={request.minutes} --output={number}.out --signal=SIGUSR1@15
srun {sys.executable} {__file__} --train {number} {request.file}
code=$?; [ $code != 138 ] || scontrol requeue $SLURM_JOB_ID; exit $code  # signalled before Lightning handles it
"""
        subprocess.run(["sbatch"], input=script, text=True, check=True)


if __name__ == "__main__":
    main(submit, train)
