#!/usr/bin/env bash
# Creates the environment that a make target needs. What is already there is not made again.
#
#     scripts/bootstrap.sh demo    .venv with NumPy and Mooncake, kvmask built in place
#     scripts/bootstrap.sh dev     the same, and the packages for tests, linters and benches
#     scripts/bootstrap.sh vllm    .venv-vllm with the real vLLM (CPU build)
#     scripts/bootstrap.sh fuzz    the same as dev, with Atheris, and clang with libFuzzer
#
# Environment: PYTHON names the Python to use (3.11 or newer); KVMASK_NO_APT=1 forbids apt-get.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

kind=${1:-dev}
case $kind in
    demo) venv=.venv requirements=requirements.txt ;;
    dev) venv=.venv requirements=requirements-dev.txt ;;
    fuzz) venv=.venv requirements=requirements-fuzz.txt ;;
    vllm) venv=.venv-vllm requirements=requirements-vllm.txt ;;
    *)
        echo "usage: $0 demo|dev|vllm|fuzz" >&2
        exit 2
        ;;
esac

say() { echo "bootstrap: $*" >&2; }
fail() {
    say "$*"
    exit 1
}

# Two make targets that run at the same time must not build into the same folder.
mkdir -p build
exec 9>build/.bootstrap.lock
if command -v flock >/dev/null; then flock 9; fi

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
python=
for candidate in ${PYTHON:-"$venv/bin/python" python3 python3.13 python3.12 python3.11}; do
    if new_enough "$candidate"; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    fail "kvmask needs Python 3.11 or newer, found $("${PYTHON:-python3}" -V 2>&1 || true);" \
        "install one and name it: make PYTHON=/path/to/python3.11 ..."
fi

# Packages of the distribution. The test is whether the library or header exists, because package
# names differ.
missing=()
libraries=$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p 2>/dev/null || true)
for pair in libibverbs.so.1:libibverbs1 librdmacm.so.1:librdmacm1 libnuma.so.1:libnuma1 \
    libcurl.so.4:libcurl4; do
    grep -qF "${pair%%:*}" <<<"$libraries" || missing+=("${pair##*:}")
done
echo 'int main(void) { return 0; }' >build/.probe.c
${CC:-gcc} -o build/.probe build/.probe.c 2>/dev/null || missing+=(gcc libc6-dev)
if [ "$kind" = dev ] && [ ${#missing[@]} = 0 ]; then
    # With Debian's compilers the sanitizers come along; others keep them apart.
    ${CC:-gcc} -fsanitize=address,undefined -o build/.probe build/.probe.c 2>/dev/null ||
        missing+=("libgcc-$(${CC:-gcc} -dumpversion | cut -d . -f 1)-dev")
fi
if [ "$kind" = fuzz ]; then
    echo 'int LLVMFuzzerTestOneInput(void);int LLVMFuzzerTestOneInput(void) { return 0; }' >build/.probe.c
    "${CLANG:-clang}" -fsanitize=fuzzer,address -o build/.probe build/.probe.c 2>/dev/null ||
        missing+=(clang libclang-rt-dev)
fi
rm -f build/.probe build/.probe.c
"$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
    missing+=("$("$python" -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')")
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    missing+=("$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')")
if [ ${#missing[@]} -gt 0 ]; then
    command="apt-get update && apt-get install -y ${missing[*]}"
    as_root=()
    if [ "$(id -u)" != 0 ]; then as_root=(sudo -n); fi
    if [ -n "${KVMASK_NO_APT:-}" ] || ! command -v apt-get >/dev/null ||
        { [ "$(id -u)" != 0 ] && ! sudo -n true 2>/dev/null; }; then
        fail "these packages are missing; as root, run: $command"
    fi
    say "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    "${as_root[@]}" apt-get update -qq </dev/null >&2 ||
        say "apt-get update failed, going on with the lists there are"
    "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" \
        </dev/null >build/apt.log 2>&1 || {
        tail -n 20 build/apt.log >&2
        fail "could not install packages; as root, run: $command"
    }
fi

if [ ! -x "$venv/bin/python" ]; then
    say "making $venv with $("$python" -V)"
    "$python" -m venv "$venv"
fi
py=$venv/bin/python

# A stamp file holds the hash of all inputs of a step. The step runs again only if an input changes.
digest() { sha256sum "$@" | sha256sum | cut -d ' ' -f 1; }
done_before() { [ "$(cat "$1" 2>/dev/null)" = "$2" ]; }

version=$("$py" -c 'import sys; print(sys.version)')
wanted=$(digest requirements*.txt <(echo "$version"))
# `dev` installs everything that `demo` needs.
also=$([ "$kind" = fuzz ] || echo "$venv/.stamp-dev")
if ! done_before "$venv/.stamp-$kind" "$wanted" && ! done_before "$also" "$wanted"; then
    say "installing $requirements"
    "$py" -m pip install -qq --disable-pip-version-check -r "$requirements" </dev/null
    if [ "$kind" = vllm ]; then
        # The builds on the index do not load with the CPU build of torch. Nothing here needs them.
        "$py" -m pip uninstall -qq -y torchvision torchaudio torchcodec </dev/null || true
    fi
    echo "$wanted" >"$venv/.stamp-$kind"
fi

readarray -t sources < <(
    find kvmask \( -name '*.pyx' -o -name '*.pxd' -o -name '*.pxi' -o -name '*.h' \) | LC_ALL=C sort
)
settings=$(digest setup.py pyproject.toml <(echo "$version $PWD ${CC:-}"))
wanted=$(digest "${sources[@]}" <(echo "$settings"))
suffix=$("$py" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
if ! done_before "$venv/.stamp-build" "$wanted" || [ ! -f "kvmask/_core$suffix" ]; then
    say "building kvmask"
    # The stamps know of every change; Cython would go by the times of files.
    rm -f kvmask/_core.c
    if done_before "$venv/.stamp-install" "$settings"; then
        build=("$py" setup.py -q build_ext --inplace --force)
    else
        # It builds in place, too: once is enough.
        build=("$py" -m pip install -qq --disable-pip-version-check --no-build-isolation --no-deps -e .)
    fi
    "${build[@]}" </dev/null >build/build.log 2>&1 || {
        tail -n 40 build/build.log >&2
        fail "the build failed; the whole log is in build/build.log"
    }
    echo "$settings" >"$venv/.stamp-install"
    echo "$wanted" >"$venv/.stamp-build"
fi
