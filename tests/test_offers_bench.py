"""tools/offers.py: at each place of an answer what each drafter would guess, and play.py plays it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench_scripts import offers, play
from simulator.recording import unpacked


def test_every_place_has_an_offer_and_is_played(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A draft model that is the target itself is always right; n-grams of a text that repeats itself sometimes are."""
    prompts, kept = tmp_path / "tasks.jsonl", tmp_path / "offers.json.gz"
    lines = [{"question_id": i, "category": ("qa", "rag")[i % 2], "turns": [f"Ask {i} {i}"]} for i in range(6)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = f"--model {tiny_target} --drafter ngram model:{tiny_target} --prompts {prompts} --to {kept}"
    offers.main(f"{words} --prompts-each 2 --max-tokens 48 --longest 32".split())
    assert capsys.readouterr().out.count("96 tokens") == 4, "both tasks, by both drafters"
    found = play.offered([kept])
    assert set(found) == {("qa", 0.0), ("rag", 0.0)}
    for answers in found.values():
        assert len(answers) == 2
        for trace in answers:
            places = [offer.position for offer in trace.offers["model"]]
            assert places == list(range(1, 47)), "but the first token, which the prompt brings, and the last"
            for offer in trace.offers["model"]:
                assert offer.nodes == offer.right == min(11, 48 - offer.position - 1)
            assert all(offer.right <= offer.nodes for offer in trace.offers.get("ngram", ()))
    play.main(["--offers", str(kept), "--at-once", "4", "--temperatures", "0", "--tasks", "qa"])
    rates = json.loads(capsys.readouterr().out.splitlines()[-1])["cells"]["qa x4 T=0, seed 1"]
    assert rates["draft"] > 3 * rates["plain"]
    assert rates["auto"] > 1.1 * rates["draft"], "the planner goes further where all is right"


def test_answers_must_be_the_same() -> None:
    packed = {"request": [8, 5, 0, 0, 0, 0, 0], "drafters": [], "offers": {"a": [[1, 3, 2]]}}
    one, other = unpacked(packed), unpacked({**packed, "offers": {"b": [[1, 2, 0]]}})
    said = (1, 2, 3, 4, 5)
    (both,) = offers.merged([offers.Answer(said, one)], [offers.Answer(said, other)])
    assert set(both.trace.offers) == {"a", "b"} == set(both.trace.drafters)
    for again, told in (((1, 2, 9, 4, 5), "at token 3"), ((*said, 6), "in length: 5, now 6")):
        with pytest.raises(SystemExit, match=f"answer 1 is another than before, {told}"):
            offers.merged([offers.Answer(said, one)], [offers.Answer(again, other)])
