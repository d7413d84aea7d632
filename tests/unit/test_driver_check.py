"""driver_check: what nvidia-smi and sysfs say, judged against what the inventory declares.

The facts of one H200 are recorded. Those of eight RTX PRO 6000 are fabricated: lab/gpu_standin/standin.py
makes them out of the H200's record, and sysfs is a tree in a temporary folder.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tandem_driver_check
from ansible.module_utils.tandem import nvidia, preflight
from ansible.module_utils.tandem.findings import Finding, count, override, read_overrides, table
from ansible.module_utils.tandem.nvidia import SmiFault, SmiReport, ToolAnswer
from ansible.module_utils.tandem.preflight import CHECKS, HostFacts, Placement, Wanted, judge_host
from ansible.module_utils.tandem.topology import (
    NumaNodes,
    numa_nodes,
    nvidia_cards,
    parse_list,
    pci_numa_node,
)
from gpu_standin import standin
from module_run import run_module

STANDIN = Path(standin.__file__).resolve().parent
X8 = STANDIN / "hosts/rtx_pro_6000_x8.json"
RECORDED = (STANDIN / "h200.xml").read_text(encoding="utf-8")


def described(path: Path = X8) -> dict[str, Any]:
    description: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return description


def smi_of(description: dict[str, Any]) -> SmiReport:
    return nvidia.parse(standin.xml_of(description))


def healthy() -> HostFacts:
    smi = smi_of(described())
    return HostFacts(
        smi=smi,
        gpu_nodes={gpu.pci: 0 if gpu.index < 4 else 1 for gpu in smi.gpus},
        cards_on_bus=tuple(gpu.pci for gpu in smi.gpus),
        loaded_driver="580.159.04",
        nodes=NumaNodes((0, 1), (0, 1), (0, 1)),
        systemd="252",
        glibc="2.36",
        kernel="6.1.0-30-amd64",
        python="3.11.2",
        numactl="/usr/bin/numactl",
    )


SPLIT = Wanted(
    device="cuda",
    placements=(Placement("prefill-0", (0, 1, 2, 3), 0), Placement("decode-0", (4, 5, 6, 7), 1)),
    min_driver="580.65.06",
    min_glibc="2.34",
    requires_python=">=3.11,<3.14",
    gpu_model="RTX PRO 6000 Blackwell",
    min_gpu_memory_gib=95,
)


def broken(findings: list[Finding]) -> dict[str, Finding]:
    return {row.id: row for row in findings if row.status in ("fail", "warn")}


# -- nvidia-smi


def test_the_recorded_h200_is_read() -> None:
    report = nvidia.parse(RECORDED)
    assert (report.driver_version, report.cuda_version) == ("580.159.04", "13.0")
    assert report.gpus == (nvidia.Gpu(0, 0, "0000:00:06.0", "NVIDIA H200", 143771),)


def test_the_standin_prints_the_recording_when_it_describes_that_host() -> None:
    assert standin.xml_of(described(STANDIN / "hosts/h200_x1.json")) == RECORDED


def test_cards_are_counted_in_pci_order_whatever_the_tool_lists_first() -> None:
    description = described()
    description["gpus"].reverse()
    gpus = smi_of(description).gpus
    assert [gpu.pci[5:7] for gpu in gpus] == ["11", "12", "13", "14", "a1", "a2", "a3", "a4"]
    assert [gpu.listed for gpu in gpus] == [7, 6, 5, 4, 3, 2, 1, 0]


def test_pci_order_is_by_number_and_wide_domains_keep_their_digits() -> None:
    assert nvidia.sysfs_address("00010000:E1:00.0") == "10000:e1:00.0"
    assert nvidia.pci_key("0000:9:00.0") < nvidia.pci_key("0000:10:00.0") < nvidia.pci_key("10000:01:00.0")


def test_a_card_in_trouble_has_no_memory_rather_than_a_wrong_one() -> None:
    description = described()
    description["gpus"][2]["memory_mib"] = "[Unknown Error]"
    assert [gpu.memory_mib for gpu in smi_of(description).gpus][2] is None


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], None]:
    """Puts the stand-in on the PATH, with a description."""

    def put(description: dict[str, Any]) -> None:
        target = tmp_path / "description.json"
        target.write_text(json.dumps(description), encoding="utf-8")
        monkeypatch.setenv("TANDEM_GPU_STANDIN", str(target))
        monkeypatch.setenv("PATH", f"{STANDIN}:/usr/bin:/bin")

    return put


def test_no_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia.query(1.0).fault == SmiFault("missing", "nvidia-smi is not on the PATH")


def test_an_nvidia_smi_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/no/such/interpreter\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    fault = nvidia.query(1.0).fault
    assert fault is not None
    assert fault.kind == "failed"
    assert "does not start: No such file or directory" in fault.detail


def test_a_hanging_nvidia_smi_costs_its_time_and_no_more(on_path: Callable[[dict[str, Any]], None]) -> None:
    on_path({**described(), "behaviour": "hang"})
    begin = time.monotonic()
    assert nvidia.query(0.5).fault == SmiFault("timeout", "no answer within 0.5 s")
    assert time.monotonic() - begin < 0.5 + nvidia.KILL_GRACE_S + 1.0


def test_a_tool_that_cannot_be_killed_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one in uninterruptible sleep: the signal goes nowhere, and nothing waits for it."""
    processes: list[subprocess.Popen[bytes]] = []

    def ignored(process: subprocess.Popen[bytes]) -> None:
        processes.append(process)

    monkeypatch.setattr(subprocess.Popen, "kill", ignored)
    begin = time.monotonic()
    assert nvidia.run_tool(("sleep", "30"), 0.1).exit_code is None
    assert time.monotonic() - begin < 0.1 + nvidia.KILL_GRACE_S + 1.0
    [process] = processes
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_a_grandchild_that_keeps_the_output_open_holds_nobody_up() -> None:
    begin = time.monotonic()
    answer = nvidia.run_tool(("sh", "-c", "echo said; sleep 5 & exit 3"), 10)
    assert answer == ToolAnswer(3, "said\n", "")
    assert time.monotonic() - begin < 4


FAILURES = {
    "Failed to initialize NVML: Driver/library version mismatch": "reload the nvidia modules",
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.": "modprobe nvidia",
    "No devices were found": "lspci",
    "Unable to determine the device handle for GPU0000:A2:00.0: Unknown Error": "read dmesg for XID",
}


@pytest.mark.parametrize("message", FAILURES)
def test_a_failing_nvidia_smi_is_a_finding_with_its_own_fix(
    message: str, on_path: Callable[[dict[str, Any]], None]
) -> None:
    on_path({**described(), "behaviour": "fail", "message": message, "exit_code": 9})
    smi = nvidia.query(10)
    assert smi.fault == SmiFault("failed", f"exit code 9: {message}")
    findings = judge_host(replace(healthy(), smi=smi), SPLIT)
    assert list(broken(findings)) == ["nvidia_smi"]
    assert FAILURES[message] in broken(findings)["nvidia_smi"].fix
    skipped = {row.id for row in findings if row.status == "skip"}
    assert skipped == {"gpu_count", "gpu_declared", "gpu_order", "gpu_model", "gpu_memory", "gpu_numa"}


def test_half_an_answer_still_names_the_cards_it_got_to() -> None:
    report = nvidia.read_answer(ToolAnswer(15, RECORDED, "GPU is lost\n"), 1)
    assert report.fault == SmiFault("failed", "exit code 15: GPU is lost")
    assert len(report.gpus) == 1


@pytest.mark.parametrize("output", ["", "Tue Dec  1\n+-----+", "<html/>", RECORDED.replace("00000000:00:06.0", "x")])
def test_an_answer_that_is_no_answer(output: str) -> None:
    fault = nvidia.read_answer(ToolAnswer(0, output, ""), 1).fault
    assert fault is not None
    assert fault.kind == "unreadable"


# -- sysfs


@pytest.mark.parametrize(
    ("text", "numbers"), [("0\n", (0,)), ("0-1", (0, 1)), ("0,2-4,9", (0, 2, 3, 4, 9)), ("\n", ())]
)
def test_the_kernels_list_format(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_list(text) == numbers


def test_nodes_and_cards_are_read_from_sysfs(tmp_path: Path) -> None:
    nodes = tmp_path / "devices/system/node"
    nodes.mkdir(parents=True)
    for name, text in {"online": "0-2", "has_cpu": "0-1", "has_memory": "0-2"}.items():
        (nodes / name).write_text(text + "\n", encoding="ascii")
    for address, vendor, kind, node in (
        ("0000:a1:00.0", "0x10de", "0x030200", "1"),
        ("0000:11:00.0", "0x10de", "0x030000", "-1"),
        ("0000:11:00.1", "0x10de", "0x040300", "0"),  # the sound function of the same card
        ("0000:00:02.0", "0x8086", "0x030000", "0"),
    ):
        device = tmp_path / "bus/pci/devices" / address
        device.mkdir(parents=True)
        for name, text in {"vendor": vendor, "class": kind, "numa_node": node}.items():
            (device / name).write_text(text + "\n", encoding="ascii")
    assert numa_nodes(tmp_path) == NumaNodes((0, 1, 2), (0, 1), (0, 1, 2))
    assert nvidia_cards(tmp_path) == ("0000:11:00.0", "0000:a1:00.0")
    assert pci_numa_node("0000:a1:00.0", tmp_path) == 1
    assert pci_numa_node("0000:11:00.0", tmp_path) == -1
    assert pci_numa_node("0000:99:00.0", tmp_path) is None


def test_a_kernel_without_numa_has_no_nodes(tmp_path: Path) -> None:
    assert numa_nodes(tmp_path) == NumaNodes()


@pytest.mark.parametrize(
    "text",
    [
        # The open module, as recorded on the H200; then the other module, as NVIDIA's documentation shows it.
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (nixbld@)  \nGCC version:",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Release Build  (dvs-builder)\nGCC version: 12.2\n",
    ],
)
def test_the_loaded_module_names_its_version(text: str) -> None:
    assert preflight.read_loaded_driver(text) == "580.159.04"


# -- the checks


def test_a_healthy_host_has_no_finding() -> None:
    findings = judge_host(healthy(), SPLIT)
    assert {row.status for row in findings} == {"pass"}
    assert [row.id for row in findings] == [check.id for check in CHECKS]


def without_gpu(facts: HostFacts, lost: int) -> HostFacts:
    """The host after one card fell off: those behind it move up by one."""
    description = described()
    del description["gpus"][lost]
    return replace(facts, smi=smi_of(description))


def moved(facts: HostFacts, gpu: int, node: int | None) -> HostFacts:
    return replace(facts, gpu_nodes={**facts.gpu_nodes, facts.smi.gpus[gpu].pci: node})


def with_gpu(facts: HostFacts, index: int, **changes: Any) -> HostFacts:
    gpus = list(facts.smi.gpus)
    gpus[index] = replace(gpus[index], **changes)
    return replace(facts, smi=replace(facts.smi, gpus=tuple(gpus)))


def swapped(facts: HostFacts) -> HostFacts:
    return with_gpu(with_gpu(facts, 0, listed=1), 1, listed=0)


NO_CARDS = SmiReport("580.159.04", "13.0")
# id of the finding that must appear, what broke, and a text that the finding must hold
FAULTS: list[tuple[str, str, Callable[[HostFacts], HostFacts], str]] = [
    (
        "nvidia_smi",
        "missing",
        lambda f: replace(f, smi=SmiReport(fault=SmiFault("missing", "no"))),
        "install",
    ),
    (
        "nvidia_smi",
        "hangs",
        lambda f: replace(f, smi=SmiReport(fault=SmiFault("timeout", "no"))),
        "persistenced",
    ),
    (
        "nvidia_smi",
        "no xml",
        lambda f: replace(f, smi=SmiReport(fault=SmiFault("unreadable", "no"))),
        "something else",
    ),
    ("driver_loaded", "no module", lambda f: replace(f, loaded_driver=""), "no nvidia module is loaded"),
    ("driver_loaded", "other module", lambda f: replace(f, loaded_driver="570.86.15"), "570.86.15 is loaded"),
    (
        "driver_version",
        "old",
        lambda f: replace(f, smi=replace(f.smi, driver_version="570.211.01")),
        "570.211.01",
    ),
    (
        "driver_version",
        "just below",
        lambda f: replace(f, smi=replace(f.smi, driver_version="580.65.05")),
        "580.65.06",
    ),
    ("gpu_count", "one lost", lambda f: without_gpu(f, 6), "7 by nvidia-smi, 8 on the PCI bus"),
    ("gpu_count", "no card, no error", lambda f: replace(f, smi=NO_CARDS), "0 by nvidia-smi"),
    ("gpu_declared", "one lost", lambda f: without_gpu(f, 6), "no GPU 7, which decode-0 uses"),
    ("gpu_order", "scrambled", swapped, "0000:11:00.0 is 0 here and 1 there"),
    ("gpu_model", "other model", lambda f: with_gpu(f, 5, name="NVIDIA H200"), "GPU 5: NVIDIA H200"),
    ("gpu_memory", "small", lambda f: with_gpu(f, 1, memory_mib=48000), "GPU 1 at 0000:12:00.0: 46.9 GiB"),
    ("gpu_memory", "unknown", lambda f: with_gpu(f, 1, memory_mib=None), "unknown"),
    ("gpu_numa", "wrong node", lambda f: moved(f, 4, 0), "GPU 4 (decode-0, 0000:a1:00.0): node 0"),
    ("gpu_numa", "-1", lambda f: moved(f, 2, -1), "BIOS (AMD: NPS"),
    ("gpu_numa", "no device", lambda f: moved(f, 2, None), "sysfs has no such PCI device"),
    (
        "numa_node",
        "one node",
        lambda f: replace(f, nodes=NumaNodes((0,), (0,), (0,))),
        "node 1 of decode-0 does not exist",
    ),
    (
        "numa_node",
        "no CPUs",
        lambda f: replace(f, nodes=NumaNodes((0, 1), (0,), (0, 1))),
        "lacks CPUs or memory",
    ),
    ("numa_node", "no NUMA", lambda f: replace(f, nodes=NumaNodes()), "CONFIG_NUMA"),
    ("numactl", "missing", lambda f: replace(f, numactl=""), "not on the PATH"),
    ("glibc", "old", lambda f: replace(f, glibc="2.31"), "glibc 2.34 or newer"),
    ("glibc", "unknown", lambda f: replace(f, glibc=""), "no glibc found"),
    ("systemd", "old", lambda f: replace(f, systemd="249"), "systemd 250 or newer"),
    ("python", "old", lambda f: replace(f, python="3.9.2"), "Python >=3.11,<3.14"),
    ("python", "missing", lambda f: replace(f, python=""), "no Python where the runtimes"),
    ("python", "new", lambda f: replace(f, python="3.14.0"), "Python >=3.11,<3.14"),
]


@pytest.mark.parametrize(
    ("check", "what", "fault", "text"), FAULTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_each_fault_turns_its_check_red(
    check: str, what: str, fault: Callable[[HostFacts], HostFacts], text: str
) -> None:
    found = broken(judge_host(fault(healthy()), SPLIT))
    assert check in found, what
    row = found[check]
    assert text in f"{row.observed} {row.expected} {row.fix}"
    assert row.observed
    assert row.expected
    assert row.fix
    assert row.source


def test_every_check_has_a_fault_that_turns_it_red() -> None:
    assert {check.id for check in CHECKS} == {row[0] for row in FAULTS}


def test_a_card_on_the_wrong_node_is_one_finding_and_the_others_still_pass() -> None:
    rows = [row for row in judge_host(moved(healthy(), 4, 0), SPLIT) if row.id == "gpu_numa"]
    assert [(row.status, row.observed) for row in rows] == [
        ("fail", "GPU 4 (decode-0, 0000:a1:00.0): node 0"),
        ("pass", "GPU 0-3 on node 0; GPU 5-7 on node 1"),
    ]


def test_cards_with_one_fault_are_one_finding() -> None:
    facts = healthy()
    for gpu in (1, 2, 3, 4, 7):
        facts = moved(facts, gpu, -1)
    rows = [row.observed.partition(": node")[0] for row in judge_host(facts, SPLIT) if row.id == "gpu_numa"]
    assert rows == [
        "GPU 1-3 (prefill-0, 0000:12:00.0, 0000:13:00.0, 0000:14:00.0)",
        "GPU 4, 7 (decode-0, 0000:a1:00.0, 0000:a4:00.0)",
        "GPU 0 on node 0; GPU 5-6 on node 1",
    ]


def test_minus_one_is_no_fault_on_a_host_with_a_single_node() -> None:
    """The recorded H200: a VM with one node whose sysfs says -1."""
    smi = nvidia.parse(RECORDED)
    facts = replace(healthy(), smi=smi, gpu_nodes={"0000:00:06.0": -1}, nodes=NumaNodes((0,), (0,), (0,)))
    wanted = replace(SPLIT, placements=(Placement("plain-0", (0,), 0),), gpu_model="H200")
    findings = judge_host(facts, wanted)
    assert not broken(findings)
    assert [row.observed for row in findings if row.id == "gpu_numa"] == [
        "GPU 0 on node 0 (sysfs says -1, as is usual on a host with a single node)"
    ]
    findings = judge_host(facts, replace(wanted, placements=(Placement("plain-0", (0,), 1),)))
    assert "node -1, on a host with the single node 0" in broken(findings)["gpu_numa"].observed


def test_a_host_that_computes_on_the_cpu_skips_the_rows_about_gpus_and_says_so() -> None:
    wanted = replace(SPLIT, device="cpu", placements=(Placement("prefill-0", (), 0), Placement("decode-0", (), 1)))
    facts = replace(healthy(), smi=SmiReport(), loaded_driver="", nodes=NumaNodes((0,), (0,), (0,)))
    findings = judge_host(facts, wanted)
    skipped = [row for row in findings if row.status == "skip"]
    assert {row.id for row in skipped} == {check.id for check in CHECKS if check.gpu}
    assert {row.observed for row in skipped} == {"tandem_device is cpu: no GPU is used"}
    assert list(broken(findings)) == ["numa_node"]


def test_what_the_inventory_does_not_state_is_not_checked_and_shown() -> None:
    findings = judge_host(healthy(), Wanted("cuda", SPLIT.placements))
    assert not broken(findings)
    assert {row.id for row in findings if row.status == "skip"} == {
        "driver_version",
        "glibc",
        "gpu_model",
        "gpu_memory",
        "python",
    }


def test_an_instance_that_is_not_bound_needs_no_node() -> None:
    wanted = replace(SPLIT, placements=(Placement("plain-0", (0, 5)), Placement("router")))
    assert not broken(judge_host(healthy(), wanted))


def test_numactl_that_the_deploy_installs_is_no_fault_yet() -> None:
    facts = replace(healthy(), numactl="")
    assert not broken(judge_host(facts, replace(SPLIT, packages=frozenset({"numactl"}))))


@pytest.mark.parametrize(
    ("version", "holds"),
    [("3.10.9", False), ("3.11.0", True), ("3.13.9", True), ("3.14.0", False), ("3.9", False)],
)
def test_version_ranges(version: str, holds: bool) -> None:
    assert preflight.satisfies(version, ">=3.11,<3.14") is holds
    assert preflight.satisfies("3.13.9", "<=3.13,!=3.12,==3.13,>3.12")
    with pytest.raises(ValueError, match=r"cannot read the version specifier '~=3\.11'"):
        preflight.satisfies(version, "~=3.11")


# -- severities and the table


def test_a_severity_can_be_changed_with_a_reason() -> None:
    findings = judge_host(moved(healthy(), 4, 0), SPLIT)
    overrides, problems = read_overrides(
        {
            "gpu_numa": {"severity": "warn", "reason": "riser cable, until May"},
            "glibc": {"severity": "warn", "reason": "x"},
        },
        [check.id for check in CHECKS],
        "driver_check_severity",
    )
    assert not problems
    changed = override(findings, overrides)
    assert count(changed) == {"fail": 0, "warn": 1, "skip": 0, "pass": len(CHECKS)}
    assert broken(changed)["gpu_numa"].reason == "riser cable, until May"
    assert "set to warn on this host: riser cable, until May" in table(changed)
    assert [row.reason for row in changed if row.id == "glibc"] == [""]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"gpu_nuna": {"severity": "warn", "reason": "x"}}, "did you mean gpu_numa?"),
        ({"gpu_numa": {"severity": "warn"}}, "no reason"),
        ({"gpu_numa": {"severity": "warn", "reason": " "}}, "no reason"),
        ({"gpu_numa": {"severity": "ignore", "reason": "x"}}, "fail or warn"),
        ({"gpu_numa": {"severity": "warn", "reason": "x", "until": "y"}}, "fail or warn"),
        ({"gpu_numa": "warn"}, "fail or warn"),
    ],
)
def test_a_wrong_severity_is_refused(given: dict[str, Any], text: str) -> None:
    overrides, problems = read_overrides(given, [check.id for check in CHECKS], "driver_check_severity")
    assert not overrides
    assert [text in str(problem) for problem in problems] == [True]


def test_the_table_reads_well() -> None:
    facts = moved(without_gpu(healthy(), 7), 4, 0)
    assert table(judge_host(facts, SPLIT)) == (Path(__file__).parent.parent / "expected/driver_check.txt").read_text(
        encoding="utf-8"
    ).rstrip("\n")


# -- the module

PARAMS: dict[str, Any] = {
    "device": "cuda",
    "instances": [
        {"name": "prefill-0", "gpus": [0, 1, 2, 3], "numa_node": 0, "port": 30001},
        {"name": "decode-0", "gpus": [4, 5, 6, 7], "numa_node": 1},
    ],
    "min_driver": "580.65.06",
    "min_glibc": "2.34",
    "gpu_model": "RTX PRO 6000",
    "requires_python": ">=3.11,<3.99",
}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[[HostFacts], None]:
    def set_facts(facts: HostFacts) -> None:
        monkeypatch.setattr(tandem_driver_check, "gather", lambda *_: facts)

    set_facts(healthy())
    return set_facts


@pytest.mark.usefixtures("host")
def test_the_module_keeps_its_findings_on_the_host_and_changes_nothing_twice(tmp_path: Path) -> None:
    params = {**PARAMS, "report": str(tmp_path / "var/driver_check.json")}
    path = Path(params["report"])
    planned = run_module(tandem_driver_check.main, params, check=True)
    assert planned["changed"]
    assert not path.parent.exists()
    first = run_module(tandem_driver_check.main, params)
    assert (first["failed"], first["changed"], first["diff"]) == (False, True, planned["diff"])
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert kept["findings"] == first["findings"]
    assert kept["gpus"][4] == {
        "index": 4,
        "pci": "0000:a1:00.0",
        "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "memory_mib": 97887,
        "numa_node": 1,
    }
    assert path.stat().st_mode & 0o777 == 0o644
    inode = path.stat().st_ino
    for check in (True, False):
        assert not run_module(tandem_driver_check.main, params, check=check)["changed"]
    assert path.stat().st_ino == inode


def test_the_module_fails_once_with_every_finding_and_keeps_them(
    tmp_path: Path, host: Callable[[HostFacts], None]
) -> None:
    host(replace(moved(healthy(), 4, 0), glibc="2.31"))
    params = {**PARAMS, "report": str(tmp_path / "driver_check.json")}
    result = run_module(tandem_driver_check.main, params)
    assert result["failed"]
    assert "findings" not in result  # Ansible would print them below the table
    assert "2 failed" in result["msg"]
    assert "GPU 4 (decode-0, 0000:a1:00.0): node 0" in result["msg"]
    assert "glibc 2.31" in result["msg"]
    assert json.loads(Path(params["report"]).read_text(encoding="utf-8"))["counts"]["fail"] == 2


def test_the_module_warns_without_failing(tmp_path: Path, host: Callable[[HostFacts], None]) -> None:
    host(swapped(healthy()))
    result = run_module(tandem_driver_check.main, {**PARAMS, "report": str(tmp_path / "r.json")})
    assert not result["failed"]
    assert "gpu_order: nvidia-smi numbers GPUs otherwise" in str(result["warnings"])


@pytest.mark.usefixtures("host")
def test_the_module_refuses_wrong_settings_before_it_looks_at_the_host(tmp_path: Path) -> None:
    wrong = {"gpu_model": "RTX (", "severity": {"nope": {}}, "report": str(tmp_path / "r.json")}
    result = run_module(tandem_driver_check.main, {**PARAMS, **wrong})
    assert result["failed"]
    assert "(2 to mend)" in result["msg"]
    assert "driver_check_gpu_model" in result["msg"]
    assert not (tmp_path / "r.json").exists()


def test_the_module_copes_with_a_host_without_any_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real gathering, on this machine, with an empty PATH: findings, never a traceback."""
    monkeypatch.setenv("PATH", str(tmp_path))
    params = {**PARAMS, "report": str(tmp_path / "r.json"), "python": sys.executable}
    result = run_module(tandem_driver_check.main, params)
    assert result["failed"]
    kept = json.loads(Path(params["report"]).read_text(encoding="utf-8"))
    status = {row["id"]: row["status"] for row in kept["findings"]}
    assert (status["nvidia_smi"], status["systemd"], status["numactl"]) == ("fail", "fail", "fail")
    assert status["python"] == "pass"
    assert status["gpu_numa"] == "skip"
