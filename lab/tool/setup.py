"""What must be there before the first host: a fit machine, Debian packages, the control node's tools, an image."""

import sys

from lab.tool import machine, say, shell, venv
from lab.tool.errors import LabError
from lab.tool.hosts import Lab
from lab.tool.paths import Paths


def check_machine(paths: Paths) -> str:
    """Raise LabError with all that is wrong with this machine; return a one-line account otherwise."""
    findings = machine.judge(machine.gather(paths, sys.version_info[:2]), paths.cache)
    bad = [finding.text for finding in findings if finding.level == "bad"]
    if bad:
        raise LabError("\n       ".join(bad))
    for finding in findings:
        if finding.level == "note":
            say.line(f"{say.bold('note')} {finding.text}")
    return "; ".join(finding.text for finding in findings if finding.level == "ok")


def setup_stages(paths: Paths, stages: say.Stages) -> Lab:
    """Prepare machine, tools and image, with one printed line a stage; return the lab."""
    with stages.stage("machine") as stage:
        stage.result = check_machine(paths)
        shell.ask_for_root()
    paths.claim()
    with stages.stage("packages") as stage:
        stage.result = machine.install_packages(paths)
    with stages.stage("tools") as stage:
        stage.result = venv.ensure(paths)
    lab = Lab(paths)
    with stages.stage("image") as stage:
        stage.result = lab.image("bookworm")
    return lab
