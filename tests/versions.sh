#!/bin/bash
# The tests with another Python or torch than constraints.txt names, beside the tree as it is:
#
#   tests/versions.sh PYTHON TORCH TRITON [TESTS...]
#   tests/versions.sh python3.10 2.9.1 3.5.1 tests/pipeline tests/layers
#   tests/versions.sh python3.13 2.14.1 3.8.0
#
# PYTHON is a program, 3.10 to 3.13; TORCH is 2.9 to 2.14; TRITON is 3.4 to 3.9 (a CUDA build of torch
# brings its own, and pip warns where another is named). Without TESTS: what stands on torch.
# Environment, build and a copy of the working tree are kept in build/versions/NAME, so that a second run
# installs nothing and compiles only what changed. transformers and the linters are not installed: tests
# that need those are skipped. Known with Triton 3.5: its interpreter takes the strides of descriptors,
# which are counted in elements, for bytes (7 tests of odd sizes), and one attention for sm_90 spills.
# For CPU builds of torch set PIP_EXTRA_INDEX_URL as for make.
set -euo pipefail

if [ $# -lt 3 ]; then
  sed -n '2,15s/^# \{0,1\}//p' "$0"
  exit 2
fi
python=$1 torch=$2 triton=$3
shift 3
if [ $# -eq 0 ]; then
  set -- tests/comm tests/symmetric tests/torch_backend tests/ops tests/layers tests/attention \
    tests/pipeline tests/schedule tests/training tests/planner tests/nccl tests/triton_kernels
fi
cd "$(dirname "$0")/.."
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
place=$PWD/build/versions/python$version-torch$torch-triton$triton
tree=$place/tree

if [ ! -e "$place/installed" ]; then
  mkdir -p "$place"
  "$python" -m venv "$place/venv"
  # No versions but these: constraints.txt may pin what this Python or torch does not take.
  "$place/venv/bin/python" -m pip install --quiet "torch==$torch" numpy 'setuptools>=77' wheel 'cmake>=3.22' \
    ninja 'pybind11>=2.13' pytest pytest-timeout pytest-xdist hypothesis rich matplotlib pyyaml \
    'tomli; python_version < "3.11"'
  "$place/venv/bin/python" -m pip install --quiet --no-deps "triton==$triton" nvidia-nccl-cu12
  touch "$place/installed"
fi

# What git tracks or would add, with its times, so that nothing is compiled twice.
mkdir -p "$tree"
git ls-files -z --cached --others --exclude-standard |
  while IFS= read -r -d '' file; do
    if [ -e "$file" ] || [ -L "$file" ]; then printf '%s\0' "$file"; fi
  done |
  tar --create --no-recursion --null --files-from=- | tar --extract --directory "$tree"

cd "$tree"
export PATH="$place/venv/bin:$PATH"
python setup.py --quiet build_ext --inplace
python -c 'import sys, torch, triton; print("Python", sys.version.split()[0], "torch", torch.__version__,
      "triton", triton.__version__)'
PYTHONPATH=. exec python -m pytest --quiet --timeout 300 "$@"
