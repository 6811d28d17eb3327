#!/usr/bin/env bash
# usage: tools/setup.sh VENV demo|test|triton36
#
# Makes (or completes) a virtual environment and leaves VENV/.ready-KIND in it.
# Without a GPU: torch 2.13.0 first and alone, so that no later requirement can ask for another (much larger) build.
# With a GPU: the torch that the machine already has, seen through --system-site-packages.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 kind=$2
python=${PYTHON:-python3}
say() { printf '== %s\n' "$*"; }

"$python" - <<'PY' || exit 2
import sys
if not (3, 10) <= sys.version_info[:2] < (3, 14):
    sys.exit(f"setup: Python is {sys.version.split()[0]}; need 3.10 to 3.13; run make PYTHON=python3.11")
PY

gpu=no
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then gpu=yes; fi

if [ ! -x "$venv/bin/python" ]; then
  say "virtual environment $venv (GPU: $gpu)"
  site=()
  if [ "$gpu" = yes ] && [ "$kind" != triton36 ] && "$python" -c 'import torch' 2>/dev/null; then site=(--system-site-packages); fi
  # Debian ships ensurepip apart (python3-venv); without it the outer pip installs into the environment.
  "$python" -m venv "${site[@]}" "$venv" 2>/dev/null || "$python" -m venv "${site[@]}" --without-pip --clear "$venv"
fi
if "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }
else
  pip() { "$python" -m pip --disable-pip-version-check --no-input --python "$venv/bin/python" "$@"; }
fi
get() { for try in 1 2 3; do pip install -qq "$@" && return 0; [ "$try" = 3 ] || { say "install failed; trying again"; sleep 5; }; done; return 1; }
# An optional vendor library: its tests skip, with this as the reason, when it cannot be had.
optional() { get "$@" || say "optional: could not install $*; its tests will be skipped"; }

if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
  if [ "$gpu" = yes ] && [ "$kind" != triton36 ]; then say "torch"; get torch; else say "torch 2.13.0"; get "torch==2.13.0"; fi
fi

flashinfer_needs=(apache-tvm-ffi packaging requests urllib3 idna certifi charset-normalizer nvidia-ml-py tqdm filelock typing_extensions)
case $kind in
  demo)
    "$venv/bin/python" -c 'import triton' 2>/dev/null || { say "triton"; get "triton==3.9.0"; }
    say "fp4 with rich and matplotlib"
    get -e ".[rich,plot]"
    ;;
  test)
    "$venv/bin/python" -c 'import triton' 2>/dev/null || { say "triton"; get "triton==3.9.0"; }
    say "fp4 with its test, docs, plot and rich extras"
    get -e ".[rich,plot,test,docs]"
    touch "$venv/.ready-demo"
    # Vendor libraries run against fp4 in the contract tests. --no-deps: their declared requirements would bring a CUDA torch.
    say "flashinfer 0.7.4, triton_kernels"
    optional --no-deps "flashinfer-python==0.7.4" "${flashinfer_needs[@]}"
    optional --no-deps tokenspeed-triton-kernels
    # the compiler behind FlashInfer's masked grouped GEMM: imported for its wrapper's checks, it compiles nothing here
    optional --no-deps nvidia-cutlass-dsl==4.8.1 nvidia-cutlass-dsl-libs-{base,core,cu12}==4.8.1 cuda-python cuda-bindings cuda-pathfinder
    ;;
  triton36)
    # The oldest Triton that fp4 supports; its interpreter does not run on numpy 2.4. The older flashinfer generation goes with it.
    say "triton 3.6.0, numpy < 2.4, test requirements"
    get "triton==3.6.0" "numpy<2.4" safetensors typer rich pytest pytest-xdist pytest-timeout hypothesis ml_dtypes gfloat
    get --no-deps -e .
    say "flashinfer 0.6.18"
    optional --no-deps "flashinfer-python==0.6.18" "${flashinfer_needs[@]}"
    ;;
  *) echo "setup: $kind is unknown; need demo, test or triton36" >&2; exit 2 ;;
esac
touch "$venv/.ready-$kind"
say "$venv is ready for: $kind"
