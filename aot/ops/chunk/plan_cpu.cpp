// Host plan of kda_prefill on the CPU: one kernel, whose work items are (head, sequence, block of value columns).
#include "aot/ops/chunk/plan_cpu.h"

#include "error.h"
#include "fill.h"
#include "kernels.h"
#include "tensor.h"

namespace cula::chunk {
namespace {

#define CULA_PARAM(kind, name) +1
#define CULA_MODE(name, shift, bits)
constexpr int32_t kParamCount = 0
#include "aot/ops/chunk/params_cpu.def"
    ;
#define CULA_PARAMS CpuParams
#define CULA_PARAMS_DEF "aot/ops/chunk/params_cpu.def"
#include "params.inc"

// Value columns of an item. Its state is on the thread's stack (128 KB for 256 channels), so there are at most 128. Each block of
// a chain makes the scores of its chunks anew, a fifth of the work for 128 columns.
constexpr int64_t kColumns = 128;

CpuParams params_of(const Problem& p) noexcept {
  const cula_prefill_args& a = *p.args;
  CpuParams d;
  fill_operands(d, p, p.state_out);
  fill_dims(d, p);
  d.q = p.q.data, d.k = p.k.data, d.v = p.v.data;
  d.cu_seqlens = p.cu.data;
  d.checkpoints = p.checkpoints.data, d.checkpoint_index = p.checkpoint_index.data;
  fill_pool(p.checkpoints, d.checkpoint_slot, d.checkpoint_h, d.checkpoint_slots);
  d.q_b = p.q_at.b, d.q_t = p.q_at.t, d.q_h = p.q_at.h;
  d.k_b = p.k_at.b, d.k_t = p.k_at.t, d.k_h = p.k_at.h;
  d.v_b = p.v_at.b, d.v_t = p.v_at.t, d.v_h = p.v_at.h;
  d.out_b = p.out_at.b, d.out_t = p.out_at.t, d.out_h = p.out_at.h;
  d.gate_b = p.gate_at.b, d.gate_t = p.gate_at.t, d.gate_h = p.gate_at.h;
  d.beta_b = p.beta_at.b, d.beta_t = p.beta_at.t, d.beta_h = p.beta_at.h;
  d.checkpoint_interval = a.checkpoint_interval;
  d.checkpoint_columns = p.checkpoint_columns;
  d.tokens = p.tokens;
  d.sequences = static_cast<int32_t>(p.n);
  d.columns = static_cast<int32_t>(kColumns);
  d.blocks = static_cast<int32_t>((p.dim_v + kColumns - 1) / kColumns);
  CpuParamsModes m;
  fill_modes(m, p);
  m.gate_raw = a.gate_kind == CULA_GATE_RAW;
  m.cu_dtype = index_code(p.cu);
  m.checkpoint_dtype = index_code(p.checkpoint_index);
  d.modes = m.pack();
  return d;
}

// Time of an item as bytes of memory traffic, what the grain of the thread pool is counted in: its state, and a token of 128 x 128
// takes as long as 32 KB. With cu_seqlens the host knows the mean length only.
int64_t cost_of_item(const Problem& p) noexcept {
  constexpr int64_t kEnough = int64_t{1} << 30;
  const int64_t state = p.dim_k * kColumns;
  const int64_t tokens = present(p.cu) ? p.tokens / p.n + 1 : p.tokens;
  return tokens < kEnough / state ? (8 + 2 * tokens) * state : kEnough;
}

}  // namespace

cula_status plan_cpu(const Request& request, const Problem& p, Plan* plan) noexcept {
  // Above 512 the limit is no need of the kernel's: it is that of decode, which goes on from these states.
  if (p.dim_v % 64 != 0 || p.dim_v > 512) {
    return fail(CULA_ERR_UNSUPPORTED, "%s: v has shape %s; on the CPU head_dim_v must be a multiple of 64 from 64 to 512", p.op, shape_text(p.v).s);
  }
  if (p.dim_k > UINT16_MAX) {
    return fail(CULA_ERR_UNSUPPORTED, "%s: head_dim_k %lld is not built; no kernel has more than %d", p.op, static_cast<long long>(p.dim_k), UINT16_MAX);
  }
  KernelKey key{};
  key.op = request.op;
  key.arch = CULA_ARCH_CPU;
  key.io = static_cast<uint8_t>(p.q.dtype);
  key.state = static_cast<uint8_t>(state_dtype(p));
  key.layout = static_cast<uint8_t>(p.args->state_layout);
  key.k = static_cast<uint16_t>(p.dim_k);
  int32_t kernel;
  CULA_TRY(select_kernel(request.name, key, kParamCount, &kernel));
  if ((p.batch == 0 || p.tokens == 0) && !present(p.state_out)) return CULA_OK;  // nothing is written
  const CpuParams params = params_of(p);
  int64_t items;
  if (__builtin_mul_overflow(p.n * p.hv, params.blocks, &items)) {  // n and hv are below 2^31 each
    return fail(CULA_ERR_UNSUPPORTED, "%s: v has shape %s, with %lld sequences; that is more than 2^63 parts of work", p.op, shape_text(p.v).s,
                static_cast<long long>(p.n));
  }
  LaunchDesc& launch = plan->add(kernel, params, kCpuParamsOffsets);
  launch.cpu_items = items;
  launch.cpu_item_bytes = cost_of_item(p);
  launch.cpu_threads = p.args->num_threads;
  return CULA_OK;
}

}  // namespace cula::chunk
