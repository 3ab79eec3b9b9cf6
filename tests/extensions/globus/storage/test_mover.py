"""The mover with the real Globus SDK: nothing wrong is resumed from, nothing is copied twice, whatever goes wrong."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from freetrain_parsl.errors import GlobusRefused
from freetrain_parsl.extensions.globus.storage.mover_directory import MoverPace, MoverState
from freetrain_parsl.storage.home import ResultStatus
from tests.extensions.globus.storage.conftest import _PACE, HOME, LEASE, A
from tests.support.globus.loopback_service import Cut, Reply

pytestmark = pytest.mark.globus


def ready(world, mover, *trainings):
    mover.want(trainings)
    world.run(mover, until=lambda: all(map(mover.is_ready, trainings)))


def test_a_checkpoint_goes_home_and_is_resumed_from_at_another_site(world):
    one = world.mover("a")
    ready(world, one, "net")
    world.save("a", "net", 10, b"ten")
    world.run(one, until=lambda: world.at_home("net") == ["1:10"])
    assert one.finished("net") is ResultStatus.PENDING
    world.run(one, until=lambda: one.finished("net") is ResultStatus.CONFIRMED and one.settled)
    world.run(one, until=lambda: not one._ownership.releasing)
    other = world.mover("b")
    ready(world, other, "net")
    assert world.content("b", "net") == b"ten"
    state = world.root("b") / "net" / "step-0000000010" / "state.pt"
    assert state.stat().st_mode & 0o777 == 0o600


def test_the_manifest_is_sent_after_the_data_has_arrived(world):
    one = world.mover("a")
    ready(world, one, "net")
    world.save("a", "net", 10)
    world.machine.next_task("hold")
    for _ in range(20):
        one.turn()
    (task,) = world.machine.tasks.values()
    assert all("manifest" not in item["destination_path"] for item in task.request["DATA"])
    assert "copying to home: net, 0 B of 5 B" in one.lines()[0]
    world.machine.go_on()
    world.run(one, until=lambda: world.at_home("net") == ["1:10"])


@pytest.mark.parametrize(
    ("mishap", "reason"),
    [("fail", "FILE_SIZE_CHANGED"), ("quota", "QUOTA_EXCEEDED"), ("checksum", "VERIFY_CHECKSUM")],
)
def test_a_copy_that_dies_half_way_does_not_count_and_the_one_before_is_used(world, mishap, reason):
    one = world.mover("a")
    ready(world, one, "net")
    world.save("a", "net", 10, b"ten")
    world.run(one, until=lambda: world.at_home("net") == ["1:10"])
    world.machine.next_task(mishap)
    world.save("a", "net", 20, b"twenty")
    world.run(one, until=lambda: reason in one.remark("net"), seconds=0.1)
    assert "next attempt in" in one.remark("net")
    assert world.at_home("net") == ["1:10"]
    other = world.mover("b")  # the first one is dead from now on
    other.want(["net"])
    world.run(other, until=lambda: other.is_ready("net"), seconds=5.0)
    assert world.content("b", "net") == b"ten"


def test_a_failed_copy_is_tried_again_with_the_newest_checkpoint(world):
    one = world.mover("a")
    ready(world, one, "net")
    world.machine.next_task("fail", 2)
    world.save("a", "net", 10)
    world.run(one, until=lambda: world.at_home("net") == ["1:10"] and not one.remark("net"))


def test_a_damaged_checkpoint_at_home_is_found_by_its_hashes_and_the_one_before_is_used(world):
    one = world.mover("a")
    ready(world, one, "net")
    world.save("a", "net", 10, b"ten")
    world.run(one, until=lambda: world.at_home("net") == ["1:10"])
    world.machine.next_task("corrupt")
    world.save("a", "net", 20, b"twenty")
    world.run(one, until=lambda: world.at_home("net") == ["1:10", "1:20"])
    other = world.mover("b")
    other.want(["net"])
    world.run(other, until=lambda: other.is_ready("net"), seconds=5.0)
    assert world.content("b", "net") == b"ten"


def test_if_no_checkpoint_at_home_is_intact_the_training_waits_with_the_reason(world):
    one = world.mover("a")
    ready(world, one, "net")
    world.machine.next_task("corrupt")
    world.save("a", "net", 10, b"ten")
    world.run(one, until=lambda: world.at_home("net") == ["1:10"])
    other = world.mover("b")
    other.want(["net"])
    world.run(other, until=lambda: "no other one is left" in other.remark("net"), seconds=5.0)
    assert not other.is_ready("net")
    assert world.steps("b", "net") == []


def test_a_driver_that_dies_between_submission_and_answer_does_not_copy_twice(world):
    one = world.mover("a")
    ready(world, one, "net")
    world.save("a", "net", 10)
    world.services["a"].mishap("POST", "/v0.10/transfer", Cut(after_work=True), times=2)
    for _ in range(5):
        one.turn()
    assert len(world.machine.tasks) == 1
    world.machine.wait()
    again = world.mover("a")
    ready(world, again, "net")
    world.run(again, until=lambda: world.at_home("net") == ["1:10"])
    assert world.machine.duplicates >= 1
    assert len(world.machine.tasks) == 2  # data, manifest
    for _ in range(10):
        again.turn()
    assert len(world.machine.tasks) == 2


def test_the_submission_id_is_on_disk_before_the_task_is_submitted(world):
    one = world.mover("a")
    ready(world, one, "net")
    seen = []
    state = world.path / "run-a" / "globus.json"
    world.services["a"].mishap("POST", "/v0.10/transfer", lambda: seen.append(json.loads(state.read_text())))
    world.save("a", "net", 10)
    world.run(one, until=lambda: world.at_home("net") == ["1:10"])
    (task, _) = world.machine.tasks.values()
    assert seen[0]["jobs"][0]["submission"] == task.request["submission_id"]


def test_many_checkpoints_share_a_task_and_two_tasks_are_active_at_most(world):
    one = world.mover("a")
    names = [f"net-{number}" for number in range(20)]
    ready(world, one, *names)
    for name in names:
        world.save("a", name, 10)
    world.run(one, until=lambda: all(world.at_home(name) for name in names))
    assert len(world.machine.tasks) == 2
    assert world.machine.most_active <= 2


def test_two_checkpoints_stay_at_home_and_nothing_else_there_is_touched(world):
    one = world.mover("a")
    foreign = world.path / "home" / "ft" / "checkpoints" / "net" / "gen-0000000001" / "mine"
    ready(world, one, "net")
    foreign.mkdir(parents=True)
    for step in (10, 20, 30, 40):
        world.save("a", "net", step)
        world.run(one, until=lambda step=step: f"1:{step}" in world.at_home("net"))
    world.run(one, until=lambda: world.at_home("net") == ["1:30", "1:40"])
    assert foreign.is_dir()


def test_checkpoints_of_an_owner_that_was_replaced_do_not_count_any_more(world):
    one, other = world.mover("a"), world.mover("b")
    ready(world, one, "net")
    world.save("a", "net", 10, b"ten")
    world.run(one, until=lambda: world.at_home("net") == ["1:10"])
    world.services["a"].cut_off = True
    world.save("a", "net", 90, b"never copied in time")
    other.want(["net"])
    world.run(one, other, until=lambda: one.lost("net"), seconds=5.0)
    assert not other.is_ready("net")
    assert "home could not be reached" in one.lost("net")
    world.run(one, other, until=lambda: other.is_ready("net"), seconds=5.0)
    assert world.content("b", "net") == b"ten"
    world.save("b", "net", 20, b"twenty")
    world.run(other, until=lambda: world.at_home("net")[-1].endswith(":20"))
    assert other.finished("net") is ResultStatus.PENDING
    world.run(other, until=lambda: other.finished("net") is ResultStatus.CONFIRMED and other.settled)
    world.services["a"].cut_off = False
    one.stopped("net")
    world.run(one, other, until=lambda: one.is_ready("net"), seconds=5.0)
    assert world.content("a", "net") == b"twenty"
    assert (world.root("a") / "net" / "set-aside-1" / "step-0000000090").is_dir()


def test_a_result_counts_after_a_listing_that_was_requested_later(world):
    one = world.mover("a")
    ready(world, one, "net")
    one.turn()
    before = world.services["a"].count("GET", f"/v0.10/operation/endpoint/{HOME}/ls")
    assert one.finished("net") is ResultStatus.PENDING
    world.run(one, until=lambda: one.finished("net") is ResultStatus.CONFIRMED)
    assert world.services["a"].count("GET", f"/v0.10/operation/endpoint/{HOME}/ls") > before


def test_a_result_does_not_count_if_the_later_listing_shows_another_owner(world):
    one = world.mover("a")
    ready(world, one, "net")
    owners = world.path / "home" / "ft" / "owners"
    for name in ("net.gen-0000000002", "net.gen-0000000002.by-b1"):
        (owners / name).mkdir()
    assert one.finished("net") is ResultStatus.PENDING
    world.run(one, until=lambda: one.finished("net") is not ResultStatus.PENDING)
    assert one.finished("net") is ResultStatus.LOST
    assert "generation 2" in one.lost("net")


def test_a_result_counts_only_if_home_confirms_it_afterwards(world):
    one, other = world.mover("a"), world.mover("b")
    ready(world, one, "net")
    world.save("a", "net", 10)
    world.run(one, until=lambda: world.at_home("net") == ["1:10"])
    world.services["a"].cut_off = True
    other.want(["net"])
    assert one.finished("net") is ResultStatus.PENDING
    world.run(one, other, until=lambda: other.is_ready("net"), seconds=5.0)
    assert one.finished("net") is ResultStatus.LOST


def test_waiting_with_retry_after_and_expired_tokens_are_overcome(world):
    one = world.mover("a")
    world.services["a"].mishap(
        "GET",
        f"/v0.10/operation/endpoint/{HOME}/ls",
        Reply({"code": "RateLimited"}, 429, {"Retry-After": "7"}),
        times=2,
    )
    one.want(["net"])
    one.turn()
    begin = world.clock.now
    world.run(one, until=lambda: one.is_ready("net"), seconds=0.5)
    assert world.clock.now - begin >= 7
    world.services["a"].expire_tokens()
    world.save("a", "net", 10)
    world.run(one, until=lambda: world.at_home("net") == ["1:10"])


def test_an_endpoint_that_is_offline_delays_and_is_told(world):
    one = world.mover("a")
    ready(world, one, "net")
    world.machine.offline.add(HOME)
    world.run(one, until=lambda: "not connected" in one.remark("net"), seconds=5.0)
    world.machine.offline.clear()
    world.save("a", "net", 10)
    world.run(one, until=lambda: world.at_home("net") == ["1:10"], seconds=2.0)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda world: world.machine.consent.add(HOME), "freetrain globus login --config"),
        (lambda world: world.machine.directories.pop(A), "there is no such collection; correct its UUID"),
        (lambda world: world.machine.directories.update({A: world.path / "run-a"}), "is not /ft on collection"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line_before_anything_is_submitted(world, break_it, message):
    break_it(world)
    with pytest.raises(GlobusRefused) as caught:
        world.mover("a")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert world.machine.tasks == {}


def test_without_a_login_the_command_is_named(world, monkeypatch):
    monkeypatch.delenv("FREETRAIN_GLOBUS_CLIENT_SECRET")
    with pytest.raises(GlobusRefused, match="run: freetrain globus login"):
        world.mover("a")
    monkeypatch.delenv("FREETRAIN_GLOBUS_CLIENT_ID")
    with pytest.raises(GlobusRefused, match="FREETRAIN_GLOBUS_CLIENT_ID is not set"):
        world.mover("a")


def test_requests_of_an_idle_mover_are_few(world):
    one = world.mover("a")
    ready(world, one, "net")
    before = len(world.services["a"].requests)
    for _ in range(100):
        one.turn()
        world.clock.now += LEASE / 100
    assert len(world.services["a"].requests) - before <= 2 * 6


def test_running_trainings_are_copied_together_at_the_default_pace_and_the_last_checkpoint_at_once(world):
    one = world.mover("a", pace=replace(MoverPace.of(900.0), request=0.0))
    ready(world, one, "net", "other")
    before = len(world.services["a"].requests)
    for step in range(1, 126):
        world.save("a", "net", step)
        world.save("a", "other", step)
        one.turn()
        world.machine_idle()
        world.clock.now += 10.0
    assert len(world.services["a"].requests) - before <= 12 * 20  # in 20 minutes
    newest = int(world.at_home("net")[-1].partition(":")[2])
    assert newest > 125 - 120 / 10 - 4
    world.save("a", "net", 126)
    one.leave("net")
    begun = world.clock.now
    world.run(one, until=lambda: one.has_left("net"))
    assert world.at_home("net")[-1] == "1:126"
    assert world.clock.now - begun < 30.0


def test_a_training_that_leaves_has_its_last_checkpoint_at_home_before_another_site_gets_it_and_may_come_back(world):
    one, other = world.mover("a"), world.mover("b")
    ready(world, one, "net")
    world.save("a", "net", 10)
    world.run(one, until=lambda: world.at_home("net") == ["1:10"])
    world.save("a", "net", 20, b"twenty")
    world.machine.next_task("hold")
    one.leave("net")
    other.want(["net"])
    for mover in (one, other) * 20:
        mover.turn()
    assert not other.is_ready("net")
    assert not one.has_left("net")
    world.machine.go_on()
    world.run(one, until=lambda: one.has_left("net"))
    world.run(other, until=lambda: other.is_ready("net"))
    assert world.content("b", "net") == b"twenty"
    world.save("b", "net", 30, b"thirty")
    other.leave("net")
    world.run(other, until=lambda: other.has_left("net"))
    ready(world, one, "net")
    assert world.content("a", "net") == b"thirty"


def test_a_training_does_not_leave_before_its_last_checkpoint_is_at_home_however_often_the_copy_fails(world):
    one = world.mover("a")
    ready(world, one, "net")
    world.save("a", "net", 10)
    world.machine.next_task("quota", 6)
    one.leave("net")
    world.run(one, until=lambda: one._carrier.failures("net") > 4, seconds=5.0)
    assert not one.has_left("net")
    world.run(one, until=lambda: one.has_left("net"), seconds=5.0)
    assert world.at_home("net") == ["1:10"]


def test_a_training_that_waits_leaves_at_once(world):
    one, other = world.mover("a"), world.mover("b")
    ready(world, one, "net")
    other.want(["net"])
    world.run(other, until=lambda: "another site owns it" in other.remark("net"))
    other.leave("net")
    assert other.has_left("net")
    assert other.has_left("never")


def test_the_next_driver_of_a_run_releases_what_the_one_before_has_left(world):
    one = world.mover("a")
    ready(world, one, "net", "more")
    again, other = world.mover("a"), world.mover("b")  # the first one is dead from now on
    ready(world, again, "more")
    again.abandon(["net"])
    world.run(again, until=lambda: not again._ownership.releasing)
    ready(world, other, "net")


def test_copies_are_measured_and_the_next_driver_knows_them(world):
    one = world.mover("a")
    ready(world, one, "net")
    world.save("a", "net", 10, b"ten")
    world.run(one, until=lambda: world.at_home("net") == ["1:10"])
    (copy,) = MoverState.read(world.path / "run-a").measured
    assert (copy.from_home, copy.size) == (False, 3)
    assert copy.seconds >= 0
    world.mover("a").turn()
    assert MoverState.read(world.path / "run-a").measured == (copy,)


def shown(world, site, *listings, times=1):
    """Let the next listings of the checkpoints of the training job show something else."""
    for names in listings:
        world.services[site].mishap(
            "GET",
            f"/v0.10/operation/endpoint/{HOME}/ls",
            Reply({"DATA": [{"name": name, "type": "dir"} for name in names]}),
            times=times,
        )


def released(world, site="a"):
    """Train at a site, and leave a checkpoint at home."""
    one = world.mover(site)
    ready(world, one, "net")
    world.save(site, "net", 10, b"ten")
    one.leave("net")
    world.run(one, until=lambda: one.has_left("net"))


def test_a_listing_without_any_checkpoint_is_not_believed_at_once_after_another_site_has_owned_the_training(world):
    released(world)
    other = world.mover("b")
    other._advance = lambda: None  # only its ownership, so that the next listing is one of checkpoints
    other.want(["net"])
    world.run(other, until=lambda: other._ownership.generation("net", world.clock.now) is not None, seconds=0.0)
    del other._advance
    shown(world, "b", [])
    other.turn()
    assert "home lists no checkpoint of it; home is listed again" in other.remark("net")
    world.run(other, until=lambda: other.is_ready("net"))
    assert world.content("b", "net") == b"ten"


def test_a_checkpoint_that_does_not_exist_is_given_up_and_the_real_one_used(world):
    released(world)
    other = world.mover("b")
    phantom = world.path / "home" / "ft" / "checkpoints" / "net" / "gen-0000000001" / "step-0000000099"
    phantom.mkdir()
    (phantom / "manifest.json").write_text("{}")
    other.want(["net"])
    world.run(other, until=lambda: other._carried["net"].fetching is not None, seconds=0.0)
    for path in (phantom / "manifest.json", phantom):
        path.unlink() if path.is_file() else path.rmdir()
    world.run(other, until=lambda: other.is_ready("net"), seconds=2.0)
    assert world.content("b", "net") == b"ten"


def test_a_checkpoint_of_a_later_generation_is_followed_by_the_next_claim(world):
    """The directory of the owners was removed, and the checkpoints were not."""
    released(world)
    home = world.path / "home" / "ft" / "checkpoints" / "net"
    (home / "gen-0000000001").rename(home / "gen-0000000005")
    shutil.rmtree(world.path / "home" / "ft" / "owners")
    other = world.mover("b")
    ready(world, other, "net")
    assert world.content("b", "net") == b"ten"
    assert other._carried["net"].generation == 6


def test_what_home_has_listed_is_known_to_the_next_driver_of_the_run(world):
    released(world)
    assert [parcel.name for parcel in MoverState.read(world.path / "run-a").whole] == ["step-0000000010"]
    shutil.rmtree(world.root("a") / "net")  # the site has lost its checkpoints
    hidden = world.path / "home" / "ft" / "checkpoints" / "net"
    hidden.rename(hidden.with_name("hidden"))
    again = world.mover("a")
    again.want(["net"])
    world.run(again, until=lambda: "does not list it now" in again.remark("net"))
    for _ in range(50):
        again.turn()
        world.machine_idle()
        world.clock.now += 1.0
    assert not again.is_ready("net")
    hidden.with_name("hidden").rename(hidden)
    world.run(again, until=lambda: again.is_ready("net"))
    assert world.content("a", "net") == b"ten"


def test_a_checkpoint_that_has_been_gone_for_a_lease_is_no_longer_waited_for(world):
    released(world)
    shutil.rmtree(world.root("a") / "net")
    shutil.rmtree(world.path / "home" / "ft" / "checkpoints" / "net")
    again = world.mover("a")
    begun = world.clock.now
    again.want(["net"])
    world.run(again, until=lambda: again.is_ready("net"), seconds=2.0)
    assert LEASE <= world.clock.now - begun < 2 * LEASE
    assert again._carrier.failures("net") == 0  # it would give up its copies to home


def test_a_directory_that_cannot_be_listed_stops_its_training_only(world):
    one = world.mover("a")
    listed = one._collections.names

    def names(collection, path, **options):
        if path.endswith("/bad"):
            raise GlobusRefused("you may not list it")
        return listed(collection, path, **options)

    one._collections.names = names
    one.want(["bad", "net"])
    world.run(one, until=lambda: one.is_ready("net"))
    world.save("a", "net", 10)
    world.run(one, until=lambda: world.at_home("net") == ["1:10"])
    assert not one.is_ready("bad")
    assert "you may not list it" in one.remark("bad")


def test_a_training_with_endless_entries_at_home_does_not_hold_up_the_others(world):
    one = world.mover("a")
    for number in range(1, 21):  # later ones than the claim, which are all looked at
        for step in range(20):
            path = world.path / "home" / "ft" / "checkpoints" / "bad" / f"gen-{number:010d}" / f"step-{step:010d}"
            path.mkdir(parents=True)
    one.want(["bad", "net"])
    world.run(one, until=lambda: one.is_ready("net"), most=12)
    assert not one.is_ready("bad")
    world.run(one, until=lambda: one.is_ready("bad"))


def test_home_may_be_down_for_days(world):
    one = world.mover("a")
    for _ in range(2000):
        one._pause(0.0, "down")
    assert one._not_before - world.clock.now == _PACE.longest


def test_a_task_that_succeeds_without_its_files_is_noticed_before_the_training_is_released(world):
    one = world.mover("a")
    ready(world, one, "net")
    world.save("a", "net", 10, b"ten")
    world.run(one, until=lambda: any(job.kind.value == "manifest" and job.task for job in one._carrier.jobs))
    world.machine.wait()
    (world.path / "home" / "ft" / "checkpoints" / "net" / "gen-0000000001" / "step-0000000010" / "state.pt").unlink()
    one.leave("net")
    world.run(one, until=lambda: "home does not list state.pt" in one.remark("net"))
    assert not one.has_left("net")
    world.run(one, until=lambda: one.has_left("net"))
    other = world.mover("b")
    ready(world, other, "net")
    assert world.content("b", "net") == b"ten"
