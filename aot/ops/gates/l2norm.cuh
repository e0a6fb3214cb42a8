// l2norm: y = x / sqrt(sum x^2 + eps) over the last dimension.
//
// A group of kLanes lanes owns a row and keeps it in registers: one read, one write. A lane has kChunks vectors of N values of a row
// and kRows rows of its group in flight.
#pragma once

#include "aot/common/cuda/grid_dependency.cuh"
#include "aot/common/cuda/index.cuh"
#include "aot/common/cuda/io.cuh"
#include "aot/common/cuda/math.cuh"
#include "aot/common/cuda/memory.cuh"
#include "aot/common/cuda/warp.cuh"

namespace cula::gates {

constexpr int kThreads = 256;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kBlocks = 3;  // with 64 registers a thread the 16-bit kernels spill there
#else
constexpr int kBlocks = 4;  // a multiprocessor: up to 64 registers a thread
#endif

// Rows [n_0, n_1, n_2] with free strides, each of `dim` adjacent values.
struct Rows {
  const Io* x;
  void* y;
  float* rstd;  // [rows], or nullptr
  int64_t rows, n_1, n_2;
  int64_t x_0, x_1, x_2, y_0, y_1, y_2;
  int dim;
  float eps;
};

struct RowOffsets {
  int64_t x, y;
};

// The branches are uniform: what the plan folded into one dimension pays no division.
CUTLASS_DEVICE RowOffsets locate(const Rows& r, int64_t row) {
  RowOffsets at{0, 0};
  if (r.n_2 < r.rows) {
    int64_t j = divide(row, r.n_2);
    row -= j * r.n_2;
    if (r.n_1 * r.n_2 < r.rows) {
      const int64_t i = divide(j, r.n_1);
      j -= i * r.n_1;
      at = {i * r.x_0, i * r.y_0};
    }
    at = {at.x + j * r.x_1, at.y + j * r.y_1};
  }
  return {at.x + row * r.x_2, at.y + row * r.y_2};
}

// Y: type of the result.
template <class Y, int N, int kLanes, int kChunks>
CUTLASS_DEVICE void normalize(const Rows& r) {
  constexpr int kRows = kChunks >= 4 ? 1 : 4 / kChunks;
  constexpr int kGroups = 32 / kLanes;  // of a warp
  const int lane = threadIdx.x % 32, in_group = lane % kLanes, group = lane / kLanes;
  const int64_t groups = int64_t(gridDim.x) * (kThreads / kLanes);
  // `first` is the row of the warp's first group: the loop ends for whole warps, as the shuffles need
  CUTLASS_PRAGMA_NO_UNROLL
  for (int64_t first = (int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32) * kGroups; first < r.rows; first += kRows * groups) {
    // each lane finds one of the kRows * kGroups rows of the warp
    const int64_t mine = first + lane % kGroups + lane / kGroups * groups;
    const RowOffsets at = locate(r, mine < r.rows ? mine : 0);
    Vector<Io, N> v[kRows][kChunks];
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kRows; ++j) {
      const Io* x = r.x + __shfl_sync(0xffffffffu, at.x, j * kGroups + group);
      const bool valid = first + group + j * groups < r.rows;
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kChunks; ++c) {
        const int d = (c * kLanes + in_group) * N;
        v[j][c].clear();
        if (valid && d < r.dim) v[j][c] = load_streaming<Io, N>(x + d);
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kRows; ++j) {
      float sum = 0.0f;
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kChunks; ++c) {
        const cutlass::Array<float, N> x = to_float<Io, N>(v[j][c]);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < N; ++i) sum = math::fma(x[i], x[i], sum);
      }
      const float rstd = math::rsqrt(group_sum<kLanes>(sum) + r.eps);
      Y* y = static_cast<Y*>(r.y) + __shfl_sync(0xffffffffu, at.y, j * kGroups + group);
      const int64_t row = first + group + j * groups;
      const bool valid = row < r.rows;
      if (r.rstd != nullptr && in_group == 0 && valid) r.rstd[row] = rstd;
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kChunks; ++c) {
        const int d = (c * kLanes + in_group) * N;
        cutlass::Array<float, N> x = to_float<Io, N>(v[j][c]);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < N; ++i) x[i] *= rstd;
        if (valid && d < r.dim) store<Y, N>(y + d, from_float<Y, N>(x));
      }
    }
  }
}

// 16 bytes an access on the wider side of x and y; dim is a multiple of 8.
template <class Y>
CUTLASS_DEVICE void normalize_wide(const Rows& r) {
  constexpr int N = sizeof(Io) == 4 || sizeof(Y) == 4 ? 4 : 8;
  const int vectors = r.dim / N;
  if (vectors <= 8) {
    normalize<Y, N, 8, 1>(r);
  } else if (vectors <= 16) {
    normalize<Y, N, 16, 1>(r);
  } else if (vectors <= 32) {
    normalize<Y, N, 32, 1>(r);
  } else if (vectors <= 64) {
    normalize<Y, N, 32, 2>(r);
  } else {
    normalize<Y, N, 32, 1024 / N / 32>(r);
  }
}

// Any alignment: a warp a row, one value an access; the second read of the row comes from the L1 cache.
template <class Y>
CUTLASS_DEVICE void normalize_narrow(const Rows& r) {
  const int lane = threadIdx.x % 32;
  const int64_t warps = int64_t(gridDim.x) * (kThreads / 32);
  CUTLASS_PRAGMA_NO_UNROLL
  for (int64_t row = int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32; row < r.rows; row += warps) {
    const RowOffsets at = locate(r, row);
    const Io* x = r.x + at.x;
    Y* y = static_cast<Y*>(r.y) + at.y;
    float sum = 0.0f;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int d = lane; d < r.dim; d += 4 * 32) {
      CUTLASS_PRAGMA_UNROLL
      for (int u = 0; u < 4; ++u) {
        const float v = d + u * 32 < r.dim ? float(x[d + u * 32]) : 0.0f;
        sum = math::fma(v, v, sum);
      }
    }
    const float rstd = math::rsqrt(group_sum<32>(sum) + r.eps);
    if (r.rstd != nullptr && lane == 0) r.rstd[row] = rstd;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int d = lane; d < r.dim; d += 32) y[d] = Y(float(x[d]) * rstd);
  }
}

}  // namespace cula::gates
