"""`make soak`: many clients for minutes. Nobody gets an error, nobody starves, nothing is left behind."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import save_model, tiny_llama
from serving import serving
from slipstream import LLM
from test_async import everything_is_free

STREAMS = 64
SECONDS = os.environ.get("SLIPSTREAM_SOAK_S", "300")
CLIENT = Path(__file__).with_name("soak_client.py")


@pytest.mark.soak
def test_sixty_four_streams_for_minutes(tmp_path: Path, open_llm: Callable[..., LLM]) -> None:
    folder = save_model(tmp_path / "soak", tiny_llama(max_position_embeddings=1024))
    llm = open_llm(folder, max_num_seqs=32, drafter=["ngram", "suffix"])
    with serving(llm) as server:
        command = [sys.executable, str(CLIENT), server.url, str(STREAMS), SECONDS]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        everything_is_free(llm)
    told = json.loads(done.stdout.splitlines()[-1])
    steady = told["first_token_s"][STREAMS:]  # the first met an engine that had computed nothing yet
    middle, slowest = statistics.median(steady), max(steady)
    print(
        f"{len(steady)} requests, {told['tokens']} tokens, first token median {middle:.3f} s, slowest {slowest:.3f} s"
    )
    assert slowest < 5 * middle
