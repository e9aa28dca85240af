"""Joining a Ray cluster, or starting one on this machine.

In: `auto` or an address. Out: the `ray` module, connected. Invariant: Ray pickles what it sends, and runs what it
receives, so its token authentication stays on, and a cluster that is started here listens on the loopback interface
only, without a dashboard. This package sends strings only: JSON that it has written itself. Every wait for Ray has a
deadline. Signal handlers are as they were before.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from gspo.errors import ConfigError
from gspo.ranks.environment import CLUSTER

AUTO = "auto"
CONNECT_S = 15.0
"""Seconds that the machine of a cluster has to accept a connection."""
CREDENTIALS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Ray's variables that a process of a cluster keeps. All others describe the process that Ray itself has started."""


def check_address(address: str) -> None:
    """Refuse what is neither `auto` nor an address."""
    host, _, port = address.rpartition(":")
    if address != AUTO and (not host or not port.isdecimal() or "/" in host):
        raise ConfigError(
            f"--cluster: {address!r} is neither {AUTO} nor an address; write HOST:PORT of the head node (ray start "
            "--head prints it)"
        )
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        raise ConfigError(
            "RAY_AUTH_MODE: without Ray's token authentication, everybody who reaches the cluster can run code in it; "
            "unset it"
        )


def load_ray() -> Any:
    """The `ray` module."""
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Otherwise it retries for more than ten minutes to reach a cluster that is gone.
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "2")
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"--cluster: Ray cannot be imported ({error}); install it (pip install 'gspo[ray]'), or leave out "
            "--cluster and start the ranks with --nproc or torchrun"
        ) from None
    return ray


@contextmanager
def joined(address: str, *, namespace: str, cpus: int = 0) -> Iterator[Any]:
    """The `ray` module, connected to the cluster at an address. `auto` is the one that RAY_ADDRESS names; if it is not
    set, one of this process alone, with room for processes that need `cpus` CPUs."""
    loaded = sys.modules.get("ray")
    if loaded is not None and loaded.is_initialized():
        yield loaded  # another component of this process has joined it, and leaves it later
        return
    check_address(address)
    address = os.environ.get("RAY_ADDRESS", AUTO) if address == AUTO else address
    options: dict[str, Any]
    if address == AUTO:
        # In the environment, not in a file: the token is worth nothing once the cluster has ended.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        os.environ.pop("RAY_ADDRESS", None)
        cores = os.cpu_count() or 1
        options = {"address": "local", "_node_ip_address": "127.0.0.1", "include_dashboard": False}
        options["num_cpus"] = max(cores, cpus)
        loopback = True
    else:
        check_address(address)
        _check_reachable(address)
        options = {"address": address}
        loopback = address.rpartition(":")[0] in ("127.0.0.1", "localhost")
    if loopback:
        # Ray replaces the loopback address by that of the network, unless it believes that clusters are impossible.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray = load_ray()
    with _handlers_kept():
        try:
            ray.init(**options, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise ConfigError(
                f"--cluster: cannot use the cluster at {address}: {first:.300}; it needs the same versions of Python "
                "and Ray, and its token in ~/.ray/auth_token or RAY_AUTH_TOKEN"
            ) from error
    # The last log lines of a raylet that was killed, in every process: the errors of this package have the cause.
    if hasattr(ray._private.worker, "print_to_stdstream"):
        ray._private.worker.print_to_stdstream = lambda data, ignore_prefix: None
    try:
        yield ray
    finally:
        with _handlers_kept():
            ray.shutdown()


def nodes(ray: Any) -> list[Mapping[str, float]]:
    """The resources of the nodes that are alive."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def address_of(ray: Any) -> str:
    """Where other processes can join the cluster."""
    return str(ray.get_runtime_context().gcs_address)


def process_environment(given: Mapping[str, str], own: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a process that an actor starts: that of its node, and what the launcher has given."""
    kept = {name: value for name, value in own.items() if not name.startswith("RAY_") or name in CREDENTIALS}
    return kept | dict(given)


def membership(environment: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """What the launcher has told this process about its cluster; None if it is not on one."""
    text = environment.get(CLUSTER, "")
    found: dict[str, Any] | None = json.loads(text) if text else None
    return found


def reason(error: BaseException) -> str:
    """Why an actor is gone, in a line. Ray puts it after the description of the actor."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    _, *told = [line for line in lines if ":" not in line.split(" ")[0]] or [""]
    return (" ".join(told) or (lines or [type(error).__name__])[0])[:400]


def schedule_in(ray: Any, group: Any, place: int) -> dict[str, Any]:
    """The options of an actor that runs in a place of a placement group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=place)
    return {"scheduling_strategy": strategy}


def _check_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--cluster: nothing answers at {address} ({error}); start a cluster there (ray start --head), or correct "
            "the address"
        ) from None


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Ray replaces the handler of SIGTERM, with which a run saves a checkpoint, and the hook of uncaught errors."""
    numbers: Sequence[int] = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before, hook = [(number, signal.getsignal(number)) for number in numbers], sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = hook
        with suppress(ValueError):  # not in the main thread, where nothing can have changed
            for number, handler in before:
                signal.signal(number, handler)
