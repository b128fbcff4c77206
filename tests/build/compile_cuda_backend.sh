#!/bin/sh
# Compiles the CUDA half of the torch backend against a CUDA build of torch, and loads it.
#   usage: compile_cuda_backend.sh PYTHON [BUILD_FOLDER]
# PYTHON belongs to an environment with a CUDA build of torch, pybind11 and ninja, for example
#   python3 -m venv cuda-torch && cuda-torch/bin/pip install torch==2.14.1 pybind11 ninja
# and the headers of a CUDA toolkit are needed (CUDA_HOME, or nvcc on PATH). No GPU and no driver are.
# That the module loads shows that each symbol it needs is in torch's libraries; what it does is not
# shown: tests/torch_backend/test_nccl_backend.py runs the same code on host memory.
set -eu
python=${1:?usage: compile_cuda_backend.sh PYTHON [BUILD_FOLDER]}
root=$(cd "$(dirname "$0")/../.." && pwd)
build=${2:-$root/build/cuda-torch}
"$python" - <<'CHECK'
import torch

assert torch.version.cuda, f"torch {torch.__version__} is no CUDA build"
CHECK
bin=$(dirname "$python")
PATH=$bin:$PATH
cmake -S "$root/csrc" -B "$build" -G Ninja -DPython_EXECUTABLE="$python" -DPYPARALLEL_TORCH=1 \
  -DPYPARALLEL_CUDA=0 -DCMAKE_BUILD_TYPE=Release
cmake --build "$build" --target _torch _core
rm -rf "$build/package"
mkdir -p "$build/package"
cp -r "$root/pyparallel" "$build/package/pyparallel"
rm -rf "$build"/package/pyparallel/_*.so "$build"/package/pyparallel/lib
cmake --install "$build" --prefix "$build/package/pyparallel" --component python
cd "$build/package"
"$python" - <<'LOAD'
import torch

from pyparallel import _torch

assert _torch.has_cuda(), "the CUDA half is missing from the module"
print(f"compiled against torch {torch.__version__} and loaded")
LOAD
