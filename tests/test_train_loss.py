"""The loss and the optimizer, each as it is written out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.train import soft_loss as module
from slipstream.train.chain_attention import Sequences, attend_chain
from slipstream.train.config import TrainConfig
from slipstream.train.optimizer import Muon, Optimizers, orthogonal
from slipstream.train.soft_loss import Aim, soft_loss
from training_scenes import random_rows

LENGTHS = ([5, 1, 7], [2, 9])


WIDTH, HEADS, DIM = 16, 3, 4


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, chain_k: Tensor, chain_v: Tensor, segments: Tensor, offset: Tensor, row: int
) -> Tensor:  # [h, D]
    """One row: text keys of its sequence up to `steps` places before it, then the chain's."""
    steps = len(chain_k)
    seen = [j for j in range(row - steps + 1) if segments[j] == segments[row] and offset[row] >= steps]
    keys = torch.cat((k[seen], chain_k[:, row]))  # [s, h, D]
    values = torch.cat((v[seen], chain_v[:, row]))
    shares = (torch.einsum("hd,shd->hs", q[row], keys) * DIM**-0.5).softmax(-1)
    return torch.einsum("hs,shd->hd", shares, values)


@pytest.mark.parametrize("steps", [0, 1, 3, 8, 9])
def test_values_and_gradients_are_those_of_one_softmax(steps: int) -> None:
    rows = random_rows(LENGTHS, WIDTH, 50)
    count = rows.ids.numel()
    sequences = Sequences.of(rows)
    numbers = (rows.segments + 10 * torch.arange(len(LENGTHS))[:, None]).flatten()
    made = torch.Generator().manual_seed(steps)
    shapes = [(count, HEADS, DIM)] * 3 + [(steps, count, HEADS, DIM)] * 2
    given = [torch.randn(shape, generator=made, requires_grad=True) for shape in shapes]
    valid = [i for i in range(count) if rows.real.flatten()[i] and (steps == 0 or sequences.offset[i] >= steps - 1)]
    assert valid
    push = torch.randn(count, HEADS, DIM, generator=made)

    q, k, v, chain_k, chain_v = given
    out = attend_chain(q, k, v, chain_k, chain_v, sequences)
    assert out.isfinite().all()
    ours = torch.autograd.grad((out[valid] * push[valid]).sum(), given, allow_unused=True)
    wanted = torch.stack([by_definition(q, k, v, chain_k, chain_v, numbers, sequences.offset, i) for i in valid])
    theirs = torch.autograd.grad((wanted * push[valid]).sum(), given, allow_unused=True)
    torch.testing.assert_close(out[valid], wanted)
    for mine, other, like in zip(ours, theirs, given, strict=True):
        zero = torch.zeros_like(like)
        torch.testing.assert_close(
            zero if mine is None else mine, zero if other is None else other, rtol=1e-4, atol=1e-5
        )


def test_sequences_stand_in_rows_of_their_own() -> None:
    rows = random_rows(LENGTHS, WIDTH, 50)
    sequences = Sequences.of(rows)
    assert sequences.source.shape == (5, 9)
    ids = rows.ids.flatten()
    apart = torch.where(sequences.filled, ids[sequences.source], -1)
    lengths = [length for row in LENGTHS for length in row]
    assert sequences.filled.sum(1).tolist() == lengths
    assert apart[4, :9].tolist() == rows.ids[1, 2:11].tolist()
    back = sequences.pack(sequences.unpack(ids[:, None, None]), 0, -1)[:, 0, 0]
    real = rows.real.flatten()
    assert torch.equal(back[real], ids[real])


STEPS, ROWS, HIDDEN, VOCAB = 2, 7, 6, 20


IDS = torch.tensor([0, 3, 4, 9, 11, 12, 18])


SAID = torch.tensor([3, 9, 18, 0, 5, 11, 4])  # the fifth of them is not among IDS


def met(p: Tensor, q: Tensor, said: Tensor) -> Tensor:
    """Chance that a draw from q [n, V] is the token [n] which a draw from p with the same noise was."""
    at = said[:, None]
    return 1 / torch.maximum(p, q * p.gather(1, at) / q.gather(1, at)).sum(1)


def written_out(hidden: Tensor, head: Tensor, seen: Tensor, weights: Tensor, aim: Aim) -> Tensor:
    ids = torch.arange(VOCAB) if aim.ids is None else aim.ids
    p = seen.softmax(1)
    best = torch.nn.functional.one_hot(seen.argmax(1), VOCAB)
    goal = ((1 - aim.sharpen) * p + aim.sharpen * best)[:, ids]
    total = torch.zeros(())
    for step in range(STEPS):
        logq = (hidden[step] @ head.T).log_softmax(1)
        divergence = (torch.special.xlogy(goal, goal) - goal * logq).sum(1)
        variation = 1 - torch.minimum(p[:, ids], logq.exp()).sum(1)
        q = torch.zeros_like(p).index_copy(1, ids, logq.exp())
        named = torch.isin(SAID, ids)
        missed = torch.where(named, 1 - met(p, q, torch.where(named, SAID, ids[0])), 1)
        total = total + (weights[step] * (divergence + aim.variation * variation + aim.keyed * missed)).sum()
    return total


@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize(
    ("variation", "sharpen", "keyed"),
    [(0.0, 0.0, 0.0), (0.7, 0.0, 0.0), (0.3, 0.25, 0.0), (0.0, 0.0, 2.0), (0.3, 0.25, 0.7)],
)
def test_in_pieces_as_written_out(
    ids: Tensor | None, variation: float, sharpen: float, keyed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CPU_LOGITS", 3 * VOCAB)  # three rows at a time
    torch.manual_seed(1)
    names = VOCAB if ids is None else len(ids)
    hidden = torch.randn(STEPS, ROWS, HIDDEN, requires_grad=True)
    head = torch.randn(names, HIDDEN, requires_grad=True)
    states, theirs = torch.randn(ROWS, HIDDEN), 2 * torch.randn(VOCAB, HIDDEN)
    weights = torch.rand(STEPS, ROWS)
    weights[1, :2] = 0
    aim = Aim(lambda x: x @ theirs.T, VOCAB, ids, variation, sharpen, keyed)

    found = soft_loss(hidden, head, states, weights, weights > 0, aim, SAID)
    wanted = written_out(hidden, head, states @ theirs.T, weights, aim)
    torch.testing.assert_close(found.total, wanted)
    ours = torch.autograd.grad(3 * found.total, (hidden, head))
    by_hand = torch.autograd.grad(3 * wanted, (hidden, head))
    torch.testing.assert_close(ours, by_hand, rtol=1e-4, atol=1e-5)


def test_a_perfect_guesser_is_seen_as_one() -> None:
    """Its guesses are always accepted, rows without weight are not counted, and there is nothing to learn."""
    torch.manual_seed(2)
    head, states = torch.randn(VOCAB, HIDDEN), torch.randn(ROWS, HIDDEN)
    hidden = states.repeat(STEPS, 1, 1).requires_grad_()
    weights = torch.ones(STEPS, ROWS)
    weights[1, 4:] = 0
    found = soft_loss(hidden, head, states, weights, weights > 0, Aim(lambda x: x @ head.T, VOCAB))
    torch.testing.assert_close(found.accepted, torch.tensor([7.0, 4.0]))
    assert found.agreed.tolist() == [7, 4]
    torch.testing.assert_close(found.divergence, torch.zeros(2), atol=1e-5, rtol=0)
    found.total.backward()
    assert hidden.grad is not None
    assert hidden.grad.abs().max() < 1e-6


def test_the_chance_that_keyed_draws_meet() -> None:
    """By drawing: noise that is shared, and the guesses that the target's draw was also."""
    made = torch.Generator().manual_seed(3)
    p, q = (torch.randn(2, 8, generator=made) * 1.5).softmax(1)
    arrival = torch.empty(200_000, 8).exponential_(generator=made)
    theirs, ours = (arrival / p).argmin(1), (arrival / q).argmin(1)
    chances = met(p.expand(8, 8), q.expand(8, 8), torch.arange(8))
    for token in p.topk(4).indices.tolist():
        seen = (ours[theirs == token] == token).float().mean()
        torch.testing.assert_close(seen, chances[token], atol=0.01, rtol=0)


def test_keyed_draws_without_the_text_are_refused() -> None:
    """The loss needs the text: no token is assumed."""
    aim = Aim(lambda x: x, VOCAB, keyed=1.0)
    states = torch.randn(ROWS, VOCAB)
    weights = torch.ones(1, ROWS)
    with pytest.raises(ValueError, match=r"keyed=1\.0 needs the text's tokens"):
        soft_loss(states[None], torch.eye(VOCAB), states, weights, weights > 0, aim)


@pytest.mark.parametrize("gap", [29.0, 31.0, 200.0])
def test_a_guess_that_is_far_off_is_still_pulled_back(gap: float) -> None:
    """Squares of its odds would overflow. The text's token goes up, the favoured rival down, all in finite numbers."""
    seen = torch.zeros(1, VOCAB)
    guess = torch.zeros(1, 1, VOCAB)
    guess[0, 0, 4] = gap
    guess.requires_grad_()
    aim = Aim(lambda x: x, VOCAB, keyed=50.0)
    weights = torch.ones(1, 1)
    found = soft_loss(guess, torch.eye(VOCAB), seen, weights, weights > 0, aim, torch.tensor([3]))
    found.total.backward()
    assert found.total.isfinite()
    assert guess.grad is not None
    assert guess.grad.isfinite().all()
    assert guess.grad[0, 0, 3] < 0 < guess.grad[0, 0, 4]


CPU = torch.device("cpu")


def config(**values: Any) -> TrainConfig:
    return TrainConfig(recipe="tiny", target="t", out=Path("o"), self_prompts=1, **values)


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6)])
def test_all_directions_are_as_long(shape: tuple[int, int]) -> None:
    stretched = seeded(3, *shape) * torch.tensor([1e-3, 1.0, 50.0])[:, None, None]
    stretched[:, 0] *= 10
    values = torch.linalg.svdvals(orthogonal(stretched))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_a_stack_moves_as_its_matrices_do() -> None:
    whole = nn.Parameter(seeded(3, 5, 4))
    single = [nn.Parameter(part.clone()) for part in whole.detach()]
    together, apart = Muon([whole], lr=0.1), Muon(single, lr=0.1)
    for seed in (1, 2):
        whole.grad = seeded(3, 5, 4, seed=seed)
        for part, grad in zip(single, whole.grad, strict=True):
            part.grad = grad.clone()
        together.step()
        apart.step()
    torch.testing.assert_close(whole.detach(), torch.stack([part.detach() for part in single]))


def test_what_has_no_gradient_stays() -> None:
    idle, moved = nn.Parameter(seeded(5, 4)), nn.Parameter(seeded(5, 4, seed=1))
    before = idle.detach().clone(), moved.detach().clone()
    muon = Muon([idle, moved], lr=0.1, weight_decay=0.1)
    moved.grad = seeded(5, 4, seed=2)
    muon.step()
    assert torch.equal(idle, before[0])
    assert not torch.equal(moved, before[1])
    assert not muon.state[idle]


def test_maps_by_muon_and_the_rest_by_adamw() -> None:
    shapes = {
        "layer.weight": (6, 4),
        "heads": (2, 4, 4),
        "biases.0": (2, 4),
        "norm.weight": (4,),
        "lm_head.weight": (9, 4),
    }
    parameters = {name: nn.Parameter(seeded(*shape)) for name, shape in shapes.items()}
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    made = Optimizers(parameters, config(optimizer="muon", muon_rate=3.0), CPU)
    for parameter in parameters.values():
        parameter.grad = seeded(*parameter.shape, seed=1)
    made.step(0.01)
    moved = {name: (parameter.detach() - before[name]).abs() for name, parameter in parameters.items()}
    adamw = {name for name, by in moved.items() if torch.allclose(by, torch.tensor(0.01), atol=1e-5)}  # its first step
    assert adamw == {"biases.0", "norm.weight", "lm_head.weight"}
    for name in shapes.keys() - adamw:
        size = torch.linalg.matrix_norm(moved[name]) / (moved[name].shape[-1] * moved[name].shape[-2]) ** 0.5
        assert size.tolist() == pytest.approx([0.03 * 0.2] * size.numel() if size.ndim else 0.03 * 0.2, rel=0.4)


def test_its_state_is_kept() -> None:
    def two(resumed: bool) -> Tensor:
        parameters = {"weight": nn.Parameter(seeded(4, 4)), "norm": nn.Parameter(seeded(4))}
        made = Optimizers(parameters, config(optimizer="muon"), CPU)
        for seed in (1, 2, 3):
            for parameter in parameters.values():
                parameter.grad = seeded(*parameter.shape, seed=seed)
            made.step(0.1)
            if resumed:
                state, made = made.state_dict(), Optimizers(parameters, config(optimizer="muon"), CPU)
                made.load_state_dict(state)
        return torch.cat([parameter.detach().flatten() for parameter in parameters.values()])

    assert torch.equal(two(False), two(True))
