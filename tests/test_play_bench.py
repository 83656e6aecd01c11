"""The cells in a simulated engine: texts are what they are said to be, and `auto` does there what it is to do."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from bench_scripts import play
from slipstream.core.draft import Tree
from slipstream.plan.types import Load


def test_cells_are_played_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "play.json"
    play.main(["--at-once", "4", "--temperatures", "0", "--tasks", "math,hard,hard", "--json", str(kept)])
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert found == json.loads(kept.read_text())
    names = ["math x4 T=0, seed 1", "hard x4 T=0, seed 1", "hard x4 T=0, seed 1'"]
    assert list(found["cells"]) == names
    assert [line.partition(":")[0] for line in lines[:3]] == names
    math, hard, _ = found["cells"].values()
    assert set(math) == set(play.SETTINGS)
    assert math["auto"] > 1.3 * math["plain"]
    assert hard["auto"] > 0.95 * hard["plain"] > 1.2 * hard["eagle3"], "a large tree for nothing"
    assert "3 cells" in lines[3]


def test_texts_are_as_hard_as_was_measured() -> None:
    text = play.Text(2.5, 3.5, 0.0)
    traces = play.traces(text, 0.0, 60, random.Random(1))
    for drafter, tau, deep in (("model", text.model, play.DEEP), ("eagle", text.eagle, play.LEVELS)):
        rounds = [1 + min(offer.right, deep) for trace in traces for offer in trace.offers[drafter]]
        assert sum(rounds) / len(rounds) == pytest.approx(tau, rel=0.15)
    for offer in traces[0].offers["eagle"]:
        assert offer.parents is not None
        Tree(tuple(range(len(offer.parents))), offer.parents)  # raises where it is none
        assert all(offer.parents[node] == above for node, above in zip(offer.path, (-1, *offer.path), strict=False))


def test_trees_take_longer_than_chains_of_as_many_rows_and_prompts_as_long_beside_both() -> None:
    costs = play.H200()
    for rows in (16, 48, 256):
        chain, tree = costs.pass_s(rows, 0, Load()), costs.pass_s(rows, 0, Load(), is_tree=True)
        assert (chain, tree) == pytest.approx((1e-3 * play.PASS_MS[rows], 1e-3 * play.TREE_MS[rows]))
        beside = costs.pass_s(rows, 16, Load()), costs.pass_s(rows, 16, Load(), is_tree=True)
        assert beside[1] - tree == pytest.approx(beside[0] - chain)


@pytest.mark.parametrize(("option", "wrong"), [("--tasks", "none"), ("--at-once", "x"), ("--temperatures", "2")])
def test_what_is_asked_wrongly(option: str, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        play.main([option, wrong])
    assert f"{option}='{wrong}'" in capsys.readouterr().err


def test_a_temperature_of_which_there_is_no_real_text_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "T0.json"
    file.write_text(json.dumps({"temperature": 0.0, "tasks": {"math": []}}))
    with pytest.raises(SystemExit):
        play.main(["--offers", str(file), "--temperatures", "0,1"])
    assert "math at --temperatures 1" in capsys.readouterr().err
