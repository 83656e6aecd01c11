"""Slipstream and its peers on one GPU, on the same prompts, in one run.

    python bench/gpu.py --target DIR --draft DIR --prompts spec_bench.jsonl --json results.json [--plot results.png]
                        [--small DIR] [--peers plain,ngram,ngram_gpu,draft]

Greedy, up to 256 tokens, prefill included; one request at a time, then 8 and 32 at once. The prompts are a spread of a
Spec-Bench file: four of its multi-turn group and two of each other one, first turns only. Peers are the modes of vLLM,
each in a process of its own, after ours; they need vLLM on the path. The last line printed is the JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MULTI_TURN = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
BATCHES = (8, 32)
LONGEST_PROMPT = 3500


def spread(path: Path) -> list[str]:
    """The same 14 first turns for every engine."""
    groups: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        group = "multi_turn" if row["category"] in MULTI_TURN else row["category"]
        groups.setdefault(group, []).append(row["turns"][0])
    picked = {name: rows[::20][:4] if name == "multi_turn" else rows[3::27][:2] for name, rows in groups.items()}
    return [prompt for rows in picked.values() for prompt in rows]


def encode(tokenizer: Any, prompt: str) -> list[int]:
    chat = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    return list(ids)[:LONGEST_PROMPT]


Generate = Callable[[Sequence[list[int]]], list[list[int]]]


def rates(
    generate: Generate,
    prompts: Sequence[list[int]],
    batches: Sequence[int] = BATCHES,
    warm: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Tokens per second one at a time and in batches, after a warm-up of every size; `warm` hears when that is over."""
    generate(prompts[:4])
    for size in batches:
        generate((list(prompts) * 8)[:size])
    for prompt in prompts:
        generate([prompt])
    warm()
    start = time.perf_counter()
    answers = [generate([prompt])[0] for prompt in prompts]
    seconds = time.perf_counter() - start
    tokens = sum(map(len, answers))
    out: dict[str, Any] = {"tokens": tokens, "tok_s@1": tokens / seconds, "answers": answers}
    for size in batches:
        many = (list(prompts) * 8)[: 2 * size]
        start = time.perf_counter()
        tokens = sum(len(a) for i in range(0, len(many), size) for a in generate(many[i : i + size]))
        out[f"tok_s@{size}"] = tokens / (time.perf_counter() - start)
    return out


def ours(
    target: str, drafters: Sequence[str], prompts_file: Path, max_tokens: int, batches: Sequence[int]
) -> dict[str, Any]:
    from slipstream import LLM, SamplingParams, SpeculationParams

    start = time.perf_counter()
    llm = LLM(
        target, drafter=list(drafters) or None, dtype="bfloat16", device="cuda", memory="24GiB", max_model_len=4096
    )
    found: dict[str, Any] = {"start_s": time.perf_counter() - start}
    prompts = [encode(llm.tokenizer, prompt) for prompt in spread(prompts_file)]
    for mode in ("plain", *drafters):
        name = mode.split(":")[0]
        speculation = SpeculationParams(enabled=mode != "plain", drafter=None if mode == "plain" else name)
        params = SamplingParams(temperature=0, max_tokens=max_tokens, speculation=speculation)
        told: list[Any] = []

        def generate(
            ids: Sequence[list[int]], params: SamplingParams = params, told: list[Any] = told
        ) -> list[list[int]]:
            outputs = [o.outputs[0] for o in llm.generate([{"prompt_token_ids": i} for i in ids], params)]
            assert not any(o.error for o in outputs), [o.error for o in outputs]
            told.extend(o.speculation for o in outputs)
            return [list(o.token_ids) for o in outputs]

        found[name] = rates(generate, prompts, batches, told.clear)
        del told[len(prompts) :]  # those of one request at a time
        rounds = sum(s.rounds for s in told)
        parts = {
            part: sum(getattr(s, f"{part}_s") for s in told) / rounds * 1e3 for part in ("draft", "verify", "host")
        }
        found[name] |= {
            "rounds": rounds,
            "drafted": sum(s.drafted for s in told),
            "accepted": sum(s.accepted for s in told),
            "ms_per_round": parts,
        }
        found[name]["idle"] = idle_share(lambda: generate(prompts[:1]))
        print(name, {k: v for k, v in found[name].items() if k != "answers"}, flush=True)
    plain = found["plain"]["answers"]
    for mode in found:
        if mode not in ("start_s", "plain"):
            found[mode]["same_as_plain"] = sum(a == b for a, b in zip(found[mode].pop("answers"), plain, strict=True))
    found["plain"]["answers_of"] = len(found["plain"].pop("answers"))
    weights = llm.engine.target.weights_bytes
    llm.close()
    return {**found, "weights_bytes": weights}


def vllm(target: str, draft: str, mode: str, prompts_file: Path, max_tokens: int) -> dict[str, Any]:
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_USE_FLASHINFER_SAMPLER="0")
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    lookup = {"num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    speculative = {
        "plain": None,
        "ngram": {"method": "ngram", **lookup},
        "ngram_gpu": {"method": "ngram_gpu", **lookup},
        "draft": {"method": "draft_model", "model": draft, "num_speculative_tokens": 5},
    }[mode]
    llm = LLM(
        model=target,
        dtype="bfloat16",
        max_model_len=4096,
        gpu_memory_utilization=0.4,
        max_num_seqs=64,
        speculative_config=speculative,
        enable_prefix_caching=False,
    )
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    prompts = [encode(llm.get_tokenizer(), prompt) for prompt in spread(prompts_file)]

    def generate(ids: Sequence[list[int]]) -> list[list[int]]:
        outputs = llm.generate([{"prompt_token_ids": i} for i in ids], params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs]

    found = rates(generate, prompts)
    del found["answers"]
    return found


def peer(mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """One of vLLM's modes in a process of its own."""
    command = [sys.executable, __file__, "--as-peer", mode, "--target", options.target, "--draft", options.draft]
    command += ["--prompts", str(options.prompts), "--max-tokens", str(options.max_tokens)]
    paths = filter(None, [options.peer_path, os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    if done.returncode or not lines:
        return {"failed": (done.stderr or done.stdout)[-500:]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def idle_share(work: Callable[[], object]) -> float:
    """The part of the time in which no kernel ran, over the middle of some work."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    spans = sorted((e.time_range.start, e.time_range.end) for e in profile.events() if e.device_type == cuda)
    begin, end = spans[len(spans) // 4][0], spans[3 * len(spans) // 4][0]  # less the prompt and the last rounds
    busy, last = 0.0, begin
    for start, stop in spans:
        if stop > last and start < end:
            busy += min(stop, end) - max(start, last)
            last = stop
    return 1 - busy / (end - begin)


def copy_bandwidth() -> float:
    """Bytes per second of a copy on the device, read and written counted."""
    import torch

    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    seconds = []
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        torch.bitwise_not(source.view(torch.int64), out=target.view(torch.int64))
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return 2 * source.numel() / sorted(seconds)[len(seconds) // 2]


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 4))
    rows = {f"Slipstream {m}": r for m, r in results["ours"].items() if isinstance(r, dict)}
    rows |= {f"vLLM {m}": r for m, r in results["vllm"].items() if "failed" not in r}
    for axis, size in zip(axes, (1, *BATCHES), strict=True):
        values = [r.get(f"tok_s@{size}", 0) for r in rows.values()]
        axis.barh(list(rows), values, color=["#2266aa" if n.startswith("Slip") else "#999999" for n in rows])
        axis.invert_yaxis()
        axis.set_title(f"{size} at once, tokens/s")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="the model that answers")
    parser.add_argument("--draft", required=True, help="the draft model")
    parser.add_argument("--small", help="a small model to run by itself as well")
    parser.add_argument("--prompts", type=Path, required=True, help="a Spec-Bench file (JSON lines)")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--peers", default="", help="modes of vLLM, by comma: plain, ngram, ngram_gpu, draft")
    parser.add_argument("--peer-path", help="a folder with vLLM, where it is not installed")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--plot", type=Path, help="where a picture of them goes")
    parser.add_argument("--as-peer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_peer:
        print(json.dumps(vllm(options.target, options.draft, options.as_peer, options.prompts, options.max_tokens)))
        return
    import torch

    results: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "device": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "copy_bytes_per_s": copy_bandwidth(),
    }
    torch.cuda.empty_cache()
    drafters = ["ngram", f"model:{options.draft}"]
    results["ours"] = ours(options.target, drafters, options.prompts, options.max_tokens, BATCHES)
    if options.small:
        results["small"] = ours(options.small, [], options.prompts, options.max_tokens, (8,))
    torch.cuda.empty_cache()

    def save() -> None:
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")

    save()
    results["vllm"] = {}
    for mode in filter(None, options.peers.split(",")):
        results["vllm"][mode] = peer(mode, options)
        print("vllm", mode, results["vllm"][mode], flush=True)
        save()
    if options.plot:
        plot(results, options.plot)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
