#!/usr/bin/env bash
# Low precision on one GPU: whether the kernels are right, and how fast they are.
#
#     benchmarks/precision_gpu.sh FOLDER         # PYTHON=python3; about 3 minutes, of which half compiles
#
# First what compiles, side by side: where a kernel is wrong on small exact problems (fp8_where.py), the tests, and
# checks of the benchmarks' shapes. Then the times, one after the other, of what has been compiled by then. Writes
# FOLDER/fp8-gemm.json, quantize.json and act-quantize.json, and the logs beside them. A kernel that hangs ends with its
# process.
set -u
cd "$(dirname "$0")/.."
folder=${1:?usage: benchmarks/precision_gpu.sh FOLDER}
python=${PYTHON:-python3}
mkdir -p "$folder"
logs=$folder/precision-logs
mkdir -p "$logs"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2

logged() { # log, seconds, command...
    local log=$1 seconds=$2
    shift 2
    timeout -k 2 "$seconds" "$@" >"$logs/$log.log" 2>&1
    local code=$?
    [ $code = 0 ] || echo "exit code $code" >>"$logs/$log.log"
}

test_files() { # log, workers, pytest's arguments...
    local log=$1 workers=()
    "$python" -c "import xdist" 2>/dev/null && workers=(-n "$2")
    shift 2
    logged "$log" 100 "$python" -m pytest -m gpu -p no:cacheprovider --tb=short -v "${workers[@]}" --maxfail=12 "$@"
}

for kernel in gemm-triton gemm wgrad-triton wgrad; do
    logged "where-$kernel" 40 "$python" benchmarks/fp8_where.py "$kernel" &
done
test_files fp8 6 tests/gpu/test_fp8_gpu.py &
test_files quantize 2 tests/gpu/test_quantize_gpu.py &
test_files scaled 2 tests/gpu/test_scaled_gpu.py -k "exact or nan" &
test_files act_quantize 2 tests/gpu/test_act_quantize_gpu.py &
for shape in deepseek-like mixtral-8x7b qwen3-30b; do
    logged "check-$shape" 90 "$python" benchmarks/fp8_gemm.py --check --shapes $shape --seconds 70 &
done
for name in quantize act_quantize; do
    logged check-$name 90 "$python" benchmarks/$name.py --shapes deepseek-like &
done
wait
for log in "$logs"/where-*.log; do tail -n 4 "$log" | cut -c1-300; done
for name in fp8 quantize scaled act_quantize; do
    log=$logs/$name.log
    echo "== $name: $(grep -c 'PASSED' "$log") passed, $(grep -c 'FAILED.*%' "$log") failed"
    grep -E '^E  |crashed|^=.* in |exit code' "$log" | cut -c1-170 | head -n 14
done
echo "== checks"
grep -hE 'failed|wrong|Error|exit code' "$logs"/check-*.log | cut -c1-300

logged fp8-gemm 70 "$python" benchmarks/fp8_gemm.py --seconds 55 --json "$folder/fp8-gemm.json"
grep -v '^checking' "$logs/fp8-gemm.log" | cut -c1-300
for name in quantize act_quantize; do
    logged $name-times 40 "$python" benchmarks/$name.py --json "$folder/${name/_/-}.json"
    tail -n 60 "$logs/$name-times.log" | cut -c1-120
done
