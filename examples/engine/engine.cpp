#include "engine.h"

#include <algorithm>
#include <cstring>

namespace engine {
namespace {

// The pool starts as signalling garbage: a state that is read before it was written shows up as NaN in the results.
constexpr unsigned char kPoison = 0xff;

DLTensor tensor(const Device& device, void* data, DLDataType dtype, int32_t ndim, int64_t* shape, int64_t* strides,
                int64_t byte_offset) {
  DLTensor t{};
  t.data = data;
  t.device = device.dl();
  t.ndim = ndim;
  t.dtype = dtype;
  t.shape = shape;
  t.strides = strides;  // NULL: compact
  t.byte_offset = static_cast<uint64_t>(byte_offset);
  return t;
}

constexpr DLDataType kBf16 = {kDLBfloat, 16, 1}, kF32 = {kDLFloat, 32, 1}, kI32 = {kDLInt, 32, 1};

template <size_t N>
void set(int64_t (&to)[N], std::initializer_list<int64_t> from) {
  std::copy(from.begin(), from.end(), to);
}

}  // namespace

Engine::Engine(Device& device, const Model& model, const Shape& shape, int64_t capacity)
    : device_(device), model_(model), shape_(shape), capacity_(capacity), slots_(capacity + 1) {
  const size_t rows = static_cast<size_t>(capacity_), layers = static_cast<size_t>(shape_.layers);
  rows_ = device_.mirror(layers * rows * static_cast<size_t>(shape_.width()) * sizeof(uint16_t));
  read_ = device_.mirror(rows * sizeof(int32_t));
  write_ = device_.mirror(rows * sizeof(int32_t));
  out_ = device_.mirror(layers * rows * static_cast<size_t>(shape_.out()) * sizeof(uint16_t));
  std::memset(rows_.host, 0, rows_.bytes);

  const size_t pool_bytes = static_cast<size_t>(slots_ * shape_.layers * shape_.state()) * sizeof(float);
  pool_ = static_cast<float*>(device_.allocate(pool_bytes));
  device_.write(pool_, std::vector<unsigned char>(pool_bytes, kPoison).data(), pool_bytes);
  for (int32_t slot = static_cast<int32_t>(capacity_) - 1; slot >= 0; --slot) free_slots_.push_back(slot);

  set(index_shape_, {capacity_});
  read_tensor_ = tensor(device_, read_.device, kI32, 1, index_shape_, nullptr, 0);
  write_tensor_ = tensor(device_, write_.device, kI32, 1, index_shape_, nullptr, 0);
  for (int64_t layer = 0; layer < shape_.layers; ++layer) {
    layers_.push_back(std::make_unique<Layer>());
    describe(layer, *layers_.back());
  }

  // One query says whether the call is supported, with which kernel, and what memory it needs. All layers are alike.
  cula_requirements need{};
  need.struct_size = CULA_SIZEOF(cula_requirements);
  check_cula(cula_query(CULA_OP_KDA_DECODE, &layers_.front()->args, &need), "cula_query");
  if (need.workspace_bytes > 0) {
    workspace_bytes_ = need.workspace_bytes;
    workspace_ = device_.allocate(need.workspace_bytes);
  }
  cula_kernel_desc desc{};
  desc.struct_size = CULA_SIZEOF(cula_kernel_desc);
  check_cula(cula_kernel_info(need.kernels[0], &desc), "cula_kernel_info");
  kernel_ = desc.id;

  device_.record([this] {
    device_.to_device(rows_);
    device_.to_device(read_);
    device_.to_device(write_);
    run_layers();
    device_.to_host(out_);
  });
}

void Engine::describe(int64_t layer, Layer& c) {
  const int64_t HV = shape_.value_heads, K = shape_.k, V = shape_.v, width = shape_.width();
  const int64_t element = sizeof(uint16_t), first_row = layer * capacity_ * width * element;

  // q|k|v, gate and beta are views into the projected rows.
  set(c.mixed_shape, {capacity_, shape_.mixed()});
  set(c.mixed_strides, {width, 1});
  c.mixed = tensor(device_, rows_.device, kBf16, 2, c.mixed_shape, c.mixed_strides, first_row);
  set(c.gate_shape, {capacity_, HV, K});
  set(c.gate_strides, {width, K, 1});
  c.gate = tensor(device_, rows_.device, kBf16, 3, c.gate_shape, c.gate_strides, first_row + shape_.gate_at() * element);
  set(c.beta_shape, {capacity_, HV});
  set(c.beta_strides, {width, 1});
  c.beta = tensor(device_, rows_.device, kBf16, 2, c.beta_shape, c.beta_strides, first_row + shape_.beta_at() * element);

  set(c.out_shape, {capacity_, HV, V});
  c.out = tensor(device_, out_.device, kBf16, 3, c.out_shape, nullptr, layer * capacity_ * shape_.out() * element);

  set(c.state_shape, {slots_, HV, V, K});
  set(c.state_strides, {shape_.layers * shape_.state(), V * K, K, 1});
  c.state = tensor(device_, pool_, kF32, 4, c.state_shape, c.state_strides,
                   layer * shape_.state() * static_cast<int64_t>(sizeof(float)));

  auto upload = [this](const float* values, int64_t count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(float);
    void* memory = device_.allocate(bytes);
    device_.write(memory, values, bytes);
    return memory;
  };
  set(c.head_shape, {HV});
  c.A_log = tensor(device_, upload(model_.A_log(layer), HV), kF32, 1, c.head_shape, nullptr, 0);
  set(c.bias_shape, {HV, K});
  c.dt_bias = tensor(device_, upload(model_.dt_bias(layer), HV * K), kF32, 2, c.bias_shape, nullptr, 0);

  c.args = cula_decode_args{};  // zero is the neutral value of every field
  c.args.struct_size = CULA_SIZEOF(cula_decode_args);
  c.args.mixed_qkv = &c.mixed;
  c.args.gate = &c.gate;
  c.args.gate_kind = CULA_GATE_RAW;
  c.args.A_log = &c.A_log;
  c.args.dt_bias = &c.dt_bias;
  c.args.lower_bound = Model::kLowerBound;
  c.args.beta = &c.beta;
  c.args.beta_kind = CULA_BETA_LOGIT;
  c.args.l2norm = 1;
  c.args.state = &c.state;
  c.args.state_layout = CULA_STATE_VK;
  c.args.read_index = &read_tensor_;
  c.args.write_index = &write_tensor_;
  c.args.out = &c.out;
}

void Engine::run_layers() {
  for (const auto& layer : layers_)
    check_cula(cula_run(CULA_OP_KDA_DECODE, &layer->args, workspace_, workspace_bytes_, device_.stream()), "cula_run");
}

bool Engine::admit(Request* request) {
  if (running() == capacity_ || free_slots_.empty()) return false;
  request->slot = free_slots_.back();  // the slot freed last: its old contents are the likeliest to do harm
  free_slots_.pop_back();
  running_.push_back(request);
  return true;
}

int64_t Engine::step() {
  int32_t* read = static_cast<int32_t*>(read_.host);
  int32_t* write = static_cast<int32_t*>(write_.host);
  const size_t row_bytes = static_cast<size_t>(shape_.width()) * sizeof(uint16_t);
  const int64_t rows = running();
  for (int64_t n = 0; n < capacity_; ++n) {
    if (n >= rows) {
      read[n] = write[n] = -1;
      continue;
    }
    const Request& request = *running_[static_cast<size_t>(n)];
    read[n] = request.fed == 0 ? -1 : request.slot;
    write[n] = request.slot;
    for (int64_t layer = 0; layer < shape_.layers; ++layer)
      std::memcpy(static_cast<uint16_t*>(rows_.host) + (layer * capacity_ + n) * shape_.width(),
                  model_.row(layer, request.next_token()), row_bytes);
  }

  device_.submit();

  for (int64_t n = 0; n < rows; ++n) {
    Request& request = *running_[static_cast<size_t>(n)];
    if (request.trace) {
      request.trace->tokens.push_back(request.next_token());
      for (int64_t layer = 0; layer < shape_.layers; ++layer)
        request.trace->out.insert(request.trace->out.end(), out(layer, n), out(layer, n) + shape_.out());
    }
    ++request.fed;
    if (request.fed >= static_cast<int64_t>(request.prompt.size()))
      request.generated.push_back(model_.sample(out(shape_.layers - 1, n)));
    if (request.done()) finish(request);
  }
  running_.erase(std::remove_if(running_.begin(), running_.end(), [](Request* r) { return r->done(); }), running_.end());
  return rows;
}

void Engine::finish(Request& request) {
  if (request.trace) {
    const int64_t slot_elements = shape_.layers * shape_.state();
    request.trace->state.resize(static_cast<size_t>(slot_elements));
    device_.read(request.trace->state.data(), pool_ + request.slot * slot_elements,
                 static_cast<size_t>(slot_elements) * sizeof(float));
  }
  free_slots_.push_back(request.slot);
  request.slot = -1;
}

bool Engine::padding_intact() {
  std::memset(out_.host, kPoison, out_.bytes);
  device_.to_device(out_);  // what an earlier step left there must not pass for a zero written now
  step();
  for (int64_t layer = 0; layer < shape_.layers; ++layer)
    for (int64_t n = running(); n < capacity_; ++n)
      for (int64_t i = 0; i < shape_.out(); ++i)
        if (out(layer, n)[i] != 0) return false;

  const size_t slot_bytes = static_cast<size_t>(shape_.layers * shape_.state()) * sizeof(float);
  std::vector<unsigned char> guard(slot_bytes);
  device_.read(guard.data(), pool_ + (slots_ - 1) * shape_.layers * shape_.state(), slot_bytes);
  return std::all_of(guard.begin(), guard.end(), [](unsigned char byte) { return byte == kPoison; });
}

}  // namespace engine
