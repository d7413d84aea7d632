"""Command line and environment of a prefill or decode server, from its row and the settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from .flags import FlagSet
from .paths import HOMES, JIT_CACHE, KERNELS, RUN
from .problems import Problem
from .split import Row, is_loopback, name_gpus

Settings = Mapping[str, Any]

# Flags that Tandem renders itself, by the setting that decides them.
OWNED: Final = {
    "--model-path": "tandem_model_name and tandem_model_revision",
    "--served-model-name": "tandem_served_model_name",
    "--host": "tandem_address",
    "--port": "tandem_instances",
    "--device": "tandem_device",
    "--tp-size": "tandem_instances (its gpus)",
    "--base-gpu-id": "tandem_instances (its gpus)",
    "--gpu-id-step": "tandem_instances (its gpus)",
    "--numa-node": "tandem_instances (its numa_node)",
    "--nccl-port": "tandem_instances (its port)",
    "--dist-init-addr": "tandem_instances (its port)",
    "--disaggregation-mode": "tandem_instances (its role)",
    "--disaggregation-transfer-backend": "nothing: Tandem moves the KV cache by NIXL",
    "--disaggregation-bootstrap-port": "tandem_instances (its bootstrap_port)",
    "--mem-fraction-static": "prefill_server_mem_fraction_static or decode_server_mem_fraction_static",
    "--moe-runner-backend": "tandem_moe_runner_backend",
    "--attention-backend": "tandem_attention_backend",
    "--speculative-algorithm": "tandem_speculative_algorithm",
    "--trust-remote-code": "tandem_trust_remote_code",
    "--context-length": "tandem_context_length",
    "--page-size": "tandem_page_size",
    "--kv-cache-dtype": "tandem_kv_cache_dtype",
    "--cuda-graph-max-bs-decode": "decode_server_cuda_graph_max_bs",
    "--enable-metrics": "nothing: the deploy reads the metrics",
    "--sleep-on-idle": "tandem_sleep_on_idle",
    "--config": "the settings: a second place for flags would hide them from every check",
}
# Flags that change the KV layout or the handshake: for both roles or for none (engine docs; sglang#6684, #6507).
AGREED_FLAGS: Final = (
    "--disaggregation-decode-allocation-policy",
    "--disaggregation-enable-kv-checksum",
    "--dtype",
    "--quantization",
    "--dp-size",
    "--ep-size",
    "--pp-size",
    "--attn-dp-size",
    "--enable-dp-attention",
    "--swa-full-tokens-ratio",
    "--dsv4-attn-backend",
)
AGREED_FLAG_PREFIXES: Final = ("--speculative-",)
# Environment with the same property (sglang srt/environ.py).
AGREED_ENV_PREFIXES: Final = (
    "SGLANG_DSV4_",
    "SGLANG_OPT_SM120_DIRECT_SWA_KV",
    "SGLANG_DISAGGREGATION_NIXL_",
    "SGLANG_DISAGG_STAGING_",
)
# Settings that prefill and decode of one router must share, also where they are on different hosts.
AGREED_SETTINGS: Final = (
    "tandem_engine",
    "tandem_device",
    "tandem_model_name",
    "tandem_model_revision",
    "tandem_served_model_name",
    "tandem_page_size",
    "tandem_kv_cache_dtype",
    "tandem_attention_backend",
    "tandem_speculative_algorithm",
    "tandem_nixl_backend",
    "tandem_nixl_backend_params",
    "tandem_context_length",
)
_OWNED_ENV: Final = {
    "HOME",
    "PATH",
    "PYTHONPATH",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "SGLANG_HOST_IP",
    "UCX_NET_DEVICES",
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT",
}


def argv(row: Row, rows: Sequence[Row], settings: Settings, model_path: str) -> list[str]:
    """The engine's flags for one instance, in full spelling, in a fixed order."""
    address = settings["tandem_address"]
    words = [
        *("--model-path", model_path),
        *("--served-model-name", settings["tandem_served_model_name"]),
        *("--host", address),
        *("--port", str(row.port)),
        *_device(row, rows, settings),
        *("--nccl-port", str(row.nccl_port)),
        *("--dist-init-addr", f"{address}:{row.dist_init_port}"),
        *("--disaggregation-mode", row.role),
        *("--disaggregation-transfer-backend", "nixl"),
        *_bootstrap(row),
        *("--mem-fraction-static", str(settings[f"{row.role}_server_mem_fraction_static"])),
        *_optional("--moe-runner-backend", settings["tandem_moe_runner_backend"]),
        *_optional("--attention-backend", settings["tandem_attention_backend"]),
        *_optional("--speculative-algorithm", settings["tandem_speculative_algorithm"]),
        *_optional("--context-length", settings["tandem_context_length"]),
        *_optional("--page-size", settings["tandem_page_size"]),
        *("--kv-cache-dtype", settings["tandem_kv_cache_dtype"]),
    ]
    if settings["tandem_trust_remote_code"]:
        words.append("--trust-remote-code")
    if row.role == "decode" and settings["tandem_device"] == "cuda":
        words += _optional("--cuda-graph-max-bs-decode", settings["decode_server_cuda_graph_max_bs"])
    words.append("--enable-metrics")
    if settings["tandem_sleep_on_idle"]:
        words.append("--sleep-on-idle")
    return [*words, *settings["tandem_extra_args"], *settings[f"{row.role}_server_extra_args"]]


def environment(
    row: Row, rows: Sequence[Row], settings: Settings, kernels: Sequence[Mapping[str, Any]], runtime: str
) -> dict[str, str]:
    """The environment of one instance, sorted. Later sources win: ours, the fleet's, the kernels', the role's."""
    device = net_device(settings)
    mine = [kernel for kernel in kernels if row.role in kernel["roles"]]
    cache = f"{JIT_CACHE}/{row.name}"
    env: dict[str, str] = {
        "PATH": f"{runtime}/bin:/usr/local/cuda/bin:/usr/local/bin:/usr/bin:/bin",
        # NIXL reads $HOME/.nixl.cfg and dies where HOME cannot be read.
        "HOME": f"{HOMES}/{row.name}",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        # Models come from model_sync: a server never asks a hub.
        "HF_HUB_OFFLINE": "1",
        # What the engine compiles is kept over restarts (sglang#29170).
        "XDG_CACHE_HOME": cache,
        "TRITON_CACHE_DIR": f"{cache}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        "FLASHINFER_WORKSPACE_BASE": cache,
        "TVM_FFI_CACHE_DIR": f"{cache}/tvm-ffi",
        "CUDA_CACHE_PATH": f"{cache}/cuda",
        "SGLANG_HOST_IP": settings["tandem_address"],
        # The engine's own 300 s let a hung request end as HTTP 200 (sglang#32267).
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(settings["tandem_bootstrap_timeout"]),
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(settings["tandem_waiting_timeout"]),
        "SGLANG_DISAGGREGATION_NIXL_BACKEND": settings["tandem_nixl_backend"],
        # A binding that the kernel refuses must not pass in silence.
        "SGLANG_CRASH_ON_NUMA_BIND_FAILURE": "True",
        "UCX_NET_DEVICES": device,
    }
    if row.role == "prefill" and settings["tandem_nixl_telemetry"]:
        # NIXL counts what was sent, for all ranks at one port. The engine's own kv_transfer metrics are computed from
        # the request: they count a transfer that did not happen as well.
        env |= {
            "NIXL_TELEMETRY_ENABLE": "y",
            "NIXL_TELEMETRY_EXPORTER": "prometheus_mp",
            "NIXL_TELEMETRY_MULTIPROC_DIR": f"{RUN}/{row.name}",
            "NIXL_TELEMETRY_PROMETHEUS_LOCAL": "y",
            "NIXL_TELEMETRY_PROMETHEUS_PORT": str(row.telemetry_port),
        }
    if settings["tandem_nixl_backend_params"]:
        params = {key: str(value) for key, value in settings["tandem_nixl_backend_params"].items()}
        env["SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS"] = json.dumps(params, sort_keys=True)
    if settings["tandem_device"] == "cuda":
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        env["NCCL_SOCKET_IFNAME"] = device.partition(":")[0]
        order = name_gpus(row, rows).order
        if order is not None:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, order))
    if mine:
        env["PYTHONPATH"] = ":".join(f"{KERNELS}/{kernel['id']}" for kernel in mine)
    for source in (settings["tandem_env"], *(kernel["env"] for kernel in mine), settings[f"{row.role}_server_env"]):
        env |= {name: str(value) for name, value in source.items()}
    return dict(sorted(env.items()))


def net_device(settings: Settings) -> str:
    """The network device for UCX and NCCL: the declared one, or `lo` where all share one host."""
    return settings["tandem_net_device"] or "lo"


def check(settings: Settings, flags: FlagSet, origin: Mapping[str, str]) -> list[Problem]:
    """Faults in the settings of a host's servers. `origin` gives a setting's name with its file and line."""
    problems: list[Problem] = []
    for name in ("tandem_extra_args", "prefill_server_extra_args", "decode_server_extra_args"):
        problems += _check_extra(name, settings[name], flags, origin[name])
    for name in ("tandem_env", "prefill_server_env", "decode_server_env"):
        problems += _check_env(name, settings[name], origin[name])
    for role in ("prefill", "decode"):
        name = f"{role}_server_mem_fraction_static"
        if not 0 < settings[name] < 1:
            problems.append(Problem(origin[name], str(settings[name]), "a share between 0 and 1"))
    for name, flag in (
        ("tandem_kv_cache_dtype", "--kv-cache-dtype"),
        ("tandem_moe_runner_backend", "--moe-runner-backend"),
        ("tandem_attention_backend", "--attention-backend"),
    ):
        if settings[name]:
            problems += [
                Problem(origin[name], problem.found, problem.expected)
                for problem in flags.check([flag, settings[name]], name)
            ]
    for name in (
        "tandem_request_timeout",
        "tandem_start_timeout",
        "tandem_bootstrap_timeout",
        "tandem_waiting_timeout",
    ):
        if settings[name] <= 0:
            problems.append(Problem(origin[name], str(settings[name]), "seconds above 0"))
    for name in ("tandem_bootstrap_timeout", "tandem_waiting_timeout"):
        if settings[name] >= 300:
            problems.append(
                Problem(
                    origin[name],
                    str(settings[name]),
                    "under 300 s, where a hung request ends as HTTP 200 (sglang#32267)",
                )
            )
    problems += _check_address(settings, origin)
    return problems


def warnings(settings: Settings) -> list[str]:
    """What is legal and likely wrong."""
    runner = settings["tandem_moe_runner_backend"]
    if settings["tandem_compute_capability"] != "12.0" or settings["tandem_device"] != "cuda":
        return []
    if runner == "triton" and not settings["tandem_kernels"]:
        return [
            "tandem_moe_runner_backend is triton on sm_120 without kernel packages of your own (tandem_kernels is"
            " empty). Stock SGLang has no NVFP4 MoE in Triton: use flashinfer_cutlass or marlin."
        ]
    if runner in ("auto", ""):
        return [
            "tandem_moe_runner_backend is left to the engine, which takes an SM100-only runner for NVFP4 checkpoints"
            " on any GPU (sglang 0.5.23, arg_groups/model_overrides/deepseek_v4.py)."
        ]
    return []


def _device(row: Row, rows: Sequence[Row], settings: Settings) -> list[str]:
    if settings["tandem_device"] == "cpu":
        return ["--device", "cpu"]
    naming = name_gpus(row, rows)
    words = ["--tp-size", str(len(row.gpus)), "--base-gpu-id", str(naming.base_gpu_id)]
    if naming.gpu_id_step != 1:
        words += ["--gpu-id-step", str(naming.gpu_id_step)]
    return [*words, "--numa-node", *map(str, naming.numa_nodes)]


def _bootstrap(row: Row) -> list[str]:
    # A decode learns the port from each request; without its own flag it keeps the engine's default, unused.
    return ["--disaggregation-bootstrap-port", str(row.bootstrap_port)] if row.bootstrap_port is not None else []


def _optional(flag: str, value: Any) -> list[str]:
    return [flag, str(value)] if value else []


def _check_extra(name: str, words: Sequence[str], flags: FlagSet, where: str) -> list[Problem]:
    problems = flags.check(words, where)
    for flag, _values in flags.split(words):
        known = flags.by_name.get(flag)
        spellings = known.names if known else (flag,)
        owner = next((OWNED[spelling] for spelling in spellings if spelling in OWNED), None)
        if owner:
            problems.append(Problem(where, f"{flag}, which Tandem renders itself", f"it left out; it follows {owner}"))
        elif name != "tandem_extra_args" and (
            any(spelling in AGREED_FLAGS for spelling in spellings)
            or any(spelling.startswith(AGREED_FLAG_PREFIXES) for spelling in spellings)
        ):
            problems.append(
                Problem(where, f"{flag} for one role", "it in tandem_extra_args: prefill and decode must agree on it")
            )
    return problems


def _check_env(name: str, env: Mapping[str, Any], where: str) -> list[Problem]:
    problems = []
    for variable, value in env.items():
        if variable in _OWNED_ENV:
            problems.append(Problem(where, f"{variable}, which Tandem sets itself", "it left out"))
        if variable.startswith("PYTORCH_") and "expandable_segments" in str(value):
            problems.append(
                Problem(
                    where,
                    f"{variable}={value}",
                    "no expandable_segments: KV falls to TCP, 600 times slower (nixl#1754)",
                )
            )
        if name != "tandem_env" and variable.startswith(AGREED_ENV_PREFIXES):
            problems.append(
                Problem(where, f"{variable} for one role", "it in tandem_env: prefill and decode must agree on it")
            )
        if "\n" in str(value):
            problems.append(Problem(where, f"{variable} with a line break", "one line"))
    return problems


def _check_address(settings: Settings, origin: Mapping[str, str]) -> list[Problem]:
    address = settings["tandem_address"]
    try:
        loopback = is_loopback(address)
    except ValueError:
        return [Problem(origin["tandem_address"], repr(address), "an IP address of this host")]
    if not loopback and not settings["tandem_net_device"]:
        return [
            Problem(
                origin["tandem_net_device"],
                f"none for {address}",
                "the network device that carries tandem_address, for UCX and NCCL",
            )
        ]
    return []
