"""A whole training run: data, teacher, recipe, training, the finished drafter. `slipstream train` calls it."""

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
from slipstream.train.batch import RowPlan
from slipstream.train.checkpoint import copy_best, stored_config
from slipstream.train.config import TrainConfig
from slipstream.train.data import gather
from slipstream.train.loop import Trainer
from slipstream.train.measure import Measure
from slipstream.train.progress import sized, under_way
from slipstream.train.ranks import Ranks
from slipstream.train.recipe import ConfigShape, Recipe, Setting, recipe_class
from slipstream.train.record import model_card, write_record
from slipstream.train.teacher import Teacher, states_for


@dataclass(frozen=True, slots=True)
class Finished:
    """The result of a run."""

    folder: Path  # of the drafter
    drafter: str  # its spec for the engine
    tau: dict[str, float]  # measured on held-out prompts, by temperature


def train(config: TrainConfig, say: Progress, *, recipe: type[Recipe] | None = None) -> Finished:
    """Run `config` to its end, from its last checkpoint if there is one. recipe: overrides `config.recipe`."""
    kind = recipe or recipe_class(config.recipe)
    ranks = Ranks.join(config.device)
    say_once: Progress = say if ranks.leads else lambda _: None
    try:
        if (begun := stored_config(config.out)) is not None:  # checked before the target loads, which takes minutes
            config.check_same_run(TrainConfig.from_dict(begun))
        target = resolve(config.target, say_once, trust_remote_code=config.trust_remote_code)
        kind.check(config, ConfigShape(load_config(target, config.trust_remote_code)))
        device = pick_device(ranks.device(config.device))
        if device.type == "cuda":
            torch.cuda.set_device(device)
        config.out.mkdir(parents=True, exist_ok=True)
        data = gather(config, target, ranks, say_once)
        say_once(f"data: {len(data.corpus):,} answers, {data.corpus.answer_tokens:,} tokens")
        with under_way(say_once, f"loading the target as teacher, {sized(target)}, on {device}"):
            teacher = Teacher.open(target, device, trust_remote_code=config.trust_remote_code)
        if device.type == "cuda":
            teacher.compile(config.rows, config.row_tokens)
        torch.manual_seed(config.seed)
        made = kind.make(Setting(config, teacher, data.corpus.counts(teacher.vocab_size)))
        parameters = sum(p.numel() for p in made.module.parameters() if p.requires_grad)
        say_once(f"{config.recipe}: {parameters:,} parameters to train on {device}")
        plan = RowPlan(data.corpus, config.row_tokens, config.seed)
        states = states_for(config, teacher, made.taps, len(data.corpus.tokens), ranks, say_once)

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

        with Measure(config, made, target, data.held_out, str(device), say_once) as measure:
            trainer = Trainer(config, made, states, plan, ranks, say_once, measure, record)
            if trainer.resume():
                say_once(f"resumed at step {trainer.step:,} of {config.steps:,}")
            trainer.run()
        folder = config.out / "drafter"
        best = trainer.best
        if ranks.leads:
            if best is not None:
                copy_best(config.out, folder)
                say_once(f"{folder}: the drafter of step {best.step:,}, which measured best")
            else:  # the best drafter of this finished run was removed
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
            f"the GPU's memory is too small for the target and its training ({error}); lower "
            f"rows={config.rows} or lanes={config.lanes}, or choose a smaller target"
        ) from error
    finally:
        ranks.leave()
