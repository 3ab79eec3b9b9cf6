"""Output files named by the user: complete or unchanged, and only regular files are replaced."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from freetrain_parsl.report.output import write_figure, write_output
from tests.foreign_runs import BOB, as_two_users


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_regular_file_is_replaced_whole_and_keeps_its_permissions(tmp_path):
    path = tmp_path / "figures.json"
    path.write_text("old")
    path.chmod(0o640)
    reader = path.open()
    write_output(path, "new \N{EN DASH} whole")
    assert path.read_text(encoding="utf-8") == "new \N{EN DASH} whole"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert reader.read() == "old", "a process that has it open reads the old file"
    reader.close()
    assert names(tmp_path) == ["figures.json"]


def test_a_new_file_has_the_permissions_that_any_new_file_has(tmp_path):
    write_output(tmp_path / "new", b"\x00")
    (tmp_path / "other").touch()
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("exists", [True, False])
def test_a_symbolic_link_stays_one_and_what_it_points_to_is_written(tmp_path, exists):
    """Also over several links, relative ones, and to a file that does not exist yet."""
    (tmp_path / "there").mkdir()
    target = tmp_path / "there" / "page.html"
    if exists:
        target.write_text("old")
    (tmp_path / "there" / "second").symlink_to("page.html")
    link = tmp_path / "first"
    link.symlink_to("there/second")
    write_output(link, "new")
    assert (link.is_symlink(), (tmp_path / "there" / "second").is_symlink()) == (True, True)
    assert (target.is_symlink(), target.read_text()) == (False, "new")


@as_two_users
@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("own_link_before", [True, False])
def test_links_of_other_users_are_not_followed(tmp_path, exists, own_link_before):
    """In a shared directory anybody could choose the file that is overwritten."""
    target = tmp_path / "results.txt"
    if exists:
        target.write_text("five years of work")
    link = tmp_path / "page.html"
    link.symlink_to(target)
    os.chown(link, BOB, BOB, follow_symlinks=False)
    if own_link_before:
        (tmp_path / "own.html").symlink_to(link)
    with pytest.raises(OSError, match="it is a link of "):
        write_output(tmp_path / "own.html" if own_link_before else link, "new")
    assert target.exists() is exists
    assert not exists or target.read_text() == "five years of work"


def test_a_loop_of_links_is_an_error(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        write_output(tmp_path / "a", "x")
    assert names(tmp_path) == ["a", "b"]


@pytest.mark.parametrize("through_a_link", [False, True])
def test_a_pipe_is_written_in_place(tmp_path, through_a_link):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    path = pipe
    if through_a_link:
        path = tmp_path / "link"
        path.symlink_to(pipe)
    got = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    write_output(path, b"x" * 1_000_000)
    reader.join()
    assert got == [b"x" * 1_000_000]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_device_is_written_in_place():
    """Even by root, who could replace it."""
    before = Path("/dev/null").stat()
    write_output(Path("/dev/null"), "gone")
    after = Path("/dev/null").stat()
    assert stat.S_ISCHR(after.st_mode)
    assert (after.st_rdev, after.st_ino, after.st_mtime) == (before.st_rdev, before.st_ino, before.st_mtime)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_device_is_an_error_and_stays_a_device():
    with pytest.raises(OSError, match="No space left"):
        write_output(Path("/dev/full"), "gone")
    assert stat.S_ISCHR(Path("/dev/full").stat().st_mode)


def test_a_file_with_several_names_keeps_them(tmp_path):
    (tmp_path / "one").write_text("a long old text")
    os.link(tmp_path / "one", tmp_path / "two")
    write_output(tmp_path / "one", "new")
    assert (tmp_path / "two").read_text() == "new"


def test_a_directory_that_takes_no_new_file_does_not_hinder(tmp_path, monkeypatch):
    """Root may write anywhere, so the error is simulated."""
    path = tmp_path / "figures"
    path.write_text("a long old text")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("freetrain_parsl.report.output._replace", refuse)
    write_output(path, "new")
    assert path.read_text() == "new"
    with pytest.raises(PermissionError):
        write_output(tmp_path / "other", "new")


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/stderr"])
@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_a_standard_stream_gets_it_after_what_was_said_there(tmp_path, name, kind):
    """A redirection target is not replaced: the program's other output would be lost."""
    stream = name.removeprefix("/dev/")
    script = (
        "import sys; from pathlib import Path; from freetrain_parsl.report.output import write_output\n"
        f"s = sys.{stream}; print('before', file=s, flush=True); write_output(Path({name!r}), 'content\\n')\n"
        "print('after', file=s, flush=True)"
    )
    if kind == "pipe":
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        said = getattr(done, stream)
    else:
        with (tmp_path / "out").open("a") as file:
            subprocess.run([sys.executable, "-c", script], check=True, **{stream: file})
        said = (tmp_path / "out").read_text()
    assert said == "before\ncontent\nafter\n"


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_output(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["report.html"]


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a", b"\x89PNG")])
def test_a_picture_has_the_format_of_its_name(tmp_path, name, begins):
    from matplotlib.figure import Figure

    write_figure(tmp_path / name, Figure(figsize=(1, 1)))
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_names_in_pictures_are_no_formulas(tmp_path):
    """A dollar in a name would be one, and ends the drawing if it is not a formula of TeX."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    bad = "$\\frac{x_{$"
    figure = Figure(layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(bad)
    axes.set_xlabel(bad)
    axes.set_yticks([0, 1], [bad, "b"])
    figure.suptitle(bad)
    figure.legend(handles=[Patch(label=bad)])
    write_figure(tmp_path / "picture.svg", figure)
    assert (tmp_path / "picture.svg").read_text().startswith("<?xml")


def test_what_utf_8_cannot_encode_is_escaped(tmp_path):
    write_output(tmp_path / "report.html", "name \udcff")
    assert (tmp_path / "report.html").read_text() == "name \\udcff"
