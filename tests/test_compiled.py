"""A pass as one compiled call gives what the layers give one by one, and a row's bits do not depend on its company."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from families import (
    CPU,
    Passes,
    in_torch,
    load_reference,
    path_to,
    plain_logits,
    random_tokens,
    same_numbers,
    save_random,
    tiny_config,
)
from slipstream.drafters.suffix import compiling
from slipstream.kernels.cpu import compiled as code
from slipstream.kernels.cpu.compiled import can_compile
from slipstream.models.fused import FusedTrunk
from slipstream.models.runner import Runner, open_unchecked

FAMILIES = ["llama-yarn", "qwen2-slides", "qwen3", "seed-oss"]
TREE = (-1, -1, 0, 0, 1, 2, 5)


@pytest.fixture(scope="module")
def runner_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Runner]:
    root = tmp_path_factory.mktemp("compiled")

    @cache
    def make(family: str) -> Runner:
        name, _, heads = family.partition(" of ")
        more = {"num_attention_heads": int(heads), "num_key_value_heads": 1} if heads else {}
        folder = save_random(root / family, tiny_config(name, intermediate_size=48, vocab_size=100, **more))
        runner = open_unchecked(folder, torch.float32, CPU)
        runner.swap(fused=True)
        return runner

    return make


def trunk(runner: Runner) -> FusedTrunk:
    return next(module for module in runner.model.modules() if isinstance(module, FusedTrunk))


def story(runner: Runner) -> list[Tensor]:
    """Prompts of two requests, plain steps, chains, a tree beside a chain, and many rows of a prompt."""
    passes = Passes(runner, pages_each=40)
    first, second = random_tokens(90, 1), random_tokens(60, 2)
    return [
        passes.run([(0, first[:11]), (1, second[:5])]),
        passes.run([(1, second[5:6])]),
        passes.run([(0, first[11:12]), (1, second[6:14])]),
        passes.run([(0, random_tokens(len(TREE), 3)), (1, second[14:16])], parents=TREE),
        passes.run([(0, first[12:15]), (1, second[16:17])], rows=[2, 3]),
        passes.run([(0, first[15:80])]),
        passes.run([(0, first[80:84]), (1, second[17:18])]),
        passes.cache.keys(2).clone(),
        passes.cache.values(2).clone(),
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_compiled_pass_is_the_layers_one_by_one(runner_of: Callable[[str], Runner], family: str) -> None:
    runner = runner_of(family)
    assert (trunk(runner).compiled is not None) == can_compile()
    compiled = story(runner)
    with in_torch(runner.model):
        assert trunk(runner).compiled is None
        wanted = story(runner)
    assert (trunk(runner).compiled is not None) == can_compile()
    for ours, theirs in zip(compiled, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2-slides", "qwen3"])
def test_a_row_has_the_same_bits_in_any_company(runner_of: Callable[[str], Runner], family: str) -> None:
    """Token by token, as a chain, and on a branch of a tree beside another request: logits and cache are equal."""
    runner, prompt = runner_of(family), random_tokens(19, 4)
    plain, chain, tree = (Passes(runner) for _ in range(3))
    for passes in (plain, chain, tree):
        passes.run([(0, prompt)])
    nodes = random_tokens(len(TREE), 5)
    branch = path_to(TREE, 6)
    steps = torch.cat([plain.run([(0, [nodes[node]])]) for node in branch])
    at_once = chain.run([(0, [nodes[node] for node in branch])])
    in_a_tree = tree.run([(0, nodes), (1, random_tokens(9, 6))], parents=TREE)[branch]
    assert same_numbers(steps, at_once)
    assert same_numbers(steps, in_a_tree)
    for layer in range(3):
        assert same_numbers(plain.cache.keys(layer), chain.cache.keys(layer))


@pytest.mark.parametrize("family", ["llama", "llama of 8", "qwen2-slides", "qwen3"])
def test_a_prompt_has_the_same_bits_however_it_is_cut(runner_of: Callable[[str], Runner], family: str) -> None:
    """In one piece, in several, beside another prompt, and token by token."""
    runner, prompt = runner_of(family), random_tokens(90, 4)
    whole, beside, parts, steps = (Passes(runner, pages_each=30) for _ in range(4))
    wanted = whole.run([(0, prompt)])
    assert same_numbers(beside.run([(0, prompt), (1, random_tokens(75, 5))])[:90], wanted)
    assert same_numbers(torch.cat([parts.run([(0, prompt[at : at + 40])]) for at in (0, 40, 80)]), wanted)
    assert same_numbers(torch.cat([steps.run([(0, [token])]) for token in prompt]), wanted)


@pytest.mark.parametrize("threads", [2, 7])
def test_any_number_of_threads_gives_the_same_bits(runner_of: Callable[[str], Runner], threads: int) -> None:
    """Also more than there are cores, so that some are not running when their pieces are wanted."""
    runner, before, found = runner_of("qwen3"), torch.get_num_threads(), []
    try:
        for team in (1, threads, threads):
            torch.set_num_threads(team)
            passes = Passes(runner, pages_each=40)
            found.append(passes.run([(0, random_tokens(150, 1)), (1, random_tokens(4, 2))]))
            found[-1] = torch.cat((found[-1], passes.run([(0, [5]), (1, random_tokens(4, 3))])))
    finally:
        torch.set_num_threads(before)
    assert same_numbers(found[0], found[1])
    assert same_numbers(found[0], found[2])


def test_another_cache_is_noticed(runner_of: Callable[[str], Runner]) -> None:
    runner, tokens = runner_of("llama"), random_tokens(8, 1)
    first, second = Passes(runner), Passes(runner)
    wanted = first.run([(0, tokens)])
    assert torch.equal(second.run([(0, tokens)]), wanted)
    assert torch.equal(first.cache.keys(0), second.cache.keys(0))
    assert torch.equal(second.run([(0, tokens[:1])]), first.run([(0, tokens[:1])]))


def test_nan_stays_nan_and_in_its_own_row(runner_of: Callable[[str], Runner]) -> None:
    runner = runner_of("llama")
    passes, clean = Passes(runner), Passes(runner)
    for each in (passes, clean):
        each.run([(0, random_tokens(5, 1)), (1, random_tokens(6, 2))])
    slot = passes.pages[0][0] * 4 + 2
    passes.cache.values(1)[slot] = float("nan")
    ours, theirs = (each.run([(0, [7]), (1, [8])]) for each in (passes, clean))
    assert ours[0].isnan().all()
    assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("family", ["qwen2-slides"])
@pytest.mark.parametrize("length", [30, 600])
def test_it_is_what_transformers_computes(tmp_path: Path, family: str, length: int) -> None:
    """Also where a prompt is so long that its attention is computed in parts."""
    sizes = {"intermediate_size": 48, "vocab_size": 100, "max_position_embeddings": 640}
    folder = save_random(tmp_path / family, tiny_config(family, **sizes))
    runner, tokens = open_unchecked(folder, torch.float32, CPU), random_tokens(length, 3)
    runner.swap(fused=True)
    ours = Passes(runner, pages_each=200).run([(0, tokens)])
    torch.testing.assert_close(ours, plain_logits(load_reference(folder), tokens), atol=2e-4, rtol=1e-4)


def test_a_compiler_that_cannot_run_apart_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def refuse(command: list[str], **_: object) -> None:
        calls.append(command)
        raise OSError("no processes here")

    monkeypatch.setattr(code, "_folder", tmp_path / "empty")
    monkeypatch.setattr(code, "needs_compiling", lambda: True)
    monkeypatch.setattr("subprocess.run", refuse)
    code.make_apart()
    assert [command[-1] for command in calls] == [str(tmp_path)]
    monkeypatch.setattr(code, "needs_compiling", lambda: False)
    code.make_apart()
    assert len(calls) == 1


@pytest.mark.parametrize("shared", ["compiled", "."])
def test_code_is_not_kept_where_others_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: str) -> None:
    """What lies there is run: a folder that others can write to is not used."""
    monkeypatch.setattr(code, "_folder", None)
    folder = tmp_path / "cache" / "compiled"
    folder.mkdir(parents=True)
    code.keep_in(folder)
    assert code._folder is not None
    (tmp_path / "cache" / shared).chmod(0o775)
    code.keep_in(folder)
    assert code._folder is None


def test_code_of_another_kind_of_machine_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home may be shared between several: what one of them compiled leaves the others to compile theirs."""
    monkeypatch.setattr(code, "_folder", None)
    kept: list[object] = []
    for machine in ("x86_64", "aarch64"):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        compiling._digest.cache_clear()
        code.keep_in(tmp_path / "compiled")
        kept += [code._folder, compiling._digest()]
    compiling._digest.cache_clear()
    assert len(set(kept)) == 4
