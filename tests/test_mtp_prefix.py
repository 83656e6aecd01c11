"""Several modules of multi-token prediction and prompts that begin alike: each guess as if the prompt had come alone.

Module j reads at a page's last places the tokens behind the page, and those differ from prompt to prompt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from families import CPU
from mtp_checkpoints import MTP, save_with_modules
from queueing import Queue
from slipstream import RequestOutput, SamplingParams
from slipstream.models.heads.mtp import MtpHead
from slipstream.models.parity import open_model
from stepping import Stepper
from test_mtp import FEW, Modules, Noting

BEGINS = [5, 90, 17, 33, 200, 8, 61, 140, 77]  # two pages, and the token behind them by which they are named
ENDS = ([9, 9, 1], [9, 9, 4, 3, 2], [9, 101, 102, 103, 104, 105], [7, 8, 9])
"""Behind [9, 9, 9]: two that agree in as many tokens as three modules read, and two that do not."""


@pytest.mark.parametrize("kind", [Stepper, Queue])
@pytest.mark.parametrize("together", [False, True])
def test_every_guess_is_the_modules_own(tmp_path: Path, kind: Any, together: bool) -> None:
    folder = save_with_modules(tmp_path / "target", MTP["mimo"], 3)
    drafter = Noting(MtpHead.open(folder, open_model(folder, torch.float32, CPU)), depth=4)
    bench = kind(folder, drafter, page_size=4, max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logit_bias=FEW)
    heard: list[RequestOutput] = []
    for end in ([9, 9, 9], *ENDS):  # the first one leaves its pages
        bench.engine.add(bench._intake.job([*BEGINS, *end], params, heard.append, streaming=False))
        while bench.engine.busy and not (together and len(heard)):
            bench.engine.step()
    while bench.engine.busy:
        bench.engine.step()
    assert [output.num_cached_tokens for output in heard] == [0, 8, 8, 4, 4]
    drafter.hold_to(Modules(folder, "mimo", 3, tmp_path), 20)


@pytest.mark.parametrize("kind", [Stepper, Queue])
@pytest.mark.parametrize("length", [8, 9, 10, 11])  # of the prompt: it ends on a page's border, or a little behind it
def test_answers_to_one_prompt_do_not_meet(tmp_path: Path, kind: Any, length: int) -> None:
    folder = save_with_modules(tmp_path / "target", MTP["mimo"], 3)
    target = open_model(folder, torch.float32, CPU)
    params = SamplingParams(temperature=1, seed=1, n=3, max_tokens=12, ignore_eos=True, logit_bias=FEW)
    found = []
    for page_size in (4, 64):  # the larger page is copied, whatever is in it
        drafter = Noting(MtpHead.open(folder, target), depth=4)
        bench = kind(folder, drafter, page_size=page_size, max_num_seqs=4)
        bench.engine.add(bench._intake.job([*BEGINS, 3, 4][:length], params, lambda _: None, streaming=False))
        while bench.engine.busy:
            bench.engine.step()
        bench.engine.scheduler.check_integrity()
        found.append({(*text[: at + 1],): guesses for text, at, guesses in drafter.noted if at + 1 <= len(text)})
    assert found[0] == found[1]
    assert len(found[0]) > 5
