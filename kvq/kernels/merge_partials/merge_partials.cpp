// merge_partials on CPUs: see reference.py.

#include "../native/pool.h"
#include "../native/rows.h"

namespace {

constexpr int ROWS = 64;  // of one task

inline void merge_row(const float* outs, const float* lses, const float* sink, float* to, float* lse, int parts,
                      int64_t rows, int64_t row, int dim) {
    const float nothing = -__builtin_inff();
    float top = sink ? *sink : nothing;
    for (int p = 0; p < parts; p++) top = !(lses[p * rows + row] <= top) ? lses[p * rows + row] : top;
    // NaN and infinity stay unchanged: only an empty part is ignored.
    float total = sink && top != nothing ? __builtin_expf(*sink - top) : 0.0f;
    for (int p = 0; p < parts && top != nothing; p++) total += __builtin_expf(lses[p * rows + row] - top);
    lse[row] = total == 0 ? nothing : top == -nothing ? top : top + __builtin_logf(total);
    memset(to, 0, (size_t)dim * 4);
    for (int p = 0; p < parts; p++) {
        float weight = total == 0 ? 0.0f : __builtin_expf(lses[p * rows + row] - top) / total;
        const float* from = outs + (p * rows + row) * dim;
        if (weight != 0)  // an empty part may contain anything
            for (int i = 0; i < dim; i++) to[i] += weight * from[i];
    }
}

}  // namespace

// `outs` [parts, rows, dim], `lses` [parts, rows], `sinks` [heads] or null; a row is a (token, head). `out` [rows, dim]
// of `code`.
KVQ_KERNEL(merge_partials)(const float* outs, const float* lses, const float* sinks, uint8_t* out, float* lse,
                           int code, int parts, int64_t rows, int heads, int dim, int threads) {
    run_even(threads, (rows + ROWS - 1) / ROWS, [=](int64_t task) {
        float room[MOST_DIM];
        int64_t end = (task + 1) * ROWS < rows ? (task + 1) * ROWS : rows;
        for (int64_t row = task * ROWS; row < end; row++) {
            uint8_t* to = out + row * dim * bytes_of(code);
            const float* sink = sinks ? sinks + row % heads : nullptr;
            merge_row(outs, lses, sink, code == KVQ_FP32 ? (float*)to : room, lse, parts, rows, row, dim);
            if (code != KVQ_FP32) write_floats(to, room, dim, code);
        }
    });
    return KVQ_OK;
}
