// The vector functions of vmath.h and the dtype conversions of simd.h of one ISA level, over arrays, for the tests.
#include "aot/common/cpu/simd.h"
#include "aot/common/cpu/vmath.h"
#include "tests/cpu/math_table.h"

namespace cula::cpu::CULA_ISA {
namespace {

template <class F>
void each(const float* x, const float* y, float* out, int64_t n, F&& f) {
  for (int64_t i = 0; i < n; i += W) store_raw(out + i, f(load_raw<VF>(x + i), load_raw<VF>(y + i)));
}

// y: second argument, for the functions that have one
void run(int function, const float* x, const float* y, float parameter, float* out, int64_t n) {
  const VF one = splat(1.0f);
  switch (function) {
    case kExp: return each(x, y, out, n, [](VF a, VF) { return exp(a); });
    case kLog1p: return each(x, y, out, n, [](VF a, VF) { return log1p(a); });
    case kSigmoid: return each(x, y, out, n, [](VF a, VF) { return sigmoid(a); });
    case kSoftplus: return each(x, y, out, n, [](VF a, VF b) { return softplus(add(a, b)); });
    case kRawGate: return each(x, y, out, n, [&](VF a, VF b) { return raw_gate(a, b, one * parameter, parameter > 0 ? 0.0f : -5.0f); });
    case kBoundedGate: return each(x, y, out, n, [&](VF a, VF b) { return raw_gate(a, b, one, parameter); });
  }
}

template <class T>
void convert(const char* from, char* to, int64_t n, bool narrow) {
  for (int64_t i = 0; i < n; i += W) {
    if (narrow) {
      T::store(to + i * T::kBytes, load_raw<VF>(from + i * 4));
    } else {
      store_raw(to + i * 4, T::load(from + i * T::kBytes));
    }
  }
}

// bf16 by pairs, as states are: load_pair undone by from_pair_order, and back.
void convert_pairs(const char* from, char* to, int64_t n, bool narrow) {
  for (int64_t i = 0; i < n; i += 2 * W) {
    VF a, b;
    if (narrow) {
      a = load_raw<VF>(from + i * 4), b = load_raw<VF>(from + i * 4 + kVectorBytes);
      BF16::to_pair_order(a, b);
      BF16::store_pair(to + i * 2, BF16::operand(a), BF16::operand(b));
    } else {
      BF16::load_pair(from + i * 2, a, b);
      BF16::from_pair_order(a, b);
      store_raw(to + i * 4, a), store_raw(to + i * 4 + kVectorBytes, b);
    }
  }
}

void convert_code(int code, const char* from, char* to, int64_t n, bool narrow) {
  if (code == 3) return convert_pairs(from, to, n, narrow);
  with_dtype(code, [&](auto t) { convert<decltype(t)>(from, to, n, narrow); });
}

}  // namespace

const MathTable kMath = {run, convert_code};

}  // namespace cula::cpu::CULA_ISA
