#include "error.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace cula {
namespace {

// A plain array: no constructor, no destructor and no allocation of ours, whatever thread fails and whenever it ends.
thread_local char message[1024];

}  // namespace

cula_status fail(cula_status status, const char* format, ...) noexcept {
  va_list list;
  va_start(list, format);
  std::vsnprintf(message, sizeof message, format, list);
  va_end(list);
  return status;
}

size_t last_error(char* buffer, size_t n) noexcept {
  const size_t length = std::strlen(message);
  if (buffer != nullptr && n > 0) {
    const size_t kept = length < n ? length : n - 1;
    std::memcpy(buffer, message, kept);
    buffer[kept] = 0;
  }
  return length;
}

}  // namespace cula
