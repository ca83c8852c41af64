// Several products in one call of C++, each with its own weight and its own rows.
#pragma once

#include "../native/abi.h"

struct KvqGroup {
    const KvqLinear* linear;  // or a chain; all with the same numbers of inputs and outputs
    int64_t rows;             // at least one; groups' rows follow each other
};

// `x` [rows of all, in_features] and `out` [rows of all, out_features] of `code`, with the bits of `linear`.
KVQ_KERNEL(linear_groups)(const KvqGroup* groups, int count, const uint8_t* x, int64_t x_row, uint8_t* out,
                          int64_t out_row, int code, int threads);
