"""`LLM`: the Python interface of the engine. Its methods are named as in vLLM where vLLM has them."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from slipstream.core.errors import ConfigError, InvalidRequest, ModelError
from slipstream.core.outputs import RequestOutput, Snapshot
from slipstream.core.params import SamplingParams
from slipstream.core.vllm_names import ENGINE, from_vllm, takes_vllm_names
from slipstream.engine.build import USUAL_DRAFTER, Built, DrafterChoice, build
from slipstream.engine.config import EngineConfig, PlannerName, RoundsName
from slipstream.engine.intake import Intake
from slipstream.engine.loop import EngineLoop, Result
from slipstream.engine.requests import Prompt, check_text
from slipstream.engine.state import Job
from slipstream.engine.step import Engine
from slipstream.engine.streams import Arrival, Listeners, OutputStream
from slipstream.models.default import add_remedy
from slipstream.models.headers import check_device_name, check_dtype_name
from slipstream.plan.planner import AdaptivePlanner
from slipstream.plan.types import MeasuredCosts

Message = Mapping[str, str]


class LLM:
    """A language model with speculative decoding.

    model: `default`, a folder or hub id in Hugging Face format, or a GGUF file.
    drafter: `auto` (all that suit the model; the planner uses each where it pays), `ngram`, `suffix`, `prediction`,
        `model:PATH`, a `Drafter` object, a list of these, or None for plain decoding. `A+B` merges the drafts of
        two (`auto+model:PATH`). Requests that name no drafter use the first; a request with a prediction also drafts
        from it.
    dtype, device: "auto", or as in torch ("bfloat16", "cuda:1"). "auto" takes fp32 on a CPU, the checkpoint's on a GPU.
    memory, max_draft_memory: as in `EngineConfig`, or as text such as "2GiB" or "90%".
    draft_tokens and the other limits and choices: fields of `EngineConfig`, which explains them.
    force_pair: load a drafter that was trained for another target; few of its drafts will be accepted.
    trust_remote_code: run Python code that comes with the model. Do so only if you trust its author.
    speculative_config: vLLM's way to name a drafter: {"method": "ngram", "num_speculative_tokens": 5}.
    on_progress: called with a line of text at each stage of loading.
    enable_prefix_caching: vLLM's name for prefix_caching. Other arguments of vLLM have their effect here, or cause a
        warning or an error with the remedy (`core/vllm_names.py`).

    Any thread may call any method; calls from several threads share batches. Close it, or use it in a `with` block.
    """

    @takes_vllm_names(ENGINE)
    def __init__(
        self,
        model: str | Path = "default",
        *,
        drafter: DrafterChoice = USUAL_DRAFTER,
        draft_tokens: int | None = None,
        dtype: str = "auto",
        device: str = "auto",
        memory: str | int | float | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int | None = None,
        max_draft_rows: int | None = None,
        trust_remote_code: bool = False,
        force_pair: bool = False,
        planner: PlannerName = "adaptive",
        min_gain: float = 1.0,
        max_draft_memory: str | int | float | None = None,
        measure_costs: bool | None = None,
        warm_up: bool = False,
        rounds: RoundsName | None = None,
        graphs: bool = True,
        prefix_caching: bool = True,
        max_queue: int | None = None,
        strict_drafter: bool = False,
        enable_prefix_caching: bool | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        given = dict(locals())  # all parameters by name
        if not isinstance(model, str | Path):
            raise ConfigError(f"model={model!r}: must be a name or a path, such as 'default' or 'path/to/model'")
        if enable_prefix_caching is not None:
            if not prefix_caching:
                raise ConfigError("enable_prefix_caching is vLLM's name of prefix_caching: give one of them")
            given["prefix_caching"] = enable_prefix_caching
        check_dtype_name(dtype)
        check_device_name(device)
        if speculative_config is not None:
            if drafter is not USUAL_DRAFTER or draft_tokens is not None:
                raise ConfigError("speculative_config: give either it, or drafter and draft_tokens")
            named = from_vllm(speculative_config)
            drafter, given["draft_tokens"] = named.drafter, named.draft_tokens
        make = partial(
            build,
            str(model),
            drafter,
            EngineConfig.of(given),
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            progress=on_progress,
            force_pair=force_pair,
        )
        self._listeners = Listeners()
        try:
            self._loop = EngineLoop(lambda: self._adopt(make()), self._listeners.flush)
        except ModelError as error:
            add_remedy(error)
            raise

    def _adopt(self, built: Built) -> Engine:
        self.engine = built.engine
        self.model_path: Path = built.model_path
        self.tokenizer: Any = built.tokenizer
        self.memory_plan = built.engine.plan
        self.max_model_len = built.engine.plan.max_model_len
        self._intake = Intake(built.tokenizer, built.eos_ids, built.loaded)
        return built.engine

    @property
    def max_num_seqs(self) -> int:
        return self.engine.config.max_num_seqs

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of the loaded drafters."""
        return tuple(self.engine.drafting.drafters)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Notes on the model's answers and on its drafters, such as a drafter's different vocabulary."""
        drafters = self.engine.drafting.drafters.values()
        return tuple(filter(None, (self.engine.target.remark, *(drafter.remark for drafter in drafters))))

    @property
    def costs(self) -> MeasuredCosts | None:
        """Times of passes and drafts, as measured before the first request; None: they were not measured."""
        planner = self.engine.drafting.planner
        return planner.costs.measured if isinstance(planner, AdaptivePlanner) else None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer a batch of prompts, in their order.

        An invalid request raises before any of them starts. A request that fails later has the error in its output;
        the others go on.

        use_tqdm: show a progress bar if stderr is a terminal.
        on_output: called with each request as it finishes, from the calling thread.
        """
        batch = _as_batch(prompts)
        params = _for_each(sampling_params, len(batch))
        finished: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        jobs = [
            self._intake.job(prompt, p, finished.put, streaming=False) for prompt, p in zip(batch, params, strict=True)
        ]
        done: dict[str, RequestOutput] = {}
        try:
            self._loop.post(jobs, finished.put)  # together: they share their first pass
            with _progress_bar(len(jobs), use_tqdm) as tick:
                while len(done) < len(jobs):
                    output = self._checked(finished.get())
                    done[output.request_id] = output
                    tick(output)
                    if on_output is not None:
                        on_output(output)
        finally:
            for job in jobs:
                if job.id not in done:
                    self._loop.drop(job)
        return [done[job.id] for job in jobs]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer a conversation or a batch of them, formatted by the model's chat template."""
        if isinstance(messages, str):
            raise InvalidRequest(f"messages={messages!r}: must be a list of messages, each with role and content")
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        return self.generate([self.chat_prompt(c) for c in conversations], sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the answer begins. Models without a template get plain text."""
        for message in messages:
            if not (isinstance(message, Mapping) and {"role", "content"} <= set(message)):
                raise InvalidRequest(f"message {message!r}: must be a mapping with role and content")
            check_text(str(message["content"]))
        if getattr(self.tokenizer, "chat_template", None) is None:
            text = "\n\n".join(message["content"] for message in messages)
            return list(self.tokenizer.encode(text))
        ids = self.tokenizer.apply_chat_template(
            [dict(m) for m in messages], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return list(ids)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Yield the outputs of one request as it grows: each holds all text so far, or what `output_kind` selects.

        Closing the iterator aborts the request.
        """
        outputs: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        job = self._intake.job(prompt, sampling_params or SamplingParams(), outputs.put, streaming=True)
        finished = False
        try:
            self._loop.post([job], outputs.put)
            while not finished:
                output = self._checked(outputs.get())
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._loop.drop(job)

    async def generate_async(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """`stream` for asyncio. Cancelling the task or closing the iterator aborts the request."""
        opened = partial(self._job, prompt, sampling_params, request_id)
        compiles = sampling_params is not None and sampling_params.structured_outputs is not None
        outputs = self._start(
            await asyncio.to_thread(opened) if compiles else opened()
        )  # without blocking the event loop
        try:
            while arrived := await outputs.take():
                for output in arrived:
                    yield self._checked(output)
        finally:
            outputs.close()

    def open_stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        streaming: bool = True,
    ) -> OutputStream:
        """Start a request for the running event loop. The caller must close the stream, which aborts the request.

        streaming: False gives one output, at the end.
        """
        return self._start(self._job(prompt, sampling_params, request_id, streaming))

    def _job(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str | None, streaming: bool = True
    ) -> Job:
        """Make a job for `_start`. Called from any thread."""
        params = params or SamplingParams()
        return self._intake.job(prompt, params, lambda output: None, streaming=streaming, request_id=request_id)

    def _start(self, *jobs: Job) -> OutputStream:
        """Start jobs together, for the running event loop. The stream ends when all of them have."""

        def drop() -> None:
            for job in jobs:
                self._loop.drop(job)

        deliveries = self._listeners.to(asyncio.get_running_loop())
        stream = OutputStream(deliveries, drop, len(jobs))
        for job in jobs:
            job.sink, job.holds = stream.put, deliveries.holds
        self._loop.post(jobs, stream.put)
        return stream

    def _checked(self, arrival: Arrival) -> RequestOutput:
        """Return an output; raise a refusal, or the drafter's error that ended the request in a strict engine."""
        if isinstance(arrival, Exception):
            raise arrival
        error = self.engine.drafting.raised
        if error is not None and any(str(error) in (answer.error or "") for answer in arrival.outputs):
            raise error
        return arrival

    def abort(self, request_id: str) -> None:
        """End a request between two steps, with the finish reason "abort". Unknown ids are ignored."""
        self._loop.abort(request_id)

    def snapshot(self) -> Snapshot:
        """State and counters of the engine. Does not wait."""
        return self.engine.snapshot()

    @property
    def speculates(self) -> bool:
        """Whether drafting is on. Set to False, it makes all steps plain from the next one on."""
        return self.engine.drafting.enabled

    @speculates.setter
    def speculates(self, wanted: bool) -> None:
        if not isinstance(wanted, bool):
            raise ConfigError(f"speculates={wanted!r}: must be True or False")
        self.engine.drafting.enabled = wanted

    def between_rounds(self, look: Callable[[Engine], Result]) -> Result:
        """Return `look(engine)`, called on the engine's thread between two steps. It must not change the engine."""
        return self._loop.call(lambda: look(self.engine))

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    def close(self) -> None:
        """Abort running requests and end the threads of the engine and its drafters. May be called twice."""
        self._loop.close()
        for guard in self.engine.drafting.guards.values():
            guard.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    listed = isinstance(prompts, Sequence) and len(prompts) > 0
    if isinstance(prompts, (str, Mapping)) or (listed and isinstance(prompts[0], Integral)):
        return [cast(Prompt, prompts)]  # one prompt, as text, tagged or as token ids
    if not isinstance(prompts, Iterable):
        raise InvalidRequest(f"prompts={prompts!r}: must be a text, token ids, or a list of these")
    return list(cast(Sequence[Prompt], prompts))


def _for_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not (isinstance(params, Sequence) and all(isinstance(p, SamplingParams) for p in params)):
        raise InvalidRequest(f"sampling_params={params!r}: must be a SamplingParams, or one for each prompt")
    if len(params) != count:
        raise InvalidRequest(f"{len(params)} sampling_params for {count} prompts: give one, or one for each")
    return list(params)


@contextmanager
def _progress_bar(total: int, wanted: bool) -> Iterator[Callable[[RequestOutput], None]]:
    """Show a progress bar on stderr, if that is a terminal. Yields a function to call with each finished request."""
    if not wanted:
        yield lambda output: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    rate = TextColumn("{task.fields[rate]}")
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), rate)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, rate="")
        tokens = 0

        def finished(output: RequestOutput) -> None:
            nonlocal tokens
            tokens += sum(len(answer.token_ids) for answer in output.outputs)
            bar.update(task, advance=1, rate=f"{tokens / max(bar.tasks[0].elapsed or 0.0, 1e-3):.0f} tok/s")

        yield finished
