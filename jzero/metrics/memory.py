"""Memory in use."""

import os
from pathlib import Path

import jax

from jzero.metrics.rows import Row


def memory_in_use() -> Row:
    """`device_memory_bytes`: the most that was ever in use on one of this process's devices, absent where they do not
    say (CPU). `host_memory_bytes`: resident memory of this process now, data workers apart; absent where there is no
    /proc."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [stat["peak_bytes_in_use"] for stat in stats if "peak_bytes_in_use" in stat]
    memory: Row = {"device_memory_bytes": max(peaks)} if peaks else {}
    statm = Path("/proc/self/statm")
    if statm.exists():
        memory["host_memory_bytes"] = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return memory
