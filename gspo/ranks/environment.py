"""What a launcher tells a process in its environment. `torchrun` and `gspo train --nproc` set the same variables.

In: the environment. Out: whether this process is one of several, and which. Invariant: needs nothing but the standard
library, so that a command can ask before it loads anything.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from gspo.errors import ConfigError

NEEDED = ("RANK", "MASTER_ADDR", "MASTER_PORT")
_LAUNCHER = (*NEEDED, "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
"""Variables with which a launcher tells a process that it is one of several ranks."""
LAUNCHED = "GSPO_NPROC"
"""The number of ranks, in the environment of those that `gspo train --nproc` has started."""
ENDED = "GSPO_ENDED_RANKS"
"""A directory, in the environment of ranks that `gspo train --nproc` has started: a file of it has the number of the
signal that killed the rank of this name, and the file `JOINED` says that the leader has found the others."""
JOINED = "joined"
CLUSTER = "GSPO_CLUSTER"
"""What `gspo train --cluster` tells its ranks about the cluster, as JSON (`cluster/connect.py`)."""
RANK_LOST = 74
"""Exit code of a leader on a cluster that ended because another rank is gone. The launcher then resumes the run."""
LEADER_SILENT = 75
"""Exit code of a follower whose leader is frozen. The launcher then ends the leader."""


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is currently free."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def signal_name(number: int) -> str:
    """A signal that has killed a process, for an error message."""
    name = next((known.name for known in signal.Signals if known == number), "unknown")
    hint = "; the system sends it if memory runs out" if number == signal.SIGKILL else ""
    return f"signal {number} ({name}{hint})"


def killed_by(rank: int, environment: Mapping[str, str] = os.environ) -> int | None:
    """The number of the signal that has killed a rank, if the launcher has seen it."""
    folder = environment.get(ENDED)
    try:
        return int((Path(folder) / str(rank)).read_text()) if folder else None
    except (OSError, ValueError):  # no such file, or one that is being written
        return None


def without_launcher(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a process that is not one of the ranks, but is started by one."""
    return {k: v for k, v in environment.items() if k not in _LAUNCHER and not k.startswith("TORCHELASTIC_")}


def resume_command(run: Path | str, *, program: str = "gspo", environment: Mapping[str, str] = os.environ) -> str:
    """The command that resumes a run with the launcher that has started this process."""
    cluster, count = environment.get(CLUSTER), environment.get(LAUNCHED)
    options = f" --cluster {json.loads(cluster)['given']}" if cluster else ""
    return f"{program} train --resume {run}{options}" + (f" --nproc {count}" if count else "")


def report_joined(environment: Mapping[str, str] = os.environ) -> None:
    """Tell the launcher that the leader has found the others, so it notices by itself if one of them fails."""
    if folder := environment.get(ENDED):
        with suppress(OSError):
            (Path(folder) / JOINED).touch()


def world_size(environment: Mapping[str, str] = os.environ) -> int:
    """How many processes the launcher of this one has started."""
    world = environment.get("WORLD_SIZE", "1")
    return int(world) if world.isdecimal() else 1


def local_ranks(count: int, environment: Mapping[str, str] = os.environ) -> int:
    """How many of the `count` ranks are on this machine; all of them if the launcher does not say."""
    own = environment.get("LOCAL_WORLD_SIZE", "")
    return int(own) if own.isdecimal() and own != "0" else count


def is_follower(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher has started this process as one of several, and not as the leader."""
    return world_size(environment) > 1 and environment.get("RANK", "0") != "0"


def own_rank(environment: Mapping[str, str] = os.environ) -> int:
    """The rank of this process, one of several."""
    world = world_size(environment)
    missing = [name for name in NEEDED if not environment.get(name)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {world}, but {', '.join(missing)} is not set; start the processes with torchrun, or with "
            "gspo train --nproc"
        )
    for name in ("RANK", "MASTER_PORT"):
        if not environment[name].isdecimal():
            raise ConfigError(f"{name}: must be a number, is {environment[name]!r}")
    rank = int(environment["RANK"])
    if rank >= world:
        raise ConfigError(f"RANK: must be less than WORLD_SIZE, which is {world}; is {rank}")
    return rank
