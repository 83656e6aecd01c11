"""Multi-token prediction: modules compute what transformers computes, and every guess is theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from conftest import VOCAB
from families import CPU, random_tokens
from mtp_checkpoints import MTP, Reference, change_config, save_with_modules
from planning import Scripted
from queueing import Queue
from slipstream import RequestOutput, SamplingParams, SpeculationParams
from slipstream.core.draft import Tree
from slipstream.core.errors import ConfigError, DrafterError, ModelError, UnsupportedModel
from slipstream.drafters.base import DeviceTree, DraftRequest, DraftRound, HostDrafter
from slipstream.drafters.mtp import MtpDrafter
from slipstream.engine import build
from slipstream.kv.cache import KVCache
from slipstream.models import attention
from slipstream.models.attention import PassContext
from slipstream.models.batch import PassBatch
from slipstream.models.heads.checkpoint import read_config
from slipstream.models.heads.mtp import MtpHead, build_modules
from slipstream.models.heads.mtp_files import read_modules
from slipstream.models.load import load_config
from slipstream.models.parity import open_model
from slipstream.models.runner import Runner, open_unchecked
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
@pytest.mark.parametrize(("family", "modules", "depth"), [("deepseek", 1, 3), ("mimo", 3, 5)])
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


PAGE = 4


def opened(folder: Path) -> Runner:
    runner = open_unchecked(folder, torch.float32, CPU)
    runner.swap(fused=True)
    return runner


class Rows:
    """Passes of a head over one request."""

    def __init__(self, head: MtpHead) -> None:
        self.head = head
        self.cache = KVCache(head.layers, 8, PAGE, torch.float32, CPU)
        self.length = 0

    @torch.inference_mode()
    def run(self, tokens: list[int], features: Tensor, step: int) -> Tensor:
        positions = torch.arange(self.length, self.length + len(tokens))
        batch = PassBatch(
            input_ids=torch.tensor(tokens),
            positions=positions,
            slots=positions,
            row_starts=(0, len(tokens)),
            prefix_lengths=(self.length,),
            pages=(tuple(range(8)),),
            is_tree=(False,),
            masks=None,
            logit_rows=None,
        )
        self.length += len(tokens)
        return self.head.run(batch.input_ids, features, PassContext(batch, self.cache), positions, step).features


@pytest.mark.parametrize("name", ["deepseek", "glm", "glm-lite", "mimo"])
def test_a_module_computes_what_transformers_computes(tmp_path: Path, name: str) -> None:
    family = MTP[name]
    folder = save_with_modules(tmp_path / "target", family)
    head = MtpHead.open(folder, opened(folder))
    reference = Reference(folder, family, 0, tmp_path / "reference")
    tokens, features = random_tokens(13, 1), torch.randn(13, 32, generator=torch.Generator().manual_seed(2))
    wanted = reference.hidden(tokens, features)
    rows = Rows(head)
    got = torch.cat([rows.run(tokens[:9], features[:9], 0), rows.run(tokens[9:], features[9:], 0)])
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(head.logits(got), reference.logits(wanted), atol=1e-4, rtol=1e-4)
    assert head.logits(got).dtype == torch.float32
    assert head.combine(features) is features
    assert head.taps.normed
    assert not head.taps.layers


def test_each_step_has_its_module_and_the_last_is_repeated(tmp_path: Path) -> None:
    family = MTP["mimo"]
    folder = save_with_modules(tmp_path / "target", family, modules=2)
    head = MtpHead.open(folder, opened(folder))
    references = [Reference(folder, family, i, tmp_path / f"reference-{i}") for i in range(2)]
    assert len(head.layers) == 2
    tokens, features = random_tokens(6, 3), torch.randn(6, 32, generator=torch.Generator().manual_seed(4))
    for step, module in ((0, 0), (1, 1), (2, 1), (5, 1)):
        got = Rows(head).run(tokens, features, step)
        torch.testing.assert_close(got, references[module].hidden(tokens, features), atol=2e-5, rtol=1e-4)


def test_modules_have_places_of_their_own_in_the_cache(tmp_path: Path) -> None:
    family = MTP["mimo"]
    folder = save_with_modules(tmp_path / "target", family, modules=2)
    rows = Rows(MtpHead.open(folder, opened(folder)))
    features = torch.randn(3, 32, generator=torch.Generator().manual_seed(4))
    rows.run([5, 6, 7], features, 0)
    assert bool(rows.cache.keys(0)[:3].any())
    assert not bool(rows.cache.keys(1).any())
    rows.length = 0
    before = rows.cache.keys(0).clone()
    rows.run([5, 6, 7], features, 1)
    assert bool(rows.cache.keys(1)[:3].any())
    assert torch.equal(rows.cache.keys(0), before)


@pytest.mark.parametrize("changed", [False, True])
def test_copies_of_what_the_target_has_are_not_kept(tmp_path: Path, changed: bool) -> None:
    """One that differs is."""
    folder = save_with_modules(tmp_path / "target", MTP["deepseek"], copies=True)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    own = "model.layers.3.shared_head.head.weight"
    if changed:
        tensors[own] = tensors[own] * 2
        save_file(tensors, file, metadata={"format": "pt"})
    runner = opened(folder)
    head = MtpHead.open(folder, runner)
    hidden = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
    logits = hidden @ tensors[own].T
    torch.testing.assert_close(head.logits(hidden), logits, atol=1e-4, rtol=1e-4)
    assert (head._others[1] is runner.model.get_output_embeddings()) is not changed
    assert head._others[0] is runner.model.get_input_embeddings()


def test_qwen3_next_at_module_level(tmp_path: Path) -> None:
    """Its target is recurrent and refused, but its module is a plain decoder layer."""
    family = MTP["qwen3-next"]
    folder = save_with_modules(tmp_path / "target", family)
    with pytest.raises(UnsupportedModel):
        open_unchecked(folder, torch.float32, CPU)
    from transformers import Qwen3NextForCausalLM

    attention.register()
    config = load_config(folder)
    built = build_modules(read_modules(folder, read_config(folder)), Qwen3NextForCausalLM, config, torch.float32, CPU)
    tensors = load_file(folder / "model.safetensors")
    embedding = torch.nn.Embedding.from_pretrained(tensors["model.embed_tokens.weight"])
    lm_head = torch.nn.Linear(32, VOCAB, bias=False)
    lm_head.weight = torch.nn.Parameter(tensors["lm_head.weight"], requires_grad=False)
    head = MtpHead(built.modules, built.rotary, embedding, lm_head, 96)
    reference = Reference(folder, family, 0, tmp_path / "reference")
    tokens, features = random_tokens(11, 1), torch.randn(11, 32, generator=torch.Generator().manual_seed(2))
    got = Rows(head).run(tokens, features, 0)
    torch.testing.assert_close(got, reference.hidden(tokens, features), atol=2e-5, rtol=1e-4)


def changed(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "deepseek",
            lambda t: t.pop("model.layers.3.enorm.weight"),
            r"missing: model\.layers\.3\.enorm\.weight \[32\]",
        ),
        (
            "deepseek",
            lambda t: t.pop("model.layers.3.mlp.experts.2.up_proj.weight"),
            r"missing: model\.layers\.3\.mlp\.experts\.gate_up_proj",
        ),
        (
            "mimo",
            lambda t: t.update({"model.mtp_layers.0.input_proj.weight": torch.zeros(32, 32)}),
            r"wrong shape: model\.mtp_layers\.0\.input_proj\.weight \[32, 32\] instead of \[32, 64\]",
        ),
        (
            "mimo",
            lambda t: t.update({"model.mtp_layers.0.strange.weight": torch.zeros(3)}),
            r"unknown: model\.mtp_layers\.0\.strange\.weight \[3\]",
        ),
    ],
)
def test_broken_modules_are_refused_by_name(tmp_path: Path, name: str, change: Any, message: str) -> None:
    folder = save_with_modules(tmp_path / "target", MTP[name])
    changed(folder, change)
    with pytest.raises(ModelError, match=message):
        MtpHead.open(folder, opened(folder))


def test_fewer_modules_than_promised_are_refused(tmp_path: Path) -> None:
    folder = save_with_modules(tmp_path / "target", MTP["mimo"])
    change_config(folder, num_nextn_predict_layers=2)
    with pytest.raises(ModelError, match=r"promises 2 modules .* module 1 are missing \(model\.mtp_layers\.1\.\*\)"):
        MtpHead.open(folder, opened(folder))


def test_modules_beyond_what_the_configuration_says_are_left_alone(tmp_path: Path) -> None:
    folder = save_with_modules(tmp_path / "target", MTP["mimo"], modules=2)
    change_config(folder, num_nextn_predict_layers=1)
    assert len(MtpHead.open(folder, opened(folder)).layers) == 1
