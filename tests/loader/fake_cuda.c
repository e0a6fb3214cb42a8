/*
 * A libcuda.so.1 without a GPU: enough of the driver for libcula.so and cuda.bindings, recording what it is asked.
 * Handles are small numbers; "device memory" is host memory, and no kernel runs. tests/loader/fake_gpu.py builds and drives it.
 *
 * Also a DLPack exchange API that reads torch CPU tensors and says that they are on a CUDA device.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dlpack.h"

#define EXPORT __attribute__((visibility("default")))
typedef int Result;
enum { OK = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, CAPTURE_UNSUPPORTED = 900, LAUNCH_FAILED = 719, NOT_FOUND = 500 };

/* ---- what tests set and read ---- */
EXPORT int fake_device_count = 1;
EXPORT int fake_compute_capability = 90;
EXPORT int fake_driver_version = 13000;
EXPORT int fake_launch_result = OK;       /* of every launch with a context */
EXPORT int fake_param_count = 0;          /* of every kernel */
EXPORT uint16_t fake_param_sizes[64];
EXPORT int fake_capturing = 0;            /* another thread captures in global mode: loading needs the relaxed mode */
EXPORT int fake_current_stream = 0;       /* of the exchange API */
EXPORT int fake_tensor_device = 0;
EXPORT int fake_allocation_result = OK;
EXPORT const void* fake_tensor_type = 0; /* PyTypeObject of the tensors that claim to be on a GPU */

struct launch {
  int32_t device;
  uint32_t grid[3], block[3], dynamic_smem, attribute_count;
  int32_t attribute_id, attribute_value;
  uint64_t stream, function;
  uint64_t params[64];
};
EXPORT struct launch fake_launches[64];
EXPORT int fake_launch_count, fake_load_count, fake_function_count, fake_init_count, fake_context_sets;
EXPORT char fake_log[4096]; /* entry symbols of the loaded kernels */
EXPORT char fake_memory_log[4096]; /* what happened to memory and attributes, a line each, with the number of launches before it */

static _Thread_local uintptr_t context; /* device + 1, 0: none */
static _Thread_local int capture_mode;  /* 0 global, 2 relaxed */
static int initialised;

EXPORT Result cuInit(unsigned flags) { ++fake_init_count; initialised = 1; return flags ? INVALID_VALUE : OK; }
EXPORT Result cuDriverGetVersion(int* v) { *v = fake_driver_version; return OK; }
EXPORT Result cuGetErrorString(int e, const char** s) { *s = e == LAUNCH_FAILED ? "unspecified launch failure" : e == INVALID_CONTEXT ? "invalid device context" : "some error"; return OK; }
EXPORT Result cuGetErrorName(int e, const char** s) { *s = e == LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED" : "CUDA_ERROR_OTHER"; return OK; }
EXPORT Result cuDeviceGetCount(int* n) { *n = fake_device_count; return initialised ? OK : NOT_INITIALIZED; }
EXPORT Result cuDeviceGet(int* d, int i) { *d = i; return i >= 0 && i < fake_device_count ? OK : INVALID_DEVICE; }
EXPORT Result cuDeviceGetName(char* s, int n, int d) { snprintf(s, n, "Fake GPU %d", d); return OK; }
EXPORT Result cuDeviceGetAttribute(int* v, int a, int d) {
  (void)d;
  *v = a == 75 ? fake_compute_capability / 10 : a == 76 ? fake_compute_capability % 10 : a == 16 ? 132 : 0;
  return OK;
}
EXPORT Result cuCtxGetDevice(int* d) { *d = (int)context - 1; return context ? OK : INVALID_CONTEXT; }
EXPORT Result cuCtxGetCurrent(uintptr_t* c) { *c = context; return OK; }
EXPORT Result cuCtxSetCurrent(uintptr_t c) { ++fake_context_sets; context = c; return OK; }
EXPORT Result cuCtxPushCurrent_v2(uintptr_t c) { context = c; return OK; }
EXPORT Result cuCtxPopCurrent_v2(uintptr_t* c) { *c = context; context = 0; return OK; }
EXPORT Result cuDevicePrimaryCtxRetain(uintptr_t* c, int d) { *c = (uintptr_t)d + 1; return OK; }
EXPORT Result cuDevicePrimaryCtxGetState(int d, unsigned* f, int* a) { (void)d; *f = 0; *a = 1; return OK; }
EXPORT Result cuThreadExchangeStreamCaptureMode(int* m) { int was = capture_mode; capture_mode = *m; *m = was; return OK; }
EXPORT Result cuLibraryLoadData(uintptr_t* lib, const void* code, void* a, void* b, unsigned n, void* c, void* d, unsigned m) {
  (void)a, (void)b, (void)n, (void)c, (void)d, (void)m;
  if (fake_capturing && capture_mode != 2) return CAPTURE_UNSUPPORTED;
  if (memcmp(code, "\x7f" "ELF", 4)) return INVALID_IMAGE;
  *lib = 1000 + ++fake_load_count;
  return OK;
}
EXPORT Result cuLibraryUnload(uintptr_t lib) { (void)lib; return OK; }
EXPORT Result cuLibraryGetKernel(uintptr_t* kernel, uintptr_t lib, const char* name) {
  snprintf(fake_log + strlen(fake_log), sizeof fake_log - strlen(fake_log), "%s\n", name);
  *kernel = lib + 1000;
  return OK;
}
EXPORT Result cuKernelGetFunction(uintptr_t* f, uintptr_t kernel) { *f = kernel + 1000; ++fake_function_count; return context ? OK : INVALID_CONTEXT; }
EXPORT Result cuKernelGetParamInfo(uintptr_t kernel, size_t i, size_t* offset, size_t* size) {
  (void)kernel;
  if (i >= (size_t)fake_param_count) return INVALID_VALUE;
  *offset = 0;
  *size = fake_param_sizes[i];
  return OK;
}
#define LOG(...) snprintf(fake_memory_log + strlen(fake_memory_log), sizeof fake_memory_log - strlen(fake_memory_log), __VA_ARGS__)
EXPORT Result cuKernelSetAttribute(int a, int v, uintptr_t kernel, int d) { (void)kernel; LOG("attribute %d = %d on %d\n", a, v, d); return OK; }
EXPORT Result cuMemPoolCreate(uintptr_t* pool, const void* properties) {
  if (fake_capturing && capture_mode != 2) return CAPTURE_UNSUPPORTED;
  *pool = 77;
  LOG("pool on %d\n", ((const int*)properties)[3]);
  return OK;
}
EXPORT Result cuMemPoolSetAttribute(uintptr_t pool, int a, void* value) { LOG("pool %d attribute %d = %llx\n", (int)pool, a, *(unsigned long long*)value); return OK; }
EXPORT Result cuMemAllocFromPoolAsync(uintptr_t* address, size_t size, uintptr_t pool, uintptr_t stream) {
  if (!context) return INVALID_CONTEXT;
  if (fake_allocation_result) return fake_allocation_result;
  *address = (uintptr_t)aligned_alloc(256, (size + 255) / 256 * 256);
  LOG("%d: take %zu of pool %d on %llx, device %d\n", fake_launch_count, size, (int)pool, (unsigned long long)stream, (int)context - 1);
  return OK;
}
EXPORT Result cuMemFreeAsync(uintptr_t address, uintptr_t stream) {
  if (!context) return INVALID_CONTEXT;
  free((void*)address);
  LOG("%d: give back on %llx, device %d\n", fake_launch_count, (unsigned long long)stream, (int)context - 1);
  return OK;
}
EXPORT Result cuPointerGetAttribute(void* out, int a, uintptr_t p) {
  if (p == 0xdead) return INVALID_VALUE;
  *(int*)out = a == 2 ? (p == 0xb057 ? 1 : 2) : fake_tensor_device;
  return OK;
}

struct attribute { int32_t id, pad, value[16]; };
struct config { uint32_t grid[3], block[3], dynamic_smem; uint64_t stream; struct attribute* attributes; uint32_t count; };
EXPORT Result cuLaunchKernelEx(const struct config* c, uintptr_t f, void** params, void** extra) {
  if (!context) return INVALID_CONTEXT;
  if (extra) return INVALID_VALUE;
  if (fake_launch_result) return fake_launch_result;
  struct launch* l = &fake_launches[fake_launch_count++ % 64];
  l->device = (int)context - 1;
  memcpy(l->grid, c->grid, 12);
  memcpy(l->block, c->block, 12);
  l->dynamic_smem = c->dynamic_smem;
  l->stream = c->stream;
  l->function = f;
  l->attribute_count = c->count;
  l->attribute_id = c->count ? c->attributes[0].id : 0;
  l->attribute_value = c->count ? c->attributes[0].value[0] : 0;
  for (int i = 0; i < fake_param_count; ++i) {
    l->params[i] = 0;
    memcpy(&l->params[i], params[i], fake_param_sizes[i]);
  }
  return OK;
}

/* cuda.bindings resolves everything through this; versioned names first, as the driver would for the newest version. */
static Result find(const char* symbol, void** pfn) {
  char versioned[256];
  snprintf(versioned, sizeof versioned, "%s_v2", symbol);
  Dl_info self;
  dladdr((void*)find, &self);
  void* handle = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  *pfn = dlsym(handle, versioned);
  if (!*pfn) *pfn = dlsym(handle, symbol);
  if (handle) dlclose(handle);
  return *pfn ? OK : NOT_FOUND;
}
EXPORT Result cuGetProcAddress(const char* symbol, void** pfn, int version, uint64_t flags) { (void)version, (void)flags; return find(symbol, pfn); }
EXPORT Result cuGetProcAddress_v2(const char* symbol, void** pfn, int version, uint64_t flags, int* status) {
  (void)version, (void)flags;
  const Result r = find(symbol, pfn);
  if (status) *status = r ? 1 : 0;
  return r;
}

/* ---- the exchange API ---- */
static DLPackExchangeAPI api;
static DLPackDLTensorFromPyObjectNoSync read_torch;
static int read_as_cuda(void* object, DLTensor* out) {
  const int r = read_torch(object, out);
  if (((const void* const*)object)[1] == fake_tensor_type) { /* ob_type, after the reference count */
    out->device.device_type = kDLCUDA;
    out->device.device_id = fake_tensor_device;
  }
  return r;
}
static int current_stream(DLDeviceType type, int32_t id, void** stream) {
  (void)type, (void)id;
  *stream = (void*)(uintptr_t)fake_current_stream;
  return 0;
}
EXPORT const void* fake_exchange_api(const DLPackExchangeAPI* torch) {
  api = *torch;
  read_torch = torch->dltensor_from_py_object_no_sync;
  api.dltensor_from_py_object_no_sync = read_as_cuda;
  api.current_work_stream = current_stream;
  return &api;
}
