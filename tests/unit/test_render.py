"""What the example host would run, held against a reviewed text and against the engine's own flags.

After a change that is meant: TANDEM_ACCEPT=1 pytest tests/unit/test_render.py, then review the diff of tests/expected.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ansible.module_utils.tandem.flags import FlagSet
from inventories import ROOT, plan

EXPECTED = ROOT / "tests" / "expected"


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The units and environments of inventory/example_host, as the playbook writes them."""
    folder = tmp_path_factory.mktemp("render")
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "playbooks/render.yml"]
    command += ["-i", "inventory/example_host", "-e", f"tandem_render_dir={folder}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "gpu1"


@pytest.mark.parametrize("instance", ["prefill-0", "decode-0", "router"])
def test_as_reviewed(rendered: Path, instance: str) -> None:
    for name in (f"tandem-{instance}.service", "env"):
        text = (rendered / instance / name).read_text()
        reviewed = EXPECTED / "example_host" / instance / name
        if os.environ.get("TANDEM_ACCEPT"):
            reviewed.parent.mkdir(parents=True, exist_ok=True)
            reviewed.write_text(text)
        assert text == reviewed.read_text()


@pytest.mark.parametrize(("index", "engine"), [(0, "sglang-0.5.23"), (1, "sglang-0.5.23"), (2, "sglang-router-0.3.2")])
def test_every_flag_and_choice_is_the_engines(index: int, engine: str) -> None:
    made, _warnings = plan(ROOT / "inventory" / "example_host", check_files=False)
    flags = FlagSet.load(engine, json.loads((ROOT / "engines" / engine / "flags.json").read_text()))
    argv = made["instances"][index]["argv"]
    rendered = argv[argv.index("-m") + 2 :]
    # A router's --prefill and --decode are repeated, one for each worker.
    problems = [problem for problem in flags.check(rendered, engine) if "more than once" not in problem.found]
    assert problems == []


def test_what_the_field_report_states(rendered: Path) -> None:
    """Each value of the deployment that the project continues, in the engine's present spelling."""
    prefill = (rendered / "prefill-0" / "tandem-prefill-0.service").read_text()
    decode = (rendered / "decode-0" / "tandem-decode-0.service").read_text()
    assert "numactl --cpunodebind=0 --membind=0" in prefill
    assert "numactl --cpunodebind=1 --membind=1" in decode
    for words in (
        "--tp-size 4 \\",
        "--base-gpu-id 0 \\",
        "--disaggregation-mode prefill \\",
        "--mem-fraction-static 0.7 \\",
    ):
        assert words in prefill
    for words in (
        "--tp-size 4 \\",
        "--base-gpu-id 4 \\",
        "--disaggregation-mode decode \\",
        "--mem-fraction-static 0.6 \\",
    ):
        assert words in decode
    assert "--disaggregation-bootstrap-port 8998 \\" in prefill
    for unit in (prefill, decode):
        for words in (
            "--disaggregation-transfer-backend nixl \\",
            "--moe-runner-backend triton \\",
            "--trust-remote-code \\",
            "--dist-init-addr ",
            "--context-length ",
            "--model-path /var/lib/tandem/models/DeepSeek-V4-Flash-NVFP4/",
        ):
            assert words in unit
    for instance in ("prefill-0", "decode-0"):
        env = (rendered / instance / "env").read_text().splitlines()
        for line in (
            "SGLANG_SM120_MMA_FLASHMLA=1",
            "SGLANG_SM120_TRITON_INDEXER=1",
            "SGLANG_DSV4_FP4_EXPERTS=1",
            "SGLANG_DISAGGREGATION_NIXL_BACKEND=UCX",
        ):
            assert line in env
