"""Environments that answer the model, for conversations of several turns. docs/environments.md has an example.

Invariant: importing this package is quick, because every environment's process does so.
"""

from gspo.environment.environment import Environment
from gspo.environment.tool_calls import ToolCall
from gspo.environment.tools import ToolError, ToolUnavailable, tool

__all__ = ["Environment", "ToolCall", "ToolError", "ToolUnavailable", "tool"]
