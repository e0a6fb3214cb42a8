// The record: what the prep kernel writes and the state kernel reads, one per (chunk, value head). RECORD.md describes it.
#pragma once

namespace cula::kda {

constexpr int kChunk = 32;  // tokens
constexpr int kSub = 16;    // tokens of a sub-chunk: exponents are anchored at its start
constexpr int kDim = 128;   // K = V

// Byte offsets inside a record.
constexpr int kRecKd = 0;                                   // -Kd  [32,128] bf16, K-major, 128-byte swizzle
constexpr int kRecQd = kRecKd + kChunk * kDim * 2;          //  Qd  [32,128] bf16, K-major, 128-byte swizzle
constexpr int kRecKr = kRecQd + kChunk * kDim * 2;          //  Kr  [32,128] bf16, MN-major, 128-byte swizzle
constexpr int kRecP = kRecKr + kChunk * kDim * 2;           //  P   [32,32]  bf16, K-major, 64-byte swizzle
constexpr int kRecT = kRecP + kChunk * kChunk * 2;          //  T   [32,32]  bf16, K-major, 64-byte swizzle
constexpr int kRecDecay = kRecT + kChunk * kChunk * 2;      //  2^G_C [128] float32, in the order of the wgmma fragment
constexpr int kRecordBytes = kRecDecay + kDim * 4;
static_assert(kRecordBytes == 29184 && kRecordBytes % 128 == 0, "RECORD.md, state_parts.py");

constexpr int kMaxSegments = 64;  // parts that a sequence may be cut into
// A segment whose last kWarm chunks before it forget enough starts from them, with S = 0, and needs nothing of what came
// before. A chunk's flag says how much: 1 + floor(-log2 of a bound of ||dS_end / dS_start||). kForgotten: the sum it takes.
constexpr int kWarm = 2;
constexpr int kForgotten = 32;

}  // namespace cula::kda
