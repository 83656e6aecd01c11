"""Optimizers: AdamW for everything, or Muon for the matrices of layers and AdamW for the rest.

Muon orthogonalizes the step of a matrix: every direction moves equally, also those with small gradients, which a few
thousand AdamW steps would hardly reach. torch's Muon takes no stacks of matrices (Medusa's heads) and makes one product
a matrix; here matrices of one shape share a product, since a small drafter's step would be mostly kernel launches.
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
"""Of the Newton-Schulz polynomial, which moves all singular values towards 1 within five rounds."""
_LIKE_ADAMW = 0.2  # scales steps to the size of AdamW's, which makes their learning rates comparable
_NOT_MATRICES = ("lm_head", "embed", "bias")
"""Two-dimensional parameters that Muon must not update: tables of tokens and stacks of biases."""


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
        """One step of all matrices of one shape, in one product."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]  # all of them have one
        moments = [self._moment(parameter) for parameter in parameters]
        torch._foreach_lerp_(moments, gradients, 1 - _MOMENTUM)
        ahead = torch._foreach_lerp(gradients, moments, _MOMENTUM)  # Nesterov's look-ahead
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
    """Approximately UV' of each matrix USV', by Newton-Schulz; in bf16 on a GPU."""
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
    """AdamW, or Muon and AdamW, as one optimizer."""

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
        """Take a step with the parameters' gradients, and clear them."""
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
    return parameter.ndim >= 2 and not any(word in name for word in _NOT_MATRICES)
