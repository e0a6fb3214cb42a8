// What tests see of the inside of the stand-in library: calls of the CPU kernels, and the struct reading of a future version.
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "abi_struct.h"
#include "kernel_table.h"
#include "ops.h"
#include "api.h"

#define CULA_TEST extern "C" __attribute__((visibility("default")))

namespace cula {
namespace {

struct Call {
  int row;
  int64_t begin, end;
  unsigned char params[CULA_PARAM_BYTES];  // values, one after the other
};
std::mutex lock;
std::vector<Call> calls;

}  // namespace

void record_call(int row, void* const* params, int64_t begin, int64_t end) {
  const std::lock_guard<std::mutex> guard(lock);
  Call& call = calls.emplace_back();
  call.row = row;
  call.begin = begin;
  call.end = end;
  size_t at = 0;
  for (int i = 0; i < kKernels[row].param_count; ++i) {
    std::memcpy(call.params + at, params[i], kKernels[row].param_sizes[i]);
    at += kKernels[row].param_sizes[i];
  }
}

}  // namespace cula

CULA_TEST void test_reset_calls() {
  const std::lock_guard<std::mutex> guard(cula::lock);
  cula::calls.clear();
}

CULA_TEST int test_call_count() { return static_cast<int>(cula::calls.size()); }

CULA_TEST int test_call(int index, int64_t* begin, int64_t* end, unsigned char* params) {
  const cula::Call& call = cula::calls[index];
  *begin = call.begin;
  *end = call.end;
  std::memcpy(params, call.params, sizeof call.params);
  return call.row;
}

// read_args as a library would do it that knows `known` bytes of a struct whose first version had `first`.
CULA_TEST int test_read_args(size_t first, size_t known, const void* given, unsigned char* copy) {
  cula::Op op = *cula::find_op(CULA_OP_KDA_DECODE);
  op.first_size = first;
  op.size = known;
  return cula::read_args("test", op, given, copy);
}

// write_struct of a value with all bytes 0xAB.
CULA_TEST void test_write_struct(size_t known, void* given) {
  unsigned char value[256];
  std::memset(value, 0xAB, sizeof value);
  cula::write_struct(value, known, given);
}

CULA_TEST int test_throw(int kind) {
  CULA_API_BEGIN
  if (kind == 0) throw std::bad_alloc();
  if (kind == 1) throw std::runtime_error("what it says");
  if (kind == 2) throw 42;
  return CULA_OK;
  CULA_API_END("test_throw")
}
