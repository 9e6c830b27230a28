"""The versions that kvmask is checked against. No other file decides them.

    python kvmask/versions.py      prints the vLLM releases whose own tests run with kvmask

Requirement files repeat the pins, because pip reads nothing else; a test compares them.
"""

#: vLLM releases, the installed one first.
VLLM = ("0.32.0", "0.33.0", "0.28.0", "0.24.0")
#: The release that tests, engines and benches install; of the others only the source is read.
VLLM_INSTALLED = VLLM[0]
#: Mooncake's client and master.
MOONCAKE = "0.3.13.post1"


def release_of(version: str) -> str:
    """The release of a version.

    >>> release_of("0.32.0")
    '0.32'
    """
    return ".".join(version.split(".")[:2])


if __name__ == "__main__":
    print(*VLLM)
