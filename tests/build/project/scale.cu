// y[i * stride] = scale * x[i]. TOY_LOCAL: with a local array that cannot live in registers.
// TOY_NARROW: with loads of one element in a loop.
#include <cuda_bf16.h>
#include <cute/config.hpp>

#include "toy/type.cuh"

// Of internal linkage: nvcc puts a hash of the source's absolute path into its name.
static __device__ int launches;

extern "C" __global__ void __launch_bounds__(128) cula_l2norm(const Element* x, Element* y, int n, long long stride, float scale) {
  __shared__ float tile[128];
  const int i = blockIdx.x * 128 + threadIdx.x;
  if (i == 0) ++launches;
#ifdef TOY_LOCAL
  float local[256];
  for (int j = 0; j < n; ++j) local[(j * 7) & 255] = float(x[j]);
  scale = local[i & 255];
#endif
#ifdef TOY_NARROW
#pragma unroll 1
  for (int j = 0; j < n; ++j) scale += float(x[i + j * stride]);
#endif
  tile[threadIdx.x] = i < n ? float(x[i]) : 0.0f;
  __syncthreads();
  if (i < n) y[i * stride] = Element(scale * tile[threadIdx.x]);
}
