"""FreeTrain: a campaign, with the site file that ``freetrain init`` writes."""

import os
import subprocess
import sys
from pathlib import Path

import torch
import yaml
from _peers_ways import Request, main
from _peers_workload import BATCH, Job, Numbered, Record, model_of, pretend
from torch.nn.functional import cross_entropy

from freetrain_parsl import training_app

FASTER = 6  # the queue is compressed: holes of minutes are holes of seconds, and so are the times in the site file


@training_app(max_nodes=4)
def train(session, *, job, directory):
    job = Job(**job)
    record = Record(directory, job)
    model, _ = session.prepare(model_of(job), torch.optim.SGD, lr=job.lr, momentum=0.9)
    data = session.loader(Numbered(job.kind), batch_size=BATCH)
    for epoch in session.epochs(job.epochs):
        for x, y, numbers in data:
            pretend(len(x))
            session.step(cross_entropy(model(x), y))
            record.trained(epoch, numbers)
    if session.rank == 0:
        record.finished(model)


def submit(request: Request) -> None:
    freetrain = f"{os.path.dirname(sys.executable)}/freetrain"
    subprocess.run([freetrain, "init", "site.yaml", "--partition", request.partition], check=True)
    site = yaml.safe_load(Path("site.yaml").read_text())
    minutes = {"s": 1 / 60, "min": 1.0}
    for name, value in site["planner"].items():
        number, unit = value.split()
        site["planner"][name] = f"{float(number) * minutes[unit] * 60 / FASTER:g} s"
    site["rate_limits"] |= {"poll_interval": "10 s"}
    Path("site.yaml").write_text(yaml.safe_dump(site))
    trainings = [
        {
            "app": f"{__file__}:train",
            "name": job.name,
            "arguments": {"job": vars(job), "directory": request.directory},
        }
        for job in request.jobs
    ]
    Path("campaign.yaml").write_text(yaml.safe_dump({"name": "peers", "trainings": trainings}))
    os.execv(freetrain, [freetrain, "run", "campaign.yaml", "--config", "site.yaml"])


if __name__ == "__main__":
    main(submit)
