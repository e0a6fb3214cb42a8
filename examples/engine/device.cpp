#include "device.h"

#include <cula.h>
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace engine {

void check_cula(int32_t status, const char* call) {
  if (status == CULA_OK) return;
  char message[1024];
  cula_last_error(message, sizeof message);
  throw std::runtime_error(std::string(call) + ": " + cula_status_name(status) + ": " + message);
}

namespace {

// ---------------------------------------------------------------------------------------------------------- CPU

class Cpu final : public Device {
 public:
  ~Cpu() override {
    for (void* block : blocks_) std::free(block);
  }
  DLDevice dl() const override { return {kDLCPU, 0}; }
  void* stream() const override { return nullptr; }
  std::string name() const override { return "cpu"; }

  void* allocate(size_t bytes) override {
    void* block = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (block == nullptr) throw std::runtime_error("out of memory");
    blocks_.push_back(block);
    return block;
  }
  Mirror mirror(size_t bytes) override {
    void* block = allocate(bytes);
    return {block, block, bytes};
  }
  void to_device(const Mirror&) override {}
  void to_host(const Mirror&) override {}
  void write(void* device, const void* host, size_t bytes) override { std::memcpy(device, host, bytes); }
  void read(void* host, const void* device, size_t bytes) override { std::memcpy(host, device, bytes); }
  void record(std::function<void()> step) override { step_ = std::move(step); }
  void submit() override { step_(); }

 private:
  std::vector<void*> blocks_;
  std::function<void()> step_;
};

// --------------------------------------------------------------------------------------------------------- CUDA

// The part of the driver API that the program uses, with the types of cuda.h written out.
struct Driver {
  using Result = int;  // CUresult
  using Pointer = unsigned long long;  // CUdeviceptr
  Result (*Init)(unsigned);
  Result (*GetErrorName)(Result, const char**);
  Result (*DeviceGet)(int*, int);
  Result (*DeviceGetName)(char*, int, int);
  Result (*PrimaryCtxRetain)(void**, int);
  Result (*PrimaryCtxRelease)(int);
  Result (*CtxSetCurrent)(void*);
  Result (*MemAlloc)(Pointer*, size_t);
  Result (*MemFree)(Pointer);
  Result (*MemAllocHost)(void**, size_t);
  Result (*MemFreeHost)(void*);
  Result (*MemcpyHtoDAsync)(Pointer, const void*, size_t, void*);
  Result (*MemcpyDtoHAsync)(void*, Pointer, size_t, void*);
  Result (*StreamCreate)(void**, unsigned);
  Result (*StreamDestroy)(void*);
  Result (*StreamSynchronize)(void*);
  Result (*StreamBeginCapture)(void*, int);
  Result (*StreamEndCapture)(void*, void**);
  Result (*GraphInstantiate)(void**, void*, unsigned long long);
  Result (*GraphDestroy)(void*);
  Result (*GraphExecDestroy)(void*);
  Result (*GraphLaunch)(void*, void*);

  Driver() {
    library_ = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library_ == nullptr) throw std::runtime_error("no CUDA driver (libcuda.so.1 does not open)");
    load(Init, "cuInit");
    load(GetErrorName, "cuGetErrorName");
    load(DeviceGet, "cuDeviceGet");
    load(DeviceGetName, "cuDeviceGetName");
    load(PrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
    load(PrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2");
    load(CtxSetCurrent, "cuCtxSetCurrent");
    load(MemAlloc, "cuMemAlloc_v2");
    load(MemFree, "cuMemFree_v2");
    load(MemAllocHost, "cuMemAllocHost_v2");
    load(MemFreeHost, "cuMemFreeHost");
    load(MemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2");
    load(MemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2");
    load(StreamCreate, "cuStreamCreate");
    load(StreamDestroy, "cuStreamDestroy_v2");
    load(StreamSynchronize, "cuStreamSynchronize");
    load(StreamBeginCapture, "cuStreamBeginCapture_v2");
    load(StreamEndCapture, "cuStreamEndCapture");
    load(GraphInstantiate, "cuGraphInstantiateWithFlags");
    load(GraphDestroy, "cuGraphDestroy");
    load(GraphExecDestroy, "cuGraphExecDestroy");
    load(GraphLaunch, "cuGraphLaunch");
  }

  void check(Result result, const char* call) const {
    if (result == 0) return;
    const char* name = nullptr;
    GetErrorName(result, &name);
    throw std::runtime_error(std::string(call) + ": " + (name != nullptr ? name : "unknown") + " (" +
                             std::to_string(result) + ")");
  }

 private:
  template <class F>
  void load(F& function, const char* name) {
    function = reinterpret_cast<F>(dlsym(library_, name));
    if (function == nullptr) throw std::runtime_error(std::string("the CUDA driver has no ") + name + ": it is too old");
  }
  void* library_;  // stays open: the driver does not survive dlclose
};

class Cuda final : public Device {
 public:
  explicit Cuda(int ordinal) : ordinal_(ordinal) {
    check(d_.Init(0), "cuInit");
    check(d_.DeviceGet(&device_, ordinal), "cuDeviceGet");
    check(d_.DeviceGetName(name_, sizeof name_, device_), "cuDeviceGetName");
    void* context = nullptr;
    check(d_.PrimaryCtxRetain(&context, device_), "cuDevicePrimaryCtxRetain");
    try {
      check(d_.CtxSetCurrent(context), "cuCtxSetCurrent");
      check(d_.StreamCreate(&stream_, 1 /* non-blocking */), "cuStreamCreate");
      check_cula(cula_prepare(ordinal), "cula_prepare");  // loads the kernels: the only call that may take long
    } catch (...) {
      release();
      throw;
    }
  }
  ~Cuda() override { release(); }

  DLDevice dl() const override { return {kDLCUDA, ordinal_}; }
  void* stream() const override { return stream_; }
  std::string name() const override { return name_; }

  void* allocate(size_t bytes) override {
    Driver::Pointer block = 0;
    check(d_.MemAlloc(&block, bytes), "cuMemAlloc");
    blocks_.push_back(block);
    return reinterpret_cast<void*>(block);
  }
  Mirror mirror(size_t bytes) override {
    Mirror result{nullptr, allocate(bytes), bytes};
    check(d_.MemAllocHost(&result.host, bytes), "cuMemAllocHost");
    pinned_.push_back(result.host);
    return result;
  }
  void to_device(const Mirror& m) override {
    check(d_.MemcpyHtoDAsync(address(m.device), m.host, m.bytes, stream_), "cuMemcpyHtoDAsync");
  }
  void to_host(const Mirror& m) override {
    check(d_.MemcpyDtoHAsync(m.host, address(m.device), m.bytes, stream_), "cuMemcpyDtoHAsync");
  }
  void write(void* device, const void* host, size_t bytes) override {
    check(d_.MemcpyHtoDAsync(address(device), host, bytes, stream_), "cuMemcpyHtoDAsync");
    check(d_.StreamSynchronize(stream_), "cuStreamSynchronize");
  }
  void read(void* host, const void* device, size_t bytes) override {
    check(d_.MemcpyDtoHAsync(host, address(device), bytes, stream_), "cuMemcpyDtoHAsync");
    check(d_.StreamSynchronize(stream_), "cuStreamSynchronize");
  }
  void record(std::function<void()> step) override {
    check(d_.StreamBeginCapture(stream_, 1 /* thread local */), "cuStreamBeginCapture");
    void* graph = nullptr;
    try {
      step();
    } catch (...) {  // a stream that stays in capture would hide the first error behind the next one
      if (d_.StreamEndCapture(stream_, &graph) == 0 && graph != nullptr) d_.GraphDestroy(graph);
      throw;
    }
    check(d_.StreamEndCapture(stream_, &graph), "cuStreamEndCapture");
    const Driver::Result result = d_.GraphInstantiate(&graph_, graph, 0);
    d_.GraphDestroy(graph);
    check(result, "cuGraphInstantiate");
  }
  void submit() override {
    check(d_.GraphLaunch(graph_, stream_), "cuGraphLaunch");
    check(d_.StreamSynchronize(stream_), "cuStreamSynchronize");
  }

 private:
  void check(Driver::Result result, const char* call) const { d_.check(result, call); }
  static Driver::Pointer address(const void* p) { return reinterpret_cast<Driver::Pointer>(p); }
  void release() {
    if (graph_ != nullptr) d_.GraphExecDestroy(graph_);
    for (void* block : pinned_) d_.MemFreeHost(block);
    for (Driver::Pointer block : blocks_) d_.MemFree(block);
    if (stream_ != nullptr) d_.StreamDestroy(stream_);
    d_.CtxSetCurrent(nullptr);
    d_.PrimaryCtxRelease(device_);
  }

  Driver d_;
  int ordinal_;
  int device_ = 0;
  char name_[128] = {};
  void* stream_ = nullptr;
  void* graph_ = nullptr;
  std::vector<Driver::Pointer> blocks_;
  std::vector<void*> pinned_;
};

}  // namespace

std::unique_ptr<Device> make_cpu() { return std::make_unique<Cpu>(); }
std::unique_ptr<Device> make_cuda(int ordinal) { return std::make_unique<Cuda>(ordinal); }

}  // namespace engine
