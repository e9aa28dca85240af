"""A sequence split over processes: the mean log-ratio is reduced before exp, so every process sees the same ratio."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WORKER = """
import sys
import torch
import torch.distributed as dist
from gspo.objectives.loss import loss_of
from gspo.objectives.table import objective as build
from gspo.objectives.sequences import Sequences, Tokens

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


def add_up(x):
    total = x.clone()
    dist.all_reduce(total)
    return total


generator = torch.Generator().manual_seed(0)
N, B = 40, 5
index = torch.randint(0, B, (N,), generator=generator)
logp = -torch.rand(N, generator=generator, dtype=torch.float64)
old = logp + 0.003 * torch.randn(N, generator=generator, dtype=torch.float64)
advantage = torch.randn(B, generator=generator, dtype=torch.float64)
weight = torch.rand(N, generator=generator, dtype=torch.float64)


def run(objective, part, reduce):
    mine = logp[part].clone().requires_grad_()
    tokens = Tokens(
        logp_N=mine,
        logp_old_N=old[part],
        advantage_N=advantage[index[part]],
        sequences=Sequences(index[part], B, reduce),
    )
    # Tokens are taken by micro-batch, and must still know the processes that share their sequences.
    order = torch.arange(len(part)).flip(0)
    loss = loss_of(objective, tokens.take(order), weight[part][order]).total
    loss.backward()
    return loss.detach(), mine.grad


everything = torch.arange(N)
mine = everything[rank::2]
for name in sys.argv[3:]:
    objective = build(name)
    whole_loss, whole_gradient = run(objective, everything, None)
    loss, gradient = run(objective, mine, add_up)
    assert torch.allclose(gradient, whole_gradient[mine], rtol=1e-12, atol=1e-14), name
    assert torch.allclose(add_up(loss), whole_loss, rtol=1e-12), name
    alone, wrong = run(objective, mine, None)
    assert not torch.allclose(wrong, whole_gradient[mine]), f"{name}: the ratio of half a sequence would go unnoticed"
dist.barrier()
dist.destroy_process_group()
"""

ROWS = ["gspo", "gspo_token", "luspo", "fspo", "gmpo", "sspo", "vespo"]


def test_two_processes_agree_on_the_ratios_of_shared_sequences(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WORKER]
    children = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store"), *ROWS], stderr=subprocess.PIPE)
        for rank in (0, 1)
    ]
    for child in children:
        _, errors = child.communicate(timeout=120)
        assert child.returncode == 0, errors.decode()
