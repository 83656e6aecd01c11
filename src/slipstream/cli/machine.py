"""What a report says of the machine that it was made on."""

from __future__ import annotations

import os
import platform
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
