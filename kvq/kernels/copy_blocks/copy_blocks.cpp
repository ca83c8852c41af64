// copy_blocks on CPUs: see reference.py for what it does.

#include <string.h>

#include "../native/abi.h"
#include "../native/pool.h"

namespace {

constexpr int64_t SLICE = 1 << 16;       // bytes of every block that one task copies
constexpr int64_t WORTH_THREADS = 1 << 20;  // bytes

}  // namespace

// `pairs`: [count, (source, target)]. A task handles all pairs in order for its own bytes of a
// block, so a pair may read the block that the previous one wrote.
KVQ_KERNEL(copy_blocks)(const KvqRun* runs, int64_t num_runs, const int64_t* pairs, int64_t count, int threads) {
    int64_t slices = 0, total = 0;
    for (int64_t r = 0; r < num_runs; r++) {
        for (int64_t i = 0; i < 2 * count; i++)
            if (pairs[i] < 0 || pairs[i] >= runs[r].num_blocks) return KVQ_BAD_BLOCK;
        int64_t own = (runs[r].bytes + SLICE - 1) / SLICE;
        slices = own > slices ? own : slices;
        total += runs[r].bytes * count;
    }
    if (total <= WORTH_THREADS) threads = 1;
    run_even(threads, num_runs * slices, [=](int64_t task) {
        const KvqRun& run = runs[task / slices];
        int64_t begin = task % slices * SLICE, bytes = run.bytes - begin < SLICE ? run.bytes - begin : SLICE;
        if (bytes <= 0) return;
        for (int64_t i = 0; i < count; i++)
            if (pairs[2 * i] != pairs[2 * i + 1])
                memcpy(run.data + pairs[2 * i + 1] * run.stride + begin, run.data + pairs[2 * i] * run.stride + begin,
                       (size_t)bytes);
    });
    return KVQ_OK;
}
