"""The check at load: a model that differs is refused, a swap that differs is undone, and a verdict is remembered."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from families import CPU, Passes, load_reference, plain_logits, random_tokens, save_random, tiny_config
from slipstream.core.errors import ModelError, UnsupportedModel
from slipstream.kernels.attention import paged_attention
from slipstream.models import attention, parity
from slipstream.models import runner as runner_module
from slipstream.models.attention import MaskRule
from slipstream.models.fused import FusedLayer
from slipstream.models.parity import open_model
from slipstream.models.runner import Runner, open_unchecked

FP32 = torch.float32


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("families")
    return cache(lambda family: save_random(root / family, tiny_config(family)))


@pytest.fixture
def checks(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How often transformers was asked for its logits, in a cache of the test's own."""
    asked: list[str] = []
    true = parity._reference

    def counted(runner: Runner, *, fp32: bool = True) -> Tensor:
        if fp32:
            asked.append(type(runner.model).__name__)
        return true(runner, fp32=fp32)

    monkeypatch.setattr(parity, "_reference", counted)
    return asked


def error(runner: Runner, folder: Path, start: int = 0) -> float:
    tokens = random_tokens(16, seed=3)
    ours = Passes(runner).run([(0, tokens)], start=start)
    return float((ours - plain_logits(load_reference(folder), tokens, start)).abs().max())


# --- which swaps hold


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("family", ["llama-yarn", "qwen2-slides", "seed-oss"])
def test_layers_of_llamas_shape_stay_fused(folder_of: Callable[[str], Path], family: str) -> None:
    runner = open_model(folder_of(family), FP32, CPU)
    assert runner.swaps.startswith("3 fused layers")
    assert sum(isinstance(module, FusedLayer) for module in runner.model.modules()) == 3


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("family", ["smollm3", "ministral3"])
def test_a_fused_layer_that_would_be_wrong_is_undone(folder_of: Callable[[str], Path], family: str) -> None:
    folder = folder_of(family)
    runner = open_model(folder, FP32, CPU)
    far = runner.max_positions - 16  # Ministral 3 differs only there
    assert "fused" not in runner.swaps
    assert not any(isinstance(module, FusedLayer) for module in runner.model.modules())
    assert max(error(runner, folder), error(runner, folder, far)) < 1e-4

    wrong = open_unchecked(folder, FP32, CPU)
    wrong.swap(fused=True)
    assert wrong.swaps.startswith("3 fused layers")
    assert max(error(wrong, folder), error(wrong, folder, far)) > 1e-3


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("family", ["qwen2-slides"])
def test_a_fused_layer_asks_what_the_layer_asked(folder_of: Callable[[str], Path], family: str) -> None:
    """Scaling and window are seen, not guessed from the names of attributes."""
    runner = open_unchecked(folder_of(family), FP32, CPU)
    asked = dict(runner._traits)
    runner.swap(fused=True)
    assert runner._probe().traits == asked


def test_bf16_models_are_checked_too(folder_of: Callable[[str], Path], checks: list[str]) -> None:
    runner = open_model(folder_of("llama"), torch.bfloat16, CPU)
    assert runner.dtype == torch.bfloat16
    assert runner.swaps == "3 fused layers"
    assert checks == ["LlamaForCausalLM"]


# --- rounding of 16 bits


def test_a_deep_model_may_round_as_transformers_does(tmp_path: Path, own_cache: Path) -> None:
    folder = save_random(tmp_path / "deep", tiny_config("qwen2", num_hidden_layers=12))
    tensors = load_file(folder / "model.safetensors")
    sharp = {name: 4 * weight if "q_proj" in name or "k_proj" in name else weight for name, weight in tensors.items()}
    save_file(sharp, folder / "model.safetensors", {"format": "pt"})
    runner = open_model(folder, torch.bfloat16, CPU)
    assert runner.parity is not None
    assert runner.parity.theirs > parity.TOLERANCE[torch.bfloat16]  # as Llama-3.1-8B's shape on a GPU
    assert runner.parity.ours <= 1.5 * runner.parity.theirs == runner.parity.most


@pytest.mark.usefixtures("own_cache")
def test_rounding_is_no_excuse_for_a_wrong_swap(folder_of: Callable[[str], Path]) -> None:
    """SmolLM3 has layers without rotary positions, which fused layers do not know."""
    runner = open_model(folder_of("smollm3"), torch.bfloat16, CPU)
    assert "fused" not in runner.swaps
    assert runner.parity is not None
    assert runner.parity.holds


def test_rounding_is_no_excuse_for_a_wrong_model(
    folder_of: Callable[[str], Path], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "visible_rows", lambda words, rows: torch.ones(rows, rows, dtype=torch.bool))
    with pytest.raises(UnsupportedModel, match=r"in fp32 by \d.*its own pass in this dtype by \d"):
        open_model(folder_of("qwen2"), torch.bfloat16, CPU)


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "deepseek-v3"])
def test_the_reference_is_fp32_by_the_same_weights(folder_of: Callable[[str], Path], family: str) -> None:
    runner, wide = (open_unchecked(folder_of(family), dtype, CPU) for dtype in (torch.bfloat16, FP32))
    before = {name: weight.clone() for name, weight in runner.model.state_dict().items()}
    for weight, rounded in zip(wide.model.parameters(), runner.model.parameters(), strict=True):
        weight.data = rounded.data.float()
    torch.testing.assert_close(parity._reference(runner), parity._reference(wide), rtol=1e-2, atol=1e-3)
    after = runner.model.state_dict()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    assert {name: weight.dtype for name, weight in after.items()} == {n: w.dtype for n, w in before.items()}


@pytest.mark.usefixtures("own_cache")
def test_a_swap_that_cannot_run_is_undone(folder_of: Callable[[str], Path]) -> None:
    """Ernie's rotary angles stay fp32, which our fused layers do not expect in 16 bits."""
    assert "fused" not in open_model(folder_of("ernie4.5"), torch.bfloat16, CPU).swaps


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("error", [Exception("out of resource: shared memory"), RuntimeError("CUDA error: assert")])
def test_a_kernel_that_cannot_compile_is_undone_and_a_lost_device_is_not(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Triton's errors are no RuntimeErrors; and nothing runs on a device after it failed."""
    true = parity._ours

    def ours(runner: Runner) -> Tensor:
        if "fused" in runner.swaps:
            raise error
        return true(runner)

    monkeypatch.setattr(parity, "_ours", ours)
    if isinstance(error, RuntimeError):
        with pytest.raises(RuntimeError, match="CUDA error"):
            open_model(folder_of("llama"), FP32, CPU)
    else:
        assert "fused" not in open_model(folder_of("llama"), FP32, CPU).swaps


# --- what is refused


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("number", [float("-inf")])
def test_weights_that_are_no_numbers_are_named(tmp_path: Path, number: float) -> None:
    folder = save_random(tmp_path / "model", tiny_config("qwen3"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 2] = number
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN or infinite numbers"):
        open_model(folder, FP32, CPU)


@pytest.mark.parametrize("family", ["gpt2"])
def test_a_model_that_we_compute_otherwise_is_refused(
    folder_of: Callable[[str], Path], family: str, checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "visible_rows", lambda words, rows: torch.ones(rows, rows, dtype=torch.bool))
    for _ in range(2):  # a refusal is not remembered as anything else
        with pytest.raises(UnsupportedModel, match=r"our logits differ from transformers' in fp32 by \d.*run it with"):
            open_model(folder_of(family), FP32, CPU)
    assert len(checks) == 2


@pytest.mark.usefixtures("own_cache")
def test_nan_is_no_parity(folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    true = paged_attention
    monkeypatch.setattr(attention, "paged_attention", lambda *a, **k: true(*a, **k) * float("nan"))
    with pytest.raises(UnsupportedModel, match="nan"):
        open_model(folder_of("llama"), FP32, CPU)


def test_in_16_bits_one_row_may_stray_but_not_a_part() -> None:
    exact = torch.randn(sum(parity._PARTS), 50, generator=torch.Generator().manual_seed(0))
    one, part = exact.clone(), exact.clone()
    one[3] += 1
    part[-parity._PARTS[-1] :] *= 1.2

    def judge(dtype: torch.dtype, theirs: float) -> parity._Judge:
        return parity._Judge(exact, dtype, torch.full((len(exact),), theirs))

    stray = judge(torch.bfloat16, 0.01).verdict(one)
    assert (stray.ours, stray.holds) == (0, True)
    assert stray.most == pytest.approx(0.015)
    assert not judge(FP32, 0).verdict(one).holds
    assert not judge(torch.bfloat16, 0.1).verdict(part).holds
    assert judge(torch.bfloat16, 0.15).verdict(part).holds
    uneven = torch.full((len(exact),), 0.01)
    uneven[: parity._PARTS[0]] = 1
    assert not parity._Judge(exact, torch.bfloat16, uneven).verdict(part).holds  # errors elsewhere are no excuse
    assert not judge(torch.bfloat16, 0.015).verdict(exact * 1.05).holds  # SmolLM3's shape on a GPU, wrongly fused
    assert not judge(torch.bfloat16, 0.2).verdict(exact * float("nan")).holds


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("bloom", "BloomForCausalLM: it uses its attention mask outside"),
        ("mamba", r"MambaForCausalLM: .* layers \[\] instead of once for each of 2"),
        ("rwkv", r"RwkvForCausalLM: .* layers \[\] instead of once for each of 2"),
    ],
)
def test_attention_that_never_reaches_us_is_refused_by_name(
    family: str, why: str, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should a family slip through the lists, its first pass still finds it out."""
    kind: Any = transformers.CONFIG_MAPPING[family]
    config = kind(vocab_size=97, hidden_size=32, num_hidden_layers=2)
    with torch.random.fork_rng():
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    with pytest.raises(UnsupportedModel, match=f"model_type {family}"):
        open_model(tmp_path / "model", FP32, CPU)
    monkeypatch.setattr(runner_module, "check_supported", lambda config, **_: None)
    with pytest.raises(UnsupportedModel, match=why):
        open_model(tmp_path / "model", FP32, CPU)
    assert not (own_cache / "checked").exists()


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("family", ["mamba", "bloom"])
def test_a_refusal_by_configuration_reads_no_weights(family: str, tmp_path: Path) -> None:
    transformers.CONFIG_MAPPING[family]().save_pretrained(tmp_path)  # there are no weights to read
    with pytest.raises(UnsupportedModel, match=f"model_type {family}"):
        open_model(tmp_path, FP32, CPU)


# --- the attention function itself


class Layer(nn.Module):
    layer_idx = 0
    is_causal = True


def call_attention(module: nn.Module | None = None, mask: Any = None, **arguments: Any) -> Tensor:
    query, key = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    with attention.running(attention.ProbeContext(5, CPU)):
        out, _ = attention.attention(module or Layer(), query, key, key, mask, **arguments)
    return out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"alibi": torch.zeros(1), "zeta": 0}, "alibi, zeta"),
        ({"dropout": 0.1}, "dropout"),
        ({"mask": torch.zeros(1, 1, 5, 5)}, "attention_mask"),
        ({"is_causal": False}, "not causal"),
    ],
)
def test_an_argument_that_we_do_not_know_raises(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"Layer .*{named}"):
        call_attention(**arguments)


def test_arguments_that_change_nothing_pass() -> None:
    out = call_attention(alibi=None, position_ids=torch.arange(5), output_router_logits=False, dropout=0.0)
    assert out.shape == (1, 5, 4, 8)


def test_a_layer_that_looks_both_ways_is_refused() -> None:
    module = Layer()
    module.is_causal = False
    with pytest.raises(UnsupportedModel, match="not causal"):
        call_attention(module)


def test_outside_of_a_pass_attention_says_so(folder_of: Callable[[str], Path]) -> None:
    runner = open_unchecked(folder_of("llama"), FP32, CPU)
    with pytest.raises(RuntimeError, match=r"Runner\.forward"):
        runner.model(input_ids=torch.tensor([[1, 2]]))


@pytest.mark.parametrize(
    "use",
    [
        lambda mask: torch.zeros(2, 2) + mask,
        lambda mask: mask.shape,
    ],
)
def test_a_mask_rule_is_no_tensor(use: Callable[[Any], Any]) -> None:
    with pytest.raises(UnsupportedModel, match="outside of transformers' attention interface"):
        use(MaskRule(None, causal))


def causal(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


def slides(window: int) -> Callable[[Any, Any, Tensor, Tensor], Tensor]:
    return lambda batch, head, query, key: (key <= query) & (key > query - window)


@pytest.mark.parametrize(("window", "rule"), [(None, causal), (7, slides(7)), (4096, slides(4096))])
def test_mask_rules_that_we_know(window: int | None, rule: Any) -> None:
    MaskRule(window, rule).check("Some")


@pytest.mark.parametrize(
    ("window", "rule"),
    [
        (None, slides(4096)),
        (7, causal),
        (7, slides(8)),
        (8, lambda b, h, query, key: (key <= query) & (key // 8 == query // 8)),  # chunks
        (None, lambda b, h, query, key: (key <= query) | (key < 6)),  # a prefix that looks both ways
        (None, lambda b, h, query, key: (key <= query) & torch.ones(3, dtype=torch.bool)[key]),  # looks tokens up
    ],
)
def test_mask_rules_that_we_do_not_know(window: int | None, rule: Any) -> None:
    with pytest.raises(UnsupportedModel, match="Some uses an attention mask"):
        MaskRule(window, rule).check("Some")


def test_the_mask_has_the_last_word_on_the_window() -> None:
    """As in transformers' own attention, which does not read the argument."""
    torch.manual_seed(0)
    narrow = call_attention(mask=MaskRule(2, slides(2)), sliding_window=4)
    torch.manual_seed(0)
    assert torch.equal(narrow, call_attention(sliding_window=2))
    with pytest.raises(UnsupportedModel, match="Layer uses an attention mask"):
        call_attention(mask=MaskRule(2, slides(3)))


# --- the note


def test_a_verdict_is_remembered(folder_of: Callable[[str], Path], checks: list[str], own_cache: Path) -> None:
    told: list[str] = []
    first = open_model(folder_of("granite"), FP32, CPU, progress=told.append)
    assert (len(checks), len(told)) == (1, 1)
    again = open_model(folder_of("granite"), FP32, CPU, progress=told.append)
    assert (len(checks), len(told)) == (1, 1)
    assert again.swaps == first.swaps
    (note,) = (own_cache / "checked").iterdir()
    assert json.loads(note.read_text())["swaps"] == "packed"
    assert again.parity == first.parity


@pytest.mark.parametrize("content", ["{", "[]", '{"swaps": "turbo"}', '{"swaps": ["fused"]}'])
def test_a_damaged_note_is_ignored_and_replaced(
    folder_of: Callable[[str], Path], checks: list[str], own_cache: Path, content: str
) -> None:
    open_model(folder_of("llama"), FP32, CPU)
    (note,) = (own_cache / "checked").iterdir()
    good = note.read_text()
    note.write_text(content)
    open_model(folder_of("llama"), FP32, CPU)
    assert len(checks) == 2
    assert note.read_text() == good


def test_a_cache_that_cannot_be_written_costs_only_the_note(
    folder_of: Callable[[str], Path], checks: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "file"))
    for _ in range(2):
        assert open_model(folder_of("llama"), FP32, CPU).swaps.startswith("3 fused")
    assert len(checks) == 2


def note(folder: Path, dtype: torch.dtype = FP32) -> Path:
    return parity._Note(folder, dtype, CPU).file


def test_the_note_depends_on_everything_that_the_verdict_could(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_random(tmp_path / "model", tiny_config("llama"))
    first = note(folder)
    assert note(folder) == first
    assert note(folder, torch.bfloat16) != first

    for owner in ("slipstream", "transformers", "torch"):
        with monkeypatch.context() as patch:
            patch.setattr(getattr(parity, owner), "__version__", "0.0.0")
            assert note(folder) != first
    with monkeypatch.context() as patch:
        patch.setattr(parity, "_digest", lambda folder: "other code")
        assert note(folder) != first
    assert note(folder) == first

    weights = folder / "model.safetensors"
    stat = weights.stat()
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    touched = note(folder)
    assert touched != first
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    assert note(folder) not in (first, touched)


def test_the_digest_sees_a_changed_kernel(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text("x = 1\n")
    before = parity._digest(tmp_path)
    (tmp_path / "kernel.py").write_text("x = 2\n")
    assert parity._digest(tmp_path) != before


def test_another_model_in_the_same_folder_is_checked_again(tmp_path: Path, checks: list[str]) -> None:
    """The verdict on a Llama must not serve the Granite that took its place."""
    folder = save_random(tmp_path / "model", tiny_config("llama"))
    assert "fused" in open_model(folder, FP32, CPU).swaps
    save_random(folder, tiny_config("granite"))
    assert "fused" not in open_model(folder, FP32, CPU).swaps
    assert checks == ["LlamaForCausalLM", "GraniteForCausalLM"]
