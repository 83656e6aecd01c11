"""Other projects' clients, each at its ordinary work against a server with the default model: `make clients`.

Every client runs in an environment of its own under `.venv-clients`, by this same file (`--client NAME URL MODEL`), so
only the standard library is imported at the top. A step succeeds if the server takes what the client sends and the
client takes the answer; the words of a model of 135M do not matter. The table is written to `docs/clients.md`. Some of
them alone, without the table: `python tools/clients.py openai litellm`. The versions stand in `clients-*.txt` beside
this file; `python tools/clients.py --update` installs the newest and writes those down.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".venv-clients"
ENVIRONMENTS = {
    "main": ["openai", "openai-agents", "pydantic-ai-slim[openai]", "langchain-openai", "guidance", "guidellm"],
    # These want openai below 3, and litellm imports mcp where there are tools.
    "openai2": ["litellm", "mcp", "llama-index-llms-openai-like"],
}
PATIENCE_S = 300
QUESTION = "What is the weather in Paris?"
_HEAD = """# Clients

Written by `make clients` on {day}: Slipstream {version}, default model. *form*: JSON of a schema. *tool*: tools that
may be called, `strict` where the client has it, and one that must be. *second turn*: the call and its result sent back.
*load*: requests of a benchmark. A step succeeds where the server takes what the client sends, and the client what the
server says.
"""
Steps = dict[str, Callable[[], object]]


def get_weather(city: str) -> str:
    """Get the current weather of a city.

    Args:
        city: The name of the city.
    """
    return f"It is sunny in {city}, 21 degrees."


def use_openai(url: str, _: str) -> Steps:
    from openai import OpenAI, pydantic_function_tool
    from pydantic import BaseModel

    class Weather(BaseModel):
        """Get the current weather of a city."""

        city: str

    client = OpenAI(base_url=url, api_key="none", max_retries=0)
    tools: Any = [pydantic_function_tool(Weather)]
    turns: list[Any] = [{"role": "user", "content": QUESTION}]

    def ask(**options: Any) -> Any:
        return client.chat.completions.create(model="default", messages=turns, max_tokens=96, temperature=0, **options)

    def stream() -> object:
        with client.chat.completions.stream(model="default", messages=turns, max_tokens=32) as events:
            return list(events)

    def tool() -> object:
        ask(tools=tools)
        parse = client.chat.completions.parse
        one: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
        parsed = parse(model="default", messages=turns, max_tokens=96, tools=tools, **one)
        message = parsed.choices[0].message
        call = (message.tool_calls or [])[0]
        assert isinstance(call.function.parsed_arguments, Weather)
        said = {"role": "tool", "tool_call_id": call.id, "content": get_weather(call.function.parsed_arguments.city)}
        turns.extend([message, said])
        return None

    def form() -> object:
        parsed = client.chat.completions.parse(
            model="default", messages=turns[:1], max_tokens=96, response_format=Weather
        )
        assert isinstance(parsed.choices[0].message.parsed, Weather)
        return None

    return {"answer": ask, "stream": stream, "form": form, "tool": tool, "second turn": lambda: ask(tools=tools)}


def use_openai_agents(url: str, _: str) -> Steps:
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI
    from pydantic import BaseModel

    class City(BaseModel):
        name: str

    set_tracing_disabled(True)

    def agent(**options: Any) -> Any:
        model = OpenAIChatCompletionsModel("default", AsyncOpenAI(base_url=url, api_key="none", max_retries=0))
        settings = ModelSettings(max_tokens=96, temperature=0, **options.pop("settings", {}))
        return Agent("helper", instructions="Help.", model=model, model_settings=settings, **options)

    tools = [function_tool(get_weather)]
    kept: list[Any] = []

    def answer() -> object:
        return Runner.run_sync(agent(tools=tools), QUESTION).final_output

    def stream() -> object:
        async def run() -> None:
            async for _ in Runner.run_streamed(agent(tools=tools), QUESTION).stream_events():
                pass

        return asyncio.run(run())

    def tool() -> object:
        result = Runner.run_sync(agent(tools=tools, settings={"tool_choice": "required"}), QUESTION)
        assert any(item.type == "tool_call_output_item" for item in result.new_items)
        kept.extend(result.to_input_list())
        return None

    def second() -> object:
        return Runner.run_sync(agent(tools=tools), [*kept, {"role": "user", "content": "And in Rome?"}])

    def form() -> object:
        assert isinstance(Runner.run_sync(agent(output_type=City), "Name a city.").final_output, City)
        return None

    return {"answer": answer, "stream": stream, "form": form, "tool": tool, "second turn": second}


def use_pydantic_ai(url: str, _: str) -> Steps:
    from pydantic import BaseModel
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class City(BaseModel):
        name: str

    def agent(**options: Any) -> Any:
        model = OpenAIChatModel("default", provider=OpenAIProvider(base_url=url, api_key="none"))
        return Agent(model, model_settings={"max_tokens": 96, "temperature": 0.0}, **options)

    kept: list[Any] = []

    def answer() -> object:
        return agent(tools=[get_weather]).run_sync("Say hello.").output

    def stream() -> object:
        async def run() -> None:
            async with agent().run_stream("Say hello.") as result:
                async for _ in result.stream_text():
                    pass

        return asyncio.run(run())

    def tool() -> object:
        result = agent(output_type=City).run_sync("Name a city.")  # by a tool that must be called
        assert isinstance(result.output, City)
        kept.extend(result.all_messages())
        return None

    def second() -> object:
        return agent(tools=[get_weather]).run_sync("Say goodbye.", message_history=kept)

    def form() -> object:
        assert isinstance(agent(output_type=NativeOutput(City)).run_sync("Name a city.").output, City)
        return None

    return {"answer": answer, "stream": stream, "form": form, "tool": tool, "second turn": second}


def use_langchain(url: str, _: str) -> Steps:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool as as_tool
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class City(BaseModel):
        name: str

    model = ChatOpenAI(model="default", base_url=url, api_key="none", max_tokens=96, temperature=0, max_retries=0)
    weather = as_tool(get_weather)
    turns: list[Any] = [HumanMessage(QUESTION)]

    def tool() -> object:
        model.bind_tools([weather], strict=True).invoke(turns)
        said = model.bind_tools([weather], tool_choice="required").invoke(turns)
        turns.extend(
            [said, ToolMessage(weather.invoke(said.tool_calls[0]["args"]), tool_call_id=said.tool_calls[0]["id"])]
        )
        return None

    def form() -> object:
        assert isinstance(model.with_structured_output(City).invoke("Name a city."), City)
        return None

    return {
        "answer": lambda: model.invoke(turns),
        "stream": lambda: list(model.stream(turns)),
        "form": form,
        "tool": tool,
        "second turn": lambda: model.bind_tools([weather]).invoke(turns),
    }


def use_litellm(url: str, _: str) -> Steps:
    import litellm
    from pydantic import BaseModel

    class City(BaseModel):
        name: str

    tools = [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "description": "Get the current weather of a city.",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string"}},
                    "required": ["city"],
                    "additionalProperties": False,
                },
                "strict": True,
            },
        }
    ]
    turns: list[Any] = [{"role": "user", "content": QUESTION}]

    def ask(**options: Any) -> Any:
        return litellm.completion(
            model="openai/default",
            api_base=url,
            api_key="none",
            messages=turns,
            max_tokens=96,
            num_retries=0,
            **options,
        )

    def tool() -> object:
        ask(tools=tools, parallel_tool_calls=False)
        message = ask(tools=tools, tool_choice="required").choices[0].message
        call = message.tool_calls[0]
        said = get_weather(**json.loads(call.function.arguments))
        turns.extend([message, {"role": "tool", "tool_call_id": call.id, "content": said}])
        return None

    def form() -> object:
        return City.model_validate_json(ask(response_format=City).choices[0].message.content)

    return {
        "answer": ask,
        "stream": lambda: list(ask(stream=True, stream_options={"include_usage": True})),
        "form": form,
        "tool": tool,
        "second turn": lambda: ask(tools=tools),
    }


def use_llama_index(url: str, _: str) -> Steps:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike
    from pydantic import BaseModel

    class City(BaseModel):
        name: str

    model = OpenAILike(
        model="default",
        api_base=url,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=96,
        max_retries=0,
        context_window=2048,
    )
    weather = FunctionTool.from_defaults(get_weather)
    turns = [ChatMessage(role="user", content=QUESTION)]

    def tool() -> object:
        model.chat_with_tools([weather], chat_history=turns)
        said = model.chat_with_tools([weather], chat_history=turns, tool_required=True)
        call = model.get_tool_calls_from_response(said)[0]
        result = str(weather(**call.tool_kwargs))
        known = {"tool_call_id": call.tool_id, "name": call.tool_name}
        turns.extend([said.message, ChatMessage(role="tool", content=result, additional_kwargs=known)])
        return None

    def form() -> object:
        return City.model_validate_json(model.as_structured_llm(City).complete("Name a city.").text)

    return {
        "answer": lambda: model.complete(QUESTION),
        "stream": lambda: list(model.stream_chat(turns)),
        "form": form,
        "tool": tool,
        "second turn": lambda: model.chat_with_tools([weather], chat_history=turns),
    }


def use_guidance(url: str, _: str) -> Steps:
    from guidance import assistant, gen, user
    from guidance import json as guided_json
    from guidance.models import OpenAI
    from pydantic import BaseModel

    class City(BaseModel):
        name: str

    def turn(model: Any, said: str, wanted: Any) -> Any:
        with user():
            model += said
        with assistant():
            model += wanted
        return model

    first: list[Any] = []

    def answer() -> object:
        model = OpenAI("default", base_url=url, api_key="none", echo=False)
        first.append(turn(model, "Say hello.", gen("said", max_tokens=32)))
        return None

    def form() -> object:
        model = OpenAI("default", base_url=url, api_key="none", echo=False)
        return City.model_validate_json(
            turn(model, "Name a city.", guided_json("city", schema=City, max_tokens=96))["city"]
        )

    return {
        "answer": answer,
        "form": form,
        "second turn": lambda: turn(first[0], "And bye?", gen("bye", max_tokens=32)),
    }


def use_guidellm(url: str, model: str) -> Steps:
    def load() -> object:
        with tempfile.TemporaryDirectory() as folder:
            command = [
                *(sys.executable, "-m", "guidellm", "run", "--disable-console"),
                *("--backend", f"kind=openai_http,target={url.removesuffix('/v1')}"),
                *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"),
                *("--tokenizer", f"kind=huggingface_auto,model={model}"),
                *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
                *("--output", f"kind=json,path={folder}/report.json"),
            ]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S)
            told = json.loads(next(Path(folder).glob("*.json")).read_text())
        totals = told["benchmarks"][0]["metrics"]["request_totals"]
        assert totals["successful"] >= 6, totals
        assert not totals["errored"], totals
        return None

    return {"load": load}


CLIENTS: dict[str, tuple[str, str, Callable[[str, str], Steps]]] = {
    "openai": ("main", "openai", use_openai),
    "openai-agents": ("main", "openai-agents", use_openai_agents),
    "pydantic-ai": ("main", "pydantic-ai-slim", use_pydantic_ai),
    "langchain-openai": ("main", "langchain-openai", use_langchain),
    "guidance": ("main", "guidance", use_guidance),
    "guidellm": ("main", "guidellm", use_guidellm),
    "litellm": ("openai2", "litellm", use_litellm),
    "llama-index": ("openai2", "llama-index-llms-openai-like", use_llama_index),
}
STEPS = ("answer", "stream", "form", "tool", "second turn", "load")


def run_client(name: str, url: str, model: str) -> None:
    """Run the steps of a client and print their errors as JSON, "" for none."""
    told: dict[str, str] = {}
    for step, work in CLIENTS[name][2](url, model).items():
        try:
            work()
            told[step] = ""
        except Exception as error:  # each client has its own
            detail = getattr(error, "stderr", "") or str(error)
            told[step] = f"{type(error).__name__}: {detail[-400:]}"
    print(json.dumps({"version": importlib.metadata.version(CLIENTS[name][1]), "steps": told}))


def python_of(environment: str, update: bool = False) -> Path:
    """The Python of an environment, installed if missing. update: install the newest and write their versions."""
    folder = HOME if environment == "main" else HOME / environment
    python, wanted = folder / "bin" / "python", ENVIRONMENTS[environment]
    pins, ready = Path(__file__).with_name(f"clients-{environment}.txt"), folder / f".ready-{environment}"
    if update or not ready.exists() or ready.read_text() != f"{wanted} {pins.read_text()}":
        print(f"installing {', '.join(wanted)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip: list[Any] = [python, "-m", "pip", "--quiet"]
        how: list[Any] = ["--upgrade"] if update else ["--constraint", pins]
        subprocess.run([*pip, "install", "--prefer-binary", *how, *wanted], check=True)
        if update:
            frozen = subprocess.run([*pip, "freeze"], check=True, capture_output=True, text=True).stdout
            pins.write_text(pins.read_text().partition("\n")[0] + "\n" + frozen)
        ready.write_text(f"{wanted} {pins.read_text()}")
    return python


def started(port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "slipstream", "serve", "--port", str(port)]
    server = subprocess.Popen(command, cwd=ROOT)
    for _ in range(PATIENCE_S):
        time.sleep(1)
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return server
        except OSError:
            if server.poll() is not None:
                break
    server.kill()
    raise SystemExit("the server did not start")


def row(name: str, told: dict[str, Any]) -> str:
    cells = ["" if step not in told["steps"] else "no" if told["steps"][step] else "yes" for step in STEPS]
    return f"| {name} {told['version']} | {' | '.join(cells)} |"


def main() -> None:
    from slipstream import __version__
    from slipstream.models.default import default_model

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("clients", nargs="*", help=f"of {', '.join(CLIENTS)}; default: all")
    parser.add_argument("--update", action="store_true", help="install the newest clients and write their versions")
    options = parser.parse_args()
    wanted = options.clients or list(CLIENTS)
    environments = {
        name: python_of(name, options.update) for name in dict.fromkeys(CLIENTS[client][0] for client in wanted)
    }
    pythons = {name: environments[CLIENTS[name][0]] for name in wanted}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server, found = started(port), {}
    quiet = {**os.environ, "OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
    quiet.pop("PYTHONPATH", None)
    try:
        for name in wanted:
            command = [
                str(pythons[name]),
                __file__,
                "--client",
                name,
                f"http://127.0.0.1:{port}/v1",
                str(default_model()),
            ]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_S, env=quiet)
                found[name] = json.loads(done.stdout.strip().splitlines()[-1])
            except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
                tail = done.stderr[-400:] if not isinstance(error, subprocess.TimeoutExpired) else ""
                found[name] = {"version": "", "steps": {"answer": f"{type(error).__name__}: {tail}"}}
            print(row(name, found[name]), flush=True)
            for step, wrong in found[name]["steps"].items():
                if wrong:
                    print(f"    {step}: {wrong}", flush=True)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(120)
    if wanted == list(CLIENTS):
        head = ["client", *STEPS]
        lines = [
            _HEAD.format(day=time.strftime("%Y-%m-%d"), version=__version__),
            f"| {' | '.join(head)} |",
            "|---" * len(head) + "|",
            *[row(name, found[name]) for name in wanted],
        ]
        (ROOT / "docs" / "clients.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if any(error for told in found.values() for error in told["steps"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        run_client(*sys.argv[2:5])
    else:
        main()
