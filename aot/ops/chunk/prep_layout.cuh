// The prep kernel's shared memory, and how threads address tiles in it.
#pragma once
#ifdef CULA_EMULATE
#include "dev/emulate.h"
#else
#include "prep_device.cuh"
#endif
#include "record.h"

namespace cula::kda {
using namespace cula::dev;

constexpr int kThreads = 256;
// Registers: 2 blocks and a block of the state kernel (224) fit the 512 a lane of an SM's quarter.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kRegisters = 128;  // one block fits a multiprocessor of sm_120, whatever it takes: then nothing is spilled
#else
constexpr int kRegisters = 72;
#endif
// A thread of warp 6, which has nothing else to do while the scores are made and the leaves are inverted: the release of a flag
// waits for all memory traffic of the thread.
constexpr int kStorer = 192;
constexpr int kInverseBarrier = 1, kInverseThreads = 224;  // warps 0 to 6
constexpr int kGroup = 4;                   // tokens of a warp
constexpr int kGroups = kChunk / kGroup;
// Largest decay of a channel within a group, in log2, that the anchored products may see: four of them stay below 2^126.
// The safe gate reaches 28.9.
constexpr float kAnchoredRange = 30.f;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Shared memory. A tile of tokens by 128 channels in bf16 is two halves of 64 channels; a token is a 128-byte row of 16-byte
// units, permuted by the token number: conflict-free for ldmatrix and for the elementwise threads, and what wgmma reads.
constexpr int kHalf32 = kChunk * 128, kHalf16 = kSub * 128;  // bytes between the halves of a tile of 32 or 16 tokens
// Score operands. A: rows 0 to 15 k_j 2^-G_j, rows 16 to 31 k_i 2^(G_i - G_s). B: rows 16 to 31 the same with q; rows 0 to 15
// k_j to the end of sub-chunk 0, for records on the exact path only.
constexpr int kSmemA = kRecordBytes;
constexpr int kSmemB = kSmemA + 2 * kHalf32;
constexpr int kSmemInv1 = kSmemB + 2 * kHalf32;      // k_j 2^(G_s - G_j), sub 1
constexpr int kSmemTot = kSmemInv1 + 2 * kHalf16;    // float [8][128]: log2 decay of each group
constexpr int kSmemBeta = kSmemTot + kGroups * kDim * 4;  // float [32]
constexpr int kPitch = 20;                           // floats; 16x16 matrices, rows 16-byte aligned
constexpr int kMat = kSub * kPitch * 4;
constexpr int kSmemL0 = kSmemBeta + kChunk * 4;      // strict lower diagonal blocks of diag(beta) A
constexpr int kSmemL1 = kSmemL0 + kMat;
constexpr int kSmemL10 = kSmemL1 + kMat;             // and the block below the diagonal
constexpr int kSmemX0 = kSmemL10 + kMat;             // inverses of I + L0, I + L1
constexpr int kSmemX1 = kSmemX0 + kMat;
constexpr int kSmemY = kSmemL0;                      // L10 X0, when L0 is inverted
constexpr int kSmemWork = kSmemX1 + kMat;            // Work [3], InFlight
constexpr int kSmemBytes = kSmemWork + 176;          // dynamic shared memory of a launch
static_assert(kSmemBytes == 60464, "the plan's figure");

enum DtypeCode { kF32 = 0, kBf16 = 1, kFp16 = 2, kAbsent = 3 };
CULA_DEV int mode(int modes, int shift, int bits) { return (modes >> shift) & ((1 << bits) - 1); }

// A scalar in two steps: a prefetched one must not be converted, hence waited for, where it is loaded.
CULA_DEV uint32_t load_bits(const void* p, int64_t i, int dtype) {
  return dtype == kF32 ? load_u32(static_cast<const uint32_t*>(p) + i) : load_u16(static_cast<const uint16_t*>(p) + i);
}
CULA_DEV float scalar(uint32_t bits, int dtype) {
  return dtype == kF32 ? __uint_as_float(bits) : dtype == kBf16 ? __uint_as_float(bits << 16) : unpack_fp16(bits).x;
}
CULA_DEV int64_t load_index(const void* p, int64_t i, int code) {
  return code == 1 ? static_cast<int64_t>(static_cast<const int32_t*>(p)[i]) : static_cast<const int64_t*>(p)[i];
}

// 16-byte unit `unit` (8 channels) of token `row`.
CULA_DEV int tile_offset(int half_bytes, int row, int unit) {
  return (unit >> 3) * half_bytes + (row >> 3) * 1024 + (row & 7) * 128 + (((unit ^ row) & 7) << 4);
}
// The same in Kr.
CULA_DEV int kr_offset(int token, int unit) {
  return (unit >> 3) * 1024 + (token >> 3) * 2048 + (token & 7) * 128 + (((unit ^ token) & 7) << 4);
}
// Byte offset of element (i, j) of P or T.
CULA_DEV int score_offset(int i, int j) { return i * 64 + ((((j >> 3) ^ (i >> 1)) & 3) << 4) + (j & 7) * 2; }

// Where a lane's values lie in the tiles: 8 bytes (4 channels) of the group's first token; the others follow by at().
struct Lane {
  int quad, group, base;
};
CULA_DEV Lane make_lane(int tid) {
  const int quad = tid & 31, group = tid >> 5, first = (group & 1) * kGroup;
  const int base = (quad >> 4) * kHalf32 + (group >> 1) * 1024 + ((quad & 15) >> 1) * 16 + (quad & 1) * 8;
  return {quad, group, (base ^ (first << 4)) + first * 128};
}
CULA_DEV int at(int base, int t) { return (base ^ (t << 4)) + t * 128; }  // t in 0..3

CULA_DEV uint2& word_pair_at(uint8_t* p) { return *reinterpret_cast<uint2*>(p); }

#if defined(CULA_IO_FP16)
CULA_DEV float2 unpack_io(uint32_t x) { return unpack_fp16(x); }
#else
CULA_DEV float2 unpack_io(uint32_t x) { return unpack_bf16(x); }
#endif

CULA_DEV void unpack_quad(float (&x)[4], const uint2& w, float factor) {
  const float2 a = unpack_io(w.x), b = unpack_io(w.y);
  x[0] = a.x * factor; x[1] = a.y * factor; x[2] = b.x * factor; x[3] = b.y * factor;
}
CULA_DEV void store_bf16(uint8_t* p, const float (&x)[4]) { word_pair_at(p) = make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3])); }

}  // namespace cula::kda
