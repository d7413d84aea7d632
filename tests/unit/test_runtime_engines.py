"""The data of engines/: what each release says of itself holds together."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.tandem import uv
from ansible.module_utils.tandem.flags import FlagSet
from ansible.module_utils.tandem.preflight import satisfies, version_key
from by_path import load

ROOT = Path(__file__).resolve().parents[2]
ENGINES = sorted(path.parent for path in ROOT.glob("engines/*/engine.yml"))
SERVERS = [engine for engine in ENGINES if engine.name.startswith("sglang-0")]
KEYS = {"kind", "version", "entry", "flags", "ready_path", "import_check"}
KEYS |= {"requires_python", "glibc", "packages", "disk_gib"}
SERVER_KEYS = {"cuda", "min_driver", "packages_cuda", "works_with"}

every_engine = pytest.mark.parametrize("engine", ENGINES, ids=lambda path: path.name)
every_server = pytest.mark.parametrize("engine", SERVERS, ids=lambda path: path.name)


def data(engine: Path) -> dict[str, Any]:
    return dict(yaml.safe_load((engine / "engine.yml").read_text(encoding="utf-8")))


def lock(engine: Path) -> str:
    return (engine / "requirements.lock").read_text(encoding="utf-8")


def flags(engine: Path) -> dict[str, Any]:
    return dict(json.loads((engine / data(engine)["flags"]).read_text(encoding="utf-8")))


def test_there_are_two_servers_and_two_routers() -> None:
    kinds = [data(engine)["kind"] for engine in ENGINES]
    assert sorted(kinds) == ["router", "router", "server", "server"]


@every_engine
def test_it_has_the_facts_that_are_read(engine: Path) -> None:
    assert set(data(engine)) >= KEYS | (SERVER_KEYS if data(engine)["kind"] == "server" else set())


@every_engine
def test_name_version_lock_and_flags_are_of_one_release(engine: Path) -> None:
    name, _, version = engine.name.rpartition("-")
    assert data(engine)["version"] == version == flags(engine)["version"]
    assert (name, version) in set(uv.pins(lock(engine)))


@every_engine
def test_the_lock_has_a_hash_for_every_package_and_tells_nothing_of_the_machine(engine: Path) -> None:
    for block in re.split(r"\n(?=\S)", lock(engine)):
        if "==" in block.partition("\n")[0]:
            assert "--hash=sha256:" in block, block[:80]
    assert not re.search(r"^#.*|file:|/tmp|/home|/root", lock(engine), re.MULTILINE)


@every_engine
def test_the_lock_is_of_what_is_asked_for(engine: Path) -> None:
    asked = set(uv.pins((engine / "requirements.in").read_text(encoding="utf-8")))
    assert asked
    assert asked <= set(uv.pins(lock(engine)))


@every_engine
def test_the_supported_systems_pythons_are_in_its_range(engine: Path) -> None:
    for system in ("3.11.2", "3.12.3", "3.13.5"):
        assert satisfies(system, data(engine)["requires_python"]), system


@every_engine
def test_its_flags_are_those_of_a_real_parser(engine: Path) -> None:
    known = FlagSet.load(engine.name, flags(engine)).by_name
    expected = {"--host", "--port", "--log-level"}
    expected |= (
        {"--disaggregation-mode", "--disaggregation-bootstrap-port", "--base-gpu-id", "--moe-runner-backend"}
        if data(engine)["kind"] == "server"
        else {"--pd-disaggregation", "--prefill", "--decode", "--policy"}
    )
    assert expected <= set(known)


@every_server
def test_ready_exists_from_0_5_20(engine: Path) -> None:
    facts = data(engine)
    assert facts["ready_path"] == ("/ready" if version_key(facts["version"]) >= (0, 5, 20) else "/health")


@every_server
def test_only_the_nixl_of_its_cuda_is_installed(engine: Path) -> None:
    text = lock(engine)
    assert re.search(r"^nixl==1\.5\.1 \\$", text, re.MULTILINE)
    assert re.search(r"^nixl-cu13==1\.5\.1 \\$", text, re.MULTILINE)
    assert re.search(r"^nixl-cu12==1\.5\.1 ; sys_platform == 'never' \\$", text, re.MULTILINE)


@every_server
def test_the_cuda_compiler_is_of_the_headers_release(engine: Path) -> None:
    pins = dict(uv.pins(lock(engine).replace("sys_platform == 'darwin'", "")))
    family = data(engine)["cuda"] + "."
    for package in ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-cccl"):
        assert pins[package].startswith(family), package
    assert re.search(rf"^nvidia-cuda-runtime=={re.escape(family)}", lock(engine), re.MULTILINE)


@every_server
def test_a_pair_of_one_release_is_known_to_work(engine: Path) -> None:
    assert engine.name in data(engine)["works_with"]
    assert set(data(engine)["works_with"]) <= {server.name for server in SERVERS}


def test_the_dump_of_a_parser_is_complete_and_the_same_each_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine_flags = load("tools", "engine_flags")
    package = tmp_path / "smg"
    (tmp_path / "smg-9.9.dist-info").mkdir()
    (tmp_path / "smg-9.9.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: smg\nVersion: 9.9\n")
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "router_args.py").write_text(
        "print('noise')\n"
        "class RouterArgs:\n"
        "    @staticmethod\n"
        "    def add_cli_args(parser, use_router_prefix):\n"
        "        assert use_router_prefix is False\n"
        "        parser.add_argument('--policy', '-p', choices=['b', 1, 'a'], default=('x', 2), help='h' * 400)\n"
        "        parser.add_argument('--pd', action='store_true')\n"
        "        parser.add_argument('positional')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "smg"]:
        monkeypatch.delitem(sys.modules, name)

    assert engine_flags.main(["smg"]) == 0
    out = capsys.readouterr()
    dumped = json.loads(out.out)
    assert "noise" in out.err
    assert dumped["version"] == "9.9"
    assert [row["flags"] for row in dumped["flags"]] == [["-h", "--help"], ["--policy", "-p"], ["--pd"]]
    assert dumped["flags"][1] == {
        "flags": ["--policy", "-p"],
        "dest": "policy",
        "action": "_StoreAction",
        "nargs": None,
        "choices": ["1", "a", "b"],
        "default": ["x", 2],
        "help": "h" * 300,
    }
