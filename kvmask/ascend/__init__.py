"""kvmask inside vllm-ascend's AscendStore. The only package of kvmask that imports vllm_ascend."""

from kvmask.ascend.install import install, uninstall

__all__ = ["install", "uninstall"]
