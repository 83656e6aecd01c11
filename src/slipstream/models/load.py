"""Loads configuration, tokenizer and weights of a model folder by transformers, and makes its failures clear errors.

transformers fills tensors that a checkpoint lacks with random numbers and reports that in a log; here it is an error.
Draft models may be stored without embedding and LM head, which are most of a small draft: the target's modules take
their place as they are, whatever they have become there (codes, packed or row-independent products).
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import re
from collections.abc import Callable, Collection, Iterator
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from slipstream.core.errors import (
    CapacityError,
    ConfigError,
    ModelError,
    SlipstreamError,
    UnsupportedModel,
    device_failed,
)
from slipstream.models.describe import SHARES
from slipstream.models.headers import (
    DTYPES,
    check_device_name,
    check_dtype_name,
    has_pickles,
    read_header,
    weight_files,
    weights_bytes,
)

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
LENT = (EMBEDDING, LM_HEAD)
"""Tensors that a draft may be stored without."""
_COMPUTED = 2**22
"""Numbers that a computed tensor may have in any model: the mask of 2,048 positions, for instance."""

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


_MACHINE = re.compile(r"can't allocate memory|not enough memory|NVIDIA driver|CUDA driver|Triton Error")
"""Messages of torch's `RuntimeError` for failures of the machine."""

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


@contextlib.contextmanager
def naming_model(path: Path) -> Iterator[None]:
    """Turn failures inside that are due to a model's files into a `ModelError` that names `path`.

    Failures of the machine pass unchanged: other files would not help.
    """
    try:
        yield
    except ModelError as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error
    except (SlipstreamError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if _of_the_machine(error):
            raise
        why = " ".join(str(error).split())[:300]
        raise UnsupportedModel(
            f"{path}: the model cannot be built or run as its config.json says ({type(error).__name__}: {why}). "
            "Correct or fetch config.json again; if transformers runs the model, use transformers"
        ) from error


def _of_the_machine(error: Exception) -> bool:
    """Whether the cause is a missing package, too little memory, a driver, the GPU or the kernel compiler."""
    if isinstance(error, ImportError | MemoryError) or device_failed(error):
        return True
    if type(error).__module__.partition(".")[0] == "triton":
        return True
    return isinstance(error, RuntimeError) and _MACHINE.search(str(error)) is not None


def names_model(
    function: Callable[Concatenate[Path, _Given], _Made],
) -> Callable[Concatenate[Path, _Given], _Made]:
    """Decorates a function of a model's folder with `naming_model`."""

    @wraps(function)
    def call(path: Path, /, *args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
        with naming_model(path):
            return function(path, *args, **kwargs)

    return call


def load_config(path: Path, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of the model in `path`."""
    with quiet_transformers():
        try:
            config = transformers.AutoConfig.from_pretrained(
                path, trust_remote_code=trust_remote_code, local_files_only=True
            )
        except Exception as error:
            text = str(error)
            if "trust_remote_code" in text:
                raise ModelError(
                    f"{path}: the model brings its own Python code. Read it, and if you trust it allow it with "
                    "trust_remote_code"
                ) from error
            if "does not recognize this architecture" in text or "Unrecognized model" in text:
                raise UnsupportedModel(
                    f"{path / 'config.json'}: transformers {transformers.__version__} does not know its model_type. "
                    "A newer transformers may"
                ) from error
            raise ModelError(f"{path / 'config.json'}: cannot be read ({text}). Fetch the file again") from error
    return cast(PreTrainedConfig, config)


def load_tokenizer(path: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The fast tokenizer of the model in `path`."""
    with quiet_transformers():
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                path, trust_remote_code=trust_remote_code, local_files_only=True
            )
        except Exception as error:
            raise ModelError(
                f"{path}: its tokenizer cannot be loaded ({type(error).__name__}: {error}). The folder must hold "
                "tokenizer.json and tokenizer_config.json"
            ) from error
    if not tokenizer.is_fast:
        raise ModelError(f"{path}: only a slow tokenizer ({type(tokenizer).__name__}); tokenizer.json is missing")
    # no request truncates or pads, and changing either between calls is not safe with several threads
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return cast(PreTrainedTokenizerBase, tokenizer)


def load_weights(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    trust_remote_code: bool = False,
    config: PreTrainedConfig | None = None,
    lent: Collection[str] = (),
) -> PreTrainedModel:
    """The model in `path` on `device`, ready for inference. attention: the name of transformers' attention function.

    Every tensor comes from the checkpoint: missing, left-over or misshapen ones raise `ModelError`. config: overrides
    the stored one. lent: tensors that may be missing, because another model's take their place.
    """
    files = weight_files(path)
    stored = {name: header for file in files for name, header in read_header(file).items()}
    if not files and not has_pickles(path):
        raise ModelError(f"{path}: no weights; model.safetensors (or its index and parts) is missing")
    if files:
        _check_outline(path, config or load_config(path, trust_remote_code), stored, trust_remote_code)
    auto: Any = transformers.AutoModelForCausalLM  # untyped: its types lack `output_loading_info`
    placement: dict[str, Any] = {} if device.type == "cpu" else {"device_map": {"": device}}
    with quiet_transformers():
        try:
            model, info = auto.from_pretrained(
                path,
                dtype=dtype,
                attn_implementation=attention,
                use_safetensors=bool(files),
                weights_only=True,  # a pickle must not run code
                ignore_mismatched_sizes=True,  # so that the error can name them all
                output_loading_info=True,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                **({} if config is None else {"config": config}),
                **placement,
            )
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"{path}: {weights_bytes(path) / 1e9:.1f} GB of weights do not fit on {device}. Choose a smaller "
                "model, a narrower dtype or another device"
            ) from error
        except Exception as error:
            if _of_the_machine(error):
                raise
            raise ModelError(f"{path}: its weights cannot be loaded ({type(error).__name__}: {error})") from error
    info["missing_keys"] = set(info["missing_keys"]) - set(lent)
    _check_complete(path, model.config, info)
    return cast(PreTrainedModel, model.eval().requires_grad_(False))


def pick_dtype(name: str, device: torch.device, config: PreTrainedConfig) -> torch.dtype:
    """The torch dtype called `name`; `auto` is fp32 on the CPU, and bf16 on a GPU unless the checkpoint is fp16."""
    if name == "auto":
        if device.type == "cpu":
            return torch.float32
        return torch.float16 if getattr(config, "dtype", None) == torch.float16 else torch.bfloat16
    return named_dtype(name)


def named_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name`, such as bf16; not `auto`."""
    check_dtype_name(name)
    return _DTYPES[name]


def pick_device(name: str) -> torch.device:
    """The torch device called `name`; `auto` is the first GPU, or the CPU without one."""
    _, _, index = name.partition(":")
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if name == "cpu":
        return torch.device("cpu")
    check_device_name(name)
    if not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}: torch {torch.__version__} sees no CUDA GPU here; use device=cpu, or auto")
    if int(index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={name!r}: there are {torch.cuda.device_count()} GPUs, counted from 0")
    return torch.device("cuda", int(index or 0))


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Switch off transformers' progress bars and warnings inside, and restore them afterwards."""
    logging: Any = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _check_outline(path: Path, config: PreTrainedConfig, stored: dict[str, Any], trust_remote_code: bool) -> None:
    """Refuse a mismatch before memory is taken: a number in config.json may ask for any amount."""
    layers, experts = len(stored), max((dim for header in stored.values() for dim in header["shape"]), default=0)
    numbers = {key: value for key, value in vars(config).items() if isinstance(value, int)}
    for key, value in numbers.items():
        if (key == "num_hidden_layers" and value > layers) or ("experts" in key and value > max(layers, experts)):
            raise ModelError(
                f"{path}: {key}={value} in config.json, but there are only {layers} tensors, and none of more than "
                f"{experts} rows. Fetch the model again, or correct its config.json"
            )
    with naming_model(path), quiet_transformers(), torch.device("meta"):
        auto: Any = transformers.AutoModelForCausalLM
        outline: Any = auto.from_config(config, trust_remote_code=trust_remote_code)
    wanted = {name: weight for name, weight in outline.named_parameters() if name in stored}
    for name in wanted:
        if stored[name]["dtype"] not in DTYPES:
            raise ModelError(
                f"{path}: {name} is stored as {stored[name]['dtype']}, not as floating-point numbers of 16, 32 or 64 "
                "bits. Use the unquantized checkpoint, or fetch the model again"
            )
    largest = max(_COMPUTED, *(math.prod(header["shape"]) for header in stored.values()))
    for name, buffer in outline.named_buffers():
        if name not in stored and buffer.numel() > largest:
            raise ModelError(
                f"{path}: {name} would have {buffer.numel()} numbers by config.json, and no tensor of the checkpoint "
                f"has more than {largest}. Fetch the model again, or correct its config.json"
            )
    shapes = [(name, stored[name]["shape"], weight.shape) for name, weight in wanted.items()]
    wrong = [(name, had, shape) for name, had, shape in shapes if tuple(had) != tuple(shape)]
    _check_complete(path, config, {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": wrong})


def _check_complete(path: Path, config: PreTrainedConfig, info: dict[str, Any]) -> None:
    unexpected = [name for name in info["unexpected_keys"] if not _is_draft_head(name, config)]
    misshapen = [
        f"{name} {tuple(stored)} instead of {tuple(wanted)}" for name, stored, wanted in info["mismatched_keys"]
    ]
    problems = [
        f"{len(names)} {what}: {', '.join(sorted(names)[:5])}{', ...' if len(names) > 5 else ''}"
        for what, names in (
            ("tensors are missing", list(info["missing_keys"])),
            ("tensors belong to no part of the model", unexpected),
            ("tensors have the wrong shape", misshapen),
        )
        if names
    ]
    if problems:
        raise ModelError(
            f"{path}: the weights do not fit the configuration (model_type {config.model_type}); "
            f"{'; '.join(problems)}. Fetch the model again, or correct its config.json"
        )


def _is_draft_head(name: str, config: PreTrainedConfig) -> bool:
    """Many checkpoints contain multi-token-prediction heads, which the model itself does not use."""
    parts = name.split(".")
    if any(part.startswith("mtp") for part in parts):
        return True
    layers = getattr(config, "num_hidden_layers", None)
    after = parts[parts.index("layers") + 1] if "layers" in parts[:-1] else ""
    return layers is not None and after.isdecimal() and int(after) >= layers and _has_heads(config)


def _has_heads(config: PreTrainedConfig) -> bool:
    return bool(getattr(config, "num_nextn_predict_layers", 0) or getattr(config, "mtp_num_hidden_layers", 0))


def shares_embeddings(folder: Path) -> bool:
    """Whether `folder` holds a draft without embeddings of its own. False if its configuration cannot be read."""
    try:
        return bool(json.loads((folder / "config.json").read_bytes()).get(SHARES, False))
    except (OSError, ValueError, AttributeError):
        return False


def shape_of(target: PreTrainedModel) -> tuple[int, int]:
    """Rows and width of a model's embeddings."""
    vocab, hidden = cast(Tensor, target.get_input_embeddings().weight).shape
    return vocab, hidden


def check_fits(folder: Path, config: PreTrainedConfig, vocab: int, hidden: int) -> None:
    """Raise `ModelError` if a draft was made for embeddings of another shape."""
    wanted = (cast(int, config.vocab_size), cast(int, config.hidden_size))
    if wanted != (vocab, hidden):
        raise ModelError(
            f"{folder}: it shares its target's embeddings and was made for {EMBEDDING} {wanted} (vocab_size, "
            f"hidden_size); this target's is {(vocab, hidden)}. Use it with the target that it was trained for, or "
            "train one for this target (slipstream train draft)"
        )


def without_embeddings(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration for loading such a draft: a vocabulary of one, so that embeddings take no memory."""
    small: Any = copy.deepcopy(config)
    small.vocab_size, small.tie_word_embeddings = 1, False
    small.bos_token_id = small.eos_token_id = small.pad_token_id = None  # they would lie outside of it
    return cast(PreTrainedConfig, small)


def lend(model: PreTrainedModel, target: PreTrainedModel) -> PreTrainedModel:
    """Put the target's embedding and LM head into the draft."""
    model.set_input_embeddings(target.get_input_embeddings())
    model.set_output_embeddings(cast(nn.Module, target.get_output_embeddings()))
    model.config.vocab_size = shape_of(target)[0]
    return model
