"""Builds jobs, which the engine runs, from prompts and parameters."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from slipstream.constrain.compiler import Grammars
from slipstream.constrain.limits import CompileLimits
from slipstream.core.outputs import CompletionOutput
from slipstream.core.params import SamplingParams
from slipstream.engine.requests import Loaded, Prompt, Request, Requests
from slipstream.engine.state import Answer, Job, Sink
from slipstream.engine.text import Remembered, TextStream


class Intake:
    """Checks prompts and turns them into jobs. Refuses invalid ones before they take memory. Any thread may call it."""

    def __init__(self, tokenizer: Any, eos_ids: Collection[int], loaded: Loaded) -> None:
        self.loaded = loaded
        self.grammars = Grammars(tokenizer, loaded.vocab_size, eos_ids)
        self._requests = Requests(tokenizer, loaded)
        self._decoder = Remembered(tokenizer)
        self._eos_ids = frozenset(eos_ids)

    def job(
        self,
        prompt: Prompt,
        params: SamplingParams,
        sink: Sink,
        *,
        streaming: bool,
        request_id: str | None = None,
    ) -> Job:
        return self.job_of(self._requests.make(prompt, params, streaming=streaming, request_id=request_id), sink)

    def job_of(self, request: Request, sink: Sink = lambda output: None, compiling: CompileLimits | None = None) -> Job:
        """Make the job of a checked request, and compile its grammar. compiling: limits for that; None: no limits."""
        ids, params, constraint = request.prompt_ids, request.params, None
        job = Job(request.id, request.prompt, ids, params, sink, request.streaming, request.arrived)
        stops = params.stop_token_ids
        if (form := params.structured_outputs) is not None:
            constraint = self.grammars.constraint(form, stops, compiling, params.speculation.tenant)
        for sample in range(params.n):
            answer = Answer(
                job=job,
                sample=sample,
                seed=request.seed,
                tokens=list(ids),
                text=TextStream(
                    self._decoder,
                    ids,
                    stops=params.stop_strings,
                    keep_stop=params.include_stop_str_in_output,
                    skip_special_tokens=params.skip_special_tokens,
                ),
                output=CompletionOutput(
                    sample,
                    logprobs=None if params.logprobs is None else [],
                    origins=[] if params.speculation.origins else None,
                    unenforced=() if constraint is None else constraint.left_out,
                ),
                prediction=request.prediction,
                material=request.material,
                bad_words=request.bad_words,
                end_ids=frozenset(stops if params.ignore_eos else {*stops, *self._eos_ids}),
                constraint=constraint.fresh() if constraint is not None and sample else constraint,
                leader=job.answers[0] if sample else None,
            )
            job.answers.append(answer)
        return job
