"""Resident memory of this process, in bytes: what stands for device memory on a CPU."""

import os
import resource
from pathlib import Path

_PAGE_BYTES = resource.getpagesize()


def rss_bytes() -> int:
    """Resident set size now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def peak_rss_bytes() -> int:
    """Largest resident set so far (Linux counts ``ru_maxrss`` in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def total_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES
