// Rules of state pools and their slots, which args structs share: shape by layout, compact heads, alignment, one slot a sequence.
#pragma once
#include "error.h"
#include "tensor.h"

namespace cula {

// What a pool must be: [slots,HV,V,K] (vk) or [slots,HV,K,V].
struct PoolShape {
  bool vk;
  int64_t hv, dim_k, dim_v;
  bool used;  // there is a row or sequence, so the pool needs a slot
};

inline cula_status check_pool(const char* op, const PoolShape& s, const Tensor& pool) noexcept {
  const int64_t want[2] = {s.vk ? s.dim_v : s.dim_k, s.vk ? s.dim_k : s.dim_v};
  if (pool.rank != 4 || pool.shape[1] != s.hv || pool.shape[2] != want[0] || pool.shape[3] != want[1]) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s has shape %s; expected [slots,HV,%s] = [slots,%lld,%lld,%lld]", op, pool.name, shape_text(pool).s,
                s.vk ? "V,K" : "K,V", static_cast<long long>(s.hv), static_cast<long long>(want[0]), static_cast<long long>(want[1]));
  }
  if (pool.shape[0] < 1 && s.used) return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s has shape %s; a pool has at least one slot", op, pool.name, shape_text(pool).s);
  if (pool.elements == 0) return CULA_OK;
  if ((want[1] > 1 && pool.stride[3] != 1) || (want[0] > 1 && pool.stride[2] != want[1])) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: the last two strides of %s are %lld and %lld; must be %lld and 1: a state is compact inside a head", op,
                pool.name, static_cast<long long>(pool.stride[2]), static_cast<long long>(pool.stride[3]), static_cast<long long>(want[1]));
  }
  if (!aligned16(pool)) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s is at %#llx with slot stride %lld and head stride %lld of %s; address and both strides must be multiples of 16 bytes",
                op, pool.name, static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(pool.data)), static_cast<long long>(pool.stride[0]),
                static_cast<long long>(pool.stride[1]), element_name(pool.dtype));
  }
  return CULA_OK;
}

// A sequence without an index has the slot of its number, so there must be one.
inline cula_status check_slots(const char* op, const Tensor& pool, int64_t n, const char* index) noexcept {
  if (pool.shape[0] >= n) return CULA_OK;
  return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s has %lld slots for %lld sequences; without %s sequence n uses slot n", op, pool.name,
              static_cast<long long>(pool.shape[0]), static_cast<long long>(n), index);
}

// Two pools that share memory are one pool: they start at the same address and have the same strides.
inline cula_status check_same_or_apart(const char* op, const Tensor& a, const Tensor& b) noexcept {
  if (!present(a) || !present(b) || !overlaps(a, b)) return CULA_OK;
  const bool same = a.data == b.data && (a.shape[1] == 1 || a.stride[1] == b.stride[1]) &&
                    (a.shape[0] == 1 || b.shape[0] == 1 || a.stride[0] == b.stride[0]);
  if (same) return CULA_OK;
  return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s overlaps %s in memory, but starts elsewhere or has other strides; it must be the same pool or another", op,
              b.name, a.name);
}

}  // namespace cula
