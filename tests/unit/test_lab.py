"""The lab's logic: which machines it accepts, what it asks podman for, what it writes. No container is started here."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.tool import checks, cli, demo, hosts, image, inventory, machine, podman, say, shell, venv
from lab.tool.errors import LabError
from lab.tool.hosts import Host, Lab, Spec
from lab.tool.paths import MARKER, Paths

ROOT = Path(__file__).resolve().parents[2]

BASE = Path(sys.executable).resolve()

SOUND = machine.Facts(
    os_release={"ID": "debian", "VERSION_ID": "12", "PRETTY_NAME": "Debian GNU/Linux 12 (bookworm)"},
    python=(3, 11),
    systemd=252,
    has_apt=True,
    uid=0,
    has_sudo=False,
    architecture="x86_64",
    disk_free=60 * 10**9,
    disk_cached=0,
    memory=24 * 10**9,
)
OLD = {"ID": "debian", "VERSION_ID": "11", "PRETTY_NAME": "Debian GNU/Linux 11 (bullseye)"}


def judged(level: str, **changes: Any) -> str:
    """All findings of a level, joined."""
    found = machine.judge(dataclasses.replace(SOUND, **changes), Path("/home/a/.cache/tandem-lab"))
    return "; ".join(finding.text for finding in found if finding.level == level)


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    """A lab of its own, with keys that are no keys."""
    found = Paths(repo=ROOT, cache=tmp_path / "cache")
    found.claim()
    for name in ("login", "host"):
        (found.ssh / f"{name}.pub").write_text(f"ssh-ed25519 AAAA{name} tandem-lab-{name}\n")
    return found


@pytest.fixture
def lab(paths: Paths) -> Lab:
    """The same as a Lab; podman is never called."""
    return Lab(paths)


# --- the machine


@pytest.mark.parametrize(
    ("release", "python", "systemd"),
    [({"ID": "debian", "VERSION_ID": "12"}, (3, 11), 252), ({"ID": "debian", "VERSION_ID": "13"}, (3, 13), 257)],
)
def test_tested_systems_are_accepted_without_a_remark(
    release: dict[str, str], python: tuple[int, int], systemd: int
) -> None:
    assert judged("bad", os_release=release, python=python, systemd=systemd) == ""
    assert judged("note", os_release=release, python=python, systemd=systemd) == ""


def test_an_untested_system_is_accepted_and_called_untested() -> None:
    ubuntu = {"ID": "ubuntu", "VERSION_ID": "24.04", "PRETTY_NAME": "Ubuntu 24.04.3 LTS"}
    assert judged("bad", os_release=ubuntu) == ""
    assert "Ubuntu 24.04.3 LTS: written for, but untested" in judged("note", os_release=ubuntu)


def test_another_system_is_refused_by_name_with_all_that_it_lacks() -> None:
    text = judged("bad", os_release=OLD, python=(3, 9), systemd=247)
    assert "Debian GNU/Linux 11 (bullseye) is not supported" in text
    assert "Python >= 3.11 (found 3.9)" in text
    assert "systemd >= 250 (found 247)" in text


def test_another_system_is_refused_even_if_it_lacks_nothing() -> None:
    text = judged("bad", os_release={"ID": "fedora", "VERSION_ID": "43", "PRETTY_NAME": "Fedora 43"})
    assert "Fedora 43 is not supported" in text
    assert "Missing" not in text


def test_a_supported_system_with_an_old_python_is_refused() -> None:
    assert judged("bad", python=(3, 10)) == "Debian GNU/Linux 12 (bookworm): missing Python >= 3.11 (found 3.10)"


def test_a_system_without_systemd_or_apt_is_told_so() -> None:
    text = judged("bad", systemd=None, has_apt=False)
    assert "systemd >= 250 (found none)" in text
    assert "apt-get (found none)" in text


def test_one_needs_root_or_sudo() -> None:
    assert "neither root nor sudo" in judged("bad", uid=1000)
    assert judged("bad", uid=1000, has_sudo=True) == ""


def test_another_architecture_is_refused() -> None:
    assert "aarch64" in judged("bad", architecture="aarch64")


def test_too_little_disk_is_refused_with_what_is_missing_and_where_to_change_it() -> None:
    text = judged("bad", disk_free=20 * 10**9)
    assert "20.0 GB free" in text
    assert "expected 25.0 GB" in text
    assert "Free 5.0 GB more" in text
    assert "TANDEM_LAB_CACHE" in text


def test_what_is_cached_need_not_be_free_as_well() -> None:
    assert judged("bad", disk_free=12 * 10**9, disk_cached=13 * 10**9) == ""
    assert "Free 1.0 GB more" in judged("bad", disk_free=11 * 10**9, disk_cached=13 * 10**9)


def test_little_memory_is_remarked() -> None:
    assert "4.0 GB of memory" in judged("note", memory=4 * 10**9)


def test_all_faults_come_at_once() -> None:
    text = judged("bad", os_release=OLD, uid=1000, disk_free=0)
    assert text.count(";") >= 2


def test_os_release_is_read_with_and_without_quotes() -> None:
    assert machine.os_release("ID=debian\nVERSION_ID=\"12\"\n# ID=x\n\nNAME='A B'\n") == {
        "ID": "debian",
        "VERSION_ID": "12",
        "NAME": "A B",
    }


def test_only_missing_packages_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = "installed runc\nconfig-files podman\nnot-installed mmdebstrap\ninstalled netavark\n"
    monkeypatch.setattr(shell, "output", lambda *_: listing)
    names = ("mmdebstrap", "netavark", "podman", "runc")
    assert machine.missing_packages(names, machine.installed_packages(names)) == ["mmdebstrap", "podman"]


def test_packages_are_named_before_they_are_installed_and_recorded(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps: list[tuple[str, str]] = []
    monkeypatch.setattr(machine, "installed_packages", lambda _: ["podman"])
    monkeypatch.setattr(
        shell, "long_step", lambda command, *_: steps.append((" ".join(command), capsys.readouterr().out))
    )
    machine.install_packages(paths)
    (update, said), (install, _) = steps
    assert "apt-get update" in update
    assert "runc" in said
    assert "podman" not in said
    assert "DEBIAN_FRONTEND=noninteractive" in install
    assert "runc" in paths.installed.read_text().split()


def test_nothing_is_fetched_when_all_packages_are_there(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "installed_packages", list)
    monkeypatch.setattr(shell, "long_step", lambda *_: pytest.fail("ran a long step"))
    assert "all there" in machine.install_packages(paths)


# --- the cache


def test_the_cache_is_where_the_environment_says(tmp_path: Path) -> None:
    assert Paths.here({"TANDEM_LAB_CACHE": str(tmp_path / "x")}).cache == tmp_path / "x"
    assert Paths.here({"XDG_CACHE_HOME": str(tmp_path)}).cache == tmp_path / "tandem-lab"


def test_a_folder_with_other_files_is_never_taken(tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("dear")
    with pytest.raises(LabError, match="not the lab's"):
        Paths(repo=ROOT, cache=tmp_path).claim()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["letter"]


def test_clean_removes_nothing_that_is_not_the_labs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "letter").write_text("dear")
    monkeypatch.setenv("TANDEM_LAB_CACHE", str(tmp_path))
    monkeypatch.setattr(hosts, "wipe", lambda _: pytest.fail("wiped"))
    assert cli.main(["clean"]) == 1
    assert MARKER in capsys.readouterr().err
    assert (tmp_path / "letter").exists()


def test_two_caches_are_two_labs(tmp_path: Path) -> None:
    one, two = (Paths(repo=ROOT, cache=tmp_path / name) for name in ("a", "b"))
    assert one.run != two.run
    assert podman.subnets(one.key)[0] != podman.subnets(two.key)[0]


def test_mounts_below_a_folder_are_found_deepest_first() -> None:
    text = "x /c ext4\nx /c/storage/overlay ext4\nx /c/a\\040b tmpfs\nx /cc tmpfs\nx / ext4\n"
    assert hosts.mounts_below(text, Path("/c")) == ["/c/storage/overlay", "/c/a b", "/c"]


# --- podman


def test_limits_are_cut_to_what_the_machine_allows() -> None:
    assert podman.limit("unlimited", 1048576) == 1048576
    assert podman.limit("20000", 1048576) == 20000
    assert podman.limit("2000000\n", 1048576) == 1048576


def test_a_small_mtu_of_the_way_out_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "eth0").mkdir()
    (tmp_path / "eth0" / "mtu").write_text("1400\n")
    routes = "Iface Destination Gateway\neth1 0000FEA9 0\neth0 00000000 010200C0\n"
    assert podman.default_route_mtu(routes, tmp_path) == 1400
    (tmp_path / "eth0" / "mtu").write_text("1500\n")
    assert podman.default_route_mtu(routes, tmp_path) is None
    assert podman.default_route_mtu("Iface Destination Gateway\n", tmp_path) is None


def test_every_range_is_tried_once() -> None:
    tried = podman.subnets("deadbeef")
    assert len(tried) == len(set(tried)) == 250


def test_podman_gets_settings_of_the_labs_own(lab: Lab) -> None:
    command = lab.podman.command("ps")
    assert f"CONTAINERS_CONF={lab.paths.podman}/containers.conf" in command
    assert f"CONTAINERS_STORAGE_CONF={lab.paths.podman}/storage.conf" in command
    settings = (lab.paths.podman / "storage.conf").read_text()
    assert f'graphroot = "{lab.paths.storage}"' in settings
    assert 'runtime = "runc"' in (lab.paths.podman / "containers.conf").read_text()


# --- hosts


def arguments(runtimes: str) -> list[str]:
    spec = Spec("img", "bookworm", runtimes, "/repo/lab/models")
    return hosts.run_arguments("lab1", spec, "10.89.1.2", Path("/c/opt/bookworm"), Path("/c/hosts/lab1"))


def test_one_host_writes_the_shared_folder_and_others_see_it_through_an_overlay() -> None:
    assert "/c/opt/bookworm:/opt/tandem" in arguments("rw")
    assert "/c/opt/bookworm:/opt/tandem:O,upperdir=/c/hosts/lab1/upper,workdir=/c/hosts/lab1/work" in arguments("ro")


def test_models_are_read_only_and_nothing_is_published() -> None:
    assert "/repo/lab/models:/srv/models:ro" in arguments("rw")
    assert not [word for word in arguments("rw") if word.startswith(("--publish", "-p", "--privileged"))]


def test_addresses_are_used_in_turn() -> None:
    assert hosts.next_address("10.89.1.0/24", "", []) == "10.89.1.2"
    assert hosts.next_address("10.89.1.0/24", "10.89.1.2", []) == "10.89.1.3"
    assert hosts.next_address("10.89.1.0/24", "10.89.1.254", ["10.89.1.2"]) == "10.89.1.3"
    with pytest.raises(LabError, match="no free address"):
        hosts.next_address("10.89.1.0/30", "", ["10.89.1.2"])


@pytest.mark.parametrize("name", ["", "Lab", "1a", "a/b", "a b", "-a", "../x", "a" * 32])
def test_host_names_are_checked(name: str) -> None:
    with pytest.raises(LabError, match="expected lower-case"):
        hosts.check_name(name)


def inspected(spec: Spec, state: str) -> dict[str, Any]:
    """A host as podman shows it."""
    return {
        "Name": "lab1",
        "State": {"Status": state, "StartedAt": "2026-12-01T15:18:34.1Z"},
        "Config": {"Labels": {podman.LABEL: json.dumps(vars(spec))}, "CreateCommand": ["podman", "--ip", "10.89.1.2"]},
    }


@pytest.fixture
def made(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A lab with one stopped host lab1; `calls` are podman's."""
    recipe = image.recipe(lab.paths, "bookworm")
    spec = Spec(recipe.tag, "bookworm", "rw", str(lab.paths.models))
    state: dict[str, Any] = {"lab": lab, "spec": spec, "calls": []}
    text = inspected(spec, "exited")
    monkeypatch.setattr(podman.Podman, "containers", lambda _: [text])
    monkeypatch.setattr(podman.Podman, "call", lambda _, *words, **__: state["calls"].append(words) or "")
    monkeypatch.setattr(image, "ensure", lambda *_: (recipe, "cached"))
    monkeypatch.setattr(Lab, "wait", lambda *_: hosts._host(text))
    return state


def test_up_starts_a_stopped_host_that_is_as_wanted(made: dict[str, Any]) -> None:
    made["lab"].up("lab1", "bookworm", "rw")
    assert made["calls"] == [("start", "lab1")]


def test_up_never_replaces_a_host_that_was_made_otherwise(made: dict[str, Any]) -> None:
    with pytest.raises(LabError, match=r"runtimes rw \(now wanted: ro\).*lab/lab down lab1"):
        made["lab"].up("lab1", "bookworm", "ro")
    assert made["calls"] == []


def test_a_stopped_host_is_named_with_the_way_out(made: dict[str, Any]) -> None:
    with pytest.raises(LabError, match="lab1 is exited; `lab/lab up lab1`"):
        made["lab"].host("lab1")
    assert made["lab"].hosts()[0].address == "10.89.1.2"
    with pytest.raises(LabError, match="no lab host lab2; `lab/lab up lab2`"):
        made["lab"].host("lab2")


# --- the image


def test_an_image_is_named_after_its_content(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    before = image.recipe(paths, "bookworm")
    assert image.recipe(paths, "bookworm") == before
    assert image.recipe(paths, "trixie").digest != before.digest
    monkeypatch.setattr(image, "PACKAGES", (*image.PACKAGES, "htop"))
    assert image.recipe(paths, "bookworm").digest != before.digest


def test_an_unknown_image_is_refused(paths: Paths) -> None:
    with pytest.raises(LabError, match="expected one of bookworm, trixie"):
        image.recipe(paths, "sid")


def test_the_finishing_script_is_sound_shell(paths: Paths) -> None:
    script = image.recipe(paths, "bookworm").finish
    subprocess.run(["sh", "-n"], input=script, text=True, check=True)
    assert "PasswordAuthentication no" in script


def test_ssh_knows_every_host_by_one_key(lab: Lab) -> None:
    image.make_keys(lab.paths)
    assert (lab.paths.ssh / "known_hosts").read_text() == "tandem-lab ssh-ed25519 AAAAhost\n"
    assert "StrictHostKeyChecking=yes" in lab.ssh_options()


# --- inventory

HOST = Host("lab1", "10.89.1.2", "running", "", Spec("img", "bookworm", "rw", "/m"))


def test_the_inventory_says_how_to_reach_a_host_and_where_packages_come_from(lab: Lab, tmp_path: Path) -> None:
    bundle = tmp_path / "ca.crt"
    bundle.write_text("")
    environ = {"PIP_CERT": str(bundle), "PIP_INDEX_URL": "https://pypi.example.net/simple"}
    values = yaml.safe_load(inventory.render(inventory.host_vars(lab, HOST, environ)))
    assert values["ansible_host"] == "10.89.1.2"
    assert values["ansible_port"] == 22
    assert values["ansible_user"] == "operator"
    assert values["ansible_ssh_private_key_file"] == str(lab.paths.ssh / "login")
    assert f"UserKnownHostsFile={lab.paths.ssh / 'known_hosts'}" in values["ansible_ssh_common_args"]
    assert values["tandem_package_ca_file"] == str(bundle)
    assert values["tandem_package_index_url"] == "https://pypi.example.net/simple"


def test_without_settings_of_its_own_the_machine_uses_pypi_and_public_cas() -> None:
    assert inventory.package_index({}) == "https://pypi.org/simple"
    assert inventory.ca_file({}) == ""


def test_a_ca_bundle_that_is_not_there_is_an_error() -> None:
    with pytest.raises(LabError, match="SSL_CERT_FILE names /nowhere"):
        inventory.ca_file({"SSL_CERT_FILE": "/nowhere"})


def test_an_unchanged_inventory_is_not_written_again(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lab, "host", lambda *_: HOST)
    (file,) = inventory.write(lab, ["lab1"], tmp_path)
    assert file == tmp_path / "host_vars" / "lab1.yml"
    before = file.stat().st_mtime_ns
    inventory.write(lab, ["lab1"], tmp_path)
    assert file.stat().st_mtime_ns == before


# --- the control node's tools


def test_a_package_is_cut_out_of_the_lock_with_its_hashes() -> None:
    wanted = "uv==2.0 \\\n    --hash=sha256:22 \\\n    --hash=sha256:33\n"
    lock = f"a==1 \\\n    --hash=sha256:11\n    # via b\n{wanted}    # via c\n"
    assert venv.requirement(lock, "uv") == wanted
    with pytest.raises(LabError, match="pins no pip"):
        venv.requirement(lock, "pip")


def test_the_lock_pins_every_tool_of_the_control_node_with_hashes() -> None:
    lock = (ROOT / "requirements" / "control.txt").read_text()
    for line in (ROOT / "requirements" / "control.in").read_text().splitlines():
        if line and not line.startswith("#"):
            name = line.split(">")[0].lower()
            assert "--hash=sha256:" in venv.requirement(lock, name)


def test_tools_are_made_again_for_another_lock_or_interpreter_only(
    paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Paths(repo=paths.cache, cache=paths.cache)
    copy.lock.parent.mkdir()
    copy.lock.write_text("uv==1 \\\n    --hash=sha256:11\n")
    steps: list[str] = []

    def step(command: list[str], *_: Any) -> None:
        steps.append(" ".join(command))
        copy.venv.mkdir(exist_ok=True)

    monkeypatch.setattr(shell, "long_step", step)
    venv.ensure(copy, {})
    assert [("--require-hashes" in one) for one in steps] == [False, True, True]
    venv.ensure(copy, {})
    assert len(steps) == 3
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").symlink_to(BASE)  # as in an activated .venv
    venv.ensure(copy, {})
    assert len(steps) == 3
    copy.lock.write_text("uv==2 \\\n    --hash=sha256:22\n")
    venv.ensure(copy, {})
    assert len(steps) == 6


# --- the demo


def test_a_streamed_answer_is_put_together_from_its_events() -> None:
    lines = [
        b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n',
        b"\n",
        b'data: {"choices":[{"delta":{"content":"Pa"}}]}\n',
        b'data: {"choices":[{"delta":{"content":"ris"},"finish_reason":"stop"}]}\n',
        b"data: [DONE]\n",
    ]
    assert list(demo.deltas(lines)) == ["Pa", "ris"]


def test_a_stream_that_just_ends_is_an_error() -> None:
    with pytest.raises(LabError, match="without"):
        list(demo.deltas([b'data: {"choices":[{"delta":{"content":"Pa"}}]}\n']))


def test_an_answer_is_right_only_if_it_is_the_expected_one() -> None:
    assert demo.Answer("q", "Paris", " Paris\n", 0, 0.0, 1.0).right
    assert not demo.Answer("q", "Paris", "Paris Paris", 0, 0.0, 1.0).right


def test_ansibles_recap_is_read_in_colour_and_without() -> None:
    plain = "lab1                       : ok=33   changed=2    unreachable=0    failed=0    skipped=4"
    colour = (
        "\x1b[0;33mlab1\x1b[0m      : \x1b[0;32mok=33  \x1b[0m \x1b[0;33mchanged=2   \x1b[0m unreachable=0    failed=0"
    )
    assert demo.recap_of(plain) == demo.recap_of(colour) == "33 tasks ok, 2 changed"
    assert demo.recap_of("ok: [lab1]") == ""


def test_units_are_shown_by_instance_and_state() -> None:
    listing = (
        "tandem-decode-0.service  loaded activating start   Tandem decode-0\n"
        "tandem-router.service    loaded active     running Tandem router\n"
        "tandem-x.service         not-found inactive dead tandem-x.service\n"
    )
    assert demo.unit_states(listing) == "decode-0 activating, router active"


# --- checks


def test_pytests_closing_line_is_counted() -> None:
    assert checks.tests_counted("\x1b[31m=== 2 failed, 40 passed, 1 skipped in 12.30s (0:00:12) ===\x1b[0m\n") == {
        "failed": 2,
        "passed": 40,
        "skipped": 1,
    }
    assert checks.tests_counted("  \x1b[2m│\x1b[0m 2 passed in 1.20s\n") == {"passed": 2}
    assert checks.tests_counted("1 passed, 3 errors in 0.10s\n") == {"passed": 1, "failed": 3}
    assert not checks.tests_counted("tests/unit/test_lab.py::test_x passed\n")


def test_the_whole_stack_is_tested_last(tmp_path: Path) -> None:
    for name in ("site", "zeta", "drill_kill", "decode_server", "site_two", "shared"):
        (tmp_path / "molecule" / name).mkdir(parents=True)
        if name != "shared":
            (tmp_path / "molecule" / name / "molecule.yml").write_text("---\n")
    assert checks.scenarios(tmp_path) == ["decode_server", "drill_kill", "zeta", "site", "site_two"]


def test_a_failed_stage_fails_the_run_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = checks.Outcome(rows=[("ruff check", 0.1, False), ("unit tests", 3.0, True)])
    outcome.counts["passed"] = 7
    assert checks.close(outcome, say.Stages(), ["molecule site"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "failed: ruff check" in lines
    assert lines[-1] == "7 passed, 1 failed"
    assert any("molecule site" in line and "not run" in line for line in lines)


def test_a_stage_passes_its_output_on_and_counts_it(paths: Paths, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = checks.Outcome()
    checks.stage(paths, outcome, "x", ["sh", "-c", "printf hel; echo lo; echo '3 passed in 0.1s'; exit 1"])
    assert "hello" in capsys.readouterr().out
    assert outcome.counts["passed"] == 3
    assert outcome.failed == ["x"]


# --- what is printed


def test_durations_and_sizes_read_well() -> None:
    assert [say.duration(seconds) for seconds in (0.42, 9.96, 71.4, 253)] == ["0.4 s", "10.0 s", "71 s", "4 min 13 s"]
    assert [say.size(count) for count in (812, 34_100, 5 * 10**6, 11.24e9)] == ["812 B", "34 kB", "5 MB", "11.2 GB"]


def test_a_silent_step_shows_that_it_is_alive(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(say, "TICK_PLAIN", 0.01)
    shown = ""
    with say.Ticker("waiting", lambda: "decode-0 activating"):
        deadline = time.monotonic() + 5
        while not shown and time.monotonic() < deadline:
            shown = capsys.readouterr().out
    assert "… waiting, 0 s: decode-0 activating" in shown


def test_a_failed_long_step_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="the reason"):
        shell.long_step(["sh", "-c", "echo the reason; exit 3"], "step", tmp_path / "log")


def test_an_error_is_one_message_and_status_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANDEM_LAB_CACHE", str(tmp_path / "cache"))
    assert cli.main(["up", "NoSuchName"]) == 1
    assert capsys.readouterr().err.startswith("error: host name 'NoSuchName'")
