"""GGUF files, converted once into folders in Hugging Face's layout.

transformers reads GGUF slowly and unpacks the whole file each time. So a file is unpacked once, into fp32 safetensors
with its tokenizer, in the cache.
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
"""Part of every converted folder's name: raise it when the conversion's result changes."""

ORIGIN = "slipstream.json"
"""File in a converted folder that names its source."""

MAGIC = b"GGUF"

_METADATA = 1 << 25  # bytes: more than the metadata of any vocabulary
_UINT32, _STRING = struct.pack("<I", 4), struct.pack("<I", 8)  # the format's type numbers
_SPECIAL = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
SPLIT = re.compile(r"-\d{5}-of-\d{5}$")


def converted_folder(file: Path) -> Path:
    """The folder of `file`'s conversion, which may not exist yet. Depends on the file's size and modification time."""
    file = file.resolve()
    stat = file.stat()
    key = hashlib.sha256(f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    stem = re.sub(r"[^A-Za-z0-9._-]+", "_", file.stem).strip("._") or "model"
    return models_folder() / f"{stem[:80]}-{key}-v{CONVERSION}"


def convert_once(file: Path, progress: Progress | None = None) -> Path:
    """The folder of `file`'s conversion in the cache; the first call converts it."""
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

    A failure may leave a partial folder: use a temporary one.
    """
    say = progress or (lambda _: None)
    check_gguf(file)
    from slipstream.models.load import quiet_transformers

    with quiet_transformers():
        say("unpacking the weights")
        model, tokenizer = _read(file)
        say("writing the safetensors")
        try:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            mode = (folder / "config.json").stat().st_mode
            for weights in folder.glob("*.safetensors"):  # created for the owner alone; a cache may be shared
                weights.chmod(mode)
        except Exception as error:
            raise ModelError(f"cannot write the converted model to {folder}: {error}. Is the disk full?") from error


def _read(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    import torch
    import transformers

    auto: Any = transformers
    options: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    unpack: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # older releases always unpack
        unpack["quantization_config"] = auto.GgufConfig(dequantize=True)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # one of its progress bars cannot be switched off
            tokenizer = auto.AutoTokenizer.from_pretrained(file.parent, **options)
            model = auto.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options, **unpack)
    except Exception as error:  # a damaged file can fail in many ways
        raise ModelError(
            f"{file}: transformers cannot read this GGUF file ({type(error).__name__}: {error}). "
            "Check that it is complete, or use the model's safetensors folder instead"
        ) from error
    _mend(tokenizer, file)
    return model, tokenizer


def check_gguf(file: Path) -> None:
    """Raise `ModelError` unless `file` begins like a complete GGUF file."""
    try:
        with file.open("rb") as handle:
            magic = handle.read(len(MAGIC))
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror}); check the path and its permissions") from error
    if magic != MAGIC:
        raise ModelError(f"{file}: not a GGUF file (it starts with {magic!r}, not {MAGIC!r}); it may be damaged")
    if SPLIT.search(file.stem):
        raise ModelError(f"{file}: one part of a split GGUF file; join the parts first with `llama-gguf-split --merge`")


def _mend(tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    """Correct what transformers' conversion gets wrong, from the file's metadata."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    with file.open("rb") as handle:
        metadata = handle.read(_METADATA)
    tokenizer.clean_up_tokenization_spaces = False  # otherwise text loses spaces that the model wrote
    for role, key in _SPECIAL.items():  # transformers 5.17 takes the start token for the end of a turn
        if found := _find(metadata, key, _UINT32):
            (token,) = struct.unpack_from("<I", metadata, found)
            setattr(tokenizer, role, tokenizer.convert_ids_to_tokens(token))
    if found := _find(metadata, "tokenizer.ggml.pre", _STRING):
        (length,) = struct.unpack_from("<Q", metadata, found)
        if metadata[found + 8 : found + 8 + length] == b"smollm":  # splits numbers into digits first
            backend: Any = tokenizer
            cut = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
            backend.backend_tokenizer.pre_tokenizer = cut


def _find(metadata: bytes, key: str, kind: bytes) -> int:
    """The offset of `key`'s value; 0 if missing. Searches bytes, because parsing all metadata takes seconds."""
    name = key.encode()
    entry = struct.pack("<Q", len(name)) + name + kind
    found = metadata.find(entry)
    return found + len(entry) if found >= 0 else 0
