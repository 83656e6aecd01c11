"""Acceptance of both verifiers side by side, on the same prompts.

    python tools/verifiers.py [--model default] [--drafter blurred ngram] [--blur 0.06] [--draft-tokens 4]
                              [--temperature 0.6 1] [--top-p 0.95] [--top-k 0] [--limit 14] [--max-tokens 48]
                              [--json FILE]

A drafter is named as on the command line of slipstream, or `blurred`: the model itself with noise on its weights
(`--blur`, as a part of each weight's own deviation), a draft model that is right now and then. Every round drafts
the most tokens that it may. alpha is accepted / drafted tokens, tau tokens a pass, the target's own included. The two
verifiers give different answers, so their figures differ by chance too. The last line printed is the JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from results import settings, told
from slipstream import LLM, SamplingParams, SpeculationParams
from slipstream.bench.prompts import load_prompts, select
from slipstream.core.params import VerifierName
from slipstream.drafters import parse_spec
from slipstream.models.resolve import resolve

VERIFIERS: tuple[VerifierName, ...] = ("exact", "rejection")
BLURRED = "blurred"


@contextmanager
def blurred(model: str, noise: float) -> Iterator[str]:
    """A copy of the model with noise in its weight matrices. blur: standard deviations."""
    generator = torch.Generator().manual_seed(0)
    source = resolve(model, None)
    with tempfile.TemporaryDirectory() as folder:
        for path in source.iterdir():
            if path.suffix == ".json" or path.name.startswith("tokenizer") or path.suffix == ".jinja":
                shutil.copy(path, folder)
        for path in source.glob("*.safetensors"):
            weights = load_file(path)
            for weight in weights.values():
                if weight.dim() == 2:
                    spread = noise * float(weight.float().std())
                    weight += (torch.randn(weight.shape, generator=generator) * spread).to(weight.dtype)
            save_file(weights, Path(folder) / path.name, metadata={"format": "pt"})
        yield folder


def measured(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> dict[str, float]:
    own = [replace(params, seed=seed) for seed in range(len(prompts))]
    answers = [output.outputs[0] for output in llm.generate([{"prompt_token_ids": list(p)} for p in prompts], own)]
    if failed := [answer.error for answer in answers if answer.error]:
        raise SystemExit(f"a request failed: {failed[0]}")
    stats = [answer.speculation for answer in answers]
    drafted, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
    emitted, rounds = sum(s.emitted for s in stats), sum(s.rounds for s in stats)
    return {"drafted": drafted, "alpha": round(accepted / max(1, drafted), 4), "tau": round(emitted / rounds, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--drafter", nargs="+", default=[BLURRED, "ngram"])
    parser.add_argument("--blur", type=float, default=0.06)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.6, 1.0])
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--limit", type=int, default=14)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        named = {
            name: f"model:{stack.enter_context(blurred(options.model, options.blur))}" if name == BLURRED else name
            for name in options.drafter
        }
        llm = stack.enter_context(LLM(options.model, drafter=list(named.values()), planner="fixed", max_num_seqs=8))
        prompts = [
            llm.chat_prompt([{"role": "user", "content": prompt.text}])
            for prompt in select(load_prompts(), (), options.limit)
        ]
        for name, spec in named.items():
            for temperature in options.temperature:
                for verifier in VERIFIERS:
                    how = SpeculationParams(
                        drafter=parse_spec(spec).name, draft_tokens=options.draft_tokens, verifier=verifier
                    )
                    params = SamplingParams(
                        temperature=temperature,
                        top_p=options.top_p,
                        top_k=options.top_k,
                        max_tokens=options.max_tokens,
                        ignore_eos=True,
                        speculation=how,
                    )
                    about = {"drafter": told(name), "temperature": temperature, "verifier": verifier}
                    rows.append({**about, **measured(llm, prompts, params)})
                    print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    result = json.dumps({"settings": settings(options), "rows": rows})
    print(result, flush=True)
    if options.json is not None:
        options.json.write_text(result + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
