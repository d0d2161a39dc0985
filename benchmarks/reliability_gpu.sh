#!/usr/bin/env bash
# The reliability suites on the GPUs of this machine, one record for all of them.
#
#     benchmarks/reliability_gpu.sh RANKS FOLDER [CASES]     # PYTHON=python3 DEVICE=cuda SUITES="faults lifecycle"
#
# Writes FOLDER/reliability-h200-ep2.json (the GPU's name, the ranks): {"suites": {suite: record}, "gpu_mib": ...}, and
# the ends of the logs beside it. Prints a line per suite. CASES limits the cases of each suite, for a first try.
#
# One suite after the other: ranks of several jobs share a GPU by slices of time, ranks that meet in a barrier wait for
# each other's slices, and everything takes ten times as long (4 H200s: fuzz 0.35 s a case); and faults looks at the
# GPUs' memory, which nobody else may use then. If there are GPUs for two, two lanes run.
# What is there when time is up is written too.
set -u
cd "$(dirname "$0")/.."
ranks=${1:?usage: benchmarks/reliability_gpu.sh RANKS FOLDER [CASES]}
folder=${2:?usage: benchmarks/reliability_gpu.sh RANKS FOLDER [CASES]}
cases=${3:-}
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
# NVLink multicast is not used; nobody else shall either.
export NVSHMEM_DISABLE_NVLS=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 PYTHONUNBUFFERED=1

# Two lanes of about the same time.
first_lane="gradients soak stalls litmus fuzz lifecycle"
second_lane="routings determinism faults"
wanted=${SUITES:-$first_lane $second_lane}
# Jobs side by side in a suite, and seconds after which it takes no more results.
declare -A jobs=([lifecycle]=2 [faults]=8)
suite_seconds=${SUITE_SECONDS:-300}

mkdir -p "$folder"
work=$(mktemp -d)

used_mib() {
    [ "$device" != cuda ] || nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | tr '\n' ' '
}

run_suite() { # its line is printed when it is done
    local suite=$1 limit=$suite_seconds
    timeout -k 30 $((limit + 30)) "$python" -m tests.reliability "$suite" --device "$device" --ranks "$ranks" \
        --jobs "${jobs[$suite]:-1}" --seconds "$limit" ${cases:+--cases "$cases"} \
        --json "$work/$suite.json" >"$work/$suite.log" 2>&1 &
    echo $! >"$work/$suite.pid" # timeout leads a process group of its own
    wait $!
    local code=$?
    rm "$work/$suite.pid"
    "$python" - "$work/$suite.json" "$suite" "$code" <<'LINE'
import json, pathlib, sys
path, suite, code = pathlib.Path(sys.argv[1]), *sys.argv[2:]
if path.exists():
    r = json.loads(path.read_text())
    print(f"{suite:12} {r['cases_run']} of {r['cases_wanted']} cases, {r['cases_failed']} failed, {r['wall_s']} s")
else:
    print(f"{suite:12} no record, exit code {code}")
LINE
}

run_lane() { # those suites of a list that are wanted, one after the other
    local suite
    for suite in $1; do
        case " $wanted " in *" $suite "*) run_suite "$suite" ;; esac
    done
}

write_record() { # of the suites that have one
    local after=$1 gpu name suite suites
    gpu=$([ "$device" = cuda ] && nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | awk '{print tolower($NF)}' || echo cpu)
    name=$folder/reliability-$gpu-ep$ranks
    suites=$wanted
    for suite in $suites; do
        echo "== $suite"
        tail -c 6000 "$work/$suite.log"
    done >"$name.log" 2>&1
    "$python" - "$name.json" "$work" "$before" "$after" $suites <<'MERGE'
import json, pathlib, sys
out, work, before, after, *suites = sys.argv[1:]
records, failed = {}, []
for suite in suites:
    path = pathlib.Path(work, f"{suite}.json")
    records[suite] = json.loads(path.read_text()) if path.exists() else {"error": "no record"}
    if records[suite].get("cases_failed", 1) or records[suite]["cases_run"] < records[suite]["cases_wanted"]:
        failed.append(suite)
mib = {"before": [int(n) for n in before.split()], "after": [int(n) for n in after.split()]}
pathlib.Path(out).write_text(json.dumps({"suites": records, "gpu_mib": mib}, indent=1) + "\n")
print(f"MiB of GPU memory in use before {mib['before']}, after {mib['after']}; not as promised: {failed or 'nothing'}")
leaked = any(b > a + 64 for a, b in zip(mib["before"], mib["after"]))
sys.exit(bool(failed) or leaked)
MERGE
}

finish() { # at the end, or when time is up
    trap - EXIT TERM INT
    local pid pids
    pids=$(cat "$work"/*.pid 2>/dev/null)
    for pid in $pids; do kill "$pid"; done # suites write what they have
    for pid in $pids; do timeout 20 tail --pid="$pid" -f /dev/null; done
    write_record "$(used_mib)"
    local code=$?
    rm -rf "$work"
    exit $code
}

before=$(used_mib)
trap finish EXIT
trap "exit 1" TERM INT
num_gpus=$([ "$device" = cuda ] && nvidia-smi --list-gpus | wc -l || echo 0)
if [ -z "${CUDA_VISIBLE_DEVICES:-}" ] && [ "$num_gpus" -ge $((2 * ranks)) ]; then
    CUDA_VISIBLE_DEVICES=$(seq -s, 0 $((ranks - 1))) run_lane "$first_lane" &
    CUDA_VISIBLE_DEVICES=$(seq -s, "$ranks" $((2 * ranks - 1))) run_lane "$second_lane" &
    wait
else
    run_lane "$first_lane $second_lane"
fi
