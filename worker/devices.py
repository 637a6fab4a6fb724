"""Which devices a worker runs on: the setting `device` as a list of single ones."""

from __future__ import annotations

from contract.errors import SettingsError


def devices(setting: str) -> list[str]:
    """`cuda:0,cuda:1` one by one; `all` is every CUDA device, the CPU where there is none. Never empty."""
    if setting.strip() == "all":
        import torch  # seconds, which nobody else who asks has to wait

        return [f"cuda:{number}" for number in range(torch.cuda.device_count())] or ["cpu"]
    named = [name.strip() for name in setting.split(",")]
    if not all(named):
        raise SettingsError(f"device = '{setting}': a name is missing at a comma")
    if "all" in named:
        raise SettingsError(f"device = '{setting}': 'all' stands alone")
    return named
