"""Answers as JSON for programs and as one line for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from slipstream.core.outputs import CompletionOutput, Logprob, RequestOutput, SpeculationStats


def tokens_per_s(answer: CompletionOutput) -> float:
    """The decoding rate after the first token, or over the whole time if there was only one token."""
    tokens, timing = len(answer.token_ids), answer.timing
    rate = timing.decode_tokens_per_s(tokens)
    if rate or not timing.total_s:
        return rate
    return tokens / timing.total_s


def speculation_json(stats: SpeculationStats) -> dict[str, Any]:
    return {
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "alpha": round(stats.alpha, 4),
        "tau": round(stats.tau, 4),
        "expected_gain": _rounded(stats.expected_gain),
        "measured_gain": _rounded(stats.measured_gain),
        "why": stats.why,
        "plan": dict(stats.plan),
        "by_drafter": {
            name: {
                "drafts": d.drafts,
                "drafted": d.drafted,
                "accepted": d.accepted,
                "failures": d.failures,
                "declined": d.declined,
            }
            for name, d in stats.by_drafter.items()
        },
        "time_s": {
            "draft": round(stats.draft_s, 6),
            "verify": round(stats.verify_s, 6),
            "host": round(stats.host_s, 6),
        },
    }


def _rounded(gain: float | None) -> float | None:
    return None if gain is None else round(gain, 4)


def logprobs_json(logprobs: Sequence[Mapping[int, Logprob]], token_ids: Sequence[int]) -> list[dict[str, Any]]:
    """One entry a token: its own log probability, and the likeliest alternatives."""
    entries = []
    for token, row in zip(token_ids, logprobs, strict=False):
        ranked = sorted(row.items(), key=lambda item: item[1].rank)
        top = [{"token_id": t, "token": p.decoded_token, "logprob": p.logprob, "rank": p.rank} for t, p in ranked]
        own = next((entry for entry in top if entry["token_id"] == token), None)
        entries.append({**(own or {"token_id": token}), "top": top})
    return entries


def answer_json(answer: CompletionOutput) -> dict[str, Any]:
    timing = answer.timing
    payload: dict[str, Any] = {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "timing": {
            "queued_s": round(timing.queued_s, 6),
            "first_token_s": round(timing.first_token_s, 6),
            "total_s": round(timing.total_s, 6),
            "tokens_per_s": round(tokens_per_s(answer), 3),
        },
        "speculation": speculation_json(answer.speculation),
    }
    if answer.stop_reason is not None:
        payload["stop_reason"] = answer.stop_reason
    if answer.error is not None:
        payload["error"] = answer.error
    if answer.logprobs is not None:
        payload["logprobs"] = logprobs_json(answer.logprobs, answer.token_ids)
    if answer.unenforced:
        payload |= {"unenforced": list(answer.unenforced), "violation": answer.violation}
    return payload


def request_json(output: RequestOutput, *, model: str, seed: int | None) -> dict[str, Any]:
    """The whole request as one object: the first answer at the top, all of them under `choices` when n > 1."""
    prompt = len(output.prompt_token_ids)
    completion = sum(len(answer.token_ids) for answer in output.outputs)
    payload = {
        "model": model,
        "seed": seed,
        **answer_json(output.outputs[0]),
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
    }
    if len(output.outputs) > 1:
        payload["choices"] = [{"index": answer.index, **answer_json(answer)} for answer in output.outputs]
    return payload


def _declined(stats: SpeculationStats) -> dict[str, int]:
    """By drafter, the rounds in which its drafts were not expected to pay, if any."""
    return {name: drafter.declined for name, drafter in stats.by_drafter.items() if drafter.declined}


def undrafted(stats: SpeculationStats) -> str:
    """Why nothing was drafted, so that it is not mistaken for a failure."""
    declined = _declined(stats)
    if not declined:
        return "nothing drafted" + (f": {stats.why.removeprefix('off: ')}" if stats.plan else "")
    rounds = max(declined.values())
    return (
        f"nothing drafted: guesses of {', '.join(declined)} were not expected to pay enough "
        f"({rounds} round{'s' * (rounds != 1)}; --min-gain says what is enough, --planner fixed guesses all the same)"
    )


def rate_line(tokens: int, rate: float, stats: SpeculationStats) -> str:
    """Tokens, rate, and the counts of speculation, as one line.

    Tokens per round (tau) come first: in a tree most guesses must fail, since branches exclude each other.
    """
    line = f"{tokens} tokens · {rate:.1f} tok/s · {stats.tau:.2f} tokens per round"
    if stats.drafted:
        names = ", ".join(name for name, drafter in stats.by_drafter.items() if drafter.drafted)
        line += f" · {stats.accepted} of {stats.drafted} guesses stood"
        line += f" ({names})" if names else ""
        declined = max(_declined(stats).values(), default=0)
        if 2 * declined > stats.rounds:
            line += f" · in {declined} of {stats.rounds} rounds guesses were not expected to pay enough"
    else:
        line += f" · {undrafted(stats)}"
    failures = sum(drafter.failures for drafter in stats.by_drafter.values())
    return line + (f" · {failures} drafter failures" if failures else "")


def summary(answer: CompletionOutput) -> str:
    line = rate_line(len(answer.token_ids), tokens_per_s(answer), answer.speculation)
    return f"{line} · first token {answer.timing.first_token_s:.2f} s · {answer.finish_reason or 'stopped'}"


def note(text: str, *, style: str = "dim") -> None:
    """One line for people, on stderr, so that stdout holds only the answer."""
    Console(stderr=True).print(text, style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)
