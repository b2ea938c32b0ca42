"""What a speed on a GPU depends on and PyTorch does not say: driver, clocks, power, temperature."""

import subprocess

import torch

# What nvidia-smi calls it -> what it is here
FIELDS = {
    "driver_version": "driver",
    "clocks.sm": "sm_mhz",
    "clocks.max.sm": "sm_max_mhz",
    "clocks.mem": "memory_mhz",
    "clocks.max.mem": "memory_max_mhz",
    "power.draw": "power_watt",
    "power.limit": "power_limit_watt",
    "temperature.gpu": "temperature_celsius",
}


def gpu_state() -> dict[str, str] | None:
    """The state of the current CUDA device at this moment, as nvidia-smi words it; None without a GPU or the tool."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    gpu = f"GPU-{torch.cuda.get_device_properties().uuid}"
    query = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        line = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(FIELDS.values(), (value.strip() for value in line.split(",")), strict=True))
