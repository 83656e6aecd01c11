"""transformers' own `generate`, as a baseline.

It runs in a separate process (`python -m slipstream.bench.baseline`), so that its memory and its threads do not change
the measurement of Slipstream. The processes exchange JSON lines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from slipstream.bench.run import Answer, Measured, source_environment
from slipstream.core.errors import ModelError
from slipstream.core.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

NAME = "transformers"
SETTINGS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")
"""The sampling settings that the peer receives."""


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """The model that the peer loads, with Slipstream's precision and device."""

    path: str
    dtype: str
    device: str
    threads: int
    trust_remote_code: bool = False


def same_as_ours(llm: LLM, *, dtype: str, device: str, trust_remote_code: bool) -> PeerConfig:
    """The configuration of a peer with the model, precision and device of `llm`."""
    import torch

    from slipstream.models.load import load_config, pick_device, pick_dtype

    place = pick_device(device)
    precision = pick_dtype(dtype, place, load_config(llm.model_path, trust_remote_code))
    return PeerConfig(
        path=str(llm.model_path),
        dtype=str(precision).removeprefix("torch."),
        device=str(place),
        threads=torch.get_num_threads(),
        trust_remote_code=trust_remote_code,
    )


class TransformersPeer:
    """transformers in a child process, as a mode of the benchmark. A context manager: leaving it ends the child."""

    name = NAME

    def __init__(self, config: PeerConfig) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "slipstream.bench.baseline"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env={**source_environment(), **quiet},
            text=True,
            start_new_session=True,  # Ctrl-C must reach only the parent, which then reports
        )
        try:
            self.eos_token_ids = frozenset(self.ask(asdict(config))["eos_token_ids"])
        except BaseException:
            self.close()
            raise

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        line = ""
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            pass
        if not line:
            self.process.wait()
            self.errors.seek(0)
            last = self.errors.read().decode(errors="replace").strip().splitlines()[-1:]
            raise ModelError(f"--peers {NAME}: it ended with {self.process.returncode}: {' '.join(last)}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def answer(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Measured:
        settings = {name: getattr(params[0], name) for name in SETTINGS}
        settings["seed"] = settings["seed"] or 0
        reply = self.ask({"prompts": [list(ids) for ids in prompts], **settings})
        answers = tuple(Answer(tuple(a["token_ids"]), a["first_token_s"], a["total_s"]) for a in reply["answers"])
        return Measured(answers, reply["wall_s"])

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()  # the child ends at the end of its input
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.errors.close()

    def __enter__(self) -> TransformersPeer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def start_to_first_token(config: PeerConfig, ids: Sequence[int]) -> float:
    """Seconds from starting a fresh process with bare transformers to its first token."""
    start = time.perf_counter()
    with TransformersPeer(config) as peer:
        peer.answer([ids], [SamplingParams(temperature=0, max_tokens=1)])
        return time.perf_counter() - start


# From here on: the child process.


class Server:
    """The model in the child, answering one message after another."""

    def __init__(self, config: PeerConfig) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call,unused-ignore]
        torch.set_num_threads(config.threads)
        self.torch = torch
        self.config = config
        model: Any = AutoModelForCausalLM.from_pretrained(
            Path(config.path), dtype=getattr(torch, config.dtype), trust_remote_code=config.trust_remote_code
        )
        self.model = model.to(config.device).eval()
        eos = self.model.generation_config.eos_token_id
        self.eos: list[int] = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)

    def clock(self) -> float:
        if self.config.device.startswith("cuda"):
            self.torch.cuda.synchronize()
        return time.perf_counter()

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answer the prompts in one padded batch, as usual with transformers."""
        from transformers import GenerationConfig, StoppingCriteriaList

        torch, prompts, begun = self.torch, message["prompts"], self.clock()
        width = max(map(len, prompts))
        padding = self.eos[0] if self.eos else 0
        ids = torch.tensor([[padding] * (width - len(p)) + p for p in prompts], device=self.config.device)  # [B, L]
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.config.device)
        sampled = message["temperature"] > 0
        knobs = {key: message[key] for key in ("temperature", "top_p", "top_k", "min_p")} if sampled else {}
        settings = GenerationConfig(  # type: ignore[no-untyped-call,unused-ignore]
            max_new_tokens=message["max_tokens"],
            do_sample=sampled,
            eos_token_id=self.eos or None,
            pad_token_id=padding,
            **knobs,
        )
        first: list[float] = []

        def note_first(input_ids: Any, scores: Any, **_: Any) -> Any:
            """Called after every token: the first call is the time to the first token."""
            if not first:
                first.append(self.clock())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

        torch.manual_seed(message["seed"])
        start = self.clock()
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=mask,
                generation_config=settings,
                stopping_criteria=StoppingCriteriaList([note_first]),  # type: ignore[list-item,unused-ignore]
            )
        total_s = self.clock() - start
        rows = [self.cut(row) for row in out[:, width:].tolist()]
        answers = [{"token_ids": row, "first_token_s": first[0] - start, "total_s": total_s} for row in rows]
        return {"answers": answers, "wall_s": self.clock() - begun}

    def cut(self, tokens: list[int]) -> list[int]:
        """The tokens up to the end-of-text token; the rest is padding."""
        ends = [index for index, token in enumerate(tokens) if token in self.eos]
        return tokens[: ends[0] + 1] if ends else tokens


def serve() -> None:
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = sys.stderr  # output of libraries must not reach the parent as an answer
    server: Server | None = None
    for line in sys.stdin:
        message = json.loads(line)
        if server is None:
            server = Server(PeerConfig(**message))
            reply: dict[str, Any] = {"eos_token_ids": server.eos}
        else:
            reply = server.answer(message)
        channel.write(json.dumps(reply) + "\n")
        channel.flush()


if __name__ == "__main__":
    serve()
