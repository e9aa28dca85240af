"""The process that runs a taskset of `verifiers` (0.4). It imports nothing of this package.

    PYTHON verifiers_worker.py                       started by `serving/verifiers_env.py`
    PYTHON verifiers_worker.py --export NAME FILE    write the problems of a taskset as a data file

In: one JSON object per line on standard input. Out: one per line on standard output; what anything prints goes to
standard error. It runs with the Python that has `verifiers`, which may be in an environment of its own. Invariant: the
taskset is brought unchanged. Its model calls go through `verifiers`' own interception and training client to the server
of the trainer, so tokens and log-probs are those of the engine. The harness below is in process: it sends one prompt.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import types
from contextlib import suppress
from typing import Any

HARNESS = "gspo_in_process"
SHOWN = 300


def register_harness(vf: Any) -> None:
    """A harness that asks the model once, without a process, tools or the network."""

    class Config(vf.HarnessConfig):  # type: ignore[misc, name-defined]
        pass

    class InProcess(vf.Harness[Config]):  # type: ignore[misc, name-defined]
        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
        ) -> Any:
            from openai import AsyncOpenAI

            async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None) as client:
                await client.chat.completions.create(model=ctx.model, messages=first_messages(data))
            return vf.ProgramResult(0, "", "")

    module = types.ModuleType(HARNESS)
    module.__all__ = ["InProcess"]  # type: ignore[attr-defined]
    module.InProcess = InProcess  # type: ignore[attr-defined]
    InProcess.__module__ = Config.__module__ = HARNESS
    sys.modules[HARNESS] = module


def first_messages(data: Any) -> list[dict[str, Any]]:
    """The messages that a task begins with."""
    prompt = data.prompt
    if prompt is None:
        raise ValueError("the task has no prompt: a user would have to begin the conversation")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [_plain(m) for m in prompt]
    return [{"role": "system", "content": data.system_prompt}, *messages] if data.system_prompt else messages


def _plain(message: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = message if isinstance(message, dict) else message.model_dump(exclude_none=True)
    return dumped


class Worker:
    """One taskset, and the rollouts of it."""

    def __init__(self) -> None:
        import verifiers.v1 as vf

        self.vf = vf
        register_harness(vf)

    def load(self, taskset: dict[str, Any], agent: dict[str, Any]) -> dict[str, Any]:
        """Load the taskset and its environment."""
        seat = {**agent, "harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}
        self.env = self.vf.load_environment(self.vf.resolve_env_config({"taskset": taskset, "agent": seat}))
        if list(self.env._agent_specs) != ["agent"]:
            raise ValueError(f"it has the roles {', '.join(self.env._agent_specs)}; only a single agent is supported")
        kind = type(self.env.taskset)
        if kind.toolsets(self.env.taskset.config) or kind.task_type().toolsets(self.env.taskset.config.task):
            raise ValueError("it has tool servers, which are not supported")
        if not self.env.taskset.bounded:
            raise ValueError("it is infinite, which is not supported; name a taskset that has an end")
        self.tasks = list(self.env.taskset)
        return {"tasks": len(self.tasks)}

    def begin(self, tasks: list[dict[str, Any]], tokenizer: str, renderer: Any) -> list[dict[str, Any]]:
        """What tasks begin with, as text and tokens, written by the renderer that the training client uses."""
        from renderers import create_renderer
        from renderers.base import load_tokenizer

        loaded = load_tokenizer(tokenizer)
        writer = create_renderer(loaded, self.client(tokenizer, renderer, "http://127.0.0.1").renderer)
        found = []
        for one in tasks:
            ids = writer.render(first_messages(self.task(one).data), add_generation_prompt=True).token_ids
            found.append({"token_ids": list(ids), "text": loaded.decode(ids)})
        return found

    def task(self, named: dict[str, Any]) -> Any:
        """The task that a row of the data names."""
        if not 0 <= named["idx"] < len(self.tasks) or self.tasks[named["idx"]].hash != named["hash"]:
            raise ValueError(f"task {named['idx']} is not the one in the data; export the data again")
        return self.tasks[named["idx"]]

    def client(self, tokenizer: str, renderer: Any, address: str) -> Any:
        settings = {"renderer": renderer} if renderer else {}
        return self.vf.TrainClientConfig(
            base_url=address, api_key_var="GSPO_SERVE_TOKEN", renderer_model_name=tokenizer, **settings
        )

    async def run(self, rollouts: list[dict[str, Any]], client: Any, model: str, write: Any) -> None:
        """Run rollouts side by side; `write` gets the outcome of each."""

        async def one(rollout: dict[str, Any]) -> None:
            context = self.vf.ModelContext(
                model=model, client=client, sampling=self.vf.SamplingConfig(**rollout["sampling"])
            )
            try:
                episode = await self.env.run_episode(self.task(rollout["task"]), context)
                found = outcome(episode)
            except Exception as error:
                found = {"failure": f"{type(error).__name__}: {error}"[:SHOWN]}
            write({"id": rollout["id"], **found})

        async with self.env.serving():
            await asyncio.gather(*map(one, rollouts))


def outcome(episode: Any) -> dict[str, Any]:
    """The branches, the reward and the end of an episode."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok or len(episode.traces) != 1:
        message = errors[-1].message if errors else f"{len(episode.traces)} agents have run"
        return {"failure": str(message)[:SHOWN] or "failed"}
    trace = episode.traces[0]
    branches = [b for b in trace.branches if b.trainable]
    return {
        "branches": [{"token_ids": b.token_ids, "sampled": b.sampled_mask, "logp": b.logprobs} for b in branches],
        "reward": trace.reward,
        "stop": trace.stop_condition or "",
        "truncated": trace.is_truncated,
    }


def serve() -> None:
    """Answer commands until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # nothing that a library prints may pass for an answer

    def write(answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    worker: Worker | None = None
    # One for all runs: libraries keep locks that belong to it.
    loop = asyncio.new_event_loop()
    with suppress(BrokenPipeError):  # the trainer has ended in the middle of a run
        for line in sys.stdin:
            message = json.loads(line)
            try:
                worker = worker or Worker()
                if "load" in message:
                    write({"result": worker.load(**message["load"])})
                elif "begin" in message:
                    write({"result": worker.begin(**message["begin"])})
                else:
                    run = message["run"]
                    os.environ["GSPO_SERVE_TOKEN"] = run["token"]
                    client = worker.client(run["tokenizer"], run["renderer"], run["address"])
                    loop.run_until_complete(worker.run(run["rollouts"], client, run["model"], write))
            except Exception as error:
                write({"error": f"{type(error).__name__}: {error}"[:SHOWN]})
    # All that the taskset has started ends, too, if this process leads its group.
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)


def export(name: str, file: str) -> None:
    """Write a row for each task."""
    sys.path.insert(0, os.getcwd())
    worker = Worker()
    worker.load({"id": name}, {})
    with open(file, "w", encoding="utf-8") as out:
        for task in worker.tasks:
            row = {"prompt": task.data.prompt_text, "verifiers": {"idx": task.data.idx, "hash": task.hash}}
            out.write(json.dumps(row) + "\n")
    print(f"{len(worker.tasks)} tasks in {file}")


if __name__ == "__main__":
    # Modules next to this file are not those that libraries mean by these names.
    sys.path[:] = [path for path in sys.path if os.path.realpath(path) != os.path.dirname(os.path.realpath(__file__))]
    export(*sys.argv[2:4]) if sys.argv[1:2] == ["--export"] else serve()
