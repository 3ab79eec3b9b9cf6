"""Campaigns through the real endpoint daemon, broker and SDK, and a stand-in of the web service."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from freetrain_parsl.campaign.lock import DriverState, driver_state
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.errors import RemoteError

pytestmark = pytest.mark.globus

CONFIGURATION = Path(__file__).parents[4] / "configs" / "globus-compute"
SECRET = "the-secret-of-the-client"
SITE = """\
system: local
block: {nodes: 1}
planner: {startup: 3 s, min_useful: 2 s, closing_margin: 1 s, max_walltime: 10 min, idle_timeout: 5 s, settle: 0.5 s}
rate_limits: {poll_interval: 0.5 s, submissions_per_minute: 120}
trainings: {threads_per_slot: 1, heartbeat_timeout: 30 s, rescale_costs: {up: 1 s, down: 1 s, start: 1 s}}
"""
CAMPAIGN = """\
name: one
trainings:
  - app: slowly_at_a_site.py:train
    checkpoint_interval: 2 s
    arguments: {epochs: 300, place: "${PLACE}"}
"""
APP = """\
import json
import os
import time
from pathlib import Path

import torch
from helper_at_a_site import WIDTH
from torch.utils.data import TensorDataset

from freetrain_parsl import training_app


@training_app
def train(session, *, epochs, place):
    Path(place, "environment.json").write_text(json.dumps(dict(os.environ)))
    model, _optimizer = session.prepare(torch.nn.Linear(WIDTH, 1), torch.optim.SGD, lr=0.01)
    data = session.loader(TensorDataset(torch.ones(32, WIDTH)), batch_size=8)
    for _epoch in session.epochs(epochs):
        for (batch,) in data:
            session.step(model(batch).square().mean())
            if not Path(place, "hurry").exists():
                time.sleep(0.25)
    return session.metrics
"""


@pytest.fixture(scope="module")
def stand(tmp_path_factory, globus_is_here):
    """Start broker, web service and endpoint; this process becomes a client of the service."""
    from tests.support.globus.compute_service import ComputeService
    from tests.support.globus.endpoint_daemon import EndpointDaemon
    from tests.support.globus.rabbitmq import LoopbackRabbit

    place = tmp_path_factory.mktemp("globus")
    for name in ("rabbit", "site", "home"):
        (place / name).mkdir()
    with (
        pytest.MonkeyPatch.context() as patch,
        LoopbackRabbit(place / "rabbit") as rabbit,
        ComputeService(rabbit.url) as service,
    ):
        for name, value in service.environment.items():
            patch.setenv(name, value)
        patch.setenv("GLOBUS_COMPUTE_USER_DIR", str(place / "home"))
        patch.setenv("XDG_STATE_HOME", str(place / "home"))
        extra = {"FREETRAIN_REMOTE_DIR": str(place / "runs"), "SITE_TOKEN": SECRET[::-1]}
        with EndpointDaemon(place / "site", service, CONFIGURATION, extra) as endpoint:
            yield rabbit, service, endpoint


def eventually(look, timeout: float = 120.0):
    end = time.monotonic() + timeout
    while not (value := look()):
        assert time.monotonic() < end
        time.sleep(0.2)
    return value


def test_a_campaign_goes_on_without_its_endpoint_and_is_stopped_and_resumed(stand, tmp_path):
    from freetrain_parsl.extensions.globus.remote.campaign import RemoteCampaign

    rabbit, service, endpoint = stand
    (tmp_path / "one.yaml").write_text(CAMPAIGN)
    (tmp_path / "slowly_at_a_site.py").write_text(APP)
    (tmp_path / "helper_at_a_site.py").write_text("WIDTH = 4\n")
    (tmp_path / "secrets.py").write_text("KEY = 1\n")
    dump = tmp_path / "environment.json"  # written by the training job
    (tmp_path / "small.yaml").write_text(SITE)
    campaign = RemoteCampaign.start(
        tmp_path / "one.yaml",
        endpoint=endpoint.id,
        site=str(tmp_path / "small.yaml"),
        settings={"place": str(tmp_path)},
    )

    # It starts: one function call, then a process of its own.
    status = campaign.status().result()
    assert status.state in ("starting", "running"), status.message
    store = RunStore(Path(status.directory) / "run")
    eventually(dump.exists)
    assert not (Path(status.directory) / "campaign" / "secrets.py").exists()
    assert "run directory" in campaign.logs().result()["text"]

    # Neither the driver nor the job has the endpoint's secrets.
    driver = store.last_driver()
    jobs = json.loads(dump.read_text())
    drivers = dict(item.split("=", 1) for item in Path(f"/proc/{driver.pid}/environ").read_text().split("\0") if item)
    for environment in (jobs, drivers):
        assert "PATH" in environment
        assert not any(name.startswith(("GLOBUS_", "GC_")) or "TOKEN" in name for name in environment)
        assert not any(SECRET in value or SECRET[::-1] in value for value in environment.values())

    # The endpoint stops; the driver continues, and a call says in one line what is wrong.
    endpoint.stop()
    with pytest.raises(RemoteError, match="is offline; start it at the site"):
        campaign.status().result()
    last = store.last_driver()
    assert eventually(lambda: store.last_driver().heartbeat > last.heartbeat)
    assert driver_state(store.last_driver()) is DriverState.ALIVE
    assert os.getsid(driver.pid) != os.getsid(0)

    # It comes back, with a cut connection to the broker; the run is stopped and resumed.
    endpoint.start()
    rabbit.cut_connections()
    assert campaign.stop().result().state in ("stopping", "stopped")
    assert campaign.wait(120.0).state == "stopped"
    (waiting,) = store.trainings()
    assert waiting.state == "waiting"
    again = campaign.resume().result()
    assert again.state in ("starting", "running", "finished"), again.message

    # All is done once, and nothing is left.
    (tmp_path / "hurry").touch()
    assert campaign.wait(180.0).state == "finished"
    (training,) = campaign.results().result()
    metrics = training["result"]
    assert (metrics["epochs"], metrics["samples"]) == (300, 300 * 32)
    assert campaign.clean(delete=True).result()["done"]
    assert not Path(status.directory).exists()
    assert service.count("POST", "/v3/functions") == 1


@pytest.mark.smoke
def test_a_driver_that_cannot_start_says_why_in_one_line(stand, tmp_path):
    from freetrain_parsl.extensions.globus.remote.campaign import RemoteCampaign

    _rabbit, _service, endpoint = stand
    (tmp_path / "two.yaml").write_text("trainings:\n  - app: another_at_a_site.py:train\n")
    (tmp_path / "another_at_a_site.py").write_text(
        "from freetrain_parsl import training_app\n\n@training_app\ndef train(session):\n    pass\n"
    )
    (tmp_path / "site.yaml").write_text("system: slurm\nblock: {partition: '${NO_SUCH_VARIABLE}'}\n")
    campaign = RemoteCampaign.start(tmp_path / "two.yaml", endpoint=endpoint.id, site=str(tmp_path / "site.yaml"))
    status = campaign.wait(60.0)
    assert status.state == "failed"
    assert "block.partition needs a value for ${NO_SUCH_VARIABLE}" in status.message
    assert campaign.clean(delete=True).result()["done"]


def test_the_shipped_template_is_valid_and_downloads_nothing(stand):
    _rabbit, _service, endpoint = stand
    rendered = endpoint.run_command("globus-compute-endpoint", "render-user-config", "-e", "freetrain")
    assert rendered.returncode == 0, rendered.stderr
    assert "idle_heartbeats_soft: 0" in rendered.stdout
    assert not any(word in rendered.stdout for word in ("curl", "http", "install", "uv "))
