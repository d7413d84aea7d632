"""The first step of every playbook: is the inventory sound, and what follows from it?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ansible.module_utils
import yaml
from ansible.errors import AnsibleActionFail
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase
from ansible.template import Templar

# Ansible finds module_utils for what it sends to hosts; the control node imports the same package from here.
ansible.module_utils.__path__.append(str(Path(__file__).resolve().parents[1] / "module_utils"))

from ansible.module_utils.tandem import packages, plan, routers, servers, split
from ansible.module_utils.tandem.flags import FlagSet
from ansible.module_utils.tandem.plan import Engine
from ansible.module_utils.tandem.problems import Problem, TandemError, nearest, report

ROOT = Path(__file__).resolve().parents[2]
GPU_GROUP, ROUTER_GROUP = "tandem_gpu", "tandem_router"
Check = Callable[[Mapping[str, Any], FlagSet, Mapping[str, str]], list[Problem]]
# Names that carry our prefix and are no settings: facts of a run, and parameters of the playbooks.
NO_SETTINGS = frozenset({"tandem_plan", "tandem_staged", "tandem_render_dir"})
# Its parameters come from the roles that import it.
INTERNAL_ROLE = "instance"


class ActionModule(ActionBase):
    """Runs on the control node; the host is not contacted."""

    TRANSFERS_FILES = False
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        variables = task_vars or {}
        inventory = Inventory(self._loader, variables, bool(self._task.args.get("check_files", True)))
        try:
            made, warnings = inventory.plan(variables["inventory_hostname"])
        except TandemError as error:
            raise AnsibleActionFail(str(error)) from error
        return {**result, **made, "changed": False, "warnings": warnings}


class Roles:
    """The options of all roles: argument_specs and defaults, each read once."""

    def __init__(self, loader: Any) -> None:
        self.options: dict[str, dict[str, Any]] = {}
        self.role_of: dict[str, str] = {}
        self.defaults: dict[str, Any] = {}
        roles = sorted(path for path in ROOT.glob("roles/*") if path.name != INTERNAL_ROLE)
        for role in roles:
            spec, defaults = role / "meta" / "argument_specs.yml", role / "defaults" / "main.yml"
            entry = yaml.safe_load(spec.read_text())["argument_specs"]["main"]
            options = entry.get("options") or {}
            self.options |= options
            self.role_of |= dict.fromkeys(options, role.name)
            if defaults.exists():
                self.defaults |= loader.load_from_file(str(defaults), trusted_as_template=True) or {}
        self.prefixes = tuple(f"{role.name}_" for role in roles)


class Settings:
    """The settings of one host: its variables over the roles' defaults, typed; and where each was written."""

    def __init__(self, loader: Any, roles: Roles, host: str, variables: Mapping[str, Any]) -> None:
        self.host = host
        self.roles = roles
        self.raw = variables
        self.problems: list[Problem] = []
        self.origin = {name: self._origin(name) for name in roles.options}
        templar = Templar(loader=loader, variables={**roles.defaults, **variables})
        self.values: dict[str, Any] = {}
        for name, option in roles.options.items():
            self._read(name, option, templar)

    def unknown(self) -> Iterable[Problem]:
        """Settings that carry one of our prefixes and that no role knows."""
        for name in self.raw:
            if name.startswith(self.roles.prefixes) and name not in self.roles.options and name not in NO_SETTINGS:
                expected = f"a setting of Tandem{nearest(name, self.roles.options)}"
                yield Problem(self._origin(name), f"the unknown setting {name}", expected)

    def _read(self, name: str, option: Mapping[str, Any], templar: Templar) -> None:
        if name not in self.raw and name not in self.roles.defaults:
            if option.get("required"):
                self.problems.append(Problem(f"{name} ({self.host})", "nothing", "a value: it has no default"))
            self.values[name] = None
            return
        try:
            value = templar.template(self.raw[name] if name in self.raw else self.roles.defaults[name])
        except Exception as error:
            self.problems.append(Problem(self.origin[name], f"a template that fails: {error}", "a value"))
            self.values[name] = None
            return
        checked = ArgumentSpecValidator({name: _spec(option)}).validate({name: value})
        for message in checked.error_messages:
            expected = f"what roles/{self.roles.role_of[name]}/README.md says of it (type {option['type']})"
            self.problems.append(Problem(self.origin[name], message, expected))
        self.values[name] = checked.validated_parameters[name]

    def at(self, name: str, suffix: str = "") -> str:
        """`name[1].key (host, file:line)`, the file as Ansible remembers it, else without."""
        return self._origin(name, suffix)

    def _origin(self, name: str, suffix: str = "") -> str:
        try:
            from ansible._internal._datatag._tags import Origin  # noqa: PLC0415 - 2026-12-01: not a public interface

            tag = Origin.get_tag(self.raw[name])
            place = _relative(str(tag)) if tag else ""
        except (ImportError, KeyError):
            place = ""
        return f"{name}{suffix} ({self.host}{', ' + place if place else ''})"


class Inventory:
    """What the inventory says of all hosts of the run's groups."""

    def __init__(self, loader: Any, task_vars: Mapping[str, Any], check_files: bool) -> None:
        self.loader = loader
        self.check_files = check_files
        self.task_vars = task_vars
        self.groups = task_vars["groups"]
        self.roles = Roles(loader)

    def plan(self, host: str) -> tuple[dict[str, Any], list[str]]:
        """The plan of `host`, and warnings. Raises TandemError with every fault that is found."""
        problems = self._check_groups()
        mine = self._settings(host)
        peers = [mine if name == host else self._settings(name) for name in self.groups.get(GPU_GROUP, [])]
        problems += mine.unknown()
        problems += mine.problems
        problems += [problem for peer in peers for problem in peer.problems]
        if problems:
            raise TandemError(report("The inventory does not fit, nothing was touched", problems))
        problems = self._check(mine, peers)
        if problems:
            raise TandemError(report("The inventory does not fit, nothing was touched", problems))
        return self._make(mine, peers), self._warnings(mine, peers)

    def _warnings(self, mine: Settings, peers: list[Settings]) -> list[str]:
        found = servers.warnings(mine.values) if mine.host in self.groups[GPU_GROUP] else []
        if mine.host in self.groups[ROUTER_GROUP]:
            router = self._engine(mine.values["router_release"])
            found += routers.warnings(mine.values, router.data, _workers(peers))
        return found

    def _settings(self, host: str) -> Settings:
        own = host == self.task_vars["inventory_hostname"]
        variables = self.task_vars if own else self.task_vars["hostvars"].raw_get(host)
        return Settings(self.loader, self.roles, host, variables)

    def _check_groups(self) -> list[Problem]:
        return [
            Problem(f"group {group}", "no host", "at least one host in the inventory (inventory/<fleet>/hosts.yml)")
            for group in (GPU_GROUP, ROUTER_GROUP)
            if not self.groups.get(group)
        ]

    def _check(self, mine: Settings, peers: list[Settings]) -> list[Problem]:
        values, problems = mine.values, []
        rows = _rows(mine)
        if mine.host in self.groups[GPU_GROUP]:
            if not rows:
                problems.append(
                    Problem(mine.origin["tandem_instances"], "no instance", "rows, usually from a hardware class")
                )
            problems += split.check_rows(
                rows, values["tandem_device"], lambda suffix: mine.at("tandem_instances", suffix)
            )
            problems += self._check_kernels(mine)
            problems += self._check_manifest(mine)
            problems += self._check_engine(mine, "tandem_engine", "server", servers.check)
        listeners = [(port, row.name, use) for row in rows for use, port in row.ports().items()]
        if mine.host in self.groups[ROUTER_GROUP]:
            listeners += [
                (values["router_port"], "router", "port"),
                (values["router_metrics_port"], "router", "metrics port"),
            ]
            problems += self._check_engine(mine, "router_release", "router", routers.check)
            problems += self._check_workers(peers)
        if values["tandem_keep_releases"] < 2:
            found = str(values["tandem_keep_releases"])
            expected = "2 or more, so that there is a way back"
            problems.append(Problem(mine.origin["tandem_keep_releases"], found, expected))
        problems += split.check_ports(listeners, mine.origin["tandem_instances"])
        for name in ("tandem_model_name", "tandem_model_revision"):
            if "/" in values[name] or values[name] in ("", ".", ".."):
                problems.append(Problem(mine.origin[name], repr(values[name]), "one path segment"))
        return problems + self._check_agreement(mine, peers)

    def _check_engine(self, mine: Settings, setting: str, kind: str, check: Check) -> list[Problem]:
        name = mine.values[setting]
        if _engine_dir(name) is None or self._engine(name).data["kind"] != kind:
            known = [path.parent.name for path in sorted(ROOT.glob("engines/*/engine.yml"))]
            fitting = [known_name for known_name in known if self._engine(known_name).data["kind"] == kind]
            return [Problem(mine.origin[setting], repr(name), f"one of {', '.join(fitting)}")]
        return check(mine.values, self._flags(name), mine.origin)

    def _check_kernels(self, mine: Settings) -> list[Problem]:
        where = mine.origin["tandem_kernels"]
        return [problem for row in mine.values["tandem_kernels"] for problem in packages.check_row(row, ROOT, where)]

    def _check_manifest(self, mine: Settings) -> list[Problem]:
        manifest = _manifest(mine.values)
        if not self.check_files or manifest.is_file():
            return []
        expected = "a sha256sum of the model's files on the control node, absolute or relative to the repository"
        return [Problem(mine.origin["model_sync_manifest"], f"no file {manifest}", expected)]

    def _check_workers(self, peers: list[Settings]) -> list[Problem]:
        workers = _workers(peers)
        missing = [role for role in ("prefill", "decode") if not any(worker.role == role for worker in workers)]
        problems = [
            Problem(f"tandem_instances of the group {GPU_GROUP}", f"no {role}", "at least one") for role in missing
        ]
        urls: dict[str, set[str]] = {}
        for worker in workers:
            urls.setdefault(worker.url, set()).add(worker.host)
        return problems + [
            Problem(
                f"tandem_address of {' and '.join(sorted(hosts))}", f"{url} for a server of each", "an address each"
            )
            for url, hosts in urls.items()
            if len(hosts) > 1
        ]

    def _check_agreement(self, mine: Settings, peers: list[Settings]) -> list[Problem]:
        return [
            Problem(
                mine.origin[name],
                f"{mine.values[name]!r} here and {peer.values[name]!r} on {peer.host}",
                "one value for all hosts behind a router: prefill and decode must agree on it",
            )
            for name in servers.AGREED_SETTINGS
            for peer in peers
            if mine.host in self.groups[GPU_GROUP] and peer.values[name] != mine.values[name]
        ]

    def _make(self, mine: Settings, peers: list[Settings]) -> dict[str, Any]:
        values = mine.values
        made: dict[str, Any] = {
            "host": mine.host,
            "instances": [],
            "runtimes": [],
            "kernels": [],
            "routers": self._routers(peers),
            "keep_releases": values["tandem_keep_releases"],
            "package_index_url": values["tandem_package_index_url"],
            "package_ca_file": values["tandem_package_ca_file"],
            "stop_foreign": values["tandem_stop_foreign"],
            "stop_foreign_timeout": values["tandem_stop_foreign_timeout"],
        }
        if mine.host in self.groups[GPU_GROUP]:
            engine, rows = self._engine(values["tandem_engine"]), _rows(mine)
            declared = [packages.plan_row(row, ROOT) for row in values["tandem_kernels"]]
            made["engine"] = {**engine.data, "name": engine.name, "dir": engine.directory}
            made["model"] = {**plan.model(values), "manifest": str(_manifest(values))}
            made["kernels"] = declared
            made["runtimes"].append(engine.runtime(sorted({row.role for row in rows}), values["tandem_device"]))
            made["instances"] += [plan.server(row, rows, values, engine, declared) for row in rows]
        if mine.host in self.groups[ROUTER_GROUP]:
            engine = self._engine(values["router_release"])
            made["runtimes"].append(engine.runtime(["router"], ""))
            made["instances"].append(
                plan.router(values, engine, self._engine(values["tandem_engine"]), _workers(peers))
            )
        return made

    def _routers(self, peers: list[Settings]) -> list[dict[str, Any]]:
        """What the gate asks: each router, as its own host reaches it, and the servers behind it."""
        by_host = {peer.host: peer for peer in peers}
        found = []
        for host in self.groups[ROUTER_GROUP]:
            values = (by_host.get(host) or self._settings(host)).values
            url = f"http://{routers.reachable(values['router_host'])}:{values['router_port']}"
            # NIXL's own count is to be had on the worker's host alone.
            workers = [
                {
                    "role": worker.role,
                    "name": worker.name,
                    "host": worker.host,
                    "url": worker.url,
                    "telemetry": f"http://127.0.0.1:{worker.telemetry_port}/metrics"
                    if worker.telemetry_port and worker.host == host
                    else "",
                }
                for worker in _workers(peers)
            ]
            found.append({"host": host, "url": url, "model": values["tandem_served_model_name"], "workers": workers})
        return found

    def _engine(self, name: str) -> Engine:
        directory = _engine_dir(name)
        if directory is None:
            raise TandemError(f"engine {name}: found no directory; expected engines/{name}")
        lock = (directory / "requirements.lock").read_text()
        return Engine(name, str(directory), yaml.safe_load((directory / "engine.yml").read_text()), lock)

    def _flags(self, name: str) -> FlagSet:
        engine = self._engine(name)
        return FlagSet.load(name, json.loads((Path(engine.directory) / engine.data["flags"]).read_text()))


def _engine_dir(name: str) -> Path | None:
    """Real engines first, then the lab's stand-ins."""
    for parent in (ROOT / "engines", ROOT / "lab" / "engines"):
        if (parent / str(name) / "engine.yml").exists():
            return parent / str(name)
    return None


def _manifest(values: Mapping[str, Any]) -> Path:
    return Path(ROOT, values["model_sync_manifest"])


def _rows(settings: Settings) -> list[split.Row]:
    return [split.Row.of(row) for row in settings.values["tandem_instances"]]


def _workers(peers: Iterable[Settings]) -> list[routers.Worker]:
    """All servers of the fleet, prefills first, in the order of names: the same list whatever --limit says."""
    found = [
        routers.Worker(
            role=row.role,
            host=peer.host,
            name=row.name,
            address=peer.values["tandem_address"],
            port=row.port,
            bootstrap_port=row.bootstrap_port,
            telemetry_port=row.telemetry_port
            if row.role == "prefill" and peer.values["tandem_nixl_telemetry"]
            else None,
        )
        for peer in peers
        for row in _rows(peer)
    ]
    return sorted(found, key=lambda worker: (worker.role != "prefill", worker.host, worker.name))


def _spec(option: Mapping[str, Any]) -> dict[str, Any]:
    """An argument_specs option as the validator wants it: without what only documentation and defaults use."""
    spec = {
        key: value for key, value in option.items() if key in ("type", "elements", "choices", "options", "required")
    }
    if "options" in spec:
        spec["options"] = {
            name: {**_spec(sub), **({"default": sub["default"]} if "default" in sub else {})}
            for name, sub in spec["options"].items()
        }
    return spec


def _relative(place: str) -> str:
    return place.removeprefix(f"{ROOT}/")
