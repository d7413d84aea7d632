"""How a split is named to the engine, and which ports follow from it."""

from __future__ import annotations

import pytest
from ansible.module_utils.tandem.split import GpuNaming, Row, check_rows, name_gpus


def row(name: str, gpus: tuple[int, ...], node: int, port: int = 30001) -> Row:
    return Row(name, "prefill", gpus, node, port, 8998)


def test_regular_sets_keep_every_gpu_visible() -> None:
    rows = [row("p", (0, 1, 2, 3), 0), row("d", (4, 5, 6, 7), 1)]
    nodes = (0, 0, 0, 0, 1, 1, 1, 1)
    assert name_gpus(rows[0], rows) == GpuNaming(0, 1, None, nodes)
    assert name_gpus(rows[1], rows) == GpuNaming(4, 1, None, nodes)


def test_steps() -> None:
    rows = [row("p", (0, 2, 4, 6), 0), row("d", (1, 3, 5, 7), 1)]
    assert name_gpus(rows[1], rows) == GpuNaming(1, 2, None, (0, 1, 0, 1, 0, 1, 0, 1))


@pytest.mark.parametrize("gpus", [(0, 1, 3), (3, 1), (2, 1, 0)])
def test_irregular_sets_come_first_and_hide_nothing(gpus: tuple[int, ...]) -> None:
    rows = [row("p", gpus, 1), row("d", (4, 5), 0)]
    naming = name_gpus(rows[0], rows)
    assert naming.order is not None
    assert naming.order[: len(gpus)] == gpus
    assert sorted(naming.order) == [0, 1, 2, 3, 4, 5]
    assert naming.base_gpu_id == 0
    # The engine looks up the node by position among the visible GPUs.
    assert [naming.numa_nodes[rank] for rank in range(len(gpus))] == [1] * len(gpus)
    assert naming.numa_nodes[naming.order.index(4)] == 0


def test_one_gpu() -> None:
    rows = [row("p", (5,), 1)]
    assert name_gpus(rows[0], rows) == GpuNaming(5, 1, None, (1, 1, 1, 1, 1, 1))


def test_ports_derive_from_the_http_port() -> None:
    assert row("p", (0,), 0).ports() == {
        "port": 30001,
        "NCCL port": 28001,
        "dist-init port": 29001,
        "bootstrap_port": 8998,
        "NIXL telemetry port": 27001,
    }


def test_a_sound_split_has_no_problem() -> None:
    rows = [row("p", (0, 1), 0), Row("d", "decode", (2, 3), 1, 30002, None)]
    assert check_rows(rows, "cuda", str) == []
