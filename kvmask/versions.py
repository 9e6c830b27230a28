"""The versions that kvmask is checked against. No other file decides them.

    python kvmask/versions.py      prints the vLLM releases whose own tests run with kvmask
    python kvmask/versions.py ascend      the same of vllm-ascend

Requirement files repeat the pins, because pip reads nothing else; a test compares them.
"""

import sys

#: vLLM releases, the installed one first.
VLLM = (
    "0.32.0",
    "0.33.0",
    "0.31.0",
    "0.30.0",
    "0.29.0",
    "0.28.0",
    "0.27.1",
    "0.27.0",
    "0.26.0",
    "0.25.1",
    "0.25.0",
    "0.24.0",
)
#: The release that tests, engines and benches install; of the others only the source is read.
VLLM_INSTALLED = VLLM[0]
#: vllm-ascend releases, oldest first (the newest final one and the newest one), and the vLLM that
#: each is tested with: the installed one where its rules are the same.
ASCEND = {"0.23.0.post1": "0.23.0", "0.30.0rc2": VLLM_INSTALLED}
#: Mooncake's client and master.
MOONCAKE = "0.3.13.post1"


def release_of(version: str) -> str:
    """The release of a version.

    >>> release_of("0.32.0")
    '0.32'
    """
    return ".".join(version.split(".")[:2])


if __name__ == "__main__":
    print(*(ASCEND if sys.argv[1:] == ["ascend"] else VLLM))
