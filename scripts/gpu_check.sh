#!/usr/bin/env bash
# Runs whatever of nlpconvert can run on this machine's GPU, names what is not installed, and leaves a report.
#
#   scripts/gpu_check.sh [REPORT_DIR]        default ./gpu-report; the report is REPORT_DIR/gpu_report.md
#
# PYTHON chooses the interpreter (3.11 or newer), FIXTURES the models (names under fixtures/, default all).
# Exit status: 0 everything that could run agreed, 1 something that ran did not, 2 this cannot start,
# 4 nothing could run here.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || exit 2
python=${PYTHON:-python3}
out=${1:-./gpu-report}
report=$out/gpu_report.md
parts=(pytorch torchscript onnxruntime-cuda)
for flavour in tensorrt tensorrt-rtx; do
    parts+=("$flavour" "$flavour-fp16" "$flavour-int8" "$flavour-write" "$flavour-fp16-write")
done
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "gpu_check: $python is not Python 3.11 or newer: set PYTHON" >&2
    exit 2
fi
mkdir -p "$out" || exit 2

models=()
if [ -n "${FIXTURES:-}" ]; then
    for name in $FIXTURES; do models+=("$root/fixtures/$name"); done
else
    for config in "$root"/fixtures/*/config.json; do
        [ -f "$config" ] && models+=("$(dirname "$config")")
    done
fi

ran=0
bad=0

say() {
    printf '%s\n' "$*" | tee -a "$report"
}

# One row of the report: part, model, what came of it.
row() {
    say "| $1 | $2 | $3 |"
}

# Whether a model writes token by token.
writes() {
    grep -qE '(LMHeadModel|ForCausalLM|ForConditionalGeneration)"' "$1/config.json" 2>/dev/null
}

# The command of a part for a model, in the array `command`.
command_of() {
    local part=$1 model=$2 directory=$3
    case $part in
        pytorch) command=("$python" "$root/scripts/gpu_check.py" pytorch "$model") ;;
        torchscript)
            command=("$python" -m nlpconvert run "$model" -o "$directory" --to torchscript --device cuda) ;;
        onnxruntime-cuda)
            command=("$python" -m nlpconvert run "$model" -o "$directory" --to onnx --device cuda --provider cuda) ;;
        *-write)  # with the engine that the part of that name has built
            local built=${part%-write} step=trt
            case $built in *-fp16) step=trt-fp16 ;; esac
            command=("$python" "$root/scripts/gpu_check.py" write "$out/$built/$(basename "$model")" "$step" "$model") ;;
        *-fp16|*-int8)
            command=("$python" -m nlpconvert trt "$model" -o "$directory" "--${part##*-}" --runtime "${part%-*}" --device cuda) ;;
        *)
            command=("$python" -m nlpconvert trt "$model" -o "$directory" --runtime "$part" --device cuda) ;;
    esac
}

run_part() {
    local part=$1 model=$2 name directory log status
    name=$(basename "$model")
    directory=$out/$part/$name
    log=$out/$part-$name.log
    rm -rf "${directory:?}"
    mkdir -p "$(dirname "$directory")"
    command_of "$part" "$model" "$directory"
    "${command[@]}" >"$log" 2>&1 </dev/null
    status=$?
    case $status in
        0) ran=$((ran + 1)); row "$part" "$name" "agrees" ;;
        4) row "$part" "$name" "not run here (see $(basename "$log")): $(tail -n 1 "$log")" ;;
        5) row "$part" "$name" "not installed: $(tail -n 1 "$log")" ;;
        130) row "$part" "$name" "interrupted"; exit 130 ;;
        *) ran=$((ran + 1)); bad=$((bad + 1)); row "$part" "$name" "FAILED, exit $status (see $(basename "$log"))" ;;
    esac
}

: >"$report"
say "# GPU check"
say ""
gpu=$("$python" "$root/scripts/gpu_check.py" gpu)
gpu_status=$?
say "- GPU: ${gpu:-could not be asked for}"
say "- Python: $("$python" -c 'import platform; print(platform.python_version(), platform.platform())')"
say ""
say "| part | model | result |"
say "|---|---|---|"

for part in "${parts[@]}"; do
    if [ "$gpu_status" -ne 0 ]; then
        row "$part" "-" "not run here: no GPU"
        continue
    fi
    lacks=$("$python" "$root/scripts/gpu_check.py" missing "$part" 2>"$out/$part-missing.log")
    status=$?
    if [ "$status" -ne 0 ]; then
        bad=$((bad + 1))
        row "$part" "-" "FAILED, its packages cannot be imported (see $part-missing.log)"
        continue
    fi
    rm -f "$out/$part-missing.log"
    if [ -n "$lacks" ]; then
        row "$part" "-" "not installed: $lacks"
        continue
    fi
    if [ "${#models[@]}" -eq 0 ]; then
        row "$part" "-" "not run: there is no model under fixtures/"
        continue
    fi
    for model in "${models[@]}"; do
        case $part in *-write) writes "$model" || continue ;; esac
        run_part "$part" "$model"
    done
done

say ""
if [ "$bad" -gt 0 ]; then
    say "$bad of the parts that could run did not agree."
    status=1
elif [ "$ran" -eq 0 ]; then
    say "Nothing could run here."
    status=4
else
    say "All $ran that could run agreed."
    status=0
fi
echo "report: $report"
exit "$status"
