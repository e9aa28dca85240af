"""`gspo push`: upload the model of a run to the Hugging Face Hub, with a model card made from the run.

In: a run and the name of a model repository. Out: the address of the repository. Invariant: nothing but the model, its
card and its curves is uploaded: no completions, no data, no settings that hold a path. A new repository is private
unless it is asked to be public. The token is the one that huggingface_hub finds, and is never read here.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gspo.commands.arguments import add_checkpoint, checkpoint_of
from gspo.commands.command import Command, no_overrides, quiet_libraries
from gspo.commands.save import save
from gspo.errors import ConfigError
from gspo.redact import known_secrets, redacted

_NAME = re.compile(r"(?:[A-Za-z0-9_.-]+/)?[A-Za-z0-9_.-]{1,96}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", metavar="RUN", help="the directory of the run")
    add("name", metavar="NAME", help="the repository on the hub: OWNER/MODEL, or MODEL for your own account")
    add("--merge", action="store_true", help="merge a LoRA adapter into its base model")
    add("--public", action="store_true", help="make a new repository public (default: private)")
    add("--revision", metavar="BRANCH", help="branch to upload to (default: main)")
    add("--dry-run", metavar="DIR", help="write what would be uploaded to this directory, and upload nothing")
    add_checkpoint(parser)


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    no_overrides(overrides)
    quiet_libraries()
    if options.dry_run:
        prepare(options.run_dir, options.name, options.dry_run, which=options.checkpoint, merge=options.merge)
        print(f"Would upload:  {options.dry_run}")
        return 0
    address = push(
        options.run_dir,
        options.name,
        which=options.checkpoint,
        merge=options.merge,
        private=not options.public,
        revision=options.revision,
    )
    print(f"Model:  {address}")
    return 0


def prepare(run: str, name: str, out: str, *, which: str = "newest", merge: bool = False) -> Path:
    """Write the model with its card and curves to `out`."""
    from gspo.model import adapter
    from gspo.record.curves_image import curves_figure
    from gspo.view.model_card import CURVES, model_card

    path = Path(run)
    if not (path / "config.toml").is_file():
        raise ConfigError(f"{run}: not a run directory (no config.toml); give the directory of a run")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not the name of a repository; write OWNER/MODEL")
    checkpoint = checkpoint_of(path, which)
    base = None if checkpoint is None or merge else adapter.base_of(str(checkpoint))
    if base is not None and Path(base).expanduser().exists():
        raise ConfigError(
            f"{run}: its adapter belongs to {base}, which nobody else has; upload the merged model with --merge"
        )
    source, folder = save(run, out, which=which, merge=merge)
    curves_figure(path).savefig(folder / CURVES, dpi=110)
    card = model_card(path, name, step=int(source.name), merged=merge)
    (folder / "README.md").write_text(card, encoding="utf-8")
    return folder


def push(
    run: str,
    name: str,
    *,
    which: str = "newest",
    merge: bool = False,
    private: bool = True,
    revision: str | None = None,
) -> str:
    """Upload the model of a run. Returns the address of the repository."""
    from gspo.network.hub import unreachable_host

    with TemporaryDirectory(prefix="gspo-") as temporary:
        # Before a repository is created, so that a run without a checkpoint leaves none.
        folder = prepare(run, name, f"{temporary}/model", which=which, merge=merge)
        if host := unreachable_host():
            raise ConfigError(f"{host} cannot be reached; connect, or write the files with --dry-run DIR")
        return _upload(folder, name, private=private, revision=revision)


def _upload(folder: Path, name: str, *, private: bool, revision: str | None) -> str:
    import huggingface_hub

    api: Any = huggingface_hub.HfApi()
    try:
        repository = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository.repo_id,
            folder_path=str(folder),
            commit_message="Upload a model trained with gspo",
            revision=revision,
        )
    except Exception as error:  # of any library below: network, login, rights, names
        lines = redacted(str(error), known_secrets()).strip().splitlines()
        reason = next((line.strip() for line in lines if line.strip()), type(error).__name__)
        raise ConfigError(
            f"{name}: cannot be uploaded: {reason}; log in with a token that may write (hf auth login, or HF_TOKEN)"
        ) from None
    return str(repository)


COMMAND = Command(
    name="push",
    help="Upload the model of a run to the Hugging Face Hub, with a model card made from the run.",
    add_arguments=add_arguments,
    run=run,
    epilog="A new repository is private unless you give --public. See docs/runs.md.",
    single_process=True,
)
