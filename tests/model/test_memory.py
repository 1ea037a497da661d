"""Free memory: the machine's and every control group's limit, on made-up file systems."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trio_engine.model.memory import free_bytes, free_host_bytes

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


def make_proc(root: Path, cgroup: str) -> Path:
    (root / "self").mkdir(parents=True)
    (root / "meminfo").write_text("MemTotal: 9999999 kB\nMemAvailable:    1024000 kB\n")
    (root / "self" / "cgroup").write_text(cgroup)
    return root


def limit(folder: Path, maximum: str, used: int, inactive: int = 0, *, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    (folder / names[0]).write_text(f"{maximum}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {inactive}\n")


def test_without_limits_it_is_what_the_machine_has(tmp_path: Path) -> None:
    proc = make_proc(tmp_path / "proc", "0::/\n")
    assert free_host_bytes(proc, tmp_path / "none") == 1024000 * 1024
    limit(tmp_path / "cgroup", "max", 5)
    assert free_host_bytes(proc, tmp_path / "cgroup") == 1024000 * 1024


def test_the_tightest_level_of_version_2_counts(tmp_path: Path) -> None:
    proc = make_proc(tmp_path / "proc", "0::/a/b\n")
    limit(tmp_path / "cgroup" / "a" / "b", str(900 * MIB), 100 * MIB)
    limit(tmp_path / "cgroup" / "a", str(500 * MIB), 300 * MIB, inactive=50 * MIB)
    assert free_host_bytes(proc, tmp_path / "cgroup") == 250 * MIB


def test_version_1_counts(tmp_path: Path) -> None:
    proc = make_proc(tmp_path / "proc", "5:cpu,cpuacct:/x\n4:memory:/x\n")
    limit(tmp_path / "cgroup" / "memory" / "x", str(300 * MIB), 100 * MIB, version=1)
    assert free_host_bytes(proc, tmp_path / "cgroup") == 200 * MIB


def test_a_limit_is_found_where_a_container_mounts_it(tmp_path: Path) -> None:
    proc = make_proc(tmp_path / "proc", "0::/host/only/path\n")
    limit(tmp_path / "cgroup", str(300 * MIB), 400 * MIB)
    assert free_host_bytes(proc, tmp_path / "cgroup") == 0


def test_a_system_without_proc_still_gives_a_number(tmp_path: Path) -> None:
    assert free_host_bytes(tmp_path, tmp_path) > 0


def test_this_machine_has_memory() -> None:
    assert free_bytes(torch.device("cpu")) > MIB
