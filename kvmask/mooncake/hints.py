"""Commands that install missing packages, for error messages."""

SYSTEM_PACKAGES = ("libibverbs1", "librdmacm1", "libnuma1", "libcurl4")
PIP_HINT = (
    "install one build of Mooncake: pip install 'kvmask[mooncake-cpu]' (no CUDA), "
    "'kvmask[mooncake]' (CUDA 12) or 'kvmask[mooncake-cuda13]'"
)
APT_HINT = "install the system libraries: apt-get install " + " ".join(SYSTEM_PACKAGES)
