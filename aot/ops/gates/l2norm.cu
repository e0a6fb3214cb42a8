// l2norm: the parameters are those of params_l2norm.def in its order (tests/gates_math compares).
#include "aot/ops/gates/l2norm.cuh"

namespace {

// Fields of the parameter `modes`.
struct Modes {
  int bits;
#define CULA_PARAM(kind, name)
#define CULA_MODE(name, shift, width) \
  CUTLASS_DEVICE int name() const { return bits >> shift & ((1 << width) - 1); }
#include "aot/ops/gates/params_l2norm.def"
#undef CULA_PARAM
#undef CULA_MODE
};

}  // namespace

extern "C" __global__ void __launch_bounds__(cula::gates::kThreads, cula::gates::kBlocks)
    cula_l2norm(const cula::Io* x, void* y, float* rstd, int64_t x_0, int64_t x_1, int64_t x_2, int64_t y_0, int64_t y_1, int64_t y_2,
                int64_t n_0, int64_t n_1, int64_t n_2, int32_t head_dim, int32_t modes, float eps) {
  cula::wait_for_previous_grid();
  const Modes m{modes};
  const cula::gates::Rows rows{x, y, rstd, n_0 * n_1 * n_2, n_1, n_2, x_0, x_1, x_2, y_0, y_1, y_2, head_dim, eps};
  cula::with_dtype(m.y_dtype(), [&](auto y_type) {
    using Y = decltype(y_type);
    if (m.wide()) {
      cula::gates::normalize_wide<Y>(rows);
    } else {
      cula::gates::normalize_narrow<Y>(rows);
    }
  });
  cula::allow_next_grid();
}
