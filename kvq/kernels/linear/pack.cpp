// Packing of unquantized weights into panels, which pack.py describes.

#include "../native/pool.h"
#include "lanes.h"

namespace {

constexpr int64_t COLUMNS = 64;             // of a piece: its rows and packed columns stay in the first-level cache
constexpr int64_t WORTH_THREADS = 1 << 18;  // bytes

// Load a number at any address: tensors of a file start at any byte.
template <class T>
inline T number(const uint8_t* at) {
    T x;
    memcpy(&x, at, sizeof x);
    return x;
}

// `rows`: one per output, null past the last. `out` [k, 16], written 8 bytes of a column at a time.
template <class T>
void pack_panel(const uint8_t* const* rows, int64_t columns, int64_t k, T* out) {
    constexpr int SIZE = sizeof(T), TOGETHER = 8 / SIZE;
    static const uint8_t zeros[COLUMNS * SIZE] = {};
    for (int64_t first = 0; first < columns; first += COLUMNS) {
        int64_t n = columns - first < COLUMNS ? columns - first : COLUMNS;
        for (int o = 0; o < OUTPUTS; o += TOGETHER) {
            const uint8_t* from[TOGETHER];
            for (int i = 0; i < TOGETHER; i++) from[i] = rows[o + i] ? rows[o + i] + first * SIZE : zeros;
            T* to = out + first * OUTPUTS + o;
            for (int64_t c = 0; c < n; c++) {
                uint64_t joined = 0;
                for (int i = 0; i < TOGETHER; i++) joined |= (uint64_t)number<T>(from[i] + c * SIZE) << (8 * SIZE * i);
                memcpy(to + c * OUTPUTS, &joined, sizeof joined);
            }
        }
    }
    memset(out + columns * OUTPUTS, 0, (size_t)((k - columns) * OUTPUTS) * SIZE);
}

// The same for bf16: pairs of columns side by side, [k / 2, 16, 2].
inline void pack_pairs(const uint8_t* const* rows, int64_t columns, int64_t k, uint16_t* out) {
    pack_panel<uint32_t>(rows, columns / 2, k / 2, (uint32_t*)out);
    for (int o = 0; columns % 2 && o < OUTPUTS; o++)
        if (rows[o]) out[columns / 2 * OUTPUTS * 2 + o * 2] = number<uint16_t>(rows[o] + (columns - 1) * 2);
}

}  // namespace

// Pack the outputs of `parts` [rows, columns], one part after the other; `panels` [panels, k, 16], for
// bf16 [panels, k / 2, 16, 2]. Both of `code`: KVQ_FP32,
// KVQ_BF16 or KVQ_FP16.
KVQ_KERNEL(pack_plain)(const KvqMatrix* parts, int count, int64_t columns, int code, uint8_t* panels, int64_t k,
                       int threads) {
    int64_t outputs = 0, size = bytes_of(code), panel_bytes = k * OUTPUTS * size;
    if (k == 0) return KVQ_OK;
    for (int i = 0; i < count; i++) outputs += parts[i].rows;
    if (outputs * columns * size < WORTH_THREADS) threads = 1;
    run_even(threads, (outputs + OUTPUTS - 1) / OUTPUTS, [=](int64_t panel) {
        const uint8_t* rows[OUTPUTS] = {};
        find_rows(rows, parts, count, panel);
        if (code == KVQ_FP32)
            pack_panel<uint32_t>(rows, columns, k, (uint32_t*)(panels + panel * panel_bytes));
        else if (code == KVQ_BF16)
            pack_pairs(rows, columns, k, (uint16_t*)(panels + panel * panel_bytes));
        else
            pack_panel<uint16_t>(rows, columns, k, (uint16_t*)(panels + panel * panel_bytes));
    });
    return KVQ_OK;
}
