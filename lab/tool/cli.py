"""The verbs of `lab/lab`."""

import argparse
import shlex
import shutil
import sys
from pathlib import Path

from lab.tool import hosts, image, inventory, machine, say, shell, venv
from lab.tool.checks import check, drills, test
from lab.tool.demo import demo
from lab.tool.errors import LabError
from lab.tool.hosts import Lab
from lab.tool.paths import MARKER, Paths
from lab.tool.setup import setup_stages

TOOL_CACHES = (".ansible", ".mypy_cache", ".pytest_cache", ".ruff_cache")
"""What linters and tests leave in a checkout."""
MARKS = {"ok": say.green("ok  "), "note": say.bold("note"), "bad": say.red("bad ")}


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(Paths.here(), options))
    except LabError as error:
        print(f"{say.red('error:')} {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lab/lab", description="Hosts without GPUs to deploy Tandem to.")
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    def verb(name: str, run: object, text: str) -> argparse.ArgumentParser:
        one = verbs.add_parser(name, help=text, description=text)
        one.set_defaults(run=run)
        return one

    verb("doctor", doctor, "say whether this machine is fit for the lab, and what it lacks")
    verb("packages", packages, "install the Debian packages that are missing here, after naming them")
    verb("setup", setup, "doctor, packages, the control node's tools (.venv) and the image of a lab host")
    one = verb("image", make_image, "make the root file system of a lab host, unless it is cached")
    one.add_argument("suite", nargs="?", default="bookworm", choices=sorted(image.SUITES))
    one = verb("up", up, "have a host running and answering ssh")
    one.add_argument("name", metavar="NAME")
    one.add_argument("--image", default="bookworm", choices=sorted(image.SUITES))
    one.add_argument(
        "--runtimes",
        default="rw",
        choices=("rw", "ro"),
        help="rw: builds the shared /opt/tandem; ro: sees it, keeps its own changes to itself",
    )
    one = verb("inventory", write_inventory, "write how Ansible reaches running hosts")
    one.add_argument("names", metavar="NAME", nargs="+")
    one.add_argument("--output", type=Path, help="inventory folder (default: inventory/lab)")
    one = verb("ssh", ssh, "log in, or run a command")
    one.add_argument("name", metavar="NAME")
    one.add_argument("command", metavar="COMMAND", nargs=argparse.REMAINDER)
    one = verb("reboot", reboot, "stop a host and start it again")
    one.add_argument("name", metavar="NAME")
    verb("demo", demo, "all of it: setup, a host, site.yml, and questions to the router")
    verb("check", check, "linters and unit tests")
    one = verb("test", test, "check, then every molecule scenario; with names: these scenarios alone")
    one.add_argument("scenarios", metavar="SCENARIO", nargs="*", default=[])
    verb("drills", drills, "the long series: molecule scenarios drill_*")
    verb("locks", make_locks, "pin the control node's tools anew: requirements/control.in -> control.txt")
    verb("status", status, "show hosts and caches")
    one = verb("down", down, "destroy hosts; caches stay")
    which = one.add_mutually_exclusive_group(required=True)
    which.add_argument("names", metavar="NAME", nargs="*", default=[])
    which.add_argument("--all", action="store_true")
    verb("clean", clean, "remove hosts, caches and .venv; list the Debian packages, which stay")
    return parser


def doctor(paths: Paths, _: argparse.Namespace) -> int:
    """Print everything there is to say about this machine; 1 if it cannot carry the lab."""
    findings = machine.judge(machine.gather(paths, sys.version_info[:2]), paths.cache)
    for finding in findings:
        say.line(f"{MARKS[finding.level]} {finding.text}")
    return 1 if any(finding.level == "bad" for finding in findings) else 0


def packages(paths: Paths, _: argparse.Namespace) -> int:
    """Install missing Debian packages."""
    paths.claim()
    say.line(machine.install_packages(paths))
    return 0


def setup(paths: Paths, _: argparse.Namespace) -> int:
    """Prepare everything that is not a host."""
    setup_stages(paths, say.Stages())
    return 0


def make_locks(paths: Paths, _: argparse.Namespace) -> int:
    """Resolve the control node's lock anew."""
    paths.claim()
    say.line(venv.lock(paths))
    return 0


def make_image(paths: Paths, options: argparse.Namespace) -> int:
    """Make an image."""
    paths.claim()
    say.line(Lab(paths).image(options.suite))
    return 0


def up(paths: Paths, options: argparse.Namespace) -> int:
    """Start a host."""
    paths.claim()
    host = Lab(paths).up(options.name, options.image, options.runtimes)
    say.line(f"{host.name} is up at {host.address}")
    return 0


def write_inventory(paths: Paths, options: argparse.Namespace) -> int:
    """Write host_vars."""
    paths.claim()
    for file in inventory.write(Lab(paths), options.names, options.output or paths.inventory):
        say.line(str(file))
    return 0


def ssh(paths: Paths, options: argparse.Namespace) -> int:
    """Become ssh."""
    paths.claim()
    lab = Lab(paths)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    remote = [command[0]] if len(command) == 1 else [shlex.join(command)] if command else []
    shell.replace_process([*lab.ssh_command(lab.host(options.name)), *remote])
    return 0


def reboot(paths: Paths, options: argparse.Namespace) -> int:
    """Reboot a host."""
    paths.claim()
    host = Lab(paths).reboot(options.name)
    say.line(f"{host.name} is up again at {host.address}")
    return 0


def status(paths: Paths, _: argparse.Namespace) -> int:
    """Show what there is."""
    if not (paths.cache / MARKER).exists():
        say.line(f"no lab here (cache: {paths.cache})")
        return 0
    found = Lab(paths).hosts() if shutil.which("podman") else []
    say.line(say.bold(f"{'HOST':<20} {'ADDRESS':<15} {'STATE':<10} {'IMAGE':<10} {'RUNTIMES':<9} STARTED"))
    for host in found:
        say.line(
            f"{host.name:<20} {host.address:<15} {host.state:<10} {host.spec.suite:<10} {host.spec.runtimes:<9}"
            f" {host.started[:19]}"
        )
    if not found:
        say.line("no hosts; `lab/lab up NAME` makes one")
    say.line(f"\ncache {paths.cache}: {say.size(machine.disk_used(paths.cache))}")
    return 0


def down(paths: Paths, options: argparse.Namespace) -> int:
    """Destroy hosts."""
    if not (paths.cache / MARKER).exists() or not shutil.which("podman"):
        say.line("no lab here, nothing to remove")
        return 0
    lab = Lab(paths)
    gone = lab.down([host.name for host in lab.hosts()] if options.all else options.names)
    say.line(f"removed {', '.join(gone)}; caches stay in {paths.cache}" if gone else "no such host, nothing to remove")
    return 0


def clean(paths: Paths, _: argparse.Namespace) -> int:
    """Remove all that the lab made, except Debian packages."""
    if not (paths.cache / MARKER).exists():
        if paths.cache.exists():
            raise LabError(f"{paths.cache} has no {MARKER} in it, so it is not the lab's; nothing was removed")
        say.line(f"no lab in {paths.cache}")
    else:
        if shutil.which("podman"):
            lab = Lab(paths)
            lab.down([host.name for host in lab.hosts()])
        left = paths.installed.read_text(encoding="utf-8").split() if paths.installed.exists() else []
        hosts.wipe(paths)
        say.line(f"removed {paths.cache}")
        if left:
            say.line(f"Debian packages that the lab installed, and that stay:\n  {' '.join(left)}")
            say.line(f"remove them with: apt-get remove {' '.join(left)}")
        else:
            say.line("the lab has installed no Debian packages here")
    made = [paths.venv, paths.inventory / "host_vars", *paths.repo.glob("molecule/*/inventory/host_vars")]
    for folder in [*made, *(paths.repo / name for name in TOOL_CACHES)]:
        if folder.exists():
            shutil.rmtree(folder)
            say.line(f"removed {folder}")
    return 0
