"""Multi-token prediction in the engine: the same tokens as without, and every guess as the formula has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from families import CPU
from mtp_checkpoints import MTP, Reference, save_with_modules
from planning import Scripted
from queueing import Queue
from slipstream import RequestOutput, SamplingParams, SpeculationParams
from slipstream.core.draft import Tree
from slipstream.core.errors import ConfigError, DrafterError
from slipstream.drafters.base import DeviceTree, DraftRequest, DraftRound, HostDrafter
from slipstream.drafters.mtp import MtpDrafter
from slipstream.engine import build
from slipstream.models.heads.mtp import MtpHead
from slipstream.models.parity import open_model
from slipstream.plan.types import Budget, Offer
from stepping import Arrival, Stepper

OFF = SpeculationParams(enabled=False)
ROUNDS = ["eager", "queued"]
FEW = {10: 14.0, 20: 14.0}
"""A bias under which random weights agree now and then."""


class Noting(MtpDrafter):
    """Keeps what it guessed, and behind how many tokens."""

    def __init__(self, head: MtpHead, **options: Any) -> None:
        super().__init__(head, **options)
        self.at_slot: dict[int, DraftRequest] = {}
        self.noted: list[tuple[Sequence[int], int, list[int]]] = []  # the request's text, its length, the guesses

    def start(self, request: DraftRequest) -> None:
        super().start(request)
        self.at_slot[request.slot] = request

    def draft(self, round: DraftRound) -> Tensor | DeviceTree:
        made = super().draft(round)
        assert isinstance(made, Tensor)
        for lane, length, line in zip(
            round.lanes.tolist(), round.state.length[round.lanes].tolist(), made.tolist(), strict=True
        ):
            if lane in self.at_slot:
                self.noted.append((self.at_slot[lane].tokens, length, line))
        return made

    def hold_to(self, reference: Modules, least: int) -> None:
        checked = 0
        for text, length, guesses in self.noted:
            if length + 1 <= len(text):  # else it was a round too many
                assert guesses == reference.chain(text, length, len(guesses)), (list(text), length)
                checked += 1
        assert checked > least


class Modules:
    """The guesses by the formula: module k at place i reads the token at i + k and module k - 1's state of place i."""

    def __init__(self, folder: Path, family: str, modules: int, scratch: Path, bias: Mapping[int, float] = FEW) -> None:
        self.bias = bias
        self.parts = [Reference(folder, MTP[family], i, scratch / f"module-{i}") for i in range(modules)]
        self.target: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def chain(self, text: Sequence[int], length: int, depth: int) -> list[int]:
        """Behind text[: length + 1], whose last token the target has not read."""
        out: Any = self.target.model(torch.tensor([list(text[:length])]), use_cache=False)
        states: Tensor = out.last_hidden_state[0]  # [length, H]
        tokens = list(text[: length + 1])
        for step in range(depth):
            module = self.parts[min(step, len(self.parts) - 1)]
            if step < len(self.parts):
                ids = tokens[step + 1 : step + 1 + length]
                states = inner = module.hidden(ids, given := states)
            else:  # the last one again: its own states behind those that it was given
                given, ids = torch.cat((given, inner[-1:])), [*ids, tokens[-1]]
                inner = module.hidden(ids, given)
            logits = module.logits(inner[-1:])[0]
            for token, bias in self.bias.items():
                logits[token] += bias
            tokens.append(int(logits.argmax()))
        return tokens[length + 1 :]


class Moody(Scripted):
    """Wants one guess only in most rounds."""

    rounds = 0

    def nodes(self, offer: Offer) -> list[int]:
        self.rounds += 1
        return [cap if self.rounds % 6 == 0 else min(cap, 1) for cap in offer.caps]


@pytest.mark.parametrize("kind", [Stepper, Queue])
@pytest.mark.parametrize("moody", [False, True])
@pytest.mark.parametrize(("family", "modules", "depth"), [("deepseek", 1, 3), ("mimo", 2, 2), ("mimo", 3, 5)])
def test_every_guess_is_the_modules_own(
    tmp_path: Path, kind: Any, moody: bool, family: str, modules: int, depth: int
) -> None:
    """No row is missing, stale or out of place: after prompts in chunks, beside others, after right guesses."""
    folder = save_with_modules(tmp_path / "target", MTP[family], modules)
    drafter = Noting(MtpHead.open(folder, open_model(folder, torch.float32, CPU)), depth=depth)
    bench = kind(folder, drafter, page_size=4, max_num_seqs=4, max_num_batched_tokens=6)
    if moody:
        bench.engine.drafting.planner = Moody()
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logit_bias=FEW)
    answers = bench.run([Arrival(length, params, joins) for length, joins in ((1, 0), (23, 0), (5, 2))])
    drafter.hold_to(Modules(folder, family, modules, tmp_path), 20)
    accepted, drafted = (sum(getattr(a.speculation, key) for a in answers) for key in ("accepted", "drafted"))
    assert 10 < accepted < 0.9 * drafted


class Knows(HostDrafter):
    """Guesses one to five tokens, all of them right: answers by the length of the prompt."""

    name: ClassVar[str] = "knows"
    bounded: ClassVar[bool] = True

    def __init__(self, answers: dict[int, list[int]]) -> None:
        self.answers = answers

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        trees = []
        for request, nodes in zip(requests, budget, strict=True):
            at = len(request.tokens) - request.prompt_length
            trees.append(Tree.chain(self.answers[request.prompt_length][at : at + min(nodes, 1 + at % 5)]))
        return trees


@pytest.mark.parametrize("kind", [Stepper, Queue])
@pytest.mark.parametrize("modules", [1, 3])
def test_tokens_that_others_guessed_are_read_too(tmp_path: Path, kind: Any, modules: int) -> None:
    """However many they were, and where the modules had guessed others."""
    folder = save_with_modules(tmp_path / "target", MTP["mimo"], modules)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    jobs = [Arrival(length, params, joins) for length, joins in ((9, 0), (4, 2))]
    answers = [list(answer.token_ids) for answer in Stepper(folder, None).run(jobs)]
    drafter = Noting(MtpHead.open(folder, open_model(folder, torch.float32, CPU)), depth=3)
    bench = kind(folder, [drafter, Knows(dict(zip((9, 4), answers, strict=True)))], page_size=4, max_num_seqs=4)
    how = SpeculationParams(drafter="mtp+knows", draft_tokens=12)
    got = bench.run([replace(job, params=replace(params, speculation=how)) for job in jobs])
    assert [list(answer.token_ids) for answer in got] == answers
    drafter.hold_to(Modules(folder, "mimo", modules, tmp_path, {}), 20)
    assert sum(a.speculation.by_drafter["knows"].accepted for a in got) > 60


@pytest.mark.parametrize("modules", [1, 2])
def test_what_it_missed_it_reads_before_it_drafts_again(tmp_path: Path, modules: int) -> None:
    folder = save_with_modules(tmp_path / "target", MTP["mimo"], modules)
    drafter = Noting(MtpHead.open(folder, open_model(folder, torch.float32, CPU)), depth=2)
    bench = Queue(folder, drafter)
    _, heard = bench.add([5, 6, 7], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logit_bias=FEW))
    planner = bench.engine.drafting.planner
    plan, rounds = planner.plan, 0
    while bench.engine.busy:
        rests = rounds % 12 in range(4, 10)
        planner.plan = (lambda *_: [Budget([0])]) if rests else plan  # type: ignore[method-assign]
        bench.engine.step()
        rounds += 1
    text = [5, 6, 7, *heard[-1].outputs[0].token_ids]
    reference = Modules(folder, "mimo", modules, tmp_path)
    drafts = [(length, guesses) for _, length, guesses in drafter.noted if length + 1 <= len(text)]
    assert len(drafts) > 10
    for length, guesses in drafts:
        assert guesses == reference.chain(text, length, len(guesses))


@pytest.mark.parametrize("rounds", ROUNDS)
def test_trees_of_one_module(tmp_path: Path, rounds: str) -> None:
    folder = save_with_modules(tmp_path / "target", MTP["mimo"])
    drafter = MtpDrafter(MtpHead.open(folder, open_model(folder, torch.float32, CPU)), depth=3, width=3, nodes=12)
    bench = Stepper(folder, drafter, rounds=rounds)
    jobs = [Arrival(4 + i, SamplingParams(temperature=i % 2, seed=i, max_tokens=15, ignore_eos=True)) for i in range(4)]
    on = bench.run(jobs)
    off = bench.run([replace(a, params=replace(a.params, speculation=OFF)) for a in jobs])
    assert [a.token_ids for a in on] == [a.token_ids for a in off]
    assert max(a.speculation.drafted / a.speculation.by_drafter["mtp"].drafts for a in on) > 5


def test_several_modules_guess_chains(tmp_path: Path) -> None:
    folder = save_with_modules(tmp_path / "target", MTP["mimo"], 2)
    head = MtpHead.open(folder, open_model(folder, torch.float32, CPU))
    with pytest.raises(ConfigError, match="width=2: 2 modules guess chains"):
        MtpDrafter(head, width=2)


def test_memory_is_planned_for_what_modules_keep(tmp_path: Path) -> None:
    folder = save_with_modules(tmp_path / "target", MTP["mimo"], 3)
    plans = [Stepper(folder, drafter).engine.plan for drafter in (None, "mtp")]
    without, having = (plan.cache_bytes // plan.num_pages for plan in plans)
    # K and V of three modules, the target's hidden state, and two of the modules', of each of 16 slots
    assert having - without == 16 * 4 * (3 * 2 * 2 * 8 + 32 + 2 * 32)


def test_a_target_without_modules_is_refused(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "open_model", lambda *_, **__: pytest.fail("before any weights are read"))
    with pytest.raises(DrafterError, match="no tensors of multi-token prediction"):
        Stepper(tiny_target, "mtp")
    with pytest.raises(ConfigError, match="mtp takes no path"):
        Stepper(tiny_target, "mtp:somewhere")


BEGINS = [5, 90, 17, 33, 200, 8, 61, 140, 77]  # two pages, and the token behind them by which they are named
ENDS = ([9, 9, 1], [9, 9, 4, 3, 2], [9, 101, 102, 103, 104, 105], [7, 8, 9])
"""Behind [9, 9, 9]: two that agree in all tokens that three modules read, and two that do not."""


@pytest.mark.parametrize("kind", [Stepper, Queue])
@pytest.mark.parametrize("together", [False, True])
def test_prompts_that_begin_alike_share_no_guesses(tmp_path: Path, kind: Any, together: bool) -> None:
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
