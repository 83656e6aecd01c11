"""What takes the steps: AdamW for everything, or Muon for the matrices of layers and AdamW for the rest.

Muon makes the step of a matrix orthogonal: all its directions move by as much, also those in which gradients are small,
which a few thousand steps would hardly reach. It is of our own, because torch's knows neither stacks of matrices
(Medusa's heads) nor matrices of one shape in one product: a small drafter's step would be mostly launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.train.config import TrainConfig

_MOMENTUM = 0.95
_ROUNDS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the polynomial that moves all singular values towards 1: steep at 0, and never far off after five rounds."""
_LIKE_ADAMW = 0.2
"""The size of AdamW's steps, by entry: so that learning rates of the two can be compared."""
_NO_MAPS = ("lm_head", "embed", "bias")
"""What two dimensions have that are no map from space to space: tables of tokens, biases of several heads."""


class Muon(torch.optim.Optimizer):
    """For matrices [m, n] and stacks of them [k, m, n]."""

    def __init__(self, parameters: Iterable[Tensor], *, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            alike: dict[tuple[int, int], list[Tensor]] = {}
            for parameter in [p for p in group["params"] if p.grad is not None]:
                alike.setdefault((parameter.shape[-2], parameter.shape[-1]), []).append(parameter)
            for shape, parameters in alike.items():
                self._move(parameters, shape, group["lr"], group["weight_decay"])

    def _move(self, parameters: list[Tensor], shape: tuple[int, int], rate: float, decay: float) -> None:
        """One step of the matrices of one shape, in one product."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]  # all of them have one
        moments = [self._moment(parameter) for parameter in parameters]
        torch._foreach_lerp_(moments, gradients, 1 - _MOMENTUM)
        ahead = torch._foreach_lerp(gradients, moments, _MOMENTUM)  # where the moment will be: Nesterov
        steps = orthogonal(torch.cat([tensor.reshape(-1, *shape) for tensor in ahead]))  # [all matrices, m, n]
        sized = steps * (-rate * _LIKE_ADAMW * max(shape) ** 0.5)
        if decay:
            torch._foreach_mul_(parameters, 1 - rate * decay)
        parts = sized.split([parameter.numel() // (shape[0] * shape[1]) for parameter in parameters])
        torch._foreach_add_(parameters, [part.view_as(p) for part, p in zip(parts, parameters, strict=True)])

    def _moment(self, parameter: Tensor) -> Tensor:
        kept: dict[str, Tensor] = self.state[parameter]
        if "moment" not in kept:
            kept["moment"] = torch.zeros_like(parameter)
        return kept["moment"]


def orthogonal(matrices: Tensor) -> Tensor:  # [k, m, n] -> [k, m, n]
    """Nearly UV' of each matrix USV', by Newton and Schulz: products alone, in bf16 where there is a GPU."""
    dtype = matrices.dtype
    x: Tensor = matrices.to(torch.bfloat16) if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ROUNDS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).to(dtype)


class Optimizers:
    """One or two optimizers, as one."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: TrainConfig, device: torch.device) -> None:
        with_muon = config.optimizer == "muon"
        layers = [p for name, p in parameters.items() if with_muon and _is_of_a_layer(name, p)]
        rest = [p for name, p in parameters.items() if not (with_muon and _is_of_a_layer(name, p))]
        self._parts: list[torch.optim.Optimizer] = []
        self._muon_rate = config.muon_rate
        if layers:
            self._parts.append(Muon(layers, lr=config.learning_rate, weight_decay=config.weight_decay))
        if rest:
            self._parts.append(
                torch.optim.AdamW(
                    rest,
                    lr=config.learning_rate,
                    betas=(config.beta1, config.beta2),
                    weight_decay=config.weight_decay,
                    fused=device.type == "cuda",
                )
            )

    def step(self, rate: float) -> None:
        """By the gradients that the parameters have, which are gone behind it."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate * self._muon_rate if isinstance(part, Muon) else rate
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for part, kept in zip(self._parts, state["parts"], strict=True):
            part.load_state_dict(kept)


def _is_of_a_layer(name: str, parameter: Tensor) -> bool:
    return parameter.ndim >= 2 and not any(word in name for word in _NO_MAPS)
