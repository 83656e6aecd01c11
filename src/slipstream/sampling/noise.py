"""Keyed noise: the same key gives the same noise, in any order and in any batch.

It makes speculation exact: the noise at position t of a request depends on its seed, its sample index, t and the token,
and on nothing else, so a draft and a target at the same position add the same noise. It is counter-based (no state) and
integer until the last operation, so that a kernel can repeat it:

    stream = mix64(mix64(seed + G) + sample * S)      64-bit, once a request
    key    = mix64(stream + position * G)             64-bit, as two 32-bit words k0 (low) and k1 (high)
    x      = keyed32(k0, k1, hash32(token))           32-bit
    v      = (x + 1/2) * 2^-32                        fp32, never 0 and never 1
    gumbel = -log(-log1p(-v))                         small v is large noise: where fp32 is fine-grained

`mix64` is the finalizer of splitmix64; `hash32` and `keyed32` are xor-shift-multiply rounds of the same kind. Torch
has no unsigned shifts worth using, so a logical shift is an arithmetic one and a mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.sampling.rows import row_blocks


def _signed(word: int, bits: int) -> int:
    """The same bits, read as a signed integer."""
    return word - (1 << bits) if word >> (bits - 1) else word


GOLDEN = _signed(0x9E3779B97F4A7C15, 64)  # 2^64 / golden ratio
SAMPLE_STEP = _signed(0xD1342543DE82EF95, 64)
MIX64 = (_signed(0xBF58476D1CE4E5B9, 64), _signed(0x94D049BB133111EB, 64))
HASH32 = (_signed(0x21F0AAAD, 32), _signed(0x735A2D97, 32))
KEYED32 = (_signed(0x9E3779B1, 32), _signed(0x85EBCA6B, 32), _signed(0xC2B2AE35, 32))

_WORD = (1 << 64) - 1
LARGEST_BELOW_ONE = 1 - 2**-24


def _mix64(x: Tensor) -> Tensor:
    """The finalizer of splitmix64 on int64: every bit of the result depends on every bit of x."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * MIX64[0]
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * MIX64[1]
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def stream_keys(seeds: Tensor, samples: Tensor) -> Tensor:
    """The part of the key that is fixed for a request: [R] int64 from its seed's 64 bits and its index among `n`."""
    return _mix64(_mix64(seeds + GOLDEN) + samples * SAMPLE_STEP)


def stream_key(seed: int, sample: int) -> int:
    """`stream_keys` for one request, on the host and without tensors."""

    def mixed(x: int) -> int:
        x = ((x ^ (x >> 30)) * MIX64[0]) & _WORD
        x = ((x ^ (x >> 27)) * MIX64[1]) & _WORD
        return x ^ (x >> 31)

    return _signed(mixed((mixed((seed + GOLDEN) & _WORD) + sample * SAMPLE_STEP) & _WORD), 64)


def position_keys(streams: Tensor, positions: Tensor) -> Tensor:
    """Keys [R, 2] int32 of the tokens chosen at `positions` [R] of requests with these `streams` [R]."""
    key = _mix64(streams + positions * GOLDEN)
    return torch.stack((key, key >> 32), dim=-1).to(torch.int32)  # the cast keeps the low 32 bits


def row_keys(seeds: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    """Keys [R, 2] int32 from seeds [R] (a 64-bit seed's bits as signed), sample indices [R] and positions [R]."""
    return position_keys(stream_keys(seeds, samples), positions)


def _xor_shift_(x: Tensor, shift: int, scratch: Tensor) -> None:
    """x ^= x >>> shift, in place on int32."""
    torch.bitwise_right_shift(x, shift, out=scratch)
    x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1))


def hash_tokens(tokens: Tensor) -> Tensor:
    """The part of the hash without the key: int32 like `tokens`. For a whole vocabulary it is computed once."""
    x = tokens.to(torch.int32, copy=True)
    scratch = torch.empty_like(x)
    _xor_shift_(x, 16, scratch)
    x.mul_(HASH32[0])
    _xor_shift_(x, 15, scratch)
    x.mul_(HASH32[1])
    _xor_shift_(x, 15, scratch)
    return x


def _minus_uniform(keys: Tensor, hashes: Tensor) -> Tensor:
    """-v [R, C] fp32 for keys [R, 2] and token hashes [C] or [R, C]."""
    x = torch.bitwise_xor(hashes, keys[:, :1])  # [R, C] int32
    scratch = torch.empty_like(x)
    x.mul_(KEYED32[0])
    _xor_shift_(x, 16, scratch)
    x.add_(keys[:, 1:]).mul_(KEYED32[1])
    _xor_shift_(x, 15, scratch)
    x.mul_(KEYED32[2])
    _xor_shift_(x, 16, scratch)
    # x is a signed reading of 32 bits: where it is negative, the unsigned one is 2^32 more, so v is 1 more. Adding
    # the 1 to v instead keeps the small v exact, and they are the ones that win.
    minus_v = x.to(torch.float32).mul_(-(2.0**-32)).sub_(2.0**-33)
    return minus_v.sub_(torch.ceil(minus_v)).clamp_(min=-LARGEST_BELOW_ONE)


def uniform(keys: Tensor, tokens: Tensor) -> Tensor:
    """v [R, C] fp32 in (0, 1) for keys [R, 2] and token ids [C] or [R, C]."""
    return _minus_uniform(keys, hash_tokens(tokens)).neg_()


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Gumbel noise [R, C] fp32 for keys [R, 2] and token ids [C] or [R, C]."""
    return gumbel_of_hashes(keys, hash_tokens(tokens))


def gumbel_of_hashes(keys: Tensor, hashes: Tensor) -> Tensor:
    """`gumbel` for tokens that `hash_tokens` has hashed."""
    noise = torch.empty(keys.shape[0], hashes.shape[-1], dtype=torch.float32, device=keys.device)
    for block in row_blocks(keys.shape[0], hashes.shape[-1], keys.device):
        minus_v = _minus_uniform(keys[block], hashes if hashes.dim() == 1 else hashes[block])
        torch.neg(minus_v.log1p_().neg_().log_(), out=noise[block])
    return noise
