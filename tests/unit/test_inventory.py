"""What the inventory alone can tell: every fault at once, and the plan that follows from a sound one."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.tandem.problems import TandemError
from inventories import PAIR, ROOT, SOUND, one, plan, write


def refused(inventory: Path, host: str = "gpu1", **extra: Any) -> str:
    with pytest.raises(TandemError) as error:
        plan(inventory, host, extra)
    return str(error.value)


def pair(**changes: Any) -> list[dict[str, Any]]:
    """The sound pair with `decode` or `prefill` changed by dicts; None removes a key."""
    rows = copy.deepcopy(PAIR)
    for row in rows:
        for key, value in changes.get(row["role"], {}).items():
            row[key] = value
            if value is None:
                del row[key]
    return rows


def test_a_sound_inventory_gives_a_plan(tmp_path: Path) -> None:
    made, warnings = plan(one(tmp_path))
    assert [instance["name"] for instance in made["instances"]] == ["prefill-0", "decode-0", "router"]
    assert made["model"]["path"] == "/var/lib/tandem/models/a-model/r1"
    assert [router["url"] for router in made["routers"]] == ["http://127.0.0.1:30000"]
    assert warnings == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tandem_instances": pair(decode={"gpus": [1, 2]})}, ["GPU 1 in prefill-0 and decode-0", "one instance"]),
        ({"tandem_instances": pair(decode={"gpus": []})}, ["tandem_instances[1].gpus", "no GPU"]),
        ({"tandem_instances": pair(decode={"port": 30001})}, ["port 30001 for prefill-0 (port) and decode-0 (port)"]),
        ({"tandem_instances": pair(decode={"port": 31001})}, ["for prefill-0 (port) and decode-0 (dist-init port)"]),
        ({"tandem_instances": pair(decode={"port": 30000})}, ["port 30000 for decode-0 (port) and router"]),
        ({"tandem_instances": pair(prefill={"bootstrap_port": None})}, ["tandem_instances[0].bootstrap_port", "none"]),
        ({"tandem_instances": pair(decode={"bootstrap_port": 8999})}, ["belongs to a prefill"]),
        ({"tandem_instances": pair(decode={"role": "decoder"})}, ["decoder", "prefill, decode"]),
        (
            {"tandem_instances": pair(decode={"numa": 1})},
            ["tandem_instances.numa. Supported parameters include", "numa_node", "roles/tandem/README.md"],
        ),
        ({"tandem_instances": pair(decode={"numa_node": -1})}, ["tandem_instances[1].numa_node", "-1"]),
        ({"tandem_instances": pair(decode={"name": "Decode 0"})}, ["'Decode 0'", "lower-case"]),
        ({"tandem_instances": PAIR[:1]}, ["no decode", "at least one"]),
        ({"tandem_instances": []}, ["no instance"]),
        ({"tandem_pagesize": 64}, ["unknown setting tandem_pagesize", "did you mean tandem_page_size?"]),
        ({"decode_server_memfraction": 0.5}, ["unknown setting decode_server_memfraction"]),
        ({"tandem_context_length": "long"}, ["tandem_context_length", "type int"]),
        ({"tandem_extra_args": ["--chunked-prefil-size", "1"]}, ["--chunked-prefil-size", "--chunked-prefill-size?"]),
        ({"decode_server_extra_args": ["--cuda-graph-max-bs", "8"]}, ["abbreviation", "--cuda-graph-max-bs-decode"]),
        ({"tandem_extra_args": ["--port", "1"]}, ["--port, which Tandem renders itself", "tandem_instances"]),
        ({"tandem_extra_args": ["--tensor-parallel-size", "4"]}, ["which Tandem renders itself"]),
        ({"prefill_server_extra_args": ["--dtype", "half"]}, ["--dtype for one role", "must agree"]),
        ({"decode_server_extra_args": ["--speculative-num-steps", "1"]}, ["for one role", "must agree"]),
        ({"decode_server_env": {"SGLANG_DSV4_KV_LAYOUT": "v3"}}, ["SGLANG_DSV4_KV_LAYOUT for one role"]),
        ({"tandem_env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}, ["nixl#1754"]),
        ({"tandem_env": {"CUDA_VISIBLE_DEVICES": "0"}}, ["CUDA_VISIBLE_DEVICES, which Tandem sets itself"]),
        ({"tandem_kv_cache_dtype": "fp7"}, ["tandem_kv_cache_dtype", "fp7", "fp8_e4m3"]),
        ({"tandem_moe_runner_backend": "tritn"}, ["did you mean triton?"]),
        ({"tandem_bootstrap_timeout": 300}, ["tandem_bootstrap_timeout", "under 300 s"]),
        ({"prefill_server_mem_fraction_static": 70}, ["70", "between 0 and 1"]),
        ({"tandem_address": "gpu1.example.net"}, ["tandem_address", "an IP address"]),
        ({"tandem_address": "10.0.0.1"}, ["tandem_net_device", "10.0.0.1"]),
        ({"tandem_engine": "sglang-9"}, ["'sglang-9'", "sglang-0.5.23"]),
        ({"router_release": "sglang-0.5.23"}, ["router_release", "sglang-router-0.3.2"]),
        ({"tandem_engine": "sglang-router-0.3.2"}, ["tandem_engine", "sglang-0.5.23"]),
        ({"router_host": "0.0.0.0"}, ["router_control_plane_key", "no key", "share the port"]),
        ({"router_control_plane_key": "short"}, ["a key of 5 characters", "{32,}"]),
        ({"router_policy": "robin"}, ["router_policy", "round_robin"]),
        ({"tandem_model_name": "org/model"}, ["'org/model'", "one path segment"]),
        ({"tandem_model_name": "{{ nowhere }}"}, ["tandem_model_name", "nowhere"]),
        ({"tandem_keep_releases": 1}, ["tandem_keep_releases", "2 or more"]),
        ({"model_sync_manifest": "nowhere.sha256"}, ["model_sync_manifest", "no file", "nowhere.sha256"]),
        ({"tandem_kernels": [{"name": "k", "source": "nowhere"}]}, ["no directory", "nowhere"]),
        ({"tandem_kernels": [{"name": "k", "kind": "wheel", "source": "x.whl"}]}, ["no wheel", "x.whl"]),
    ],
)
def test_bad_input(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    message = refused(one(tmp_path, **changes))
    for word in words:
        assert word in message
    assert "nothing was touched" in message
    # Where to change it: the setting's own line.
    assert f"{tmp_path}/group_vars/all.yml:" in message or "(gpu1): found" in message or "of the group" in message


def test_a_fault_names_file_and_line(tmp_path: Path) -> None:
    message = refused(one(tmp_path, tandem_context_length="long"))
    assert f"{tmp_path}/group_vars/all.yml:" in message


def test_all_faults_at_once(tmp_path: Path) -> None:
    message = refused(one(tmp_path, tandem_pagesize=64, tandem_context_length="long"))
    assert "(2 to mend)" in message


@pytest.mark.parametrize("name", ["tandem_model_name", "tandem_model_revision", "model_sync_source"])
def test_required_settings_have_no_default(tmp_path: Path, name: str) -> None:
    fleet = {key: value for key, value in SOUND.items() if key != name}
    message = refused(write(tmp_path, {"gpu1": {}}, ["gpu1"], ["gpu1"], **fleet))
    assert f"{name} (gpu1): found nothing" in message


@pytest.mark.parametrize(("gpu", "router", "empty"), [(["gpu1"], [], "tandem_router"), ([], ["gpu1"], "tandem_gpu")])
def test_an_empty_group(tmp_path: Path, gpu: list[str], router: list[str], empty: str) -> None:
    message = refused(write(tmp_path, {"gpu1": {}}, gpu, router, **SOUND))
    assert f"group {empty}: found no host" in message


def two_hosts(folder: Path, first: dict[str, Any], second: dict[str, Any], **fleet: Any) -> Path:
    hosts = {
        "gpu1": {"tandem_address": "10.0.0.1", "tandem_net_device": "eth0", **first},
        "gpu2": {"tandem_address": "10.0.0.2", "tandem_net_device": "eth0", **second},
        "front": {"tandem_address": "10.0.0.9", "tandem_net_device": "eth0"},
    }
    return write(folder, hosts, ["gpu1", "gpu2"], ["front"], **{**SOUND, **fleet})


def test_workers_come_from_the_whole_inventory(tmp_path: Path) -> None:
    made, _warnings = plan(two_hosts(tmp_path, {}, {}), "front")
    argv = made["instances"][0]["argv"]
    assert [argv[index + 1] for index, word in enumerate(argv) if word == "--prefill"] == [
        "http://10.0.0.1:30001",
        "http://10.0.0.2:30001",
    ]
    assert [argv[index + 2] for index, word in enumerate(argv) if word == "--prefill"] == ["8998", "8998"]
    assert argv.count("--decode") == 2
    assert [instance["kind"] for instance in made["instances"]] == ["router"]


def test_hosts_that_disagree(tmp_path: Path) -> None:
    message = refused(two_hosts(tmp_path, {"tandem_page_size": 64}, {"tandem_page_size": 128}))
    assert "64 here and 128 on gpu2" in message


def test_two_hosts_with_one_address(tmp_path: Path) -> None:
    message = refused(two_hosts(tmp_path, {}, {"tandem_address": "10.0.0.1"}), "front")
    assert "http://10.0.0.1:30001 for a server of each" in message


def test_a_fleet_value_wins_over_the_class_and_extra_vars_over_both(tmp_path: Path) -> None:
    inventory = one(tmp_path, tandem_page_size=64)
    made, _warnings = plan(inventory)
    assert "64" in made["instances"][0]["argv"]
    made, _warnings = plan(inventory, extra={"tandem_page_size": 128})
    assert "128" in made["instances"][0]["argv"]


def test_triton_without_kernels_is_warned_about(tmp_path: Path) -> None:
    sm120 = {"tandem_compute_capability": "12.0", "tandem_moe_runner_backend": "triton"}
    _made, warnings = plan(one(tmp_path, **sm120))
    assert "without kernel packages" in warnings[0]
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel" / "a_kernel.py").write_text("")
    kernels = [{"name": "k", "source": str(tmp_path / "kernel")}]
    _made, warnings = plan(one(tmp_path, **sm120, tandem_kernels=kernels))
    assert warnings == []


def test_kernels_reach_the_roles_that_they_declare(tmp_path: Path) -> None:
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel" / "a_kernel.py").write_text("")
    kernels = [{"name": "k", "source": str(tmp_path / "kernel"), "env": {"SWITCH": 1}, "roles": ["decode"]}]
    made, _warnings = plan(one(tmp_path, tandem_kernels=kernels))
    prefill, decode = made["instances"][:2]
    assert decode["env"]["SWITCH"] == "1"
    assert decode["env"]["PYTHONPATH"] == f"/opt/tandem/kernels/{made['kernels'][0]['id']}"
    assert "SWITCH" not in prefill["env"]
    assert f"/opt/tandem/kernels/{made['kernels'][0]['id']}" in decode["needs"]


def test_a_start_limit_trips_for_an_engine_that_dies_a_minute_after_its_load(tmp_path: Path) -> None:
    made, _warnings = plan(one(tmp_path, tandem_start_timeout=900, tandem_start_limit_burst=4))
    instance = made["instances"][0]
    slowest_cycle = 900 + 60 + 65 + 10
    assert instance["start_limit_interval"] >= 4 * slowest_cycle


def test_a_stop_waits_for_the_longest_request(tmp_path: Path) -> None:
    made, _warnings = plan(one(tmp_path, tandem_request_timeout=1234))
    prefill, decode, router = (instance["stop_timeout"] for instance in made["instances"])
    assert prefill == decode == 1234 + 25
    assert router == 1234 + 600 + 25, "held requests are finished too"


def test_the_key_is_in_no_plan(tmp_path: Path) -> None:
    key = "k" * 40
    made, _warnings = plan(one(tmp_path, router_host="0.0.0.0", router_control_plane_key=key))
    router = made["instances"][2]
    assert key not in json.dumps(made)
    assert router["argv"][1:4] == [
        "/var/lib/tandem/releases/router/@RELEASE@/unit_helper.py",
        "with-key",
        "sglang_router.launch_router",
    ]
    other, _warnings = plan(one(tmp_path, router_host="0.0.0.0", router_control_plane_key="o" * 40))
    assert other["instances"][2]["key_sha256"] != router["key_sha256"]


def test_the_irregular_set_reaches_the_environment(tmp_path: Path) -> None:
    made, _warnings = plan(one(tmp_path, tandem_instances=pair(prefill={"gpus": [0, 3, 1]}, decode={"gpus": [2]})))
    prefill, decode = made["instances"][:2]
    assert prefill["env"]["CUDA_VISIBLE_DEVICES"] == "0,3,1,2"
    assert "CUDA_VISIBLE_DEVICES" not in decode["env"]


@pytest.mark.parametrize(
    ("name", "host"),
    [("example_host", "gpu1"), ("example_fleet", "gpu1"), ("example_fleet", "gpu2"), ("example_fleet", "front1")],
)
def test_example_inventories_are_sound(name: str, host: str) -> None:
    secret = {"vault_router_control_plane_key": "k" * 40}
    made, _warnings = plan(ROOT / "inventory" / name, host, secret, check_files=False)
    assert made["instances"]
