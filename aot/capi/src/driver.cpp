#include "driver.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <new>

#include "driver_api.h"
#include "error.h"
#include "launch.h"
#include "names.h"

namespace cula::driver {
namespace {

constexpr int32_t kMaxDevices = 64;

struct DeviceState {
  std::atomic<uint64_t> target{0};         // arch | sm_count << 32; 0: not asked yet
  std::atomic<Kernel*> kernels{nullptr};   // by kernel index; nullptr: not prepared
  std::atomic<Context> primary{nullptr};   // retained by prepare
};

// Constant-initialised and trivially destroyed: no static constructor, and no destructor that runs under another thread.
DeviceState devices[kMaxDevices];
std::atomic<const Api*> loaded{nullptr};
Api functions;                             // written under the lock, before `loaded`
std::atomic<int> init_pid{0};              // process that called cuInit
std::mutex lock;
static_assert(std::is_trivially_destructible_v<std::mutex> && std::is_trivially_destructible_v<DeviceState>);

[[gnu::cold]] cula_status driver_error(const char* function, const Api& api, Result result, const char* call, const char* of) noexcept {
  const char* name = nullptr;
  if (api.error_name(result, &name) != kSuccess || name == nullptr) name = "unknown error";
  cula_status status = CULA_ERR_CUDA;
  if (result == kErrorOutOfMemory) status = CULA_ERR_OUT_OF_MEMORY;
  const int pid = init_pid.load(std::memory_order_relaxed);
  const char* forked = pid != 0 && pid != static_cast<int>(getpid())
                           ? "; this process was forked after CUDA was initialised, and a forked child cannot use CUDA"
                           : "";
  return fail(status, "%s: %s%s%s failed: %s (%d)%s", function, call, of[0] ? " of " : "", of, name, result, forked);
}

// The driver, initialised.
cula_status open_driver(const char* function, const Api** api) noexcept {
  *api = loaded.load(std::memory_order_acquire);
  if (__builtin_expect(*api != nullptr, 1)) return CULA_OK;
  const std::lock_guard<std::mutex> guard(lock);
  *api = loaded.load(std::memory_order_relaxed);
  if (*api != nullptr) return CULA_OK;
  void* handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    return fail(CULA_ERR_CUDA, "%s: the CUDA driver is not there (%s)", function, why != nullptr ? why : "libcuda.so.1");
  }
#define CULA_DRIVER(member, symbol, arguments)                                                                        \
  functions.member = reinterpret_cast<decltype(functions.member)>(dlsym(handle, #symbol));                            \
  if (functions.member == nullptr)                                                                                    \
    return fail(CULA_ERR_CUDA, "%s: the CUDA driver has no %s; a driver for CUDA 12.4 or newer is needed", function, #symbol);
  CULA_DRIVER_FUNCTIONS(CULA_DRIVER)
#undef CULA_DRIVER
  if (const Result r = functions.init(0)) return driver_error(function, functions, r, "cuInit", "");
  init_pid.store(static_cast<int>(getpid()), std::memory_order_relaxed);
  loaded.store(&functions, std::memory_order_release);
  *api = &functions;
  return CULA_OK;
}

// The device's context is current while this lives; afterwards the thread has the context that it had before.
class CurrentContext {
 public:
  explicit CurrentContext(const Api& api) noexcept : api_(api) {}
  CurrentContext(const CurrentContext&) = delete;
  ~CurrentContext() {
    Context popped;
    if (pushed_) api_.context_pop(&popped);
  }
  bool on_device(int32_t device) const noexcept {
    Device current;
    return api_.context_device(&current) == kSuccess && current == device;
  }
  Result push(Context context) noexcept {
    const Result r = api_.context_push(context);
    pushed_ = r == kSuccess;
    return r;
  }

 private:
  const Api& api_;
  bool pushed_ = false;
};

// Loading calls that are not legal while any thread captures in global mode become legal: they touch no stream.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Api& api) noexcept : api_(api), mode_(kCaptureRelaxed) { exchanged_ = api.exchange_capture_mode(&mode_) == kSuccess; }
  RelaxedCapture(const RelaxedCapture&) = delete;
  ~RelaxedCapture() {
    if (exchanged_) api_.exchange_capture_mode(&mode_);
  }

 private:
  const Api& api_;
  int mode_;
  bool exchanged_;
};

bool is_image_error(Result r) noexcept {
  return r == kErrorInvalidImage || r == kErrorNoBinaryForGpu || r == kErrorInvalidPtx || r == kErrorUnsupportedPtxVersion ||
         r == kErrorInvalidSource || r == kErrorNotFound;
}

cula_status load_error(const Api& api, Result r, const char* call, const char* id) noexcept {
  if (!is_image_error(r)) return driver_error("cula_prepare", api, r, call, id);
  const char* name = nullptr;
  if (api.error_name(r, &name) != kSuccess || name == nullptr) name = "unknown error";
  return fail(CULA_ERR_ARTIFACT, "cula_prepare: the cubin of %s does not load: %s: %s (%d)", id, call, name, r);
}

// The cubin's own parameter list against the one that plans fill.
cula_status check_params(const Api& api, Kernel kernel, const KernelRow& row) noexcept {
  size_t offset, size;
  for (int i = 0; i < row.param_count; ++i) {
    const Result r = api.kernel_param(kernel, i, &offset, &size);
    if (r == kErrorInvalidValue) {
      return fail(CULA_ERR_ARTIFACT, "cula_prepare: the cubin of %s has %d parameters, expected %d", row.id, i, row.param_count);
    }
    if (r != kSuccess) return load_error(api, r, "cuKernelGetParamInfo", row.id);
    if (size != row.param_sizes[i]) {
      return fail(CULA_ERR_ARTIFACT, "cula_prepare: parameter %d of the cubin of %s has %zu bytes, expected %d", i, row.id, size, row.param_sizes[i]);
    }
  }
  if (api.kernel_param(kernel, row.param_count, &offset, &size) == kSuccess) {
    return fail(CULA_ERR_ARTIFACT, "cula_prepare: the cubin of %s has more than %d parameters", row.id, row.param_count);
  }
  return CULA_OK;
}

// Loads the cubins of `arch` for one device.
class Loader {
 public:
  Loader(const Api& api, int32_t device) : api_(api), device_(device), libraries_(new Library[kKernelCount]()), kernels_(new Kernel[kKernelCount]()) {}
  ~Loader() {
    if (!kernels_) return;  // released: the libraries stay
    for (int32_t i = 0; i < kKernelCount; ++i) {
      if (libraries_[i] != nullptr) api_.library_unload(libraries_[i]);
    }
  }
  cula_status load(int32_t arch) {
    constexpr int kDefaultDynamicSmem = 48 << 10;
    for (int32_t i = 0; i < kKernelCount; ++i) {
      const KernelRow& row = kKernels[i];
      if (row.key.arch != arch) continue;
      if (const Result r = api_.library_load(&libraries_[i], row.cubin, nullptr, nullptr, 0, nullptr, nullptr, 0)) {
        libraries_[i] = nullptr;
        return load_error(api_, r, "cuLibraryLoadData", row.id);
      }
      if (const Result r = api_.library_kernel(&kernels_[i], libraries_[i], row.entry)) return load_error(api_, r, "cuLibraryGetKernel", row.id);
      CULA_TRY(check_params(api_, kernels_[i], row));
      if (row.max_dynamic_smem > kDefaultDynamicSmem) {
        if (const Result r = api_.kernel_set_attribute(kMaxDynamicSharedSize, row.max_dynamic_smem, kernels_[i], device_)) {
          return load_error(api_, r, "cuKernelSetAttribute", row.id);
        }
      }
      if (row.smem_carveout > 0) {
        if (const Result r = api_.kernel_set_attribute(kPreferredSharedCarveout, row.smem_carveout, kernels_[i], device_)) {
          return load_error(api_, r, "cuKernelSetAttribute", row.id);
        }
      }
    }
    return CULA_OK;
  }
  Kernel* kernels() const noexcept { return kernels_.get(); }
  Kernel* release() noexcept { return kernels_.release(); }

 private:
  const Api& api_;
  const int32_t device_;
  std::unique_ptr<Library[]> libraries_;
  std::unique_ptr<Kernel[]> kernels_;
};

// Driver loading is lazy: without this the first launch would load the function, which is not legal during capture.
cula_status load_functions(const Api& api, const Kernel* kernels) noexcept {
  Function function;
  for (int32_t i = 0; i < kKernelCount; ++i) {
    if (kernels[i] == nullptr) continue;
    if (const Result r = api.kernel_function(&function, kernels[i])) return load_error(api, r, "cuKernelGetFunction", kKernels[i].id);
  }
  return CULA_OK;
}

int32_t arch_of(int major, int minor) noexcept {
  if (major == 9 && minor == 0) return CULA_ARCH_SM90;
  if (major == 10 && minor == 0) return CULA_ARCH_SM100;
  if (major == 10 && minor == 3) return CULA_ARCH_SM103;
  if (major == 12 && minor == 0) return CULA_ARCH_SM120;
  return 0;
}

}  // namespace

cula_status device_target(const char* function, int32_t device, Target* target) noexcept {
  if (device < 0 || device >= kMaxDevices) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: device %d; must be from 0 to %d", function, device, kMaxDevices - 1);
  }
  uint64_t packed = devices[device].target.load(std::memory_order_relaxed);
  if (__builtin_expect(packed == 0, 0)) {
    const Api* api;
    CULA_TRY(open_driver(function, &api));
    int count = 0, major = 0, minor = 0, sms = 0;
    Device handle;
    if (const Result r = api->device_count(&count)) return driver_error(function, *api, r, "cuDeviceGetCount", "");
    if (device >= count) return fail(CULA_ERR_INVALID_ARGUMENT, "%s: there is no CUDA device %d; this machine has %d", function, device, count);
    if (const Result r = api->device_get(&handle, device)) return driver_error(function, *api, r, "cuDeviceGet", "");
    Result r = api->device_attribute(&major, kAttributeMajor, handle);
    if (r == kSuccess) r = api->device_attribute(&minor, kAttributeMinor, handle);
    if (r == kSuccess) r = api->device_attribute(&sms, kAttributeMultiprocessors, handle);
    if (r != kSuccess) return driver_error(function, *api, r, "cuDeviceGetAttribute", "");
    const int32_t arch = arch_of(major, minor);
    if (arch == 0) {
      return fail(CULA_ERR_UNSUPPORTED, "%s: device %d has compute capability %d.%d; archs exist for 9.0 (sm90), 10.0 (sm100), 10.3 (sm103) and 12.0 (sm120)",
                  function, device, major, minor);
    }
    packed = static_cast<uint32_t>(arch) | static_cast<uint64_t>(sms) << 32;
    devices[device].target.store(packed, std::memory_order_relaxed);
  }
  target->arch = static_cast<int32_t>(packed & 0xffffffff);
  target->sm_count = static_cast<int32_t>(packed >> 32);
  return CULA_OK;
}

cula_status prepare(int32_t device) {
  static constexpr const char* kFunction = "cula_prepare";
  Target target;
  CULA_TRY(device_target(kFunction, device, &target));
  const Api* api;
  CULA_TRY(open_driver(kFunction, &api));
  bool built = false;
  for (int32_t i = 0; i < kKernelCount; ++i) built = built || kKernels[i].key.arch == target.arch;
  if (!built) {
    return fail(CULA_ERR_UNSUPPORTED, "cula_prepare: device %d is %s, and this library has no %s kernels", device, arch_name(target.arch), arch_name(target.arch));
  }

  DeviceState& state = devices[device];
  const std::lock_guard<std::mutex> guard(lock);
  const RelaxedCapture relaxed(*api);
  CurrentContext current(*api);
  const bool has_context = current.on_device(device);
  if (state.primary.load(std::memory_order_relaxed) == nullptr) {
    // A program with a context of its own gets no second one; an active primary context costs nothing to retain.
    unsigned flags;
    int active = 0;
    if (const Result r = api->primary_state(device, &flags, &active)) return driver_error(kFunction, *api, r, "cuDevicePrimaryCtxGetState", "");
    if (active || !has_context) {
      Context primary;
      if (const Result r = api->primary_retain(&primary, device)) return driver_error(kFunction, *api, r, "cuDevicePrimaryCtxRetain", "");
      state.primary.store(primary, std::memory_order_release);
    }
  }
  if (!has_context) {
    if (const Result r = current.push(state.primary.load(std::memory_order_relaxed))) return driver_error(kFunction, *api, r, "cuCtxPushCurrent", "");
  }

  if (const Kernel* kernels = state.kernels.load(std::memory_order_relaxed)) return load_functions(*api, kernels);
  Loader loader(*api, device);
  CULA_TRY(loader.load(target.arch));
  CULA_TRY(load_functions(*api, loader.kernels()));
  state.kernels.store(loader.release(), std::memory_order_release);
  return CULA_OK;
}

cula_status launch(const char* function, const Plan& plan, void* stream) noexcept {
  DeviceState& state = devices[plan.device_id];  // in range: device_target() saw it
  const Kernel* kernels = state.kernels.load(std::memory_order_acquire);
  if (kernels == nullptr) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: cula_prepare(%d) has not been called, or failed", function, plan.device_id);
  }
  const Api& api = *loaded.load(std::memory_order_relaxed);
  CurrentContext current(api);
  if (!current.on_device(plan.device_id)) {
    const Context primary = state.primary.load(std::memory_order_acquire);
    if (primary == nullptr) {
      return fail(CULA_ERR_INVALID_ARGUMENT, "%s: no context of device %d is current; cula_prepare was called with a context of the program's own, so the calling thread must have one current",
                  function, plan.device_id);
    }
    if (const Result r = current.push(primary)) return driver_error(function, api, r, "cuCtxPushCurrent", "");
  }
  for (int32_t i = 0; i < plan.count; ++i) {
    const LaunchDesc& d = plan.launch[i];
    cula_launch_config config;
    cula_launch_attribute attributes[2];
    void* params[CULA_MAX_PARAMS];
    fill_config(d, stream, &config, attributes);
    fill_params(d, static_cast<const unsigned char*>(d.params), params);
    const Result r = api.launch_kernel(&config, kernels[d.kernel], params, nullptr);
    if (__builtin_expect(r != kSuccess, 0)) return driver_error(function, api, r, "cuLaunchKernelEx", kKernels[d.kernel].id);
  }
  return CULA_OK;
}

}  // namespace cula::driver
