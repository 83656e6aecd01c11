"""Drafts of several drafters, merged on the host and on the device."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exactness import Case, cases, differences, plain, run
from queueing import CPU, Echo, First, Queue
from scripted import Answers, Bushy, Raises, Right, RightThenWrong, Scripted, Wrong, wrong
from slipstream import LLM, CompletionOutput, SamplingParams, SpeculationParams
from slipstream.core.draft import CUT, MAX_NODES, ROOT, Draft, Tree, merge_trees
from slipstream.core.errors import ConfigError, InvalidRequest
from slipstream.core.verdict import Authors, Verdict
from slipstream.drafters import DrafterSpec, merged_name, parse_merged, parse_specs
from slipstream.drafters.base import DeviceDrafter, DeviceTree, Drafter, DraftRequest, DraftRound, Needs
from slipstream.engine.drafts import Gathered, Guesses
from slipstream.engine.queued import QueuedBackend
from slipstream.kernels.gpu.rows import RECENT, ring
from stepping import Arrival, Stepper
from tree_cases import paths, trees

few_trees = st.lists(trees(), min_size=1, max_size=4)


@settings(deadline=None, max_examples=200)
@given(few_trees)
def test_a_union_with_room_has_all_paths_and_no_others(given_trees: list[Tree]) -> None:
    merged = merge_trees(given_trees, 1000)
    merged.tree.check(vocab_size=10, budget=MAX_NODES)
    assert set(paths(merged.tree)) == {path for tree in given_trees for path in paths(tree)}
    assert len(set(paths(merged.tree))) == len(merged.tree)


@settings(deadline=None, max_examples=200)
@given(few_trees, st.integers(0, 30))
def test_a_cut_union_is_a_tree_within_the_budget(given_trees: list[Tree], budget: int) -> None:
    merged = merge_trees(given_trees, budget)
    merged.tree.check(vocab_size=10, budget=budget)
    whole = merge_trees(given_trees, 1000)
    assert len(merged.tree) == min(budget, len(whole.tree))
    first = given_trees[0]
    kept = min(budget, len(first))
    assert (merged.tree.tokens[:kept], merged.tree.parents[:kept]) == (first.tokens[:kept], first.parents[:kept])


@settings(deadline=None, max_examples=200)
@given(few_trees, st.integers(0, 40))
def test_owners_are_those_who_proposed_the_path(given_trees: list[Tree], budget: int) -> None:
    merged = merge_trees(given_trees, budget)
    found = paths(merged.tree)
    for node, word in enumerate(merged.owners):
        assert word == sum(1 << i for i, tree in enumerate(given_trees) if found[node] in paths(tree))
    for tree, places in zip(given_trees, merged.places, strict=True):
        assert len(places) == len(tree)
        for path, place in zip(paths(tree), places, strict=True):
            assert path not in found if place == CUT else found[place] == path


@settings(deadline=None, max_examples=200)
@given(few_trees, st.integers(1, 40), st.data())
def test_each_author_is_told_what_it_would_have_heard_alone(
    given_trees: list[Tree], budget: int, data: st.DataObject
) -> None:
    merged = merge_trees(given_trees, budget)
    accepted: list[int] = []  # a walk from the root, as far as it goes
    while True:
        below = [n for n, parent in enumerate(merged.tree.parents) if parent == (accepted[-1] if accepted else ROOT)]
        step = data.draw(st.sampled_from([None, *below]))
        if step is None:
            break
        accepted.append(step)
    path = [merged.tree.tokens[node] for node in accepted]
    names = tuple("abcd"[: len(given_trees)])
    choices = tuple(range(100, 101 + len(merged.tree)))
    authors = Authors(names, merged.places)
    verdict = Verdict("r", (*path, 9), len(merged.tree), len(path), tuple(accepted), choices, authors)
    for name, tree, places in zip(names, given_trees, merged.places, strict=True):
        share = verdict.share(name)
        own = [j for j, place in enumerate(places) if place != CUT]
        alone = 0
        while alone < len(path) and tuple(path[: alone + 1]) in [paths(tree)[j] for j in own]:
            alone += 1
        assert (share.drafted, share.accepted, share.tokens) == (len(own), alone, verdict.tokens)
        assert verdict.counts(name) == (len(own), alone)
        assert [paths(tree)[own[j]] for j in share.path] == [tuple(path[: i + 1]) for i in range(alone)]
        if merged.tree.tokens:
            assert share.choices == (100, *[101 + places[j] for j in own])
            assert share.authors.names == (name,)
    stranger = verdict.share("stranger")
    assert (stranger.drafted, stranger.accepted, stranger.tokens) == (0, 0, verdict.tokens)
    assert verdict.counts("stranger") == (0, 0)


SEATS = 8


class Oracle(DeviceDrafter):
    """Guesses on the device what plain decoding says; no graph could hold it, but tests capture none."""

    name: ClassVar[str] = "oracle"
    needs: ClassVar[Needs] = Needs(device=True)
    default_draft_tokens: ClassVar[int] = 4

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.plain: dict[int, list[int]] = {}  # by lane

    def start(self, request: DraftRequest) -> None:
        fresh = replace(request, tokens=request.tokens[: request.prompt_length])
        self.plain[request.slot] = self.answers.rest(fresh)

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Draft:
        rests = [self.answers.rest(request) for request in requests]
        return Draft.pack([Tree.chain(rest[:n]) for rest, n in zip(rests, budget, strict=True)], CPU)

    def draft(self, round: DraftRound) -> Tensor:
        lines = []
        for lane, at in zip(round.lanes.tolist(), round.state.generated[round.lanes].tolist(), strict=True):
            rest = self.plain.get(lane, [])[at : at + round.depth]
            lines.append(rest + [0] * (round.depth - len(rest)))
        return torch.tensor(lines)


class Bush(Oracle):
    """The same as a tree of two levels: beside each right token stands one that is not, and comes first."""

    name: ClassVar[str] = "bush"
    makes_trees = True
    depth = 2
    most_nodes = 4
    parents = (-1, -1, 1, 1)

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Draft:
        lines = [self.tokens(self.answers.rest(request)) for request in requests]
        trees = [Tree(line[:n], self.parents[:n]) for line, n in zip(lines, budget, strict=True)]
        return Draft.pack(trees, CPU)

    def draft(self, round: DraftRound) -> DeviceTree:  # type: ignore[override]
        right = super().draft(replace(round, depth=2)).tolist()
        lines = [self.tokens(line)[: round.nodes] for line in right]
        shape = torch.tensor(self.parents[: round.nodes]).expand(len(lines), -1)
        return DeviceTree(torch.tensor(lines), shape)

    @staticmethod
    def tokens(rest: Sequence[int]) -> tuple[int, ...]:
        one, two = [*rest, 0, 0][:2]
        return (wrong(one), one, wrong(two), two)


@dataclass(frozen=True)
class Bench:
    llm: LLM
    cases: list[Case]
    expected: list[CompletionOutput]
    scripted: dict[str, Scripted]

    @property
    def long(self) -> list[Case]:
        """Those that end by their length, as the drafters know beforehand."""
        return [case for case in self.cases if not case.params.stop_token_ids]

    def speculate(self, drafter: str, batch: Sequence[Case] | None = None, **how: Any) -> list[CompletionOutput]:
        """Run, and check that it is exact."""
        mine = self.cases if batch is None else batch
        got = run(self.llm, mine, drafter, **how)
        assert not differences(mine, [self.expected[self.cases.index(case)] for case in mine], got)
        for output in got:
            stats = output.speculation
            assert stats.accepted <= sum(part.accepted for part in stats.by_drafter.values()) or not stats.by_drafter
            assert all(part.accepted <= stats.accepted for part in stats.by_drafter.values())
            assert all(part.drafted <= stats.drafted for part in stats.by_drafter.values())
        return got


@pytest.fixture(scope="module", params=["eager", "queued"])
def bench(request: pytest.FixtureRequest, tiny_target: Path, tiny_draft: Path) -> Iterator[Bench]:
    answers = Answers()
    scripted: dict[str, Scripted] = {k.name: k(answers) for k in (Right, Wrong, RightThenWrong, Bushy, Raises)}
    more: list[str | Drafter] = [Echo(), First(), Oracle(answers), Bush(answers), "ngram", f"model:{tiny_draft}"]
    how: dict[str, Any] = {"rounds": request.param, "planner": "fixed", "device": "cpu", "memory": "64MiB"}
    with LLM(tiny_target, drafter=[*scripted.values(), *more], max_num_seqs=SEATS, **how) as llm:
        batch = cases()
        expected = plain(llm, batch, answers)
        yield Bench(llm, batch, expected, scripted)
        llm.engine.scheduler.check_integrity()
        assert llm.engine.pool.free_pages == llm.engine.pool.num_pages


def total(outputs: Sequence[CompletionOutput], drafter: str) -> tuple[int, int]:
    """Drafted and accepted nodes of one drafter."""
    parts = [o.speculation.by_drafter[drafter] for o in outputs if drafter in o.speculation.by_drafter]
    return sum(part.drafted for part in parts), sum(part.accepted for part in parts)


def whole(outputs: Sequence[CompletionOutput]) -> tuple[int, int]:
    return sum(o.speculation.drafted for o in outputs), sum(o.speculation.accepted for o in outputs)


@pytest.mark.parametrize(
    "drafter",
    [
        "ngram+model",
        "bushy+model",
        "wrong+right",
        "bushy+right_then_wrong+wrong",
        "echo+first",
        "ngram+echo+model",
        "bushy+oracle+first",
        "bushy+bush",
        "bush+oracle+ngram",
        "model+bush",
    ],
)
def test_the_same_tokens_in_a_batch(bench: Bench, drafter: str) -> None:
    """24 requests with all kinds of parameters on 8 seats; chains and trees merged on the host and on the device."""
    got = bench.speculate(drafter)
    drafted, accepted = whole(got)
    assert 0 < accepted < drafted
    parts = [total(got, name) for name in drafter.split("+")]
    assert all(part[0] > 0 for part in parts)
    assert drafted <= sum(part[0] for part in parts)


def test_a_batch_of_merged_and_single_drafters(bench: Bench) -> None:
    """Side by side in the same rounds, one of them undrafted."""
    names = ["ngram+model", "model", "bushy", None, "echo+first", "wrong+oracle", "oracle"]
    hows = [SpeculationParams(enabled=n is not None, drafter=n) for n in (names * len(bench.cases))[: len(bench.cases)]]
    params = [replace(case.params, speculation=how) for case, how in zip(bench.cases, hows, strict=True)]
    got = [out.outputs[0] for out in bench.llm.generate([list(case.prompt) for case in bench.cases], params)]
    assert not differences(bench.cases, bench.expected, got)
    assert {n for o in got for n in o.speculation.by_drafter} == {"ngram", "model", "bushy", "echo", "first"} | {
        "wrong",
        "oracle",
    }


@pytest.mark.parametrize("right", ["right", "oracle"])
def test_acceptance_is_credited_to_who_was_right(bench: Bench, right: str) -> None:
    got = bench.speculate(f"wrong+{right}", bench.long)
    assert total(got, "wrong")[0] > 0
    assert total(got, "wrong")[1] == 0
    assert total(got, right)[1] == whole(got)[1] > 0
    drafted, accepted = total(got, right)
    assert drafted == accepted
    assert whole(got)[0] == drafted + total(got, "wrong")[0]


def test_a_node_that_two_proposed_is_verified_once_and_credited_to_both(bench: Bench) -> None:
    """Both are right: nearly every node of the oracle is one of the other's as well, and makes room for another."""
    got = bench.speculate("right+oracle", bench.long)
    for drafted, accepted in (whole(got), total(got, "right"), total(got, "oracle")):
        assert drafted == accepted > 0
    assert whole(got)[0] >= total(got, "right")[0]
    assert whole(got)[0] < total(got, "right")[0] + total(got, "oracle")[0]


def test_each_drafter_hears_as_if_it_had_drafted_alone(bench: Bench) -> None:
    """Two right tokens, then a wrong one, whatever the other drafters add."""
    partial = bench.scripted["right_then_wrong"]
    partial.forget()
    bench.speculate("right_then_wrong+oracle+echo", bench.cases[::2])
    heard = [verdict for verdict in partial.verdicts if verdict.drafted]
    assert all(verdict.accepted == min(2, verdict.drafted) for verdict in heard)
    assert all(verdict.path == tuple(range(verdict.accepted)) for verdict in heard)
    assert max(len(verdict.tokens) for verdict in heard) > 3


def test_trees_of_host_and_device_are_joined(bench: Bench) -> None:
    """Beside the right chain every tree of the device adds its wrong nodes only."""
    got = bench.speculate("right+bush", bench.long, draft_tokens=14)
    drafted, accepted = total(got, "bush")
    assert accepted > 0
    assert abs(drafted - 2 * accepted) <= 2 * len(got)  # near the end there are fewer nodes
    assert whole(got)[0] - total(got, "right")[0] <= drafted - accepted + len(got)


def test_a_tree_hears_of_its_own_nodes_or_of_none(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device joined stands in the union's order, which must not be taken for the drafter's own."""
    heard: list[Verdict] = []
    monkeypatch.setattr(Bush, "observe", lambda _, verdicts: heard.extend(verdicts))
    bench.speculate("right+bush", bench.long, draft_tokens=14)
    told = [verdict for verdict in heard if verdict.accepted == 2]
    assert told
    assert all(verdict.path == (() if verdict.authors.mixed else (1, 3)) for verdict in told)


def test_a_tree_of_a_larger_size_leaves_room_for_others(bench: Bench) -> None:
    """Device trees are made in a few sizes: of four nodes the first two are taken, the others are the oracle's room."""
    got = bench.speculate("bush+oracle", bench.long, draft_tokens=4)
    drafts = sum(output.speculation.by_drafter["bush"].drafts for output in got)
    assert 1.5 * drafts < total(got, "bush")[0] <= 2 * drafts


def test_who_may_not_guess_leaves_the_place_to_another() -> None:
    """Two device drafters, each with a budget for one of two requests."""
    gathered = Gathered(2)
    gathered.grant(0, "first", 2)
    gathered.grant(1, "second", 2)
    one, two = (Draft.pack([Tree.chain(tokens)], CPU) for tokens in ((5, 6), (7, 8)))
    draft, authors = gathered.plan().joined({"first": Guesses((0,), one), "second": Guesses((1,), two)}, CPU)
    assert [draft.tree(i) for i in range(2)] == [Tree.chain((5, 6)), Tree.chain((7, 8))]
    assert [one.names for one in authors] == [("first",), ("second",)]


@pytest.mark.parametrize("draft_tokens", [1, 2, 7])
def test_the_budget_is_kept_and_divided(bench: Bench, draft_tokens: int) -> None:
    got = bench.speculate("bushy+oracle", bench.cases[::3], draft_tokens=draft_tokens)
    for output in got:
        stats = output.speculation
        assert stats.drafted <= draft_tokens * stats.rounds
    if draft_tokens > 1:
        wide = bench.speculate("right+oracle", bench.cases[::3], draft_tokens=draft_tokens)
        assert all(total(wide, name)[0] > 0 for name in ("right", "oracle"))


def test_one_that_fails_leaves_the_others(bench: Bench) -> None:
    got = bench.speculate("raises+oracle", bench.cases[::4])
    assert all(output.speculation.by_drafter["raises"].failures == 1 for output in got)
    assert total(got, "oracle")[1] == whole(got)[1] > 0


def test_a_device_drafter_that_fails_leaves_the_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory, say")

    monkeypatch.setattr(Echo, "draft", fail)
    monkeypatch.setattr(Echo, "propose", fail)
    got = bench.speculate("right+echo+oracle", bench.cases[::4])
    assert all(output.speculation.by_drafter["echo"].failures == 1 for output in got)
    assert total(got, "right")[1] > 0
    assert total(got, "oracle")[1] > 0


def test_log_probabilities_belong_to_their_tokens(bench: Bench) -> None:
    """Merged drafts have fewer rows than were planned for: what is read of the pass must not shift."""
    params = SamplingParams(temperature=1.0, seed=100, max_tokens=12, ignore_eos=True, logprobs=1)
    prompts = [list(case.prompt) for case in bench.cases[:4]]
    plainly = replace(params, speculation=SpeculationParams(enabled=False))
    merged = replace(params, speculation=SpeculationParams(drafter="ngram+echo"))
    for want, have in zip(bench.llm.generate(prompts, plainly), bench.llm.generate(prompts, merged), strict=True):
        a, b = want.outputs[0], have.outputs[0]
        assert a.token_ids == b.token_ids
        assert a.logprobs is not None
        assert b.logprobs is not None
        for x, y, token in zip(a.logprobs, b.logprobs, a.token_ids, strict=True):
            assert x[token].logprob == pytest.approx(y[token].logprob, abs=1e-4)


@pytest.mark.parametrize("rounds", ["eager", "queued"])
def test_a_draft_model_follows_where_others_were_right(tiny_target: Path, rounds: str) -> None:
    """The draft is the target itself: it is always right, unless it missed what was accepted without it."""
    answers = Answers()
    batch = cases()[:12]
    how: dict[str, Any] = {"rounds": rounds, "planner": "fixed", "device": "cpu", "memory": "64MiB"}
    drafters: list[str | Drafter] = [Right(answers), f"model:{tiny_target}"]
    with LLM(tiny_target, drafter=drafters, max_num_seqs=4, **how) as llm:
        expected = plain(llm, batch, answers)
        got = run(llm, batch, "right+model")
        assert not differences(batch, expected, got)
        drafted, accepted = total(got, "model")
        assert drafted == accepted > 0
        assert total(got, "right")[1] > accepted  # it went on without the draft model


def test_names() -> None:
    assert parse_merged("ngram+draft:a/b+c") == (DrafterSpec("ngram"), DrafterSpec("draft", "a/b+c"))
    assert merged_name(parse_merged("model:x+ngram")) == "model+ngram"
    for text in ("ngram+", "+ngram", "none+ngram"):
        with pytest.raises(ConfigError, match=r"on both sides of a plus, and cannot include none"):
            parse_merged(text)
    assert parse_specs(["ngram", "ngram+model:x"]) == [DrafterSpec("ngram"), DrafterSpec("model", "x")]
    for texts in (
        ["ngram+ngram"],
        ["ngram", "ngram"],
        ["model:x", "ngram+model:y"],
        ["model:x", "draft:x"],
        ["ngram+"],
        ["ngram+nothing"],
    ):
        with pytest.raises(ConfigError):
            parse_specs(texts)
    for texts in (["ngram", "none"], ["none"]):
        with pytest.raises(ConfigError, match="'none': cannot be combined with other drafters; give it alone"):
            parse_specs(texts)


class Silent(Scripted):
    """Has nothing to say."""

    name: ClassVar[str] = "silent"
    default_draft_tokens: ClassVar[int] = 16

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        return [Tree()] * len(requests)


@pytest.mark.parametrize("rounds", ["eager", "queued"])
@pytest.mark.parametrize(("draft_tokens", "deepest"), [(None, 3), (9, 9), (2, 2)])
def test_what_one_leaves_lets_no_other_go_further_than_alone(
    tiny_target: Path, rounds: str, draft_tokens: int | None, deepest: int
) -> None:
    """Unless so many were asked for."""
    bench = Stepper(tiny_target, [Silent(Answers()), Echo()], rounds=rounds)
    how = SpeculationParams(drafter="silent+echo", draft_tokens=draft_tokens)
    job = Arrival(7, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, speculation=how))
    stats = bench.run([job])[0].speculation.by_drafter["echo"]
    assert stats.drafted > stats.drafts * (deepest - 1)
    assert stats.drafted <= stats.drafts * deepest


def test_the_default_may_be_merged(tiny_target: Path, tiny_draft: Path) -> None:
    with LLM(tiny_target, drafter=f"ngram+model:{tiny_draft}", device="cpu", memory="64MiB", planner="fixed") as llm:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logit_bias={10: 8.0, 20: 8.0})
        output = llm.generate([[10, 20, 10, 20, 10]], params)[0].outputs[0]
        assert set(output.speculation.by_drafter) == {"ngram", "model"}
        for bad in ("ngram+nothing", "ngram+ngram", "ngram+"):
            with pytest.raises(InvalidRequest, match=r"speculation\.drafter"):
                llm.generate([[1]], replace(params, speculation=SpeculationParams(drafter=bad)))


PARENTS = (-1, -1, 0, 1, 1, 4, 4, 6)


RIGHT = {1: 1, 4: 2, 6: 3}
"""Of these nodes the path of the right tokens is made: how far ahead each looks."""


class GrownBush(DeviceDrafter):
    """Knows the answers, and hides them among wrong guesses: three levels are right, the fourth never is."""

    name: ClassVar[str] = "bush"
    needs: ClassVar[Needs] = Needs(device=True)
    default_draft_tokens: ClassVar[int] = len(PARENTS)
    makes_trees = True
    depth = 4
    most_nodes = len(PARENTS)

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        longest = max(map(len, texts)) + 8
        self.texts = {tuple(text[:3]): torch.tensor([*text, *([0] * (longest - len(text)))]) for text in texts}
        self.truth = torch.zeros((17, longest), dtype=torch.int64)  # [slots, positions]
        self.asked: list[int] = []

    def start(self, request: DraftRequest) -> None:
        self.truth[request.slot] = self.texts[tuple(request.tokens[:3])]

    def tokens(self, slots: Tensor, lengths: Tensor, nodes: int) -> Tensor:  # [B, nodes]
        out = torch.empty((slots.shape[0], nodes), dtype=torch.int64)
        last = self.truth.shape[1] - 1
        for node in range(nodes):
            ahead = RIGHT.get(node)
            right = self.truth[slots, (lengths + (ahead or 1)).clamp_max(last)]
            out[:, node] = right if ahead else (right + node + 1) % 256  # siblings differ
        return out

    def draft(self, round: DraftRound) -> DeviceTree:
        self.asked.append(round.nodes)
        assert round.depth == min(4, round.nodes)
        tokens = self.tokens(round.lanes, round.state.length[round.lanes], round.nodes)
        return DeviceTree(tokens, torch.tensor(PARENTS[: round.nodes]).expand_as(tokens))

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Draft:
        slots = torch.tensor([request.slot for request in requests])
        lengths = torch.tensor([len(request.tokens) - 1 for request in requests])
        tokens = self.tokens(slots, lengths, max(budget))
        parents = torch.tensor(PARENTS[: max(budget)]).expand_as(tokens)
        return Draft(tokens, parents, torch.tensor(budget), False)


JOBS = [
    Arrival(5, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)),
    Arrival(9, SamplingParams(temperature=1.0, seed=3, max_tokens=21, ignore_eos=True)),
    Arrival(4, SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=26, ignore_eos=True), joins=2),
    Arrival(70, SamplingParams(temperature=0, frequency_penalty=0.5, max_tokens=12, ignore_eos=True), joins=1),
]


def prompts(jobs: Sequence[Arrival]) -> list[list[int]]:
    """As `Stepper.run` draws them."""
    dice = random.Random(len(jobs))
    return [dice.choices(range(256), k=job.prompt) for job in jobs]


@pytest.mark.parametrize("kind", [Stepper, Queue])
@pytest.mark.parametrize("nodes", [8, 5])
def test_the_right_path_is_found_and_nothing_else_changes(tiny_target: Path, kind: Any, nodes: int) -> None:
    plain = Stepper(tiny_target, None).run(JOBS)
    joined = sorted(JOBS, key=lambda job: job.joins)  # the order in which answers come
    texts = [[*prompt, *out.token_ids] for prompt, out in zip(prompts(JOBS), _in_order(plain, joined), strict=True)]
    bush = GrownBush(texts)
    got = kind(tiny_target, bush, draft_tokens=nodes).run(JOBS)
    for ours, theirs in zip(got, plain, strict=True):
        assert ours.token_ids == theirs.token_ids
        stats = ours.speculation.by_drafter["bush"]
        rounds = stats.drafts
        assert stats.accepted >= (3 if nodes == 8 else 2) * (rounds - 3)  # the last drafts are cut by the limit


def _in_order(outs: Sequence[Any], joined: Sequence[Arrival]) -> list[Any]:
    """Answers of `Stepper.run`, in the order of `JOBS`."""
    by_job = dict(zip(map(id, joined), outs, strict=True))
    return [by_job[id(job)] for job in JOBS]


def test_a_loop_is_made_for_few_sizes(tiny_target: Path) -> None:
    """A request that may have fewer nodes takes the first of them."""
    text = [1, 2, 3, *([0] * 40)]
    bush = GrownBush([text])
    bench = Queue(tiny_target, bush)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    bench.add([1, 2, 3], params)
    bench.drain()
    assert set(bush.asked) == {8}  # to the end: a tree is no deeper for having more nodes
    bush.asked.clear()
    bench.add([1, 2, 3], replace(params, speculation=SpeculationParams(draft_tokens=3)))
    bench.drain()
    assert set(bush.asked) == {4}


def test_the_device_knows_the_last_tokens(tiny_target: Path) -> None:
    """Each at its own place, when a request joins and after every round."""
    bench = Queue(tiny_target, None)
    assert isinstance(bench.engine.backend, QueuedBackend)
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    (first, _), (second, _) = bench.add(range(100), params), bench.add([7], params)
    state = bench.engine.backend.lanes.state
    for _ in range(80):
        bench.engine.step()
        bench.engine._deliver(bench.engine._read_all())
        for job in (first, second):
            (answer,) = job.answers
            if answer.phase.name == "RUNNING" and answer.on_device:
                known = min(len(answer.tokens), RECENT)
                want, got = ring(answer.tokens), state.recent[answer.slot].tolist()
                if known == RECENT:
                    assert got == want
                else:
                    assert got[:known] == want[:known]
    bench.drain()


def test_trees_from_one_that_promised_chains_are_refused(tiny_target: Path) -> None:
    class Liar(GrownBush):
        name: ClassVar[str] = "liar"
        makes_trees = False

    bench = Queue(tiny_target, Liar([[1, 2, 3, *([0] * 40)]]))
    _, heard = bench.add([1, 2, 3], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    bench.drain()
    assert heard[-1].outputs[0].speculation.by_drafter["liar"].failures == 1
    assert len(heard[-1].outputs[0].token_ids) == 8
