"""The best drafter of a run so far, by tau as it was measured in the engine: loss is no judge of drafters.

It is exported as soon as it is measured, so that it need not be found again. The folder is there whole, whenever a run
is killed, and says itself at which step it was made: a run that is resumed goes by that.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from slipstream.core.errors import ConfigError
from slipstream.train.swap import beside, recover, remove, swap_in

_NAME, _NOTE, _DRAFTER = "best", "best.json", "drafter"


@dataclass(frozen=True, slots=True)
class Best:
    """When it was measured, and what it reached."""

    step: int
    tau: Mapping[str, float]  # by temperature

    def beats(self, other: Best | None) -> bool:
        """Is it better, not merely as good? Then the earlier one stays."""
        return other is None or sum(self.tau.values()) > sum(other.tau.values())


def load_best(out: Path) -> Best | None:
    """What the run in `out` has kept; None: nothing yet."""
    recover(out / _NAME)
    file = out / _NAME / _NOTE
    try:
        return Best(**json.loads(file.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error}); remove {file.parent} to go on without it") from error


def keep_best(out: Path, best: Best, export: Callable[[Path], None]) -> None:
    """Put this one in the place of the one before. export: writes the drafter into a folder."""
    work = beside(out / _NAME)
    export(work / _DRAFTER)
    (work / _NOTE).write_text(json.dumps(asdict(best)) + "\n")
    swap_in(out / _NAME)


def forget_best(out: Path) -> None:
    """The run begins anew."""
    remove(out / _NAME)


def copy_best(out: Path, folder: Path) -> None:
    """The drafter that was kept, as the finished one."""
    shutil.copytree(out / _NAME / _DRAFTER, beside(folder), dirs_exist_ok=True)
    swap_in(folder)
