// Host plan of the decode ops: a checked problem -> parameters, grid and kernel. The rules of the args struct are in problem.h.
//
// The grid is that of kernel_vk.py and kernel_kv.py; tests/capi compares the numbers with theirs.
#include <limits>

#include "aot/ops/decode/problem.h"
#include "error.h"
#include "fill.h"
#include "kernels.h"
#include "tensor.h"

namespace cula::decode {
namespace {

#define CULA_PARAM(kind, name) +1
#define CULA_MODE(name, shift, bits)
constexpr int32_t kParamCount = 0
#include "aot/ops/decode/params.def"
    ;
#define CULA_PARAMS DecodeParams
#define CULA_PARAMS_DEF "aot/ops/decode/params.def"
#include "params.inc"

// ------------------------------------------------------------------------------------------------------------- tiling

// The launch rule of params.def. What is compiled in stands in kernel_*.py too; the rest is measured there.
constexpr int32_t kWarps = 4;                   // vk: of a block
constexpr int32_t kStepElements = 1024;         // vk: state elements that a warp updates in one step
constexpr int32_t kColumns[] = {32, 64};        // kv: value columns of a block; f32, bf16
constexpr int32_t kTwoStepBlocksPerSm = 3;      // vk, bf16: two steps a warp if that leaves this many blocks
constexpr uint32_t kFewBlocksSmem = 110 << 10;  // vk, sm90: asked for with at most kFewBlocksPerSm blocks
constexpr int32_t kFewBlocksPerSm = 2;
constexpr int64_t kMaxRows = 65535;             // z axis of the grid: rows of a launch
constexpr int64_t kMaxHeads = 65535;            // y axis

struct Grid {
  int32_t tiles;  // x axis
  int32_t threads;
  int32_t steps;
  uint32_t dynamic_smem;
};

Grid grid_of(const Problem& p, DType state, const Target& target) noexcept {
  const auto k = static_cast<int32_t>(p.dim_k), v = static_cast<int32_t>(p.dim_v);
  const int s = static_cast<int>(state);
  if (p.args->state_layout == CULA_STATE_KV) return {v / kColumns[s], k == 256 ? 256 : 128, 1, 0};
  const int32_t tile = kWarps * (kStepElements / k);
  const int64_t row_heads = p.n * p.hv;
  const int64_t sms = target.sm_count;
  const bool two = state == DType::bf16 && v % (2 * tile) == 0 && row_heads * (v / (2 * tile)) >= kTwoStepBlocksPerSm * sms;
  Grid grid{v / (two ? 2 * tile : tile), 32 * kWarps, two ? 2 : 1, 0};
  if (target.arch == CULA_ARCH_SM90 && row_heads * grid.tiles <= kFewBlocksPerSm * sms) grid.dynamic_smem = kFewBlocksSmem;
  return grid;
}

cula_status check_dim_v(const Problem& p) noexcept {
  if (p.dim_v % 64 == 0 && p.dim_v >= 64 && p.dim_v <= 512) return CULA_OK;
  const Tensor& v = present(p.mixed) ? p.out : p.v;
  return fail(CULA_ERR_UNSUPPORTED, "%s: %s has shape %s; head_dim_v must be a multiple of 64 from 64 to 512", p.op, v.name, shape_text(v).s);
}

DecodeParams params_of(const Problem& p, int32_t steps) noexcept {
  const cula_decode_args& a = *p.args;
  DecodeParams d;
  fill_operands(d, p, present(p.state_out) ? p.state_out : p.state);
  fill_dims(d, p);
  if (present(p.mixed)) {
    const int64_t key_bytes = p.h * p.dim_k * p.mixed.itemsize;
    d.q = p.mixed.data;
    d.k = p.mixed.data + key_bytes;
    d.v = p.mixed.data + 2 * key_bytes;
    d.q_n = d.k_n = d.v_n = p.mixed_rows.stride;
    d.q_h = d.k_h = p.h > 1 ? p.dim_k : 0;
    d.v_h = p.hv > 1 ? p.dim_v : 0;
  } else {
    d.q = p.q.data;
    d.k = p.k.data;
    d.v = p.v.data;
    d.q_n = p.q_rows.stride, d.q_h = p.q_rows.strides[0];
    d.k_n = p.k_rows.stride, d.k_h = p.k_rows.strides[0];
    d.v_n = p.v_rows.stride, d.v_h = p.v_rows.strides[0];
  }
  d.out_n = p.out_rows.stride, d.out_h = p.out_rows.strides[0];
  d.gate_n = d.gate_h = 0;
  if (a.gate_kind == CULA_GATE_CONST_HEAD) {
    d.gate_h = p.gate.stride[0];
  } else if (present(p.gate)) {
    d.gate_n = p.gate_rows.stride, d.gate_h = p.gate_rows.strides[0];
  }
  d.beta_n = d.beta_h = 0;
  if (present(p.beta)) d.beta_n = p.beta_rows.stride, d.beta_h = p.beta_rows.strides[0];

  d.read_stride = present(p.read) ? p.read.stride[0] : 0;
  d.write_stride = present(p.write) ? p.write.stride[0] : 0;

  d.n = static_cast<int32_t>(p.n);
  d.hv = static_cast<int32_t>(p.hv);
  d.group_inverse = ((int64_t{1} << 32) + d.group - 1) / d.group;
  d.steps = steps;

  DecodeParamsModes m;
  fill_modes(m, p);
  m.gate_kind = static_cast<uint32_t>(a.gate_kind);
  m.no_state = !present(p.state);
  m.delta = p.form->delta;
  m.channel_gate = p.form->channel_gate;
  d.modes = m.pack();
  return d;
}

// Rows are the z axis of the grid, so a launch takes at most 65,535. Parameters of the rows from `first` on.
cula_status shift_rows(const Problem& p, int64_t first, int64_t count, DecodeParams* d) noexcept {
  const auto at = [first](const void* data, int64_t stride, int64_t itemsize) -> const void* {
    return data == nullptr ? nullptr : static_cast<const char*>(data) + first * stride * itemsize;
  };
  const int64_t io = p.out.itemsize;
  d->q = at(d->q, d->q_n, io);
  d->k = at(d->k, d->k_n, io);
  d->v = at(d->v, d->v_n, io);
  d->out = at(d->out, d->out_n, io);
  d->gate = at(d->gate, d->gate_n, p.gate.itemsize);
  d->beta = at(d->beta, d->beta_n, p.beta.itemsize);
  d->n = static_cast<int32_t>(count);
  const bool reads_by_row = !present(p.read), writes_by_row = !present(p.read) && !present(p.write);
  if (present(p.read)) d->read_index = at(d->read_index, d->read_stride, p.read.itemsize);
  if (present(p.write)) d->write_index = at(d->write_index, d->write_stride, p.write.itemsize);
  // Without an index the kernel takes the row's number in the launch for its slot: shift the pool instead.
  if (reads_by_row && present(p.state)) {
    d->state_in = at(d->state_in, d->in_slot, p.state.itemsize);
    d->in_slots -= first;
  }
  if (writes_by_row && d->state_out != nullptr) {
    d->state_out = at(d->state_out, d->out_slot, (present(p.state_out) ? p.state_out : p.state).itemsize);
    d->out_slots -= first;
  }
  if (reads_by_row && p.args->has_null_slot) {
    if (!writes_by_row && present(p.state)) {
      return fail(CULA_ERR_UNSUPPORTED, "%s: more than %lld rows with write_index and null_slot need read_index too", p.op,
                  static_cast<long long>(kMaxRows));
    }
    if (writes_by_row) d->null_slot = p.args->null_slot < first ? std::numeric_limits<int64_t>::min() : p.args->null_slot - first;
  }
  return CULA_OK;
}

}  // namespace
}  // namespace cula::decode

cula_status cula::plan_decode(const Request& request, const void* args, Plan* plan) {
  using namespace decode;
  Problem p;
  Operands operands(request);
  CULA_TRY(read_problem(request, *static_cast<const cula_decode_args*>(args), operands, p));
  plan->device_type = operands.device_type();
  plan->device_id = operands.device_id();
  if (p.n == 0) return CULA_OK;

  CULA_TRY(check_dim_v(p));
  Target target;
  CULA_TRY(resolve_target(request, operands, &target));
  const bool cpu = target.arch == CULA_ARCH_CPU;
  const Tensor& pool = present(p.state) ? p.state : p.state_out;
  const DType state = present(pool) ? static_cast<DType>(pool.dtype) : DType::f32;
  KernelKey key{};
  key.op = request.op;
  key.arch = target.arch;
  key.io = static_cast<uint8_t>(p.out.dtype);
  key.state = static_cast<uint8_t>(state);
  key.layout = static_cast<uint8_t>(p.args->state_layout);
  if (p.dim_k > UINT16_MAX) {
    return fail(CULA_ERR_UNSUPPORTED, "%s: head_dim_k %lld is not built; no kernel has more than %d", p.op, static_cast<long long>(p.dim_k), UINT16_MAX);
  }
  key.k = static_cast<uint16_t>(p.dim_k);
  int32_t kernel;
  CULA_TRY(select_kernel(request.name, key, kParamCount, &kernel));

  if (cpu) {
    LaunchDesc& launch = plan->add(kernel, params_of(p, 1), kDecodeParamsOffsets);
    launch.cpu_items = p.n * p.hv;
    launch.cpu_item_bytes = 2 * p.dim_k * p.dim_v * (state == DType::f32 ? 4 : 2);
    launch.cpu_threads = p.args->num_threads;
    return CULA_OK;
  }
  if (p.hv > kMaxHeads || p.n > kMaxRows * CULA_MAX_LAUNCHES) {
    return fail(CULA_ERR_UNSUPPORTED, "%s: out has shape %s; on a GPU HV must be at most %lld and N at most %lld", p.op, shape_text(p.out).s,
                static_cast<long long>(kMaxHeads), static_cast<long long>(kMaxRows * CULA_MAX_LAUNCHES));
  }
  const Grid grid = grid_of(p, state, target);
  const DecodeParams params = params_of(p, grid.steps);
  for (int64_t first = 0; first < p.n; first += kMaxRows) {
    const int64_t count = p.n - first < kMaxRows ? p.n - first : kMaxRows;
    DecodeParams part = params;
    if (p.n > kMaxRows) CULA_TRY(shift_rows(p, first, count, &part));
    LaunchDesc& launch = plan->add(kernel, part, kDecodeParamsOffsets);
    launch.grid[0] = static_cast<uint32_t>(grid.tiles);
    launch.grid[1] = static_cast<uint32_t>(p.hv);
    launch.grid[2] = static_cast<uint32_t>(count);
    launch.block[0] = static_cast<uint32_t>(grid.threads);
    launch.dynamic_smem = grid.dynamic_smem;
    launch.pdl = true;
  }
  return CULA_OK;
}
