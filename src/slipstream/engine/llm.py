"""`LLM`: the public face of the engine, in vLLM's shape where vLLM has one."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

from slipstream.core.errors import ConfigError, InvalidRequest, ModelError
from slipstream.core.outputs import RequestOutput, Snapshot
from slipstream.core.params import SamplingParams
from slipstream.core.vllm_names import ENGINE, from_vllm, takes_vllm_names
from slipstream.engine.build import USUAL_DRAFTER, Built, DrafterChoice, build
from slipstream.engine.config import EngineConfig, PlannerName, RoundsName, parse_share
from slipstream.engine.intake import Intake
from slipstream.engine.loop import EngineLoop
from slipstream.engine.requests import Prompt, check_text
from slipstream.engine.state import Job
from slipstream.engine.step import Engine
from slipstream.engine.streams import Arrival, Listeners, OutputStream
from slipstream.models.default import add_remedy
from slipstream.models.headers import check_device_name, check_dtype_name
from slipstream.plan.planner import AdaptivePlanner
from slipstream.plan.types import MeasuredCosts

Message = Mapping[str, str]
Found = TypeVar("Found")


class LLM:
    """A language model that speculates.

    model: `default`, a folder or hub id in Hugging Face format, or a GGUF file.
    drafter: `auto` (all that make sense for the model, each where it pays), `ngram`, `suffix`, `prediction`,
        `model:PATH`, several of them, a `Drafter` of your own, or None for plain decoding. `A+B` merges the drafts of
        two (`auto+model:PATH`). The first is used unless a request names another; a request with a prediction drafts
        from that, too.
    draft_tokens: most tokens to guess at a time; None: what the drafter is made for.
    dtype, device: "auto", or as in torch ("bfloat16", "cuda:1"): fp32 on a CPU and the checkpoint's on a GPU.
    memory: for caches and workspace beyond the weights, as bytes, "2GiB", or a part such as "90%" (`EngineConfig`).
    max_draft_memory: most of the cache for drafts, as bytes, "512MB", or a part such as 0.2; None: no limit.
    max_model_len, max_num_seqs, max_num_batched_tokens, max_draft_rows, planner, min_gain, measure_costs, warm_up,
        rounds, graphs, prefix_caching, max_queue, strict_drafter: see `EngineConfig`.
    force_pair: load a drafter that was trained for another model all the same; its guesses will seldom be right.
    trust_remote_code: run Python code that comes with the model. Off unless you trust its author.
    speculative_config: vLLM's way to name a drafter: {"method": "ngram", "num_speculative_tokens": 5}.
    on_progress: hears what loading is at, in words.
    enable_prefix_caching: vLLM's name of prefix_caching. Other arguments of vLLM's are honoured, or answered by a
        warning or an error that names the way to do it here (`core/vllm_names.py`).

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
        if not isinstance(model, str | Path):
            raise ConfigError(f"model={model!r}: must be a name or a path, such as 'default' or 'path/to/model'")
        if enable_prefix_caching is not None:
            if not prefix_caching:
                raise ConfigError("enable_prefix_caching is vLLM's name of prefix_caching: give one of them")
            prefix_caching = enable_prefix_caching
        check_dtype_name(dtype)
        check_device_name(device)
        if speculative_config is not None:
            if drafter is not USUAL_DRAFTER or draft_tokens is not None:
                raise ConfigError("speculative_config: give either it, or drafter and draft_tokens")
            named = from_vllm(speculative_config)
            drafter, draft_tokens = named.drafter, named.draft_tokens
        config = EngineConfig(
            memory=parse_share(memory, "memory"),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_draft_rows=max_draft_rows,
            draft_tokens=draft_tokens,
            planner=planner,
            min_gain=min_gain,
            max_draft_memory=parse_share(max_draft_memory, "max_draft_memory"),
            measure_costs=measure_costs,
            warm_up=warm_up,
            rounds=rounds,
            graphs=graphs,
            prefix_caching=prefix_caching,
            max_queue=max_queue,
            strict_drafter=strict_drafter,
        )
        make = partial(
            build,
            str(model),
            drafter,
            config,
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
        """The names of those that are loaded."""
        return tuple(self.engine.drafting.drafters)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What there is to know of the model's answers and of its drafters: that one has another vocabulary, say."""
        drafters = self.engine.drafting.drafters.values()
        return tuple(filter(None, (self.engine.target.remark, *(drafter.remark for drafter in drafters))))

    @property
    def costs(self) -> MeasuredCosts | None:
        """What passes and drafts cost here, as measured before the first request; None: that was not done."""
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
        """Answer a batch of prompts, in their order. What is wrong with a request raises before any of them starts;
        one that fails on the way says so in its output, and the others go on.

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
        """Answer a conversation, or a batch of them, by the model's chat template."""
        if isinstance(messages, str):
            raise InvalidRequest(f"messages={messages!r}: must be a list of messages, each with role and content")
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        return self.generate([self.chat_prompt(c) for c in conversations], sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """A conversation as token ids, up to where the answer begins; plain text for models without a template."""
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
        """One request, as it grows. Each output holds everything so far, or what `output_kind` says.

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
        outputs = self._start(await asyncio.to_thread(opened) if compiles else opened())  # other tasks go on meanwhile
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
        """Start a request for the running event loop. Its owner must close the stream, which aborts the request.

        streaming: False gives one output, at the end.
        """
        return self._start(self._job(prompt, sampling_params, request_id, streaming))

    def _job(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str | None, streaming: bool = True
    ) -> Job:
        """A job for `_start`; on any thread."""
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
        """Raise why a request was refused, or the drafter's error that ended it in a strict engine."""
        if isinstance(arrival, Exception):
            raise arrival
        error = self.engine.drafting.raised
        if error is not None and any(str(error) in (answer.error or "") for answer in arrival.outputs):
            raise error
        return arrival

    def abort(self, request_id: str) -> None:
        """End a request after the round in flight; it finishes with the reason "abort". Unknown ids are ignored."""
        self._loop.abort(request_id)

    def snapshot(self) -> Snapshot:
        """The engine's state and counters so far. Any thread may ask; nothing waits."""
        return self.engine.snapshot()

    @property
    def speculates(self) -> bool:
        """Whether drafts may be made. Set it to False to decode all requests plainly from the next step on."""
        return self.engine.drafting.enabled

    @speculates.setter
    def speculates(self, wanted: bool) -> None:
        if not isinstance(wanted, bool):
            raise ConfigError(f"speculates={wanted!r}: must be True or False")
        self.engine.drafting.enabled = wanted

    def between_rounds(self, look: Callable[[Engine], Found]) -> Found:
        """Return `look(engine)`, called on the engine's thread between two steps. It must not change the engine."""
        found: list[Found] = []
        self._loop.call(lambda: found.append(look(self.engine)))
        return found[0]

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    def close(self) -> None:
        """Abort what runs and end the engine's thread and its drafters'. May be called twice."""
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
    """Gives a function to call with each finished request. Shown on stderr, if that is a terminal."""
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
