"""Data sheets of GPUs: peak rates and sizes.

Out: `GPUS`, by the name that `gspo plan --gpu` takes. Invariant: these are the maker's numbers, without sparsity. What
a run reaches of them is in `calibration.py`.

Sources, all of NVIDIA: "A100 Tensor Core GPU" data sheet (SXM, 80 GB), "H100 Tensor Core GPU" data sheet (SXM),
"H200 Tensor Core GPU" data sheet (SXM), "HGX B200" specifications (per GPU), "L40S" data sheet, "Ada GPU architecture"
white paper (RTX 4090, tensor operations in BF16 with FP32 accumulation). Data sheets give bf16 with sparsity, which is
twice the dense rate that is here, and NVLink in both directions together, which is twice the rate that is here. The
network is that of the maker's reference servers: one adapter of 400 Gbit/s per GPU (DGX H100, H200, B200), or of 200
Gbit/s (DGX A100), which other clusters need not have.
"""

from __future__ import annotations

from dataclasses import dataclass

from gspo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A kind of GPU."""

    name: str
    flops: float
    """Dense bfloat16 operations per second, accumulated in float32."""
    memory: float
    """Bytes. What data sheets call 80 GB is 80 GiB, less what is reserved."""
    bandwidth: float
    """Bytes per second between the memory and the chip."""
    link: float
    """Bytes per second and direction to the other GPUs of a node."""
    network: float
    """Bytes per second and direction to other nodes, per GPU."""
    host_link: float
    """Bytes per second and direction to the memory of the machine, over PCIe x16."""
    known_as: str
    """A part of the name that the driver reports."""


GIB = 2.0**30
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="a100",
            flops=312e12,
            memory=80 * GIB,
            bandwidth=2.039e12,
            link=300e9,
            network=25e9,
            host_link=32e9,
            known_as="A100-SXM4-80GB",
        ),
        Gpu(
            name="h100",
            flops=989e12,
            memory=80 * GIB,
            bandwidth=3.35e12,
            link=450e9,
            network=50e9,
            host_link=64e9,
            known_as="H100 80GB",
        ),
        Gpu(
            name="h200",
            flops=989e12,
            memory=140 * GIB,
            bandwidth=4.8e12,
            link=450e9,
            network=50e9,
            host_link=64e9,
            known_as="H200",
        ),
        Gpu(
            name="b200",
            flops=2250e12,
            memory=180 * GIB,
            bandwidth=8e12,
            link=900e9,
            network=50e9,
            host_link=64e9,
            known_as="B200",
        ),
        # These two have no NVLink: PCIe 4.0 x16.
        Gpu(
            name="l40s",
            flops=362e12,
            memory=48 * GIB,
            bandwidth=0.864e12,
            link=32e9,
            network=25e9,
            host_link=32e9,
            known_as="L40S",
        ),
        Gpu(
            name="rtx4090",
            flops=165e12,
            memory=24 * GIB,
            bandwidth=1.008e12,
            link=32e9,
            network=12.5e9,
            host_link=32e9,
            known_as="RTX 4090",
        ),
    )
}


def gpu_named(name: str) -> Gpu:
    """The data sheet of a GPU."""
    if name.lower() not in GPUS:
        raise ConfigError(f"--gpu: {name!r} is not known; choose {', '.join(GPUS)}")
    return GPUS[name.lower()]


def gpu_of_device(reported: str) -> Gpu | None:
    """The data sheet of the GPU with the name that the driver reports; None if there is none."""
    return next((gpu for gpu in GPUS.values() if gpu.known_as.lower() in reported.lower()), None)
