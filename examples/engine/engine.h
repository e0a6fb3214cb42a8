// Continuous batching over cula: requests join and leave between steps, the captured step never changes.
//
// The step is recorded once, for `capacity` rows. What changes from step to step are the contents of its buffers:
//   rows         [layers, capacity, width]   the projected token of each row
//   read_index   [capacity]                  -1: a new request (it starts from a zero state), or padding
//   write_index  [capacity]                  -1: padding; a row with both at -1 writes zeros and touches no state
// All layers live in one pool, [slots, layers, HV, V, K]: a slot is everything that a request owns, and each layer is a view
// with a slot stride of layers*HV*V*K elements and an offset. Nothing is ever cleared when a slot changes hands.
#pragma once
#include <cula.h>

#include <memory>
#include <vector>

#include "device.h"
#include "model.h"
#include "reference.h"

namespace engine {

struct Request {
  int64_t arrival = 0;          // step from which on it may be scheduled
  std::vector<int32_t> prompt;  // fed one token a step (there is no prefill op in this example)
  int64_t max_new = 0;

  std::vector<int32_t> generated;
  int64_t fed = 0;  // tokens that are in the state
  int32_t slot = -1;
  std::unique_ptr<Trace> trace;  // filled if not NULL

  int32_t next_token() const {
    const int64_t prompt_size = static_cast<int64_t>(prompt.size());
    return fed < prompt_size ? prompt[static_cast<size_t>(fed)] : generated.back();
  }
  bool done() const { return static_cast<int64_t>(generated.size()) == max_new; }
};

class Engine {
 public:
  Engine(Device& device, const Model& model, const Shape& shape, int64_t capacity);

  // Admits one request if a row and a slot are free.
  bool admit(Request* request);
  // Feeds one token of every running request; those that are done leave. Returns the number of tokens.
  int64_t step();

  int64_t running() const { return static_cast<int64_t>(running_.size()); }
  const char* kernel() const { return kernel_; }  // id of the kernel that the library picked

  // Padded rows must have come back as zeros, and the slot that is never handed out must be as it was left.
  bool padding_intact();

 private:
  // One layer's call. The DLTensors point into the struct, so it never moves.
  struct Layer {
    int64_t mixed_shape[2], gate_shape[3], beta_shape[2], out_shape[3], state_shape[4], head_shape[1], bias_shape[2];
    int64_t mixed_strides[2], gate_strides[3], beta_strides[2], state_strides[4];
    DLTensor mixed, gate, beta, out, state, A_log, dt_bias;
    cula_decode_args args;
  };
  void describe(int64_t layer, Layer& call);
  void run_layers();
  void finish(Request& request);
  const uint16_t* out(int64_t layer, int64_t row) const {
    return static_cast<const uint16_t*>(out_.host) + (layer * capacity_ + row) * shape_.out();
  }

  Device& device_;
  const Model& model_;
  const Shape shape_;
  const int64_t capacity_, slots_;
  Mirror rows_, read_, write_, out_;
  float* pool_;  // device memory
  int64_t index_shape_[1];
  DLTensor read_tensor_, write_tensor_;
  std::vector<std::unique_ptr<Layer>> layers_;
  void* workspace_ = nullptr;
  size_t workspace_bytes_ = 0;
  const char* kernel_ = "";
  std::vector<int32_t> free_slots_;
  std::vector<Request*> running_;
};

}  // namespace engine
