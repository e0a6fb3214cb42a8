// Float32 vectors of one ISA level and the loads and stores of the io and state dtypes. For cpu_isa_*.cpp only (see isa.h).
//
// GCC and Clang vector types: + - * / and comparisons work lane by lane, a * b + c becomes an FMA where the level has one.
// No load or store needs alignment.
#pragma once

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if !defined(CULA_ISA)
#error "compile with -DCULA_ISA=base, avx2 or avx512"
#endif
#define CULA_INLINE inline __attribute__((always_inline))

namespace cula::cpu::CULA_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int W = kVectorBytes / 4;  // float32 lanes

typedef float VF __attribute__((vector_size(kVectorBytes)));
typedef int32_t VI __attribute__((vector_size(kVectorBytes)));
typedef uint32_t VU __attribute__((vector_size(kVectorBytes)));
typedef uint16_t VH __attribute__((vector_size(kVectorBytes / 2)));
typedef float V4 __attribute__((vector_size(16)));
typedef double VD __attribute__((vector_size(kVectorBytes)));

CULA_INLINE VF splat(float x) { return x - VF{}; }  // not VF{} + x: that would turn -0 into 0
CULA_INLINE VU splat_u(uint32_t x) { return x - VU{}; }

template <class T>
CULA_INLINE T load_raw(const void* p) {
  T v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <class T>
CULA_INLINE void store_raw(void* p, T v) {
  __builtin_memcpy(p, &v, sizeof v);
}

// mask lanes are 0 or -1
CULA_INLINE VF select(VI mask, VF a, VF b) { return (VF)((mask & (VI)a) | (~mask & (VI)b)); }
CULA_INLINE VU select(VI mask, VU a, VU b) { return ((VU)mask & a) | (~(VU)mask & b); }
CULA_INLINE VF abs(VF x) { return (VF)((VU)x & 0x7fffffffu); }

// Even and odd lanes of two vectors, and back.
CULA_INLINE void deinterleave(VF& a, VF& b) {
#if defined(__AVX512F__)
  const VF even = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const VF odd = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif defined(__AVX2__)
  const VF even = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
  const VF odd = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
  const VF even = __builtin_shufflevector(a, b, 0, 2, 4, 6);
  const VF odd = __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
  a = even;
  b = odd;
}
CULA_INLINE void interleave(VF& even, VF& odd) {
#if defined(__AVX512F__)
  const VF a = __builtin_shufflevector(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const VF b = __builtin_shufflevector(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX2__)
  const VF a = __builtin_shufflevector(even, odd, 0, 8, 1, 9, 2, 10, 3, 11);
  const VF b = __builtin_shufflevector(even, odd, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  const VF a = __builtin_shufflevector(even, odd, 0, 4, 1, 5);
  const VF b = __builtin_shufflevector(even, odd, 2, 6, 3, 7);
#endif
  even = a;
  odd = b;
}

// Between 16-bit and 32-bit lanes. Intrinsics, because GCC 12 converts vector types in halves.
CULA_INLINE VU widen(VH h) {
#if defined(__AVX512F__)
  return (VU)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)h);
#elif defined(__AVX2__)
  return (VU)_mm256_cvtepu16_epi32((__m128i)h);
#else
  return __builtin_convertvector(h, VU);
#endif
}
CULA_INLINE VH narrow(VU u) {
#if defined(__AVX512F__)
  return (VH)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)u);
#else
  return __builtin_convertvector(u, VH);
#endif
}

// ------------------------------------------------------------------------------------------------------------- dtypes
// Each: bytes, load of W elements as float32, store of W float32 rounded to nearest even, NaN staying NaN. What is stored has
// been through arithmetic, which makes every NaN a quiet one.
//
// F32 and BF16, the state dtypes, also load and store 2 W elements in "pair order", the cheapest for the dtype: F32 as they lie,
// BF16 the even elements in a and the odd ones in b (a 32-bit lane holds one of each, so no data crosses lanes). to_pair_order
// permutes float32 operands to match. store_pair rounds without looking for NaN: every operand of what it stores has passed
// operand(), or comes from load_pair.

struct F32 {
  static constexpr int kBytes = 4;
  static CULA_INLINE VF load(const char* p) { return load_raw<VF>(p); }
  static CULA_INLINE void store(char* p, VF x) { store_raw(p, x); }
  static CULA_INLINE void load_pair(const char* p, VF& a, VF& b) {
    a = load_raw<VF>(p);
    b = load_raw<VF>(p + kVectorBytes);
  }
  static CULA_INLINE void store_pair(char* p, VF a, VF b) {
    store_raw(p, a);
    store_raw(p + kVectorBytes, b);
  }
  static CULA_INLINE void to_pair_order(VF&, VF&) {}
  static CULA_INLINE void from_pair_order(VF&, VF&) {}
  template <class V>
  static CULA_INLINE V operand(V x) {
    return x;
  }
};

struct BF16 {
  static constexpr int kBytes = 2;
  static CULA_INLINE VF load(const char* p) { return (VF)(widen(load_raw<VH>(p)) << 16); }
  static CULA_INLINE void store(char* p, VF x) { store_raw(p, narrow(rounded(operand(x)) >> 16)); }
  static CULA_INLINE void load_pair(const char* p, VF& a, VF& b) {
    const VU u = load_raw<VU>(p);
    a = (VF)(u << 16);
    b = (VF)(u & 0xffff0000u);
  }
  static CULA_INLINE void store_pair(char* p, VF a, VF b) { store_raw(p, (rounded(a) >> 16) | (rounded(b) & 0xffff0000u)); }
  static CULA_INLINE void to_pair_order(VF& a, VF& b) { deinterleave(a, b); }
  static CULA_INLINE void from_pair_order(VF& a, VF& b) { interleave(a, b); }

  // Only the upper 16 bits of a NaN: rounding would carry a payload of ones (memory filled with 0xff) into the sign, and NaN
  // would be stored as zero. A payload of 16 bits stays as it is, and arithmetic only hands payloads on.
  template <class V>
  static CULA_INLINE V operand(V x) {
    typedef uint32_t U __attribute__((vector_size(sizeof(V))));
    return (V)((U)x & ((U)(x == x) | 0xffff0000u));
  }

 private:
  static CULA_INLINE VU rounded(VF x) {  // the upper 16 bits are the bf16
    const VU u = (VU)x;
    return u + (((u >> 16) & 1u) + 0x7fffu);
  }
};

struct F16 {
  static constexpr int kBytes = 2;
#if defined(__AVX512F__)
  // maskz: the plain forms warn of an uninitialised variable inside GCC 12's own header.
  static CULA_INLINE VF load(const char* p) { return (VF)_mm512_maskz_cvtph_ps(0xffff, load_raw<__m256i>(p)); }
  static CULA_INLINE void store(char* p, VF x) {
    store_raw(p, _mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT));
  }
#elif defined(__F16C__)
  static CULA_INLINE VF load(const char* p) { return (VF)_mm256_cvtph_ps(load_raw<__m128i>(p)); }
  static CULA_INLINE void store(char* p, VF x) { store_raw(p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT)); }
#else
  static CULA_INLINE VF load(const char* p) {
    const VU u = widen(load_raw<VH>(p));
    const VU magnitude = (u & 0x7fffu) << 13;
    // Exponent bias 127 - 15; infinity and NaN move from 31 to 255, twice as far.
    const VU extra = (VU)((VI)magnitude >= 0x0f800000) & 0x38000000u;
    const VU normal = magnitude + 0x38000000u + extra;
    // From the integer, not by scaling a float32 subnormal: that would be 0 in a process with denormals-are-zero.
    const VU subnormal = (VU)(__builtin_convertvector((VI)(u & 0x7fffu), VF) * 0x1p-24f);
    return (VF)(select((VI)magnitude < 0x00800000, subnormal, normal) | ((u & 0x8000u) << 16));
  }
  static CULA_INLINE void store(char* p, VF x) {
    const VU u = (VU)x & 0x7fffffffu;
    const VU sign = ((VU)x >> 16) & 0x8000u;
    const VU normal = (u - 0x38000000u + (((u >> 13) & 1u) + 0xfffu)) >> 13;  // carries into infinity from 65520 on
    const VU subnormal = (VU)((VF)u + 0.5f) - 0x3f000000u;                     // ulp(0.5) is the subnormal spacing 2^-24
    VU h = select((VI)u < 0x38800000, subnormal, normal);
    h = select((VI)u >= 0x47800000, splat_u(0x7c00u), h);
    h = select((VI)u > 0x7f800000, ((u >> 13) & 0x3ffu) | 0x7e00u, h);
    store_raw(p, narrow(h | sign));
  }
#endif
};

// Runs f with the dtype of a params.def code (0 float32, 1 bf16, 2 fp16).
template <class F>
CULA_INLINE void with_dtype(int code, F&& f) {
  if (code == 0) {
    f(F32{});
  } else if (code == 1) {
    f(BF16{});
  } else {
    f(F16{});
  }
}

// W elements of which only `count` exist; the others read as zero.
template <class T>
CULA_INLINE VF load_part(const char* p, int count) {
  char part[W * 4] = {};
  __builtin_memcpy(part, p, static_cast<unsigned>(count * T::kBytes));
  return T::load(part);
}
template <class T>
CULA_INLINE void store_part(char* p, VF x, int count) {
  char part[W * 4];
  T::store(part, x);
  __builtin_memcpy(p, part, static_cast<unsigned>(count * T::kBytes));
}

// --------------------------------------------------------------------------------------------------------------- sums

CULA_INLINE V4 fold(VF x) {
#if defined(__AVX512F__)
  typedef float V8 __attribute__((vector_size(32)));
  const V8 y = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
  return __builtin_shufflevector(y, y, 0, 1, 2, 3) + __builtin_shufflevector(y, y, 4, 5, 6, 7);
#elif defined(__AVX2__)
  return __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7);
#else
  return x;
#endif
}

// The sums of four vectors.
CULA_INLINE V4 sum4(const VF (&x)[4]) {
  const V4 a = fold(x[0]), b = fold(x[1]), c = fold(x[2]), d = fold(x[3]);
  const V4 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const V4 cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

// The lower and the upper half of the lanes in float64.
CULA_INLINE VD low_double(VF x) {
#if defined(__AVX512F__)
  return (VD)_mm512_maskz_cvtps_pd(0xff, (__m256)__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7));
#elif defined(__AVX2__)
  return (VD)_mm256_cvtps_pd((__m128)__builtin_shufflevector(x, x, 0, 1, 2, 3));
#else
  return VD{x[0], x[1]};
#endif
}
CULA_INLINE VD high_double(VF x) {
#if defined(__AVX512F__)
  return (VD)_mm512_maskz_cvtps_pd(0xff, (__m256)__builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15));
#elif defined(__AVX2__)
  return (VD)_mm256_cvtps_pd((__m128)__builtin_shufflevector(x, x, 4, 5, 6, 7));
#else
  return VD{x[2], x[3]};
#endif
}

// Adds the products of all lanes of a and b, which are exact in float64, to sum.
CULA_INLINE void add_products(VF a, VF b, VD& sum) {
  sum += low_double(a) * low_double(b);
  sum += high_double(a) * high_double(b);
}
CULA_INLINE double sum(VD x) {
  double total = 0;
  for (int i = 0; i < W / 2; ++i) total += x[i];
  return total;
}

}  // namespace cula::cpu::CULA_ISA
