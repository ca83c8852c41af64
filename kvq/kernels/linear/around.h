// A layer's operations on a product's rows before and after it, by the task that has them in its cache.
#pragma once

#include "../rms_norm/normalize.h"
#include "gates.h"

namespace {

inline bool makes_rows(const KvqAround& a) { return a.norm || a.gated; }

// Return `rows` of `n` inputs each, from `x`: in place, or computed in `room`. `x_row`, the bytes from row to row, is
// set to that of the result.
inline const uint8_t* inputs_of(const KvqAround& a, uint8_t* room, const uint8_t* x, int64_t& x_row, int64_t n,
                                int code, int rows) {
    if (!makes_rows(a)) return x;
    int64_t row_bytes = n * bytes_of(code);
    for (int r = 0; r < rows; r++, x += x_row) {
        uint8_t* to = room + r * row_bytes;
        if (a.gated)
            gate_row(to, x, x + row_bytes, n, code, a.activation);
        else
            normalize(to, x, *a.norm, n, code);
    }
    x_row = row_bytes;
    return room;
}

// Add to `n` results of row `row` at `out`, from number `first` on.
// D166: norms, gates, residuals in the product's tasks
inline void add_after(const KvqAround& a, uint8_t* out, int64_t row, int64_t first, int64_t n, int code) {
    int64_t begin = first * bytes_of(code);
    if (a.bias) add_to(out, a.bias + begin, n, code);
    if (a.added) add_to(out, a.added + row * a.added_row + begin, n, code);
}

// The same for a register of fp32.
inline vf with_added(const KvqAround& a, vf x, int64_t row, int64_t first) {
    if (a.bias) x += load((const float*)a.bias + first);
    if (a.added) x += load((const float*)(a.added + row * a.added_row) + first);
    return x;
}

}  // namespace
