"""What ``clean`` and ``prune`` do at home, with the real Globus SDK, and what they leave alone."""

from __future__ import annotations

import os

import pytest

from freetrain_parsl.campaign.files.yaml_file import Variables
from freetrain_parsl.campaign.site.home import open_home
from freetrain_parsl.campaign.site.site import Site
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.extensions.globus.storage.login import CLIENT_SECRET
from tests.extensions.globus.storage.conftest import HOME, A, B, globus_is_here, world  # noqa: F401 - fixtures
from tests.support.globus.loopback_service import Reply

pytestmark = pytest.mark.globus

SITE = """\
system: local
checkpoints:
  directory: %s
  globus: {collection: %s, path: /ft, lease: 100 s, home: {collection: %s, path: /ft}}
"""


def run_of(world, name):  # noqa: F811
    """Return the site and the store of a run."""
    site = Site.parse(SITE % (world.root(name), A if name == "a" else B, HOME), "s.yaml", Variables({}, {}))
    store = RunStore.create(world.path / f"run-{name}", {"run_id": f"{name}1"}, ["net", "other"])
    return site, store


def test_clean_frees_the_trainings_of_a_dead_driver_and_leaves_those_of_others_alone(world):  # noqa: F811
    one, other = world.mover("a"), world.mover("b")
    one.want(["net"])
    other.want(["other"])
    world.run(one, other, until=lambda: one.is_ready("net") and other.is_ready("other"))
    world.save("a", "net", 10)
    world.run(one, until=lambda: world.at_home("net") == ["1:10"])
    world.save("a", "net", 20)
    world.machine.next_task("hold")
    world.run(one, until=lambda: any("copying to home" in line for line in one.lines()))
    one.turn()
    partial = world.path / "home" / "ft" / "checkpoints" / "net" / "gen-0000000001" / "step-0000000020"
    partial.mkdir()
    site, store = run_of(world, "a")
    world.collections("a")
    told: list[str] = []
    site.home.clean(store, told.append)
    world.machine.wait()
    assert told[0].startswith("cancelled 1 copies between")
    assert told[1:] == [
        "released net, with 1 checkpoints at home",
        f"removing 1 partial checkpoints from {HOME}:/ft",
    ]
    assert not partial.exists()
    owners = {path.name for path in (world.path / "home" / "ft" / "owners").iterdir()}
    assert "net.gen-0000000001.released" in owners
    assert "other.gen-0000000001.released" not in owners
    again: list[str] = []
    site.home.clean(store, again.append)
    assert again == []
    other.want(["net"])
    world.run(other, until=lambda: other.is_ready("net"), seconds=0.5, most=40)
    assert world.content("b", "net") == b"state"


def test_clean_removes_no_checkpoint_because_a_listing_leaves_out_its_manifest(world):  # noqa: F811
    one = world.mover("a")
    one.want(["net"])
    world.run(one, until=lambda: one.is_ready("net"))
    world.save("a", "net", 10)
    world.run(one, until=lambda: world.at_home("net") == ["1:10"] and not one._carrier.busy("net"))
    site, store = run_of(world, "a")
    path = "/v0.10/operation/endpoint/{collection}/ls"
    names = ["../../evil.gen-0000000001", "../../evil.gen-0000000001.by-a1", "net.gen-0000000001",
             "net.gen-0000000001.by-a1"]  # fmt: skip
    for shown in (names, ["gen-0000000001"], ["step-0000000010"], ["state.pt"]):
        world.services["a"].mishap("GET", path, Reply({"DATA": [{"name": name, "type": "dir"} for name in shown]}))
    world.collections("a")
    told: list[str] = []
    site.home.clean(store, told.append)
    world.machine.wait()
    assert told == ["released net, with 0 checkpoints at home"]
    assert world.at_home("net") == ["1:10"]


def test_prune_removes_old_checkpoints_of_its_own_trainings_only(world):  # noqa: F811
    one, other = world.mover("a"), world.mover("b")
    one.want(["net"])
    other.want(["other"])
    for mover, name, site in ((one, "net", "a"), (other, "other", "b")):
        world.run(mover, until=lambda mover=mover, name=name: mover.is_ready(name))
        for step in (10, 20):
            world.save(site, name, step)
            world.run(mover, until=lambda name=name, step=step: f"1:{step}" in world.at_home(name))
    site, store = run_of(world, "a")
    world.collections("a")
    told: list[str] = []
    site.home.prune(store, 1, None, told.append, dry_run=True)
    assert any(line.startswith("would remove") for line in told)
    assert world.at_home("net") == ["1:10", "1:20"]
    site.home.prune(store, 1, None, told.append, dry_run=False)
    world.machine.wait()
    assert world.at_home("net") == ["1:20"]
    assert world.at_home("other") == ["1:10", "1:20"]
    assert "other: another run has claimed it at home; nothing is removed there" in told


def test_the_driver_does_not_pass_on_the_client_secret(world, monkeypatch):  # noqa: F811
    import os

    site, store = run_of(world, "a")
    world.collections("a")
    site.home.check()
    with open_home(site.home, store, lambda: True) as mover:
        assert mover is not None
        assert "FREETRAIN_GLOBUS_CLIENT_SECRET" not in os.environ


def test_a_run_without_a_home_passes_no_client_secret_to_its_jobs(monkeypatch, tmp_path):
    monkeypatch.setenv(CLIENT_SECRET, "secret")
    site = Site.parse("system: local\n", "s.yaml", Variables({}, {}))
    store = RunStore.create(tmp_path, {"run_id": "a1"}, ["net"])
    with open_home(site.home, store, lambda: True) as mover:
        assert mover is None
        assert CLIENT_SECRET not in os.environ


def test_prune_removes_nothing_because_home_lists_checkpoints_that_do_not_exist(world):  # noqa: F811
    """Coherent phantoms, newer than all that is there: only what is intact here, too, counts as kept."""
    one = world.mover("a")
    one.want(["net"])
    world.run(one, until=lambda: one.is_ready("net"))
    for step in (10, 20):
        world.save("a", "net", step)
        world.run(one, until=lambda step=step: f"1:{step}" in world.at_home("net"))
    site, store = run_of(world, "a")
    for step in (30, 40):  # a cache shows what was removed meanwhile, or another user has made it
        phantom = world.path / "home" / "ft" / "checkpoints" / "net" / "gen-0000000001" / f"step-{step:010d}"
        phantom.mkdir()
        (phantom / "manifest.json").write_text("{}")
    world.collections("a")
    told: list[str] = []
    site.home.prune(store, 1, None, told.append, dry_run=False)
    world.machine.wait()
    assert world.at_home("net")[-3:] == ["1:20", "1:30", "1:40"]
    assert not any("step-0000000020" in line for line in told)


def test_prune_says_that_it_removes_nothing_without_proof(world):  # noqa: F811
    one = world.mover("a")
    one.want(["net"])
    world.run(one, until=lambda: one.is_ready("net"))
    for step in (10, 20):
        world.save("a", "net", step)
        world.run(one, until=lambda step=step: f"1:{step}" in world.at_home("net"))
    site, store = run_of(world, "a")
    for state in world.root("a").rglob("step-*/state.pt"):
        state.unlink()
    world.collections("a")
    told: list[str] = []
    site.home.prune(store, 1, None, told.append, dry_run=False)
    world.machine.wait()
    assert world.at_home("net") == ["1:10", "1:20"]
    assert told[0].startswith("net: nothing is removed at home: of its 2 checkpoints there, 0 are also here, intact")
