#include "model.h"

namespace engine {

Model::Model(const Shape& shape, uint64_t seed) : shape_(shape) {
  constexpr int64_t kEmbedding = 32;
  Random random(seed);
  const int64_t vocabulary = shape.vocabulary(), width = shape.width();

  std::vector<float> embedding(static_cast<size_t>(vocabulary * kEmbedding));
  for (float& x : embedding) x = random.symmetric();

  rows_.resize(static_cast<size_t>(shape.layers * vocabulary * width));
  std::vector<float> projection(static_cast<size_t>(kEmbedding * width)), row(static_cast<size_t>(width));
  const float unit = 1.0f / std::sqrt(static_cast<float>(kEmbedding));
  for (int64_t layer = 0; layer < shape.layers; ++layer) {
    for (float& x : projection) x = random.symmetric() * unit;
    for (int64_t token = 0; token < vocabulary; ++token) {
      std::fill(row.begin(), row.end(), 0.0f);
      for (int64_t e = 0; e < kEmbedding; ++e) {
        const float x = embedding[static_cast<size_t>(token * kEmbedding + e)];
        const float* weights = projection.data() + e * width;
        for (int64_t i = 0; i < width; ++i) row[static_cast<size_t>(i)] += x * weights[i];
      }
      uint16_t* target = rows_.data() + (layer * vocabulary + token) * width;
      for (int64_t i = 0; i < width; ++i) target[i] = to_bf16(row[static_cast<size_t>(i)]);
    }
  }

  A_log_.resize(static_cast<size_t>(shape.layers * shape.value_heads));
  for (float& x : A_log_) x = random.symmetric() * 0.5f;
  dt_bias_.resize(static_cast<size_t>(shape.layers * shape.value_heads * shape.k));
  for (float& x : dt_bias_) x = random.symmetric() - 4.0f;  // decays around 0.9 a token
}

int32_t Model::sample(const uint16_t* out) const {
  int32_t best = 0;
  for (int32_t i = 1; i < static_cast<int32_t>(shape_.vocabulary()); ++i)
    if (from_bf16(out[i]) > from_bf16(out[best])) best = i;
  return best;
}

}  // namespace engine
