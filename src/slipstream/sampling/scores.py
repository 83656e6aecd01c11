"""How a drafter ranks tokens, so that its first choice is the one that the target would make with its probabilities.

`choose` says which token wins; a tree also wants the second and the third. The scores are log q after the request's
penalties, bias, masks, temperature and filters, plus the noise that decides at that position. They only rank guesses,
so a filter may look at its likeliest candidates alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.sampling.choose import _tempering, adjusted
from slipstream.sampling.filters import CANDIDATES, narrow
from slipstream.sampling.noise import gumbel_of_hashes
from slipstream.sampling.rows import SampleRows
from slipstream.sampling.table import Features, SamplingTable


def draft_scores(logits: Tensor, rows: SampleRows, table: SamplingTable, features: Features) -> Tensor:
    """[R, V] fp32 for the drafter's logits [R, V]: of a greedy row log q; of a sampled one log q and the noise.

    Nothing waits for the host. A row with NaN among its logits has no scores worth looking at.
    """
    logits = adjusted(logits, rows, table, features, None, False)
    if not features.sampled:
        return logits.log_softmax(dim=1)
    temperature = table.temperature[rows.slots]  # [R]
    sampled = temperature > 0
    tempering = _tempering(rows, table, features, logits.amax(dim=1))
    scores = (logits - tempering.largest[:, None]).div_(torch.where(sampled, temperature, 1.0)[:, None])
    if features.min_p:
        scores.masked_fill_(sampled[:, None] & (scores < tempering.log_min_p[:, None]), -math.inf)
    if features.top_k or features.top_p:
        found = narrow(logits, tempering, min(CANDIDATES, logits.shape[1]))
        kept = torch.full_like(scores, -math.inf).scatter_(1, found.ids, found.scores)
        scores = torch.where(tempering.filtered[:, None], kept, scores)
    noise = gumbel_of_hashes(table.noise_keys(rows), table.token_hashes)  # [R, V]
    return scores.log_softmax(dim=1).add_(noise.mul_(sampled[:, None]))
