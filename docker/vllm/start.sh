#!/bin/sh
# A vLLM server on a model's folder: start.sh FOLDER [options of vLLM]. Beside `base` it serves the name weights-REVISION,
# a hash of the weights that it read: rounds compare it with that of their own before they sample (models/vllm/server.py).
set -eu
folder=$1
shift
# Names in the order of their bytes, as models/local/model_files.py has them.
revision=$(cd "$folder" && find . -maxdepth 1 -name '*.safetensors' | LC_ALL=C sort | xargs sha256sum | cut -c1-64 |
    tr -d '\n' | sha256sum | cut -c1-12)
exec "${PYTHON:-python3}" -m vllm.entrypoints.openai.api_server --model "$folder" \
    --served-model-name base "weights-$revision" "$@"
