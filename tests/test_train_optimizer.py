"""Muon: steps whose directions all count as much, stacks as their matrices one by one, and a state that is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.train.config import TrainConfig
from slipstream.train.optimizer import Muon, Optimizers, orthogonal

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


def test_the_directions_are_those_of_the_matrix() -> None:
    matrix = seeded(6, 10)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    assert torch.trace(left.mT @ orthogonal(matrix[None])[0] @ right.mT) > 0.8 * 6


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


def test_it_finds_the_map() -> None:
    """From examples whose directions differ thirtyfold in how much they show, along no axis."""
    turned = torch.linalg.qr(seeded(12, 12, seed=2)).Q
    wanted, seen = seeded(12, 12), seeded(256, 12, seed=1) * torch.logspace(0, -1.5, 12) @ turned
    parameter = nn.Parameter(torch.zeros(12, 12))
    made = Optimizers({"weight": parameter}, config(optimizer="muon"), CPU)
    for step in range(200):
        (seen @ (parameter - wanted).mT).square().mean().backward()
        made.step(0.3 * (1 - step / 200))
    assert (parameter.detach() - wanted).square().mean() < 0.05 * wanted.square().mean()


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
