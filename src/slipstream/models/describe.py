"""What a configuration says about a model: whether it can be run, and its longest context.

Rollback of a draft means not advancing the cache's length. That works for keys and values, not for a recurrent state;
and a layer that does not call our attention function would silently compute something else. Such models are refused
before weights are read. Others that differ fail the comparison with transformers at load (`parity.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from slipstream.core.errors import UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SUPPORTED_LAYERS = frozenset({"full_attention", "sliding_attention"})

# fmt: off
STATEFUL = frozenset({
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "inkling_text", "jamba",
    "kimi_linear", "lfm2", "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_next", "qwen4_exp_text", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2", "zaya",
})
# fmt: on
"""Families with a recurrent or convolutional state."""

# fmt: off
OWN_ATTENTION = frozenset({
    "big_bird", "bloom", "codegen", "cpmant", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "megatron-bert",
    "mpt", "mvp", "openai-gpt", "prophetnet", "reformer", "rembert", "roformer", "trocr", "xglm", "xlm", "xlnet",
})
# fmt: on
"""Families whose attention never passes through transformers' attention interface."""

# fmt: off
ENCODERS = frozenset({
    "bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "roberta", "roberta-prelayernorm",
    "roc_bert", "xlm-roberta", "xlm-roberta-xl", "xmod",
})
# fmt: on
"""Encoder families that transformers can also run as decoders."""

SEVERAL_NETWORKS = frozenset({"blt", "moshi"})

_OTHER_PARTS = ("text_config", "vision_config", "audio_config", "audio_encoder_config")
_OTHER_MODEL = (
    "Choose a decoder-only model with full or sliding attention (Llama, Mistral, Qwen2, Qwen3, Gemma 3 text...)"
)


SHARES = "shares_embeddings"
"""Key of a configuration: the checkpoint has no embedding and LM head, and uses those of its target."""


def check_supported(config: PreTrainedConfig, *, alone: bool = True) -> None:
    """Raise `UnsupportedModel`, with reason and remedy, unless a model of this configuration can be run.

    alone: as a target, not as a draft that may share its target's embeddings.
    """
    kind = config.model_type
    if alone and getattr(config, SHARES, False):
        _refuse(
            config,
            f"it is a draft that shares its target's embeddings ({SHARES}: true) and has none of its own",
            "Name it as the drafter of the target that it was trained for: --drafter model:PATH",
        )
    if scheme := _quantization(config):
        _refuse(
            config, f"its weights are quantized ({scheme}), which is not supported", "Use the unquantized checkpoint"
        )
    if getattr(config, "is_encoder_decoder", False):
        _refuse(config, "it is an encoder-decoder model", _OTHER_MODEL)
    if kind in SEVERAL_NETWORKS:
        _refuse(config, "it is made of several networks that decode together", _OTHER_MODEL)
    if parts := [part for part in _OTHER_PARTS if getattr(config, part, None) is not None]:
        _refuse(
            config,
            f"it is a multimodal model ({', '.join(parts)} in its configuration)",
            "Use a text-only checkpoint of the family, or save its language model alone as a folder of its own",
        )
    if kind in ENCODERS or getattr(config, "use_bidirectional_attention", None) is True:
        _refuse(config, "it is an encoder: its attention looks both ways", _OTHER_MODEL)
    if getattr(config, "attention_chunk_size", None):
        _refuse(
            config,
            f"its attention works in chunks (attention_chunk_size={config.attention_chunk_size}), which layers do not "
            "tell the attention function",
            _OTHER_MODEL,
        )
    if foreign := sorted(set(_layer_types(config)) - SUPPORTED_LAYERS):
        _refuse(config, f"it has layers of other kinds: {', '.join(foreign)}", _OTHER_MODEL)
    if kind in STATEFUL:
        _refuse(
            config, "it keeps a recurrent or convolutional state, which cannot forget a rejected draft", _OTHER_MODEL
        )
    if kind in OWN_ATTENTION:
        _refuse(config, "its attention does not pass through transformers' attention interface", _OTHER_MODEL)


def _refuse(config: PreTrainedConfig, why: str, remedy: str) -> None:
    path = getattr(config, "_name_or_path", "")
    name = f"{path} (model_type {config.model_type})" if path else f"model_type {config.model_type}"
    raise UnsupportedModel(f"{name}: {why}. {remedy}")


def _quantization(config: PreTrainedConfig) -> str | None:
    found: Any = getattr(config, "quantization_config", None)
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method) or "unnamed scheme")


def _layer_types(config: PreTrainedConfig) -> Iterable[str]:
    # older hybrids call it `layers_block_type`
    return getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()


def max_positions_of(config: PreTrainedConfig) -> int:
    """The longest context of a model, in tokens."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        if longest := getattr(config, name, None):
            if not isinstance(longest, int) or longest < 2:
                raise UnsupportedModel(
                    f"{name}={longest!r} in config.json: must be a whole number of at least 2. Correct it, or fetch "
                    "the model again"
                )
            return min([longest, *_one_rotary(config)])
    keys = "max_position_embeddings, n_positions, max_seq_len"
    raise UnsupportedModel(f"{config.model_type}: config.json has none of {keys}, which name the longest context")


def _one_rotary(config: PreTrainedConfig) -> list[int]:
    """The length at which LongRoPE would change its frequencies, which bounds the context.

    It changes them for all positions of a sequence, those in the cache too, when the sequence outgrows its original
    length. A token's key would then depend on the draft behind it and on other requests of the pass.
    """
    found: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    per_layer = [part for part in found.values() if isinstance(part, dict)] or [found]
    return [part["original_max_position_embeddings"] for part in per_layer if part.get("rope_type") == "longrope"]
