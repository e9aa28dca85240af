"""Servers for the vLLM engine: given by address, or started for the run.

In: the engine's options. Out: a `ServerHost` whose servers all responded. Invariant: if a server cannot be reached,
every server that was started here is stopped before the error is raised.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.errors import ConfigError, EngineError
from gspo.model.adapter import layers as adapted_layers
from gspo.rollout.vllm import adapter
from gspo.rollout.vllm.guard import TOKEN
from gspo.rollout.vllm.http import Client, Fault
from gspo.rollout.vllm.in_process import check_cpu, write_shape
from gspo.rollout.vllm.launch_server import Process, as_arguments
from gspo.rollout.vllm.placed_server import server_places
from gspo.rollout.vllm.server_host import Limits, Server, ServerHost
from gspo.rollout.vllm.transfer import can_read
from gspo.rollout.vllm.transfer_folder import probe

TRANSFERS = ("auto", "file", "gloo", "nccl")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `engines/vllm.py` that concern servers."""

    servers: tuple[str, ...]
    start: int
    experts: bool
    layers: tuple[int, ...]
    """Indices of the MoE layers."""
    adapters: bool
    """Whether to send a LoRA adapter as an adapter if every server supports it."""
    settings: Mapping[str, Any]
    transfer: str
    in_flight: int
    request_s: float
    check_s: float
    absent_s: float


def check(options: Options) -> None:
    """Refuse options that cannot work or would have no effect."""
    where = "rollout.engine_options"
    if options.servers and options.start:
        raise ConfigError(f"{where}.start: servers are given, so none is started; set either start or servers")
    if options.servers and options.settings:
        raise ConfigError(f"{where}.settings: has no effect on a running server; pass the settings to gspo serve")
    if not isinstance(options.start, int) or options.start < 0:
        raise ConfigError(f"{where}.start: must be a whole number, at least 0, not {options.start!r}")
    if not isinstance(options.in_flight, int) or options.in_flight < 1:
        raise ConfigError(f"{where}.in_flight: must be a whole number, at least 1, not {options.in_flight!r}")
    if options.transfer not in TRANSFERS:
        raise ConfigError(f"{where}.transfer: must be one of {', '.join(TRANSFERS)}, not {options.transfer!r}")
    for name in ("request_s", "check_s", "absent_s"):
        value = getattr(options, name)
        if not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"{where}.{name}: must be a positive number of seconds, not {value!r}")
    if not options.servers and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "rollout.engine: vLLM is not installed here; docs/engines.md says how to install it; or set "
            f"{where}.servers"
        )
    for address in options.servers:
        host, _, port = address.removeprefix("http://").rstrip("/").rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError(f"{where}.servers: {address!r} is not an address; write HOST:PORT")


def connect(model: Any, options: Options) -> ServerHost:
    """Connect to the servers, or start them first."""
    limits = Limits(
        request_s=options.request_s, check_s=options.check_s, absent_s=options.absent_s, sync_s=options.absent_s
    )
    dtype = str(model.dtype).removeprefix("torch.")
    servers = _running_servers(options) if options.servers else _start_servers(model, options, limits)
    try:
        # A broadcast sends whole weights; only a file can hold an adapter in the format that vLLM loads.
        adapters = (
            options.adapters and options.transfer in ("auto", "file") and _support_adapters(model, servers, limits)
        )
        return ServerHost(
            servers,
            adapters=adapters,
            in_flight=options.in_flight,
            limits=limits,
            transfer=options.transfer,
            warn=_warn,
            experts=options.experts,
            layers=options.layers,
            dtype=dtype,
            folder=None if servers[0].process is None else servers[0].process.log.parent,
        )
    except BaseException as error:
        for server in servers:
            if server.process is not None:
                server.process.stop()
        if isinstance(error, Fault):
            raise EngineError(
                f"rollout.engine_options.servers: {error}; is it running? gspo serve MODEL starts one"
            ) from error
        raise


def _support_adapters(model: Any, servers: Sequence[Server], limits: Limits) -> bool:
    """Whether every server has a single worker with room for the model's adapter, which can read files of this
    machine."""
    wanted = adapted_layers(model).keys()
    rank = adapter.lora_rank(model)
    with probe(0) as path:
        for server in servers:
            rooms = server.client.workers("gspo_adapted", rank, timeout_s=limits.sync_s)
            # One worker: with several, each holds a part of the adapter, which the digest cannot verify.
            fits = len(rooms) == 1 and isinstance(rooms[0], list) and wanted <= set(rooms[0])
            if not fits or not can_read(server.client, path, limits.sync_s):
                return False
    return True


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def _running_servers(options: Options) -> list[Server]:
    token = os.environ.get(TOKEN, "")
    if not token:
        raise ConfigError(
            f"rollout.engine_options.servers: set {TOKEN} to the token of the servers (gspo serve prints where it is)"
        )
    return [Server(client=Client(address, token)) for address in options.servers]


def _start_servers(model: Any, options: Options, limits: Limits) -> list[Server]:
    """Start the run's own servers, in parallel. They start with dummy weights and exit with this process."""
    folder = Path(tempfile.mkdtemp(prefix="gspo-vllm-"))
    write_shape(model, folder)
    settings = {"dtype": str(model.dtype).removeprefix("torch."), "load_format": "dummy", **options.settings}
    if model.device.type == "cpu":
        check_cpu(model)
        settings.setdefault("enforce_eager", True)
    if options.adapters and not adapter.obstacle_to_adapter(model, settings):
        settings |= adapter.lora_settings(model)
    given: dict[str, Any] = {"experts": options.experts, "more": as_arguments(settings)}
    processes: list[Process]
    if places := server_places():
        processes = [places.server(i, folder, **given) for i in range(min(options.start, places.count))]
    else:
        processes = [Process(str(folder), log=folder / f"server-{i}.log", **given) for i in range(options.start)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.wait_ready(limits.absent_s)
    except BaseException:
        for process in processes:
            process.stop()
        raise
    for process in processes:
        # If the engine is never closed, for example after an error while the run is being built.
        atexit.register(process.stop)
    return [Server(client=Client(p.address, p.token), process=p) for p in processes]
