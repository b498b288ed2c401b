#!/bin/sh
# Install what optimc is compared with into a folder outside the repository, and make both models for each of them:
#
#     benchmarks/peer/setup.sh DIR
#
# Run it from the repository after `make setup model`. It takes 20 minutes on 2 cores, most of them to compile llama.cpp,
# and 5 GB. What is there already is kept: delete a part to make it anew.
#
# DIR/run        environment with OpenVINO GenAI and onnxruntime-genai, to measure
# DIR/export     environment with optimum-intel, the builder of onnxruntime-genai and torch, to export models
# DIR/llama.cpp  the sources that the package llama-cpp-python carries, built for this machine
# DIR/models     NAME-ov (OpenVINO) and NAME-ort (onnxruntime-genai), both int4 symmetric in groups of 32 with embedding
#                and head in 8 bits, and NAME-q4_0.gguf
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DIR" >&2; exit 2; }
mkdir -p "$1/models"
peers=$(cd "$1" && pwd)
python=${PYTHON:-python3}
ours=.venv/bin/python
export HF_HUB_OFFLINE=1

[ -e "$peers/run/ready" ] || {
    $python -m venv "$peers/run"
    "$peers/run/bin/pip" install --quiet openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0
    touch "$peers/run/ready"
}
[ -e "$peers/run/ready-ort" ] || {
    "$peers/run/bin/pip" install --quiet onnxruntime-genai==0.18.0 onnxruntime==1.32.0
    touch "$peers/run/ready-ort"
}

[ -e "$peers/export/ready" ] || {
    $python -m venv "$peers/export"
    "$peers/export/bin/pip" install --quiet torch==2.13.0 optimum-intel==2.2.0 openvino==2026.4.1 \
        openvino-tokenizers==2026.4.1.0 nncf==3.4.0 sentencepiece protobuf
    # It comes along, built for another torch, and only stops transformers from being imported.
    "$peers/export/bin/pip" uninstall --quiet --yes torchvision
    touch "$peers/export/ready"
}
[ -e "$peers/export/ready-ort" ] || {
    "$peers/export/bin/pip" install --quiet onnxruntime-genai==0.18.0 onnxruntime==1.32.0 onnx-ir==1.1.0
    touch "$peers/export/ready-ort"
}

[ -d "$peers/llama.cpp" ] || {
    mkdir -p "$peers/source"
    "$peers/run/bin/pip" download --quiet --no-deps --no-binary :all: --dest "$peers/source" llama-cpp-python==0.3.36
    tar -x -z -C "$peers/source" -f "$peers"/source/llama_cpp_python-*.tar.gz
    mv "$peers"/source/llama_cpp_python-*/vendor/llama.cpp "$peers/llama.cpp"
    echo "from llama-cpp-python 0.3.36" > "$peers/llama.cpp/PACKAGE"
    rm -r "$peers/source"
}

tools="$peers/llama.cpp/build/bin"
[ -x "$tools/llama-server" ] || {
    cmake -S "$peers/llama.cpp" -B "$peers/llama.cpp/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
        -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
        -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
    cmake --build "$peers/llama.cpp/build" --parallel 2 --target llama-bench llama-server llama-quantize
}

# The GGUF file as a plain folder: what both exporters read, with the weights optimc starts from.
[ -d "$peers/models/smollm2" ] || $ours - "$peers" <<'END'
import shutil, sys
from pathlib import Path
from optimc_passes.load.gguf import convert_gguf

peers = Path(sys.argv[1])
folder = convert_gguf(Path("models/smollm2-135m-instruct.gguf"), peers / "cache", lambda config: None)
shutil.copytree(folder, peers / "models/smollm2", ignore=shutil.ignore_patterns("entry.json"))
shutil.rmtree(peers / "cache")
END
$ours benchmarks/make_587m.py
[ -e "$peers/models/llama-587m" ] || ln -s "$(pwd)/models/llama-587m" "$peers/models/llama-587m"

for model in smollm2 llama-587m; do
    source="$peers/models/$model"
    [ -d "$source-ov" ] || "$peers/export/bin/optimum-cli" export openvino --model "$source" \
        --task text-generation-with-past --weight-format int4 --group-size 32 --sym --ratio 1.0 "$source-ov"
    # prune_lm_head: the head sees the last position only, as with the others. rtn: the default method gives the shared 8
    # bits of embedding and head two names, and the model cannot be loaded.
    [ -d "$source-ort" ] || {
        "$peers/export/bin/python" -m onnxruntime_genai.models.builder -i "$source" -o "$source-ort.part" \
            -c "$peers/cache" -p int4 -e cpu --extra_options block_size=32 accuracy_level=4 is_symmetric=true \
            algo_config=rtn matmul_mixed_precision=last_matmul:int8 shared_embeddings=true prune_lm_head=true \
            hf_token=false
        mv "$source-ort.part" "$source-ort"
        rm -rf "$peers/cache"
    }
    [ -f "$source-q4_0.gguf" ] || {
        PYTHONPATH="$peers/llama.cpp/gguf-py" "$peers/export/bin/python" "$peers/llama.cpp/convert_hf_to_gguf.py" \
            "$source" --outtype f16 --outfile "$source-f16.gguf"
        "$tools/llama-quantize" "$source-f16.gguf" "$source-q4_0.gguf" Q4_0 2
        rm "$source-f16.gguf"
    }
done
