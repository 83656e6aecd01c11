"""From what a caller asks to a job that the engine can run."""

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
    """Turns prompts into jobs, and refuses everything that can be refused before a job takes memory."""

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
        """The job of a checked request. Compiles its grammar, within these limits: None has no limit."""
        ids, params = request.prompt_ids, request.params
        job = Job(request.id, request.prompt, ids, params, sink, request.streaming, request.arrived)
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids)
        form = params.structured_outputs
        stops, tenant = params.stop_token_ids, params.speculation.tenant
        constraint = None if form is None else self.grammars.constraint(form, stops, compiling, tenant)
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
                end_ids=ends,
                constraint=constraint.fresh() if constraint is not None and sample else constraint,
                leader=job.answers[0] if sample else None,
            )
            job.answers.append(answer)
        return job
