#!/usr/bin/env bash
# compute-sanitizer over the kernels of one GPU: memcheck, initcheck, synccheck, racecheck, side by side.
#
#     benchmarks/sanitize.sh FOLDER         # PYTHON=python3; 4 to 5 minutes on one H200
#
# Leaves logs and summary.txt, what it prints, in FOLDER.
#
# Covered, on small shapes, bf16 where there is a choice: all plan and token kernels (several ranks' arenas in one
# process), the router's, grouped GEMMs forward, dgrad and wgrad, fused with activations, biases, the kernels for Hopper
# and those that swizzle scales; of low precision the quantisers of rows, columns, weights and the wire, activations
# that quantise, and the GEMMs of E4M3 numbers. Not covered: GEMMs of MXFP8 and NVFP4, barriers and signals (several
# kernels that wait for each other; the tools may run them one after the other), what several GPUs do to each other, and
# shapes of real models.
#
# memcheck and initcheck: every tensor is an allocation of its own (no caching allocator), so that its ends are seen.
# initcheck also instruments torch's kernels, because it has to see who has written. racecheck knows shared memory
# only, and not all that TMA does there; what it says of how Triton hands out roles is counted apart, and is no failure
# (racecheck_reports.py says why). A planted error shows that memcheck, initcheck and racecheck find something, and a
# kernel that does nothing but hand out roles, what racecheck says of that.
set -u
cd "$(dirname "$0")/.."
folder=${1:?usage: benchmarks/sanitize.sh FOLDER}
python=${PYTHON:-python3}
# Of a tool; on one H200 memcheck took 71, initcheck 193, synccheck 50, racecheck 171.
seconds=${SECONDS_PER_TOOL:-360}
mkdir -p "$folder"
export OMP_NUM_THREADS=1

chosen="(test_kernels_match_twins and (drops or probs or nothing or fails) and not qwen3) or (test_choice_of_experts and not 3001)
    or (test_many_groups and not mxfp8 and not nvfp4) or test_no_rows or test_splits or (test_against_float64_and_twins and 48 and bfloat16)
    or (256 and bfloat16 and (test_push or test_sum_home)) or test_scales_are_swizzled
    or (test_quantized_gemm_gpu and not mxfp8 and not nvfp4 and (test_nan or test_groups_without or (small_numbers and 264)))
    or (test_quantize_gpu and not powers and ((test_rows and 160 and bfloat16 and not False) or (test_weights and 96)
        or (test_the_wire and 272 and bfloat16) or (programs_per_sm and not None and not torch.float16)))
    or (test_act_quantize_gpu and test_the_bits and bfloat16 and not powers and (swiglu-128 or 720))"
chosen=$(echo $chosen)
tests=("$python" -m pytest -q -m gpu -p no:cacheprovider -p no:timeout -k "$chosen")
for name in token_kernels gemm gemm_act hopper hopper_rows pointers quantized_gemm quantize act_quantize; do
    tests+=("tests/gpu/test_${name}_gpu.py")
done

# An out-of-bounds write, a read of memory that nobody has written.
cat >"$folder/planted.py" <<'PLANTED'
import torch
import triton
import triton.language as tl


@triton.jit
def planted_kernel(source, target, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(target + lane, tl.load(source + lane))


planted_kernel[(1,)](torch.empty(1024, device="cuda"), torch.zeros(512, device="cuda"), BLOCK=1024)
torch.cuda.synchronize()
PLANTED

sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
sanitize() { # tool, log, command...
    local tool=$1 log=$2 options=()
    shift 2
    [ "$tool" = memcheck ] || [ "$tool" = initcheck ] && export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    [ "$tool" = initcheck ] || options=(--kernel-name-exclude kns=at6native)
    local limit=20
    [ "$tool" = racecheck ] && limit=100000 # all are told apart
    timeout -k 10 "$seconds" "$sanitizer" --tool "$tool" --print-limit $limit "${options[@]}" "$@" >"$log" 2>&1
}

exec > >(tee "$folder/summary.txt")
"$python" -c "
import sys
import torch
sys.path.insert(0, 'benchmarks')
from suites.records import machine
print(', '.join(f'{key} {value}' for key, value in machine(torch.device('cuda')).items()))"
echo "without a tool (compiles what the tools run):"
workers=()
"$python" -c "import xdist" 2>/dev/null && workers=(-n 4)
"${tests[@]}" "${workers[@]}" >"$folder/plain.log" 2>&1
tail -n 1 "$folder/plain.log"
for tool in memcheck initcheck synccheck racecheck; do
    sanitize $tool "$folder/$tool.log" "${tests[@]}" &
done
for tool in memcheck initcheck; do
    sanitize $tool "$folder/planted-$tool.log" "$python" "$folder/planted.py" &
done
for name in race dispatch; do
    sanitize racecheck "$folder/planted-$name.log" "$python" benchmarks/planted_races.py $name &
done
wait
failed=0
for tool in memcheck initcheck synccheck racecheck; do
    summary=$(grep -aE 'ERROR SUMMARY|RACECHECK SUMMARY' "$folder/$tool.log" | tail -n 1)
    passed=$(grep -aE '(passed|failed|skipped|error).* in [0-9.]+s' "$folder/$tool.log" | tail -n 1)
    echo "$tool: ${summary:-no summary (ran past $seconds s, or did not start: see $tool.log)}; tests: ${passed:-no result}"
    [ "$tool" = racecheck ] || grep -q 'SUMMARY: 0 errors' <<<"$summary" || failed=1
    grep -q passed <<<"$passed" || failed=1
    ! grep -qE 'failed|error' <<<"$passed" || failed=1
done
counts=$("$python" benchmarks/racecheck_reports.py "$folder/racecheck.log") || failed=1
echo "racecheck: $counts"
for tool in memcheck initcheck; do
    summary=$(grep -aE 'ERROR SUMMARY' "$folder/planted-$tool.log" | grep -v 'not printed' | tail -n 1)
    echo "planted error, $tool: ${summary:-no summary}"
    grep -qE 'SUMMARY: [1-9]' <<<"$summary" || failed=1
done
for name in race dispatch; do
    counts=$("$python" benchmarks/racecheck_reports.py "$folder/planted-$name.log")
    echo "planted $name, racecheck: $counts"
    case $name in
        race) grep -qE ', [1-9][0-9]* others' <<<"$counts" || failed=1 ;;
        dispatch) grep -q ', 0 others' <<<"$counts" || failed=1 ;;
    esac
done
exit $failed
