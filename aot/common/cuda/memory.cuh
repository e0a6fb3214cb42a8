// Global memory access of the elementwise kernels: streaming vectors of up to 16 bytes, single values of a run-time dtype, and
// the conversions between io dtypes and float32. On the host (tests that run the kernels thread by thread) a misaligned access traps.
#pragma once

#include <cstdint>

#include <cutlass/array.h>
#include <cutlass/numeric_conversion.h>

namespace cula {

// dtype codes of the params.def files
enum DTypeCode : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kAbsent = 3 };

// N values that move with one instruction; N * sizeof(T) is 2, 4, 8 or 16.
template <class T, int N>
using Vector = cutlass::AlignedArray<T, N, N * int(sizeof(T))>;

// Read once, not worth a line of L1: keeps A_log and dt_bias there. The asm is volatile so that no load is moved above
// griddepcontrol.wait; it is not .nc, because the output may be written in place.
template <class T, int N>
CUTLASS_DEVICE Vector<T, N> load_streaming(const T* p) {
  constexpr int kBytes = N * int(sizeof(T));
  Vector<T, N> v;
#if !defined(__CUDA_ARCH__)
  if (reinterpret_cast<uintptr_t>(p) % kBytes) __builtin_trap();
  v = *reinterpret_cast<const Vector<T, N>*>(p);
#else
  if constexpr (kBytes == 16) {
    uint4 r;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
    reinterpret_cast<uint4&>(v) = r;
  } else if constexpr (kBytes == 8) {
    uint2 r;
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "l"(p));
    reinterpret_cast<uint2&>(v) = r;
  } else if constexpr (kBytes == 4) {
    uint32_t r;
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(r) : "l"(p));
    reinterpret_cast<uint32_t&>(v) = r;
  } else {
    static_assert(kBytes == 2, "one load instruction");
    uint16_t r;
    asm volatile("ld.global.L1::no_allocate.u16 %0, [%1];" : "=h"(r) : "l"(p));
    reinterpret_cast<uint16_t&>(v) = r;
  }
#endif
  return v;
}

template <class T, int N>
CUTLASS_DEVICE void store(T* p, const Vector<T, N>& v) {
#if !defined(__CUDA_ARCH__)
  if (reinterpret_cast<uintptr_t>(p) % (N * sizeof(T))) __builtin_trap();
#endif
  *reinterpret_cast<Vector<T, N>*>(p) = v;
}

template <class T, int N>
CUTLASS_DEVICE cutlass::Array<float, N> to_float(const Vector<T, N>& v) {
  return cutlass::NumericArrayConverter<float, T, N>::convert(v);
}

// Rounds to nearest even, two values an instruction.
template <class T, int N>
CUTLASS_DEVICE Vector<T, N> from_float(const cutlass::Array<float, N>& v) {
  Vector<T, N> out;
  static_cast<cutlass::Array<T, N>&>(out) = cutlass::NumericArrayConverter<T, float, N>::convert(v);
  return out;
}

// Element `index` of a parameter tensor of run-time dtype (A_log, dt_bias); `absent` if there is none. Cached.
CUTLASS_DEVICE float load_parameter(const void* p, int dtype, int64_t index, float absent) {
  switch (dtype) {
    case kFloat32: return static_cast<const float*>(p)[index];
    case kBFloat16: return float(static_cast<const cutlass::bfloat16_t*>(p)[index]);
    case kFloat16: return float(static_cast<const cutlass::half_t*>(p)[index]);
    default: return absent;
  }
}

// Element `index` of an output of run-time dtype.
CUTLASS_DEVICE void store_value(void* p, int dtype, int64_t index, float value) {
  if (dtype == kFloat32) {
    static_cast<float*>(p)[index] = value;
  } else if (dtype == kBFloat16) {
    static_cast<cutlass::bfloat16_t*>(p)[index] = cutlass::bfloat16_t(value);
  } else {
    static_cast<cutlass::half_t*>(p)[index] = cutlass::half_t(value);
  }
}

// Calls f(T{}) with the C++ type of a dtype code that is present.
template <class F>
CUTLASS_DEVICE void with_dtype(int dtype, F&& f) {
  if (dtype == kFloat32) {
    f(float{});
  } else if (dtype == kBFloat16) {
    f(cutlass::bfloat16_t{});
  } else {
    f(cutlass::half_t{});
  }
}

}  // namespace cula
