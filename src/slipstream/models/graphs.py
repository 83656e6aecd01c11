"""Work on a GPU as one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slipstream.kernels.jit import recording


def captured(work: Callable[[], None], pool: Any) -> Callable[[], None]:
    """The same work as one launch. A first run compiles what must be compiled.

    pool: memory that graphs share. What one of them leaves there lasts until another one runs.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), recording():
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # what other threads do with the device is none of the capture's business
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"), recording():
        work()
    return graph.replay
