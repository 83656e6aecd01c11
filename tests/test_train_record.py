"""The model card says what the records say, and shipping puts it beside the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bench_scripts import ship
from slipstream.train.record import model_card

RECORD: dict[str, Any] = {
    "config": {
        "recipe": "medusa",
        "target": "/somewhere/of/mine/tiny-model",
        "steps": 1600,
        "rows": 8,
        "row_tokens": 2048,
        "accumulate": 1,
        "learning_rate": 0.002,
        "final_rate": 0.02,
        "warmup": 50,
        "weight_decay": 0.0,
        "average": 0.99,
        "seed": 0,
        "measure_prompts": 96,
        "measure_tokens": 128,
        "options": {"heads": "3", "start": "/somewhere/of/mine/first-draft"},
    },
    "data": {
        "made_of": {
            "self_prompts": 20000,
            "prompts": ["/somewhere/of/mine/code.jsonl"],
            "temperatures": [0.0, 1.0],
            "samples": 2,
            "max_tokens": 512,
            "held_out": 64,
        },
        "answers": 41234,
        "answer_tokens": 9876543,
    },
    "parameters": 2874624,
    "steps_done": 1600,
    "training_seconds": 171.0,
    "best": {"step": 1200, "tau": {"0": 2.4567, "1": 2.1}},
    "versions": {"slipstream": "0.1.0", "torch": "2.13.0"},
    "device": "NVIDIA H200",
}
ACCEPTANCE: dict[str, Any] = {
    "settings": {"prompts": "spec_bench.jsonl", "max_tokens": 256},
    "prompts": 480,
    "results": [
        {
            "drafter": "medusa",
            "temperature": 0.0,
            "tau": 2.51,
            "categories": {"math": {"tau": 2.9}, "qa": {"tau": 2.2}},
        },
        {"drafter": "medusa:/x?a=1&b=2+suffix", "temperature": 1.0, "tau": 2.0, "categories": {"math": {"tau": 2.1}}},
        {"drafter": "eagle3", "temperature": 0.0, "tau": 3.7, "categories": {"math": {"tau": 3.9}}},
    ],
}


def test_the_card_is_filled_in_from_the_records() -> None:
    card = model_card(RECORD, "medusa", acceptance=ACCEPTANCE, licence="Apache-2.0")
    assert "On 64 held-out prompts" in card  # there are no more
    assert card.startswith("# medusa for tiny-model\n")
    assert "slipstream generate --model tiny-model --drafter 'medusa'" in card
    assert "Adds 2,874,624 parameters." in card
    assert "Licence: Apache-2.0." in card
    assert "20,000 user turns that the target wrote itself" in card
    assert "prompts of `code.jsonl`" in card
    assert "41,234 of them, 9,876,543 tokens, sampled at temperature 0 and 1, 2 to a prompt" in card
    assert "1,600 steps in 2.9 minutes on NVIDIA H200; kept: the weights of step 1,200." in card
    assert "| learning_rate | 0.002 |" in card
    assert "| --set heads | 3 |" in card
    assert "| --set start | first-draft |" in card
    assert "weight_decay" not in card  # it was off
    assert "| tau by task | medusa, T=0 | medusa (a=1, b=2) + suffix, T=1 |" in card
    assert "| math | 2.90 | 2.10 |" in card
    assert "| qa | 2.20 |  |" in card
    assert "| all | 2.51 | 2.00 |" in card
    assert "3.70" not in card  # another drafter's
    assert "tau 2.46 at temperature 0, 2.10 at temperature 1." in card
    assert "somewhere" not in card


def test_a_card_without_measurements() -> None:
    card = model_card({**RECORD, "best": None}, "medusa:PATH", acceptance={**ACCEPTANCE, "results": []})
    assert "tau by task" not in card
    assert "kept:" not in card


def trained(folder: Path, dtype: torch.dtype, size: int = 8) -> Path:
    (folder / "drafter" / "speculators").mkdir(parents=True)
    save_file({"w": torch.zeros(size, dtype=dtype)}, folder / "drafter" / "medusa_lm_head.safetensors")
    (folder / "drafter" / "config.json").write_text("{}")
    (folder / "drafter" / "speculators" / "config.json").write_text("{}")
    (folder / "run.json").write_text(json.dumps(RECORD))
    return folder


def test_shipping_copies_weights_and_writes_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, into = trained(tmp_path / "run", torch.float16), tmp_path / "heads"
    (into / "medusa").mkdir(parents=True)
    (into / "medusa" / "stale").touch()
    measured = tmp_path / "acceptance.json"
    measured.write_text(json.dumps(ACCEPTANCE))
    folder = ship.ship(run, into, measured)
    assert sorted(file.name for file in folder.iterdir()) == ["README.md", "config.json", "medusa_lm_head.safetensors"]
    assert "| all | 2.51 |" in (folder / "README.md").read_text()
    broken = trained(tmp_path / "broken", torch.float16)
    (broken / "drafter" / "medusa_lm_head.safetensors").unlink()
    with pytest.raises(ValueError, match=r"drafter: has no \*\.safetensors"):
        ship.ship(broken, into, None)
    assert (folder / "medusa_lm_head.safetensors").is_file(), "what is there stays"
    with pytest.raises(ValueError, match="has fp32 weights; train with --set kept=fp16"):
        ship.ship(trained(tmp_path / "wide", torch.float32), into, None)
    (into / "eagle3").mkdir()
    (into / "eagle3" / "model.safetensors").write_bytes(bytes(1000))
    monkeypatch.setattr(ship, "MOST_BYTES", 1050)
    with pytest.raises(ValueError, match="at most 64 are shipped"):
        ship.ship(run, into, None)
