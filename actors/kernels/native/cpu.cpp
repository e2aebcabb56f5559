// What this machine can run. Compiled into every library; asked of the generic one, which runs everywhere.
#include "warmroot.h"

extern "C" const char *wr_best_instructions(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vnni");
    if (avx2 && avx512) return "avx512";
    if (avx2) return "avx2";
#endif
    return "generic";
}
