#!/usr/bin/env bash
# The native kernels under sanitizers: the pool's stress program with -fsanitize=thread, then the kernels' own tests
# against libraries built with -fsanitize=address,undefined. Arguments go to pytest (default: all tests of the kernels).
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-.venv/bin/python}
cxx=${CXX:-g++}
kernels=actors/kernels/native
tests=("$@")
((${#tests[@]})) || tests=(tests/unit/test_native_*.py)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
common=(-std=c++20 -O1 -g -fno-omit-frame-pointer -ffp-contract=fast -pthread)
checks=("-fsanitize=address,undefined" -fno-sanitize-recover=all)

declare -A flags=([generic]="")
if [[ $(uname -m) == x86_64 ]]; then
    flags[avx2]="-mavx2 -mfma -mf16c"
    flags[avx512]="${flags[avx2]} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mprefer-vector-width=512"
fi

echo "==> pool, -fsanitize=thread"
"$cxx" "${common[@]}" -fsanitize=thread tests/native/pool_stress.cpp "$kernels/pool.cpp" -o "$folder/pool_thread"
# Without address randomisation: where it is strong, ThreadSanitizer finds its own memory taken.
setarch -R "$folder/pool_thread" 3000

echo "==> pool, ${checks[0]}"
"$cxx" "${common[@]}" "${checks[@]}" tests/native/pool_stress.cpp "$kernels/pool.cpp" -o "$folder/pool_address"
"$folder/pool_address" 3000

for name in "${!flags[@]}"; do
    echo "==> building the $name kernels, ${checks[0]}"
    # shellcheck disable=SC2086
    "$cxx" "${common[@]}" "${checks[@]}" ${flags[$name]} -w -fPIC -shared "$kernels"/*.cpp -o "$folder/_$name.so"
done

echo "==> tests of the kernels"
# libstdc++ too: the sanitizer looks for its exceptions when it starts, and Python does not link it.
preload=$("$cxx" -print-file-name=libasan.so):$("$cxx" -print-file-name=libubsan.so):$("$cxx" -print-file-name=libstdc++.so)
LD_PRELOAD=$preload PYTHONMALLOC=malloc OMP_NUM_THREADS=1 WARMROOT_KERNELS_DIR=$folder \
    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
    "$python" -m pytest -p no:cacheprovider "${tests[@]}"
