#!/bin/bash
# Runs tests that are too slow for tests/run.sh:
#   all tests with the sanitizers, and every case of the loops of which such builds otherwise try each n-th
#   (tests/support/soak.h);
#   conversions of every float, by the CPU's code paths and by the bodies of the kernels;
#   tests that start threads, with ThreadSanitizer;
#   a conversion on 1,024 ranks, threads of one process;
#   uploads to a store with random faults, 1,000 rounds; buckets of OpenStack Swift;
#   thousands of failing allocations and calls, kills, deaths of ranks, damaged files, and states of a disk after a
#   loss of power;
#   whole conversions and loads over NCCL between ranks on one GPU of the stand-in, if their headers are there; and
#   tests/cuda/bench.sh is built, if nvcc is there;
#   every family's table, and the list of float32 parameters, against the newest transformers
#   (samples/families/generate.py);
#   vLLM's tokens, from training checkpoints and from the converted model;
#   a training run under `reshard watch`, which is killed 30 times;
#   damaged files given to other readers too (tests/differential.py), if the interoperability tests' Python is installed;
#   conversions under a real Slurm, at its time limits, with nodes that go down (tests/slurm.sh);
#   each fuzz target for a while, beginning with its corpus; its findings are in build/logs/fuzz;
#   the coverage of formats/ by all tests (tests/coverage.sh);
#   clang's static analyzer on every source by itself (tests/lint.sh --each).
#
#   tests/soak.sh [SECONDS]    for each fuzz target (default 300)
set -u -o pipefail
cd "$(dirname "$0")/.."

seconds=${1:-300}
jobs=${RESHARD_JOBS:-$(nproc)}
logs=build/logs
status=0
mkdir -p "$logs/fuzz"

build() { cmake --preset "$1" > "$logs/configure-$1.log" 2>&1 && cmake --build --preset "$1" -j "$jobs" "${@:2}" | tail -n 30; }

# run_tests BUILD REGEX: runs the matching suites of reshard_tests on all processors; their times are in
# build/logs/soak-BUILD.log.
run_tests() {
  local log=$logs/soak-$1.log
  ctest --test-dir "build/$1" -j "$jobs" --timeout 14400 --output-on-failure -R "$2" -E '^(gpu|fuzz)[.]|NOT_BUILT' > "$log" 2>&1 ||
    status=1
  grep -E '\*\*\*(Failed|Timeout|Exception|Not Run)|tests passed|Total Test time' "$log"
}

# Prints the name of a part, and the minutes and seconds since the beginning.
heading() { printf '\n== %s   [%d:%02d]\n' "$1" $((SECONDS / 60)) $((SECONDS % 60)); }

heading "every case, with the sanitizers"
if build dev --target reshard_tests; then
  RESHARD_SOAK=1 run_tests dev .
else
  status=1
fi

heading "threads, with ThreadSanitizer"
if build tsan --target reshard_tests; then run_tests tsan .; else status=1; fi

heading "every float, a thousand ranks, what fails, dies or is damaged, in thousands of cases"
if build release --target reshard_tests; then
  RESHARD_SOAK=1 run_tests release '^(Convert|ManySlabs|AllocationTest|PowerLossTest|FaultTest|ResumeTest|MpiRanks|Uploads)$|Mutation'
else
  status=1
fi

heading "vLLM, from a training checkpoint"
if wheel=$(tools/packages/build_wheel.sh 2> "$logs/soak-wheel.log") && python=$(tests/interop/vllm_venv.sh "$wheel"); then
  "$python" tests/interop/vllm_serve.py build/release/reshard > "$logs/soak-vllm.log" 2>&1 || status=1
  tail -n 6 "$logs/soak-vllm.log"
else
  echo "skipped: no environment with vLLM"
fi

heading "a run under watch, killed"
if python=$(tests/interop/venv.sh 2> /dev/null); then
  build release --target reshard || status=1
  for trainer in torch transformers; do
    "$python" -W ignore tests/interop/watch_run.py build/release/reshard --by $trainer || status=1
  done
else
  echo "skipped: no Python with torch"
fi

heading "others' readers"
if python=$(tests/interop/venv.sh 2> /dev/null); then
  build release --target reshard && "$python" tests/differential.py --cases 2000 || status=1
else
  echo "skipped: no Python with safetensors and h5py"
fi

heading "buckets of Swift"
if python=$(tests/interop/venv.sh 2> /dev/null) && samples/setup.sh soak; then
  build release --target reshard &&
    RESHARD=$PWD/build/release/reshard "$python" -W ignore tests/interop/test_interop.py -k BucketsOfSwift || status=1
else
  echo "skipped: no Python with boto3, or no packages of Swift"
fi

heading "Orbax"
if python=$(tests/interop/venv.sh 2> /dev/null) && jax=$(tests/interop/jax_venv.sh 2> /dev/null); then
  build release --target reshard &&
    RESHARD_JAX_PYTHON=$jax RESHARD=$PWD/build/release/reshard "$python" -W ignore tests/interop/test_interop.py -k Orbax || status=1
else
  echo "skipped: no Python with orbax-checkpoint"
fi

heading "families, against transformers"
if python=$(tests/interop/venv.sh 2> /dev/null); then
  "$python" -W ignore samples/families/generate.py tables > "$logs/families.log" || { cat "$logs/families.log"; status=1; }
  "$python" -W ignore samples/families/generate.py kept --check || status=1
  "$python" -W ignore samples/families/generate.py orders --check || status=1
  "$python" -W ignore samples/families/generate.py transposed --check || status=1
  for command in audit convert; do
    "$python" -W ignore tests/interop/architectures.py $command --write > "$logs/architectures-$command.log" || status=1
    tail -n 1 "$logs/architectures-$command.log"
  done
else
  echo "skipped: no Python with transformers"
fi

heading "ranks on one GPU, a stand-in"
if cmake --build --preset release --target help | grep reshard_gpu_tests > /dev/null; then
  build release --target reshard_gpu_tests &&
    build/release/tests/reshard_gpu_tests --gtest_brief=1 --gtest_filter='*OnAGpu*:*OfAGpu*' || status=1
else
  echo "skipped: the headers of CUDA and NCCL are not here"
fi
if command -v nvcc > /dev/null; then
  CUDA_ARCH=sm_90 tests/cuda/bench.sh --build-only || status=1
fi

heading "Slurm"
build release --target reshard && tests/slurm.sh
code=$?
[ $code = 0 ] || [ $code = 77 ] || status=1

heading "fuzz targets, $seconds seconds each"
build fuzz || exit 1
[ -w /dev/shm ] && export TMPDIR=/dev/shm  # two targets give files by their names
fuzz() {
  local name found
  name=$(basename "$1" _fuzz)
  found=$logs/fuzz/$name
  mkdir -p "$found"
  "$1" -max_total_time="$seconds" -rss_limit_mb=1024 -timeout=25 -max_len=16384 -entropic=0 -artifact_prefix="$found-" \
    "$found" "build/fuzz/tests/fuzz/corpus/$name" > "$found.log" 2>&1
  local code=$?
  echo "$name: $(grep -oE '^Done [0-9]+ runs' "$found.log" || tail -n 20 "$found.log")"
  return $code
}
export -f fuzz
export logs seconds
printf '%s\n' build/fuzz/tests/fuzz/*_fuzz | xargs -P "$jobs" -I{} bash -c 'fuzz {}' || status=1

heading "lines of formats/ that are run"
tests/coverage.sh || status=1

heading "clang's static analyzer"
tests/lint.sh --each || status=1

heading "$([ $status = 0 ] && echo "all well" || echo FAILED)"
exit $status
