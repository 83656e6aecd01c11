"""vLLM on the same work, each mode in a process of its own, so that a failure or hang costs one mode.

The process prints its results as a line of JSON after every part; the last such line counts, however the process ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from work import PEER_DEPTH

_TAIL = 800


@dataclass(frozen=True, slots=True)
class JsonTask:
    """The measurement of one process, passed to it as JSON."""

    @property
    def arguments(self) -> list[str]:
        return ["--as-peer", json.dumps(asdict(self))]


def speculative(mode: str, draft: str | None) -> dict[str, Any] | None:
    """vLLM's speculative_config of a mode. draft: the folder of its draft model, or of its EAGLE-3 head."""
    lookup = {"num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    weights = {"model": draft, "num_speculative_tokens": PEER_DEPTH}
    known: dict[str, dict[str, Any] | None] = {
        "plain": None,
        "ngram": {"method": "ngram", **lookup},
        "ngram_gpu": {"method": "ngram_gpu", **lookup},
        "draft": {"method": "draft_model", **weights},
        "eagle3": {"method": "eagle3", **weights},
        # draws its guesses at temperatures above 0, where the mode before always takes the likeliest
        "eagle3_drawn": {"method": "eagle3", "draft_sample_method": "probabilistic", **weights},
    }
    return known[mode]


@dataclass(frozen=True, slots=True)
class Vllm:
    """vLLM, opened in this process."""

    llm: Any
    version: str
    context: int  # the longest prompt with its answer
    open_s: float


def opened(model: str, mode: str, draft: str | None, longest: int, **more: Any) -> Vllm:
    """Open vLLM in one of its modes. longest: the context, unless the model's is shorter."""
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_USE_FLASHINFER_SAMPLER="0")
    from transformers import AutoConfig
    from vllm import LLM, __version__

    context = min(longest, AutoConfig.from_pretrained(model).max_position_embeddings)
    options = {"gpu_memory_utilization": 0.4, "max_num_seqs": 64, "enable_prefix_caching": False, **more}
    start = time.perf_counter()  # as ours: imports do not count
    llm = LLM(
        model=model,
        dtype="bfloat16",
        max_model_len=context,
        speculative_config=speculative(mode, draft),
        **options,
    )
    return Vllm(llm, __version__, context, time.perf_counter() - start)


def apart(script: str, arguments: Sequence[str], peer_path: str | None, timeout: float) -> dict[str, Any]:
    """Run one of these commands in a process of its own, with `peer_path` first on its path; returns its last
    results."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    paths = filter(None, [peer_path, os.environ.get("PYTHONPATH")])
    return last_words(command, {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, timeout)


def last_words(command: Sequence[str], environment: dict[str, str], timeout: float) -> dict[str, Any]:
    """Run a command; returns the last line of JSON that it printed, with the reason in `failed` if it is incomplete.

    Its output goes to files, and its whole process group is ended: vLLM's own processes may outlive the one that we
    started, and would hold pipes open, and memory of the device.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors, env=environment, start_new_session=True)
        try:
            code = process.wait(timeout)
            why = f"ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            why = f"did not end within {timeout:g} s"
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        errors.seek(0)
        printed, complaints = out.read(), errors.read()
    lines = [line for line in printed.splitlines() if line.startswith('{"')]
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if why or not lines:
        found["failed"] = f"{why or 'said nothing'}: {(complaints or printed)[-_TAIL:]}"
    return found
