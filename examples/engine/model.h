// A fake linear-attention model: seeded random weights, one KDA mixer a layer, and a vocabulary that is read off the output.
//
// A real model would run projections, convolutions and an MLP around each mixer. Here the projection of every token of the
// small vocabulary is computed once at load time, so that the time of a step is the time of its decode calls. What reaches
// the mixer is shaped as in a real engine: one row a token, bf16, [ q | k | v | gate | beta ] with padding at its end.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace engine {

inline uint16_t to_bf16(float x) {  // round to nearest even; no NaN comes in
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float from_bf16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

struct Shape {
  int64_t layers = 4;
  int64_t heads = 2;        // H, of q and k
  int64_t value_heads = 4;  // HV, of v, gate, beta and the state
  int64_t k = 128;
  int64_t v = 128;

  int64_t mixed() const { return 2 * heads * k + value_heads * v; }  // q, k, v
  int64_t gate_at() const { return mixed(); }
  int64_t beta_at() const { return mixed() + value_heads * k; }
  int64_t width() const { return (beta_at() + value_heads + 7) / 8 * 8; }  // rows stay 16-byte aligned
  int64_t out() const { return value_heads * v; }
  int64_t state() const { return value_heads * v * k; }  // of one layer and slot
  int64_t vocabulary() const { return out(); }
};

class Model {
 public:
  static constexpr float kLowerBound = -5.0f;  // KDA's sigmoid gate: g = lower_bound * sigmoid(exp(A_log) (x + dt_bias))

  Model(const Shape& shape, uint64_t seed);

  // The projected row of `token` at the mixer of `layer`: shape.width() bf16 values.
  const uint16_t* row(int64_t layer, int32_t token) const {
    return rows_.data() + (layer * shape_.vocabulary() + token) * shape_.width();
  }
  const float* A_log(int64_t layer) const { return A_log_.data() + layer * shape_.value_heads; }
  const float* dt_bias(int64_t layer) const { return dt_bias_.data() + layer * shape_.value_heads * shape_.k; }

  // Greedy sampling: the last mixer's output, bf16 [HV*V], is taken for the logits.
  int32_t sample(const uint16_t* out) const;

 private:
  Shape shape_;
  std::vector<uint16_t> rows_;  // [layers, vocabulary, width]
  std::vector<float> A_log_;    // [layers, HV]
  std::vector<float> dt_bias_;  // [layers, HV, K]
};

// Uniform numbers from a seed, the same on every machine (std::normal_distribution is not).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {  // splitmix64
    uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  float uniform() { return static_cast<float>(next() >> 40) * 0x1p-24f; }                 // [0, 1)
  float symmetric() { return (uniform() - 0.5f) * 3.4641016f; }                            // mean 0, variance 1
  int32_t range(int32_t low, int32_t high) { return low + static_cast<int32_t>(next() % static_cast<uint64_t>(high - low + 1)); }

 private:
  uint64_t state_;
};

}  // namespace engine
