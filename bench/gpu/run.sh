#!/bin/sh
# Builds, tests and measures on a machine with one GPU, in under eight minutes, without a network.
#   bench/gpu/run.sh [--out DIR] [--seconds N] [--only PART ...] [--dry-run]
# Needs Python 3.10+ with a CUDA build of torch, cmake, ninja, pybind11, pytest and nvcc. Each part ends
# on its own and its result is saved in DIR/gpu.json as it ends; status 1 when a part failed.
# PYTHON names the interpreter.
set -eu
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python3}" -u -m bench.gpu.driver "$@"
