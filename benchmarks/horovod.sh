#!/usr/bin/env bash
# usage: [PYTHON=.venv/bin/python] benchmarks/horovod.sh FOLDER
#
# Builds Horovod 0.28.1 for the torch of PYTHON and installs it into FOLDER, which then goes into PYTHONPATH. Needs g++,
# cmake, make and network; no MPI. As published it asks for C++14 in two files, and today's torch wants C++17.
set -euo pipefail
[[ $# == 1 ]] || { sed -n 2p "$0"; exit 2; }
PYTHON=$(realpath -s "${PYTHON:-.venv/bin/python}")
mkdir -p "$1"
FOLDER=$(realpath "$1")
BUILD=$(mktemp -d)
trap 'rm -rf "$BUILD"' EXIT
cd "$BUILD"
"$PYTHON" -m pip download --quiet --no-deps --no-binary :all: --no-build-isolation horovod==0.28.1
tar xzf horovod-0.28.1.tar.gz
cd horovod-0.28.1
sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 17)/' CMakeLists.txt horovod/torch/CMakeLists.txt
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_TENSORFLOW=1
export HOROVOD_WITHOUT_MXNET=1 HOROVOD_CPU_OPERATIONS=GLOO CMAKE_POLICY_VERSION_MINIMUM=3.5 MAKEFLAGS=-j2
"$PYTHON" -m pip install --quiet --no-deps --no-build-isolation --target "$FOLDER" .
"$PYTHON" -m pip install --quiet --target "$FOLDER" cloudpickle packaging psutil pyyaml
echo "horovod in $FOLDER: PYTHONPATH=$FOLDER"
