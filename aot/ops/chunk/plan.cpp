// Host plan of kda_prefill: a checked call -> which kernels, grids, parameters, workspace. README.md has the figures behind the rules.
//
//   prep           one record a (chunk of 32 tokens, value head) into the workspace
//   [scan, carry]  with segments: the states between them, where a segment cannot start from its warm-up chunks (state.py)
//   state          the recurrence: outputs and final states
#include <algorithm>
#include <cmath>
#include <limits>

#include "aot/ops/chunk/plan_cpu.h"
#include "aot/ops/chunk/problem.h"
#include "aot/ops/chunk/record.h"
#include "error.h"
#include "kernels.h"
#include "tensor.h"

namespace cula::chunk {
namespace {

#define CULA_PARAM(kind, name) +1
#define CULA_MODE(name, shift, bits)
constexpr int32_t kPrepParamCount = 0
#include "aot/ops/chunk/params_prep.def"
    ;
#define CULA_PARAMS PrepParams
#define CULA_PARAMS_DEF "aot/ops/chunk/params_prep.def"
#include "params.inc"

#define CULA_PARAM(kind, name) +1
#define CULA_MODE(name, shift, bits)
constexpr int32_t kStateParamCount = 0
#include "aot/ops/chunk/params_state.def"
    ;
#define CULA_PARAMS StateParams
#define CULA_PARAMS_DEF "aot/ops/chunk/params_state.def"
#include "params.inc"

#define CULA_PARAM(kind, name) +1
#define CULA_MODE(name, shift, bits)
constexpr int32_t kCarryParamCount = 0
#include "aot/ops/chunk/params_carry.def"
    ;
#define CULA_PARAMS CarryParams
#define CULA_PARAMS_DEF "aot/ops/chunk/params_carry.def"
#include "params.inc"

// What is compiled into the kernels; tests/capi compares it with their sources. Shared memory is that of the kernel's row.
constexpr int64_t kHeadDim = kda::kDim;
constexpr uint32_t kPrepThreads = 256, kStateThreads = 128, kCarryThreads = 128;
constexpr int64_t kStateBlocks = 2, kScanBlocks = 4, kCarryBlocks = 16;  // of a chain: a sequence and value head
constexpr int64_t kCarryBytes = 2 * kHeadDim * kHeadDim * 4;             // of a chain and segment
constexpr size_t kAlign = 128;                                           // of each part of the workspace
static_assert(kda::kChunk == kChunkTokens);

// Blocks of prep on a multiprocessor. Of 228 KB of shared memory two fit beside a state block, alone three. Of sm120's 100 KB one
// block of either kernel fits: side by side then means that state blocks take the multiprocessors that prep leaves first.
struct PrepBlocks {
  int64_t beside, alone;
};
PrepBlocks prep_blocks(int32_t arch) noexcept { return arch == CULA_ARCH_SM120 ? PrepBlocks{1, 1} : PrepBlocks{2, 3}; }

// While the prep kernel runs, block 0 of scan and of carry keep a multiprocessor each from the state kernel.
constexpr int64_t kLingering = 4;

// The time of a chunk in a chain is the unit (0.8 us on an H200). A segment more costs the carry kernel a step, and segments at
// all cost the launches of scan and carry (measured at 8 heads, 8,192 tokens, 5 segments: 12 us of carry, two gaps of 2 us).
constexpr double kCarryStep = 5, kSegmentLaunches = 8;

// Of a chained segment: to hand a state on takes about 3 chunks' time.
constexpr int64_t kChainedChunks = 32;

int64_t ceil_div(int64_t a, int64_t b) noexcept { return (a + b - 1) / b; }

// ---------------------------------------------------------------------------------------------------------- choices

struct Choice {
  bool overlap;        // prep and what follows it side by side
  bool chained;        // segments hand their states on: no scan, no carry
  int32_t segments;
  int32_t head_group;  // heads whose chains run at the same time
};

// Whether segments start from warm-up chunks is known on the device only. With them a chain takes its longest segment, without
// them every chunk is walked twice, in scan and in state. So: cut only where the second pays too, and then the best sum of both,
// with the state kernel in one wave. With cu_seqlens the host knows the mean length only.
int32_t choose_segments(int64_t chains, int64_t chunks_of_sequence, int64_t sms) noexcept {
  const int64_t most = std::min<int64_t>({kMaxSegments, (sms - kLingering) / (kStateBlocks * chains), chunks_of_sequence});
  const auto serial = static_cast<double>(chunks_of_sequence);
  int32_t best = 1;
  double least = std::numeric_limits<double>::infinity();
  for (int64_t p = 2; p <= most; ++p) {
    const auto longest = static_cast<double>(ceil_div(chunks_of_sequence, p));
    const double exact = 2 * longest + kCarryStep * static_cast<double>(p - 2) + kSegmentLaunches, both = exact + longest;
    if (exact < serial && both < least) least = both, best = static_cast<int32_t>(p);
  }
  return best;
}

Choice choose(const Problem& p, int64_t sms) noexcept {
  const int64_t chains = p.n * p.hv;
  Choice c;
  const int64_t mean_tokens = present(p.cu) ? p.tokens / p.n : p.tokens;
  const int64_t mean_chunks = ceil_div(mean_tokens, kChunkTokens);
  c.segments = p.args->segments > 0                         ? p.args->segments
               : p.args->variant == CULA_PREFILL_CHAIN ? static_cast<int32_t>(std::clamp<int64_t>(ceil_div(mean_chunks, kChainedChunks), 1, kMaxSegments))
                                                       : choose_segments(chains, mean_chunks, sms);
  // Side by side wins while the chains are one wave of state blocks.
  c.overlap = p.args->variant == CULA_PREFILL_AUTO ? c.segments > 1 || kStateBlocks * chains <= sms : p.args->variant != CULA_PREFILL_SERIAL;
  c.chained = p.args->variant == CULA_PREFILL_CHAIN;
  // Chained: a segment of every chain, then the next segment of every chain, and the records in the order of the tokens.
  const int64_t at_once = c.chained ? p.hv : std::max<int64_t>(sms / kStateBlocks, 1);
  c.head_group = static_cast<int32_t>(ceil_div(p.hv, ceil_div(p.hv, at_once)));
  return c;
}

// -------------------------------------------------------------------------------------------------------- workspace

struct Workspace {
  uint32_t flag_words;
  int64_t chunks;  // virtual ones: of sequence s the first is s * ceil(T / 32), with cu_seqlens cu[s] / 32 + s
  const char *records, *flags, *carry;
  size_t bytes;
};

// Of the kernels' 32-bit numbers, and so that no product of lay_out wraps. p.n and p.hv are below 2^31 each.
cula_status check_limits(const Problem& p, const Choice& c) noexcept {
  constexpr int64_t kMost = int64_t{1} << 31;
  const int64_t per_sequence = p.tokens / kChunkTokens + 1;
  int64_t chunks, records, chains, blocks;
  const bool fits = !__builtin_mul_overflow(per_sequence, present(p.cu) ? 1 : p.n, &chunks) && !__builtin_add_overflow(chunks, p.n + c.segments, &chunks) &&
                    !__builtin_mul_overflow(chunks, p.hv, &records) && records < kMost && !__builtin_mul_overflow(p.n, p.hv, &chains) && chains < kMost &&
                    !__builtin_mul_overflow(chains, std::max(kCarryBlocks, kScanBlocks * c.segments), &blocks) && blocks < kMost;
  if (fits) return CULA_OK;
  return fail(CULA_ERR_UNSUPPORTED, "%s: v has shape %s, with %lld sequences and %d segments; chunks * HV and the blocks of a launch must be below 2^31 on a GPU",
              p.op, shape_text(p.v).s, static_cast<long long>(p.n), c.segments);
}

Workspace lay_out(const Problem& p, const Choice& c, const void* base) noexcept {
  Workspace w;
  w.chunks = present(p.cu) ? p.tokens / kChunkTokens + p.n : p.n * ceil_div(p.tokens, kChunkTokens);
  const auto align = [](size_t x) { return (x + kAlign - 1) / kAlign * kAlign; };
  const size_t count = static_cast<size_t>(w.chunks) * static_cast<size_t>(p.hv);
  const size_t record_bytes = count * kda::kRecordBytes, chains = static_cast<size_t>(p.n * p.hv), segments = static_cast<size_t>(c.segments);
  w.flag_words = static_cast<uint32_t>(count + chains * kStateBlocks * (1 + (c.chained ? segments : 0)));  // below 2^32: check_limits
  const size_t flag_bytes = align(size_t{w.flag_words} * sizeof(uint32_t));
  const size_t carry_bytes = c.segments > 1 ? chains * segments * kCarryBytes / (c.chained ? 2 : 1) : 0;
  // No arithmetic on a NULL base: a query has none, and its parameters go nowhere.
  const uintptr_t at = reinterpret_cast<uintptr_t>(base);
  w.records = reinterpret_cast<const char*>(at);
  w.flags = reinterpret_cast<const char*>(at + record_bytes);
  w.carry = reinterpret_cast<const char*>(at + record_bytes + flag_bytes);
  w.bytes = record_bytes + flag_bytes + carry_bytes;
  return w;
}

// ------------------------------------------------------------------------------------------------- what a GPU refuses

// Rows start at multiples of `bytes`: address and the strides of B, T and head.
cula_status check_rows(const Problem& p, const Tensor& t, const TokenStrides& at, int64_t bytes) noexcept {
  const int64_t size = t.itemsize;
  const uint64_t bits = reinterpret_cast<uintptr_t>(t.data) | static_cast<uint64_t>(at.b * size) | static_cast<uint64_t>(at.t * size) |
                        static_cast<uint64_t>(at.h * size);
  if (__builtin_expect(bits % static_cast<uint64_t>(bytes) == 0, 1)) return CULA_OK;
  return fail(CULA_ERR_UNSUPPORTED,
              "%s: %s is at %#llx with strides %lld, %lld and %lld of batch, token and head, of %s; on a GPU address and strides must be multiples of %lld bytes",
              p.op, t.name, static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(t.data)), static_cast<long long>(at.b),
              static_cast<long long>(at.t), static_cast<long long>(at.h), element_name(t.dtype), static_cast<long long>(bytes));
}

cula_status check_gpu(const Problem& p) noexcept {
  if (p.q.dtype == Element::f32) return fail(CULA_ERR_UNSUPPORTED, "%s: q is float32; on a GPU q, k, v and out must be bf16 or fp16", p.op);
  if (p.dim_k != kHeadDim || p.dim_v != kHeadDim) {
    return fail(CULA_ERR_UNSUPPORTED, "%s: head_dim_k is %lld and head_dim_v %lld; on a GPU built for %d and %d", p.op, static_cast<long long>(p.dim_k),
                static_cast<long long>(p.dim_v), static_cast<int>(kHeadDim), static_cast<int>(kHeadDim));
  }
  CULA_TRY(check_rows(p, p.v, p.v_at, 16));
  CULA_TRY(check_rows(p, p.out, p.out_at, 16));
  CULA_TRY(check_rows(p, p.q, p.q_at, 4 * p.q.itemsize));
  CULA_TRY(check_rows(p, p.k, p.k_at, 4 * p.k.itemsize));
  CULA_TRY(check_rows(p, p.gate, p.gate_at, 4 * p.gate.itemsize));
  if (present(p.dt_bias) && p.dt_bias.dtype == Element::f32 && reinterpret_cast<uintptr_t>(p.dt_bias.data) % 16 != 0) {
    return fail(CULA_ERR_UNSUPPORTED, "%s: dt_bias is at %#llx; on a GPU the address of a float32 dt_bias must be a multiple of 16 bytes", p.op,
                static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(p.dt_bias.data)));
  }
  return CULA_OK;
}

// ------------------------------------------------------------------------------------------------------- parameters

PrepParams prep_params(const Problem& p, const Choice& c, const Workspace& w) noexcept {
  const cula_prefill_args& a = *p.args;
  PrepParams d;
  d.q = p.q.data, d.k = p.k.data, d.gate = p.gate.data, d.a_log = p.a_log.data, d.dt_bias = p.dt_bias.data, d.beta = p.beta.data;
  d.cu_seqlens = p.cu.data;
  d.records = w.records, d.flags = w.flags;
  d.q_b = p.q_at.b, d.q_t = p.q_at.t, d.q_h = p.q_at.h;
  d.k_b = p.k_at.b, d.k_t = p.k_at.t, d.k_h = p.k_at.h;
  d.gate_b = p.gate_at.b, d.gate_t = p.gate_at.t, d.gate_h = p.gate_at.h;
  d.beta_b = p.beta_at.b, d.beta_t = p.beta_at.t, d.beta_h = p.beta_at.h;
  d.tokens = p.tokens;
  d.hv = static_cast<int32_t>(p.hv);
  d.group = static_cast<int32_t>(p.hv / p.h);
  d.head_group = c.head_group;
  d.sequences = static_cast<int32_t>(p.n);
  d.chunks = static_cast<int32_t>(w.chunks);
  d.segments = p.n == 1 && !c.chained ? c.segments : 1;
  d.cut = a.exact ? 1 : c.segments;
  d.flag_words = static_cast<int32_t>(w.flag_words);
  d.scale = scale_of(p);
  d.lower_bound = a.lower_bound;
  PrepParamsModes m;
  fill_activation_modes(m, p);
  m.gate_raw = a.gate_kind == CULA_GATE_RAW;
  m.cu_dtype = index_code(p.cu);
  d.modes = m.pack();
  return d;
}

StateParams state_params(const Problem& p, const Choice& c, const Workspace& w) noexcept {
  StateParams d;
  d.records = w.records, d.flags = w.flags, d.carry = w.carry;
  d.v = p.v.data, d.out = p.out.data, d.cu_seqlens = p.cu.data;
  d.state_in = p.state.data, d.state_out = p.state_out.data;
  d.read_index = p.read.data, d.write_index = p.write.data;
  d.v_b = p.v_at.b, d.v_t = p.v_at.t, d.v_h = p.v_at.h;
  d.out_b = p.out_at.b, d.out_t = p.out_at.t, d.out_h = p.out_at.h;
  fill_pool(p.state, d.in_slot, d.in_h, d.in_slots);
  fill_pool(p.state_out, d.out_slot, d.out_state_h, d.out_slots);
  d.null_slot = null_slot_of(p);
  d.tokens = p.tokens;
  d.hv = static_cast<int32_t>(p.hv);
  d.head_group = c.head_group;
  d.sequences = static_cast<int32_t>(p.n);
  d.chunks = static_cast<int32_t>(w.chunks);
  d.segments = c.segments;
  d.checkpoints = p.checkpoints.data, d.checkpoint_index = p.checkpoint_index.data;
  fill_pool(p.checkpoints, d.checkpoint_slot, d.checkpoint_h, d.checkpoint_slots);
  d.checkpoint_columns = p.checkpoint_columns;
  d.checkpoint_chunks = p.args->checkpoint_interval / kChunkTokens;
  StateParamsModes m;
  m.cu_dtype = index_code(p.cu);
  m.read_dtype = index_code(p.read);
  m.write_dtype = index_code(p.write);
  m.checkpoint_dtype = index_code(p.checkpoint_index);
  m.chained = c.chained;
  d.modes = m.pack();
  return d;
}

// ---------------------------------------------------------------------------------------------------------- launches

struct Kernels {
  int32_t prep, state, scan, carry;
};

cula_status select_kernels(const Request& request, const Problem& p, const Target& target, const Choice& c, Kernels* kernels) noexcept {
  KernelKey key{};
  key.op = request.op;
  key.arch = target.arch;
  key.io = static_cast<uint8_t>(p.q.dtype);
  key.k = key.v = kHeadDim;
  key.variant = p.gate.dtype == Element::f32 ? Variant::prep_gf32 : Variant::prep;
  CULA_TRY(select_kernel(request.name, key, kPrepParamCount, &kernels->prep));
  key.state = static_cast<uint8_t>(state_dtype(p));
  key.layout = static_cast<uint8_t>(p.args->state_layout);
  key.variant = present(p.checkpoints) ? Variant::state_checkpoints : Variant::state;
  CULA_TRY(select_kernel(request.name, key, kStateParamCount, &kernels->state));
  if (c.segments == 1 || c.chained) return CULA_OK;
  key.variant = Variant::scan;
  CULA_TRY(select_kernel(request.name, key, kStateParamCount, &kernels->scan));
  key.io = key.state = static_cast<uint8_t>(DType::f32);
  key.layout = 0;
  key.variant = Variant::carry;
  return select_kernel(request.name, key, kCarryParamCount, &kernels->carry);
}

template <class Params, size_t N>
void add(Plan* plan, int32_t kernel, const Params& params, const uint16_t (&offsets)[N], int64_t blocks, uint32_t threads, bool pdl) noexcept {
  LaunchDesc& launch = plan->add(kernel, params, offsets);
  launch.grid[0] = static_cast<uint32_t>(blocks);
  launch.block[0] = threads;
  launch.dynamic_smem = static_cast<uint32_t>(kKernels[kernel].max_dynamic_smem);
  launch.pdl = pdl;
}

cula_status plan_gpu(const Request& request, const Problem& p, const Target& target, Plan* plan) noexcept {
  CULA_TRY(check_gpu(p));
  Choice c = choose(p, target.sm_count);
  const bool empty = p.batch == 0 || p.tokens == 0;
  if (empty) c.segments = 1;  // initial states are copied: there is nothing to cut
  Kernels kernels;
  CULA_TRY(select_kernels(request, p, target, c, &kernels));
  CULA_TRY(check_limits(p, c));
  const Workspace w = lay_out(p, c, request.workspace);
  const int64_t chains = p.n * p.hv;
  const StateParams state = state_params(p, c, w);
  if (empty) {
    if (present(p.state_out)) add(plan, kernels.state, state, kStateParamsOffsets, kStateBlocks * chains, kStateThreads, false);
    return CULA_OK;
  }
  plan->workspace_bytes = w.bytes;
  plan->workspace_align = kAlign;
  // Only the first launch waits for what went before it in the stream. The others start early and wait for their inputs, and the
  // last of them ends after the first.
  const PrepBlocks blocks = prep_blocks(target.arch);
  const int64_t most = (c.overlap ? blocks.beside : blocks.alone) * target.sm_count;
  add(plan, kernels.prep, prep_params(p, c, w), kPrepParamsOffsets, std::min(w.chunks * p.hv, most), kPrepThreads, false);
  if (c.segments > 1 && !c.chained) {
    CarryParams carry;
    carry.carry = w.carry, carry.flags = w.flags, carry.cu_seqlens = p.cu.data;
    carry.tokens = p.tokens;
    carry.hv = static_cast<int32_t>(p.hv), carry.chunks = static_cast<int32_t>(w.chunks), carry.segments = c.segments;
    CarryParamsModes modes;
    modes.cu_dtype = index_code(p.cu);
    carry.modes = modes.pack();
    add(plan, kernels.scan, state, kStateParamsOffsets, kScanBlocks * chains * (c.segments - 1), kStateThreads, c.overlap);
    add(plan, kernels.carry, carry, kCarryParamsOffsets, kCarryBlocks * chains, kCarryThreads, c.overlap);
  }
  add(plan, kernels.state, state, kStateParamsOffsets, kStateBlocks * chains * c.segments, kStateThreads, c.overlap);
  return CULA_OK;
}

}  // namespace
}  // namespace cula::chunk

cula_status cula::plan_prefill(const Request& request, const void* args, Plan* plan) {
  using namespace chunk;
  Problem p;
  Operands operands(request);
  CULA_TRY(read_problem(request, *static_cast<const cula_prefill_args*>(args), operands, p));
  plan->device_type = operands.device_type();
  plan->device_id = operands.device_id();
  if (p.n == 0) return CULA_OK;
  Target target;
  CULA_TRY(resolve_target(request, operands, &target));
  if (target.arch == CULA_ARCH_CPU) return plan_cpu(request, p, plan);
  return plan_gpu(request, p, target, plan);
}
