// The answer by the definition, in float64, with nothing taken from the library: what the program checks itself against.
#pragma once
#include <cstdint>
#include <vector>

#include "model.h"

namespace engine {

// What one request saw: the tokens it was fed, what each layer answered, and the state that was in its slot at the end.
struct Trace {
  std::vector<int32_t> tokens;  // [T]
  std::vector<uint16_t> out;    // bf16 [T, layers, HV, V]
  std::vector<float> state;     // [layers, HV, V, K]
};

struct Errors {
  double out = 0.0;    // relative RMSE, worst layer
  double state = 0.0;
};

// Runs the tokens through the KDA recurrence. A NaN anywhere makes the error NaN.
Errors compare(const Model& model, const Shape& shape, const Trace& trace);

}  // namespace engine
