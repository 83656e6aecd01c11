"""By family of models: whether they load, and whether tokens are the same with drafts and without, alone and among 32.

    python tools/shapes.py --tiny --seconds 900 --json cpu-fp32.json             # narrow shapes, for a CPU
    python tools/shapes.py --device cuda --dtype bfloat16 --json h200-bf16.json  # real widths, few layers: minutes
    python tools/shapes.py --device cuda --dtype bfloat16 --whole --requests 4 --only llama,mistral,qwen3,gemma3
    python tools/shapes.py --table cpu-fp32.json h200-bf16.json                  # writes docs/exactness.md's table

Needs no network and no checkpoint: each model has a published shape and the random weights that transformers begins
with, where two tokens are often close, so that rounding shows sooner than in text. Plain decoding, one request at a
time, is the reference. The guesses are the reference itself, with a wrong branch at every depth and a wrong end, so
that trees of all heights are accepted in part. Every model prints one line of JSON: its error and transformers' own
against fp32 as the check at load saw them, seconds to load, and in how many answers the tokens were the same.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from results import command_line
from slipstream import LLM, SamplingParams
from slipstream.core.draft import ROOT, Tree
from slipstream.core.errors import SlipstreamError
from slipstream.core.params import SpeculationParams
from slipstream.drafters.base import DraftRequest, HostDrafter
from slipstream.models.load import named_dtype, pick_device

AT_ONCE = 32
NODES = 12
DOCUMENT = Path(__file__).parents[1] / "docs" / "exactness.md"
MARKS = "<!-- table: tools/shapes.py -->", "<!-- end of table -->"
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def _shape(hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, "vocab_size": vocab, "max_position_embeddings": 32768, **more,
    }  # fmt: skip


# fmt: off
FAMILIES: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    # name -> the model whose shape it is, model_type, layers where not --whole, shape
    "llama": ("Llama-3.1-8B", "llama", 4, _shape(
        4096, 14336, 32, 32, 8, 128256, max_position_embeddings=131072, rope_parameters=_LLAMA3)),
    "mistral": ("Mistral-7B-v0.3", "mistral", 4, _shape(4096, 14336, 32, 32, 8, 32768, sliding_window=None)),
    "qwen2": ("Qwen2.5-7B", "qwen2", 4, _shape(3584, 18944, 28, 28, 4, 152064)),
    "qwen3": ("Qwen3-8B", "qwen3", 4, _shape(4096, 12288, 36, 32, 8, 151936, head_dim=128)),
    "gemma2": ("Gemma-2-2B", "gemma2", 4, _shape(2304, 9216, 26, 8, 4, 256000, head_dim=256)),
    "gemma3": ("Gemma-3-4B", "gemma3_text", 6, _shape(2560, 10240, 34, 8, 4, 262208, head_dim=256)),
    "phi3": ("Phi-3-mini", "phi3", 4, _shape(
        3072, 8192, 32, 32, 32, 32064, max_position_embeddings=4096, sliding_window=2047)),
    "granite": ("Granite-3.3-2B", "granite", 4, _shape(
        2048, 8192, 40, 32, 8, 49159, embedding_multiplier=12.0, residual_multiplier=0.22,
        attention_multiplier=0.015625, logits_scaling=8.0, tie_word_embeddings=True)),
    "smollm3": ("SmolLM3-3B", "smollm3", 4, _shape(2048, 11008, 36, 16, 4, 128256, tie_word_embeddings=True)),
    "olmo2": ("OLMo-2-7B", "olmo2", 4, _shape(4096, 11008, 32, 32, 32, 100352)),
    "gpt2": ("GPT-2", "gpt2", 12, {
        "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}),
    "gpt-oss": ("GPT-OSS-20B", "gpt_oss", 2, _shape(
        2880, 2880, 24, 64, 8, 201088, head_dim=64, num_local_experts=32, num_experts_per_tok=4, sliding_window=128)),
    "mixtral": ("Mixtral-8x7B", "mixtral", 2, _shape(4096, 14336, 32, 32, 8, 32000, num_local_experts=8)),
    "qwen3-moe": ("Qwen3-30B-A3B", "qwen3_moe", 2, _shape(
        2048, 6144, 48, 32, 4, 151936, head_dim=128, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8)),
}

TINY = {
    "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 4096, "num_experts": 8, "num_local_experts": 8,
    "sliding_window": 64, "max_position_embeddings": 4096, "n_embd": 256, "n_head": 8, "n_layer": 4,
}
# fmt: on


class Rehearsed(HostDrafter):
    """Guesses the known answer with a wrong branch beside every token and a wrong end."""

    name: ClassVar[str] = "rehearsed"
    bounded: ClassVar[bool] = True
    default_draft_tokens: ClassVar[int] = NODES

    def __init__(self) -> None:
        self.answers: dict[tuple[int, ...], Sequence[int]] = {}  # by prompt

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        return [self._tree(request, nodes) for request, nodes in zip(requests, budget, strict=True)]

    def _tree(self, request: DraftRequest, nodes: int) -> Tree:
        start = request.prompt_length
        answer = self.answers.get(tuple(request.tokens[:start]), ())
        tokens: list[int] = []
        parents: list[int] = []
        parent = ROOT
        for at in range(len(request.tokens) - start, len(answer)):
            if len(tokens) + 2 > nodes:
                break
            tokens += [abs(answer[at] - 1), answer[at]]
            parents += [parent, parent]
            parent = len(tokens) - 1
            if at % 7 == 6:
                tokens.pop()  # the wrong branch alone: here the draft ends
                parents.pop()
                break
        return Tree(tuple(tokens), tuple(parents))


def config_of(family: str, *, tiny: bool, whole: bool) -> Any:
    _, kind, layers, shape = FAMILIES[family]
    shape = dict(shape)
    if tiny:
        single = shape.get("num_key_value_heads") == shape.get("num_attention_heads")
        shape.update({key: value for key, value in TINY.items() if key in shape})
        if single and "num_attention_heads" in shape:
            shape["num_key_value_heads"] = shape["num_attention_heads"]
    if not whole:
        shape["n_layer" if "n_layer" in shape else "num_hidden_layers"] = min(layers, 6)
    kinds: Any = transformers.CONFIG_MAPPING
    return kinds[kind](**shape, bos_token_id=1, eos_token_id=2, pad_token_id=0)


def save_random(folder: Path, config: Any, dtype: torch.dtype, device: torch.device) -> None:
    """A checkpoint with the weights that transformers begins with, and a tokenizer of single bytes."""
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder, max_shard_size="8GB")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def compared(llm: LLM, drafter: Rehearsed, requests: int, tokens: int) -> dict[str, Any]:
    """The number of answers equal to plain decoding alone: with drafts, in a batch, with both."""
    generator = torch.Generator().manual_seed(1)
    lengths = [(17, 40, 90, 200)[i % 4] + i for i in range(requests - 1)] + [600]
    vocab = llm.engine.target.vocab_size
    prompts = [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]
    found = {"drafts": [0, 0], "company": [0, 0], "both": [0, 0]}
    accepted = 0
    for temperature in (0.0, 1.0):

        def ask(speculates: bool, at_once: int, temperature: float = temperature) -> list[Any]:
            params = [
                SamplingParams(
                    temperature=temperature,
                    seed=i,
                    max_tokens=tokens,
                    ignore_eos=True,
                    speculation=SpeculationParams(enabled=speculates, draft_tokens=NODES if speculates else None),
                )
                for i in range(requests)
            ]
            answers: list[Any] = []
            for start in range(0, requests, at_once):
                group = slice(start, start + at_once)
                asked = [{"prompt_token_ids": prompt} for prompt in prompts[group]]
                for output in llm.generate(asked, params[group]):
                    if output.outputs[0].error is not None:
                        raise SystemExit(f"a request failed: {output.outputs[0].error}")
                    answers.append(output.outputs[0])
            return answers

        reference = [list(answer.token_ids) for answer in ask(False, 1)]
        drafter.answers = {tuple(prompt): answer for prompt, answer in zip(prompts, reference, strict=True)}
        for name, speculates, at_once in (("drafts", True, 1), ("company", False, AT_ONCE), ("both", True, AT_ONCE)):
            answers = ask(speculates, at_once)
            same = sum(list(got.token_ids) == want for got, want in zip(answers, reference, strict=True))
            found[name] = [found[name][0] + same, found[name][1] + requests]
            accepted += sum(got.speculation.accepted for got in answers)
    return {**found, "accepted": accepted}


def measure(family: str, options: argparse.Namespace, root: Path | None) -> dict[str, Any]:
    """Measure one family: make, load, run and delete a model."""
    device, dtype = pick_device(options.device), named_dtype(options.dtype)
    config = config_of(family, tiny=options.tiny, whole=options.whole)
    row: dict[str, Any] = {"family": family, "shape": FAMILIES[family][0], "layers": config.num_hidden_layers}
    with tempfile.TemporaryDirectory(dir=root) as name:
        save_random(Path(name), config, dtype, device)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        began, drafter = time.perf_counter(), Rehearsed()
        try:
            llm = LLM(
                name, drafter=drafter, device=options.device, dtype=options.dtype, planner="fixed",
                max_num_seqs=AT_ONCE, max_model_len=1024, memory="4GiB" if device.type == "cuda" else "512MiB",
                prefix_caching=False,
            )  # fmt: skip
        except SlipstreamError as error:
            return {**row, "refused": str(error).replace(name, family)}
        with llm:
            target = llm.engine.target
            row |= {"load_s": round(time.perf_counter() - began, 1), "swaps": target.swaps}
            if (parity := target.parity) is not None:
                row |= {"ours": parity.ours, "theirs": parity.theirs, "most": parity.most}
                row["ratio"] = round(parity.ours / parity.theirs, 3) if parity.theirs else None
            row |= compared(llm, drafter, options.requests, options.max_tokens)
        row["seconds"] = round(time.perf_counter() - began, 1)
        del llm, target
    gc.collect()
    return row


def table(files: Sequence[Path]) -> str:
    """Markdown: families down, devices across. Results of one device and dtype share their columns."""
    runs = {file: json.loads(file.read_bytes()) for file in files}
    places: dict[str, dict[str, Any]] = {}
    for run in runs.values():
        places.setdefault(f"{run['device']} {run['dtype']}", {}).update({row["family"]: row for row in run["rows"]})
    head = ["family"]
    for place in places:
        head += [f"{place}: with drafts", f"{place}: among {AT_ONCE}"]
    lines = [head, ["---"] * len(head)]
    for family in FAMILIES:
        if any(family in rows for rows in places.values()):
            lines.append([family, *(cell for rows in places.values() for cell in _cells(rows.get(family)))])
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    notes = [
        f"* {run['device']} {run['dtype']}: {run['shapes']}, {run['requests']} prompts at T = 0 and T = 1, "
        f"{run['max_tokens']} tokens each ({run['date']}, torch {run['torch']}; `{run['command']}`; "
        f"[JSON](results/{file.name}))"
        for file, run in runs.items()
    ]
    return "\n".join((text, "", *notes))


def _cells(row: dict[str, Any] | None) -> tuple[str, str]:
    if row is None:
        return "not run", "not run"
    if "refused" in row:
        return "refused", "refused"
    return tuple(
        "**same**" if same == of else f"{same} of {of}"
        for same, of in (row["drafts"], min(row["company"], row["both"]))
    )  # type: ignore[return-value]


def write_table(files: Sequence[Path], document: Path) -> None:
    first, last = MARKS
    old = document.read_text()
    new, found = re.subn(
        f"{re.escape(first)}.*{re.escape(last)}", lambda _: f"{first}\n{table(files)}\n{last}", old, flags=re.DOTALL
    )
    if found != 1:
        raise SystemExit(f"{document}: must have the lines {first} and {last} once")
    document.write_text(new)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(FAMILIES), help="families by comma")
    parser.add_argument("--tiny", action="store_true", help="narrow shapes, for a CPU")
    parser.add_argument("--whole", action="store_true", help="all layers of the real shape")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=AT_ONCE)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument(
        "--seconds", type=float, default=None, help="begin no further family after so long: 200, 500 with --whole"
    )
    parser.add_argument("--folder", type=Path, default=None, help="where models are written, one at a time")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="results to write the table from")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="what the table is written into")
    options = parser.parse_args(arguments)
    if options.table:
        write_table(options.table, options.document)
        return
    names = options.only.split(",")
    if unknown := [name for name in names if name not in FAMILIES]:
        parser.error(f"--only {unknown[0]}: must be of {', '.join(FAMILIES)}")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    device, began = pick_device(options.device), time.perf_counter()
    shapes = "narrow shapes" if options.tiny else "real widths, " + ("all layers" if options.whole else "2 to 6 layers")
    result: dict[str, Any] = {
        "command": command_line(sys.argv if arguments is None else [__file__, *arguments]),
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "dtype": options.dtype,
        "torch": torch.__version__,
        "shapes": shapes,
        "requests": options.requests,
        "max_tokens": options.max_tokens,
        "rows": [],
    }
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 40e9
    root = options.folder or (memory if device.type == "cuda" and roomy else None)
    for family in names:
        if time.perf_counter() - began > (options.seconds or (500 if options.whole else 200)):
            break
        result["rows"].append(measure(family, options, root))
        print(json.dumps(result["rows"][-1]), flush=True)
        if options.json:  # as far as it is: a run that is cut leaves what it has
            options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
