"""How much memory is free on a device, as far as this process may use it.

Layer: model. A container's limit counts like the machine's.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


def free_bytes(device: torch.device) -> int:
    """Bytes that may still be allocated on ``device``."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    return free_host_bytes()


def free_host_bytes(proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """The least of what the kernel says is available and what each control group leaves.

    Args:
        proc: the proc file system.
        cgroup_root: where the control groups of either version are mounted.
    """
    return max(0, min([_machine_bytes(proc), *_cgroup_bytes(proc, cgroup_root)]))


def _machine_bytes(proc: Path) -> int:
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_bytes(proc: Path, root: Path) -> Iterator[int]:
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _levels(root, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _levels(root / "memory", path, *names)


def _levels(root: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    # Every ancestor's limit counts. Inside a container the path may name folders that only the
    # host can see; the limit is then found at the root of what is mounted.
    folder = root / path.strip("/")
    for level in (folder, *folder.parents):
        room = _room(level, limit, usage, reclaimable)
        if room is not None:
            yield room
        if level == root:
            return


def _room(folder: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    try:
        maximum = (folder / limit).read_text().strip()
        used = int((folder / usage).read_text())
        statistics = (folder / "memory.stat").read_text()
    except OSError:
        return None
    if not maximum.isdigit():
        return None  # "max": no limit
    # Page cache that nobody uses counts as used but gives way.
    for line in statistics.splitlines():
        name, _, value = line.partition(" ")
        if name == reclaimable:
            used -= int(value)
    return int(maximum) - used
