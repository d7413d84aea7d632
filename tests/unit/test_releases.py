"""Releases: one content, one id; staged whole or not at all; never collected while they run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.tandem import releases
from ansible.module_utils.tandem.problems import TandemError

INSTANCE: dict[str, Any] = {
    "name": "decode-0",
    "kind": "decode",
    "user": "tandem-decode-0",
    "unit": "tandem-decode-0.service",
    "argv": ["python", "--port", "1"],
    "env": {"A": "1"},
    "needs": [],
    "ports": [],
    "ready": [],
}


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(releases, "RELEASES", str(tmp_path))
    return tmp_path


def build(**changes: Any) -> releases.Release:
    return releases.build({**INSTANCE, **changes}, "unit of @RELEASE@\n", "helper", {})


def test_equal_content_is_one_release() -> None:
    assert build().id == build().id
    assert build().files["tandem-decode-0.service"] == f"unit of {build().id}\n"


@pytest.mark.parametrize(
    "changes",
    [{"argv": ["python"]}, {"env": {"A": "2"}}, {"needs": ["/opt/x"]}, {"ready": [{}]}, {"ports": [{"port": 1}]}],
)
def test_any_change_is_another_release(changes: dict[str, Any]) -> None:
    assert build(**changes).id != build().id


def test_other_gpus_are_another_release() -> None:
    assert releases.build(INSTANCE, "u", "h", {"0": "a"}).id != releases.build(INSTANCE, "u", "h", {"0": "b"}).id


def test_a_killed_stage_leaves_nothing_that_looks_finished(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = build()

    def killed(_self: Path, _target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            releases.stage(release)
    assert not release.staged()
    releases.stage(release)
    assert release.staged()
    assert [path.name for path in (root / "decode-0").iterdir()] == [release.id]
    assert releases.load("decode-0", release.id).files == release.files


def test_readable_by_the_instance_whatever_the_umask() -> None:
    before = os.umask(0o077)
    try:
        releases.stage(build())
    finally:
        os.umask(before)
    assert {folder.stat().st_mode & 0o777 for folder in (build().path, build().path.parent)} == {0o755}
    assert {file.stat().st_mode & 0o777 for file in build().path.iterdir()} == {0o644}


def test_missing_release() -> None:
    with pytest.raises(TandemError, match="found no directory"):
        releases.load("decode-0", "nowhere")


def test_collect_keeps_the_newest_and_what_is_held(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [build(env={"N": str(number)}) for number in range(6)]
    for age, release in enumerate(made):
        releases.stage(release)
        os.utime(release.path, (1000 + age, 1000 + age))
    releases.point("decode-0", made[0].id)
    monkeypatch.setattr(releases, "record", lambda _instance: {"release": made[1].id})
    removed = releases.collect("decode-0", 2)
    assert sorted(removed) == sorted([made[2].id, made[3].id])
    left = {path.name for path in (root / "decode-0").iterdir() if path.is_dir() and not path.is_symlink()}
    assert left == {made[index].id for index in (0, 1, 4, 5)}


def test_current_is_switched_whole(root: Path) -> None:
    releases.stage(build())
    releases.point("decode-0", build().id)
    releases.point("decode-0", build().id)
    assert releases.current("decode-0") == build().id
    assert (root / "decode-0" / "current" / "argv").read_text() == "python\n--port\n1\n"
    assert "unit of" in releases.current_text("decode-0")
