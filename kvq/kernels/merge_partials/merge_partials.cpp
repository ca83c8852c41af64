// merge_partials on CPUs: see reference.py.

#include "../native/rows.h"

// `outs` [parts, rows, dim], `lses` [parts, rows], `sinks` [heads] or null; a row is a (token, head).
KVQ_KERNEL(merge_partials)(const float* outs, const float* lses, const float* sinks, float* out, float* lse,
                           int parts, int64_t rows, int heads, int dim) {
    const float nothing = -__builtin_inff();
    for (int64_t row = 0; row < rows; row++) {
        float top = sinks ? sinks[row % heads] : nothing;
        for (int p = 0; p < parts; p++) top = !(lses[p * rows + row] <= top) ? lses[p * rows + row] : top;
        // NaN and infinity stay what they are: only an empty part counts for nothing.
        float total = sinks && top != nothing ? __builtin_expf(sinks[row % heads] - top) : 0.0f;
        for (int p = 0; p < parts && top != nothing; p++) total += __builtin_expf(lses[p * rows + row] - top);
        lse[row] = total == 0 ? nothing : top == -nothing ? top : top + __builtin_logf(total);
        float* to = out + row * dim;
        memset(to, 0, (size_t)dim * 4);
        for (int p = 0; p < parts; p++) {
            float weight = total == 0 ? 0.0f : __builtin_expf(lses[p * rows + row] - top) / total;
            const float* from = outs + (p * rows + row) * dim;
            if (weight != 0)  // an empty part may hold anything
                for (int i = 0; i < dim; i++) to[i] += weight * from[i];
        }
    }
    return KVQ_OK;
}
