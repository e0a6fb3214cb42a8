// The prep kernel as a CPU function, for prep_check.py: g++ -shared -DCULA_EMULATE [-DCULA_IO_FP16] [-DCULA_GATE_F32]
#include "../kda_carry.cu"
#include "../kda_prep.cu"

namespace {
alignas(1024) uint8_t shared_memory[cula::kda::kSmemBytes];
void block(void* arg) { cula::kda::prep(*static_cast<const cula::kda::Args*>(arg), shared_memory); }
}  // namespace

// pointers: the seven inputs, records, flags; strides: as in params_prep.def, q_b to tokens; numbers: hv to modes
extern "C" void emulate_prep(void* const* p, const int64_t* s, const int32_t* n, float scale, float lower_bound, int grid) {
  cula::kda::Args a{p[0], p[1], p[2], p[3], p[4], p[5], p[6], static_cast<uint8_t*>(p[7]), static_cast<uint32_t*>(p[8]),
                    s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11], s[12], n[0], n[1], n[2], n[3], n[4], n[5], n[6], static_cast<uint32_t>(n[7]), n[8], scale, lower_bound};
  std::mt19937 rng(1);
  cula::emu::grid_dim.x = grid;
  for (int b = 0; b < grid; ++b) {
    memset(shared_memory, 0xff, sizeof shared_memory);  // NaN
    cula::emu::block_idx.x = b;
    cula::emu::run_block(block, &a, cula::kda::kThreads, rng);
  }
}

namespace {
alignas(1024) float carry_memory[cula::kda::kCarrySmemBytes / 4];
void carry_block(void* arg) { cula::kda::carry(*static_cast<cula::kda::CarryArgs*>(arg), carry_memory); }
}  // namespace

extern "C" void emulate_carry(float* base, const uint32_t* flags, const void* cu, int64_t tokens, int hv, int chunks, int segments, int cu_code, int chains) {
  cula::kda::CarryArgs c{base, flags, cu, tokens, hv, chunks, segments, cu_code};
  std::mt19937 rng(2);
  for (int b = 0; b < chains * 16; ++b) {
    memset(carry_memory, 0xff, sizeof carry_memory);
    cula::emu::block_idx.x = b;
    cula::emu::run_block(carry_block, &c, cula::kda::kCarryThreads, rng);
  }
}
