/* A CUDA driver without a GPU: keeps contexts, libraries and kernels as the real one does, and logs what is called. Loaded under
 * the name libcuda.so.1 in a process of its own (test_driver.py). A context is a number: 0x1000 + device is the primary one. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <pthread.h>
#include <unistd.h>

#define API __attribute__((visibility("default"))) int
typedef struct {
  unsigned grid[3], block[3], smem;
  void* stream;
  unsigned char* attributes;
  unsigned count;
} Config;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char log_text[1 << 20];
static int devices = 1, capability[8][2] = {{9, 0}}, multiprocessors[8] = {132};
static int primary_active[8], retained[8], loaded, pid;
static char fail_call[64];
static int fail_code, fail_after;
static uint16_t sizes[1024][64];
static int counts[1024];
static __thread uintptr_t stack[16];
static __thread int depth, mode;

/* settings and observations of the tests */
API fake_devices(int n) { return devices = n; }
API fake_device(int i, int major, int minor, int sms) { capability[i][0] = major, capability[i][1] = minor; return multiprocessors[i] = sms; }
API fake_fail(const char* call, int code, int after) { snprintf(fail_call, sizeof fail_call, "%s", call); fail_code = code; return fail_after = after; }
API fake_params(int row, int count, const uint16_t* of) { memcpy(sizes[row], of, (size_t)count * 2); return counts[row] = count; }
API fake_push(uintptr_t context) { stack[depth++] = context; return depth; }
API fake_pop(void) { return --depth; }
API fake_current(void) { return depth ? (int)stack[depth - 1] : 0; }
API fake_depth(void) { return depth; }
API fake_mode(void) { return mode; }
API fake_set_mode(int m) { return mode = m; }
API fake_activate(int device) { return primary_active[device] = 1; }
API fake_retained(int device) { return retained[device]; }
API fake_loaded(void) { return loaded; }
__attribute__((visibility("default"))) const char* fake_log(void) { return log_text; }
API fake_clear(void) { log_text[0] = 0; return 0; }

static int enter(const char* call, const char* more) {
  int result = 0;
  pthread_mutex_lock(&lock);
  size_t used = strlen(log_text);
  snprintf(log_text + used, sizeof log_text - used, "%s%s%s\n", call, more[0] ? " " : "", more);
  if (strcmp(call, fail_call) == 0 && fail_after-- == 0) result = fail_code;
  if (pid && pid != getpid()) result = 3;
  pthread_mutex_unlock(&lock);
  return result;
}
#define ENTER(...) do { char more[4096]; snprintf(more, sizeof more, __VA_ARGS__); int r = enter(__func__, more); if (r) return r; } while (0)

API cuInit(unsigned flags) { (void)flags; ENTER("%s", ""); pid = getpid(); return 0; }
API cuGetErrorName(int error, const char** name) {
  *name = error == 1 ? "CUDA_ERROR_INVALID_VALUE" : error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : error == 3 ? "CUDA_ERROR_NOT_INITIALIZED" :
      error == 100 ? "CUDA_ERROR_NO_DEVICE" : error == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : error == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : NULL;
  return *name ? 0 : 1;
}
API cuDeviceGet(int* device, int ordinal) { ENTER("%d", ordinal); *device = ordinal; return 0; }
API cuDeviceGetCount(int* count) { ENTER("%s", ""); *count = devices; return 0; }
API cuDeviceGetAttribute(int* value, int attribute, int device) {
  ENTER("%d", attribute);
  *value = attribute == 16 ? multiprocessors[device] : attribute == 75 ? capability[device][0] : attribute == 76 ? capability[device][1] : -1;
  return 0;
}
API cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) { ENTER("%d", device); *flags = 0; *active = primary_active[device]; return 0; }
API cuDevicePrimaryCtxRetain(void** context, int device) {
  ENTER("%d", device);
  primary_active[device] = 1, retained[device]++;
  *context = (void*)(uintptr_t)(0x1000 + device);
  return 0;
}
API cuCtxGetDevice(int* device) {
  if (!depth) return 201;
  *device = (int)(stack[depth - 1] & 0xfff);
  return 0;
}
API cuCtxPushCurrent_v2(void* context) { ENTER("%#lx", (unsigned long)(uintptr_t)context); stack[depth++] = (uintptr_t)context; return 0; }
API cuCtxPopCurrent_v2(void** context) { ENTER("%s", ""); *context = (void*)stack[--depth]; return 0; }
API cuThreadExchangeStreamCaptureMode(int* m) { ENTER("%d", *m); int old = mode; mode = *m; *m = old; return 0; }
API cuLibraryLoadData(void** library, const void* image, void* a, void* b, unsigned c, void* d, void* e, unsigned f) {
  const unsigned char* bytes = image;
  if (a || b || c || d || e || f) return 1;
  ENTER("%d", bytes[0] | bytes[1] << 8);
  pthread_mutex_lock(&lock), loaded++, pthread_mutex_unlock(&lock);
  *library = (void*)(uintptr_t)(0x100000 + (bytes[0] | bytes[1] << 8));
  return 0;
}
API cuLibraryUnload(void* library) { ENTER("%d", (int)((uintptr_t)library - 0x100000)); pthread_mutex_lock(&lock), loaded--, pthread_mutex_unlock(&lock); return 0; }
API cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  int row = (int)((uintptr_t)library - 0x100000), named;
  ENTER("%d", row);
  if (sscanf(name, "entry_%d", &named) != 1 || named != row) return 500;
  *kernel = (void*)(uintptr_t)(0x200000 + row);
  return 0;
}
API cuKernelGetFunction(void** function, void* kernel) {
  if (!depth) return 201;
  ENTER("%d in %#lx, mode %d", (int)((uintptr_t)kernel - 0x200000), (unsigned long)stack[depth - 1], mode);
  *function = kernel;
  return 0;
}
API cuKernelSetAttribute(int attribute, int value, void* kernel, int device) { ENTER("%d = %d of %d on %d", attribute, value, (int)((uintptr_t)kernel - 0x200000), device); return 0; }
API cuKernelGetParamInfo(void* kernel, size_t index, size_t* offset, size_t* size) {
  int row = (int)((uintptr_t)kernel - 0x200000);
  if (index >= (size_t)counts[row]) return 1;
  *offset = 0;
  *size = sizes[row][index];
  return 0;
}
API cuLaunchKernelEx(const Config* c, void* kernel, void** params, void** extra) {
  char values[2048] = "", attributes[256] = "";
  int row = (int)((uintptr_t)kernel - 0x200000);
  if (!depth || extra) return 201;
  for (unsigned i = 0; i < c->count; ++i) {
    int id, value[3];
    memcpy(&id, c->attributes + 72 * i, 4), memcpy(value, c->attributes + 72 * i + 8, 12);
    snprintf(attributes + strlen(attributes), sizeof attributes - strlen(attributes), "[%d:%d]", id, value[0]);
  }
  for (int i = 0; i < counts[row]; ++i) {
    int64_t v = 0;
    memcpy(&v, params[i], sizes[row][i]);
    snprintf(values + strlen(values), sizeof values - strlen(values), " %llx", (unsigned long long)v);
  }
  ENTER("%d grid %u,%u,%u block %u,%u,%u smem %u stream %#lx attributes %s in %#lx params%s", row, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1],
        c->block[2], c->smem, (unsigned long)(uintptr_t)c->stream, attributes, (unsigned long)stack[depth - 1], values);
  return 0;
}
