"""What a report says of the machine that it was made on."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

from slipstream import __version__
from slipstream.bench import memory


def versions() -> dict[str, str]:
    import torch
    import transformers

    return {
        "slipstream": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }


def hardware() -> dict[str, Any]:
    import torch

    return {
        "cpu": memory.cpu_model(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def load_before() -> dict[str, Any]:
    """What others have the machine do: to be asked before anything of ours runs."""
    load = memory.load_average()
    return {"load_before": load, "busy": memory.busy(load, os.cpu_count() or 1)}


def busy_warning(told: Mapping[str, Any]) -> list[str]:
    """A line for who reads rates of a machine that was busy when `load_before` told this; else none."""
    if not told["busy"]:
        return []
    return [
        f"warning: the machine was busy before this run (load {told['load_before']:.1f} on {os.cpu_count() or 1} "
        "cores): do not trust these rates"
    ]
