// Host plans of kda_gate, gdn_gate and l2norm: args struct -> checked operands -> parameters and grid. Parameters and the grid
// rule are described in params_gate.def and params_l2norm.def.
#include <algorithm>

#include "error.h"
#include "kernels.h"
#include "names.h"
#include "tensor.h"

namespace cula::gates {
namespace {

#define CULA_PARAM(kind, name) +1
#define CULA_MODE(name, shift, bits)
constexpr int32_t kGateParamCount = 0
#include "aot/ops/gates/params_gate.def"
    ;
#define CULA_PARAMS GateParams
#define CULA_PARAMS_DEF "aot/ops/gates/params_gate.def"
#include "params.inc"

#define CULA_PARAM(kind, name) +1
#define CULA_MODE(name, shift, bits)
constexpr int32_t kNormParamCount = 0
#include "aot/ops/gates/params_l2norm.def"
    ;
#define CULA_PARAMS NormParams
#define CULA_PARAMS_DEF "aot/ops/gates/params_l2norm.def"
#include "params.inc"

constexpr int kThreads = 256;
constexpr int kGateBlocksPerSm = 4;  // resident at the 64 registers that the gate kernels are bounded to
constexpr int kNormBlocksPerSm = 8;
constexpr int kRowsPerBlock = kThreads / 32;

int64_t ceil_div(int64_t a, int64_t b) noexcept { return (a + b - 1) / b; }

cula_status check_threads(const char* op, const Operands& operands, int32_t threads) noexcept {
  if (threads < 0) return fail(CULA_ERR_INVALID_ARGUMENT, "%s: num_threads is %d; must be 0 (all) or more", op, threads);
  if (threads != 0 && operands.device_type() != kDLCPU) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: num_threads is %d; must be 0 for tensors on a GPU", op, threads);
  }
  return CULA_OK;
}

cula_status expect_shape(const char* op, const Tensor& t, const Tensor& like, int32_t rank) noexcept {
  if (t.rank == rank && std::equal(t.shape, t.shape + rank, like.shape)) return CULA_OK;
  return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s has shape %s; expected %s, from %s", op, t.name, shape_text(t).s, shape_text(rank, like.shape).s, like.name);
}

// `out` may be `in` element on element; any other overlap makes an element depend on what was already written.
cula_status expect_same_or_disjoint(const char* op, const Tensor& out, const Tensor& in) noexcept {
  if (!overlaps(out, in)) return CULA_OK;
  const bool same = out.data == in.data && out.dtype == in.dtype && out.rank == in.rank && std::equal(out.stride, out.stride + out.rank, in.stride);
  if (same) return CULA_OK;
  return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s overlaps %s in memory, but with another start, dtype or strides; it must be the same memory or other memory", op,
              out.name, in.name);
}

cula_status select(const Request& request, const Target& target, const Tensor& x, int32_t params, int32_t* kernel) noexcept {
  KernelKey key{};  // axes that these ops do not have are 0
  key.op = request.op;
  key.arch = target.arch;
  key.io = static_cast<uint8_t>(x.dtype);
  return select_kernel(request.name, key, params, kernel);
}

// 16-byte accesses of x and its result: rows of a multiple of 8 elements, everything aligned.
bool wide(const Tensor& x, const Tensor& y, int64_t row) noexcept { return row % 8 == 0 && aligned16(x) && aligned16(y); }

uint32_t code(const Tensor& t) noexcept { return static_cast<uint32_t>(t.dtype); }  // absent is 3

// A run of dimensions in front, with the strides of two tensors that are walked together.
struct Dim {
  int64_t extent, a, b;
};

// Merges neighbours that one stride can walk; extents of 1 vanish. Returns the number left; dims stand right-aligned in out[3].
void fold(const Tensor& a, const Tensor& b, int32_t rank, Dim (&out)[3]) noexcept {
  int at = 3;
  for (int i = rank - 1; i >= 0; --i) {
    if (a.shape[i] == 1) continue;
    const Dim d{a.shape[i], a.stride[i], b.stride[i]};
    if (at < 3 && d.a == out[at].a * out[at].extent && d.b == out[at].b * out[at].extent) {
      out[at].extent *= d.extent;
    } else {
      out[--at] = d;
    }
  }
  while (at > 0) out[--at] = {1, 0, 0};
}

// -------------------------------------------------------------------------------------------------------------- gate

struct Gate {
  Tensor x, g, a_log, dt_bias, beta, beta_out;
  bool channels;     // kda: [.., HV, K]; gdn: [.., HV]
  int64_t hv, dim;   // gdn: dim 1
  int64_t batch, tokens;
};

cula_status read_gate(const Request& request, const cula_gate_args& a, Operands& operands, Gate& p) noexcept {
  const char* op = request.name;
  p.channels = request.op == CULA_OP_KDA_GATE;
  CULA_TRY(operands.required("x", a.x, kFloats, &p.x));
  CULA_TRY(operands.required("g", a.g, kFloats, &p.g));
  CULA_TRY(operands.optional("A_log", a.A_log, kFloats, &p.a_log));
  CULA_TRY(operands.optional("dt_bias", a.dt_bias, kFloats, &p.dt_bias));
  CULA_TRY(operands.optional("beta", a.beta, kFloats, &p.beta));
  if (present(p.beta)) {
    CULA_TRY(operands.required("beta_out", a.beta_out, kFloats, &p.beta_out));
  } else {
    CULA_TRY(operands.forbidden("beta_out", a.beta_out, "there is no beta"));
    CULA_TRY(operands.optional("beta_out", nullptr, 0, &p.beta_out));
  }
  if (beta_kind_name(a.beta_kind) == nullptr || (a.beta_kind != CULA_BETA_VALUE) != present(p.beta)) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: beta_kind is %d%s; must be LOGIT (1) or LOGIT_TWICE (2) with beta, 0 without", op, a.beta_kind,
                present(p.beta) ? "" : " and there is no beta");
  }
  if (!(a.lower_bound == 0.0f)) {
    if (!p.channels) return fail(CULA_ERR_INVALID_ARGUMENT, "%s: lower_bound is %g, but it belongs to kda_gate", op, a.lower_bound);
    if (!(a.lower_bound >= -5.0f && a.lower_bound < 0.0f)) {
      return fail(CULA_ERR_INVALID_ARGUMENT, "%s: lower_bound is %g; must be 0 (softplus form) or in [-5,0)", op, a.lower_bound);
    }
  }
  if (a.reserved0 != 0) return fail(CULA_ERR_INVALID_ARGUMENT, "%s: reserved0 is %d; must be 0", op, a.reserved0);

  const int tail = p.channels ? 2 : 1;
  if (p.x.rank != tail + 1 && p.x.rank != tail + 2) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: x has shape %s; expected %s", op, shape_text(p.x).s,
                p.channels ? "[T,HV,K] or [B,T,HV,K]" : "[T,HV] or [B,T,HV]");
  }
  const int32_t lead = p.x.rank - tail;
  p.hv = p.x.shape[lead];
  p.dim = p.channels ? p.x.shape[lead + 1] : 1;
  p.batch = lead == 2 ? p.x.shape[0] : 1;
  p.tokens = p.x.shape[lead - 1];
  if (p.hv < 1 || p.dim < 1) return fail(CULA_ERR_INVALID_ARGUMENT, "%s: x has shape %s; HV%s must be at least 1", op, shape_text(p.x).s, p.channels ? " and K" : "");
  if (p.hv > INT32_MAX || p.dim > INT32_MAX) return fail(CULA_ERR_UNSUPPORTED, "%s: x has shape %s; HV and K must be below 2^31", op, shape_text(p.x).s);
  CULA_TRY(expect_shape(op, p.g, p.x, p.x.rank));
  CULA_TRY(require_unit_stride(op, p.x));
  CULA_TRY(require_unit_stride(op, p.g));
  CULA_TRY(require_distinct(op, p.g));
  if (present(p.a_log)) CULA_TRY(require_vector(op, p.a_log, p.hv, "HV"));
  if (present(p.dt_bias)) CULA_TRY(require_vector(op, p.dt_bias, p.hv * p.dim, p.channels ? "HV*K" : "HV"));
  if (present(p.beta)) {
    CULA_TRY(expect_shape(op, p.beta, p.x, lead + 1));
    CULA_TRY(expect_shape(op, p.beta_out, p.x, lead + 1));
    CULA_TRY(require_distinct(op, p.beta_out));
  }

  CULA_TRY(expect_same_or_disjoint(op, p.g, p.x));
  CULA_TRY(expect_same_or_disjoint(op, p.beta_out, p.beta));
  for (const Tensor* t : {&p.a_log, &p.dt_bias, &p.beta, &p.beta_out}) CULA_TRY(require_disjoint(op, p.g, *t));
  for (const Tensor* t : {&p.x, &p.a_log, &p.dt_bias}) CULA_TRY(require_disjoint(op, p.beta_out, *t));
  return check_threads(op, operands, a.num_threads);
}

bool batch_folds(const Tensor& t, int64_t tokens) noexcept {
  // With one token a batch entry is a token; a stride of 0 of an extent of 1 says nothing about the step.
  return tokens == 1 || t.stride[0] == t.stride[1] * tokens;
}

GateParams gate_params(const cula_gate_args& a, const Gate& p) noexcept {
  GateParams d{};
  d.x = p.x.data;
  d.g = p.g.data;
  d.a_log = p.a_log.data;
  d.dt_bias = p.dt_bias.data;
  d.beta = p.beta.data;
  d.beta_out = p.beta_out.data;
  d.hv = static_cast<int32_t>(p.hv);
  d.head_dim = static_cast<int32_t>(p.dim);
  d.batch = p.batch;
  d.tokens = p.tokens;
  d.lower_bound = a.lower_bound;

  const int32_t lead = p.x.rank - (p.channels ? 2 : 1);
  bool folds = lead == 2 && p.batch > 1;
  struct Strides {
    const Tensor* tensor;
    int64_t *batch, *token, *head;
  };
  const Strides all[] = {{&p.x, &d.x_b, &d.x_t, &d.x_h},
                         {&p.g, &d.g_b, &d.g_t, &d.g_h},
                         {&p.beta, &d.beta_b, &d.beta_t, &d.beta_h},
                         {&p.beta_out, &d.beta_out_b, &d.beta_out_t, &d.beta_out_h}};
  for (const Strides& s : all) folds = folds && (!present(*s.tensor) || batch_folds(*s.tensor, p.tokens));
  for (const Strides& s : all) {
    if (!present(*s.tensor)) continue;
    const Tensor& t = *s.tensor;
    *s.batch = lead == 2 && !folds ? t.stride[0] : 0;
    *s.token = folds && p.tokens == 1 ? t.stride[0] : t.stride[lead - 1];
    *s.head = t.stride[lead];
  }
  if (!p.channels) d.x_h = d.g_h = 1;  // the head is the last dimension; read() made the stride of HV = 1 a 0
  if (folds) {
    d.tokens *= p.batch;
    d.batch = 1;
  }

  GateParamsModes m;
  m.g_dtype = code(p.g);
  m.a_log_dtype = code(p.a_log);
  m.dt_bias_dtype = code(p.dt_bias);
  m.beta_dtype = code(p.beta);
  m.beta_out_dtype = code(p.beta_out);
  m.beta_kind = static_cast<uint32_t>(a.beta_kind);
  m.wide = wide(p.x, p.g, p.channels ? p.dim : p.hv);
  d.modes = m.pack();
  return d;
}

}  // namespace
}  // namespace cula::gates

cula_status cula::plan_gate(const Request& request, const void* args, Plan* plan) {
  using namespace gates;
  const cula_gate_args& a = *static_cast<const cula_gate_args*>(args);
  Operands operands(request);
  Gate p;
  CULA_TRY(read_gate(request, a, operands, p));
  plan->device_type = operands.device_type();
  plan->device_id = operands.device_id();
  if (p.x.elements == 0) return CULA_OK;
  Target target;
  CULA_TRY(resolve_target(request, operands, &target));
  int32_t kernel;
  CULA_TRY(select(request, target, p.x, kGateParamCount, &kernel));
  const GateParams params = gate_params(a, p);
  LaunchDesc& launch = plan->add(kernel, params, kGateParamsOffsets);
  if (target.arch == CULA_ARCH_CPU) {
    const int64_t heads = p.channels ? p.hv : 1;
    launch.cpu_items = p.batch * p.tokens * heads;
    launch.cpu_item_bytes = p.x.elements / launch.cpu_items * (p.x.itemsize + p.g.itemsize);
    launch.cpu_threads = a.num_threads;
    return CULA_OK;
  }
  const bool vectors = wide(p.x, p.g, p.channels ? p.dim : p.hv);
  const int64_t work = p.x.elements / (vectors ? 16 / p.x.itemsize : 1) + (present(p.beta) ? p.beta.elements : 0);
  launch.grid[0] = static_cast<uint32_t>(std::min(ceil_div(work, kThreads), int64_t{kGateBlocksPerSm} * target.sm_count));
  launch.block[0] = kThreads;
  launch.pdl = true;
  return CULA_OK;
}

// -------------------------------------------------------------------------------------------------------------- l2norm

cula_status cula::plan_l2norm(const Request& request, const void* args, Plan* plan) {
  using namespace gates;
  const cula_l2norm_args& a = *static_cast<const cula_l2norm_args*>(args);
  const char* op = request.name;
  Operands operands(request);
  Tensor x, y, rstd;
  CULA_TRY(operands.required("x", a.x, kFloats, &x));
  CULA_TRY(operands.required("y", a.y, kFloats, &y));
  CULA_TRY(operands.optional("rstd", a.rstd, kFloat32, &rstd));
  if (x.rank < 2 || x.rank > 4) return fail(CULA_ERR_INVALID_ARGUMENT, "%s: x has shape %s; expected [...,D] of rank 2 to 4", op, shape_text(x).s);
  const int64_t dim = x.shape[x.rank - 1];
  if (dim < 1) return fail(CULA_ERR_INVALID_ARGUMENT, "%s: x has shape %s; D must be at least 1", op, shape_text(x).s);
  if (dim > 1024) return fail(CULA_ERR_UNSUPPORTED, "%s: x has shape %s; D must be from 1 to 1024", op, shape_text(x).s);
  CULA_TRY(expect_shape(op, y, x, x.rank));
  CULA_TRY(require_unit_stride(op, x));
  CULA_TRY(require_unit_stride(op, y));
  CULA_TRY(require_distinct(op, y));
  if (present(rstd)) {
    CULA_TRY(expect_shape(op, rstd, x, x.rank - 1));
    if (rstd.elements > 0) CULA_TRY(require_vector(op, rstd, x.elements / dim, "rows"));
    CULA_TRY(require_disjoint(op, rstd, x));
    CULA_TRY(require_disjoint(op, rstd, y));
  }
  CULA_TRY(expect_same_or_disjoint(op, y, x));
  if (!(a.eps >= 0.0f && a.eps <= 3.4028234663852886e38f)) return fail(CULA_ERR_INVALID_ARGUMENT, "%s: eps is %g; must be 0 (1e-6) or positive and finite", op, a.eps);
  CULA_TRY(check_threads(op, operands, a.num_threads));

  plan->device_type = operands.device_type();
  plan->device_id = operands.device_id();
  if (x.elements == 0) return CULA_OK;
  Target target;
  CULA_TRY(resolve_target(request, operands, &target));
  int32_t kernel;
  CULA_TRY(select(request, target, x, kNormParamCount, &kernel));

  Dim dims[3];
  fold(x, y, x.rank - 1, dims);
  NormParams d{};
  d.x = x.data;
  d.y = y.data;
  d.rstd = rstd.data;
  d.x_0 = dims[0].a, d.x_1 = dims[1].a, d.x_2 = dims[2].a;
  d.y_0 = dims[0].b, d.y_1 = dims[1].b, d.y_2 = dims[2].b;
  d.n_0 = dims[0].extent, d.n_1 = dims[1].extent, d.n_2 = dims[2].extent;
  d.head_dim = static_cast<int32_t>(dim);
  d.eps = a.eps == 0.0f ? 1e-6f : a.eps;
  NormParamsModes m;
  m.y_dtype = code(y);
  m.wide = wide(x, y, dim);
  d.modes = m.pack();

  const int64_t rows = x.elements / dim;
  LaunchDesc& launch = plan->add(kernel, d, kNormParamsOffsets);
  if (target.arch == CULA_ARCH_CPU) {
    launch.cpu_items = rows;
    launch.cpu_item_bytes = dim * (x.itemsize + y.itemsize);
    launch.cpu_threads = a.num_threads;
    return CULA_OK;
  }
  launch.grid[0] = static_cast<uint32_t>(std::min(ceil_div(rows, kRowsPerBlock), int64_t{kNormBlocksPerSm} * target.sm_count));
  launch.block[0] = kThreads;
  launch.pdl = true;
  return CULA_OK;
}
