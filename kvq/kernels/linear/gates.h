// What a gated MLP does between its products: the activation of the gates times the rest.
#pragma once

#include "../native/rowwise.h"

namespace {

// x times the logistic function of x (SiLU), or of 2 sqrt(2 / pi) (x + 0.044715 x^3) (GELU with tanh); of SiLU x is
// taken `slope` times there.
inline vf activated(vf x, int activation, float slope) {
    vf y = activation == KVQ_SILU ? x * slope : (x + x * x * x * 0.044715f) * 1.5957691216057308f;
    vf e = exp_of(y < 0 ? y : -y);
    return x * ((y < 0 ? e : all(1.0f)) / (e + 1.0f));  // what is no number stays none through x
}

}  // namespace
