// The variant of the kernels that this CPU can run. Compiled without any instruction-set flag. library.py loads it.
// AMX and bf16 instructions are no variants: amx.h asks for them while running.

// D89: variants share nothing the linker could merge
extern "C" const char* kvq_cpu_features() {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return __builtin_cpu_supports("avx512vnni") ? "avx512vnni" : "avx512";
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
    return "portable";
}
