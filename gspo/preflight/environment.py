"""The environment: whether it loads, begins the problems, and answers a message.

In: the context with its problems. Out: findings, the environment of the run, and problems whose prompts are what it
begins with. Invariant: it is tried in a process of its own, with the deadlines of the run.
"""

from __future__ import annotations

from collections.abc import Iterator

from gspo.build import environment_for
from gspo.environment.engine import fingerprint, row_of
from gspo.environment.template import tool_format
from gspo.preflight.context import PreflightContext
from gspo.preflight.findings import Finding, fail, note, ok, warning
from gspo.serving.verifiers_env import VerifiersEnvironment


def check_environment(context: PreflightContext) -> Iterator[Finding]:
    config = context.config
    if not config.environment.name:
        yield ok("No environment: a completion is a single turn.")
        return
    assert context.problems is not None
    environment = environment_for(config, context.stack)
    assert environment is not None
    context.problems = environment.open_problems(context.problems, context.tokenizer)
    context.environment = environment
    if isinstance(environment, VerifiersEnvironment):
        yield ok(f"Taskset {config.environment.options['taskset']} begins all problems.")
        return
    names = [schema["function"]["name"] for schema in environment.host.tools]
    style = tool_format(config.environment, context.tokenizer, environment.host.tools)
    tools = f"tools {', '.join(names)}, called in format {style}" if names else "no tools"
    yield ok(f"{config.environment.name} begins all problems: {tools}.", tools=names, format=style)
    row = row_of(context.problems.train[0])
    number = environment.host.open()
    try:
        environment.host.submit(number, "reset", row=row, row_key=fingerprint(row), key="doctor")
        answers = environment.host.poll(config.environment.timeout_s + 1)
        if answers and not answers[0].failure:
            environment.host.submit(number, "step", text="A trial of the doctor.", format=style)
            answers = environment.host.poll(config.environment.timeout_s + 1)
    finally:
        environment.host.end(number)
    failure = answers[0].failure if answers else "timeout"
    if failure:
        yield fail(
            f"It failed to answer a message of the model: {failure}.",
            "Whatever the model writes must be answered: conversations that fail are unscored.",
        )
    elif answers[0].result["reward"] is None and answers[0].result["done"] and not config.reward.functions:
        yield warning(
            "It ended a conversation without a reward, and there are no reward functions.",
            "Return a reward at the end, or name reward.functions.",
        )
    else:
        yield note(f"It answers a message in {answers[0].seconds:.2g} s.", seconds=answers[0].seconds)
