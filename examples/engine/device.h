// Where the tensors live and how a step is submitted: host memory and direct calls, or a GPU, a stream and a captured graph.
//
// The driver is opened with dlopen, as libcula.so does: the program builds without a CUDA toolkit and starts without a GPU.
// An engine that links libcuda or the CUDA runtime passes its own CUstream to cula_run in just the same way.
#pragma once
#include <dlpack.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace engine {

// Memory that the host fills or reads (pinned) and its twin on the device. On the CPU the two are one.
struct Mirror {
  void* host = nullptr;
  void* device = nullptr;
  size_t bytes = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual DLDevice dl() const = 0;
  virtual void* stream() const = 0;  // what cula_run takes; NULL on the CPU
  virtual std::string name() const = 0;

  virtual void* allocate(size_t bytes) = 0;  // device memory, 256-byte aligned, freed with the Device
  virtual Mirror mirror(size_t bytes) = 0;

  virtual void to_device(const Mirror& mirror) = 0;  // asynchronous, in stream order
  virtual void to_host(const Mirror& mirror) = 0;
  virtual void write(void* device, const void* host, size_t bytes) = 0;  // blocking
  virtual void read(void* host, const void* device, size_t bytes) = 0;

  // Fixes what a step does. On the GPU `step` is run once under stream capture and replayed from then on, so everything
  // it submits must be legal there; on the CPU it is called every time.
  virtual void record(std::function<void()> step) = 0;
  virtual void submit() = 0;  // runs the step and waits for it
};

std::unique_ptr<Device> make_cpu();

// Throws std::runtime_error with the reason when there is no driver, no GPU, or no kernel in libcula.so for it.
std::unique_ptr<Device> make_cuda(int ordinal);

// Throws with the library's own message unless `status` is CULA_OK.
void check_cula(int32_t status, const char* call);

}  // namespace engine
