"""The options of `slipstream bench` about traffic. What they ask for is in `cli/traffic.py`, which brings torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from slipstream.bench.outcome import Speculation, Targets
from slipstream.cli.options import Common
from slipstream.cli.shared import check_written
from slipstream.core.errors import ConfigError

_RECORDED_ENGINE = "the simulated engines are as the recorded one; record one with it (--record)"
_RECORDED_REQUESTS = (
    "the simulated requests are the recorded ones; record some with it (--record), or give --traffic FILE"
)
_AT_TIMES = "requests come when --rate says, however many run; leave it out"
NOT_SIMULATED = {
    **dict.fromkeys(
        (
            *("dtype", "device", "threads", "memory", "max_model_len", "enable_prefix_caching", "no_graphs"),
            *("trust_remote_code", "force_pair", "strict_drafter"),
            *("max_draft_memory", "measure_costs", "warm_up", "verifier"),
        ),
        _RECORDED_ENGINE,
    ),
    **dict.fromkeys(
        ("temperature", "top_p", "top_k", "min_p", "max_tokens", "prompts", "limit", "category"), _RECORDED_REQUESTS
    ),
    "no_speculation": "simulate it by --speculation off",
    "planner": "simulate it by --speculation fixed, or planned (adaptive)",
    "concurrency": "say when requests come by --rate or --traffic",
    "repeats": "the same seed gives the same numbers; give another --seed",
    "peers": "only this engine is simulated; leave it out",
    "startup": "a simulated engine takes no time to start; leave it out",
    "long_prompts": "only measured on a real engine; leave it out",
    "record": "a simulation has nothing to record; leave it out",
}
"""By option that a simulation cannot heed: what to do instead."""
NOT_AT_A_RATE = {
    "long_prompts": "measured without --rate; leave one of them out",
    "concurrency": _AT_TIMES,
    "repeats": "requests come once; give --requests N for more of them",
    "peers": "only this engine is sent requests at a rate; leave it out",
    "startup": "only measured without --rate; leave one of them out",
}
"""The same, of real traffic."""


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

    def write_json(self, result: Mapping[str, Any], **more: Any) -> None:
        """What --json asks for: to stdout as its last line, or to a file with `more`."""
        if self.json_file == Path("-"):
            print(json.dumps(result, ensure_ascii=False), flush=True)
        elif self.json_file is not None:
            text = json.dumps({**result, **more}, ensure_ascii=False, indent=1)
            self.json_file.write_text(text + "\n", encoding="utf-8")

    def check(self, common: Common, measuring: Mapping[str, bool]) -> None:
        """Refuse what can be seen to be wrong before anything is loaded.

        measuring: of the options of `bench` that are not about traffic, which were given.
        """
        check_written({"json": self.json_file, "record": self.record, "plot": self.plot})
        ways = get_args(Speculation)
        for way in self.speculation:
            if way not in ways:
                raise ConfigError(f"--speculation {way}: must be one of {', '.join(ways)}")
        rates, _ = self.rates, self.targets
        if self.simulate is not None:
            given = {**dict.fromkeys(common.given, True), **measuring, "record": self.record is not None}
            off = {name for name in common.given if getattr(common, name) is False}  # said as --no-…
            _refuse(given, NOT_SIMULATED, "--simulate", off)
            if self.requests is not None and (self.rate is None or self.traffic is not None):
                raise ConfigError(f"--requests {self.requests}: only for a --rate without --traffic; leave it out")
            return
        if self.rate is not None:
            _refuse(measuring, NOT_AT_A_RATE, "--rate")
        simulating, coming = "only for simulations; give --simulate FILE, too", "only for traffic; give --rate R, too"
        for name, given_here, remedy in (
            ("traffic", self.traffic, simulating),
            ("plot", self.plot, simulating),
            ("speculation", self.speculation, simulating),
            ("replicas", self.replicas > 1, simulating),
            ("requests", self.requests is not None and self.rate is None, coming),
            ("latency-target", self.latency_target and self.rate is None, coming),
        ):
            if given_here:
                raise ConfigError(f"--{name}: {remedy}")
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


def _refuse(given: Mapping[str, bool], refused: Mapping[str, str], where: str, off: Collection[str] = ()) -> None:
    for name, remedy in refused.items():
        if given.get(name):
            flag = f"--{'no-' if name in off else ''}{name.replace('_', '-')}"
            raise ConfigError(f"{flag} with {where}: {remedy}")
