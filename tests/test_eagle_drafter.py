"""The EAGLE drafter: never another token, and guesses that are those of its head, computed by hand from the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import eagle_scenes
from conftest import save_model, tiny_llama
from eagle_scenes import ByHand, Stored
from exactness import Case, cases, run
from families import load_reference
from slipstream import LLM, CompletionOutput, SamplingParams
from slipstream.cli.loading import fetch_draft
from slipstream.cli.options import Common
from slipstream.core.draft import Draft
from slipstream.core.errors import ConfigError
from slipstream.drafters import parse_spec
from slipstream.drafters.base import DraftRequest
from slipstream.drafters.eagle import EagleDrafter, EagleOptions, parse_options
from slipstream.engine import draft_loops
from slipstream.engine.queued import QueuedBackend
from slipstream.kernels.gpu.grow_tree import Growth, Level
from slipstream.kernels.gpu.layout import RowLayout
from slipstream.kernels.gpu.rows import LaneState, LastRows, last_rows
from slipstream.models import graphs
from slipstream.models.batch import PassBatch

HEADS: dict[str, Callable[[], Stored]] = {
    "eagle1": eagle_scenes.eagle1,
    "eagle3": eagle_scenes.eagle3,
    "speculators": lambda: eagle_scenes.speculators(taps=(3, 0, 1), norm_before_residual=True),
    "eagle3.1": lambda: eagle_scenes.specforge(taps=(0, 1, 2), fc_norm=True, norm_output=True),
}
TAPS = {"eagle3": (2, 1, 0), "speculators": (3, 0, 1), "eagle3.1": (1, 2, 3)}
"""Of a target with three layers: how many of them the tapped states have passed."""


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    return {name: make().write(folder / name) for name, make in HEADS.items()}


def test_what_is_read_in_static_tensors_is_read_alike(
    heads: dict[str, Path], open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, and what was missed, as a GPU captures them: filled up with padding rows."""
    sizes: list[int] = []
    load = graphs._PromptGraph.load

    def noted(read: graphs._PromptGraph, batch: PassBatch, layout: RowLayout) -> None:
        sizes.append(batch.num_rows)
        load(read, batch, layout)

    monkeypatch.setattr(graphs._PromptGraph, "load", noted)
    found = []
    for captures in (False, True):
        llm = open_llm(drafter=f"eagle:{heads['eagle3']}?width=3&depth=3", planner="fixed", rounds="queued")
        engine, drafter = llm.engine, llm.engine.drafting.drafters["eagle"]
        assert isinstance(engine.backend, QueuedBackend)
        assert isinstance(drafter, EagleDrafter)
        if captures:
            drafter.capture_prompts(engine.backend._trash_slot, None)
        outputs = run(llm, few(), "eagle")
        found.append([(output.token_ids, output.speculation.accepted) for output in outputs])
        assert bool(sizes) == captures
    assert found[0] == found[1]
    assert sum(accepted for _, accepted in found[0]) > 0


def test_a_crowd_guesses_the_same_in_fewer_rows(
    heads: dict[str, Path], open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees of three nodes are grown as narrow, and of the text no more is read again than the last round can have
    added: the guesses are those of wide rounds that read all that a deep tree could have added.
    """
    guesses, rows, widths = list[list[float]](), set[int](), set[int]()

    class Noting(Growth):
        def grow(self, tokens: Tensor, scores: Tensor, above: Level | None) -> Level | None:
            if above is None:  # what the head thinks behind the text
                widths.add(self.width)
                length, last = self._state.length[self._lanes], self._state.last[self._lanes]
                told = torch.cat((length[:, None], last[:, None], tokens[:, :3], scores[:, :3]), dim=1)
                guesses.extend(told[self._lanes != self._state.trash].tolist())
            return super().grow(tokens, scores, above)

    def counted(state: LaneState, lanes: Tensor, count: int, **others: Any) -> LastRows:
        rows.add(count)
        return last_rows(state, lanes, count, **others)

    monkeypatch.setattr("slipstream.drafters.heads.Growth", Noting)
    monkeypatch.setattr("slipstream.drafters.heads.last_rows", counted)
    bias = dict.fromkeys((5, 6, 7), 90.0)  # of so few tokens many are guessed right
    params = [SamplingParams(temperature=i % 2, seed=i, logit_bias=bias, max_tokens=24 + i) for i in range(12)]
    batch, found = [Case(f"{i}", (1 + i, 2), one) for i, one in enumerate(params)], []
    for crowd in (10_000, 2):
        monkeypatch.setattr(draft_loops, "_CROWD", crowd)
        llm = open_llm(drafter=f"eagle:{heads['eagle3']}", planner="fixed", rounds="queued")
        outputs = run(llm, batch, "eagle", draft_tokens=3)
        assert sum(output.speculation.accepted for output in outputs) > 80
        found.append(([output.token_ids for output in outputs], sorted(guesses), set(rows), set(widths)))
        for kept in (guesses, rows, widths):
            kept.clear()
    (expected, deep, *wide), (answers, shallow, some, narrow) = found
    assert answers == expected
    torch.testing.assert_close(torch.tensor(shallow), torch.tensor(deep), atol=1e-4, rtol=1e-4)
    assert wide == [{11}, {8}]
    assert 4 in some <= {4, 11}  # 11 if a request is new or alone
    assert 4 in narrow <= {4, 8}


def few() -> list[Case]:
    return [case for case in cases() if case.name.startswith(("plain", "logit_bias"))]


class Target:
    """The target as transformers runs it: its hidden states behind any text."""

    def __init__(self, folder: Path) -> None:
        self.model: PreTrainedModel = load_reference(folder)

    @torch.inference_mode()
    def taps(self, tokens: Sequence[int], head: str) -> Tensor:  # [N, F]
        out: Any = self.model(input_ids=torch.tensor([list(tokens)]), output_hidden_states=True)
        if head == "eagle1":
            return torch.as_tensor(out.hidden_states[-1][0])  # the last is after the final norm
        states = list(out.hidden_states)
        states[-1] = self._before_the_norm(tokens)
        return torch.cat([states[layer][0] for layer in TAPS[head]], dim=1)

    def _before_the_norm(self, tokens: Sequence[int]) -> Tensor:
        kept: list[Tensor] = []
        norm: Any = self.model.get_submodule("model.norm")
        with norm.register_forward_pre_hook(lambda module, given: kept.append(given[0])):
            self.taps(tokens, "eagle1")
        return kept[0]

    def by_hand(self, stored: Stored) -> ByHand:
        model: Any = self.model
        return ByHand(stored, model.get_input_embeddings().weight.detach(), model.lm_head.weight.detach())


class Guesser:
    """What a head guesses behind a text, with nothing kept from one guess to the next."""

    def __init__(self, target: Target, head: str, tokens: Sequence[int]) -> None:
        self.hand = target.by_hand(HEADS[head]())
        taps = target.taps(tokens[:-1], head)
        # the row of the token at q reads the target's states at q - 1
        self.ids, self.features = list(tokens[1:]), [self.hand.features(state) for state in taps]
        self._done: dict[tuple[int, ...], Tensor] = {}
        stored = self.hand.stored.tensors
        self.vocab = (torch.arange(len(stored["d2t"])) + stored["d2t"]).tolist() if "d2t" in stored else None

    def scores(self, path: tuple[int, ...]) -> dict[int, float]:
        """Token -> log q behind this path of guesses."""
        found = self.hand.logits(self._hidden(path)).log_softmax(0).tolist()
        return {token if self.vocab is None else self.vocab[token]: score for token, score in enumerate(found)}

    def _hidden(self, path: tuple[int, ...]) -> Tensor:
        if path not in self._done:
            own = [self._hidden(path[:depth]) for depth in range(len(path))]  # a guess reads the head's own state
            self._done[path] = self.hand.hidden([*self.ids, *path], [*self.features, *own])[-1]
        return self._done[path]


Seen = list[tuple[list[int], list[int], list[int]]]
"""Of each draft: the text, the guesses, their parents."""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found: Seen = []
    propose = EagleDrafter.propose_trees

    def noted(self: EagleDrafter, requests: Sequence[DraftRequest], budget: Sequence[int], levels: int) -> Draft:
        draft = propose(self, requests, budget, levels)
        for i, request in enumerate(requests):
            count = int(draft.counts[i])
            found.append((list(request.tokens), draft.tokens[i, :count].tolist(), draft.parents[i, :count].tolist()))
        return draft

    monkeypatch.setattr(EagleDrafter, "propose_trees", noted)
    return found


def generate(llm: LLM) -> list[CompletionOutput]:
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logit_bias={10: 3.0, 20: 3.0})
    plain_params = SamplingParams(temperature=0, max_tokens=11, ignore_eos=True)
    prompts = [[7, 8, 9, 10, 11], [40], list(range(60, 69))]
    return [out.outputs[0] for out in llm.generate(prompts, [plain_params, params, plain_params])]


@pytest.mark.parametrize("head", HEADS)
def test_chains_are_those_of_the_head(
    head: str, heads: dict[str, Path], open_llm: Callable[..., LLM], tiny_target: Path, seen: Seen
) -> None:
    """Prompts, drafts that were accepted and drafts that were not: each guess is what the head says by itself."""
    generate(open_llm(drafter=f"eagle:{heads[head]}?width=1&depth=3", planner="fixed", rounds="eager"))
    target, checked = Target(tiny_target), 0
    for tokens, guesses, _ in seen:
        if tokens[0] == 40:  # this one has a bias
            continue
        guesser = Guesser(target, head, tokens)
        for depth, guess in enumerate(guesses):
            scores = guesser.scores(tuple(guesses[:depth]))
            assert scores[guess] > max(scores.values()) - 1e-4
            checked += 1
    assert checked > 20


def test_a_head_that_is_right_is_accepted_whole(tmp_path: Path, open_llm: Callable[..., LLM]) -> None:
    """A target that looks at its last token only, and an EAGLE-1 head that knows this."""
    folder = save_model(tmp_path / "target", tiny_llama(tie_word_embeddings=False))
    model = AutoModelForCausalLM.from_pretrained(folder)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    model.save_pretrained(folder)
    stored = eagle_scenes.eagle1(bias=False, embeds=False)
    # the token and nothing else; large, so that it is sure: a beam goes on with what is sure, not with what is best
    stored.tensors["fc.weight"] = torch.cat((50 * torch.eye(32), torch.zeros(32, 32)), dim=1)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        stored.tensors[f"layers.0.{name}.weight"].zero_()
    path = stored.write(tmp_path / "head")
    params = SamplingParams(temperature=0, max_tokens=21, ignore_eos=True)
    for how, rounds, most in (("1", "eager", 5), ("1", "queued", 5), ("2", "eager", 6), ("2", "queued", 6)):
        llm = open_llm(folder, drafter=f"eagle3:{path}?depth=4&width={how}", planner="fixed", rounds=rounds)
        (output,) = llm.generate([[5, 6, 7]], params)
        stats = output.outputs[0].speculation
        # the first token, and four rounds of five; a tree near the end has few nodes, and not all on one path
        assert stats.rounds <= most
        assert stats.rounds + stats.accepted == 21


def test_names_and_options() -> None:
    assert str(parse_spec("eagle3:some/where?depth=2")) == "eagle3:some/where?depth=2"
    assert parse_options("depth=6&width=8&nodes=32") == EagleOptions({"depth": 6, "width": 8, "nodes": 32})
    assert parse_options("weights=fp8") == EagleOptions({}, "fp8")
    assert parse_options("") == EagleOptions({})
    with pytest.raises(ConfigError, match="weights='int4': must be one of auto, fp8, plain"):
        parse_options("weights=int4")
    with pytest.raises(ConfigError, match=r"'topk' is unknown: must be one of depth, width, nodes"):
        parse_options("topk=3")
    with pytest.raises(ConfigError, match="width='0': must be a whole number of at least 1"):
        parse_options("width=0")
    assert parse_spec("eagle3:?depth=2").place is None  # the default model's own, in another shape


def test_the_command_line_takes_options_too(tmp_path: Path) -> None:
    folder = eagle_scenes.eagle3().write(tmp_path / "head")
    common = Common(drafter=[f"ngram+eagle3:{folder}?depth=2&width=1"])
    common.check(None)
    assert fetch_draft(common, common.drafters[0], print) == f"ngram+eagle3:{folder}?depth=2&width=1"
