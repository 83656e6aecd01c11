"""The memory of this process, and the part of it that the model and the cache need; the machine's load."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path


def status_bytes(key: str, status: str) -> int | None:
    """A field of /proc/self/status such as VmHWM, in bytes."""
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    return None


def read_status() -> str:
    try:
        return Path("/proc/self/status").read_text()
    except OSError:  # not Linux
        return ""


def peak_rss() -> int:
    """The highest number of resident bytes of this process so far."""
    peak = status_bytes("VmHWM", read_status())
    if peak is not None:
        return peak
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def current_rss() -> int:
    """Resident bytes now; the peak where the system does not report them."""
    now = status_bytes("VmRSS", read_status())
    return peak_rss() if now is None else now


def rss_after_imports() -> int:
    """Resident bytes with torch and transformers imported and no model loaded."""
    import torch  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    return current_rss()


def device_peak() -> int | None:
    """The highest number of bytes allocated on the GPU; None if the model ran on the CPU."""
    import torch

    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return int(peak) or None


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes. On a GPU the ratio is of the device's memory, else of the process's."""

    imports: int
    peak: int
    weights: int
    draft_weights: int
    cache: int
    device_peak: int | None = None

    @property
    def planned(self) -> int:
        return self.weights + self.draft_weights + self.cache

    @property
    def used(self) -> int:
        return self.peak - self.imports if self.device_peak is None else self.device_peak

    @property
    def ratio(self) -> float:
        """Memory used over memory that weights and cache need: 1 is perfect."""
        return self.used / self.planned if self.planned else 0.0

    def to_json(self) -> dict[str, int | float | None]:
        return {
            "imports_rss_bytes": self.imports,
            "peak_rss_bytes": self.peak,
            "device_peak_bytes": self.device_peak,
            "weights_bytes": self.weights,
            "draft_weights_bytes": self.draft_weights,
            "cache_bytes": self.cache,
            "ratio": round(self.ratio, 4),
        }


def load_average() -> float | None:
    """The mean number of runnable processes in the last minute; None where the system does not report it."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def busy(load: float | None, cores: int) -> bool:
    """Whether other programs use the cores, so that threads wait for each other and rates are not reliable."""
    return load is not None and load > 0.5 * cores


def cpu_model() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return os.uname().machine if hasattr(os, "uname") else sys.platform
