"""A whole run: data, teacher, recipe, training, the finished drafter. What `slipstream train` does."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream.core.errors import CapacityError
from slipstream.models.identity import record_base
from slipstream.models.load import load_config, pick_device
from slipstream.models.paths import Progress
from slipstream.models.resolve import resolve
from slipstream.train.best import copy_best
from slipstream.train.card import model_card
from slipstream.train.checkpoint import begun_with
from slipstream.train.config import TrainConfig
from slipstream.train.data import gather
from slipstream.train.loop import Trainer
from slipstream.train.measure import Measure
from slipstream.train.packing import RowPlan
from slipstream.train.progress import sized, under_way
from slipstream.train.ranks import Ranks
from slipstream.train.recipe import Recipe, Setting, ToldShape, recipe_class
from slipstream.train.record import write_record
from slipstream.train.states import states_for
from slipstream.train.teacher import Teacher


@dataclass(frozen=True, slots=True)
class Finished:
    """What a run left behind."""

    folder: Path  # the drafter
    drafter: str  # how the engine is told to use it
    tau: dict[str, float]  # by temperature, on held-out prompts


def train(config: TrainConfig, say: Progress, *, recipe: type[Recipe] | None = None) -> Finished:
    """Run `config` to its end, from its last checkpoint on if there is one. recipe: one that is not registered."""
    kind = recipe or recipe_class(config.recipe)
    ranks = Ranks.join(config.device)
    tell = say if ranks.leads else _nobody
    try:
        if (begun := begun_with(config.out)) is not None:  # said before the target loads, which takes minutes
            config.check_same_run(TrainConfig.from_dict(begun))
        target = resolve(config.target, tell, trust_remote_code=config.trust_remote_code)
        kind.check(config, ToldShape(load_config(target, config.trust_remote_code)))
        device = pick_device(ranks.device(config.device))
        if device.type == "cuda":
            torch.cuda.set_device(device)
        config.out.mkdir(parents=True, exist_ok=True)
        data = gather(config, target, ranks, tell)
        tell(f"data: {len(data.sequences):,} answers, {data.sequences.answer_tokens:,} tokens of them")
        with under_way(tell, f"loading the target to learn from, {sized(target)}, on {device}"):
            teacher = Teacher.open(target, device, trust_remote_code=config.trust_remote_code)
        if device.type == "cuda":
            teacher.hasten(config.rows, config.row_tokens)
        torch.manual_seed(config.seed)
        made = kind.make(Setting(config, teacher, data.sequences.counts(teacher.vocab_size)))
        parameters = sum(p.numel() for p in made.module.parameters() if p.requires_grad)
        tell(f"{config.recipe}: {parameters:,} parameters to train on {device}")
        plan = RowPlan(data.sequences, config.row_tokens, config.seed)
        states = states_for(config, teacher, made.taps, len(data.sequences.tokens), ranks, tell)

        def record(trainer: Trainer) -> Path:
            return write_record(
                config,
                data.record,
                trainer.curves,
                step=trainer.step,
                seconds=trainer.seconds,
                parameters=parameters,
                best=trainer.best,
            )

        with Measure(config, made, target, data.held_out, str(device), tell) as measure:
            trainer = Trainer(config, made, states, plan, ranks, tell, measure, record)
            if trainer.resume():
                tell(f"resumed at step {trainer.step:,} of {config.steps:,}")
            trainer.run()
        folder = config.out / "drafter"
        best = trainer.best
        if ranks.leads:
            if best is not None:
                copy_best(config.out, folder)
                tell(f"{folder}: the drafter of step {best.step:,}, the best that was measured")
            else:  # a finished run whose best one was removed
                with trainer.averaged():
                    made.export(folder)
            for written_to in (folder, *(config_file.parent for config_file in folder.glob("*/config.json"))):
                record_base(written_to, target)
            written = json.loads(record(trainer).read_text())
            (folder / "README.md").write_text(model_card(written, made.drafter(Path("PATH"))), encoding="utf-8")
        ranks.wait()
        return Finished(folder, made.drafter(folder), dict(best.tau) if best else {})
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"the GPU's memory does not hold the target and what trains beside it ({error}); ask for fewer than "
            f"rows={config.rows} and lanes={config.lanes}, or choose a smaller target"
        ) from error
    finally:
        ranks.leave()


def _nobody(_: str) -> None:
    pass
