"""The options of `slipstream bench` about traffic. What they ask for is in `cli/traffic.py`, which brings torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from slipstream.bench.outcome import Speculation, Targets
from slipstream.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Capacity:
    """The options about traffic, as they were given."""

    simulate: Path | None
    rate: str | None
    requests: int | None
    replicas: int
    traffic: Path | None
    latency_target: str
    speculation: tuple[str, ...]
    plot: Path | None
    record: Path | None
    json_file: Path | None

    def check(self) -> None:
        """Refuse what can be seen to be wrong before anything is loaded."""
        for name, path in (("json", self.json_file), ("record", self.record), ("plot", self.plot)):
            if path is not None and not path.absolute().parent.is_dir():
                raise ConfigError(f"--{name} {path}: there is no folder {path.absolute().parent}")
        ways = get_args(Speculation)
        for way in self.speculation:
            if way not in ways:
                raise ConfigError(f"--speculation {way}: must be one of {', '.join(ways)}")
        rates, _ = self.rates, self.targets
        if self.simulate is not None:
            if self.record is not None:
                raise ConfigError(f"--record {self.record} with --simulate: a simulation has nothing to record")
            return
        for name, given in (
            ("traffic", self.traffic),
            ("plot", self.plot),
            ("speculation", self.speculation),
            ("replicas", self.replicas > 1),
        ):
            if given:
                raise ConfigError(f"--{name}: only for simulations; give --simulate FILE, too")
        if len(rates) > 1:
            raise ConfigError(f"--rate {self.rate}: a real run has one rate; give --simulate FILE for several")

    @property
    def rates(self) -> tuple[float, ...]:
        try:
            rates = tuple(float(part) for part in (self.rate or "").split(",") if part)
        except ValueError:
            rates = (0.0,)
        if any(not 0 < rate < float("inf") for rate in rates):
            raise ConfigError(f"--rate {self.rate}: must be requests a second above 0, such as 0.5 or 1,2,4")
        return rates

    @property
    def targets(self) -> Targets:
        return Targets.parse(self.latency_target)
