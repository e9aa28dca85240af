"""The environment variables of the process that environments run in.

In: the names of variables, and those that a run declares (`environment.variables`). Out: which the process gets.
Invariant: no variable that may hold a secret of the trainer, such as the token of a model hub, unless it is declared.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from gspo.errors import ConfigError
from gspo.redact import sounds_secret

KEPT = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "TMPDIR", "TZ", "LANG", "LANGUAGE", "TERM"),
        *(
            "LD_LIBRARY_PATH",
            "LD_PRELOAD",
            "VIRTUAL_ENV",
            "CUDA_VISIBLE_DEVICES",
            "CUDA_HOME",
            "TOKENIZERS_PARALLELISM",
        ),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "NO_PROXY", "no_proxy"),
        *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"),
    }
)
PREFIXES = ("LC_", "PYTHON", "XDG_", "OMP_", "MKL_", "OPENBLAS_", "CONDA_", "JAVA_", "GSPO_")


def keeps(name: str, declared: Collection[str]) -> bool:
    """Whether the process gets a variable."""
    if name in declared or name in KEPT:
        return True
    return name.startswith(PREFIXES) and not sounds_secret(name)


def check_declared(declared: Collection[str], own: Mapping[str, str] = os.environ) -> None:
    """Refuse names of variables that are not set."""
    for name in declared:
        if name not in own:
            raise ConfigError(
                f"environment.variables: there is no environment variable {name!r}; set it, or remove it from the list"
            )
