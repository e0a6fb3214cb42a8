// The scalar functions of aot/common/cuda/math.cuh over arrays, for test_gates_math.py.
// approx_error: error of the special function unit as a part, -1 to 1, of its bound.
#include <cstdint>

#include "aot/common/cuda/math.cuh"

namespace m = cula::math;

extern "C" {

void softplus(int64_t n, const float* x, const float* bias, float approx_error, float* precise, float* fast) {
  m::approx_error() = approx_error;
  for (int64_t i = 0; i < n; ++i) {
    const m::Pair y = m::two_sum(x[i], bias[i]);
    precise[i] = m::softplus(y);
    fast[i] = m::softplus_fast(y.hi);
  }
}

// sigmoid(exp(a) * (x + bias))
void sigmoid(int64_t n, const float* x, const float* bias, const float* a, float approx_error, float* precise, float* fast) {
  m::approx_error() = approx_error;
  for (int64_t i = 0; i < n; ++i) {
    const m::Pair factor = m::exp_pair(a[i]);
    const m::Pair y = m::two_sum(x[i], bias[i]);
    precise[i] = m::sigmoid(m::multiply(factor, y));
    fast[i] = m::sigmoid_fast(m::mul(factor.hi, y.hi));
  }
}

void exp_pair(int64_t n, const float* a, float* hi, float* lo) {
  for (int64_t i = 0; i < n; ++i) {
    const m::Pair p = m::exp_pair(a[i]);
    hi[i] = p.hi;
    lo[i] = p.lo;
  }
}

}  // extern "C"
