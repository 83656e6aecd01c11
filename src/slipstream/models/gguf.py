"""GGUF files, turned once into folders that everything else can read.

transformers reads GGUF, but slowly and by unpacking the whole file each time. So a file is unpacked once, to fp32
safetensors with its tokenizer, into the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.core.errors import ModelError
from slipstream.models.paths import Progress, build_once, models_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CONVERSION = 1
"""Part of every converted folder's name: raise it when a conversion gives something else than before."""

ORIGIN = "slipstream.json"
"""In a converted folder: the file that it was made from."""

MAGIC = b"GGUF"
_METADATA = 1 << 25  # more than the metadata of any vocabulary takes
SPLIT = re.compile(r"-\d{5}-of-\d{5}$")


def converted_folder(file: Path) -> Path:
    """Where the conversion of `file` is, or will be. Another size or time of change is another file."""
    file = file.resolve()
    stat = file.stat()
    key = hashlib.sha256(f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    stem = re.sub(r"[^A-Za-z0-9._-]+", "_", file.stem).strip("._") or "model"
    return models_folder() / f"{stem[:80]}-{key}-v{CONVERSION}"


def convert_once(file: Path, progress: Progress | None = None) -> Path:
    """The folder that `file` converts to, in the cache; converted the first time."""
    say = progress or (lambda _: None)

    def build(work: Path) -> Path:
        converted = work / "model"
        say(f"converting {file.name} to safetensors (once)")
        convert_gguf(file, converted, say)
        (converted / ORIGIN).write_text(json.dumps({"source": str(file.resolve())}) + "\n")
        return converted

    return build_once(converted_folder(file), build)


def convert_gguf(file: Path, folder: Path, progress: Progress | None = None) -> None:
    """Write the model and tokenizer of `file` to `folder` in Hugging Face's layout, fp32.

    On failure a part may be left there: build it where nobody looks.
    """
    say = progress or (lambda _: None)
    _check(file)
    from slipstream.models.load import quiet_transformers

    with quiet_transformers():
        say("unpacking the weights")
        model, tokenizer = _read(file)
        say("writing the safetensors")
        try:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            mode = (folder / "config.json").stat().st_mode
            for weights in folder.glob("*.safetensors"):  # written for the owner's eyes only; a cache may be shared
                weights.chmod(mode)
        except Exception as error:
            raise ModelError(f"cannot write the converted model to {folder}: {error}. Is the disk full?") from error


def _read(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    import torch
    import transformers

    auto: Any = transformers
    options: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    unpack: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # releases without it always unpack
        unpack["quantization_config"] = auto.GgufConfig(dequantize=True)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # one of its progress bars asks nobody
            tokenizer = auto.AutoTokenizer.from_pretrained(file.parent, **options)
            model = auto.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options, **unpack)
    except Exception as error:  # a foreign file can fail in many ways, deep inside
        raise ModelError(
            f"{file}: transformers cannot read this GGUF file ({type(error).__name__}: {error}). "
            "Check that it is complete, or use the model's safetensors folder instead"
        ) from error
    if _pre_tokenizer(file) == "smollm":
        _split_digits(tokenizer)
    return model, tokenizer


def _check(file: Path) -> None:
    try:
        with file.open("rb") as handle:
            magic = handle.read(len(MAGIC))
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror}); check the path and its permissions") from error
    if magic != MAGIC:
        raise ModelError(f"{file}: not a GGUF file (it starts with {magic!r}, not {MAGIC!r}); it may be damaged")
    if SPLIT.search(file.stem):
        raise ModelError(f"{file}: one part of a split GGUF file; join the parts first with `llama-gguf-split --merge`")


def _pre_tokenizer(file: Path) -> str:
    """How llama.cpp cuts text before merging, as the file names it; empty if it does not say.

    Looked up by its bytes (key, type 8 for a string, length, text): parsing all metadata takes seconds.
    """
    key = b"tokenizer.ggml.pre" + struct.pack("<I", 8)
    with file.open("rb") as handle:
        metadata = handle.read(_METADATA)
    start = metadata.find(key) + len(key)
    if start < len(key) or start + 8 > len(metadata):
        return ""
    (length,) = struct.unpack_from("<Q", metadata, start)
    return metadata[start + 8 : start + 8 + length].decode(errors="replace")


def _split_digits(tokenizer: PreTrainedTokenizerBase) -> None:
    """SmolLM's tokenizer cuts numbers into digits before anything else; transformers' conversion forgets that."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    backend: Any = tokenizer
    backend.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
