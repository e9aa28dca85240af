"""A taskset of verifiers 0.4 with an environment of its own: the model gets three turns, and digits are rewarded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class CountTask(vf.Task[vf.TaskData]):
    @vf.reward  # type: ignore[untyped-decorator]
    async def digits(self, trace: vf.Trace) -> float:
        text = "".join(message.content or "" for message in trace.assistant_messages)
        return sum(c.isdigit() for c in text) / max(1, len(text))


class CountTaskset(vf.Taskset[CountTask]):
    def load(self) -> Iterator[CountTask]:
        for i in range(10, 18):
            data = vf.TaskData(prompt=f"count {i}", system_prompt="Digits only.")
            yield CountTask(data, self.config.task)


class CountEnv(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        async with agents.agent.interaction(task) as session:
            segment = await session.turn()
            for text in ("go on", "more"):
                if segment.terminated:
                    break
                segment = await session.turn(text)


__all__ = ["CountEnv", "CountTaskset"]
