"""Archives of campaigns: what is packed arrives; what is damaged or leaves its directory is refused."""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.extensions.globus.remote import archive as module
from freetrain_parsl.extensions.globus.remote.archive import pack, unpack


def packed(tmp_path, contents: dict[str, bytes], campaign: str = "c.yaml"):
    files = {}
    for number, (name, content) in enumerate({campaign: b"", **contents}.items()):
        path = tmp_path / f"source{number}"
        path.write_bytes(content)
        files[name] = path
    return pack(files, campaign)


def forged(names: dict[str, bytes], *, manifest: dict | None = None, attributes: int | None = None) -> bytes:
    """Make an archive as only an attacker would, with a manifest that fits unless one is given."""
    entries = {
        name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in names.items()
    }
    manifest = {"format": 1, "campaign": next(iter(names)), "files": entries} if manifest is None else manifest
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in {
            "MANIFEST.json": json.dumps(manifest).encode(),
            **{f"files/{name}": content for name, content in names.items()},
        }.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (stat.S_IFREG | 0o600 if attributes is None else attributes) << 16
            file.writestr(info, content)
    return buffer.getvalue()


def extract(data: bytes, tmp_path):
    return unpack(data, hashlib.sha256(data).hexdigest(), tmp_path / "out")


@settings(max_examples=20)
@given(contents=st.dictionaries(st.sampled_from(["a.py", "b/c.py", "b/d/e.py", "ü.py"]), st.binary(max_size=200)))
def test_what_is_packed_is_unpacked(tmp_path_factory, contents):
    tmp_path = tmp_path_factory.mktemp("archive")
    sent = packed(tmp_path, contents)
    assert unpack(sent.data, sent.sha256, tmp_path / "out") == "c.yaml"
    arrived = {p.relative_to(tmp_path / "out").as_posix(): p.read_bytes() for p in (tmp_path / "out").rglob("*.py")}
    assert arrived == contents


def test_equal_files_make_equal_archives_and_private_files(tmp_path):
    contents = {"apps/a.py": b"x = 1\n"}
    sent = packed(tmp_path, contents)
    assert sent == packed(tmp_path, contents)
    unpack(sent.data, sent.sha256, tmp_path / "out")
    assert stat.S_IMODE((tmp_path / "out" / "apps" / "a.py").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "out" / "apps").stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a/../../x", "a//x", "./x", "a\\..\\x", "a\nb", "", "x" * 300, "a/" * 600 + "x"]
)
def test_names_that_leave_the_directory_are_refused(tmp_path, name):
    with pytest.raises(InvalidInput):
        extract(forged({"c.yaml": b"", name: b"evil"}), tmp_path)
    assert not (tmp_path / "out").exists()
    assert list(tmp_path.iterdir()) == []


def test_links_are_refused(tmp_path):
    with pytest.raises(InvalidInput, match="not a regular file"):
        extract(forged({"c.yaml": b"/etc/passwd"}, attributes=stat.S_IFLNK | 0o777), tmp_path)
    assert not (tmp_path / "out").exists()


def test_links_do_not_travel(tmp_path):
    (tmp_path / "link.py").symlink_to("/etc/hostname")
    with pytest.raises(InvalidInput, match=r"link\.py"):
        pack({"link.py": tmp_path / "link.py"}, "link.py")
    os.mkfifo(tmp_path / "pipe.py")
    with pytest.raises(InvalidInput, match="not a regular file"):
        pack({"pipe.py": tmp_path / "pipe.py"}, "pipe.py")


def test_files_that_the_manifest_does_not_have_are_refused(tmp_path):
    manifest = {
        "format": 1,
        "campaign": "c.yaml",
        "files": {"c.yaml": {"size": 0, "sha256": hashlib.sha256().hexdigest()}},
    }
    with pytest.raises(InvalidInput, match="not those of its manifest"):
        extract(forged({"c.yaml": b"", "more.py": b""}, manifest=manifest), tmp_path)


@settings(max_examples=40)
@given(position=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255), rehash=st.booleans())
def test_a_damaged_archive_is_refused_or_harmless(tmp_path_factory, position, value, rehash):
    """One changed byte never changes the contents of a file that is written."""
    tmp_path = tmp_path_factory.mktemp("damaged")
    contents = {"a.py": b"print(1)\n" * 50}
    sent = packed(tmp_path, contents)
    data = bytearray(sent.data)
    data[int(position * len(data))] = value
    try:
        unpack(bytes(data), hashlib.sha256(data).hexdigest() if rehash else sent.sha256, tmp_path / "out")
    except InvalidInput:
        assert not (tmp_path / "out").exists()
    else:
        assert (tmp_path / "out" / "a.py").read_bytes() == contents["a.py"]


def test_an_archive_that_is_too_large_is_refused_by_name_and_size(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LARGEST_ARCHIVE", 100_000)
    with pytest.raises(
        InvalidInput, match=r"0\.2 MB, compressed, more than the 0\.1 MB .* largest: big\.py \(0\.2 MB\)"
    ):
        packed(tmp_path, {"big.py": os.urandom(200_000), "small.py": b"x"})


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LARGEST_CONTENT", 10_000)
    with pytest.raises(InvalidInput, match="too large when unpacked"):
        extract(forged({"c.yaml": bytes(30_000)}), tmp_path)


def test_private_keys_do_not_travel(tmp_path):
    with pytest.raises(InvalidInput, match="private key"):
        packed(tmp_path, {"settings.py": b'KEY = """-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA"""'})


@pytest.mark.parametrize(
    "manifest",
    [
        [],
        5,
        {"files": {"a.py": 5}, "format": 1, "campaign": "a.py"},
        {"files": ["a.py"], "format": 1, "campaign": "a.py"},
        {"files": {"a.py": {"sha256": hashlib.sha256(b"").hexdigest()}}, "format": 1, "campaign": []},
    ],
    ids=repr,
)
def test_a_manifest_of_another_shape_is_refused(tmp_path, manifest):
    with pytest.raises(InvalidInput, match="archive"):
        extract(forged({"a.py": b""}, manifest=manifest), tmp_path)


@pytest.mark.parametrize("name", ["a\nb.py", "a\\b.py", os.fsdecode(b"\xff.py")], ids=ascii)
def test_a_name_that_the_site_would_refuse_is_refused_before_anything_is_sent(tmp_path, name):
    with pytest.raises(InvalidInput, match=r"cannot travel with the campaign; rename the file") as caught:
        packed(tmp_path, {name: b""})
    assert "\n" not in str(caught.value)
