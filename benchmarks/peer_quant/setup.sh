#!/bin/sh
# Install the tools whose quantization optimc is compared with into a folder outside the repository:
#
#     benchmarks/peer_quant/setup.sh DIR
#
# It takes about five minutes and 9 GB: GPTQModel wants a torch that comes with CUDA only. What is there is kept.
#
# DIR/lc   environment with llm-compressor
# DIR/gm   environment with GPTQModel
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DIR" >&2; exit 2; }
mkdir -p "$1"
peers=$(cd "$1" && pwd)
python=${PYTHON:-python3}

[ -e "$peers/lc/ready" ] || {
    $python -m venv "$peers/lc"
    "$peers/lc/bin/pip" install --quiet torch==2.13.0 llmcompressor==0.14.0.1
    touch "$peers/lc/ready"
}

[ -e "$peers/gm/ready" ] || {
    $python -m venv "$peers/gm"
    "$peers/gm/bin/pip" install --quiet torch==2.14.1 setuptools wheel numpy
    # Its build looks at the torch that is installed.
    "$peers/gm/bin/pip" install --quiet --no-build-isolation gptqmodel==7.7.0
    touch "$peers/gm/ready"
}
